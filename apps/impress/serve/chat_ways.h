/* chat_ways.h: the two ways from a request to a prompt and back, behind one table of functions. For chat_template.c,
 * which uses them, and for tests; chat_plain.c and chat_common.cpp implement it, so this header is C and C++. */
#ifndef CHAT_WAYS_H
#define CHAT_WAYS_H

#include <jansson.h>
#include <llama.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "chat_template.h" /* which is C alone */

struct match_words;

typedef struct chat_texts {
    char **items; /* [n], allocated each by itself */
    size_t n;
} chat_texts;

/* What a template makes of a request. Texts are allocated; chat_rendering_free() frees all. */
typedef struct chat_rendering {
    char *prompt;
    char *grammar; /* GBNF; NULL: none */
    bool lazy;     /* it begins where one of `words` or `patterns` (std::regex) comes */
    chat_texts words, patterns;
    char *begin;   /* what the answer must begin with; NULL: nothing */
    char *prefill; /* the prompt's end, as far as grammar and parser take it for a part of the answer; NULL: nothing */
    chat_texts preserved, stops;
    char *think_start;     /* NULL: there is no reasoning */
    chat_texts think_ends;
    void *parser; /* of the answer; NULL: all of it is content */
} chat_rendering;

typedef struct chat_call {
    char *id, *name, *arguments; /* id "": none */
} chat_call;

typedef struct chat_parsed {
    char *content, *reasoning; /* "": none */
    chat_call *calls;          /* [n_calls] */
    size_t n_calls;
} chat_parsed;

typedef struct chat_way {
    bool jinja, schema;
    /* Whether the template has a place for tools, and one for calls of them. NULL: no template has. */
    bool (*takes_tools)(const void *templates);
    bool (*takes_calls)(const void *templates);
    /* NULL `source`: the model's template. */
    int (*open)(const struct llama_model *model, const char *source, void **out, oai_error *e);
    void (*close)(void *templates);
    /* *out is zeroed before. May leave it half filled on failure. */
    int (*render)(const void *templates, const oai_request *r, chat_rendering *out, oai_error *e);
    void (*parser_free)(void *parser);
    /* Parse the beginning of an answer (`partial`), or all of it. Returns -1 where it doesn't keep to the form. */
    int (*parse)(const void *parser, const char *text, bool partial, chat_parsed *out);
    /* NULL: no memory, or a schema that can't become a grammar, which *e says. */
    char *(*grammar_of)(const char *schema, oai_error *e);
    /* llama_sampler_accept(), false where it fails. */
    bool (*accept)(struct llama_sampler *s, llama_token token);
} chat_way;

extern const chat_way chat_way_plain;
#if IMPRESS_HAVE_LLAMA_COMMON
extern const chat_way chat_way_common;
#endif

/* chat_template_open() with a way; it takes the best there is. */
int chat_template_open_way(const chat_way *way, const struct llama_model *model, const char *source,
                           chat_template **out, oai_error *e);

/* ---- what chat_template.c, chat_grammar.c and chat_answer.c share */

struct chat_plan {
    const chat_way *way;
    const struct llama_vocab *vocab;
    chat_rendering r;
    bool own_grammar; /* the grammar is the client's: the prefill is no part of it */
    bool one_call;    /* the answer may call one tool only */
    const struct match_words *words; /* of the vocabulary, for a grammar; NULL: it makes its own */
    llama_token *tokens; /* [n_tokens] */
    size_t n_tokens;
    chat_texts stops;
    llama_token *shown; /* [n_shown] */
    size_t n_shown;
};

/* Random hexadecimal digits, 2 n of them and a NUL. False: the system has none. */
bool chat_random_digits(char *out, size_t n);

/* A grammar of any JSON object. */
extern const char chat_json_grammar[];

/* Add a copy. False: no memory. */
bool chat_texts_add(chat_texts *t, const char *text);
void chat_texts_free(chat_texts *t);
void chat_rendering_free(const chat_way *way, chat_rendering *r);
void chat_parsed_free(chat_parsed *p);

#ifdef __cplusplus
}
#endif

#endif
