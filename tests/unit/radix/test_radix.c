/* test_radix.c: the token tree against a naive twin that keeps every node's whole path as a plain array. */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/rng.h"
#include "impress/impress.h"
#include "radix/radix.h"

enum { MAX_TWINS = 600, MAX_RUN = 40, MAX_PATH = 4000 };

/* ------------------------------------------------------------------------------------------------------- twin ---- */

typedef struct twin_node {
    uint64_t id, parent, segment, hits;
    uint32_t segment_first, n_tokens, leases;
    bool derived, pinned;
    int64_t created_s, used_s;
    int32_t tokens[MAX_RUN];
} twin_node;

typedef struct twin {
    twin_node nodes[MAX_TWINS];
    size_t n;
} twin;

static twin_node *twin_get(twin *w, uint64_t id)
{
    for (size_t i = 0; i < w->n; i++) {
        if (w->nodes[i].id == id) return &w->nodes[i];
    }
    return NULL;
}

static uint32_t twin_children(const twin *w, uint64_t id)
{
    uint32_t n = 0;
    for (size_t i = 0; i < w->n; i++) n += w->nodes[i].parent == id;
    return n;
}

static twin_node *twin_child(twin *w, uint64_t parent, int32_t token)
{
    for (size_t i = 0; i < w->n; i++) {
        if (w->nodes[i].parent == parent && w->nodes[i].tokens[0] == token) return &w->nodes[i];
    }
    return NULL;
}

static uint32_t twin_depth(twin *w, const twin_node *n)
{
    uint32_t depth = 0;
    for (const twin_node *p = n; (p = twin_get(w, p->parent));) depth += p->n_tokens;
    return depth;
}

/* A use counts as a minute, thirty of them at most. */
static int64_t twin_worth(const twin_node *n)
{
    int64_t worth = n->used_s;
    for (uint64_t i = 0; i < n->hits && i < 30; i++) worth += 60;
    return worth;
}

static twin_node *twin_victim(twin *w)
{
    twin_node *best = NULL;
    for (size_t i = 0; i < w->n; i++) {
        twin_node *n = &w->nodes[i];
        if (n->leases || n->pinned || twin_children(w, n->id)) continue;
        if (best) {
            if (twin_worth(n) > twin_worth(best)) continue;
            if (twin_worth(n) == twin_worth(best)) {
                uint32_t a = twin_depth(w, n), b = twin_depth(w, best);
                if (a < b || (a == b && n->id > best->id)) continue;
            }
        }
        best = n;
    }
    return best;
}

/* Token after token, no cleverness. */
static size_t twin_match(twin *w, const int32_t *tokens, size_t n, bool exact_only, uint64_t *ids, uint32_t *lens,
                         size_t *n_steps)
{
    size_t done = 0;
    uint64_t parent = 0;
    *n_steps = 0;
    while (done < n) {
        twin_node *c = twin_child(w, parent, tokens[done]);
        if (!c || (exact_only && c->derived)) break;
        uint32_t same = 0;
        while (same < c->n_tokens && done < n && tokens[done] == c->tokens[same]) {
            same++;
            done++;
        }
        ids[*n_steps] = c->id;
        lens[(*n_steps)++] = same;
        if (same < c->n_tokens) break;
        parent = c->id;
    }
    return done;
}

/* -------------------------------------------------------------------------------------------------- comparisons -- */

static void same_node(twin *w, const twin_node *want, const imp_radix_node *got)
{
    assert_non_null(got);
    assert_int_equal(got->id, want->id);
    assert_int_equal(got->parent, want->parent);
    assert_int_equal(got->segment, want->segment);
    assert_int_equal(got->segment_first, want->segment_first);
    assert_int_equal(got->n_tokens, want->n_tokens);
    assert_int_equal(got->depth, twin_depth(w, want));
    assert_int_equal(got->n_children, twin_children(w, want->id));
    assert_int_equal(got->leases, want->leases);
    assert_int_equal(got->derived, want->derived);
    assert_int_equal(got->pinned, want->pinned);
    assert_int_equal(got->created_s, want->created_s);
    assert_int_equal(got->used_s, want->used_s);
    assert_int_equal(got->hits, want->hits);
    assert_memory_equal(got->tokens, want->tokens, want->n_tokens * sizeof(int32_t));
}

