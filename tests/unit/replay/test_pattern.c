/* Patterns: codes, files, the rule and its facts, weights. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "replay/pattern.h"
#include "support/support.h"

static void test_codes(void **unused)
{
    (void)unused;
    assert_int_equal(replay_pattern_code(1), 0);
    assert_int_equal(replay_pattern_code(2), 0);
    assert_int_equal(replay_pattern_code(0.5), 1024);
    assert_int_equal(replay_pattern_code(0), UINT16_MAX);
    assert_int_equal(replay_pattern_code(-1), UINT16_MAX);
    assert_int_equal(replay_pattern_code(NAN), UINT16_MAX);
    assert_int_equal(replay_pattern_code(1e-300), UINT16_MAX);
    for (double share = 1; share > 1e-18; share *= 0.93)
        assert_true(fabs(replay_pattern_share(replay_pattern_code(share)) / share - 1) < 0.0004);
}

static void test_file(void **unused)
{
    (void)unused;
    char *dir = imp_test_make_dir(NULL);
    const char *path = imp_test_path(dir, "a.pat");
    replay_patterns p, q;
    assert_int_equal(replay_patterns_rule(2, 3, 130, 4, imp_test_seed(), &p), 0);
    assert_int_equal(replay_patterns_write(&p, path), 0);
    assert_int_equal(replay_patterns_read(path, &q), 0);
    assert_true(q.n_layers == 2 && q.n_heads == 3 && q.n_tokens == 130 && q.n_patterns == 4);
    assert_memory_equal(p.codes, q.codes, (size_t)2 * 3 * 130 * 4 * sizeof *p.codes);
    replay_patterns_free(&q);
    const long size = 24 + 2 * 3 * 130 * 4 * 2;
    for (long cut = 0; cut < size; cut += 97) {
        assert_int_equal(truncate(path, size), 0);
        assert_int_equal(truncate(path, cut), 0);
        assert_int_equal(replay_patterns_read(path, &q), IMP_E_ARG);
        assert_null(q.codes);
        assert_int_equal(replay_patterns_write(&p, path), 0);
    }
    assert_int_equal(truncate(path, size + 1), 0);
    assert_int_equal(replay_patterns_read(path, &q), IMP_E_ARG);
    assert_int_equal(replay_patterns_read(imp_test_path(dir, "none"), &q), IMP_E_IO);
    assert_int_equal(replay_patterns_new(0, 1, 1, 2, &q), IMP_E_ARG);
    assert_int_equal(replay_patterns_new(1, 1, 1, 9, &q), IMP_E_ARG);
    assert_int_equal(replay_patterns_new(1, 1, 2u << 20, 2, &q), IMP_E_ARG);
    replay_patterns_free(&p);
    imp_test_remove_dir(dir);
}

/* A naive top: sort by repeated search. */
static void naive_top(const replay_patterns *p, uint32_t layer, uint32_t pattern, uint32_t n_top, uint8_t *top)
{
    memset(top, 0, p->n_tokens);
    for (uint32_t i = 0; i < n_top; i++) {
        double best = -1;
        uint32_t at = 0;
        for (uint32_t t = 0; t < p->n_tokens; t++) {
            double sum = 0;
            for (uint32_t h = 0; h < p->n_heads; h++)
                sum += replay_pattern_share(replay_pattern_codes(p, layer, pattern, h)[t]);
            if (!top[t] && sum > best) best = sum, at = t;
        }
        top[at] = 1;
    }
}

