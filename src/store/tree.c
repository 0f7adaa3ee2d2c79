/* tree.c: the forest in memory, one tree for each space, and how it follows the catalogue.
 *
 * What another process changed comes as rows: removed ids, then nodes as they are now. A node that became shorter was
 * split there, and its tail is the row below it that begins with the token at the cut. So splits are made here the way
 * they were made there. A node in another segment was moved there by a reorder, all nodes of its segment with it.
 * Whatever doesn't fit that picture leads to reading everything again. */
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "store/store_internal.h"

static unsigned long long shown(uint64_t id) { return (unsigned long long)id; }

/* ---- the forest */

void imp_forest_free(imp_forest *f)
{
    for (size_t i = 0; i < f->n_trees; i++) imp_radix_free(f->trees[i].radix);
    imp_free(f->trees);
    for (size_t i = 0; i < f->segs.n_slots; i++) imp_free(f->segs.slots[i].value);
    imp_idmap_free(&f->segs);
    *f = (imp_forest){0};
}

imp_tree *imp_forest_tree(imp_forest *f, imp_hash128 space)
{
    for (size_t i = 0; i < f->n_trees; i++) {
        if (imp_hash128_equal(f->trees[i].space, space)) return &f->trees[i];
    }
    return NULL;
}

static void describe(imp_tree *t, const imp_cat_space *space)
{
    t->created_s = space->created_s;
    strncpy(t->model_name, space->model_name ? space->model_name : "", sizeof t->model_name - 1);
}

int imp_forest_add_tree(imp_forest *f, const imp_cat_space *space)
{
    imp_tree *there = imp_forest_tree(f, space->id);
    if (there) describe(there, space); /* it may have gone and come back */
    if (there) return 0;
    if (f->n_trees == f->trees_cap) {
        size_t cap = f->trees_cap ? f->trees_cap * 2 : 4;
        imp_tree *trees = imp_realloc_array(f->trees, cap, sizeof *trees);
        if (!trees) return imp_fail(IMP_E_NOMEM, "no memory for a space");
        f->trees = trees;
        f->trees_cap = cap;
    }
    imp_tree *t = &f->trees[f->n_trees];
    *t = (imp_tree){.space = space->id};
    describe(t, space);
    int rc = imp_radix_new(&t->radix);
    if (rc < 0) return rc;
    f->n_trees++;
    f->n_bare++;
    return 0;
}

void imp_forest_drop_bare(imp_forest *f, bool (*drop)(const imp_tree *tree, void *user), void *user)
{
    size_t n = 0;
    for (size_t i = 0; i < f->n_trees; i++) {
        imp_tree *t = &f->trees[i];
        if (t->n_segs == 0 && imp_radix_count(t->radix) == 0 && drop(t, user)) {
            imp_radix_free(t->radix);
            f->n_bare--;
        } else {
            f->trees[n++] = *t;
        }
    }
    f->n_trees = n;
}

imp_segrow *imp_forest_seg(const imp_forest *f, uint64_t id) { return imp_idmap_get(&f->segs, id); }

int imp_forest_add_seg(imp_forest *f, const imp_cat_segment *row)
{
    imp_segrow *old = imp_forest_seg(f, row->id);
    if (old) {
        f->seg_bytes = f->seg_bytes - old->disk_bytes + row->disk_bytes;
        old->disk_bytes = row->disk_bytes;
        return 0;
    }
    imp_tree *tree = imp_forest_tree(f, row->space);
    if (!tree) return imp_fail(IMP_E_CORRUPT, "catalogue: segment %016llx is in no space", shown(row->id));
    imp_segrow *r = imp_calloc(1, sizeof *r);
    if (!r) return imp_fail(IMP_E_NOMEM, "no memory for a segment's row");
    *r = (imp_segrow){.id = row->id, .space = row->space, .disk_bytes = row->disk_bytes, .n_tokens = row->n_tokens};
    int rc = imp_idmap_put(&f->segs, row->id, r);
    if (rc < 0) {
        imp_free(r);
        return rc;
    }
    f->seg_bytes += row->disk_bytes;
    if (tree->n_segs++ == 0) f->n_bare--;
    return 0;
}

