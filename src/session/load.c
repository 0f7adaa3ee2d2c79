/* load.c: one load, from the reads that start at once to the rows in the engine's memory.
 *
 * Buffers. The arena of the load's channel has two parts: a ring for stage A (plan.h) and room for one layer's stage B.
 *
 *     |<------------------ ring ------------------>|<--- stage B --->|
 *     |      layer 3 |  layer 4   |  layer 5 |     |  layer 3's V    |
 *            ^ oldest: selected, not yet gathered  ^ wraps: a layer's block is never cut
 *
 * Layers enter the ring in order, as far ahead as it reaches, and leave it in order when they are gathered. The ring
 * holds at least two of the largest layers: the arena grows where `buffer_bytes` is less. A layer is not handled
 * piecemeal, since scores need all its keys at once.
 *
 * Reads are submitted in the order in which they will be waited for. So a layer's values queue behind the keys of the
 * layers ahead that were submitted before; the disk is never idle meanwhile, and those reads had to be done anyway.
 *
 * Invariants
 * L1  No byte leaves a chunk before the chunk's checksum was verified, or the host tier gave it.
 * L2  A slot's buffers are given back only when none of its reads is in flight.
 * L3  Between begin and end nothing is allocated for a layer but copies for the host tier, whose failure is harmless (and
 *     the scorer, once, when the engine's number of heads is first seen).
 */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/clock.h"
#include "base/opts.h"
#include "base/status.h"
#include "format/rows.h"
#include "session/channel.h"
#include "session/lease.h"
#include "session/plan.h"

#define DEFAULT_QUERY_ROWS 32u

/* Sizes of arenas go in steps, so that a conversation's growing prefix doesn't move the buffers every time. */
#define ARENA_LEAST (64u << 10)
#define ARENA_STEP (16u << 20)

/* So much, of bytes and of layers, keeps any disk busy. Memory is touched, and registered, when a first load begins, at
 * some 3 GB/s or far less: for a small model all of `buffer_bytes` would take longer than its reads. */
#define ENOUGH_BYTES ((size_t)8 << 20)
#define ENOUGH_LAYERS 4

typedef struct read {
    imp_io_op op;
    bool counted; /* in the figures */
} read;

/* A layer in the ring. */
typedef struct slot {
    imp_piece *pieces;  /* [plan.n_pieces] */
    imp_plan_run *runs; /* [plan.n_pieces]: stage A's, then stage B's */
    read *reads;        /* the same */
    uint32_t n_runs;
    size_t ring_at, ring_bytes;
} slot;

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

    size_t *stage_a_bytes; /* [n_layers], if all of it must be read */
    size_t ring_bytes;

    slot *slots;           /* [n_slots]; layer l is in slots[l % n_slots] */
    uint32_t n_slots;
    uint32_t oldest, next; /* layers [oldest, next) have slots */
    uint32_t selected;     /* the layer to be gathered, if has_selected */
    bool has_selected;
    uint32_t next_select;  /* layers below it had their turn */

    uint32_t *chosen;      /* [k], rising */
    float *scores, *scratch;  /* [n_tokens]; only to identify */
    imp_key_run *key_runs;    /* one for each chunk */
    unsigned char *wide_keys; /* all keys of a layer in the engine's type, where the disk has Q8 */

    imp_load_stats stats;
    double mass_sum;
    uint64_t n_selects;
};

/* ------------------------------------------------------------------------------------------------------ reads ---- */

/* Note a finished read in the figures, once. */
static void count_read(imp_load *load, read *r)
{
    if (r->counted || !r->op.done || r->op.status < 0) return;
    r->counted = true;
    load->stats.n_reads++;
    load->stats.bytes_read += r->op.n_bytes;
}

/* Submit the runs of a slot from `first_run` on, into the buffer at `to`; returns its end. */
static unsigned char *submit_runs(imp_load *load, slot *s, uint32_t first_run, unsigned char *to)
{
    for (uint32_t i = first_run; i < s->n_runs; i++) {
        const imp_plan_run *run = &s->runs[i];
        s->reads[i] = (read){.op = {.file = run->seg->file, .offset = run->offset, .buf = to, .n_bytes = run->n_bytes}};
        for (uint32_t p = 0; p < run->n_pieces; p++) {
            imp_piece *piece = &s->pieces[run->first_piece + p];
            piece->bytes = to + (piece->place.offset - run->offset);
        }
        imp_io_submit(load->channel->queue, &s->reads[i].op);
        to += run->n_bytes;
    }
    return to;
}

