/* changes.c: having a catalogue, losing it, and changing it. */
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "store/store_internal.h"

static const uint64_t retry_ns = 1000000000u, default_limit = 10ull << 30;

/* The catalogue's log: its share of the limit, and what that is at least (some changes) and at most (where SQLite begins
 * it anew by itself). How long its readers are waited for, while it is somewhat too large and while it is much too
 * large; and how many times its bound it may be when new entries come. */
enum {
    LOG_SHARE = 16,
    LOG_LEAST = 64 << 10,
    LOG_MOST = 4 << 20,
    LOG_WAIT_MS = 100,
    LOG_LONG_WAIT_MS = 500,
    LOG_TIMES = 4,
    BARE_AT_ONCE = 64,
    EMPTIED_MOST = 4096
};

/* ---- `lock`, with cat_lock held */

void imp_enter(imp_store *s)
{
    pthread_mutex_lock(&s->lock);
    s->entered = true;
}

void imp_leave(imp_store *s)
{
    s->entered = false;
    pthread_mutex_unlock(&s->lock);
}

static void before_disk(void *user)
{
    imp_store *s = user;
    if (s->entered) pthread_mutex_unlock(&s->lock);
}

static void after_disk(void *user)
{
    imp_store *s = user;
    if (s->entered) pthread_mutex_lock(&s->lock);
}

static void tell_busy(void *user)
{
    imp_store *s = user;
    atomic_store_explicit(&s->busy_ns, imp_now_ns(), memory_order_relaxed);
}

void imp_lock_both(imp_store *s)
{
    pthread_mutex_lock(&s->cat_lock);
    imp_enter(s);
}

void imp_unlock_both(imp_store *s)
{
    imp_leave(s);
    pthread_mutex_unlock(&s->cat_lock);
}

static void set_changing(imp_store *s, bool changing)
{
    atomic_store_explicit(&s->changing, changing, memory_order_relaxed);
}

void imp_catalogue_take(imp_store *s)
{
    pthread_mutex_lock(&s->cat_lock);
    set_changing(s, true);
}

void imp_catalogue_give(imp_store *s)
{
    set_changing(s, false);
    pthread_mutex_unlock(&s->cat_lock);
}

/* ---- */

static void let_go(imp_store *s)
{
    imp_cat *cat = s->cat;
    if (!cat) return;
    s->cat = NULL;
    imp_cat_around(cat, NULL, NULL, NULL, NULL); /* the calls inside of the close are inside of these */
    before_disk(s);
    imp_cat_close(cat);
    after_disk(s);
}

static int any_segment(const char *name, uint64_t disk_bytes, void *user)
{
    uint64_t id;
    (void)disk_bytes;
    (void)user;
    return imp_seg_name_parse(name, &id) ? 1 : 0;
}

/* ---- the limit */

uint64_t imp_limit(const imp_store *s)
{
    /* Relaxed: a number by itself, which others may have changed a moment ago in any case. */
    uint64_t n_bytes = atomic_load_explicit(&s->limit_bytes, memory_order_relaxed);
    return n_bytes ? n_bytes : default_limit;
}

/* ---- the catalogue */

static int open_found(const imp_store *s, imp_cat **cat)
{
    /* A new catalogue beside old segments is a lost one. With the catalogue made first, this can't be a store that
     * another process is just making. */
    bool found = imp_dir_has_catalogue(s);
    int rc = found ? 0 : imp_io_list(s->io, "segments", any_segment, NULL);
    if (rc == 1) return imp_fail(IMP_E_CORRUPT, "%s: the catalogue is missing", s->dir);
    if (rc < 0 && rc != IMP_E_NOTFOUND) return rc;
    return imp_cat_open(s->dir, s->opts.flags, cat);
}

