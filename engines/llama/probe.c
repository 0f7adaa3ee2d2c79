/* probe.c: does this model fit? Asked of the model's description, then of its graph, then by trying it out. Whatever is
 * assumed elsewhere about the graph is checked here, so that a model or a version of llama.cpp that breaks it shows
 * when a context is opened, not in an answer. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "adapter.h"

enum { CHECK_PREFIX = 24, CHECK_TAIL = 8, CHECK_TOKENS = CHECK_PREFIX + CHECK_TAIL };

static void refuse(lc_probe *p, const char *why)
{
    if (!p->why) p->why = why;
}

/* ---- the graph */

static void remember(lc_probe *p, const void *bytes, size_t n)
{
    if (p->n_graph + n > p->cap_graph) {
        size_t cap = 2 * (p->n_graph + n) + 4096;
        uint8_t *graph = realloc(p->graph, cap);
        if (!graph) {
            p->no_memory = true;
            return;
        }
        p->graph = graph;
        p->cap_graph = cap;
    }
    memcpy(p->graph + p->n_graph, bytes, n);
    p->n_graph += n;
}

/* What is computed, for the space: RoPE's parameters, norms' epsilons, scales and so on, where metadata overrides show
 * too. Views are left out: they hold cell numbers. So are custom operations, which hold addresses. */
static void remember_node(lc_probe *p, const struct ggml_tensor *t)
{
    if (t->op >= GGML_OP_MAP_CUSTOM1 && t->op <= GGML_OP_CUSTOM) return;
    int32_t op = (int32_t)t->op;
    remember(p, &op, sizeof op);
    remember(p, t->op_params, sizeof t->op_params);
    if (t->op != GGML_OP_ROPE || !t->src[2] || t->src[2] == p->factors) return;
    p->factors = t->src[2];
    size_t n = ggml_nbytes(p->factors);
    uint8_t *bytes = malloc(n);
    if (!bytes) {
        p->no_memory = true;
        return;
    }
    ggml_backend_tensor_get(p->factors, bytes, 0, n);
    remember(p, bytes, n);
    free(bytes);
}

/* A cache tensor holds a whole row per cell, streams one after the other. */
static bool is_cache(const struct ggml_tensor *t)
{
    return !t->view_src && t->ne[3] == 1 && t->nb[1] == ggml_row_size(t->type, t->ne[0]) &&
           t->nb[2] == t->nb[1] * (size_t)t->ne[1];
}

/* `view` is [head_dim, cells, heads, streams] over the rows of `cache`. */
static bool is_row_view(const struct ggml_tensor *view, const struct ggml_tensor *cache)
{
    return view->type == cache->type && view->nb[1] == cache->nb[1] && view->ne[0] * view->ne[2] == cache->ne[0] &&
           view->nb[2] == ggml_row_size(view->type, view->ne[0]);
}

static void probe_write(imp_llama *ctx, struct ggml_tensor *t)
{
    lc_probe *p = &ctx->probe;
    const struct ggml_tensor *idx = t->src[1];
    if (p->n_written == 2) {
        refuse(p, "it writes more than keys and values into its memory");
        return;
    }
    if (!idx || (idx->type != GGML_TYPE_I64 && idx->type != GGML_TYPE_I32) || idx->ne[0] != t->src[0]->ne[1]) {
        refuse(p, "its cache isn't written row by row (flash attention is off?)");
        return;
    }
    p->source[p->n_written] = t->src[0];
    p->written[p->n_written++] = lc_root(t);
    p->others = false;
}

