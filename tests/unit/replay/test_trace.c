/* Traces against caches: Belady's optimum against all ways to keep blocks, the bound above the best of them, LRU
 * against an array with times. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "replay/trace.h"
#include "support/support.h"

enum { MAX_REQUESTS = 64, MAX_BLOCKS = 64, MAX_USES = 1024 };

typedef struct sample {
    replay_trace t;
    uint32_t first[MAX_REQUESTS + 1], blocks[MAX_USES], parent[MAX_BLOCKS], depth[MAX_BLOCKS];
    float weights[MAX_USES];
} sample;

/* Requests are paths to blocks of a random tree. */
static void make(sample *s, imp_rng *r, size_t n_requests, size_t n_blocks)
{
    uint32_t number[MAX_BLOCKS], path[MAX_BLOCKS];
    memset(s, 0, sizeof *s);
    s->t = (replay_trace){.n_requests = n_requests, .first = s->first, .blocks = s->blocks, .block_tokens = 64};
    for (size_t b = 0; b < n_blocks; b++) {
        s->parent[b] = b && imp_rng_below(r, 3) ? (uint32_t)imp_rng_below(r, b) : UINT32_MAX;
        number[b] = UINT32_MAX;
    }
    for (size_t q = 0; q < n_requests; q++) {
        size_t n = 0;
        for (uint32_t b = (uint32_t)imp_rng_below(r, n_blocks); b != UINT32_MAX; b = s->parent[b]) path[n++] = b;
        while (n-- > 0) {
            if (number[path[n]] == UINT32_MAX) number[path[n]] = (uint32_t)s->t.n_blocks++;
            s->weights[s->t.n_uses] = (float)imp_rng_below(r, 5) / 4;
            s->blocks[s->t.n_uses++] = number[path[n]];
        }
        s->first[q + 1] = (uint32_t)s->t.n_uses;
    }
}

/* Four sums for each set of blocks that may be in the cache: the most that can be had up to now. */
typedef struct sums {
    double of[4]; /* prefix and tier hits, and their weights */
} sums;

static const double nowhere = -1;

static unsigned bits(unsigned set)
{
    unsigned n = 0;
    for (; set; set &= set - 1) n++;
    return n;
}

static sums brute(const replay_trace *t, size_t capacity, const float *weights)
{
    static sums now[256], then[256];
    unsigned n_sets = 1u << t->n_blocks;
    for (unsigned s = 0; s < n_sets; s++)
        for (int i = 0; i < 4; i++) now[s].of[i] = s ? nowhere : 0;
    for (size_t r = 0; r < t->n_requests; r++) {
        unsigned asked = 0;
        for (uint32_t u = t->first[r]; u < t->first[r + 1]; u++) asked |= 1u << t->blocks[u];
        for (unsigned s = 0; s < n_sets; s++)
            for (int i = 0; i < 4; i++) then[s].of[i] = nowhere;
        for (unsigned s = 0; s < n_sets; s++) {
            if (now[s].of[0] < 0) continue;
            double gain[4] = {0};
            int whole = 1;
            for (uint32_t u = t->first[r]; u < t->first[r + 1]; u++) {
                int hit = s >> t->blocks[u] & 1;
                whole = whole && hit;
                gain[0] += whole;
                gain[1] += hit;
                gain[2] += whole ? (double)weights[u] : 0;
                gain[3] += hit ? (double)weights[u] : 0;
            }
            unsigned may = s | asked;
            for (unsigned to = may;; to = (to - 1) & may) {
                for (int i = 0; i < 4 && bits(to) <= capacity; i++)
                    if (now[s].of[i] + gain[i] > then[to].of[i]) then[to].of[i] = now[s].of[i] + gain[i];
                if (to == 0) break;
            }
        }
        memcpy(now, then, sizeof now);
    }
    sums best = {{0}};
    for (unsigned s = 0; s < n_sets; s++)
        for (int i = 0; i < 4; i++)
            if (now[s].of[i] > best.of[i]) best.of[i] = now[s].of[i];
    return best;
}

