/* The limits: size of the directory, now and after a restart; age; shares of spaces; what is pinned, leased, too large
 * or in everybody's way. And that spaces of one store can't be told of each other. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>
#include <sqlite3.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/rng.h"
#include "store/catalogue.h"
#include "support/store_world.h"
#include "support/support.h"

enum { MIB = 1 << 20, TOKENS = 128 };

static int set_up(void **state)
{
    *state = imp_test_make_dir("/dev/shm"); /* where an fsync costs nothing */
    if (!*state) *state = imp_test_make_dir(NULL);
    return *state ? 0 : -1;
}

static int tear_down(void **state)
{
    imp_test_remove_dir(*state);
    return 0;
}

static void sequence(int32_t *tokens, size_t n, int32_t first)
{
    for (size_t i = 0; i < n; i++) tokens[i] = first + (int32_t)i;
}

static imp_stats stats_of(imp_world *w)
{
    imp_stats st;
    assert_int_equal(imp_store_stats(w->store, &st), 0);
    return st;
}

/* An entry of TOKENS tokens, number `i`, its rows on disk. */
static void add(imp_world *w, int i)
{
    int32_t tokens[TOKENS];
    sequence(tokens, TOKENS, 1000 * (i + 1));
    assert_int_equal(imp_world_commit(w, tokens, TOKENS, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w->store), 0);
}

/* How much of it is there, every row right. */
static int64_t there(imp_world *w, int i)
{
    int32_t tokens[TOKENS];
    sequence(tokens, TOKENS, 1000 * (i + 1));
    return imp_world_check(w, tokens, TOKENS, true);
}

static int count_node(const imp_node_info *node, void *user)
{
    *(size_t *)user += node->n_tokens;
    return 0;
}

/* Tokens in the store, without using them. */
static size_t tokens_of(imp_world *w)
{
    size_t n = 0;
    assert_int_equal(imp_store_list(w->store, count_node, &n), 0);
    return n;
}

static uint64_t pin(imp_world *w, int i)
{
    int32_t tokens[TOKENS];
    imp_lease *lease;
    imp_prefix_info info;
    sequence(tokens, TOKENS, 1000 * (i + 1));
    assert_int_equal(imp_prefix_acquire(w->space, tokens, TOKENS, 0, &lease, &info), 0);
    assert_int_equal(info.n_matched, TOKENS - 1);
    assert_int_equal(imp_store_pin(w->store, info.node, 1), 0);
    imp_lease_release(lease);
    return info.node;
}

static void smaller_after_a_restart(void **state)
{
    imp_world w;
    imp_store_opts opts;
    imp_world_opts(&opts);
    opts.limit_bytes = 8 * MIB;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    for (int i = 0; i < 60; i++) add(&w, i);
    (void)pin(&w, 0);
    size_t before = tokens_of(&w);
    imp_world_close(&w);
    assert_true(imp_world_du(*state) > 2 * MIB);

    /* Who doesn't say how large it may be changes nothing. */
    opts.limit_bytes = 0;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    assert_int_equal(tokens_of(&w), before);
    imp_world_close(&w);

    opts.limit_bytes = 2 * MIB;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    assert_in_range(stats_of(&w).disk_bytes, 0, opts.limit_bytes);
    assert_true(stats_of(&w).evicted_nodes > 0);
    assert_int_equal(there(&w, 0), TOKENS);
    for (int i = 100; i < 110; i++) {
        add(&w, i);
        assert_int_equal(there(&w, i), TOKENS);
        assert_in_range(imp_world_du(*state), 0, opts.limit_bytes);
    }
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);

    /* All of it pinned: it stays, opening is no failure, and nothing new comes in. */
    opts.limit_bytes = 8 * MIB;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    for (int i = 200; i < 220; i++) {
        add(&w, i);
        (void)pin(&w, i);
    }
    imp_world_close(&w);
    opts.limit_bytes = MIB;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    for (int i = 200; i < 220; i++) assert_int_equal(there(&w, i), TOKENS);
    int32_t tokens[TOKENS];
    sequence(tokens, TOKENS, 900000);
    assert_int_equal(imp_world_commit(&w, tokens, TOKENS, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), IMP_E_FULL);
    assert_int_equal(imp_world_check(&w, tokens, TOKENS, true), 0);
    imp_world_close(&w);
}

