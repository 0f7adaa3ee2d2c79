/* The store through its own calls: what is committed comes back to the byte, the tree is what a naive twin says, also
 * after a reopen and between instances. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/hash.h"
#include "base/rng.h"
#include "support/store_world.h"
#include "support/support.h"

static int set_up(void **state)
{
    *state = imp_test_make_dir(NULL);
    return *state ? 0 : -1;
}

/* For what changes a store hundreds of times: in memory, where an fsync costs nothing. */
static int set_up_fast(void **state)
{
    *state = imp_test_make_dir("/dev/shm");
    return *state ? 0 : set_up(state);
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

static void write_file(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static imp_stats stats_of(imp_world *w)
{
    imp_stats st;
    assert_int_equal(imp_store_stats(w->store, &st), 0);
    return st;
}

static void commit_and_reopen(void **state)
{
    const char *dir = *state;
    imp_world w;
    int32_t tokens[300];
    bool staged;
    sequence(tokens, 300, 1000);
    assert_int_equal(imp_world_open(&w, dir, NULL, NULL), 0);
    assert_int_equal(imp_world_check(&w, tokens, 300, true), 0);
    assert_int_equal(imp_world_commit(&w, tokens, 200, 0, 0, &staged), 0);
    assert_true(staged);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&w, tokens, 300, true), 200);
    assert_int_equal(imp_world_check(&w, tokens, 77, true), 77);
    /* known already, and too short a tail */
    assert_int_equal(imp_world_commit(&w, tokens, 200, 0, 0, &staged), 0);
    assert_false(staged);
    assert_int_equal(imp_world_commit(&w, tokens, 203, 200, 0, &staged), 0);
    assert_false(staged);
    imp_commit *c;
    assert_int_equal(imp_commit_begin(w.space, tokens, 300, 150, 0, &c), 0);
    assert_int_equal(imp_commit_first(c), 200);
    imp_commit_cancel(c);
    assert_int_equal(imp_commit_first(NULL), 0);
    assert_int_equal(imp_world_commit(&w, tokens, 300, 150, 0, &staged), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&w, tokens, 300, true), 300);
    imp_stats st = stats_of(&w);
    assert_int_equal(st.n_tokens, 300);
    assert_int_equal(st.kv_bytes, 300 * 2 * WORLD_LAYERS * WORLD_ROW);
    assert_int_equal(st.commits, 2);
    assert_int_equal(st.commits_known, 1);
    assert_int_equal(st.n_spaces, 1);
    assert_int_equal(st.disk_bytes, imp_world_du(dir));
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);

    assert_int_equal(imp_world_open(&w, dir, NULL, NULL), 0);
    assert_int_equal(imp_world_check(&w, tokens, 300, true), 300);
    assert_int_equal(stats_of(&w).kv_bytes, st.kv_bytes);
    imp_world other;
    assert_int_equal(imp_world_open(&other, dir, NULL, "tenant"), 0);
    assert_int_equal(imp_world_check(&other, tokens, 300, true), 0);
    imp_world_close(&other);
    imp_world_close(&w);
}

/* ---- a naive twin: the sequences that were stored */

enum { TWIN_MAX = 400, TWIN_TOKENS = 260 };

typedef struct twin {
    int32_t tokens[TWIN_MAX][TWIN_TOKENS];
    size_t n_tokens[TWIN_MAX];
    size_t n;
} twin;

static size_t twin_match(const twin *t, const int32_t *tokens, size_t n)
{
    size_t best = 0;
    for (size_t i = 0; i < t->n; i++) {
        size_t same = 0;
        while (same < n && same < t->n_tokens[i] && t->tokens[i][same] == tokens[same]) same++;
        if (same > best) best = same;
    }
    return best;
}

static void twin_add(twin *t, const int32_t *tokens, size_t n)
{
    assert_true(t->n < TWIN_MAX);
    memcpy(t->tokens[t->n], tokens, n * sizeof *tokens);
    t->n_tokens[t->n++] = n;
}

/* Some stored prefix, and new tokens of a small alphabet, so that there are many splits. */
static size_t twin_prompt(const twin *t, imp_rng *rng, int32_t *tokens)
{
    size_t n = 0;
    if (t->n > 0 && imp_rng_below(rng, 8) > 0) {
        size_t i = imp_rng_below(rng, t->n);
        n = imp_rng_below(rng, t->n_tokens[i] + 1);
        memcpy(tokens, t->tokens[i], n * sizeof *tokens);
    }
    size_t end = n + 1 + imp_rng_below(rng, imp_rng_below(rng, 3) ? 20 : 150);
    if (end > TWIN_TOKENS) end = TWIN_TOKENS;
    while (n < end) tokens[n++] = (int32_t)imp_rng_below(rng, 3);
    return n;
}

static void twin_compare(const twin *t, imp_world *w, imp_rng *rng, int n)
{
    int32_t tokens[TWIN_TOKENS];
    for (int i = 0; i < n; i++) {
        size_t len = twin_prompt(t, rng, tokens);
        assert_int_equal(imp_world_check(w, tokens, len, true), twin_match(t, tokens, len));
    }
    for (size_t i = 0; i < t->n; i++) {
        assert_int_equal(imp_world_check(w, t->tokens[i], t->n_tokens[i], true), t->n_tokens[i]);
    }
}

static void twin_round(const char *dir, imp_rest rest, int n_ops)
{
    twin *t = calloc(1, sizeof *t);
    imp_world w[2];
    imp_store_opts opts;
    imp_rng rng;
    int32_t tokens[TWIN_TOKENS];
    assert_non_null(t);
    imp_rng_seed(&rng, imp_test_seed() + (uint64_t)rest);
    imp_world_opts(&opts);
    opts.min_store_tokens = 1;
    opts.rest = rest;
    for (int i = 0; i < 2; i++) assert_int_equal(imp_world_open(&w[i], dir, &opts, NULL), 0);
    for (int op = 0; op < n_ops; op++) {
        imp_world *at = &w[imp_rng_below(&rng, 2)];
        size_t n = twin_prompt(t, &rng, tokens), known = twin_match(t, tokens, n);
        if (imp_rng_below(&rng, 20) == 0) {
            imp_world_close(at);
            assert_int_equal(imp_world_open(at, dir, &opts, NULL), 0);
        }
        assert_int_equal(imp_world_check(at, tokens, n, true), known);
        bool staged;
        size_t first_new = imp_rng_below(&rng, 3) ? known : imp_rng_below(&rng, known + 1);
        if (rest == IMP_REST_Q8) first_new = 0; /* else what follows on rounded rows is derived */
        assert_int_equal(imp_world_commit(at, tokens, n, first_new, 0, &staged), 0);
        assert_int_equal(staged, n > known);
        assert_int_equal(imp_store_flush(at->store), 0);
        if (staged) twin_add(t, tokens, n);
        assert_int_equal(imp_world_check(&w[imp_rng_below(&rng, 2)], tokens, n, true), n);
    }
    for (int i = 0; i < 2; i++) twin_compare(t, &w[i], &rng, 30);
    assert_int_equal(imp_world_verify(&w[1], false, true), 0);
    imp_stats before = stats_of(&w[0]);
    assert_int_equal(imp_world_rebuild(dir), IMP_E_BUSY);
    for (int i = 0; i < 2; i++) imp_world_close(&w[i]);

    assert_int_equal(imp_world_rebuild(dir), 0);
    assert_int_equal(imp_world_open(&w[0], dir, &opts, NULL), 0);
    imp_stats after = stats_of(&w[0]);
    assert_int_equal(after.n_tokens, before.n_tokens);
    assert_int_equal(after.n_nodes, before.n_nodes);
    assert_int_equal(after.n_segments, before.n_segments);
    twin_compare(t, &w[0], &rng, 30);
    assert_int_equal(imp_world_verify(&w[0], false, true), 0);
    imp_world_close(&w[0]);
    free(t);
}

