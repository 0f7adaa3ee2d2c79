/* Reads that don't come back in time, with io_uring and with threads: whoever waits gets an error by the deadline and
 * may give back all that it lent; what the device writes late harms nobody; and it is noticed when it is over. */
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "base/rng.h"
#include "io/io.h"
#include "io/io_fault.h"
#include "io/io_internal.h"
#include "support/support.h"

enum { FILE_BYTES = 1 << 20, BLOCK = 4096, N_OPS = 24, DEPTH = 8 };

static const uint64_t ms = 1000000;

static imp_io_mode mode;
static char *dir;
static uint64_t seed;

static int make_dir(void **state)
{
    (void)state;
    dir = imp_test_make_dir(NULL);
    assert_non_null(dir);
    assert_int_equal(mkdir(imp_test_path(dir, "segments"), 0700), 0);
    assert_int_equal(imp_test_make_file(imp_test_path(dir, "segments/a"), FILE_BYTES, seed), 0);
    return 0;
}

static int remove_dir(void **state)
{
    (void)state;
    imp_io_fault_clear();
    imp_test_remove_dir(dir);
    return 0;
}

static imp_io *new_io(uint64_t bytes_per_s, uint64_t deadline_ns)
{
    imp_io *io;
    assert_int_equal(imp_io_new(dir, mode, 0, bytes_per_s, &io), 0);
    imp_io_set_deadline(io, deadline_ns);
    return io;
}

static imp_io_file *open_file(imp_io *io)
{
    imp_io_file *f;
    assert_int_equal(imp_io_open(io, "segments/a", imp_io_alignment(io), &f), 0);
    return f;
}

/* Ops in memory of their own, so that a touch of theirs after they were freed shows under AddressSanitizer. */
static imp_io_op *make_ops(imp_io_queue *q, imp_io_file *f, size_t n)
{
    imp_io_op *ops = calloc(n, sizeof *ops);
    assert_non_null(ops);
    for (size_t i = 0; i < n; i++)
        ops[i] = (imp_io_op){.file = f, .offset = (i * 7 % (FILE_BYTES / BLOCK)) * BLOCK,
                             .buf = (unsigned char *)imp_io_queue_arena(q, NULL) + i * BLOCK, .n_bytes = BLOCK};
    return ops;
}

static void check_op(const imp_io_op *op)
{
    assert_true(op->done);
    assert_int_equal(op->status, 0);
    assert_true(imp_test_filled(op->buf, op->n_bytes, seed, op->offset));
}

static void hang(const char *which, uint64_t ns)
{
    char text[64];
    snprintf(text, sizeof text, "read:%s:hang:%llu", which, (unsigned long long)ns);
    assert_true(imp_io_fault_parse(text) >= 0);
}

static void await_end(imp_io *io)
{
    uint64_t start = imp_now_ns();
    while (imp_io_hung(io)) {
        assert_true(imp_now_ns() - start < 60000 * ms);
        imp_io_sleep_until(imp_now_ns() + 10 * ms);
    }
}

