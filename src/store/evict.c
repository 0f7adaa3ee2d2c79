/* evict.c: the size limit, the shares of spaces, and the age of entries. Leaves go, those unused for longest first; a
 * segment's bytes are free once its last node is gone. What was used often counts as used a while later (radix.h).
 *
 * Where spaces have shares (imp_store_opts.space_percent), room is taken from the space that holds most at that moment,
 * the new entry counted with its own. So whoever floods the store soon holds most, and drives out nothing but its own. */
#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "store/store_internal.h"

enum {
    GROWTH_BYTES = 256 * 1024, /* of the catalogue until the next look */
    USES_EVERY_S = 10,
    EXPIRY_MOST_S = 60,
    OLD_AT_ONCE = 256
};

/* What a space holds; known only where spaces have shares. */
static void count_spaces(imp_store *s)
{
    for (size_t i = 0; i < s->forest.n_trees; i++) s->forest.trees[i].bytes = 0;
    for (size_t i = 0; i < s->forest.segs.n_slots; i++) {
        const imp_segrow *row = s->forest.segs.slots[i].value;
        imp_tree *tree = row ? imp_forest_tree(&s->forest, row->space) : NULL;
        if (tree) tree->bytes += row->disk_bytes;
    }
}

static bool goes_before(const imp_radix_node *a, const imp_radix_node *b)
{
    int64_t a_s = imp_radix_worth_s(a), b_s = imp_radix_worth_s(b);
    return a_s < b_s || (a_s == b_s && a->depth > b->depth);
}

/* The next leaf to go: the best of the trees' victims, or that of the space that holds most; `from` gets `more` bytes
 * on top of what it holds (NULL: none does). */
static imp_radix_node *victim(imp_store *s, const imp_tree *from, uint64_t more, imp_tree **tree)
{
    imp_radix_node *best = NULL;
    uint64_t most = 0;
    for (size_t i = 0; i < s->forest.n_trees; i++) {
        imp_tree *t = &s->forest.trees[i];
        imp_radix_node *n = imp_radix_victim(t->radix);
        if (!n) continue;
        uint64_t bytes = s->opts.space_percent ? t->bytes + (t == from ? more : 0) : 0;
        if (best && (bytes < most || (bytes == most && !goes_before(n, best)))) continue;
        best = n;
        most = bytes;
        *tree = t;
    }
    return best;
}

static void hold(imp_store *s, uint64_t id, bool on)
{
    imp_tree *tree;
    imp_radix_node *n = id ? imp_forest_node(&s->forest, id, &tree) : NULL;
    if (!n) return;
    n->leases = on ? n->leases + 1 : n->leases - 1;
    imp_radix_touch(tree->radix, n);
}

/* What counts against the limit besides the segments, with `bytes` more. */
static int other_bytes(imp_store *s, uint64_t bytes, uint64_t *out)
{
    uint64_t segment_bytes, reserved_bytes;
    int rc = imp_cat_totals(s->cat, &segment_bytes, &reserved_bytes);
    if (rc < 0) return rc;
    imp_leave(s); /* the disk is asked */
    *out = reserved_bytes + imp_dir_counted_bytes(s) + imp_ballast_missing(s) + bytes + GROWTH_BYTES;
    imp_enter(s);
    return 0;
}

int imp_evict_not_needed(imp_store *s, uint64_t bytes, bool *fits)
{
    uint64_t fixed = 0;
    int rc = other_bytes(s, bytes, &fixed);
    *fits = rc == 0 && s->forest.seg_bytes + fixed <= imp_limit(s);
    return rc;
}

/* What other processes use isn't old. */
static int read_uses(imp_store *s, int64_t now_s)
{
    if (now_s - s->uses_read_s < USES_EVERY_S && now_s >= s->uses_read_s) return 0;
    s->uses_read_s = now_s;
    return imp_forest_read_uses(s, &s->forest);
}

static int remove_victim(imp_store *s, imp_tree *tree, uint64_t id, imp_evicted *out)
{
    uint64_t before = s->forest.seg_bytes;
    int rc = imp_edit_remove_leaf(s, tree, id);
    if (rc < 0) return rc;
    tree->bytes -= before - s->forest.seg_bytes;
    out->nodes++;
    out->bytes += before - s->forest.seg_bytes;
    return 0;
}

