/* The store through its own calls: what is committed comes back to the byte, the tree is what a naive twin says, also
 * after a reopen and between instances. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/rng.h"
#include "support/store_world.h"
#include "support/support.h"

static int set_up(void **state)
{
    *state = imp_test_make_dir(NULL);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(commit_and_reopen, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