void imp_forest_remove_seg(imp_forest *f, uint64_t id)
{
    imp_segrow *r = imp_forest_seg(f, id);
    if (!r) return;
    f->seg_bytes -= r->disk_bytes;
    if (--imp_forest_tree(f, r->space)->n_segs == 0) f->n_bare++;
    imp_idmap_remove(&f->segs, id);
    imp_free(r);
}

imp_radix_node *imp_forest_node(imp_forest *f, uint64_t id, imp_tree **tree)
{
    for (size_t i = 0; i < f->n_trees; i++) {
        imp_radix_node *n = imp_radix_get(f->trees[i].radix, id);
        if (n) {
            if (tree) *tree = &f->trees[i];
            return n;
        }
    }
    return NULL;
}

int imp_forest_add_node(imp_forest *f, const imp_cat_node *row)
{
    imp_tree *tree = imp_forest_tree(f, row->space);
    imp_segrow *seg = imp_forest_seg(f, row->segment);
    imp_radix_node *parent = tree && row->parent ? imp_radix_get(tree->radix, row->parent) : NULL;
    if (!tree || !seg || (row->parent && !parent) || !imp_hash128_equal(seg->space, row->space) ||
        row->depth != (parent ? (uint64_t)parent->depth + parent->n_tokens : 0) ||
        (parent && parent->derived && !row->derived) ||
        (uint64_t)row->segment_first + row->n_tokens > seg->n_tokens) {
        return imp_fail(IMP_E_CORRUPT, "catalogue: node %llu doesn't fit to its segment or parent", shown(row->id));
    }
    int64_t now_s = imp_wall_s();
    imp_radix_node node = {
        .id = row->id,
        .parent = row->parent,
        .segment = row->segment,
        .segment_first = row->segment_first,
        .n_tokens = row->n_tokens,
        .derived = row->derived,
        .pinned = row->pinned,
        .created_s = row->created_s,
        .used_s = row->created_s < now_s ? row->created_s : now_s, /* a clock may have been ahead */
        .tokens = row->tokens,
    };
    int rc = imp_radix_add(tree->radix, &node);
    if (rc == 0) seg->n_nodes++;
    return rc == IMP_E_ARG ? IMP_E_CORRUPT : rc;
}

int imp_forest_split(imp_forest *f, imp_tree *tree, uint64_t id, uint32_t at, uint64_t new_id)
{
    int rc = imp_radix_split(tree->radix, id, at, new_id);
    if (rc < 0) return rc == IMP_E_ARG ? IMP_E_CORRUPT : rc;
    imp_segrow *seg = imp_forest_seg(f, imp_radix_get(tree->radix, id)->segment);
    if (seg) seg->n_nodes++;
    return 0;
}

int imp_forest_move_node(imp_forest *f, imp_radix_node *node, uint64_t segment)
{
    imp_segrow *from = imp_forest_seg(f, node->segment), *to = imp_forest_seg(f, segment);
    if (!from || !to || !imp_hash128_equal(from->space, to->space) ||
        (uint64_t)node->segment_first + node->n_tokens > to->n_tokens) {
        return imp_fail(IMP_E_CORRUPT, "catalogue: node %llu doesn't fit to its new segment", shown(node->id));
    }
    node->segment = segment;
    from->n_nodes--;
    to->n_nodes++;
    return 0;
}

int imp_forest_remove_node(imp_forest *f, imp_tree *tree, uint64_t id, bool *last)
{
    imp_radix_node *n = imp_radix_get(tree->radix, id);
    imp_segrow *seg = n ? imp_forest_seg(f, n->segment) : NULL;
    int rc = imp_radix_remove(tree->radix, id);
    if (rc < 0) return rc;
    if (seg) seg->n_nodes--;
    if (last) *last = seg && seg->n_nodes == 0;
    return 0;
}