static void probe_attention(imp_llama *ctx, struct ggml_tensor *t)
{
    lc_probe *p = &ctx->probe;
    const struct ggml_tensor *q = t->src[0], *k_view = t->src[1], *v_view = t->src[2];
    struct ggml_tensor *k = lc_root(t->src[1]), *v = lc_root(t->src[2]), *mask = t->src[3];
    float params[3]; /* scale, ALiBi's bias, soft cap */
    memcpy(params, t->op_params, sizeof params);

    if (k == v) refuse(p, "keys and values share one cache (MLA)");
    if (params[1] > 0) refuse(p, "ALiBi");
    if (p->n_written != 2 || p->others) refuse(p, "a layer's attention doesn't follow the writes to its cache");
    for (size_t i = 0; i < ctx->n_sites; i++) {
        if (ctx->sites[i].k == k) refuse(p, "layers share their KV");
    }
    if (p->why) return;
    bool k_first = p->written[0] == k && p->written[1] == v, v_first = p->written[0] == v && p->written[1] == k;
    if (!k_first && !v_first) {
        refuse(p, "attention reads other keys and values than were written");
    } else if (!is_cache(k) || !is_cache(v) || !is_row_view(k_view, k) || !is_row_view(v_view, v) ||
               k_view->ne[2] != v_view->ne[2] || k->ne[1] != v->ne[1] || k->ne[2] != v->ne[2]) {
        refuse(p, "its cache isn't laid out row by row");
    } else if (q->type != GGML_TYPE_F32 || q->ne[0] != k_view->ne[0] || q->ne[2] % k_view->ne[2] != 0 ||
               q->nb[0] != sizeof(float)) {
        refuse(p, "its queries have an unexpected shape");
    } else if (!mask || mask->type != GGML_TYPE_F16 || (p->mask && lc_root(mask) != p->mask)) {
        refuse(p, "its layers don't share one attention mask");
    } else if (ctx->n_sites > 0 && (k->type != ctx->sites[0].k->type || v->type != ctx->sites[0].v->type)) {
        refuse(p, "its layers' caches differ in type");
    }
    if (p->why) return;

    lc_site *sites = realloc(ctx->sites, (ctx->n_sites + 1) * sizeof *sites);
    if (!sites) {
        p->no_memory = true;
        return;
    }
    ctx->sites = sites;
    lc_site *site = &sites[ctx->n_sites];
    const lc_site *before = ctx->n_sites ? site - 1 : NULL;
    *site = (lc_site){
        .k = k, .v = v, .first = p->written[0], .last = p->written[1],
        .shape = {(uint32_t)k_view->ne[2], (uint32_t)k_view->ne[0], (uint32_t)v_view->ne[0]},
        .n_heads = (uint32_t)q->ne[2], .scale = params[0], .softcap = params[2],
    };
    if (before) {
        size_t rows = (size_t)LC_QUERY_ROWS * before->n_heads * before->shape.head_dim_k;
        site->queries_at = before->queries_at + rows;
    }
    const char *no_rope = lc_rope_learn(p->source[k_first ? 0 : 1], site);
    if (!p->no_ropes) p->no_ropes = no_rope;
    ctx->n_sites++;
    p->mask = lc_root(mask);
    p->sinks = p->sinks || t->src[4];
    p->n_written = 0;
}

void lc_probe_node(imp_llama *ctx, struct ggml_tensor *t)
{
    lc_probe *p = &ctx->probe;
    switch (t->op) {
    case GGML_OP_NONE:
    case GGML_OP_VIEW:
    case GGML_OP_PERMUTE:
    case GGML_OP_RESHAPE:
    case GGML_OP_TRANSPOSE: return;
    case GGML_OP_SET_ROWS: probe_write(ctx, t); break;
    case GGML_OP_FLASH_ATTN_EXT: probe_attention(ctx, t); break;
    default: p->others = true;
    }
    remember_node(p, t);
}

/* ---- trying it out */

/* What the self-check keeps of the first run. */
typedef struct check {
    llama_seq_id seq;
    llama_token tokens[CHECK_TOKENS];
    uint32_t cells[CHECK_TOKENS], placed[CHECK_PREFIX];
    uint8_t **k, **v; /* rows of the prefix, per layer */
    size_t *order;    /* row i of the prefix goes to placed[order[i]] */
    float *logits;
} check;

