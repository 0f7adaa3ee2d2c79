/* bench_match.c: how long the match of a long prompt takes in a large token tree, and what the tree costs in memory.
 *
 * The tree is made the way prompts make it: a few shared heads (system prompts, tool lists) that fan out to documents
 * and conversations, which go on turn by turn, and now and then branch. A node has 64 to 500 tokens. A prompt is the
 * path to a node chosen at random and then goes astray, so that most of it is stored. Prompts are made before the clock
 * starts, hundreds at a time, so that what a match reads is mostly not in the processor's nearer caches.
 */
#include <getopt.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/rng.h"
#include "impress/impress.h"
#include "radix/radix.h"

enum { N_HEADS = 40, MIN_RUN = 64, MAX_RUN = 500, VOCABULARY = 50000, MAX_STEPS = 256, BATCH = 500 };

typedef struct options {
    uint64_t seed;
    size_t n_nodes, n_prompt, n_runs;
    bool json;
} options;

/* What the benchmark keeps of each node, by id: its parent, and how many tokens a prompt has up to its end. */
typedef struct place {
    uint64_t parent;
    size_t end;
} place;

typedef struct figures {
    double median_us, p99_us, max_us, mean_us, mean_matched, mean_steps;
    size_t n_tokens, tree_bytes;
} figures;

static size_t between(imp_rng *r, size_t least, size_t most) { return least + imp_rng_below(r, most - least + 1); }

static void random_tokens(imp_rng *r, int32_t *tokens, size_t n)
{
    for (size_t i = 0; i < n; i++) tokens[i] = (int32_t)imp_rng_below(r, VOCABULARY);
}

/* Add one node below `parent`; a first token that a sibling has already is drawn again. */
static int add_node(imp_radix *t, imp_rng *r, uint64_t id, uint64_t parent, place *places)
{
    int32_t run[MAX_RUN];
    size_t n = between(r, MIN_RUN, MAX_RUN);
    imp_radix_node node = {.id = id, .parent = parent, .segment = id, .n_tokens = (uint32_t)n, .tokens = run,
                           .created_s = (int64_t)id, .used_s = (int64_t)id};
    int rc = IMP_E_ARG;
    for (int attempt = 0; attempt < 100 && rc == IMP_E_ARG; attempt++) {
        random_tokens(r, run, n);
        rc = imp_radix_add(t, &node);
    }
    places[id] = (place){.parent = parent, .end = (parent ? places[parent].end : 0) + n};
    return rc;
}

static int make_tree(imp_radix *t, imp_rng *r, const options *o, place *places, size_t *n_tokens)
{
    size_t longest = o->n_prompt + o->n_prompt / 2;
    for (uint64_t id = 1; id <= o->n_nodes; id++) {
        uint64_t parent = 0;
        if (id > N_HEADS) {
            uint64_t what = imp_rng_below(r, 100);
            uint64_t span = id - 1 < 2000 ? id - 1 : 2000;
            if (what < 5) parent = 1 + imp_rng_below(r, N_HEADS);          /* a new conversation or document */
            else if (what < 20) parent = 1 + imp_rng_below(r, id - 1);     /* an old one branches */
            else parent = id - 1 - imp_rng_below(r, span);                 /* a recent one goes on */
            if (places[parent].end > longest) parent = 1 + imp_rng_below(r, N_HEADS);
        }
        int rc = add_node(t, r, id, parent, places);
        if (rc) return rc;
        *n_tokens += imp_radix_get(t, id)->n_tokens;
    }
    return 0;
}

static void make_prompt(imp_radix *t, imp_rng *r, const options *o, const place *places, int32_t *prompt)
{
    /* Of a few nodes the one that reaches furthest: prompts that long come from long conversations. */
    uint64_t id = 1 + imp_rng_below(r, o->n_nodes);
    for (int i = 0; i < 16 && places[id].end < o->n_prompt; i++) {
        uint64_t other = 1 + imp_rng_below(r, o->n_nodes);
        if (places[other].end > places[id].end) id = other;
    }
    random_tokens(r, prompt, o->n_prompt);
    for (; id; id = places[id].parent) {
        const imp_radix_node *n = imp_radix_get(t, id);
        if (n->depth >= o->n_prompt) continue;
        size_t room = o->n_prompt - n->depth;
        memcpy(prompt + n->depth, n->tokens, (room < n->n_tokens ? room : n->n_tokens) * sizeof *prompt);
    }
}

