#include "eval.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "answer.h"
#include "model.h"

/* ---- questions as tokens */

/* One question, whose prompt takes part in what all share. */
static int make_question(const eval *e, eval_task *t, const char *file, const task_example *example, bool first,
                         eval_question *q)
{
    const eval_settings *s = e->s;
    size_t bound = s->n_ctx ? (size_t)s->n_ctx : (size_t)llama_model_n_ctx_train(e->model);
    int rc = eval_question_make(e->model, t->prefix, example, q);
    if (rc) return rc;
    size_t need = q->context.n + q->longest;
    if (need > bound)
        return app_fail("%s:%u: prompt of %zu tokens and choice of %zu are more than %s of %zu%s", file, example->line,
                        q->context.n, q->longest, s->n_ctx ? "--ctx-size" : "the model's context", bound,
                        t->shots > 0 ? " (fewer --shots?)" : "");
    if (need > t->longest) t->longest = need;
    if (first || q->context.n_prefix < t->n_shared) t->n_shared = q->context.n_prefix;
    return 0;
}

static int make_questions(const eval *e, eval_task *t)
{
    size_t n_train = t->shots > 0 ? t->train.n - (size_t)t->shots : 0;
    size_t most = n_train < e->s->warm ? n_train : (size_t)e->s->warm;
    t->questions = calloc(t->n, sizeof *t->questions);
    t->warm = calloc(most + 1, sizeof *t->warm);
    if (!t->questions || !t->warm) return app_fail("out of memory");
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < t->n; i++)
        rc = make_question(e, t, t->file.path, &t->file.items[i], i == 0, &t->questions[i]);
    for (size_t i = 0; rc == 0 && i < n_train && t->n_warm < most; i++) {
        const task_file one = {.items = &t->train.items[(size_t)t->shots + i], .n = 1};
        if (task_leak(&one, 1, &t->file, t->n)) continue; /* scored: it may not teach anything */
        rc = make_question(e, t, t->train.path, one.items, false, &t->warm[t->n_warm]);
        if (rc == 0) t->n_warm++;
    }
    if (rc) return rc;
    t->shared.tokens = t->questions[0].context.tokens;
    t->shared.n = t->n_shared;
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
    return (eval_key){.model = e->model_name, .model_bytes = e->model_bytes, .settings = v->settings, .task = t->name,
                      .system = v->system.name, .retention = v->request.load.retention, .shots = t->shots,
                      .id = q->example->id, .prompt_hash = q->hash};
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
    return store ? app_model_unchanged(e->s->model) : 0;
}

/* What systems do otherwise than their names say, once for all that say the same. */
static void note_systems(eval *e)
{
    const char *why = "";
    if (imp_llama_get_fit(e->stores.ctx, &why) == IMP_LLAMA_FIT_NONE) fprintf(stderr, "impress: note: %s\n", why);
    for (size_t v = 0; v < e->n_variants; v++) {
        const char *note = imp_llama_note(e->stores.ctx, &e->variants[v].request);
        bool again = v > 0 && !strcmp(e->variants[v].system.name, e->variants[v - 1].system.name);
        if (*note && !again) fprintf(stderr, "impress: note: %s: %s\n", e->variants[v].system.name, note);
    }
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
    if (loading) {
        imp_llama *ctx = NULL;
        rc = app_stores_open(&e->stores, e->dir, &e->opts);
        if (rc == 0) rc = open_context(e, e->stores.source, &ctx);
        if (rc == 0) rc = app_stores_attach(&e->stores, ctx);
        if (rc == 0) note_systems(e);
    }
    if (rc == 0 && plain) rc = open_context(e, NULL, &e->plain);
    for (size_t v = 0; rc == 0 && loading && v < e->n_variants; v++)
        if (!e->variants[v].plain && imp_llama_set_request(e->stores.ctx, 0, &e->variants[v].request) < 0)
            rc = app_fail("--systems %s: %s", e->variants[v].system.name, imp_last_error());
    return rc;
}

/* ---- the prefix */

/* The prefix into the plain context's cells, where it stays for the whole task; what came after it goes. */
static int compute_prefix(eval *e, eval_task *t)
{
    if (t->live && imp_llama_seq_rm(e->plain, 0, (llama_pos)t->n_shared, -1)) return 0;
    for (size_t i = 0; i < e->n_tasks; i++) e->tasks[i].live = false;
    imp_llama_clear(e->plain);
    app_prompt prefix = {.tokens = t->questions[0].context.tokens, .n = t->n_shared, .n_prefix = t->n_shared};
    app_row row = {0};
    int rc = t->n_shared ? app_prefill(e->plain, &prefix, 0, &row) : 0;
    t->live = rc == 0;
    return rc;
}

/* ---- one question */

/* Read a question in the plain context, behind the prefix. */
static int read_plain(eval *e, eval_task *t, const eval_question *q, imp_llama_report *report)
{
    *report = (imp_llama_report){.mass = 1};
    int rc = compute_prefix(e, t);
    return rc ? rc : eval_read_question(e->plain, q, t->n_shared);
}

