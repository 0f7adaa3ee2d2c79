/* llama_fixture.h: a small model, prompts, and reference logits for the tests of the llama.cpp adapter.
 *
 * The reference is llama.cpp alone on the same tokens, cut into batches at the same place: how many tokens are computed
 * together changes the last bits, and on a CPU a few tokens at a time add up in half precision. */
#ifndef TEST_LLAMA_FIXTURE_H
#define TEST_LLAMA_FIXTURE_H

#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "impress/llama.h"

enum { N_PREFIX = 100, N_CTX = 1024, MAX_PROMPT = 900 };

static const char prefix_text[] =
    "The lighthouse on the northern cape was built in the year 1871 by a company of masons from the mainland. Its "
    "tower is made of grey granite and stands forty-two metres high. The first keeper was a woman called Marit "
    "Halvorsen, who lived there for thirty years with two goats, a telescope and a library of some six hundred books."
    " Every evening she climbed the two hundred and nine steps, trimmed the wick, wound the clockwork that turned the"
    " lens, and wrote the weather into a blue ledger. In the winter of 1893 a storm broke the window of the lantern "
    "room. She kept the lamp burning with a sail tied over the opening, and the supply ship Aurora found the harbour "
    "because of it. The ledger is kept in the museum of the town today, beside the old lens, which still throws its "
    "beam across the ceiling when the sun comes in. Visitors may climb the tower from May to September, except on "
    "Mondays. ";
static const char question_a[] =
    "\n\nQuestion: Who was the first keeper of the lighthouse, and how long did she live there?\nAnswer:";
static const char question_b[] =
    "\n\nQuestion: What is the name of the ship that found the harbour in the storm?\nAnswer: The ship";

static struct llama_model *model;
static const char *model_path;
static int n_vocab;
static char store_dir[256];

typedef struct prompt {
    llama_token tokens[MAX_PROMPT];
    int n_prefix, n;
} prompt;

