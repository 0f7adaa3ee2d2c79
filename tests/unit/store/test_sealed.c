/* Encrypted stores: all that a store does, with a key; nothing in the clear on disk; nothing opens without the key, and
 * nothing that was moved, changed or put in by others is served. */
#include <dirent.h>
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
#include "base/bytes.h"
#include "base/rng.h"
#include "store/catalogue.h"
#include "support/store_world.h"
#include "support/support.h"

enum { N = 300, FILES_MAX = 64 };

typedef struct place {
    char *dir, *store, *other;
    char key[4096], wrong_key[4096];
} place;

static void write_key(const char *path, unsigned char first)
{
    unsigned char bytes[IMP_KEY_BYTES];
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)(first + i);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, sizeof bytes, f), sizeof bytes);
    fclose(f);
    assert_int_equal(chmod(path, 0600), 0);
}

static char *below(const char *dir, const char *name)
{
    size_t n = strlen(dir) + strlen(name) + 2;
    char *path = malloc(n);
    assert_non_null(path);
    snprintf(path, n, "%s/%s", dir, name);
    return path;
}

static int set_up(void **state)
{
    place *p = calloc(1, sizeof *p);
    if (!p) return -1;
    p->dir = imp_test_make_dir("/dev/shm");
    if (!p->dir) p->dir = imp_test_make_dir(NULL);
    if (!p->dir) return -1;
    p->store = below(p->dir, "store");
    p->other = below(p->dir, "other");
    snprintf(p->key, sizeof p->key, "%s/key", p->dir);
    snprintf(p->wrong_key, sizeof p->wrong_key, "%s/wrong", p->dir);
    write_key(p->key, 1);
    write_key(p->wrong_key, 2);
    *state = p;
    return 0;
}

static int tear_down(void **state)
{
    place *p = *state;
    free(p->store);
    free(p->other);
    imp_test_remove_dir(p->dir);
    free(p);
    return 0;
}

static void sequence(int32_t *tokens, size_t n, int32_t first)
{
    for (size_t i = 0; i < n; i++) tokens[i] = first + (int32_t)i;
}

static void usual_opts(imp_store_opts *opts, const char *key, bool rich)
{
    rich ? imp_world_rich_opts(opts) : imp_world_opts(opts);
    opts->key_file = key;
}

static int open_world(imp_world *w, const char *dir, const char *key, bool rich)
{
    imp_store_opts opts;
    usual_opts(&opts, key, rich);
    return imp_world_open(w, dir, &opts, NULL);
}

/* Three entries, two of which share a head. */
static void fill(imp_world *w)
{
    int32_t tokens[N];
    for (int i = 0; i < 3; i++) {
        sequence(tokens, N, 70000 + (i == 2 ? 5000 : 0));
        if (i == 1) sequence(tokens + 150, N - 150, 90000);
        assert_int_equal(imp_world_commit(w, tokens, N, 0, 0, NULL), 0);
        assert_int_equal(imp_store_flush(w->store), 0);
    }
}

/* Tokens found of each entry; every row right, or the test fails. */
static void check(imp_world *w, int64_t found[3])
{
    int32_t tokens[N];
    for (int i = 0; i < 3; i++) {
        sequence(tokens, N, 70000 + (i == 2 ? 5000 : 0));
        if (i == 1) sequence(tokens + 150, N - 150, 90000);
        found[i] = imp_world_check(w, tokens, N, true);
        assert_true(found[i] >= 0 || found[i] == IMP_E_CORRUPT);
    }
}

static void check_all(imp_world *w)
{
    int64_t found[3];
    check(w, found);
    for (int i = 0; i < 3; i++) assert_int_equal(found[i], N);
}

/* ---- files */

typedef struct listing {
    char *path[FILES_MAX];
    size_t n;
} listing;

static void list(const char *dir, const char *folder, listing *l)
{
    char at[4096];
    snprintf(at, sizeof at, "%s/%s", dir, folder);
    DIR *d = opendir(at);
    *l = (listing){0};
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        struct stat st;
        char *path = below(at, e->d_name);
        if (stat(path, &st) == 0 && S_ISREG(st.st_mode) && l->n < FILES_MAX) {
            l->path[l->n++] = path;
        } else {
            free(path);
        }
    }
    closedir(d);
}

