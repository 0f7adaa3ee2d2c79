/* kernels_avx2.c: AVX2 with FMA and F16C. A panel is two vectors; six tokens keep 12 sums in the 16 registers. In 16
 * bits one instruction multiplies two elements of each lane where it would be one of 32 bits. */
#include "select/kernels.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE TARGET __attribute__((always_inline)) static inline

static void widen_f32(const void *src, float *dst, size_t n) { memcpy(dst, src, n * sizeof *dst); }

TARGET static void widen_f16(const void *src, float *dst, size_t n)
{
    const unsigned char *s = src;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(s + 2 * i))));
    }
    for (; i < n; i++) {
        uint16_t h;
        memcpy(&h, s + 2 * i, sizeof h);
        dst[i] = imp_f32_of_f16(h);
    }
}

TARGET static void widen_bf16(const void *src, float *dst, size_t n)
{
    const unsigned char *s = src;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(s + 2 * i)));
        _mm256_storeu_ps(dst + i, _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)));
    }
    for (; i < n; i++) {
        uint16_t b;
        memcpy(&b, s + 2 * i, sizeof b);
        dst[i] = imp_f32_of_bf16(b);
    }
}

TARGET static void widen_q8_0(const void *src, float *dst, size_t n)
{
    const unsigned char *s = src;
    for (size_t i = 0; i < n; i += 32, s += 34) {
        uint16_t h;
        memcpy(&h, s, sizeof h);
        __m256 scale = _mm256_set1_ps(_cvtsh_ss(h));
        for (size_t j = 0; j < 32; j += 8) {
            __m128i codes = _mm_loadl_epi64((const __m128i *)(const void *)(s + 2 + j));
            _mm256_storeu_ps(dst + i + j, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes))));
        }
    }
}

/* One panel by T tokens; T is a constant where this is inlined, so the loops vanish. */
INLINE void dots_tile(const int T, const float *q, const float *k, size_t dim, float *out)
{
    __m256 sum[6][2];
    for (int t = 0; t < T; t++) sum[t][0] = sum[t][1] = _mm256_setzero_ps();
    for (size_t d = 0; d < dim; d++) {
        __m256 a0 = _mm256_loadu_ps(q + d * IMP_PANEL), a1 = _mm256_loadu_ps(q + d * IMP_PANEL + 8);
        for (int t = 0; t < T; t++) {
            __m256 b = _mm256_broadcast_ss(k + (size_t)t * dim + d);
            sum[t][0] = _mm256_fmadd_ps(a0, b, sum[t][0]);
            sum[t][1] = _mm256_fmadd_ps(a1, b, sum[t][1]);
        }
    }
    for (int t = 0; t < T; t++) {
        _mm256_storeu_ps(out + t * IMP_PANEL, sum[t][0]);
        _mm256_storeu_ps(out + t * IMP_PANEL + 8, sum[t][1]);
    }
}

TARGET static void dots(const float *q, size_t n_panels, const float *k, size_t n_tokens, size_t dim, size_t first,
                        float *block)
{
    for (size_t p = 0; p < n_panels; p++) { /* a full block is 6 tokens ten times, and 4 */
        const float *panel = q + p * dim * IMP_PANEL;
        float *out = block + (p * IMP_BLOCK + first) * IMP_PANEL;
        size_t t = 0;
        for (; t + 6 <= n_tokens; t += 6) dots_tile(6, panel, k + t * dim, dim, out + t * IMP_PANEL);
        for (; t + 4 <= n_tokens; t += 4) dots_tile(4, panel, k + t * dim, dim, out + t * IMP_PANEL);
        for (; t < n_tokens; t++) dots_tile(1, panel, k + t * dim, dim, out + t * IMP_PANEL);
    }
}

INLINE __m256 exp8(__m256 x)
{
    __m256 normal = _mm256_cmp_ps(x, _mm256_set1_ps(IMP_EXP_LOW), _CMP_GE_OQ);
    x = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(IMP_EXP_LOW)), _mm256_set1_ps(IMP_EXP_HIGH));
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(IMP_EXP_LOG2E)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(IMP_EXP_LN2_HIGH), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(IMP_EXP_LN2_LOW), r);
    __m256 c = _mm256_set1_ps(IMP_EXP_C4);
    c = _mm256_fmadd_ps(c, r, _mm256_set1_ps(IMP_EXP_C3));
    c = _mm256_fmadd_ps(c, r, _mm256_set1_ps(IMP_EXP_C2));
    c = _mm256_fmadd_ps(c, r, _mm256_set1_ps(IMP_EXP_C1));
    c = _mm256_fmadd_ps(c, r, _mm256_set1_ps(IMP_EXP_C0));
    __m256 y = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(c, r), r, r), _mm256_set1_ps(1.0f));
    __m256i bits = _mm256_add_epi32(_mm256_castps_si256(y), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23));
    return _mm256_and_ps(_mm256_castsi256_ps(bits), normal);
}

