/* load.h: the inside of a load, shared by the files that make it up.
 *
 *     load.c      options, begin, rewind, end: memory is taken and given here
 *     stream.c    the ring of layers that are read ahead, and every read
 *     keys.c      keys, probe keys and sketches of a layer, laid out for the scorer
 *     identify.c  which tokens a layer gets
 *     record.c    what earlier requests found important, and what this one leaves behind
 *     gather.c    rows in the engine's memory
 *     batch.c     chunks that are at hand, worked on by several threads
 *     estimate.c  what it would take, and what it took
 *
 * What is read of a layer, in two stages:
 *
 *     A  ahead, as far as the ring reaches: what it takes to choose, or all that is loaded where that is known before
 *        any query. Without prefetch it is read when the layer is asked for
 *     B  when the layer is asked for: all keys where the cheap way to choose fails, then what holds chosen tokens
 *
 * Invariants
 * L1  No byte leaves a chunk before the chunk's checksum was verified, or a tier gave it, or it never was on a disk.
 * L2  A slot's buffers are given back only when none of its reads is in flight.
 * L3  Between begin and end nothing is allocated for a layer but copies for the tiers and a record's first scores,
 *     whose failure is harmless (and the scorer, once, when the engine's number of heads is first seen).
 */
#ifndef IMP_SESSION_LOAD_H
#define IMP_SESSION_LOAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"
#include "select/jaccard.h"
#include "session/channel.h"
#include "session/lease.h"
#include "session/plan.h"
#include "store/history.h"

typedef struct imp_read {
    imp_io_op op;
    bool counted; /* in the figures */
} imp_read;

/* How a layer's tokens are chosen. */
typedef enum imp_how {
    IMP_HOW_ALL,    /* they aren't: every token is loaded */
    IMP_HOW_KNOWN,  /* before its queries are known */
    IMP_HOW_LATER,  /* CHUNKS, not the first layer of a period: told when it is asked for */
    IMP_HOW_KEYS,   /* by exact scores */
    IMP_HOW_PROBE,
    IMP_HOW_SKETCH
} imp_how;

/* A layer in the ring. */
typedef struct imp_slot {
    imp_piece *pieces;  /* [plan.n_pieces] */
    imp_plan_run *runs; /* [plan.n_pieces]: stage A's, then stage B's */
    imp_read *reads;    /* the same */
    uint32_t n_runs;
    size_t ring_at, ring_bytes;
    imp_how how;
    uint32_t *known;    /* STATIC, RANDOM: what it gets, [k]; else NULL */
    double mass;        /* of that */
} imp_slot;

struct imp_load {
    imp_lease *lease;
    imp_store *store;
    imp_session *session;
    imp_channel *channel;
    imp_tier *tier;
    imp_host *host; /* the tier's; NULL: none, or passed by */
    imp_load_opts opts;
    imp_type type_k, type_v;
    uint32_t n_layers;
    const imp_layer_shape *layers; /* the first segment's */
    imp_plan plan;
    size_t k;
    int dead; /* what it failed with */
    imp_read_costs costs; /* as they were when it began */
    size_t max_gap;       /* bytes that are read along rather than one more read is made */

    imp_how *how;              /* [n_layers]: how it can be, going by what segments hold */
    imp_ropes_entry **ropes;   /* [n_layers], with sketches; NULL: the layer's keys aren't turned, or there are none */
    imp_history **histories;   /* [plan.n_spans]; NULL: not needed */
    bool reads_history;

    /* the ring */
    size_t *ahead_bytes;   /* [n_layers]: stage A, if all of it must be read */
    size_t ring_bytes;
    imp_slot *slots;       /* [n_slots]; layer l is in slots[l % n_slots] */
    uint32_t n_slots;
    uint32_t oldest, next; /* layers [oldest, next) have slots */

