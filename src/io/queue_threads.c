/* queue_threads.c: reads by pread on a few threads of the queue's own, where io_uring isn't allowed.
 *
 *    start() -> staged --flush--> todo --a worker--> done --reap--> the owner
 *
 * Only the queue's user touches `staged` and ops; a worker leaves its errno in flight->err and hands the flight back
 * through `done`, so that op->done changes in the user's own thread.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/status.h"
#include "io/io_internal.h"

/* Enough for the devices that such a fallback meets; each costs a stack. */
enum { MAX_THREADS = 16 };

typedef struct threads {
    imp_io_flights staged; /* the user's */

    pthread_mutex_t lock; /* guards the three below */
    imp_io_flights todo, done;
    bool stop;
    pthread_cond_t work, finished;

    unsigned n_threads;
    pthread_t ids[];
} threads;

static void *worker_main(void *arg)
{
    threads *t = arg;
    pthread_mutex_lock(&t->lock);
    for (;;) {
        imp_io_flight *f = imp_io_flights_pop(&t->todo);
        if (f) {
            pthread_mutex_unlock(&t->lock);
            if (f->release_ns) imp_io_sleep_until(f->release_ns);
            f->err = imp_io_pread_now(f->file, f->offset, f->buf, f->n_bytes);
            pthread_mutex_lock(&t->lock);
            imp_io_flights_push(&t->done, f);
            pthread_cond_signal(&t->finished);
        } else if (t->stop) {
            break;
        } else {
            pthread_cond_wait(&t->work, &t->lock);
        }
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

static void threads_close(imp_io_queue *q)
{
    threads *t = q->state;
    pthread_mutex_lock(&t->lock);
    t->stop = true;
    pthread_cond_broadcast(&t->work);
    pthread_mutex_unlock(&t->lock);
    for (unsigned i = 0; i < t->n_threads; i++) pthread_join(t->ids[i], NULL);
    pthread_cond_destroy(&t->finished);
    pthread_cond_destroy(&t->work);
    pthread_mutex_destroy(&t->lock);
    imp_free(t);
    q->state = NULL;
}

static int threads_open(imp_io_queue *q)
{
    unsigned n = q->depth < MAX_THREADS ? q->depth : MAX_THREADS;
    threads *t = imp_calloc(1, sizeof *t + n * sizeof t->ids[0]);
    if (!t) return imp_fail(IMP_E_NOMEM, "no memory for a read queue");
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->work, NULL);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC); /* imp_now_ns() */
    pthread_cond_init(&t->finished, &clock);
    pthread_condattr_destroy(&clock);
    q->state = t;

    /* The program's signals stay with the program's own threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int err = 0;
    while (err == 0 && t->n_threads < n) {
        err = pthread_create(&t->ids[t->n_threads], NULL, worker_main, t);
        if (err == 0) t->n_threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (t->n_threads == 0) { /* fewer than wanted will do */
        threads_close(q);
        return imp_fail_errno(err, "can't start a thread for reads");
    }
    return 0;
}

static void threads_arena(imp_io_queue *q) { (void)q; }

static bool threads_start(imp_io_queue *q, imp_io_flight *f)
{
    threads *t = q->state;
    imp_io_flight_reserve(q, f);
    imp_io_flights_push(&t->staged, f);
    return true;
}

static void threads_flush(imp_io_queue *q)
{
    threads *t = q->state;
    if (!t->staged.head) return;
    pthread_mutex_lock(&t->lock);
    imp_io_flight *f;
    while ((f = imp_io_flights_pop(&t->staged)) != NULL) {
        imp_io_flights_push(&t->todo, f);
        pthread_cond_signal(&t->work);
    }
    pthread_mutex_unlock(&t->lock);
}

static void threads_reap(imp_io_queue *q, uint64_t until_ns)
{
    threads *t = q->state;
    struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000u), .tv_nsec = (long)(until_ns % 1000000000u)};
    int late = 0;
    threads_flush(q);
    pthread_mutex_lock(&t->lock);
    while (until_ns != IMP_IO_NO_WAIT && !t->done.head && !late) {
        if (until_ns == IMP_IO_FOR_EVER) pthread_cond_wait(&t->finished, &t->lock);
        else late = pthread_cond_timedwait(&t->finished, &t->lock, &until);
    }
    imp_io_flights done = t->done;
    t->done = (imp_io_flights){NULL, NULL};
    pthread_mutex_unlock(&t->lock);
    imp_io_flight *f;
    while ((f = imp_io_flights_pop(&done)) != NULL) imp_io_flight_done(q, f, f->err);
}

static void threads_drop(imp_io_queue *q)
{
    threads *t = q->state;
    pthread_mutex_lock(&t->lock);
    imp_io_flights todo = t->todo;
    t->todo = (imp_io_flights){NULL, NULL};
    pthread_mutex_unlock(&t->lock);
    imp_io_flight *f;
    while ((f = imp_io_flights_pop(&t->staged)) != NULL) imp_io_flight_dropped(q, f);
    while ((f = imp_io_flights_pop(&todo)) != NULL) imp_io_flight_dropped(q, f);
}

const imp_io_way imp_io_way_threads = {
    .open = threads_open,
    .close = threads_close,
    .arena_in = threads_arena,
    .arena_out = threads_arena,
    .start = threads_start,
    .flush = threads_flush,
    .reap = threads_reap,
    .drop = threads_drop,
};
