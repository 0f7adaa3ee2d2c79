/* chat_strict.h: a JSON schema that is to be kept to the letter. */
#ifndef CHAT_STRICT_H
#define CHAT_STRICT_H

#include "chat_ways.h"

/* Refuse what llama.cpp's grammars leave out of a schema: keywords, and keywords beside others that count alone there.
 * Returns 0, or -1 with *e, which names `param`. */
int chat_strict_check(const chat_way *way, const json_t *schema, const char *param, oai_error *e);

#endif
