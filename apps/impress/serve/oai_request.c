#include "oai_request.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_DEPTH = 64,
    MAX_STOPS = 16,
    MAX_STOP_BYTES = 1024,
    MAX_BIAS = 4096,
    MAX_KWARGS = 32,
    MAX_CALLS = 128,
    MAX_GRAMMAR_BYTES = 256 << 10,
    MAX_NAME_BYTES = 64,
    MAX_SALT_BYTES = 256,
    PATH_BYTES = 96,
};

const char *const oai_role_names[] = {"system", "user", "assistant", "tool"};

/* ---- errors ---- */

/* Length of the UTF-8 character that begins at s, with n bytes left; 0: there is none. */
static size_t character(const unsigned char *s, size_t n)
{
    if (n == 0) return 0;
    if (s[0] < 0x80) return 1;
    size_t length = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4 || length > n) return 0;
    for (size_t i = 1; i < length; i++) {
        if ((s[i] & 0xc0) != 0x80) return 0;
    }
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) || (s[0] == 0xf0 && s[1] < 0x90) ||
        (s[0] == 0xf4 && s[1] > 0x8f))
        return 0;
    return length;
}

/* Bytes that are no character, say where a text was cut, become '?', and control characters a blank. */
static void clean(char *text)
{
    size_t n = strlen(text);
    for (size_t i = 0; i < n;) {
        unsigned char *s = (unsigned char *)text + i;
        size_t length = character(s, n - i);
        if (length == 0) *s = '?';
        else if (*s < 0x20 || *s == 0x7f) *s = ' ';
        i += length ? length : 1;
    }
}

static const char *error_type(int status)
{
    switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 429: return "rate_limit_error";
    default: return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

int oai_fail(oai_error *e, int status, const char *code, const char *param, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    e->status = status;
    e->type = error_type(status);
    e->code = code;
    snprintf(e->param, sizeof e->param, "%s", param ? param : "");
    vsnprintf(e->message, sizeof e->message, fmt, ap);
    va_end(ap);
    clean(e->param);
    clean(e->message);
    return -1;
}

/* ---- values ---- */

/* The place of a value in the request, for errors; a long one is cut. */
__attribute__((format(printf, 3, 4))) static void path_of(char *out, size_t room, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(out, room, fmt, ap);
    va_end(ap);
}


/* The request at hand. All functions below that return int give 0, or -1 with the error filled. */
typedef struct parse {
    oai_request *r;
    const oai_limits *limits;
    oai_error *e;
} parse;

#define INVALID "invalid_value"
#define UNSUPPORTED "unsupported_value"
#define UNKNOWN "unknown_parameter"
#define MISSING "missing_required_parameter"

static int no_memory(parse *p)
{
    return oai_fail(p->e, 500, NULL, NULL, "the server is out of memory");
}

static int wrong_type(parse *p, const char *path, const char *wanted)
{
    return oai_fail(p->e, 400, "invalid_type", path, "`%s` must be %s", path, wanted);
}

/* Keep an allocated text for as long as the request; NULL stays NULL, so that a failed allocation may be given. */
static const char *own(parse *p, char *text)
{
    oai_request *r = p->r;
    if (!text) return NULL;
    if (r->n_owned == r->owned_room) {
        size_t room = r->owned_room ? 2 * r->owned_room : 16;
        char **grown = realloc(r->owned, room * sizeof *grown);
        if (!grown) {
            free(text);
            return NULL;
        }
        r->owned = grown;
        r->owned_room = room;
    }
    r->owned[r->n_owned++] = text;
    return text;
}

/* A field, with one that is null not being there. */
static const json_t *get(const json_t *o, const char *name)
{
    const json_t *v = json_object_get(o, name);
    return json_is_null(v) ? NULL : v;
}

/* These leave *out as it is if there is no value. */
static int get_text(parse *p, const json_t *v, const char *path, size_t max_bytes, const char **out)
{
    if (!v) return 0;
    if (!json_is_string(v)) return wrong_type(p, path, "a string");
    if (json_string_length(v) > max_bytes)
        return oai_fail(p->e, 400, "string_above_max_length", path, "`%s` is longer than %zu bytes", path, max_bytes);
    *out = json_string_value(v);
    return 0;
}

static int get_name(parse *p, const json_t *v, const char *path, const char **out)
{
    if (get_text(p, v, path, MAX_NAME_BYTES, out) != 0) return -1;
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-";
    if (!v || (**out && strspn(*out, letters) == strlen(*out))) return 0;
    return oai_fail(p->e, 400, INVALID, path, "`%s` must be made of letters, digits, `_`, `-` and `.`", path);
}

static int get_bool(parse *p, const json_t *v, const char *path, bool *out)
{
    if (!v) return 0;
    if (!json_is_boolean(v)) return wrong_type(p, path, "true or false");
    *out = json_is_true(v);
    return 0;
}

static int get_real(parse *p, const json_t *v, const char *path, double low, double high, double *out)
{
    if (!v) return 0;
    if (!json_is_number(v)) return wrong_type(p, path, "a number");
    double x = json_number_value(v);
    if (!(x >= low && x <= high))
        return oai_fail(p->e, 400, INVALID, path, "`%s` must be from %g to %g", path, low, high);
    *out = x;
    return 0;
}

static int get_integer(parse *p, const json_t *v, const char *path, int64_t low, int64_t high, int64_t *out)
{
    if (!v) return 0;
    if (!json_is_number(v)) return wrong_type(p, path, "an integer");
    double x = json_number_value(v);
    /* A real without a fraction is let pass; beyond 2^53 that says nothing. */
    if (json_is_real(v) && (x != floor(x) || fabs(x) > 9007199254740992.0)) return wrong_type(p, path, "an integer");
    int64_t n = json_is_integer(v) ? (int64_t)json_integer_value(v) : (int64_t)x;
    if (n < low || n > high) {
        if (high == INT64_MAX)
            return oai_fail(p->e, 400, INVALID, path, "`%s` must be %lld or more", path, (long long)low);
        return oai_fail(p->e, 400, INVALID, path, "`%s` must be from %lld to %lld", path, (long long)low,
                        (long long)high);
    }
    *out = n;
    return 0;
}

/* Refuse the first field of an object that isn't in the list, which ends with NULL. */
static int only_fields(parse *p, const json_t *o, const char *path, const char *const *known)
{
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)o, key, v) {
        const char *const *k = known;
        while (*k && strcmp(*k, key) != 0) k++;
        if (*k) continue;
        char param[PATH_BYTES];
        path_of(param, sizeof param, "%s.%s", path, key);
        return oai_fail(p->e, 400, UNKNOWN, param, "unknown field `%s`", param);
    }
    return 0;
}

