/* kill -9 at any moment: children store prompts until they are killed, at a chosen operation of the segments' files,
 * at a chosen write or sync of the catalogue, at either of a reorder, or at a random time. After each the next open
 * works, everything that a child knew to be stored is there, the store verifies, and no file is left over.
 * IMP_KILL_ROUNDS: how often (50). */
#include <dirent.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <sqlite3.h>

#include "base/rng.h"
#include "io/io_fault.h"
#include "store/history.h"
#include "support/store_world.h"
#include "support/support.h"

enum { MAX_TOKENS = 220, MAX_KNOWN = 4096 };

typedef enum phase {
    AT_WRITE,
    AT_SYNC,
    AT_RENAME,
    AT_UNLINK,
    AT_CATALOGUE,
    AT_REBUILD,
    AT_BASIS,
    AT_REORDER,           /* any operation of a reorder on files */
    AT_REORDER_CATALOGUE, /* or on the catalogue */
    AT_RANDOM,
    N_PHASES
} phase;

static const char *const phase_names[] = {"write",   "sync",  "rename",  "unlink",                "catalogue",
                                          "rebuild", "basis", "reorder", "a reorder's catalogue", "random"};

/* Among how many operations one is chosen. Writes of the catalogue come by the dozen for each entry; of the others a
 * few. */
static const uint64_t most_ops[] = {12, 12, 12, 12, 80, 30, 12, 100, 100, 12};

/* ---- the catalogue's writes: SQLite's own file system with a hook before each write and sync */

enum { DATABASE, LOG, N_HOOKED };

static const sqlite3_io_methods *real_methods[N_HOOKED];
static sqlite3_io_methods hooked_methods[N_HOOKED];
static sqlite3_vfs hooked_vfs, *real_vfs;
static atomic_long catalogue_ops_left; /* 0: never */

static const sqlite3_io_methods *real_of(const sqlite3_file *f)
{
    if (atomic_fetch_sub(&catalogue_ops_left, 1) == 1) raise(SIGKILL);
    return real_methods[f->pMethods - hooked_methods];
}

static int hooked_write(sqlite3_file *f, const void *bytes, int n, sqlite3_int64 at)
{
    return real_of(f)->xWrite(f, bytes, n, at);
}

static int hooked_sync(sqlite3_file *f, int flags) { return real_of(f)->xSync(f, flags); }

static int hooked_open(sqlite3_vfs *vfs, sqlite3_filename name, sqlite3_file *f, int flags, int *out)
{
    (void)vfs;
    int rc = real_vfs->xOpen(real_vfs, name, f, flags, out);
    int i = flags & SQLITE_OPEN_MAIN_DB ? DATABASE : flags & SQLITE_OPEN_WAL ? LOG : N_HOOKED;
    if (rc != SQLITE_OK || !f->pMethods || i == N_HOOKED) return rc;
    real_methods[i] = f->pMethods;
    hooked_methods[i] = *f->pMethods;
    hooked_methods[i].xWrite = hooked_write;
    hooked_methods[i].xSync = hooked_sync;
    f->pMethods = &hooked_methods[i];
    return rc;
}

static void hook_catalogue(long nth)
{
    real_vfs = sqlite3_vfs_find(NULL);
    hooked_vfs = *real_vfs;
    hooked_vfs.zName = "hooked";
    hooked_vfs.pNext = NULL;
    hooked_vfs.xOpen = hooked_open;
    sqlite3_vfs_register(&hooked_vfs, 1);
    atomic_store(&catalogue_ops_left, nth);
}

/* ---- prompts by seed: many share beginnings */

static size_t prompt(uint64_t seed, int32_t *tokens)
{
    imp_rng rng;
    imp_rng_seed(&rng, seed);
    size_t n = 30 + imp_rng_below(&rng, MAX_TOKENS - 30), cut = imp_rng_below(&rng, n);
    uint64_t family = imp_rng_below(&rng, 4), own = imp_rng_u64(&rng) >> 36;
    for (size_t i = 0; i < n; i++) tokens[i] = (int32_t)(i < cut ? 1000 * family + i : own + i);
    return n;
}

/* ---- reorders, until one of them is killed */

static void add_history(imp_world *w, const int32_t *tokens, size_t n, imp_rng *rng)
{
    imp_path path;
    uint64_t header_bytes;
    float scores[MAX_TOKENS];
    if (imp_store_match(w->store, w->space->id, tokens, n, true, &path, &header_bytes) < 0) _exit(9);
    for (size_t i = 0; i < path.n_spans; i++) {
        imp_history *h;
        if (imp_history_get(w->store, path.spans[i].seg, &h) < 0) _exit(10);
        for (uint32_t l = 0; l < WORLD_LAYERS; l++) {
            for (uint32_t t = 0; t < path.spans[i].n_tokens; t++) scores[t] = (float)imp_rng_unit(rng);
            imp_history_add(h, l, path.spans[i].segment_first, path.spans[i].n_tokens, scores);
        }
        imp_history_put(w->store, h);
    }
    imp_store_unpin(w->store, &path);
}

