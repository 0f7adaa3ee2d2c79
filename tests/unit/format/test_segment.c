/* test_segment.c: layout, header codec and checksums of segments, over random metas. */
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
#include "base/bytes.h"
#include "base/hash.h"
#include "base/rng.h"
#include "format/rows.h"
#include "format/segment.h"
#include "support/support.h"

enum { MAX_LAYERS = 6, MAX_TOKENS = 700 };

/* A meta and the memory it points to. */
typedef struct sample {
    imp_seg_meta meta;
    imp_layer_shape layers[MAX_LAYERS];
    int32_t tokens[MAX_TOKENS];
} sample;

/* All that a segment may have beyond keys and values in token order; `which` has a bit for each. */
static void add_extras(sample *s, imp_rng *r, unsigned which)
{
    imp_seg_meta *m = &s->meta;
    m->paired = which & 1;
    if (which & 2) m->probe_heads = 1 + (uint32_t)imp_rng_below(r, 4);
    if (which & 4) {
        m->sketch_bits = 8 * (1 + (uint32_t)imp_rng_below(r, 16));
        m->basis = imp_rng_u64(r) | 1;
    }
    if (which & 8) m->order = IMP_ORDER_IMPORTANCE;
    if (which & 16) {
        m->order = IMP_ORDER_CORE;
        m->core_tokens = m->chunk_tokens * (1 + (uint32_t)imp_rng_below(r, m->n_tokens / m->chunk_tokens + 1));
        if (m->core_tokens > m->n_tokens) m->core_tokens = m->n_tokens;
    }
}

static void make_sample(sample *s, imp_rng *r, uint32_t max_layers, uint32_t max_tokens)
{
    static const imp_type floats[] = {IMP_TYPE_F32, IMP_TYPE_F16, IMP_TYPE_BF16};
    memset(s, 0, sizeof *s);
    imp_seg_meta *m = &s->meta;
    m->segment = imp_rng_u64(r) | 1;
    m->space = (imp_hash128){imp_rng_u64(r), imp_rng_u64(r)};
    m->before = m->space;
    if (imp_rng_below(r, 2)) {
        m->first_token = 1 + imp_rng_below(r, 1000000);
        m->before = (imp_hash128){imp_rng_u64(r), imp_rng_u64(r)};
    }
    m->n_tokens = 1 + (uint32_t)imp_rng_below(r, max_tokens);
    m->n_layers = 1 + (uint32_t)imp_rng_below(r, max_layers);
    m->rest = imp_rng_below(r, 2) ? (imp_rest)imp_rng_below(r, 4) : IMP_REST_RAW;
    bool blocks = m->rest == IMP_REST_RAW && imp_rng_below(r, 4) == 0;
    m->type_k = blocks ? IMP_TYPE_Q8_0 : floats[imp_rng_below(r, 3)];
    m->type_v = blocks ? IMP_TYPE_Q8_0 : floats[imp_rng_below(r, 3)];
    m->order = IMP_ORDER_TOKEN;
    m->chunk_tokens = 16 * (1 + (uint32_t)imp_rng_below(r, 16));
    m->alignment = imp_rng_below(r, 2) ? 512 : 4096;
    m->derived = imp_rng_below(r, 2);
    m->created_s = (int64_t)imp_rng_u64(r);
    snprintf(m->model_name, sizeof m->model_name, "model %u", (unsigned)imp_rng_below(r, 1000));
    if (m->derived) snprintf(m->how, sizeof m->how, "retention 0.25");
    for (uint32_t i = 0; i < m->n_layers; i++) {
        uint32_t step = blocks ? 32 : 1 + (uint32_t)imp_rng_below(r, 3);
        s->layers[i] = (imp_layer_shape){
            .n_kv_heads = 1 + (uint32_t)imp_rng_below(r, 4),
            .head_dim_k = step * (1 + (uint32_t)imp_rng_below(r, 8)),
            .head_dim_v = step * (1 + (uint32_t)imp_rng_below(r, 8)),
        };
    }
    for (uint32_t i = 0; i < m->n_tokens; i++) s->tokens[i] = (int32_t)imp_rng_u64(r);
    m->layers = s->layers;
    m->tokens = s->tokens;
    if (imp_rng_below(r, 2)) add_extras(s, r, (unsigned)imp_rng_below(r, 32));
}

/* One with nothing but keys and values in token order. */
static void make_plain(sample *s, imp_rng *r, uint32_t max_layers, uint32_t max_tokens)
{
    make_sample(s, r, max_layers, max_tokens);
    imp_seg_meta *m = &s->meta;
    m->paired = false;
    m->order = IMP_ORDER_TOKEN;
    m->core_tokens = m->probe_heads = m->sketch_bits = 0;
    m->basis = 0;
}

static imp_seg_layout *layout_of(const imp_seg_meta *m)
{
    imp_seg_layout *l = NULL;
    int rc = imp_seg_layout_new(m, &l);
    if (rc < 0) fail_msg("%s", imp_last_error());
    return l;
}

