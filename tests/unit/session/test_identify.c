/* test_identify.c: every way to choose, over everything that a store can be, against a naive twin that is given the
 * rows.
 *
 * The twin scores with imp_score_h2o(), which has a naive twin of its own, over keys that lie in memory in the order of
 * the prefix. So what is chosen must be equal, not nearly so, however keys lie on disk. */
#include "load_util.h"

#include <stdio.h>

#include "select/blend.h"
#include "select/pages.h"
#include "select/select.h"
#include "select/sketch.h"
#include "session/choose.h"
#include "session/lease.h"
#include "store/history.h"

enum { MAX_N = 400, MAX_HEADS = 12 };

/* ---- what the prefix is made of */

typedef struct place {
    const imp_span *span;
    uint32_t token; /* in the segment */
} place;

static place locate(const imp_lease *lease, size_t t)
{
    const imp_span *s = lease->path.spans;
    for (; t >= s->n_tokens; s++) t -= s->n_tokens;
    return (place){s, s->segment_first + (uint32_t)t};
}

/* What one layer's tokens lie in. Units are numbered by segment, then by chunk. */
typedef struct units {
    uint32_t of[MAX_N]; /* of each token */
    const imp_seg *seg[MAX_N];
    uint32_t number[MAX_N]; /* of the chunk in its segment */
    uint32_t n;
} units;

static void find_units(const imp_lease *lease, uint32_t layer, size_t n, units *u)
{
    uint64_t name[MAX_N], names[MAX_N];
    u->n = 0;
    for (size_t t = 0; t < n; t++) {
        place p = locate(lease, t);
        const uint32_t *map = imp_seg_map(p.span->seg, layer);
        uint32_t slot = 0;
        while ((map ? map[slot] : slot) != p.token) slot++;
        const imp_span *first = lease->path.spans; /* of the segment */
        while (first->seg != p.span->seg) first++;
        uint32_t number = slot / imp_seg_layout_meta(p.span->seg->layout)->chunk_tokens;
        name[t] = (uint64_t)(first - lease->path.spans) << 32 | number;
        uint32_t at = 0;
        while (at < u->n && names[at] < name[t]) at++;
        if (at < u->n && names[at] == name[t]) continue;
        for (uint32_t i = u->n++; i > at; i--) {
            names[i] = names[i - 1];
            u->seg[i] = u->seg[i - 1];
            u->number[i] = u->number[i - 1];
        }
        names[at] = name[t];
        u->seg[at] = p.span->seg;
        u->number[at] = number;
    }
    for (size_t t = 0; t < n; t++)
        for (u->of[t] = 0; names[u->of[t]] != name[t];) u->of[t]++;
}

static size_t chunk_bytes(const imp_seg *seg, imp_region region, uint32_t layer, uint32_t chunk)
{
    if (chunk >= imp_seg_region_chunks(seg->layout, region)) return 0;
    return imp_seg_chunk(seg->layout, region, layer, chunk).n_bytes;
}

static bool is_core(const units *u, uint32_t i)
{
    const imp_seg_meta *m = imp_seg_layout_meta(u->seg[i]->layout);
    return m->order == IMP_ORDER_CORE && u->number[i] * m->chunk_tokens < m->core_tokens;
}

/* ---- the twin */

static const float *sort_scores;

static int by_score(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    float a_score = sort_scores[x], b_score = sort_scores[y];
    if (a_score > b_score || a_score < b_score) return a_score > b_score ? -1 : 1;
    return x < y ? -1 : 1;
}

