/* segment.c: layout, header codec and checksums of a segment file; docs/format.md has the bytes.
 *
 * Invariants
 * F1  The layout follows from the meta alone. A header states lengths and regions too, for people and for later versions,
 *     and is refused unless they are those that follow.
 * F2  There is one header for one meta and one table: every byte of it is determined, so decode can compare.
 * F3  The first IMP_SEG_FIXED_BYTES carry magic, version and their own checksum at the same places in every version.
 */
#include "format/segment.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/hash.h"
#include "base/status.h"
#include "format/rows.h"

enum {
    MAX_TOKENS = 1 << 20,
    MAX_LAYERS = 1024,
    MAX_ROW_ELEMENTS = 1 << 20,
    MAX_PROBE_HEADS = 1024,
    MAX_SKETCH_BITS = 4096,
    MAX_SHORT_MAP = 1 << 16, /* tokens that two bytes can count */
    MAX_REGIONS = 8,   /* entries of the region table */
    LAYER_BYTES = 16,  /* of a layer's entry */
    REGION_BYTES = 16, /* of a region's entry */
};

#define MAX_FIRST_TOKEN ((uint64_t)1 << 48)

/* Places in the fixed header. */
enum {
    AT_MAGIC = 0,
    AT_VERSION = 8,
    AT_FEATURES = 12,
    AT_HEADER_BYTES = 16,
    AT_FILE_BYTES = 24,
    AT_SEGMENT = 32,
    AT_SPACE = 40,
    AT_BEFORE = 56,
    AT_FIRST_TOKEN = 72,
    AT_N_TOKENS = 80,
    AT_N_LAYERS = 84,
    AT_TYPE_K = 88,
    AT_TYPE_V = 92,
    AT_REST = 96,
    AT_ORDER = 100,
    AT_CHUNK_TOKENS = 104,
    AT_ALIGNMENT = 108,
    AT_CREATED = 112,
    AT_FLAGS = 120,
    AT_N_CHUNKS = 124,
    AT_LAYERS = 128, /* where the layers, tokens and checksums start */
    AT_TOKENS = 132,
    AT_SUMS = 136,
    AT_N_REGIONS = 140,
    AT_MODEL_NAME = 144,
    AT_HOW = 208,
    AT_REGIONS = 272,
    AT_CORE_TOKENS = AT_REGIONS + MAX_REGIONS * REGION_BYTES,
    AT_PROBE_HEADS = 404,
    AT_SKETCH_BITS = 408,
    AT_BASIS = 416, /* zeros before and behind it are reserved */
    AT_SEAL = 424,  /* of sealed segments on disk: name of the key, salt, tags of the two parts that are encrypted */
    AT_SALT = AT_SEAL + 8,
    AT_FIXED_TAG = AT_SALT + IMP_SALT_BYTES,
    AT_TABLES_TAG = AT_FIXED_TAG + IMP_TAG_BYTES,
    SEAL_END = AT_TABLES_TAG + IMP_TAG_BYTES,
    AT_CHECKSUM = IMP_SEG_FIXED_BYTES - 8,
};

#define FLAG_DERIVED 1u

static const char magic[8] = {'I', 'M', 'P', 'S', 'E', 'G', '1', '\n'};

/* A feature bit for each kind of region that the first version 1 didn't have. */
#define FEATURE(region) (1u << ((region) - IMP_REGION_KV))
#define FEATURE_SEALED FEATURE(IMP_REGION_MAP + 1)
#define FEATURES (FEATURE_SEALED * 2 - 1)

/* Numbers of the header's parts, as imp_cipher_seal() counts; chunks have those from 0 on. */
#define PART_FIXED UINT32_MAX
#define PART_TABLES (UINT32_MAX - 1)

/* In place of the key's name while a header isn't encrypted. */
#define SEAL_OPEN 1u

/* One region's share of a layer. */
typedef struct region_place {
    uint64_t offset;     /* of its first chunk in the file */
    uint64_t row_bytes;  /* of one token; scales: of one group; a map: of one slot. K and V have it when paired, too */
    uint32_t full_bytes; /* a whole chunk, padded */
    uint32_t last_bytes; /* the last one, padded */
    uint32_t last_data;  /* the last one, without padding */
} region_place;

enum {
    N_KINDS = IMP_REGION_MAP + 1,
    N_IN_LAYER = N_KINDS - 1, /* all but maps */
};

/* In the order in which they lie in a layer. */
static const imp_region region_order[N_IN_LAYER] = {IMP_REGION_SCALES, IMP_REGION_SKETCH, IMP_REGION_PROBE,
                                                    IMP_REGION_K,      IMP_REGION_V,      IMP_REGION_KV};

struct imp_seg_layout {
    imp_seg_meta meta;                /* its layers and tokens are ours */
    uint32_t n_chunks;
    uint32_t n_maps;                  /* entries of the table before the first layer's: n_layers or 0 */
    uint32_t layer_chunks;            /* in all regions of one layer, without the map */
    uint32_t region_chunks[N_KINDS];  /* per layer */
    uint32_t region_first[N_KINDS];   /* index of a region's first chunk in its layer */
    uint32_t tokens_at, sums_at;      /* in the header */
    uint64_t header_bytes, file_bytes;
    region_place (*places)[N_KINDS];  /* [n_layers] */
    imp_layer_shape *layers;
    int32_t *tokens;
};

/* ---- layout */

static bool is_float(imp_type t) { return t == IMP_TYPE_F32 || t == IMP_TYPE_F16 || t == IMP_TYPE_BF16; }

