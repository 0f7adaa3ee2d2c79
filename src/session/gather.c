/* gather.c: rows in the engine's memory, and the tiers told what was used. */
#include <string.h>

#include "base/clock.h"
#include "base/status.h"
#include "format/rows.h"
#include "session/load.h"

/* Keys or values of one layer on their way. */
typedef struct target {
    imp_region region; /* IMP_REGION_K or V */
    unsigned char *rows;
    size_t stride;
    const uint32_t *cells;
    size_t row_bytes; /* in the engine */
    size_t elements;
} target;

static unsigned char *target_row(const target *t, size_t i)
{
    return t->rows + (t->cells ? t->cells[i] : i) * t->stride;
}

/* Rows that lie one behind the other and stay so are copied as one. */
typedef struct copying {
    unsigned char *to;
    const unsigned char *from;
    size_t n_bytes;
} copying;

static void copy_row(copying *c, unsigned char *to, const unsigned char *from, size_t row_bytes)
{
    if (!c->n_bytes || to != c->to + c->n_bytes || from != c->from + c->n_bytes) {
        if (c->n_bytes) memcpy(c->to, c->from, c->n_bytes);
        *c = (copying){.to = to, .from = from};
    }
    c->n_bytes += row_bytes;
}

/* The chosen rows of chunk `c` of a span. */
static void gather_chunk(const imp_load *load, const imp_slot *s, uint32_t layer, const imp_plan_span *span, uint32_t c,
                         const target *t)
{
    const imp_seg_layout *layout = span->seg->layout;
    const uint32_t *map = imp_seg_map(span->seg, layer);
    imp_rest rest = imp_seg_layout_meta(layout)->rest;
    bool key = t->region == IMP_REGION_K, raw = rest == IMP_REST_RAW;
    bool widened = key && !raw && load->widened;
    size_t coded = imp_seg_row_bytes(layout, t->region, layer);
    size_t group_bytes = key ? imp_rows_scales_bytes(rest, t->elements) : 0;
    const unsigned char *scales = key && !raw ? s->pieces[span->scales].bytes : NULL;
    const unsigned char *rows = s->pieces[(key ? span->keys : span->values) + c].bytes +
                                imp_seg_rows_at(layout, t->region, layer, span->first_chunk + c);

    copying run = {0};
    uint32_t first, end = imp_plan_slots(span, c, &first);
    for (uint32_t slot = first; slot < end; slot++, rows += coded) {
        uint32_t at = imp_plan_token(span, map, slot);
        uint32_t i = at == IMP_PLAN_NONE ? IMP_PLAN_NONE : load->chosen_at[at];
        if (i == IMP_PLAN_NONE) continue;
        unsigned char *to = target_row(t, i);
        if (raw) {
            copy_row(&run, to, rows, t->row_bytes);
        } else if (widened) { /* to be scored */
            copy_row(&run, to, load->channel->wide + at * t->row_bytes, t->row_bytes);
        } else if (key) {
            size_t group = (size_t)(map ? map[slot] : slot) / IMP_GROUP_TOKENS;
            const void *own = scales + group * group_bytes;
            imp_rows_key_decode(rest, load->type_k, rows, own, t->elements, to);
        } else {
            imp_rows_value_decode(rest, load->type_v, rows, t->elements, to);
        }
    }
    if (run.n_bytes) memcpy(run.to, run.from, run.n_bytes);
}

/* What a batch copies. */
typedef struct copies {
    const target *first, *second; /* the second may be NULL */
} copies;

static void copy_chunk(const imp_batch *batch, const imp_plan_span *span, uint32_t c)
{
    const copies *what = batch->user;
    gather_chunk(batch->load, batch->slot, batch->layer, span, c, what->first);
    if (what->second) gather_chunk(batch->load, batch->slot, batch->layer, span, c, what->second);
}

/* One region of a span: wait, check, copy, chunk by chunk, in the order in which they come; of flagged units, those with
 * chosen tokens. */
static int gather_region(imp_load *load, imp_slot *s, uint32_t layer, const imp_plan_span *span, const target *t,
                         const target *paired)
{
    const copies what = {t, paired};
    imp_batch batch = {.load = load, .work = copy_chunk, .slot = s, .layer = layer, .user = &what};
    uint32_t first = t->region == IMP_REGION_K ? span->keys : span->values;
    int rc = 0;
    for (uint32_t c = 0; c < span->n_chunks && rc == 0; c++)
        if (load->unit_flags[span->first_unit + c]) rc = imp_batch_add(&batch, span, c, first + c);
    imp_batch_end(&batch);
    return rc;
}