/* Stores a few prompts, tells of them, then reorders all there is again and again. */
static void reorder_child(const char *dir, imp_rng *rng, phase at, uint64_t nth, int out)
{
    imp_world w;
    imp_store_opts opts;
    int32_t tokens[4][MAX_TOKENS];
    size_t n[4];
    imp_world_rich_opts(&opts);
    opts.rest = IMP_REST_RAW;
    opts.order = imp_rng_below(rng, 2) ? IMP_ORDER_CORE : IMP_ORDER_IMPORTANCE;
    opts.keep ^= imp_rng_below(rng, 2) ? IMP_KEEP_PAIRED : 0;
    if (imp_world_open(&w, dir, &opts, NULL) < 0) _exit(1);
    for (int i = 0; i < 4; i++) {
        uint64_t s = imp_rng_u64(rng);
        n[i] = prompt(s, tokens[i]);
        int64_t there = imp_world_check(&w, tokens[i], n[i], true);
        if (there < 0 || imp_world_commit(&w, tokens[i], n[i], (size_t)there, 0, NULL) < 0) _exit(5);
        if (imp_store_flush(w.store) < 0) _exit(6);
        if (write(out, &s, sizeof s) != sizeof s) _exit(8);
    }
    imp_io_fault f = {.kind = IMP_IO_ALL, .nth = nth, .action = IMP_IO_KILL};
    if (at == AT_REORDER) {
        imp_io_fault_add(&f);
    } else {
        atomic_store(&catalogue_ops_left, (long)nth);
    }
    for (;;) {
        for (int i = 0; i < 4; i++) add_history(&w, tokens[i], n[i], rng);
        if (imp_store_reorder(w.store, NULL) < 0) {
            fprintf(stderr, "child: %s\n", imp_last_error());
            _exit(11);
        }
        for (int i = 0; i < 4; i++) {
            if (imp_world_check(&w, tokens[i], n[i], true) < (int64_t)n[i] - 3) _exit(12);
        }
    }
}

/* ---- a child: stores, and says through `out` which seeds are stored for good */

static void child(const char *dir, uint64_t seed, phase at, uint64_t nth, int n_ops, int out)
{
    static const imp_io_kind kinds[] = {IMP_IO_WRITE, IMP_IO_FSYNC, IMP_IO_RENAME, IMP_IO_UNLINK};
    imp_world w;
    imp_rng rng;
    int32_t tokens[MAX_TOKENS];
    imp_store_opts opts;
    imp_io_fault f = {.nth = nth, .action = IMP_IO_KILL};
    signal(SIGSEGV, SIG_DFL); /* cmocka's handler is the parent's */
    if (at == AT_CATALOGUE || at == AT_REBUILD) hook_catalogue((long)nth);
    if (at == AT_REORDER_CATALOGUE) hook_catalogue(0);
    if (at == AT_REBUILD) {
        (void)unlink(imp_test_path(dir, "catalogue.db"));
        (void)unlink(imp_test_path(dir, "catalogue.db-wal"));
    }
    if (at <= AT_UNLINK) {
        f.kind = kinds[at];
        imp_io_fault_add(&f);
    }
    if (at == AT_BASIS) {
        static const imp_io_kind basis_kinds[] = {IMP_IO_OPEN, IMP_IO_WRITE, IMP_IO_FSYNC, IMP_IO_RENAME};
        f.kind = basis_kinds[nth % 4];
        f.name = ".basis";
        f.nth = f.kind == IMP_IO_OPEN ? 1 + nth % 3 : 1; /* looked for twice, then made */
        imp_io_fault_add(&f);
    }
    /* Some keep all that a store can, but exact, so that what is stored is found by whoever asks. */
    imp_world_opts(&opts);
    if (seed % 2 || at == AT_BASIS) {
        imp_world_rich_opts(&opts);
        opts.rest = IMP_REST_RAW;
    }
    imp_rng_seed(&rng, seed);
    if (at == AT_REORDER || at == AT_REORDER_CATALOGUE) reorder_child(dir, &rng, at, nth, out);
    if (imp_world_open(&w, dir, &opts, NULL) < 0) {
        fprintf(stderr, "child: %s\n", imp_last_error());
        _exit(1);
    }
    for (int i = 0; n_ops == 0 || i < n_ops; i++) {
        uint64_t s = imp_rng_u64(&rng);
        size_t n = prompt(s, tokens);
        int64_t known = imp_world_check(&w, tokens, n, true);
        if (known < 0) _exit(2);
        /* Derived first, sometimes: then exact takes its place, and a file goes. */
        if (at == AT_UNLINK || imp_rng_below(&rng, 4) == 0) {
            if (imp_world_commit(&w, tokens, n, (size_t)known, IMP_COMMIT_DERIVED, NULL) < 0) _exit(3);
            /* Another child's exact entry may have taken its parents' place meanwhile. */
            int rc = imp_store_flush(w.store);
            if (rc < 0 && rc != IMP_E_STALE) _exit(4);
        }
        if (imp_world_commit(&w, tokens, n, (size_t)known, 0, NULL) < 0) {
            fprintf(stderr, "child: %s\n", imp_last_error());
            _exit(5);
        }
        if (imp_store_flush(w.store) < 0) {
            fprintf(stderr, "child: %s\n", imp_last_error());
            _exit(6);
        }
        if (imp_world_check(&w, tokens, n, true) < (int64_t)n - 3) _exit(7); /* a tail under min_store may be missing */
        if (write(out, &s, sizeof s) != sizeof s) _exit(8);
    }
    imp_world_close(&w);
    _exit(0);
}

