/* fuzz_api.c: a sequence of calls of the library, on a store in a folder or in memory, against a naive model: what may
 * be served (the bytes of the very prompt, or none), and what must be (what was flushed, until something is allowed to
 * drop it). Prompts are few and have much in common, so that sequences split, extend, replace and evict. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/hash.h"
#include "fuzz/fuzz.h"
#include "fuzz/util.h"
#include "impress/impress.h"
#include "support/support.h"

enum {
    LAYERS = 2,
    DIM = 32,
    ROW = DIM * 4, /* bytes: one KV head of f32 */
    HEADS = 2,     /* of queries */
    SPACES = 2,
    MOST_TOKENS = 120,
    MOST_STORED = 64,
    MOST_HELD = 2,
    MOST_STEPS = 60
};

/* A prompt: `base` to `fork`, from there on `variant`. */
typedef struct prompt {
    uint32_t base, fork, variant, n;
} prompt;

/* What was committed. */
typedef struct stored {
    prompt p;
    uint32_t space;
    bool derived, flushed;
} stored;

typedef struct held {
    imp_lease *lease;
    prompt p;
    uint32_t space, n;
    bool derived;
} held;

typedef struct world {
    char *dir;
    imp_store_opts opts;
    imp_store *store;
    imp_space *spaces[SPACES];
    stored may[MOST_STORED * 4], must[MOST_STORED]; /* ever committed; still to be had */
    size_t n_may, n_must;
    held held[MOST_HELD];
    bool pinned, failing;
    uint64_t evicted;
} world;

static bool in_memory(const world *w) { return w->opts.flags & IMP_STORE_MEMORY; }

static int32_t token_at(const prompt *p, uint32_t i)
{
    return (int32_t)(p->base * 1000 + i + (i >= p->fork ? 100000 * (p->variant + 1) + p->fork * 7000 : 0));
}

static uint32_t common(const prompt *a, const prompt *b)
{
    uint32_t i = 0;
    while (i < a->n && i < b->n && token_at(a, i) == token_at(b, i)) i++;
    return i;
}

static void get_tokens(const prompt *p, int32_t *out)
{
    for (uint32_t i = 0; i < p->n; i++) out[i] = token_at(p, i);
}

/* The row of a place, which depends on all tokens up to it: base, fork and variant say these. */
static void make_row(const prompt *p, uint32_t space, uint32_t i, uint32_t layer, bool value, bool derived, float *out)
{
    uint32_t at[8] = {space, p->base, i >= p->fork ? p->fork : 0, i >= p->fork ? p->variant + 1 : 0, i, layer, value,
                      derived};
    uint64_t h = imp_hash64(at, sizeof at, 1);
    for (uint32_t d = 0; d < DIM; d++) {
        h = h * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        out[d] = (float)((double)(h >> 40) / (1 << 23) - 1);
    }
}

static bool is_row(const world *w, const float *got, const float *want)
{
    static const double most[] = {[IMP_REST_RAW] = 0, [IMP_REST_Q8] = .01, [IMP_REST_K8V4] = .08, [IMP_REST_Q4] = .08};
    for (uint32_t d = 0; d < DIM; d++)
        if (!(fabs((double)got[d] - (double)want[d]) <= most[w->opts.rest])) return false;
    return true;
}

/* ------------------------------------------------------------------------------------------- open and close ---- */

/* With IMP_FUZZ_SAY in the environment, what is called. */
__attribute__((format(printf, 1, 2))) static void say(const char *fmt, ...)
{
    va_list ap;
    if (!getenv("IMP_FUZZ_SAY")) return;
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
}

/* Nothing fails here but for want of memory, where an allocation was made to fail. */
static void must_do(const world *w, int64_t rc)
{
    if (rc >= 0 || (rc == IMP_E_NOMEM && w->failing)) return;
    fprintf(stderr, "%s: %s\n", imp_status_name((int)rc), imp_last_error());
    abort();
}

