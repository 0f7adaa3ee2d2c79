/* fuzz_pattern.c: any bytes as a file of importance patterns. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fuzz/fuzz.h"
#include "fuzz/util.h"
#include "replay/pattern.h"

enum { MOST_CODES = 4096 };

static bool is_share(double x) { return x >= 0 && x <= 1 + 1e-9; }

static void use(const replay_patterns *p)
{
    size_t n = (size_t)p->n_layers * p->n_heads * p->n_patterns * p->n_tokens;
    MUST(p->n_layers > 0 && p->n_heads > 0 && p->n_tokens > 0);
    MUST(p->n_patterns > 0 && p->n_patterns <= REPLAY_MAX_PATTERNS);
    if (n > MOST_CODES) return;
    replay_pattern_facts f;
    MUST(replay_patterns_facts(p, 0.25, &f) == 0);
    MUST(is_share(f.question_overlap) && is_share(f.head_jaccard) && is_share(f.mass) && is_share(f.chunk_share) &&
         is_share(f.touched) && isfinite(f.chunk_deviation));
    uint8_t *top = malloc(p->n_tokens);
    MUST(top);
    for (uint32_t n_top = 1; n_top <= p->n_tokens; n_top += 1 + p->n_tokens / 4) {
        uint32_t n_set = 0;
        MUST(replay_pattern_top(p, p->n_layers - 1, p->n_patterns - 1, -1, n_top, top) == 0);
        for (uint32_t t = 0; t < p->n_tokens; t++) n_set += top[t];
        MUST(n_set == n_top);
    }
    free(top);
    uint32_t first[] = {0, 2, 3}, blocks[] = {0, 1, 0};
    replay_trace t = {2, 3, 2, first, blocks, 128};
    float weights[3];
    int rc = p->n_patterns < 2 ? -1 : replay_pattern_weights(p, &t, 0.25, 7, weights);
    for (int i = 0; rc == 0 && i < 3; i++) MUST(is_share((double)weights[i]));
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    replay_patterns p;
    int rc = replay_patterns_read(fuzz_file(bytes, n_bytes), &p);
    MUST(rc <= 0);
    if (rc != 0) {
        MUST(!p.codes);
        return 0;
    }
    use(&p);
    /* There is one file for it. */
    const char *path = fuzz_file(NULL, 0);
    MUST(replay_patterns_write(&p, path) == 0);
    FILE *f = fopen(path, "rb");
    uint8_t *again = malloc(n_bytes + 1);
    MUST(f && again && fread(again, 1, n_bytes + 1, f) == n_bytes && memcmp(again, bytes, n_bytes) == 0);
    fclose(f);
    free(again);
    replay_patterns_free(&p);
    return 0;
}

size_t imp_fuzz_seed(size_t i, uint8_t *out, size_t room)
{
    static const struct {
        uint32_t n_layers, n_heads, n_tokens, n_patterns;
    } shapes[] = {{1, 1, 1, 2}, {1, 1, 64, 2}, {2, 2, 70, 3}, {1, 3, 130, 2}, {1, 1, 8, 8}};
    if (i >= sizeof shapes / sizeof *shapes) return 0;
    replay_patterns p;
    MUST(replay_patterns_rule(shapes[i].n_layers, shapes[i].n_heads, shapes[i].n_tokens, shapes[i].n_patterns, i, &p) ==
         0);
    const char *path = fuzz_file(NULL, 0);
    MUST(replay_patterns_write(&p, path) == 0);
    FILE *f = fopen(path, "rb");
    MUST(f);
    size_t n = fread(out, 1, room, f);
    fclose(f);
    replay_patterns_free(&p);
    return n;
}