/* Open what is there and read it. */
static int open_and_read(imp_store *s)
{
    imp_cat *cat = NULL;
    before_disk(s);
    int rc = open_found(s, &cat);
    after_disk(s);
    if (rc < 0) return rc;
    s->cat = cat;
    imp_cat_use_key(s->cat, s->key);
    imp_cat_around(s->cat, before_disk, after_disk, tell_busy, s);
    s->reload = true;
    rc = imp_forest_refresh(s);
    if (rc < 0) let_go(s);
    else s->without = false;
    bool writes = !s->readonly && !(s->opts.flags & IMP_STORE_MEMORY);
    /* One that was made again has no limit any more: whoever knows it gives it back. */
    if (rc == 0 && writes && s->limit_owed == 0 && imp_cat_limit(s->cat) == 0) {
        s->limit_owed = atomic_load_explicit(&s->limit_bytes, memory_order_relaxed);
    }
    return rc;
}

static void forget(imp_store *s)
{
    for (size_t i = 0; i < s->forest.segs.n_slots; i++) {
        const imp_segrow *seg = s->forest.segs.slots[i].value;
        if (seg) imp_segs_gone(s, seg->id);
    }
    for (size_t i = 0; i < s->forest.n_trees; i++) imp_bases_forget(s, s->forest.trees[i].space);
    imp_forest_free(&s->forest);
    s->epoch++;
    s->first_new = UINT64_MAX;
    s->reload = true;
}

static int lock_dir(imp_store *s, int how, bool wait)
{
    before_disk(s);
    int rc = imp_dir_lock(s, how, wait);
    after_disk(s);
    return rc;
}

static bool give_ballast(imp_store *s)
{
    before_disk(s);
    bool given = imp_ballast_give(s);
    after_disk(s);
    return given;
}

static int have(imp_store *s, bool first)
{
    if (!first) {
        bool moved;
        before_disk(s);
        int failed = imp_dir_follow(s, &moved);
        after_disk(s);
        if (moved) forget(s);
        if (failed < 0) {
            imp_fault_note(s, IMP_FAULT_CATALOGUE, failed);
            return failed;
        }
    }
    bool alone = !s->readonly && lock_dir(s, IMP_LOCK_ALONE, false) == 0;
    int rc = alone ? 0 : lock_dir(s, IMP_LOCK_SHARED, first);
    if (rc < 0) return rc;

    rc = open_and_read(s);
    if (rc == IMP_E_FULL && give_ballast(s)) rc = open_and_read(s);
    if (rc == IMP_E_CORRUPT && alone) {
        imp_log(IMP_LOG_WARN, "%s: making the catalogue again from the segments: %s", s->dir, imp_last_error());
        rc = imp_rebuild(s);
        if (rc == IMP_E_FULL && give_ballast(s)) rc = imp_rebuild(s);
        if (rc == 0) rc = open_and_read(s);
    } else if (rc == IMP_E_CORRUPT && !s->readonly) {
        rc = imp_fail(IMP_E_BUSY, "%s: the catalogue is damaged, and another process has it open", s->dir);
    }
    if (rc < 0) {
        imp_fault_note(s, IMP_FAULT_CATALOGUE, rc);
        (void)lock_dir(s, IMP_LOCK_NONE, false);
        return rc;
    }
    imp_fault_over(s, IMP_FAULT_CATALOGUE);
    s->alone = alone && first;
    if (alone && !first) (void)lock_dir(s, IMP_LOCK_SHARED, false);
    return 0;
}

int imp_catalogue_have(imp_store *s, bool first)
{
    if (s->cat) return 0;
    /* That may take long, and matches don't wait for it. */
    bool was = atomic_load_explicit(&s->changing, memory_order_relaxed);
    set_changing(s, true);
    int rc = have(s, first);
    s->without = rc < 0;
    set_changing(s, was);
    return rc;
}

int imp_catalogue_again(imp_store *s)
{
    let_go(s);
    s->renumbered = true;
    int rc = imp_rebuild(s);
    return rc == 0 ? open_and_read(s) : rc;
}

