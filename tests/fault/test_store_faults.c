/* The store when the disk fails, memory runs out, or bytes change under it: an answer is never wrong, nothing else is
 * lost, and the next open finds a store that verifies. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/rng.h"
#include "io/io_fault.h"
#include "support/store_world.h"
#include "support/support.h"

enum { N_OLD = 150, N_NEW = 220, AT = 100 }; /* new shares AT tokens with old */

static int32_t old[N_OLD], new[N_NEW];

static char base[256], at[256]; /* the store as it was, and the one that is broken */
static bool rich;               /* stores that keep all they can, in 8 bits: later entries are derived then */

static int open_world(imp_world *w, const char *dir)
{
    imp_store_opts opts;
    imp_world_rich_opts(&opts);
    return imp_world_open(w, dir, rich ? &opts : NULL, NULL);
}

static int set_up(void **state)
{
    rich = false;
    for (int i = 0; i < N_OLD; i++) old[i] = i;
    for (int i = 0; i < N_NEW; i++) new[i] = i < AT ? i : 5000 + i;
    imp_test_no_log(); /* there would be hundreds of warnings, all of them right */
    *state = imp_test_make_fast_dir();
    if (!*state) return -1;
    snprintf(base, sizeof base, "%s/base", (char *)*state);
    snprintf(at, sizeof at, "%s/at", (char *)*state);
    return 0;
}

static int tear_down(void **state)
{
    imp_io_fault_clear();
    imp_alloc_fail_at(0, 0);
    imp_test_remove_dir(*state);
    return 0;
}

static int run(const char *format, const char *a, const char *b)
{
    char command[1024];
    snprintf(command, sizeof command, format, a, b);
    return system(command);
}

static void copy_store(const char *from, const char *to)
{
    assert_int_equal(run("rm -rf '%s'%s", to, ""), 0);
    assert_int_equal(run("cp -a '%s' '%s'", from, to), 0);
}