static inline void quiet(enum ggml_log_level level, const char *text, void *user)
{
    (void)user;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

/* Exits 77 without a model. */
static inline void need_model(void)
{
    model_path = getenv("IMPRESS_TEST_MODEL");
    if (!model_path) model_path = getenv("IMPRESS_MODEL");
    if (!model_path || access(model_path, R_OK) != 0) {
        printf("skipped: no model; IMPRESS_TEST_MODEL names none that can be read\n");
        exit(77);
    }
    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct llama_model_params mp = llama_model_default_params();
    mp.use_extra_bufts = false; /* weights as they are: loads at once */
    model = llama_model_load_from_file(model_path, mp);
    if (!model) {
        printf("llama.cpp can't load %s\n", model_path);
        exit(1);
    }
    n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
}

static inline int add_text(llama_token *tokens, int n, const char *text, bool start)
{
    int added = llama_tokenize(llama_model_get_vocab(model), text, (int32_t)strlen(text), tokens + n, MAX_PROMPT - n,
                               start, false);
    assert_true(added > 0);
    return n + added;
}

/* A prefix of `n_prefix` tokens, and a question. */
static inline prompt make_prompt(int n_prefix, const char *question)
{
    prompt p = {.n_prefix = n_prefix};
    int n = 0;
    while (n < n_prefix) n = add_text(p.tokens, n, prefix_text, n == 0);
    p.n = add_text(p.tokens, n_prefix, question, false);
    return p;
}

static inline struct llama_context_params context_params(void)
{
    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = N_CTX;
    cp.n_batch = 512;
    cp.n_ubatch = 256;
    cp.n_seq_max = 2;
    cp.kv_unified = true;
    cp.n_threads = cp.n_threads_batch = 1; /* several wait for each other, busily, where the machine has other work */
    return cp;
}

static inline imp_llama *open_llama(imp_store *store, struct llama_context_params cp)
{
    imp_llama_params params;
    imp_llama_params_init(&params);
    params.store = store;
    params.model_files = &model_path;
    params.n_model_files = 1;
    imp_llama *ctx;
    if (imp_llama_init(model, cp, &params, &ctx) != 0) fail_msg("%s", imp_last_error());
    return ctx;
}

static inline imp_llama_request request(const char *system, double retention)
{
    imp_llama_params params;
    imp_llama_params_init(&params);
    params.request.load.retention = retention;
    assert_int_equal(imp_system_preset(system, &params.request.load.switches), 0);
    return params.request;
}

static inline void set_request(imp_llama *ctx, llama_seq_id seq, const char *system, double retention)
{
    imp_llama_request r = request(system, retention);
    assert_int_equal(imp_llama_set_request(ctx, seq, &r), 0);
}

static inline void put(struct llama_batch *b, llama_token token, int pos, llama_seq_id seq, bool output)
{
    int32_t i = b->n_tokens++;
    b->token[i] = token;
    b->pos[i] = pos;
    b->n_seq_id[i] = 1;
    b->seq_id[i][0] = seq;
    b->logits[i] = output;
}

/* Decode tokens [from, to) of the prompt, `step` at a time, the last of the prompt with an output. */
static inline int32_t feed(imp_llama *ctx, const prompt *p, llama_seq_id seq, int from, int to, int step)
{
    struct llama_batch b = llama_batch_init(step, 0, 1);
    int32_t rc = 0;
    for (int i = from; i < to && rc == 0;) {
        b.n_tokens = 0;
        for (int end = i + step < to ? i + step : to; i < end; i++) put(&b, p->tokens[i], i, seq, i + 1 == p->n);
        rc = imp_llama_decode(ctx, b);
    }
    llama_batch_free(b);
    return rc;
}

static inline float *copy_logits(const float *logits)
{
    assert_non_null(logits);
    float *copy = malloc((size_t)n_vocab * sizeof *copy);
    assert_non_null(copy);
    memcpy(copy, logits, (size_t)n_vocab * sizeof *copy);
    return copy;
}

/* Logits of the first output, from llama.cpp alone. */
static inline float *reference(const prompt *p, struct llama_context_params cp)
{
    imp_llama *ctx = open_llama(NULL, cp);
    assert_int_equal(feed(ctx, p, 0, 0, p->n_prefix, 512), 0);
    assert_int_equal(feed(ctx, p, 0, p->n_prefix, p->n, 512), 0);
    float *logits = copy_logits(imp_llama_get_logits_ith(ctx, -1));
    imp_llama_free(ctx);
    return logits;
}

static inline int top(const float *logits)
{
    int best = 0;
    for (int i = 1; i < n_vocab; i++) {
        if (logits[i] > logits[best]) best = i;
    }
    return best;
}

static inline double divergence(const float *p, const float *q)
{
    double max_p = p[top(p)], max_q = q[top(q)], sum_p = 0, sum_q = 0, d = 0;
    for (int i = 0; i < n_vocab; i++) {
        sum_p += exp(p[i] - max_p);
        sum_q += exp(q[i] - max_q);
    }
    for (int i = 0; i < n_vocab; i++) {
        double lp = p[i] - max_p - log(sum_p), lq = q[i] - max_q - log(sum_q);
        d += exp(lp) * (lp - lq);
    }
    return d;
}

static inline void check_same(const float *expected, const float *got)
{
    assert_non_null(got);
    double d = divergence(expected, got);
    if (!(d < 1e-3)) fail_msg("KL %g", d);
    assert_int_equal(top(expected), top(got));
}

/* Partly loaded, or computed in batches of other sizes. */
static inline void check_near(const float *expected, const float *got, double max)
{
    assert_non_null(got);
    double d = divergence(expected, got);
    if (!(d < max)) fail_msg("KL %g", d);
}

static inline imp_llama_report report(imp_llama *ctx, llama_seq_id seq)
{
    imp_llama_report r;
    assert_int_equal(imp_llama_get_report(ctx, seq, &r), 0);
    assert_int_equal(r.total_ns, r.match_ns + r.identify_ns + r.io_wait_ns + r.gather_ns + r.compute_ns);
    return r;
}

static inline imp_store *open_store(void)
{
    imp_store *store;
    if (imp_store_open(store_dir, NULL, &store) != 0) fail_msg("%s", imp_last_error());
    return store;
}

static inline void remove_tree(const char *dir)
{
    DIR *d = opendir(dir);
    if (!d) return;
    for (struct dirent *e; (e = readdir(d));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        char path[600];
        struct stat st;
        if (snprintf(path, sizeof path, "%s/%s", dir, e->d_name) >= (int)sizeof path) continue;
        if (lstat(path, &st) == 0 && S_ISDIR(st.st_mode)) {
            remove_tree(path);
        } else {
            unlink(path);
        }
    }
    closedir(d);
    rmdir(dir);
}

/* Each test has a store of its own. */
static inline int make_dir(void **state)
{
    (void)state;
    const char *tmp = getenv("TMPDIR");
    snprintf(store_dir, sizeof store_dir, "%s/impress-llama-XXXXXX", tmp ? tmp : "/tmp");
    return mkdtemp(store_dir) ? 0 : -1;
}

static inline int drop_dir(void **state)
{
    (void)state;
    remove_tree(store_dir);
    return 0;
}

/* Compute a prompt's prefix in sequence 0, give an answer's first token, and have it stored. */
static inline void store_prefix(imp_llama *ctx, imp_store *store, const prompt *p)
{
    assert_int_equal(feed(ctx, p, 0, 0, p->n_prefix, 512), 0);
    assert_int_equal(feed(ctx, p, 0, p->n_prefix, p->n, 512), 0);
    imp_llama_clear(ctx);
    assert_int_equal(imp_store_flush(store), 0);
}

#endif
