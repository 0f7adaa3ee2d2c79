/* impress bench chat: does a conversation drift when its later turns build on prefixes that were loaded in part?
 *
 * A conversation on a document is held exactly first: document, question, answer, question, answer, ... Then it is held
 * again with the *same* words, each turn fed what the exact one said, and the distributions of the answers' tokens are
 * compared with the exact ones:
 *
 *     whole     each turn loads the whole conversation so far: the control, near 0
 *     partial   each turn loads what matters of the document, and computes the turns before anew over that
 *     derived   the same, but what a turn computed is stored, marked as derived, and the next turn loads what matters
 *               of that, too
 *
 * Each turn starts with empty cells, as after a restart. Stores are in memory: what drifts is no matter of the disk.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "answer.h"
#include "bench.h"
#include "model.h"
#include "report.h"
#include "switches.h"
#include "text.h"

enum { MAX_TURNS = 64, N_WAYS = 3 };

typedef struct chat_settings {
    const char *model, *document, *system;
    opt_texts questions;
    double retention;
    uint64_t n_answer, n_threads;
    bool json, verbose;
    switch_settings switches;
} chat_settings;

#define AT(member) offsetof(chat_settings, member)

static const opt options[] = {
    {"model", 'm', OPT_TEXT, AT(model), "FILE", "the model, a GGUF file", false},
    {"file", 'f', OPT_TEXT, AT(document), "FILE", "the document, a text file", true},
    {"prompt", 'p', OPT_TEXTS, AT(questions), "TEXT", "a question; give one for each turn", true},
    {"system", 's', OPT_TEXT, AT(system), "NAME",
     "the system that loads in part, NAME or NAME+SWITCH=VALUE...\n(default: impress)", false},
    {"retention", 'r', OPT_REAL, AT(retention), "SHARE",
     "share of the tokens that each layer gets, over 0 to 1\n(default: 0.25)", false},
    {"n-predict", 'n', OPT_COUNT, AT(n_answer), "N", "length of an answer, tokens (default: 32)", false},
    {"json", 0, OPT_FLAG, AT(json), NULL, "print a JSON object a line for each way and turn", true},
    {"threads", 't', OPT_COUNT, AT(n_threads), "N", "threads (default: one a core)", false},
    SWITCH_STORE_OPTS(chat_settings, switches),
    SWITCH_REQUEST_OPTS(chat_settings, switches),
    {"verbose", 'v', OPT_FLAG, AT(verbose), NULL, "show llama.cpp's log and ours", false},
};

const opt_command bench_chat_command = {
    "bench chat",
    "bench chat -m MODEL.gguf -f DOCUMENT.txt -p QUESTION -p QUESTION... [OPTIONS]",
    "How far the answers of a long conversation drift when its turns load only a part of what came before:\n"
    "KL of each turn's answer to the exact one, with the turns before computed anew, and with them loaded.",
    "example:\n"
    "  impress bench chat -m smollm2.gguf -f handbook.txt -p \"What is H2?\" -p \"Who may reset it?\" --json",
    options,
    sizeof options / sizeof *options,
};

typedef struct turn {
    size_t before, asked, answered; /* tokens of the conversation before it, with its question, with its answer */
    float *logits;                  /* exact, one row for each token of the answer: [answered - asked][n_vocab] */
} turn;

/* What a way's turn came to. */
typedef struct outcome {
    double kl_first, kl;  /* of the answer's first token, and the mean over all its tokens; nats */
    size_t n_same, n_rows; /* tokens whose likeliest candidate is the exact one's */
    imp_llama_report report;
} outcome;

typedef struct chat {
    const chat_settings *s;
    struct llama_model *model;
    app_prompt words; /* the whole conversation */
    turn turns[MAX_TURNS];
    size_t n_turns, n_vocab;
    outcome outcomes[N_WAYS][MAX_TURNS];
} chat;

static const char *const way_names[N_WAYS] = {"whole", "partial", "derived"};

/* ---- the exact conversation */

static int append(chat *c, const char *text, size_t n_bytes, bool start)
{
    const struct llama_vocab *vocab = llama_model_get_vocab(c->model);
    return app_prompt_append(vocab, &c->words, text, n_bytes, start, false) ? 0 : app_fail("out of memory");
}