/* What the catalogue's log takes beside `dir`'s other files. */
static uint64_t log_bytes(const char *dir)
{
    struct stat st;
    char path[512];
    snprintf(path, sizeof path, "%s/catalogue.db-wal", dir);
    return stat(path, &st) == 0 ? (uint64_t)st.st_size : 0;
}

/* The limit is the store's: who names none goes by the one that was named last, whichever process that was. */
static void the_limit_is_the_stores(void **state)
{
    imp_world w, other;
    imp_store_opts small, smaller, unnamed, looks;
    imp_world_opts(&unnamed);
    small = smaller = looks = unnamed;
    small.limit_bytes = 8 * MIB;
    smaller.limit_bytes = 2 * MIB;
    looks.flags = IMP_STORE_READONLY;

    /* none was ever named */
    assert_int_equal(imp_world_open(&w, *state, &unnamed, NULL), 0);
    assert_int_equal(stats_of(&w).limit_bytes, 10240ull * MIB);
    imp_world_close(&w);

    /* naming it is enough */
    assert_int_equal(imp_world_open(&w, *state, &small, NULL), 0);
    imp_world_close(&w);
    assert_int_equal(imp_world_open(&w, *state, &unnamed, NULL), 0);
    assert_int_equal(stats_of(&w).limit_bytes, 8 * MIB);
    for (int i = 0; i < 60; i++) add(&w, i);
    size_t before = tokens_of(&w);
    assert_int_equal(before, 60 * TOKENS);
    imp_world_close(&w);
    for (int how = 0; how < 2; how++) {
        assert_int_equal(imp_world_open(&w, *state, how ? &looks : &unnamed, NULL), 0);
        assert_int_equal(stats_of(&w).limit_bytes, 8 * MIB);
        assert_int_equal(stats_of(&w).evicted_nodes, 0);
        assert_int_equal(tokens_of(&w), before);
        if (how == 0) {
            imp_gc_report r;
            assert_int_equal(imp_store_gc(w.store, &r), 0);
            assert_int_equal(r.evicted_nodes, 0);
        }
        imp_world_close(&w);
    }
    /* it is enforced, too */
    assert_int_equal(imp_world_open(&w, *state, &unnamed, NULL), 0);
    for (int i = 100; i < 400; i++) add(&w, i);
    assert_true(stats_of(&w).evicted_nodes > 0);
    assert_in_range(imp_world_du(*state), 4 * MIB, 8 * MIB);

    /* another one, under the eyes of a process that has the store open */
    assert_int_equal(imp_world_open(&other, *state, &smaller, NULL), 0);
    assert_true(stats_of(&other).evicted_nodes > 0);
    assert_in_range(imp_world_du(*state), 0, 2 * MIB);
    assert_int_equal(stats_of(&w).limit_bytes, 2 * MIB);
    imp_world_close(&other);
    for (int i = 400; i < 420; i++) add(&w, i);
    assert_in_range(imp_world_du(*state), 0, 2 * MIB);

    /* who only reads sets nothing; the last one who names one wins, also over one who is there and had named his */
    looks.limit_bytes = 64 * MIB;
    assert_int_equal(imp_world_open(&other, *state, &looks, NULL), 0);
    assert_int_equal(stats_of(&other).limit_bytes, 2 * MIB);
    imp_world_close(&other);
    imp_world_close(&w);
    assert_int_equal(imp_world_open(&w, *state, &smaller, NULL), 0);
    assert_int_equal(imp_world_open(&other, *state, &small, NULL), 0);
    assert_int_equal(stats_of(&w).limit_bytes, 8 * MIB);
    for (int i = 500; i < 600; i++) add(&w, i);
    assert_in_range(imp_world_du(*state), 3 * MIB, 8 * MIB);
    before = tokens_of(&w);
    imp_world_close(&other);
    imp_world_close(&w);

    /* Made again, the catalogue has none, and all is there. */
    assert_int_equal(imp_world_rebuild(*state), 0);
    assert_int_equal(imp_world_open(&w, *state, &unnamed, NULL), 0);
    assert_int_equal(stats_of(&w).limit_bytes, 10240ull * MIB);
    assert_int_equal(tokens_of(&w), before);
    imp_world_close(&w);
}

