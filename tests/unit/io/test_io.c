/* The I/O module, over every mode this machine has: io_uring and threads, O_DIRECT and the page cache, disk and tmpfs.
 * What is missing here is skipped, and said. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/rng.h"
#include "io/io.h"
#include "io/io_fault.h"
#include "io/io_internal.h"
#include "support/support.h"

enum { FILE_BYTES = 1 << 20, ARENA_BYTES = 1 << 20 };

typedef struct mode {
    const char *name;
    const char *base; /* directory to work below; NULL: the temporary one */
    imp_io_mode mode;
    unsigned flags, deny;
    const char *describe; /* NULL: depends on the file system */
} mode;

static const mode modes[] = {
    {"io_uring", NULL, IMP_IO_URING, 0, 0, NULL},
    {"io_uring, plain buffers", NULL, IMP_IO_URING, 0, IMP_IO_DENY_REGISTER, NULL},
    {"io_uring, alignment 4096", NULL, IMP_IO_URING, 0, IMP_IO_DENY_ALIGN_512, NULL},
    {"io_uring, page cache", NULL, IMP_IO_URING, IMP_STORE_NO_DIRECT, 0, "io_uring, page cache, registered buffers"},
    {"io_uring, O_DIRECT refused", NULL, IMP_IO_URING, 0, IMP_IO_DENY_DIRECT | IMP_IO_DENY_REGISTER,
     "io_uring, page cache, plain buffers"},
    {"io_uring, tmpfs", "/dev/shm", IMP_IO_URING, 0, 0, NULL},
    {"threads", NULL, IMP_IO_THREADS, 0, 0, NULL},
    {"threads, page cache", NULL, IMP_IO_THREADS, IMP_STORE_NO_DIRECT, 0, "threads, page cache"},
    {"threads, tmpfs", "/dev/shm", IMP_IO_THREADS, 0, 0, NULL},
    {"automatic, io_uring refused", NULL, IMP_IO_AUTO, 0, IMP_IO_DENY_URING, NULL},
};

static const mode *m; /* the one under test */
static char *dir;
static uint64_t seed;

static imp_io *new_io(unsigned flags, uint64_t bytes_per_s)
{
    imp_io *io;
    int rc = imp_io_new(dir, m->mode, m->flags | flags, bytes_per_s, &io);
    if (rc < 0) print_error("%s\n", imp_last_error());
    assert_int_equal(rc, 0);
    return io;
}

static imp_io_file *open_file(imp_io *io, const char *name)
{
    imp_io_file *f;
    int rc = imp_io_open(io, name, imp_io_alignment(io), &f);
    if (rc < 0) print_error("%s\n", imp_last_error());
    assert_int_equal(rc, 0);
    return f;
}

static int make_dir(void **state)
{
    (void)state;
    dir = imp_test_make_dir(m->base);
    assert_non_null(dir);
    assert_int_equal(mkdir(imp_test_path(dir, "segments"), 0700), 0);
    assert_int_equal(imp_test_make_file(imp_test_path(dir, "segments/a"), FILE_BYTES, seed), 0);
    imp_io_fault_deny(m->deny);
    return 0;
}

static int remove_dir(void **state)
{
    (void)state;
    imp_io_fault_clear();
    imp_test_remove_dir(dir);
    dir = NULL;
    return 0;
}

static int n_entries;
static uint64_t n_disk_bytes;

static int count_entry(const char *name, uint64_t disk_bytes, void *user)
{
    (void)name;
    n_entries++;
    n_disk_bytes += disk_bytes;
    return user ? *(int *)user : 0;
}

static int entries(imp_io *io, const char *sub)
{
    n_entries = 0;
    n_disk_bytes = 0;
    assert_int_equal(imp_io_list(io, sub, count_entry, NULL), 0);
    return n_entries;
}

/* ---- settling on a mode */

static void test_new(void **state)
{
    (void)state;
    imp_test_count_log(dir);
    imp_io *io = new_io(0, 0);
    assert_int_equal(imp_test_log_count(), 1);
    if (m->describe) assert_string_equal(imp_io_describe(io), m->describe);
    assert_memory_equal(imp_io_describe(io), m->name, m->mode == IMP_IO_URING ? 8 : 0);
    bool threads = m->mode == IMP_IO_THREADS || (m->deny & IMP_IO_DENY_URING);
    if (threads) assert_memory_equal(imp_io_describe(io), "threads", 7);
    assert_true(imp_io_alignment(io) == 512 || imp_io_alignment(io) == 4096);
    if (m->deny & IMP_IO_DENY_ALIGN_512) assert_int_equal(imp_io_alignment(io), 4096);
    assert_int_equal(entries(io, ""), 0); /* nothing is left of what it tried out */
    assert_int_equal(imp_io_bytes_read(io), 0);
    assert_int_equal(imp_io_bytes_written(io), 0);

    /* For reading only it comes to the same without writing, from a file that is there. */
    imp_io *reader = new_io(IMP_STORE_READONLY, 0);
    assert_string_equal(imp_io_describe(reader), imp_io_describe(io));
    assert_int_equal(imp_io_alignment(reader), imp_io_alignment(io));
    imp_io_writer *w;
    assert_int_equal(imp_io_writer_new(reader, "segments/x", &w), IMP_E_PERM);
    assert_null(w);
    assert_int_equal(imp_io_unlink(reader, "segments/a"), IMP_E_PERM);
    imp_io_free(reader);
    imp_io_free(io);
    imp_io_free(NULL);

    assert_int_equal(imp_io_new(imp_test_path(dir, "missing"), m->mode, m->flags, 0, &io), IMP_E_NOTFOUND);
    assert_null(io);
    assert_int_equal(imp_io_new(imp_test_path(dir, "segments/a"), m->mode, m->flags, 0, &io), IMP_E_IO);
    assert_int_equal(imp_io_new(dir, (imp_io_mode)9, 0, 0, &io), IMP_E_ARG);
    imp_io_fault_deny(m->deny | IMP_IO_DENY_URING);
    assert_int_equal(imp_io_new(dir, IMP_IO_URING, m->flags, 0, &io), IMP_E_UNSUPPORTED);
}

/* ---- files */

