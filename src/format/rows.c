/* rows.c: rows of 8 and 4 bits. Everything here is branch-free over stripes of elements, so that compilers turn the
 * loops into SIMD. The step between f16 and f32 exists a second time, with x86's own instructions, chosen when the
 * program runs, and so do the two decoders of k8v4 for f16, with which loads spend their time. They give the same bits.
 *
 * Scales are rounded up to f16: then the largest value of a channel or block never exceeds 127 of them, and the error is
 * at most half a scale. Rounded to nearest, a scale among f16's subnormals could be a third too small. With 4 bits minima
 * are rounded down for the same reason, and then scales up.
 *
 * 4 bits have a minimum because it pays: the root mean square error over 32 Gaussian values is 0.078 of their deviation,
 * where signed codes with a scale alone give 0.086; with a mean of two deviations it stays so, where that becomes 0.146.
 * Over a channel's 64 keys: 0.090 in both cases, against 0.095 and 0.156.
 */
#include "format/rows.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_F16C 1
#include <cpuid.h>
#include <immintrin.h>
#endif

enum {
    BLOCK = 32,       /* elements that share a value's scale */
    STRIPE = 64,      /* elements worked on at a time; a whole number of blocks */
    LAST4 = 15,       /* the last 4-bit code */
    F16_MAX_BITS = 0x7bff,
};

#define F16_MAX 65504.0f
#define VALUE_MAX (127.0f * F16_MAX) /* the largest that a code and a scale can say */

#define INLINE static inline __attribute__((always_inline))

/* ---- f16 and bf16, by integer arithmetic */

INLINE uint32_t bits_of(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

INLINE float float_of(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* cond ? x : y by a mask: a `?:` with float arithmetic on one side keeps gcc from vectorising the loop. */
INLINE uint32_t pick(bool cond, uint32_t x, uint32_t y)
{
    uint32_t mask = 0u - (uint32_t)cond;
    return (x & mask) | (y & ~mask);
}

INLINE float f16_to_f32(uint16_t h)
{
    uint32_t a = (uint32_t)(h & 0x7fff) << 13; /* f32's exponent is larger: by 112, and by 224 for Inf and NaN */
    uint32_t big = a + pick(a >= 0x0f800000, 224u << 23, 112u << 23);
    uint32_t small = bits_of((float)(int32_t)(h & 0x3ff) * 0x1p-24f); /* subnormal: a whole number of 2^-24 */
    return float_of(pick(a < 0x00800000, small, big) | (uint32_t)(h & 0x8000) << 16);
}

INLINE uint16_t f32_to_f16(float f)
{
    uint32_t u = bits_of(f), a = u & 0x7fffffff;
    /* Round to even at bit 13 (the carry may reach the exponent, as it should), then rebase the exponent. */
    uint32_t normal = (a + 0xfff + (a >> 13 & 1) - (112u << 23)) >> 13;
    /* Below 2^-14: 0.5's last bit is worth 2^-24, f16's smallest step, so the adder rounds for us. */
    uint32_t small = bits_of(float_of(pick(a < 0x38800000, a, 0)) + 0.5f) - 0x3f000000;
    uint32_t h = pick(a < 0x38800000, small, normal);
    h = pick(a >= 0x477ff000, 0x7c00, h); /* 65520 and more */
    h = pick(a > 0x7f800000, 0x7e00, h);
    return (uint16_t)(h | (u >> 16 & 0x8000));
}

INLINE uint16_t f32_to_bf16(float f) /* finite */
{
    uint32_t u = bits_of(f);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

float imp_f16_to_f32(uint16_t h) { return f16_to_f32(h); }

uint16_t imp_f32_to_f16(float f) { return f32_to_f16(f); }

/* ---- a stripe between f16 and f32 */

#ifdef HAVE_F16C
#define F16C __attribute__((target("avx,f16c")))

F16C static void widen_f16c(const uint16_t *restrict h, float *restrict f)
{
    for (size_t i = 0; i < STRIPE; i += 8) {
        _mm256_storeu_ps(f + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(h + i))));
    }
}

F16C static void narrow_f16c(const float *restrict f, uint16_t *restrict h)
{
    for (size_t i = 0; i < STRIPE; i += 8) {
        __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(f + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128((__m128i *)(void *)(h + i), eight);
    }
}

/* 1: yes, -1: no, 0: not asked yet. Threads that ask at once all find the same, so relaxed order will do. */
static bool have_f16c(void)
{
    static _Atomic signed char known;
    signed char k = atomic_load_explicit(&known, memory_order_relaxed);
    if (k == 0) {
        unsigned a, b, c = 0, d;
        /* "avx" says that the operating system saves the wide registers. */
        k = __builtin_cpu_supports("avx") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) ? 1 : -1;
        atomic_store_explicit(&known, k, memory_order_relaxed);
    }
    return k > 0;
}
#endif

static void widen(const uint16_t *restrict h, float *restrict f)
{
#ifdef HAVE_F16C
    if (have_f16c()) {
        widen_f16c(h, f);
        return;
    }
#endif
    for (size_t i = 0; i < STRIPE; i++) f[i] = f16_to_f32(h[i]);
}

static void narrow(const float *restrict f, uint16_t *restrict h)
{
#ifdef HAVE_F16C
    if (have_f16c()) {
        narrow_f16c(f, h);
        return;
    }
#endif
    for (size_t i = 0; i < STRIPE; i++) h[i] = f32_to_f16(f[i]);
}

/* ---- the start of a row of f16, as far as whole vectors reach, straight from codes. No FMA: it rounds once where
 * other machines round twice. */

#ifdef HAVE_F16C
#define AVX2 __attribute__((target("avx2,f16c")))

static bool have_avx2(void)
{
    static _Atomic signed char known; /* as that of have_f16c() */
    signed char k = atomic_load_explicit(&known, memory_order_relaxed);
    if (k == 0) {
        k = have_f16c() && __builtin_cpu_supports("avx2") ? 1 : -1;
        atomic_store_explicit(&known, k, memory_order_relaxed);
    }
    return k > 0;
}

/* Eight elements as store() does it: a NaN becomes 0 of its sign, and everything else no more than F16_MAX. */
AVX2 INLINE void store8(__m256 x, unsigned char *to)
{
    const __m256 sign = _mm256_set1_ps(-0.0f), most = _mm256_set1_ps(F16_MAX);
    x = _mm256_and_ps(x, _mm256_or_ps(_mm256_cmp_ps(x, x, _CMP_ORD_Q), sign));
    x = _mm256_max_ps(_mm256_min_ps(x, most), _mm256_xor_ps(most, sign));
    _mm_storeu_si128((__m128i *)(void *)to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

AVX2 static size_t k8_decode_f16(const int8_t *codes, const uint16_t *scales, size_t n, unsigned char *row)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 s = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(scales + i)));
        __m256i c = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(codes + i)));
        store8(_mm256_mul_ps(s, _mm256_cvtepi32_ps(c)), row + 2 * i);
    }
    return i;
}

