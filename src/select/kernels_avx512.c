/* kernels_avx512.c: a panel is one vector. Three panels by eight tokens keep 24 sums in registers. Twice: with VNNI one
 * instruction multiplies two 16-bit elements of each lane where it would be one of 32 bits. */
#include "select/kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define TARGET_VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")))
#define INLINE TARGET __attribute__((always_inline)) static inline
#define INLINE_VNNI TARGET_VNNI __attribute__((always_inline)) static inline

INLINE __mmask16 mask_of(size_t n)
{
    unsigned lanes = n >= 16 ? 0xffffu : (1u << n) - 1u;
    return (__mmask16)lanes;
}

static void widen_f32(const void *src, float *dst, size_t n) { memcpy(dst, src, n * sizeof *dst); }

TARGET static void widen_f16(const void *src, float *dst, size_t n)
{
    const unsigned char *s = src;
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        _mm512_storeu_ps(dst + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(s + 2 * i))));
    }
    if (i < n) {
        __mmask16 m = mask_of(n - i);
        _mm512_mask_storeu_ps(dst + i, m, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, s + 2 * i)));
    }
}

TARGET static void widen_bf16(const void *src, float *dst, size_t n)
{
    const unsigned char *s = src;
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 m = mask_of(n - i);
        __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, s + 2 * i)), 16);
        _mm512_mask_storeu_ps(dst + i, m, _mm512_castsi512_ps(bits));
    }
}

TARGET static void widen_q8_0(const void *src, float *dst, size_t n)
{
    const unsigned char *s = src;
    for (size_t i = 0; i < n; i += 32, s += 34) {
        uint16_t h;
        memcpy(&h, s, sizeof h);
        __m512 scale = _mm512_set1_ps(_cvtsh_ss(h));
        for (size_t j = 0; j < 32; j += 16) {
            __m128i codes = _mm_loadu_si128((const __m128i *)(const void *)(s + 2 + j));
            _mm512_storeu_ps(dst + i + j, _mm512_mul_ps(scale, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))));
        }
    }
}

/* P panels by T tokens; both are constants where this is inlined, so the loops vanish. */
INLINE void dots_tile(const int P, const int T, const float *q, const float *k, size_t dim, float *out)
{
    __m512 sum[3][8];
    for (int p = 0; p < P; p++) {
        for (int t = 0; t < T; t++) sum[p][t] = _mm512_setzero_ps();
    }
    for (size_t d = 0; d < dim; d++) {
        __m512 a[3];
        for (int p = 0; p < P; p++) a[p] = _mm512_loadu_ps(q + ((size_t)p * dim + d) * IMP_PANEL);
        for (int t = 0; t < T; t++) {
            __m512 b = _mm512_set1_ps(k[(size_t)t * dim + d]);
            for (int p = 0; p < P; p++) sum[p][t] = _mm512_fmadd_ps(a[p], b, sum[p][t]);
        }
    }
    for (int p = 0; p < P; p++) {
        for (int t = 0; t < T; t++) _mm512_storeu_ps(out + (p * IMP_BLOCK + t) * IMP_PANEL, sum[p][t]);
    }
}

INLINE void dots_panels(const int P, const float *q, const float *k, size_t n_tokens, size_t dim, float *out)
{
    size_t t = 0;
    for (; t + 8 <= n_tokens; t += 8) dots_tile(P, 8, q, k + t * dim, dim, out + t * IMP_PANEL);
    for (; t < n_tokens; t++) dots_tile(P, 1, q, k + t * dim, dim, out + t * IMP_PANEL);
}

TARGET static void dots(const float *q, size_t n_panels, const float *k, size_t n_tokens, size_t dim, size_t first,
                        float *block)
{
    float *out = block + first * IMP_PANEL;
    size_t p = 0;
    for (; p + 3 <= n_panels; p += 3) {
        dots_panels(3, q + p * dim * IMP_PANEL, k, n_tokens, dim, out + p * IMP_BLOCK * IMP_PANEL);
    }
    q += p * dim * IMP_PANEL;
    out += p * IMP_BLOCK * IMP_PANEL;
    if (n_panels - p == 2) dots_panels(2, q, k, n_tokens, dim, out);
    if (n_panels - p == 1) dots_panels(1, q, k, n_tokens, dim, out);
}

