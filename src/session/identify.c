/* identify.c: which tokens a layer gets. Each way leaves k of them in load->chosen and has stage B started. */
#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/status.h"
#include "select/blend.h"
#include "session/choose.h"
#include "session/load.h"

/* ------------------------------------------------------------------------------------------------------- keys ---- */

/* The best tokens by load->scores, or with CHUNKS the best units. */
static void choose_by_scores(imp_load *load, uint32_t layer)
{
    const imp_load_opts *o = &load->opts;
    size_t n = load->plan.n_tokens;
    if (o->switches.identify == IMP_IDENTIFY_CHUNKS) {
        imp_load_units(load, layer);
        imp_choose_units(load->scores, n, load->unit_of, load->plan.n_units, load->k, o->n_keep_first, o->n_keep_last,
                         load->own, load->token_flags, load->votes, load->unit_sums);
        load->period = layer / o->period;
    } else {
        imp_top_k(load->scores, n, load->k, o->n_keep_first, o->n_keep_last, load->own, NULL, load->scratch);
    }
    load->mass = imp_mass_of(load->scores, n, load->own, load->k);
}

static int by_keys(imp_load *load, imp_slot *s, uint32_t layer, const imp_query *query)
{
    imp_keys keys;
    imp_stream_want_keys(load, s, layer); /* those that stage A has not */
    imp_stream_fetch(load, s);
    int rc = imp_keys_all(load, s, layer, &keys);
    if (rc < 0) return rc;

    uint64_t start = imp_now_ns();
    rc = imp_score_h2o(load->channel->scorer, query, load->opts.max_query_rows, &keys, load->scores, NULL);
    if (rc < 0) return rc;
    choose_by_scores(load, layer);
    imp_record_scores(load, layer, load->scores, true);
    load->has_scores = true;
    load->stats.identify_ns += imp_now_ns() - start;
    return 0;
}

/* By all keys, though the request asked for less. */
static int fall_back(imp_load *load, imp_slot *s, uint32_t layer, const imp_query *query)
{
    int rc = by_keys(load, s, layer, query);
    if (rc == 0) load->stats.n_fallback++;
    return rc;
}

/* ------------------------------------------------------------------------------------------------ probe heads ---- */

/* Each probe head's own set, in load->sets; the sum of their scores in load->scores. */
static int probe(imp_load *load, imp_slot *s, uint32_t layer, const imp_query *query, uint32_t n_probe)
{
    const imp_load_opts *o = &load->opts;
    size_t n = load->plan.n_tokens;
    uint32_t n_kv_heads = load->layers[layer].n_kv_heads;
    float *own = load->past;
    memset(load->scores, 0, n * sizeof *load->scores);
    for (uint32_t i = 0; i < n_probe; i++) {
        uint32_t kv_head, head = imp_probe_head(i, query->n_heads, n_kv_heads, o->probe_spread, &kv_head);
        imp_keys keys;
        int rc = imp_keys_probe(load, s, layer, kv_head, &keys);
        if (rc < 0) return rc;

        uint64_t start = imp_now_ns();
        imp_query one = *query;
        one.q += head * query->head_stride;
        one.n_heads = 1;
        rc = imp_score_h2o(load->channel->scorer, &one, o->max_query_rows, &keys, own, NULL);
        if (rc < 0) return rc;
        uint32_t *set = load->sets + i * load->k;
        imp_top_k(own, n, load->k, o->n_keep_first, o->n_keep_last, set, NULL, load->scratch);
        load->index_sets[i] = (imp_index_set){set, load->k};
        for (size_t t = 0; t < n; t++) load->scores[t] += own[t];
        load->stats.identify_ns += imp_now_ns() - start;
    }
    return 0;
}

/* KV heads [0, n) are what the probe heads of these queries use. */
static uint32_t probe_kv_heads(const imp_load *load, uint32_t layer, uint32_t n_heads, uint32_t n_probe)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < n_probe; i++) {
        uint32_t kv_head;
        (void)imp_probe_head(i, n_heads, load->layers[layer].n_kv_heads, load->opts.probe_spread, &kv_head);
        if (kv_head >= n) n = kv_head + 1;
    }
    return n;
}

static int by_probe(imp_load *load, imp_slot *s, uint32_t layer, const imp_query *query)
{
    const imp_load_opts *o = &load->opts;
    size_t n = load->plan.n_tokens;
    uint32_t n_probe = load->n_probe < query->n_heads ? load->n_probe : query->n_heads;
    if (!imp_keys_have_probe(load, probe_kv_heads(load, layer, query->n_heads, n_probe)))
        return fall_back(load, s, layer, query); /* the space told of other numbers of heads */
    int rc = probe(load, s, layer, query, n_probe);
    if (rc < 0) return rc;

    uint64_t start = imp_now_ns();
    double alike = imp_jaccard_mean(load->index_sets, n_probe);
    double least = o->probe_similarity > 0 ? (double)o->probe_similarity
                                           : (double)o->probe_alpha * imp_jaccard_random(load->k, n);
    bool agree = alike >= least;
    if (agree) {
        imp_vote(load->index_sets, n_probe, load->scores, n, load->k, load->own, load->votes, load->scratch);
        load->mass = imp_mass_of(load->scores, n, load->own, load->k);
        imp_record_scores(load, layer, load->scores, false);
        load->has_scores = true;
    }
    load->stats.identify_ns += imp_now_ns() - start;
    return agree ? 0 : fall_back(load, s, layer, query);
}