AVX2 static size_t v4_decode_f16(const unsigned char *p, size_t n, unsigned char *row)
{
    const __m128i low = _mm_set1_epi8(15);
    size_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK, p += 4 + BLOCK / 2) {
        const __m256 scale = _mm256_set1_ps(f16_to_f32((uint16_t)(p[0] | p[1] << 8)));
        const __m256 least = _mm256_set1_ps(f16_to_f32((uint16_t)(p[2] | p[3] << 8)));
        __m128i packed = _mm_loadu_si128((const __m128i *)(const void *)(p + 4));
        __m128i even = _mm_and_si128(packed, low), odd = _mm_and_si128(_mm_srli_epi16(packed, 4), low);
        __m128i halves[] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
        for (size_t j = 0; j < BLOCK; j += 8) {
            __m128i eight = j % 16 ? _mm_srli_si128(halves[j / 16], 8) : halves[j / 16];
            __m256 c = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight));
            store8(_mm256_add_ps(_mm256_mul_ps(c, scale), least), row + 2 * (i + j));
        }
    }
    return i;
}
#endif

/* ---- rows as floats. Stripes are always worked on whole; what lies behind a row's end is 0 there. */

/* NaN becomes 0, and everything else no more than `most`. */
INLINE float tame(float f, float most)
{
    uint32_t u = bits_of(f), a = u & 0x7fffffff; /* as integers, magnitudes are in order and NaN comes last */
    a = pick(a > bits_of(most), pick(a > 0x7f800000, 0, bits_of(most)), a);
    return float_of(a | (u & 0x80000000));
}

