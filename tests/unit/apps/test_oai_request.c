/* Bodies of requests: what is taken, and what is said about the others. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "serve/oai_request.h"

static oai_limits limits;

static void good(bool chat, const char *body, oai_request *r)
{
    oai_error e;
    if (oai_request_parse(chat, body, strlen(body), &limits, r, &e) != 0) fail_msg("%s: %s", body, e.message);
    assert_int_equal(e.status, 0);
    assert_int_equal(r->chat, chat);
}

static void bad(bool chat, const char *body, size_t n, int status, const char *param, const char *part)
{
    oai_request r;
    oai_error e;
    memset(&r, 0xee, sizeof r);
    if (oai_request_parse(chat, body, n, &limits, &r, &e) != -1) fail_msg("taken: %s", body);
    if (e.status != status || (param && strcmp(e.param, param) != 0) || (part && !strstr(e.message, part)))
        fail_msg("%s: %d, `%s`: %s", body, e.status, e.param, e.message);
    assert_string_equal(e.type, "invalid_request_error");
    const oai_request empty = {0};
    assert_memory_equal(&r, &empty, sizeof r);
    oai_request_free(&r);
}

#define MESSAGES "\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]"
#define CHAT(more) "{" MESSAGES more "}"
#define COMPLETION(more) "{\"prompt\":\"Hi\"" more "}"

static void test_defaults(void **unused)
{
    (void)unused;
    oai_request r;
    for (int chat = 0; chat < 2; chat++) {
        good(chat, chat ? CHAT("") : COMPLETION(""), &r);
        assert_null(r.model);
        assert_int_equal(r.max_tokens, -1);
        assert_true(r.sampling.temperature == 1 && r.sampling.top_p == 1 && r.sampling.repeat_penalty == 1);
        assert_true(r.sampling.min_p == 0 && r.sampling.presence_penalty == 0 && r.sampling.frequency_penalty == 0);
        assert_int_equal(r.sampling.top_k, 0);
        assert_false(r.sampling.has_seed);
        assert_int_equal(r.n_logprobs, -1);
        assert_int_equal(r.n_stops, 0);
        assert_false(r.stream || r.include_usage);
        assert_int_equal(r.format, OAI_TEXT);
        assert_int_equal(r.tool_choice, OAI_TOOLS_NONE);
        assert_true(r.impress.retention == 0 && !r.impress.system && !r.impress.full_load && !r.impress.cache_off);
        oai_request_free(&r);
    }
    limits.sampling.temperature = 0.5;
    limits.sampling.top_k = 40;
    good(true, CHAT(",\"top_k\":null"), &r);
    assert_true(r.sampling.temperature == 0.5);
    assert_int_equal(r.sampling.top_k, 40);
    oai_request_free(&r);
    limits = oai_limits_default();
}

static void test_all_fields(void **unused)
{
    (void)unused;
    oai_request r;
    good(
        true,
        CHAT(
            ",\"model\":\"m\",\"max_completion_tokens\":5,\"temperature\":0.25,\"top_p\":0.5,\"top_k\":7,\"min_p\":0.1,"
            "\"seed\":-3,\"stop\":[\"a\",\"b\"],\"presence_penalty\":-1,\"frequency_penalty\":2,\"repeat_penalty\":1.5,"
            "\"logit_bias\":{\"0\":-100,\"7\":1.5},\"logprobs\":true,\"top_logprobs\":20,\"n\":1,\"stream\":true,"
            "\"stream_options\":{\"include_usage\":true,\"include_obfuscation\":false},\"user\":\"u\",\"impress\":{"
            "\"retention\":0.25,\"system\":\"partial\",\"full_load\":false,\"cache\":\"off\",\"salt\":\"s\"},"
            "\"chat_template_kwargs\":{\"enable_thinking\":false,\"x\":[1,\"y\"]}"),
        &r);
    assert_string_equal(r.model, "m");
    assert_string_equal(r.user, "u");
    assert_int_equal(r.n_messages, 1);
    assert_int_equal(r.messages[0].role, OAI_USER);
    assert_string_equal(r.messages[0].content, "Hi");
    assert_int_equal(r.max_tokens, 5);
    assert_true(r.sampling.temperature == 0.25 && r.sampling.top_p == 0.5 && r.sampling.min_p == 0.1);
    assert_true(r.sampling.presence_penalty == -1 && r.sampling.frequency_penalty == 2 &&
                r.sampling.repeat_penalty == 1.5);
    assert_int_equal(r.sampling.top_k, 7);
    assert_true(r.sampling.has_seed);
    assert_int_equal(r.sampling.n_bias, 2);
    assert_int_equal(r.sampling.bias[1].token, 7);
    assert_true(r.sampling.bias[0].bias == -100 && r.sampling.bias[1].bias == 1.5f);
    assert_int_equal(r.n_stops, 2);
    assert_string_equal(r.stops[1], "b");
    assert_int_equal(r.n_logprobs, 20);
    assert_true(r.stream && r.include_usage);
    assert_true(r.impress.retention == 0.25 && r.impress.cache_off && !r.impress.full_load);
    assert_string_equal(r.impress.system, "partial");
    assert_string_equal(r.impress.salt, "s");
    assert_int_equal(r.n_kwargs, 2);
    assert_string_equal(r.kwargs[0].name, "enable_thinking");
    assert_string_equal(r.kwargs[0].value, "false");
    assert_string_equal(r.kwargs[1].value, "[1,\"y\"]");
    oai_request_free(&r);

    good(false,
         COMPLETION(",\"logprobs\":0,\"stop\":\"x\",\"max_tokens\":1.0,\"echo\":false,\"suffix\":\"\",\"best_of\":1,"
                    "\"temperature\":0,\"top_k\":-1,\"seed\":9007199254740993"),
         &r);
    assert_string_equal(r.prompt, "Hi");
    assert_int_equal(r.n_logprobs, 0);
    assert_int_equal(r.n_stops, 1);
    assert_int_equal(r.max_tokens, 1);
    assert_int_equal(r.sampling.top_k, 0);
    oai_request_free(&r);

    good(false, "{\"prompt\":[\"Hi\"]}", &r);
    assert_string_equal(r.prompt, "Hi");
    oai_request_free(&r);
    for (int nested = 0; nested < 2; nested++) {
        good(false, nested ? "{\"prompt\":[[0,5,2]]}" : "{\"prompt\":[0,5,2]}", &r);
        assert_null(r.prompt);
        assert_int_equal(r.n_prompt_tokens, 3);
        assert_int_equal(r.prompt_tokens[1], 5);
        oai_request_free(&r);
    }

    /* One seed, one number; never llama.cpp's mark for a random one. */
    uint32_t seeds[2];
    for (int i = 0; i < 2; i++) {
        good(true, CHAT(",\"seed\":123456789012"), &r);
        seeds[i] = r.sampling.seed;
        oai_request_free(&r);
    }
    assert_int_equal(seeds[0], seeds[1]);
    good(true, CHAT(",\"seed\":4294967295"), &r);
    assert_int_not_equal(r.sampling.seed, UINT32_MAX);
    oai_request_free(&r);
}

