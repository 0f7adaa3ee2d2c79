/* blend.h: what earlier requests found important, and how it goes into the present scores. Pure.
 *
 * Scores are normalised to a mean of 1 over the prefix, so that a token's share doesn't depend on the number of query
 * rows and heads, and hardly on the length of the prefix. The history of a (node, layer) is the moving average of its
 * tokens' normalised scores: the plain mean of the first IMP_HISTORY_SPAN requests, from then on an exponential average
 * in which the newest weighs 1 / IMP_HISTORY_SPAN. A history that was never updated is all 0.
 */
#ifndef IMP_SELECT_BLEND_H
#define IMP_SELECT_BLEND_H

#include <stddef.h>
#include <stdint.h>

enum { IMP_HISTORY_SPAN = 16 };

/* scores[n] divided by their mean, over the whole prefix; what isn't a number above 0 becomes 0. All 0 if the sum
 * is. */
void imp_normalise(const float *scores, size_t n, float *out);

/* The weight of a request that comes after `n_before` others. */
float imp_history_weight(uint32_t n_before);

/* history[n] of one node and layer, with its tokens' normalised scores: history += weight * (scores - history). */
void imp_history_update(float *history, const float *scores, size_t n, float weight);

typedef enum imp_blend_rule {
    IMP_BLEND_SUM = 0, /* score + weight * history */
    IMP_BLEND_MAX = 1  /* the larger of score and weight * history */
} imp_blend_rule;

typedef struct imp_blend {
    imp_blend_rule rule;
    float weight;
} imp_blend;

/* The default: which rule and weight did best is in docs/design/sketch.md. */
imp_blend imp_blend_default(void);

/* out[n] from normalised scores and history of the whole prefix; `out` may be `scores`. `history` NULL: there is none.
 * Tokens that are kept whatever they score (sinks, recent ones) are the business of what chooses: imp_top_k(),
 * imp_choose_pages(). */
void imp_blend_scores(imp_blend blend, const float *scores, const float *history, size_t n, float *out);

/* History as f16 for the disk, [2 * n] bytes, little-endian; and back. More than f16 holds is the most that it holds. A
 * value that isn't a number from 0 on is read as 0: statistics are advice, and damaged ones do no harm. */
void imp_history_encode(const float *history, size_t n, void *out);
void imp_history_decode(const void *in, size_t n, float *history);

#endif
