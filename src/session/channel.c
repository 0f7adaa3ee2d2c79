#include "session/channel.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/log.h"
#include "base/status.h"
#include "store/store.h"

enum {
    QUEUE_DEPTH = 32,     /* reads at the device at once: from there on a disk doesn't get faster */
    MAX_IDLE = 4,         /* channels kept */
    MAX_THREADS = 8
};

struct imp_session {
    imp_store *store;
    imp_ropes *ropes;
    atomic_bool guesses;   /* what reads cost, since it couldn't be asked for yet */
    pthread_mutex_t mutex; /* guards all below */
    imp_tier *tier;
    bool warned;           /* that requests disagree about the tier's policy */
    imp_channel *idle;
    unsigned n_idle;
    imp_read_costs costs;
    imp_habits habits[IMP_IDENTIFY_RANDOM + 1];
    double sharpness[IMP_IDENTIFY_RANDOM + 1]; /* 0: not known */
    double pace; /* 0: not known */
};

/* Of an ordinary SSD, until it is measured. */
static const imp_read_costs guessed_costs = {.read_ns = 10000, .byte_ns = 1};

/* Guards which session a store has: two loads may be its first at once. */
static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;

static void channel_free(imp_channel *c)
{
    imp_chooser_free(c->chooser);
    imp_free(c->wide);
    imp_scorer_free(c->scorer);
    imp_pool_free(c->pool);
    imp_io_queue_free(c->queue);
    imp_free(c);
}

static void tier_free(imp_tier *t)
{
    if (t) imp_host_free(t->host);
    imp_free(t);
}

static void session_free(void *object)
{
    imp_session *s = object;
    imp_channel *next;
    for (imp_channel *c = s->idle; c; c = next) {
        next = c->next;
        channel_free(c);
    }
    tier_free(s->tier);
    imp_ropes_free(s->ropes);
    pthread_mutex_destroy(&s->mutex);
    imp_free(s);
}

static void forget_segment(void *object, uint64_t segment)
{
    imp_session *s = object;
    pthread_mutex_lock(&s->mutex);
    if (s->tier) imp_host_forget(s->tier->host, segment);
    pthread_mutex_unlock(&s->mutex);
}

/* What reads cost here, if it can be had now. Where it wasn't measured it is guessed for good, or until it is. */
static void ask_costs(imp_session *s)
{
    imp_read_costs costs;
    imp_kept_line kept;
    imp_error_keep(&kept);
    int rc = imp_store_costs_get(s->store, false, &costs);
    if (rc == 0) imp_session_set_costs(s, &costs);
    atomic_store_explicit(&s->guesses, rc == IMP_E_BUSY || rc == IMP_E_IO, memory_order_relaxed);
    (void)imp_error_back(&kept, 0);
}

static int session_new(imp_store *store, imp_session **out)
{
    imp_ropes *ropes = NULL;
    imp_session *s = imp_calloc(1, sizeof *s);
    if (!s || imp_ropes_new(&ropes) < 0) {
        imp_free(s);
        return imp_fail(IMP_E_NOMEM, "no memory for a store's loads");
    }
    s->store = store;
    s->ropes = ropes;
    pthread_mutex_init(&s->mutex, NULL);
    s->costs = guessed_costs;
    ask_costs(s);
    *out = s;
    return 0;
}

int imp_session_of(imp_store *store, imp_session **out)
{
    imp_session *fresh = NULL;
    pthread_mutex_lock(&making);
    *out = imp_store_attached(store);
    pthread_mutex_unlock(&making);
    if (*out && atomic_load_explicit(&(*out)->guesses, memory_order_relaxed)) ask_costs(*out);
    if (*out) return 0;
    int rc = session_new(store, &fresh); /* it asks the disk, which other stores' loads don't wait for */
    if (rc < 0) return rc;
    pthread_mutex_lock(&making);
    *out = imp_store_attached(store);
    if (!*out) {
        imp_store_attach(store, fresh, session_free, forget_segment);
        *out = fresh;
        fresh = NULL;
    }
    pthread_mutex_unlock(&making);
    if (fresh) session_free(fresh); /* another thread was faster */
    return 0;
}

static int tier_new(imp_cache policy, uint64_t host_bytes, uint64_t device_bytes, imp_tier **out)
{
    imp_tier *t = imp_calloc(1, sizeof *t);
    if (!t) return imp_fail(IMP_E_NOMEM, "tiers: no memory");
    t->policy = policy;
    int rc = imp_host_new(policy, host_bytes, device_bytes, &t->host);
    if (rc < 0) {
        imp_free(t);
        return rc;
    }
    *out = t;
    return 0;
}

