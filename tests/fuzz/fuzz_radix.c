/* fuzz_radix.c: a sequence of calls on the token tree, against a naive twin: a list of nodes with their own tokens. */
#include <stdlib.h>
#include <string.h>

#include "fuzz/fuzz.h"
#include "fuzz/util.h"
#include "impress/impress.h"
#include "radix/radix.h"

enum { MOST_NODES = 32, MOST_RUN = 12, MOST_PATH = MOST_NODES * MOST_RUN, ALPHABET = 3 };

typedef struct twin_node {
    imp_radix_node node; /* its tokens in `tokens`; depth and n_children not kept */
    int32_t tokens[MOST_RUN];
} twin_node;

typedef struct twin {
    imp_radix *radix;
    twin_node nodes[MOST_NODES]; /* as they came */
    size_t n;
    uint64_t next_id;
} twin;

static twin_node *find(twin *w, uint64_t id)
{
    for (size_t i = 0; i < w->n; i++)
        if (w->nodes[i].node.id == id) return &w->nodes[i];
    return NULL;
}

static uint32_t n_children(const twin *w, uint64_t id)
{
    uint32_t n = 0;
    for (size_t i = 0; i < w->n; i++) n += w->nodes[i].node.parent == id;
    return n;
}

static twin_node *child(twin *w, uint64_t parent, int32_t token)
{
    for (size_t i = 0; i < w->n; i++)
        if (w->nodes[i].node.parent == parent && w->nodes[i].tokens[0] == token) return &w->nodes[i];
    return NULL;
}

static uint32_t depth(twin *w, const twin_node *n)
{
    uint32_t sum = 0;
    for (const twin_node *p = n; (p = find(w, p->node.parent));) sum += p->node.n_tokens;
    return sum;
}

/* By what nodes are kept: a minute more for each of 30 uses at most. */
static int64_t worth(const twin_node *n) { return n->node.used_s + 60 * (int64_t)(n->node.hits > 30 ? 30 : n->node.hits); }

static twin_node *victim(twin *w)
{
    twin_node *best = NULL;
    for (size_t i = 0; i < w->n; i++) {
        twin_node *n = &w->nodes[i];
        if (n->node.leases || n->node.pinned || n_children(w, n->node.id)) continue;
        if (best) {
            uint32_t a = depth(w, n), b = depth(w, best);
            if (worth(n) > worth(best)) continue;
            if (worth(n) == worth(best) && (a < b || (a == b && n->node.id > best->node.id))) continue;
        }
        best = n;
    }
    return best;
}

static void same(twin *w, const twin_node *want, const imp_radix_node *got)
{
    const imp_radix_node *n = &want->node;
    MUST(got && got->id == n->id && got->parent == n->parent && got->segment == n->segment);
    MUST(got->segment_first == n->segment_first && got->n_tokens == n->n_tokens && got->depth == depth(w, want));
    MUST(got->n_children == n_children(w, n->id) && got->leases == n->leases);
    MUST(got->derived == n->derived && got->pinned == n->pinned && got->hits == n->hits);
    MUST(got->created_s == n->created_s && got->used_s == n->used_s);
    MUST(memcmp(got->tokens, want->tokens, n->n_tokens * sizeof(int32_t)) == 0);
}

typedef struct walk {
    twin *w;
    bool seen[MOST_NODES];
    size_t n, stop_at;
} walk;

static int on_node(imp_radix_node *node, void *user)
{
    walk *k = user;
    twin_node *t = find(k->w, node->id), *parent = find(k->w, node->parent);
    MUST(t && !k->seen[t - k->w->nodes]);
    MUST(!parent || k->n == 0 || k->seen[parent - k->w->nodes]); /* where a walk begins, its parent isn't seen */
    same(k->w, t, node);
    k->seen[t - k->w->nodes] = true;
    return ++k->n == k->stop_at ? 5 : 0;
}