/* JSON nested deeper than this is refused before it is parsed, which takes stack for each level. */
static bool too_deep(const char *s, size_t n)
{
    size_t depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < n; i++) {
        if (in_string) {
            if (s[i] == '\\') i++;
            else if (s[i] == '"') in_string = false;
        } else if (s[i] == '"') {
            in_string = true;
        } else if (s[i] == '[' || s[i] == '{') {
            if (++depth > MAX_DEPTH) return true;
        } else if ((s[i] == ']' || s[i] == '}') && depth > 0) {
            depth--;
        }
    }
    return false;
}

/* The JSON text of a part of the request. */
static int dump(parse *p, const json_t *v, const char **out)
{
    *out = own(p, json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY));
    return *out ? 0 : no_memory(p);
}

/* ---- messages ---- */

/* A string, or an array of text parts, which are joined by newlines. */
static int get_content(parse *p, const json_t *v, const char *path, const char **out)
{
    if (!v) return 0;
    if (json_is_string(v)) {
        *out = json_string_value(v);
        return 0;
    }
    size_t n = json_array_size(v), n_bytes = 0;
    if (!json_is_array(v) || n == 0) return wrong_type(p, path, "a string or a list of content parts");
    for (size_t i = 0; i < n; i++) {
        static const char *const known[] = {"type", "text", "cache_control", "prompt_cache_breakpoint", NULL};
        const json_t *part = json_array_get(v, i), *text = get(part, "text");
        const char *type = json_string_value(get(part, "type"));
        char at[PATH_BYTES];
        path_of(at, sizeof at, "%s[%zu]", path, i);
        if (!json_is_object(part) || !type) return wrong_type(p, at, "an object with a `type`");
        if (strcmp(type, "text") != 0)
            return oai_fail(p->e, 400, UNSUPPORTED, at, "content parts of type `%.40s` are not supported, only `text`",
                            type);
        if (only_fields(p, part, at, known) != 0) return -1;
        if (!json_is_string(text)) {
            path_of(at, sizeof at, "%s[%zu].text", path, i);
            return wrong_type(p, at, "a string");
        }
        n_bytes += json_string_length(text) + 1;
    }
    char *joined = malloc(n_bytes), *to = joined;
    if (!joined) return no_memory(p);
    for (size_t i = 0; i < n; i++) {
        const json_t *text = json_object_get(json_array_get(v, i), "text");
        memcpy(to, json_string_value(text), json_string_length(text));
        to += json_string_length(text);
        *to++ = i + 1 < n ? '\n' : '\0';
    }
    *out = own(p, joined);
    return *out ? 0 : no_memory(p);
}

/* Arguments of a call: the text of a JSON object. Some clients send an empty one for a call without arguments. */
static int get_arguments(parse *p, const json_t *v, const char *path, const char **out)
{
    if (!v) return oai_fail(p->e, 400, MISSING, path, "`%s` is missing", path);
    if (get_text(p, v, path, SIZE_MAX, out) != 0) return -1;
    if (**out == '\0') *out = "{}";
    size_t n = strlen(*out);
    json_t *parsed = too_deep(*out, n) ? NULL : json_loadb(*out, n, 0, NULL);
    bool ok = json_is_object(parsed);
    json_decref(parsed);
    return ok ? 0 : oai_fail(p->e, 400, INVALID, path, "`%s` must be the text of a JSON object", path);
}

static int get_calls(parse *p, const json_t *v, const char *path, oai_message *m)
{
    size_t n = json_array_size(v);
    if (!v || (json_is_array(v) && n == 0)) return 0;
    if (!json_is_array(v)) return wrong_type(p, path, "a list");
    if (n > MAX_CALLS) return oai_fail(p->e, 400, INVALID, path, "`%s` has more than %d calls", path, (int)MAX_CALLS);
    m->tool_calls = calloc(n, sizeof *m->tool_calls);
    if (!m->tool_calls) return no_memory(p);
    for (size_t i = 0; i < n; i++) {
        static const char *const known[] = {"id", "type", "function", "index", NULL};
        static const char *const known_function[] = {"name", "arguments", NULL};
        const json_t *call = json_array_get(v, i), *function = get(call, "function");
        oai_tool_call *c = &m->tool_calls[m->n_tool_calls++];
        char at[PATH_BYTES], field[PATH_BYTES + 32];
        path_of(at, sizeof at, "%s[%zu]", path, i);
        if (!json_is_object(call)) return wrong_type(p, at, "an object");
        if (only_fields(p, call, at, known) != 0) return -1;

        path_of(field, sizeof field, "%s.type", at);
        const char *type = "function";
        if (get_text(p, get(call, "type"), field, SIZE_MAX, &type) != 0) return -1;
        if (strcmp(type, "function") != 0)
            return oai_fail(p->e, 400, UNSUPPORTED, field, "`%s` must be `function`", field);
        path_of(field, sizeof field, "%s.id", at);
        c->id = "";
        if (get_text(p, get(call, "id"), field, SIZE_MAX, &c->id) != 0) return -1;
        path_of(field, sizeof field, "%s.function", at);
        if (!json_is_object(function)) return wrong_type(p, field, "an object");
        if (only_fields(p, function, field, known_function) != 0) return -1;
        path_of(field, sizeof field, "%s.function.name", at);
        if (get_text(p, get(function, "name"), field, SIZE_MAX, &c->name) != 0) return -1;
        if (!c->name || *c->name == '\0') return oai_fail(p->e, 400, MISSING, field, "`%s` is missing", field);
        path_of(field, sizeof field, "%s.function.arguments", at);
        if (get_arguments(p, get(function, "arguments"), field, &c->arguments) != 0) return -1;
    }
    return 0;
}