static int await_run(imp_load *load, slot *s, const imp_seg *seg, uint32_t at)
{
    read *r = &s->reads[at];
    if (!r->op.done || r->op.status < 0) {
        uint64_t start = imp_now_ns();
        if (!r->op.done) imp_io_wait(load->channel->queue, &r->op);
        if (r->op.status < 0) { /* once more: some errors pass */
            r->op.done = false;
            r->op.status = 0;
            imp_io_submit(load->channel->queue, &r->op);
            imp_io_wait(load->channel->queue, &r->op);
        }
        load->stats.io_wait_ns += imp_now_ns() - start;
    }
    count_read(load, r);
    if (r->op.status == 0) return 0;

    char line[512];
    snprintf(line, sizeof line, "%s", imp_last_error()); /* src/io says which file, where and why */
    imp_store_set_aside(load->store, seg, line);
    return load->dead = imp_fail(IMP_E_IO, "%s", line);
}

static imp_host_key host_key(const imp_plan_span *span, uint32_t layer, imp_region region, uint32_t chunk)
{
    return (imp_host_key){.segment = span->seg->id, .region = (uint32_t)region, .layer = layer, .chunk = chunk};
}

/* Wait for a piece and check it; `at` counts from the span's first piece. */
static int check_piece(imp_load *load, slot *s, uint32_t layer, const imp_plan_span *span, uint32_t at)
{
    static const char *const names[] = {"keys", "values", "scales"};
    imp_piece *p = &s->pieces[span->first_piece + at];
    if (p->checked) return 0;
    const imp_seg *seg = span->seg;
    int rc = await_run(load, s, seg, p->run);
    if (rc < 0) return rc;

    uint64_t start = imp_now_ns();
    p->checked = imp_seg_checksum(seg->layout, p->place.index, p->bytes, p->place.n_bytes) == seg->sums[p->place.index];
    load->stats.gather_ns += imp_now_ns() - start;
    if (p->checked) return 0;

    uint32_t chunk;
    imp_region region = imp_plan_piece_region(span, at, &chunk);
    char what[128];
    snprintf(what, sizeof what, "chunk %u of layer %u's %s doesn't match its checksum", chunk, layer, names[region]);
    imp_store_drop_bad(load->store, seg, region, layer, chunk, what);
    return load->dead = imp_fail(IMP_E_CORRUPT, "segments/%016llx.seg: %s", (unsigned long long)seg->id, what);
}

/* -------------------------------------------------------------------------------------------------- streaming ---- */

static slot *slot_of(imp_load *load, uint32_t layer) { return &load->slots[layer % load->n_slots]; }

static bool in_stage_a(const imp_load *load, imp_region region)
{
    return load->opts.switches.identify == IMP_IDENTIFY_NONE || region != IMP_REGION_V;
}

/* Room for a block of `n_bytes` behind the newest. */
static bool ring_room(imp_load *load, size_t n_bytes, size_t *at)
{
    const slot *first = NULL, *last = NULL; /* that hold bytes */
    for (uint32_t l = load->oldest; l < load->next; l++) {
        const slot *s = slot_of(load, l);
        if (!s->ring_bytes) continue;
        if (!first) first = s;
        last = s;
    }
    *at = 0;
    if (!first) return n_bytes <= load->ring_bytes;
    size_t head = last->ring_at + last->ring_bytes;
    if (last->ring_at < first->ring_at) { /* wrapped: up to the oldest */
        *at = head;
        return n_bytes <= first->ring_at - head;
    }
    if (n_bytes <= load->ring_bytes - head) {
        *at = head;
        return true;
    }
    return n_bytes <= first->ring_at;
}

/* Take a piece from the host tier, or want it read. */
static void get_piece(imp_load *load, slot *s, uint32_t layer, const imp_plan_span *span, uint32_t at)
{
    imp_piece *p = &s->pieces[span->first_piece + at];
    uint32_t chunk;
    imp_region region = imp_plan_piece_region(span, at, &chunk);
    if (load->host) {
        size_t n_bytes;
        imp_host_key key = host_key(span, layer, region, chunk);
        p->held = imp_host_get(load->host, &key, &n_bytes);
    }
    if (p->held) {
        p->bytes = imp_host_entry_bytes(p->held);
        p->checked = true;
        load->stats.host_hit_bytes += p->place.n_bytes;
    } else {
        p->wanted = true;
    }
}

static uint32_t span_pieces(const imp_plan_span *span) { return span->n_scales + 2 * span->n_chunks; }

