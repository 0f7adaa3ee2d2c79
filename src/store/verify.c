/* verify.c: every byte the store vouches for, checked: the catalogue, the headers with their padding, the chunks with
 * theirs, what lies behind the last one, and files that don't belong.
 *
 * Other processes may go on meanwhile. What is bad counts only if the catalogue still refers to it afterwards. Chunks that
 * hold no token of any node (evicted or dropped, the segment lives on for its other nodes) are nobody's. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/log.h"
#include "base/status.h"
#include "store/store_internal.h"

enum { RUN_BYTES = 4 << 20 };

typedef struct verify {
    imp_store *s;
    bool repair;
    void (*fn)(const imp_finding *finding, void *user);
    void (*progress)(uint64_t done_bytes, uint64_t all_bytes, void *user);
    void *user;
    int64_t n_found;
    uint64_t done_bytes, all_bytes;
    bool catalogue_bad;
    unsigned char *buf;
    size_t buf_bytes;
} verify;

static void tell(verify *v, const char *file, uint64_t segment, const char *what)
{
    imp_finding f = {file, what, segment};
    v->n_found++;
    if (v->fn) v->fn(&f, v->user);
}

static void advance(verify *v, uint64_t bytes)
{
    v->done_bytes += bytes;
    if (v->all_bytes < v->done_bytes) v->all_bytes = v->done_bytes;
    if (v->progress) v->progress(v->done_bytes, v->all_bytes, v->user);
}

/* ---- what nodes say about a segment */

typedef struct use_of {
    uint64_t segment;
    bool any, derived;
    bool *used;      /* [n_tokens] of the segment; NULL: only the first node is wanted */
    uint32_t n_used; /* their number */
    uint64_t node;   /* the one that begins first */
    uint32_t node_first, node_n;
} use_of;

static int on_node(imp_radix_node *n, void *user)
{
    use_of *u = user;
    if (n->segment != u->segment) return 0;
    if (!u->any || n->segment_first < u->node_first) {
        u->node = n->id;
        u->node_first = n->segment_first;
        u->node_n = n->n_tokens;
    }
    u->any = true;
    u->derived = u->derived || n->derived;
    for (uint32_t i = 0; u->used && i < n->n_tokens && n->segment_first + i < u->n_used; i++) {
        u->used[n->segment_first + i] = true;
    }
    return 0;
}

/* Fill in `u`, and the prompt up to the end of the first node. False: no node uses the segment. */
static bool find_use(verify *v, use_of *u, imp_hash128 *space, int32_t **tokens, size_t *n_tokens, int *rc)
{
    imp_store *s = v->s;
    *rc = 0;
    *tokens = NULL;
    imp_lock_fresh(s);
    imp_segrow *row = imp_forest_seg(&s->forest, u->segment);
    imp_tree *tree = row ? imp_forest_tree(&s->forest, row->space) : NULL;
    if (tree) {
        (void)imp_radix_walk(tree->radix, on_node, u);
        *space = row->space;
        if (u->any) *rc = imp_forest_prompt(tree, u->node, u->node_n, tokens, n_tokens);
    }
    pthread_mutex_unlock(&s->lock);
    return u->any;
}

static bool still_used(verify *v, uint64_t segment)
{
    imp_lock_fresh(v->s);
    bool used = imp_forest_seg(&v->s->forest, segment) != NULL;
    pthread_mutex_unlock(&v->s->lock);
    return used;
}

/* Something of a segment is bad from its token `from` on. */
static void bad(verify *v, uint64_t segment, uint32_t from, const char *what)
{
    char name[32];
    if (!still_used(v, segment)) return;
    imp_seg_name(segment, name);
    tell(v, name, segment, what);
    if (v->repair) imp_drop(v->s, segment, from, what);
}

/* ---- one segment */

static const char *region_name(imp_region region)
{
    return region == IMP_REGION_K ? "keys" : region == IMP_REGION_V ? "values" : "scales";
}

/* Tokens [first, first + n) of the segment: does any node use one of them? */
static bool any_used(const use_of *u, imp_chunk_place c)
{
    for (uint32_t i = 0; i < c.n_tokens && c.first_token + i < u->n_used; i++) {
        if (u->used[c.first_token + i]) return true;
    }
    return false;
}

typedef struct worst {
    uint32_t from; /* UINT32_MAX: nothing is bad */
    char what[200];
} worst;