static void open_spaces(world *w)
{
    static const imp_layer_shape layers[LAYERS] = {{1, DIM, DIM}, {1, DIM, DIM}};
    static const imp_rope ropes[LAYERS] = {{IMP_ROPE_NEOX, 0, DIM, 10000.0f, 1.0f, .attn_factor = 1.0f},
                                           {IMP_ROPE_NEOX, 0, DIM, 10000.0f, 1.0f, .attn_factor = 1.0f}};
    static const uint32_t n_heads[LAYERS] = {HEADS, HEADS};
    for (uint32_t s = 0; s < SPACES; s++) {
        imp_space_desc desc = {.struct_bytes = sizeof desc, .model_name = "fuzz", .engine = "fuzz 1", .weights = {1, 2},
                               .type_k = IMP_TYPE_F32, .type_v = IMP_TYPE_F32, .n_layers = LAYERS, .layers = layers,
                               .salt = s ? "other" : NULL, .ropes = ropes, .n_heads = n_heads};
        MUST(imp_space_open(w->store, &desc, &w->spaces[s]) == 0);
        MUST(imp_space_token_bytes(w->spaces[s]) == 2 * LAYERS * ROW);
    }
}

static void open_store(world *w)
{
    must_do(w, imp_store_open(w->dir, &w->opts, &w->store));
    open_spaces(w);
    w->evicted = 0;
}

static void forget(world *w) { w->n_must = 0; }

static void give_up(held *h)
{
    imp_lease_release(h->lease);
    h->lease = NULL;
}

static void close_store(world *w)
{
    for (int i = 0; i < MOST_HELD; i++) give_up(&w->held[i]);
    for (uint32_t s = 0; s < SPACES; s++) imp_space_close(w->spaces[s]);
    imp_store_close(w->store);
    w->store = NULL;
}

static void start(world *w, fuzz_input *in)
{
    uint32_t a = fuzz_byte(in), b = fuzz_byte(in), c = fuzz_byte(in);
    imp_store_opts_init(&w->opts);
    w->opts.min_store_tokens = (a & 1) ? 1 : 8;
    w->opts.chunk_tokens = (a & 2) ? 16 : 32;
    w->opts.segment_tokens = (a & 4) ? 32 : 64;
    w->opts.order = (imp_order)((a >> 3) % 3);
    w->opts.rest = (a & 0x80) ? (imp_rest)((a >> 5) & 3) : IMP_REST_RAW;
    w->opts.keep = b & 7;
    w->opts.n_probe_heads = 1;
    w->opts.io_mode = (b & 8) ? IMP_IO_THREADS : IMP_IO_AUTO;
    w->opts.flags = (b & 16) ? IMP_STORE_NO_DIRECT : 0;
    w->opts.reorder_period_s = (b & 32) ? 1 : UINT32_MAX;
    w->opts.reorder_after = 1;
    w->opts.limit_bytes = (c & 1) ? (c & 2) ? 1u << 20 : 3u << 19 : 0;
    w->opts.cache = (imp_cache)((c >> 2) % 5);
    w->opts.host_cache_bytes = (c & 32) ? 1u << 16 : 0;
    w->opts.device_cache_bytes = (c & 64) ? 1u << 15 : 0;
    if (c & 128) {
        w->opts.flags |= IMP_STORE_MEMORY;
        w->opts.host_cache_bytes = (c & 1) ? 1u << 20 : 16u << 20;
    }
    say("store flags %x rest %d order %d keep %x limit %llu min %u chunk %u segment %u\n", w->opts.flags, (int)w->opts.rest,
        (int)w->opts.order, w->opts.keep, (unsigned long long)w->opts.limit_bytes, w->opts.min_store_tokens,
        w->opts.chunk_tokens, w->opts.segment_tokens);
    open_store(w);
}

/* ----------------------------------------------------------------------------------------------------- model ---- */