/* What clients send along that doesn't concern the answer, and null wherever nothing is meant. */
static void test_harmless(void **unused)
{
    (void)unused;
    oai_request r;
    good(true,
         CHAT(",\"metadata\":{\"a\":\"b\"},\"store\":true,\"service_tier\":\"auto\",\"safety_identifier\":\"x\","
              "\"prompt_cache_key\":\"k\",\"modalities\":[\"text\"],\"audio\":null,\"functions\":[],\"function_call\":"
              "\"none\",\"reasoning_effort\":null,\"verbosity\":\"medium\",\"tools\":[],\"tool_choice\":\"auto\","
              "\"logit_bias\":{},\"stop\":[],\"response_format\":{\"type\":\"text\"},\"grammar\":\"\""),
         &r);
    assert_int_equal(r.tool_choice, OAI_TOOLS_NONE);
    assert_int_equal(r.format, OAI_TEXT);
    oai_request_free(&r);
    static const char *const alone[] = {
        CHAT(",\"metadata\":{\"a\":\"b\"}"), CHAT(",\"store\":true"), CHAT(",\"service_tier\":\"default\""),
        CHAT(",\"safety_identifier\":\"x\""), CHAT(",\"prompt_cache_key\":\"k\""),
        CHAT(",\"prompt_cache_retention\":\"24h\""),
    };
    for (size_t i = 0; i < sizeof alone / sizeof alone[0]; i++) {
        good(true, alone[i], &r);
        oai_request_free(&r);
    }
    good(true,
         CHAT(",\"model\":null,\"max_tokens\":null,\"max_completion_tokens\":null,\"temperature\":null,\"top_p\":null,"
              "\"top_k\":null,\"min_p\":null,\"seed\":null,\"stop\":null,\"presence_penalty\":null,\"frequency_"
              "penalty\":null,"
              "\"repeat_penalty\":null,\"logit_bias\":null,\"logprobs\":null,\"top_logprobs\":null,\"n\":null,"
              "\"stream\":null,\"stream_options\":null,\"user\":null,\"response_format\":null,\"grammar\":null,"
              "\"tools\":null,\"tool_choice\":null,\"parallel_tool_calls\":null,\"chat_template_kwargs\":null,"
              "\"impress\":null"),
         &r);
    oai_request_free(&r);
    good(true,
         "{\"messages\":[{\"role\":\"assistant\",\"content\":\"x\",\"refusal\":null,\"audio\":null,\"function_call\":"
         "null,"
         "\"tool_calls\":null,\"annotations\":[]},{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"y\","
         "\"cache_control\":{\"type\":\"ephemeral\"}}]}]}",
         &r);
    assert_string_equal(r.messages[1].content, "y");
    oai_request_free(&r);
}