static int get_message(parse *p, const json_t *o, size_t index, oai_message *m)
{
    /* What an assistant's message may carry that came from a server: taken back without effect, if it is empty. */
    static const char *const known[] = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content",
                                        "reasoning", "refusal", "audio", "function_call", "annotations",
                                        "cache_control", NULL};
    static const char *const empty[] = {"refusal", "audio", "function_call"};
    char path[PATH_BYTES], at[PATH_BYTES];
    path_of(path, sizeof path, "messages[%zu]", index);
    if (!json_is_object(o)) return wrong_type(p, path, "an object");
    if (only_fields(p, o, path, known) != 0) return -1;

    const char *role = NULL;
    path_of(at, sizeof at, "messages[%zu].role", index);
    if (get_text(p, get(o, "role"), at, SIZE_MAX, &role) != 0) return -1;
    if (!role) return oai_fail(p->e, 400, MISSING, at, "`%s` is missing", at);
    size_t i = 0;
    while (i <= OAI_TOOL && strcmp(role, oai_role_names[i]) != 0) i++;
    if (i <= OAI_TOOL) m->role = (oai_role)i;
    else if (strcmp(role, "developer") == 0) m->role = OAI_SYSTEM;
    else
        return oai_fail(p->e, 400, INVALID, at,
                        "`%s` is `%.40s`; known are system, developer, user, assistant and tool", at, role);

    for (i = 0; i < sizeof empty / sizeof empty[0]; i++) {
        const json_t *v = get(o, empty[i]);
        if (!v || (json_is_string(v) && json_string_length(v) == 0)) continue;
        path_of(at, sizeof at, "messages[%zu].%s", index, empty[i]);
        return oai_fail(p->e, 400, UNSUPPORTED, at, "`%s` is not supported", at);
    }
    const bool assistant = m->role == OAI_ASSISTANT;
    const json_t *calls = get(o, "tool_calls"), *id = get(o, "tool_call_id");
    const json_t *reasoning = get(o, "reasoning_content") ? get(o, "reasoning_content") : get(o, "reasoning");
    path_of(at, sizeof at, "messages[%zu].tool_calls", index);
    if (calls && !assistant)
        return oai_fail(p->e, 400, INVALID, at, "`%s`: only a message of the assistant has tool calls", at);
    if (get_calls(p, calls, at, m) != 0) return -1;
    path_of(at, sizeof at, "messages[%zu].tool_call_id", index);
    if (id && m->role != OAI_TOOL)
        return oai_fail(p->e, 400, INVALID, at, "`%s`: only a message of a tool answers a call", at);
    if (get_text(p, id, at, SIZE_MAX, &m->tool_call_id) != 0) return -1;
    if (m->role == OAI_TOOL && !m->tool_call_id) return oai_fail(p->e, 400, MISSING, at, "`%s` is missing", at);
    path_of(at, sizeof at, "messages[%zu].reasoning_content", index);
    if (reasoning && !assistant)
        return oai_fail(p->e, 400, INVALID, at, "`%s`: only a message of the assistant has reasoning", at);
    if (get_text(p, reasoning, at, SIZE_MAX, &m->reasoning) != 0) return -1;
    path_of(at, sizeof at, "messages[%zu].name", index);
    if (get_text(p, get(o, "name"), at, MAX_NAME_BYTES, &m->name) != 0) return -1;

    path_of(at, sizeof at, "messages[%zu].content", index);
    if (get_content(p, get(o, "content"), at, &m->content) != 0) return -1;
    if (!m->content && !(assistant && (m->n_tool_calls > 0 || m->reasoning)))
        return oai_fail(p->e, 400, MISSING, at, "`%s` is missing", at);
    return 0;
}

static int get_messages(parse *p, const json_t *v)
{
    if (!v) return oai_fail(p->e, 400, MISSING, "messages", "`messages` is missing");
    size_t n = json_array_size(v);
    if (!json_is_array(v)) return wrong_type(p, "messages", "a list");
    if (n == 0) return oai_fail(p->e, 400, INVALID, "messages", "`messages` is empty");
    if (n > p->limits->max_messages)
        return oai_fail(p->e, 400, INVALID, "messages", "`messages` has %zu entries, more than %zu", n,
                        p->limits->max_messages);
    p->r->messages = calloc(n, sizeof *p->r->messages);
    if (!p->r->messages) return no_memory(p);
    for (size_t i = 0; i < n; i++) {
        if (get_message(p, json_array_get(v, i), p->r->n_messages++, &p->r->messages[i]) != 0) return -1;
    }
    return 0;
}

/* ---- prompt of a completion ---- */

static int get_tokens(parse *p, const json_t *v)
{
    size_t n = json_array_size(v);
    int64_t most = p->limits->n_vocab > 0 ? p->limits->n_vocab - 1 : INT32_MAX;
    p->r->prompt_tokens = malloc(n * sizeof *p->r->prompt_tokens);
    if (!p->r->prompt_tokens) return no_memory(p);
    for (size_t i = 0; i < n; i++) {
        const json_t *item = json_array_get(v, i);
        int64_t token = 0;
        char at[PATH_BYTES];
        path_of(at, sizeof at, "prompt[%zu]", i);
        if (json_is_null(item)) return wrong_type(p, at, "a token, as all in this list");
        if (get_integer(p, item, at, 0, most, &token) != 0) return -1;
        p->r->prompt_tokens[p->r->n_prompt_tokens++] = (int32_t)token;
    }
    return 0;
}

