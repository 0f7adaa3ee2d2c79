/* cells.c: rows in and out of the cache tensors. In memory of this program rows are reached in place, elsewhere through
 * a staging buffer and the backend's copies, a run of neighbouring cells at a time. */
#include <stdlib.h>
#include <string.h>

#include "adapter.h"

void *lc_buffer_need(lc_buffer *b, size_t bytes)
{
    if (bytes > b->bytes) {
        free(b->data);
        b->data = malloc(bytes);
        b->bytes = b->data ? bytes : 0;
    }
    return b->data;
}

void lc_buffer_free(lc_buffer *b)
{
    free(b->data);
    *b = (lc_buffer){0};
}

struct ggml_tensor *lc_root(struct ggml_tensor *t)
{
    while (t->view_src) t = t->view_src;
    return t;
}

int lc_cells_indices(const struct ggml_tensor *idx, uint32_t *out, size_t n)
{
    int64_t wide[64];
    int32_t narrow[64];
    for (size_t i = 0; i < n;) {
        size_t part = n - i < 64 ? n - i : 64;
        if (idx->type == GGML_TYPE_I64) {
            ggml_backend_tensor_get(idx, wide, i * sizeof wide[0], part * sizeof wide[0]);
        } else {
            ggml_backend_tensor_get(idx, narrow, i * sizeof narrow[0], part * sizeof narrow[0]);
            for (size_t j = 0; j < part; j++) wide[j] = narrow[j];
        }
        for (size_t j = 0; j < part; j++) {
            if (wide[j] < 0 || wide[j] >= LC_NO_CELL) return lc_error(LC_E_GRAPH, "a cell index out of range");
            out[i + j] = (uint32_t)wide[j];
        }
        i += part;
    }
    return 0;
}

static uint8_t *row_of(const struct ggml_tensor *cache, uint32_t cell)
{
    return (uint8_t *)cache->data + (size_t)cell * cache->nb[1];
}

/* How many of cells[0..n) follow each other. */
static size_t run_length(const uint32_t *cells, size_t n)
{
    size_t run = 1;
    while (run < n && cells[run] == cells[run - 1] + 1) run++;
    return run;
}

static void to_cache(struct ggml_tensor *cache, const uint32_t *cells, size_t n, const uint8_t *rows)
{
    for (size_t i = 0; i < n;) {
        size_t run = run_length(cells + i, n - i);
        ggml_backend_tensor_set(cache, rows + i * cache->nb[1], (size_t)cells[i] * cache->nb[1], run * cache->nb[1]);
        i += run;
    }
}

static void from_cache(const struct ggml_tensor *cache, const uint32_t *cells, size_t n, uint8_t *rows)
{
    for (size_t i = 0; i < n;) {
        size_t run = run_length(cells + i, n - i);
        ggml_backend_tensor_get(cache, rows + i * cache->nb[1], (size_t)cells[i] * cache->nb[1], run * cache->nb[1]);
        i += run;
    }
}

int lc_cells_gather(imp_llama *ctx, imp_load *load, size_t layer, const uint32_t *cells, size_t k)
{
    const lc_site *site = &ctx->sites[layer];
    imp_dst dst = {site->k->data, site->v->data, site->k->nb[1], site->v->nb[1], cells};
    if (ctx->host) return imp_load_gather(load, (uint32_t)layer, &dst);

    dst.k = lc_buffer_need(&ctx->stage_k, k * site->k->nb[1]);
    dst.v = lc_buffer_need(&ctx->stage_v, k * site->v->nb[1]);
    dst.cells = NULL;
    if (!dst.k || !dst.v) return lc_error(IMP_E_NOMEM, "no memory to stage %zu rows", k);
    int rc = imp_load_gather(load, (uint32_t)layer, &dst);
    if (rc < 0) return rc;
    to_cache(site->k, cells, k, dst.k);
    to_cache(site->v, cells, k, dst.v);
    return 0;
}

int lc_cells_commit(imp_llama *ctx, imp_commit *commit, size_t layer, size_t first, const uint32_t *cells, size_t n)
{
    const lc_site *site = &ctx->sites[layer];
    size_t k_stride = site->k->nb[1], v_stride = site->v->nb[1];
    if (!ctx->host) {
        uint8_t *k = lc_buffer_need(&ctx->stage_k, n * k_stride), *v = lc_buffer_need(&ctx->stage_v, n * v_stride);
        if (!k || !v) return lc_error(IMP_E_NOMEM, "no memory to stage %zu rows", n);
        from_cache(site->k, cells, n, k);
        from_cache(site->v, cells, n, v);
        return imp_commit_rows(commit, (uint32_t)layer, first, n, k, k_stride, v, v_stride);
    }
    for (size_t i = 0; i < n;) {
        size_t run = run_length(cells + i, n - i);
        int rc = imp_commit_rows(commit, (uint32_t)layer, first + i, run, row_of(site->k, cells[i]), k_stride,
                                 row_of(site->v, cells[i]), v_stride);
        if (rc < 0) return rc;
        i += run;
    }
    return 0;
}

void lc_cells_read(imp_llama *ctx, size_t layer, const uint32_t *cells, size_t n, void *k, void *v)
{
    from_cache(ctx->sites[layer].k, cells, n, k);
    from_cache(ctx->sites[layer].v, cells, n, v);
}

void lc_cells_write(imp_llama *ctx, size_t layer, const uint32_t *cells, size_t n, const void *k, const void *v)
{
    to_cache(ctx->sites[layer].k, cells, n, k);
    to_cache(ctx->sites[layer].v, cells, n, v);
}
