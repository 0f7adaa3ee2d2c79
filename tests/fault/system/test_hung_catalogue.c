/* The catalogue's disk hangs: under a match that has to read what another process changed, and under a change of this
 * process's own. Nobody waits for it longer than the read deadline, and most not at all. */
#include <setjmp.h>
#include <stdarg.h>
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(changes_that_hang, set_up, tear_down),
        cmocka_unit_test_setup_teardown(own_change_that_hangs, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
