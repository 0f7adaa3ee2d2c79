/* history.c: see history.h.
 *
 * Locks. The table's mutex is taken after the store's two (or without them), a record's own after the table's; neither
 * is held while the catalogue is used. So the order is: catalogue's, store's, table's, record's.
 *
 * A record that a load asks for while the catalogue is busy (its commit waits for the disk), or hangs, starts empty, as
 * *unread*: what the catalogue has is mixed in the next time it is asked for, or before it is written.
 *
 * Bytes of a record in the catalogue, little-endian:
 *
 *     u32 version (1), n_layers, n_tokens, 0
 *     for each layer: u32 requests, news, which parts follow (bit 0 the history, 1 and 2 the rankings)
 *     for each part, for each layer that has it: f16[n_tokens]
 */
#include "store/history.h"

#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/log.h"
#include "base/status.h"
#include "select/blend.h"
#include "store/store_internal.h"

enum {
    VERSION = 1,
    HEAD_BYTES = 16,
    LAYER_BYTES = 12,
    HISTORY = 0, /* the parts; a ranking's is 1 + imp_rank */
    N_PARTS = 3,
    MEMORY_MAX = 64 << 20,
    MEMORY_MOST = 80 << 20, /* beyond it what isn't written yet goes too */
    BATCH = 16,             /* records in one change */
    LIMIT_SHARE = 64,       /* of the store's limit: more is not written at a time */
    NEWS_MAX = 256
};

typedef struct layer_record {
    uint32_t count, news;
    float *parts[N_PARTS]; /* [n_tokens]; NULL: nothing is known */
} layer_record;

struct imp_history {
    struct imp_histories *all;
    uint64_t segment;
    uint32_t n_layers, n_tokens;
    pthread_mutex_t *lock; /* the one below: whoever reads a constant record takes it too */
    pthread_mutex_t mutex;
    /* under it */
    uint64_t changes; /* counted, so that what changes while it is written stays dirty */
    bool dirty, unread;
    layer_record *layers; /* [n_layers] */
    /* under the table's */
    unsigned n_users;
    imp_history *older, *newer; /* among those without users */
};

typedef struct imp_histories {
    pthread_mutex_t lock;
    imp_idmap map;               /* segment -> record */
    imp_history *oldest, *newest; /* without users */
    bool keeps;                  /* records go to the catalogue */
    atomic_size_t n_bytes;       /* relaxed, as the others: figures */
    atomic_size_t n_dirty;
    atomic_bool told; /* the writer's thread knows that something is dirty */
} imp_histories;

int imp_histories_new(imp_store *s)
{
    imp_histories *all = imp_calloc(1, sizeof *all);
    if (!all) return imp_fail(IMP_E_NOMEM, "no memory for a store");
    int err = pthread_mutex_init(&all->lock, NULL);
    if (err) {
        imp_free(all);
        return imp_fail_errno(err, "store: no mutex");
    }
    all->keeps = !s->readonly && !(s->opts.flags & IMP_STORE_MEMORY);
    s->histories = all;
    return 0;
}

/* ---- a record alone */

static size_t base_bytes(const imp_history *h) { return sizeof *h + h->n_layers * sizeof *h->layers; }

static void record_free(imp_history *h)
{
    if (!h) return;
    size_t n_bytes = base_bytes(h);
    for (uint32_t l = 0; l < h->n_layers; l++) {
        for (int p = 0; p < N_PARTS; p++) {
            if (!h->layers[l].parts[p]) continue;
            n_bytes += h->n_tokens * sizeof(float);
            imp_free(h->layers[l].parts[p]);
        }
    }
    atomic_fetch_sub_explicit(&h->all->n_bytes, n_bytes, memory_order_relaxed);
    if (h->dirty) atomic_fetch_sub_explicit(&h->all->n_dirty, 1, memory_order_relaxed);
    pthread_mutex_destroy(&h->mutex);
    imp_free(h->layers);
    imp_free(h);
}

