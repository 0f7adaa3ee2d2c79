/* test_load.c: what a load puts into the engine's memory, in every way there is to load it. */
#include "load_util.h"

#include <pthread.h>

#include "base/alloc.h"

typedef struct memory {
    unsigned char *k, *v;
    size_t k_stride, v_stride, n_cells;
    uint32_t *cells; /* NULL: as they come */
} memory;

static memory make_memory(imp_rng *r, const util_world *w, uint32_t l, size_t k)
{
    memory m = {.k_stride = util_k_bytes(w, l), .v_stride = util_v_bytes(w, l), .n_cells = k};
    if (imp_rng_below(r, 2)) { /* scattered, with gaps */
        m.k_stride += imp_rng_below(r, 3) * 4;
        m.v_stride += imp_rng_below(r, 3) * 4;
        m.n_cells = k + imp_rng_below(r, 20);
        uint32_t *all = malloc(m.n_cells * sizeof *all);
        for (size_t i = 0; i < m.n_cells; i++) all[i] = (uint32_t)i;
        bool shuffled = imp_rng_below(r, 2) != 0;
        for (size_t i = 0; shuffled && i < m.n_cells; i++) {
            size_t j = i + imp_rng_below(r, m.n_cells - i);
            uint32_t x = all[i];
            all[i] = all[j];
            all[j] = x;
        }
        m.cells = all;
    }
    m.k = malloc(m.n_cells * m.k_stride);
    m.v = malloc(m.n_cells * m.v_stride);
    memset(m.k, 0xa5, m.n_cells * m.k_stride);
    memset(m.v, 0xa5, m.n_cells * m.v_stride);
    return m;
}

static void free_memory(memory *m)
{
    free(m->k);
    free(m->v);
    free(m->cells);
}

/* Rows of the chosen tokens are the committed ones, and nothing else was written. */
static void check_rows(const util_world *w, uint32_t l, const memory *m, const int32_t *tokens, const uint32_t *chosen,
                       size_t k)
{
    unsigned char want[UTIL_MAX_ROW * 4], *touched = calloc(m->n_cells, 1);
    for (int value = 0; value < 2; value++) {
        size_t bytes = value ? util_v_bytes(w, l) : util_k_bytes(w, l), stride = value ? m->v_stride : m->k_stride;
        const unsigned char *rows = value ? m->v : m->k;
        for (size_t i = 0; i < k; i++) {
            size_t cell = m->cells ? m->cells[i] : i;
            touched[cell] = 1;
            util_row(value ? w->type_v : w->type_k, value ? util_v_elements(w, l) : util_k_elements(w, l),
                     tokens[chosen[i]], chosen[i], l, value, want);
            assert_memory_equal(rows + cell * stride, want, bytes);
        }
        for (size_t c = 0; c < m->n_cells; c++)
            for (size_t i = touched[c] ? bytes : 0; i < stride; i++) assert_int_equal(rows[c * stride + i], 0xa5);
    }
    free(touched);
}

/* With Q8 at rest: keys within half a step of their channel's largest in the group of 64 tokens of the segment
 * (whatever that is: at most 2 here), values of their block of 32. */
static void check_rounded(const util_world *w, uint32_t l, const memory *m, const int32_t *tokens,
                          const uint32_t *chosen, size_t k)
{
    unsigned char want[UTIL_MAX_ROW * 4];
    for (int value = 0; value < 2; value++) {
        imp_type type = value ? w->type_v : w->type_k;
        size_t n = value ? util_v_elements(w, l) : util_k_elements(w, l), stride = value ? m->v_stride : m->k_stride;
        bool differs = false;
        for (size_t i = 0; i < k; i++) {
            const unsigned char *row = (value ? m->v : m->k) + (m->cells ? m->cells[i] : i) * stride;
            util_row(type, n, tokens[chosen[i]], chosen[i], l, value, want);
            for (size_t e = 0; e < n; e++) {
                double d = fabs(util_element(type, row, e) - util_element(type, want, e));
                double bound = 2.0 / 127 * 0.51 + (type == IMP_TYPE_BF16 ? 2.0 / 256 : 2.0 / 1024);
                if (d > bound) fail_msg("layer %u, token %u, element %zu: off by %g", l, chosen[i], e, d);
                differs |= d > 0;
            }
        }
        assert_true(differs);
    }
}

