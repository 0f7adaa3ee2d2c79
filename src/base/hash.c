#include "base/hash.h"

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/status.h"

/* Compiled in rather than called: a prefix hash is 20 bytes a token, where the call would cost as much as the hash, and
 * the streaming state can live in our own memory. */
#define XXH_INLINE_ALL
#include <xxhash.h>

struct imp_hasher {
    XXH3_state_t state;
};

static imp_hash128 from_xxh(XXH128_hash_t h) { return (imp_hash128){.lo = h.low64, .hi = h.high64}; }

uint64_t imp_hash64(const void *bytes, size_t n_bytes, uint64_t seed)
{
    return XXH3_64bits_withSeed(bytes, n_bytes, seed);
}

imp_hash128 imp_hash128_of(const void *bytes, size_t n_bytes, uint64_t seed)
{
    return from_xxh(XXH3_128bits_withSeed(bytes, n_bytes, seed));
}

int imp_hash128_equal(imp_hash128 a, imp_hash128 b) { return a.lo == b.lo && a.hi == b.hi; }

imp_hasher *imp_hasher_new(void)
{
    imp_hasher *h = imp_aligned(_Alignof(imp_hasher), sizeof *h);
    if (h) XXH3_128bits_reset(&h->state);
    return h;
}

void imp_hasher_update(imp_hasher *h, const void *bytes, size_t n_bytes)
{
    if (n_bytes) XXH3_128bits_update(&h->state, bytes, n_bytes);
}

void imp_hasher_field(imp_hasher *h, const char *name, const void *bytes, size_t n_bytes)
{
    unsigned char length[8];
    size_t name_bytes = strlen(name);
    imp_put64(length, name_bytes);
    imp_hasher_update(h, length, sizeof length);
    imp_hasher_update(h, name, name_bytes);
    imp_put64(length, n_bytes);
    imp_hasher_update(h, length, sizeof length);
    imp_hasher_update(h, bytes, n_bytes);
}

imp_hash128 imp_hasher_digest(const imp_hasher *h) { return from_xxh(XXH3_128bits_digest(&h->state)); }

void imp_hasher_free(imp_hasher *h) { imp_free(h); }

imp_hash128 imp_prefix_hash(imp_hash128 before, const int32_t *tokens, size_t n_tokens)
{
    imp_hash128 h = before;
    for (size_t i = 0; i < n_tokens; i++) {
        unsigned char bytes[20];
        imp_put64(bytes, h.lo);
        imp_put64(bytes + 8, h.hi);
        imp_put32(bytes + 16, (uint32_t)tokens[i]);
        h = from_xxh(XXH3_128bits(bytes, sizeof bytes));
    }
    return h;
}

void imp_hash128_hex(imp_hash128 h, char out[33])
{
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < 16; i++) {
        out[i] = digits[h.hi >> (60 - 4 * i) & 15];
        out[16 + i] = digits[h.lo >> (60 - 4 * i) & 15];
    }
    out[32] = '\0';
}

int imp_hash128_parse(const char *hex, imp_hash128 *out)
{
    uint64_t parts[2] = {0, 0};
    for (int i = 0; i < 32; i++) {
        char c = hex[i]; /* a shorter string ends here: its NUL is no digit */
        uint64_t digit;
        if (c >= '0' && c <= '9') {
            digit = (uint64_t)(c - '0');
        } else if (c >= 'a' && c <= 'f') {
            digit = (uint64_t)(c - 'a') + 10;
        } else {
            return imp_fail(IMP_E_ARG, "not a hash of 32 lower-case hexadecimal digits");
        }
        parts[i / 16] = parts[i / 16] << 4 | digit;
    }
    if (hex[32] != '\0') return imp_fail(IMP_E_ARG, "not a hash of 32 lower-case hexadecimal digits");
    *out = (imp_hash128){.hi = parts[0], .lo = parts[1]};
    return 0;
}