size_t imp_forest_memory(const imp_forest *f)
{
    size_t n = f->trees_cap * sizeof *f->trees;
    n += f->segs.n_slots * sizeof *f->segs.slots + f->segs.n * sizeof(imp_segrow);
    for (size_t i = 0; i < f->n_trees; i++) n += imp_radix_memory(f->trees[i].radix);
    return n;
}

int imp_forest_prompt(imp_tree *tree, uint64_t id, uint32_t n, int32_t **tokens, size_t *n_tokens)
{
    imp_radix_node *node = imp_radix_get(tree->radix, id);
    *tokens = NULL;
    if (!node) return imp_fail(IMP_E_NOTFOUND, "no node %llu", shown(id));
    *n_tokens = (size_t)node->depth + n;
    *tokens = imp_malloc(*n_tokens * sizeof **tokens);
    if (!*tokens) return imp_fail(IMP_E_NOMEM, "no memory for a prompt");
    memcpy(*tokens + node->depth, node->tokens, n * sizeof **tokens);
    while ((node = imp_radix_get(tree->radix, node->parent)) != NULL) {
        memcpy(*tokens + node->depth, node->tokens, node->n_tokens * sizeof **tokens);
    }
    return 0;
}

/* ---- rows on their way in */

typedef struct rows {
    imp_forest *whole;     /* a whole scan goes straight into this; NULL: collect below */
    uint64_t *gone_nodes, *gone_segs;
    size_t n_gone_nodes, gone_nodes_cap, n_gone_segs, gone_segs_cap;
    imp_hash128 *gone_spaces;
    size_t n_gone_spaces, gone_spaces_cap;
    imp_cat_space *spaces;
    size_t n_spaces, spaces_cap;
    imp_cat_segment *segs;
    size_t n_segs, segs_cap;
    imp_cat_node *nodes;
    size_t n_nodes, nodes_cap;
} rows;

static void rows_free(rows *r)
{
    imp_free(r->gone_nodes);
    imp_free(r->gone_segs);
    imp_free(r->gone_spaces);
    for (size_t i = 0; i < r->n_spaces; i++) imp_free((void *)(uintptr_t)r->spaces[i].model_name);
    imp_free(r->spaces);
    imp_free(r->segs);
    for (size_t i = 0; i < r->n_nodes; i++) imp_free((void *)(uintptr_t)r->nodes[i].tokens);
    imp_free(r->nodes);
}

/* Room for one more element at the end of a growing array. */
static int room(void **array, size_t n, size_t *cap, size_t n_bytes)
{
    if (n < *cap) return 0;
    size_t bigger = *cap ? *cap * 2 : 16;
    void *p = imp_realloc_array(*array, bigger, n_bytes);
    if (!p) return imp_fail(IMP_E_NOMEM, "no memory for rows of the catalogue");
    *array = p;
    *cap = bigger;
    return 0;
}

#define ROOM(array, n, cap) room((void **)&(array), n, &(cap), sizeof *(array))

static int on_reset(void *user)
{
    rows *r = user;
    /* Not of use in small pieces: the caller asks for a whole scan instead. */
    return r->whole ? 0 : IMP_E_STALE;
}

static int on_space(const imp_cat_space *space, void *user)
{
    rows *r = user;
    if (r->whole) return imp_forest_add_tree(r->whole, space);
    int rc = ROOM(r->spaces, r->n_spaces, r->spaces_cap);
    if (rc < 0) return rc;
    char *name = imp_strdup(space->model_name);
    if (!name) return imp_fail(IMP_E_NOMEM, "no memory for a space's row");
    r->spaces[r->n_spaces] = *space;
    r->spaces[r->n_spaces++].model_name = name;
    return 0;
}

static int on_segment(const imp_cat_segment *segment, void *user)
{
    rows *r = user;
    if (r->whole) return imp_forest_add_seg(r->whole, segment);
    int rc = ROOM(r->segs, r->n_segs, r->segs_cap);
    if (rc == 0) r->segs[r->n_segs++] = *segment;
    return rc;
}

