/* impress run: the main job. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "answer.h"
#include "commands.h"
#include "options.h"
#include "report.h"
#include "retention.h"
#include "store_options.h"
#include "text.h"

typedef struct run_settings {
    store_settings store;
    const char *model, *prefix_file, *system, *salt, *cache_type;
    opt_texts questions;
    const char *retention;
    double temperature;
    uint64_t n_answer, n_ctx, n_threads, n_batch, n_ubatch, seed;
    bool compare, json, raw, store_derived, adaptive, verbose;
    uint64_t whole_below;
} run_settings;

#define AT(member) offsetof(run_settings, member)

static const opt options[] = {
    OPT_GROUP("Prefix and question"),
    {"file", 'f', OPT_TEXT, AT(prefix_file), "FILE", "the prefix, a text file; - is standard input", true},
    {"prompt", 'p', OPT_TEXTS, AT(questions), "TEXT", "the question; may be given several times", true},
    {"raw", 0, OPT_FLAG, AT(raw), NULL, "no chat template: prefix, blank line, question", false},
    {"salt", 0, OPT_TEXT, AT(salt), "TEXT", "keep apart from prefixes stored under another salt", false},
    OPT_GROUP("Model"),
    {"model", 'm', OPT_TEXT, AT(model), "FILE", "the model, a GGUF file", false},
    {"ctx-size", 'c', OPT_COUNT, AT(n_ctx), "N", "context, tokens (default: as the prompt needs)", false},
    {"cache-type", 0, OPT_TEXT, AT(cache_type), "TYPE", "the cache's type: f16 (default) or q8_0", false},
    {"threads", 't', OPT_COUNT, AT(n_threads), "N", "threads (default: one a core)", false},
    {"batch-size", 'b', OPT_COUNT, AT(n_batch), "N", "tokens a decode call (default: 2048)", false},
    {"ubatch-size", 'u', OPT_COUNT, AT(n_ubatch), "N", "tokens a pass (default: 512)", false},
    OPT_GROUP("Answer"),
    {"n-predict", 'n', OPT_COUNT, AT(n_answer), "N", "length of the answer, tokens (default: 128)", false},
    {"temp", 0, OPT_REAL, AT(temperature), "T", "sampling temperature (default: 0, the likeliest token)", false},
    {"seed", 0, OPT_COUNT, AT(seed), "N", "seed of sampling (default: 1)", false},
    {"compare", 0, OPT_FLAG, AT(compare), NULL,
     "ask by recompute, full load and the system, and print\nthe figures side by side", true},
    {"json", 0, OPT_FLAG, AT(json), NULL, "print figures and answer as JSON", true},
    OPT_GROUP("Store"),
    STORE_OPTS(run_settings),
    {"store-derived", 0, OPT_FLAG, AT(store_derived), NULL, "also store what was computed over a partial load", false},
    OPT_GROUP("What is loaded of a stored prefix"),
    {"system", 's', OPT_TEXT, AT(system), "NAME",
     "how the prefix is brought back: NAME or NAME+SWITCH=VALUE...;\n"
     "`impress systems` lists them (default: " DEFAULT_SYSTEM ")", false},
    {"retention", 'r', OPT_TEXT, AT(retention), "SHARE",
     "share of the prefix's tokens that each layer gets, over 0\nto 1 (default: 0.25 for systems that choose);\n"
     "auto[:MASS[:LEAST-MOST]]: as few as hold so much of the\nattention (0.9), and between those bounds (0.05-0.5)", false},
    {"whole-below", 0, OPT_COUNT, AT(whole_below), "N",
     "where no retention is given, load prefixes of fewer tokens\nwhole: a part of them saves little (default: 1024)", false},
    {"adaptive", 0, OPT_FLAG, AT(adaptive), NULL,
     "load in part only where that looks quickest, else whole, and\ncompute what is stored where that looks quicker", false},
    REQUEST_OPTS(run_settings),
    OPT_GROUP("Log and settings"),
    {"verbose", 'v', OPT_FLAG, AT(verbose), NULL, "show llama.cpp's log and ours", false},
};

const opt_command run_command = {
    "run",
    "run -m MODEL.gguf -f PREFIX.txt -p QUESTION [OPTIONS]",
    "Answer a question on a long prefix. The first call with a prefix computes it, answers, and\n"
    "stores its KV; any later call, also in a new process, loads it and answers at once.",
    "examples:\n"
    "  impress run -m smollm2.gguf -f handbook.txt -p \"What does error 17 mean?\"\n"
    "  impress run -m smollm2.gguf -f handbook.txt -p \"Who may reset it?\" -s as\n"
    "  impress run -m smollm2.gguf -f handbook.txt -p \"Who may reset it?\" -r 0.5 --rest q8\n"
    "  impress run -m smollm2.gguf -f handbook.txt -p \"Who may reset it?\" --compare\n\n"
    "--order, --rest, --chunk, --host-cache, --device-cache and --reorder-... belong to the store, and to\n"
    "what is written from then on; a store with other values stays readable. The other switches belong to\n"
    "the request.\n\n"
    "The answer goes to standard output, everything else to standard error. Options may also stand in\n"
    "~/.config/impress/config (name = value) and in the environment (IMPRESS_STORE=...).",
    options,
    sizeof options / sizeof *options,
};

/* How a system is asked for. */
typedef struct run_system {
    app_system system;
    imp_llama_request request;
} run_system;