/* Start stage A of layer load->next, if there is a slot and room for it. */
static bool stream_layer(imp_load *load)
{
    uint32_t layer = load->next;
    size_t at;
    if (layer - load->oldest == load->n_slots || !ring_room(load, load->stage_a_bytes[layer], &at)) return false;

    slot *s = slot_of(load, layer);
    imp_plan_places(&load->plan, layer, s->pieces);
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        for (uint32_t p = 0; p < span_pieces(span); p++) {
            uint32_t chunk;
            if (in_stage_a(load, imp_plan_piece_region(span, p, &chunk))) get_piece(load, s, layer, span, p);
        }
    }
    s->n_runs = (uint32_t)imp_plan_runs(&load->plan, s->pieces, IMP_RUN_BYTES, 0, s->runs);
    unsigned char *start = load->channel->arena + at;
    s->ring_at = at;
    s->ring_bytes = (size_t)(submit_runs(load, s, 0, start) - start);
    load->next++;
    return true;
}

static void stream_ahead(imp_load *load)
{
    if (load->opts.switches.prefetch == IMP_PREFETCH_LAYERS)
        while (load->next < load->n_layers && stream_layer(load)) {}
    imp_io_kick(load->channel->queue);
}

/* The oldest layer's buffers go back. */
static void release_oldest(imp_load *load)
{
    slot *s = slot_of(load, load->oldest);
    for (uint32_t i = 0; i < s->n_runs; i++) {
        read *r = &s->reads[i];
        if (!r->op.done) imp_io_wait(load->channel->queue, &r->op);
        count_read(load, r);
    }
    for (size_t i = 0; i < load->plan.n_pieces; i++) {
        if (s->pieces[i].held) imp_host_release(load->host, s->pieces[i].held);
    }
    load->oldest++;
}

/* End the pass: nothing is in flight or held afterwards, and layer 0 is the next. */
static void end_pass(imp_load *load)
{
    imp_io_cancel_all(load->channel->queue);
    while (load->oldest < load->next) release_oldest(load);
    load->oldest = load->next = load->next_select = 0;
    load->has_selected = false;
}

/* ------------------------------------------------------------------------------------------------ begin, end ---- */

/* As it was first released; what is added comes behind. */
static const size_t least_opts_bytes = offsetof(imp_load_opts, max_query_rows) + sizeof(uint32_t);

static imp_load_opts default_opts(void)
{
    imp_load_opts o = {.struct_bytes = sizeof o, .retention = 1.0};
    imp_system_preset("as", &o.switches);
    return o;
}

void imp_load_opts_fill(imp_load_opts *opts, size_t struct_bytes)
{
    const imp_load_opts defaults = default_opts();
    imp_opts_give(opts, struct_bytes, &defaults, sizeof defaults);
}

static int check_opts(imp_load_opts *o)
{
    const imp_switches *s = &o->switches;
    if (!(o->retention > 0 && o->retention <= 1))
        return imp_fail(IMP_E_ARG, "retention %g is not in (0, 1]", o->retention);
    switch (s->identify) {
    case IMP_IDENTIFY_NONE:
    case IMP_IDENTIFY_ALL_KEYS: break;
    case IMP_IDENTIFY_PROBE:
    case IMP_IDENTIFY_STATIC:
    case IMP_IDENTIFY_CHUNKS:
    case IMP_IDENTIFY_SKETCH:
        return imp_fail(IMP_E_UNSUPPORTED, "identification %d is not in this version; none and all keys are",
                        (int)s->identify);
    default: return imp_fail(IMP_E_ARG, "unknown identification %d", (int)s->identify);
    }
    if (s->prefetch != IMP_PREFETCH_NONE && s->prefetch != IMP_PREFETCH_LAYERS)
        return imp_fail(IMP_E_ARG, "unknown prefetch %d", (int)s->prefetch);
    if ((unsigned)s->cache > IMP_CACHE_SCORE) return imp_fail(IMP_E_ARG, "unknown cache policy %d", (int)s->cache);
    if (!o->max_query_rows) o->max_query_rows = DEFAULT_QUERY_ROWS;
    return 0;
}

/* The k of imp_load_count(). The product's rounding error must not ask for one token more. */
static size_t count_of(const imp_load_opts *o, size_t n)
{
    if (o->switches.identify == IMP_IDENTIFY_NONE) return n;
    double k = ceil(o->retention * (double)n * (1 - 1e-12));
    return k < 1 ? 1 : k > (double)n ? n : (size_t)k;
}

