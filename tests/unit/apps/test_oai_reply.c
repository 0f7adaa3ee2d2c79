/* Replies: shapes, escaping, and bytes that are no text. tests/cli/test_openai.sh holds them against OpenAI's own
 * types. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "serve/oai_reply.h"

static const oai_head chat_head = {.chat = true, .id = "chatcmpl-1", .created = 5, .model = "m", .include_usage = true};
static const oai_head text_head = {.id = "cmpl-1", .created = 5, .model = "m"};
static const oai_usage usage = {.prompt_tokens = 10, .cached_tokens = 8, .completion_tokens = 3};

static oai_piece text_piece(const char *text)
{
    return (oai_piece){.kind = OAI_PIECE_TEXT, .text = text, .n_bytes = strlen(text)};
}

static void check(oai_buffer *b, const char *wanted)
{
    assert_false(b->failed);
    assert_int_equal(strlen(b->data), b->n);
    assert_string_equal(b->data, wanted);
    oai_buffer_clear(b);
}

static void test_buffer(void **unused)
{
    (void)unused;
    oai_buffer b = {0};
    oai_buffer_add(&b, "", 0);
    for (int i = 0; i < 1000; i++) oai_buffer_add(&b, "abc", 3);
    assert_int_equal(b.n, 3000);
    assert_memory_equal(b.data + 2997, "abc", 4);
    oai_buffer_add(&b, "x", SIZE_MAX / 2);
    assert_true(b.failed);
    oai_buffer_add(&b, "x", 1);
    assert_int_equal(b.n, 3000);
    oai_buffer_clear(&b);
    oai_buffer_add(&b, "x", 1);
    check(&b, "x");
    oai_buffer_free(&b);
    oai_buffer_free(&b);
}

static void test_utf8_whole(void **unused)
{
    (void)unused;
    static const struct {
        const char *s;
        size_t whole;
    } cases[] = {
        {"", 0},
        {"a", 1},
        {"\xc3", 0},
        {"a\xc3", 1},
        {"\xc3\xa9", 2},
        {"\xe2", 0},
        {"\xe2\x82", 0},
        {"\xe2\x82\xac", 3},
        {"\xf0", 0},
        {"\xf0\x9f", 0},
        {"\xf0\x9f\x98", 0},
        {"\xf0\x9f\x98\x80", 4},
        {"a\xf0\x9f\x98\x80\xf0\x9f", 5},
        /* what can't become a character needs no waiting */
        {"\xff", 1},
        {"\x80", 1},
        {"\x80\x80\x80\x80", 4},
        {"\xc0", 1},
        {"\xc1\x80", 2},
        {"\xe0\x80", 2},
        {"\xed\xa0", 2},
        {"\xf4\x90", 2},
        {"\xf5", 1},
        {"\xe2\x41", 2},
        {"\xf0\x9f\x41", 3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_int_equal(oai_utf8_whole(cases[i].s, strlen(cases[i].s)), cases[i].whole);
}

static void test_chat(void **unused)
{
    (void)unused;
    oai_buffer b = {0};
    oai_piece p = text_piece("Say \"hi\"\n\x01 \xc3\xa9");
    oai_write_reply(&b, &chat_head, &p, 1, NULL, 0, OAI_STOP, &usage, NULL);
    check(
        &b,
        "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":5,\"model\":\"m\",\"choices\":[{\"index\":0,"
        "\"message\":{\"role\":\"assistant\",\"content\":\"Say \\\"hi\\\"\\n\\u0001 \xc3\xa9\",\"refusal\":null},"
        "\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":3,"
        "\"total_tokens\":13,\"prompt_tokens_details\":{\"cached_tokens\":8}}}");
    oai_write_reply(&b, &chat_head, NULL, 0, NULL, 0, OAI_LENGTH, &usage, NULL);
    assert_non_null(strstr(b.data, "\"content\":\"\""));
    assert_non_null(strstr(b.data, "\"finish_reason\":\"length\""));
    oai_buffer_clear(&b);

    const oai_piece calls[] = {
        {.kind = OAI_PIECE_REASONING, .text = "hm", .n_bytes = 2},
        {.kind = OAI_PIECE_TOOL_CALL, .text = "{\"a\":1}", .n_bytes = 7, .index = 0, .id = "call_1", .name = "f"},
        {.kind = OAI_PIECE_TOOL_CALL, .text = "{}", .n_bytes = 2, .index = 1, .id = "call_2", .name = "g"},
    };
    oai_write_reply(&b, &chat_head, calls, 3, NULL, 0, OAI_TOOL_CALLS, &usage, NULL);
    assert_non_null(strstr(b.data, "\"content\":null"));
    assert_non_null(strstr(b.data, "\"reasoning_content\":\"hm\""));
    assert_non_null(strstr(b.data,
                           "\"tool_calls\":[{\"id\":\"call_1\",\"type\":\"function\",\"function\":{\"name\":\"f\","
                           "\"arguments\":\"{\\\"a\\\":1}\"}},{\"id\":\"call_2\""));
    assert_non_null(strstr(b.data, "\"finish_reason\":\"tool_calls\""));
    oai_buffer_free(&b);
}