static int make_system(const char *name, const run_settings *s, const switch_settings *given, run_system *out)
{
    char error[SWITCH_ERROR_BYTES];
    app_retention retention;
    if (!retention_parse(s->retention, &retention))
        return opt_misuse(&run_command, "--retention wants " RETENTION_WANTS ", not `%s`", s->retention);
    if (app_system_make("--system", name, given, retention.share, &out->system, error) < 0)
        return opt_misuse(&run_command, "%s", error);
    if (out->system.chooses) retention_apply(&retention, &out->system.load);
    imp_llama_request_init(&out->request);
    app_system_request(&out->system, &out->request);
    out->request.store_derived = s->store_derived;
    out->request.adaptive = s->adaptive;
    if (!s->retention) out->request.min_partial = s->whole_below;
    return 0;
}

static int check(const run_settings *s)
{
    if (!s->model) return opt_misuse(&run_command, "no model: -m MODEL.gguf");
    if (!s->prefix_file) return opt_misuse(&run_command, "no prefix: -f PREFIX.txt");
    if (s->questions.n == 0) return opt_misuse(&run_command, "no question: -p QUESTION");
    for (size_t i = 0; i < s->questions.n; i++)
        if (s->questions.items[i][strspn(s->questions.items[i], " \t\r\n")] == '\0')
            return opt_misuse(&run_command, "the question is empty");
    if (s->temperature < 0) return opt_misuse(&run_command, "--temp wants 0 or more, not %g", s->temperature);
    if (s->cache_type && strcmp(s->cache_type, "f16") && strcmp(s->cache_type, "q8_0"))
        return opt_misuse(&run_command, "--cache-type: `%s` is not one of f16, q8_0", s->cache_type);
    if (s->n_batch == 0 || s->n_ubatch == 0) return opt_misuse(&run_command, "a batch of 0 tokens can't be computed");
    if (s->n_answer == 0) return opt_misuse(&run_command, "--n-predict wants at least 1");
    return 0;
}

/* Everything one call works with. */
typedef struct run {
    const run_settings *s;
    struct llama_model *model;
    imp_store *store;
    imp_llama *ctx;
    app_prompt *prompts; /* one a question */
    size_t n_prompts;
    app_row *rows;
    size_t n_rows;
    run_system system;
    run_system compared[3]; /* rows name them */
} run;

