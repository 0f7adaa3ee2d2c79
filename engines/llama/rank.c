/* rank.c: what of a prefix matters, before anyone asked: the model repeats it, and each token's largest attention is
 * kept (KVzip, arXiv 2505.23416). The prefix is loaded whole; its tokens are then decoded once more behind it, a chunk
 * at a time, each in the cells of the one before, and all of a chunk's queries score the prefix's keys.
 *
 *     cells   [ the prefix, 0 .. n ) [ cue, chunk )       cue: "repeat", and the last tokens before the chunk
 */
#include <stdlib.h>
#include <string.h>

#include "adapter.h"

enum { LEAD_TOKENS = 8, MAX_CUE = 32, MIN_ROOM = 64 };

static const char cue_text[] = "\n\nRepeat the previous text, word for word:\n\n";

typedef struct ranking {
    lc_seq *s;
    bool filled; /* the prefix is in its cells */
} ranking;

static int score_layer(imp_llama *ctx, void *user, size_t layer, const struct ggml_tensor *attention)
{
    ranking *r = user;
    lc_seq *s = r->s;
    imp_query query;
    int rc = layer == 0 && s->load_used ? imp_load_rewind(s->load) : 0;
    s->load_used = true;
    if (!rc) rc = lc_pass_query(ctx, attention, SIZE_MAX, &query);
    if (!rc) rc = imp_load_select(s->load, (uint32_t)layer, &query, NULL);
    if (!rc && !r->filled) rc = lc_cells_gather(ctx, s->load, layer, s->placed, s->n_placed);
    r->filled = r->filled || (!rc && layer + 1 == ctx->n_sites);
    return rc;
}

/* Lease the prefix and place its cells. */
static int start(imp_llama *ctx, llama_seq_id id, const int32_t *tokens, size_t n)
{
    lc_seq *s = &ctx->seqs[id];
    int rc = lc_seq_append(s, tokens, n);
    if (rc < 0) return rc;
    lc_seq_match(ctx, s, n);
    if (s->n_leased < LC_MIN_PREFIX) return lc_error(IMP_E_NOTFOUND, "the prefix isn't stored: nothing to rank");

    imp_load_opts opts;
    imp_load_opts_init(&opts);
    opts.switches.identify = IMP_IDENTIFY_ALL_KEYS;
    opts.max_query_rows = ctx->n_ubatch;
    opts.record = IMP_RECORD_RANKING;
    rc = imp_load_begin(s->lease, &opts, &s->load);
    if (rc < 0) return rc;
    s->load_used = false;
    size_t k = imp_load_count(s->load);
    uint32_t *placed = realloc(s->placed, k * sizeof *placed);
    if (!placed) return lc_error(IMP_E_NOMEM, "no memory for %zu cells", k);
    s->placed = placed;
    s->n_placed = k;
    if (lc_pass_place(ctx, id, (llama_pos)k, k, placed) == 0) return 0;
    return lc_error(IMP_E_FULL, "the context has no room for %zu tokens", k);
}

static int repeat(imp_llama *ctx, llama_seq_id id)
{
    lc_seq *s = &ctx->seqs[id];
    lc_hook *h = &ctx->hook;
    size_t n = s->n_placed, n_ctx = llama_n_ctx_seq(ctx->lctx), most = n_ctx > n ? n_ctx - n : 0;
    if (most > ctx->n_ubatch) most = ctx->n_ubatch;
    if (most > ctx->n_batch) most = ctx->n_batch;
    if (most < MIN_ROOM) return lc_error(IMP_E_FULL, "the context has no room to repeat %zu tokens", n);

    llama_token cue[MAX_CUE];
    int32_t n_cue = llama_tokenize(llama_model_get_vocab(ctx->model), cue_text, (int32_t)strlen(cue_text), cue, MAX_CUE,
                                   false, false);
    if (n_cue < 0 || (size_t)n_cue + LEAD_TOKENS > most / 2) n_cue = 0;
    ranking r = {.s = s};
    for (size_t first = 0; first < n;) {
        size_t lead = first < LEAD_TOKENS ? first : LEAD_TOKENS;
        size_t chunk = most - (size_t)n_cue - lead;
        if (chunk > n - first) chunk = n - first;
        ctx->work.n_tokens = 0;
        llama_pos at = (llama_pos)n;
        for (int32_t i = 0; i < n_cue; i++) lc_pass_put(&ctx->work, cue[i], at++, id, false);
        for (size_t i = first - lead; i < first + chunk; i++) lc_pass_put(&ctx->work, s->tokens[i], at++, id, false);

        h->fill = score_layer;
        h->fill_user = &r;
        h->fill_once = false;
        h->placed = s->placed;
        h->n_placed = n;
        h->n_visible = n + 1;
        int error;
        int32_t rc = lc_hook_decode(ctx, ctx->work, LC_HOOK_FILL, &error);
        if (rc == 0 && error) return error == LC_E_GRAPH ? lc_error(IMP_E_UNSUPPORTED, "%s", imp_last_error()) : error;
        if (rc == 2) return lc_error(IMP_E_BUSY, "ranking a prefix was aborted");
        if (rc != 0) return lc_error(IMP_E_UNSUPPORTED, "llama_decode failed (%d) on a repeated prefix", rc);
        llama_memory_seq_rm(ctx->memory, id, (llama_pos)n, -1);
        first += chunk;
    }
    return 0;
}

int imp_llama_rank_prefix(imp_llama *ctx, llama_seq_id seq, const int32_t *tokens, size_t n)
{
    if (!ctx || !tokens || n == 0) return lc_error(IMP_E_ARG, "imp_llama_rank_prefix: no context or tokens");
    if (ctx->fit != IMP_LLAMA_FIT_FULL) return lc_error(IMP_E_UNSUPPORTED, "no ranking: %s", ctx->why);
    if (seq < 0 || (uint32_t)seq >= ctx->n_seq_max || imp_llama_seq_pos_max(ctx, seq) >= 0) {
        return lc_error(IMP_E_ARG, "imp_llama_rank_prefix: sequence %d isn't an empty one", seq);
    }
    lc_seq *s = &ctx->seqs[seq];
    const imp_llama_request kept = s->request;
    s->request.recompute = s->request.use_derived = false;
    s->request.max_match = 0;
    int rc = start(ctx, seq, tokens, n);
    if (!rc) rc = repeat(ctx, seq);
    lc_pass_drop(ctx, seq);
    lc_seq_reset(s);
    s->request = kept;
    ctx->out_own = true;
    return rc;
}
