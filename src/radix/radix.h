/* radix.h: the token tree in memory. Pure: no disk, no lock (the owner locks).
 *
 * A node is a run of tokens below its parent; ids are the owner's (the catalogue's), 64 bits, never 0. Children are
 * found through one hash table keyed by (parent id, first token), so a node costs the same whatever its fan-out.
 *
 *        root                     root
 *         |  a b c d e   insert    |  a b c
 *        (1)            a b c x   (1)
 *                                 /   \
 *                              d e     x
 *                              (2)     (3)
 *
 * A split makes the lower half the new node, so that the upper keeps its id and its parent link.
 */
#ifndef IMP_RADIX_RADIX_H
#define IMP_RADIX_RADIX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct imp_radix imp_radix;

typedef struct imp_radix_node {
    uint64_t id, parent;      /* parent 0: below the root */
    uint64_t segment;         /* where its KV lies */
    uint32_t segment_first;   /* its first token's index inside the segment */
    uint32_t n_tokens;
    uint32_t depth;           /* tokens before it */
    uint32_t n_children;
    uint32_t leases;          /* loads that use it or something below it; the owner counts */
    bool derived, pinned;
    int64_t created_s, used_s;
    uint64_t hits;
    const int32_t *tokens;    /* [n_tokens]; owned by the tree; valid until the tree changes */
} imp_radix_node;

int imp_radix_new(imp_radix **out);
void imp_radix_free(imp_radix *t);

/* Add a node. `node->tokens` is copied; depth and n_children are the tree's to fill in.
 * IMP_E_ARG: the id is 0 or exists, the parent doesn't, no tokens, or a sibling starts with the same token (a derived
 * one too: the owner removes derived subtrees before it adds the exact node that replaces them). IMP_E_FULL,
 * IMP_E_NOMEM. On failure nothing changed. */
int imp_radix_add(imp_radix *t, const imp_radix_node *node);
/* Cut node `id` after `at` tokens (0 < at < n_tokens); the tail becomes node `new_id` with `id` as parent and takes
 * over the children. The tail has the node's segment, derived, pinned, times and hits, its own segment_first and depth,
 * and no leases: an owner whose loads use the tail counts them there too. Both share the tokens' memory.
 * IMP_E_NOTFOUND, IMP_E_ARG, IMP_E_FULL, IMP_E_NOMEM; on failure nothing changed. */
int imp_radix_split(imp_radix *t, uint64_t id, uint32_t at, uint64_t new_id);
/* Remove a leaf. IMP_E_ARG if it has children, IMP_E_NOTFOUND. Needs no memory. */
int imp_radix_remove(imp_radix *t, uint64_t id);

/* NULL if there is none. Valid until the tree changes; the owner may change leases, pinned, used_s, hits through it. */
imp_radix_node *imp_radix_get(imp_radix *t, uint64_t id);

typedef struct imp_radix_step {
    imp_radix_node *node;
    uint32_t n_matched; /* of its tokens; fewer than n_tokens only in the last step */
} imp_radix_step;

/* Follow `tokens` from the root; with `exact_only` derived nodes end the way. Writes at most `max_steps` steps (the
 * first ones) and returns how many there are. `*n_matched` is the sum over all. */
size_t imp_radix_match(imp_radix *t, const int32_t *tokens, size_t n_tokens, bool exact_only, imp_radix_step *steps,
                       size_t max_steps, size_t *n_matched);

/* Walk, parents before children, siblings as they came; a non-zero return ends it and is returned. `fn` may not add,
 * split or remove. */
int imp_radix_walk(imp_radix *t, int (*fn)(imp_radix_node *node, void *user), void *user);
/* The same for node `id` and what is below it. IMP_E_NOTFOUND. */
int imp_radix_walk_below(imp_radix *t, uint64_t id, int (*fn)(imp_radix_node *node, void *user), void *user);

/* By what leaves are compared: when they were used last, and a minute more for each use, 30 at most. So what many
 * requests share outlives a flood of prefixes that come once, and is forgotten all the same when nobody wants it. */
#define IMP_RADIX_HIT_S 60
#define IMP_RADIX_HITS_MOST 30
static inline int64_t imp_radix_worth_s(const imp_radix_node *n)
{
    return n->used_s + IMP_RADIX_HIT_S * (int64_t)(n->hits < IMP_RADIX_HITS_MOST ? n->hits : IMP_RADIX_HITS_MOST);
}

/* The leaf to evict next: no children, no leases, not pinned; smallest worth, then deepest, then smallest id. NULL if
 * there is none. O(log n): leaves are kept in a heap, and imp_radix_touch() reorders. */
imp_radix_node *imp_radix_victim(imp_radix *t);
/* Tell the tree that used_s, hits, leases or pinned of `node` changed: at once, before another node changes. */
void imp_radix_touch(imp_radix *t, imp_radix_node *node);

size_t imp_radix_count(const imp_radix *t);
size_t imp_radix_memory(const imp_radix *t); /* bytes in use by nodes, tokens and tables */

#endif
