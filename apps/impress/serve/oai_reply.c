#include "oai_reply.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the buffer ---- */

static bool reserve(oai_buffer *b, size_t more)
{
    if (b->failed) return false;
    size_t room = b->room ? b->room : 256;
    while (room - b->n <= more && room < SIZE_MAX / 2) room *= 2; /* <=: a NUL goes behind */
    if (room > b->room) {
        char *grown = room - b->n > more ? realloc(b->data, room) : NULL;
        if (!grown) {
            b->failed = true;
            return false;
        }
        b->data = grown;
        b->room = room;
    }
    return true;
}

void oai_buffer_add(oai_buffer *b, const void *bytes, size_t n)
{
    if (!reserve(b, n)) return;
    if (n > 0) memcpy(b->data + b->n, bytes, n);
    b->n += n;
    b->data[b->n] = '\0';
}

void oai_buffer_clear(oai_buffer *b)
{
    b->n = 0;
    b->failed = false;
}

void oai_buffer_free(oai_buffer *b)
{
    free(b->data);
    memset(b, 0, sizeof *b);
}

static void add_text(oai_buffer *b, const char *text)
{
    oai_buffer_add(b, text, strlen(text));
}

/* ---- UTF-8 ---- */

/* What begins at s, with n > 0 bytes to be seen: a character of *length bytes (1), a start of one that the bytes end in
 * (0), or a byte that can't begin one (-1). */
static int look(const unsigned char *s, size_t n, size_t *length)
{
    *length = s[0] < 0x80 ? 1 : s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0x80) return 1;
    if (s[0] < 0xc2 || s[0] > 0xf4) return -1;
    for (size_t i = 1; i < *length; i++) {
        if (i == n) return 0;
        /* The second byte's range keeps out long forms, surrogates and what is beyond U+10FFFF. */
        unsigned low = i > 1 ? 0x80 : s[0] == 0xe0 ? 0xa0 : s[0] == 0xf0 ? 0x90 : 0x80;
        unsigned high = i > 1 ? 0xbf : s[0] == 0xed ? 0x9f : s[0] == 0xf4 ? 0x8f : 0xbf;
        if (s[i] < low || s[i] > high) return -1;
    }
    return 1;
}

size_t oai_utf8_whole(const char *s, size_t n)
{
    /* A cut character is in the last three bytes. */
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        unsigned char c = (unsigned char)s[n - back];
        size_t length;
        if ((c & 0xc0) == 0x80) continue;
        if (c >= 0xc0 && look((const unsigned char *)s + n - back, back, &length) == 0) return n - back;
        break;
    }
    return n;
}

/* Any bytes as JSON text; NULL: no memory. */
static json_t *text_value(const char *s, size_t n)
{
    const unsigned char *bytes = (const unsigned char *)s;
    size_t bad = 0, length;
    for (size_t i = 0; i < n; i += length) {
        if (look(bytes + i, n - i, &length) == 1) continue;
        length = 1;
        bad++;
    }
    if (bad == 0) return json_stringn_nocheck(n ? s : "", n);
    char *clean = malloc(n + 2 * bad), *to = clean;
    if (!clean) return NULL;
    for (size_t i = 0; i < n; i += length) {
        if (look(bytes + i, n - i, &length) == 1) {
            memcpy(to, s + i, length);
            to += length;
        } else {
            memcpy(to, "\xef\xbf\xbd", 3); /* U+FFFD */
            to += 3;
            length = 1;
        }
    }
    json_t *v = json_stringn_nocheck(clean, (size_t)(to - clean));
    free(clean);
    return v;
}

static json_t *string_value(const char *s)
{
    return s ? text_value(s, strlen(s)) : json_null();
}

/* ---- objects ---- */

/* Takes `v`, which may be NULL where memory ran out: the buffer has failed then. */
static void put(oai_buffer *b, json_t *o, const char *key, json_t *v)
{
    if (json_object_set_new_nocheck(o, key, v) != 0) b->failed = true;
}

static void append(oai_buffer *b, json_t *a, json_t *v)
{
    if (json_array_append_new(a, v) != 0) b->failed = true;
}

static json_t *count(size_t n)
{
    return json_integer((json_int_t)n);
}

static int add_dumped(const char *bytes, size_t n, void *buffer)
{
    oai_buffer_add(buffer, bytes, n);
    return 0;
}

/* Write and release a value, between two texts. */
static void finish(oai_buffer *b, json_t *v, const char *before, const char *after)
{
    add_text(b, before);
    if (!v || json_dump_callback(v, add_dumped, b, JSON_COMPACT | JSON_REAL_PRECISION(9)) != 0) b->failed = true;
    add_text(b, after);
    json_decref(v);
}

