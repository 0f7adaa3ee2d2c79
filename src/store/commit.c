/* commit.c: rows on their way in, copied out of the engine's memory before their cells can be reused. */
#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "base/log.h"
#include "base/status.h"
#include "store/store_internal.h"

struct imp_commit {
    imp_store *store;
    imp_job *job;
    size_t first_new;
    unsigned char *have; /* one bit for each layer and token: its rows came */
    size_t n_missing;
};

void imp_job_free(imp_job *job)
{
    if (!job) return;
    for (uint32_t i = 0; job->queries && i < job->n_layers; i++) imp_free(job->queries[i].rows);
    imp_free(job->queries);
    imp_free(job->scores);
    imp_free(job->scored);
    imp_turns_drop(job->turns);
    imp_free(job->layers);
    imp_free(job->tokens);
    imp_free(job->rows);
    imp_free(job->row_at);
    imp_free(job);
}

static void give_back(imp_store *s, size_t n_bytes)
{
    pthread_mutex_lock(&s->lock);
    s->backlog -= n_bytes;
    pthread_mutex_unlock(&s->lock);
}

void imp_commit_cancel(imp_commit *c)
{
    if (!c) return;
    if (c->job) give_back(c->store, c->job->n_bytes + c->job->query_bytes);
    imp_job_free(c->job);
    imp_free(c->have);
    imp_free(c);
}

/* How much of the prompt is new, and whether it may come now: `*start` = n_tokens if there is nothing to store.
 * Counts it against the backlog. */
static int admit(imp_space *sp, const int32_t *tokens, size_t n_tokens, size_t first_new, bool derived, size_t *start)
{
    imp_store *s = sp->store;
    size_t n_steps, known = 0;
    int rc = 0;
    *start = n_tokens;
    imp_lock_in_time(s);
    if (s->without) {
        rc = imp_fail(IMP_E_BUSY, "%s: the catalogue can't be had now", s->dir);
        goto out;
    }
    imp_tree *tree = imp_forest_tree(&s->forest, sp->id);
    if (tree) rc = imp_steps(s, tree, tokens, n_tokens, !derived, &n_steps, &known);
    if (rc < 0) goto out;
    if (known == n_tokens) {
        s->count.commits_known++;
        goto out;
    }
    /* What waits in the queue may hold the tokens before. */
    if (known < first_new && !s->first_job) {
        rc = imp_fail(IMP_E_STALE, "%s: an entry from token %zu on, and only %zu are stored", s->dir, first_new, known);
        goto out;
    }
    size_t from = known > first_new ? known : first_new, n_new = n_tokens - from;
    if (n_new < s->opts.min_store_tokens) goto out;
    /* On disk it is as large as here, or at best so many times smaller (of f32). */
    static const uint64_t smaller[] = {[IMP_REST_RAW] = 1, [IMP_REST_Q8] = 4, [IMP_REST_K8V4] = 6, [IMP_REST_Q4] = 8};
    uint64_t times = smaller[s->opts.rest];
    uint64_t most = imp_limit(s) > UINT64_MAX / times ? UINT64_MAX : imp_limit(s) * times;
    if (n_new > SIZE_MAX / sp->token_bytes || n_new * sp->token_bytes > most) {
        rc = imp_fail(IMP_E_FULL, "%s: %zu tokens are more than the store's limit of %llu bytes", s->dir, n_new,
                      (unsigned long long)imp_limit(s));
    } else if (imp_was_refused(s, sp->id, tokens, from, n_new)) {
        rc = imp_fail(IMP_E_FULL, "%s: there was no room for %zu tokens a moment ago", s->dir, n_new);
    } else if (n_new * sp->token_bytes > s->opts.backlog_bytes) {
        rc = imp_fail(IMP_E_FULL, "%s: %zu tokens are more than may wait to be written (%llu bytes)", s->dir, n_new,
                      (unsigned long long)s->opts.backlog_bytes);
    } else if (n_new * sp->token_bytes > s->opts.backlog_bytes - s->backlog) {
        rc = imp_fail(IMP_E_BUSY, "%s: %zu bytes wait to be written already", s->dir, s->backlog);
    } else {
        *start = from;
        s->backlog += n_new * sp->token_bytes;
    }
out:
    if (rc < 0) s->count.commits_refused++;
    pthread_mutex_unlock(&s->lock);
    return rc;
}

