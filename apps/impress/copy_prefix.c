#include "copy_prefix.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Lease all n tokens. A match leaves at least one token over, so a token that no prompt has comes behind them. */
static int lease_all(imp_space *space, const int32_t *tokens, size_t n, imp_lease **out)
{
    int32_t *more = malloc((n + 1) * sizeof *more);
    *out = NULL;
    if (!more) return imp_set_error(IMP_E_NOMEM, "no memory to copy a prefix");
    memcpy(more, tokens, n * sizeof *more);
    more[n] = -1;
    imp_prefix_info info;
    int rc = imp_prefix_acquire(space, more, n + 1, 0, out, &info);
    free(more);
    if (rc < 0) return rc;
    if (*out && info.n_matched == n && info.n_exact == n && !info.rounded) return 0;
    imp_lease_release(*out);
    *out = NULL;
    char line[128];
    snprintf(line, sizeof line, "of a prefix of %zu tokens %zu are stored exactly", n, info.rounded ? 0 : info.n_exact);
    return imp_set_error(IMP_E_NOTFOUND, line);
}

static int copy_layer(imp_load *load, imp_commit *commit, uint32_t layer, size_t n, const imp_dst *dst)
{
    int rc = imp_load_select(load, layer, NULL, NULL);
    if (rc == 0) rc = imp_load_gather(load, layer, dst);
    if (rc == 0) rc = imp_commit_rows(commit, layer, 0, n, dst->k, dst->k_stride, dst->v, dst->v_stride);
    return rc;
}

int copy_prefix(imp_space *from, imp_space *to, const copy_shape *shape, const int32_t *tokens, size_t n,
                const copy_queries *queries)
{
    imp_lease *lease = NULL;
    imp_load *load = NULL;
    imp_commit *commit = NULL;
    size_t most_k = 0, most_v = 0;
    for (uint32_t l = 0; l < shape->n_layers; l++) {
        const imp_layer_shape *s = &shape->layers[l];
        size_t k = imp_type_bytes(shape->type_k, (size_t)s->n_kv_heads * s->head_dim_k);
        size_t v = imp_type_bytes(shape->type_v, (size_t)s->n_kv_heads * s->head_dim_v);
        if (k > most_k) most_k = k;
        if (v > most_v) most_v = v;
    }
    imp_dst dst = {.k = malloc(n * most_k), .v = malloc(n * most_v)};
    int rc = dst.k && dst.v ? 0 : imp_set_error(IMP_E_NOMEM, "no memory to copy a prefix");
    if (rc == 0) rc = lease_all(from, tokens, n, &lease);
    if (rc == 0) rc = imp_commit_begin(to, tokens, n, 0, 0, &commit);
    if (rc == 0 && commit) {
        imp_load_opts opts;
        imp_load_opts_init(&opts);
        opts.switches.cache = IMP_CACHE_NONE;
        rc = imp_load_begin(lease, &opts, &load);
    }
    for (uint32_t l = 0; rc == 0 && commit && l < shape->n_layers; l++) {
        const imp_layer_shape *s = &shape->layers[l];
        dst.k_stride = imp_type_bytes(shape->type_k, (size_t)s->n_kv_heads * s->head_dim_k);
        dst.v_stride = imp_type_bytes(shape->type_v, (size_t)s->n_kv_heads * s->head_dim_v);
        rc = copy_layer(load, commit, l, n, &dst);
        if (rc == 0 && queries && queries->layers)
            (void)imp_commit_queries(commit, l, queries->first, &queries->layers[l]); /* advisory */
    }
    if (rc == 0 && commit) {
        rc = imp_commit_finish(commit);
        commit = NULL;
    }
    imp_commit_cancel(commit);
    imp_load_end(load, NULL);
    imp_lease_release(lease);
    free(dst.k);
    free(dst.v);
    return rc;
}