static void test_messages(void **unused)
{
    (void)unused;
    oai_request r;
    good(
        true,
        "{\"messages\":[{\"role\":\"developer\",\"content\":\"S\"},{\"role\":\"system\",\"content\":\"T\"},"
        "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"text\",\"text\":\"\"},"
        "{\"type\":\"text\",\"text\":\"b\"}],\"name\":\"Ann\"},"
        "{\"role\":\"assistant\",\"content\":null,\"reasoning_content\":\"hm\",\"tool_calls\":[{\"id\":\"c1\",\"type\":"
        "\"function\",\"index\":0,\"function\":{\"name\":\"f\",\"arguments\":\"{\\\"x\\\": "
        "1}\"}},{\"id\":\"c2\",\"type\":"
        "\"function\",\"function\":{\"name\":\"g\",\"arguments\":\"\"}}]},"
        "{\"role\":\"tool\",\"tool_call_id\":\"c1\",\"content\":\"R\"},{\"role\":\"assistant\",\"content\":\"\"}]}",
        &r);
    assert_int_equal(r.n_messages, 6);
    assert_int_equal(r.messages[0].role, OAI_SYSTEM);
    assert_string_equal(r.messages[2].content, "a\n\nb");
    assert_string_equal(r.messages[2].name, "Ann");
    assert_null(r.messages[3].content);
    assert_string_equal(r.messages[3].reasoning, "hm");
    assert_int_equal(r.messages[3].n_tool_calls, 2);
    assert_string_equal(r.messages[3].tool_calls[0].arguments, "{\"x\": 1}");
    assert_string_equal(r.messages[3].tool_calls[1].arguments, "{}");
    assert_string_equal(r.messages[3].tool_calls[1].name, "g");
    assert_string_equal(r.messages[4].tool_call_id, "c1");
    oai_request_free(&r);
}

#define TOOL(name) "{\"type\":\"function\",\"function\":{\"name\":\"" name "\"}}"

