/* Sketches: the linear algebra below, codes against a twin that reads the documented bytes, what a sketch is for. */
#include "unit/select/select_util.h"

#include <stdbool.h>

#include "base/bytes.h"
#include "impress/impress.h"
#include "select/half.h"
#include "select/kernels.h"
#include "select/linear.h"
#include "select/sketch.h"

/* --------------------------------------------------------------------------------------------- linear algebra ---- */

static void multiply(void **state)
{
    (void)state;
    imp_rng rng = test_rng("multiply");
    for (int round = 0; round < 200; round++) {
        size_t rows = imp_rng_below(&rng, 20), inner = imp_rng_below(&rng, 90);
        size_t columns = IMP_LINEAR_COLUMNS * (1 + imp_rng_below(&rng, 9)), a_stride = inner + imp_rng_below(&rng, 3);
        size_t b_stride = columns + imp_rng_below(&rng, 3), out_stride = columns + imp_rng_below(&rng, 3);
        float *a = test_alloc(rows * a_stride * sizeof *a), *b = test_alloc(inner * b_stride * sizeof *b);
        float *start = test_alloc(columns * sizeof *start), *out = test_alloc(rows * out_stride * sizeof *out);
        for (size_t i = 0; i < rows * a_stride; i++) a[i] = test_uniform(&rng, -1, 1);
        for (size_t i = 0; i < inner * b_stride; i++) b[i] = test_uniform(&rng, -1, 1);
        for (size_t i = 0; i < columns; i++) start[i] = test_uniform(&rng, -1, 1);
        for (int isa = 0; isa < TEST_ISAS; isa++) {
            if (imp_select_force_isa(test_isas[isa]) < 0) continue;
            bool from = imp_rng_below(&rng, 2);
            for (size_t i = 0; i < rows * out_stride; i++) out[i] = 77.0f;
            imp_multiply(a, a_stride, rows, b, b_stride, inner, columns, from ? start : NULL, out, out_stride);
            for (size_t r = 0; r < rows; r++) {
                for (size_t c = 0; c < out_stride; c++) {
                    double want = from && c < columns ? (double)start[c] : 0.0;
                    for (size_t i = 0; c < columns && i < inner; i++) {
                        want += (double)a[r * a_stride + i] * (double)b[i * b_stride + c];
                    }
                    if (c >= columns) want = 77.0;
                    assert_true(fabs((double)out[r * out_stride + c] - want) < 1e-4);
                }
            }
        }
        imp_select_force_isa(NULL);
        imp_free(out);
        imp_free(start);
        imp_free(b);
        imp_free(a);
    }
}

/* m = sum of `rank` outer products, each with a weight of its own. */
static void some_symmetric(imp_rng *rng, double *m, size_t n, size_t rank)
{
    memset(m, 0, n * n * sizeof *m);
    double *x = test_alloc(n * sizeof *x);
    for (size_t r = 0; r < rank; r++) {
        double weight = exp(8.0 * imp_rng_unit(rng) - 4.0) * (imp_rng_below(rng, 4) ? 1.0 : -1.0);
        for (size_t i = 0; i < n; i++) x[i] = imp_rng_unit(rng) - 0.5;
        for (size_t i = 0; i < n; i++) {
            for (size_t j = 0; j < n; j++) m[i * n + j] += weight * x[i] * x[j];
        }
    }
    imp_free(x);
}

static void check_eigen(const double *m, size_t n)
{
    double *copy = test_alloc(n * n * sizeof *copy), *values = test_alloc(n * sizeof *values);
    double *vectors = test_alloc(n * n * sizeof *vectors), *scratch = test_alloc(3 * n * sizeof *scratch);
    double largest = 1e-300;
    memcpy(copy, m, n * n * sizeof *copy);
    for (size_t i = 0; i < n * n; i++) largest = fabs(m[i]) > largest ? fabs(m[i]) : largest;
    imp_eigen(copy, n, values, vectors, scratch);
    for (size_t r = 0; r < n; r++) {
        const double *v = vectors + r * n;
        if (r > 0) assert_true(values[r] <= values[r - 1]);
        for (size_t i = 0; i < n; i++) {
            double mv = 0.0;
            for (size_t j = 0; j < n; j++) mv += m[i * n + j] * v[j];
            assert_true(fabs(mv - values[r] * v[i]) <= 1e-12 * (double)n * largest);
        }
        for (size_t s = 0; s <= r; s++) {
            double dot = 0.0;
            for (size_t i = 0; i < n; i++) dot += v[i] * vectors[s * n + i];
            assert_true(fabs(dot - (r == s)) < 1e-12 * (double)n);
        }
    }
    imp_free(scratch);
    imp_free(vectors);
    imp_free(values);
    imp_free(copy);
}