static bool is_type(imp_type t) { return is_float(t) || t == IMP_TYPE_Q8_0; }

/* NUL-terminated, and nothing behind the NUL. */
static bool is_padded(const char *name, size_t n_bytes)
{
    size_t n = strnlen(name, n_bytes);
    if (n == n_bytes) return false;
    for (; n < n_bytes; n++) {
        if (name[n] != '\0') return false;
    }
    return true;
}

/* What segments may have beyond keys and values. */
static int check_extras(const imp_seg_meta *m)
{
    if (m->order == IMP_ORDER_CORE) {
        if (m->core_tokens < 1 || m->core_tokens > m->n_tokens ||
            (m->core_tokens != m->n_tokens && m->core_tokens % m->chunk_tokens != 0)) {
            return imp_fail(IMP_E_ARG, "segment: a core of %u of %u tokens in chunks of %u", m->core_tokens,
                            m->n_tokens, m->chunk_tokens);
        }
    } else if (m->core_tokens != 0) {
        return imp_fail(IMP_E_ARG, "segment: a core of %u tokens in token order %d", m->core_tokens, (int)m->order);
    }
    if (m->probe_heads > MAX_PROBE_HEADS) return imp_fail(IMP_E_ARG, "segment: %u probe heads", m->probe_heads);
    if (m->sketch_bits % 8 != 0 || m->sketch_bits > MAX_SKETCH_BITS) {
        return imp_fail(IMP_E_ARG, "segment: sketches of %u bits, not a multiple of 8 up to %d", m->sketch_bits,
                        MAX_SKETCH_BITS);
    }
    if ((m->sketch_bits != 0) != (m->basis != 0)) {
        return imp_fail(IMP_E_ARG, "segment: sketches without a basis, or a basis without sketches");
    }
    return 0;
}

static int check_meta(const imp_seg_meta *m)
{
    if (m->segment == 0) return imp_fail(IMP_E_ARG, "segment: its id is 0");
    if (m->n_tokens < 1 || m->n_tokens > MAX_TOKENS) {
        return imp_fail(IMP_E_ARG, "segment: %u tokens, not 1 to %d", m->n_tokens, MAX_TOKENS);
    }
    if (m->n_layers < 1 || m->n_layers > MAX_LAYERS) {
        return imp_fail(IMP_E_ARG, "segment: %u layers, not 1 to %d", m->n_layers, MAX_LAYERS);
    }
    if (m->first_token > MAX_FIRST_TOKEN) return imp_fail(IMP_E_ARG, "segment: starts beyond any prompt");
    if (m->first_token == 0 && !imp_hash128_equal(m->before, m->space)) {
        return imp_fail(IMP_E_ARG, "segment: starts a prompt, but has a prefix before it");
    }
    if (m->chunk_tokens < 16 || m->chunk_tokens > 256 || m->chunk_tokens % 16 != 0) {
        return imp_fail(IMP_E_ARG, "segment: chunks of %u tokens, not a multiple of 16 up to 256", m->chunk_tokens);
    }
    if (m->alignment != 512 && m->alignment != 4096) {
        return imp_fail(IMP_E_ARG, "segment: alignment of %u bytes, not 512 or 4096", m->alignment);
    }
    if (!is_padded(m->model_name, sizeof m->model_name) || !is_padded(m->how, sizeof m->how)) {
        return imp_fail(IMP_E_ARG, "segment: a name isn't padded with NUL");
    }
    if (!is_type(m->type_k) || !is_type(m->type_v)) {
        return imp_fail(IMP_E_UNSUPPORTED, "segment: element types %d, %d", (int)m->type_k, (int)m->type_v);
    }
    if ((unsigned)m->order > IMP_ORDER_CORE) {
        return imp_fail(IMP_E_UNSUPPORTED, "segment: token order %d", (int)m->order);
    }
    if ((unsigned)m->rest > IMP_REST_Q4) return imp_fail(IMP_E_UNSUPPORTED, "segment: encoding %d", (int)m->rest);
    if (m->rest != IMP_REST_RAW && !(is_float(m->type_k) && is_float(m->type_v))) {
        return imp_fail(IMP_E_UNSUPPORTED, "segment: fewer bits at rest need f16, bf16 or f32 rows");
    }
    return check_extras(m);
}

/* Fill in one region of one layer; false if a chunk is too large to be one. */
static bool place_region(region_place *p, uint64_t row_bytes, uint32_t full_rows, uint32_t last_rows, uint32_t alignment)
{
    uint64_t full = imp_round_up(row_bytes * full_rows, alignment);
    uint64_t data = row_bytes * last_rows;
    uint64_t last = imp_round_up(data, alignment);
    if (full > INT32_MAX || last > INT32_MAX) return false;
    p->row_bytes = row_bytes;
    p->full_bytes = (uint32_t)full;
    p->last_data = (uint32_t)data;
    p->last_bytes = (uint32_t)last;
    return true;
}

