/* The vector kernels against exact arithmetic: every f16 and bf16, the exponential over its whole range. */
#include "unit/select/select_util.h"

#include "impress/impress.h"
#include "select/kernels.h"
#include "select/select.h"

static double exact_f16(uint16_t h)
{
    double sign = h & 0x8000 ? -1.0 : 1.0;
    int exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 31) return fraction ? (double)NAN : sign * (double)INFINITY;
    return exponent ? sign * ldexp(1024 + fraction, exponent - 25) : sign * ldexp(fraction, -24);
}

static void same(double want, float got)
{
    if (isnan(want)) {
        assert_true(isnan(got));
    } else {
        assert_true(want == (double)got);
        assert_int_equal(signbit(want) != 0, signbit(got) != 0);
    }
}

static void widen_half(const imp_kernels *k)
{
    enum { N = 65536 };
    unsigned char *src = test_alloc(2 * N + 1); /* + 1: read from an odd address */
    float *dst = test_alloc(N * sizeof *dst);
    for (unsigned i = 0; i < N; i++) {
        uint16_t h = (uint16_t)i;
        memcpy(src + 1 + 2 * i, &h, 2);
    }
    k->widen[IMP_TYPE_F16](src + 1, dst, N);
    for (unsigned i = 0; i < N; i++) same(exact_f16((uint16_t)i), dst[i]);
    k->widen[IMP_TYPE_BF16](src + 1, dst, N);
    for (unsigned i = 0; i < N; i++) {
        uint32_t bits = i << 16;
        float want;
        memcpy(&want, &bits, sizeof want);
        same((double)want, dst[i]);
    }
    imp_free(dst);
    imp_free(src);
}

static void widen_tails(const imp_kernels *k, imp_rng *rng)
{
    for (size_t n = 0; n <= 49; n++) {
        for (int type = IMP_TYPE_F32; type <= IMP_TYPE_BF16; type++) {
            size_t n_bytes = imp_type_bytes((imp_type)type, n);
            unsigned char *src = test_alloc(n_bytes);
            float *dst = test_alloc(n * sizeof *dst), *want = test_alloc(n * sizeof *want);
            for (size_t i = 0; i < n_bytes; i++) src[i] = (unsigned char)(imp_rng_u64(rng) & 0x3f);
            k->widen[type](src, dst, n);
            imp_kernels_plain.widen[type](src, want, n);
            assert_memory_equal(dst, want, n * sizeof *dst);
            imp_free(want);
            imp_free(dst);
            imp_free(src);
        }
    }
}

static void widen_blocks(const imp_kernels *k, imp_rng *rng)
{
    for (size_t n = 32; n <= 256; n += 32) {
        size_t n_bytes = imp_type_bytes(IMP_TYPE_Q8_0, n);
        unsigned char *src = test_alloc(n_bytes);
        float *dst = test_alloc(n * sizeof *dst);
        for (size_t i = 0; i < n_bytes; i++) src[i] = (unsigned char)imp_rng_u64(rng);
        for (size_t b = 0; b < n_bytes; b += 34) src[b + 1] &= 0xbf; /* the scale: finite */
        k->widen[IMP_TYPE_Q8_0](src, dst, n);
        for (size_t i = 0; i < n; i++) {
            uint16_t h;
            memcpy(&h, src + i / 32 * 34, 2);
            double code = (double)(signed char)src[i / 32 * 34 + 2 + i % 32];
            assert_true((double)dst[i] == (double)(float)(exact_f16(h) * code));
        }
        imp_free(dst);
        imp_free(src);
    }
}

static void widens(void **state)
{
    (void)state;
    imp_rng rng = test_rng("widens");
    for (int i = 0; i < TEST_ISAS; i++) {
        if (imp_select_force_isa(test_isas[i]) < 0) continue;
        widen_half(imp_kernels_now());
        widen_tails(imp_kernels_now(), &rng);
        widen_blocks(imp_kernels_now(), &rng);
    }
}

