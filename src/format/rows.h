/* rows.h: how rows are encoded on disk. Pure.
 *
 *     rest   keys                                    values
 *     RAW    the engine's bytes                      the engine's bytes
 *     Q8     8-bit codes, one f16 scale per channel  8-bit codes in blocks of 32, an f16 scale each (as Q8_0)
 *     K8V4   as Q8                                   4-bit codes in blocks of 32, an f16 scale and an f16 minimum each
 *     Q4     4-bit codes, an f16 scale and an f16    as K8V4
 *            minimum per channel
 *
 * A key channel's scale and minimum hold over IMP_GROUP_TOKENS tokens (keys of some models have huge outlier channels,
 * which row blocks would drown: docs/design). Rows to encode and decode are F32, F16 or BF16 (RAW: any type), at any
 * address. `n` is the number of elements of a row, head by head; the last block of a value row may be shorter.
 */
#ifndef IMP_FORMAT_ROWS_H
#define IMP_FORMAT_ROWS_H

#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"

/* Bytes of an encoded key or value row; 0 for what can't be. */
size_t imp_rows_key_bytes(imp_rest rest, imp_type type, size_t n);
size_t imp_rows_value_bytes(imp_rest rest, imp_type type, size_t n);
/* Bytes of a group's scales, f16: [n], or [2][n] (scales, then minima) with IMP_REST_Q4. 0 with IMP_REST_RAW. */
size_t imp_rows_scales_bytes(imp_rest rest, size_t n);

/* Encode a group of n_tokens (1..IMP_GROUP_TOKENS) key rows, `stride` bytes apart. codes: [n_tokens] encoded rows, one
 * behind the other; scales: imp_rows_scales_bytes(), not touched with IMP_REST_RAW. Values beyond what f16 scales hold are
 * kept as near as can be; NaN becomes 0. */
void imp_rows_keys_encode(imp_rest rest, imp_type type, const void *rows, size_t stride, size_t n_tokens, size_t n,
                          void *codes, uint16_t *scales);
/* Decode one encoded key row with its group's scales (NULL with IMP_REST_RAW) into `type`. */
void imp_rows_key_decode(imp_rest rest, imp_type type, const void *codes, const uint16_t *scales, size_t n, void *row);
void imp_rows_value_encode(imp_rest rest, imp_type type, const void *row, size_t n, void *out);
void imp_rows_value_decode(imp_rest rest, imp_type type, const void *in, size_t n, void *row);

float imp_f16_to_f32(uint16_t h);
uint16_t imp_f32_to_f16(float f);

#endif
