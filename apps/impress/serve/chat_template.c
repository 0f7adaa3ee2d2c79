#include "chat_template.h"

#include <errno.h>
#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "chat_match.h"
#include "chat_refs.h"
#include "chat_strict.h"
#include "chat_ways.h"
#include "tokenize.h"

enum {
    MAX_SCHEMA_BYTES = 256 << 10,
    MAX_NAME_BYTES = 512,   /* of a property, a definition, a `$ref`: llama.cpp takes stack for each of their bytes */
    MAX_PATTERN_BYTES = 2048,
    MAX_PATTERN_DEPTH = 32, /* of parentheses; those who read them do it recursively */
    MAX_OPTIONAL = 1000,    /* properties of an object, for which llama.cpp takes time by their third power: seconds */
    MAX_LETTERS = 32 << 20, /* of rules' names, which hold the whole way from the root */
    NONCE_BYTES = 12,
    INDEX_DIGITS = 6,
};

/* ---- small helpers that the ways share ---- */

bool chat_texts_add(chat_texts *t, const char *text)
{
    char *copy = strdup(text);
    char **grown = copy ? realloc(t->items, (t->n + 1) * sizeof *grown) : NULL;
    if (!grown) {
        free(copy);
        return false;
    }
    t->items = grown;
    t->items[t->n++] = copy;
    return true;
}

void chat_texts_free(chat_texts *t)
{
    for (size_t i = 0; i < t->n; i++) free(t->items[i]);
    free(t->items);
    memset(t, 0, sizeof *t);
}

void chat_rendering_free(const chat_way *way, chat_rendering *r)
{
    free(r->prompt);
    free(r->grammar);
    free(r->begin);
    free(r->prefill);
    free(r->think_start);
    chat_texts_free(&r->words);
    chat_texts_free(&r->patterns);
    chat_texts_free(&r->preserved);
    chat_texts_free(&r->stops);
    chat_texts_free(&r->think_ends);
    way->parser_free(r->parser);
    memset(r, 0, sizeof *r);
}

void chat_parsed_free(chat_parsed *p)
{
    for (size_t i = 0; i < p->n_calls; i++) {
        free(p->calls[i].id);
        free(p->calls[i].name);
        free(p->calls[i].arguments);
    }
    free(p->calls);
    free(p->content);
    free(p->reasoning);
    memset(p, 0, sizeof *p);
}

bool chat_random_digits(char *out, size_t n)
{
    unsigned char bytes[64];
    if (n > sizeof bytes || getrandom(bytes, n, 0) != (ssize_t)n) return false;
    for (size_t i = 0; i < n; i++) snprintf(out + 2 * i, 3, "%02x", bytes[i]);
    return true;
}

/* ---- the template of a model ---- */

typedef struct control {
    const char *text; /* of a control token; the vocabulary's */
    size_t n;
} control;

/* Made by the first request that wants a grammar. */
typedef struct words_once {
    pthread_mutex_t lock;
    match_words *words;
} words_once;

struct chat_template {
    const chat_way *way;
    const struct llama_vocab *vocab;
    void *templates; /* of the way; NULL: chats can't be had, `why` */
    oai_error why;
    chat_capabilities capabilities;
    control *controls;  /* by first byte, and of those with the same the longer first */
    size_t n_controls;
    words_once *words;
    size_t first[257]; /* controls that begin with byte c: [first[c], first[c + 1]) */
};

static int by_first_byte(const void *a, const void *b)
{
    const control *x = a, *y = b;
    unsigned char cx = (unsigned char)x->text[0], cy = (unsigned char)y->text[0];
    if (cx != cy) return cx < cy ? -1 : 1;
    return x->n > y->n ? -1 : x->n < y->n;
}

