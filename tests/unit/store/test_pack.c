/* What the writer makes of a commit: each file holds, byte for byte, what a naive packer would write, for every encoding,
 * order, chunk size and thing to keep; and its history begins with the scores of the commit's queries. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/rng.h"
#include "format/rows.h"
#include "select/blend.h"
#include "select/order.h"
#include "store/store_internal.h"
#include "support/support.h"

enum { N_LAYERS = 3, N_TOKENS = 150, N_ROWS = 7, MAX_ROW = 128, MAX_HEADS = 6 };

/* The last layer's keys aren't turned. */
static const imp_layer_shape shapes[N_LAYERS] = {{2, 32, 32}, {4, 16, 24}, {1, 48, 64}};
static const uint32_t n_heads[N_LAYERS] = {4, 4, 6};
static float factors[16];

static int32_t tokens[N_TOKENS];
static uint16_t keys[N_LAYERS][N_TOKENS][MAX_ROW], values[N_LAYERS][N_TOKENS][MAX_ROW];
static float queries[N_LAYERS][N_ROWS][MAX_HEADS * 48];

static size_t k_elements(uint32_t l) { return (size_t)shapes[l].n_kv_heads * shapes[l].head_dim_k; }
static size_t v_elements(uint32_t l) { return (size_t)shapes[l].n_kv_heads * shapes[l].head_dim_v; }

static int set_up(void **state)
{
    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed());
    for (int i = 0; i < 16; i++) factors[i] = (float)(1 + imp_rng_unit(&rng));
    for (int t = 0; t < N_TOKENS; t++) tokens[t] = (int32_t)imp_rng_below(&rng, 50000);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        for (int t = 0; t < N_TOKENS; t++) {
            for (int i = 0; i < MAX_ROW; i++) {
                keys[l][t][i] = imp_f32_to_f16((float)(imp_rng_unit(&rng) * 2 - 1 + (i == 5 ? 9 : 0)));
                values[l][t][i] = imp_f32_to_f16((float)(imp_rng_unit(&rng) * 2 - 1));
            }
        }
        for (int r = 0; r < N_ROWS; r++) {
            for (int i = 0; i < MAX_HEADS * 48; i++) queries[l][r][i] = (float)(imp_rng_unit(&rng) * 4 - 2);
        }
    }
    *state = imp_test_make_dir("/dev/shm");
    if (!*state) *state = imp_test_make_dir(NULL);
    return *state ? 0 : -1;
}

static int tear_down(void **state)
{
    imp_test_remove_dir(*state);
    return 0;
}

static imp_query query_of(uint32_t l)
{
    return (imp_query){queries[l][0], MAX_HEADS * 48, shapes[l].head_dim_k, N_ROWS, n_heads[l], 0.3f, l == 1 ? 5.0f : 0};
}

static imp_space *open_space(imp_store *s, bool ropes_known)
{
    const imp_rope ropes[N_LAYERS] = {
        {IMP_ROPE_NEOX, 0, 32, 10000.0f, 1.0f, .factors = factors, .attn_factor = 1.0f},
        {IMP_ROPE_NORM, 4, 8, 500.0f, 0.5f, .attn_factor = 1.1f},
        {.n_dims = 0},
    };
    imp_space *space;
    imp_space_desc desc = {
        .struct_bytes = sizeof desc,
        .model_name = "m",
        .engine = "test 1",
        .type_k = IMP_TYPE_F16,
        .type_v = IMP_TYPE_F16,
        .n_layers = N_LAYERS,
        .layers = shapes,
        .ropes = ropes_known ? ropes : NULL,
        .n_heads = n_heads,
    };
    assert_int_equal(imp_space_open(s, &desc, &space), 0);
    return space;
}

/* Tokens [from, n), queries of the last N_ROWS ones if asked for. */
static void commit(imp_space *space, size_t from, size_t n, bool with_queries)
{
    imp_commit *c;
    assert_int_equal(imp_commit_begin(space, tokens, n, from, 0, &c), 0);
    assert_non_null(c);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        imp_query q = query_of(l);
        assert_int_equal(imp_commit_rows(c, l, from, n - from, keys[l][from], MAX_ROW * 2, values[l][from], MAX_ROW * 2), 0);
        if (with_queries) assert_int_equal(imp_commit_queries(c, l, n - N_ROWS, &q), 0);
    }
    assert_int_equal(imp_commit_finish(c), 0);
    assert_int_equal(imp_store_flush(space->store), 0);
}

/* ---- the naive packer */