/* May something that was flushed be gone since the last look? */
static void look_for_evictions(world *w)
{
    imp_stats s;
    int rc = imp_store_stats(w->store, &s);
    must_do(w, rc);
    if (rc != 0) return;
    MUST(s.corrupt_chunks == 0 && s.io_errors == 0 && s.catalogue_rebuilds == 0);
    MUST(s.hits <= s.acquires && s.n_spaces <= SPACES);
    MUST(!in_memory(w) || s.disk_bytes == 0);
    if (s.evicted_nodes != w->evicted) forget(w);
    w->evicted = s.evicted_nodes;
}

static prompt choose_prompt(fuzz_input *in)
{
    prompt p = {.base = fuzz_below(in, 3)};
    p.fork = fuzz_below(in, 8) * 16;
    p.variant = fuzz_below(in, 3);
    p.n = 1 + fuzz_below(in, MOST_TOKENS);
    return p;
}

static void note(world *w, const prompt *p, uint32_t space, bool derived)
{
    size_t room = sizeof w->may / sizeof *w->may;
    if (w->n_may < room) w->may[w->n_may++] = (stored){*p, space, derived, false};
    if (w->n_must == MOST_STORED) forget(w);
    /* What is exact takes the place of what is derived, with all that is behind that. */
    for (size_t i = 0; !derived && i < w->n_must;) {
        if (w->must[i].derived && w->must[i].space == space && w->must[i].p.base == p->base)
            w->must[i] = w->must[--w->n_must];
        else
            i++;
    }
    w->must[w->n_must++] = (stored){*p, space, derived, false};
}

/* The most, or with `least` what has to be, found of a prompt. */
static uint32_t expected(const world *w, const prompt *p, uint32_t space, bool derived, bool least)
{
    uint32_t n = 0;
    const stored *all = least ? w->must : w->may;
    for (size_t i = 0; i < (least ? w->n_must : w->n_may); i++) {
        const stored *s = &all[i];
        if (s->space != space || (s->derived && !derived) || (least && !s->flushed)) continue;
        uint32_t m = common(p, &s->p);
        if (m > n) n = m;
    }
    return n < p->n ? n : p->n - 1;
}

/* ----------------------------------------------------------------------------------------------------- steps ---- */

static void make_queries(uint32_t seed, uint32_t n_rows, float *rows, imp_query *q)
{
    for (uint32_t i = 0; i < n_rows * HEADS * DIM; i++) {
        uint32_t at[2] = {seed, i};
        rows[i] = (float)((double)(imp_hash64(at, sizeof at, 2) >> 40) / (1 << 23) - 1);
    }
    *q = (imp_query){rows, HEADS * DIM, DIM, n_rows, HEADS, 0.2f, 0};
}

static void commit(world *w, fuzz_input *in)
{
    int32_t tokens[MOST_TOKENS];
    prompt p = choose_prompt(in);
    uint32_t space = fuzz_below(in, SPACES), what = fuzz_byte(in), first = 0;
    bool derived = (what & 3) == 3;
    get_tokens(&p, tokens);
    if (what & 4) { /* behind what is there */
        imp_prefix_info info;
        imp_lease *lease;
        int rc = imp_prefix_acquire(w->spaces[space], tokens, p.n, derived ? IMP_ACQUIRE_DERIVED : 0, &lease, &info);
        must_do(w, rc);
        first = (uint32_t)info.n_matched;
        imp_lease_release(lease);
    } else if (what & 8) {
        first = fuzz_below(in, p.n);
    }
    say("commit space %u base %u fork %u variant %u n %u from %u flags %x derived %d\n", space, p.base, p.fork, p.variant,
        p.n, first, what, derived);
    imp_commit *c;
    int rc = imp_commit_begin(w->spaces[space], tokens, p.n, first, derived ? IMP_COMMIT_DERIVED : 0, &c);
    MUST(rc == 0 || rc == IMP_E_STALE || rc == IMP_E_BUSY || rc == IMP_E_FULL || (rc == IMP_E_NOMEM && w->failing));
    MUST(rc == 0 || !c);
    if (!c) return;
    bool implied = first > 0 && w->opts.rest != IMP_REST_RAW;
    for (uint32_t l = 0; l < LAYERS; l++) {
        static float k[MOST_TOKENS][DIM], v[MOST_TOKENS][DIM];
        for (uint32_t i = first; i < p.n; i++) {
            make_row(&p, space, i, l, false, derived, k[i]);
            make_row(&p, space, i, l, true, derived, v[i]);
        }
        if ((what & 0xc0) == 0xc0 && l == 1) continue; /* rows are missing */
        MUST(imp_commit_rows(c, l, first, p.n - first, k[first], ROW, v[first], ROW) == 0);
        if (what & 16) {
            float rows[8 * HEADS * DIM];
            imp_query q;
            uint32_t n_rows = p.n < 8 ? p.n : 8;
            make_queries(what, n_rows, rows, &q);
            rc = imp_commit_queries(c, l, p.n - n_rows, &q);
            MUST(rc == 0 || rc == IMP_E_BUSY || rc == IMP_E_ARG || rc == IMP_E_NOMEM);
        }
    }
    if ((what & 0xe0) == 0x20) {
        imp_commit_cancel(c);
        return;
    }
    rc = imp_commit_finish(c);
    if ((what & 0xc0) == 0xc0) {
        MUST(rc == IMP_E_ARG);
    } else {
        must_do(w, rc);
        note(w, &p, space, derived || implied);
    }
}

