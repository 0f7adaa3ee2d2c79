#include "replay/keys.h"

#include <math.h>
#include <string.h>

enum { SINKS = 4 };

static const double ln2 = 0.69314718055994530942, octave = 1024;

uint16_t replay_f16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* from the middle of the largest and the next on */
    if (rest < 0x38800000) {                                  /* below 2^-14: whole 2^-24ths */
        float magnitude;
        memcpy(&magnitude, &rest, sizeof magnitude);
        return (uint16_t)(sign | (uint32_t)lrintf(magnitude * 0x1p24f));
    }
    uint32_t half = rest + 0xfff + (rest >> 13 & 1);
    return (uint16_t)(sign | (half - 0x38000000) >> 13);
}

float replay_f32(uint16_t h)
{
    int exponent = h >> 10 & 31;
    float mantissa = (float)(h & 0x3ff), f;
    if (exponent == 31) f = mantissa > 0 ? NAN : INFINITY;
    else if (exponent == 0) f = ldexpf(mantissa, -24);
    else f = ldexpf(mantissa + 1024, exponent - 25);
    return h & 0x8000 ? -f : f;
}

const replay_patterns *replay_keys_set(const replay_keys *k, uint32_t prefix)
{
    return &k->patterns[prefix % k->n_sets];
}

uint32_t replay_keys_token(const replay_keys *k, uint32_t prefix, uint32_t token)
{
    uint32_t n = replay_keys_set(k, prefix)->n_tokens;
    if (token < SINKS && token < n) return token;
    if (n <= SINKS) return token % n;
    uint64_t shift = replay_mix(k->seed, prefix) % (n - SINKS);
    return SINKS + (uint32_t)((token - SINKS + shift) % (n - SINKS));
}

uint32_t replay_keys_layer(const replay_keys *k, uint32_t prefix, uint32_t layer)
{
    return (uint32_t)((uint64_t)layer * replay_keys_set(k, prefix)->n_layers / k->n_layers);
}

void replay_keys_fill(const replay_keys *k, uint32_t prefix, uint32_t layer, uint16_t *out)
{
    const replay_patterns *p = replay_keys_set(k, prefix);
    uint32_t from = replay_keys_layer(k, prefix, layer),
             heads = p->n_heads < k->n_kv_heads ? p->n_heads : k->n_kv_heads;
    size_t row = (size_t)k->n_kv_heads * k->head_dim;
    double middle = log(k->n_tokens);
    memset(out, 0, k->n_tokens * row * sizeof *out);
    for (uint32_t h = 0; h < heads; h++) {
        for (uint32_t q = 0; q < p->n_patterns; q++) {
            const uint16_t *base = replay_pattern_codes(p, from, 0, h), *codes = replay_pattern_codes(p, from, q, h);
            for (uint32_t t = 0; t < k->n_tokens; t++) {
                uint32_t at = replay_keys_token(k, prefix, t);
                double value = q ? ((double)base[at] - codes[at]) * ln2 / octave : middle - base[at] * ln2 / octave;
                out[t * row + h * k->head_dim + q] = replay_f16((float)value);
            }
        }
    }
    for (uint32_t t = 0; t < k->n_tokens; t++) {
        for (uint32_t h = heads; h < k->n_kv_heads; h++)
            memcpy(out + t * row + h * k->head_dim, out + t * row + h % heads * k->head_dim, k->head_dim * sizeof *out);
    }
}

void replay_keys_query(const replay_keys *k, uint32_t prefix, uint32_t question, uint32_t row, uint32_t n_heads,
                       float *out)
{
    const replay_patterns *p = replay_keys_set(k, prefix);
    for (uint32_t h = 0; h < n_heads; h++) {
        float *q = out + (size_t)h * k->head_dim;
        memset(q, 0, k->head_dim * sizeof *q);
        q[0] = 1;
        if (question) {
            q[question] = 1;
            continue;
        }
        for (uint32_t i = 1; i < p->n_patterns; i++) {
            /* A normal number, near enough: four uniform ones. */
            uint64_t bits = replay_mix(replay_mix(k->seed, row), (uint64_t)h * REPLAY_MAX_PATTERNS + i);
            double sum = 0;
            for (int j = 0; j < 4; j++) sum += (double)(bits >> 16 * j & 0xffff) / 65535.0 - 0.5;
            q[i] = (float)(sum * sqrt(3.0 / (p->n_patterns - 1)));
        }
    }
}
