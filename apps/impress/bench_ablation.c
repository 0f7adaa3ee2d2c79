/* impress bench ablation: the paper's techniques one after the other, on a real model.
 *
 *     itf      probe heads alone: prompt's order on disk, LRU          (identification, the paper's technique 1)
 *     ro       and reordered by importance                             (technique 2)
 *     sc       and caches by score: the paper's system                 (technique 3)
 *     sketch   the same with a sketch in place of the probe heads
 *
 * beside full load and all keys. Warm: the caches are as the requests before left them, the first of which were the
 * questions that only warm up. Cold: the store is opened anew for each request, so that only the disk has anything. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "bench_set.h"
#include "model.h"
#include "report.h"
#include "store_options.h"
#include "text.h"

enum { MAX_STEPS = 8, MAX_VALUES = 24 };

typedef struct ablation_settings {
    const char *model, *prefixes, *question_file, *retention, *chunk, *steps, *state, *cache_type;
    opt_texts files, questions;
    uint64_t warm, reps, n_threads, n_batch, n_ubatch, store_limit;
    bool json, raw, verbose;
    store_settings store;
} ablation_settings;

#define AT(member) offsetof(ablation_settings, member)

static const opt options[] = {
    {"model", 'm', OPT_TEXT, AT(model), "FILE", "the model, a GGUF file", false},
    {"file", 'f', OPT_TEXTS, AT(files), "FILE", "a prefix, a text file; may be given several times", true},
    {"prefixes", 0, OPT_TEXT, AT(prefixes), "DIR", "all *.txt of a folder", true},
    {"prompt", 'p', OPT_TEXTS, AT(questions), "TEXT",
     "a question, asked on each prefix; may be given several\ntimes (default: six of any text)", true},
    {"questions", 0, OPT_TEXT, AT(question_file), "FILE", "questions, one a line", true},
    {"warm", 0, OPT_COUNT, AT(warm), "N", "the first N questions only warm up (default: 2)", true},
    {"steps", 0, OPT_TEXT, AT(steps), "LIST",
     "of as, all-keys, itf, ro, sc, sketch (default: all), or systems\nas NAME+SWITCH=VALUE...", true},
    {"retention", 'r', OPT_TEXT, AT(retention), "LIST",
     "shares of the prefix's tokens that each layer gets\n(default: 0.25)", true},
    {"chunks", 0, OPT_TEXT, AT(chunk), "LIST", "tokens a chunk (default: the system's)", true},
    {"state", 0, OPT_TEXT, AT(state), "WHICH", "cold, warm or both (default: both)", true},
    {"reps", 0, OPT_COUNT, AT(reps), "N", "ask each question so often (default: 3)", true},
    {"json", 0, OPT_FLAG, AT(json), NULL, "print a JSON object a line for each request", true},
    {"raw", 0, OPT_FLAG, AT(raw), NULL, "no chat template: prefix, blank line, question", false},
    {"store", 0, OPT_TEXT, AT(store.dir), "DIR",
     "folder of the stores, one for each way to keep a prefix\n"
     "(default: ~/.cache/impress/bench); `none`: in memory", true},
    {"store-limit", 0, OPT_SIZE, AT(store_limit), "SIZE",
     "size limit of each of them (default: its\nown; 10G where it has none)", false},
    {"host-cache", 0, OPT_SIZE, AT(store.host_cache), "SIZE",
     "keep chunks in so much memory (default: an eighth of what the\nprefixes take)", false},
    {"device-cache", 0, OPT_SIZE, AT(store.device_cache), "SIZE", "and in so much more, the device tier (default: 0)",
     false},
    {"io", 0, OPT_TEXT, AT(store.io), "MODE", "auto (default), uring or threads", false},
    {"io-limit", 0, OPT_SIZE, AT(store.io_limit), "SIZE", "read no more than SIZE a second, as a slower disk would",
     false},
    {"threads", 't', OPT_COUNT, AT(n_threads), "N", "threads (default: one a core)", false},
    {"batch-size", 'b', OPT_COUNT, AT(n_batch), "N", "tokens a decode call (default: 2048)", false},
    {"ubatch-size", 'u', OPT_COUNT, AT(n_ubatch), "N", "tokens a pass (default: 512)", false},
    {"cache-type", 0, OPT_TEXT, AT(cache_type), "TYPE", "the cache's type: f16 (default) or q8_0", false},
    {"verbose", 'v', OPT_FLAG, AT(verbose), NULL, "show llama.cpp's log and ours", false},
};

const opt_command bench_ablation_command = {
    "bench ablation",
    "bench ablation -m MODEL.gguf -f PREFIX.txt | --prefixes DIR [OPTIONS]",
    "Time to the first token, and bytes read, with each technique of the paper added to the one before:\n"
    "probe heads (itf), reordering (ro), caches by score (sc); and a sketch in place of probe heads.",
    "example:\n"
    "  impress bench ablation -m smollm2.gguf -f handbook.txt -r 0.05,0.25,1 --chunks 16,64,256 --json",
    options,
    sizeof options / sizeof *options,
};

static const struct {
    const char *name, *system;
} known_steps[] = {
    {"as", "as"},
    {"all-keys", "as-h2o-lru"},
    {"itf", "impress-paper+order=token+cache=lru"},
    {"ro", "impress-paper+cache=lru"},
    {"sc", "impress-paper"},
    {"sketch", "impress-paper+identify=sketch"},
};

enum { N_KNOWN = sizeof known_steps / sizeof *known_steps };

/* One cell of the table: a step with a retention and a chunk size, in one state. */
typedef struct cell {
    const char *step;
    app_system system;
    app_row *rows[2]; /* cold, warm: [n_rows] */
    size_t n_rows[2];
} cell;

