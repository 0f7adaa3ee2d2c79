/* What the writer makes of a commit: each file holds, byte for byte, what a naive packer would write, for every
 * encoding, order, chunk size and thing to keep; and its history begins with the scores of the commit's queries. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
    float softcap = l == 1 ? 5.0f : 0;
    return (imp_query){queries[l][0], MAX_HEADS * 48, shapes[l].head_dim_k, N_ROWS, n_heads[l], 0.3f, softcap};
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
        .weights = {1, 2},
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
        int rc = imp_commit_rows(c, l, from, n - from, keys[l][from], MAX_ROW * 2, values[l][from], MAX_ROW * 2);
        assert_int_equal(rc, 0);
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
        imp_key_rows one = {IMP_TYPE_F16, shapes[l].n_kv_heads, shapes[l].head_dim_k, keys[l][first + t],
                            MAX_ROW * 2, 1, first + t};
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

/* Of more rows than are kept the last ones count, wherever the rows begin. */
static void the_last_rows(void **state)
{
    enum { N = 80, DIM = 32, HEADS = 4 };
    static float many[N * HEADS * DIM];
    float read[2][N_TOKENS];
    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed());
    for (size_t i = 0; i < N * HEADS * DIM; i++) many[i] = (float)(imp_rng_unit(&rng) * 2 - 1);
    for (int turn = 0; turn < 2; turn++) {
        imp_store_opts opts;
        imp_path path;
        imp_history *h;
        uint64_t header_bytes;
        imp_store_opts_init(&opts);
        opts.order = IMP_ORDER_IMPORTANCE;
        opts.chunk_tokens = 16;
        imp_store *s = open_store(*state, &opts);
        s->opts.segment_tokens = 192;
        imp_space *space = open_space(s, true);
        imp_commit *c;
        assert_int_equal(imp_commit_begin(space, tokens, N_TOKENS, 0, 0, &c), 0);
        for (uint32_t l = 0; l < N_LAYERS; l++) {
            assert_int_equal(imp_commit_rows(c, l, 0, N_TOKENS, keys[l][0], MAX_ROW * 2, values[l][0], MAX_ROW * 2), 0);
        }
        size_t skip = turn ? N - 64 : 0;
        imp_query q = {many + skip * HEADS * DIM, HEADS * DIM, DIM, N - skip, HEADS, 0.3f, 0};
        imp_query other = {many, 0, 0, 1, 2, 1.0f, 0};
        assert_int_equal(imp_commit_queries(c, 0, 5, &other), 0); /* replaced by the next */
        assert_int_equal(imp_commit_queries(c, 0, N_TOKENS - N + skip, &q), 0);
        assert_int_equal(imp_commit_queries(c, 2, 0, &other), 0); /* sees no token */
        assert_int_equal(imp_commit_finish(c), 0);
        assert_int_equal(imp_store_flush(s), 0);
        assert_int_equal(s->backlog, 0);
        assert_int_equal(imp_store_match(s, space->id, tokens, N_TOKENS, true, &path, &header_bytes), 0);
        assert_int_equal(path.n_tokens, N_TOKENS);
        assert_int_equal(path.n_spans, 1);
        const imp_seg *seg = path.spans[0].seg;
        assert_int_equal(imp_history_get(s, seg, &h), 0);
        assert_int_equal(imp_history_read(h, 0, 0, N_TOKENS, read[turn]), 1);
        double sum = 0;
        for (int t = 0; t < N_TOKENS; t++) {
            sum += (double)read[turn][t];
            if (t >= N_TOKENS - 64) assert_true(read[turn][t] == 1.0f);
            if (t > 0 && t < N_TOKENS - 64) assert_true(read[turn][t] != 1.0f);
            /* in the order of importance */
            uint32_t a = imp_seg_map(seg, 0)[t], b = t ? imp_seg_map(seg, 0)[t - 1] : a;
            assert_true(read[turn][b] >= read[turn][a]);
            for (uint32_t l = 1; l < N_LAYERS; l++) assert_int_equal(imp_seg_map(seg, l)[t], t);
        }
        assert_true(fabs(sum - N_TOKENS) < 1e-2);
        assert_int_equal(imp_history_read(h, 1, 0, 1, read[turn]), 0);
        assert_int_equal(imp_history_read(h, 2, 0, 1, read[turn]), 0);
        assert_int_equal(imp_history_read(h, 0, 0, N_TOKENS, read[turn]), 1);
        imp_history_put(s, h);
        imp_store_unpin(s, &path);
        assert_int_equal(imp_store_remove(s, 0), 0);
        imp_space_close(space);
        imp_store_close(s);
    }
    assert_memory_equal(read[0], read[1], sizeof read[0]);
}