static int place_layer(imp_seg_layout *l, uint32_t layer)
{
    const imp_seg_meta *m = &l->meta;
    const imp_layer_shape *s = &m->layers[layer];
    region_place *p = l->places[layer];

    uint64_t n_k = (uint64_t)s->n_kv_heads * s->head_dim_k, n_v = (uint64_t)s->n_kv_heads * s->head_dim_v;
    if (n_k == 0 || n_v == 0 || n_k > MAX_ROW_ELEMENTS || n_v > MAX_ROW_ELEMENTS) {
        return imp_fail(IMP_E_ARG, "segment: layer %u has %u KV heads of %u and %u elements", layer, s->n_kv_heads,
                        s->head_dim_k, s->head_dim_v);
    }
    uint32_t n_probe = m->probe_heads < s->n_kv_heads ? m->probe_heads : s->n_kv_heads;
    uint64_t k_bytes = imp_rows_key_bytes(m->rest, m->type_k, (size_t)n_k);
    uint64_t v_bytes = imp_rows_value_bytes(m->rest, m->type_v, (size_t)n_v);
    uint64_t probe_bytes = imp_type_bytes(m->type_k, (size_t)n_probe * s->head_dim_k);
    uint64_t scales_bytes = imp_rows_scales_bytes(m->rest, (size_t)n_k);
    if (k_bytes == 0 || v_bytes == 0 || (n_probe > 0 && probe_bytes == 0)) {
        return imp_fail(IMP_E_UNSUPPORTED, "segment: layer %u's rows are no whole blocks of their type", layer);
    }

    uint32_t n = m->n_tokens, n_groups = (n + IMP_GROUP_TOKENS - 1) / IMP_GROUP_TOKENS;
    uint32_t full = m->chunk_tokens, last = n - (n - 1) / full * full, align = m->alignment;
    bool fits = place_region(&p[IMP_REGION_K], k_bytes, full, last, align) &&
                place_region(&p[IMP_REGION_V], v_bytes, full, last, align) &&
                place_region(&p[IMP_REGION_KV], m->paired ? k_bytes + v_bytes : 0, full, last, align) &&
                place_region(&p[IMP_REGION_SCALES], scales_bytes, n_groups, n_groups, align) &&
                place_region(&p[IMP_REGION_PROBE], probe_bytes, n, n, align) &&
                place_region(&p[IMP_REGION_SKETCH], (uint64_t)s->n_kv_heads * m->sketch_bits / 8, n, n, align);
    if (!fits) return imp_fail(IMP_E_ARG, "segment: a chunk of layer %u would be larger than 2 GiB", layer);

    for (size_t i = 0; i < N_IN_LAYER; i++) {
        imp_region r = region_order[i];
        if (l->region_chunks[r] == 0) continue;
        /* At most 2^10 layers x (2 x 2^16 + 4) chunks x 2^31 bytes: no overflow. */
        p[r].offset = l->file_bytes;
        l->file_bytes += (uint64_t)p[r].full_bytes * (l->region_chunks[r] - 1) + p[r].last_bytes;
    }
    return 0;
}

/* The maps of all layers, before anything else: they are read together, when a segment is opened. */
static void place_maps(imp_seg_layout *l)
{
    const imp_seg_meta *m = &l->meta;
    for (uint32_t i = 0; i < l->n_maps; i++) {
        region_place *p = &l->places[i][IMP_REGION_MAP];
        (void)place_region(p, m->n_tokens <= MAX_SHORT_MAP ? 2 : 4, m->n_tokens, m->n_tokens, m->alignment); /* fits */
        p->offset = l->file_bytes;
        l->file_bytes += p->last_bytes;
    }
}

int imp_seg_layout_new(const imp_seg_meta *meta, imp_seg_layout **out)
{
    *out = NULL;
    imp_seg_layout *l = NULL;
    int rc = check_meta(meta);
    if (rc < 0) goto out;

    rc = IMP_E_NOMEM;
    l = imp_calloc(1, sizeof *l);
    if (!l) goto out;
    l->meta = *meta;
    l->layers = imp_malloc(meta->n_layers * sizeof *l->layers);
    l->tokens = imp_malloc(meta->n_tokens * sizeof *l->tokens);
    l->places = imp_calloc(meta->n_layers, sizeof *l->places);
    if (!l->layers || !l->tokens || !l->places) goto out;
    memcpy(l->layers, meta->layers, meta->n_layers * sizeof *l->layers);
    memcpy(l->tokens, meta->tokens, meta->n_tokens * sizeof *l->tokens);
    l->meta.layers = l->layers;
    l->meta.tokens = l->tokens;

    uint32_t n = (meta->n_tokens + meta->chunk_tokens - 1) / meta->chunk_tokens;
    if (meta->paired) {
        l->region_chunks[IMP_REGION_KV] = n;
    } else {
        l->region_chunks[IMP_REGION_K] = l->region_chunks[IMP_REGION_V] = n;
    }
    l->region_chunks[IMP_REGION_SCALES] = meta->rest != IMP_REST_RAW;
    l->region_chunks[IMP_REGION_PROBE] = meta->probe_heads > 0;
    l->region_chunks[IMP_REGION_SKETCH] = meta->sketch_bits > 0;
    l->region_chunks[IMP_REGION_MAP] = meta->order != IMP_ORDER_TOKEN;
    for (size_t i = 0; i < N_IN_LAYER; i++) {
        l->region_first[region_order[i]] = l->layer_chunks;
        l->layer_chunks += l->region_chunks[region_order[i]];
    }
    l->n_maps = l->region_chunks[IMP_REGION_MAP] * meta->n_layers;
    l->n_chunks = l->n_maps + l->layer_chunks * meta->n_layers; /* at most (2^17 + 4) * 2^10 */

    l->tokens_at = IMP_SEG_FIXED_BYTES + meta->n_layers * LAYER_BYTES;
    l->sums_at = (uint32_t)imp_round_up(l->tokens_at + 4 * (uint64_t)meta->n_tokens, 8);
    l->header_bytes = imp_round_up(l->sums_at + 8 * (uint64_t)imp_seg_sums_length(l) + 8, meta->alignment);
    l->file_bytes = l->header_bytes;
    place_maps(l);
    rc = 0;
    for (uint32_t i = 0; rc == 0 && i < meta->n_layers; i++) rc = place_layer(l, i);
    if (rc < 0) goto out;

    *out = l;
    l = NULL;
out:
    if (rc == IMP_E_NOMEM) imp_fail(rc, "segment: no memory for a layout");
    imp_seg_layout_free(l);
    return rc;
}