static int get_prompt(parse *p, const json_t *v)
{
    static const char wanted[] = "a string, a list of one string, or a list of tokens";
    if (!v) return oai_fail(p->e, 400, MISSING, "prompt", "`prompt` is missing");
    if (json_is_array(v)) {
        const json_t *first = json_array_get(v, 0);
        if (json_is_number(first)) return get_tokens(p, v);
        if (json_array_size(v) > 1)
            return oai_fail(p->e, 400, UNSUPPORTED, "prompt", "`prompt` has several prompts: send one in a request");
        if (json_is_array(first) && json_is_number(json_array_get(first, 0))) return get_tokens(p, first);
        v = first;
    }
    if (!json_is_string(v)) return wrong_type(p, "prompt", wanted);
    if (json_string_length(v) == 0) return oai_fail(p->e, 400, INVALID, "prompt", "`prompt` is empty");
    p->r->prompt = json_string_value(v);
    return 0;
}

/* ---- how to sample, when to stop ---- */

static int get_bias(parse *p, const json_t *v)
{
    if (!v) return 0;
    if (!json_is_object(v)) return wrong_type(p, "logit_bias", "an object from tokens to numbers");
    size_t n = json_object_size(v);
    if (n == 0) return 0;
    if (n > MAX_BIAS)
        return oai_fail(p->e, 400, INVALID, "logit_bias", "`logit_bias` has more than %d tokens", MAX_BIAS);
    oai_sampling *s = &p->r->sampling;
    s->bias = calloc(n, sizeof *s->bias);
    if (!s->bias) return no_memory(p);
    int64_t most = p->limits->n_vocab > 0 ? p->limits->n_vocab - 1 : INT32_MAX;
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)v, key, value) {
        size_t length = strspn(key, "0123456789");
        int64_t token = length > 0 && length <= 10 ? strtoll(key, NULL, 10) : -1;
        char at[PATH_BYTES];
        path_of(at, sizeof at, "logit_bias.%s", key);
        /* Written in one way only: no token can come twice. */
        if (key[length] != '\0' || token < 0 || token > most || (key[0] == '0' && length > 1))
            return oai_fail(p->e, 400, INVALID, at, "`%s`: that is no token of this model", at);
        double bias = 0;
        if (json_is_null(value)) return wrong_type(p, at, "a number");
        if (get_real(p, value, at, -100, 100, &bias) != 0) return -1;
        s->bias[s->n_bias++] = (oai_bias){(int32_t)token, (float)bias};
    }
    return 0;
}

static int get_sampling(parse *p, const json_t *o)
{
    oai_sampling *s = &p->r->sampling;
    *s = p->limits->sampling;
    s->bias = NULL;
    s->n_bias = 0;
    int64_t top_k = s->top_k, seed = 0;
    if (get_real(p, get(o, "temperature"), "temperature", 0, 2, &s->temperature) != 0 ||
        get_real(p, get(o, "top_p"), "top_p", 0, 1, &s->top_p) != 0 ||
        get_real(p, get(o, "min_p"), "min_p", 0, 1, &s->min_p) != 0 ||
        get_real(p, get(o, "presence_penalty"), "presence_penalty", -2, 2, &s->presence_penalty) != 0 ||
        get_real(p, get(o, "frequency_penalty"), "frequency_penalty", -2, 2, &s->frequency_penalty) != 0 ||
        get_real(p, get(o, "repeat_penalty"), "repeat_penalty", 0.01, 10, &s->repeat_penalty) != 0 ||
        get_integer(p, get(o, "top_k"), "top_k", -1, INT32_MAX, &top_k) != 0 ||
        get_integer(p, get(o, "seed"), "seed", INT64_MIN, INT64_MAX, &seed) != 0)
        return -1;
    s->top_k = top_k < 0 ? 0 : (int32_t)top_k; /* some clients write -1 for off */
    if (get(o, "seed")) {
        s->has_seed = true;
        s->seed = (uint32_t)((uint64_t)seed ^ (uint64_t)seed >> 32);
        if (s->seed == UINT32_MAX) s->seed = UINT32_MAX - 1; /* llama.cpp's mark for a random one */
    }
    return get_bias(p, get(o, "logit_bias"));
}

static int get_stops(parse *p, const json_t *v)
{
    if (!v) return 0;
    bool list = json_is_array(v);
    size_t n = list ? json_array_size(v) : 1;
    if (n == 0) return 0;
    if (n > MAX_STOPS) return oai_fail(p->e, 400, INVALID, "stop", "`stop` has more than %d strings", (int)MAX_STOPS);
    p->r->stops = calloc(n, sizeof *p->r->stops);
    if (!p->r->stops) return no_memory(p);
    for (size_t i = 0; i < n; i++) {
        const json_t *item = list ? json_array_get(v, i) : v;
        const char *stop = NULL;
        if (!json_is_string(item)) return wrong_type(p, "stop", "a string or a list of strings");
        if (get_text(p, item, "stop", MAX_STOP_BYTES, &stop) != 0) return -1;
        if (*stop == '\0') return oai_fail(p->e, 400, INVALID, "stop", "`stop` has an empty string");
        p->r->stops[p->r->n_stops++] = stop;
    }
    return 0;
}

static int get_limits_of_answer(parse *p, const json_t *o)
{
    oai_request *r = p->r;
    int64_t other = -1, n_top = 0;
    r->max_tokens = -1;
    if (get_integer(p, get(o, "max_tokens"), "max_tokens", 1, INT32_MAX, &r->max_tokens) != 0 ||
        get_integer(p, get(o, "max_completion_tokens"), "max_completion_tokens", 1, INT32_MAX, &other) != 0)
        return -1;
    if (other > 0 && r->max_tokens > 0 && other != r->max_tokens)
        return oai_fail(p->e, 400, INVALID, "max_tokens", "`max_tokens` and `max_completion_tokens` differ: send one");
    if (other > 0) r->max_tokens = other;

    r->n_logprobs = -1;
    if (r->chat) {
        bool wanted = false;
        if (get_bool(p, get(o, "logprobs"), "logprobs", &wanted) != 0 ||
            get_integer(p, get(o, "top_logprobs"), "top_logprobs", 0, 20, &n_top) != 0)
            return -1;
        if (n_top > 0 && !wanted)
            return oai_fail(p->e, 400, INVALID, "top_logprobs", "`top_logprobs` needs `logprobs` to be true");
        if (wanted) r->n_logprobs = (int)n_top;
    } else {
        n_top = -1;
        if (get_integer(p, get(o, "logprobs"), "logprobs", 0, 5, &n_top) != 0) return -1;
        r->n_logprobs = (int)n_top;
    }
    return get_stops(p, get(o, "stop"));
}