static void test_open(void **state)
{
    (void)state;
    imp_io *io = new_io(0, 0);
    imp_io_file *f = open_file(io, "segments/a");
    assert_int_equal(imp_io_file_bytes(f), FILE_BYTES);
    imp_io_close(f);
    imp_io_close(NULL);

    assert_int_equal(symlink("a", imp_test_path(dir, "segments/link")), 0);
    assert_int_equal(symlink("segments", imp_test_path(dir, "linked")), 0);
    assert_int_equal(mkfifo(imp_test_path(dir, "segments/pipe"), 0600), 0);
    static const struct { const char *name; int status; } bad[] = {
        {"segments/b", IMP_E_NOTFOUND}, {"nowhere/a", IMP_E_NOTFOUND}, {"segments/link", IMP_E_IO},
        {"linked/a", IMP_E_IO},         {"segments/pipe", IMP_E_IO},   {"segments", IMP_E_IO},
        {"", IMP_E_IO},                 {"/etc/passwd", IMP_E_IO},     {"../a", IMP_E_IO},
        {"segments/../segments/a", IMP_E_IO}, {"./segments/a", IMP_E_IO}, {"segments//a", IMP_E_IO},
        {"segments/", IMP_E_IO},        {"segments/a/b", IMP_E_IO}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        int rc = imp_io_open(io, bad[i].name, 4096, &f);
        if (rc != bad[i].status) print_error("%s: %s, %s\n", bad[i].name, imp_status_name(rc), imp_last_error());
        assert_int_equal(rc, bad[i].status);
        assert_null(f);
    }
    /* The list names files only. */
    assert_int_equal(entries(io, "segments"), 1);
    assert_true(n_disk_bytes >= FILE_BYTES);
    assert_int_equal(imp_io_list(io, "linked", count_entry, NULL), IMP_E_IO);
    assert_int_equal(imp_io_list(io, "nowhere", count_entry, NULL), IMP_E_NOTFOUND);
    int stop = 77;
    assert_int_equal(imp_io_list(io, "segments", count_entry, &stop), 77);
    imp_io_free(io);
}

/* A file that refuses O_DIRECT where the directory takes it, as on a mount of another kind: it is read through the page
 * cache, at any offset. */
static void test_open_refused(void **state)
{
    (void)state;
    imp_io *io = new_io(0, 0);
    bool direct = io->direct;
    io->direct = true; /* also where these tests run on a file system without */
    imp_io_fault_deny(m->deny | IMP_IO_DENY_DIRECT_OPEN);
    imp_io_file *f = open_file(io, "segments/a");
    imp_io_fault_deny(m->deny);
    unsigned char *buf = imp_aligned(4096, 8192);
    assert_non_null(buf);
    assert_int_equal(imp_io_read(f, 0, buf, 4096), 0);
    assert_true(imp_test_filled(buf, 4096, seed, 0));
    assert_int_equal(imp_io_read(f, 17, buf + 1, 4096), 0);
    assert_true(imp_test_filled(buf + 1, 4096, seed, 17));
    imp_io_queue *q;
    assert_int_equal(imp_io_queue_new(io, 4, 65536, &q), 0);
    imp_io_op op = {.file = f, .offset = 4096, .buf = buf, .n_bytes = 8192};
    imp_io_submit(q, &op);
    imp_io_wait(q, &op);
    assert_int_equal(op.status, 0);
    assert_true(imp_test_filled(buf, 8192, seed, 4096));
    imp_io_queue_free(q);
    imp_io_close(f);
    imp_free(buf);
    io->direct = direct;
    /* All other files are still read past it. */
    f = open_file(io, "segments/a");
    assert_int_equal(f->direct, direct);
    imp_io_close(f);
    imp_io_free(io);
}

static void test_read(void **state)
{
    (void)state;
    imp_io *io = new_io(0, 0);
    imp_io_file *f = open_file(io, "segments/a");
    size_t unit = imp_io_alignment(io);
    unsigned char *buf = imp_aligned(4096, FILE_BYTES);
    assert_non_null(buf);
    assert_int_equal(imp_io_read(f, 0, buf, FILE_BYTES), 0);
    assert_true(imp_test_filled(buf, FILE_BYTES, seed, 0));
    assert_int_equal(imp_io_bytes_read(io), FILE_BYTES);
    assert_int_equal(imp_io_read(f, unit, buf + unit, unit), 0);
    assert_true(imp_test_filled(buf + unit, unit, seed, unit));
    assert_int_equal(imp_io_bytes_read(io), FILE_BYTES + unit);
    assert_int_equal(imp_io_read(f, 0, buf, 0), 0);

    assert_int_equal(imp_io_read(f, FILE_BYTES - unit, buf, 2 * unit), IMP_E_IO);
    assert_non_null(strstr(imp_last_error(), "segments/a"));
    assert_int_equal(imp_io_read(f, FILE_BYTES, buf, unit), IMP_E_IO);
    assert_int_equal(imp_io_read(f, UINT64_C(1) << 50, buf, unit), IMP_E_IO);
    if (strstr(imp_io_describe(io), "O_DIRECT")) {
        assert_int_equal(imp_io_read(f, 1, buf, unit), IMP_E_ARG);
        assert_int_equal(imp_io_read(f, 0, buf + 1, unit), IMP_E_ARG);
        assert_int_equal(imp_io_read(f, 0, buf, unit - 1), IMP_E_ARG);
    }
    imp_io_close(f);

    /* A file made for a finer alignment is read all the same. */
    if (unit == 4096) {
        assert_int_equal(imp_io_open(io, "segments/a", 512, &f), 0);
        assert_int_equal(imp_io_read(f, 512, buf + 512, 512), 0);
        assert_true(imp_test_filled(buf + 512, 512, seed, 512));
        imp_io_close(f);
    }

    /* An open file is a lease. */
    f = open_file(io, "segments/a");
    assert_int_equal(imp_io_unlink(io, "segments/a"), 0);
    assert_int_equal(imp_io_unlink(io, "segments/a"), IMP_E_NOTFOUND);
    assert_int_equal(imp_io_sync_dir(io, "segments"), 0);
    assert_int_equal(imp_io_sync_dir(io, ""), 0);
    memset(buf, 0, FILE_BYTES);
    assert_int_equal(imp_io_read(f, 0, buf, FILE_BYTES), 0);
    assert_true(imp_test_filled(buf, FILE_BYTES, seed, 0));
    imp_io_close(f);
    imp_free(buf);
    imp_io_free(io);
}

