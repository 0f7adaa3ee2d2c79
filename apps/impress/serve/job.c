#include "job.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void free_logprobs(job_logprob *l)
{
    while (l) {
        job_logprob *next = l->next;
        free(l);
        l = next;
    }
}

static void job_free(job *j)
{
    token_sampler_free(j->sampler);
    chat_grammar_free(j->grammar);
    chat_plan_free(j->plan);
    stop_gate_free(&j->gate);
    oai_buffer_free(&j->text);
    imp_space_close(j->space);
    free_logprobs(j->held_first);
    free_logprobs(j->first);
    free(j->salt);
    pthread_cond_destroy(&j->news);
    pthread_mutex_destroy(&j->lock);
    free(j);
}

job *job_new(const struct llama_vocab *vocab, const job_spec *spec)
{
    job *j = calloc(1, sizeof *j);
    if (!j) {
        chat_grammar_free(spec->grammar);
        chat_plan_free(spec->plan);
        return NULL;
    }
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&j->news, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&j->lock, NULL);
    atomic_init(&j->refs, 2);
    atomic_init(&j->cancelled, false);
    atomic_init(&j->enough, false);
    j->plan = spec->plan;
    j->grammar = spec->grammar;
    j->tokens = chat_plan_tokens(j->plan, &j->n_tokens);
    j->gate.stops = chat_plan_stops(j->plan, &j->gate.n_stops);
    j->max_tokens = spec->max_tokens;
    j->n_logprobs = spec->n_logprobs;
    j->request = spec->request;
    j->cache_off = spec->cache_off;
    j->tenant = spec->tenant;
    j->salt = spec->salt ? strdup(spec->salt) : NULL;
    j->sampler = token_sampler_new(vocab, spec->sampling, j->grammar, j->max_tokens);
    if (!j->sampler || (spec->salt && !j->salt)) {
        job_free(j);
        return NULL;
    }
    return j;
}

void job_hold(job *j) { atomic_fetch_add_explicit(&j->refs, 1, memory_order_relaxed); }

void job_release(job *j)
{
    /* The last one must see what the other wrote before it let go. */
    if (j && atomic_fetch_sub_explicit(&j->refs, 1, memory_order_acq_rel) == 1) job_free(j);
}

/* ---- the asking side */

