/* The sketches' bases: learned once, kept in a file, found again, and learned anew when it is lost; no store loses KV
 * by any of it. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/rng.h"
#include "io/io_fault.h"
#include "store/store_internal.h"
#include "support/store_world.h"
#include "support/support.h"

enum { N_TOKENS = 200 };

static int32_t tokens[N_TOKENS];
static char name[64]; /* of the world's basis */

static void quiet(imp_log_level level, const char *line, void *user) { (void)level, (void)line, (void)user; }

static int set_up(void **state)
{
    for (int i = 0; i < N_TOKENS; i++) tokens[i] = 7 * i;
    imp_log_set(quiet, NULL, IMP_LOG_ERROR);
    *state = imp_test_make_dir("/dev/shm");
    if (!*state) *state = imp_test_make_dir(NULL);
    return *state ? 0 : -1;
}

static int tear_down(void **state)
{
    imp_test_remove_dir(*state);
    return 0;
}

static imp_world open_world(const char *dir)
{
    imp_world w;
    imp_store_opts opts;
    char hex[33];
    imp_world_rich_opts(&opts);
    opts.flags = IMP_STORE_NO_DIRECT; /* what others write to the files is seen */
    assert_int_equal(imp_world_open(&w, dir, &opts, NULL), 0);
    imp_space_id(w.space, hex);
    snprintf(name, sizeof name, "bases/%s.basis", hex);
    return w;
}

static void commit(imp_world *w, size_t from, size_t n)
{
    assert_int_equal(imp_world_commit(w, tokens, n, from, IMP_COMMIT_DERIVED, NULL), 0);
    assert_int_equal(imp_store_flush(w->store), 0);
    assert_int_equal(imp_world_check(w, tokens, n, false), n);
}

typedef struct found {
    uint64_t basis[8]; /* of each span; 0: it has no sketches */
    bool usable[8];
    size_t n;
} found;

static found look(imp_world *w, size_t n)
{
    found f = {0};
    imp_path path;
    uint64_t header_bytes;
    assert_int_equal(imp_store_match(w->store, w->space->id, tokens, n, false, &path, &header_bytes), 0);
    assert_int_equal(path.n_tokens, n);
    assert_in_range(path.n_spans, 1, 8);
    for (f.n = 0; f.n < path.n_spans; f.n++) {
        f.basis[f.n] = imp_seg_layout_meta(path.spans[f.n].seg->layout)->basis;
        f.usable[f.n] = path.spans[f.n].seg->bases != NULL;
    }
    imp_store_unpin(w->store, &path);
    return f;
}

static imp_stats stats_of(imp_world *w)
{
    imp_stats st;
    assert_int_equal(imp_store_stats(w->store, &st), 0);
    return st;
}