static int make_prompts(run *r)
{
    const run_settings *s = r->s;
    char *text = NULL;
    size_t n_bytes = 0;
    int rc = app_read_text(s->prefix_file, &text, &n_bytes);
    if (rc == 0 && n_bytes == 0) rc = app_fail("the prefix %s is empty", s->prefix_file);
    if (rc == 0 && !(r->prompts = calloc(s->questions.n, sizeof *r->prompts))) rc = app_fail("out of memory");
    for (size_t i = 0; rc == 0 && i < s->questions.n; i++) {
        rc = app_prompt_make(r->model, text, n_bytes, s->questions.items[i], s->raw, &r->prompts[i]);
        if (rc == 0) r->n_prompts++;
    }
    free(text);
    return rc;
}

static int open_context(run *r, const imp_llama_request *request)
{
    const run_settings *s = r->s;
    size_t longest = 0;
    for (size_t i = 0; i < r->n_prompts; i++)
        if (r->prompts[i].n > longest) longest = r->prompts[i].n;
    size_t need = longest + s->n_answer;
    size_t trained = (size_t)llama_model_n_ctx_train(r->model);
    if (s->n_ctx && need > s->n_ctx)
        return app_fail("%s: prompt of %zu tokens and answer of %zu are more than --ctx-size %zu", s->prefix_file,
                        longest, (size_t)s->n_answer, (size_t)s->n_ctx);
    if (need > trained)
        return app_fail("%s: prompt of %zu tokens and answer of %zu are more than the model's context of %zu",
                        s->prefix_file, longest, (size_t)s->n_answer, trained);

    struct llama_context_params cp =
        app_context_params(s->n_ctx ? s->n_ctx : need, s->n_batch, s->n_ubatch, s->n_threads, s->cache_type);

    imp_llama_params params;
    imp_llama_params_init(&params);
    params.store = r->store;
    params.model_files = &s->model;
    params.n_model_files = 1;
    params.salt = s->salt;
    params.request = *request;
    params.widen_query = true;
    if (imp_llama_init(r->model, cp, &params, &r->ctx) < 0) return app_fail("%s", imp_last_error());
    if (r->store && app_model_unchanged(s->model)) return 1;
    const char *why = "";
    if (r->store && imp_llama_get_fit(r->ctx, &why) == IMP_LLAMA_FIT_NONE) fprintf(stderr, "impress: note: %s\n", why);
    why = imp_llama_note(r->ctx, request);
    if (*why) fprintf(stderr, "impress: note: %s\n", why);
    return 0;
}

static int set_request(run *r, const run_system *system, size_t max_match, bool store_new)
{
    imp_llama_request request = system->request;
    request.max_match = max_match;
    request.store_new = request.store_new && store_new;
    return imp_llama_set_request(r->ctx, 0, &request) < 0 ? app_fail("%s", imp_last_error()) : 0;
}

static app_row *next_row(run *r, const run_system *system)
{
    app_row *row = &r->rows[r->n_rows++];
    row->system = system->system.name;
    row->retention = system->request.load.retention;
    row->mass_asked = (double)system->request.load.mass;
    return row;
}

/* Wait for what is being stored. A store that can't take it is no failure of the request: one line. */
static void settle(run *r)
{
    if (imp_llama_flush(r->ctx) < 0 || (r->store && imp_store_flush(r->store) < 0))
        fprintf(stderr, "impress: note: not stored: %s\n", imp_last_error());
}

/* A static ranking is made from what is stored. */
static int rank(run *r)
{
    const run_system *system = &r->system;
    bool wanted = r->store && system->system.chooses && system->request.load.switches.identify == IMP_IDENTIFY_STATIC &&
                  system->request.load.rank == IMP_RANK_RECONSTRUCTION;
    for (size_t i = 0; wanted && i < r->n_prompts; i++) {
        imp_llama_clear(r->ctx);
        int rc = imp_llama_rank_prefix(r->ctx, 0, r->prompts[i].tokens, r->prompts[i].n_prefix);
        if (rc < 0 && rc != IMP_E_NOTFOUND) return app_fail("%s", imp_last_error());
        if (rc == 0) break; /* questions share the prefix */
    }
    return 0;
}

