/* trace.h: requests as lists of block ids, replayed against a cache of blocks. Pure arithmetic, but for the policies,
 * which are the library's own (imp_sim_*).
 *
 * A block is so many tokens of a prompt's KV; its id stands for these tokens and all before them. So equal ids have
 * equal ancestors, and the blocks of all requests make a tree:
 *
 *     request 0   a b c         a ─ b ┬ c
 *     request 1   a b d               └ d        request 1 finds a and b
 *
 * A block counts as a hit in two ways. *Prefix*: it and all before it are in memory; what serves whole prefixes from
 * one memory can't use others. *Tier*: it is in memory; what keeps everything on disk, as Impress does, is spared a
 * read by each. Hits are those at the start of a request. Then all its blocks are used, the last first, so that a
 * policy that goes by time lets ends of prompts go before their beginnings.
 *
 * Each use has a weight: the share of the block's tokens that matter to the request. Sums of weights over hits say how
 * much of the bytes that matter was in memory.
 */
#ifndef REPLAY_TRACE_H
#define REPLAY_TRACE_H

#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"

typedef struct replay_trace {
    size_t n_requests, n_uses, n_blocks;
    uint32_t *first;       /* [n_requests + 1]: a request's uses are blocks[first[r]] .. blocks[first[r + 1] - 1] */
    uint32_t *blocks;      /* [n_uses]: 0 .. n_blocks - 1, numbered by first appearance */
    uint32_t block_tokens; /* tokens of a whole block */
} replay_trace;

void replay_trace_free(replay_trace *t); /* zeroed ones too */

/* The same requests in smaller blocks: each becomes `parts`, one behind the other. Returns 0 or IMP_E_NOMEM. */
int replay_trace_split(const replay_trace *t, uint32_t parts, replay_trace *out);

/* What a cache did. Ratios are over all uses; weights over the sum of all weights. */
typedef struct replay_hits {
    size_t prefix, tier;                 /* uses that hit */
    double prefix_weight, tier_weight;   /* their weights */
} replay_hits;

/* A policy over a cache of `capacity` blocks. `weights` [n_uses] in 0..1. Returns 0 or a negative imp_status. */
int replay_policy(const replay_trace *t, imp_cache policy, size_t capacity, const float *weights, replay_hits *out);

/* The best any policy could do for the number of hits, knowing all requests ahead: Belady's MIN, which lets go what is
 * needed last, the deepest first of equals, and may decline to keep what a request brings. Since a block is needed no
 * later than those behind it, what it keeps is closed under ancestors: no prefix hit is lost, and it is the optimum for
 * both ways to count. Returns 0 or IMP_E_NOMEM. */
int replay_min(const replay_trace *t, size_t capacity, const float *weights, replay_hits *out);

/* A sum of weights that no policy can exceed, whichever way hits are counted. To hit, a block must have lain in the
 * cache since its last use; no more than `capacity` can at once. With a price for the place between each two requests,
 * the optimum is at most what all places cost and what hits are worth beyond their places (Lagrange); `rounds` steps
 * along the subgradient look for prices that make it small. Without prefix semantics that problem has no gap between
 * the least of these and the optimum. `reached`: the best sum known to be reachable, by which steps are measured. */
int replay_weight_bound(const replay_trace *t, size_t capacity, const float *weights, unsigned rounds, double reached,
                        double *out);

#endif
