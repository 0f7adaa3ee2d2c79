/* Chats with real vocabularies, templates and answers: SmolLM2's ($IMPRESS_MODEL), and, where $IMPRESS_TOOLS_MODEL
 * names one, a model whose template knows tools in <tool_call> (Qwen2.5-Coder, say). */
#include <math.h>
#include <unistd.h>

#include "unit/apps/chat_fixture.h"

#include <jansson.h>

enum { ROOM = 4096, MAX_ANSWER = 160 };

static struct llama_model *smol, *tools_model;

#define CHAT(text, more) "{\"messages\":[{\"role\":\"user\",\"content\":\"" text "\"}]" more "}"
#define TOOLS                                                                                                          \
    ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"get_weather\",\"description\":\"The weather of a "    \
    "city\",\"parameters\":{\"type\":\"object\",\"properties\":{\"city\":{\"type\":\"string\"},\"unit\":{\"enum\":["   \
    "\"celsius\",\"fahrenheit\"]}},\"required\":[\"city\"]}}}]"

static chat_template *open_template(const struct llama_model *m)
{
    chat_template *t;
    oai_error e;
    if (chat_template_open(m, NULL, &t, &e) != 0) fail_msg("%s", e.message);
    return t;
}

/* Greedily, under the plan's grammar, and parsed: as parse_answer() writes it. */
static const char *generate(struct llama_model *m, const chat_plan *p)
{
    static char answer[ROOM];
    const struct llama_vocab *vocab = llama_model_get_vocab(m);
    int32_t n_vocab = llama_vocab_n_tokens(vocab);
    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = 1024;
    struct llama_context *ctx = llama_init_from_model(m, cp);
    assert_non_null(ctx);
    chat_grammar *g;
    oai_error e;
    if (chat_grammar_new(p, &g, &e) != 0) fail_msg("%s", e.message);
    llama_token_data *data = malloc((size_t)n_vocab * sizeof *data);
    assert_non_null(data);

    size_t n, n_answer = 0;
    const llama_token *tokens = chat_plan_tokens(p, &n);
    llama_token *prompt = malloc(n * sizeof *prompt), token;
    assert_non_null(prompt);
    memcpy(prompt, tokens, n * sizeof *prompt);
    struct llama_batch batch = llama_batch_get_one(prompt, (int32_t)n);
    for (int i = 0; i < MAX_ANSWER; i++) {
        assert_int_equal(llama_decode(ctx, batch), 0);
        const float *logits = llama_get_logits_ith(ctx, -1);
        for (llama_token k = 0; k < n_vocab; k++) data[k] = (llama_token_data){.id = k, .logit = logits[k]};
        llama_token_data_array all = {.data = data, .size = (size_t)n_vocab, .selected = -1};
        token = 0;
        for (llama_token k = 1; k < n_vocab; k++) token = data[k].logit > data[token].logit ? k : token;
        if (g && !chat_grammar_allows(g, token)) {
            chat_grammar_apply(g, &all);
            token = 0;
            for (llama_token k = 1; k < n_vocab; k++) token = data[k].logit > data[token].logit ? k : token;
            assert_true(data[token].logit > -INFINITY);
        }
        if (g) assert_true(chat_grammar_accept(g, token));
        if (llama_vocab_is_eog(vocab, token)) break;
        int32_t got = llama_token_to_piece(vocab, token, answer + n_answer, (int32_t)(ROOM - n_answer - 1), 0,
                                           chat_plan_shows(p, token));
        assert_true(got >= 0);
        n_answer += (size_t)got;
        batch = llama_batch_get_one(&token, 1);
    }
    answer[n_answer] = '\0';
    free(data);
    free(prompt);
    chat_grammar_free(g);
    llama_free(ctx);
    const char *whole = parse_answer(p, answer, ROOM);
    char first[ROOM];
    snprintf(first, sizeof first, "%s", whole);
    for (size_t step = 1; step < 8; step += 2) assert_string_equal(parse_answer(p, answer, step), first);
    return parse_answer(p, answer, ROOM);
}

static void test_prompt(void **unused)
{
    (void)unused;
    static const char wanted[] =
        "{<|im_start|>}system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face{<|im_end|>}\n{<|im_start|>}user\nx{<|im_end|>}\n{<|im_start|>}assistant\n";
    const chat_way *ways[] = {
        &chat_way_plain,
#if IMPRESS_HAVE_LLAMA_COMMON
        &chat_way_common,
#endif
    };
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        chat_template *t;
        oai_error e;
        assert_int_equal(chat_template_open_way(ways[i], smol, NULL, &t, &e), 0);
        chat_plan *p = make_plan(t, true, CHAT("x", ""));
        size_t n;
        const llama_token *tokens = chat_plan_tokens(p, &n);
        /* the C API has no system text of its own */
        assert_string_equal(spell(smol, tokens, n), i == 0 ? strstr(wanted, "{<|im_start|>}user") : wanted);
        chat_plan_free(p);
        /* a text that spells the end of the turn */
        p = make_plan(t, true, CHAT("<|im_end|>", ""));
        tokens = chat_plan_tokens(p, &n);
        assert_non_null(strstr(spell(smol, tokens, n), "user\n<|im_end|>{<|im_end|>}"));
        chat_plan_free(p);
        chat_template_close(t);
    }
}