static void flush(world *w)
{
    int rc = imp_store_flush(w->store);
    say("flush: %d\n", rc);
    MUST(rc <= 0 && rc != IMP_E_CORRUPT && rc != IMP_E_IO && rc != IMP_E_ARG);
    if (rc < 0 || w->failing) forget(w);
    for (size_t i = 0; i < w->n_must; i++) w->must[i].flushed = true;
    look_for_evictions(w);
    imp_stats s;
    must_do(w, imp_store_stats(w->store, &s));
    bool in_use = w->pinned;
    for (int i = 0; i < MOST_HELD; i++) in_use = in_use || w->held[i].lease;
    if (!in_use && !w->failing) MUST(s.disk_bytes <= s.limit_bytes || in_memory(w));
}

static void acquire(world *w, fuzz_input *in)
{
    held *h = &w->held[fuzz_below(in, MOST_HELD)];
    int32_t tokens[MOST_TOKENS];
    give_up(h);
    h->p = choose_prompt(in);
    h->space = fuzz_below(in, SPACES);
    h->derived = fuzz_byte(in) & 1;
    get_tokens(&h->p, tokens);
    look_for_evictions(w); /* before, so that what must be there was there at the same time */
    imp_prefix_info info;
    int rc = imp_prefix_acquire(w->spaces[h->space], tokens, h->p.n, h->derived ? IMP_ACQUIRE_DERIVED : 0, &h->lease,
                                &info);
    must_do(w, rc);
    MUST((info.n_matched > 0) == (h->lease != NULL) && (info.node != 0) == (h->lease != NULL));
    MUST(info.n_exact <= info.n_matched && (h->derived || info.n_exact == info.n_matched));
    h->n = (uint32_t)info.n_matched;
    say("acquire space %u base %u fork %u variant %u n %u derived %d: %d, %u of %u to %u\n", h->space, h->p.base, h->p.fork,
        h->p.variant, h->p.n, h->derived, rc, h->n, expected(w, &h->p, h->space, h->derived, true),
        expected(w, &h->p, h->space, h->derived, false));
    MUST(h->n <= expected(w, &h->p, h->space, h->derived, false));
    uint32_t least = expected(w, &h->p, h->space, h->derived, true);
    if (!w->failing && h->n < least) { /* unless the writer has evicted in between */
        look_for_evictions(w);
        MUST(h->n >= expected(w, &h->p, h->space, h->derived, true));
    }
    if (h->lease && (fuzz_byte(in) & 3) == 3) {
        h->n = 1 + fuzz_below(in, h->n);
        MUST(imp_lease_trim(h->lease, h->n) == 0);
        MUST(imp_lease_trim(h->lease, h->n + 1) == IMP_E_ARG);
    }
}

