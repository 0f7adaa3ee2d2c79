/* edit.c: edits that tree and catalogue see together, inside a change (imp_change_begin). When one fails half-way the
 * caller ends the change with its status: the catalogue rolls back, and the forest is read again. */
#include <string.h>

#include "base/alloc.h"
#include "base/log.h"
#include "base/status.h"
#include "store/store_internal.h"

/* The row of a node as it is in the tree. */
static imp_cat_node row_of(const imp_tree *tree, const imp_radix_node *n)
{
    return (imp_cat_node){
        .id = n->id,
        .parent = n->parent,
        .space = tree->space,
        .segment = n->segment,
        .segment_first = n->segment_first,
        .n_tokens = n->n_tokens,
        .depth = n->depth,
        .derived = n->derived,
        .pinned = n->pinned,
        .created_s = n->created_s,
        .tokens = n->tokens,
    };
}

/* ---- splitting */

typedef struct adoption {
    imp_store *s;
    imp_tree *tree;
    uint64_t from, to;
    uint32_t left; /* children still to be found */
} adoption;

static int adopt(imp_radix_node *n, void *user)
{
    adoption *a = user;
    if (n->parent != a->from) return 0;
    imp_cat_node row = row_of(a->tree, n);
    row.parent = a->to;
    int rc = imp_cat_put_node(a->s->cat, &row);
    return rc < 0 ? rc : --a->left == 0;
}

int imp_edit_split(imp_store *s, imp_tree *tree, uint64_t id, uint32_t at, uint64_t *lower)
{
    const imp_radix_node *n = imp_radix_get(tree->radix, id);
    imp_cat_node upper_row = row_of(tree, n), lower_row = upper_row;
    adoption a = {s, tree, id, 0, n->n_children};
    int rc = imp_cat_new_node_id(s->cat, lower);
    if (rc < 0) return rc;
    a.to = *lower;
    upper_row.n_tokens = at;
    lower_row.id = *lower;
    lower_row.parent = id;
    lower_row.segment_first += at;
    lower_row.depth += at;
    lower_row.n_tokens -= at;
    lower_row.tokens += at;
    rc = imp_cat_put_node(s->cat, &upper_row);
    if (rc == 0) rc = imp_cat_put_node(s->cat, &lower_row);
    /* The tail keeps times and hits (radix.h), for other processes too: to these a node without a row is one that nobody
     * has used. */
    if (rc == 0 && (n->hits > 0 || n->used_s > n->created_s)) rc = imp_cat_put_use(s->cat, *lower, n->hits, n->used_s);
    if (rc == 0 && a.left > 0) {
        rc = imp_radix_walk_below(tree->radix, id, adopt, &a);
        if (rc > 0) rc = 0;
    }
    return rc == 0 ? imp_forest_split(&s->forest, tree, id, at, *lower) : rc;
}

/* ---- removing */

int imp_edit_remove_leaf(imp_store *s, imp_tree *tree, uint64_t id)
{
    bool last = false;
    uint64_t segment = imp_radix_get(tree->radix, id)->segment;
    /* From the tree first: whoever chose it did so with `lock` held, which the catalogue's call lets go of. */
    int rc = imp_forest_remove_node(&s->forest, tree, id, &last);
    if (rc == 0) rc = imp_cat_remove_node(s->cat, id);
    if (rc < 0 || !last) return rc;
    rc = imp_change_doom(s, segment);
    if (rc == 0) rc = imp_cat_remove_segment(s->cat, segment);
    if (rc < 0) return rc;
    imp_segs_drop(s, segment);
    imp_forest_remove_seg(&s->forest, segment);
    return 0;
}

typedef struct subtree {
    uint64_t *ids; /* parents before children */
    size_t n, cap;
} subtree;