static int fill_job(imp_job *job, const imp_space *sp, const int32_t *tokens, size_t n_tokens, size_t first_new,
                    size_t start)
{
    size_t n_new = n_tokens - start, at = 0;
    job->space = sp->id;
    memcpy(job->model_name, sp->model_name, sizeof job->model_name);
    job->type_k = sp->type_k;
    job->type_v = sp->type_v;
    job->n_layers = sp->n_layers;
    job->n_tokens = n_tokens;
    job->start = start;
    job->first_new = first_new;
    job->turns = imp_turns_hold(sp->turns);
    job->layers = imp_malloc(sp->n_layers * sizeof *job->layers);
    job->tokens = imp_malloc(n_tokens * sizeof *job->tokens);
    job->row_at = imp_malloc(2 * (size_t)sp->n_layers * sizeof *job->row_at);
    job->rows = imp_malloc(n_new * sp->token_bytes);
    if (!job->layers || !job->tokens || !job->row_at || !job->rows) {
        return imp_fail(IMP_E_NOMEM, "no memory to store %zu tokens", n_new);
    }
    memcpy(job->layers, sp->layers, sp->n_layers * sizeof *job->layers);
    memcpy(job->tokens, tokens, n_tokens * sizeof *job->tokens);
    for (uint32_t i = 0; i < sp->n_layers; i++) {
        job->row_at[2 * i] = at;
        at += n_new * imp_job_row_bytes(job, i, IMP_REGION_K);
        job->row_at[2 * i + 1] = at;
        at += n_new * imp_job_row_bytes(job, i, IMP_REGION_V);
    }
    return 0;
}

size_t imp_job_row_bytes(const imp_job *job, uint32_t layer, imp_region region)
{
    imp_layer_shape l = job->layers[layer];
    return region == IMP_REGION_K ? imp_type_bytes(job->type_k, (size_t)l.n_kv_heads * l.head_dim_k)
                                  : imp_type_bytes(job->type_v, (size_t)l.n_kv_heads * l.head_dim_v);
}

int imp_commit_begin(imp_space *space, const int32_t *tokens, size_t n_tokens, size_t first_new, unsigned flags,
                     imp_commit **out)
{
    size_t start;
    imp_commit *c = NULL;
    if (out) *out = NULL;
    if (!space || !out) return imp_fail(IMP_E_ARG, "imp_commit_begin: space or result missing");
    imp_store *s = space->store;
    if ((n_tokens > 0 && !tokens) || first_new > n_tokens || n_tokens > UINT32_MAX || (flags & ~IMP_COMMIT_DERIVED)) {
        return imp_fail(IMP_E_ARG, "commit: tokens %zu to %zu with flags 0x%x", first_new, n_tokens, flags);
    }
    if (s->readonly || n_tokens - first_new < s->opts.min_store_tokens || n_tokens == first_new) return 0;
    bool derived = flags & IMP_COMMIT_DERIVED;
    imp_kept_line kept;
    imp_error_keep(&kept);
    int rc = admit(space, tokens, n_tokens, first_new, derived, &start);
    if (rc < 0 || start == n_tokens) return imp_error_back(&kept, rc);

    size_t n_bytes = (n_tokens - start) * space->token_bytes;
    rc = IMP_E_NOMEM;
    c = imp_calloc(1, sizeof *c);
    if (!c) goto out;
    c->store = s;
    c->first_new = first_new;
    c->n_missing = (n_tokens - start) * space->n_layers;
    c->have = imp_calloc(c->n_missing / 8 + 1, 1);
    c->job = imp_calloc(1, sizeof *c->job);
    if (!c->have || !c->job) goto out;
    c->job->n_bytes = n_bytes;
    c->job->derived = derived;
    n_bytes = 0; /* imp_commit_cancel() gives them back now */
    rc = fill_job(c->job, space, tokens, n_tokens, first_new, start);
    if (rc < 0) goto out;
    *out = c;
    c = NULL;
out:
    if (rc < 0) {
        if (rc == IMP_E_NOMEM) imp_fail(rc, "no memory to store %zu tokens", n_tokens - start);
        imp_commit_cancel(c);
        pthread_mutex_lock(&s->lock);
        s->backlog -= n_bytes;
        s->count.commits_refused++;
        pthread_mutex_unlock(&s->lock);
    }
    return imp_error_back(&kept, rc);
}