static int on_node(const imp_cat_node *node, void *user)
{
    rows *r = user;
    if (r->whole) return imp_forest_add_node(r->whole, node);
    int rc = ROOM(r->nodes, r->n_nodes, r->nodes_cap);
    if (rc < 0) return rc;
    int32_t *tokens = imp_malloc(node->n_tokens * sizeof *tokens);
    if (!tokens) return imp_fail(IMP_E_NOMEM, "no memory for a node's row");
    memcpy(tokens, node->tokens, node->n_tokens * sizeof *tokens);
    r->nodes[r->n_nodes] = *node;
    r->nodes[r->n_nodes++].tokens = tokens;
    return 0;
}

static int on_segment_removed(uint64_t id, void *user)
{
    rows *r = user;
    if (r->whole) return 0;
    int rc = ROOM(r->gone_segs, r->n_gone_segs, r->gone_segs_cap);
    if (rc == 0) r->gone_segs[r->n_gone_segs++] = id;
    return rc;
}

static int on_space_removed(imp_hash128 id, void *user)
{
    rows *r = user;
    if (r->whole) return 0;
    int rc = ROOM(r->gone_spaces, r->n_gone_spaces, r->gone_spaces_cap);
    if (rc == 0) r->gone_spaces[r->n_gone_spaces++] = id;
    return rc;
}

static int on_node_removed(uint64_t id, void *user)
{
    rows *r = user;
    if (r->whole) return 0;
    int rc = ROOM(r->gone_nodes, r->n_gone_nodes, r->gone_nodes_cap);
    if (rc == 0) r->gone_nodes[r->n_gone_nodes++] = id;
    return rc;
}

static int read_rows(imp_store *s, uint64_t since, rows *r, uint64_t *generation)
{
    imp_cat_reader reader = {.reset = on_reset,
                             .space = on_space,
                             .space_removed = on_space_removed,
                             .segment = on_segment,
                             .segment_removed = on_segment_removed,
                             .node = on_node,
                             .node_removed = on_node_removed,
                             .user = r};
    return imp_cat_read(s->cat, since, &reader, generation);
}

/* ---- what changed */

/* Children before parents: a child lies deeper. */
static int remove_gone(imp_store *s, const rows *r)
{
    for (size_t left = r->n_gone_nodes; left > 0;) {
        size_t removed = 0;
        left = 0;
        for (size_t i = 0; i < r->n_gone_nodes; i++) {
            imp_tree *tree;
            imp_radix_node *n = imp_forest_node(&s->forest, r->gone_nodes[i], &tree);
            if (!n) continue;
            if (n->n_children > 0) {
                left++;
            } else {
                int rc = imp_forest_remove_node(&s->forest, tree, n->id, NULL);
                if (rc < 0) return rc;
                removed++;
            }
        }
        if (left > 0 && removed == 0) return IMP_E_STALE; /* something below is to stay? */
    }
    return 0;
}

/* Node `n` was split where its row ends now. */
static int follow_split(imp_store *s, imp_tree *tree, imp_radix_node *n, const imp_cat_node *row, const rows *r)
{
    uint64_t id = n->id, lower = 0;
    for (size_t i = 0; i < r->n_nodes && lower == 0; i++) {
        const imp_cat_node *c = &r->nodes[i];
        /* Both halves are in one segment still, if perhaps in another one than before. */
        if (c->parent == id && c->tokens[0] == n->tokens[row->n_tokens] && c->segment == row->segment &&
            !imp_radix_get(tree->radix, c->id)) {
            lower = c->id;
        }
    }
    bool gone = lower == 0; /* removed since */
    int rc = imp_forest_split(&s->forest, tree, id, row->n_tokens, gone ? UINT64_MAX : lower);
    if (rc == 0 && gone) rc = imp_forest_remove_node(&s->forest, tree, UINT64_MAX, NULL);
    return rc;
}

