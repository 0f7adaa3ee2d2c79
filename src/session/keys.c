/* keys.c: keys, probe keys and sketches of a layer, laid out for the scorer.
 *
 * Rows of a segment with maps lie in any order. They are listed one by one in the order of the prefix all the same, so
 * that a layer's scores are the same to the bit however its segments are ordered.
 */
#include "base/clock.h"
#include "format/rows.h"
#include "session/load.h"

/* Count what had to be read of a piece that is needed to choose. */
static void count(imp_load *load, imp_slot *s, uint32_t piece)
{
    imp_piece *p = &s->pieces[piece];
    if (!p->counted && p->run != IMP_PLAN_NONE) load->stats.identify_bytes += p->place.n_bytes;
    p->counted = true;
}

/* Wait for such a piece, too. */
static int check(imp_load *load, imp_slot *s, uint32_t layer, const imp_plan_span *span, uint32_t piece)
{
    count(load, s, piece);
    return imp_stream_check(load, s, layer, span, piece);
}

/* The key rows of a chunk whose tokens are in any order, each a run of its own. */
static void list_mapped(const imp_plan_span *span, const uint32_t *map, uint32_t c, const unsigned char *rows,
                        size_t row, imp_key_run *runs)
{
    uint32_t first, end = imp_plan_slots(span, c, &first);
    for (uint32_t slot = first; slot < end; slot++) {
        uint32_t t = imp_plan_token(span, map, slot);
        if (t != IMP_PLAN_NONE) runs[t - span->prefix_first] = (imp_key_run){rows + (slot - first) * row, 1};
    }
}

/* Neighbours in memory become one run; returns how many are left. */
static size_t merge(imp_key_run *runs, size_t n, size_t row)
{
    size_t w = 0;
    for (size_t i = 1; i < n; i++) {
        if ((const unsigned char *)runs[w].keys + runs[w].n_tokens * row == (const unsigned char *)runs[i].keys) {
            runs[w].n_tokens++;
        } else {
            runs[++w] = runs[i];
        }
    }
    return w + 1;
}

/* Those of a span whose rows are the engine's. Returns the number of runs. */
static size_t list_raw(const imp_load *load, const imp_slot *s, uint32_t layer, const imp_plan_span *span, size_t row,
                       imp_key_run *runs)
{
    const uint32_t *map = imp_seg_map(span->seg, layer);
    size_t n = 0;
    for (uint32_t c = 0; c < span->n_chunks; c++) {
        const unsigned char *rows = s->pieces[span->keys + c].bytes;
        if (map) {
            if (load->tokens_in[span->first_unit + c]) list_mapped(span, map, c, rows, row, runs);
            continue;
        }
        uint32_t first, end = imp_plan_slots(span, c, &first), skip = 0;
        if (first < span->segment_first) skip = span->segment_first - first;
        if (end > span->segment_first + span->n_tokens) end = span->segment_first + span->n_tokens;
        runs[n++] = (imp_key_run){rows + skip * row, end - first - skip};
    }
    return map ? merge(runs, span->n_tokens, row) : n;
}

/* imp_batch: rows of a chunk in the engine's type, one run each, in load->key_runs by their tokens' places in the
 * prefix. */
static void list_chunk(const imp_batch *batch, const imp_plan_span *span, uint32_t c)
{
    imp_load *load = batch->load;
    const imp_slot *s = batch->slot;
    uint32_t layer = batch->layer;
    const imp_seg_layout *layout = span->seg->layout;
    const uint32_t *map = imp_seg_map(span->seg, layer);
    imp_rest rest = imp_seg_layout_meta(layout)->rest;
    size_t elements = (size_t)load->layers[layer].n_kv_heads * load->layers[layer].head_dim_k;
    size_t row = imp_load_key_bytes(load, layer), coded = imp_seg_row_bytes(layout, IMP_REGION_K, layer);
    size_t group_bytes = imp_rows_scales_bytes(rest, elements);
    const unsigned char *codes = s->pieces[span->keys + c].bytes;
    const unsigned char *scales = rest != IMP_REST_RAW ? s->pieces[span->scales].bytes : NULL;
    uint32_t first, end = imp_plan_slots(span, c, &first);
    for (uint32_t slot = first; slot < end; slot++, codes += coded) {
        uint32_t t = imp_plan_token(span, map, slot);
        if (t == IMP_PLAN_NONE) continue;
        const unsigned char *key = codes;
        if (scales) {
            size_t group = (size_t)(map ? map[slot] : slot) / IMP_GROUP_TOKENS;
            const void *own = scales + group * group_bytes;
            unsigned char *to = load->channel->wide + t * row;
            imp_rows_key_decode(rest, load->type_k, codes, own, elements, to);
            key = to;
        }
        load->key_runs[t] = (imp_key_run){key, 1};
    }
}

