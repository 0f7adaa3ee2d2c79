/* verify.c: every byte the store vouches for, checked: the catalogue, the headers with their padding, the maps, the
 * other chunks with theirs, what lies behind the last one, the bases of sketches, and files that don't belong.
 *
 * Other processes may go on meanwhile. What is bad counts only if the catalogue still refers to it afterwards. Chunks
 * that hold no token of any node (evicted or dropped, the segment lives on for its other nodes) are nobody's. */
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
    imp_finding f = {.file = file, .what = what, .segment = segment};
    v->n_found++;
    if (v->fn) v->fn(&f, v->user);
}

static void advance(verify *v, uint64_t bytes)
{
    v->done_bytes += bytes;
    if (v->all_bytes < v->done_bytes) v->all_bytes = v->done_bytes;
    if (v->progress) v->progress(v->done_bytes, v->all_bytes, v->user);
}

/* ---- what nodes say about the segments, as of the beginning */

typedef struct part {
    uint64_t segment, node;
    uint32_t first, n; /* tokens of the segment */
} part;

typedef struct parts {
    part *p; /* by segment, then by first token */
    size_t n;
} parts;

static int add_part(imp_radix_node *n, void *user)
{
    parts *all = user;
    all->p[all->n++] = (part){n->segment, n->id, n->segment_first, n->n_tokens};
    return 0;
}

static int by_segment(const void *a, const void *b)
{
    const part *x = a, *y = b;
    if (x->segment != y->segment) return x->segment < y->segment ? -1 : 1;
    return x->first < y->first ? -1 : x->first > y->first;
}

static int list_parts(verify *v, parts *all)
{
    imp_store *s = v->s;
    size_t n = 0;
    *all = (parts){0};
    imp_lock_fresh(s);
    for (size_t i = 0; i < s->forest.n_trees; i++) n += imp_radix_count(s->forest.trees[i].radix);
    all->p = imp_malloc(n * sizeof *all->p);
    for (size_t i = 0; all->p && i < s->forest.n_trees; i++) {
        (void)imp_radix_walk(s->forest.trees[i].radix, add_part, all);
    }
    v->all_bytes = s->forest.seg_bytes;
    pthread_mutex_unlock(&s->lock);
    if (!all->p) return imp_fail(IMP_E_NOMEM, "no memory to verify");
    if (all->n) qsort(all->p, all->n, sizeof *all->p, by_segment);
    return 0;
}

/* A segment, and what the catalogue says about it. */
typedef struct use_of {
    const part *parts;
    size_t n_parts;
    imp_hash128 space;
    bool derived;
    int32_t *tokens; /* the prompt up to the end of its first node */
    size_t n_tokens;
    uint32_t node_first, node_n; /* that node, in the segment */
} use_of;

/* *gone: no node uses it any more. */
static int find_use(verify *v, use_of *u, bool *gone)
{
    imp_store *s = v->s;
    int rc = 0;
    *gone = true;
    imp_lock_fresh(s);
    imp_segrow *row = imp_forest_seg(&s->forest, u->parts[0].segment);
    imp_tree *tree = row ? imp_forest_tree(&s->forest, row->space) : NULL;
    for (size_t i = 0; tree && *gone && i < u->n_parts; i++) {
        const imp_radix_node *n = imp_radix_get(tree->radix, u->parts[i].node);
        if (!n || n->segment != row->id) continue;
        *gone = false;
        u->space = row->space;
        u->derived = n->derived; /* as all of a segment's */
        u->node_first = n->segment_first;
        u->node_n = n->n_tokens;
        rc = imp_forest_prompt(tree, n->id, n->n_tokens, &u->tokens, &u->n_tokens);
    }
    pthread_mutex_unlock(&s->lock);
    return rc;
}

static bool still_used(verify *v, uint64_t segment)
{
    imp_lock_sure(v->s);
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
    if (v->repair) imp_drop(v->s, segment, from, NULL);
}

/* ---- one segment */

static const char *region_name(imp_region region)
{
    switch (region) {
    case IMP_REGION_K: return "keys";
    case IMP_REGION_V: return "values";
    case IMP_REGION_SCALES: return "scales";
    case IMP_REGION_KV: return "keys and values";
    case IMP_REGION_PROBE: return "probe keys";
    case IMP_REGION_SKETCH: return "sketches";
    case IMP_REGION_MAP: return "map";
    }
    return "chunks";
}