typedef struct ablation {
    const ablation_settings *s;
    bench_set set;
    app_stores stores;
    struct llama_model *model;
    cell *cells;
    size_t n_cells;
    bool states[2];
    text_progress progress;
    size_t n_done, n_all;
} ablation;

static const char *const state_names[] = {"cold", "warm"};

/* ---- what is asked for */

/* A step with one retention, for each chunk size that is asked for. */
static int add_cells(ablation *a, const char *step, const char *system, double retention)
{
    const char *list = a->s->chunk ? a->s->chunk : "0";
    char item[32], text[256], error[SWITCH_ERROR_BYTES];
    while (text_next_item(&list, item, sizeof item)) {
        cell *more = realloc(a->cells, (a->n_cells + 1) * sizeof *more);
        if (!more) return app_fail("out of memory");
        a->cells = more;
        cell *c = &more[a->n_cells];
        memset(c, 0, sizeof *c);
        snprintf(text, sizeof text, "%s%s%s", system, a->s->chunk ? "+chunk=" : "", a->s->chunk ? item : "");
        if (app_system_make("--steps", text, NULL, retention, &c->system, error) < 0)
            return opt_misuse(&bench_ablation_command, "%s", error);
        if (c->system.recompute) return opt_misuse(&bench_ablation_command, "--steps: recomp loads nothing");
        c->step = step;
        a->n_cells++;
    }
    return 0;
}

static int add_step(ablation *a, const char *name)
{
    const char *step = NULL, *system = NULL;
    for (size_t i = 0; i < N_KNOWN; i++)
        if (!strcmp(name, known_steps[i].name)) step = known_steps[i].name, system = known_steps[i].system;
    if (!system) system = name;

    app_system s;
    char error[SWITCH_ERROR_BYTES], item[32];
    if (app_system_make("--steps", system, NULL, 1, &s, error) < 0)
        return opt_misuse(&bench_ablation_command, "%s; and the steps as, all-keys, itf, ro, sc, sketch", error);
    const char *list = s.chooses && a->s->retention ? a->s->retention : "0.25";
    int rc = 0;
    while (rc == 0 && text_next_item(&list, item, sizeof item)) {
        double r;
        if (!text_parse_real(item, &r) || !(r > 0 && r <= 1))
            return opt_misuse(&bench_ablation_command, "--retention wants shares over 0 and up to 1, not `%s`", item);
        rc = add_cells(a, step, system, s.chooses ? r : 1);
        if (!s.chooses) break;
    }
    return rc;
}

