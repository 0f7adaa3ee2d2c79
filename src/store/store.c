/* store.c: open, close, options, counters. */
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/log.h"
#include "base/opts.h"
#include "base/status.h"
#include "store/store_internal.h"

static const uint64_t default_buffers = 32ull << 20, default_backlog = 1ull << 30;

enum {
    DEFAULT_MIN_STORE = 64,
    DEFAULT_SEGMENT = 2048,
    DEFAULT_CHUNK = 64,
    DEFAULT_PROBE_HEADS = 3,
    DEFAULT_REORDER_S = 600,
    DEFAULT_REORDER_AFTER = 16,
    DEFAULT_READ_DEADLINE_MS = 10000,
    LEAST_LIMIT = 1 << 20
};

static const imp_store_opts defaults = {.struct_bytes = sizeof defaults, .cache = IMP_CACHE_LRU};

/* As it was first released; what is added comes behind. */
static const size_t least_opts_bytes = offsetof(imp_store_opts, cache) + sizeof(imp_cache);

void imp_store_opts_fill(imp_store_opts *opts, size_t struct_bytes)
{
    imp_opts_give(opts, struct_bytes, &defaults, sizeof defaults);
}

void imp_store_opts_switches(imp_store_opts *opts, const imp_switches *switches)
{
    if (!opts || !switches) return;
    opts->order = switches->order;
    opts->rest = switches->rest;
    opts->chunk_tokens = switches->chunk_tokens;
    opts->cache = switches->cache;
    /* A caller of the first version has nothing behind `cache`. */
    if (opts->struct_bytes < offsetof(imp_store_opts, keep) + sizeof opts->keep) return;
    opts->keep = switches->identify == IMP_IDENTIFY_SKETCH  ? IMP_KEEP_SKETCH | IMP_KEEP_PAIRED
                 : switches->identify == IMP_IDENTIFY_PROBE ? IMP_KEEP_PROBE
                                                            : 0;
}

static int fill_options(imp_store_opts *o, const imp_store_opts *given)
{
    *o = defaults;
    int rc = given ? imp_opts_take(o, sizeof *o, least_opts_bytes, given, "imp_store_opts") : 0;
    if (rc < 0) return rc;
    if (o->flags & IMP_STORE_MEMORY) {
        if (o->flags & (IMP_STORE_READONLY | IMP_STORE_MUST_EXIST)) {
            return imp_fail(IMP_E_ARG, "store: there is nothing yet in a store in memory");
        }
        o->limit_bytes = o->host_cache_bytes < UINT64_MAX - o->device_cache_bytes
                             ? o->host_cache_bytes + o->device_cache_bytes
                             : UINT64_MAX;
        if (o->limit_bytes == 0) return imp_fail(IMP_E_ARG, "store: a store in memory needs a budget for a tier");
    }
    if (o->buffer_bytes == 0) o->buffer_bytes = default_buffers;
    if (o->backlog_bytes == 0) o->backlog_bytes = default_backlog;
    if (o->min_store_tokens == 0) o->min_store_tokens = DEFAULT_MIN_STORE;
    if (o->segment_tokens == 0) o->segment_tokens = DEFAULT_SEGMENT;
    if (o->chunk_tokens == 0) o->chunk_tokens = DEFAULT_CHUNK;
    if (o->n_probe_heads == 0) o->n_probe_heads = DEFAULT_PROBE_HEADS;
    if (o->reorder_period_s == 0) o->reorder_period_s = DEFAULT_REORDER_S;
    if (o->reorder_after == 0) o->reorder_after = DEFAULT_REORDER_AFTER;
    if (o->read_deadline_ms == 0) o->read_deadline_ms = DEFAULT_READ_DEADLINE_MS;
    if (o->limit_bytes > 0 && o->limit_bytes < LEAST_LIMIT) {
        return imp_fail(IMP_E_ARG, "store: %s of %llu bytes, must be %d at least",
                        o->flags & IMP_STORE_MEMORY ? "in memory, tiers" : "a limit",
                        (unsigned long long)o->limit_bytes, LEAST_LIMIT);
    }
    if (o->chunk_tokens % 16 != 0 || o->chunk_tokens > 256) {
        return imp_fail(IMP_E_ARG, "store: chunks of %u tokens, must be a multiple of 16, 16 to 256", o->chunk_tokens);
    }
    if (o->segment_tokens > 1u << 20) {
        return imp_fail(IMP_E_ARG, "store: segments of %u tokens, must be 1048576 at most", o->segment_tokens);
    }
    if ((unsigned)o->rest > IMP_REST_Q4) return imp_fail(IMP_E_ARG, "store: no such encoding: %d", (int)o->rest);
    if ((unsigned)o->order > IMP_ORDER_CORE) return imp_fail(IMP_E_ARG, "store: no such order: %d", (int)o->order);
    if ((unsigned)o->cache >= IMP_CACHE_OF_STORE) {
        return imp_fail(IMP_E_ARG, "store: no such cache: %d", (int)o->cache);
    }
    if (o->keep & ~(IMP_KEEP_SKETCH | IMP_KEEP_PROBE | IMP_KEEP_PAIRED)) {
        return imp_fail(IMP_E_ARG, "store: unknown things to keep: 0x%x", o->keep);
    }
    if (o->space_percent > 100) {
        return imp_fail(IMP_E_ARG, "store: a space's share of %u per cent, must be 100 at most", o->space_percent);
    }
    if (o->probe_spread > 1) return imp_fail(IMP_E_ARG, "store: probe_spread is %u, must be 0 or 1", o->probe_spread);
    if (o->flags & ~(IMP_STORE_READONLY | IMP_STORE_NO_DIRECT | IMP_STORE_MUST_EXIST | IMP_STORE_MEMORY)) {
        return imp_fail(IMP_E_ARG, "store: unknown flags 0x%x", o->flags);
    }
    return 0;
}

