/* match.c: the longest stored way along a prompt, with its segments open. */
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "store/store_internal.h"

/* Long enough that a bad disk costs few requests a second pass, short enough that a pulled cable is forgotten. */
static const uint64_t aside_ns = 600000000000u;

static void lock_after(imp_store *s, bool ask)
{
    if (!ask) {
        pthread_mutex_lock(&s->lock);
        return;
    }
    imp_lock_both(s);
    int rc = imp_catalogue_refresh(s);
    if (rc < 0) imp_log(IMP_LOG_DEBUG, "%s: not refreshed: %s", s->dir, imp_last_error());
    s->entered = false;
    pthread_mutex_unlock(&s->cat_lock);
}

void imp_lock_fresh(imp_store *s)
{
    /* While this process changes the catalogue nobody else does, and the change began with everything read. Its commit
     * waits for the disk, which a match need not. A wrong guess costs a wait or a miss, never a wrong answer. */
    lock_after(s, !atomic_load_explicit(&s->changing, memory_order_relaxed));
}

void imp_lock_sure(imp_store *s) { lock_after(s, true); }

static void use(imp_store *s, imp_tree *tree, imp_radix_node *n, int64_t now_s)
{
    n->leases++;
    n->hits++;
    n->used_s = now_s;
    imp_radix_touch(tree->radix, n);
    if (s->n_used < IMP_USED_MAX) s->used[s->n_used++] = n->id;
}

/* How many steps of a way there are before the first one into a segment that is set aside. With `lock` held. */
static size_t steps_to_aside(const imp_store *s, size_t n_steps)
{
    uint64_t now_ns = 0;
    for (size_t a = 0; a < IMP_ASIDE_MAX; a++) {
        if (!s->aside[a].segment) continue;
        if (!now_ns) now_ns = imp_now_ns();
        if (s->aside[a].until_ns < now_ns) continue;
        for (size_t i = 0; i < n_steps; i++) {
            if (s->steps[i].node->segment == s->aside[a].segment) n_steps = i;
        }
    }
    return n_steps;
}

/* Pin the nodes along the tokens. Segments that aren't open stay NULL. `sure`: the forest turned out to be out of
 * date. */
static int find_way(imp_store *s, imp_hash128 space, const int32_t *tokens, size_t n_tokens, bool exact_only, bool sure,
                    imp_path *out)
{
    size_t n_steps = 0;
    int rc = 0;
    *out = (imp_path){0};
    sure ? imp_lock_sure(s) : imp_lock_fresh(s);
    imp_tree *tree = imp_forest_tree(&s->forest, space);
    if (tree) rc = imp_steps(s, tree, tokens, n_tokens, exact_only, &n_steps, &out->n_tokens);
    if (rc < 0) goto out;
    size_t n_sound = steps_to_aside(s, n_steps);
    if (n_sound < n_steps) out->n_tokens = s->steps[n_sound].node->depth;
    n_steps = n_sound;
    if (n_steps == 0) goto out;
    out->spans = imp_calloc(n_steps, sizeof *out->spans);
    if (!out->spans) {
        rc = imp_fail(IMP_E_NOMEM, "no memory for a prefix of %zu nodes", n_steps);
        goto out;
    }
    out->n_spans = n_steps;
    out->epoch = s->epoch;
    int64_t now_s = imp_uses_now(s);
    for (size_t i = 0; i < n_steps; i++) {
        imp_radix_node *n = s->steps[i].node;
        out->spans[i] = (imp_span){
            .seg = imp_segs_get(s, n->segment),
            .node = n->id,
            .segment = n->segment,
            .segment_first = n->segment_first,
            .n_tokens = s->steps[i].n_matched,
            .depth = n->depth,
            .derived = n->derived,
        };
        use(s, tree, n, now_s);
    }
out:
    pthread_mutex_unlock(&s->lock);
    if (rc < 0) *out = (imp_path){0};
    return rc;
}

/* S4. `fresh`: the segment was just opened, so that what comes before it is checked too. */
static int check_span(const imp_span *span, imp_hash128 space, const int32_t *tokens, bool fresh)
{
    const imp_seg_meta *m = imp_seg_layout_meta(span->seg->layout);
    const char *what = NULL;
    if (!imp_hash128_equal(m->space, space)) {
        what = "belongs to another space";
    } else if (m->first_token + span->segment_first != span->depth ||
               (uint64_t)span->segment_first + span->n_tokens > m->n_tokens ||
               memcmp(m->tokens + span->segment_first, tokens + span->depth, span->n_tokens * sizeof *tokens) != 0) {
        what = "its tokens are not those of the catalogue";
    } else if (m->derived && !span->derived) {
        what = "is derived, and the catalogue says exact";
    } else if (fresh && !imp_hash128_equal(imp_prefix_hash(space, tokens, (size_t)m->first_token), m->before)) {
        what = "follows other tokens than the catalogue says";
    }
    return what ? imp_fail(IMP_E_CORRUPT, "%s", what) : 0;
}

static int open_span(imp_store *s, imp_span *span, imp_hash128 space, const int32_t *tokens, uint64_t *header_bytes)
{
    bool fresh = false;
    if (!span->seg) { /* a span before may have opened it */
        int rc = imp_segs_open(s, span->segment, &span->seg, &fresh, header_bytes);
        if (rc < 0) return rc;
    }
    return check_span(span, space, tokens, fresh);
}

