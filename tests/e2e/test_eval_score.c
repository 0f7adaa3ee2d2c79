/* What choices are worth, against llama.cpp alone: each prompt with its choice decoded whole, in an empty context. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "eval_score.h"

static struct llama_model *model;

static double plain_logprob(struct llama_context *ctx, const llama_token *tokens, size_t n, size_t from)
{
    size_t n_vocab = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_memory_clear(llama_get_memory(ctx), true);
    struct llama_batch batch = llama_batch_init((int32_t)n, 0, 1);
    batch.n_tokens = (int32_t)n;
    for (size_t i = 0; i < n; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = (llama_pos)i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    assert_int_equal(llama_decode(ctx, batch), 0);
    double sum = 0;
    for (size_t i = from; i < n; i++) {
        const float *logits = llama_get_logits_ith(ctx, (int32_t)i - 1);
        double top = -INFINITY, z = 0;
        for (size_t t = 0; t < n_vocab; t++) top = fmax(top, (double)logits[t]);
        for (size_t t = 0; t < n_vocab; t++) z += exp((double)logits[t] - top);
        sum += (double)logits[tokens[i]] - top - log(z);
    }
    llama_batch_free(batch);
    return sum;
}

static void check(const char *prefix, const task_example *example, uint32_t n_batch)
{
    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = 512;
    cp.n_batch = 512;
    cp.n_threads = cp.n_threads_batch = 1;
    struct llama_context *plain = llama_init_from_model(model, cp);
    assert_non_null(plain);
    imp_llama_params params;
    imp_llama_params_init(&params);
    params.request.load.retention = 1;
    params.request.recompute = true;
    cp.n_batch = n_batch;
    imp_llama *ctx;
    assert_int_equal(imp_llama_init(model, cp, &params, &ctx), 0);

    /* The text as one piece: what the tokens of context and choice must be together. */
    eval_question q;
    assert_int_equal(eval_question_make(model, prefix, example, &q), 0);
    double got[TASK_MAX_CHOICES], again[TASK_MAX_CHOICES];
    assert_int_equal(eval_read_question(ctx, &q, 0), 0);
    assert_int_equal(eval_score_choices(ctx, &q, got), 0);
    /* And from the shared prefix on, in the same cells: the same. */
    assert_true(imp_llama_seq_rm(ctx, 0, (llama_pos)q.context.n_prefix, -1));
    assert_int_equal(eval_read_question(ctx, &q, q.context.n_prefix), 0);
    assert_int_equal(eval_score_choices(ctx, &q, again), 0);
    for (size_t i = 0; i < example->n_choices; i++) {
        char text[2048];
        snprintf(text, sizeof text, "%s%s%s %s", prefix, *prefix ? "\n\n" : "", example->query, example->choices[i]);
        app_prompt whole = {0};
        assert_true(app_prompt_append(llama_model_get_vocab(model), &whole, text, strlen(text), true, false));
        assert_int_equal(whole.n, q.context.n + q.choices[i].n);
        assert_memory_equal(whole.tokens, q.context.tokens, q.context.n * sizeof *whole.tokens);
        assert_memory_equal(whole.tokens + q.context.n, q.choices[i].tokens, q.choices[i].n * sizeof *whole.tokens);
        double want = plain_logprob(plain, whole.tokens, whole.n, q.context.n);
        assert_true(want < 0);
        printf("%s: %f, %f again, %f alone\n", example->choices[i], got[i], again[i], want);
        assert_true(fabs(got[i] - want) < 0.02 * (1 + fabs(want)) && fabs(again[i] - want) < 0.02 * (1 + fabs(want)));
        app_prompt_free(&whole);
    }
    eval_question_free(&q);
    imp_llama_free(ctx);
    llama_free(plain);
}

static void test_choices(void **unused)
{
    (void)unused;
    static char *choices[] = {"True", "False", "It depends on how the question is meant, and by whom.", "4!"};
    task_example example = {.id = "1", .query = "Two and two are four. True or False?\nAnswer:", .choices = choices,
                            .n_choices = 4};
    check("", &example, 512);
    check("One and one are three. True or False?\nAnswer: False", &example, 512);
    check("One and one are three. True or False?\nAnswer: False", &example, 4); /* in several batches */
    static char *odd[] = {" a", "\xc3\xa9t\xc3\xa9", "the\nend", "12345678"};
    example.choices = odd;
    example.query = "The number is 1 2 3 ";
    check("Count:", &example, 512);
}

static int setup(void **unused)
{
    (void)unused;
    return app_model_load(getenv("IMPRESS_MODEL"), false, &model);
}

static int teardown(void **unused)
{
    (void)unused;
    llama_model_free(model);
    return 0;
}

int main(void)
{
    const char *path = getenv("IMPRESS_MODEL");
    if (!path || !*path) {
        puts("skipped: no model (scripts/get-model.sh gets it)");
        return 77;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_choices)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
