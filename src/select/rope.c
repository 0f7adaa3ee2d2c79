/* rope.c: tables of cosines and sines, and rows turned by them. */
#include "select/rope.h"

#include <math.h>

#include "base/alloc.h"
#include "base/status.h"
#include "select/kernels.h"
#include "select/linear.h"

#define TWO_PI 6.2831853071795864769f

struct imp_rope_table {
    imp_rope_pairs pairs;
    uint32_t head_dim, first_dim, n_pairs;
    size_t first, n;
    float magnitude;
    float *turns; /* [n][2][n_pairs]: cosines, then sines, times the magnitude */
};

/* -------------------------------------------------------------------------------------------------- the tables ---- */

/* The pair that turns `n_turns` times over the original context. */
static float pair_of_turns(const imp_rope *r, float n_turns)
{
    return (float)r->n_dims * logf((float)r->n_ctx_orig / (n_turns * TWO_PI)) / (2.0f * logf(r->base));
}

/* How much of pair i's angle stays unstretched, 0..1. */
static float plain_share(const imp_rope *r, uint32_t i)
{
    float low = fmaxf(0.0f, floorf(pair_of_turns(r, r->beta_fast)));
    float high = fminf((float)(r->n_dims - 1), ceilf(pair_of_turns(r, r->beta_slow)));
    float y = ((float)i - low) / fmaxf(0.001f, high - low);
    return (1.0f - fminf(1.0f, fmaxf(0.0f, y))) * r->ext_factor;
}

static int check(const imp_rope *r, uint32_t head_dim)
{
    if (r->n_dims == 0) return 0;
    if (r->pairs != IMP_ROPE_NORM && r->pairs != IMP_ROPE_NEOX) return imp_fail(IMP_E_ARG, "no such pairing of dims");
    if (r->n_dims % 2 != 0 || r->n_dims > head_dim || r->first_dim > head_dim - r->n_dims) {
        return imp_fail(IMP_E_ARG, "RoPE over %u dims from %u on in heads of %u", r->n_dims, r->first_dim, head_dim);
    }
    int yarn = r->ext_factor != 0.0f;
    int usable = r->base > 1.0f && r->freq_scale > 0.0f && r->attn_factor != 0.0f && isfinite(r->base) &&
                 isfinite(r->freq_scale) && isfinite(r->attn_factor) && isfinite(r->ext_factor) &&
                 (!yarn || (r->n_ctx_orig > 0 && r->beta_fast > 0.0f && r->beta_slow > 0.0f));
    for (uint32_t i = 0; usable && r->factors && i < r->n_dims / 2; i++) {
        usable = r->factors[i] != 0.0f && isfinite(r->factors[i]);
    }
    return usable ? 0 : imp_fail(IMP_E_ARG, "RoPE values out of range");
}

static void fill(imp_rope_table *t, const imp_rope *r, const float *share)
{
    const float step = powf(r->base, -2.0f / (float)r->n_dims);
    for (size_t p = 0; p < t->n; p++) {
        float *cosines = t->turns + p * 2 * t->n_pairs, *sines = cosines + t->n_pairs;
        float plain = (float)(t->first + p);
        for (uint32_t i = 0; i < t->n_pairs; i++, plain *= step) {
            float own = r->factors ? plain / r->factors[i] : plain;
            float stretched = r->freq_scale * own;
            float angle = share ? stretched * (1.0f - share[i]) + own * share[i] : stretched;
            cosines[i] = cosf(angle) * t->magnitude;
            sines[i] = sinf(angle) * t->magnitude;
        }
    }
}

int imp_rope_table_new(const imp_rope *rope, uint32_t head_dim, size_t first, size_t n, imp_rope_table **out)
{
    imp_rope_table *t = NULL;
    float *share = NULL;
    *out = NULL;
    int rc = check(rope, head_dim);
    if (rc < 0) return rc;

    uint32_t n_pairs = rope->n_dims / 2;
    size_t n_bytes;
    rc = IMP_E_NOMEM;
    if (__builtin_mul_overflow(n, 2 * sizeof(float) * n_pairs, &n_bytes)) goto out;
    t = imp_calloc(1, sizeof *t);
    if (!t) goto out;
    *t = (imp_rope_table){.pairs = rope->pairs, .head_dim = head_dim, .first_dim = rope->first_dim, .n_pairs = n_pairs,
                          .first = first, .n = n, .magnitude = rope->attn_factor};
    t->turns = imp_aligned(64, n_bytes);
    if (!t->turns) goto out;
    if (n_pairs > 0 && rope->ext_factor != 0.0f) {
        share = imp_malloc(n_pairs * sizeof *share);
        if (!share) goto out;
        for (uint32_t i = 0; i < n_pairs; i++) share[i] = plain_share(rope, i);
        t->magnitude *= 1.0f + 0.1f * logf(1.0f / rope->freq_scale);
    }
    if (n_pairs > 0) fill(t, rope, share);
    *out = t;
    t = NULL;
    rc = 0;
out:
    imp_free(share);
    imp_rope_table_free(t);
    return rc < 0 ? imp_fail(rc, "no memory for RoPE tables of %zu positions", n) : 0;
}

