#include "stores.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model.h"

enum {
    QUERY_ROWS = 64,       /* of a prefix, as imp_commit_queries() keeps */
    DEFAULT_MIN_STORE = 64 /* imp_store_opts.min_store_tokens */
};

void app_prefix_free(app_prefix *p)
{
    free(p->rows);
    free(p->layers);
    *p = (app_prefix){0};
}

/* ---- opening */

static int open_store(app_stores *s, const char *name, imp_store_opts opts, imp_store **out)
{
    char path[sizeof s->dir + 80];
    snprintf(path, sizeof path, "%s/%s", s->dir, name);
    opts.reorder_period_s = UINT32_MAX; /* when told, not in the middle of what is measured */
    if (!s->dir[0]) opts.flags |= IMP_STORE_MEMORY;
    return imp_store_open(s->dir[0] ? path : NULL, &opts, out) < 0 ? app_fail("%s", imp_last_error()) : 0;
}

static int lock_folder(app_stores *s)
{
    char path[sizeof s->dir + 16];
    if (mkdir(s->dir, 0700) != 0 && errno != EEXIST) return app_fail("can't make %s: %s", s->dir, strerror(errno));
    snprintf(path, sizeof path, "%s/lock", s->dir);
    s->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (s->lock < 0) return app_fail("can't open %s: %s", path, strerror(errno));
    if (flock(s->lock, LOCK_EX | LOCK_NB) == 0) return 0;
    return app_fail("%s: %s", s->dir, errno == EWOULDBLOCK ? "another run compares systems there" : strerror(errno));
}

int app_stores_open(app_stores *s, const char *dir, const imp_store_opts *opts)
{
    *s = (app_stores){.lock = -1, .opts = *opts};
    if (dir && strlen(dir) >= sizeof s->dir) return app_fail("%s: the path is too long", dir);
    snprintf(s->dir, sizeof s->dir, "%s", dir ? dir : "");
    int rc = dir ? lock_folder(s) : 0;
    if (rc) return rc;
    imp_store_opts source = *opts; /* exact, whatever the systems' are */
    source.order = IMP_ORDER_TOKEN;
    source.rest = IMP_REST_RAW;
    source.chunk_tokens = 64;
    source.keep = 0;
    source.read_bytes_per_s = 0; /* no part of what is measured */
    return open_store(s, "source", source, &s->source);
}

int app_stores_attach(app_stores *s, imp_llama *ctx)
{
    s->ctx = ctx;
    imp_type k = IMP_TYPE_F16, v = IMP_TYPE_F16;
    uint32_t n = imp_llama_get_shape(ctx, &k, &v, NULL, 0);
    if (n == 0) return 0;
    s->layers = calloc(n, sizeof *s->layers);
    if (!s->layers) return app_fail("out of memory");
    imp_llama_get_shape(ctx, &k, &v, s->layers, n);
    if (imp_llama_open_space(ctx, NULL, &s->source_space) < 0) return app_fail("%s", imp_last_error());
    s->shape = (copy_shape){k, v, n, s->layers};
    return 0;
}

/* Nothing is open any more but the source, and the context uses that. */
static int leave(app_stores *s)
{
    if (!s->current) return 0;
    imp_llama_clear(s->ctx);
    if (imp_llama_set_store(s->ctx, s->source) < 0) return app_fail("%s", imp_last_error());
    imp_space_close(s->space);
    imp_store_close(s->current);
    s->space = NULL;
    s->current = NULL;
    return 0;
}

void app_stores_close(app_stores *s)
{
    if (s->ctx) leave(s);
    imp_llama_free(s->ctx);
    imp_space_close(s->source_space);
    imp_store_close(s->source);
    free(s->layers);
    if (s->lock >= 0) close(s->lock);
    *s = (app_stores){.lock = -1};
}

/* ---- prefixes */

/* Copy the queries of the prompt that was just computed. */
static int take_queries(app_stores *s, app_prefix *p)
{
    size_t n_floats = 0, at = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t l = 0; l < s->shape.n_layers; l++) {
            imp_query q;
            size_t first;
            if (imp_llama_get_queries(s->ctx, 0, l, &first, &q) < 0) return 0; /* stored without */
            if (pass == 0) {
                n_floats += q.n_rows * q.row_stride;
                continue;
            }
            memcpy(p->rows + at, q.q, q.n_rows * q.row_stride * sizeof *p->rows);
            p->layers[l] = q;
            p->layers[l].q = p->rows + at;
            p->queries.first = first;
            at += q.n_rows * q.row_stride;
        }
        if (pass == 0) {
            p->rows = malloc(n_floats * sizeof *p->rows);
            p->layers = calloc(s->shape.n_layers, sizeof *p->layers);
            if (!p->rows || !p->layers) return app_fail("out of memory");
        }
    }
    p->queries.layers = p->layers;
    return 0;
}

