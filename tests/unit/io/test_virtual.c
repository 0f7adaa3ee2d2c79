/* Virtual time: the bytes are there, the clock says what a disk of this rate would have; and reads that are timed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "io/io.h"
#include "support/support.h"

enum { BLOCK = 65536, N_BLOCKS = 40 };
#define RATE UINT64_C(65536000) /* a block a millisecond */

static char *dir;

static int setup(void **unused)
{
    (void)unused;
    dir = imp_test_make_dir(NULL);
    return dir && imp_test_make_file(imp_test_path(dir, "f"), N_BLOCKS * BLOCK, 9) == 0 ? 0 : -1;
}

static int teardown(void **unused)
{
    (void)unused;
    imp_test_remove_dir(dir);
    return 0;
}

static imp_io_op make_op(imp_io_file *f, imp_io_queue *q, size_t i)
{
    return (imp_io_op){.file = f, .offset = i * BLOCK, .buf = (char *)imp_io_queue_arena(q, NULL) + i * BLOCK,
                       .n_bytes = BLOCK};
}

static void test_clock(void **unused)
{
    (void)unused;
    imp_io *io;
    imp_io_file *f;
    imp_io_queue *q;
    assert_int_equal(imp_io_new(dir, IMP_IO_VIRTUAL, 0, RATE, &io), 0);
    assert_int_equal(imp_io_open(io, "f", imp_io_alignment(io), &f), 0);
    assert_int_equal(imp_io_queue_new(io, 8, N_BLOCKS * BLOCK, &q), 0);
    assert_non_null(strstr(imp_io_describe(io), "virtual"));
    assert_true(imp_io_virtual_ns(io) == 0);

    static imp_io_op ops[N_BLOCKS];
    for (size_t i = 0; i < N_BLOCKS; i++) {
        ops[i] = make_op(f, q, i);
        imp_io_submit(q, &ops[i]);
    }
    imp_io_kick(q);
    imp_io_virtual_pass(io, 3500000);
    imp_io_poll(q);
    assert_true(ops[2].done && !ops[3].done);
    for (size_t i = 0; i < N_BLOCKS; i++) {
        imp_io_wait(q, &ops[i]);
        assert_true(ops[i].done && ops[i].status == 0);
        assert_true(imp_test_filled(ops[i].buf, BLOCK, 9, i * BLOCK));
    }
    assert_true(imp_io_virtual_ns(io) == N_BLOCKS * UINT64_C(1000000));
    assert_true(imp_io_bytes_read(io) == N_BLOCKS * BLOCK);

    /* Time that passes otherwise lets reads go on. */
    uint64_t start = imp_io_virtual_ns(io);
    for (size_t i = 0; i < 8; i++) {
        ops[i] = make_op(f, q, i);
        imp_io_submit(q, &ops[i]);
    }
    imp_io_kick(q);
    imp_io_virtual_pass(io, start + 100000000);
    imp_io_virtual_pass(io, start); /* it never goes back */
    for (size_t i = 0; i < 8; i++) imp_io_wait(q, &ops[i]);
    assert_true(imp_io_virtual_ns(io) == start + 100000000);

    /* What is given up doesn't move the clock, and the ring is as good as new. */
    for (size_t i = 0; i < 20; i++) {
        ops[i] = make_op(f, q, i);
        imp_io_submit(q, &ops[i]);
    }
    imp_io_kick(q);
    imp_io_cancel_all(q);
    for (size_t i = 0; i < 20; i++) assert_true(ops[i].done);
    assert_true(imp_io_virtual_ns(io) == start + 100000000);
    ops[0] = make_op(f, q, 5);
    imp_io_submit(q, &ops[0]);
    imp_io_wait(q, &ops[0]);
    assert_true(ops[0].status == 0 && imp_test_filled(ops[0].buf, BLOCK, 9, 5 * BLOCK));

    /* Reads at once count as well. */
    start = imp_io_virtual_ns(io);
    for (int i = 0; i < 20; i++) assert_int_equal(imp_io_read(f, 0, ops[0].buf, BLOCK), 0);
    assert_true(imp_io_virtual_ns(io) >= start + 20000000);
    imp_io_queue_free(q);
    imp_io_close(f);
    imp_io_free(io);

    /* Other modes have no such clock. */
    assert_int_equal(imp_io_new(dir, IMP_IO_THREADS, 0, 0, &io), 0);
    imp_io_virtual_pass(io, 5);
    assert_true(imp_io_virtual_ns(io) == 0);
    imp_io_free(io);
}

