/* test_memory.c: files in memory: as on disk, against a twin that keeps whole files by name; and nothing on disk. */
#include <dirent.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/rng.h"
#include "io/io.h"
#include "io/io_fault.h"
#include "support/support.h"

enum { ALIGNMENT = 512, MOST_BYTES = 40 * ALIGNMENT };

static imp_io *memory_io(void)
{
    imp_io *io = NULL;
    assert_int_equal(imp_io_new("nowhere", IMP_IO_AUTO, IMP_STORE_MEMORY, 1000, &io), 0);
    assert_true(imp_io_in_memory(io));
    assert_string_equal(imp_io_describe(io), "memory");
    assert_int_equal(imp_io_alignment(io), ALIGNMENT);
    return io;
}

/* A file of n_bytes filled by `seed`, written in two pieces, the front last. */
static int put(imp_io *io, const char *name, size_t n_bytes, uint64_t seed)
{
    imp_io_writer *w = NULL;
    unsigned char *b = imp_aligned(ALIGNMENT, n_bytes);
    if (!b) return IMP_E_NOMEM;
    imp_test_fill(b, n_bytes, seed, 0);
    int rc = imp_io_writer_new(io, name, &w);
    if (rc == 0 && n_bytes > ALIGNMENT) rc = imp_io_write(w, ALIGNMENT, b + ALIGNMENT, n_bytes - ALIGNMENT);
    if (rc == 0) rc = imp_io_write(w, 0, b, ALIGNMENT);
    if (rc == 0) rc = imp_io_writer_publish(w);
    else imp_io_writer_abort(w);
    imp_free(b);
    return rc;
}

static void check(imp_io_file *f, size_t n_bytes, uint64_t seed)
{
    static _Alignas(ALIGNMENT) unsigned char b[MOST_BYTES];
    assert_int_equal(imp_io_file_bytes(f), n_bytes);
    assert_int_equal(imp_io_read(f, 0, b, n_bytes), 0);
    assert_true(imp_test_filled(b, n_bytes, seed, 0));
    assert_memory_equal(imp_io_file_at(f, 0, n_bytes), b, n_bytes);
    assert_memory_equal(imp_io_file_at(f, n_bytes - 1, 1), b + n_bytes - 1, 1);
    assert_non_null(imp_io_file_at(f, n_bytes, 0));
    assert_null(imp_io_file_at(f, n_bytes, 1));
    assert_null(imp_io_file_at(f, 1, n_bytes));
    assert_null(imp_io_file_at(f, UINT64_MAX, 2));
}

static int count_file(const char *name, uint64_t n_bytes, void *user)
{
    uint64_t *sum = user;
    assert_null(strchr(name, '/'));
    sum[0]++;
    sum[1] += n_bytes;
    return 0;
}

static int stop_at_first(const char *name, uint64_t n_bytes, void *user)
{
    (void)name;
    (void)n_bytes;
    ++*(int *)user;
    return 7;
}

static void test_against_twin(void **state)
{
    (void)state;
    enum { N_NAMES = 12, N_HELD = 5 };
    struct {
        size_t n_bytes; /* 0: no such file */
        uint64_t seed;
    } files[N_NAMES] = {{0}};
    struct {
        imp_io_file *file;
        size_t n_bytes;
        uint64_t seed;
    } held[N_HELD] = {{0}};
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    imp_io *io = memory_io();
    for (uint64_t step = 0; step < 3000; step++) {
        uint64_t i = imp_rng_below(&r, N_NAMES), what = imp_rng_below(&r, 10), slot = imp_rng_below(&r, N_HELD);
        char name[32];
        snprintf(name, sizeof name, "%sf%d", i % 3 == 0 ? "" : i % 3 == 1 ? "a/" : "ab/", (int)i);
        if (what < 3) {
            files[i].n_bytes = ALIGNMENT * (1 + imp_rng_below(&r, MOST_BYTES / ALIGNMENT));
            files[i].seed = step;
            assert_int_equal(put(io, name, files[i].n_bytes, step), 0);
        } else if (what < 5) {
            assert_int_equal(imp_io_unlink(io, name), files[i].n_bytes ? 0 : IMP_E_NOTFOUND);
            files[i].n_bytes = 0;
        } else if (what < 8) {
            imp_io_file *f = NULL;
            assert_int_equal(imp_io_open(io, name, ALIGNMENT, &f), files[i].n_bytes ? 0 : IMP_E_NOTFOUND);
            if (!f) continue;
            check(f, files[i].n_bytes, files[i].seed);
            imp_io_close(held[slot].file);
            held[slot].file = f;
            held[slot].n_bytes = files[i].n_bytes;
            held[slot].seed = files[i].seed;
        } else if (held[slot].file) { /* as it was when it was opened, whatever its name has become */
            check(held[slot].file, held[slot].n_bytes, held[slot].seed);
        }
        static const char *const subs[] = {"", "a", "ab"};
        for (uint64_t s = 0; s < 3 && step % 10 == 0; s++) {
            uint64_t got[2] = {0}, want[2] = {0};
            for (uint64_t k = s; k < N_NAMES; k += 3) {
                want[0] += files[k].n_bytes > 0;
                want[1] += files[k].n_bytes;
            }
            assert_int_equal(imp_io_list(io, subs[s], count_file, got), 0);
            assert_memory_equal(got, want, sizeof got);
        }
    }
    int n = 0;
    assert_int_equal(put(io, "a/one", ALIGNMENT, 1), 0);
    assert_int_equal(imp_io_list(io, "a", stop_at_first, &n), 7);
    assert_int_equal(n, 1);
    assert_int_equal(imp_io_bytes_read(io) + imp_io_bytes_written(io), 0);
    for (int slot = 0; slot < N_HELD; slot++) imp_io_close(held[slot].file);
    imp_io_free(io);
}