/* A catalogue that is lost while a process goes by a limit has it again. */
static void the_limit_outlives_a_catalogue(void **state)
{
    imp_world w, other;
    imp_store_opts opts, unnamed;
    imp_world_opts(&unnamed);
    opts = unnamed;
    opts.limit_bytes = 8 * MIB;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    add(&w, 0);
    assert_int_equal(imp_cat_delete(*state), 0);
    usleep(1100000); /* it is tried again once a second */
    (void)there(&w, 0);
    assert_int_equal(stats_of(&w).limit_bytes, 8 * MIB);
    add(&w, 1); /* a change takes it there */
    assert_int_equal(stats_of(&w).catalogue_rebuilds, 1);
    assert_int_equal(imp_world_open(&other, *state, &unnamed, NULL), 0);
    assert_int_equal(stats_of(&other).limit_bytes, 8 * MIB);
    imp_world_close(&other);
    imp_world_close(&w);
}

/* Somebody reads the catalogue for long, so that its log can't be emptied. Nothing goes because of that: there is as much
 * in the store as before, until the log is so large that nothing is added, and all goes on once the reader is done. */
static void a_log_evicts_nothing(void **state)
{
    enum { LIMIT = 4 * MIB, LOG = LIMIT / 16, MOST = 400 };
    imp_world w;
    imp_store_opts opts;
    sqlite3 *db;
    char path[512];
    int32_t tokens[TOKENS];
    int rc = 0, n = 0;
    imp_world_opts(&opts);
    opts.limit_bytes = LIMIT;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    for (; n < MOST && stats_of(&w).evicted_nodes == 0; n++) {
        add(&w, n);
        assert_in_range(log_bytes(*state), 0, 2 * LOG); /* and what one change adds */
    }
    assert_true(stats_of(&w).evicted_nodes > 0);
    size_t full = tokens_of(&w);

    snprintf(path, sizeof path, "%s/catalogue.db", (char *)*state);
    assert_int_equal(sqlite3_open_v2(path, &db, SQLITE_OPEN_READONLY, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, "BEGIN; SELECT count(*) FROM node", NULL, NULL, NULL), SQLITE_OK);
    for (int i = 0; rc == 0 && i < MOST; i++, n++) {
        sequence(tokens, TOKENS, 1000 * (n + 1));
        assert_int_equal(imp_world_commit(&w, tokens, TOKENS, 0, 0, NULL), 0);
        rc = imp_store_flush(w.store);
        assert_in_range(tokens_of(&w), full - 4 * TOKENS, full + 4 * TOKENS);
    }
    assert_int_equal(rc, IMP_E_BUSY);
    assert_in_range(log_bytes(*state), 4 * LOG, 6 * LOG);
    assert_int_equal(sqlite3_exec(db, "COMMIT", NULL, NULL, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_close(db), SQLITE_OK);

    sleep(1); /* within a second of a wait in vain there is none */
    add(&w, n);
    assert_int_equal(there(&w, n), TOKENS);
    assert_in_range(log_bytes(*state), 0, 2 * LOG);
    assert_in_range(tokens_of(&w), full - 4 * TOKENS, full + 4 * TOKENS);
    assert_in_range(imp_world_du(*state), 0, LIMIT);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
}

static void too_old(void **state)
{
    imp_world w;
    imp_store_opts opts;
    imp_gc_report report;
    imp_lease *lease;
    imp_prefix_info info;
    int32_t tokens[2 * TOKENS];
    imp_world_opts(&opts);
    opts.ttl_s = 3600;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    for (int i = 0; i < 4; i++) add(&w, i);
    sequence(tokens, 2 * TOKENS, 4000); /* below entry 3, which has a node of its own */
    assert_int_equal(imp_world_commit(&w, tokens, 2 * TOKENS, TOKENS, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    (void)pin(&w, 0);
    assert_int_equal(imp_store_gc(w.store, &report), 0);
    assert_int_equal(report.evicted_nodes, 0); /* an hour is not over */
    assert_int_equal(tokens_of(&w), 5 * TOKENS);
    imp_world_close(&w);

    usleep(2100000);
    opts.ttl_s = 1;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    assert_int_equal(tokens_of(&w), TOKENS); /* the pinned one */
    assert_int_equal(there(&w, 0), TOKENS);
    /* what is in use stays, however old */
    add(&w, 10);
    sequence(tokens, TOKENS, 11000);
    assert_int_equal(imp_prefix_acquire(w.space, tokens, TOKENS, 0, &lease, &info), 0);
    usleep(2100000);
    assert_int_equal(imp_store_gc(w.store, &report), 0);
    assert_int_equal(tokens_of(&w), 2 * TOKENS);
    assert_int_equal(there(&w, 10), TOKENS);
    imp_lease_release(lease);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
}

/* The process that has the store open looks by itself: nobody opens, collects or stores anything meanwhile. */
static void too_old_while_it_runs(void **state)
{
    enum { TTL_S = 3, PINNED = 0, USED = 1, UNUSED = 2, POLLS = 5000, POLL_US = 20000, TRIES = 10 };
    static const uint64_t asleep_ns = (TTL_S - 1) * 1000000000ull;
    imp_world w;
    imp_store_opts opts;
    imp_world_opts(&opts);
    opts.ttl_s = TTL_S;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    add(&w, PINNED);
    (void)pin(&w, PINNED);
    bool asleep = true; /* this test was, for as long as an entry lives: that says nothing */
    for (int i = 0; i < TRIES && asleep; i++) {
        asleep = false;
        add(&w, USED);
        uint64_t used_ns = imp_now_ns(), du;
        add(&w, UNUSED); /* the youngest: when it is gone, the others have been looked at */
        du = imp_world_du(imp_test_path(*state, "segments"));
        int polls = 0;
        /* Its files go behind it. */
        for (; polls < POLLS && !asleep &&
               (tokens_of(&w) > 2 * TOKENS || imp_world_du(imp_test_path(*state, "segments")) >= du);
             polls++) {
            usleep(POLL_US);
            int64_t n = there(&w, USED);
            uint64_t now_ns = imp_now_ns();
            asleep = now_ns - used_ns > asleep_ns;
            if (!asleep) assert_int_equal(n, TOKENS);
            used_ns = now_ns;
        }
        if (polls == POLLS) fail_msg("still there after %d looks", polls);
        asleep = asleep || imp_now_ns() - used_ns > asleep_ns;
        if (asleep) continue;
        assert_int_equal(tokens_of(&w), 2 * TOKENS);
        assert_int_equal(there(&w, UNUSED), 0);
        assert_int_equal(there(&w, USED), TOKENS);
    }
    assert_false(asleep);
    assert_int_equal(there(&w, PINNED), TOKENS);
    assert_true(stats_of(&w).evicted_nodes > 0);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
}

/* Nothing is copied, queued, evicted or written for what had no room a moment ago. */
static void refused_once(void **state)
{
    imp_world w;
    imp_store_opts opts;
    static int32_t tokens[2000];
    bool staged;
    sequence(tokens, 2000, 1);
    imp_world_opts(&opts);
    opts.limit_bytes = MIB;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    assert_int_equal(imp_world_commit(&w, tokens, 2000, 0, 0, &staged), 0);
    assert_true(staged);
    assert_int_equal(imp_store_flush(w.store), IMP_E_FULL);
    int64_t front = imp_world_check(&w, tokens, 2000, true);
    assert_in_range(front, 64, 1999);
    imp_stats before = stats_of(&w);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(imp_world_commit(&w, tokens, 2000, (size_t)front, 0, &staged), IMP_E_FULL);
        assert_false(staged);
        assert_int_equal(imp_store_flush(w.store), 0);
    }
    imp_stats after = stats_of(&w);
    assert_int_equal(after.bytes_written, before.bytes_written);
    assert_int_equal(after.evicted_nodes, before.evicted_nodes);
    assert_int_equal(after.commits_refused, before.commits_refused + 5);
    /* other entries come in all the same, and the front goes for them */
    add(&w, 10);
    assert_int_equal(there(&w, 10), TOKENS);
    /* once something was let go, it is tried again */
    assert_int_equal(imp_store_remove(w.store, 0), 0);
    assert_int_equal(imp_world_commit(&w, tokens, 2000, 0, 0, &staged), 0);
    assert_true(staged);
    (void)imp_store_flush(w.store);
    assert_in_range(imp_world_du(*state), 0, opts.limit_bytes);
    imp_world_close(&w);
}

/* A head that many requests share, and then a flood of prefixes that come once each, several times the store's size. */
static void shared_heads_outlive_floods(void **state)
{
    imp_world w;
    imp_store_opts opts;
    int32_t tokens[2 * TOKENS];
    imp_world_opts(&opts);
    opts.limit_bytes = 2 * MIB;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    add(&w, 0);
    sequence(tokens, TOKENS, 1000);
    for (int i = 0; i < 5; i++) { /* some requests over the head */
        sequence(tokens + TOKENS, TOKENS, 500000 + 1000 * i);
        assert_int_equal(there(&w, 0), TOKENS);
        assert_int_equal(imp_world_commit(&w, tokens, 2 * TOKENS, TOKENS, 0, NULL), 0);
    }
    assert_int_equal(imp_store_flush(w.store), 0);
    for (int i = 1; i < 80; i++) add(&w, i);
    assert_true(stats_of(&w).evicted_nodes > 40);
    assert_int_equal(there(&w, 79), TOKENS);
    assert_int_equal(there(&w, 0), TOKENS);
    imp_world_close(&w);
}

typedef struct seen_node {
    uint64_t first_token, n_tokens, hits;
    int64_t used_s;
} seen_node;

typedef struct seen {
    seen_node nodes[16];
    size_t n;
} seen;

static int note_node(const imp_node_info *node, void *user)
{
    seen *s = user;
    assert_true(s->n < 16);
    s->nodes[s->n++] = (seen_node){node->first_token, node->n_tokens, node->hits, node->used_s};
    return 0;
}

/* A prefix in use that others leave half-way is in use still, as every process sees it. */
static void a_split_keeps_the_use(void **state)
{
    enum { N = 64, AT = 40, HITS = 6 };
    imp_world w, other;
    int32_t tokens[N];
    seen here = {.n = 0}, there_too = {.n = 0};
    assert_int_equal(imp_world_open(&w, *state, NULL, NULL), 0);
    sequence(tokens, N, 1000);
    assert_int_equal(imp_world_commit(&w, tokens, N, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    for (int i = 0; i < HITS; i++) assert_int_equal(imp_world_check(&w, tokens, N, true), N);
    sequence(tokens + AT, N - AT, 5000);
    assert_int_equal(imp_world_commit(&w, tokens, N, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_store_list(w.store, note_node, &here), 0);
    assert_int_equal(here.n, 3);
    int n_tails = 0;
    for (size_t i = 0; i < here.n; i++) n_tails += here.nodes[i].first_token == AT && here.nodes[i].hits >= HITS;
    assert_int_equal(n_tails, 1);

    assert_int_equal(imp_world_open(&other, *state, NULL, NULL), 0);
    assert_int_equal(imp_store_list(other.store, note_node, &there_too), 0);
    assert_memory_equal(&there_too, &here, sizeof here);
    imp_world_close(&other);
    imp_world_close(&w);
}

/* ---- tenants */

enum { TENANTS = 3 };

static uint64_t held_by(imp_world *w, imp_space *space)
{
    imp_space *own = w->space;
    uint64_t n = 0;
    w->space = space;
    for (int i = 0; i < 100; i++) n += (uint64_t)there(w, i);
    w->space = own;
    return n;
}

/* One tenant floods the store; the others keep what they have. */
static void floods_hit_their_own(void **state)
{
    imp_world w, other[TENANTS];
    imp_store_opts opts;
    imp_world_opts(&opts);
    opts.limit_bytes = 4 * MIB;
    opts.space_percent = 50;
    static const char *const salts[TENANTS] = {"name:a", "name:b", "name:c"};
    assert_int_equal(imp_world_open(&w, *state, &opts, "name:a"), 0);
    for (int t = 1; t < TENANTS; t++) {
        assert_int_equal(imp_world_open(&other[t], *state, &opts, salts[t]), 0);
        for (int i = 0; i < 4; i++) add(&other[t], i);
    }
    for (int i = 0; i < 100; i++) {
        add(&w, i);
        assert_int_equal(there(&w, i), TOKENS);
        assert_in_range(imp_world_du(*state), 0, opts.limit_bytes);
    }
    uint64_t kept = held_by(&w, w.space);
    assert_true(kept > 10 * TOKENS);
    /* half of the store at most: a token takes 2 layers' keys and values, and headers */
    assert_true(kept * WORLD_LAYERS * 2 * WORLD_ROW <= opts.limit_bytes / 2);
    for (int t = 1; t < TENANTS; t++) {
        for (int i = 0; i < 4; i++) assert_int_equal(there(&other[t], i), TOKENS);
        assert_int_equal(held_by(&other[t], other[t].space), 4 * TOKENS);
    }
    /* all at once: even parts, nobody is driven out */
    for (int i = 0; i < 100; i++) {
        for (int t = 1; t < TENANTS; t++) add(&other[t], i);
        add(&w, i);
    }
    uint64_t least = UINT64_MAX, most = 0;
    for (int t = 0; t < TENANTS; t++) {
        imp_world *x = t == 0 ? &w : &other[t];
        uint64_t n = held_by(x, x->space);
        if (n < least) least = n;
        if (n > most) most = n;
    }
    assert_true(least * 3 > most * 2);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    for (int t = 1; t < TENANTS; t++) imp_world_close(&other[t]);
    imp_world_close(&w);

    /* a smaller share is enforced by gc */
    imp_gc_report report;
    opts.space_percent = 10;
    assert_int_equal(imp_world_open(&w, *state, &opts, "name:a"), 0);
    assert_int_equal(imp_store_gc(w.store, &report), 0);
    assert_true(report.evicted_nodes > 0);
    assert_true(held_by(&w, w.space) * WORLD_LAYERS * 2 * WORLD_ROW <= opts.limit_bytes / 10);
    imp_world_close(&w);
    opts.space_percent = 101;
    assert_int_equal(imp_world_open(&w, *state, &opts, "name:a"), IMP_E_ARG);
}

/* A share that is full of pinned entries refuses, and nobody else's go for it. */
static void pinned_shares(void **state)
{
    imp_world a, b;
    imp_store_opts opts;
    bool staged;
    int32_t tokens[TOKENS];
    imp_world_opts(&opts);
    opts.limit_bytes = 4 * MIB;
    opts.space_percent = 25;
    assert_int_equal(imp_world_open(&a, *state, &opts, "name:a"), 0);
    assert_int_equal(imp_world_open(&b, *state, &opts, "name:b"), 0);
    for (int i = 0; i < 4; i++) add(&b, i);
    int rc = 0, n = 0;
    for (; rc == 0 && n < 100; n++) {
        sequence(tokens, TOKENS, 1000 * (n + 1));
        assert_int_equal(imp_world_commit(&a, tokens, TOKENS, 0, 0, NULL), 0);
        rc = imp_store_flush(a.store);
        if (rc == 0) (void)pin(&a, n);
    }
    assert_int_equal(rc, IMP_E_FULL);
    assert_in_range(n, 4, 99);
    assert_non_null(strstr(imp_last_error(), "share"));
    assert_int_equal(held_by(&b, b.space), 4 * TOKENS);
    assert_int_equal(imp_world_commit(&a, tokens, TOKENS, (size_t)imp_world_check(&a, tokens, TOKENS, true), 0, &staged),
                     IMP_E_FULL);
    imp_world_close(&b);
    imp_world_close(&a);
}

/* What a request learns about the store is the same whether another tenant has its prompt or nobody has: nothing is
 * matched, read, opened or counted for it. */
static void nothing_to_tell_by(void **state)
{
    imp_world a, b;
    imp_store_opts opts;
    imp_lease *lease;
    imp_prefix_info others, nobodys;
    int32_t tokens[TOKENS], unknown[TOKENS];
    imp_world_opts(&opts);
    opts.host_cache_bytes = MIB;
    assert_int_equal(imp_world_open(&a, *state, &opts, "name:a"), 0);
    assert_int_equal(imp_world_open(&b, *state, &opts, "name:b"), 0);
    add(&a, 0);
    assert_int_equal(there(&a, 0), TOKENS);
    sequence(tokens, TOKENS, 1000);
    sequence(unknown, TOKENS, 70000);
    imp_stats before = stats_of(&b);
    assert_int_equal(imp_prefix_acquire(b.space, tokens, TOKENS, IMP_ACQUIRE_DERIVED, &lease, &others), 0);
    assert_null(lease);
    imp_stats between = stats_of(&b);
    assert_int_equal(imp_prefix_acquire(b.space, unknown, TOKENS, IMP_ACQUIRE_DERIVED, &lease, &nobodys), 0);
    assert_null(lease);
    imp_stats after = stats_of(&b);
    others.match_ns = nobodys.match_ns = 0;
    assert_memory_equal(&others, &nobodys, sizeof others);
    assert_int_equal(between.bytes_read, before.bytes_read);
    assert_int_equal(after.bytes_read, before.bytes_read);
    assert_int_equal(after.hits, before.hits);
    assert_int_equal(after.hit_tokens, before.hit_tokens);
    /* and it is stored a second time, under the other space */
    add(&b, 0);
    assert_int_equal(stats_of(&b).n_tokens, 2 * TOKENS);
    assert_int_equal(stats_of(&b).n_spaces, 2);
    imp_world_close(&b);
    imp_world_close(&a);
}

/* What may have become of the file that is for full disks: a kill, a copy without its blocks, anybody. */
static void ballast_is_mended(void **state)
{
    const char *file = imp_test_path(*state, "store/ballast"), *dir = imp_test_path(*state, "store");
    imp_store_opts opts;
    imp_world w;
    struct stat st;
    imp_world_opts(&opts);
    opts.limit_bytes = 64 * MIB;
    for (int how = 0; how < 7; how++) {
        if (how == 1) assert_int_equal(unlink(file), 0);
        if (how == 2) assert_int_equal(truncate(file, MIB / 2), 0);
        if (how == 3 || how == 4) assert_int_equal(truncate(file, 0), 0);
        if (how == 4) assert_int_equal(truncate(file, MIB), 0);
        if (how == 5) {
            assert_int_equal(unlink(file), 0);
            assert_int_equal(symlink("/etc/passwd", file), 0);
        }
        if (how == 6) opts.limit_bytes = 15 * MIB;
        assert_int_equal(imp_world_open(&w, dir, &opts, NULL), 0);
        if (how == 0) add(&w, 0);
        assert_int_equal(there(&w, 0), TOKENS);
        assert_int_equal(lstat(file, &st), how == 6 ? -1 : 0);
        if (how < 6) assert_true(S_ISREG(st.st_mode) && (st.st_mode & 0777) == 0600);
        if (how < 6) assert_true(st.st_size == MIB && st.st_blocks * 512 >= MIB);
        assert_int_equal(stats_of(&w).disk_bytes, imp_world_du(dir));
        assert_int_equal(imp_world_verify(&w, false, true), 0);
        imp_world_close(&w);
    }
}

/* Who opens a store without naming a limit makes none: one of a few MiB would be exceeded by it. */
static void ballast_where_the_limit_is_known(void **state)
{
    const char *file = imp_test_path(*state, "store/ballast"), *dir = imp_test_path(*state, "store");
    imp_store_opts small, large, unnamed;
    imp_world w;
    imp_gc_report r;
    struct stat st;
    imp_world_opts(&small);
    imp_world_opts(&large);
    imp_world_opts(&unnamed);
    small.limit_bytes = 2 * MIB;
    large.limit_bytes = 64 * MIB;
    assert_int_equal(imp_world_open(&w, dir, &small, NULL), 0);
    for (int i = 0; i < 30; i++) add(&w, i);
    imp_world_close(&w);
    uint64_t before = imp_world_du(dir);
    assert_in_range(before, MIB, 2 * MIB);
    assert_int_equal(imp_world_open(&w, dir, &unnamed, NULL), 0);
    uint64_t node = pin(&w, 29);
    assert_int_equal(imp_store_remove(w.store, node), 0);
    assert_int_equal(imp_store_gc(w.store, &r), 0);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
    assert_int_equal(lstat(file, &st), -1);
    assert_true(imp_world_du(dir) < before + MIB / 2);
    /* what is there stays; who names a limit, or writes, makes it */
    assert_int_equal(imp_world_open(&w, dir, &large, NULL), 0);
    imp_world_close(&w);
    assert_int_equal(lstat(file, &st), 0);
    assert_int_equal(imp_world_open(&w, dir, &unnamed, NULL), 0);
    imp_world_close(&w);
    assert_int_equal(lstat(file, &st), 0);
    assert_int_equal(unlink(file), 0);
    assert_int_equal(imp_world_open(&w, dir, &unnamed, NULL), 0);
    assert_int_equal(lstat(file, &st), -1);
    add(&w, 40);
    imp_world_close(&w);
    assert_int_equal(lstat(file, &st), 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(smaller_after_a_restart), TEST(the_limit_is_the_stores), TEST(the_limit_outlives_a_catalogue),
        TEST(a_log_evicts_nothing), TEST(too_old), TEST(too_old_while_it_runs), TEST(refused_once),
        TEST(shared_heads_outlive_floods), TEST(a_split_keeps_the_use), TEST(floods_hit_their_own), TEST(pinned_shares),
        TEST(nothing_to_tell_by),
        TEST(ballast_is_mended), TEST(ballast_where_the_limit_is_known),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