/* The header with random sums; both to free. */
static unsigned char *header_of(const imp_seg_layout *l, imp_rng *r, uint64_t **sums)
{
    size_t n = imp_seg_sums_length(l);
    *sums = imp_malloc(imp_seg_sums_length(l) * sizeof **sums);
    unsigned char *h = imp_malloc((size_t)imp_seg_header_bytes(l));
    assert_non_null(*sums);
    assert_non_null(h);
    for (size_t i = 0; i < n; i++) (*sums)[i] = imp_rng_u64(r);
    imp_seg_header_encode(l, *sums, h);
    return h;
}

/* Make the two checksums right again after a change. */
static void reseal(unsigned char *h, uint64_t header_bytes)
{
    imp_put64(h + IMP_SEG_FIXED_BYTES - 8, imp_hash64(h, IMP_SEG_FIXED_BYTES - 8, 0));
    imp_put64(h + header_bytes - 8, imp_hash64(h, (size_t)header_bytes - 8, 0));
}

/* Decode must refuse; with what code is the caller's to say. Exactly as much memory as bytes, for the sanitizer. */
static int refused(const unsigned char *h, size_t n)
{
    imp_seg_layout *l = NULL;
    uint64_t *sums = NULL;
    unsigned char *exact = malloc(n ? n : 1);
    memcpy(exact, h, n);
    int rc = imp_seg_header_decode(exact, n, &l, &sums);
    free(exact);
    if (rc == 0) fail_msg("a damaged header was read");
    assert_null(l);
    assert_null(sums);
    return rc;
}

static void check_equal(const imp_seg_meta *a, const imp_seg_meta *b)
{
    assert_int_equal(a->segment, b->segment);
    assert_true(imp_hash128_equal(a->space, b->space));
    assert_true(imp_hash128_equal(a->before, b->before));
    assert_int_equal(a->first_token, b->first_token);
    assert_int_equal(a->n_tokens, b->n_tokens);
    assert_int_equal(a->n_layers, b->n_layers);
    assert_int_equal(a->type_k, b->type_k);
    assert_int_equal(a->type_v, b->type_v);
    assert_int_equal(a->rest, b->rest);
    assert_int_equal(a->order, b->order);
    assert_int_equal(a->chunk_tokens, b->chunk_tokens);
    assert_int_equal(a->alignment, b->alignment);
    assert_int_equal(a->derived, b->derived);
    assert_int_equal(a->created_s, b->created_s);
    assert_memory_equal(a->model_name, b->model_name, sizeof a->model_name);
    assert_memory_equal(a->how, b->how, sizeof a->how);
    assert_memory_equal(a->layers, b->layers, a->n_layers * sizeof *a->layers);
    assert_memory_equal(a->tokens, b->tokens, a->n_tokens * sizeof *a->tokens);
    assert_int_equal(a->paired, b->paired);
    assert_int_equal(a->core_tokens, b->core_tokens);
    assert_int_equal(a->probe_heads, b->probe_heads);
    assert_int_equal(a->sketch_bits, b->sketch_bits);
    assert_true(a->basis == b->basis);
}

/* Bytes of one token's row, computed the slow way; 0 where a region isn't there at all or has no rows. */
static uint64_t naive_row_bytes(const imp_seg_meta *m, imp_region region, uint32_t layer)
{
    const imp_layer_shape *s = &m->layers[layer];
    uint64_t n_k = (uint64_t)s->n_kv_heads * s->head_dim_k, n_v = (uint64_t)s->n_kv_heads * s->head_dim_v;
    uint64_t n_blocks = n_v / 32 + (n_v % 32 ? 1 : 0);
    switch (region) {
    case IMP_REGION_K:
        if (m->rest == IMP_REST_RAW) return imp_type_bytes(m->type_k, (size_t)n_k);
        return m->rest == IMP_REST_Q4 ? n_k / 2 + n_k % 2 : n_k;
    case IMP_REGION_V:
        if (m->rest == IMP_REST_RAW) return imp_type_bytes(m->type_v, (size_t)n_v);
        return m->rest == IMP_REST_Q8 ? n_v + 2 * n_blocks : n_v / 2 + n_v % 2 + 4 * n_blocks;
    case IMP_REGION_PROBE: {
        uint64_t n_heads = m->probe_heads < s->n_kv_heads ? m->probe_heads : s->n_kv_heads;
        return n_heads * s->head_dim_k / 32 * imp_type_bytes(m->type_k, 32) +
               (n_heads * s->head_dim_k % 32) * (m->type_k == IMP_TYPE_F32 ? 4 : 2);
    }
    case IMP_REGION_SKETCH: return (uint64_t)s->n_kv_heads * m->sketch_bits / 8;
    default: return 0;
    }
}

