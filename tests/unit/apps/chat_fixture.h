/* chat_fixture.h: a model that is a vocabulary and a chat template, made in a moment: a token for each byte, and some
 * of a chat. Enough for templates, grammars and parsers; nothing can be computed with it. */
#ifndef TEST_CHAT_FIXTURE_H
#define TEST_CHAT_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <gguf.h>
#include <llama.h>

#include "serve/chat_template.h"
#include "serve/chat_ways.h"
#include "support/support.h"
#include "tokenize.h"

enum { N_BYTES = 256, N_SPECIAL = 6, START = N_BYTES, END, BOS, CALL, CALL_END, UNKNOWN_TOKEN };

/* ChatML without a system text of its own. */
static const char plain_template[] =
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/* With tools, as the Hermes family writes them. */
static const char tool_template[] =
    "{%- if tools %}{{- '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}"
    "{{- 'Tools:\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\n</tools>\nCall as <tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call><|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|im_start|>' + m.role }}"
    "{%- if m.content %}{{- '\n' + m.content }}{%- endif %}"
    "{%- for c in m.tool_calls %}{%- if c.function is defined %}{%- set c = c.function %}{%- endif %}"
    "{{- '\n<tool_call>\n{\"name\": \"' + c.name + '\", \"arguments\": ' }}{{- c.arguments | tojson }}"
    "{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + m.content + "
    "'\n</tool_response><|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}";

/* With reasoning in <think>, which may be switched off. */
static const char think_template[] =
    "{%- for m in messages %}{%- if m.role == 'assistant' and m.reasoning_content %}"
    "{{- '<|im_start|>assistant\n<think>\n' + m.reasoning_content + '\n</think>\n\n' + m.content + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}";

static inline size_t put_utf8(char *out, unsigned c)
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    out[0] = (char)(0xc0 | c >> 6);
    out[1] = (char)(0x80 | (c & 0x3f));
    return 2;
}

static inline void no_log(enum ggml_log_level level, const char *text, void *user)
{
    (void)level, (void)text, (void)user;
}

/* `chat` NULL: no template. With `bos` a prompt begins with one. `pre`: how words are cut. */
static inline struct llama_model *make_model_cut(const char *chat, bool bos, const char *pre)
{
    static char texts[N_BYTES + N_SPECIAL][24];
    const char *tokens[N_BYTES + N_SPECIAL], *merges[] = {"a b"};
    static const char *const specials[] = {"<|im_start|>", "<|im_end|>", "<s>", "<tool_call>", "</tool_call>", "<unk>"};
    int32_t types[N_BYTES + N_SPECIAL];
    unsigned next = 256;
    for (unsigned b = 0; b < N_BYTES; b++) { /* how GPT-2 spells bytes */
        bool shown = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        texts[b][put_utf8(texts[b], shown ? b : next++)] = '\0';
        types[b] = 1;
    }
    for (unsigned i = 0; i < N_SPECIAL; i++) {
        snprintf(texts[N_BYTES + i], sizeof texts[0], "%s", specials[i]);
        types[N_BYTES + i] = i == CALL - N_BYTES || i == CALL_END - N_BYTES ? 4 : i == UNKNOWN_TOKEN - N_BYTES ? 2 : 3;
    }
    for (size_t i = 0; i < N_BYTES + N_SPECIAL; i++) tokens[i] = texts[i];

    struct gguf_context *g = gguf_init_empty();
    gguf_set_val_str(g, "general.architecture", "llama");
    gguf_set_val_str(g, "tokenizer.ggml.model", "gpt2");
    gguf_set_val_str(g, "tokenizer.ggml.pre", pre);
    gguf_set_arr_str(g, "tokenizer.ggml.tokens", tokens, N_BYTES + N_SPECIAL);
    gguf_set_arr_data(g, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types, N_BYTES + N_SPECIAL);
    gguf_set_arr_str(g, "tokenizer.ggml.merges", merges, 1);
    gguf_set_val_u32(g, "tokenizer.ggml.bos_token_id", BOS);
    gguf_set_val_u32(g, "tokenizer.ggml.eos_token_id", END);
    gguf_set_val_u32(g, "tokenizer.ggml.unknown_token_id", UNKNOWN_TOKEN);
    gguf_set_val_bool(g, "tokenizer.ggml.add_bos_token", bos);
    if (chat) gguf_set_val_str(g, "tokenizer.chat_template", chat);
    char *dir = imp_test_make_dir(NULL);
    assert_non_null(dir);
    const char *path = imp_test_path(dir, "vocabulary.gguf");
    assert_true(gguf_write_to_file(g, path, true));
    gguf_free(g);

    llama_log_set(no_log, NULL);
    struct llama_model_params mp = llama_model_default_params();
    mp.vocab_only = true;
    struct llama_model *m = llama_model_load_from_file(path, mp);
    imp_test_remove_dir(dir);
    assert_non_null(m);
    return m;
}

