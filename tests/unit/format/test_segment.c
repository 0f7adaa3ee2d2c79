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
    m->rest = imp_rng_below(r, 2) ? IMP_REST_Q8 : IMP_REST_RAW;
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
    uint32_t n = imp_seg_n_chunks(l);
    *sums = imp_malloc(n * sizeof **sums);
    unsigned char *h = imp_malloc((size_t)imp_seg_header_bytes(l));
    assert_non_null(*sums);
    assert_non_null(h);
    for (uint32_t i = 0; i < n; i++) (*sums)[i] = imp_rng_u64(r);
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
}

/* Bytes of one token's row, computed the slow way. */
static uint64_t naive_row_bytes(const imp_seg_meta *m, imp_region region, uint32_t layer)
{
    const imp_layer_shape *s = &m->layers[layer];
    uint64_t n = (uint64_t)s->n_kv_heads * (region == IMP_REGION_K ? s->head_dim_k : s->head_dim_v);
    if (m->rest == IMP_REST_Q8) return region == IMP_REGION_K ? n : imp_rows_v8_bytes((size_t)n);
    return imp_type_bytes(region == IMP_REGION_K ? m->type_k : m->type_v, (size_t)n);
}

/* The chunks tile the file behind the header, in the order of the table, and each region's tokens are covered once. */
static void check_places(const imp_seg_layout *l)
{
    static const imp_region regions[] = {IMP_REGION_SCALES, IMP_REGION_K, IMP_REGION_V};
    const imp_seg_meta *m = imp_seg_layout_meta(l);
    uint64_t at = imp_seg_header_bytes(l);
    uint32_t index = 0;
    assert_int_equal(at % m->alignment, 0);
    for (uint32_t layer = 0; layer < m->n_layers; layer++) {
        for (size_t i = 0; i < 3; i++) {
            imp_region region = regions[i];
            uint32_t n = imp_seg_region_chunks(l, region), token = 0;
            assert_int_equal(n, region != IMP_REGION_SCALES ? (m->n_tokens + m->chunk_tokens - 1) / m->chunk_tokens
                                                            : m->rest == IMP_REST_Q8);
            for (uint32_t chunk = 0; chunk < n; chunk++, index++) {
                imp_chunk_place p = imp_seg_chunk(l, region, layer, chunk);
                assert_int_equal(p.offset, at);
                assert_int_equal(p.index, index);
                assert_int_equal(p.n_bytes % m->alignment, 0);
                assert_true(p.data_bytes <= p.n_bytes && p.n_bytes - p.data_bytes < m->alignment);
                assert_int_equal(p.first_token, token);
                if (region == IMP_REGION_SCALES) {
                    uint32_t groups = (m->n_tokens + IMP_GROUP_TOKENS - 1) / IMP_GROUP_TOKENS;
                    assert_int_equal(p.n_tokens, m->n_tokens);
                    assert_int_equal(p.data_bytes,
                                     2 * groups * m->layers[layer].n_kv_heads * m->layers[layer].head_dim_k);
                    assert_int_equal(imp_seg_row_bytes(l, region, layer), 0);
                } else {
                    uint32_t left = m->n_tokens - token;
                    assert_int_equal(p.n_tokens, left < m->chunk_tokens ? left : m->chunk_tokens);
                    assert_int_equal(imp_seg_row_bytes(l, region, layer), naive_row_bytes(m, region, layer));
                    assert_int_equal(p.data_bytes, p.n_tokens * naive_row_bytes(m, region, layer));
                }
                token += p.n_tokens;
                at += p.n_bytes;

                imp_region region2;
                uint32_t layer2, chunk2;
                imp_chunk_place q = imp_seg_chunk_at(l, index, &region2, &layer2, &chunk2);
                assert_true(q.offset == p.offset && q.n_bytes == p.n_bytes && q.data_bytes == p.data_bytes);
                assert_true(q.first_token == p.first_token && q.n_tokens == p.n_tokens && q.index == index);
                assert_true(region2 == region && layer2 == layer && chunk2 == chunk);
            }
            if (n > 0) assert_int_equal(token, m->n_tokens);
            assert_int_equal(imp_seg_chunk(l, region, layer, n).n_bytes, 0);
        }
    }
    assert_int_equal(index, imp_seg_n_chunks(l));
    assert_int_equal(at, imp_seg_file_bytes(l));
    for (int region = IMP_REGION_KV; region <= IMP_REGION_MAP + 1; region++) {
        assert_int_equal(imp_seg_region_chunks(l, (imp_region)region), 0);
        assert_int_equal(imp_seg_chunk(l, (imp_region)region, 0, 0).n_bytes, 0);
        assert_int_equal(imp_seg_row_bytes(l, (imp_region)region, 0), 0);
    }
    assert_int_equal(imp_seg_chunk(l, IMP_REGION_K, m->n_layers, 0).n_bytes, 0);
    assert_int_equal(imp_seg_row_bytes(l, IMP_REGION_K, m->n_layers), 0);
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
        {12, 16, IMP_E_VERSION},       /* features */
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
    make_sample(&s, &r, 2, 40);
    s.meta.rest = IMP_REST_RAW;
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
        make_sample(&good, &r, 2, 40);
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
    REFUSE(IMP_E_ARG, s.meta.order = IMP_ORDER_CORE);
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
    /* The same without scales is large, but can be laid out. */
    s.meta.rest = IMP_REST_RAW;
    l = layout_of(&s.meta);
    check_places(l);
    imp_seg_layout_free(l);
}

static void test_checksums(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    sample s;
    do {
        make_sample(&s, &r, 3, 200);
    } while (s.meta.rest != IMP_REST_Q8 || s.meta.n_layers < 2);
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
        cmocka_unit_test(test_round_trip),   cmocka_unit_test(test_flips_and_cuts), cmocka_unit_test(test_resealed),
        cmocka_unit_test(test_later_formats), cmocka_unit_test(test_bad_metas),     cmocka_unit_test(test_checksums),
        cmocka_unit_test(test_names),        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
