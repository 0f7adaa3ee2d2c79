/* test_load_faults.c: loads on bad disks, with no memory, and many at once. Whatever happens, a load gives the
 * committed rows or an error, and the next request is served. */
#include "load_util.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "io/io_fault.h"
#include "io/io_internal.h"
#include "session/lease.h"
#include "store/store_internal.h"

enum { N = 400 };

static int32_t prompt[N + 1];

/* What sketches and probe heads need to be known of a model. */
static void furnish(util_world *w)
{
    w->n_layers = 3;
    for (uint32_t l = 0; l < 3; l++) {
        w->layers[l] = (imp_layer_shape){2, 32, 32};
        w->n_heads[l] = 4;
        w->ropes[l] = (imp_rope){.n_dims = 32, .base = 10000, .freq_scale = 1, .attn_factor = 1};
    }
    w->type_k = w->type_v = IMP_TYPE_F16;
    w->has_ropes = w->commit_queries = true;
    w->opts.reorder_period_s = UINT32_MAX;
}

static void start_with(util_world *w, imp_io_mode mode, imp_identify identify, unsigned keep, imp_rest rest)
{
    imp_rng r;
    imp_rng_seed(&r, 11);
    util_tokens(&r, prompt, N + 1);
    *w = (util_world){0};
    imp_store_opts_init(&w->opts);
    w->opts.io_mode = mode;
    w->opts.segment_tokens = 250;
    w->opts.chunk_tokens = 48;
    w->opts.min_store_tokens = 1;
    if (identify > IMP_IDENTIFY_ALL_KEYS) {
        furnish(w);
        w->opts.order = identify % 2 ? IMP_ORDER_IMPORTANCE : IMP_ORDER_CORE;
    }
    w->opts.keep = keep;
    w->opts.rest = rest;
    util_start(w);
    util_commit(w, prompt, N, 0, 0);
}

static void start(util_world *w, imp_io_mode mode, imp_identify identify)
{
    unsigned keep = identify == IMP_IDENTIFY_SKETCH  ? IMP_KEEP_SKETCH | IMP_KEEP_PAIRED
                    : identify == IMP_IDENTIFY_PROBE ? IMP_KEEP_PROBE
                                                     : 0;
    start_with(w, mode, identify, keep, IMP_REST_RAW);
}

/* Acquire and load everything, checking each row. Returns the first error; *matched: what acquire said. */
static int pass(util_world *w, imp_identify identify, double retention, size_t *matched)
{
    imp_lease *lease = NULL;
    imp_prefix_info info;
    imp_load *load = NULL;
    imp_load_opts opts;
    unsigned char *k = malloc(N * util_k_bytes(w, 0)), *v = malloc(N * util_v_bytes(w, 0)), want[UTIL_MAX_ROW];
    imp_load_opts_init(&opts);
    opts.switches.identify = identify;
    opts.switches.cache = w->opts.cache;
    opts.switches.prefetch = identify == IMP_IDENTIFY_SKETCH   ? IMP_PREFETCH_CORE
                             : identify == IMP_IDENTIFY_CHUNKS ? IMP_PREFETCH_CHUNKS
                                                               : IMP_PREFETCH_LAYERS;
    opts.byte_share = 0.4f; /* for SKETCH */
    opts.period = 2;        /* for CHUNKS */
    opts.retention = retention;
    *matched = 0;
    int rc = imp_prefix_acquire(w->space, prompt, N + 1, 0, &lease, &info);
    if (rc < 0 || !lease) goto out;
    *matched = info.n_matched;
    rc = imp_load_begin(lease, &opts, &load);
    if (rc < 0) goto out;
    imp_rng r;
    imp_rng_seed(&r, 12);
    for (uint32_t l = 0; l < w->n_layers; l++) {
        util_query u = util_make_query(&r, w, l);
        const uint32_t *chosen;
        rc = imp_load_select(load, l, &u.q, &chosen);
        free(u.memory);
        if (rc < 0) goto out;
        imp_dst dst = {.k = k, .v = v, .k_stride = util_k_bytes(w, l), .v_stride = util_v_bytes(w, l)};
        rc = imp_load_gather(load, l, &dst);
        if (rc < 0) goto out;
        for (size_t i = 0; w->opts.rest == IMP_REST_RAW && i < imp_load_count(load); i++) {
            util_row(w->type_k, util_k_elements(w, l), prompt[chosen[i]], chosen[i], l, 0, want);
            assert_memory_equal(k + i * dst.k_stride, want, dst.k_stride);
            util_row(w->type_v, util_v_elements(w, l), prompt[chosen[i]], chosen[i], l, 1, want);
            assert_memory_equal(v + i * dst.v_stride, want, dst.v_stride);
        }
    }
out:
    if (load && rc < 0 && rc != IMP_E_NOMEM) { /* a dead load says so, and nothing else */
        imp_dst dst = {.k = k, .v = v, .k_stride = 128, .v_stride = 128};
        assert_int_equal(imp_load_select(load, w->n_layers - 1, NULL, NULL), rc);
        assert_int_equal(imp_load_gather(load, 0, &dst), rc);
        assert_int_equal(imp_load_rewind(load), rc);
    }
    if (rc < 0) assert_true(imp_last_error()[0] != 0);
    imp_load_end(load, NULL);
    imp_lease_release(lease);
    free(k);
    free(v);
    return rc;
}

