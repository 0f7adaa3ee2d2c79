#include "engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ahead.h"
#include "log.h"
#include "metrics.h"
#include "model.h"

enum {
    MIN_SHARE = 16,    /* fewer tokens in common aren't worth a thought */
    MIN_GAIN = 64,     /* stored tokens beyond the live ones for which a slot is emptied: as the adapter has it */
    FIRST_SLICE = 128, /* tokens, until it is known how fast they are computed */
    LEAST_SLICE = 64,  /* attention over fewer queries is slower on a CPU */
    FULL_RETRY_S = 60, /* the longest time that a client is told to stay away */
    ASK_AGAIN_NS = 1000000000 /* after it the store is asked again for a job that waits for another's prefix */
};

typedef enum slot_state {
    SLOT_FREE,   /* keeps its tokens until another job wants it */
    SLOT_PROMPT, /* its job's prompt is on its way into the cells */
    SLOT_ANSWER
} slot_state;

typedef struct slot {
    llama_seq_id id;
    slot_state state;
    llama_token *tokens; /* [n] in its cells, or noted by the adapter; room for n_ctx */
    size_t n;
    bool partial;        /* the cells hold a selection of the prefix, made for one question, or what was computed over one */
    char *salt;
    uint64_t used_ns;

    job *job;
    imp_lease *lease;    /* keeps what is stored until it is loaded */
    size_t n_noted;      /* tokens from the start that the store has: handed over without being computed */
    size_t n_live;       /* tokens that were in the cells when the job came */
    llama_token next;    /* chosen, not yet computed */
    int32_t output;      /* its place in the batch; -1: none */
    size_t n_share;      /* its tokens in the batch */
} slot;

struct engine {
    engine_opts o;
    const struct llama_vocab *vocab;
    imp_llama *ctx;
    bool uses_store;
    bool cuts; /* what cells hold can be cut, or copied in part; else it can only go on */
    char note[256];
    ahead *ahead;
    pthread_t thread;

    /* The thread's own. */
    slot *slots;               /* [o.n_slots] */
    struct llama_batch batch;
    size_t n_batch;
    llama_token_data *scratch; /* [n_vocab] */
    job *waiting, **waiting_end;
    size_t n_waiting;
    double slice_token_ns;     /* a prompt's token takes so long; 0: not known yet */
    double job_ns;             /* and a job, in its slot */
    unsigned turn;
    bool unsaved;

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t wake;
    job *inbox, **inbox_end;
    size_t n_jobs;        /* handed in, not ended */
    unsigned retry_s;
    bool draining, cut, end, woken;
    enum { OPENING, OPENED, FAILED } opening; /* of all that the thread opens first */
};

/* ------------------------------------------------------------------------------------------------- job's ends ---- */

/* It no longer counts. Before its client can have the end of it, who may ask again at once. */
static void job_leaves(engine *e, const job *j)
{
    pthread_mutex_lock(&e->lock);
    e->n_jobs--;
    if (j->started_ns) {
        double ns = (double)(app_now_ns() - j->started_ns);
        e->job_ns = e->job_ns > 0 ? 0.8 * e->job_ns + 0.2 * ns : ns;
    }
    double wait_s = e->job_ns * (double)e->n_waiting / (double)e->o.n_slots * 1e-9;
    e->retry_s = wait_s < 1 ? 1 : wait_s > FULL_RETRY_S ? FULL_RETRY_S : (unsigned)wait_s;
    pthread_mutex_unlock(&e->lock);
}

static void job_done(job *j)
{
    static const metric_counter ends[] = {
        [JOB_STOP] = METRIC_JOBS_STOP, [JOB_LENGTH] = METRIC_JOBS_LENGTH,
        [JOB_CANCELLED] = METRIC_JOBS_CANCELLED, [JOB_FAILED] = METRIC_JOBS_FAILED};
    metric_add(j->tenant, ends[j->end], 1);
    metric_observe(j->tenant, METRIC_REQUEST_SECONDS, j->result.total_ns);
    if (j->n_generated > 1)
        metric_observe(j->tenant, METRIC_PER_TOKEN_SECONDS, (app_now_ns() - j->first_ns) / (j->n_generated - 1));
    job_release(j);
}

static void finish_job(engine *e, job *j, job_end end)
{
    job_leaves(e, j);
    job_finish(j, end);
    job_done(j);
}

static void fail_job(engine *e, job *j, int status, const char *code, const char *message)
{
    oai_error error = {0};
    oai_fail(&error, status, code, NULL, "%s", message);
    job_leaves(e, j);
    job_fail(j, &error);
    job_done(j);
}

/* Empty a slot's cells. What is unsaved in them is handed to the store first. */
static void clear_slot(engine *e, slot *s)
{
    imp_llama_seq_rm(e->ctx, s->id, -1, -1);
    s->n = 0;
    s->partial = false;
}

