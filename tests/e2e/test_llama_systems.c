/* Every way to identify tokens on a real model, over stores that keep what it goes by; prefixes copied from store to
 * store and reordered, bit for bit; rankings. */
#include "copy_prefix.h"
#include "llama_fixture.h"

enum { LONG = 400 };

/* A store of the kind that a system wants, below the test's folder. */
static imp_store *open_for(const char *system, const char *name)
{
    imp_store_opts opts;
    imp_switches switches;
    char path[300];
    imp_store_opts_init(&opts);
    assert_int_equal(imp_system_preset(system, &switches), 0);
    imp_store_opts_switches(&opts, &switches);
    opts.reorder_period_s = UINT32_MAX;
    snprintf(path, sizeof path, "%s/%s", store_dir, name);
    imp_store *store;
    if (imp_store_open(path, &opts, &store) != 0) fail_msg("%s", imp_last_error());
    return store;
}

static imp_llama_report ask(imp_llama *ctx, const prompt *p, const imp_llama_request *r)
{
    imp_llama_clear(ctx);
    assert_int_equal(imp_llama_set_request(ctx, 0, r), 0);
    assert_int_equal(feed(ctx, p, 0, 0, p->n, 512), 0);
    return report(ctx, 0);
}

static imp_llama_request want(const char *system, double retention)
{
    imp_llama_request r = request(system, retention);
    r.max_match = LONG;
    r.store_new = false;
    return r;
}

/* Each system over its own store, with nothing but the prefill's queries to go by. */
static void test_every_identification(void **state)
{
    (void)state;
    static const struct {
        const char *system;
        double least_mass, most_kl;
    } systems[] = {{"as-h2o-lru", 0.8, 0.5}, {"impress-paper", 0.75, 0.8}, {"spi", 0.4, 3},
                   {"contiguous", 0.6, 1.5},  {"impress", 0.7, 0.8},        {"random", 0.05, 20}};
    prompt a = make_prompt(LONG, question_a), b = make_prompt(LONG, question_b);
    float *expected = reference(&b, context_params());
    double masses[6];
    uint64_t identify[6], full = 0;
    for (size_t i = 0; i < sizeof systems / sizeof *systems; i++) {
        imp_store *store = open_for(systems[i].system, systems[i].system);
        imp_llama *ctx = open_llama(store, context_params());
        store_prefix(ctx, store, &a);
        imp_llama_request r = want(systems[i].system, 0.25);
        assert_string_equal(imp_llama_note(ctx, &r), "");
        imp_llama_report got = ask(ctx, &b, &r);
        assert_int_equal(got.way, IMP_LLAMA_WAY_PARTIAL);
        assert_int_equal(got.loaded_tokens, (got.matched_tokens + 3) / 4);
        assert_int_equal(got.retries, 0);
        assert_true(got.n_selected > 0);
        if (strcmp(systems[i].system, "impress-paper") != 0) assert_int_equal(got.n_fallback, 0);
        masses[i] = got.mass;
        identify[i] = got.identify_bytes;
        full = got.bytes_full;
        double kl = divergence(expected, imp_llama_get_logits_ith(ctx, -1));
        print_message("%s: mass %.3f, KL %.3f, %.1f %% of the bytes to identify\n", systems[i].system, got.mass, kl,
                      100.0 * (double)got.identify_bytes / (double)full);
        if (!(got.mass > systems[i].least_mass) || !(kl < systems[i].most_kl)) fail_msg("mass %g, KL %g", got.mass, kl);
        imp_llama_free(ctx);
        imp_store_close(store);
    }
    for (int i = 0; i < 5; i++) assert_true(masses[i] > masses[5]); /* better than any tokens */
    assert_true(identify[2] == 0 && identify[5] == 0);
    assert_true(identify[4] > 0 && identify[4] < full / 10 && identify[4] < identify[1] && identify[1] < identify[0]);
    free(expected);
}

/* What a system needs and a store hasn't got is replaced by all keys, and counted. */
static void test_falls_back(void **state)
{
    (void)state;
    prompt a = make_prompt(LONG, question_a), b = make_prompt(LONG, question_b);
    imp_store *store = open_for("as", "plain");
    imp_llama *ctx = open_llama(store, context_params());
    store_prefix(ctx, store, &a);
    imp_llama_request exact = want("as-h2o-lru", 0.25), sketch = want("impress", 0.25);
    ask(ctx, &b, &exact);
    float *expected = copy_logits(imp_llama_get_logits_ith(ctx, -1));
    sketch.load.history_weight = -1;
    imp_llama_report got = ask(ctx, &b, &sketch);
    assert_int_equal(got.n_fallback, got.n_selected);
    check_near(expected, imp_llama_get_logits_ith(ctx, -1), 0.05);
    free(expected);
    imp_llama_free(ctx);
    imp_store_close(store);
}