INLINE __m512 exp16(__m512 x)
{
    __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(IMP_EXP_LOW), _CMP_GE_OQ);
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(IMP_EXP_LOW)), _mm512_set1_ps(IMP_EXP_HIGH));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(IMP_EXP_LOG2E)),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(IMP_EXP_LN2_HIGH), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(IMP_EXP_LN2_LOW), r);
    __m512 c = _mm512_set1_ps(IMP_EXP_C4);
    c = _mm512_fmadd_ps(c, r, _mm512_set1_ps(IMP_EXP_C3));
    c = _mm512_fmadd_ps(c, r, _mm512_set1_ps(IMP_EXP_C2));
    c = _mm512_fmadd_ps(c, r, _mm512_set1_ps(IMP_EXP_C1));
    c = _mm512_fmadd_ps(c, r, _mm512_set1_ps(IMP_EXP_C0));
    __m512 y = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(c, r), r, r), _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(normal, y, n);
}

TARGET static void exp_all(const float *x, float *y, size_t n)
{
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 m = mask_of(n - i);
        _mm512_mask_storeu_ps(y + i, m, exp16(_mm512_maskz_loadu_ps(m, x + i)));
    }
}

INLINE __m512 cap16(__m512 x, __m512 softcap)
{
    const __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
    __m512 e = exp16(_mm512_div_ps(_mm512_mul_ps(two, x), softcap));
    return _mm512_mul_ps(softcap, _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(e, one))));
}

/* 2^x for x up to 0: IMP_EXP2_C1. */
INLINE __m512 exp2_16(__m512 x)
{
    __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, n);
    __m512 y = _mm512_set1_ps(IMP_EXP2_C5);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(IMP_EXP2_C4));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(IMP_EXP2_C3));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(IMP_EXP2_C2));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(IMP_EXP2_C1));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(normal, y, n);
}

TARGET static void softmax(float *block, size_t n_panels, size_t n_tokens, float softcap, float *max, float *sum)
{
    const __m512 low = _mm512_set1_ps(-IMP_LOGIT_MAX), high = _mm512_set1_ps(IMP_LOGIT_MAX);
    const __m512 limit = _mm512_set1_ps(softcap), log2e = _mm512_set1_ps(IMP_EXP_LOG2E);
    for (size_t p = 0; p < n_panels; p++) {
        float *x = block + p * IMP_BLOCK * IMP_PANEL;
        __m512 m = low, s = _mm512_setzero_ps();
        /* max and min give their second operand if one is NaN: the maximum passes over it, and it becomes the lowest */
        for (size_t t = 0; softcap != 0.0f && t < n_tokens; t++) {
            __m512 v = _mm512_min_ps(_mm512_max_ps(_mm512_loadu_ps(x + t * IMP_PANEL), low), high);
            _mm512_storeu_ps(x + t * IMP_PANEL, cap16(v, limit));
        }
        for (size_t t = 0; t < n_tokens; t++) m = _mm512_max_ps(_mm512_loadu_ps(x + t * IMP_PANEL), m);
        m = _mm512_min_ps(m, high);
        for (size_t t = 0; t < n_tokens; t++) {
            /* Less the maximum; what was cut off there is no more than it. */
            __m512 v = _mm512_sub_ps(_mm512_max_ps(_mm512_loadu_ps(x + t * IMP_PANEL), low), m);
            __m512 e = exp2_16(_mm512_mul_ps(_mm512_min_ps(v, _mm512_setzero_ps()), log2e));
            _mm512_storeu_ps(x + t * IMP_PANEL, e);
            s = _mm512_add_ps(s, e);
        }
        _mm512_storeu_ps(max + p * IMP_PANEL, m);
        _mm512_storeu_ps(sum + p * IMP_PANEL, s);
    }
}

/* Lane i: the sum over the lanes of v[i]. Vectors are added in pairs, half of each one's lanes to the other half. */
INLINE __m512 lane_sums(const __m512 v[16])
{
    __m512 a[8], b[4], c[2];
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
        b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    for (int i = 0; i < 2; i++) {
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
    }
    return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}

