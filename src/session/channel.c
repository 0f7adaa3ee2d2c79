#include "session/channel.h"

#include <pthread.h>
#include <sched.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/status.h"
#include "store/store.h"

enum {
    QUEUE_DEPTH = 32,     /* reads at the device at once: from there on a disk doesn't get faster */
    MAX_IDLE = 4,         /* channels kept */
    MAX_SCORE_THREADS = 8
};

struct imp_session {
    imp_store *store;
    imp_host *host;
    pthread_mutex_t mutex; /* guards idle, n_idle */
    imp_channel *idle;
    unsigned n_idle;
};

/* Guards the making of a session: two loads may be a store's first at once. */
static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;

static void channel_free(imp_channel *c)
{
    imp_scorer_free(c->scorer);
    imp_pool_free(c->pool);
    imp_io_queue_free(c->queue);
    imp_free(c);
}

static void session_free(void *object)
{
    imp_session *s = object;
    imp_channel *next;
    for (imp_channel *c = s->idle; c; c = next) {
        next = c->next;
        channel_free(c);
    }
    imp_host_free(s->host);
    pthread_mutex_destroy(&s->mutex);
    imp_free(s);
}

static int session_new(imp_store *store, imp_session **out)
{
    const imp_store_opts *opts = imp_store_options(store);
    imp_session *s = imp_calloc(1, sizeof *s);
    if (!s) return imp_fail(IMP_E_NOMEM, "no memory for a store's sessions");
    s->store = store;
    if (opts->cache != IMP_CACHE_NONE && opts->host_cache_bytes) {
        int rc = imp_host_new(opts->cache, opts->host_cache_bytes, &s->host);
        if (rc < 0) {
            imp_free(s);
            return rc;
        }
    }
    pthread_mutex_init(&s->mutex, NULL);
    *out = s;
    return 0;
}

int imp_session_of(imp_store *store, imp_session **out)
{
    int rc = 0;
    pthread_mutex_lock(&making);
    *out = imp_store_attached(store);
    if (!*out) {
        rc = session_new(store, out);
        if (rc == 0) imp_store_attach(store, *out, session_free);
    }
    pthread_mutex_unlock(&making);
    return rc;
}

imp_host *imp_session_host(imp_session *session) { return session->host; }

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
    pthread_mutex_lock(&session->mutex);
    if (session->n_idle < MAX_IDLE) {
        channel->next = session->idle;
        session->idle = channel;
        session->n_idle++;
        channel = NULL;
    }
    pthread_mutex_unlock(&session->mutex);
    if (channel) channel_free(channel);
}

/* The engine's own threads wait while we score, so all processors we may use are ours. */
static unsigned score_threads(void)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return n < 1 ? 1 : n > MAX_SCORE_THREADS ? MAX_SCORE_THREADS : (unsigned)n;
}

int imp_channel_scorer(imp_channel *c, size_t tokens, size_t rows, uint32_t heads, uint32_t head_dim)
{
    if (c->scorer && tokens <= c->max_tokens && rows <= c->max_rows && heads <= c->max_heads &&
        head_dim <= c->max_head_dim)
        return 0;
    if (!c->pool) {
        int rc = imp_pool_new(score_threads(), &c->pool);
        if (rc < 0) return rc;
    }
    /* It grows in every direction at once, and in steps, so that prompts of changing lengths don't make it anew each time. */
    if (tokens < c->max_tokens) tokens = c->max_tokens;
    if (rows < c->max_rows) rows = c->max_rows;
    if (heads < c->max_heads) heads = c->max_heads;
    if (head_dim < c->max_head_dim) head_dim = c->max_head_dim;
    tokens = imp_round_up(tokens, 1024);

    imp_scorer *scorer;
    int rc = imp_scorer_new(tokens, rows, heads, head_dim, c->pool, &scorer);
    if (rc < 0) return rc;
    imp_scorer_free(c->scorer);
    c->scorer = scorer;
    c->max_tokens = tokens;
    c->max_rows = rows;
    c->max_heads = heads;
    c->max_head_dim = head_dim;
    return 0;
}