/* Without a catalogue: find another one, or do without what is stored. */
static int find_another(imp_store *s)
{
    (void)lock_dir(s, IMP_LOCK_NONE, false);
    s->renumbered = true; /* whoever makes another one numbers the nodes anew */
    int rc = imp_catalogue_have(s, false);
    if (rc == 0) return 0;
    imp_log(IMP_LOG_WARN, "%s: going on without what is stored: %s", s->dir, imp_last_error());
    forget(s);
    s->cat_retry_ns = imp_now_ns() + retry_ns;
    return rc;
}

void imp_catalogue_failed(imp_store *s, int rc)
{
    imp_fault_note(s, IMP_FAULT_CATALOGUE, rc);
    if (!s->cat || (rc != IMP_E_CORRUPT && rc != IMP_E_STALE && rc != IMP_E_VERSION)) return;
    imp_log(IMP_LOG_WARN, "%s: the catalogue can't be used any more: %s", s->dir, imp_last_error());
    let_go(s);
    (void)find_another(s);
}

int imp_catalogue_repair(imp_store *s)
{
    int rc = lock_dir(s, IMP_LOCK_ALONE, false);
    if (rc == 0) {
        rc = imp_catalogue_again(s);
        (void)lock_dir(s, IMP_LOCK_SHARED, false);
        if (rc == 0) return 0;
    }
    imp_log(IMP_LOG_WARN, "%s: the catalogue isn't repaired: %s", s->dir, imp_last_error());
    /* The try for the one lock may have lost the other. */
    if (s->cat) let_go(s);
    return find_another(s);
}

int imp_catalogue_refresh(imp_store *s)
{
    int rc;
    if (!s->cat) {
        if (imp_now_ns() < s->cat_retry_ns) return imp_fail(IMP_E_BUSY, "%s: the catalogue can't be had now", s->dir);
        rc = imp_catalogue_have(s, false);
        if (rc < 0) s->cat_retry_ns = imp_now_ns() + retry_ns;
        return rc;
    }
    rc = imp_forest_refresh(s);
    if (rc < 0) {
        imp_catalogue_failed(s, rc);
        if ((rc == IMP_E_CORRUPT || rc == IMP_E_STALE) && s->cat) rc = 0; /* a new one, just read */
    }
    return rc;
}

bool imp_catalogue_untouched(imp_store *s)
{
    if (!s->cat) return imp_now_ns() < s->cat_retry_ns;
    return !s->reload && imp_cat_untouched(s->cat);
}

/* ---- the catalogue's log */

uint64_t imp_catalogue_log_bound(const imp_store *s)
{
    uint64_t share = imp_limit(s) / LOG_SHARE;
    if (s->opts.flags & IMP_STORE_MEMORY) return 0;
    return share < LOG_LEAST ? LOG_LEAST : share < LOG_MOST ? share : LOG_MOST;
}

/* With cat_lock held, outside of a change: empty a log that is larger than its bound. Nobody writes while its readers are
 * waited for; so after a wait in vain, the next one comes when there is more of it, or after a while. */
static int trim_log(imp_store *s)
{
    uint64_t bound = imp_catalogue_log_bound(s), n = imp_dir_log_bytes(s), now_ns;
    if (!s->cat || n <= bound) return 0;
    now_ns = imp_now_ns();
    if (n >= s->log_failed_bytes && n - s->log_failed_bytes < bound && now_ns - s->log_failed_ns < retry_ns) {
        return IMP_E_BUSY;
    }
    int rc = imp_cat_checkpoint(s->cat, n > 2 * bound ? LOG_LONG_WAIT_MS : LOG_WAIT_MS);
    s->log_failed_bytes = rc < 0 ? n : 0;
    s->log_failed_ns = rc < 0 ? imp_now_ns() : 0;
    return rc;
}

