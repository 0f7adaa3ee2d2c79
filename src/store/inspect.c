/* inspect.c: what is in a store, and tidying it by hand. */
#include <string.h>

#include "base/alloc.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/pool.h"
#include "base/status.h"
#include "store/store_internal.h"

/* ---- bytes of rows, which only the headers know */

typedef struct ids {
    uint64_t *id;
    size_t n;
} ids;

/* Segments whose header this process hasn't seen yet. With `lock` held. */
static int unseen(const imp_store *s, ids *out)
{
    *out = (ids){0};
    if (s->forest.segs.n == 0) return 0;
    out->id = imp_malloc(s->forest.segs.n * sizeof *out->id);
    if (!out->id) return imp_fail(IMP_E_NOMEM, "no memory to list the segments");
    for (size_t i = 0; i < s->forest.segs.n_slots; i++) {
        const imp_segrow *seg = s->forest.segs.slots[i].value;
        if (seg && seg->head.kv_bytes == 0) out->id[out->n++] = seg->id;
    }
    return 0;
}

enum { READERS = 16, FEW = 64 };

typedef struct seeing {
    imp_store *s;
    const ids *todo;
    size_t each;
    imp_errand *e; /* NULL: nobody waits with a deadline */
} seeing;

static void see_part(size_t part, void *user)
{
    const seeing *g = user;
    atomic_uint_least64_t *before = imp_io_tell_limit(g->e ? &g->e->from_ns : NULL);
    size_t first = part * g->each, end = first + g->each < g->todo->n ? first + g->each : g->todo->n;
    for (size_t i = first; i < end; i++) {
        (void)imp_segrow_see(g->s, g->todo->id[i]); /* if it fails a match or verify will tell */
        if (g->e) imp_errand_gets_on(g->e);
    }
    (void)imp_io_tell_limit(before);
}

/* Many at a time: for each the disk is waited for. */
static int see_headers(imp_store *s, imp_errand *e)
{
    ids todo;
    imp_pool *pool = NULL;
    imp_lock_fresh(s);
    int rc = unseen(s, &todo);
    pthread_mutex_unlock(&s->lock);
    if (rc == 0 && todo.n > FEW) (void)imp_pool_new(READERS, &pool); /* without: one after the other */
    seeing g = {s, &todo, FEW, e};
    if (rc == 0) imp_pool_run(pool, (todo.n + FEW - 1) / FEW, see_part, &g);
    imp_pool_free(pool);
    imp_free(todo.id);
    return rc;
}

static uint64_t node_bytes(const imp_store *s, const imp_radix_node *n)
{
    const imp_segrow *seg = imp_forest_seg(&s->forest, n->segment);
    return seg ? seg->head.kv_bytes * n->n_tokens / seg->n_tokens : 0;
}

/* ---- stats */

typedef struct sums {
    imp_store *s;
    imp_stats *out;
} sums;

static int add_node(imp_radix_node *n, void *user)
{
    sums *x = user;
    x->out->n_tokens += n->n_tokens;
    x->out->kv_bytes += node_bytes(x->s, n);
    return 0;
}

/* What of the figures only the disk knows. */
static int run_look(imp_store *s, imp_errand *e)
{
    int rc = see_headers(s, e);
    if (rc < 0) return rc;
    uint64_t disk_bytes = imp_dir_bytes(s, e);
    imp_lock_fresh(s);
    s->disk_bytes = disk_bytes;
    pthread_mutex_unlock(&s->lock);
    return 0;
}

/* With a disk that hangs the figures are as they were. */
static int look(imp_store *s)
{
    if (imp_store_hung(s)) return 0;
    imp_errand *e = imp_calloc(1, sizeof *e);
    if (!e) return imp_fail(IMP_E_NOMEM, "no memory for the figures of a store");
    e->run = run_look;
    e->what = "looking how large the store is";
    if (!imp_errand_do(s, e)) return 0;
    int rc = e->status;
    imp_free(e);
    return rc;
}

