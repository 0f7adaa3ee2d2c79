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

enum { N = 150, N_CALLS = 40, FEW = 1 };

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

/* Its exit code; `rule` NULL: without faults. */
static int run(const char *command, const char *rule, bool *said)
{
    char line[2400];
    struct stat st;
    if (rule) {
        snprintf(line, sizeof line,
                 "cd '%s' && HOME='%s' LD_PRELOAD='%s' ASAN_OPTIONS=verify_asan_link_order=0 IMP_PRELOAD_PREFIX='%s' "
                 "IMP_PRELOAD_RULE=%s timeout -s KILL 60 '%s' %s '%s' >out 2>err </dev/null",
                 top, top, preload, at, rule, program, command, at);
    } else {
        snprintf(line, sizeof line, "cd '%s' && HOME='%s' timeout -s KILL 60 '%s' %s '%s' >out 2>err </dev/null", top,
                 top, program, command, at);
    }
    int status = system(line);
    *said = stat(imp_test_path(top, "err"), &st) == 0 && st.st_size > 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
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

static void commands(void **state)
{
    (void)state;
    static const char *const names[] = {"ls", "stat", "verify", "gc", "rm --all"};
    static const char *const rules[] = {"open:%u:EMFILE", "read:%u:EIO",    "write:%u+:ENOSPC", "write:%u:EIO",
                                        "sync:%u:EIO",    "unlink:%u:EROFS", "map:%u:ENOMEM"};
    const char *text = getenv("IMP_FAULTS");
    bool all = text && strcmp(text, "all") == 0, said;
    imp_world w;
    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed());
    assert_int_equal(imp_world_open(&w, base, NULL, NULL), 0);
    assert_int_equal(imp_world_commit(&w, tokens, N, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    imp_world_close(&w);
    for (size_t c = 0; c < sizeof names / sizeof names[0]; c++) {
        fresh_copy();
        int code = run(names[c], NULL, &said);
        if (code != 0) fail_msg("%s: exit code %d", names[c], code);
        for (size_t r = 0; r < sizeof rules / sizeof rules[0]; r++) {
            if (!all && imp_rng_below(&rng, 3) != 0) continue;
            for (unsigned i = 0; i < (all ? N_CALLS : FEW); i++) {
                unsigned nth = all ? 1 + i : 1 + (unsigned)imp_rng_below(&rng, N_CALLS);
                char rule[64], what[128];
                (void)snprintf(rule, sizeof rule, "%.*s:%u%s", (int)strcspn(rules[r], ":"), rules[r], nth,
                               strchr(rules[r], '%') + 2);
                snprintf(what, sizeof what, "%s, %s", names[c], rule);
                fresh_copy();
                code = run(names[c], rule, &said);
                if (code < 0 || code > 1) fail_msg("%s: exit code %d", what, code);
                if (code != 0 && !said && c != 2) fail_msg("%s: no word on why", what);
                look_after(what, c == 4);
            }
        }
    }
}

int main(void)
{
    program = getenv("IMPRESS");
    preload = getenv("IMP_PRELOAD");
    if (!program || !preload) {
        printf("skipped: no program, or no library to preload\n");
        return 77;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(commands, set_up, tear_down)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