/* Take the job out of a slot; what it left in the cells stays for the next one, but for what is only noted: that isn't
 * in cells, and would be loaded as this job wanted it. */
static job *leave_slot(engine *e, slot *s)
{
    job *j = s->job;
    bool noted = s->lease != NULL;
    imp_lease_release(s->lease);
    s->lease = NULL;
    s->job = NULL;
    s->state = SLOT_FREE;
    s->used_ns = app_now_ns();
    if (j->cache_off || noted) clear_slot(e, s);
    if (j->keep_now) imp_llama_flush_seq(e->ctx, s->id);
    e->unsaved = true;
    return j;
}

static void end_slot(engine *e, slot *s, job_end end)
{
    finish_job(e, leave_slot(e, s), end);
}

static void fail_slot(engine *e, slot *s, int status, const char *code, const char *message)
{
    fail_job(e, leave_slot(e, s), status, code, message);
}

/* --------------------------------------------------------------------------------------------------- choosing ---- */

static size_t common(const llama_token *a, size_t n_a, const llama_token *b, size_t n_b)
{
    size_t n = n_a < n_b ? n_a : n_b, i = 0;
    while (i < n && a[i] == b[i]) i++;
    return i;
}

static bool same_salt(const char *a, const char *b) { return a && b ? !strcmp(a, b) : a == b; }

/* Tokens of the job's prompt that slot `s` has in its cells and that may be taken from there. */
static size_t share_of(const engine *e, const slot *s, const job *j)
{
    bool off = j->cache_off || (s->job && s->job->cache_off), noted = s->lease;
    if (off || noted || s->n == 0 || !same_salt(s->salt, j->salt)) return 0;
    size_t n = common(s->tokens, s->n, j->tokens, j->n_tokens - 1);
    /* A selection was made for another question; it serves only the conversation that it was made in. */
    if (s->partial && (s->state != SLOT_FREE || n < s->n || j->request.load.retention >= 1)) n = 0;
    if (!e->cuts && (s->state != SLOT_FREE || n < s->n)) n = 0;
    return n < MIN_SHARE ? 0 : n;
}

/* What the store has of a prompt. The lease is the caller's. */
static size_t stored_of(engine *e, job *j, imp_lease **lease)
{
    imp_prefix_info info;
    *lease = NULL;
    if (!e->uses_store || j->cache_off || j->request.recompute) return 0;
    if (!j->space && imp_llama_open_space(e->ctx, j->salt, &j->space) < 0) {
        log_event("warn", "store", json_pack("{s:s}", "message", imp_last_error()));
        return 0;
    }
    unsigned flags = j->request.use_derived ? IMP_ACQUIRE_DERIVED : 0;
    if (imp_prefix_acquire(j->space, j->tokens, j->n_tokens, flags, lease, &info) < 0) return 0;
    return info.n_matched;
}

/* Another slot is computing tokens of this prompt that are nowhere yet: it will have them soon. */
static bool must_wait(engine *e, job *j)
{
    size_t best = 0;
    if (j->cache_off || j->request.recompute || !e->cuts) return false;
    for (size_t i = 0; i < e->o.n_slots; i++) {
        const slot *s = &e->slots[i];
        if (s->state != SLOT_PROMPT || s->partial || s->job->cache_off || !same_salt(s->salt, j->salt)) continue;
        size_t n = common(s->job->tokens, s->job->n_tokens - 1, j->tokens, j->n_tokens - 1);
        if (n > s->n && n > best) best = n;
    }
    if (best < MIN_GAIN) return false;
    size_t have = 0;
    for (size_t i = 0; i < e->o.n_slots; i++) {
        size_t n = share_of(e, &e->slots[i], j);
        if (n > have) have = n;
    }
    if (have + MIN_GAIN > best) return false;
    uint64_t now = app_now_ns();
    if (j->stored_ns == 0 || now - j->stored_ns > ASK_AGAIN_NS) {
        imp_lease *lease;
        j->stored = stored_of(e, j, &lease);
        j->stored_ns = now;
        imp_lease_release(lease);
    }
    if (j->stored > have) have = j->stored;
    return have + MIN_GAIN <= best;
}

static unsigned busy_beside(const engine *e, const slot *s)
{
    const slot *first = e->slots, *last = first + e->o.n_slots - 1;
    return (unsigned)(s > first && s[-1].state != SLOT_FREE) + (s < last && s[1].state != SLOT_FREE);
}

/* Is it better to take the free slot `a` than `b`? Emptied ones first. Of slots with cells of their own llama.cpp
 * computes only neighbours together, so one beside busy ones, unless that drops cells that no store brings back. Then
 * the one that wasn't used for longest. */