static imp_read_trial make_trial(int random)
{
    return (imp_read_trial){.struct_bytes = sizeof(imp_read_trial), .random = random, .seed = imp_test_seed(),
                            .block_bytes = BLOCK, .depth = 4};
}

static void test_measure(void **unused)
{
    (void)unused;
    const char *path = imp_test_path(dir, "f");
    imp_read_figures f;
    for (int mode = IMP_IO_AUTO; mode <= IMP_IO_THREADS; mode += 2) {
        for (int random = 0; random < 2; random++) {
            imp_read_trial t = make_trial(random);
            t.mode = (imp_io_mode)mode;
            assert_int_equal(imp_measure_reads(path, &t, &f), 0);
            assert_true(f.n_reads == N_BLOCKS && f.n_bytes == N_BLOCKS * BLOCK && f.ns > 0 && f.io_mode);
            t.max_bytes = 3 * N_BLOCKS * BLOCK + 5;
            t.depth = 100;
            assert_int_equal(imp_measure_reads(path, &t, &f), 0);
            assert_true(f.n_reads == 3 * N_BLOCKS);
            t.max_bytes = 1;
            assert_int_equal(imp_measure_reads(path, &t, &f), 0);
            assert_true(f.n_reads == 1);
            t.max_bytes = UINT64_MAX;
            t.max_ns = 1000000;
            assert_int_equal(imp_measure_reads(path, &t, &f), 0);
            assert_true(f.n_reads >= 1 && f.ns >= 1000000);
        }
    }
    imp_read_trial t = make_trial(0);
    assert_int_equal(imp_measure_reads(NULL, &t, &f), IMP_E_ARG);
    assert_int_equal(imp_measure_reads(path, NULL, &f), IMP_E_ARG);
    assert_int_equal(imp_measure_reads(path, &t, NULL), IMP_E_ARG);
    t.block_bytes = 1000;
    assert_int_equal(imp_measure_reads(path, &t, &f), IMP_E_ARG);
    t = make_trial(0), t.depth = 0;
    assert_int_equal(imp_measure_reads(path, &t, &f), IMP_E_ARG);
    t = make_trial(0), t.flags = IMP_STORE_READONLY;
    assert_int_equal(imp_measure_reads(path, &t, &f), IMP_E_ARG);
    t = make_trial(0), t.block_bytes = 64 * BLOCK;
    assert_int_equal(imp_measure_reads(path, &t, &f), IMP_E_ARG); /* larger than the file */
    t = make_trial(0), t.struct_bytes--;
    assert_int_equal(imp_measure_reads(path, &t, &f), IMP_E_ARG);
    struct {
        imp_read_trial t;
        uint64_t more;
    } newer = {.t = make_trial(0)}; /* of a caller of a later version */
    newer.t.struct_bytes = sizeof newer;
    assert_int_equal(imp_measure_reads(path, &newer.t, &f), 0);
    newer.more = 1;
    assert_int_equal(imp_measure_reads(path, &newer.t, &f), IMP_E_UNSUPPORTED);
    assert_true(f.n_reads == 0);
    t = make_trial(0);
    assert_int_equal(imp_measure_reads(imp_test_path(dir, "none"), &t, &f), IMP_E_NOTFOUND);
    assert_true(f.n_reads == 0);
}

static void test_no_memory(void **unused)
{
    (void)unused;
    const char *path = imp_test_path(dir, "f");
    imp_read_figures f;
    for (int mode = IMP_IO_THREADS; mode <= IMP_IO_VIRTUAL; mode++) {
        imp_read_trial t = make_trial(1);
        t.mode = (imp_io_mode)mode;
        int rc = -1;
        uint64_t at = 1;
        for (; rc < 0 && at < 100; at++) {
            imp_alloc_fail_at(at, 1);
            rc = imp_measure_reads(path, &t, &f);
            imp_alloc_fail_at(0, 0);
            assert_true(rc == 0 || rc == IMP_E_NOMEM);
        }
        assert_true(rc == 0 && at > 3);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_clock),
        cmocka_unit_test(test_measure),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
