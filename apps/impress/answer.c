#include "answer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "text.h"

uint64_t app_now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

void app_row_free(app_row *row)
{
    free(row->answer);
    row->answer = NULL;
}

int app_prefill(imp_llama *ctx, const app_prompt *prompt, size_t from, app_row *row)
{
    size_t step = llama_n_batch(imp_llama_context(ctx));
    text_progress progress = {.label = "reading the prompt"};
    uint64_t start = app_now_ns();
    int32_t rc = 0;
    struct llama_batch batch = llama_batch_init((int32_t)step, 0, 1);
    size_t cut = imp_llama_query_start(ctx, prompt->n, prompt->n_prefix);
    for (size_t at = from, n; rc == 0 && at < prompt->n; at += n) {
        size_t end = at < cut ? cut : prompt->n;
        n = end - at < step ? end - at : step;
        batch.n_tokens = (int32_t)n;
        for (size_t i = 0; i < n; i++) {
            batch.token[i] = prompt->tokens[at + i];
            batch.pos[i] = (llama_pos)(at + i);
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = at + i + 1 == prompt->n;
        }
        rc = imp_llama_decode(ctx, batch);
        char detail[64];
        snprintf(detail, sizeof detail, "%zu of %zu tokens", at + n, prompt->n);
        text_progress_at(&progress, (double)(at + n) / (double)prompt->n, detail);
    }
    llama_batch_free(batch);
    text_progress_end(&progress);
    row->ttft_ns = app_now_ns() - start;
    row->prompt_tokens = prompt->n;
    row->prefix_tokens = prompt->n_prefix;
    if (rc == 1) return app_fail("the prompt of %zu tokens doesn't fit the context", prompt->n);
    if (rc != 0) return app_fail("llama.cpp failed to compute the prompt (code %d)", rc);
    int status = imp_llama_get_report(ctx, 0, &row->report);
    if (status < 0) return app_fail("%s", imp_last_error());
    if (row->report.prompt_tokens == 0)
        row->report.query_tokens = prompt->n - from; /* plain llama.cpp, nothing is watched */
    return 0;
}

const float *app_logits(imp_llama *ctx)
{
    const float *logits = imp_llama_get_logits_ith(ctx, -1);
    if (!logits) app_fail("llama.cpp gave no logits for the prompt");
    return logits;
}

static struct llama_sampler *make_sampler(double temperature, uint32_t seed)
{
    struct llama_sampler *chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    if (temperature > 1e-6) { /* below, logits divided by it leave the range of floats */
        llama_sampler_chain_add(chain, llama_sampler_init_temp((float)temperature));
        llama_sampler_chain_add(chain, llama_sampler_init_dist(seed));
    } else {
        llama_sampler_chain_add(chain, llama_sampler_init_greedy());
    }
    return chain;
}

int app_generate(imp_llama *ctx, const app_prompt *prompt, size_t max_tokens, double temperature, uint32_t seed,
                 bool stream, app_row *row)
{
    const struct llama_model *model = llama_get_model(imp_llama_context(ctx));
    const struct llama_vocab *vocab = llama_model_get_vocab(model);
    struct llama_sampler *sampler = make_sampler(temperature, seed);
    size_t cap = 1024, length = 0;
    int rc = 0;
    row->answer_tokens = 0;
    row->answer = malloc(cap);
    uint64_t start = app_now_ns(), first = 0;
    struct llama_batch batch = llama_batch_init(1, 0, 1);
    if (!row->answer) rc = app_fail("out of memory");
    while (rc == 0 && row->answer_tokens < max_tokens) {
        llama_token token = imp_llama_sampler_sample(sampler, ctx, -1);
        if (!first) first = app_now_ns();
        if (llama_vocab_is_eog(vocab, token)) break;
        char piece[256];
        size_t n = app_token_text(model, token, piece, sizeof piece);
        if (length + n + 1 > cap) {
            char *more = realloc(row->answer, cap = 2 * (length + n + 1));
            if (!more) {
                rc = app_fail("out of memory");
                break;
            }
            row->answer = more;
        }
        memcpy(row->answer + length, piece, n);
        length += n;
        row->answer_tokens++;
        if (stream) {
            fwrite(piece, 1, n, stdout);
            if (fflush(stdout) != 0) break; /* nobody listens any more; what was computed is still stored */
        }
        if (row->answer_tokens == max_tokens) break;
        batch.n_tokens = 1;
        batch.token[0] = token;
        batch.pos[0] = (llama_pos)(prompt->n + row->answer_tokens - 1);
        batch.n_seq_id[0] = 1;
        batch.seq_id[0][0] = 0;
        batch.logits[0] = 1;
        int32_t code = imp_llama_decode(ctx, batch);
        if (code != 0) rc = app_fail("llama.cpp failed to compute the answer (code %d)", code);
    }
    if (row->answer) row->answer[length] = '\0';
    if (first) {
        row->ttft_ns += first - start;
        row->answer_ns = app_now_ns() - first;
    }
    if (stream && length > 0) {
        putchar('\n');
        fflush(stdout); /* before anything that goes to standard error */
    }
    llama_batch_free(batch);
    llama_sampler_free(sampler);
    return rc;
}

static double log_sum_exp_top(const float *x, size_t n, size_t *top)
{
    *top = 0;
    for (size_t i = 1; i < n; i++)
        if (x[i] > x[*top]) *top = i;
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += exp((double)x[i] - (double)x[*top]);
    return (double)x[*top] + log(sum);
}

double app_log_sum_exp(const float *logits, size_t n)
{
    size_t top;
    return log_sum_exp_top(logits, n, &top);
}

double app_kl(const float *reference, const float *logits, size_t n, bool *top1_same)
{
    size_t top_r, top_l;
    double zr = log_sum_exp_top(reference, n, &top_r), zl = log_sum_exp_top(logits, n, &top_l);
    double kl = 0;
    for (size_t i = 0; i < n; i++) {
        double lr = (double)reference[i] - zr;
        kl += exp(lr) * (lr - ((double)logits[i] - zl));
    }
    *top1_same = top_r == top_l;
    return kl > 0 ? kl : 0; /* rounding may leave a tiny negative number */
}
