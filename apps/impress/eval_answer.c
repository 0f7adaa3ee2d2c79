#include "eval.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "answer.h"
#include "model.h"

/* ---- questions as tokens */

static int make_questions(const eval *e, eval_task *t)
{
    const eval_settings *s = e->s;
    size_t bound = s->n_ctx ? (size_t)s->n_ctx : (size_t)llama_model_n_ctx_train(e->model);
    t->questions = calloc(t->n, sizeof *t->questions);
    if (!t->questions) return app_fail("out of memory");
    for (size_t i = 0; i < t->n; i++) {
        eval_question *q = &t->questions[i];
        int rc = eval_question_make(e->model, t->prefix, &t->file.items[i], q);
        if (rc) return rc;
        size_t need = q->context.n + q->longest;
        if (need > bound)
            return app_fail("%s:%u: prompt of %zu tokens and choice of %zu are more than %s of %zu%s", t->file.path,
                            q->example->line, q->context.n, q->longest, s->n_ctx ? "--ctx-size" : "the model's context",
                            bound, t->shots > 0 ? " (fewer --shots?)" : "");
        if (need > t->longest) t->longest = need;
        if (i == 0 || q->context.n_prefix < t->n_shared) t->n_shared = q->context.n_prefix;
    }
    return 0;
}

int eval_make_questions(eval *e)
{
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < e->n_tasks; i++) rc = make_questions(e, &e->tasks[i]);
    return rc;
}

/* ---- what is done, and what isn't */

static eval_key key_of(const eval *e, const eval_task *t, const eval_question *q, const eval_variant *v)
{
    return (eval_key){.model = e->model_name, .model_bytes = e->model_bytes, .settings = e->settings, .task = t->name,
                      .system = v->name, .retention = v->request.load.retention, .shots = t->shots, .id = q->example->id,
                      .prompt_hash = q->hash};
}

const eval_outcome *eval_outcome_of(const eval *e, const eval_task *t, size_t question, size_t variant)
{
    eval_key key = key_of(e, t, &t->questions[question], &e->variants[variant]);
    return eval_rows_find(e->rows, &key);
}

/* Whether any variant but the reference lacks the row of a question: then the reference's logits are needed, too. */
static bool others_open(const eval *e, const eval_task *t, size_t question)
{
    for (size_t v = 0; v < e->n_variants; v++)
        if (v != e->reference && !eval_outcome_of(e, t, question, v)) return true;
    return false;
}

/* ---- contexts */

static int open_context(eval *e, imp_store *store, imp_llama **out)
{
    const eval_settings *s = e->s;
    size_t need = 0;
    for (size_t i = 0; i < e->n_tasks; i++)
        if (e->tasks[i].longest > need) need = e->tasks[i].longest;
    struct llama_context_params cp =
        app_context_params(s->n_ctx ? s->n_ctx : need, s->n_batch, s->n_ubatch, s->n_threads, s->cache_type);

    imp_llama_params params;
    imp_llama_params_init(&params);
    params.store = store;
    params.model_files = &s->model;
    params.n_model_files = 1;
    params.request.recompute = !store;
    if (imp_llama_init(e->model, cp, &params, out) < 0) return app_fail("%s", imp_last_error());
    if (params.store && app_model_unchanged(e->s->model)) return 1;
    const char *why = "";
    if (store && imp_llama_get_fit(*out, &why) != IMP_LLAMA_FIT_FULL) fprintf(stderr, "impress: note: %s\n", why);
    return 0;
}

