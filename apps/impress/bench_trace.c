/* bench_trace.c: traces, weights, every policy at every size, and what no policy can exceed. */
#include "bench_trace.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "hash_trace.h"
#include "model.h"
#include "replay/pattern.h"
#include "replay/trace.h"
#include "text.h"

enum { MAX_SIZES = 32, MAX_POLICIES = 8, BOUND_ROUNDS = 300 };

typedef struct trace_settings {
    opt_texts traces;
    const char *policies, *cache, *patterns;
    double retention;
    uint64_t block, chunk, seed;
    bool json;
} trace_settings;

#define AT(field) offsetof(trace_settings, field)
static const opt options[] = {
    {"traces", 0, OPT_TEXTS, AT(traces), "FILE", "a trace; may be given several times, or as arguments", true},
    {"policies", 0, OPT_TEXT, AT(policies), "LIST", "of lru, lfu, score, attention, aged (default: all)", true},
    {"cache", 0, OPT_TEXT, AT(cache), "LIST",
     "sizes of the cache: below 1 a share of the trace's distinct\nblocks, else blocks (default: "
     "0.02,0.05,0.1,0.2,0.4)",
     true},
    {"patterns", 0, OPT_TEXT, AT(patterns), "FILE",
     "importance recorded by `impress bench replay --record`\n(default: a fixed rule)", true},
    {"retention", 'r', OPT_REAL, AT(retention), "SHARE", "so many tokens are important (default: 0.25)", true},
    {"block", 0, OPT_COUNT, AT(block), "N", "tokens a block (default: as few as the lengths allow)", true},
    {"chunk", 0, OPT_COUNT, AT(chunk), "N",
     "blocks are kept in chunks of about N tokens, as a store\nkeeps them; 0: whole (default: 64)", true},
    {"seed", 0, OPT_COUNT, AT(seed), "N", "which chunk of the patterns a block is (default: 1)", true},
    {"json", 0, OPT_FLAG, AT(json), NULL, "one JSON object a line", true},
};

const opt_command bench_trace_command = {
    "bench trace",
    "bench trace [--traces] FILE... [--policies LIST] [--cache LIST] [--json]",
    "Replay request traces with block ids against a cache of blocks under each policy: how much of the\n"
    "prompts was in memory, and how much of what matters in them, beside the best that could have been.",
    "hit: a block and all before it were there; of MIN: beside Belady's optimum. in memory: the block was\n"
    "there, which is what spares a read of a store that has everything on disk. matter: the same for the\n"
    "important share of each block; bound: what no policy can exceed. docs/replay.md describes it all.",
    options,
    sizeof options / sizeof *options,
};

typedef struct named_policy {
    const char *name;
    imp_cache policy;
} named_policy;

static const named_policy known[] = {{"lru", IMP_CACHE_LRU},
                                     {"lfu", IMP_CACHE_LFU},
                                     {"score", IMP_CACHE_SCORE},
                                     {"attention", IMP_CACHE_ATTENTION},
                                     {"aged", IMP_CACHE_AGED}};

typedef struct trace_plan {
    const trace_settings *s;
    named_policy policies[MAX_POLICIES];
    double sizes[MAX_SIZES];
    size_t n_policies, n_sizes;
} trace_plan;

/* The next item of a list; `*at` goes behind it. False at the end. */
static bool next_item(const char **at, char item[64])
{
    if (**at == '\0') return false;
    size_t n = strcspn(*at, ",");
    snprintf(item, 64, "%.*s", (int)(n < 63 ? n : 63), *at);
    *at += n + ((*at)[n] == ',');
    return true;
}

