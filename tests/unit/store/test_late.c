/* A disk that hangs under whoever looks for a prompt: it is given up by the deadline, nobody else waits for the same
 * disk, and when that comes back all is as before. The disk is held by the faults of src/io, the catalogue by its
 * mutex. */
#include <dirent.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/rng.h"
#include "io/io_fault.h"
#include "io/io_internal.h"
#include "store/store_internal.h"
#include "support/store_world.h"
#include "support/support.h"

enum { N = 192, SOON_MS = 100, LONG_MS = 600000 };

static int32_t prompt[N], other[N];

static int set_up(void **state)
{
    for (int i = 0; i < N; i++) {
        prompt[i] = 100 + i;
        other[i] = 9000 + i;
    }
    imp_test_no_log();
    return imp_test_dir_set_up(state);
}

static int tear_down(void **state)
{
    imp_io_fault_clear();
    return imp_test_dir_tear_down(state);
}

static void options(imp_store_opts *opts)
{
    imp_world_rich_opts(opts); /* maps, and sketches with bases */
    opts->read_deadline_ms = LONG_MS;
}

static void open_world(imp_world *w, const char *dir)
{
    imp_store_opts opts;
    options(&opts);
    assert_int_equal(imp_world_open(w, dir, &opts, NULL), 0);
}

/* A match that reads nothing else: the number of tokens. */
static int64_t look_up(imp_world *w, const int32_t *tokens)
{
    imp_path path;
    uint64_t header_bytes;
    int rc = imp_store_match(w->store, w->space->id, tokens, N, true, &path, &header_bytes);
    int64_t n = (int64_t)path.n_tokens;
    imp_store_unpin(w->store, &path);
    return rc < 0 ? rc : n;
}

/* Nobody waits longer from now on; or as long as a slow machine may take. No call is under way, and the writer idle. */
static void soon(imp_world *w) { w->store->opts.read_deadline_ms = SOON_MS; }
static void patiently(imp_world *w) { w->store->opts.read_deadline_ms = LONG_MS; }

static void fill(const char *dir)
{
    imp_world w;
    open_world(&w, dir);
    assert_int_equal(imp_world_commit(&w, prompt, N, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    imp_world_close(&w);
}

static bool in_time(uint64_t start_ns) { return imp_now_ns() - start_ns < 60000000000u; }

static void await_end(imp_world *w)
{
    uint64_t start_ns = imp_now_ns();
    while (imp_store_hung(w->store)) {
        assert_true(in_time(start_ns));
        imp_io_sleep_until(imp_now_ns() + 1000000);
    }
}

static int add_leases(imp_radix_node *n, void *user)
{
    *(unsigned *)user += n->leases;
    return 0;
}

/* Neither a node nor a segment is held by anybody. */
static void nothing_is_held(imp_world *w)
{
    imp_store *s = w->store;
    unsigned n = 0;
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < s->forest.n_trees; i++) (void)imp_radix_walk(s->forest.trees[i].radix, add_leases, &n);
    for (size_t i = 0; i < IMP_SEG_BUCKETS; i++) {
        for (const imp_seg_open *o = s->open.buckets[i]; o; o = o->chain) n += o->refs;
    }
    pthread_mutex_unlock(&s->lock);
    assert_int_equal(n, 0);
}

static int hold(imp_io_kind kind, const char *name, uint64_t nth)
{
    return imp_io_fault_add(&(imp_io_fault){.kind = kind, .nth = nth, .action = IMP_IO_HOLD, .name = name});
}

/* However late the machine is: what is held stands there now. */
static void await_hit(imp_world *w, int rule)
{
    uint64_t start_ns = imp_now_ns();
    while (imp_io_fault_hits(rule) == 0 && imp_store_hung(w->store)) {
        assert_true(in_time(start_ns));
        imp_io_sleep_until(imp_now_ns() + 1000000);
    }
}

static imp_stats stats_of(imp_world *w)
{
    imp_stats st;
    assert_int_equal(imp_store_stats(w->store, &st), 0);
    return st;
}

/* The disk hangs at any call of the first match after the store was opened. */
static void segments_that_hang(void **state)
{
    static const struct {
        imp_io_kind kind;
        const char *name;
    } at[] = {{IMP_IO_OPEN, "segments/"}, {IMP_IO_READ, "segments/"}, {IMP_IO_OPEN, "bases/"}, {IMP_IO_READ, "bases/"}};
    fill(*state);
    for (size_t i = 0; i < sizeof at / sizeof at[0]; i++) {
        bool hit = true;
        for (uint64_t nth = 1; hit; nth++) {
            imp_world w;
            imp_fault faults[IMP_N_FAULTS];
            open_world(&w, *state);
            imp_stats before = stats_of(&w);
            soon(&w);
            int rule = hold(at[i].kind, at[i].name, nth);
            int64_t n = look_up(&w, prompt);
            await_hit(&w, rule);
            hit = imp_io_fault_hits(rule) > 0;
            if (!hit) assert_true(nth > 1);
            if (hit) {
                assert_int_equal(n, 0);
                assert_true(imp_store_hung(w.store));
                /* Nobody else tries, whatever is asked. */
                imp_io_fault_log_start(64);
                assert_int_equal(look_up(&w, prompt), 0);
                assert_int_equal(look_up(&w, other), 0);
                imp_stats after = stats_of(&w);
                assert_int_equal(imp_io_fault_count(IMP_IO_ALL), 0);
                assert_int_equal(after.io_errors, before.io_errors + 1);
                assert_int_equal(after.corrupt_chunks, 0);
                assert_int_equal(after.disk_bytes, before.disk_bytes);
                assert_int_equal(imp_store_faults(w.store, faults), 1);
                assert_string_equal(faults[0].what, "read");
                assert_non_null(strstr(faults[0].line, ": looking for a prompt: no answer within 0.1 s"));
            }
            imp_io_fault_clear();
            await_end(&w);
            nothing_is_held(&w);
            patiently(&w);
            assert_int_equal(imp_world_check(&w, prompt, N, true), N);
            assert_int_equal(imp_store_faults(w.store, NULL), 0);
            nothing_is_held(&w);
            imp_world_close(&w);
        }
    }
    imp_world w;
    open_world(&w, *state);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    assert_int_equal(imp_store_remove(w.store, 0), 0);
    imp_world_close(&w);
}

static bool evictable(imp_world *w)
{
    bool any = false;
    imp_store *s = w->store;
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < s->forest.n_trees; i++) any = any || imp_radix_victim(s->forest.trees[i].radix);
    pthread_mutex_unlock(&s->lock);
    return any;
}

