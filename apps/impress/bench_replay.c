/* bench_replay.c: options, one store for each way to keep KV, the same requests for every system, figures. */
#include "bench_replay.h"

#include <errno.h>
#include <ftw.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "bench_record.h"
#include "hash_trace.h"
#include "model.h"
#include "replay/engine.h"
#include "store_options.h"
#include "switches.h"
#include "text.h"

enum { MAX_SYSTEMS = 32, MAX_SETS = 64 };

typedef struct replay_settings {
    const char *shape, *profile, *systems, *scale, *trace, *dir, *record, *model, *prefix, *questions;
    opt_texts patterns;
    uint64_t data, prefixes, prefix_tokens, query_tokens, requests, warm, device_cache, host_cache, seed, n_threads;
    double disk, zipf, retention, stretch;
    bool simulated, json, rows, verbose;
    switch_settings switches;
} replay_settings;

#define AT(field) offsetof(replay_settings, field)
static const opt options[] = {
    {"shape", 0, OPT_TEXT, AT(shape), "NAME",
     "opt-6.7b, opt-13b (default), opt-30b, llama-2-7b,\nllama-2-13b, llama-3-8b or qwen2.5-7b", true},
    {"profile", 0, OPT_TEXT, AT(profile), "NAME", "a100-80g (default), a100-40g or h100-sxm", true},
    {"systems", 's', OPT_TEXT, AT(systems), "LIST",
     "as for `impress eval`, with changed switches where wanted\n(default: all, and recomp)", true},
    {"scale", 0, OPT_TEXT, AT(scale), "S", "rows, caches and the disk's rate are smaller by this\n(default: 1/16)",
     true},
    {"virtual", 0, OPT_FLAG, AT(simulated), NULL, "a clock of the store's own instead of waiting", true},
    {"stretch", 0, OPT_REAL, AT(stretch), "N",
     "slept time goes N times slower, and figures are divided, so\nthat this processor counts for less (default: 1)",
     true},
    {"data", 0, OPT_SIZE, AT(data), "SIZE", "KV of all prefixes, in full size (default: 60G)", true},
    {"prefixes", 0, OPT_COUNT, AT(prefixes), "N", "so many prefixes instead", true},
    {"prefix-tokens", 0, OPT_COUNT, AT(prefix_tokens), "N", "of each (default: 5000)", true},
    {"query-tokens", 0, OPT_COUNT, AT(query_tokens), "N", "new tokens of a request (default: 32)", true},
    {"requests", 0, OPT_COUNT, AT(requests), "N", "that are measured (default: 200)", true},
    {"warm", 0, OPT_COUNT, AT(warm), "N",
     "before them: half for history, by which segments are written\nanew, half to fill caches (default: 100)", true},
    {"zipf", 0, OPT_REAL, AT(zipf), "X", "exponent of the prefixes' popularity (default: 1)", true},
    {"trace", 0, OPT_TEXT, AT(trace), "FILE", "whose turn it is, from a trace with block ids", true},
    {"disk", 0, OPT_REAL, AT(disk), "GB/s", "the disk's rate, 1e9 bytes a second (default: 5)", true},
    {"device-cache", 0, OPT_SIZE, AT(device_cache), "SIZE", "in full size (default: 10G)", true},
    {"host-cache", 0, OPT_SIZE, AT(host_cache), "SIZE", "in full size (default: 32G)", true},
    {"retention", 'r', OPT_REAL, AT(retention), "SHARE", "of tokens loaded by systems that choose (default: 0.25)",
     true},
    {"patterns", 0, OPT_TEXTS, AT(patterns), "FILE",
     "made by --record; several: prefixes take turns\n(default: a rule)", true},
    {"seed", 0, OPT_COUNT, AT(seed), "N", "of the requests (default: 1)", true},
    {"dir", 0, OPT_TEXT, AT(dir), "DIR", "where stores are made, and removed\n(default: a folder in the cache folder)",
     true},
    {"json", 0, OPT_FLAG, AT(json), NULL, "one JSON object a line", true},
    {"rows", 0, OPT_FLAG, AT(rows), NULL, "with --json, an object for each request too", true},
    SWITCH_STORE_OPTS(replay_settings, switches),
    SWITCH_REQUEST_OPTS(replay_settings, switches),
    {"record", 0, OPT_TEXT, AT(record), "FILE", "only record patterns: -m MODEL -f PREFIX --questions FILE", true},
    {"model", 'm', OPT_TEXT, AT(model), "FILE", "for --record: a GGUF file", false},
    {"file", 'f', OPT_TEXT, AT(prefix), "FILE", "for --record: the prefix's text", true},
    {"questions", 0, OPT_TEXT, AT(questions), "FILE", "for --record: one question a line, up to 7", true},
    {"threads", 't', OPT_COUNT, AT(n_threads), "N", "for --record (default: one a core)", false},
    {"verbose", 'v', OPT_FLAG, AT(verbose), NULL, "show logs", false},
};

