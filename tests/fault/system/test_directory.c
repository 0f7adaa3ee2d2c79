/* The directory of a store is removed, replaced, unmounted or made read-only while the store is open, and the clock is
 * set: answered as cold or from what is there, never wrong; the fault is named, and caching comes back by itself. */
#include <dirent.h>
#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "fault/preload_faults.h"
#include "support/store_world.h"
#include "support/support.h"

enum { N = 220, NOBODY = 65534, MOST_NODES = 64, YEAR_S = 365 * 86400 };

static char top[256], dir[sizeof top + 8];
static bool can_mount;

static int set_up(void **state)
{
    imp_test_no_log();
    char *made = imp_test_make_fast_dir();
    if (!made) return -1;
    *state = made;
    snprintf(top, sizeof top, "%s", made);
    snprintf(dir, sizeof dir, "%s/store", top);
    return 0;
}

static int tear_down(void **state)
{
    preload_clock(0);
    imp_test_remove_dir(*state);
    return 0;
}

static void run(const char *command)
{
    char line[600];
    snprintf(line, sizeof line, "cd '%s' && %s", top, command);
    assert_int_equal(system(line), 0);
}

static void prompt(int which, int32_t tokens[N])
{
    for (int i = 0; i < N; i++) tokens[i] = which * 1000 + i;
}

static int64_t found(imp_world *w, int which)
{
    int32_t tokens[N];
    prompt(which, tokens);
    int64_t n = imp_world_check(w, tokens, N, true);
    assert_int_not_equal(n, IMP_WORLD_WRONG);
    return n;
}

static int store(imp_world *w, int which)
{
    int32_t tokens[N];
    prompt(which, tokens);
    int64_t n = imp_world_check(w, tokens, N, true);
    if (n < 0) return (int)n;
    int rc = imp_world_commit(w, tokens, N, (size_t)n, 0, NULL);
    return rc < 0 ? rc : imp_store_flush(w->store);
}

/* Requests go on, and some time, a second at most between two tries, entries are stored again. */
static void comes_back(imp_world *w, int which)
{
    for (int tries = 0; tries < 600 && (store(w, which) < 0 || found(w, which) != N); tries++) usleep(50000);
    assert_int_equal(found(w, which), N);
    assert_int_equal(imp_store_faults(w->store, NULL), 0);
    /* A file that is open is served as long as it is, with its name or without. */
    assert_true(imp_world_verify(w, true, false) >= 0);
    assert_int_equal(imp_world_verify(w, false, true), 0);
    assert_int_equal(found(w, which), N);
    imp_stats st;
    assert_int_equal(imp_store_stats(w->store, &st), 0);
    assert_int_equal(st.disk_bytes, imp_world_du(dir));
}

static void open_with_one(imp_world *w)
{
    assert_int_equal(imp_world_open(w, dir, NULL, NULL), 0);
    assert_int_equal(store(w, 0), 0);
    assert_int_equal(found(w, 0), N);
}

static void close_and_look(imp_world *w, int which)
{
    imp_world_close(w);
    assert_int_equal(imp_world_open(w, dir, NULL, NULL), 0);
    assert_int_equal(found(w, which), N);
    assert_int_equal(imp_world_verify(w, false, true), 0);
    imp_world_close(w);
}

static void removed(void **state)
{
    (void)state;
    static const char *const what[] = {
        "rm -rf store", "rm -rf store/*", "rm -rf store/segments", "rm -f store/catalogue.db*", "rm -f store/lock",
        "rm -rf store/live store/bases",
    };
    for (size_t i = 0; i < sizeof what / sizeof what[0]; i++) {
        imp_world w;
        open_with_one(&w);
        run(what[i]);
        (void)found(&w, 0);
        comes_back(&w, 1);
        (void)found(&w, 0);
        comes_back(&w, 0);
        close_and_look(&w, 1);
        run("rm -rf store");
    }
}

static void replaced(void **state)
{
    (void)state;
    imp_world w;
    open_with_one(&w);
    imp_world_close(&w);
    run("cp -a store other");
    open_with_one(&w);
    assert_int_equal(store(&w, 1), 0);
    run("mv store gone && mv other store");
    for (int tries = 0; tries < 600 && found(&w, 1) != 0; tries++) usleep(50000);
    assert_int_equal(found(&w, 1), 0); /* it isn't in this one */
    comes_back(&w, 0);
    comes_back(&w, 2);
    close_and_look(&w, 2);
    /* and the other way round: by an empty one */
    open_with_one(&w);
    run("mv store away && mkdir store");
    comes_back(&w, 3);
    assert_int_equal(found(&w, 0), 0);
    close_and_look(&w, 3);
}