/* A file whose length is no multiple of the alignment, and one that shrinks after it was opened. */
static void test_end_of_file(void **state)
{
    (void)state;
    imp_io *io = new_io(0, 0);
    size_t unit = imp_io_alignment(io);
    assert_int_equal(imp_test_make_file(imp_test_path(dir, "odd"), 3 * unit + 100, seed), 0);
    imp_io_file *odd = open_file(io, "odd"), *f = open_file(io, "segments/a");
    imp_io_queue *q;
    assert_int_equal(imp_io_queue_new(io, 4, ARENA_BYTES, &q), 0);
    unsigned char *arena = imp_io_queue_arena(q, NULL);
    imp_io_op ops[4] = {
        {.file = odd, .offset = 0, .buf = arena, .n_bytes = 3 * unit},
        {.file = odd, .offset = 0, .buf = arena + 4 * unit, .n_bytes = 4 * unit},
        {.file = odd, .offset = 4 * unit, .buf = arena + 8 * unit, .n_bytes = unit},
        {.file = f, .offset = FILE_BYTES - unit, .buf = arena + 12 * unit, .n_bytes = unit},
    };
    assert_int_equal(truncate(imp_test_path(dir, "segments/a"), FILE_BYTES / 2), 0);
    for (int i = 0; i < 4; i++) imp_io_submit(q, &ops[i]);
    for (int i = 3; i >= 0; i--) imp_io_wait(q, &ops[i]);
    assert_int_equal(ops[0].status, 0);
    assert_true(imp_test_filled(arena, 3 * unit, seed, 0));
    for (int i = 1; i < 4; i++) assert_int_equal(ops[i].status, IMP_E_IO);
    assert_int_equal(imp_io_read(odd, 0, arena, 4 * unit), IMP_E_IO);
    imp_io_queue_free(q);
    imp_io_close(f);
    imp_io_close(odd);
    imp_io_free(io);
}

/* ---- reads in flight */

enum { N_OPS = 48, SLOT_BYTES = 20480 };

/* Give each op a random run of the file and its slot of the arena. */
static void random_ops(imp_rng *rng, imp_io *io, imp_io_file *f, imp_io_queue *q, imp_io_op *ops, size_t n)
{
    size_t unit = imp_io_alignment(io);
    unsigned char *arena = imp_io_queue_arena(q, NULL);
    for (size_t i = 0; i < n; i++) {
        size_t n_bytes = (size_t)imp_rng_below(rng, SLOT_BYTES / unit + 1) * unit;
        ops[i] = (imp_io_op){.file = f,
                             .offset = imp_rng_below(rng, (FILE_BYTES - n_bytes) / unit + 1) * unit,
                             .buf = arena + i * SLOT_BYTES,
                             .n_bytes = n_bytes};
        memset(ops[i].buf, 0xee, SLOT_BYTES);
    }
}

static void check_op(const imp_io_op *op)
{
    assert_true(op->done);
    assert_int_equal(op->status, 0);
    assert_true(imp_test_filled(op->buf, op->n_bytes, seed, op->offset));
    const unsigned char *end = (const unsigned char *)op->buf + op->n_bytes;
    for (size_t i = 0; i < SLOT_BYTES - op->n_bytes; i++) assert_int_equal(end[i], 0xee);
}

static void random_rounds(unsigned depth, int n_rounds, uint64_t bytes_per_s)
{
    imp_rng rng;
    imp_rng_seed(&rng, seed + depth);
    imp_io *io = new_io(0, bytes_per_s);
    imp_io_file *f = open_file(io, "segments/a");
    imp_io_queue *q;
    assert_int_equal(imp_io_queue_new(io, depth, ARENA_BYTES, &q), 0);
    size_t n_bytes;
    unsigned char *arena = imp_io_queue_arena(q, &n_bytes);
    assert_int_equal(n_bytes, ARENA_BYTES);
    assert_int_equal((uintptr_t)arena % 4096, 0);

    static imp_io_op ops[N_OPS];
    uint64_t want = 0;
    n_rounds = imp_test_rounds(n_rounds);
    for (int round = 0; round < n_rounds; round++) {
        size_t n = 1 + (size_t)imp_rng_below(&rng, N_OPS);
        random_ops(&rng, io, f, q, ops, n);
        for (size_t i = 0; i < n; i++) {
            imp_io_submit(q, &ops[i]);
            want += ops[i].n_bytes;
            switch (imp_rng_below(&rng, 6)) {
            case 0: imp_io_kick(q); break;
            case 1: imp_io_poll(q); break;
            case 2: {
                imp_io_op *op = &ops[imp_rng_below(&rng, i + 1)];
                imp_io_wait(q, op);
                check_op(op);
                break;
            }
            default: break;
            }
        }
        for (size_t i = 0; i < n; i++) imp_io_wait(q, &ops[(i * 7) % n]); /* may leave some out */
        for (size_t i = 0; i < n; i++) imp_io_wait(q, &ops[i]);
        for (size_t i = 0; i < n; i++) check_op(&ops[i]);
    }
    assert_int_equal(imp_io_bytes_read(io), want);
    if (bytes_per_s) assert_int_equal(atomic_load(&io->limit.bytes), want);
    imp_io_queue_free(q);
    imp_io_close(f);
    imp_io_free(io);
}

static void test_queue(void **state)
{
    (void)state;
    random_rounds(1, 8, 0);
    random_rounds(3, 12, 0);
    random_rounds(32, 12, 0);
    random_rounds(200, 4, 0);
}

static void test_queue_arguments(void **state)
{
    (void)state;
    imp_io *io = new_io(0, 0);
    imp_io_queue *q;
    assert_int_equal(imp_io_queue_new(io, 0, 4096, &q), IMP_E_ARG);
    assert_null(q);
    assert_int_equal(imp_io_queue_new(io, 1000000, 4096, &q), IMP_E_ARG);
    assert_int_equal(imp_io_queue_new(io, 4, 0, &q), 0);
    imp_io_kick(q); /* nothing to do is fine */
    imp_io_poll(q);
    imp_io_cancel_all(q);
    imp_io_queue_free(q);
    imp_io_queue_free(NULL);

    assert_int_equal(imp_io_queue_new(io, 4, 65536, &q), 0);
    imp_io_file *f = open_file(io, "segments/a");
    if (strstr(imp_io_describe(io), "O_DIRECT")) {
        imp_io_op op = {.file = f, .offset = 1, .buf = imp_io_queue_arena(q, NULL), .n_bytes = 4096};
        imp_io_submit(q, &op);
        imp_io_wait(q, &op);
        assert_int_equal(op.status, IMP_E_ARG);
    }
    /* Memory outside the arena works too. */
    unsigned char *own = imp_aligned(4096, 8192);
    assert_non_null(own);
    imp_io_op op = {.file = f, .offset = 4096, .buf = own, .n_bytes = 8192};
    imp_io_submit(q, &op);
    imp_io_wait(q, &op);
    assert_int_equal(op.status, 0);
    assert_true(imp_test_filled(own, 8192, seed, 4096));
    imp_free(own);
    imp_io_close(f);
    imp_io_queue_free(q);
    imp_io_free(io);
}

