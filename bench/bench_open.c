/* bench_open.c: what a store of many small entries costs: to open it, to match the first prompt, to list it, to sum it
 * up, and the memory of its tree. Entries of 64 tokens, a quarter of them below another one, each a segment of its own: the
 * most files and rows that a given number of tokens can have. They are stored through the public interface, which takes
 * longer than everything that is measured; with --dir they stay, and a later run finds them.
 *
 * Opening is measured in a process of its own, so that the memory is that of the store alone. The page cache is as it
 * is: warm after storing; `echo 3 >/proc/sys/vm/drop_caches` before a run with --dir makes it cold.
 *
 * Counts that aren't what was stored are a failure; with --check so are times that somebody would wait for, where each
 * of three runs takes as long: others use the machine too.
 */
#include <getopt.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/rng.h"
#include "impress/impress.h"

enum { ENTRY = 64, DIM = 32, ROW = DIM * 2, FLUSH_EVERY = 200, CHECK_RUNS = 3 };

static const double open_most_ms = 5000, look_most_ms = 2000; /* look: stat, and ls */

typedef struct options {
    size_t n_entries;
    const char *dir;
    bool json, check;
} options;

typedef struct figures {
    double open_ms, match_ms, stat_ms, list_ms, again_ms, open_cpu_ms, stat_cpu_ms; /* cpu: of all threads */
    uint64_t n_nodes, n_segments, tree_bytes, rss_bytes, disk_bytes;
    uint64_t n_listed, n_matched, n_asked;
} figures;

static int fail(const char *what)
{
    fprintf(stderr, "bench-open: %s: %s\n", what, imp_last_error());
    return -1;
}

static void set_options(imp_store_opts *opts)
{
    imp_store_opts_init(opts);
    opts->limit_bytes = 1ull << 40;
    opts->reorder_period_s = UINT32_MAX;
}

static int open_space(imp_store *s, imp_space **out)
{
    imp_layer_shape layer = {1, DIM, DIM};
    imp_space_desc d = {.struct_bytes = sizeof d,
                        .model_name = "bench",
                        .engine = "bench 1",
                        .weights = {1, 2},
                        .type_k = IMP_TYPE_F16,
                        .type_v = IMP_TYPE_F16,
                        .n_layers = 1,
                        .layers = &layer};
    return imp_space_open(s, &d, out);
}

/* The tokens of entry `i`: its own 64, behind those of an earlier entry for every fourth. Returns how many. */
static size_t entry(size_t i, int32_t tokens[2 * ENTRY])
{
    size_t n = 0;
    for (size_t at = i % 4 == 3 ? i - 1 : i; at <= i; at++, n += ENTRY) {
        imp_rng r;
        imp_rng_seed(&r, at);
        tokens[n] = (int32_t)at;
        for (size_t t = 1; t < ENTRY; t++) tokens[n + t] = (int32_t)imp_rng_below(&r, 50000);
    }
    return n;
}

static int store_one(imp_space *space, size_t i)
{
    int32_t tokens[2 * ENTRY];
    static const unsigned char rows[ENTRY * ROW];
    imp_commit *c;
    size_t n = entry(i, tokens), first = n - ENTRY;
    if (imp_commit_begin(space, tokens, n, first, 0, &c) < 0) return fail("commit");
    if (!c) return 0; /* known from an earlier run */
    int rc = imp_commit_rows(c, 0, first, ENTRY, rows, ROW, rows, ROW);
    if (rc < 0) imp_commit_cancel(c);
    else rc = imp_commit_finish(c);
    return rc < 0 ? fail("commit") : 0;
}

static int store_all(const options *o)
{
    imp_store_opts opts;
    imp_store *s;
    imp_space *space = NULL;
    set_options(&opts);
    if (imp_store_open(o->dir, &opts, &s) < 0) return fail("open");
    int rc = open_space(s, &space);
    imp_stats st = {0};
    if (rc == 0) rc = imp_store_stats(s, &st);
    for (size_t i = 0; rc == 0 && st.n_nodes < o->n_entries && i < o->n_entries; i++) {
        rc = store_one(space, i);
        if (rc == 0 && i % FLUSH_EVERY == FLUSH_EVERY - 1) rc = imp_store_flush(s);
        if (isatty(2) && i % 1000 == 0) fprintf(stderr, "\rstoring %zu of %zu ", i, o->n_entries);
    }
    if (isatty(2)) fprintf(stderr, "\r%40s\r", "");
    if (rc == 0) rc = imp_store_flush(s);
    if (rc < 0) fail("storing");
    imp_space_close(space);
    imp_store_close(s);
    return rc;
}