static const imp_io_mode modes[] = {IMP_IO_THREADS, IMP_IO_AUTO};

/* ---- bytes that changed on disk */

static void flip(const char *path, uint64_t bit)
{
    int fd = open(path, O_RDWR);
    struct stat st;
    assert_true(fd >= 0 && fstat(fd, &st) == 0);
    bit %= (uint64_t)st.st_size * 8;
    unsigned char b;
    assert_int_equal(pread(fd, &b, 1, (off_t)(bit / 8)), 1);
    b ^= (unsigned char)(1u << bit % 8);
    assert_int_equal(pwrite(fd, &b, 1, (off_t)(bit / 8)), 1);
    close(fd);
}

static void flip_at(const util_world *w, uint64_t segment, uint64_t bit)
{
    char path[512], name[32];
    imp_seg_name(segment, name);
    snprintf(path, sizeof path, "%s/%s", w->dir, name);
    flip(path, bit);
}

static void flip_on_disk(const util_world *w, uint64_t nth_file, uint64_t bit)
{
    char path[512];
    snprintf(path, sizeof path, "%s/segments", w->dir);
    DIR *d = opendir(path);
    assert_non_null(d);
    struct dirent *e;
    char names[16][64];
    size_t n = 0;
    while ((e = readdir(d)) && n < 16) {
        if (strstr(e->d_name, ".seg")) snprintf(names[n++], 64, "%.63s", e->d_name);
    }
    closedir(d);
    assert_true(n > 0);
    snprintf(path, sizeof path, "%s/segments/%s", w->dir, names[nth_file % n]);
    flip(path, bit);
}

static void test_flipped_on_disk(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    util_world w;
    start(&w, IMP_IO_AUTO, IMP_IDENTIFY_NONE);
    for (int round = 0; round < 6; round++) {
        size_t n;
        flip_on_disk(&w, imp_rng_u64(&r), imp_rng_u64(&r));
        if (imp_rng_below(&r, 2)) { /* else the headers are in memory already */
            util_close(&w);
            util_open(&w);
        }
        int rc = IMP_E_CORRUPT;
        size_t before = N + 1;
        for (int tries = 0; rc == IMP_E_CORRUPT; tries++) {
            assert_true(tries < 3);
            rc = pass(&w, IMP_IDENTIFY_NONE, 1, &n);
            assert_true(n <= before); /* never more than before the failure */
            if (rc == 0 && before <= N) assert_true(n < before);
            before = n;
        }
        assert_int_equal(rc, 0);
        /* Where the header in memory spares the one on disk, a flip there is no loss. Put back what is missing. */
        if (n < N) util_commit(&w, prompt, N, n, 0);
        assert_int_equal(pass(&w, IMP_IDENTIFY_NONE, 1, &n), 0);
        assert_int_equal(n, N);
    }
    imp_stats stats;
    assert_int_equal(imp_store_stats(w.store, &stats), 0);
    util_stop(&w);
}