/* The first token that a node uses and the chunk is about; UINT32_MAX: there is none. */
static uint32_t first_used(const imp_seg *seg, const use_of *u, uint32_t index)
{
    imp_region region;
    uint32_t layer, chunk;
    (void)imp_seg_chunk_at(seg->layout, index, &region, &layer, &chunk);
    for (size_t i = 0; i < u->n_parts; i++) {
        const part *p = &u->parts[i];
        uint32_t token = imp_seg_chunk_token(seg, region, layer, chunk, p->first);
        if (token < p->first + p->n) return token;
    }
    return UINT32_MAX;
}

/* The first bad token decides what is dropped, so chunks are told one by one but dropped once, at the end. `*worst`:
 * that token; UINT32_MAX: nothing is bad. */
static void bad_chunk(verify *v, const imp_seg *seg, const use_of *u, uint32_t index, const char *why, uint32_t *worst)
{
    char name[32], what[200];
    imp_region region;
    uint32_t layer, chunk, token = first_used(seg, u, index);
    imp_chunk_place c = imp_seg_chunk_at(seg->layout, index, &region, &layer, &chunk);
    snprintf(what, sizeof what, "%s of layer %u, chunk %u (bytes %llu to %llu): %s", region_name(region), layer, chunk,
             (unsigned long long)c.offset, (unsigned long long)(c.offset + c.n_bytes), why);
    imp_seg_name(seg->id, name);
    tell(v, name, seg->id, what);
    if (token < *worst) *worst = token;
}

static int open_one(verify *v, const imp_seg *seg, const use_of *u, uint32_t index, unsigned char *bytes, uint32_t *worst)
{
    imp_region region;
    uint32_t layer, chunk;
    imp_chunk_place c = imp_seg_chunk_at(seg->layout, index, &region, &layer, &chunk);
    int rc = imp_seg_chunk_open(seg->layout, seg->cipher, index, bytes, c.n_bytes, seg->sums);
    if (rc == IMP_E_CORRUPT) bad_chunk(v, seg, u, index, "the checksum is wrong", worst);
    return rc == IMP_E_CORRUPT ? 0 : rc;
}

static int read_one(verify *v, const imp_seg *seg, const use_of *u, uint32_t index, uint32_t *worst)
{
    imp_region region;
    uint32_t layer, chunk;
    imp_chunk_place c = imp_seg_chunk_at(seg->layout, index, &region, &layer, &chunk);
    int rc = imp_io_read(seg->file, c.offset, v->buf, c.n_bytes);
    if (rc == IMP_E_NOMEM) return rc;
    if (rc < 0) {
        bad_chunk(v, seg, u, index, imp_last_error(), worst);
    } else {
        rc = open_one(v, seg, u, index, v->buf, worst);
        if (rc < 0) return rc;
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
static int check_chunks(verify *v, const imp_seg *seg, const use_of *u, uint32_t *worst)
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
            if (first_used(seg, u, at) == UINT32_MAX) continue;
            rc = whole ? open_one(v, seg, u, at, v->buf + (c.offset - first.offset), worst)
                       : read_one(v, seg, u, at, worst);
            if (rc < 0) return rc;
        }
        advance(v, bytes);
    }
    return 0;
}

/* Does the header say what the catalogue says? */
static const char *compare(const imp_seg *seg, const use_of *u)
{
    const imp_seg_meta *m = imp_seg_layout_meta(seg->layout);
    uint64_t depth = u->n_tokens - u->node_n;
    if (!imp_hash128_equal(m->space, u->space)) return "belongs to another space than the catalogue says";
    if (m->derived && !u->derived) return "is derived, and the catalogue says exact";
    if (m->first_token + u->node_first != depth || (uint64_t)u->node_first + u->node_n > m->n_tokens ||
        memcmp(m->tokens + u->node_first, u->tokens + depth, u->node_n * sizeof *u->tokens) != 0) {
        return "its tokens are not those of the catalogue";
    }
    if (!imp_hash128_equal(imp_prefix_hash(u->space, u->tokens, (size_t)m->first_token), m->before)) {
        return "follows other tokens than the catalogue says";
    }
    if (imp_io_file_bytes(seg->file) > imp_seg_file_bytes(seg->layout)) return "bytes follow after its end";
    return NULL;
}