static int get_stream(parse *p, const json_t *o)
{
    static const char *const known[] = {"include_usage", "include_obfuscation", NULL};
    oai_request *r = p->r;
    const json_t *options = get(o, "stream_options");
    bool obfuscated = false;
    if (get_bool(p, get(o, "stream"), "stream", &r->stream) != 0) return -1;
    if (!options) return 0;
    if (!json_is_object(options)) return wrong_type(p, "stream_options", "an object");
    if (only_fields(p, options, "stream_options", known) != 0) return -1;
    if (!r->stream)
        return oai_fail(p->e, 400, INVALID, "stream_options", "`stream_options` needs `stream` to be true");
    if (get_bool(p, get(options, "include_obfuscation"), "stream_options.include_obfuscation", &obfuscated) != 0)
        return -1;
    if (obfuscated)
        return oai_fail(p->e, 400, UNSUPPORTED, "stream_options.include_obfuscation",
                        "`stream_options.include_obfuscation` is not supported");
    return get_bool(p, get(options, "include_usage"), "stream_options.include_usage", &r->include_usage);
}

/* ---- the form of the answer ---- */

static int get_schema(parse *p, const json_t *v, const char *path)
{
    if (v && !json_is_object(v)) return wrong_type(p, path, "an object");
    p->r->format = v ? OAI_JSON_SCHEMA : OAI_JSON_OBJECT;
    /* Any value; llama.cpp takes an empty schema for none. */
    static const char any[] = "{\"type\":[\"object\",\"array\",\"string\",\"number\",\"boolean\",\"null\"]}";
    if (v && json_object_size(v) == 0) p->r->schema = any;
    return v && !p->r->schema ? dump(p, v, &p->r->schema) : 0;
}

static int get_format(parse *p, const json_t *v)
{
    static const char *const known[] = {"type", "json_schema", "schema", NULL};
    static const char *const known_schema[] = {"name", "description", "schema", "strict", NULL};
    if (!v) return 0;
    if (!json_is_object(v)) return wrong_type(p, "response_format", "an object");
    const char *type = NULL;
    if (get_text(p, get(v, "type"), "response_format.type", SIZE_MAX, &type) != 0) return -1;
    if (!type) return oai_fail(p->e, 400, MISSING, "response_format.type", "`response_format.type` is missing");
    if (only_fields(p, v, "response_format", known) != 0) return -1;
    const json_t *schema = get(v, "json_schema");
    if (strcmp(type, "json_schema") == 0) {
        static const char path[] = "response_format.json_schema";
        const char *text = NULL;
        if (get(v, "schema"))
            return oai_fail(p->e, 400, UNKNOWN, "response_format.schema",
                            "`response_format.schema` belongs into `response_format.json_schema`");
        if (!schema) return oai_fail(p->e, 400, MISSING, path, "`%s` is missing", path);
        if (!json_is_object(schema)) return wrong_type(p, path, "an object");
        if (only_fields(p, schema, path, known_schema) != 0) return -1;
        if (get_name(p, get(schema, "name"), "response_format.json_schema.name", &text) != 0 ||
            get_text(p, get(schema, "description"), "response_format.json_schema.description", SIZE_MAX, &text) != 0 ||
            get_bool(p, get(schema, "strict"), "response_format.json_schema.strict", &p->r->strict) != 0)
            return -1;
        return get_schema(p, get(schema, "schema"), "response_format.json_schema.schema");
    }
    if (schema)
        return oai_fail(p->e, 400, INVALID, "response_format.json_schema",
                        "`response_format.json_schema` needs `response_format.type` to be `json_schema`");
    if (strcmp(type, "json_object") == 0) return get_schema(p, get(v, "schema"), "response_format.schema");
    if (strcmp(type, "text") != 0 || get(v, "schema"))
        return oai_fail(p->e, 400, UNSUPPORTED, "response_format.type",
                        "`response_format.type` must be text, json_object or json_schema");
    return 0;
}

static int get_tool(parse *p, const json_t *o, size_t index, oai_tool *t)
{
    static const char *const known[] = {"type", "function", NULL};
    static const char *const known_function[] = {"name", "description", "parameters", "strict", NULL};
    char at[PATH_BYTES];
    path_of(at, sizeof at, "tools[%zu]", index);
    if (!json_is_object(o)) return wrong_type(p, at, "an object");
    const json_t *type = get(o, "type"), *function = get(o, "function");
    if (!json_is_string(type) || strcmp(json_string_value(type), "function") != 0) {
        path_of(at, sizeof at, "tools[%zu].type", index);
        return oai_fail(p->e, 400, UNSUPPORTED, at, "`%s` must be `function`", at);
    }
    if (only_fields(p, o, at, known) != 0) return -1;
    path_of(at, sizeof at, "tools[%zu].function", index);
    if (!json_is_object(function)) return wrong_type(p, at, "an object");
    if (only_fields(p, function, at, known_function) != 0) return -1;

    path_of(at, sizeof at, "tools[%zu].function.name", index);
    if (get_name(p, get(function, "name"), at, &t->name) != 0) return -1;
    if (!t->name) return oai_fail(p->e, 400, MISSING, at, "`%s` is missing", at);
    for (const oai_tool *other = p->r->tools; other < t; other++) {
        if (strcmp(other->name, t->name) == 0)
            return oai_fail(p->e, 400, INVALID, at, "`%s`: there are two tools called `%s`", at, t->name);
    }
    t->description = "";
    path_of(at, sizeof at, "tools[%zu].function.description", index);
    if (get_text(p, get(function, "description"), at, SIZE_MAX, &t->description) != 0) return -1;
    path_of(at, sizeof at, "tools[%zu].function.strict", index);
    if (get_bool(p, get(function, "strict"), at, &t->strict) != 0) return -1;
    const json_t *parameters = get(function, "parameters");
    path_of(at, sizeof at, "tools[%zu].function.parameters", index);
    if (parameters && !json_is_object(parameters)) return wrong_type(p, at, "an object");
    /* No schema, or an empty one, is a call without arguments. */
    if (json_object_size(parameters) == 0) t->parameters = "{\"type\":\"object\",\"properties\":{}}";
    else if (dump(p, parameters, &t->parameters) != 0) return -1;
    return 0;
}