static void free_list(listing *l)
{
    for (size_t i = 0; i < l->n; i++) free(l->path[i]);
    l->n = 0;
}

static unsigned char *read_file(const char *path, size_t *n)
{
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    *n = (size_t)ftell(f);
    rewind(f);
    unsigned char *b = malloc(*n + 1);
    assert_non_null(b);
    assert_int_equal(fread(b, 1, *n, f), *n);
    fclose(f);
    return b;
}

static void write_file(const char *path, const void *b, size_t n)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(b, 1, n, f), n);
    fclose(f);
}

static bool holds(const char *dir, const char *folder, const void *what, size_t n)
{
    listing l;
    bool found = false;
    list(dir, folder, &l);
    for (size_t i = 0; i < l.n; i++) {
        size_t n_file;
        unsigned char *b = read_file(l.path[i], &n_file);
        found = found || memmem(b, n_file, what, n);
        free(b);
    }
    free_list(&l);
    return found;
}

/* ---- tests */

static void as_without(void **state)
{
    place *p = *state;
    imp_world w;
    imp_reorder_report moved;
    for (int rich = 0; rich < 2; rich++) {
        const char *dir = rich ? p->other : p->store;
        assert_int_equal(open_world(&w, dir, p->key, rich), 0);
        fill(&w);
        check_all(&w);
        imp_world_close(&w);
        assert_int_equal(open_world(&w, dir, p->key, rich), 0);
        check_all(&w);
        assert_int_equal(imp_world_verify(&w, false, true), 0);
        assert_int_equal(imp_store_gc(w.store, NULL), 0);
        imp_world_close(&w);

        /* another order, another chunk: the whole way through a reorder */
        imp_store_opts opts;
        usual_opts(&opts, p->key, rich);
        opts.order = IMP_ORDER_IMPORTANCE;
        opts.reorder_after = 1;
        assert_int_equal(imp_world_open(&w, dir, &opts, NULL), 0);
        assert_int_equal(imp_store_reorder(w.store, &moved), 0);
        check_all(&w);
        assert_int_equal(imp_world_verify(&w, false, true), 0);
        imp_world_close(&w);

        assert_int_equal(imp_store_rebuild_key(dir, p->key), 0);
        assert_int_equal(open_world(&w, dir, p->key, rich), 0);
        check_all(&w);
        assert_int_equal(imp_world_verify(&w, false, true), 0);
        imp_world_close(&w);

        opts.flags |= IMP_STORE_READONLY;
        assert_int_equal(imp_world_open(&w, dir, &opts, NULL), 0);
        check_all(&w);
        imp_world_close(&w);
    }
}

/* What is searched for is found in a store without a key. */
static void nothing_in_the_clear(void **state)
{
    place *p = *state;
    imp_world w;
    for (int sealed = 0; sealed < 2; sealed++) {
        const char *dir = sealed ? p->store : p->other;
        assert_int_equal(open_world(&w, dir, sealed ? p->key : NULL, true), 0);
        fill(&w);
        imp_world_close(&w);
        unsigned char tokens[16];
        for (uint32_t i = 0; i < 4; i++) imp_put32(tokens + 4 * i, 70100 + i);
        assert_int_equal(holds(dir, "segments", tokens, sizeof tokens), !sealed);
        assert_int_equal(holds(dir, ".", tokens, sizeof tokens), !sealed); /* the catalogue and its log */
        assert_int_equal(holds(dir, "segments", "small", 6), !sealed);     /* the model's name */
        assert_int_equal(holds(dir, "bases", "IMPBSAS1", 8), !sealed);
        unsigned char zeros[64] = {0};
        assert_int_equal(holds(dir, "segments", zeros, sizeof zeros), !sealed); /* padding, too */
    }
    /* The same entry once more: no chunk is what it was. */
    listing l;
    list(p->store, "segments", &l);
    size_t n_before, n_found = 0;
    assert_true(l.n > 0);
    unsigned char *before = read_file(l.path[0], &n_before);
    free_list(&l);
    assert_int_equal(open_world(&w, p->store, p->key, true), 0);
    assert_int_equal(imp_store_remove(w.store, 0), 0);
    fill(&w);
    imp_world_close(&w);
    for (size_t at = 512; at + 512 <= n_before; at += 512) n_found += holds(p->store, "segments", before + at, 32);
    assert_int_equal(n_found, 0);
    free(before);
}