static bool is_freer(const engine *e, const slot *a, const slot *b)
{
    if ((a->n == 0) != (b->n == 0)) return a->n == 0;
    unsigned beside_a = busy_beside(e, a), beside_b = busy_beside(e, b);
    bool goes_by = e->o.n_pool == 0 && (e->uses_store || a->n == 0);
    return goes_by && beside_a != beside_b ? beside_a > beside_b : a->used_ns < b->used_ns;
}

/* The free slot to take; NULL: there is none but `but`. */
static slot *best_free(engine *e, const slot *but)
{
    slot *best = NULL;
    for (size_t i = 0; i < e->o.n_slots; i++) {
        slot *s = &e->slots[i];
        if (s->state == SLOT_FREE && s != but && (!best || is_freer(e, s, best))) best = s;
    }
    return best;
}

/* Where a job goes, and whose cells it takes over (the slot's own, perhaps). False: no slot is free. */
static bool choose_slot(engine *e, const job *j, slot **to, slot **from, size_t *n_share)
{
    slot *best = NULL;
    *n_share = 0;
    for (size_t i = 0; i < e->o.n_slots; i++) {
        size_t n = share_of(e, &e->slots[i], j);
        bool better = n > *n_share || (n == *n_share && n > 0 && best->state != SLOT_FREE &&
                                       e->slots[i].state == SLOT_FREE);
        if (better) {
            best = &e->slots[i];
            *n_share = n;
        }
    }
    *from = best;
    /* A slot that would lose much of another conversation is copied from rather than cut. */
    bool keeps = best && !e->cuts;
    keeps = keeps || (best && best->state == SLOT_FREE && best->n - *n_share <= *n_share / 4 + MIN_GAIN);
    *to = keeps ? best : best_free(e, best);
    if (!*to && best && best->state == SLOT_FREE) *to = best;
    return *to != NULL;
}

/* Cells of the pool that the jobs in slots may come to need, and those that free slots hold. */
static void count_cells(const engine *e, size_t *busy, size_t *idle)
{
    *busy = *idle = 0;
    for (size_t i = 0; i < e->o.n_slots && e->o.n_pool; i++) {
        const slot *s = &e->slots[i];
        if (s->state == SLOT_FREE) *idle += s->n;
        else *busy += s->job->n_tokens + s->job->max_tokens;
    }
}

static bool drop_oldest(engine *e, const slot *but)
{
    slot *oldest = NULL;
    for (size_t i = 0; i < e->o.n_slots; i++) {
        slot *s = &e->slots[i];
        if (s->state == SLOT_FREE && s->n > 0 && s != but && (!oldest || s->used_ns < oldest->used_ns)) oldest = s;
    }
    if (oldest) clear_slot(e, oldest);
    return oldest != NULL;
}

/* --------------------------------------------------------------------------------------------------- starting ---- */

/* Bring the slot to where the job's prompt goes on. */
static bool settle_slot(engine *e, slot *s, const slot *from, size_t n_share, job *j)
{
    if (s == from) {
        if (!imp_llama_seq_rm(e->ctx, s->id, (llama_pos)n_share, -1)) clear_slot(e, s);
        else s->n = n_share;
    } else {
        clear_slot(e, s);
    }
    if (!same_salt(s->salt, j->salt)) {
        char *salt = j->salt ? strdup(j->salt) : NULL;
        if ((j->salt && !salt) || imp_llama_set_salt(e->ctx, s->id, salt) < 0) {
            free(salt);
            return false;
        }
        free(s->salt);
        s->salt = salt;
    }
    if (s != from && n_share > 0) {
        imp_llama_seq_cp(e->ctx, from->id, s->id, 0, (llama_pos)n_share);
        if (imp_llama_seq_pos_max(e->ctx, s->id) + 1 == (llama_pos)n_share) {
            memcpy(s->tokens, j->tokens, n_share * sizeof *s->tokens);
            s->n = n_share;
            metric_add(j->tenant, METRIC_LIVE_COPIES, 1);
        } else {
            clear_slot(e, s);
        }
    }
    return true;
}

/* Of slots with cells of their own, one token of a prompt goes with those of the answers beside it, in a pass of its
 * own: one more makes up for it where the number of the others counts. */
static size_t mixes(const engine *e) { return e->o.n_pool == 0 && e->o.n_slots > 1; }

