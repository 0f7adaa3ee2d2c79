#include "api.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "admin.h"
#include "metrics.h"
#include "retention.h"
#include "ui.h"

enum { LOOK_MS = 200, COMMENT_MS = 10000 }; /* how often a waiting connection looks for its client, and writes to it */

/* -------------------------------------------------------------------------------------- what a request wants ---- */

/* How a request uses the store. Returns 0, or -1 with the error. */
static int make_request(const api *a, const oai_request *q, app_system *system, imp_llama_request *out, oai_error *e)
{
    const oai_impress *i = &q->impress;
    *system = a->system;
    app_retention retention = {.share = i->retention > 0 ? i->retention : a->retention};
    if (i->auto_retention && !(retention_parse(i->auto_retention, &retention) && retention.mass > 0))
        return oai_fail(e, 400, "invalid_value", "impress.retention",
                        "`impress.retention` must be a number, or \"auto[:MASS[:LEAST-MOST]]\"");
    bool asked = i->retention > 0 || i->auto_retention;
    if (i->system || asked) {
        char error[SWITCH_ERROR_BYTES];
        const char *name = i->system ? i->system : a->system.name;
        if (app_system_make("impress.system", name, a->switches, retention.share, system, error) < 0)
            return oai_fail(e, 400, "unknown_system", "impress.system", "%s", error);
        if (asked && retention.share < 1 && !system->chooses && !i->full_load)
            return oai_fail(e, 400, "no_retention", "impress.retention",
                            "system %s loads every token, whatever the retention", system->name);
        if (system->chooses) retention_apply(&retention, &system->load);
        /* The slots tell by it whether a load may be in part. */
        if (retention.mass > 0 && !(system->load.retention < 1)) system->load.retention = 0.999;
    }
    /* One policy for the host tier: a request with another one would empty it. */
    system->load.switches.cache = a->system.load.switches.cache;
    if (i->full_load) {
        system->load.switches.identify = IMP_IDENTIFY_NONE;
        system->load.retention = 1;
        system->load.mass = 0;
    }
    imp_llama_request_init(out);
    app_system_request(system, out);
    bool in_part = out->load.retention < 1 && !out->recompute;
    out->store_derived = out->use_derived = a->derived && in_part;
    out->adaptive = a->adaptive && in_part;
    if (!asked) out->min_partial = a->whole_below;
    return 0;
}

/* The salt of a tenant and of a request together. NULL: none; *failed: no memory. Freed by the caller. A request's alone
 * is as --salt of `impress run`, unless it could be taken for one that a tenant has on the same store. */
static char *make_salt(const char *tenant, const char *salt, bool *failed)
{
    *failed = false;
    bool like = salt && (!strncmp(salt, "name:", 5) || !strncmp(salt, "key:", 4) || (*salt >= '0' && *salt <= '9'));
    if (!tenant && like) tenant = "";
    if (!tenant && !salt) return NULL;
    size_t room = (tenant ? strlen(tenant) : 0) + (salt ? strlen(salt) : 0) + 32;
    char *text = malloc(room);
    if (text && tenant && salt) snprintf(text, room, "%zu:%s/%s", strlen(tenant), tenant, salt);
    else if (text) snprintf(text, room, "%s", tenant ? tenant : salt);
    *failed = !text;
    return text;
}

static int check_length(const api *a, const oai_request *q, size_t n, oai_error *e)
{
    if (n < a->n_ctx) return 0;
    return oai_fail(e, 400, "context_length_exceeded", q->chat ? "messages" : "prompt",
                    "This model's maximum context length is %zu tokens, and one of them is for the answer. However, "
                    "your %s resulted in %zu tokens. Please reduce the length of the %s.",
                    a->n_ctx, q->chat ? "messages" : "prompt", n, q->chat ? "messages" : "prompt");
}