static void eigenvectors(void **state)
{
    (void)state;
    imp_rng rng = test_rng("eigenvectors");
    for (int round = 0; round < 60; round++) {
        size_t n = 1 + imp_rng_below(&rng, round % 10 ? 24 : 80);
        double *m = test_alloc(n * n * sizeof *m);
        some_symmetric(&rng, m, n, round % 3 == 0 ? 1 + n / 4 : 2 * n);
        if (round % 7 == 0) memset(m, 0, n * n * sizeof *m);
        if (round % 7 <= 1) { /* on top: all equal */
            for (size_t i = 0; i < n; i++) m[i * n + i] += 3.0;
        }
        if (round % 7 == 2) { /* diagonal, falling or rising */
            for (size_t i = 0; i < n * n; i++) m[i] = i % (n + 1) ? 0.0 : (double)(i / n) * (round % 2 ? 1.0 : -1.0);
        }
        check_eigen(m, n);
        imp_free(m);
    }
}

static void cholesky(void **state)
{
    (void)state;
    imp_rng rng = test_rng("cholesky");
    for (int round = 0; round < 100; round++) {
        size_t n = 1 + imp_rng_below(&rng, 30);
        double *m = test_alloc(n * n * sizeof *m), *l = test_alloc(n * n * sizeof *l);
        some_symmetric(&rng, m, n, n);
        for (size_t i = 0; i < n * n; i++) l[i] = 0.0; /* m m^T + 1: positive definite */
        for (size_t i = 0; i < n; i++) {
            for (size_t j = 0; j < n; j++) {
                l[i * n + j] = i == j;
                for (size_t k = 0; k < n; k++) l[i * n + j] += m[i * n + k] * m[j * n + k];
            }
        }
        memcpy(m, l, n * n * sizeof *m);
        assert_int_equal(imp_cholesky(l, n), 0);
        for (size_t i = 0; i < n; i++) {
            for (size_t j = 0; j < n; j++) {
                double want = 0.0;
                for (size_t k = 0; k < n; k++) want += l[i * n + k] * l[j * n + k];
                assert_true(fabs(want - m[i * n + j]) <= 1e-10 * (1.0 + fabs(want)));
                if (j > i) assert_true(l[i * n + j] == 0.0);
            }
        }
        m[(n - 1) * n + n - 1] = -1.0;
        assert_int_equal(imp_cholesky(m, n), -1);
        imp_free(l);
        imp_free(m);
    }
}

/* --------------------------------------------------------------------------------------------------- sketches ---- */

/* A layer: keys near a small subspace, with a mean of some size, and with RoPE; queries that look along a few of its
 * directions. */
typedef struct layer {
    uint32_t n_kv, dim, n_heads;
    size_t n_tokens, n_rows, first;
    float *keys; /* [token][kv][dim], with RoPE */
    float *q;
    imp_rope_table *rope; /* or NULL */
    imp_key_rows rows;
    imp_query query;
} layer;