int imp_tier_take(imp_session *session, imp_cache policy, imp_tier **out)
{
    uint64_t host_bytes = imp_store_options(session->store)->host_cache_bytes;
    uint64_t device_bytes = imp_store_options(session->store)->device_cache_bytes;
    *out = NULL;
    if (policy == IMP_CACHE_NONE || (host_bytes == 0 && device_bytes == 0)) return 0;
    if (imp_io_in_memory(imp_store_io(session->store))) return 0; /* what it holds is in memory already */

    int rc = 0;
    bool warn = false;
    imp_tier *idle = NULL; /* the one before, if nobody uses it */
    pthread_mutex_lock(&session->mutex);
    imp_tier *t = session->tier;
    if (!t || t->policy != policy) rc = tier_new(policy, host_bytes, device_bytes, &t);
    if (rc == 0 && t != session->tier) {
        imp_tier *before = session->tier;
        session->tier = t;
        if (before && before->n_users) {
            before->retired = true;
        } else {
            idle = before;
        }
        warn = before && !session->warned;
        session->warned |= warn;
    }
    if (rc == 0) {
        t->n_users++;
        *out = t;
    }
    pthread_mutex_unlock(&session->mutex);
    tier_free(idle);
    if (warn) imp_log(IMP_LOG_INFO, "host tier: emptied by a request with another policy");
    return rc;
}

bool imp_tier_look(imp_session *session, imp_cache policy, imp_tier **out)
{
    pthread_mutex_lock(&session->mutex);
    imp_tier *t = session->tier;
    *out = t && t->policy == policy ? t : NULL;
    if (*out) t->n_users++;
    pthread_mutex_unlock(&session->mutex);
    return *out != NULL;
}

void imp_tier_give(imp_session *session, imp_tier *tier)
{
    if (!tier) return;
    pthread_mutex_lock(&session->mutex);
    bool last = --tier->n_users == 0 && tier->retired;
    pthread_mutex_unlock(&session->mutex);
    if (last) tier_free(tier);
}

int imp_channel_take(imp_session *session, size_t arena_bytes, imp_channel **out)
{
    *out = NULL;
    pthread_mutex_lock(&session->mutex);
    imp_channel *c = session->idle;
    if (c) {
        session->idle = c->next;
        session->n_idle--;
    }
    pthread_mutex_unlock(&session->mutex);

    int rc = 0;
    if (!c) {
        c = imp_calloc(1, sizeof *c);
        if (!c) return imp_fail(IMP_E_NOMEM, "no memory for a load");
        rc = imp_io_queue_new(imp_store_io(session->store), QUEUE_DEPTH, arena_bytes, &c->queue);
    } else if (c->arena_bytes < arena_bytes) {
        rc = imp_io_queue_grow(c->queue, arena_bytes);
    }
    if (rc < 0) {
        channel_free(c);
        return rc;
    }
    c->arena = imp_io_queue_arena(c->queue, &c->arena_bytes);
    *out = c;
    return 0;
}

void imp_channel_give(imp_session *session, imp_channel *channel)
{
    bool hung = imp_io_queue_hung(channel->queue);
    pthread_mutex_lock(&session->mutex);
    if (session->n_idle < MAX_IDLE && !hung) {
        channel->next = session->idle;
        session->idle = channel;
        session->n_idle++;
        channel = NULL;
    }
    pthread_mutex_unlock(&session->mutex);
    if (channel) channel_free(channel);
}

/* The engine's own threads wait while we score and copy, so all processors we may use are ours. */
static unsigned own_threads(void)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : (unsigned)n;
}

int imp_channel_pool(imp_channel *c) { return c->pool ? 0 : imp_pool_new(own_threads(), &c->pool); }

int imp_channel_scorer(imp_channel *c, size_t tokens, size_t rows, uint32_t heads, uint32_t head_dim)
{
    int rc;
    if (c->scorer && tokens <= c->max_tokens && rows <= c->max_rows && heads <= c->max_heads &&
        head_dim <= c->max_head_dim)
        return 0;
    rc = imp_channel_pool(c);
    if (rc < 0) return rc;
    /* It grows in every direction at once, and in steps, so that prompts of changing lengths don't make it anew each
     * time. */
    if (tokens < c->max_tokens) tokens = c->max_tokens;
    if (rows < c->max_rows) rows = c->max_rows;
    if (heads < c->max_heads) heads = c->max_heads;
    if (head_dim < c->max_head_dim) head_dim = c->max_head_dim;
    tokens = imp_round_up(tokens, 1024);

    imp_scorer *scorer;
    rc = imp_scorer_new(tokens, rows, heads, head_dim, c->pool, &scorer);
    if (rc < 0) return rc;
    imp_scorer_free(c->scorer);
    c->scorer = scorer;
    c->max_tokens = tokens;
    c->max_rows = rows;
    c->max_heads = heads;
    c->max_head_dim = head_dim;
    return 0;
}

