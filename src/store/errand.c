/* errand.c: what may wait for the disk, done by a thread of the store's while its caller waits, but no longer than the
 * read deadline. A disk that hangs holds whoever reads it, and no signal helps: so it holds a thread that nobody needs.
 *
 * The deadline counts from when a thread begins with it. Before that it counts from when a thread last began with
 * another one or was done with it: a queue that moves is a slow disk, not one that hangs. What is waited for because of
 * the rate limit doesn't count, nor, up to a bound, because another process has the catalogue locked.
 *
 * What is late goes on; when it comes back it gives back what it took. Until then nobody else is sent, see
 * imp_store_hung().
 * A store that is closed meanwhile is left to those that are late, and the last of them closes it.
 *
 * Threads are started when all others are busy, a few at most: so that one slow errand doesn't make others late. They
 * stay until the store is closed.
 */
#include <signal.h>
#include <stdio.h>
#include <time.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "store/store_internal.h"

enum { HELPERS_MAX = 4 };

/* A change is tried twice, and waits each time for so long as cat_db.c lets it. */
static const uint64_t busy_most_ns = 10000000000u;

typedef struct imp_errands {
    pthread_mutex_t lock;       /* guards what follows and the errands' states */
    pthread_cond_t come, back;  /* an errand for the helpers; one that is done */
    imp_errand *first, *last;   /* that nobody has begun */
    pthread_t helpers[HELPERS_MAX];
    unsigned n_waiting, n_helpers, n_busy; /* errands; threads; of these, at work */
    uint64_t moved_ns;           /* when a helper last took an errand, or was done with one */
    bool ending;
    void (*close)(imp_store *s); /* the store is left to the last one that is busy; NULL: it isn't */
    atomic_uint n_late;          /* relaxed: who is late to see it waits for the deadline too */
} imp_errands;

int imp_errands_new(imp_store *s)
{
    pthread_condattr_t clock;
    imp_errands *all = imp_calloc(1, sizeof *all);
    if (!all) return imp_fail(IMP_E_NOMEM, "no memory for a store");
    int err = pthread_mutex_init(&all->lock, NULL);
    if (err == 0) err = pthread_cond_init(&all->come, NULL);
    if (err == 0) err = pthread_condattr_init(&clock);
    if (err == 0) {
        err = pthread_condattr_setclock(&clock, CLOCK_MONOTONIC); /* of imp_now_ns() */
        if (err == 0) err = pthread_cond_init(&all->back, &clock);
        (void)pthread_condattr_destroy(&clock);
    }
    if (err) {
        imp_free(all);
        return imp_fail_errno(err, "store: no mutex");
    }
    atomic_init(&all->n_late, 0);
    s->errands = all;
    return 0;
}

void imp_errands_free(imp_store *s)
{
    imp_errands *all = s->errands;
    if (!all) return;
    pthread_cond_destroy(&all->back);
    pthread_cond_destroy(&all->come);
    pthread_mutex_destroy(&all->lock);
    imp_free(all);
    s->errands = NULL;
}

bool imp_errands_bounded(const imp_store *s)
{
    return !(s->opts.flags & IMP_STORE_MEMORY) && s->opts.io_mode != IMP_IO_VIRTUAL &&
           s->opts.read_deadline_ms != UINT32_MAX;
}

bool imp_store_hung(imp_store *s)
{
    return imp_io_hung(s->io) || atomic_load_explicit(&s->errands->n_late, memory_order_relaxed) > 0;
}

/* ---- the helpers. With the errands' mutex held. */

static imp_errand *take(imp_errands *all)
{
    imp_errand *e = all->first;
    all->first = e->next;
    if (!all->first) all->last = NULL;
    all->n_waiting--;
    return e;
}

static void go(imp_store *s, imp_errand *e)
{
    imp_errands *all = s->errands;
    /* All were busy for too long, and nobody waits for it any more. */
    bool late = e->state == IMP_ERRAND_LATE;
    all->n_busy++;
    all->moved_ns = imp_now_ns();
    imp_io_raise(&e->from_ns, all->moved_ns);
    e->begun = true;
    pthread_mutex_unlock(&all->lock);
    int status = 0;
    if (!late || e->needed) {
        (void)imp_io_tell_limit(&e->from_ns);
        status = e->run(s, e);
        (void)imp_io_tell_limit(NULL);
    }
    pthread_mutex_lock(&all->lock);
    all->moved_ns = imp_now_ns();
    if (e->state == IMP_ERRAND_AWAITED) {
        e->status = status;
        snprintf(e->line, sizeof e->line, "%s", imp_last_error());
        e->state = IMP_ERRAND_DONE;
    } else {
        late = e->state == IMP_ERRAND_LATE;
        pthread_mutex_unlock(&all->lock);
        if (late && e->give_up) e->give_up(s, e);
        imp_free(e);
        pthread_mutex_lock(&all->lock);
        if (late) atomic_fetch_sub_explicit(&all->n_late, 1, memory_order_relaxed);
    }
    all->n_busy--;
    pthread_cond_broadcast(&all->back);
}

static void *help(void *user)
{
    imp_store *s = user;
    imp_errands *all = s->errands;
    void (*close)(imp_store *) = NULL;
    pthread_mutex_lock(&all->lock);
    for (;;) {
        while (!all->first && !all->ending) pthread_cond_wait(&all->come, &all->lock);
        if (!all->first) break; /* the end: nobody is left who would send one */
        go(s, take(all));
    }
    if (all->n_busy == 0) { /* the others, if any, have nothing to do but to end */
        close = all->close;
        all->close = NULL;
    }
    pthread_mutex_unlock(&all->lock);
    if (!close) return NULL;
    /* The last one of a store that was closed meanwhile. */
    for (unsigned i = 0; i < all->n_helpers; i++) {
        if (pthread_equal(all->helpers[i], pthread_self())) (void)pthread_detach(pthread_self());
        else (void)pthread_join(all->helpers[i], NULL);
    }
    close(s);
    return NULL;
}