static imp_history *record_new(imp_histories *all, uint64_t segment, uint32_t n_layers, uint32_t n_tokens)
{
    imp_history *h = imp_calloc(1, sizeof *h);
    layer_record *layers = imp_calloc(n_layers, sizeof *layers);
    if (!h || !layers || pthread_mutex_init(&h->mutex, NULL) != 0) {
        imp_free(layers);
        imp_free(h);
        return NULL;
    }
    h->all = all;
    h->segment = segment;
    h->n_layers = n_layers;
    h->n_tokens = n_tokens;
    h->lock = &h->mutex;
    h->layers = layers;
    atomic_fetch_add_explicit(&all->n_bytes, base_bytes(h), memory_order_relaxed);
    return h;
}

/* A part of a layer, made if need be; NULL: no memory, and what should be noted is lost. */
static float *part_of(imp_history *h, uint32_t layer, int part)
{
    float **p = &h->layers[layer].parts[part];
    if (*p) return *p;
    *p = imp_calloc(h->n_tokens, sizeof **p);
    if (*p) atomic_fetch_add_explicit(&h->all->n_bytes, h->n_tokens * sizeof **p, memory_order_relaxed);
    return *p;
}

static void touch(imp_history *h)
{
    h->changes++;
    if (h->dirty || !h->all->keeps) return;
    h->dirty = true;
    atomic_fetch_add_explicit(&h->all->n_dirty, 1, memory_order_relaxed);
}

static void clean(imp_history *h)
{
    if (!h->dirty) return;
    h->dirty = false;
    atomic_fetch_sub_explicit(&h->all->n_dirty, 1, memory_order_relaxed);
}

static bool fits(const imp_history *h, uint32_t layer, uint32_t first, size_t n)
{
    return layer < h->n_layers && first <= h->n_tokens && n <= h->n_tokens - first;
}

static bool read_part(const imp_history *h, uint32_t layer, int part, uint32_t first, size_t n, float *out)
{
    const float *p = fits(h, layer, first, n) ? h->layers[layer].parts[part] : NULL;
    for (size_t i = 0; i < n; i++) out[i] = p ? p[first + i] : 0.0f;
    return p != NULL;
}

uint32_t imp_history_read(const imp_history *h, uint32_t layer, uint32_t first, size_t n, float *out)
{
    pthread_mutex_lock(h->lock);
    uint32_t count = read_part(h, layer, HISTORY, first, n, out) ? h->layers[layer].count : 0;
    pthread_mutex_unlock(h->lock);
    return count;
}

void imp_history_add(imp_history *h, uint32_t layer, uint32_t first, size_t n, const float *scores)
{
    pthread_mutex_lock(h->lock);
    float *p = fits(h, layer, first, n) ? part_of(h, layer, HISTORY) : NULL;
    if (p) {
        layer_record *l = &h->layers[layer];
        imp_history_update(p + first, scores, n, imp_history_weight(l->count));
        if (l->count < UINT32_MAX) l->count++;
        if (l->news < UINT32_MAX) l->news++;
        touch(h);
    }
    pthread_mutex_unlock(h->lock);
}

static bool is_rank(imp_rank rank) { return rank == IMP_RANK_PREFILL || rank == IMP_RANK_RECONSTRUCTION; }

bool imp_history_ranking(const imp_history *h, imp_rank rank, uint32_t layer, uint32_t first, size_t n, float *out)
{
    pthread_mutex_lock(h->lock);
    bool there = read_part(h, layer, is_rank(rank) ? 1 + (int)rank : 1, first, n, out);
    pthread_mutex_unlock(h->lock);
    return there;
}

void imp_history_rank(imp_history *h, imp_rank rank, uint32_t layer, uint32_t first, size_t n, const float *scores)
{
    pthread_mutex_lock(h->lock);
    float *p = is_rank(rank) && fits(h, layer, first, n) ? part_of(h, layer, 1 + (int)rank) : NULL;
    for (size_t i = 0; p && i < n; i++) {
        if (scores[i] > p[first + i] && isfinite(scores[i])) p[first + i] = scores[i];
    }
    if (p) touch(h);
    pthread_mutex_unlock(h->lock);
}

