/* kill -9 at any moment: children store, split, reorder, evict, collect, rebuild and upgrade until they are killed,
 * each before a chosen operation of its kind. After each kill one open is enough: everything that a child knew to be stored
 * is there and right (what an eviction may take: right if it is there), the store verifies, no file is left over, and
 * the bytes that it reports are those on the disk.
 * IMP_KILL_ROUNDS: how often (100). */
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

#include "base/clock.h"
#include "base/rng.h"
#include "io/io_fault.h"
#include "store/history.h"
#include "support/store_world.h"
#include "support/support.h"

enum { MAX_TOKENS = 220, MAX_KNOWN = 4096, LIMIT = 1280 << 10, FILES_ON_THEIR_WAY = 512 << 10 };

typedef enum activity { STORE, SPLIT, REPLACE, BASIS, REORDER, EVICT, GC, REBUILD, UPGRADE, N_ACTIVITIES } activity;

/* Before which operation. SWITCH: one of the catalogue's, in a change that follows a rename: the new file is there, and
 * the change that says so isn't, or isn't whole. RANDOM: whenever it may be. */
typedef enum operation { WRITE, SYNC, RENAME, UNLINK, CATALOGUE, SWITCH, RANDOM, N_OPERATIONS } operation;

static const char *const activity_names[] = {"store",    "split", "replacement", "basis",  "reorder",
                                             "eviction", "gc",    "rebuild",     "upgrade"};
static const char *const operation_names[] = {"write", "sync", "rename", "unlink", "catalogue", "switch", "random"};

/* `most`: among how many operations one is chosen. Writes of the catalogue come by the dozen for each change, of the
 * others there are a few. */
typedef struct phase {
    activity act;
    operation op;
    uint64_t most;
} phase;

static const phase phases[] = {
    {STORE, WRITE, 12},    {STORE, SYNC, 12},      {STORE, RENAME, 12},   {STORE, CATALOGUE, 80}, {STORE, SWITCH, 12},
    {SPLIT, SWITCH, 12},   {REPLACE, UNLINK, 12},  {BASIS, WRITE, 1},     {BASIS, SYNC, 1},       {BASIS, RENAME, 1},
    {REORDER, WRITE, 40},  {REORDER, SYNC, 12},    {REORDER, RENAME, 12}, {REORDER, UNLINK, 12},
    {REORDER, CATALOGUE, 99},
    {REORDER, SWITCH, 12}, {EVICT, WRITE, 24},     {EVICT, UNLINK, 12},   {EVICT, CATALOGUE, 40}, {GC, UNLINK, 8},
    {GC, CATALOGUE, 60},   {REBUILD, UNLINK, 3},   {REBUILD, CATALOGUE, 30},
    {UPGRADE, CATALOGUE, 8}, {STORE, RANDOM, 1},
};

enum { N_PHASES = sizeof phases / sizeof phases[0] };

static const char *phase_name(phase p)
{
    static char name[64];
    snprintf(name, sizeof name, "%s, %s", activity_names[p.act], operation_names[p.op]);
    return name;
}

/* ---- the catalogue's writes: SQLite's own file system with a hook before each write and sync */

enum { DATABASE, LOG, N_HOOKED };

static const sqlite3_io_methods *real_methods[N_HOOKED];
static sqlite3_io_methods hooked_methods[N_HOOKED];
static sqlite3_vfs hooked_vfs, *real_vfs;
static atomic_long catalogue_ops_left; /* 0: never */
static atomic_int rename_rule = -1;    /* if it isn't -1: not before this rule acted */

static const sqlite3_io_methods *real_of(const sqlite3_file *f)
{
    int rule = atomic_load(&rename_rule);
    bool counts = rule < 0 || imp_io_fault_hits(rule) > 0;
    if (counts && atomic_fetch_sub(&catalogue_ops_left, 1) == 1) raise(SIGKILL);
    return real_methods[f->pMethods - hooked_methods];
}

static int hooked_write(sqlite3_file *f, const void *bytes, int n, sqlite3_int64 at)
{
    return real_of(f)->xWrite(f, bytes, n, at);
}

static int hooked_truncate(sqlite3_file *f, sqlite3_int64 n) { return real_of(f)->xTruncate(f, n); }

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
    hooked_methods[i].xTruncate = hooked_truncate;
    hooked_methods[i].xSync = hooked_sync;
    f->pMethods = &hooked_methods[i];
    return rc;
}