static int check_segment(verify *v, use_of *u)
{
    uint64_t id = u->parts[0].segment, n_read = 0;
    imp_seg seg = {0};
    uint32_t worst = UINT32_MAX;
    bool gone;
    int rc = find_use(v, u, &gone);
    if (rc < 0 || gone) goto out;
    rc = imp_seg_file_open(v->s, id, &seg, &n_read);
    if (rc == IMP_E_NOMEM) goto out;
    if (rc < 0) {
        char what[256];
        snprintf(what, sizeof what, "%s", imp_last_error());
        bad(v, id, 0, what);
        rc = 0;
        goto out;
    }
    advance(v, imp_seg_header_bytes(seg.layout));
    const char *what = compare(&seg, u);
    if (what) {
        bad(v, id, 0, what);
        goto out;
    }
    rc = check_chunks(v, &seg, u, &worst);
    if (rc == 0 && worst != UINT32_MAX && v->repair) imp_drop(v->s, id, worst, NULL);
out:
    imp_free(u->tokens);
    imp_seg_file_close(&seg);
    return rc;
}

static int check_segments(verify *v)
{
    parts all;
    int rc = list_parts(v, &all);
    for (size_t i = 0, end; rc == 0 && i < all.n; i = end) {
        for (end = i + 1; end < all.n && all.p[end].segment == all.p[i].segment;) end++;
        use_of u = {.parts = all.p + i, .n_parts = end - i};
        rc = check_segment(v, &u);
    }
    imp_free(all.p);
    return rc;
}

/* ---- around the segments */

static void on_catalogue(const char *what, void *user)
{
    verify *v = user;
    v->catalogue_bad = true;
    tell(v, "catalogue.db", 0, what);
}

/* Through a connection of its own: the check reads all of a catalogue, and meanwhile this process's matches and changes
 * go on. Nobody puts another one in its place, since the store holds the directory's lock. */
static int check_beside(verify *v)
{
    imp_cat *own = NULL;
    int rc = imp_cat_open(v->s->dir, IMP_STORE_READONLY, &own);
    if (rc == 0) imp_cat_use_key(own, v->s->key);
    if (rc == 0) rc = imp_cat_check(own, on_catalogue, v);
    imp_cat_close(own);
    return rc;
}

static int check_catalogue(verify *v)
{
    imp_store *s = v->s;
    int rc = 0;
    imp_lock_both(s);
    (void)imp_catalogue_refresh(s); /* perhaps it can be had now */
    imp_leave(s);
    bool found = s->cat != NULL, in_memory = imp_io_in_memory(s->io);
    if (found && in_memory) rc = imp_cat_check(s->cat, on_catalogue, v);
    pthread_mutex_unlock(&s->cat_lock);
    if (!found) {
        on_catalogue("it can't be read", v);
        return 0;
    }
    if (!in_memory) rc = check_beside(v);
    if (rc == IMP_E_CORRUPT && !v->catalogue_bad) on_catalogue(imp_last_error(), v);
    if (v->catalogue_bad && v->repair) {
        imp_catalogue_take(s);
        imp_enter(s);
        (void)imp_catalogue_repair(s);
        imp_leave(s);
        imp_catalogue_give(s);
    }
    return v->catalogue_bad ? 0 : rc;
}

int64_t imp_store_verify(imp_store *s, int repair, void (*fn)(const imp_finding *finding, void *user),
                         void (*progress)(uint64_t done_bytes, uint64_t all_bytes, void *user), void *user)
{
    if (!s) return imp_fail(IMP_E_ARG, "imp_store_verify: no store");
    if (repair && s->readonly) return imp_fail(IMP_E_PERM, "%s is open for reading only", s->dir);
    verify v = {.s = s, .repair = repair != 0, .fn = fn, .progress = progress, .user = user};
    imp_kept_line kept;
    imp_error_keep(&kept);
    pthread_mutex_lock(&s->lock);
    memset(s->aside, 0, sizeof s->aside); /* what can be read again is found out here */
    pthread_mutex_unlock(&s->lock);
    int rc = check_catalogue(&v);
    if (rc == 0) rc = check_segments(&v);
    if (rc == 0) rc = imp_bases_verify(s, v.repair, fn, user, &v.n_found);
    if (rc == 0) rc = imp_strays(s, v.repair, fn, user, &v.n_found);
    imp_free(v.buf);
    rc = imp_error_back(&kept, rc);
    return rc < 0 ? rc : v.n_found;
}