uint32_t imp_history_news(const imp_history *h)
{
    uint32_t most = 0;
    pthread_mutex_lock(h->lock);
    for (uint32_t l = 0; l < h->n_layers; l++) {
        if (h->layers[l].news > most) most = h->layers[l].news;
    }
    pthread_mutex_unlock(h->lock);
    return most;
}

void imp_history_settle(imp_history *h)
{
    pthread_mutex_lock(h->lock);
    for (uint32_t l = 0; l < h->n_layers; l++) h->layers[l].news = 0;
    touch(h);
    pthread_mutex_unlock(h->lock);
}

/* ---- bytes. With the record's mutex held, or a record that nobody else knows. */

static uint32_t parts_of(const imp_history *h, uint32_t layer, uint32_t mask)
{
    uint32_t bits = 0;
    for (int p = 0; p < N_PARTS; p++) bits |= (uint32_t)(h->layers[layer].parts[p] != NULL) << p;
    return bits & mask;
}

static size_t encoded_bytes(const imp_history *h, uint32_t mask)
{
    size_t n = HEAD_BYTES + (size_t)h->n_layers * LAYER_BYTES;
    for (uint32_t l = 0; l < h->n_layers; l++) {
        uint32_t bits = parts_of(h, l, mask);
        n += 2 * (size_t)h->n_tokens * (size_t)((bits & 1) + (bits >> 1 & 1) + (bits >> 2 & 1));
    }
    return n;
}

/* In new memory. IMP_E_FULL: more than the catalogue takes, even without the rankings. */
static int encode(const imp_history *h, void **out, size_t *n_out)
{
    uint32_t mask = (1u << N_PARTS) - 1;
    if (encoded_bytes(h, mask) > IMP_CAT_HISTORY_BYTES_MAX) mask = 1u << HISTORY;
    size_t n = encoded_bytes(h, mask);
    if (n > IMP_CAT_HISTORY_BYTES_MAX) return imp_fail(IMP_E_FULL, "a history of %zu bytes", n);
    unsigned char *bytes = imp_malloc(n), *p = bytes;
    if (!bytes) return imp_fail(IMP_E_NOMEM, "no memory for a history of %zu bytes", n);
    imp_put32(p, VERSION);
    imp_put32(p + 4, h->n_layers);
    imp_put32(p + 8, h->n_tokens);
    imp_put32(p + 12, 0);
    p += HEAD_BYTES;
    for (uint32_t l = 0; l < h->n_layers; l++, p += LAYER_BYTES) {
        imp_put32(p, h->layers[l].count);
        imp_put32(p + 4, h->layers[l].news);
        imp_put32(p + 8, parts_of(h, l, mask));
    }
    for (int part = 0; part < N_PARTS; part++) {
        for (uint32_t l = 0; l < h->n_layers; l++) {
            if (!(parts_of(h, l, mask) >> part & 1)) continue;
            imp_history_encode(h->layers[l].parts[part], h->n_tokens, p);
            p += 2 * (size_t)h->n_tokens;
        }
    }
    *out = bytes;
    *n_out = n;
    return 0;
}

/* Is it a record of this shape? */
static bool sound(const unsigned char *b, size_t n_bytes, uint32_t n_layers, uint32_t n_tokens)
{
    size_t n = HEAD_BYTES + (size_t)n_layers * LAYER_BYTES;
    if (n_bytes < n || imp_get32(b) != VERSION || imp_get32(b + 4) != n_layers || imp_get32(b + 8) != n_tokens) {
        return false;
    }
    for (uint32_t l = 0; l < n_layers; l++) {
        uint32_t bits = imp_get32(b + HEAD_BYTES + l * LAYER_BYTES + 8);
        if (bits >> N_PARTS) return false;
        n += 2 * (size_t)n_tokens * (size_t)((bits & 1) + (bits >> 1 & 1) + (bits >> 2 & 1));
    }
    return n == n_bytes;
}