static int by_number(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static bool is_kept(const imp_load_opts *o, size_t n, size_t k, size_t t)
{
    size_t first = o->n_keep_first < k ? o->n_keep_first : k;
    size_t last = o->n_keep_last < k - first ? o->n_keep_last : k - first;
    return t < first || t >= n - last;
}

/* The k best, by sorting all of them. */
static void best(const imp_load_opts *o, const float *scores, size_t n, size_t k, uint32_t *out)
{
    float raised[MAX_N];
    uint32_t order[MAX_N];
    for (size_t t = 0; t < n; t++) {
        raised[t] = is_kept(o, n, k, t) ? INFINITY : scores[t];
        order[t] = (uint32_t)t;
    }
    sort_scores = raised;
    qsort(order, n, sizeof *order, by_score);
    qsort(order, k, sizeof *order, by_number);
    memcpy(out, order, k * sizeof *out);
}

/* The share of what is above 0. */
static double mass_of(const float *scores, size_t n, const uint32_t *chosen, size_t k)
{
    double all = 0, held = 0;
    for (size_t t = 0; t < n; t++) all += scores[t] > 0 ? (double)scores[t] : 0;
    for (size_t i = 0; i < k; i++) held += scores[chosen[i]] > 0 ? (double)scores[chosen[i]] : 0;
    return k == n ? 1 : all > 0 ? held / all : (double)k / (double)n;
}

/* H2O over rows that lie one after another. `kv_head` >= 0: only that KV head, and one query head. */
static void score(const util_world *w, uint32_t l, const imp_query *q, size_t max_rows, imp_type type, const void *keys,
                  size_t n, int kv_head, uint32_t head, float *scores)
{
    size_t head_bytes = imp_type_bytes(type, w->layers[l].head_dim_k);
    size_t row = head_bytes * w->layers[l].n_kv_heads;
    unsigned char *own = malloc(n * row);
    imp_query one = *q;
    imp_keys k = {.type = type, .n_kv_heads = w->layers[l].n_kv_heads, .head_dim = w->layers[l].head_dim_k, .n_runs = 1,
                  .n_tokens = n};
    memcpy(own, keys, n * row);
    if (kv_head >= 0) {
        const unsigned char *from = (const unsigned char *)keys + (size_t)kv_head * head_bytes;
        for (size_t t = 0; t < n; t++) memcpy(own + t * head_bytes, from + t * row, head_bytes);
        one.q += head * q->head_stride;
        one.n_heads = 1;
        k.n_kv_heads = 1;
    }
    imp_key_run run = {own, n};
    k.runs = &run;
    imp_scorer *s;
    assert_int_equal(imp_scorer_new(n, max_rows, q->n_heads, w->layers[l].head_dim_k, NULL, &s), 0);
    assert_int_equal(imp_score_h2o(s, &one, max_rows, &k, scores, NULL), 0);
    imp_scorer_free(s);
    free(own);
}

/* Everything about one pass that the twin keeps. */
typedef struct twin {
    util_world *w;
    imp_lease *lease;
    const int32_t *tokens;
    imp_load_opts o; /* zeros replaced by what they stand for */
    size_t n, k;
    uint32_t period;       /* CHUNKS */
    uint32_t period_choice[MAX_N];
    double period_mass;
    double mass;           /* the figures that are expected */
    uint32_t n_selected, n_fallback;
    uint64_t identify_bytes, bytes; /* without guesses */
    bool left_out;         /* the last layer's rows: its reads may have been cancelled */
} twin;

/* What is expected of one layer. */
typedef struct layer_twin {
    uint32_t chosen[MAX_N];
    double mass;
    bool fallback, probed, by_keys, by_sketch;
    bool records;
    unsigned char asked[MAX_N]; /* by_sketch: units that are asked for */
    float scores[MAX_N]; /* to be recorded, not normalised yet */
} layer_twin;

static bool has_all_sketches(const twin *w)
{
    for (size_t i = 0; i < w->lease->path.n_spans; i++) {
        const imp_seg *seg = w->lease->path.spans[i].seg;
        if (w->lease->path.spans[i].depth >= w->n) break;
        if (!imp_seg_region_chunks(seg->layout, IMP_REGION_SKETCH) || !seg->bases) return false;
    }
    return w->w->has_ropes;
}

static bool has_probe_keys(const twin *w, uint32_t n_kv_heads)
{
    for (size_t i = 0; i < w->lease->path.n_spans; i++) {
        if (w->lease->path.spans[i].depth >= w->n) break;
        if (imp_seg_layout_meta(w->lease->path.spans[i].seg->layout)->probe_heads < n_kv_heads) return false;
    }
    return true;
}

/* Which KV heads must be there for the probe heads. */
static uint32_t probe_head(const twin *w, uint32_t l, uint32_t i, uint32_t n_heads, uint32_t *kv)
{
    uint32_t n_kv = w->w->layers[l].n_kv_heads, group = n_heads / n_kv;
    uint32_t head = w->o.probe_spread ? i % n_kv * group + i / n_kv : i;
    *kv = head / group;
    return head;
}

static void choose_chunks(const twin *w, const units *u, const float *scores, uint32_t *out)
{
    double sums[MAX_N] = {0};
    unsigned char in[MAX_N] = {0}, done[MAX_N] = {0};
    size_t left = w->k;
    for (size_t t = 0; t < w->n; t++) {
        sums[u->of[t]] += (double)scores[t];
        if (is_kept(&w->o, w->n, w->k, t)) {
            in[t] = 1;
            left--;
            sums[u->of[t]] = INFINITY;
        }
    }
    while (left > 0) {
        uint32_t top = UINT32_MAX;
        for (uint32_t i = 0; i < u->n; i++) {
            if (!done[i] && (top == UINT32_MAX || sums[i] > sums[top])) top = i;
        }
        done[top] = 1;
        for (;;) { /* its best tokens, one by one */
            size_t at = w->n;
            for (size_t t = 0; t < w->n; t++)
                if (u->of[t] == top && !in[t] && (at == w->n || scores[t] > scores[at])) at = t;
            if (at == w->n || left == 0) break;
            in[at] = 1;
            left--;
        }
    }
    size_t n_out = 0;
    for (size_t t = 0; t < w->n; t++)
        if (in[t]) out[n_out++] = (uint32_t)t;
    assert_int_equal(n_out, w->k);
}

static void past_of(const twin *w, uint32_t l, float *past, bool *any)
{
    *any = false;
    for (size_t i = 0, at = 0; i < w->lease->path.n_spans && at < w->n; i++) {
        const imp_span *s = &w->lease->path.spans[i];
        size_t n = s->n_tokens < w->n - at ? s->n_tokens : w->n - at;
        imp_history *h;
        assert_int_equal(imp_history_get(w->w->store, s->seg, &h), 0);
        if (imp_history_read(h, l, s->segment_first, n, past + at)) *any = true;
        imp_history_put(w->w->store, h);
        at += n;
    }
}

static void ranking_of(const twin *w, uint32_t l, float *scores)
{
    for (size_t i = 0, at = 0; i < w->lease->path.n_spans && at < w->n; i++) {
        const imp_span *s = &w->lease->path.spans[i];
        size_t n = s->n_tokens < w->n - at ? s->n_tokens : w->n - at;
        imp_history *h;
        assert_int_equal(imp_history_get(w->w->store, s->seg, &h), 0);
        bool there = imp_history_ranking(h, w->o.rank, l, s->segment_first, n, scores + at);
        for (size_t t = 0; !there && t < n; t++) scores[at + t] = (float)(at + t) - 1e6f;
        imp_history_put(w->w->store, h);
        at += n;
    }
}

/* The key rows of a layer as they were committed. */
static unsigned char *committed_keys(const twin *w, uint32_t l)
{
    size_t row = util_k_bytes(w->w, l);
    unsigned char *rows = malloc(w->n * row);
    for (size_t t = 0; t < w->n; t++)
        util_row(w->w->type_k, util_k_elements(w->w, l), w->tokens[t], t, l, 0, rows + t * row);
    return rows;
}

/* Of the rows that score those that score sketches, copied: the last one, and back from there in the smallest steps that
 * make them few enough. */
static imp_query some_rows(const twin *w, const imp_query *q, float *memory)
{
    size_t n = q->n_rows < w->o.max_query_rows ? q->n_rows : w->o.max_query_rows, step = 1, n_out = 0;
    while ((n + step - 1) / step > w->o.max_sketch_rows) step++;
    imp_query out = *q;
    out.q = memory;
    out.head_stride = q->head_stride;
    out.row_stride = q->n_heads * q->head_stride;
    for (size_t i = q->n_rows - n; i < q->n_rows; i++) {
        if ((q->n_rows - 1 - i) % step == 0)
            memcpy(memory + n_out++ * out.row_stride, q->q + i * q->row_stride, out.row_stride * sizeof *memory);
    }
    out.n_rows = n_out;
    return out;
}

/* Sketches made anew of the committed rows, and keys rebuilt from them. */
static void sketch_scores(const twin *w, uint32_t l, const imp_query *q, float *scores)
{
    const util_world *u = w->w;
    size_t row = util_k_bytes(u, l), elements = util_k_elements(u, l), at = 0;
    float *rebuilt = malloc(w->n * elements * sizeof *rebuilt);
    unsigned char *rows = committed_keys(w, l), *codes = malloc(w->n * elements * 4);
    imp_rope_table *rope;
    assert_int_equal(imp_rope_table_new(&u->ropes[l], u->layers[l].head_dim_k, 0, w->n, &rope), 0);
    for (size_t i = 0; i < w->lease->path.n_spans && at < w->n; i++) {
        const imp_span *s = &w->lease->path.spans[i];
        size_t n = s->n_tokens < w->n - at ? s->n_tokens : w->n - at;
        const imp_key_rows keys = {.type = u->type_k, .n_kv_heads = u->layers[l].n_kv_heads,
                                   .head_dim = u->layers[l].head_dim_k, .rows = rows + at * row, .stride = row,
                                   .n_tokens = n, .first_position = at};
        const imp_basis *b = s->seg->bases->layers[l];
        assert_int_equal(imp_sketch_encode(b, &keys, rope, codes), 0);
        imp_sketch_rebuild(b, codes, n, at, rope, rebuilt + at * elements);
        at += n;
    }
    float *memory = malloc(q->n_rows * q->n_heads * q->head_stride * sizeof *memory);
    imp_query some = some_rows(w, q, memory);
    score(u, l, &some, some.n_rows, IMP_TYPE_F32, rebuilt, w->n, -1, 0, scores);
    free(memory);
    imp_rope_table_free(rope);
    free(codes);
    free(rows);
    free(rebuilt);
}

/* The tokens of all units that hold a chosen one, scored by their keys; of these the best. */
static void refine(const twin *w, uint32_t l, const unsigned char *keys, const imp_query *q, const units *u,
                   layer_twin *out)
{
    size_t row = util_k_bytes(w->w, l), n = 0;
    unsigned char *here = malloc(w->n * row);
    uint32_t tokens[MAX_N], own[MAX_N];
    float exact[MAX_N];
    double sketched = 0, in_all = 0;
    for (size_t i = 0; i < w->k; i++) out->asked[u->of[out->chosen[i]]] = 1;
    for (size_t t = 0; t < w->n; t++) {
        if (!out->asked[u->of[t]]) continue;
        memcpy(here + n * row, keys + t * row, row);
        tokens[n++] = (uint32_t)t;
    }
    score(w->w, l, q, w->o.max_query_rows, w->w->type_k, here, n, -1, 0, exact);
    free(here);
    for (size_t i = 0; i < n; i++) {
        sketched += (double)out->scores[tokens[i]];
        in_all += (double)exact[i];
    }
    for (size_t i = 0; i < n; i++) out->scores[tokens[i]] = (float)(sketched / in_all * (double)exact[i]);
    best(&w->o, exact, n, w->k, own);
    for (size_t i = 0; i < w->k; i++) out->chosen[i] = tokens[own[i]];
    out->mass = mass_of(out->scores, w->n, out->chosen, w->k);
}

static void choose_sketch(const twin *w, uint32_t l, const unsigned char *keys, const units *u, const imp_query *q,
                          bool core, layer_twin *out)
{
    float past[MAX_N], blended[MAX_N];
    bool any = false;
    sketch_scores(w, l, q, out->scores);
    imp_normalise(out->scores, w->n, out->scores);
    if (w->o.history_weight > 0) past_of(w, l, past, &any);
    imp_blend_scores((imp_blend){IMP_BLEND_SUM, w->o.history_weight}, out->scores, any ? past : NULL, w->n, blended);
    out->records = true;
    out->by_sketch = true;
    if (!(w->o.byte_share > 0)) {
        best(&w->o, blended, w->n, w->k, out->chosen);
        refine(w, l, keys, q, u, out);
        return;
    }
    uint32_t bytes[MAX_N];
    unsigned char there[MAX_N], read[MAX_N];
    double all = 0;
    for (uint32_t i = 0; i < u->n; i++) {
        bytes[i] = 0;
        static const imp_region regions[] = {IMP_REGION_K, IMP_REGION_V, IMP_REGION_KV};
        for (int r = 0; r < 3; r++) bytes[i] += (uint32_t)chunk_bytes(u->seg[i], regions[r], l, u->number[i]);
        there[i] = core && is_core(u, i);
        double tokens = 0;
        for (size_t t = 0; t < w->n; t++) tokens += u->of[t] == i;
        const imp_seg_meta *m = imp_seg_layout_meta(u->seg[i]->layout);
        uint32_t slots = m->n_tokens - u->number[i] * m->chunk_tokens;
        all += bytes[i] * tokens / (slots < m->chunk_tokens ? slots : m->chunk_tokens);
    }
    const imp_page_choice choice = {.scores = blended, .n_tokens = w->n, .page_of = u->of, .n_pages = u->n,
                                    .page_bytes = bytes, .resident = there, .k = w->k,
                                    .budget_bytes = (uint64_t)(all * (double)w->o.byte_share),
                                    .keep_first = w->o.n_keep_first, .keep_last = w->o.n_keep_last};
    imp_chooser *c;
    imp_page_result result;
    assert_int_equal(imp_chooser_new(w->n, u->n, &c), 0);
    assert_int_equal(imp_choose_pages(c, &choice, read, out->chosen, &result), 0);
    imp_chooser_free(c);
    refine(w, l, keys, q, u, out);
}

/* Votes counted and sorted. Returns whether the heads agree. */
static bool choose_probe(const twin *w, uint32_t l, const imp_query *q, layer_twin *out)
{
    unsigned char *keys = committed_keys(w, l); /* probe keys are raw */
    static uint32_t sets[MAX_HEADS][MAX_N];
    uint32_t n_probe = w->o.n_probe_heads < q->n_heads ? w->o.n_probe_heads : q->n_heads, votes[MAX_N] = {0};
    float own[MAX_N];
    memset(out->scores, 0, sizeof out->scores);
    for (uint32_t i = 0; i < n_probe; i++) {
        uint32_t kv, head = probe_head(w, l, i, q->n_heads, &kv);
        score(w->w, l, q, w->o.max_query_rows, w->w->type_k, keys, w->n, (int)kv, head, own);
        best(&w->o, own, w->n, w->k, sets[i]);
        for (size_t j = 0; j < w->k; j++) votes[sets[i][j]]++;
        for (size_t t = 0; t < w->n; t++) out->scores[t] += own[t];
    }
    double alike = 0, pairs = 0;
    free(keys);
    for (uint32_t a = 0; a < n_probe; a++) {
        for (uint32_t b = a + 1; b < n_probe; b++) {
            double both = 0;
            for (size_t i = 0; i < w->k; i++)
                for (size_t j = 0; j < w->k; j++) both += sets[a][i] == sets[b][j];
            alike += both / (2 * (double)w->k - both);
            pairs++;
        }
    }
    alike = pairs > 0 ? alike / pairs : 1;
    double r = (double)w->k / (double)w->n, random = r < 1 ? r / (2 - r) : 1;
    double least = w->o.probe_similarity > 0 ? (double)w->o.probe_similarity : (double)w->o.probe_alpha * random;
    if (fabs(alike - least) < 1e-12) least = alike; /* sums in another order */
    uint32_t order[MAX_N];
    size_t n_out = 0;
    for (uint32_t level = n_probe; n_out < w->k; level--) { /* by votes, then by score */
        size_t m = 0;
        for (size_t t = 0; t < w->n; t++)
            if (votes[t] == level) order[m++] = (uint32_t)t;
        sort_scores = out->scores;
        qsort(order, m, sizeof *order, by_score);
        for (size_t i = 0; i < m && n_out < w->k; i++) out->chosen[n_out++] = order[i];
    }
    qsort(out->chosen, w->k, sizeof *out->chosen, by_number);
    out->mass = mass_of(out->scores, w->n, out->chosen, w->k);
    return alike >= least;
}

static void choose(twin *w, uint32_t l, const unsigned char *keys, const imp_query *q, const units *u, layer_twin *out)
{
    imp_identify identify = w->o.switches.identify;
    bool core = w->o.switches.prefetch == IMP_PREFETCH_CORE;
    float scores[MAX_N];
    *out = (layer_twin){0};
    if (identify == IMP_IDENTIFY_NONE) {
        for (size_t t = 0; t < w->n; t++) out->chosen[t] = (uint32_t)t;
        return;
    }
    if (identify == IMP_IDENTIFY_RANDOM || identify == IMP_IDENTIFY_STATIC) {
        if (identify == IMP_IDENTIFY_STATIC) {
            ranking_of(w, l, scores);
        } else {
            imp_random_scores(l, w->n, scores);
        }
        best(&w->o, scores, w->n, w->k, out->chosen);
        out->mass = identify == IMP_IDENTIFY_STATIC ? mass_of(scores, w->n, out->chosen, w->k)
                                                    : (double)w->k / (double)w->n;
        return;
    }
    if (identify == IMP_IDENTIFY_CHUNKS && w->period == l / w->o.period) {
        memcpy(out->chosen, w->period_choice, w->k * sizeof *out->chosen);
        out->mass = w->period_mass;
        return;
    }
    if (identify == IMP_IDENTIFY_SKETCH && has_all_sketches(w)) {
        choose_sketch(w, l, keys, u, q, core, out);
        return;
    }
    if (identify == IMP_IDENTIFY_PROBE) {
        uint32_t need = 0;
        for (uint32_t i = 0; i < w->o.n_probe_heads && i < q->n_heads; i++) {
            uint32_t kv;
            (void)probe_head(w, l, i, q->n_heads, &kv);
            if (kv >= need) need = kv + 1;
        }
        out->records = true;
        out->probed = has_probe_keys(w, need);
        if (out->probed && choose_probe(w, l, q, out)) return;
    }
    out->fallback = identify == IMP_IDENTIFY_PROBE || identify == IMP_IDENTIFY_SKETCH;
    out->by_keys = true;
    out->records = true;
    score(w->w, l, q, w->o.max_query_rows, w->w->type_k, keys, w->n, -1, 0, out->scores);
    if (identify == IMP_IDENTIFY_CHUNKS) {
        choose_chunks(w, u, out->scores, out->chosen);
        memcpy(w->period_choice, out->chosen, w->k * sizeof *out->chosen);
        w->period = l / w->o.period;
        w->period_mass = mass_of(out->scores, w->n, out->chosen, w->k);
    } else {
        best(&w->o, out->scores, w->n, w->k, out->chosen);
    }
    out->mass = mass_of(out->scores, w->n, out->chosen, w->k);
}

/* What a layer must have read, without tiers and guesses. */
static void count_bytes(twin *w, uint32_t l, const units *u, const layer_twin *t)
{
    bool core = w->o.switches.prefetch == IMP_PREFETCH_CORE;
    for (size_t i = 0; i < w->lease->path.n_spans; i++) {
        const imp_span *s = &w->lease->path.spans[i];
        if (s->depth >= w->n || (i > 0 && s[-1].seg == s->seg)) continue;
        size_t scales = chunk_bytes(s->seg, IMP_REGION_SCALES, l, 0);
        w->bytes += scales;
        if (t->by_keys) w->identify_bytes += scales;
        if (t->probed) {
            w->bytes += chunk_bytes(s->seg, IMP_REGION_PROBE, l, 0);
            w->identify_bytes += chunk_bytes(s->seg, IMP_REGION_PROBE, l, 0);
        }
        if (t->by_sketch) {
            w->bytes += chunk_bytes(s->seg, IMP_REGION_SKETCH, l, 0);
            w->identify_bytes += chunk_bytes(s->seg, IMP_REGION_SKETCH, l, 0);
        }
    }
    for (uint32_t i = 0; i < u->n; i++) {
        size_t k = chunk_bytes(u->seg[i], IMP_REGION_K, l, u->number[i]);
        size_t v = chunk_bytes(u->seg[i], IMP_REGION_V, l, u->number[i]);
        size_t kv = chunk_bytes(u->seg[i], IMP_REGION_KV, l, u->number[i]);
        bool whole = core && is_core(u, i);
        whole |= t->by_sketch && t->asked[i];
        for (size_t j = 0; j < w->k; j++) whole |= u->of[t->chosen[j]] == i;
        if (whole || t->by_keys) w->bytes += k + kv;
        if (whole) w->bytes += v;
        if (t->by_keys) w->identify_bytes += k + kv;
    }
}

/* ---- rows */

typedef struct rows {
    unsigned char *k, *v; /* [n][row] */
} rows;

/* All rows of a layer as a whole load gives them, and how far they may be from those committed. */
static rows all_rows(const twin *w, uint32_t l)
{
    const util_world *u = w->w;
    size_t k_row = util_k_bytes(u, l), v_row = util_v_bytes(u, l);
    rows out = {malloc(w->n * k_row), malloc(w->n * v_row)};
    imp_load_opts opts;
    imp_load *load;
    imp_load_opts_init(&opts);
    opts.switches.prefetch = IMP_PREFETCH_NONE;
    opts.switches.cache = IMP_CACHE_NONE;
    assert_int_equal(imp_load_begin(w->lease, &opts, &load), 0);
    assert_int_equal(imp_load_select(load, l, NULL, NULL), 0);
    const imp_dst dst = {.k = out.k, .v = out.v, .k_stride = k_row, .v_stride = v_row};
    assert_int_equal(imp_load_gather(load, l, &dst), 0);
    imp_load_end(load, NULL);

    static const double coarse[][2] = {{0, 0}, {2, 2}, {2, 36}, {36, 36}}; /* by imp_rest: in 127ths */
    unsigned char want[UTIL_MAX_ROW * 4];
    for (size_t t = 0; t < w->n; t++) {
        imp_rest rest = imp_seg_layout_meta(locate(w->lease, t).span->seg->layout)->rest;
        for (int value = 0; value < 2; value++) {
            imp_type type = value ? u->type_v : u->type_k;
            const unsigned char *got = value ? out.v + t * v_row : out.k + t * k_row;
            size_t n = value ? util_v_elements(u, l) : util_k_elements(u, l);
            util_row(type, n, w->tokens[t], t, l, value, want);
            if (rest == IMP_REST_RAW) assert_memory_equal(got, want, value ? v_row : k_row);
            double bound = coarse[rest][value] / 127 * 0.51 + (type == IMP_TYPE_BF16 ? 2.0 / 128 : 2.0 / 512);
            for (size_t e = 0; e < n; e++) {
                double d = fabs(util_element(type, got, e) - util_element(type, want, e));
                if (d > bound) fail_msg("layer %u, token %zu, element %zu: off by %g of %g", l, t, e, d, bound);
            }
        }
    }
    return out;
}

static void check_gather(imp_rng *r, const twin *w, uint32_t l, imp_load *load, const uint32_t *chosen, const rows *all)
{
    size_t k_row = util_k_bytes(w->w, l), v_row = util_v_bytes(w->w, l);
    size_t k_stride = k_row + 8 * imp_rng_below(r, 2), v_stride = v_row + 8 * imp_rng_below(r, 2);
    unsigned char *k = calloc(w->k, k_stride), *v = calloc(w->k, v_stride);
    uint32_t cells[MAX_N];
    uint32_t turn = (uint32_t)imp_rng_below(r, w->k);
    for (uint32_t i = 0; i < w->k; i++) cells[i] = (i + turn) % (uint32_t)w->k;
    const imp_dst dst = {.k = k, .v = v, .k_stride = k_stride, .v_stride = v_stride, .cells = turn ? cells : NULL};
    assert_int_equal(imp_load_gather(load, l, &dst), 0);
    for (size_t i = 0; i < w->k; i++) {
        assert_memory_equal(k + cells[i] * k_stride, all->k + chosen[i] * k_row, k_row);
        assert_memory_equal(v + cells[i] * v_stride, all->v + chosen[i] * v_row, v_row);
    }
    free(k);
    free(v);
}

/* ---- history */

typedef struct record {
    float history[MAX_N], ranking[MAX_N];
    uint32_t counts[MAX_N]; /* of the token's segment */
} record;

static void read_record(const twin *w, uint32_t l, record *out)
{
    *out = (record){0};
    for (size_t i = 0, at = 0; i < w->lease->path.n_spans && at < w->n; i++) {
        const imp_span *s = &w->lease->path.spans[i];
        size_t n = s->n_tokens < w->n - at ? s->n_tokens : w->n - at;
        imp_history *h;
        assert_int_equal(imp_history_get(w->w->store, s->seg, &h), 0);
        uint32_t count = imp_history_read(h, l, s->segment_first, n, out->history + at);
        (void)imp_history_ranking(h, IMP_RANK_RECONSTRUCTION, l, s->segment_first, n, out->ranking + at);
        imp_history_put(w->w->store, h);
        for (size_t t = 0; t < n; t++) out->counts[at++] = count;
    }
}

static void check_record(const twin *w, uint32_t l, const layer_twin *t, const record *before)
{
    record after;
    float scores[MAX_N], normalised[MAX_N];
    read_record(w, l, &after);
    memcpy(scores, t->scores, w->n * sizeof *scores);
    imp_normalise(scores, w->n, normalised);
    for (size_t i = 0; i < w->n; i++) {
        bool adds = t->records && w->o.record == IMP_RECORD_HISTORY;
        float weight = imp_history_weight(before->counts[i]), was = before->history[i];
        float want = adds ? was + weight * (normalised[i] - was) : was;
        assert_int_equal(after.counts[i], before->counts[i] + adds);
        if (!(fabsf(after.history[i] - want) <= 1e-4f * (1 + want)))
            fail_msg("identify %d, layer %u: history of token %zu is %g, not %g (before %g, %u requests)",
                     (int)w->o.switches.identify, l, i, (double)after.history[i], (double)want, (double)was,
                     before->counts[i]);
        bool ranks = t->by_keys && w->o.record == IMP_RECORD_RANKING;
        want = ranks && normalised[i] > before->ranking[i] ? normalised[i] : before->ranking[i];
        assert_true(fabsf(after.ranking[i] - want) <= 1e-5f * (1 + want));
    }
}

/* ---- passes */

static void check_pass(imp_rng *r, twin *w, imp_load *load)
{
    w->period = UINT32_MAX;
    for (uint32_t l = 0; l < w->w->n_layers; l++) {
        units u;
        layer_twin t;
        record before;
        rows all = all_rows(w, l);
        util_query q = util_make_query(r, w->w, l);
        const uint32_t *chosen;
        find_units(w->lease, l, w->n, &u);
        choose(w, l, all.k, &q.q, &u, &t);
        count_bytes(w, l, &u, &t);
        read_record(w, l, &before);
        assert_int_equal(imp_load_select(load, l, &q.q, &chosen), 0);
        for (size_t i = 0; i < w->k; i++) {
            if (chosen[i] != t.chosen[i])
                fail_msg("identify %d, layer %u: token %zu of %zu is %u, not %u", (int)w->o.switches.identify, l, i,
                         w->k, chosen[i], t.chosen[i]);
        }
        if (imp_rng_below(r, 8)) {
            float *mine = q.memory; /* the caller's are gone by the time of the gather */
            size_t n_floats = q.q.n_rows * q.q.row_stride;
            float *kept = malloc(n_floats * sizeof *kept);
            memcpy(kept, mine, n_floats * sizeof *kept);
            memset(mine, 0, n_floats * sizeof *mine);
            check_gather(r, w, l, load, t.chosen, &all);
            memcpy(mine, kept, n_floats * sizeof *mine);
            free(kept);
            check_record(w, l, &t, &before);
        } else {
            w->left_out |= l + 1 == w->w->n_layers;
        }
        if (w->o.switches.identify != IMP_IDENTIFY_NONE) {
            w->n_selected++;
            w->mass += t.mass;
        }
        w->n_fallback += t.fallback;
        free(q.memory);
        free(all.k);
        free(all.v);
    }
}

static bool guesses(const imp_load_opts *o)
{
    return o->switches.prefetch == IMP_PREFETCH_CHUNKS && o->switches.identify != IMP_IDENTIFY_NONE &&
           o->switches.identify != IMP_IDENTIFY_STATIC && o->switches.identify != IMP_IDENTIFY_RANDOM;
}

static void check_load(imp_rng *r, util_world *w, imp_lease *lease, const int32_t *tokens, const imp_load_opts *opts)
{
    twin t = {.w = w, .lease = lease, .tokens = tokens, .o = *opts, .n = lease->n_tokens};
    if (!t.o.max_query_rows) t.o.max_query_rows = 32;
    if (!t.o.max_sketch_rows) t.o.max_sketch_rows = 8;
    if (!t.o.n_probe_heads) t.o.n_probe_heads = 3;
    if (!(t.o.probe_alpha > 0)) t.o.probe_alpha = 0.6f;
    if (!(t.o.history_weight > 0) && !(t.o.history_weight < 0)) t.o.history_weight = 0.5f;
    if (!t.o.period) t.o.period = 4;
    bool none = opts->switches.identify == IMP_IDENTIFY_NONE;
    t.k = none ? t.n : (size_t)fmax(1, ceil(opts->retention * (double)t.n - 1e-9));

    imp_load *load;
    imp_load_stats stats;
    assert_int_equal(imp_load_begin(lease, opts, &load), 0);
    assert_int_equal(imp_load_count(load), t.k);
    check_pass(r, &t, load);
    bool again = imp_rng_below(r, 3) == 0;
    if (again) {
        assert_int_equal(imp_load_rewind(load), 0);
        check_pass(r, &t, load);
    }
    imp_load_end(load, &stats);
    assert_int_equal(stats.n_selected, t.n_selected);
    assert_int_equal(stats.n_fallback, t.n_fallback);
    double mass = t.n_selected ? t.mass / t.n_selected : 1;
    assert_true(fabs(stats.mass - mass) < 1e-4);
    bool memory = w->opts.flags & IMP_STORE_MEMORY;
    if (memory) {
        assert_int_equal(stats.bytes_read + stats.identify_bytes + stats.n_reads, 0);
        if (!guesses(opts)) assert_int_equal(stats.host_hit_bytes, t.bytes);
        return;
    }
    bool tiers = opts->switches.cache != IMP_CACHE_NONE && (w->opts.host_cache_bytes || w->opts.device_cache_bytes);
    if (!tiers) {
        assert_int_equal(stats.host_hit_bytes + stats.device_hit_bytes, 0);
        if (guesses(opts) || t.left_out) {
            assert_true(stats.bytes_read >= t.bytes || t.left_out);
            assert_true(stats.identify_bytes >= t.identify_bytes);
        } else {
            assert_int_equal(stats.bytes_read, t.bytes);
            assert_int_equal(stats.identify_bytes, t.identify_bytes);
        }
    } else if (!guesses(opts) && !t.left_out) {
        assert_true(stats.bytes_read + stats.host_hit_bytes + stats.device_hit_bytes == t.bytes);
        assert_true(stats.identify_bytes <= t.identify_bytes && stats.identify_bytes <= stats.bytes_read);
    }
}

static void make_world(imp_rng *r, util_world *w)
{
    static const imp_type types[] = {IMP_TYPE_F16, IMP_TYPE_F32, IMP_TYPE_BF16, IMP_TYPE_Q8_0};
    *w = (util_world){.n_layers = 1 + (uint32_t)imp_rng_below(r, UTIL_MAX_LAYERS)};
    imp_store_opts_init(&w->opts);
    w->opts.rest = imp_rng_below(r, 3) ? IMP_REST_RAW : (imp_rest)(1 + imp_rng_below(r, 3));
    w->opts.order = (imp_order)imp_rng_below(r, 3);
    w->opts.keep = (unsigned)imp_rng_below(r, 8) | (imp_rng_below(r, 2) ? IMP_KEEP_SKETCH : 0);
    w->opts.n_probe_heads = (uint32_t)imp_rng_below(r, 4);
    w->opts.probe_spread = (unsigned)imp_rng_below(r, 2);
    uint64_t n_types = w->opts.rest == IMP_REST_RAW ? 4 : 3;
    w->type_k = types[imp_rng_below(r, n_types)];
    w->type_v = types[imp_rng_below(r, n_types)];
    w->has_ropes = imp_rng_below(r, 5) != 0;
    w->commit_queries = imp_rng_below(r, 3) != 0;
    for (uint32_t l = 0; l < w->n_layers; l++) {
        w->layers[l] = (imp_layer_shape){1 + (uint32_t)imp_rng_below(r, 3), 32 * (1 + (uint32_t)imp_rng_below(r, 2)),
                                         32 * (1 + (uint32_t)imp_rng_below(r, 2))};
        w->n_heads[l] = w->layers[l].n_kv_heads * (1 + (uint32_t)imp_rng_below(r, 3));
        w->ropes[l] = (imp_rope){.pairs = (imp_rope_pairs)imp_rng_below(r, 2), .n_dims = 32,
                                 .base = l % 2 ? 10000 : 500000, .freq_scale = 1, .attn_factor = 1};
        if (imp_rng_below(r, 4) == 0) w->ropes[l].n_dims = 16;
    }
    w->opts.chunk_tokens = 16 * (1 + (uint32_t)imp_rng_below(r, 4));
    w->opts.segment_tokens = 100 + (uint32_t)imp_rng_below(r, 300);
    w->opts.min_store_tokens = 1;
    w->opts.reorder_period_s = UINT32_MAX;
    w->opts.io_mode = imp_rng_below(r, 2) ? IMP_IO_THREADS : IMP_IO_AUTO;
    w->opts.buffer_bytes = imp_rng_below(r, 2) ? 0 : 64 << 10; /* the ring wraps */
    if (imp_rng_below(r, 2)) {
        w->opts.cache = (imp_cache)(1 + imp_rng_below(r, 4));
        w->opts.host_cache_bytes = imp_rng_below(r, 3) ? 20000 + imp_rng_below(r, 1000000) : 0;
        w->opts.device_cache_bytes = imp_rng_below(r, 2) ? 20000 + imp_rng_below(r, 300000) : 0;
    }
    if (imp_rng_below(r, 6) == 0) {
        w->opts.flags = IMP_STORE_MEMORY;
        w->opts.host_cache_bytes = 64 << 20;
    }
}

static imp_load_opts make_opts(imp_rng *r, const util_world *w)
{
    imp_load_opts o;
    imp_load_opts_init(&o);
    o.switches.identify = (imp_identify)imp_rng_below(r, 7);
    o.switches.prefetch = (imp_prefetch)imp_rng_below(r, 4);
    o.switches.cache = w->opts.cache;
    o.retention = imp_rng_below(r, 6) ? 0.01 + 0.7 * imp_rng_unit(r) : 1;
    o.n_keep_first = (uint32_t)imp_rng_below(r, 6);
    o.n_keep_last = (uint32_t)imp_rng_below(r, 6);
    o.max_query_rows = (uint32_t)imp_rng_below(r, 20);
    if (imp_rng_below(r, 8) == 0) o.max_query_rows = UINT32_MAX;
    if (imp_rng_below(r, 2)) o.max_sketch_rows = (uint32_t)imp_rng_below(r, 40);
    o.n_probe_heads = (uint32_t)imp_rng_below(r, 6);
    if (imp_rng_below(r, 8) == 0) o.n_probe_heads = 1000;
    o.probe_spread = (unsigned)imp_rng_below(r, 2);
    if (imp_rng_below(r, 2)) o.probe_similarity = (float)imp_rng_unit(r) * 0.6f;
    if (imp_rng_below(r, 2)) o.probe_alpha = (float)imp_rng_unit(r) * 3;
    /* What was guessed is there anyway when a layer chooses; how far guesses reach is the ring's matter. */
    if (o.switches.prefetch != IMP_PREFETCH_CHUNKS && imp_rng_below(r, 2)) o.byte_share = (float)imp_rng_unit(r);
    if (imp_rng_below(r, 2)) o.history_weight = (float)imp_rng_unit(r) * 2 - 0.5f;
    o.period = (uint32_t)imp_rng_below(r, 5);
    o.rank = (imp_rank)imp_rng_below(r, 2);
    o.record = (imp_record)imp_rng_below(r, 3);
    if (o.record == IMP_RECORD_RANKING && o.switches.identify != IMP_IDENTIFY_ALL_KEYS) o.record = IMP_RECORD_HISTORY;
    return o;
}

static void test_random(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    for (int round = 0; round < 12; round++) {
        util_world w;
        make_world(&r, &w);
        util_start(&w);
        bool rounded = w.opts.rest != IMP_REST_RAW;
        unsigned flags = rounded ? IMP_ACQUIRE_DERIVED : 0; /* what follows on rounded rows is derived */

        /* Two prompts, the second leaving the first at any token. */
        int32_t prompts[2][MAX_N];
        size_t lengths[2];
        for (int p = 0; p < 2; p++) {
            util_tokens(&r, prompts[p], MAX_N);
            lengths[p] = 20 + imp_rng_below(&r, MAX_N - 20);
            size_t shared = p ? imp_rng_below(&r, lengths[0]) : 0;
            if (p && shared >= lengths[p]) shared = lengths[p] - 1;
            if (p) memcpy(prompts[p], prompts[0], shared * sizeof(int32_t));
            util_commit(&w, prompts[p], lengths[p], shared, 0);
            if (!(w.opts.flags & IMP_STORE_MEMORY) && imp_rng_below(&r, 2)) { /* with other regions from now on */
                util_close(&w);
                if (imp_rng_below(&r, 2)) w.opts.keep = (unsigned)imp_rng_below(&r, 8);
                util_open(&w);
            }
        }
        for (int ask = 0; ask < 10; ask++) {
            int p = (int)imp_rng_below(&r, 2);
            size_t n_prompt = lengths[p] + 1 < MAX_N ? lengths[p] + 1 : MAX_N;
            imp_lease *lease;
            imp_prefix_info info;
            if (imp_rng_below(&r, 4) == 0) assert_int_equal(imp_store_reorder(w.store, NULL), 0);
            assert_int_equal(imp_prefix_acquire(w.space, prompts[p], n_prompt, flags, &lease, &info), 0);
            assert_int_equal(info.n_matched, n_prompt - 1);
            if (imp_rng_below(&r, 2)) assert_int_equal(imp_lease_trim(lease, 1 + imp_rng_below(&r, info.n_matched)), 0);
            imp_load *first; /* takes what the match read into its figures */
            assert_int_equal(imp_load_begin(lease, NULL, &first), 0);
            imp_load_end(first, NULL);
            imp_load_opts opts = make_opts(&r, &w);
            check_load(&r, &w, lease, prompts[p], &opts);
            imp_lease_release(lease);
        }
        util_stop(&w);
    }
}

/* ---- what is read, and when */

/* A prompt of 320 tokens in a store that suits `system`, of 4 layers. */
static imp_lease *start_system(util_world *w, const char *system, imp_rng *r, int32_t *tokens, imp_load_opts *opts)
{
    *w = (util_world){.n_layers = UTIL_MAX_LAYERS, .type_k = IMP_TYPE_F16, .type_v = IMP_TYPE_F16, .has_ropes = true,
                      .commit_queries = true};
    for (uint32_t l = 0; l < w->n_layers; l++) {
        w->layers[l] = (imp_layer_shape){2, 32, 32};
        w->n_heads[l] = 4;
        w->ropes[l] = (imp_rope){.n_dims = 32, .base = 10000, .freq_scale = 1, .attn_factor = 1};
    }
    imp_store_opts_init(&w->opts);
    imp_load_opts_init(opts);
    assert_int_equal(imp_system_preset(system, &opts->switches), 0);
    imp_store_opts_switches(&w->opts, &opts->switches);
    w->opts.reorder_period_s = UINT32_MAX;
    util_start(w);
    util_tokens(r, tokens, 321);
    util_commit(w, tokens, 320, 0, 0);
    imp_lease *lease;
    imp_prefix_info info;
    imp_load *first;
    assert_int_equal(imp_prefix_acquire(w->space, tokens, 321, 0, &lease, &info), 0);
    assert_int_equal(info.n_matched, 320);
    assert_int_equal(imp_load_begin(lease, NULL, &first), 0); /* takes what the match read into its figures */
    imp_load_end(first, NULL);
    return lease;
}

static const uint32_t *select_layer(imp_rng *r, const util_world *w, imp_load *load, uint32_t l)
{
    const uint32_t *chosen;
    util_query q = util_make_query(r, w, l);
    assert_int_equal(imp_load_select(load, l, &q.q, &chosen), 0);
    free(q.memory);
    return chosen;
}

static void gather_layer(const util_world *w, imp_load *load, uint32_t l)
{
    unsigned char *k = malloc(320 * util_k_bytes(w, l)), *v = malloc(320 * util_v_bytes(w, l));
    const imp_dst dst = {.k = k, .v = v, .k_stride = util_k_bytes(w, l), .v_stride = util_v_bytes(w, l)};
    assert_int_equal(imp_load_gather(load, l, &dst), 0);
    free(k);
    free(v);
}

/* CHUNKS: a period shares a choice, whichever of its layers is asked for first; and with prefetch what a period reads
 * ahead is just what it takes. */
static void test_periods(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, 21);
    for (int prefetch = IMP_PREFETCH_NONE; prefetch <= IMP_PREFETCH_CHUNKS; prefetch++) {
        util_world w;
        int32_t tokens[321];
        imp_load_opts opts;
        imp_load *load;
        imp_load_stats stats;
        imp_lease *lease = start_system(&w, "contiguous", &r, tokens, &opts);
        opts.switches.prefetch = (imp_prefetch)prefetch;
        opts.retention = 0.25;
        opts.period = 2;
        assert_int_equal(imp_load_begin(lease, &opts, &load), 0);
        uint32_t first[80];
        memcpy(first, select_layer(&r, &w, load, 0), sizeof first);
        for (size_t i = 0; i < 80; i++) assert_int_equal(first[i] / 16, first[i / 16 * 16] / 16); /* whole chunks */
        gather_layer(&w, load, 0);
        assert_memory_equal(select_layer(&r, &w, load, 1), first, sizeof first);
        gather_layer(&w, load, 1);
        assert_true(memcmp(select_layer(&r, &w, load, 2), first, sizeof first) != 0); /* another period */
        imp_load_get_stats(load, &stats);
        assert_int_equal(stats.n_selected, 3);
        assert_int_equal(stats.n_fallback, 0);

        /* The first layer of both periods is left out: the second one chooses. */
        assert_int_equal(imp_load_rewind(load), 0);
        memcpy(first, select_layer(&r, &w, load, 1), sizeof first);
        gather_layer(&w, load, 1);
        assert_true(memcmp(select_layer(&r, &w, load, 3), first, sizeof first) != 0);
        gather_layer(&w, load, 3);
        imp_load_end(load, NULL);

        if (prefetch == IMP_PREFETCH_CHUNKS) {
            opts.period = 100; /* nothing to guess: all layers share the first one's */
            assert_int_equal(imp_load_begin(lease, &opts, &load), 0);
            for (uint32_t l = 0; l < w.n_layers; l++) {
                select_layer(&r, &w, load, l);
                gather_layer(&w, load, l);
            }
            imp_load_end(load, &stats);
            size_t chunk = imp_seg_chunk(lease->path.spans[0].seg->layout, IMP_REGION_K, 0, 0).n_bytes;
            assert_int_equal(stats.bytes_read, chunk * (20 + 5 + (w.n_layers - 1) * 2 * 5));
            assert_int_equal(stats.identify_bytes, chunk * 20);
        }
        imp_lease_release(lease);
        util_stop(&w);
    }
}