/* What lies below a mount that is gone is not taken for the store. */
static void unmounted(void **state)
{
    (void)state;
    if (!can_mount) skip();
    imp_world w;
    imp_fault faults[IMP_FAULTS_MAX];
    run("mkdir store");
    assert_int_equal(mount("tmpfs", dir, "tmpfs", 0, "size=8m,mode=700"), 0);
    open_with_one(&w);
    imp_world_close(&w);
    run("cp -a store copy");
    open_with_one(&w);
    assert_int_equal(umount2(dir, MNT_DETACH), 0);
    (void)found(&w, 0);
    assert_true(store(&w, 1) < 0);
    assert_true(imp_store_faults(w.store, faults) > 0);
    assert_int_equal(rmdir(dir), 0); /* nothing was made in it */
    assert_int_equal(mkdir(dir, 0700), 0);
    assert_int_equal(mount("tmpfs", dir, "tmpfs", 0, "size=8m,mode=700"), 0);
    run("cp -a copy/. store");
    comes_back(&w, 1);
    assert_int_equal(found(&w, 0), N);
    close_and_look(&w, 1);
    assert_int_equal(umount2(dir, MNT_DETACH), 0);
}

/* The kernel makes no file system read-only while a store on it is open for writing; one that is made so between two
 * openings can be looked at, and is written to again when it may be. */
static void remounted(void **state)
{
    (void)state;
    if (!can_mount) skip();
    imp_world w;
    imp_store_opts opts;
    run("mkdir store");
    assert_int_equal(mount("tmpfs", dir, "tmpfs", 0, "size=8m,mode=700"), 0);
    open_with_one(&w);
    assert_int_equal(mount("tmpfs", dir, "tmpfs", MS_REMOUNT | MS_RDONLY, NULL), -1);
    assert_int_equal(errno, EBUSY);
    assert_int_equal(store(&w, 1), 0); /* and the try did no harm */
    imp_world_close(&w);

    assert_int_equal(mount("tmpfs", dir, "tmpfs", MS_REMOUNT | MS_RDONLY, NULL), 0);
    assert_int_equal(imp_world_open(&w, dir, NULL, NULL), IMP_E_PERM);
    assert_non_null(strstr(imp_last_error(), strerror(EROFS)));
    imp_world_opts(&opts);
    opts.flags = IMP_STORE_READONLY;
    assert_int_equal(imp_world_open(&w, dir, &opts, NULL), 0);
    assert_int_equal(found(&w, 0), N);
    assert_int_equal(store(&w, 2), 0); /* which stores nothing */
    assert_int_equal(found(&w, 2), 0);
    assert_int_equal(found(&w, 1), N);
    assert_int_equal(imp_store_faults(w.store, NULL), 0);
    imp_world_close(&w);

    assert_int_equal(mount("tmpfs", dir, "tmpfs", MS_REMOUNT, NULL), 0);
    open_with_one(&w);
    assert_int_equal(found(&w, 1), N);
    assert_int_equal(store(&w, 2), 0);
    close_and_look(&w, 2);
    assert_int_equal(umount2(dir, MNT_DETACH), 0);
}

/* By its mode, which root isn't held up by. */
static void read_only(void **state)
{
    (void)state;
    imp_world w;
    imp_stats st;
    imp_fault faults[IMP_FAULTS_MAX];
    bool root = geteuid() == 0;
    if (root && (chown(top, NOBODY, NOBODY) != 0 || seteuid(NOBODY) != 0)) return; /* root of a container of its own */
    open_with_one(&w);
    assert_int_equal(chmod(imp_test_path(dir, "segments"), 0500), 0);
    assert_int_equal(chmod(dir, 0500), 0);
    assert_int_equal(found(&w, 0), N);
    assert_int_equal(store(&w, 1), IMP_E_PERM);
    assert_int_equal(found(&w, 0), N);
    assert_int_equal(imp_store_faults(w.store, faults), 1);
    assert_string_equal(faults[0].what, "write");
    assert_int_equal(faults[0].status, IMP_E_PERM);
    assert_int_equal(imp_store_stats(w.store, &st), 0);
    assert_int_equal(st.io_errors, 1);
    assert_int_equal(chmod(dir, 0700), 0);
    assert_int_equal(chmod(imp_test_path(dir, "segments"), 0700), 0);
    comes_back(&w, 1);
    close_and_look(&w, 1);
    if (root) assert_int_equal(seteuid(0), 0);
}

