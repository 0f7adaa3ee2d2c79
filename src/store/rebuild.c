/* rebuild.c: the catalogue made again from the segments' headers.
 *
 * A header names its tokens, its position, and the hash of all tokens before it. So segments are taken by position;
 * each is scanned token by token, and wherever the running hash is what some other segment says comes before it, that
 * one's place is known. What finds no place has lost its parent, and goes.
 *
 * The new catalogue grows in a folder of its own and takes the old one's name when it is complete: a kill on the way
 * leaves a store without a catalogue, which leads here again, never one with half of it. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/log.h"
#include "base/status.h"
#include "store/store_internal.h"

enum { DU_UNIT = 4096 };

typedef struct item {
    uint64_t segment;
    imp_seg_layout *layout;
    bool known; /* the catalogue that is replaced has it */
    bool placed;
    size_t parent; /* item whose tokens come before: the first `parent_n` of them; SIZE_MAX: none */
    uint32_t parent_n;
} item;

/* A place that somebody waits for. */
typedef struct place {
    imp_hash128 before;
    uint64_t position;
    bool known;
    size_t item;
    uint32_t n; /* after so many of its tokens */
} place;

/* A pinned node, by what survives: the last token of it in its segment. */
typedef struct pin {
    uint64_t segment;
    uint32_t last_token;
} pin;

typedef struct rebuild {
    imp_store *s;
    item *items;
    size_t n, cap;
    place *places;
    pin *pins;
    size_t n_pins, pins_cap;
    uint64_t *bad; /* files to remove */
    size_t n_bad, bad_cap;
} rebuild;

static int room(void **array, size_t n, size_t *cap, size_t n_bytes)
{
    if (n < *cap) return 0;
    size_t bigger = *cap ? *cap * 2 : 64;
    void *p = imp_realloc_array(*array, bigger, n_bytes);
    if (!p) return imp_fail(IMP_E_NOMEM, "no memory to make the catalogue again");
    *array = p;
    *cap = bigger;
    return 0;
}

/* ---- headers */

static int on_segment(const char *name, uint64_t disk_bytes, void *user)
{
    rebuild *r = user;
    uint64_t id, n_read = 0;
    imp_seg seg;
    (void)disk_bytes;
    if (!imp_seg_name_parse(name, &id)) return 0;
    int rc = imp_seg_file_open(r->s, id, &seg, &n_read);
    if (rc == 0) {
        rc = room((void **)&r->items, r->n, &r->cap, sizeof *r->items);
        if (rc == 0) {
            r->items[r->n++] = (item){.segment = id,
                                          .layout = seg.layout,
                                          .known = imp_forest_seg(&r->s->forest, id) != NULL,
                                          .parent = SIZE_MAX};
            seg.layout = NULL;
        }
        imp_seg_file_close(&seg);
        return rc;
    }
    if (rc == IMP_E_CORRUPT) {
        imp_log(IMP_LOG_WARN, "%s: %s", r->s->dir, imp_last_error());
        rc = room((void **)&r->bad, r->n_bad, &r->bad_cap, sizeof *r->bad);
        if (rc == 0) r->bad[r->n_bad++] = id;
        return rc;
    }
    /* A newer format, no memory: nothing may be decided. A file that can't be read now stays for another time. */
    if (rc != IMP_E_IO && rc != IMP_E_PERM && rc != IMP_E_NOTFOUND) return rc;
    imp_log(IMP_LOG_WARN, "%s: %s", r->s->dir, imp_last_error());
    return 0;
}

static const imp_seg_meta *meta(const item *it) { return imp_seg_layout_meta(it->layout); }

static int by_position(const void *a, const void *b)
{
    const imp_seg_meta *x = meta(a), *y = meta(b);
    if (x->first_token != y->first_token) return x->first_token < y->first_token ? -1 : 1;
    if (x->derived != y->derived) return x->derived ? 1 : -1;
    /* Of a segment and its reordered copy, which a kill left side by side, the one that pins are known of. */
    bool x_known = ((const item *)a)->known, y_known = ((const item *)b)->known;
    if (x_known != y_known) return x_known ? -1 : 1;
    if (x->created_s != y->created_s) return x->created_s < y->created_s ? -1 : 1;
    return x->segment < y->segment ? -1 : 1;
}

static int compare_hash(imp_hash128 a, imp_hash128 b)
{
    if (a.hi != b.hi) return a.hi < b.hi ? -1 : 1;
    return a.lo == b.lo ? 0 : a.lo < b.lo ? -1 : 1;
}

static int by_hash(const void *a, const void *b)
{
    return compare_hash(((const place *)a)->before, ((const place *)b)->before);
}

static place *find_place(const rebuild *r, imp_hash128 before)
{
    place key = {.before = before};
    return r->n ? bsearch(&key, r->places, r->n, sizeof key, by_hash) : NULL;
}

