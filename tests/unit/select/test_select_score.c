/* imp_score_h2o() against a twin in double precision, by every instruction set this machine has. */
#include "unit/select/select_util.h"

#include "base/pool.h"
#include "select/kernels.h"
#include "select/select.h"

/* A whole problem: queries and keys of all kinds of shapes, each piece in memory of exactly its size. */
typedef struct problem {
    imp_type type;
    size_t n_tokens, n_rows, max_rows, dim;
    uint32_t n_heads, n_kv;
    imp_query query;
    imp_keys keys;
    imp_key_run *runs;
    float *q;
    double *exact; /* [token][kv head][dim]: what the stored keys mean */
} problem;

static double exact_f16(uint16_t h)
{
    double sign = h & 0x8000 ? -1.0 : 1.0;
    int exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 31) return fraction ? (double)NAN : sign * (double)INFINITY;
    return exponent ? sign * ldexp(1024 + fraction, exponent - 25) : sign * ldexp(fraction, -24);
}

/* Some f16 in about [-size, size]; rounding is of no importance. */
static uint16_t some_f16(imp_rng *rng, double size)
{
    double x = (imp_rng_unit(rng) * 2.0 - 1.0) * size;
    int exponent;
    double m = frexp(fabs(x), &exponent);
    if (exponent < -13) return 0;
    unsigned bits = (unsigned)(exponent + 14) << 10 | ((unsigned)(m * 2048.0) & 1023u);
    return (uint16_t)(bits | (x < 0 ? 0x8000u : 0u));
}

static void fill_row(imp_rng *rng, imp_type type, float size, unsigned char *row, double *exact, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float f = test_uniform(rng, -size, size);
        uint16_t h = some_f16(rng, (double)size);
        uint32_t bits;
        switch (type) {
        case IMP_TYPE_F32:
            memcpy(row + 4 * i, &f, 4);
            exact[i] = (double)f;
            break;
        case IMP_TYPE_F16:
            memcpy(row + 2 * i, &h, 2);
            exact[i] = exact_f16(h);
            break;
        case IMP_TYPE_BF16:
            memcpy(&bits, &f, 4);
            h = (uint16_t)(bits >> 16);
            bits &= 0xffff0000u;
            memcpy(&f, &bits, 4);
            memcpy(row + 2 * i, &h, 2);
            exact[i] = (double)f;
            break;
        default: {
            unsigned char *block = row + i / 32 * 34;
            if (i % 32 == 0) {
                h = some_f16(rng, (double)size / 64.0);
                memcpy(block, &h, 2);
            }
            memcpy(&h, block, 2);
            signed char code = (signed char)(unsigned char)imp_rng_u64(rng);
            block[2 + i % 32] = (unsigned char)code;
            exact[i] = exact_f16(h) * code;
        }
        }
    }
}

