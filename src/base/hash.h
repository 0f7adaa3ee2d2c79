/* hash.h: XXH3 from libxxhash, and the hash that chains tokens. */
#ifndef IMP_BASE_HASH_H
#define IMP_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"

uint64_t imp_hash64(const void *bytes, size_t n_bytes, uint64_t seed);
imp_hash128 imp_hash128_of(const void *bytes, size_t n_bytes, uint64_t seed);
int imp_hash128_equal(imp_hash128 a, imp_hash128 b);

/* Streaming. */
typedef struct imp_hasher imp_hasher;
imp_hasher *imp_hasher_new(void); /* NULL: no memory */
void imp_hasher_update(imp_hasher *h, const void *bytes, size_t n_bytes);
/* A length-prefixed field: no two different lists of fields give the same bytes. */
void imp_hasher_field(imp_hasher *h, const char *name, const void *bytes, size_t n_bytes);
imp_hash128 imp_hasher_digest(const imp_hasher *h);
void imp_hasher_free(imp_hasher *h);

/* The prefix hash: h(t0..tn) = XXH3-128(h(t0..tn-1), tn), little-endian, starting from the space's id. It names a
 * position in the token tree without the tokens before it. */
imp_hash128 imp_prefix_hash(imp_hash128 before, const int32_t *tokens, size_t n_tokens);

void imp_hash128_hex(imp_hash128 h, char out[33]);   /* 32 lower-case digits, hi first */
int imp_hash128_parse(const char *hex, imp_hash128 *out); /* 0, or IMP_E_ARG */

#endif
