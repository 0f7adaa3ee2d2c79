/* sketch.h: keys in a sixteenth of their bytes, good enough to tell which tokens matter. Pure.
 *
 * The keys of a (layer, KV head), before RoPE, lie near a small subspace around their mean. A *basis* knows the mean
 * and the directions; it is learned once from some keys and serves all tokens of its space. The *codes* of a token are
 * its coordinates in few bits. To find the important tokens the keys are rebuilt from the codes, RoPE is put on again,
 * and the exact scoring of select.h runs over them (docs/design/sketch.md has figures and what else was tried).
 *
 *     learn    keys - RoPE -> mean, directions by falling weight, a step for each
 *     encode   key - RoPE - mean -> along each direction: floor(coordinate / step), in 4 bits or 2
 *     rebuild  mean + sum of (code + 1/2) x step x direction, + RoPE
 *
 * Directions. Plain principal directions keep most of the keys' energy, but what counts is the error of q . k. Given a
 * sample of queries, the basis is made for their metric W (the mean of q q^T, queries turned to what they are before
 * RoPE at many distances): with W = L L^T, the directions are principal for L^T k. Few queries suffice, of any request.
 *
 * Bits. Each token and KV head has n_bits. The first n4 directions get 4 bits, the next n2 get 2, with 4 n4 + 2 n2 =
 * n_bits; n4 is what gives the least error on the keys learned from. So is each step.
 *
 * Codes of a token (n_kv_heads x n_bits / 8 bytes), head by head, low bits first; n4 is even and n2 a multiple of 4:
 *
 *     | n4 / 2 bytes of two 4-bit codes | n2 / 4 bytes of four 2-bit codes |
 *
 * Code c stands for c - 8 + 1/2 steps, or c - 2 + 1/2 with 2 bits.
 *
 * Bytes of a basis, little-endian:
 *
 *     u32 version (1), n_kv_heads, head_dim, n_bits; then for each KV head:
 *     u32 n4, n2
 *     f16 mean[head_dim]
 *     f32 decode_scale[n4 + n2], encode_scale[n4 + n2]
 *     f16 decode[n4 + n2][head_dim]     step x direction = decode_scale x decode
 *     f16 encode[n4 + n2][head_dim]     coordinate / step = encode_scale x encode . (key - mean)
 */
#ifndef IMP_SELECT_SKETCH_H
#define IMP_SELECT_SKETCH_H

#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"
#include "select/rope.h"
#include "select/select.h"

/* Of one layer. Constant once made: any number of threads may use it. */
typedef struct imp_basis imp_basis;

/* Rows of keys as the engine keeps them: token i's [n_kv_heads][head_dim] at rows + i * stride (bytes), at position
 * first_position + i. */
typedef struct imp_key_rows {
    imp_type type;
    uint32_t n_kv_heads, head_dim;
    const void *rows;
    size_t stride, n_tokens, first_position;
} imp_key_rows;

/* Bits of a token and KV head that serve well: head_dim, a sixteenth of an f16 key, as a multiple of 8. */
uint32_t imp_sketch_bits(uint32_t head_dim);

/* Learn a basis of `n_bits` (a multiple of 8, 8 .. 4 * head_dim) from keys of at least one token. `query`, its last
 * `max_rows` rows, is the sample of queries; NULL: all directions count alike. `rope` is the layer's; NULL: the model
 * has none. IMP_E_ARG: an odd head size or one over 1,024, bits out of range, positions that `rope` doesn't cover,
 * heads that don't divide; IMP_E_UNSUPPORTED: a type or a head size that it can't have; IMP_E_NOMEM. */
int imp_basis_learn(const imp_key_rows *keys, const imp_query *query, size_t max_rows, const imp_rope_table *rope,
                    uint32_t n_bits, imp_basis **out);

/* The bytes of a basis, valid as long as it is, and a basis from such bytes (copied): just the same one.
 * IMP_E_CORRUPT: they aren't a basis; IMP_E_VERSION: of another version; IMP_E_NOMEM. */
const void *imp_basis_bytes(const imp_basis *b, size_t *n_bytes);
int imp_basis_parse(const void *bytes, size_t n_bytes, imp_basis **out);
void imp_basis_free(imp_basis *b);
size_t imp_basis_memory(const imp_basis *b); /* bytes that it takes here */

uint32_t imp_basis_kv_heads(const imp_basis *b);
uint32_t imp_basis_head_dim(const imp_basis *b);

/* Bytes of one token's codes in one layer. */
size_t imp_sketch_token_bytes(const imp_basis *b);

/* The codes of all `keys`: [n_tokens][imp_sketch_token_bytes()]. Elements that are no number count as the mean.
 * IMP_E_ARG: another shape than the basis', or positions that `rope` doesn't cover; IMP_E_UNSUPPORTED, IMP_E_NOMEM. */
int imp_sketch_encode(const imp_basis *b, const imp_key_rows *keys, const imp_rope_table *rope, void *codes);

/* The keys that n_tokens codes stand for, with RoPE: keys[n_tokens][n_kv_heads][head_dim]. Tokens stand at
 * first_position and on, which `rope` must cover. */
void imp_sketch_rebuild(const imp_basis *b, const void *codes, size_t n_tokens, size_t first_position,
                        const imp_rope_table *rope, float *keys);

/* Codes of consecutive tokens with their basis: nodes of one prefix may have bases of different age. */
typedef struct imp_sketch_run {
    const imp_basis *basis;
    const void *codes;
    size_t n_tokens;
} imp_sketch_run;

/* imp_score_made() over the keys that the runs stand for, the first token at position first_position. */
int imp_sketch_score(imp_scorer *s, const imp_sketch_run *runs, size_t n_runs, size_t first_position,
                     const imp_rope_table *rope, const imp_query *query, size_t max_rows, float *scores,
                     float *per_kv_head);

#endif
