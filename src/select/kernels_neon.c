/* kernels_neon.c: every aarch64 has it. A panel is four vectors; four tokens keep 16 sums in the 32 registers. */
#include "select/kernels.h"

#if defined(__aarch64__) && defined(__ARM_NEON)

#include <arm_neon.h>
#include <string.h>

#define INLINE __attribute__((always_inline)) static inline

static void widen_f32(const void *src, float *dst, size_t n) { memcpy(dst, src, n * sizeof *dst); }

static void widen_f16(const void *src, float *dst, size_t n)
{
    const unsigned char *s = src;
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        uint8x8_t bytes = vld1_u8(s + 2 * i);
        vst1q_f32(dst + i, vcvt_f32_f16(vreinterpret_f16_u8(bytes)));
    }
    for (; i < n; i++) {
        uint16_t h;
        memcpy(&h, s + 2 * i, sizeof h);
        dst[i] = imp_f32_of_f16(h);
    }
}

static void widen_bf16(const void *src, float *dst, size_t n)
{
    const unsigned char *s = src;
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        uint16x4_t half = vreinterpret_u16_u8(vld1_u8(s + 2 * i));
        vst1q_f32(dst + i, vreinterpretq_f32_u32(vshll_n_u16(half, 16)));
    }
    for (; i < n; i++) {
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
        for (size_t j = 0; j < 32; j += 8) {
            int16x8_t codes = vmovl_s8(vreinterpret_s8_u8(vld1_u8(s + 2 + j)));
            vst1q_f32(dst + i + j, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(codes))), scale));
            vst1q_f32(dst + i + j + 4, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(codes))), scale));
        }
    }
}

/* One panel by T tokens; T is a constant where this is inlined, so the loops vanish. */
INLINE void dots_tile(const int T, const float *q, const float *k, size_t dim, float *out)
{
    float32x4_t sum[4][4];
    for (int t = 0; t < T; t++) {
        for (int i = 0; i < 4; i++) sum[t][i] = vdupq_n_f32(0.0f);
    }
    for (size_t d = 0; d < dim; d++) {
        float32x4_t a[4];
        for (int i = 0; i < 4; i++) a[i] = vld1q_f32(q + d * IMP_PANEL + 4 * i);
        for (int t = 0; t < T; t++) {
            float32x4_t b = vdupq_n_f32(k[(size_t)t * dim + d]);
            for (int i = 0; i < 4; i++) sum[t][i] = vfmaq_f32(sum[t][i], a[i], b);
        }
    }
    for (int t = 0; t < T; t++) {
        for (int i = 0; i < 4; i++) vst1q_f32(out + t * IMP_PANEL + 4 * i, sum[t][i]);
    }
}

static void dots(const float *q, size_t n_panels, const float *k, size_t n_tokens, size_t dim, size_t first,
                 float *block)
{
    for (size_t p = 0; p < n_panels; p++) {
        const float *panel = q + p * dim * IMP_PANEL;
        float *out = block + (p * IMP_BLOCK + first) * IMP_PANEL;
        size_t t = 0;
        for (; t + 4 <= n_tokens; t += 4) dots_tile(4, panel, k + t * dim, dim, out + t * IMP_PANEL);
        for (; t < n_tokens; t++) dots_tile(1, panel, k + t * dim, dim, out + t * IMP_PANEL);
    }
}

INLINE float32x4_t exp4(float32x4_t x)
{
    uint32x4_t normal = vcgeq_f32(x, vdupq_n_f32(IMP_EXP_LOW));
    x = vminnmq_f32(vmaxnmq_f32(x, vdupq_n_f32(IMP_EXP_LOW)), vdupq_n_f32(IMP_EXP_HIGH));
    float32x4_t n = vrndnq_f32(vmulq_n_f32(x, IMP_EXP_LOG2E));
    float32x4_t r = vfmsq_f32(x, n, vdupq_n_f32(IMP_EXP_LN2_HIGH));
    r = vfmsq_f32(r, n, vdupq_n_f32(IMP_EXP_LN2_LOW));
    float32x4_t c = vdupq_n_f32(IMP_EXP_C4);
    c = vfmaq_f32(vdupq_n_f32(IMP_EXP_C3), c, r);
    c = vfmaq_f32(vdupq_n_f32(IMP_EXP_C2), c, r);
    c = vfmaq_f32(vdupq_n_f32(IMP_EXP_C1), c, r);
    c = vfmaq_f32(vdupq_n_f32(IMP_EXP_C0), c, r);
    float32x4_t y = vaddq_f32(vfmaq_f32(r, vmulq_f32(c, r), r), vdupq_n_f32(1.0f));
    int32x4_t bits = vaddq_s32(vreinterpretq_s32_f32(y), vshlq_n_s32(vcvtq_s32_f32(n), 23));
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_s32(bits), normal));
}