    /* the layer at work */
    uint32_t at_work;      /* the one that was asked for last; n_layers: none yet in this pass */
    size_t stage_b_bytes;  /* of it, behind the ring */
    bool has_selected;     /* and its rows may be gathered */
    uint32_t next_select;  /* layers below it had their turn */
    const uint32_t *chosen; /* of it: [k], rising */
    uint32_t *chosen_at;   /* [n_tokens]: number in the selection; IMP_PLAN_NONE: not chosen */
    uint32_t *own;         /* [k]: where choices are made */
    double mass;           /* of the choice */
    uint32_t period;       /* CHUNKS: number of the period whose choice `own` is; UINT32_MAX: of none */
    unsigned char *guess;  /* [n_units]: units that the last choice took; NULL: not asked for */
    bool has_guess;

    /* units of a layer's tokens, as they are asked for */
    uint32_t units_layer;  /* whose these are; n_layers: nobody's yet */
    uint32_t *unit_of, *tokens_in;

    /* to choose; only those that the way of choosing needs */
    float *scores, *scratch; /* [n_tokens], [2 * n_tokens] */
    float *past;             /* [n_tokens]: history, then blended with it */
    imp_key_run *key_runs;   /* [n_tokens] */
    imp_sketch_run *sketch_runs; /* [plan.n_spans] */
    uint32_t *sets;          /* [n_probe][k] */
    imp_index_set *index_sets; /* [n_probe] */
    uint32_t n_probe;
    uint32_t *votes;         /* [n_tokens], and [2 * n_units] */
    double *unit_sums;       /* [n_units] */
    uint32_t *unit_bytes;    /* [n_units] */
    unsigned char *unit_flags; /* [2 * n_units]: resident, read */
    unsigned char *token_flags; /* [n_tokens] */
    bool widened;            /* channel->wide holds keys of the layer at work in the engine's type, all or those in flagged units */

    bool has_scores;   /* `scores` are of this layer, or of the period's first: for the tiers */

    imp_load_stats stats;
    double mass_sum;
    double mass_foreseen; /* with opts.mass, of the count; 0: nothing was known */
    uint32_t n_gathered; /* layers, in all passes */
    uint64_t begun_ns;
};

static inline size_t imp_load_key_bytes(const imp_load *load, uint32_t layer)
{
    return imp_type_bytes(load->type_k, (size_t)load->layers[layer].n_kv_heads * load->layers[layer].head_dim_k);
}

static inline size_t imp_load_value_bytes(const imp_load *load, uint32_t layer)
{
    return imp_type_bytes(load->type_v, (size_t)load->layers[layer].n_kv_heads * load->layers[layer].head_dim_v);
}

/* The unit of each token in `layer`, and how many each holds; valid until another layer is asked for. */
void imp_load_units(imp_load *load, uint32_t layer);
/* load->unit_flags: 1 for those that hold any of chosen[k]. */
void imp_load_flag_units(imp_load *load, uint32_t layer, const uint32_t *chosen);

/* Options with the defaults in: the store's policy, and what 0 stands for. */
int imp_load_opts_fix(const imp_load_opts *opts, const imp_store *store, imp_load_opts *out);
/* Can tokens of these layers be chosen as `o` wants? IMP_E_UNSUPPORTED. */
int imp_load_shapes_check(const imp_lease *lease, const imp_load_opts *o);
/* The k of imp_load_count(), of n tokens. */
size_t imp_load_count_of(const imp_load_opts *o, size_t n);

/* ---- stream.c */

/* Sizes of the ring and of stage B, from load->how. Returns the bytes of both together. */
size_t imp_stream_measure(imp_load *load);
static inline imp_slot *imp_stream_slot(const imp_load *load, uint32_t layer)
{
    return &load->slots[layer % load->n_slots];
}
/* Start what fits into the ring. */
void imp_stream_ahead(imp_load *load);
/* Make `layer` the one at work: those before it leave the ring, its own stage A is on its way. */
void imp_stream_enter(imp_load *load, uint32_t layer);
/* It is done with: its buffers go back. */
void imp_stream_leave(imp_load *load);
/* Nothing is in flight or held afterwards, and layer 0 is the next. */
void imp_stream_stop(imp_load *load);
/* Stage B of the layer at work: want all keys; want what holds chosen tokens (their units are flagged in
 * load->unit_flags then); read what is wanted. */