/* Keys of the first n tokens as scored: the engine's own, or what Q8 made of them, which a whole load gives. */
static unsigned char *all_keys(util_world *w, imp_lease *lease, size_t n, uint32_t l)
{
    unsigned char *k = malloc(n * util_k_bytes(w, l)), *v = malloc(n * util_v_bytes(w, l));
    imp_load *load;
    assert_int_equal(imp_load_begin(lease, NULL, &load), 0);
    assert_int_equal(imp_load_count(load), n);
    assert_int_equal(imp_load_select(load, l, NULL, NULL), 0); /* a layer in the middle: those before it are skipped */
    imp_dst dst = {.k = k, .v = v, .k_stride = util_k_bytes(w, l), .v_stride = util_v_bytes(w, l)};
    assert_int_equal(imp_load_gather(load, l, &dst), 0);
    imp_load_end(load, NULL);
    free(v);
    return k;
}

/* One pass with random queries and destinations, all of it checked. */
static void check_pass(imp_rng *r, util_world *w, imp_lease *lease, size_t n, const int32_t *tokens, bool rounded,
                       imp_load *load, const imp_load_opts *opts, bool first)
{
    imp_load_stats stats;
    double all_mass = 0;
    bool none = opts->switches.identify == IMP_IDENTIFY_NONE;
    size_t k = imp_load_count(load);
    assert_int_equal(k, none ? n : (size_t)fmax(1, ceil(opts->retention * (double)n - 1e-9)));
    for (uint32_t l = 0; l < w->n_layers; l++) {
        const uint32_t *chosen = NULL;
        util_query u = {0};
        if (!none) u = util_make_query(r, w, l);
        assert_int_equal(imp_load_select(load, l, none ? NULL : &u.q, &chosen), 0);
        if (!none) {
            unsigned char *keys = all_keys(w, lease, n, l);
            double *scores = malloc(n * sizeof *scores), mass;
            size_t rows = opts->max_query_rows ? opts->max_query_rows : 32;
            util_h2o(w, l, &u.q, rows, keys, n, scores);
            util_check_chosen(scores, n, chosen, k, opts->n_keep_first, opts->n_keep_last, &mass);
            all_mass += mass;
            free(scores);
            free(keys);
        } else {
            for (size_t i = 0; i < n; i++) assert_int_equal(chosen[i], i);
        }
        memory m = make_memory(r, w, l, k);
        imp_dst dst = {.k = m.k, .v = m.v, .k_stride = m.k_stride, .v_stride = m.v_stride, .cells = m.cells};
        assert_int_equal(imp_load_gather(load, l, &dst), 0);
        if (rounded) {
            check_rounded(w, l, &m, tokens, chosen, k);
        } else {
            check_rows(w, l, &m, tokens, chosen, k);
        }
        free_memory(&m);
        free(u.memory);
    }
    imp_load_get_stats(load, &stats);
    if (!none && first) assert_true(fabs(stats.mass - all_mass / w->n_layers) < 1e-3);
}

static void make_random_world(imp_rng *r, util_world *w)
{
    static const imp_type types[] = {IMP_TYPE_F16, IMP_TYPE_F32, IMP_TYPE_BF16, IMP_TYPE_Q8_0};
    *w = (util_world){.n_layers = 1 + (uint32_t)imp_rng_below(r, UTIL_MAX_LAYERS)};
    imp_store_opts_init(&w->opts);
    w->opts.rest = imp_rng_below(r, 3) == 0 ? IMP_REST_Q8 : IMP_REST_RAW;
    uint64_t n_types = w->opts.rest == IMP_REST_Q8 ? 3 : 4;
    w->type_k = types[imp_rng_below(r, n_types)];
    w->type_v = types[imp_rng_below(r, n_types)];
    for (uint32_t l = 0; l < w->n_layers; l++) {
        w->layers[l] = (imp_layer_shape){1 + (uint32_t)imp_rng_below(r, 3), 32 * (1 + (uint32_t)imp_rng_below(r, 3)),
                                         32 * (1 + (uint32_t)imp_rng_below(r, 3))};
    }
    w->opts.chunk_tokens = 16 * (1 + (uint32_t)imp_rng_below(r, 6));
    w->opts.segment_tokens = 100 + (uint32_t)imp_rng_below(r, 400);
    w->opts.min_store_tokens = 1;
    w->opts.io_mode = imp_rng_below(r, 2) ? IMP_IO_THREADS : IMP_IO_AUTO;
    w->opts.buffer_bytes = imp_rng_below(r, 2) ? 0 : 64 << 10; /* the ring wraps */
    if (imp_rng_below(r, 2)) {
        static const imp_cache kinds[] = {IMP_CACHE_LRU, IMP_CACHE_LFU, IMP_CACHE_SCORE};
        w->opts.cache = kinds[imp_rng_below(r, 3)];
        w->opts.host_cache_bytes = 20000 + imp_rng_below(r, 2000000);
    }
}