void imp_seg_layout_free(imp_seg_layout *l)
{
    if (!l) return;
    imp_free(l->places);
    imp_free(l->tokens);
    imp_free(l->layers);
    imp_free(l);
}

const imp_seg_meta *imp_seg_layout_meta(const imp_seg_layout *l) { return &l->meta; }

uint64_t imp_seg_header_bytes(const imp_seg_layout *l) { return l->header_bytes; }

uint64_t imp_seg_file_bytes(const imp_seg_layout *l) { return l->file_bytes; }

uint32_t imp_seg_n_chunks(const imp_seg_layout *l) { return l->n_chunks; }

uint32_t imp_seg_region_chunks(const imp_seg_layout *l, imp_region region)
{
    return (unsigned)region < N_KINDS ? l->region_chunks[region] : 0;
}

size_t imp_seg_row_bytes(const imp_seg_layout *l, imp_region region, uint32_t layer)
{
    switch (region) {
    case IMP_REGION_K:
    case IMP_REGION_V:
    case IMP_REGION_PROBE:
    case IMP_REGION_SKETCH: return layer < l->meta.n_layers ? (size_t)l->places[layer][region].row_bytes : 0;
    case IMP_REGION_SCALES:
    case IMP_REGION_KV:
    case IMP_REGION_MAP: break;
    }
    return 0;
}

/* Is each chunk a run of slots, rather than one chunk a layer? */
static bool by_slots(imp_region region)
{
    return region == IMP_REGION_K || region == IMP_REGION_V || region == IMP_REGION_KV;
}

size_t imp_seg_rows_at(const imp_seg_layout *l, imp_region region, uint32_t layer, uint32_t chunk)
{
    if (!l->meta.paired || region != IMP_REGION_V) return 0;
    return imp_seg_chunk(l, IMP_REGION_KV, layer, chunk).n_tokens * imp_seg_row_bytes(l, IMP_REGION_K, layer);
}

imp_chunk_place imp_seg_chunk(const imp_seg_layout *l, imp_region region, uint32_t layer, uint32_t chunk)
{
    uint32_t n = imp_seg_region_chunks(l, region);
    if (layer >= l->meta.n_layers || chunk >= n) return (imp_chunk_place){0};

    const region_place *p = &l->places[layer][region];
    bool last = chunk == n - 1;
    imp_chunk_place c = {
        .offset = p->offset + (uint64_t)chunk * p->full_bytes,
        .n_bytes = last ? p->last_bytes : p->full_bytes,
        .data_bytes = last ? p->last_data : (uint32_t)(p->row_bytes * l->meta.chunk_tokens),
        .n_tokens = l->meta.n_tokens,
        .index = region == IMP_REGION_MAP ? layer
                                          : l->n_maps + layer * l->layer_chunks + l->region_first[region] + chunk,
    };
    if (by_slots(region)) {
        c.first_token = chunk * l->meta.chunk_tokens;
        c.n_tokens = last ? l->meta.n_tokens - c.first_token : l->meta.chunk_tokens;
    }
    return c;
}

/* Which chunk the i-th entry of the table is about; `index` is in range. */
static void locate(const imp_seg_layout *l, uint32_t index, imp_region *region, uint32_t *layer, uint32_t *chunk)
{
    *region = IMP_REGION_MAP;
    *layer = index;
    *chunk = 0;
    if (index < l->n_maps) return;

    index -= l->n_maps;
    uint32_t in_layer = index % l->layer_chunks;
    size_t i = 0;
    while (in_layer >= l->region_first[region_order[i]] + l->region_chunks[region_order[i]]) i++;
    *region = region_order[i];
    *layer = index / l->layer_chunks;
    *chunk = in_layer - l->region_first[region_order[i]];
}

imp_chunk_place imp_seg_chunk_at(const imp_seg_layout *l, uint32_t index, imp_region *region, uint32_t *layer,
                                 uint32_t *chunk)
{
    *region = IMP_REGION_K;
    *layer = *chunk = 0;
    if (index >= l->n_chunks) return (imp_chunk_place){0};
    locate(l, index, region, layer, chunk);
    return imp_seg_chunk(l, *region, *layer, *chunk);
}

/* What is bound to a chunk's bytes: where they belong. */
enum { WHERE_BYTES = 20 };

static void put_where(const imp_seg_layout *l, uint32_t index, unsigned char where[WHERE_BYTES])
{
    imp_region region = IMP_REGION_K;
    uint32_t layer = 0, chunk = 0;
    if (index < l->n_chunks) locate(l, index, &region, &layer, &chunk);
    imp_put64(where, l->meta.segment);
    imp_put32(where + 8, (uint32_t)region);
    imp_put32(where + 12, layer);
    imp_put32(where + 16, chunk);
}

uint64_t imp_seg_checksum(const imp_seg_layout *l, uint32_t index, const void *bytes, size_t n_bytes)
{
    unsigned char where[WHERE_BYTES];
    put_where(l, index, where);
    return imp_hash64(bytes, n_bytes, imp_hash64(where, sizeof where, 0));
}

size_t imp_seg_sums_length(const imp_seg_layout *l)
{
    return (l->meta.sealed ? IMP_TAG_BYTES / sizeof(uint64_t) : 1) * (size_t)l->n_chunks;
}