static int append_question(chat *c, const char *question)
{
    size_t n = strlen(question) + 40;
    char *text = malloc(n);
    if (!text) return app_fail("out of memory");
    snprintf(text, n, "\n\nQuestion: %s\nAnswer:", question);
    int rc = append(c, text, strlen(text), false);
    free(text);
    return rc;
}

static int append_token(chat *c, llama_token token)
{
    llama_token *more = realloc(c->words.tokens, (c->words.n + 1) * sizeof *more);
    if (!more) return app_fail("out of memory");
    c->words.tokens = more;
    more[c->words.n++] = token;
    return 0;
}

/* Decode tokens [from, to) of the conversation, with logits for the last `n_out` of them, which must fit one batch. */
static int decode(chat *c, imp_llama *ctx, size_t from, size_t to, size_t n_out)
{
    size_t step = llama_n_batch(imp_llama_context(ctx));
    struct llama_batch batch = llama_batch_init((int32_t)step, 0, 1);
    int32_t rc = 0;
    for (size_t at = from, n; rc == 0 && at < to; at += n) {
        n = to - at < step ? to - at : step;
        batch.n_tokens = (int32_t)n;
        for (size_t i = 0; i < n; i++) {
            batch.token[i] = c->words.tokens[at + i];
            batch.pos[i] = (llama_pos)(at + i);
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = at + i + n_out >= to;
        }
        rc = imp_llama_decode(ctx, batch);
    }
    llama_batch_free(batch);
    return rc == 0 ? 0 : app_fail("llama.cpp failed to compute %zu tokens (code %d)", to - from, rc);
}

static int hold_turn(chat *c, imp_llama *ctx, const char *question)
{
    const struct llama_vocab *vocab = llama_model_get_vocab(c->model);
    turn *t = &c->turns[c->n_turns++];
    t->before = c->words.n;
    int rc = append_question(c, question);
    if (rc) return rc;
    t->asked = c->words.n;
    t->logits = malloc(c->s->n_answer * c->n_vocab * sizeof *t->logits);
    if (!t->logits) return app_fail("out of memory");
    rc = decode(c, ctx, c->n_turns == 1 ? 0 : t->before, t->asked, 1);
    for (size_t n = 0; rc == 0; n++) {
        const float *logits = app_logits(ctx);
        if (!logits) return 1;
        memcpy(t->logits + n * c->n_vocab, logits, c->n_vocab * sizeof *logits);
        size_t best = 0;
        for (size_t i = 1; i < c->n_vocab; i++)
            if (logits[i] > logits[best]) best = i;
        bool ends = n + 1 == c->s->n_answer || (n > 0 && llama_vocab_is_eog(vocab, (llama_token)best));
        rc = append_token(c, (llama_token)best);
        if (rc == 0) rc = decode(c, ctx, c->words.n - 1, c->words.n, 1);
        if (ends) break;
    }
    t->answered = c->words.n;
    return rc;
}

static int open_context(chat *c, imp_store *store, size_t n_ctx, imp_llama **out)
{
    struct llama_context_params cp = app_context_params(n_ctx, 2048, 512, c->s->n_threads, NULL);
    imp_llama_params params;
    imp_llama_params_init(&params);
    params.store = store;
    params.model_files = &c->s->model;
    params.n_model_files = 1;
    params.request.recompute = !store;
    return imp_llama_init(c->model, cp, &params, out) < 0 ? app_fail("%s", imp_last_error()) : 0;
}

static int hold(chat *c, size_t n_ctx)
{
    imp_llama *ctx = NULL;
    text_progress progress = {.label = "holding the conversation"};
    int rc = open_context(c, NULL, n_ctx, &ctx);
    for (size_t i = 0; rc == 0 && i < c->s->questions.n; i++) {
        text_progress_at(&progress, (double)i / (double)c->s->questions.n, "exactly");
        rc = hold_turn(c, ctx, c->s->questions.items[i]);
    }
    text_progress_end(&progress);
    imp_llama_free(ctx);
    return rc;
}

/* ---- and again */

static void compare_row(const chat *c, const turn *t, size_t row, const float *logits, outcome *o)
{
    bool same;
    double kl = app_kl(t->logits + row * c->n_vocab, logits, c->n_vocab, &same);
    if (row == 0) o->kl_first = kl;
    o->kl += kl;
    o->n_same += same;
    o->n_rows++;
}