static void finish_event(oai_buffer *b, json_t *v)
{
    finish(b, v, "data: ", "\n\n");
}

static json_t *real(double x)
{
    return json_real(isnan(x) || x < -9999 ? -9999 : x > 1e300 ? 1e300 : x);
}

/* A token's text; one that is part of a character is spelled by its bytes, as OpenAI does. */
static json_t *token_value(const char *bytes, size_t n)
{
    size_t length;
    bool whole = true;
    for (size_t i = 0; i < n && whole; i += length) whole = look((const unsigned char *)bytes + i, n - i, &length) == 1;
    if (whole) return text_value(bytes, n);
    char *text = malloc(6 + 4 * n + 1), *to = text;
    if (!text) return NULL;
    to += sprintf(to, "bytes:");
    for (size_t i = 0; i < n; i++) to += sprintf(to, "\\x%02x", (unsigned char)bytes[i]);
    json_t *v = json_string_nocheck(text);
    free(text);
    return v;
}

static json_t *chat_token(oai_buffer *b, const char *bytes, size_t n, double logprob)
{
    json_t *o = json_object(), *list = json_array();
    put(b, o, "token", token_value(bytes, n));
    put(b, o, "logprob", real(logprob));
    for (size_t i = 0; i < n; i++) append(b, list, json_integer((unsigned char)bytes[i]));
    put(b, o, "bytes", list);
    return o;
}

static json_t *chat_logprobs(oai_buffer *b, const oai_logprob *l, size_t n)
{
    json_t *o = json_object(), *list = json_array();
    for (size_t i = 0; i < n; i++) {
        json_t *token = chat_token(b, l[i].bytes, l[i].n_bytes, l[i].logprob), *top = json_array();
        for (size_t j = 0; j < l[i].n_top; j++)
            append(b, top, chat_token(b, l[i].top[j].bytes, l[i].top[j].n_bytes, l[i].top[j].logprob));
        put(b, token, "top_logprobs", top);
        append(b, list, token);
    }
    put(b, o, "content", list);
    put(b, o, "refusal", json_null());
    return o;
}

static json_t *completion_logprobs(oai_buffer *b, const oai_logprob *l, size_t n)
{
    json_t *o = json_object(), *tokens = json_array(), *values = json_array(), *offsets = json_array();
    json_t *tops = json_array();
    bool any = false;
    for (size_t i = 0; i < n; i++) {
        append(b, tokens, token_value(l[i].bytes, l[i].n_bytes));
        append(b, values, real(l[i].logprob));
        append(b, offsets, count(l[i].offset));
        json_t *top = json_object();
        for (size_t j = 0; j < l[i].n_top; j++) {
            json_t *name = token_value(l[i].top[j].bytes, l[i].top[j].n_bytes);
            const char *key = json_string_value(name);
            if (!key) b->failed = true;
            /* Two tokens may have one text: the likelier stays. */
            else if (!json_object_get(top, key)) put(b, top, key, real(l[i].top[j].logprob));
            json_decref(name);
        }
        append(b, tops, top);
        any = any || l[i].n_top > 0;
    }
    put(b, o, "tokens", tokens);
    put(b, o, "token_logprobs", values);
    if (any) put(b, o, "top_logprobs", json_incref(tops));
    else put(b, o, "top_logprobs", json_null());
    put(b, o, "text_offset", offsets);
    json_decref(tops);
    return o;
}

static json_t *logprobs_value(oai_buffer *b, bool chat, const oai_logprob *l, size_t n)
{
    if (!l) return json_null();
    return chat ? chat_logprobs(b, l, n) : completion_logprobs(b, l, n);
}

static json_t *finish_value(oai_finish reason)
{
    switch (reason) {
    case OAI_STOP: return json_string("stop");
    case OAI_LENGTH: return json_string("length");
    case OAI_TOOL_CALLS: return json_string("tool_calls");
    case OAI_RUNNING: break;
    }
    return json_null();
}

static json_t *usage_value(oai_buffer *b, const oai_usage *u)
{
    json_t *o = json_object(), *details = json_object();
    put(b, o, "prompt_tokens", count(u->prompt_tokens));
    put(b, o, "completion_tokens", count(u->completion_tokens));
    put(b, o, "total_tokens", count(u->prompt_tokens + u->completion_tokens));
    put(b, details, "cached_tokens", count(u->cached_tokens));
    put(b, o, "prompt_tokens_details", details);
    return o;
}

