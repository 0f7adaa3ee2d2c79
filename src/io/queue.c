/* queue.c: reads in flight, whatever the way to the device: their order, the depth, the end of each. */
#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "base/alloc.h"
#include "base/log.h"
#include "base/status.h"
#include "io/io_internal.h"

enum { MAX_DEPTH = 4096, HUGE_PAGE = 2 << 20, ARENA_ALIGNMENT = 4096 };

void imp_io_fifo_push(imp_io_fifo *list, imp_io_op *op)
{
    op->next = NULL;
    if (list->tail) {
        list->tail->next = op;
    } else {
        list->head = op;
    }
    list->tail = op;
}

imp_io_op *imp_io_fifo_pop(imp_io_fifo *list)
{
    imp_io_op *op = list->head;
    if (!op) return NULL;
    list->head = op->next;
    if (!list->head) list->tail = NULL;
    op->next = NULL;
    return op;
}

static void push_front(imp_io_fifo *list, imp_io_op *op)
{
    op->next = list->head;
    list->head = op;
    if (!list->tail) list->tail = op;
}

/* ---- ends */

static void end(imp_io_op *op, int status)
{
    op->status = status;
    op->done = true;
}

void imp_io_op_done(imp_io_queue *q, imp_io_op *op, int err)
{
    q->n_in_flight--;
    end(op, err ? imp_io_read_failed(op->file, op->offset, op->n_bytes, err) : 0);
}

void imp_io_op_dropped(imp_io_queue *q, imp_io_op *op)
{
    q->n_in_flight--;
    end(op, IMP_E_BUSY);
}

void imp_io_op_again(imp_io_queue *q, imp_io_op *op)
{
    q->n_in_flight--;
    push_front(&q->waiting, op);
}

/* ---- the arena */

static unsigned char *arena_new(size_t n_bytes)
{
    size_t alignment = n_bytes >= HUGE_PAGE ? HUGE_PAGE : ARENA_ALIGNMENT;
    unsigned char *arena = imp_aligned(alignment, n_bytes);
    /* Fewer pages to pin and to look up; a wish, so what comes of it doesn't matter. */
    if (arena && alignment == HUGE_PAGE) (void)madvise(arena, n_bytes, MADV_HUGEPAGE);
    return arena;
}

void *imp_io_queue_arena(imp_io_queue *q, size_t *n_bytes)
{
    if (n_bytes) *n_bytes = q->arena_bytes;
    return q->arena;
}

int imp_io_queue_grow(imp_io_queue *q, size_t arena_bytes)
{
    if (q->n_in_flight || q->waiting.head) return imp_fail(IMP_E_ARG, "buffers can't move while reads are in flight");
    if (arena_bytes <= q->arena_bytes) return 0;
    unsigned char *arena = arena_new(arena_bytes);
    if (!arena) return imp_fail(IMP_E_NOMEM, "no memory for %zu bytes of read buffers", arena_bytes);
    q->way->arena_out(q);
    memcpy(arena, q->arena, q->arena_bytes);
    imp_free(q->arena);
    q->arena = arena;
    q->arena_bytes = arena_bytes;
    q->way->arena_in(q);
    return 0;
}

/* ---- the queue */

int imp_io_queue_new(imp_io *io, unsigned depth, size_t arena_bytes, imp_io_queue **out)
{
    int rc;
    *out = NULL;
    if (depth == 0 || depth > MAX_DEPTH) return imp_fail(IMP_E_ARG, "a read queue of depth %u", depth);
    imp_io_queue *q = imp_calloc(1, sizeof *q);
    if (!q) return imp_fail(IMP_E_NOMEM, "no memory for a read queue");
    q->io = io;
    q->depth = depth;
    q->arena_bytes = arena_bytes;
    q->arena = arena_new(arena_bytes);
    if (!q->arena) {
        rc = imp_fail(IMP_E_NOMEM, "no memory for %zu bytes of read buffers", arena_bytes);
        goto out;
    }
    bool at_once = io->simulated || io->memory;
    const imp_io_way *way = at_once ? &imp_io_way_virtual : io->uring ? &imp_io_way_uring : &imp_io_way_threads;
    rc = way->open(q);
    if (rc < 0 && io->uring && !io->must_uring) {
        /* io_uring as such is allowed, but not one ring more: too many open files, or too much locked memory. */
        if (!atomic_exchange_explicit(&io->said_no_ring, true, memory_order_relaxed)) {
            imp_log(IMP_LOG_INFO, "%s: reads on threads for want of a ring (%s)", io->dir, imp_last_error());
        }
        way = &imp_io_way_threads;
        rc = way->open(q);
    }
    if (rc < 0) goto out;
    q->way = way;
    way->arena_in(q);
    *out = q;
    q = NULL;
out:
    imp_io_queue_free(q);
    return rc;
}

void imp_io_queue_free(imp_io_queue *q)
{
    if (!q) return;
    if (q->way) {
        imp_io_cancel_all(q);
        q->way->arena_out(q);
        q->way->close(q);
    }
    imp_free(q->arena);
    imp_free(q);
}

void imp_io_submit(imp_io_queue *q, imp_io_op *op)
{
    op->status = 0; /* until the end it is the way's to use */
    op->done = false;
    imp_io_fifo_push(&q->waiting, op);
}

/* Start what may start. */
static void pass_on(imp_io_queue *q)
{
    while (q->waiting.head && q->n_in_flight < q->depth) {
        imp_io_op *op = imp_io_fifo_pop(&q->waiting);
        q->n_in_flight++;
        if (op->n_bytes == 0) {
            imp_io_op_done(q, op, 0);
        } else if (imp_io_misaligned(op->file, op->offset, op->buf, op->n_bytes)) {
            imp_io_op_done(q, op, IMP_IO_MISALIGNED);
        } else if (!q->way->start(q, op)) {
            imp_io_op_again(q, op);
            break;
        }
    }
}

void imp_io_kick(imp_io_queue *q)
{
    pass_on(q);
    q->way->flush(q);
}

void imp_io_poll(imp_io_queue *q)
{
    q->way->reap(q, false);
    imp_io_kick(q);
}

void imp_io_wait(imp_io_queue *q, imp_io_op *op)
{
    while (!op->done) {
        pass_on(q);
        if (op->done) break; /* it failed before it reached the device */
        assert(q->n_in_flight || q->waiting.head); /* else it was never submitted here */
        q->way->reap(q, q->n_in_flight > 0);
    }
    /* Places that came free are used now, not at the next call: the caller may compute for long. */
    if (q->waiting.head) imp_io_kick(q);
}

void imp_io_cancel_all(imp_io_queue *q)
{
    q->way->drop(q);
    for (;;) {
        imp_io_op *op;
        while ((op = imp_io_fifo_pop(&q->waiting)) != NULL) end(op, IMP_E_BUSY);
        if (q->n_in_flight == 0) break;
        q->way->reap(q, true);
    }
}
