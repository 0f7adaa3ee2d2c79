/* keys.h: keys that have a pattern's scores, and queries that ask for them. Pure.
 *
 * Of a head's dimensions the first carry logarithms of shares: with A_q(t) the share that pattern q gives token t, key
 * t is
 *
 *     dim 0   log A_0(t) + log n            of the prefix's own last rows
 *     dim q   log A_q(t) - log A_0(t)       of question q: how it differs
 *     others  0
 *
 * and the query of question q is e_0 + e_q, that of the prefix e_0. With a scale of 1 their dot product is log A_q +
 * log n, and its softmax over the prefix A_q itself: the H2O scores of the pattern, exact but for the rounding of keys
 * to f16 (2 %o of a share where shares matter). So the differences between questions lie beside what they have in
 * common, as in models. The rows that a commit brings along, the last of the prefix, are e_0 + g, with g normal of
 * variance 1 / n_questions in each question's dimension: they look at the prefix as its own rows do and a little as any
 * question would, and so tell a sketch which directions matter.
 *
 * A model with more layers and heads than were recorded uses recorded layer l x (recorded / its) for layer l, and
 * recorded KV head h mod recorded for KV head h. Prefix i sees the patterns' tokens, but for 4 sinks, turned by a
 * number of tokens of its own; longer prefixes go around.
 *
 * What follows: bytes, their places, hits and the agreement of heads are those of the patterns. How well a sketch or
 * probe heads find the tokens is not a statement about models: only real ones tell that.
 */
#ifndef REPLAY_KEYS_H
#define REPLAY_KEYS_H

#include "replay/pattern.h"

enum { REPLAY_LEAST_DIM = REPLAY_MAX_PATTERNS };

typedef struct replay_keys {
    const replay_patterns *patterns; /* [n_sets]: prefix i uses set i mod n_sets */
    size_t n_sets;
    uint32_t n_layers, n_kv_heads, head_dim; /* of the keys; head_dim >= REPLAY_LEAST_DIM */
    uint32_t n_tokens;                       /* of every prefix */
    uint64_t seed;
} replay_keys;

/* Patterns of a prefix: its set, and the recorded token, layer and head for its own. */
const replay_patterns *replay_keys_set(const replay_keys *k, uint32_t prefix);
uint32_t replay_keys_token(const replay_keys *k, uint32_t prefix, uint32_t token);
uint32_t replay_keys_layer(const replay_keys *k, uint32_t prefix, uint32_t layer);

/* Keys [n_tokens][n_kv_heads][head_dim] of a layer, in f16. */
void replay_keys_fill(const replay_keys *k, uint32_t prefix, uint32_t layer, uint16_t *out);

/* One row of queries [n_heads][head_dim]: of question `question` (1 ..), or, with 0, row `row` of the prefix's own. */
void replay_keys_query(const replay_keys *k, uint32_t prefix, uint32_t question, uint32_t row, uint32_t n_heads,
                       float *out);

/* f16 of a number, rounded to nearest, ties to even; and back. */
uint16_t replay_f16(float f);
float replay_f32(uint16_t h);

#endif