/* What a late match holds can't be evicted, and can be once it has come back. */
static void late_matches_pin_nothing(void **state)
{
    imp_world w;
    fill(*state);
    open_world(&w, *state);
    assert_true(evictable(&w));
    soon(&w);
    int rule = hold(IMP_IO_READ, "segments/", 1);
    assert_int_equal(imp_world_check(&w, prompt, N, true), 0);
    await_hit(&w, rule);
    assert_false(evictable(&w));
    imp_io_fault_clear();
    await_end(&w);
    assert_true(evictable(&w));
    imp_world_close(&w);
}

static size_t n_entries(const char *folder)
{
    size_t n = 0;
    DIR *d = opendir(folder);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d)) != NULL;) n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static size_t n_live(const char *dir) { return n_entries(imp_test_path(dir, "live")); }

/* Nothing that the late one still needs goes away with the store. */
static void closed_meanwhile(void **state)
{
    fill(*state);
    for (uint64_t nth = 1; nth <= 3; nth++) {
        imp_world w;
        open_world(&w, *state);
        soon(&w);
        int rule = hold(nth == 1 ? IMP_IO_OPEN : IMP_IO_READ, "segments/", nth);
        assert_int_equal(imp_world_check(&w, prompt, N, true), 0);
        await_hit(&w, rule);
        assert_int_equal(imp_world_commit(&w, other, N, 0, 0, NULL), 0); /* written, all the same */
        imp_world_close(&w);
        assert_int_equal(n_live(*state), 1);

        /* Another one goes its way beside it, also through this one's end. */
        open_world(&w, *state);
        assert_int_equal(imp_world_check(&w, prompt, N, true), N);
        assert_int_equal(n_live(*state), 2);
        imp_io_fault_clear();
        for (uint64_t start_ns = imp_now_ns(); n_live(*state) > 1;) {
            assert_true(in_time(start_ns));
            imp_io_sleep_until(imp_now_ns() + 1000000);
        }
        assert_int_equal(imp_world_check(&w, other, N, true), N);
        assert_int_equal(imp_world_verify(&w, false, true), 0);
        assert_int_equal(imp_store_remove(w.store, 0), 0);
        assert_int_equal(imp_world_commit(&w, prompt, N, 0, 0, NULL), 0);
        assert_int_equal(imp_store_flush(w.store), 0);
        imp_world_close(&w);
        assert_int_equal(n_live(*state), 0);
    }
}