typedef struct walked {
    uint64_t ids[MAX_TWINS];
    size_t n, stop_at;
    twin *w;
} walked;

static int on_walk(imp_radix_node *node, void *user)
{
    walked *s = user;
    assert_true(s->n < MAX_TWINS);
    bool parent_seen = node->parent == 0;
    for (size_t i = 0; i < s->n; i++) {
        assert_int_not_equal(s->ids[i], node->id);
        parent_seen = parent_seen || s->ids[i] == node->parent;
    }
    assert_true(parent_seen);
    s->ids[s->n++] = node->id;
    return s->n == s->stop_at ? 77 : 0;
}

static void same_tree(twin *w, imp_radix *t)
{
    assert_int_equal(imp_radix_count(t), w->n);
    for (size_t i = 0; i < w->n; i++) same_node(w, &w->nodes[i], imp_radix_get(t, w->nodes[i].id));
    walked *s = calloc(1, sizeof *s);
    s->w = w;
    assert_int_equal(imp_radix_walk(t, on_walk, s), 0);
    assert_int_equal(s->n, w->n);
    if (w->n > 1) {
        s->n = 0;
        s->stop_at = w->n / 2 + 1;
        assert_int_equal(imp_radix_walk(t, on_walk, s), 77);
        assert_int_equal(s->n, s->stop_at);
    }
    free(s);
}

static void same_victim(twin *w, imp_radix *t)
{
    const twin_node *want = twin_victim(w);
    const imp_radix_node *got = imp_radix_victim(t);
    if (!want) assert_null(got);
    else same_node(w, want, got);
}

static void same_match(twin *w, imp_radix *t, imp_rng *r)
{
    static int32_t tokens[MAX_PATH];
    static uint64_t ids[MAX_TWINS];
    static uint32_t lens[MAX_TWINS];
    static imp_radix_step steps[MAX_TWINS];
    size_t n = 0;
    /* Down the twin along children taken at random, then astray. */
    uint64_t at = 0;
    while (imp_rng_below(r, 8) != 0) {
        uint32_t k = twin_children(w, at);
        if (k == 0) break;
        uint64_t pick = imp_rng_below(r, k);
        const twin_node *c = NULL;
        for (size_t i = 0; i < w->n; i++) {
            if (w->nodes[i].parent == at && pick-- == 0) c = &w->nodes[i];
        }
        if (n + c->n_tokens > MAX_PATH - 8) break;
        memcpy(tokens + n, c->tokens, c->n_tokens * sizeof *tokens);
        n += c->n_tokens;
        at = c->id;
    }
    if (n > 0 && imp_rng_below(r, 2)) n -= imp_rng_below(r, n < 5 ? n : 5);
    for (uint64_t extra = imp_rng_below(r, 4); extra > 0; extra--) tokens[n++] = (int32_t)imp_rng_below(r, 3);
    if (n > 0 && imp_rng_below(r, 4) == 0) tokens[imp_rng_below(r, n)] ^= 1;

    bool exact_only = imp_rng_below(r, 2);
    size_t want_steps, got_matched = 12345;
    size_t want_matched = twin_match(w, tokens, n, exact_only, ids, lens, &want_steps);
    size_t room = imp_rng_below(r, 3) ? MAX_TWINS : imp_rng_below(r, want_steps + 1);
    memset(steps, 0, sizeof steps);
    assert_int_equal(imp_radix_match(t, tokens, n, exact_only, steps, room, &got_matched), want_steps);
    assert_int_equal(got_matched, want_matched);
    for (size_t i = 0; i < want_steps && i < room; i++) {
        assert_int_equal(steps[i].node->id, ids[i]);
        assert_int_equal(steps[i].n_matched, lens[i]);
    }
    if (room < MAX_TWINS) assert_null(steps[room].node);
}