/* Chunks of a region in a layer, and the bytes of one that has these slots. */
static uint32_t naive_chunks(const imp_seg_meta *m, imp_region region)
{
    uint32_t n = m->n_tokens / m->chunk_tokens + (m->n_tokens % m->chunk_tokens ? 1 : 0);
    switch (region) {
    case IMP_REGION_K:
    case IMP_REGION_V: return m->paired ? 0 : n;
    case IMP_REGION_KV: return m->paired ? n : 0;
    case IMP_REGION_SCALES: return m->rest != IMP_REST_RAW;
    case IMP_REGION_PROBE: return m->probe_heads > 0;
    case IMP_REGION_SKETCH: return m->basis != 0;
    case IMP_REGION_MAP: return m->order != IMP_ORDER_TOKEN;
    }
    return 0;
}

static uint64_t naive_data_bytes(const imp_seg_meta *m, imp_region region, uint32_t layer, uint32_t n_slots)
{
    uint64_t n_k = (uint64_t)m->layers[layer].n_kv_heads * m->layers[layer].head_dim_k;
    uint64_t n_groups = m->n_tokens / 64 + (m->n_tokens % 64 ? 1 : 0);
    switch (region) {
    case IMP_REGION_KV:
        return n_slots * (naive_row_bytes(m, IMP_REGION_K, layer) + naive_row_bytes(m, IMP_REGION_V, layer));
    case IMP_REGION_SCALES: return n_groups * n_k * (m->rest == IMP_REST_Q4 ? 4 : 2);
    case IMP_REGION_MAP: return n_slots * (m->n_tokens > 65536 ? 4u : 2u);
    default: return n_slots * naive_row_bytes(m, region, layer);
    }
}

/* The chunks of one region of a layer, which begin at *at and with entry *index. */
static void check_region(const imp_seg_layout *l, imp_region region, uint32_t layer, uint64_t *at, uint32_t *index)
{
    const imp_seg_meta *m = imp_seg_layout_meta(l);
    bool slots = region == IMP_REGION_K || region == IMP_REGION_V || region == IMP_REGION_KV;
    bool rows = region == IMP_REGION_K || region == IMP_REGION_V || region == IMP_REGION_PROBE ||
                region == IMP_REGION_SKETCH;
    uint32_t n = imp_seg_region_chunks(l, region), token = 0;
    assert_int_equal(n, naive_chunks(m, region));
    assert_int_equal(imp_seg_row_bytes(l, region, layer), rows ? naive_row_bytes(m, region, layer) : 0);
    for (uint32_t chunk = 0; chunk < n; chunk++, ++*index) {
        imp_chunk_place p = imp_seg_chunk(l, region, layer, chunk);
        uint32_t left = m->n_tokens - token, n_slots = slots && left > m->chunk_tokens ? m->chunk_tokens : left;
        assert_int_equal(p.offset, *at);
        assert_int_equal(p.index, *index);
        assert_int_equal(p.n_bytes % m->alignment, 0);
        assert_true(p.data_bytes <= p.n_bytes && p.n_bytes - p.data_bytes < m->alignment);
        assert_int_equal(p.first_token, token);
        assert_int_equal(p.n_tokens, n_slots);
        assert_int_equal(p.data_bytes, naive_data_bytes(m, region, layer, n_slots));
        token += p.n_tokens;
        *at += p.n_bytes;

        if (region == IMP_REGION_K || region == IMP_REGION_KV) { /* what values begin behind, if anything */
            uint64_t values = m->paired ? n_slots * naive_row_bytes(m, IMP_REGION_K, layer) : 0;
            assert_int_equal(imp_seg_rows_at(l, IMP_REGION_K, layer, chunk), 0);
            assert_int_equal(imp_seg_rows_at(l, IMP_REGION_V, layer, chunk), values);
            if (m->paired) assert_int_equal(values + n_slots * naive_row_bytes(m, IMP_REGION_V, layer), p.data_bytes);
        }
        imp_region region2;
        uint32_t layer2, chunk2;
        imp_chunk_place q = imp_seg_chunk_at(l, *index, &region2, &layer2, &chunk2);
        assert_true(q.offset == p.offset && q.n_bytes == p.n_bytes && q.data_bytes == p.data_bytes);
        assert_true(q.first_token == p.first_token && q.n_tokens == p.n_tokens && q.index == *index);
        assert_true(region2 == region && layer2 == layer && chunk2 == chunk);
    }
    if (n > 0) assert_int_equal(token, m->n_tokens);
    assert_int_equal(imp_seg_chunk(l, region, layer, n).n_bytes, 0);
}