/* Which item the tokens before each item are in. */
static int find_parents(rebuild *r)
{
    r->places = imp_calloc(r->n, sizeof *r->places);
    if (!r->places) return imp_fail(IMP_E_NOMEM, "no memory to make the catalogue again");
    if (r->n) qsort(r->items, r->n, sizeof *r->items, by_position);
    for (size_t i = 0; i < r->n; i++) r->places[i].before = meta(&r->items[i])->before;
    if (r->n) qsort(r->places, r->n, sizeof *r->places, by_hash);

    for (size_t i = 0; i < r->n; i++) {
        item *it = &r->items[i];
        const imp_seg_meta *m = meta(it);
        if (m->first_token == 0) {
            it->placed = imp_hash128_equal(m->before, m->space);
        } else {
            /* Of equal ones bsearch may give any, but always the same one. */
            const place *p = find_place(r, m->before);
            it->placed = p && p->known && p->position == m->first_token &&
                         imp_hash128_equal(meta(&r->items[p->item])->space, m->space);
            if (it->placed) {
                it->parent = p->item;
                it->parent_n = p->n;
            }
        }
        imp_hash128 h = m->before;
        for (uint32_t t = 0; it->placed && t < m->n_tokens; t++) {
            h = imp_prefix_hash(h, m->tokens + t, 1);
            place *p = find_place(r, h);
            if (!p || p->known) continue;
            *p = (place){.before = h, .position = m->first_token + t + 1, .known = true, .item = i, .n = t + 1};
        }
    }
    return 0;
}

/* ---- the new catalogue */

static int put_item(rebuild *r, size_t i)
{
    imp_store *s = r->s;
    const imp_seg_meta *m = meta(&r->items[i]);
    size_t end = (size_t)m->first_token + m->n_tokens;
    uint64_t node = 0;
    int32_t *tokens = imp_malloc(end * sizeof *tokens);
    if (!tokens) return imp_fail(IMP_E_NOMEM, "no memory to make the catalogue again");
    uint32_t n = m->n_tokens;
    for (size_t at = i; at != SIZE_MAX; n = r->items[at].parent_n, at = r->items[at].parent) {
        const imp_seg_meta *p = meta(&r->items[at]);
        memcpy(tokens + p->first_token, p->tokens, n * sizeof *tokens);
    }
    imp_cat_space space = {m->space, m->model_name, m->created_s};
    imp_cat_segment seg = {m->segment, m->space, imp_round_up(imp_seg_file_bytes(r->items[i].layout), DU_UNIT),
                           m->n_tokens};
    imp_run run = {m->space, tokens, (size_t)m->first_token, end, m->segment, m->derived, m->created_s};
    int rc = imp_forest_tree(&s->forest, m->space) ? 0 : imp_cat_put_space(s->cat, &space);
    if (rc == 0) rc = imp_forest_add_tree(&s->forest, &space);
    if (rc == 0) rc = imp_cat_put_segment(s->cat, &seg);
    if (rc == 0) rc = imp_forest_add_seg(&s->forest, &seg);
    if (rc == 0) rc = imp_edit_add(s, &run, &node);
    if (rc == IMP_E_STALE) rc = 0; /* exact, below what only derived entries hold */
    if (rc == 0 && node == 0) {
        rc = imp_cat_remove_segment(s->cat, m->segment);
        imp_forest_remove_seg(&s->forest, m->segment);
        if (rc == 0) rc = imp_change_doom(s, m->segment);
    }
    imp_free(tokens);
    return rc;
}

static int on_pinned(imp_radix_node *n, void *user)
{
    rebuild *r = user;
    if (!n->pinned) return 0;
    int rc = room((void **)&r->pins, r->n_pins, &r->pins_cap, sizeof *r->pins);
    if (rc == 0) r->pins[r->n_pins++] = (pin){n->segment, n->segment_first + n->n_tokens - 1};
    return rc;
}

typedef struct pinning {
    rebuild *r;
    imp_tree *tree;
} pinning;

static int pin_again(imp_radix_node *n, void *user)
{
    pinning *p = user;
    for (size_t i = 0; i < p->r->n_pins; i++) {
        pin *was = &p->r->pins[i];
        if (was->segment != n->segment || was->last_token < n->segment_first ||
            was->last_token >= n->segment_first + n->n_tokens) {
            continue;
        }
        imp_cat_node row = {n->id,      n->parent,   p->tree->space, n->segment, n->segment_first, n->n_tokens,
                            n->depth,   n->derived,  true,           n->created_s, n->tokens};
        return imp_cat_put_node(p->r->s->cat, &row);
    }
    return 0;
}