static size_t key_bytes(const imp_load *load, uint32_t layer)
{
    return imp_type_bytes(load->type_k, (size_t)load->layers[layer].n_kv_heads * load->layers[layer].head_dim_k);
}

static size_t value_bytes(const imp_load *load, uint32_t layer)
{
    return imp_type_bytes(load->type_v, (size_t)load->layers[layer].n_kv_heads * load->layers[layer].head_dim_v);
}

static size_t arena_step(size_t n_bytes)
{
    size_t step = ARENA_LEAST;
    while (step < n_bytes && step < ARENA_STEP) step *= 2;
    return imp_round_up(n_bytes, step);
}

/* Sizes: stage A of each layer, the ring, room for stage B, and how many layers can be in the ring. */
static size_t measure(imp_load *load)
{
    bool none = load->opts.switches.identify == IMP_IDENTIFY_NONE;
    size_t sum = 0, largest = 0, smallest = SIZE_MAX, stage_b = 0;
    for (uint32_t l = 0; l < load->n_layers; l++) {
        size_t all, values;
        imp_plan_layer_bytes(&load->plan, l, &all, &values);
        size_t a = load->stage_a_bytes[l] = none ? all : all - values;
        if (!none && values > stage_b) stage_b = values;
        if (a > largest) largest = a;
        if (a < smallest) smallest = a;
        sum += a;
    }
    bool ahead = load->opts.switches.prefetch == IMP_PREFETCH_LAYERS;
    uint64_t buffers = imp_store_options(load->store)->buffer_bytes;
    if (buffers > ENOUGH_BYTES && buffers > ENOUGH_LAYERS * largest)
        buffers = ENOUGH_BYTES > ENOUGH_LAYERS * largest ? ENOUGH_BYTES : ENOUGH_LAYERS * largest;
    size_t ring = ahead && buffers > stage_b ? (size_t)(buffers - stage_b) : 0;
    if (ring > sum) ring = sum;
    size_t least = ahead && load->n_layers > 1 ? 2 * largest : largest;
    if (ring < least) ring = least;
    load->ring_bytes = ring;
    size_t n = ahead ? ring / smallest : 1;
    load->n_slots = n > load->n_layers ? load->n_layers : (uint32_t)n;
    return ring + stage_b;
}

static int take_memory(imp_load *load)
{
    size_t n = load->plan.n_tokens, n_pieces = load->plan.n_pieces;
    load->slots = imp_calloc(load->n_slots, sizeof *load->slots);
    load->chosen = imp_realloc_array(NULL, load->k, sizeof *load->chosen);
    bool ok = load->slots && load->chosen;
    for (uint32_t i = 0; ok && i < load->n_slots; i++) {
        slot *s = &load->slots[i];
        s->pieces = imp_realloc_array(NULL, n_pieces, sizeof *s->pieces);
        s->runs = imp_realloc_array(NULL, n_pieces, sizeof *s->runs);
        s->reads = imp_realloc_array(NULL, n_pieces, sizeof *s->reads);
        ok = s->pieces && s->runs && s->reads;
    }
    if (ok && load->opts.switches.identify == IMP_IDENTIFY_NONE) {
        for (size_t i = 0; i < n; i++) load->chosen[i] = (uint32_t)i;
    } else if (ok) {
        size_t widest = 0;
        bool widen = false;
        for (uint32_t l = 0; l < load->n_layers; l++) widest = key_bytes(load, l) > widest ? key_bytes(load, l) : widest;
        for (size_t i = 0; i < load->plan.n_spans; i++) widen |= load->plan.spans[i].n_scales != 0;
        load->scores = imp_realloc_array(NULL, n, sizeof *load->scores);
        load->scratch = imp_realloc_array(NULL, n, sizeof *load->scratch);
        load->key_runs = imp_realloc_array(NULL, n_pieces, sizeof *load->key_runs);
        if (widen) load->wide_keys = imp_realloc_array(NULL, n, widest);
        ok = load->scores && load->scratch && load->key_runs && (load->wide_keys || !widen);
    }
    return ok ? 0 : imp_fail(IMP_E_NOMEM, "no memory to load %zu tokens", n);
}

