/* The engine on a small store: keys have the scores of their patterns, through the real scorer; rows are those that
 * were stored; virtual time tells what a wait would; both ways read the same. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "replay/engine.h"
#include "support/support.h"

static const replay_shape shape = {"test", 4, 6, 6, 16, 96, 256, 2, 1000};
static const replay_profile profile = {"test", 1e12, 0.5, 1e11, 0.8, 1e9, 2};

static replay_setup make_setup(const replay_patterns *patterns, size_t n_sets)
{
    return (replay_setup){.shape = &shape, .profile = &profile, .scale = 0.5, .patterns = patterns, .n_sets = n_sets,
                          .n_prefixes = 3, .prefix_tokens = 300, .query_tokens = 8, .seed = 5,
                          .disk_bytes_per_s = 1e9, .device_bytes = 0, .host_bytes = 0, .simulated = true, .stretch = 1};
}

static replay_system make_system(const char *name, double retention)
{
    replay_system s = {.name = name, .retention = retention};
    imp_load_opts_init(&s.load);
    assert_int_equal(imp_system_preset(name, &s.switches), 0);
    return s;
}

static void test_f16(void **unused)
{
    (void)unused;
    for (uint32_t h = 0; h < 65536; h++) {
        float f = replay_f32((uint16_t)h);
        if (isnan(f)) continue;
        assert_int_equal(replay_f16(f), h);
    }
    assert_int_equal(replay_f16(65519.f), 0x7bff);
    assert_int_equal(replay_f16(65520.f), 0x7c00);
    assert_int_equal(replay_f16(-INFINITY), 0xfc00);
    assert_int_equal(replay_f16(NAN) & 0x7e00, 0x7e00);
    assert_int_equal(replay_f16(0x1.002p0f), 0x3c00); /* halfway: to even */
    assert_int_equal(replay_f16(0x1.006p0f), 0x3c02);
    assert_int_equal(replay_f16(0x1p-25f), 0);
    assert_int_equal(replay_f16(0x1.8p-24f), 2);
}

typedef struct watching {
    const replay_setup *setup;
    const replay_keys *keys;
    uint32_t question;
    size_t n_layers, n_tokens, n_same;
    bool exact; /* what is chosen are the pattern's best */
    uint16_t *k;
} watching;

static void watch(void *user, uint32_t prefix, uint32_t layer, const uint32_t *positions, size_t n, const uint16_t *k,
                  const uint16_t *v)
{
    watching *w = user;
    size_t row = (size_t)w->keys->n_kv_heads * w->keys->head_dim;
    uint16_t value[128];
    assert_true(row <= 128);
    w->n_layers++;
    replay_keys_fill(w->keys, prefix, layer, w->k);
    for (size_t i = 0; i < n; i++) {
        assert_true(positions[i] < w->setup->prefix_tokens && (i == 0 || positions[i] > positions[i - 1]));
        replay_value_fill(prefix, layer, positions[i], row, value);
        assert_memory_equal(v + i * row, value, row * sizeof *v);
        assert_memory_equal(k + i * row, w->k + positions[i] * row, row * sizeof *k);
    }
    if (!w->exact) return;
    /* The same choice from the pattern itself, whose tokens are found where the prefix has them. */
    const replay_patterns *p = replay_keys_set(w->keys, prefix);
    double *score = calloc(w->setup->prefix_tokens, sizeof *score);
    uint32_t from = replay_keys_layer(w->keys, prefix, layer);
    for (uint32_t h = 0; h < w->keys->n_kv_heads; h++) {
        const uint16_t *codes = replay_pattern_codes(p, from, w->question, h % p->n_heads);
        double sum = 0;
        for (uint32_t t = 0; t < w->setup->prefix_tokens; t++)
            sum += replay_pattern_share(codes[replay_keys_token(w->keys, prefix, t)]);
        for (uint32_t t = 0; t < w->setup->prefix_tokens; t++)
            score[t] += replay_pattern_share(codes[replay_keys_token(w->keys, prefix, t)]) / sum;
    }
    for (size_t i = 0; i < n; i++) {
        /* Among the n best, but for those that rounding has put at the seam. */
        size_t better = 0;
        for (uint32_t t = 0; t < w->setup->prefix_tokens; t++) better += score[t] > score[positions[i]] * 1.02;
        assert_true(better < n);
        better = 0;
        for (uint32_t t = 0; t < w->setup->prefix_tokens; t++) better += score[t] > score[positions[i]];
        w->n_same += better < n;
        w->n_tokens++;
    }
    free(score);
}