/* Give up the spans from `n` on. */
static void cut(imp_store *s, imp_path *path, size_t n)
{
    pthread_mutex_lock(&s->lock);
    for (size_t i = n; i < path->n_spans; i++) {
        imp_tree *tree;
        imp_radix_node *node =
            path->epoch == s->epoch ? imp_forest_node(&s->forest, path->spans[i].node, &tree) : NULL;
        if (node && node->leases > 0) {
            node->leases--;
            imp_radix_touch(tree->radix, node);
        }
        if (path->spans[i].seg) imp_segs_put(s, path->spans[i].seg);
    }
    pthread_mutex_unlock(&s->lock);
    if (n < path->n_spans) path->n_tokens = path->spans[n].depth;
    path->n_spans = n;
    if (n == 0) {
        imp_free(path->spans);
        *path = (imp_path){0};
    }
}

/* Everything that a match needed could be read: that is all right then, unless a segment is set aside still. One that
 * is gone, by another process's repair perhaps, is nobody's trouble any more. */
static void reads_again(imp_store *s)
{
    bool aside = false;
    uint64_t now_ns = imp_now_ns();
    pthread_mutex_lock(&s->lock);
    for (size_t a = 0; a < IMP_ASIDE_MAX; a++) {
        if (!s->aside[a].segment || s->aside[a].until_ns < now_ns) continue;
        aside = aside || imp_forest_seg(&s->forest, s->aside[a].segment);
    }
    if (!aside) imp_fault_over(s, IMP_FAULT_READ);
    pthread_mutex_unlock(&s->lock);
}

int imp_store_match(imp_store *s, imp_hash128 space, const int32_t *tokens, size_t n_tokens, bool exact_only,
                    imp_path *out, uint64_t *header_bytes)
{
    uint64_t missing = 0;
    *header_bytes = 0;
    *out = (imp_path){0};
    if (imp_io_hung(s->io)) return 0; /* who waits for this disk waits in vain */
    for (;;) {
        int rc = find_way(s, space, tokens, n_tokens, exact_only, missing != 0, out);
        if (rc < 0) return rc;
        size_t i = 0;
        while (i < out->n_spans && (rc = open_span(s, &out->spans[i], space, tokens, header_bytes)) == 0) i++;
        if (i == out->n_spans) {
            if (i > 0 && atomic_load_explicit(&s->faulty, memory_order_relaxed)) reads_again(s);
            return 0;
        }

        uint64_t segment = out->spans[i].segment;
        char what[256];
        snprintf(what, sizeof what, "%s", imp_last_error());
        if (rc == IMP_E_NOTFOUND && missing != segment) {
            missing = segment; /* evicted or reordered just now: the catalogue says so already */
            cut(s, out, 0);
            continue;
        }
        cut(s, out, i);
        if (rc == IMP_E_NOTFOUND || rc == IMP_E_CORRUPT) {
            pthread_mutex_lock(&s->lock);
            s->count.corrupt_chunks++;
            pthread_mutex_unlock(&s->lock);
            imp_drop(s, segment, 0, rc == IMP_E_NOTFOUND ? "the file is missing" : what);
        } else {
            /* Not its fault, perhaps: too many open files, a newer format. It stays. */
            pthread_mutex_lock(&s->lock);
            imp_fault_note(s, IMP_FAULT_READ, rc);
            pthread_mutex_unlock(&s->lock);
            imp_log(IMP_LOG_WARN, "%s: segments/%016llx.seg can't be used now: %s", s->dir, (unsigned long long)segment,
                    what);
        }
        return 0;
    }
}

void imp_store_unpin(imp_store *s, imp_path *path) { cut(s, path, 0); }

void imp_store_set_aside(imp_store *s, const imp_seg *seg, const char *what)
{
    pthread_mutex_lock(&s->lock);
    (void)imp_fail(IMP_E_IO, "%s", what);
    imp_fault_note(s, IMP_FAULT_READ, IMP_E_IO);
    s->aside[s->next_aside++ % IMP_ASIDE_MAX] = (imp_aside){seg->id, imp_now_ns() + aside_ns};
    pthread_mutex_unlock(&s->lock);
    imp_log(IMP_LOG_WARN, "%s: segments/%016llx.seg is not used for %llu minutes: %s", s->dir,
            (unsigned long long)seg->id, (unsigned long long)(aside_ns / 60000000000u), what);
}

void imp_store_read_late(imp_store *s, const char *what)
{
    pthread_mutex_lock(&s->lock);
    (void)imp_fail(IMP_E_IO, "%s", what);
    imp_fault_note(s, IMP_FAULT_READ, IMP_E_IO);
    pthread_mutex_unlock(&s->lock);
    imp_log(IMP_LOG_WARN, "%s; nothing is read until it comes back", what);
}

void imp_store_drop_bad(imp_store *s, const imp_seg *seg, imp_region region, uint32_t layer, uint32_t chunk,
                        const char *what)
{
    pthread_mutex_lock(&s->lock);
    s->count.corrupt_chunks++;
    pthread_mutex_unlock(&s->lock);
    imp_drop(s, seg->id, imp_seg_chunk_token(seg, region, layer, chunk, 0), what);
}