static int plan(ablation *a)
{
    const ablation_settings *s = a->s;
    if (!s->model) return opt_misuse(&bench_ablation_command, "no model: -m MODEL.gguf");
    if (s->files.n == 0 && !s->prefixes)
        return opt_misuse(&bench_ablation_command, "no prefix: -f PREFIX.txt or --prefixes DIR");
    if (s->questions.n && s->question_file)
        return opt_misuse(&bench_ablation_command, "--prompt and --questions exclude each other");
    if (s->reps == 0) return opt_misuse(&bench_ablation_command, "--reps wants at least 1");
    if (s->n_batch == 0 || s->n_ubatch == 0)
        return opt_misuse(&bench_ablation_command, "a batch of 0 tokens can't be computed");
    if (s->cache_type && strcmp(s->cache_type, "f16") && strcmp(s->cache_type, "q8_0"))
        return opt_misuse(&bench_ablation_command, "--cache-type: `%s` is not one of f16, q8_0", s->cache_type);
    a->states[0] = !strcmp(s->state, "cold") || !strcmp(s->state, "both");
    a->states[1] = !strcmp(s->state, "warm") || !strcmp(s->state, "both");
    if (!a->states[0] && !a->states[1])
        return opt_misuse(&bench_ablation_command, "--state: `%s` is not one of cold, warm, both", s->state);
    if (s->store.dir && !strcmp(s->store.dir, "none")) {
        if (s->store.host_cache == 0)
            return opt_misuse(&bench_ablation_command, "--store none wants a --host-cache to keep prefixes in");
        if (!a->states[1]) return opt_misuse(&bench_ablation_command, "--store none is never cold");
        a->states[0] = false;
    }
    const char *list = s->steps;
    char name[200];
    int rc = 0;
    while (rc == 0 && text_next_item(&list, name, sizeof name)) rc = add_step(a, name);
    return rc ? rc : a->n_cells ? 0 : opt_misuse(&bench_ablation_command, "--steps wants at least one");
}

/* ---- running it */

static int open_all(ablation *a, const imp_store_opts *opts)
{
    const ablation_settings *s = a->s;
    bool none = s->store.dir && !strcmp(s->store.dir, "none");
    const char *dir = none ? NULL : s->store.dir ? s->store.dir : store_default_dir("bench");
    imp_llama *ctx = NULL;
    int rc = app_stores_open(&a->stores, dir, opts);
    if (rc) return rc;
    struct llama_context_params cp =
        app_context_params(a->set.longest + 8, s->n_batch, s->n_ubatch, s->n_threads, s->cache_type);
    imp_llama_params params;
    imp_llama_params_init(&params);
    params.store = a->stores.source;
    params.model_files = &s->model;
    params.n_model_files = 1;
    params.widen_query = true;
    if (imp_llama_init(a->model, cp, &params, &ctx) < 0) return app_fail("%s", imp_last_error());
    rc = app_stores_attach(&a->stores, ctx);
    if (rc == 0 && app_model_unchanged(s->model)) rc = 1;
    const char *why;
    if (rc == 0 && imp_llama_get_fit(ctx, &why) != IMP_LLAMA_FIT_FULL)
        rc = app_fail("this model's prefixes can't be loaded in part: %s", why);
    for (size_t i = 0; rc == 0 && i < a->n_cells; i++) {
        imp_llama_request request;
        imp_llama_request_init(&request);
        app_system_request(&a->cells[i].system, &request);
        const char *note = imp_llama_note(ctx, &request);
        if (*note && (i == 0 || strcmp(a->cells[i].system.name, a->cells[i - 1].system.name) != 0))
            fprintf(stderr, "impress: note: %s: %s\n", a->cells[i].system.name, note);
    }
    return rc;
}

/* Every prefix into the source, and the budget of the host tier where none is given. */
static int learn_all(ablation *a)
{
    size_t n_tokens = 0;
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < a->set.n_prefixes; i++) {
        bench_prefix *p = &a->set.prefixes[i];
        rc = app_stores_learn(&a->stores, &p->shared, p->path);
        n_tokens += p->shared.n;
    }
    if (a->s->store.host_cache == 0)
        a->stores.opts.host_cache_bytes = n_tokens * imp_space_token_bytes(a->stores.source_space) / 8;
    return rc;
}

static int put_all(ablation *a)
{
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < a->set.n_prefixes; i++)
        rc = app_stores_put(&a->stores, &a->set.prefixes[i].shared);
    return rc;
}

/* Print a request as a line of JSON. */
static int print_row(const ablation *a, const cell *c, int state, size_t prefix, size_t question, size_t rep,
                     const app_row *row)
{
    json_t *o = report_json(row, a->s->model);
    int bad = !o;
    bad = bad || json_object_set_new(o, "bench", json_string("ablation"));
    bad = bad || json_object_set_new(o, "version", json_string(imp_version()));
    bad = bad || json_object_set_new(o, "step", c->step ? json_string(c->step) : json_null());
    bad = bad || json_object_set_new(o, "state", json_string(state_names[state]));
    bad = bad || json_object_set_new(o, "prefix", report_text(a->set.prefixes[prefix].path));
    bad = bad || json_object_set_new(o, "question", json_integer((json_int_t)question));
    bad = bad || json_object_set_new(o, "rep", json_integer((json_int_t)rep));
    bad = bad || json_object_set_new(o, "chunk", json_integer(c->system.load.switches.chunk_tokens));
    bad = bad || json_object_set_new(o, "host_cache_bytes", json_integer((json_int_t)a->stores.opts.host_cache_bytes));
    bad = bad || json_object_set_new(o, "io_limit", json_integer((json_int_t)a->stores.opts.read_bytes_per_s));
    bad = bad || json_dumpf(o, stdout, JSON_COMPACT | JSON_REAL_PRECISION(9)) != 0 || putchar('\n') == EOF ||
          fflush(stdout) != 0;
    json_decref(o);
    return bad ? app_fail("can't write a row to standard output") : 0;
}

