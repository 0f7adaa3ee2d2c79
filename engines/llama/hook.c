/* hook.c: the callback that llama.cpp's scheduler asks at every node of the graph.
 *
 * The scheduler asks node by node, in the graph's order, whether the result is wanted. Nodes are collected until one
 * is; then they are computed, the backend is waited for, and the callback is called again with ask = false, where
 * `false` ends this part of the graph. llama_decode() still returns 0 then: success, with no result.
 *
 *     ... ROPE(q) ROPE(k) SET_ROWS(k) SET_ROWS(v) | VIEW PERMUTE ... FLASH_ATTN_EXT ...
 *                                        "wanted" |                  asked: everything before the bar is computed, and
 *                                                                    only no-ops lie between. Cells are filled here.
 *
 * A pass that only takes cells, or that is to be thrown away, makes its nodes no-ops while the scheduler computes them:
 * cells are given out before the graph runs, and SET_ROWS' index input names them.
 */
#include <stdlib.h>
#include <string.h>

#include "adapter.h"

static bool is_no_op(const struct ggml_tensor *t)
{
    return t->op == GGML_OP_NONE || t->op == GGML_OP_VIEW || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_RESHAPE ||
           t->op == GGML_OP_TRANSPOSE;
}

/* Ask for `t` with nothing computed up to it: see unmute(). If there is no memory for that, it is computed: slower, and
 * as harmless. */
static void mute(lc_hook *h, struct ggml_tensor *t)
{
    if (t->op == GGML_OP_NONE) return;
    if (h->n_muted == h->cap_muted) {
        size_t cap = h->cap_muted ? 2 * h->cap_muted : 64;
        struct lc_muted *muted = realloc(h->muted, cap * sizeof *muted);
        if (!muted) return;
        h->muted = muted;
        h->cap_muted = cap;
    }
    h->muted[h->n_muted++] = (struct lc_muted){t, t->op};
    t->op = GGML_OP_NONE;
}

static void unmute(lc_hook *h)
{
    for (size_t i = 0; i < h->n_muted; i++) h->muted[i].node->op = h->muted[i].op;
    h->n_muted = 0;
}

/* A pass that fills or places is void then. One that is only watched isn't: cells that aren't known aren't stored. */
static void fail(lc_hook *h, int status)
{
    if (!h->error) h->error = status;
    h->stop = h->mode == LC_HOOK_FILL || h->mode == LC_HOOK_PLACE;
}

/* The first write of the first layer: its index input says which cells this ubatch's tokens got. */
static void note_cells(lc_hook *h, const struct ggml_tensor *set_rows)
{
    const struct ggml_tensor *idx = set_rows->src[1];
    size_t n = (size_t)idx->ne[0];
    if (h->n_cells + n > h->cap_cells) {
        size_t cap = 2 * (h->n_cells + n);
        uint32_t *cells = realloc(h->cells, cap * sizeof *cells);
        if (!cells) {
            fail(h, lc_error(IMP_E_NOMEM, "no memory for the cells of %zu tokens", n));
            return;
        }
        h->cells = cells;
        h->cap_cells = cap;
    }
    int rc = lc_cells_indices(idx, h->cells + h->n_cells, n);
    if (rc < 0) {
        fail(h, rc);
        return;
    }
    h->n_cells += n;
}

/* The placed cells, and besides them only what this sequence computed, must be what the first new token sees. */
static int check_visible(imp_llama *ctx, const struct ggml_tensor *attention)
{
    lc_hook *h = &ctx->hook;
    const struct ggml_tensor *mask = attention->src[3], *k = attention->src[1];
    size_t n = (size_t)mask->ne[0];
    ggml_fp16_t *row = lc_buffer_need(&ctx->stage_mask, n * sizeof *row);
    if (!row) return lc_error(IMP_E_NOMEM, "no memory for a mask of %zu cells", n);
    ggml_backend_tensor_get(mask, row, 0, n * sizeof *row);

    size_t base = k->view_offs / ctx->sites[0].k->nb[1], n_visible = 0;
    for (size_t i = 0; i < n; i++) n_visible += row[i] == 0;
    for (size_t i = 0; i < h->n_placed; i++) {
        size_t cell = h->placed[i] - base;
        if (h->placed[i] < base || cell >= n || row[cell] != 0) n_visible = 0;
    }
    if (n_visible == h->n_visible) return 0;
    return lc_error(LC_E_GRAPH, "placed cells are not those that the attention sees");
}

static bool is_filling(const lc_hook *h)
{
    return h->mode == LC_HOOK_FILL && (h->n_ubatches == 1 || !h->fill_once);
}