/* Leaves of one tree that nobody used since `before_s`. Those used often aren't the next victims: all are looked at. */
typedef struct old_leaves {
    int64_t before_s;
    uint64_t ids[OLD_AT_ONCE];
    size_t n;
} old_leaves;

static bool is_old(const imp_radix_node *n, int64_t before_s)
{
    return n->n_children == 0 && n->leases == 0 && !n->pinned && n->used_s < before_s;
}

static int note_old(imp_radix_node *n, void *user)
{
    old_leaves *old = user;
    if (!is_old(n, old->before_s)) return 0;
    old->ids[old->n++] = n->id;
    return old->n == OLD_AT_ONCE;
}

/* Leaves unused for longer than entries may be. */
static int expire(imp_store *s, imp_evicted *out)
{
    int64_t now_s = imp_uses_now(s);
    int rc = read_uses(s, now_s);
    for (size_t i = 0; rc == 0 && i < s->forest.n_trees; i++) {
        imp_tree *tree = &s->forest.trees[i];
        old_leaves old = {.before_s = now_s - s->opts.ttl_s};
        do {
            old.n = 0;
            (void)imp_radix_walk(tree->radix, note_old, &old);
            for (size_t j = 0; rc == 0 && j < old.n; j++) {
                /* Each removal lets go of `lock`, and a match may have come for the others. */
                const imp_radix_node *n = imp_radix_get(tree->radix, old.ids[j]);
                if (n && is_old(n, old.before_s)) rc = remove_victim(s, tree, n->id, out);
            }
        } while (rc == 0 && old.n > 0); /* what was above them is a leaf now */
    }
    return rc;
}

/* What the space may hold, in bytes of segments. */
static uint64_t share_of(const imp_store *s)
{
    uint64_t limit = imp_limit(s), percent = s->opts.space_percent;
    return percent == 0 ? UINT64_MAX : limit / 100 * percent + limit % 100 * percent / 100;
}

/* Down to the space's own share, whatever else there is. */
static int evict_share(imp_store *s, imp_tree *tree, uint64_t bytes, imp_evicted *out)
{
    uint64_t share = share_of(s);
    int rc = 0;
    while (rc == 0 && tree->bytes + bytes > share) {
        imp_radix_node *n = imp_radix_victim(tree->radix);
        if (!n) {
            return imp_fail(IMP_E_FULL, "%s: no room for %llu bytes in a space's share of %llu", s->dir,
                            (unsigned long long)bytes, (unsigned long long)share);
        }
        rc = remove_victim(s, tree, n->id, out);
    }
    return rc;
}

static int evict_limit(imp_store *s, const imp_tree *own, uint64_t bytes, uint64_t fixed, imp_evicted *out)
{
    int rc = 0;
    while (rc == 0 && s->forest.seg_bytes + fixed > imp_limit(s)) {
        imp_tree *tree = NULL;
        imp_radix_node *n = victim(s, own, bytes, &tree);
        if (!n) {
            return imp_fail(IMP_E_FULL, "%s: no room for %llu bytes under the limit of %llu", s->dir,
                            (unsigned long long)bytes, (unsigned long long)imp_limit(s));
        }
        rc = remove_victim(s, tree, n->id, out);
    }
    return rc;
}

/* `space` NULL: not for an entry. */
static int make_room(imp_store *s, const imp_hash128 *space, uint64_t bytes, uint64_t keep, imp_evicted *out)
{
    uint64_t fixed = 0, share = share_of(s);
    *out = (imp_evicted){0};
    int rc = other_bytes(s, bytes, &fixed);
    if (rc < 0) return rc;
    if (space && bytes > share) {
        return imp_fail(IMP_E_FULL, "%s: %llu bytes are more than a space's share of %llu", s->dir,
                        (unsigned long long)bytes, (unsigned long long)share);
    }
    hold(s, keep, true);
    if (s->opts.space_percent) count_spaces(s);
    imp_tree *own = space ? imp_forest_tree(&s->forest, *space) : NULL;
    if (s->opts.ttl_s && bytes == 0) rc = expire(s, out); /* for a new entry the next victims will do */
    if (rc == 0 && own && s->opts.space_percent) rc = evict_share(s, own, bytes, out);
    if (rc == 0 && s->forest.seg_bytes + fixed > imp_limit(s)) {
        rc = read_uses(s, imp_uses_now(s));
        if (rc == 0) rc = evict_limit(s, own, bytes, fixed, out);
    }
    hold(s, keep, false);
    return rc;
}