/* A store in `dir` with `old` in it. */
static void make_old(const char *dir)
{
    imp_world w;
    run("rm -rf '%s'%s", dir, "");
    assert_int_equal(open_world(&w, dir), 0);
    assert_int_equal(imp_world_commit(&w, old, N_OLD, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    imp_world_close(&w);
}

/* A request's life and more, all of which may fail. */
static void live(const char *dir)
{
    imp_world w;
    imp_stats st;
    if (open_world(&w, dir) < 0) return;
    int64_t n = imp_world_check(&w, old, N_OLD, true);
    assert_int_not_equal(n, IMP_WORLD_WRONG);
    n = imp_world_check(&w, new, N_NEW, true);
    assert_int_not_equal(n, IMP_WORLD_WRONG);
    if (n >= 0) (void)imp_world_commit(&w, new, N_NEW, (size_t)n, 0, NULL);
    (void)imp_store_flush(w.store);
    n = imp_world_check(&w, new, N_NEW, false);
    assert_int_not_equal(n, IMP_WORLD_WRONG);
    (void)imp_store_stats(w.store, &st);
    (void)imp_world_verify(&w, false, false);
    (void)imp_world_commit(&w, new + 7, N_NEW - 7, 0, IMP_COMMIT_DERIVED, NULL);
    imp_world_close(&w);
}

/* Afterwards. `kept`: old must be there as a whole. */
static void look_after(const char *dir, bool kept, const char *what, uint64_t nth)
{
    imp_world w;
    int rc = open_world(&w, dir);
    if (rc < 0) fail_msg("%s %llu: reopening: %s", what, (unsigned long long)nth, imp_last_error());
    int64_t n = imp_world_verify(&w, false, kept);
    if (kept && n != 0) fail_msg("%s %llu: %lld findings", what, (unsigned long long)nth, (long long)n);
    if (!kept) assert_true(imp_world_verify(&w, true, false) >= 0);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    n = imp_world_check(&w, old, N_OLD, true);
    if (kept && n != N_OLD) fail_msg("%s %llu: %lld of old", what, (unsigned long long)nth, (long long)n);
    assert_int_not_equal(n, IMP_WORLD_WRONG);
    assert_int_not_equal(imp_world_check(&w, new, N_NEW, !rich), IMP_WORLD_WRONG);
    /* and it stores again */
    n = imp_world_check(&w, new, N_NEW, true);
    assert_true(n >= 0);
    assert_int_equal(imp_world_commit(&w, new, N_NEW, (size_t)n, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&w, new, N_NEW, !rich), N_NEW);
    imp_world_close(&w);
}

static void io_round(imp_io_kind kind, imp_io_action action, uint64_t value, bool stay, bool kept)
{
    unsigned n_hit = 0, step = imp_test_step();
    for (uint64_t nth = 1;; nth += step) {
        copy_store(base, at);
        imp_io_fault_clear();
        imp_io_fault f = {.kind = kind, .nth = nth, .stay = stay, .action = action, .value = value};
        int rule = imp_io_fault_add(&f);
        live(at);
        uint64_t hits = imp_io_fault_hits(rule);
        imp_io_fault_clear();
        char what[64];
        snprintf(what, sizeof what, "%s, action %d, value %llu", imp_io_kind_name(kind), (int)action,
                 (unsigned long long)value);
        look_after(at, kept, what, nth);
        if (hits == 0) break;
        n_hit++;
    }
    assert_true(n_hit > 0);
}

static void every_io_error_here(void)
{
    static const imp_io_kind kinds[] = {IMP_IO_OPEN, IMP_IO_READ, IMP_IO_WRITE, IMP_IO_FSYNC,
                                        IMP_IO_RENAME, IMP_IO_LIST};
    make_old(base);
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        /* An unreadable header is taken for a bad disk, and its segment dropped. */
        io_round(kinds[i], IMP_IO_ERRNO, EIO, false, true);
        if (kinds[i] == IMP_IO_WRITE) io_round(kinds[i], IMP_IO_ERRNO, ENOSPC, true, true);
        if (kinds[i] == IMP_IO_OPEN) io_round(kinds[i], IMP_IO_ERRNO, EMFILE, true, true);
    }
    io_round(IMP_IO_WRITE, IMP_IO_SHORT, 512, false, true);
    io_round(IMP_IO_READ, IMP_IO_SHORT, 512, false, true);
}

static void every_io_error(void **state)
{
    (void)state;
    every_io_error_here();
}

/* Among the first files that are written is then the space's basis: one that isn't there yet, to begin with. */
static void every_io_error_rich(void **state)
{
    (void)state;
    rich = true;
    every_io_error_here();
    for (imp_io_kind kind = IMP_IO_OPEN; kind <= IMP_IO_RENAME; kind++) {
        for (uint64_t nth = 1; nth <= 3; nth++) {
            imp_world w;
            imp_stats st;
            imp_io_fault f = {.kind = kind, .nth = nth, .action = IMP_IO_ERRNO, .value = EIO, .name = ".basis"};
            run("rm -rf '%s'%s", at, "");
            imp_io_fault_add(&f);
            assert_int_equal(open_world(&w, at), 0);
            assert_int_equal(imp_world_commit(&w, old, N_OLD, 0, 0, NULL), 0);
            assert_int_equal(imp_store_flush(w.store), 0); /* with sketches or without */
            imp_io_fault_clear();
            assert_int_equal(imp_world_check(&w, old, N_OLD, true), N_OLD);
            assert_int_equal(imp_world_verify(&w, false, true), 0);
            assert_int_equal(imp_store_stats(w.store, &st), 0);
            assert_int_equal(st.corrupt_chunks, 0);
            assert_int_equal(imp_world_commit(&w, new, N_NEW, 0, 0, NULL), 0);
            assert_int_equal(imp_store_flush(w.store), 0);
            assert_int_equal(imp_world_check(&w, new, N_NEW, false), N_NEW);
            imp_world_close(&w);
            look_after(at, true, "basis", nth);
        }
    }
    rich = false;
}

/* What a bad disk, cable or controller does to bytes. */
static void every_flip(void **state)
{
    (void)state;
    for (int turn = 0; turn < 2; turn++) {
        rich = turn;
        make_old(base);
        io_round(IMP_IO_READ, IMP_IO_FLIP, 12345, false, false);
        io_round(IMP_IO_WRITE, IMP_IO_FLIP, 54321, false, false);
    }
    rich = false;
}

static void every_allocation_here(bool all)
{
    make_old(base);
    copy_store(base, at);
    imp_alloc_fail_at(0, 0);
    live(at);
    uint64_t n = imp_alloc_fail_at(0, 0) + 3, step = all ? 1 : n / (uint64_t)imp_test_rounds(150) + 1;
    /* A stride that changes with the seed, so that over time each one is tried. */
    for (uint64_t nth = 1 + imp_test_seed() % step; nth <= n; nth += step) {
        copy_store(base, at);
        imp_alloc_fail_at(nth, 0);
        live(at);
        imp_alloc_fail_at(0, 0);
        look_after(at, true, "allocation", nth);
    }
    if (all) fprintf(stderr, "%s: %llu allocations failed\n", rich ? "rich" : "plain", (unsigned long long)n);
}

/* IMP_FAULTS=all: each of them, in both kinds of stores; else some, of one kind, by the seed. */
static void every_allocation(void **state)
{
    (void)state;
    const char *text = getenv("IMP_FAULTS");
    bool all = text && strcmp(text, "all") == 0;
    for (int turn = 0; turn < 2; turn++) {
        rich = turn;
        if (all || imp_test_seed() / 7 % 2 == (uint64_t)turn) every_allocation_here(all);
    }
    rich = false;
}

/* ---- bytes that change on the disk */

static void flip(const char *path, off_t pos, unsigned char bits)
{
    unsigned char b;
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &b, 1, pos), 1);
    b ^= bits;
    assert_int_equal(pwrite(fd, &b, 1, pos), 1);
    close(fd);
}