static void test_grow(void **state)
{
    (void)state;
    imp_io *io = new_io(0, 0);
    imp_io_file *f = open_file(io, "segments/a");
    imp_io_queue *q;
    size_t n_bytes;
    assert_int_equal(imp_io_queue_new(io, 2, 65536, &q), 0);
    imp_io_op op = {.file = f, .offset = 0, .buf = imp_io_queue_arena(q, NULL), .n_bytes = 65536};
    imp_io_submit(q, &op);
    assert_int_equal(imp_io_queue_grow(q, 131072), IMP_E_ARG);
    imp_io_wait(q, &op);
    assert_int_equal(imp_io_queue_grow(q, 4096), 0); /* smaller: stays */
    (void)imp_io_queue_arena(q, &n_bytes);
    assert_int_equal(n_bytes, 65536);
    for (size_t size = 131072; size <= 8 << 20; size *= 4) {
        (void)imp_alloc_fail_at(1, 0);
        assert_int_equal(imp_io_queue_grow(q, size), IMP_E_NOMEM);
        (void)imp_alloc_fail_at(0, 0);
        assert_int_equal(imp_io_queue_grow(q, size), 0);
        unsigned char *arena = imp_io_queue_arena(q, &n_bytes);
        assert_int_equal(n_bytes, size);
        assert_true(imp_test_filled(arena, 65536, seed, 0)); /* what was in it came along */
        op = (imp_io_op){.file = f, .offset = 65536, .buf = arena + size - 65536, .n_bytes = 65536};
        imp_io_submit(q, &op);
        imp_io_wait(q, &op);
        assert_int_equal(op.status, 0);
        assert_true(imp_test_filled(op.buf, 65536, seed, 65536));
    }
    imp_io_close(f);
    imp_io_queue_free(q);
    imp_io_free(io);
}

static void test_cancel(void **state)
{
    (void)state;
    imp_rng rng;
    imp_rng_seed(&rng, seed);
    imp_io *io = new_io(0, 0);
    imp_io_file *f = open_file(io, "segments/a");
    imp_io_queue *q;
    assert_int_equal(imp_io_queue_new(io, 4, ARENA_BYTES, &q), 0);
    static imp_io_op ops[N_OPS];
    imp_io_fault slow = {.kind = IMP_IO_READ, .nth = 1, .stay = true, .action = IMP_IO_DELAY, .value = 300000};
    imp_io_fault_add(&slow);
    unsigned n_read = 0, n_dropped = 0;
    for (int round = 0; round < 20; round++) {
        random_ops(&rng, io, f, q, ops, N_OPS);
        for (size_t i = 0; i < N_OPS; i++) imp_io_submit(q, &ops[i]);
        if (round % 3 > 0) imp_io_kick(q);
        if (round % 3 > 1) imp_io_wait(q, &ops[imp_rng_below(&rng, 6)]);
        imp_io_cancel_all(q);
        for (size_t i = 0; i < N_OPS; i++) {
            assert_true(ops[i].done);
            if (ops[i].status == 0) {
                check_op(&ops[i]);
                n_read++;
            } else {
                assert_int_equal(ops[i].status, IMP_E_BUSY);
                n_dropped++;
            }
        }
        assert_int_equal(q->n_in_flight, 0);
        assert_null(q->waiting.head);
    }
    assert_true(n_read > 0);
    assert_true(n_dropped > 0);
    /* Freed with reads in flight. */
    random_ops(&rng, io, f, q, ops, N_OPS);
    for (size_t i = 0; i < N_OPS; i++) imp_io_submit(q, &ops[i]);
    imp_io_kick(q);
    imp_io_queue_free(q);
    for (size_t i = 0; i < N_OPS; i++) assert_true(ops[i].done);
    imp_io_close(f);
    imp_io_free(io);
}

/* Submitted by one thread that then ends, awaited by another. */
typedef struct handover {
    imp_io_queue *q;
    imp_io_op *ops;
} handover;

static void *submit_all(void *arg)
{
    handover *h = arg;
    for (size_t i = 0; i < N_OPS; i++) imp_io_submit(h->q, &h->ops[i]);
    imp_io_kick(h->q);
    return NULL;
}

static void test_handover(void **state)
{
    (void)state;
    imp_rng rng;
    imp_rng_seed(&rng, seed);
    imp_io *io = new_io(0, 0);
    imp_io_file *f = open_file(io, "segments/a");
    static imp_io_op ops[N_OPS];
    handover h = {.ops = ops};
    assert_int_equal(imp_io_queue_new(io, 32, ARENA_BYTES, &h.q), 0);
    for (int round = 0; round < 5; round++) {
        random_ops(&rng, io, f, h.q, ops, N_OPS);
        pthread_t t;
        assert_int_equal(pthread_create(&t, NULL, submit_all, &h), 0);
        pthread_join(t, NULL);
        for (size_t i = 0; i < N_OPS; i++) imp_io_wait(h.q, &ops[i]);
        for (size_t i = 0; i < N_OPS; i++) check_op(&ops[i]);
    }
    imp_io_queue_free(h.q);
    imp_io_close(f);
    imp_io_free(io);
}

/* Several queues and direct reads of one file at once. */
typedef struct reader {
    imp_io *io;
    imp_io_file *f;
    uint64_t seed;
    int bad;
} reader;

static void *read_much(void *arg)
{
    reader *r = arg;
    imp_rng rng;
    imp_rng_seed(&rng, r->seed);
    imp_io_queue *q;
    if (imp_io_queue_new(r->io, 4, 16 * SLOT_BYTES, &q) < 0) {
        r->bad = 1;
        return NULL;
    }
    imp_io_op ops[16];
    for (int round = 0; round < 10; round++) {
        random_ops(&rng, r->io, r->f, q, ops, 16);
        for (int i = 0; i < 16; i += 2) imp_io_submit(q, &ops[i]);
        imp_io_kick(q);
        for (int i = 1; i < 16; i += 2) {
            ops[i].status = imp_io_read(r->f, ops[i].offset, ops[i].buf, ops[i].n_bytes);
            ops[i].done = true;
        }
        for (int i = 0; i < 16; i++) {
            imp_io_wait(q, &ops[i]);
            if (ops[i].status || !imp_test_filled(ops[i].buf, ops[i].n_bytes, seed, ops[i].offset)) r->bad++;
        }
    }
    imp_io_queue_free(q);
    return NULL;
}

static void test_parallel(void **state)
{
    (void)state;
    imp_io *io = new_io(0, 0);
    imp_io_file *f = open_file(io, "segments/a");
    reader readers[3];
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        readers[i] = (reader){.io = io, .f = f, .seed = seed + (uint64_t)i};
        assert_int_equal(pthread_create(&threads[i], NULL, read_much, &readers[i]), 0);
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(readers[i].bad, 0);
    }
    imp_io_close(f);
    imp_io_free(io);
}

