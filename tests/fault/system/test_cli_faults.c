/* The commands that look at a store and tidy it, with system calls that fail: each ends with its word on what went
 * wrong, or with its work done, and leaves a store that verifies. The program gets the library of preload_faults.h
 * preloaded: these commands run no model. Needs $IMPRESS and $IMP_PRELOAD. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "base/rng.h"
#include "fault/preload_faults.h"
#include "support/store_world.h"
#include "support/support.h"

enum { N = 150, FEW = 1, MOST_CALLS = 1000, NFS = 0x6969 };

/* What a program did. Of the lines on stderr those that the log wrote name the store first, or a file of it that is left
 * behind; any other is the program's own word on why it failed. */
typedef struct outcome {
    int code;
    unsigned n_lines, n_own;
    bool printed;
    char last[512];
    uint64_t hits, calls[PRELOAD_N_KINDS];
} outcome;

static const char *program, *preload;
static char top[256], base[sizeof top + 8], at[sizeof top + 8];
static int32_t tokens[N];

static int set_up(void **state)
{
    imp_test_no_log();
    char *made = imp_test_make_fast_dir();
    if (!made) return -1;
    *state = made;
    snprintf(top, sizeof top, "%s", made);
    snprintf(base, sizeof base, "%s/base", top);
    snprintf(at, sizeof at, "%s/at", top);
    for (int i = 0; i < N; i++) tokens[i] = i;
    return 0;
}

static int tear_down(void **state)
{
    imp_test_remove_dir(*state);
    return 0;
}

static void fresh_copy(void)
{
    char line[1200];
    snprintf(line, sizeof line, "rm -rf '%s' && cp -a '%s' '%s'", at, base, at);
    assert_int_equal(system(line), 0);
}

static void read_lines(outcome *o)
{
    char line[sizeof o->last], of_log[sizeof at + 16], left[sizeof at + 32];
    snprintf(of_log, sizeof of_log, "impress: %s: ", at);
    snprintf(left, sizeof left, "impress: can't remove %s/", at);
    FILE *f = fopen(imp_test_path(top, "err"), "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = '\0';
        o->n_lines++;
        o->n_own += strncmp(line, of_log, strlen(of_log)) != 0 && strncmp(line, left, strlen(left)) != 0;
        memcpy(o->last, line, sizeof line);
    }
    fclose(f);
}

/* What the preloaded library wrote as the program ended. */
static void read_told(outcome *o)
{
    char what[16];
    unsigned long long n;
    FILE *f = fopen(imp_test_path(top, "told"), "r");
    if (!f) return;
    while (fscanf(f, "%15s %llu", what, &n) == 2) {
        if (strcmp(what, "hits") == 0) o->hits = n;
        for (int k = 0; k < PRELOAD_N_KINDS; k++) {
            if (strcmp(what, preload_kind_name((preload_kind)k)) == 0) o->calls[k] = n;
        }
    }
    fclose(f);
}

/* `set`: more of the environment, which the preloaded library reads. */
static outcome run(const char *command, const char *set)
{
    char line[2400];
    struct stat st;
    outcome o = {0};
    (void)remove(imp_test_path(top, "told"));
    snprintf(line, sizeof line,
             "cd '%s' && timeout -s KILL 60 env HOME='%s' LD_PRELOAD='%s' ASAN_OPTIONS=verify_asan_link_order=0 "
             "IMP_PRELOAD_PREFIX='%s' IMP_PRELOAD_TOLD='%s/told' %s '%s' %s '%s' >out 2>err </dev/null",
             top, top, preload, at, top, set, program, command, at);
    int status = system(line);
    o.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    o.printed = stat(imp_test_path(top, "out"), &st) == 0 && st.st_size > 0;
    read_lines(&o);
    read_told(&o);
    return o;
}

