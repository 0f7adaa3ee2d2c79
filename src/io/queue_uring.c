/* queue_uring.c: reads through a ring of the queue's own.
 *
 * An op is in one of four places: waiting in the queue, in the submission ring, with the kernel, or done. The address
 * of its flight is the user data of its entry, so nothing is looked up or allocated on the way. While a read is under
 * way op->status holds how much of it is there, in blocks of 512 bytes.
 *
 * Under a rate limit a read that may not start yet gets a timer entry in front of it, hard-linked (a timer that runs
 * out counts as failed, and an ordinary link would cancel the read). So the kernel starts it on time while the caller
 * computes.
 */
#include <errno.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "io/io_internal.h"

#if defined(IMPRESS_HAVE_URING) && __has_include(<liburing.h>)

#include <liburing.h>
#include <string.h>

#ifdef IMPRESS_VALGRIND
#include <valgrind/memcheck.h>
#else
#define VALGRIND_MAKE_MEM_DEFINED(at, n_bytes) ((void)0)
#endif

typedef struct ring {
    struct io_uring uring;
    bool registered;
    bool broken;        /* the kernel takes no more: reads are made with pread from then on */
    unsigned n_refused; /* calls in a row that it turned down with "try again" */
    /* Of timers, [depth], used in turn: the kernel reads one when it takes the entry, and no more than `depth` of them
     * are ever ahead of that. */
    unsigned n_times;
    struct __kernel_timespec times[];
} ring;

static int try_opcodes(struct io_uring *uring)
{
    struct io_uring_probe *probe = io_uring_get_probe_ring(uring);
    if (!probe) return ENOSYS;
    int ok = io_uring_opcode_supported(probe, IORING_OP_READ) &&
             io_uring_opcode_supported(probe, IORING_OP_READ_FIXED) &&
             io_uring_opcode_supported(probe, IORING_OP_TIMEOUT);
    io_uring_free_probe(probe);
    return ok ? 0 : ENOSYS;
}

int imp_io_uring_try(imp_io_buffers *buffers)
{
    struct io_uring uring;
    *buffers = IMP_IO_PLAIN;
    if (imp_io_denied(IMP_IO_DENY_URING)) return EPERM;
    int rc = io_uring_queue_init(4, &uring, 0);
    if (rc < 0) return -rc;
    /* Before Linux 5.11 a wait had no time limit but by an entry of its own. */
    int err = uring.features & IORING_FEAT_EXT_ARG ? try_opcodes(&uring) : ENOSYS;
    void *page = imp_aligned(4096, 4096);
    if (err == 0 && page && !imp_io_denied(IMP_IO_DENY_REGISTER)) {
        struct iovec iov = {.iov_base = page, .iov_len = 4096};
        if (io_uring_register_buffers(&uring, &iov, 1) == 0) *buffers = IMP_IO_REGISTERED;
    }
    io_uring_queue_exit(&uring);
    imp_free(page);
    return err;
}

static int ring_open(imp_io_queue *q)
{
    ring *r = imp_calloc(1, sizeof *r + q->depth * sizeof r->times[0]);
    if (!r) return imp_fail(IMP_E_NOMEM, "no memory for a read queue");
    int rc = imp_io_denied(IMP_IO_DENY_URING) ? -EPERM : io_uring_queue_init(2 * q->depth, &r->uring, 0);
    if (rc < 0) {
        imp_free(r);
        return imp_fail_errno(-rc, "can't set up io_uring");
    }
    q->state = r;
    return 0;
}

static void ring_close(imp_io_queue *q)
{
    ring *r = q->state;
    io_uring_queue_exit(&r->uring);
    imp_free(r);
    q->state = NULL;
}

/* ---- registered buffers: the kernel pins the arena once, instead of its pages with every read */

static void ring_arena_in(imp_io_queue *q)
{
    ring *r = q->state;
    size_t n = (q->arena_bytes + IMP_IO_MAX_PIECE - 1) / IMP_IO_MAX_PIECE; /* no buffer may exceed 1 GiB */
    if (n == 0) return;
    int rc = -ENOMEM;
    struct iovec *iov = imp_calloc(n, sizeof *iov);
    if (iov) {
        for (size_t i = 0; i < n; i++) {
            size_t left = q->arena_bytes - i * IMP_IO_MAX_PIECE;
            iov[i].iov_base = q->arena + i * IMP_IO_MAX_PIECE;
            iov[i].iov_len = left < IMP_IO_MAX_PIECE ? left : IMP_IO_MAX_PIECE;
        }
        if (!imp_io_denied(IMP_IO_DENY_REGISTER)) rc = io_uring_register_buffers(&r->uring, iov, (unsigned)n);
        imp_free(iov);
    }
    r->registered = rc == 0;
    atomic_store_explicit(&q->io->buffers, r->registered ? IMP_IO_REGISTERED : IMP_IO_PLAIN, memory_order_relaxed);
    if (rc < 0 && !atomic_exchange_explicit(&q->io->said_plain, true, memory_order_relaxed)) {
        imp_log(IMP_LOG_INFO, "%s: read buffers of %zu bytes can't be registered (%s; see `ulimit -l`): plain ones do",
                q->io->dir, q->arena_bytes, strerror(-rc));
    }
}

