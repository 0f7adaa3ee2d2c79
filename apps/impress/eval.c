/* impress eval: how well the systems answer, on multiple-choice questions with a shared prefix.
 *
 * The prefix of a task is computed once, and copied into a store for each way of keeping it (stores.h). Then, system by
 * system, caches and history are warmed with the same train examples; for each question the prefix is brought back for
 * the question's tokens, and all choices are scored over what that brought. `recomp` has a plain context of its own,
 * where the prefix stays in its cells and only the tail of each question is removed. Every answer is paired with the
 * reference's to the same question. */
#include "eval.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "commands.h"
#include "model.h"

#define AT(field) offsetof(eval_settings, field)
static const opt options[] = {
    {"model", 'm', OPT_TEXT, AT(model), "FILE", "the model, a GGUF file", false},
    {"tasks", 0, OPT_TEXT, AT(tasks), "DIR", "folder of task files: NAME.val.jsonl, NAME.train.jsonl", false},
    {"task", 0, OPT_TEXT, AT(task), "LIST",
     "names in that folder, or files, separated by commas\n(default: all that are there)", true},
    {"shots", 0, OPT_COUNT, AT(shots), "N", "examples in the few-shot prefix (default: 8)", true},
    {"doc", 0, OPT_TEXTS, AT(docs), "FILE",
     "a document as prefix, with the questions on it from\nquestions.jsonl or --task FILE; may be given several\n"
     "times", true},
    {"systems", 's', OPT_TEXT, AT(systems), "LIST",
     "systems to compare, each NAME or NAME+SWITCH=VALUE...\n(default: recomp,as,as-h2o-lru,impress)", true},
    {"retention", 'r', OPT_TEXT, AT(retention), "LIST",
     "shares of the prefix's tokens that each layer gets, over\n"
     "0 to 1, for systems that choose (default: 0.25);\n"
     "auto[:MASS[:LEAST-MOST]]: as few as hold so much of the\nattention (0.9), and between those bounds (0.05-0.5)", false},
    {"warm", 0, OPT_COUNT, AT(warm), "N",
     "train examples asked before the scored questions, so that\n"
     "caches and history know the prefix (default: 8)", true},
    {"limit", 0, OPT_COUNT, AT(limit), "N", "only the first N questions of each task", true},
    {"scoring", 0, OPT_TEXT, AT(scoring), "HOW",
     "the answer is the choice with the highest\nlog-likelihood (sum), or that for each character (norm);\n"
     "auto (default): norm for piqa, openbookqa and\ndocuments, else sum", false},
    {"reference", 0, OPT_TEXT, AT(reference), "NAME", "what systems are paired with: as (default) or recomp", false},
    {"out", 'o', OPT_TEXT, AT(out), "FILE",
     "append a row for each question to FILE; what it holds\nalready is not computed again", true},
    {"json", 0, OPT_FLAG, AT(json), NULL, "print one object per system and task as JSON", true},
    {"store", 0, OPT_TEXT, AT(store.dir), "DIR",
     "folder of the stores, one for each way to keep a prefix\n"
     "(default: ~/.cache/impress/eval); `none`: in memory, see\n--host-cache", true},
    {"store-limit", 0, OPT_SIZE, AT(store_limit), "SIZE",
     "size limit of each of them (default: its\nown; 10G where it has none)", false},
    STORE_OPTS_HOW(eval_settings),
    REQUEST_OPTS(eval_settings),
    {"ctx-size", 'c', OPT_COUNT, AT(n_ctx), "N", "context, tokens (default: as the prompts need)", false},
    {"threads", 't', OPT_COUNT, AT(n_threads), "N", "threads (default: one a core)", false},
    {"batch-size", 'b', OPT_COUNT, AT(n_batch), "N", "tokens a decode call (default: 2048)", false},
    {"ubatch-size", 'u', OPT_COUNT, AT(n_ubatch), "N", "tokens a pass (default: 512)", false},
    {"cache-type", 0, OPT_TEXT, AT(cache_type), "TYPE", "the cache's type: f16 (default) or q8_0", false},
    {"verbose", 'v', OPT_FLAG, AT(verbose), NULL, "show llama.cpp's log and ours", false},
};

const opt_command eval_command = {
    "eval",
    "eval -m MODEL.gguf --tasks DIR [--task LIST] [OPTIONS]",
    "Measure accuracy: multiple-choice questions on a shared prefix, answered by log-likelihood under\n"
    "several systems, each paired with the answer over the whole prefix.",
    "examples:\n"
    "  impress eval -m smollm2.gguf --tasks examples/tasks\n"
    "  impress eval -m smollm2.gguf --tasks data --task copa,rte --shots 16 -r 0.5,0.25 --out rows.jsonl\n"
    "  impress eval -m smollm2.gguf --doc handbook.txt --task questions.jsonl\n\n"
    "docs/eval.md describes the task files and every figure.",
    options,
    sizeof options / sizeof *options,
};