static void make_problem(problem *p, imp_rng *rng, imp_type type, size_t n_tokens, size_t n_rows, uint32_t n_heads,
                         uint32_t n_kv, size_t dim, float key_size)
{
    memset(p, 0, sizeof *p);
    p->type = type, p->n_tokens = n_tokens, p->n_rows = n_rows, p->n_heads = n_heads, p->n_kv = n_kv, p->dim = dim;
    p->max_rows = imp_rng_below(rng, 3) ? n_rows : 1 + imp_rng_below(rng, n_rows + 3);

    /* rows then heads, or heads then rows, with gaps or without */
    size_t gap = imp_rng_below(rng, 3), n_q;
    if (imp_rng_below(rng, 2)) {
        p->query.head_stride = dim + gap;
        p->query.row_stride = p->query.head_stride * n_heads;
    } else {
        p->query.row_stride = dim + gap;
        p->query.head_stride = p->query.row_stride * n_rows;
    }
    n_q = (n_rows - 1) * p->query.row_stride + (n_heads - 1) * p->query.head_stride + dim;
    p->q = test_alloc(n_q * sizeof *p->q);
    for (size_t i = 0; i < n_q; i++) p->q[i] = test_uniform(rng, -2.0f, 2.0f);
    p->query.q = p->q;
    p->query.n_rows = n_rows;
    p->query.n_heads = n_heads;
    p->query.scale = 1.0f / sqrtf((float)dim);
    p->query.softcap = imp_rng_below(rng, 3) ? 0.0f : test_uniform(rng, 1.0f, 60.0f);

    size_t row_bytes = imp_type_bytes(type, dim) * n_kv;
    p->exact = test_alloc(n_tokens * n_kv * dim * sizeof *p->exact);
    p->runs = test_alloc((2 * n_tokens + 2) * sizeof *p->runs);
    size_t n_runs = 0, longest = 1 + imp_rng_below(rng, imp_rng_below(rng, 2) ? 10 : 200);
    for (size_t t = 0; t < n_tokens;) {
        if (imp_rng_below(rng, 6) == 0) p->runs[n_runs++] = (imp_key_run){NULL, 0};
        size_t n = 1 + imp_rng_below(rng, longest);
        if (n > n_tokens - t) n = n_tokens - t;
        unsigned char *keys = test_alloc(n * row_bytes);
        for (size_t i = 0; i < n; i++) {
            for (size_t h = 0; h < n_kv; h++) {
                fill_row(rng, type, key_size, keys + i * row_bytes + h * (row_bytes / n_kv),
                         p->exact + ((t + i) * n_kv + h) * dim, dim);
            }
        }
        p->runs[n_runs++] = (imp_key_run){keys, n};
        t += n;
    }
    if (imp_rng_below(rng, 4) == 0) p->runs[n_runs++] = (imp_key_run){NULL, 0};
    p->keys = (imp_keys){type, n_kv, (uint32_t)dim, p->runs, n_runs, n_tokens};
}

static void free_problem(problem *p)
{
    for (size_t i = 0; i < p->keys.n_runs; i++) imp_free((void *)(uintptr_t)p->runs[i].keys);
    imp_free(p->runs);
    imp_free(p->exact);
    imp_free(p->q);
}

static size_t rows_used(const problem *p) { return p->n_rows < p->max_rows ? p->n_rows : p->max_rows; }

/* want[kv head][token]; returns how far f32 dot products may be off, relative to a weight. In *more: how much further
 * those of whole numbers may be, of the product of both lengths. */
static double twin(const problem *p, double *want, double *more)
{
    const imp_query *query = &p->query;
    double *weights = test_alloc(p->n_tokens * sizeof *weights), worst = 0.0, longest = 0.0;
    memset(want, 0, p->n_kv * p->n_tokens * sizeof *want);
    for (size_t r = p->n_rows - rows_used(p); r < p->n_rows; r++) {
        for (uint32_t h = 0; h < p->n_heads; h++) {
            uint32_t kv = h / (p->n_heads / p->n_kv);
            const float *q = query->q + r * query->row_stride + h * query->head_stride;
            double max = -HUGE_VAL, sum = 0.0;
            for (size_t t = 0; t < p->n_tokens; t++) {
                const double *k = p->exact + (t * p->n_kv + kv) * p->dim;
                double dot = 0.0, size = 0.0, q_square = 0.0, k_square = 0.0;
                for (size_t d = 0; d < p->dim; d++) {
                    dot += (double)q[d] * k[d];
                    size += fabs((double)q[d] * k[d]);
                    q_square += (double)q[d] * (double)q[d];
                    k_square += k[d] * k[d];
                }
                longest = fmax(longest, sqrt(q_square * k_square) * (double)query->scale);
                dot *= (double)query->scale;
                size *= (double)query->scale;
                if (query->softcap != 0.0f) {
                    dot = (double)query->softcap * tanh(dot / (double)query->softcap);
                    size += 4.0 * (double)query->softcap;
                }
                if (size > worst) worst = size;
                if (dot > max) max = dot;
                weights[t] = dot;
            }
            for (size_t t = 0; t < p->n_tokens; t++) sum += weights[t] = exp(weights[t] - max);
            for (size_t t = 0; t < p->n_tokens; t++) want[kv * p->n_tokens + t] += weights[t] / sum;
        }
    }
    imp_free(weights);
    *more = longest * 2.0 * sqrt((double)p->dim) * 0x1p-15; /* a weight's logit, and those of the sum */
    return worst * 8.0 * 0x1p-24 + 1e-5;
}

