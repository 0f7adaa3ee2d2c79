/* kernels.h: the inner loops of imp_score_h2o(), one table per instruction set. Internal to src/select and its tests.
 *
 * The shapes are made so that every loop runs over queries in its vector lanes. A *query* here is one (row, head); the
 * queries of one KV head are packed, 16 to a *panel*, padded with zeros:
 *
 *     q     [panel][dim][16]              already times the scale of the dot product
 *     k     [token][dim]                  one block of up to 64 tokens, widened to f32
 *     block [panel][IMP_BLOCK token][16]  logits, then exp(logit - max of the block)
 *     max, sum, w  [panel][16]            one value per query
 *
 * Keys need no transposing that way, the maximum and the sum of a query's softmax are vertical, and one widening of a
 * key block serves all rows and heads of its KV head.
 */
#ifndef IMP_SELECT_KERNELS_H
#define IMP_SELECT_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum {
    IMP_PANEL = 16,
    IMP_BLOCK = 64,
    IMP_KEY_FLOATS = 8192 /* widened keys at once, on the stack: 32 KiB stay in the first-level cache */
};

/* What loops that are written once, and compiled for each, run as beside these kernels. */
typedef enum imp_isa {
    IMP_ISA_PLAIN,
    IMP_ISA_AVX2,
    IMP_ISA_AVX512
} imp_isa;

typedef struct imp_kernels {
    const char *name;
    imp_isa isa;

    /* dst[n] = src[n] as f32, by imp_type. `src` may be unaligned; Q8_0 takes multiples of 32. */
    void (*widen[4])(const void *src, float *dst, size_t n);

    /* block[p][first + t][lane] = dot(q[p][..][lane], k[t]) for the `n_tokens` of `k` (first + n_tokens <= IMP_BLOCK). */
    void (*dots)(const float *q, size_t n_panels, const float *k, size_t n_tokens, size_t dim, size_t first,
                 float *block);

    /* The same in whole numbers; NULL where that is no faster. Queries and keys are divided by their lengths, so that
     * 16 bits hold the elements and 32 any sum of their products, which is exact: a logit is off by about 1e-5 of the
     * product of the two lengths. Two elements stand side by side:
     *
     *     q16  [panel][(dim + 1) / 2][16][2]      gain [panel][16]: what a whole number of its query is worth
     *
     * pack16() makes them of packed queries. Both return 0, and leave nothing of use, if there is a query or a key
     * whose length is no usable number. */
    int (*pack16)(const float *q, size_t n_panels, size_t dim, int16_t *q16, float *gain);
    int (*dots16)(const int16_t *q16, const float *gain, size_t n_panels, const float *k, size_t n_tokens, size_t dim,
                  size_t first, float *block);

    /* Clamp the logits to +-IMP_LOGIT_MAX (a NaN becomes the lowest), apply the soft cap if it isn't 0, and turn them
     * into exp(logit - max) with the maximum and the sum over the tokens of this block. */
    void (*softmax)(float *block, size_t n_panels, size_t n_tokens, float softcap, float *max, float *sum);

    /* out[t] = sum over panels and lanes of block * w, in one fixed order. */
    void (*column_sums)(const float *block, size_t n_panels, size_t n_tokens, const float *w, float *out);

    /* y[i] = e^x[i] for x in [IMP_EXP_LOW, IMP_EXP_HIGH]; 0 below and for NaN; e^IMP_EXP_HIGH above.
     * Relative error at most 2^-23. */
    void (*exp)(const float *x, float *y, size_t n);
} imp_kernels;

/* Larger logits than any model makes, and small enough that the difference of two is finite. */
#define IMP_LOGIT_MAX 1e30f

/* e^x = 2^n * e^r with n = round(x / ln 2) and |r| <= ln(2) / 2; e^r = 1 + r + r^2 * (C0 + C1 r + .. + C4 r^4), minimax
 * in the relative error (3e-9 before rounding). LN2_HIGH has so few bits that n * LN2_HIGH is exact. The range keeps
 * 2^n a normal number. */
#define IMP_EXP_LOW -87.0f
#define IMP_EXP_HIGH 88.0f
#define IMP_EXP_LOG2E 1.44269504088896341f
#define IMP_EXP_LN2_HIGH 0.693359375f
#define IMP_EXP_LN2_LOW -2.12194440e-4f
#define IMP_EXP_C0 0.4999999343210686f
#define IMP_EXP_C1 0.16666520398820234f
#define IMP_EXP_C2 0.0416683907871323f
#define IMP_EXP_C3 0.008368745136211093f
#define IMP_EXP_C4 0.001381454010672705f

/* For softmax, where x is at most 0: 2^x with 2^r = 1 + C1 r + .. + C5 r^5 for |r| <= 1/2, minimax in the relative error
 * (9e-8 before rounding). 2^0 is exactly 1; what would be no normal number is 0. */
#define IMP_EXP2_C1 0.6931469776062733f
#define IMP_EXP2_C2 0.24022242082043924f
#define IMP_EXP2_C3 0.05550733735020457f
#define IMP_EXP2_C4 0.00967151255054744f
#define IMP_EXP2_C5 0.001326472902977749f

/* Scalar widening, for plain kernels and tails. */
static inline float imp_f32_of_bits(uint32_t bits)
{
    union { uint32_t u; float f; } x = {bits};
    return x.f;
}

static inline float imp_f32_of_bf16(uint16_t b) { return imp_f32_of_bits((uint32_t)b << 16); }

static inline float imp_f32_of_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;
    if (rest >= 0x7c00u) return imp_f32_of_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13); /* infinite, NaN */
    if (rest >= 0x0400u) return imp_f32_of_bits(sign | ((rest << 13) + 0x38000000u));
    float small = (float)rest * 0x1p-24f; /* zero, subnormal: exact */
    return sign ? -small : small;
}

extern const imp_kernels imp_kernels_plain;

/* NULL where the compiler's target or this machine hasn't got it. */
const imp_kernels *imp_kernels_avx2(void);
const imp_kernels *imp_kernels_avx512(void);
const imp_kernels *imp_kernels_vnni(void); /* AVX-512 with products of whole numbers */
const imp_kernels *imp_kernels_neon(void);

/* The kernels in force. */
const imp_kernels *imp_kernels_now(void);

#endif
