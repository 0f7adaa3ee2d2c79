/* chat_refs.h: the `$ref`s of a request's JSON schemas, made fit for llama.cpp's grammars. For chat_template.c. */
#ifndef CHAT_REFS_H
#define CHAT_REFS_H

#include "chat_ways.h"

/* What is known of a request's schemas so far. Begins zeroed. */
typedef struct chat_refs {
    json_t *rules; /* from the name of the rule that a `$ref` becomes to what the rule is of */
    json_t *again; /* what the last schema's `$ref`s lead to that is part of something else: it is built once more */
    size_t n_names, entries, ways; /* given; looked at; through unions */
    double letters;       /* about as many as in the names of the grammar's rules, each time that one is given */
    double bytes;         /* of these, told once */
    double optional_work; /* third powers of the numbers of properties that may be left out, of what `allOf`s copy */
} chat_refs;

/* Have an `allOf` of nothing but a `$ref` be that `$ref`, wherever one stands: it means the same. Not for schemas that
 * have a `$ref` into an `allOf`. Returns whether there was one. */
bool chat_refs_unwrap(json_t *schema);

/* The properties that a schema itself lets be left out. */
size_t chat_refs_optional(const json_t *schema);

/* Look at one more schema. Returns 0, and whether it was rewritten, or -1 with *e, which names `param`. */
int chat_refs_settle(chat_refs *all, json_t *schema, const char *param, bool *rewritten, oai_error *e);
void chat_refs_free(chat_refs *all);

#endif