/* Values [i] = the floats between two bit patterns, a few hundred apart. */
static double worst_error(const imp_kernels *k, uint32_t first, uint32_t last, uint32_t step)
{
    enum { N = 1000 };
    float x[N], y[N];
    double worst = 0.0;
    for (uint64_t bits = first; bits <= last;) {
        size_t n = 0;
        for (; n < N && bits <= last; n++, bits += step) {
            uint32_t b = (uint32_t)bits;
            memcpy(&x[n], &b, sizeof b);
        }
        k->exp(x, y, n);
        for (size_t i = 0; i < n; i++) {
            double want = exp((double)x[i]), error = fabs((double)y[i] - want) / want;
            if (error > worst) worst = error;
        }
    }
    return worst;
}

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static void exp_is_close(void **state)
{
    (void)state;
    for (int i = 0; i < TEST_ISAS; i++) {
        if (imp_select_force_isa(test_isas[i]) < 0) continue;
        const imp_kernels *k = imp_kernels_now();
        double below = worst_error(k, bits_of(-0.0f), bits_of(IMP_EXP_LOW), 4999);
        double above = worst_error(k, 0, bits_of(IMP_EXP_HIGH), 4999);
        /* where it matters most, densely: [-8, -1/4] */
        double near = worst_error(k, bits_of(-0.25f), bits_of(-8.0f), 97);
        printf("%s: relative error of exp below 0 %.2e, above %.2e, -8..-1/4 %.2e\n", k->name, below, above, near);
        assert_true(below <= 0x1p-23 && above <= 0x1p-23 && near <= 0x1p-23);
    }
}

static void exp_at_the_edges(void **state)
{
    (void)state;
    for (int i = 0; i < TEST_ISAS; i++) {
        if (imp_select_force_isa(test_isas[i]) < 0) continue;
        const imp_kernels *k = imp_kernels_now();
        float x[] = {0.0f, -0.0f, NAN, -NAN, -INFINITY, -1e30f, -87.1f, INFINITY, 1e30f, 88.5f, -87.0f, 1e-40f, -1e-40f};
        float y[13];
        k->exp(x, y, 13);
        assert_true(y[0] == 1.0f && y[1] == 1.0f && y[11] == 1.0f && y[12] == 1.0f);
        for (int j = 2; j <= 6; j++) assert_true(y[j] == 0.0f);
        for (int j = 7; j <= 9; j++) assert_true(isfinite(y[j]) && y[j] > 1e38f);
        assert_true(y[10] > 1e-38f && y[10] < 2e-38f);
        for (size_t n = 0; n <= 40; n++) { /* tails, in place */
            float *v = test_alloc(n * sizeof *v);
            for (size_t j = 0; j < n; j++) v[j] = -(float)j;
            k->exp(v, v, n);
            for (size_t j = 0; j < n; j++) assert_true(fabs((double)v[j] / exp(-(double)j) - 1.0) <= 0x1p-23);
            imp_free(v);
        }
    }
}

/* dots16() of one key, which ends at the end of its memory; false if it or the queries are refused. */
static int dot_16(const imp_kernels *k, const float *q, const float *key, size_t dim, float *block)
{
    int16_t *q16 = test_alloc(IMP_PANEL * (dim + dim % 2) * sizeof *q16);
    float gain[IMP_PANEL];
    int fine = k->pack16(q, 1, dim, q16, gain) && k->dots16(q16, gain, 1, key, 1, dim, 0, block);
    imp_free(q16);
    return fine;
}

/* Against exact products: each within what rounding can do at worst, all of them within what it does on average. */
static void dots_of_whole_numbers(void **state)
{
    (void)state;
    imp_rng rng = test_rng("dots_of_whole_numbers");
    static const size_t dims[] = {1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 80, 96, 128};
    for (int i = 0; i < TEST_ISAS; i++) {
        if (imp_select_force_isa(test_isas[i]) < 0 || !imp_kernels_now()->dots16) continue;
        const imp_kernels *k = imp_kernels_now();
        for (size_t round = 0; round < 200; round++) {
            size_t dim = dims[round % (sizeof dims / sizeof dims[0])], n_panels = 1 + imp_rng_below(&rng, 7);
            size_t first = imp_rng_below(&rng, IMP_BLOCK), n = 1 + imp_rng_below(&rng, IMP_BLOCK - first);
            float size = test_uniform(&rng, 1e-3f, 1e3f), gain[7 * IMP_PANEL];
            float *q = test_alloc(n_panels * dim * IMP_PANEL * sizeof *q), *keys = test_alloc(n * dim * sizeof *keys);
            float *block = test_alloc(n_panels * IMP_BLOCK * IMP_PANEL * sizeof *block);
            int16_t *q16 = test_alloc(n_panels * IMP_PANEL * (dim + dim % 2) * sizeof *q16);
            for (size_t j = 0; j < n_panels * dim * IMP_PANEL; j++) q[j] = test_uniform(&rng, -2.0f, 2.0f);
            /* some keys are a thousand times the others */
            for (size_t t = 0; t < n; t++) {
                float own = imp_rng_below(&rng, 8) ? size : 1000.0f * size;
                for (size_t d = 0; d < dim; d++) keys[t * dim + d] = test_uniform(&rng, -own, own);
            }
            assert_true(k->pack16(q, n_panels, dim, q16, gain));
            assert_true(k->dots16(q16, gain, n_panels, keys, n, dim, first, block));
            double squares = 0.0;
            for (size_t lane = 0; lane < n_panels * IMP_PANEL; lane++) {
                for (size_t t = 0; t < n; t++) {
                    const float *x = q + lane / IMP_PANEL * dim * IMP_PANEL + lane % IMP_PANEL;
                    double dot = 0.0, q_square = 0.0, k_square = 0.0;
                    for (size_t d = 0; d < dim; d++) {
                        double a = (double)x[d * IMP_PANEL], b = (double)keys[t * dim + d];
                        dot += a * b;
                        q_square += a * a;
                        k_square += b * b;
                    }
                    size_t at = (lane / IMP_PANEL * IMP_BLOCK + first + t) * IMP_PANEL + lane % IMP_PANEL;
                    double error = ((double)block[at] - dot) / sqrt(q_square * k_square);
                    assert_true(fabs(error) <= 1.01 * sqrt((double)dim) * 0x1p-15);
                    squares += error * error;
                }
            }
            assert_true(sqrt(squares / (double)(n * n_panels * IMP_PANEL)) <= 0x1p-15);
            imp_free(q16);
            imp_free(block);
            imp_free(keys);
            imp_free(q);
        }
    }
    imp_select_force_isa(NULL);
}