static void ring_arena_out(imp_io_queue *q)
{
    ring *r = q->state;
    if (r->registered) (void)io_uring_unregister_buffers(&r->uring);
    r->registered = false;
}

static void prepare_read(imp_io_queue *q, struct io_uring_sqe *sqe, imp_io_flight *f, size_t done, size_t n_bytes)
{
    ring *r = q->state;
    unsigned char *buf = (unsigned char *)f->buf + done;
    uint64_t offset = f->offset + done;
    uintptr_t at = (uintptr_t)buf - (uintptr_t)q->arena; /* huge if it lies before the arena */
    bool inside = at < q->arena_bytes && n_bytes <= q->arena_bytes - at &&
                  at / IMP_IO_MAX_PIECE == (at + n_bytes - 1) / IMP_IO_MAX_PIECE;
    if (r->registered && inside) {
        io_uring_prep_read_fixed(sqe, f->file->fd, buf, (unsigned)n_bytes, offset, (int)(at / IMP_IO_MAX_PIECE));
    } else {
        io_uring_prep_read(sqe, f->file->fd, buf, (unsigned)n_bytes, offset);
    }
    io_uring_sqe_set_data(sqe, f);
}

/* A piece of a read came back. */
static void piece_done(imp_io_queue *q, imp_io_flight *f, int64_t result)
{
    imp_io_op *op = f->op;
    size_t done = op ? (size_t)op->status * IMP_IO_BLOCK : 0;
    /* A system call's results valgrind knows; what the kernel writes after it, for a ring, it must be told. */
    if (op && result > 0) VALGRIND_MAKE_MEM_DEFINED((unsigned char *)f->buf + done, (size_t)result);
    int err = op ? imp_io_advance(f->file, f->offset, f->n_bytes, &done, &q->n_stalls, result) : 0;
    if (err == IMP_IO_MORE) {
        op->status = (int)(done / IMP_IO_BLOCK);
        imp_io_flight_again(q, f);
    } else {
        imp_io_flight_done(q, f, err);
    }
}

/* A read without the ring. */
static void read_now(imp_io_queue *q, imp_io_flight *f)
{
    imp_io_flight_done(q, f, f->op ? imp_io_pread_all(f->file, f->offset, f->buf, f->n_bytes) : 0);
}

/* The submission ring's entries that the kernel hasn't taken never will be: make these reads ourselves. */
static void give_up_ring(imp_io_queue *q, int err)
{
    ring *r = q->state;
    struct io_uring_sq *sq = &r->uring.sq;
    r->broken = true;
    imp_log(IMP_LOG_WARN, "%s: io_uring takes no more reads (%s): going on with pread", q->io->dir, strerror(err));
    for (unsigned i = io_uring_smp_load_acquire(sq->khead); i != sq->sqe_tail; i++) {
        imp_io_flight *f = io_uring_cqe_get_data(
            &(struct io_uring_cqe){.user_data = sq->sqes[i & *sq->kring_mask].user_data});
        if (f) read_now(q, f);
    }
}

static int wait_for_one(ring *r, uint64_t until_ns)
{
    if (until_ns == IMP_IO_FOR_EVER) return io_uring_submit_and_wait(&r->uring, 1);
    struct io_uring_cqe *cqe;
    uint64_t now = imp_now_ns(), left = until_ns > now ? until_ns - now : 0;
    struct __kernel_timespec t = {.tv_sec = (int64_t)(left / 1000000000u), .tv_nsec = (long long)(left % 1000000000u)};
    return io_uring_submit_and_wait_timeout(&r->uring, &cqe, 1, &t, NULL);
}

/* Pass on what is in the submission ring, and wait for a completion as imp_io_way.reap says. */
static void enter(imp_io_queue *q, uint64_t until_ns)
{
    ring *r = q->state;
    int rc;
    if (io_uring_sq_ready(&r->uring) && imp_io_denied(IMP_IO_DENY_ENTER)) {
        rc = -EIO;
    } else {
        rc = until_ns == IMP_IO_NO_WAIT ? io_uring_submit(&r->uring) : wait_for_one(r, until_ns);
    }
    if (rc >= 0 || rc == -ETIME) {
        r->n_refused = 0;
    } else if ((rc == -EAGAIN || rc == -EBUSY) && ++r->n_refused <= IMP_IO_MAX_STALLS) {
        imp_io_sleep_until(imp_now_ns() + 100000); /* the kernel is short of memory for requests */
    } else if (rc != -EINTR) {
        give_up_ring(q, -rc);
    }
}