/* A guess that was read is there for nothing when the budget is spent, and whatever was guessed, k tokens come. */
static void test_guesses(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, 22);
    util_world w;
    int32_t tokens[321];
    imp_load_opts opts;
    imp_load_stats with, without;
    imp_lease *lease = start_system(&w, "impress", &r, tokens, &opts);
    for (int guess = 0; guess < 2; guess++) {
        imp_load *load;
        imp_rng same = r;
        opts.switches.prefetch = guess ? IMP_PREFETCH_CHUNKS : IMP_PREFETCH_NONE;
        opts.switches.cache = IMP_CACHE_NONE;
        opts.retention = 0.2;
        opts.byte_share = 0.3f;
        opts.period = 1;
        opts.record = IMP_RECORD_NOTHING;
        assert_int_equal(imp_load_begin(lease, &opts, &load), 0);
        for (uint32_t l = 0; l < w.n_layers; l++) {
            select_layer(&same, &w, load, l);
            gather_layer(&w, load, l);
        }
        imp_load_end(load, guess ? &with : &without);
    }
    assert_true(with.bytes_read > without.bytes_read);
    assert_true(with.mass > without.mass);
    assert_int_equal(with.identify_bytes, without.identify_bytes);
    imp_lease_release(lease);
    util_stop(&w);
}

