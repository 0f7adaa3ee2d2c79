/* bench_record.c: a callback at every FLASH_ATTN_EXT node sees queries and keys; the rest is the definition of H2O. */
#include "bench_record.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <ggml-backend.h>
#include <llama.h>

#include "impress/impress.h"
#include "model.h"
#include "replay/pattern.h"
#include "text.h"

enum { PREFIX_ROWS = 64, QUESTION_ROWS = 32, UBATCH = 512 };

typedef struct recording {
    replay_patterns *patterns;
    uint32_t n_layers, n_kv_heads, n_prefix;
    uint32_t pattern, layer; /* at work */
    bool active;
    const char *trouble;
    unsigned char *q, *k;    /* copies of a node's inputs */
    size_t q_bytes, k_bytes;
    double *sums;            /* [n_prefix] */
    float *weights;          /* [n_prefix] */
} recording;

static bool grow(unsigned char **memory, size_t *n_bytes, size_t need)
{
    if (*n_bytes >= need) return true;
    unsigned char *more = realloc(*memory, need);
    if (!more) return false;
    *memory = more;
    *n_bytes = need;
    return true;
}

static float key_at(const struct ggml_tensor *k, const unsigned char *bytes, size_t token, size_t head, size_t dim)
{
    ggml_fp16_t h;
    memcpy(&h, bytes + token * k->nb[1] + head * k->nb[2] + dim * k->nb[0], sizeof h);
    return ggml_fp16_to_fp32(h);
}

/* The shares of the prefix's tokens for one query row of one head, added to `sums`. */
static void add_row(recording *r, const float *q, size_t n_visible, const float *keys, size_t n_dims, float scale)
{
    float largest = -INFINITY, sum = 0;
    for (size_t t = 0; t < n_visible; t++) {
        float dot = 0;
        for (size_t i = 0; i < n_dims; i++) dot += q[i] * keys[t * n_dims + i];
        r->weights[t] = dot * scale;
        if (r->weights[t] > largest) largest = r->weights[t];
    }
    for (size_t t = 0; t < n_visible; t++) sum += r->weights[t] = expf(r->weights[t] - largest);
    for (size_t t = 0; t < n_visible; t++) r->sums[t] += (double)(r->weights[t] / sum);
}

static const char *record_node(recording *r, const struct ggml_tensor *node)
{
    const struct ggml_tensor *q = node->src[0], *k = node->src[1];
    float params[3]; /* scale, ALiBi's largest bias, soft cap */
    memcpy(params, node->op_params, sizeof params);
    if (q->type != GGML_TYPE_F32 || k->type != GGML_TYPE_F16 || params[1] != 0 || params[2] != 0)
        return "the model's attention is of another kind than recordings know";
    size_t n_dims = (size_t)q->ne[0], n_rows = (size_t)q->ne[1], n_heads = (size_t)q->ne[2];
    size_t n_kv = (size_t)k->ne[2], group = n_kv ? n_heads / n_kv : 0;
    if (r->layer >= r->n_layers || n_kv != r->n_kv_heads || group == 0 || (size_t)k->ne[1] < r->n_prefix)
        return "the model's layers differ from each other";
    size_t q_bytes = ggml_nbytes(q), k_bytes = ggml_nbytes(k);
    float *keys = malloc((size_t)r->n_prefix * n_dims * sizeof *keys), *row = malloc(n_dims * sizeof *row);
    const char *trouble = keys && row && grow(&r->q, &r->q_bytes, q_bytes) && grow(&r->k, &r->k_bytes, k_bytes)
                              ? NULL : "out of memory";
    if (!trouble) {
        ggml_backend_tensor_get(q, r->q, 0, q_bytes);
        ggml_backend_tensor_get(k, r->k, 0, k_bytes);
    }
    size_t most = r->pattern ? QUESTION_ROWS : PREFIX_ROWS, n_scored = n_rows < most ? n_rows : most;
    for (size_t kv = 0; !trouble && kv < n_kv; kv++) {
        for (size_t t = 0; t < r->n_prefix; t++)
            for (size_t i = 0; i < n_dims; i++) keys[t * n_dims + i] = key_at(k, r->k, t, kv, i);
        memset(r->sums, 0, r->n_prefix * sizeof *r->sums);
        for (size_t h = kv * group; h < (kv + 1) * group; h++) {
            for (size_t i = n_rows - n_scored; i < n_rows; i++) {
                memcpy(row, r->q + i * q->nb[1] + h * q->nb[2], n_dims * sizeof *row);
                size_t visible = r->pattern ? r->n_prefix : r->n_prefix - (n_rows - 1 - i);
                add_row(r, row, visible, keys, n_dims, params[0]);
            }
        }
        uint16_t *codes = r->patterns->codes +
                          (replay_pattern_codes(r->patterns, r->layer, r->pattern, (uint32_t)kv) - r->patterns->codes);
        for (size_t t = 0; t < r->n_prefix; t++)
            codes[t] = replay_pattern_code(r->sums[t] / (double)(n_scored * group));
    }
    free(row);
    free(keys);
    r->layer++;
    return trouble;
}

