/* select.h: which tokens of a prefix matter for these queries. Pure: bytes in, answer out.
 *
 * The score is H2O's (NeurIPS 2023), as the paper uses it (section 2.2): the column sum of the attention weights,
 * softmax over the prefix, summed over query rows and heads.
 */
#ifndef IMP_SELECT_SELECT_H
#define IMP_SELECT_SELECT_H

#include <stddef.h>
#include <stdint.h>

#include "base/pool.h"
#include "impress/impress.h"

/* A run of key rows in memory, as the engine keeps them: row i of KV head h at keys + i * row_bytes + h * (bytes of
 * head_dim elements). Runs needn't be contiguous with each other. */
typedef struct imp_key_run {
    const void *keys;
    size_t n_tokens;
} imp_key_run;

typedef struct imp_keys {
    imp_type type;
    uint32_t n_kv_heads, head_dim;
    const imp_key_run *runs;  /* in the order of the prefix */
    size_t n_runs;
    size_t n_tokens;          /* sum over runs */
} imp_keys;

typedef struct imp_scorer imp_scorer; /* scratch memory, sized once; one thread at a time */

enum { IMP_SCORER_DIM_MAX = 1024 };

/* Heads of up to IMP_SCORER_DIM_MAX elements. Takes about 1 KiB per token of `max_tokens` (less for fewer than 256 rows
 * x heads). `pool` may be NULL and must outlive the scorer. */
int imp_scorer_new(size_t max_tokens, size_t max_rows, uint32_t max_heads, uint32_t max_head_dim, imp_pool *pool,
                   imp_scorer **out);
void imp_scorer_free(imp_scorer *s);

/* scores[n_tokens] = sum over rows and heads of softmax over the prefix; the last `max_rows` rows of `query` score.
 * With `per_kv_head` not NULL also [n_kv_heads][n_tokens].
 * Scores are finite whatever the keys hold: a dot product that is no number counts as the lowest. They are the same to
 * the bit for any number of threads. IMP_E_ARG: no row, heads that don't divide, or more of anything than the scorer
 * was made for; IMP_E_UNSUPPORTED: a type, or a head size that the type can't have. */
int imp_score_h2o(imp_scorer *s, const imp_query *query, size_t max_rows, const imp_keys *keys, float *scores,
                  float *per_kv_head);

/* The same over keys that are made when they are needed, as floats: those of tokens [first, first + n) and one KV head,
 * keys[n][head_dim]. Several threads call it at once. */
typedef struct imp_key_maker {
    void (*make)(void *user, uint32_t kv_head, size_t first, size_t n, float *keys);
    void *user;
    uint32_t n_kv_heads, head_dim;
    size_t n_tokens;
} imp_key_maker;

int imp_score_made(imp_scorer *s, const imp_query *query, size_t max_rows, const imp_key_maker *maker, float *scores,
                   float *per_kv_head);

/* The k largest of scores[n] as rising indices in out[k]; equal scores: the lower index wins. NaN counts as lowest.
 * Tokens below `keep_first` and from n - keep_last on come first (sinks, recent). `mass` (may be NULL): the share of
 * the sum that the chosen hold. Scratch: [n] floats. */
void imp_top_k(const float *scores, size_t n, size_t k, size_t keep_first, size_t keep_last, uint32_t *out,
               double *mass, float *scratch);

/* Which kernels run: "avx512vnni", "avx512", "avx2", "neon", "plain". */
const char *imp_select_isa(void);
/* Tests: force a kernel by name; NULL: the best. IMP_E_UNSUPPORTED if this machine hasn't got it. */
int imp_select_force_isa(const char *name);

#endif
