/* Answers of the adapter on a real model, against llama.cpp alone on the same tokens. */
#include "llama_fixture.h"

/* Store a prefix, ask again with `system`, and return the logits' divergence from the reference. */
static imp_llama_report ask_again(struct llama_context_params cp, int n_prefix, const char *system, double retention,
                                  double *kl)
{
    prompt a = make_prompt(n_prefix, question_a), b = make_prompt(n_prefix, question_b);
    float *expected = reference(&b, cp);
    imp_store *store = open_store();
    imp_llama *ctx = open_llama(store, cp);
    assert_int_equal(imp_llama_get_fit(ctx, NULL), IMP_LLAMA_FIT_FULL);
    store_prefix(ctx, store, &a);

    set_request(ctx, 0, system, retention);
    assert_int_equal(feed(ctx, &b, 0, 0, b.n_prefix, 512), 0);
    assert_int_equal(feed(ctx, &b, 0, b.n_prefix, b.n, 512), 0);
    *kl = divergence(expected, imp_llama_get_logits_ith(ctx, -1));
    if (retention == 1) assert_int_equal(top(expected), top(imp_llama_get_logits_ith(ctx, -1)));
    imp_llama_report r = report(ctx, 0);
    assert_int_equal(r.prompt_tokens, b.n);
    assert_int_equal(r.matched_tokens + r.query_tokens, b.n);
    imp_llama_free(ctx);
    imp_store_close(store);
    free(expected);
    return r;
}

static void test_loads_all_f16(void **state)
{
    (void)state;
    double kl;
    imp_llama_report r = ask_again(context_params(), N_PREFIX, "as", 1, &kl);
    assert_int_equal(r.way, IMP_LLAMA_WAY_WHOLE);
    assert_true(r.matched_tokens >= N_PREFIX);
    assert_int_equal(r.loaded_tokens, r.matched_tokens);
    assert_true(r.bytes_read > 0 && r.bytes_full > 0);
    /* Questions begin alike, so a little more than the prefix is matched, and the query is cut elsewhere. */
    assert_true(kl < 0.02);
}

static void test_loads_all_q8_0(void **state)
{
    (void)state;
    struct llama_context_params cp = context_params();
    cp.type_k = cp.type_v = GGML_TYPE_Q8_0;
    double kl;
    imp_llama_report r = ask_again(cp, N_PREFIX, "as", 1, &kl);
    assert_int_equal(r.way, IMP_LLAMA_WAY_WHOLE);
    assert_true(kl < 0.02);
}

/* Cut exactly where the reference is cut: to the last bit, or nearly. */
static void test_is_exact(void **state)
{
    (void)state;
    prompt a = make_prompt(N_PREFIX, question_a), b = make_prompt(N_PREFIX, question_b);
    float *expected = reference(&b, context_params());
    imp_store *store = open_store();
    imp_llama *ctx = open_llama(store, context_params());
    store_prefix(ctx, store, &a);
    imp_llama_request r = request("as", 1);
    r.max_match = N_PREFIX;
    assert_int_equal(imp_llama_set_request(ctx, 0, &r), 0);
    assert_int_equal(feed(ctx, &b, 0, 0, b.n, 512), 0);
    assert_int_equal(report(ctx, 0).matched_tokens, N_PREFIX);
    check_same(expected, imp_llama_get_logits_ith(ctx, -1));

    /* And in a new process, as far as the store can tell. */
    imp_llama_free(ctx);
    imp_store_close(store);
    store = open_store();
    ctx = open_llama(store, context_params());
    assert_int_equal(imp_llama_set_request(ctx, 0, &r), 0);
    assert_int_equal(feed(ctx, &b, 0, 0, b.n, 37), 0);
    assert_int_equal(report(ctx, 0).matched_tokens, N_PREFIX);
    check_near(expected, imp_llama_get_logits_ith(ctx, -1), 0.02);
    imp_llama_free(ctx);
    imp_store_close(store);
    free(expected);
}