const opt_command bench_replay_command = {
    "bench replay",
    "bench replay [--shape NAME] [--systems LIST] [--virtual] [OPTIONS]",
    "Time to the first token of large models with long prefixes on disk: real bytes through the real store\n"
    "and tiers, with compute times from a roofline instead of a device. All times are modelled.",
    "examples:\n"
    "  impress bench replay --shape opt-30b --virtual\n"
    "  impress bench replay --record smol.pat -m smollm2.gguf -f handbook.txt --questions questions.txt\n"
    "  impress bench replay --patterns smol.pat --systems as,impress-paper,impress --disk 1\n\n"
    "docs/replay.md says what is real, what is modelled, and by which rules.",
    options,
    sizeof options / sizeof *options,
};

typedef struct replay_bench {
    const replay_settings *s;
    replay_setup setup;
    app_system systems[MAX_SYSTEMS];
    size_t n_systems, n_done;
    replay_patterns sets[MAX_SETS];
    replay_request *requests; /* [warm + requests] */
    replay_answer *answers;   /* [requests] */
    char dir[3600];
    text_progress progress;
} replay_bench;

/* What the measured requests of a system came to; bytes and times are means where nothing else is said. */
typedef struct replay_summary {
    double ttft, p50, p99, compute, bus, limit, io_wait, read, identify, host, device, reads, mass, fallback;
    uint32_t n_loaded;
} replay_summary;

/* ---- what is asked for */

static int parse_scale(const char *text, double *out)
{
    double above, below = 1;
    char left[32];
    const char *slash = strchr(text, '/');
    snprintf(left, sizeof left, "%.*s", slash ? (int)(slash - text) : 31, text);
    bool ok = text_parse_real(left, &above) && (!slash || (text_parse_real(slash + 1, &below) && below > 0));
    *out = ok ? above / below : 0;
    if (ok && *out > 0 && *out <= 1) return 0;
    return opt_misuse(&bench_replay_command, "--scale: `%s` is not over 0 to 1", text);
}

static int plan_systems(replay_bench *b)
{
    char list[2048], error[SWITCH_ERROR_BYTES], *save = NULL;
    snprintf(list, sizeof list, "%s", b->s->systems);
    for (char *item = strtok_r(list, ",", &save); item; item = strtok_r(NULL, ",", &save)) {
        if (b->n_systems == MAX_SYSTEMS) return opt_misuse(&bench_replay_command, "more than %d systems", MAX_SYSTEMS);
        if (app_system_make("--systems", item, &b->s->switches, b->s->retention, &b->systems[b->n_systems++], error) <
            0)
            return opt_misuse(&bench_replay_command, "%s", error);
    }
    app_system_notes(b->systems, b->n_systems);
    return b->n_systems ? 0 : opt_misuse(&bench_replay_command, "no systems");
}