/* After the tools: which of them are to be called. */
static int get_tool_choice(parse *p, const json_t *v)
{
    oai_request *r = p->r;
    if (r->n_tools == 0) r->tool_choice = OAI_TOOLS_NONE;
    if (!v) return 0;
    static const char *const names[] = {"auto", "none", "required"};
    static const char *const known[] = {"type", "function", NULL}, *const known_function[] = {"name", NULL};
    const char *name = json_string_value(v);
    if (name) {
        size_t i = 0;
        while (i < 3 && strcmp(name, names[i]) != 0) i++;
        if (i == 3)
            return oai_fail(p->e, 400, UNSUPPORTED, "tool_choice",
                            "`tool_choice` must be none, auto, required or name a function");
        if (r->n_tools == 0 && i == OAI_TOOLS_REQUIRED)
            return oai_fail(p->e, 400, INVALID, "tool_choice", "`tool_choice` needs `tools`");
        if (r->n_tools > 0) r->tool_choice = (oai_tool_choice)i;
        return 0;
    }
    if (!json_is_object(v)) return wrong_type(p, "tool_choice", "a string or an object");
    const char *type = json_string_value(get(v, "type"));
    const json_t *function = get(v, "function");
    if (!type || strcmp(type, "function") != 0)
        return oai_fail(p->e, 400, UNSUPPORTED, "tool_choice.type", "`tool_choice.type` must be `function`");
    if (only_fields(p, v, "tool_choice", known) != 0) return -1;
    name = json_string_value(get(function, "name"));
    if (!name) return oai_fail(p->e, 400, MISSING, "tool_choice.function", "`tool_choice.function.name` is missing");
    if (only_fields(p, function, "tool_choice.function", known_function) != 0) return -1;
    size_t i = 0;
    while (i < r->n_tools && strcmp(r->tools[i].name, name) != 0) i++;
    if (i == r->n_tools)
        return oai_fail(p->e, 400, INVALID, "tool_choice", "`tool_choice` names `%.64s`, which isn't among the tools",
                        name);
    r->tools[0] = r->tools[i];
    r->n_tools = 1;
    r->tool_choice = OAI_TOOLS_REQUIRED;
    return 0;
}

static int get_tools(parse *p, const json_t *o)
{
    oai_request *r = p->r;
    const json_t *v = get(o, "tools");
    r->parallel_tool_calls = true;
    if (get_bool(p, get(o, "parallel_tool_calls"), "parallel_tool_calls", &r->parallel_tool_calls) != 0) return -1;
    if (v && !json_is_array(v)) return wrong_type(p, "tools", "a list");
    size_t n = json_array_size(v);
    if (n > p->limits->max_tools)
        return oai_fail(p->e, 400, INVALID, "tools", "`tools` has %zu entries, more than %zu", n, p->limits->max_tools);
    if (n > 0 && !(r->tools = calloc(n, sizeof *r->tools))) return no_memory(p);
    for (size_t i = 0; i < n; i++) {
        if (get_tool(p, json_array_get(v, i), i, &r->tools[i]) != 0) return -1;
        r->n_tools++;
    }
    return get_tool_choice(p, get(o, "tool_choice"));
}

static int get_form(parse *p, const json_t *o)
{
    oai_request *r = p->r;
    if (get_format(p, get(o, "response_format")) != 0) return -1;
    const char *grammar = NULL;
    if (get_text(p, get(o, "grammar"), "grammar", MAX_GRAMMAR_BYTES, &grammar) != 0) return -1;
    if (grammar && *grammar) {
        if (r->format != OAI_TEXT)
            return oai_fail(p->e, 400, INVALID, "grammar", "`grammar` and `response_format` can't go together");
        r->format = OAI_GRAMMAR;
        r->grammar = grammar;
    }
    if (get_tools(p, o) != 0) return -1;
    if (r->tool_choice != OAI_TOOLS_NONE && r->format != OAI_TEXT) {
        const char *what = r->format == OAI_GRAMMAR ? "grammar" : "response_format";
        return oai_fail(p->e, 400, UNSUPPORTED, what, "`%s` can't go together with `tools` that may be called", what);
    }
    return 0;
}

static int get_kwargs(parse *p, const json_t *v)
{
    /* What the template is given anyway. */
    static const char *const taken[] = {"messages", "tools", "bos_token", "eos_token", "add_generation_prompt"};
    static const char path[] = "chat_template_kwargs";
    if (!v) return 0;
    if (!json_is_object(v)) return wrong_type(p, path, "an object");
    size_t n = json_object_size(v);
    if (n == 0) return 0;
    if (n > MAX_KWARGS) return oai_fail(p->e, 400, INVALID, path, "`%s` has more than %d fields", path, MAX_KWARGS);
    p->r->kwargs = calloc(n, sizeof *p->r->kwargs);
    if (!p->r->kwargs) return no_memory(p);
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)v, key, value) {
        char at[PATH_BYTES];
        path_of(at, sizeof at, "%s.%s", path, key);
        for (size_t i = 0; i < sizeof taken / sizeof taken[0]; i++) {
            if (strcmp(taken[i], key) == 0)
                return oai_fail(p->e, 400, INVALID, at, "`%s` can't be set", at);
        }
        oai_kwarg *k = &p->r->kwargs[p->r->n_kwargs++];
        k->name = key;
        if (dump(p, value, &k->value) != 0) return -1;
    }
    return 0;
}

/* ---- our own object ---- */