static int turn_again(chat *c, imp_llama *ctx, const turn *t, outcome *o)
{
    imp_llama_clear(ctx);
    int rc = decode(c, ctx, 0, t->asked, 1);
    const float *logits = rc == 0 ? app_logits(ctx) : NULL;
    if (!logits) return 1;
    compare_row(c, t, 0, logits, o);
    if (imp_llama_get_report(ctx, 0, &o->report) < 0) return app_fail("%s", imp_last_error());
    size_t n_answer = t->answered - t->asked;
    rc = decode(c, ctx, t->asked, t->answered, n_answer);
    for (size_t i = 0; rc == 0 && i + 1 < n_answer; i++) {
        logits = imp_llama_get_logits_ith(ctx, (int32_t)i);
        if (!logits) return app_fail("llama.cpp gave no logits for the answer");
        compare_row(c, t, i + 1, logits, o);
    }
    o->kl /= (double)o->n_rows;
    if (rc == 0 && imp_llama_flush(ctx) < 0) rc = app_fail("%s", imp_last_error());
    return rc;
}

static int hold_again(chat *c, size_t way, const app_system *system, size_t n_ctx)
{
    imp_store *store = NULL;
    imp_llama *ctx = NULL;
    imp_store_opts opts;
    imp_store_opts_init(&opts);
    app_system_store(system, &opts);
    opts.flags |= IMP_STORE_MEMORY;
    opts.host_cache_bytes = (uint64_t)8 << 30;
    int rc = imp_store_open(NULL, &opts, &store) < 0 ? app_fail("%s", imp_last_error()) : 0;
    if (rc == 0) rc = open_context(c, store, n_ctx, &ctx);
    if (rc) goto out;

    /* The document comes first, exact. */
    rc = decode(c, ctx, 0, c->turns[0].before, 1);
    if (rc == 0 && (imp_llama_flush(ctx) < 0 || imp_store_flush(store) < 0)) rc = app_fail("%s", imp_last_error());
    imp_llama_request request;
    imp_llama_request_init(&request);
    app_system_request(system, &request);
    request.store_derived = request.use_derived = way == 2;
    if (rc == 0 && imp_llama_set_request(ctx, 0, &request) < 0) rc = app_fail("%s", imp_last_error());
    text_progress progress = {.label = "holding it again"};
    for (size_t i = 0; rc == 0 && i < c->n_turns; i++) {
        text_progress_at(&progress, (double)i / (double)c->n_turns, way_names[way]);
        rc = turn_again(c, ctx, &c->turns[i], &c->outcomes[way][i]);
        if (rc == 0 && imp_store_flush(store) < 0) rc = app_fail("%s", imp_last_error());
    }
    text_progress_end(&progress);
out:
    imp_llama_free(ctx);
    imp_store_close(store);
    return rc;
}

/* ---- the result */

/* One object a line. */
static int print_row(const chat *c, const app_system *system, size_t way, size_t at)
{
    const outcome *o = &c->outcomes[way][at];
    const imp_llama_report *r = &o->report;
    json_t *row = json_pack(
        "{s:s, s:s, s:o, s:s, s:f, s:i, s:f, s:f, s:f, s:I, s:I, s:I, s:I, s:I}", "bench", "chat", "way",
        way_names[way], "model", report_text(c->s->model), "system", system->name, "retention", system->load.retention,
        "turn", (int)at + 1, "kl_first", o->kl_first, "kl", o->kl, "same", (double)o->n_same / (double)o->n_rows,
        "prompt_tokens", (json_int_t)r->prompt_tokens, "matched_tokens", (json_int_t)r->matched_tokens,
        "loaded_tokens", (json_int_t)r->loaded_tokens, "computed_tokens", (json_int_t)r->query_tokens,
        "answer_tokens", (json_int_t)o->n_rows);
    bool bad = !row || json_dumpf(row, stdout, JSON_COMPACT | JSON_REAL_PRECISION(9)) != 0 || putchar('\n') == EOF;
    json_decref(row);
    return bad ? app_fail("can't print the figures") : 0;
}

static int print_json(const chat *c, const app_system *systems)
{
    int rc = 0;
    for (size_t way = 0; way < N_WAYS; way++)
        for (size_t i = 0; rc == 0 && i < c->n_turns; i++) rc = print_row(c, &systems[way], way, i);
    return rc;
}