/* The texts that llama.cpp's tokeniser takes for special tokens only where it is told to. */
static bool find_controls(chat_template *t)
{
    int32_t n_vocab = llama_vocab_n_tokens(t->vocab);
    size_t room = 0;
    for (llama_token token = 0; token < n_vocab; token++) {
        if (!(llama_vocab_get_attr(t->vocab, token) & (LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN))) continue;
        const char *text = llama_vocab_get_text(t->vocab, token);
        if (!text || *text == '\0') continue;
        if (t->n_controls == room) {
            control *grown = realloc(t->controls, (room = room ? 2 * room : 64) * sizeof *grown);
            if (!grown) return false;
            t->controls = grown;
        }
        t->controls[t->n_controls++] = (control){text, strlen(text)};
    }
    if (t->n_controls > 0) qsort(t->controls, t->n_controls, sizeof *t->controls, by_first_byte);
    for (size_t c = 0, i = 0; c <= 256; c++) {
        while (i < t->n_controls && (unsigned char)t->controls[i].text[0] < c) i++;
        t->first[c] = i;
    }
    return true;
}

int chat_template_open_way(const chat_way *way, const struct llama_model *model, const char *source,
                           chat_template **out, oai_error *e)
{
    *out = NULL;
    chat_template *t = calloc(1, sizeof *t);
    if (!t) return oai_fail(e, 500, NULL, NULL, "out of memory");
    t->way = way;
    t->vocab = llama_model_get_vocab(model);
    t->words = calloc(1, sizeof *t->words);
    if (t->words) pthread_mutex_init(&t->words->lock, NULL);
    if (!t->words || !find_controls(t)) {
        oai_fail(e, 500, NULL, NULL, "out of memory");
        goto fail;
    }
    if (way->open(model, source, &t->templates, &t->why) != 0) {
        t->templates = NULL;
        if (source || t->why.status >= 500) {
            *e = t->why;
            goto fail;
        }
    }
    bool chat = t->templates != NULL;
    t->capabilities = (chat_capabilities){
        .chat = chat,
        .jinja = chat && way->jinja,
        .tools = chat && way->takes_tools && way->takes_tools(t->templates),
        .schema = way->schema,
        .plain = !source && !llama_model_chat_template(model, NULL),
    };
    *out = t;
    return 0;
fail:
    chat_template_close(t);
    return -1;
}

int chat_template_open(const struct llama_model *model, const char *source, chat_template **out, oai_error *e)
{
#if IMPRESS_HAVE_LLAMA_COMMON
    return chat_template_open_way(&chat_way_common, model, source, out, e);
#else
    return chat_template_open_way(&chat_way_plain, model, source, out, e);
#endif
}

void chat_template_close(chat_template *t)
{
    if (!t) return;
    if (t->templates) t->way->close(t->templates);
    if (t->words) {
        match_words_free(t->words->words);
        pthread_mutex_destroy(&t->words->lock);
        free(t->words);
    }
    free(t->controls);
    free(t);
}

chat_capabilities chat_template_capabilities(const chat_template *t)
{
    return t->capabilities;
}

/* ---- control tokens that are meant as text ---- */

/* A request of which the messages' control tokens are replaced by marks that no client can guess: the nonce, and the
 * number of the control. They are made of letters and digits, which templates leave alone. */
typedef struct disguise {
    const chat_template *t;
    char nonce[3 + 2 * NONCE_BYTES + 1];
    size_t n_nonce, n_mark;
    oai_message *messages; /* [n], with tool calls of their own */
    size_t n;
    char **owned;
    size_t n_owned;
} disguise;

/* The control that text begins with; NULL: none. */
static const control *control_at(const chat_template *t, const char *text)
{
    unsigned char c = (unsigned char)text[0];
    for (size_t i = t->first[c]; i < t->first[c + 1u]; i++) {
        if (strncmp(text, t->controls[i].text, t->controls[i].n) == 0) return &t->controls[i];
    }
    return NULL;
}