static void make_layer(layer *l, imp_rng *rng, uint32_t n_kv, uint32_t dim, size_t n_tokens)
{
    *l = (layer){.n_kv = n_kv, .dim = dim, .n_heads = n_kv * (1 + (uint32_t)imp_rng_below(rng, 3)),
                 .n_tokens = n_tokens, .n_rows = 1 + imp_rng_below(rng, 20), .first = imp_rng_below(rng, 100)};
    l->keys = test_alloc(n_tokens * n_kv * dim * sizeof *l->keys);
    l->q = test_alloc(l->n_rows * l->n_heads * dim * sizeof *l->q);
    if (imp_rng_below(rng, 5)) {
        imp_rope r = {.pairs = imp_rng_below(rng, 2) ? IMP_ROPE_NEOX : IMP_ROPE_NORM,
                      .n_dims = dim < 4 ? 2 : dim / 4 * 2, .base = 1e4f, .freq_scale = 1.0f, .attn_factor = 1.25f};
        assert_int_equal(imp_rope_table_new(&r, dim, l->first, n_tokens, &l->rope), 0);
    }
    uint32_t rank = dim < 4 ? 1 : dim / 4;
    float *basis = test_alloc(rank * dim * sizeof *basis), *mean = test_alloc(dim * sizeof *mean);
    for (uint32_t h = 0; h < n_kv; h++) {
        for (size_t i = 0; i < rank * dim; i++) basis[i] = test_uniform(rng, -1, 1);
        for (size_t d = 0; d < dim; d++) mean[d] = test_uniform(rng, -8, 8);
        for (size_t t = 0; t < n_tokens; t++) {
            float *k = l->keys + (t * n_kv + h) * dim;
            for (size_t d = 0; d < dim; d++) k[d] = mean[d] + test_uniform(rng, -0.1f, 0.1f);
            for (uint32_t r = 0; r < rank; r++) {
                float x = test_uniform(rng, -2, 2) / (1.0f + (float)r);
                for (size_t d = 0; d < dim; d++) k[d] += x * basis[r * dim + d];
            }
        }
        if (l->rope) imp_rope_apply(l->rope, l->first, l->keys + h * dim, n_kv * dim, n_tokens);
    }
    for (size_t i = 0; i < l->n_rows * l->n_heads * dim; i++) l->q[i] = test_uniform(rng, -0.5f, 0.5f);
    l->rows = (imp_key_rows){.type = IMP_TYPE_F32, .n_kv_heads = n_kv, .head_dim = dim, .rows = l->keys,
                             .stride = n_kv * dim * sizeof(float), .n_tokens = n_tokens, .first_position = l->first};
    l->query = (imp_query){.q = l->q, .row_stride = l->n_heads * dim, .head_stride = dim, .n_rows = l->n_rows,
                           .n_heads = l->n_heads, .scale = 1.0f / sqrtf((float)dim)};
    imp_free(mean);
    imp_free(basis);
}

static void free_layer(layer *l)
{
    imp_rope_table_free(l->rope);
    imp_free(l->q);
    imp_free(l->keys);
}

static uint32_t some_bits(imp_rng *rng, uint32_t dim) { return 8 + 8 * (uint32_t)imp_rng_below(rng, dim / 2); }

static float wire_f16(const unsigned char *p) { return imp_f32_of_f16((uint16_t)(p[0] | p[1] << 8)); }
static float wire_f32(const unsigned char *p) { return imp_f32_of_bits(imp_get32(p)); }

/* Reads basis and codes by the words of sketch.h. `key` NULL: the key of token t's code without RoPE goes to out[dim];
 * else *worst becomes the farthest that a code lies from the coordinate it should hold, in steps. */
