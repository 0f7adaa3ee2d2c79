/* queue.c: reads in flight, whatever the way to the device: their order, the depth, the end of each. */
#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "io/io_internal.h"

enum { MAX_DEPTH = 4096, HUGE_PAGE = 2 << 20, ARENA_ALIGNMENT = 4096 };

static void push(imp_io_fifo *list, imp_io_op *op)
{
    op->next = NULL;
    if (list->tail) {
        list->tail->next = op;
    } else {
        list->head = op;
    }
    list->tail = op;
}

static imp_io_op *pop(imp_io_fifo *list)
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

void imp_io_flights_push(imp_io_flights *list, imp_io_flight *flight)
{
    flight->next = NULL;
    if (list->tail) {
        list->tail->next = flight;
    } else {
        list->head = flight;
    }
    list->tail = flight;
}

imp_io_flight *imp_io_flights_pop(imp_io_flights *list)
{
    imp_io_flight *flight = list->head;
    if (!flight) return NULL;
    list->head = flight->next;
    if (!list->head) list->tail = NULL;
    return flight;
}

/* ---- ends */

static void end(imp_io_op *op, int status)
{
    op->status = status;
    op->done = true;
}

static void end_late(const imp_io_queue *q, imp_io_op *op)
{
    const imp_io_file *f = op->file;
    end(op, imp_fail(IMP_E_IO, "%s/%s: reading %zu bytes at %llu: no answer within %.3g s", f->io->dir, f->name,
                     op->n_bytes, (unsigned long long)op->offset, (double)q->io->deadline_ns * 1e-9));
}

/* The flight is over; returns its op, NULL where that was given up. */
static imp_io_op *land(imp_io_queue *q, imp_io_flight *flight)
{
    imp_io_op *op = flight->op;
    q->n_in_flight--;
    q->n_ended++;
    if (flight->given_up) imp_io_close(flight->file);
    flight->op = NULL;
    flight->given_up = false;
    imp_io_flights_push(&q->free, flight);
    return op;
}

void imp_io_flight_done(imp_io_queue *q, imp_io_flight *flight, int err)
{
    imp_io_op *op = land(q, flight);
    if (op) end(op, err ? imp_io_read_failed(op->file, op->offset, op->n_bytes, err) : 0);
}

void imp_io_flight_dropped(imp_io_queue *q, imp_io_flight *flight)
{
    imp_io_op *op = land(q, flight);
    if (op) end(op, IMP_E_BUSY);
}

void imp_io_flight_again(imp_io_queue *q, imp_io_flight *flight)
{
    imp_io_op *op = land(q, flight);
    if (op) push_front(&q->waiting, op);
}

