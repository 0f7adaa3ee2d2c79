/* test_costs.c: what reads cost, as a line through times, as a gap, in the catalogue, and in the reads of a load. */
#include "load_util.h"

#include <float.h>

#include "base/alloc.h"
#include "session/costs.h"
#include "store/store.h"

static void test_fit(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    for (int round = 0; round < 500; round++) {
        double read = imp_rng_below(&r, 3) ? imp_rng_unit(&r) * 1e5 : 0, byte = 0.01 + imp_rng_unit(&r) * 50, a, b;
        imp_cost_sample s[6];
        size_t n = 2 + imp_rng_below(&r, 5);
        for (size_t i = 0; i < n; i++) {
            s[i].bytes = (double)(4096u << i);
            s[i].ns = read + byte * s[i].bytes;
        }
        assert_true(imp_costs_fit(s, n, &a, &b));
        assert_true(fabs(a - read) <= 1e-6 * (read + byte * 4096));
        assert_true(fabs(b - byte) <= 1e-6 * byte);
        /* Times that are anything: neither below 0, one of them above. */
        for (size_t i = 0; i < n; i++) s[i].ns = 1 + imp_rng_unit(&r) * 1e9;
        assert_true(imp_costs_fit(s, n, &a, &b));
        assert_true(a >= 0 && b > 0 && isfinite(a) && isfinite(b));
        s[imp_rng_below(&r, n)].ns = imp_rng_below(&r, 2) ? 0 : INFINITY;
        assert_false(imp_costs_fit(s, n, &a, &b));
    }
    double a, b;
    const imp_cost_sample one[] = {{4096, 10}, {4096, 20}};
    assert_false(imp_costs_fit(one, 1, &a, &b));
    assert_false(imp_costs_fit(one, 2, &a, &b));
}

static void test_gap(void **state)
{
    (void)state;
    imp_read_costs c = {.read_ns = 8000, .byte_ns = 1};
    assert_int_equal(imp_costs_gap(&c, 0), 0); /* not measured */
    c.measured_s = 1;
    assert_int_equal(imp_costs_gap(&c, 0), 8000);
    assert_int_equal(imp_costs_gap(&c, 25000000), 200);     /* 40 ns a byte */
    assert_int_equal(imp_costs_gap(&c, 2000000000), 8000);  /* the disk is slower than the cap */
    c.read_ns = 1e9;
    assert_int_equal(imp_costs_gap(&c, 0), 32 << 10);
    c.read_ns = 0;
    assert_int_equal(imp_costs_gap(&c, 0), 0);
    c.read_ns = 10;
    c.byte_ns = 2;
    assert_true(fabs(imp_costs_ns(&c, 0, 3, 1000) - 2030) < 1e-9);
    assert_true(fabs(imp_costs_ns(&c, 100000000, 3, 1000) - 10000) < 1e-9);
}

enum { LONG = 1200 };

/* A pass by exact scores whose chosen tokens are scattered. Returns the rows, keys then values, of all layers. */
static unsigned char *load_rows(const util_world *w, const int32_t *tokens, imp_load_stats *stats)
{
    imp_lease *lease;
    imp_prefix_info info;
    imp_load_opts opts;
    imp_load *load;
    imp_load_opts_init(&opts);
    opts.switches.identify = IMP_IDENTIFY_RANDOM;
    opts.retention = 0.1;
    int32_t prompt[LONG + 1];
    memcpy(prompt, tokens, LONG * sizeof *tokens);
    prompt[LONG] = 1;
    assert_int_equal(imp_prefix_acquire(w->space, prompt, LONG + 1, 0, &lease, &info), 0);
    assert_int_equal(info.n_matched, LONG);
    assert_int_equal(imp_load_begin(lease, &opts, &load), 0);
    size_t k = imp_load_count(load), at = 0;
    unsigned char *rows = malloc(k * w->n_layers * 4096);
    for (uint32_t l = 0; l < w->n_layers; l++) {
        imp_dst dst = {.k = rows + at, .k_stride = util_k_bytes(w, l), .v_stride = util_v_bytes(w, l)};
        at += k * dst.k_stride;
        dst.v = rows + at;
        at += k * dst.v_stride;
        assert_int_equal(imp_load_select(load, l, NULL, NULL), 0);
        assert_int_equal(imp_load_gather(load, l, &dst), 0);
    }
    imp_load_end(load, stats);
    imp_lease_release(lease);
    return rows;
}