int imp_store_stats(imp_store *s, imp_stats *out)
{
    if (out) *out = (imp_stats){0};
    if (!s || !out) return imp_fail(IMP_E_ARG, "imp_store_stats: store or result missing");
    imp_kept_line kept;
    imp_error_keep(&kept);
    int rc = look(s);
    if (rc < 0) return rc;
    pthread_mutex_lock(&s->lock);
    *out = s->count;
    out->disk_bytes = s->disk_bytes;
    out->limit_bytes = imp_limit(s);
    out->n_segments = s->forest.segs.n;
    out->memory_bytes = imp_forest_memory(&s->forest);
    sums x = {s, out};
    for (size_t i = 0; i < s->forest.n_trees; i++) {
        size_t n = imp_radix_count(s->forest.trees[i].radix);
        out->n_nodes += n;
        out->n_spaces += n > 0;
        (void)imp_radix_walk(s->forest.trees[i].radix, add_node, &x);
    }
    pthread_mutex_unlock(&s->lock);
    out->bytes_read = imp_io_bytes_read(s->io);
    out->bytes_written = imp_io_bytes_written(s->io);
    out->io_mode = imp_io_describe(s->io);
    if (imp_io_in_memory(s->io)) { /* what would lie on disk is the host tier */
        out->host_bytes = out->disk_bytes;
        out->disk_bytes = 0;
    }
    return imp_error_back(&kept, 0);
}

/* ---- list */

typedef struct entry {
    imp_node_info info;
    char model_name[64];
} entry;

typedef struct listing {
    imp_store *s;
    imp_tree *tree;
    entry *entries;
    size_t n;
} listing;

static int add_entry(imp_radix_node *n, void *user)
{
    listing *l = user;
    entry *e = &l->entries[l->n++];
    const imp_segrow *seg = imp_forest_seg(&l->s->forest, n->segment);
    const imp_seghead none = {0}, *head = seg ? &seg->head : &none;
    e->info = (imp_node_info){
        .id = n->id,
        .parent = n->parent,
        .segment = n->segment,
        .first_token = n->depth,
        .n_tokens = n->n_tokens,
        .kv_bytes = node_bytes(l->s, n),
        .derived = n->derived,
        .pinned = n->pinned,
        .hits = n->hits,
        .created_s = n->created_s,
        .used_s = n->used_s,
        .order = (imp_order)head->order,
        .rest = (imp_rest)head->rest,
        .chunk_tokens = head->chunk_tokens,
        .probe_heads = head->probe_heads,
        .sketch_bits = head->sketch_bits,
        .paired = head->paired,
    };
    imp_hash128_hex(l->tree->space, e->info.space);
    memcpy(e->model_name, l->tree->model_name, sizeof e->model_name);
    return 0;
}

int imp_store_list(imp_store *s, int (*fn)(const imp_node_info *node, void *user), void *user)
{
    listing l = {.s = s};
    size_t n = 0;
    if (!s || !fn) return imp_fail(IMP_E_ARG, "imp_store_list: store or function missing");
    imp_kept_line kept;
    imp_error_keep(&kept);
    int rc = see_headers(s, NULL);
    if (rc < 0) return rc;
    /* A copy, so that `fn` may call whatever it likes. */
    imp_lock_fresh(s);
    for (size_t i = 0; i < s->forest.n_trees; i++) n += imp_radix_count(s->forest.trees[i].radix);
    l.entries = imp_malloc(n * sizeof *l.entries);
    if (!l.entries) rc = imp_fail(IMP_E_NOMEM, "no memory to list %zu nodes", n);
    for (size_t i = 0; rc == 0 && i < s->forest.n_trees; i++) {
        l.tree = &s->forest.trees[i];
        (void)imp_radix_walk(l.tree->radix, add_entry, &l);
    }
    pthread_mutex_unlock(&s->lock);
    (void)imp_error_back(&kept, rc);
    for (size_t i = 0; rc == 0 && i < l.n; i++) {
        l.entries[i].info.model_name = l.entries[i].model_name;
        rc = fn(&l.entries[i].info, user);
    }
    imp_free(l.entries);
    return rc;
}

/* ---- importance */

/* Adds the rows of one layer to `sum`; false if there are none. `*n_requests` is raised to the layer's. */
static bool add_layer(const imp_history *h, bool history, uint32_t layer, uint32_t first, size_t n, float *row,
                      float *sum, uint32_t *n_requests)
{
    if (history) {
        uint32_t count = imp_history_read(h, layer, first, n, row);
        if (count == 0) return false;
        if (count > *n_requests) *n_requests = count;
    } else if (!imp_history_ranking(h, IMP_RANK_PREFILL, layer, first, n, row)) {
        return false;
    }
    for (size_t i = 0; i < n; i++) sum[i] += row[i];
    return true;
}