/* Older requests of one layer, n_old of them, below the newer ones that are here. */
static void mix(layer_record *l, uint32_t n_old, const float *old, size_t n)
{
    float *here = l->parts[HISTORY], newer = 1.0f; /* the share of what is here */
    if (n_old > 0 && l->count < IMP_HISTORY_SPAN) {
        uint64_t all = (uint64_t)l->count + n_old;
        newer = (float)l->count / (float)(all < IMP_HISTORY_SPAN ? all : IMP_HISTORY_SPAN);
    }
    for (size_t i = 0; i < n; i++) here[i] = newer * here[i] + (1.0f - newer) * old[i];
}

/* Mix the bytes of a former life into what is here. What isn't sound is as nothing. IMP_E_NOMEM: all or a part of it is
 * lost. */
static int decode(imp_history *h, const unsigned char *b, size_t n_bytes)
{
    if (!sound(b, n_bytes, h->n_layers, h->n_tokens)) return 0;
    float *old = imp_malloc(h->n_tokens * sizeof *old);
    if (!old) return imp_fail(IMP_E_NOMEM, "no memory for a history");
    int rc = 0;
    const unsigned char *p = b + HEAD_BYTES + h->n_layers * LAYER_BYTES;
    for (int part = 0; part < N_PARTS; part++) {
        for (uint32_t l = 0; l < h->n_layers; l++) {
            const unsigned char *head = b + HEAD_BYTES + l * LAYER_BYTES;
            if (!(imp_get32(head + 8) >> part & 1)) continue;
            imp_history_decode(p, h->n_tokens, old);
            p += 2 * (size_t)h->n_tokens;
            float *here = part_of(h, l, part);
            if (!here) {
                rc = imp_fail(IMP_E_NOMEM, "no memory for a history");
                continue;
            }
            if (part != HISTORY) {
                for (uint32_t i = 0; i < h->n_tokens; i++) here[i] = old[i] > here[i] ? old[i] : here[i];
                continue;
            }
            layer_record *r = &h->layers[l];
            uint32_t n_old = imp_get32(head), news = imp_get32(head + 4);
            mix(r, n_old, old, h->n_tokens);
            r->count = r->count > UINT32_MAX - n_old ? UINT32_MAX : r->count + n_old;
            r->news = r->news > UINT32_MAX - news ? UINT32_MAX : r->news + news;
        }
    }
    imp_free(old);
    return rc;
}

/* ---- the table. With its mutex held. */

static void idle_add(imp_histories *t, imp_history *h)
{
    h->older = t->newest;
    h->newer = NULL;
    *(t->newest ? &t->newest->newer : &t->oldest) = h;
    t->newest = h;
}

static void idle_take(imp_histories *t, imp_history *h)
{
    *(h->older ? &h->older->newer : &t->oldest) = h->newer;
    *(h->newer ? &h->newer->older : &t->newest) = h->older;
}

static void forget(imp_histories *t, imp_history *h)
{
    idle_take(t, h);
    imp_idmap_remove(&t->map, h->segment);
    record_free(h);
}

static void trim(imp_histories *t)
{
    for (imp_history *h = t->oldest, *next; h; h = next) {
        size_t n_bytes = atomic_load_explicit(&t->n_bytes, memory_order_relaxed);
        if (n_bytes <= MEMORY_MAX) break;
        next = h->newer;
        if (!h->dirty || n_bytes > MEMORY_MOST) forget(t, h); /* without users nobody else changes it */
    }
}

static imp_history *hold(imp_histories *t, uint64_t segment)
{
    imp_history *h = imp_idmap_get(&t->map, segment);
    if (h && h->n_users++ == 0) idle_take(t, h);
    return h;
}

static void drop(imp_histories *t, imp_history *h)
{
    if (--h->n_users == 0) idle_add(t, h);
}

void imp_histories_free(imp_store *s)
{
    imp_histories *t = s->histories;
    if (!t) return;
    while (t->oldest) forget(t, t->oldest);
    imp_idmap_free(&t->map);
    pthread_mutex_destroy(&t->lock);
    imp_free(t);
    s->histories = NULL;
}

/* ---- with the catalogue */