int imp_keys_all(imp_load *load, imp_slot *s, uint32_t layer, imp_keys *out)
{
    const imp_layer_shape *shape = &load->layers[layer];
    size_t row = imp_load_key_bytes(load, layer), n = 0;
    imp_load_units(load, layer);
    load->widened = false;
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        if (span->scales != IMP_PLAN_NONE) {
            int rc = check(load, s, layer, span, span->scales);
            if (rc < 0) return rc;
        }
        bool rounded = imp_seg_layout_meta(span->seg->layout)->rest != IMP_REST_RAW;
        imp_batch batch = {.load = load, .work = list_chunk, .slot = s, .layer = layer};
        int rc = 0;
        for (uint32_t c = 0; c < span->n_chunks && rc == 0; c++) {
            if (!load->tokens_in[span->first_unit + c]) continue;
            count(load, s, span->keys + c);
            rc = rounded ? imp_batch_add(&batch, span, c, span->keys + c)
                         : imp_stream_check(load, s, layer, span, span->keys + c);
        }
        imp_batch_end(&batch);
        if (rc < 0) return rc;
        if (!rounded) {
            n += list_raw(load, s, layer, span, row, load->key_runs + n);
            continue;
        }
        load->widened = true;
        load->key_runs[n++] = (imp_key_run){load->channel->wide + span->prefix_first * row, span->n_tokens};
    }
    *out = (imp_keys){.type = load->type_k, .n_kv_heads = shape->n_kv_heads, .head_dim = shape->head_dim_k,
                      .runs = load->key_runs, .n_runs = n, .n_tokens = load->plan.n_tokens};
    return 0;
}

int imp_keys_some(imp_load *load, imp_slot *s, uint32_t layer, const unsigned char *units, uint32_t *tokens,
                  size_t *n_tokens, imp_keys *out)
{
    const imp_layer_shape *shape = &load->layers[layer];
    imp_batch batch = {.load = load, .work = list_chunk, .slot = s, .layer = layer};
    size_t n = 0;
    int rc = 0;
    imp_load_units(load, layer);
    for (size_t i = 0; i < load->plan.n_spans && rc == 0; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        if (span->scales != IMP_PLAN_NONE) {
            rc = imp_stream_check(load, s, layer, span, span->scales);
            load->widened = true;
        }
        for (uint32_t c = 0; c < span->n_chunks && rc == 0; c++)
            if (units[span->first_unit + c]) rc = imp_batch_add(&batch, span, c, span->keys + c);
    }
    imp_batch_end(&batch);
    if (rc < 0) return rc;
    for (size_t t = 0; t < load->plan.n_tokens; t++) {
        if (!units[load->unit_of[t]]) continue;
        load->key_runs[n] = load->key_runs[t];
        tokens[n++] = (uint32_t)t;
    }
    *n_tokens = n;
    *out = (imp_keys){.type = load->type_k, .n_kv_heads = shape->n_kv_heads, .head_dim = shape->head_dim_k,
                      .runs = load->key_runs, .n_runs = merge(load->key_runs, n, imp_load_key_bytes(load, layer)),
                      .n_tokens = n};
    return 0;
}

int imp_keys_probe(imp_load *load, imp_slot *s, uint32_t layer, uint32_t kv_head, imp_keys *out)
{
    uint32_t head_dim = load->layers[layer].head_dim_k;
    size_t head_bytes = imp_type_bytes(load->type_k, head_dim), n = 0;
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        int rc = check(load, s, layer, span, span->probe);
        if (rc < 0) return rc;
        size_t row = imp_seg_row_bytes(span->seg->layout, IMP_REGION_PROBE, layer);
        const unsigned char *keys = s->pieces[span->probe].bytes + span->segment_first * row + kv_head * head_bytes;
        if (row == head_bytes) {
            load->key_runs[n++] = (imp_key_run){keys, span->n_tokens};
        } else {
            for (uint32_t t = 0; t < span->n_tokens; t++) load->key_runs[n++] = (imp_key_run){keys + t * row, 1};
        }
    }
    *out = (imp_keys){.type = load->type_k, .n_kv_heads = 1, .head_dim = head_dim, .runs = load->key_runs, .n_runs = n,
                      .n_tokens = load->plan.n_tokens};
    return 0;
}

int imp_keys_sketch(imp_load *load, imp_slot *s, uint32_t layer)
{
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        int rc = check(load, s, layer, span, span->sketch);
        if (rc < 0) return rc;
        size_t row = imp_seg_row_bytes(span->seg->layout, IMP_REGION_SKETCH, layer);
        load->sketch_runs[i] = (imp_sketch_run){.basis = span->seg->bases->layers[layer],
                                                .codes = s->pieces[span->sketch].bytes + span->segment_first * row,
                                                .n_tokens = span->n_tokens};
    }
    return 0;
}

bool imp_keys_have_probe(const imp_load *load, uint32_t n_kv_heads)
{
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        if (span->probe == IMP_PLAN_NONE) return false;
        if (imp_seg_layout_meta(span->seg->layout)->probe_heads < n_kv_heads) return false;
    }
    return true;
}

bool imp_keys_have_sketch(const imp_load *load, uint32_t layer)
{
    const imp_layer_shape *shape = &load->layers[layer];
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_seg *seg = load->plan.spans[i].seg;
        const imp_basis *b = seg->bases && layer < seg->bases->n_layers ? seg->bases->layers[layer] : NULL;
        if (load->plan.spans[i].sketch == IMP_PLAN_NONE || !b || imp_basis_kv_heads(b) != shape->n_kv_heads ||
            imp_basis_head_dim(b) != shape->head_dim_k ||
            imp_sketch_token_bytes(b) != imp_seg_row_bytes(seg->layout, IMP_REGION_SKETCH, layer))
            return false;
    }
    return true;
}