static void queries_refused(void **state)
{
    imp_store_opts opts;
    imp_store_opts_init(&opts);
    imp_store *s = open_store(*state, &opts);
    imp_space *space = open_space(s, true);
    imp_commit *c;
    assert_int_equal(imp_commit_begin(space, tokens, N_TOKENS, 0, 0, &c), 0);
    const imp_query good = query_of(0);
    imp_query q = good;
    assert_int_equal(imp_commit_queries(NULL, 0, 0, &q), IMP_E_ARG);
    assert_int_equal(imp_commit_queries(c, N_LAYERS, 0, &q), IMP_E_ARG);
    assert_int_equal(imp_commit_queries(c, 0, 0, NULL), IMP_E_ARG);
    assert_int_equal(imp_commit_queries(c, 0, N_TOKENS - N_ROWS + 1, &q), IMP_E_ARG);
    assert_int_equal(imp_commit_queries(c, 0, N_TOKENS + 1, &q), IMP_E_ARG);
    q.q = NULL;
    assert_int_equal(imp_commit_queries(c, 0, 0, &q), IMP_E_ARG);
    q = good;
    q.n_rows = 0;
    assert_int_equal(imp_commit_queries(c, 0, 0, &q), IMP_E_ARG);
    q = good;
    q.n_heads = 3;
    assert_int_equal(imp_commit_queries(c, 0, 0, &q), IMP_E_ARG);
    q = good;
    q.scale = 0;
    assert_int_equal(imp_commit_queries(c, 0, 0, &q), IMP_E_ARG);
    q.scale = NAN;
    assert_int_equal(imp_commit_queries(c, 0, 0, &q), IMP_E_ARG);
    q = good;
    q.softcap = -1;
    assert_int_equal(imp_commit_queries(c, 0, 0, &q), IMP_E_ARG);
    /* counted as the rows are */
    size_t before = s->backlog;
    assert_int_equal(imp_commit_queries(c, 0, 0, &good), 0);
    size_t row_bytes = 4 * 32 * sizeof(float);
    assert_int_equal(s->backlog, before + N_ROWS * row_bytes);
    assert_int_equal(imp_commit_queries(c, 0, 3, &good), 0);
    assert_int_equal(s->backlog, before + N_ROWS * row_bytes);
    s->opts.backlog_bytes = s->backlog;
    const imp_query more = query_of(1);
    assert_int_equal(imp_commit_queries(c, 1, 0, &more), IMP_E_BUSY);
    imp_commit_cancel(c);
    assert_int_equal(s->backlog, 0);
    imp_space_close(space);
    imp_store_close(s);
}

