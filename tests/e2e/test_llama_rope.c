/* What the adapter knows of the graph beyond cells: how keys are turned by their positions, and the last queries of a
 * prompt. Looks at its inside. */
#include "llama_fixture.h"

#include "../../engines/llama/adapter.h"

enum { N = 90 };

static float half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h >> 15) << 31, exponent = (h >> 10) & 31, mantissa = h & 1023, bits;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * ldexpf((float)mantissa, -24);
    bits = sign | (exponent + 112) << 23 | mantissa << 13;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* Take RoPE off a key as the header of the library defines it, in double: no YaRN here. */
static void undo(const imp_rope *r, size_t position, double *key)
{
    assert_true(r->ext_factor == 0 && r->n_dims > 0);
    for (uint32_t i = 0; i < r->n_dims / 2; i++) {
        double angle = (double)position * pow(r->base, -2.0 * i / r->n_dims) / (r->factors ? r->factors[i] : 1.0) *
                       r->freq_scale;
        size_t a = r->first_dim + (r->pairs == IMP_ROPE_NEOX ? i : 2 * i);
        size_t b = r->pairs == IMP_ROPE_NEOX ? a + r->n_dims / 2 : a + 1;
        double x = key[a], y = key[b];
        key[a] = (x * cos(angle) + y * sin(angle)) / r->attn_factor;
        key[b] = (y * cos(angle) - x * sin(angle)) / r->attn_factor;
    }
}

/* Key of `layer` and KV head `head` in a cell, without RoPE where `position` isn't SIZE_MAX. */
static void key_of(imp_llama *ctx, size_t layer, uint32_t head, uint32_t cell, size_t position, double *key)
{
    const lc_site *s = &ctx->sites[layer];
    const uint16_t *row = (const uint16_t *)((const char *)s->k->data + cell * s->k->nb[1]);
    for (uint32_t d = 0; d < s->shape.head_dim_k; d++) key[d] = half_to_float(row[head * s->shape.head_dim_k + d]);
    if (position != SIZE_MAX) undo(&s->rope, position, key);
}

static double distance(const double *a, const double *b, uint32_t n)
{
    double d = 0, norm = 0;
    for (uint32_t i = 0; i < n; i++) d += (a[i] - b[i]) * (a[i] - b[i]), norm += a[i] * a[i];
    return sqrt(d / norm);
}

/* In the first layer a key depends on the token alone, but for RoPE. */
static void test_keys_turn_back(void **state)
{
    (void)state;
    imp_store *store = open_store();
    imp_llama *ctx = open_llama(store, context_params());
    assert_null(ctx->probe.no_ropes);
    prompt p = make_prompt(N, question_a);
    p.n = N;
    for (int i = 3; i < N; i += 17) p.tokens[i] = p.tokens[1];
    assert_int_equal(feed(ctx, &p, 0, 0, p.n, 512), 0);

    const lc_site *site = &ctx->sites[0];
    double first[512], other[512], turned[512];
    assert_true(site->shape.head_dim_k <= 512);
    double farthest = 0;
    for (uint32_t h = 0; h < site->shape.n_kv_heads; h++) {
        key_of(ctx, 0, h, ctx->seqs[0].cells[1], 1, first);
        for (int i = 3; i < N; i += 17) {
            key_of(ctx, 0, h, ctx->seqs[0].cells[i], (size_t)i, other);
            key_of(ctx, 0, h, ctx->seqs[0].cells[i], SIZE_MAX, turned);
            double d = distance(first, other, site->shape.head_dim_k);
            if (d > 2e-3) fail_msg("head %u, position %d: %g", h, i, d);
            double t = distance(first, turned, site->shape.head_dim_k);
            if (t > farthest) farthest = t;
        }
    }
    assert_true(farthest > 0.01); /* so the test can fail */
    imp_llama_free(ctx);
    imp_store_close(store);
}

static void test_rotated_keys_are_known_as_such(void **state)
{
    (void)state;
    imp_store *store = open_store();
    struct llama_context_params cp = context_params();
    cp.type_k = cp.type_v = GGML_TYPE_Q8_0;
    imp_llama *ctx = open_llama(store, cp);
    bool rotated = ctx->sites[0].shape.head_dim_k % 64 == 0;
    assert_int_equal(ctx->probe.no_ropes != NULL, rotated);
    imp_llama_request r = request("as-h2o-lru", 0.25);
    r.load.switches.identify = IMP_IDENTIFY_SKETCH;
    if (rotated) assert_non_null(strstr(imp_llama_note(ctx, &r), "all keys"));
    imp_llama_free(ctx);

    assert_int_equal(setenv("LLAMA_ATTN_ROT_DISABLE", "1", 1), 0);
    ctx = open_llama(store, cp);
    assert_null(ctx->probe.no_ropes);
    imp_llama_free(ctx);
    unsetenv("LLAMA_ATTN_ROT_DISABLE");
    imp_store_close(store);
}