/* Dear reads are merged over gaps, which changes how much is read, and no row. */
static void test_loads(void **state)
{
    (void)state;
    for (unsigned keep = 0; keep <= IMP_KEEP_PAIRED; keep += IMP_KEEP_PAIRED) {
        util_world w = {0};
        imp_store_opts_init(&w.opts);
        w.opts.chunk_tokens = 16;
        w.opts.keep = keep;
        util_start(&w);
        imp_rng r;
        imp_rng_seed(&r, imp_test_seed());
        int32_t tokens[LONG];
        util_tokens(&r, tokens, LONG);
        util_commit(&w, tokens, LONG, 0, 0);
        imp_load_stats plain, merged;
        unsigned char *a = load_rows(&w, tokens, &plain);

        imp_read_costs costs;
        assert_int_equal(imp_store_get_read_costs(w.store, &costs), 0);
        assert_int_equal(costs.measured_s, 0);
        assert_true(costs.read_ns > 0 && costs.byte_ns > 0);
        assert_int_equal(imp_store_costs_get(w.store, true, &costs), IMP_E_NOTFOUND);
        const imp_read_costs dear = {.read_ns = 1e6, .byte_ns = 1, .measured_s = 1700000000};
        assert_int_equal(imp_store_costs_put(w.store, &dear), 0);
        util_close(&w);
        util_open(&w);
        assert_int_equal(imp_store_get_read_costs(w.store, &costs), 0);
        assert_int_equal(costs.measured_s, dear.measured_s);
        assert_true(costs.device != 0);
        assert_true(fabs(costs.read_ns - dear.read_ns) < DBL_EPSILON && fabs(costs.byte_ns - 1) < DBL_EPSILON);
        unsigned char *b = load_rows(&w, tokens, &merged);
        size_t k = (size_t)ceil(0.1 * LONG), n = 0;
        for (uint32_t l = 0; l < w.n_layers; l++) n += k * (util_k_bytes(&w, l) + util_v_bytes(&w, l));
        assert_memory_equal(a, b, n);
        assert_true(merged.n_reads < plain.n_reads);
        assert_true(merged.bytes_read > plain.bytes_read);
        free(a);
        free(b);
        util_stop(&w);
    }
}

static void test_calibrate(void **state)
{
    (void)state;
    util_world w = {0};
    imp_store_opts_init(&w.opts);
    util_start(&w);
    imp_read_costs costs, again;
    imp_set_error(IMP_E_IO, "a line");
    assert_int_equal(imp_store_get_read_costs(w.store, &costs), 0); /* they weren't measured: no failure */
    assert_string_equal(imp_last_error(), "a line");
    assert_int_equal(imp_store_calibrate(w.store, &costs), IMP_E_NOTFOUND); /* nothing to read */
    assert_int_equal(imp_store_calibrate(NULL, &costs), IMP_E_ARG);
    util_close(&w);
    w.opts.flags = IMP_STORE_READONLY;
    assert_int_equal(imp_store_open(w.dir, &w.opts, &w.store), 0);
    assert_int_equal(imp_store_calibrate(w.store, NULL), IMP_E_PERM);
    util_close(&w);
    w.opts.flags = 0;
    util_open(&w);
    assert_int_equal(imp_store_get_read_costs(w.store, NULL), IMP_E_ARG);
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    enum { N = 2048 };
    static int32_t tokens[N];
    util_tokens(&r, tokens, N);
    util_commit(&w, tokens, N, 0, 0);
    assert_int_equal(imp_store_calibrate(w.store, &costs), 0);
    assert_true(costs.measured_s > 0 && costs.device != 0 && costs.read_ns >= 0 && costs.byte_ns > 0);
    assert_int_equal(imp_store_get_read_costs(w.store, &again), 0);
    assert_memory_equal(&costs, &again, sizeof costs);
    util_close(&w);
    w.opts.flags = IMP_STORE_READONLY;
    assert_int_equal(imp_store_open(w.dir, &w.opts, &w.store), 0);
    assert_int_equal(imp_store_get_read_costs(w.store, &again), 0);
    assert_memory_equal(&costs, &again, sizeof costs);
    assert_int_equal(imp_store_calibrate(w.store, NULL), IMP_E_PERM);
    util_close(&w);

    imp_store *memory;
    w.opts.flags = IMP_STORE_MEMORY;
    w.opts.host_cache_bytes = 4 << 20;
    assert_int_equal(imp_store_open(NULL, &w.opts, &memory), 0);
    assert_int_equal(imp_store_calibrate(memory, NULL), IMP_E_UNSUPPORTED);
    imp_store_close(memory);
    imp_test_remove_dir(w.dir);
}

static void take_lease(const util_world *w, const int32_t *tokens, imp_lease **lease, imp_prefix_info *info)
{
    int32_t prompt[LONG + 1];
    memcpy(prompt, tokens, LONG * sizeof *tokens);
    prompt[LONG] = 1;
    assert_int_equal(imp_prefix_acquire(w->space, prompt, LONG + 1, 0, lease, info), 0);
    assert_int_equal(info->n_matched, LONG);
}

