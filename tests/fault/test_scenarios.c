/* What users of such stores ran into, with the example engine over a real store. An answer is always compared, to the
 * bit, with the one computed without a store. */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/rng.h"
#include "format/segment.h"
#include "io/io_fault.h"
#include "support/store_world.h"
#include "support/support.h"
#include "tiny_engine.h"

enum { VOCAB = 200, MAX_TOKENS = 700, SEGMENT = 32, N_ASK = 5, TMPFS = 0x01021994, MAX_SEGMENTS = 64 };
/* What the store keeps free for its catalogue until the next look, and for the catalogue's log; tokens of a segment that
 * is larger than the former. */
enum { GROWTH = 256 << 10, LOG_SHARE = 16, PART = 640 };

static const tiny_shape shape = {
    .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .head_dim = 32, .n_vocab = VOCAB, .seed = 3,
};

typedef struct world {
    char *folder;
    const char *dir;
    imp_store_opts opts;
    imp_store *store;
    imp_space *space;
    tiny_model *model;
    tiny_cells cells;
    int32_t tokens[MAX_TOKENS];
} world;

static void start(world *w)
{
    assert_int_equal(imp_store_open(w->dir, &w->opts, &w->store), 0);
    assert_int_equal(tiny_space_open(w->model, w->store, &w->space), 0);
}

static void stop(world *w)
{
    imp_space_close(w->space);
    imp_store_close(w->store);
    w->space = NULL;
    w->store = NULL;
}

static int set_up_in(void **state, const char *base)
{
    world *w = calloc(1, sizeof *w);
    imp_rng r;
    if (!w) return -1;
    imp_test_no_log();
    imp_rng_seed(&r, imp_test_seed());
    w->folder = imp_test_make_dir(base);
    if (!w->folder) w->folder = imp_test_make_dir(NULL);
    w->model = tiny_model_new(&shape);
    if (!w->folder || !w->model || tiny_cells_init(&w->cells, w->model, MAX_TOKENS + N_ASK) != 0) return -1;
    char *dir = malloc(strlen(w->folder) + 8);
    if (!dir) return -1;
    sprintf(dir, "%s/store", w->folder);
    w->dir = dir;
    for (size_t i = 0; i < MAX_TOKENS; i++) w->tokens[i] = (int32_t)imp_rng_below(&r, VOCAB);
    imp_store_opts_init(&w->opts);
    w->opts.min_store_tokens = 4;
    w->opts.segment_tokens = SEGMENT;
    w->opts.chunk_tokens = 16;
    w->opts.io_mode = IMP_IO_THREADS;
    w->opts.reorder_period_s = UINT32_MAX;
    *state = w;
    return 0;
}

static int set_up(void **state) { return set_up_in(state, "/dev/shm"); }

static int set_up_on_disk(void **state) { return set_up_in(state, NULL); }

static int tear_down(void **state)
{
    world *w = *state;
    imp_io_fault_clear();
    stop(w);
    tiny_cells_free(&w->cells);
    tiny_model_free(w->model);
    imp_test_remove_dir(w->folder);
    free((void *)(uintptr_t)w->dir);
    free(w);
    return 0;
}

/* Compute `tokens` with and without the store; the report of the former. */
static tiny_report ask(world *w, const int32_t *tokens, uint32_t n)
{
    float with[VOCAB], without[VOCAB];
    tiny_report report, cold;
    w->cells.n = w->cells.n_q = 0;
    assert_int_equal(tiny_prompt(w->model, NULL, NULL, tokens, n, &w->cells, without, &cold), 0);
    w->cells.n = w->cells.n_q = 0;
    assert_int_equal(tiny_prompt(w->model, w->space, NULL, tokens, n, &w->cells, with, &report), 0);
    assert_memory_equal(with, without, sizeof with);
    return report;
}

/* Ask, then store what was computed. The flush's status. */
static int keep(world *w, const int32_t *tokens, uint32_t n)
{
    tiny_report report = ask(w, tokens, n);
    assert_int_equal(tiny_store(w->model, w->space, &w->cells, tokens, n, (uint32_t)report.n_matched), 0);
    return imp_store_flush(w->store);
}