/* ---- the rate limit */

static void test_limit_schedule(void **state)
{
    (void)state;
    imp_rng rng;
    imp_rng_seed(&rng, seed);
    imp_io_limit l;
    imp_io_limit_init(&l, 0);
    assert_int_equal(imp_io_limit_reserve(&l, 123, 1 << 30), 0);

    /* With a clock of its own: from any start, what has been let through never exceeds rate x time + burst. */
    uint64_t rate = 100000000, burst = 0;
    imp_io_limit_init(&l, rate);
    burst = l.burst_ns * rate / 1000000000u;
    uint64_t now = 1000000000, start = now, sum = 0;
    for (int i = 0; i < 2000; i++) {
        uint64_t n = 1 + imp_rng_below(&rng, 1 << 20);
        uint64_t release = imp_io_limit_reserve(&l, now, n);
        if (release > now) now = release;
        sum += n;
        assert_true((double)sum <= (double)(now - start) * (double)rate / 1e9 + (double)burst + 2000);
        if (imp_rng_below(&rng, 50) == 0) { /* idle for long: no credit is saved up */
            now += 1000000000;
            start = now;
            sum = 0;
        }
    }
    /* And a reader that is always back within the burst gets the whole rate. */
    imp_io_limit_init(&l, rate);
    start = now;
    sum = 0;
    for (int i = 0; i < 2000; i++) {
        uint64_t release = imp_io_limit_reserve(&l, now, 65536);
        if (release > now) now = release;
        sum += 65536;
        now += imp_rng_below(&rng, 600000);
    }
    assert_true((double)sum >= (double)(now - start) * (double)rate / 1e9 * 0.99);
    assert_true(atomic_load(&l.bytes) == sum);
    /* The slowest rate doesn't overflow. */
    imp_io_limit_init(&l, 1);
    (void)imp_io_limit_reserve(&l, now, UINT64_MAX / 2);
    assert_true(imp_io_limit_reserve(&l, now, 1) > now);
}

static void test_limit(void **state)
{
    (void)state;
    random_rounds(3, 2, 200000000);
    random_rounds(32, 3, 200000000);
    imp_io *io = new_io(0, 200000000);
    imp_io_file *f = open_file(io, "segments/a");
    unsigned char *buf = imp_aligned(4096, FILE_BYTES);
    assert_non_null(buf);
    assert_int_equal(imp_io_read(f, 0, buf, FILE_BYTES), 0);
    assert_int_equal(atomic_load(&io->limit.bytes), FILE_BYTES);
    imp_free(buf);
    /* Cancelled while timers run. */
    imp_rng rng;
    imp_rng_seed(&rng, seed);
    static imp_io_op ops[N_OPS];
    imp_io_queue *q;
    assert_int_equal(imp_io_queue_new(io, 8, ARENA_BYTES, &q), 0);
    random_ops(&rng, io, f, q, ops, N_OPS);
    for (size_t i = 0; i < N_OPS; i++) imp_io_submit(q, &ops[i]);
    imp_io_kick(q);
    imp_io_cancel_all(q);
    for (size_t i = 0; i < N_OPS; i++) assert_true(ops[i].done && (ops[i].status == 0 || ops[i].status == IMP_E_BUSY));
    imp_io_queue_free(q);
    imp_io_close(f);
    imp_io_free(io);
}

/* ---- faults in reads */

/* Read 24 runs with rule `fault` in force; returns how many failed, and checks all others. */
static unsigned run_with(const char *fault, int want_status, uint64_t *hits)
{
    imp_rng rng;
    imp_rng_seed(&rng, seed);
    imp_io *io = new_io(0, 0);
    imp_io_file *f = open_file(io, "segments/a");
    imp_io_queue *q;
    assert_int_equal(imp_io_queue_new(io, 5, ARENA_BYTES, &q), 0);
    imp_io_op ops[24];
    random_ops(&rng, io, f, q, ops, 24);
    for (int i = 0; i < 24; i++) { /* none empty: each is an operation */
        if (ops[i].n_bytes == 0) {
            ops[i].offset = 0;
            ops[i].n_bytes = 8192;
        }
    }
    int rule = imp_io_fault_parse(fault);
    assert_true(rule >= 0);
    for (int i = 0; i < 24; i++) imp_io_submit(q, &ops[i]);
    for (int i = 0; i < 24; i++) imp_io_wait(q, &ops[i]);
    unsigned n_bad = 0;
    for (int i = 0; i < 24; i++) {
        if (ops[i].status) {
            assert_int_equal(ops[i].status, want_status);
            n_bad++;
        } else if (want_status == 1 && !imp_test_filled(ops[i].buf, ops[i].n_bytes, seed, ops[i].offset)) {
            n_bad++; /* a flipped bit comes without an error */
        } else {
            check_op(&ops[i]);
        }
    }
    imp_io_queue_free(q);
    *hits = imp_io_fault_hits(rule);
    imp_io_fault_clear();
    imp_io_fault_deny(m->deny);
    imp_io_close(f);
    imp_io_free(io);
    return n_bad;
}

static void test_read_faults(void **state)
{
    (void)state;
    uint64_t hits;
    assert_int_equal(run_with("read:3:EIO", IMP_E_IO, &hits), 1);
    assert_int_equal(hits, 1);
    assert_int_equal(run_with("read:1:ENOMEM", IMP_E_NOMEM, &hits), 1);
    assert_int_equal(run_with("read:2:EACCES", IMP_E_PERM, &hits), 1);
    assert_int_equal(run_with("read:2:EINVAL", IMP_E_IO, &hits), 1); /* the device's, not a caller's mistake */
    assert_int_equal(run_with("read:20:short:0", IMP_E_IO, &hits), 1); /* the file has ended, it seems */
    assert_int_equal(run_with("read:4:EINTR", 0, &hits), 0);
    assert_int_equal(run_with("read:4:EAGAIN", 0, &hits), 0);
    assert_int_equal(hits, 1);
    assert_int_equal(run_with("read:2:short:512", 0, &hits), 0);
    assert_int_equal(run_with("read:1+:short:4096", 0, &hits), 0); /* every read in pieces */
    assert_true(hits >= 24);
    assert_int_equal(run_with("read:5:short:4096", 0, &hits), 0);
    assert_int_equal(run_with("read:2:flip:12345", 1, &hits), 1);
    assert_int_equal(run_with("read:1+:EAGAIN", IMP_E_IO, &hits), 24); /* for ever: given up */
    assert_int_equal(run_with("read:7+:EIO", IMP_E_IO, &hits), 18);

    imp_io *io = new_io(0, 0);
    imp_io_file *f = open_file(io, "segments/a");
    unsigned char *buf = imp_aligned(4096, 65536);
    assert_non_null(buf);
    imp_io_fault_parse("read:1:EINTR");
    imp_io_fault_parse("read:2:short:4096");
    imp_io_fault_parse("read:4:EIO");
    assert_int_equal(imp_io_read(f, 0, buf, 65536), 0);
    assert_true(imp_test_filled(buf, 65536, seed, 0));
    assert_int_equal(imp_io_read(f, 0, buf, 65536), IMP_E_IO);
    assert_non_null(strstr(imp_last_error(), "Input/output error"));
    imp_free(buf);
    imp_io_close(f);
    imp_io_fault_parse("open:1:EMFILE");
    assert_int_equal(imp_io_open(io, "segments/a", 4096, &f), IMP_E_IO);
    imp_io_fault_parse("list:1:EIO");
    assert_int_equal(imp_io_list(io, "segments", count_entry, NULL), IMP_E_IO);
    imp_io_free(io);
}

