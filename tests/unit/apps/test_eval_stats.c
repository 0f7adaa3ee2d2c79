/* The paired interval against a bootstrap that draws, exact binomials and symmetry; summaries counted by hand. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "eval_stats.h"
#include "support/support.h"

static uint64_t state;
static uint64_t draw(void) /* splitmix64 */
{
    uint64_t z = (state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static void test_interval_known(void **unused)
{
    (void)unused;
    double low, high;
    /* No difference anywhere: nothing to resample. */
    assert_true(eval_paired_interval(100, 0, 0, &low, &high));
    assert_true(low == 0 && high == 0);
    /* All worse. */
    assert_true(eval_paired_interval(7, 7, 0, &low, &high));
    assert_true(low == -1 && high == -1);
    /* One question. */
    assert_true(eval_paired_interval(1, 0, 1, &low, &high));
    assert_true(low == 1 && high == 1);
    /* 2 of 4 better: Binomial(4, 1/2) has P(0) = 1/16 > 2.5 %, so the percentiles are its ends. */
    assert_true(eval_paired_interval(4, 0, 2, &low, &high));
    assert_true(low == 0 && high == 1);
    /* 5 of 10 better: P(X <= 1) = 11/1024 = 1.07 %, P(X <= 2) = 56/1024 = 5.5 %: 0.2 to 0.8. */
    assert_true(eval_paired_interval(10, 0, 5, &low, &high));
    assert_true(fabs(low - 0.2) < 1e-12 && fabs(high - 0.8) < 1e-12);
    /* One worse in 100: P(X = 0) = 0.99^100 = 36.6 %, P(X >= 3) = 7.9 %, P(X >= 4) = 1.8 %: -0.03 to 0. */
    assert_true(eval_paired_interval(100, 1, 0, &low, &high));
    assert_true(fabs(low + 0.03) < 1e-12 && high == 0);
    /* Many questions: as the normal distribution has it. */
    assert_true(eval_paired_interval(5000, 300, 200, &low, &high));
    double sd = sqrt((0.1 - 0.02 * 0.02) / 5000);
    assert_true(fabs(low - (-0.02 - 1.96 * sd)) < 3e-4 && fabs(high - (-0.02 + 1.96 * sd)) < 3e-4);
}

static void test_interval_symmetric(void **unused)
{
    (void)unused;
    for (size_t n = 1; n <= 24; n++) {
        for (size_t a = 0; a <= n; a++) {
            for (size_t b = 0; a + b <= n; b++) {
                double l1, h1, l2, h2, mean = ((double)b - (double)a) / (double)n;
                assert_true(eval_paired_interval(n, a, b, &l1, &h1));
                assert_true(eval_paired_interval(n, b, a, &l2, &h2));
                assert_true(l1 == -h2 && h1 == -l2);
                assert_true(l1 <= mean + 1e-12 && mean <= h1 + 1e-12 && l1 >= -1 && h1 <= 1);
            }
        }
    }
}

static int compare(const void *a, const void *b)
{
    int x = *(const int *)a, y = *(const int *)b;
    return (x > y) - (x < y);
}

/* The ordinary bootstrap with many samples must come close to the exact percentiles. */
static void test_interval_drawn(void **unused)
{
    (void)unused;
    state = imp_test_seed();
    enum { N_SAMPLES = 20000 };
    int *sums = malloc(N_SAMPLES * sizeof *sums);
    assert_non_null(sums);
    for (int round = 0; round < 6; round++) {
        size_t n = 20 + draw() % 120, worse = draw() % (n / 3), better = draw() % (n / 3);
        for (size_t s = 0; s < N_SAMPLES; s++) {
            sums[s] = 0;
            for (size_t i = 0; i < n; i++) {
                size_t k = draw() % n;
                sums[s] += k < worse ? -1 : k < worse + better ? 1 : 0;
            }
        }
        qsort(sums, N_SAMPLES, sizeof *sums, compare);
        double low, high;
        assert_true(eval_paired_interval(n, worse, better, &low, &high));
        assert_true(fabs(low * (double)n - sums[N_SAMPLES / 40]) <= 1.01);
        assert_true(fabs(high * (double)n - sums[N_SAMPLES - 1 - N_SAMPLES / 40]) <= 1.01);
    }
    free(sums);
}

static void test_summary(void **unused)
{
    (void)unused;
    /* answer, sum, norm, KL, mass, identify, read, selected, fallback */
    const eval_outcome reference[] = {{0, 0, 1, 0, 1, 0, 100, 0, 0}, {1, 1, 1, 0, 1, 0, 100, 0, 0},
                                      {1, 0, 1, 0, 1, 0, 100, 0, 0}, {3, 2, 0, 0, 1, 0, 100, 0, 0}};
    const eval_outcome system[] = {{0, 1, 0, 0.5, 0.5, 8, 40, 30, 6}, {1, 1, 1, 0, 0.75, 8, 40, 30, 0},
                                   {1, 1, 0, 0.25, 1, 8, 48, 30, 30}, {3, 2, 3, 0.25, 0.75, 8, 40, 30, 0}};
    const eval_outcome *r[4], *s[4];
    for (size_t i = 0; i < 4; i++) r[i] = &reference[i], s[i] = &system[i];
    eval_summary sum, norm;
    assert_true(eval_summarise(s, r, 4, false, &sum));
    assert_true(sum.n == 4 && sum.accuracy == 0.5 && sum.accuracy_sum == 0.5 && sum.accuracy_norm == 0.75);
    assert_true(sum.diff == 0 && sum.agreement == 0.5); /* one worse, one better */
    assert_true(sum.kl == 0.25 && sum.mass == 0.75 && sum.identify_bytes == 8 && sum.bytes_read == 42);
    assert_true(fabs(sum.fallback - 0.3) < 1e-12);
    assert_true(sum.ci_low == -sum.ci_high && sum.ci_high > 0);
    assert_true(eval_summarise(s, r, 4, true, &norm));
    assert_true(norm.accuracy == 0.75 && norm.diff == 0.25 && norm.agreement == 0.25);
    assert_true(eval_summarise(r, r, 4, false, &sum));
    assert_true(sum.diff == 0 && sum.ci_low == 0 && sum.ci_high == 0 && sum.agreement == 1 && sum.fallback == 0);
}

static void test_small_ones(void **unused)
{
    (void)unused;
    assert_int_equal(eval_best((const double[]){-3, -1, -1, -2}, 4), 1);
    assert_int_equal(eval_best((const double[]){-3}, 1), 0);
    assert_int_equal(eval_characters(""), 0);
    assert_int_equal(eval_characters("na\xc3\xafve \xe2\x82\xac"), 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_interval_known),  cmocka_unit_test(test_interval_symmetric),
        cmocka_unit_test(test_interval_drawn),  cmocka_unit_test(test_summary),
        cmocka_unit_test(test_small_ones),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
