/* pattern.h: which tokens of a prefix matter to which question: importance patterns, recorded from a real model or made
 * by a fixed rule. Pure, but for the file.
 *
 * A pattern is, for each layer and head, a distribution over the prefix's tokens: the H2O column sums of one question's
 * rows, normalised. Pattern 0 is what the prefix's own last rows give (all that is known before the first question),
 * the others are questions. Kept as codes of 1/1024 of an octave: code = -1024 log2(share), at most 65535.
 *
 * Bytes of a file, little-endian: "IMPPAT1\n", u32 n_layers, n_heads, n_tokens, n_patterns, then u16
 * codes[n_layers][n_patterns][n_heads][n_tokens].
 */
#ifndef REPLAY_PATTERN_H
#define REPLAY_PATTERN_H

#include <stddef.h>
#include <stdint.h>

#include "replay/trace.h"

/* Patterns that a synthetic key can carry, and so the most a set may have (keys.h). */
enum { REPLAY_MAX_PATTERNS = 8, REPLAY_CHUNK = 64 };

typedef struct replay_patterns {
    uint32_t n_layers, n_heads, n_tokens, n_patterns;
    uint16_t *codes;
} replay_patterns;

static inline const uint16_t *replay_pattern_codes(const replay_patterns *p, uint32_t layer, uint32_t pattern,
                                                   uint32_t head)
{
    return p->codes + (((size_t)layer * p->n_patterns + pattern) * p->n_heads + head) * p->n_tokens;
}

/* All zero codes. Returns 0 or a negative imp_status, as all below; shapes out of range are IMP_E_ARG. */
int replay_patterns_new(uint32_t n_layers, uint32_t n_heads, uint32_t n_tokens, uint32_t n_patterns,
                        replay_patterns *out);
void replay_patterns_free(replay_patterns *p); /* zeroed ones too */

uint16_t replay_pattern_code(double share);
double replay_pattern_share(uint16_t code);

int replay_patterns_write(const replay_patterns *p, const char *path);
int replay_patterns_read(const char *path, replay_patterns *out);

/* Patterns without a model, of a seed. In a layer, for head h and question q, the logarithm of token t's share is, up
 * to a constant, 2.8 x z, with z a sum of independent normal numbers whose variances add up to 1:
 *
 *     .50  of the token's 64-token neighbourhood
 *     .20  of the token
 *     .23  of the token and head
 *     .07  of the token, head and question
 *
 * The first 4 tokens are sinks: 2 is added to their z. So that, at 25 %, it is as in recordings of SmolLM2-135M at
 * 2,800 and 6,800 tokens of prose (there | here): two questions share .83, .88 | .84 of their tokens; heads have a
 * Jaccard similarity of .41, .48 | .42; the chosen hold .92, .95 | .95 of the mass; the important share of a chunk
 * deviates by .23, .30 | .26 from its mean, and 94, 83 | 84 % of the chunks have an important token. The constants
 * follow from these figures and from nothing else. */
int replay_patterns_rule(uint32_t n_layers, uint32_t n_heads, uint32_t n_tokens, uint32_t n_patterns, uint64_t seed,
                         replay_patterns *out);

/* Facts about patterns, for a look at where they come from. */
typedef struct replay_pattern_facts {
    double question_overlap; /* of the top `retention` of two questions, mean over layers and pairs */
    double head_jaccard;     /* of two heads' top sets, for one question */
    double mass;             /* that the top set holds */
    double chunk_share, chunk_deviation; /* important share of 64-token chunks: its mean and standard deviation */
    double touched;          /* share of chunks with an important token */
} replay_pattern_facts;

int replay_patterns_facts(const replay_patterns *p, double retention, replay_pattern_facts *out);

/* Weights for a trace's uses (trace.h): a block stands for one layer's chunk of the patterns (for several, if it has
 * more than 64 tokens), drawn by its id; a request asks one of the questions, drawn by its number. The weight is the
 * share of the tokens that are among the top `retention` of that layer for that question. */
int replay_pattern_weights(const replay_patterns *p, const replay_trace *t, double retention, uint64_t seed,
                           float *weights);

/* The top `n_top` of a layer and pattern by the mean over heads (`head` < 0) or one head: 1 in top[n_tokens]. */
int replay_pattern_top(const replay_patterns *p, uint32_t layer, uint32_t pattern, int head, uint32_t n_top,
                       uint8_t *top);

/* A mixing of numbers into one: the only randomness of replays. */
uint64_t replay_mix(uint64_t a, uint64_t b);

#endif