/* Scores of the commit [from, n), in double precision, as sums over rows and heads of the softmax. */
static void naive_scores(uint32_t l, size_t from, size_t n, double *out)
{
    imp_query q = query_of(l);
    size_t dim = shapes[l].head_dim_k, seen = n - N_ROWS;
    double sum = 0;
    for (size_t t = from; t < n; t++) out[t - from] = 0;
    for (size_t r = 0; r < N_ROWS; r++) {
        for (uint32_t h = 0; h < q.n_heads; h++) {
            double e[N_TOKENS], all = 0;
            for (size_t t = from; t < seen; t++) {
                const uint16_t *k = keys[l][t] + h / (q.n_heads / shapes[l].n_kv_heads) * dim;
                double x = 0;
                for (size_t d = 0; d < dim; d++) {
                    x += (double)q.q[r * q.row_stride + h * q.head_stride + d] * (double)imp_f16_to_f32(k[d]);
                }
                x *= (double)q.scale;
                if (q.softcap > 0) x = (double)q.softcap * tanh(x / (double)q.softcap);
                e[t] = exp(x);
                all += e[t];
            }
            for (size_t t = from; t < seen; t++) out[t - from] += e[t] / all;
        }
    }
    for (size_t t = from; t < seen; t++) sum += out[t - from];
    for (size_t t = from; t < seen; t++) out[t - from] *= (double)(seen - from) / sum;
    for (size_t t = seen; t < n; t++) out[t - from] = 1;
}

typedef struct file {
    unsigned char *bytes, *want; /* as it is, and as it should be */
    const imp_seg *seg;
    const imp_seg_meta *m;
} file;

static void put(file *f, uint64_t at, const void *bytes, size_t n)
{
    assert_true(at + n <= imp_seg_file_bytes(f->seg->layout));
    memcpy(f->want + at, bytes, n);
}

static uint64_t row_at(const file *f, imp_region region, uint32_t l, uint32_t slot)
{
    const imp_seg_layout *lay = f->seg->layout;
    uint32_t chunk = slot / f->m->chunk_tokens;
    uint64_t at = imp_seg_chunk(lay, f->m->paired ? IMP_REGION_KV : region, l, chunk).offset;
    if (f->m->paired && region == IMP_REGION_V) {
        uint32_t n = f->m->n_tokens - chunk * f->m->chunk_tokens;
        if (n > f->m->chunk_tokens) n = f->m->chunk_tokens;
        at += n * imp_seg_row_bytes(lay, IMP_REGION_K, l);
    }
    return at + slot % f->m->chunk_tokens * imp_seg_row_bytes(lay, region, l);
}