int imp_catalogue_log_ready(imp_store *s)
{
    uint64_t most = LOG_TIMES * imp_catalogue_log_bound(s);
    if (imp_dir_log_bytes(s) <= most) return 0;
    imp_catalogue_take(s);
    (void)trim_log(s);
    imp_catalogue_give(s);
    if (imp_dir_log_bytes(s) <= most) return 0;
    return imp_fail(IMP_E_BUSY, "%s: the catalogue's log is too large, and somebody is reading it", s->dir);
}

/* ---- changes */

int imp_change_begin(imp_store *s)
{
    imp_catalogue_take(s);
    int rc = IMP_E_BUSY;
    for (int tries = 0; tries < 2; tries++) {
        /* The wait for other processes' changes is inside begin: without `lock`, so that matches go on. */
        rc = s->cat ? imp_cat_begin(s->cat) : IMP_E_BUSY;
        bool begun = rc == 0;
        imp_enter(s);
        if (begun) rc = imp_forest_refresh(s);
        bool owes = begun && rc == 0 && s->limit_owed && s->limit_owed != imp_cat_limit(s->cat);
        if (owes) rc = imp_cat_put_limit(s->cat, s->limit_owed);
        if (begun && rc == 0) {
            s->first_new = imp_cat_next_node(s->cat);
            s->n_emptied_before = s->n_emptied;
            s->reserved_before = s->reserved;
            s->reorder_reserved_before = s->reorder_reserved;
            return 0;
        }
        if (begun) imp_cat_rollback(s->cat);
        bool room = rc == IMP_E_FULL && give_ballast(s);
        if (s->cat) {
            imp_catalogue_failed(s, rc);
        } else {
            rc = imp_catalogue_refresh(s);
        }
        bool again = s->cat && (rc == 0 || rc == IMP_E_CORRUPT || rc == IMP_E_STALE || room);
        if (again && rc == 0) rc = imp_fail(IMP_E_BUSY, "%s: the catalogue is being replaced", s->dir);
        imp_leave(s);
        if (!again) break;
    }
    imp_catalogue_give(s);
    return rc;
}

int imp_change_doom(imp_store *s, uint64_t segment)
{
    if (s->n_doomed == s->doomed_cap) {
        size_t cap = s->doomed_cap ? s->doomed_cap * 2 : 16;
        uint64_t *doomed = imp_realloc_array(s->doomed, cap, sizeof *doomed);
        if (!doomed) return imp_fail(IMP_E_NOMEM, "no memory to remove a segment");
        s->doomed = doomed;
        s->doomed_cap = cap;
    }
    s->doomed[s->n_doomed++] = segment;
    return 0;
}

static int note_emptied(imp_store *s, imp_hash128 space)
{
    if (s->n_emptied == s->emptied_cap) {
        size_t cap = s->emptied_cap ? s->emptied_cap * 2 : 16;
        imp_hash128 *emptied = imp_realloc_array(s->emptied, cap, sizeof *emptied);
        if (!emptied) return imp_fail(IMP_E_NOMEM, "no memory to remove a space");
        s->emptied = emptied;
        s->emptied_cap = cap;
    }
    s->emptied[s->n_emptied++] = space;
    return 0;
}

static bool is_noted(const imp_tree *tree, void *user)
{
    const imp_store *s = user;
    size_t i = s->n_emptied_before;
    while (i < s->n_emptied && !imp_hash128_equal(s->emptied[i], tree->space)) i++;
    return i < s->n_emptied;
}

/* A space goes with its last segment. Former versions kept them: these don't go all at once, so that no change becomes
 * much larger by them. */
static int remove_bare(imp_store *s)
{
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < s->forest.n_trees && s->n_emptied - s->n_emptied_before < BARE_AT_ONCE; i++) {
        imp_hash128 space = s->forest.trees[i].space;
        if (s->forest.trees[i].n_segs > 0) continue;
        rc = note_emptied(s, space);
        if (rc == 0) rc = imp_cat_remove_space(s->cat, space);
    }
    if (rc == 0) imp_forest_drop_bare(&s->forest, is_noted, s);
    return rc;
}