static int plan_make(trace_plan *p)
{
    char item[64];
    for (const char *at = p->s->policies; next_item(&at, item);) {
        size_t i = 0;
        while (i < sizeof known / sizeof *known && strcmp(known[i].name, item) != 0) i++;
        if (i == sizeof known / sizeof *known || p->n_policies == MAX_POLICIES)
            return opt_misuse(&bench_trace_command, "--policies: `%s` is not one of lru, lfu, score, attention, aged",
                              item);
        p->policies[p->n_policies++] = known[i];
    }
    for (const char *at = p->s->cache; next_item(&at, item);) {
        double v;
        if (!text_parse_real(item, &v) || !(v > 0) || v > 1e9 || (v >= 1 && v != floor(v)) || p->n_sizes == MAX_SIZES)
            return opt_misuse(&bench_trace_command, "--cache: `%s` is neither a share below 1 nor a number of blocks",
                              item);
        p->sizes[p->n_sizes++] = v;
    }
    if (p->n_policies == 0 || p->n_sizes == 0)
        return opt_misuse(&bench_trace_command, "no policies or no sizes of the cache");
    if (!(p->s->retention > 0) || p->s->retention > 1)
        return opt_misuse(&bench_trace_command, "--retention: %g is not over 0 to 1", p->s->retention);
    if (p->s->traces.n == 0) return opt_misuse(&bench_trace_command, "no trace: --traces FILE");
    return 0;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static int get_patterns(const trace_settings *s, replay_patterns *out)
{
    if (!s->patterns) {
        if (replay_patterns_rule(32, 3, 4096, REPLAY_MAX_PATTERNS, 1, out) < 0) return app_fail("%s", imp_last_error());
        return 0;
    }
    return replay_patterns_read(s->patterns, out) < 0 ? app_fail("%s", imp_last_error()) : 0;
}

typedef struct trace_row {
    const char *trace, *policy, *patterns;
    const replay_trace *t;
    size_t capacity;     /* in blocks of the file */
    uint32_t parts;      /* chunks of one */
    double weight; /* of all uses */
    replay_hits hits, endless, min;
    double bound;
} trace_row;

static double ratio(double a, double b) { return b > 0 ? a / b : 0; }

static int print_json(const trace_row *r, const trace_settings *s)
{
    double uses = (double)r->t->n_uses;
    json_t *o = json_pack(
        "{s:s,s:s,s:s,s:I,s:f,s:I,s:I,s:I,s:I,s:s,s:f,s:I}", "bench", "trace", "trace", r->trace, "policy", r->policy,
        "cache_blocks", (json_int_t)r->capacity, "cache_share",
        ratio((double)(r->capacity * r->parts), (double)r->t->n_blocks), "requests", (json_int_t)r->t->n_requests,
        "uses", (json_int_t)(r->t->n_uses / r->parts), "blocks", (json_int_t)(r->t->n_blocks / r->parts),
        "chunk_tokens", (json_int_t)r->t->block_tokens, "patterns", r->patterns,
        "retention", s->retention, "seed", (json_int_t)s->seed);
    const struct {
        const char *name;
        double value;
    } ratios[] = {
        {"hit_ratio", (double)r->hits.prefix / uses},
        {"hit_ratio_of_min", ratio((double)r->hits.prefix, (double)r->min.prefix)},
        {"memory_ratio", (double)r->hits.tier / uses},
        {"memory_ratio_of_min", ratio((double)r->hits.tier, (double)r->min.tier)},
        {"matter_hit_ratio", ratio(r->hits.prefix_weight, r->weight)},
        {"matter_ratio", ratio(r->hits.tier_weight, r->weight)},
        {"matter_ratio_of_bound", ratio(r->hits.tier_weight, r->bound)},
        {"min_ratio", (double)r->min.prefix / uses},
        {"min_matter_ratio", ratio(r->min.tier_weight, r->weight)},
        {"matter_bound", ratio(r->bound, r->weight)},
        {"endless_ratio", (double)r->endless.prefix / uses},
        {"endless_matter_ratio", ratio(r->endless.tier_weight, r->weight)},
    };
    int bad = !o;
    for (size_t i = 0; !bad && i < sizeof ratios / sizeof *ratios; i++)
        bad = json_object_set_new(o, ratios[i].name, json_real(ratios[i].value));
    if (!bad) bad = json_dumpf(o, stdout, JSON_COMPACT | JSON_REAL_PRECISION(6));
    json_decref(o);
    if (bad) return app_fail("can't write JSON to standard output");
    putchar('\n');
    return 0;
}

static bool add_row(text_table *t, const trace_row *r)
{
    double uses = (double)r->t->n_uses;
    return text_table_add(t, "%s", r->policy) && text_table_add(t, "%zu", r->capacity) &&
           text_table_add(t, "%.1f", 100 * (double)r->hits.prefix / uses) &&
           text_table_add(t, "%.1f", 100 * ratio((double)r->hits.prefix, (double)r->min.prefix)) &&
           text_table_add(t, "%.1f", 100 * (double)r->hits.tier / uses) &&
           text_table_add(t, "%.1f", 100 * ratio((double)r->hits.tier, (double)r->min.tier)) &&
           text_table_add(t, "%.1f", 100 * ratio(r->hits.tier_weight, r->weight)) &&
           text_table_add(t, "%.1f", 100 * ratio(r->hits.tier_weight, r->bound));
}

/* One size of the cache: the optimum, then each policy. */
static int run_size(const trace_plan *p, trace_row *r, const float *weights, text_table *table)
{
    if (replay_min(r->t, r->capacity * r->parts, weights, &r->min) < 0) return app_fail("%s", imp_last_error());
    replay_hits all[MAX_POLICIES];
    double reached = r->min.tier_weight;
    for (size_t i = 0; i < p->n_policies; i++) {
        if (replay_policy(r->t, p->policies[i].policy, r->capacity * r->parts, weights, &all[i]) < 0)
            return app_fail("%s", imp_last_error());
        if (all[i].tier_weight > reached) reached = all[i].tier_weight;
    }
    r->bound = r->endless.tier_weight; /* where MIN loses nothing there is nothing to look for */
    if (r->min.tier < r->endless.tier &&
        replay_weight_bound(r->t, r->capacity * r->parts, weights, BOUND_ROUNDS, reached, &r->bound) < 0)
        return app_fail("%s", imp_last_error());
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < p->n_policies; i++) {
        r->policy = p->policies[i].name;
        r->hits = all[i];
        if (!table) rc = print_json(r, p->s);
        else if (!add_row(table, r)) rc = app_fail("out of memory");
    }
    r->policy = "MIN";
    r->hits = r->min;
    if (rc == 0 && table && !add_row(table, r)) rc = app_fail("out of memory");
    return rc;
}