static int make_sync(imp_store *s)
{
    pthread_condattr_t clock;
    int err = pthread_mutex_init(&s->cat_lock, NULL);
    if (err == 0) err = pthread_mutex_init(&s->lock, NULL);
    if (err == 0) err = pthread_condattr_init(&clock);
    if (err == 0) {
        err = pthread_condattr_setclock(&clock, CLOCK_MONOTONIC); /* of imp_now_ns() */
        if (err == 0) err = pthread_cond_init(&s->work, &clock);
        (void)pthread_condattr_destroy(&clock);
    }
    if (err == 0) err = pthread_cond_init(&s->done, NULL);
    return err ? imp_fail_errno(err, "store: no mutex") : 0;
}

/* A catalogue, and nothing left of killed processes. */
static int recover(imp_store *s)
{
    imp_leftovers left = {0};
    imp_lock_both(s);
    int rc = imp_catalogue_have(s, true);
    /* A disk that refuses is no reason not to start; but whoever insists on a store that is there wants to see it. */
    bool insists = !s->readonly && (s->opts.flags & IMP_STORE_MUST_EXIST);
    bool faulty = (rc == IMP_E_FULL || rc == IMP_E_IO || rc == IMP_E_CORRUPT) && !s->readonly;
    if ((rc == IMP_E_BUSY || (rc == IMP_E_CORRUPT && s->readonly) || faulty) && !insists) {
        imp_log(IMP_LOG_WARN, "%s: going on without what is stored: %s", s->dir, imp_last_error());
        rc = 0;
    }
    bool have = s->cat != NULL;
    imp_unlock_both(s);
    if (rc < 0 || !have || s->readonly) return rc;

    int failed = imp_recover(s, s->alone, &left);
    if (failed == IMP_E_NOMEM) rc = failed;
    if (failed < 0) imp_log(IMP_LOG_WARN, "%s: leftovers not removed: %s", s->dir, imp_last_error());
    if (left.n_files) {
        imp_log(IMP_LOG_INFO, "%s: %llu leftovers of killed processes removed", s->dir,
                (unsigned long long)left.n_files);
    }
    if (!s->alone) return rc;
    if (rc == 0 && left.n_orphans > 0) {
        /* Written and synced, and then the process was killed or the catalogue lost its last changes. */
        imp_log(IMP_LOG_INFO, "%s: %llu segments are not in the catalogue", s->dir, (unsigned long long)left.n_orphans);
        imp_lock_both(s);
        rc = imp_catalogue_again(s);
        imp_unlock_both(s);
    }
    imp_rebuild_sweep(s);
    (void)imp_dir_lock(s, IMP_LOCK_SHARED, false);
    s->alone = false;
    return rc;
}

