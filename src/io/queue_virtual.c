/* queue_virtual.c: reads whose time is only told. The bytes are read at once, with pread; a read counts as in flight
 * until the directory's clock reaches the time at which the rate limit would have let it go. The clock stands still but
 * for those who wait: for a read here, or in imp_io_virtual_pass(). So the order of all that happens is that of a run
 * against a disk of this rate, and a run takes as long as its copies.
 *
 * Without a rate limit the clock stands at 0, and a read is done as soon as it is asked for: so files in memory are
 * read.
 */
#include "base/alloc.h"
#include "base/status.h"
#include "io/io_internal.h"

uint64_t imp_io_virtual_ns(const imp_io *io) { return atomic_load_explicit(&io->virtual_ns, memory_order_relaxed); }

void imp_io_virtual_pass(imp_io *io, uint64_t until_ns)
{
    if (!io->simulated) return;
    uint64_t now = atomic_load_explicit(&io->virtual_ns, memory_order_relaxed);
    while (now < until_ns && !atomic_compare_exchange_weak_explicit(&io->virtual_ns, &now, until_ns,
                                                                    memory_order_relaxed, memory_order_relaxed)) {}
}

static int virtual_open(imp_io_queue *q)
{
    /* In the order of submission. The limit is a schedule, so that this is the order of the ends too. */
    imp_io_flights *f = imp_calloc(1, sizeof *f);
    if (!f) return imp_fail(IMP_E_NOMEM, "no memory for a read queue");
    q->state = f;
    return 0;
}

static void virtual_close(imp_io_queue *q)
{
    imp_free(q->state);
    q->state = NULL;
}

static void virtual_arena(imp_io_queue *q) { (void)q; }

static bool virtual_start(imp_io_queue *q, imp_io_flight *f)
{
    uint64_t now = imp_io_virtual_ns(q->io);
    uint64_t release = imp_io_limit_reserve(&q->io->limit, now, f->n_bytes);
    f->release_ns = release > now ? release : now;
    f->err = imp_io_pread_now(f->file, f->offset, f->buf, f->n_bytes);
    imp_io_flights_push(q->state, f);
    return true;
}

static void virtual_flush(imp_io_queue *q) { (void)q; }

/* Take in those that are done by now. */
static void take_in(imp_io_queue *q)
{
    imp_io_flights *all = q->state;
    while (all->head && all->head->release_ns <= imp_io_virtual_ns(q->io)) {
        imp_io_flight *f = imp_io_flights_pop(all);
        imp_io_flight_done(q, f, f->err);
    }
}

static void virtual_reap(imp_io_queue *q, uint64_t until_ns)
{
    const imp_io_flights *all = q->state;
    if (until_ns != IMP_IO_NO_WAIT && all->head) imp_io_virtual_pass(q->io, all->head->release_ns);
    take_in(q);
}

static void virtual_drop(imp_io_queue *q)
{
    imp_io_flight *f;
    while ((f = imp_io_flights_pop(q->state)) != NULL) imp_io_flight_dropped(q, f);
}

const imp_io_way imp_io_way_virtual = {
    .open = virtual_open,
    .close = virtual_close,
    .arena_in = virtual_arena,
    .arena_out = virtual_arena,
    .start = virtual_start,
    .flush = virtual_flush,
    .reap = virtual_reap,
    .drop = virtual_drop,
};