/* Somebody holds the catalogue and waits for the disk. */
static void catalogue_that_hangs(void **state)
{
    imp_world w;
    uint64_t header_bytes;
    imp_path path;
    imp_history *h;
    float scores[64];
    imp_stats before;
    fill(*state);
    open_world(&w, *state);
    imp_store *s = w.store;
    assert_int_equal(imp_store_match(s, w.space->id, prompt, N, true, &path, &header_bytes), 0);
    assert_int_equal(path.n_tokens, N);
    before = stats_of(&w);

    /* Whoever looks for a prompt, or wants to store one. */
    soon(&w);
    pthread_mutex_lock(&s->cat_lock);
    assert_int_equal(imp_world_check(&w, prompt, N, true), 0);
    assert_true(imp_store_hung(s));
    assert_int_equal(imp_world_check(&w, prompt, N, true), 0);
    assert_int_equal(imp_world_commit(&w, other, N, 0, 0, NULL), 0);
    assert_int_equal(stats_of(&w).io_errors, before.io_errors + 1);
    assert_int_equal(imp_store_faults(s, NULL), 1);
    pthread_mutex_unlock(&s->cat_lock);
    assert_int_equal(imp_store_flush(s), 0);
    await_end(&w);
    patiently(&w);
    assert_int_equal(imp_world_check(&w, other, N, true), N);

    /* The first thing that meets it is a commit, or a look at the figures. */
    for (int i = 0; i < 2; i++) {
        soon(&w);
        pthread_mutex_lock(&s->cat_lock);
        if (i == 0) assert_int_equal(imp_world_commit(&w, prompt, N, 0, 0, NULL), 0); /* known */
        else (void)stats_of(&w);
        assert_true(imp_store_hung(s));
        pthread_mutex_unlock(&s->cat_lock);
        await_end(&w);
    }

    /* A load that wants a history. */
    pthread_mutex_lock(&s->cat_lock);
    for (int i = 0; i < 2; i++) { /* the second isn't asked for any more */
        assert_int_equal(imp_history_get(s, path.spans[i].seg, &h), 0);
        assert_false(imp_history_ranking(h, IMP_RANK_PREFILL, 0, 0, 64, scores));
        imp_history_put(s, h);
        assert_true(imp_store_hung(s));
    }
    pthread_mutex_unlock(&s->cat_lock);
    await_end(&w);
    patiently(&w);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(imp_history_get(s, path.spans[i].seg, &h), 0);
        assert_true(imp_history_ranking(h, IMP_RANK_PREFILL, 0, 0, 64, scores));
        imp_history_put(s, h);
    }

    /* A load that found something bad in the second segment. */
    soon(&w);
    pthread_mutex_lock(&s->cat_lock);
    imp_store_drop_bad(s, path.spans[1].seg, IMP_REGION_SKETCH, 0, 0, "test");
    assert_int_equal(imp_world_check(&w, prompt, N, true), 0);
    pthread_mutex_unlock(&s->cat_lock);
    await_end(&w);
    patiently(&w);
    assert_int_equal(imp_world_check(&w, prompt, N, true), 64);
    imp_store_unpin(s, &path);
    nothing_is_held(&w);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
}

/* Files whose last user is done after they were removed, by threads of the store's. */
static void removed_files_are_closed(void **state)
{
    imp_world w, else_where;
    imp_path path;
    uint64_t header_bytes;
    fill(*state);
    open_world(&w, *state);
    open_world(&else_where, *state);
    assert_int_equal(look_up(&w, other), 0); /* has a thread from now on */
    size_t n = n_entries("/proc/self/fd");
    assert_int_equal(imp_store_match(w.store, w.space->id, prompt, N, true, &path, &header_bytes), 0);
    assert_int_equal(path.n_spans, N / 64);
    assert_int_equal(n_entries("/proc/self/fd"), n + N / 64);
    assert_int_equal(imp_store_remove(else_where.store, 0), 0);
    assert_int_equal(look_up(&w, prompt), 0);
    assert_int_equal(n_entries("/proc/self/fd"), n + N / 64);
    imp_store_unpin(w.store, &path);
    for (uint64_t start_ns = imp_now_ns(); n_entries("/proc/self/fd") > n;) {
        assert_true(in_time(start_ns));
        imp_io_sleep_until(imp_now_ns() + 1000000);
    }
    imp_world_close(&else_where);
    imp_world_close(&w);
}

