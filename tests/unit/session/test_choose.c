/* test_choose.c: what is chosen without a disk: chunks, probe heads, random sets; and the tables that loads share. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/rng.h"
#include "session/choose.h"
#include "session/ropes.h"
#include "support/support.h"

enum { MAX_N = 600 };

/* The twin takes the best token of the best unit, one at a time. */
static void naive_units(const float *scores, size_t n, const uint32_t *unit_of, size_t n_units, size_t k,
                        size_t keep_first, size_t keep_last, uint32_t *out)
{
    unsigned char in[MAX_N] = {0};
    double sums[MAX_N] = {0};
    if (keep_first > k) keep_first = k;
    if (keep_last > k - keep_first) keep_last = k - keep_first;
    size_t left = k;
    for (size_t t = 0; t < n; t++) {
        bool kept = t < keep_first || t >= n - keep_last;
        sums[unit_of[t]] += kept ? HUGE_VAL : scores[t] > 0 && isfinite(scores[t]) ? (double)scores[t] : 0;
        in[t] = kept;
        left -= kept;
    }
    while (left > 0) {
        size_t unit = n_units, token = n;
        for (size_t u = 0; u < n_units; u++) {
            bool open = false;
            for (size_t t = 0; t < n; t++) open |= unit_of[t] == u && !in[t];
            if (open && (unit == n_units || sums[u] > sums[unit])) unit = u;
        }
        for (size_t t = 0; t < n; t++) {
            float score = scores[t] > 0 && isfinite(scores[t]) ? scores[t] : 0;
            if (unit_of[t] != unit || in[t]) continue;
            float best = token < n && scores[token] > 0 && isfinite(scores[token]) ? scores[token] : 0;
            if (token == n || score > best) token = t;
        }
        in[token] = 1;
        left--;
    }
    for (size_t t = 0, w = 0; t < n; t++)
        if (in[t]) out[w++] = (uint32_t)t;
}

static void test_units(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    for (int round = 0; round < 150; round++) {
        float scores[MAX_N];
        uint32_t unit_of[MAX_N], got[MAX_N], want[MAX_N], scratch[2 * MAX_N];
        unsigned char flags[MAX_N];
        double sums[MAX_N];
        size_t n = 1 + imp_rng_below(&r, 150), n_units = 1 + imp_rng_below(&r, 30), k = 1 + imp_rng_below(&r, n);
        bool ties = imp_rng_below(&r, 2), runs = imp_rng_below(&r, 2);
        for (size_t t = 0; t < n; t++) {
            scores[t] = ties ? (float)imp_rng_below(&r, 4) : (float)imp_rng_unit(&r);
            if (imp_rng_below(&r, 50) == 0) scores[t] = imp_rng_below(&r, 2) ? NAN : -1;
            unit_of[t] = (uint32_t)(runs ? t * n_units / n : imp_rng_below(&r, n_units)); /* some units may be empty */
        }
        size_t first = imp_rng_below(&r, 6), last = imp_rng_below(&r, 6);
        if (imp_rng_below(&r, 8) == 0) first = n;
        imp_choose_units(scores, n, unit_of, n_units, k, first, last, got, flags, scratch, sums);
        naive_units(scores, n, unit_of, n_units, k, first, last, want);
        assert_memory_equal(got, want, k * sizeof *got);
        for (size_t t = 0, w = 0; t < n; t++) {
            assert_int_equal(flags[t], w < k && got[w] == t);
            w += flags[t];
        }
    }
}

static void test_probe_heads(void **state)
{
    (void)state;
    for (uint32_t n_kv = 1; n_kv <= 8; n_kv++) {
        for (uint32_t group = 1; group <= 5; group++) {
            for (unsigned spread = 0; spread < 2; spread++) {
                unsigned char seen[40] = {0};
                uint32_t uses[8] = {0};
                for (uint32_t i = 0; i < n_kv * group; i++) {
                    uint32_t kv, head = imp_probe_head(i, n_kv * group, n_kv, spread, &kv);
                    assert_true(head < n_kv * group);
                    assert_int_equal(kv, head / group);
                    assert_int_equal(seen[head]++, 0);
                    if (!spread) assert_int_equal(head, i);
                    uses[kv]++;
                    for (uint32_t j = 0; spread && j < n_kv; j++)
                        assert_true(uses[j] <= uses[0] && uses[j] + 1 >= uses[0]);
                }
            }
        }
    }
}