static int64_t mean_of_layers(const imp_history *h, uint32_t n_layers, uint32_t first, size_t n, float *row, float *out)
{
    uint32_t n_requests = 0, n_added = 0;
    for (int history = 1; history >= 0 && n_added == 0; history--) {
        for (uint32_t l = 0; l < n_layers; l++) n_added += add_layer(h, history, l, first, n, row, out, &n_requests);
    }
    for (size_t i = 0; i < n && n_added > 0; i++) out[i] /= (float)n_added;
    return n_requests;
}

int64_t imp_store_importance(imp_store *s, uint64_t node, float *out, size_t n)
{
    if (!s || (n > 0 && !out)) return imp_fail(IMP_E_ARG, "imp_store_importance: store or result missing");
    for (size_t i = 0; i < n; i++) out[i] = 0;
    imp_kept_line kept;
    imp_error_keep(&kept);
    imp_tree *tree;
    imp_lock_fresh(s);
    imp_radix_node *found = imp_forest_node(&s->forest, node, &tree);
    imp_radix_node copy = found ? *found : (imp_radix_node){0};
    pthread_mutex_unlock(&s->lock);
    if (!found) return imp_fail(IMP_E_NOTFOUND, "%s: no node %llu", s->dir, (unsigned long long)node);
    if (n > copy.n_tokens) n = copy.n_tokens;

    bool fresh;
    uint64_t n_read = 0;
    imp_seg *seg = NULL;
    imp_history *h = NULL;
    float *row = imp_malloc((n ? n : 1) * sizeof *row);
    int64_t rc = row ? imp_segs_open(s, copy.segment, &seg, &fresh, &n_read)
                     : imp_fail(IMP_E_NOMEM, "no memory for the importance of %zu tokens", n);
    if (rc == 0) rc = imp_history_get(s, seg, &h);
    if (rc == 0) {
        rc = mean_of_layers(h, imp_seg_layout_meta(seg->layout)->n_layers, copy.segment_first, n, row, out);
        imp_history_put(s, h);
    }
    if (seg) {
        pthread_mutex_lock(&s->lock);
        imp_segs_put(s, seg);
        pthread_mutex_unlock(&s->lock);
    }
    imp_free(row);
    return rc < 0 ? rc : (imp_error_back(&kept, 0), rc);
}

/* ---- by hand */

static int writable(const imp_store *s)
{
    if (!s) return imp_fail(IMP_E_ARG, "no store");
    return s->readonly ? imp_fail(IMP_E_PERM, "%s is open for reading only", s->dir) : 0;
}

static int top_of(imp_radix_node *n, void *user)
{
    *(uint64_t *)user = n->id;
    return 1;
}

enum { PIECE = 32 };

static int remove_all(imp_store *s)
{
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < s->forest.n_trees; i++) {
        uint64_t id;
        while (rc == 0 && imp_radix_walk(s->forest.trees[i].radix, top_of, &id) == 1) {
            rc = imp_edit_remove(s, &s->forest.trees[i], id, NULL);
        }
    }
    return rc;
}

/* On a full disk: in changes of a few nodes each, so that what one has freed is there for the next one's log. */
static int remove_in_pieces(imp_store *s, uint64_t node)
{
    bool all = false;
    int rc = 0;
    while (rc == 0 && !all) {
        rc = imp_change_begin(s);
        if (rc < 0) break;
        imp_tree *tree = NULL;
        uint64_t id = node;
        for (size_t i = 0; node == 0 && !tree && i < s->forest.n_trees; i++) {
            if (imp_radix_walk(s->forest.trees[i].radix, top_of, &id) == 1) tree = &s->forest.trees[i];
        }
        if (node != 0) (void)imp_forest_node(&s->forest, node, &tree);
        bool gone = !tree, last = false;
        if (tree) rc = imp_edit_remove_some(s, tree, id, PIECE, &last);
        all = gone || (last && node != 0);
        rc = imp_change_end(s, rc);
    }
    return rc;
}

int imp_store_remove(imp_store *s, uint64_t node)
{
    imp_kept_line kept;
    imp_error_keep(&kept);
    int rc = writable(s);
    if (rc == 0) rc = imp_change_begin(s);
    if (rc < 0) return rc;
    imp_tree *tree;
    if (node == 0) {
        rc = remove_all(s);
    } else if (imp_forest_node(&s->forest, node, &tree)) {
        rc = imp_edit_remove(s, tree, node, NULL);
    } else {
        (void)imp_change_end(s, 0);
        return imp_fail(IMP_E_NOTFOUND, "%s: no node %llu", s->dir, (unsigned long long)node);
    }
    rc = imp_change_end(s, rc);
    if (rc == IMP_E_FULL) {
        (void)imp_ballast_give(s);
        rc = remove_in_pieces(s, node);
    }
    /* A file whose removal a power cut undoes has no row, and the next open would take it in again. */
    if (rc == 0 && imp_io_sync_dir(s->io, "segments") < 0) {
        imp_log(IMP_LOG_WARN, "%s: removed, but a power cut may undo it: %s", s->dir, imp_last_error());
    }
    imp_ballast_take(s);
    imp_forget_refused(s);
    return imp_error_back(&kept, rc);
}