static void want_layer(imp_store *s, file *f, uint32_t l, const float *scores)
{
    const imp_seg_meta *m = f->m;
    const imp_seg_layout *lay = f->seg->layout;
    size_t first = (size_t)m->first_token, n_k = k_elements(l), n_v = v_elements(l);
    uint32_t order[N_TOKENS], slot_of[N_TOKENS];
    float scratch[N_TOKENS];
    unsigned char bytes[IMP_GROUP_TOKENS * MAX_ROW * 2];
    imp_order_slots(m->order, scores, m->n_tokens, m->core_tokens, order, scratch);
    for (uint32_t i = 0; i < m->n_tokens; i++) slot_of[order[i]] = i;
    if (m->order != IMP_ORDER_TOKEN) {
        unsigned char map[2 * N_TOKENS];
        for (uint32_t i = 0; i < m->n_tokens; i++) {
            map[2 * i] = (unsigned char)order[i];
            map[2 * i + 1] = (unsigned char)(order[i] >> 8);
        }
        put(f, imp_seg_chunk(lay, IMP_REGION_MAP, l, 0).offset, map, 2 * m->n_tokens);
        assert_memory_equal(imp_seg_map(f->seg, l), order, m->n_tokens * sizeof *order);
    } else {
        assert_null(imp_seg_map(f->seg, l));
    }
    for (uint32_t t = 0; t < m->n_tokens; t++) {
        uint32_t group = t / IMP_GROUP_TOKENS * IMP_GROUP_TOKENS, left = m->n_tokens - group;
        uint16_t scales[2 * MAX_ROW];
        size_t row = imp_rows_key_bytes(m->rest, IMP_TYPE_F16, n_k), n_scales = imp_rows_scales_bytes(m->rest, n_k);
        imp_rows_keys_encode(m->rest, IMP_TYPE_F16, keys[l][first + group], MAX_ROW * 2,
                             left < IMP_GROUP_TOKENS ? left : IMP_GROUP_TOKENS, n_k, bytes, scales);
        put(f, row_at(f, IMP_REGION_K, l, slot_of[t]), bytes + (t - group) * row, row);
        if (n_scales) {
            put(f, imp_seg_chunk(lay, IMP_REGION_SCALES, l, 0).offset + group / IMP_GROUP_TOKENS * n_scales, scales,
                n_scales);
        }
        imp_rows_value_encode(m->rest, IMP_TYPE_F16, values[l][first + t], n_v, bytes);
        put(f, row_at(f, IMP_REGION_V, l, slot_of[t]), bytes, imp_rows_value_bytes(m->rest, IMP_TYPE_F16, n_v));
        if (m->probe_heads) {
            uint32_t n = m->probe_heads < shapes[l].n_kv_heads ? m->probe_heads : shapes[l].n_kv_heads;
            size_t probe = n * shapes[l].head_dim_k * 2;
            put(f, imp_seg_chunk(lay, IMP_REGION_PROBE, l, 0).offset + t * probe, keys[l][first + t], probe);
        }
    }
    if (!m->sketch_bits) return;
    uint64_t n_read = 0;
    const imp_bases *bases = imp_bases_get(s, m->space, m->basis, &n_read);
    assert_non_null(bases);
    assert_ptr_equal(bases, f->seg->bases);
    imp_rope_table *rope = NULL;
    const imp_rope ropes[2] = {
        {IMP_ROPE_NEOX, 0, 32, 10000.0f, 1.0f, .factors = factors, .attn_factor = 1.0f},
        {IMP_ROPE_NORM, 4, 8, 500.0f, 0.5f, .attn_factor = 1.1f},
    };
    if (l < 2) assert_int_equal(imp_rope_table_new(&ropes[l], shapes[l].head_dim_k, 0, N_TOKENS, &rope), 0);
    for (uint32_t t = 0; t < m->n_tokens; t++) {
        imp_key_rows one = {IMP_TYPE_F16, shapes[l].n_kv_heads, shapes[l].head_dim_k, keys[l][first + t], MAX_ROW * 2, 1,
                            first + t};
        size_t n = imp_sketch_token_bytes(bases->layers[l]);
        assert_int_equal(n, imp_seg_row_bytes(lay, IMP_REGION_SKETCH, l));
        assert_int_equal(imp_sketch_encode(bases->layers[l], &one, rope, bytes), 0);
        put(f, imp_seg_chunk(lay, IMP_REGION_SKETCH, l, 0).offset + t * n, bytes, n);
    }
    imp_rope_table_free(rope);
}

/* The history and the ranking of a segment, against double precision. Returns the scores as they are. */
static void check_history(imp_store *s, const imp_seg *seg, size_t from, size_t n, bool with_queries,
                          float scores[N_LAYERS][N_TOKENS])
{
    const imp_seg_meta *m = imp_seg_layout_meta(seg->layout);
    imp_history *h;
    float rank[N_TOKENS];
    double want[N_TOKENS];
    assert_int_equal(imp_history_get(s, seg, &h), 0);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        assert_int_equal(imp_history_read(h, l, 0, m->n_tokens, scores[l]), with_queries);
        assert_int_equal(imp_history_ranking(h, IMP_RANK_PREFILL, l, 0, m->n_tokens, rank), with_queries);
        assert_memory_equal(rank, scores[l], m->n_tokens * sizeof *rank);
        if (!with_queries) continue;
        naive_scores(l, from, n, want);
        for (uint32_t t = 0; t < m->n_tokens; t++) {
            double w = want[m->first_token - from + t];
            if (fabs((double)scores[l][t] - w) > 1e-3 * (1 + w)) {
                fail_msg("layer %u, token %u: %g, not %g", l, t, (double)scores[l][t], w);
            }
        }
        assert_false(imp_history_ranking(h, IMP_RANK_RECONSTRUCTION, l, 0, m->n_tokens, rank));
    }
    assert_int_equal(imp_history_news(h), 0);
    imp_history_put(s, h);
}