static bool ring_start(imp_io_queue *q, imp_io_flight *f)
{
    ring *r = q->state;
    size_t done = (size_t)f->op->status * IMP_IO_BLOCK;
    size_t n_bytes = f->n_bytes - done < IMP_IO_MAX_PIECE ? f->n_bytes - done : IMP_IO_MAX_PIECE;

    if (!r->broken && io_uring_sq_space_left(&r->uring) < 2) { /* a timer's, and the read's */
        enter(q, IMP_IO_NO_WAIT);
        if (!r->broken && io_uring_sq_space_left(&r->uring) < 2) return false;
    }
    if (r->broken) {
        read_now(q, f);
        return true;
    }

    imp_io_verdict v = imp_io_verdict_on(IMP_IO_READ, f->file->name, f->offset + done, n_bytes);
    if (v.err || v.flip_bit >= 0 || v.max_bytes == 0) {
        piece_done(q, f, imp_io_pread_once(f->file, f->offset + done, (unsigned char *)f->buf + done, n_bytes, v));
        return true;
    }
    n_bytes = imp_io_shortened(n_bytes, v.max_bytes, f->file->direct ? q->io->alignment : 1);

    f->release_ns = 0;
    if (done == 0) imp_io_flight_reserve(q, f);
    uint64_t release = v.hang_ns ? imp_now_ns() + v.hang_ns : f->release_ns;
    if (release) {
        struct __kernel_timespec *t = &r->times[r->n_times++ % q->depth];
        t->tv_sec = (int64_t)(release / 1000000000u);
        t->tv_nsec = (long long)(release % 1000000000u);
        struct io_uring_sqe *timer = io_uring_get_sqe(&r->uring);
        io_uring_prep_timeout(timer, t, 0, IORING_TIMEOUT_ABS);
        io_uring_sqe_set_flags(timer, IOSQE_IO_HARDLINK);
        io_uring_sqe_set_data(timer, NULL);
    }
    prepare_read(q, io_uring_get_sqe(&r->uring), f, done, n_bytes);
    return true;
}

static void ring_flush(imp_io_queue *q)
{
    ring *r = q->state;
    if (!r->broken && io_uring_sq_ready(&r->uring)) enter(q, IMP_IO_NO_WAIT);
}

/* Take in what the kernel has put into the completion ring; no system call. True if there was a read among it. */
static bool take_in(imp_io_queue *q)
{
    ring *r = q->state;
    struct io_uring_cqe *cqes[32];
    bool any = false;
    unsigned n;
    while ((n = io_uring_peek_batch_cqe(&r->uring, cqes, 32)) > 0) {
        for (unsigned i = 0; i < n; i++) {
            imp_io_flight *f = io_uring_cqe_get_data(cqes[i]);
            if (!f) continue; /* a timer */
            int result = cqes[i]->res;
            if (result > 0) atomic_fetch_add_explicit(&q->io->bytes_read, (uint64_t)result, memory_order_relaxed);
            piece_done(q, f, result);
            any = true;
        }
        io_uring_cq_advance(&r->uring, n);
    }
    return any;
}

static void ring_reap(imp_io_queue *q, uint64_t until_ns)
{
    ring *r = q->state;
    bool wait = until_ns != IMP_IO_NO_WAIT, any = take_in(q);
    if (r->broken) {
        /* What the kernel had taken before comes in all the same; it just can't be waited for. */
        if (wait && !any && q->n_in_flight) imp_io_sleep_until(imp_now_ns() + 100000);
        return;
    }
    bool must_wait = wait && !any;
    if (must_wait || io_uring_sq_ready(&r->uring)) {
        enter(q, must_wait ? until_ns : IMP_IO_NO_WAIT);
        (void)take_in(q);
    }
}

/* What the kernel has can't be stopped for certain; what it hasn't taken yet goes there with the next wait. */
static void ring_drop(imp_io_queue *q) { (void)q; }

const imp_io_way imp_io_way_uring = {
    .open = ring_open,
    .close = ring_close,
    .arena_in = ring_arena_in,
    .arena_out = ring_arena_out,
    .start = ring_start,
    .flush = ring_flush,
    .reap = ring_reap,
    .drop = ring_drop,
};

#else

int imp_io_uring_try(imp_io_buffers *buffers)
{
    *buffers = IMP_IO_PLAIN;
    return ENOSYS;
}

/* Never in force: imp_io_new() asks imp_io_uring_try() first. */
const imp_io_way imp_io_way_uring = {.open = NULL};

#endif
