#include "chat_strict.h"

#include <stdlib.h>
#include <string.h>

#include "chat_keywords.h"

enum { MAX_COUNT = 2000 /* what llama.cpp's grammars can count; it takes more for endless */ };

/* Whether a pattern takes part in the grammar: llama.cpp takes any string for one that it can't do, as for `x`, which
 * isn't anchored. */
static bool pattern_kept(const chat_way *way, const json_t *pattern)
{
    json_t *with = json_pack("{s:s,s:O}", "type", "string", "pattern", pattern);
    char *text = with ? json_dumps(with, JSON_COMPACT) : NULL;
    oai_error ignored;
    char *got = text ? way->grammar_of(text, &ignored) : NULL;
    char *any = way->grammar_of("{\"type\":\"string\",\"pattern\":\"x\"}", &ignored);
    bool kept = got && any && strcmp(got, any) != 0;
    free(got);
    free(any);
    free(text);
    json_decref(with);
    return kept;
}

/* Whether a value's type, or one of several, is called `name`. A schema without any has none. */
static bool has_type(const json_t *v, const char *name)
{
    const json_t *type = json_object_get(v, "type"), *one;
    size_t i;
    if (json_is_string(type)) return strcmp(json_string_value(type), name) == 0;
    json_array_foreach((json_t *)type, i, one) {
        if (json_is_string(one) && strcmp(json_string_value(one), name) == 0) return true;
    }
    return false;
}

static bool is_of_type(const json_t *schema, const json_t *value)
{
    static const char *const names[] = {[JSON_OBJECT] = "object", [JSON_ARRAY] = "array", [JSON_STRING] = "string",
                                        [JSON_INTEGER] = "integer", [JSON_REAL] = "number", [JSON_TRUE] = "boolean",
                                        [JSON_FALSE] = "boolean", [JSON_NULL] = "null"};
    return has_type(schema, names[json_typeof(value)]) || (json_is_integer(value) && has_type(schema, "number"));
}

/* A keyword that llama.cpp looks at first, and then at nothing else. NULL: there is none. */
static const char *lone_keyword(const json_t *v)
{
    static const char *const lone[] = {"$ref", "oneOf", "anyOf", "const", "enum"};
    for (size_t i = 0; i < sizeof lone / sizeof lone[0]; i++)
        if (json_object_get(v, lone[i])) return lone[i];
    return NULL;
}

/* A keyword beside the lone one that is lost, or would have to leave out some of its values. */
static const char *lost_beside(const json_t *v, const char *lone)
{
    const char *key;
    json_t *item, *value;
    size_t i;
    bool values = strcmp(lone, "const") == 0 || strcmp(lone, "enum") == 0;
    json_object_foreach((json_t *)v, key, item) {
        if (strcmp(key, lone) == 0 || chat_listed(chat_keywords_remarks, key)) continue;
        if (!values || strcmp(key, "type") != 0) return key;
        if (strcmp(lone, "const") == 0 && !is_of_type(v, json_object_get(v, lone))) return key;
        json_array_foreach(json_object_get(v, "enum"), i, value) {
            if (!is_of_type(v, value)) return key;
        }
    }
    return NULL;
}

