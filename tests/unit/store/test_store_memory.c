/* A store in memory: the flows of a store on disk, its limit, and nothing on disk: no file, not even an open one. */
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/rng.h"
#include "support/store_world.h"
#include "support/support.h"

static size_t n_in(const char *dir)
{
    size_t n = 0;
    DIR *d = opendir(dir);
    assert_non_null(d);
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

static void memory_opts(imp_store_opts *opts)
{
    imp_world_opts(opts);
    opts->flags = IMP_STORE_MEMORY;
    opts->host_cache_bytes = 8 << 20;
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

static int find_node(const imp_node_info *n, void *user)
{
    imp_node_info *found = user;
    if (found->first_token == n->first_token) *found = *n;
    return 0;
}

static void main_flows(imp_store_opts *opts, bool exact)
{
    imp_world w;
    int32_t a[300], b[300];
    bool staged;
    sequence(a, 300, 1000);
    sequence(b, 300, 1000);
    b[90] = 7;
    assert_int_equal(imp_world_open(&w, NULL, opts, NULL), 0);
    size_t n_fds = n_in("/proc/self/fd");
    assert_int_equal(imp_world_check(&w, a, 300, true), 0);
    assert_int_equal(imp_world_commit(&w, a, 200, 0, 0, &staged), 0);
    assert_true(staged);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&w, a, 300, true), 200);
    assert_int_equal(imp_world_commit(&w, a, 200, 0, 0, &staged), 0);
    assert_false(staged);
    assert_int_equal(imp_world_commit(&w, b, 300, 0, 0, NULL), 0); /* leaves a's node half-way */
    assert_int_equal(imp_world_commit(&w, a, 300, exact ? 150 : 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&w, a, 300, true), 300);
    assert_int_equal(imp_world_check(&w, b, 300, true), 300);
    assert_int_equal(imp_world_commit(&w, a + 10, 100, 0, IMP_COMMIT_DERIVED, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&w, a + 10, 100, true), 0);
    assert_int_equal(imp_world_check(&w, a + 10, 100, false), 100);
    assert_int_equal(imp_world_verify(&w, false, true), 0);

    imp_stats st = stats_of(&w);
    assert_string_equal(st.io_mode, "memory");
    assert_int_equal(st.n_tokens, 300 + 210 + 100);
    assert_int_equal(st.disk_bytes + st.bytes_read + st.bytes_written, 0);
    assert_in_range(st.host_bytes, st.kv_bytes, opts->host_cache_bytes + opts->device_cache_bytes);
    assert_int_equal(st.limit_bytes, opts->host_cache_bytes + opts->device_cache_bytes);

    assert_int_equal(imp_store_reorder(w.store, NULL), 0);
    assert_int_equal(imp_world_check(&w, b, 300, true), 300);
    imp_node_info node = {.first_token = 90};
    assert_int_equal(imp_store_list(w.store, find_node, &node), 0);
    assert_true(node.id != 0);
    assert_int_equal(imp_store_pin(w.store, node.id, 1), 0);
    assert_int_equal(imp_store_pin(w.store, node.id, 0), 0);
    assert_int_equal(imp_store_remove(w.store, node.id), 0);
    assert_int_equal(imp_world_check(&w, a, 300, true) + imp_world_check(&w, b, 300, true), 300 + 90);
    imp_gc_report gc;
    assert_int_equal(imp_store_gc(w.store, &gc), 0);
    assert_int_equal(gc.evicted_nodes, 0);
    assert_int_equal(imp_world_verify(&w, true, true), 0);
    assert_int_equal(imp_store_remove(w.store, 0), 0);
    assert_int_equal(imp_world_check(&w, a, 300, false), 0);
    assert_int_equal(stats_of(&w).n_segments, 0);
    assert_int_equal(n_in("/proc/self/fd"), n_fds);
    imp_world_close(&w);
}

static void test_main_flows(void **state)
{
    (void)state;
    imp_store_opts opts;
    size_t n_fds = n_in("/proc/self/fd");
    memory_opts(&opts);
    main_flows(&opts, true);
    opts.host_cache_bytes = 0;
    opts.device_cache_bytes = 8 << 20;
    main_flows(&opts, true);
    imp_world_rich_opts(&opts); /* with maps, sketches and their bases, 8 bits */
    opts.flags = IMP_STORE_MEMORY;
    opts.host_cache_bytes = 4 << 20;
    opts.device_cache_bytes = 4 << 20;
    main_flows(&opts, false);
    assert_int_equal(n_in("/proc/self/fd"), n_fds);
}

