/* evict.c: the size limit. Leaves go, those unused for longest first; a segment's bytes are free once its last node is
 * gone. */
#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "store/store_internal.h"

enum {
    GROWTH_BYTES = 256 * 1024, /* of the catalogue and its log until the next look */
    USES_EVERY_S = 10
};

/* The best of the trees' victims. */
static imp_radix_node *victim(imp_store *s, imp_tree **tree)
{
    imp_radix_node *best = NULL;
    for (size_t i = 0; i < s->forest.n_trees; i++) {
        imp_radix_node *n = imp_radix_victim(s->forest.trees[i].radix);
        if (n && (!best || n->used_s < best->used_s || (n->used_s == best->used_s && n->depth > best->depth))) {
            best = n;
            *tree = &s->forest.trees[i];
        }
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
    if (rc == 0) *out = reserved_bytes + imp_dir_other_bytes(s) + imp_ballast_missing(s) + bytes + GROWTH_BYTES;
    return rc;
}

int imp_evict_not_needed(imp_store *s, uint64_t bytes, bool *fits)
{
    uint64_t fixed = 0;
    int rc = other_bytes(s, bytes, &fixed);
    *fits = rc == 0 && s->forest.seg_bytes + fixed <= s->opts.limit_bytes;
    return rc;
}

int imp_evict_for(imp_store *s, uint64_t bytes, uint64_t keep, imp_evicted *out)
{
    uint64_t fixed = 0;
    *out = (imp_evicted){0};
    int rc = other_bytes(s, bytes, &fixed);
    if (rc < 0) return rc;
    if (s->forest.seg_bytes + fixed <= s->opts.limit_bytes) return 0;

    int64_t now_s = imp_wall_s();
    if (now_s - s->uses_read_s >= USES_EVERY_S) {
        s->uses_read_s = now_s;
        rc = imp_forest_read_uses(s, &s->forest); /* what other processes use isn't old */
        if (rc < 0) return rc;
    }
    hold(s, keep, true);
    while (rc == 0 && s->forest.seg_bytes + fixed > s->opts.limit_bytes) {
        imp_tree *tree = NULL;
        uint64_t before = s->forest.seg_bytes;
        imp_radix_node *n = victim(s, &tree);
        if (!n) {
            rc = imp_fail(IMP_E_FULL, "%s: no room for %llu bytes under the limit of %llu", s->dir,
                          (unsigned long long)bytes, (unsigned long long)s->opts.limit_bytes);
            break;
        }
        rc = imp_edit_remove_leaf(s, tree, n->id);
        if (rc < 0) break;
        out->nodes++;
        out->bytes += before - s->forest.seg_bytes;
    }
    hold(s, keep, false);
    return rc;
}

void imp_count_evicted(imp_store *s, imp_evicted e)
{
    pthread_mutex_lock(&s->lock);
    s->count.evicted_nodes += e.nodes;
    s->count.evicted_bytes += e.bytes;
    pthread_mutex_unlock(&s->lock);
}