static void test_tools_and_formats(void **unused)
{
    (void)unused;
    oai_request r;
    good(true,
         CHAT(",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"description\":\"D\",\"strict\":true,"
              "\"parameters\":{\"type\":\"object\",\"properties\":{\"z\":{},\"a\":{}}}}}," TOOL("g") "]"),
         &r);
    assert_int_equal(r.n_tools, 2);
    assert_int_equal(r.tool_choice, OAI_TOOLS_AUTO);
    assert_true(r.parallel_tool_calls);
    assert_string_equal(r.tools[0].description, "D");
    assert_string_equal(r.tools[0].parameters, "{\"type\":\"object\",\"properties\":{\"z\":{},\"a\":{}}}");
    assert_string_equal(r.tools[1].description, "");
    assert_string_equal(r.tools[1].parameters, "{\"type\":\"object\",\"properties\":{}}");
    oai_request_free(&r);
    good(true,
         CHAT(",\"tools\":[" TOOL("f") "," TOOL("g") "],\"tool_choice\":{\"type\":\"function\",\"function\":{"
                                                     "\"name\":\"g\"}},\"parallel_tool_calls\":false"),
         &r);
    assert_int_equal(r.n_tools, 1);
    assert_string_equal(r.tools[0].name, "g");
    assert_int_equal(r.tool_choice, OAI_TOOLS_REQUIRED);
    assert_false(r.parallel_tool_calls);
    oai_request_free(&r);
    good(true, CHAT(",\"tools\":[" TOOL("f") "],\"tool_choice\":\"required\""), &r);
    assert_int_equal(r.tool_choice, OAI_TOOLS_REQUIRED);
    oai_request_free(&r);
    good(true, CHAT(",\"tools\":[" TOOL("f") "],\"tool_choice\":\"none\",\"grammar\":\"root ::= \\\"a\\\"\""), &r);
    assert_int_equal(r.tool_choice, OAI_TOOLS_NONE);
    assert_int_equal(r.format, OAI_GRAMMAR);
    assert_string_equal(r.grammar, "root ::= \"a\"");
    oai_request_free(&r);
    good(true, CHAT(",\"response_format\":{\"type\":\"json_object\"}"), &r);
    assert_int_equal(r.format, OAI_JSON_OBJECT);
    oai_request_free(&r);
    static const char *const schemas[] = {
        CHAT(",\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"s\",\"strict\":true,"
             "\"description\":\"d\",\"schema\":{\"b\":1,\"a\":2}}}"),
        CHAT(",\"response_format\":{\"type\":\"json_object\",\"schema\":{\"b\":1,\"a\":2}}"),
    };
    for (size_t i = 0; i < 2; i++) {
        good(true, schemas[i], &r);
        assert_int_equal(r.format, OAI_JSON_SCHEMA);
        assert_string_equal(r.schema, "{\"b\":1,\"a\":2}");
        oai_request_free(&r);
    }
    good(true, CHAT(",\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"s\"}}"), &r);
    assert_int_equal(r.format, OAI_JSON_OBJECT);
    oai_request_free(&r);
}