/* A query just below what attention on a CPU takes in tiles is made as long as that. */
static void test_widened_query(void **state)
{
    (void)state;
    prompt p = make_prompt(3 * N_PREFIX, question_a), cut = p;
    cut.n_prefix = p.n - 64;
    float *expected = reference(&cut, context_params());
    imp_store *store = open_store();
    imp_llama_params params;
    imp_llama_params_init(&params);
    params.store = store;
    params.model_files = &model_path;
    params.n_model_files = 1;
    params.widen_query = true;
    imp_llama *ctx;
    assert_int_equal(imp_llama_init(model, context_params(), &params, &ctx), 0);
    store_prefix(ctx, store, &p);
    for (int n_query = 1; n_query < 64; n_query += 57) {
        params.request.max_match = (size_t)(p.n - n_query);
        assert_int_equal(imp_llama_set_request(ctx, 0, &params.request), 0);
        assert_int_equal(feed(ctx, &p, 0, 0, p.n, 512), 0);
        assert_int_equal(report(ctx, 0).query_tokens, n_query == 1 ? 1 : 64);
        if (n_query > 1) check_same(expected, imp_llama_get_logits_ith(ctx, -1));
        imp_llama_clear(ctx);
    }
    imp_llama_free(ctx);
    imp_store_close(store);
    free(expected);
}

static void test_query_over_several_ubatches(void **state)
{
    (void)state;
    struct llama_context_params cp = context_params();
    cp.n_ubatch = 16;
    double kl;
    imp_llama_report r = ask_again(cp, N_PREFIX, "as", 1, &kl);
    assert_int_equal(r.way, IMP_LLAMA_WAY_WHOLE);
    assert_true(r.query_tokens > 16);
    assert_true(kl < 0.02);
}

static void test_loads_a_part(void **state)
{
    (void)state;
    struct llama_context_params cp = context_params();
    cp.n_ubatch = 16; /* each ubatch selects for itself */
    double kl;
    imp_llama_report r = ask_again(cp, 2 * N_PREFIX, "as-h2o-lru", 0.25, &kl);
    assert_int_equal(r.way, IMP_LLAMA_WAY_PARTIAL);
    assert_true(r.query_tokens >= 16);
    assert_int_equal(r.loaded_tokens, (r.matched_tokens + 3) / 4);
    assert_true(r.mass > 0.5 && r.mass < 1);
    assert_true(r.identify_bytes > 0);
    if (!(kl < 0.5)) fail_msg("KL %g", kl);
}

static void test_generates_the_same(void **state)
{
    (void)state;
    enum { N = 8 };
    prompt p = make_prompt(N_PREFIX, question_a);
    float *expected[N];
    imp_llama *plain = open_llama(NULL, context_params());
    assert_int_equal(feed(plain, &p, 0, 0, p.n_prefix, 512), 0);
    assert_int_equal(feed(plain, &p, 0, p.n_prefix, p.n, 512), 0);
    for (int i = 0; i < N; i++) {
        expected[i] = copy_logits(imp_llama_get_logits_ith(plain, -1));
        p.tokens[p.n++] = top(expected[i]);
        assert_int_equal(feed(plain, &p, 0, p.n - 1, p.n, 1), 0);
    }
    imp_llama_free(plain);
    p.n -= N;

    imp_store *store = open_store();
    imp_llama *ctx = open_llama(store, context_params());
    store_prefix(ctx, store, &p);
    imp_llama_request r = request("as", 1);
    r.max_match = N_PREFIX;
    assert_int_equal(imp_llama_set_request(ctx, 0, &r), 0);
    struct llama_sampler *greedy = llama_sampler_init_greedy();
    assert_int_equal(feed(ctx, &p, 0, 0, p.n, 512), 0);
    for (int i = 0; i < N; i++) {
        check_same(expected[i], imp_llama_get_logits_ith(ctx, -1));
        assert_int_equal(imp_llama_sampler_sample(greedy, ctx, -1), top(expected[i]));
        p.n++;
        assert_int_equal(feed(ctx, &p, 0, p.n - 1, p.n, 1), 0);
        free(expected[i]);
    }
    llama_sampler_free(greedy);
    imp_llama_free(ctx);
    imp_store_close(store);
}