static void load_free(imp_load *load)
{
    for (uint32_t i = 0; load->slots && i < load->n_slots; i++) {
        imp_free(load->slots[i].pieces);
        imp_free(load->slots[i].runs);
        imp_free(load->slots[i].reads);
    }
    imp_free(load->slots);
    imp_free(load->stage_a_bytes);
    imp_free(load->chosen);
    imp_free(load->scores);
    imp_free(load->scratch);
    imp_free(load->key_runs);
    imp_free(load->wide_keys);
    imp_plan_clear(&load->plan);
    if (load->tier) imp_tier_give(load->session, load->tier);
    if (load->channel) imp_channel_give(load->session, load->channel);
    imp_free(load);
}

int imp_load_begin(imp_lease *lease, const imp_load_opts *opts, imp_load **out)
{
    if (out) *out = NULL;
    if (!lease || !out) return imp_fail(IMP_E_ARG, "imp_load_begin: lease or result missing");
    imp_kept_line kept;
    imp_error_keep(&kept);
    imp_load_opts o = default_opts();
    o.switches.cache = imp_store_options(lease->store)->cache;
    int rc = opts ? imp_opts_take(&o, sizeof o, least_opts_bytes, opts, "imp_load_opts") : 0;
    if (rc == 0) rc = check_opts(&o);
    if (rc < 0) return rc;

    imp_load *load = imp_calloc(1, sizeof *load);
    if (!load) return imp_fail(IMP_E_NOMEM, "no memory for a load");
    const imp_seg_meta *meta = imp_seg_layout_meta(lease->path.spans[0].seg->layout);
    load->lease = lease;
    load->store = lease->store;
    load->opts = o;
    load->type_k = meta->type_k;
    load->type_v = meta->type_v;
    load->n_layers = meta->n_layers;
    load->layers = meta->layers;
    load->k = count_of(&o, lease->n_tokens);

    rc = imp_session_of(load->store, &load->session);
    if (rc < 0) goto fail;
    rc = imp_tier_take(load->session, o.switches.cache, &load->tier);
    if (rc < 0) goto fail;
    if (load->tier) load->host = load->tier->host;
    rc = imp_plan_new(lease->path.spans, lease->path.n_spans, lease->n_tokens, &load->plan);
    if (rc < 0) goto fail;
    load->stage_a_bytes = imp_calloc(load->n_layers, sizeof *load->stage_a_bytes);
    if (!load->stage_a_bytes) {
        rc = imp_fail(IMP_E_NOMEM, "no memory for a load");
        goto fail;
    }
    size_t arena_bytes = arena_step(measure(load));
    rc = take_memory(load);
    if (rc < 0) goto fail;
    rc = imp_channel_take(load->session, arena_bytes, &load->channel);
    if (rc < 0) goto fail;

    atomic_fetch_add(&lease->n_users, 1);
    load->stats.bytes_read = atomic_exchange(&lease->header_bytes, 0);
    stream_ahead(load);
    *out = load;
    return imp_error_back(&kept, 0);
fail:
    load_free(load);
    return rc;
}

size_t imp_load_count(const imp_load *load) { return load ? load->k : 0; }

int imp_load_rewind(imp_load *load)
{
    if (!load) return imp_fail(IMP_E_ARG, "imp_load_rewind: no load");
    if (load->dead) return imp_fail(load->dead, "the load failed before");
    imp_kept_line kept;
    imp_error_keep(&kept);
    end_pass(load);
    stream_ahead(load);
    return imp_error_back(&kept, 0);
}

void imp_load_get_stats(const imp_load *load, imp_load_stats *out)
{
    if (!out) return;
    *out = load ? load->stats : (imp_load_stats){0};
    out->mass = load && load->n_selects ? load->mass_sum / (double)load->n_selects : 1;
}

void imp_load_end(imp_load *load, imp_load_stats *stats)
{
    if (!load) {
        imp_load_get_stats(NULL, stats);
        return;
    }
    imp_kept_line kept;
    imp_error_keep(&kept);
    end_pass(load);
    (void)imp_error_back(&kept, 0);
    imp_load_get_stats(load, stats);
    if (load->host) {
        imp_store_count_tier_hits(load->store, load->stats.host_hit_bytes, load->stats.device_hit_bytes);
        imp_store_set_tier_bytes(load->store, imp_host_used_bytes(load->host), 0);
    }
    imp_lease *lease = load->lease;
    load_free(load);
    imp_lease_drop(lease); /* the plan refers to its segments until here */
}

/* ----------------------------------------------------------------------------------------------------- select ---- */

/* Make `layer` the one at work: those before it leave the ring, its own stage A is on its way. */
static void enter_layer(imp_load *load, uint32_t layer)
{
    while (load->oldest < layer && load->oldest < load->next) release_oldest(load);
    if (load->next <= layer) {
        load->oldest = load->next = layer;
        stream_layer(load); /* the ring is empty and holds any layer */
    }
    stream_ahead(load);
}