static int plan_setup(replay_bench *b)
{
    const replay_settings *s = b->s;
    replay_setup *p = &b->setup;
    p->shape = replay_shape_find(s->shape);
    if (!p->shape) return opt_misuse(&bench_replay_command, "--shape: `%s` is not one of those in --help", s->shape);
    p->profile = replay_profile_find(s->profile);
    if (!p->profile)
        return opt_misuse(&bench_replay_command, "--profile: `%s` is not one of those in --help", s->profile);
    int rc = parse_scale(s->scale, &p->scale);
    if (rc) return rc;
    p->prefix_tokens = (uint32_t)s->prefix_tokens;
    p->query_tokens = (uint32_t)s->query_tokens;
    p->n_prefixes = (uint32_t)s->prefixes;
    if (!s->prefixes) {
        double n = (double)s->data / (replay_token_bytes(p->shape, p->profile) * p->prefix_tokens);
        p->n_prefixes = n < 1 ? 1 : (uint32_t)lrint(n < 1e6 ? n : 1e6);
    }
    p->seed = 1;
    p->disk_bytes_per_s = s->disk * 1e9;
    p->device_bytes = (double)s->device_cache;
    p->host_bytes = (double)s->host_cache;
    p->simulated = s->simulated;
    p->stretch = s->simulated ? 1 : s->stretch;
    p->patterns = b->sets;
    p->n_sets = s->patterns.n ? s->patterns.n : 1;
    if (s->requests == 0 || s->requests > 10000000 || s->warm > 10000000)
        return opt_misuse(&bench_replay_command, "--requests is not 1 to 10000000");
    if (replay_setup_check(p) < 0) return opt_misuse(&bench_replay_command, "%s", imp_last_error());
    return 0;
}

static int get_patterns(replay_bench *b)
{
    const replay_settings *s = b->s;
    if (s->patterns.n == 0) {
        uint32_t heads = b->setup.shape->n_kv_heads < 3 ? b->setup.shape->n_kv_heads : 3;
        if (replay_patterns_rule(b->setup.shape->n_layers, heads, b->setup.prefix_tokens, REPLAY_MAX_PATTERNS, 1,
                                 &b->sets[0]) < 0)
            return app_fail("%s", imp_last_error());
        return 0;
    }
    for (size_t i = 0; i < s->patterns.n; i++)
        if (replay_patterns_read(s->patterns.items[i], &b->sets[i]) < 0) return app_fail("%s", imp_last_error());
    return 0;
}

/* A request of a trace is one about the prefix that stands for the last of its blocks which came before, or, when all
 * are new, for its first. */
static int requests_from_trace(replay_bench *b, size_t n)
{
    replay_trace t;
    char error[HASH_TRACE_ERROR_BYTES];
    if (hash_trace_read(b->s->trace, 0, &t, error) < 0) return app_fail("%s", error);
    unsigned char *seen = calloc(t.n_blocks + 1, 1);
    int rc = seen ? 0 : app_fail("out of memory");
    for (size_t i = 0; rc == 0 && i < n; i++) {
        size_t r = i % t.n_requests;
        uint32_t block = t.blocks[t.first[r]];
        for (uint32_t u = t.first[r]; u < t.first[r + 1]; u++) {
            if (seen[t.blocks[u]]) block = t.blocks[u];
            seen[t.blocks[u]] = 1;
        }
        b->requests[i].prefix = (uint32_t)(replay_mix(7, block) % b->setup.n_prefixes);
    }
    free(seen);
    replay_trace_free(&t);
    return rc;
}

