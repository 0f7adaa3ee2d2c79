#include "eval_score.h"

#include <stdlib.h>
#include <string.h>

#include "eval_rows.h"
#include "eval_stats.h"

static size_t common(const llama_token *a, size_t n_a, const llama_token *b, size_t n_b)
{
    size_t n = 0;
    while (n < n_a && n < n_b && a[n] == b[n]) n++;
    return n;
}

static void hash_tokens(uint64_t *hash, const llama_token *tokens, size_t n)
{
    uint64_t count = n;
    *hash = eval_hash(*hash, &count, sizeof count);
    *hash = eval_hash(*hash, tokens, n * sizeof *tokens);
}

int eval_question_make(const struct llama_model *model, const char *prefix, const task_example *example,
                       eval_question *out)
{
    memset(out, 0, sizeof *out);
    out->example = example;
    const struct llama_vocab *vocab = llama_model_get_vocab(model);
    size_t n_choices = example->n_choices, prefix_bytes = strlen(prefix), query_bytes = strlen(example->query);
    size_t longest = 0;
    for (size_t i = 0; i < n_choices; i++)
        if (strlen(example->choices[i]) > longest) longest = strlen(example->choices[i]);

    bool ok = false;
    app_prompt bare = {0}, *whole = calloc(n_choices, sizeof *whole);
    char *text = malloc(prefix_bytes + 2 + query_bytes + 1 + longest + 1);
    out->choices = calloc(n_choices, sizeof *out->choices);
    if (!whole || !text || !out->choices) goto end;

    size_t n = 0;
    if (prefix_bytes) {
        memcpy(text, prefix, prefix_bytes);
        memcpy(text + prefix_bytes, "\n\n", 2);
        n = prefix_bytes + 2;
        if (!app_prompt_append(vocab, &bare, text, n, true, false)) goto end;
    }
    memcpy(text + n, example->query, query_bytes);
    n += query_bytes;
    if (!app_prompt_append(vocab, &out->context, text, n, true, false)) goto end;
    size_t seam = out->context.n;
    text[n++] = ' ';
    for (size_t i = 0; i < n_choices; i++) {
        size_t bytes = strlen(example->choices[i]);
        memcpy(text + n, example->choices[i], bytes);
        if (!app_prompt_append(vocab, &whole[i], text, n + bytes, true, false)) goto end;
        seam = common(whole[i].tokens, whole[i].n, out->context.tokens, seam);
    }
    if (seam == 0) goto end;
    out->context.n = seam;
    out->context.n_prefix = common(bare.tokens, bare.n, out->context.tokens, seam - 1);

    out->hash = EVAL_HASH_SEED;
    hash_tokens(&out->hash, out->context.tokens, seam);
    for (size_t i = 0; i < n_choices; i++) {
        eval_choice *c = &out->choices[i];
        c->n = whole[i].n - seam;
        if (c->n == 0 || !(c->tokens = malloc(c->n * sizeof *c->tokens))) goto end;
        memcpy(c->tokens, whole[i].tokens + seam, c->n * sizeof *c->tokens);
        c->characters = (double)eval_characters(example->choices[i]);
        if (c->n > out->longest) out->longest = c->n;
        hash_tokens(&out->hash, c->tokens, c->n);
    }
    out->hash = eval_hash(out->hash, &example->answer, sizeof example->answer);
    ok = true;
end:
    for (size_t i = 0; whole && i < n_choices; i++) app_prompt_free(&whole[i]);
    free(whole);
    app_prompt_free(&bare);
    free(text);
    if (ok) return 0;
    eval_question_free(out);
    return app_fail("question %s can't be turned into tokens (out of memory, or too long)", example->id);
}

void eval_question_free(eval_question *q)
{
    for (size_t i = 0; q->choices && i < q->example->n_choices; i++) free(q->choices[i].tokens);
    free(q->choices);
    app_prompt_free(&q->context);
    memset(q, 0, sizeof *q);
}

/* Decode `n` tokens of sequence 0 from position `pos` on, at most a batch of them. */
static int decode(imp_llama *ctx, const llama_token *tokens, size_t n, size_t pos, bool all_logits, bool last_logits,
                  const char *id)
{
    struct llama_batch batch = llama_batch_init((int32_t)n, 0, 1);
    batch.n_tokens = (int32_t)n;
    for (size_t i = 0; i < n; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = (llama_pos)(pos + i);
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = all_logits || (last_logits && i + 1 == n);
    }
    int32_t code = imp_llama_decode(ctx, batch);
    llama_batch_free(batch);
    if (code == 1) return app_fail("question %s doesn't fit the context", id);
    return code ? app_fail("llama.cpp failed to compute question %s (code %d)", id, code) : 0;
}

int eval_read_question(imp_llama *ctx, const eval_question *q, size_t from)
{
    size_t step = llama_n_batch(imp_llama_context(ctx)), end = q->context.n;
    int rc = 0;
    for (size_t at = from; rc == 0 && at < end; at += step) {
        size_t n = end - at < step ? end - at : step;
        rc = decode(ctx, q->context.tokens + at, n, at, false, at + n == end, q->example->id);
    }
    return rc;
}

int eval_score_choices(imp_llama *ctx, const eval_question *q, double *logprobs)
{
    size_t n_vocab = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(imp_llama_context(ctx))));
    size_t step = llama_n_batch(imp_llama_context(ctx));
    /* The first token of every choice comes from the question's own logits, which the next decode overwrites. */
    const float *logits = app_logits(ctx);
    if (!logits) return 1;
    double z = app_log_sum_exp(logits, n_vocab);
    for (size_t i = 0; i < q->example->n_choices; i++) logprobs[i] = (double)logits[q->choices[i].tokens[0]] - z;

    for (size_t i = 0; i < q->example->n_choices; i++) {
        const eval_choice *c = &q->choices[i];
        for (size_t at = 0; at + 1 < c->n; at += step) { /* the last token is only predicted */
            size_t n = c->n - 1 - at < step ? c->n - 1 - at : step;
            int rc = decode(ctx, c->tokens + at, n, q->context.n + at, true, false, q->example->id);
            if (rc) return rc;
            for (size_t k = 0; k < n; k++) {
                logits = imp_llama_get_logits_ith(ctx, (int32_t)k);
                if (!logits) return app_fail("llama.cpp gave no logits for a choice of question %s", q->example->id);
                logprobs[i] += (double)logits[c->tokens[at + k + 1]] - app_log_sum_exp(logits, n_vocab);
            }
        }
        if (c->n > 1 && !imp_llama_seq_rm(ctx, 0, (llama_pos)q->context.n, -1))
            return app_fail("the model can't take back a choice of question %s", q->example->id);
    }
    return 0;
}