static void test_random(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    for (int round = 0; round < 8; round++) {
        util_world w;
        make_random_world(&r, &w);
        util_start(&w);

        /* Three prompts, the later ones leaving the earlier ones at any token. */
        enum { N = 420 };
        int32_t prompts[3][N];
        size_t lengths[3];
        for (int p = 0; p < 3; p++) {
            util_tokens(&r, prompts[p], N);
            lengths[p] = 40 + imp_rng_below(&r, N - 40);
            size_t shared = 0;
            if (p) {
                int parent = (int)imp_rng_below(&r, (uint64_t)p);
                shared = imp_rng_below(&r, lengths[parent]);
                if (shared >= lengths[p]) shared = lengths[p] - 1;
                memcpy(prompts[p], prompts[parent], shared * sizeof(int32_t));
                if (shared < lengths[parent]) prompts[p][shared] = prompts[parent][shared] + 1;
            }
            if (w.opts.rest == IMP_REST_Q8) shared = 0; /* what follows on rounded rows would be derived */
            util_commit(&w, prompts[p], lengths[p], shared, 0);
        }
        if (imp_rng_below(&r, 2)) {
            util_close(&w);
            util_open(&w);
        }

        for (int ask = 0; ask < 6; ask++) {
            int p = (int)imp_rng_below(&r, 3);
            size_t n_prompt = lengths[p] + imp_rng_below(&r, 2);
            if (n_prompt > N) n_prompt = N;
            imp_lease *lease;
            imp_prefix_info info;
            assert_int_equal(imp_prefix_acquire(w.space, prompts[p], n_prompt, 0, &lease, &info), 0);
            assert_int_equal(info.n_matched, n_prompt - 1 < lengths[p] ? n_prompt - 1 : lengths[p]);
            assert_int_equal(info.n_exact, info.n_matched);
            bool rounded = w.opts.rest == IMP_REST_Q8;
            assert_int_equal(info.rounded, rounded);
            size_t n = info.n_matched;
            if (imp_rng_below(&r, 2)) {
                n = 1 + imp_rng_below(&r, n);
                assert_int_equal(imp_lease_trim(lease, n), 0);
            }

            imp_load_opts opts;
            imp_load_opts_init(&opts);
            opts.switches.identify = imp_rng_below(&r, 3) ? IMP_IDENTIFY_ALL_KEYS : IMP_IDENTIFY_NONE;
            opts.switches.prefetch = imp_rng_below(&r, 3) ? IMP_PREFETCH_LAYERS : IMP_PREFETCH_NONE;
            opts.switches.cache = w.opts.cache;
            if (imp_rng_below(&r, 4) == 0) opts.switches.cache = (imp_cache)imp_rng_below(&r, 4);
            opts.retention = imp_rng_below(&r, 4) ? 0.001 + 0.999 * imp_rng_unit(&r) : 1;
            opts.n_keep_first = (uint32_t)imp_rng_below(&r, 5);
            opts.n_keep_last = (uint32_t)imp_rng_below(&r, 5);
            opts.max_query_rows = (uint32_t)imp_rng_below(&r, 40);
            imp_load *load;
            imp_load_stats stats;
            assert_int_equal(imp_load_begin(lease, &opts, &load), 0);
            check_pass(&r, &w, lease, n, prompts[p], rounded, load, &opts, true);
            if (imp_rng_below(&r, 3) == 0) {
                assert_int_equal(imp_load_rewind(load), 0);
                check_pass(&r, &w, lease, n, prompts[p], rounded, load, &opts, false);
            }
            imp_load_end(load, &stats);
            assert_true(stats.bytes_read + stats.host_hit_bytes > 0);
            if (opts.switches.identify == IMP_IDENTIFY_NONE) {
                assert_true(stats.mass == 1);
                assert_int_equal(stats.identify_bytes, 0);
            } else {
                assert_true(stats.mass > 0 && stats.mass < 1.00001);
                assert_true(stats.identify_bytes < stats.bytes_read + 1);
            }
            imp_lease_release(lease);
        }
        util_stop(&w);
    }
}

