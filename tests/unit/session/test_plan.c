/* test_plan.c: which chunks are read, against a naive twin that looks at each token. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/rng.h"
#include "session/plan.h"
#include "support/support.h"

enum { MAX_SPANS = 6, MAX_PIECES = 4096 };

typedef struct world {
    imp_seg segs[MAX_SPANS]; /* their maps are ours */
    imp_span spans[MAX_SPANS];
    size_t n_spans, n_tokens;
    uint32_t n_layers;
} world;

static imp_seg_layout *make_layout(imp_rng *r, uint64_t id, uint32_t n_tokens, uint32_t n_layers)
{
    static const int32_t zeros[4096];
    imp_layer_shape shapes[4];
    for (uint32_t l = 0; l < n_layers; l++)
        shapes[l] = (imp_layer_shape){1 + (uint32_t)imp_rng_below(r, 3), 32, 32 * (1 + (uint32_t)imp_rng_below(r, 3))};
    imp_seg_meta meta = {
        .segment = id, .space = {1, 2}, .before = {1, 2}, .n_tokens = n_tokens, .n_layers = n_layers,
        .type_k = IMP_TYPE_F16, .type_v = IMP_TYPE_F16, .rest = (imp_rest)imp_rng_below(r, 4),
        .order = (imp_order)imp_rng_below(r, 3), .paired = imp_rng_below(r, 2) != 0,
        .chunk_tokens = 16 * (1 + (uint32_t)imp_rng_below(r, 8)), .alignment = imp_rng_below(r, 2) ? 512 : 4096,
        .layers = shapes, .tokens = zeros, .probe_heads = (uint32_t)imp_rng_below(r, 3),
    };
    if (meta.order == IMP_ORDER_CORE) meta.core_tokens = meta.chunk_tokens < n_tokens ? meta.chunk_tokens : n_tokens;
    if (imp_rng_below(r, 2)) {
        meta.sketch_bits = 32;
        meta.basis = 5;
    }
    imp_seg_layout *layout;
    assert_int_equal(imp_seg_layout_new(&meta, &layout), 0);
    return layout;
}

/* Any order of the tokens, another one in each layer. */
static uint32_t *make_maps(imp_rng *r, const imp_seg_layout *layout)
{
    const imp_seg_meta *meta = imp_seg_layout_meta(layout);
    uint32_t n = meta->n_tokens, *maps = malloc(meta->n_layers * n * sizeof *maps);
    if (meta->order == IMP_ORDER_TOKEN) {
        free(maps);
        return NULL;
    }
    for (uint32_t l = 0; l < meta->n_layers; l++) {
        for (uint32_t i = 0; i < n; i++) {
            uint32_t j = (uint32_t)imp_rng_below(r, i + 1);
            maps[l * n + i] = maps[l * n + j];
            maps[l * n + j] = i;
        }
    }
    return maps;
}

/* Some spans: parts of segments, now and then two parts of one, next to each other or not. */
static void make_world(imp_rng *r, world *w)
{
    *w = (world){.n_layers = 1 + (uint32_t)imp_rng_below(r, 4)};
    size_t want = 1 + imp_rng_below(r, MAX_SPANS);
    while (w->n_spans < want) {
        imp_seg *seg = &w->segs[w->n_spans];
        imp_span *s = &w->spans[w->n_spans];
        const imp_span *last = w->n_spans ? s - 1 : NULL;
        uint32_t last_end = last ? last->segment_first + last->n_tokens : 0;
        if (last && last_end + 2 < imp_seg_layout_meta(last->seg->layout)->n_tokens && imp_rng_below(r, 3) == 0) {
            *s = *last;
            uint32_t n_left = imp_seg_layout_meta(last->seg->layout)->n_tokens - last_end;
            uint32_t gap = imp_rng_below(r, 2) ? (uint32_t)imp_rng_below(r, n_left - 1) : 0;
            s->segment_first = last_end + gap;
            s->n_tokens = 1 + (uint32_t)imp_rng_below(r, n_left - gap);
        } else {
            uint32_t n = 2 + (uint32_t)imp_rng_below(r, 700);
            *seg = (imp_seg){.id = 100 + w->n_spans, .layout = make_layout(r, 100 + w->n_spans, n, w->n_layers)};
            seg->maps = make_maps(r, seg->layout);
            *s = (imp_span){.seg = seg, .segment_first = (uint32_t)imp_rng_below(r, n)};
            s->n_tokens = 1 + (uint32_t)imp_rng_below(r, n - s->segment_first);
        }
        s->depth = w->n_tokens;
        w->n_tokens += s->n_tokens;
        w->n_spans++;
    }
}

static void free_world(world *w)
{
    for (size_t i = 0; i < MAX_SPANS; i++) {
        imp_seg_layout_free(w->segs[i].layout);
        free(w->segs[i].maps);
    }
}