/* 16 tokens at a time; sums of what lies behind the last one are not stored. */
TARGET static void column_sums(const float *block, size_t n_panels, size_t n_tokens, const float *w, float *out)
{
    for (size_t first = 0; first < n_tokens; first += 16) {
        __m512 sum[16];
        for (int i = 0; i < 16; i++) sum[i] = _mm512_setzero_ps();
        for (size_t p = 0; p < n_panels; p++) {
            const float *x = block + (p * IMP_BLOCK + first) * IMP_PANEL;
            __m512 v = _mm512_loadu_ps(w + p * IMP_PANEL);
            for (int i = 0; i < 16; i++) sum[i] = _mm512_fmadd_ps(_mm512_loadu_ps(x + i * IMP_PANEL), v, sum[i]);
        }
        _mm512_mask_storeu_ps(out + first, mask_of(n_tokens - first), lane_sums(sum));
    }
}

/* --------------------------------------------------------------------------------------------- whole numbers ---- */

/* Sixteen whole numbers as a vector that compilers keep in a register where it is an element of an array, too. */
typedef int whole __attribute__((vector_size(64)));

/* By the squares of lengths: what to multiply with, so that an element fits 16 bits, and what 1 is worth then. Returns 0
 * if a square is neither 0 nor far from both ends of the range. */
INLINE int unit_gains(__m512 squares, __m512 *inverse, __m512 *gain)
{
    const __m512 most = _mm512_set1_ps(32767.0f), length = _mm512_sqrt_ps(squares);
    __mmask16 some = _mm512_cmp_ps_mask(squares, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    __mmask16 fine = _mm512_cmp_ps_mask(squares, _mm512_set1_ps(1e-30f), _CMP_GE_OQ) &
                     _mm512_cmp_ps_mask(squares, _mm512_set1_ps(1e30f), _CMP_LE_OQ);
    *inverse = _mm512_maskz_div_ps(some, most, length);
    *gain = _mm512_div_ps(length, most);
    return (some & ~fine) == 0;
}

INLINE __m512i whole_of(__m512 x, __m512 inverse) { return _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)); }

TARGET static int pack16(const float *q, size_t n_panels, size_t dim, int16_t *q16, float *gain)
{
    for (size_t p = 0; p < n_panels; p++, q += dim * IMP_PANEL, gain += IMP_PANEL) {
        __m512 squares = _mm512_setzero_ps(), inverse, own;
        for (size_t d = 0; d < dim; d++) {
            __m512 x = _mm512_loadu_ps(q + d * IMP_PANEL);
            squares = _mm512_fmadd_ps(x, x, squares);
        }
        if (!unit_gains(squares, &inverse, &own)) return 0;
        _mm512_storeu_ps(gain, own);
        for (size_t d = 0; d < dim; d += 2, q16 += 2 * IMP_PANEL) {
            __m512i even = whole_of(_mm512_loadu_ps(q + d * IMP_PANEL), inverse), odd = _mm512_setzero_si512();
            if (d + 1 < dim) odd = whole_of(_mm512_loadu_ps(q + (d + 1) * IMP_PANEL), inverse);
            _mm512_storeu_si512(q16, _mm512_mask_blend_epi16(0xaaaaaaaau, even, _mm512_slli_epi32(odd, 16)));
        }
    }
    return 1;
}

/* Keys as [token][dim, made even] in k16, which has room for 16 more; gain: [n_tokens, made a multiple of 16]. */
INLINE int narrow_keys(const float *k, size_t n_tokens, size_t dim, int16_t *k16, float *gain)
{
    size_t row = dim + dim % 2;
    for (size_t first = 0; first < n_tokens; first += 16) {
        size_t n = n_tokens - first < 16 ? n_tokens - first : 16;
        const float *x = k + first * dim;
        __m512 sum[16], inverse, own;
        for (size_t i = 0; i < 16; i++) sum[i] = _mm512_setzero_ps();
        for (size_t d = 0; d < dim; d += 16) {
            __mmask16 m = mask_of(dim - d);
            for (size_t i = 0; i < 16; i++) {
                __m512 v = _mm512_maskz_loadu_ps(m, x + (i < n ? i : 0) * dim + d);
                sum[i] = _mm512_fmadd_ps(v, v, sum[i]);
            }
        }
        if (!unit_gains(lane_sums(sum), &inverse, &own)) return 0;
        float factor[16];
        _mm512_storeu_ps(factor, inverse);
        _mm512_storeu_ps(gain + first, own);
        for (size_t i = 0; i < n; i++, k16 += row, x += dim) {
            __m512 f = _mm512_set1_ps(factor[i]);
            for (size_t d = 0; d < dim; d += 16) {
                __m512i v = whole_of(_mm512_maskz_loadu_ps(mask_of(dim - d), x + d), f);
                _mm256_storeu_si256((__m256i *)(void *)(k16 + d), _mm512_cvtsepi32_epi16(v));
            }
        }
    }
    return 1;
}

