/* rope.h: rotary position embedding of rows in memory, and its inverse. Pure.
 *
 * Engines keep keys after RoPE. A sketch is made of keys before it, so RoPE is taken off when the sketch is made and
 * put on again when the keys are rebuilt. Dims come in pairs; pair i of a row at position p is turned by the angle
 *
 *     a(p, i) = p * base^(-2 i / n_dims) / factors[i] * freq_scale        (without YaRN)
 *
 * and multiplied by a magnitude. Which dims are a pair differs between models:
 *
 *     IMP_ROPE_NORM   (0, 1) (2, 3) ..                         llama
 *     IMP_ROPE_NEOX   (0, n/2) (1, n/2 + 1) ..  n = n_dims     qwen2 and most others
 *
 * Dims outside [first_dim, first_dim + n_dims) stay as they are. Angles are computed in float, step by step as ggml
 * does it, so that what is taken off is what was put on.
 */
#ifndef IMP_SELECT_ROPE_H
#define IMP_SELECT_ROPE_H

#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"

/* Cosines and sines of the positions first .. first + n - 1, 4 * n_dims bytes each. May be used by many threads. */
typedef struct imp_rope_table imp_rope_table;

/* `rope` is not kept. IMP_E_ARG: a value out of the ranges above, or dims beyond head_dim. */
int imp_rope_table_new(const imp_rope *rope, uint32_t head_dim, size_t first, size_t n, imp_rope_table **out);
void imp_rope_table_free(imp_rope_table *t);

/* Row i of one head, head_dim floats at rows + i * row_stride, stands at position first + i; in place. The positions
 * must be in the table. */
void imp_rope_apply(const imp_rope_table *t, size_t first, float *rows, size_t row_stride, size_t n_rows);
void imp_rope_undo(const imp_rope_table *t, size_t first, float *rows, size_t row_stride, size_t n_rows);

/* Whether all of the positions first .. first + n - 1 are in the table, and the head size it is for. */
int imp_rope_table_covers(const imp_rope_table *t, size_t first, size_t n);
uint32_t imp_rope_table_head_dim(const imp_rope_table *t);

#endif