/* Wait for the keys of a layer and list them as the scorer wants them. */
static int collect_keys(imp_load *load, slot *s, uint32_t layer, size_t *n_runs)
{
    size_t row = key_bytes(load, layer), n = 0;
    size_t elements = (size_t)load->layers[layer].n_kv_heads * load->layers[layer].head_dim_k;
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        for (uint32_t at = 0; at < span->n_scales + span->n_chunks; at++) {
            int rc = check_piece(load, s, layer, span, at);
            if (rc < 0) return rc;
        }
        for (uint32_t c = 0; c < span->n_chunks; c++) {
            imp_plan_rows rows = imp_plan_chunk_rows(span, c);
            const unsigned char *bytes = s->pieces[span->first_piece + span->n_scales + c].bytes;
            if (span->n_scales == 0) {
                load->key_runs[n++] = (imp_key_run){bytes + rows.skip * row, rows.n_tokens};
                continue;
            }
            uint64_t start = imp_now_ns();
            const uint16_t *scales = (const uint16_t *)(const void *)s->pieces[span->first_piece].bytes;
            unsigned char *to = load->wide_keys + rows.prefix_first * row;
            uint32_t token = (span->first_chunk + c) * imp_seg_layout_meta(span->seg->layout)->chunk_tokens + rows.skip;
            load->key_runs[n++] = (imp_key_run){to, rows.n_tokens};
            for (uint32_t t = 0; t < rows.n_tokens; t++, token++, to += row)
                imp_rows_k8_decode(load->type_k, (const int8_t *)bytes + (rows.skip + t) * elements,
                                   scales + token / IMP_GROUP_TOKENS * elements, elements, to);
            load->stats.gather_ns += imp_now_ns() - start;
        }
    }
    *n_runs = n;
    return 0;
}

/* Read the values that are wanted: chunks with a chosen token. */
static void start_stage_b(imp_load *load, slot *s, uint32_t layer)
{
    size_t next = 0; /* in chosen */
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        uint32_t first = span->n_scales + span->n_chunks;
        for (uint32_t at = 0; at < first; at++) s->pieces[span->first_piece + at].wanted = false; /* stage A has them */
        for (uint32_t c = 0; c < span->n_chunks; c++) {
            imp_plan_rows rows = imp_plan_chunk_rows(span, c);
            size_t before = next;
            while (next < load->k && load->chosen[next] < rows.prefix_first + rows.n_tokens) next++;
            if (next > before) get_piece(load, s, layer, span, first + c);
        }
    }
    uint32_t first_run = s->n_runs;
    s->n_runs += (uint32_t)imp_plan_runs(&load->plan, s->pieces, IMP_RUN_BYTES, first_run, s->runs + first_run);
    submit_runs(load, s, first_run, load->channel->arena + load->ring_bytes);
    imp_io_kick(load->channel->queue);
}

static int identify(imp_load *load, uint32_t layer, const imp_query *query)
{
    const imp_layer_shape *shape = &load->layers[layer];
    slot *s = slot_of(load, layer);
    size_t n = load->plan.n_tokens;
    imp_keys keys = {.type = load->type_k, .n_kv_heads = shape->n_kv_heads, .head_dim = shape->head_dim_k,
                     .runs = load->key_runs, .n_tokens = n};

    /* Before anything is awaited, so that a failure leaves the layer as it was. */
    int rc = imp_channel_scorer(load->channel, n, load->opts.max_query_rows, query->n_heads, shape->head_dim_k);
    if (rc < 0) return rc;
    rc = collect_keys(load, s, layer, &keys.n_runs);
    if (rc < 0) return rc;

    uint64_t start = imp_now_ns();
    rc = imp_score_h2o(load->channel->scorer, query, load->opts.max_query_rows, &keys, load->scores, NULL);
    if (rc < 0) return rc;
    double mass;
    imp_top_k(load->scores, n, load->k, load->opts.n_keep_first, load->opts.n_keep_last, load->chosen, &mass,
              load->scratch);
    load->mass_sum += mass;
    load->n_selects++;
    load->stats.identify_ns += imp_now_ns() - start;
    for (uint32_t i = 0; i < s->n_runs; i++) load->stats.identify_bytes += s->runs[i].n_bytes;
    start_stage_b(load, s, layer);
    return 0;
}