bool job_take(job *j, int wait_ms, job_news *news)
{
    *news = (job_news){0};
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += wait_ms / 1000;
    until.tv_nsec += (long)(wait_ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    pthread_mutex_lock(&j->lock);
    while (j->text.n == 0 && !j->first && j->end == JOB_RUNNING)
        if (pthread_cond_timedwait(&j->news, &j->lock, &until)) break;
    news->text = j->text;
    news->logprobs = j->first;
    news->end = j->end;
    news->cut = j->cut;
    j->text = (oai_buffer){0};
    j->first = j->last = NULL;
    pthread_mutex_unlock(&j->lock);
    return news->text.n > 0 || news->logprobs || news->end != JOB_RUNNING;
}

void job_news_free(job_news *news)
{
    oai_buffer_free(&news->text);
    free_logprobs(news->logprobs);
    *news = (job_news){0};
}

void job_get_result(job *j, job_result *result, oai_error *error)
{
    pthread_mutex_lock(&j->lock);
    *result = j->result;
    *error = j->error;
    pthread_mutex_unlock(&j->lock);
}

void job_cancel(job *j) { atomic_store(&j->cancelled, true); }

/* ---- the engine's side */

/* With the lock held. */
static void end_locked(job *j, job_end end)
{
    if (j->end != JOB_RUNNING) return;
    j->end = end;
    j->cut = end == JOB_LENGTH || j->gate.stopped;
    j->result.generated_tokens = j->n_generated;
    j->result.total_ns = app_now_ns() - j->asked_ns;
    pthread_cond_signal(&j->news);
}

/* Hand over what the gate lets out, and the log-probabilities of the tokens whose text has begun to go out. */
static void pass_on(job *j, bool all)
{
    pthread_mutex_lock(&j->lock);
    if (j->gate.n_free) oai_buffer_add(&j->text, j->gate.held, j->gate.n_free);
    /* What begins where a stop string does is part of it. A token without text goes with what follows it. */
    while (j->held_first && (j->held_first->start < j->gate.n_released || (all && !j->gate.stopped))) {
        job_logprob *l = j->held_first;
        j->held_first = l->next;
        if (!j->held_first) j->held_last = NULL;
        l->next = NULL;
        if (j->last) j->last->next = l;
        else j->first = l;
        j->last = l;
    }
    if (j->text.n > 0 || j->first) pthread_cond_signal(&j->news);
    pthread_mutex_unlock(&j->lock);
}

void job_finish(job *j, job_end end)
{
    bool ok = stop_gate_add(&j->gate, NULL, 0, true);
    pass_on(j, true);
    pthread_mutex_lock(&j->lock);
    if (!ok || j->text.failed) {
        oai_fail(&j->error, 500, "out_of_memory", NULL, "out of memory");
        end = JOB_FAILED;
    }
    end_locked(j, end);
    pthread_mutex_unlock(&j->lock);
}

void job_fail(job *j, const oai_error *error)
{
    pthread_mutex_lock(&j->lock);
    j->error = *error;
    end_locked(j, JOB_FAILED);
    pthread_mutex_unlock(&j->lock);
}

bool job_ended(job *j)
{
    pthread_mutex_lock(&j->lock);
    bool ended = j->end != JOB_RUNNING;
    pthread_mutex_unlock(&j->lock);
    return ended;
}

enum { MAX_TOP = 20, MAX_PIECE = 512 };

static size_t piece_of(const struct llama_vocab *vocab, llama_token token, bool special, char *buf)
{
    int32_t n = llama_token_to_piece(vocab, token, buf, MAX_PIECE, 0, special);
    return n > 0 ? (size_t)n : 0;
}

/* The chosen token's and the likeliest ones', in one block of memory; NULL: none left. */
static job_logprob *make_logprob(const job *j, const struct llama_vocab *vocab, llama_token token, const float *logits)
{
    llama_token top[MAX_TOP + 1];
    char pieces[MAX_TOP + 1][MAX_PIECE];
    size_t lengths[MAX_TOP + 1], n_vocab = (size_t)llama_vocab_n_tokens(vocab), bytes = 0;
    size_t n_top = sampling_top(logits, n_vocab, (size_t)(j->n_logprobs < MAX_TOP ? j->n_logprobs : MAX_TOP), top);
    double log_sum = sampling_log_sum(logits, n_vocab);
    top[n_top] = token;
    for (size_t i = 0; i <= n_top; i++) {
        lengths[i] = piece_of(vocab, top[i], true, pieces[i]);
        bytes += lengths[i];
    }
    job_logprob *l = calloc(1, sizeof *l + n_top * sizeof(oai_top) + bytes);
    if (!l) return NULL;
    oai_top *tops = (oai_top *)(l + 1);
    char *at = (char *)(tops + n_top);
    for (size_t i = 0; i <= n_top; i++) {
        memcpy(at, pieces[i], lengths[i]);
        if (i < n_top)
            tops[i] = (oai_top){at, lengths[i], (double)logits[top[i]] - log_sum};
        else
            l->value = (oai_logprob){.bytes = at, .n_bytes = lengths[i], .logprob = (double)logits[token] - log_sum,
                                     .top = tops, .n_top = n_top};
        at += lengths[i];
    }
    l->start = j->n_bytes;
    l->value.offset = j->n_chars;
    return l;
}

job_end job_add_token(job *j, const struct llama_vocab *vocab, llama_token token, const float *logits)
{
    j->n_generated++;
    if (llama_vocab_is_eog(vocab, token)) return JOB_STOP;
    if (j->n_logprobs >= 0) {
        job_logprob *l = make_logprob(j, vocab, token, logits);
        if (l) {
            if (j->held_last) j->held_last->next = l;
            else j->held_first = l;
            j->held_last = l;
        }
    }
    char piece[MAX_PIECE];
    size_t n = piece_of(vocab, token, chat_plan_shows(j->plan, token), piece);
    j->n_bytes += n;
    for (size_t i = 0; i < n; i++) j->n_chars += ((unsigned char)piece[i] & 0xc0) != 0x80;
    bool ok = stop_gate_add(&j->gate, piece, n, false);
    pass_on(j, false);
    if (j->gate.stopped || !ok) return JOB_STOP;
    return j->n_generated >= j->max_tokens ? JOB_LENGTH : JOB_RUNNING;
}
