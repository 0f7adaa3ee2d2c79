/* stream.c: the ring of layers that are read ahead, and every read.
 *
 * Buffers. The arena of the load's channel has two parts: a ring for stage A (load.h) and room for one layer's stage B.
 *
 *     |<------------------ ring ------------------>|<--- stage B --->|
 *     |      layer 3 |  layer 4   |  layer 5 |     |  layer 3's V    |
 *            ^ oldest: at work                     ^ wraps: a layer's block is never cut
 *
 * Layers enter the ring in order, as far ahead as it reaches, and leave it in order when they are gathered. The ring
 * holds at least two of the largest blocks: the arena grows where `buffer_bytes` is less. A layer is not handled
 * piecemeal, since scores need all its keys at once.
 *
 * Reads are submitted in the order in which they will be waited for. So a layer's stage B queues behind stage A of the
 * layers ahead that was submitted before; the disk is never idle meanwhile, and those reads had to be done anyway.
 */
#include <stdio.h>

#include "base/clock.h"
#include "base/status.h"
#include "session/load.h"

/* So much, of bytes and of layers, keeps any disk busy. Memory is touched, and registered, when a first load begins, at
 * some 3 GB/s or far less: for a small model all of `buffer_bytes` would take longer than its reads. */
#define ENOUGH_BYTES ((size_t)8 << 20)
#define ENOUGH_LAYERS 4

/* ------------------------------------------------------------------------------------------------------ reads ---- */

/* Note a finished read in the figures, once. */
static void count_read(imp_load *load, imp_read *r)
{
    if (r->counted || !r->op.done || r->op.status < 0) return;
    r->counted = true;
    load->stats.n_reads++;
    load->stats.bytes_read += r->op.n_bytes;
}

/* Make runs of what is wanted, and submit them into the buffer at `to`. Returns their bytes. With `gaps` there is room for
 * all keys and values that weren't asked for yet. */
static size_t submit(imp_load *load, imp_slot *s, unsigned char *to, bool gaps)
{
    unsigned char *start = to;
    uint32_t first_run = s->n_runs;
    s->n_runs += (uint32_t)imp_plan_runs(&load->plan, s->pieces, IMP_RUN_BYTES, gaps ? load->max_gap : 0, first_run,
                                       s->runs + first_run);
    for (uint32_t i = first_run; i < s->n_runs; i++) {
        const imp_plan_run *run = &s->runs[i];
        s->reads[i] =
            (imp_read){.op = {.file = run->seg->file, .offset = run->offset, .buf = to, .n_bytes = run->n_bytes}};
        for (uint32_t p = 0; p < run->n_pieces; p++) {
            imp_piece *piece = &s->pieces[run->first_piece + p];
            piece->bytes = to + (piece->place.offset - run->offset);
        }
        imp_io_submit(load->channel->queue, &s->reads[i].op);
        to += run->n_bytes;
    }
    return (size_t)(to - start);
}

static int await_run(imp_load *load, imp_slot *s, const imp_seg *seg, uint32_t at)
{
    imp_read *r = &s->reads[at];
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
    if (imp_io_queue_hung(load->channel->queue)) imp_store_read_late(load->store, line);
    else imp_store_set_aside(load->store, seg, line);
    return load->dead = imp_fail(IMP_E_IO, "%s", line);
}

bool imp_stream_is_here(const imp_slot *s, uint32_t piece)
{
    const imp_piece *p = &s->pieces[piece];
    return p->checked || s->reads[p->run].op.done;
}

imp_host_key imp_stream_key(const imp_plan_span *span, uint32_t layer, uint32_t piece)
{
    uint32_t chunk;
    imp_region region = imp_plan_region(span, piece, &chunk);
    return (imp_host_key){.segment = span->seg->id, .region = (uint32_t)region, .layer = layer, .chunk = chunk};
}