static int get_impress(parse *p, const json_t *v)
{
    static const char *const known[] = {"retention", "system", "full_load", "cache", "salt", NULL};
    oai_impress *o = &p->r->impress;
    if (!v) return 0;
    if (!json_is_object(v)) return wrong_type(p, "impress", "an object");
    if (only_fields(p, v, "impress", known) != 0) return -1;
    const json_t *retention = get(v, "retention");
    const char *cache = "on";
    bool is_text = json_is_string(retention);
    if ((is_text ? get_text(p, retention, "impress.retention", MAX_NAME_BYTES, &o->auto_retention)
                 : get_real(p, retention, "impress.retention", 0, 1, &o->retention)) != 0 ||
        get_text(p, get(v, "system"), "impress.system", MAX_NAME_BYTES, &o->system) != 0 ||
        get_bool(p, get(v, "full_load"), "impress.full_load", &o->full_load) != 0 ||
        get_text(p, get(v, "cache"), "impress.cache", MAX_NAME_BYTES, &cache) != 0 ||
        get_text(p, get(v, "salt"), "impress.salt", MAX_SALT_BYTES, &o->salt) != 0)
        return -1;
    if (retention && !is_text && o->retention <= 0)
        return oai_fail(p->e, 400, INVALID, "impress.retention", "`impress.retention` must be above 0");
    if (o->full_load && retention && o->retention < 1)
        return oai_fail(p->e, 400, INVALID, "impress.full_load",
                        "`impress.full_load` and an `impress.retention` below 1 contradict each other");
    o->cache_off = strcmp(cache, "off") == 0;
    if (!o->cache_off && strcmp(cache, "on") != 0)
        return oai_fail(p->e, 400, INVALID, "impress.cache", "`impress.cache` must be \"on\" or \"off\"");
    return 0;
}

/* ---- the whole ---- */

enum { CHAT = 1, COMPLETION = 2, BOTH = 3 };

/* All fields that are let pass, and where. */
static const struct {
    const char *name;
    int where;
} fields[] = {
    {"model", BOTH}, {"messages", CHAT}, {"prompt", COMPLETION}, {"max_tokens", BOTH}, {"max_completion_tokens", CHAT},
    {"temperature", BOTH}, {"top_p", BOTH}, {"top_k", BOTH}, {"min_p", BOTH}, {"seed", BOTH}, {"stop", BOTH},
    {"presence_penalty", BOTH}, {"frequency_penalty", BOTH}, {"repeat_penalty", BOTH}, {"logit_bias", BOTH},
    {"logprobs", BOTH}, {"top_logprobs", CHAT}, {"n", BOTH}, {"stream", BOTH}, {"stream_options", BOTH}, {"user", BOTH},
    {"response_format", BOTH}, {"grammar", BOTH}, {"tools", CHAT}, {"tool_choice", CHAT}, {"parallel_tool_calls", CHAT},
    {"chat_template_kwargs", CHAT}, {"impress", BOTH},
    /* only with the value that asks for nothing: see check_plain() */
    {"echo", COMPLETION}, {"suffix", COMPLETION}, {"best_of", COMPLETION}, {"modalities", CHAT}, {"functions", CHAT},
    {"function_call", CHAT}, {"audio", CHAT}, {"prediction", CHAT}, {"web_search_options", CHAT}, {"verbosity", CHAT},
    {"reasoning_effort", CHAT},
    /* no matter of the answer: see check_aside() */
    {"metadata", BOTH}, {"store", BOTH}, {"service_tier", BOTH}, {"safety_identifier", BOTH},
    {"prompt_cache_key", BOTH}, {"prompt_cache_retention", BOTH},
};

/* What to write instead of a field that other servers know. */
static const char *const hints[][2] = {
    {"repetition_penalty", "send `repeat_penalty`"},
    {"repeat_last_n", "penalties look at the whole answer"},
    {"n_predict", "send `max_tokens`"},
    {"n_probs", "send `logprobs`"},
    {"json_schema", "send `response_format`"},
    {"guided_json", "send `response_format`"},
    {"guided_grammar", "send `grammar`"},
    {"cache_prompt", "send `impress.cache`"},
    {"max_completion_tokens", "send `max_tokens`"},
    {"prompt", "this endpoint takes `messages`"},
    {"messages", "this endpoint takes `prompt`"},
    {"functions", "send `tools`"},
    {"function_call", "send `tool_choice`"},
    {"reasoning_effort", "send it in `chat_template_kwargs`, if the model's template knows it"},
};

static const char *hint_for(const char *name)
{
    for (size_t i = 0; i < sizeof hints / sizeof hints[0]; i++) {
        if (strcmp(hints[i][0], name) == 0) return hints[i][1];
    }
    return NULL;
}

static int check_fields(parse *p, const json_t *o)
{
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)o, key, v) {
        bool known = false;
        for (size_t i = 0; i < sizeof fields / sizeof fields[0] && !known; i++)
            known = (fields[i].where & (p->r->chat ? CHAT : COMPLETION)) && strcmp(fields[i].name, key) == 0;
        if (known) continue;
        const char *hint = hint_for(key);
        return oai_fail(p->e, 400, UNKNOWN, key, "unknown field `%.80s`%s%s", key, hint ? ": " : "", hint ? hint : "");
    }
    return 0;
}

static bool is_text(const json_t *v, const char *text)
{
    return json_is_string(v) && strcmp(json_string_value(v), text) == 0;
}

/* Fields of which only the value is supported that changes nothing. */
static int check_plain(parse *p, const json_t *o)
{
    for (size_t i = 0; i < 2; i++) {
        static const char *const counts[] = {"n", "best_of"};
        const json_t *v = get(o, counts[i]);
        int64_t n = 1;
        if (get_integer(p, v, counts[i], 1, INT64_MAX, &n) != 0) return -1;
        if (n != 1)
            return oai_fail(p->e, 400, UNSUPPORTED, counts[i], "`%s` must be 1: one answer a request", counts[i]);
    }
    const json_t *modalities = get(o, "modalities"), *echo = get(o, "echo"), *suffix = get(o, "suffix");
    const json_t *functions = get(o, "functions");
    bool ignored = false, one_modality = json_array_size(modalities) == 1;
    if (get_bool(p, echo, "echo", &ignored) != 0) return -1;
    const struct {
        const char *name;
        bool plain;
    } checks[] = {
        {"echo", !json_is_true(echo)},
        {"suffix", !suffix || is_text(suffix, "")},
        {"modalities", !modalities || (one_modality && is_text(json_array_get(modalities, 0), "text"))},
        {"functions", !functions || (json_is_array(functions) && json_array_size(functions) == 0)},
        {"function_call", !get(o, "function_call") || is_text(get(o, "function_call"), "none")},
        {"audio", !get(o, "audio")},
        {"prediction", !get(o, "prediction")},
        {"web_search_options", !get(o, "web_search_options")},
        {"verbosity", !get(o, "verbosity") || is_text(get(o, "verbosity"), "medium")},
        {"reasoning_effort", !get(o, "reasoning_effort")},
    };
    for (size_t i = 0; i < sizeof checks / sizeof checks[0]; i++) {
        if (checks[i].plain) continue;
        const char *name = checks[i].name, *hint = hint_for(name);
        return oai_fail(p->e, 400, UNSUPPORTED, name, "`%s` is not supported%s%s", name, hint ? ": " : "",
                        hint ? hint : "");
    }
    return 0;
}