static void test_optimum(void **unused)
{
    (void)unused;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    double bounds = 0, optima = 0;
    for (int round = 0; round < 250; round++) {
        sample s;
        make(&s, &r, 3 + imp_rng_below(&r, 10), 2 + imp_rng_below(&r, 5));
        size_t capacity = 1 + imp_rng_below(&r, 4);
        sums best = brute(&s.t, capacity, s.weights);
        replay_hits min;
        assert_int_equal(replay_min(&s.t, capacity, s.weights, &min), 0);
        assert_true((double)min.prefix == best.of[0] && (double)min.tier == best.of[1]);
        assert_int_equal(min.prefix, min.tier);
        double bound;
        assert_int_equal(replay_weight_bound(&s.t, capacity, s.weights, 1000, min.tier_weight, &bound), 0);
        assert_true(bound >= best.of[3] - 1e-9 && best.of[3] >= best.of[2]);
        bounds += bound;
        optima += best.of[3];
        static const imp_cache all[] = {IMP_CACHE_NONE, IMP_CACHE_LRU, IMP_CACHE_LFU, IMP_CACHE_SCORE,
                                        IMP_CACHE_ATTENTION, IMP_CACHE_AGED};
        for (size_t p = 0; p < sizeof all / sizeof *all; p++) {
            replay_hits h;
            assert_int_equal(replay_policy(&s.t, all[p], capacity, s.weights, &h), 0);
            assert_true((double)h.prefix <= best.of[0] && (double)h.tier <= best.of[1] && h.prefix <= h.tier);
            assert_true(h.prefix_weight <= best.of[2] + 1e-9 && h.tier_weight <= best.of[3] + 1e-9);
            assert_true(p || h.tier == 0);
        }
    }
    assert_true(optima > 0 && bounds <= 1.01 * optima);
}

/* All that ever comes fits: every use but the first of each block hits. */
static void test_endless(void **unused)
{
    (void)unused;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed() + 1);
    static const imp_cache all[] = {IMP_CACHE_LRU, IMP_CACHE_LFU, IMP_CACHE_SCORE, IMP_CACHE_ATTENTION,
                                    IMP_CACHE_AGED};
    for (int round = 0; round < 50; round++) {
        sample s;
        make(&s, &r, 40, 30);
        replay_hits h;
        assert_int_equal(replay_min(&s.t, 30, s.weights, &h), 0);
        assert_int_equal(h.prefix, s.t.n_uses - s.t.n_blocks);
        for (size_t p = 0; p < sizeof all / sizeof *all; p++) {
            assert_int_equal(replay_policy(&s.t, all[p], 30, s.weights, &h), 0);
            assert_true(h.prefix == s.t.n_uses - s.t.n_blocks && h.tier == h.prefix);
        }
    }
}

static void test_lru(void **unused)
{
    (void)unused;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed() + 2);
    for (int round = 0; round < 100; round++) {
        sample s;
        make(&s, &r, 50, 40);
        size_t capacity = 1 + imp_rng_below(&r, 20), prefix = 0, tier = 0, now = 0, n_in = 0;
        size_t used[MAX_BLOCKS] = {0}; /* 0: not in the cache */
        for (size_t q = 0; q < s.t.n_requests; q++) {
            int whole = 1;
            for (uint32_t u = s.first[q]; u < s.first[q + 1]; u++) {
                int hit = used[s.blocks[u]] != 0;
                whole = whole && hit;
                prefix += (size_t)whole;
                tier += (size_t)hit;
            }
            for (uint32_t u = s.first[q + 1]; u-- > s.first[q];) {
                n_in += used[s.blocks[u]] == 0;
                used[s.blocks[u]] = ++now;
                if (n_in <= capacity) continue;
                size_t oldest = MAX_BLOCKS;
                for (size_t b = 0; b < s.t.n_blocks; b++)
                    if (used[b] && (oldest == MAX_BLOCKS || used[b] < used[oldest])) oldest = b;
                used[oldest] = 0;
                n_in--;
            }
        }
        replay_hits h;
        assert_int_equal(replay_policy(&s.t, IMP_CACHE_LRU, capacity, s.weights, &h), 0);
        assert_true(h.prefix == prefix && h.tier == tier);
    }
}

static void test_sim_arguments(void **unused)
{
    (void)unused;
    imp_sim *sim = NULL;
    assert_int_equal(imp_sim_new((imp_cache)17, 1, 1, &sim), IMP_E_ARG);
    assert_int_equal(imp_sim_new(IMP_CACHE_LRU, 1, 1, NULL), IMP_E_ARG);
    assert_int_equal(imp_sim_where(NULL, 1), 0);
    assert_int_equal(imp_sim_use(NULL, 1, 1, 1), IMP_E_ARG);
    imp_sim_free(NULL);
    assert_int_equal(imp_sim_new(IMP_CACHE_SCORE, 2, 1, &sim), 0);
    assert_int_equal(imp_sim_use(sim, 7, 1, 1), 0);
    assert_int_equal(imp_sim_where(sim, 7), 2); /* room in front: there it goes */
    assert_int_equal(imp_sim_use(sim, 8, 1, 0.5), 0);
    assert_int_equal(imp_sim_where(sim, 8), 1);
    for (int i = 0; i < 3; i++) (void)imp_sim_use(sim, 8, 1, 0.5);
    assert_int_equal(imp_sim_where(sim, 8), 2);
    assert_int_equal(imp_sim_where(sim, 7), 1);
    imp_sim_free(sim);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_optimum),
        cmocka_unit_test(test_endless),
        cmocka_unit_test(test_lru),
        cmocka_unit_test(test_sim_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