static void fill(imp_llama *ctx, const struct ggml_tensor *attention)
{
    lc_hook *h = &ctx->hook;
    int rc = 0;
    if (lc_root(attention->src[1]) != ctx->sites[h->layer].k || lc_root(attention->src[2]) != ctx->sites[h->layer].v) {
        rc = lc_error(LC_E_GRAPH, "the graph's layers are not those of the self-check");
    } else if (h->layer == 0 && h->n_ubatches == 1 && h->n_visible) {
        rc = check_visible(ctx, attention);
    }
    uint64_t start = lc_now_ns();
    if (!rc) rc = h->fill(ctx, h->fill_user, h->layer, attention);
    h->fill_ns += lc_now_ns() - start;
    if (rc < 0) fail(h, rc);
}

/* Whether the result of `t` is wanted: before a layer's attention, where it is to be filled or has queries to keep. */
static bool ask_attention(imp_llama *ctx, struct ggml_tensor *t)
{
    lc_hook *h = &ctx->hook;
    bool filling = is_filling(h);
    if (h->armed) {
        if (t->op == GGML_OP_FLASH_ATTN_EXT) {
            h->armed = false;
            if (h->taking && h->take) lc_queries_take(ctx, h->layer, t);
            if (filling) fill(ctx, t);
            h->layer++;
        } else if (!is_no_op(t) && filling) {
            fail(h, lc_error(LC_E_GRAPH, "%s between a layer's writes and its attention", ggml_op_name(t->op)));
        } else if (!is_no_op(t)) {
            h->armed = false;
        }
        return false;
    }
    if (t->op == GGML_OP_SET_ROWS && (filling || h->taking) && h->layer < ctx->n_sites) {
        h->armed = lc_root(t) == ctx->sites[h->layer].last;
    }
    return h->armed;
}

/* At the end of an ubatch: did every layer get its rows? */
static void check_filled(imp_llama *ctx)
{
    lc_hook *h = &ctx->hook;
    if (!is_filling(h) || h->layer == ctx->n_sites) return;
    fail(h, lc_error(LC_E_GRAPH, "%zu of %zu layers asked for their rows", h->layer, ctx->n_sites));
}

bool lc_hook_eval(struct ggml_tensor *t, bool ask, void *user)
{
    imp_llama *ctx = user;
    lc_hook *h = &ctx->hook;
    if (!ask) {
        unmute(h);
        return !h->stop;
    }
    if (h->mode == LC_HOOK_PROBE) {
        if (t->op == GGML_OP_SET_ROWS && h->n_cells == 0) note_cells(h, t);
        lc_probe_node(ctx, t);
        return false;
    }

    bool starts = !h->stop && t->op == GGML_OP_SET_ROWS && ctx->n_sites > 0 && lc_root(t) == ctx->sites[0].first;
    if (starts) {
        if (h->n_ubatches > 0) check_filled(ctx);
        h->layer = 0;
        h->n_ubatches++;
        h->first_row = h->n_cells;
        note_cells(h, t);
        h->taking = lc_queries_wanted(ctx);
        if (h->taking) h->n_to_take += ctx->n_sites;
    }
    if (h->mode == LC_HOOK_PLACE) {
        h->stop = h->stop || starts;
        mute(h, t);
        return h->stop;
    }
    bool wanted = !h->stop && ask_attention(ctx, t);
    if (h->stop) mute(h, t);
    return wanted || h->stop;
}

int32_t lc_hook_decode(imp_llama *ctx, struct llama_batch batch, lc_hook_mode mode, int *error)
{
    lc_hook *h = &ctx->hook;
    h->mode = mode;
    h->error = 0;
    h->stop = h->armed = h->taking = false;
    h->layer = h->n_ubatches = h->n_cells = h->first_row = 0;
    h->fill_ns = 0;

    uint64_t start = lc_now_ns();
    int32_t rc = llama_decode(ctx->lctx, batch);
    h->pass_ns = lc_now_ns() - start;

    unmute(h);
    if (rc == 0 && !h->error) check_filled(ctx);
    if (rc == 0 && !h->error && mode != LC_HOOK_PROBE && h->n_cells != (size_t)batch.n_tokens) {
        h->error = lc_error(LC_E_GRAPH, "the cells of %zu of %d tokens are known", h->n_cells, batch.n_tokens);
    }
    if (error) *error = h->error;
    h->n_visible = 0;
    if (rc == 0 && mode != LC_HOOK_PLACE) ctx->shift_pending = false;
    h->mode = LC_HOOK_WATCH;
    return rc;
}