static void check_near(uint64_t a, uint64_t b, double share)
{
    if (fabs((double)a - (double)b) > share * (double)b)
        fail_msg("%llu and %llu", (unsigned long long)a, (unsigned long long)b);
}

/* What is estimated is what a load then takes: at first about, and the same the next time. */
static void test_estimate(void **state)
{
    (void)state;
    util_world w = {0};
    imp_store_opts_init(&w.opts);
    w.opts.chunk_tokens = 16;
    w.opts.host_cache_bytes = 64 << 20;
    w.opts.cache = IMP_CACHE_LRU;
    w.opts.read_bytes_per_s = 100000000;
    util_start(&w);
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    int32_t tokens[LONG];
    util_tokens(&r, tokens, LONG);
    util_commit(&w, tokens, LONG, 0, 0);
    imp_lease *lease;
    imp_prefix_info info;
    take_lease(&w, tokens, &lease, &info);
    imp_load_opts all, some;
    imp_load_opts_init(&all);
    all.switches.cache = IMP_CACHE_NONE;
    some = all;
    some.switches.identify = IMP_IDENTIFY_RANDOM;
    some.retention = 0.1;
    imp_load_guess g;
    imp_set_error(IMP_E_IO, "a line");
    assert_int_equal(imp_load_estimate(lease, &all, &g), 0);
    assert_string_equal(imp_last_error(), "a line");
    assert_int_equal(g.n_tokens, LONG);
    assert_int_equal(g.bytes_held, 0);
    check_near(g.bytes_read, info.bytes_full, 0.02);
    check_near(g.read_ns, g.bytes_read * 10, 0.02); /* the cap is what bounds it */
    assert_int_equal(imp_load_estimate(lease, &some, &g), 0);
    assert_int_equal(g.n_tokens, LONG / 10);
    assert_true(g.bytes_read > info.bytes_full / 10 && g.bytes_read < info.bytes_full);
    imp_lease_release(lease);

    imp_load_stats stats;
    free(load_rows(&w, tokens, &stats)); /* by the tiers, which are empty */
    take_lease(&w, tokens, &lease, &info);
    assert_int_equal(imp_load_estimate(lease, &some, &g), 0);
    check_near(g.bytes_read, stats.bytes_read, 0.15); /* padding and the header are in what was read */
    check_near(g.n_reads, stats.n_reads, 0.15);
    some.switches.cache = IMP_CACHE_LRU;
    assert_int_equal(imp_load_estimate(lease, &some, &g), 0);
    assert_true(g.bytes_held > g.bytes_read / 4); /* what was read is there now */
    all.switches.cache = IMP_CACHE_LRU;
    assert_int_equal(imp_load_estimate(lease, &all, &g), 0);
    assert_true(g.bytes_held > 0 && g.bytes_read > 0);
    check_near(g.bytes_held + g.bytes_read, info.bytes_full, 0.02);

    some.byte_share = 0.05f;
    some.switches.identify = IMP_IDENTIFY_SKETCH;
    assert_int_equal(imp_load_estimate(lease, &some, &g), 0);
    assert_true(g.bytes_held + g.bytes_read <= info.bytes_full / 20 + info.bytes_full / 50);
    some.retention = 2;
    assert_int_equal(imp_load_estimate(lease, &some, &g), IMP_E_ARG);
    assert_int_equal(g.n_tokens, 0);
    assert_int_equal(imp_load_estimate(NULL, &all, &g), IMP_E_ARG);
    assert_int_equal(imp_load_estimate(lease, &all, NULL), IMP_E_ARG);
    imp_alloc_fail_at(1, 1);
    assert_int_equal(imp_load_estimate(lease, NULL, &g), IMP_E_NOMEM);
    imp_alloc_fail_at(0, 0);
    assert_int_equal(imp_load_estimate(lease, NULL, &g), 0);
    imp_lease_release(lease);
    util_stop(&w);
}

/* One pass by all keys; with the figures, and each layer's exact scores, [n_layers][LONG], if asked for. */
static size_t exact_pass(util_world *w, imp_rng *r, const int32_t *tokens, imp_lease *lease, const imp_load_opts *opts,
                         double *scores, imp_load_stats *stats)
{
    imp_load *load;
    assert_int_equal(imp_load_begin(lease, opts, &load), 0);
    size_t k = imp_load_count(load);
    unsigned char *keys = malloc(LONG * util_k_bytes(w, 0)), *rows = malloc(LONG * 2 * UTIL_MAX_ROW);
    for (uint32_t l = 0; l < w->n_layers; l++) {
        util_query u = util_make_query(r, w, l);
        const uint32_t *chosen;
        assert_int_equal(imp_load_select(load, l, &u.q, &chosen), 0);
        for (size_t i = 1; i < k; i++) assert_true(chosen[i] > chosen[i - 1] && chosen[i] < LONG);
        imp_dst dst = {.k = rows, .v = rows + LONG * UTIL_MAX_ROW, .k_stride = UTIL_MAX_ROW, .v_stride = UTIL_MAX_ROW};
        assert_int_equal(imp_load_gather(load, l, &dst), 0);
        for (size_t t = 0; scores && t < LONG; t++)
            util_row(w->type_k, util_k_elements(w, l), tokens[t], t, l, 0, keys + t * util_k_bytes(w, l));
        if (scores) util_h2o(w, l, &u.q, 32, keys, LONG, scores + l * LONG);
        free(u.memory);
    }
    imp_load_end(load, stats);
    free(rows);
    free(keys);
    return k;
}

