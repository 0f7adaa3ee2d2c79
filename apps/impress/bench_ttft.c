/* impress bench ttft: what is asked for. bench_ttft_run.c does it. */
#include "bench_ttft.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "bench.h"
#include "model.h"
#include "retention.h"
#include "text.h"

static const opt options[] = {
    TTFT_SET_OPTS,
    {"systems", 's', OPT_TEXT, TTFT_AT(systems), "LIST",
     "systems to compare, each NAME or NAME+SWITCH=VALUE...\n"
     "(default: recomp,as,as-h2o-lru,as-h2o-lfu,impress-paper,impress)",
     true},
    {"retention", 'r', OPT_TEXT, TTFT_AT(retention), "LIST",
     "shares of the prefix's tokens that each layer gets, for systems\nthat choose (default: 0.25); auto[:MASS[:LEAST-MOST]]: as few as\nhold so much of the attention", true},
    {"adaptive", 0, OPT_FLAG, TTFT_AT(adaptive), NULL,
     "and once more so that they load whole, or compute, where that\nlooks quicker", true},
    {"io-limit", 0, OPT_TEXT, TTFT_AT(limits), "LIST",
     "read no more than so much a second, as slower disks would:\nsizes such as 25M, and `none` (default: none)", false},
    {"host-cache", 0, OPT_TEXT, TTFT_AT(host_cache), "SIZE",
     "keep chunks in so much memory: a size, or a share of what the\nprefixes take, such as 1/8 (default: 1/8)", false},
    {"cold", 0, OPT_FLAG, TTFT_AT(cold), NULL, "only requests that find nothing in memory", true},
    {"warm", 0, OPT_FLAG, TTFT_AT(warm), NULL, "only requests that find the caches as others left them\n(default: both)",
     true},
    {"warm-up", 0, OPT_COUNT, TTFT_AT(n_warm), "N", "the first N questions only teach and warm up (default: 2)", true},
    {"reps", 0, OPT_COUNT, TTFT_AT(reps), "N",
     "ask so many questions on each prefix, each time another one as\nlong as there are more (default: 3)", true},
    TTFT_RUN_OPTS,
    {"device-cache", 0, OPT_SIZE, TTFT_AT(store.device_cache), "SIZE", "device tier, besides (default: 0)", false},
    {"io", 0, OPT_TEXT, TTFT_AT(store.io), "MODE", "auto (default), uring or threads", false},
    {"no-direct", 0, OPT_FLAG, TTFT_AT(store.no_direct), NULL, "read through the page cache", false},
    REQUEST_OPTS(ttft_settings),
    SWITCH_STORE_OPTS(ttft_settings, store.switches),
};

const opt_command bench_ttft_command = {
    "bench ttft",
    "bench ttft -m MODEL.gguf -f PREFIX.txt | --prefixes DIR [OPTIONS]",
    "Time to the first token of every system on the same prefixes and questions, with its parts, the bytes\n"
    "it read, how far the answer is from that over all KV, and the limit: what computing alone, or reading\n"
    "alone, would have taken.",
    "example:\n"
    "  impress bench ttft -m smollm2.gguf --prefixes docs -r 0.25 --io-limit 25M,none --out rows.jsonl\n\n"
    "A run that was stopped, with Ctrl-C too, goes on with the same --out. docs/ttft.md has the rules.",
    options,
    sizeof options / sizeof *options,
};

/* ---- what is asked for */

static int plan_lengths(ttft_bench *b)
{
    char item[32];
    const char *list = b->s->lengths ? b->s->lengths : "";
    while (text_next_item(&list, item, sizeof item)) {
        uint64_t n;
        if (!text_parse_count(item, 1u << 24, &n) || n < 16)
            return opt_misuse(b->command, "--prefix-tokens wants numbers of at least 16, not `%s`", item);
        if (b->n_lengths == TTFT_MAX) return opt_misuse(b->command, "--prefix-tokens: more than %d", TTFT_MAX);
        b->lengths[b->n_lengths++] = (size_t)n;
    }
    if (b->s->lengths && b->n_lengths == 0) return opt_misuse(b->command, "--prefix-tokens is empty");
    if (b->n_lengths == 0) b->n_lengths = 1; /* as they are */
    return 0;
}

static int plan_limits(ttft_bench *b)
{
    char item[32];
    const char *list = b->s->limits ? b->s->limits : "none";
    while (text_next_item(&list, item, sizeof item)) {
        uint64_t n = 0;
        if (strcmp(item, "none") != 0 && (!text_parse_size(item, &n) || n == 0))
            return opt_misuse(b->command, "--io-limit wants sizes such as 25M, or none, not `%s`", item);
        if (b->n_limits == TTFT_MAX) return opt_misuse(b->command, "--io-limit: more than %d", TTFT_MAX);
        b->limits[b->n_limits++] = n;
    }
    return b->n_limits ? 0 : opt_misuse(b->command, "--io-limit is empty");
}