static bool below(twin *w, const twin_node *n, uint64_t id)
{
    for (; n; n = find(w, n->node.parent))
        if (n->node.id == id) return true;
    return false;
}

static void check(twin *w)
{
    walk all = {.w = w};
    MUST(imp_radix_count(w->radix) == w->n);
    MUST(imp_radix_walk(w->radix, on_node, &all) == 0 && all.n == w->n);
    const imp_radix_node *got = imp_radix_victim(w->radix);
    const twin_node *want = victim(w);
    MUST(want ? got && got->id == want->node.id : !got);
}

static void add(twin *w, fuzz_input *in)
{
    twin_node t = {.node = {.id = w->next_id + 1}};
    uint32_t what = fuzz_byte(in);
    t.node.parent = w->n && (what & 3) ? w->nodes[fuzz_below(in, (uint32_t)w->n)].node.id : 0;
    if (what == 0xff) t.node.parent = UINT64_MAX;
    if (what == 0xfe && w->n) t.node.id = w->nodes[0].node.id;
    if (what == 0xfd) t.node.id = 0;
    t.node.n_tokens = fuzz_below(in, MOST_RUN + 1);
    for (uint32_t i = 0; i < t.node.n_tokens; i++) t.tokens[i] = (int32_t)fuzz_below(in, ALPHABET);
    t.node.tokens = t.tokens;
    t.node.derived = what & 4;
    t.node.pinned = (what & 0x18) == 0x18;
    t.node.used_s = fuzz_below(in, 4);
    t.node.created_s = t.node.used_s;
    t.node.segment = t.node.id * 3;
    t.node.segment_first = what;
    bool good = t.node.id && !find(w, t.node.id) && (!t.node.parent || find(w, t.node.parent)) && t.node.n_tokens > 0 &&
                !child(w, t.node.parent, t.tokens[0]);
    if (good && w->n == MOST_NODES) return;
    MUST(imp_radix_add(w->radix, &t.node) == (good ? 0 : IMP_E_ARG));
    if (!good) return;
    w->nodes[w->n++] = t;
    w->next_id++;
}

static void split(twin *w, fuzz_input *in)
{
    if (w->n == 0 || w->n == MOST_NODES) return;
    twin_node *t = &w->nodes[fuzz_below(in, (uint32_t)w->n)], tail = *t;
    uint32_t at = fuzz_below(in, MOST_RUN + 1);
    uint64_t id = ++w->next_id;
    bool good = at > 0 && at < t->node.n_tokens;
    MUST(imp_radix_split(w->radix, t->node.id, at, id) == (good ? 0 : IMP_E_ARG));
    if (!good) return;
    for (size_t i = 0; i < w->n; i++)
        if (w->nodes[i].node.parent == t->node.id) w->nodes[i].node.parent = id;
    t->node.n_tokens = at;
    tail.node.id = id;
    tail.node.parent = t->node.id;
    tail.node.n_tokens -= at;
    tail.node.segment_first += at;
    tail.node.leases = 0;
    memmove(tail.tokens, tail.tokens + at, tail.node.n_tokens * sizeof(int32_t));
    w->nodes[w->n++] = tail;
}

static void drop(twin *w, fuzz_input *in)
{
    if (w->n == 0) return;
    size_t i = fuzz_below(in, (uint32_t)w->n);
    uint64_t id = w->nodes[i].node.id;
    bool good = n_children(w, id) == 0;
    MUST(imp_radix_remove(w->radix, id) == (good ? 0 : IMP_E_ARG));
    if (!good) return;
    w->nodes[i] = w->nodes[--w->n];
    MUST(imp_radix_remove(w->radix, id) == IMP_E_NOTFOUND && !imp_radix_get(w->radix, id));
}