static int get_requests(replay_bench *b)
{
    size_t n = (size_t)(b->s->warm + b->s->requests);
    uint32_t n_questions = UINT32_MAX;
    for (size_t i = 0; i < b->setup.n_sets; i++)
        if (b->sets[i].n_patterns - 1 < n_questions) n_questions = b->sets[i].n_patterns - 1;
    b->requests = malloc(n * sizeof *b->requests);
    b->answers = malloc((size_t)b->s->requests * sizeof *b->answers);
    if (!b->requests || !b->answers) return app_fail("out of memory");
    replay_zipf(b->setup.n_prefixes, n_questions, b->s->zipf, b->s->seed, b->requests, n);
    return b->s->trace ? requests_from_trace(b, n) : 0;
}

/* ---- folders, which are large: they go even when we are told to stop */

static volatile sig_atomic_t stopped;

static void on_signal(int signal_number)
{
    (void)signal_number;
    stopped = 1;
}

static void watch_signals(void)
{
    struct sigaction a;
    memset(&a, 0, sizeof a);
    a.sa_handler = on_signal;
    sigemptyset(&a.sa_mask);
    sigaction(SIGINT, &a, NULL);
    sigaction(SIGTERM, &a, NULL);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st;
    (void)type;
    (void)at;
    return remove(path);
}

static void remove_tree(const char *path) { (void)nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS); }

static int make_dir(replay_bench *b)
{
    if (b->s->dir) {
        snprintf(b->dir, sizeof b->dir, "%s/impress-replay-XXXXXX", b->s->dir);
        if (mkdir(b->s->dir, 0700) != 0 && errno != EEXIST)
            return app_fail("can't make %s: %s", b->s->dir, strerror(errno));
    } else {
        snprintf(b->dir, sizeof b->dir, "%s-XXXXXX", store_default_dir("replay"));
    }
    watch_signals();
    if (mkdtemp(b->dir)) return 0;
    int rc = app_fail("can't make %s: %s", b->dir, strerror(errno));
    b->dir[0] = '\0';
    return rc;
}

/* ---- figures */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The smallest value that a share of all are not above. */
static double percentile(const double *sorted, size_t n, double share)
{
    size_t i = (size_t)ceil(share * (double)n);
    return sorted[i > 0 ? i - 1 : 0];
}

static bool summarise(const replay_bench *b, replay_summary *out)
{
    size_t n = (size_t)b->s->requests;
    double *sorted = malloc(n * sizeof *sorted);
    *out = (replay_summary){0};
    if (!sorted) return false;
    for (size_t i = 0; i < n; i++) {
        const replay_answer *a = &b->answers[i];
        double io = 1e9 * a->bytes_read / b->setup.disk_bytes_per_s, share = 1 / (double)n;
        sorted[i] = a->ttft_ns;
        out->ttft += share * a->ttft_ns;
        out->compute += share * a->compute_ns;
        out->bus += share * a->bus_ns;
        out->limit += share * fmax(fmax(a->compute_ns, a->bus_ns), io);
        out->io_wait += share * a->io_wait_ns;
        out->read += share * a->bytes_read;
        out->identify += share * a->identify_bytes;
        out->host += share * a->host_hit_bytes;
        out->device += share * a->device_hit_bytes;
        out->reads += share * (double)a->n_reads;
        out->mass += share * a->mass;
        out->fallback += share * a->n_fallback / b->setup.shape->n_layers;
        out->n_loaded = a->n_loaded;
    }
    qsort(sorted, n, sizeof *sorted, by_value);
    out->p50 = percentile(sorted, n, 0.5);
    out->p99 = percentile(sorted, n, 0.99);
    free(sorted);
    return true;
}

static json_t *common_json(const replay_bench *b, const app_system *system, const char *bench)
{
    const replay_setup *p = &b->setup;
    return json_pack("{s:s,s:b,s:s,s:s,s:s,s:s,s:f,s:f,s:I,s:I}", "bench", bench, "modelled", 1, "mode",
                     p->simulated ? "virtual" : "slept", "shape", p->shape->name, "profile", p->profile->name, "system",
                     system->name, "scale", p->scale, "retention", system->chooses ? system->load.retention : 1.0,
                     "prefix_tokens", (json_int_t)p->prefix_tokens, "query_tokens", (json_int_t)p->query_tokens);
}

