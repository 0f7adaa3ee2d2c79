/* oai_samples.c: replies of all kinds, a line each: the name of OpenAI's type, a tab, the JSON. For
 * test_openai_types.sh. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "serve/oai_reply.h"

static oai_buffer b;

static void show(const char *type)
{
    if (b.failed) exit(1);
    printf("%s\t%s\n", type, b.data);
    oai_buffer_clear(&b);
}

/* Each event of a stream by itself. */
static void show_events(const char *type)
{
    if (b.failed) exit(1);
    for (char *event = b.data, *end; event && *event; event = end + 2) {
        end = strstr(event, "\n\n");
        if (!end || strncmp(event, "data: ", 6) != 0) exit(1);
        if (strncmp(event, "data: [DONE]", 12) != 0) printf("%s\t%.*s\n", type, (int)(end - event - 6), event + 6);
    }
    oai_buffer_clear(&b);
}

int main(void)
{
    const oai_usage usage = {.prompt_tokens = 100, .cached_tokens = 90, .completion_tokens = 3};
    const oai_report report = {.way = "load",
                               .system = "partial",
                               .retention = 0.25,
                               .loaded_tokens = 90,
                               .computed_tokens = 10,
                               .bytes_read = 12345,
                               .ttft_ns = 1234567,
                               .request_id = "r"};
    const oai_top tops[] = {{"Hi", 2, -0.25}, {"\xf0\x9f", 2, -INFINITY}};
    const oai_logprob logprobs[] = {
        {.bytes = "Hi", .n_bytes = 2, .logprob = -0.25, .top = tops, .n_top = 2},
        {.bytes = "\xf0\x9f", .n_bytes = 2, .logprob = -3, .offset = 2},
    };
    const oai_piece text = {.kind = OAI_PIECE_TEXT, .text = "Hi \xf0\x9f\x98\x80", .n_bytes = 7};
    const oai_piece calls[] = {
        {.kind = OAI_PIECE_REASONING, .text = "well", .n_bytes = 4},
        {.kind = OAI_PIECE_TOOL_CALL, .text = "{\"a\": 1}", .n_bytes = 8, .id = "call_0", .name = "f"},
        {.kind = OAI_PIECE_TOOL_CALL, .text = "{}", .n_bytes = 2, .index = 1, .id = "call_1", .name = "g"},
    };
    const oai_piece rest = {.kind = OAI_PIECE_TOOL_CALL, .text = "}", .n_bytes = 1, .index = 1};

    for (int usage_wanted = 0; usage_wanted < 2; usage_wanted++) {
        oai_head chat = {.chat = true, .created = 1700000000, .model = "m", .include_usage = usage_wanted};
        oai_head completion = {.created = 1700000000, .model = "m", .include_usage = usage_wanted};
        char id[40], text_id[40];
        oai_make_id(true, (const uint8_t[12]){1, 2, 3}, id);
        oai_make_id(false, (const uint8_t[12]){1, 2, 3}, text_id);
        chat.id = id;
        completion.id = text_id;
        const oai_report *told = usage_wanted ? &report : NULL;

        oai_write_reply(&b, &chat, &text, 1, NULL, 0, OAI_STOP, &usage, told);
        show("ChatCompletion");
        oai_write_reply(&b, &chat, &text, 1, logprobs, 2, OAI_LENGTH, &usage, told);
        show("ChatCompletion");
        oai_write_reply(&b, &chat, calls, 3, NULL, 0, OAI_TOOL_CALLS, &usage, told);
        show("ChatCompletion");
        oai_write_reply(&b, &chat, NULL, 0, logprobs, 0, OAI_STOP, &usage, told);
        show("ChatCompletion");
        oai_write_reply(&b, &completion, &text, 1, NULL, 0, OAI_STOP, &usage, told);
        show("Completion");
        oai_write_reply(&b, &completion, &text, 1, logprobs, 2, OAI_LENGTH, &usage, told);
        show("Completion");
        oai_write_reply(&b, &completion, NULL, 0, logprobs + 1, 1, OAI_STOP, &usage, told);
        show("Completion");

        oai_stream_begin(&b, &chat);
        oai_stream_pieces(&b, &chat, &text, 1, NULL, 0);
        oai_stream_pieces(&b, &chat, &text, 1, logprobs, 2);
        oai_stream_pieces(&b, &chat, NULL, 0, logprobs, 1);
        oai_stream_pieces(&b, &chat, calls, 3, NULL, 0);
        oai_stream_pieces(&b, &chat, &rest, 1, NULL, 0);
        oai_stream_end(&b, &chat, OAI_TOOL_CALLS, &usage, told);
        show_events("ChatCompletionChunk");
        oai_stream_begin(&b, &completion);
        oai_stream_pieces(&b, &completion, &text, 1, logprobs, 2);
        oai_stream_end(&b, &completion, OAI_LENGTH, &usage, told);
        show_events("Completion");
    }
    const oai_model model = {.id = "m", .created = 1700000000, .context = 4096};
    oai_write_model(&b, &model);
    show("Model");
    oai_write_models(&b, &model, 1);
    show("SyncPage[Model]");
    oai_error e;
    oai_fail(&e, 400, "invalid_value", "n", "no");
    oai_write_error(&b, &e);
    show("error");
    oai_buffer_free(&b);
    return 0;
}
