/* answer.h: one request through the prefix-aware context: prefill, first token, the rest of the answer. */
#ifndef APP_ANSWER_H
#define APP_ANSWER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "impress/llama.h"
#include "model.h"

/* What a request took. Times are of this request alone; ttft_ns is 0 where it wasn't measured. */
typedef struct app_row {
    const char *system;
    double retention;
    double mass_asked; /* 0: the retention is what was asked for, else the most */
    size_t prompt_tokens, prefix_tokens;
    uint64_t ttft_ns;
    imp_llama_report report;
    bool compared; /* kl and top1_same are set */
    double kl;     /* of the first answer token's distribution to recompute's, in nats */
    bool top1_same;
    char *answer; /* NULL: none was asked for. Owned by the row */
    size_t answer_tokens;
    uint64_t answer_ns; /* from the first token to the last */
} app_row;

void app_row_free(app_row *row);

/* Decode prompt tokens [from, n) on sequence 0, with logits for the last, and take in what it took. A batch ends where
 * the query of a loaded prefix starts, so that the question is computed in batches of the same shape wherever the
 * prefix came from: rounding in llama.cpp depends on the shape, and answers could otherwise differ by that alone.
 * Returns 0 or an exit code. */
int app_prefill(imp_llama *ctx, const app_prompt *prompt, size_t from, app_row *row);

/* Generate up to `max_tokens` after app_prefill(), greedily if temperature is 0. With `stream` each piece of text goes
 * to stdout as it comes. Fills the answer fields of `row`, and its ttft_ns ends at the first token. */
int app_generate(imp_llama *ctx, const app_prompt *prompt, size_t max_tokens, double temperature, uint32_t seed,
                 bool stream, app_row *row);

/* The logits after app_prefill(), [n_vocab]; NULL after a line if there are none. */
const float *app_logits(imp_llama *ctx);

/* log of the sum of exp over n > 0 logits: a logit minus it is the log-probability of its token. */
double app_log_sum_exp(const float *logits, size_t n);

/* KL(softmax(reference) || softmax(logits)) in nats, and whether the largest entry is the same. */
double app_kl(const float *reference, const float *logits, size_t n, bool *top1_same);

uint64_t app_now_ns(void);

#endif
