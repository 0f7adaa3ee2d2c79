/* kernels_avx2.c: AVX2 with FMA and F16C. A panel is two vectors; six tokens keep 12 sums in the 16 registers. */
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
    for (size_t p = 0; p < n_panels; p++) {
        const float *panel = q + p * dim * IMP_PANEL;
        float *out = block + (p * IMP_BLOCK + first) * IMP_PANEL;
        size_t t = 0;
        for (; t + 6 <= n_tokens; t += 6) dots_tile(6, panel, k + t * dim, dim, out + t * IMP_PANEL);
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

/* Half a panel at a time. */
TARGET static void softmax(float *block, size_t n_panels, size_t n_tokens, float softcap, float *max, float *sum)
{
    const __m256 low = _mm256_set1_ps(-IMP_LOGIT_MAX), high = _mm256_set1_ps(IMP_LOGIT_MAX);
    const __m256 limit = _mm256_set1_ps(softcap);
    for (size_t half = 0; half < 2 * n_panels; half++) {
        float *x = block + (half / 2) * IMP_BLOCK * IMP_PANEL + half % 2 * 8;
        __m256 m = low, s = _mm256_setzero_ps();
        for (size_t t = 0; t < n_tokens; t++) {
            /* max and min give their second operand if one is NaN */
            __m256 v = _mm256_min_ps(_mm256_max_ps(_mm256_loadu_ps(x + t * IMP_PANEL), low), high);
            if (softcap != 0.0f) v = cap8(v, limit);
            _mm256_storeu_ps(x + t * IMP_PANEL, v);
            m = _mm256_max_ps(m, v);
        }
        for (size_t t = 0; t < n_tokens; t++) {
            __m256 e = exp8(_mm256_sub_ps(_mm256_loadu_ps(x + t * IMP_PANEL), m));
            _mm256_storeu_ps(x + t * IMP_PANEL, e);
            s = _mm256_add_ps(s, e);
        }
        _mm256_storeu_ps(max + half * 8, m);
        _mm256_storeu_ps(sum + half * 8, s);
    }
}

INLINE float sum8(__m256 v)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

TARGET static void column_sums(const float *block, size_t n_panels, size_t n_tokens, const float *w, float *out)
{
    for (size_t t = 0; t < n_tokens; t++) {
        __m256 a = _mm256_setzero_ps(), b = a;
        for (size_t p = 0; p < n_panels; p++) {
            const float *x = block + (p * IMP_BLOCK + t) * IMP_PANEL;
            a = _mm256_fmadd_ps(_mm256_loadu_ps(x), _mm256_loadu_ps(w + p * IMP_PANEL), a);
            b = _mm256_fmadd_ps(_mm256_loadu_ps(x + 8), _mm256_loadu_ps(w + p * IMP_PANEL + 8), b);
        }
        out[t] = sum8(_mm256_add_ps(a, b));
    }
}

static const imp_kernels kernels = {
    .name = "avx2",
    .isa = IMP_ISA_AVX2,
    .widen = {widen_f32, widen_f16, widen_bf16, widen_q8_0},
    .dots = dots,
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