static void exp_all(const float *x, float *y, size_t n)
{
    size_t i = 0;
    for (; i + 4 <= n; i += 4) vst1q_f32(y + i, exp4(vld1q_f32(x + i)));
    if (i < n) {
        float tail[4] = {0};
        memcpy(tail, x + i, (n - i) * sizeof *tail);
        vst1q_f32(tail, exp4(vld1q_f32(tail)));
        memcpy(y + i, tail, (n - i) * sizeof *tail);
    }
}

INLINE float32x4_t cap4(float32x4_t x, float softcap)
{
    const float32x4_t one = vdupq_n_f32(1.0f), two = vdupq_n_f32(2.0f), limit = vdupq_n_f32(softcap);
    float32x4_t e = exp4(vdivq_f32(vmulq_f32(two, x), limit));
    return vmulq_f32(limit, vsubq_f32(one, vdivq_f32(two, vaddq_f32(e, one))));
}

/* A quarter of a panel at a time. */
static void softmax(float *block, size_t n_panels, size_t n_tokens, float softcap, float *max, float *sum)
{
    const float32x4_t low = vdupq_n_f32(-IMP_LOGIT_MAX), high = vdupq_n_f32(IMP_LOGIT_MAX);
    for (size_t quarter = 0; quarter < 4 * n_panels; quarter++) {
        float *x = block + (quarter / 4) * IMP_BLOCK * IMP_PANEL + quarter % 4 * 4;
        float32x4_t m = low, s = vdupq_n_f32(0.0f);
        for (size_t t = 0; t < n_tokens; t++) {
            /* maxnm gives the number if the other is a NaN */
            float32x4_t v = vminnmq_f32(vmaxnmq_f32(vld1q_f32(x + t * IMP_PANEL), low), high);
            if (softcap != 0.0f) v = cap4(v, softcap);
            vst1q_f32(x + t * IMP_PANEL, v);
            m = vmaxq_f32(m, v);
        }
        for (size_t t = 0; t < n_tokens; t++) {
            float32x4_t e = exp4(vsubq_f32(vld1q_f32(x + t * IMP_PANEL), m));
            vst1q_f32(x + t * IMP_PANEL, e);
            s = vaddq_f32(s, e);
        }
        vst1q_f32(max + quarter * 4, m);
        vst1q_f32(sum + quarter * 4, s);
    }
}

static void column_sums(const float *block, size_t n_panels, size_t n_tokens, const float *w, float *out)
{
    for (size_t t = 0; t < n_tokens; t++) {
        float32x4_t a = vdupq_n_f32(0.0f), b = a;
        for (size_t p = 0; p < n_panels; p++) {
            const float *x = block + (p * IMP_BLOCK + t) * IMP_PANEL, *v = w + p * IMP_PANEL;
            a = vfmaq_f32(a, vld1q_f32(x), vld1q_f32(v));
            b = vfmaq_f32(b, vld1q_f32(x + 4), vld1q_f32(v + 4));
            a = vfmaq_f32(a, vld1q_f32(x + 8), vld1q_f32(v + 8));
            b = vfmaq_f32(b, vld1q_f32(x + 12), vld1q_f32(v + 12));
        }
        out[t] = vaddvq_f32(vaddq_f32(a, b));
    }
}

static const imp_kernels kernels = {
    .name = "neon",
    .isa = IMP_ISA_PLAIN,
    .widen = {widen_f32, widen_f16, widen_bf16, widen_q8_0},
    .dots = dots,
    .softmax = softmax,
    .column_sums = column_sums,
    .exp = exp_all,
};

const imp_kernels *imp_kernels_neon(void) { return &kernels; }

#else

const imp_kernels *imp_kernels_neon(void) { return NULL; }

#endif
