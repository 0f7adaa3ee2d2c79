/* imp_top_k() against a full sort. */
#include "unit/select/select_util.h"

#include "select/select.h"

static const float *sort_scores;

/* Better first: higher score, NaN last, then the lower index. */
static int compare(const void *a, const void *b)
{
    uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
    float x = sort_scores[i], y = sort_scores[j];
    if (isnan(x) != isnan(y)) return isnan(x) ? 1 : -1;
    if (x > y || x < y) return x > y ? -1 : 1;
    return (i > j) - (i < j);
}

static void check(const float *scores, size_t n, size_t k, size_t first, size_t last)
{
    uint32_t *out = test_alloc((k < n ? k : n) * sizeof *out), *order = test_alloc(n * sizeof *order);
    unsigned char *chosen = test_alloc(n);
    float *scratch = test_alloc(n * sizeof *scratch);
    double mass = -1.0;
    imp_top_k(scores, n, k, first, last, out, &mass, scratch);

    if (k > n) k = n;
    memset(chosen, 0, n);
    size_t left = k;
    for (size_t i = 0; i < n && i < first && left > 0; i++, left--) chosen[i] = 1;
    for (size_t i = n; i > 0 && n - i < last && left > 0; i--) {
        if (chosen[i - 1]) break;
        chosen[i - 1] = 1;
        left--;
    }
    for (size_t i = 0; i < n; i++) order[i] = (uint32_t)i;
    sort_scores = scores;
    qsort(order, n, sizeof *order, compare);
    for (size_t i = 0; i < n && left > 0; i++) {
        if (chosen[order[i]]) continue;
        chosen[order[i]] = 1;
        left--;
    }
    size_t w = 0;
    double all = 0.0, held = 0.0;
    for (size_t i = 0; i < n; i++) {
        double s = isfinite(scores[i]) ? (double)scores[i] : 0.0;
        all += s;
        if (!chosen[i]) continue;
        held += s;
        assert_true(w < k);
        assert_int_equal(out[w++], i);
    }
    assert_int_equal(w, k);
    double want = k == n ? 1.0 : all > 0.0 ? held / all : 0.0;
    assert_true(fabs(mass - want) <= 1e-9 * (1.0 + fabs(want)));

    imp_top_k(scores, n, k, first, last, order, NULL, scratch); /* mass may be left out */
    assert_memory_equal(order, out, k * sizeof *out);
    imp_free(scratch);
    imp_free(chosen);
    imp_free(order);
    imp_free(out);
}

static void random_scores(void **state)
{
    (void)state;
    imp_rng rng = test_rng("random_scores");
    static const float odd[] = {NAN, -NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-45f, 3.4e38f, -3.4e38f, 1.0f};
    for (int round = 0; round < 4000; round++) {
        size_t n = 1 + imp_rng_below(&rng, round % 50 ? 70 : 3000);
        float *scores = test_alloc(n * sizeof *scores);
        unsigned kind = (unsigned)imp_rng_below(&rng, 6);
        for (size_t i = 0; i < n; i++) {
            switch (kind) {
            case 0: scores[i] = test_uniform(&rng, 0.0f, 1.0f); break;
            case 1: scores[i] = (float)imp_rng_below(&rng, 3); break; /* mostly ties */
            case 2: scores[i] = odd[imp_rng_below(&rng, 10)]; break;
            case 3: scores[i] = imp_rng_below(&rng, 4) ? test_uniform(&rng, -1.0f, 1.0f) : NAN; break;
            case 4: scores[i] = 1.0f + (float)imp_rng_below(&rng, 8) * 0x1p-23f; break; /* differ in the last bits */
            default: scores[i] = expf(test_uniform(&rng, -80.0f, 0.0f)); break;
            }
        }
        size_t k = imp_rng_below(&rng, n + 3);
        size_t first = imp_rng_below(&rng, 3) ? 0 : imp_rng_below(&rng, n + 3);
        size_t last = imp_rng_below(&rng, 3) ? 0 : imp_rng_below(&rng, n + 3);
        check(scores, n, k, first, last);
        imp_free(scores);
    }
}

static void shapes(void **state)
{
    (void)state;
    enum { N = 5000 };
    float *scores = test_alloc(N * sizeof *scores);
    for (int shape = 0; shape < 4; shape++) {
        for (int i = 0; i < N; i++) {
            scores[i] = shape == 0 ? 1.0f : shape == 1 ? (float)i : shape == 2 ? (float)(N - i) : (float)(i % 2 ? i : -i);
        }
        static const size_t ks[] = {0, 1, 2, 1250, N - 1, N, N + 1, SIZE_MAX};
        for (size_t i = 0; i < sizeof ks / sizeof ks[0]; i++) check(scores, N, ks[i], 0, 0);
        check(scores, N, 100, 4, 16);
        check(scores, N, 10, 4, 16);
        check(scores, N, 10, 20, SIZE_MAX);
        check(scores, N, 10, 10, 0);
        check(scores, N, 10, 0, 10);
    }
    imp_free(scores);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_scores),
        cmocka_unit_test(shapes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