static int measure(ablation *a, cell *c, int state, size_t prefix, size_t question, size_t rep)
{
    imp_llama_request request;
    imp_llama_request_init(&request);
    app_system_request(&c->system, &request);
    request.load.record = IMP_RECORD_NOTHING;
    char detail[200];
    snprintf(detail, sizeof detail, "%zu of %zu (%s %s %g)", a->n_done, a->n_all, state_names[state], c->system.name,
             c->system.load.retention);
    text_progress_at(&a->progress, (double)a->n_done++ / (double)a->n_all, detail);

    app_row *row = &c->rows[state][c->n_rows[state]];
    int rc = bench_ask(&a->stores, &a->set, prefix, question, &request, row);
    if (rc) return rc;
    row->system = c->system.name;
    row->retention = c->system.load.retention;
    c->n_rows[state]++;
    return a->s->json ? print_row(a, c, state, prefix, question, rep, row) : 0;
}

/* The warm-up: the same questions for each system, and what they teach put to use. */
static int warm_up(ablation *a, const cell *c)
{
    imp_llama_request request;
    imp_llama_request_init(&request);
    app_system_request(&c->system, &request);
    app_row row;
    int rc = 0;
    for (size_t q = 0; rc == 0 && q < a->set.n_warm; q++)
        for (size_t p = 0; rc == 0 && p < a->set.n_prefixes; p++)
            rc = bench_ask(&a->stores, &a->set, p, q, &request, &row);
    for (size_t p = 0; rc == 0 && p < a->set.n_prefixes; p++)
        rc = app_stores_settle(&a->stores, &c->system, &a->set.prefixes[p].shared);
    return rc;
}

/* All requests of one state: over the prefixes in turn, as different users would come. */
static int run_state(ablation *a, cell *c, int state)
{
    int rc = 0;
    for (size_t rep = 0; rc == 0 && rep < a->s->reps; rep++) {
        for (size_t q = a->set.n_warm; rc == 0 && q < a->set.n_questions; q++) {
            for (size_t p = 0; rc == 0 && p < a->set.n_prefixes; p++) {
                if (state == 0) rc = app_stores_enter(&a->stores, &c->system, false);
                if (rc == 0) rc = measure(a, c, state, p, q, rep);
            }
        }
    }
    return rc;
}

static int run_cell(ablation *a, cell *c)
{
    size_t n = a->s->reps * (a->set.n_questions - a->set.n_warm) * a->set.n_prefixes;
    for (int state = 0; state < 2; state++) {
        c->rows[state] = calloc(n, sizeof **c->rows);
        if (!c->rows[state]) return app_fail("out of memory");
    }
    int rc = app_stores_enter(&a->stores, &c->system, true);
    if (rc == 0) rc = put_all(a);
    if (rc == 0) rc = warm_up(a, c);
    if (rc == 0 && a->states[1]) rc = run_state(a, c, 1);
    if (rc == 0 && a->states[0]) rc = run_state(a, c, 0);
    return rc;
}

static int run_all(ablation *a)
{
    size_t n = a->s->reps * (a->set.n_questions - a->set.n_warm) * a->set.n_prefixes;
    a->n_all = n * a->n_cells * (size_t)(a->states[0] + a->states[1]);
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < a->n_cells; i++) rc = run_cell(a, &a->cells[i]);
    text_progress_end(&a->progress);
    return rc;
}

/* ---- the table */

typedef double (*figure)(const app_row *row);

static double f_ttft(const app_row *r) { return (double)r->ttft_ns / 1e6; }
static double f_identify(const app_row *r) { return (double)r->report.identify_ns / 1e6; }
static double f_io_wait(const app_row *r) { return (double)r->report.io_wait_ns / 1e6; }
static double f_gather(const app_row *r) { return (double)r->report.gather_ns / 1e6; }
static double f_read(const app_row *r) { return (double)r->report.bytes_read; }
static double f_identify_bytes(const app_row *r) { return (double)r->report.identify_bytes; }
static double f_hits(const app_row *r)
{
    return (double)(r->report.host_hit_bytes + r->report.device_hit_bytes);
}
static double f_mass(const app_row *r) { return r->report.mass; }
static double f_fallback(const app_row *r)
{
    return r->report.n_selected ? 100.0 * r->report.n_fallback / r->report.n_selected : 0;
}