static void only_with_the_key(void **state)
{
    place *p = *state;
    imp_world w;
    assert_int_equal(open_world(&w, p->store, p->key, true), 0);
    fill(&w);
    imp_world_close(&w);
    uint64_t du = imp_world_du(p->store);
    for (int marked = 1; marked >= 0; marked--) {
        if (!marked) assert_int_equal(unlink(imp_test_path(p->store, "encrypted")), 0);
        int rc = open_world(&w, p->store, NULL, true);
        assert_true(rc == IMP_E_PERM || (!marked && rc == IMP_E_UNSUPPORTED));
        assert_non_null(strstr(imp_last_error(), "encrypted"));
        rc = imp_store_rebuild(p->store);
        assert_true(rc == IMP_E_PERM || (!marked && rc == IMP_E_UNSUPPORTED));
        rc = open_world(&w, p->store, p->wrong_key, true);
        assert_true(rc == IMP_E_PERM || (!marked && rc == IMP_E_ARG));
        assert_non_null(strstr(imp_last_error(), "key"));
        assert_int_equal(imp_store_rebuild_key(p->store, p->wrong_key), rc);
        /* not even a lost catalogue makes them touch anything */
        char *cat = below(p->store, "catalogue.db"), *aside = below(p->dir, "aside");
        assert_int_equal(rename(cat, aside), 0);
        assert_true(open_world(&w, p->store, NULL, true) < 0);
        assert_true(open_world(&w, p->store, p->wrong_key, true) < 0);
        assert_int_equal(rename(aside, cat), 0);
        free(cat);
        free(aside);
        listing l;
        list(p->store, "segments", &l);
        assert_true(l.n > 3);
        free_list(&l);
        assert_int_equal(open_world(&w, p->store, p->key, true), 0);
        check_all(&w);
        assert_int_equal(imp_world_verify(&w, false, true), 0);
        imp_world_close(&w);
        assert_int_equal(access(imp_test_path(p->store, "encrypted"), F_OK), 0); /* made again */
    }
    assert_in_range(imp_world_du(p->store), du - 65536, du + 65536);

    /* A key for a store that has none. */
    assert_int_equal(open_world(&w, p->other, NULL, false), 0);
    fill(&w);
    imp_world_close(&w);
    assert_int_equal(open_world(&w, p->other, p->key, false), IMP_E_ARG);
    assert_non_null(strstr(imp_last_error(), "isn't encrypted"));
    assert_int_equal(open_world(&w, p->other, NULL, false), 0);
    check_all(&w);
    imp_world_close(&w);
    /* Key files that can't be used leave no store behind. */
    char *third = below(p->dir, "third");
    assert_int_equal(chmod(p->wrong_key, 0644), 0);
    assert_int_equal(open_world(&w, third, p->wrong_key, false), IMP_E_PERM);
    assert_int_equal(open_world(&w, third, p->dir, false), IMP_E_PERM);
    assert_int_equal(open_world(&w, third, "/nonexistent/key", false), IMP_E_NOTFOUND);
    assert_int_equal(access(third, F_OK), -1);
    /* In memory nothing is at rest. */
    imp_store_opts opts;
    usual_opts(&opts, "/nonexistent/key", false);
    opts.flags = IMP_STORE_MEMORY;
    opts.host_cache_bytes = 4 << 20;
    assert_int_equal(imp_world_open(&w, NULL, &opts, NULL), 0);
    fill(&w);
    check_all(&w);
    imp_world_close(&w);
    free(third);
}

