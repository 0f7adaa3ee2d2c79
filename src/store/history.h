/* history.h: what requests found important in a segment's tokens, layer by layer. Advice: it may be lost, or be
 * damaged, without harm to any answer.
 *
 * A record belongs to a segment and has, for each layer and token of it,
 *
 *     history         moving average of normalised scores (select/blend.h), with the number of requests in it
 *     rankings        by the prefill's own queries, and by reconstruction: the largest normalised score seen
 *
 * Records are kept in memory under a bound, written to the catalogue in batches (a table of their own, outside the
 * meta row's count), and go with their segment. A reorder hands a segment's record on to the segment that replaces it.
 *
 * Threads: any, at any time. A record is never waited for longer than it takes to copy a layer's row.
 */
#ifndef IMP_STORE_HISTORY_H
#define IMP_STORE_HISTORY_H

#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"
#include "store/store.h"

typedef struct imp_history imp_history;

/* The record of `seg`, from memory, from the catalogue, or a new empty one, held until it is put back. */
int imp_history_get(imp_store *s, const imp_seg *seg, imp_history **out); /* IMP_E_NOMEM */
void imp_history_put(imp_store *s, imp_history *h);

/* Tokens [first, first + n) of the segment in one layer. Returns the number of requests that are in it; 0: none, and
 * out[n] is all 0. */
uint32_t imp_history_read(const imp_history *h, uint32_t layer, uint32_t first, size_t n, float *out);
/* Add a request's scores of tokens [first, first + n), normalised over the whole prefix (imp_normalise()). Counts one
 * request more in this layer: a load calls it at most once a pass and layer for each segment. */
void imp_history_add(imp_history *h, uint32_t layer, uint32_t first, size_t n, const float *scores);

/* A ranking's scores; false if there are none for this layer (out[n] is all 0 then). */
bool imp_history_ranking(const imp_history *h, imp_rank rank, uint32_t layer, uint32_t first, size_t n, float *out);
/* Raise a ranking's scores to scores[n] where those are larger. */
void imp_history_rank(imp_history *h, imp_rank rank, uint32_t layer, uint32_t first, size_t n, const float *scores);

/* Requests since the segment was last written in an order, over its layers the largest. */
uint32_t imp_history_news(const imp_history *h);

#endif