static imp_stats stats_of(world *w)
{
    imp_stats st;
    assert_int_equal(imp_store_stats(w->store, &st), 0);
    return st;
}

typedef struct node {
    uint64_t segment, first;
} node;

typedef struct listing {
    node nodes[MAX_SEGMENTS];
    size_t n;
} listing;

static int add_node(const imp_node_info *info, void *user)
{
    listing *l = user;
    assert_true(l->n < MAX_SEGMENTS);
    l->nodes[l->n++] = (node){info->segment, info->first_token};
    return 0;
}

/* The path of the segment whose first token is at `first` in the only prompt. */
static const char *segment_at(world *w, uint64_t first)
{
    listing l = {.n = 0};
    assert_int_equal(imp_store_list(w->store, add_node, &l), 0);
    for (size_t i = 0; i < l.n; i++) {
        char name[32];
        if (l.nodes[i].first != first) continue;
        imp_seg_name(l.nodes[i].segment, name);
        return imp_test_path(w->dir, name);
    }
    fail_msg("no segment at %llu", (unsigned long long)first);
    return NULL;
}

/* 2: the write of one chunk fails. */
static void a_failed_write_is_a_miss_and_counted(void **state)
{
    world *w = *state;
    uint64_t n_failed = 0;
    start(w);
    for (uint64_t nth = 1;; nth++) {
        imp_io_fault f = {.kind = IMP_IO_WRITE, .nth = nth, .action = IMP_IO_ERRNO, .value = 5 /* EIO */};
        imp_stats before = stats_of(w);
        int rule = imp_io_fault_add(&f), rc = keep(w, w->tokens, SEGMENT);
        bool hit = imp_io_fault_hits(rule) > 0;
        imp_io_fault_clear();
        assert_int_equal(rc, hit ? IMP_E_IO : 0);
        if (!hit) break; /* there are no more writes */
        n_failed++;
        imp_stats after = stats_of(w);
        assert_int_equal(after.io_errors, before.io_errors + 1);
        assert_int_equal(after.commits_failed, before.commits_failed + 1);
        assert_int_equal(after.n_nodes, 0);
        assert_int_equal(after.n_segments, 0);
        assert_int_equal(ask(w, w->tokens, SEGMENT + N_ASK).n_matched, 0);
        assert_int_equal(imp_store_verify(w->store, 0, NULL, NULL, NULL), 0);
    }
    assert_true(n_failed > 1);
    assert_int_equal(ask(w, w->tokens, SEGMENT + N_ASK).n_matched, SEGMENT);
}

/* 3 and 4: one file of three goes, or loses a byte, a block, all of it, while the store is in use; the segment may be
 * open or not. One fall-back, the right answer, and what lies before it still serves. */