static int print_table(const chat *c, const app_system *system)
{
    text_table *t = text_table_new(11);
    bool ok = t != NULL;
    static const char *const head[] = {"turn", "tokens", "whole", "partial", "same %", "matched", "computed",
                                       "derived", "same %", "matched", "computed"};
    for (size_t i = 0; ok && i < sizeof head / sizeof *head; i++) ok = text_table_add(t, "%s", head[i]);
    for (size_t i = 0; ok && i < c->n_turns; i++) {
        ok = text_table_add(t, "%zu", i + 1) && text_table_add(t, "%zu", c->turns[i].asked) &&
             text_table_add(t, "%.4f", c->outcomes[0][i].kl);
        for (size_t w = 1; ok && w < N_WAYS; w++) {
            const outcome *o = &c->outcomes[w][i];
            ok = text_table_add(t, "%.4f", o->kl) &&
                 text_table_add(t, "%.0f", 100.0 * (double)o->n_same / (double)o->n_rows) &&
                 text_table_add(t, "%zu", o->report.matched_tokens) && text_table_add(t, "%zu", o->report.query_tokens);
        }
    }
    if (ok) {
        printf("%s at %g %%: KL of each turn's answer to the exact one, nats a token\n", system->name,
               system->load.retention * 100);
        text_table_print(t, stdout);
    }
    text_table_free(t);
    return ok ? 0 : app_fail("out of memory");
}

static int check(const chat_settings *s)
{
    if (!s->model) return opt_misuse(&bench_chat_command, "no model: -m MODEL.gguf");
    if (!s->document) return opt_misuse(&bench_chat_command, "no document: -f DOCUMENT.txt");
    if (s->questions.n == 0) return opt_misuse(&bench_chat_command, "no question: -p QUESTION");
    if (!(s->retention > 0 && s->retention <= 1))
        return opt_misuse(&bench_chat_command, "--retention wants a share over 0 and up to 1, not %g", s->retention);
    if (s->n_answer == 0 || s->n_answer > 512)
        return opt_misuse(&bench_chat_command, "--n-predict wants 1 to 512, not %zu", (size_t)s->n_answer);
    return 0;
}

int bench_chat(int argc, char **argv)
{
    chat_settings s = {.system = "impress", .retention = 0.25, .n_answer = 32};
    int n;
    int rc = opt_parse(&bench_chat_command, argc, argv, &s, &n);
    if (rc) return rc == 1 ? 0 : rc;
    if (n) return opt_misuse(&bench_chat_command, "unexpected argument `%s`", argv[1]);
    rc = check(&s);
    if (rc) return rc;
    app_system systems[N_WAYS];
    char error[SWITCH_ERROR_BYTES];
    if (app_system_make("--system", "as", NULL, 1, &systems[0], error) < 0 ||
        app_system_make("--system", s.system, &s.switches, s.retention, &systems[1], error) < 0)
        return opt_misuse(&bench_chat_command, "%s", error);
    systems[2] = systems[1];
    app_log_show(s.verbose);

    chat c = {.s = &s};
    char *text = NULL;
    size_t n_bytes = 0;
    rc = app_model_load(s.model, s.verbose, &c.model);
    if (rc == 0) rc = app_read_text(s.document, &text, &n_bytes);
    if (rc == 0 && n_bytes == 0) rc = app_fail("the document %s is empty", s.document);
    if (rc == 0) rc = append(&c, text, n_bytes, true);
    size_t n_ctx = 0;
    if (rc == 0) {
        c.n_vocab = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(c.model));
        n_ctx = c.words.n + 64;
        for (size_t i = 0; i < s.questions.n; i++) n_ctx += strlen(s.questions.items[i]) + 16 + s.n_answer;
        if (n_ctx > (size_t)llama_model_n_ctx_train(c.model))
            rc = app_fail("%s: the conversation may be longer than the model's context of %d tokens", s.document,
                          llama_model_n_ctx_train(c.model));
    }
    if (rc == 0) rc = hold(&c, n_ctx);
    for (size_t w = 0; rc == 0 && w < N_WAYS; w++) rc = hold_again(&c, w, &systems[w], n_ctx);
    if (rc == 0) rc = s.json ? print_json(&c, systems) : print_table(&c, &systems[1]);

    for (size_t i = 0; i < c.n_turns; i++) free(c.turns[i].logits);
    app_prompt_free(&c.words);
    free(text);
    llama_model_free(c.model);
    return rc;
}