static int check_query(const imp_query *q, uint32_t layer, const imp_layer_shape *shape)
{
    if (!q || !q->q || !q->n_rows)
        return imp_fail(IMP_E_ARG, "imp_load_select: layer %u needs queries to choose by, and there are none", layer);
    if (!q->n_heads || q->n_heads % shape->n_kv_heads)
        return imp_fail(IMP_E_ARG, "imp_load_select: layer %u needs queries of a multiple of %u heads, not %u", layer,
                        shape->n_kv_heads, q->n_heads);
    if (!(q->scale > 0) || !isfinite(q->scale) || !(q->softcap >= 0) || !isfinite(q->softcap))
        return imp_fail(IMP_E_ARG, "imp_load_select: scale %g and soft cap %g, must be finite, above 0 and not below 0",
                        (double)q->scale, (double)q->softcap);
    return 0;
}

int imp_load_select(imp_load *load, uint32_t layer, const imp_query *query, const uint32_t **positions)
{
    if (!load) return imp_fail(IMP_E_ARG, "imp_load_select: no load");
    if (load->dead) return imp_fail(load->dead, "the load failed before");
    if (layer >= load->n_layers || layer < load->next_select)
        return imp_fail(IMP_E_ARG, "imp_load_select: layer %u; there are %u, and those below %u had their turn", layer,
                        load->n_layers, load->next_select);
    bool none = load->opts.switches.identify == IMP_IDENTIFY_NONE;
    int rc = none ? 0 : check_query(query, layer, &load->layers[layer]);
    if (rc < 0) return rc;
    imp_kept_line kept;
    imp_error_keep(&kept);
    load->has_selected = false;
    enter_layer(load, layer);
    if (!none) rc = identify(load, layer, query);
    if (rc < 0) return rc;
    load->has_selected = true;
    load->selected = layer;
    load->next_select = layer + 1;
    if (positions) *positions = load->chosen;
    return imp_error_back(&kept, 0);
}

/* ----------------------------------------------------------------------------------------------------- gather ---- */

/* One region of one layer on its way into the engine's memory. */
typedef struct target {
    unsigned char *rows;
    size_t stride;
    const uint32_t *cells;
    size_t row_bytes; /* in the engine */
    size_t elements;
} target;

static unsigned char *target_row(const target *t, size_t i) { return t->rows + (t->cells ? t->cells[i] : i) * t->stride; }

/* Rows [first, end) of the selection, which lie one after another at `from`, spaced as the chosen tokens are; `origin` is
 * the token at `from`. Neighbours that stay neighbours are copied as one. */
static void copy_rows(const imp_load *load, const target *t, size_t first, size_t end, const unsigned char *from,
                      size_t origin)
{
    for (size_t i = first, next; i < end; i = next) {
        unsigned char *to = target_row(t, i);
        for (next = i + 1; next < end && load->chosen[next] == load->chosen[next - 1] + 1 &&
                           target_row(t, next) == to + (next - i) * t->row_bytes;
             next++) {}
        memcpy(to, from + (load->chosen[i] - origin) * t->row_bytes, (next - i) * t->row_bytes);
    }
}

/* Copy the chosen rows [first, end) of chunk `c` of a span. */
static void gather_chunk(const imp_load *load, const slot *s, const imp_plan_span *span, imp_region region, uint32_t c,
                         const target *t, size_t first, size_t end)
{
    imp_plan_rows rows = imp_plan_chunk_rows(span, c);
    uint32_t at = span->n_scales + (region == IMP_REGION_V ? span->n_chunks : 0) + c;
    const unsigned char *bytes = s->pieces[span->first_piece + at].bytes;
    if (span->n_scales == 0) {
        copy_rows(load, t, first, end, bytes + rows.skip * t->row_bytes, rows.prefix_first);
    } else if (region == IMP_REGION_K && load->wide_keys) {
        copy_rows(load, t, first, end, load->wide_keys, 0); /* widened to be scored */
    } else if (region == IMP_REGION_K) {
        const uint16_t *scales = (const uint16_t *)(const void *)s->pieces[span->first_piece].bytes;
        uint32_t chunk_first = (span->first_chunk + c) * imp_seg_layout_meta(span->seg->layout)->chunk_tokens;
        for (size_t i = first; i < end; i++) {
            uint32_t row = rows.skip + (load->chosen[i] - rows.prefix_first);
            uint32_t group = (chunk_first + row) / IMP_GROUP_TOKENS;
            imp_rows_k8_decode(load->type_k, (const int8_t *)bytes + row * t->elements, scales + group * t->elements,
                               t->elements, target_row(t, i));
        }
    } else {
        size_t row_bytes = imp_rows_v8_bytes(t->elements);
        for (size_t i = first; i < end; i++) {
            uint32_t row = rows.skip + (load->chosen[i] - rows.prefix_first);
            imp_rows_v8_decode(load->type_v, bytes + row * row_bytes, t->elements, target_row(t, i));
        }
    }
}