static double median(const app_row *rows, size_t n, figure f, double *scratch)
{
    for (size_t i = 0; i < n; i++) scratch[i] = f(&rows[i]);
    return text_median(scratch, n);
}

static bool add_line(text_table *t, const cell *c, int state, double *scratch)
{
    static const struct {
        figure f;
        const char *format; /* NULL: bytes */
    } columns[] = {{f_ttft, "%.1f"}, {f_identify, "%.1f"}, {f_io_wait, "%.1f"},    {f_gather, "%.1f"},
                   {f_read, NULL},   {f_identify_bytes, NULL}, {f_hits, NULL}, {f_mass, "%.3f"}, {f_fallback, "%.0f"}};
    bool ok = text_table_add(t, "%s", c->step ? c->step : c->system.name) &&
              text_table_add(t, "%g", c->system.load.retention * 100) &&
              text_table_add(t, "%u", c->system.load.switches.chunk_tokens);
    for (size_t i = 0; ok && i < sizeof columns / sizeof *columns; i++) {
        double v = median(c->rows[state], c->n_rows[state], columns[i].f, scratch);
        char text[32];
        if (columns[i].format) snprintf(text, sizeof text, columns[i].format, v);
        ok = text_table_add(t, "%s", columns[i].format ? text : text_bytes((uint64_t)v, text));
    }
    return ok;
}

static int print_tables(const ablation *a)
{
    static const char *const heads[] = {"",       "tokens %", "chunk",    "TTFT ms", "identify", "I/O wait",
                                        "gather", "read",     "identify", "hits",    "mass",     "fall %"};
    enum { N_HEADS = sizeof heads / sizeof *heads };
    char host[32];
    double *scratch = malloc((a->cells[0].n_rows[0] + a->cells[0].n_rows[1] + 1) * sizeof *scratch);
    bool ok = scratch != NULL;
    for (int state = 0; state < 2; state++) {
        if (!a->states[state]) continue;
        text_table *t = ok ? text_table_new(N_HEADS) : NULL;
        ok = t != NULL;
        for (size_t i = 0; ok && i < N_HEADS; i++) ok = text_table_add(t, "%s", heads[i]);
        for (size_t i = 0; ok && i < a->n_cells; i++) ok = add_line(t, &a->cells[i], state, scratch);
        if (ok) {
            printf("%s; medians of %zu requests; host cache %s\n", state_names[state], a->cells[0].n_rows[state],
                   state ? text_bytes(a->stores.opts.host_cache_bytes, host) : "empty");
            text_table_print(t, stdout);
            putchar('\n');
        }
        text_table_free(t);
    }
    free(scratch);
    return ok ? 0 : app_fail("out of memory");
}

int bench_ablation(int argc, char **argv)
{
    ablation_settings s = {.warm = 2, .reps = 3, .n_batch = 2048, .n_ubatch = 512, .state = "both",
                           .steps = "as,all-keys,itf,ro,sc,sketch"};
    int n_positional;
    int rc = opt_parse(&bench_ablation_command, argc, argv, &s, &n_positional);
    if (rc) return rc == 1 ? 0 : rc;
    if (n_positional) return opt_misuse(&bench_ablation_command, "unexpected argument `%s`", argv[1]);

    ablation a = {.s = &s, .stores.lock = -1, .progress = {.label = "measuring"}};
    imp_store_opts opts;
    rc = plan(&a);
    if (rc == 0) rc = store_settings_apply(&bench_ablation_command, &s.store, &opts);
    if (rc == 0) {
        opts.limit_bytes = s.store_limit;
        app_log_show(s.verbose);
        rc = bench_set_read(&a.set, &s.files, s.prefixes, &s.questions, s.question_file, s.warm);
    }
    if (rc == 0) rc = app_model_load(s.model, s.verbose, &a.model);
    if (rc == 0) rc = bench_set_tokens(&a.set, a.model, s.raw);
    if (rc == 0) rc = open_all(&a, &opts);
    if (rc == 0) rc = learn_all(&a);
    if (rc == 0) rc = run_all(&a);
    if (rc == 0 && !s.json) rc = print_tables(&a);

    app_stores_close(&a.stores);
    llama_model_free(a.model);
    bench_set_free(&a.set);
    for (size_t i = 0; i < a.n_cells; i++) {
        free(a.cells[i].rows[0]);
        free(a.cells[i].rows[1]);
    }
    free(a.cells);
    return rc;
}
