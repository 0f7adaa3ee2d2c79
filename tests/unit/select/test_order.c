/* Orders of tokens against a naive twin that looks for the next token, slot by slot. */
#include "unit/select/select_util.h"

#include <stdbool.h>

#include "select/order.h"

static void core_tokens(void **state)
{
    (void)state;
    static const struct { uint32_t n, chunk, core; } cases[] = {
        {1, 16, 1}, {16, 16, 16}, {17, 16, 16}, {128, 16, 16}, {129, 16, 32}, {100, 64, 64}, {512, 64, 64},
        {513, 64, 128}, {2048, 64, 256}, {2048, 256, 256}, {200, 256, 200}, {1u << 20, 16, 1u << 17},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(imp_order_core_tokens(cases[i].n, cases[i].chunk), cases[i].core);
    }
    /* What a segment demands of a core: whole chunks or everything, and no more than a chunk above an eighth. */
    for (uint32_t n = 1; n < 3000; n++) {
        for (uint32_t chunk = 16; chunk <= 256; chunk += 16) {
            uint32_t core = imp_order_core_tokens(n, chunk);
            assert_true(core >= 1 && core <= n && (core == n || core % chunk == 0));
            assert_true(8 * core >= n && (core <= chunk || 8 * (core - chunk) < n));
        }
    }
}

static double score_of(float x) { return isnan(x) ? 0.0 : (double)x; }

/* Fill slots [first, first + m) with tokens that aren't taken: by falling score, or by number. */
static void naive_fill(const float *scores, uint32_t n, bool by_score, uint32_t first, uint32_t m, bool *taken,
                       uint32_t *slots)
{
    for (uint32_t i = 0; i < m; i++) {
        uint32_t best = n;
        for (uint32_t t = 0; t < n; t++) {
            if (!taken[t] && (best == n || (by_score && score_of(scores[t]) > score_of(scores[best])))) best = t;
        }
        taken[best] = true;
        slots[first + i] = best;
    }
}

static void naive(imp_order order, const float *scores, uint32_t n, uint32_t n_core, uint32_t *slots)
{
    bool taken[300] = {false}, core[300] = {false};
    uint32_t best[300];
    if (order == IMP_ORDER_CORE) {
        if (scores) {
            naive_fill(scores, n, true, 0, n_core, core, best);
        } else {
            for (uint32_t i = 0; i < n_core; i++) core[i < 4 ? i : n - (n_core - i)] = true;
        }
        for (uint32_t t = 0; t < n; t++) taken[t] = !core[t];
        naive_fill(scores, n, false, 0, n_core, taken, slots);
        for (uint32_t t = 0; t < n; t++) taken[t] = core[t];
        naive_fill(scores, n, false, n_core, n - n_core, taken, slots);
    } else {
        naive_fill(scores, n, order == IMP_ORDER_IMPORTANCE && scores, 0, n, taken, slots);
    }
}

static void slots_by_score(void **state)
{
    (void)state;
    imp_rng rng = test_rng("slots_by_score");
    for (int round = 0; round < 1000; round++) {
        uint32_t n = 1 + (uint32_t)imp_rng_below(&rng, round % 10 ? 40 : 299);
        uint32_t n_core = (uint32_t)imp_rng_below(&rng, n + 1);
        uint32_t n_levels = 1 + (uint32_t)imp_rng_below(&rng, 20); /* many equals */
        float *scores = test_alloc(n * sizeof *scores), *scratch = test_alloc(n * sizeof *scratch);
        uint32_t *slots = test_alloc(n * sizeof *slots), want[300];
        for (uint32_t i = 0; i < n; i++) {
            static const float odd[] = {NAN, -NAN, INFINITY, -INFINITY, 0.0f, -0.0f, -1.0f};
            scores[i] = (float)imp_rng_below(&rng, n_levels);
            if (imp_rng_below(&rng, 10) == 0) scores[i] = odd[imp_rng_below(&rng, 7)];
        }
        for (int order = IMP_ORDER_TOKEN; order <= IMP_ORDER_CORE; order++) {
            for (int known = 0; known < 2; known++) {
                const float *by = known ? scores : NULL;
                naive((imp_order)order, by, n, n_core, want);
                imp_order_slots((imp_order)order, by, n, n_core, slots, scratch);
                assert_memory_equal(slots, want, n * sizeof *slots);
            }
        }
        imp_free(slots);
        imp_free(scratch);
        imp_free(scores);
    }
}

/* Rising, falling and equal scores at a length where a quadratic sort would show. */
static void long_ones(void **state)
{
    (void)state;
    enum { N = 1 << 18 };
    float *scores = test_alloc(N * sizeof *scores), *scratch = test_alloc(N * sizeof *scratch);
    uint32_t *slots = test_alloc(N * sizeof *slots);
    for (int kind = 0; kind < 3; kind++) {
        for (uint32_t i = 0; i < N; i++) scores[i] = kind == 0 ? (float)i : kind == 1 ? -(float)i : 1.0f;
        imp_order_slots(IMP_ORDER_IMPORTANCE, scores, N, 0, slots, scratch);
        for (uint32_t i = 0; i < N; i++) assert_true(slots[i] == (kind == 0 ? N - 1 - i : i));
    }
    imp_free(slots);
    imp_free(scratch);
    imp_free(scores);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(core_tokens),
        cmocka_unit_test(slots_by_score),
        cmocka_unit_test(long_ones),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
