/* segment.h: the bytes of a segment file (docs/format.md). Pure: bytes in, answer out.
 *
 *   +--------------------+  0
 *   | fixed header       |  magic, version, lengths, ids, shapes; its own checksum
 *   | layers, tokens     |
 *   | checksum table     |  one XXH3-64 per chunk, in file order
 *   | padding            |
 *   +--------------------+  header_bytes, a multiple of the alignment; the last 8 bytes are the checksum of all before
 *   | MAP of each layer  |  only where the order isn't that of tokens
 *   | layer 0: SCALES    |  not with IMP_REST_RAW: one chunk, [n_groups] of format/rows.h's scales
 *   |          SKETCH    |  if there are sketches
 *   |          PROBE     |  if there are probe keys
 *   |          K chunks  |  each padded to the alignment; or KV chunks
 *   |          V chunks  |
 *   | layer 1: ...       |
 *   +--------------------+  file_bytes
 *
 * A chunk of keys and values is the unit that is read and checked: `chunk_tokens` slots of one region of one layer, the
 * last one shorter. Slot s holds token s, or map[s] in a segment with maps; scales belong to 64 tokens in token order
 * all the same, so that rows can be reordered without rounding them again.
 * Its checksum covers the padded bytes and is seeded with segment id, region, layer and chunk number, so that neither a
 * flipped byte of padding nor a chunk in another's place passes.
 *
 * A sealed segment (crypt/crypt.h) is the same with its chunks encrypted where they lie, and a tag of 16 bytes in the
 * table instead of each checksum; at last its header is sealed. What is read is opened in the reverse order.
 */
#ifndef IMP_FORMAT_SEGMENT_H
#define IMP_FORMAT_SEGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "crypt/crypt.h"
#include "impress/impress.h"

#define IMP_FORMAT_VERSION 1u
#define IMP_GROUP_TOKENS 64u /* tokens that share the scales of a key channel */

/* Kinds of region. The numbers are on disk. */
typedef enum imp_region {
    IMP_REGION_K = 0,
    IMP_REGION_V = 1,
    IMP_REGION_SCALES = 2,
    IMP_REGION_KV = 3,     /* keys and values of the same tokens in one chunk, instead of K and V */
    IMP_REGION_PROBE = 4,  /* the first KV heads' keys once more, raw, in token order: one chunk a layer */
    IMP_REGION_SKETCH = 5, /* codes (select/sketch.h), in token order: one chunk a layer */
    IMP_REGION_MAP = 6     /* slot -> token, where the order isn't that of tokens: one chunk a layer, all before layer 0 */
} imp_region;

/* What a segment holds. */
typedef struct imp_seg_meta {
    uint64_t segment;          /* its id, random, never 0 */
    imp_hash128 space;
    imp_hash128 before;        /* prefix hash (base/hash.h) of the tokens before the first; the space's id at position 0 */
    uint64_t first_token;      /* position in the prompt */
    uint32_t n_tokens;         /* 1..1,048,576 */
    uint32_t n_layers;         /* 1..1024 */
    imp_type type_k, type_v;   /* the engine's */
    imp_rest rest;
    imp_order order;
    uint32_t chunk_tokens;
    uint32_t alignment;        /* 512 or 4096 */
    bool derived;
    int64_t created_s;
    char model_name[64];       /* NUL-padded */
    char how[64];              /* how a derived entry came about; NUL-padded */
    const imp_layer_shape *layers; /* [n_layers] */
    const int32_t *tokens;     /* [n_tokens] */
    bool paired;               /* KV chunks instead of K and V chunks */
    uint32_t core_tokens;      /* with IMP_ORDER_CORE: slots [0, core_tokens) are the core, in every layer: whole chunks,
                                  or all tokens; 0 in other orders */
    uint32_t probe_heads;      /* KV heads [0, min(probe_heads, n_kv_heads)) have probe keys; at most 1,024; 0: no such
                                  region */
    uint32_t sketch_bits;      /* of a token and KV head: a multiple of 8, at most 4,096; 0: no such region. A row is
                                  n_kv_heads * sketch_bits / 8 bytes */
    uint64_t basis;            /* id of the sketches' basis; 0 without */
    bool sealed;               /* its chunks are encrypted */
} imp_seg_meta;

/* Where everything lies; computed from the meta alone. Owns copies of layers and tokens. */
typedef struct imp_seg_layout imp_seg_layout;

typedef struct imp_chunk_place {
    uint64_t offset;      /* in the file */
    uint32_t n_bytes;     /* padded: what is read */
    uint32_t data_bytes;  /* without padding */
    uint32_t first_token; /* in the segment: the first slot, of K, V and KV; 0 and all tokens in the others */
    uint32_t n_tokens;
    uint32_t index;       /* in the checksum table */
} imp_chunk_place;