int app_stores_learn(app_stores *s, app_prefix *p, const char *name)
{
    if (p->learned || p->n == 0) return 0;
    int rc = leave(s);
    if (rc) return rc;
    imp_llama_clear(s->ctx);
    imp_llama_request request;
    imp_llama_request_init(&request);
    /* The last tokens are computed even if all is stored: they are what the queries come from. */
    request.max_match = p->n > QUERY_ROWS ? p->n - QUERY_ROWS : 0;
    request.recompute = p->n <= QUERY_ROWS;
    if (imp_llama_set_request(s->ctx, 0, &request) < 0) return app_fail("%s", imp_last_error());
    app_prompt prompt = {.tokens = (llama_token *)p->tokens, .n = p->n, .n_prefix = p->n};
    app_row row = {0};
    rc = app_prefill(s->ctx, &prompt, 0, &row);
    if (rc == 0 && s->shape.n_layers) rc = take_queries(s, p);
    if (rc) return rc;
    if (imp_llama_flush(s->ctx) < 0 || imp_store_flush(s->source) < 0)
        fprintf(stderr, "impress: note: the prefix of %s is not stored: %s\n", name, imp_last_error());
    p->learned = true;
    return 0;
}

int app_stores_put(app_stores *s, const app_prefix *p)
{
    if (!s->space || p->n == 0) return 0;
    int status = copy_prefix(s->source_space, s->space, &s->shape, p->tokens, p->n, &p->queries);
    if (status == 0) status = imp_store_flush(s->current);
    if (status == 0) return 0;
    size_t least = s->opts.min_store_tokens ? s->opts.min_store_tokens : DEFAULT_MIN_STORE;
    fprintf(stderr, "impress: note: a prefix of %zu tokens is not stored, and is computed instead of loaded: %s", p->n,
            imp_last_error());
    if (p->n < least) fprintf(stderr, " (--min-store %zu)", least);
    fputc('\n', stderr);
    return 0;
}

/* ---- systems */

/* Does it go by what earlier requests left in the store? */
static bool learns(const app_system *system)
{
    const imp_switches *w = &system->load.switches;
    return w->order != IMP_ORDER_TOKEN || w->identify == IMP_IDENTIFY_SKETCH || w->identify == IMP_IDENTIFY_STATIC;
}

int app_stores_enter(app_stores *s, const app_system *system, bool afresh)
{
    char name[64];
    int rc = leave(s);
    if (rc || s->shape.n_layers == 0) return rc;
    imp_store_opts opts = s->opts;
    app_system_store(system, &opts);
    if ((rc = open_store(s, app_system_combination(system, name), opts, &s->current)) != 0) return rc;
    if (afresh && learns(system) && (imp_store_remove(s->current, 0) < 0 || imp_store_gc(s->current, NULL) < 0))
        return app_fail("%s", imp_last_error());
    imp_llama_clear(s->ctx);
    if (imp_llama_set_store(s->ctx, s->current) < 0 || imp_llama_open_space(s->ctx, NULL, &s->space) < 0)
        return app_fail("%s", imp_last_error());
    return 0;
}

/* Have what a match reads of a store that was just opened behind us. */
static void match_once(app_stores *s, const app_prefix *p)
{
    imp_lease *lease;
    imp_prefix_info info;
    if (imp_prefix_acquire(s->space, p->tokens, p->n, 0, &lease, &info) == 0) imp_lease_release(lease);
}

int app_stores_settle(app_stores *s, const app_system *system, const app_prefix *p)
{
    if (!s->space || p->n == 0) return 0;
    imp_llama_clear(s->ctx);
    const imp_load_opts *o = &system->load;
    bool ranks = o->switches.identify == IMP_IDENTIFY_STATIC && o->rank == IMP_RANK_RECONSTRUCTION;
    int status = ranks ? imp_llama_rank_prefix(s->ctx, 0, p->tokens, p->n) : 0;
    if (status == IMP_E_NOTFOUND) /* too short to be stored, say: nothing is loaded then, by no ranking */
        fprintf(stderr, "impress: note: %s: no ranking of a prefix of %zu tokens: %s\n", system->name, p->n,
                imp_last_error());
    else if (status < 0)
        return app_fail("%s", imp_last_error());
    if (learns(system) && imp_store_reorder(s->current, NULL) < 0)
        fprintf(stderr, "impress: note: %s: not reordered: %s\n", system->name, imp_last_error());
    match_once(s, p);
    return 0;
}