/* Neither ropes nor bits to save: stored all the same. */
static void without(void **state)
{
    imp_store_opts opts;
    imp_path path;
    uint64_t header_bytes;
    imp_store_opts_init(&opts);
    opts.keep = IMP_KEEP_SKETCH;
    opts.chunk_tokens = 16;
    imp_store *s = open_store(*state, &opts);
    imp_space *space = open_space(s, false);
    commit(space, 0, 64, true);
    assert_int_equal(imp_store_match(s, space->id, tokens, 64, true, &path, &header_bytes), 0);
    assert_int_equal(path.n_tokens, 64);
    assert_int_equal(imp_seg_layout_meta(path.spans[0].seg->layout)->sketch_bits, 0);
    check_segment(s, path.spans[0].seg, 0, 64, true);
    imp_store_unpin(s, &path);
    imp_space_close(space);

    /* too few tokens to learn from, and then enough */
    space = open_space(s, true);
    commit(space, 64, 100, true);
    commit(space, 100, 150, true);
    assert_int_equal(imp_store_remove(s, 0), 0);
    commit(space, 0, 64, true);
    commit(space, 64, 100, true);
    assert_int_equal(imp_store_match(s, space->id, tokens, 100, true, &path, &header_bytes), 0);
    assert_int_equal(path.n_tokens, 100);
    for (size_t i = 0; i < path.n_spans; i++) {
        assert_int_equal(imp_seg_layout_meta(path.spans[i].seg->layout)->sketch_bits, 48);
        check_segment(s, path.spans[i].seg, i ? 64 : 0, i ? 100 : 64, true);
    }
    imp_store_unpin(s, &path);
    imp_space_close(space);
    imp_store_close(s);
}

/* Keys or values of Q8_0 stay as they are, whatever the store's encoding. */
static void raw_blocks(void **state)
{
    static unsigned char rows[64][34];
    static float q32[64];
    const imp_layer_shape shape = {1, 32, 32};
    const imp_rope rope = {IMP_ROPE_NEOX, 0, 32, 10000.0f, 1.0f, .attn_factor = 1.0f};
    imp_store_opts opts;
    imp_path path;
    uint64_t header_bytes;
    imp_store_opts_init(&opts);
    opts.keep = IMP_KEEP_SKETCH | IMP_KEEP_PROBE | IMP_KEEP_PAIRED;
    opts.rest = IMP_REST_Q4;
    opts.order = IMP_ORDER_CORE;
    imp_store *s = open_store(*state, &opts);
    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed());
    for (int t = 0; t < 64; t++) {
        uint16_t scale = imp_f32_to_f16(0.01f);
        memcpy(rows[t], &scale, 2);
        for (int i = 2; i < 34; i++) rows[t][i] = (unsigned char)imp_rng_below(&rng, 256);
        q32[t] = (float)imp_rng_unit(&rng);
    }
    imp_space *space;
    imp_space_desc desc = {.struct_bytes = sizeof desc, .engine = "test 1", .weights = {1, 2}, .type_k = IMP_TYPE_Q8_0,
                           .type_v = IMP_TYPE_Q8_0, .n_layers = 1, .layers = &shape, .ropes = &rope};
    assert_int_equal(imp_space_open(s, &desc, &space), 0);
    imp_commit *c;
    imp_query q = {q32, 0, 32, 3, 1, 0.1f, 0};
    assert_int_equal(imp_commit_begin(space, tokens, 64, 0, 0, &c), 0);
    assert_int_equal(imp_commit_rows(c, 0, 0, 64, rows, 34, rows, 34), 0);
    assert_int_equal(imp_commit_queries(c, 0, 61, &q), 0);
    assert_int_equal(imp_commit_finish(c), 0);
    assert_int_equal(imp_store_flush(s), 0);
    assert_int_equal(imp_store_match(s, space->id, tokens, 64, true, &path, &header_bytes), 0);
    assert_int_equal(path.n_tokens, 64);
    const imp_seg *seg = path.spans[0].seg;
    const imp_seg_meta *m = imp_seg_layout_meta(seg->layout);
    assert_int_equal(m->rest, IMP_REST_RAW);
    assert_int_equal(m->sketch_bits, 32);
    imp_chunk_place k = imp_seg_chunk(seg->layout, IMP_REGION_KV, 0, 0);
    unsigned char *b = imp_aligned(4096, k.n_bytes);
    assert_int_equal(imp_io_read(seg->file, k.offset, b, k.n_bytes), 0);
    for (uint32_t slot = 0; slot < 64; slot++) {
        uint32_t t = imp_seg_map(seg, 0)[slot];
        assert_memory_equal(b + slot * 34, rows[t], 34);
        assert_memory_equal(b + 64 * 34 + slot * 34, rows[t], 34);
    }
    imp_free(b);
    imp_store_unpin(s, &path);
    imp_space_close(space);
    imp_store_close(s);
}