/* IMP_E_ARG with a line if the meta is out of range, IMP_E_UNSUPPORTED for an encoding the types can't have. */
int imp_seg_layout_new(const imp_seg_meta *meta, imp_seg_layout **out);
void imp_seg_layout_free(imp_seg_layout *l);
const imp_seg_meta *imp_seg_layout_meta(const imp_seg_layout *l);
uint64_t imp_seg_header_bytes(const imp_seg_layout *l);
uint64_t imp_seg_file_bytes(const imp_seg_layout *l);
uint32_t imp_seg_n_chunks(const imp_seg_layout *l);                    /* entries of the checksum table */
uint32_t imp_seg_region_chunks(const imp_seg_layout *l, imp_region region); /* per layer; 0 if it isn't there */
/* Bytes on disk of one token's row in a region: K or V (paired too), PROBE, SKETCH. */
size_t imp_seg_row_bytes(const imp_seg_layout *l, imp_region region, uint32_t layer);
/* Where in chunk `chunk` of the layer the key rows (IMP_REGION_K) or value rows (IMP_REGION_V) begin: 0, but for the
 * values of a KV chunk, which come behind the keys of all its slots. */
size_t imp_seg_rows_at(const imp_seg_layout *l, imp_region region, uint32_t layer, uint32_t chunk);

/* Where the MAP chunks of all layers lie, one behind the other. n_bytes 0: there are none. */
uint64_t imp_seg_maps_at(const imp_seg_layout *l, uint64_t *n_bytes);
/* Where the layer's chunks lie, without its map: up to the next layer's, or the end of the file. */
uint64_t imp_seg_layer_at(const imp_seg_layout *l, uint32_t layer, uint64_t *n_bytes);

/* A layer's map as the MAP region has it: u16 a slot where n_tokens <= 65,536, else u32, little-endian. 0 bytes in
 * token order; then decode gives slot s the token s. `tokens`: [n_tokens].
 * Decode: IMP_E_CORRUPT unless it holds each token once. `seen`: scratch, [n_tokens] bytes. */
size_t imp_seg_map_bytes(const imp_seg_layout *l);
void imp_seg_map_encode(const imp_seg_layout *l, const uint32_t *tokens, void *out);
int imp_seg_map_decode(const imp_seg_layout *l, const void *bytes, uint32_t *tokens, unsigned char *seen);
/* All zero for a chunk that isn't there. */
imp_chunk_place imp_seg_chunk(const imp_seg_layout *l, imp_region region, uint32_t layer, uint32_t chunk);
/* The place of the i-th entry of the checksum table, and which chunk that is. For verify. */
imp_chunk_place imp_seg_chunk_at(const imp_seg_layout *l, uint32_t index, imp_region *region, uint32_t *layer,
                                 uint32_t *chunk);

uint64_t imp_seg_checksum(const imp_seg_layout *l, uint32_t index, const void *bytes, size_t n_bytes);

/* Length of the table of checksums, or of tags where the segment is sealed: so many numbers for each chunk. */
size_t imp_seg_sums_length(const imp_seg_layout *l);
/* A chunk that is about to be written: note its checksum in `sums`, or encrypt it in place (once for each cipher!) and
 * note its tag. `cipher` is NULL in segments that aren't sealed. */
int imp_seg_chunk_close(const imp_seg_layout *l, const imp_cipher *cipher, uint32_t index, void *bytes, size_t n_bytes,
                        uint64_t *sums);
/* A chunk as it was read: check it, and decrypt it in place. IMP_E_CORRUPT, without a line, or what decrypting may
 * give; the bytes may be worth nothing then. */
int imp_seg_chunk_open(const imp_seg_layout *l, const imp_cipher *cipher, uint32_t index, void *bytes, size_t n_bytes,
                       const uint64_t *sums);

/* Write the header, imp_seg_header_bytes() long, with the table sums[imp_seg_sums_length()]. That of a sealed segment
 * has to be sealed then. */
void imp_seg_header_encode(const imp_seg_layout *l, const uint64_t *sums, void *out);
/* How long the header is that starts with these >= IMP_SEG_FIXED_BYTES bytes: to read the rest. IMP_E_CORRUPT,
 * IMP_E_VERSION. Check it against the file's length before taking memory for it. */
#define IMP_SEG_FIXED_BYTES 512u
int imp_seg_header_peek(const void *bytes, size_t n_bytes, uint64_t *header_bytes);
/* Read a header; whatever the bytes, this returns 0 or a code and never reads past n_bytes. `*sums` belongs to the caller
 * (imp_free). IMP_E_CORRUPT; IMP_E_VERSION or IMP_E_UNSUPPORTED: sound, but of a later format; IMP_E_NOMEM. */
int imp_seg_header_decode(const void *bytes, size_t n_bytes, imp_seg_layout **layout, uint64_t **sums);

/* Encrypt the header of a sealed segment in place, as it goes to disk, with the cipher of its chunks. */
int imp_seg_header_seal(const imp_key *key, const imp_cipher *cipher, void *bytes, size_t header_bytes);
/* Is a header that imp_seg_header_peek() found sound sealed? */
bool imp_seg_header_sealed(const void *bytes);
/* The reverse: afterwards it can be decoded. `*cipher` is for its chunks; the caller's. IMP_E_UNSUPPORTED: no key
 * (`key` NULL), or another one; IMP_E_CORRUPT; IMP_E_NOMEM. */
int imp_seg_header_unseal(const imp_key *key, void *bytes, size_t n_bytes, imp_cipher **cipher);

/* "segments/<16 hex digits>.seg" */
void imp_seg_name(uint64_t segment, char out[32]);
/* The id in such a name (the part after the folder); false if it isn't one. */
bool imp_seg_name_parse(const char *name, uint64_t *segment);

#endif