static void free_store(imp_store *s)
{
    if (!s) return;
    imp_writer_stop(s);
    if (s->attached) s->attached_free(s->attached);
    s->attached = NULL;
    imp_segs_close(s);
    imp_bases_free(s);
    imp_histories_free(s);
    imp_errands_free(s);
    imp_cat_close(s->cat);
    imp_forest_free(&s->forest);
    imp_io_free(s->io);
    imp_dir_close(s);
    imp_key_free(s->key);
    imp_free(s->doomed);
    imp_free(s->emptied);
    imp_free(s->steps);
    pthread_cond_destroy(&s->done);
    pthread_cond_destroy(&s->work);
    pthread_mutex_destroy(&s->lock);
    pthread_mutex_destroy(&s->cat_lock);
    imp_free(s);
}

static int new_store(const imp_store_opts *given, imp_store **out)
{
    imp_store_opts opts;
    int rc = fill_options(&opts, given);
    if (rc < 0) return rc;
    imp_store *s = imp_calloc(1, sizeof *s);
    if (!s) return imp_fail(IMP_E_NOMEM, "no memory for a store");
    s->dir_fd = s->lock_fd = s->live_fd = -1;
    s->first_new = UINT64_MAX;
    s->pid = getpid();
    s->opts = opts;
    s->own_chunks = !given || given->chunk_tokens == 0;
    s->readonly = opts.flags & IMP_STORE_READONLY;
    if (!s->readonly) atomic_init(&s->limit_bytes, opts.limit_bytes);
    if (!(opts.flags & (IMP_STORE_READONLY | IMP_STORE_MEMORY))) s->limit_owed = opts.limit_bytes;
    imp_rng_seed_os(&s->rng);
    rc = make_sync(s);
    if (rc < 0) {
        imp_free(s);
        return rc;
    }
    rc = imp_histories_new(s);
    if (rc == 0) rc = imp_bases_new(s);
    if (rc == 0) rc = imp_errands_new(s);
    if (rc == 0 && opts.key_file && !(opts.flags & IMP_STORE_MEMORY)) rc = imp_key_read(opts.key_file, &s->key);
    s->opts.key_file = NULL; /* the caller's */
    if (rc < 0) {
        free_store(s);
        return rc;
    }
    *out = s;
    return 0;
}

static int open_store(const char *dir, const imp_store_opts *opts, imp_store **out)
{
    imp_dir_made made = IMP_DIR_STORE;
    imp_store *s = NULL;
    int rc = new_store(opts, &s);
    if (rc < 0) return rc;
    rc = imp_dir_open(s, dir, &made);
    if (rc == 0) rc = imp_io_new(s->dir, s->opts.io_mode, s->opts.flags, s->opts.read_bytes_per_s, &s->io);
    if (rc == 0 && s->opts.read_deadline_ms != UINT32_MAX)
        imp_io_set_deadline(s->io, (uint64_t)s->opts.read_deadline_ms * 1000000u);
    if (rc == 0) rc = imp_dir_check_key(s);
    if (rc == 0 && !s->readonly) {
        rc = imp_dir_live_make(s);
        if (rc == IMP_E_FULL && imp_ballast_give(s)) rc = imp_dir_live_make(s);
    }
    if (rc == 0) rc = recover(s);
    /* Who names none changes nothing by opening, whatever the store's limit is. */
    bool limited = s->opts.limit_bytes > 0, expires = s->opts.ttl_s > 0;
    bool on_disk = !s->readonly && !(s->opts.flags & IMP_STORE_MEMORY);
    if (rc == 0 && on_disk && limited) rc = imp_evict_at_open(s);
    else if (rc == 0 && on_disk && expires) imp_expire(s);
    if (rc == 0 && !s->readonly) rc = imp_writer_start(s);
    if (rc == 0) {
        if (limited || expires) atomic_store_explicit(&s->may_ballast, true, memory_order_relaxed);
        imp_ballast_take(s);
        *out = s;
        return 0;
    }
    imp_cat_close(s->cat);
    s->cat = NULL;
    imp_dir_unmake(s, made);
    free_store(s);
    return rc;
}

int imp_store_open(const char *dir, const imp_store_opts *opts, imp_store **out)
{
    if (out) *out = NULL;
    bool needs_dir = !opts || !(opts->flags & IMP_STORE_MEMORY);
    if (!out || (needs_dir && (!dir || !*dir))) {
        return imp_fail(IMP_E_ARG, "imp_store_open: no directory named, or result missing");
    }
    imp_kept_line kept;
    imp_error_keep(&kept);
    return imp_error_back(&kept, open_store(dir, opts, out));
}

