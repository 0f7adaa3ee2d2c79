#include "session/plan.h"

#include "base/alloc.h"
#include "base/status.h"

/* Where the pieces of a span are, the first of them being `piece`. */
static void list_pieces(imp_plan_span *s, uint32_t piece, uint32_t unit)
{
    const imp_seg_layout *layout = s->seg->layout;
    const imp_seg_meta *meta = imp_seg_layout_meta(layout);
    uint32_t per_chunk = meta->chunk_tokens;
    uint32_t first = s->seg->maps ? 0 : s->segment_first / per_chunk;
    uint32_t last = ((s->seg->maps ? meta->n_tokens : s->segment_first + s->n_tokens) - 1) / per_chunk;
    s->first_piece = piece;
    s->first_unit = unit;
    s->first_chunk = first;
    s->n_chunks = last - first + 1;
    s->paired = meta->paired;
    s->scales = imp_seg_region_chunks(layout, IMP_REGION_SCALES) ? piece++ : IMP_PLAN_NONE;
    s->sketch = imp_seg_region_chunks(layout, IMP_REGION_SKETCH) ? piece++ : IMP_PLAN_NONE;
    s->probe = imp_seg_region_chunks(layout, IMP_REGION_PROBE) ? piece++ : IMP_PLAN_NONE;
    s->keys = s->values = piece;
    piece += s->n_chunks;
    if (!s->paired) {
        s->values = piece;
        piece += s->n_chunks;
    }
    s->n_pieces = piece - s->first_piece;
}

int imp_plan_new(const imp_span *spans, size_t n_spans, size_t n_tokens, imp_plan *out)
{
    *out = (imp_plan){0};
    imp_plan_span *list = imp_calloc(n_spans, sizeof *list);
    if (!list) return imp_fail(IMP_E_NOMEM, "no memory for a plan of %zu spans", n_spans);

    size_t n = 0, done = 0;
    for (size_t i = 0; i < n_spans && done < n_tokens; i++) {
        const imp_span *s = &spans[i];
        uint32_t take = s->n_tokens < n_tokens - done ? s->n_tokens : (uint32_t)(n_tokens - done);
        /* A node that was split off goes on where its parent ends in the same segment: one span for us, so that the
         * chunk they share is read once. */
        imp_plan_span *last = n ? &list[n - 1] : NULL;
        if (last && last->seg == s->seg && last->segment_first + last->n_tokens == s->segment_first) {
            last->n_tokens += take;
        } else {
            list[n++] = (imp_plan_span){.seg = s->seg, .prefix_first = (uint32_t)done,
                                        .segment_first = s->segment_first, .n_tokens = take};
        }
        done += take;
    }

    *out = (imp_plan){.spans = list, .n_spans = n, .n_tokens = done};
    for (size_t i = 0; i < n; i++) {
        list_pieces(&list[i], (uint32_t)out->n_pieces, (uint32_t)out->n_units);
        out->n_pieces += list[i].n_pieces;
        out->n_units += list[i].n_chunks;
        out->mapped |= list[i].seg->maps != NULL;
    }
    return 0;
}

void imp_plan_clear(imp_plan *plan)
{
    imp_free(plan->spans);
    *plan = (imp_plan){0};
}

uint32_t imp_plan_slots(const imp_plan_span *span, uint32_t i, uint32_t *first)
{
    const imp_seg_meta *meta = imp_seg_layout_meta(span->seg->layout);
    *first = (span->first_chunk + i) * meta->chunk_tokens;
    return meta->n_tokens - *first < meta->chunk_tokens ? meta->n_tokens : *first + meta->chunk_tokens;
}

void imp_plan_units(const imp_plan *plan, uint32_t layer, uint32_t *unit_of, uint32_t *tokens_in)
{
    for (size_t i = 0; i < plan->n_spans; i++) {
        const imp_plan_span *span = &plan->spans[i];
        const uint32_t *map = imp_seg_map(span->seg, layer);
        for (uint32_t c = 0; c < span->n_chunks; c++) {
            uint32_t slot, end = imp_plan_slots(span, c, &slot), n = 0;
            for (; slot < end; slot++) {
                uint32_t t = imp_plan_token(span, map, slot);
                if (t == IMP_PLAN_NONE) continue;
                unit_of[t] = span->first_unit + c;
                n++;
            }
            tokens_in[span->first_unit + c] = n;
        }
    }
}

imp_region imp_plan_region(const imp_plan_span *span, uint32_t piece, uint32_t *chunk)
{
    *chunk = 0;
    if (piece == span->scales) return IMP_REGION_SCALES;
    if (piece == span->sketch) return IMP_REGION_SKETCH;
    if (piece == span->probe) return IMP_REGION_PROBE;
    bool value = !span->paired && piece >= span->values;
    *chunk = span->first_chunk + piece - (value ? span->values : span->keys);
    return span->paired ? IMP_REGION_KV : value ? IMP_REGION_V : IMP_REGION_K;
}

void imp_plan_places(const imp_plan *plan, uint32_t layer, imp_piece *pieces)
{
    for (size_t i = 0; i < plan->n_spans; i++) {
        const imp_plan_span *s = &plan->spans[i];
        for (uint32_t p = s->first_piece; p < s->first_piece + s->n_pieces; p++) {
            uint32_t chunk;
            imp_region region = imp_plan_region(s, p, &chunk);
            imp_chunk_place place = imp_seg_chunk(s->seg->layout, region, layer, chunk);
            pieces[p] = (imp_piece){.place = place, .run = IMP_PLAN_NONE, .spare = IMP_PLAN_NONE};
        }
    }
}

/* Bytes from the end of `run` to piece `at`, if they may be read along; SIZE_MAX: they may not. */
static size_t gap_before(const imp_plan_span *s, const imp_piece *pieces, const imp_plan_run *run, uint32_t at)
{
    uint64_t end = run->offset + run->n_bytes;
    for (uint32_t i = run->first_piece + run->n_pieces; i < at; i++) {
        const imp_piece *p = &pieces[i];
        if (i < s->keys || p->asked || p->spare != IMP_PLAN_NONE || p->place.offset != end) return SIZE_MAX;
        end += p->place.n_bytes;
    }
    return pieces[at].place.offset == end ? (size_t)(end - run->offset - run->n_bytes) : SIZE_MAX;
}

size_t imp_plan_runs(const imp_plan *plan, imp_piece *pieces, size_t max_bytes, size_t max_gap, uint32_t first_run,
                     imp_plan_run *runs)
{
    size_t n = 0;
    for (size_t i = 0; i < plan->n_spans; i++) {
        const imp_plan_span *s = &plan->spans[i];
        imp_plan_run *run = NULL; /* the one under way; no run reaches over a span */
        for (uint32_t at = s->first_piece; at < s->first_piece + s->n_pieces; at++) {
            imp_piece *p = &pieces[at];
            if (!p->wanted) continue;
            size_t gap = run ? gap_before(s, pieces, run, at) : SIZE_MAX;
            if (gap <= max_gap && run->n_bytes + gap + p->place.n_bytes <= max_bytes) {
                for (uint32_t g = run->first_piece + run->n_pieces; g < at; g++)
                    pieces[g].spare = first_run + (uint32_t)(n - 1);
                run->n_pieces = at + 1 - run->first_piece;
                run->n_bytes += gap + p->place.n_bytes;
            } else {
                run = &runs[n++];
                *run = (imp_plan_run){s->seg, p->place.offset, p->place.n_bytes, at, 1};
            }
            p->run = first_run + (uint32_t)(n - 1);
            p->wanted = false;
        }
    }
    return n;
}