static void start_job(engine *e, job *j, slot *s, const slot *from, size_t n_share)
{
    s->job = j;
    s->state = SLOT_PROMPT;
    if (e->ahead) j->was_ahead = ahead_take(e->ahead, j);
    j->started_ns = app_now_ns();
    j->result.queue_ns = j->started_ns - j->asked_ns;
    metric_observe(j->tenant, METRIC_QUEUE_SECONDS, j->result.queue_ns);

    /* On a CPU a question of some more tokens may be computed sooner. */
    if (n_share > 0 && e->cuts && !from->partial) {
        size_t n = imp_llama_query_start(e->ctx, j->n_tokens, n_share);
        n_share = n > 0 && n < n_share ? n - mixes(e) : n;
    }
    /* To copy a few tokens from cells of another stream takes as long as to compute them. */
    if (s != from && e->o.n_pool == 0 && n_share < MIN_GAIN) n_share = 0;
    bool ok = settle_slot(e, s, from, n_share, j);
    size_t stored = ok ? stored_of(e, j, &s->lease) : 0;
    s->n_noted = 0;
    if (stored >= s->n + MIN_GAIN) {
        if (s->n > 0) clear_slot(e, s);
        s->n_noted = stored;
    } else {
        imp_lease_release(s->lease);
        s->lease = NULL;
    }
    s->n_live = s->n;
    if (s->n_noted) s->partial = j->request.load.retention < 1; /* until the report says how it was */
    imp_llama_request request = j->request;
    request.recompute = request.recompute || j->cache_off;
    request.store_new = request.store_new && !j->cache_off;
    if (!ok || imp_llama_set_request(e->ctx, s->id, &request) < 0)
        fail_slot(e, s, 500, "engine_failed", imp_last_error());
}

/* Put waiting jobs into slots, oldest first; those that wait for another's prefix let others pass. */
static void start_jobs(engine *e)
{
    for (job **at = &e->waiting; *at;) {
        job *j = *at;
        slot *to, *from;
        size_t n_share, busy, idle, need = e->o.n_pool ? j->n_tokens + j->max_tokens : 0;
        bool start = best_free(e, NULL) != NULL;
        if (start && must_wait(e, j)) {
            if (!j->waited) metric_add(j->tenant, METRIC_PREFIX_WAITS, 1);
            j->waited = true;
            at = &j->next;
            continue;
        }
        count_cells(e, &busy, &idle);
        start = start && busy + need <= e->o.n_pool && choose_slot(e, j, &to, &from, &n_share);
        if (!start) break;
        while (busy + idle + need > e->o.n_pool && drop_oldest(e, from)) count_cells(e, &busy, &idle);
        if (busy + idle + need > e->o.n_pool && from && from->state == SLOT_FREE && to != from) to = from;
        *at = j->next;
        if (!*at) e->waiting_end = at;
        e->n_waiting--;
        start_job(e, j, to, from, n_share);
    }
    for (job *j = e->waiting; j && e->ahead; j = j->next) {
        imp_lease *lease;
        if (j->looked_ahead || j->waited) continue;
        j->looked_ahead = true;
        size_t stored = stored_of(e, j, &lease);
        imp_lease_release(lease);
        if (stored >= MIN_GAIN) ahead_put(e->ahead, j);
    }
}

/* -------------------------------------------------------------------------------------------------- computing ---- */

static void put(engine *e, slot *s, llama_token token, size_t pos, bool output)
{
    int32_t i = e->batch.n_tokens++;
    e->batch.token[i] = token;
    e->batch.pos[i] = (llama_pos)pos;
    e->batch.n_seq_id[i] = 1;
    e->batch.seq_id[i][0] = s->id;
    e->batch.logits[i] = output;
    if (output) s->output = i;
    s->n_share++;
}

static void put_prompt(engine *e, slot *s, size_t n)
{
    s->output = -1;
    s->n_share = 0;
    for (size_t i = 0; i < n; i++) put(e, s, s->job->tokens[s->n + i], s->n + i, s->n + i + 1 == s->job->n_tokens);
}

static void put_answer(engine *e, slot *s)
{
    s->output = -1;
    s->n_share = 0;
    put(e, s, s->next, s->n, true);
}

/* The batch went well: the slot has its share of it. */
static void take_share(const engine *e, slot *s)
{
    for (int32_t i = 0; i < e->batch.n_tokens; i++)
        if (e->batch.seq_id[i][0] == s->id) s->tokens[s->n++] = e->batch.token[i];
}

/* Hand over the tokens that the store has: nothing is computed yet. */
static void feed_noted(engine *e, slot *s)
{
    while (s->n < s->n_noted) {
        size_t n = s->n_noted - s->n < e->n_batch ? s->n_noted - s->n : e->n_batch;
        e->batch.n_tokens = 0;
        put_prompt(e, s, n);
        if (imp_llama_decode(e->ctx, e->batch) != 0) break; /* the rest comes with the slices, and fails there */
        take_share(e, s);
    }
    s->n_noted = 0;
}

static bool is_inexact(const imp_llama_report *r) { return r->way == IMP_LLAMA_WAY_PARTIAL || r->derived_tokens > 0; }

/* Others may look at the slot before the prompt is through. */
static void note_partial(const engine *e, slot *s)
{
    imp_llama_report r;
    if (!e->uses_store || imp_llama_get_report(e->ctx, s->id, &r) < 0) return;
    s->partial = s->partial || is_inexact(&r);
}

