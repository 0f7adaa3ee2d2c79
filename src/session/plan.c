#include "session/plan.h"

#include "base/alloc.h"
#include "base/status.h"

int imp_plan_new(const imp_span *spans, size_t n_spans, size_t n_tokens, imp_plan *out)
{
    *out = (imp_plan){0};
    imp_plan_span *list = imp_calloc(n_spans, sizeof *list);
    if (!list) return imp_fail(IMP_E_NOMEM, "no memory for a plan of %zu spans", n_spans);

    size_t n = 0, done = 0;
    for (size_t i = 0; i < n_spans && done < n_tokens; i++) {
        const imp_span *s = &spans[i];
        const imp_seg_meta *meta = imp_seg_layout_meta(s->seg->layout);
        uint32_t take = s->n_tokens < n_tokens - done ? s->n_tokens : (uint32_t)(n_tokens - done);
        /* A node that was split off goes on where its parent ends in the same segment: one span for us, so that the
         * chunk they share is read once. */
        imp_plan_span *last = n ? &list[n - 1] : NULL;
        if (last && last->seg == s->seg && last->segment_first + last->n_tokens == s->segment_first) {
            last->n_tokens += take;
        } else {
            list[n++] = (imp_plan_span){
                .seg = s->seg,
                .prefix_first = (uint32_t)done,
                .segment_first = s->segment_first,
                .n_tokens = take,
                .n_scales = meta->rest == IMP_REST_Q8,
            };
        }
        done += take;
    }

    size_t n_pieces = 0;
    for (size_t i = 0; i < n; i++) {
        imp_plan_span *s = &list[i];
        uint32_t per_chunk = imp_seg_layout_meta(s->seg->layout)->chunk_tokens;
        s->first_piece = (uint32_t)n_pieces;
        s->first_chunk = s->segment_first / per_chunk;
        s->n_chunks = (s->segment_first + s->n_tokens - 1) / per_chunk - s->first_chunk + 1;
        n_pieces += s->n_scales + 2 * (size_t)s->n_chunks;
    }
    *out = (imp_plan){.spans = list, .n_spans = n, .n_pieces = n_pieces, .n_tokens = done};
    return 0;
}

void imp_plan_clear(imp_plan *plan)
{
    imp_free(plan->spans);
    *plan = (imp_plan){0};
}

imp_plan_rows imp_plan_chunk_rows(const imp_plan_span *span, uint32_t i)
{
    uint32_t per_chunk = imp_seg_layout_meta(span->seg->layout)->chunk_tokens;
    uint32_t chunk_first = (span->first_chunk + i) * per_chunk; /* in the segment, as the next two */
    uint32_t end = span->segment_first + span->n_tokens;
    uint32_t first = chunk_first > span->segment_first ? chunk_first : span->segment_first;
    uint32_t last = chunk_first + per_chunk < end ? chunk_first + per_chunk : end;
    return (imp_plan_rows){
        .prefix_first = span->prefix_first + (first - span->segment_first),
        .n_tokens = last - first,
        .skip = first - chunk_first,
    };
}

imp_region imp_plan_piece_region(const imp_plan_span *span, uint32_t at, uint32_t *chunk)
{
    if (at < span->n_scales) {
        *chunk = 0;
        return IMP_REGION_SCALES;
    }
    at -= span->n_scales;
    bool value = at >= span->n_chunks;
    *chunk = span->first_chunk + (value ? at - span->n_chunks : at);
    return value ? IMP_REGION_V : IMP_REGION_K;
}

static uint32_t span_pieces(const imp_plan_span *s) { return s->n_scales + 2 * s->n_chunks; }

void imp_plan_places(const imp_plan *plan, uint32_t layer, imp_piece *pieces)
{
    for (size_t i = 0; i < plan->n_spans; i++) {
        const imp_plan_span *s = &plan->spans[i];
        for (uint32_t at = 0; at < span_pieces(s); at++) {
            uint32_t chunk;
            imp_region region = imp_plan_piece_region(s, at, &chunk);
            pieces[s->first_piece + at] = (imp_piece){.place = imp_seg_chunk(s->seg->layout, region, layer, chunk)};
        }
    }
}

size_t imp_plan_runs(const imp_plan *plan, imp_piece *pieces, size_t max_bytes, uint32_t first_run,
                     imp_plan_run *runs)
{
    size_t n = 0;
    for (size_t i = 0; i < plan->n_spans; i++) {
        const imp_plan_span *s = &plan->spans[i];
        imp_plan_run *run = NULL; /* the one under way; no run reaches over a span */
        for (uint32_t at = s->first_piece; at < s->first_piece + span_pieces(s); at++) {
            imp_piece *p = &pieces[at];
            if (!p->wanted) continue;
            if (run && run->first_piece + run->n_pieces == at && run->offset + run->n_bytes == p->place.offset &&
                run->n_bytes + p->place.n_bytes <= max_bytes) {
                run->n_pieces++;
                run->n_bytes += p->place.n_bytes;
            } else {
                run = &runs[n++];
                *run = (imp_plan_run){s->seg, p->place.offset, p->place.n_bytes, at, 1};
            }
            p->run = first_run + (uint32_t)(n - 1);
        }
    }
    return n;
}

void imp_plan_layer_bytes(const imp_plan *plan, uint32_t layer, size_t *all, size_t *values)
{
    *all = *values = 0;
    for (size_t i = 0; i < plan->n_spans; i++) {
        const imp_plan_span *s = &plan->spans[i];
        for (uint32_t at = 0; at < span_pieces(s); at++) {
            uint32_t chunk;
            imp_region region = imp_plan_piece_region(s, at, &chunk);
            size_t n = imp_seg_chunk(s->seg->layout, region, layer, chunk).n_bytes;
            *all += n;
            if (region == IMP_REGION_V) *values += n;
        }
    }
}