static void copy_to(imp_llama *ctx, imp_space *from, imp_store *to, const prompt *p)
{
    imp_layer_shape layers[256];
    copy_shape shape = {.layers = layers};
    imp_space *space;
    shape.n_layers = imp_llama_get_shape(ctx, &shape.type_k, &shape.type_v, layers, 256);
    assert_true(shape.n_layers > 0 && shape.n_layers <= 256);
    assert_int_equal(imp_llama_set_store(ctx, to), 0);
    assert_int_equal(imp_llama_open_space(ctx, NULL, &space), 0);
    if (copy_prefix(from, space, &shape, p->tokens, (size_t)p->n_prefix, NULL) != 0) fail_msg("%s", imp_last_error());
    assert_int_equal(imp_store_flush(to), 0);
    assert_int_equal(copy_prefix(from, space, &shape, p->tokens, (size_t)p->n, NULL), IMP_E_NOTFOUND);
    imp_space_close(space);
}

/* The same KV, whatever store it came through: full loads give the same logits to the bit. */
static void test_copies_are_exact(void **state)
{
    (void)state;
    prompt a = make_prompt(LONG, question_a);
    imp_store *source = open_for("as", "source"), *other = open_for("impress", "other");
    imp_llama *ctx = open_llama(source, context_params());
    assert_int_equal(feed(ctx, &a, 0, 0, a.n_prefix, 512), 0);
    size_t first;
    imp_query q;
    assert_int_equal(imp_llama_get_queries(ctx, 0, 0, &first, &q), 0);
    assert_int_equal(first + q.n_rows, LONG);
    assert_int_equal(imp_llama_get_queries(ctx, 1, 0, &first, &q), IMP_E_NOTFOUND);
    assert_int_equal(imp_llama_get_queries(ctx, 0, 10000, &first, &q), IMP_E_ARG);
    assert_int_equal(imp_llama_set_store(ctx, other), IMP_E_ARG); /* the sequence isn't empty */
    imp_llama_clear(ctx);
    assert_int_equal(imp_store_flush(source), 0);

    imp_llama_request r = want("as", 1);
    ask(ctx, &a, &r);
    float *expected = copy_logits(imp_llama_get_logits_ith(ctx, -1));
    imp_space *from;
    assert_int_equal(imp_llama_open_space(ctx, NULL, &from), 0);
    imp_llama_clear(ctx);
    copy_to(ctx, from, other, &a);
    for (int reordered = 0; reordered < 2; reordered++) {
        imp_llama_report got = ask(ctx, &a, &r);
        assert_int_equal(got.matched_tokens, LONG);
        assert_memory_equal(expected, imp_llama_get_logits_ith(ctx, -1), (size_t)n_vocab * sizeof *expected);
        imp_llama_request part = want("impress", 0.25);
        for (int i = 0; i < 3 && !reordered; i++) ask(ctx, &a, &part);
        imp_llama_clear(ctx);
        imp_reorder_report done;
        assert_int_equal(imp_store_reorder(other, &done), 0);
        if (!reordered) assert_true(done.n_reordered > 0);
    }
    free(expected);
    imp_space_close(from);
    imp_llama_free(ctx);
    imp_store_close(source);
    imp_store_close(other);
}

/* A ranking by repetition is a better static choice than any tokens, and leaves everything else alone. */
static void test_ranking(void **state)
{
    (void)state;
    prompt a = make_prompt(LONG, question_a), b = make_prompt(LONG, question_b);
    imp_store *store = open_for("spi", "spi");
    imp_llama *ctx = open_llama(store, context_params());
    assert_int_equal(imp_llama_rank_prefix(ctx, 0, a.tokens, LONG), IMP_E_NOTFOUND);
    assert_int_equal(imp_llama_rank_prefix(ctx, 7, a.tokens, LONG), IMP_E_ARG);
    assert_int_equal(imp_llama_rank_prefix(ctx, 0, a.tokens, 0), IMP_E_ARG);
    store_prefix(ctx, store, &a);
    imp_stats before, after;
    assert_int_equal(imp_store_stats(store, &before), 0);
    if (imp_llama_rank_prefix(ctx, 0, a.tokens, LONG) != 0) fail_msg("%s", imp_last_error());
    assert_int_equal(imp_llama_seq_pos_max(ctx, 0), -1);
    assert_int_equal(imp_store_stats(store, &after), 0);
    assert_int_equal(before.n_tokens, after.n_tokens);

    imp_llama_request r = want("spi", 0.25), any = want("random", 0.25);
    double masses[3];
    masses[0] = ask(ctx, &b, &r).mass;
    r.load.rank = IMP_RANK_RECONSTRUCTION;
    masses[1] = ask(ctx, &b, &r).mass;
    masses[2] = ask(ctx, &b, &any).mass;
    print_message("mass: prefill %.3f, reconstruction %.3f, random %.3f\n", masses[0], masses[1], masses[2]);
    assert_true(masses[1] > masses[2] + 0.1);

    /* A sequence in use, and a context without room. */
    assert_int_equal(feed(ctx, &b, 1, 0, b.n, 512), 0);
    assert_int_equal(imp_llama_rank_prefix(ctx, 1, a.tokens, LONG), IMP_E_ARG);
    imp_llama_free(ctx);
    struct llama_context_params cp = context_params();
    cp.n_ctx = 512;
    cp.n_seq_max = 1;
    ctx = open_llama(store, cp);
    int rc = imp_llama_rank_prefix(ctx, 0, a.tokens, LONG);
    assert_int_equal(rc, 0); /* 112 cells are enough to repeat in */
    imp_llama_free(ctx);
    imp_store_close(store);
}