/* The prompt's first output is there. */
static void take_report(engine *e, slot *s)
{
    job *j = s->job;
    job_result *r = &j->result;
    size_t n_fed = j->n_tokens - s->n_live;
    imp_llama_get_report(e->ctx, s->id, &r->report);
    /* A report of another prompt: nothing was looked at for this one. */
    if (r->report.prompt_tokens != n_fed) r->report = (imp_llama_report){.query_tokens = n_fed, .mass = 1};
    if (r->report.query_tokens > j->n_tokens) r->report.query_tokens = j->n_tokens;
    size_t cached = j->n_tokens - r->report.query_tokens;
    bool loaded = r->report.way != IMP_LLAMA_WAY_COMPUTED;
    r->prompt_tokens = j->n_tokens;
    r->computed_tokens = r->report.query_tokens;
    r->stored_tokens = loaded ? cached : 0;
    r->live_tokens = loaded ? 0 : cached;
    s->partial = loaded ? is_inexact(&r->report) : s->partial && r->live_tokens > 0;
    j->first_ns = app_now_ns();
    r->ttft_ns = j->first_ns - j->asked_ns;

    const imp_llama_report *p = &r->report;
    metric_add(j->tenant, METRIC_PROMPT_TOKENS, r->prompt_tokens);
    metric_add(j->tenant, METRIC_COMPUTED_TOKENS, r->computed_tokens);
    metric_add(j->tenant, METRIC_CACHED_LIVE, r->live_tokens);
    metric_add(j->tenant, METRIC_CACHED_STORE, r->stored_tokens);
    metric_add(j->tenant,
               p->way == IMP_LLAMA_WAY_WHOLE     ? METRIC_WAY_WHOLE
               : p->way == IMP_LLAMA_WAY_PARTIAL ? METRIC_WAY_PARTIAL
               : r->live_tokens                  ? METRIC_WAY_LIVE
                                                 : METRIC_WAY_COMPUTED,
               1);
    metric_add(j->tenant, METRIC_BYTES_DISK, p->bytes_read);
    metric_add(j->tenant, METRIC_BYTES_HOST, p->host_hit_bytes);
    metric_add(j->tenant, METRIC_BYTES_DEVICE, p->device_hit_bytes);
    metric_add(j->tenant, METRIC_HITS_DISK, p->bytes_read > 0);
    metric_add(j->tenant, METRIC_HITS_HOST, p->host_hit_bytes > 0);
    metric_add(j->tenant, METRIC_HITS_DEVICE, p->device_hit_bytes > 0);
    metric_add(j->tenant, METRIC_IDENTIFY_BYTES, p->identify_bytes);
    metric_add(j->tenant, METRIC_LAYERS_SELECTED, p->n_selected);
    metric_add(j->tenant, METRIC_LAYERS_FALLBACK, p->n_fallback);
    metric_add(j->tenant, METRIC_RETRIES, p->retries);
    metric_add(j->tenant, METRIC_LOOK_AHEAD_USED, j->was_ahead && p->host_hit_bytes + p->device_hit_bytes > 0);
    metric_observe(j->tenant, METRIC_TTFT_SECONDS, r->ttft_ns);
    if (e->uses_store) {
        metric_observe(j->tenant, METRIC_MATCH_SECONDS, p->match_ns);
        metric_observe(j->tenant, METRIC_IDENTIFY_SECONDS, p->identify_ns);
        metric_observe(j->tenant, METRIC_IO_WAIT_SECONDS, p->io_wait_ns);
        metric_observe(j->tenant, METRIC_GATHER_SECONDS, p->gather_ns);
        metric_observe(j->tenant, METRIC_COMPUTE_SECONDS, p->compute_ns);
    }
}

/* The slot's share of the batch was computed. */
static void take_output(engine *e, slot *s)
{
    job *j = s->job;
    take_share(e, s);
    imp_lease_release(s->lease);
    s->lease = NULL;
    if (s->state == SLOT_PROMPT) note_partial(e, s);
    if (s->output < 0) return;
    const float *logits = imp_llama_get_logits_ith(e->ctx, s->output);
    if (!logits) {
        fail_slot(e, s, 500, "engine_failed", "the model gave no logits");
        return;
    }
    if (s->state == SLOT_PROMPT) {
        take_report(e, s);
        s->state = SLOT_ANSWER;
    }
    s->next = token_sampler_next(j->sampler, logits, e->scratch);
    if (s->next == LLAMA_TOKEN_NULL) {
        fail_slot(e, s, 400, "grammar_failed",
                  j->grammar && chat_grammar_failed(j->grammar)
                      ? "the grammar can be read in too many ways to find out in time what may come next"
                      : "the grammar or schema leaves no token that could come next");
        return;
    }
    metric_add(j->tenant, METRIC_GENERATED_TOKENS, 1); /* before the client may have its answer and look */
    job_end end = job_add_token(j, e->vocab, s->next, logits);
    if (end != JOB_RUNNING) end_slot(e, s, end);
}