void imp_stream_want_keys(imp_load *load, imp_slot *s, uint32_t layer);
void imp_stream_want_chosen(imp_load *load, imp_slot *s, uint32_t layer, const uint32_t *chosen);
void imp_stream_fetch(imp_load *load, imp_slot *s);
/* Wait for a piece and check it. */
int imp_stream_check(imp_load *load, imp_slot *s, uint32_t layer, const imp_plan_span *span, uint32_t piece);
imp_host_key imp_stream_key(const imp_plan_span *span, uint32_t layer, uint32_t piece);

/* Is a piece there, so that imp_stream_check() won't wait? */
bool imp_stream_is_here(const imp_slot *s, uint32_t piece);

/* ---- batch.c: what is done chunk by chunk, in any order. Chunks that are there are collected and then worked on by
 * all threads; before the load waits for one that isn't, those before it are done. */

enum { IMP_BATCH_CHUNKS = 256 };

typedef struct imp_batch {
    imp_load *load;
    void (*work)(const struct imp_batch *batch, const imp_plan_span *span, uint32_t c); /* by any thread */
    imp_slot *slot;
    uint32_t layer;
    const void *user;
    size_t n;
    struct {
        const imp_plan_span *span;
        uint32_t c;
    } chunks[IMP_BATCH_CHUNKS];
} imp_batch;

/* Wait for a chunk's piece, check it, and have it worked on by the time that imp_batch_end() returns. */
int imp_batch_add(imp_batch *batch, const imp_plan_span *span, uint32_t c, uint32_t piece);
/* Also after a failure. */
void imp_batch_end(imp_batch *batch);

/* ---- estimate.c */

/* Bytes on disk of the keys and values of all layers. */
uint64_t imp_estimate_bytes(const imp_plan *plan, uint32_t n_layers);
/* At the end of a load: what it took, for the estimates to come. */
void imp_estimate_learn(imp_load *load, uint64_t now_ns);

/* ---- keys.c: each waits for what it takes, checks it, and counts what had to be read for it */

/* All keys of a layer, in the order of the prefix, in load->key_runs. */
int imp_keys_all(imp_load *load, imp_slot *s, uint32_t layer, imp_keys *out);
/* Keys of the tokens in flagged units, which were asked for, in the order of the prefix: in load->key_runs, and which
 * tokens these are in tokens[n_tokens]. What is read for them is read to be loaded, and doesn't count as identification.
 * There is at least one. */
int imp_keys_some(imp_load *load, imp_slot *s, uint32_t layer, const unsigned char *units, uint32_t *tokens,
                  size_t *n_tokens, imp_keys *out);
/* Keys of one KV head, from the probe regions. */
int imp_keys_probe(imp_load *load, imp_slot *s, uint32_t layer, uint32_t kv_head, imp_keys *out);
/* Codes in load->sketch_runs. */
int imp_keys_sketch(imp_load *load, imp_slot *s, uint32_t layer);
/* Whether all segments hold keys of the first `n_kv_heads` KV heads in probe regions; whether all have a sketch of the
 * layer that can be used. */
bool imp_keys_have_probe(const imp_load *load, uint32_t n_kv_heads);
bool imp_keys_have_sketch(const imp_load *load, uint32_t layer);

/* ---- identify.c */

/* Fill load->chosen, and start stage B's last reads. */
int imp_identify_layer(imp_load *load, uint32_t layer, const imp_query *query);
/* What can be chosen without a query: STATIC, RANDOM. Returns the mass. */
double imp_identify_known(imp_load *load, uint32_t layer, uint32_t *chosen);

/* ---- record.c */

int imp_record_begin(imp_load *load);
void imp_record_end(imp_load *load);
/* History of a layer's tokens, [n_tokens]; false: there is none. */
bool imp_record_past(const imp_load *load, uint32_t layer, float *past);
/* How a layer's tokens matter, as far as it is known before its queries: the history, else the ranking by the prompt's
 * own, else all alike; false: nothing is known of any. */
bool imp_record_known(const imp_load *load, uint32_t layer, float *scores);
/* A ranking, tokens without one behind all that have one, the older they are the further. */
void imp_record_ranking(const imp_load *load, uint32_t layer, float *scores);
/* Tell the segments of a layer's scores, over the whole prefix; `exact`: of all keys. */
void imp_record_scores(imp_load *load, uint32_t layer, const float *scores, bool exact);

#endif
