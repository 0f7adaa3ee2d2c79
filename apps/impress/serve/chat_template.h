/* chat_template.h: from a checked request to the tokens of a prompt, the grammar of the answer, and from the answer's
 * text back to content, reasoning and tool calls.
 *
 * Two ways, chosen when the program is built. With llama.cpp's common library (chat_common.cpp): Jinja templates,
 * tools, JSON schemas. Without (chat_plain.c): the templates that llama.cpp's C API knows by their look, JSON objects
 * and GBNF; what else a request asks for is refused, and told. chat_template_capabilities() says which.
 *
 * A text that spells one of the model's control tokens inside a message stays text: such places are marked, found again
 * in what the template made, and turned into tokens on their own. (Tokens that a vocabulary marks as user-defined are
 * found in any text by llama.cpp's tokeniser; they end no turn.) Tools, which a program writes and no user, are not
 * searched. A prompt of /v1/completions is the client's own template: in there all special tokens count.
 *
 * No C++ exception leaves these functions, and no answer of the model or grammar of a client ends the process. */
#ifndef CHAT_TEMPLATE_H
#define CHAT_TEMPLATE_H

#include <llama.h>
#include <stdbool.h>
#include <stddef.h>

#include "oai_reply.h"
#include "oai_request.h"

/* What this build can do with this model's template. */
typedef struct chat_capabilities {
    bool chat;   /* there is a usable template; else chats are refused, and only completions work */
    bool jinja;  /* templates are run; else only recognised ones are known */
    bool tools;  /* tool calls, in and out */
    bool schema; /* response_format json_schema */
    bool plain;  /* the model has no template of its own: ChatML is used */
} chat_capabilities;

typedef struct chat_template chat_template; /* of a model. Threads: any, several at once */

/* `source`: a template to use instead of the model's; NULL: the model's. The model must stay. Returns 0, or -1 with *e:
 * `source` isn't recognised, or is no Jinja. A model's own template of which that is so gives 0 and no `chat`. */
int chat_template_open(const struct llama_model *model, const char *source, chat_template **out, oai_error *e);
void chat_template_close(chat_template *t); /* NULL is allowed */
chat_capabilities chat_template_capabilities(const chat_template *t);

typedef struct chat_plan chat_plan; /* of one request */

/* Work out a request of either endpoint (chat: the template is applied; completions: the text with special tokens
 * parsed, or the tokens as sent). The request may be freed afterwards; the template must stay. Returns 0, or -1 with
 * *e. */
int chat_plan_make(const chat_template *t, const oai_request *r, chat_plan **out, oai_error *e);
void chat_plan_free(chat_plan *p); /* NULL is allowed */

/* The prompt, with its BOS where the model wants one. Never empty. Valid until chat_plan_free(). */
const llama_token *chat_plan_tokens(const chat_plan *p, size_t *n);
/* The stop strings to look for in the answer: the request's and the template's. Valid until chat_plan_free(). */
const char *const *chat_plan_stops(const chat_plan *p, size_t *n);
/* How a generated token's bytes are to be had for the answer's text: llama_token_to_piece(..., special): true for those
 * that the parser must see (tags of tool calls, reasoning), else false. */
bool chat_plan_shows(const chat_plan *p, llama_token token);

/* The grammar that the answer must keep, for sampling. Not thread-safe; one for each request in flight. */
typedef struct chat_grammar chat_grammar;
/* *out NULL with 0: there is none. -1: a GBNF that isn't one, *e says what is wrong. */
int chat_grammar_new(const chat_plan *p, chat_grammar **out, oai_error *e);
void chat_grammar_free(chat_grammar *g); /* NULL is allowed */
/* Whether the token may come next. Sample without the grammar first; only if the token isn't allowed, apply the grammar
 * to all candidates and sample again: far quicker than applying it to all of them each time. */
bool chat_grammar_allows(chat_grammar *g, llama_token token);
/* Set the logits of all candidates that may not come next to -INFINITY. */
void chat_grammar_apply(chat_grammar *g, llama_token_data_array *candidates);
/* Take in the token that was chosen (each one, also EOG). False: it can't be; end the answer with an error. */
bool chat_grammar_accept(chat_grammar *g, llama_token token);
/* Whether that is because it is too much work to find out what may come: see chat_match.h. */
bool chat_grammar_failed(const chat_grammar *g);

/* The answer's text, parsed as it comes. Not thread-safe; one for each request. */
typedef struct chat_answer chat_answer;
/* NULL: no memory. `p` must stay. */
chat_answer *chat_answer_new(const chat_plan *p);
void chat_answer_free(chat_answer *a); /* NULL is allowed */
typedef enum chat_end {
    CHAT_GOES_ON,
    CHAT_ENDED, /* by the model */
    CHAT_CUT,   /* by a limit or a stop string */
} chat_end;
/* Add bytes of the answer (cut anywhere; without stop strings and what follows them). With one of the ends nothing more
 * will come, and n may be 0. *pieces are what is new since the last call, whole characters only; valid until the next
 * call. An answer that doesn't keep to the template's form is given as text; of one that was cut what may have become a
 * call or reasoning is left out, as far as it isn't told as such. JSON nested deeper than 500 levels has no form: of a
 * call's arguments there is what came before. NUL bytes become U+FFFD. Returns 0, or -1: no memory. */
int chat_answer_add(chat_answer *a, const char *bytes, size_t n, chat_end end, const oai_piece **pieces,
                    size_t *n_pieces);
/* The whole so far, for replies that aren't streamed: call it after chat_answer_add() with one of the ends. */
int chat_answer_whole(chat_answer *a, const oai_piece **pieces, size_t *n_pieces);
/* The answer is to call tools: there are calls, and the last one is whole. The finish reason is OAI_TOOL_CALLS then. */
bool chat_answer_calls(const chat_answer *a);
/* What comes from now on isn't wanted: a second call, where the request wants one at a time. */
bool chat_answer_enough(const chat_answer *a);

#endif