/* Elements [first, first + n) of a row, n <= STRIPE. */
static void load(imp_type type, const void *row, size_t first, size_t n, float *restrict out)
{
    if (type == IMP_TYPE_F32) {
        if (n < STRIPE) memset(out, 0, STRIPE * sizeof *out);
        memcpy(out, (const char *)row + 4 * first, 4 * n);
        for (size_t i = 0; i < STRIPE; i++) out[i] = tame(out[i], VALUE_MAX);
        return;
    }
    uint16_t h[STRIPE];
    if (n < STRIPE) memset(h, 0, sizeof h);
    memcpy(h, (const char *)row + 2 * first, 2 * n);
    if (type == IMP_TYPE_F16) {
        widen(h, out);
        for (size_t i = 0; i < STRIPE; i++) out[i] = tame(out[i], F16_MAX);
    } else {
        for (size_t i = 0; i < STRIPE; i++) out[i] = tame(float_of((uint32_t)h[i] << 16), VALUE_MAX);
    }
}

static void store(imp_type type, float *restrict in, size_t first, size_t n, void *row)
{
    if (type == IMP_TYPE_F32) {
        memcpy((char *)row + 4 * first, in, 4 * n);
        return;
    }
    uint16_t h[STRIPE];
    if (type == IMP_TYPE_F16) {
        for (size_t i = 0; i < STRIPE; i++) in[i] = tame(in[i], F16_MAX); /* a rounded-up scale may go past it */
        narrow(in, h);
    } else {
        for (size_t i = 0; i < STRIPE; i++) h[i] = f32_to_bf16(in[i]);
    }
    memcpy((char *)row + 2 * first, h, 2 * n);
}

/* The scale for values up to `largest`: the smallest f16 of which `n` reach it. */
INLINE uint16_t scale_for(float largest, float n)
{
    float s = largest / n;
    uint16_t h = f32_to_f16(s);
    h = h > F16_MAX_BITS ? F16_MAX_BITS : h;
    return (uint16_t)(h + (f16_to_f32(h) < s && h < F16_MAX_BITS));
}

INLINE int8_t code_for(float f, float inverse)
{
    float c = f * inverse, half = float_of(0x3f000000 | (bits_of(c) & 0x80000000));
    return (int8_t)(int32_t)(c + half);
}

/* The larger magnitude; `most` >= 0. */
INLINE float larger(float most, float f)
{
    uint32_t u = bits_of(most), a = bits_of(f) & 0x7fffffff;
    return float_of(a > u ? a : u);
}

INLINE float inverse_of(uint16_t scale) { return scale ? 1.0f / f16_to_f32(scale) : 0.0f; }

/* ---- 4-bit codes: two a byte, the earlier element in the low bits */

INLINE size_t packed4_bytes(size_t n) { return (n + 1) / 2; }

/* The largest f16 that is at most `f`, |f| <= F16_MAX. */
INLINE uint16_t f16_below(float f)
{
    uint16_t h = f32_to_f16(f);
    if (f16_to_f32(h) <= f) return h;
    return (uint16_t)(h & 0x8000 ? h + 1 : h - 1); /* the sign of `f` is kept, -0 too: never past a zero */
}

/* The minimum and the scale for values from `least` to `most`, both at most F16_MAX: codes 0 to LAST4 reach from one to
 * the other. */
INLINE void range_for(float least, float most, uint16_t *minimum, uint16_t *scale)
{
    *minimum = f16_below(least);
    *scale = scale_for(most - f16_to_f32(*minimum), LAST4);
}

INLINE uint8_t code4_for(float f, float minimum, float inverse)
{
    return (uint8_t)(int32_t)((f - minimum) * inverse + 0.5f);
}