static int add_cell(ttft_bench *b, const char *text, const app_retention *retention, bool adaptive)
{
    char error[SWITCH_ERROR_BYTES];
    ttft_cell *more = realloc(b->cells, (b->n_cells + 1) * sizeof *more);
    if (!more) return app_fail("out of memory");
    b->cells = more;
    ttft_cell *c = &more[b->n_cells];
    *c = (ttft_cell){0};
    if (app_system_make("--systems", text, &b->s->store.switches, retention->share, &c->system, error) < 0)
        return opt_misuse(b->command, "%s", error);
    if (c->system.chooses) {
        retention_apply(retention, &c->system.load);
        retention_add_name(retention, c->system.name, sizeof c->system.name);
    }
    c->adaptive = adaptive;
    snprintf(c->name, sizeof c->name, "%s%s", c->system.name, adaptive ? ", adaptive" : "");
    b->n_cells++;
    return 0;
}

static int plan_systems(ttft_bench *b)
{
    char name[200], item[32];
    const char *systems = b->s->systems;
    while (text_next_item(&systems, name, sizeof name)) {
        const char *list = b->s->retention ? b->s->retention : "0.25";
        bool any = false;
        while (text_next_item(&list, item, sizeof item)) {
            app_retention r;
            any = true;
            if (!retention_parse(item, &r))
                return opt_misuse(b->command, "--retention wants " RETENTION_LIST_WANTS ", not `%s`", item);
            int rc = add_cell(b, name, &r, false);
            if (rc) return rc;
            if (!b->cells[b->n_cells - 1].system.chooses) break; /* the share has no meaning for it */
            if (b->s->adaptive && (rc = add_cell(b, name, &r, true)) != 0) return rc;
        }
        if (!any) return opt_misuse(b->command, "--retention is empty");
    }
    return b->n_cells ? 0 : opt_misuse(b->command, "--systems wants at least one");
}

/* A share such as 1/8 is checked here, and applied when it is known what the prefixes take. */
static int plan_host_cache(const ttft_bench *b)
{
    unsigned above, below;
    char end;
    uint64_t n;
    const char *text = b->s->host_cache;
    if (strchr(text, '/') ? sscanf(text, "%3u/%5u%c", &above, &below, &end) == 2 && below > 0 && above <= below
                          : text_parse_size(text, &n))
        return 0;
    return opt_misuse(b->command, "--host-cache wants a size such as 64M or a share such as 1/8, not `%s`", text);
}

int ttft_plan(ttft_bench *b)
{
    const ttft_settings *s = b->s;
    if (!s->model) return opt_misuse(b->command, "no model: -m MODEL.gguf");
    if (s->files.n == 0 && !s->prefixes) return opt_misuse(b->command, "no prefix: -f PREFIX.txt or --prefixes DIR");
    if (s->questions.n && s->question_file)
        return opt_misuse(b->command, "--prompt and --questions exclude each other");
    if (s->reps == 0 || s->reps > 10000) return opt_misuse(b->command, "--reps wants 1 to 10000");
    if (s->n_batch == 0 || s->n_ubatch == 0) return opt_misuse(b->command, "a batch of 0 tokens can't be computed");
    if (s->cache_type && strcmp(s->cache_type, "f16") && strcmp(s->cache_type, "q8_0"))
        return opt_misuse(b->command, "--cache-type: `%s` is not one of f16, q8_0", s->cache_type);
    if (s->store.dir && !strcmp(s->store.dir, "none"))
        return opt_misuse(b->command, "--store none has no disk to read from");
    if (s->cold || !s->warm) b->states[b->n_states++] = "cold";
    if (s->warm || !s->cold) b->states[b->n_states++] = "warm";
    int rc = plan_host_cache(b);
    if (rc == 0) rc = plan_lengths(b);
    if (rc == 0) rc = plan_limits(b);
    return rc ? rc : plan_systems(b);
}

int bench_ttft(int argc, char **argv)
{
    ttft_settings s = {.n_warm = 2, .reps = 3, .seed = 1, .n_batch = 2048, .n_ubatch = 512, .host_cache = "1/8",
                       .systems = "recomp,as,as-h2o-lru,as-h2o-lfu,impress-paper,impress"};
    int n_positional;
    int rc = opt_parse(&bench_ttft_command, argc, argv, &s, &n_positional);
    if (rc) return rc == 1 ? 0 : rc;
    if (n_positional) return opt_misuse(&bench_ttft_command, "unexpected argument `%s`", argv[1]);

    ttft_bench b = {.s = &s, .command = &bench_ttft_command, .stores.lock = -1, .progress = {.label = "measuring"}};
    rc = ttft_plan(&b);
    if (rc == 0) {
        app_log_show(s.verbose);
        rc = ttft_open(&b);
    }
    if (rc == 0) ttft_watch_signals();
    for (size_t i = 0; rc == 0 && i < b.n_lengths && !ttft_stopped(); i++) {
        rc = ttft_length(&b, i);
        for (size_t c = 0; rc == 0 && c < b.n_cells && !ttft_stopped(); c++) rc = ttft_cell_run(&b, &b.cells[c]);
    }
    return ttft_finish(&b, rc);
}