static inline struct llama_model *make_model(const char *chat, bool bos)
{
    return make_model_cut(chat, bos, "gpt-2");
}

/* The text of tokens, control tokens as {their text}. In one static buffer. */
static inline const char *spell(const struct llama_model *m, const llama_token *tokens, size_t n)
{
    static char text[1 << 16];
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        const struct llama_vocab *vocab = llama_model_get_vocab(m);
        bool control =
            (llama_vocab_get_attr(vocab, tokens[i]) & (LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN)) != 0;
        if (control) text[at++] = '{';
        int32_t got = llama_token_to_piece(vocab, tokens[i], text + at, (int32_t)(sizeof text - at - 2), 0, true);
        assert_true(got >= 0);
        at += (size_t)got;
        if (control) text[at++] = '}';
    }
    text[at] = '\0';
    return text;
}

static inline void parse_body(bool chat, const char *body, oai_request *r)
{
    oai_limits limits = oai_limits_default();
    oai_error e;
    if (oai_request_parse(chat, body, strlen(body), &limits, r, &e) != 0) fail_msg("%s: %s", body, e.message);
}

static inline chat_plan *make_plan(const chat_template *t, bool chat, const char *body)
{
    oai_request r;
    oai_error e;
    chat_plan *p = NULL;
    parse_body(chat, body, &r);
    if (chat_plan_make(t, &r, &p, &e) != 0) fail_msg("%s: %s", body, e.message);
    oai_request_free(&r);
    return p;
}

/* That a request can't be planned; the error's message must hold `part`. */
static inline void refuse_plan(const chat_template *t, bool chat, const char *body, const char *part)
{
    oai_request r;
    oai_error e = {0};
    chat_plan *p = NULL;
    parse_body(chat, body, &r);
    if (chat_plan_make(t, &r, &p, &e) != -1) fail_msg("taken: %s", body);
    assert_null(p);
    assert_in_range(e.status, 400, 599);
    if (!strstr(e.message, part)) fail_msg("%s: %s", body, e.message);
    oai_request_free(&r);
}

/* Feed a text to a plan's grammar: whether all of it, and then the end, is allowed. A token is the longest special one
 * that the text goes on with, else a byte. *n_taken: bytes taken before a refusal. */
