/* bench_crypt: what it costs to check and to decrypt what is read, chunk by chunk, as a load does it in one thread.
 * Times are the thread's processor time, the best of some rounds; the chunks come from memory, as after a read past
 * the page cache.
 * usage: bench_crypt [TTFT_MS KV_MIB]
 * With a measured time to the first token and the KV that was read for it, the shares of that time, too. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/alloc.h"
#include "format/segment.h"

enum { ROUNDS = 5, WORK_BYTES = 64 << 20, MAX_CHUNKS = WORK_BYTES / 4096 };

static int fail(const char *what)
{
    fprintf(stderr, "bench_crypt: %s: %s\n", what, imp_last_error());
    return 1;
}

static int make_layout(uint32_t n_kv_heads, bool sealed, imp_seg_layout **out)
{
    enum { TOKENS = 64 };
    static const int32_t tokens[TOKENS];
    imp_layer_shape shape = {n_kv_heads, 64, 64};
    imp_seg_meta m = {.segment = 1, .space = {1, 2}, .before = {1, 2}, .n_tokens = TOKENS, .n_layers = 1,
                      .type_k = IMP_TYPE_F16, .type_v = IMP_TYPE_F16, .chunk_tokens = TOKENS, .alignment = 4096,
                      .layers = &shape, .tokens = tokens, .sealed = sealed};
    return imp_seg_layout_new(&m, out);
}

static uint64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Chunks one behind the other, as many as are more than caches hold; each round opens every one. */
static double best_ns_per_byte(const imp_seg_layout *l, const imp_cipher *c, unsigned char *work, unsigned char *copy)
{
    static uint64_t sums[MAX_CHUNKS][8];
    size_t n = imp_seg_chunk(l, IMP_REGION_K, 0, 0).n_bytes, n_chunks = WORK_BYTES / n;
    uint64_t best = UINT64_MAX;
    for (int round = 0; round < ROUNDS; round++) {
        /* The same bytes each time: decrypting leaves others behind. */
        memcpy(work, copy, WORK_BYTES);
        for (size_t i = 0; i < n_chunks; i++) {
            if (imp_seg_chunk_close(l, c, 0, work + i * n, n, sums[i]) < 0) return -1;
        }
        uint64_t start = cpu_ns();
        for (size_t i = 0; i < n_chunks; i++) {
            if (imp_seg_chunk_open(l, c, 0, work + i * n, n, sums[i]) < 0) return -1;
        }
        uint64_t spent = cpu_ns() - start;
        if (spent < best) best = spent;
    }
    return (double)best / (double)(n_chunks * n);
}

int main(int argc, char **argv)
{
    unsigned char key_bytes[IMP_KEY_BYTES] = {1};
    double ttft_ms = argc == 3 ? atof(argv[1]) : 0, kv_mib = argc == 3 ? atof(argv[2]) : 0;
    imp_key *key = NULL;
    imp_cipher *cipher = NULL;
    unsigned char *work = imp_aligned(4096, WORK_BYTES), *copy = imp_aligned(4096, WORK_BYTES);
    if (argc != 1 && argc != 3) {
        fprintf(stderr, "usage: bench_crypt [TTFT_MS KV_MIB]\n");
        return 2;
    }
    if (!work || !copy) return fail("memory");
    for (size_t i = 0; i < WORK_BYTES; i++) copy[i] = (unsigned char)(i * 2654435761u >> 13);
    if (imp_crypt_have() && (imp_key_new(key_bytes, &key) < 0 || imp_cipher_new(key, &cipher) < 0)) return fail("key");
    printf("%-12s %10s %10s %10s%s\n", "what", "chunk KiB", "GB/s", "ms per GB", ttft_ms > 0 ? "  % of TTFT" : "");
    for (int sealed = 0; sealed <= (cipher != NULL); sealed++) {
        for (uint32_t heads = 1; heads <= 16; heads *= 2) {
            imp_seg_layout *l;
            if (make_layout(heads, sealed, &l) < 0) return fail("layout");
            double ns = best_ns_per_byte(l, sealed ? cipher : NULL, work, copy);
            if (ns < 0) return fail("chunk");
            printf("%-12s %10u %10.2f %10.1f", sealed ? "AES-256-GCM" : "XXH3",
                   imp_seg_chunk(l, IMP_REGION_K, 0, 0).n_bytes / 1024, 1 / ns, ns * 1000);
            if (ttft_ms > 0) printf(" %10.2f", ns * kv_mib * 1048576 / 1e6 / ttft_ms * 100);
            printf("\n");
            imp_seg_layout_free(l);
        }
    }
    if (!cipher) printf("AES-256-GCM  not in this build\n");
    imp_cipher_free(cipher);
    imp_key_free(key);
    imp_free(copy);
    imp_free(work);
    return 0;
}