/* The chunks tile the file behind the header, in the order of the table, and each region's tokens are covered once. */
static void check_places(const imp_seg_layout *l)
{
    static const imp_region regions[] = {IMP_REGION_SCALES, IMP_REGION_SKETCH, IMP_REGION_PROBE,
                                         IMP_REGION_K,      IMP_REGION_V,      IMP_REGION_KV};
    const imp_seg_meta *m = imp_seg_layout_meta(l);
    uint64_t at = imp_seg_header_bytes(l), start = at, n_bytes = 1;
    uint32_t index = 0;
    assert_int_equal(at % m->alignment, 0);
    for (uint32_t layer = 0; layer < m->n_layers; layer++) check_region(l, IMP_REGION_MAP, layer, &at, &index);
    assert_int_equal(imp_seg_maps_at(l, &n_bytes), start);
    assert_int_equal(n_bytes, at - start);
    for (uint32_t layer = 0; layer < m->n_layers; layer++) {
        start = at;
        for (size_t i = 0; i < 6; i++) check_region(l, regions[i], layer, &at, &index);
        assert_int_equal(imp_seg_layer_at(l, layer, &n_bytes), start);
        assert_int_equal(n_bytes, at - start);
    }
    assert_int_equal(index, imp_seg_n_chunks(l));
    assert_int_equal(at, imp_seg_file_bytes(l));
    assert_int_equal(imp_seg_layer_at(l, m->n_layers, &n_bytes), at);
    assert_int_equal(n_bytes, 0);
    for (int region = -1; region <= IMP_REGION_MAP + 1; region += IMP_REGION_MAP + 2) {
        assert_int_equal(imp_seg_region_chunks(l, (imp_region)region), 0);
        assert_int_equal(imp_seg_chunk(l, (imp_region)region, 0, 0).n_bytes, 0);
        assert_int_equal(imp_seg_row_bytes(l, (imp_region)region, 0), 0);
    }
    for (int region = 0; region <= IMP_REGION_MAP; region++) {
        assert_int_equal(imp_seg_chunk(l, (imp_region)region, m->n_layers, 0).n_bytes, 0);
        assert_int_equal(imp_seg_row_bytes(l, (imp_region)region, m->n_layers), 0);
    }
    assert_int_equal(imp_seg_rows_at(l, IMP_REGION_V, m->n_layers, 0), 0);
    imp_region region;
    uint32_t layer, chunk;
    assert_int_equal(imp_seg_chunk_at(l, index, &region, &layer, &chunk).n_bytes, 0);
}

static void test_round_trip(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    for (int round = 0; round < 400; round++) {
        sample s;
        make_sample(&s, &r, MAX_LAYERS, MAX_TOKENS);
        imp_seg_layout *l = layout_of(&s.meta), *l2 = NULL;
        uint64_t *sums, *sums2 = NULL, header_bytes = 0;
        unsigned char *h = header_of(l, &r, &sums);
        check_places(l);
        check_equal(imp_seg_layout_meta(l), &s.meta);

        assert_int_equal(imp_seg_header_peek(h, IMP_SEG_FIXED_BYTES, &header_bytes), 0);
        assert_int_equal(header_bytes, imp_seg_header_bytes(l));
        if (imp_seg_header_decode(h, (size_t)header_bytes, &l2, &sums2) != 0) fail_msg("%s", imp_last_error());
        check_equal(imp_seg_layout_meta(l2), &s.meta);
        check_places(l2);
        assert_int_equal(imp_seg_file_bytes(l2), imp_seg_file_bytes(l));
        assert_memory_equal(sums, sums2, imp_seg_n_chunks(l) * sizeof *sums);

        /* One header for one meta. */
        unsigned char *again = imp_malloc((size_t)header_bytes);
        imp_seg_header_encode(l2, sums2, again);
        assert_memory_equal(h, again, (size_t)header_bytes);

        imp_free(again);
        imp_free(sums2);
        imp_free(sums);
        imp_free(h);
        imp_seg_layout_free(l2);
        imp_seg_layout_free(l);
    }
}

static void test_flips_and_cuts(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    for (int round = 0; round < 3; round++) {
        sample s;
        make_sample(&s, &r, 2, 100);
        imp_seg_layout *l = layout_of(&s.meta);
        uint64_t *sums;
        unsigned char *h = header_of(l, &r, &sums);
        size_t n = (size_t)imp_seg_header_bytes(l);
        for (size_t i = 0; i < n; i++) {
            unsigned char flip = (unsigned char)(1 + imp_rng_below(&r, 255));
            h[i] ^= flip;
            /* CORRUPT, never VERSION: damage isn't taken for a newer format. */
            assert_int_equal(refused(h, n), IMP_E_CORRUPT);
            h[i] ^= flip;
        }
        for (size_t i = 0; i < n; i++) assert_int_equal(refused(h, i), IMP_E_CORRUPT);
        imp_free(sums);
        imp_free(h);
        imp_seg_layout_free(l);
    }
}

/* One bit at a time: of a header as the first version wrote it, and of one with everything. */
static void test_bits(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    for (int full = 0; full < 2; full++) {
        sample s;
        do {
            make_plain(&s, &r, 2, 60);
        } while (s.meta.n_tokens < 20);
        s.meta.alignment = 512;
        if (full) {
            s.meta.chunk_tokens = 16;
            add_extras(&s, &r, 1 | 2 | 4 | 16);
        }
        imp_seg_layout *l = layout_of(&s.meta);
        uint64_t *sums;
        unsigned char *h = header_of(l, &r, &sums);
        size_t n = (size_t)imp_seg_header_bytes(l);
        assert_int_equal(imp_get32(h + 12), full ? 1 | 2 | 4 | 8 : 0);
        if (!full) {
            for (size_t i = 400; i < 504; i++) assert_int_equal(h[i], 0); /* as ever */
        }
        for (size_t i = 0; i < 8 * n; i++) {
            h[i / 8] ^= (unsigned char)(1 << i % 8);
            assert_int_equal(refused(h, n), IMP_E_CORRUPT);
            h[i / 8] ^= (unsigned char)(1 << i % 8);
        }
        imp_free(sums);
        imp_free(h);
        imp_seg_layout_free(l);
    }
}