job *api_make_job(const api *a, const http_request *r, const oai_request *q, app_system *system, oai_error *e)
{
    job_spec spec = {.sampling = &q->sampling, .n_logprobs = q->n_logprobs, .cache_off = q->impress.cache_off};
    if (r->tenant) spec.tenant = r->tenant->number;
    size_t n = 0;
    bool failed = false;
    char *salt = NULL;
    job *j = NULL;
    if (q->model && strcmp(q->model, a->model.id)) {
        oai_fail(e, 404, "model_not_found", "model", "the model `%.100s` is not served here; `%.100s` is", q->model,
                 a->model.id);
        return NULL;
    }
    if (make_request(a, q, system, &spec.request, e) || chat_plan_make(a->template, q, &spec.plan, e)) return NULL;
    chat_plan_tokens(spec.plan, &n);
    int rc = check_length(a, q, n, e);
    if (rc == 0) rc = chat_grammar_new(spec.plan, &spec.grammar, e);
    if (rc == 0) salt = make_salt(r->tenant ? r->tenant->salt : NULL, q->impress.salt, &failed);
    if (rc || failed) {
        chat_plan_free(spec.plan);
        chat_grammar_free(spec.grammar);
    } else {
        spec.salt = salt;
        spec.max_tokens = a->n_ctx - n;
        if (q->max_tokens > 0 && (uint64_t)q->max_tokens < spec.max_tokens) spec.max_tokens = (size_t)q->max_tokens;
        j = job_new(a->vocab, &spec);
    }
    if (!j && rc == 0) oai_fail(e, 500, "out_of_memory", NULL, "out of memory");
    free(salt);
    return j;
}

/* ------------------------------------------------------------------------------------------- what it becomes ---- */

/* An answer on its way out. */
typedef struct answer {
    const api *a;
    job *j;
    chat_answer *parser;
    bool chat, stream;
    oai_head head;
    char id[40];
    size_t n_prompt_chars;
    app_system system;

    oai_buffer out; /* of a stream: [n], of which `sent` bytes are gone */
    size_t sent;
    bool begun, ended;
    job_news news;  /* taken, not yet written */
    bool has_news;
    uint64_t wrote_ns;

    job_logprob *first, *last; /* of an answer in one piece: all of them */
    size_t n_logprobs;
} answer;

static void free_list(job_logprob *l)
{
    while (l) {
        job_logprob *next = l->next;
        free(l);
        l = next;
    }
}

static void log_result(const answer *w, http_request *r)
{
    job_result s;
    oai_error e;
    static const char *const ends[] = {"running", "stop", "length", "cancelled", "failed"};
    job_get_result(w->j, &s, &e);
    json_t *fields = json_pack(
        "{s:s, s:I, s:I, s:I, s:I, s:f, s:f, s:f}", "end", ends[w->j->end], "prompt_tokens",
        (json_int_t)s.prompt_tokens, "cached_tokens", (json_int_t)(s.live_tokens + s.stored_tokens), "computed_tokens",
        (json_int_t)s.computed_tokens, "generated_tokens", (json_int_t)s.generated_tokens, "queue_ms",
        (double)s.queue_ns * 1e-6, "ttft_ms", (double)s.ttft_ns * 1e-6, "engine_ms", (double)s.total_ns * 1e-6);
    if (fields) json_object_update(r->log, fields);
    json_decref(fields);
}

static void answer_close(void *stream, http_request *r)
{
    answer *w = stream;
    if (!job_ended(w->j)) {
        job_cancel(w->j);
        engine_wake(w->a->engine);
        /* The line of the log waits for what it came to; the engine looks after its present step. */
        job_news news;
        for (bool ended = false; !ended;) {
            job_take(w->j, LOOK_MS, &news);
            ended = news.end != JOB_RUNNING;
            job_news_free(&news);
        }
    }
    log_result(w, r);
    chat_answer_free(w->parser); /* before the plan, which is the job's */
    job_release(w->j);
    job_news_free(&w->news);
    free_list(w->first);
    oai_buffer_free(&w->out);
    free(w);
}

static const char *way_of(const job_result *s)
{
    switch (s->report.way) {
    case IMP_LLAMA_WAY_WHOLE: return "whole";
    case IMP_LLAMA_WAY_PARTIAL: return "partial";
    case IMP_LLAMA_WAY_COMPUTED: break;
    }
    return s->live_tokens ? "live" : "computed";
}

/* What each layer got, as a share; 0: the question has no meaning. */
static double retention_of(const imp_load_opts *o, const imp_llama_report *p)
{
    if (p->way != IMP_LLAMA_WAY_PARTIAL) return 0;
    return o->mass > 0 && p->matched_tokens ? (double)p->loaded_tokens / (double)p->matched_tokens : o->retention;
}

