/* Several processes on one store at once, under one limit: two that store and ask, one in a space of its own, one that
 * verifies, one that collects, one that reorders, and some that are killed at their work. Nobody gets a wrong row,
 * verify finds nothing, `du` never shows more than the limit and what is on its way, no more goes than has to, and a
 * killed one holds nobody up: all others come to their end. IMP_PROCESS_ROUNDS: how many prompts each of the storing
 * ones stores (45). */
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/rng.h"
#include "store/history.h"
#include "support/store_world.h"
#include "support/support.h"

enum {
    MAX_TOKENS = 220,
    LIMIT = 4 << 20,
    /* Files whose change is made and that aren't unlinked yet, of each process, and what killed ones leave until the
     * next opening: 200 KiB and less each. The catalogue's log: 256 KiB are its share of the limit, four times that while
     * somebody reads, and the catalogue itself when it is compacted. Mostly it is less than 256 KiB. */
    ON_THEIR_WAY = 3 << 20,
    N_WRITERS = 3,
    N_OTHERS = 3,
    N_KILLED = 4
};

static size_t prompt(uint64_t seed, int32_t *tokens)
{
    imp_rng rng;
    imp_rng_seed(&rng, seed);
    size_t n = 30 + imp_rng_below(&rng, MAX_TOKENS - 30), cut = imp_rng_below(&rng, n);
    uint64_t family = imp_rng_below(&rng, 4), own = imp_rng_u64(&rng) >> 36;
    for (size_t i = 0; i < n; i++) tokens[i] = (int32_t)(i < cut ? 1000 * family + i : own + i);
    return n;
}

/* ---- the processes; each ends with 0, or with a line and 1 */

#define DIE_IF(bad)                                                                                                    \
    do {                                                                                                               \
        if (bad) {                                                                                                     \
            fprintf(stderr, "line %d: %s\n", __LINE__, imp_last_error());                                              \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

static const char *dir;
static int stop_fd; /* the end of a pipe: readable (at its end) once the storing ones are done */

static bool to_go_on(void)
{
    char c;
    return read(stop_fd, &c, 1) < 0; /* EAGAIN; else the end */
}

static void open_it(imp_world *w, const char *salt)
{
    imp_store_opts opts;
    imp_world_rich_opts(&opts);
    opts.rest = IMP_REST_RAW;
    opts.limit_bytes = LIMIT;
    DIE_IF(imp_world_open(w, dir, &opts, salt) < 0);
}

/* `n` 0: until it is killed. */
static void store(uint64_t seed, const char *salt, int n)
{
    imp_world w;
    imp_rng rng;
    int32_t tokens[MAX_TOKENS];
    imp_rng_seed(&rng, seed);
    open_it(&w, salt);
    for (int i = 0; n == 0 || i < n; i++) {
        size_t len = prompt(imp_rng_u64(&rng), tokens);
        int64_t known = imp_world_check(&w, tokens, len, true);
        DIE_IF(known < 0 && known != IMP_E_BUSY);
        if (known < 0) continue;
        int rc = imp_world_commit(&w, tokens, len, (size_t)known, 0, NULL);
        /* Another process evicted what the entry stands on: an engine that has all its rows hands them over. */
        if (rc == IMP_E_STALE) rc = imp_world_commit(&w, tokens, len, 0, 0, NULL);
        DIE_IF(rc < 0 && rc != IMP_E_BUSY && rc != IMP_E_FULL); /* refused at once: there was no room a moment ago */
        rc = imp_store_flush(w.store);
        /* Others may evict what an entry stands on, or hold what room there is. */
        DIE_IF(rc < 0 && rc != IMP_E_STALE && rc != IMP_E_FULL && rc != IMP_E_BUSY);
        known = imp_world_check(&w, tokens, len, true);
        DIE_IF(known < 0 && known != IMP_E_BUSY);
    }
    imp_world_close(&w);
}

static void verify(bool readonly)
{
    do {
        imp_world w;
        imp_store_opts opts;
        imp_world_opts(&opts);
        opts.limit_bytes = LIMIT;
        if (readonly) opts.flags |= IMP_STORE_READONLY;
        int rc = imp_world_open(&w, dir, &opts, NULL);
        DIE_IF(rc < 0);
        int64_t n = imp_world_verify(&w, false, true);
        DIE_IF(n != 0 && n != IMP_E_BUSY);
        imp_world_close(&w);
    } while (to_go_on());
}

static void collect(void)
{
    do {
        imp_world w;
        imp_gc_report report;
        open_it(&w, NULL);
        int rc = imp_store_gc(w.store, &report);
        DIE_IF(rc < 0 && rc != IMP_E_FULL && rc != IMP_E_BUSY);
        imp_world_close(&w);
    } while (to_go_on());
}

static int learn(const imp_node_info *node, void *user)
{
    (void)node;
    ++*(int *)user;
    return 0;
}

static void reorder(uint64_t seed)
{
    imp_world w;
    imp_rng rng;
    imp_rng_seed(&rng, seed);
    open_it(&w, NULL);
    do {
        /* News for what a prompt matches, so that there is something to do. */
        imp_path path;
        uint64_t header_bytes;
        int32_t tokens[MAX_TOKENS];
        float scores[MAX_TOKENS];
        int n_nodes = 0;
        size_t n = prompt(imp_rng_u64(&rng), tokens);
        DIE_IF(imp_store_list(w.store, learn, &n_nodes) < 0);
        int rc = imp_store_match(w.store, w.space->id, tokens, n, true, &path, &header_bytes);
        DIE_IF(rc < 0 && rc != IMP_E_BUSY);
        for (size_t i = 0; rc == 0 && i < path.n_spans; i++) {
            imp_history *h;
            DIE_IF(imp_history_get(w.store, path.spans[i].seg, &h) < 0);
            for (uint32_t l = 0; l < WORLD_LAYERS; l++) {
                for (uint32_t t = 0; t < path.spans[i].n_tokens; t++) scores[t] = (float)imp_rng_unit(&rng);
                imp_history_add(h, l, path.spans[i].segment_first, path.spans[i].n_tokens, scores);
            }
            imp_history_put(w.store, h);
        }
        if (rc == 0) imp_store_unpin(w.store, &path);
        rc = imp_store_reorder(w.store, NULL);
        DIE_IF(rc < 0 && rc != IMP_E_FULL && rc != IMP_E_BUSY && rc != IMP_E_STALE);
    } while (to_go_on());
    imp_world_close(&w);
}

typedef enum role { STORE, STORE_APART, VERIFY, COLLECT, REORDER, STORE_UNTIL_KILLED } role;

static pid_t start(role r, uint64_t seed, int n_rounds, const int fds[2])
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid != 0) return pid;
    signal(SIGSEGV, SIG_DFL); /* cmocka's handler is the parent's */
    if (r != STORE && r != STORE_APART) close(fds[1]); /* the storing ones hold the other end, and so does the parent */
    stop_fd = fds[0];
    switch (r) {
    case STORE: store(seed, NULL, n_rounds); break;
    case STORE_APART: store(seed, "another model", n_rounds); break;
    case VERIFY: verify(seed % 2); break;
    case COLLECT: collect(); break;
    case REORDER: reorder(seed); break;
    case STORE_UNTIL_KILLED: store(seed, NULL, 0); break;
    }
    _exit(0);
}