static int gather(imp_radix_node *n, void *user)
{
    subtree *t = user;
    if (t->n == t->cap) {
        size_t cap = t->cap ? t->cap * 2 : 16;
        uint64_t *ids = imp_realloc_array(t->ids, cap, sizeof *ids);
        if (!ids) return imp_fail(IMP_E_NOMEM, "no memory to remove a part of the tree");
        t->ids = ids;
        t->cap = cap;
    }
    t->ids[t->n++] = n->id;
    return 0;
}

/* The ids of `top` and of what is below; the caller frees t->ids. */
static int gather_below(imp_tree *tree, uint64_t top, subtree *t)
{
    *t = (subtree){0};
    return imp_radix_walk_below(tree->radix, top, gather, t);
}

int imp_edit_remove_some(imp_store *s, imp_tree *tree, uint64_t id, size_t most, bool *all)
{
    subtree t;
    int rc = gather_below(tree, id, &t);
    *all = t.n <= most;
    size_t stay = *all ? 0 : t.n - most;
    for (size_t i = t.n; rc == 0 && i-- > stay;) rc = imp_edit_remove_leaf(s, tree, t.ids[i]);
    imp_free(t.ids);
    return rc;
}

int imp_edit_remove(imp_store *s, imp_tree *tree, uint64_t id, uint64_t *n_removed)
{
    subtree t;
    int rc = gather_below(tree, id, &t);
    for (size_t i = t.n; rc == 0 && i-- > 0;) rc = imp_edit_remove_leaf(s, tree, t.ids[i]);
    if (rc == 0 && n_removed) *n_removed += t.n;
    imp_free(t.ids);
    return rc;
}

/* ---- another segment in the place of one */

typedef struct replacing {
    imp_store *s;
    imp_tree *tree;
    uint64_t from, to;
    uint32_t end; /* of the tokens in use */
} replacing;

static int find_end(imp_radix_node *n, void *user)
{
    replacing *r = user;
    if (n->segment == r->from && n->segment_first + n->n_tokens > r->end) r->end = n->segment_first + n->n_tokens;
    return 0;
}

static int move_over(imp_radix_node *n, void *user)
{
    replacing *r = user;
    if (n->segment != r->from) return 0;
    int rc = imp_forest_move_node(&r->s->forest, n, r->to);
    if (rc < 0) return rc;
    imp_cat_node row = row_of(r->tree, n);
    return imp_cat_put_node(r->s->cat, &row);
}

int imp_edit_replace(imp_store *s, uint64_t from, const imp_cat_segment *to, bool *moved)
{
    imp_segrow *seg = imp_forest_seg(&s->forest, from);
    imp_tree *tree = seg ? imp_forest_tree(&s->forest, seg->space) : NULL;
    replacing r = {s, tree, from, to->id, 0};
    *moved = false;
    if (!tree) return 0;
    (void)imp_radix_walk(tree->radix, find_end, &r);
    if (r.end > to->n_tokens) return 0;
    int rc = imp_cat_put_segment(s->cat, to);
    if (rc == 0) rc = imp_forest_add_seg(&s->forest, to);
    if (rc == 0) rc = imp_radix_walk(tree->radix, move_over, &r);
    if (rc == 0) imp_history_hand_over(s, from, to->id, to->n_tokens);
    if (rc == 0) rc = imp_change_doom(s, from);
    if (rc == 0) rc = imp_cat_remove_segment(s->cat, from);
    if (rc < 0) return rc;
    imp_segs_drop(s, from);
    imp_forest_remove_seg(&s->forest, from);
    *moved = true;
    return 0;
}

/* ---- adding */

int imp_steps(imp_store *s, imp_tree *tree, const int32_t *tokens, size_t n_tokens, bool exact_only, size_t *n_steps,
              size_t *n_matched)
{
    for (;;) {
        *n_steps = imp_radix_match(tree->radix, tokens, n_tokens, exact_only, s->steps, s->steps_cap, n_matched);
        if (*n_steps <= s->steps_cap) return 0;
        size_t cap = *n_steps * 2;
        imp_radix_step *steps = imp_realloc_array(s->steps, cap, sizeof *steps);
        if (!steps) return imp_fail(IMP_E_NOMEM, "no memory for a match of %zu nodes", *n_steps);
        s->steps = steps;
        s->steps_cap = cap;
    }
}

