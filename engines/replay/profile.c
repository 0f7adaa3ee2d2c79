#include "replay/profile.h"

#include <string.h>
#include <strings.h>

static const replay_shape shapes[] = {
    {"opt-6.7b", 32, 32, 32, 128, 4096, 16384, 2, 50272},    {"opt-13b", 40, 40, 40, 128, 5120, 20480, 2, 50272},
    {"opt-30b", 48, 56, 56, 128, 7168, 28672, 2, 50272},     {"llama-2-7b", 32, 32, 32, 128, 4096, 11008, 3, 32000},
    {"llama-2-13b", 40, 40, 40, 128, 5120, 13824, 3, 32000}, {"llama-3-8b", 32, 32, 8, 128, 4096, 14336, 3, 128256},
    {"qwen2.5-7b", 28, 28, 4, 128, 3584, 18944, 3, 152064},
};

/* NVIDIA's data sheets: peaks of dense f16 tensor cores; the bus is PCIe 4.0 x16, of whose 31.5 GB/s copies reach 25.
 * */
static const replay_profile profiles[] = {
    {"a100-80g", 312e12, 0.5, 2.039e12, 0.8, 25e9, 2},
    {"a100-40g", 312e12, 0.5, 1.555e12, 0.8, 25e9, 2},
    {"h100-sxm", 989e12, 0.5, 3.35e12, 0.8, 50e9, 2},
};

const replay_shape *replay_shape_at(size_t i) { return i < sizeof shapes / sizeof *shapes ? &shapes[i] : NULL; }
const replay_profile *replay_profile_at(size_t i)
{
    return i < sizeof profiles / sizeof *profiles ? &profiles[i] : NULL;
}

const replay_shape *replay_shape_find(const char *name)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        if (strcasecmp(shapes[i].name, name) == 0) return &shapes[i];
    return NULL;
}

const replay_profile *replay_profile_find(const char *name)
{
    for (size_t i = 0; i < sizeof profiles / sizeof *profiles; i++)
        if (strcasecmp(profiles[i].name, name) == 0) return &profiles[i];
    return NULL;
}

double replay_row_bytes(const replay_shape *s, const replay_profile *p)
{
    return (double)s->n_kv_heads * s->head_dim * p->weight_bytes;
}

double replay_token_bytes(const replay_shape *s, const replay_profile *p)
{
    return 2 * replay_row_bytes(s, p) * s->n_layers;
}

static double roof_ns(const replay_profile *p, double flops, double bytes)
{
    double by_flops = flops / (p->flops_per_s * p->flops_share),
           by_bytes = bytes / (p->memory_bytes_per_s * p->memory_share);
    return 1e9 * (by_flops > by_bytes ? by_flops : by_bytes);
}

/* A product of n rows with a matrix of so many weights. */
static double product_ns(const replay_profile *p, double n, double weights)
{
    return roof_ns(p, 2 * n * weights, weights * p->weight_bytes);
}

double replay_before_ns(const replay_shape *s, const replay_profile *p, double n)
{
    return product_ns(p, n, (double)s->width * s->head_dim * (s->n_heads + 2.0 * s->n_kv_heads));
}

double replay_after_ns(const replay_shape *s, const replay_profile *p, double n, double n_cells)
{
    double q = (double)s->n_heads * s->head_dim, seen = n_cells + (n + 1) / 2; /* new tokens see those before */
    double attention = roof_ns(p, 4 * n * seen * q, 2 * (n_cells + n) * replay_row_bytes(s, p));
    return attention + product_ns(p, n, q * s->width) + product_ns(p, n, (double)s->n_ff * s->width * s->ff_width);
}

double replay_logits_ns(const replay_shape *s, const replay_profile *p)
{
    return product_ns(p, 1, (double)s->n_vocab * s->width);
}

double replay_score_ns(const replay_shape *s, const replay_profile *p, double n_rows, double n_tokens, double heads)
{
    return roof_ns(p, 2 * n_rows * n_tokens * s->n_heads * s->head_dim * heads,
                   n_tokens * replay_row_bytes(s, p) * heads);
}

double replay_compute_ns(const replay_shape *s, const replay_profile *p, double n, double n_cells)
{
    return s->n_layers * (replay_before_ns(s, p, n) + replay_after_ns(s, p, n, n_cells)) + replay_logits_ns(s, p);
}

double replay_bus_ns(const replay_profile *p, double n_bytes) { return 1e9 * n_bytes / p->bus_bytes_per_s; }
