/* engine.c: a prompt with a long shared prefix, computed once, and then answered from the store.
 *
 * usage: engine [STORE-DIRECTORY] [PREFIX-TOKENS]
 *
 * Without a directory, or with "", a temporary one is made and removed. tiny_engine.c shows the calls (how the space
 * tells of RoPE, and a commit of its queries: sketches and orders are made of both); this only asks four times and
 * compares: everything computed; the prefix loaded whole (`as`); the quarter of the prefix that matters for the
 * question, chosen in each layer, by all keys (`as-h2o-lru`) and by sketches of them (`impress`). The store is made for
 * the last, so that the others read its chunks: keys and values of 16 tokens, together. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tiny_engine.h"

enum { QUESTION = 32, VOCAB = 512 };

static double ms(uint64_t ns) { return (double)ns / 1e6; }

static int failed(const char *what, int rc)
{
    fprintf(stderr, "engine: %s: %s\n", what, imp_last_error()[0] ? imp_last_error() : imp_status_text(rc));
    return 1;
}

static void print_row(const char *system, const tiny_report *r, const float *logits, const float *reference)
{
    double largest = 0;
    int best = 0, best_reference = 0;
    for (int i = 0; i < VOCAB; i++) {
        double difference = fabs((double)logits[i] - (double)reference[i]);
        if (!(difference <= largest)) largest = difference;
        if (logits[i] > logits[best]) best = i;
        if (reference[i] > reference[best_reference]) best_reference = i;
    }
    uint64_t known = r->match_ns + r->load.identify_ns + r->load.io_wait_ns + r->load.gather_ns;
    printf("%-12s %8.1f %7.2f %9.2f %7.2f %7.2f %8.1f %8zu %7zu %10.2f %12.3g  %s\n", system, ms(r->total_ns),
           ms(r->match_ns), ms(r->load.identify_ns), ms(r->load.io_wait_ns), ms(r->load.gather_ns),
           ms(r->total_ns - known), r->n_matched, r->n_loaded, (double)r->load.bytes_read / 1e6, largest,
           best == best_reference ? "yes" : "no");
}

/* The store with what the system `impress` wants of one: which rows lie together, and sketches of the keys. */
static int open_store(const char *dir, imp_store **out)
{
    imp_switches switches;
    imp_store_opts opts;
    imp_store_opts_init(&opts);
    int rc = imp_system_preset("impress", &switches);
    if (rc < 0) return rc;
    imp_store_opts_switches(&opts, &switches);
    return imp_store_open(dir, &opts, out);
}

/* The prompt computed whole, and stored. */
static int first_request(const tiny_model *m, const char *dir, const int32_t *tokens, uint32_t n, tiny_cells *c,
                         float *logits)
{
    imp_store *store = NULL;
    imp_space *space = NULL;
    tiny_report report;
    int rc = open_store(dir, &store);
    if (rc == 0) rc = tiny_space_open(m, store, &space);
    if (rc == 0) rc = tiny_prompt(m, space, NULL, tokens, n, c, logits, &report);
    /* Behind the answer, and only what is new: of the prompt, report.n_matched tokens were in the store already. */
    if (rc == 0 && report.whole) rc = tiny_store(m, space, c, tokens, n, (uint32_t)report.n_matched);
    if (rc == 0) rc = imp_store_flush(store);
    imp_space_close(space);
    imp_store_close(store);
    return rc;
}

/* Another question about the same prefix, in four ways. */
static int second_request(const tiny_model *m, const char *dir, const int32_t *tokens, uint32_t n, tiny_cells *c)
{
    static float reference[VOCAB], logits[VOCAB];
    imp_store *store = NULL;
    imp_space *space = NULL;
    tiny_report report;
    int rc = open_store(dir, &store);
    if (rc == 0) rc = tiny_space_open(m, store, &space);
    if (rc < 0) goto out;

    rc = tiny_prompt(m, NULL, NULL, tokens, n, c, reference, &report);
    if (rc < 0) goto out;
    printf("%-12s %8s %7s %9s %7s %7s %8s %8s %7s %10s %12s  %s\n", "system", "ttft ms", "match", "identify", "io wait",
           "gather", "compute", "matched", "loaded", "MB read", "difference", "same token");
    print_row("recomp", &report, reference, reference);

    static const char *const systems[] = {"as", "as-h2o-lru", "impress"};
    static const double retention[] = {1.0, 0.25, 0.25};
    for (int i = 0; i < 3; i++) {
        imp_load_opts opts;
        imp_load_opts_init(&opts);
        opts.retention = retention[i];
        rc = imp_system_preset(systems[i], &opts.switches);
        opts.switches.cache = IMP_CACHE_OF_STORE; /* not the system's own: another policy empties the tiers */
        if (rc == 0) rc = tiny_prompt(m, space, &opts, tokens, n, c, logits, &report);
        if (rc < 0) goto out;
        print_row(systems[i], &report, logits, reference);
    }
out:
    imp_space_close(space);
    imp_store_close(store);
    return rc;
}

int main(int argc, char **argv)
{
    char made[] = "/tmp/impress-engine-XXXXXX";
    int temporary = argc < 2 || argv[1][0] == '\0';
    const char *dir = temporary ? mkdtemp(made) : argv[1];
    long n_prefix = argc > 2 ? strtol(argv[2], NULL, 10) : 2000;
    if (argc > 3 || !dir || n_prefix < 64 || n_prefix > 100000) {
        fprintf(stderr, "usage: engine [STORE-DIRECTORY] [PREFIX-TOKENS (64..100000)]\n");
        return 2;
    }

    const tiny_shape shape = {.n_layers = 4, .n_heads = 8, .n_kv_heads = 2, .head_dim = 32, .n_vocab = VOCAB,
                              .seed = 1};
    uint32_t n = (uint32_t)n_prefix + QUESTION;
    int rc = IMP_E_NOMEM, status;
    tiny_cells cells = {0};
    static float logits[VOCAB];
    tiny_model *m = tiny_model_new(&shape);
    int32_t *tokens = malloc(n * sizeof *tokens);
    if (!m || !tokens || tiny_cells_init(&cells, m, n) < 0) {
        status = failed("start", rc);
        goto out;
    }
    for (uint32_t i = 0; i < n; i++) tokens[i] = (int32_t)((i * i + 7 * i) % 509);

    rc = first_request(m, dir, tokens, n, &cells, logits);
    for (uint32_t i = (uint32_t)n_prefix; i < n; i++) tokens[i] = (int32_t)((3 * i * i + i) % 503);
    if (rc == 0) rc = second_request(m, dir, tokens, n, &cells);
    status = rc < 0 ? failed(dir, rc) : 0;
out:
    if (temporary) {
        char command[64];
        snprintf(command, sizeof command, "rm -rf %s", dir);
        if (system(command) != 0) fprintf(stderr, "engine: %s stays\n", dir);
    }
    tiny_cells_free(&cells);
    tiny_model_free(m);
    free(tokens);
    return status;
}