/* The twin's answer, by every instruction set. */
static void compare(const problem *p, imp_rng *rng)
{
    size_t n = p->n_tokens, rows = rows_used(p);
    double *want = test_alloc(p->n_kv * n * sizeof *want);
    float *scores = test_alloc(n * sizeof *scores), *per_head = test_alloc(p->n_kv * n * sizeof *per_head);
    float *alone = test_alloc(n * sizeof *alone);
    double rounding, of_floats = twin(p, want, &rounding);
    for (int i = 0; i < TEST_ISAS; i++) {
        if (imp_select_force_isa(test_isas[i]) < 0) continue;
        double tolerance = of_floats + (imp_kernels_now()->dots16 ? expm1(rounding) : 0.0);
        size_t more = imp_rng_below(rng, 3), dim = p->dim + more <= 1024 ? p->dim + more : p->dim;
        imp_scorer *s;
        assert_int_equal(imp_scorer_new(n + 70 * more, rows + more, p->n_heads + (uint32_t)more,
                                        (uint32_t)dim, NULL, &s), 0);
        assert_int_equal(imp_score_h2o(s, &p->query, p->max_rows, &p->keys, scores, per_head), 0);
        assert_int_equal(imp_score_h2o(s, &p->query, p->max_rows, &p->keys, alone, NULL), 0);
        assert_memory_equal(alone, scores, n * sizeof *scores);
        double all = 0.0;
        for (size_t t = 0; t < n; t++) {
            double sum = 0.0;
            for (size_t h = 0; h < p->n_kv; h++) {
                double w = want[h * n + t], got = (double)per_head[h * n + t];
                sum += w;
                if (!(fabs(got - w) <= tolerance * w + 1e-30)) {
                    fail_msg("%s, type %d, %zu tokens, %zu rows, %u/%u heads, dim %zu: token %zu, head %zu: %.9g, not %.9g",
                             test_isas[i], (int)p->type, n, rows, p->n_heads, p->n_kv, p->dim, t, h, got, w);
                }
            }
            assert_true(fabs((double)scores[t] - sum) <= tolerance * sum + 1e-30);
            all += (double)scores[t];
        }
        double total = (double)rows * p->n_heads;
        assert_true(fabs(all - total) <= 1e-5 * total);
        imp_scorer_free(s);
    }
    imp_select_force_isa(NULL);
    imp_free(alone);
    imp_free(per_head);
    imp_free(scores);
    imp_free(want);
}

static void run(imp_rng *rng, imp_type type, size_t n_tokens, size_t n_rows, uint32_t n_heads, uint32_t n_kv,
                size_t dim, float key_size)
{
    problem p;
    if (type == IMP_TYPE_Q8_0) dim = (dim + 31) / 32 * 32;
    make_problem(&p, rng, type, n_tokens, n_rows, n_heads, n_kv, dim, key_size);
    compare(&p, rng);
    free_problem(&p);
}

static void shapes(void **state)
{
    (void)state;
    imp_rng rng = test_rng("shapes");
    static const size_t dims[] = {64, 80, 96, 128, 256}, tokens[] = {1, 2, 63, 64, 65, 130};
    for (int type = IMP_TYPE_F32; type <= IMP_TYPE_Q8_0; type++) {
        for (size_t d = 0; d < sizeof dims / sizeof dims[0]; d++) {
            for (size_t t = 0; t < sizeof tokens / sizeof tokens[0]; t++) {
                run(&rng, (imp_type)type, tokens[t], 1, 1, 1, dims[d], 2.0f);
                run(&rng, (imp_type)type, tokens[t], 3, 6, 2, dims[d], 2.0f);
            }
        }
        run(&rng, (imp_type)type, 130, 32, 9, 3, 64, 2.0f);
        run(&rng, (imp_type)type, 100, 9, 40, 1, 32, 2.0f);  /* 360 queries of one KV head: cut in two */
        run(&rng, (imp_type)type, 70, 2, 24, 24, 32, 2.0f);  /* more panels than a wave has */
        run(&rng, (imp_type)type, 70, 1, 2, 1, 1024, 2.0f);  /* eight widened tokens at a time */
        run(&rng, (imp_type)type, 700, 2, 2, 1, 64, 2.0f);
    }
    run(&rng, IMP_TYPE_F16, 70, 5, 4, 2, 1, 2.0f);
    run(&rng, IMP_TYPE_F16, 70, 5, 4, 2, 7, 2.0f);
    run(&rng, IMP_TYPE_BF16, 70, 5, 4, 2, 577, 2.0f);
}