static void test_stream(void **unused)
{
    (void)unused;
#define HEAD                                                                                                           \
    "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":5,\"model\":\"m\",\"choices\":["
#define TAIL "\"finish_reason\":null}],\"usage\":null}\n\n"
    oai_buffer b = {0};
    oai_stream_begin(&b, &chat_head);
    check(&b, HEAD "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null," TAIL);
    oai_piece p = text_piece("a");
    oai_stream_pieces(&b, &chat_head, &p, 1, NULL, 0);
    check(&b, HEAD "{\"index\":0,\"delta\":{\"content\":\"a\"},\"logprobs\":null," TAIL);
    oai_stream_pieces(&b, &chat_head, NULL, 0, NULL, 0);
    assert_int_equal(b.n, 0);
    const oai_piece calls[] = {
        {.kind = OAI_PIECE_TOOL_CALL, .text = "", .index = 1, .id = "call_1", .name = "f"},
        {.kind = OAI_PIECE_TOOL_CALL, .text = "{", .n_bytes = 1, .index = 1},
    };
    oai_stream_pieces(&b, &chat_head, calls, 2, NULL, 0);
    check(&b, HEAD
          "{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":1,\"id\":\"call_1\",\"type\":\"function\",\"function\":"
          "{\"name\":\"f\",\"arguments\":\"\"}}]},\"logprobs\":null," TAIL HEAD
          "{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":1,\"function\":{\"arguments\":\"{\"}}]},"
          "\"logprobs\":null," TAIL);
    oai_stream_end(&b, &chat_head, OAI_STOP, &usage, NULL);
    check(&b, HEAD "{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":null}\n\n" HEAD
                   "],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":3,\"total_tokens\":13,"
                   "\"prompt_tokens_details\":{\"cached_tokens\":8}}}\n\ndata: [DONE]\n\n");

    oai_stream_begin(&b, &text_head);
    assert_int_equal(b.n, 0);
    oai_stream_pieces(&b, &text_head, &p, 1, NULL, 0);
    check(&b,
          "data: "
          "{\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":5,\"model\":\"m\",\"choices\":[{\"index\":0,"
          "\"text\":\"a\",\"logprobs\":null,\"finish_reason\":null}]}\n\n");
    const oai_report report = {.way = "load",
                               .reason = "quicker",
                               .system = "partial",
                               .retention = 0.25,
                               .live_tokens = 1,
                               .loaded_tokens = 7,
                               .computed_tokens = 2,
                               .bytes_read = 4096,
                               .queue_ns = 1500000,
                               .ttft_ns = 2000000,
                               .request_id = "r1"};
    oai_stream_end(&b, &text_head, OAI_LENGTH, &usage, &report);
    check(
        &b,
        "data: "
        "{\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":5,\"model\":\"m\",\"choices\":[{\"index\":0,"
        "\"text\":\"\",\"logprobs\":null,\"finish_reason\":\"length\"}],\"impress\":{\"way\":\"load\",\"reason\":\"quicker\",\"system\":"
        "\"partial\",\"retention\":0.25,\"tokens\":{\"live\":1,\"loaded\":7,\"computed\":2},\"bytes_read\":4096,"
        "\"ms\":{\"queue\":1.5,\"identify\":0.0,\"load\":0.0,\"compute\":0.0,\"ttft\":2.0},\"request_id\":\"r1\"}}\n\n"
        "data: [DONE]\n\n");
    oai_stream_comment(&b);
    check(&b, ": waiting\n\n");
    oai_buffer_free(&b);
}