/* Fields that are no matter of the answer, and do nothing here: still they must be what they are meant to be. */
static int check_aside(parse *p, const json_t *o)
{
    static const char *const texts[] = {"safety_identifier", "prompt_cache_key", "prompt_cache_retention"};
    const json_t *metadata = get(o, "metadata");
    const char *ignored, *tier = NULL, *key;
    json_t *v;
    bool store;
    if (get_bool(p, get(o, "store"), "store", &store) != 0) return -1;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        if (get_text(p, get(o, texts[i]), texts[i], SIZE_MAX, &ignored) != 0) return -1;
    if (get_text(p, get(o, "service_tier"), "service_tier", SIZE_MAX, &tier) != 0) return -1;
    if (tier && strcmp(tier, "auto") != 0 && strcmp(tier, "default") != 0)
        return oai_fail(p->e, 400, UNSUPPORTED, "service_tier", "`service_tier` must be auto or default");
    if (metadata && !json_is_object(metadata)) return wrong_type(p, "metadata", "an object");
    json_object_foreach((json_t *)metadata, key, v) {
        if (!json_is_string(v)) return wrong_type(p, "metadata", "an object of strings");
    }
    return 0;
}

static int load(parse *p, const char *body, size_t n_bytes)
{
    if (n_bytes > p->limits->max_body_bytes)
        return oai_fail(p->e, 413, "request_too_large", NULL, "the body has %zu bytes, more than %zu", n_bytes,
                        p->limits->max_body_bytes);
    if (n_bytes == 0) return oai_fail(p->e, 400, "invalid_json", NULL, "the body is empty, not a JSON object");
    if (too_deep(body, n_bytes))
        return oai_fail(p->e, 400, "invalid_json", NULL, "the body is nested deeper than %d levels", (int)MAX_DEPTH);
    json_error_t at;
    p->r->root = json_loadb(body, n_bytes, JSON_REJECT_DUPLICATES, &at);
    if (!p->r->root) {
        /* jansson's own text would quote the body. */
        const char *what;
        switch (json_error_code(&at)) {
        case json_error_out_of_memory: return no_memory(p);
        case json_error_invalid_utf8: what = "a string is not UTF-8"; break;
        case json_error_null_character:
        case json_error_null_byte_in_key: what = "a string has a NUL character"; break;
        case json_error_duplicate_key: what = "an object has a field twice"; break;
        case json_error_premature_end_of_input: what = "it ends too soon"; break;
        case json_error_end_of_input_expected: what = "something follows the end"; break;
        case json_error_numeric_overflow: what = "a number is too large"; break;
        default: what = "there is a mistake"; break;
        }
        return oai_fail(p->e, 400, "invalid_json", NULL, "the body is not JSON: %s (line %d, column %d)", what, at.line,
                        at.column);
    }
    if (!json_is_object(p->r->root))
        return oai_fail(p->e, 400, "invalid_json", NULL, "the body must be a JSON object");
    return 0;
}

oai_limits oai_limits_default(void)
{
    return (oai_limits){
        .max_body_bytes = 16 << 20,
        .max_messages = 4096,
        .max_tools = 128,
        .sampling = {.temperature = 1, .top_p = 1, .repeat_penalty = 1},
    };
}

static int parse_all(parse *p, const char *body, size_t n_bytes)
{
    oai_request *r = p->r;
    if (load(p, body, n_bytes) != 0 || check_fields(p, r->root) != 0 || check_plain(p, r->root) != 0 ||
        check_aside(p, r->root) != 0)
        return -1;
    const json_t *o = r->root;
    if (get_text(p, get(o, "model"), "model", 512, &r->model) != 0 ||
        get_text(p, get(o, "user"), "user", SIZE_MAX, &r->user) != 0)
        return -1;
    if ((r->chat ? get_messages(p, get(o, "messages")) : get_prompt(p, get(o, "prompt"))) != 0) return -1;
    if (get_sampling(p, o) != 0 || get_limits_of_answer(p, o) != 0 || get_stream(p, o) != 0 || get_form(p, o) != 0)
        return -1;
    if (get_kwargs(p, get(o, "chat_template_kwargs")) != 0) return -1;
    return get_impress(p, get(o, "impress"));
}

int oai_request_parse(bool chat, const char *body, size_t n_bytes, const oai_limits *limits, oai_request *out,
                      oai_error *e)
{
    memset(out, 0, sizeof *out);
    memset(e, 0, sizeof *e);
    out->chat = chat;
    parse p = {out, limits, e};
    int rc = parse_all(&p, body, n_bytes);
    if (rc != 0) oai_request_free(out);
    return rc;
}

void oai_request_free(oai_request *r)
{
    for (size_t i = 0; i < r->n_messages; i++) free(r->messages[i].tool_calls);
    free(r->messages);
    free(r->prompt_tokens);
    free(r->sampling.bias);
    free(r->stops);
    free(r->tools);
    free(r->kwargs);
    for (size_t i = 0; i < r->n_owned; i++) free(r->owned[i]);
    free(r->owned);
    json_decref(r->root);
    memset(r, 0, sizeof *r);
}