void imp_rope_table_free(imp_rope_table *t)
{
    if (!t) return;
    imp_free(t->turns);
    imp_free(t);
}

int imp_rope_table_covers(const imp_rope_table *t, size_t first, size_t n)
{
    return first >= t->first && first - t->first <= t->n && n <= t->n - (first - t->first);
}

uint32_t imp_rope_table_head_dim(const imp_rope_table *t) { return t->head_dim; }

/* ------------------------------------------------------------------------------------------------- the turning ---- */

/* `gain` and `sign` are (1, 1) to turn forth, and (1 / magnitude^2, -1) back: the table holds magnitude x rotation. */
IMP_LINEAR_INLINE void turn_rows(const imp_rope_table *t, size_t first, float *rows, size_t row_stride, size_t n_rows,
                                 float gain, float sign)
{
    const size_t n = t->n_pairs;
    for (size_t r = 0; r < n_rows; r++) {
        const float *restrict cosines = t->turns + (first - t->first + r) * 2 * n, *restrict sines = cosines + n;
        float *restrict row = rows + r * row_stride + t->first_dim;
        if (t->pairs == IMP_ROPE_NEOX) {
            float *restrict a = row, *restrict b = row + n;
            for (size_t i = 0; i < n; i++) {
                float c = cosines[i] * gain, s = sines[i] * gain * sign, x = a[i], y = b[i];
                a[i] = x * c - y * s;
                b[i] = x * s + y * c;
            }
        } else {
            for (size_t i = 0; i < n; i++) {
                float c = cosines[i] * gain, s = sines[i] * gain * sign, x = row[2 * i], y = row[2 * i + 1];
                row[2 * i] = x * c - y * s;
                row[2 * i + 1] = x * s + y * c;
            }
        }
    }
}

typedef void turn_fn(const imp_rope_table *t, size_t first, float *rows, size_t row_stride, size_t n_rows);

/* Forth and back for one instruction set. Forth, as scoring does it over and over, gain and sign vanish. */
#define TURN_VARIANT(forth, back, attributes)                                                                       \
    attributes static void forth(const imp_rope_table *t, size_t first, float *rows, size_t row_stride,             \
                                 size_t n_rows)                                                                     \
    {                                                                                                               \
        turn_rows(t, first, rows, row_stride, n_rows, 1.0f, 1.0f);                                                  \
    }                                                                                                               \
    attributes static void back(const imp_rope_table *t, size_t first, float *rows, size_t row_stride,              \
                                size_t n_rows)                                                                      \
    {                                                                                                               \
        turn_rows(t, first, rows, row_stride, n_rows, 1.0f / (t->magnitude * t->magnitude), -1.0f);                 \
    }

TURN_VARIANT(forth_plain, back_plain, )
#if defined(__x86_64__)
TURN_VARIANT(forth_avx2, back_avx2, IMP_LINEAR_AVX2)
TURN_VARIANT(forth_avx512, back_avx512, IMP_LINEAR_AVX512)
#endif

static const struct turns {
    turn_fn *forth, *back;
} turns[] = {
    [IMP_ISA_PLAIN] = {forth_plain, back_plain},
#if defined(__x86_64__)
    [IMP_ISA_AVX2] = {forth_avx2, back_avx2},
    [IMP_ISA_AVX512] = {forth_avx512, back_avx512},
#endif
};

void imp_rope_apply(const imp_rope_table *t, size_t first, float *rows, size_t row_stride, size_t n_rows)
{
    turns[imp_kernels_now()->isa].forth(t, first, rows, row_stride, n_rows);
}

void imp_rope_undo(const imp_rope_table *t, size_t first, float *rows, size_t row_stride, size_t n_rows)
{
    turns[imp_kernels_now()->isa].back(t, first, rows, row_stride, n_rows);
}