static void test_rule(void **unused)
{
    (void)unused;
    replay_patterns p, same, other;
    uint64_t seed = imp_test_seed();
    assert_int_equal(replay_patterns_rule(4, 3, 4000, 8, seed, &p), 0);
    assert_int_equal(replay_patterns_rule(4, 3, 4000, 8, seed, &same), 0);
    assert_int_equal(replay_patterns_rule(4, 3, 4000, 8, seed + 1, &other), 0);
    size_t n = (size_t)4 * 3 * 4000 * 8;
    assert_memory_equal(p.codes, same.codes, n * sizeof *p.codes);
    assert_true(memcmp(p.codes, other.codes, n * sizeof *p.codes) != 0);
    double sum = 0;
    for (uint32_t t = 0; t < 4000; t++) sum += replay_pattern_share(replay_pattern_codes(&p, 2, 5, 1)[t]);
    assert_true(fabs(sum - 1) < 1e-3);

    /* What pattern.h says of it. Four layers are a small sample: over seeds the facts deviate by .006, .012, .007, .001,
     * .008 and .020 from .844, .430, .962, .250, .270 and .828, and five such deviations are allowed on either side. */
    replay_pattern_facts f;
    assert_int_equal(replay_patterns_facts(&p, 0.25, &f), 0);
    print_message("overlap %.3f, heads %.3f, mass %.3f, chunks %.3f +- %.3f, touched %.3f\n", f.question_overlap,
                  f.head_jaccard, f.mass, f.chunk_share, f.chunk_deviation, f.touched);
    assert_true(fabs(f.question_overlap - .844) < .03 && fabs(f.head_jaccard - .43) < .06);
    assert_true(fabs(f.mass - .962) < .035 && fabs(f.chunk_share - .25) < .006);
    assert_true(fabs(f.chunk_deviation - .27) < .04 && fabs(f.touched - .828) < .1);

    uint8_t top[4000], naive[4000];
    assert_int_equal(replay_pattern_top(&p, 3, 2, -1, 50, top), 0);
    naive_top(&p, 3, 2, 50, naive);
    assert_memory_equal(top, naive, 4000);
    replay_patterns_free(&p);
    replay_patterns_free(&same);
    replay_patterns_free(&other);
}

static void test_weights(void **unused)
{
    (void)unused;
    enum { REQUESTS = 300, BLOCKS = 40 };
    uint32_t first[REQUESTS + 1], blocks[REQUESTS * BLOCKS];
    for (uint32_t r = 0; r <= REQUESTS; r++) first[r] = r * BLOCKS;
    for (uint32_t u = 0; u < REQUESTS * BLOCKS; u++) blocks[u] = u % BLOCKS;
    replay_trace t = {REQUESTS, REQUESTS * BLOCKS, BLOCKS, first, blocks, 64};
    static float weights[REQUESTS * BLOCKS], again[REQUESTS * BLOCKS];
    replay_patterns p;
    assert_int_equal(replay_patterns_rule(8, 3, 4096, 8, imp_test_seed(), &p), 0);
    assert_int_equal(replay_pattern_weights(&p, &t, 0.25, 3, weights), 0);
    assert_int_equal(replay_pattern_weights(&p, &t, 0.25, 3, again), 0);
    assert_memory_equal(weights, again, sizeof weights);
    /* A block's weight depends on the question only: seven values at most, and they go together. */
    double mean = 0;
    for (uint32_t b = 0; b < BLOCKS; b++) {
        float seen[8];
        size_t n = 0;
        for (uint32_t r = 0; r < REQUESTS; r++) {
            float w = weights[r * BLOCKS + b];
            size_t i = 0;
            assert_true(w >= 0 && w <= 1 && w * 64 == floorf(w * 64));
            mean += (double)w / (REQUESTS * BLOCKS);
            while (i < n && seen[i] != w) i++;
            if (i == n) {
                assert_true(n < 7);
                seen[n++] = w;
            }
        }
    }
    assert_true(mean > 0.1 && mean < 0.45);
    replay_patterns_free(&p);
    assert_int_equal(replay_patterns_rule(1, 1, 63, 2, 1, &p), 0);
    assert_int_equal(replay_pattern_weights(&p, &t, 0.25, 3, weights), IMP_E_ARG);
    replay_patterns_free(&p);
}

static void test_split(void **unused)
{
    (void)unused;
    uint32_t first[] = {0, 2, 3}, blocks[] = {0, 1, 0};
    replay_trace t = {2, 3, 2, first, blocks, 512}, out;
    assert_int_equal(replay_trace_split(&t, 3, &out), 0);
    static const uint32_t want_first[] = {0, 6, 9}, want[] = {0, 1, 2, 3, 4, 5, 0, 1, 2};
    assert_true(out.n_requests == 2 && out.n_uses == 9 && out.n_blocks == 6 && out.block_tokens == 171);
    assert_memory_equal(out.first, want_first, sizeof want_first);
    assert_memory_equal(out.blocks, want, sizeof want);
    replay_trace_free(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_codes),   cmocka_unit_test(test_file),  cmocka_unit_test(test_rule),
        cmocka_unit_test(test_weights), cmocka_unit_test(test_split),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