int imp_seg_chunk_close(const imp_seg_layout *l, const imp_cipher *cipher, uint32_t index, void *bytes, size_t n_bytes,
                        uint64_t *sums)
{
    unsigned char where[WHERE_BYTES], tag[IMP_TAG_BYTES];
    if (!l->meta.sealed) {
        sums[index] = imp_seg_checksum(l, index, bytes, n_bytes);
        return 0;
    }
    put_where(l, index, where);
    int rc = imp_cipher_seal(cipher, index, where, sizeof where, bytes, n_bytes, tag);
    sums[2 * (size_t)index] = imp_get64(tag);
    sums[2 * (size_t)index + 1] = imp_get64(tag + 8);
    return rc;
}

int imp_seg_chunk_open(const imp_seg_layout *l, const imp_cipher *cipher, uint32_t index, void *bytes, size_t n_bytes,
                       const uint64_t *sums)
{
    unsigned char where[WHERE_BYTES], tag[IMP_TAG_BYTES];
    if (!l->meta.sealed) return imp_seg_checksum(l, index, bytes, n_bytes) == sums[index] ? 0 : IMP_E_CORRUPT;
    put_where(l, index, where);
    imp_put64(tag, sums[2 * (size_t)index]);
    imp_put64(tag + 8, sums[2 * (size_t)index + 1]);
    return imp_cipher_open(cipher, index, where, sizeof where, bytes, n_bytes, tag);
}

uint64_t imp_seg_maps_at(const imp_seg_layout *l, uint64_t *n_bytes)
{
    *n_bytes = l->n_maps > 0 ? (uint64_t)l->n_maps * l->places[0][IMP_REGION_MAP].last_bytes : 0;
    return l->header_bytes;
}

/* Where the layer's first region begins; the file's end behind the last layer. */
static uint64_t layer_start(const imp_seg_layout *l, uint32_t layer)
{
    if (layer >= l->meta.n_layers) return l->file_bytes;
    size_t i = 0;
    while (l->region_chunks[region_order[i]] == 0) i++; /* keys there are always */
    return l->places[layer][region_order[i]].offset;
}

uint64_t imp_seg_layer_at(const imp_seg_layout *l, uint32_t layer, uint64_t *n_bytes)
{
    uint64_t start = layer_start(l, layer);
    *n_bytes = layer < l->meta.n_layers ? layer_start(l, layer + 1) - start : 0;
    return start;
}

/* ---- maps */

size_t imp_seg_map_bytes(const imp_seg_layout *l)
{
    return l->n_maps > 0 ? l->places[0][IMP_REGION_MAP].last_data : 0;
}

void imp_seg_map_encode(const imp_seg_layout *l, const uint32_t *tokens, void *out)
{
    unsigned char *p = out;
    uint32_t n = l->n_maps > 0 ? l->meta.n_tokens : 0;
    bool is_short = n <= MAX_SHORT_MAP;
    for (uint32_t i = 0; i < n; i++) {
        if (is_short) {
            p[2 * (size_t)i] = (unsigned char)tokens[i];
            p[2 * (size_t)i + 1] = (unsigned char)(tokens[i] >> 8);
        } else {
            imp_put32(p + 4 * (size_t)i, tokens[i]);
        }
    }
}

int imp_seg_map_decode(const imp_seg_layout *l, const void *bytes, uint32_t *tokens, unsigned char *seen)
{
    const unsigned char *p = bytes;
    uint32_t n = l->meta.n_tokens;
    bool is_short = n <= MAX_SHORT_MAP;
    if (l->n_maps == 0) {
        for (uint32_t i = 0; i < n; i++) tokens[i] = i;
        return 0;
    }
    memset(seen, 0, n);
    for (uint32_t i = 0; i < n; i++) {
        const unsigned char *q = p + (is_short ? 2 : 4) * (size_t)i;
        uint32_t token = is_short ? (uint32_t)q[0] | (uint32_t)q[1] << 8 : imp_get32(q);
        if (token >= n || seen[token]) {
            return imp_fail(IMP_E_CORRUPT, "segment: a map has %s %u", token >= n ? "no token" : "twice token", token);
        }
        seen[token] = 1;
        tokens[i] = token;
    }
    return 0;
}

/* ---- header */

static void put_hash(unsigned char *p, imp_hash128 h)
{
    imp_put64(p, h.lo);
    imp_put64(p + 8, h.hi);
}

static imp_hash128 get_hash(const unsigned char *p)
{
    return (imp_hash128){.lo = imp_get64(p), .hi = imp_get64(p + 8)};
}

static void put_region(const imp_seg_layout *l, imp_region region, uint32_t *n_regions, unsigned char *h)
{
    if (l->region_chunks[region] == 0) return;
    unsigned char *entry = h + AT_REGIONS + (*n_regions)++ * REGION_BYTES;
    imp_put32(entry, (uint32_t)region);
    imp_put32(entry + 4, l->region_chunks[region]);
    imp_put32(entry + 8, by_slots(region) ? l->meta.chunk_tokens : l->meta.n_tokens);
}

static uint32_t features_of(const imp_seg_layout *l)
{
    uint32_t features = 0;
    for (uint32_t r = IMP_REGION_KV; r < N_KINDS; r++) features |= l->region_chunks[r] > 0 ? FEATURE(r) : 0;
    return l->meta.sealed ? features | FEATURE_SEALED : features;
}