typedef struct files {
    char names[8][64];
    off_t sizes[8];
    size_t n;
    const char *dir;
} files;

static int add_file(const imp_node_info *node, void *user)
{
    files *f = user;
    struct stat st;
    char *name = f->names[f->n];
    snprintf(name, sizeof f->names[0], "segments/%016llx.seg", (unsigned long long)node->segment);
    for (size_t i = 0; i < f->n; i++) {
        if (strcmp(f->names[i], name) == 0) return 0;
    }
    assert_int_equal(stat(imp_test_path(f->dir, name), &st), 0);
    f->sizes[f->n++] = st.st_size;
    return 0;
}

static bool named;
static const char *wanted;

static void on_finding(const imp_finding *f, void *user)
{
    (void)user;
    if (strcmp(f->file, wanted) == 0) named = true;
}

/* I/O through the page cache, so that what another descriptor wrote is seen at once. */
static void cached_opts(imp_store_opts *opts)
{
    imp_world_opts(opts);
    opts->flags = IMP_STORE_NO_DIRECT;
}

static void one_byte_of_a_segment(void **state)
{
    (void)state;
    imp_world w;
    imp_store_opts opts;
    imp_rng rng;
    files f = {.dir = base};
    make_old(base);
    cached_opts(&opts);
    imp_rng_seed(&rng, imp_test_seed());
    assert_int_equal(imp_world_open(&w, base, &opts, NULL), 0);
    assert_int_equal(imp_store_list(w.store, add_file, &f), 0);
    for (int i = 0; i < 400; i++) {
        size_t k = imp_rng_below(&rng, f.n);
        /* the first and last bytes, and the header more often than its share */
        off_t pos = (off_t)imp_rng_below(&rng, i % 4 == 0 ? 4096 : (uint64_t)f.sizes[k]);
        if (i < 8) pos = i % 2 ? f.sizes[k] - 1 - i / 2 : i / 2;
        const char *path = imp_test_path(base, f.names[k]);
        unsigned char bits = (unsigned char)(1u << imp_rng_below(&rng, 8));
        flip(path, pos, bits);
        wanted = f.names[k];
        named = false;
        int64_t n = imp_store_verify(w.store, 0, on_finding, NULL, NULL);
        if (n < 1 || !named) fail_msg("%s, byte %lld: not found", f.names[k], (long long)pos);
        flip(path, pos, bits);
    }
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);

    /* never wrong; repaired, what comes before it is still there */
    for (int i = 0; i < 60; i++) {
        size_t k = imp_rng_below(&rng, f.n);
        off_t pos = (off_t)imp_rng_below(&rng, (uint64_t)f.sizes[k]);
        copy_store(base, at);
        flip(imp_test_path(at, f.names[k]), pos, (unsigned char)(1 + imp_rng_below(&rng, 255)));
        assert_int_equal(imp_world_open(&w, at, &opts, NULL), 0);
        int64_t n = imp_world_check(&w, old, N_OLD, true);
        assert_int_not_equal(n, IMP_WORLD_WRONG);
        int64_t found = imp_world_verify(&w, true, false);
        assert_true(found >= (n == N_OLD ? 1 : 0));
        assert_int_equal(imp_world_verify(&w, false, true), 0);
        n = imp_world_check(&w, old, N_OLD, true);
        assert_in_range(n, 0, N_OLD - 1);
        assert_int_equal(n % 16, 0);
        assert_int_equal(imp_world_commit(&w, old, N_OLD, (size_t)n, 0, NULL), 0);
        assert_int_equal(imp_store_flush(w.store), 0);
        assert_int_equal(imp_world_check(&w, old, N_OLD, true), N_OLD);
        imp_world_close(&w);
    }

    /* more bytes, fewer bytes, no file, a link in its place */
    for (int i = 0; i < 4; i++) {
        copy_store(base, at);
        const char *path = imp_test_path(at, f.names[0]);
        if (i == 0) assert_int_equal(truncate(path, f.sizes[0] + 4096), 0);
        if (i == 1) assert_int_equal(truncate(path, f.sizes[0] - 1), 0);
        if (i >= 2) assert_int_equal(unlink(path), 0);
        if (i == 3) assert_int_equal(symlink(imp_test_path(base, f.names[0]), path), 0);
        assert_int_equal(imp_world_open(&w, at, &opts, NULL), 0);
        wanted = f.names[0];
        named = false;
        assert_true(imp_store_verify(w.store, 0, on_finding, NULL, NULL) >= 1);
        assert_true(named);
        assert_int_not_equal(imp_world_check(&w, old, N_OLD, true), IMP_WORLD_WRONG);
        assert_true(imp_world_verify(&w, true, false) >= 0);
        assert_int_equal(imp_world_verify(&w, false, true), 0);
        imp_world_close(&w);
    }
}