static size_t n_threads(void) { return n_entries("/proc/self/task"); }

/* A thread is there only where a disk is, and a deadline; and once everything is open nobody is asked. */
static void threads_only_where_needed(void **state)
{
    fill(*state);
    for (int i = 0; i < 4; i++) {
        imp_world w;
        imp_store_opts opts;
        options(&opts);
        if (i == 3) opts.flags = IMP_STORE_READONLY;
        if (i == 0) opts.read_deadline_ms = UINT32_MAX;
        if (i == 1) opts.io_mode = IMP_IO_VIRTUAL;
        assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
        size_t n = n_threads();
        assert_int_equal(imp_world_check(&w, prompt, N, true), N);
        assert_int_equal(n_threads(), n + (i >= 2));
        if (i >= 2) {
            imp_io_fault_log_start(64);
            for (int j = 0; j < 100; j++) assert_int_equal(look_up(&w, prompt), N);
            assert_int_equal(imp_io_fault_count(IMP_IO_ALL), 0);
            imp_io_fault_clear();
        }
        imp_world_close(&w);
    }
}

/* Two that hang don't keep a third one, who needs nothing that does. */
static void *look_for(void *arg)
{
    imp_world *w = arg;
    return look_up(w, prompt) == 0 ? NULL : w;
}

static void independent_ones_go_on(void **state)
{
    imp_world w;
    pthread_t threads[2];
    void *wrong;
    fill(*state);
    open_world(&w, *state);
    assert_int_equal(imp_world_commit(&w, other, N, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&w, other, 64, true), 64);
    w.store->opts.read_deadline_ms = 1500; /* the third one comes before that */
    int rules[2] = {hold(IMP_IO_OPEN, "segments/", 1), hold(IMP_IO_OPEN, "segments/", 2)};
    for (int i = 0; i < 2; i++) assert_int_equal(pthread_create(&threads[i], NULL, look_for, &w), 0);
    for (uint64_t start_ns = imp_now_ns(); imp_io_fault_hits(rules[0]) + imp_io_fault_hits(rules[1]) < 2;) {
        assert_true(in_time(start_ns));
        imp_io_sleep_until(imp_now_ns() + 1000000);
    }
    int64_t n = look_up(&w, other); /* opens what is left of it */
    assert_true(n == N || imp_store_hung(w.store));  /* unless this machine took seconds for it */
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], &wrong);
        assert_null(wrong);
    }
    imp_io_fault_clear();
    await_end(&w);
    nothing_is_held(&w);
    imp_world_close(&w);
}

/* ---- what is waited for, and how long */

typedef struct errand {
    imp_errand e;
    atomic_bool *go;        /* it stands until then; NULL: it doesn't */
    atomic_uint *n_run, *n_given_up;
} errand;

static int run_errand(imp_store *s, imp_errand *e)
{
    (void)s;
    errand *own = (errand *)(void *)e;
    while (own->go && !atomic_load(own->go)) imp_io_sleep_until(imp_now_ns() + 1000000);
    atomic_fetch_add(own->n_run, 1);
    return 0;
}

static void give_up_errand(imp_store *s, imp_errand *e)
{
    (void)s;
    atomic_fetch_add(((errand *)(void *)e)->n_given_up, 1);
}

static errand *new_errand(atomic_bool *go, atomic_uint *n_run, atomic_uint *n_given_up, bool needed)
{
    errand *own = imp_calloc(1, sizeof *own);
    assert_non_null(own);
    own->e = (imp_errand){.run = run_errand, .give_up = give_up_errand, .what = "test", .needed = needed};
    own->go = go;
    own->n_run = n_run;
    own->n_given_up = n_given_up;
    return own;
}