static void twin_raw(void **state) { twin_round(*state, IMP_REST_RAW, 60); }

static void twin_q8(void **state) { twin_round(*state, IMP_REST_Q8, 40); }

/* ---- exact and derived */

static void derived_apart(void **state)
{
    imp_world w;
    int32_t a[160], b[160];
    sequence(a, 160, 1);
    sequence(b, 160, 1);
    b[120] = 9999;
    assert_int_equal(imp_world_open(&w, *state, NULL, NULL), 0);
    assert_int_equal(imp_world_commit(&w, a, 64, 0, 0, NULL), 0);
    assert_int_equal(imp_world_commit(&w, a, 160, 64, IMP_COMMIT_DERIVED, NULL), 0);
    assert_int_equal(imp_world_commit(&w, b, 160, 120, IMP_COMMIT_DERIVED, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&w, a, 160, true), 64);
    assert_int_equal(imp_world_check(&w, a, 160, false), 160);
    assert_int_equal(imp_world_check(&w, b, 160, false), 160);
    /* exact below derived: there is nothing exact to hang it on */
    assert_int_equal(imp_world_commit(&w, a, 160, 120, 0, NULL), IMP_E_STALE);
    /* exact takes the place */
    assert_int_equal(imp_world_commit(&w, a, 140, 64, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&w, a, 160, true), 140);
    assert_int_equal(imp_world_check(&w, b, 160, false), 120);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    /* derived below exact; and derived never in exact's place */
    assert_int_equal(imp_world_commit(&w, b, 160, 100, IMP_COMMIT_DERIVED, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&w, b, 160, false), 160);
    assert_int_equal(imp_world_check(&w, b, 160, true), 120);
    imp_world_close(&w);
    assert_int_equal(imp_world_rebuild(*state), 0);
    assert_int_equal(imp_world_open(&w, *state, NULL, NULL), 0);
    assert_int_equal(imp_world_check(&w, b, 160, false), 160);
    assert_int_equal(imp_world_check(&w, b, 160, true), 120);
    imp_world_close(&w);
}

/* What an engine computed over rounded rows isn't exact, whatever it says. What it computed from the start on is. */
static void rounded_makes_derived(void **state)
{
    imp_world w;
    imp_store_opts opts;
    int32_t a[300];
    sequence(a, 300, 1);
    imp_world_opts(&opts);
    opts.rest = IMP_REST_Q8;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    assert_int_equal(imp_world_commit(&w, a, 100, 0, 0, NULL), 0); /* two segments, both exact */
    assert_int_equal(imp_world_commit(&w, a, 200, 100, 0, NULL), 0); /* its parent may wait to be written still */
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&w, a, 200, true), 100);
    assert_int_equal(imp_world_check(&w, a, 200, false), 200);
    imp_world_close(&w);

    opts.rest = IMP_REST_RAW; /* the parent's rows are rounded nevertheless; here its header has not been read yet */
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    assert_int_equal(imp_world_commit(&w, a, 300, 100, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&w, a, 300, true), 100);
    assert_int_equal(imp_world_check(&w, a, 300, false), 300);
    assert_int_equal(imp_world_commit(&w, a, 300, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&w, a, 300, true), 300);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
}

/* ---- the size limit */