int imp_evict_for(imp_store *s, uint64_t bytes, uint64_t keep, imp_evicted *out)
{
    return make_room(s, NULL, bytes, keep, out);
}

int imp_evict_for_entry(imp_store *s, imp_hash128 space, uint64_t bytes, uint64_t keep, imp_evicted *out)
{
    return make_room(s, &space, bytes, keep, out);
}

int imp_evict_shares(imp_store *s, imp_evicted *out)
{
    int rc = 0;
    if (s->opts.space_percent == 0) return 0;
    count_spaces(s);
    for (size_t i = 0; i < s->forest.n_trees; i++) {
        int failed = evict_share(s, &s->forest.trees[i], 0, out);
        if (failed < 0 && failed != IMP_E_FULL) return failed;
        if (failed < 0) rc = failed;
    }
    return rc;
}

bool imp_expiry_due(imp_store *s, uint64_t *wait_ns)
{
    static const uint64_t second_ns = 1000000000u;
    *wait_ns = UINT64_MAX;
    if (s->opts.ttl_s == 0) return false;
    uint64_t period_s = s->opts.ttl_s / 4, now_ns = imp_now_ns();
    if (period_s < 1) period_s = 1;
    if (period_s > EXPIRY_MOST_S) period_s = EXPIRY_MOST_S;
    if (s->expiry_next_ns == 0) s->expiry_next_ns = now_ns + period_s * second_ns;
    if (now_ns < s->expiry_next_ns) {
        *wait_ns = s->expiry_next_ns - now_ns;
        return false;
    }
    s->expiry_next_ns = now_ns + period_s * second_ns;
    return true;
}

void imp_expire(imp_store *s)
{
    imp_evicted e = {0};
    int rc = imp_change_begin(s);
    if (rc == 0) rc = imp_change_end(s, expire(s, &e));
    if (rc == 0) imp_count_evicted(s, e);
    if (rc < 0) imp_log(IMP_LOG_INFO, "%s: old entries not removed: %s", s->dir, imp_last_error());
}

int imp_evict_at_open(imp_store *s)
{
    uint64_t segment_bytes = 0, reserved_bytes = 0;
    imp_evicted e = {0};
    pthread_mutex_lock(&s->cat_lock);
    int rc = s->cat ? imp_cat_totals(s->cat, &segment_bytes, &reserved_bytes) : IMP_E_BUSY;
    uint64_t bytes = segment_bytes + reserved_bytes + imp_dir_counted_bytes(s) + GROWTH_BYTES;
    pthread_mutex_unlock(&s->cat_lock);
    if (rc < 0 || (bytes <= imp_limit(s) && s->opts.ttl_s == 0)) return 0;
    rc = imp_change_begin(s);
    if (rc == 0) {
        rc = imp_evict_for(s, 0, 0, &e);
        if (rc == IMP_E_FULL) rc = 0; /* pinned, or in use by others: it stays, and nothing new is stored */
        rc = imp_change_end(s, rc);
    }
    if (rc == 0) imp_count_evicted(s, e);
    if (rc == 0 && e.nodes > 0) {
        imp_log(IMP_LOG_INFO, "%s: %llu entries evicted by the limits in force now", s->dir,
                (unsigned long long)e.nodes);
    }
    return rc == IMP_E_NOMEM ? rc : 0; /* the next commit tries again */
}

void imp_count_evicted(imp_store *s, imp_evicted e)
{
    pthread_mutex_lock(&s->lock);
    s->count.evicted_nodes += e.nodes;
    s->count.evicted_bytes += e.bytes;
    pthread_mutex_unlock(&s->lock);
}
