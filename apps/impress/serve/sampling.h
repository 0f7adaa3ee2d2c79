/* sampling.h: the next token from the logits of the last one. */
#ifndef SERVE_SAMPLING_H
#define SERVE_SAMPLING_H

#include <llama.h>
#include <stddef.h>

#include "chat_template.h"

typedef struct token_sampler token_sampler; /* of one request. Threads: one at a time */

/* `grammar` may be NULL; it stays the caller's, and must stay. `n_window`: how far back penalties look, tokens of the
 * answer. NULL: no memory. */
token_sampler *token_sampler_new(const struct llama_vocab *vocab, const oai_sampling *s, chat_grammar *grammar,
                                 size_t n_window);
void token_sampler_free(token_sampler *s); /* NULL is allowed */

/* Choose, and take note of the choice; `scratch` has room for n_vocab. LLAMA_TOKEN_NULL: the grammar leaves nothing
 * over. */
llama_token token_sampler_next(token_sampler *s, const float *logits, llama_token_data *scratch);

/* log of the sum of exp(logits): a logit less it is its token's log-probability. */
double sampling_log_sum(const float *logits, size_t n_vocab);
/* The indices of the `n` largest logits, largest first. Returns how many. */
size_t sampling_top(const float *logits, size_t n_vocab, size_t n, llama_token *out);

#endif
