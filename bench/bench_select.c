/* bench_select.c: how long scoring and choosing take, by key type, instruction set and threads.
 *
 *     bench-select [rows [heads [kv_heads [head_dim [tokens [repeats]]]]]]
 *
 * Prints the least and the median time of the repeats, one line per combination. Keys lie in runs of 64 tokens and are
 * warm; every repeat scores another set of queries.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/pool.h"
#include "base/rng.h"
#include "select/select.h"

static const char *const type_names[] = {"f32", "f16", "bf16", "q8_0"};

/* Random bytes that are moderate numbers in each type. */
static void fill_keys(imp_rng *rng, imp_type type, unsigned char *keys, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++) keys[i] = (unsigned char)imp_rng_u64(rng);
    if (type == IMP_TYPE_F32) {
        for (size_t i = 3; i < n_bytes; i += 4) keys[i] = (keys[i] & 0x80) | 0x3e;
    } else if (type == IMP_TYPE_F16) {
        for (size_t i = 1; i < n_bytes; i += 2) keys[i] = (keys[i] & 0x83) | 0x38;
    } else if (type == IMP_TYPE_BF16) {
        for (size_t i = 1; i < n_bytes; i += 2) keys[i] = (keys[i] & 0x80) | 0x3e;
    } else {
        for (size_t i = 0; i < n_bytes; i += 34) keys[i] = 0, keys[i + 1] = 0x20;
    }
}

static int compare_ns(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static size_t argument(int argc, char **argv, int i, size_t otherwise)
{
    return argc > i ? (size_t)strtoull(argv[i], NULL, 10) : otherwise;
}

int main(int argc, char **argv)
{
    size_t rows = argument(argc, argv, 1, 32), heads = argument(argc, argv, 2, 9), kv = argument(argc, argv, 3, 3);
    size_t dim = argument(argc, argv, 4, 64), tokens = argument(argc, argv, 5, 2048);
    size_t repeats = argument(argc, argv, 6, 51);
    if (repeats == 0 || tokens == 0) return 2;

    int rc = 1;
    imp_rng rng;
    imp_rng_seed(&rng, 1);
    size_t n_runs = (tokens + 63) / 64, n_q = rows * heads * dim;
    unsigned char *keys = imp_aligned(64, tokens * kv * dim * 4);
    imp_key_run *runs = imp_calloc(n_runs, sizeof *runs);
    float *q = imp_calloc(n_q, sizeof *q), *scores = imp_calloc(tokens, sizeof *scores);
    float *scratch = imp_calloc(tokens, sizeof *scratch);
    uint32_t *chosen = imp_calloc(tokens, sizeof *chosen);
    uint64_t *ns = imp_calloc(repeats, sizeof *ns), *top_ns = imp_calloc(repeats, sizeof *top_ns);
    if (!keys || !runs || !q || !scores || !scratch || !chosen || !ns || !top_ns) goto out;

    printf("%zu rows x %zu heads (%zu KV heads) x %zu dims x %zu tokens, %zu repeats\n", rows, heads, kv, dim, tokens,
           repeats);
    printf("%-6s %-10s %8s %10s %10s %10s\n", "type", "isa", "threads", "min ms", "median ms", "top-k ms");
    static const char *const isas[] = {"avx512vnni", "avx512", "avx2", "neon", "plain"};
    for (int type = IMP_TYPE_F32; type <= IMP_TYPE_Q8_0; type++) {
        size_t row_bytes = imp_type_bytes((imp_type)type, dim) * kv;
        if (row_bytes == 0) continue;
        fill_keys(&rng, (imp_type)type, keys, row_bytes * tokens);
        for (size_t r = 0; r < n_runs; r++) {
            size_t n = tokens - r * 64 < 64 ? tokens - r * 64 : 64;
            runs[r] = (imp_key_run){keys + r * 64 * row_bytes, n};
        }
        imp_keys k = {(imp_type)type, (uint32_t)kv, (uint32_t)dim, runs, n_runs, tokens};
        for (size_t isa = 0; isa < sizeof isas / sizeof isas[0]; isa++) {
            if (imp_select_force_isa(isas[isa]) < 0) continue;
            for (unsigned threads = 1; threads <= 2; threads++) {
                imp_pool *pool = NULL;
                imp_scorer *s = NULL;
                if (imp_pool_new(threads, &pool) < 0 ||
                    imp_scorer_new(tokens, rows, (uint32_t)heads, (uint32_t)dim, pool, &s) < 0) {
                    imp_pool_free(pool);
                    goto out;
                }
                for (size_t i = 0; i < repeats; i++) {
                    for (size_t j = 0; j < n_q; j++) q[j] = (float)(imp_rng_unit(&rng) * 4.0 - 2.0);
                    imp_query query = {q, heads * dim, dim, rows, (uint32_t)heads, 0.125f, 0.0f};
                    uint64_t start = imp_now_ns();
                    if (imp_score_h2o(s, &query, rows, &k, scores, NULL) < 0) fprintf(stderr, "%s\n", imp_last_error());
                    uint64_t scored = imp_now_ns();
                    imp_top_k(scores, tokens, tokens / 4, 0, 0, chosen, NULL, scratch);
                    ns[i] = scored - start;
                    top_ns[i] = imp_now_ns() - scored;
                }
                qsort(ns, repeats, sizeof *ns, compare_ns);
                qsort(top_ns, repeats, sizeof *top_ns, compare_ns);
                printf("%-6s %-10s %8u %10.3f %10.3f %10.3f\n", type_names[type], isas[isa], threads,
                       (double)ns[0] / 1e6, (double)ns[repeats / 2] / 1e6, (double)top_ns[repeats / 2] / 1e6);
                imp_scorer_free(s);
                imp_pool_free(pool);
            }
        }
    }
    rc = 0;
out:
    if (rc) fprintf(stderr, "bench-select: %s\n", *imp_last_error() ? imp_last_error() : "no memory");
    imp_free(top_ns);
    imp_free(ns);
    imp_free(chosen);
    imp_free(scratch);
    imp_free(scores);
    imp_free(q);
    imp_free(runs);
    imp_free(keys);
    return rc;
}