static int run_trace(const trace_plan *p, const char *path, const replay_patterns *patterns)
{
    char error[HASH_TRACE_ERROR_BYTES];
    replay_trace read, t = {0};
    if (hash_trace_read(path, (uint32_t)p->s->block, &read, error) < 0) return app_fail("%s", error);
    uint64_t parts = p->s->chunk ? (read.block_tokens + p->s->chunk / 2) / p->s->chunk : 1;
    trace_row row = {.trace = base_name(path), .t = &t, .parts = parts ? (uint32_t)parts : 1,
                     .patterns = p->s->patterns ? base_name(p->s->patterns) : "rule"};
    int split = replay_trace_split(&read, row.parts, &t);
    replay_trace_free(&read);
    if (split < 0) return app_fail("%s", imp_last_error());
    text_table *table = p->s->json ? NULL : text_table_new(8);
    float *weights = malloc((t.n_uses + 1) * sizeof *weights);
    int rc = weights && (table || p->s->json) ? 0 : app_fail("out of memory");
    if (rc == 0 && replay_pattern_weights(patterns, &t, p->s->retention, p->s->seed, weights) < 0)
        rc = app_fail("%s", imp_last_error());
    for (size_t u = 0; rc == 0 && u < t.n_uses; u++) row.weight += (double)weights[u];
    if (rc == 0 && replay_min(&t, t.n_blocks, weights, &row.endless) < 0) rc = app_fail("%s", imp_last_error());
    static const char *const heads[] = {"",          "blocks", "hit, %",    "of MIN, %",
                                        "in memory", "of MIN", "matter, %", "of bound, %"};
    for (size_t i = 0; rc == 0 && table && i < 8; i++)
        if (!text_table_add(table, "%s", heads[i])) rc = app_fail("out of memory");
    for (size_t i = 0; rc == 0 && i < p->n_sizes; i++) {
        row.capacity =
            p->sizes[i] < 1 ? (size_t)llrint(p->sizes[i] * (double)t.n_blocks / row.parts) : (size_t)p->sizes[i];
        if (row.capacity == 0) row.capacity = 1;
        rc = run_size(p, &row, weights, table);
    }
    if (rc == 0 && table) {
        printf("%s: %zu requests, %zu uses of %zu blocks, each %u chunks of %u tokens;\n"
               "without limit %.1f %% hit; importance: %s\n\n",
               row.trace, t.n_requests, t.n_uses / row.parts, t.n_blocks / row.parts, row.parts, t.block_tokens,
               100 * (double)row.endless.prefix / (double)t.n_uses, row.patterns);
        text_table_print(table, stdout);
        putchar('\n');
    }
    free(weights);
    text_table_free(table);
    replay_trace_free(&t);
    return rc;
}

int bench_trace(int argc, char **argv)
{
    trace_settings s = {.policies = "lru,lfu,score,attention,aged", .cache = "0.02,0.05,0.1,0.2,0.4", .retention = 0.25,
                        .chunk = 64, .seed = 1};
    int n_positional;
    int rc = opt_parse(&bench_trace_command, argc, argv, &s, &n_positional);
    if (rc) return rc == 1 ? 0 : rc;
    for (int i = 1; i <= n_positional; i++) {
        if (s.traces.n == sizeof s.traces.items / sizeof *s.traces.items)
            return opt_misuse(&bench_trace_command, "more than %zu traces", s.traces.n);
        s.traces.items[s.traces.n++] = argv[i];
    }
    trace_plan p = {.s = &s};
    if ((rc = plan_make(&p)) != 0) return rc;
    replay_patterns patterns = {0};
    rc = get_patterns(&s, &patterns);
    for (size_t i = 0; rc == 0 && i < s.traces.n; i++) rc = run_trace(&p, s.traces.items[i], &patterns);
    replay_patterns_free(&patterns);
    return rc;
}