/* Replace *text, if need be. False: no memory. */
static bool disguise_text(disguise *d, const char **text)
{
    if (!*text) return true;
    size_t n_found = 0, n_bytes = 0;
    for (const char *s = *text; *s;) {
        const control *c = control_at(d->t, s);
        n_found += c != NULL;
        n_bytes += c ? d->n_mark : 1;
        s += c ? c->n : 1;
    }
    if (n_found == 0) return true;
    char *copy = malloc(n_bytes + 1), *to = copy;
    char **grown = copy ? realloc(d->owned, (d->n_owned + 1) * sizeof *grown) : NULL;
    if (!grown) {
        free(copy);
        return false;
    }
    d->owned = grown;
    d->owned[d->n_owned++] = copy;
    for (const char *s = *text; *s;) {
        const control *c = control_at(d->t, s);
        if (c) to += snprintf(to, d->n_mark + 1, "%s%0*zx", d->nonce, (int)INDEX_DIGITS, (size_t)(c - d->t->controls));
        else *to++ = *s;
        s += c ? c->n : 1;
    }
    *to = '\0';
    *text = copy;
    return true;
}

static int hex_digit(char c)
{
    static const char digits[] = "0123456789abcdef0123456789ABCDEF";
    const char *at = c ? strchr(digits, c) : NULL;
    return at ? (int)(at - digits) % 16 : -1;
}

/* The number of a \uXXXX; -1: that isn't one. */
static long escaped_unit(const char *s)
{
    long n = s[0] == '\\' && s[1] == 'u' ? 0 : -1;
    for (int i = 2; n >= 0 && i < 6; i++) n = hex_digit(s[i]) < 0 ? -1 : 16 * n + hex_digit(s[i]);
    return n;
}

/* An escape of a JSON text as the character that it stands for, which goes to `out` in UTF-8. Returns its length; 0: a
 * character that can't stand for itself, or none. *n: bytes of the escape. */
static size_t resolve(const char *s, char out[4], size_t *n)
{
    *n = s[1] ? 2 : 1;
    if (s[1] == '/') {
        out[0] = '/';
        return 1;
    }
    long c = escaped_unit(s);
    if (c < 0) return 0;
    *n = 6;
    if (c >= 0xd800 && c < 0xe000) {
        long low = c < 0xdc00 ? escaped_unit(s + 6) : -1;
        if (low < 0xdc00 || low >= 0xe000) return 0;
        *n = 12;
        c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
    }
    if (c < 0x20 || c == '"' || c == '\\') return 0;
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    size_t length = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = length; i-- > 1; c >>= 6) out[i] = (char)(0x80 | (c & 0x3f));
    out[0] = (char)((length == 2 ? 0xc0 : length == 3 ? 0xe0 : 0xf0) | c);
    return length;
}

/* Arguments may hide a control token behind escapes, which a template resolves. Where they do they are resolved here;
 * else the text stays as the model wrote it, to the letter: cells that hold its answer can be used again. */
static bool disguise_arguments(disguise *d, const char **text)
{
    if (!strchr(*text, '\\')) return disguise_text(d, text);
    char *plain = malloc(strlen(*text) + 1), *to = plain;
    char **grown = plain ? realloc(d->owned, (d->n_owned + 1) * sizeof *grown) : NULL;
    if (!grown) {
        free(plain);
        return false;
    }
    d->owned = grown;
    d->owned[d->n_owned++] = plain;
    for (const char *s = *text; *s;) {
        char character[4];
        size_t n = 1, length = *s == '\\' ? resolve(s, character, &n) : 0;
        memcpy(to, length ? character : s, length ? length : n);
        to += length ? length : n;
        s += n;
    }
    *to = '\0';
    const char *disguised = plain;
    if (!disguise_text(d, &disguised)) return false;
    if (disguised == plain) return disguise_text(d, text);
    *text = disguised;
    return true;
}

static void disguise_free(disguise *d)
{
    for (size_t i = 0; i < d->n; i++) free(d->messages[i].tool_calls);
    free(d->messages);
    for (size_t i = 0; i < d->n_owned; i++) free(d->owned[i]);
    free(d->owned);
}