/* A keyword that is lost, for the type or for others beside it. */
static const char *lost_keyword(const json_t *v)
{
    static const struct {
        const char *key, *type, *not_beside[5];
    } rules[] = {
        {"pattern", "string", {"minLength", "maxLength", "format"}},
        {"format", "string", {"minLength", "maxLength"}},
        {"minLength", "string", {NULL}},
        {"maxLength", "string", {NULL}},
        {"minimum", "integer", {NULL}},
        {"maximum", "integer", {NULL}},
        {"exclusiveMinimum", "integer", {NULL}},
        {"exclusiveMaximum", "integer", {NULL}},
        {"items", "array", {NULL}},
        {"prefixItems", "array", {"items", "minItems", "maxItems"}},
        {"minItems", "array", {NULL}},
        {"maxItems", "array", {NULL}},
        {"properties", "object", {NULL}},
        {"required", "object", {NULL}},
        {"additionalProperties", "object", {NULL}},
    };
    static const char *const formats[] = {"date", "time", "date-time", "uuid", "uuid1", "uuid2", "uuid3", "uuid4", "uuid5",
                                          NULL};
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        const json_t *value = json_object_get(v, rules[i].key);
        if (!value) continue;
        if (!has_type(v, rules[i].type)) return rules[i].key;
        if (strcmp(rules[i].type, "integer") == 0 && has_type(v, "number")) return rules[i].key;
        for (size_t j = 0; rules[i].not_beside[j]; j++)
            if (json_object_get(v, rules[i].not_beside[j])) return rules[i].not_beside[j];
    }
    const char *format = json_string_value(json_object_get(v, "format"));
    if (format && !chat_listed(formats, format)) return "format";
    if (json_is_array(json_object_get(v, "items"))) return "items";
    const json_t *properties = json_object_get(v, "properties");
    json_t *name;
    size_t i;
    json_array_foreach(json_object_get(v, "required"), i, name) {
        const char *text = json_string_value(name);
        if (!text || !json_object_get(properties, text)) return "required";
    }
    return NULL;
}

static int refuse(oai_error *e, const char *param, const char *key, const char *why)
{
    return oai_fail(e, 400, "invalid_schema", param, "the JSON schema: `%.80s` can't be kept here%s, and `strict` is set",
                    key, why);
}

static int check_object(const chat_way *way, const json_t *v, const char *param, oai_error *e)
{
    static const char *const left_out[] = {
        "not", "if", "then", "else", "allOf", "multipleOf", "patternProperties", "propertyNames", "dependentRequired",
        "dependentSchemas", "contains", "minContains", "maxContains", "minProperties", "maxProperties",
        "unevaluatedProperties", "unevaluatedItems", NULL};
    static const char *const counts[] = {"minLength", "maxLength", "minItems", "maxItems", NULL};
    const char *key;
    json_t *item;
    json_object_foreach((json_t *)v, key, item) {
        if (chat_listed(left_out, key) || (strcmp(key, "uniqueItems") == 0 && json_is_true(item)))
            return refuse(e, param, key, "");
        if (chat_listed(counts, key) && json_number_value(item) > MAX_COUNT)
            return oai_fail(e, 400, "invalid_schema", param, "the JSON schema: `%s` can't be more than %d here, and "
                            "`strict` is set", key, MAX_COUNT);
        if (strcmp(key, "pattern") == 0 && json_is_string(item) && !pattern_kept(way, item))
            return oai_fail(e, 400, "invalid_schema", param, "the JSON schema: the pattern `%.80s` can't be kept here "
                            "(one that can begins with ^, ends with $ and has no \\d, \\w and the like), and `strict` "
                            "is set", json_string_value(item));
    }
    const char *lone = lone_keyword(v);
    if (lone && (key = lost_beside(v, lone))) return refuse(e, param, key, " beside what it stands with");
    if (!lone && (key = lost_keyword(v))) return refuse(e, param, key, " with that type, or beside what it stands with");
    return 0;
}

int chat_strict_check(const chat_way *way, const json_t *v, const char *param, oai_error *e)
{
    const char *key, *name;
    json_t *item, *inner;
    size_t i;
    if (json_is_object(v) && check_object(way, v, param, e) != 0) return -1;
    json_object_foreach((json_t *)v, key, item) {
        if (chat_listed(chat_keywords_data, key)) continue;
        if (chat_listed(chat_keywords_maps, key)) {
            json_object_foreach(item, name, inner) {
                if (chat_strict_check(way, inner, param, e) != 0) return -1;
            }
        } else {
            if (chat_strict_check(way, item, param, e) != 0) return -1;
            json_array_foreach(item, i, inner) {
                if (chat_strict_check(way, inner, param, e) != 0) return -1;
            }
        }
    }
    return 0;
}
