/* match.c: the longest stored way along a prompt, with its segments open. */
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "store/store_internal.h"

/* Long enough that a bad disk costs few requests a second pass, short enough that a pulled cable is forgotten. */
static const uint64_t aside_ns = 600000000000u;

enum { LOOK_NS = 1000000 }; /* between two tries to get at the catalogue */

/* ---- `lock`, and a forest that is up to date */

/* While this process changes the catalogue nobody else does, and the change began with everything read. Its commit
 * waits for the disk, which a match need not. A wrong guess costs a wait or a miss, never a wrong answer. */
static bool must_ask(const imp_store *s) { return !atomic_load_explicit(&s->changing, memory_order_relaxed); }

/* With cat_lock held, which it lets go of; takes `lock`. */
static void refresh(imp_store *s)
{
    imp_enter(s);
    int rc = imp_catalogue_refresh(s);
    if (rc < 0) imp_log(IMP_LOG_DEBUG, "%s: not refreshed: %s", s->dir, imp_last_error());
    s->entered = false;
    pthread_mutex_unlock(&s->cat_lock);
}

void imp_lock_sure(imp_store *s)
{
    pthread_mutex_lock(&s->cat_lock);
    refresh(s);
}

/* Who only asks whether something has changed holds it for a moment. Who holds it for longer may wait for the disk. */
static bool lock_cat_soon(imp_store *s)
{
    for (int tries = 0; tries < 100; tries++) {
        if (pthread_mutex_trylock(&s->cat_lock) == 0) return true;
        sched_yield();
    }
    return false;
}

bool imp_catalogue_look(imp_store *s)
{
    /* A change that begins while this waits isn't waited for either. */
    while (must_ask(s)) {
        if (lock_cat_soon(s)) return true;
        nanosleep(&(struct timespec){0, LOOK_NS}, NULL);
    }
    return false;
}

void imp_lock_fresh(imp_store *s)
{
    if (imp_catalogue_look(s)) refresh(s);
    else pthread_mutex_lock(&s->lock);
}

/* Take `lock`, if the forest is up to date. False: that takes the disk to find out, or to bring about. */
static bool lock_at_once(imp_store *s)
{
    if (must_ask(s)) {
        if (!lock_cat_soon(s)) return false;
        bool untouched = imp_catalogue_untouched(s);
        pthread_mutex_unlock(&s->cat_lock);
        if (!untouched) return false;
    }
    pthread_mutex_lock(&s->lock);
    return true;
}

static int run_refresh(imp_store *s, imp_errand *e)
{
    (void)e;
    imp_lock_fresh(s);
    pthread_mutex_unlock(&s->lock);
    return 0;
}

void imp_lock_in_time(imp_store *s)
{
    if (!imp_errands_bounded(s)) {
        imp_lock_fresh(s);
        return;
    }
    bool hung = imp_store_hung(s);
    if (!hung && lock_at_once(s)) return;
    imp_errand *e = hung ? NULL : imp_calloc(1, sizeof *e);
    if (e) {
        e->run = run_refresh;
        e->what = "reading the catalogue";
        if (imp_errand_do(s, e)) imp_free(e);
    }
    pthread_mutex_lock(&s->lock);
}

/* ---- the way */

/* Returns whether it is pinned: not a node of a change that may still be rolled back. Then its id may become another
 * node's, which this path would unpin. */