/* The segment and the token in it that token `t` of the prefix is. */
static const imp_seg *locate(const world *w, size_t t, uint32_t *token)
{
    size_t i = 0;
    while (t >= w->spans[i].n_tokens) t -= w->spans[i++].n_tokens;
    *token = w->spans[i].segment_first + (uint32_t)t;
    return w->spans[i].seg;
}

static imp_region meta_region(const imp_plan_span *s) { return s->paired ? IMP_REGION_KV : IMP_REGION_K; }

static void test_pieces(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    for (int round = 0; round < 300; round++) {
        world w;
        make_world(&r, &w);
        size_t n = 1 + imp_rng_below(&r, w.n_tokens);
        imp_plan plan;
        assert_int_equal(imp_plan_new(w.spans, w.n_spans, n, &plan), 0);
        assert_int_equal(plan.n_tokens, n);
        assert_true(plan.n_pieces <= MAX_PIECES);

        uint32_t *unit_of = malloc(n * sizeof *unit_of), *tokens_in = calloc(plan.n_units, sizeof *tokens_in);
        uint32_t layer = (uint32_t)imp_rng_below(&r, w.n_layers), *counted = calloc(plan.n_units, sizeof *counted);
        memset(unit_of, 0xff, n * sizeof *unit_of);
        imp_plan_units(&plan, layer, unit_of, tokens_in);

        /* The pieces are those of the file's layer, in its order, and of each region the chunks that may hold rows. */
        size_t n_pieces = 0, n_units = 0;
        bool mapped = false;
        for (size_t i = 0; i < plan.n_spans; i++) {
            const imp_plan_span *s = &plan.spans[i];
            const imp_seg_meta *meta = imp_seg_layout_meta(s->seg->layout);
            mapped |= s->seg->maps != NULL;
            assert_int_equal(s->first_piece, n_pieces);
            assert_int_equal(s->first_unit, n_units);
            assert_int_equal(s->paired, meta->paired);
            assert_int_equal(s->scales != IMP_PLAN_NONE, meta->rest != IMP_REST_RAW);
            assert_int_equal(s->sketch != IMP_PLAN_NONE, meta->sketch_bits != 0);
            assert_int_equal(s->probe != IMP_PLAN_NONE, meta->probe_heads != 0);
            uint64_t offset = 0;
            for (uint32_t p = s->first_piece; p < s->first_piece + s->n_pieces; p++) {
                uint32_t chunk;
                imp_region region = imp_plan_region(s, p, &chunk);
                imp_chunk_place place = imp_seg_chunk(s->seg->layout, region, layer, chunk);
                assert_true(place.n_bytes > 0 && place.offset >= offset);
                offset = place.offset + place.n_bytes;
                if (region == IMP_REGION_SCALES) assert_int_equal(p, s->scales);
                if (region == IMP_REGION_SKETCH) assert_int_equal(p, s->sketch);
                if (region == IMP_REGION_PROBE) assert_int_equal(p, s->probe);
                if (region == IMP_REGION_K || region == IMP_REGION_KV)
                    assert_int_equal(chunk - s->first_chunk, p - s->keys);
                if (region == IMP_REGION_V || region == IMP_REGION_KV)
                    assert_int_equal(chunk - s->first_chunk, p - s->values);
                if (p >= s->keys) assert_int_equal(region == IMP_REGION_KV, meta->paired);
            }
            n_pieces += s->n_pieces;
            n_units += s->n_chunks;
        }
        assert_int_equal(n_pieces, plan.n_pieces);
        assert_int_equal(n_units, plan.n_units);
        assert_int_equal(mapped, plan.mapped);

        /* Each token is where its segment's map says, looked up one by one. */
        for (size_t t = 0; t < n; t++) {
            uint32_t token, slot = 0, first;
            const imp_seg *seg = locate(&w, t, &token);
            const uint32_t *map = imp_seg_map(seg, layer);
            while (map && map[slot] != token) slot++;
            if (!map) slot = token;
            size_t i = 0;
            while (t >= plan.spans[i].prefix_first + plan.spans[i].n_tokens) i++;
            const imp_plan_span *s = &plan.spans[i];
            assert_ptr_equal(s->seg, seg);
            assert_int_equal(imp_plan_token(s, map, slot), t);
            uint32_t c = slot / imp_seg_layout_meta(seg->layout)->chunk_tokens - s->first_chunk;
            assert_true(c < s->n_chunks);
            assert_int_equal(unit_of[t], s->first_unit + c);
            uint32_t end = imp_plan_slots(s, c, &first);
            assert_true(slot >= first && slot < end);
            imp_chunk_place there = imp_seg_chunk(seg->layout, meta_region(s), layer, s->first_chunk + c);
            assert_int_equal(end - first, there.n_tokens);
            counted[unit_of[t]]++;
        }
        for (size_t u = 0; u < plan.n_units; u++) {
            assert_int_equal(tokens_in[u], counted[u]);
            assert_true(mapped || counted[u] > 0); /* no chunk for nothing */
        }
        /* Slots of other tokens than the span's say so. */
        for (size_t i = 0; i < plan.n_spans; i++) {
            const imp_plan_span *s = &plan.spans[i];
            const uint32_t *map = imp_seg_map(s->seg, layer);
            uint32_t n_here = 0;
            for (uint32_t slot = 0; slot < imp_seg_layout_meta(s->seg->layout)->n_tokens; slot++)
                n_here += imp_plan_token(s, map, slot) != IMP_PLAN_NONE;
            assert_int_equal(n_here, s->n_tokens);
        }
        free(unit_of);
        free(tokens_in);
        free(counted);

        /* A chunk is listed once, also where two spans meet in it. */
        for (size_t i = 1; i < plan.n_spans; i++) {
            const imp_plan_span *a = &plan.spans[i - 1], *b = &plan.spans[i];
            assert_false(a->seg == b->seg && a->segment_first + a->n_tokens == b->segment_first);
        }
        imp_plan_clear(&plan);
        free_world(&w);
    }
}