static oai_report make_report(const answer *w, const http_request *r, const job_result *s, oai_usage *usage)
{
    *usage = (oai_usage){s->prompt_tokens, s->live_tokens + s->stored_tokens, s->generated_tokens};
    const imp_llama_report *p = &s->report;
    return (oai_report){
        .way = way_of(s),
        .reason = s->live_tokens ? NULL : imp_llama_reason_name((int)p->reason),
        .system = w->system.name,
        .retention = retention_of(&w->j->request.load, p),
        .live_tokens = s->live_tokens,
        .loaded_tokens = p->loaded_tokens,
        .computed_tokens = s->computed_tokens,
        .bytes_read = p->bytes_read,
        .queue_ns = s->queue_ns,
        .identify_ns = p->identify_ns,
        .load_ns = p->match_ns + p->io_wait_ns + p->gather_ns,
        .compute_ns = p->compute_ns,
        .ttft_ns = s->ttft_ns,
        .request_id = r->id,
    };
}

static oai_finish finish_of(const answer *w, job_end end)
{
    if (end == JOB_STOP && w->parser && chat_answer_calls(w->parser)) return OAI_TOOL_CALLS;
    return end == JOB_LENGTH ? OAI_LENGTH : OAI_STOP;
}

/* An array of what a list holds. NULL: it is empty, or no memory; the reply goes without. */
static oai_logprob *make_array(answer *w, const job_logprob *l, size_t *n)
{
    *n = 0;
    for (const job_logprob *i = l; i; i = i->next) ++*n;
    oai_logprob *array = *n ? malloc(*n * sizeof *array) : NULL;
    if (!array) *n = 0;
    for (size_t i = 0; i < *n; i++, l = l->next) {
        array[i] = l->value;
        array[i].offset += w->n_prompt_chars;
    }
    return array;
}

/* Take in what came. Returns 0, or -1: no memory. */
static int add_news(answer *w, const oai_piece **pieces, size_t *n)
{
    const oai_buffer *text = &w->news.text;
    chat_end end = w->news.end == JOB_RUNNING ? CHAT_GOES_ON : w->news.cut ? CHAT_CUT : CHAT_ENDED;
    if (chat_answer_add(w->parser, text->data ? text->data : "", text->n, end, pieces, n) < 0) return -1;
    if (end == CHAT_GOES_ON && chat_answer_enough(w->parser)) {
        atomic_store(&w->j->enough, true);
        engine_wake(w->a->engine);
    }
    return 0;
}

/* ---- in one piece */

static void reply_whole(answer *w, http_request *r, http_reply *out)
{
    oai_error e = {0};
    for (bool end = false; !end;) {
        if (!atomic_load(&w->j->cancelled) && http_gone(r)) {
            job_cancel(w->j);
            engine_wake(w->a->engine);
        }
        if (!w->has_news && !job_take(w->j, LOOK_MS, &w->news)) continue;
        w->has_news = false;
        const oai_piece *pieces;
        size_t n;
        end = w->news.end != JOB_RUNNING;
        if (add_news(w, &pieces, &n) < 0)
            oai_fail(&e, 500, "out_of_memory", NULL, "out of memory");
        for (job_logprob *l = w->news.logprobs, *next; l; l = next) {
            next = l->next;
            l->next = NULL;
            if (w->last) w->last->next = l;
            else w->first = l;
            w->last = l;
        }
        w->news.logprobs = NULL;
        job_end how = w->news.end;
        job_news_free(&w->news);
        if (how == JOB_CANCELLED) oai_fail(&e, 499, "cancelled", NULL, "the client went away");
        job_result result;
        oai_error failure;
        if (end) job_get_result(w->j, &result, &failure);
        if (how == JOB_FAILED) e = failure;
        if (!end || e.status) continue;

        oai_usage usage;
        oai_report report = make_report(w, r, &result, &usage);
        size_t n_logprobs;
        oai_logprob *logprobs = make_array(w, w->first, &n_logprobs);
        if (chat_answer_whole(w->parser, &pieces, &n) < 0) {
            oai_fail(&e, 500, "out_of_memory", NULL, "out of memory");
        } else {
            out->status = 200;
            static const oai_logprob none;
            oai_write_reply(&out->body, &w->head, pieces, n, logprobs || w->j->n_logprobs < 0 ? logprobs : &none,
                            n_logprobs, finish_of(w, how), &usage, &report);
        }
        free(logprobs);
    }
    if (e.status) http_error(out, &e);
    if (e.status == 503) out->retry_after = 1;
}

/* ---- as a stream */