/* A segment of the commit [from, n). */
static void check_segment(imp_store *s, const imp_seg *seg, size_t from, size_t n, bool with_queries)
{
    const imp_seg_layout *lay = seg->layout;
    float scores[N_LAYERS][N_TOKENS];
    size_t n_bytes = imp_seg_file_bytes(lay), head = imp_seg_header_bytes(lay);
    file f = {imp_aligned(4096, n_bytes), imp_calloc(1, n_bytes), seg, imp_seg_layout_meta(lay)};
    assert_non_null(f.bytes);
    assert_non_null(f.want);
    assert_int_equal(imp_io_read(seg->file, 0, f.bytes, n_bytes), 0);
    check_history(s, seg, from, n, with_queries, scores);
    memcpy(f.want, f.bytes, head); /* the header was checked when it was opened */
    for (uint32_t l = 0; l < N_LAYERS; l++) want_layer(s, &f, l, with_queries ? scores[l] : NULL);
    for (size_t i = 0; i < n_bytes; i++) {
        if (f.bytes[i] != f.want[i]) fail_msg("byte %zu of %zu: %d, not %d", i, n_bytes, f.bytes[i], f.want[i]);
    }
    for (uint32_t i = 0; i < imp_seg_n_chunks(lay); i++) {
        imp_region region;
        uint32_t l, chunk;
        imp_chunk_place c = imp_seg_chunk_at(lay, i, &region, &l, &chunk);
        assert_true(seg->sums[i] == imp_seg_checksum(lay, i, f.bytes + c.offset, c.n_bytes));
    }
    imp_free(f.want);
    imp_free(f.bytes);
}

static imp_store *open_store(const char *dir, imp_store_opts *opts)
{
    imp_store *s;
    opts->min_store_tokens = 1;
    opts->segment_tokens = 96;
    opts->io_mode = IMP_IO_THREADS;
    opts->reorder_period_s = UINT32_MAX;
    assert_int_equal(imp_store_open(dir, opts, &s), 0);
    return s;
}

static void one_store(const char *dir, imp_rest rest, imp_order order, unsigned keep, uint32_t chunk, unsigned spread,
                      bool with_queries)
{
    imp_store_opts opts;
    imp_path path;
    uint64_t header_bytes;
    imp_store_opts_init(&opts);
    opts.rest = rest;
    opts.order = order;
    opts.keep = keep;
    opts.chunk_tokens = chunk;
    opts.probe_spread = spread;
    imp_store *s = open_store(dir, &opts);
    imp_space *space = open_space(s, true);
    /* The second one's rows begin in the middle, and its front is in the first's segments. */
    commit(space, 0, 110, with_queries);
    commit(space, 60, N_TOKENS, with_queries);
    assert_int_equal(imp_store_match(s, space->id, tokens, N_TOKENS, false, &path, &header_bytes), 0);
    assert_int_equal(path.n_tokens, N_TOKENS);
    assert_int_equal(path.n_spans, 3);
    for (size_t i = 0; i < path.n_spans; i++) {
        const imp_seg_meta *m = imp_seg_layout_meta(path.spans[i].seg->layout);
        bool first = m->first_token < 110;
        assert_int_equal(m->rest, rest);
        assert_int_equal(m->order, order);
        assert_int_equal(m->chunk_tokens, chunk);
        assert_int_equal(m->paired, (keep & IMP_KEEP_PAIRED) != 0);
        /* Three query heads: in groups of 2, 1 and 6; or of KV heads of their own. */
        assert_int_equal(m->probe_heads, keep & IMP_KEEP_PROBE ? 3 : 0);
        assert_int_equal(m->sketch_bits, keep & IMP_KEEP_SKETCH ? 48 : 0);
        assert_int_equal(m->core_tokens, order == IMP_ORDER_CORE ? imp_order_core_tokens(m->n_tokens, chunk) : 0);
        check_segment(s, path.spans[i].seg, first ? 0 : 110, first ? 110 : N_TOKENS, with_queries);
    }
    imp_store_unpin(s, &path);
    assert_int_equal(imp_store_verify(s, 0, NULL, NULL, NULL), 0);
    assert_int_equal(imp_store_remove(s, 0), 0);
    imp_space_close(space);
    imp_store_close(s);
}

/* All of them: the files equal the naive ones. */
static void every_kind(void **state)
{
    static const uint32_t chunks[] = {16, 48, 96};
    unsigned turn = 0;
    for (unsigned rest = IMP_REST_RAW; rest <= IMP_REST_Q4; rest++) {
        for (unsigned order = IMP_ORDER_TOKEN; order <= IMP_ORDER_CORE; order++) {
            for (unsigned keep = 0; keep < 8; keep++, turn++) {
                one_store(*state, (imp_rest)rest, (imp_order)order, keep, chunks[(turn + turn / 8) % 3], turn / 3 % 2,
                          turn % 5 != 2);
            }
        }
    }
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(every_kind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
