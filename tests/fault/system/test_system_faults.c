/* Every call of the operating system on a store's files fails once, SQLite's too, and every allocation that SQLite makes
 * itself: an answer is never wrong, what fails is told, counted and logged, nothing else is lost, and the next open finds
 * a store that verifies. IMP_FAULTS=all: each call; otherwise some of each kind, by the seed. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>
#include <sqlite3.h>

#include "base/rng.h"
#include "fault/preload_faults.h"
#include "support/store_world.h"
#include "support/support.h"

enum { N_OLD = 150, N_NEW = 220, AT = 100, FEW = 2 }; /* new shares AT tokens with old */

static int32_t old[N_OLD], new[N_NEW];
static char base[256], at[256];
static atomic_uint n_lines;

static void count_line(imp_log_level level, const char *line, void *user)
{
    (void)user;
    if (level <= IMP_LOG_WARN && *line) atomic_fetch_add(&n_lines, 1);
}

static int set_up(void **state)
{
    for (int i = 0; i < N_OLD; i++) old[i] = i;
    for (int i = 0; i < N_NEW; i++) new[i] = i < AT ? i : 5000 + i;
    imp_log_set(count_line, NULL, IMP_LOG_WARN);
    *state = imp_test_make_fast_dir();
    if (!*state) return -1;
    snprintf(base, sizeof base, "%s/base", (char *)*state);
    snprintf(at, sizeof at, "%s/at", (char *)*state);
    return 0;
}

static int tear_down(void **state)
{
    preload_watch(NULL, NULL);
    preload_fs(0);
    unsetenv("IMPRESS_ANY_FS");
    imp_test_remove_dir(*state);
    return 0;
}

/* Where a life begins: with a store that has `old` in it, with an empty directory, with none. */
typedef enum start { FROM_BASE, FROM_EMPTY, FROM_NONE } start;

static void begin(start from)
{
    char command[1024];
    if (from == FROM_BASE) snprintf(command, sizeof command, "rm -rf '%s' && cp -a '%s' '%s'", at, base, at);
    if (from != FROM_BASE) snprintf(command, sizeof command, "rm -rf '%s'", at);
    assert_int_equal(system(command), 0);
    if (from == FROM_EMPTY) assert_int_equal(mkdir(at, 0700), 0);
}

static void copy_store(void) { begin(FROM_BASE); }