int imp_channel_wide(imp_channel *c, size_t n_bytes)
{
    if (n_bytes <= c->wide_bytes) return 0;
    unsigned char *wide = imp_aligned(64, n_bytes);
    if (!wide) return imp_fail(IMP_E_NOMEM, "no memory for the keys of a layer");
    imp_free(c->wide);
    c->wide = wide;
    c->wide_bytes = n_bytes;
    return 0;
}

int imp_channel_chooser(imp_channel *c, size_t tokens, size_t pages)
{
    if (c->chooser && tokens <= c->max_choose && pages <= c->max_pages) return 0;
    if (tokens < c->max_choose) tokens = c->max_choose;
    if (pages < c->max_pages) pages = c->max_pages;
    tokens = imp_round_up(tokens, 1024);
    pages = imp_round_up(pages, 64);
    imp_chooser *chooser;
    int rc = imp_chooser_new(tokens, pages, &chooser);
    if (rc < 0) return rc;
    imp_chooser_free(c->chooser);
    c->chooser = chooser;
    c->max_choose = tokens;
    c->max_pages = pages;
    return 0;
}

imp_ropes *imp_session_ropes(imp_session *session) { return session->ropes; }

void imp_session_costs(imp_session *session, imp_read_costs *out)
{
    pthread_mutex_lock(&session->mutex);
    *out = session->costs;
    pthread_mutex_unlock(&session->mutex);
}

void imp_session_set_costs(imp_session *session, const imp_read_costs *costs)
{
    pthread_mutex_lock(&session->mutex);
    session->costs = *costs;
    pthread_mutex_unlock(&session->mutex);
}

static const double newest = 0.3; /* weight of the latest in moving averages */

static void average(double *old, double x) { *old += newest * (x - *old); }

void imp_session_habits(imp_session *session, imp_identify identify, imp_habits *out)
{
    pthread_mutex_lock(&session->mutex);
    *out = session->habits[identify];
    pthread_mutex_unlock(&session->mutex);
}

void imp_session_learn(imp_session *session, imp_identify identify, double share, double held, uint64_t n_reads,
                       uint64_t n_bytes)
{
    double read_bytes = n_reads ? (double)n_bytes / (double)n_reads : 0;
    pthread_mutex_lock(&session->mutex);
    imp_habits *h = &session->habits[identify];
    if (h->n == 0) *h = (imp_habits){0, share, held, read_bytes, h->kept};
    if (n_reads && !(h->read_bytes > 0)) h->read_bytes = read_bytes;
    h->n += h->n < UINT32_MAX;
    average(&h->share, share);
    average(&h->held, held);
    if (n_reads) average(&h->read_bytes, read_bytes);
    pthread_mutex_unlock(&session->mutex);
}

double imp_session_sharpness(imp_session *session, imp_identify identify)
{
    pthread_mutex_lock(&session->mutex);
    double times = session->sharpness[identify];
    pthread_mutex_unlock(&session->mutex);
    return times > 0 ? times : 1;
}

void imp_session_sharpness_learn(imp_session *session, imp_identify identify, double times, double kept)
{
    double bound = times < 0.05 ? 0.05 : times > 20 ? 20 : times; /* no request changes everything */
    pthread_mutex_lock(&session->mutex);
    double *old = &session->sharpness[identify], *share = &session->habits[identify].kept;
    if (*old > 0) average(old, bound);
    else *old = bound;
    if (*share > 0) average(share, kept);
    else *share = kept;
    pthread_mutex_unlock(&session->mutex);
}

double imp_session_pace(imp_session *session)
{
    pthread_mutex_lock(&session->mutex);
    double pace = session->pace;
    pthread_mutex_unlock(&session->mutex);
    return pace > 0 ? pace : 1;
}

void imp_session_pace_learn(imp_session *session, double times)
{
    pthread_mutex_lock(&session->mutex);
    if (session->pace > 0) average(&session->pace, times);
    else session->pace = times;
    pthread_mutex_unlock(&session->mutex);
}