static inline bool grammar_takes(const struct llama_model *m, const chat_plan *p, const char *text, size_t *n_taken)
{
    const struct llama_vocab *vocab = llama_model_get_vocab(m);
    chat_grammar *g;
    oai_error e = {0};
    if (chat_grammar_new(p, &g, &e) != 0) fail_msg("%s", e.message);
    assert_non_null(g);
    llama_token *tokens = NULL;
    size_t n = 0, taken = 0;
    assert_true(app_tokenize_more(vocab, text, strlen(text), false, true, &tokens, &n));
    bool ok = true;
    for (size_t i = 0; ok && i < n; i++) {
        char piece[64];
        ok = chat_grammar_allows(g, tokens[i]);
        assert_int_equal(chat_grammar_accept(g, tokens[i]), ok);
        int32_t got = llama_token_to_piece(vocab, tokens[i], piece, sizeof piece, 0, true);
        if (ok && got > 0) taken += (size_t)got;
    }
    if (ok) ok = chat_grammar_allows(g, llama_vocab_eos(vocab)) && chat_grammar_accept(g, llama_vocab_eos(vocab));
    if (n_taken) *n_taken = taken;
    free(tokens);
    chat_grammar_free(g);
    return ok;
}

/* Parse an answer that ended so, given in pieces of `step` bytes. Writes what was told, e.g.
 * `text|R:reasoning|C0:name(arguments)`, into one static buffer; checks that the parts are what chat_answer_whole()
 * says. */
static inline const char *parse_ended(const chat_plan *p, const char *text, size_t step, chat_end how)
{
    static char out[1 << 16];
    static struct {
        char text[1 << 14];
        size_t n;
    } told[10];
    chat_answer *a = chat_answer_new(p);
    assert_non_null(a);
    size_t n = strlen(text), n_out = 0;
    memset(told, 0, sizeof told);
    const oai_piece *pieces;
    size_t n_pieces;
    for (size_t at = 0;; at += step) {
        bool end = at >= n;
        size_t part = end ? 0 : n - at < step ? n - at : step;
        assert_int_equal(
            chat_answer_add(a, end ? NULL : text + at, part, end ? how : CHAT_GOES_ON, &pieces, &n_pieces), 0);
        for (size_t i = 0; i < n_pieces; i++) {
            const oai_piece *q = &pieces[i];
            size_t k = q->kind == OAI_PIECE_TEXT ? 0 : q->kind == OAI_PIECE_REASONING ? 1 : 2 + q->index;
            assert_true(k < 10);
            assert_int_equal(oai_utf8_whole(q->text, q->n_bytes), q->n_bytes);
            assert_true((q->id != NULL) == (q->name != NULL));
            if (q->kind == OAI_PIECE_TOOL_CALL)
                assert_true((q->id != NULL) == (told[k].n == 0 && !told[k].text[1 << 13]));
            if (q->id) told[k].text[1 << 13] = 1; /* begun */
            memcpy(told[k].text + told[k].n, q->text, q->n_bytes);
            told[k].n += q->n_bytes;
        }
        if (end) break;
    }
    assert_int_equal(chat_answer_whole(a, &pieces, &n_pieces), 0);
    out[0] = '\0';
    for (size_t i = 0; i < n_pieces; i++) {
        const oai_piece *q = &pieces[i];
        size_t k = q->kind == OAI_PIECE_TEXT ? 0 : q->kind == OAI_PIECE_REASONING ? 1 : 2 + q->index;
        assert_int_equal(told[k].n, q->n_bytes);
        assert_memory_equal(told[k].text, q->text, q->n_bytes);
        const char *gap = n_out ? "|" : "";
        int w = q->kind == OAI_PIECE_TEXT
                    ? snprintf(out + n_out, sizeof out - n_out, "%s%.*s", gap, (int)q->n_bytes, q->text)
                : q->kind == OAI_PIECE_REASONING
                    ? snprintf(out + n_out, sizeof out - n_out, "%sR:%.*s", gap, (int)q->n_bytes, q->text)
                    : snprintf(out + n_out, sizeof out - n_out, "%sC%zu:%s(%.*s)", gap, q->index, q->name,
                               (int)q->n_bytes, q->text);
        n_out += (size_t)w;
    }
    chat_answer_free(a);
    return out;
}

static inline const char *parse_answer(const chat_plan *p, const char *text, size_t step)
{
    return parse_ended(p, text, step, CHAT_ENDED);
}

#endif