/* Every kind of chunk: whoever reads it finds out, and the next request goes without. */
static void test_each_region(void **state)
{
    (void)state;
    static const struct {
        imp_region region;
        imp_identify identify;
        unsigned keep;
        imp_rest rest;
    } cases[] = {
        {IMP_REGION_K, IMP_IDENTIFY_ALL_KEYS, 0, IMP_REST_RAW},
        {IMP_REGION_V, IMP_IDENTIFY_NONE, 0, IMP_REST_RAW},
        {IMP_REGION_KV, IMP_IDENTIFY_ALL_KEYS, IMP_KEEP_PAIRED, IMP_REST_RAW},
        {IMP_REGION_KV, IMP_IDENTIFY_NONE, IMP_KEEP_PAIRED, IMP_REST_Q4},
        {IMP_REGION_SCALES, IMP_IDENTIFY_RANDOM, 0, IMP_REST_Q8},
        {IMP_REGION_PROBE, IMP_IDENTIFY_PROBE, IMP_KEEP_PROBE, IMP_REST_K8V4},
        {IMP_REGION_SKETCH, IMP_IDENTIFY_SKETCH, IMP_KEEP_SKETCH, IMP_REST_RAW},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        util_world w;
        size_t n;
        start_with(&w, IMP_IO_AUTO, cases[i].identify, cases[i].keep, cases[i].rest);
        assert_int_equal(pass(&w, cases[i].identify, 0.5, &n), 0);
        assert_int_equal(n, N);
        imp_lease *lease;
        imp_prefix_info info;
        assert_int_equal(imp_prefix_acquire(w.space, prompt, N + 1, 0, &lease, &info), 0);
        const imp_seg *seg = lease->path.spans[1].seg; /* the front stays */
        size_t front = lease->path.spans[0].n_tokens;
        assert_true(imp_seg_region_chunks(seg->layout, cases[i].region) > 0);
        imp_chunk_place place = imp_seg_chunk(seg->layout, cases[i].region, 1, 0);
        flip_at(&w, seg->id, place.offset * 8 + 77);
        imp_lease_release(lease);
        int rc = pass(&w, cases[i].identify, 0.5, &n);
        assert_int_equal(rc, IMP_E_CORRUPT);
        assert_int_equal(pass(&w, cases[i].identify, 0.5, &n), 0);
        assert_true(n >= front && n < N);
        util_stop(&w);
    }
}

/* ---- reads that fail, come short, or bring other bytes */

static void test_read_faults(void **state)
{
    (void)state;
    for (int identify = 0; identify <= IMP_IDENTIFY_SKETCH; identify++) {
        for (size_t mode = 0; mode < (identify > IMP_IDENTIFY_ALL_KEYS ? 1 : 2); mode++) {
            util_world w;
            size_t n;
            start(&w, modes[mode], (imp_identify)identify);
            const uint64_t step = identify > IMP_IDENTIFY_ALL_KEYS ? 3 : 1;
            assert_int_equal(pass(&w, (imp_identify)identify, 0.3, &n), 0); /* opens the segments */

            bool reached = true;
            for (uint64_t nth = 1; reached; nth += step) { /* once: tried again */
                int rule = imp_io_fault_add(&(imp_io_fault){.kind = IMP_IO_READ, .nth = nth, .value = EIO});
                assert_int_equal(pass(&w, (imp_identify)identify, 0.3, &n), 0);
                assert_int_equal(n, N);
                reached = imp_io_fault_hits(rule) > 0;
                imp_io_fault_clear();
                assert_true(nth < 1000);
            }
            reached = true;
            for (uint64_t nth = 1; reached; nth += step) { /* for good */
                imp_stats before, after;
                imp_store_stats(w.store, &before);
                const imp_io_fault fault = {.kind = IMP_IO_READ, .nth = nth, .stay = true, .value = EIO};
                int rule = imp_io_fault_add(&fault);
                int rc = pass(&w, (imp_identify)identify, 0.3, &n);
                reached = imp_io_fault_hits(rule) > 0;
                imp_io_fault_clear();
                assert_int_equal(rc, reached ? IMP_E_IO : 0);
                imp_store_stats(w.store, &after);
                assert_int_equal(after.io_errors, before.io_errors + reached);
                assert_int_equal(pass(&w, (imp_identify)identify, 0.3, &n), 0); /* goes on without that segment */
                assert_true(reached ? n < N : n == N);
                if (!reached) break;
                /* Nothing was dropped for it: after a while, or a verify, or in another process it is tried again. */
                if (nth % 2) {
                    for (size_t i = 0; i < IMP_ASIDE_MAX; i++) w.store->aside[i].until_ns = 0;
                } else {
                    assert_int_equal(imp_store_verify(w.store, 1, NULL, NULL, NULL), 0);
                }
                assert_int_equal(pass(&w, (imp_identify)identify, 0.3, &n), 0);
                assert_int_equal(n, N);
            }
            reached = true;
            for (uint64_t nth = 1; reached; nth += step * step) { /* less than asked for: the rest is fetched */
                int rule = imp_io_fault_add(
                    &(imp_io_fault){.kind = IMP_IO_READ, .nth = nth, .action = IMP_IO_SHORT, .value = 4096});
                assert_int_equal(pass(&w, (imp_identify)identify, 0.3, &n), 0);
                reached = imp_io_fault_hits(rule) > 0;
                imp_io_fault_clear();
            }
            reached = true;
            for (uint64_t nth = 1; reached; nth += 3 + step) { /* other bytes */
                int rule = imp_io_fault_add(
                    &(imp_io_fault){.kind = IMP_IO_READ, .nth = nth, .action = IMP_IO_FLIP, .value = nth * 7919});
                int rc = pass(&w, (imp_identify)identify, 0.3, &n);
                reached = imp_io_fault_hits(rule) > 0;
                imp_io_fault_clear();
                /* What was read ahead and isn't used is never looked at. */
                bool ahead = identify == IMP_IDENTIFY_CHUNKS || identify == IMP_IDENTIFY_SKETCH;
                if (!(rc == 0 && ahead)) assert_int_equal(rc, reached ? IMP_E_CORRUPT : 0);
                bool found = rc == IMP_E_CORRUPT;
                assert_int_equal(pass(&w, (imp_identify)identify, 0.3, &n), 0);
                assert_true(found ? n < N : n == N);
                if (found) util_commit(&w, prompt, N, n, 0);
                assert_int_equal(pass(&w, (imp_identify)identify, 0.3, &n), 0); /* opens what is new */
                assert_int_equal(n, N);
            }
            util_stop(&w);
        }
    }
}