static void test_runs(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed() + 1);
    for (int round = 0; round < 300; round++) {
        world w;
        make_world(&r, &w);
        imp_plan plan;
        assert_int_equal(imp_plan_new(w.spans, w.n_spans, w.n_tokens, &plan), 0);
        imp_piece *pieces = calloc(plan.n_pieces, sizeof *pieces);
        imp_plan_run *runs = calloc(plan.n_pieces, sizeof *runs);
        uint32_t layer = (uint32_t)imp_rng_below(&r, w.n_layers);
        size_t max = imp_rng_below(&r, 4) ? 1 + imp_rng_below(&r, 256 << 10) : SIZE_MAX;
        uint64_t density = 1 + imp_rng_below(&r, 4);
        imp_plan_places(&plan, layer, pieces);

        for (size_t i = 0; i < plan.n_spans; i++) {
            const imp_plan_span *s = &plan.spans[i];
            for (uint32_t p = s->first_piece; p < s->first_piece + s->n_pieces; p++) {
                uint32_t chunk;
                imp_region region = imp_plan_region(s, p, &chunk);
                assert_int_equal(imp_seg_chunk(s->seg->layout, region, layer, chunk).index, pieces[p].place.index);
                assert_false(pieces[p].wanted || pieces[p].asked || pieces[p].checked);
            }
        }

        bool *wanted = calloc(plan.n_pieces, sizeof *wanted);
        for (size_t p = 0; p < plan.n_pieces; p++) pieces[p].wanted = wanted[p] = imp_rng_below(&r, density) == 0;
        size_t n = imp_plan_runs(&plan, pieces, max, 0, 7, runs);

        /* The runs are the wanted pieces in order, cut only where they must be. */
        size_t p = 0;
        const imp_plan_run *before = NULL;
        for (size_t i = 0; i < n; i++) {
            for (; !wanted[p]; p++) {}
            const imp_plan_run *run = &runs[i];
            assert_int_equal(run->first_piece, p);
            assert_true(run->n_pieces > 0);
            assert_true(run->n_bytes <= max || run->n_pieces == 1);
            size_t bytes = 0;
            for (uint32_t j = 0; j < run->n_pieces; j++, p++) {
                assert_true(wanted[p]);
                assert_int_equal(pieces[p].run, 7 + i);
                assert_int_equal(pieces[p].place.offset, run->offset + bytes);
                bytes += pieces[p].place.n_bytes;
            }
            assert_int_equal(bytes, run->n_bytes);
            if (before && before->seg == run->seg && before->first_piece + before->n_pieces == run->first_piece &&
                before->offset + before->n_bytes == run->offset) {
                bool same_span = false;
                for (size_t s = 0; s < plan.n_spans; s++) {
                    uint32_t first = plan.spans[s].first_piece;
                    uint32_t end = s + 1 < plan.n_spans ? plan.spans[s + 1].first_piece : (uint32_t)plan.n_pieces;
                    same_span |= before->first_piece >= first && run->first_piece < end && before->first_piece < end &&
                                 run->first_piece >= first;
                }
                if (same_span) assert_true(before->n_bytes + pieces[run->first_piece].place.n_bytes > max);
            }
            before = run;
        }
        for (; p < plan.n_pieces; p++) assert_false(wanted[p]);
        for (p = 0; p < plan.n_pieces; p++) assert_false(pieces[p].wanted); /* no longer */
        assert_int_equal(imp_plan_runs(&plan, pieces, max, 0, 7, runs), 0);
        free(wanted);
        free(pieces);
        free(runs);
        imp_plan_clear(&plan);
        free_world(&w);
    }
}