/* The figures of a load agree with those of the store, and the host tier spares the disk. */
static void test_figures(void **state)
{
    (void)state;
    for (int cached = 0; cached < 2; cached++) {
        util_world w = {0};
        imp_store_opts_init(&w.opts);
        w.opts.cache = cached ? IMP_CACHE_LRU : IMP_CACHE_NONE;
        w.opts.host_cache_bytes = 10 << 20;
        util_start(&w);
        imp_rng r;
        imp_rng_seed(&r, 5);
        int32_t tokens[1001];
        util_tokens(&r, tokens, 1001);
        util_commit(&w, tokens, 1000, 0, 0);
        util_close(&w);
        util_open(&w);

        imp_stats before, after;
        uint64_t first_bytes = 0;
        for (int pass = 0; pass < 3; pass++) {
            imp_lease *lease;
            imp_prefix_info info;
            imp_load *load;
            imp_load_stats stats;
            imp_load_opts opts;
            imp_load_opts_init(&opts);
            opts.switches.cache = w.opts.cache;
            assert_int_equal(imp_store_stats(w.store, &before), 0);
            assert_int_equal(imp_prefix_acquire(w.space, tokens, 1001, 0, &lease, &info), 0);
            assert_int_equal(info.n_matched, 1000);
            assert_int_equal(info.bytes_full, 1000 * imp_space_token_bytes(w.space));
            assert_int_equal(imp_load_begin(lease, &opts, &load), 0);
            check_pass(&r, &w, lease, 1000, tokens, false, load, &opts, true);
            imp_load_end(load, &stats);
            imp_lease_release(lease);
            assert_int_equal(imp_store_stats(w.store, &after), 0);
            assert_int_equal(after.bytes_read - before.bytes_read, stats.bytes_read);
            assert_int_equal(after.host_hit_bytes - before.host_hit_bytes, stats.host_hit_bytes);
            assert_int_equal(after.acquires, before.acquires + 1);
            assert_int_equal(after.hits, before.hits + 1);
            assert_int_equal(after.hit_tokens, before.hit_tokens + 1000);
            if (pass == 0) {
                first_bytes = stats.bytes_read;
                assert_true(first_bytes >= info.bytes_full);
                assert_int_equal(stats.host_hit_bytes, 0);
                assert_true(stats.n_reads > 0);
            } else if (cached) {
                assert_int_equal(stats.bytes_read, 0);
                assert_int_equal(stats.n_reads, 0);
                assert_true(stats.host_hit_bytes >= info.bytes_full);
                assert_true(after.host_bytes >= info.bytes_full);
            } else {
                assert_true(stats.bytes_read <= first_bytes && stats.bytes_read >= info.bytes_full);
                assert_int_equal(after.host_bytes, 0);
            }
        }
        util_stop(&w);
    }
}

/* Less is read where less is chosen, and only once it is asked for without prefetch. */
static void test_partial_reads(void **state)
{
    (void)state;
    util_world w = {0};
    imp_store_opts_init(&w.opts);
    w.opts.chunk_tokens = 16;
    util_start(&w);
    imp_rng r;
    imp_rng_seed(&r, 6);
    int32_t tokens[1025];
    util_tokens(&r, tokens, 1025);
    util_commit(&w, tokens, 1024, 0, 0);
    imp_lease *lease;
    imp_prefix_info info;
    assert_int_equal(imp_prefix_acquire(w.space, tokens, 1025, 0, &lease, &info), 0);
    imp_load_opts opts;
    imp_load_opts_init(&opts);
    opts.switches.identify = IMP_IDENTIFY_ALL_KEYS;
    opts.switches.prefetch = IMP_PREFETCH_NONE;
    opts.retention = 0.005; /* 6 tokens: at most 6 of 64 chunks */
    imp_load *load;
    imp_load_stats stats;
    imp_stats before, after;
    imp_store_stats(w.store, &before);
    assert_int_equal(imp_load_begin(lease, &opts, &load), 0);
    imp_store_stats(w.store, &after);
    assert_int_equal(before.bytes_read, after.bytes_read);
    assert_int_equal(imp_load_count(load), 6);
    unsigned char k[6 * 128], v[6 * 128];
    for (uint32_t l = 0; l < w.n_layers; l++) {
        util_query u = util_make_query(&r, &w, l);
        imp_dst dst = {.k = k, .v = v, .k_stride = 128, .v_stride = 128};
        assert_int_equal(imp_load_select(load, l, &u.q, NULL), 0);
        assert_int_equal(imp_load_gather(load, l, &dst), 0);
        free(u.memory);
    }
    imp_load_end(load, &stats);
    imp_lease_release(lease);
    size_t chunk = 4096; /* 16 rows of 128 bytes, padded to the alignment, whatever that is */
    assert_true(stats.identify_bytes >= 3 * info.bytes_full / 6);
    assert_true(stats.bytes_read - stats.identify_bytes <= 3 * 6 * chunk + 65536);
    util_stop(&w);
}