/* False: no memory, or no random numbers. */
static bool disguise_make(disguise *d, const chat_template *t, const oai_request *r)
{
    char digits[2 * NONCE_BYTES + 1];
    memset(d, 0, sizeof *d);
    d->t = t;
    if (!chat_random_digits(digits, NONCE_BYTES)) return false;
    d->n_nonce = (size_t)snprintf(d->nonce, sizeof d->nonce, "imp%s", digits);
    d->n_mark = d->n_nonce + INDEX_DIGITS;
    d->messages = calloc(r->n_messages, sizeof *d->messages);
    if (!d->messages) return false;
    for (; d->n < r->n_messages; d->n++) {
        const oai_message *from = &r->messages[d->n];
        oai_message *m = &d->messages[d->n];
        *m = *from;
        m->tool_calls = NULL;
        if (m->n_tool_calls > 0 && !(m->tool_calls = calloc(m->n_tool_calls, sizeof *m->tool_calls))) return false;
        bool ok = disguise_text(d, &m->content) && disguise_text(d, &m->reasoning) && disguise_text(d, &m->name) &&
                  disguise_text(d, &m->tool_call_id);
        for (size_t i = 0; ok && i < m->n_tool_calls; i++) {
            oai_tool_call *c = &m->tool_calls[i];
            *c = from->tool_calls[i];
            ok = disguise_text(d, &c->id) && disguise_text(d, &c->name) && disguise_arguments(d, &c->arguments);
        }
        if (!ok) {
            d->n++;
            return false;
        }
    }
    return true;
}

/* The tokens of a rendered prompt: what was disguised is text again. False: no memory, or too long. */
static bool undisguise(const disguise *d, const char *prompt, chat_plan *p)
{
    for (;;) {
        const char *mark = strstr(prompt, d->nonce);
        size_t n = mark ? (size_t)(mark - prompt) : strlen(prompt);
        if (!app_tokenize_more(p->vocab, prompt, n, false, true, &p->tokens, &p->n_tokens)) return false;
        if (!mark) return true;
        char digits[INDEX_DIGITS + 1] = {0};
        prompt = mark + d->n_nonce;
        strncpy(digits, prompt, INDEX_DIGITS);
        char *end;
        size_t index = strtoul(digits, &end, 16);
        if (end != digits + INDEX_DIGITS || index >= d->t->n_controls) continue; /* cut in two by the template */
        prompt += INDEX_DIGITS;
        const control *c = &d->t->controls[index];
        if (!app_tokenize_more(p->vocab, c->text, c->n, false, false, &p->tokens, &p->n_tokens)) return false;
    }
}

/* ---- what may become a grammar ---- */

/* Whether the parentheses of a regular expression are nested too deeply. */
static bool deep_pattern(const char *s)
{
    size_t depth = 0;
    for (; *s; s++) {
        if (*s == '\\' && s[1]) s++;
        else if (*s == '(' && ++depth > MAX_PATTERN_DEPTH) return true;
        else if (*s == ')' && depth > 0) depth--;
    }
    return false;
}

_Static_assert(MAX_NAME_BYTES == 512, "as schema_fault() says");

/* NULL, or why a schema of bounded depth may not be read by llama.cpp. Looks at all that a $ref could lead to. */
static const char *schema_fault(const json_t *v)
{
    const char *key, *fault = NULL;
    json_t *item;
    size_t i;
    json_array_foreach((json_t *)v, i, item) {
        if ((fault = schema_fault(item))) return fault;
    }
    json_object_foreach((json_t *)v, key, item) {
        const char *text = json_string_value(item);
        if (strlen(key) > MAX_NAME_BYTES) return "a name is longer than 512 bytes";
        if (text && strcmp(key, "$ref") == 0 && strlen(text) > MAX_NAME_BYTES)
            return "a `$ref` is longer than 512 bytes";
        if (text && strcmp(key, "pattern") == 0) {
            if (strlen(text) > MAX_PATTERN_BYTES) return "a pattern is too long";
            if (deep_pattern(text)) return "a pattern has too many parentheses inside one another";
        }
        if ((fault = schema_fault(item))) return fault;
    }
    return NULL;
}