static void test_scores(void **unused)
{
    (void)unused;
    char *dir = imp_test_make_dir(NULL);
    replay_patterns sets[2];
    assert_int_equal(replay_patterns_rule(2, 3, 200, 8, imp_test_seed(), &sets[0]), 0); /* shorter than the prefixes */
    assert_int_equal(replay_patterns_rule(8, 2, 500, 5, imp_test_seed() + 1, &sets[1]), 0);
    replay_setup s = make_setup(sets, 2);
    assert_int_equal(replay_setup_check(&s), 0);
    replay_system system = make_system("as-h2o-lru", 0.25);
    const char *path = imp_test_path(dir, "store");
    assert_int_equal(replay_fill(&s, &system.switches, path, NULL, NULL), 0);
    replay_session *r;
    assert_int_equal(replay_open(&s, &system, path, &r), 0);
    const replay_keys keys = {sets, 2, 4, 6, 8, 300, 5};
    watching w = {.setup = &s, .keys = &keys, .exact = true, .k = malloc((size_t)300 * 6 * 8 * 2)};
    replay_set_watch(r, watch, &w);
    replay_answer a;
    for (uint32_t p = 0; p < 3; p++) {
        for (w.question = 1; w.question < (p == 1 ? 5u : 8u); w.question++) {
            assert_int_equal(replay_ask(r, p, w.question, &a), 0);
            assert_true(a.n_loaded == 75 && a.mass > 0.5 && a.bytes_read > 0 && a.ttft_ns > a.compute_ns);
        }
    }
    assert_int_equal(replay_ask(r, 1, 5, &a), IMP_E_ARG);
    assert_int_equal(replay_ask(r, 3, 1, &a), IMP_E_ARG);
    assert_int_equal(replay_ask(r, 0, 0, &a), IMP_E_ARG);
    assert_int_equal(w.n_layers, 4 * (7 + 4 + 7));
    assert_true((double)w.n_same > 0.995 * (double)w.n_tokens);
    free(w.k);
    replay_close(r);
    replay_patterns_free(&sets[0]);
    replay_patterns_free(&sets[1]);
    imp_test_remove_dir(dir);
}

/* Full load: all bytes but what the tiers have, in the time that the disk and the roofline say. */
static void test_time(void **unused)
{
    (void)unused;
    char *dir = imp_test_make_dir(NULL);
    replay_patterns p;
    assert_int_equal(replay_patterns_rule(4, 3, 1500, 8, imp_test_seed(), &p), 0);
    replay_setup s = make_setup(&p, 1);
    s.prefix_tokens = 1500;
    s.disk_bytes_per_s = 20e6;
    replay_system system = make_system("as", 1);
    const char *path = imp_test_path(dir, "store");
    assert_int_equal(replay_fill(&s, &system.switches, path, NULL, NULL), 0);
    double full = 1500 * replay_token_bytes(&shape, &profile);
    for (int twice = 0; twice < 2; twice++) {
        replay_session *r;
        replay_answer a;
        s.host_bytes = twice ? 2 * full : 0;
        assert_int_equal(replay_open(&s, &system, path, &r), 0);
        for (int i = 0; i < 3; i++) {
            assert_int_equal(replay_ask(r, 1, 1, &a), 0);
            assert_true(a.n_loaded == 1500);
            if (twice && i) { /* from memory: the bus and the rest */
                assert_true(a.bytes_read < 0.02 * full && a.host_hit_bytes >= full);
                assert_true(a.ttft_ns < 2 * (a.compute_ns + replay_bus_ns(&profile, full)));
                continue;
            }
            double io = 1e9 * a.bytes_read / s.disk_bytes_per_s;
            assert_true(a.bytes_read >= full && a.bytes_read < 1.05 * full);
            assert_true(a.ttft_ns > io && a.ttft_ns < 1.1 * (io + a.compute_ns + replay_bus_ns(&profile, full)));
        }
        replay_close(r);
    }
    replay_patterns_free(&p);
    imp_test_remove_dir(dir);
}

/* What the device tier has doesn't cross the bus, at whatever precision it has it; all else does, as f16. */
static void test_bus(void **unused)
{
    (void)unused;
    char *dir = imp_test_make_dir(NULL);
    replay_patterns p;
    assert_int_equal(replay_patterns_rule(4, 3, 1500, 8, imp_test_seed(), &p), 0);
    replay_setup s = make_setup(&p, 1);
    s.prefix_tokens = 1500;
    const double full = 1500 * replay_token_bytes(&shape, &profile), all_ns = replay_bus_ns(&profile, full);
    for (int packed = 0; packed < 2; packed++) {
        replay_system system = make_system("as", 1);
        system.switches.rest = packed ? IMP_REST_K8V4 : IMP_REST_RAW;
        const char *path = imp_test_path(dir, packed ? "packed" : "raw");
        assert_int_equal(replay_fill(&s, &system.switches, path, NULL, NULL), 0);
        for (int on_device = 0; on_device < 2; on_device++) {
            replay_session *r;
            replay_answer a;
            s.host_bytes = on_device ? 0 : 2 * full;
            s.device_bytes = on_device ? 2 * full : 0;
            assert_int_equal(replay_open(&s, &system, path, &r), 0);
            for (int i = 0; i < 3; i++) {
                assert_int_equal(replay_ask(r, 1, 1, &a), 0);
                if (i == 0 || !on_device) assert_true(a.bus_ns > 0.99 * all_ns && a.bus_ns < 1.01 * all_ns);
                else assert_true(a.bus_ns < 0.02 * all_ns);
                assert_true(a.ttft_ns >= a.bus_ns);
            }
            replay_close(r);
        }
    }
    replay_patterns_free(&p);
    imp_test_remove_dir(dir);
}

