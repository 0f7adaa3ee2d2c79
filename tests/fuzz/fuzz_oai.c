/* fuzz_oai.c: any bytes as the body of a request, to both endpoints; and what was taken, out again in a reply. */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz/fuzz.h"
#include "serve/oai_reply.h"
#include "serve/oai_request.h"

static void must(bool promise)
{
    if (!promise) abort();
}

/* Texts of a request are UTF-8 without NUL: they go through a reply as they are. */
static void check_text(const char *text)
{
    if (!text) return;
    size_t n = strlen(text);
    must(oai_utf8_whole(text, n) == n);
    oai_buffer b = {0};
    const oai_piece piece = {.kind = OAI_PIECE_TEXT, .text = text, .n_bytes = n};
    const oai_head head = {.chat = true, .id = text, .model = text};
    oai_write_reply(&b, &head, &piece, 1, NULL, 0, OAI_STOP, &(oai_usage){0}, NULL);
    must(!b.failed);
    json_t *v = json_loadb(b.data, b.n, 0, NULL);
    must(v != NULL);
    must(strcmp(json_string_value(json_object_get(v, "id")), text) == 0);
    json_decref(v);
    oai_buffer_free(&b);
}

static void check_request(const oai_request *r)
{
    const oai_sampling *s = &r->sampling;
    must(r->root != NULL);
    must(r->chat ? r->n_messages > 0 && !r->prompt && !r->prompt_tokens
                 : r->n_messages == 0 && (r->prompt != NULL) != (r->prompt_tokens != NULL));
    must(r->prompt == NULL || r->prompt[0] != '\0');
    for (size_t i = 0; i < r->n_prompt_tokens; i++) must(r->prompt_tokens[i] >= 0 && r->prompt_tokens[i] < 1000);
    must(s->temperature >= 0 && s->temperature <= 2 && s->top_p >= 0 && s->top_p <= 1 && s->min_p >= 0 &&
         s->min_p <= 1);
    must(s->top_k >= 0 && s->repeat_penalty > 0 && fabs(s->presence_penalty) <= 2 && fabs(s->frequency_penalty) <= 2);
    for (size_t i = 0; i < s->n_bias; i++) {
        must(s->bias[i].token >= 0 && s->bias[i].token < 1000 && fabsf(s->bias[i].bias) <= 100);
        for (size_t j = 0; j < i; j++) must(s->bias[j].token != s->bias[i].token);
    }
    must(r->max_tokens == -1 || r->max_tokens > 0);
    must(r->n_logprobs >= -1 && r->n_logprobs <= (r->chat ? 20 : 5));
    must(r->n_stops <= 16);
    for (size_t i = 0; i < r->n_stops; i++) must(r->stops[i][0] != '\0');
    must(!r->include_usage || r->stream);
    must((r->format == OAI_JSON_SCHEMA) == (r->schema != NULL) && (r->format == OAI_GRAMMAR) == (r->grammar != NULL));
    must(r->tool_choice == OAI_TOOLS_NONE || (r->n_tools > 0 && r->format == OAI_TEXT));
    must(r->impress.retention >= 0 && r->impress.retention <= 1);
    check_text(r->model);
    check_text(r->prompt);
    for (size_t i = 0; i < r->n_messages; i++) {
        const oai_message *m = &r->messages[i];
        must(m->content || m->n_tool_calls > 0 || m->reasoning);
        must(m->role == OAI_TOOL ? m->tool_call_id != NULL : m->tool_call_id == NULL);
        must(m->n_tool_calls == 0 || m->role == OAI_ASSISTANT);
        check_text(m->content);
        check_text(m->name);
        for (size_t j = 0; j < m->n_tool_calls; j++) {
            must(m->tool_calls[j].id && m->tool_calls[j].name[0] != '\0');
            json_t *v = json_loads(m->tool_calls[j].arguments, 0, NULL);
            must(json_is_object(v));
            json_decref(v);
        }
    }
    for (size_t i = 0; i < r->n_tools; i++) {
        must(r->tools[i].name[0] != '\0' && r->tools[i].description);
        json_t *v = json_loads(r->tools[i].parameters, 0, NULL);
        must(json_is_object(v));
        json_decref(v);
    }
}