/* Bytes changed on purpose, with checksums that fit: nothing may get past that a layout wouldn't give. */
static void test_resealed(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    uint64_t n_read = 0;
    for (int round = 0; round < 20000; round++) {
        static sample s;
        static unsigned char *h, *changed;
        static imp_seg_layout *l;
        static uint64_t *sums;
        static size_t n;
        if (round % 1000 == 0) {
            make_sample(&s, &r, 3, 60);
            l = layout_of(&s.meta);
            h = header_of(l, &r, &sums);
            n = (size_t)imp_seg_header_bytes(l);
            changed = imp_malloc(n);
        }
        memcpy(changed, h, n);
        size_t n_changes = 1 + (size_t)imp_rng_below(&r, 3);
        for (size_t i = 0; i < n_changes; i++) {
            /* Mostly numbers of the fixed header, and mostly values on the edge. */
            static const uint32_t edges[] = {0, 1, 15, 16, 512, 1024, 1025, 0x7fffffff, 0x80000000, 0xffffffff};
            size_t at = imp_rng_below(&r, 8) ? 4 * (size_t)imp_rng_below(&r, 128) : 4 * (size_t)imp_rng_below(&r, n / 4);
            imp_put32(changed + at, imp_rng_below(&r, 2) ? edges[imp_rng_below(&r, 10)] : (uint32_t)imp_rng_u64(&r));
        }
        reseal(changed, n);

        unsigned char *exact = malloc(n);
        memcpy(exact, changed, n);
        imp_seg_layout *l2 = NULL;
        uint64_t *sums2 = NULL;
        int rc = imp_seg_header_decode(exact, n, &l2, &sums2);
        if (rc == 0) {
            n_read++;
            unsigned char *again = imp_malloc((size_t)imp_seg_header_bytes(l2));
            imp_seg_header_encode(l2, sums2, again);
            assert_int_equal(imp_seg_header_bytes(l2), n);
            assert_memory_equal(again, changed, n);
            imp_free(again);
        } else {
            assert_true(rc == IMP_E_CORRUPT || rc == IMP_E_VERSION || rc == IMP_E_UNSUPPORTED);
        }
        imp_free(sums2);
        imp_seg_layout_free(l2);
        free(exact);
        if (round % 1000 == 999) {
            imp_free(changed);
            imp_free(sums);
            imp_free(h);
            imp_seg_layout_free(l);
        }
    }
    assert_true(n_read > 0); /* ids, tokens and sums may be anything */
}

static void test_later_formats(void **state)
{
    (void)state;
    static const struct {
        size_t at;
        uint32_t value;
        int rc;
    } cases[] = {
        {8, 2, IMP_E_VERSION},         /* version */
        {8, 0xffffffff, IMP_E_VERSION},
        {8, 0, IMP_E_VERSION},
        {12, 32, IMP_E_VERSION},       /* features */
        {12, 16, IMP_E_CORRUPT},       /* sealed, and nothing else of it is */
        {12, 0x8000000f, IMP_E_VERSION},
        {12, 1, IMP_E_CORRUPT},        /* paired chunks, of which the rest knows nothing */
        {12, 8, IMP_E_CORRUPT},
        {88, 4, IMP_E_UNSUPPORTED},    /* type of keys */
        {92, 77, IMP_E_UNSUPPORTED},   /* type of values */
        {96, 4, IMP_E_UNSUPPORTED},    /* encoding */
        {96, 2, IMP_E_CORRUPT},
        {100, 3, IMP_E_UNSUPPORTED},   /* order */
        {100, 1, IMP_E_CORRUPT},
        {120, 2, IMP_E_UNSUPPORTED},   /* flags */
        {140, 5, IMP_E_CORRUPT},       /* regions that don't follow from the rest */
        {272, 3, IMP_E_CORRUPT},
        {400, 16, IMP_E_CORRUPT},      /* a core, probe heads, sketches, a basis, the reserved bytes */
        {404, 1, IMP_E_CORRUPT},
        {408, 8, IMP_E_CORRUPT},
        {412, 1, IMP_E_CORRUPT},
        {416, 1, IMP_E_CORRUPT},
        {424, 1, IMP_E_CORRUPT},
        {80, 0, IMP_E_CORRUPT},        /* tokens */
        {84, 0xffffffff, IMP_E_CORRUPT}, /* layers */
        {124, 0xffffffff, IMP_E_CORRUPT}, /* chunks */
        {32 + 4, 0, IMP_E_CORRUPT},    /* with the low half below: segment 0 */
    };
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    sample s;
    do {
        make_plain(&s, &r, 2, 40);
    } while (s.meta.rest != IMP_REST_RAW || s.meta.type_k == IMP_TYPE_Q8_0);
    imp_seg_layout *l = layout_of(&s.meta);
    uint64_t *sums;
    unsigned char *h = header_of(l, &r, &sums);
    size_t n = (size_t)imp_seg_header_bytes(l);
    unsigned char *changed = imp_malloc(n);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        memcpy(changed, h, n);
        imp_put32(changed + cases[i].at, cases[i].value);
        if (cases[i].at == 36) imp_put32(changed + 32, 0);
        reseal(changed, n);
        assert_int_equal(refused(changed, n), cases[i].rc);
    }
    /* 8 bits at rest of rows that are 8 bits already. */
    memcpy(changed, h, n);
    imp_put32(changed + 88, IMP_TYPE_Q8_0);
    imp_put32(changed + 96, IMP_REST_Q8);
    reseal(changed, n);
    assert_int_equal(refused(changed, n), IMP_E_UNSUPPORTED);
    imp_free(changed);
    imp_free(sums);
    imp_free(h);
    imp_seg_layout_free(l);
}

