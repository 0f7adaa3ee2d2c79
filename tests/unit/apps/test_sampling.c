/* What each field of sampling does to the choice of a token, by logits that are made up. */
#include <math.h>

#include "chat_fixture.h"
#include "serve/oai_request.h"
#include "serve/sampling.h"

enum { N_VOCAB = N_BYTES + N_SPECIAL };

static struct llama_model *model;
static const struct llama_vocab *vocab;
static llama_token_data scratch[N_VOCAB];
static float logits[N_VOCAB];
static uint64_t rng;

static oai_sampling defaults(void)
{
    return oai_limits_default().sampling;
}

/* Logits by chance, without equals, between -5 and 5. */
static void make_logits(void)
{
    for (size_t i = 0; i < N_VOCAB; i++) {
        rng = rng * 6364136223846793005u + 1442695040888963407u;
        logits[i] = (float)(rng >> 40) / (float)(1u << 24) * 10 - 5 + (float)i * 1e-5f;
    }
}

static llama_token largest(void)
{
    llama_token top = 0;
    for (llama_token i = 1; i < N_VOCAB; i++)
        if (logits[i] > logits[top]) top = i;
    return top;
}

static token_sampler *make(const oai_sampling *s)
{
    token_sampler *t = token_sampler_new(vocab, s, NULL, 1024);
    assert_non_null(t);
    return t;
}

static llama_token first(const oai_sampling *s)
{
    token_sampler *t = make(s);
    llama_token token = token_sampler_next(t, logits, scratch);
    token_sampler_free(t);
    return token;
}

/* Temperature 0, one candidate, all the mass at the top: each of them is the likeliest token, whatever else is asked. */
static void test_what_is_greedy(void **state)
{
    (void)state;
    for (int round = 0; round < 50; round++) {
        make_logits();
        for (int how = 0; how < 5; how++) {
            oai_sampling s = defaults();
            s.has_seed = true;
            s.seed = (uint32_t)round;
            s.temperature = how == 0 ? 0 : how == 4 ? 1e-7 : 1.9;
            if (how == 1) s.top_k = 1;
            if (how == 2) s.top_p = 1e-6;
            if (how == 3) s.min_p = 1;
            assert_int_equal(first(&s), largest());
        }
    }
}

/* The same seed gives the same tokens, others give others; none is out of reach at a high temperature. */
static void test_seeds(void **state)
{
    (void)state;
    enum { N = 40 };
    make_logits();
    llama_token got[3][N];
    for (uint32_t k = 0; k < 3; k++) {
        oai_sampling s = defaults();
        s.temperature = 2;
        s.has_seed = true;
        s.seed = k == 2 ? 8 : 7;
        token_sampler *t = make(&s);
        for (size_t i = 0; i < N; i++) got[k][i] = token_sampler_next(t, logits, scratch);
        token_sampler_free(t);
    }
    assert_memory_equal(got[0], got[1], sizeof got[0]);
    assert_memory_not_equal(got[0], got[2], sizeof got[0]);
}

/* Only candidates that the fields leave are ever chosen. */
static void test_candidates(void **state)
{
    (void)state;
    for (int round = 0; round < 20; round++) {
        make_logits();
        float max = logits[largest()];
        for (int how = 0; how < 2; how++) {
            oai_sampling s = defaults();
            s.temperature = 1;
            s.has_seed = true;
            s.seed = (uint32_t)round;
            if (how == 0) s.top_k = 5;
            else s.min_p = 0.2;
            token_sampler *t = make(&s);
            for (int i = 0; i < 50; i++) {
                llama_token token = token_sampler_next(t, logits, scratch);
                size_t larger = 0;
                for (size_t k = 0; k < N_VOCAB; k++) larger += logits[k] > logits[token];
                if (how == 0) assert_true(larger < 5);
                else assert_true(exp((double)(logits[token] - max)) >= 0.2 - 1e-6);
            }
            token_sampler_free(t);
        }
    }
}

/* -100 keeps a token away, 100 makes it win, at any temperature; biases of tokens that there aren't are nothing. */
static void test_bias(void **state)
{
    (void)state;
    make_logits();
    llama_token top = largest();
    for (int warm = 0; warm < 2; warm++) {
        oai_bias bias[] = {{top, -100}, {N_VOCAB + 7, 100}};
        oai_sampling s = defaults();
        s.temperature = warm;
        s.has_seed = true;
        s.bias = bias;
        s.n_bias = 2;
        token_sampler *t = make(&s);
        for (int i = 0; i < 200; i++) assert_int_not_equal(token_sampler_next(t, logits, scratch), top);
        token_sampler_free(t);
        bias[0] = (oai_bias){(top + 1) % N_VOCAB, 100};
        assert_int_equal(first(&s), (top + 1) % N_VOCAB);
    }
}

/* A token that was chosen loses by each penalty, so that others get their turn; without any it comes for ever. */
static void test_penalties(void **state)
{
    (void)state;
    make_logits();
    llama_token top = largest(), second = top == 0 ? 1 : 0;
    for (llama_token i = 0; i < N_VOCAB; i++)
        if (i != top && logits[i] > logits[second]) second = i;
    logits[top] = 3;
    logits[second] = 2.5f;
    for (llama_token i = 0; i < N_VOCAB; i++)
        if (i != top && i != second) logits[i] = -4;
    for (int how = 0; how < 4; how++) {
        oai_sampling s = defaults();
        s.temperature = 0;
        if (how == 1) s.presence_penalty = 1;
        if (how == 2) s.frequency_penalty = 1;
        if (how == 3) s.repeat_penalty = 1.5;
        token_sampler *t = make(&s);
        assert_int_equal(token_sampler_next(t, logits, scratch), top);
        assert_int_equal(token_sampler_next(t, logits, scratch), how == 0 ? top : second);
        token_sampler_free(t);
    }
}

static int setup(void **state)
{
    (void)state;
    rng = imp_test_seed() | 1;
    model = make_model(NULL, false);
    vocab = llama_model_get_vocab(model);
    assert_int_equal(llama_vocab_n_tokens(vocab), N_VOCAB);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    llama_model_free(model);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_greedy), cmocka_unit_test(test_seeds),     cmocka_unit_test(test_candidates),
        cmocka_unit_test(test_bias),           cmocka_unit_test(test_penalties),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