static int decode_part(imp_llama *ctx, check *c, size_t first, size_t end, bool logits, lc_hook_mode mode)
{
    while (first < end) {
        size_t n = end - first;
        if (n > ctx->n_batch) n = ctx->n_batch;
        if (mode == LC_HOOK_PROBE && n > ctx->n_ubatch) n = ctx->n_ubatch;
        struct llama_batch *b = &ctx->work;
        b->n_tokens = (int32_t)n;
        for (size_t i = 0; i < n; i++) {
            b->token[i] = c->tokens[first + i];
            b->pos[i] = (llama_pos)(first + i);
            b->n_seq_id[i] = 1;
            b->seq_id[i][0] = c->seq;
            b->logits[i] = logits && first + i + 1 == end;
        }
        int error = 0;
        if (lc_hook_decode(ctx, *b, mode, &error) != 0) return lc_error(IMP_E_UNSUPPORTED, "llama_decode failed");
        if (error) return error;
        if (mode == LC_HOOK_PROBE) mode = LC_HOOK_WATCH;
        for (size_t i = 0; i < n && i < ctx->hook.n_cells; i++) c->cells[first + i] = ctx->hook.cells[i];
        first += n;
    }
    return 0;
}

static int fill_check(imp_llama *ctx, void *user, size_t layer, const struct ggml_tensor *attention)
{
    check *c = user;
    uint32_t cells[CHECK_PREFIX];
    (void)attention;
    for (size_t i = 0; i < CHECK_PREFIX; i++) cells[i] = c->placed[c->order[i]];
    lc_cells_write(ctx, layer, cells, CHECK_PREFIX, c->k[layer], c->v[layer]);
    return 0;
}

static double kl(const float *p, const float *q, size_t n, bool *same_top)
{
    double max_p = p[0], max_q = q[0], sum_p = 0, sum_q = 0, d = 0;
    size_t top_p = 0, top_q = 0;
    for (size_t i = 1; i < n; i++) {
        if (p[i] > max_p) max_p = p[top_p = i];
        if (q[i] > max_q) max_q = q[top_q = i];
    }
    for (size_t i = 0; i < n; i++) {
        sum_p += exp(p[i] - max_p);
        sum_q += exp(q[i] - max_q);
    }
    for (size_t i = 0; i < n; i++) {
        double lp = p[i] - max_p - log(sum_p), lq = q[i] - max_q - log(sum_q);
        d += exp(lp) * (lp - lq);
    }
    *same_top = top_p == top_q;
    return d;
}

/* Place cells, wipe them, fill them while the tail computes, and compare the logits with the first run's. In the same
 * order they are the same to the bit, or nearly. In another one attention adds up in another order, in half precision
 * on some backends: on a short and senseless text that alone is a KL of some 0.01. Rows in wrong cells give 1. */
static int try_order(imp_llama *ctx, check *c, double max_kl, const char *what)
{
    llama_memory_seq_rm(ctx->memory, c->seq, -1, -1);
    if (lc_pass_place(ctx, c->seq, CHECK_PREFIX, CHECK_PREFIX, c->placed) != 0) {
        return lc_error(IMP_E_UNSUPPORTED, "cells can't be placed");
    }
    for (size_t l = 0; l < ctx->n_sites; l++) {
        const lc_site *site = &ctx->sites[l];
        void *zeros = calloc(CHECK_PREFIX, site->k->nb[1] + site->v->nb[1]);
        if (!zeros) return lc_error(IMP_E_NOMEM, "no memory for the self-check");
        lc_cells_write(ctx, l, c->placed, CHECK_PREFIX, zeros, zeros);
        free(zeros);
    }
    lc_hook *h = &ctx->hook;
    h->fill = fill_check;
    h->fill_user = c;
    h->fill_once = true;
    h->placed = c->placed;
    h->n_placed = CHECK_PREFIX;
    h->n_visible = CHECK_PREFIX + 1;
    int rc = decode_part(ctx, c, CHECK_PREFIX, CHECK_TOKENS, true, LC_HOOK_FILL);
    if (rc < 0) return rc;
    const float *logits = llama_get_logits_ith(ctx->lctx, -1);
    bool same_top;
    if (!logits) return lc_error(IMP_E_UNSUPPORTED, "no logits");
    double d = kl(c->logits, logits, ctx->n_vocab, &same_top);
    lc_say(IMP_LOG_DEBUG, "self-check, %s: KL %.2e", what, d);
    if (!(d < max_kl) || (max_kl < 0.01 && !same_top)) {
        return lc_error(IMP_E_UNSUPPORTED, "logits over loaded cells differ (%s: KL %.1e)", what, d);
    }
    return 0;
}