/* Whatever isn't done yet decides which contexts are needed. */
static int open_contexts(eval *e)
{
    bool loading = false, plain = false;
    for (size_t k = 0; k < e->n_tasks; k++) {
        const eval_task *t = &e->tasks[k];
        for (size_t i = 0; i < t->n; i++) {
            for (size_t v = 0; v < e->n_variants; v++) {
                bool open = eval_outcome_of(e, t, i, v) == NULL;
                e->n_pending += open;
                if (!open && !(v == e->reference && others_open(e, t, i))) continue;
                *(e->variants[v].plain ? &plain : &loading) = true;
            }
        }
    }
    int rc = 0;
    if (loading) rc = open_context(e, e->store, &e->loading);
    if (rc == 0 && plain) rc = open_context(e, NULL, &e->plain);
    for (size_t v = 0; rc == 0 && e->loading && v < e->n_variants; v++)
        if (!e->variants[v].plain && imp_llama_set_request(e->loading, 0, &e->variants[v].request) < 0)
            rc = app_fail("--systems %s: %s", e->variants[v].name, imp_last_error());
    return rc;
}

/* ---- the prefix */

static app_prompt shared_prefix(const eval_task *t)
{
    return (app_prompt){.tokens = t->questions[0].context.tokens, .n = t->n_shared, .n_prefix = t->n_shared};
}

/* The prefix into the store, unless it is there. A store that can't take it shows in every later figure: it is said. */
static int store_prefix(eval *e, eval_task *t)
{
    if (t->stored || t->n_shared == 0) return 0;
    app_prompt prefix = shared_prefix(t);
    app_row row = {0};
    imp_llama_clear(e->loading);
    imp_llama_request request;
    imp_llama_request_init(&request);
    if (imp_llama_set_request(e->loading, 0, &request) < 0) return app_fail("%s", imp_last_error());
    int rc = app_prefill(e->loading, &prefix, 0, &row);
    if (rc) return rc;
    if (imp_llama_flush(e->loading) < 0 || imp_store_flush(e->store) < 0)
        fprintf(stderr, "impress: note: the prefix of %s is not stored: %s\n", t->name, imp_last_error());
    t->stored = true;
    return 0;
}

/* The prefix into the plain context's cells, where it stays for the whole task; what came after it goes. */
static int compute_prefix(eval *e, eval_task *t)
{
    if (t->live && imp_llama_seq_rm(e->plain, 0, (llama_pos)t->n_shared, -1)) return 0;
    for (size_t i = 0; i < e->n_tasks; i++) e->tasks[i].live = false;
    imp_llama_clear(e->plain);
    app_prompt prefix = shared_prefix(t);
    app_row row = {0};
    int rc = t->n_shared ? app_prefill(e->plain, &prefix, 0, &row) : 0;
    t->live = rc == 0;
    return rc;
}

/* ---- one question */

/* Read a question in the plain context, behind the prefix. */
static int read_plain(eval *e, const eval_task *t, const eval_question *q, imp_llama_report *report)
{
    *report = (imp_llama_report){.mass = 1};
    return eval_read_question(e->plain, q, t->n_shared);
}

/* Read prefix and question in an empty context that knows the store, with the report of what that took. */
static int read_loading(eval *e, eval_task *t, const eval_question *q, const eval_variant *v, imp_llama_report *report)
{
    imp_llama_clear(e->loading);
    imp_llama_request request = v->request;
    request.max_match = t->n_shared;
    request.recompute = t->n_shared == 0; /* max_match 0 would be no bound */
    if (imp_llama_set_request(e->loading, 0, &request) < 0) return app_fail("%s", imp_last_error());
    int rc = eval_read_question(e->loading, q, 0);
    if (rc) return rc;
    if (imp_llama_get_report(e->loading, 0, report) < 0) return app_fail("%s", imp_last_error());
    if (report->way == IMP_LLAMA_WAY_COMPUTED) report->mass = 1;
    /* Under a partial load a few of the prefix's last tokens are computed with a short question, by design. */
    if (report->matched_tokens * 2 < t->n_shared && !t->warned) {
        text_progress_end(&e->progress);
        fprintf(stderr, "impress: note: %s: only %zu of the prefix's %zu tokens are loaded, the rest is computed\n",
                t->name, report->matched_tokens, t->n_shared);
        t->warned = true;
    }
    return 0;
}

