/* The catalogue's disk hangs: under a match that has to read what another process changed, and under a change of this
 * process's own. Nobody waits for it longer than the read deadline, and most not at all. And any call of whatever else
 * this process does with its store: matches go on beside it. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "fault/preload_faults.h"
#include "io/io_internal.h"
#include "store/store_internal.h"
#include "support/store_world.h"
#include "support/support.h"

enum { N = 150, SOON_MS = 100, LONG_MS = 600000 };

static int32_t old[N], new[N];

static int set_up(void **state)
{
    for (int i = 0; i < N; i++) {
        old[i] = i;
        new[i] = 5000 + i;
    }
    imp_test_no_log();
    return imp_test_dir_set_up(state);
}

static int tear_down(void **state)
{
    preload_watch(NULL, NULL);
    preload_release();
    return imp_test_dir_tear_down(state);
}

static void open_world(imp_world *w, const char *dir)
{
    imp_store_opts opts;
    imp_world_opts(&opts);
    opts.read_deadline_ms = LONG_MS;
    assert_int_equal(imp_world_open(w, dir, &opts, NULL), 0);
}

static void store(imp_world *w, const int32_t *tokens)
{
    assert_int_equal(imp_world_commit(w, tokens, N, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w->store), 0);
}

static void pause_1ms(uint64_t start_ns)
{
    assert_true(imp_now_ns() - start_ns < 60000000000u);
    imp_io_sleep_until(imp_now_ns() + 1000000);
}

static void await_end(imp_world *w)
{
    for (uint64_t start_ns = imp_now_ns(); imp_store_hung(w->store);) pause_1ms(start_ns);
}

/* Every call with which a match reads another process's changes. */
static void changes_that_hang(void **state)
{
    imp_world other;
    unsigned n_hits = 0;
    open_world(&other, *state);
    store(&other, old);
    bool hit = true;
    for (uint64_t nth = 1; hit; nth++) {
        imp_world w;
        imp_fault faults[IMP_N_FAULTS];
        imp_stats st;
        open_world(&w, *state);
        assert_int_equal(imp_world_check(&w, old, N, true), N);
        store(&other, new);
        w.store->opts.read_deadline_ms = SOON_MS;
        preload_watch(*state, "catalogue");
        preload_hold(PRELOAD_ALL, nth);
        (void)imp_world_check(&w, new, N, true);
        for (uint64_t start_ns = imp_now_ns(); imp_store_hung(w.store) && preload_hits() == 0;) pause_1ms(start_ns);
        hit = preload_hits() > 0;
        n_hits += hit;
        if (hit) {
            assert_true(imp_store_hung(w.store));
            assert_int_equal(imp_world_check(&w, old, N, true), 0);
            assert_int_equal(imp_store_faults(w.store, faults), 1);
            assert_string_equal(faults[0].what, "read");
            assert_int_equal(imp_store_stats(w.store, &st), 0);
            assert_int_equal(st.io_errors, 1);
        }
        preload_watch(NULL, NULL);
        preload_release();
        await_end(&w);
        w.store->opts.read_deadline_ms = LONG_MS;
        assert_int_equal(imp_world_check(&w, new, N, true), N);
        assert_int_equal(imp_world_check(&w, old, N, true), N);
        assert_int_equal(imp_store_faults(w.store, NULL), 0);
        imp_world_close(&w);
        assert_int_equal(imp_store_remove(other.store, 0), 0);
        store(&other, old);
    }
    assert_true(n_hits > 0);
    assert_int_equal(imp_world_verify(&other, false, true), 0);
    imp_world_close(&other);
}

static bool is_done(imp_world *w)
{
    pthread_mutex_lock(&w->store->lock);
    bool done = w->store->n_done == w->store->n_queued;
    pthread_mutex_unlock(&w->store->lock);
    return done;
}

/* This process's writer stands in a call on the catalogue, in the midst of a change: what is stored is served
 * meanwhile, and entries are taken in. */
static void own_change_that_hangs(void **state)
{
    imp_world w;
    unsigned n_hits = 0;
    open_world(&w, *state);
    store(&w, old);
    bool hit = true;
    for (uint64_t nth = 1; hit; nth++) {
        imp_stats st;
        imp_world_close(&w);
        open_world(&w, *state);
        preload_watch(*state, "catalogue");
        preload_hold(PRELOAD_ALL, nth);
        assert_int_equal(imp_world_commit(&w, new, N, 0, 0, NULL), 0);
        for (uint64_t start_ns = imp_now_ns(); preload_hits() == 0 && !is_done(&w);) pause_1ms(start_ns);
        hit = preload_hits() > 0;
        n_hits += hit;
        if (hit) {
            assert_int_equal(imp_world_check(&w, old, N, true), N);
            assert_int_equal(imp_store_stats(w.store, &st), 0);
            assert_int_equal(imp_store_faults(w.store, NULL), 0);
            assert_int_equal(imp_world_commit(&w, new, N, 0, 0, NULL), 0);
        }
        preload_watch(NULL, NULL);
        preload_release();
        assert_int_equal(imp_store_flush(w.store), 0);
        assert_int_equal(imp_world_check(&w, new, N, true), N);
        assert_int_equal(imp_store_remove(w.store, 0), 0);
        store(&w, old);
    }
    assert_true(n_hits > 2);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
}