static void twin(const unsigned char *wire, const unsigned char *codes, uint32_t h, size_t t, const float *key,
                 double *out, double *worst)
{
    uint32_t n_kv = imp_get32(wire + 4), dim = imp_get32(wire + 8), n_bits = imp_get32(wire + 12);
    const unsigned char *p = wire + 16;
    for (;; h--) {
        uint32_t n = imp_get32(p) + imp_get32(p + 4);
        if (h == 0) break;
        p += 8 + 2 * dim + n * (8 + 4 * dim);
    }
    uint32_t which = 0;
    for (const unsigned char *s = wire + 16; s < p; which++) {
        s += 8 + 2 * dim + (imp_get32(s) + imp_get32(s + 4)) * (8 + 4 * dim);
    }
    uint32_t n4 = imp_get32(p), n = n4 + imp_get32(p + 4);
    const unsigned char *mean = p + 8, *ds = mean + 2 * dim, *es = ds + 4 * n, *dec = es + 4 * n;
    const unsigned char *enc = dec + 2 * n * dim;
    codes += (t * n_kv + which) * (n_bits / 8);
    for (uint32_t d = 0; d < dim; d++) out[d] = (double)wire_f16(mean + 2 * d);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bit = i < n4 ? 4 * i : 4 * n4 + 2 * (i - n4);
        uint32_t code = (uint32_t)codes[bit / 8] >> bit % 8 & (i < n4 ? 15u : 3u);
        double steps = (double)code - (i < n4 ? 7.5 : 1.5), limit = i < n4 ? 7.5 : 1.5;
        if (!key) {
            for (uint32_t d = 0; d < dim; d++) {
                out[d] += steps * (double)wire_f32(ds + 4 * i) * (double)wire_f16(dec + 2 * (i * dim + d));
            }
            continue;
        }
        double x = 0.0, rounding = 0.0; /* of keys in float, which matters where a direction has hardly any extent */
        for (uint32_t d = 0; d < dim; d++) {
            double e = (double)wire_f16(enc + 2 * (i * dim + d)) * (double)wire_f32(es + 4 * i);
            x += ((double)key[d] - (double)wire_f16(mean + 2 * d)) * e;
            rounding += 4e-6 * fabs(e);
        }
        x = x < -limit ? -limit : x > limit ? limit : x;
        *worst = fmax(*worst, fabs(x - steps) - rounding);
    }
}

static void codes_mean_what_is_documented(void **state)
{
    (void)state;
    imp_rng rng = test_rng("codes_mean_what_is_documented");
    static const uint32_t dims[] = {2, 8, 20, 32, 40, 64, 80, 128};
    for (int round = 0; round < 30; round++) {
        layer l;
        uint32_t dim = dims[imp_rng_below(&rng, 8)];
        make_layer(&l, &rng, 1 + (uint32_t)imp_rng_below(&rng, 3), dim, 1 + imp_rng_below(&rng, 150));
        imp_basis *b;
        uint32_t n_bits = round % 2 ? imp_sketch_bits(dim) : some_bits(&rng, dim);
        assert_int_equal(imp_basis_learn(&l.rows, round % 3 ? &l.query : NULL, 8, l.rope, n_bits, &b), 0);
        size_t n_wire, token_bytes = imp_sketch_token_bytes(b);
        const unsigned char *wire = imp_basis_bytes(b, &n_wire);
        assert_int_equal(token_bytes, l.n_kv * n_bits / 8);
        assert_true(imp_basis_kv_heads(b) == l.n_kv && imp_basis_head_dim(b) == dim);
        unsigned char *codes = test_alloc(l.n_tokens * token_bytes);
        assert_int_equal(imp_sketch_encode(b, &l.rows, l.rope, codes), 0);

        float *plain = test_alloc(l.n_tokens * l.n_kv * dim * sizeof *plain);
        float *rebuilt = test_alloc(l.n_tokens * l.n_kv * dim * sizeof *rebuilt);
        memcpy(plain, l.keys, l.n_tokens * l.n_kv * dim * sizeof *plain);
        for (uint32_t h = 0; l.rope && h < l.n_kv; h++) {
            imp_rope_undo(l.rope, l.first, plain + h * dim, l.n_kv * dim, l.n_tokens);
        }
        double *key = test_alloc(dim * sizeof *key), worst = 0.0;
        for (int isa = 0; isa < TEST_ISAS; isa++) {
            if (imp_select_force_isa(test_isas[isa]) < 0) continue;
            imp_sketch_rebuild(b, codes, l.n_tokens, l.first, l.rope, rebuilt);
            for (uint32_t h = 0; h < l.n_kv; h++) {
                if (l.rope) imp_rope_undo(l.rope, l.first, rebuilt + h * dim, l.n_kv * dim, l.n_tokens);
                for (size_t t = 0; t < l.n_tokens; t++) {
                    twin(wire, codes, h, t, NULL, key, NULL);
                    for (uint32_t d = 0; d < dim; d++) {
                        double got = (double)rebuilt[(t * l.n_kv + h) * dim + d];
                        assert_true(fabs(got - key[d]) < 2e-4 * (1.0 + fabs(key[d])));
                    }
                    twin(wire, codes, h, t, plain + (t * l.n_kv + h) * dim, key, &worst);
                }
            }
        }
        imp_select_force_isa(NULL);
        assert_true(worst < 0.51);
        imp_free(key);
        imp_free(rebuilt);
        imp_free(plain);
        imp_free(codes);
        imp_basis_free(b);
        free_layer(&l);
    }
}