static void write_news(answer *w, http_request *r)
{
    job_news *news = &w->news;
    const oai_piece *pieces = NULL;
    size_t n = 0, n_logprobs;
    bool end = news->end != JOB_RUNNING;
    oai_error e = {0};
    if (!w->begun) oai_stream_begin(&w->out, &w->head);
    w->begun = true;
    if (add_news(w, &pieces, &n) < 0)
        oai_fail(&e, 500, "out_of_memory", NULL, "out of memory");
    oai_logprob *logprobs = make_array(w, news->logprobs, &n_logprobs);
    if (!e.status && (n || n_logprobs)) oai_stream_pieces(&w->out, &w->head, pieces, n, logprobs, n_logprobs);
    free(logprobs);
    w->ended = end || e.status;
    if (!w->ended) return;
    job_result result;
    oai_error failure;
    job_get_result(w->j, &result, &failure);
    if (news->end == JOB_FAILED) e = failure;
    if (e.status) {
        static const char done[] = "data: [DONE]\n\n";
        oai_stream_error(&w->out, &e);
        oai_buffer_add(&w->out, done, sizeof done - 1);
        return;
    }
    oai_usage usage;
    oai_report report = make_report(w, r, &result, &usage);
    oai_stream_end(&w->out, &w->head, finish_of(w, news->end), &usage, &report);
}

static ssize_t stream_read(void *stream, http_request *r, char *buf, size_t room)
{
    answer *w = stream;
    while (w->sent == w->out.n) {
        oai_buffer_clear(&w->out);
        w->sent = 0;
        if (w->ended) return 0;
        if (http_gone(r)) return -1;
        if (!w->has_news && !job_take(w->j, LOOK_MS, &w->news)) {
            if (app_now_ns() - w->wrote_ns < (uint64_t)COMMENT_MS * 1000000) continue;
            oai_stream_comment(&w->out);
        } else {
            w->has_news = false;
            if (w->news.end == JOB_CANCELLED) return -1;
            write_news(w, r);
            job_news_free(&w->news);
        }
        if (w->out.failed) return -1;
    }
    w->wrote_ns = app_now_ns();
    size_t n = w->out.n - w->sent < room ? w->out.n - w->sent : room;
    memcpy(buf, w->out.data + w->sent, n);
    w->sent += n;
    return (ssize_t)n;
}

/* Headers go out with the first token: what goes wrong before it is a status of its own. */
static void reply_stream(answer *w, http_request *r, http_reply *out)
{
    while (!w->has_news) {
        w->has_news = job_take(w->j, LOOK_MS, &w->news);
        if (w->has_news || !http_gone(r) || atomic_load(&w->j->cancelled)) continue;
        job_cancel(w->j);
        engine_wake(w->a->engine);
    }
    oai_error e = {0};
    job_result result;
    if (w->news.end == JOB_FAILED) job_get_result(w->j, &result, &e);
    if (w->news.end == JOB_CANCELLED) oai_fail(&e, 499, "cancelled", NULL, "the client went away");
    if (e.status) {
        http_error(out, &e);
        if (e.status == 503) out->retry_after = 1;
        return;
    }
    out->status = 200;
    out->type = "text/event-stream";
    out->read = stream_read;
}

/* --------------------------------------------------------------------------------------------------- endpoints ---- */

static size_t count_chars(const char *s)
{
    size_t n = 0;
    for (; *s; s++) n += ((unsigned char)*s & 0xC0) != 0x80;
    return n;
}

static answer *open_answer(const api *a, const oai_request *q, const app_system *system, job *j)
{
    answer *w = calloc(1, sizeof *w);
    if (!w) return NULL;
    w->a = a;
    w->j = j;
    w->chat = q->chat;
    w->stream = q->stream;
    uint8_t random[12] = {0};
    if (getrandom(random, sizeof random, 0) < 0) memcpy(random, &(uint64_t){app_now_ns()}, 8);
    oai_make_id(q->chat, random, w->id);
    w->head = (oai_head){q->chat, w->id, (int64_t)time(NULL), a->model.id, q->include_usage};
    w->n_prompt_chars = q->prompt ? count_chars(q->prompt) : 0;
    w->system = *system;
    w->parser = chat_answer_new(j->plan);
    w->wrote_ns = app_now_ns();
    if (w->parser) return w;
    free(w);
    return NULL;
}