/* Exact KV takes the place of a derived node that begins where the exact way ends. */
static int replace_derived(imp_store *s, imp_tree *tree, const imp_run *run, size_t n_exact_steps)
{
    size_t n_steps, n_matched;
    int rc = imp_steps(s, tree, run->tokens, run->end, false, &n_steps, &n_matched);
    if (rc < 0 || n_steps <= n_exact_steps) return rc;
    return imp_edit_remove(s, tree, s->steps[n_exact_steps].node->id, NULL);
}

int imp_edit_add(imp_store *s, const imp_run *run, uint64_t *node)
{
    imp_tree *tree = imp_forest_tree(&s->forest, run->space);
    size_t n_steps, known;
    *node = 0;
    int rc = imp_steps(s, tree, run->tokens, run->end, !run->derived, &n_steps, &known);
    if (rc < 0) return rc;
    if (known < run->first) return imp_fail(IMP_E_STALE, "%s: the tokens before a new entry are gone", s->dir);
    if (known == run->end) return 0;

    uint64_t parent = 0, lower;
    if (n_steps > 0) {
        imp_radix_step last = s->steps[n_steps - 1];
        parent = last.node->id;
        if (last.n_matched < last.node->n_tokens) {
            rc = imp_edit_split(s, tree, parent, last.n_matched, &lower);
            if (rc < 0) return rc;
        }
    }
    if (!run->derived) {
        rc = replace_derived(s, tree, run, n_steps);
        if (rc < 0) return rc;
    }
    /* A child of derived is derived; a derived run may hang below an exact one. */
    imp_cat_node row = {
        .parent = parent,
        .space = run->space,
        .segment = run->segment,
        .segment_first = (uint32_t)(known - run->first),
        .n_tokens = (uint32_t)(run->end - known),
        .depth = known,
        .derived = run->derived,
        .created_s = run->created_s,
        .tokens = run->tokens + known,
    };
    rc = imp_cat_new_node_id(s->cat, &row.id);
    if (rc == 0) rc = imp_cat_put_node(s->cat, &row);
    if (rc == 0) rc = imp_forest_add_node(&s->forest, &row);
    if (rc == 0) *node = row.id;
    return rc;
}

/* ---- dropping what is bad */

typedef struct first_bad {
    uint64_t segment;
    uint32_t from;
    uint64_t node;
    uint32_t node_first; /* in the segment */
} first_bad;

static int find_bad(imp_radix_node *n, void *user)
{
    first_bad *b = user;
    if (n->segment != b->segment || n->segment_first + n->n_tokens <= b->from) return 0;
    if (b->node == 0 || n->segment_first < b->node_first) {
        b->node = n->id;
        b->node_first = n->segment_first;
    }
    return 0;
}

int imp_edit_drop(imp_store *s, uint64_t segment, uint32_t from, uint64_t *n_removed)
{
    *n_removed = 0;
    imp_segrow *seg = imp_forest_seg(&s->forest, segment);
    imp_tree *tree = seg ? imp_forest_tree(&s->forest, seg->space) : NULL;
    if (!tree) return 0;
    /* The nodes of a segment lie one below the other, so the first one's subtree has them all. */
    first_bad b = {.segment = segment, .from = from};
    (void)imp_radix_walk(tree->radix, find_bad, &b);
    if (b.node == 0) return 0;
    uint64_t bad = b.node;
    if (b.node_first < from) {
        int rc = imp_edit_split(s, tree, b.node, from - b.node_first, &bad);
        if (rc < 0) return rc;
    }
    return imp_edit_remove(s, tree, bad, n_removed);
}