static void test_json(void **unused)
{
    (void)unused;
    chat_template *t = open_template(smol);
    chat_plan *p = make_plan(t, true,
                             CHAT("Describe Norway as a JSON object with the fields name and capital.",
                                  ",\"response_format\":{\"type\":\"json_object\"}"));
    const char *answer = generate(smol, p);
    json_t *v = json_loads(answer, 0, NULL);
    if (!v && strlen(answer) < MAX_ANSWER) fail_msg("%s", answer); /* else cut */
    json_decref(v);
    chat_plan_free(p);

    p = make_plan(t, true, CHAT("Say hello.", ",\"grammar\":\"root ::= [A-Z] [a-z]{2,5} [!]\""));
    answer = generate(smol, p);
    assert_in_range(strlen(answer), 4, 7);
    assert_int_equal(answer[strlen(answer) - 1], '!');
    chat_plan_free(p);

    if (chat_template_capabilities(t).schema) {
        p = make_plan(t, true,
                      CHAT("Who is the first keeper of the lighthouse? She is Marit, 41 years old.",
                           ",\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"p\","
                           "\"schema\":{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\","
                           "\"maxLength\":20},\"age\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":150}},"
                           "\"required\":[\"name\",\"age\"],\"additionalProperties\":false}}}"));
        answer = generate(smol, p);
        v = json_loads(answer, 0, NULL);
        if (!v) fail_msg("%s", answer);
        assert_int_equal(json_object_size(v), 2);
        assert_true(json_is_string(json_object_get(v, "name")));
        assert_in_range(json_integer_value(json_object_get(v, "age")), 0, 150);
        json_decref(v);
        chat_plan_free(p);
    }
    chat_template_close(t);
}

static void test_tools(void **unused)
{
    (void)unused;
    if (!tools_model) {
        printf("skipped: IMPRESS_TOOLS_MODEL names no model with tools\n");
        skip();
    }
    chat_template *t = open_template(tools_model);
    if (!chat_template_capabilities(t).tools) {
        printf("skipped: built without llama.cpp's common library\n");
        chat_template_close(t);
        skip();
    }
    chat_plan *p =
        make_plan(t, true, CHAT("What is the weather in Oslo, in celsius?", TOOLS ",\"tool_choice\":\"required\""));
    const char *answer = generate(tools_model, p), *arguments = strchr(answer, '(');
    if (strncmp(answer, "C0:get_weather(", 15) != 0) fail_msg("%s", answer);
    json_t *v = json_loads(arguments + 1, JSON_DISABLE_EOF_CHECK, NULL);
    if (!v) fail_msg("%s", answer);
    assert_true(json_is_string(json_object_get(v, "city")));
    json_decref(v);
    chat_plan_free(p);

    /* as it likes, and then with what the tool said */
    p = make_plan(t, true, CHAT("What is the weather in Oslo?", TOOLS));
    generate(tools_model, p);
    chat_plan_free(p);
    p = make_plan(
        t, true,
        "{\"messages\":[{\"role\":\"user\",\"content\":\"What is the weather in Oslo?\"},{\"role\":\"assistant\","
        "\"content\":null,\"tool_calls\":[{\"id\":\"call_1\",\"type\":\"function\",\"function\":{\"name\":"
        "\"get_weather\",\"arguments\":\"{\\\"city\\\": \\\"Oslo\\\"}\"}}]},{\"role\":\"tool\",\"tool_call_id\":"
        "\"call_1\",\"content\":\"sunny, 31 degrees\"}]" TOOLS "}");
    size_t n;
    const llama_token *tokens = chat_plan_tokens(p, &n);
    const char *prompt = spell(tools_model, tokens, n);
    assert_non_null(
        strstr(prompt, "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>"));
    assert_non_null(strstr(prompt, "sunny, 31 degrees"));
    generate(tools_model, p);
    chat_plan_free(p);
    chat_template_close(t);
}

static struct llama_model *load(const char *name)
{
    const char *path = getenv(name);
    if (!path || access(path, R_OK) != 0) return NULL;
    struct llama_model_params mp = llama_model_default_params();
    mp.use_extra_bufts = false;
    return llama_model_load_from_file(path, mp);
}

int main(void)
{
    llama_log_set(no_log, NULL);
    smol = load("IMPRESS_MODEL");
    if (!smol) {
        printf("skipped: no model; IMPRESS_MODEL names none that can be read\n");
        return 77;
    }
    tools_model = load("IMPRESS_TOOLS_MODEL");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_prompt),
        cmocka_unit_test(test_json),
        cmocka_unit_test(test_tools),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    llama_model_free(smol);
    if (tools_model) llama_model_free(tools_model);
    return rc;
}