static void test_logprobs(void **unused)
{
    (void)unused;
    const oai_top top[] = {{"a", 1, -0.5}, {"\xf0\x9f", 2, -2}, {"a", 1, -3}};
    const oai_logprob l[] = {
        {.bytes = "a", .n_bytes = 1, .logprob = -0.5, .top = top, .n_top = 3, .offset = 4},
        {.bytes = "\xf0\x9f", .n_bytes = 2, .logprob = -INFINITY, .offset = 5},
    };
    oai_buffer b = {0};
    oai_piece p = text_piece("a");
    oai_write_reply(&b, &chat_head, &p, 1, l, 2, OAI_STOP, &usage, NULL);
    assert_non_null(strstr(
        b.data,
        "\"logprobs\":{\"content\":[{\"token\":\"a\",\"logprob\":-0.5,\"bytes\":[97],\"top_logprobs\":[{\"token\":"
        "\"a\","
        "\"logprob\":-0.5,\"bytes\":[97]},{\"token\":\"bytes:\\\\xf0\\\\x9f\",\"logprob\":-2.0,\"bytes\":[240,159]},"
        "{\"token\":\"a\",\"logprob\":-3.0,\"bytes\":[97]}]},{\"token\":\"bytes:\\\\xf0\\\\x9f\",\"logprob\":-9999.0,"
        "\"bytes\":[240,159],\"top_logprobs\":[]}],\"refusal\":null}"));
    oai_buffer_clear(&b);
    oai_write_reply(&b, &text_head, &p, 1, l, 2, OAI_STOP, &usage, NULL);
    assert_non_null(strstr(b.data, "\"logprobs\":{\"tokens\":[\"a\",\"bytes:\\\\xf0\\\\x9f\"],\"token_logprobs\":[-0.5,"
                                   "-9999.0],\"top_logprobs\":[{\"a\":-0.5,\"bytes:\\\\xf0\\\\x9f\":-2.0},{}],"
                                   "\"text_offset\":[4,5]}"));
    oai_buffer_clear(&b);
    oai_write_reply(&b, &text_head, &p, 1, l + 1, 1, OAI_STOP, &usage, NULL);
    assert_non_null(strstr(b.data, "\"top_logprobs\":null"));
    oai_buffer_clear(&b);
    /* a token whose text is held back: a chunk of its own; with pieces, once only */
    oai_stream_pieces(&b, &chat_head, NULL, 0, l, 1);
    assert_non_null(strstr(b.data, "\"delta\":{\"content\":\"\"},\"logprobs\":{"));
    oai_buffer_clear(&b);
    const oai_piece two[] = {text_piece("a"), text_piece("b")};
    oai_stream_pieces(&b, &chat_head, two, 2, l, 1);
    const char *first = strstr(b.data, "\"logprobs\":{");
    assert_non_null(first);
    assert_null(strstr(first + 1, "\"logprobs\":{"));
    oai_buffer_free(&b);
}

/* Whatever bytes a model makes, the reply is JSON. */
static void test_any_bytes(void **unused)
{
    (void)unused;
    oai_buffer b = {0};
    const oai_piece odd = {.kind = OAI_PIECE_TEXT, .text = "a\0\xff\xe2\x82\x80\xed\xa0\x80z", .n_bytes = 10};
    oai_write_reply(&b, &chat_head, &odd, 1, NULL, 0, OAI_STOP, &usage, NULL);
    assert_non_null(strstr(b.data, "\"content\":\"a\\u0000\xef\xbf\xbd\xe2\x82\x80\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"
                                   "z\""));
    oai_buffer_clear(&b);
    unsigned char all[512];
    for (size_t i = 0; i < sizeof all; i++) all[i] = (unsigned char)(i * 7 + i / 256);
    const oai_piece bytes = {.kind = OAI_PIECE_TEXT, .text = (const char *)all, .n_bytes = sizeof all};
    oai_write_reply(&b, &chat_head, &bytes, 1, NULL, 0, OAI_STOP, &usage, NULL);
    assert_false(b.failed);
    json_t *v = json_loadb(b.data, b.n, JSON_ALLOW_NUL, NULL);
    assert_non_null(v);
    json_decref(v);
    oai_buffer_free(&b);
}

