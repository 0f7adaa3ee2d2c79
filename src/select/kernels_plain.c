/* kernels_plain.c: the kernels in C11, for any machine. The loops over 16 lanes are what compilers vectorise. */
#include "select/kernels.h"

#include <string.h>

static void widen_f32(const void *src, float *dst, size_t n) { memcpy(dst, src, n * sizeof *dst); }

static void widen_f16(const void *src, float *dst, size_t n)
{
    const unsigned char *s = src;
    for (size_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, s + 2 * i, sizeof h);
        dst[i] = imp_f32_of_f16(h);
    }
}

static void widen_bf16(const void *src, float *dst, size_t n)
{
    const unsigned char *s = src;
    for (size_t i = 0; i < n; i++) {
        uint16_t b;
        memcpy(&b, s + 2 * i, sizeof b);
        dst[i] = imp_f32_of_bf16(b);
    }
}

static void widen_q8_0(const void *src, float *dst, size_t n)
{
    const unsigned char *s = src;
    for (size_t i = 0; i < n; i += 32, s += 34) {
        uint16_t h;
        memcpy(&h, s, sizeof h);
        float scale = imp_f32_of_f16(h);
        int8_t codes[32];
        memcpy(codes, s + 2, sizeof codes);
        for (size_t j = 0; j < 32; j++) dst[i + j] = scale * (float)codes[j];
    }
}

/* One panel by T tokens, in vectors of four, which gcc and clang lower to whatever the machine has. (Left to find the
 * vectors itself, gcc 12 takes more than twice as long for the whole score.) T is a constant where this is inlined, so the loops vanish. */
typedef float vec4 __attribute__((vector_size(16)));

__attribute__((always_inline)) static inline void dots_tile(const int T, const float *q, const float *k, size_t dim,
                                                            float *out)
{
    vec4 sum[2][4] = {{{0}}};
    for (size_t d = 0; d < dim; d++) {
        vec4 a[4];
        memcpy(a, q + d * IMP_PANEL, sizeof a);
        for (int t = 0; t < T; t++) {
            float b = k[(size_t)t * dim + d];
            for (int i = 0; i < 4; i++) sum[t][i] += a[i] * b;
        }
    }
    memcpy(out, sum, (size_t)T * sizeof sum[0]);
}

static void dots(const float *q, size_t n_panels, const float *k, size_t n_tokens, size_t dim, size_t first,
                 float *block)
{
    for (size_t p = 0; p < n_panels; p++) {
        const float *panel = q + p * dim * IMP_PANEL;
        float *out = block + (p * IMP_BLOCK + first) * IMP_PANEL;
        size_t t = 0;
        for (; t + 2 <= n_tokens; t += 2) dots_tile(2, panel, k + t * dim, dim, out + t * IMP_PANEL);
        if (t < n_tokens) dots_tile(1, panel, k + t * dim, dim, out + t * IMP_PANEL);
    }
}

static inline float exp_of(float x)
{
    /* Adding 1.5 * 2^23 leaves the rounded integer in the low bits. */
    const float shift = 0x1.8p23f;
    float in = x >= IMP_EXP_LOW ? x : IMP_EXP_LOW;
    in = in <= IMP_EXP_HIGH ? in : IMP_EXP_HIGH;
    union { float f; uint32_t u; } n = {in * IMP_EXP_LOG2E + shift};
    float whole = n.f - shift;
    float r = in - whole * IMP_EXP_LN2_HIGH;
    r = r - whole * IMP_EXP_LN2_LOW;
    float c = IMP_EXP_C4;
    c = c * r + IMP_EXP_C3;
    c = c * r + IMP_EXP_C2;
    c = c * r + IMP_EXP_C1;
    c = c * r + IMP_EXP_C0;
    union { float f; uint32_t u; } y = {(c * r) * r + r + 1.0f};
    y.u += n.u << 23;
    return x >= IMP_EXP_LOW ? y.f : 0.0f;
}

static void exp_all(const float *x, float *y, size_t n)
{
    for (size_t i = 0; i < n; i++) y[i] = exp_of(x[i]);
}

static inline float clamp(float x)
{
    x = x > -IMP_LOGIT_MAX ? x : -IMP_LOGIT_MAX;
    return x < IMP_LOGIT_MAX ? x : IMP_LOGIT_MAX;
}

static inline float cap(float x, float softcap)
{
    /* tanh(y) = 1 - 2 / (e^2y + 1) */
    return softcap * (1.0f - 2.0f / (exp_of(2.0f * x / softcap) + 1.0f));
}

static void softmax(float *block, size_t n_panels, size_t n_tokens, float softcap, float *max, float *sum)
{
    for (size_t p = 0; p < n_panels; p++, block += IMP_BLOCK * IMP_PANEL, max += IMP_PANEL, sum += IMP_PANEL) {
        float m[IMP_PANEL], s[IMP_PANEL] = {0};
        for (int i = 0; i < IMP_PANEL; i++) m[i] = -IMP_LOGIT_MAX;
        for (size_t t = 0; t < n_tokens; t++) {
            float *x = block + t * IMP_PANEL;
            for (int i = 0; i < IMP_PANEL; i++) x[i] = clamp(x[i]);
            if (softcap != 0.0f) {
                for (int i = 0; i < IMP_PANEL; i++) x[i] = cap(x[i], softcap);
            }
            for (int i = 0; i < IMP_PANEL; i++) m[i] = m[i] > x[i] ? m[i] : x[i];
        }
        for (size_t t = 0; t < n_tokens; t++) {
            float *x = block + t * IMP_PANEL;
            for (int i = 0; i < IMP_PANEL; i++) x[i] = exp_of(x[i] - m[i]);
            for (int i = 0; i < IMP_PANEL; i++) s[i] += x[i];
        }
        memcpy(max, m, sizeof m);
        memcpy(sum, s, sizeof s);
    }
}

static void column_sums(const float *block, size_t n_panels, size_t n_tokens, const float *w, float *out)
{
    for (size_t t = 0; t < n_tokens; t++) {
        float a[IMP_PANEL] = {0};
        for (size_t p = 0; p < n_panels; p++) {
            const float *x = block + (p * IMP_BLOCK + t) * IMP_PANEL;
            for (int i = 0; i < IMP_PANEL; i++) a[i] += x[i] * w[p * IMP_PANEL + (size_t)i];
        }
        float s = 0.0f;
        for (int i = 0; i < IMP_PANEL; i++) s += a[i];
        out[t] = s;
    }
}

const imp_kernels imp_kernels_plain = {
    .name = "plain",
    .isa = IMP_ISA_PLAIN,
    .widen = {widen_f32, widen_f16, widen_bf16, widen_q8_0},
    .dots = dots,
    .softmax = softmax,
    .column_sums = column_sums,
    .exp = exp_all,
};
