/* chat_common.cpp: chats by llama.cpp's common library: Jinja templates, tool calls, JSON schemas. The one C++ file of
 * this tree, as that library has no C interface. Every function ends its exceptions here. */
#include "chat_mute.h"
#include "chat_ways.h"

#include <climits>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string>

#include <llama-common/chat.h>
#include <llama-common/json-schema-to-grammar.h>
#include <llama-common/log.h>

namespace {

/* Working out what a template does with an answer takes many times what rendering takes, and comes to the same for all
 * requests that want plain text. If that is "all is content" (see content_only()), it is found out once. */
struct templates {
    common_chat_templates_ptr ptr;
    mutable std::mutex lock; /* guards what follows */
    mutable bool known = false, plain = false;
    mutable common_chat_params plain_params;
};

/* The library's log would quote prompts and answers. */
void be_quiet()
{
    static std::once_flag once;
    std::call_once(once, [] { common_log_set_verbosity_thold(INT_MIN); });
}

char *copy(const std::string &s)
{
    char *out = static_cast<char *>(std::malloc(s.size() + 1));
    if (!out) throw std::bad_alloc();
    std::memcpy(out, s.c_str(), s.size() + 1);
    return out;
}

void add(chat_texts *t, const std::string &s)
{
    if (!chat_texts_add(t, s.c_str())) throw std::bad_alloc();
}

std::string text(const char *s)
{
    return s ? s : "";
}

/* The library prints what it can't keep of a schema, not by its log: see chat_mute.h. */
struct muted {
    muted() { chat_mute(); }
    ~muted() { chat_unmute(); }
    muted(const muted &) = delete;
    muted &operator=(const muted &) = delete;
};

/* Run `work`, and tell what it threw. `status` and `code` are those of its own complaints. */
template <typename F>
int guarded(oai_error *e, int status, const char *code, const char *param, const char *what, F work)
{
    const muted quiet;
    try {
        work();
        return 0;
    } catch (const std::bad_alloc &) {
        return oai_fail(e, 500, nullptr, nullptr, "the server is out of memory");
    } catch (const std::exception &x) {
        return oai_fail(e, status, code, param, "%s: %s", what, x.what());
    } catch (...) {
        return oai_fail(e, 500, nullptr, nullptr, "%s", what);
    }
}

int common_open(const struct llama_model *model, const char *source, void **out, oai_error *e)
{
    be_quiet();
    return guarded(e, 400, "unsupported_template", nullptr, "the chat template can't be used", [&] {
        auto t = std::make_unique<templates>();
        t->ptr = common_chat_templates_init(model, text(source));
        *out = t.release();
    });
}

void common_close(void *t)
{
    delete static_cast<templates *>(t);
}

bool can(const void *t, const char *what)
{
    try {
        const auto all = common_chat_templates_get_caps(static_cast<const templates *>(t)->ptr.get());
        const auto it = all.find(what);
        return it != all.end() && it->second;
    } catch (...) {
        return false;
    }
}

bool common_takes_tools(const void *t)
{
    return can(t, "supports_tools");
}

bool common_takes_calls(const void *t)
{
    return can(t, "supports_tool_calls");
}

common_chat_templates_inputs inputs_of(const oai_request *r)
{
    common_chat_templates_inputs in;
    for (size_t i = 0; i < r->n_messages; i++) {
        const oai_message &m = r->messages[i];
        common_chat_msg msg;
        msg.role = oai_role_names[m.role];
        msg.content = text(m.content);
        msg.reasoning_content = text(m.reasoning);
        msg.tool_name = text(m.name);
        msg.tool_call_id = text(m.tool_call_id);
        for (size_t j = 0; j < m.n_tool_calls; j++) {
            const oai_tool_call &c = m.tool_calls[j];
            msg.tool_calls.push_back({text(c.name), text(c.arguments), text(c.id)});
        }
        in.messages.push_back(std::move(msg));
    }
    if (r->tool_choice != OAI_TOOLS_NONE) {
        for (size_t i = 0; i < r->n_tools; i++)
            in.tools.push_back({r->tools[i].name, r->tools[i].description, r->tools[i].parameters});
    }
    in.tool_choice = r->tool_choice == OAI_TOOLS_REQUIRED ? COMMON_CHAT_TOOL_CHOICE_REQUIRED
                     : r->tool_choice == OAI_TOOLS_AUTO   ? COMMON_CHAT_TOOL_CHOICE_AUTO
                                                          : COMMON_CHAT_TOOL_CHOICE_NONE;
    in.parallel_tool_calls = r->parallel_tool_calls;
    in.reasoning_format = COMMON_REASONING_FORMAT_AUTO;
    if (r->format == OAI_JSON_SCHEMA) in.json_schema = r->schema;
    if (r->format == OAI_JSON_OBJECT) in.json_schema = "{\"type\":\"object\"}";
    if (r->format == OAI_GRAMMAR) in.grammar = r->grammar;
    for (size_t i = 0; i < r->n_kwargs; i++) {
        in.chat_template_kwargs[r->kwargs[i].name] = r->kwargs[i].value;
        if (std::strcmp(r->kwargs[i].name, "enable_thinking") == 0)
            in.enable_thinking = std::strcmp(r->kwargs[i].value, "false") != 0;
    }
    return in;
}

/* Whether a parser takes every text for content, so that nothing needs to be parsed. */
bool content_only(const oai_request *r, const common_chat_params &p, const common_chat_parser_params &parser)
{
    static const char *const probes[] = {"plain text", " <a> [B] {\"c\": 1}\n<|d|> ```e```\n\n"};
    if (r->tool_choice != OAI_TOOLS_NONE || r->format == OAI_JSON_SCHEMA || r->format == OAI_JSON_OBJECT) return false;
    if (p.supports_thinking || !p.thinking_start_tag.empty() || p.format != COMMON_CHAT_FORMAT_PEG_NATIVE) return false;
    for (const char *probe : probes) {
        try {
            const common_chat_msg m = common_chat_parse(probe, false, parser);
            if (m.content != probe || !m.reasoning_content.empty() || !m.tool_calls.empty()) return false;
        } catch (const std::exception &) {
            return false;
        }
    }
    return true;
}

common_chat_parser_params parser_of(const common_chat_params &p)
{
    common_chat_parser_params out(p);
    out.reasoning_format = COMMON_REASONING_FORMAT_AUTO;
    if (!p.parser.empty()) out.parser.load(p.parser);
    return out;
}

/* Whether a request is one of those that templates::plain_params is for. */
bool wants_text(const oai_request *r)
{
    if (r->tool_choice != OAI_TOOLS_NONE || r->n_kwargs > 0) return false;
    if (r->format != OAI_TEXT && r->format != OAI_GRAMMAR) return false;
    for (size_t i = 0; i < r->n_messages; i++) {
        if (r->messages[i].role == OAI_TOOL || r->messages[i].n_tool_calls > 0) return false;
    }
    return true;
}

/* *plain: all of the answer is content. Only set where that costs nothing to know. */
common_chat_params params_of(const templates *t, const oai_request *r, bool *plain)
{
    common_chat_templates_inputs in = inputs_of(r);
    if (!wants_text(r)) return common_chat_templates_apply(t->ptr.get(), in);
    in.grammar.clear();
    std::unique_lock<std::mutex> lock(t->lock);
    if (!t->known) {
        common_chat_params p = common_chat_templates_apply(t->ptr.get(), in);
        in.force_pure_content = true;
        t->plain = content_only(r, p, parser_of(p)) && common_chat_templates_apply(t->ptr.get(), in).prompt == p.prompt;
        t->plain_params = p;
        t->known = true;
        return p;
    }
    if (!t->plain) {
        lock.unlock();
        return common_chat_templates_apply(t->ptr.get(), in);
    }
    common_chat_params p = t->plain_params;
    lock.unlock();
    in.force_pure_content = true;
    const common_chat_params rendered = common_chat_templates_apply(t->ptr.get(), in);
    p.prompt = rendered.prompt;
    p.generation_prompt = rendered.generation_prompt;
    *plain = true;
    return p;
}

int common_render(const void *t, const oai_request *r, chat_rendering *out, oai_error *e)
{
    static const char what[] = "the chat template can't make a prompt of this request";
    return guarded(e, 400, "template_error", nullptr, what, [&] {
        const auto *own = static_cast<const templates *>(t);
        bool plain = false;
        const common_chat_params p = params_of(own, r, &plain);
        out->prompt = copy(p.prompt);
        /* A client's grammar begins with what is generated; one that the template gives begins with the prefill. */
        if (r->format == OAI_GRAMMAR) {
            out->grammar = copy(r->grammar);
        } else if (!p.grammar.empty()) {
            out->grammar = copy(p.grammar);
            out->lazy = p.grammar_lazy;
        }
        for (const auto &trigger : p.grammar_triggers) {
            if (trigger.type == COMMON_GRAMMAR_TRIGGER_TYPE_WORD) add(&out->words, trigger.value);
            else if (trigger.type == COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN) add(&out->patterns, trigger.value);
            else if (trigger.type == COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL)
                add(&out->patterns, "^(?:" + trigger.value + ")$");
            else throw std::runtime_error("a kind of trigger that isn't known");
        }
        if (r->tool_choice == OAI_TOOLS_REQUIRED && !p.supports_thinking) {
            /* The grammar lets any text come before the call; a small model then never gets there. The mark of a call
             * is that which would wake a lazy grammar. */
            common_chat_templates_inputs in = inputs_of(r);
            in.tool_choice = COMMON_CHAT_TOOL_CHOICE_AUTO;
            const common_chat_params lazy = common_chat_templates_apply(own->ptr.get(), in);
            if (!lazy.grammar_triggers.empty() && lazy.grammar_triggers[0].type == COMMON_GRAMMAR_TRIGGER_TYPE_WORD)
                out->begin = copy(lazy.grammar_triggers[0].value);
        }
        if (!p.generation_prompt.empty()) out->prefill = copy(p.generation_prompt);
        for (const auto &s : p.preserved_tokens) add(&out->preserved, s);
        for (const auto &s : p.additional_stops) {
            if (!s.empty()) add(&out->stops, s);
        }
        if (!p.thinking_start_tag.empty() && !p.thinking_end_tags.empty()) {
            out->think_start = copy(p.thinking_start_tag);
            for (const auto &s : p.thinking_end_tags) add(&out->think_ends, s);
        }
        if (plain) return;
        auto parser = std::make_unique<common_chat_parser_params>(parser_of(p));
        if (!content_only(r, p, *parser)) out->parser = parser.release();
    });
}

void common_parser_free(void *parser)
{
    delete static_cast<common_chat_parser_params *>(parser);
}

int common_parse(const void *parser, const char *answer, bool partial, chat_parsed *out)
{
    try {
        const common_chat_msg m =
            common_chat_parse(answer, partial, *static_cast<const common_chat_parser_params *>(parser));
        out->content = copy(m.render_content());
        out->reasoning = copy(m.reasoning_content);
        if (!m.tool_calls.empty()) {
            out->calls = static_cast<chat_call *>(std::calloc(m.tool_calls.size(), sizeof *out->calls));
            if (!out->calls) throw std::bad_alloc();
        }
        for (const auto &c : m.tool_calls) {
            chat_call *to = &out->calls[out->n_calls++];
            to->id = copy(c.id);
            to->name = copy(c.name);
            to->arguments = copy(c.arguments);
        }
        return 0;
    } catch (...) {
        return -1;
    }
}

char *common_grammar_of(const char *schema, oai_error *e)
{
    char *out = nullptr;
    guarded(e, 400, "invalid_schema", "response_format", "the JSON schema can't be made into a grammar",
            [&] { out = copy(json_schema_to_grammar(common_json::parse(schema))); });
    return out;
}

bool common_accept(struct llama_sampler *s, llama_token token)
{
    try {
        llama_sampler_accept(s, token);
        return true;
    } catch (...) {
        return false;
    }
}

} // namespace

extern "C" const chat_way chat_way_common;
const chat_way chat_way_common = {
    true,          true,
    common_takes_tools, common_takes_calls,
    common_open,
    common_close,  common_render,
    common_parser_free, common_parse,
    common_grammar_of,  common_accept,
};