/* False: there is none, and none can be had. */
static bool have_helper(imp_store *s)
{
    imp_errands *all = s->errands;
    sigset_t blocked, was;
    if (all->n_waiting < all->n_helpers - all->n_busy || all->n_helpers == HELPERS_MAX) return true;
    /* The program's signals stay with the program's own threads. */
    sigfillset(&blocked);
    pthread_sigmask(SIG_SETMASK, &blocked, &was);
    bool made = pthread_create(&all->helpers[all->n_helpers], NULL, help, s) == 0;
    pthread_sigmask(SIG_SETMASK, &was, NULL);
    all->n_helpers += made;
    return all->n_helpers > 0;
}

/* ---- who sends them */

/* False: there is nobody, or nobody any more. With the errands' mutex held. */
static bool send(imp_store *s, imp_errand *e)
{
    imp_errands *all = s->errands;
    if (all->ending || !have_helper(s)) return false;
    e->next = NULL;
    *(all->last ? &all->last->next : &all->first) = e;
    all->last = e;
    all->n_waiting++;
    pthread_cond_signal(&all->come);
    return true;
}

bool imp_errand_send(imp_store *s, imp_errand *e)
{
    if (!imp_errands_bounded(s)) return false;
    e->state = IMP_ERRAND_SENT;
    pthread_mutex_lock(&s->errands->lock);
    bool sent = send(s, e);
    pthread_mutex_unlock(&s->errands->lock);
    return sent;
}

static void wait_until(imp_errands *all, uint64_t until_ns)
{
    struct timespec until = {(time_t)(until_ns / 1000000000u), (long)(until_ns % 1000000000u)};
    (void)pthread_cond_timedwait(&all->back, &all->lock, &until);
}

void imp_errand_gets_on(imp_errand *e) { imp_io_raise(&e->from_ns, imp_now_ns()); }

static uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* Until when it isn't late. With the errands' mutex held. */
static uint64_t due_ns(const imp_store *s, const imp_errand *e, uint64_t sent_ns)
{
    uint64_t from_ns = e->begun ? atomic_load_explicit(&e->from_ns, memory_order_relaxed)
                                : later(sent_ns, s->errands->moved_ns);
    uint64_t busy_ns = atomic_load_explicit(&s->busy_ns, memory_order_relaxed);
    if (busy_ns > from_ns) from_ns = busy_ns - from_ns < busy_most_ns ? busy_ns : from_ns + busy_most_ns;
    return from_ns + (uint64_t)s->opts.read_deadline_ms * 1000000u;
}

bool imp_errand_do(imp_store *s, imp_errand *e)
{
    imp_errands *all = s->errands;
    bool bounded = imp_errands_bounded(s);
    e->state = IMP_ERRAND_AWAITED;
    if (bounded) {
        pthread_mutex_lock(&all->lock);
        bounded = send(s, e);
        if (!bounded) pthread_mutex_unlock(&all->lock);
    }
    if (!bounded) {
        e->status = e->run(s, e);
        return true;
    }
    const char *what = e->what;
    uint64_t sent_ns = imp_now_ns();
    while (e->state == IMP_ERRAND_AWAITED) {
        uint64_t until_ns = due_ns(s, e, sent_ns);
        if (imp_now_ns() >= until_ns) break;
        wait_until(all, until_ns);
    }
    bool done = e->state == IMP_ERRAND_DONE;
    if (!done) {
        e->state = IMP_ERRAND_LATE;
        atomic_fetch_add_explicit(&all->n_late, 1, memory_order_relaxed);
    }
    pthread_mutex_unlock(&all->lock);
    if (done) {
        if (e->status < 0) (void)imp_fail(e->status, "%s", e->line);
        return true;
    }
    char line[256];
    double deadline_s = (double)s->opts.read_deadline_ms * 1e-3;
    snprintf(line, sizeof line, "%s: %s: no answer within %.3g s", s->dir, what, deadline_s);
    imp_store_read_late(s, line);
    return false;
}

/* ---- the end */

bool imp_errands_end(imp_store *s, void (*close)(imp_store *s))
{
    imp_errands *all = s->errands;
    char line[256];
    snprintf(line, sizeof line, "%s: it will be closed when the disk answers", s->dir);
    pthread_mutex_lock(&all->lock);
    /* The writer has some done too, and of some nobody waits for the end. */
    uint64_t until_ns = imp_now_ns() + (uint64_t)s->opts.read_deadline_ms * 1000000u;
    while (all->n_waiting + all->n_busy > atomic_load_explicit(&all->n_late, memory_order_relaxed) &&
           imp_now_ns() < until_ns) {
        wait_until(all, until_ns);
    }
    all->ending = true;
    bool busy = all->n_busy > 0 || all->first;
    if (busy) all->close = close;
    pthread_cond_broadcast(&all->come);
    pthread_mutex_unlock(&all->lock); /* it may be gone from here on, if it is left to others */
    if (busy) imp_log(IMP_LOG_WARN, "%s", line);
    for (unsigned i = 0; !busy && i < all->n_helpers; i++) (void)pthread_join(all->helpers[i], NULL);
    return !busy;
}
