/* test_adapt.c: the choice between computing, loading and loading a part, over a grid against a naive twin; and the
 * times it goes by. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "adapt.h"
#include "base/rng.h"
#include "support/support.h"

static double time_of(const lc_times *t, lc_choice c)
{
    return c == LC_COMPUTE ? t->computed : c == LC_WHOLE ? t->whole : t->partial;
}

/* What the choice must be, way by way: is each of the three the right one? */
static lc_choice naive(const lc_times *t)
{
    double ways[3] = {t->computed, t->whole, t->partial};
    int n_slower = 0; /* exact ways that are slower than a part by more than what counts as nothing */
    for (int i = 0; i < 2; i++) n_slower += ways[i] > LC_FREE * ways[2];
    if (n_slower == 2) return LC_PARTIAL;
    return ways[0] < ways[1] ? LC_COMPUTE : LC_WHOLE;
}

static void check(const lc_times *t)
{
    lc_choice c = lc_choose(t);
    assert_int_equal(c, naive(t));
    double best = fmin(t->computed, t->whole);
    assert_true(time_of(t, c) <= LC_FREE * best);
    if (best < HUGE_VAL || t->partial < HUGE_VAL) assert_true(time_of(t, c) < HUGE_VAL);
}

static void test_grid(void **state)
{
    (void)state;
    static const double values[] = {0, 1, 1.02, 1.04, 1.06, 1.1, 2, 10, 1e3, 1e9, 1e12, HUGE_VAL};
    enum { N = sizeof values / sizeof *values };
    for (size_t a = 0; a < N; a++)
        for (size_t b = 0; b < N; b++)
            for (size_t c = 0; c < N; c++) {
                const lc_times t = {values[a], values[b], values[c]};
                if (values[a] < HUGE_VAL) check(&t); /* computing can always be had */
            }
}

static void test_any(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    for (int i = 0; i < 100000; i++) {
        lc_times t = {exp(imp_rng_unit(&r) * 10), exp(imp_rng_unit(&r) * 10), exp(imp_rng_unit(&r) * 10)};
        if (imp_rng_below(&r, 5) == 0) t.partial = HUGE_VAL;
        if (imp_rng_below(&r, 5) == 0) t.whole = HUGE_VAL;
        check(&t);
        /* What gets quicker and was taken stays. */
        lc_choice c = lc_choose(&t);
        if (c == LC_COMPUTE) t.computed *= imp_rng_unit(&r);
        if (c == LC_WHOLE) t.whole *= imp_rng_unit(&r);
        if (c == LC_PARTIAL) t.partial *= imp_rng_unit(&r);
        assert_int_equal(lc_choose(&t), c);
    }
    const lc_times same = {5, 5, 5}, free_whole = {100, 104, 100}, part = {100, 200, 90};
    assert_int_equal(lc_choose(&same), LC_WHOLE);
    assert_int_equal(lc_choose(&free_whole), LC_COMPUTE);
    assert_int_equal(lc_choose(&part), LC_PARTIAL);
}

/* A machine whose times are those of the operations: what is expected is what it takes. */
static void test_speed(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed() + 1);
    for (int round = 0; round < 200; round++) {
        const lc_ops ops = {1e6 + imp_rng_unit(&r) * 1e9, imp_rng_unit(&r) * 1e5, 1 + imp_rng_unit(&r) * 15};
        double ns = 1e-3 + imp_rng_unit(&r);
        lc_speed s = {.guessed = {{false}}};
        assert_true(lc_speed_expect(&s, &ops, 10, 1, 512) < 0); /* nothing is known */
        lc_speed_note(&s, &ops, 0, 1, 5, false);
        lc_speed_note(&s, &ops, 5, 1, 0, false);
        lc_speed_note(&s, &ops, 5, 1, NAN, false);
        assert_true(lc_speed_expect(&s, &ops, 10, 1, 512) < 0);
        assert_true(lc_speed_expect(&s, &ops, 0, 1, 512) <= 0);
        lc_speed_note(&s, &ops, 8, 25, 7 * ns * lc_ops_of(&ops, 8, 25), true); /* a guess, far off */
        assert_true(lc_speed_expect(&s, &ops, 100, 1, 512) > 0);
        for (int i = 0; i < 5; i++) {
            size_t n = 1 + imp_rng_below(&r, 512), cells = 1 + imp_rng_below(&r, 20000);
            lc_speed_note(&s, &ops, n, cells, ns * lc_ops_of(&ops, n, cells), false);
            lc_speed_note(&s, &ops, n, cells, 9 * ns * lc_ops_of(&ops, n, cells), true); /* comes too late */
        }
        size_t n = 1 + imp_rng_below(&r, 5000), cells = 1 + imp_rng_below(&r, 9000), batch = 1 + imp_rng_below(&r, 600);
        double want = 0, sum = 0;
        for (size_t i = 0; i < n; i += batch) {
            size_t part = n - i < batch ? n - i : batch;
            double seen = 0;
            for (size_t t = 0; t < part; t++) seen += (double)(cells + i + t);
            sum = (double)part * ops.weights + seen * ops.attention * (part < LC_TILE ? ops.slower : 1);
            assert_true(fabs(sum - lc_ops_of(&ops, part, cells + i)) <= 1e-9 * sum);
            want += ns * sum;
        }
        assert_true(fabs(lc_speed_expect(&s, &ops, n, cells, batch) - want) <= 1e-6 * want);
    }
}

