/* RoPE against a twin in double precision that follows the formulas, not the steps. */
#include "unit/select/select_util.h"

#include "impress/impress.h"
#include "select/rope.h"
#include "select/select.h"

static double twin_turns(const imp_rope *r, double n_turns)
{
    const double pi = 3.14159265358979323846;
    return r->n_dims * log(r->n_ctx_orig / (n_turns * 2.0 * pi)) / (2.0 * log((double)r->base));
}

static void twin_apply(const imp_rope *r, size_t position, const float *in, double *out, uint32_t head_dim)
{
    for (uint32_t d = 0; d < head_dim; d++) out[d] = (double)in[d];
    for (uint32_t i = 0; i < r->n_dims / 2; i++) {
        double own = (double)position * pow((double)r->base, -2.0 * i / r->n_dims);
        if (r->factors) own /= (double)r->factors[i];
        double angle = own * (double)r->freq_scale, magnitude = (double)r->attn_factor;
        if (r->ext_factor != 0.0f) {
            double low = fmax(0.0, floor(twin_turns(r, (double)r->beta_fast)));
            double high = fmin(r->n_dims - 1.0, ceil(twin_turns(r, (double)r->beta_slow)));
            double ramp = 1.0 - fmin(1.0, fmax(0.0, (i - low) / fmax(0.001, high - low)));
            double mix = ramp * (double)r->ext_factor;
            angle = angle * (1.0 - mix) + own * mix;
            magnitude *= 1.0 + 0.1 * log(1.0 / (double)r->freq_scale);
        }
        uint32_t a = r->first_dim + (r->pairs == IMP_ROPE_NEOX ? i : 2 * i);
        uint32_t b = r->pairs == IMP_ROPE_NEOX ? a + r->n_dims / 2 : a + 1;
        double x = (double)in[a], y = (double)in[b];
        out[a] = magnitude * (x * cos(angle) - y * sin(angle));
        out[b] = magnitude * (x * sin(angle) + y * cos(angle));
    }
}

static imp_rope some_rope(imp_rng *rng, uint32_t head_dim, float *factors)
{
    imp_rope r = {.pairs = imp_rng_below(rng, 2) ? IMP_ROPE_NEOX : IMP_ROPE_NORM, .base = 10000.0f, .freq_scale = 1.0f,
                  .attn_factor = 1.0f, .beta_fast = 32.0f, .beta_slow = 1.0f, .n_ctx_orig = 4096};
    r.n_dims = 2 * (uint32_t)imp_rng_below(rng, head_dim / 2 + 1);
    r.first_dim = (uint32_t)imp_rng_below(rng, head_dim - r.n_dims + 1);
    if (imp_rng_below(rng, 2)) r.base = 1e6f;
    if (imp_rng_below(rng, 2)) r.freq_scale = test_uniform(rng, 0.1f, 1.0f);
    if (imp_rng_below(rng, 2)) r.attn_factor = test_uniform(rng, 0.5f, 2.0f);
    if (imp_rng_below(rng, 2)) r.ext_factor = test_uniform(rng, 0.5f, 1.0f);
    if (imp_rng_below(rng, 2)) {
        for (uint32_t i = 0; i < r.n_dims / 2; i++) factors[i] = test_uniform(rng, 1.0f, 8.0f);
        r.factors = factors;
    }
    return r;
}

static void against_twin(void **state)
{
    (void)state;
    imp_rng rng = test_rng("against_twin");
    for (int round = 0; round < 300; round++) {
        uint32_t head_dim = 2 + 2 * (uint32_t)imp_rng_below(&rng, 70);
        float *factors = test_alloc(head_dim / 2 * sizeof *factors);
        imp_rope r = some_rope(&rng, head_dim, factors);
        size_t first = imp_rng_below(&rng, 4000), n = 1 + imp_rng_below(&rng, 20), stride = head_dim + 3;
        imp_rope_table *t;
        assert_int_equal(imp_rope_table_new(&r, head_dim, first, n, &t), 0);
        assert_int_equal(imp_rope_table_head_dim(t), head_dim);
        assert_true(imp_rope_table_covers(t, first, n) && imp_rope_table_covers(t, first + n, 0));
        assert_false(imp_rope_table_covers(t, first, n + 1) || imp_rope_table_covers(t, first + n, 1));
        assert_false(first > 0 && imp_rope_table_covers(t, first - 1, 1));
        assert_false(imp_rope_table_covers(t, first, SIZE_MAX) || imp_rope_table_covers(t, SIZE_MAX, 1));

        size_t skip = imp_rng_below(&rng, n), n_rows = 1 + imp_rng_below(&rng, n - skip);
        size_t n_floats = (n_rows - 1) * stride + head_dim;
        float *before = test_alloc(n_floats * sizeof *before), *rows = test_alloc(n_floats * sizeof *rows);
        float *plain = test_alloc(n_floats * sizeof *plain);
        double *want = test_alloc(head_dim * sizeof *want);
        for (size_t i = 0; i < n_floats; i++) before[i] = test_uniform(&rng, -4.0f, 4.0f);
        for (int isa = 0; isa < TEST_ISAS; isa++) {
            if (imp_select_force_isa(test_isas[isa]) < 0) continue;
            memcpy(rows, before, n_floats * sizeof *rows);
            imp_rope_apply(t, first + skip, rows, stride, n_rows);
            for (size_t i = 0; i < n_rows; i++) {
                size_t position = first + skip + i;
                twin_apply(&r, position, before + i * stride, want, head_dim);
                /* Angles in float: off by a few roundings of the largest. */
                double tolerance = 8.0 * (double)r.attn_factor * (1e-6 + 6e-7 * (double)position);
                for (uint32_t d = 0; d < head_dim; d++) {
                    float got = rows[i * stride + d];
                    assert_true(fabs((double)got - want[d]) <= tolerance);
                    if (d < r.first_dim || d >= r.first_dim + r.n_dims) assert_true(got == before[i * stride + d]);
                }
                for (size_t gap = head_dim; gap < stride && i + 1 < n_rows; gap++) {
                    assert_true(rows[i * stride + gap] == before[i * stride + gap]);
                }
            }
            imp_rope_undo(t, first + skip, rows, stride, n_rows);
            for (size_t i = 0; i < n_floats; i++) assert_true(fabsf(rows[i] - before[i]) < 1e-5f);
            if (isa == 0) memcpy(plain, rows, n_floats * sizeof *plain);
            for (size_t i = 0; i < n_floats; i++) assert_true(fabsf(rows[i] - plain[i]) < 1e-5f);
        }
        imp_select_force_isa(NULL);
        imp_free(want);
        imp_free(plain);
        imp_free(rows);
        imp_free(before);
        imp_rope_table_free(t);
        imp_free(factors);
    }
}

