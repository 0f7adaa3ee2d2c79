/* rows.h: how rows are encoded on disk. Pure.
 *
 * RAW keeps the engine's bytes. Q8 keeps a key as 8-bit codes with one f16 scale per channel over IMP_GROUP_TOKENS tokens
 * (keys of some models have huge outlier channels, which row blocks would drown: docs/design), and a value in blocks of 32
 * with an f16 scale each (the layout of Q8_0). Rows to encode and decode are F32, F16 or BF16, at any address.
 */
#ifndef IMP_FORMAT_ROWS_H
#define IMP_FORMAT_ROWS_H

#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"

/* Encode a group of n_tokens (1..IMP_GROUP_TOKENS) key rows of `n` elements (head by head), `stride` bytes apart.
 * codes: [n_tokens][n] int8; scales: [n] f16. Values beyond what f16 holds are kept as near as can be; NaN becomes 0. */
void imp_rows_k8_encode(imp_type type, const void *rows, size_t stride, size_t n_tokens, size_t n, int8_t *codes,
                        uint16_t *scales);
/* Decode the key row codes[n] with its group's scales into `type`. */
void imp_rows_k8_decode(imp_type type, const int8_t *codes, const uint16_t *scales, size_t n, void *row);

/* A value row in blocks of 32: bytes = n / 32 * 34; n that is no multiple of 32 ends with a shorter block (2 + n % 32). */
size_t imp_rows_v8_bytes(size_t n);
void imp_rows_v8_encode(imp_type type, const void *row, size_t n, void *out);
void imp_rows_v8_decode(imp_type type, const void *in, size_t n, void *row);

float imp_f16_to_f32(uint16_t h);
uint16_t imp_f32_to_f16(float f);

#endif