static void test_random_scores(void **state)
{
    (void)state;
    static float a[MAX_N], b[MAX_N], c[MAX_N];
    imp_random_scores(3, MAX_N, a);
    imp_random_scores(3, MAX_N / 2, b); /* a token's doesn't depend on the prefix's length */
    imp_random_scores(4, MAX_N, c);
    assert_memory_equal(a, b, MAX_N / 2 * sizeof *a);
    double sum = 0, with = 0;
    for (size_t t = 0; t < MAX_N; t++) {
        assert_true(a[t] >= 0 && a[t] < 1);
        sum += (double)a[t] / MAX_N;
        with += ((double)a[t] - 0.5) * ((double)c[t] - 0.5) * 12 / MAX_N;
    }
    assert_true(fabs(sum - 0.5) < 0.06);
    assert_true(fabs(with) < 0.2); /* nor on what another layer has */
}

static void test_mass(void **state)
{
    (void)state;
    const float scores[] = {1, 2, NAN, -5, 1}, nothing[] = {0, -1, 0, 0, 0};
    const uint32_t chosen[] = {1, 2, 3};
    assert_true(fabs(imp_mass_of(scores, 5, chosen, 3) - 0.5) < 1e-9);
    assert_true(fabs(imp_mass_of(nothing, 5, chosen, 3) - 0.6) < 1e-9);
    assert_true(imp_mass_of(scores, 3, chosen, 3) >= 1);
}

/* One table for each way of turning, long enough, and the one that is there if it is. */
static int falling(const void *a, const void *b)
{
    float x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return x < y ? 1 : x > y ? -1 : 0;
}

/* How many tokens hold a share of the mass, against sorting and adding up. */
static void test_mass_curve(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed() + 9);
    for (int round = 0; round < 300; round++) {
        size_t n = 1 + imp_rng_below(&r, 400), n_curves = 1 + imp_rng_below(&r, 5);
        double *curve = calloc(n + 1, sizeof *curve), *naive = calloc(n + 1, sizeof *naive);
        float *scores = malloc(n * sizeof *scores);
        uint32_t *scratch = malloc(2 * n * sizeof *scratch);
        for (size_t c = 0; c < n_curves; c++) {
            uint64_t kind = imp_rng_below(&r, 4);
            for (size_t i = 0; i < n; i++) {
                scores[i] = kind ? (float)exp(imp_rng_unit(&r) * 20 - 10) : 0;
                if (kind == 1) scores[i] = (float)imp_rng_below(&r, 3);
                if (kind == 2 && imp_rng_below(&r, 9) == 0) scores[i] = imp_rng_below(&r, 2) ? NAN : -1;
            }
            imp_mass_curve_add(scores, n, curve, scratch);
            double all = 0, held = 0;
            for (size_t i = 0; i < n; i++) {
                if (!(scores[i] > 0)) scores[i] = 0;
                all += (double)scores[i];
            }
            qsort(scores, n, sizeof *scores, falling);
            for (size_t k = 1; k <= n; k++) {
                held += (double)scores[k - 1];
                naive[k] += all > 0 ? held / all : (double)k / (double)n;
            }
        }
        assert_true(curve[0] <= 0);
        assert_true(fabs(curve[n] - (double)n_curves) < 1e-9);
        for (size_t k = 1; k <= n; k++) {
            assert_true(fabs(curve[k] - naive[k]) < 1e-6);
            assert_true(curve[k] >= curve[k - 1]);
        }
        for (int i = 0; i < 10; i++) {
            size_t least = 1 + imp_rng_below(&r, n), most = least + imp_rng_below(&r, n - least + 1), want = most;
            double sum = imp_rng_unit(&r) * 1.1 * (double)n_curves;
            for (size_t k = most + 1; k-- > least;) {
                if (curve[k] >= sum) want = k;
            }
            assert_int_equal(imp_mass_count(curve, sum, least, most), want);
        }
        free(curve);
        free(naive);
        free(scores);
        free(scratch);
    }
}