/* Properties that `v` itself, or a part of which all must hold, lets be left out. */
static size_t count_optional(const json_t *v)
{
    static const char *const parts[] = {"allOf", "anyOf", "oneOf"};
    json_t *item;
    size_t i, n = chat_refs_optional(v);
    for (size_t k = 0; k < sizeof parts / sizeof parts[0]; k++) {
        if (k > 0 && !json_object_get(v, "allOf")) break; /* by itself each is an object of its own */
        json_array_foreach(json_object_get(v, parts[k]), i, item) n += count_optional(item);
    }
    return n;
}

/* What all objects take together: the sum of the third powers. */
static double optional_work(const json_t *v)
{
    const char *key;
    json_t *item;
    size_t i;
    double n = json_is_object(v) ? (double)count_optional(v) : 0, sum = n * n * n;
    json_array_foreach((json_t *)v, i, item) sum += optional_work(item);
    json_object_foreach((json_t *)v, key, item) sum += optional_work(item);
    return sum;
}

static int no_memory(oai_error *e)
{
    return oai_fail(e, 500, NULL, NULL, "the server is out of memory");
}

/* Where app_tokenize_more() failed. */
static int no_tokens(const char *param, oai_error *e)
{
    if (errno != EMSGSIZE) return no_memory(e);
    return oai_fail(e, 400, "invalid_value", param, "the prompt has more than %d characters without a line break",
                    (int)APP_TOKENIZE_CHARACTERS);
}

/* A request's schemas: what they cost, and as they are handed on. */
typedef struct schemas {
    double work; /* see optional_work() */
    chat_refs refs;
    oai_request r; /* the request, but for the texts of schemas, */
    oai_tool *tools; /* [r.n_tools] */
    chat_texts texts; /* which lie here where they were rewritten */
} schemas;

/* *text: it may be replaced. */
static int take_schema(schemas *s, const chat_way *way, const char **text, bool strict, const char *param, oai_error *e)
{
    bool rewritten = false;
    if (strlen(*text) > MAX_SCHEMA_BYTES)
        return oai_fail(e, 400, "invalid_schema", param, "the JSON schema is larger than %d bytes", MAX_SCHEMA_BYTES);
    json_t *v = json_loads(*text, 0, NULL);
    char *dumped = NULL;
    const char *fault = v ? schema_fault(v) : "it can't be read";
    int rc = fault ? oai_fail(e, 400, "invalid_schema", param, "the JSON schema: %s", fault) : 0;
    /* A `$ref` into an `allOf` needs that to stay. */
    bool unwrapped = rc == 0 && way->schema && !strstr(*text, "/allOf/") && chat_refs_unwrap(v);
    if (rc == 0 && strict && way->schema) rc = chat_strict_check(way, v, param, e);
    if (rc == 0 && way->schema) rc = chat_refs_settle(&s->refs, v, param, &rewritten, e);
    if (rc == 0 && (s->work += optional_work(v) + optional_work(s->refs.again)) + s->refs.optional_work >
                       (double)MAX_OPTIONAL * MAX_OPTIONAL * MAX_OPTIONAL)
        rc = oai_fail(e, 400, "invalid_schema", param, "the JSON schema: too many properties may be left out");
    if (rc == 0 && s->refs.letters > MAX_LETTERS)
        rc = oai_fail(e, 400, "invalid_schema", param,
                      "the JSON schema: its properties' names, each with those around it, are too long");
    if (rc == 0 && (rewritten || unwrapped)) {
        dumped = json_dumps(v, JSON_COMPACT);
        if (dumped && chat_texts_add(&s->texts, dumped)) *text = s->texts.items[s->texts.n - 1];
        else rc = no_memory(e);
    }
    free(dumped);
    json_decref(v);
    return rc;
}