/* Damage that a load finds: what lies before stays. */
static void drop_from_a_chunk_on(void **state)
{
    (void)state;
    imp_world w;
    imp_path path;
    imp_stats st;
    uint64_t header_bytes;
    make_old(base);
    assert_int_equal(imp_world_open(&w, base, NULL, NULL), 0);
    assert_int_equal(imp_store_match(w.store, w.space->id, old, N_OLD, true, &path, &header_bytes), 0);
    assert_int_equal(path.n_tokens, N_OLD);
    assert_true(path.n_spans >= 2);
    imp_span second = path.spans[1];
    imp_store_drop_bad(w.store, second.seg, IMP_REGION_V, 1, 2, "test");
    assert_int_equal(imp_world_check(&w, old, N_OLD, true), second.depth + 32);
    imp_store_drop_bad(w.store, second.seg, IMP_REGION_V, 1, 2, "test"); /* twice does no harm */
    imp_store_unpin(w.store, &path);
    assert_int_equal(imp_world_check(&w, old, N_OLD, true), second.depth + 32);
    assert_int_equal(imp_store_stats(w.store, &st), 0);
    assert_int_equal(st.corrupt_chunks, 2);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
    assert_int_equal(imp_world_open(&w, base, NULL, NULL), 0);
    assert_int_equal(imp_world_check(&w, old, N_OLD, true), second.depth + 32);
    imp_world_close(&w);
}

/* ---- the catalogue */

