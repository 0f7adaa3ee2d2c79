/* eval.h: the parts of `impress eval`: what is asked for (eval_plan.c), answering (eval_answer.c), results
 * (eval_report.c). eval.c has the options and calls them in this order. */
#ifndef APP_EVAL_H
#define APP_EVAL_H

#include "eval_rows.h"
#include "eval_score.h"
#include "eval_stats.h"
#include "options.h"
#include "store_options.h"
#include "stores.h"
#include "tasks.h"
#include "text.h"

enum { EVAL_NO_SHOTS = INT32_MAX, EVAL_DEFAULT_SHOTS = 8, EVAL_DEFAULT_WARM = 8, EVAL_MAX_VARIANTS = 64 };

typedef struct eval_settings {
    const char *model, *tasks, *task, *systems, *retention, *reference, *scoring, *out, *cache_type;
    opt_texts docs;
    uint64_t shots, limit, warm, n_ctx, n_threads, n_batch, n_ubatch, store_limit;
    bool json, verbose;
    store_settings store;
} eval_settings;

/* A system with its retention. */
typedef struct eval_variant {
    app_system system;
    char settings[512]; /* what changes its results, beside the questions and the model */
    bool plain;         /* recomp: the plain context */
    bool asked;         /* false: it is only the reference */
    imp_llama_request request;
} eval_variant;

typedef struct eval_task {
    char *name;
    task_file file, train;
    size_t n;          /* of file's questions, those that are scored */
    char *prefix;      /* text */
    int64_t shots;     /* -1: a document */
    bool norm;
    eval_question *questions; /* [n] once the model is there */
    eval_question *warm;      /* [n_warm]: train examples beyond the prefix, asked before the scored ones */
    size_t n_warm;
    size_t n_shared;   /* tokens that the prompts of all questions begin with */
    size_t longest;    /* tokens of the longest prompt with its longest choice */
    app_prefix shared;
    bool live;         /* the prefix is in the plain context's cells */
    bool warned;
} eval_task;

typedef struct eval {
    const eval_settings *s;
    eval_variant variants[EVAL_MAX_VARIANTS];
    size_t n_variants;
    size_t reference; /* index of the one that the others are paired with */
    eval_task *tasks;
    size_t n_tasks;
    eval_rows *rows;
    const char *model_name;
    uint64_t model_bytes;
    struct llama_model *model;
    size_t n_vocab;
    const char *dir;  /* of the stores; NULL: in memory, or none */
    imp_store_opts opts;
    app_stores stores;
    imp_llama *plain;
    float *logits;    /* [n_block][n_vocab]: of the reference, for the questions at hand */
    size_t n_block;

    text_progress progress;
    uint64_t start_ns;
    size_t n_done, n_pending;
} eval;

/* Fill variants, and tasks with their files and prefixes. 0 or an exit code after one line, as all below. */
int eval_plan_variants(eval *e, const opt_command *command);
int eval_plan_tasks(eval *e, const opt_command *command);

/* Turn all questions into tokens; checks that they fit. The model must be there. */
int eval_make_questions(eval *e);
/* Answer whatever the rows lack. */
int eval_answer(eval *e);
/* The row of a question under a variant; NULL: there is none yet. */
const eval_outcome *eval_outcome_of(const eval *e, const eval_task *t, size_t question, size_t variant);

/* Print what the rows say. */
int eval_report_json(const eval *e);
int eval_report_tables(const eval *e);

/* The part of a path after its last slash. */
const char *eval_base_name(const char *path);

#endif