static void make_base(void)
{
    imp_world w;
    assert_int_equal(imp_world_open(&w, base, NULL, NULL), 0);
    assert_int_equal(imp_world_commit(&w, old, N_OLD, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    imp_world_close(&w);
}

/* What one life of a store told about failures: statuses, with a line each, and findings; counters and faults. `whole`:
 * it went as without any. */
typedef struct told {
    unsigned n_statuses;
    bool counted, whole;
} told;

static void take(told *t, int64_t rc)
{
    assert_int_not_equal(rc, IMP_WORLD_WRONG);
    if (rc < 0) {
        t->n_statuses++;
        assert_true(*imp_last_error() != '\0');
    }
}

/* Open, match, load, commit, evict, gc, verify, close. */
static told live(start from)
{
    told t = {0, false, true};
    imp_world w;
    imp_stats st;
    imp_gc_report gc;
    int rc = imp_world_open(&w, at, NULL, NULL);
    take(&t, rc);
    t.whole = rc == 0;
    if (rc < 0) return t;
    if (from != FROM_BASE) {
        take(&t, imp_world_commit(&w, old, N_OLD, 0, 0, NULL));
        take(&t, imp_store_flush(w.store));
    }
    int64_t n = imp_world_check(&w, old, N_OLD, true);
    take(&t, n);
    t.whole = t.whole && n == N_OLD;
    n = imp_world_check(&w, new, N_NEW, true);
    take(&t, n);
    if (n >= 0) {
        take(&t, imp_world_commit(&w, new, N_NEW, (size_t)n, 0, NULL));
        take(&t, imp_store_flush(w.store));
    }
    n = imp_world_check(&w, new, N_NEW, true);
    take(&t, n);
    t.whole = t.whole && n == N_NEW;
    take(&t, imp_world_commit(&w, new + 7, N_NEW - 7, 0, 0, NULL));
    take(&t, imp_store_flush(w.store));
    take(&t, imp_store_gc(w.store, &gc));
    n = imp_world_verify(&w, false, false);
    take(&t, n);
    t.n_statuses += n > 0;
    t.whole = t.whole && n == 0;
    take(&t, imp_store_stats(w.store, &st));
    t.counted = st.io_errors + st.corrupt_chunks + st.commits_failed + st.commits_refused + st.catalogue_rebuilds > 0 ||
                imp_store_faults(w.store, NULL) > 0;
    imp_world_close(&w);
    return t;
}

/* `kept`: old was stored before, and must be there. */
static void look_after(const char *what, bool kept)
{
    imp_world w;
    int rc = imp_world_open(&w, at, NULL, NULL);
    if (rc < 0) fail_msg("%s: reopening: %s", what, imp_last_error());
    int64_t n = imp_world_verify(&w, false, true);
    if (n != 0) fail_msg("%s: %lld findings", what, (long long)n);
    n = imp_world_check(&w, old, N_OLD, true);
    if (kept ? n != N_OLD : n < 0) fail_msg("%s: %lld of old", what, (long long)n);
    n = imp_world_check(&w, new, N_NEW, true);
    assert_true(n >= 0);
    assert_int_equal(imp_world_commit(&w, new, N_NEW, (size_t)n, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&w, new, N_NEW, true), N_NEW);
    assert_int_equal(imp_store_faults(w.store, NULL), 0);
    imp_world_close(&w);
}

typedef struct outcome {
    unsigned n_hit, n_lost, n_lines; /* lives in which the call failed; of them those that weren't whole; lines logged */
} outcome;

/* What was lost was told: to the caller with a status, else in the counters and in the log. What is counted is logged,
 * too. */
static void judge(const char *what, const told *t, uint64_t hits, outcome *sum)
{
    bool lost = hits > 0 && !t->whole, logged = atomic_load(&n_lines) > 0;
    if (lost && t->n_statuses == 0 && !t->counted) fail_msg("%s: nothing was told", what);
    if (lost && t->n_statuses == 0 && !logged) fail_msg("%s: nothing was logged", what);
    if (t->counted && !logged) fail_msg("%s: counted, and not logged", what);
    sum->n_hit += hits > 0;
    sum->n_lost += lost;
    sum->n_lines += atomic_load(&n_lines);
}

static void one_fault(start from, preload_kind kind, uint64_t nth, bool stay, int err, outcome *sum)
{
    char what[96];
    snprintf(what, sizeof what, "%s %llu%s, start %d: %s", preload_kind_name(kind), (unsigned long long)nth,
             stay ? "+" : "", (int)from, err ? strerror(err) : "in part");
    begin(from);
    preload_watch(at, NULL);
    preload_fail(kind, nth, stay, err);
    atomic_store(&n_lines, 0);
    told t = live(from);
    uint64_t hits = preload_hits();
    preload_watch(NULL, NULL);
    judge(what, &t, hits, sum);
    look_after(what, from == FROM_BASE);
}

static uint64_t count_calls(start from, preload_kind kind)
{
    begin(from);
    preload_watch(at, NULL);
    preload_fail(kind, UINT64_MAX, false, EIO);
    told t = live(from);
    uint64_t n = preload_seen();
    preload_watch(NULL, NULL);
    assert_true(t.whole);
    assert_int_equal(t.n_statuses, 0);
    assert_false(t.counted);
    return n;
}

static void every_call(void **state)
{
    (void)state;
    static const struct {
        preload_kind kind;
        int err; /* 0: in part */
        bool stay;
    } plan[] = {
        {PRELOAD_OPEN, EIO, false},     {PRELOAD_OPEN, EMFILE, true},     {PRELOAD_OPEN, ENOSPC, false},
        {PRELOAD_READ, EIO, false},     {PRELOAD_READ, EIO, true},        {PRELOAD_READ, EINTR, false},
        {PRELOAD_READ, 0, false},       {PRELOAD_WRITE, EIO, false},      {PRELOAD_WRITE, ENOSPC, true},
        {PRELOAD_WRITE, EROFS, true},   {PRELOAD_WRITE, EINTR, false},    {PRELOAD_WRITE, 0, false},
        {PRELOAD_SYNC, EIO, false},     {PRELOAD_SYNC, ENOSPC, false},    {PRELOAD_TRUNCATE, EIO, false},
        {PRELOAD_TRUNCATE, ENOSPC, true}, {PRELOAD_RENAME, EIO, false},   {PRELOAD_UNLINK, EIO, false},
        {PRELOAD_UNLINK, EROFS, true},  {PRELOAD_MAP, ENOMEM, false},     {PRELOAD_ALL, EIO, true},
        {PRELOAD_OPEN, EINVAL, false},  {PRELOAD_READ, EINVAL, false},    {PRELOAD_MAP, EIO, true},
        {PRELOAD_MAKE, EIO, false},     {PRELOAD_MAKE, ENOSPC, true},
        {PRELOAD_LOCK, ENOLCK, false}, /* not for good: SQLite waits five seconds for each lock then */
    };
    const char *text = getenv("IMP_FAULTS");
    bool all = text && strcmp(text, "all") == 0;
    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed());
    make_base();
    uint64_t n_calls[FROM_NONE + 1][PRELOAD_N_KINDS] = {0};
    for (size_t i = 0; i < sizeof plan / sizeof plan[0]; i++) {
        preload_kind kind = plan[i].kind;
        /* What is made is there already in a store that was used before. */
        start first = kind == PRELOAD_MAKE ? FROM_EMPTY : FROM_BASE, last = first == FROM_EMPTY ? FROM_NONE : FROM_BASE;
        for (start from = first; from <= last; from++) {
            uint64_t *n = &n_calls[from][kind];
            outcome sum = {0};
            if (*n == 0) *n = count_calls(from, kind);
            if (*n == 0) fail_msg("%s: no such call", preload_kind_name(kind));
            for (uint64_t j = 1; j <= (all ? *n : FEW); j++) {
                uint64_t nth = all || j == 1 ? j : 1 + imp_rng_below(&rng, *n);
                one_fault(from, kind, nth, plan[i].stay, plan[i].err, &sum);
            }
            assert_true(sum.n_hit > 0);
            if (!all) continue;
            fprintf(stderr, "%s, %s: %u of %llu calls failed, %u cost something; %u lines\n", preload_kind_name(kind),
                    plan[i].err ? strerror(plan[i].err) : "in part", sum.n_hit, (unsigned long long)*n, sum.n_lost,
                    sum.n_lines);
        }
    }
}

/* ---- SQLite's memory */

static sqlite3_mem_methods real_memory;
static atomic_uint_fast64_t n_asked, n_refused, refuse_at; /* refuse_at 0: none */
static atomic_bool refuse_on;                              /* and all after it */

static bool refused(void)
{
    uint64_t i = atomic_fetch_add(&n_asked, 1) + 1, first = atomic_load(&refuse_at);
    bool no = first > 0 && (i == first || (i > first && atomic_load(&refuse_on)));
    if (no) atomic_fetch_add(&n_refused, 1);
    return no;
}

static void *some_memory(int n) { return refused() ? NULL : real_memory.xMalloc(n); }
static void *more_memory(void *p, int n) { return refused() ? NULL : real_memory.xRealloc(p, n); }

/* Before SQLite is used for the first time. Without its caches of small pieces, which would hide most of what it asks. */
static int take_memory(void)
{
    if (sqlite3_config(SQLITE_CONFIG_GETMALLOC, &real_memory) != SQLITE_OK) return -1;
    sqlite3_mem_methods ours = real_memory;
    ours.xMalloc = some_memory;
    ours.xRealloc = more_memory;
    if (sqlite3_config(SQLITE_CONFIG_MALLOC, &ours) != SQLITE_OK) return -1;
    return sqlite3_config(SQLITE_CONFIG_LOOKASIDE, 0, 0) == SQLITE_OK ? 0 : -1;
}

/* The nth time from now on, and with `stay` ever after. Returns how often it was asked since the last call of this. */
static uint64_t refuse_memory(uint64_t nth, bool stay)
{
    atomic_store(&refuse_at, 0);
    uint64_t n = atomic_exchange(&n_asked, 0);
    atomic_store(&refuse_on, stay);
    atomic_store(&n_refused, 0);
    atomic_store(&refuse_at, nth);
    return n;
}

static void one_refusal(uint64_t nth, bool stay, outcome *sum)
{
    char what[96];
    snprintf(what, sizeof what, "SQLite's allocation %llu%s", (unsigned long long)nth, stay ? "+" : "");
    begin(FROM_BASE);
    atomic_store(&n_lines, 0);
    (void)refuse_memory(nth, stay);
    told t = live(FROM_BASE);
    uint64_t hits = atomic_load(&n_refused);
    (void)refuse_memory(0, false);
    judge(what, &t, hits, sum);
    look_after(what, true);
}

enum { ALL_STEP = 5, ALL_STAY_STEP = 101 }; /* it asks some thousand times, half of them for the same statements */

static void sqlite_memory(void **state)
{
    (void)state;
    const char *text = getenv("IMP_FAULTS");
    bool all = text && strcmp(text, "all") == 0;
    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed());
    make_base();
    begin(FROM_BASE);
    (void)refuse_memory(0, false);
    told t = live(FROM_BASE);
    uint64_t n = refuse_memory(0, false);
    assert_true(t.whole && n > 100);
    for (int stay = 0; stay < 2; stay++) {
        outcome sum = {0};
        uint64_t step = !all ? n / 8 : stay ? ALL_STAY_STEP : ALL_STEP;
        for (uint64_t nth = 1 + imp_rng_below(&rng, step); nth <= n; nth += step) one_refusal(nth, stay, &sum);
        assert_true(sum.n_hit > 0);
        if (!all) continue;
        fprintf(stderr, "memory of SQLite%s: %u of %llu refused, %u cost something; %u lines\n", stay ? ", for good" : "",
                sum.n_hit, (unsigned long long)n, sum.n_lost, sum.n_lines);
    }
}