/* What is asked of a model that it can't do is told in one line. */
static void test_notes(void **state)
{
    (void)state;
    imp_store *store = open_store();
    imp_llama *ctx = open_llama(store, context_params());
    imp_llama_request r = request("impress-paper", 0.25);
    assert_string_equal(imp_llama_note(ctx, &r), "");
    r.load.n_probe_heads = 1000;
    assert_non_null(strstr(imp_llama_note(ctx, &r), "probe heads"));
    r.load.retention = 1;
    assert_string_equal(imp_llama_note(ctx, &r), "");
    imp_llama_free(ctx);
    ctx = open_llama(NULL, context_params());
    assert_string_equal(imp_llama_note(ctx, &r), "");
    imp_type k, v;
    assert_int_equal(imp_llama_get_shape(ctx, &k, &v, NULL, 0), 0);
    assert_int_equal(imp_llama_set_store(ctx, store), IMP_E_UNSUPPORTED);
    assert_int_equal(imp_llama_rank_prefix(ctx, 0, (int32_t[]){1, 2}, 2), IMP_E_UNSUPPORTED);
    imp_llama_free(ctx);
    imp_store_close(store);
}

/* Whatever way is taken: the answer is that way's, and it isn't expected to be slower than computing or a full load. */
static void test_adaptive(void **state)
{
    (void)state;
    imp_store *store = open_for("impress", "adaptive");
    imp_llama *ctx = open_llama(store, context_params());
    prompt a = make_prompt(LONG, question_a), b = make_prompt(LONG, question_b);
    imp_llama_request r = want("impress", 0.25);
    r.adaptive = true;
    store_prefix(ctx, store, &a);
    imp_llama_report got = report(ctx, 0);
    assert_int_equal(got.reason, IMP_LLAMA_REASON_NOTHING);
    assert_int_equal(got.expected_ns[IMP_LLAMA_WAY_COMPUTED], 0);
    float *expected = reference(&b, context_params());
    for (int i = 0; i < 2; i++) {
        if (i == 1) r.load.switches.identify = IMP_IDENTIFY_NONE, r.load.retention = 1; /* never in part */
        got = ask(ctx, &b, &r);
        uint64_t computed = got.expected_ns[IMP_LLAMA_WAY_COMPUTED], whole = got.expected_ns[IMP_LLAMA_WAY_WHOLE];
        uint64_t best = computed < whole ? computed : whole;
        assert_true(got.reason == IMP_LLAMA_REASON_QUICKER || got.reason == IMP_LLAMA_REASON_FREE);
        assert_true(best > 0 && (double)got.expected_ns[got.way] <= 1.06 * (double)best);
        if (i == 1) assert_int_equal(got.expected_ns[IMP_LLAMA_WAY_PARTIAL], 0);
        assert_int_equal(got.matched_tokens > 0, got.way != IMP_LLAMA_WAY_COMPUTED);
        double kl = divergence(expected, imp_llama_get_logits_ith(ctx, -1));
        if (!(kl < (got.way == IMP_LLAMA_WAY_PARTIAL ? 0.8 : 0.02))) fail_msg("way %d, KL %g", (int)got.way, kl);
    }
    r = want("impress", 0.25);
    got = ask(ctx, &b, &r);
    assert_int_equal(got.way, IMP_LLAMA_WAY_PARTIAL);
    assert_int_equal(got.reason, IMP_LLAMA_REASON_ASKED);
    for (int i = -1; i < 8; i++) assert_non_null(imp_llama_reason_name(i));
    free(expected);
    imp_llama_free(ctx);
    imp_store_close(store);
}

int main(void)
{
    need_model();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_every_identification, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_falls_back, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_copies_are_exact, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_ranking, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_notes, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_adaptive, make_dir, drop_dir),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    llama_model_free(model);
    llama_backend_free();
    return rc;
}