static int falling(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* The share that the k largest hold, mean over the layers, each sorted. */
static double share_of(const double *sorted, uint32_t n_layers, size_t k)
{
    double sum = 0;
    for (uint32_t l = 0; l < n_layers; l++) {
        double held = 0, all = 0;
        for (size_t i = 0; i < LONG; i++) {
            all += sorted[l * LONG + i];
            if (i < k) held += sorted[l * LONG + i];
        }
        sum += held / all;
    }
    return sum / n_layers;
}

/* The number of tokens by the mass that they hold. */
static void test_mass(void **state)
{
    (void)state;
    util_world w = {0};
    imp_store_opts_init(&w.opts);
    util_start(&w);
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    int32_t tokens[LONG];
    util_tokens(&r, tokens, LONG);
    util_commit(&w, tokens, LONG, 0, 0); /* no queries: nothing is known */
    imp_lease *lease;
    imp_prefix_info info;
    take_lease(&w, tokens, &lease, &info);
    imp_load_opts o;
    imp_load_opts_init(&o);
    o.mass = 0.8f;
    imp_load *load;
    assert_int_equal(imp_load_begin(lease, &o, &load), 0); /* by nothing: all is loaded */
    assert_int_equal(imp_load_count(load), LONG);
    imp_load_end(load, NULL);
    o.switches.identify = IMP_IDENTIFY_ALL_KEYS;
    o.retention = 0.6;
    double *scores = malloc(w.n_layers * LONG * sizeof *scores);
    imp_load_stats stats;
    assert_int_equal(exact_pass(&w, &r, tokens, lease, &o, scores, &stats), LONG * 6 / 10); /* the most, in doubt */
    for (uint32_t l = 0; l < w.n_layers; l++) qsort(scores + l * LONG, LONG, sizeof *scores, falling);

    /* Now one request is known. */
    o.record = IMP_RECORD_NOTHING;
    for (float mass = 0.1f; mass < 0.99f; mass += 0.05f) {
        o.mass = mass;
        o.retention = 1;
        o.least_retention = 0.01f;
        assert_int_equal(imp_load_begin(lease, &o, &load), 0);
        size_t k = imp_load_count(load);
        imp_load_end(load, NULL);
        assert_true(share_of(scores, w.n_layers, k) >= (double)mass - 2e-3); /* histories are in half precision */
        if (k > LONG / 100 + 1) assert_true(share_of(scores, w.n_layers, k - 1) <= (double)mass + 2e-3);
        o.retention = 0.2;
        o.least_retention = 0.125f;
        assert_int_equal(imp_load_begin(lease, &o, &load), 0);
        size_t bound = imp_load_count(load);
        imp_load_end(load, NULL);
        size_t least = LONG / 8, most = LONG / 5;
        assert_int_equal(bound, k < least ? least : k > most ? most : k);
    }

    /* Loads that hold less than was foreseen, as these questions have nothing to do with each other: later ones take
     * more. */
    o.mass = 0.5f;
    o.retention = 1;
    size_t first = exact_pass(&w, &r, tokens, lease, &o, NULL, &stats), k = first;
    assert_true(stats.mass > 0 && stats.mass < 1);
    for (int i = 0; i < 8; i++) k = exact_pass(&w, &r, tokens, lease, &o, NULL, &stats);
    assert_true(fabs(stats.mass - 0.5) < 0.15);
    assert_true(k >= first / 4 && k <= LONG);

    static const float bad[][2] = {{1, 0}, {-0.1f, 0}, {NAN, 0}, {0.5f, 1.1f}, {0.5f, -1}, {0.5f, NAN}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        o.mass = bad[i][0];
        o.least_retention = bad[i][1];
        assert_int_equal(imp_load_opts_check(&o), IMP_E_ARG);
        assert_int_equal(imp_load_begin(lease, &o, &load), IMP_E_ARG);
    }
    free(scores);
    imp_lease_release(lease);
    util_stop(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fit),
        cmocka_unit_test(test_gap),
        cmocka_unit_test(test_loads),
        cmocka_unit_test(test_calibrate),
        cmocka_unit_test(test_estimate),
        cmocka_unit_test(test_mass),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
