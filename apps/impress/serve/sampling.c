#include "sampling.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct token_sampler {
    struct llama_sampler *chain; /* all but the grammar */
    chat_grammar *grammar;
    bool greedy; /* the largest logit, and nothing that changes logits */
    size_t n_vocab;
    llama_token *never; /* [n_never]: with a bias of -100 */
    size_t n_never;
};

static bool add(struct llama_sampler *chain, struct llama_sampler *one)
{
    if (!one) return false;
    llama_sampler_chain_add(chain, one);
    return true;
}

static bool add_bias(token_sampler *t, const oai_sampling *s)
{
    llama_logit_bias *bias = calloc(s->n_bias, sizeof *bias);
    t->never = calloc(s->n_bias, sizeof *t->never);
    if (!bias || !t->never) {
        free(bias);
        return false;
    }
    size_t n = 0;
    for (size_t i = 0; i < s->n_bias; i++) {
        if (s->bias[i].token < 0 || (size_t)s->bias[i].token >= t->n_vocab) continue;
        bool never = s->bias[i].bias <= -100;
        if (never) t->never[t->n_never++] = s->bias[i].token;
        bias[n].token = s->bias[i].token;
        bias[n++].bias = never ? -INFINITY : s->bias[i].bias;
    }
    bool ok = add(t->chain, llama_sampler_init_logit_bias((int32_t)t->n_vocab, (int32_t)n, bias));
    free(bias);
    return ok;
}

token_sampler *token_sampler_new(const struct llama_vocab *vocab, const oai_sampling *s, chat_grammar *grammar,
                                 size_t n_window)
{
    token_sampler *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->grammar = grammar;
    t->n_vocab = (size_t)llama_vocab_n_tokens(vocab);
    t->chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    bool penalties = s->presence_penalty != 0 || s->frequency_penalty != 0 || s->repeat_penalty != 1;
    bool cold = s->temperature < 1e-6; /* logits divided by less leave the range of floats */
    t->greedy = cold && !penalties && s->n_bias == 0;
    bool ok = t->chain;
    if (ok && s->n_bias) ok = add_bias(t, s);
    if (ok && penalties)
        ok = add(t->chain, llama_sampler_init_penalties((int32_t)t->n_vocab, (int32_t)n_window,
                                                        (float)s->repeat_penalty, (float)s->frequency_penalty,
                                                        (float)s->presence_penalty));
    if (ok && cold) {
        ok = add(t->chain, llama_sampler_init_greedy());
    } else if (ok) {
        if (s->top_k > 0) ok = add(t->chain, llama_sampler_init_top_k(s->top_k));
        if (ok && s->top_p < 1) ok = add(t->chain, llama_sampler_init_top_p((float)s->top_p, 1));
        if (ok && s->min_p > 0) ok = add(t->chain, llama_sampler_init_min_p((float)s->min_p, 1));
        ok = ok && add(t->chain, llama_sampler_init_temp((float)s->temperature)) &&
             add(t->chain, llama_sampler_init_dist(s->has_seed ? s->seed : LLAMA_DEFAULT_SEED));
    }
    if (!ok) {
        token_sampler_free(t);
        return NULL;
    }
    return t;
}

void token_sampler_free(token_sampler *t)
{
    if (!t) return;
    if (t->chain) llama_sampler_free(t->chain);
    free(t->never);
    free(t);
}

static llama_token largest(const float *logits, size_t n)
{
    size_t top = 0;
    for (size_t i = 1; i < n; i++)
        if (logits[i] > logits[top]) top = i;
    return (llama_token)top;
}

/* By the chain, over what the grammar leaves (`allowed_only`) or over everything. */
static llama_token choose(token_sampler *t, const float *logits, llama_token_data *scratch, bool allowed_only)
{
    llama_token_data_array all = {scratch, t->n_vocab, -1, false};
    for (size_t i = 0; i < t->n_vocab; i++) scratch[i] = (llama_token_data){(llama_token)i, logits[i], 0};
    if (allowed_only) {
        for (size_t i = 0; i < t->n_never; i++) scratch[t->never[i]].logit = -INFINITY;
        chat_grammar_apply(t->grammar, &all);
        size_t n = 0; /* samplers may pick a token of no weight where others are left out by name only */
        for (size_t i = 0; i < all.size; i++)
            if (isfinite(all.data[i].logit)) all.data[n++] = all.data[i];
        all.size = n;
        all.sorted = false;
        if (n == 0) return LLAMA_TOKEN_NULL;
    }
    llama_sampler_apply(t->chain, &all);
    return all.selected < 0 ? LLAMA_TOKEN_NULL : all.data[all.selected].id;
}

llama_token token_sampler_next(token_sampler *t, const float *logits, llama_token_data *scratch)
{
    llama_token token = t->greedy ? largest(logits, t->n_vocab) : choose(t, logits, scratch, false);
    if (t->grammar && token != LLAMA_TOKEN_NULL) {
        if (!chat_grammar_allows(t->grammar, token)) token = choose(t, logits, scratch, true);
        if (token != LLAMA_TOKEN_NULL && !chat_grammar_accept(t->grammar, token)) token = LLAMA_TOKEN_NULL;
    }
    if (token != LLAMA_TOKEN_NULL) llama_sampler_accept(t->chain, token);
    return token;
}

double sampling_log_sum(const float *logits, size_t n_vocab)
{
    double top = (double)logits[largest(logits, n_vocab)], sum = 0;
    for (size_t i = 0; i < n_vocab; i++) sum += exp((double)logits[i] - top);
    return top + log(sum);
}

size_t sampling_top(const float *logits, size_t n_vocab, size_t n, llama_token *out)
{
    size_t have = 0;
    for (size_t i = 0; i < n_vocab; i++) {
        if (have == n && (n == 0 || logits[i] <= logits[out[n - 1]])) continue;
        size_t at = have < n ? have++ : n - 1;
        while (at > 0 && logits[i] > logits[out[at - 1]]) {
            out[at] = out[at - 1];
            at--;
        }
        out[at] = (llama_token)i;
    }
    return have;
}
