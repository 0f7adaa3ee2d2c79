/* plan.h: which chunks a layer needs and which reads bring them. Pure: it looks at layouts, never at a disk.
 *
 * A prefix is a row of spans; what a span needs of a layer are neighbouring chunks of one file:
 *
 *     prefix      0 ............... 150 | 150 ......... 190      two spans
 *     segment     [ 0   |1   |2 ]        [ 0   |1   |2   ]       chunks of 64 tokens; the second span starts at token 70
 *                  used  used used        -     used -           of its segment
 *
 *     list        S  K0 K1 K2 V0 V1 V2    S  K1 V1               one *piece* per chunk, in the order of the file
 *
 * The list is the same for all layers; places in the file differ. Stage A of a layer is what can be read before its
 * queries are known, stage B the rest: with IMP_IDENTIFY_NONE all is stage A, with IMP_IDENTIFY_ALL_KEYS scales and keys
 * are, and of the values only chunks that hold a chosen token are read, in stage B.
 */
#ifndef IMP_SESSION_PLAN_H
#define IMP_SESSION_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"
#include "store/store.h"
#include "tier/host.h"

/* Reads are merged up to so many bytes: where more doesn't make the disk faster, and small enough that the first rows of
 * a layer are worked on while the last ones arrive. */
#define IMP_RUN_BYTES (512u << 10)

/* A span's part of the list: pieces [first, first + scales), then n_chunks of keys, then n_chunks of values. */
typedef struct imp_plan_span {
    const imp_seg *seg;
    uint32_t prefix_first;  /* its first token's place in the prefix */
    uint32_t segment_first; /* and in the segment */
    uint32_t n_tokens;
    uint32_t first_piece;
    uint32_t n_scales;      /* 1 with IMP_REST_Q8, else 0 */
    uint32_t first_chunk;   /* of its segment's regions */
    uint32_t n_chunks;
} imp_plan_span;

typedef struct imp_plan {
    imp_plan_span *spans;
    size_t n_spans;
    size_t n_pieces;
    size_t n_tokens;
} imp_plan;

/* The first `n_tokens` (at least 1) of what `spans` cover, which are in the order of the prompt. */
int imp_plan_new(const imp_span *spans, size_t n_spans, size_t n_tokens, imp_plan *out);
void imp_plan_clear(imp_plan *plan); /* a zeroed one is allowed */

/* The tokens of chunk `i` (0..n_chunks-1) of a span that belong to the prefix. */
typedef struct imp_plan_rows {
    uint32_t prefix_first; /* the first one's place in the prefix */
    uint32_t n_tokens;
    uint32_t skip;         /* rows of the chunk before it */
} imp_plan_rows;

imp_plan_rows imp_plan_chunk_rows(const imp_plan_span *span, uint32_t i);

/* One chunk of one layer, on its way. */
typedef struct imp_piece {
    imp_chunk_place place;
    const unsigned char *bytes; /* where it is or will be */
    imp_host_entry *held;       /* they are the host tier's */
    uint32_t run;               /* the read that brings it, if `wanted` */
    bool wanted;                /* to be read */
    bool checked;               /* the bytes are there and right */
} imp_piece;

/* One read: pieces [first_piece, first_piece + n_pieces) of one span, neighbours in its file. */
typedef struct imp_plan_run {
    const imp_seg *seg;
    uint64_t offset;
    size_t n_bytes;
    uint32_t first_piece, n_pieces;
} imp_plan_run;

/* Fill in pieces[n_pieces] for `layer`: the place of each, nothing wanted. */
void imp_plan_places(const imp_plan *plan, uint32_t layer, imp_piece *pieces);

/* Region of piece `at` of a span (counted from its first piece), and the chunk's number in it. */
imp_region imp_plan_piece_region(const imp_plan_span *span, uint32_t at, uint32_t *chunk);

/* Merge the wanted pieces into as few reads of at most `max_bytes` as can be (a larger chunk is a read of its own).
 * Writes at most n_pieces runs, sets `run` of each wanted piece to `first_run` + its number, returns how many. */
size_t imp_plan_runs(const imp_plan *plan, imp_piece *pieces, size_t max_bytes, uint32_t first_run,
                     imp_plan_run *runs);

/* Bytes of one layer's chunks: all of them, and those of the values. */
void imp_plan_layer_bytes(const imp_plan *plan, uint32_t layer, size_t *all, size_t *values);

#endif
