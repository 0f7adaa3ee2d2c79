/* fuzz_trace.c: any bytes as a trace of requests; and what was read, replayed against caches of it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz/fuzz.h"
#include "fuzz/util.h"
#include "hash_trace.h"

enum { MOST_USES = 400, MOST_BLOCKS = 200 };

static void check(const replay_trace *t)
{
    MUST(t->n_requests > 0 && t->n_uses > 0 && t->n_blocks > 0 && t->n_blocks <= t->n_uses && t->block_tokens > 0);
    MUST(t->first[0] == 0 && t->first[t->n_requests] == t->n_uses);
    uint32_t next = 0;
    for (size_t r = 0; r < t->n_requests; r++) MUST(t->first[r] < t->first[r + 1]);
    for (size_t u = 0; u < t->n_uses; u++) {
        MUST(t->blocks[u] <= next);
        next += t->blocks[u] == next;
    }
    MUST(next == t->n_blocks);
}

static void check_hits(const replay_trace *t, const replay_hits *h, double all)
{
    MUST(h->prefix <= h->tier && h->tier + t->n_blocks <= t->n_uses);
    MUST(h->prefix_weight >= 0 && h->prefix_weight <= h->tier_weight + 1e-6 && h->tier_weight <= all + 1e-6);
}

/* No policy beats what knows the future. */
static void replay(const replay_trace *t, size_t capacity)
{
    float *weights = malloc(t->n_uses * sizeof *weights);
    MUST(weights);
    double all = 0;
    for (size_t u = 0; u < t->n_uses; u++) all += (double)(weights[u] = (float)(t->blocks[u] * 37 % 101) / 100);
    replay_hits best, h;
    MUST(replay_min(t, capacity, weights, &best) == 0);
    check_hits(t, &best, all);
    double reached = best.tier_weight, bound = 0;
    for (imp_cache p = IMP_CACHE_LRU; p < IMP_CACHE_OF_STORE; p++) {
        MUST(replay_policy(t, p, capacity, weights, &h) == 0);
        check_hits(t, &h, all);
        MUST(h.tier <= best.tier && h.prefix <= best.prefix);
        reached = fmax(reached, h.tier_weight);
    }
    MUST(replay_weight_bound(t, capacity, weights, 5, reached, &bound) == 0);
    MUST(bound >= reached - 1e-6 * (1 + all));
    free(weights);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    const char *path = fuzz_file(bytes, n_bytes);
    static const uint32_t block_tokens[] = {0, 16};
    for (int i = 0; i < 2; i++) {
        replay_trace t, parts;
        char error[HASH_TRACE_ERROR_BYTES] = "";
        int rc = hash_trace_read(path, block_tokens[i], &t, error);
        MUST(rc == 0 || (rc == -1 && !t.first && !t.blocks && error[0] != '\0' && !strchr(error, '\n')));
        if (rc != 0) continue;
        check(&t);
        if (t.n_uses <= MOST_USES && t.n_blocks <= MOST_BLOCKS) {
            replay(&t, 1 + n_bytes % 7);
            if (t.block_tokens % 2 == 0) {
                MUST(replay_trace_split(&t, 2, &parts) == 0);
                MUST(parts.n_uses == 2 * t.n_uses && parts.n_blocks == 2 * t.n_blocks);
                check(&parts);
                replay_trace_free(&parts);
            }
        }
        replay_trace_free(&t);
    }
    return 0;
}

size_t imp_fuzz_seed(size_t i, uint8_t *out, size_t room)
{
#define LINE(time, length, ids)                                                                                        \
    "{\"timestamp\":" #time ",\"input_length\":" #length ",\"output_length\":5,\"hash_ids\":[" ids "]}\n"
    static const char *const texts[] = {
        LINE(0, 40, "1,2,3") LINE(5, 33, "1,2,4") LINE(5, 20, "1,5") LINE(9, 40, "1,2,3") LINE(9, 16, "7"),
        LINE(1.5, 1e3, "9223372036854775807,0"),
        LINE(3, 5, "1") LINE(2, 5, "1"),
        LINE(0, 9, "1,1"),
        LINE(0, 0, "1") "\n \n" LINE(0, 5, ""),
        LINE(0, 16, "10") LINE(0, 32, "10,11") LINE(0, 48, "10,11,12") LINE(0, 16, "20") LINE(0, 32, "20,21")
            LINE(0, 32, "10,11") LINE(0, 16, "20") LINE(0, 48, "10,11,12") LINE(0, 16, "30") LINE(0, 32, "20,21"),
        "{\"timestamp\":0,\"timestamp\":0}", "[1]\n", "\n",
    };
    return fuzz_text_seed(texts, sizeof texts / sizeof *texts, i, out, room);
}