/* The kernel stops taking reads half-way: all of them come in nevertheless. */
static void test_broken_ring(void **state)
{
    (void)state;
    if (m->mode != IMP_IO_URING) skip();
    imp_rng rng;
    imp_rng_seed(&rng, seed);
    imp_io *io = new_io(0, 0);
    imp_io_file *f = open_file(io, "segments/a");
    imp_io_queue *q;
    assert_int_equal(imp_io_queue_new(io, 8, ARENA_BYTES, &q), 0);
    static imp_io_op ops[N_OPS];
    random_ops(&rng, io, f, q, ops, N_OPS);
    for (size_t i = 0; i < N_OPS; i++) imp_io_submit(q, &ops[i]);
    imp_io_kick(q);
    imp_test_count_log("going on with pread");
    imp_io_fault_deny(m->deny | IMP_IO_DENY_ENTER);
    for (size_t i = 0; i < N_OPS; i++) imp_io_wait(q, &ops[i]);
    imp_io_fault_deny(m->deny);
    for (size_t i = 0; i < N_OPS; i++) check_op(&ops[i]);
    assert_int_equal(imp_test_log_count(), 1);
    random_ops(&rng, io, f, q, ops, N_OPS);
    for (size_t i = 0; i < N_OPS; i++) imp_io_submit(q, &ops[i]);
    for (size_t i = 0; i < N_OPS; i++) imp_io_wait(q, &ops[i]);
    for (size_t i = 0; i < N_OPS; i++) check_op(&ops[i]);
    imp_io_queue_free(q);
    imp_io_close(f);
    imp_io_free(io);
}

/* A ring that can't be had, and buffers that can't be registered, are said once and do no harm. */
static void test_fallbacks(void **state)
{
    (void)state;
    if (m->mode != IMP_IO_URING) skip();
    imp_io *io;
    imp_io_queue *q;
    assert_int_equal(imp_io_new(dir, IMP_IO_AUTO, m->flags, 0, &io), 0);
    assert_memory_equal(imp_io_describe(io), "io_uring", 8);
    imp_io_fault_deny(IMP_IO_DENY_URING);
    imp_test_count_log("threads for want of a ring");
    for (int i = 0; i < 2; i++) {
        assert_int_equal(imp_io_queue_new(io, 4, 65536, &q), 0);
        imp_io_file *f = open_file(io, "segments/a");
        imp_io_op op = {.file = f, .offset = 0, .buf = imp_io_queue_arena(q, NULL), .n_bytes = 65536};
        imp_io_submit(q, &op);
        imp_io_wait(q, &op);
        assert_int_equal(op.status, 0);
        imp_io_close(f);
        imp_io_queue_free(q);
    }
    assert_int_equal(imp_test_log_count(), 1);
    imp_io_free(io);

    imp_io_fault_deny(0);
    assert_int_equal(imp_io_new(dir, IMP_IO_URING, m->flags, 0, &io), 0);
    imp_io_fault_deny(IMP_IO_DENY_REGISTER);
    imp_test_count_log("can't be registered");
    for (int i = 0; i < 2; i++) {
        assert_int_equal(imp_io_queue_new(io, 4, 65536, &q), 0);
        assert_non_null(strstr(imp_io_describe(io), "plain buffers"));
        imp_io_queue_free(q);
    }
    assert_int_equal(imp_test_log_count(), 1);
    imp_io_fault_deny(IMP_IO_DENY_URING);
    assert_int_equal(imp_io_queue_new(io, 4, 65536, &q), IMP_E_PERM);
    assert_null(q);
    imp_io_free(io);
}

/* ---- writing */

enum { WRITTEN_BYTES = 5 * 65536 };

/* Write a whole file in pieces; returns the first error. */
static int write_file(imp_io *io, const char *name)
{
    imp_io_writer *w;
    int rc = imp_io_writer_new(io, name, &w);
    if (rc < 0) return rc;
    unsigned char *buf = aligned_alloc(4096, 65536); /* not ours: this must not fail in the tests of failing memory */
    assert_non_null(buf);
    for (uint64_t at = 0; at < WRITTEN_BYTES && rc == 0; at += 65536) {
        imp_test_fill(buf, 65536, seed + 1, at);
        rc = imp_io_write(w, at, buf, 65536);
    }
    free(buf);
    if (rc < 0) {
        imp_io_writer_abort(w);
        return rc;
    }
    return imp_io_writer_publish(w);
}

static int file_is_whole(const char *path)
{
    unsigned char *buf = malloc(WRITTEN_BYTES + 1);
    assert_non_null(buf);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    int whole = 0;
    if (fd >= 0) {
        whole = read(fd, buf, WRITTEN_BYTES + 1) == WRITTEN_BYTES && imp_test_filled(buf, WRITTEN_BYTES, seed + 1, 0);
        close(fd);
    }
    free(buf);
    return whole;
}

