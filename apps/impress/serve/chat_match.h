/* chat_match.h: texts against a grammar, token by token. For chat_grammar.c and tests.
 *
 * llama.cpp's own keeps each way in which a text can be read as a stack. Two ways that differ only in what will follow
 * make it two stacks, and after n such characters 2^n: an ordinary schema that refers to itself in a union does so, and
 * all requests of a server wait for it. Here what is to follow is shared by all ways that came to the same rule at the
 * same character, or from which it goes on alike (a graph in the place of stacks), so that a character costs what the
 * grammar's rules do, whatever was read before. What tokens a text can go on with is found for all of the vocabulary at
 * once, in the order of their texts: what two have in common is read once.
 *
 * There are grammars of which ever more has to be kept apart, and looked at for each character. They get so much work
 * and no more: each token of the text adds to it. */
#ifndef CHAT_MATCH_H
#define CHAT_MATCH_H

#include <llama.h>
#include <stdbool.h>
#include <stddef.h>

#include "chat_gbnf.h"

/* The texts of a vocabulary's tokens, sorted. Threads: any, several at once. */
typedef struct match_words match_words;
match_words *match_words_new(const struct llama_vocab *vocab); /* NULL: no memory */
void match_words_free(match_words *w);                         /* NULL is allowed */

/* A text that is being read. Not thread-safe. */
typedef struct matcher matcher;
/* The grammar and the words must stay. NULL: no memory. */
matcher *matcher_new(const gbnf *g, const match_words *w);
void matcher_free(matcher *m); /* NULL is allowed */
/* Whether a token may come next; one that ends an answer: whether the text may end. */
bool matcher_allows(matcher *m, llama_token token);
/* Set the logits of all that may not to -INFINITY. */
void matcher_apply(matcher *m, llama_token_data_array *candidates);
/* Take a token in. False: it may not come, and wasn't taken in, or see matcher_failed(). */
bool matcher_accept(matcher *m, llama_token token);
/* The same of a token without the first bytes of its text. */
bool matcher_accept_end(matcher *m, llama_token token, size_t skipped);
/* There was too much work, or no memory: from then on matcher_apply() leaves none, and none is taken in. */
bool matcher_failed(const matcher *m);

#endif