static void load_layer(world *w, imp_load *load, const held *h, uint32_t l, size_t k, fuzz_input *in, bool *dead)
{
    static float rows[8 * HEADS * DIM], got_k[MOST_TOKENS][DIM], got_v[MOST_TOKENS][DIM];
    const uint32_t *positions;
    imp_query q;
    uint32_t what = fuzz_byte(in), cells[MOST_TOKENS];
    make_queries(what, 1 + what % 8, rows, &q);
    int rc = imp_load_select(load, l, &q, &positions);
    must_do(w, rc);
    *dead = rc != 0;
    if (*dead) return;
    for (size_t i = 0; i < k; i++) {
        MUST(positions[i] < h->n && (i == 0 || positions[i] > positions[i - 1]));
        cells[i] = (uint32_t)(k - 1 - i);
    }
    uint32_t chosen[MOST_TOKENS];
    memcpy(chosen, positions, k * sizeof *positions);
    if (what >= 0xf0) return; /* not wanted */
    bool turned = what & 8;
    rc = imp_load_gather(load, l, &(imp_dst){got_k, got_v, ROW, ROW, turned ? cells : NULL});
    must_do(w, rc);
    *dead = rc != 0;
    for (size_t i = 0; rc == 0 && i < k; i++) {
        float want_k[2][DIM], want_v[2][DIM];
        uint32_t cell = turned ? cells[i] : (uint32_t)i;
        bool right = false;
        for (int d = 0; d <= h->derived && !right; d++) {
            make_row(&h->p, h->space, chosen[i], l, false, d, want_k[d]);
            make_row(&h->p, h->space, chosen[i], l, true, d, want_v[d]);
            right = is_row(w, got_k[cell], want_k[d]) && is_row(w, got_v[cell], want_v[d]);
        }
        MUST(right);
    }
}

static void load(world *w, fuzz_input *in)
{
    const held *h = &w->held[fuzz_below(in, MOST_HELD)];
    uint32_t a = fuzz_byte(in), b = fuzz_byte(in);
    if (!h->lease) return;
    imp_load_opts o;
    imp_load_opts_init(&o);
    if (a & 1) MUST(imp_system_preset(imp_system_name(a / 2 % 8) ? imp_system_name(a / 2 % 8) : "as", &o.switches) <= 0);
    o.switches.identify = (imp_identify)(b % 7);
    o.retention = (1 + fuzz_below(in, 16)) / 16.0;
    o.n_keep_first = (a & 32) ? 2 : 0;
    o.n_keep_last = (a & 64) ? 3 : 0;
    o.rank = (imp_rank)((b >> 3) & 1);
    o.record = (imp_record)((b >> 4) % 3);
    if (b & 0x80) o.byte_share = 0.5f;
    imp_load *l = NULL;
    int legal = imp_load_opts_check(&o), rc = imp_load_begin(h->lease, &o, &l);
    MUST(legal == 0 || (rc == legal && !l));
    if (legal < 0) return;
    must_do(w, rc);
    if (rc != 0) return;
    size_t k = imp_load_count(l), want = o.switches.identify == IMP_IDENTIFY_NONE ? h->n
                                                                                  : (size_t)ceil(o.retention * h->n);
    MUST(k == want);
    bool dead = false;
    for (uint32_t layer = (a & 2) && (b & 64); !dead && layer < LAYERS; layer++) {
        load_layer(w, l, h, layer, k, in, &dead);
        if ((a & 0x98) == 0x98) break;
    }
    if (!dead && (a & 4)) {
        MUST(imp_load_rewind(l) == 0);
        load_layer(w, l, h, 0, k, in, &dead);
        if (!dead) MUST(imp_load_select(l, 0, NULL, NULL) < 0 && imp_load_select(l, LAYERS, NULL, NULL) == IMP_E_ARG);
    }
    imp_load_stats s;
    imp_load_end(l, &s);
    MUST(s.mass >= 0 && s.mass <= 1 + 1e-4 && s.n_fallback <= s.n_selected);
}

typedef struct pick {
    uint32_t left;
    uint64_t id, n_tokens;
} pick;