TARGET static void exp_all(const float *x, float *y, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(y + i, exp8(_mm256_loadu_ps(x + i)));
    if (i < n) {
        float tail[8] = {0};
        memcpy(tail, x + i, (n - i) * sizeof *tail);
        _mm256_storeu_ps(tail, exp8(_mm256_loadu_ps(tail)));
        memcpy(y + i, tail, (n - i) * sizeof *tail);
    }
}

INLINE __m256 cap8(__m256 x, __m256 softcap)
{
    const __m256 one = _mm256_set1_ps(1.0f), two = _mm256_set1_ps(2.0f);
    __m256 e = exp8(_mm256_div_ps(_mm256_mul_ps(two, x), softcap));
    return _mm256_mul_ps(softcap, _mm256_sub_ps(one, _mm256_div_ps(two, _mm256_add_ps(e, one))));
}

/* 2^x for x up to 0: IMP_EXP2_C1. */
INLINE __m256 exp2_8(__m256 x)
{
    __m256 normal = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_GE_OQ);
    __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm256_sub_ps(x, n);
    __m256 y = _mm256_set1_ps(IMP_EXP2_C5);
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(IMP_EXP2_C4));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(IMP_EXP2_C3));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(IMP_EXP2_C2));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(IMP_EXP2_C1));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f));
    __m256i bits = _mm256_add_epi32(_mm256_castps_si256(y), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23));
    return _mm256_and_ps(_mm256_castsi256_ps(bits), normal);
}

/* Half a panel at a time. */
TARGET static void softmax(float *block, size_t n_panels, size_t n_tokens, float softcap, float *max, float *sum)
{
    const __m256 low = _mm256_set1_ps(-IMP_LOGIT_MAX), high = _mm256_set1_ps(IMP_LOGIT_MAX);
    const __m256 limit = _mm256_set1_ps(softcap), log2e = _mm256_set1_ps(IMP_EXP_LOG2E);
    for (size_t half = 0; half < 2 * n_panels; half++) {
        float *x = block + (half / 2) * IMP_BLOCK * IMP_PANEL + half % 2 * 8;
        __m256 m = low, s = _mm256_setzero_ps();
        /* max and min give their second operand if one is NaN: the maximum passes over it, and it becomes the lowest */
        for (size_t t = 0; softcap != 0.0f && t < n_tokens; t++) {
            __m256 v = _mm256_min_ps(_mm256_max_ps(_mm256_loadu_ps(x + t * IMP_PANEL), low), high);
            _mm256_storeu_ps(x + t * IMP_PANEL, cap8(v, limit));
        }
        for (size_t t = 0; t < n_tokens; t++) m = _mm256_max_ps(_mm256_loadu_ps(x + t * IMP_PANEL), m);
        m = _mm256_min_ps(m, high);
        for (size_t t = 0; t < n_tokens; t++) {
            /* Less the maximum; what was cut off there is no more than it. */
            __m256 v = _mm256_sub_ps(_mm256_max_ps(_mm256_loadu_ps(x + t * IMP_PANEL), low), m);
            __m256 e = exp2_8(_mm256_mul_ps(_mm256_min_ps(v, _mm256_setzero_ps()), log2e));
            _mm256_storeu_ps(x + t * IMP_PANEL, e);
            s = _mm256_add_ps(s, e);
        }
        _mm256_storeu_ps(max + half * 8, m);
        _mm256_storeu_ps(sum + half * 8, s);
    }
}