/* With the catalogue's mutex held, and perhaps the store's: what it has, if that wasn't read yet. */
static void read_old(imp_store *s, imp_history *h, bool inside)
{
    void *bytes = NULL;
    size_t n_bytes = 0;
    pthread_mutex_lock(h->lock);
    bool unread = h->unread;
    pthread_mutex_unlock(h->lock);
    if (!unread || !s->cat) return;
    int rc = imp_cat_get_history(s->cat, h->segment, &bytes, &n_bytes);
    if (rc == 0 || rc == IMP_E_NOTFOUND) {
        pthread_mutex_lock(h->lock);
        if (rc == 0) (void)decode(h, bytes, n_bytes);
        h->unread = false;
        pthread_mutex_unlock(h->lock);
    } else if (!inside) {
        imp_log(IMP_LOG_DEBUG, "%s: no history: %s", s->dir, imp_last_error());
        imp_enter(s);
        imp_catalogue_failed(s, rc);
        imp_leave(s);
    }
    imp_free(bytes);
}

typedef struct old_errand {
    imp_errand e;
    imp_history *h;
} old_errand;

static int run_old(imp_store *s, imp_errand *e)
{
    if (!imp_catalogue_look(s)) return 0; /* another time */
    read_old(s, ((old_errand *)(void *)e)->h, false);
    pthread_mutex_unlock(&s->cat_lock);
    return 0;
}

static void give_up_old(imp_store *s, imp_errand *e)
{
    imp_history_put(s, ((old_errand *)(void *)e)->h);
}

/* What the catalogue has of a record, if that doesn't take too long: else another time. */
static void read_in_time(imp_store *s, imp_history *h)
{
    imp_kept_line kept;
    imp_error_keep(&kept);
    old_errand *o = imp_calloc(1, sizeof *o);
    if (!o) return;
    o->e = (imp_errand){.run = run_old, .give_up = give_up_old, .what = "reading a history"};
    o->h = h;
    pthread_mutex_lock(&h->all->lock);
    h->n_users++; /* the errand may outlive the caller's use of it */
    pthread_mutex_unlock(&h->all->lock);
    if (imp_errand_do(s, &o->e)) {
        imp_history_put(s, h);
        imp_free(o);
    }
    (void)imp_error_back(&kept, 0);
}

int imp_history_get(imp_store *s, const imp_seg *seg, imp_history **out)
{
    const imp_seg_meta *m = imp_seg_layout_meta(seg->layout);
    imp_histories *t = s->histories;
    pthread_mutex_lock(&t->lock);
    imp_history *h = hold(t, m->segment);
    if (!h) {
        h = record_new(t, m->segment, m->n_layers, m->n_tokens);
        if (h && imp_idmap_put(&t->map, m->segment, h) < 0) {
            record_free(h);
            h = NULL;
        }
        if (h) {
            h->n_users = 1;
            h->unread = !(s->opts.flags & IMP_STORE_MEMORY);
        }
    }
    trim(t);
    pthread_mutex_unlock(&t->lock);
    *out = h;
    if (!h) return imp_fail(IMP_E_NOMEM, "no memory for a history");

    pthread_mutex_lock(h->lock);
    bool unread = h->unread;
    pthread_mutex_unlock(h->lock);
    /* As matches, a load doesn't wait for this process's own change and its disk. */
    if (unread && !atomic_load_explicit(&s->changing, memory_order_relaxed) && !imp_store_hung(s)) read_in_time(s, h);
    return 0;
}

void imp_history_put(imp_store *s, imp_history *h)
{
    if (!h) return;
    imp_histories *t = s->histories;
    pthread_mutex_lock(&t->lock);
    drop(t, h);
    trim(t);
    pthread_mutex_unlock(&t->lock);
    if (atomic_load_explicit(&t->n_dirty, memory_order_relaxed) > 0 &&
        !atomic_exchange_explicit(&t->told, true, memory_order_relaxed)) {
        pthread_mutex_lock(&s->lock);
        pthread_cond_signal(&s->work);
        pthread_mutex_unlock(&s->lock);
    }
}