static void test_bad_metas(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    sample good;
    do {
        make_plain(&good, &r, 2, 40);
    } while (good.meta.rest != IMP_REST_RAW || good.meta.type_k == IMP_TYPE_Q8_0);
    imp_seg_layout *l = NULL;
#define REFUSE(code, change)                                                                                           \
    do {                                                                                                               \
        sample s = good;                                                                                               \
        s.meta.layers = s.layers;                                                                                      \
        s.meta.tokens = s.tokens;                                                                                      \
        change;                                                                                                        \
        assert_int_equal(imp_seg_layout_new(&s.meta, &l), code);                                                       \
        assert_null(l);                                                                                                \
    } while (0)
    REFUSE(IMP_E_ARG, s.meta.segment = 0);
    REFUSE(IMP_E_ARG, s.meta.n_tokens = 0);
    REFUSE(IMP_E_ARG, s.meta.n_tokens = (1 << 20) + 1);
    REFUSE(IMP_E_ARG, s.meta.n_layers = 0);
    REFUSE(IMP_E_ARG, s.meta.n_layers = 1025);
    REFUSE(IMP_E_ARG, s.meta.chunk_tokens = 0);
    REFUSE(IMP_E_ARG, s.meta.chunk_tokens = 24);
    REFUSE(IMP_E_ARG, s.meta.chunk_tokens = 272);
    REFUSE(IMP_E_ARG, s.meta.alignment = 1024);
    REFUSE(IMP_E_ARG, s.meta.first_token = UINT64_MAX);
    REFUSE(IMP_E_ARG, (s.meta.first_token = 0, s.meta.before.lo = s.meta.space.lo + 1));
    REFUSE(IMP_E_ARG, memset(s.meta.model_name, 'x', sizeof s.meta.model_name));
    REFUSE(IMP_E_ARG, s.meta.how[63] = 'x');
    REFUSE(IMP_E_ARG, s.layers[0].n_kv_heads = 0);
    REFUSE(IMP_E_ARG, s.layers[0].head_dim_k = 0);
    REFUSE(IMP_E_ARG, s.layers[0].head_dim_v = UINT32_MAX);
    REFUSE(IMP_E_ARG, s.layers[0].n_kv_heads = UINT32_MAX);
    REFUSE(IMP_E_UNSUPPORTED, s.meta.type_k = (imp_type)9);
    REFUSE(IMP_E_UNSUPPORTED, s.meta.type_v = (imp_type)-1);
    REFUSE(IMP_E_UNSUPPORTED, s.meta.rest = (imp_rest)4);
    REFUSE(IMP_E_UNSUPPORTED, s.meta.order = (imp_order)3);
    REFUSE(IMP_E_UNSUPPORTED, s.meta.order = (imp_order)-1);
    REFUSE(IMP_E_UNSUPPORTED, s.meta.rest = (imp_rest)-1);
    REFUSE(IMP_E_ARG, s.meta.order = IMP_ORDER_CORE);
    REFUSE(IMP_E_ARG, (s.meta.order = IMP_ORDER_CORE, s.meta.core_tokens = s.meta.n_tokens + 1));
    REFUSE(IMP_E_ARG, (s.meta.order = IMP_ORDER_CORE, s.meta.n_tokens = 40, s.meta.chunk_tokens = 16,
                       s.meta.core_tokens = 15));
    REFUSE(IMP_E_ARG, s.meta.core_tokens = s.meta.n_tokens);
    REFUSE(IMP_E_ARG, (s.meta.order = IMP_ORDER_IMPORTANCE, s.meta.core_tokens = s.meta.n_tokens));
    REFUSE(IMP_E_ARG, s.meta.probe_heads = 1025);
    REFUSE(IMP_E_ARG, s.meta.sketch_bits = 8);
    REFUSE(IMP_E_ARG, s.meta.basis = 8);
    REFUSE(IMP_E_ARG, (s.meta.basis = 8, s.meta.sketch_bits = 12));
    REFUSE(IMP_E_ARG, (s.meta.basis = 8, s.meta.sketch_bits = 4104));
    REFUSE(IMP_E_UNSUPPORTED, (s.meta.rest = IMP_REST_K8V4, s.meta.type_v = IMP_TYPE_Q8_0));
    REFUSE(IMP_E_UNSUPPORTED, (s.meta.rest = IMP_REST_Q4, s.meta.type_k = IMP_TYPE_Q8_0));
    /* Whole blocks in a key row, but not in one of its heads. */
    REFUSE(IMP_E_UNSUPPORTED, (s.meta.type_k = IMP_TYPE_Q8_0, s.meta.n_layers = 1, s.layers[0].n_kv_heads = 2,
                               s.layers[0].head_dim_k = 16, s.meta.probe_heads = 1));
    REFUSE(IMP_E_UNSUPPORTED, (s.meta.rest = IMP_REST_Q8, s.meta.type_v = IMP_TYPE_Q8_0));
    REFUSE(IMP_E_UNSUPPORTED, (s.meta.type_k = IMP_TYPE_Q8_0, s.layers[0].n_kv_heads = 1, s.layers[0].head_dim_k = 33));
#undef REFUSE

    /* A scales chunk beyond 2 GiB. */
    static int32_t many[1 << 20];
    sample s = good;
    s.layers[0] = (imp_layer_shape){1024, 1024, 1};
    s.meta.layers = s.layers;
    s.meta.n_layers = 1;
    s.meta.tokens = many;
    s.meta.n_tokens = 1 << 20;
    s.meta.rest = IMP_REST_Q8;
    assert_int_equal(imp_seg_layout_new(&s.meta, &l), IMP_E_ARG);
    /* Probe keys and sketches beyond it, and the largest that aren't. */
    s.meta.rest = IMP_REST_RAW;
    s.layers[0] = (imp_layer_shape){1024, 1024, 1};
    s.meta.type_k = IMP_TYPE_F16;
    s.meta.probe_heads = 1;
    assert_int_equal(imp_seg_layout_new(&s.meta, &l), IMP_E_ARG);
    s.layers[0].head_dim_k = 1023;
    l = layout_of(&s.meta);
    check_places(l);
    imp_seg_layout_free(l);
    s.layers[0].head_dim_k = 1024;
    s.meta.probe_heads = 0;
    s.meta.basis = 1;
    s.meta.sketch_bits = 16;
    assert_int_equal(imp_seg_layout_new(&s.meta, &l), IMP_E_ARG);
    s.meta.sketch_bits = 8;
    l = layout_of(&s.meta);
    check_places(l);
    imp_seg_layout_free(l);
    s.meta.basis = s.meta.sketch_bits = 0;
    /* Keys and values that are chunks of 1 GiB each are too much together. */
    s.meta.type_k = s.meta.type_v = IMP_TYPE_F32;
    s.layers[0] = (imp_layer_shape){1, 1 << 20, 1 << 20};
    s.meta.chunk_tokens = 256;
    l = layout_of(&s.meta);
    imp_seg_layout_free(l);
    s.meta.paired = true;
    assert_int_equal(imp_seg_layout_new(&s.meta, &l), IMP_E_ARG);
    s.meta.paired = false;
    s.layers[0] = (imp_layer_shape){1024, 1024, 1};
    /* The same without scales is large, but can be laid out. */
    s.meta.rest = IMP_REST_RAW;
    l = layout_of(&s.meta);
    check_places(l);
    imp_seg_layout_free(l);
}