/* `n` elements, even, from or to n / 2 bytes. */
INLINE void pack4(const uint8_t *restrict codes, size_t n, uint8_t *restrict out)
{
    for (size_t i = 0; i < n / 2; i++) out[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
}

INLINE void unpack4(const uint8_t *restrict in, size_t n, uint8_t *restrict codes)
{
    for (size_t i = 0; i < n / 2; i++) {
        codes[2 * i] = in[i] & 15;
        codes[2 * i + 1] = in[i] >> 4;
    }
}

/* As load(), for 4 bits: the span of what codes can say is that of f16. */
INLINE void load4(imp_type type, const void *row, size_t first, size_t n, float *restrict out)
{
    load(type, row, first, n, out);
    for (size_t i = 0; i < STRIPE; i++) out[i] = tame(out[i], F16_MAX);
}

/* ---- keys */

static void k8_encode(imp_type type, const void *rows, size_t stride, size_t n_tokens, size_t n, int8_t *codes,
                      uint16_t *scales)
{
    for (size_t first = 0; first < n; first += STRIPE) {
        size_t m = n - first < STRIPE ? n - first : STRIPE;
        float x[STRIPE], largest[STRIPE] = {0}, inverse[STRIPE];
        for (size_t t = 0; t < n_tokens; t++) {
            load(type, (const char *)rows + t * stride, first, m, x);
            for (size_t i = 0; i < STRIPE; i++) largest[i] = larger(largest[i], x[i]);
        }
        for (size_t i = 0; i < m; i++) scales[first + i] = scale_for(largest[i], 127);
        for (size_t i = 0; i < STRIPE; i++) inverse[i] = i < m ? inverse_of(scales[first + i]) : 0.0f;
        for (size_t t = 0; t < n_tokens; t++) {
            int8_t c[STRIPE];
            load(type, (const char *)rows + t * stride, first, m, x);
            for (size_t i = 0; i < STRIPE; i++) c[i] = code_for(x[i], inverse[i]);
            memcpy(codes + t * n + first, c, m);
        }
    }
}

static void k8_decode(imp_type type, const int8_t *codes, const uint16_t *scales, size_t n, void *row)
{
    size_t first = 0;
#ifdef HAVE_F16C
    if (type == IMP_TYPE_F16 && have_avx2()) first = k8_decode_f16(codes, scales, n, row);
#endif
    for (; first < n; first += STRIPE) {
        size_t m = n - first < STRIPE ? n - first : STRIPE;
        float x[STRIPE];
        uint16_t s[STRIPE];
        int8_t c[STRIPE];
        if (m < STRIPE) {
            memset(s, 0, sizeof s);
            memset(c, 0, sizeof c);
        }
        memcpy(s, scales + first, 2 * m);
        memcpy(c, codes + first, m);
        widen(s, x);
        for (size_t i = 0; i < STRIPE; i++) x[i] *= (float)c[i];
        store(type, x, first, m, row);
    }
}

static void k4_encode(imp_type type, const void *rows, size_t stride, size_t n_tokens, size_t n, uint8_t *codes,
                      uint16_t *scales)
{
    uint16_t *minima = scales + n;
    for (size_t first = 0; first < n; first += STRIPE) {
        size_t m = n - first < STRIPE ? n - first : STRIPE;
        float x[STRIPE], least[STRIPE], most[STRIPE], inverse[STRIPE] = {0};
        load4(type, rows, first, m, least);
        memcpy(most, least, sizeof most);
        for (size_t t = 1; t < n_tokens; t++) {
            load4(type, (const char *)rows + t * stride, first, m, x);
            for (size_t i = 0; i < STRIPE; i++) {
                least[i] = x[i] < least[i] ? x[i] : least[i];
                most[i] = x[i] > most[i] ? x[i] : most[i];
            }
        }
        for (size_t i = 0; i < m; i++) {
            range_for(least[i], most[i], &minima[first + i], &scales[first + i]);
            least[i] = f16_to_f32(minima[first + i]);
            inverse[i] = inverse_of(scales[first + i]);
        }
        for (size_t t = 0; t < n_tokens; t++) {
            uint8_t c[STRIPE], packed[STRIPE / 2];
            load4(type, (const char *)rows + t * stride, first, m, x);
            for (size_t i = 0; i < STRIPE; i++) c[i] = code4_for(x[i], least[i], inverse[i]);
            pack4(c, STRIPE, packed);
            memcpy(codes + t * packed4_bytes(n) + first / 2, packed, packed4_bytes(m));
        }
    }
}

static void k4_decode(imp_type type, const uint8_t *codes, const uint16_t *scales, size_t n, void *row)
{
    const uint16_t *minima = scales + n;
    for (size_t first = 0; first < n; first += STRIPE) {
        size_t m = n - first < STRIPE ? n - first : STRIPE;
        float x[STRIPE], least[STRIPE];
        uint16_t s[STRIPE], h[STRIPE];
        uint8_t c[STRIPE], packed[STRIPE / 2];
        if (m < STRIPE) {
            memset(s, 0, sizeof s);
            memset(h, 0, sizeof h);
            memset(packed, 0, sizeof packed);
        }
        memcpy(s, scales + first, 2 * m);
        memcpy(h, minima + first, 2 * m);
        memcpy(packed, codes + first / 2, packed4_bytes(m));
        unpack4(packed, STRIPE, c);
        widen(s, x);
        widen(h, least);
        for (size_t i = 0; i < STRIPE; i++) x[i] = x[i] * (float)c[i] + least[i];
        store(type, x, first, m, row);
    }
}

/* ---- values */

static size_t v8_bytes(size_t n) { return n + (n + BLOCK - 1) / BLOCK * 2; }

static void v8_encode(imp_type type, const void *row, size_t n, void *out)
{
    unsigned char *o = out;
    for (size_t first = 0; first < n; first += STRIPE) {
        size_t m = n - first < STRIPE ? n - first : STRIPE;
        float x[STRIPE];
        load(type, row, first, m, x);
        for (size_t block = 0; block < m; block += BLOCK) {
            const float *b = x + block;
            int8_t c[BLOCK];
            float most[8] = {0}; /* side by side: one running maximum would be a chain of BLOCK steps */
            for (size_t i = 0; i < BLOCK; i += 8) {
                for (size_t j = 0; j < 8; j++) most[j] = larger(most[j], b[i + j]);
            }
            for (size_t j = 1; j < 8; j++) most[0] = larger(most[0], most[j]);
            uint16_t s = scale_for(most[0], 127);
            float inverse = inverse_of(s);
            for (size_t i = 0; i < BLOCK; i++) c[i] = code_for(b[i], inverse);

            size_t n_codes = m - block < BLOCK ? m - block : BLOCK;
            *o++ = (unsigned char)s;
            *o++ = (unsigned char)(s >> 8);
            memcpy(o, c, n_codes);
            o += n_codes;
        }
    }
}

static void v8_decode(imp_type type, const void *in, size_t n, void *row)
{
    const unsigned char *p = in;
    for (size_t first = 0; first < n; first += STRIPE) {
        size_t m = n - first < STRIPE ? n - first : STRIPE;
        float x[STRIPE] = {0};
        for (size_t block = 0; block < m; block += BLOCK) {
            float *b = x + block, scale = f16_to_f32((uint16_t)(p[0] | p[1] << 8));
            size_t n_codes = m - block < BLOCK ? m - block : BLOCK;
            int8_t c[BLOCK];
            if (n_codes < BLOCK) memset(c, 0, sizeof c);
            memcpy(c, p + 2, n_codes);
            for (size_t i = 0; i < BLOCK; i++) b[i] = (float)c[i] * scale;
            p += 2 + n_codes;
        }
        store(type, x, first, m, row);
    }
}

static size_t v4_bytes(size_t n) { return packed4_bytes(n) + (n + BLOCK - 1) / BLOCK * 4; }

static void v4_encode(imp_type type, const void *row, size_t n, void *out)
{
    unsigned char *o = out;
    for (size_t first = 0; first < n; first += STRIPE) {
        size_t m = n - first < STRIPE ? n - first : STRIPE;
        float x[STRIPE];
        load4(type, row, first, m, x);
        for (size_t block = 0; block < m; block += BLOCK) {
            size_t n_codes = m - block < BLOCK ? m - block : BLOCK;
            float *b = x + block, least[8], most[8];
            for (size_t i = n_codes; i < BLOCK; i++) b[i] = b[0]; /* what isn't there is no reason for a wider range */
            memcpy(least, b, sizeof least);
            memcpy(most, b, sizeof most);
            for (size_t i = 8; i < BLOCK; i += 8) {
                for (size_t j = 0; j < 8; j++) {
                    least[j] = b[i + j] < least[j] ? b[i + j] : least[j];
                    most[j] = b[i + j] > most[j] ? b[i + j] : most[j];
                }
            }
            for (size_t j = 1; j < 8; j++) {
                least[0] = least[j] < least[0] ? least[j] : least[0];
                most[0] = most[j] > most[0] ? most[j] : most[0];
            }
            uint16_t minimum, scale;
            range_for(least[0], most[0], &minimum, &scale);
            float from = f16_to_f32(minimum), inverse = inverse_of(scale);
            uint8_t c[BLOCK], packed[BLOCK / 2];
            for (size_t i = 0; i < BLOCK; i++) c[i] = code4_for(b[i], from, inverse);
            for (size_t i = n_codes; i < BLOCK; i++) c[i] = 0;
            pack4(c, BLOCK, packed);
            *o++ = (unsigned char)scale;
            *o++ = (unsigned char)(scale >> 8);
            *o++ = (unsigned char)minimum;
            *o++ = (unsigned char)(minimum >> 8);
            memcpy(o, packed, packed4_bytes(n_codes));
            o += packed4_bytes(n_codes);
        }
    }
}

INLINE void v4_block(const unsigned char *p, size_t n_codes, float *restrict out)
{
    float scale = f16_to_f32((uint16_t)(p[0] | p[1] << 8)), least = f16_to_f32((uint16_t)(p[2] | p[3] << 8));
    uint8_t c[BLOCK], packed[BLOCK / 2];
    if (n_codes < BLOCK) memset(packed, 0, sizeof packed);
    memcpy(packed, p + 4, packed4_bytes(n_codes));
    unpack4(packed, BLOCK, c);
    for (size_t i = 0; i < BLOCK; i++) out[i] = (float)c[i] * scale + least;
}

static void v4_decode(imp_type type, const void *in, size_t n, void *row)
{
    const unsigned char *p = in;
    size_t first = 0;
#ifdef HAVE_F16C
    if (type == IMP_TYPE_F16 && have_avx2()) first = v4_decode_f16(p, n, row);
    p += first / BLOCK * (4 + BLOCK / 2);
#endif
    for (; first < n; first += STRIPE) {
        size_t m = n - first < STRIPE ? n - first : STRIPE, block = 0;
        float x[STRIPE];
        for (; block + BLOCK <= m; block += BLOCK, p += 4 + BLOCK / 2) v4_block(p, BLOCK, x + block);
        if (block < m) {
            v4_block(p, m - block, x + block);
            block += BLOCK;
        }
        if (block < STRIPE) memset(x + block, 0, (STRIPE - block) * sizeof *x);
        store(type, x, first, m, row);
    }
}

/* ---- whichever encoding */

size_t imp_rows_key_bytes(imp_rest rest, imp_type type, size_t n)
{
    switch (rest) {
    case IMP_REST_RAW: return imp_type_bytes(type, n);
    case IMP_REST_Q8:
    case IMP_REST_K8V4: return n;
    case IMP_REST_Q4: return packed4_bytes(n);
    }
    return 0;
}

size_t imp_rows_value_bytes(imp_rest rest, imp_type type, size_t n)
{
    switch (rest) {
    case IMP_REST_RAW: return imp_type_bytes(type, n);
    case IMP_REST_Q8: return v8_bytes(n);
    case IMP_REST_K8V4:
    case IMP_REST_Q4: return v4_bytes(n);
    }
    return 0;
}

size_t imp_rows_scales_bytes(imp_rest rest, size_t n)
{
    return rest == IMP_REST_RAW ? 0 : rest == IMP_REST_Q4 ? 2 * sizeof(uint16_t) * n : sizeof(uint16_t) * n;
}

void imp_rows_keys_encode(imp_rest rest, imp_type type, const void *rows, size_t stride, size_t n_tokens, size_t n,
                          void *codes, uint16_t *scales)
{
    if (rest == IMP_REST_RAW) {
        size_t n_bytes = imp_type_bytes(type, n);
        for (size_t t = 0; t < n_tokens; t++) {
            memcpy((char *)codes + t * n_bytes, (const char *)rows + t * stride, n_bytes);
        }
    } else if (rest == IMP_REST_Q4) {
        k4_encode(type, rows, stride, n_tokens, n, codes, scales);
    } else {
        k8_encode(type, rows, stride, n_tokens, n, codes, scales);
    }
}

void imp_rows_key_decode(imp_rest rest, imp_type type, const void *codes, const uint16_t *scales, size_t n, void *row)
{
    if (rest == IMP_REST_RAW) {
        memcpy(row, codes, imp_type_bytes(type, n));
    } else if (rest == IMP_REST_Q4) {
        k4_decode(type, codes, scales, n, row);
    } else {
        k8_decode(type, codes, scales, n, row);
    }
}

void imp_rows_value_encode(imp_rest rest, imp_type type, const void *row, size_t n, void *out)
{
    if (rest == IMP_REST_RAW) {
        memcpy(out, row, imp_type_bytes(type, n));
    } else if (rest == IMP_REST_Q8) {
        v8_encode(type, row, n, out);
    } else {
        v4_encode(type, row, n, out);
    }
}

void imp_rows_value_decode(imp_rest rest, imp_type type, const void *in, size_t n, void *row)
{
    if (rest == IMP_REST_RAW) {
        memcpy(row, in, imp_type_bytes(type, n));
    } else if (rest == IMP_REST_Q8) {
        v8_decode(type, in, n, row);
    } else {
        v4_decode(type, in, n, row);
    }
}
