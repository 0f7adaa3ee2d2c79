/* hung.c: queues whose reads didn't come back in time. A device may still write into their buffers, and a thread may
 * still stand in a read of their files: all of it stays where it is until the last of these reads has come back. Who
 * asks whether there are any looks for that. A store that is closed meanwhile leaves them to the process.
 */
#include "base/log.h"
#include "io/io_internal.h"

static pthread_mutex_t lost_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the next */
static imp_io *lost; /* their users are gone */

void imp_io_hung_init(imp_io *io)
{
    atomic_init(&io->n_hung, 0);
    pthread_mutex_init(&io->graves_lock, NULL);
}

/* Free the queues whose reads are back. With `graves_lock` held. */
static void sweep(imp_io *io)
{
    for (imp_io_queue **at = &io->graves, *q; (q = *at) != NULL;) {
        q->way->reap(q, IMP_IO_NO_WAIT);
        if (q->n_in_flight > 0) {
            at = &q->next;
            continue;
        }
        *at = q->next;
        imp_io_queue_destroy(q);
        atomic_fetch_sub_explicit(&io->n_hung, 1, memory_order_relaxed);
    }
}

void imp_io_bury(imp_io_queue *q)
{
    imp_io *io = q->io;
    pthread_mutex_lock(&io->graves_lock);
    q->next = io->graves;
    io->graves = q;
    sweep(io);
    pthread_mutex_unlock(&io->graves_lock);
}

bool imp_io_hung(imp_io *io)
{
    /* Relaxed: who is late to see it waits for the deadline, or is answered as cold once more. */
    if (atomic_load_explicit(&io->n_hung, memory_order_relaxed) == 0) return false;
    pthread_mutex_lock(&io->graves_lock);
    sweep(io);
    pthread_mutex_unlock(&io->graves_lock);
    return atomic_load_explicit(&io->n_hung, memory_order_relaxed) > 0;
}

/* Those of the lost whose reads have come back by now. */
static void free_found(void)
{
    imp_io *found = NULL;
    pthread_mutex_lock(&lost_lock);
    for (imp_io **at = &lost, *io; (io = *at) != NULL;) {
        if (imp_io_hung(io)) {
            at = &io->next_lost;
            continue;
        }
        *at = io->next_lost;
        io->next_lost = found;
        found = io;
    }
    pthread_mutex_unlock(&lost_lock);
    for (imp_io *next; found; found = next) {
        next = found->next_lost;
        imp_io_free(found);
    }
}

bool imp_io_hung_end(imp_io *io)
{
    free_found();
    if (!imp_io_hung(io)) {
        pthread_mutex_destroy(&io->graves_lock);
        return true;
    }
    imp_log(IMP_LOG_WARN, "%s: closed, but for reads that don't come back", io->dir);
    pthread_mutex_lock(&lost_lock);
    io->next_lost = lost;
    lost = io;
    pthread_mutex_unlock(&lost_lock);
    return false;
}