static void descriptions_refused(void **state)
{
    imp_store_opts opts;
    imp_store_opts_init(&opts);
    imp_store *s = open_store(*state, &opts);
    imp_space *space, *same;
    const imp_layer_shape layers[2] = {{2, 32, 32}, {2, 32, 32}};
    const imp_rope good = {IMP_ROPE_NEOX, 0, 32, 10000.0f, 1.0f, .attn_factor = 1.0f};
    float own[16];
    imp_rope ropes[2] = {good, good};
    uint32_t heads[2] = {4, 2};
    imp_space_desc desc = {.struct_bytes = sizeof desc, .engine = "test 1", .weights = {1, 2}, .type_k = IMP_TYPE_F16,
                           .type_v = IMP_TYPE_F16, .n_layers = 2, .layers = layers, .ropes = ropes, .n_heads = heads};
    for (int i = 0; i < 16; i++) own[i] = 1.0f + (float)i;
    ropes[1].factors = own;
    assert_int_equal(imp_space_open(s, &desc, &space), 0);
    /* copied, with the factors */
    own[3] = 99;
    assert_true(space->turns->ropes[1].factors[3] == 4.0f);
    assert_null(space->turns->ropes[0].factors);
    assert_int_equal(space->turns->n_heads[0], 4);
    imp_turns *t = imp_turns_hold(space->turns);
    desc.ropes = NULL;
    desc.n_heads = NULL;
    assert_int_equal(imp_space_open(s, &desc, &same), 0);
    assert_true(imp_hash128_equal(space->id, same->id));
    assert_null(same->turns->ropes);
    assert_int_equal(same->turns->n_heads[1], 2);
    imp_space_close(same);
    imp_space_close(space);
    assert_int_equal(t->n_heads[0], 4); /* as long as it is held */
    imp_turns_drop(t);
    imp_turns_drop(NULL);

    desc.ropes = ropes;
    desc.n_heads = heads;
    own[3] = 0;
    assert_int_equal(imp_space_open(s, &desc, &space), IMP_E_ARG);
    assert_non_null(strstr(imp_last_error(), "layer 1"));
    for (int i = 0; i < 7; i++) {
        ropes[0] = ropes[1] = good;
        imp_rope *r = &ropes[i % 2];
        if (i == 0) r->n_dims = 34;
        if (i == 1) r->n_dims = 31;
        if (i == 2) r->first_dim = 2;
        if (i == 3) r->base = 1.0f;
        if (i == 4) r->freq_scale = 0;
        if (i == 5) r->attn_factor = NAN;
        if (i == 6) r->pairs = (imp_rope_pairs)2;
        assert_int_equal(imp_space_open(s, &desc, &space), IMP_E_ARG);
        assert_null(space);
    }
    ropes[0] = ropes[1] = good;
    heads[1] = 3;
    assert_int_equal(imp_space_open(s, &desc, &space), IMP_E_ARG);
    heads[1] = 0;
    assert_int_equal(imp_space_open(s, &desc, &space), IMP_E_ARG);
    imp_store_close(s);
}