/* Of a store in memory nothing is read, headers neither. */
static void test_memory(void **state)
{
    (void)state;
    util_world w = {0};
    imp_store_opts_init(&w.opts);
    w.opts.flags = IMP_STORE_MEMORY;
    w.opts.device_cache_bytes = 1 << 20; /* one budget will do */
    util_start(&w);
    imp_rng r;
    imp_rng_seed(&r, 9);
    int32_t tokens[101];
    util_tokens(&r, tokens, 101);
    util_commit(&w, tokens, 100, 0, 0);
    imp_lease *lease;
    imp_prefix_info info;
    imp_load *load;
    imp_load_stats stats;
    assert_int_equal(imp_prefix_acquire(w.space, tokens, 101, 0, &lease, &info), 0);
    assert_int_equal(info.n_matched, 100);
    assert_int_equal(imp_load_begin(lease, NULL, &load), 0);
    unsigned char k[100 * 128], v[100 * 128];
    const imp_dst dst = {.k = k, .v = v, .k_stride = 128, .v_stride = 128};
    for (uint32_t l = 0; l < w.n_layers; l++) {
        assert_int_equal(imp_load_select(load, l, NULL, NULL), 0);
        assert_int_equal(imp_load_gather(load, l, &dst), 0);
    }
    imp_load_end(load, &stats);
    imp_lease_release(lease);
    assert_int_equal(stats.bytes_read + stats.n_reads + stats.device_hit_bytes, 0);
    assert_true(stats.host_hit_bytes >= info.bytes_full);
    util_stop(&w);
}

static void test_arguments(void **state)
{
    (void)state;
    util_world w = {0};
    imp_store_opts_init(&w.opts);
    w.opts.cache = IMP_CACHE_LRU;
    w.opts.host_cache_bytes = 1 << 20;
    util_start(&w);
    imp_rng r;
    imp_rng_seed(&r, 7);
    int32_t tokens[201];
    util_tokens(&r, tokens, 201);
    util_commit(&w, tokens, 200, 0, 0);

    imp_lease *lease = (imp_lease *)&w;
    imp_prefix_info info;
    assert_int_equal(imp_prefix_acquire(NULL, tokens, 201, 0, &lease, &info), IMP_E_ARG);
    assert_null(lease);
    assert_int_equal(imp_prefix_acquire(w.space, NULL, 201, 0, &lease, &info), IMP_E_ARG);
    assert_int_equal(imp_prefix_acquire(w.space, tokens, 201, 8, &lease, &info), IMP_E_ARG);
    assert_int_equal(imp_prefix_acquire(w.space, NULL, 0, 0, &lease, &info), 0);
    assert_null(lease);
    assert_int_equal(imp_prefix_acquire(w.space, tokens, 1, 0, &lease, &info), 0);
    assert_null(lease);
    assert_int_equal(info.n_matched, 0);
    tokens[0]++;
    assert_int_equal(imp_prefix_acquire(w.space, tokens, 201, 0, &lease, &info), 0);
    assert_null(lease);
    tokens[0]--;
    assert_int_equal(imp_prefix_acquire(w.space, tokens, 201, 0, &lease, &info), 0);
    assert_int_equal(info.n_matched, 200);

    assert_int_equal(imp_lease_trim(lease, 0), IMP_E_ARG);
    assert_int_equal(imp_lease_trim(lease, 201), IMP_E_ARG);
    assert_int_equal(imp_lease_trim(NULL, 1), IMP_E_ARG);

    imp_load *load = NULL;
    imp_load_opts opts, good;
    imp_load_opts_init(&good);
    assert_int_equal(imp_load_opts_check(&good), 0);
    assert_int_equal(imp_load_opts_check(NULL), IMP_E_ARG);
    assert_int_equal(imp_load_begin(NULL, NULL, &load), IMP_E_ARG);
    static const double bad[] = {0, -1, 1.0001, NAN, INFINITY};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        opts = good;
        opts.retention = bad[i];
        assert_int_equal(imp_load_begin(lease, &opts, &load), IMP_E_ARG);
        assert_int_equal(imp_load_opts_check(&opts), IMP_E_ARG);
        assert_null(load);
    }