static json_t *report_value(oai_buffer *b, const oai_report *r)
{
    const struct {
        const char *name;
        uint64_t ns;
    } times[] = {
        {"queue", r->queue_ns}, {"identify", r->identify_ns}, {"load", r->load_ns}, {"compute", r->compute_ns},
        {"ttft", r->ttft_ns},
    };
    json_t *o = json_object(), *tokens = json_object(), *ms = json_object();
    put(b, o, "way", string_value(r->way));
    if (r->reason) put(b, o, "reason", string_value(r->reason));
    if (r->system) put(b, o, "system", string_value(r->system));
    if (r->retention > 0) put(b, o, "retention", json_real(r->retention));
    put(b, tokens, "live", count(r->live_tokens));
    put(b, tokens, "loaded", count(r->loaded_tokens));
    put(b, tokens, "computed", count(r->computed_tokens));
    put(b, o, "tokens", tokens);
    put(b, o, "bytes_read", count(r->bytes_read));
    for (size_t i = 0; i < sizeof times / sizeof times[0]; i++)
        put(b, ms, times[i].name, json_real((double)(times[i].ns / 1000) / 1000));
    put(b, o, "ms", ms);
    if (r->request_id) put(b, o, "request_id", string_value(r->request_id));
    return o;
}

/* What every body and chunk has, with one choice, which is taken; NULL: none. */
static json_t *envelope(oai_buffer *b, const oai_head *h, bool chunk, json_t *choice)
{
    const char *object = !h->chat ? "text_completion" : chunk ? "chat.completion.chunk" : "chat.completion";
    json_t *o = json_object(), *choices = json_array();
    put(b, o, "id", string_value(h->id));
    put(b, o, "object", json_string(object));
    put(b, o, "created", json_integer(h->created));
    put(b, o, "model", string_value(h->model));
    if (choice) append(b, choices, choice);
    put(b, o, "choices", choices);
    return o;
}

/* ---- whole replies ---- */

static json_t *call_value(oai_buffer *b, const oai_piece *p, bool streamed)
{
    json_t *call = json_object(), *function = json_object();
    if (streamed) put(b, call, "index", count(p->index));
    if (p->id) put(b, call, "id", string_value(p->id));
    if (p->id) put(b, call, "type", json_string("function"));
    if (p->name) put(b, function, "name", string_value(p->name));
    put(b, function, "arguments", text_value(p->text, p->n_bytes));
    put(b, call, "function", function);
    return call;
}

static json_t *message_value(oai_buffer *b, const oai_piece *pieces, size_t n)
{
    json_t *o = json_object(), *calls = NULL;
    put(b, o, "role", json_string("assistant"));
    put(b, o, "content", json_null());
    put(b, o, "refusal", json_null());
    for (size_t i = 0; i < n; i++) {
        const oai_piece *p = &pieces[i];
        switch (p->kind) {
        case OAI_PIECE_TEXT: put(b, o, "content", text_value(p->text, p->n_bytes)); break;
        case OAI_PIECE_REASONING: put(b, o, "reasoning_content", text_value(p->text, p->n_bytes)); break;
        case OAI_PIECE_TOOL_CALL:
            if (!calls) calls = json_array();
            append(b, calls, call_value(b, p, false));
            break;
        }
    }
    if (calls) put(b, o, "tool_calls", calls);
    else if (json_is_null(json_object_get(o, "content"))) put(b, o, "content", json_string(""));
    return o;
}

void oai_write_reply(oai_buffer *b, const oai_head *h, const oai_piece *pieces, size_t n_pieces,
                     const oai_logprob *logprobs, size_t n_logprobs, oai_finish finish_reason, const oai_usage *usage,
                     const oai_report *report)
{
    json_t *choice = json_object();
    put(b, choice, "index", json_integer(0));
    if (h->chat) put(b, choice, "message", message_value(b, pieces, n_pieces));
    else put(b, choice, "text", n_pieces > 0 ? text_value(pieces[0].text, pieces[0].n_bytes) : json_string(""));
    put(b, choice, "logprobs", logprobs_value(b, h->chat, logprobs, n_logprobs));
    put(b, choice, "finish_reason", finish_value(finish_reason));
    json_t *o = envelope(b, h, false, choice);
    put(b, o, "usage", usage_value(b, usage));
    if (report) put(b, o, "impress", report_value(b, report));
    finish(b, o, "", "");
}

/* ---- streams ---- */

/* A chunk's choice; `delta` (chat) or `text` is taken. */
static json_t *step(oai_buffer *b, const oai_head *h, json_t *content, json_t *logprobs, oai_finish reason)
{
    json_t *choice = json_object();
    put(b, choice, "index", json_integer(0));
    put(b, choice, h->chat ? "delta" : "text", content);
    put(b, choice, "logprobs", logprobs);
    put(b, choice, "finish_reason", finish_value(reason));
    return choice;
}

