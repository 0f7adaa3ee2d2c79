/* cache.h: which chunks stay in a tier. Pure: the tier owns the bytes, this decides.
 *
 * A chunk is known by a 64-bit key. Policies sit behind one table of functions; each keeps its order in a min-heap
 * (LFU, score) or a list (LRU), O(log n) or O(1) a step. Equals go by their last use or admission, the oldest first.
 *
 *     LRU     the least recently used goes
 *     LFU     the one with the fewest uses goes
 *     score   the lowest product of uses and share goes. The share is the moving average of the important share: the
 *             plain mean of the first 8 uses, from then on an exponential average in which each new use weighs 1/8. So
 *             the first uses count in full, and an old habit is half forgotten after 5 uses.
 *     none    nothing is ever admitted
 *
 * Uses of keys that aren't present ("ghosts") are counted too. Of these the 4 x imp_policy_count() that were used or
 * evicted last are remembered, and 1,024 at least. A key of which nothing is known starts with no use. */
#ifndef IMP_CACHE_CACHE_H
#define IMP_CACHE_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"

typedef struct imp_policy imp_policy;

/* IMP_E_UNSUPPORTED: no such policy. IMP_E_NOMEM. */
int imp_policy_new(imp_cache kind, uint64_t capacity_bytes, imp_policy **out);
void imp_policy_free(imp_policy *p);

/* Note a use of `key`, present or not; `important_share` (0..1) is the share of its tokens that were important in this
 * request (the paper, 4.3: score = access frequency x moving average of that share). Frequencies outlive eviction,
 * within a bounded memory; where there is no memory for a new key, its use isn't counted. */
void imp_policy_use(imp_policy *p, uint64_t key, float important_share);
bool imp_policy_has(const imp_policy *p, uint64_t key);

/* May `key` of `n_bytes` (> 0) come in, and what has to go for it? Fills `victims` and `*n_victims`, the first to go
 * first; where more than max_victims would have to go, the key isn't admitted. A key that is present already is
 * admitted without victims and keeps its size.
 * Returns true if it was admitted: it is then present, and the victims are gone. LRU and LFU always admit what fits at
 * all; score admits only if every victim scores lower. On false (or without memory, which is false too) nothing
 * changed. */
bool imp_policy_admit(imp_policy *p, uint64_t key, uint64_t n_bytes, uint64_t *victims, size_t max_victims,
                      size_t *n_victims);
/* `key` is gone from the tier, for another reason than admission; its uses stay known as after an eviction. */
void imp_policy_drop(imp_policy *p, uint64_t key);
uint64_t imp_policy_bytes(const imp_policy *p);
size_t imp_policy_count(const imp_policy *p);

#endif