/* Gaps, against a twin that decides pair by pair which wanted neighbours share a read. */
static void test_gaps(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed() + 2);
    size_t n_spare = 0;
    for (int round = 0; round < 300; round++) {
        world w;
        make_world(&r, &w);
        imp_plan plan;
        assert_int_equal(imp_plan_new(w.spans, w.n_spans, w.n_tokens, &plan), 0);
        imp_piece *pieces = calloc(plan.n_pieces, sizeof *pieces);
        imp_plan_run *runs = calloc(plan.n_pieces, sizeof *runs);
        bool *wanted = calloc(plan.n_pieces, sizeof *wanted), *taken = calloc(plan.n_pieces, sizeof *taken);
        size_t max = imp_rng_below(&r, 4) ? 1 + imp_rng_below(&r, 256 << 10) : SIZE_MAX / 2;
        size_t max_gap = imp_rng_below(&r, 64 << 10);
        imp_plan_places(&plan, (uint32_t)imp_rng_below(&r, w.n_layers), pieces);
        for (size_t p = 0; p < plan.n_pieces; p++) {
            uint64_t what = imp_rng_below(&r, 6);
            pieces[p].wanted = wanted[p] = what < 2;
            pieces[p].asked = what < 3; /* 2: it is somewhere else already */
            taken[p] = pieces[p].asked;
            if (what == 3 && imp_rng_below(&r, 2)) {
                pieces[p].spare = 1;
                taken[p] = true;
            }
        }
        size_t n = imp_plan_runs(&plan, pieces, max, max_gap, 7, runs), at = 0;
        assert_true(n <= plan.n_pieces);
        for (size_t i = 0; i < plan.n_spans; i++) {
            const imp_plan_span *s = &plan.spans[i];
            size_t last = SIZE_MAX; /* the wanted piece before */
            for (size_t p = s->first_piece; p < s->first_piece + s->n_pieces; p++) {
                if (!wanted[p]) continue;
                bool joined = last != SIZE_MAX;
                size_t gap = 0;
                for (size_t g = last + 1; joined && g < p; g++) {
                    joined = g >= s->keys && !taken[g] &&
                             pieces[g].place.offset == pieces[g - 1].place.offset + pieces[g - 1].place.n_bytes;
                    gap += pieces[g].place.n_bytes;
                }
                joined = joined && gap <= max_gap &&
                         pieces[p].place.offset == pieces[p - 1].place.offset + pieces[p - 1].place.n_bytes;
                joined = joined &&
                         pieces[p].place.offset + pieces[p].place.n_bytes - runs[at - 1].offset <= max;
                if (!joined) {
                    assert_true(at < n);
                    assert_int_equal(runs[at].first_piece, p);
                    assert_int_equal(runs[at].offset, pieces[p].place.offset);
                    assert_ptr_equal(runs[at].seg, s->seg);
                    at++;
                }
                for (size_t g = last + 1; joined && g < p; g++, n_spare++) {
                    assert_int_equal(pieces[g].spare, 7 + at - 1);
                    assert_int_equal(pieces[g].run, IMP_PLAN_NONE);
                }
                const imp_plan_run *run = &runs[at - 1];
                assert_int_equal(pieces[p].run, 7 + at - 1);
                assert_false(pieces[p].wanted);
                /* A run ends with a wanted piece: what follows may only make it longer. */
                assert_true(run->first_piece + run->n_pieces > p);
                assert_true(run->offset + run->n_bytes >= pieces[p].place.offset + pieces[p].place.n_bytes);
                last = p;
            }
        }
        assert_int_equal(at, n);
        for (size_t i = 0; i < n; i++) {
            const imp_plan_run *run = &runs[i];
            size_t end = run->first_piece + run->n_pieces - 1;
            assert_true(wanted[end]);
            assert_int_equal(run->offset + run->n_bytes, pieces[end].place.offset + pieces[end].place.n_bytes);
        }
        free(taken);
        free(wanted);
        free(pieces);
        free(runs);
        imp_plan_clear(&plan);
        free_world(&w);
    }
    assert_true(n_spare > 0);
}

static void test_no_memory(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, 1);
    world w;
    make_world(&r, &w);
    imp_plan plan;
    imp_alloc_fail_at(1, 0);
    assert_int_equal(imp_plan_new(w.spans, w.n_spans, w.n_tokens, &plan), IMP_E_NOMEM);
    imp_alloc_fail_at(0, 0);
    imp_plan_clear(&plan);
    free_world(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_runs), cmocka_unit_test(test_gaps),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