/* --------------------------------------------------------------------------------------------------- operations -- */

static void random_add(twin *w, imp_radix *t, imp_rng *r, uint64_t *next_id)
{
    if (w->n == MAX_TWINS) return;
    int32_t run[MAX_RUN];
    imp_radix_node n = {.id = (*next_id)++,
                        .segment = imp_rng_below(r, 1000),
                        .segment_first = (uint32_t)imp_rng_below(r, 100),
                        .n_tokens = (uint32_t)(1 + imp_rng_below(r, MAX_RUN)),
                        .depth = 999,
                        .n_children = 99,
                        .leases = imp_rng_below(r, 10) == 0,
                        .derived = imp_rng_below(r, 6) == 0,
                        .pinned = imp_rng_below(r, 10) == 0,
                        .created_s = (int64_t)imp_rng_below(r, 50),
                        .used_s = (int64_t)imp_rng_below(r, 50),
                        .hits = imp_rng_below(r, 9),
                        .tokens = run};
    if (w->n > 0 && imp_rng_below(r, 10) != 0) n.parent = w->nodes[imp_rng_below(r, w->n)].id;
    for (uint32_t i = 0; i < n.n_tokens; i++) run[i] = (int32_t)imp_rng_below(r, 3) - (imp_rng_below(r, 50) == 0) * 2;
    run[0] = (int32_t)imp_rng_below(r, 6);
    int want = 0;
    switch (imp_rng_below(r, 30)) {
    case 0: n.id = w->n ? w->nodes[imp_rng_below(r, w->n)].id : 0; want = IMP_E_ARG; break;
    case 1: n.parent = UINT64_C(1) << 60; want = IMP_E_ARG; break;
    case 2: n.n_tokens = 0; want = IMP_E_ARG; break;
    case 3: n.id = 0; want = IMP_E_ARG; break;
    default: break;
    }
    if (twin_child(w, n.parent, run[0])) want = IMP_E_ARG;
    assert_int_equal(imp_radix_add(t, &n), want);
    if (want) return;
    twin_node *x = &w->nodes[w->n++];
    *x = (twin_node){.id = n.id, .parent = n.parent, .segment = n.segment, .hits = n.hits,
                     .segment_first = n.segment_first, .n_tokens = n.n_tokens, .leases = n.leases,
                     .derived = n.derived, .pinned = n.pinned, .created_s = n.created_s, .used_s = n.used_s};
    memcpy(x->tokens, run, n.n_tokens * sizeof *run);
}

static void twin_split(twin *w, twin_node *u, uint32_t cut, uint64_t new_id)
{
    twin_node *l = &w->nodes[w->n++];
    *l = *u;
    for (size_t i = 0; i < w->n; i++) {
        if (w->nodes[i].parent == u->id) w->nodes[i].parent = new_id;
    }
    l->id = new_id;
    l->parent = u->id;
    l->n_tokens -= cut;
    l->segment_first += cut;
    l->leases = 0;
    memmove(l->tokens, l->tokens + cut, l->n_tokens * sizeof(int32_t));
    u->n_tokens = cut;
}