/* Compute the batch that was put together of `slots`. Where that fails, each slot is tried alone, and those that fail
 * again are given up. `n_prompt`: tokens for the one slot in SLOT_PROMPT among them. */
static void compute(engine *e, slot **slots, size_t n, size_t n_prompt)
{
    e->batch.n_tokens = 0;
    for (size_t i = 0; i < n; i++) {
        if (slots[i]->state == SLOT_ANSWER) put_answer(e, slots[i]);
        else put_prompt(e, slots[i], n_prompt);
    }
    metric_add(METRIC_NOBODY, METRIC_STEPS, 1);
    int32_t rc = imp_llama_decode(e->ctx, e->batch);
    while (rc == 1 && e->o.n_pool && drop_oldest(e, NULL)) rc = imp_llama_decode(e->ctx, e->batch);
    if (rc == 0) {
        for (size_t i = 0; i < n; i++) take_output(e, slots[i]);
        return;
    }
    metric_add(METRIC_NOBODY, METRIC_STEP_FAILURES, 1);
    if (n > 1) {
        for (size_t i = 0; i < n; i++) compute(e, &slots[i], 1, n_prompt);
        return;
    }
    log_event("error", "decode", json_pack("{s:i}", "code", (int)rc));
    clear_slot(e, slots[0]);
    fail_slot(e, slots[0], rc == 1 ? 503 : 500, "engine_failed",
              rc == 1 ? "no cells are left for this request" : "the model failed to compute this request");
}

/* Whose prompt is next: the one that is done soonest; every fourth time the one that has waited longest. */
static slot *next_prompt(engine *e)
{
    slot *next = NULL;
    bool oldest = e->turn++ % 4 == 3;
    for (size_t i = 0; i < e->o.n_slots; i++) {
        slot *s = &e->slots[i];
        if (s->state != SLOT_PROMPT) continue;
        bool better = !next || (oldest ? s->job->asked_ns < next->job->asked_ns
                                       : s->job->n_tokens - s->n < next->job->n_tokens - next->n);
        if (better) next = s;
    }
    return next;
}

static size_t slice_tokens(const engine *e, const slot *s, size_t n_others)
{
    size_t left = s->job->n_tokens - s->n, most = e->n_batch - n_others, n = FIRST_SLICE;
    /* With nobody to be held up a new request would be: but it must wait for less than that anyway. */
    double budget = (double)e->o.slice_ns * (n_others ? 1 : 4);
    if (e->slice_token_ns > 0) n = (size_t)(budget / e->slice_token_ns);
    if (n < LEAST_SLICE + mixes(e)) n = LEAST_SLICE + mixes(e);
    if (left < n + LEAST_SLICE / 2) n = left; /* no tiny rest */
    if (n > left) n = left;
    return n < most ? n : most;
}

static void step(engine *e)
{
    slot *slots[ENGINE_MAX_SLOTS];
    size_t n = 0, n_prompt = 0;
    for (size_t i = 0; i < e->o.n_slots; i++)
        if (e->slots[i].state == SLOT_PROMPT && e->slots[i].n_noted) feed_noted(e, &e->slots[i]);
    slot *prompt = next_prompt(e);
    /* In their order: of slots with cells of their own llama.cpp takes only neighbours together. */
    for (size_t i = 0; i < e->o.n_slots; i++)
        if (e->slots[i].state == SLOT_ANSWER || &e->slots[i] == prompt) slots[n++] = &e->slots[i];
    if (n == 0) return;
    if (prompt) n_prompt = slice_tokens(e, prompt, n - 1);
    bool loads = prompt && prompt->lease;
    uint64_t start = app_now_ns();
    compute(e, slots, n, n_prompt);
    if (n_prompt >= LEAST_SLICE && !loads) {
        double ns = (double)(app_now_ns() - start) / (double)n_prompt;
        e->slice_token_ns = e->slice_token_ns > 0 ? 0.7 * e->slice_token_ns + 0.3 * ns : ns;
    }
}

/* ------------------------------------------------------------------------------------------------- the thread ---- */