int imp_stream_check(imp_load *load, imp_slot *s, uint32_t layer, const imp_plan_span *span, uint32_t piece)
{
    static const char *const names[] = {
        [IMP_REGION_K] = "keys",           [IMP_REGION_V] = "values",         [IMP_REGION_SCALES] = "scales",
        [IMP_REGION_KV] = "keys and values", [IMP_REGION_PROBE] = "probe keys", [IMP_REGION_SKETCH] = "sketches",
        [IMP_REGION_MAP] = "map",
    };
    imp_piece *p = &s->pieces[piece];
    if (p->checked) return 0;
    const imp_seg *seg = span->seg;
    int rc = await_run(load, s, seg, p->run);
    if (rc < 0) return rc;

    uint64_t start = imp_now_ns();
    unsigned char *own = (unsigned char *)(uintptr_t)p->bytes; /* what was read lies in our arena */
    rc = imp_seg_chunk_open(seg->layout, seg->cipher, p->place.index, own, p->place.n_bytes, seg->sums);
    p->checked = rc == 0;
    load->stats.gather_ns += imp_now_ns() - start;
    if (p->checked) return 0;
    if (rc != IMP_E_CORRUPT) return load->dead = rc;

    uint32_t chunk;
    imp_region region = imp_plan_region(span, piece, &chunk);
    char what[128];
    snprintf(what, sizeof what, "chunk %u of layer %u's %s doesn't match its checksum", chunk, layer, names[region]);
    imp_store_drop_bad(load->store, seg, region, layer, chunk, what);
    return load->dead = imp_fail(IMP_E_CORRUPT, "segments/%016llx.seg: %s", (unsigned long long)seg->id, what);
}

/* ------------------------------------------------------------------------------------------------------- wants ---- */

/* Take a piece from a tier, or from a store in memory, or want it read. */
static void want(imp_load *load, imp_slot *s, uint32_t layer, const imp_plan_span *span, uint32_t piece)
{
    imp_piece *p = &s->pieces[piece];
    if (p->asked) return;
    p->asked = true;
    if (load->host) {
        size_t n_bytes;
        imp_host_key key = imp_stream_key(span, layer, piece);
        p->held = imp_host_get(load->host, &key, &n_bytes);
    }
    if (!p->held && p->spare != IMP_PLAN_NONE) { /* `bytes` is where it comes */
        p->run = p->spare;
        return;
    }
    p->bytes = p->held ? imp_host_entry_bytes(p->held)
                       : imp_io_file_at(span->seg->file, p->place.offset, p->place.n_bytes);
    p->wanted = !p->bytes;
    if (p->wanted) return;
    p->checked = true;
    if (p->held && imp_host_entry_on_device(p->held)) {
        load->stats.device_hit_bytes += p->place.n_bytes;
    } else {
        load->stats.host_hit_bytes += p->place.n_bytes;
    }
}

static void want_chunk(imp_load *load, imp_slot *s, uint32_t layer, const imp_plan_span *span, uint32_t c)
{
    want(load, s, layer, span, span->keys + c);
    if (!span->paired) want(load, s, layer, span, span->values + c);
}

void imp_stream_want_keys(imp_load *load, imp_slot *s, uint32_t layer)
{
    imp_load_units(load, layer);
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        for (uint32_t c = 0; c < span->n_chunks; c++)
            if (load->tokens_in[span->first_unit + c]) want(load, s, layer, span, span->keys + c);
    }
}

static void want_units(imp_load *load, imp_slot *s, uint32_t layer, const unsigned char *flags)
{
    imp_load_units(load, layer);
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        for (uint32_t c = 0; c < span->n_chunks; c++) {
            uint32_t u = span->first_unit + c;
            if (flags[u] && load->tokens_in[u]) want_chunk(load, s, layer, span, c);
        }
    }
}

void imp_stream_want_chosen(imp_load *load, imp_slot *s, uint32_t layer, const uint32_t *chosen)
{
    imp_load_flag_units(load, layer, chosen);
    want_units(load, s, layer, load->unit_flags);
}