/* Uses, and a reservation whose file was given up. Advisory: what can't be written is lost. */
static void last_words(imp_store *s)
{
    pthread_mutex_lock(&s->lock);
    bool needed = s->cat && (s->n_used > 0 || s->reserved);
    pthread_mutex_unlock(&s->lock);
    if (!needed || s->readonly || imp_change_begin(s) < 0) return;
    int rc = imp_edit_unreserve(s);
    if (rc == 0) rc = imp_edit_uses(s);
    if (imp_change_end(s, rc) < 0) imp_log(IMP_LOG_INFO, "%s: %s", s->dir, imp_last_error());
}

static void close_store(imp_store *s)
{
    imp_writer_stop(s);
    imp_histories_write(s);
    last_words(s);
    free_store(s);
}

void imp_store_close(imp_store *s)
{
    /* A fork has none of the store's threads, and its files are the parent's. */
    if (!s || s->pid != getpid()) return;
    imp_kept_line kept;
    imp_error_keep(&kept);
    if (imp_errands_end(s, close_store)) close_store(s);
    (void)imp_error_back(&kept, 0);
}

/* The forest as the old catalogue has it, where that can be read: its pins stay. Nobody else knows `s`. */
static void read_old_catalogue(imp_store *s)
{
    if (imp_cat_open(s->dir, IMP_STORE_READONLY, &s->cat) < 0) return;
    imp_cat_use_key(s->cat, s->key);
    s->reload = true;
    if (imp_forest_refresh(s) < 0) imp_log(IMP_LOG_INFO, "%s: pins are lost: %s", s->dir, imp_last_error());
    imp_cat_close(s->cat);
    s->cat = NULL;
}

int imp_store_rebuild(const char *dir) { return imp_store_rebuild_key(dir, NULL); }

int imp_store_rebuild_key(const char *dir, const char *key_file)
{
    imp_dir_made made;
    imp_store *s = NULL;
    imp_store_opts opts = defaults;
    if (!dir || !*dir) return imp_fail(IMP_E_ARG, "imp_store_rebuild: no directory named");
    imp_kept_line kept;
    imp_error_keep(&kept);
    opts.flags = IMP_STORE_MUST_EXIST;
    opts.key_file = key_file;
    int rc = new_store(&opts, &s);
    if (rc < 0) return rc;
    rc = imp_dir_open(s, dir, &made);
    if (rc == 0) rc = imp_io_new(s->dir, s->opts.io_mode, s->opts.flags, 0, &s->io);
    if (rc == 0) rc = imp_dir_check_key(s);
    if (rc == 0) rc = imp_dir_lock(s, IMP_LOCK_ALONE, false);
    if (rc == 0) read_old_catalogue(s);
    if (rc == 0) rc = imp_rebuild(s); /* nobody else knows `s` */
    free_store(s);
    return imp_error_back(&kept, rc);
}

/* ---- for higher modules */

imp_io *imp_store_io(imp_store *s) { return s->io; }

const imp_store_opts *imp_store_options(const imp_store *s) { return &s->opts; }

void imp_store_count_acquire(imp_store *s, size_t n_matched)
{
    pthread_mutex_lock(&s->lock);
    s->count.acquires++;
    s->count.hits += n_matched > 0;
    s->count.hit_tokens += n_matched;
    pthread_mutex_unlock(&s->lock);
}

void imp_store_count_tier_hits(imp_store *s, uint64_t host_bytes, uint64_t device_bytes)
{
    pthread_mutex_lock(&s->lock);
    s->count.host_hit_bytes += host_bytes;
    s->count.device_hit_bytes += device_bytes;
    pthread_mutex_unlock(&s->lock);
}

void imp_store_set_tier_bytes(imp_store *s, uint64_t host_bytes, uint64_t device_bytes)
{
    pthread_mutex_lock(&s->lock);
    s->count.host_bytes = host_bytes;
    s->count.device_bytes = device_bytes;
    pthread_mutex_unlock(&s->lock);
}

void imp_store_attach(imp_store *s, void *object, void (*free_fn)(void *object),
                      void (*gone_fn)(void *object, uint64_t segment))
{
    pthread_mutex_lock(&s->lock);
    s->attached = object;
    s->attached_free = free_fn;
    s->attached_gone = gone_fn;
    pthread_mutex_unlock(&s->lock);
}

void *imp_store_attached(imp_store *s) { return s->attached; }