/* Maps with two and four bytes a slot come back; one that isn't a permutation doesn't. */
static void test_maps(void **state)
{
    (void)state;
    enum { LARGEST = 70000 };
    static int32_t many[LARGEST];
    static uint32_t map[LARGEST], back[LARGEST];
    static unsigned char bytes[4 * LARGEST + 1], seen[LARGEST];
    static const uint32_t lengths[] = {1, 2, 3, 100, 65535, 65536, 65537, LARGEST};
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        uint32_t n = lengths[i], width = n > 65536 ? 4 : 2;
        sample s;
        make_plain(&s, &r, 2, 40);
        s.meta.n_tokens = n;
        s.meta.tokens = many;
        imp_seg_layout *l = layout_of(&s.meta);
        assert_int_equal(imp_seg_map_bytes(l), 0);
        memset(bytes, 99, sizeof bytes);
        imp_seg_map_encode(l, map, bytes);
        assert_int_equal(bytes[0], 99);
        assert_int_equal(imp_seg_map_decode(l, NULL, back, seen), 0);
        for (uint32_t t = 0; t < n; t++) assert_int_equal(back[t], t);
        imp_seg_layout_free(l);

        s.meta.order = IMP_ORDER_IMPORTANCE;
        l = layout_of(&s.meta);
        check_places(l);
        assert_int_equal(imp_seg_map_bytes(l), n * width);
        for (uint32_t t = 0; t < n; t++) map[t] = t;
        for (uint32_t t = n; t > 1; t--) {
            uint32_t other = (uint32_t)imp_rng_below(&r, t), last = map[t - 1];
            map[t - 1] = map[other];
            map[other] = last;
        }
        imp_seg_map_encode(l, map, bytes);
        assert_int_equal(bytes[n * width], 99); /* nothing behind the end */
        for (uint32_t t = 0; t < n; t++) { /* little-endian, by its definition */
            uint32_t token = 0;
            for (uint32_t b = width; b-- > 0;) token = token << 8 | bytes[t * width + b];
            assert_int_equal(token, map[t]);
        }
        memset(seen, 1, sizeof seen);
        assert_int_equal(imp_seg_map_decode(l, bytes, back, seen), 0);
        assert_memory_equal(back, map, n * sizeof *map);

        for (int round = 0; round < 20; round++) {
            uint32_t at = (uint32_t)imp_rng_below(&r, n), was = map[at];
            bool outside = n == 1 || imp_rng_below(&r, 2);
            if (outside && n == 65536) continue; /* two bytes can't say it */
            uint32_t beyond = width == 4 ? UINT32_MAX - n : 65536 - n;
            map[at] = outside ? n + (uint32_t)imp_rng_below(&r, beyond) : map[(at + 1 + imp_rng_below(&r, n - 1)) % n];
            imp_seg_map_encode(l, map, bytes);
            assert_int_equal(imp_seg_map_decode(l, bytes, back, seen), IMP_E_CORRUPT);
            map[at] = was;
        }
        imp_seg_layout_free(l);
    }
}