#define REFUSED(field, value, code)                                   \
    do {                                                              \
        opts = good;                                                  \
        opts.field = value;                                           \
        assert_int_equal(imp_load_begin(lease, &opts, &load), code);  \
        assert_null(load);                                            \
    } while (0)
    REFUSED(struct_bytes, 0, IMP_E_ARG);
    REFUSED(probe_spread, 2, IMP_E_ARG);
    REFUSED(probe_alpha, -1.0f, IMP_E_ARG);
    REFUSED(probe_alpha, NAN, IMP_E_ARG);
    REFUSED(probe_similarity, INFINITY, IMP_E_ARG);
    REFUSED(byte_share, -0.5f, IMP_E_ARG);
    REFUSED(history_weight, NAN, IMP_E_ARG);
    REFUSED(rank, (imp_rank)77, IMP_E_ARG);
    REFUSED(record, (imp_record)77, IMP_E_ARG);
    REFUSED(record, IMP_RECORD_RANKING, IMP_E_ARG); /* without all keys */
    REFUSED(switches.identify, (imp_identify)77, IMP_E_ARG);
    REFUSED(switches.prefetch, (imp_prefetch)77, IMP_E_ARG);
    REFUSED(switches.cache, (imp_cache)77, IMP_E_ARG);

    opts = good;
    opts.switches.order = (imp_order)77; /* these three are the store's */
    opts.switches.rest = (imp_rest)77;
    opts.switches.chunk_tokens = 77;
    opts.switches.identify = IMP_IDENTIFY_ALL_KEYS;
    opts.retention = 0.1;
    assert_int_equal(imp_load_begin(lease, &opts, &load), 0);
    assert_int_equal(imp_load_count(load), 20); /* not 21, though 0.1 is a little more than a tenth */
    assert_int_equal(imp_lease_trim(lease, 100), IMP_E_ARG); /* a load is open */
    unsigned char k[20 * 128], v[20 * 128];
    imp_dst dst = {.k = k, .v = v, .k_stride = 128, .v_stride = 128};
    util_query u = util_make_query(&r, &w, 0);
    imp_query q = u.q;
    assert_int_equal(imp_load_gather(load, 0, &dst), IMP_E_ARG); /* not selected */
    assert_int_equal(imp_load_select(load, 3, &q, NULL), IMP_E_ARG);
    assert_int_equal(imp_load_select(load, 0, NULL, NULL), IMP_E_ARG);
    q.n_heads = 3;
    assert_int_equal(imp_load_select(load, 0, &q, NULL), IMP_E_ARG);
    q = u.q;
    q.n_rows = 0;
    assert_int_equal(imp_load_select(load, 0, &q, NULL), IMP_E_ARG);
    q = u.q;
    q.q = NULL;
    assert_int_equal(imp_load_select(load, 0, &q, NULL), IMP_E_ARG);
    static const float bad_scale[] = {0, -1, NAN, INFINITY}, bad_cap[] = {-1, NAN, INFINITY};
    for (size_t i = 0; i < 4; i++) {
        q = u.q;
        q.scale = bad_scale[i];
        assert_int_equal(imp_load_select(load, 0, &q, NULL), IMP_E_ARG);
    }
    for (size_t i = 0; i < 3; i++) {
        q = u.q;
        q.softcap = bad_cap[i];
        assert_int_equal(imp_load_select(load, 0, &q, NULL), IMP_E_ARG);
    }
    q = u.q;
    assert_int_equal(imp_load_select(load, 1, &q, NULL), 0); /* layer 0 is left out */
    assert_int_equal(imp_load_select(load, 1, &q, NULL), IMP_E_ARG);
    assert_int_equal(imp_load_select(load, 0, &q, NULL), IMP_E_ARG);
    assert_int_equal(imp_load_gather(load, 0, &dst), IMP_E_ARG);
    assert_int_equal(imp_load_gather(load, 1, NULL), IMP_E_ARG);
    dst.k_stride = 127;
    assert_int_equal(imp_load_gather(load, 1, &dst), IMP_E_ARG);
    dst.k_stride = 128;
    assert_int_equal(imp_load_gather(load, 1, &dst), 0);
    assert_int_equal(imp_load_gather(load, 1, &dst), IMP_E_ARG);
    assert_int_equal(imp_load_select(load, 2, &q, NULL), 0); /* selected, never gathered */
    static const float not_finite[] = {NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < 3; i++) { /* still as many, rising, inside the prefix */
        const uint32_t *chosen;
        assert_int_equal(imp_load_rewind(load), 0);
        for (size_t e = 0; e < q.n_rows * q.row_stride; e += i ? 3 : 1) u.memory[e] = not_finite[i];
        assert_int_equal(imp_load_select(load, 0, &q, &chosen), 0);
        for (size_t c = 0; c < 20; c++) assert_true(chosen[c] < 200 && (c == 0 || chosen[c] > chosen[c - 1]));
    }
    q.row_stride = q.head_stride = 0;
    assert_int_equal(imp_load_rewind(load), 0);
    assert_int_equal(imp_load_select(load, 0, &q, NULL), 0);
    imp_load_stats stats;
    imp_load_get_stats(load, &stats);
    assert_true(isfinite(stats.mass));
    imp_load_get_stats(load, NULL);
    imp_load_end(load, NULL);
    free(u.memory);
    assert_int_equal(imp_lease_trim(lease, 100), 0);
    imp_lease_release(lease);
    imp_lease_release(NULL);
    imp_load_end(NULL, &stats);
    assert_true(stats.mass == 1 && stats.n_reads == 0);
    imp_load_get_stats(NULL, &stats);
    assert_int_equal(imp_load_count(NULL), 0);
    imp_load_opts_fill(NULL, sizeof opts);
    assert_int_equal(imp_load_rewind(NULL), IMP_E_ARG);
    assert_int_equal(imp_load_select(NULL, 0, NULL, NULL), IMP_E_ARG);
    assert_int_equal(imp_load_gather(NULL, 0, &dst), IMP_E_ARG);
    util_stop(&w);
}

