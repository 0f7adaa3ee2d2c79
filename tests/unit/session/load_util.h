/* load_util.h: a small world for tests of loads: a store with prompts in it whose rows follow from token, position and
 * layer alone, and a naive H2O in double precision. */
#ifndef IMP_TEST_LOAD_UTIL_H
#define IMP_TEST_LOAD_UTIL_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/hash.h"
#include "base/rng.h"
#include "format/rows.h"
#include "impress/impress.h"
#include "support/support.h"

enum { UTIL_MAX_LAYERS = 4, UTIL_MAX_ROW = 2048 };

typedef struct util_world {
    char *dir;
    imp_store_opts opts;
    imp_store *store;
    imp_space *space;
    imp_type type_k, type_v;
    uint32_t n_layers;
    imp_layer_shape layers[UTIL_MAX_LAYERS];
    imp_rope ropes[UTIL_MAX_LAYERS]; /* with has_ropes */
    bool has_ropes;
    uint32_t n_heads[UTIL_MAX_LAYERS]; /* 0: any */
    bool commit_queries;
} util_world;

static inline size_t util_k_elements(const util_world *w, uint32_t l)
{
    return (size_t)w->layers[l].n_kv_heads * w->layers[l].head_dim_k;
}

static inline size_t util_v_elements(const util_world *w, uint32_t l)
{
    return (size_t)w->layers[l].n_kv_heads * w->layers[l].head_dim_v;
}

static inline size_t util_k_bytes(const util_world *w, uint32_t l)
{
    return imp_type_bytes(w->type_k, util_k_elements(w, l));
}

static inline size_t util_v_bytes(const util_world *w, uint32_t l)
{
    return imp_type_bytes(w->type_v, util_v_elements(w, l));
}

/* ---- rows */

static inline void util_row(imp_type type, size_t n, int32_t token, size_t position, uint32_t layer, int value,
                            void *out)
{
    const uint64_t what[4] = {(uint32_t)token, position, layer, (uint64_t)value};
    imp_rng r;
    imp_rng_seed(&r, imp_hash64(what, sizeof what, 1));
    for (size_t i = 0; i < n; i++) {
        float f = (float)(imp_rng_unit(&r) * 4 - 2);
        uint16_t h = imp_f32_to_f16(f);
        uint32_t bits;
        memcpy(&bits, &f, 4);
        bits >>= 16;
        switch (type) {
        case IMP_TYPE_F32: memcpy((char *)out + 4 * i, &f, 4); break;
        case IMP_TYPE_F16: memcpy((char *)out + 2 * i, &h, 2); break;
        case IMP_TYPE_BF16: memcpy((char *)out + 2 * i, &bits, 2); break; /* little-endian machines */
        case IMP_TYPE_Q8_0: {
            char *block = (char *)out + i / 32 * 34;
            h = imp_f32_to_f16(0.016f);
            memcpy(block, &h, 2);
            block[2 + i % 32] = (char)(int)(f * 60);
            break;
        }
        }
    }
}

static inline double util_element(imp_type type, const void *row, size_t i)
{
    float f = 0;
    uint16_t h;
    uint32_t bits;
    switch (type) {
    case IMP_TYPE_F32: memcpy(&f, (const char *)row + 4 * i, 4); break;
    case IMP_TYPE_F16: memcpy(&h, (const char *)row + 2 * i, 2); f = imp_f16_to_f32(h); break;
    case IMP_TYPE_BF16:
        memcpy(&h, (const char *)row + 2 * i, 2);
        bits = (uint32_t)h << 16;
        memcpy(&f, &bits, 4);
        break;
    case IMP_TYPE_Q8_0:
        memcpy(&h, (const char *)row + i / 32 * 34, 2);
        f = imp_f16_to_f32(h) * (float)((const signed char *)row)[i / 32 * 34 + 2 + i % 32];
        break;
    }
    return f;
}

/* ---- queries */

typedef struct util_query {
    imp_query q;
    float *memory;
} util_query;

static inline util_query util_make_query(imp_rng *r, const util_world *w, uint32_t l)
{
    util_query u = {0};
    uint32_t hd = w->layers[l].head_dim_k, heads = w->n_heads[l];
    if (!heads) heads = w->layers[l].n_kv_heads * (1 + (uint32_t)imp_rng_below(r, 3));
    size_t rows = 1 + imp_rng_below(r, 40), pad = imp_rng_below(r, 5);
    size_t head_stride = hd + pad, row_stride = heads * head_stride + pad;
    u.memory = malloc(rows * row_stride * sizeof *u.memory);
    for (size_t i = 0; i < rows * row_stride; i++) u.memory[i] = (float)(imp_rng_unit(r) * 2 - 1);
    u.q = (imp_query){.q = u.memory, .row_stride = row_stride, .head_stride = head_stride, .n_rows = rows,
                      .n_heads = heads, .scale = 1 / sqrtf((float)hd), .softcap = imp_rng_below(r, 3) ? 0 : 3};
    return u;
}

/* ---- world */

static inline void util_open(util_world *w)
{
    assert_int_equal(imp_store_open(w->dir, &w->opts, &w->store), 0);
    const imp_space_desc desc = {
        .struct_bytes = sizeof desc, .model_name = "test", .engine = "test", .weights = {7, 8},
        .type_k = w->type_k, .type_v = w->type_v, .n_layers = w->n_layers, .layers = w->layers,
        .ropes = w->has_ropes ? w->ropes : NULL, .n_heads = w->n_heads[0] ? w->n_heads : NULL,
    };
    assert_int_equal(imp_space_open(w->store, &desc, &w->space), 0);
}