static size_t open_files(void)
{
    size_t n = 0;
    DIR *d = opendir("/proc/self/fd");
    assert_non_null(d);
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

static void test_given_up(void **state)
{
    (void)state;
    imp_io *io = new_io(0, 150 * ms);
    size_t n_open = open_files();
    imp_io_file *f = open_file(io);
    imp_io_queue *q, *sound;
    assert_int_equal(imp_io_queue_new(io, DEPTH, N_OPS * BLOCK, &q), 0);
    imp_io_op *ops = make_ops(q, f, N_OPS);
    hang("1+", 1500 * ms);
    for (size_t i = 0; i < N_OPS; i++) imp_io_submit(q, &ops[i]);
    imp_io_kick(q);
    assert_false(imp_io_hung(io));
    imp_io_wait(q, &ops[3]);
    assert_non_null(strstr(imp_last_error(), "segments/a: reading 4096 bytes at 86016: no answer within 0.15 s"));
    assert_true(imp_io_queue_hung(q) && imp_io_hung(io));
    for (size_t i = 0; i < N_OPS; i++) {
        assert_true(ops[i].done);
        assert_true(ops[i].status == IMP_E_IO || ops[i].status == IMP_E_BUSY);
    }
    assert_int_equal(ops[3].status, IMP_E_IO);
    /* Nobody waits a second time. */
    imp_io_op *more = make_ops(q, f, 2);
    imp_io_submit(q, &more[0]);
    imp_io_submit(q, &more[1]);
    imp_io_wait(q, &more[1]);
    assert_int_equal(more[0].status, IMP_E_IO);
    assert_int_equal(more[1].status, IMP_E_IO);
    imp_io_cancel_all(q);

    /* All that was lent goes back. The file may be another's by the time the reads start: it is kept open. */
    free(more);
    free(ops);
    imp_io_close(f);
    imp_io_queue_free(q);
    assert_true(imp_io_hung(io));

    imp_io_fault_clear();
    imp_io_set_deadline(io, 60000 * ms); /* this machine may be slow */
    f = open_file(io);
    assert_int_equal(imp_io_queue_new(io, DEPTH, N_OPS * BLOCK, &sound), 0);
    ops = make_ops(sound, f, N_OPS);
    for (size_t i = 0; i < N_OPS; i++) imp_io_submit(sound, &ops[i]);
    for (size_t i = 0; i < N_OPS; i++) imp_io_wait(sound, &ops[i]);
    for (size_t i = 0; i < N_OPS; i++) check_op(&ops[i]);
    await_end(io);
    for (size_t i = 0; i < N_OPS; i++) check_op(&ops[i]); /* nothing was written there since */
    free(ops);
    imp_io_queue_free(sound);
    imp_io_close(f);
    assert_int_equal(open_files(), n_open);
    imp_io_free(io);
}

/* A read after the other takes long, but each comes back: that is a slow disk. */
static void test_slow(void **state)
{
    (void)state;
    imp_io *io = new_io(0, 2000 * ms);
    imp_io_file *f = open_file(io);
    imp_io_queue *q;
    assert_int_equal(imp_io_queue_new(io, 1, N_OPS * BLOCK, &q), 0);
    imp_io_op *ops = make_ops(q, f, N_OPS);
    hang("1+", 120 * ms);
    uint64_t start = imp_now_ns();
    for (size_t i = 0; i < N_OPS; i++) imp_io_submit(q, &ops[i]);
    imp_io_wait(q, &ops[N_OPS - 1]);
    assert_true(imp_now_ns() - start > 2000 * ms);
    for (size_t i = 0; i < N_OPS; i++) check_op(&ops[i]);
    assert_false(imp_io_queue_hung(q));
    free(ops);
    imp_io_queue_free(q);
    imp_io_close(f);
    imp_io_free(io);
}

/* What the rate limit holds back isn't late. */
static void test_limited(void **state)
{
    (void)state;
    imp_io *io = new_io(4 * BLOCK, 1800 * ms);
    imp_io_file *f = open_file(io);
    imp_io_queue *q;
    assert_int_equal(imp_io_queue_new(io, DEPTH, N_OPS * BLOCK, &q), 0);
    imp_io_op *ops = make_ops(q, f, DEPTH);
    ops[0].n_bytes = 2 * BLOCK; /* a quarter of a second a block */
    ops[0].buf = (unsigned char *)imp_io_queue_arena(q, NULL) + DEPTH * BLOCK;
    uint64_t start = imp_now_ns();
    for (size_t i = 0; i < DEPTH; i++) imp_io_submit(q, &ops[i]);
    imp_io_wait(q, &ops[DEPTH - 1]);
    assert_true(imp_now_ns() - start > 2000 * ms);
    for (size_t i = 0; i < DEPTH; i++) check_op(&ops[i]);

    ops[0].n_bytes = 8 * BLOCK; /* one for which it waits longer than the deadline */
    imp_io_submit(q, &ops[0]);
    imp_io_wait(q, &ops[0]);
    check_op(&ops[0]);
    assert_false(imp_io_queue_hung(q));
    free(ops);
    imp_io_queue_free(q);
    imp_io_close(f);
    imp_io_free(io);
}

/* Closed before the reads come back: what they need stays, and is freed when somebody closes another. */
static void test_closed(void **state)
{
    (void)state;
    size_t n_open = open_files();
    for (int i = 0; i < 2; i++) {
        imp_io *io = new_io(0, 100 * ms);
        imp_io_file *f = open_file(io);
        imp_io_queue *q;
        assert_int_equal(imp_io_queue_new(io, 2, 4 * BLOCK, &q), 0);
        imp_io_op *ops = make_ops(q, f, 4);
        hang("1+", 1500 * ms);
        for (size_t j = 0; j < 4; j++) imp_io_submit(q, &ops[j]);
        imp_io_kick(q);
        imp_io_sleep_until(imp_now_ns() + 100 * ms); /* so that threads have begun */
        imp_io_cancel_all(q);
        for (size_t j = 0; j < 4; j++) assert_true(ops[j].done && ops[j].status < 0);
        free(ops);
        imp_io_queue_free(q);
        imp_io_close(f);
        imp_io_free(io);
        imp_io_fault_clear();
    }
    assert_true(open_files() > n_open);
    uint64_t start = imp_now_ns();
    while (open_files() > n_open) {
        assert_true(imp_now_ns() - start < 60000 * ms);
        imp_io_free(new_io(0, 0));
        imp_io_sleep_until(imp_now_ns() + 20 * ms);
    }
}

/* Some reads hang, others don't: right bytes or an error, whatever the order. */
static void test_random(void **state)
{
    (void)state;
    imp_rng rng;
    imp_rng_seed(&rng, seed);
    imp_io *io = new_io(0, 40 * ms);
    imp_io_file *f = open_file(io);
    for (int round = 0; round < 12; round++) {
        char nth[8];
        imp_io_queue *q;
        assert_int_equal(imp_io_queue_new(io, 1 + (unsigned)imp_rng_below(&rng, DEPTH), N_OPS * BLOCK, &q), 0);
        imp_io_op *ops = make_ops(q, f, N_OPS);
        snprintf(nth, sizeof nth, "%u", 1 + (unsigned)imp_rng_below(&rng, 2 * N_OPS));
        hang(nth, (20 + imp_rng_below(&rng, 200)) * ms);
        for (size_t i = 0; i < N_OPS; i++) {
            imp_io_submit(q, &ops[i]);
            if (imp_rng_below(&rng, 4) == 0) imp_io_poll(q);
        }
        for (size_t i = 0; i < N_OPS; i++) {
            imp_io_op *op = &ops[imp_rng_below(&rng, N_OPS)];
            imp_io_wait(q, op);
            if (op->status == 0) check_op(op);
            else assert_true(imp_io_queue_hung(q));
        }
        if (imp_rng_below(&rng, 2)) imp_io_cancel_all(q);
        imp_io_queue_free(q); /* ends those that nobody waited for */
        free(ops);
        imp_io_fault_clear();
    }
    await_end(io);
    imp_io_close(f);
    imp_io_free(io);
}

int main(void)
{
    seed = imp_test_seed();
#define IN_DIR(test) cmocka_unit_test_setup_teardown(test, make_dir, remove_dir)
    const struct CMUnitTest tests[] = {
        IN_DIR(test_given_up), IN_DIR(test_slow), IN_DIR(test_limited), IN_DIR(test_closed), IN_DIR(test_random),
    };
    imp_io_buffers buffers;
    int no_uring = imp_io_uring_try(&buffers);
    if (no_uring) print_message("SKIPPED, io_uring can't be used here: %s\n", strerror(no_uring));
    mode = IMP_IO_THREADS;
    int failed = cmocka_run_group_tests_name("threads", tests, NULL, NULL);
    mode = IMP_IO_URING;
    if (!no_uring) failed += cmocka_run_group_tests_name("io_uring", tests, NULL, NULL);
    return failed ? 1 : 0;
}