/* In an empty directory, with one named that isn't there: all stays as it is. */
static void test_nothing_on_disk(void **state)
{
    (void)state;
    char *dir = imp_test_make_dir(NULL), here[4096];
    imp_store_opts opts;
    imp_world w;
    int32_t a[200];
    sequence(a, 200, 1);
    assert_non_null(dir);
    assert_non_null(getcwd(here, sizeof here));
    assert_int_equal(chdir(dir), 0);
    assert_int_equal(setenv("SQLITE_TMPDIR", dir, 1), 0);
    memory_opts(&opts);
    opts.io_mode = IMP_IO_AUTO;
    for (int named = 0; named < 3; named++) {
        assert_int_equal(imp_world_open(&w, named == 0 ? NULL : named == 1 ? "" : "store", &opts, NULL), 0);
        assert_int_equal(imp_world_commit(&w, a, 200, 0, 0, NULL), 0);
        assert_int_equal(imp_store_flush(w.store), 0);
        assert_int_equal(n_in(dir), 2);
        assert_int_equal(imp_world_check(&w, a, 200, true), 200);
        assert_int_equal(imp_store_gc(w.store, NULL), 0);
        imp_world_close(&w);
        assert_int_equal(n_in(dir), 2);
    }
    assert_int_equal(unsetenv("SQLITE_TMPDIR"), 0);
    assert_int_equal(chdir(here), 0);
    imp_test_remove_dir(dir);
}

static void test_two_opens_are_two(void **state)
{
    (void)state;
    imp_store_opts opts;
    imp_world w[2];
    int32_t a[100];
    sequence(a, 100, 1);
    memory_opts(&opts);
    for (int i = 0; i < 2; i++) assert_int_equal(imp_world_open(&w[i], "same", &opts, NULL), 0);
    assert_int_equal(imp_world_commit(&w[0], a, 100, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w[0].store), 0);
    assert_int_equal(imp_world_check(&w[0], a, 100, true), 100);
    assert_int_equal(imp_world_check(&w[1], a, 100, true), 0);
    for (int i = 0; i < 2; i++) imp_world_close(&w[i]);
    assert_int_equal(imp_world_open(&w[0], "same", &opts, NULL), 0);
    assert_int_equal(imp_world_check(&w[0], a, 100, true), 0); /* gone with the store */
    imp_world_close(&w[0]);
}