/* ---- while a store is open: named while it lasts, and over by itself */

/* `kept`: what was stored before is matched all the while. */
static void fault_and_back(preload_kind kind, int err, const char *name, bool kept)
{
    imp_world w;
    imp_stats st;
    imp_fault faults[IMP_FAULTS_MAX];
    copy_store();
    assert_int_equal(imp_world_open(&w, at, NULL, NULL), 0);
    assert_int_equal(imp_world_check(&w, old, N_OLD, true), N_OLD);
    preload_watch(at, name);
    preload_fail(kind, 1, true, err);
    atomic_store(&n_lines, 0);
    for (int i = 0; i < 3; i++) {
        int64_t n = imp_world_check(&w, new, N_NEW, true);
        assert_int_not_equal(n, IMP_WORLD_WRONG);
        if (n >= 0) (void)imp_world_commit(&w, new, N_NEW, (size_t)n, 0, NULL);
        assert_true(imp_store_flush(w.store) < 0);
        if (kept) assert_int_equal(imp_world_check(&w, old, N_OLD, true), N_OLD);
    }
    assert_true(preload_hits() > 0);
    assert_int_equal(imp_store_stats(w.store, &st), 0);
    assert_true(st.io_errors > 0);
    assert_int_equal(st.commits_failed, 3);
    assert_true(atomic_load(&n_lines) > 0);
    int n_faults = imp_store_faults(w.store, faults);
    assert_true(n_faults > 0);
    for (int i = 0; i < n_faults; i++) {
        assert_true(faults[i].n > 0 && faults[i].status < 0);
        assert_true(*faults[i].line != '\0');
    }
    preload_watch(NULL, NULL);
    int64_t n = imp_world_check(&w, new, N_NEW, true);
    assert_true(n >= 0);
    assert_int_equal(imp_world_commit(&w, new, N_NEW, (size_t)n, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&w, new, N_NEW, true), N_NEW);
    assert_int_equal(imp_world_check(&w, old, N_OLD, true), N_OLD);
    assert_int_equal(imp_store_faults(w.store, NULL), 0);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
}