/* The first bad token decides what is dropped, so chunks are told one by one but dropped once, at the end. */
static void bad_chunk(verify *v, const imp_seg *seg, uint32_t index, const char *why, worst *w)
{
    char name[32], what[200];
    imp_region region;
    uint32_t layer, chunk;
    imp_chunk_place c = imp_seg_chunk_at(seg->layout, index, &region, &layer, &chunk);
    snprintf(what, sizeof what, "%s of layer %u, chunk %u (bytes %llu to %llu): %s", region_name(region), layer, chunk,
             (unsigned long long)c.offset, (unsigned long long)(c.offset + c.n_bytes), why);
    imp_seg_name(seg->id, name);
    tell(v, name, seg->id, what);
    if (c.first_token < w->from) {
        w->from = c.first_token;
        snprintf(w->what, sizeof w->what, "%s", what);
    }
}

static int read_one(verify *v, const imp_seg *seg, uint32_t index, worst *w)
{
    imp_region region;
    uint32_t layer, chunk;
    imp_chunk_place c = imp_seg_chunk_at(seg->layout, index, &region, &layer, &chunk);
    int rc = imp_io_read(seg->file, c.offset, v->buf, c.n_bytes);
    if (rc == IMP_E_NOMEM) return rc;
    if (rc < 0) {
        bad_chunk(v, seg, index, imp_last_error(), w);
    } else if (imp_seg_checksum(seg->layout, index, v->buf, c.n_bytes) != seg->sums[index]) {
        bad_chunk(v, seg, index, "the checksum is wrong", w);
    }
    return 0;
}

static int have_buffer(verify *v, uint32_t n_bytes)
{
    size_t need = n_bytes < RUN_BYTES ? RUN_BYTES : n_bytes;
    if (need <= v->buf_bytes) return 0;
    imp_free(v->buf);
    v->buf_bytes = 0;
    v->buf = imp_aligned(imp_io_alignment(v->s->io), need);
    if (!v->buf) return imp_fail(IMP_E_NOMEM, "no memory to verify");
    v->buf_bytes = need;
    return 0;
}

/* Chunks lie one behind the other: read as many as fit at a time. */
static int check_chunks(verify *v, const imp_seg *seg, const use_of *u, worst *w)
{
    uint32_t n = imp_seg_n_chunks(seg->layout), layer, chunk;
    imp_region region;
    for (uint32_t i = 0, end; i < n; i = end) {
        imp_chunk_place first = imp_seg_chunk_at(seg->layout, i, &region, &layer, &chunk);
        uint64_t bytes = first.n_bytes;
        int rc = have_buffer(v, first.n_bytes);
        if (rc < 0) return rc;
        for (end = i + 1; end < n; end++) {
            imp_chunk_place c = imp_seg_chunk_at(seg->layout, end, &region, &layer, &chunk);
            if (bytes + c.n_bytes > v->buf_bytes) break;
            bytes += c.n_bytes;
        }
        bool whole = imp_io_read(seg->file, first.offset, v->buf, bytes) == 0;
        for (uint32_t at = i; at < end; at++) {
            imp_chunk_place c = imp_seg_chunk_at(seg->layout, at, &region, &layer, &chunk);
            if (!any_used(u, c)) continue;
            if (!whole) {
                rc = read_one(v, seg, at, w);
                if (rc < 0) return rc;
            } else if (imp_seg_checksum(seg->layout, at, v->buf + (c.offset - first.offset), c.n_bytes) != seg->sums[at]) {
                bad_chunk(v, seg, at, "the checksum is wrong", w);
            }
        }
        advance(v, bytes);
    }
    return 0;
}

/* Does the header say what the catalogue says? */
static const char *compare(const imp_seg *seg, const use_of *u, imp_hash128 space, const int32_t *tokens, size_t n_tokens)
{
    const imp_seg_meta *m = imp_seg_layout_meta(seg->layout);
    uint64_t depth = n_tokens - u->node_n;
    if (!imp_hash128_equal(m->space, space)) return "belongs to another space than the catalogue says";
    if (m->derived && !u->derived) return "is derived, and the catalogue says exact";
    if (m->first_token + u->node_first != depth || (uint64_t)u->node_first + u->node_n > m->n_tokens ||
        memcmp(m->tokens + u->node_first, tokens + depth, u->node_n * sizeof *tokens) != 0) {
        return "its tokens are not those of the catalogue";
    }
    if (!imp_hash128_equal(imp_prefix_hash(space, tokens, (size_t)m->first_token), m->before)) {
        return "follows other tokens than the catalogue says";
    }
    return NULL;
}