static const struct {
    const char *body, *param, *part;
} bad_chats[] = {
    {"{}", "messages", "missing"},
    {"{\"messages\":null}", "messages", "missing"},
    {"{\"messages\":[]}", "messages", "empty"},
    {"{\"messages\":{}}", "messages", "list"},
    {"{\"messages\":[3]}", "messages[0]", "object"},
    {"{\"messages\":[{\"content\":\"a\"}]}", "messages[0].role", "missing"},
    {"{\"messages\":[{\"role\":\"function\",\"content\":\"a\"}]}", "messages[0].role", "function"},
    {"{\"messages\":[{\"role\":7,\"content\":\"a\"}]}", "messages[0].role", "string"},
    {"{\"messages\":[{\"role\":\"user\"}]}", "messages[0].content", "missing"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":null}]}", "messages[0].content", "missing"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":5}]}", "messages[0].content", "string"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":[]}]}", "messages[0].content", "parts"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":[\"a\"]}]}", "messages[0].content[0]", "object"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":{}}]}]}",
     "messages[0].content[0]", "image_url"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]}", "messages[0].content[0].text", "string"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":\"a\",\"prefix\":true}]}", "messages[0].prefix", "unknown"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":\"a\",\"tool_calls\":[{}]}]}", "messages[0].tool_calls",
     "assistant"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":\"a\",\"tool_call_id\":\"x\"}]}", "messages[0].tool_call_id",
     "tool"},
    {"{\"messages\":[{\"role\":\"tool\",\"content\":\"a\"}]}", "messages[0].tool_call_id", "missing"},
    {"{\"messages\":[{\"role\":\"assistant\",\"content\":null}]}", "messages[0].content", "missing"},
    {"{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\",\"audio\":{\"id\":\"x\"}}]}", "messages[0].audio",
     "supported"},
    {"{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"1\",\"type\":\"custom\"}]}]}",
     "messages[0].tool_calls[0].type", "function"},
    {"{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"1\",\"function\":{\"name\":\"f\"}}]}]}",
     "messages[0].tool_calls[0].function.arguments", "missing"},
    {"{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":\"{\"}}]}]}",
     "messages[0].tool_calls[0].function.arguments", "JSON object"},
    {"{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":\"[]\"}}]}]}",
     "messages[0].tool_calls[0].function.arguments", "JSON object"},
    {CHAT(",\"prompt\":\"x\""), "prompt", "messages"},
    {CHAT(",\"foo\":1"), "foo", "unknown field"},
    {CHAT(",\"foo\":null"), "foo", "unknown field"},
    {CHAT(",\"repetition_penalty\":1.1"), "repetition_penalty", "repeat_penalty"},
    {CHAT(",\"cache_prompt\":true"), "cache_prompt", "impress.cache"},
    {CHAT(",\"model\":3"), "model", "string"},
    {CHAT(",\"store\":5"), "store", "true or false"},
    {CHAT(",\"metadata\":[]"), "metadata", "object"},
    {CHAT(",\"metadata\":{\"a\":1}"), "metadata", "strings"},
    {CHAT(",\"service_tier\":[1]"), "service_tier", "string"},
    {CHAT(",\"service_tier\":\"priority\""), "service_tier", "auto or default"},
    {CHAT(",\"safety_identifier\":1"), "safety_identifier", "string"},
    {CHAT(",\"prompt_cache_key\":{}"), "prompt_cache_key", "string"},
    {CHAT(",\"prompt_cache_retention\":24"), "prompt_cache_retention", "string"},
    {CHAT(",\"stream\":true,\"stream_options\":{\"include_obfuscation\":true}"),
     "stream_options.include_obfuscation", "supported"},
    {CHAT(",\"max_tokens\":0"), "max_tokens", "1 or more|from 1"},
    {CHAT(",\"max_tokens\":-1"), "max_tokens", NULL},
    {CHAT(",\"max_tokens\":1.5"), "max_tokens", "integer"},
    {CHAT(",\"max_tokens\":\"5\""), "max_tokens", "integer"},
    {CHAT(",\"max_tokens\":1e300"), "max_tokens", "integer"},
    {CHAT(",\"max_tokens\":4,\"max_completion_tokens\":5"), "max_tokens", "differ"},
    {CHAT(",\"temperature\":2.1"), "temperature", "from 0 to 2"},
    {CHAT(",\"temperature\":\"hot\""), "temperature", "number"},
    {CHAT(",\"temperature\":true"), "temperature", "number"},
    {CHAT(",\"top_p\":-0.1"), "top_p", NULL},
    {CHAT(",\"min_p\":1.1"), "min_p", NULL},
    {CHAT(",\"top_k\":-2"), "top_k", NULL},
    {CHAT(",\"seed\":\"x\""), "seed", "integer"},
    {CHAT(",\"seed\":1.5"), "seed", "integer"},
    {CHAT(",\"presence_penalty\":3"), "presence_penalty", NULL},
    {CHAT(",\"frequency_penalty\":-2.5"), "frequency_penalty", NULL},
    {CHAT(",\"repeat_penalty\":0"), "repeat_penalty", NULL},
    {CHAT(",\"stop\":\"\""), "stop", "empty"},
    {CHAT(",\"stop\":[1]"), "stop", "string"},
    {CHAT(",\"stop\":{}"), "stop", "string"},
    {CHAT(",\"stop\":[\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\","
          "\"1\"]"),
     "stop", "16"},
    {CHAT(",\"logit_bias\":[1]"), "logit_bias", "object"},
    {CHAT(",\"logit_bias\":{\"x\":1}"), "logit_bias.x", "token"},
    {CHAT(",\"logit_bias\":{\"-1\":1}"), "logit_bias.-1", "token"},
    {CHAT(",\"logit_bias\":{\"07\":1}"), "logit_bias.07", "token"},
    {CHAT(",\"logit_bias\":{\"\":1}"), "logit_bias.", "token"},
    {CHAT(",\"logit_bias\":{\"1000\":1}"), "logit_bias.1000", "token"},
    {CHAT(",\"logit_bias\":{\"99999999999999999999\":1}"), NULL, "token"},
    {CHAT(",\"logit_bias\":{\"5\":101}"), "logit_bias.5", "100"},
    {CHAT(",\"logit_bias\":{\"5\":null}"), "logit_bias.5", "number"},
    {CHAT(",\"logprobs\":5"), "logprobs", "true or false"},
    {CHAT(",\"top_logprobs\":5"), "top_logprobs", "logprobs"},
    {CHAT(",\"logprobs\":true,\"top_logprobs\":21"), "top_logprobs", "20"},
    {CHAT(",\"n\":2"), "n", "1"},
    {CHAT(",\"n\":0"), "n", NULL},
    {CHAT(",\"stream\":1"), "stream", "true or false"},
    {CHAT(",\"stream_options\":{\"include_usage\":true}"), "stream_options", "stream"},
    {CHAT(",\"stream\":true,\"stream_options\":[]"), "stream_options", "object"},
    {CHAT(",\"stream\":true,\"stream_options\":{\"x\":1}"), "stream_options.x", "unknown"},
    {CHAT(",\"stream\":true,\"stream_options\":{\"include_usage\":1}"), "stream_options.include_usage",
     "true or false"},
    {CHAT(",\"response_format\":\"json\""), "response_format", "object"},
    {CHAT(",\"response_format\":{}"), "response_format.type", "missing"},
    {CHAT(",\"response_format\":{\"type\":\"xml\"}"), "response_format.type", "json_schema"},
    {CHAT(",\"response_format\":{\"type\":\"json_schema\"}"), "response_format.json_schema", "missing"},
    {CHAT(",\"response_format\":{\"type\":\"text\",\"json_schema\":{}}"), "response_format.json_schema", "needs"},
    {CHAT(",\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"schema\":[]}}"),
     "response_format.json_schema.schema", "object"},
    {CHAT(",\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"a b\"}}"),
     "response_format.json_schema.name", "letters"},
    {CHAT(",\"grammar\":5"), "grammar", "string"},
    {CHAT(",\"grammar\":\"x\",\"response_format\":{\"type\":\"json_object\"}"), "grammar", "together"},
    {CHAT(",\"grammar\":\"x\",\"tools\":[" TOOL("f") "]"), "grammar", "tools"},
    {CHAT(",\"tools\":{}"), "tools", "list"},
    {CHAT(",\"tools\":[1]"), "tools[0]", "object"},
    {CHAT(",\"tools\":[{\"type\":\"custom\"}]"), "tools[0].type", "function"},
    {CHAT(",\"tools\":[{\"type\":\"function\"}]"), "tools[0].function", "object"},
    {CHAT(",\"tools\":[{\"type\":\"function\",\"function\":{}}]"), "tools[0].function.name", "missing"},
    {CHAT(",\"tools\":[" TOOL("a b") "]"), "tools[0].function.name", "letters"},
    {CHAT(",\"tools\":[" TOOL("") "]"), "tools[0].function.name", "letters"},
    {CHAT(",\"tools\":[" TOOL("f") "," TOOL("f") "]"), "tools[1].function.name", "two tools"},
    {CHAT(",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":[]}}]"),
     "tools[0].function.parameters", "object"},
    {CHAT(",\"tool_choice\":\"required\""), "tool_choice", "tools"},
    {CHAT(",\"tool_choice\":\"sometimes\""), "tool_choice", "none, auto"},
    {CHAT(",\"tools\":[" TOOL("f") "],\"tool_choice\":5"), "tool_choice", "string or an object"},
    {CHAT(",\"tools\":[" TOOL("f") "],\"tool_choice\":{\"type\":\"allowed_tools\"}"), "tool_choice.type", "function"},
    {CHAT(",\"tools\":[" TOOL("f") "],\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"g\"}}"),
     "tool_choice", "g"},
    {CHAT(",\"functions\":[{\"name\":\"f\"}]"), "functions", "tools"},
    {CHAT(",\"function_call\":\"auto\""), "function_call", "tool_choice"},
    {CHAT(",\"modalities\":[\"audio\"]"), "modalities", "supported"},
    {CHAT(",\"audio\":{}"), "audio", "supported"},
    {CHAT(",\"reasoning_effort\":\"low\""), "reasoning_effort", "chat_template_kwargs"},
    {CHAT(",\"web_search_options\":{}"), "web_search_options", "supported"},
    {CHAT(",\"prediction\":{\"type\":\"content\"}"), "prediction", "supported"},
    {CHAT(",\"echo\":false"), "echo", "unknown"},
    {CHAT(",\"chat_template_kwargs\":[]"), "chat_template_kwargs", "object"},
    {CHAT(",\"chat_template_kwargs\":{\"messages\":[]}"), "chat_template_kwargs.messages", "set"},
    {CHAT(",\"impress\":3"), "impress", "object"},
    {CHAT(",\"impress\":{\"retain\":1}"), "impress.retain", "unknown"},
    {CHAT(",\"impress\":{\"retention\":0}"), "impress.retention", "above 0"},
    {CHAT(",\"impress\":{\"retention\":1.5}"), "impress.retention", "1"},
    {CHAT(",\"impress\":{\"retention\":true}"), "impress.retention", "number"},
    {CHAT(",\"impress\":{\"full_load\":true,\"retention\":\"auto\"}"), "impress.full_load", "contradict"},
    {CHAT(",\"impress\":{\"cache\":\"maybe\"}"), "impress.cache", "off"},
    {CHAT(",\"impress\":{\"cache\":false}"), "impress.cache", "string"},
    {CHAT(",\"impress\":{\"full_load\":true,\"retention\":0.5}"), "impress.full_load", "contradict"},
    {CHAT(",\"impress\":{\"system\":7}"), "impress.system", "string"},
    {CHAT(",\"user\":7"), "user", "string"},
    {CHAT(",\"n\":1,\"n\":1"), "", "twice"},
};