/* Error of q . k over all tokens and the queries, beside what the mean key alone would give. */
static double relative_error(const layer *l, const imp_basis *b)
{
    unsigned char *codes = test_alloc(l->n_tokens * imp_sketch_token_bytes(b));
    float *keys = test_alloc(l->n_tokens * l->n_kv * l->dim * sizeof *keys);
    assert_int_equal(imp_sketch_encode(b, &l->rows, l->rope, codes), 0);
    imp_sketch_rebuild(b, codes, l->n_tokens, l->first, l->rope, keys);
    double error = 0.0, all = 0.0;
    for (size_t r = 0; r < l->n_rows; r++) {
        for (uint32_t h = 0; h < l->n_heads; h++) {
            const float *q = l->q + (r * l->n_heads + h) * l->dim;
            double sum = 0.0, squares = 0.0;
            for (size_t t = 0; t < l->n_tokens; t++) {
                size_t at = (t * l->n_kv + h / (l->n_heads / l->n_kv)) * l->dim;
                double exact = 0.0, got = 0.0;
                for (uint32_t d = 0; d < l->dim; d++) {
                    exact += (double)q[d] * (double)l->keys[at + d];
                    got += (double)q[d] * (double)keys[at + d];
                }
                error += (exact - got) * (exact - got);
                sum += exact;
                squares += exact * exact;
            }
            all += squares - sum * sum / (double)l->n_tokens;
        }
    }
    imp_free(keys);
    imp_free(codes);
    return error / all;
}

static void what_a_sketch_is_for(void **state)
{
    (void)state;
    imp_rng rng = test_rng("what_a_sketch_is_for");
    double plain_sum = 0.0, weighted_sum = 0.0;
    for (int round = 0; round < 8; round++) {
        layer l;
        make_layer(&l, &rng, 2, 64, 300);
        imp_basis *plain, *weighted, *rich;
        /* Queries that look along few directions: it pays to know them. */
        float look[4 * 64];
        for (int i = 0; i < 4 * 64; i++) look[i] = test_uniform(&rng, -1, 1);
        for (size_t i = 0; i < l.n_rows * l.n_heads; i++) {
            for (int d = 0; d < 64; d++) l.q[i * 64 + (size_t)d] *= 0.02f;
            for (int j = 0; j < 4; j++) {
                float x = test_uniform(&rng, -1, 1);
                for (int d = 0; d < 64; d++) l.q[i * 64 + (size_t)d] += x * look[j * 64 + d];
            }
        }
        assert_int_equal(imp_basis_learn(&l.rows, NULL, 0, l.rope, 32, &plain), 0);
        assert_int_equal(imp_basis_learn(&l.rows, &l.query, 32, l.rope, 32, &weighted), 0);
        assert_int_equal(imp_basis_learn(&l.rows, &l.query, 32, l.rope, 256, &rich), 0);
        double p = relative_error(&l, plain), w = relative_error(&l, weighted), r = relative_error(&l, rich);
        assert_true(p < 0.5 && w < 0.5 && r < 0.02);
        plain_sum += p;
        weighted_sum += w;
        imp_basis_free(rich);
        imp_basis_free(weighted);
        imp_basis_free(plain);
        free_layer(&l);
    }
    printf("error of q . k: %.4f, with queries known %.4f\n", plain_sum / 8, weighted_sum / 8);
    assert_true(weighted_sum < plain_sum);
}