static void encode_fixed(const imp_seg_layout *l, unsigned char *h)
{
    const imp_seg_meta *m = &l->meta;
    memset(h, 0, IMP_SEG_FIXED_BYTES);
    memcpy(h + AT_MAGIC, magic, sizeof magic);
    imp_put32(h + AT_VERSION, IMP_FORMAT_VERSION);
    imp_put32(h + AT_FEATURES, features_of(l));
    imp_put64(h + AT_HEADER_BYTES, l->header_bytes);
    imp_put64(h + AT_FILE_BYTES, l->file_bytes);
    imp_put64(h + AT_SEGMENT, m->segment);
    put_hash(h + AT_SPACE, m->space);
    put_hash(h + AT_BEFORE, m->before);
    imp_put64(h + AT_FIRST_TOKEN, m->first_token);
    imp_put32(h + AT_N_TOKENS, m->n_tokens);
    imp_put32(h + AT_N_LAYERS, m->n_layers);
    imp_put32(h + AT_TYPE_K, (uint32_t)m->type_k);
    imp_put32(h + AT_TYPE_V, (uint32_t)m->type_v);
    imp_put32(h + AT_REST, (uint32_t)m->rest);
    imp_put32(h + AT_ORDER, (uint32_t)m->order);
    imp_put32(h + AT_CHUNK_TOKENS, m->chunk_tokens);
    imp_put32(h + AT_ALIGNMENT, m->alignment);
    imp_put64(h + AT_CREATED, (uint64_t)m->created_s);
    imp_put32(h + AT_FLAGS, m->derived ? FLAG_DERIVED : 0);
    imp_put32(h + AT_N_CHUNKS, l->n_chunks);
    imp_put32(h + AT_LAYERS, IMP_SEG_FIXED_BYTES);
    imp_put32(h + AT_TOKENS, l->tokens_at);
    imp_put32(h + AT_SUMS, l->sums_at);
    memcpy(h + AT_MODEL_NAME, m->model_name, sizeof m->model_name);
    memcpy(h + AT_HOW, m->how, sizeof m->how);

    imp_put32(h + AT_CORE_TOKENS, m->core_tokens);
    imp_put32(h + AT_PROBE_HEADS, m->probe_heads);
    imp_put32(h + AT_SKETCH_BITS, m->sketch_bits);
    imp_put64(h + AT_BASIS, m->basis);
    if (m->sealed) imp_put64(h + AT_SEAL, SEAL_OPEN);

    uint32_t n_regions = 0;
    put_region(l, IMP_REGION_MAP, &n_regions, h);
    for (size_t i = 0; i < N_IN_LAYER; i++) put_region(l, region_order[i], &n_regions, h);
    imp_put32(h + AT_N_REGIONS, n_regions);
    imp_put64(h + AT_CHECKSUM, imp_hash64(h, AT_CHECKSUM, 0));
}

void imp_seg_header_encode(const imp_seg_layout *l, const uint64_t *sums, void *out)
{
    unsigned char *h = out;
    memset(h, 0, l->header_bytes);
    encode_fixed(l, h);
    for (uint32_t i = 0; i < l->meta.n_layers; i++) {
        unsigned char *entry = h + IMP_SEG_FIXED_BYTES + i * LAYER_BYTES;
        imp_put32(entry, l->layers[i].n_kv_heads);
        imp_put32(entry + 4, l->layers[i].head_dim_k);
        imp_put32(entry + 8, l->layers[i].head_dim_v);
    }
    for (uint32_t i = 0; i < l->meta.n_tokens; i++) imp_put32(h + l->tokens_at + 4 * (size_t)i, (uint32_t)l->tokens[i]);
    for (size_t i = 0; i < imp_seg_sums_length(l); i++) imp_put64(h + l->sums_at + 8 * i, sums[i]);
    imp_put64(h + l->header_bytes - 8, imp_hash64(h, l->header_bytes - 8, 0));
}

int imp_seg_header_peek(const void *bytes, size_t n_bytes, uint64_t *header_bytes)
{
    const unsigned char *h = bytes;
    if (n_bytes < IMP_SEG_FIXED_BYTES) return imp_fail(IMP_E_CORRUPT, "segment header: cut off at %zu bytes", n_bytes);
    if (memcmp(h, magic, sizeof magic) != 0) return imp_fail(IMP_E_CORRUPT, "segment header: not a segment");
    /* Before the version, so that a damaged one isn't taken for a newer one. */
    if (imp_get64(h + AT_CHECKSUM) != imp_hash64(h, AT_CHECKSUM, 0)) {
        return imp_fail(IMP_E_CORRUPT, "segment header: the checksum of its first %u bytes is wrong", IMP_SEG_FIXED_BYTES);
    }
    uint32_t version = imp_get32(h + AT_VERSION), features = imp_get32(h + AT_FEATURES);
    if (version != IMP_FORMAT_VERSION) {
        return imp_fail(IMP_E_VERSION, "segment header: format %u, this is for %u", version, IMP_FORMAT_VERSION);
    }
    if (features & ~FEATURES) {
        return imp_fail(IMP_E_VERSION, "segment header: needs features 0x%x", features & ~FEATURES);
    }
    uint64_t n = imp_get64(h + AT_HEADER_BYTES);
    if (n < IMP_SEG_FIXED_BYTES + 8 || n > imp_get64(h + AT_FILE_BYTES) || n > SIZE_MAX) {
        return imp_fail(IMP_E_CORRUPT, "segment header: its length is wrong");
    }
    *header_bytes = n;
    return 0;
}