static void handle_completion(const api *a, http_request *r, http_reply *out, bool chat)
{
    oai_request q;
    oai_error e = {0};
    answer *w = NULL;
    job *j = NULL;
    bool queued = false;
    if (oai_request_parse(chat, r->body, r->n_body, &a->limits, &q, &e)) {
        http_error(out, &e);
        return;
    }
    app_system system;
    j = api_make_job(a, r, &q, &system, &e);
    if (j && !(w = open_answer(a, &q, &system, j))) oai_fail(&e, 500, "out_of_memory", NULL, "out of memory");
    if (w) queued = engine_submit(a->engine, j, &e, &out->retry_after) == 0;
    oai_request_free(&q);
    if (!queued) {
        http_error(out, &e);
        if (w) {
            chat_answer_free(w->parser);
            free(w);
        }
        if (j) { /* both references are ours */
            job_release(j);
            job_release(j);
        }
        return;
    }
    out->retry_after = 0;
    out->stream = w;
    out->close = answer_close;
    if (w->stream) reply_stream(w, r, out);
    else reply_whole(w, r, out);
}

static void handle_chat(void *user, http_request *r, http_reply *out) { handle_completion(user, r, out, true); }

static void handle_text(void *user, http_request *r, http_reply *out) { handle_completion(user, r, out, false); }

static void handle_models(void *user, http_request *r, http_reply *out)
{
    const api *a = user;
    (void)r;
    out->status = 200;
    oai_write_models(&out->body, &a->model, 1);
}

static void handle_model(void *user, http_request *r, http_reply *out)
{
    const api *a = user;
    const char *name = r->path + strlen("/v1/models/");
    if (strcmp(name, a->model.id)) {
        oai_error e = {0};
        oai_fail(&e, 404, "model_not_found", "model", "the model `%.100s` is not served here", name);
        http_error(out, &e);
        return;
    }
    out->status = 200;
    oai_write_model(&out->body, &a->model);
}

/* What is wrong with the store is no reason to send requests elsewhere: they are answered, with less reuse. No line of
 * the log, which names files: anybody may ask. */
static void handle_health(void *user, http_request *r, http_reply *out)
{
    const api *a = user;
    (void)r;
    imp_fault faults[IMP_FAULTS_MAX];
    bool leaving = engine_draining(a->engine);
    int n = a->store ? imp_store_faults(a->store, faults) : 0;
    char text[192];
    out->status = leaving ? 503 : 200;
    snprintf(text, sizeof text, "{\"status\":\"%s\"", leaving ? "shutting_down" : "ok");
    oai_buffer_add(&out->body, text, strlen(text));
    for (int i = 0; i < n; i++) {
        snprintf(text, sizeof text, "%s{\"what\":\"%s\",\"error\":\"%s\",\"failures\":%llu,\"since\":%lld}",
                 i == 0 ? ",\"store_faults\":[" : ",", faults[i].what, imp_status_text(faults[i].status),
                 (unsigned long long)faults[i].n, (long long)faults[i].since_s);
        oai_buffer_add(&out->body, text, strlen(text));
    }
    oai_buffer_add(&out->body, n > 0 ? "]}\n" : "}\n", n > 0 ? 3 : 2);
}

/* A client's key opens the numbers of its own tenant, and no sum that holds others'. */
static void handle_metrics(void *user, http_request *r, http_reply *out)
{
    const api *a = user;
    out->status = 200;
    out->type = "text/plain; version=0.0.4; charset=utf-8";
    if (r->tenant) metric_write_own(&out->body, r->tenant->number);
    else metric_write(&out->body, a->store);
}

static void handle_root(void *user, http_request *r, http_reply *out)
{
    (void)user;
    (void)r;
    out->status = 302;
    out->type = "text/plain";
    out->location = "/ui";
}

const http_route api_routes[] = {
    {"POST", "/v1/chat/completions", HTTP_CLIENT, handle_chat},
    {"POST", "/v1/completions", HTTP_CLIENT, handle_text},
    {"GET", "/v1/models", HTTP_CLIENT, handle_models},
    {"GET", "/v1/models/", HTTP_CLIENT, handle_model},
    {"GET", "/health", HTTP_OPEN, handle_health},
    {"GET", "/metrics", HTTP_CLIENT_OR_ADMIN, handle_metrics},
    {"*", "/admin/", HTTP_ADMIN, admin_handle},
    {"GET", "/ui", HTTP_OPEN, ui_handle},
    {"GET", "/", HTTP_OPEN, handle_root},
};

size_t api_n_routes(void) { return sizeof api_routes / sizeof *api_routes; }