static int fill(rebuild *r)
{
    imp_store *s = r->s;
    uint64_t n_lost = 0;
    int rc = imp_cat_begin(s->cat);
    if (rc < 0) return rc;
    for (size_t i = 0; rc == 0 && i < r->n; i++) {
        if (r->items[i].placed) {
            rc = put_item(r, i);
        } else {
            n_lost++;
            rc = imp_change_doom(s, r->items[i].segment);
        }
    }
    for (size_t i = 0; rc == 0 && i < r->n_bad; i++) rc = imp_change_doom(s, r->bad[i]);
    for (size_t i = 0; rc == 0 && i < s->forest.n_trees && r->n_pins > 0; i++) {
        pinning p = {r, &s->forest.trees[i]};
        rc = imp_radix_walk(p.tree->radix, pin_again, &p);
    }
    if (rc < 0) {
        imp_cat_rollback(s->cat);
        return rc;
    }
    rc = imp_cat_commit(s->cat);
    if (rc == 0) {
        imp_log(IMP_LOG_WARN, "%s: %zu segments catalogued, %llu without what comes before them, %zu damaged", s->dir,
                s->forest.segs.n, (unsigned long long)n_lost, r->n_bad);
    }
    return rc;
}

/* The new catalogue in the old one's place. */
static int install(imp_store *s, const char *folder)
{
    char path[4096 + 32];
    struct stat st;
    snprintf(path, sizeof path, "%s/catalogue.db-wal", folder);
    if (stat(path, &st) == 0 && st.st_size > 0) {
        return imp_fail(IMP_E_IO, "%s: the new catalogue couldn't be completed", s->dir);
    }
    int rc = imp_cat_delete(s->dir);
    if (rc < 0) return rc;
    if (renameat(s->dir_fd, "rebuild/catalogue.db", s->dir_fd, "catalogue.db") != 0 || fsync(s->dir_fd) != 0) {
        return imp_fail_errno(errno, "%s: can't put the new catalogue in its place", s->dir);
    }
    return 0;
}

static int make_folder(imp_store *s, char *folder, size_t n_bytes)
{
    struct stat st;
    if ((size_t)snprintf(folder, n_bytes, "%s/rebuild", s->dir) >= n_bytes) {
        return imp_fail(IMP_E_ARG, "%s: the path is too long", s->dir);
    }
    if (mkdirat(s->dir_fd, "rebuild", 0700) == 0) return 0;
    if (errno != EEXIST) return imp_fail_errno(errno, "can't make %s", folder);
    if (fstatat(s->dir_fd, "rebuild", &st, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISDIR(st.st_mode)) {
        return imp_fail(IMP_E_IO, "%s is not a directory of its own", folder);
    }
    return imp_cat_delete(folder); /* of one that was killed */
}

static void remove_folder(const imp_store *s, const char *folder)
{
    (void)imp_cat_delete(folder);
    (void)unlinkat(s->dir_fd, "rebuild", AT_REMOVEDIR);
}

void imp_rebuild_sweep(imp_store *s)
{
    char folder[4096];
    struct stat st;
    if (fstatat(s->dir_fd, "rebuild", &st, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISDIR(st.st_mode)) return;
    if ((size_t)snprintf(folder, sizeof folder, "%s/rebuild", s->dir) < sizeof folder) remove_folder(s, folder);
}

int imp_rebuild(imp_store *s)
{
    rebuild r = {.s = s};
    char folder[4096];
    /* The headers of all segments, which takes long, are read without `lock`. */
    bool entered = s->entered;
    if (entered) imp_leave(s);
    int rc = make_folder(s, folder, sizeof folder);
    bool made = rc == 0;
    if (rc == 0) rc = imp_io_list(s->io, "segments", on_segment, &r);
    if (rc == 0) rc = find_parents(&r);
    if (entered) imp_enter(s);
    if (!made) return rc;
    for (size_t i = 0; rc == 0 && i < s->forest.n_trees; i++) {
        rc = imp_radix_walk(s->forest.trees[i].radix, on_pinned, &r);
    }
    if (rc < 0) goto out;

    imp_forest_free(&s->forest);
    s->epoch++;
    s->first_new = UINT64_MAX;
    s->reload = true;
    s->reserved = s->reorder_reserved = 0;
    rc = imp_cat_open(folder, 0, &s->cat);
    if (rc == 0) {
        imp_cat_use_key(s->cat, s->key);
        rc = fill(&r);
    }
    imp_cat_close(s->cat);
    s->cat = NULL;
    if (rc == 0) rc = install(s, folder);
    for (size_t i = 0; rc == 0 && i < s->n_doomed; i++) {
        char name[32];
        imp_seg_name(s->doomed[i], name);
        if (imp_io_unlink(s->io, name) < 0) imp_log(IMP_LOG_WARN, "%s", imp_last_error());
    }
    s->n_doomed = 0;
    if (rc == 0) s->count.catalogue_rebuilds++;
out:
    remove_folder(s, folder);
    for (size_t i = 0; i < r.n; i++) imp_seg_layout_free(r.items[i].layout);
    imp_free(r.items);
    imp_free(r.places);
    imp_free(r.pins);
    imp_free(r.bad);
    return rc;
}