static void share_a_store_and_its_limit(void **state)
{
    const char *text = getenv("IMP_PROCESS_ROUNDS");
    int n_rounds = text && *text ? atoi(text) : 45, fds[2], n_running = N_WRITERS, n_killed = 0;
    uint64_t most = 0;
    imp_rng rng;
    pid_t writers[N_WRITERS], others[N_OTHERS], victim = -1;
    dir = imp_test_path(*state, "store");
    char kept[256];
    snprintf(kept, sizeof kept, "%s", dir);
    dir = kept;
    imp_rng_seed(&rng, imp_test_seed());
    imp_test_no_log();
    assert_int_equal(pipe2(fds, O_NONBLOCK), 0);
    for (int i = 0; i < N_WRITERS; i++) {
        writers[i] = start(i < 2 ? STORE : STORE_APART, imp_rng_u64(&rng), n_rounds, fds);
    }
    for (int i = 0; i < N_OTHERS; i++) others[i] = -1;

    while (n_running > 0) {
        int status;
        /* The others need a store that is there. */
        if (others[0] < 0 && access(imp_test_path(dir, "catalogue.db"), F_OK) == 0) {
            static const role roles[N_OTHERS] = {VERIFY, COLLECT, REORDER};
            for (int i = 0; i < N_OTHERS; i++) others[i] = start(roles[i], imp_rng_u64(&rng), 0, fds);
        }
        if (victim < 0 && n_killed < N_KILLED) victim = start(STORE_UNTIL_KILLED, imp_rng_u64(&rng), 0, fds);
        struct timespec t = {0, (long)imp_rng_below(&rng, 20000000)};
        nanosleep(&t, NULL);
        uint64_t du = imp_world_du(dir);
        if (du > most) most = du;
        if (victim > 0 && (imp_rng_below(&rng, 6) == 0 || n_running == 0)) {
            kill(victim, SIGKILL);
            assert_int_equal(waitpid(victim, &status, 0), victim);
            assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
            victim = -1;
            n_killed++;
        }
        for (int i = 0; i < N_WRITERS; i++) {
            if (writers[i] < 0 || waitpid(writers[i], &status, WNOHANG) != writers[i]) continue;
            assert_int_equal(status, 0);
            writers[i] = -1;
            n_running--;
        }
    }
    if (victim > 0) {
        kill(victim, SIGKILL);
        assert_int_equal(waitpid(victim, NULL, 0), victim);
        n_killed++;
    }
    close(fds[1]);
    for (int i = 0; i < N_OTHERS; i++) {
        int status;
        assert_int_equal(waitpid(others[i], &status, 0), others[i]);
        assert_int_equal(status, 0);
    }
    close(fds[0]);
    fprintf(stderr, "%d killed, %llu bytes at most under a limit of %d\n", n_killed, (unsigned long long)most, LIMIT);
    assert_true(n_killed > 0);
    assert_in_range(most, 0, LIMIT + ON_THEIR_WAY);

    /* One open, and all is as it should be. */
    imp_world w;
    imp_stats st;
    open_it(&w, NULL);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    assert_int_equal(imp_store_gc(w.store, NULL), 0);
    assert_int_equal(imp_store_stats(w.store, &st), 0);
    assert_in_range(st.n_spaces, 1, 2); /* the last to store may have displaced the other space */
    /* Was it full, then what is left of it is more than what evicting twice for the same room would leave. */
    assert_in_range(imp_world_du(dir), most > LIMIT ? LIMIT / 2 : 0, LIMIT);
    imp_world_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(share_a_store_and_its_limit, imp_test_dir_set_up, imp_test_dir_tear_down)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