/* ---- what else a process does */

typedef struct job {
    imp_world *w;
    int64_t (*fn)(imp_world *w);
    int64_t result;
    atomic_bool done;
    pthread_t thread;
} job;

static void *run(void *arg)
{
    job *j = arg;
    j->result = j->fn(j->w);
    atomic_store(&j->done, true);
    return NULL;
}

static void begin(job *j, imp_world *w, int64_t (*fn)(imp_world *w))
{
    *j = (job){.w = w, .fn = fn};
    assert_int_equal(pthread_create(&j->thread, NULL, run, j), 0);
}

static int64_t find_old(imp_world *w) { return imp_world_check(w, old, N, true); }

static int64_t remove_new(imp_world *w)
{
    imp_path path;
    uint64_t header_bytes;
    int rc = imp_store_match(w->store, w->space->id, new, N, true, &path, &header_bytes);
    uint64_t top = rc == 0 && path.n_spans > 0 ? path.spans[0].node : 0;
    imp_store_unpin(w->store, &path);
    return top ? imp_store_remove(w->store, top) : -1;
}

/* All segments in another order: each time the old files lose their names while they are open. */
static int64_t turn_over(imp_world *w)
{
    imp_reorder_report report;
    int rc = imp_store_reorder(w->store, &report);
    return rc < 0 ? rc : report.n_reordered > 0 ? 0 : -1;
}

static int64_t tidy(imp_world *w) { return imp_store_gc(w->store, NULL); }

static int64_t look_through(imp_world *w) { return imp_store_verify(w->store, 1, NULL, NULL, NULL); }

/* A segment that a running process is writing, as it says, and one that a killed process was. */
static void reserve_some(imp_world *w, uint64_t live, const char *dir)
{
    char path[64];
    imp_store *s = w->store;
    snprintf(path, sizeof path, "live/%016x", 0xdead);
    FILE *f = fopen(imp_test_path(dir, path), "w");
    assert_non_null(f);
    fclose(f);
    assert_int_equal(imp_change_begin(s), 0);
    int rc = imp_cat_reserve(s->cat, &(imp_cat_reservation){77, live, 4096});
    if (rc == 0) rc = imp_cat_reserve(s->cat, &(imp_cat_reservation){78, 0xdead, 4096});
    assert_int_equal(imp_change_end(s, rc), 0);
}

static void own_work_that_hangs(void **state)
{
    static const struct {
        int64_t (*fn)(imp_world *w);
        preload_kind kind;
        unsigned least; /* calls that can be held; of closes, those of segments */
    } works[] = {
        {remove_new, PRELOAD_ALL, 8}, {remove_new, PRELOAD_CLOSE, 1},   {turn_over, PRELOAD_ALL, 20},
        {turn_over, PRELOAD_CLOSE, 6}, {tidy, PRELOAD_ALL, 20},
        {look_through, PRELOAD_ALL, 8}, {look_through, PRELOAD_CLOSE, 6},
    };
    imp_world w, other;
    open_world(&w, *state);
    open_world(&other, *state);
    store(&w, old);
    for (size_t i = 0; i < sizeof works / sizeof works[0]; i++) {
        unsigned n_hits = 0;
        bool hit = true;
        for (uint64_t nth = 1; hit; nth++) {
            job work, look;
            store(&w, new);
            reserve_some(&w, other.store->instance, *state);
            w.store->opts.order = w.store->opts.order == IMP_ORDER_TOKEN ? IMP_ORDER_CORE : IMP_ORDER_TOKEN;
            assert_int_equal(imp_world_check(&w, new, N, true), N);
            assert_int_equal(find_old(&w), N); /* all are open */
            preload_watch(*state, works[i].kind == PRELOAD_CLOSE ? "segments/" : NULL);
            preload_hold(works[i].kind, nth);
            begin(&work, &w, works[i].fn);
            uint64_t start_ns = imp_now_ns();
            while (preload_hits() == 0 && !atomic_load(&work.done)) pause_1ms(start_ns);
            hit = preload_hits() > 0;
            n_hits += hit;
            if (!hit) preload_watch(NULL, NULL); /* what follows isn't its own */
            begin(&look, &w, find_old);
            start_ns = imp_now_ns();
            while (!atomic_load(&look.done) && imp_now_ns() - start_ns < 20000000000u) {
                imp_io_sleep_until(imp_now_ns() + 1000000);
            }
            bool found = atomic_load(&look.done);
            preload_watch(NULL, NULL);
            preload_release();
            pthread_join(work.thread, NULL);
            pthread_join(look.thread, NULL);
            if (!found) fail_msg("work %zu holds a match up in its call %llu", i, (unsigned long long)nth);
            assert_int_equal(look.result, N);
            assert_int_equal(work.result, 0);
            assert_int_equal(imp_store_faults(w.store, NULL), 0);
        }
        if (n_hits < works[i].least) fail_msg("work %zu has only %u calls", i, n_hits);
    }
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&other);
    imp_world_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(changes_that_hang, set_up, tear_down),
        cmocka_unit_test_setup_teardown(own_change_that_hangs, set_up, tear_down),
        cmocka_unit_test_setup_teardown(own_work_that_hangs, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