static void schemas_free(schemas *s)
{
    chat_refs_free(&s->refs);
    chat_texts_free(&s->texts);
    free(s->tools);
}

/* schemas_free() is wanted also where it fails. */
static int take_schemas(schemas *s, const chat_way *way, const oai_request *r, oai_error *e)
{
    memset(s, 0, sizeof *s);
    s->r = *r;
    if (r->schema && take_schema(s, way, &s->r.schema, r->strict, "response_format", e) != 0) return -1;
    if (r->tool_choice == OAI_TOOLS_NONE) return 0;
    s->tools = calloc(r->n_tools, sizeof *s->tools);
    if (!s->tools) return no_memory(e);
    s->r.tools = s->tools;
    for (size_t i = 0; i < r->n_tools; i++) {
        s->tools[i] = r->tools[i];
        if (take_schema(s, way, &s->tools[i].parameters, s->tools[i].strict, "tools", e) != 0) return -1;
    }
    return 0;
}

/* ---- plans ---- */

/* A template without a place for tools would leave them out, and without one for calls those. */
static int check_tools(const chat_template *t, const oai_request *r, oai_error *e)
{
    const chat_way *way = t->way;
    if (r->tool_choice != OAI_TOOLS_NONE && way->takes_tools && !way->takes_tools(t->templates))
        return oai_fail(e, 400, "unsupported_value", "tools", "this model's chat template knows no tools");
    for (size_t i = 0; way->takes_calls && i < r->n_messages; i++)
        if (r->messages[i].n_tool_calls > 0 && !way->takes_calls(t->templates))
            return oai_fail(e, 400, "unsupported_value", "messages", "this model's chat template knows no tool calls");
    return 0;
}

static int plan_chat(const chat_template *t, const oai_request *r, chat_plan *p, oai_error *e)
{
    if (!t->templates) {
        *e = t->why;
        return -1;
    }
    if (check_tools(t, r, e) != 0) return -1;
    int rc = -1;
    disguise d;
    oai_request disguised = *r;
    if (!disguise_make(&d, t, r)) {
        no_memory(e);
        goto out;
    }
    disguised.messages = d.messages;
    if (t->way->render(t->templates, &disguised, &p->r, e) != 0) goto out;
    if ((r->format == OAI_JSON_SCHEMA || r->format == OAI_JSON_OBJECT) && !p->r.grammar) {
        /* As llama.cpp has it for the forms of some models' answers. */
        oai_fail(e, 400, "unsupported_value", "response_format",
                 "this model's chat template takes no `response_format`");
        goto out;
    }
    if (!undisguise(&d, p->r.prompt, p)) {
        no_tokens("messages", e);
        goto out;
    }
    rc = 0;
out:
    disguise_free(&d);
    return rc;
}

static int plan_completion(const chat_template *t, const oai_request *r, chat_plan *p, oai_error *e)
{
    char **grammar = &p->r.grammar;
    if (r->format == OAI_JSON_SCHEMA) {
        *grammar = t->way->grammar_of(r->schema, e);
        if (!*grammar) return -1;
    } else if (r->format != OAI_TEXT) {
        *grammar = strdup(r->format == OAI_GRAMMAR ? r->grammar : chat_json_grammar);
        if (!*grammar) return no_memory(e);
    }
    if (r->prompt) {
        bool ok = app_tokenize_more(t->vocab, r->prompt, strlen(r->prompt), false, true, &p->tokens, &p->n_tokens);
        return ok ? 0 : no_tokens("prompt", e);
    }
    p->tokens = malloc(r->n_prompt_tokens * sizeof *p->tokens);
    if (!p->tokens) return no_memory(e);
    memcpy(p->tokens, r->prompt_tokens, r->n_prompt_tokens * sizeof *p->tokens);
    p->n_tokens = r->n_prompt_tokens;
    return 0;
}

