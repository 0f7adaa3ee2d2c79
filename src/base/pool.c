/* pool.c
 *
 * A run is a generation. Workers that wake for a generation join it by counting themselves into n_inside; the caller
 * closes it once no part is left, and returns when n_inside is back at 0. A worker that wakes only after that finds the
 * run closed and sleeps on, so nobody ever takes a part of the wrong run.
 */
#include "base/pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/alloc.h"
#include "base/status.h"

struct imp_pool {
    pthread_mutex_t lock; /* guards all below but next_part */
    pthread_cond_t start, finished;
    uint64_t generation;
    bool open, stop;
    unsigned n_inside;
    void (*fn)(size_t part, void *user);
    void *user;
    size_t n_parts;
    /* Relaxed: it only deals out numbers; the lock, taken around every run by all who take part, orders the data. */
    atomic_size_t next_part;

    unsigned n_workers;
    pthread_t workers[];
};

static void take_parts(imp_pool *p, size_t n_parts, void (*fn)(size_t part, void *user), void *user)
{
    size_t part;
    while ((part = atomic_fetch_add_explicit(&p->next_part, 1, memory_order_relaxed)) < n_parts) fn(part, user);
}

static void *worker_main(void *arg)
{
    imp_pool *p = arg;
    uint64_t seen = 0;
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (!p->stop && !(p->open && p->generation != seen)) pthread_cond_wait(&p->start, &p->lock);
        if (p->stop) break;
        seen = p->generation;
        p->n_inside++;
        size_t n_parts = p->n_parts;
        void (*fn)(size_t part, void *user) = p->fn;
        void *user = p->user;
        pthread_mutex_unlock(&p->lock);
        take_parts(p, n_parts, fn, user);
        pthread_mutex_lock(&p->lock);
        if (--p->n_inside == 0) pthread_cond_signal(&p->finished);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

int imp_pool_new(unsigned n_threads, imp_pool **out)
{
    *out = NULL;
    if (n_threads == 0 || n_threads > 1024) return imp_fail(IMP_E_ARG, "a pool of %u threads", n_threads);
    imp_pool *p = imp_calloc(1, sizeof *p + (n_threads - 1) * sizeof p->workers[0]);
    if (!p) return imp_fail(IMP_E_NOMEM, "no memory for a pool of threads");
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->start, NULL);
    pthread_cond_init(&p->finished, NULL);

    /* The program's signals stay with the program's own threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int err = 0;
    while (err == 0 && p->n_workers < n_threads - 1) {
        err = pthread_create(&p->workers[p->n_workers], NULL, worker_main, p);
        if (err == 0) p->n_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (err != 0) {
        imp_pool_free(p);
        return imp_fail_errno(err, "can't start a thread");
    }
    *out = p;
    return 0;
}

void imp_pool_free(imp_pool *p)
{
    if (!p) return;
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    pthread_cond_broadcast(&p->start);
    pthread_mutex_unlock(&p->lock);
    for (unsigned i = 0; i < p->n_workers; i++) pthread_join(p->workers[i], NULL);
    pthread_cond_destroy(&p->finished);
    pthread_cond_destroy(&p->start);
    pthread_mutex_destroy(&p->lock);
    imp_free(p);
}

void imp_pool_run(imp_pool *p, size_t n_parts, void (*fn)(size_t part, void *user), void *user)
{
    if (!p || p->n_workers == 0 || n_parts <= 1) {
        for (size_t i = 0; i < n_parts; i++) fn(i, user);
        return;
    }
    pthread_mutex_lock(&p->lock);
    p->fn = fn;
    p->user = user;
    p->n_parts = n_parts;
    atomic_store_explicit(&p->next_part, 0, memory_order_relaxed);
    p->generation++;
    p->open = true;
    pthread_cond_broadcast(&p->start);
    pthread_mutex_unlock(&p->lock);

    take_parts(p, n_parts, fn, user);

    pthread_mutex_lock(&p->lock);
    p->open = false;
    while (p->n_inside > 0) pthread_cond_wait(&p->finished, &p->lock);
    pthread_mutex_unlock(&p->lock);
}