static bool use(imp_store *s, imp_tree *tree, imp_radix_node *n, int64_t now_s)
{
    bool stays = n->id < s->first_new;
    n->leases += stays;
    n->hits++;
    n->used_s = now_s;
    imp_radix_touch(tree->radix, n);
    if (s->n_used < IMP_USED_MAX) s->used[s->n_used++] = n->id;
    return stays;
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

/* The prompt that is looked for. */
typedef struct prompt {
    imp_hash128 space;
    const int32_t *tokens;
    size_t n_tokens;
    bool exact_only;
} prompt;

typedef enum how {
    AT_ONCE, /* without the disk */
    FRESH,
    SURE     /* the forest turned out to be out of date */
} how;

enum { NOT_AT_ONCE = 1 };

/* S4. `fresh`: the segment was just opened, so that what comes before it is checked too. */
static int check_span(const imp_span *span, const prompt *p, bool fresh)
{
    const imp_seg_meta *m = imp_seg_layout_meta(span->seg->layout);
    const int32_t *tokens = p->tokens;
    const char *what = NULL;
    if (!imp_hash128_equal(m->space, p->space)) {
        what = "belongs to another space";
    } else if (m->first_token + span->segment_first != span->depth ||
               (uint64_t)span->segment_first + span->n_tokens > m->n_tokens ||
               memcmp(m->tokens + span->segment_first, tokens + span->depth, span->n_tokens * sizeof *tokens) != 0) {
        what = "its tokens are not those of the catalogue";
    } else if (m->derived && !span->derived) {
        what = "is derived, and the catalogue says exact";
    } else if (fresh && !imp_hash128_equal(imp_prefix_hash(p->space, tokens, (size_t)m->first_token), m->before)) {
        what = "follows other tokens than the catalogue says";
    }
    return what ? imp_fail(IMP_E_CORRUPT, "%s", what) : 0;
}

/* The spans of the steps, with their segments as far as these are open. NOT_AT_ONCE: one isn't, or isn't as it should
 * be. With `lock` held. */
static int take_spans(imp_store *s, const prompt *p, imp_path *path, how h)
{
    for (size_t i = 0; i < path->n_spans; i++) {
        const imp_radix_node *n = s->steps[i].node;
        path->spans[i] = (imp_span){
            .seg = imp_segs_get(s, n->segment),
            .node = n->id,
            .segment = n->segment,
            .segment_first = n->segment_first,
            .n_tokens = s->steps[i].n_matched,
            .depth = n->depth,
            .derived = n->derived,
        };
        if (h != AT_ONCE || (path->spans[i].seg && check_span(&path->spans[i], p, false) == 0)) continue;
        for (size_t j = 0; j <= i; j++) {
            if (path->spans[j].seg) imp_segs_put(s, path->spans[j].seg);
        }
        return NOT_AT_ONCE;
    }
    return 0;
}

/* Pin the nodes along the tokens. Segments that aren't open stay NULL. */
static int find_way(imp_store *s, const prompt *p, how h, imp_path *out)
{
    size_t n_steps = 0;
    int rc = 0;
    *out = (imp_path){0};
    if (h == AT_ONCE && !lock_at_once(s)) return NOT_AT_ONCE;
    if (h == FRESH) imp_lock_fresh(s);
    if (h == SURE) imp_lock_sure(s);
    imp_tree *tree = imp_forest_tree(&s->forest, p->space);
    if (tree) rc = imp_steps(s, tree, p->tokens, p->n_tokens, p->exact_only, &n_steps, &out->n_tokens);
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
    rc = take_spans(s, p, out, h);
    if (rc != 0) goto out;
    int64_t now_s = imp_uses_now(s);
    for (size_t i = 0; i < n_steps; i++) out->spans[i].leased = use(s, tree, s->steps[i].node, now_s);
out:
    pthread_mutex_unlock(&s->lock);
    if (rc != 0) {
        imp_free(out->spans);
        *out = (imp_path){0};
    }
    return rc;
}

static int open_span(imp_store *s, imp_span *span, const prompt *p, uint64_t *header_bytes)
{
    bool fresh = false;
    if (!span->seg) { /* a span before may have opened it */
        int rc = imp_segs_open(s, span->segment, &span->seg, &fresh, header_bytes);
        if (rc < 0) return rc;
    }
    return check_span(span, p, fresh);
}

/* Give up the spans from `n` on. */
static void cut(imp_store *s, imp_path *path, size_t n)
{
    pthread_mutex_lock(&s->lock);
    for (size_t i = n; i < path->n_spans; i++) {
        imp_tree *tree;
        bool leased = path->spans[i].leased && path->epoch == s->epoch;
        imp_radix_node *node = leased ? imp_forest_node(&s->forest, path->spans[i].node, &tree) : NULL;
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

/* However long it takes. */
static int match(imp_store *s, const prompt *p, imp_path *out, uint64_t *header_bytes)
{
    uint64_t missing = 0;
    *header_bytes = 0;
    for (;;) {
        int rc = find_way(s, p, missing ? SURE : FRESH, out);
        if (rc < 0) return rc;
        size_t i = 0;
        while (i < out->n_spans && (rc = open_span(s, &out->spans[i], p, header_bytes)) == 0) i++;
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

/* Without the disk: the catalogue is as it was, and all segments are open. Else NOT_AT_ONCE. */
static int match_at_once(imp_store *s, const prompt *p, imp_path *out)
{
    int rc = find_way(s, p, AT_ONCE, out);
    if (rc == 0 && out->n_spans > 0 && atomic_load_explicit(&s->faulty, memory_order_relaxed)) reads_again(s);
    return rc;
}

typedef struct match_errand {
    imp_errand e;
    prompt p;
    imp_path path;
    uint64_t header_bytes;
    int32_t tokens[];
} match_errand;

static int run_match(imp_store *s, imp_errand *e)
{
    match_errand *m = (match_errand *)(void *)e;
    return match(s, &m->p, &m->path, &m->header_bytes);
}

static void give_up_match(imp_store *s, imp_errand *e) { cut(s, &((match_errand *)(void *)e)->path, 0); }

int imp_store_match(imp_store *s, imp_hash128 space, const int32_t *tokens, size_t n_tokens, bool exact_only,
                    imp_path *out, uint64_t *header_bytes)
{
    prompt p = {space, tokens, n_tokens, exact_only};
    *header_bytes = 0;
    *out = (imp_path){0};
    if (imp_store_hung(s)) return 0; /* who waits for this disk waits in vain */
    if (!imp_errands_bounded(s)) return match(s, &p, out, header_bytes);
    int rc = match_at_once(s, &p, out);
    if (rc != NOT_AT_ONCE) return rc;

    match_errand *m = imp_calloc(1, sizeof *m + n_tokens * sizeof *tokens);
    if (!m) return imp_fail(IMP_E_NOMEM, "no memory to look for a prompt of %zu tokens", n_tokens);
    m->e = (imp_errand){.run = run_match, .give_up = give_up_match, .what = "looking for a prompt"};
    m->p = p;
    m->p.tokens = memcpy(m->tokens, tokens, n_tokens * sizeof *tokens);
    if (!imp_errand_do(s, &m->e)) return 0;
    rc = m->e.status;
    *out = m->path;
    *header_bytes = m->header_bytes;
    imp_free(m);
    return rc;
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

typedef struct drop_errand {
    imp_errand e;
    uint64_t segment;
    uint32_t from;
    char what[256];
} drop_errand;

static int run_drop(imp_store *s, imp_errand *e)
{
    const drop_errand *d = (drop_errand *)(void *)e;
    imp_drop(s, d->segment, d->from, d->what);
    return 0;
}

void imp_store_drop_bad(imp_store *s, const imp_seg *seg, imp_region region, uint32_t layer, uint32_t chunk,
                        const char *what)
{
    uint32_t from = imp_seg_chunk_token(seg, region, layer, chunk, 0);
    pthread_mutex_lock(&s->lock);
    s->count.corrupt_chunks++;
    pthread_mutex_unlock(&s->lock);
    drop_errand *d = imp_calloc(1, sizeof *d);
    if (!d) {
        imp_log(IMP_LOG_WARN, "%s: segments/%016llx.seg: %s; it stays: no memory", s->dir, (unsigned long long)seg->id,
                what);
        return; /* who loads it next finds the same */
    }
    d->e = (imp_errand){.run = run_drop, .what = "dropping damaged bytes", .needed = true};
    d->segment = seg->id;
    d->from = from;
    snprintf(d->what, sizeof d->what, "%s", what);
    /* While the disk hangs, or a change is under way that may, it isn't waited for, but done afterwards. */
    if ((imp_store_hung(s) || !must_ask(s)) && imp_errand_send(s, &d->e)) return;
    if (imp_errand_do(s, &d->e)) imp_free(d);
}
