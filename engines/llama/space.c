/* space.c: what has to be equal before KV is shared. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "adapter.h"

bool lc_space_type(enum ggml_type t, imp_type *out)
{
    switch (t) {
    case GGML_TYPE_F16: *out = IMP_TYPE_F16; return true;
    case GGML_TYPE_BF16: *out = IMP_TYPE_BF16; return true;
    case GGML_TYPE_Q8_0: *out = IMP_TYPE_Q8_0; return true;
    default: return false;
    }
}

int lc_space_describe(imp_llama *ctx, const char *salt, imp_space **out)
{
    imp_layer_shape *layers = calloc(ctx->n_sites, sizeof *layers);
    imp_rope *ropes = calloc(ctx->n_sites, sizeof *ropes);
    uint32_t *n_heads = calloc(ctx->n_sites, sizeof *n_heads);
    char engine[96], name[128], arch[64] = "";
    imp_type type_k, type_v;
    int rc = 0;
    *out = NULL;
    if (!layers || !ropes || !n_heads) {
        rc = lc_error(IMP_E_NOMEM, "no memory to describe the model");
        goto out;
    }
    for (size_t l = 0; l < ctx->n_sites; l++) {
        layers[l] = ctx->sites[l].shape;
        ropes[l] = ctx->sites[l].rope;
        n_heads[l] = ctx->sites[l].n_heads;
    }
    if (!lc_space_type(ctx->sites[0].k->type, &type_k) || !lc_space_type(ctx->sites[0].v->type, &type_v)) {
        rc = lc_error(IMP_E_UNSUPPORTED, "the cache's type can't be stored");
        goto out;
    }
    snprintf(engine, sizeof engine, "llama.cpp, ggml %s, KV 1", ggml_version());
    if (llama_model_meta_val_str(ctx->model, "general.name", name, sizeof name) <= 0) {
        llama_model_desc(ctx->model, name, sizeof name);
    }
    for (char *c = name; *c; c++) { /* it will be shown on terminals */
        if ((unsigned char)*c < ' ' || *c == 0x7f) *c = '?';
    }
    llama_model_meta_val_str(ctx->model, "general.architecture", arch, sizeof arch);
    /* A quantised cache holds keys and values multiplied by a Hadamard matrix, unless this says otherwise. */
    const char *no_rotation = getenv("LLAMA_ATTN_ROT_DISABLE");
    int32_t rotation_off = no_rotation ? atoi(no_rotation) : 0;

    const imp_field fields[] = {
        {"files", ctx->file_ids, ctx->n_files * sizeof *ctx->file_ids},
        {"architecture", arch, strlen(arch)},
        {"graph", ctx->probe.graph, ctx->probe.n_graph}, /* RoPE as it is in force, overrides that show, ... */
        {"attention", "flash", 5},
        {"rotation_off", &rotation_off, sizeof rotation_off},
        {"adapters", ctx->adapters, ctx->n_adapters * sizeof *ctx->adapters},
    };
    const imp_space_desc desc = {
        .struct_bytes = sizeof desc,
        .model_name = name, .engine = engine, .weights = ctx->file_ids[0], .type_k = type_k, .type_v = type_v,
        .n_layers = (uint32_t)ctx->n_sites, .layers = layers,
        .fields = fields, .n_fields = sizeof fields / sizeof fields[0], .salt = salt,
        .ropes = ctx->probe.no_ropes ? NULL : ropes, .n_heads = n_heads,
    };
    rc = imp_space_open(ctx->store, &desc, out);
out:
    free(n_heads);
    free(ropes);
    free(layers);
    return rc;
}

imp_space *lc_seq_space(imp_llama *ctx, lc_seq *s)
{
    if (!s->salt) return ctx->space;
    if (!s->space && lc_space_describe(ctx, s->salt, &s->space) < 0) {
        lc_say(IMP_LOG_WARN, "a sequence runs without the store: %s", imp_last_error());
        s->space = NULL;
    }
    return s->space;
}

int imp_llama_open_space(imp_llama *ctx, const char *salt, imp_space **out)
{
    if (out) *out = NULL;
    if (!ctx || !out) return lc_error(IMP_E_ARG, "imp_llama_open_space: no context or out");
    if (!ctx->space) return lc_error(IMP_E_UNSUPPORTED, "the store is not used: %s", ctx->why);
    return lc_space_describe(ctx, salt ? salt : ctx->salt, out);
}

int imp_llama_set_salt(imp_llama *ctx, llama_seq_id seq, const char *salt)
{
    if (!ctx || seq < 0 || (uint32_t)seq >= ctx->n_seq_max) {
        return lc_error(IMP_E_ARG, "imp_llama_set_salt: no sequence %d", seq);
    }
    if (!ctx->space) return 0;
    lc_seq *s = &ctx->seqs[seq];
    if (salt && s->salt ? !strcmp(salt, s->salt) : !salt && !s->salt) return 0;
    if (imp_llama_seq_pos_max(ctx, seq) >= 0) return lc_error(IMP_E_ARG, "sequence %d isn't empty", seq);
    char *copy = NULL;
    imp_space *space = NULL;
    int rc = 0;
    if (salt && !(copy = strdup(salt))) rc = lc_error(IMP_E_NOMEM, "no memory for a salt");
    if (!rc && salt) rc = lc_space_describe(ctx, salt, &space);
    if (rc < 0) {
        free(copy);
        return rc;
    }
    imp_space_close(s->space);
    free(s->salt);
    s->salt = copy;
    s->space = space;
    return 0;
}

int imp_llama_set_store(imp_llama *ctx, imp_store *store)
{
    if (!ctx || !store) return lc_error(IMP_E_ARG, "imp_llama_set_store: no context or store");
    if (!ctx->space) return lc_error(IMP_E_UNSUPPORTED, "the store is not used: %s", ctx->why);
    for (uint32_t i = 0; i < ctx->n_seq_max; i++) {
        if (imp_llama_seq_pos_max(ctx, (llama_seq_id)i) >= 0) {
            return lc_error(IMP_E_ARG, "the store can't change under sequence %u, which isn't empty", i);
        }
    }
    imp_store *before = ctx->store;
    imp_space *space;
    ctx->store = store;
    int rc = lc_space_describe(ctx, ctx->salt, &space);
    if (rc < 0) {
        ctx->store = before;
        return rc;
    }
    imp_space_close(ctx->space);
    ctx->space = space;
    for (uint32_t i = 0; i < ctx->n_seq_max; i++) {
        imp_space_close(ctx->seqs[i].space); /* that of a salt is opened with the next prompt */
        ctx->seqs[i].space = NULL;
    }
    return 0;
}

uint32_t imp_llama_get_shape(const imp_llama *ctx, imp_type *type_k, imp_type *type_v, imp_layer_shape *layers,
                             uint32_t max)
{
    if (!ctx->space) return 0;
    lc_space_type(ctx->sites[0].k->type, type_k);
    lc_space_type(ctx->sites[0].v->type, type_v);
    for (uint32_t l = 0; l < max && l < ctx->n_sites; l++) layers[l] = ctx->sites[l].shape;
    return (uint32_t)ctx->n_sites;
}