/* All threads stand: what nobody has begun is late, and of that only what is needed is done afterwards. */
static void late_before_they_began(void **state)
{
    imp_world w;
    atomic_bool go = false;
    atomic_uint n_held = 0, n_run = 0, n_given_up = 0;
    fill(*state);
    open_world(&w, *state);
    for (int i = 0; i < 4; i++) assert_true(imp_errand_send(w.store, &new_errand(&go, &n_held, &n_given_up, false)->e));
    soon(&w);
    assert_false(imp_errand_do(w.store, &new_errand(NULL, &n_run, &n_given_up, false)->e));
    assert_false(imp_errand_do(w.store, &new_errand(NULL, &n_run, &n_given_up, true)->e));
    assert_true(imp_store_hung(w.store));
    assert_int_equal(look_up(&w, prompt), 0);
    atomic_store(&go, true);
    await_end(&w);
    assert_int_equal(atomic_load(&n_run), 1);
    assert_int_equal(atomic_load(&n_given_up), 2);
    patiently(&w);
    assert_int_equal(imp_world_check(&w, prompt, N, true), N);
    imp_world_close(&w);
    assert_int_equal(atomic_load(&n_held), 4);
}

static int run_slowly(imp_store *s, imp_errand *e)
{
    (void)s;
    imp_io_raise(&e->from_ns, imp_now_ns() + 3600000000000u); /* as by the rate limit */
    imp_io_sleep_until(imp_now_ns() + 1200000000u);
    return 0;
}

/* What its own reads are held back for doesn't make it late; what others' are does. */
static void limited_ones_are_waited_for(void **state)
{
    imp_world w;
    atomic_bool go = false;
    atomic_uint n_run = 0, n_given_up = 0;
    fill(*state);
    open_world(&w, *state);
    w.store->opts.read_deadline_ms = 1000;
    errand *own = new_errand(NULL, &n_run, &n_given_up, false);
    own->e.run = run_slowly;
    assert_true(imp_errand_do(w.store, &own->e));
    assert_false(imp_store_hung(w.store));
    imp_free(own);
    own = new_errand(NULL, &n_run, &n_given_up, false);
    own->e.run = run_slowly;
    assert_true(imp_errand_send(w.store, &own->e));
    soon(&w);
    assert_false(imp_errand_do(w.store, &new_errand(&go, &n_run, &n_given_up, false)->e));
    atomic_store(&go, true);
    await_end(&w);
    imp_world_close(&w);
}

static void *drop_it(void *arg)
{
    imp_world *w = arg;
    imp_path path;
    uint64_t header_bytes;
    int rc = imp_store_match(w->store, w->space->id, prompt, N, true, &path, &header_bytes);
    if (rc < 0 || path.n_spans < 2) return w;
    imp_store_drop_bad(w->store, path.spans[1].seg, IMP_REGION_SKETCH, 0, 0, "test");
    imp_store_unpin(w->store, &path);
    return NULL;
}

/* Another process changes the store for longer than the deadline: that is no disk that hangs. */
static void busy_is_not_hung(void **state)
{
    imp_world w, else_where;
    pthread_t thread;
    void *wrong;
    fill(*state);
    open_world(&w, *state);
    open_world(&else_where, *state);
    assert_int_equal(imp_world_check(&w, prompt, N, true), N);
    w.store->opts.read_deadline_ms = 1000; /* one try after the other at the lock is told in less */
    assert_int_equal(imp_change_begin(else_where.store), 0);
    imp_leave(else_where.store);
    assert_int_equal(pthread_create(&thread, NULL, drop_it, &w), 0);
    for (uint64_t start_ns = imp_now_ns(); atomic_load(&w.store->busy_ns) == 0;) {
        assert_true(in_time(start_ns));
        imp_io_sleep_until(imp_now_ns() + 1000000);
    }
    imp_io_sleep_until(imp_now_ns() + 1500000000u);
    assert_false(imp_store_hung(w.store));
    imp_enter(else_where.store);
    assert_int_equal(imp_change_end(else_where.store, 0), 0);
    pthread_join(thread, &wrong);
    assert_null(wrong);
    assert_false(imp_store_hung(w.store));
    assert_int_equal(stats_of(&w).io_errors, 0);
    assert_int_equal(imp_world_check(&w, prompt, N, true), 64);
    imp_world_close(&else_where);
    imp_world_close(&w);
}

/* ---- matches inside of a change */

static int set_old(imp_radix_node *n, void *user)
{
    n->used_s -= 1000;
    imp_radix_touch(user, n);
    return 0;
}

