/* job.h: one request on its way through the engine. Two sides hold it: the connection that asked, and the engine.
 * What flows from the second to the first goes through job_take(); all else is written by one side before the other
 * sees it. */
#ifndef SERVE_JOB_H
#define SERVE_JOB_H

#include <pthread.h>
#include <stdatomic.h>

#include "answer.h"
#include "chat_template.h"
#include "impress/llama.h"
#include "sampling.h"
#include "stops.h"

typedef enum job_end { JOB_RUNNING, JOB_STOP, JOB_LENGTH, JOB_CANCELLED, JOB_FAILED } job_end;

/* A token's log-probabilities with all that they point to, in one block. */
typedef struct job_logprob {
    struct job_logprob *next;
    size_t start; /* of its text, in bytes of the answer */
    oai_logprob value; /* its offset: in the answer */
} job_logprob;

typedef struct job_result {
    size_t prompt_tokens, live_tokens, stored_tokens, computed_tokens, generated_tokens;
    imp_llama_report report; /* zero where no store is used */
    uint64_t queue_ns, ttft_ns, total_ns; /* from when it was handed in; ttft_ns 0: no token came */
} job_result;

typedef struct job_spec {
    chat_plan *plan;       /* taken over, also by a failure */
    chat_grammar *grammar; /* as well; NULL: none */
    const oai_sampling *sampling;
    size_t max_tokens;     /* at least 1 */
    int n_logprobs;        /* -1: none */
    const char *salt;      /* NULL: of the store without tenants */
    unsigned tenant;       /* whose share of the numbers it counts for: metrics.h */
    imp_llama_request request;
    bool cache_off;        /* computed anew, and not stored */
} job_spec;

typedef struct job {
    /* What was asked; fixed. */
    chat_plan *plan;
    chat_grammar *grammar;
    token_sampler *sampler;
    const llama_token *tokens; /* [n_tokens], of the plan */
    size_t n_tokens, max_tokens;
    int n_logprobs;
    char *salt;
    unsigned tenant;
    imp_llama_request request;
    bool cache_off;
    bool keep_now;   /* what it computes goes to the store at its end, not at the next quiet moment */

    atomic_int refs;
    atomic_bool cancelled; /* nobody waits for it */
    atomic_bool enough;    /* nobody wants more of the answer than there is */

    /* The engine's. */
    struct job *next;
    uint64_t asked_ns, started_ns, first_ns;
    stop_gate gate;
    size_t n_generated, n_bytes, n_chars; /* tokens, bytes and characters of text, made so far */
    job_logprob *held_first, *held_last; /* of tokens whose text is held back */
    imp_space *space; /* of its salt; NULL: no store, or not opened yet */
    bool looked_ahead, waited;
    size_t stored;         /* tokens that the store had of it when it was asked last, while it waited */
    uint64_t stored_ns;
    bool was_ahead;        /* its prefix was read ahead */

    /* ahead.c's, under its lock. */
    uint64_t ahead_bytes;
    bool ahead_over;       /* it isn't worth while any more */

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t news;
    oai_buffer text;
    job_logprob *first, *last;
    bool started;
    job_end end;
    bool cut;
    oai_error error; /* with JOB_FAILED */
    job_result result; /* whole once the first token came, but for generated_tokens and total_ns */
} job;

/* NULL: no memory. Two references: one for each side. */
job *job_new(const struct llama_vocab *vocab, const job_spec *spec);
void job_hold(job *j);
void job_release(job *j);

/* ---- the asking side */

typedef struct job_news {
    oai_buffer text;        /* new text; the taker frees it */
    job_logprob *logprobs;  /* and the tokens it came from: free each */
    job_end end;
    bool cut;               /* with an end: by a limit or a stop string, not by the model */
} job_news;

/* Wait up to `wait_ms` until something is there, and take it. Returns false if nothing came. */
bool job_take(job *j, int wait_ms, job_news *news);
void job_news_free(job_news *news);
/* Once job_take() gave an end, or text. */
void job_get_result(job *j, job_result *result, oai_error *error);
/* Nobody waits any more. */
void job_cancel(job *j);

/* ---- the engine's side */

/* Take in a token that was chosen by `logits` [n_vocab]. Returns how the job is to be ended, or JOB_RUNNING. */
job_end job_add_token(job *j, const struct llama_vocab *vocab, llama_token token, const float *logits);
void job_finish(job *j, job_end end);
/* End it with an error. */
void job_fail(job *j, const oai_error *error);
bool job_ended(job *j);

#endif