typedef struct reader {
    imp_load *load;
    util_world *w;
    const int32_t *tokens;
    bool right;
} reader;

static void *read_all(void *user)
{
    reader *r = user;
    unsigned char *k = malloc(300 * UTIL_MAX_ROW), *v = malloc(300 * UTIL_MAX_ROW), want[UTIL_MAX_ROW];
    r->right = true;
    for (uint32_t l = 0; l < r->w->n_layers; l++) {
        imp_dst dst = {.k = k, .v = v, .k_stride = util_k_bytes(r->w, l), .v_stride = util_v_bytes(r->w, l)};
        r->right &= imp_load_select(r->load, l, NULL, NULL) == 0 && imp_load_gather(r->load, l, &dst) == 0;
        for (size_t t = 0; r->right && t < 300; t++) {
            util_row(r->w->type_v, util_v_elements(r->w, l), r->tokens[t], t, l, 1, want);
            r->right = memcmp(v + t * dst.v_stride, want, dst.v_stride) == 0;
        }
    }
    free(k);
    free(v);
    return NULL;
}

/* Two loads over one lease at once; the space is closed and the lease released before they end. */
static void test_lifetimes(void **state)
{
    (void)state;
    util_world w = {0};
    imp_store_opts_init(&w.opts);
    w.opts.segment_tokens = 128;
    util_start(&w);
    imp_rng r;
    imp_rng_seed(&r, 9);
    int32_t tokens[301];
    util_tokens(&r, tokens, 301);
    util_commit(&w, tokens, 300, 0, 0);
    imp_lease *lease;
    imp_prefix_info info;
    assert_int_equal(imp_prefix_acquire(w.space, tokens, 301, 0, &lease, &info), 0);
    assert_int_equal(info.n_matched, 300);
    reader readers[2];
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        readers[i] = (reader){.w = &w, .tokens = tokens};
        assert_int_equal(imp_load_begin(lease, NULL, &readers[i].load), 0);
    }
    imp_lease_release(lease);
    imp_space_close(w.space);
    w.space = NULL;
    assert_int_equal(imp_store_remove(w.store, 0), 0); /* what is leased can be read to the end */
    for (int i = 0; i < 2; i++) assert_int_equal(pthread_create(&threads[i], NULL, read_all, &readers[i]), 0);
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        assert_true(readers[i].right);
        imp_load_end(readers[i].load, NULL);
    }
    util_stop(&w);
}