static int answer_questions(run *r)
{
    const run_settings *s = r->s;
    for (size_t i = 0; i < r->n_prompts; i++) {
        imp_llama_clear(r->ctx);
        int rc = set_request(r, &r->system, 0, true);
        if (rc) return rc;
        app_row *row = next_row(r, &r->system);
        rc = app_prefill(r->ctx, &r->prompts[i], 0, row);
        if (rc == 0)
            rc = app_generate(r->ctx, &r->prompts[i], s->n_answer, s->temperature, (uint32_t)s->seed, !s->json, row);
        if (rc) return rc;
        if (!s->json) report_line(row);
        if (row->report.way != IMP_LLAMA_WAY_COMPUTED) continue;
        settle(r); /* the first with this prefix: ranked behind the answer */
        if ((rc = rank(r)) != 0) return rc;
    }
    settle(r);
    return 0;
}

static size_t shared_tokens(const app_prompt *a, const app_prompt *b)
{
    size_t n = 0;
    while (n < a->n_prefix && n < b->n_prefix && a->tokens[n] == b->tokens[n]) n++;
    return n;
}

/* The reference of every question: [n_prompts][n_vocab] logits. The first is recomputed whole and timed; the later ones
 * are computed over the same live, exactly computed cells, which gives the same answer without the wait. */
static int compute_references(run *r, const run_system *recomp, float *logits, size_t n_vocab)
{
    int rc = set_request(r, recomp, 0, true);
    for (size_t i = 0; rc == 0 && i < r->n_prompts; i++) {
        app_row *row = next_row(r, recomp);
        size_t from = 0;
        if (i > 0) {
            from = shared_tokens(&r->prompts[0], &r->prompts[i]);
            if (!imp_llama_seq_rm(r->ctx, 0, (llama_pos)from, -1)) from = 0, imp_llama_clear(r->ctx);
        }
        rc = app_prefill(r->ctx, &r->prompts[i], from, row);
        const float *got = rc == 0 ? app_logits(r->ctx) : NULL;
        if (!got) return 1;
        memcpy(logits + i * n_vocab, got, n_vocab * sizeof *logits);
        if (i > 0) row->ttft_ns = 0;
        row->compared = true;
        row->top1_same = true;
        if (i == 0) settle(r); /* the prefix must be stored before the others ask for it */
    }
    if (rc == 0) rc = rank(r);
    return rc;
}

static int compare_system(run *r, const run_system *system, const float *reference, size_t n_vocab, bool answer)
{
    const run_settings *s = r->s;
    for (size_t i = 0; i < r->n_prompts; i++) {
        imp_llama_clear(r->ctx);
        /* The question itself may be stored by now: what is compared is the prefix. */
        int rc = set_request(r, system, r->prompts[i].n_prefix, false);
        if (rc) return rc;
        app_row *row = next_row(r, system);
        rc = app_prefill(r->ctx, &r->prompts[i], 0, row);
        const float *got = rc == 0 ? app_logits(r->ctx) : NULL;
        if (!got) return 1;
        row->kl = app_kl(reference + i * n_vocab, got, n_vocab, &row->top1_same);
        row->compared = true;
        if (!answer) continue;
        if (!s->json) printf("%s%s (%s)\n", i ? "\n" : "", s->questions.items[i], system->system.name);
        rc = app_generate(r->ctx, &r->prompts[i], s->n_answer, s->temperature, (uint32_t)s->seed, !s->json, row);
        if (rc) return rc;
    }
    return 0;
}