static void back_by_itself(void **state)
{
    (void)state;
    make_base();
    fault_and_back(PRELOAD_WRITE, ENOSPC, "catalogue", true);
    fault_and_back(PRELOAD_WRITE, EIO, "catalogue", true);
    fault_and_back(PRELOAD_WRITE, EROFS, NULL, true);
    fault_and_back(PRELOAD_SYNC, EIO, "catalogue", true);
    fault_and_back(PRELOAD_WRITE, ENOSPC, "segments", true);
    fault_and_back(PRELOAD_OPEN, EROFS, "segments", true);
}

/* A segment whose header can't be read: a match ends before it, and that is a fault of reading whatever the system's
 * reason. */
static void headers_not_read(void **state)
{
    (void)state;
    static const int errs[] = {EIO, EINVAL, ENXIO, EACCES, ESTALE};
    make_base();
    for (size_t i = 0; i < sizeof errs / sizeof errs[0]; i++) {
        imp_world w;
        imp_stats st;
        imp_fault faults[IMP_FAULTS_MAX];
        copy_store();
        assert_int_equal(imp_world_open(&w, at, NULL, NULL), 0);
        preload_watch(at, "segments");
        preload_fail(PRELOAD_READ, 1, true, errs[i]);
        assert_int_equal(imp_world_check(&w, old, N_OLD, true), 0);
        assert_int_equal(imp_store_faults(w.store, faults), 1);
        assert_string_equal(faults[0].what, "read");
        assert_non_null(strstr(faults[0].line, strerror(errs[i])));
        assert_int_equal(imp_store_stats(w.store, &st), 0);
        assert_true(st.io_errors > 0);
        preload_watch(NULL, NULL);
        assert_int_equal(imp_world_check(&w, old, N_OLD, true), N_OLD);
        assert_int_equal(imp_store_faults(w.store, NULL), 0);
        imp_world_close(&w);
    }
}