static void random_split(twin *w, imp_radix *t, imp_rng *r, uint64_t *next_id)
{
    if (w->n == 0 || w->n == MAX_TWINS) return;
    twin_node *u = &w->nodes[imp_rng_below(r, w->n)];
    uint32_t cut = (uint32_t)imp_rng_below(r, u->n_tokens + 1);
    uint64_t id = u->id, new_id = (*next_id)++;
    int want = cut == 0 || cut == u->n_tokens ? IMP_E_ARG : 0;
    switch (imp_rng_below(r, 20)) {
    case 0: id = UINT64_C(1) << 60; want = IMP_E_NOTFOUND; break;
    case 1: new_id = 0; want = IMP_E_ARG; break;
    case 2: new_id = w->nodes[imp_rng_below(r, w->n)].id; want = IMP_E_ARG; break;
    default: break;
    }
    assert_int_equal(imp_radix_split(t, id, cut, new_id), want);
    if (!want) twin_split(w, u, cut, new_id);
}

static void random_remove(twin *w, imp_radix *t, imp_rng *r)
{
    if (w->n == 0) return;
    twin_node *n = imp_rng_below(r, 3) ? &w->nodes[imp_rng_below(r, w->n)] : twin_victim(w);
    if (!n) return;
    uint64_t id = imp_rng_below(r, 20) ? n->id : UINT64_C(1) << 60;
    int want = id != n->id ? IMP_E_NOTFOUND : twin_children(w, id) ? IMP_E_ARG : 0;
    assert_int_equal(imp_radix_remove(t, id), want);
    if (want) return;
    *n = w->nodes[--w->n];
    assert_null(imp_radix_get(t, id));
}

static void random_change(twin *w, imp_radix *t, imp_rng *r)
{
    if (w->n == 0) return;
    twin_node *n = &w->nodes[imp_rng_below(r, w->n)];
    imp_radix_node *got = imp_radix_get(t, n->id);
    switch (imp_rng_below(r, 4)) {
    case 0: n->leases = (uint32_t)imp_rng_below(r, 2); break;
    case 1: n->pinned = imp_rng_below(r, 3) == 0; break;
    case 2: n->hits += imp_rng_below(r, 20) ? 1 : 40; break;
    default: n->used_s = (int64_t)imp_rng_below(r, 60); break;
    }
    got->leases = n->leases;
    got->pinned = n->pinned;
    got->hits = n->hits;
    got->used_s = n->used_s;
    imp_radix_touch(t, got);
}

static uint64_t seed_of_run(void)
{
    const char *text = getenv("IMP_TEST_SEED");
    imp_rng r;
    imp_rng_seed_os(&r);
    uint64_t seed = text ? strtoull(text, NULL, 0) : imp_rng_u64(&r);
    print_message("IMP_TEST_SEED=%" PRIu64 "\n", seed);
    return seed;
}

/* Grows for a while, shrinks for a while, so that tables fill, wrap and empty. */
static void test_against_twin(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, seed_of_run());
    twin *w = calloc(1, sizeof *w);
    imp_radix *t = NULL;
    assert_int_equal(imp_radix_new(&t), 0);
    size_t empty_bytes = imp_radix_memory(t);
    assert_true(empty_bytes > 0);
    uint64_t next_id = 1;
    bool growing = true;
    for (int step = 0; step < 12000; step++) {
        if (step % 1500 == 0) growing = imp_rng_below(&r, 3) != 0;
        uint64_t what = imp_rng_below(&r, 100);
        if (what < (growing ? 40u : 12u)) random_add(w, t, &r, &next_id);
        else if (what < (growing ? 50u : 20u)) random_split(w, t, &r, &next_id);
        else if (what < (growing ? 55u : 60u)) random_remove(w, t, &r);
        else if (what < 80) random_change(w, t, &r);
        else same_match(w, t, &r);
        if (step % 3 == 0) same_victim(w, t);
        if (step % 500 == 0) same_tree(w, t);
    }
    same_tree(w, t);
    while (w->n > 0) {
        size_t k = imp_rng_below(&r, w->n);
        if (twin_children(w, w->nodes[k].id)) continue;
        assert_int_equal(imp_radix_remove(t, w->nodes[k].id), 0);
        w->nodes[k] = w->nodes[--w->n];
    }
    same_tree(w, t);
    same_victim(w, t);
    assert_int_equal(imp_radix_memory(t), empty_bytes);
    imp_radix_free(t);
    free(w);
}