static int apply_node(imp_store *s, const imp_cat_node *row, const rows *r)
{
    imp_tree *tree;
    imp_radix_node *n = imp_forest_node(&s->forest, row->id, &tree);
    if (!n) return imp_forest_add_node(&s->forest, row);
    if (row->n_tokens < n->n_tokens) {
        int rc = follow_split(s, tree, n, row, r);
        if (rc < 0) return rc;
    }
    if (n->segment != row->segment) {
        int rc = imp_forest_move_node(&s->forest, n, row->segment);
        if (rc < 0) return IMP_E_STALE;
    }
    if (n->parent != row->parent || n->segment_first != row->segment_first ||
        n->n_tokens != row->n_tokens || n->depth != row->depth || n->derived != row->derived ||
        !imp_hash128_equal(tree->space, row->space) ||
        memcmp(n->tokens, row->tokens, n->n_tokens * sizeof *n->tokens) != 0) {
        return IMP_E_STALE;
    }
    n->pinned = row->pinned;
    imp_radix_touch(tree->radix, n);
    return 0;
}

static bool is_gone(const imp_tree *tree, void *user)
{
    const rows *r = user;
    size_t i = 0;
    while (i < r->n_gone_spaces && !imp_hash128_equal(r->gone_spaces[i], tree->space)) i++;
    return i < r->n_gone_spaces;
}

static int drop_spaces(imp_store *s, rows *r)
{
    imp_forest_drop_bare(&s->forest, is_gone, r);
    for (size_t i = 0; i < r->n_gone_spaces; i++) {
        if (imp_forest_tree(&s->forest, r->gone_spaces[i])) return IMP_E_STALE; /* it isn't empty here */
        imp_bases_forget(s, r->gone_spaces[i]);
    }
    return 0;
}

static int apply(imp_store *s, rows *r)
{
    int rc = remove_gone(s, r);
    for (size_t i = 0; rc == 0 && i < r->n_spaces; i++) rc = imp_forest_add_tree(&s->forest, &r->spaces[i]);
    for (size_t i = 0; rc == 0 && i < r->n_segs; i++) rc = imp_forest_add_seg(&s->forest, &r->segs[i]);
    for (size_t i = 0; rc == 0 && i < r->n_nodes; i++) rc = apply_node(s, &r->nodes[i], r);
    for (size_t i = 0; rc == 0 && i < r->n_gone_segs; i++) {
        imp_segrow *seg = imp_forest_seg(&s->forest, r->gone_segs[i]);
        if (!seg) continue;
        if (seg->n_nodes > 0) return IMP_E_STALE;
        imp_segs_gone(s, seg->id);
        imp_forest_remove_seg(&s->forest, seg->id);
    }
    return rc == 0 ? drop_spaces(s, r) : rc;
}

/* ---- everything */

typedef struct use_reader {
    imp_store *s;
    imp_forest *f;
    int64_t now_s;
} use_reader;

/* Its time goes to the catalogue with the next change. */
static void note_used(imp_store *s, uint64_t id)
{
    if (s->n_used < IMP_USED_MAX) s->used[s->n_used++] = id;
}

static int on_use(uint64_t id, uint64_t hits, int64_t used_s, void *user)
{
    use_reader *r = user;
    imp_tree *tree;
    imp_radix_node *n = imp_forest_node(r->f, id, &tree);
    if (!n) return 0;
    if (used_s > r->now_s) { /* by a clock that was ahead */
        used_s = n->used_s < r->now_s ? r->now_s : n->used_s;
        note_used(r->s, id);
    }
    if (hits <= n->hits && used_s <= n->used_s) return 0;
    if (hits > n->hits) n->hits = hits;
    if (used_s > n->used_s) n->used_s = used_s;
    imp_radix_touch(tree->radix, n);
    return 0;
}

typedef struct setting_back {
    imp_store *s;
    imp_radix *radix;
    int64_t now_s;
} setting_back;

static int set_back(imp_radix_node *n, void *user)
{
    setting_back *b = user;
    if (n->used_s <= b->now_s) return 0;
    n->used_s = b->now_s;
    imp_radix_touch(b->radix, n);
    note_used(b->s, n->id);
    return 0;
}

