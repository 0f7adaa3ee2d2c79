/* jaccard.h: do the probe heads agree, and what do they agree on (the paper, section 4.1). Pure.
 *
 * A set is a rising list of token indices, as imp_top_k() gives. Each probe head has one. Where the sets are more alike
 * than chance would make them, their votes stand for all heads of the layer.
 */
#ifndef IMP_SELECT_JACCARD_H
#define IMP_SELECT_JACCARD_H

#include <stddef.h>
#include <stdint.h>

typedef struct imp_index_set {
    const uint32_t *indices; /* rising, no index twice */
    size_t n;
} imp_index_set;

/* |A and B| / |A or B|; 1 for two empty sets. */
double imp_jaccard(imp_index_set a, imp_index_set b);

/* The mean over all pairs of `n_sets`; 1 for fewer than two sets. */
double imp_jaccard_mean(const imp_index_set *sets, size_t n_sets);

/* About what two random sets of k out of n tokens have: r / (2 - r) with r = k / n. 1 for n = 0. */
double imp_jaccard_random(size_t k, size_t n);

/* The k tokens of n that most sets hold, as rising indices in out[k] (k is cut to n). With equal votes the higher
 * scores[] (summed over the probe heads; NaN lowest) wins, then the lower index. Tokens without a vote come last by the
 * same rule. Indices of sets must be below n. Scratch: votes[n], scratch[2 * n]. */
void imp_vote(const imp_index_set *sets, size_t n_sets, const float *scores, size_t n, size_t k, uint32_t *out,
              uint32_t *votes, float *scratch);

#endif