/* Newer times count more; a place of its own counts more than its neighbours. */
static void test_average(void **state)
{
    (void)state;
    const lc_ops ops = {1, 0, 1};
    lc_speed s = {.guessed = {{false}}};
    lc_speed_note(&s, &ops, 100, 100, 100, false);
    lc_speed_note(&s, &ops, 100, 100, 200, false);
    assert_true(fabs(lc_speed_expect(&s, &ops, 100, 100, 0) - 130) < 1e-6);
    lc_speed_note(&s, &ops, 100, 3000, 500, false);
    assert_true(fabs(lc_speed_expect(&s, &ops, 100, 100, 0) - 130) < 1e-6);
    assert_true(fabs(lc_speed_expect(&s, &ops, 100, 3000, 0) - 500) < 1e-6);
    assert_true(fabs(lc_speed_expect(&s, &ops, 100, 100000, 0) - 500) < 1e-6); /* the nearest */
    assert_true(fabs(lc_speed_expect(&s, &ops, 10, 100, 0) - 13) < 1e-6);      /* few at once: no better is known */
    lc_speed_note(&s, &ops, 10, 100, 70, false);
    assert_true(fabs(lc_speed_expect(&s, &ops, 10, 100, 0) - 70) < 1e-6);
}

/* A machine of the test's own: what an operation takes differs by the tokens at once and the cells, and each pass takes
 * up to `noise` more or less than that. */
typedef struct machine {
    lc_ops ops;
    double ns[2][LC_SPEEDS];
    double noise;
    double byte_ns, token_bytes;         /* of the disk, and of the prefix */
    double gather_ns, identify_ns;       /* a token */
    imp_rng *rng;
} machine;

enum { BATCH = 512 };

static double pass_ns(const machine *m, size_t n, size_t cells)
{
    size_t i = 0;
    for (size_t least = 256; i + 1 < LC_SPEEDS && cells + n >= least; least *= 2) i++;
    return m->ns[n >= LC_TILE][i] * lc_ops_of(&m->ops, n, cells);
}

/* How long `n` tokens behind `cells` take, batch by batch; with `learn` they are computed, with noise, and told. */
static double compute(const machine *m, size_t n, size_t cells, lc_speed *learn)
{
    double sum = 0;
    for (size_t done = 0, part; done < n; done += part) {
        part = n - done < BATCH ? n - done : BATCH;
        double ns = pass_ns(m, part, cells + done);
        if (learn) ns *= 1 + m->noise * (2 * imp_rng_unit(m->rng) - 1);
        if (learn) lc_speed_note(learn, &m->ops, part, cells + done, ns, false);
        sum += ns;
    }
    return sum;
}

/* The three ways of a request, given what computing takes in each. */
static lc_times ways(const machine *m, size_t prefix, const double computing[3])
{
    const double retention = 0.25;
    double read = m->byte_ns * m->token_bytes * (double)prefix, own = m->gather_ns * (double)prefix;
    return (lc_times){
        .computed = computing[0],
        .whole = fmax(computing[1], read) + own,
        .partial = fmax(computing[2], retention * read) + retention * own + m->identify_ns * (double)prefix,
    };
}

/* Requests of any length on fast and slow disks: once the machine is known, none takes more than LC_FREE times the
 * better of computing and loading all, but for what noise does to what is expected. */
static void test_machine(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    for (int round = 0; round < 40; round++) {
        machine m = {.ops = {1e6, 100, 4}, .noise = round % 2 ? 0.02 : 0, .token_bytes = 23040, .rng = &r};
        for (size_t i = 0; i < 2 * (size_t)LC_SPEEDS; i++)
            m.ns[i / LC_SPEEDS][i % LC_SPEEDS] = 1e-3 * (0.5 + imp_rng_unit(&r));
        m.byte_ns = pow(10, -1 + 3 * imp_rng_unit(&r)); /* 10 GB/s to 10 MB/s */
        m.gather_ns = 1e4 * imp_rng_unit(&r);
        m.identify_ns = 1e4 * imp_rng_unit(&r);
        lc_speed s = {.guessed = {{false}}};
        for (size_t n = 16; n <= LC_TILE; n += LC_TILE - 16) /* each kind of pass, once */
            for (size_t cells = 1; cells < 40000; cells = cells * 5 / 4 + 10) compute(&m, n, cells, &s);
        double least = 1 - m.noise, most = 1 + m.noise;
        int chosen[3] = {0};
        for (int i = 0; i < 300; i++) {
            size_t prefix = 64 + imp_rng_below(&r, imp_rng_below(&r, 2) ? 300 : 8000), n = 16 + imp_rng_below(&r, 600);
            const size_t tokens[] = {prefix + n, n, n}, cells[] = {1, prefix + 1, prefix / 4 + 1};
            double expected[3], real[3];
            for (int w = 0; w < 3; w++) {
                expected[w] = lc_speed_expect(&s, &m.ops, tokens[w], cells[w], BATCH);
                real[w] = compute(&m, tokens[w], cells[w], NULL);
                assert_true(expected[w] >= real[w] * least * (1 - 1e-9) && expected[w] <= real[w] * most * (1 + 1e-9));
            }
            lc_times guess = ways(&m, prefix, expected), truth = ways(&m, prefix, real);
            lc_choice c = lc_choose(&guess);
            double took = c == LC_COMPUTE ? truth.computed : c == LC_WHOLE ? truth.whole : truth.partial;
            double best = fmin(truth.computed, truth.whole);
            assert_true(took <= LC_FREE * best * most / least * (1 + 1e-9));
            chosen[c]++;
            compute(&m, tokens[c], cells[c], &s);
        }
        assert_int_equal(chosen[0] + chosen[1] + chosen[2], 300);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_grid),
        cmocka_unit_test(test_any),
        cmocka_unit_test(test_speed),
        cmocka_unit_test(test_average),
        cmocka_unit_test(test_machine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
