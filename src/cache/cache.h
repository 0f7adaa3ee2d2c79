/* cache.h: which chunks stay in a tier. Pure: the tier owns the bytes, this decides.
 *
 * A chunk is known by a 64-bit key. Policies sit behind one table of functions; each keeps its order in a min-heap (LFU,
 * score) or a list (LRU), O(log n) or O(1) a step. */
#ifndef IMP_CACHE_CACHE_H
#define IMP_CACHE_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"

typedef struct imp_policy imp_policy;

int imp_policy_new(imp_cache kind, uint64_t capacity_bytes, imp_policy **out);
void imp_policy_free(imp_policy *p);

/* Note a use of `key`, present or not; `important_share` (0..1) is the share of its tokens that were important in this
 * request (the paper, 4.3: score = access frequency x moving average of that share). Frequencies outlive eviction, within
 * a bounded memory. */
void imp_policy_use(imp_policy *p, uint64_t key, float important_share);
bool imp_policy_has(const imp_policy *p, uint64_t key);

/* May `key` of `n_bytes` come in, and what has to go for it? Fills `victims` (at most max_victims) and `*n_victims`.
 * Returns true if it was admitted: it is then present, and the victims are gone. LRU and LFU always admit what fits at
 * all; score admits only if every victim scores lower. On false nothing changed. */
bool imp_policy_admit(imp_policy *p, uint64_t key, uint64_t n_bytes, uint64_t *victims, size_t max_victims,
                      size_t *n_victims);
void imp_policy_drop(imp_policy *p, uint64_t key);
uint64_t imp_policy_bytes(const imp_policy *p);
size_t imp_policy_count(const imp_policy *p);

#endif