static void change(twin *w, fuzz_input *in)
{
    if (w->n == 0) return;
    twin_node *t = &w->nodes[fuzz_below(in, (uint32_t)w->n)];
    imp_radix_node *n = imp_radix_get(w->radix, t->node.id);
    MUST(n);
    uint32_t what = fuzz_byte(in);
    n->used_s = t->node.used_s = (what & 7) * 30;
    n->pinned = t->node.pinned = (what & 0x30) == 0x30;
    n->leases = t->node.leases = (what & 0xc0) == 0xc0;
    n->hits = t->node.hits += what & 8 ? 20 : 1;
    imp_radix_touch(w->radix, n);
}

static void match(twin *w, fuzz_input *in)
{
    static int32_t tokens[MOST_PATH + MOST_RUN];
    size_t n = 0, done = 0, n_steps = 0, n_matched = 99, most = fuzz_below(in, 6);
    bool exact = fuzz_byte(in) & 1;
    if (w->n) { /* the way to a node, so that matches get deep, and more */
        const twin_node *way[MOST_NODES];
        size_t k = 0;
        for (const twin_node *t = &w->nodes[fuzz_below(in, (uint32_t)w->n)]; t; t = find(w, t->node.parent)) way[k++] = t;
        while (k-- > 0) {
            memcpy(tokens + n, way[k]->tokens, way[k]->node.n_tokens * sizeof(int32_t));
            n += way[k]->node.n_tokens;
        }
    }
    for (uint32_t more = fuzz_below(in, MOST_RUN); more > 0; more--) tokens[n++] = (int32_t)fuzz_below(in, ALPHABET);
    imp_radix_step steps[5] = {{0}};
    size_t got = imp_radix_match(w->radix, tokens, n, exact, steps, most, &n_matched);
    for (uint64_t parent = 0; done < n;) {
        const twin_node *c = child(w, parent, tokens[done]);
        uint32_t same_tokens = 0;
        if (!c || (exact && c->node.derived)) break;
        while (same_tokens < c->node.n_tokens && done < n && tokens[done] == c->tokens[same_tokens]) same_tokens++, done++;
        if (n_steps < most) MUST(steps[n_steps].node->id == c->node.id && steps[n_steps].n_matched == same_tokens);
        n_steps++;
        if (same_tokens < c->node.n_tokens) break;
        parent = c->node.id;
    }
    MUST(got == n_steps && n_matched == done);
}

static void walk_below(twin *w, fuzz_input *in)
{
    walk k = {.w = w, .stop_at = fuzz_below(in, 8)};
    if (w->n == 0) {
        MUST(imp_radix_walk_below(w->radix, 1, on_node, &k) == IMP_E_NOTFOUND);
        return;
    }
    uint64_t id = w->nodes[fuzz_below(in, (uint32_t)w->n)].node.id;
    size_t n = 0;
    for (size_t i = 0; i < w->n; i++) n += below(w, &w->nodes[i], id);
    int rc = imp_radix_walk_below(w->radix, id, on_node, &k);
    MUST(k.stop_at && k.stop_at <= n ? rc == 5 && k.n == k.stop_at : rc == 0 && k.n == n);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    static twin w;
    fuzz_input in = {bytes, bytes + n_bytes};
    memset(&w, 0, sizeof w);
    MUST(imp_radix_new(&w.radix) == 0);
    while (in.at < in.end) {
        switch (fuzz_below(&in, 8)) {
        case 0:
        case 1:
        case 2: add(&w, &in); break;
        case 3: split(&w, &in); break;
        case 4: drop(&w, &in); break;
        case 5: change(&w, &in); break;
        case 6: match(&w, &in); break;
        default: walk_below(&w, &in); break;
        }
        check(&w);
    }
    imp_radix_free(w.radix);
    return 0;
}

size_t imp_fuzz_seed(size_t i, uint8_t *out, size_t room)
{
    if (i >= 8 || room < 600) return 0;
    size_t n = 60 + 70 * i;
    for (size_t k = 0; k < n; k++) out[k] = (uint8_t)(((k + 1) * (k + 7) * (i * 2 + 3)) >> 2 ^ k * 29);
    return n;
}