/* Codes are made token by token: in pieces, of any type, they are the same; and scoring is rebuilding and scoring. */
static void pieces(void **state)
{
    (void)state;
    imp_rng rng = test_rng("pieces");
    imp_pool *pool;
    assert_int_equal(imp_pool_new(2, &pool), 0);
    for (int round = 0; round < 20; round++) {
        layer l;
        make_layer(&l, &rng, 2, 32, 20 + imp_rng_below(&rng, 300));
        size_t n = l.n_tokens, row = l.n_kv * l.dim, cut = 1 + imp_rng_below(&rng, n - 1);
        uint16_t *half = test_alloc(n * row * sizeof *half);
        for (size_t i = 0; i < n * row; i++) half[i] = imp_f16_of_f32(l.keys[i]);
        imp_key_rows rows = l.rows, tail;
        rows.type = IMP_TYPE_F16;
        rows.rows = half;
        rows.stride = row * sizeof *half;
        imp_basis *b, *other;
        assert_int_equal(imp_basis_learn(&rows, &l.query, 8, l.rope, 32, &b), 0);
        assert_int_equal(imp_basis_learn(&rows, NULL, 8, l.rope, 48, &other), 0);
        size_t token_bytes = imp_sketch_token_bytes(b);
        unsigned char *whole = test_alloc(n * token_bytes), *parts = test_alloc(n * token_bytes);
        unsigned char *rest = test_alloc((n - cut) * imp_sketch_token_bytes(other));
        assert_int_equal(imp_sketch_encode(b, &rows, l.rope, whole), 0);
        tail = rows;
        rows.n_tokens = cut;
        tail.n_tokens = n - cut;
        tail.first_position += cut;
        tail.rows = half + cut * row;
        assert_int_equal(imp_sketch_encode(b, &rows, l.rope, parts), 0);
        assert_int_equal(imp_sketch_encode(b, &tail, l.rope, parts + cut * token_bytes), 0);
        assert_memory_equal(whole, parts, n * token_bytes);
        assert_int_equal(imp_sketch_encode(other, &tail, l.rope, rest), 0);

        imp_scorer *s;
        assert_int_equal(imp_scorer_new(n, 32, l.n_heads, l.dim, pool, &s), 0);
        float *keys = test_alloc(n * row * sizeof *keys), *scores = test_alloc(n * sizeof *scores);
        float *want = test_alloc(n * sizeof *want);
        const imp_sketch_run runs[] = {{b, whole, cut}, {other, rest, 0}, {other, rest, n - cut}};
        assert_int_equal(imp_sketch_score(s, runs, 3, l.first, l.rope, &l.query, 16, scores, NULL), 0);
        imp_sketch_rebuild(b, whole, cut, l.first, l.rope, keys);
        imp_sketch_rebuild(other, rest, n - cut, l.first + cut, l.rope, keys + cut * row);
        const imp_key_run run = {keys, n};
        const imp_keys exact = {.type = IMP_TYPE_F32, .n_kv_heads = l.n_kv, .head_dim = l.dim, .runs = &run,
                                .n_runs = 1, .n_tokens = n};
        assert_int_equal(imp_score_h2o(s, &l.query, 16, &exact, want, NULL), 0);
        assert_memory_equal(scores, want, n * sizeof *want);
        imp_free(want);
        imp_free(scores);
        imp_free(keys);
        imp_scorer_free(s);
        imp_free(rest);
        imp_free(parts);
        imp_free(whole);
        imp_basis_free(other);
        imp_basis_free(b);
        imp_free(half);
        free_layer(&l);
    }
    imp_pool_free(pool);
}