static void one_byte_of_the_catalogue(void **state)
{
    (void)state;
    static const char *const names[] = {"catalogue.db", "catalogue.db-wal"};
    imp_world w;
    imp_rng rng;
    unsigned n_rebuilt = 0;
    make_old(base);
    /* as a killed process leaves it: with a log that holds the last changes */
    assert_int_equal(imp_world_open(&w, base, NULL, NULL), 0);
    assert_int_equal(imp_world_commit(&w, new, N_NEW, AT, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    run("cp -a '%s' '%s.killed'", base, base);
    imp_world_close(&w);
    run("rm -f '%s.killed/catalogue.db-shm'%s", base, "");
    run("rm -rf '%s'%s", base, "");
    run("mv '%s.killed' '%s'", base, base);

    imp_rng_seed(&rng, imp_test_seed());
    for (int i = 0; i < 160; i++) {
        struct stat st;
        const char *name = names[i % 2];
        copy_store(base, at);
        const char *path = imp_test_path(at, name);
        assert_int_equal(stat(path, &st), 0);
        off_t pos = (off_t)imp_rng_below(&rng, i < 40 ? 128 : (uint64_t)st.st_size);
        flip(path, pos, (unsigned char)(1 + imp_rng_below(&rng, 255)));
        int rc = imp_world_open(&w, at, NULL, NULL);
        if (rc < 0) fail_msg("%s, byte %lld: %s", name, (long long)pos, imp_last_error());
        int64_t n = imp_world_check(&w, old, N_OLD, true);
        if (n != N_OLD) fail_msg("%s, byte %lld: %lld of old", name, (long long)pos, (long long)n);
        n = imp_world_check(&w, new, N_NEW, true);
        if (n != N_NEW) fail_msg("%s, byte %lld: %lld of new", name, (long long)pos, (long long)n);
        imp_stats s;
        assert_int_equal(imp_store_stats(w.store, &s), 0);
        n_rebuilt += s.catalogue_rebuilds > 0;
        /* what nobody reads may still be wrong: then verify says so, and repairs it */
        if (imp_world_verify(&w, true, false) > 0) n_rebuilt++;
        n = imp_world_verify(&w, false, true);
        if (n != 0) fail_msg("%s, byte %lld: %lld findings", name, (long long)pos, (long long)n);
        assert_int_equal(imp_world_check(&w, old, N_OLD, true), N_OLD);
        imp_world_close(&w);
    }
    assert_true(n_rebuilt > 20);

    /* cut off, replaced by something else, gone */
    for (int i = 0; i < 4; i++) {
        copy_store(base, at);
        const char *path = imp_test_path(at, "catalogue.db");
        if (i == 0) assert_int_equal(truncate(path, 5000), 0);
        if (i == 1) run("head -c 20000 /dev/urandom > '%s'%s", path, "");
        if (i == 2) assert_int_equal(unlink(path), 0);
        if (i == 3) run("rm '%s'*%s", path, "");
        assert_int_equal(imp_world_open(&w, at, NULL, NULL), 0);
        assert_int_equal(imp_world_check(&w, old, N_OLD, true), N_OLD);
        assert_int_equal(imp_world_check(&w, new, N_NEW, true), N_NEW);
        assert_int_equal(imp_world_verify(&w, false, true), 0);
        imp_world_close(&w);
    }
}

/* Damaged while it is open, here and by another instance: both go on, without what is stored until one can rebuild
 * it. */
static void catalogue_damaged_while_open(void **state)
{
    (void)state;
    imp_world a, b;
    make_old(base);
    assert_int_equal(imp_world_open(&a, base, NULL, NULL), 0);
    assert_int_equal(imp_world_open(&b, base, NULL, NULL), 0);
    assert_int_equal(imp_world_check(&a, old, N_OLD, true), N_OLD);
    struct stat st;
    assert_int_equal(stat(imp_test_path(base, "catalogue.db"), &st), 0);
    for (off_t pos = 100; pos < st.st_size; pos += 64) flip(imp_test_path(base, "catalogue.db"), pos, 0xff);
    /* b writes: it notices, can't rebuild (a has it open), and refuses */
    (void)imp_world_commit(&b, new, N_NEW, 0, 0, NULL);
    (void)imp_store_flush(b.store);
    assert_true(imp_world_check(&b, new, N_NEW, true) >= 0);
    imp_world_close(&b);
    int64_t n = 0;
    for (int i = 0; i < 40; i++) {
        n = imp_world_check(&a, old, N_OLD, true);
        assert_int_not_equal(n, IMP_WORLD_WRONG);
        (void)imp_world_commit(&a, new, N_NEW, 0, 0, NULL);
        (void)imp_store_flush(a.store);
        if (imp_world_check(&a, new, N_NEW, true) == N_NEW && n == N_OLD) break;
        usleep(100000);
    }
    assert_int_equal(n, N_OLD);
    assert_true(imp_world_verify(&a, true, false) >= 0); /* memory may have served until now */
    assert_int_equal(imp_world_verify(&a, false, true), 0);
    assert_int_equal(imp_world_check(&a, old, N_OLD, true), N_OLD);
    imp_world_close(&a);
    assert_int_equal(imp_world_open(&a, base, NULL, NULL), 0);
    assert_int_equal(imp_world_check(&a, old, N_OLD, true), N_OLD);
    assert_int_equal(imp_world_verify(&a, false, true), 0);
    imp_world_close(&a);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(every_io_error),       TEST(every_io_error_rich),
        TEST(every_flip),
        TEST(every_allocation),     TEST(one_byte_of_a_segment),
        TEST(drop_from_a_chunk_on), TEST(one_byte_of_the_catalogue),
        TEST(catalogue_damaged_while_open),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