/* Equal-sized pieces of a segment swapped: found, and never served. */
static void swapped_pieces(void **state)
{
    place *p = *state;
    imp_world w;
    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed());
    assert_int_equal(open_world(&w, p->store, p->key, false), 0);
    fill(&w);
    imp_world_close(&w);
    listing l;
    list(p->store, "segments", &l);
    unsigned char *was[FILES_MAX];
    size_t n[FILES_MAX];
    for (size_t i = 0; i < l.n; i++) was[i] = read_file(l.path[i], &n[i]);
    for (int round = 0; round < 60; round++) {
        size_t a = imp_rng_below(&rng, l.n), b = imp_rng_below(&rng, 2) ? a : imp_rng_below(&rng, l.n);
        size_t unit = 512, at = unit * imp_rng_below(&rng, n[a] / unit), to = unit * imp_rng_below(&rng, n[b] / unit);
        if (a == b && at == to) continue;
        unsigned char *x = malloc(n[a]), *y = malloc(n[b]);
        assert_true(x && y);
        memcpy(x, was[a], n[a]);
        memcpy(y, was[b], n[b]);
        memcpy(x + at, was[b] + to, unit);
        memcpy((a == b ? x : y) + to, was[a] + at, unit);
        write_file(l.path[a], x, n[a]);
        if (a != b) write_file(l.path[b], y, n[b]);
        imp_store_opts opts;
        usual_opts(&opts, p->key, false);
        opts.flags |= IMP_STORE_READONLY; /* so that nothing is dropped before the next round */
        assert_int_equal(imp_world_open(&w, p->store, &opts, NULL), 0);
        int64_t found[3];
        assert_true(imp_world_verify(&w, false, false) > 0);
        check(&w, found);
        imp_world_close(&w);
        write_file(l.path[a], was[a], n[a]);
        write_file(l.path[b], was[b], n[b]);
        free(x);
        free(y);
    }
    /* Whole files under each other's names. */
    for (size_t i = 0; i < l.n; i++) write_file(l.path[i], was[(i + 1) % l.n], n[(i + 1) % l.n]);
    assert_int_equal(open_world(&w, p->store, p->key, false), 0);
    int64_t found[3];
    check(&w, found);
    for (int i = 0; i < 3; i++) assert_int_equal(found[i], 0);
    imp_world_close(&w);
    for (size_t i = 0; i < l.n; i++) free(was[i]);
    free_list(&l);
}

/* Bits flipped anywhere, in segments and bases: the header, too. */
static void flipped_bits(void **state)
{
    place *p = *state;
    imp_world w;
    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed() + 1);
    assert_int_equal(open_world(&w, p->store, p->key, true), 0);
    fill(&w);
    imp_world_close(&w);
    static const char *const folders[] = {"segments", "bases"};
    for (int round = 0; round < 60; round++) {
        listing l;
        size_t n;
        list(p->store, folders[round % 5 == 4], &l);
        assert_true(l.n > 0);
        const char *path = l.path[imp_rng_below(&rng, l.n)];
        unsigned char *b = read_file(path, &n);
        size_t at = imp_rng_below(&rng, imp_rng_below(&rng, 2) ? n : 1024);
        unsigned char bit = (unsigned char)(1u << imp_rng_below(&rng, 8));
        b[at] ^= bit;
        write_file(path, b, n);
        imp_store_opts opts;
        usual_opts(&opts, p->key, true);
        opts.flags |= IMP_STORE_READONLY;
        assert_int_equal(imp_world_open(&w, p->store, &opts, NULL), 0);
        int64_t found[3];
        assert_true(imp_world_verify(&w, false, false) > 0);
        check(&w, found);
        imp_world_close(&w);
        b[at] ^= bit;
        write_file(path, b, n);
        free(b);
        free_list(&l);
    }
    assert_int_equal(open_world(&w, p->store, p->key, true), 0);
    check_all(&w);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);

    /* What is bad is dropped, and stored again. */
    listing l;
    size_t n;
    list(p->store, "segments", &l);
    unsigned char *b = read_file(l.path[0], &n);
    b[n / 2] ^= 1;
    write_file(l.path[0], b, n);
    free(b);
    free_list(&l);
    assert_int_equal(open_world(&w, p->store, p->key, true), 0);
    assert_true(imp_world_verify(&w, true, false) > 0);
    fill(&w);
    check_all(&w);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
}