static double cpu_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static uint64_t rss_bytes(void)
{
    unsigned long long all = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%llu %llu", &all, &resident) != 2) resident = 0;
    if (f) fclose(f);
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

static int count(const imp_node_info *node, void *user)
{
    (void)node;
    ++*(uint64_t *)user;
    return 0;
}

static int measure(const options *o, figures *f)
{
    imp_store_opts opts;
    imp_store *s;
    imp_space *space;
    imp_lease *lease;
    imp_prefix_info info;
    imp_stats st;
    int32_t tokens[2 * ENTRY];
    set_options(&opts);
    *f = (figures){.rss_bytes = rss_bytes()};
    double cpu = cpu_ms();
    uint64_t t0 = imp_now_ns();
    if (imp_store_open(o->dir, &opts, &s) < 0) return fail("open");
    uint64_t t1 = imp_now_ns();
    f->open_cpu_ms = cpu_ms() - cpu;
    f->rss_bytes = rss_bytes() - f->rss_bytes;
    if (open_space(s, &space) < 0) return fail("space");
    size_t n = entry(o->n_entries / 8 * 4 + 3, tokens);
    uint64_t t2 = imp_now_ns();
    if (imp_prefix_acquire(space, tokens, n, 0, &lease, &info) < 0) return fail("match");
    uint64_t t3 = imp_now_ns();
    imp_lease_release(lease);
    f->n_matched = info.n_matched;
    f->n_asked = n;
    cpu = cpu_ms();
    if (imp_store_stats(s, &st) < 0) return fail("stats");
    uint64_t t4 = imp_now_ns();
    f->stat_cpu_ms = cpu_ms() - cpu;
    if (imp_store_list(s, count, &f->n_listed) < 0) return fail("list");
    uint64_t t5 = imp_now_ns();
    if (imp_store_stats(s, &st) < 0) return fail("stats");
    uint64_t t6 = imp_now_ns();
    f->open_ms = (double)(t1 - t0) / 1e6;
    f->match_ms = (double)(t3 - t2) / 1e6;
    f->stat_ms = (double)(t4 - t3) / 1e6;
    f->list_ms = (double)(t5 - t4) / 1e6;
    f->again_ms = (double)(t6 - t5) / 1e6;
    f->n_nodes = st.n_nodes;
    f->n_segments = st.n_segments;
    f->tree_bytes = st.memory_bytes;
    f->disk_bytes = st.disk_bytes;
    imp_space_close(space);
    imp_store_close(s);
    return 0;
}

static int measure_apart(const options *o, figures *f)
{
    int fds[2], status;
    if (pipe(fds) != 0) return -1;
    pid_t pid = fork();
    if (pid == 0) {
        int rc = measure(o, f);
        if (rc == 0 && write(fds[1], f, sizeof *f) != (ssize_t)sizeof *f) rc = -1;
        _exit(rc == 0 ? 0 : 1);
    }
    close(fds[1]);
    bool got = read(fds[0], f, sizeof *f) == (ssize_t)sizeof *f;
    close(fds[0]);
    return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0 && got ? 0 : -1;
}

static void print(const options *o, const figures *f)
{
    double node = f->n_nodes ? (double)f->tree_bytes / (double)f->n_nodes : 0;
    double rss = f->n_nodes ? (double)f->rss_bytes / (double)f->n_nodes : 0;
    if (o->json) {
        printf("{\"bench\":\"open\",\"nodes\":%" PRIu64 ",\"segments\":%" PRIu64 ",\"disk_bytes\":%" PRIu64
               ",\"open_ms\":%.1f,\"match_ms\":%.2f,\"stat_ms\":%.1f,\"list_ms\":%.1f,\"stat_again_ms\":%.1f,"
               "\"open_cpu_ms\":%.1f,\"stat_cpu_ms\":%.1f,\"tree_bytes_per_node\":%.0f,\"rss_bytes_per_node\":%.0f}\n",
               f->n_nodes, f->n_segments, f->disk_bytes, f->open_ms, f->match_ms, f->stat_ms, f->list_ms, f->again_ms,
               f->open_cpu_ms, f->stat_cpu_ms, node, rss);
        return;
    }
    printf("%" PRIu64 " nodes of %d tokens in %" PRIu64 " segments, %.1f MiB\n", f->n_nodes, ENTRY, f->n_segments,
           (double)f->disk_bytes / 1048576);
    printf("open            %9.1f ms, %.1f of CPU\n", f->open_ms, f->open_cpu_ms);
    printf("first match     %9.2f ms\n", f->match_ms);
    printf("stat            %9.1f ms, %.1f of CPU, again %.1f ms\n", f->stat_ms, f->stat_cpu_ms, f->again_ms);
    printf("ls              %9.1f ms, %" PRIu64 " nodes\n", f->list_ms, f->n_listed);
    printf("memory          %9.0f bytes a node (tree), %.0f with all that opening took\n", node, rss);
}

static bool counts_are_right(const options *o, const figures *f)
{
    uint64_t n = o->n_entries;
    bool right = f->n_nodes == n && f->n_segments == n && f->n_listed == n && f->n_matched + 1 == f->n_asked;
    if (!right) {
        fprintf(stderr,
                "bench-open: %" PRIu64 " entries were stored: %" PRIu64 " nodes in %" PRIu64 " segments, %" PRIu64
                " listed; %" PRIu64 " of %" PRIu64 " tokens matched, all but the last should be\n",
                n, f->n_nodes, f->n_segments, f->n_listed, f->n_matched, f->n_asked);
    }
    return right;
}

static double least(double a, double b) { return a < b ? a : b; }

static int measure_again(const options *o, figures *f)
{
    figures g;
    int rc = measure_apart(o, &g);
    if (rc < 0) return rc;
    f->open_ms = least(f->open_ms, g.open_ms);
    f->stat_ms = least(f->stat_ms, g.stat_ms);
    f->list_ms = least(f->list_ms, g.list_ms);
    return 0;
}

static bool in_time(const figures *f)
{
    bool good = f->open_ms < open_most_ms && f->stat_ms < look_most_ms && f->list_ms < look_most_ms;
    if (!good) {
        fprintf(stderr, "bench-open: too slow: open %.0f ms, stat %.0f ms, ls %.0f ms; at most %.0f, %.0f, %.0f\n",
                f->open_ms, f->stat_ms, f->list_ms, open_most_ms, look_most_ms, look_most_ms);
    }
    return good;
}

static int remove_all(const char *dir)
{
    char command[600];
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    return system(command);
}

int main(int argc, char **argv)
{
    static const struct option known[] = {{"entries", required_argument, NULL, 'n'},
                                          {"dir", required_argument, NULL, 'd'},
                                          {"json", no_argument, NULL, 'j'},
                                          {"check", no_argument, NULL, 'c'},
                                          {"help", no_argument, NULL, 'h'},
                                          {0}};
    options o = {.n_entries = 50000};
    char made[512];
    figures f;
    for (int c; (c = getopt_long(argc, argv, "", known, NULL)) != -1;) {
        if (c == 'n') o.n_entries = strtoull(optarg, NULL, 10);
        if (c == 'd') o.dir = optarg;
        if (c == 'j') o.json = true;
        if (c == 'c') o.check = true;
        if (c == 'h' || c == '?') {
            printf("usage: bench-open [--entries N] [--dir DIR] [--json] [--check]\n");
            return c == 'h' ? 0 : 2;
        }
    }
    if (!o.dir) {
        /* In memory if it can be: syncs of 50,000 entries take minutes on a disk, and aren't what is measured. */
        const char *tmp = getenv("TMPDIR");
        if (!tmp || !*tmp) tmp = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
        snprintf(made, sizeof made, "%s/bench-open-XXXXXX", tmp);
        if (!mkdtemp(made)) return 1;
        o.dir = made;
    }
    int rc = store_all(&o);
    if (rc == 0) rc = measure_apart(&o, &f);
    if (rc == 0) print(&o, &f);
    if (rc == 0 && !counts_are_right(&o, &f)) rc = -1;
    for (int i = 1; rc == 0 && o.check && i < CHECK_RUNS; i++) rc = measure_again(&o, &f);
    if (rc == 0 && o.check && !in_time(&f)) rc = -1;
    if (o.dir == made && remove_all(made) != 0) rc = -1;
    return rc == 0 ? 0 : 1;
}