static int check_segment(verify *v, uint64_t id)
{
    imp_seg seg = {0};
    use_of u = {.segment = id};
    imp_hash128 space;
    int32_t *tokens = NULL;
    size_t n_tokens = 0;
    uint64_t n_read = 0;
    worst w = {.from = UINT32_MAX};
    int rc = imp_seg_file_open(v->s, id, &seg, &n_read);
    if (rc == IMP_E_NOMEM) return rc;
    if (rc < 0) {
        char what[256];
        snprintf(what, sizeof what, "%s", imp_last_error());
        bad(v, id, 0, what);
        return 0;
    }
    u.n_used = imp_seg_layout_meta(seg.layout)->n_tokens;
    u.used = imp_calloc(u.n_used, sizeof *u.used);
    if (!u.used) {
        rc = imp_fail(IMP_E_NOMEM, "no memory to verify");
        goto out;
    }
    if (!find_use(v, &u, &space, &tokens, &n_tokens, &rc) || rc < 0) goto out; /* gone by now */
    advance(v, imp_seg_header_bytes(seg.layout));
    const char *what = compare(&seg, &u, space, tokens, n_tokens);
    if (!what && imp_io_file_bytes(seg.file) > imp_seg_file_bytes(seg.layout)) what = "bytes follow after its end";
    if (what) {
        bad(v, id, 0, what);
        goto out;
    }
    rc = check_chunks(v, &seg, &u, &w);
    if (rc == 0 && w.from != UINT32_MAX && v->repair) imp_drop(v->s, id, w.from, w.what);
out:
    imp_free(tokens);
    imp_free(u.used);
    imp_seg_file_close(&seg);
    return rc;
}

static int by_id(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static int check_segments(verify *v)
{
    imp_store *s = v->s;
    size_t n = 0;
    int rc = 0;
    imp_lock_fresh(s);
    uint64_t *ids = imp_malloc(s->forest.segs.n * sizeof *ids);
    for (size_t i = 0; ids && i < s->forest.segs.n_slots; i++) {
        const imp_segrow *row = s->forest.segs.slots[i].value;
        if (!row) continue;
        ids[n++] = row->id;
        v->all_bytes += row->disk_bytes;
    }
    pthread_mutex_unlock(&s->lock);
    if (!ids) return imp_fail(IMP_E_NOMEM, "no memory to verify");
    qsort(ids, n, sizeof *ids, by_id);
    for (size_t i = 0; rc == 0 && i < n; i++) rc = check_segment(v, ids[i]);
    imp_free(ids);
    return rc;
}

/* ---- around the segments */

static void on_catalogue(const char *what, void *user)
{
    verify *v = user;
    v->catalogue_bad = true;
    tell(v, "catalogue.db", 0, what);
}

static int check_catalogue(verify *v)
{
    imp_store *s = v->s;
    pthread_mutex_lock(&s->cat_lock);
    pthread_mutex_lock(&s->lock);
    (void)imp_catalogue_refresh(s); /* perhaps it can be had now */
    pthread_mutex_unlock(&s->lock);
    if (!s->cat) {
        on_catalogue("it can't be read", v);
        pthread_mutex_unlock(&s->cat_lock);
        return 0;
    }
    int rc = imp_cat_check(s->cat, on_catalogue, v);
    if (rc == IMP_E_CORRUPT && !v->catalogue_bad) on_catalogue(imp_last_error(), v);
    if (v->catalogue_bad && v->repair) {
        pthread_mutex_lock(&s->lock);
        (void)imp_catalogue_repair(s);
        pthread_mutex_unlock(&s->lock);
    }
    pthread_mutex_unlock(&s->cat_lock);
    return v->catalogue_bad ? 0 : rc;
}

int64_t imp_store_verify(imp_store *s, int repair, void (*fn)(const imp_finding *finding, void *user),
                         void (*progress)(uint64_t done_bytes, uint64_t all_bytes, void *user), void *user)
{
    if (repair && s->readonly) return imp_fail(IMP_E_PERM, "%s is open for reading only", s->dir);
    verify v = {.s = s, .repair = repair != 0, .fn = fn, .progress = progress, .user = user};
    int rc = check_catalogue(&v);
    if (rc == 0) rc = check_segments(&v);
    if (rc == 0) rc = imp_strays(s, v.repair, fn, user, &v.n_found);
    imp_free(v.buf);
    return rc < 0 ? rc : v.n_found;
}