/* ---- reads that don't come back */

static void wait_for_disk(const util_world *w)
{
    uint64_t start = imp_now_ns();
    while (imp_store_hung(w->store)) {
        assert_true(imp_now_ns() - start < 60000000000u);
        imp_io_sleep_until(imp_now_ns() + 10000000);
    }
}

static void test_hung(void **state)
{
    (void)state;
    for (size_t mode = 0; mode < 2; mode++) {
        for (uint64_t nth = 1; nth < 8; nth += 3) {
            util_world w;
            size_t n;
            imp_fault faults[IMP_N_FAULTS];
            imp_stats before, after;
            start(&w, modes[mode], IMP_IDENTIFY_ALL_KEYS);
            assert_int_equal(pass(&w, IMP_IDENTIFY_ALL_KEYS, 0.3, &n), 0); /* opens the segments */
            imp_io_set_deadline(w.store->io, 100000000);
            imp_store_stats(w.store, &before);
            int rule = imp_io_fault_add(&(imp_io_fault){
                .kind = IMP_IO_READ, .nth = nth, .stay = true, .action = IMP_IO_HANG, .value = 1500000000});
            assert_int_equal(pass(&w, IMP_IDENTIFY_ALL_KEYS, 0.3, &n), IMP_E_IO);
            uint64_t hits = imp_io_fault_hits(rule);
            assert_true(hits > 0);

            /* Others don't try, and it is told. */
            assert_int_equal(pass(&w, IMP_IDENTIFY_ALL_KEYS, 0.3, &n), 0);
            assert_int_equal(n, 0);
            assert_int_equal(imp_io_fault_hits(rule), hits);
            imp_store_stats(w.store, &after);
            assert_int_equal(after.io_errors, before.io_errors + 1);
            assert_int_equal(imp_store_faults(w.store, faults), 1);
            assert_string_equal(faults[0].what, "read");
            assert_non_null(strstr(faults[0].line, "no answer within 0.1 s"));

            /* It ends by itself: all is there, nothing was set aside. */
            imp_io_fault_clear();
            wait_for_disk(&w);
            imp_io_set_deadline(w.store->io, 60000000000u); /* this machine may be slow */
            assert_int_equal(pass(&w, IMP_IDENTIFY_ALL_KEYS, 0.3, &n), 0);
            assert_int_equal(n, N);
            assert_int_equal(imp_store_faults(w.store, NULL), 0);
            util_stop(&w);
        }
    }
}

