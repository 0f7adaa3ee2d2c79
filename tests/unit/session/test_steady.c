/* test_steady.c: a store that has served requests like this one before: what a load allocates then, and what is left when
 * one is broken off with its reads on their way. */
#include "load_util.h"

#include "base/alloc.h"
#include "io/io_fault.h"

enum { LONG = 700, MOST_ALLOCATIONS = 32 };

static const imp_identify ways[] = {IMP_IDENTIFY_NONE,   IMP_IDENTIFY_ALL_KEYS, IMP_IDENTIFY_PROBE,
                                    IMP_IDENTIFY_STATIC, IMP_IDENTIFY_CHUNKS,   IMP_IDENTIFY_SKETCH};
enum { N_WAYS = sizeof ways / sizeof *ways };

static void start(util_world *w, imp_io_mode mode, int32_t *tokens)
{
    *w = (util_world){.n_layers = 4, .type_k = IMP_TYPE_F16, .type_v = IMP_TYPE_F16, .has_ropes = true,
                      .commit_queries = true};
    for (uint32_t l = 0; l < w->n_layers; l++) {
        w->layers[l] = (imp_layer_shape){2, 32, 32};
        w->n_heads[l] = 4;
        w->ropes[l] = (imp_rope){.pairs = IMP_ROPE_NEOX, .n_dims = 32, .base = 10000, .freq_scale = 1, .attn_factor = 1};
    }
    imp_store_opts_init(&w->opts);
    w->opts.io_mode = mode;
    w->opts.chunk_tokens = 16;
    w->opts.keep = IMP_KEEP_SKETCH | IMP_KEEP_PROBE;
    w->opts.buffer_bytes = 64 << 10; /* a few layers at a time */
    w->opts.reorder_period_s = UINT32_MAX; /* no other thread shall allocate meanwhile */
    util_start(w);
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    util_tokens(&r, tokens, LONG + 1);
    util_commit(w, tokens, LONG, 0, 0);
}

static imp_load_opts options(imp_identify identify)
{
    imp_load_opts o;
    imp_load_opts_init(&o);
    o.switches.identify = identify;
    o.record = IMP_RECORD_NOTHING; /* which is written now and then by another thread */
    if (identify == IMP_IDENTIFY_SKETCH) o.switches.prefetch = IMP_PREFETCH_CORE;
    if (identify == IMP_IDENTIFY_CHUNKS) o.switches.prefetch = IMP_PREFETCH_CHUNKS;
    if (identify != IMP_IDENTIFY_NONE) o.retention = 0.2;
    return o;
}

/* A load as far as `n_steps`: select and gather of each layer in turn, then a second pass. Allocations of its begin, and of
 * its steps, are added up if asked for. */
static void load_to(const util_world *w, imp_lease *lease, imp_identify identify, size_t n_steps, uint64_t *at_begin,
                    uint64_t *in_steps)
{
    static unsigned char k[LONG * UTIL_MAX_ROW], v[LONG * UTIL_MAX_ROW];
    imp_load_opts o = options(identify);
    imp_load *load;
    util_query u[UTIL_MAX_LAYERS];
    imp_rng r;
    imp_rng_seed(&r, 5);
    for (uint32_t l = 0; l < w->n_layers; l++) u[l] = util_make_query(&r, w, l);
    imp_alloc_fail_at(0, 0);
    assert_int_equal(imp_load_begin(lease, &o, &load), 0);
    uint64_t n = imp_alloc_fail_at(0, 0);
    if (at_begin) *at_begin = n;
    for (size_t i = 0; i < n_steps; i++) {
        uint32_t l = (uint32_t)(i / 2 % w->n_layers);
        if (i == 2 * w->n_layers) assert_int_equal(imp_load_rewind(load), 0);
        if (i % 2 == 0) {
            assert_int_equal(imp_load_select(load, l, &u[l].q, NULL), 0);
        } else {
            imp_dst dst = {.k = k, .v = v, .k_stride = util_k_bytes(w, l), .v_stride = util_v_bytes(w, l)};
            assert_int_equal(imp_load_gather(load, l, &dst), 0);
        }
    }
    imp_load_end(load, NULL);
    n = imp_alloc_fail_at(0, 0);
    if (in_steps) *in_steps = n;
    for (uint32_t l = 0; l < w->n_layers; l++) free(u[l].memory);
}

static imp_lease *acquire(const util_world *w, const int32_t *tokens)
{
    imp_lease *lease;
    imp_prefix_info info;
    assert_int_equal(imp_prefix_acquire(w->space, tokens, LONG + 1, 0, &lease, &info), 0);
    assert_int_equal(info.n_matched, LONG);
    return lease;
}

/* Nothing on the way from layer to layer; a bounded number at the start, whatever the number of layers and chunks. */
static void test_allocations(void **state)
{
    (void)state;
    util_world w;
    int32_t tokens[LONG + 1];
    start(&w, IMP_IO_AUTO, tokens);
    imp_lease *lease = acquire(&w, tokens);
    for (size_t i = 0; i < N_WAYS; i++) {
        size_t all = 4 * (size_t)w.n_layers;
        uint64_t begin, steps, again;
        for (int warm = 0; warm < 2; warm++) load_to(&w, lease, ways[i], all, NULL, NULL);
        load_to(&w, lease, ways[i], all, &begin, &steps);
        load_to(&w, lease, ways[i], all, &again, NULL);
        assert_int_equal(steps, 0);
        assert_int_equal(begin, again);
        if (begin > MOST_ALLOCATIONS) fail_msg("identification %d: %d allocations", (int)ways[i], (int)begin);
    }
    imp_lease_release(lease);
    util_stop(&w);
}

/* Ended at any step while its reads are slow: the buffers are back, so the next load takes the same and allocates no
 * more than ever. */
static void test_broken_off(void **state)
{
    (void)state;
    static const imp_io_mode modes[] = {IMP_IO_AUTO, IMP_IO_THREADS};
    for (size_t m = 0; m < 2; m++) {
        util_world w;
        int32_t tokens[LONG + 1];
        start(&w, modes[m], tokens);
        imp_lease *lease = acquire(&w, tokens);
        for (size_t i = 0; i < N_WAYS; i++) {
            uint64_t usual, begin;
            for (int warm = 0; warm < 2; warm++) load_to(&w, lease, ways[i], 4 * (size_t)w.n_layers, NULL, NULL);
            load_to(&w, lease, ways[i], 0, &usual, NULL);
            for (size_t steps = 0; steps <= 2 * (size_t)w.n_layers + 2; steps++) {
                assert_true(imp_io_fault_parse("read:1+:delay:30000") >= 0);
                load_to(&w, lease, ways[i], steps, &begin, NULL);
                imp_io_fault_clear();
                assert_int_equal(begin, usual);
            }
            load_to(&w, lease, ways[i], 2 * (size_t)w.n_layers, &begin, NULL); /* its reads are its own */
            assert_int_equal(begin, usual);
        }
        imp_lease_release(lease);
        util_stop(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_allocations),
        cmocka_unit_test(test_broken_off),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
