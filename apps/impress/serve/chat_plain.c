/* chat_plain.c: chats by llama.cpp's C API alone. It recognises widespread templates by their look and has no Jinja,
 * tools or schemas. */
#include <stdlib.h>
#include <string.h>

#include "chat_ways.h"

const char chat_json_grammar[] =
    "root   ::= object\n"
    "value  ::= object | array | string | number | \"true\" | \"false\" | \"null\"\n"
    "object ::= \"{\" ws ( member ( \",\" ws member )* )? \"}\"\n"
    "member ::= string \":\" ws value ws\n"
    "array  ::= \"[\" ws ( value ws ( \",\" ws value ws )* )? \"]\"\n"
    "string ::= \"\\\"\" character* \"\\\"\"\n"
    "character ::= [^\"\\\\\\x7F\\x00-\\x1F] | \"\\\\\" ( [\"\\\\/bfnrt] | \"u\" [0-9a-fA-F]{4} )\n"
    "number ::= \"-\"? ( \"0\" | [1-9] [0-9]{0,20} ) ( \".\" [0-9]{1,20} )? ( [eE] [-+]? [0-9]{1,3} )?\n"
    "ws     ::= ( \" \" | \"\\n\" [ \\t]{0,20} )?\n";

static int plain_open(const struct llama_model *model, const char *source, void **out, oai_error *e)
{
    const char *text = source ? source : llama_model_chat_template(model, NULL);
    if (!text) text = "chatml";
    struct llama_chat_message message = {.role = "user", .content = "text"};
    if (llama_chat_apply_template(text, &message, 1, true, NULL, 0) <= 0)
        return oai_fail(e, 400, "unsupported_template", NULL,
                        "the chat template isn't one that llama.cpp recognises by its look, and this program was built "
                        "without llama.cpp's common library, which could run it");
    *out = strdup(text);
    return *out ? 0 : oai_fail(e, 500, NULL, NULL, "out of memory");
}

static int refuse(oai_error *e, const char *param, const char *what)
{
    return oai_fail(e, 400, "unsupported_value", param,
                    "%s can't be done: this program was built without llama.cpp's common library", what);
}

static int plain_render(const void *templates, const oai_request *r, chat_rendering *out, oai_error *e)
{
    if (r->tool_choice != OAI_TOOLS_NONE) return refuse(e, "tools", "tool calls");
    if (r->format == OAI_JSON_SCHEMA) return refuse(e, "response_format", "an answer by a JSON schema");
    if (r->n_kwargs > 0) return refuse(e, "chat_template_kwargs", "`chat_template_kwargs`");

    int rc = -1;
    struct llama_chat_message *messages = calloc(r->n_messages, sizeof *messages);
    if (!messages) goto no_memory;
    for (size_t i = 0; i < r->n_messages; i++) {
        const oai_message *m = &r->messages[i];
        if (m->role == OAI_TOOL || m->n_tool_calls > 0) {
            refuse(e, "messages", "messages with tool calls or their results");
            goto out;
        }
        if (m->name || m->reasoning) {
            refuse(e, "messages", "messages with a name or with reasoning");
            goto out;
        }
        messages[i].role = oai_role_names[m->role];
        messages[i].content = m->content ? m->content : "";
    }
    int32_t n = llama_chat_apply_template(templates, messages, r->n_messages, true, NULL, 0);
    if (n < 0) {
        oai_fail(e, 500, NULL, NULL, "the chat template can't be applied");
        goto out;
    }
    out->prompt = calloc((size_t)n + 1, 1);
    if (!out->prompt) goto no_memory;
    if (llama_chat_apply_template(templates, messages, r->n_messages, true, out->prompt, n + 1) != n) {
        oai_fail(e, 500, NULL, NULL, "the chat template can't be applied");
        goto out;
    }
    const char *grammar = r->format == OAI_GRAMMAR ? r->grammar : NULL;
    if (r->format == OAI_JSON_OBJECT) grammar = chat_json_grammar;
    if (grammar && !(out->grammar = strdup(grammar))) goto no_memory;
    rc = 0;
    goto out;
no_memory:
    oai_fail(e, 500, NULL, NULL, "the server is out of memory");
out:
    free(messages);
    return rc;
}

static void plain_parser_free(void *parser)
{
    free(parser); /* there is none */
}

static int plain_parse(const void *parser, const char *text, bool partial, chat_parsed *out)
{
    (void)parser, (void)partial;
    out->content = strdup(text);
    out->reasoning = strdup("");
    return out->content && out->reasoning ? 0 : -1;
}

static char *plain_grammar_of(const char *schema, oai_error *e)
{
    (void)schema;
    refuse(e, "response_format", "an answer by a JSON schema");
    return NULL;
}

static bool plain_accept(struct llama_sampler *s, llama_token token)
{
    llama_sampler_accept(s, token);
    return true;
}

const chat_way chat_way_plain = {
    .open = plain_open,
    .close = free,
    .render = plain_render,
    .parser_free = plain_parser_free,
    .parse = plain_parse,
    .grammar_of = plain_grammar_of,
    .accept = plain_accept,
};
