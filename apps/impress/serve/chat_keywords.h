/* chat_keywords.h: kinds of JSON schema's keywords, for what walks through schemas. */
#ifndef CHAT_KEYWORDS_H
#define CHAT_KEYWORDS_H

#include <stdbool.h>

/* Lists end with a NULL. Values are no schemas, and of a map of schemas the keys are no keywords. */
extern const char *const chat_keywords_maps[];
extern const char *const chat_keywords_data[];
/* Those that say nothing of a value; the first four of them stay where they are if others go elsewhere. */
extern const char *const chat_keywords_remarks[];
enum { CHAT_KEYWORDS_OF_PLACE = 4 };

bool chat_listed(const char *const *list, const char *name);

#endif