static void check_free(imp_llama *ctx, check *c)
{
    for (size_t l = 0; l < ctx->n_sites; l++) {
        if (c->k) free(c->k[l]);
        if (c->v) free(c->v[l]);
    }
    free(c->k);
    free(c->v);
    free(c->order);
    free(c->logits);
}

static int keep_rows(imp_llama *ctx, check *c)
{
    c->k = calloc(ctx->n_sites, sizeof *c->k);
    c->v = calloc(ctx->n_sites, sizeof *c->v);
    c->order = calloc(CHECK_PREFIX, sizeof *c->order);
    c->logits = malloc(ctx->n_vocab * sizeof *c->logits);
    if (!c->k || !c->v || !c->order || !c->logits) return lc_error(IMP_E_NOMEM, "no memory for the self-check");
    const float *logits = llama_get_logits_ith(ctx->lctx, -1);
    if (!logits) return lc_error(IMP_E_UNSUPPORTED, "no logits");
    memcpy(c->logits, logits, ctx->n_vocab * sizeof *c->logits);
    for (size_t l = 0; l < ctx->n_sites; l++) {
        c->k[l] = malloc(CHECK_PREFIX * ctx->sites[l].k->nb[1]);
        c->v[l] = malloc(CHECK_PREFIX * ctx->sites[l].v->nb[1]);
        if (!c->k[l] || !c->v[l]) return lc_error(IMP_E_NOMEM, "no memory for the self-check");
        lc_cells_read(ctx, l, c->cells, CHECK_PREFIX, c->k[l], c->v[l]);
    }
    return 0;
}

/* What the first ubatch of the first run told. */
static const char *graph_why(imp_llama *ctx)
{
    const lc_probe *p = &ctx->probe;
    int32_t n_layer = llama_model_n_layer(ctx->model);
    imp_type type;
    if (p->why) return p->why;
    if (p->no_memory) return "no memory for the self-check";
    if (ctx->n_sites == 0) return "flash attention is off";
    if (ctx->n_sites != (size_t)n_layer) return "not every layer has attention over KV of its own";
    if (p->n_written != 0) return "it writes more than keys and values into its memory";
    if (!lc_space_type(ctx->sites[0].k->type, &type) || !lc_space_type(ctx->sites[0].v->type, &type)) {
        return "the cache's type is neither f16, bf16 nor q8_0";
    }
    return NULL;
}

