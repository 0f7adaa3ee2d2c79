/* A file system with no byte left: what is stored is served, entries can be removed and evicted all the same, and with
 * the room caching comes back. On a small tmpfs of this process's own; skipped where none can be mounted. */
#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/store_world.h"
#include "support/support.h"

enum { N_TOKENS = 1600, MOST = 40 }; /* a prompt has 800 KiB of rows */

static char disk[256], dir[sizeof disk + 8];

static void prompt(int which, int32_t tokens[N_TOKENS])
{
    for (int i = 0; i < N_TOKENS; i++) tokens[i] = which * 10000 + i;
}

static bool there(const char *name)
{
    struct stat st;
    return stat(imp_test_path(dir, name), &st) == 0 && st.st_blocks > 0;
}

static uint64_t room(void)
{
    struct statvfs v;
    assert_int_equal(statvfs(disk, &v), 0);
    return (uint64_t)v.f_bavail * v.f_bsize;
}

/* Not a byte is left afterwards. */
static void fill(void)
{
    static const char zeros[65536];
    int fd = open(imp_test_path(disk, "filler"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    assert_true(fd >= 0);
    for (size_t n = sizeof zeros; n >= 4096; n /= 2) {
        while (write(fd, zeros, n) == (ssize_t)n) {}
    }
    close(fd);
    assert_int_equal(room(), 0);
}

static void unfill(void) { assert_int_equal(unlink(imp_test_path(disk, "filler")), 0); }

static int store_one(imp_world *w, int which)
{
    int32_t tokens[N_TOKENS];
    prompt(which, tokens);
    int64_t n = imp_world_check(w, tokens, N_TOKENS, true);
    assert_true(n >= 0);
    int rc = imp_world_commit(w, tokens, N_TOKENS, (size_t)n, 0, NULL);
    return rc < 0 ? rc : imp_store_flush(w->store);
}

/* Tokens of all prompts that are found. */
static int64_t found(imp_world *w)
{
    int32_t tokens[N_TOKENS];
    int64_t sum = 0;
    for (int i = 0; i < MOST; i++) {
        prompt(i, tokens);
        int64_t n = imp_world_check(w, tokens, N_TOKENS, true);
        assert_true(n >= 0);
        sum += n;
    }
    return sum;
}

static void check_bytes(imp_world *w)
{
    imp_stats st;
    assert_int_equal(imp_store_stats(w->store, &st), 0);
    assert_int_equal(st.disk_bytes, imp_world_du(dir));
}

static void open_store(imp_world *w, uint64_t limit)
{
    imp_store_opts opts;
    imp_world_opts(&opts);
    opts.segment_tokens = 400;
    opts.limit_bytes = limit;
    int rc = imp_world_open(w, dir, &opts, NULL);
    if (rc < 0) fail_msg("opening: %s", imp_last_error());
}

static void mount_disk(const char *options)
{
    assert_int_equal(mount("tmpfs", disk, "tmpfs", 0, options), 0);
    snprintf(dir, sizeof dir, "%s/store", disk);
}

static void full_and_back(void **state)
{
    (void)state;
    imp_world w;
    imp_stats st;
    imp_fault faults[IMP_FAULTS_MAX];
    int n = 0;
    mount_disk("size=14m");
    open_store(&w, 64 << 20);
    assert_true(there("ballast"));
    check_bytes(&w);
    while (n < MOST && store_one(&w, n) == 0) n++;
    assert_in_range(n, 4, MOST - 2);
    fill();
    assert_int_equal(store_one(&w, n + 1), IMP_E_FULL);
    /* The ballast isn't for new entries, and nothing goes for them. */
    assert_true(there("ballast"));
    assert_int_equal(imp_store_stats(w.store, &st), 0);
    assert_int_equal(st.evicted_nodes, 0);
    int n_faults = imp_store_faults(w.store, faults);
    assert_true(n_faults > 0);
    for (int i = 0; i < n_faults; i++) assert_int_equal(faults[i].status, IMP_E_FULL);
    /* all that was stored is served */
    assert_true(found(&w) >= (int64_t)n * N_TOKENS);
    check_bytes(&w);

    /* removed with nothing left but the ballast; then there is room for both again */
    assert_int_equal(imp_store_remove(w.store, 0), 0);
    assert_int_equal(found(&w), 0);
    assert_true(room() > (uint64_t)n * N_TOKENS * 256);
    assert_int_equal(store_one(&w, 0), 0);
    assert_int_equal(imp_store_faults(w.store, NULL), 0);
    assert_true(there("ballast"));
    check_bytes(&w);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
    unfill();
}

static int first_node(const imp_node_info *node, void *user)
{
    *(uint64_t *)user = node->id;
    return 1;
}

/* The same by somebody who comes when the disk is full already. */
static void opened_on_a_full_disk(void **state)
{
    (void)state;
    imp_world w;
    imp_gc_report gc;
    imp_stats st;
    uint64_t node = 0;
    mount_disk("size=14m");
    open_store(&w, 64 << 20);
    for (int i = 0; i < 8; i++) assert_int_equal(store_one(&w, i), 0);
    imp_world_close(&w);
    fill();

    open_store(&w, 64 << 20);
    assert_true(found(&w) == 8 * N_TOKENS);
    assert_int_equal(imp_store_list(w.store, first_node, &node), 1);
    assert_int_equal(imp_store_remove(w.store, node), 0);
    assert_int_equal(found(&w), 7 * N_TOKENS);
    check_bytes(&w);
    imp_world_close(&w);
    fill();

    /* under a smaller limit opening evicts, or gc if opening couldn't */
    open_store(&w, 4 << 20);
    int rc = imp_store_gc(w.store, &gc);
    if (rc < 0) fail_msg("gc: %s", imp_last_error());
    assert_int_equal(imp_store_stats(w.store, &st), 0);
    assert_true(st.evicted_nodes > 0);
    assert_true(imp_world_du(dir) <= 4 << 20);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
    unfill();
}

/* A store at its limit on a disk that has just this room: each new entry needs others to go. */
static void eviction_on_a_full_disk(void **state)
{
    (void)state;
    imp_world w;
    imp_stats st;
    mount_disk("size=28m");
    open_store(&w, 20 << 20);
    for (int i = 0; i < 24; i++) assert_int_equal(store_one(&w, i), 0);
    assert_int_equal(imp_store_stats(w.store, &st), 0);
    assert_true(st.evicted_nodes > 0);
    fill();
    /* The room that one change frees is the next one's. */
    int n_stored = 0;
    for (int i = 0; i < 4; i++) n_stored += store_one(&w, 30 + i) == 0;
    assert_true(n_stored > 0);
    assert_true(imp_world_du(dir) <= 20 << 20);
    check_bytes(&w);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    unfill();
    assert_int_equal(store_one(&w, 29), 0);
    assert_int_equal(imp_store_faults(w.store, NULL), 0);
    imp_world_close(&w);
}

static int set_up(void **state)
{
    (void)state;
    imp_test_no_log();
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    return umount2(disk, MNT_DETACH);
}

/* A mount of our own, which ends with this process. */
static bool may_mount(void)
{
    if (unshare(geteuid() == 0 ? CLONE_NEWNS : CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    if (mount("none", "/", "none", MS_REC | MS_PRIVATE, NULL) != 0) return false;
    if (mount("tmpfs", disk, "tmpfs", 0, "size=1m") != 0) return false;
    /* A user who isn't mapped can mount it and yet make no file in it. */
    int fd = open(imp_test_path(disk, "file"), O_WRONLY | O_CREAT, 0600);
    if (fd >= 0) close(fd);
    return umount(disk) == 0 && fd >= 0;
}

int main(void)
{
    char *made = imp_test_make_dir(NULL);
    if (!made) return 1;
    snprintf(disk, sizeof disk, "%s", made);
    if (!may_mount()) {
        printf("skipped: this user can't mount a tmpfs of its own\n");
        imp_test_remove_dir(made);
        return 77;
    }
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {TEST(full_and_back), TEST(opened_on_a_full_disk), TEST(eviction_on_a_full_disk)};
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    imp_test_remove_dir(made);
    return rc;
}