/* ------------------------------------------------------------------------------------------- failing allocations -- */

static void test_no_memory_changes_nothing(void **state)
{
    (void)state;
    imp_radix *t = NULL;
    for (uint64_t fail = 1;; fail++) {
        imp_alloc_fail_at(fail, 1);
        int rc = imp_radix_new(&t);
        imp_alloc_fail_at(0, 0);
        if (rc == 0) break;
        assert_int_equal(rc, IMP_E_NOMEM);
        assert_null(t);
    }
    imp_rng r;
    imp_rng_seed(&r, seed_of_run());
    twin *w = calloc(1, sizeof *w);
    uint64_t n_failures = 0;
    for (uint64_t id = 1; w->n < MAX_TWINS; id++) {
        int32_t run[4] = {(int32_t)id, 1, 2, (int32_t)id};
        imp_radix_node n = {.id = id, .n_tokens = 4, .tokens = run, .used_s = (int64_t)imp_rng_below(&r, 9)};
        if (w->n > 0 && imp_rng_below(&r, 3)) n.parent = w->nodes[imp_rng_below(&r, w->n)].id;
        const twin_node *split = NULL;
        uint64_t pick = w->n ? imp_rng_below(&r, w->n) : 0;
        if (w->n > 0 && w->nodes[pick].n_tokens > 1 && imp_rng_below(&r, 3) == 0) split = &w->nodes[pick];
        for (uint64_t fail = 1;; fail++) {
            imp_alloc_fail_at(fail, 1);
            int rc = split ? imp_radix_split(t, split->id, 1, id) : imp_radix_add(t, &n);
            imp_alloc_fail_at(0, 0);
            if (rc == 0) break;
            assert_int_equal(rc, IMP_E_NOMEM);
            n_failures++;
            if (n_failures % 16 == 0) same_tree(w, t);
            same_victim(w, t);
            assert_int_equal(imp_radix_count(t), w->n);
            assert_null(imp_radix_get(t, id));
        }
        if (split) {
            twin_split(w, &w->nodes[pick], 1, id);
        } else {
            twin_node *x = &w->nodes[w->n++];
            *x = (twin_node){.id = id, .parent = n.parent, .n_tokens = 4, .used_s = n.used_s};
            memcpy(x->tokens, run, sizeof run);
        }
    }
    assert_true(n_failures >= 400);
    same_tree(w, t);
    /* Removing needs no memory, also where it makes a block smaller. */
    imp_alloc_fail_at(1, 1);
    for (imp_radix_node *v; (v = imp_radix_victim(t));) assert_int_equal(imp_radix_remove(t, v->id), 0);
    imp_alloc_fail_at(0, 0);
    assert_int_equal(imp_radix_count(t), 0);
    imp_radix_free(t);
    free(w);
}

/* ------------------------------------------------------------------------------------------------------ details --- */

static imp_radix *small_tree(void)
{
    imp_radix *t = NULL;
    assert_int_equal(imp_radix_new(&t), 0);
    const int32_t a[] = {1, 2, 3, 4, 5, 6};
    imp_radix_node n = {.id = 10, .segment = 7, .segment_first = 100, .n_tokens = 6, .tokens = a, .pinned = false};
    assert_int_equal(imp_radix_add(t, &n), 0);
    return t;
}

static void test_empty(void **state)
{
    (void)state;
    imp_radix *t = NULL;
    assert_int_equal(imp_radix_new(&t), 0);
    size_t n_matched = 5;
    assert_int_equal(imp_radix_match(t, (const int32_t[]){1}, 1, false, NULL, 0, &n_matched), 0);
    assert_int_equal(n_matched, 0);
    assert_int_equal(imp_radix_match(t, NULL, 0, false, NULL, 0, &n_matched), 0);
    assert_null(imp_radix_victim(t));
    assert_null(imp_radix_get(t, 0));
    assert_null(imp_radix_get(t, 1));
    assert_int_equal(imp_radix_remove(t, 1), IMP_E_NOTFOUND);
    assert_int_equal(imp_radix_walk(t, on_walk, NULL), 0);
    imp_radix_free(t);
    imp_radix_free(NULL);
}

