/* cache.h: which chunks stay in memory, and in which of two tiers. Pure: the tiers own the bytes, this decides.
 *
 *     device   the faster tier; a chunk that is used while it is in the host tier may be promoted to it
 *     host     what comes from disk and isn't worth the device, and what promotion displaces there
 *
 * A chunk is known by a 64-bit key and is in one tier at most. A tier without room for anything (0 bytes) isn't there.
 * The last tier that is there is the one below which is only the disk. Who may come in is the paper's rule (4.3),
 * the same for each step down:
 *
 *     admit, promote    into the device tier: if what has to go for it is worth less
 *     admit, displaced  into the last tier: LRU and LFU always, the others if what has to go is worth less
 *     else              out; the disk has every chunk, so that nothing is written
 *
 * Policies sit behind one table of functions; each keeps an order in each tier, a min-heap of what chunks are worth
 * (LFU, score, attention, aged) or a list (LRU), O(log n) or O(1) a step. Equals go by their last use or arrival in the
 * tier, the oldest first.
 *
 *     LRU        the least recently used goes; whatever is used is worth more than what is there
 *     LFU        the one with the fewest uses goes
 *     score      the lowest product of uses and share goes. The share is the moving average of the important share: the
 *                plain mean of the first 8 uses, from then on an exponential average in which each new use weighs 1/8.
 *                So the first uses count in full, and an old habit is half forgotten after 5 uses.
 *     attention  the one that has got the least attention goes: the sum of the shares of all its uses, each worth half
 *                as much once every known chunk has been used 8 times since, on average
 *     aged       score, but a use counts half as much once the chunks in the tiers have been used twice since, on
 *                average. Chosen on the first halves of two traces, judged on the others (docs/results/trace.md)
 *     none       nothing is ever admitted
 *
 * Attention is after ContiguousKV (arXiv 2601.13631), "attention-guided cache management to retain semantically
 * critical prefix data in memory". Taken from it: that the attention which chunks receive decides what is kept, chunk
 * by chunk, in each tier of memory. Its exact formula isn't reproduced (what was at hand of the paper doesn't give it):
 * the decay, its clock and the scale of shares are ours.
 *
 * Uses of keys that are in no tier ("ghosts") are counted too. Of these the 4 x (chunks in tiers) that were used or
 * evicted last are remembered, and 1,024 at least. A key of which nothing is known starts with no use. */
#ifndef IMP_CACHE_CACHE_H
#define IMP_CACHE_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"

typedef struct imp_policy imp_policy;

typedef enum imp_level { IMP_LEVEL_DEVICE, IMP_LEVEL_HOST, IMP_LEVELS, IMP_LEVEL_NONE = IMP_LEVELS } imp_level;

/* IMP_E_UNSUPPORTED: no such policy. IMP_E_NOMEM. */
int imp_policy_new(imp_cache kind, uint64_t device_bytes, uint64_t host_bytes, imp_policy **out);
void imp_policy_free(imp_policy *p);

/* Note a use of `key`, in a tier or not. `share` is what policy.h says of each policy. What is known of a key outlives
 * its eviction, within a bounded memory; where there is no memory for a new key, its use isn't counted. */
void imp_policy_use(imp_policy *p, uint64_t key, float share);

/* Where `key` is; IMP_LEVEL_NONE: in no tier. */
imp_level imp_policy_where(const imp_policy *p, uint64_t key);

/* Keys that a call has moved to another tier or out of the last one, in the order in which they had to go; one may come
 * twice, moved down and then out. imp_policy_where() tells where they are now. */
typedef struct imp_moved {
    uint64_t *keys; /* [max] */
    size_t max, n;
} imp_moved;

/* May `key` of `n_bytes` (> 0) come in? Where more than moved->max would have to go, it may not. Returns the tier into
 * which it came; IMP_LEVEL_NONE: it isn't wanted (or there is no memory), or is in a tier already. Then nothing
 * changed. */
imp_level imp_policy_admit(imp_policy *p, uint64_t key, uint64_t n_bytes, imp_moved *moved);
/* May `key` go from the host to the device tier? True if it went; on false nothing changed. */
bool imp_policy_promote(imp_policy *p, uint64_t key, imp_moved *moved);
/* `key` is gone from its tier, for another reason; its uses stay known as after an eviction. */
void imp_policy_drop(imp_policy *p, uint64_t key);

uint64_t imp_policy_bytes(const imp_policy *p, imp_level level);
size_t imp_policy_count(const imp_policy *p, imp_level level);

#endif