static void test_write(void **state)
{
    (void)state;
    imp_io *io = new_io(0, 0);
    size_t unit = imp_io_alignment(io);
    mode_t before = umask(0);
    assert_int_equal(write_file(io, "segments/new"), 0);
    umask(0777);
    assert_int_equal(write_file(io, "segments/new2"), 0);
    umask(before);
    assert_int_equal(imp_io_bytes_written(io), 2 * WRITTEN_BYTES);
    static const char *const names[] = {"segments/new", "segments/new2"};
    for (int i = 0; i < 2; i++) {
        struct stat st;
        assert_int_equal(stat(imp_test_path(dir, names[i]), &st), 0);
        assert_int_equal(st.st_mode & 07777, 0600);
        assert_int_equal(st.st_size, WRITTEN_BYTES);
        assert_true(file_is_whole(imp_test_path(dir, names[i])));
    }
    assert_int_equal(entries(io, "segments"), 3);

    imp_io_writer *w;
    assert_int_equal(imp_io_writer_new(io, "segments/gone", &w), 0);
    unsigned char *buf = imp_aligned(4096, 65536);
    assert_non_null(buf);
    memset(buf, 7, 65536);
    assert_int_equal(imp_io_write(w, unit, buf, 65536), 0);
    assert_int_equal(imp_io_write(w, unit / 2, buf, unit), IMP_E_ARG);
    assert_int_equal(imp_io_write(w, 0, buf + 8, unit), IMP_E_ARG);
    assert_int_equal(imp_io_write(w, 0, buf, unit + 1), IMP_E_ARG);
    assert_int_equal(imp_io_write(w, 0, buf, 0), 0);
    imp_io_writer *second;
    assert_int_equal(imp_io_writer_new(io, "segments/gone", &second), IMP_E_IO); /* someone is at it */
    assert_null(second);
    assert_int_equal(entries(io, "segments"), 4);
    imp_io_writer_abort(w);
    imp_io_writer_abort(NULL);
    imp_free(buf);
    assert_int_equal(entries(io, "segments"), 3);

    assert_int_equal(imp_io_writer_new(io, "nowhere/x", &w), IMP_E_NOTFOUND);
    assert_int_equal(imp_io_writer_new(io, "../x", &w), IMP_E_IO);
    assert_int_equal(symlink("/tmp/impress-test-elsewhere", imp_test_path(dir, "segments/trap.tmp")), 0);
    assert_int_equal(imp_io_writer_new(io, "segments/trap", &w), IMP_E_IO);
    assert_null(w);
    imp_io_free(io);
}

static void test_write_faults(void **state)
{
    (void)state;
    static const struct { const char *fault; int status; } cases[] = {
        {"write:1:ENOSPC", IMP_E_FULL}, {"write:3:EDQUOT", IMP_E_FULL},  {"write:5:EIO", IMP_E_IO},
        {"open:1:EROFS", IMP_E_PERM},   {"open:1:EMFILE", IMP_E_IO},     {"fsync:1:EIO", IMP_E_IO},
        {"fsync:2:EIO", IMP_E_IO},      {"fsync:1:ENOSPC", IMP_E_FULL},  {"rename:1:ENOSPC", IMP_E_FULL},
        {"write:2+:EAGAIN", IMP_E_IO},  {"write:2+:short:0", IMP_E_IO}};
    imp_io *io = new_io(0, 0);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int rule = imp_io_fault_parse(cases[i].fault);
        assert_true(rule >= 0);
        int rc = write_file(io, "segments/x");
        if (rc != cases[i].status) print_error("%s: %s\n", cases[i].fault, imp_status_name(rc));
        assert_int_equal(rc, cases[i].status);
        assert_true(imp_io_fault_hits(rule) >= 1);
        assert_int_equal(entries(io, "segments"), 1); /* nothing is left */
        imp_io_fault_clear();
    }
    static const char *const harmless[] = {"write:2:EINTR", "write:1:EAGAIN", "write:1+:short:4096",
                                           "write:3:short:512", "fsync:1:delay:1000"};
    for (size_t i = 0; i < sizeof harmless / sizeof harmless[0]; i++) {
        assert_true(imp_io_fault_parse(harmless[i]) >= 0);
        assert_int_equal(write_file(io, "segments/x"), 0);
        imp_io_fault_clear();
        assert_true(file_is_whole(imp_test_path(dir, "segments/x")));
        assert_int_equal(imp_io_unlink(io, "segments/x"), 0);
    }
    assert_true(imp_io_fault_parse("write:2:flip:9") >= 0);
    assert_int_equal(write_file(io, "segments/x"), 0); /* nobody notices until it is read */
    assert_false(file_is_whole(imp_test_path(dir, "segments/x")));
    imp_io_fault_clear();
    assert_true(imp_io_fault_parse("unlink:1:EACCES") >= 0);
    assert_int_equal(imp_io_unlink(io, "segments/x"), IMP_E_PERM);
    imp_io_free(io);
}

/* The process is killed before each operation in turn: under the file's name there is all of it, or nothing. */
static void test_killed(void **state)
{
    (void)state;
    imp_io *io = new_io(0, 0);
    int n_runs = 0, n_whole = 0;
    for (uint64_t nth = 1;; nth++) {
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            imp_io_fault f = {.kind = IMP_IO_ALL, .nth = nth, .value = 9};
            f.action = nth % 2 ? IMP_IO_KILL : IMP_IO_EXIT;
            imp_io_fault_add(&f);
            _exit(write_file(io, "segments/x") == 0 ? 0 : 1);
        }
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        n_runs++;
        const char *path = imp_test_path(dir, "segments/x");
        int there = access(path, F_OK) == 0;
        if (there) {
            assert_true(file_is_whole(path));
            n_whole++;
            unlink(path);
        }
        unlink(imp_test_path(dir, "segments/x.tmp"));
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
            assert_true(there);
            break;
        }
        if (nth % 2) {
            assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        } else {
            assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 9);
        }
    }
    assert_int_equal(n_runs, 1 + 5 + 1 + 1 + 1 + 1); /* open, writes, sync, rename, sync of the directory; none */
    assert_int_equal(n_whole, 2);                    /* before the last sync the name was there already */
    imp_io_free(io);
}

static void test_event_log(void **state)
{
    (void)state;
    imp_io *io = new_io(0, 0);
    assert_int_equal(imp_io_fault_log_start(100), 0);
    assert_int_equal(write_file(io, "segments/x"), 0);
    static const imp_io_kind kinds[] = {IMP_IO_OPEN,  IMP_IO_WRITE, IMP_IO_WRITE,  IMP_IO_WRITE, IMP_IO_WRITE,
                                        IMP_IO_WRITE, IMP_IO_FSYNC, IMP_IO_RENAME, IMP_IO_FSYNC};
    size_t n;
    const imp_io_event *e = imp_io_fault_log(&n);
    assert_int_equal(n, sizeof kinds / sizeof kinds[0]);
    for (size_t i = 0; i < n; i++) {
        assert_string_equal(imp_io_kind_name(e[i].kind), imp_io_kind_name(kinds[i]));
        assert_string_equal(e[i].name, i == n - 1 ? "segments/" : "segments/x");
        if (e[i].kind == IMP_IO_WRITE) {
            assert_int_equal(e[i].offset, (i - 1) * 65536);
            assert_int_equal(e[i].n_bytes, 65536);
        }
        assert_int_equal(e[i].err, 0);
    }
    assert_int_equal(imp_io_fault_count(IMP_IO_WRITE), 5);
    assert_int_equal(imp_io_fault_count(IMP_IO_ALL), 9);
    static const char *const bad[] = {
        "",              "write",         "write:1",       "write:0:EIO",     "write:x:EIO",    "wrote:1:EIO",
        "write:1:EWHAT", "write:1:EIO:3", "write:1:short", "write:1:short:x", "write:1:kill:3", "write:+:EIO"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) assert_int_equal(imp_io_fault_parse(bad[i]), -1);
    for (int i = 0; i < 16; i++) assert_int_equal(imp_io_fault_parse("read:1:EIO"), i);
    assert_int_equal(imp_io_fault_parse("read:1:EIO"), -1);
    imp_io_free(io);
}