static void parse(bool chat, const uint8_t *bytes, size_t n_bytes)
{
    oai_limits limits = oai_limits_default();
    limits.n_vocab = 1000;
    oai_request r;
    oai_error e;
    int rc = oai_request_parse(chat, (const char *)bytes, n_bytes, &limits, &r, &e);
    must(rc == 0 || rc == -1);
    if (rc == 0) {
        must(e.status == 0);
        check_request(&r);
        oai_request_free(&r);
    } else {
        must((e.status == 400 || e.status == 413) && e.type && e.message[0] != '\0' && !r.root);
        oai_buffer b = {0};
        oai_write_error(&b, &e);
        json_t *v = json_loadb(b.data, b.n, 0, NULL);
        must(v != NULL && !b.failed);
        json_decref(v);
        oai_buffer_free(&b);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    parse(true, bytes, n_bytes);
    parse(false, bytes, n_bytes);
    return 0;
}

size_t imp_fuzz_seed(size_t i, uint8_t *out, size_t room)
{
    static const char *const bodies[] = {
        "{\"messages\":[{\"role\":\"system\",\"content\":\"S\"},{\"role\":\"user\",\"content\":[{\"type\":\"text\","
        "\"text\":\"a\xc3\xa9\"},{\"type\":\"text\",\"text\":\"\\ud83d\\ude00\"}],\"name\":\"Ann\"},{\"role\":"
        "\"assistant\","
        "\"content\":null,\"reasoning_content\":\"r\",\"tool_calls\":[{\"id\":\"c\",\"type\":\"function\",\"function\":"
        "{"
        "\"name\":\"f\",\"arguments\":\"{\\\"x\\\":1}\"}}]},{\"role\":\"tool\",\"tool_call_id\":\"c\",\"content\":"
        "\"R\"}],"
        "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"description\":\"D\",\"parameters\":{\"type\":"
        "\"object\",\"properties\":{\"x\":{\"type\":\"integer\"}}},\"strict\":true}}],\"tool_choice\":{\"type\":"
        "\"function\","
        "\"function\":{\"name\":\"f\"}},\"parallel_tool_calls\":false}",
        "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}],\"max_tokens\":5,\"temperature\":0.5,"
        "\"top_p\":"
        "0.9,\"top_k\":40,\"min_p\":0.05,\"seed\":7,\"stop\":[\"a\",\"b\"],\"presence_penalty\":1,\"frequency_"
        "penalty\":-1,"
        "\"repeat_penalty\":1.1,\"logit_bias\":{\"5\":-100,\"6\":1},\"logprobs\":true,\"top_logprobs\":5,\"n\":1,"
        "\"stream\":true,"
        "\"stream_options\":{\"include_usage\":true},\"user\":\"u\",\"metadata\":{},\"store\":false}",
        "{\"prompt\":\"Hi\",\"max_tokens\":3,\"logprobs\":2,\"echo\":false,\"suffix\":null,\"best_of\":1,\"stop\":"
        "\"x\","
        "\"impress\":{\"retention\":0.25,\"system\":\"partial\",\"full_load\":false,\"cache\":\"off\",\"salt\":\"s\"}}",
        "{\"prompt\":[1,2,999],\"grammar\":\"root ::= \\\"a\\\"\"}",
        "{\"prompt\":[\"one\"],\"response_format\":{\"type\":\"json_object\"}}",
        "{\"messages\":[{\"role\":\"developer\",\"content\":\"x\"}],\"response_format\":{\"type\":\"json_schema\","
        "\"json_schema\":{\"name\":\"s\",\"strict\":true,\"schema\":{\"type\":\"object\"}}},\"chat_template_kwargs\":"
        "{\"enable_thinking\":false}}",
    };
    if (i >= sizeof bodies / sizeof bodies[0]) return 0;
    size_t n = strlen(bodies[i]);
    must(n <= room);
    memcpy(out, bodies[i], n);
    return n;
}