/* Lane i: the sum over the lanes of v[i]. */
INLINE __m256 lane_sums(const __m256 v[8])
{
    __m256 a[4], b[2];
    for (int i = 0; i < 4; i++)
        a[i] = _mm256_add_ps(_mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 2; i++) {
        __m256d x = _mm256_castps_pd(a[2 * i]), y = _mm256_castps_pd(a[2 * i + 1]);
        b[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
    }
    return _mm256_add_ps(_mm256_permute2f128_ps(b[0], b[1], 0x20), _mm256_permute2f128_ps(b[0], b[1], 0x31));
}

/* Eight tokens at a time; sums of what lies behind the last one are not stored. */
TARGET static void column_sums(const float *block, size_t n_panels, size_t n_tokens, const float *w, float *out)
{
    for (size_t first = 0; first < n_tokens; first += 8) {
        __m256 sum[8];
        for (int i = 0; i < 8; i++) sum[i] = _mm256_setzero_ps();
        for (size_t p = 0; p < n_panels; p++) {
            const float *x = block + (p * IMP_BLOCK + first) * IMP_PANEL;
            __m256 v0 = _mm256_loadu_ps(w + p * IMP_PANEL), v1 = _mm256_loadu_ps(w + p * IMP_PANEL + 8);
            for (int i = 0; i < 8; i++) {
                sum[i] = _mm256_fmadd_ps(_mm256_loadu_ps(x + i * IMP_PANEL), v0, sum[i]);
                sum[i] = _mm256_fmadd_ps(_mm256_loadu_ps(x + i * IMP_PANEL + 8), v1, sum[i]);
            }
        }
        float sums[8];
        _mm256_storeu_ps(sums, lane_sums(sum));
        memcpy(out + first, sums, (n_tokens - first < 8 ? n_tokens - first : 8) * sizeof *sums);
    }
}

/* --------------------------------------------------------------------------------------------- whole numbers ---- */

/* By the squares of lengths: what to multiply with, so that an element fits 16 bits, and what 1 is worth then. Returns
 * 0 if a square is neither 0 nor far from both ends of the range. */
INLINE int unit_gains(__m256 squares, __m256 *inverse, __m256 *gain)
{
    const __m256 most = _mm256_set1_ps(32767.0f), length = _mm256_sqrt_ps(squares);
    __m256 some = _mm256_cmp_ps(squares, _mm256_setzero_ps(), _CMP_NEQ_UQ);
    __m256 fine = _mm256_and_ps(_mm256_cmp_ps(squares, _mm256_set1_ps(1e-30f), _CMP_GE_OQ),
                                _mm256_cmp_ps(squares, _mm256_set1_ps(1e30f), _CMP_LE_OQ));
    *inverse = _mm256_and_ps(some, _mm256_div_ps(most, length));
    *gain = _mm256_div_ps(length, most);
    return _mm256_movemask_ps(_mm256_andnot_ps(fine, some)) == 0;
}

INLINE __m256i whole_of(__m256 x, __m256 inverse) { return _mm256_cvtps_epi32(_mm256_mul_ps(x, inverse)); }

TARGET static int pack16(const float *q, size_t n_panels, size_t dim, int16_t *q16, float *gain)
{
    const size_t row = dim + dim % 2;
    for (size_t half = 0; half < 2 * n_panels; half++) {
        const float *x = q + half / 2 * dim * IMP_PANEL + half % 2 * 8;
        int16_t *to = q16 + half / 2 * row * IMP_PANEL + half % 2 * 16;
        __m256 squares = _mm256_setzero_ps(), inverse, own;
        for (size_t d = 0; d < dim; d++) {
            __m256 v = _mm256_loadu_ps(x + d * IMP_PANEL);
            squares = _mm256_fmadd_ps(v, v, squares);
        }
        if (!unit_gains(squares, &inverse, &own)) return 0;
        _mm256_storeu_ps(gain + half * 8, own);
        for (size_t d = 0; d < dim; d += 2, to += 2 * IMP_PANEL) {
            __m256i even = whole_of(_mm256_loadu_ps(x + d * IMP_PANEL), inverse), odd = _mm256_setzero_si256();
            if (d + 1 < dim) odd = whole_of(_mm256_loadu_ps(x + (d + 1) * IMP_PANEL), inverse);
            _mm256_storeu_si256((__m256i *)(void *)to, _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xaa));
        }
    }
    return 1;
}

/* 16 elements as whole numbers, in their order. */
INLINE void narrow_16(const float *x, __m256 inverse, int16_t *out)
{
    __m256i v = _mm256_packs_epi32(whole_of(_mm256_loadu_ps(x), inverse), whole_of(_mm256_loadu_ps(x + 8), inverse));
    _mm256_storeu_si256((__m256i *)(void *)out, _mm256_permute4x64_epi64(v, 0xd8));
}

/* Keys as [token][dim, made even] in k16, which has room for 16 more; gain: [n_tokens, made a multiple of 8]. */
INLINE int narrow_keys(const float *k, size_t n_tokens, size_t dim, int16_t *k16, float *gain)
{
    const size_t row = dim + dim % 2, whole = dim - dim % 16, rest = dim - whole;
    for (size_t first = 0; first < n_tokens; first += 8) {
        size_t n = n_tokens - first < 8 ? n_tokens - first : 8;
        const float *x = k + first * dim;
        float tails[8][16]; /* of rows that don't end at 16, with zeros behind */
        __m256 sum[8], inverse, own;
        for (size_t i = 0; i < 8; i++) {
            const float *key = x + (i < n ? i : 0) * dim;
            sum[i] = _mm256_setzero_ps();
            for (size_t d = 0; d < whole; d += 8) {
                __m256 v = _mm256_loadu_ps(key + d);
                sum[i] = _mm256_fmadd_ps(v, v, sum[i]);
            }
            if (rest == 0) continue;
            memset(tails[i], 0, sizeof tails[i]);
            memcpy(tails[i], key + whole, rest * sizeof *key);
            __m256 a = _mm256_loadu_ps(tails[i]), b = _mm256_loadu_ps(tails[i] + 8);
            sum[i] = _mm256_fmadd_ps(b, b, _mm256_fmadd_ps(a, a, sum[i]));
        }
        if (!unit_gains(lane_sums(sum), &inverse, &own)) return 0;
        float factor[8];
        _mm256_storeu_ps(factor, inverse);
        _mm256_storeu_ps(gain + first, own);
        for (size_t i = 0; i < n; i++, k16 += row, x += dim) {
            __m256 f = _mm256_set1_ps(factor[i]);
            for (size_t d = 0; d < whole; d += 16) narrow_16(x + d, f, k16 + d);
            if (rest > 0) narrow_16(tails[i], f, k16 + whole);
        }
    }
    return 1;
}

