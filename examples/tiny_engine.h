/* tiny_engine.h: a whole engine in a few hundred lines, to show how Impress is used and to test it by.
 *
 * The first half is a transformer as there are many: RMS norm, grouped-query attention with RoPE, an MLP, an f16 KV
 * cache; its weights are random numbers made from a seed. It knows nothing of Impress but that somebody may want to
 * write into its cells before a layer's attention runs. The second half brings the two together through impress.h
 * alone.
 *
 * Every token is computed by itself, in one fixed order of additions. So the results don't depend on how a prompt is
 * cut into batches, and a prefix that was loaded whole gives the same outputs, to the bit, as one that was computed.
 */
#ifndef TINY_ENGINE_H
#define TINY_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"

/* ------------------------------------------------------------------------------------------------- the engine ---- */

typedef struct tiny_shape {
    uint32_t n_layers, n_heads, n_kv_heads, head_dim, n_vocab;
    uint64_t seed;
} tiny_shape;

typedef struct tiny_model tiny_model;

tiny_model *tiny_model_new(const tiny_shape *shape); /* NULL: no memory */
void tiny_model_free(tiny_model *m);

enum { TINY_QUERIES = 32 };

/* The KV cache of one sequence: in each layer a row of keys and one of values per cell, f16, [n_kv_heads][head_dim].
 * And the queries of the tokens computed last, up to TINY_QUERIES of one batch. */
typedef struct tiny_cells {
    uint32_t capacity, n; /* cells there are, and in use */
    size_t row;           /* elements of a row */
    uint16_t *k, *v;      /* [n_layers][capacity][row] */
    float *q;             /* [n_layers][TINY_QUERIES][n_heads][head_dim] */
    uint32_t n_q, first_q; /* rows, and the first one's position */
} tiny_cells;

int tiny_cells_init(tiny_cells *c, const tiny_model *m, uint32_t capacity); /* 0, or -1: no memory */
void tiny_cells_free(tiny_cells *c);
uint16_t *tiny_k(const tiny_cells *c, uint32_t layer, uint32_t cell);
uint16_t *tiny_v(const tiny_cells *c, uint32_t layer, uint32_t cell);

/* Called in each layer once the new tokens' queries are known, [n_tokens][n_heads][head_dim], and before attention runs
 * over the cells. Not 0: the pass ends and returns it. */
typedef int (*tiny_hook)(void *user, uint32_t layer, const float *q, uint32_t n_tokens);

/* Compute `n` tokens at positions `first_position`..., in new cells behind those in use. Each new token sees the cells
 * in use before, and the new ones up to its own. `logits` (may be NULL): [n_vocab], of the last token.
 * Returns 0, IMP_E_ARG (no room), IMP_E_NOMEM or what `hook` (may be NULL) returned; then no cell was added. */
int tiny_forward(const tiny_model *m, tiny_cells *c, const int32_t *tokens, uint32_t n, uint32_t first_position,
                 tiny_hook hook, void *user, float *logits);

/* ----------------------------------------------------------------------------------------------- with Impress ---- */

int tiny_space_open(const tiny_model *m, imp_store *store, imp_space **out);

typedef struct tiny_report {
    size_t n_matched;     /* tokens of the prompt that were loaded in place of being computed */
    size_t n_loaded;      /* cells filled in each layer */
    uint64_t total_ns;    /* up to the first logits */
    uint64_t match_ns;
    imp_load_stats load;
    int whole;            /* cell i holds token i, computed over exact KV: may be stored */
    int n_failed;         /* passes thrown away because stored bytes couldn't be had */
} tiny_report;

/* Compute a prompt in empty cells, with as much of it as possible from the store. `space` NULL: recompute. `opts` NULL:
 * load everything. Never fails because of the store. */
int tiny_prompt(const tiny_model *m, imp_space *space, const imp_load_opts *opts, const int32_t *tokens, uint32_t n,
                tiny_cells *c, float *logits, tiny_report *report);

/* Hand tokens [first_new, n) to the store; token i is in cell i. With them go the last queries, by which the store
 * learns what is important. */
int tiny_store(const tiny_model *m, imp_space *space, const tiny_cells *c, const int32_t *tokens, uint32_t n,
               uint32_t first_new);

#endif