static int dump(json_t *o, bool bad)
{
    bad = bad || !o || json_dumpf(o, stdout, JSON_COMPACT | JSON_REAL_PRECISION(7)) != 0;
    json_decref(o);
    if (bad) return app_fail("can't write JSON to standard output");
    putchar('\n');
    fflush(stdout); /* a system takes minutes */
    return 0;
}

static int print_rows(const replay_bench *b, const app_system *system)
{
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < b->s->requests; i++) {
        const replay_answer *a = &b->answers[i];
        const replay_request *q = &b->requests[b->s->warm + i];
        json_t *o = common_json(b, system, "replay-request");
        json_t *more = json_pack("{s:I,s:I,s:I,s:f,s:f,s:f,s:f,s:f,s:f,s:f}", "rep", (json_int_t)i, "prefix",
                                 (json_int_t)q->prefix, "question", (json_int_t)q->question, "ttft_ms",
                                 a->ttft_ns / 1e6, "compute_ms", a->compute_ns / 1e6, "io_wait_ms", a->io_wait_ns / 1e6,
                                 "bytes_read", a->bytes_read, "identify_bytes", a->identify_bytes, "host_hit_bytes",
                                 a->host_hit_bytes, "device_hit_bytes", a->device_hit_bytes);
        bool bad = !o || !more || json_object_update(o, more) != 0;
        json_decref(more);
        rc = dump(o, bad);
    }
    return rc;
}

static int print_json(const replay_bench *b, const app_system *system, const replay_summary *f)
{
    const replay_setup *p = &b->setup;
    char rest[32], chunk[32];
    json_t *o = common_json(b, system, "replay");
    json_t *more = json_pack(
        "{s:I,s:I,s:I,s:f,s:f,s:f,s:f,s:f,s:s,s:s,s:s,s:I}", "prefixes", (json_int_t)p->n_prefixes, "requests",
        (json_int_t)b->s->requests, "warm", (json_int_t)b->s->warm, "data_bytes",
        (double)p->n_prefixes * p->prefix_tokens * replay_token_bytes(p->shape, p->profile), "disk_bytes_per_s",
        p->disk_bytes_per_s, "device_cache_bytes", p->device_bytes, "host_cache_bytes", p->host_bytes, "stretch", p->stretch, "rest",
        system->recompute ? "-" : switch_value(system, SWITCH_REST, rest), "chunk",
        system->recompute ? "-" : switch_value(system, SWITCH_CHUNK, chunk), "patterns",
        b->s->patterns.n ? b->s->patterns.items[0] : "rule", "seed", (json_int_t)b->s->seed);
    const struct {
        const char *name;
        double value;
    } figures[] = {
        {"ttft_ms", f->ttft / 1e6},        {"p50_ms", f->p50 / 1e6},          {"p99_ms", f->p99 / 1e6},
        {"compute_ms", f->compute / 1e6},  {"limit_ms", f->limit / 1e6},      {"of_limit", f->ttft / f->limit},
        {"bus_ms", f->bus / 1e6},          {"io_wait_ms", f->io_wait / 1e6},  {"bytes_read", f->read},
        {"identify_bytes", f->identify},
        {"host_hit_bytes", f->host},       {"device_hit_bytes", f->device},   {"n_reads", f->reads},
        {"mass", f->mass},                 {"fallback_share", f->fallback},   {"loaded_tokens", f->n_loaded},
    };
    bool bad = !o || !more || json_object_update(o, more) != 0;
    json_decref(more);
    for (size_t i = 0; !bad && i < sizeof figures / sizeof *figures; i++)
        bad = json_object_set_new(o, figures[i].name, json_real(figures[i].value)) != 0;
    return dump(o, bad);
}