static int pick_node(const imp_node_info *n, void *user)
{
    pick *p = user;
    p->id = n->id;
    p->n_tokens = n->n_tokens;
    return p->left-- == 0;
}

static void on_node(world *w, fuzz_input *in)
{
    pick p = {.left = fuzz_byte(in)};
    float importance[MOST_TOKENS];
    uint32_t what = fuzz_byte(in) % 8;
    int rc = imp_store_list(w->store, pick_node, &p);
    must_do(w, rc);
    if (rc < 0) return;
    if (what == 0) p.id = 0;
    say("node %llu: %u\n", (unsigned long long)p.id, what);
    switch (what) {
    case 0:
    case 1:
        forget(w);
        rc = imp_store_remove(w->store, p.id);
        break;
    case 2:
    case 3:
        if (p.id == 0) return;
        w->pinned = true;
        rc = imp_store_pin(w->store, p.id, (int)what & 1);
        break;
    case 4: MUST(imp_store_remove(w->store, UINT64_MAX) == IMP_E_NOTFOUND); return;
    default:
        if (p.id == 0) return;
        int64_t n = imp_store_importance(w->store, p.id, importance, MOST_TOKENS);
        MUST(n >= 0 || n == IMP_E_NOTFOUND || (n == IMP_E_NOMEM && w->failing));
        for (uint32_t i = 0; n >= 0 && i < MOST_TOKENS; i++)
            MUST(isfinite(importance[i]) && importance[i] >= 0 && (i < p.n_tokens || importance[i] == 0));
        return;
    }
    if (rc != IMP_E_NOTFOUND) must_do(w, rc);
}

static void print(const imp_finding *f, void *user)
{
    (void)user;
    fprintf(stderr, "verify: %s: %s\n", f->file, f->what);
}

static void maintain(world *w, fuzz_input *in)
{
    uint32_t what = fuzz_byte(in) % 6;
    int64_t rc = 0;
    say("maintain %u\n", what);
    switch (what) {
    case 0: {
        imp_gc_report r = {0};
        rc = imp_store_gc(w->store, &r);
        MUST(r.removed_files == 0);
        if (rc != IMP_E_FULL) must_do(w, rc);
        break;
    }
    case 1:
    case 2: {
        imp_reorder_report r;
        rc = imp_store_reorder(w->store, &r);
        if (rc != IMP_E_FULL) must_do(w, rc);
        MUST(rc != 0 || r.n_reordered <= r.n_segments);
        break;
    }
    case 3:
    case 4:
        rc = imp_store_verify(w->store, what == 3, print, NULL, NULL);
        must_do(w, rc);
        break;
    default: { /* the next n-th allocation fails, in whichever thread it comes */
        imp_alloc_fail_at(1 + fuzz_below(in, 200), 0);
        w->failing = true;
        break;
    }
    }
    look_for_evictions(w);
}

static void restart(world *w, fuzz_input *in)
{
    uint32_t what = fuzz_byte(in);
    say("restart %x\n", what);
    if (w->failing) {
        imp_alloc_fail_at(0, 0);
        flush(w);
        w->failing = false;
        forget(w);
    }
    for (size_t i = 0; i < w->n_must;) /* written by close, or not */
        if (!w->must[i].flushed) w->must[i] = w->must[--w->n_must];
        else i++;
    close_store(w);
    if (in_memory(w)) {
        forget(w);
        w->n_may = 0;
    } else if ((what & 7) == 7) {
        MUST(imp_store_rebuild(w->dir) == 0);
    }
    if ((what & 0x18) == 0x18 && w->opts.limit_bytes) {
        w->opts.limit_bytes = 1u << 20;
        forget(w);
    }
    open_store(w);
}