/* Eviction goes by use. A clock that was ahead must not keep what was used then, nor throw out what was used since. */
static void clock_set(void **state)
{
    (void)state;
    static const int64_t jumps[] = {YEAR_S, -YEAR_S, 20 * YEAR_S};
    for (size_t j = 0; j < sizeof jumps / sizeof jumps[0]; j++) {
        imp_world w;
        imp_stats st;
        imp_store_opts opts;
        imp_world_opts(&opts);
        opts.limit_bytes = 2 << 20;
        opts.segment_tokens = 128;
        assert_int_equal(imp_world_open(&w, dir, &opts, NULL), 0);
        for (int i = 0; i < 16; i++) {
            preload_clock(jumps[j] + i); /* uses are told apart by the second */
            assert_int_equal(store(&w, i), 0);
        }
        for (int i = 40; i < 52; i++) {
            preload_clock(i);
            assert_int_equal(store(&w, i), 0);
            assert_int_equal(found(&w, i), N);
            if (i > 40 && found(&w, i - 1) != N) fail_msg("jump %zu, entry %d", j, i);
        }
        assert_int_equal(found(&w, 51), N); /* as often as the others: that counts, too */
        assert_int_equal(imp_store_stats(w.store, &st), 0);
        assert_true(st.evicted_nodes > 0);
        assert_true(imp_world_du(dir) <= opts.limit_bytes);
        imp_world_close(&w);
        /* and by another one, which has all from the catalogue */
        preload_clock(70);
        assert_int_equal(imp_world_open(&w, dir, &opts, NULL), 0);
        assert_int_equal(store(&w, 70), 0);
        if (found(&w, 51) != N) fail_msg("jump %zu: the last one", j);
        assert_int_equal(imp_world_verify(&w, false, true), 0);
        imp_world_close(&w);
        run("rm -rf store");
    }
}

static int pin_node(const imp_node_info *node, void *user)
{
    uint64_t *nodes = user;
    if (nodes[0] == MOST_NODES) return -1;
    nodes[++nodes[0]] = node->id;
    return 0;
}

/* Entries have an age, and the clock jumps: forward, all that isn't pinned is old; back, nothing is. */
static void clock_set_with_ttl(void **state)
{
    (void)state;
    static const int64_t jumps[] = {YEAR_S, -YEAR_S};
    for (size_t j = 0; j < sizeof jumps / sizeof jumps[0]; j++) {
        bool ahead = jumps[j] > 0;
        imp_world w;
        imp_stats st;
        imp_gc_report gc;
        imp_store_opts opts;
        uint64_t nodes[1 + MOST_NODES] = {0};
        imp_world_opts(&opts);
        opts.ttl_s = 3600;
        preload_clock(0);
        assert_int_equal(imp_world_open(&w, dir, &opts, NULL), 0);
        assert_int_equal(store(&w, 0), 0);
        assert_int_equal(imp_store_list(w.store, pin_node, nodes), 0);
        assert_true(nodes[0] > 0);
        for (uint64_t i = 1; i <= nodes[0]; i++) assert_int_equal(imp_store_pin(w.store, nodes[i], 1), 0);
        for (int i = 1; i < 5; i++) assert_int_equal(store(&w, i), 0);

        preload_clock(jumps[j]);
        assert_int_equal(imp_store_gc(w.store, &gc), 0);
        assert_int_equal(gc.evicted_nodes > 0, ahead);
        for (int i = 0; i < 5; i++) assert_int_equal(found(&w, i), i == 0 || !ahead ? N : 0);
        /* what is used by the new time stays by it */
        assert_int_equal(store(&w, 7), 0);
        assert_int_equal(imp_store_gc(w.store, &gc), 0);
        assert_int_equal(gc.evicted_nodes, 0);
        assert_int_equal(found(&w, 7), N);
        imp_world_close(&w);
        assert_int_equal(imp_world_open(&w, dir, &opts, NULL), 0);
        for (int i = 0; i < 5; i++) assert_int_equal(found(&w, i), i == 0 || !ahead ? N : 0);
        assert_int_equal(found(&w, 7), N);
        imp_world_close(&w);

        /* And set right again. What was used "later" is not older for it. */
        preload_clock(0);
        assert_int_equal(imp_world_open(&w, dir, &opts, NULL), 0);
        assert_int_equal(found(&w, 0), N);
        if (ahead) assert_int_equal(found(&w, 7), N);
        assert_int_equal(store(&w, 8), 0);
        assert_int_equal(found(&w, 8), N);
        assert_int_equal(imp_store_stats(w.store, &st), 0);
        assert_int_equal(st.disk_bytes, imp_world_du(dir));
        assert_int_equal(imp_world_verify(&w, false, true), 0);
        imp_world_close(&w);
        run("rm -rf store");
    }
}

/* A mount of our own, which ends with this process. */
static bool may_mount(void)
{
    return unshare(geteuid() == 0 ? CLONE_NEWNS : CLONE_NEWUSER | CLONE_NEWNS) == 0 &&
           mount("none", "/", "none", MS_REC | MS_PRIVATE, NULL) == 0;
}

int main(void)
{
    bool root = geteuid() == 0;
    can_mount = root && may_mount();
    if (!can_mount) printf("without unmounting: this user may not\n");
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {TEST(removed), TEST(replaced), TEST(unmounted),
                                       TEST(remounted), TEST(read_only), TEST(clock_set), TEST(clock_set_with_ttl)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
