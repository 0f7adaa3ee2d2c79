/* History and blending against twins in double precision. */
#include "unit/select/select_util.h"

#include "select/blend.h"
#include "select/half.h"
#include "select/kernels.h"

static float some_score(imp_rng *rng)
{
    static const float odd[] = {NAN, -NAN, INFINITY, -INFINITY, 0.0f, -0.0f, -1.0f, 1e-45f};
    if (imp_rng_below(rng, 20) == 0) return odd[imp_rng_below(rng, 8)];
    return test_uniform(rng, 0.0f, 1.0f) * test_uniform(rng, 0.0f, 1.0f);
}

static double counts(float x) { return x > 0.0f && isfinite(x) ? (double)x : 0.0; }

static void normalised(void **state)
{
    (void)state;
    imp_rng rng = test_rng("normalised");
    for (int round = 0; round < 500; round++) {
        size_t n = imp_rng_below(&rng, 100);
        float *scores = test_alloc(n * sizeof *scores), *out = test_alloc(n * sizeof *out);
        double sum = 0.0, mean = 0.0;
        for (size_t i = 0; i < n; i++) scores[i] = round % 9 ? some_score(&rng) : 0.0f;
        for (size_t i = 0; i < n; i++) sum += counts(scores[i]);
        imp_normalise(scores, n, out);
        for (size_t i = 0; i < n; i++) {
            double want = sum > 0.0 ? counts(scores[i]) * (double)n / sum : 0.0;
            assert_true(fabs((double)out[i] - want) <= 1e-6 * want + 1e-44);
            mean += (double)out[i] / (double)n;
        }
        if (sum > 0.0) assert_true(fabs(mean - 1.0) < 1e-5);
        imp_normalise(scores, n, scores); /* in place */
        assert_memory_equal(scores, out, n * sizeof *out);
        imp_free(out);
        imp_free(scores);
    }
}

/* The first requests give their plain mean; a steady stream is forgotten at the rate the header says. */
static void moving_average(void **state)
{
    (void)state;
    imp_rng rng = test_rng("moving_average");
    enum { N = 50 };
    float history[N] = {0};
    double sum[N] = {0};
    for (uint32_t request = 0; request < IMP_HISTORY_SPAN; request++) {
        float scores[N];
        for (int i = 0; i < N; i++) {
            scores[i] = some_score(&rng);
            sum[i] += counts(scores[i]);
        }
        imp_history_update(history, scores, N, imp_history_weight(request));
        for (int i = 0; i < N; i++) assert_true(fabs((double)history[i] - sum[i] / (request + 1)) < 1e-5);
    }
    float old = history[0];
    const float nothing[N] = {0};
    double share = 1.0;
    for (uint32_t request = IMP_HISTORY_SPAN; request < 40; request++) {
        imp_history_update(history, nothing, N, imp_history_weight(request));
        share *= 1.0 - 1.0 / IMP_HISTORY_SPAN;
        assert_true(fabs((double)history[0] - share * (double)old) < 1e-5);
    }
    assert_true(imp_history_weight(UINT32_MAX) == 1.0f / IMP_HISTORY_SPAN);
}

static void blending(void **state)
{
    (void)state;
    imp_rng rng = test_rng("blending");
    for (int round = 0; round < 500; round++) {
        size_t n = imp_rng_below(&rng, 60);
        float *scores = test_alloc(n * sizeof *scores), *history = test_alloc(n * sizeof *history);
        float *out = test_alloc(n * sizeof *out);
        for (size_t i = 0; i < n; i++) scores[i] = some_score(&rng), history[i] = some_score(&rng);
        imp_blend b = imp_blend_default();
        if (round % 2) {
            b = (imp_blend){imp_rng_below(&rng, 2) ? IMP_BLEND_MAX : IMP_BLEND_SUM, test_uniform(&rng, 0, 2)};
        }
        const float *past = round % 5 ? history : NULL;
        imp_blend_scores(b, scores, past, n, out);
        for (size_t i = 0; i < n; i++) {
            double s = counts(scores[i]), h = past ? counts(history[i]) * (double)b.weight : 0.0;
            double want = b.rule == IMP_BLEND_SUM ? s + h : fmax(s, h);
            assert_true(fabs((double)out[i] - want) <= 1e-6 * want + 1e-44);
        }
        imp_blend_scores(b, scores, past, n, scores); /* in place */
        assert_memory_equal(scores, out, n * sizeof *out);
        imp_free(out);
        imp_free(history);
        imp_free(scores);
    }
}

static void on_disk(void **state)
{
    (void)state;
    imp_rng rng = test_rng("on_disk");
    for (int round = 0; round < 200; round++) {
        size_t n = imp_rng_below(&rng, 50);
        float *history = test_alloc(n * sizeof *history), *back = test_alloc(n * sizeof *back);
        unsigned char *bytes = test_alloc(2 * n);
        for (size_t i = 0; i < n; i++) history[i] = some_score(&rng) * (imp_rng_below(&rng, 9) ? 1.0f : 1e6f);
        imp_history_encode(history, n, bytes);
        imp_history_decode(bytes, n, back);
        for (size_t i = 0; i < n; i++) {
            double want = fmin(counts(history[i]), 65504.0);
            assert_true(fabs((double)back[i] - want) <= want * 0x1p-11 + 0x1p-25);
        }
        for (size_t i = 0; i < 2 * n; i++) bytes[i] = (unsigned char)imp_rng_u64(&rng); /* damaged */
        imp_history_decode(bytes, n, back);
        for (size_t i = 0; i < n; i++) assert_true(back[i] >= 0.0f && isfinite(back[i]));
        imp_free(bytes);
        imp_free(back);
        imp_free(history);
    }
}

/* Every f16 comes back as it was, and what lies between two goes to the nearer one. */
static void half_precision(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x7bffu; h++) {
        float low = imp_f32_of_f16((uint16_t)h), high = imp_f32_of_f16((uint16_t)(h + 1)), middle = (low + high) / 2.0f;
        assert_int_equal(imp_f16_of_f32(low), h);
        assert_int_equal(imp_f16_of_f32(-high), 0x8000u | (h + 1));
        assert_int_equal(imp_f16_of_f32(nextafterf(middle, 0.0f)), h);
        assert_int_equal(imp_f16_of_f32(nextafterf(middle, 1e9f)), h + 1);
        assert_int_equal(imp_f16_of_f32(middle), h % 2 == 0 ? h : h + 1);
    }
    assert_int_equal(imp_f16_of_f32(65519.9f), 0x7bff);
    assert_int_equal(imp_f16_of_f32(1e30f), 0x7bff);
    assert_int_equal(imp_f16_of_f32(-INFINITY), 0xfbff);
    assert_int_equal(imp_f16_of_f32(NAN), 0);
    assert_int_equal(imp_f16_of_f32(-0.0f), 0x8000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(normalised),     cmocka_unit_test(moving_average), cmocka_unit_test(blending),
        cmocka_unit_test(on_disk), cmocka_unit_test(half_precision),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