static int gather_span(imp_load *load, imp_slot *s, uint32_t layer, const imp_plan_span *span, const target *k,
                       const target *v)
{
    int rc = span->scales == IMP_PLAN_NONE ? 0 : imp_stream_check(load, s, layer, span, span->scales);
    if (rc < 0) return rc;
    if (span->paired) return gather_region(load, s, layer, span, k, v);
    rc = gather_region(load, s, layer, span, k, NULL);
    return rc < 0 ? rc : gather_region(load, s, layer, span, v, NULL);
}

/* How much each unit mattered, as the policy of the tiers counts (src/cache/policy.h), in load->unit_sums. */
static void weigh_units(imp_load *load)
{
    double *share = load->unit_sums;
    size_t n_units = load->plan.n_units, n_used = 0;
    double all = 0;
    bool by_mass = load->tier->policy == IMP_CACHE_ATTENTION && load->has_scores;
    for (size_t u = 0; u < n_units; u++) {
        share[u] = 0;
        n_used += load->tokens_in[u] > 0;
    }
    for (size_t t = 0; by_mass && t < load->plan.n_tokens; t++) {
        all += (double)load->scores[t];
        share[load->unit_of[t]] += (double)load->scores[t];
    }
    for (size_t i = 0; !by_mass && i < load->k; i++) share[load->unit_of[load->chosen[i]]]++;
    for (size_t u = 0; u < n_units; u++) {
        if (by_mass) {
            share[u] = all > 0 ? share[u] / all * (double)n_used : 0;
        } else if (load->tokens_in[u]) {
            share[u] /= load->tokens_in[u];
        }
    }
}

/* Tell the tiers what was used, and how much of each chunk mattered, and offer them what came from disk. */
static void feed_tiers(imp_load *load, const imp_slot *s, uint32_t layer)
{
    uint64_t start = imp_now_ns();
    imp_load_units(load, layer);
    weigh_units(load);
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        for (uint32_t at = span->first_piece; at < span->first_piece + span->n_pieces; at++) {
            const imp_piece *p = &s->pieces[at];
            if (!p->checked) continue;
            imp_host_key key = imp_stream_key(span, layer, at);
            float share = 1; /* scales, sketches and probe keys serve every row */
            if (at >= span->keys) share = (float)load->unit_sums[span->first_unit + key.chunk - span->first_chunk];
            imp_host_use(load->host, &key, share);
            if (!p->held) imp_host_put(load->host, &key, p->bytes, p->place.data_bytes);
        }
    }
    load->stats.gather_ns += imp_now_ns() - start;
}

int imp_load_gather(imp_load *load, uint32_t layer, const imp_dst *dst)
{
    if (!load) return imp_fail(IMP_E_ARG, "imp_load_gather: no load");
    if (load->dead) return imp_fail(load->dead, "the load failed before");
    if (!load->has_selected || load->at_work != layer)
        return imp_fail(IMP_E_ARG, "imp_load_gather: layer %u was not the last one selected, or is gathered", layer);
    const imp_layer_shape *shape = &load->layers[layer];
    size_t k_row = imp_load_key_bytes(load, layer), v_row = imp_load_value_bytes(load, layer);
    if (!dst || !dst->k || !dst->v || (load->k > 1 && (dst->k_stride < k_row || dst->v_stride < v_row)))
        return imp_fail(IMP_E_ARG, "imp_load_gather: layer %u needs memory for rows of %zu and %zu bytes", layer, k_row,
                        v_row);

    imp_kept_line kept;
    imp_error_keep(&kept);
    const target k = {IMP_REGION_K, dst->k, dst->k_stride, dst->cells, k_row,
                      (size_t)shape->n_kv_heads * shape->head_dim_k};
    const target v = {IMP_REGION_V, dst->v, dst->v_stride, dst->cells, v_row,
                      (size_t)shape->n_kv_heads * shape->head_dim_v};
    imp_slot *s = imp_stream_slot(load, layer);
    imp_load_flag_units(load, layer, load->chosen);
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        int rc = gather_span(load, s, layer, &load->plan.spans[i], &k, &v);
        if (rc < 0) return rc;
    }
    if (load->host) feed_tiers(load, s, layer);
    load->has_selected = false;
    load->n_gathered++;
    imp_stream_leave(load);
    return imp_error_back(&kept, 0);
}