static void hook_catalogue(void)
{
    real_vfs = sqlite3_vfs_find(NULL);
    hooked_vfs = *real_vfs;
    hooked_vfs.zName = "hooked";
    hooked_vfs.pNext = NULL;
    hooked_vfs.xOpen = hooked_open;
    sqlite3_vfs_register(&hooked_vfs, 1);
}

/* ---- the kill is prepared, or put off */

static void disarm(void)
{
    atomic_store(&catalogue_ops_left, 0);
    atomic_store(&rename_rule, -1);
    imp_io_fault_clear();
}

/* From now on, before the nth operation. `name`: only of files whose name contains it. */
static void arm(operation op, uint64_t nth, const char *name)
{
    static const imp_io_kind kinds[] = {IMP_IO_WRITE, IMP_IO_FSYNC, IMP_IO_RENAME, IMP_IO_UNLINK};
    disarm();
    if (op <= UNLINK) {
        imp_io_fault f = {.kind = kinds[op], .nth = nth, .action = IMP_IO_KILL, .name = name};
        imp_io_fault_add(&f);
    } else if (op == SWITCH) {
        imp_io_fault f = {.kind = IMP_IO_RENAME, .nth = 1 + nth % 3, .action = IMP_IO_DELAY};
        atomic_store(&rename_rule, imp_io_fault_add(&f));
        atomic_store(&catalogue_ops_left, (long)nth);
    } else if (op == CATALOGUE) {
        atomic_store(&catalogue_ops_left, (long)nth);
    }
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

/* ---- the children. Each goes on until it is killed, and says through `out` which prompts are stored for good. What
 * shouldn't happen ends it with the line's number, and the parent says so. */

typedef struct child {
    const char *dir;
    uint64_t seed;
    phase at;
    uint64_t nth;
    int n_ops; /* 0: until it is killed */
    int out;
    imp_rng rng;
    imp_world w;
} child;

#define DIE_IF(bad)                                                                                                    \
    do {                                                                                                               \
        if (bad) {                                                                                                     \
            fprintf(stderr, "child: line %d: %s\n", __LINE__, imp_last_error());                                       \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

/* Some keep all that a store can, but exact, so that what is stored is found by whoever asks. */
static void child_open(child *c, uint64_t limit)
{
    imp_store_opts opts;
    imp_world_opts(&opts);
    if (c->seed % 2 || c->at.act == BASIS || c->at.act == REORDER) {
        imp_world_rich_opts(&opts);
        opts.rest = IMP_REST_RAW;
        if (c->at.act == REORDER && c->seed % 4 > 1) opts.order = IMP_ORDER_IMPORTANCE;
        if (c->at.act == REORDER && c->seed % 8 > 3) opts.keep ^= IMP_KEEP_PAIRED;
    }
    opts.limit_bytes = limit;
    DIE_IF(imp_world_open(&c->w, c->dir, &opts, NULL) < 0);
}

static void tell(const child *c, uint64_t s) { DIE_IF(write(c->out, &s, sizeof s) != sizeof s); }

/* Store a prompt, exact. With little room a part may stay away. */
static void put(child *c, const int32_t *tokens, size_t n)
{
    int64_t known = imp_world_check(&c->w, tokens, n, true);
    DIE_IF(known < 0 || imp_world_commit(&c->w, tokens, n, (size_t)known, 0, NULL) < 0);
    int rc = imp_store_flush(c->w.store);
    bool little = c->at.act == EVICT || c->at.act == GC;
    DIE_IF(rc < 0 && !(little && (rc == IMP_E_FULL || rc == IMP_E_STALE)));
    int64_t there = imp_world_check(&c->w, tokens, n, true);
    DIE_IF(there < (little ? 0 : (int64_t)n - 3)); /* a tail under min_store may be missing */
}

static void put_derived(child *c, const int32_t *tokens, size_t n)
{
    int64_t known = imp_world_check(&c->w, tokens, n, true);
    DIE_IF(known < 0 || imp_world_commit(&c->w, tokens, n, (size_t)known, IMP_COMMIT_DERIVED, NULL) < 0);
    /* Another child's exact entry may have taken its parents' place meanwhile. */
    int rc = imp_store_flush(c->w.store);
    DIE_IF(rc < 0 && rc != IMP_E_STALE);
}

/* Derived first, sometimes: then exact takes its place, and a file goes. */
static void store(child *c)
{
    int32_t tokens[MAX_TOKENS];
    if (c->at.act == BASIS) {
        arm(c->at.op, c->nth, ".basis");
    } else {
        arm(c->at.op, c->nth, NULL);
    }
    child_open(c, 0);
    for (int i = 0; c->n_ops == 0 || i < c->n_ops; i++) {
        uint64_t s = imp_rng_u64(&c->rng);
        size_t n = prompt(s, tokens);
        if (c->at.act == REPLACE || imp_rng_below(&c->rng, 4) == 0) put_derived(c, tokens, n);
        put(c, tokens, n);
        tell(c, s);
    }
    imp_world_close(&c->w);
    _exit(0);
}

/* Only the change in which a node is split, and where its new neighbour comes in. */
static void split(child *c)
{
    int32_t tokens[MAX_TOKENS];
    child_open(c, 0);
    for (;;) {
        uint64_t s = imp_rng_u64(&c->rng);
        size_t n = prompt(s, tokens);
        int64_t known = imp_world_check(&c->w, tokens, n, true);
        DIE_IF(known < 0);
        /* Where the tokens before it end in the middle of a segment, more than likely of a node. */
        if (known > 0 && known % 64 != 0 && (size_t)known + 8 < n) {
            arm(SWITCH, 3 * (1 + c->nth / 3), NULL); /* of the first rename */
            c->nth = 1 + c->nth / 2;
        }
        put(c, tokens, n);
        disarm();
        tell(c, s);
    }
}

static void add_history(child *c, const int32_t *tokens, size_t n)
{
    imp_path path;
    uint64_t header_bytes;
    float scores[MAX_TOKENS];
    imp_store *s = c->w.store;
    DIE_IF(imp_store_match(s, c->w.space->id, tokens, n, true, &path, &header_bytes) < 0);
    for (size_t i = 0; i < path.n_spans; i++) {
        imp_history *h;
        DIE_IF(imp_history_get(s, path.spans[i].seg, &h) < 0);
        for (uint32_t l = 0; l < WORLD_LAYERS; l++) {
            for (uint32_t t = 0; t < path.spans[i].n_tokens; t++) scores[t] = (float)imp_rng_unit(&c->rng);
            imp_history_add(h, l, path.spans[i].segment_first, path.spans[i].n_tokens, scores);
        }
        imp_history_put(s, h);
    }
    imp_store_unpin(s, &path);
}

/* Stores a few prompts, tells of them, then reorders all there is again and again. */
static void reorder(child *c)
{
    int32_t tokens[4][MAX_TOKENS];
    size_t n[4];
    child_open(c, 0);
    for (int i = 0; i < 4; i++) {
        uint64_t s = imp_rng_u64(&c->rng);
        n[i] = prompt(s, tokens[i]);
        put(c, tokens[i], n[i]);
        tell(c, s);
    }
    arm(c->at.op, c->nth, NULL);
    for (;;) {
        for (int i = 0; i < 4; i++) add_history(c, tokens[i], n[i]);
        DIE_IF(imp_store_reorder(c->w.store, NULL) < 0);
        for (int i = 0; i < 4; i++) DIE_IF(imp_world_check(&c->w, tokens[i], n[i], true) < (int64_t)n[i] - 3);
    }
}

/* Stores more and more under a limit. */
static void evict(child *c)
{
    int32_t tokens[MAX_TOKENS];
    imp_stats st;
    bool armed = false;
    child_open(c, LIMIT);
    for (;;) {
        uint64_t s = imp_rng_u64(&c->rng);
        put(c, tokens, prompt(s, tokens));
        tell(c, s);
        DIE_IF(imp_store_stats(c->w.store, &st) < 0);
        if (!armed && st.evicted_nodes > 0) {
            arm(c->at.op, c->nth, NULL);
            armed = true;
        }
    }
}

/* A store that is over its limit, holds segments of which a part was removed, and files of a killed process: all of it
 * goes, again and again. */
static void gc(child *c)
{
    int32_t tokens[MAX_TOKENS];
    for (;;) {
        child_open(c, 0);
        for (int i = 0; i < 12; i++) {
            uint64_t s = imp_rng_u64(&c->rng);
            put(c, tokens, prompt(s, tokens));
            tell(c, s);
        }
        imp_world_close(&c->w);
        child_open(c, LIMIT / 10 * 8);
        for (int i = 1; i <= 2; i++) {
            char name[64];
            snprintf(name, sizeof name, "segments/%016x.seg%s", i, i == 1 ? ".tmp" : "");
            FILE *f = fopen(imp_test_path(c->dir, name), "w");
            DIE_IF(!f || fputs("not a segment", f) < 0 || fclose(f) != 0);
        }
        arm(c->at.op, c->nth, NULL);
        int rc = imp_store_gc(c->w.store, NULL);
        DIE_IF(rc < 0 && rc != IMP_E_FULL);
        c->nth = 1 + c->nth / 2; /* it may be less work than that */
        disarm();
        imp_world_close(&c->w);
    }
}

/* Makes the catalogue again, from segments of which one may be damaged and goes. */
static void rebuild(child *c)
{
    int32_t tokens[MAX_TOKENS];
    for (;;) {
        child_open(c, 0);
        for (int i = 0; i < 3; i++) {
            uint64_t s = imp_rng_u64(&c->rng);
            put(c, tokens, prompt(s, tokens));
            tell(c, s);
        }
        imp_world_close(&c->w);
        for (int i = 0; i < 3; i++) {
            char name[64];
            snprintf(name, sizeof name, "segments/%016x.seg", i + 1);
            FILE *f = fopen(imp_test_path(c->dir, name), "w");
            DIE_IF(!f || fprintf(f, "%1000s", "not a segment") < 0 || fclose(f) != 0);
        }
        arm(c->at.op, c->nth, NULL);
        DIE_IF(imp_store_rebuild(c->dir) < 0);
        disarm();
        c->nth = 1 + c->nth / 2;
    }
}

/* Opens a catalogue as the first version made it. */
static void upgrade(child *c)
{
    int32_t tokens[MAX_TOKENS];
    for (;;) {
        child_open(c, 0);
        uint64_t s = imp_rng_u64(&c->rng);
        put(c, tokens, prompt(s, tokens));
        tell(c, s);
        imp_world_close(&c->w);
        sqlite3 *db;
        char pragma[96];
        snprintf(pragma, sizeof pragma, "DROP TABLE setting; DROP TABLE history; PRAGMA user_version=%d",
                 (int)(int32_t)(1 | 0xfffe0000u));
        DIE_IF(sqlite3_open(imp_test_path(c->dir, "catalogue.db"), &db) != SQLITE_OK);
        DIE_IF(sqlite3_exec(db, pragma, NULL, NULL, NULL) != SQLITE_OK);
        DIE_IF(sqlite3_close(db) != SQLITE_OK);
        arm(c->at.op, c->nth, NULL);
        child_open(c, 0);
        disarm();
        imp_world_close(&c->w);
        c->nth = 1 + c->nth / 2;
    }
}

static void live(child *c)
{
    signal(SIGSEGV, SIG_DFL); /* cmocka's handler is the parent's */
    imp_rng_seed(&c->rng, c->seed);
    hook_catalogue();
    switch (c->at.act) {
    case SPLIT: split(c); break;
    case REORDER: reorder(c); break;
    case EVICT: evict(c); break;
    case GC: gc(c); break;
    case REBUILD: rebuild(c); break;
    case UPGRADE: upgrade(c); break;
    default: store(c); break;
    }
    _exit(2);
}

static pid_t start(child *c, int *from)
{
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        close(fds[0]);
        c->out = fds[1];
        live(c);
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

static void look_after(const char *dir, int round, phase at, bool in_memory)
{
    imp_world w;
    imp_stats st;
    int32_t tokens[MAX_TOKENS];
    bool loses = at.act == EVICT || at.act == GC;
    uint64_t du = imp_world_du(dir);
    if (at.act == EVICT && du > LIMIT + FILES_ON_THEIR_WAY) {
        fail_msg("round %d (%s): %llu bytes", round, phase_name(at), (unsigned long long)du);
    }
    if (imp_world_open(&w, dir, NULL, NULL) < 0) fail_msg("round %d (%s): %s", round, phase_name(at), imp_last_error());
    int64_t n = imp_world_verify(&w, false, true);
    if (n != 0) fail_msg("round %d (%s): %lld findings", round, phase_name(at), (long long)n);
    assert_int_equal(imp_store_stats(w.store, &st), 0);
    du = imp_world_du(dir);
    /* Beside memory, a file system may still be counting. */
    uint64_t off = st.disk_bytes > du ? st.disk_bytes - du : du - st.disk_bytes;
    if (off > (in_memory ? 0 : 64 << 10)) {
        fail_msg("round %d (%s): %llu bytes reported, %llu there", round, phase_name(at),
                 (unsigned long long)st.disk_bytes, (unsigned long long)du);
    }
    assert_int_equal(n_files(dir, "segments"), st.n_segments);
    assert_int_equal(n_files(dir, "live"), 1);
    assert_in_range(n_files(dir, "."), 6, 8); /* segments, bases, live, lock, ballast, the catalogue's one to three */
    assert_in_range(n_files(dir, "bases"), 0, 1);
    assert_int_equal(st.corrupt_chunks, 0);
    for (size_t i = 0; i < n_known; i++) {
        size_t len = prompt(known[i], tokens);
        n = imp_world_check(&w, tokens, len, true);
        if (n < (loses ? 0 : (int64_t)len - 3)) {
            fail_msg("round %d (%s): %lld of %zu tokens of prompt %zu", round, phase_name(at), (long long)n, len, i);
        }
    }
    imp_world_close(&w);
    if (loses) n_known = 0;
}

static void quiet(imp_log_level level, const char *line, void *user)
{
    (void)level;
    (void)line;
    (void)user;
}

/* Two folders: in memory, where a round is fast and a kill is a kill all the same, and on the disk. */
static char *folders[2];

static void kill_at_any_moment(void **state)
{
    (void)state;
    const char *text = getenv("IMP_KILL_ROUNDS");
    int n_rounds = text && *text ? atoi(text) : 100;
    unsigned by_activity[N_ACTIVITIES] = {0}, by_operation[N_OPERATIONS] = {0}, n_stores = 0;
    char dir[256];
    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed());
    imp_log_set(quiet, NULL, IMP_LOG_ERROR);
    uint64_t started_ns = imp_now_ns();
    for (int round = 0; round < n_rounds; round++) {
        int from, other_from = -1, status;
        phase at = phases[round % N_PHASES];
        child c = {.seed = imp_rng_u64(&rng), .at = at, .nth = 1 + imp_rng_below(&rng, at.most)}, second = {0};
        /* A new store now and then keeps this fast. */
        if (n_known > 40 && imp_rng_below(&rng, 4) == 0) n_known = 0;
        if (at.act == BASIS) n_known = 0; /* they are written once in the life of a store */
        if (n_known == 0) {
            char command[512];
            snprintf(dir, sizeof dir, "%s/store", folders[folders[0] && n_stores++ % 16 != 15 ? 0 : 1]);
            snprintf(command, sizeof command, "rm -rf '%s'", dir);
            assert_int_equal(system(command), 0);
        }
        c.dir = dir;
        bool in_memory = folders[0] && strncmp(dir, folders[0], strlen(folders[0])) == 0;
        pid_t pid = start(&c, &from), other = -1;
        if (at.act <= REPLACE && round % 3 == 1) {
            second = (child){.dir = dir, .seed = imp_rng_u64(&rng), .at = {STORE, RANDOM, 1}, .n_ops = 4};
            other = start(&second, &other_from);
        }
        if (at.op == RANDOM) {
            usleep((useconds_t)imp_rng_below(&rng, 60000));
            kill(pid, SIGKILL);
        }
        hear(from);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) {
            fail_msg("round %d (%s): the child ended by itself, status %d", round, phase_name(at), status);
        }
        by_activity[at.act]++;
        by_operation[at.op]++;
        if (other > 0) {
            hear(other_from);
            assert_int_equal(waitpid(other, &status, 0), other);
            assert_int_equal(status, 0);
        }
        look_after(dir, round, at, in_memory);
    }
    double ms = (double)(imp_now_ns() - started_ns) / 1e6;
    for (int i = 0; i < N_ACTIVITIES; i++) fprintf(stderr, "killed in %s: %u\n", activity_names[i], by_activity[i]);
    for (int i = 0; i < N_OPERATIONS; i++) fprintf(stderr, "killed at %s: %u\n", operation_names[i], by_operation[i]);
    if (n_rounds > 0) fprintf(stderr, "%d rounds, %.1f ms each\n", n_rounds, ms / n_rounds);
    for (int i = 0; i < N_ACTIVITIES && n_rounds >= N_PHASES; i++) assert_true(by_activity[i] > 0);
    for (int i = 0; i < N_OPERATIONS && n_rounds >= N_PHASES; i++) assert_true(by_operation[i] > 0);
}

static int set_up(void **state)
{
    *state = NULL;
    folders[0] = imp_test_make_dir("/dev/shm");
    folders[1] = imp_test_make_dir(NULL);
    return folders[1] ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    imp_test_remove_dir(folders[0]);
    imp_test_remove_dir(folders[1]);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(kill_at_any_moment, set_up, tear_down)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