/* Only this process forgets; what the catalogue says comes back with the next whole scan. */
static void forget_in_memory(imp_store *s, uint64_t segment, uint32_t from)
{
    imp_segrow *seg = imp_forest_seg(&s->forest, segment);
    imp_tree *tree = seg ? imp_forest_tree(&s->forest, seg->space) : NULL;
    if (!tree) return;
    first_bad b = {.segment = segment, .from = from};
    (void)imp_radix_walk(tree->radix, find_bad, &b);
    if (b.node == 0) return;
    subtree t;
    if (gather_below(tree, b.node, &t) == 0) {
        for (size_t i = t.n; i-- > 0;) (void)imp_forest_remove_node(&s->forest, tree, t.ids[i], NULL);
    }
    imp_free(t.ids);
}

void imp_drop(imp_store *s, uint64_t segment, uint32_t from, const char *what)
{
    imp_log_level level = what ? IMP_LOG_WARN : IMP_LOG_INFO;
    uint64_t n = 0;
    if (!what) what = "repaired";
    int rc = IMP_E_PERM;
    if (!s->readonly) {
        do {
            rc = imp_change_begin(s);
            if (rc == 0) rc = imp_change_end(s, imp_edit_drop(s, segment, from, &n));
        } while (rc == IMP_E_FULL && imp_ballast_give(s));
    }
    if (rc < 0) {
        imp_lock_both(s); /* the tree is changed */
        forget_in_memory(s, segment, from);
        imp_unlock_both(s);
    }
    if (rc < 0 && !s->readonly) {
        imp_log(IMP_LOG_WARN, "%s: segments/%016llx.seg: %s; it stays in the catalogue: %s", s->dir,
                (unsigned long long)segment, what, imp_last_error());
    } else {
        imp_log(level, "%s: segments/%016llx.seg: %s; %llu nodes dropped", s->dir, (unsigned long long)segment, what,
                (unsigned long long)n);
    }
}

/* ---- the small ones */

int imp_edit_unreserve(imp_store *s)
{
    int rc = s->reserved ? imp_cat_unreserve(s->cat, s->reserved) : 0;
    if (rc < 0 && rc != IMP_E_NOTFOUND) return rc;
    s->reserved = 0;
    return 0;
}

static int set_pin(imp_store *s, imp_tree *tree, imp_radix_node *node, bool pinned)
{
    node->pinned = pinned;
    imp_radix_touch(tree->radix, node);
    imp_cat_node row = row_of(tree, node);
    return imp_cat_put_node(s->cat, &row);
}

typedef struct unpinning {
    imp_store *s;
    imp_tree *tree;
    imp_radix_node last; /* that was unpinned */
} unpinning;

/* A split leaves the tail of a pinned node as a pinned node of its own, of the same segment and time. */
static int unpin_tail(imp_radix_node *n, void *user)
{
    unpinning *u = user;
    const imp_radix_node *l = &u->last;
    bool tail = n->parent == l->id && n->segment == l->segment && n->segment_first == l->segment_first + l->n_tokens &&
                n->created_s == l->created_s && n->derived == l->derived && n->pinned;
    if (!tail) return 0;
    u->last = *n;
    return set_pin(u->s, u->tree, n, false);
}

int imp_edit_pin(imp_store *s, imp_tree *tree, imp_radix_node *node, bool pinned)
{
    unpinning u = {s, tree, *node};
    int rc = set_pin(s, tree, node, pinned);
    return rc < 0 || pinned ? rc : imp_radix_walk_below(tree->radix, u.last.id, unpin_tail, &u);
}

int imp_edit_uses(imp_store *s)
{
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < s->n_used; i++) {
        const imp_radix_node *n = imp_forest_node(&s->forest, s->used[i], NULL);
        if (n) rc = imp_cat_put_use(s->cat, n->id, n->hits, n->used_s);
    }
    s->n_used = 0; /* advisory: what a rollback takes is lost */
    return rc;
}