/* The logic of a run doesn't depend on the clock: the same bytes from the same places, all systems, tiers and a
 * reorder. */
static void test_slept_and_virtual(void **unused)
{
    (void)unused;
    static const char *const names[] = {"as", "as-h2o-lru", "spi", "impress-paper", "contiguous", "impress"};
    char *dir = imp_test_make_dir(NULL);
    replay_patterns p;
    assert_int_equal(replay_patterns_rule(4, 3, 300, 8, imp_test_seed(), &p), 0);
    replay_request requests[12];
    replay_zipf(3, 7, 1, imp_test_seed(), requests, 12);
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        replay_answer answers[2][12];
        for (int simulated = 0; simulated < 2; simulated++) {
            replay_setup s = make_setup(&p, 1);
            s.simulated = simulated;
            s.disk_bytes_per_s = 1e10;
            s.host_bytes = 300 * replay_token_bytes(&shape, &profile);
            s.device_bytes = s.host_bytes / 2;
            replay_system system = make_system(names[n], 0.25);
            char name[32];
            snprintf(name, sizeof name, "%s-%d", names[n], simulated);
            const char *path = imp_test_path(dir, name);
            assert_int_equal(replay_fill(&s, &system.switches, path, NULL, NULL), 0);
            replay_session *r;
            assert_int_equal(replay_open(&s, &system, path, &r), 0);
            for (size_t i = 0; i < 12; i++) {
                if (i == 6) assert_true(replay_reorder(r) >= 0);
                assert_int_equal(replay_ask(r, requests[i].prefix, requests[i].question, &answers[simulated][i]), 0);
            }
            replay_close(r);
        }
        for (size_t i = 0; i < 12; i++) {
            const replay_answer *a = &answers[0][i], *b = &answers[1][i];
            assert_true(a->n_loaded == b->n_loaded && fabs(a->mass - b->mass) < 1e-6);
            /* What is read ahead and then not needed may differ by what was there in time. */
            double all_a = a->bytes_read + a->host_hit_bytes + a->device_hit_bytes;
            double all_b = b->bytes_read + b->host_hit_bytes + b->device_hit_bytes;
            if (!(fabs(all_a - all_b) < 0.1 * all_a + 1))
                fail_msg("%s: %g bytes, %g in virtual time", names[n], all_a, all_b);
        }
    }
    replay_patterns_free(&p);
    imp_test_remove_dir(dir);
}

static void test_zipf(void **unused)
{
    (void)unused;
    enum { N = 40000 };
    replay_request *r = malloc(N * sizeof *r), *again = malloc(N * sizeof *r);
    replay_zipf(4, 7, 1, 3, r, N);
    replay_zipf(4, 7, 1, 3, again, N);
    assert_memory_equal(r, again, N * sizeof *r);
    double counts[4] = {0}, questions[8] = {0};
    for (size_t i = 0; i < N; i++) counts[r[i].prefix]++, questions[r[i].question]++;
    for (int i = 0; i < 4; i++) assert_true(fabs(counts[i] / N - 12.0 / 25 / (i + 1)) < 0.02);
    for (int i = 1; i < 8; i++) assert_true(fabs(questions[i] / N - 1.0 / 7) < 0.02);
    free(r);
    free(again);
}

static void test_setups(void **unused)
{
    (void)unused;
    replay_patterns p;
    assert_int_equal(replay_patterns_rule(1, 1, 64, 2, 1, &p), 0);
    replay_setup good = make_setup(&p, 1), s;
    assert_int_equal(replay_setup_check(&good), 0);
    s = good, s.scale = 0.25;
    assert_int_equal(replay_setup_check(&s), IMP_E_ARG);
    s = good, s.scale = 0.9;
    assert_int_equal(replay_setup_check(&s), IMP_E_ARG);
    s = good, s.scale = 0;
    assert_int_equal(replay_setup_check(&s), IMP_E_ARG);
    s = good, s.n_prefixes = 0;
    assert_int_equal(replay_setup_check(&s), IMP_E_ARG);
    s = good, s.prefix_tokens = 100;
    assert_int_equal(replay_setup_check(&s), IMP_E_ARG);
    s = good, s.disk_bytes_per_s = 0;
    assert_int_equal(replay_setup_check(&s), IMP_E_ARG);
    s = good, s.stretch = 0.5;
    assert_int_equal(replay_setup_check(&s), IMP_E_ARG);
    s = good, s.host_bytes = -1;
    assert_int_equal(replay_setup_check(&s), IMP_E_ARG);
    replay_patterns_free(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_f16),  cmocka_unit_test(test_scores),           cmocka_unit_test(test_time),
        cmocka_unit_test(test_bus),
        cmocka_unit_test(test_zipf), cmocka_unit_test(test_slept_and_virtual), cmocka_unit_test(test_setups),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