static void test_ropes(void **state)
{
    (void)state;
    imp_ropes *r;
    imp_ropes_entry *a, *b, *c, *d;
    float factors[16];
    for (int i = 0; i < 16; i++) factors[i] = 1 + (float)i;
    imp_rope plain = {.pairs = IMP_ROPE_NEOX, .n_dims = 32, .base = 10000, .freq_scale = 1, .attn_factor = 1};
    imp_rope scaled = plain, bad = plain;
    scaled.factors = factors;
    bad.n_dims = 64;
    assert_int_equal(imp_ropes_new(&r), 0);
    assert_int_equal(imp_ropes_take(r, &bad, 32, 10, &a), IMP_E_ARG);
    assert_null(a);
    assert_int_equal(imp_ropes_take(r, &plain, 32, 100, &a), 0);
    assert_int_equal(imp_ropes_take(r, &plain, 32, 1000, &b), 0);
    assert_ptr_equal(imp_ropes_table(a), imp_ropes_table(b));
    assert_int_equal(imp_ropes_take(r, &scaled, 32, 100, &c), 0);
    assert_ptr_not_equal(imp_ropes_table(a), imp_ropes_table(c));
    float other[16];
    memcpy(other, factors, sizeof other); /* equal ones elsewhere are the same */
    scaled.factors = other;
    assert_int_equal(imp_ropes_take(r, &scaled, 32, 100, &d), 0);
    assert_ptr_equal(imp_ropes_table(c), imp_ropes_table(d));
    imp_ropes_give(r, d);
    other[3] = 7;
    assert_int_equal(imp_ropes_take(r, &scaled, 32, 100, &d), 0);
    assert_ptr_not_equal(imp_ropes_table(c), imp_ropes_table(d));
    imp_ropes_give(r, d);
    assert_int_equal(imp_ropes_take(r, &plain, 64, 100, &d), 0);
    assert_int_equal(imp_rope_table_head_dim(imp_ropes_table(d)), 64);
    imp_ropes_give(r, d);

    const imp_rope_table *before = imp_ropes_table(a);
    assert_int_equal(imp_ropes_take(r, &plain, 32, 5000, &d), 0); /* longer: made anew; the old one stays while used */
    assert_ptr_not_equal(imp_ropes_table(d), before);
    assert_true(imp_rope_table_covers(imp_ropes_table(d), 0, 5000));
    assert_true(imp_rope_table_covers(before, 0, 1000));
    imp_ropes_give(r, a);
    assert_true(imp_rope_table_covers(imp_ropes_table(b), 0, 1000));
    imp_ropes_give(r, b);
    assert_int_equal(imp_ropes_take(r, &plain, 32, 100, &a), 0);
    assert_ptr_equal(imp_ropes_table(a), imp_ropes_table(d));
    imp_ropes_give(r, a);
    imp_ropes_give(r, c);
    imp_ropes_give(r, d);
    imp_ropes_give(r, NULL);
    for (int i = 0; i < 20; i++) { /* few are kept */
        plain.base = 1000 + (float)i;
        assert_int_equal(imp_ropes_take(r, &plain, 32, 10, &a), 0);
        imp_ropes_give(r, a);
    }
    plain.factors = factors;
    for (uint64_t at = 1, made = 1; made >= at; at++) {
        plain.base = 2000 + (float)at;
        imp_alloc_fail_at(at, 0);
        int rc = imp_ropes_take(r, &plain, 32, 10, &a);
        made = imp_alloc_fail_at(0, 0);
        assert_int_equal(rc, made >= at ? IMP_E_NOMEM : 0);
        imp_ropes_give(r, a);
    }
    imp_ropes_free(r);
    imp_ropes_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_units), cmocka_unit_test(test_probe_heads), cmocka_unit_test(test_random_scores),
        cmocka_unit_test(test_mass),  cmocka_unit_test(test_mass_curve),
        cmocka_unit_test(test_ropes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
