/* choose.h: what src/select doesn't have of the ways to choose tokens. Pure. */
#ifndef IMP_SESSION_CHOOSE_H
#define IMP_SESSION_CHOOSE_H

#include <stddef.h>
#include <stdint.h>

/* IMP_IDENTIFY_RANDOM: scores[n] in [0, 1) that follow from layer and position alone. */
void imp_random_scores(uint32_t layer, size_t n, float *scores);

/* IMP_IDENTIFY_PROBE: the i-th probe head, and the KV head that it uses: the first query heads, or with `spread` heads
 * of different KV heads: the first of each, then the second of each, and so on. i < n_heads, of n_kv_heads a multiple.
 * */
uint32_t imp_probe_head(uint32_t i, uint32_t n_heads, uint32_t n_kv_heads, unsigned spread, uint32_t *kv_head);

/* IMP_IDENTIFY_CHUNKS: k of n tokens (k <= n), rising: units as a whole, those with the largest sum of their tokens'
 * scores first; of the last one its best tokens, so that k are there. Kept tokens (of the k those from the start come
 * first, then those at the end) are chosen in any case, and units that hold any come first. Equals go by the lower unit
 * or token; what isn't a number above 0 counts as 0.
 * chosen[n]: 1 for those. Scratch: [2 * n_units], and sums [n_units]. */
void imp_choose_units(const float *scores, size_t n, const uint32_t *unit_of, size_t n_units, size_t k,
                      size_t keep_first, size_t keep_last, uint32_t *out, unsigned char *chosen, uint32_t *scratch,
                      double *sums);

/* The share of the scores above 0 that out[k] hold; k / n where there are none. */
double imp_mass_of(const float *scores, size_t n, const uint32_t *chosen, size_t k);

/* How few tokens hold a share of the mass: the curve of several layers, added up, then the first place where it is high
 * enough. imp_mass_curve_add() adds to curve[n + 1], for each k, the share of scores[n] that its k largest hold: as
 * imp_mass_of() counts, k / n where no score is above 0. Scratch: [2 * n]. */
void imp_mass_curve_add(const float *scores, size_t n, double *curve, uint32_t *scratch);

/* The smallest k in [least, most] with curve[k] >= sum; `most` if there is none. */
size_t imp_mass_count(const double *curve, double sum, size_t least, size_t most);

#endif