/* The catalogue can't be read as the store is opened: it starts, answers as cold, and has it back later. */
static void started_without(void **state)
{
    (void)state;
    static const struct {
        preload_kind kind;
        int err;
    } plan[] = {{PRELOAD_READ, EIO}, {PRELOAD_OPEN, EMFILE}, {PRELOAD_WRITE, ENOSPC}};
    make_base();
    for (size_t i = 0; i < sizeof plan / sizeof plan[0]; i++) {
        imp_world w;
        imp_fault faults[IMP_FAULTS_MAX];
        copy_store();
        preload_watch(at, "catalogue");
        preload_fail(plan[i].kind, 1, true, plan[i].err);
        int rc = imp_world_open(&w, at, NULL, NULL);
        if (rc < 0) fail_msg("%s: %s: %s", strerror(plan[i].err), imp_status_name(rc), imp_last_error());
        (void)imp_world_check(&w, old, N_OLD, true);
        if (plan[i].kind != PRELOAD_WRITE) { /* what isn't written needs no room */
            assert_int_equal(imp_world_check(&w, old, N_OLD, true), 0);
            assert_int_equal(imp_store_faults(w.store, faults), 1);
            assert_string_equal(faults[0].what, "catalogue");
        }
        preload_watch(NULL, NULL);
        for (int tries = 0; tries < 600 && imp_world_check(&w, old, N_OLD, true) != N_OLD; tries++) usleep(50000);
        assert_int_equal(imp_world_check(&w, old, N_OLD, true), N_OLD);
        assert_int_equal(imp_store_faults(w.store, NULL), 0);
        imp_world_close(&w);
    }
}

/* A network's file system, whose locks don't hold: refused with its name, and nothing is made or changed there. */
static void on_a_network(void **state)
{
    (void)state;
    static const struct {
        uint64_t type;
        const char *name;
    } plan[] = {{0x6969, "NFS"}, {0xff534d42, "CIFS"}, {0x65735546, "FUSE"}};
    imp_world w;
    char command[1024];
    struct stat st;
    make_base();
    snprintf(command, sizeof command, "diff -r '%s' '%s' >/dev/null", base, at);
    preload_watch(at, NULL);
    for (size_t i = 0; i < sizeof plan / sizeof plan[0]; i++) {
        for (start from = FROM_BASE; from <= FROM_NONE; from++) {
            begin(from);
            preload_fs(plan[i].type);
            assert_int_equal(setenv("IMPRESS_ANY_FS", "0", 1), 0);
            assert_int_equal(imp_world_open(&w, at, NULL, NULL), IMP_E_UNSUPPORTED);
            assert_non_null(strstr(imp_last_error(), plan[i].name));
            assert_non_null(strstr(imp_last_error(), at));
            assert_null(strchr(imp_last_error(), '\n'));
            if (from == FROM_BASE) assert_int_equal(system(command), 0);
            if (from == FROM_EMPTY) assert_int_equal(rmdir(at), 0);
            if (from == FROM_NONE) assert_int_equal(stat(at, &st), -1);
            assert_int_equal(setenv("IMPRESS_ANY_FS", "1", 1), 0);
            begin(from);
            look_after(plan[i].name, from == FROM_BASE);
            assert_int_equal(unsetenv("IMPRESS_ANY_FS"), 0);
            preload_fs(0);
            look_after(plan[i].name, from == FROM_BASE);
        }
    }
}

int main(void)
{
    if (take_memory() != 0) return 1;
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {TEST(every_call), TEST(sqlite_memory), TEST(back_by_itself), TEST(headers_not_read),
                                       TEST(started_without), TEST(on_a_network)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