static void test_errors_and_models(void **unused)
{
    (void)unused;
    oai_buffer b = {0};
    oai_error e;
    oai_fail(&e, 404, "model_not_found", "model", "no model \"%s\"", "x");
    oai_write_error(&b, &e);
    check(&b, "{\"error\":{\"message\":\"no model "
              "\\\"x\\\"\",\"type\":\"invalid_request_error\",\"param\":\"model\",\"code\":"
              "\"model_not_found\"}}");
    oai_fail(&e, 500, NULL, NULL, "oh");
    oai_stream_error(&b, &e);
    check(&b, "data: {\"error\":{\"message\":\"oh\",\"type\":\"server_error\",\"param\":null,\"code\":null}}\n\n");
    const oai_model models[] = {{.id = "a", .created = 1, .context = 4096}, {.id = "b", .created = 2}};
    oai_write_models(&b, models, 2);
    check(&b,
          "{\"object\":\"list\",\"data\":[{\"id\":\"a\",\"object\":\"model\",\"created\":1,\"owned_by\":\"impress\","
          "\"max_model_len\":4096},{\"id\":\"b\",\"object\":\"model\",\"created\":2,\"owned_by\":\"impress\"}]}");
    oai_write_model(&b, &models[1]);
    check(&b, "{\"id\":\"b\",\"object\":\"model\",\"created\":2,\"owned_by\":\"impress\"}");
    char id[40];
    const uint8_t random[12] = {0, 1, 0xff};
    oai_make_id(true, random, id);
    assert_string_equal(id, "chatcmpl-0001ff000000000000000000");
    oai_make_id(false, random, id);
    assert_string_equal(id, "cmpl-0001ff000000000000000000");
    oai_buffer_free(&b);
}

/* jansson's allocations fail one after the other: the buffer says so, and nothing is lost. */
static size_t allocations_left;
static void *failing_malloc(size_t n)
{
    if (allocations_left == 0) return NULL;
    allocations_left--;
    return malloc(n);
}

static void test_no_memory(void **unused)
{
    (void)unused;
    json_malloc_t old_malloc;
    json_free_t old_free;
    json_get_alloc_funcs(&old_malloc, &old_free);
    json_set_alloc_funcs(failing_malloc, free);
    const oai_top top = {"a", 1, -0.5};
    const oai_logprob l = {.bytes = "a", .n_bytes = 1, .top = &top, .n_top = 1};
    const oai_report report = {.way = "load"};
    const oai_piece pieces[] = {
        text_piece("a"),
        {.kind = OAI_PIECE_TOOL_CALL, .text = "{", .n_bytes = 1, .id = "i", .name = "n"},
    };
    bool failed = true;
    for (size_t budget = 0; failed; budget++) {
        assert_true(budget < 1000);
        oai_buffer b = {0};
        allocations_left = budget;
        oai_write_reply(&b, &chat_head, pieces, 2, &l, 1, OAI_STOP, &usage, &report);
        oai_write_reply(&b, &text_head, pieces, 1, &l, 1, OAI_STOP, &usage, &report);
        oai_stream_begin(&b, &chat_head);
        oai_stream_pieces(&b, &chat_head, pieces, 2, &l, 1);
        oai_stream_end(&b, &chat_head, OAI_STOP, &usage, &report);
        failed = b.failed;
        oai_buffer_free(&b);
    }
    json_set_alloc_funcs(old_malloc, old_free);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_buffer),
        cmocka_unit_test(test_utf8_whole),
        cmocka_unit_test(test_chat),
        cmocka_unit_test(test_stream),
        cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_any_bytes),
        cmocka_unit_test(test_errors_and_models),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