/* There may be many spaces, of which each holds or once held a prompt or two. */
static void test_small_ones_take_little(void **state)
{
    (void)state;
    imp_radix *t = NULL;
    assert_int_equal(imp_radix_new(&t), 0);
    size_t empty_bytes = imp_radix_memory(t);
    assert_true(empty_bytes < 256);
    for (uint64_t id = 1; id < 4; id++) {
        imp_radix_node n = {.id = id, .n_tokens = 1, .tokens = (const int32_t[]){7}};
        assert_int_equal(imp_radix_add(t, &n), 0);
        assert_true(imp_radix_memory(t) < 2048);
        assert_int_equal(imp_radix_remove(t, id), 0);
        assert_int_equal(imp_radix_memory(t), empty_bytes);
        assert_null(imp_radix_get(t, id));
        assert_null(imp_radix_victim(t));
    }
    imp_radix_free(t);
}

static void test_split_shares_tokens(void **state)
{
    (void)state;
    imp_radix *t = small_tree();
    size_t before = imp_radix_memory(t);
    assert_int_equal(imp_radix_split(t, 10, 2, 11), 0);
    assert_int_equal(imp_radix_memory(t), before);
    const imp_radix_node *upper = imp_radix_get(t, 10), *lower = imp_radix_get(t, 11);
    assert_ptr_equal(upper->tokens + 2, lower->tokens);
    assert_int_equal(lower->segment, 7);
    assert_int_equal(lower->segment_first, 102);
    /* The tail's tokens go with it. */
    assert_int_equal(imp_radix_remove(t, 11), 0);
    assert_int_equal(imp_radix_memory(t), before - 4 * sizeof(int32_t));
    assert_int_equal(imp_radix_get(t, 10)->n_tokens, 2);
    assert_int_equal(imp_radix_get(t, 10)->tokens[1], 2);
    imp_radix_free(t);
}