size_t imp_commit_first(const imp_commit *c) { return c ? c->job->start : 0; }

static void copy_rows(unsigned char *to, const unsigned char *from, size_t stride, size_t row_bytes, size_t n)
{
    if (stride == row_bytes) {
        memcpy(to, from, n * row_bytes);
        return;
    }
    for (size_t i = 0; i < n; i++) memcpy(to + i * row_bytes, from + i * stride, row_bytes);
}

int imp_commit_rows(imp_commit *c, uint32_t layer, size_t first, size_t count, const void *k, size_t k_stride,
                    const void *v, size_t v_stride)
{
    if (!c) return imp_fail(IMP_E_ARG, "imp_commit_rows: no commit");
    imp_job *job = c->job;
    if (count > 0 && (!k || !v)) return imp_fail(IMP_E_ARG, "commit: no keys or no values of layer %u", layer);
    if (layer >= job->n_layers || first < c->first_new || first > job->n_tokens || count > job->n_tokens - first) {
        return imp_fail(IMP_E_ARG, "commit: rows %zu to %zu of layer %u aren't part of it", first, first + count,
                        layer);
    }
    size_t k_bytes = imp_job_row_bytes(job, layer, IMP_REGION_K), v_bytes = imp_job_row_bytes(job, layer, IMP_REGION_V);
    if (count > 1 && (k_stride < k_bytes || v_stride < v_bytes)) {
        return imp_fail(IMP_E_ARG, "commit: layer %u has rows of %zu and %zu bytes, strides are %zu and %zu", layer,
                        k_bytes, v_bytes, k_stride, v_stride);
    }
    size_t skip = first < job->start ? job->start - first : 0; /* stored already by somebody else */
    if (skip >= count) return 0;
    count -= skip;
    size_t at = first + skip - job->start, n_new = job->n_tokens - job->start;
    unsigned char *to_k = job->rows + job->row_at[2 * layer] + at * k_bytes;
    unsigned char *to_v = job->rows + job->row_at[2 * layer + 1] + at * v_bytes;
    copy_rows(to_k, (const unsigned char *)k + skip * k_stride, k_stride, k_bytes, count);
    copy_rows(to_v, (const unsigned char *)v + skip * v_stride, v_stride, v_bytes, count);
    for (size_t i = layer * n_new + at, end = i + count; i < end; i++) {
        unsigned char bit = (unsigned char)(1u << i % 8);
        c->n_missing -= !(c->have[i / 8] & bit);
        c->have[i / 8] |= bit;
    }
    return 0;
}

