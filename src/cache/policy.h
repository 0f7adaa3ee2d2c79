/* policy.h: inside src/cache. The state that all policies share, and the table of functions that makes them differ.
 *
 *     key --table--> entry --+-- present: in the policy's order (a list, or a heap)
 *                            +-- ghost:   not in the tier, but its frequency is remembered; in a list, newest first
 *
 * To add a policy: one imp_policy_ops. One that ranks entries by a number (an attention-guided one, say, that ranks by
 * what `share` has collected of attention) takes the ranked order's functions and adds only `rank`.
 */
#ifndef IMP_CACHE_POLICY_H
#define IMP_CACHE_POLICY_H

#include "cache/cache.h"

#define IMP_NIL UINT32_MAX

typedef struct imp_entry {
    uint64_t key, n_bytes;
    uint64_t tick;       /* of its last use or admission; no two are equal */
    uint32_t n_uses;     /* since the cache has known it; stops at UINT32_MAX */
    float share;         /* moving average of the important share */
    uint32_t prev, next; /* in a list; in the heap, prev is the place */
    bool present;
} imp_entry;

typedef struct imp_entry_list {
    uint32_t head, tail;
} imp_entry_list;

typedef struct imp_policy_ops {
    /* An entry became present; it has the latest tick. */
    void (*enter)(imp_policy *p, uint32_t e);
    /* It is to be no longer present. */
    void (*leave)(imp_policy *p, uint32_t e);
    /* Undo the latest leave() that wasn't undone, of an entry that worst() had given. */
    void (*restore)(imp_policy *p, uint32_t e);
    /* A present entry's tick, n_uses and share changed. */
    void (*used)(imp_policy *p, uint32_t e);
    /* The next to go; IMP_NIL if nothing is present. */
    uint32_t (*worst)(const imp_policy *p);
    /* What the ranked order sorts by, the lowest goes first, then the smallest tick; lists: NULL. */
    double (*rank)(const imp_entry *e);
    /* May an entry come in only for entries of lower rank? */
    bool selective;
} imp_policy_ops;

struct imp_policy {
    const imp_policy_ops *ops;
    uint64_t capacity, n_bytes, tick;
    imp_entry *entries;
    uint32_t n_entries, free; /* allocated; list of unused ones */
    uint32_t *slots;          /* the table: index + 1, 0 for empty */
    uint32_t n_slots;
    uint32_t n_present, n_ghosts;
    imp_entry_list ghosts;
    imp_entry_list order; /* LRU: the present ones, newest first */
    uint32_t *heap;       /* ranked: room for all entries */
    uint32_t n_heap;
};

extern const imp_policy_ops imp_policy_lru, imp_policy_lfu, imp_policy_score;

void imp_entry_list_first(imp_policy *p, imp_entry_list *l, uint32_t e);
void imp_entry_list_last(imp_policy *p, imp_entry_list *l, uint32_t e);
void imp_entry_list_take(imp_policy *p, imp_entry_list *l, uint32_t e);

#endif
