/* The roofline's arithmetic, against figures worked out by hand. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "replay/profile.h"

static void near(double got, double want)
{
    if (!(fabs(got - want) <= 1e-9 * fabs(want))) fail_msg("%.12g, not %.12g", got, want);
}

static void test_sizes(void **unused)
{
    (void)unused;
    const replay_profile *a = replay_profile_find("a100-80g");
    /* KV of a token: 2 x layers x KV heads x 128 x 2 bytes. */
    near(replay_token_bytes(replay_shape_find("opt-30b"), a), 2.0 * 48 * 7168 * 2);
    near(replay_token_bytes(replay_shape_find("opt-13b"), a), 2.0 * 40 * 5120 * 2);
    near(replay_token_bytes(replay_shape_find("opt-6.7b"), a), 2.0 * 32 * 4096 * 2);
    near(replay_token_bytes(replay_shape_find("llama-2-7b"), a), 524288);
    near(replay_token_bytes(replay_shape_find("Llama-3-8B"), a), 131072);
    near(replay_token_bytes(replay_shape_find("qwen2.5-7b"), a), 57344);
    /* 2,600 tokens of OPT-30B are 3.4 GB (the paper says 3.4). */
    double gb = 2600 * replay_token_bytes(replay_shape_find("opt-30b"), a) / (1 << 30);
    assert_true(gb > 3.3 && gb < 3.5);
    for (size_t i = 0; replay_shape_at(i); i++) {
        const replay_shape *s = replay_shape_at(i);
        assert_ptr_equal(replay_shape_find(s->name), s);
        assert_true(s->n_heads % s->n_kv_heads == 0 && s->n_heads * s->head_dim == s->width);
    }
    for (size_t i = 0; replay_profile_at(i); i++)
        assert_ptr_equal(replay_profile_find(replay_profile_at(i)->name), replay_profile_at(i));
    assert_null(replay_shape_find("gpt"));
    assert_null(replay_profile_find(""));
}

static void test_weights(void **unused)
{
    (void)unused;
    /* Weights without embeddings, from the time that one token takes: it is the memory's. */
    static const struct {
        const char *name;
        double billions;
    } all[] = {{"opt-6.7b", 6.44}, {"opt-13b", 12.58}, {"opt-30b", 29.6}, {"llama-2-7b", 6.48}, {"llama-2-13b", 12.69},
               {"llama-3-8b", 6.98}, {"qwen2.5-7b", 6.53}};
    const replay_profile *a = replay_profile_find("a100-80g");
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const replay_shape *s = replay_shape_find(all[i].name);
        double ns = replay_compute_ns(s, a, 1, 0) - replay_logits_ns(s, a);
        double weights = ns / 1e9 * a->memory_bytes_per_s * a->memory_share / 2;
        assert_true(fabs(weights / 1e9 - all[i].billions) < 0.02 * all[i].billions);
    }
}

static void test_roof(void **unused)
{
    (void)unused;
    const replay_profile p = {"test", 100e9, 0.5, 10e9, 0.5, 1e9, 2}; /* 50 GFLOP/s, 5 GB/s */
    const replay_shape s = {"test", 3, 4, 2, 8, 32, 64, 3, 1000};
    /* Before: 32 x 8 x (4 + 2 + 2) weights = 2,048, 4,096 bytes: 819.2 ns by bytes; for n rows 4,096 n / 50 ns. */
    near(replay_before_ns(&s, &p, 1), 819.2);
    near(replay_before_ns(&s, &p, 10), 819.2);
    near(replay_before_ns(&s, &p, 100), 8192);
    /* After, 10 rows over 200 cells: attention 4 x 10 x 205.5 x 32 FLOP = 5,260.8 ns, 2 x 210 x 32 bytes = 2,688 ns;
     * output 1,024 weights: 409.6 ns; feed-forward 3 x 32 x 64 weights: 2,457.6 ns. */
    near(replay_after_ns(&s, &p, 10, 200), 5260.8 + 409.6 + 2457.6);
    /* One row over 2,000 cells: 4 x 2,001 x 32 FLOP = 5,122.56 ns; 2 x 2,001 x 32 bytes = 25,612.8 ns. */
    near(replay_after_ns(&s, &p, 1, 2000), 25612.8 + 409.6 + 2457.6);
    near(replay_logits_ns(&s, &p), 12800);
    near(replay_score_ns(&s, &p, 32, 1000, 1), 2.0 * 32 * 1000 * 32 / 50);
    near(replay_score_ns(&s, &p, 1, 1000, 0.25), 1000.0 * 32 * 0.25 / 5);
    near(replay_bus_ns(&p, 5000), 5000);
    near(replay_compute_ns(&s, &p, 10, 200), 3 * (819.2 + 5260.8 + 409.6 + 2457.6) + 12800);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_weights),
        cmocka_unit_test(test_roof),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