static void learned_once(void **state)
{
    const char *dir = *state;
    imp_world w = open_world(dir);
    struct stat st;
    uint64_t n_read = 0;
    commit(&w, 0, 64);
    found f = look(&w, 64);
    assert_true(f.basis[0] != 0 && f.usable[0]);
    assert_int_equal(stat(imp_test_path(dir, name), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(st.st_size % 4096, 0);
    assert_int_equal(stat(imp_test_path(dir, "bases"), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0700);
    assert_true(imp_bases_bytes(w.store) > 0);
    assert_int_equal(stats_of(&w).disk_bytes, imp_world_du(dir));
    const imp_bases *b = imp_bases_get(w.store, w.space->id, f.basis[0], &n_read);
    assert_non_null(b);
    assert_int_equal(n_read, 0); /* it was just learned */
    assert_int_equal(b->n_layers, WORLD_LAYERS);
    imp_bases_drop(w.store, b);
    commit(&w, 64, 130);
    assert_true(look(&w, 130).basis[1] == f.basis[0]);
    imp_world_close(&w);

    /* another life, another process's space of the same name, another space */
    w = open_world(dir);
    found g = look(&w, 130);
    assert_true(g.usable[0] && g.usable[1] && g.basis[0] == f.basis[0]);
    b = imp_bases_get(w.store, w.space->id, f.basis[0], &n_read);
    assert_ptr_equal(b, imp_bases_get(w.store, w.space->id, f.basis[0], &n_read));
    imp_bases_drop(w.store, b);
    imp_bases_drop(w.store, b);
    commit(&w, 130, 200);
    assert_true(look(&w, 200).basis[2] == f.basis[0]);
    assert_null(imp_bases_get(w.store, w.space->id, f.basis[0] + 1, &n_read));
    assert_null(imp_bases_get(w.store, w.space->id, 0, &n_read));
    assert_int_equal(stats_of(&w).corrupt_chunks, 0);
    imp_world tenant;
    imp_store_opts opts;
    imp_world_rich_opts(&opts);
    assert_int_equal(imp_world_open(&tenant, dir, &opts, "tenant"), 0);
    assert_int_equal(imp_world_commit(&tenant, tokens, 100, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(tenant.store), 0);
    assert_int_equal(imp_world_verify(&tenant, false, true), 0);
    imp_world_close(&tenant);
    imp_world_close(&w);
    unsigned n_files = 0;
    DIR *d = opendir(imp_test_path(dir, "bases"));
    for (struct dirent *e; (e = readdir(d)) != NULL;) n_files += e->d_name[0] != '.';
    closedir(d);
    assert_int_equal(n_files, 2);
}

static void change_file(const char *path, int how, imp_rng *rng)
{
    struct stat st;
    unsigned char byte;
    assert_int_equal(stat(path, &st), 0);
    if (how == 0) assert_int_equal(unlink(path), 0);
    if (how == 1) assert_int_equal(truncate(path, st.st_size - 4096), 0);
    if (how == 2) assert_int_equal(truncate(path, 0), 0);
    if (how == 3) assert_int_equal(truncate(path, st.st_size + 4096), 0);
    if (how == 4) assert_int_equal(truncate(path, 100), 0);
    if (how == 5) {
        assert_int_equal(unlink(path), 0);
        assert_int_equal(symlink("/etc/passwd", path), 0);
    }
    if (how < 6) return;
    off_t at = (off_t)imp_rng_below(rng, how % 2 ? 80 : (uint64_t)st.st_size); /* the header as often as the rest */
    int fd = open(path, O_RDWR);
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= (unsigned char)(1 + imp_rng_below(rng, 255));
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

/* Lost or damaged while nobody has it open: old sketches are of no use, new ones are made, KV isn't touched. */
static void lost_and_learned_anew(void **state)
{
    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed());
    for (int how = 0; how < 20; how++) {
        const char *dir = *state;
        imp_world w = open_world(dir);
        commit(&w, 0, 64);
        uint64_t id = look(&w, 64).basis[0];
        imp_world_close(&w);
        change_file(imp_test_path(dir, name), how, &rng);

        w = open_world(dir);
        found f = look(&w, 64);
        assert_true(f.basis[0] == id && !f.usable[0]);
        imp_stats st = stats_of(&w);
        assert_int_equal(st.corrupt_chunks + st.io_errors, 1);
        (void)look(&w, 64);
        st = stats_of(&w);
        assert_int_equal(st.corrupt_chunks + st.io_errors, 1); /* said once */
        assert_int_equal(imp_world_check(&w, tokens, 64, false), 64);
        if (how != 5) {
            commit(&w, 64, 150);
            f = look(&w, 150);
            assert_false(f.usable[0]);
            assert_true(f.usable[1] && f.basis[1] != 0);
            assert_int_equal(imp_world_verify(&w, false, true), 0);
        } else {
            commit(&w, 64, 150); /* a link is left alone */
            assert_int_equal(look(&w, 150).basis[1], 0);
        }
        assert_int_equal(imp_store_remove(w.store, 0), 0);
        imp_world_close(&w);
        (void)unlink(imp_test_path(dir, name));
    }
}

/* Lost while a store has it in memory: written again as it was. */
static void lost_while_open(void **state)
{
    const char *dir = *state;
    imp_world w = open_world(dir);
    commit(&w, 0, 64);
    uint64_t id = look(&w, 64).basis[0];
    for (int how = 0; how < 3; how++) {
        imp_rng rng;
        imp_rng_seed(&rng, 1);
        change_file(imp_test_path(dir, name), how, &rng);
        commit(&w, 64 + 40 * (size_t)how, 64 + 40 * (size_t)how + 40);
        found f = look(&w, 64 + 40 * (size_t)how + 40);
        for (size_t i = 0; i < f.n; i++) assert_true(f.basis[i] == id && f.usable[i]);
    }
    imp_world_close(&w);
    w = open_world(dir);
    found f = look(&w, 184);
    for (size_t i = 0; i < f.n; i++) assert_true(f.basis[i] == id && f.usable[i]);
    imp_world_close(&w);
}

/* What is refused isn't learned: no KV is lost by it. */
static void no_room(void **state)
{
    imp_world w;
    imp_store_opts opts;
    imp_world_rich_opts(&opts);
    opts.limit_bytes = 1 << 20; /* a sixteenth of it is a smaller one than this */
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    assert_int_equal(rmdir(imp_test_path(*state, "bases")), 0);
    const int fd = open(imp_test_path(*state, "bases"), O_CREAT | O_WRONLY, 0600); /* nothing can be written there */
    assert_true(fd >= 0);
    close(fd);
    commit(&w, 0, 100);
    assert_int_equal(look(&w, 100).basis[0], 0);
    assert_int_equal(unlink(imp_test_path(*state, "bases")), 0);
    assert_int_equal(mkdir(imp_test_path(*state, "bases"), 0700), 0);
    commit(&w, 100, 170);
    assert_true(look(&w, 170).basis[2] != 0);
    assert_true(imp_world_du(*state) <= opts.limit_bytes);
    imp_world_close(&w);
}

static void put_file(const char *path)
{
    int fd = open(path, O_CREAT | O_WRONLY, 0600);
    assert_true(fd >= 0);
    close(fd);
}

static bool there(const char *dir, const char *file) { return access(imp_test_path(dir, file), F_OK) == 0; }

/* Files that no space has: of a process that was killed, or of one that is about to store the first segment. */
static void swept(void **state)
{
    static const char other[] = "bases/0123456789abcdef0123456789abcdef.basis";
    const struct timespec old[2] = {{1000, 0}, {1000, 0}};
    const char *dir = *state;
    uint64_t n_files = 0, n_bytes = 0;
    imp_gc_report gc;
    char tmp[80];
    imp_world w = open_world(dir);
    snprintf(tmp, sizeof tmp, "%s.tmp", name);
    commit(&w, 0, 64);
    put_file(imp_test_path(dir, tmp));
    put_file(imp_test_path(dir, other));
    put_file(imp_test_path(dir, "bases/note.txt"));
    assert_int_equal(imp_change_begin(w.store), 0);
    imp_bases_sweep(w.store, false, &n_files, &n_bytes);
    assert_int_equal(imp_change_end(w.store, 0), 0);
    assert_int_equal(n_files, 1);
    assert_false(there(dir, tmp));
    assert_int_equal(imp_store_gc(w.store, &gc), 0);
    assert_true(there(dir, other)); /* too young */
    assert_int_equal(utimensat(AT_FDCWD, imp_test_path(dir, other), old, 0), 0);
    assert_int_equal(utimensat(AT_FDCWD, imp_test_path(dir, name), old, 0), 0);
    assert_int_equal(imp_store_gc(w.store, &gc), 0);
    assert_false(there(dir, other));
    assert_true(there(dir, name)); /* in use, however old */
    assert_true(there(dir, "bases/note.txt")); /* not ours */

    put_file(imp_test_path(dir, other));
    imp_world second = open_world(dir);
    assert_true(there(dir, other));
    imp_world_close(&second);
    imp_world_close(&w);
    w = open_world(dir); /* nobody else has the store open */
    assert_false(there(dir, other));
    assert_true(there(dir, name) && there(dir, "bases/note.txt"));
    imp_world_close(&w);
}

static unsigned n_warnings;

static void count_warnings(imp_log_level level, const char *line, void *user)
{
    (void)line, (void)user;
    n_warnings += level <= IMP_LOG_WARN;
}

/* A space goes with its last segment, its row, tree and bases too, in each store that has the directory open; and comes
 * back with the next one. */
static void goes_with_its_space(void **state)
{
    const char *dir = *state;
    imp_log_set(count_warnings, NULL, IMP_LOG_WARN);
    n_warnings = 0;
    imp_world w = open_world(dir), other = open_world(dir);
    const size_t had = w.store->forest.n_trees;
    uint64_t first = 0;
    for (int round = 0; round < 3; round++) {
        imp_world *writer = round % 2 ? &other : &w, *remover = round % 2 ? &w : &other;
        commit(writer, 0, 64);
        found f = look(remover, 64);
        assert_true(f.usable[0] && there(dir, name));
        assert_true(look(writer, 64).basis[0] == f.basis[0]);
        first = round == 0 ? f.basis[0] : first;
        assert_int_equal(f.basis[0], first); /* learned from the same rows again */
        assert_int_equal(w.store->forest.n_trees, had + 1);
        assert_int_equal(imp_store_remove(remover->store, 0), 0);
        assert_false(there(dir, name));
        assert_int_equal(imp_world_check(writer, tokens, 64, false), 0);
        assert_int_equal(w.store->forest.n_trees, had);
        assert_int_equal(other.store->forest.n_trees, had);
        assert_int_equal(w.store->forest.n_bare + other.store->forest.n_bare, 0);
        /* Segments may be closed by another thread. */
        while (imp_bases_memory(w.store) + imp_bases_memory(other.store) > 0) usleep(1000);
        assert_int_equal(stats_of(writer).disk_bytes, imp_world_du(dir));
    }
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    assert_int_equal(stats_of(&w).corrupt_chunks + stats_of(&other).corrupt_chunks, 0);
    assert_int_equal(n_warnings, 0);
    imp_world_close(&other);
    imp_world_close(&w);
    imp_log_set(quiet, NULL, IMP_LOG_ERROR);
}

static void other_tokens(int32_t *to, int32_t n)
{
    for (int32_t i = 0; i < n; i++) to[i] = 100000 * n + 3 * i;
}

static bool finds(imp_world *w, const int32_t *t, size_t n, uint64_t *basis)
{
    imp_path path;
    uint64_t header_bytes;
    assert_int_equal(imp_store_match(w->store, w->space->id, t, n, false, &path, &header_bytes), 0);
    bool usable = path.n_tokens == n && path.spans[0].seg->bases;
    *basis = path.n_tokens == n ? imp_seg_layout_meta(path.spans[0].seg->layout)->basis : 0;
    imp_store_unpin(w->store, &path);
    return usable;
}

/* The rule acted: somebody stands before the operation. */
static void await_hit(int rule)
{
    assert_true(rule >= 0);
    while (imp_io_fault_hits(rule) == 0) usleep(1000);
}

/* The last segment goes while another process packs the next one by the same bases. They may be others by then, or not
 * to be had: then it has no sketches. */
static void gone_while_packing(void **state)
{
    enum { GONE, REPLACED, NOT_TO_BE_HAD, N_WAYS };
    const char *dir = *state;
    int32_t second[64], third[100];
    uint64_t id = 0;
    other_tokens(second, 64);
    other_tokens(third, 100);
    imp_log_set(count_warnings, NULL, IMP_LOG_WARN);
    n_warnings = 0;
    for (int way = 0; way < N_WAYS; way++) {
        imp_world w = open_world(dir), other = open_world(dir);
        commit(&w, 0, 64);
        int rule = imp_io_fault_add(&(imp_io_fault){IMP_IO_WRITE, 1, false, IMP_IO_HOLD, 0, "segments/"});
        assert_int_equal(imp_world_commit(&w, second, 64, 0, 0, NULL), 0);
        await_hit(rule);
        assert_int_equal(imp_store_remove(other.store, 0), 0);
        assert_false(there(dir, name));
        if (way == REPLACED) {
            assert_int_equal(imp_world_commit(&other, third, 100, 0, 0, NULL), 0);
            assert_int_equal(imp_store_flush(other.store), 0);
            assert_true(finds(&other, third, 64, &id));
        } else if (way == NOT_TO_BE_HAD) {
            assert_int_equal(rmdir(imp_test_path(dir, "bases")), 0);
            put_file(imp_test_path(dir, "bases"));
        }
        imp_io_fault_clear();
        assert_int_equal(imp_store_flush(w.store), 0);
        assert_int_equal(finds(&w, second, 64, &id), way != NOT_TO_BE_HAD);
        assert_int_equal(finds(&other, second, 64, &id), way != NOT_TO_BE_HAD);
        assert_int_equal(id != 0, way != NOT_TO_BE_HAD);
        assert_int_equal(imp_world_check(&w, second, 64, false), 64);
        assert_int_equal(stats_of(&w).corrupt_chunks + stats_of(&other).corrupt_chunks, 0);
        assert_int_equal(n_warnings, way == NOT_TO_BE_HAD); /* stored without */
        imp_world_close(&other);
        imp_world_close(&w);
        if (way == NOT_TO_BE_HAD) assert_int_equal(unlink(imp_test_path(dir, "bases")), 0);
        w = open_world(dir);
        assert_int_equal(finds(&w, second, 64, &id), way != NOT_TO_BE_HAD);
        assert_int_equal(imp_world_verify(&w, false, true), 0);
        assert_int_equal(imp_store_remove(w.store, 0), 0);
        imp_world_close(&w);
    }
    imp_log_set(quiet, NULL, IMP_LOG_ERROR);
}

static void *remove_all(void *store) { return imp_store_remove(store, 0) == 0 ? NULL : store; }

/* Between the change in which the last segment goes and the end of its bases another process stores the next one. */
static void back_before_its_bases_went(void **state)
{
    const char *dir = *state;
    pthread_t thread;
    void *failed;
    imp_world w = open_world(dir), other = open_world(dir);
    commit(&w, 0, 64);
    const uint64_t id = look(&other, 64).basis[0];
    int rule = imp_io_fault_add(&(imp_io_fault){IMP_IO_UNLINK, 1, false, IMP_IO_HOLD, 0, "segments/"});
    assert_int_equal(pthread_create(&thread, NULL, remove_all, w.store), 0);
    await_hit(rule);
    assert_true(there(dir, name));
    assert_int_equal(imp_world_commit(&other, tokens, 64, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(other.store), 0);
    imp_io_fault_clear();
    assert_int_equal(pthread_join(thread, &failed), 0);
    assert_null(failed);
    assert_true(there(dir, name));
    found f = look(&w, 64);
    assert_true(f.usable[0] && f.basis[0] == id);
    assert_int_equal(stats_of(&w).corrupt_chunks, 0);
    imp_world_close(&other);
    imp_world_close(&w);
}

/* An entry for which the space's only one must go is stored by the bases that are there. */
static void own_bases_stay(void **state)
{
    imp_store_opts opts;
    imp_world w;
    int32_t second[64];
    uint64_t first_id, id;
    other_tokens(second, 64);
    imp_world_rich_opts(&opts);
    opts.limit_bytes = 4 << 20;
    opts.space_percent = 1; /* room for one of them */
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    commit(&w, 0, 64);
    assert_true(finds(&w, tokens, 64, &first_id));
    assert_int_equal(imp_world_commit(&w, second, 64, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_world_check(&w, tokens, 64, false), 0);
    assert_true(finds(&w, second, 64, &id));
    assert_int_equal(id, first_id);
    imp_world_close(&w);
}

/* An entry that can't be stored leaves no bases. */
static void none_without_entry(void **state)
{
    const char *dir = *state;
    imp_world w = open_world(dir);
    assert_true(imp_io_fault_add(&(imp_io_fault){IMP_IO_WRITE, 1, true, IMP_IO_ERRNO, EIO, "segments/"}) >= 0);
    assert_int_equal(imp_world_commit(&w, tokens, 64, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), IMP_E_IO);
    imp_io_fault_clear();
    assert_false(there(dir, name));
    assert_int_equal(imp_bases_memory(w.store), 0);
    commit(&w, 0, 64);
    assert_true(there(dir, name) && look(&w, 64).usable[0]);
    imp_world_close(&w);
}

/* Rows of spaces without a segment, as former versions left them, go. */
static void bare_rows_go(void **state)
{
    enum { N_BARE = 150 };
    const char *dir = *state;
    imp_world w = open_world(dir);
    commit(&w, 0, 64);
    imp_world_close(&w);
    imp_cat *c;
    assert_int_equal(imp_cat_open(dir, 0, &c), 0);
    assert_int_equal(imp_cat_begin(c), 0);
    for (uint64_t i = 0; i < N_BARE; i++) {
        assert_int_equal(imp_cat_put_space(c, &(imp_cat_space){{i, 7}, "some model", 0}), 0);
    }
    assert_int_equal(imp_cat_commit(c), 0);
    imp_cat_close(c);
    w = open_world(dir);
    assert_true(look(&w, 64).usable[0]);
    for (size_t n = 64; n < 128; n += 8) commit(&w, n, n + 8);
    assert_int_equal(w.store->forest.n_trees, 1);
    assert_int_equal(w.store->forest.n_bare, 0);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
}

/* More bases than may be in memory at once, all of stored entries: each is read when it is wanted. */
static void bounded_in_memory(void **state)
{
    enum { N_SPACES = 12 };
    imp_store_opts opts;
    imp_world w, of[N_SPACES];
    uint64_t n_read = 0;
    imp_world_rich_opts(&opts);
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    for (int i = 0; i < N_SPACES; i++) {
        char salt[24];
        snprintf(salt, sizeof salt, "tenant %d", i);
        of[i] = w;
        assert_int_equal(imp_world_space(w.store, salt, &of[i].space), 0);
        commit(&of[i], 0, 64);
    }
    const size_t one = imp_bases_memory(w.store) / N_SPACES;
    const imp_bases *held = imp_bases_get(w.store, of[0].space->id, look(&of[0], 64).basis[0], &n_read);
    assert_non_null(held);
    imp_bases_bound(w.store, 4 * one);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < N_SPACES; i++) assert_true(look(&of[i], 64).usable[0]);
        if (round > 0) assert_true(imp_bases_memory(w.store) <= 6 * one);
    }
    size_t n;
    assert_non_null(imp_basis_bytes(held->layers[WORLD_LAYERS - 1], &n)); /* they stayed */
    imp_bases_drop(w.store, held);

    /* Those of one space stay, however large: they are for every request. */
    imp_bases_bound(w.store, 1);
    (void)look(&of[1], 64);
    for (int i = 0; i < 3; i++) {
        imp_path path;
        uint64_t header_bytes;
        assert_int_equal(imp_store_match(w.store, of[1].space->id, tokens, 64, false, &path, &header_bytes), 0);
        assert_int_equal(path.n_tokens, 64);
        if (i > 0) assert_int_equal(header_bytes, 0);
        imp_store_unpin(w.store, &path);
    }
    /* The others' segments may be closed by another thread. */
    for (int i = 0; i < 5000 && imp_bases_memory(w.store) > 2 * one; i++) usleep(1000);
    assert_true(imp_bases_memory(w.store) <= 2 * one);
    for (int i = 0; i < N_SPACES; i++) imp_space_close(of[i].space);
    imp_world_close(&w);
}

/* A store of which tenants come and go: what it keeps of each doesn't add up. */
static void many_spaces(void **state)
{
    enum { N_SPACES = 600, HALF = N_SPACES / 2 };
    imp_store_opts opts;
    imp_world w;
    imp_world_rich_opts(&opts);
    opts.limit_bytes = 4 << 20;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    imp_space *usual = w.space;
    size_t bases = 0, forest = 0;
    for (int i = 0; i < N_SPACES; i++) {
        char salt[24];
        snprintf(salt, sizeof salt, "tenant %d", i);
        assert_int_equal(imp_world_space(w.store, salt, &w.space), 0);
        assert_int_equal(imp_world_commit(&w, tokens, 64, 0, 0, NULL), 0);
        assert_int_equal(imp_store_flush(w.store), 0);
        if (i + 1 == N_SPACES) assert_true(look(&w, 64).usable[0]);
        imp_space_close(w.space);
        if (i + 1 == HALF) {
            bases = imp_bases_memory(w.store);
            forest = imp_forest_memory(&w.store->forest);
        }
    }
    w.space = usual;
    imp_stats st = stats_of(&w);
    assert_true(st.evicted_nodes >= HALF);
    assert_int_equal(w.store->forest.n_trees, st.n_spaces);
    assert_true(imp_bases_memory(w.store) < bases + bases / 4);
    assert_true(imp_forest_memory(&w.store->forest) < forest + forest / 4);
    unsigned n_files = 0;
    DIR *d = opendir(imp_test_path(*state, "bases"));
    for (struct dirent *e; (e = readdir(d)) != NULL;) n_files += e->d_name[0] != '.';
    closedir(d);
    assert_int_equal(n_files, st.n_spaces);
    assert_int_equal(st.disk_bytes, imp_world_du(*state));
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
}

static char finding[256];

static void on_finding(const imp_finding *f, void *user)
{
    (void)user;
    snprintf(finding, sizeof finding, "%s: %s", f->file, f->what);
}

static void verified(void **state)
{
    const char *dir = *state;
    imp_world w = open_world(dir);
    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed());
    commit(&w, 0, 64);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    change_file(imp_test_path(dir, name), 8, &rng);
    finding[0] = '\0';
    assert_int_equal(imp_store_verify(w.store, 0, on_finding, NULL, NULL), 1);
    assert_non_null(strstr(finding, name));
    assert_int_equal(imp_store_verify(w.store, 1, on_finding, NULL, NULL), 1);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    assert_int_equal(access(imp_test_path(dir, name), F_OK), -1);
    imp_world_close(&w);
}

/* Two processes learn at once: both end with the same bases. */
static void processes_at_once(void **state)
{
    enum { N = 3 };
    const char *dir = *state;
    pid_t pids[N];
    imp_world w = open_world(dir); /* so that none of them makes the store */
    imp_world_close(&w);
    for (int p = 0; p < N; p++) {
        pids[p] = fork();
        if (pids[p] > 0) continue;
        for (int i = 0; i < N_TOKENS; i++) tokens[i] += 1000 * p;
        imp_world child = open_world(dir);
        int rc = imp_world_commit(&child, tokens, N_TOKENS, 0, 0, NULL);
        if (rc == 0) rc = imp_store_flush(child.store);
        imp_world_close(&child);
        _exit(rc ? 1 : 0);
    }
    for (int p = 0; p < N; p++) {
        int status;
        assert_int_equal(waitpid(pids[p], &status, 0), pids[p]);
        assert_int_equal(status, 0);
    }
    w = open_world(dir);
    uint64_t id = 0;
    for (int p = 0; p < N; p++) {
        found f = look(&w, N_TOKENS);
        for (size_t i = 0; i < f.n; i++) {
            if (id == 0) id = f.basis[i];
            assert_true(f.usable[i] && f.basis[i] == id);
        }
        for (int i = 0; i < N_TOKENS; i++) tokens[i] += 1000;
    }
    imp_world_close(&w);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(learned_once), TEST(lost_and_learned_anew), TEST(lost_while_open),   TEST(no_room),
        TEST(swept),        TEST(goes_with_its_space),   TEST(gone_while_packing), TEST(back_before_its_bases_went),
        TEST(own_bases_stay), TEST(none_without_entry),  TEST(bare_rows_go),       TEST(bounded_in_memory),
        TEST(many_spaces),  TEST(verified),              TEST(processes_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