/* Queries of the last tokens, cut into batches and ubatches in any way, are those of one batch. */
static void test_last_queries(void **state)
{
    (void)state;
    prompt p = make_prompt(2 * N, question_a);
    static const struct {
        int first, step; /* tokens of the first decode, of the others */
        uint32_t ubatch;
    } cuts[] = {{512, 512, 512}, {2 * N, 512, 256}, {2 * N, 7, 256}, {512, 512, 48}, {150, 40, 32}, {512, 512, 64}};
    float *want = NULL;
    size_t n_floats = 0;
    for (size_t c = 0; c < sizeof cuts / sizeof *cuts; c++) {
        imp_store *store = open_store();
        struct llama_context_params cp = context_params();
        cp.n_ubatch = cuts[c].ubatch;
        imp_llama *ctx = open_llama(store, cp);
        imp_llama_request r = request("as", 1);
        r.recompute = true; /* the second cut would find what the first stored */
        assert_int_equal(imp_llama_set_request(ctx, 0, &r), 0);
        int first = cuts[c].first < p.n ? cuts[c].first : p.n;
        assert_int_equal(feed(ctx, &p, 0, 0, first, 512), 0);
        assert_int_equal(feed(ctx, &p, 0, first, p.n, cuts[c].step), 0);
        const lc_queries *q = &ctx->seqs[0].queries;
        assert_int_equal(q->n, LC_QUERY_ROWS);
        assert_int_equal(q->first, p.n - LC_QUERY_ROWS);
        const lc_site *last = &ctx->sites[ctx->n_sites - 1];
        n_floats = last->queries_at + (size_t)LC_QUERY_ROWS * last->n_heads * last->shape.head_dim_k;
        if (!want) {
            want = malloc(n_floats * sizeof *want);
            assert_non_null(want);
            memcpy(want, q->rows, n_floats * sizeof *want);
        }
        double d = 0, norm = 0;
        for (size_t i = 0; i < n_floats; i++) {
            d += (want[i] - q->rows[i]) * (want[i] - q->rows[i]);
            norm += want[i] * want[i];
        }
        if (!(sqrt(d / norm) < 0.02)) fail_msg("cut %zu: %g", c, sqrt(d / norm));

        /* One that changes takes them away; one that is generated from doesn't add any. */
        p.tokens[p.n++] = 5;
        assert_int_equal(feed(ctx, &p, 0, p.n - 1, p.n, 1), 0);
        p.n--;
        assert_true(q->n == 0 || q->first + q->n == (size_t)p.n);
        imp_llama_seq_rm(ctx, 0, p.n - 10, -1);
        assert_int_equal(q->n, 0);
        assert_null(q->rows);
        imp_llama_free(ctx);
        imp_store_close(store);
    }
    free(want);
}

/* None are kept where nothing will be stored, and of two sequences each has its own. */
static void test_queries_of_whom(void **state)
{
    (void)state;
    prompt a = make_prompt(N, question_a), b = make_prompt(N + 20, question_b);
    imp_store *store = open_store();
    imp_llama *ctx = open_llama(store, context_params());
    imp_llama_request r = request("as", 1);
    r.store_new = false;
    assert_int_equal(imp_llama_set_request(ctx, 0, &r), 0);
    assert_int_equal(feed(ctx, &a, 0, 0, a.n, 512), 0);
    assert_null(ctx->seqs[0].queries.rows);
    imp_llama_clear(ctx);

    r.store_new = true;
    r.recompute = true;
    for (int seq = 0; seq < 2; seq++) assert_int_equal(imp_llama_set_request(ctx, seq, &r), 0);
    struct llama_batch both = llama_batch_init(a.n + b.n, 0, 1);
    for (int i = 0; i < a.n || i < b.n; i++) { /* interleaved */
        if (i < a.n) put(&both, a.tokens[i], i, 0, i + 1 == a.n);
        if (i < b.n) put(&both, b.tokens[i], i, 1, i + 1 == b.n);
    }
    assert_int_equal(imp_llama_decode(ctx, both), 0);
    llama_batch_free(both);
    size_t n_floats = ctx->sites[1].queries_at; /* of the first layer */
    float *mixed[2];
    for (int seq = 0; seq < 2; seq++) {
        const lc_queries *q = &ctx->seqs[seq].queries;
        assert_int_equal(q->n, LC_QUERY_ROWS);
        assert_int_equal(q->first + q->n, seq ? b.n : a.n);
        mixed[seq] = malloc(n_floats * sizeof(float));
        assert_non_null(mixed[seq]);
        memcpy(mixed[seq], q->rows, n_floats * sizeof(float));
    }
    imp_llama_clear(ctx);
    for (int seq = 0; seq < 2; seq++) {
        const prompt *p = seq ? &b : &a;
        assert_int_equal(feed(ctx, p, seq, 0, p->n, 512), 0);
        double d = 0, norm = 0;
        for (size_t i = 0; i < n_floats; i++) {
            double x = ctx->seqs[seq].queries.rows[i], y = mixed[seq][i];
            d += (x - y) * (x - y);
            norm += x * x;
        }
        if (!(sqrt(d / norm) < 1e-3)) fail_msg("sequence %d: %g", seq, sqrt(d / norm));
        free(mixed[seq]);
    }
    imp_llama_free(ctx);
    imp_store_close(store);
}

int main(void)
{
    need_model();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_keys_turn_back, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_rotated_keys_are_known_as_such, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_last_queries, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_queries_of_whom, make_dir, drop_dir),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    llama_model_free(model);
    llama_backend_free();
    return rc;
}