static void a_file_lost_or_cut_while_serving(void **state)
{
    world *w = *state;
    enum { GONE, A_BYTE, A_BLOCK, ALL, N_WAYS };
    for (int how = 0; how < 2 * N_WAYS; how++) {
        bool open_before = how % 2;
        struct stat st;
        start(w);
        assert_int_equal(imp_store_remove(w->store, 0), 0);
        assert_int_equal(keep(w, w->tokens, 3 * SEGMENT), 0);
        if (!open_before) {
            stop(w);
            start(w);
        } else {
            assert_int_equal(ask(w, w->tokens, 3 * SEGMENT + N_ASK).n_matched, 3 * SEGMENT);
        }
        const char *path = segment_at(w, SEGMENT);
        assert_int_equal(stat(path, &st), 0);
        off_t left = how / 2 == A_BYTE ? st.st_size - 1 : how / 2 == A_BLOCK ? st.st_size - 4096 : 0;
        if (how / 2 == GONE) assert_int_equal(unlink(path), 0);
        else assert_int_equal(truncate(path, left), 0);

        /* A file that is gone and still open is whole. */
        bool whole = how / 2 == GONE && open_before;
        tiny_report report = ask(w, w->tokens, 3 * SEGMENT + N_ASK);
        assert_in_range(report.n_failed, 0, 1);
        imp_stats after = stats_of(w);
        if (!whole && report.n_failed == 0 && !open_before) assert_true(after.corrupt_chunks > 0);
        if (!whole) assert_true(after.corrupt_chunks + after.io_errors > 0);
        /* The next request isn't stopped again: what is damaged is out of use, and what lies above it serves. */
        report = ask(w, w->tokens, 3 * SEGMENT + N_ASK);
        assert_int_equal(report.n_failed, 0);
        assert_int_equal(report.n_matched, whole ? 3 * SEGMENT : SEGMENT);
        imp_stats again = stats_of(w);
        assert_int_equal(again.corrupt_chunks + again.io_errors, after.corrupt_chunks + after.io_errors);
        /* The one that is cut can't be told from a disk that answers short; a verify settles it. */
        assert_true(imp_store_verify(w->store, 1, NULL, NULL, NULL) >= 0);
        assert_int_equal(imp_store_verify(w->store, 0, NULL, NULL, NULL), 0);
        report = ask(w, w->tokens, 3 * SEGMENT + N_ASK);
        assert_int_equal(report.n_matched, SEGMENT);
        assert_int_equal(report.n_failed, 0);
        assert_int_equal(keep(w, w->tokens, 3 * SEGMENT), 0);
        assert_int_equal(ask(w, w->tokens, 3 * SEGMENT + N_ASK).n_matched, 3 * SEGMENT);
        stop(w);
    }
    start(w);
}

/* What a directory takes, looked at again and again by a thread of its own. */
typedef struct sampler {
    const char *dir;
    uint64_t log_share;
    atomic_bool stop;
    atomic_ullong n, most; /* looks; the largest sum, with the log by its share if it is larger */
    pthread_t thread;
} sampler;

/* As du counts, of files that stay while they are looked at. The names are read at once, so that one that goes and one
 * that comes in its place aren't both counted. */
static uint64_t bytes_in(int at, const char *name, uint64_t *log_bytes)
{
    uint64_t sum = 0;
    struct stat st;
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY);
    DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
    if (!d) {
        if (fd >= 0) close(fd);
        return 0;
    }
    if (fstat(fd, &st) == 0) sum += (uint64_t)st.st_blocks * 512;
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        if (e->d_name[0] == '.' || fstatat(fd, e->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0) continue;
        if (S_ISDIR(st.st_mode)) continue;
        if (strcmp(e->d_name, "catalogue.db-wal") == 0) *log_bytes = (uint64_t)st.st_blocks * 512;
        else sum += (uint64_t)st.st_blocks * 512;
    }
    closedir(d);
    return sum;
}

static uint64_t bytes_now(const sampler *s)
{
    static const char *const folders[] = {"segments", "bases", "live", "."};
    uint64_t sum = 0, log_bytes = 0;
    int fd = open(s->dir, O_RDONLY | O_DIRECTORY);
    for (size_t i = 0; fd >= 0 && i < 4; i++) sum += bytes_in(fd, folders[i], &log_bytes);
    if (fd >= 0) close(fd);
    return sum + (log_bytes < s->log_share ? log_bytes : s->log_share);
}

static void *sample(void *user)
{
    sampler *s = user;
    while (!atomic_load(&s->stop)) {
        uint64_t now = bytes_now(s);
        if (now > atomic_load(&s->most)) atomic_store(&s->most, now);
        atomic_fetch_add(&s->n, 1);
        usleep(500);
    }
    return NULL;
}

/* 7: five times the limit of prefixes that share nothing. What is removed for a segment may be there still when it
 * comes: as much as one took. At no moment is there more. */