size_t imp_histories_dirty(imp_store *s)
{
    return s->histories ? atomic_load_explicit(&s->histories->n_dirty, memory_order_relaxed) : 0;
}

/* What goes into the catalogue in one change. */
typedef struct batch {
    imp_history *records[BATCH];
    uint64_t changes[BATCH];
    void *bytes[BATCH];
    size_t n_bytes[BATCH], n, sum;
} batch;

static void gather(imp_store *s, batch *b)
{
    imp_histories *t = s->histories;
    *b = (batch){0};
    pthread_mutex_lock(&t->lock);
    for (size_t i = 0; i < t->map.n_slots && b->n < BATCH; i++) {
        imp_history *h = t->map.slots[i].value;
        if (!h) continue;
        pthread_mutex_lock(h->lock);
        bool dirty = h->dirty;
        pthread_mutex_unlock(h->lock);
        if (dirty) b->records[b->n++] = hold(t, h->segment);
    }
    pthread_mutex_unlock(&t->lock);
}

/* Their bytes. A record that the catalogue can't take is left out, and stays in memory. */
static void encode_batch(imp_store *s, batch *b)
{
    for (size_t i = 0; i < b->n; i++) {
        imp_history *h = b->records[i];
        imp_catalogue_take(s);
        read_old(s, h, false);
        imp_catalogue_give(s);
        pthread_mutex_lock(h->lock);
        b->changes[i] = h->changes;
        int rc = encode(h, &b->bytes[i], &b->n_bytes[i]);
        bool too_much = rc == 0 && b->sum + b->n_bytes[i] > imp_limit(s) / LIMIT_SHARE;
        if (rc == IMP_E_FULL || (too_much && b->sum == 0)) clean(h);
        pthread_mutex_unlock(h->lock);
        if (too_much) {
            imp_free(b->bytes[i]);
            b->bytes[i] = NULL;
        } else if (rc == 0) {
            b->sum += b->n_bytes[i];
        }
    }
}

static int write_batch(imp_store *s, batch *b, bool *written)
{
    imp_evicted evicted = {0};
    *written = false;
    encode_batch(s, b);
    if (b->sum == 0) return 0;
    int rc = imp_change_begin(s);
    if (rc < 0) return rc;
    rc = imp_evict_for(s, 2 * b->sum, 0, &evicted); /* in the file, and in its log */
    /* Copying takes its time, and what is in the tree doesn't change: matches go on. */
    imp_leave(s);
    for (size_t i = 0; rc == 0 && i < b->n; i++) {
        if (b->bytes[i]) rc = imp_cat_put_history(s->cat, b->records[i]->segment, b->bytes[i], b->n_bytes[i]);
    }
    imp_enter(s);
    rc = imp_change_end(s, rc);
    if (rc == 0) imp_count_evicted(s, evicted);
    for (size_t i = 0; i < b->n; i++) {
        imp_history *h = b->records[i];
        if (!b->bytes[i] || (rc < 0 && rc != IMP_E_FULL)) continue; /* full: once is enough */
        pthread_mutex_lock(h->lock);
        if (h->changes == b->changes[i] || rc < 0) clean(h);
        pthread_mutex_unlock(h->lock);
        *written = true;
    }
    return rc;
}

void imp_histories_write(imp_store *s)
{
    imp_histories *t = s->histories;
    if (!t || !t->keeps) return;
    imp_kept_line kept;
    imp_error_keep(&kept);
    atomic_store_explicit(&t->told, false, memory_order_relaxed);
    /* What is added meanwhile is for the next time. */
    size_t n_left = atomic_load_explicit(&t->n_dirty, memory_order_relaxed);
    bool written = true;
    for (int rc = 0; rc == 0 && n_left > 0 && written;) {
        batch b;
        gather(s, &b);
        if (b.n == 0) break;
        rc = write_batch(s, &b, &written);
        if (rc < 0) imp_log(IMP_LOG_INFO, "%s: histories not written: %s", s->dir, imp_last_error());
        n_left = n_left > b.n ? n_left - b.n : 0;
        pthread_mutex_lock(&t->lock);
        for (size_t i = 0; i < b.n; i++) {
            imp_free(b.bytes[i]);
            drop(t, b.records[i]);
        }
        trim(t);
        pthread_mutex_unlock(&t->lock);
    }
    (void)imp_error_back(&kept, 0);
}