static void random_shapes(void **state)
{
    (void)state;
    imp_rng rng = test_rng("random_shapes");
    for (int round = 0; round < 80; round++) {
        imp_type type = (imp_type)imp_rng_below(&rng, 4);
        uint32_t kv = 1 + (uint32_t)imp_rng_below(&rng, 5), group = 1 + (uint32_t)imp_rng_below(&rng, 7);
        run(&rng, type, 1 + imp_rng_below(&rng, 150), 1 + imp_rng_below(&rng, 12), kv * group, kv,
            1 + imp_rng_below(&rng, 70), test_uniform(&rng, 0.0f, 8.0f));
    }
}

/* One token takes everything, or nearly: the maximum must be subtracted. */
static void large_logits(void **state)
{
    (void)state;
    imp_rng rng = test_rng("large_logits");
    for (int type = IMP_TYPE_F32; type <= IMP_TYPE_Q8_0; type++) {
        run(&rng, (imp_type)type, 150, 3, 4, 2, 64, 100.0f);
        run(&rng, (imp_type)type, 150, 3, 4, 2, 64, 2000.0f);
    }
}

/* The same bits for any number of threads, and for any size the scorer was made for. */
static void threads(void **state)
{
    (void)state;
    imp_rng rng = test_rng("threads");
    problem p;
    make_problem(&p, &rng, IMP_TYPE_F16, 1500, 33, 18, 3, 64, 3.0f);
    p.max_rows = 32;
    float *want = test_alloc(p.n_tokens * 4 * sizeof *want), *got = test_alloc(p.n_tokens * 4 * sizeof *got);
    for (int i = 0; i < TEST_ISAS; i++) {
        if (imp_select_force_isa(test_isas[i]) < 0) continue;
        imp_scorer *s;
        assert_int_equal(imp_scorer_new(p.n_tokens, 32, 18, 64, NULL, &s), 0);
        assert_int_equal(imp_score_h2o(s, &p.query, 32, &p.keys, want, want + p.n_tokens), 0);
        imp_scorer_free(s);
        for (unsigned n = 1; n <= 5; n++) {
            imp_pool *pool;
            assert_int_equal(imp_pool_new(n, &pool), 0);
            assert_int_equal(imp_scorer_new(p.n_tokens * n, 32 * n, 18 * n, 64, pool, &s), 0);
            for (int repeat = 0; repeat < 3; repeat++) {
                memset(got, 0xff, p.n_tokens * 4 * sizeof *got);
                assert_int_equal(imp_score_h2o(s, &p.query, 32, &p.keys, got, got + p.n_tokens), 0);
                assert_memory_equal(got, want, p.n_tokens * 4 * sizeof *got);
            }
            imp_scorer_free(s);
            imp_pool_free(pool);
        }
    }
    imp_select_force_isa(NULL);
    imp_free(got);
    imp_free(want);
    free_problem(&p);
}