/* The core of a span's segment: the first chunks, where it has one. */
static uint32_t core_chunks(const imp_plan_span *span)
{
    const imp_seg_meta *meta = imp_seg_layout_meta(span->seg->layout);
    if (meta->order != IMP_ORDER_CORE) return 0;
    uint32_t n = (meta->core_tokens + meta->chunk_tokens - 1) / meta->chunk_tokens; /* a span with maps lists all */
    return n < span->n_chunks ? n : span->n_chunks;
}

static void want_core(imp_load *load, imp_slot *s, uint32_t layer)
{
    imp_load_units(load, layer);
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        for (uint32_t c = 0; c < core_chunks(span); c++)
            if (load->tokens_in[span->first_unit + c]) want_chunk(load, s, layer, span, c);
    }
}

/* --------------------------------------------------------------------------------------------------- the ring ---- */

/* Room for a block of `n_bytes` behind the newest. */
static bool ring_room(const imp_load *load, size_t n_bytes, size_t *at)
{
    const imp_slot *first = NULL, *last = NULL; /* that hold bytes */
    for (uint32_t l = load->oldest; l < load->next; l++) {
        const imp_slot *s = imp_stream_slot(load, l);
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

/* What of a layer is in stage A for how it is chosen. */
static void want_ahead(imp_load *load, imp_slot *s, uint32_t layer)
{
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        if (span->scales != IMP_PLAN_NONE) want(load, s, layer, span, span->scales);
        if (s->how == IMP_HOW_SKETCH) want(load, s, layer, span, span->sketch);
        if (s->how == IMP_HOW_PROBE) want(load, s, layer, span, span->probe);
    }
    if (s->how == IMP_HOW_ALL || s->how == IMP_HOW_KNOWN)
        imp_stream_want_chosen(load, s, layer, s->known ? s->known : load->own);
    if (s->how == IMP_HOW_KEYS) imp_stream_want_keys(load, s, layer);
    if (load->opts.switches.prefetch == IMP_PREFETCH_CORE) want_core(load, s, layer);
    if (load->guess && load->has_guess) want_units(load, s, layer, load->guess);
}

/* Start stage A of layer load->next, if there is a slot and room for it, and, unless it is asked for now, enough is
 * known of it. */
static bool stream_layer(imp_load *load, bool asked_for)
{
    uint32_t layer = load->next;
    size_t at;
    if (layer - load->oldest == load->n_slots || !ring_room(load, load->ahead_bytes[layer], &at)) return false;

    imp_slot *s = imp_stream_slot(load, layer);
    s->how = load->how[layer];
    if (s->how == IMP_HOW_LATER && load->opts.switches.prefetch == IMP_PREFETCH_CHUNKS) {
        if (load->period == layer / load->opts.period) {
            s->how = IMP_HOW_KNOWN;
        } else if (!asked_for) {
            return false;
        }
    } else if (s->how == IMP_HOW_KNOWN) {
        s->mass = imp_identify_known(load, layer, s->known);
    }
    s->n_runs = 0;
    imp_plan_places(&load->plan, layer, s->pieces);
    want_ahead(load, s, layer);
    s->ring_at = at;
    s->ring_bytes = submit(load, s, load->channel->arena + at, s->how == IMP_HOW_KNOWN);
    load->next++;
    return true;
}

void imp_stream_ahead(imp_load *load)
{
    if (load->opts.switches.prefetch != IMP_PREFETCH_NONE)
        while (load->next < load->n_layers && stream_layer(load, false)) {}
    imp_io_kick(load->channel->queue);
}

/* The oldest layer's buffers go back. */
static void release_oldest(imp_load *load)
{
    imp_slot *s = imp_stream_slot(load, load->oldest);
    for (uint32_t i = 0; i < s->n_runs; i++) {
        imp_read *r = &s->reads[i];
        if (!r->op.done) imp_io_wait(load->channel->queue, &r->op);
        count_read(load, r);
    }
    for (size_t i = 0; i < load->plan.n_pieces; i++) {
        if (s->pieces[i].held) imp_host_release(load->host, s->pieces[i].held);
    }
    load->oldest++;
}

void imp_stream_enter(imp_load *load, uint32_t layer)
{
    while (load->oldest < layer && load->oldest < load->next) release_oldest(load);
    if (load->next <= layer) {
        load->oldest = load->next = layer;
        stream_layer(load, true); /* the ring is empty and holds any layer */
    }
    if (load->at_work != layer) load->stage_b_bytes = 0; /* else it is asked for again */
    load->at_work = layer;
    imp_stream_ahead(load);
}

void imp_stream_leave(imp_load *load)
{
    release_oldest(load);
    imp_stream_ahead(load);
}

void imp_stream_stop(imp_load *load)
{
    imp_io_cancel_all(load->channel->queue);
    while (load->oldest < load->next) release_oldest(load);
    load->oldest = load->next = 0;
    load->at_work = load->n_layers;
}

void imp_stream_fetch(imp_load *load, imp_slot *s)
{
    load->stage_b_bytes += submit(load, s, load->channel->arena + load->ring_bytes + load->stage_b_bytes, true);
    imp_io_kick(load->channel->queue);
}

/* ------------------------------------------------------------------------------------------------------ sizes ---- */

/* Upper bounds of a layer's stage A and stage B. */
static void measure_layer(const imp_load *load, uint32_t layer, size_t *ahead, size_t *behind)
{
    imp_how how = load->how[layer];
    bool core = load->opts.switches.prefetch == IMP_PREFETCH_CORE;
    bool all_ahead = how == IMP_HOW_ALL || how == IMP_HOW_KNOWN || load->guess;
    *ahead = *behind = 0;
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        uint32_t n_core = core ? core_chunks(span) : 0;
        for (uint32_t p = span->first_piece; p < span->first_piece + span->n_pieces; p++) {
            uint32_t chunk;
            imp_region region = imp_plan_region(span, p, &chunk);
            size_t n = imp_seg_chunk(span->seg->layout, region, layer, chunk).n_bytes;
            if (region == IMP_REGION_SCALES || (region == IMP_REGION_SKETCH && how == IMP_HOW_SKETCH) ||
                (region == IMP_REGION_PROBE && how == IMP_HOW_PROBE)) {
                *ahead += n;
            } else if (region == IMP_REGION_SKETCH || region == IMP_REGION_PROBE) {
                continue;
            } else {
                bool key = how == IMP_HOW_KEYS && region != IMP_REGION_V;
                if (all_ahead || key || chunk - span->first_chunk < n_core) *ahead += n;
                if (how != IMP_HOW_ALL && how != IMP_HOW_KNOWN && !key) *behind += n;
            }
        }
    }
}