/* The vocabulary's BOS in front, if it wants one, and the text doesn't give it. */
static bool add_bos(chat_plan *p)
{
    llama_token bos = llama_vocab_bos(p->vocab);
    if (!llama_vocab_get_add_bos(p->vocab) || bos == LLAMA_TOKEN_NULL) return true;
    if (p->n_tokens > 0 && p->tokens[0] == bos) return true;
    llama_token *grown = realloc(p->tokens, (p->n_tokens + 1) * sizeof *grown);
    if (!grown) return false;
    p->tokens = grown;
    memmove(grown + 1, grown, p->n_tokens++ * sizeof *grown);
    grown[0] = bos;
    return true;
}

/* The tokens whose text a parser must see, out of their texts. */
static bool find_shown(chat_plan *p)
{
    size_t n = p->r.preserved.n;
    if (n == 0) return true;
    p->shown = malloc(n * sizeof *p->shown);
    if (!p->shown) return false;
    for (size_t i = 0; i < n; i++) {
        const char *text = p->r.preserved.items[i];
        llama_token token[2];
        int32_t got = app_tokenize(p->vocab, text, strlen(text), token, 2, false, true);
        if (got == 1) p->shown[p->n_shown++] = token[0];
    }
    return true;
}

/* False: no memory. */
static bool find_words(const chat_template *t, chat_plan *p)
{
    if (!p->r.grammar) return true;
    pthread_mutex_lock(&t->words->lock);
    if (!t->words->words) t->words->words = match_words_new(t->vocab);
    p->words = t->words->words;
    pthread_mutex_unlock(&t->words->lock);
    return p->words != NULL;
}

int chat_plan_make(const chat_template *t, const oai_request *r, chat_plan **out, oai_error *e)
{
    *out = NULL;
    schemas s;
    chat_plan *p = calloc(1, sizeof *p);
    if (!p) return no_memory(e);
    p->way = t->way;
    if (take_schemas(&s, t->way, r, e) != 0) goto fail;
    r = &s.r;
    p->vocab = t->vocab;
    p->own_grammar = !r->chat || r->format == OAI_GRAMMAR;
    p->one_call = !r->parallel_tool_calls;
    if ((r->chat ? plan_chat(t, r, p, e) : plan_completion(t, r, p, e)) != 0) goto fail;

    bool ok = (r->n_prompt_tokens > 0 || add_bos(p)) && find_shown(p) && find_words(t, p);
    for (size_t i = 0; ok && i < r->n_stops; i++) ok = chat_texts_add(&p->stops, r->stops[i]);
    for (size_t i = 0; ok && i < p->r.stops.n; i++) ok = chat_texts_add(&p->stops, p->r.stops.items[i]);
    /* A model without a template may not have ChatML's tokens either: the end of a turn then comes as text. */
    if (ok && r->chat && t->capabilities.plain) ok = chat_texts_add(&p->stops, "<|im_end|>");
    if (!ok) {
        no_memory(e);
        goto fail;
    }
    if (p->n_tokens == 0) {
        oai_fail(e, 400, "invalid_value", r->chat ? "messages" : "prompt", "the prompt has no tokens");
        goto fail;
    }
    *out = p;
    schemas_free(&s);
    return 0;
fail:
    schemas_free(&s);
    chat_plan_free(p);
    return -1;
}

void chat_plan_free(chat_plan *p)
{
    if (!p) return;
    chat_rendering_free(p->way, &p->r);
    chat_texts_free(&p->stops);
    free(p->shown);
    free(p->tokens);
    free(p);
}

const llama_token *chat_plan_tokens(const chat_plan *p, size_t *n)
{
    *n = p->n_tokens;
    return p->tokens;
}

const char *const *chat_plan_stops(const chat_plan *p, size_t *n)
{
    *n = p->stops.n;
    return (const char *const *)p->stops.items;
}

bool chat_plan_shows(const chat_plan *p, llama_token token)
{
    for (size_t i = 0; i < p->n_shown; i++) {
        if (p->shown[i] == token) return true;
    }
    return false;
}