/* Derived entries are for those who ask for them. */
static void test_derived(void **state)
{
    (void)state;
    util_world w = {0};
    imp_store_opts_init(&w.opts);
    util_start(&w);
    imp_rng r;
    imp_rng_seed(&r, 8);
    int32_t tokens[301];
    util_tokens(&r, tokens, 301);
    util_commit(&w, tokens, 100, 0, 0);
    util_commit(&w, tokens, 300, 100, IMP_COMMIT_DERIVED);
    imp_lease *lease;
    imp_prefix_info info;
    assert_int_equal(imp_prefix_acquire(w.space, tokens, 301, 0, &lease, &info), 0);
    assert_int_equal(info.n_matched, 100);
    imp_lease_release(lease);
    assert_int_equal(imp_prefix_acquire(w.space, tokens, 301, IMP_ACQUIRE_DERIVED, &lease, &info), 0);
    assert_int_equal(info.n_matched, 300);
    assert_int_equal(info.n_exact, 100);
    imp_load_opts opts;
    imp_load_opts_init(&opts);
    imp_load *load;
    assert_int_equal(imp_load_begin(lease, &opts, &load), 0);
    check_pass(&r, &w, lease, 300, tokens, false, load, &opts, true);
    imp_load_end(load, NULL);
    imp_lease_release(lease);
    util_stop(&w);
}

static void test_systems(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        imp_switches s;
    } want[] = {
        {"as", {IMP_IDENTIFY_NONE, IMP_ORDER_TOKEN, IMP_CACHE_LRU, IMP_PREFETCH_LAYERS, IMP_REST_RAW, 64}},
        {"as-h2o-lru", {IMP_IDENTIFY_ALL_KEYS, IMP_ORDER_TOKEN, IMP_CACHE_LRU, IMP_PREFETCH_LAYERS, IMP_REST_RAW, 64}},
        {"as-h2o-lfu", {IMP_IDENTIFY_ALL_KEYS, IMP_ORDER_TOKEN, IMP_CACHE_LFU, IMP_PREFETCH_LAYERS, IMP_REST_RAW, 64}},
        {"spi", {IMP_IDENTIFY_STATIC, IMP_ORDER_TOKEN, IMP_CACHE_LRU, IMP_PREFETCH_LAYERS, IMP_REST_RAW, 64}},
        {"impress-paper",
         {IMP_IDENTIFY_PROBE, IMP_ORDER_IMPORTANCE, IMP_CACHE_SCORE, IMP_PREFETCH_LAYERS, IMP_REST_RAW, 64}},
        {"contiguous",
         {IMP_IDENTIFY_CHUNKS, IMP_ORDER_TOKEN, IMP_CACHE_ATTENTION, IMP_PREFETCH_CHUNKS, IMP_REST_RAW, 16}},
        {"impress", {IMP_IDENTIFY_SKETCH, IMP_ORDER_CORE, IMP_CACHE_AGED, IMP_PREFETCH_CORE, IMP_REST_RAW, 16}},
        {"random", {IMP_IDENTIFY_RANDOM, IMP_ORDER_TOKEN, IMP_CACHE_LRU, IMP_PREFETCH_LAYERS, IMP_REST_RAW, 64}},
    };
    const size_t n = sizeof want / sizeof want[0];
    imp_switches s;
    for (size_t i = 0; i < n; i++) {
        assert_string_equal(imp_system_name(i), want[i].name);
        assert_int_equal(imp_system_preset(want[i].name, &s), 0);
        assert_memory_equal(&s, &want[i].s, sizeof s);
    }
    assert_null(imp_system_name(n));
    static const char *const unknown[] = {"nonsense", "recomp", ""};
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(imp_system_preset(unknown[i], &s), IMP_E_NOTFOUND);
        for (size_t j = 0; j < n; j++) assert_non_null(strstr(imp_last_error(), want[j].name));
    }
    assert_int_equal(imp_system_preset(NULL, &s), IMP_E_ARG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),       cmocka_unit_test(test_figures), cmocka_unit_test(test_partial_reads),
        cmocka_unit_test(test_arguments),    cmocka_unit_test(test_derived), cmocka_unit_test(test_systems),
        cmocka_unit_test(test_lifetimes),    cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