static void look_after(const char *what, bool removed)
{
    imp_world w;
    if (imp_world_open(&w, at, NULL, NULL) < 0) fail_msg("%s: reopening: %s", what, imp_last_error());
    int64_t n = imp_world_verify(&w, false, true);
    if (n != 0) fail_msg("%s: %lld findings", what, (long long)n);
    n = imp_world_check(&w, tokens, N, true);
    if (removed ? n < 0 : n != N) fail_msg("%s: %lld tokens", what, (long long)n);
    imp_world_close(&w);
}

/* All of it but the first bytes, which SQLite reads to know it for its own. */
static void damage_catalogue(void)
{
    static const char junk[4096] = {'x'};
    FILE *f = fopen(imp_test_path(at, "catalogue.db"), "r+");
    assert_non_null(f);
    assert_int_equal(fseek(f, 100, SEEK_SET), 0);
    for (int i = 0; i < 16; i++) assert_int_equal(fwrite(junk, 1, sizeof junk, f), sizeof junk);
    assert_int_equal(fclose(f), 0);
}

static void make_base(void)
{
    imp_world w;
    assert_int_equal(imp_world_open(&w, base, NULL, NULL), 0);
    assert_int_equal(imp_world_commit(&w, tokens, N, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    imp_world_close(&w);
}

enum { LS, STAT, VERIFY, GC, RM, N_COMMANDS };
static const char *const names[N_COMMANDS] = {"ls", "stat", "verify", "gc", "rm --all"};

/* It ended as its code says. One that failed says why in one line, or is `verify`, whose findings are what it prints. */
static void check_outcome(const char *what, int command, const outcome *o)
{
    if (o->code != 0 && o->code != 1) fail_msg("%s: exit code %d: %s", what, o->code, o->last);
    unsigned least = o->code == 0 || (command == VERIFY && o->printed) ? 0 : 1;
    if (o->n_lines < least) fail_msg("%s: no word on why", what);
    if (o->n_own > (unsigned)o->code) fail_msg("%s: exit code %d, %u lines: %s", what, o->code, o->n_own, o->last);
}

static void one_fault(int command, preload_kind kind, uint64_t nth, const char *how, outcome *o)
{
    char set[64], what[128];
    snprintf(set, sizeof set, "IMP_PRELOAD_RULE=%s:%llu%s", preload_kind_name(kind), (unsigned long long)nth, how);
    snprintf(what, sizeof what, "%s, %s", names[command], set);
    fresh_copy();
    *o = run(names[command], set);
    check_outcome(what, command, o);
    look_after(what, command == RM);
}

static void commands(void **state)
{
    (void)state;
    static const struct {
        preload_kind kind;
        const char *how;
        unsigned without; /* commands that make no such call, a bit each */
    } rules[] = {
        {PRELOAD_OPEN, ":EMFILE", 0},
        {PRELOAD_READ, ":EIO", 0},
        {PRELOAD_WRITE, "+:ENOSPC", 0},
        {PRELOAD_WRITE, ":EIO", 0},
        {PRELOAD_SYNC, ":EIO", 1u << LS | 1u << STAT | 1u << VERIFY},
        {PRELOAD_UNLINK, ":EROFS", 1u << VERIFY},
        {PRELOAD_MAKE, ":ENOSPC", 1u << VERIFY},
        {PRELOAD_MAP, ":ENOMEM", 0},
        {PRELOAD_LOCK, ":ENOLCK", 0},
    };
    const char *text = getenv("IMP_FAULTS");
    bool all = text && strcmp(text, "all") == 0;
    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed());
    make_base();
    for (int c = 0; c < N_COMMANDS; c++) {
        fresh_copy();
        outcome o = run(names[c], "");
        if (o.code != 0 || o.n_lines > 0) fail_msg("%s: exit code %d: %s", names[c], o.code, o.last);
        for (size_t r = 0; r < sizeof rules / sizeof rules[0]; r++) {
            preload_kind kind = rules[r].kind;
            uint64_t n_calls = o.calls[kind], n_hit = 0;
            outcome got;
            if ((n_calls > 0) == (rules[r].without >> c & 1)) {
                fail_msg("%s: %llu times %s", names[c], (unsigned long long)n_calls, preload_kind_name(kind));
            }
            if (n_calls == 0) continue;
            if (all) {
                for (got.hits = 1; got.hits > 0; n_hit += got.hits > 0) {
                    assert_true(n_hit < MOST_CALLS);
                    one_fault(c, kind, n_hit + 1, rules[r].how, &got);
                }
                assert_true(n_hit > 0);
                fprintf(stderr, "%s, %s%s: %llu calls failed\n", names[c], preload_kind_name(kind), rules[r].how,
                        (unsigned long long)n_hit);
            } else if (imp_rng_below(&rng, 3) == 0) {
                for (int i = 0; i < FEW; i++) {
                    one_fault(c, kind, 1 + imp_rng_below(&rng, n_calls), rules[r].how, &got);
                    assert_true(got.hits > 0);
                }
            }
        }
    }
}

/* The catalogue can't be read, or not be had: none of them takes the store for an empty one. */
static void without_a_catalogue(void **state)
{
    (void)state;
    static const char *const rules[] = {"open:1+:EMFILE", "read:1+:EIO", "map:1+:EIO"};
    imp_world w;
    outcome o;
    char set[96];
    make_base();
    for (int c = 0; c < N_COMMANDS; c++) {
        for (size_t r = 0; r < sizeof rules / sizeof rules[0]; r++) {
            snprintf(set, sizeof set, "IMP_PRELOAD_NAME=catalogue IMP_PRELOAD_RULE=%s", rules[r]);
            fresh_copy();
            o = run(names[c], set);
            if (o.code != 1 || o.hits == 0) fail_msg("%s, %s: exit code %d", names[c], set, o.code);
            if (c == VERIFY && o.printed) continue; /* it names the catalogue as a finding */
            if (o.printed || o.n_own != 1) fail_msg("%s, %s: %u lines: %s", names[c], set, o.n_own, o.last);
            look_after(set, false);
        }
        /* Damaged, while another process has it open, which may mend it. */
        fresh_copy();
        assert_int_equal(imp_world_open(&w, at, NULL, NULL), 0);
        damage_catalogue();
        o = run(names[c], "");
        if (o.code != 1) fail_msg("%s, damaged: exit code %d", names[c], o.code);
        if (c != VERIFY && (o.printed || o.n_lines != 1)) fail_msg("%s, damaged: %u lines: %s", names[c], o.n_lines, o.last);
        imp_world_close(&w);
    }
}

/* A network's file system: refused with one line, and all the same for those who say so. */
static void on_a_network(void **state)
{
    (void)state;
    make_base();
    fresh_copy();
    for (int c = 0; c < N_COMMANDS; c++) {
        char set[96];
        snprintf(set, sizeof set, "IMP_PRELOAD_FS=%d", NFS);
        outcome o = run(names[c], set);
        assert_int_equal(o.code, 1);
        assert_int_equal(o.n_lines, 1);
        assert_false(o.printed);
        assert_non_null(strstr(o.last, "NFS"));
        assert_non_null(strstr(o.last, "IMPRESS_ANY_FS=1"));
        look_after(names[c], false);
    }
    char set[96];
    snprintf(set, sizeof set, "IMP_PRELOAD_FS=%d IMPRESS_ANY_FS=1", NFS);
    outcome o = run("ls", set);
    assert_int_equal(o.code, 0);
    assert_int_equal(o.n_lines, 0);
    assert_true(o.printed);
}

int main(void)
{
    program = getenv("IMPRESS");
    preload = getenv("IMP_PRELOAD");
    if (!program || !preload) {
        printf("skipped: no program, or no library to preload\n");
        return 77;
    }
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {TEST(commands), TEST(without_a_catalogue), TEST(on_a_network)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