static const struct {
    const char *body, *param, *part;
} bad_completions[] = {
    {"{}", "prompt", "missing"},
    {"{\"prompt\":\"\"}", "prompt", "empty"},
    {"{\"prompt\":[]}", "prompt", "string"},
    {"{\"prompt\":[[]]}", "prompt", "string"},
    {"{\"prompt\":7}", "prompt", "string"},
    {"{\"prompt\":[\"a\",\"b\"]}", "prompt", "one"},
    {"{\"prompt\":[[1],[2]]}", "prompt", "one"},
    {"{\"prompt\":[1,\"a\"]}", "prompt[1]", "integer"},
    {"{\"prompt\":[1,null]}", "prompt[1]", "token"},
    {"{\"prompt\":[1,-1]}", "prompt[1]", NULL},
    {"{\"prompt\":[1000]}", "prompt[0]", "999"},
    {"{\"prompt\":[1.5]}", "prompt[0]", "integer"},
    {COMPLETION(",\"messages\":[]"), "messages", "prompt"},
    {COMPLETION(",\"logprobs\":6"), "logprobs", "5"},
    {COMPLETION(",\"logprobs\":true"), "logprobs", "integer"},
    {COMPLETION(",\"echo\":true"), "echo", "supported"},
    {COMPLETION(",\"echo\":1"), "echo", "true or false"},
    {COMPLETION(",\"suffix\":\"x\""), "suffix", "supported"},
    {COMPLETION(",\"best_of\":2"), "best_of", "1"},
    {COMPLETION(",\"tools\":[]"), "tools", "unknown"},
    {COMPLETION(",\"max_completion_tokens\":1"), "max_completion_tokens", "max_tokens"},
};

