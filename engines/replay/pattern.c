#include "replay/pattern.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char magic[8] = "IMPPAT1\n";
static const double octave = 1024;

static int fail(int status, const char *text, const char *path)
{
    char line[512];
    snprintf(line, sizeof line, "%s%s%s", path ? path : "", path ? ": " : "", text);
    return imp_set_error(status, line);
}

uint64_t replay_mix(uint64_t a, uint64_t b) /* splitmix64 over both */
{
    uint64_t z = a * UINT64_C(0x9e3779b97f4a7c15) + b + UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

int replay_patterns_new(uint32_t n_layers, uint32_t n_heads, uint32_t n_tokens, uint32_t n_patterns,
                        replay_patterns *out)
{
    *out = (replay_patterns){0};
    if (n_layers == 0 || n_layers > 1024 || n_heads == 0 || n_heads > 1024 || n_tokens == 0 || n_tokens > 1u << 20 ||
        n_patterns < 2 || n_patterns > REPLAY_MAX_PATTERNS)
        return fail(IMP_E_ARG, "patterns of such a shape can't be", NULL);
    uint16_t *codes = calloc((size_t)n_layers * n_patterns * n_heads, (size_t)n_tokens * sizeof *codes);
    if (!codes) return fail(IMP_E_NOMEM, "no memory for patterns", NULL);
    *out = (replay_patterns){n_layers, n_heads, n_tokens, n_patterns, codes};
    return 0;
}

void replay_patterns_free(replay_patterns *p)
{
    free(p->codes);
    *p = (replay_patterns){0};
}

uint16_t replay_pattern_code(double share)
{
    if (!(share > 0)) return UINT16_MAX;
    double code = -octave * log2(share);
    return code <= 0 ? 0 : code >= UINT16_MAX ? UINT16_MAX : (uint16_t)lrint(code);
}

double replay_pattern_share(uint16_t code) { return exp2(-(double)code / octave); }

/* ------------------------------------------------------------------------------------------------------- file ---- */

static void put32(unsigned char *to, uint32_t v)
{
    for (int i = 0; i < 4; i++) to[i] = (unsigned char)(v >> 8 * i);
}

static uint32_t get32(const unsigned char *from)
{
    return (uint32_t)from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
}

static size_t count(const replay_patterns *p) { return (size_t)p->n_layers * p->n_patterns * p->n_heads * p->n_tokens; }

int replay_patterns_write(const replay_patterns *p, const char *path)
{
    unsigned char head[24], pair[2];
    memcpy(head, magic, 8);
    put32(head + 8, p->n_layers);
    put32(head + 12, p->n_heads);
    put32(head + 16, p->n_tokens);
    put32(head + 20, p->n_patterns);
    FILE *f = fopen(path, "wb");
    if (!f) return fail(IMP_E_IO, strerror(errno), path);
    bool ok = fwrite(head, sizeof head, 1, f) == 1;
    for (size_t i = 0; ok && i < count(p); i++) {
        pair[0] = (unsigned char)p->codes[i];
        pair[1] = (unsigned char)(p->codes[i] >> 8);
        ok = fwrite(pair, sizeof pair, 1, f) == 1;
    }
    ok = fclose(f) == 0 && ok;
    return ok ? 0 : fail(IMP_E_IO, "can't be written", path);
}

int replay_patterns_read(const char *path, replay_patterns *out)
{
    unsigned char head[24], pair[2];
    *out = (replay_patterns){0};
    FILE *f = fopen(path, "rb");
    if (!f) return fail(IMP_E_IO, strerror(errno), path);
    int rc = 0;
    if (fread(head, sizeof head, 1, f) != 1 || memcmp(head, magic, 8) != 0)
        rc = fail(IMP_E_ARG, "not a file of patterns", path);
    if (rc == 0) rc = replay_patterns_new(get32(head + 8), get32(head + 12), get32(head + 16), get32(head + 20), out);
    for (size_t i = 0; rc == 0 && i < count(out); i++) {
        if (fread(pair, sizeof pair, 1, f) == 1) out->codes[i] = (uint16_t)(pair[0] | pair[1] << 8);
        else rc = fail(IMP_E_ARG, "ends before its patterns do", path);
    }
    if (rc == 0 && fgetc(f) != EOF) rc = fail(IMP_E_ARG, "has more bytes than patterns", path);
    fclose(f);
    if (rc < 0) replay_patterns_free(out);
    return rc;
}

/* ------------------------------------------------------------------------------------------------------- rule ---- */

/* A normal number for a place: the sum of four uniform ones is close enough, and the same on every machine. */
static double normal(uint64_t at)
{
    uint64_t bits = replay_mix(at, 0x6e6f726d);
    double sum = 0;
    for (int i = 0; i < 4; i++) sum += (double)(bits >> 16 * i & 0xffff) / 65535.0 - 0.5;
    return sum * 1.7320508075688772;
}

int replay_patterns_rule(uint32_t n_layers, uint32_t n_heads, uint32_t n_tokens, uint32_t n_patterns, uint64_t seed,
                         replay_patterns *out)
{
    int rc = replay_patterns_new(n_layers, n_heads, n_tokens, n_patterns, out);
    double *share = rc == 0 ? malloc(n_tokens * sizeof *share) : NULL;
    if (rc == 0 && !share) rc = fail(IMP_E_NOMEM, "no memory for patterns", NULL);
    for (uint32_t l = 0; rc == 0 && l < n_layers; l++) {
        for (uint32_t q = 0; q < n_patterns; q++) {
            for (uint32_t h = 0; h < n_heads; h++) {
                uint64_t layer = replay_mix(seed, l), head = replay_mix(layer, h + 1),
                         question = replay_mix(head, q + 1);
                double sum = 0;
                for (uint32_t t = 0; t < n_tokens; t++) {
                    double near = normal(replay_mix(layer, UINT64_C(1) << 40 | t / REPLAY_CHUNK));
                    double z = sqrt(.50) * near + sqrt(.20) * normal(replay_mix(layer, UINT64_C(2) << 40 | t));
                    z += sqrt(.23) * normal(replay_mix(head, t)) + sqrt(.07) * normal(replay_mix(question, t));
                    share[t] = exp(2.8 * (z + (t < 4 ? 2 : 0)));
                    sum += share[t];
                }
                uint16_t *codes = out->codes + (replay_pattern_codes(out, l, q, h) - out->codes);
                for (uint32_t t = 0; t < n_tokens; t++) codes[t] = replay_pattern_code(share[t] / sum);
            }
        }
    }
    free(share);
    if (rc < 0) replay_patterns_free(out);
    return rc;
}

/* ------------------------------------------------------------------------------------------------------- uses ---- */

typedef struct ranked {
    double share;
    uint32_t token;
} ranked;

/* The largest first; of equals the earlier token. */
static int by_share(const void *a, const void *b)
{
    const ranked *x = a, *y = b;
    if (x->share != y->share) return x->share < y->share ? 1 : -1;
    return (x->token > y->token) - (x->token < y->token);
}

static int find_top(const replay_patterns *p, uint32_t layer, uint32_t pattern, int head, uint32_t n_top, uint8_t *top,
                    double *mass)
{
    ranked *all = malloc(p->n_tokens * sizeof *all);
    if (!all) return fail(IMP_E_NOMEM, "no memory for patterns", NULL);
    for (uint32_t t = 0; t < p->n_tokens; t++) all[t] = (ranked){0, t};
    for (uint32_t h = 0; h < p->n_heads; h++) {
        if (head >= 0 && (uint32_t)head != h) continue;
        const uint16_t *codes = replay_pattern_codes(p, layer, pattern, h);
        for (uint32_t t = 0; t < p->n_tokens; t++) all[t].share += replay_pattern_share(codes[t]);
    }
    qsort(all, p->n_tokens, sizeof *all, by_share);
    memset(top, 0, p->n_tokens);
    double sum = 0, held = 0;
    for (uint32_t i = 0; i < p->n_tokens; i++) {
        sum += all[i].share;
        if (i < n_top) held += all[i].share, top[all[i].token] = 1;
    }
    if (mass) *mass = sum > 0 ? held / sum : 0;
    free(all);
    return 0;
}

int replay_pattern_top(const replay_patterns *p, uint32_t layer, uint32_t pattern, int head, uint32_t n_top,
                       uint8_t *top)
{
    return find_top(p, layer, pattern, head, n_top, top, NULL);
}

static uint32_t top_count(const replay_patterns *p, double retention)
{
    uint32_t n = (uint32_t)ceil(retention * p->n_tokens);
    return n < 1 ? 1 : n > p->n_tokens ? p->n_tokens : n;
}

static double common(const uint8_t *a, const uint8_t *b, uint32_t n)
{
    uint32_t both = 0;
    for (uint32_t t = 0; t < n; t++) both += a[t] & b[t];
    return both;
}

int replay_patterns_facts(const replay_patterns *p, double retention, replay_pattern_facts *out)
{
    *out = (replay_pattern_facts){0};
    uint32_t n = p->n_tokens, k = top_count(p, retention), n_chunks = n / REPLAY_CHUNK;
    size_t n_sets = p->n_patterns > p->n_heads ? p->n_patterns : p->n_heads;
    uint8_t *top = malloc(n_sets * n);
    int rc = top ? 0 : fail(IMP_E_NOMEM, "no memory for patterns", NULL);
    double pairs = 0, head_pairs = 0, sets = 0, chunks = 0, square = 0;
    for (uint32_t l = 0; rc == 0 && l < p->n_layers; l++) {
        for (uint32_t q = 1; rc == 0 && q < p->n_patterns; q++) {
            double mass = 0;
            rc = find_top(p, l, q, -1, k, top + (size_t)q * n, &mass);
            if (rc < 0) break;
            out->mass += mass;
            sets++;
            for (uint32_t c = 0; c < n_chunks; c++) {
                double share = common(top + (size_t)q * n + c * REPLAY_CHUNK, top + (size_t)q * n + c * REPLAY_CHUNK,
                                      REPLAY_CHUNK) / REPLAY_CHUNK;
                out->chunk_share += share;
                square += share * share;
                out->touched += share > 0;
                chunks++;
            }
            for (uint32_t other = 1; other < q; other++) {
                out->question_overlap += common(top + (size_t)q * n, top + (size_t)other * n, n) / k;
                pairs++;
            }
        }
        for (uint32_t h = 0; rc == 0 && h < p->n_heads; h++) {
            rc = find_top(p, l, 1, (int)h, k, top + (size_t)h * n, NULL);
            for (uint32_t other = 0; rc == 0 && other < h; other++) {
                double both = common(top + (size_t)h * n, top + (size_t)other * n, n);
                out->head_jaccard += both / (2.0 * k - both);
                head_pairs++;
            }
        }
    }
    if (pairs > 0) out->question_overlap /= pairs;
    if (head_pairs > 0) out->head_jaccard /= head_pairs;
    if (sets > 0) out->mass /= sets;
    if (chunks > 0) {
        out->chunk_share /= chunks;
        out->touched /= chunks;
        double variance = square / chunks - out->chunk_share * out->chunk_share;
        out->chunk_deviation = variance > 0 ? sqrt(variance) : 0;
    }
    free(top);
    return rc;
}

int replay_pattern_weights(const replay_patterns *p, const replay_trace *t, double retention, uint64_t seed,
                           float *weights)
{
    uint32_t n_chunks = p->n_tokens / REPLAY_CHUNK, n_questions = p->n_patterns - 1;
    if (n_chunks == 0) return fail(IMP_E_ARG, "patterns of less than 64 tokens have no chunks", NULL);
    size_t n_places = (size_t)p->n_layers * n_chunks;
    float *share = malloc(n_questions * n_places * sizeof *share); /* [question][layer][chunk] */
    uint8_t *top = malloc(p->n_tokens);
    int rc = share && top ? 0 : fail(IMP_E_NOMEM, "no memory for weights", NULL);
    for (uint32_t q = 0; rc == 0 && q < n_questions; q++) {
        for (uint32_t l = 0; rc == 0 && l < p->n_layers; l++) {
            rc = find_top(p, l, q + 1, -1, top_count(p, retention), top, NULL);
            for (uint32_t c = 0; rc == 0 && c < n_chunks; c++) {
                const uint8_t *chunk = top + c * REPLAY_CHUNK;
                share[q * n_places + l * n_chunks + c] = (float)(common(chunk, chunk, REPLAY_CHUNK) / REPLAY_CHUNK);
            }
        }
    }
    uint32_t m = t->block_tokens < REPLAY_CHUNK ? 1 : (t->block_tokens + REPLAY_CHUNK / 2) / REPLAY_CHUNK;
    for (size_t r = 0; rc == 0 && r < t->n_requests; r++) {
        size_t q = replay_mix(seed ^ UINT64_C(0x7265717565737400), r) % n_questions;
        for (uint32_t u = t->first[r]; u < t->first[r + 1]; u++) {
            float sum = 0;
            for (uint32_t c = 0; c < m; c++) {
                uint64_t place = replay_mix(replay_mix(seed, t->blocks[u]), c) % n_places;
                sum += share[q * n_places + place];
            }
            weights[u] = sum / (float)m;
        }
    }
    free(top);
    free(share);
    return rc;
}
