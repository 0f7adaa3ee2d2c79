/* queries.c: the last queries of a prompt that is computed over exact KV. They are a first sample of what later
 * requests look for: by them the store orders and ranks the tokens that are committed, and makes its first sketches.
 *
 * Rows are copied before each layer's attention, only from ubatches that hold one of the last LC_QUERY_ROWS tokens of a
 * sequence in the batch. A prompt that comes in several batches keeps the last rows of all of them. */
#include <stdlib.h>
#include <string.h>

#include "adapter.h"

static size_t row_floats(const lc_site *s) { return (size_t)s->n_heads * s->shape.head_dim_k; }

static float *row_at(const imp_llama *ctx, const lc_seq *s, size_t layer, size_t slot)
{
    return s->queries.rows + ctx->sites[layer].queries_at + slot * row_floats(&ctx->sites[layer]);
}

void lc_queries_drop(lc_seq *s)
{
    free(s->queries.rows);
    s->queries = (lc_queries){0};
}

/* ---- before a decode */

/* Get ready for rows of the tokens [first, first + n). False: none are wanted. */
static bool make_room(imp_llama *ctx, lc_seq *s, size_t first, size_t n)
{
    lc_queries *q = &s->queries;
    bool wanted = s->in_prompt && s->request.store_new && s->state != LC_SEQ_ALIEN && s->exact == first &&
                  first + n <= s->n;
    if (!wanted) return false;
    if (!q->rows) {
        const lc_site *last = &ctx->sites[ctx->n_sites - 1];
        q->rows = malloc((last->queries_at + LC_QUERY_ROWS * row_floats(last)) * sizeof(float));
        if (!q->rows) return false;
    }
    size_t n_new = n < LC_QUERY_ROWS ? n : LC_QUERY_ROWS, n_old = 0;
    if (q->n > 0 && q->first + q->n == first) n_old = q->n < LC_QUERY_ROWS - n_new ? q->n : LC_QUERY_ROWS - n_new;
    for (size_t l = 0; l < ctx->n_sites && n_old && n_old < q->n; l++) {
        memmove(row_at(ctx, s, l, 0), row_at(ctx, s, l, q->n - n_old),
                n_old * row_floats(&ctx->sites[l]) * sizeof(float));
    }
    q->n = 0; /* void until the decode is through */
    q->next_first = first + n - n_new - n_old;
    q->next_n = n_old + n_new;
    q->n_rows = n;
    q->n_seen = 0;
    return true;
}

static size_t count_rows(const struct llama_batch *b, llama_seq_id id)
{
    size_t n = 0;
    for (int32_t i = 0; i < b->n_tokens; i++) n += (b->seq_id ? b->seq_id[i][0] : 0) == id;
    return n;
}

void lc_queries_begin(imp_llama *ctx, const struct llama_batch *b, const lc_seq *only, size_t first)
{
    lc_hook *h = &ctx->hook;
    bool any = false;
    h->take = NULL;
    h->n_taken = h->n_to_take = 0;
    for (uint32_t id = 0; id < ctx->n_seq_max; id++) {
        lc_seq *s = &ctx->seqs[id];
        s->queries.next_n = 0;
        if (only ? s != only : s->n_share == 0 || s->solo) continue;
        any = make_room(ctx, s, only ? first : s->n_before, count_rows(b, (llama_seq_id)id)) || any;
    }
    if (!any) return;
    for (int32_t i = 0; i < b->n_tokens; i++) ctx->take[i].seq = b->seq_id ? b->seq_id[i][0] : 0;
    h->take = ctx->take;
}

/* ---- in the graph */

/* With one stream the graph has the batch's order, else each sequence's tokens in theirs, in cells of its stream. */
bool lc_queries_wanted(imp_llama *ctx)
{
    lc_hook *h = &ctx->hook;
    bool any = false;
    for (size_t i = h->first_row; h->take && i < h->n_cells; i++) {
        lc_take *t = &h->take[i];
        if (ctx->n_streams > 1) t->seq = (llama_seq_id)(h->cells[i] / ctx->stream_cells);
        lc_queries *q = &ctx->seqs[t->seq].queries;
        size_t left = q->n_rows - q->n_seen; /* rows of this sequence from here on */
        bool wanted = q->next_n > 0 && left <= LC_QUERY_ROWS;
        t->slot = wanted ? (int32_t)(q->next_n - left) : -1;
        if (q->next_n > 0) q->n_seen++;
        any = any || wanted;
    }
    return any;
}