/* Do the fixed header's numbers allow the rest to be read from header_bytes bytes? */
static int check_extents(const imp_seg_meta *m, uint64_t n_chunks, uint64_t header_bytes)
{
    if (m->n_layers > MAX_LAYERS || m->n_tokens > MAX_TOKENS ||
        IMP_SEG_FIXED_BYTES + (uint64_t)m->n_layers * LAYER_BYTES + (uint64_t)m->n_tokens * 4 + n_chunks * 8 + 8 >
            header_bytes) {
        return imp_fail(IMP_E_CORRUPT, "segment header: its tables don't fit into it");
    }
    return 0;
}

static bool all_zero(const unsigned char *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (p[i] != 0) return false;
    }
    return true;
}

int imp_seg_header_decode(const void *bytes, size_t n_bytes, imp_seg_layout **layout, uint64_t **sums)
{
    const unsigned char *h = bytes;
    imp_layer_shape *layers = NULL;
    int32_t *tokens = NULL;
    uint64_t *table = NULL;
    imp_seg_layout *l = NULL;
    uint64_t header_bytes = 0;
    *layout = NULL;
    *sums = NULL;

    int rc = imp_seg_header_peek(bytes, n_bytes, &header_bytes);
    if (rc < 0) goto out;
    if (header_bytes > n_bytes) {
        rc = imp_fail(IMP_E_CORRUPT, "segment header: cut off at %zu bytes", n_bytes);
        goto out;
    }
    if (imp_get64(h + header_bytes - 8) != imp_hash64(h, header_bytes - 8, 0)) {
        rc = imp_fail(IMP_E_CORRUPT, "segment header: its checksum is wrong");
        goto out;
    }
    /* From here on the bytes are as somebody wrote them; that doesn't make them right. */
    if (imp_seg_header_sealed(h) && !all_zero(h + AT_SALT, SEAL_END - AT_SALT)) {
        rc = imp_fail(IMP_E_UNSUPPORTED, "segment header: it is encrypted");
        goto out;
    }
    uint32_t flags = imp_get32(h + AT_FLAGS);
    if (flags & ~FLAG_DERIVED) {
        rc = imp_fail(IMP_E_UNSUPPORTED, "segment header: unknown flags 0x%x", flags);
        goto out;
    }
    imp_seg_meta m = {
        .segment = imp_get64(h + AT_SEGMENT),
        .space = get_hash(h + AT_SPACE),
        .before = get_hash(h + AT_BEFORE),
        .first_token = imp_get64(h + AT_FIRST_TOKEN),
        .n_tokens = imp_get32(h + AT_N_TOKENS),
        .n_layers = imp_get32(h + AT_N_LAYERS),
        .type_k = (imp_type)imp_get32(h + AT_TYPE_K),
        .type_v = (imp_type)imp_get32(h + AT_TYPE_V),
        .rest = (imp_rest)imp_get32(h + AT_REST),
        .order = (imp_order)imp_get32(h + AT_ORDER),
        .chunk_tokens = imp_get32(h + AT_CHUNK_TOKENS),
        .alignment = imp_get32(h + AT_ALIGNMENT),
        .derived = flags & FLAG_DERIVED,
        .created_s = (int64_t)imp_get64(h + AT_CREATED),
        .paired = imp_get32(h + AT_FEATURES) & FEATURE(IMP_REGION_KV),
        .core_tokens = imp_get32(h + AT_CORE_TOKENS),
        .probe_heads = imp_get32(h + AT_PROBE_HEADS),
        .sketch_bits = imp_get32(h + AT_SKETCH_BITS),
        .basis = imp_get64(h + AT_BASIS),
        .sealed = imp_seg_header_sealed(h),
    };
    memcpy(m.model_name, h + AT_MODEL_NAME, sizeof m.model_name);
    memcpy(m.how, h + AT_HOW, sizeof m.how);
    rc = check_extents(&m, imp_get32(h + AT_N_CHUNKS), header_bytes);
    if (rc < 0) goto out;

    layers = imp_malloc(m.n_layers * sizeof *layers);
    tokens = imp_malloc(m.n_tokens * sizeof *tokens);
    if (!layers || !tokens) {
        rc = imp_fail(IMP_E_NOMEM, "segment header: no memory");
        goto out;
    }
    const unsigned char *p = h + IMP_SEG_FIXED_BYTES;
    for (uint32_t i = 0; i < m.n_layers; i++, p += LAYER_BYTES) {
        layers[i] = (imp_layer_shape){imp_get32(p), imp_get32(p + 4), imp_get32(p + 8)};
        if (imp_get32(p + 12) != 0) {
            rc = imp_fail(IMP_E_CORRUPT, "segment header: layer %u has more than a shape", i);
            goto out;
        }
    }
    for (uint32_t i = 0; i < m.n_tokens; i++) tokens[i] = (int32_t)imp_get32(p + 4 * (size_t)i);
    m.layers = layers;
    m.tokens = tokens;
    rc = imp_seg_layout_new(&m, &l);
    if (rc == IMP_E_ARG) rc = IMP_E_CORRUPT; /* the line fits as it is */
    if (rc < 0) goto out;

    /* F1, F2: what the header says about itself is what follows from the rest, and nothing hides in the gaps. */
    unsigned char fixed[IMP_SEG_FIXED_BYTES];
    encode_fixed(l, fixed);
    size_t n_sums = imp_seg_sums_length(l);
    size_t tokens_end = l->tokens_at + 4 * (size_t)m.n_tokens, sums_end = l->sums_at + 8 * n_sums;
    if (memcmp(fixed, h, sizeof fixed) != 0 || l->header_bytes != header_bytes ||
        !all_zero(h + tokens_end, l->sums_at - tokens_end) || !all_zero(h + sums_end, header_bytes - 8 - sums_end)) {
        rc = imp_fail(IMP_E_CORRUPT, "segment header: it contradicts itself");
        goto out;
    }
    table = imp_malloc(n_sums * sizeof *table);
    if (!table) {
        rc = imp_fail(IMP_E_NOMEM, "segment header: no memory");
        goto out;
    }
    for (size_t i = 0; i < n_sums; i++) table[i] = imp_get64(h + l->sums_at + 8 * i);

    *layout = l;
    *sums = table;
    l = NULL;
    table = NULL;
out:
    imp_free(table);
    imp_seg_layout_free(l);
    imp_free(tokens);
    imp_free(layers);
    return rc;
}