const char *eval_base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static int check(const eval_settings *s)
{
    if (!s->model) return opt_misuse(&eval_command, "no model: -m MODEL.gguf");
    if (!s->tasks && !s->task && s->docs.n == 0) return opt_misuse(&eval_command, "no questions: --tasks DIR");
    if (s->docs.n && s->shots != EVAL_NO_SHOTS)
        return opt_misuse(&eval_command, "--doc and --shots exclude each other");
    if (strcmp(s->scoring, "auto") && strcmp(s->scoring, "sum") && strcmp(s->scoring, "norm"))
        return opt_misuse(&eval_command, "--scoring: `%s` is not one of auto, sum, norm", s->scoring);
    if (strcmp(s->reference, "as") && strcmp(s->reference, "recomp"))
        return opt_misuse(&eval_command, "--reference: `%s` is not one of as, recomp", s->reference);
    if (s->cache_type && strcmp(s->cache_type, "f16") && strcmp(s->cache_type, "q8_0"))
        return opt_misuse(&eval_command, "--cache-type: `%s` is not one of f16, q8_0", s->cache_type);
    if (s->n_batch == 0 || s->n_ubatch == 0) return opt_misuse(&eval_command, "a batch of 0 tokens can't be computed");
    return 0;
}

static int open_files(eval *e)
{
    const eval_settings *s = e->s;
    char error[EVAL_ERROR_BYTES];
    struct stat st;
    if (stat(s->model, &st) != 0) return app_fail("can't read the model %s: %s", s->model, strerror(errno));
    e->model_name = eval_base_name(s->model);
    e->model_bytes = (uint64_t)st.st_size;
    return eval_rows_open(s->out, &e->rows, error) < 0 ? app_fail("%s", error) : 0;
}

static int open_model(eval *e)
{
    int rc = app_model_load(e->s->model, e->s->verbose, &e->model);
    if (rc) return rc;
    e->n_vocab = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(e->model));
    return 0;
}

static void task_free(eval_task *t)
{
    for (size_t i = 0; t->questions && i < t->n; i++)
        if (t->questions[i].example) eval_question_free(&t->questions[i]);
    for (size_t i = 0; t->warm && i < t->n_warm; i++)
        if (t->warm[i].example) eval_question_free(&t->warm[i]);
    free(t->questions);
    free(t->warm);
    app_prefix_free(&t->shared);
    free(t->prefix);
    task_file_free(&t->file);
    task_file_free(&t->train);
    free(t->name);
}

int cmd_eval(int argc, char **argv)
{
    eval_settings s = {.shots = EVAL_NO_SHOTS, .warm = EVAL_DEFAULT_WARM, .n_batch = 2048, .n_ubatch = 512,
                       .systems = "recomp,as,as-h2o-lru,impress", .reference = "as", .scoring = "auto"};
    int n_positional;
    int rc = opt_parse(&eval_command, argc, argv, &s, &n_positional);
    if (rc) return rc == 1 ? 0 : rc;
    if (n_positional) return opt_misuse(&eval_command, "unexpected argument `%s`", argv[1]);
    if ((rc = check(&s)) != 0) return rc;

    eval e = {.s = &s, .stores.lock = -1, .progress = {.label = "answering"}};
    if ((rc = eval_plan_variants(&e, &eval_command)) != 0) return rc;
    if ((rc = store_settings_apply(&eval_command, &s.store, &e.opts)) != 0) return rc;
    e.opts.limit_bytes = s.store_limit;
    bool none = s.store.dir && !strcmp(s.store.dir, "none");
    bool has_store = !none || e.opts.host_cache_bytes > 0 || e.opts.device_cache_bytes > 0;
    for (size_t v = 0; v < e.n_variants && !has_store; v++)
        if (!e.variants[v].plain)
            return opt_misuse(&eval_command,
                              "--store none: %s needs a store, or memory (--host-cache) in place of it",
                              e.variants[v].system.name);

    app_log_show(s.verbose);
    e.dir = none ? NULL : s.store.dir ? s.store.dir : store_default_dir("eval");
    /* Mistakes in files should show before the wait for a model. */
    rc = eval_plan_tasks(&e, &eval_command);
    if (rc == 0) rc = open_files(&e);
    if (rc == 0) rc = open_model(&e);
    if (rc == 0) rc = eval_make_questions(&e);
    if (rc == 0) rc = eval_answer(&e);
    if (rc == 0) rc = s.json ? eval_report_json(&e) : eval_report_tables(&e);

    app_stores_close(&e.stores);
    imp_llama_free(e.plain);
    llama_model_free(e.model);
    for (size_t i = 0; i < e.n_tasks; i++) task_free(&e.tasks[i]);
    free(e.tasks);
    free(e.logits);
    eval_rows_close(e.rows);
    return rc;
}
