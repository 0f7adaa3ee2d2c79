/* order.h: in which order a segment's tokens lie on disk. Pure. */
#ifndef IMP_SELECT_ORDER_H
#define IMP_SELECT_ORDER_H

#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"

/* Tokens of the core of a segment: an eighth of them, in whole chunks. */
uint32_t imp_order_core_tokens(uint32_t n_tokens, uint32_t chunk_tokens);

/* slots[n]: which token each slot holds, one layer's. `scores` [n]: the larger, the more important; what isn't a number
 * counts as 0, and equals go by the lower token.
 *     IMP_ORDER_TOKEN       0, 1, 2, ...
 *     IMP_ORDER_IMPORTANCE  by falling score
 *     IMP_ORDER_CORE        the n_core best, then the others, both in token order
 * `scores` NULL: nothing is known. Then the first 4 tokens and the last ones count as the core, and importance falls
 * as in the prompt. Scratch: [n]. */
void imp_order_slots(imp_order order, const float *scores, uint32_t n, uint32_t n_core, uint32_t *slots, float *scratch);

#endif