static inline void util_close(util_world *w)
{
    imp_space_close(w->space);
    imp_store_close(w->store);
    w->space = NULL;
    w->store = NULL;
}

/* Fields that are set stay; the rest gets its default. */
static inline void util_start(util_world *w)
{
    w->dir = imp_test_make_dir(NULL);
    assert_non_null(w->dir);
    if (!w->n_layers) {
        w->n_layers = 3;
        for (uint32_t l = 0; l < 3; l++) w->layers[l] = (imp_layer_shape){2, 32, 32};
        w->type_k = w->type_v = IMP_TYPE_F16;
    }
    util_open(w);
}

static inline void util_stop(util_world *w)
{
    util_close(w);
    imp_test_remove_dir(w->dir);
}

/* Store tokens [first, n) of a prompt. */
static inline void util_commit(util_world *w, const int32_t *tokens, size_t n, size_t first, unsigned flags)
{
    imp_commit *c;
    assert_int_equal(imp_commit_begin(w->space, tokens, n, first, flags, &c), 0);
    if (!c) return;
    static _Thread_local unsigned char k[UTIL_MAX_ROW * 4], v[UTIL_MAX_ROW * 4];
    for (uint32_t l = 0; l < w->n_layers; l++) {
        for (size_t t = first; t < n; t++) {
            util_row(w->type_k, util_k_elements(w, l), tokens[t], t, l, 0, k);
            util_row(w->type_v, util_v_elements(w, l), tokens[t], t, l, 1, v);
            assert_int_equal(imp_commit_rows(c, l, t, 1, k, util_k_bytes(w, l), v, util_v_bytes(w, l)), 0);
        }
    }
    imp_rng r;
    imp_rng_seed(&r, n);
    for (uint32_t l = 0; w->commit_queries && l < w->n_layers; l++) {
        util_query u = util_make_query(&r, w, l);
        if (u.q.n_rows > n) u.q.n_rows = n;
        assert_int_equal(imp_commit_queries(c, l, n - u.q.n_rows, &u.q), 0);
        free(u.memory);
    }
    assert_int_equal(imp_commit_finish(c), 0);
    assert_int_equal(imp_store_flush(w->store), 0);
}

static inline void util_tokens(imp_rng *r, int32_t *tokens, size_t n)
{
    for (size_t i = 0; i < n; i++) tokens[i] = (int32_t)imp_rng_below(r, 50000);
}

/* ---- the naive twin */

/* scores[n] of the prefix `tokens` for the last max_rows rows. `key(i)` is row i. */
static inline void util_h2o(const util_world *w, uint32_t l, const imp_query *q, size_t max_rows,
                            const unsigned char *keys, size_t n, double *scores)
{
    uint32_t hd = w->layers[l].head_dim_k, group = q->n_heads / w->layers[l].n_kv_heads;
    size_t first = q->n_rows > max_rows ? q->n_rows - max_rows : 0, row_bytes = util_k_bytes(w, l);
    size_t elements = util_k_elements(w, l);
    double *wide = malloc(n * elements * sizeof *wide), *logit = malloc(n * sizeof *logit);
    for (size_t t = 0; t < n; t++)
        for (size_t i = 0; i < elements; i++) wide[t * elements + i] = util_element(w->type_k, keys + t * row_bytes, i);
    memset(scores, 0, n * sizeof *scores);
    for (size_t r = first; r < q->n_rows; r++) {
        for (uint32_t h = 0; h < q->n_heads; h++) {
            double largest = -INFINITY, sum = 0;
            for (size_t t = 0; t < n; t++) {
                double dot = 0;
                const float *own = q->q + r * q->row_stride + h * q->head_stride;
                for (uint32_t i = 0; i < hd; i++) dot += (double)own[i] * wide[t * elements + h / group * hd + i];
                dot *= (double)q->scale;
                if (q->softcap > 0) dot = (double)q->softcap * tanh(dot / (double)q->softcap);
                logit[t] = dot;
                if (dot > largest) largest = dot;
            }
            for (size_t t = 0; t < n; t++) sum += exp(logit[t] - largest);
            for (size_t t = 0; t < n; t++) scores[t] += exp(logit[t] - largest) / sum;
        }
    }
    free(wide);
    free(logit);
}

/* Is `chosen` the k best of scores[n], but for what rounding may swap, with the first and last kept? */
static inline void util_check_chosen(const double *scores, size_t n, const uint32_t *chosen, size_t k,
                                     size_t keep_first, size_t keep_last, double *mass)
{
    uint8_t *in = calloc(n, 1);
    double worst_in = INFINITY, best_out = -INFINITY, sum = 0, all = 0;
    for (size_t i = 0; i < k; i++) {
        assert_true(chosen[i] < n);
        if (i) assert_true(chosen[i] > chosen[i - 1]);
        in[chosen[i]] = 1;
    }
    for (size_t t = 0; t < n; t++) {
        bool kept = t < keep_first || t + keep_last >= n;
        all += scores[t];
        if (in[t]) sum += scores[t];
        if (kept && keep_first + keep_last <= k) assert_true(in[t]);
        if (!kept && in[t] && scores[t] < worst_in) worst_in = scores[t];
        if (!kept && !in[t] && scores[t] > best_out) best_out = scores[t];
    }
    if (keep_first + keep_last <= k) assert_true(best_out <= worst_in * (1 + 1e-4));
    *mass = sum / all;
    free(in);
}

#endif