static void test_checksums(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    sample s;
    do {
        make_plain(&s, &r, 3, 200);
    } while (s.meta.rest == IMP_REST_RAW || s.meta.n_layers < 2);
    add_extras(&s, &r, 2 | 4 | 8);
    imp_seg_layout *l = layout_of(&s.meta);
    s.meta.segment ^= 2;
    imp_seg_layout *other = layout_of(&s.meta);

    /* The same bytes have another checksum in every place, and in every segment. */
    unsigned char bytes[512];
    imp_test_fill(bytes, sizeof bytes, imp_test_seed(), 0);
    uint32_t n = imp_seg_n_chunks(l);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t sum = imp_seg_checksum(l, i, bytes, sizeof bytes);
        assert_true(sum != imp_seg_checksum(other, i, bytes, sizeof bytes));
        for (uint32_t j = 0; j < i; j++) assert_true(sum != imp_seg_checksum(l, j, bytes, sizeof bytes));
    }
    /* And every byte counts. */
    uint64_t sum = imp_seg_checksum(l, 0, bytes, sizeof bytes);
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] ^= 1;
        assert_true(sum != imp_seg_checksum(l, 0, bytes, sizeof bytes));
        bytes[i] ^= 1;
    }
    imp_seg_layout_free(other);
    imp_seg_layout_free(l);
}

static void test_names(void **state)
{
    (void)state;
    char name[32];
    uint64_t id = 0;
    imp_seg_name(0x0123456789abcdefu, name);
    assert_string_equal(name, "segments/0123456789abcdef.seg");
    assert_true(imp_seg_name_parse(name + 9, &id));
    assert_int_equal(id, 0x0123456789abcdefu);
    imp_seg_name(UINT64_MAX, name);
    assert_true(imp_seg_name_parse(name + 9, &id));
    assert_true(id == UINT64_MAX);
    static const char *const bad[] = {"", ".", "..", "0123456789abcdef", "0123456789abcdef.seg.tmp", "0123456789abcde.seg",
                                      "0123456789ABCDEF.seg", "0000000000000000.seg", "../3456789abcdef.seg",
                                      "0123456789abcdef.sef", "00123456789abcdef.seg"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) assert_false(imp_seg_name_parse(bad[i], &id));
}

static void test_no_memory(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    sample s;
    make_sample(&s, &r, 2, 40);
    imp_seg_layout *l = layout_of(&s.meta), *l2 = NULL;
    uint64_t *sums, *sums2 = NULL;
    unsigned char *h = header_of(l, &r, &sums);
    int rc = IMP_E_NOMEM;
    for (uint64_t at = 1; rc == IMP_E_NOMEM; at++) {
        imp_alloc_fail_at(at, 0);
        rc = imp_seg_header_decode(h, (size_t)imp_seg_header_bytes(l), &l2, &sums2);
        imp_alloc_fail_at(0, 0);
        assert_true(rc == IMP_E_NOMEM || at > 5);
        assert_true((rc == 0) == (l2 && sums2));
    }
    assert_int_equal(rc, 0);
    imp_free(sums2);
    imp_seg_layout_free(l2);
    imp_free(sums);
    imp_free(h);
    imp_seg_layout_free(l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),    cmocka_unit_test(test_flips_and_cuts), cmocka_unit_test(test_bits),
        cmocka_unit_test(test_resealed),      cmocka_unit_test(test_later_formats),  cmocka_unit_test(test_bad_metas),
        cmocka_unit_test(test_maps),          cmocka_unit_test(test_checksums),      cmocka_unit_test(test_names),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