/* What RoPE is for: the dot product of two turned rows depends on their distance alone. */
static void distance_alone(void **state)
{
    (void)state;
    imp_rng rng = test_rng("distance_alone");
    enum { DIM = 64, N = 600 };
    for (int pairs = 0; pairs < 2; pairs++) {
        imp_rope r = {.pairs = pairs ? IMP_ROPE_NEOX : IMP_ROPE_NORM, .n_dims = DIM, .base = 1e4f, .freq_scale = 1.0f,
                      .attn_factor = 1.0f};
        imp_rope_table *t;
        assert_int_equal(imp_rope_table_new(&r, DIM, 0, N, &t), 0);
        float q[DIM], k[DIM];
        for (int d = 0; d < DIM; d++) q[d] = test_uniform(&rng, -1, 1), k[d] = test_uniform(&rng, -1, 1);
        double first = 0.0;
        for (size_t at = 0; at + 100 < N; at += 50) {
            float a[DIM], b[DIM];
            memcpy(a, q, sizeof a);
            memcpy(b, k, sizeof b);
            imp_rope_apply(t, at + 100, a, DIM, 1);
            imp_rope_apply(t, at, b, DIM, 1);
            double dot = 0.0;
            for (int d = 0; d < DIM; d++) dot += (double)a[d] * (double)b[d];
            if (at == 0) first = dot;
            assert_true(fabs(dot - first) < 3e-3);
        }
        imp_rope_table_free(t);
    }
}

static void bad_values(void **state)
{
    (void)state;
    const imp_rope good = {.pairs = IMP_ROPE_NEOX, .n_dims = 64, .base = 1e4f, .freq_scale = 1.0f, .attn_factor = 1.0f};
    const float zero[32] = {0};
    imp_rope_table *t;
    imp_rope bad[] = {good, good, good, good, good, good, good, good, good, good};
    bad[0].n_dims = 63;
    bad[1].n_dims = 66;
    bad[2].first_dim = 2;
    bad[3].base = 1.0f;
    bad[4].freq_scale = 0.0f;
    bad[5].attn_factor = NAN;
    bad[6].factors = zero;
    bad[7].ext_factor = 1.0f; /* without the rest of YaRN */
    bad[8].pairs = (imp_rope_pairs)7;
    bad[9].first_dim = UINT32_MAX;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(imp_rope_table_new(&bad[i], 64, 0, 4, &t), IMP_E_ARG);
        assert_null(t);
    }
    assert_int_equal(imp_rope_table_new(&good, 64, 0, SIZE_MAX / 8, &t), IMP_E_NOMEM);
    const imp_rope none = {.n_dims = 0};
    float row[4] = {1, 2, 3, 4};
    assert_int_equal(imp_rope_table_new(&none, 4, 0, 4, &t), 0);
    imp_rope_apply(t, 1, row, 4, 1);
    imp_rope_undo(t, 1, row, 4, 1);
    assert_true(row[0] == 1 && row[3] == 4);
    imp_rope_table_free(t);
    imp_rope_table_free(NULL);
}

static void no_memory(void **state)
{
    (void)state;
    const imp_rope r = {.pairs = IMP_ROPE_NORM, .n_dims = 8, .base = 1e4f, .freq_scale = 0.5f, .attn_factor = 1.0f,
                        .ext_factor = 1.0f, .beta_fast = 32.0f, .beta_slow = 1.0f, .n_ctx_orig = 512};
    imp_rope_table *t;
    int failed = 0;
    for (uint64_t at = 1;; at++) {
        imp_alloc_fail_at(at, 0);
        int rc = imp_rope_table_new(&r, 8, 0, 16, &t);
        imp_alloc_fail_at(0, 0);
        if (rc == 0) break;
        assert_int_equal(rc, IMP_E_NOMEM);
        assert_null(t);
        failed++;
    }
    assert_true(failed >= 3);
    imp_rope_table_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(against_twin),
        cmocka_unit_test(distance_alone),
        cmocka_unit_test(bad_values),
        cmocka_unit_test(no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