static void switches(void **state)
{
    (void)state;
    imp_store_opts opts;
    imp_switches sw = {IMP_IDENTIFY_SKETCH, IMP_ORDER_CORE, IMP_CACHE_SCORE, IMP_PREFETCH_CORE, IMP_REST_K8V4, 32};
    imp_store_opts_init(&opts);
    imp_store_opts_switches(&opts, &sw);
    assert_int_equal(opts.order, IMP_ORDER_CORE);
    assert_int_equal(opts.rest, IMP_REST_K8V4);
    assert_int_equal(opts.cache, IMP_CACHE_SCORE);
    assert_int_equal(opts.chunk_tokens, 32);
    assert_int_equal(opts.keep, IMP_KEEP_SKETCH | IMP_KEEP_PAIRED);
    sw.identify = IMP_IDENTIFY_PROBE;
    imp_store_opts_switches(&opts, &sw);
    assert_int_equal(opts.keep, IMP_KEEP_PROBE);
    sw.identify = IMP_IDENTIFY_CHUNKS;
    imp_store_opts_switches(&opts, &sw);
    assert_int_equal(opts.keep, 0);
    /* a caller of the first version */
    opts.struct_bytes = offsetof(imp_store_opts, device_cache_bytes);
    opts.keep = 77;
    imp_store_opts_switches(&opts, &sw);
    assert_int_equal(opts.keep, 77);
    imp_store_opts_switches(NULL, &sw);
    imp_store_opts_switches(&opts, NULL);
}

/* Whichever allocation fails, on either thread: KV is stored or it isn't, and what is there is sound. */
static void quiet(imp_log_level level, const char *line, void *user) { (void)level, (void)line, (void)user; }

/* `learn`: with no bases there yet. */
static void each_allocation(const char *dir, bool learn)
{
    uint64_t n = 0;
    unsigned n_stored = 0;
    for (uint64_t nth = 0; nth <= n; nth += nth < 40 ? 1 : 1 + imp_test_seed() % 3) {
        imp_store_opts opts;
        imp_path path;
        imp_commit *c;
        uint64_t header_bytes;
        imp_store_opts_init(&opts);
        opts.keep = IMP_KEEP_SKETCH | IMP_KEEP_PROBE | IMP_KEEP_PAIRED;
        opts.rest = IMP_REST_Q8;
        opts.order = IMP_ORDER_CORE;
        opts.chunk_tokens = 16;
        imp_store *s = open_store(dir, &opts);
        imp_space *space = open_space(s, true);
        char basis[64], hex[33];
        imp_space_id(space, hex);
        snprintf(basis, sizeof basis, "bases/%s.basis", hex);
        if (learn) (void)unlink(imp_test_path(dir, basis));
        imp_alloc_fail_at(nth, 0);
        int rc = imp_commit_begin(space, tokens, N_TOKENS, 0, 0, &c);
        for (uint32_t l = 0; rc == 0 && l < N_LAYERS; l++) {
            imp_query q = query_of(l);
            rc = imp_commit_rows(c, l, 0, N_TOKENS, keys[l][0], MAX_ROW * 2, values[l][0], MAX_ROW * 2);
            if (rc == 0) (void)imp_commit_queries(c, l, N_TOKENS - N_ROWS, &q);
        }
        if (rc == 0) rc = imp_commit_finish(c);
        (void)imp_store_flush(s);
        if (nth == 0) n = imp_alloc_fail_at(0, 0) + 3;
        imp_alloc_fail_at(0, 0);
        assert_int_equal(s->backlog, 0);
        assert_int_equal(imp_store_match(s, space->id, tokens, N_TOKENS, true, &path, &header_bytes), 0);
        n_stored += path.n_tokens == N_TOKENS;
        imp_store_unpin(s, &path);
        assert_int_equal(imp_store_verify(s, 0, NULL, NULL, NULL), 0);
        assert_int_equal(imp_store_remove(s, 0), 0);
        imp_space_close(space);
        imp_store_close(s);
    }
    assert_true(n_stored >= 3);
}

static void every_allocation(void **state)
{
    imp_log_set(quiet, NULL, IMP_LOG_ERROR);
    each_allocation(*state, false);
    each_allocation(*state, true);
    imp_log_set(NULL, NULL, IMP_LOG_WARN);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(every_kind), TEST(the_last_rows), TEST(queries_refused),      TEST(without),
        TEST(raw_blocks), TEST(switches),      TEST(descriptions_refused), TEST(every_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