static int check_query(const imp_job *job, uint32_t layer, size_t first, const imp_query *q)
{
    if (layer >= job->n_layers) return imp_fail(IMP_E_ARG, "commit: queries of layer %u, of %u", layer, job->n_layers);
    if (!q || !q->q || q->n_rows == 0) return imp_fail(IMP_E_ARG, "commit: no queries of layer %u", layer);
    if (first > job->n_tokens || q->n_rows > job->n_tokens - first) {
        return imp_fail(IMP_E_ARG, "commit: queries of tokens %zu on, %zu rows, and the prompt has %zu", first,
                        q->n_rows, job->n_tokens);
    }
    if (q->n_heads == 0 || q->n_heads % job->layers[layer].n_kv_heads != 0) {
        return imp_fail(IMP_E_ARG, "commit: layer %u needs queries of a multiple of %u heads, not %u", layer,
                        job->layers[layer].n_kv_heads, q->n_heads);
    }
    if (!(q->scale > 0) || !isfinite(q->scale) || !(q->softcap >= 0) || !isfinite(q->softcap)) {
        return imp_fail(IMP_E_ARG, "commit: scale %g and soft cap %g, must be finite, above 0 and not below 0",
                        (double)q->scale, (double)q->softcap);
    }
    return 0;
}

/* Against the backlog, as the rows. */
static int admit_query(imp_store *s, imp_job *job, size_t n_bytes)
{
    int rc = 0;
    pthread_mutex_lock(&s->lock);
    if (n_bytes > s->opts.backlog_bytes || s->backlog > s->opts.backlog_bytes - n_bytes) {
        rc = imp_fail(IMP_E_BUSY, "%s: %zu bytes wait to be written already", s->dir, s->backlog);
    } else {
        s->backlog += n_bytes;
        job->query_bytes += n_bytes;
    }
    pthread_mutex_unlock(&s->lock);
    return rc;
}

int imp_commit_queries(imp_commit *c, uint32_t layer, size_t first, const imp_query *query)
{
    if (!c) return imp_fail(IMP_E_ARG, "imp_commit_queries: no commit");
    imp_job *job = c->job;
    int rc = check_query(job, layer, first, query);
    if (rc < 0) return rc;
    if (!job->queries) job->queries = imp_calloc(job->n_layers, sizeof *job->queries);
    if (!job->queries) return imp_fail(IMP_E_NOMEM, "no memory for the queries of a commit");

    imp_job_query *to = &job->queries[layer];
    size_t dim = job->layers[layer].head_dim_k, row = query->n_heads * dim;
    size_t n = query->n_rows < IMP_JOB_QUERY_ROWS ? query->n_rows : IMP_JOB_QUERY_ROWS, skip = query->n_rows - n;
    size_t had = to->q.n_rows * to->q.n_heads * dim;
    float *rows = imp_realloc_array(NULL, n, row * sizeof *rows);
    if (!rows) return imp_fail(IMP_E_NOMEM, "no memory for the queries of a commit");
    rc = n * row > had ? admit_query(c->store, job, (n * row - had) * sizeof *rows) : 0;
    if (rc < 0) {
        imp_free(rows);
        return rc;
    }
    for (size_t i = 0; i < n; i++) {
        for (uint32_t h = 0; h < query->n_heads; h++) {
            memcpy(rows + i * row + h * dim, query->q + (skip + i) * query->row_stride + h * query->head_stride,
                   dim * sizeof *rows);
        }
    }
    imp_free(to->rows);
    *to = (imp_job_query){.rows = rows, .first = first + skip, .q = *query};
    to->q.q = rows;
    to->q.row_stride = row;
    to->q.head_stride = dim;
    to->q.n_rows = n;
    return 0;
}

int imp_commit_finish(imp_commit *c)
{
    if (!c) return imp_fail(IMP_E_ARG, "imp_commit_finish: no commit");
    imp_store *s = c->store;
    int rc = 0;
    if (c->n_missing > 0) {
        rc = imp_fail(IMP_E_ARG, "commit: %zu rows are missing", c->n_missing);
    } else {
        imp_job *job = c->job;
        c->job = NULL;
        pthread_mutex_lock(&s->lock);
        job->number = ++s->n_queued;
        *(s->last_job ? &s->last_job->next : &s->first_job) = job;
        s->last_job = job;
        pthread_cond_signal(&s->work);
        pthread_mutex_unlock(&s->lock);
    }
    imp_commit_cancel(c);
    return rc;
}