/* ----------------------------------------------------------------------------------------------------- sketch ---- */

/* Bytes of each unit, and how many of those that aren't there yet may be read. */
static uint64_t page_budget(imp_load *load, const imp_slot *s)
{
    double all = 0; /* padded, of the prefix's part of each unit */
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        for (uint32_t c = 0; c < span->n_chunks; c++) {
            const imp_piece *k = &s->pieces[span->keys + c], *v = &s->pieces[span->values + c];
            uint32_t u = span->first_unit + c, n_bytes = k->place.n_bytes + (span->paired ? 0 : v->place.n_bytes);
            load->unit_bytes[u] = n_bytes;
            load->unit_flags[u] = k->asked && v->asked; /* ahead, as the core or a guess */
            all += (double)n_bytes * load->tokens_in[u] / k->place.n_tokens;
        }
    }
    double budget = all * (double)load->opts.byte_share;
    return budget < 1e18 ? (uint64_t)budget : (uint64_t)1e18;
}

/* Units under the budget, then the best tokens that arrive. */
static int choose_pages(imp_load *load, const imp_slot *s, uint32_t layer, const float *scores)
{
    imp_load_units(load, layer);
    uint64_t budget = page_budget(load, s);
    unsigned char *read = load->unit_flags + load->plan.n_units;
    const imp_page_choice choice = {
        .scores = scores, .n_tokens = load->plan.n_tokens, .page_of = load->unit_of, .n_pages = load->plan.n_units,
        .page_bytes = load->unit_bytes, .resident = load->unit_flags, .budget_bytes = budget, .k = load->k,
        .keep_first = load->opts.n_keep_first, .keep_last = load->opts.n_keep_last,
    };
    imp_page_result result;
    return imp_choose_pages(load->channel->chooser, &choice, read, load->own, &result);
}

/* load->scores with what earlier requests found, in load->past, or as they are. */
static const float *blended(imp_load *load, uint32_t layer)
{
    if (!imp_record_past(load, layer, load->past)) return load->scores;
    imp_blend blend = imp_blend_default();
    blend.weight = load->opts.history_weight;
    imp_blend_scores(blend, load->scores, load->past, load->plan.n_tokens, load->past);
    return load->past;
}

/* Rows come by units, so that more keys arrive than a sketch asked for. They are scored exactly, and of these tokens
 * the best are chosen; history has done its part by then (docs/design/sketch.md). Beside the scores of tokens that
 * aren't here, theirs are as large in all as the sketch made them. */
static int refine(imp_load *load, imp_slot *s, uint32_t layer, const imp_query *query)
{
    const imp_load_opts *o = &load->opts;
    size_t n = load->plan.n_tokens, n_here;
    uint32_t *here = load->votes;
    float *exact = load->scratch, *compact = load->scratch + n;
    imp_keys keys;
    imp_stream_want_chosen(load, s, layer, load->own);
    imp_stream_fetch(load, s);
    imp_stream_ahead(load);
    int rc = imp_keys_some(load, s, layer, load->unit_flags, here, &n_here, &keys);
    if (rc < 0) return rc;

    uint64_t start = imp_now_ns();
    rc = imp_score_h2o(load->channel->scorer, query, o->max_query_rows, &keys, exact, NULL);
    if (rc < 0) return rc;
    double by_sketch = 0, in_all = 0;
    for (size_t i = 0; i < n_here; i++) {
        by_sketch += (double)load->scores[here[i]];
        in_all += (double)exact[i];
    }
    double scale = in_all > 0 ? by_sketch / in_all : 0;
    for (size_t i = 0; i < n_here; i++) load->scores[here[i]] = (float)(scale * (double)exact[i]);
    memcpy(compact, exact, n_here * sizeof *compact); /* the scratch of imp_top_k() is where `exact` is */
    imp_top_k(compact, n_here, load->k, o->n_keep_first, o->n_keep_last, load->own, NULL, load->scratch);
    for (size_t i = 0; i < load->k; i++) load->own[i] = here[load->own[i]];
    load->mass = imp_mass_of(load->scores, n, load->own, load->k);
    if (o->record == IMP_RECORD_HISTORY) imp_record_scores(load, layer, load->scores, false);
    load->stats.identify_ns += imp_now_ns() - start;
    return 0;
}

/* Of the rows that score, at most `most`, the last of them and others at even distances before it. */
static imp_query sample_rows(const imp_query *query, size_t n_rows, size_t most)
{
    imp_query out = *query;
    if (n_rows > query->n_rows) n_rows = query->n_rows;
    if (n_rows == 0) return out;
    size_t step = (n_rows + most - 1) / most;
    out.n_rows = (n_rows + step - 1) / step;
    out.q += (query->n_rows - 1 - (out.n_rows - 1) * step) * query->row_stride;
    out.row_stride *= step;
    return out;
}