static void test_without_a_store(void **state)
{
    (void)state;
    prompt p = make_prompt(N_PREFIX, question_a);
    float *expected = reference(&p, context_params());
    imp_llama *ctx = open_llama(NULL, context_params());
    const char *why;
    assert_int_equal(imp_llama_get_fit(ctx, &why), IMP_LLAMA_FIT_NONE);
    assert_string_equal(why, "no store");
    struct llama_context *plain = llama_init_from_model(model, context_params());
    assert_non_null(plain);
    assert_int_equal(llama_decode(plain, llama_batch_get_one(p.tokens, p.n_prefix)), 0);
    assert_int_equal(llama_decode(plain, llama_batch_get_one(p.tokens + p.n_prefix, p.n - p.n_prefix)), 0);
    assert_memory_equal(expected, llama_get_logits_ith(plain, -1), (size_t)n_vocab * sizeof *expected);
    assert_int_equal(imp_llama_decode(ctx, llama_batch_get_one(p.tokens, p.n)), 0);
    assert_int_equal(imp_llama_seq_pos_max(ctx, 0), p.n - 1);
    llama_free(plain);
    imp_llama_free(ctx);
    free(expected);
}

static void test_recomputes_and_stores_nothing(void **state)
{
    (void)state;
    prompt p = make_prompt(N_PREFIX, question_a);
    imp_store *store = open_store();
    imp_llama *ctx = open_llama(store, context_params());
    imp_llama_request r = request("as", 1);
    r.store_new = false;
    assert_int_equal(imp_llama_set_request(ctx, 0, &r), 0);
    store_prefix(ctx, store, &p);
    imp_stats stats;
    assert_int_equal(imp_store_stats(store, &stats), 0);
    assert_int_equal(stats.n_tokens, 0);

    r.store_new = true;
    r.recompute = true;
    assert_int_equal(imp_llama_set_request(ctx, 0, &r), 0);
    store_prefix(ctx, store, &p);
    assert_int_equal(feed(ctx, &p, 0, 0, p.n, 512), 0);
    assert_int_equal(report(ctx, 0).way, IMP_LLAMA_WAY_COMPUTED);
    assert_int_equal(imp_store_stats(store, &stats), 0);
    assert_int_equal(stats.n_tokens, p.n);
    imp_llama_free(ctx);
    imp_store_close(store);
}

/* Derived KV is stored on request only, and given to those who take it. */
static void test_derived_is_kept_apart(void **state)
{
    (void)state;
    prompt a = make_prompt(2 * N_PREFIX, question_a), b = a;
    b.n = b.n_prefix;
    while (b.n < b.n_prefix + 100) b.n = add_text(b.tokens, b.n, question_b, false);
    imp_store *store = open_store();
    imp_llama *ctx = open_llama(store, context_params());
    store_prefix(ctx, store, &a);
    imp_llama_request r = request("as-h2o-lru", 0.25);
    for (int derived = 0; derived < 2; derived++) {
        r.store_derived = derived;
        assert_int_equal(imp_llama_set_request(ctx, 0, &r), 0);
        store_prefix(ctx, store, &b);
        imp_stats stats;
        assert_int_equal(imp_store_stats(store, &stats), 0);
        assert_int_equal(stats.n_tokens > (uint64_t)a.n, derived);
    }
    r = request("as", 1);
    for (int derived = 0; derived < 2; derived++) {
        r.use_derived = derived;
        r.store_new = false;
        assert_int_equal(imp_llama_set_request(ctx, 0, &r), 0);
        assert_int_equal(feed(ctx, &b, 0, 0, b.n, 512), 0);
        size_t matched = report(ctx, 0).matched_tokens;
        assert_int_equal(matched > (size_t)b.n_prefix + 50, derived);
        imp_llama_clear(ctx);
    }
    imp_llama_free(ctx);
    imp_store_close(store);
}

int main(void)
{
    need_model();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_loads_all_f16, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_loads_all_q8_0, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_is_exact, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_widened_query, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_query_over_several_ubatches, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_loads_a_part, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_generates_the_same, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_without_a_store, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_recomputes_and_stores_nothing, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_derived_is_kept_apart, make_dir, drop_dir),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    llama_model_free(model);
    llama_backend_free();
    return rc;
}
