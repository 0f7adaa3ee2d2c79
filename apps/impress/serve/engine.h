/* engine.h: many requests on one context of llama.cpp.
 *
 *     connections --engine_submit()--> inbox --> waiting --> slot --> job_take()
 *
 * One thread owns the context. A slot is a sequence: it holds the tokens of its last request until another one
 * takes it. Each step of the thread is one imp_llama_decode() with the next token of every slot that answers, and a
 * slice of the prompt of one slot that doesn't yet: small enough that the others aren't held up for long.
 *
 * A request takes the free slot whose tokens are most like its prompt; or copies the cells of a busy one; or loads
 * what the store has, if that is more. One whose prefix is being computed for another request waits for that: it is
 * computed once. While requests wait, a second thread reads what the store has of their prompts into the host tier. */
#ifndef SERVE_ENGINE_H
#define SERVE_ENGINE_H

#include "job.h"

enum { ENGINE_MAX_SLOTS = 64 };

typedef struct engine engine;

typedef struct engine_opts {
    struct llama_model *model;
    const char *model_path;
    imp_store *store;          /* NULL: none */
    struct llama_context_params context; /* n_ctx and n_seq_max are set by the engine */
    imp_llama_request request; /* of requests that say nothing else */
    size_t n_slots;            /* 1..ENGINE_MAX_SLOTS */
    size_t n_ctx;              /* tokens of one request, prompt and answer */
    size_t n_pool;             /* cells that all slots share; at least n_ctx. 0: each has n_ctx of its own */
    size_t n_queue;            /* requests that may wait */
    uint64_t slice_ns;         /* how long a slice of a prompt may hold up the others, about */
    uint64_t limit_ns;         /* for a request from its arrival to its end */
    uint64_t look_ahead_bytes; /* of prefixes of waiting requests, read into the host tier; 0: none */
} engine_opts;

/* Make the context and start the thread. Returns 0, or 1 after one line on standard error. */
int engine_open(const engine_opts *opts, engine **out);

/* What is done otherwise than the default request says, in this model, as one line; "": nothing. */
const char *engine_note(const engine *e);

/* Queue a job. Returns 0, or -1 with *error and the job left to the caller alone; *retry_after_s: when to come
 * again. */
int engine_submit(engine *e, job *j, oai_error *error, unsigned *retry_after_s);
/* Look for cancelled jobs soon. */
void engine_wake(engine *e);

/* Refuse new jobs and those that wait; those that have a slot go on. */
void engine_drain(engine *e);
bool engine_draining(engine *e);
/* End those as well. */
void engine_cut(engine *e);
size_t engine_n_jobs(engine *e);

/* Stop, hand over to the store what is unsaved, and free. All jobs end first. */
void engine_close(engine *e);

#endif