static void test_queue(void **state)
{
    (void)state;
    imp_io *io = memory_io();
    imp_io_queue *q = NULL;
    imp_io_file *f = NULL;
    imp_io_op ops[40];
    size_t n_arena;
    assert_int_equal(put(io, "f", MOST_BYTES, 3), 0);
    assert_int_equal(imp_io_open(io, "f", ALIGNMENT, &f), 0);
    assert_int_equal(imp_io_queue_new(io, 4, MOST_BYTES + ALIGNMENT, &q), 0);
    unsigned char *arena = imp_io_queue_arena(q, &n_arena);
    for (size_t i = 0; i < 40; i++) {
        ops[i] = (imp_io_op){.file = f, .offset = i * ALIGNMENT, .buf = arena + i * ALIGNMENT, .n_bytes = ALIGNMENT};
        imp_io_submit(q, &ops[i]);
    }
    imp_io_wait(q, &ops[39]);
    for (size_t i = 0; i < 40; i++) assert_true(ops[i].done && ops[i].status == 0);
    assert_true(imp_test_filled(arena, MOST_BYTES, 3, 0));
    imp_io_op past = {.file = f, .offset = MOST_BYTES, .buf = arena, .n_bytes = ALIGNMENT};
    imp_io_submit(q, &past);
    imp_io_kick(q);
    imp_io_poll(q);
    assert_true(past.done);
    assert_int_equal(past.status, IMP_E_IO);
    imp_io_submit(q, &ops[0]);
    imp_io_cancel_all(q);
    assert_true(ops[0].done);
    imp_io_queue_free(q);
    imp_io_close(f);
    imp_io_free(io);
}

/* Faults reach files in memory like others, and none of them leaves half a file. */
static void test_faults(void **state)
{
    (void)state;
    imp_io *io = memory_io();
    imp_io_file *f = NULL;
    static const char *const scripts[] = {"open:1:EMFILE", "write:1:ENOSPC", "write:2:EIO", "rename:1:EIO"};
    for (size_t i = 0; i < sizeof scripts / sizeof *scripts; i++) {
        assert_true(imp_io_fault_parse(scripts[i]) >= 0);
        assert_true(put(io, "f", 4 * ALIGNMENT, 1) < 0);
        imp_io_fault_clear();
        assert_int_equal(imp_io_open(io, "f", ALIGNMENT, &f), IMP_E_NOTFOUND);
    }
    assert_true(imp_io_fault_parse("write:1+:short:512") >= 0);
    assert_int_equal(put(io, "f", MOST_BYTES, 1), 0);
    imp_io_fault_clear();
    assert_int_equal(imp_io_open(io, "f", ALIGNMENT, &f), 0);
    assert_true(imp_io_fault_parse("read:1+:short:512") >= 0);
    check(f, MOST_BYTES, 1);
    imp_io_fault_clear();
    assert_true(imp_io_fault_parse("read:1:EIO") >= 0);
    static _Alignas(ALIGNMENT) unsigned char b[ALIGNMENT];
    assert_int_equal(imp_io_read(f, 0, b, ALIGNMENT), IMP_E_IO);
    imp_io_fault_clear();
    assert_int_equal(imp_io_read(f, MOST_BYTES, b, ALIGNMENT), IMP_E_IO);
    assert_true(imp_io_fault_parse("unlink:1:EIO") >= 0);
    assert_int_equal(imp_io_unlink(io, "f"), IMP_E_IO);
    imp_io_fault_clear();
    assert_int_equal(imp_io_unlink(io, "f"), 0);
    imp_io_close(f);
    imp_io_free(io);
}

static void test_no_memory(void **state)
{
    (void)state;
    imp_io *io = NULL;
    for (uint64_t fail = 1;; fail++) {
        imp_alloc_fail_at(fail, 1);
        int rc = imp_io_new("nowhere", IMP_IO_AUTO, IMP_STORE_MEMORY, 0, &io);
        imp_alloc_fail_at(0, 0);
        if (rc == 0) break;
        assert_int_equal(rc, IMP_E_NOMEM);
        assert_null(io);
    }
    for (uint64_t fail = 1;; fail++) {
        imp_io_file *f = NULL;
        uint64_t sum[2] = {0};
        imp_alloc_fail_at(fail, 0);
        int rc = put(io, "a/f", MOST_BYTES, fail);
        if (rc == 0) rc = imp_io_open(io, "a/f", ALIGNMENT, &f);
        if (rc == 0) rc = imp_io_list(io, "a", count_file, sum);
        uint64_t n = imp_alloc_fail_at(0, 0);
        if (f) check(f, MOST_BYTES, fail);
        imp_io_close(f);
        if (n < fail) {
            assert_int_equal(rc, 0);
            break;
        }
        /* Room that isn't given back is no failure. */
        assert_true(rc == IMP_E_NOMEM || (rc == 0 && sum[0] == 1));
    }
    imp_io_free(io);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_twin),
        cmocka_unit_test(test_queue),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