static bool on_node(struct ggml_tensor *node, bool ask, void *user)
{
    recording *r = user;
    if (ask) return r->active && node->op == GGML_OP_FLASH_ATTN_EXT;
    r->trouble = record_node(r, node);
    return !r->trouble;
}

/* Decode tokens [from, n); the rows of the last batch are recorded as pattern `pattern`. */
static int decode(recording *r, struct llama_context *ctx, llama_token *tokens, size_t from, size_t n, uint32_t pattern,
                  text_progress *progress)
{
    for (size_t next; from < n; from = next) {
        /* The last batch has enough rows to score. */
        next = n - from <= UBATCH ? n : n - from < UBATCH + PREFIX_ROWS ? n - PREFIX_ROWS : from + UBATCH;
        r->active = next == n;
        r->pattern = pattern;
        r->layer = 0;
        if (llama_decode(ctx, llama_batch_get_one(tokens + from, (int32_t)(next - from))) != 0 && !r->trouble)
            r->trouble = "llama.cpp can't compute the prompt";
        r->active = false;
        if (r->trouble) return app_fail("record: %s", r->trouble);
        if (next == n && r->layer != r->n_layers)
            return app_fail("record: %u of %u layers have an attention that can be recorded", r->layer, r->n_layers);
        text_progress_at(progress, (double)next / (double)n, pattern ? "questions" : "prefix");
    }
    return 0;
}

/* The questions, one a line. They point into `text`. */
static size_t split_lines(char *text, const char *lines[REPLAY_MAX_PATTERNS - 1])
{
    size_t n = 0;
    char *save = NULL;
    for (char *s = strtok_r(text, "\r\n", &save); s && n < REPLAY_MAX_PATTERNS - 1; s = strtok_r(NULL, "\r\n", &save))
        if (s[strspn(s, " \t")] != '\0') lines[n++] = s;
    return n;
}

static int record(recording *r, struct llama_model *model, const record_plan *plan, const app_prompt *prompts,
                  size_t n_questions)
{
    size_t longest = 0;
    for (size_t i = 0; i < n_questions; i++)
        if (prompts[i].n > longest) longest = prompts[i].n;
    struct llama_context_params cp = app_context_params(longest + 64, UBATCH, UBATCH, plan->n_threads, NULL);
    cp.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    cp.cb_eval = on_node;
    cp.cb_eval_user_data = r;
    struct llama_context *ctx = llama_init_from_model(model, cp);
    if (!ctx) return app_fail("record: no context of %zu tokens", longest + 64);
    text_progress progress = {.label = "recording"};
    int rc = decode(r, ctx, prompts[0].tokens, 0, r->n_prefix, 0, &progress);
    for (size_t i = 0; rc == 0 && i < n_questions; i++) {
        rc = decode(r, ctx, prompts[i].tokens, r->n_prefix, prompts[i].n, (uint32_t)i + 1, &progress);
        if (rc == 0 && !llama_memory_seq_rm(llama_get_memory(ctx), 0, (llama_pos)r->n_prefix, -1))
            rc = app_fail("record: the model's memory can't go back to the prefix");
    }
    text_progress_end(&progress);
    llama_free(ctx);
    return rc;
}