/* Somebody without the key puts in a segment with rows of his own, for the same space and tokens. */
static void smuggled(void **state)
{
    place *p = *state;
    imp_world w;
    assert_int_equal(open_world(&w, p->store, p->key, false), 0);
    fill(&w);
    imp_world_close(&w);
    assert_int_equal(open_world(&w, p->other, NULL, false), 0);
    fill(&w);
    imp_world_close(&w);
    listing ours, theirs;
    list(p->store, "segments", &ours);
    list(p->other, "segments", &theirs);
    for (size_t i = 0; i < ours.n; i++) assert_int_equal(unlink(ours.path[i]), 0);
    for (size_t i = 0; i < theirs.n; i++) {
        size_t n;
        unsigned char *b = read_file(theirs.path[i], &n);
        char path[4096];
        snprintf(path, sizeof path, "%s/segments/%s", p->store, strrchr(theirs.path[i], '/') + 1);
        write_file(path, b, n);
        free(b);
    }
    int64_t found[3] = {0};
    int rc = open_world(&w, p->store, p->key, false);
    if (rc == 0) {
        check(&w, found);
        imp_world_close(&w);
    }
    for (int i = 0; i < 3; i++) assert_int_equal(found[i], 0);
    free_list(&ours);
    free_list(&theirs);
}

/* Rows of the catalogue: encrypted, bound to their ids. */
static void catalogue_rows(void **state)
{
    place *p = *state;
    imp_key *key, *wrong;
    imp_cat *c;
    int32_t tokens[5] = {1, 2, -3, 70000, INT32_MAX};
    imp_cat_space space = {{1, 2}, "model", 10};
    imp_cat_segment seg = {5, {1, 2}, 4096, 5};
    imp_cat_node node = {.id = 1, .space = {1, 2}, .segment = 5, .n_tokens = 5, .tokens = tokens};
    assert_int_equal(imp_key_read(p->key, &key), 0);
    assert_int_equal(imp_key_read(p->wrong_key, &wrong), 0);
    assert_int_equal(imp_cat_open(p->dir, 0, &c), 0);
    imp_cat_use_key(c, key);
    assert_int_equal(imp_cat_begin(c), 0);
    assert_int_equal(imp_cat_put_space(c, &space), 0);
    assert_int_equal(imp_cat_put_segment(c, &seg), 0);
    assert_int_equal(imp_cat_put_node(c, &node), 0);
    node.pinned = true;
    assert_int_equal(imp_cat_put_node(c, &node), 0); /* over the old one */
    assert_int_equal(imp_cat_put_history(c, 5, "a history", 9), 0);
    assert_int_equal(imp_cat_commit(c), 0);
    void *bytes;
    size_t n;
    assert_int_equal(imp_cat_get_history(c, 5, &bytes, &n), 0);
    assert_int_equal(n, 9);
    assert_memory_equal(bytes, "a history", 9);
    imp_free(bytes);
    imp_cat_reader none = {0};
    uint64_t generation;
    assert_int_equal(imp_cat_read(c, 0, &none, &generation), 0);
    imp_cat_use_key(c, wrong);
    assert_int_equal(imp_cat_get_history(c, 5, &bytes, &n), IMP_E_NOTFOUND);
    imp_cat_use_key(c, NULL);
    assert_true(imp_cat_get_history(c, 5, &bytes, &n) == 0 && n != 9);
    imp_free(bytes);
    imp_cat_close(c);
    assert_false(holds(p->dir, ".", "a history", 9));
    imp_key_free(wrong);
    imp_key_free(key);
}

/* Every allocation fails once: a line, no leak, and what is stored stays right. */
static void no_memory(void **state)
{
    place *p = *state;
    imp_world w;
    int32_t tokens[N];
    sequence(tokens, N, 70000);
    assert_int_equal(open_world(&w, p->store, p->key, true), 0);
    fill(&w);
    imp_world_close(&w);
    for (uint64_t at = 1; at < 4000; at += 1 + at / 8) {
        imp_alloc_fail_at(at, 0);
        int rc = open_world(&w, p->store, p->key, true);
        if (rc == 0) {
            int64_t found = imp_world_check(&w, tokens, N, true);
            assert_true(found >= 0 || found == IMP_E_NOMEM || found == IMP_E_CORRUPT);
            imp_world_close(&w);
        } else {
            assert_int_equal(rc, IMP_E_NOMEM);
        }
        imp_alloc_fail_at(0, 0);
    }
    assert_int_equal(open_world(&w, p->store, p->key, true), 0);
    check_all(&w);
    imp_world_close(&w);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    if (!imp_crypt_have()) return 77;
    const struct CMUnitTest tests[] = {
        TEST(as_without),    TEST(nothing_in_the_clear), TEST(only_with_the_key), TEST(swapped_pieces),
        TEST(flipped_bits),  TEST(smuggled),             TEST(catalogue_rows),    TEST(no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