static bool add_row(text_table *t, const app_system *system, const replay_summary *f)
{
    char read[32], identify[32], host[32], device[32];
    return text_table_add(t, "%s", system->name) && text_table_add(t, "%.1f", f->ttft / 1e6) &&
           text_table_add(t, "%.1f", f->p50 / 1e6) && text_table_add(t, "%.1f", f->p99 / 1e6) &&
           text_table_add(t, "%.1f", f->compute / 1e6) && text_table_add(t, "%.2f", f->ttft / f->limit) &&
           text_table_add(t, "%s", text_bytes((uint64_t)f->read, read)) &&
           text_table_add(t, "%s", text_bytes((uint64_t)f->identify, identify)) &&
           text_table_add(t, "%s", text_bytes((uint64_t)f->host, host)) &&
           text_table_add(t, "%s", text_bytes((uint64_t)f->device, device)) && text_table_add(t, "%.3f", f->mass);
}

/* ---- the run */

static int run_system(replay_bench *b, const app_system *system, const char *dir, replay_summary *summary)
{
    const replay_system as = {.name = system->name, .recompute = system->recompute, .switches = system->load.switches,
                              .load = system->load, .retention = system->load.retention};
    replay_session *session = NULL;
    size_t n_warm = (size_t)b->s->warm, n = n_warm + (size_t)b->s->requests;
    int rc = replay_open(&b->setup, &as, dir, &session);
    for (size_t i = 0; rc == 0 && i < n; i++) {
        replay_answer unused, *answer = i < n_warm ? &unused : &b->answers[i - n_warm];
        if (i == n_warm / 2) rc = replay_reorder(session); /* caches lose what it writes anew: they fill up again */
        if (rc == 0 && stopped) rc = imp_set_error(IMP_E_BUSY, "stopped");
        if (rc == 0) rc = replay_ask(session, b->requests[i].prefix, b->requests[i].question, answer);
        text_progress_at(&b->progress, ((double)b->n_done + (double)(i + 1) / (double)n) / (double)b->n_systems,
                         system->name);
    }
    replay_close(session);
    if (rc < 0) return app_fail("%s: %s", system->name, imp_last_error());
    b->n_done++;
    return summarise(b, summary) ? 0 : app_fail("out of memory");
}

typedef struct fill_note {
    replay_bench *b;
    const char *what;
} fill_note;

static bool on_fill(double share, void *user)
{
    fill_note *note = user;
    char line[96];
    snprintf(line, sizeof line, "storing (%s), %.0f %%", note->what, 100 * share);
    text_progress_at(&note->b->progress, (double)note->b->n_done / (double)note->b->n_systems, line);
    return !stopped;
}

/* All systems whose stores are alike, one store for all of them. */
static int run_group(replay_bench *b, size_t first, replay_summary *summaries, bool *done)
{
    char name[64], other[64], dir[4096];
    int rc = 0;
    app_system_combination(&b->systems[first], name);
    snprintf(dir, sizeof dir, "%s/%s", b->dir, name);
    fill_note note = {b, name};
    if (!b->systems[first].recompute &&
        replay_fill(&b->setup, &b->systems[first].load.switches, dir, on_fill, &note) < 0)
        rc = app_fail("%s", imp_last_error());
    for (size_t i = first; rc == 0 && i < b->n_systems; i++) {
        const app_system *system = &b->systems[i];
        if (done[i] || system->recompute != b->systems[first].recompute ||
            (!system->recompute && strcmp(app_system_combination(system, other), name) != 0))
            continue;
        rc = run_system(b, system, dir, &summaries[i]);
        done[i] = true;
        if (rc == 0 && b->s->json && b->s->rows) rc = print_rows(b, system);
        if (rc == 0 && b->s->json) rc = print_json(b, system, &summaries[i]);
    }
    remove_tree(dir);
    return rc;
}