static void five_times_the_limit(void **state)
{
    world *w = *state;
    enum { LIMIT = 4 << 20, N = PART + PART / 2 };
    imp_world small;
    imp_store_opts opts;
    imp_stats st = {0};
    static int32_t tokens[N];
    sampler s = {.dir = w->dir, .log_share = LIMIT / LOG_SHARE};
    for (int i = 1; i < N; i++) tokens[i] = i;
    imp_world_opts(&opts);
    opts.segment_tokens = PART;
    opts.limit_bytes = LIMIT;
    assert_int_equal(imp_world_open(&small, w->dir, &opts, NULL), 0);
    assert_int_equal(pthread_create(&s.thread, NULL, sample, &s), 0);
    uint64_t segment = 0;
    for (int i = 0; st.bytes_written < 5ull * LIMIT; i++) {
        tokens[0] = 1000 + i;
        uint64_t looks = atomic_load(&s.n);
        assert_int_equal(imp_world_commit(&small, tokens, N, 0, 0, NULL), 0);
        while (atomic_load(&s.n) < looks + 2) usleep(200); /* one from begin to end while it is written */
        assert_int_equal(imp_store_flush(small.store), 0);
        assert_int_equal(imp_world_check(&small, tokens, N, true), N); /* the newest isn't its own victim */
        assert_int_equal(imp_store_stats(small.store, &st), 0);
        if (i == 0) segment = imp_world_du(imp_test_path(w->dir, "segments")) / N * PART;
    }
    atomic_store(&s.stop, true);
    assert_int_equal(pthread_join(s.thread, NULL), 0);
    uint64_t most = atomic_load(&s.most);
    fprintf(stderr, "%llu looks, %llu bytes at most under a limit of %d; a segment takes %llu\n",
            (unsigned long long)atomic_load(&s.n), (unsigned long long)most, LIMIT, (unsigned long long)segment);
    assert_true(segment > GROWTH); /* what is kept for the catalogue hides nothing */
    assert_in_range(most, LIMIT / 2, LIMIT + segment);
    assert_true(st.evicted_nodes > 0);
    assert_int_equal(imp_world_verify(&small, false, true), 0);
    assert_int_equal(imp_store_gc(small.store, NULL), 0);
    assert_in_range(imp_world_du(w->dir), 0, LIMIT);
    imp_world_close(&small);
}

/* 8: a prefix of ten parts, and a limit for nine of them. */
enum { PARTS = 10, LONG = PARTS * PART };

/* Nine parts are there, from the first token on, each is found and right, and nothing else takes room. */
static void nine_of_ten(world *w, imp_world *small, const int32_t *tokens)
{
    listing l = {.n = 0};
    imp_stats st;
    bool there[PARTS] = {false};
    assert_int_equal(imp_store_list(small->store, add_node, &l), 0);
    for (size_t i = 0; i < l.n; i++) {
        assert_int_equal(l.nodes[i].first % PART, 0);
        assert_in_range(l.nodes[i].first / PART, 0, PARTS - 1);
        there[l.nodes[i].first / PART] = true;
    }
    assert_int_equal(l.n, PARTS - 1);
    for (int i = 0; i < PARTS; i++) assert_int_equal(there[i], i < PARTS - 1);
    assert_int_equal(imp_store_stats(small->store, &st), 0);
    assert_int_equal(st.n_segments, PARTS - 1);
    assert_int_equal(imp_world_check(small, tokens, LONG, true), LONG - PART);
    assert_int_equal(imp_world_verify(small, false, true), 0);
    assert_int_equal(st.disk_bytes, imp_world_du(w->dir));
    assert_in_range(st.disk_bytes, 0, imp_store_options(small->store)->limit_bytes);
}