static void show_progress(eval *e, const eval_task *t, const eval_variant *v)
{
    char detail[128], left[32] = "";
    if (e->n_done > 0) {
        double s = (double)(app_now_ns() - e->start_ns) / 1e9 / (double)e->n_done * (double)(e->n_pending - e->n_done);
        if (s < 90) snprintf(left, sizeof left, ", %.0f s left", s);
        else if (s < 5400) snprintf(left, sizeof left, ", %.0f min left", s / 60);
        else snprintf(left, sizeof left, ", %.1f h left", s / 3600);
    }
    snprintf(detail, sizeof detail, "%zu of %zu%s (%s, %s %g)", e->n_done, e->n_pending, left, t->name, v->name,
             v->request.load.retention);
    text_progress_at(&e->progress, (double)e->n_done / (double)e->n_pending, detail);
}

/* Answer one question under one system, compare with the reference's logits, keep the row. `score` false: only the
 * logits are wanted, the row is there. */
static int answer_question(eval *e, eval_task *t, const eval_question *q, const eval_variant *v, bool score)
{
    imp_llama *ctx = v->plain ? e->plain : e->loading;
    imp_llama_report report;
    bool same;
    eval_outcome outcome = {.answer = q->example->answer};
    double logprobs[TASK_MAX_CHOICES], norm[TASK_MAX_CHOICES];

    if (score) show_progress(e, t, v);
    int rc = v->plain ? compute_prefix(e, t) : store_prefix(e, t);
    uint64_t start = app_now_ns();
    if (rc == 0) rc = v->plain ? read_plain(e, t, q, &report) : read_loading(e, t, q, v, &report);
    const float *logits = rc == 0 ? app_logits(ctx) : NULL;
    if (!logits) return 1;
    double ms = (double)(app_now_ns() - start) / 1e6;
    if (v == &e->variants[e->reference]) memcpy(e->logits, logits, e->n_vocab * sizeof *e->logits);
    else outcome.kl = app_kl(e->logits, logits, e->n_vocab, &same);
    if (!score) return 0;

    if ((rc = eval_score_choices(ctx, q, logprobs)) != 0) return rc;
    for (size_t i = 0; i < q->example->n_choices; i++) norm[i] = logprobs[i] / q->choices[i].characters;
    outcome.choice_sum = eval_best(logprobs, q->example->n_choices);
    outcome.choice_norm = eval_best(norm, q->example->n_choices);
    outcome.mass = report.mass;
    outcome.identify_bytes = report.identify_bytes;
    outcome.bytes_read = report.bytes_read;
    eval_detail detail = {.logprobs = logprobs, .n_choices = q->example->n_choices, .prefix_tokens = t->n_shared,
                          .matched_tokens = report.matched_tokens, .loaded_tokens = report.loaded_tokens, .ms = ms};
    eval_key key = key_of(e, t, q, v);
    char error[EVAL_ERROR_BYTES];
    if (eval_rows_add(e->rows, &key, &outcome, &detail, error) < 0) return app_fail("%s", error);
    e->n_done++;
    return 0;
}

int eval_answer(eval *e)
{
    int rc = open_contexts(e);
    e->start_ns = app_now_ns();
    for (size_t k = 0; k < e->n_tasks; k++) {
        eval_task *t = &e->tasks[k];
        for (size_t i = 0; rc == 0 && i < t->n; i++) {
            const eval_question *q = &t->questions[i];
            bool open = eval_outcome_of(e, t, i, e->reference) == NULL;
            if (open || others_open(e, t, i)) rc = answer_question(e, t, q, &e->variants[e->reference], open);
            for (size_t v = 0; rc == 0 && v < e->n_variants; v++)
                if (!eval_outcome_of(e, t, i, v)) rc = answer_question(e, t, q, &e->variants[v], true);
        }
    }
    text_progress_end(&e->progress);
    return rc;
}