/* One region of a span: wait, check, copy, chunk by chunk. `*next` is the first chosen token that isn't before the span,
 * and becomes the first behind it. */
static int gather_region(imp_load *load, slot *s, uint32_t layer, const imp_plan_span *span, imp_region region,
                         const target *t, size_t *next)
{
    for (uint32_t c = 0; c < span->n_chunks; c++) {
        imp_plan_rows rows = imp_plan_chunk_rows(span, c);
        size_t first = *next, end = first;
        while (end < load->k && load->chosen[end] < rows.prefix_first + rows.n_tokens) end++;
        *next = end;
        if (first == end) continue;
        int rc = check_piece(load, s, layer, span, span->n_scales + (region == IMP_REGION_V ? span->n_chunks : 0) + c);
        if (rc < 0) return rc;
        uint64_t start = imp_now_ns();
        gather_chunk(load, s, span, region, c, t, first, end);
        load->stats.gather_ns += imp_now_ns() - start;
    }
    return 0;
}

/* Tell the host tier what was used, and how much of each chunk mattered, and offer it what came from disk. */
static void feed_host(imp_load *load, const slot *s, uint32_t layer)
{
    uint64_t start = imp_now_ns();
    size_t next = 0;
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        size_t span_first = next;
        for (uint32_t at = 0; at < span_pieces(span); at++) {
            const imp_piece *p = &s->pieces[span->first_piece + at];
            uint32_t chunk;
            imp_region region = imp_plan_piece_region(span, at, &chunk);
            float share = 1; /* scales serve every row */
            if (region != IMP_REGION_SCALES) {
                imp_plan_rows rows = imp_plan_chunk_rows(span, chunk - span->first_chunk);
                if (chunk == span->first_chunk) next = span_first;
                size_t before = next;
                while (next < load->k && load->chosen[next] < rows.prefix_first + rows.n_tokens) next++;
                share = (float)(next - before) / (float)rows.n_tokens;
            }
            if (!p->checked) continue;
            imp_host_key key = host_key(span, layer, region, chunk);
            imp_host_use(load->host, &key, share);
            if (!p->held) imp_host_put(load->host, &key, p->bytes, p->place.data_bytes);
        }
    }
    load->stats.gather_ns += imp_now_ns() - start;
}

int imp_load_gather(imp_load *load, uint32_t layer, const imp_dst *dst)
{
    if (!load) return imp_fail(IMP_E_ARG, "imp_load_gather: no load");
    if (load->dead) return imp_fail(load->dead, "the load failed before");
    if (!load->has_selected || load->selected != layer)
        return imp_fail(IMP_E_ARG, "imp_load_gather: layer %u was not the last one selected, or is gathered", layer);
    const imp_layer_shape *shape = &load->layers[layer];
    size_t k_row = key_bytes(load, layer), v_row = value_bytes(load, layer);
    if (!dst || !dst->k || !dst->v || (load->k > 1 && (dst->k_stride < k_row || dst->v_stride < v_row)))
        return imp_fail(IMP_E_ARG, "imp_load_gather: layer %u needs memory for rows of %zu and %zu bytes", layer, k_row,
                        v_row);

    imp_kept_line kept;
    imp_error_keep(&kept);
    target k = {dst->k, dst->k_stride, dst->cells, k_row, (size_t)shape->n_kv_heads * shape->head_dim_k};
    target v = {dst->v, dst->v_stride, dst->cells, v_row, (size_t)shape->n_kv_heads * shape->head_dim_v};
    slot *s = slot_of(load, layer);
    size_t next = 0;
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        size_t next_k = next;
        int rc = span->n_scales ? check_piece(load, s, layer, span, 0) : 0;
        if (rc == 0) rc = gather_region(load, s, layer, span, IMP_REGION_K, &k, &next_k);
        if (rc == 0) rc = gather_region(load, s, layer, span, IMP_REGION_V, &v, &next);
        if (rc < 0) return rc;
    }
    if (load->host) feed_host(load, s, layer);
    load->has_selected = false;
    release_oldest(load);
    stream_ahead(load);
    return imp_error_back(&kept, 0);
}
