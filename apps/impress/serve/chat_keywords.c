#include "chat_keywords.h"

#include <string.h>

const char *const chat_keywords_maps[] = {"properties", "patternProperties", "dependentSchemas",
                                          "$defs",      "definitions",       NULL};
const char *const chat_keywords_data[] = {"enum", "const", "default", "examples", "required", NULL};
const char *const chat_keywords_remarks[] = {
    "$schema",  "$id",        "$defs",    "definitions", "title",    "description", "default",
    "examples", "deprecated", "readOnly", "writeOnly",   "$comment", NULL};

bool chat_listed(const char *const *list, const char *name)
{
    while (*list && strcmp(*list, name) != 0) list++;
    return *list != NULL;
}