static void limit_as_du_counts(void **state)
{
    imp_world w;
    imp_store_opts opts;
    imp_rng rng;
    int32_t hot[200], tokens[200];
    imp_world_opts(&opts);
    opts.limit_bytes = 2 << 20;
    imp_rng_seed(&rng, imp_test_seed());
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    sequence(hot, 200, 1);
    uint64_t most = 0, header_bytes;
    imp_path in_use;
    assert_int_equal(imp_world_commit(&w, hot, 200, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_store_match(w.store, w.space->id, hot, 200, true, &in_use, &header_bytes), 0);
    assert_int_equal(in_use.n_tokens, 200);
    for (int i = 0; i < 60; i++) {
        size_t n = 64 + imp_rng_below(&rng, 136);
        for (size_t j = 0; j < n; j++) tokens[j] = (int32_t)(1000 * (i + 1) + (int)j);
        assert_int_equal(imp_world_commit(&w, tokens, n, 0, 0, NULL), 0);
        assert_int_equal(imp_store_flush(w.store), 0);
        /* the newest is there, as a whole */
        assert_int_equal(imp_world_check(&w, tokens, n, true), n);
        assert_int_equal(imp_world_check(&w, tokens, n, true), n); /* used as often as the first one */
        if (i == 0) {
            imp_stats st = stats_of(&w);
            assert_true(st.n_nodes > 3);
        }
        uint64_t du = imp_world_du(*state);
        if (du > most) most = du;
        if (i == 20) { /* what is in use stays, also where it is the oldest */
            assert_int_equal(imp_world_check(&w, hot, 200, true), 200);
            imp_store_unpin(w.store, &in_use);
            usleep(1100000); /* uses are told apart by the second: what comes now is newer */
        }
        assert_in_range(du, 0, opts.limit_bytes);
    }
    imp_stats st = stats_of(&w);
    assert_true(st.evicted_nodes > 20);
    assert_true(st.evicted_bytes > 1 << 20);
    assert_true(most > opts.limit_bytes / 2); /* and it is used */
    assert_int_equal(imp_world_check(&w, hot, 200, true), 0);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    assert_int_equal(imp_world_check(&w, tokens, 64, true), 64);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
}

static int pin_first(const imp_node_info *node, void *user)
{
    if (node->first_token == 0) *(uint64_t *)user = node->id;
    return 0;
}

static int count_pins(const imp_node_info *node, void *user)
{
    *(int *)user += node->pinned;
    return 0;
}

static void pins_and_larger_than_the_limit(void **state)
{
    imp_world w;
    imp_store_opts opts;
    int32_t tokens[4000];
    uint64_t id = 0;
    imp_world_opts(&opts);
    opts.limit_bytes = 1 << 20;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    sequence(tokens, 4000, 1);
    assert_int_equal(imp_world_commit(&w, tokens, 64, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_store_list(w.store, pin_first, &id), 0);
    assert_int_equal(imp_store_pin(w.store, id, 1), 0);
    assert_int_equal(imp_store_pin(w.store, id + 1000, 1), IMP_E_NOTFOUND);
    /* 2 MB into 1 MiB */
    assert_int_equal(imp_world_commit(&w, tokens, 4000, 64, 0, NULL), IMP_E_FULL);
    /* it fits by itself, and not beside the rest: what can be kept is, up to where no room can be made */
    assert_int_equal(imp_world_commit(&w, tokens, 2000, 64, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), IMP_E_FULL);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_in_range(imp_world_check(&w, tokens, 4000, true), 64, 1999);
    assert_in_range(imp_world_du(*state), 0, opts.limit_bytes);
    for (int i = 1; i < 20; i++) {
        sequence(tokens + 100, 100, 100000 * i);
        assert_int_equal(imp_world_commit(&w, tokens + 100, 100, 0, 0, NULL), 0);
    }
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_true(imp_world_check(&w, tokens, 64, true) == 64);
    assert_int_equal(imp_store_remove(w.store, 0), 0);
    assert_int_equal(stats_of(&w).n_nodes, 0);
    assert_int_equal(stats_of(&w).n_segments, 0);
    assert_int_equal(imp_store_remove(w.store, 77), IMP_E_NOTFOUND);
    imp_gc_report r;
    assert_int_equal(imp_store_gc(w.store, &r), 0);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
}

/* A pinned node that others split is several pinned nodes: one call frees them all, and no other's pin. */
static void unpinned_after_splits(void **state)
{
    enum { N = 64 };
    imp_world w;
    int32_t tokens[N];
    uint64_t id = 0;
    int n_pins = 0;
    assert_int_equal(imp_world_open(&w, *state, NULL, NULL), 0);
    sequence(tokens, N, 1);
    assert_int_equal(imp_world_commit(&w, tokens, N, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_store_list(w.store, pin_first, &id), 0);
    assert_int_equal(imp_store_pin(w.store, id, 1), 0);
    for (int i = 0; i < 3; i++) { /* leave it after 45, 30 and 15 tokens, each from a segment of its own */
        sequence(tokens + 45 - 15 * i, N - 45 + 15 * (size_t)i, 1000 * (i + 1));
        assert_int_equal(imp_world_commit(&w, tokens, N, 0, 0, NULL), 0);
        assert_int_equal(imp_store_flush(w.store), 0);
    }
    imp_lease *lease;
    imp_prefix_info info;
    assert_int_equal(imp_prefix_acquire(w.space, tokens, N, 0, &lease, &info), 0);
    imp_lease_release(lease);
    assert_int_equal(imp_store_pin(w.store, info.node, 1), 0); /* the last that came, by itself */
    assert_int_equal(imp_store_list(w.store, count_pins, &n_pins), 0);
    assert_int_equal(n_pins, 5);
    for (int again = 0; again < 2; again++) {
        assert_int_equal(imp_store_pin(w.store, id, 0), 0);
        n_pins = 0;
        assert_int_equal(imp_store_list(w.store, count_pins, &n_pins), 0);
        assert_int_equal(n_pins, 1);
        imp_world_close(&w);
        if (again) assert_int_equal(imp_world_rebuild(*state), 0); /* what is pinned stays so in a new catalogue */
        assert_int_equal(imp_world_open(&w, *state, NULL, NULL), 0);
    }
    n_pins = 0;
    assert_int_equal(imp_store_list(w.store, count_pins, &n_pins), 0);
    assert_int_equal(n_pins, 1);
    imp_world_close(&w);
}

static int copy_segment(const imp_node_info *node, void *user)
{
    const char *const *dirs = user;
    char command[1024];
    snprintf(command, sizeof command, "cp '%s/segments/%016llx.seg' '%s/segments/'", dirs[0],
             (unsigned long long)node->segment, dirs[1]);
    return system(command) == 0 ? 0 : -1;
}

static void count_leftovers(const imp_finding *finding, void *user) { *(int *)user += finding->leftover; }

/* A whole segment without a row (its process was killed before the catalogue knew) is taken in; pins stay. */
static void orphans_are_taken_in(void **state)
{
    imp_world w;
    int32_t tokens[128];
    uint64_t id = 0;
    const char *dirs[2] = {imp_test_path(*state, "a"), imp_test_path(*state, "b")};
    sequence(tokens, 128, 1);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(imp_world_open(&w, dirs[i], NULL, NULL), 0);
        tokens[0] = i;
        assert_int_equal(imp_world_commit(&w, tokens, 128, 0, 0, NULL), 0);
        assert_int_equal(imp_store_flush(w.store), 0);
        if (i == 1) {
            assert_int_equal(imp_store_list(w.store, pin_first, &id), 0);
            assert_int_equal(imp_store_pin(w.store, id, 1), 0);
        }
        imp_world_close(&w);
    }
    assert_int_equal(imp_world_open(&w, dirs[0], NULL, NULL), 0);
    assert_int_equal(imp_store_list(w.store, copy_segment, dirs), 0);
    imp_world_close(&w);
    assert_int_equal(imp_world_open(&w, dirs[1], NULL, NULL), 0);
    int n_pins = 0;
    assert_int_equal(imp_store_list(w.store, count_pins, &n_pins), 0);
    assert_int_equal(n_pins, 1);
    assert_int_equal(stats_of(&w).catalogue_rebuilds, 1);
    for (int i = 0; i < 2; i++) {
        tokens[0] = i;
        assert_int_equal(imp_world_check(&w, tokens, 128, true), 128);
    }
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    /* while another one has the store open it is left over: verify names it, which is no finding, and gc takes it */
    assert_int_equal(imp_store_remove(w.store, 0), 0);
    imp_world other;
    assert_int_equal(imp_world_open(&other, dirs[0], NULL, NULL), 0);
    assert_int_equal(imp_store_list(other.store, copy_segment, dirs), 0);
    imp_world_close(&other);
    write_file(imp_test_path(dirs[1], "segments/hello"), "x");
    int n_left = 0;
    assert_int_equal(imp_store_verify(w.store, 0, count_leftovers, NULL, &n_left), 1);
    assert_int_equal(n_left, 2);
    imp_gc_report r;
    assert_int_equal(imp_store_gc(w.store, &r), 0);
    assert_int_equal(r.removed_files, 2);
    assert_true(r.freed_bytes > 0);
    assert_int_equal(imp_world_verify(&w, true, false), 1); /* not of a store's making: only repair takes it */
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
}

/* A segment of a later version: never dropped, never used. */
static void newer_segments_stay(void **state)
{
    imp_world w;
    int32_t tokens[64];
    unsigned char header[IMP_SEG_FIXED_BYTES];
    glob_t found;
    const char *dir = imp_test_path(*state, "store");
    sequence(tokens, 64, 1);
    assert_int_equal(imp_world_open(&w, dir, NULL, NULL), 0);
    assert_int_equal(imp_world_commit(&w, tokens, 64, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    imp_world_close(&w);
    assert_int_equal(glob(imp_test_path(dir, "segments/*.seg"), 0, NULL, &found), 0);
    int fd = open(found.gl_pathv[0], O_RDWR);
    assert_int_equal(pread(fd, header, sizeof header, 0), sizeof header);
    imp_put32(header + 8, IMP_FORMAT_VERSION + 1); /* docs/format.md */
    imp_put64(header + sizeof header - 8, imp_hash64(header, sizeof header - 8, 0));
    assert_int_equal(pwrite(fd, header, sizeof header, 0), sizeof header);
    close(fd);
    assert_int_equal(imp_world_open(&w, dir, NULL, NULL), 0);
    for (int i = 0; i < 2; i++) assert_int_equal(imp_world_check(&w, tokens, 64, true), 0);
    assert_int_equal(stats_of(&w).n_segments, 1);
    imp_world_close(&w);
    assert_int_equal(imp_world_rebuild(dir), IMP_E_VERSION);
    assert_int_equal(unlink(imp_test_path(dir, "catalogue.db")), 0);
    assert_int_equal(imp_world_open(&w, dir, NULL, NULL), IMP_E_VERSION);
    assert_int_equal(access(found.gl_pathv[0], F_OK), 0);
    globfree(&found);
}

/* ---- what begin and finish refuse */

static void refusals(void **state)
{
    imp_world w;
    imp_store_opts opts;
    imp_commit *c, *d;
    int32_t tokens[64];
    unsigned char row[WORLD_ROW] = {0};
    imp_world_opts(&opts);
    opts.backlog_bytes = 64 * 2 * WORLD_LAYERS * WORLD_ROW;
    sequence(tokens, 64, 5);
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    assert_int_equal(imp_space_token_bytes(w.space), 2 * WORLD_LAYERS * WORLD_ROW);
    assert_int_equal(imp_commit_begin(w.space, tokens, 3, 4, 0, &c), IMP_E_ARG);
    assert_int_equal(imp_commit_begin(w.space, tokens, 64, 0, 99, &c), IMP_E_ARG);
    assert_int_equal(imp_commit_begin(w.space, tokens, 0, 0, 0, &c), 0);
    assert_null(c);
    assert_int_equal(imp_commit_begin(w.space, tokens, 3, 0, 0, &c), 0);
    assert_null(c);
    assert_int_equal(imp_commit_begin(w.space, tokens, 64, 30, 0, &c), IMP_E_STALE); /* the tokens before */
    assert_int_equal(imp_commit_begin(w.space, tokens, 64, 0, 0, &c), 0);
    assert_non_null(c);
    assert_int_equal(imp_commit_begin(w.space, tokens, 64, 0, 0, &d), IMP_E_BUSY); /* the backlog */
    assert_null(d);
    assert_int_equal(imp_commit_rows(c, WORLD_LAYERS, 0, 1, row, WORLD_ROW, row, WORLD_ROW), IMP_E_ARG);
    assert_int_equal(imp_commit_rows(c, 0, 64, 1, row, WORLD_ROW, row, WORLD_ROW), IMP_E_ARG);
    assert_int_equal(imp_commit_rows(c, 0, 0, 65, row, 0, row, 0), IMP_E_ARG);
    assert_int_equal(imp_commit_rows(c, 0, 0, 2, row, WORLD_ROW - 1, row, WORLD_ROW), IMP_E_ARG);
    assert_int_equal(imp_commit_rows(c, 0, 0, 2, row, WORLD_ROW, row, WORLD_ROW - 1), IMP_E_ARG);
    for (size_t i = 0; i < 64; i++) assert_int_equal(imp_commit_rows(c, 0, i, 1, row, 0, row, 0), 0);
    assert_int_equal(imp_commit_finish(c), IMP_E_ARG); /* layer 1 is missing */
    assert_int_equal(imp_commit_begin(w.space, tokens, 64, 0, 0, &c), 0);
    assert_non_null(c);
    imp_commit_cancel(c);
    assert_int_equal(stats_of(&w).commits_refused, 2);
    assert_int_equal(stats_of(&w).commits, 0);
    imp_world_close(&w);
}

static void nothing_given(void **state)
{
    imp_world w;
    int32_t tokens[8] = {0};
    char id[33] = "x";
    imp_store *store;
    imp_space *space;
    imp_commit *c;
    imp_stats st;
    imp_hash128 hash;
    unsigned char row[WORLD_ROW] = {0};
    const imp_space_desc desc = {.struct_bytes = sizeof desc, .engine = "e"};
    assert_int_equal(imp_world_open(&w, *state, NULL, NULL), 0);
    assert_int_equal(imp_store_open(imp_test_path(*state, "s"), NULL, NULL), IMP_E_ARG);
    assert_int_equal(imp_store_open(NULL, NULL, &store), IMP_E_ARG);
    assert_int_equal(imp_store_flush(NULL), IMP_E_ARG);
    assert_int_equal(imp_store_fingerprint(NULL, "/x", &hash), IMP_E_ARG);
    assert_int_equal(imp_store_fingerprint(w.store, NULL, &hash), IMP_E_ARG);
    assert_int_equal(imp_store_fingerprint(w.store, "/x", NULL), IMP_E_ARG);
    assert_int_equal(imp_store_stats(NULL, &st), IMP_E_ARG);
    assert_int_equal(imp_store_stats(w.store, NULL), IMP_E_ARG);
    assert_int_equal(imp_store_list(NULL, NULL, NULL), IMP_E_ARG);
    assert_int_equal(imp_store_list(w.store, NULL, NULL), IMP_E_ARG);
    assert_int_equal(imp_store_verify(NULL, 0, NULL, NULL, NULL), IMP_E_ARG);
    assert_int_equal(imp_store_verify(w.store, 0, NULL, NULL, NULL), 0);
    assert_int_equal(imp_store_rebuild(NULL), IMP_E_ARG);
    assert_int_equal(imp_store_remove(NULL, 0), IMP_E_ARG);
    assert_int_equal(imp_store_pin(NULL, 1, 1), IMP_E_ARG);
    assert_int_equal(imp_store_gc(NULL, NULL), IMP_E_ARG);
    assert_int_equal(imp_store_gc(w.store, NULL), 0);
    assert_int_equal(imp_space_open(NULL, &desc, &space), IMP_E_ARG);
    assert_int_equal(imp_space_open(w.store, NULL, &space), IMP_E_ARG);
    assert_int_equal(imp_space_open(w.store, &desc, NULL), IMP_E_ARG);
    assert_int_equal(imp_space_token_bytes(NULL), 0);
    imp_space_id(NULL, id);
    assert_string_equal(id, "");
    imp_space_id(w.space, NULL);
    imp_space_close(NULL);
    assert_int_equal(imp_commit_begin(NULL, tokens, 8, 0, 0, &c), IMP_E_ARG);
    assert_int_equal(imp_commit_begin(w.space, NULL, 8, 0, 0, &c), IMP_E_ARG);
    assert_int_equal(imp_commit_begin(w.space, tokens, 8, 0, 0, NULL), IMP_E_ARG);
    assert_int_equal(imp_commit_rows(NULL, 0, 0, 1, row, WORLD_ROW, row, WORLD_ROW), IMP_E_ARG);
    assert_int_equal(imp_commit_finish(NULL), IMP_E_ARG);
    imp_commit_cancel(NULL);
    imp_store_opts_fill(NULL, sizeof(imp_store_opts));
    imp_store_close(NULL);
    imp_world_close(&w);
}

static int only_node(const imp_node_info *node, void *user)
{
    imp_node_info *out = user;
    *out = *node;
    return 0;
}

/* What an engine needs to pin: the space's id, and the node it matched. */
static void space_ids(void **state)
{
    imp_world w;
    int32_t tokens[50];
    imp_node_info node;
    imp_lease *lease;
    imp_prefix_info info;
    char id[33];
    sequence(tokens, 50, 1);
    assert_int_equal(imp_world_open(&w, *state, NULL, NULL), 0);
    assert_int_equal(imp_world_commit(&w, tokens, 50, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_store_list(w.store, only_node, &node), 0);
    imp_space_id(w.space, id);
    assert_string_equal(node.space, id);
    assert_int_equal(imp_prefix_acquire(w.space, tokens, 31, 0, &lease, &info), 0);
    assert_int_equal(info.n_matched, 30);
    assert_int_equal(info.node, node.id);
    imp_lease_release(lease);
    assert_int_equal(imp_store_pin(w.store, info.node, 1), 0);
    assert_int_equal(imp_store_list(w.store, only_node, &node), 0);
    assert_true(node.pinned);
    imp_world_close(&w);
}

static char last_line[512];

static void keep_line(imp_log_level level, const char *line, void *user)
{
    (void)level;
    (void)user;
    snprintf(last_line, sizeof last_line, "%s", line);
}

/* An entry that runs out of room keeps its front, and gc says that it can't do more. */
static void room_for_the_front(void **state)
{
    imp_world w;
    imp_store_opts opts;
    static int32_t pinned[2000], tokens[2000];
    imp_lease *lease;
    imp_prefix_info info;
    imp_gc_report report;
    sequence(pinned, 2000, 1);
    sequence(tokens, 2000, 10000);
    imp_world_opts(&opts);
    opts.limit_bytes = 2 << 20;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    assert_int_equal(imp_world_commit(&w, pinned, 2000, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_prefix_acquire(w.space, pinned, 2000, 0, &lease, &info), 0);
    assert_int_equal(imp_store_pin(w.store, info.node, 1), 0);
    imp_lease_release(lease);
    assert_int_equal(imp_store_gc(w.store, &report), 0);

    imp_log_set(keep_line, NULL, IMP_LOG_WARN);
    imp_set_error(0, "as it was");
    assert_int_equal(imp_world_commit(&w, tokens, 2000, 0, 0, NULL), 0);
    assert_string_equal(imp_last_error(), "as it was");
    assert_int_equal(imp_store_flush(w.store), IMP_E_FULL);
    imp_log_set(NULL, NULL, IMP_LOG_WARN);
    int64_t kept = imp_world_check(&w, tokens, 2000, true);
    assert_in_range(kept, 64, 1999);
    char want[64];
    snprintf(want, sizeof want, "%d of 2000 tokens not stored", 2000 - (int)kept);
    assert_non_null(strstr(last_line, want));
    assert_non_null(strstr(imp_last_error(), want));
    imp_world_close(&w);

    opts.limit_bytes = 1 << 20;
    imp_stats before, after;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    for (int i = 0; i < 2; i++) {
        before = stats_of(&w);
        assert_int_equal(imp_store_gc(w.store, &report), IMP_E_FULL);
        after = stats_of(&w);
        assert_int_equal(before.n_nodes - report.evicted_nodes, after.n_nodes);
        assert_int_equal(after.evicted_nodes - before.evicted_nodes, report.evicted_nodes);
        assert_int_equal(report.evicted_nodes, 0); /* opening it did all that can be done */
        assert_true(after.evicted_nodes > 0);
    }
    assert_int_equal(imp_world_check(&w, tokens, 2000, true), 0);
    assert_int_equal(imp_world_check(&w, pinned, 2000, true), 2000);
    assert_int_equal(imp_store_remove(w.store, 0), 0); /* pinned or not */
    assert_int_equal(imp_store_gc(w.store, &report), 0);
    imp_world_close(&w);
}

/* What fails inside of calls that succeed isn't told. */
static void last_error_of_failures(void **state)
{
    imp_world w;
    int32_t tokens[50];
    imp_hash128 hash;
    imp_lease *lease;
    imp_prefix_info info;
    const char *file = imp_test_path(*state, "weights");
    write_file(file, "x");
    sequence(tokens, 50, 1);
    imp_set_error(0, "as it was");
    assert_int_equal(imp_world_open(&w, imp_test_path(*state, "store"), NULL, NULL), 0);
    assert_int_equal(imp_world_commit(&w, tokens, 50, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_store_fingerprint(w.store, file, &hash), 0);
    (void)stats_of(&w);
    assert_int_equal(imp_store_gc(w.store, NULL), 0);
    glob_t segments;
    assert_int_equal(glob(imp_test_path(*state, "store/segments/*.seg"), 0, NULL, &segments), 0);
    assert_int_equal(truncate(segments.gl_pathv[0], 100), 0);
    globfree(&segments);
    imp_world_close(&w);
    assert_int_equal(imp_world_open(&w, imp_test_path(*state, "store"), NULL, NULL), 0);
    assert_int_equal(imp_store_verify(w.store, 0, NULL, NULL, NULL), 1);
    imp_log_set(keep_line, NULL, IMP_LOG_WARN);
    assert_int_equal(imp_prefix_acquire(w.space, tokens, 50, 0, &lease, &info), 0);
    imp_log_set(NULL, NULL, IMP_LOG_WARN);
    assert_null(lease);
    imp_world_close(&w);
    assert_string_equal(imp_last_error(), "as it was");
}

/* A child has none of the store's threads: close must not wait for them, nor touch the parent's files. */
typedef struct gone {
    uint64_t ids[16];
    size_t n;
} gone;

static void note_gone(void *object, uint64_t segment)
{
    gone *g = object;
    if (g->n < 16) g->ids[g->n++] = segment;
}

static void nothing_to_free(void *object) { (void)object; }

/* What hangs on a store hears of segments that go: removed here, by another process, and once more when the last that had
 * one open is done. Not of what is only closed. */
static void gone_segments_are_told(void **state)
{
    imp_world w, other;
    int32_t tokens[64], late[64];
    gone g = {.n = 0};
    imp_path path;
    uint64_t header_bytes, segment;
    sequence(tokens, 64, 100);
    sequence(late, 64, 5000);
    assert_int_equal(imp_world_open(&w, *state, NULL, NULL), 0);
    assert_int_equal(imp_world_open(&other, *state, NULL, NULL), 0);
    imp_store_attach(w.store, &g, nothing_to_free, note_gone);
    assert_int_equal(imp_world_commit(&w, tokens, 64, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_store_match(w.store, w.space->id, tokens, 64, true, &path, &header_bytes), 0);
    assert_int_equal(path.n_spans, 1);
    segment = path.spans[0].segment;
    assert_int_equal(g.n, 0);

    assert_int_equal(imp_store_remove(other.store, 0), 0);
    assert_int_equal(g.n, 0); /* nobody asked yet */
    assert_int_equal(imp_world_check(&w, late, 64, true), 0);
    assert_int_equal(g.n, 1);
    imp_store_unpin(w.store, &path);
    assert_int_equal(g.n, 2);
    assert_true(g.ids[0] == segment && g.ids[1] == segment);

    assert_int_equal(imp_world_commit(&w, late, 64, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_store_match(w.store, w.space->id, late, 64, true, &path, &header_bytes), 0);
    segment = path.spans[0].segment;
    imp_store_unpin(w.store, &path);
    assert_int_equal(g.n, 2);
    assert_int_equal(imp_store_remove(w.store, 0), 0);
    assert_int_equal(g.n, 3);
    assert_true(g.ids[2] == segment);
    imp_world_close(&other);
    imp_world_close(&w);
    assert_int_equal(g.n, 3);
}

static void close_in_a_fork(void **state)
{
    imp_world w;
    int32_t tokens[50];
    int status;
    sequence(tokens, 50, 1);
    assert_int_equal(imp_world_open(&w, *state, NULL, NULL), 0);
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        imp_store_close(w.store);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(imp_world_commit(&w, tokens, 50, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&w, tokens, 50, true), 50);
    imp_world_close(&w);
}

/* Options of callers that were compiled with another header. */
static void options_of_other_versions(void **state)
{
    struct {
        imp_store_opts opts;
        uint64_t more[2];
    } newer;
    imp_store *store;
    const char *dir = imp_test_path(*state, "store");
    memset(&newer, 0xff, sizeof newer);
    imp_store_opts_fill(&newer.opts, sizeof newer);
    assert_int_equal(newer.opts.struct_bytes, sizeof newer);
    assert_int_equal(newer.opts.cache, IMP_CACHE_LRU);
    assert_int_equal(newer.more[0] | newer.more[1], 0);
    assert_int_equal(imp_store_open(dir, &newer.opts, &store), 0);
    imp_store_close(store);
    newer.more[1] = 1;
    assert_int_equal(imp_store_open(dir, &newer.opts, &store), IMP_E_UNSUPPORTED);
    assert_null(store);
    newer.opts.struct_bytes = 40;
    assert_int_equal(imp_store_open(dir, &newer.opts, &store), IMP_E_ARG);
}

/* ---- places where no store can be */

static void bad_places(void **state)
{
    const char *dir = *state;
    imp_store *store;
    imp_store_opts opts;
    const char *file = imp_test_path(dir, "file"), *sub = imp_test_path(dir, "store");
    write_file(file, "x");
    assert_int_equal(imp_store_open(NULL, NULL, &store), IMP_E_ARG);
    assert_int_equal(imp_store_open("", NULL, &store), IMP_E_ARG);
    assert_int_equal(imp_store_open(file, NULL, &store), IMP_E_IO);
    assert_non_null(strstr(imp_last_error(), "not a directory"));
    assert_int_equal(imp_store_open(imp_test_path(dir, "file/x"), NULL, &store), IMP_E_IO);
    assert_int_equal(imp_store_open(imp_test_path(dir, "no/such"), NULL, &store), IMP_E_IO);
    assert_int_equal(imp_store_open(dir, NULL, &store), IMP_E_ARG); /* holds other files */
    imp_store_opts_init(&opts);
    opts.flags = IMP_STORE_MUST_EXIST;
    assert_int_equal(imp_store_open(sub, &opts, &store), IMP_E_NOTFOUND);
    opts.flags = IMP_STORE_READONLY;
    assert_int_equal(imp_store_open(sub, &opts, &store), IMP_E_NOTFOUND);
    opts.flags = 0;
    opts.chunk_tokens = 17;
    assert_int_equal(imp_store_open(sub, &opts, &store), IMP_E_ARG);
    opts.chunk_tokens = 0;
    opts.order = IMP_ORDER_CORE + 1;
    assert_int_equal(imp_store_open(sub, &opts, &store), IMP_E_ARG);
    opts.order = IMP_ORDER_CORE;
    opts.rest = IMP_REST_Q4 + 1;
    assert_int_equal(imp_store_open(sub, &opts, &store), IMP_E_ARG);
    opts.rest = IMP_REST_Q4;
    opts.cache = IMP_CACHE_OF_STORE;
    assert_int_equal(imp_store_open(sub, &opts, &store), IMP_E_ARG);
    opts.cache = IMP_CACHE_AGED;
    opts.keep = 8;
    assert_int_equal(imp_store_open(sub, &opts, &store), IMP_E_ARG);
    opts.keep = 7;
    opts.probe_spread = 2;
    assert_int_equal(imp_store_open(sub, &opts, &store), IMP_E_ARG);
    opts.probe_spread = 1;
    assert_int_equal(access(sub, F_OK), -1); /* nothing was made */

    /* a link to a store is one; a link inside it isn't followed */
    assert_int_equal(imp_store_open(sub, NULL, &store), 0);
    imp_store_close(store);
    const char *link = imp_test_path(dir, "link");
    assert_int_equal(symlink(sub, link), 0);
    assert_int_equal(imp_store_open(link, NULL, &store), 0);
    imp_store_close(store);
    assert_int_equal(rmdir(imp_test_path(sub, "segments")), 0);
    assert_int_equal(mkdir(imp_test_path(dir, "elsewhere"), 0700), 0);
    assert_int_equal(symlink(imp_test_path(dir, "elsewhere"), imp_test_path(sub, "segments")), 0);
    assert_true(imp_store_open(sub, NULL, &store) < 0);
    if (geteuid() != 0) {
        const char *closed = imp_test_path(dir, "closed");
        assert_int_equal(mkdir(closed, 0500), 0);
        assert_int_equal(imp_store_open(imp_test_path(closed, "s"), NULL, &store), IMP_E_PERM);
    }
}

/* Whatever stops an open on its way, an empty directory is empty again, and one that wasn't there isn't. */
static void failed_opens_leave_nothing(void **state)
{
    const char *dir = imp_test_path(*state, "store");
    imp_store *store;
    char remove[512];
    int n_failed = 0;
    snprintf(remove, sizeof remove, "rm -r '%s'", dir);
    imp_test_no_log();
    for (int there = 0; there < 2; there++) {
        uint64_t n_all = 1;
        for (uint64_t nth = 1; nth <= n_all; nth++) {
            if (there) assert_int_equal(mkdir(dir, 0700), 0);
            imp_alloc_fail_at(nth, 0);
            int rc = imp_store_open(dir, NULL, &store);
            n_all = imp_alloc_fail_at(0, 0);
            if (rc == 0) { /* it could do without */
                imp_store_close(store);
                assert_int_equal(system(remove), 0);
                n_all = n_all < nth ? 0 : nth + 1;
                continue;
            }
            assert_int_equal(rc, IMP_E_NOMEM);
            if (there) assert_int_equal(rmdir(dir), 0);
            assert_int_equal(access(dir, F_OK), -1);
            n_all = nth + 1;
            n_failed++;
        }
    }
    assert_true(n_failed > 10);
}

/* Signals are the program's threads' own, although the store's are there when it blocks them. */
static void signals_pass_by(void **state)
{
    imp_world w;
    int32_t tokens[100];
    char path[64], line[256];
    assert_int_equal(imp_world_open(&w, *state, NULL, NULL), 0);
    sequence(tokens, 100, 1);
    assert_int_equal(imp_world_commit(&w, tokens, 100, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&w, tokens, 100, true), 100);
    DIR *tasks = opendir("/proc/self/task");
    assert_non_null(tasks);
    int n_threads = 0;
    for (struct dirent *e; (e = readdir(tasks));) {
        unsigned long long blocked = 0;
        int tid = atoi(e->d_name);
        if (tid == 0 || tid == getpid()) continue;
        snprintf(path, sizeof path, "/proc/self/task/%d/status", tid);
        FILE *f = fopen(path, "r");
        if (!f) continue; /* it has ended meanwhile */
        while (fgets(line, sizeof line, f)) (void)sscanf(line, "SigBlk: %llx", &blocked);
        fclose(f);
        assert_true(blocked >> (SIGTERM - 1) & 1);
        n_threads++;
    }
    closedir(tasks);
    assert_true(n_threads > 0);
    imp_world_close(&w);
}

static void check_modes(const char *dir)
{
    char command[512];
    snprintf(command, sizeof command, "find '%s' -type d ! -perm 0700 -print -o -type f ! -perm 0600 -print | grep .",
             dir);
    assert_int_not_equal(system(command), 0); /* grep found nothing */
}

static void modes_whatever_the_umask(void **state)
{
    static const mode_t masks[] = {0, 0777, 022};
    for (size_t i = 0; i < 3; i++) {
        imp_world w;
        int32_t tokens[64];
        char name[16];
        snprintf(name, sizeof name, "s%zu", i);
        const char *dir = imp_test_path(*state, name);
        sequence(tokens, 64, 1);
        mode_t old = umask(masks[i]);
        int rc = imp_world_open(&w, dir, NULL, NULL);
        if (rc == 0) rc = imp_world_commit(&w, tokens, 64, 0, 0, NULL);
        if (rc == 0) rc = imp_store_flush(w.store);
        umask(old);
        assert_int_equal(rc, 0);
        check_modes(dir);
        imp_world_close(&w);
        check_modes(dir);
    }
}

static void reading_only(void **state)
{
    imp_world w, r;
    imp_store_opts opts;
    int32_t tokens[128];
    bool staged;
    sequence(tokens, 128, 1);
    imp_world_opts(&opts);
    opts.flags = IMP_STORE_READONLY;
    assert_int_equal(imp_world_open(&w, *state, NULL, NULL), 0);
    assert_int_equal(imp_world_commit(&w, tokens, 64, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_open(&r, *state, &opts, NULL), 0);
    assert_int_equal(imp_world_check(&r, tokens, 128, true), 64);
    assert_int_equal(imp_world_commit(&w, tokens, 128, 64, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&r, tokens, 128, true), 128);
    tokens[0] = 7777;
    assert_int_equal(imp_world_commit(&r, tokens, 128, 0, 0, &staged), 0);
    assert_false(staged);
    assert_int_equal(imp_store_remove(r.store, 0), IMP_E_PERM);
    assert_int_equal(imp_store_gc(r.store, NULL), IMP_E_PERM);
    assert_int_equal(imp_world_verify(&r, true, true), IMP_E_PERM);
    assert_int_equal(imp_world_verify(&r, false, true), 0);
    imp_world_close(&r);
    imp_world_close(&w);
}

/* ---- fingerprints */

static void fingerprints(void **state)
{
    imp_world w;
    imp_hash128 a, b;
    const char *path = imp_test_path(*state, "weights");
    assert_int_equal(imp_world_open(&w, imp_test_path(*state, "store"), NULL, NULL), 0);
    assert_int_equal(imp_store_fingerprint(w.store, path, &a), IMP_E_NOTFOUND);
    assert_int_equal(imp_store_fingerprint(w.store, *state, &a), IMP_E_IO);
    assert_int_equal(imp_test_make_file(path, 5 << 20, 1), 0);
    struct timespec old[2] = {{1000, 0}, {1000, 0}};
    for (int i = 0; i < 2; i++) assert_int_equal(imp_store_fingerprint(w.store, path, &a), 0);
    /* one byte, the same size and time stamp */
    assert_int_equal(utimensat(AT_FDCWD, path, old, 0), 0);
    assert_int_equal(imp_store_fingerprint(w.store, path, &b), 0);
    assert_memory_equal(&a, &b, sizeof a);
    int fd = open(path, O_RDWR);
    assert_int_equal(pwrite(fd, "\x7f\x01", 2, 3 << 20), 2);
    close(fd);
    assert_int_equal(utimensat(AT_FDCWD, path, old, 0), 0);
    assert_int_equal(imp_store_fingerprint(w.store, path, &b), 0);
    assert_memory_not_equal(&a, &b, sizeof a);
    imp_world_close(&w);
}

/* ---- spaces */

static void spaces_differ(void **state)
{
    imp_layer_shape layers[2] = {{2, 32, 32}, {2, 32, 32}};
    unsigned char one = 1, two = 2;
    imp_field fields[2] = {{"rope", &one, 1}, {"lora", &two, 1}};
    imp_space_desc base = {.struct_bytes = sizeof base, .engine = "e", .weights = {0, 1}, .type_k = IMP_TYPE_F16,
                           .type_v = IMP_TYPE_F16, .n_layers = 2, .layers = layers, .fields = fields, .n_fields = 2};
    imp_store *store;
    imp_hash128 ids[12];
    int n = 0;
    assert_int_equal(imp_store_open(imp_test_path(*state, "s"), NULL, &store), 0);
    for (int i = 0; i < 12; i++) {
        imp_space_desc d = base;
        imp_layer_shape other[2] = {{2, 32, 32}, {2, 32, 64}};
        imp_field swapped[2] = {{"ropel", &one, 1}, {"ora", &two, 1}};
        imp_space *space;
        if (i == 1) d.weights.lo = 1;
        if (i == 2) d.engine = "e2";
        if (i == 3) d.type_v = IMP_TYPE_BF16;
        if (i == 4) d.layers = other;
        if (i == 5) d.n_layers = 1;
        if (i == 6) d.n_fields = 1;
        if (i == 7) d.fields = swapped;
        if (i == 8) d.salt = "x";
        if (i == 9) d.salt = "y";
        if (i == 10) d.salt = "";        /* as none */
        if (i == 11) d.model_name = "z"; /* not hashed */
        assert_int_equal(imp_space_open(store, &d, &space), 0);
        ids[n++] = space->id;
        imp_space_close(space);
    }
    for (int i = 0; i < 10; i++) {
        for (int j = 0; j < i; j++) assert_memory_not_equal(&ids[i], &ids[j], sizeof ids[i]);
    }
    assert_memory_equal(&ids[0], &ids[10], sizeof ids[0]);
    assert_memory_equal(&ids[0], &ids[11], sizeof ids[0]);
    imp_space *space;
    base.n_layers = 0;
    assert_int_equal(imp_space_open(store, &base, &space), IMP_E_ARG);
    base.n_layers = 2;
    base.layers = NULL;
    assert_int_equal(imp_space_open(store, &base, &space), IMP_E_ARG);
    base.layers = layers;
    base.weights.hi = 0; /* forgotten: models would share KV */
    assert_int_equal(imp_space_open(store, &base, &space), IMP_E_ARG);
    base.weights.hi = 1;
    base.type_k = IMP_TYPE_Q8_0;
    layers[1].head_dim_k = 8;
    assert_int_equal(imp_space_open(store, &base, &space), IMP_E_ARG);
    imp_store_close(store);
}

/* ---- several processes, several threads */

/* Prompts of one family: process p, prompt i share long beginnings with those of other processes. */
static size_t family_prompt(imp_rng *rng, int32_t *tokens)
{
    size_t n = 40 + imp_rng_below(rng, 160);
    uint64_t cut = imp_rng_below(rng, n), who = imp_rng_below(rng, 6);
    for (size_t i = 0; i < n; i++) tokens[i] = (int32_t)(i < cut ? i : 1000 * who + i);
    return n;
}

static int busy_process(const char *dir, uint64_t seed, int n_ops, uint64_t limit)
{
    imp_world w;
    imp_store_opts opts;
    imp_rng rng;
    int32_t tokens[200];
    imp_world_opts(&opts);
    opts.limit_bytes = limit;
    imp_rng_seed(&rng, seed);
    if (imp_world_open(&w, dir, &opts, NULL) < 0) return 10;
    for (int i = 0; i < n_ops; i++) {
        size_t n = family_prompt(&rng, tokens);
        int64_t known = imp_world_check(&w, tokens, n, true);
        if (known < 0) return 11;
        if (imp_world_commit(&w, tokens, n, (size_t)known, 0, NULL) < 0) continue; /* evicted by now */
        if (imp_rng_below(&rng, 4) == 0) (void)imp_store_flush(w.store);
    }
    imp_stats st;
    (void)imp_store_flush(w.store);
    int rc = imp_store_stats(w.store, &st) == 0 && st.corrupt_chunks == 0 && st.io_errors == 0 ? 0 : 12;
    if (rc) {
        fprintf(stderr, "corrupt %llu, io errors %llu, rebuilds %llu\n", (unsigned long long)st.corrupt_chunks,
                (unsigned long long)st.io_errors, (unsigned long long)st.catalogue_rebuilds);
    }
    imp_world_close(&w);
    return rc;
}

static void processes_at_once(void **state)
{
    enum { N = 3 };
    pid_t pids[N];
    for (int p = 0; p < N; p++) {
        pids[p] = fork();
        assert_true(pids[p] >= 0);
        if (pids[p] == 0) _exit(busy_process(*state, imp_test_seed() + (uint64_t)p, 25, 1 << 21));
    }
    for (int p = 0; p < N; p++) {
        int status;
        assert_int_equal(waitpid(pids[p], &status, 0), pids[p]);
        assert_int_equal(status, 0);
    }
    imp_world w;
    assert_int_equal(imp_world_open(&w, *state, NULL, NULL), 0);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    assert_int_equal(stats_of(&w).catalogue_rebuilds, 0);
    imp_world_close(&w);
}

typedef struct thread_work {
    imp_world *w;
    uint64_t seed;
    int rc;
} thread_work;

static void *busy_thread(void *user)
{
    thread_work *t = user;
    imp_rng rng;
    int32_t tokens[200];
    imp_rng_seed(&rng, t->seed);
    for (int i = 0; i < 25 && t->rc == 0; i++) {
        size_t n = family_prompt(&rng, tokens);
        int64_t known = imp_world_check(t->w, tokens, n, true);
        if (known < 0) t->rc = (int)known;
        if (known >= 0) (void)imp_world_commit(t->w, tokens, n, (size_t)known, 0, NULL);
        imp_stats st;
        if (i % 8 == 0 && imp_store_stats(t->w->store, &st) < 0) t->rc = -100;
        if (i % 10 == 9 && imp_store_flush(t->w->store) == IMP_E_IO) t->rc = -101;
        if (i == 15 && imp_world_verify(t->w, false, true) != 0) t->rc = -102;
    }
    return NULL;
}

static void threads_at_once(void **state)
{
    enum { N = 4 };
    pthread_t threads[N];
    thread_work work[N];
    imp_world w;
    imp_store_opts opts;
    imp_world_opts(&opts);
    opts.limit_bytes = 2 << 20;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    for (int i = 0; i < N; i++) {
        work[i] = (thread_work){&w, imp_test_seed() + 100 + (uint64_t)i, 0};
        assert_int_equal(pthread_create(&threads[i], NULL, busy_thread, &work[i]), 0);
    }
    for (int i = 0; i < N; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(work[i].rc, 0);
    }
    (void)imp_store_flush(w.store);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_stats st = stats_of(&w);
    assert_int_equal(st.corrupt_chunks, 0);
    assert_int_equal(st.io_errors, 0);
    imp_world_close(&w);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
#define FAST_TEST(name) cmocka_unit_test_setup_teardown(name, set_up_fast, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(commit_and_reopen),
        FAST_TEST(twin_raw),
        FAST_TEST(twin_q8),
        FAST_TEST(derived_apart),
        FAST_TEST(rounded_makes_derived),
        FAST_TEST(limit_as_du_counts),
        FAST_TEST(pins_and_larger_than_the_limit),
        FAST_TEST(unpinned_after_splits),
        FAST_TEST(orphans_are_taken_in),
        TEST(newer_segments_stay),
        TEST(refusals),
        TEST(nothing_given),
        TEST(space_ids),
        FAST_TEST(room_for_the_front),
        TEST(last_error_of_failures),
        FAST_TEST(gone_segments_are_told),
        TEST(close_in_a_fork),
        TEST(options_of_other_versions),
        TEST(bad_places),
        FAST_TEST(failed_opens_leave_nothing),
        FAST_TEST(signals_pass_by),
        TEST(modes_whatever_the_umask),
        TEST(reading_only),
        TEST(fingerprints),
        TEST(spaces_differ),
        FAST_TEST(processes_at_once),
        FAST_TEST(threads_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