/* Keys that are no numbers: the answer is finite, adds up, and the other tokens keep their order. */
static void not_numbers(void **state)
{
    (void)state;
    imp_rng rng = test_rng("not_numbers");
    static const uint16_t bad[] = {0x7e00, 0xfe00, 0x7c00, 0xfc00, 0x7c01};
    enum { N = 200, DIM = 64, KV = 2, HEADS = 4, ROWS = 3 };
    uint16_t *keys = test_alloc(N * KV * DIM * 2);
    float *q = test_alloc(ROWS * HEADS * DIM * sizeof *q), scores[N];
    imp_key_run one = {keys, N};
    imp_keys k = {IMP_TYPE_F16, KV, DIM, &one, 1, N};
    imp_query query = {q, HEADS * DIM, DIM, ROWS, HEADS, 0.125f, 0.0f};
    for (int i = 0; i < TEST_ISAS; i++) {
        if (imp_select_force_isa(test_isas[i]) < 0) continue;
        imp_scorer *s;
        assert_int_equal(imp_scorer_new(N, ROWS, HEADS, DIM, NULL, &s), 0);
        for (int kind = 0; kind < 9; kind++) {
            for (int softcap = 0; softcap < 2; softcap++) {
                query.softcap = softcap ? 30.0f : 0.0f;
                for (size_t j = 0; j < ROWS * HEADS * DIM; j++) q[j] = test_uniform(&rng, 0.5f, 1.0f);
                for (size_t j = 0; j < N * KV * DIM; j++) keys[j] = some_f16(&rng, 1.0);
                if (kind < 5) { /* three tokens in both heads, one of them at the end */
                    for (size_t h = 0; h < KV; h++) {
                        keys[(5 * KV + h) * DIM + 63] = bad[kind];
                        keys[(77 * KV + h) * DIM] = bad[kind];
                        keys[((N - 1) * KV + h) * DIM + 7] = bad[kind];
                    }
                } else if (kind < 8) { /* everything */
                    for (size_t j = 0; j < N * KV * DIM; j++) keys[j] = bad[kind - 5];
                } else {
                    q[3] = NAN;
                    q[70] = INFINITY;
                    q[300] = -INFINITY;
                }
                assert_int_equal(imp_score_h2o(s, &query, ROWS, &k, scores, NULL), 0);
                double all = 0.0;
                for (size_t t = 0; t < N; t++) {
                    assert_true(isfinite(scores[t]) && scores[t] >= 0.0f);
                    all += (double)scores[t];
                }
                assert_true(fabs(all - ROWS * HEADS) < 1e-3);
                int infinite = kind == 2, low = kind < 5 && !infinite; /* q > 0: +inf wins, NaN and -inf lose */
                if (low && !softcap) assert_true(scores[5] == 0.0f && scores[77] == 0.0f && scores[N - 1] == 0.0f);
                if (low && softcap) assert_true(scores[5] < scores[6] && scores[77] < scores[76]);
                if (infinite && !softcap) {
                    assert_true(fabs((double)(scores[5] + scores[77] + scores[N - 1]) - ROWS * HEADS) < 1e-3);
                }
            }
        }
        imp_scorer_free(s);
    }
    imp_select_force_isa(NULL);
    imp_free(q);
    imp_free(keys);
}