int imp_store_pin(imp_store *s, uint64_t node, int pinned)
{
    imp_kept_line kept;
    imp_error_keep(&kept);
    int rc = writable(s);
    if (rc == 0) rc = imp_change_begin(s);
    if (rc < 0) return rc;
    imp_tree *tree;
    imp_radix_node *n = imp_forest_node(&s->forest, node, &tree);
    if (!n) {
        (void)imp_change_end(s, 0);
        return imp_fail(IMP_E_NOTFOUND, "%s: no node %llu", s->dir, (unsigned long long)node);
    }
    rc = imp_error_back(&kept, imp_change_end(s, imp_edit_pin(s, tree, n, pinned != 0)));
    imp_forget_refused(s);
    return rc;
}

static int trim(imp_store *s, uint64_t *n_evicted)
{
    imp_evicted e;
    int rc;
    do {
        rc = imp_change_begin(s);
        if (rc < 0) return rc;
        rc = imp_evict_for(s, 0, 0, &e);
        if (rc == 0) rc = imp_evict_shares(s, &e);
        /* What is left is in use or pinned; what went stays away. */
        if (rc == IMP_E_FULL && imp_cat_failure(s->cat) == 0) rc = 0;
        rc = imp_change_end(s, rc);
    } while (rc == IMP_E_FULL && imp_ballast_give(s));
    if (rc < 0) return rc;
    imp_count_evicted(s, e);
    *n_evicted = e.nodes;
    return 0;
}

/* Still over the limit: bases whose last segments just went needn't wait until they are old, if nobody writes. */
static void sweep_young_bases(imp_store *s, imp_leftovers *left)
{
    uint64_t segment_bytes, reserved_bytes;
    if (imp_dir_bytes(s, NULL) <= imp_limit(s) || imp_change_begin(s) < 0) return;
    bool sweep = imp_cat_totals(s->cat, &segment_bytes, &reserved_bytes) == 0 && reserved_bytes == 0;
    imp_leave(s);
    if (sweep) imp_bases_sweep(s, true, &left->n_files, &left->n_bytes);
    imp_enter(s);
    (void)imp_change_end(s, 0);
}

int imp_store_gc(imp_store *s, imp_gc_report *report)
{
    imp_leftovers left;
    imp_gc_report r = {0};
    imp_kept_line kept;
    imp_error_keep(&kept);
    if (report) *report = r;
    int rc = writable(s);
    if (rc < 0) return rc;
    uint64_t before = imp_dir_bytes(s, NULL);
    rc = imp_recover(s, false, &left);
    if (rc == 0) rc = trim(s, &r.evicted_nodes);
    if (rc == 0) rc = imp_reorder_evicted(s);
    if (rc < 0) return rc;
    sweep_young_bases(s, &left);
    imp_forget_refused(s);
    rc = imp_catalogue_log_ready(s); /* compacting writes all of it there */
    imp_catalogue_take(s);
    if (rc == 0 && s->cat) rc = imp_cat_compact(s->cat);
    imp_catalogue_give(s);
    if (rc == IMP_E_FULL) { /* a copy of it is needed for that; what is in it can be used again */
        imp_log(IMP_LOG_INFO, "%s: the catalogue isn't compacted: %s", s->dir, imp_last_error());
        rc = 0;
    }
    imp_ballast_take(s);
    uint64_t after = imp_dir_bytes(s, NULL);
    r.removed_files = left.n_files;
    r.freed_bytes = before > after ? before - after : 0;
    if (report) *report = r;
    if (rc < 0 && rc != IMP_E_BUSY) return rc; /* busy: another process is at it */
    if (after > imp_limit(s)) {
        return imp_fail(IMP_E_FULL, "%s: %llu bytes, and the limit is %llu: what is left is pinned or in use", s->dir,
                        (unsigned long long)after, (unsigned long long)imp_limit(s));
    }
    return imp_error_back(&kept, 0);
}