static void test_derived(void **state)
{
    (void)state;
    imp_radix *t = small_tree();
    const int32_t b[] = {7, 8}, c[] = {7, 9};
    imp_radix_node n = {.id = 20, .parent = 10, .n_tokens = 2, .tokens = b, .derived = true};
    assert_int_equal(imp_radix_add(t, &n), 0);
    const int32_t prompt[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    size_t n_matched;
    imp_radix_step steps[4];
    assert_int_equal(imp_radix_match(t, prompt, 9, false, steps, 4, &n_matched), 2);
    assert_int_equal(n_matched, 8);
    assert_int_equal(imp_radix_match(t, prompt, 9, true, steps, 4, &n_matched), 1);
    assert_int_equal(n_matched, 6);
    imp_radix_node exact = {.id = 21, .parent = 10, .n_tokens = 2, .tokens = c};
    assert_int_equal(imp_radix_add(t, &exact), IMP_E_ARG);
    assert_int_equal(imp_radix_remove(t, 20), 0);
    assert_int_equal(imp_radix_add(t, &exact), 0);
    imp_radix_free(t);
}

static void test_limits(void **state)
{
    (void)state;
    imp_radix *t = small_tree();
    const int32_t b[] = {INT32_MIN, INT32_MAX, -1, 0};
    imp_radix_node n = {.id = UINT64_MAX, .parent = 10, .n_tokens = 4, .tokens = b, .segment_first = UINT32_MAX - 3};
    assert_int_equal(imp_radix_add(t, &n), IMP_E_ARG);
    n.segment_first--;
    assert_int_equal(imp_radix_add(t, &n), 0);
    assert_int_equal(imp_radix_split(t, UINT64_MAX, 3, UINT64_MAX - 1), 0);
    assert_int_equal(imp_radix_get(t, UINT64_MAX - 1)->tokens[0], 0);
    const int32_t prompt[] = {1, 2, 3, 4, 5, 6, INT32_MIN, INT32_MAX, -1, 0};
    size_t n_matched;
    assert_int_equal(imp_radix_match(t, prompt, 10, true, NULL, 0, &n_matched), 3);
    assert_int_equal(n_matched, 10);
    imp_radix_free(t);
}

static void test_victim_follows_leases_and_pins(void **state)
{
    (void)state;
    imp_radix *t = small_tree();
    assert_int_equal(imp_radix_victim(t)->id, 10);
    imp_radix_node *n = imp_radix_get(t, 10);
    n->leases = 1;
    imp_radix_touch(t, n);
    assert_null(imp_radix_victim(t));
    /* A split leaves the leases with the upper half; the tail alone may then go. */
    assert_int_equal(imp_radix_split(t, 10, 3, 11), 0);
    assert_int_equal(imp_radix_get(t, 10)->leases, 1);
    assert_int_equal(imp_radix_victim(t)->id, 11);
    assert_int_equal(imp_radix_remove(t, 11), 0);
    assert_null(imp_radix_victim(t));
    n = imp_radix_get(t, 10);
    n->leases = 0;
    n->pinned = true;
    imp_radix_touch(t, n);
    assert_null(imp_radix_victim(t));
    n->pinned = false;
    imp_radix_touch(t, n);
    assert_int_equal(imp_radix_victim(t)->id, 10);
    imp_radix_free(t);
}

static void test_100000_nodes(void **state)
{
    (void)state;
    enum { N = 100000, RUN = 8 };
    imp_radix *t = NULL;
    assert_int_equal(imp_radix_new(&t), 0);
    size_t n_tokens = 0;
    /* Half of all below the root (a wide fan-out), the rest in chains below them. */
    for (uint64_t id = 1; id <= N; id++) {
        int32_t run[RUN];
        for (int i = 0; i < RUN; i++) run[i] = (int32_t)(id + (uint64_t)i);
        imp_radix_node n = {.id = id, .parent = id <= N / 2 ? 0 : id - N / 10, .n_tokens = RUN, .tokens = run,
                            .used_s = (int64_t)(id % 1000)};
        assert_int_equal(imp_radix_add(t, &n), 0);
        n_tokens += RUN;
    }
    assert_int_equal(imp_radix_count(t), N);
    double per_node = (double)(imp_radix_memory(t) - n_tokens * sizeof(int32_t)) / N;
    print_message("100000 nodes: %.1f bytes per node without its tokens\n", per_node);
    assert_true(per_node < 140);
    for (uint64_t id = 1; id <= N; id += 97) {
        const imp_radix_node *n = imp_radix_get(t, id);
        assert_int_equal(n->tokens[0], id);
        assert_int_equal(n->depth, id <= N / 2 ? 0 : imp_radix_get(t, n->parent)->depth + RUN);
    }
    /* Evict everything: the tree refuses a node before what lies below it. */
    size_t n_evicted = 0;
    for (imp_radix_node *v; (v = imp_radix_victim(t)); n_evicted++) assert_int_equal(imp_radix_remove(t, v->id), 0);
    assert_int_equal(n_evicted, N);
    assert_int_equal(imp_radix_count(t), 0);
    imp_radix_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_small_ones_take_little),
        cmocka_unit_test(test_split_shares_tokens),
        cmocka_unit_test(test_derived),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_victim_follows_leases_and_pins),
        cmocka_unit_test(test_against_twin),
        cmocka_unit_test(test_no_memory_changes_nothing),
        cmocka_unit_test(test_100000_nodes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