/* Read prefix and question in an empty context that knows the store, with the report of what that took. */
static int read_loading(eval *e, eval_task *t, const eval_question *q, imp_llama_request request,
                        imp_llama_report *report)
{
    imp_llama *ctx = e->stores.ctx;
    imp_llama_clear(ctx);
    request.max_match = t->n_shared;
    request.recompute = t->n_shared == 0; /* max_match 0 would be no bound */
    if (imp_llama_set_request(ctx, 0, &request) < 0) return app_fail("%s", imp_last_error());
    int rc = eval_read_question(ctx, q, 0);
    if (rc) return rc;
    if (imp_llama_get_report(ctx, 0, report) < 0) return app_fail("%s", imp_last_error());
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
    char detail[256], left[32] = "";
    if (e->n_done > 0) {
        double s = (double)(app_now_ns() - e->start_ns) / 1e9 / (double)e->n_done * (double)(e->n_pending - e->n_done);
        if (s < 90) snprintf(left, sizeof left, ", %.0f s left", s);
        else if (s < 5400) snprintf(left, sizeof left, ", %.0f min left", s / 60);
        else snprintf(left, sizeof left, ", %.1f h left", s / 3600);
    }
    snprintf(detail, sizeof detail, "%zu of %zu%s (%s, %s %g)", e->n_done, e->n_pending, left, t->name, v->system.name,
             v->request.load.retention);
    text_progress_at(&e->progress, (double)e->n_done / (double)e->n_pending, detail);
}

/* Answer one question under one system, compare with the reference's `logits`, or fill them in, and keep the row.
 * `score` false: only the logits are wanted, the row is there. */
static int answer_question(eval *e, eval_task *t, const eval_question *q, const eval_variant *v, float *reference,
                           bool score)
{
    imp_llama_report report;
    bool same;
    eval_outcome outcome = {.answer = q->example->answer};
    double logprobs[TASK_MAX_CHOICES], norm[TASK_MAX_CHOICES];

    if (score) show_progress(e, t, v);
    uint64_t start = app_now_ns();
    int rc = v->plain ? read_plain(e, t, q, &report) : read_loading(e, t, q, v->request, &report);
    imp_llama *ctx = v->plain ? e->plain : e->stores.ctx;
    const float *logits = rc == 0 ? app_logits(ctx) : NULL;
    if (!logits) return 1;
    double ms = (double)(app_now_ns() - start) / 1e6;
    if (v == &e->variants[e->reference]) memcpy(reference, logits, e->n_vocab * sizeof *reference);
    else outcome.kl = app_kl(reference, logits, e->n_vocab, &same);
    if (!score) return 0;

    if ((rc = eval_score_choices(ctx, q, logprobs)) != 0) return rc;
    for (size_t i = 0; i < q->example->n_choices; i++) norm[i] = logprobs[i] / q->choices[i].characters;
    outcome.choice_sum = eval_best(logprobs, q->example->n_choices);
    outcome.choice_norm = eval_best(norm, q->example->n_choices);
    outcome.mass = report.mass;
    outcome.identify_bytes = report.identify_bytes;
    outcome.bytes_read = report.bytes_read;
    outcome.selected = report.n_selected;
    outcome.fallback = report.n_fallback;
    eval_detail detail = {.logprobs = logprobs, .n_choices = q->example->n_choices, .prefix_tokens = t->n_shared,
                          .matched_tokens = report.matched_tokens, .loaded_tokens = report.loaded_tokens, .ms = ms};
    eval_key key = key_of(e, t, q, v);
    char error[EVAL_ERROR_BYTES];
    if (eval_rows_add(e->rows, &key, &outcome, &detail, error) < 0) return app_fail("%s", error);
    e->n_done++;
    return 0;
}

/* ---- all of them */

/* Let a system meet the prefix: its store, with the prefix and nothing else learned, and then the same examples as
 * every other system. */
static int prepare(eval *e, eval_task *t, const eval_variant *v)
{
    app_stores *s = &e->stores;
    imp_llama_report report;
    imp_llama_request request = v->request;
    request.load.record = IMP_RECORD_HISTORY;
    if (v->plain) return 0;
    int rc = app_stores_learn(s, &t->shared, t->name);
    if (rc == 0) rc = app_stores_enter(s, &v->system, true);
    if (rc == 0) rc = app_stores_put(s, &t->shared);
    for (size_t i = 0; rc == 0 && i < t->n_warm && t->n_shared; i++)
        rc = read_loading(e, t, &t->warm[i], request, &report);
    return rc ? rc : app_stores_settle(s, &v->system, &t->shared);
}

/* The questions [first, end) of a task under one variant. */
static int answer_block(eval *e, eval_task *t, size_t variant, size_t first, size_t end)
{
    const eval_variant *v = &e->variants[variant];
    bool prepared = false;
    int rc = 0;
    for (size_t i = first; rc == 0 && i < end; i++) {
        bool open = eval_outcome_of(e, t, i, variant) == NULL;
        if (!open && !(variant == e->reference && others_open(e, t, i))) continue;
        if (!prepared) rc = prepare(e, t, v);
        prepared = true;
        if (rc == 0)
            rc = answer_question(e, t, &t->questions[i], v, e->logits + (i - first) * e->n_vocab, open);
    }
    return rc;
}

int eval_answer(eval *e)
{
    enum { MOST_BYTES = 256 << 20 };
    size_t most = 0;
    for (size_t k = 0; k < e->n_tasks; k++)
        if (e->tasks[k].n > most) most = e->tasks[k].n;
    e->n_block = MOST_BYTES / (e->n_vocab * sizeof *e->logits) + 1;
    if (e->n_block > most) e->n_block = most;
    e->logits = malloc(e->n_block * e->n_vocab * sizeof *e->logits);
    int rc = e->logits ? open_contexts(e) : app_fail("out of memory");
    e->start_ns = app_now_ns();
    for (size_t k = 0; k < e->n_tasks; k++) {
        eval_task *t = &e->tasks[k];
        for (size_t first = 0; rc == 0 && first < t->n; first += e->n_block) {
            size_t end = t->n - first < e->n_block ? t->n : first + e->n_block;
            rc = answer_block(e, t, e->reference, first, end);
            for (size_t v = 0; rc == 0 && v < e->n_variants; v++)
                if (v != e->reference) rc = answer_block(e, t, v, first, end);
        }
    }
    text_progress_end(&e->progress);
    return rc;
}