static int report(const replay_patterns *p, const char *path)
{
    replay_pattern_facts facts;
    if (replay_patterns_facts(p, 0.25, &facts) < 0) return app_fail("%s", imp_last_error());
    printf("%s: %u layers, %u KV heads, %u tokens, %u questions\n"
           "at 25 %%: two questions share %.1f %% of their tokens, two heads have a Jaccard similarity of %.3f;\n"
           "the chosen hold %.3f of the mass; chunks of 64 have %.3f +- %.3f important tokens, %.1f %% have some\n",
           path, p->n_layers, p->n_heads, p->n_tokens, p->n_patterns - 1, 100 * facts.question_overlap,
           facts.head_jaccard, facts.mass, facts.chunk_share, facts.chunk_deviation, 100 * facts.touched);
    return 0;
}

int bench_record(const record_plan *plan)
{
    char *prefix = NULL, *text = NULL;
    const char *lines[REPLAY_MAX_PATTERNS - 1];
    app_prompt prompts[REPLAY_MAX_PATTERNS - 1] = {{0}};
    struct llama_model *model = NULL;
    replay_patterns patterns = {0};
    recording r = {.patterns = &patterns};
    size_t prefix_bytes, text_bytes_, n = 0;
    int rc = app_read_text(plan->prefix, &prefix, &prefix_bytes);
    if (rc == 0) rc = app_read_text(plan->questions, &text, &text_bytes_);
    if (rc == 0) n = split_lines(text, lines);
    if (rc == 0 && n == 0) rc = app_fail("%s has no questions", plan->questions);
    if (rc == 0) rc = app_model_load(plan->model, plan->verbose, &model);
    size_t n_prefix = SIZE_MAX;
    for (size_t i = 0; rc == 0 && i < n; i++) {
        rc = app_prompt_make(model, prefix, prefix_bytes, lines[i], true, &prompts[i]);
        if (rc == 0 && prompts[i].n_prefix < n_prefix) n_prefix = prompts[i].n_prefix;
    }
    if (rc == 0 && n_prefix < 2 * REPLAY_CHUNK)
        rc = app_fail("%s: a prefix of %zu tokens is too short, must have %d at least", plan->prefix, n_prefix,
                      2 * REPLAY_CHUNK);
    if (rc == 0) {
        r.n_layers = (uint32_t)llama_model_n_layer(model);
        r.n_kv_heads = (uint32_t)llama_model_n_head_kv(model);
        r.n_prefix = (uint32_t)n_prefix;
        if (replay_patterns_new(r.n_layers, r.n_kv_heads, r.n_prefix, (uint32_t)n + 1, &patterns) < 0)
            rc = app_fail("record: %s", imp_last_error());
        r.sums = malloc(n_prefix * sizeof *r.sums);
        r.weights = malloc(n_prefix * sizeof *r.weights);
        if (rc == 0 && (!r.sums || !r.weights)) rc = app_fail("out of memory");
    }
    if (rc == 0) rc = record(&r, model, plan, prompts, n);
    if (rc == 0 && replay_patterns_write(&patterns, plan->out) < 0) rc = app_fail("%s", imp_last_error());
    if (rc == 0) rc = report(&patterns, plan->out);
    for (size_t i = 0; i < n; i++) app_prompt_free(&prompts[i]);
    replay_patterns_free(&patterns);
    if (model) llama_model_free(model);
    free(r.sums);
    free(r.weights);
    free(r.q);
    free(r.k);
    free(text);
    free(prefix);
    return rc;
}