static void refusals(void **state)
{
    (void)state;
    imp_rng rng = test_rng("refusals");
    imp_scorer *s;
    assert_int_equal(imp_scorer_new(0, 1, 1, 64, NULL, &s), IMP_E_ARG);
    assert_int_equal(imp_scorer_new(1, 0, 1, 64, NULL, &s), IMP_E_ARG);
    assert_int_equal(imp_scorer_new(1, 1, 0, 64, NULL, &s), IMP_E_ARG);
    assert_int_equal(imp_scorer_new(1, 1, 1, 0, NULL, &s), IMP_E_ARG);
    assert_int_equal(imp_scorer_new(1, 1, 1, 1025, NULL, &s), IMP_E_ARG);
    assert_null(s);
    assert_int_equal(imp_scorer_new(SIZE_MAX, SIZE_MAX, UINT32_MAX, 64, NULL, &s), IMP_E_NOMEM);
    assert_null(s);
    imp_scorer_free(NULL);

    problem p;
    make_problem(&p, &rng, IMP_TYPE_F16, 100, 8, 6, 3, 64, 1.0f);
    float scores[100];
    assert_int_equal(imp_scorer_new(100, 8, 6, 64, NULL, &s), 0);
    imp_query query = p.query;
    imp_keys keys = p.keys;
    assert_int_equal(imp_score_h2o(s, &query, 0, &keys, scores, NULL), IMP_E_ARG);
    assert_int_equal(imp_score_h2o(s, &query, SIZE_MAX, &keys, scores, NULL), 0); /* 8 rows are there */
    query.n_rows = 0;
    assert_int_equal(imp_score_h2o(s, &query, 8, &keys, scores, NULL), IMP_E_ARG);
    query.n_rows = 9;
    assert_int_equal(imp_score_h2o(s, &query, 9, &keys, scores, NULL), IMP_E_ARG);
    query = p.query;
    query.n_heads = 7;
    assert_int_equal(imp_score_h2o(s, &query, 8, &keys, scores, NULL), IMP_E_ARG);
    query.n_heads = 0;
    assert_int_equal(imp_score_h2o(s, &query, 8, &keys, scores, NULL), IMP_E_ARG);
    query.n_heads = 9;
    assert_int_equal(imp_score_h2o(s, &query, 8, &keys, scores, NULL), IMP_E_ARG);
    query = p.query;
    keys.n_kv_heads = 0;
    assert_int_equal(imp_score_h2o(s, &query, 8, &keys, scores, NULL), IMP_E_ARG);
    keys = p.keys;
    keys.n_tokens = 99;
    assert_int_equal(imp_score_h2o(s, &query, 8, &keys, scores, NULL), IMP_E_ARG);
    keys.n_tokens = 101;
    assert_int_equal(imp_score_h2o(s, &query, 8, &keys, scores, NULL), IMP_E_ARG);
    keys = p.keys;
    keys.n_runs--;
    keys.n_tokens = 100;
    if (p.runs[keys.n_runs].n_tokens > 0) {
        assert_int_equal(imp_score_h2o(s, &query, 8, &keys, scores, NULL), IMP_E_ARG);
    }
    keys = p.keys;
    keys.head_dim = 65;
    assert_int_equal(imp_score_h2o(s, &query, 8, &keys, scores, NULL), IMP_E_ARG);
    keys.head_dim = 0;
    assert_int_equal(imp_score_h2o(s, &query, 8, &keys, scores, NULL), IMP_E_UNSUPPORTED);
    keys.head_dim = 40;
    keys.type = IMP_TYPE_Q8_0;
    assert_int_equal(imp_score_h2o(s, &query, 8, &keys, scores, NULL), IMP_E_UNSUPPORTED);
    keys = p.keys;
    keys.type = (imp_type)17;
    assert_int_equal(imp_score_h2o(s, &query, 8, &keys, scores, NULL), IMP_E_UNSUPPORTED);
    keys = (imp_keys){IMP_TYPE_F16, 3, 64, NULL, 0, 0}; /* no prefix: nothing to say */
    assert_int_equal(imp_score_h2o(s, &query, 8, &keys, scores, NULL), 0);
    imp_scorer_free(s);
    free_problem(&p);
}

static void no_memory(void **state)
{
    (void)state;
    imp_rng rng = test_rng("no_memory");
    problem p;
    make_problem(&p, &rng, IMP_TYPE_BF16, 100, 2, 4, 2, 64, 1.0f);
    float scores[100];
    for (int stay = 0; stay < 2; stay++) {
        uint64_t at = 1;
        for (;; at++) {
            imp_scorer *s;
            imp_alloc_fail_at(at, stay);
            int rc = imp_scorer_new(100, 2, 4, 64, NULL, &s);
            if (rc == 0) {
                imp_alloc_fail_at(1, 1); /* scoring itself takes no memory */
                assert_int_equal(imp_score_h2o(s, &p.query, 2, &p.keys, scores, NULL), 0);
                assert_int_equal(imp_alloc_fail_at(0, 0), 0);
                imp_scorer_free(s);
                break;
            }
            assert_int_equal(rc, IMP_E_NOMEM);
            assert_null(s);
        }
        imp_alloc_fail_at(0, 0);
        assert_true(at > 1);
    }
    free_problem(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes),
        cmocka_unit_test(random_shapes),
        cmocka_unit_test(large_logits),
        cmocka_unit_test(threads),
        cmocka_unit_test(not_numbers),
        cmocka_unit_test(refusals),
        cmocka_unit_test(no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