/* End what nobody waits for, what took too long, and with `cut` everything. */
static void reap(engine *e, bool refuse_waiting, bool cut)
{
    static const char leaving[] = "the server is shutting down";
    uint64_t now = app_now_ns();
    for (size_t i = 0; i < e->o.n_slots; i++) {
        slot *s = &e->slots[i];
        if (s->state == SLOT_FREE) continue;
        bool late = now - s->job->asked_ns > e->o.limit_ns;
        if (atomic_load(&s->job->cancelled)) end_slot(e, s, JOB_CANCELLED);
        else if (atomic_load(&s->job->enough)) end_slot(e, s, JOB_STOP);
        else if (cut) fail_slot(e, s, 503, "shutting_down", leaving);
        else if (late && s->state == SLOT_ANSWER) end_slot(e, s, JOB_LENGTH);
        else if (late) fail_slot(e, s, 504, "timeout", "the prompt took longer than a request may");
    }
    for (job **at = &e->waiting; *at;) {
        job *j = *at;
        bool cancelled = atomic_load(&j->cancelled), late = now - j->asked_ns > e->o.limit_ns;
        if (!cancelled && !late && !refuse_waiting && !cut) {
            at = &j->next;
            continue;
        }
        *at = j->next;
        if (!*at) e->waiting_end = at;
        e->n_waiting--;
        if (e->ahead) ahead_take(e->ahead, j);
        if (cancelled) {
            finish_job(e, j, JOB_CANCELLED);
        } else {
            fail_job(e, j, 503, late ? "timeout" : "shutting_down",
                     late ? "the request waited longer than it may" : leaving);
        }
    }
}

static void show(const engine *e)
{
    size_t busy = 0, tokens = 0;
    for (size_t i = 0; i < e->o.n_slots; i++) {
        busy += e->slots[i].state != SLOT_FREE;
        tokens += e->slots[i].lease ? 0 : e->slots[i].n; /* noted ones aren't in cells */
    }
    metric_set(METRIC_SLOTS, e->o.n_slots);
    metric_set(METRIC_SLOTS_BUSY, busy);
    metric_set(METRIC_QUEUE_LENGTH, e->n_waiting);
    metric_set(METRIC_LIVE_TOKENS, tokens);
}

static bool is_busy(const engine *e)
{
    for (size_t i = 0; i < e->o.n_slots; i++)
        if (e->slots[i].state != SLOT_FREE) return true;
    return e->waiting != NULL;
}

static int open_context(engine *e)
{
    const struct llama_model *m = e->o.model;
    if (llama_model_has_encoder(m) || !llama_model_has_decoder(m)) return app_fail("this model doesn't continue texts");
    /* Cells behind a sliding window are given away: what is left of a sequence can't stand for its beginning. */
    e->cuts = !llama_model_is_recurrent(m) && !llama_model_is_hybrid(m) && llama_model_n_swa(m) <= 0;
    struct llama_context_params cp = e->o.context;
    /* In a pool a common prefix takes its cells once, and each slot's attention passes over those of all. */
    cp.kv_unified = e->o.n_pool > 0;
    cp.n_ctx = (uint32_t)(e->o.n_pool ? e->o.n_pool : e->o.n_ctx * e->o.n_slots);
    cp.n_seq_max = (uint32_t)e->o.n_slots;
    imp_llama_params params;
    imp_llama_params_init(&params);
    params.store = e->o.store;
    params.model_files = &e->o.model_path;
    params.n_model_files = 1;
    params.request = e->o.request;
    params.widen_query = true;
    if (imp_llama_init(e->o.model, cp, &params, &e->ctx) < 0) return app_fail("%s", imp_last_error());
    if (e->o.store && app_model_unchanged(e->o.model_path)) return 1;
    e->uses_store = e->o.store && imp_llama_get_fit(e->ctx, NULL) != IMP_LLAMA_FIT_NONE;
    const char *why = "";
    if (e->o.store && !e->uses_store) imp_llama_get_fit(e->ctx, &why);
    snprintf(e->note, sizeof e->note, "%s", *why ? why : imp_llama_note(e->ctx, &e->o.request));
    e->n_batch = llama_n_batch(imp_llama_context(e->ctx));
    return 0;
}

static int open_parts(engine *e)
{
    const engine_opts *o = &e->o;
    int rc = open_context(e);
    if (rc) return rc;
    e->slots = calloc(o->n_slots, sizeof *e->slots);
    e->scratch = malloc((size_t)llama_vocab_n_tokens(e->vocab) * sizeof *e->scratch);
    e->batch = llama_batch_init((int32_t)e->n_batch, 0, 1);
    if (!e->slots || !e->scratch || !e->batch.token) return app_fail("out of memory");
    for (size_t i = 0; i < o->n_slots; i++) {
        e->slots[i].id = (llama_seq_id)i;
        e->slots[i].tokens = malloc(o->n_ctx * sizeof *e->slots[i].tokens);
        if (!e->slots[i].tokens) return app_fail("out of memory");
    }
    if (o->look_ahead_bytes && e->uses_store)
        e->ahead = ahead_open((uint32_t)llama_model_n_layer(o->model), o->look_ahead_bytes);
    show(e);
    return 0;
}

/* The context is made here as well, since that computes something: OpenMP keeps a team of threads for each thread that
 * computed, and where there are more of them than processors, none waits for the next piece of work without sleeping. */
