/* policy.h: inside src/cache. The state that all policies share, and the table of functions that makes them differ.
 *
 *     key --table--> entry --+-- in a tier: in the policy's order there (a list, or a heap)
 *                            +-- ghost:     in none, but what is known of it is kept; in a list, newest first
 *
 * What the `share` of a use means:
 *
 *     LRU, LFU   nothing
 *     score,     the share of the chunk's tokens that are important for this request: 0..1
 *     aged
 *     attention  the chunk's share of the attention mass that the request's queries give to all chunks of the prefix in
 *                this layer, times the number of those chunks: 0 and up, 1 for a chunk that gets the average. So it
 *                means the same for short and long prefixes
 *
 * Shares below 0 and NaN are 0. To add a policy that ranks entries by a number: one imp_policy_ops with the ranked
 * order's functions and a `rank` of its own.
 */
#ifndef IMP_CACHE_POLICY_H
#define IMP_CACHE_POLICY_H

#include "cache/cache.h"

#define IMP_NIL UINT32_MAX

typedef struct imp_entry {
    uint64_t key, n_bytes;
    uint64_t tick;       /* of its last use, or arrival in its tier; no two are equal */
    double rank;         /* what it is worth, as the policy counts; the lowest goes first */
    float share;         /* score, aged: moving average of the important share */
    uint32_t n_uses;     /* since the cache has known it; stops at UINT32_MAX */
    uint32_t prev, next; /* in a list; in the heap, prev is the place */
    imp_level level;
} imp_entry;

typedef struct imp_entry_list {
    uint32_t head, tail;
} imp_entry_list;

typedef struct imp_tier_order {
    uint64_t capacity, n_bytes;
    uint32_t n_entries;
    imp_entry_list list; /* LRU: newest first */
    uint32_t *heap;      /* ranked: [n_entries], room for all entries */
    uint32_t n_heap;
} imp_tier_order;

/* The functions on an order are for the tier of the entry's `level`. */
typedef struct imp_policy_ops {
    /* An entry came into the tier; it has the latest tick. */
    void (*enter)(imp_policy *p, uint32_t e);
    /* It is about to go. */
    void (*leave)(imp_policy *p, uint32_t e);
    /* Undo the latest leave() that wasn't undone, of an entry that worst() had given. */
    void (*restore)(imp_policy *p, uint32_t e);
    /* Its tick is the latest, and its rank may have changed. */
    void (*used)(imp_policy *p, uint32_t e);
    /* The next to go; IMP_NIL if nothing is there. */
    uint32_t (*worst)(const imp_policy *p, imp_level level);
    /* What an entry is worth after one more use, which n_uses counts already; NULL: entries aren't ranked, and the one
     * used last is worth more than all others. */
    double (*rank)(imp_policy *p, imp_entry *x, float share);
    double unused; /* the rank of what was never used */
    /* May an entry come into the last tier only for entries of lower rank? */
    bool selective;
} imp_policy_ops;

struct imp_policy {
    const imp_policy_ops *ops;
    uint64_t tick;
    double age; /* attention, aged: log2 of what a share of 1, or a use, counts now, beside one of long ago */
    imp_entry *entries;
    uint32_t n_entries, free; /* allocated; list of unused ones */
    uint32_t *slots;          /* the table: index + 1, 0 for empty */
    uint32_t n_slots;
    uint32_t n_ghosts;
    imp_entry_list ghosts;
    imp_tier_order tiers[IMP_LEVELS];
};

extern const imp_policy_ops imp_policy_lru, imp_policy_lfu, imp_policy_score, imp_policy_attention,
    imp_policy_aged;

/* Chunks in tiers. */
static inline uint32_t imp_policy_present(const imp_policy *p)
{
    return p->tiers[IMP_LEVEL_DEVICE].n_entries + p->tiers[IMP_LEVEL_HOST].n_entries;
}

void imp_entry_list_first(imp_policy *p, imp_entry_list *l, uint32_t e);
void imp_entry_list_last(imp_policy *p, imp_entry_list *l, uint32_t e);
void imp_entry_list_take(imp_policy *p, imp_entry_list *l, uint32_t e);

#endif