static void misuse(world *w, fuzz_input *in)
{
    int32_t tokens[MOST_TOKENS];
    prompt p = choose_prompt(in);
    imp_prefix_info info;
    imp_lease *lease;
    imp_commit *c;
    imp_load *l;
    get_tokens(&p, tokens);
    MUST(imp_prefix_acquire(NULL, tokens, p.n, 0, &lease, &info) == IMP_E_ARG && !lease);
    MUST(imp_prefix_acquire(w->spaces[0], tokens, p.n, 1u << 31, &lease, &info) < 0 && !lease);
    MUST(imp_prefix_acquire(w->spaces[0], tokens, 0, 0, &lease, &info) <= 0 && !lease);
    MUST(imp_commit_begin(w->spaces[0], tokens, p.n, p.n + 1, 0, &c) == IMP_E_ARG && !c);
    MUST(imp_load_begin(NULL, NULL, &l) == IMP_E_ARG && !l);
    for (int i = 0; i < MOST_HELD; i++) {
        if (!w->held[i].lease) continue;
        imp_load_opts o;
        imp_load_opts_init(&o);
        o.retention = (double)fuzz_byte(in) - 300;
        MUST(imp_load_begin(w->held[i].lease, &o, &l) == IMP_E_ARG && !l);
        o.retention = 1;
        o.switches.identify = (imp_identify)99;
        MUST(imp_load_begin(w->held[i].lease, &o, &l) < 0 && !l);
    }
}

static void quiet(imp_log_level level, const char *line, void *user)
{
    (void)level;
    (void)line;
    (void)user;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    static world w;
    fuzz_input in = {bytes, bytes + n_bytes};
    memset(&w, 0, sizeof w);
    imp_log_set(quiet, NULL, IMP_LOG_ERROR);
    w.dir = fuzz_make_dir();
    start(&w, &in);
    for (int i = 0; i < MOST_STEPS && in.at < in.end; i++) {
        switch (fuzz_below(&in, 16)) {
        case 0:
        case 1:
        case 2:
        case 3: commit(&w, &in); break;
        case 4:
        case 5: flush(&w); break;
        case 6:
        case 7:
        case 8: acquire(&w, &in); break;
        case 9:
        case 10:
        case 11: load(&w, &in); break;
        case 12: on_node(&w, &in); break;
        case 13: maintain(&w, &in); break;
        case 14: restart(&w, &in); break;
        default: misuse(&w, &in); break;
        }
    }
    imp_alloc_fail_at(0, 0);
    flush(&w);
    MUST(imp_store_verify(w.store, 0, print, NULL, NULL) == 0);
    close_store(&w);
    imp_test_remove_dir(w.dir);
    return 0;
}

size_t imp_fuzz_seed(size_t i, uint8_t *out, size_t room)
{
    static const uint8_t stores[][3] = {{0, 8, 0},     {3, 15, 0},   {0x0f, 0x28, 0x60}, {0xa6, 0x1f, 0x24},
                                        {7, 0x18, 3},  {0, 8, 0x80}, {0x17, 0x0f, 0x81}, {0xf2, 0x0d, 0x2c},
                                        {0x13, 0, 0x6d}, {5, 0x28, 1}};
    if (i >= 2 * sizeof stores / sizeof *stores || room < 600) return 0;
    size_t n = 3;
    memcpy(out, stores[i / 2], 3);
    for (uint8_t round = 0; n + 40 < 400; round++) {
        uint8_t k = (uint8_t)(i * 37 + round * 11);
        const uint8_t steps[] = {
            0, (uint8_t)(k % 3), (uint8_t)(k >> 1), (uint8_t)(k >> 2), (uint8_t)(40 + k), 0, (uint8_t)(k & 0x1f), /* commit */
            1, (uint8_t)(k % 3), (uint8_t)(k >> 1), (uint8_t)(k >> 2), 119, 0, 0x14,
            4,
            6, 0, (uint8_t)(k % 3), (uint8_t)(k >> 1), (uint8_t)(k >> 2), 110, 0, (uint8_t)(k & 1), 0, /* acquire */
            9, 0, k, (uint8_t)(k * 7), (uint8_t)(k >> 3), k, (uint8_t)(k ^ 8), /* load */
            (uint8_t)(round % 3 == 2 ? 14 : 13), (uint8_t)(round + i),
        };
        memcpy(out + n, steps, sizeof steps);
        n += sizeof steps;
    }
    return n;
}