static void the_tail_of_a_prefix_goes_first(void **state)
{
    world *w = *state;
    imp_world small;
    imp_store_opts opts;
    imp_stats st;
    static int32_t tokens[LONG];
    char command[600];
    for (int i = 0; i < LONG; i++) tokens[i] = i;
    imp_world_opts(&opts);
    opts.segment_tokens = PART;
    opts.limit_bytes = 15 << 20; /* from 16 MiB on there is a ballast */
    assert_int_equal(imp_world_open(&small, w->dir, &opts, NULL), 0);
    assert_int_equal(imp_world_commit(&small, tokens, LONG, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(small.store), 0);
    assert_int_equal(imp_store_stats(small.store, &st), 0);
    assert_int_equal(st.n_segments, PARTS);
    imp_world_close(&small);

    uint64_t part = imp_world_du(imp_test_path(w->dir, "segments")) / PARTS, all = imp_world_du(w->dir);
    assert_true(part > GROWTH); /* else that would cost a part of its own */
    /* Half a part is to spare, and the catalogue's log counts by its share of the limit. */
    opts.limit_bytes = (all - part / 2 + GROWTH) * LOG_SHARE / (LOG_SHARE - 1);
    assert_int_equal(imp_world_open(&small, w->dir, &opts, NULL), 0);
    nine_of_ten(w, &small, tokens);
    assert_int_equal(imp_store_gc(small.store, NULL), 0);
    nine_of_ten(w, &small, tokens);
    imp_world_close(&small);

    /* Where the limit was there before, the tail stays away. */
    snprintf(command, sizeof command, "rm -rf '%s'", w->dir);
    assert_int_equal(system(command), 0);
    assert_int_equal(imp_world_open(&small, w->dir, &opts, NULL), 0);
    assert_int_equal(imp_world_commit(&small, tokens, LONG, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(small.store), IMP_E_FULL);
    nine_of_ten(w, &small, tokens);
    imp_world_close(&small);
}

/* Share of the segments' pages that the page cache holds, in percent. */
static unsigned percent_cached(world *w)
{
    listing l = {.n = 0};
    size_t n_pages = 0, n_cached = 0;
    assert_int_equal(imp_store_list(w->store, add_node, &l), 0);
    for (size_t i = 0; i < l.n; i++) {
        char name[32];
        struct stat st;
        unsigned char in[4096];
        imp_seg_name(l.nodes[i].segment, name);
        int fd = open(imp_test_path(w->dir, name), O_RDONLY);
        assert_true(fd >= 0 && fstat(fd, &st) == 0);
        size_t n = ((size_t)st.st_size + 4095) / 4096;
        assert_true(n <= sizeof in);
        void *at = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        assert_true(at != MAP_FAILED && mincore(at, (size_t)st.st_size, in) == 0);
        for (size_t p = 0; p < n; p++) n_cached += in[p] & 1;
        n_pages += n;
        munmap(at, (size_t)st.st_size);
        close(fd);
    }
    return (unsigned)(n_cached * 100 / (n_pages ? n_pages : 1));
}

/* 12: with O_DIRECT the store leaves the page cache to others. */
static void the_page_cache_stays_free(void **state)
{
    world *w = *state;
    struct statfs fs;
    start(w);
    assert_int_equal(keep(w, w->tokens, 5 * SEGMENT + 7), 0); /* an odd last chunk */
    stop(w);
    start(w);
    assert_int_equal(ask(w, w->tokens, 5 * SEGMENT + 7 + N_ASK).n_matched, 5 * SEGMENT + 7);
    imp_stats st = stats_of(w);
    if (!strstr(st.io_mode, "O_DIRECT") || statfs(w->dir, &fs) != 0 || fs.f_type == TMPFS) {
        fprintf(stderr, "not looked at: reads go by %s\n", st.io_mode);
        return;
    }
#ifdef IMPRESS_VALGRIND
    fprintf(stderr, "not looked at: valgrind itself reads the head of each file that is mapped\n");
    (void)percent_cached(w);
#else
    assert_in_range(percent_cached(w), 0, 5);
#endif
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(a_failed_write_is_a_miss_and_counted),
        TEST(a_file_lost_or_cut_while_serving),
        TEST(five_times_the_limit),
        TEST(the_tail_of_a_prefix_goes_first),
        cmocka_unit_test_setup_teardown(the_page_cache_stays_free, set_up_on_disk, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
