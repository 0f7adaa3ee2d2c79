/* fuzz_segment.c: any bytes as a segment's header. Read as they are, and once more with checksums made to fit, since
 * nothing would get past them otherwise. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/hash.h"
#include "format/segment.h"
#include "fuzz/fuzz.h"

static void must(bool promise)
{
    if (!promise) abort();
}

/* Any bytes as a map: refused, or each token once. */
static void read_map(const imp_seg_layout *l, const uint8_t *bytes, size_t n_bytes)
{
    uint32_t n = imp_seg_layout_meta(l)->n_tokens;
    if (imp_seg_map_bytes(l) > n_bytes) return;
    uint32_t *map = malloc(n * sizeof *map);
    unsigned char *seen = malloc(n), *again = malloc(imp_seg_map_bytes(l) + 1);
    must(map && seen && again);
    for (size_t tail = 0; tail < 2; tail++) { /* the header's start, which is no map; and its end, which may be zeros */
        const uint8_t *at = tail ? bytes + n_bytes - imp_seg_map_bytes(l) : bytes;
        if (imp_seg_map_decode(l, at, map, seen) != 0) continue;
        uint64_t sum = 0;
        for (uint32_t i = 0; i < n; i++) sum += map[i];
        must(sum == (uint64_t)n * (n - 1) / 2);
        imp_seg_map_encode(l, map, again);
        must(memcmp(again, at, imp_seg_map_bytes(l)) == 0);
    }
    free(again);
    free(seen);
    free(map);
}

static void read_header(const uint8_t *bytes, size_t n_bytes)
{
    imp_seg_layout *l = NULL;
    uint64_t *sums = NULL;
    int rc = imp_seg_header_decode(bytes, n_bytes, &l, &sums);
    if (rc != 0) {
        must(rc < 0 && !l && !sums);
        return;
    }
    /* What was read can be laid out without a gap, and is the one way to write it. */
    uint64_t at = imp_seg_header_bytes(l);
    uint32_t n = imp_seg_n_chunks(l);
    must(at <= n_bytes);
    for (uint32_t i = 0; i < n; i++) {
        imp_region region;
        uint32_t layer, chunk;
        imp_chunk_place p = imp_seg_chunk_at(l, i, &region, &layer, &chunk);
        must(p.offset == at && p.index == i && p.n_bytes > 0 && p.data_bytes <= p.n_bytes);
        must(imp_seg_chunk(l, region, layer, chunk).offset == at);
        must(chunk < imp_seg_region_chunks(l, region));
        at += p.n_bytes;
    }
    must(at == imp_seg_file_bytes(l));
    /* Maps, then layer after layer, and every row and slot within its chunk. */
    const imp_seg_meta *m = imp_seg_layout_meta(l);
    uint64_t n_maps, n_layer;
    at = imp_seg_maps_at(l, &n_maps) + n_maps;
    for (uint32_t i = 0; i < m->n_layers; i++, at += n_layer) {
        must(imp_seg_layer_at(l, i, &n_layer) == at && n_layer > 0);
        imp_region values = m->paired ? IMP_REGION_KV : IMP_REGION_V;
        imp_chunk_place p = imp_seg_chunk(l, values, i, imp_seg_region_chunks(l, values) - 1);
        must(imp_seg_rows_at(l, IMP_REGION_V, i, imp_seg_region_chunks(l, values) - 1) +
                 p.n_tokens * imp_seg_row_bytes(l, IMP_REGION_V, i) == p.data_bytes);
    }
    must(at == imp_seg_file_bytes(l));
    read_map(l, bytes, n_bytes);
    uint8_t *again = malloc((size_t)imp_seg_header_bytes(l));
    must(again != NULL);
    imp_seg_header_encode(l, sums, again);
    must(memcmp(again, bytes, (size_t)imp_seg_header_bytes(l)) == 0);
    free(again);
    imp_free(sums);
    imp_seg_layout_free(l);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    read_header(bytes, n_bytes);
    if (n_bytes < IMP_SEG_FIXED_BYTES + 8) return 0;

    uint8_t *sealed = malloc(n_bytes);
    must(sealed != NULL);
    memcpy(sealed, bytes, n_bytes);
    uint64_t header_bytes = imp_get64(sealed + 16);
    if (header_bytes < IMP_SEG_FIXED_BYTES + 8 || header_bytes > n_bytes) header_bytes = n_bytes;
    imp_put64(sealed + IMP_SEG_FIXED_BYTES - 8, imp_hash64(sealed, IMP_SEG_FIXED_BYTES - 8, 0));
    imp_put64(sealed + header_bytes - 8, imp_hash64(sealed, (size_t)header_bytes - 8, 0));
    read_header(sealed, n_bytes);
    free(sealed);
    return 0;
}

size_t imp_fuzz_seed(size_t i, uint8_t *out, size_t room)
{
    static const imp_layer_shape layers[] = {{3, 64, 64}, {1, 32, 96}};
    static const int32_t tokens[] = {1, 2, 3, -1, 151643, 7, 7, 7, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20};
    imp_seg_meta m = {
        .segment = 0x1122334455667788u,
        .space = {1, 2},
        .before = {1, 2},
        .n_tokens = 21,
        .n_layers = 2,
        .type_k = IMP_TYPE_F16,
        .type_v = IMP_TYPE_F16,
        .chunk_tokens = 64,
        .alignment = 512,
        .created_s = 1700000000,
        .model_name = "model",
        .layers = layers,
        .tokens = tokens,
    };
    switch (i) {
    case 0: break;
    case 1:
        m.rest = IMP_REST_Q8;
        m.chunk_tokens = 16;
        m.type_v = IMP_TYPE_BF16;
        break;
    case 2:
        m.type_k = m.type_v = IMP_TYPE_Q8_0;
        m.first_token = 100;
        m.before = (imp_hash128){3, 4};
        m.n_tokens = 1;
        break;
    case 3:
        m.derived = true;
        memcpy(m.how, "partial", 7);
        m.type_k = m.type_v = IMP_TYPE_F32;
        m.n_layers = 1;
        break;
    case 4: /* everything at once */
        m.rest = IMP_REST_Q4;
        m.chunk_tokens = 16;
        m.order = IMP_ORDER_CORE;
        m.core_tokens = 16;
        m.paired = true;
        m.probe_heads = 2;
        m.sketch_bits = 64;
        m.basis = 0x99aabbccddeeff00u;
        break;
    case 5:
        m.rest = IMP_REST_K8V4;
        m.order = IMP_ORDER_IMPORTANCE;
        break;
    case 6:
        m.paired = true;
        break;
    case 7:
        m.probe_heads = 1;
        m.n_layers = 1;
        break;
    case 8:
        m.sketch_bits = 128;
        m.basis = 1;
        m.n_tokens = 1;
        m.order = IMP_ORDER_CORE;
        m.core_tokens = 1;
        break;
    default: return 0;
    }
    imp_seg_layout *l = NULL;
    if (imp_seg_layout_new(&m, &l) != 0) abort();
    size_t n = (size_t)imp_seg_header_bytes(l);
    uint64_t sums[64];
    must(imp_seg_n_chunks(l) <= 64 && n <= room);
    for (uint32_t j = 0; j < imp_seg_n_chunks(l); j++) sums[j] = 0x0101010101010101u * (j + 1);
    imp_seg_header_encode(l, sums, out);
    imp_seg_layout_free(l);
    return n;
}