/* And its bases go with it: in a transaction of their own, since another process may have stored an entry of it since the
 * change, and not those that the writer is just about to use. What can't be done now is done after the next change. With
 * cat_lock held, but not `lock`. */
static void remove_bases(imp_store *s)
{
    if (s->n_emptied == 0) return;
    imp_kept_line kept;
    imp_error_keep(&kept);
    if (s->cat && imp_cat_begin(s->cat) == 0) {
        imp_enter(s);
        int rc = imp_forest_refresh(s);
        for (size_t i = 0; rc == 0 && i < s->n_emptied; i++) {
            imp_hash128 space = s->emptied[i];
            if (imp_forest_tree(&s->forest, space)) continue;
            if (s->storing && imp_hash128_equal(*s->storing, space)) continue;
            imp_leave(s);
            imp_bases_remove(s, space);
            imp_enter(s);
        }
        if (rc == 0) s->n_emptied = 0;
        imp_leave(s);
        imp_cat_rollback(s->cat);
    }
    if (s->n_emptied > EMPTIED_MOST) s->n_emptied = 0; /* leftovers: opening the store takes them */
    (void)imp_error_back(&kept, 0);
}

void imp_space_stored(imp_store *s, imp_hash128 space)
{
    pthread_mutex_lock(&s->lock);
    bool none = !imp_forest_tree(&s->forest, space);
    s->storing = NULL;
    pthread_mutex_unlock(&s->lock);
    if (!none) return;
    imp_kept_line kept;
    imp_error_keep(&kept);
    imp_catalogue_take(s);
    if (note_emptied(s, space) == 0) remove_bases(s);
    imp_catalogue_give(s);
    (void)imp_error_back(&kept, 0);
}

/* The change is made, whatever comes of this. */
static void after_commit(imp_store *s)
{
    imp_kept_line kept;
    imp_error_keep(&kept);
    int rc = trim_log(s);
    if (rc < 0 && rc != IMP_E_BUSY) {
        pthread_mutex_lock(&s->lock);
        imp_fault_note(s, IMP_FAULT_CATALOGUE, rc);
        pthread_mutex_unlock(&s->lock);
    }
    (void)imp_error_back(&kept, 0);
}

int imp_change_end(imp_store *s, int rc)
{
    if (rc == 0 && s->forest.n_bare > 0) rc = remove_bare(s);
    bool edited = rc == 0;
    imp_leave(s);
    if (edited) {
        rc = imp_cat_commit(s->cat);
    } else {
        imp_cat_rollback(s->cat);
    }
    imp_enter(s);
    if (rc == 0) {
        if (s->generation != imp_cat_generation(s->cat)) imp_fault_over(s, IMP_FAULT_CATALOGUE);
        s->generation = imp_cat_generation(s->cat);
        s->first_new = UINT64_MAX;
        s->limit_owed = 0;
    } else {
        s->reload = true; /* the forest has edits that the catalogue hasn't */
        s->n_doomed = 0;
        s->n_emptied = s->n_emptied_before;
        s->reserved = s->reserved_before;
        s->reorder_reserved = s->reorder_reserved_before;
        /* Not what is the tokens' fault, or the limit's. */
        if (edited || rc == IMP_E_CORRUPT || imp_cat_failure(s->cat) < 0) imp_catalogue_failed(s, rc);
    }
    imp_leave(s);
    imp_segs_sweep(s); /* first, so that the room is there once the name is gone */
    for (size_t i = 0; i < s->n_doomed; i++) {
        char name[32];
        imp_seg_name(s->doomed[i], name);
        /* What can't be removed is a leftover; the next open takes it. */
        int failed = imp_io_unlink(s->io, name);
        if (failed < 0 && failed != IMP_E_NOTFOUND) imp_log(IMP_LOG_WARN, "%s", imp_last_error());
    }
    s->n_doomed = 0;
    remove_bases(s);
    if (rc == 0) after_commit(s);
    imp_catalogue_give(s);
    return rc;
}