void imp_io_flight_reserve(imp_io_queue *q, imp_io_flight *flight)
{
    flight->release_ns = imp_io_limit_reserve(&q->io->limit, imp_now_ns(), flight->n_bytes);
    if (flight->release_ns > q->release_ns) q->release_ns = flight->release_ns;
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
    imp_io_queue *q = imp_calloc(1, sizeof *q + depth * sizeof q->flights[0]);
    if (!q) return imp_fail(IMP_E_NOMEM, "no memory for a read queue");
    for (unsigned i = 0; i < depth; i++) imp_io_flights_push(&q->free, &q->flights[i]);
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

void imp_io_queue_destroy(imp_io_queue *q)
{
    if (q->way) {
        q->way->arena_out(q);
        q->way->close(q);
    }
    imp_free(q->arena);
    imp_free(q);
}

void imp_io_queue_free(imp_io_queue *q)
{
    if (!q) return;
    if (q->way) imp_io_cancel_all(q);
    if (q->hung) imp_io_bury(q);
    else imp_io_queue_destroy(q);
}

bool imp_io_queue_hung(const imp_io_queue *q) { return q->hung; }

void imp_io_submit(imp_io_queue *q, imp_io_op *op)
{
    op->status = 0; /* until the end it is the way's to use */
    op->done = false;
    push(&q->waiting, op);
}

/* Start what may start. */
static void pass_on(imp_io_queue *q)
{
    while (q->hung && q->waiting.head) end_late(q, pop(&q->waiting));
    while (q->waiting.head && q->free.head) {
        imp_io_op *op = pop(&q->waiting);
        imp_io_flight *flight = imp_io_flights_pop(&q->free);
        flight->op = op;
        flight->file = op->file;
        flight->offset = op->offset;
        flight->buf = op->buf;
        flight->n_bytes = op->n_bytes;
        q->n_in_flight++;
        if (op->n_bytes == 0) {
            imp_io_flight_done(q, flight, 0);
        } else if (imp_io_misaligned(op->file, op->offset, op->buf, op->n_bytes)) {
            imp_io_flight_done(q, flight, IMP_IO_MISALIGNED);
        } else if (!q->way->start(q, flight)) {
            imp_io_flight_again(q, flight);
            break;
        }
    }
}

/* Nothing has come back for too long. All reads end for their owner, `op` (or NULL) as the last, so that the last error
 * is about it; the queue stays what the device writes to. */
static void give_up(imp_io_queue *q, imp_io_op *op)
{
    imp_io_op *other;
    q->way->drop(q);
    q->hung = true; /* also if no read had got as far as the device: the queue's threads don't get on then */
    atomic_fetch_add_explicit(&q->io->n_hung, 1, memory_order_relaxed);
    while ((other = pop(&q->waiting)) != NULL) end_late(q, other);
    for (unsigned i = 0; i < q->depth; i++) {
        imp_io_flight *flight = &q->flights[i];
        if (!flight->op) continue;
        imp_io_hold(flight->file);
        flight->given_up = true;
        end_late(q, flight->op);
        flight->op = NULL;
    }
    if (op) end_late(q, op);
}

/* When a wait that has seen nothing come back since `since_ns` has been long enough. */
static uint64_t wait_until(const imp_io_queue *q, uint64_t since_ns)
{
    if (q->io->deadline_ns == 0) return IMP_IO_FOR_EVER;
    return (since_ns > q->release_ns ? since_ns : q->release_ns) + q->io->deadline_ns;
}

/* Wait for something to come back, once. `*since_ns`: 0 at first. False: the deadline has passed. */
static bool reap_in_time(imp_io_queue *q, uint64_t *since_ns)
{
    if (*since_ns == 0 && q->io->deadline_ns) *since_ns = imp_now_ns();
    uint64_t n_before = q->n_ended, until = wait_until(q, *since_ns);
    q->way->reap(q, until);
    if (q->n_ended != n_before) *since_ns = 0;
    else if (until != IMP_IO_FOR_EVER && imp_now_ns() >= until) return false;
    return true;
}

void imp_io_kick(imp_io_queue *q)
{
    pass_on(q);
    q->way->flush(q);
}

void imp_io_poll(imp_io_queue *q)
{
    q->way->reap(q, IMP_IO_NO_WAIT);
    imp_io_kick(q);
}

void imp_io_wait(imp_io_queue *q, imp_io_op *op)
{
    uint64_t since_ns = 0;
    while (!op->done) {
        pass_on(q);
        if (op->done) break; /* it failed before it reached the device */
        assert(q->n_in_flight || q->waiting.head); /* else it was never submitted here */
        if (q->n_in_flight == 0) q->way->reap(q, IMP_IO_NO_WAIT);
        else if (!reap_in_time(q, &since_ns)) give_up(q, op);
    }
    /* Places that came free are used now, not at the next call: the caller may compute for long. */
    if (q->waiting.head) imp_io_kick(q);
}

void imp_io_cancel_all(imp_io_queue *q)
{
    uint64_t since_ns = 0;
    if (!q->hung) q->way->drop(q);
    for (;;) {
        imp_io_op *op;
        while ((op = pop(&q->waiting)) != NULL) end(op, IMP_E_BUSY);
        if (q->n_in_flight == 0 || q->hung) break;
        if (!reap_in_time(q, &since_ns)) give_up(q, NULL);
    }
}