/* ---- sealed headers
 *
 * In the clear: what it takes to find out whose file it is and how long its header is (bytes 0 to 39), the place of the
 * seal, and the checksums, which are those of the bytes on disk. */

bool imp_seg_header_sealed(const void *bytes)
{
    return imp_get32((const unsigned char *)bytes + AT_FEATURES) & FEATURE_SEALED;
}

/* What isn't encrypted and has to stay as it is. */
enum { CLEAR_BYTES = AT_SPACE + AT_FIXED_TAG - AT_SEAL };

static void put_clear(const unsigned char *h, unsigned char clear[CLEAR_BYTES])
{
    memcpy(clear, h, AT_SPACE);
    memcpy(clear + AT_SPACE, h + AT_SEAL, AT_FIXED_TAG - AT_SEAL);
}

static void sum_header(unsigned char *h, size_t header_bytes)
{
    imp_put64(h + AT_CHECKSUM, imp_hash64(h, AT_CHECKSUM, 0));
    imp_put64(h + header_bytes - 8, imp_hash64(h, header_bytes - 8, 0));
}

int imp_seg_header_seal(const imp_key *key, const imp_cipher *cipher, void *bytes, size_t header_bytes)
{
    unsigned char *h = bytes, clear[CLEAR_BYTES];
    imp_put64(h + AT_SEAL, imp_key_id(key));
    memcpy(h + AT_SALT, imp_cipher_salt(cipher), IMP_SALT_BYTES);
    put_clear(h, clear);
    int rc = imp_cipher_seal(cipher, PART_FIXED, clear, sizeof clear, h + AT_SPACE, AT_SEAL - AT_SPACE,
                             h + AT_FIXED_TAG);
    if (rc == 0) {
        rc = imp_cipher_seal(cipher, PART_TABLES, clear, sizeof clear, h + IMP_SEG_FIXED_BYTES,
                             header_bytes - 8 - IMP_SEG_FIXED_BYTES, h + AT_TABLES_TAG);
    }
    if (rc == 0) sum_header(h, header_bytes);
    return rc;
}

int imp_seg_header_unseal(const imp_key *key, void *bytes, size_t n_bytes, imp_cipher **cipher)
{
    unsigned char *h = bytes, clear[CLEAR_BYTES];
    uint64_t header_bytes = 0;
    imp_cipher *c = NULL;
    *cipher = NULL;
    int rc = imp_seg_header_peek(bytes, n_bytes, &header_bytes);
    if (rc < 0) return rc;
    /* Before the key is tried, so that damage isn't taken for another key's work. */
    if (header_bytes > n_bytes || imp_get64(h + header_bytes - 8) != imp_hash64(h, header_bytes - 8, 0)) {
        return imp_fail(IMP_E_CORRUPT, "segment header: its checksum is wrong");
    }
    if (!key) return imp_fail(IMP_E_UNSUPPORTED, "segment header: it is encrypted, and there is no key");
    if (imp_get64(h + AT_SEAL) != imp_key_id(key)) {
        return imp_fail(IMP_E_UNSUPPORTED, "segment header: it is encrypted with another key");
    }
    rc = imp_cipher_for(key, h + AT_SALT, &c);
    if (rc < 0) return rc;
    put_clear(h, clear);
    rc = imp_cipher_open(c, PART_FIXED, clear, sizeof clear, h + AT_SPACE, AT_SEAL - AT_SPACE, h + AT_FIXED_TAG);
    if (rc == 0) {
        rc = imp_cipher_open(c, PART_TABLES, clear, sizeof clear, h + IMP_SEG_FIXED_BYTES,
                             (size_t)header_bytes - 8 - IMP_SEG_FIXED_BYTES, h + AT_TABLES_TAG);
    }
    if (rc < 0) {
        imp_cipher_free(c);
        return rc == IMP_E_CORRUPT ? imp_fail(rc, "segment header: it isn't as it was encrypted") : rc;
    }
    imp_put64(h + AT_SEAL, SEAL_OPEN);
    memset(h + AT_SALT, 0, SEAL_END - AT_SALT);
    sum_header(h, (size_t)header_bytes);
    *cipher = c;
    return 0;
}

/* ---- names */

void imp_seg_name(uint64_t segment, char out[32]) { snprintf(out, 32, "segments/%016llx.seg", (unsigned long long)segment); }

bool imp_seg_name_parse(const char *name, uint64_t *segment)
{
    uint64_t id = 0;
    for (int i = 0; i < 16; i++) {
        char c = name[i];
        if (c >= '0' && c <= '9') {
            id = id << 4 | (uint64_t)(c - '0');
        } else if (c >= 'a' && c <= 'f') {
            id = id << 4 | (uint64_t)(c - 'a' + 10);
        } else {
            return false;
        }
    }
    if (id == 0 || strcmp(name + 16, ".seg") != 0) return false;
    *segment = id;
    return true;
}