static void *run(void *user)
{
    engine *e = user;
    int rc = open_parts(e);
    pthread_mutex_lock(&e->lock);
    e->opening = rc == 0 ? OPENED : FAILED;
    pthread_cond_broadcast(&e->wake);
    pthread_mutex_unlock(&e->lock);
    if (rc) return NULL;
    for (bool end = false; !end;) {
        bool busy = is_busy(e);
        if (!busy && e->unsaved) { /* a quiet moment: answers too go to the store */
            imp_llama_flush(e->ctx);
            e->unsaved = false;
        }
        pthread_mutex_lock(&e->lock);
        while (!busy && !e->inbox && !e->woken && !e->end) pthread_cond_wait(&e->wake, &e->lock);
        e->woken = false;
        if (e->inbox) {
            *e->waiting_end = e->inbox;
            e->waiting_end = e->inbox_end;
            for (job *j = e->inbox; j; j = j->next) e->n_waiting++;
            e->inbox = NULL;
            e->inbox_end = &e->inbox;
        }
        bool draining = e->draining, cut = e->cut || e->end;
        end = e->end;
        pthread_mutex_unlock(&e->lock);
        reap(e, draining, cut);
        start_jobs(e);
        show(e);
        step(e);
        show(e);
    }
    return NULL;
}

/* ---------------------------------------------------------------------------------------- from other threads ---- */

int engine_submit(engine *e, job *j, oai_error *error, unsigned *retry_after_s)
{
    int rc = 0;
    pthread_mutex_lock(&e->lock);
    *retry_after_s = e->retry_s;
    if (e->draining || e->end) {
        rc = oai_fail(error, 503, "shutting_down", NULL, "the server is shutting down");
    } else if (e->n_jobs >= e->o.n_slots + e->o.n_queue) {
        rc = oai_fail(error, 503, "queue_full", NULL, "%zu requests are being answered and %zu wait: come again later",
                      e->o.n_slots, e->o.n_queue);
        metric_add(j->tenant, METRIC_REFUSED, 1);
    } else {
        j->asked_ns = app_now_ns();
        j->next = NULL;
        *e->inbox_end = j;
        e->inbox_end = &j->next;
        e->n_jobs++;
        pthread_cond_signal(&e->wake);
    }
    pthread_mutex_unlock(&e->lock);
    return rc;
}

const char *engine_note(const engine *e) { return e->note; }

static void set_flag(engine *e, bool *flag)
{
    pthread_mutex_lock(&e->lock);
    *flag = true;
    e->woken = true;
    pthread_cond_signal(&e->wake);
    pthread_mutex_unlock(&e->lock);
}

void engine_wake(engine *e) { set_flag(e, &e->woken); }

void engine_drain(engine *e) { set_flag(e, &e->draining); }

void engine_cut(engine *e) { set_flag(e, &e->cut); }

bool engine_draining(engine *e)
{
    pthread_mutex_lock(&e->lock);
    bool draining = e->draining;
    pthread_mutex_unlock(&e->lock);
    return draining;
}

size_t engine_n_jobs(engine *e)
{
    pthread_mutex_lock(&e->lock);
    size_t n = e->n_jobs;
    pthread_mutex_unlock(&e->lock);
    return n;
}

/* ---------------------------------------------------------------------------------------------- open and close ---- */

static void engine_free(engine *e)
{
    ahead_close(e->ahead);
    for (size_t i = 0; e->slots && i < e->o.n_slots; i++) {
        free(e->slots[i].tokens);
        free(e->slots[i].salt);
    }
    imp_llama_free(e->ctx);
    free(e->slots);
    free(e->scratch);
    if (e->batch.token) llama_batch_free(e->batch);
    pthread_cond_destroy(&e->wake);
    pthread_mutex_destroy(&e->lock);
    free(e);
}

int engine_open(const engine_opts *opts, engine **out)
{
    *out = NULL;
    engine *e = calloc(1, sizeof *e);
    if (!e) return app_fail("out of memory");
    e->o = *opts;
    e->vocab = llama_model_get_vocab(opts->model);
    e->waiting_end = &e->waiting;
    e->inbox_end = &e->inbox;
    e->retry_s = 1;
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->wake, NULL);
    if (pthread_create(&e->thread, NULL, run, e) != 0) {
        engine_free(e);
        return app_fail("can't start a thread");
    }
    pthread_mutex_lock(&e->lock);
    while (e->opening == OPENING) pthread_cond_wait(&e->wake, &e->lock);
    bool failed = e->opening == FAILED;
    pthread_mutex_unlock(&e->lock);
    if (failed) {
        pthread_join(e->thread, NULL);
        engine_free(e);
        return 1;
    }
    *out = e;
    return 0;
}

void engine_close(engine *e)
{
    if (!e) return;
    set_flag(e, &e->end);
    pthread_join(e->thread, NULL);
    engine_free(e);
}