static json_t *chunk(oai_buffer *b, const oai_head *h, json_t *choice)
{
    json_t *o = envelope(b, h, true, choice);
    if (h->include_usage) put(b, o, "usage", json_null());
    return o;
}

void oai_stream_begin(oai_buffer *b, const oai_head *h)
{
    if (!h->chat) return;
    json_t *delta = json_object();
    put(b, delta, "role", json_string("assistant"));
    put(b, delta, "content", json_string(""));
    finish_event(b, chunk(b, h, step(b, h, delta, json_null(), OAI_RUNNING)));
}

static json_t *delta_value(oai_buffer *b, const oai_piece *p)
{
    json_t *delta = json_object(), *calls;
    switch (p->kind) {
    case OAI_PIECE_TEXT: put(b, delta, "content", text_value(p->text, p->n_bytes)); break;
    case OAI_PIECE_REASONING: put(b, delta, "reasoning_content", text_value(p->text, p->n_bytes)); break;
    case OAI_PIECE_TOOL_CALL:
        calls = json_array();
        append(b, calls, call_value(b, p, true));
        put(b, delta, "tool_calls", calls);
        break;
    }
    return delta;
}

void oai_stream_pieces(oai_buffer *b, const oai_head *h, const oai_piece *pieces, size_t n_pieces,
                       const oai_logprob *logprobs, size_t n_logprobs)
{
    static const oai_piece nothing = {.kind = OAI_PIECE_TEXT, .text = ""};
    if (n_pieces == 0 && n_logprobs > 0) {
        pieces = &nothing;
        n_pieces = 1;
    }
    for (size_t i = 0; i < n_pieces; i++) {
        json_t *content = h->chat ? delta_value(b, &pieces[i]) : text_value(pieces[i].text, pieces[i].n_bytes);
        json_t *values = i == 0 ? logprobs_value(b, h->chat, logprobs, n_logprobs) : json_null();
        finish_event(b, chunk(b, h, step(b, h, content, values, OAI_RUNNING)));
    }
}

void oai_stream_end(oai_buffer *b, const oai_head *h, oai_finish reason, const oai_usage *usage,
                    const oai_report *report)
{
    json_t *last = chunk(b, h, step(b, h, h->chat ? json_object() : json_string(""), json_null(), reason));
    if (h->include_usage) {
        finish_event(b, last);
        last = envelope(b, h, true, NULL);
        put(b, last, "usage", usage_value(b, usage));
    }
    if (report) put(b, last, "impress", report_value(b, report));
    finish_event(b, last);
    add_text(b, "data: [DONE]\n\n");
}

static json_t *error_value(oai_buffer *b, const oai_error *e)
{
    json_t *o = json_object(), *error = json_object();
    put(b, error, "message", string_value(e->message));
    put(b, error, "type", string_value(e->type));
    put(b, error, "param", string_value(e->param[0] ? e->param : NULL));
    put(b, error, "code", string_value(e->code));
    put(b, o, "error", error);
    return o;
}

void oai_stream_error(oai_buffer *b, const oai_error *e)
{
    finish_event(b, error_value(b, e));
}

void oai_stream_comment(oai_buffer *b)
{
    add_text(b, ": waiting\n\n");
}

/* ---- others ---- */

void oai_write_error(oai_buffer *b, const oai_error *e)
{
    finish(b, error_value(b, e), "", "");
}

static json_t *model_value(oai_buffer *b, const oai_model *m)
{
    json_t *o = json_object();
    put(b, o, "id", string_value(m->id));
    put(b, o, "object", json_string("model"));
    put(b, o, "created", json_integer(m->created));
    put(b, o, "owned_by", json_string("impress"));
    if (m->context > 0) put(b, o, "max_model_len", count(m->context));
    return o;
}

void oai_write_models(oai_buffer *b, const oai_model *models, size_t n)
{
    json_t *o = json_object(), *list = json_array();
    for (size_t i = 0; i < n; i++) append(b, list, model_value(b, &models[i]));
    put(b, o, "object", json_string("list"));
    put(b, o, "data", list);
    finish(b, o, "", "");
}

void oai_write_model(oai_buffer *b, const oai_model *model)
{
    finish(b, model_value(b, model), "", "");
}

void oai_make_id(bool chat, const uint8_t random[12], char id[40])
{
    int n = snprintf(id, 40, "%s", chat ? "chatcmpl-" : "cmpl-");
    for (size_t i = 0; i < 12; i++) n += snprintf(id + n, 40 - (size_t)n, "%02x", random[i]);
}