size_t imp_stream_measure(imp_load *load)
{
    size_t sum = 0, largest = 0, smallest = SIZE_MAX, stage_b = 0;
    for (uint32_t l = 0; l < load->n_layers; l++) {
        size_t behind, a;
        measure_layer(load, l, &load->ahead_bytes[l], &behind);
        a = load->ahead_bytes[l];
        if (behind > stage_b) stage_b = behind;
        if (a > largest) largest = a;
        if (a < smallest) smallest = a;
        sum += a;
    }
    bool ahead = load->opts.switches.prefetch != IMP_PREFETCH_NONE;
    uint64_t buffers = imp_store_options(load->store)->buffer_bytes;
    if (buffers > ENOUGH_BYTES && buffers > ENOUGH_LAYERS * largest)
        buffers = ENOUGH_BYTES > ENOUGH_LAYERS * largest ? ENOUGH_BYTES : ENOUGH_LAYERS * largest;
    size_t ring = ahead && buffers > stage_b ? (size_t)(buffers - stage_b) : 0;
    if (ring > sum) ring = sum;
    size_t least = ahead && load->n_layers > 1 ? 2 * largest : largest;
    if (ring < least) ring = least;
    load->ring_bytes = ring;
    size_t n = !ahead ? 1 : smallest == 0 ? load->n_layers : ring / smallest;
    /* Guesses are made when a layer enters the ring: not too far ahead of what they go by. */
    if (load->guess && n > load->opts.period) n = load->opts.period + 1;
    load->n_slots = n > load->n_layers ? load->n_layers : (uint32_t)n;
    return ring + stage_b;
}