/* ---- for a reorder */

/* The first tokens of a record, as a new one's. */
static void copy(imp_history *from, imp_history *to)
{
    for (uint32_t l = 0; l < to->n_layers; l++) {
        to->layers[l].count = from->layers[l].count;
        for (int p = 0; p < N_PARTS; p++) {
            const float *old = from->layers[l].parts[p];
            float *new = old ? part_of(to, l, p) : NULL;
            if (new) memcpy(new, old, to->n_tokens * sizeof *new);
        }
    }
}

/* `from`'s record when it isn't in memory: nobody else knows it. NULL: it has none. */
static imp_history *read_alone(imp_store *s, uint64_t from)
{
    unsigned char *bytes = NULL;
    size_t n_bytes = 0;
    imp_history *h = NULL;
    if (imp_cat_get_history(s->cat, from, (void **)&bytes, &n_bytes) == 0 && n_bytes >= HEAD_BYTES) {
        uint32_t n_layers = imp_get32(bytes + 4), n_tokens = imp_get32(bytes + 8);
        if (n_layers > 0 && n_tokens > 0 && sound(bytes, n_bytes, n_layers, n_tokens)) {
            h = record_new(s->histories, from, n_layers, n_tokens);
        }
        if (h) (void)decode(h, bytes, n_bytes);
    }
    imp_free(bytes);
    return h;
}

void imp_history_hand_over(imp_store *s, uint64_t from, uint64_t to, uint32_t n_tokens)
{
    imp_histories *t = s->histories;
    void *bytes = NULL;
    size_t n_bytes = 0;
    pthread_mutex_lock(&t->lock);
    imp_history *old = hold(t, from), *new = NULL, *alone = NULL;
    pthread_mutex_unlock(&t->lock);
    if (old) {
        read_old(s, old, true);
    } else {
        old = alone = read_alone(s, from);
    }
    if (!old || n_tokens == 0 || n_tokens > old->n_tokens) goto out;
    new = record_new(t, to, old->n_layers, n_tokens);
    if (!new) goto out;
    pthread_mutex_lock(old->lock);
    copy(old, new);
    pthread_mutex_unlock(old->lock);
    if (t->keeps && encode(new, &bytes, &n_bytes) == 0) {
        (void)imp_cat_put_history(s->cat, to, bytes, n_bytes);
        imp_free(bytes);
    }
    pthread_mutex_lock(&t->lock);
    if (imp_idmap_get(&t->map, to) || imp_idmap_put(&t->map, to, new) < 0) {
        record_free(new);
    } else {
        idle_add(t, new);
    }
    trim(t);
    pthread_mutex_unlock(&t->lock);
out:
    if (alone) {
        record_free(alone);
    } else if (old) {
        pthread_mutex_lock(&t->lock);
        drop(t, old);
        pthread_mutex_unlock(&t->lock);
    }
}

size_t imp_history_with_news(imp_store *s, uint32_t least, uint64_t *out, size_t max)
{
    imp_histories *t = s->histories;
    uint32_t news[NEWS_MAX];
    size_t n = 0;
    if (max > NEWS_MAX) max = NEWS_MAX;
    pthread_mutex_lock(&t->lock);
    for (size_t i = 0; i < t->map.n_slots; i++) {
        const imp_history *h = t->map.slots[i].value;
        uint32_t k = h ? imp_history_news(h) : 0;
        if (!h || k < least || max == 0 || (n == max && k <= news[n - 1])) continue;
        size_t at = n < max ? n++ : n - 1;
        for (; at > 0 && news[at - 1] < k; at--) {
            news[at] = news[at - 1];
            out[at] = out[at - 1];
        }
        news[at] = k;
        out[at] = h->segment;
    }
    pthread_mutex_unlock(&t->lock);
    return n;
}
