/* profile.h: how long a model's computation would take on a device: shapes of models, and a roofline. Pure arithmetic.
 *
 * An operation takes the longer of its arithmetic at the device's peak and its bytes at the memory's, each at a stated
 * efficiency. Nothing else is modelled: no launches, no imperfect overlap inside an operation. Efficiencies are one
 * half of the peak for matrix products and four fifths of the memory's bandwidth, round numbers for a well-made
 * runtime; they were chosen before any replay and are the same for all systems.
 */
#ifndef REPLAY_PROFILE_H
#define REPLAY_PROFILE_H

#include <stddef.h>
#include <stdint.h>

typedef struct replay_shape {
    const char *name;
    uint32_t n_layers, n_heads, n_kv_heads, head_dim, width, ff_width;
    uint32_t n_ff; /* matrices of the feed-forward part: 2, or 3 where it is gated */
    uint32_t n_vocab;
} replay_shape;

typedef struct replay_profile {
    const char *name;
    double flops_per_s, flops_share;        /* peak in the type of the weights, and what is reached of it */
    double memory_bytes_per_s, memory_share;
    double bus_bytes_per_s;                 /* from the host's memory to the device's, as reached */
    uint32_t weight_bytes;                  /* of one weight, and of one element of KV */
} replay_profile;

/* NULL: unknown. replay_shape_at(i) is NULL past the last. */
const replay_shape *replay_shape_find(const char *name);
const replay_shape *replay_shape_at(size_t i);
const replay_profile *replay_profile_find(const char *name);
const replay_profile *replay_profile_at(size_t i);

/* Bytes of one token's keys (or values) in one layer, and of all its KV. */
double replay_row_bytes(const replay_shape *s, const replay_profile *p);
double replay_token_bytes(const replay_shape *s, const replay_profile *p);

/* One layer, for `n` new tokens. Before: the products that give queries, keys and values. After: attention over n_cells
 * loaded cells and the new tokens, the output's product, the feed-forward part. */
double replay_before_ns(const replay_shape *s, const replay_profile *p, double n);
double replay_after_ns(const replay_shape *s, const replay_profile *p, double n, double n_cells);
/* Logits of one token. */
double replay_logits_ns(const replay_shape *s, const replay_profile *p);
/* H2O scores of n_rows rows over `n_tokens` keys of a share of the heads, keys in the device's memory. */
double replay_score_ns(const replay_shape *s, const replay_profile *p, double n_rows, double n_tokens, double heads);
/* All layers and the logits, with so many tokens loaded in each layer, and nothing to wait for. */
double replay_compute_ns(const replay_shape *s, const replay_profile *p, double n, double n_cells);
/* n_bytes over the bus. */
double replay_bus_ns(const replay_profile *p, double n_bytes);

#endif
