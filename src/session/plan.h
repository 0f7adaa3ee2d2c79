/* plan.h: which chunks a layer needs and which reads bring them. Pure: it looks at layouts and maps, never at a disk.
 *
 * A prefix is a row of spans; what a span needs of a layer lies in chunks of one file:
 *
 *     prefix      0 ............... 150 | 150 ......... 190      two spans
 *     segment     [ 0   |1   |2 ]        [ 0   |1   |2   ]       chunks of 64 tokens; the second span starts at
 *                  used  used used        -     used -           token 70 of its segment
 *
 *     list        S K0 K1 K2 V0 V1 V2     S K1 V1                one *piece* per chunk, in the order of the file
 *
 * The list is the same for all layers; places in the file differ. Where a segment's tokens don't lie in the order of
 * the prompt (it has a map for each layer), any of its chunks may hold tokens of the span: then all of them are listed,
 * and which ones hold how many is a layer's own matter.
 *
 *     list        S sketch probe K0 K1 .. V0 V1 ..     keys and values apart
 *                 S sketch probe KV0 KV1 ..            or paired
 *
 * A *unit* is what brings a token's row of keys and its row of values: a KV chunk, or a K chunk and the V chunk of the
 * same tokens. Units are numbered through the whole prefix.
 */
#ifndef IMP_SESSION_PLAN_H
#define IMP_SESSION_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"
#include "store/store.h"
#include "tier/host.h"

/* Reads are merged up to so many bytes: where more doesn't make the disk faster, and small enough that the first rows
 * of a layer are worked on while the last ones arrive. */
#define IMP_RUN_BYTES (512u << 10)

#define IMP_PLAN_NONE UINT32_MAX

/* A span's part of the list. Places of pieces count from the plan's first. */
typedef struct imp_plan_span {
    const imp_seg *seg;
    uint32_t prefix_first;  /* its first token's place in the prefix */
    uint32_t segment_first; /* and in the segment */
    uint32_t n_tokens;
    uint32_t first_piece, n_pieces;
    uint32_t scales, sketch, probe; /* pieces; IMP_PLAN_NONE: the segment has no such region */
    uint32_t keys, values;          /* the first piece with keys, and with values; the same where they are paired */
    uint32_t first_chunk, n_chunks; /* of its segment's regions */
    uint32_t first_unit;            /* the first chunk's */
    bool paired;
} imp_plan_span;

typedef struct imp_plan {
    imp_plan_span *spans;
    size_t n_spans, n_pieces, n_units, n_tokens;
    bool mapped; /* some segment has maps */
} imp_plan;

/* The first `n_tokens` (at least 1) of what `spans` cover, which are in the order of the prompt. */
int imp_plan_new(const imp_span *spans, size_t n_spans, size_t n_tokens, imp_plan *out);
void imp_plan_clear(imp_plan *plan); /* a zeroed one is allowed */

/* Slots [*first, returned end) of the span's segment are in chunk `i` (0..n_chunks-1) of the span. */
uint32_t imp_plan_slots(const imp_plan_span *span, uint32_t i, uint32_t *first);

/* The place in the prefix of the token in `slot`; IMP_PLAN_NONE: it isn't the span's. `map`: imp_seg_map(). */
static inline uint32_t imp_plan_token(const imp_plan_span *span, const uint32_t *map, uint32_t slot)
{
    uint32_t token = (map ? map[slot] : slot) - span->segment_first;
    return token < span->n_tokens ? span->prefix_first + token : IMP_PLAN_NONE;
}

/* unit_of[n_tokens]: the unit of each token of the prefix in `layer`; tokens_in[n_units]: how many each holds, which
 * may be 0 with maps. Without maps all layers are alike. */
void imp_plan_units(const imp_plan *plan, uint32_t layer, uint32_t *unit_of, uint32_t *tokens_in);

/* One chunk of one layer, on its way. */
typedef struct imp_piece {
    imp_chunk_place place;
    const unsigned char *bytes; /* where it is or will be */
    imp_host_entry *held;       /* they are the host tier's */
    uint32_t run;               /* the read that brings it; IMP_PLAN_NONE: it needs none */
    uint32_t spare;             /* a read that brings it though nobody wanted it; IMP_PLAN_NONE: none does */
    bool asked;                 /* somebody wanted it before: it is there, or in a run */
    bool wanted;                /* to be read, and in no run yet */
    bool checked;               /* the bytes are there and right */
    bool counted;               /* as read in order to choose */
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

/* Region of a span's piece, and the chunk's number in it. */
imp_region imp_plan_region(const imp_plan_span *span, uint32_t piece, uint32_t *chunk);

/* Merge the wanted pieces into as few reads of at most `max_bytes` as can be (a larger chunk is a read of its own), over
 * gaps of at most `max_gap` bytes of keys and values that nobody asked for: they are spare then, each in one read only.
 * Writes at most n_pieces runs, sets `run` of each to `first_run` + its number, and wants them no longer. Returns how
 * many runs. */
size_t imp_plan_runs(const imp_plan *plan, imp_piece *pieces, size_t max_bytes, size_t max_gap, uint32_t first_run,
                     imp_plan_run *runs);

#endif