int64_t imp_uses_now(imp_store *s)
{
    int64_t now_s = imp_wall_s();
    for (size_t i = 0; now_s < s->latest_s && i < s->forest.n_trees; i++) {
        setting_back b = {s, s->forest.trees[i].radix, now_s};
        (void)imp_radix_walk(b.radix, set_back, &b);
    }
    s->latest_s = now_s;
    return now_s;
}


/* What this process knows about a node and the catalogue doesn't (yet). */
static int carry_node(imp_radix_node *old, void *user)
{
    imp_forest *f = user;
    imp_tree *tree;
    imp_radix_node *n = imp_forest_node(f, old->id, &tree);
    if (!n) return 0;
    n->leases = old->leases;
    if (old->hits > n->hits) n->hits = old->hits;
    if (old->used_s > n->used_s) n->used_s = old->used_s;
    imp_radix_touch(tree->radix, n);
    return 0;
}

int imp_forest_read_uses(imp_store *s, imp_forest *f)
{
    use_reader r = {s, f, imp_wall_s()};
    return imp_cat_uses(s->cat, on_use, &r);
}

static int read_whole(imp_store *s)
{
    imp_forest f = {0};
    rows r = {.whole = &f};
    uint64_t generation = 0;
    int rc = read_rows(s, 0, &r, &generation);
    for (size_t i = 0; rc == 0 && i < f.segs.n_slots; i++) {
        const imp_segrow *seg = f.segs.slots[i].value;
        if (!seg) continue;
        if (seg->n_nodes == 0) {
            rc = imp_fail(IMP_E_CORRUPT, "catalogue: no node uses segment %016llx", shown(seg->id));
        }
    }
    /* Without uses the order of eviction is by age: not as good, not wrong. */
    if (rc == 0 && imp_forest_read_uses(s, &f) < 0) imp_log(IMP_LOG_WARN, "%s: %s", s->dir, imp_last_error());
    if (rc < 0) {
        imp_forest_free(&f);
        return rc;
    }
    for (size_t i = 0; i < s->forest.n_trees && !s->renumbered; i++) {
        (void)imp_radix_walk(s->forest.trees[i].radix, carry_node, &f);
    }
    for (size_t i = 0; i < s->forest.segs.n_slots; i++) {
        const imp_segrow *old = s->forest.segs.slots[i].value;
        if (!old) continue;
        imp_segrow *seg = imp_forest_seg(&f, old->id);
        if (seg) {
            seg->head = old->head;
        } else {
            imp_segs_gone(s, old->id);
        }
    }
    for (size_t i = 0; i < s->forest.n_trees; i++) {
        imp_hash128 space = s->forest.trees[i].space;
        if (!imp_forest_tree(&f, space)) imp_bases_forget(s, space);
    }
    imp_forest_free(&s->forest);
    s->forest = f;
    s->epoch += s->renumbered;
    s->first_new = UINT64_MAX;
    s->generation = generation;
    s->reload = s->renumbered = false;
    return 0;
}

static int refresh(imp_store *s)
{
    int rc = 0;
    if (!s->reload) {
        bool changed = false;
        rc = imp_cat_changed(s->cat, &changed);
        if (rc < 0 || !changed) return rc;
        rows r = {0};
        uint64_t generation = s->generation;
        rc = read_rows(s, s->generation, &r, &generation);
        if (rc == 0) rc = apply(s, &r);
        rows_free(&r);
        if (rc == 0) s->generation = generation;
        if (rc == 0 || (rc != IMP_E_STALE && rc != IMP_E_CORRUPT && rc != IMP_E_NOMEM)) return rc;
        s->reload = true; /* half of it may be in */
    }
    return read_whole(s);
}

int imp_forest_refresh(imp_store *s)
{
    int rc = refresh(s);
    /* Whoever opened the store last with a limit has set it for all. */
    uint64_t limit = rc == 0 && s->limit_owed == 0 ? imp_cat_limit(s->cat) : 0;
    if (limit) atomic_store_explicit(&s->limit_bytes, limit, memory_order_relaxed);
    return rc;
}