/* Returns 0, or a status with the reason in ctx->why. */
static int try_out(imp_llama *ctx, check *c)
{
    int rc = decode_part(ctx, c, 0, CHECK_PREFIX, false, LC_HOOK_PROBE);
    if (rc < 0) return rc;
    const char *why = graph_why(ctx);
    if (why) return lc_error(IMP_E_UNSUPPORTED, "%s", why);

    ctx->stream_cells = (size_t)ctx->sites[0].k->ne[1];
    ctx->n_streams = (size_t)ctx->sites[0].k->ne[2];
    ctx->host = true;
    for (size_t l = 0; l < ctx->n_sites; l++) {
        ctx->host = ctx->host && ggml_backend_buffer_is_host(ctx->sites[l].k->buffer) &&
                    ggml_backend_buffer_is_host(ctx->sites[l].v->buffer);
    }
    rc = decode_part(ctx, c, CHECK_PREFIX, CHECK_TOKENS, true, LC_HOOK_WATCH);
    lc_pass_measure(ctx);
    if (!rc) lc_pass_note(ctx, CHECK_TOKENS - CHECK_PREFIX, CHECK_PREFIX + 1, true); /* until there is something to do */
    if (!rc) rc = keep_rows(ctx, c);
    if (rc < 0) return rc;
    for (size_t i = 0; i < CHECK_PREFIX; i++) c->order[i] = i;
    rc = try_order(ctx, c, 1e-3, "in order");
    if (rc < 0) return rc;
    for (size_t i = 0; i < CHECK_PREFIX; i++) c->order[i] = (i * 7 + 5) % CHECK_PREFIX; /* 7 and 24: coprime */
    return try_order(ctx, c, 0.1, "in another order");
}

/* What the model's description tells. */
static const char *model_why(const imp_llama *ctx, const struct llama_context_params *cp)
{
    const struct llama_model *m = ctx->model;
    enum llama_rope_type rope = llama_model_rope_type(m);
    bool m_rope = rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE || rope == LLAMA_ROPE_TYPE_VISION;
    bool pools = llama_pooling_type(ctx->lctx) > LLAMA_POOLING_TYPE_NONE;
    if (!ctx->memory) return "it has no KV memory";
    if (llama_model_is_recurrent(m)) return "it is recurrent";
    if (llama_model_is_hybrid(m)) return "it is a hybrid with recurrent layers";
    if (llama_model_is_diffusion(m)) return "it is a diffusion model";
    if (llama_model_has_encoder(m)) return "it has an encoder";
    if (llama_model_n_swa(m) > 0) return "sliding-window attention";
    if (m_rope) return "M-RoPE";
    if (cp->embeddings || pools) return "the context gives embeddings";
    if (cp->attention_type == LLAMA_ATTENTION_TYPE_NON_CAUSAL) return "attention isn't causal";
    if (cp->ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT || cp->ctx_other) return "the context shares another one's memory";
    if (cp->n_samplers > 0) return "samplers run inside the backend";
    if (cp->flash_attn_type == LLAMA_FLASH_ATTN_TYPE_DISABLED) return "flash attention is off";
    if (llama_n_ctx_seq(ctx->lctx) < CHECK_TOKENS) return "the context is shorter than the self-check";
    return NULL;
}

void lc_probe_run(imp_llama *ctx, const struct llama_context_params *cp)
{
    /* The last sequence: where each has a stream of its own, its cells don't start at 0. */
    check c = {.seq = (llama_seq_id)ctx->n_seq_max - 1};
    for (uint32_t i = 0; i < CHECK_TOKENS; i++) c.tokens[i] = (llama_token)((i * 7919 + 11) % ctx->n_vocab);

    ctx->fit = IMP_LLAMA_FIT_NONE;
    const char *why = model_why(ctx, cp);
    if (why) {
        snprintf(ctx->why, sizeof ctx->why, "%s", why);
        return;
    }
    if (try_out(ctx, &c) < 0) {
        snprintf(ctx->why, sizeof ctx->why, "%s", imp_last_error());
    } else if (ctx->probe.sinks) {
        ctx->fit = IMP_LLAMA_FIT_WHOLE;
        snprintf(ctx->why, sizeof ctx->why, "attention sinks, which the selection doesn't know");
    } else {
        ctx->fit = IMP_LLAMA_FIT_FULL;
        ctx->why[0] = '\0';
        if (ctx->probe.no_ropes) lc_say(IMP_LOG_INFO, "no sketches of this model's keys: %s", ctx->probe.no_ropes);
    }
    check_free(ctx, &c);
    llama_memory_clear(ctx->memory, false);
}