/* Never more than the budgets together; what is in use stays, and its bytes too. */
static void test_limit(void **state)
{
    (void)state;
    imp_store_opts opts;
    imp_world w;
    imp_path in_use;
    uint64_t header_bytes, most = 0;
    int32_t hot[200], tokens[200];
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    sequence(hot, 200, 1);
    memory_opts(&opts);
    opts.host_cache_bytes = 1 << 20;
    opts.device_cache_bytes = 1 << 20;
    assert_int_equal(imp_world_open(&w, NULL, &opts, NULL), 0);
    assert_int_equal(imp_world_commit(&w, hot, 200, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_store_match(w.store, w.space->id, hot, 200, true, &in_use, &header_bytes), 0);
    assert_int_equal(in_use.n_tokens, 200);
    for (int i = 0; i < 60; i++) {
        size_t n = 64 + imp_rng_below(&r, 136);
        sequence(tokens, n, 1000 * (i + 1));
        assert_int_equal(imp_world_commit(&w, tokens, n, 0, 0, NULL), 0);
        assert_int_equal(imp_store_flush(w.store), 0);
        assert_int_equal(imp_world_check(&w, tokens, n, true), n);
        imp_stats st = stats_of(&w);
        assert_in_range(st.host_bytes, 0, 2 << 20);
        if (st.host_bytes > most) most = st.host_bytes;
    }
    assert_true(stats_of(&w).evicted_nodes > 20 && most > 1 << 20);
    assert_int_equal(imp_world_check(&w, hot, 200, true), 200);
    assert_int_equal(imp_store_remove(w.store, 0), 0);
    for (size_t i = 0; i < in_use.n_spans; i++) assert_non_null(imp_io_file_at(in_use.spans[i].seg->file, 0, 512));
    imp_store_unpin(w.store, &in_use);
    assert_int_equal(stats_of(&w).host_bytes, 0);
    imp_world_close(&w);
}

static void test_bad_options(void **state)
{
    (void)state;
    imp_store_opts opts;
    imp_store *s;
    memory_opts(&opts);
    opts.flags |= IMP_STORE_READONLY;
    assert_int_equal(imp_store_open(NULL, &opts, &s), IMP_E_ARG);
    opts.flags = IMP_STORE_MEMORY | IMP_STORE_MUST_EXIST;
    assert_int_equal(imp_store_open(NULL, &opts, &s), IMP_E_ARG);
    opts.flags = IMP_STORE_MEMORY;
    opts.host_cache_bytes = 1000; /* too little for anything */
    assert_int_equal(imp_store_open(NULL, &opts, &s), IMP_E_ARG);
    assert_non_null(strstr(imp_last_error(), "tiers of 1000 bytes"));
    opts.host_cache_bytes = 0;
    assert_int_equal(imp_store_open(NULL, &opts, &s), IMP_E_ARG);
    assert_null(s);
    opts.host_cache_bytes = opts.device_cache_bytes = UINT64_MAX;
    assert_int_equal(imp_store_open(NULL, &opts, &s), 0);
    imp_store_close(s);
    opts.flags = 0;
    assert_int_equal(imp_store_open(NULL, &opts, &s), IMP_E_ARG);
}

/* Whatever fails: no more than that what is stored isn't there. */
static void test_no_memory(void **state)
{
    (void)state;
    imp_store_opts opts;
    imp_world w;
    int32_t a[130];
    sequence(a, 130, 1);
    memory_opts(&opts);
    imp_test_count_log("not stored");
    for (uint64_t fail = 1;; fail++) {
        imp_alloc_fail_at(fail, 0);
        int rc = imp_world_open(&w, NULL, &opts, NULL);
        uint64_t n = imp_alloc_fail_at(0, 0);
        if (rc == 0) imp_world_close(&w);
        else assert_int_equal(rc, IMP_E_NOMEM);
        if (n < fail) break;
    }
    for (uint64_t fail = 1;; fail++) {
        assert_int_equal(imp_world_open(&w, NULL, &opts, NULL), 0);
        imp_alloc_fail_at(fail, 0);
        int rc = imp_world_commit(&w, a, 130, 0, 0, NULL);
        if (rc == 0) rc = imp_store_flush(w.store);
        uint64_t n = imp_alloc_fail_at(0, 0);
        assert_true(rc == 0 || rc == IMP_E_NOMEM);
        int64_t known = imp_world_check(&w, a, 130, true);
        assert_true(known >= 0 && (rc < 0 || known == 130 || n >= fail));
        assert_int_equal(imp_world_commit(&w, a, 130, 0, 0, NULL), 0);
        assert_int_equal(imp_store_flush(w.store), 0);
        assert_int_equal(imp_world_check(&w, a, 130, true), 130);
        assert_int_equal(imp_world_verify(&w, false, true), 0);
        imp_world_close(&w);
        if (n < fail) break;
    }
}

/* ---- a naive twin: the sequences that were stored */

enum { TWIN_MAX = 80, TWIN_TOKENS = 200 };

typedef struct twin {
    int32_t tokens[TWIN_MAX][TWIN_TOKENS];
    size_t n_tokens[TWIN_MAX], n;
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

static void test_against_twin(void **state)
{
    (void)state;
    twin *t = calloc(1, sizeof *t);
    imp_store_opts opts;
    imp_world w;
    imp_rng r;
    assert_non_null(t);
    imp_rng_seed(&r, imp_test_seed());
    memory_opts(&opts);
    opts.min_store_tokens = 1;
    opts.host_cache_bytes = 64 << 20;
    assert_int_equal(imp_world_open(&w, NULL, &opts, NULL), 0);
    while (t->n < TWIN_MAX) {
        int32_t *tokens = t->tokens[t->n];
        size_t n = 0;
        if (t->n > 0 && imp_rng_below(&r, 8) > 0) { /* a stored prefix, and new tokens of a small alphabet */
            size_t i = imp_rng_below(&r, t->n);
            n = imp_rng_below(&r, t->n_tokens[i] + 1);
            memcpy(tokens, t->tokens[i], n * sizeof *tokens);
        }
        size_t end = n + 1 + imp_rng_below(&r, imp_rng_below(&r, 3) ? 20 : 120);
        if (end > TWIN_TOKENS) end = TWIN_TOKENS;
        while (n < end) tokens[n++] = (int32_t)imp_rng_below(&r, 3);
        size_t known = twin_match(t, tokens, n);
        assert_int_equal(imp_world_check(&w, tokens, n, true), known);
        assert_int_equal(imp_world_commit(&w, tokens, n, known, 0, NULL), 0);
        assert_int_equal(imp_store_flush(w.store), 0);
        t->n_tokens[t->n++] = n;
    }
    for (size_t i = 0; i < t->n; i++) {
        assert_int_equal(imp_world_check(&w, t->tokens[i], t->n_tokens[i], true), t->n_tokens[i]);
    }
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
    free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_main_flows),
        cmocka_unit_test(test_nothing_on_disk),
        cmocka_unit_test(test_two_opens_are_two),
        cmocka_unit_test(test_limit),
        cmocka_unit_test(test_bad_options),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_against_twin),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