/* Sketches are on their way before any query, and with that prefetch the chunks of the core. */
static void test_core(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, 23);
    for (int core = 0; core < 2; core++) {
        util_world w;
        int32_t tokens[321];
        imp_load_opts opts;
        imp_load *load;
        imp_lease *lease = start_system(&w, "impress", &r, tokens, &opts);
        const imp_seg *seg = lease->path.spans[0].seg;
        const imp_seg_meta *meta = imp_seg_layout_meta(seg->layout);
        assert_int_equal(meta->order, IMP_ORDER_CORE);
        assert_int_equal(meta->core_tokens, 48); /* an eighth, in whole chunks */
        opts.switches.prefetch = core ? IMP_PREFETCH_CORE : IMP_PREFETCH_LAYERS;
        imp_load_stats stats;
        assert_int_equal(imp_load_begin(lease, &opts, &load), 0);
        select_layer(&r, &w, load, w.n_layers - 1); /* the layers before go, with what was read of them ahead */
        imp_load_get_stats(load, &stats);
        size_t sketch = chunk_bytes(seg, IMP_REGION_SKETCH, 0, 0), chunk = chunk_bytes(seg, IMP_REGION_KV, 0, 0);
        size_t chunks = 0; /* all of the layer at work, as all tokens are wanted */
        for (uint32_t c = core ? 3 : 0; c < imp_seg_region_chunks(seg->layout, IMP_REGION_KV); c++)
            chunks += chunk_bytes(seg, IMP_REGION_KV, w.n_layers - 1, c);
        assert_int_equal(stats.bytes_read, w.n_layers * (sketch + (core ? 3 * chunk : 0)) + chunks);
        assert_int_equal(stats.identify_bytes, sketch);
        imp_load_end(load, NULL);
        imp_lease_release(lease);
        util_stop(&w);
    }
}