INLINE_VNNI void dots16_tile(const int P, const int T, const int16_t *q16, const float *gain, const int16_t *k16,
                             const float *k_gain, size_t row, float *out)
{
    whole sum[3][8];
    for (int p = 0; p < P; p++) {
        for (int t = 0; t < T; t++) sum[p][t] = (whole){0};
    }
    for (size_t d = 0; d < row; d += 2) {
        __m512i a[3];
        for (int p = 0; p < P; p++) a[p] = _mm512_loadu_si512(q16 + ((size_t)p * row + d) * IMP_PANEL);
        for (int t = 0; t < T; t++) {
            int pair;
            memcpy(&pair, k16 + (size_t)t * row + d, sizeof pair);
            __m512i b = _mm512_set1_epi32(pair);
            for (int p = 0; p < P; p++) sum[p][t] = (whole)_mm512_dpwssd_epi32((__m512i)sum[p][t], a[p], b);
        }
    }
    for (int p = 0; p < P; p++) {
        __m512 own = _mm512_loadu_ps(gain + p * IMP_PANEL);
        for (int t = 0; t < T; t++) {
            __m512 worth = _mm512_mul_ps(own, _mm512_set1_ps(k_gain[t]));
            _mm512_storeu_ps(out + (p * IMP_BLOCK + t) * IMP_PANEL,
                             _mm512_mul_ps(_mm512_cvtepi32_ps((__m512i)sum[p][t]), worth));
        }
    }
}

INLINE_VNNI void dots16_panels(const int P, const int16_t *q16, const float *gain, const int16_t *k16,
                               const float *k_gain, size_t n_tokens, size_t row, float *out)
{
    size_t t = 0;
    for (; t + 8 <= n_tokens; t += 8)
        dots16_tile(P, 8, q16, gain, k16 + t * row, k_gain + t, row, out + t * IMP_PANEL);
    for (; t < n_tokens; t++) dots16_tile(P, 1, q16, gain, k16 + t * row, k_gain + t, row, out + t * IMP_PANEL);
}

TARGET_VNNI static int dots16(const int16_t *q16, const float *gain, size_t n_panels, const float *k, size_t n_tokens,
                              size_t dim, size_t first, float *block)
{
    _Alignas(64) int16_t k16[IMP_KEY_FLOATS + IMP_BLOCK + 16]; /* odd rows are one longer */
    float k_gain[IMP_BLOCK];
    size_t row = dim + dim % 2, p = 0;
    float *out = block + first * IMP_PANEL;
    if (!narrow_keys(k, n_tokens, dim, k16, k_gain)) return 0;
    for (; p + 3 <= n_panels; p += 3) {
        dots16_panels(3, q16 + p * row * IMP_PANEL, gain + p * IMP_PANEL, k16, k_gain, n_tokens, row,
                      out + p * IMP_BLOCK * IMP_PANEL);
    }
    q16 += p * row * IMP_PANEL;
    gain += p * IMP_PANEL;
    out += p * IMP_BLOCK * IMP_PANEL;
    if (n_panels - p == 2) dots16_panels(2, q16, gain, k16, k_gain, n_tokens, row, out);
    if (n_panels - p == 1) dots16_panels(1, q16, gain, k16, k_gain, n_tokens, row, out);
    return 1;
}

#define COMMON .isa = IMP_ISA_AVX512, .widen = {widen_f32, widen_f16, widen_bf16, widen_q8_0}, .dots = dots, \
               .softmax = softmax, .column_sums = column_sums, .exp = exp_all

static const imp_kernels kernels = {.name = "avx512", COMMON};
static const imp_kernels kernels_vnni = {.name = "avx512vnni", COMMON, .pack16 = pack16, .dots16 = dots16};

const imp_kernels *imp_kernels_avx512(void)
{
    __builtin_cpu_init();
    int have = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    /* The AVX2 test knows about F16C. */
    return have && imp_kernels_avx2() ? &kernels : NULL;
}

const imp_kernels *imp_kernels_vnni(void)
{
    return imp_kernels_avx512() && __builtin_cpu_supports("avx512vnni") ? &kernels_vnni : NULL;
}

#else

const imp_kernels *imp_kernels_avx512(void) { return NULL; }
const imp_kernels *imp_kernels_vnni(void) { return NULL; }

#endif