typedef struct meanwhile {
    imp_world *w;
    imp_path path;
    bool done;
} meanwhile;

/* As the store's own hook it lets go of `lock` for a call. Once a node has gone, a match comes for the other entry. */
static void match_now(void *user)
{
    meanwhile *m = user;
    imp_store *s = m->w->store;
    uint64_t header_bytes;
    size_t n_steps, n_matched = 0;
    if (!s->entered) return;
    bool now = !m->done && imp_radix_count(s->forest.trees[0].radix) < 2 * N / 64;
    if (now) (void)imp_steps(s, &s->forest.trees[0], prompt, N, true, &n_steps, &n_matched);
    pthread_mutex_unlock(&s->lock);
    if (!now) return;
    m->done = true;
    (void)imp_store_match(s, m->w->space->id, n_matched == N ? prompt : other, N, true, &m->path, &header_bytes);
}

static void lock_again(void *user)
{
    imp_store *s = ((meanwhile *)user)->w->store;
    if (s->entered) pthread_mutex_lock(&s->lock);
}

static void expiry_spares_what_is_used(void **state)
{
    imp_world w;
    meanwhile m = {.w = &w};
    fill(*state);
    open_world(&w, *state);
    assert_int_equal(imp_world_commit(&w, other, N, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    imp_store *s = w.store;
    pthread_mutex_lock(&s->lock);
    (void)imp_radix_walk(s->forest.trees[0].radix, set_old, s->forest.trees[0].radix);
    s->opts.ttl_s = 100;
    pthread_mutex_unlock(&s->lock);
    assert_int_equal(stats_of(&w).n_nodes, 2 * N / 64);
    imp_cat_around(s->cat, match_now, lock_again, NULL, &m);
    imp_expire(s);
    assert_true(m.done);
    assert_int_equal(m.path.n_tokens, N);
    assert_int_equal(stats_of(&w).n_nodes, N / 64); /* that entry, and nothing of the other one */
    imp_store_unpin(s, &m.path);
    nothing_is_held(&w);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
}

/* A node that a change has made isn't held: rolled back, its id will be another node's. */
static void undone_nodes_are_not_held(void **state)
{
    imp_world w;
    imp_path before, path;
    uint64_t header_bytes, lower;
    fill(*state);
    open_world(&w, *state);
    imp_store *s = w.store;
    assert_int_equal(imp_store_match(s, w.space->id, prompt, N, true, &before, &header_bytes), 0);
    assert_int_equal(before.n_spans, N / 64);
    assert_int_equal(imp_change_begin(s), 0);
    imp_tree *tree = imp_forest_tree(&s->forest, w.space->id);
    assert_int_equal(imp_edit_split(s, tree, before.spans[0].node, 16, &lower), 0);
    imp_leave(s);
    assert_int_equal(imp_store_match(s, w.space->id, prompt, N, true, &path, &header_bytes), 0);
    assert_int_equal(path.n_tokens, N);
    assert_int_equal(path.n_spans, N / 64 + 1);
    for (size_t i = 0; i < path.n_spans; i++) { /* and yet it is told which one it is */
        assert_int_equal(path.spans[i].leased, i != 1);
        assert_int_not_equal(path.spans[i].node, 0);
    }
    assert_int_equal(path.spans[1].node, lower);
    imp_enter(s);
    assert_int_equal(imp_change_end(s, IMP_E_NOMEM), IMP_E_NOMEM);
    imp_store_unpin(s, &path);
    assert_int_equal(imp_world_check(&w, prompt, N, true), N);
    assert_false(evictable(&w)); /* the first one still holds all */
    imp_store_unpin(s, &before);
    nothing_is_held(&w);
    assert_true(evictable(&w));

    /* Once it is made, it is held as others are. */
    assert_int_equal(imp_change_begin(s), 0);
    tree = imp_forest_tree(&s->forest, w.space->id);
    imp_radix_node *n = NULL;
    size_t n_steps, n_matched;
    assert_int_equal(imp_steps(s, tree, prompt, 1, true, &n_steps, &n_matched), 0);
    n = s->steps[0].node;
    assert_int_equal(imp_change_end(s, imp_edit_split(s, tree, n->id, 16, &lower)), 0);
    assert_int_equal(imp_store_match(s, w.space->id, prompt, N, true, &path, &header_bytes), 0);
    assert_int_equal(path.spans[1].node, lower);
    assert_true(path.spans[1].leased);
    imp_store_unpin(s, &path);
    nothing_is_held(&w);
    imp_world_close(&w);
}

/* ---- many at once */

typedef struct crowd {
    imp_world *w;
    atomic_bool stop;
    atomic_uint n_wrong, n_found;
} crowd;

static void *match_on(void *arg)
{
    crowd *c = arg;
    while (!atomic_load(&c->stop)) {
        for (int i = 0; i < 2; i++) {
            int64_t n = imp_world_check(c->w, i ? other : prompt, N, true);
            if (n < 0 || n > N) atomic_fetch_add(&c->n_wrong, 1);
            if (n == N) atomic_fetch_add(&c->n_found, 1);
        }
    }
    return NULL;
}

static void *store_on(void *arg)
{
    crowd *c = arg;
    while (!atomic_load(&c->stop)) {
        (void)imp_world_commit(c->w, other, N, 0, 0, NULL);
        (void)imp_world_commit(c->w, prompt, N, 0, 0, NULL);
        if (imp_store_remove(c->w->store, 0) < 0) atomic_fetch_add(&c->n_wrong, 1);
    }
    return NULL;
}

static void many_threads(void **state)
{
    enum { N_THREADS = 6, N_ROUNDS = 12 };
    imp_world w;
    pthread_t threads[N_THREADS + 1];
    imp_rng rng;
    fill(*state);
    open_world(&w, *state);
    crowd c = {.w = &w};
    imp_rng_seed(&rng, imp_test_seed());
    w.store->opts.read_deadline_ms = 20;
    for (int i = 0; i < N_THREADS; i++) assert_int_equal(pthread_create(&threads[i], NULL, match_on, &c), 0);
    assert_int_equal(pthread_create(&threads[N_THREADS], NULL, store_on, &c), 0);
    for (int i = 0; i < imp_test_rounds(N_ROUNDS); i++) {
        hold(i % 2 ? IMP_IO_OPEN : IMP_IO_READ, "segments/", 1 + imp_rng_below(&rng, 4));
        imp_io_sleep_until(imp_now_ns() + 60000000);
        imp_io_fault_clear();
        imp_io_sleep_until(imp_now_ns() + 20000000);
    }
    atomic_store(&c.stop, true);
    for (int i = 0; i <= N_THREADS; i++) pthread_join(threads[i], NULL);
    assert_int_equal(atomic_load(&c.n_wrong), 0);
    (void)imp_store_flush(w.store);
    await_end(&w);
    nothing_is_held(&w);
    patiently(&w);
    assert_int_equal(imp_store_remove(w.store, 0), 0);
    assert_int_equal(imp_world_commit(&w, prompt, N, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&w, prompt, N, true), N);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    assert_int_equal(stats_of(&w).corrupt_chunks, 0);
    imp_world_close(&w);
}

/* What fails on the other thread is told to who asked. */
static void errors_come_over(void **state)
{
    int failed = 0;
    fill(*state);
    for (uint64_t at = 1;; at++) {
        imp_world w;
        imp_path path;
        uint64_t header_bytes;
        open_world(&w, *state);
        imp_set_error(0, "");
        imp_alloc_fail_at(at, 0);
        int rc = imp_store_match(w.store, w.space->id, prompt, N, true, &path, &header_bytes);
        uint64_t made = imp_alloc_fail_at(0, 0);
        if (rc < 0) {
            failed++;
            assert_int_equal(rc, IMP_E_NOMEM);
            assert_non_null(strstr(imp_last_error(), "memory"));
        } else {
            imp_store_unpin(w.store, &path);
        }
        nothing_is_held(&w);
        imp_world_close(&w);
        if (made < at) break;
    }
    assert_true(failed > 1);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(segments_that_hang),        TEST(late_matches_pin_nothing), TEST(closed_meanwhile),
        TEST(catalogue_that_hangs),      TEST(threads_only_where_needed), TEST(independent_ones_go_on),
        TEST(many_threads),              TEST(errors_come_over),         TEST(removed_files_are_closed),
        TEST(late_before_they_began),    TEST(limited_ones_are_waited_for), TEST(busy_is_not_hung),
        TEST(expiry_spares_what_is_used), TEST(undone_nodes_are_not_held),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