static void same_after_parsing(void **state)
{
    (void)state;
    imp_rng rng = test_rng("same_after_parsing");
    layer l;
    make_layer(&l, &rng, 2, 16, 60);
    imp_basis *b, *again;
    assert_int_equal(imp_basis_learn(&l.rows, &l.query, 8, l.rope, 24, &b), 0);
    size_t n, n_again;
    const unsigned char *wire = imp_basis_bytes(b, &n);
    assert_int_equal(imp_basis_parse(wire, n, &again), 0);
    const void *wire_again = imp_basis_bytes(again, &n_again);
    assert_int_equal(n, n_again);
    assert_memory_equal(wire, wire_again, n);
    unsigned char codes[60 * 6], codes_again[60 * 6];
    assert_int_equal(imp_sketch_token_bytes(again), 6);
    assert_int_equal(imp_sketch_encode(b, &l.rows, l.rope, codes), 0);
    assert_int_equal(imp_sketch_encode(again, &l.rows, l.rope, codes_again), 0);
    assert_memory_equal(codes, codes_again, sizeof codes);
    imp_basis_free(again);

    for (size_t cut = 0; cut < n; cut++) {
        unsigned char *part = test_alloc(cut);
        memcpy(part, wire, cut);
        assert_int_equal(imp_basis_parse(part, cut, &again), IMP_E_CORRUPT);
        assert_null(again);
        imp_free(part);
    }
    unsigned char *bad = test_alloc(n + 1);
    memcpy(bad, wire, n);
    bad[n] = 0;
    assert_int_equal(imp_basis_parse(bad, n + 1, &again), IMP_E_CORRUPT);
    imp_put32(bad, 2);
    assert_int_equal(imp_basis_parse(bad, n, &again), IMP_E_VERSION);
    imp_free(bad);
    bad = test_alloc(n);
    float *keys = test_alloc(60 * 2 * 16 * sizeof *keys);
    for (int round = 0; round < 2000; round++) {
        memcpy(bad, wire, n);
        for (uint64_t i = imp_rng_below(&rng, 4) + 1; i > 0; i--) {
            size_t at = imp_rng_below(&rng, round % 2 ? 32 : n);
            bad[at] ^= (unsigned char)(1u << imp_rng_below(&rng, 8));
        }
        if (imp_basis_parse(bad, n, &again) < 0) continue;
        imp_sketch_rebuild(again, codes, 60 * 6 / imp_sketch_token_bytes(again), l.first, NULL, keys);
        imp_basis_free(again);
    }
    imp_free(keys);
    imp_free(bad);
    imp_basis_free(b);
    free_layer(&l);
}

static void strange_keys(void **state)
{
    (void)state;
    imp_rng rng = test_rng("strange_keys");
    for (int kind = 0; kind < 8; kind++) {
        layer l;
        make_layer(&l, &rng, 1, 16, kind == 0 ? 1 : 50);
        for (size_t i = 0; i < l.n_tokens * 16; i++) {
            float *k = &l.keys[i];
            switch (kind) {
            case 1: *k = 0.0f; break;
            case 2: *k = (float)(i % 16) * 100.0f; break; /* all the same */
            case 3: *k = imp_rng_below(&rng, 5) ? *k : NAN; break;
            case 4: *k = imp_rng_below(&rng, 5) ? *k : INFINITY; break;
            case 5: *k *= 1e30f; break;
            case 6: *k *= 1e-30f; break;
            case 7: *k = i % 16 == 3 ? *k * 1e4f : *k; break; /* an outlier channel */
            default: break;
            }
        }
        if (kind % 2) l.q[0] = NAN, l.q[1] = INFINITY;
        imp_basis *b = NULL;
        unsigned char codes[50 * 8];
        float keys[50 * 16];
        for (int weighted = 0; weighted < 2; weighted++) {
            int rc = imp_basis_learn(&l.rows, weighted ? &l.query : NULL, 8, l.rope, 16, &b);
            if (kind == 5) { /* beyond what f16 can hold: any answer but a crash or a number that is none */
                if (rc < 0) continue;
            }
            assert_int_equal(rc, 0);
            assert_int_equal(imp_sketch_encode(b, &l.rows, l.rope, codes), 0);
            imp_sketch_rebuild(b, codes, l.n_tokens, l.first, l.rope, keys);
            for (size_t i = 0; i < l.n_tokens * 16; i++) {
                assert_true(isfinite(keys[i]));
                if (kind <= 2 && !l.rope) assert_true(fabsf(keys[i] - l.keys[i]) <= 0.01f + 0.001f * fabsf(l.keys[i]));
            }
            imp_basis_free(b);
        }
        free_layer(&l);
    }
}