static int compare(run *r)
{
    run_system *systems = r->compared;
    size_t n_systems = 0;
    /* The reference is the preset, but for the precision that it reads. */
    switch_settings full = {.text = {[SWITCH_REST] = r->s->store.switches.text[SWITCH_REST]}};
    int rc = make_system("recomp", r->s, NULL, &systems[n_systems++]);
    if (rc == 0) rc = make_system("as", r->s, &full, &systems[n_systems++]);
    if (rc) return rc;
    systems[1].request.adaptive = false; /* a full load, whatever it costs */
    if (strcmp(r->system.system.name, systems[1].system.name) && !r->system.system.recompute)
        systems[n_systems++] = r->system;

    size_t n_vocab = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(r->model));
    float *reference = malloc(r->n_prompts * n_vocab * sizeof *reference);
    if (!reference) return app_fail("out of memory");
    rc = compute_references(r, &systems[0], reference, n_vocab);
    for (size_t i = 1; rc == 0 && i < n_systems; i++)
        rc = compare_system(r, &systems[i], reference, n_vocab, i + 1 == n_systems);
    if (rc == 0 && !r->s->json) {
        putchar('\n');
        rc = report_table(r->rows, r->n_rows);
    }
    free(reference);
    return rc;
}

static int print_json(const run *r)
{
    if (!r->s->compare && r->n_rows == 1) return report_print_json(report_json(&r->rows[0], r->s->model));
    json_t *all = json_array();
    for (size_t i = 0; all && i < r->n_rows; i++) {
        if (json_array_append_new(all, report_json(&r->rows[i], r->s->model)) != 0) {
            json_decref(all);
            all = NULL;
        }
    }
    return report_print_json(all);
}

int cmd_run(int argc, char **argv)
{
    run_settings s = {.n_answer = 128, .n_batch = 2048, .n_ubatch = 512, .seed = 1, .whole_below = DEFAULT_WHOLE_BELOW};
    int n_positional;
    int rc = opt_parse(&run_command, argc, argv, &s, &n_positional);
    if (rc) return rc == 1 ? 0 : rc;
    if (n_positional) return opt_misuse(&run_command, "unexpected argument `%s`", argv[1]);
    if ((rc = check(&s)) != 0) return rc;

    run r = {.s = &s};
    imp_store_opts opts;
    const char *name = s.system ? s.system : DEFAULT_SYSTEM;
    if ((rc = make_system(name, &s, &s.store.switches, &r.system)) != 0) return rc;
    if ((rc = store_settings_apply(&run_command, &s.store, &opts)) != 0) return rc;
    app_system_store(&r.system.system, &opts);
    app_system_notes(&r.system.system, 1);
    app_retention retention;
    bool some = s.retention && retention_parse(s.retention, &retention) && (retention.share < 1 || retention.mass > 0);
    if (some && !r.system.system.chooses && !s.compare)
        fprintf(stderr, "impress: note: system %s loads every token, whatever the retention\n", r.system.system.name);

    app_log_show(s.verbose);
    if (!store_settings_dir(&s.store) && !opts.host_cache_bytes && !opts.device_cache_bytes && s.compare)
        return opt_misuse(&run_command, "--compare needs a store");
    r.rows = calloc(3 * s.questions.n, sizeof *r.rows);
    rc = r.rows ? 0 : app_fail("out of memory");
    /* The store is opened first: its mistakes should show before the wait for a model. */
    if (rc == 0) rc = store_settings_open(&s.store, &opts, &r.store);
    if (rc == 0) rc = app_model_load(s.model, s.verbose, &r.model);
    if (rc == 0) rc = make_prompts(&r);
    if (rc == 0) rc = open_context(&r, &r.system.request);
    if (rc == 0) rc = s.compare ? compare(&r) : answer_questions(&r);
    if (rc == 0 && s.json) rc = print_json(&r);

    imp_llama_free(r.ctx);
    imp_store_close(r.store);
    llama_model_free(r.model);
    for (size_t i = 0; i < r.n_prompts; i++) app_prompt_free(&r.prompts[i]);
    for (size_t i = 0; i < r.n_rows; i++) app_row_free(&r.rows[i]);
    free(r.prompts);
    free(r.rows);
    return rc;
}