/* A disk that hangs before anything of the store was opened, and one that does when a load asks what was important. */
static void test_late(void **state)
{
    (void)state;
    util_world w;
    size_t n;
    imp_lease *lease;
    imp_prefix_info info;
    imp_load *load;
    imp_load_opts opts;
    imp_load_opts_init(&opts);
    opts.switches.identify = IMP_IDENTIFY_STATIC;
    start(&w, IMP_IO_THREADS, IMP_IDENTIFY_STATIC);
    imp_store_flush(w.store);
    util_close(&w);
    w.opts.read_deadline_ms = 100;
    util_open(&w);
    imp_set_error(0, "as it was");
    int rule = imp_io_fault_parse("open:1:hold");
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pass(&w, IMP_IDENTIFY_STATIC, 0.3, &n), 0);
        assert_int_equal(n, 0);
        assert_string_equal(imp_last_error(), "as it was");
        assert_int_equal(imp_store_faults(w.store, NULL), 1);
    }
    assert_true(imp_io_fault_hits(rule) <= 1);
    imp_io_fault_clear();
    wait_for_disk(&w);
    w.store->opts.read_deadline_ms = 60000; /* this machine may be slow */
    assert_int_equal(imp_prefix_acquire(w.space, prompt, N + 1, 0, &lease, &info), 0);
    assert_int_equal(info.n_matched, N);
    assert_int_equal(imp_store_faults(w.store, NULL), 0);

    w.store->opts.read_deadline_ms = 100;
    pthread_mutex_lock(&w.store->cat_lock);
    assert_int_equal(imp_load_begin(lease, &opts, &load), IMP_E_IO);
    assert_null(load);
    pthread_mutex_unlock(&w.store->cat_lock);
    imp_lease_release(lease);
    wait_for_disk(&w);
    w.store->opts.read_deadline_ms = 60000;
    assert_int_equal(pass(&w, IMP_IDENTIFY_STATIC, 0.3, &n), 0);
    assert_int_equal(n, N);
    util_stop(&w);
}

/* ---- no memory */

static void test_no_memory(void **state)
{
    (void)state;
    for (int identify = 0; identify <= IMP_IDENTIFY_SKETCH; identify++) {
        util_world w;
        size_t n;
        start(&w, IMP_IO_THREADS, (imp_identify)identify);
        w.opts.flags = IMP_STORE_READONLY; /* opening one syncs nothing, so that it can be done often */
        for (int cache = 0; cache < (identify > IMP_IDENTIFY_ALL_KEYS ? 1 : 2); cache++) {
            w.opts.cache = cache ? IMP_CACHE_LRU : IMP_CACHE_NONE;
            w.opts.host_cache_bytes = cache ? 1 << 20 : 0;
            for (uint64_t at = 1;; at += imp_test_step()) {
                if (at == 1 || identify <= IMP_IDENTIFY_ALL_KEYS || identify == IMP_IDENTIFY_SKETCH) {
                    util_close(&w); /* so that the first load makes everything anew */
                    util_open(&w);
                }
                imp_alloc_fail_at(at, 0);
                int rc = pass(&w, (imp_identify)identify, 0.3, &n);
                uint64_t made = imp_alloc_fail_at(0, 0);
                if (rc < 0) assert_int_equal(rc, IMP_E_NOMEM);
                assert_int_equal(pass(&w, (imp_identify)identify, 0.3, &n), 0);
                assert_int_equal(n, N);
                if (made < at) break;
                assert_true(at < 5000);
            }
        }
        util_stop(&w);
    }
}

/* ---- many at once */

static void *hammer(void *arg)
{
    util_world *w = arg;
    size_t n;
    for (int i = 0; i < 12; i++) {
        assert_int_equal(pass(w, (imp_identify)(i % (IMP_IDENTIFY_RANDOM + 1)), 0.2, &n), 0);
        assert_int_equal(n, N);
    }
    return NULL;
}

static void test_threads(void **state)
{
    (void)state;
    for (size_t mode = 0; mode < 2; mode++) {
        util_world w;
        pthread_t threads[6];
        start_with(&w, modes[mode], IMP_IDENTIFY_SKETCH, IMP_KEEP_SKETCH | IMP_KEEP_PROBE, IMP_REST_RAW);
        util_close(&w);
        w.opts.cache = IMP_CACHE_LRU;
        w.opts.host_cache_bytes = 100000; /* some of it, so that it is always in motion */
        util_open(&w);
        for (int i = 0; i < 6; i++) assert_int_equal(pthread_create(&threads[i], NULL, hammer, &w), 0);
        for (int i = 0; i < 6; i++) pthread_join(threads[i], NULL);
        imp_stats stats;
        assert_int_equal(imp_store_stats(w.store, &stats), 0);
        assert_int_equal(stats.hits, 72);
        assert_true(stats.host_bytes > 0 && stats.host_bytes <= 100000);
        util_stop(&w);
    }
}

static void no_log(imp_log_level level, const char *line, void *user)
{
    (void)level;
    (void)line;
    (void)user;
}

int main(void)
{
    imp_log_set(no_log, NULL, IMP_LOG_ERROR);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_flipped_on_disk),
        cmocka_unit_test(test_each_region),
        cmocka_unit_test(test_read_faults),
        cmocka_unit_test(test_hung),
        cmocka_unit_test(test_late),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