static int by_sketch(imp_load *load, imp_slot *s, uint32_t layer, const imp_query *query)
{
    const imp_load_opts *o = &load->opts;
    size_t n = load->plan.n_tokens;
    int rc = imp_keys_sketch(load, s, layer);
    if (rc < 0) return rc;

    uint64_t start = imp_now_ns();
    const imp_query some = sample_rows(query, o->max_query_rows, o->max_sketch_rows);
    const imp_rope_table *turns = load->ropes[layer] ? imp_ropes_table(load->ropes[layer]) : NULL;
    rc = imp_sketch_score(load->channel->scorer, load->sketch_runs, load->plan.n_spans, 0, turns, &some,
                          some.n_rows, load->scores, NULL);
    if (rc < 0) return rc;
    imp_normalise(load->scores, n, load->scores);
    const float *scores = blended(load, layer);
    if (o->byte_share > 0) {
        rc = choose_pages(load, s, layer, scores);
        if (rc < 0) return rc;
    } else {
        imp_top_k(scores, n, load->k, o->n_keep_first, o->n_keep_last, load->own, NULL, load->scratch);
    }
    load->has_scores = true;
    load->stats.identify_ns += imp_now_ns() - start;
    return refine(load, s, layer, query);
}

/* --------------------------------------------------------------------------------------------- without queries ---- */

double imp_identify_known(imp_load *load, uint32_t layer, uint32_t *chosen)
{
    const imp_load_opts *o = &load->opts;
    size_t n = load->plan.n_tokens;
    uint64_t start = imp_now_ns();
    bool ranked = o->switches.identify == IMP_IDENTIFY_STATIC;
    if (ranked) {
        imp_record_ranking(load, layer, load->scores);
    } else {
        imp_random_scores(layer, n, load->scores);
    }
    imp_top_k(load->scores, n, load->k, o->n_keep_first, o->n_keep_last, chosen, NULL, load->scratch);
    double mass = ranked ? imp_mass_of(load->scores, n, chosen, load->k) : (double)load->k / (double)n;
    load->stats.identify_ns += imp_now_ns() - start;
    return mass;
}

/* ----------------------------------------------------------------------------------------------------- select ---- */

/* What the choice means for gather, for the tiers and for the layers that come. */
static void note_choice(imp_load *load, imp_slot *s, uint32_t layer)
{
    for (size_t t = 0; t < load->plan.n_tokens; t++) load->chosen_at[t] = IMP_PLAN_NONE;
    for (size_t i = 0; i < load->k; i++) load->chosen_at[load->chosen[i]] = (uint32_t)i;
    imp_stream_want_chosen(load, s, layer, load->chosen);
    if (!load->guess) return;
    memcpy(load->guess, load->unit_flags, load->plan.n_units);
    load->has_guess = true;
}

int imp_identify_layer(imp_load *load, uint32_t layer, const imp_query *query)
{
    imp_slot *s = imp_stream_slot(load, layer);
    if (s->how == IMP_HOW_LATER) s->how = load->period == layer / load->opts.period ? IMP_HOW_KNOWN : IMP_HOW_KEYS;

    /* Before anything is awaited, so that a failure leaves the layer as it was. */
    int rc = 0;
    if (s->how != IMP_HOW_ALL && s->how != IMP_HOW_KNOWN) {
        uint64_t rows = imp_round_up(query->n_rows, 32); /* for what there is: any number of rows may be allowed */
        if (rows > load->opts.max_query_rows) rows = load->opts.max_query_rows;
        rc = imp_channel_scorer(load->channel, load->plan.n_tokens, rows, query->n_heads,
                                load->layers[layer].head_dim_k);
    }
    if (rc < 0) return rc;

    imp_identify identify = load->opts.switches.identify;
    bool less = identify == IMP_IDENTIFY_PROBE || identify == IMP_IDENTIFY_SKETCH; /* than all keys was asked for */
    load->widened = false;
    load->chosen = load->own;
    if (identify != IMP_IDENTIFY_CHUNKS) load->has_scores = false;
    switch (s->how) {
    case IMP_HOW_PROBE: rc = by_probe(load, s, layer, query); break;
    case IMP_HOW_SKETCH: rc = by_sketch(load, s, layer, query); break;
    case IMP_HOW_KEYS: rc = less ? fall_back(load, s, layer, query) : by_keys(load, s, layer, query); break;
    case IMP_HOW_ALL:
    case IMP_HOW_LATER: break;
    case IMP_HOW_KNOWN:
        if (!s->known) break; /* CHUNKS: the period's choice stands */
        load->chosen = s->known;
        load->mass = s->mass;
        break;
    }
    if (rc < 0) return rc;
    note_choice(load, s, layer);
    imp_stream_fetch(load, s);
    imp_stream_ahead(load);
    if (s->how != IMP_HOW_ALL) {
        load->stats.n_selected++;
        load->mass_sum += load->mass;
    }
    return 0;
}