static void bad_calls(void **state)
{
    (void)state;
    imp_rng rng = test_rng("bad_calls");
    layer l;
    make_layer(&l, &rng, 2, 16, 30);
    imp_rope r = {.n_dims = 16, .base = 1e4f, .freq_scale = 1.0f, .attn_factor = 1.0f};
    imp_rope_table *t;
    assert_int_equal(imp_rope_table_new(&r, 16, l.first, 30, &t), 0);
    imp_basis *b, *other;
    unsigned char codes[30 * 4];
    assert_int_equal(imp_basis_learn(&l.rows, NULL, 0, t, 16, &b), 0);
    static const uint32_t bits[] = {0, 4, 12, 72};
    for (int i = 0; i < 4; i++) assert_int_equal(imp_basis_learn(&l.rows, NULL, 0, t, bits[i], &other), IMP_E_ARG);
    imp_key_rows k = l.rows;
    k.n_tokens = 0;
    assert_int_equal(imp_basis_learn(&k, NULL, 0, t, 16, &other), IMP_E_ARG);
    assert_int_equal(imp_sketch_encode(b, &k, t, codes), 0);
    k = l.rows;
    k.first_position++;
    assert_int_equal(imp_basis_learn(&k, NULL, 0, t, 16, &other), IMP_E_ARG);
    assert_int_equal(imp_sketch_encode(b, &k, t, codes), IMP_E_ARG);
    k = l.rows;
    k.n_kv_heads = 1;
    assert_int_equal(imp_sketch_encode(b, &k, t, codes), IMP_E_ARG);
    k.n_kv_heads = 0;
    assert_int_equal(imp_basis_learn(&k, NULL, 0, t, 16, &other), IMP_E_ARG);
    k = l.rows;
    k.type = IMP_TYPE_Q8_0; /* 16 is no multiple of 32 */
    assert_int_equal(imp_basis_learn(&k, NULL, 0, t, 16, &other), IMP_E_UNSUPPORTED);
    imp_query q = l.query;
    q.n_heads = 3;
    assert_int_equal(imp_basis_learn(&l.rows, &q, 8, t, 16, &other), IMP_E_ARG);
    imp_scorer *s;
    float scores[30];
    assert_int_equal(imp_scorer_new(30, 32, l.n_heads, 16, NULL, &s), 0);
    assert_int_equal(imp_sketch_encode(b, &l.rows, t, codes), 0);
    const imp_sketch_run run = {b, codes, 30};
    assert_int_equal(imp_sketch_score(s, &run, 0, l.first, t, &l.query, 8, scores, NULL), IMP_E_ARG);
    assert_int_equal(imp_sketch_score(s, &run, 1, l.first + 1, t, &l.query, 8, scores, NULL), IMP_E_ARG);
    assert_int_equal(imp_sketch_score(s, &run, 1, l.first, t, &l.query, 8, scores, NULL), 0);
    imp_scorer_free(s);
    imp_basis_free(b);
    imp_basis_free(NULL);
    imp_rope_table_free(t);
    free_layer(&l);
}

static void no_memory(void **state)
{
    (void)state;
    imp_rng rng = test_rng("no_memory");
    layer l;
    make_layer(&l, &rng, 2, 16, 30);
    imp_basis *b;
    int failed = 0;
    for (uint64_t at = 1;; at++) {
        imp_alloc_fail_at(at, 0);
        int rc = imp_basis_learn(&l.rows, &l.query, 8, l.rope, 16, &b);
        imp_alloc_fail_at(0, 0);
        if (rc == 0) break;
        assert_int_equal(rc, IMP_E_NOMEM);
        assert_null(b);
        failed++;
    }
    assert_true(failed >= 6);
    imp_basis_free(b);
    free_layer(&l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(multiply),
        cmocka_unit_test(eigenvectors),
        cmocka_unit_test(cholesky),
        cmocka_unit_test(codes_mean_what_is_documented),
        cmocka_unit_test(what_a_sketch_is_for),
        cmocka_unit_test(pieces),
        cmocka_unit_test(same_after_parsing),
        cmocka_unit_test(strange_keys),
        cmocka_unit_test(bad_calls),
        cmocka_unit_test(no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