/* What can't be divided by its length is left to floats; what is 0 has no direction, and needs none. */
static void whole_numbers_refused(void **state)
{
    (void)state;
    enum { DIM = 64 };
    static const float bad[] = {NAN, INFINITY, -INFINITY, 1e16f, -1e30f, 1e-16f};
    for (int i = 0; i < TEST_ISAS; i++) {
        if (imp_select_force_isa(test_isas[i]) < 0 || !imp_kernels_now()->dots16) continue;
        const imp_kernels *k = imp_kernels_now();
        float *q = test_alloc(DIM * IMP_PANEL * sizeof *q), *key = test_alloc(DIM * sizeof *key);
        float *block = test_alloc(IMP_BLOCK * IMP_PANEL * sizeof *block);
        for (size_t j = 0; j < DIM * IMP_PANEL; j++) q[j] = 1.0f;
        for (size_t j = 0; j < DIM; j++) key[j] = 0.0f;
        assert_true(dot_16(k, q, key, DIM, block));
        for (size_t lane = 0; lane < IMP_PANEL; lane++) assert_true(block[lane] == 0.0f);
        for (size_t j = 0; j < sizeof bad / sizeof bad[0]; j++) {
            key[DIM - 1] = bad[j];
            assert_false(dot_16(k, q, key, DIM, block));
            key[DIM - 1] = 1.0f;
            for (size_t d = 0; d < DIM; d++) q[d * IMP_PANEL + 5] = d == 9 ? bad[j] : 0.0f;
            assert_false(dot_16(k, q, key, DIM, block));
            for (size_t d = 0; d < DIM; d++) q[d * IMP_PANEL + 5] = 0.0f;
            assert_true(dot_16(k, q, key, DIM, block));
            assert_true(block[5] == 0.0f && fabsf(block[6] - 1.0f) < 1e-3f);
        }
        imp_free(block);
        imp_free(key);
        imp_free(q);
    }
    imp_select_force_isa(NULL);
}

static void forcing(void **state)
{
    (void)state;
    assert_int_equal(imp_select_force_isa("mmx"), IMP_E_UNSUPPORTED);
    assert_int_equal(imp_select_force_isa(""), IMP_E_UNSUPPORTED);
    assert_int_equal(imp_select_force_isa("plain"), 0);
    assert_string_equal(imp_select_isa(), "plain");
    assert_int_equal(imp_select_force_isa("mmx"), IMP_E_UNSUPPORTED);
    assert_string_equal(imp_select_isa(), "plain");
    assert_int_equal(imp_select_force_isa(NULL), 0);
    printf("best: %s\n", imp_select_isa());
#if defined(__aarch64__)
    assert_string_equal(imp_select_isa(), "neon");
#endif
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(widens),
        cmocka_unit_test(exp_is_close),
        cmocka_unit_test(exp_at_the_edges),
        cmocka_unit_test(dots_of_whole_numbers),
        cmocka_unit_test(whole_numbers_refused),
        cmocka_unit_test(forcing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