static int by_value(const void *a, const void *b)
{
    const double *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static int measure(imp_radix *t, imp_rng *r, const options *o, const place *places, figures *f)
{
    imp_radix_step steps[MAX_STEPS];
    double *us = imp_malloc(o->n_runs * sizeof *us);
    int32_t *prompts = imp_malloc(BATCH * o->n_prompt * sizeof *prompts);
    int rc = us && prompts ? 0 : IMP_E_NOMEM;
    for (size_t done = 0; rc == 0 && done < o->n_runs;) {
        size_t batch = o->n_runs - done < BATCH ? o->n_runs - done : BATCH;
        for (size_t i = 0; i < batch; i++) make_prompt(t, r, o, places, prompts + i * o->n_prompt);
        for (size_t i = 0; i < batch; i++, done++) {
            size_t n_matched;
            uint64_t start = imp_now_ns();
            size_t n_steps = imp_radix_match(t, prompts + i * o->n_prompt, o->n_prompt, true, steps, MAX_STEPS,
                                             &n_matched);
            us[done] = (double)(imp_now_ns() - start) / 1e3;
            f->mean_us += us[done] / (double)o->n_runs;
            f->mean_matched += (double)n_matched / (double)o->n_runs;
            f->mean_steps += (double)n_steps / (double)o->n_runs;
        }
    }
    if (rc == 0) {
        qsort(us, o->n_runs, sizeof *us, by_value);
        f->median_us = us[o->n_runs / 2];
        f->p99_us = us[(o->n_runs - 1) * 99 / 100];
        f->max_us = us[o->n_runs - 1];
    }
    imp_free(prompts);
    imp_free(us);
    return rc;
}

static void print_figures(const options *o, const figures *f)
{
    double n = (double)o->n_nodes;
    double own = ((double)f->tree_bytes - (double)f->n_tokens * sizeof(int32_t)) / n;
    if (o->json) {
        printf("{\"bench\": \"match\", \"version\": \"%d.%d.%d\", \"seed\": %" PRIu64 ", \"nodes\": %zu, "
               "\"tokens\": %zu, \"prompt_tokens\": %zu, \"runs\": %zu, \"matched_tokens_mean\": %.1f, "
               "\"steps_mean\": %.2f, \"median_us\": %.3f, \"p99_us\": %.3f, \"max_us\": %.3f, \"mean_us\": %.3f, "
               "\"memory_bytes\": %zu, \"memory_per_node_bytes\": %.1f, \"memory_per_token_bytes\": %zu}\n",
               IMP_VERSION_MAJOR, IMP_VERSION_MINOR, IMP_VERSION_PATCH, o->seed, o->n_nodes, f->n_tokens, o->n_prompt,
               o->n_runs, f->mean_matched, f->mean_steps, f->median_us, f->p99_us, f->max_us, f->mean_us,
               f->tree_bytes, own, sizeof(int32_t));
        return;
    }
    printf("match of a %zu-token prompt, %zu runs, seed %" PRIu64 "\n\n", o->n_prompt, o->n_runs, o->seed);
    printf("  nodes             %10zu      tokens per node    %10.1f\n", o->n_nodes, (double)f->n_tokens / n);
    printf("  matched tokens    %10.1f      nodes on the way   %10.1f   (mean)\n", f->mean_matched, f->mean_steps);
    printf("  median            %10.2f us   p99                %10.2f us\n", f->median_us, f->p99_us);
    printf("  mean              %10.2f us   max                %10.2f us\n", f->mean_us, f->max_us);
    printf("  memory per node   %10.1f B    and per token      %10zu B    (%.1f MB in all)\n", own, sizeof(int32_t),
           (double)f->tree_bytes / 1e6);
}

static bool number(const char *text, uint64_t least, uint64_t most, uint64_t *out)
{
    char *end = NULL;
    if (*text < '0' || *text > '9') return false;
    *out = strtoull(text, &end, 10);
    return *end == '\0' && *out >= least && *out <= most;
}

static bool parse(int argc, char **argv, options *o)
{
    static const struct option names[] = {{"seed", required_argument, NULL, 's'},
                                          {"nodes", required_argument, NULL, 'n'},
                                          {"prompt", required_argument, NULL, 'p'},
                                          {"runs", required_argument, NULL, 'r'},
                                          {"json", no_argument, NULL, 'j'},
                                          {NULL, 0, NULL, 0}};
    uint64_t v = 0;
    for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        if (c == 'j') {
            o->json = true;
        } else if (c == 's' && number(optarg, 0, UINT64_MAX, &v)) {
            o->seed = v;
        } else if (c == 'n' && number(optarg, N_HEADS, 10000000, &v)) {
            o->n_nodes = (size_t)v;
        } else if (c == 'p' && number(optarg, 1, 1000000, &v)) {
            o->n_prompt = (size_t)v;
        } else if (c == 'r' && number(optarg, 1, 10000000, &v)) {
            o->n_runs = (size_t)v;
        } else {
            return false;
        }
    }
    return optind == argc;
}

int main(int argc, char **argv)
{
    options o = {.seed = 1, .n_nodes = 100000, .n_prompt = 5000, .n_runs = 10000};
    if (!parse(argc, argv, &o)) {
        fprintf(stderr, "usage: bench-match [--seed N] [--nodes %d..10000000] [--prompt TOKENS] [--runs N] [--json]\n",
                N_HEADS);
        return 2;
    }
    imp_rng r;
    imp_rng_seed(&r, o.seed);
    figures f = {0};
    imp_radix *t = NULL;
    place *places = imp_calloc(o.n_nodes + 1, sizeof *places);
    int rc = places ? imp_radix_new(&t) : IMP_E_NOMEM;
    if (!rc) rc = make_tree(t, &r, &o, places, &f.n_tokens);
    if (!rc) rc = measure(t, &r, &o, places, &f);
    if (!rc) {
        f.tree_bytes = imp_radix_memory(t);
        print_figures(&o, &f);
    } else {
        fprintf(stderr, "bench-match: %s\n", rc == IMP_E_NOMEM ? "no memory" : imp_last_error());
    }
    imp_radix_free(t);
    imp_free(places);
    return rc ? 1 : 0;
}