static void test_refused(void **unused)
{
    (void)unused;
    limits.n_vocab = 1000;
    for (size_t i = 0; i < sizeof bad_chats / sizeof bad_chats[0]; i++) {
        const char *part = bad_chats[i].part;
        if (part && strchr(part, '|')) part = NULL;
        bad(true, bad_chats[i].body, strlen(bad_chats[i].body), 400, bad_chats[i].param, part);
    }
    for (size_t i = 0; i < sizeof bad_completions / sizeof bad_completions[0]; i++)
        bad(false, bad_completions[i].body, strlen(bad_completions[i].body), 400, bad_completions[i].param,
            bad_completions[i].part);
    limits = oai_limits_default();
}

static void test_not_json(void **unused)
{
    (void)unused;
    static const struct {
        const char *body, *part;
    } cases[] = {
        {"", "empty"},
        {"nonsense", "mistake"},
        {"[]", "object"},
        {"\"a\"", "mistake"},
        {CHAT("") "x", "follows"},
        {"{\"messages\":[{\"role\":\"user\"", "too soon"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"a\xff\"}]}", "UTF-8"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"\xed\xa0\x80\"}]}", "UTF-8"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"a\\u0000b\"}]}", "NUL"},
        {CHAT(",\"seed\":99999999999999999999"), "too large"},
        {CHAT(",\"temperature\":1e999"), "too large"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        bad(true, cases[i].body, strlen(cases[i].body), 400, "", cases[i].part);
        bad(false, cases[i].body, strlen(cases[i].body), 400, "", cases[i].part);
    }
    bad(true, "{\0}", 3, 400, "", NULL);
    /* No part of the body comes back: it could be logged. */
    oai_request r;
    oai_error e;
    const char secret[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"secret\"}] secret";
    assert_int_equal(oai_request_parse(true, secret, strlen(secret), &limits, &r, &e), -1);
    assert_null(strstr(e.message, "secret"));
}

/* Bodies that are meant to hurt: deep, long, many. */
static void test_hostile(void **unused)
{
    (void)unused;
    size_t n = 4 << 20;
    char *s = malloc(n + 256);
    assert_non_null(s);
    memset(s, '[', n);
    bad(true, s, n, 400, "", "deeper");
    memset(s, '{', n);
    bad(true, s, n, 400, "", "deeper");
    /* a string that looks deep isn't */
    int head = snprintf(s, 128, "{\"prompt\":\"");
    memset(s + head, '[', n);
    memcpy(s + (size_t)head + n, "\"}", 2);
    oai_request r;
    oai_error e;
    assert_int_equal(oai_request_parse(false, s, (size_t)head + n + 2, &limits, &r, &e), 0);
    assert_int_equal(strlen(r.prompt), n);
    oai_request_free(&r);
    /* a million tokens, parts, fields */
    size_t at = (size_t)snprintf(s, 128, "{\"prompt\":[1");
    while (at < n) at += (size_t)snprintf(s + at, 16, ",1");
    at += (size_t)snprintf(s + at, 16, "]}");
    assert_int_equal(oai_request_parse(false, s, at, &limits, &r, &e), 0);
    assert_true(r.n_prompt_tokens > 1000000);
    oai_request_free(&r);
    at = (size_t)snprintf(s, 128, "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"\"}");
    while (at < n) at += (size_t)snprintf(s + at, 64, ",{\"type\":\"text\",\"text\":\"a\"}");
    at += (size_t)snprintf(s + at, 16, "]}]}");
    assert_int_equal(oai_request_parse(true, s, at, &limits, &r, &e), 0);
    assert_true(strlen(r.messages[0].content) > 200000);
    oai_request_free(&r);
    at = (size_t)snprintf(s, 128, "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"logit_bias\":{\"x\":0");
    for (size_t i = 0; at < n; i++) at += (size_t)snprintf(s + at, 64, ",\"%zu\":1", i);
    at += (size_t)snprintf(s + at, 16, "}}");
    bad(true, s, at, 400, "logit_bias", "4096");
    at = (size_t)snprintf(s, 128, "{\"messages\":[0");
    while (at < n) at += (size_t)snprintf(s + at, 16, ",0");
    at += (size_t)snprintf(s + at, 16, "]}");
    bad(true, s, at, 400, "messages", "4096");
    memset(s, 'x', n + 1);
    limits.max_body_bytes = n;
    bad(true, s, n + 1, 413, "", "more than");
    limits = oai_limits_default();
    /* a field's name that is long, and cut inside a character */
    at = (size_t)snprintf(s, 128, "{\"a");
    while (at < 1000) at += (size_t)snprintf(s + at, 8, "\xf0\x9f\x98\x80");
    at += (size_t)snprintf(s + at, 16, "\":1}");
    bad(true, s, at, 400, NULL, "unknown field");
    free(s);
}

static void test_fail(void **unused)
{
    (void)unused;
    oai_error e;
    static const struct {
        int status;
        const char *type;
    } types[] = {{400, "invalid_request_error"}, {401, "authentication_error"},  {403, "permission_error"},
                 {404, "invalid_request_error"}, {413, "invalid_request_error"}, {429, "rate_limit_error"},
                 {500, "server_error"},          {503, "server_error"}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        assert_int_equal(oai_fail(&e, types[i].status, "c", NULL, "%s", "m"), -1);
        assert_string_equal(e.type, types[i].type);
        assert_string_equal(e.code, "c");
        assert_string_equal(e.param, "");
    }
    oai_fail(&e, 400, NULL, "p\xff", "a\nb\x7f\xc3\xa9\xe2\x82");
    assert_string_equal(e.param, "p?");
    assert_string_equal(e.message, "a b \xc3\xa9??");
    assert_null(e.code);
}

static int setup(void **unused)
{
    (void)unused;
    limits = oai_limits_default();
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults), cmocka_unit_test(test_all_fields),        cmocka_unit_test(test_harmless),
        cmocka_unit_test(test_messages), cmocka_unit_test(test_tools_and_formats), cmocka_unit_test(test_refused),
        cmocka_unit_test(test_not_json), cmocka_unit_test(test_hostile),           cmocka_unit_test(test_fail),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