/* ---- memory fails at each place in turn */

static int whole_life(void)
{
    imp_io *io = NULL;
    imp_io_file *f = NULL;
    imp_io_queue *q = NULL;
    int rc = imp_io_new(dir, m->mode, m->flags, 0, &io);
    if (rc < 0) goto out;
    rc = imp_io_open(io, "segments/a", imp_io_alignment(io), &f);
    if (rc < 0) goto out;
    rc = imp_io_queue_new(io, 4, 65536, &q);
    if (rc < 0) goto out;
    rc = imp_io_queue_grow(q, 131072);
    if (rc < 0) goto out;
    imp_io_op op = {.file = f, .offset = 0, .buf = imp_io_queue_arena(q, NULL), .n_bytes = 131072};
    imp_io_submit(q, &op);
    imp_io_wait(q, &op);
    rc = op.status;
    if (rc < 0) goto out;
    assert_true(imp_test_filled(op.buf, op.n_bytes, seed, 0));
    imp_io_writer *w;
    rc = imp_io_writer_new(io, "segments/x", &w);
    if (rc < 0) goto out;
    rc = imp_io_write(w, 0, op.buf, op.n_bytes);
    imp_io_writer_abort(w);
out:
    imp_io_queue_free(q);
    imp_io_close(f);
    imp_io_free(io);
    return rc;
}

static void test_no_memory(void **state)
{
    (void)state;
    for (int stay = 0; stay <= 1; stay++) {
        for (uint64_t n = 1;; n++) {
            (void)imp_alloc_fail_at(n, stay);
            int rc = whole_life();
            uint64_t made = imp_alloc_fail_at(0, 0);
            if (rc != 0) assert_int_equal(rc, IMP_E_NOMEM); /* 0: registering buffers does without, and so do rings */
            if (made < n) {
                assert_int_equal(rc, 0);
                break;
            }
        }
    }
}

/* ---- what is counted agrees with the kernel's books */

static int64_t kernel_read_bytes(void)
{
    FILE *file = fopen("/proc/self/io", "r");
    if (!file) return -1;
    char line[128];
    long long n = -1;
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "read_bytes: %lld", &n) == 1) break;
    }
    fclose(file);
    return n;
}

static void test_proc_io(void **state)
{
    (void)state;
    imp_io *io = new_io(0, 0);
    bool direct = strstr(imp_io_describe(io), "O_DIRECT") != NULL;
    if (!direct || m->base || kernel_read_bytes() < 0) {
        imp_io_free(io);
        skip();
    }
    imp_io_file *f = open_file(io, "segments/a");
    imp_io_queue *q;
    assert_int_equal(imp_io_queue_new(io, 16, FILE_BYTES, &q), 0);
    imp_io_op ops[16];
    int64_t off = 0;
    for (int round = 0; round < 2; round++) { /* the first reads the file's metadata too */
        int64_t kernel = kernel_read_bytes();
        uint64_t ours = imp_io_bytes_read(io);
        for (size_t i = 0; i < 16; i++) {
            ops[i] = (imp_io_op){.file = f,
                                 .offset = i * (FILE_BYTES / 16),
                                 .buf = (unsigned char *)imp_io_queue_arena(q, NULL) + i * (FILE_BYTES / 16),
                                 .n_bytes = FILE_BYTES / 16};
            imp_io_submit(q, &ops[i]);
        }
        for (size_t i = 0; i < 16; i++) {
            imp_io_wait(q, &ops[i]);
            assert_int_equal(ops[i].status, 0);
        }
        assert_int_equal(imp_io_bytes_read(io) - ours, FILE_BYTES);
        off = kernel_read_bytes() - kernel - FILE_BYTES;
    }
    if (kernel_read_bytes() == 0) {
        print_message("/proc/self/io counts nothing on this file system\n");
    } else {
        assert_int_equal(off, 0);
    }
    imp_io_queue_free(q);
    imp_io_close(f);
    imp_io_free(io);
}

int main(void)
{
    seed = imp_test_seed();
#define IN_DIR(test) cmocka_unit_test_setup_teardown(test, make_dir, remove_dir)
    const struct CMUnitTest reading[] = {
        IN_DIR(test_new),         IN_DIR(test_open),            IN_DIR(test_read),           IN_DIR(test_end_of_file),
        IN_DIR(test_queue),       IN_DIR(test_queue_arguments), IN_DIR(test_grow),           IN_DIR(test_cancel),
        IN_DIR(test_handover),    IN_DIR(test_parallel),        IN_DIR(test_limit_schedule), IN_DIR(test_limit),
        IN_DIR(test_read_faults), IN_DIR(test_broken_ring),     IN_DIR(test_fallbacks),      IN_DIR(test_no_memory),
        IN_DIR(test_proc_io),     IN_DIR(test_open_refused),
    };
    /* Writing is the same with io_uring and without, and waits for the disk: only with threads. */
    const struct CMUnitTest writing[] = {
        IN_DIR(test_write), IN_DIR(test_write_faults), IN_DIR(test_killed), IN_DIR(test_event_log),
    };
    imp_io_buffers buffers;
    int no_uring = imp_io_uring_try(&buffers), failed = 0;
    if (no_uring) print_message("SKIPPED, io_uring can't be used here: %s\n", strerror(no_uring));
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        m = &modes[i];
        if (m->mode == IMP_IO_URING && no_uring) continue;
        if (m->base && access(m->base, W_OK) != 0) {
            print_message("SKIPPED, %s can't be written to: %s\n", m->base, m->name);
            continue;
        }
        failed += cmocka_run_group_tests_name(m->name, reading, NULL, NULL);
        if (m->mode == IMP_IO_THREADS) failed += cmocka_run_group_tests_name(m->name, writing, NULL, NULL);
    }
    return failed ? 1 : 0;
}