/* Eight whole numbers as a vector that compilers keep in a register where it is an element of an array, too. */
typedef int whole __attribute__((vector_size(32)));

/* One panel by T tokens, two elements a step. */
INLINE void dots16_tile(const int T, const int16_t *q16, const float *gain, const int16_t *k16, const float *k_gain,
                        size_t row, float *out)
{
    whole sum[6][2];
    for (int t = 0; t < T; t++) sum[t][0] = sum[t][1] = (whole){0};
    for (size_t d = 0; d < row; d += 2) {
        __m256i a0 = _mm256_loadu_si256((const __m256i *)(const void *)(q16 + d * IMP_PANEL));
        __m256i a1 = _mm256_loadu_si256((const __m256i *)(const void *)(q16 + d * IMP_PANEL + 16));
        for (int t = 0; t < T; t++) {
            int pair;
            memcpy(&pair, k16 + (size_t)t * row + d, sizeof pair);
            __m256i b = _mm256_set1_epi32(pair);
            sum[t][0] += (whole)_mm256_madd_epi16(a0, b);
            sum[t][1] += (whole)_mm256_madd_epi16(a1, b);
        }
    }
    __m256 own0 = _mm256_loadu_ps(gain), own1 = _mm256_loadu_ps(gain + 8);
    for (int t = 0; t < T; t++) {
        __m256 worth = _mm256_set1_ps(k_gain[t]);
        _mm256_storeu_ps(out + t * IMP_PANEL,
                         _mm256_mul_ps(_mm256_cvtepi32_ps((__m256i)sum[t][0]), _mm256_mul_ps(own0, worth)));
        _mm256_storeu_ps(out + t * IMP_PANEL + 8,
                         _mm256_mul_ps(_mm256_cvtepi32_ps((__m256i)sum[t][1]), _mm256_mul_ps(own1, worth)));
    }
}

TARGET static int dots16(const int16_t *q16, const float *gain, size_t n_panels, const float *k, size_t n_tokens,
                         size_t dim, size_t first, float *block)
{
    _Alignas(32) int16_t k16[IMP_KEY_FLOATS + IMP_BLOCK + 16]; /* odd rows are one longer */
    float k_gain[IMP_BLOCK];
    const size_t row = dim + dim % 2;
    if (!narrow_keys(k, n_tokens, dim, k16, k_gain)) return 0;
    for (size_t p = 0; p < n_panels; p++, q16 += row * IMP_PANEL, gain += IMP_PANEL) {
        float *out = block + (p * IMP_BLOCK + first) * IMP_PANEL;
        size_t t = 0;
        for (; t + 6 <= n_tokens; t += 6)
            dots16_tile(6, q16, gain, k16 + t * row, k_gain + t, row, out + t * IMP_PANEL);
        for (; t + 4 <= n_tokens; t += 4)
            dots16_tile(4, q16, gain, k16 + t * row, k_gain + t, row, out + t * IMP_PANEL);
        for (; t < n_tokens; t++) dots16_tile(1, q16, gain, k16 + t * row, k_gain + t, row, out + t * IMP_PANEL);
    }
    return 1;
}

static const imp_kernels kernels = {
    .name = "avx2",
    .isa = IMP_ISA_AVX2,
    .widen = {widen_f32, widen_f16, widen_bf16, widen_q8_0},
    .dots = dots,
    .pack16 = pack16,
    .dots16 = dots16,
    .softmax = softmax,
    .column_sums = column_sums,
    .exp = exp_all,
};

const imp_kernels *imp_kernels_avx2(void)
{
    /* clang's __builtin_cpu_supports() doesn't know F16C; that the system saves the registers, AVX2 has shown. */
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    int have = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
               (c & (1u << 29));
    return have ? &kernels : NULL;
}

#else

const imp_kernels *imp_kernels_avx2(void) { return NULL; }

#endif