static int print_table(const replay_bench *b, const replay_summary *summaries)
{
    const replay_setup *p = &b->setup;
    static const char *const heads[] = {"modelled",  "TTFT, ms", "p50",  "p99",    "compute", "x limit",
                                        "from disk", "identify", "host", "device", "mass"};
    text_table *t = text_table_new(11);
    bool ok = t != NULL;
    for (size_t i = 0; ok && i < 11; i++) ok = text_table_add(t, "%s", heads[i]);
    for (size_t i = 0; ok && i < b->n_systems; i++) ok = add_row(t, &b->systems[i], &summaries[i]);
    if (ok) {
        char data[32];
        double bytes = (double)p->n_prefixes * p->prefix_tokens * replay_token_bytes(p->shape, p->profile);
        printf("modelled: %s on %s, %u prefixes of %u tokens (%s), disk %.3g GB/s, scale %.4g, %s\n\n", p->shape->name,
               p->profile->name, p->n_prefixes, p->prefix_tokens, text_bytes((uint64_t)bytes, data),
               p->disk_bytes_per_s / 1e9, p->scale, p->simulated ? "virtual time" : "slept");
        text_table_print(t, stdout);
    }
    text_table_free(t);
    return ok ? 0 : app_fail("out of memory");
}

static int run(replay_bench *b)
{
    replay_summary summaries[MAX_SYSTEMS] = {{0}};
    bool done[MAX_SYSTEMS] = {false};
    int rc = get_patterns(b);
    if (rc == 0) rc = get_requests(b);
    if (rc == 0) rc = make_dir(b);
    for (size_t i = 0; rc == 0 && i < b->n_systems; i++)
        if (!done[i]) rc = run_group(b, i, summaries, done);
    text_progress_end(&b->progress);
    if (rc == 0 && !b->s->json) rc = print_table(b, summaries);
    if (b->dir[0]) remove_tree(b->dir);
    for (size_t i = 0; i < MAX_SETS; i++) replay_patterns_free(&b->sets[i]);
    free(b->answers);
    free(b->requests);
    return rc;
}

static int record(const replay_settings *s)
{
    if (!s->model) return opt_misuse(&bench_replay_command, "--record: no model: -m MODEL.gguf");
    if (!s->prefix) return opt_misuse(&bench_replay_command, "--record: no prefix: -f FILE");
    if (!s->questions) return opt_misuse(&bench_replay_command, "--record: no questions: --questions FILE");
    const record_plan plan = {.model = s->model, .prefix = s->prefix, .questions = s->questions, .out = s->record,
                              .n_threads = (size_t)s->n_threads, .verbose = s->verbose};
    return bench_record(&plan);
}

int bench_replay(int argc, char **argv)
{
    replay_settings s = {.shape = "opt-13b",
                         .profile = "a100-80g",
                         .scale = "1/16",
                         .data = (uint64_t)60 << 30,
                         .systems = "recomp,as,as-h2o-lru,as-h2o-lfu,spi,impress-paper,contiguous,impress",
                         .prefix_tokens = 5000,
                         .query_tokens = 32,
                         .requests = 200,
                         .warm = 100,
                         .zipf = 1,
                         .disk = 5,
                         .device_cache = (uint64_t)10 << 30,
                         .host_cache = (uint64_t)32 << 30,
                         .retention = 0.25,
                         .seed = 1,
                         .stretch = 1};
    int n_positional;
    int rc = opt_parse(&bench_replay_command, argc, argv, &s, &n_positional);
    if (rc) return rc == 1 ? 0 : rc;
    if (n_positional) return opt_misuse(&bench_replay_command, "unexpected argument `%s`", argv[1]);
    app_log_show(s.verbose);
    if (s.record) return record(&s);
    replay_bench *b = calloc(1, sizeof *b);
    if (!b) return app_fail("out of memory");
    b->s = &s;
    b->progress.label = "modelled";
    rc = plan_systems(b);
    if (rc == 0) rc = plan_setup(b);
    if (rc == 0) rc = run(b);
    free(b);
    return rc;
}