static pid_t start(const char *dir, uint64_t seed, phase at, uint64_t nth, int n_ops, int *from)
{
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        close(fds[0]);
        child(dir, seed, at, nth, n_ops, fds[1]);
    }
    close(fds[1]);
    *from = fds[0];
    return pid;
}

/* ---- afterwards */

static uint64_t known[MAX_KNOWN];
static size_t n_known;

static void hear(int from)
{
    uint64_t s;
    while (read(from, &s, sizeof s) == (ssize_t)sizeof s) {
        if (n_known < MAX_KNOWN) known[n_known++] = s;
    }
    close(from);
}

static size_t n_files(const char *dir, const char *sub)
{
    size_t n = 0;
    DIR *d = opendir(imp_test_path(dir, sub));
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d)) != NULL;) n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static void look_after(const char *dir, int round, phase at)
{
    imp_world w;
    imp_stats st;
    int32_t tokens[MAX_TOKENS];
    if (imp_world_open(&w, dir, NULL, NULL) < 0) {
        fail_msg("round %d (%s): %s", round, phase_names[at], imp_last_error());
    }
    int64_t n = imp_world_verify(&w, false, true);
    if (n != 0) fail_msg("round %d (%s): %lld findings", round, phase_names[at], (long long)n);
    assert_int_equal(imp_store_stats(w.store, &st), 0);
    assert_int_equal(n_files(dir, "segments"), st.n_segments);
    assert_int_equal(n_files(dir, "live"), 1);
    assert_in_range(n_files(dir, "."), 5, 7); /* segments, bases, live, lock, the catalogue's one to three */
    assert_in_range(n_files(dir, "bases"), 0, 1);
    assert_int_equal(st.corrupt_chunks, 0);
    for (size_t i = 0; i < n_known; i++) {
        size_t len = prompt(known[i], tokens);
        n = imp_world_check(&w, tokens, len, true);
        if (n < (int64_t)len - 3) {
            fail_msg("round %d (%s): %lld of %zu tokens of prompt %zu", round, phase_names[at], (long long)n, len, i);
        }
    }
    imp_world_close(&w);
}

static void quiet(imp_log_level level, const char *line, void *user)
{
    (void)level;
    (void)line;
    (void)user;
}

static void kill_at_any_moment(void **state)
{
    const char *text = getenv("IMP_KILL_ROUNDS");
    int n_rounds = text && *text ? atoi(text) : 50;
    unsigned n_killed[N_PHASES] = {0};
    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed());
    imp_log_set(quiet, NULL, IMP_LOG_ERROR);
    for (int round = 0; round < n_rounds; round++) {
        int from, other_from = -1, status;
        phase at = (phase)(round % N_PHASES);
        uint64_t nth = 1 + imp_rng_below(&rng, most_ops[at]);
        /* A new store now and then keeps this fast. */
        if (n_known > 40 && at != AT_REBUILD && imp_rng_below(&rng, 4) == 0) n_known = 0;
        if (at == AT_BASIS) n_known = 0; /* they are written once in the life of a store */
        if (n_known == 0) {
            char command[512];
            snprintf(command, sizeof command, "rm -rf '%s/store'", (char *)*state);
            assert_int_equal(system(command), 0);
        }
        const char *dir = imp_test_path(*state, "store");
        pid_t pid = start(dir, imp_rng_u64(&rng), at, nth, 0, &from), other = -1;
        if (round % 7 == 4 && at != AT_REBUILD && at != AT_BASIS) {
            other = start(dir, imp_rng_u64(&rng), AT_RANDOM, 0, 4, &other_from);
        }
        if (at == AT_RANDOM) {
            usleep((useconds_t)imp_rng_below(&rng, 60000));
            kill(pid, SIGKILL);
        }
        hear(from);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (!WIFSIGNALED(status)) {
            fail_msg("round %d (%s): the child ended with %d", round, phase_names[at], WEXITSTATUS(status));
        }
        n_killed[at]++;
        if (other > 0) {
            hear(other_from);
            assert_int_equal(waitpid(other, &status, 0), other);
            assert_int_equal(status, 0);
        }
        look_after(dir, round, at);
    }
    for (int i = 0; i < N_PHASES; i++) fprintf(stderr, "killed at %s: %u\n", phase_names[i], n_killed[i]);
    for (int i = 0; i < N_PHASES && n_rounds >= N_PHASES; i++) assert_true(n_killed[i] > 0);
}

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

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(kill_at_any_moment, set_up, tear_down)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