/* An engine with other heads than its space told of is served by all keys. */
static void test_other_heads(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, 24);
    util_world w;
    int32_t tokens[321];
    imp_load_opts opts;
    imp_load *load;
    imp_load_stats stats;
    imp_lease *lease = start_system(&w, "impress-paper", &r, tokens, &opts);
    opts.retention = 0.25;
    opts.n_probe_heads = 2; /* of the first KV head, if there are 4; of both, if there are 2 */
    opts.probe_similarity = 1e-6f;
    assert_int_equal(imp_load_begin(lease, &opts, &load), 0);
    select_layer(&r, &w, load, 0);
    uint32_t probe_heads = imp_seg_layout_meta(lease->path.spans[0].seg->layout)->probe_heads;
    w.n_heads[1] = 2;
    select_layer(&r, &w, load, 1);
    imp_load_end(load, &stats);
    assert_int_equal(stats.n_selected, 2);
    assert_int_equal(stats.n_fallback, probe_heads < 2);
    w.n_heads[1] = 4;
    imp_lease_release(lease);
    util_stop(&w);
}

/* Keys that can't be scored are told before anything is read; all other ways to load them work. */
static void test_shapes_that_cant_be_scored(void **state)
{
    (void)state;
    static const struct {
        imp_type type;
        imp_layer_shape shape;
    } cases[] = {{IMP_TYPE_F16, {1, 1056, 32}}, {IMP_TYPE_Q8_0, {4, 80, 32}}};
    imp_rng r;
    imp_rng_seed(&r, 25);
    for (size_t i = 0; i < 2; i++) {
        util_world w = {.n_layers = 2, .type_k = cases[i].type, .type_v = cases[i].type,
                        .layers = {{1, 32, 32}, cases[i].shape}};
        int32_t tokens[101];
        imp_store_opts_init(&w.opts);
        w.opts.min_store_tokens = 1;
        util_start(&w);
        util_tokens(&r, tokens, 101);
        util_commit(&w, tokens, 100, 0, 0);
        imp_lease *lease;
        imp_prefix_info info;
        assert_int_equal(imp_prefix_acquire(w.space, tokens, 101, 0, &lease, &info), 0);
        assert_int_equal(info.n_matched, 100);
        for (imp_identify how = IMP_IDENTIFY_NONE; how <= IMP_IDENTIFY_RANDOM; how++) {
            bool by_keys = how != IMP_IDENTIFY_NONE && how != IMP_IDENTIFY_STATIC && how != IMP_IDENTIFY_RANDOM;
            imp_load_opts opts;
            imp_load_guess guess;
            imp_load *load;
            imp_load_opts_init(&opts);
            opts.switches.identify = how;
            opts.retention = how == IMP_IDENTIFY_NONE ? 1 : 0.5;
            assert_int_equal(imp_load_estimate(lease, &opts, &guess), by_keys ? IMP_E_UNSUPPORTED : 0);
            assert_int_equal(imp_load_begin(lease, &opts, &load), by_keys ? IMP_E_UNSUPPORTED : 0);
            if (by_keys) assert_non_null(strstr(imp_last_error(), "layer 1"));
            for (uint32_t l = 0; l < 2 && load; l++) assert_int_equal(imp_load_select(load, l, NULL, NULL), 0);
            imp_load_end(load, NULL);
        }
        imp_lease_release(lease);
        util_stop(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),  cmocka_unit_test(test_periods),     cmocka_unit_test(test_guesses),
        cmocka_unit_test(test_core),    cmocka_unit_test(test_other_heads),
        cmocka_unit_test(test_shapes_that_cant_be_scored),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