void lc_queries_take(imp_llama *ctx, size_t layer, const struct ggml_tensor *attention)
{
    lc_hook *h = &ctx->hook;
    const struct ggml_tensor *q = attention->src[0];
    const struct ggml_tensor *root = lc_root(attention->src[0]);
    const lc_site *site = &ctx->sites[layer];
    size_t n = h->n_cells - h->first_row, head = site->shape.head_dim_k * sizeof(float);
    /* [head_dim][rows of a stream][n_heads][streams], a stream's rows behind those of the one before it. */
    bool fits = q->ne[0] == site->shape.head_dim_k && (size_t)(q->ne[1] * q->ne[3]) == n && q->ne[2] == site->n_heads;
    if (!fits || (q->ne[3] > 1 && q->nb[3] != (size_t)q->ne[1] * q->nb[1])) {
        h->take = NULL;
        return;
    }
    bool host = ggml_backend_buffer_is_host(root->buffer), together = q->nb[2] == head;
    for (size_t i = 0; i < n; i++) {
        const lc_take *t = &h->take[h->first_row + i];
        if (t->slot < 0) continue;
        char *to = (char *)row_at(ctx, &ctx->seqs[t->seq], layer, (size_t)t->slot);
        for (size_t k = 0; k < site->n_heads; k += together ? site->n_heads : 1) {
            size_t at = q->view_offs + i * q->nb[1] + k * q->nb[2], bytes = together ? site->n_heads * head : head;
            if (host) memcpy(to + k * head, (const char *)root->data + at, bytes);
            else ggml_backend_tensor_get(root, to + k * head, at, bytes);
        }
    }
    h->n_taken++;
}

/* ---- after it */

void lc_queries_end(imp_llama *ctx, bool done)
{
    lc_hook *h = &ctx->hook;
    bool all = done && h->take && h->n_taken == h->n_to_take;
    h->take = NULL;
    for (uint32_t id = 0; id < ctx->n_seq_max; id++) {
        lc_queries *q = &ctx->seqs[id].queries;
        if (q->next_n == 0) continue;
        q->first = q->next_first;
        q->n = all ? q->next_n : 0;
        q->next_n = 0;
    }
}

static imp_query layer_query(const imp_llama *ctx, const lc_seq *s, size_t layer, size_t n_rows)
{
    const lc_site *site = &ctx->sites[layer];
    return (imp_query){
        .q = row_at(ctx, s, layer, 0), .row_stride = row_floats(site), .head_stride = site->shape.head_dim_k,
        .n_rows = n_rows, .n_heads = site->n_heads, .scale = site->scale, .softcap = site->softcap,
    };
}

void lc_queries_commit(imp_llama *ctx, lc_seq *s)
{
    const lc_queries *q = &s->queries;
    for (size_t l = 0; l < ctx->n_sites && q->n > 0 && q->first < s->commit_end; l++) {
        imp_query query = layer_query(ctx, s, l, q->first + q->n <= s->commit_end ? q->n : s->commit_end - q->first);
        if (imp_commit_queries(s->commit, (uint32_t)l, q->first, &query) < 0) {
            lc_say(IMP_LOG_INFO, "queries aren't kept with the new KV: %s", imp_last_error());
            break;
        }
    }
    lc_queries_drop(s);
}

int imp_llama_get_queries(imp_llama *ctx, llama_seq_id seq, uint32_t layer, size_t *first, imp_query *out)
{
    if (!ctx || !first || !out || seq < 0 || (uint32_t)seq >= ctx->n_seq_max || (ctx->space && layer >= ctx->n_sites)) {
        return lc_error(IMP_E_ARG, "imp_llama_get_queries: no sequence %d or layer %u", seq, layer);
    }
    const lc_seq *s = ctx->space ? &ctx->seqs[seq] : NULL;
    if (!s || s->queries.n == 0) return lc_error(IMP_E_NOTFOUND, "no queries are kept of this prompt");
    *first = s->queries.first;
    *out = layer_query(ctx, s, layer, s->queries.n);
    return 0;
}
