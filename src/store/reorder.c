/* reorder.c: segments written anew: in the order that requests made worth while, and without the rows of evicted nodes.
 *
 *     reserve (change)  ->  read, check, move, write, fdatasync, rename  ->  switch (change), unlink the old file
 *
 * Codes are moved as they are, scales stay with their 64 tokens; so what a token gets is the same to the bit. A new
 * segment is a file and a row of its own. The switch retargets all nodes of the old one in one change; node ids stay,
 * so pins, leases and uses do too, and a load that has the old file open goes on reading it.
 *
 * Meanwhile nodes may have been split, evicted or removed, here or by another process: that only takes tokens away or
 * draws borders between them, so the switch looks again which nodes there are. Is the old segment gone, another one was
 * faster, and the new file goes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "select/order.h"
#include "store/history.h"
#include "store/store_internal.h"

enum { DU_UNIT = 4096, EVICTED_SHARE = 4, NEWS_MAX = 64 };

/* ---- which tokens of the segments are in use */

typedef struct use_of {
    uint64_t segment;
    uint32_t first, end; /* the nodes' tokens */
    uint32_t n_tokens;   /* the segment's */
} use_of;

typedef struct uses {
    use_of *u; /* by segment */
    size_t n;
} uses;

static int by_segment(const void *a, const void *b)
{
    const use_of *x = a, *y = b;
    return x->segment < y->segment ? -1 : x->segment > y->segment;
}

static int take_in(imp_radix_node *n, void *user)
{
    const uses *all = user;
    use_of key = {.segment = n->segment}, *u = bsearch(&key, all->u, all->n, sizeof key, by_segment);
    if (!u) return 0;
    if (n->segment_first < u->first) u->first = n->segment_first;
    if (n->segment_first + n->n_tokens > u->end) u->end = n->segment_first + n->n_tokens;
    return 0;
}

static int survey(imp_store *s, uses *all)
{
    *all = (uses){0};
    imp_lock_fresh(s);
    all->u = imp_malloc((s->forest.segs.n + 1) * sizeof *all->u);
    for (size_t i = 0; all->u && i < s->forest.segs.n_slots; i++) {
        const imp_segrow *row = s->forest.segs.slots[i].value;
        if (row) all->u[all->n++] = (use_of){row->id, UINT32_MAX, 0, row->n_tokens};
    }
    if (all->u) qsort(all->u, all->n, sizeof *all->u, by_segment);
    for (size_t i = 0; all->u && i < s->forest.n_trees; i++) {
        (void)imp_radix_walk(s->forest.trees[i].radix, take_in, all);
    }
    pthread_mutex_unlock(&s->lock);
    return all->u ? 0 : imp_fail(IMP_E_NOMEM, "no memory to look for segments to reorder");
}

/* ---- a segment on its way */

typedef struct moving {
    imp_store *s;
    bool background;     /* gives up when the store closes */
    bool may_evict;
    imp_seg *from;       /* held */
    uint32_t first, end; /* the nodes' tokens in it; [0, end) go along */
    imp_seg_layout *to;
    imp_history *history;
    uint32_t *slots;     /* one layer's: which token each new slot holds */
    uint32_t *was_at;    /* and in which old slot each token was */
    float *scores, *scratch;
    unsigned char *old, *new; /* one layer's chunks */
    unsigned char *map;       /* a MAP chunk */
    uint64_t *sums;
    imp_cipher *cipher;  /* of the new file, where it is sealed */
    bool source_bad;     /* it failed by what the old file holds */
} moving;

static const imp_region regions[] = {IMP_REGION_SCALES, IMP_REGION_SKETCH, IMP_REGION_PROBE,
                                     IMP_REGION_K,      IMP_REGION_V,      IMP_REGION_KV};

enum { N_REGIONS = sizeof regions / sizeof regions[0] };

/* A layer's chunks but for its map, one behind the other in the file and in the table. */
typedef struct stretch {
    uint32_t index, n;
    uint64_t offset, n_bytes;
} stretch;

static stretch layer_stretch(const imp_seg_layout *l, uint32_t layer)
{
    stretch st = {.index = UINT32_MAX};
    st.offset = imp_seg_layer_at(l, layer, &st.n_bytes);
    for (size_t i = 0; i < N_REGIONS; i++) {
        uint32_t n = imp_seg_region_chunks(l, regions[i]);
        if (n == 0) continue;
        imp_chunk_place c = imp_seg_chunk(l, regions[i], layer, 0);
        if (c.index < st.index) st.index = c.index;
        st.n += n;
    }
    return st;
}

static uint64_t largest_stretch(const imp_seg_layout *l)
{
    uint64_t most = imp_seg_header_bytes(l);
    for (uint32_t i = 0; i < imp_seg_layout_meta(l)->n_layers; i++) {
        stretch st = layer_stretch(l, i);
        if (st.n_bytes > most) most = st.n_bytes;
    }
    return most;
}

/* The row of slot `slot` in a layer's chunks that lie at `bytes`, which is the file from `offset` on. */
static unsigned char *row_at(const imp_seg_layout *l, imp_region region, uint32_t layer, uint32_t slot,
                             unsigned char *bytes, uint64_t offset)
{
    const imp_seg_meta *m = imp_seg_layout_meta(l);
    uint32_t chunk = slot / m->chunk_tokens;
    imp_chunk_place c = imp_seg_chunk(l, m->paired ? IMP_REGION_KV : region, layer, chunk);
    return bytes + (c.offset - offset) + imp_seg_rows_at(l, region, layer, chunk) +
           (size_t)(slot - c.first_token) * imp_seg_row_bytes(l, region, layer);
}

/* ---- reading */

/* A chunk is needed if it holds a token that goes along. */
static bool needed(const moving *mv, uint32_t index)
{
    imp_region region;
    uint32_t layer, chunk;
    (void)imp_seg_chunk_at(mv->from->layout, index, &region, &layer, &chunk);
    return imp_seg_chunk_token(mv->from, region, layer, chunk, 0) < mv->end;
}

static int bad_chunk(moving *mv, uint32_t index)
{
    imp_store *s = mv->s;
    imp_region region;
    uint32_t layer, chunk;
    char what[128];
    imp_chunk_place c = imp_seg_chunk_at(mv->from->layout, index, &region, &layer, &chunk);
    uint32_t token = imp_seg_chunk_token(mv->from, region, layer, chunk, mv->first);
    snprintf(what, sizeof what, "bytes %llu to %llu: the checksum is wrong, found by a reorder",
             (unsigned long long)c.offset, (unsigned long long)(c.offset + c.n_bytes));
    mv->source_bad = true;
    if (token < mv->end) {
        pthread_mutex_lock(&s->lock);
        s->count.corrupt_chunks++;
        pthread_mutex_unlock(&s->lock);
        imp_drop(s, mv->from->id, token, what);
    }
    return imp_fail(IMP_E_CORRUPT, "%s: segments/%016llx.seg: %s", s->dir, (unsigned long long)mv->from->id, what);
}

static int read_layer(moving *mv, uint32_t layer)
{
    const imp_seg *seg = mv->from;
    stretch st = layer_stretch(seg->layout, layer);
    uint32_t last = st.index + st.n;
    imp_region region;
    uint32_t at, chunk;
    for (uint32_t i = st.index, end; i < last; i = end) {
        end = i + 1;
        if (!needed(mv, i)) continue;
        while (end < last && needed(mv, end)) end++;
        imp_chunk_place a = imp_seg_chunk_at(seg->layout, i, &region, &at, &chunk);
        imp_chunk_place b = imp_seg_chunk_at(seg->layout, end - 1, &region, &at, &chunk);
        unsigned char *to = mv->old + (a.offset - st.offset);
        int rc = imp_io_read(seg->file, a.offset, to, b.offset + b.n_bytes - a.offset);
        if (rc < 0) {
            mv->source_bad = rc != IMP_E_NOMEM;
            return rc;
        }
        for (; i < end; i++) {
            imp_chunk_place c = imp_seg_chunk_at(seg->layout, i, &region, &at, &chunk);
            rc = imp_seg_chunk_open(seg->layout, seg->cipher, i, mv->old + (c.offset - st.offset), c.n_bytes, seg->sums);
            if (rc < 0) return rc == IMP_E_CORRUPT ? bad_chunk(mv, i) : rc;
        }
    }
    return 0;
}

/* ---- moving */

static void choose_slots(moving *mv, uint32_t layer)
{
    const imp_seg_meta *m = imp_seg_layout_meta(mv->to);
    const uint32_t *map = imp_seg_map(mv->from, layer);
    uint32_t n_old = imp_seg_layout_meta(mv->from->layout)->n_tokens;
    bool known = imp_history_read(mv->history, layer, 0, mv->end, mv->scores) > 0 ||
                 imp_history_ranking(mv->history, IMP_RANK_PREFILL, layer, 0, mv->end, mv->scores);
    imp_order_slots(m->order, known ? mv->scores : NULL, mv->end, m->core_tokens, mv->slots, mv->scratch);
    for (uint32_t slot = 0; slot < n_old; slot++) {
        uint32_t token = map ? map[slot] : slot;
        if (token < mv->end) mv->was_at[token] = slot;
    }
}

static void move_rows(moving *mv, imp_region region, uint32_t layer, uint64_t old_at, uint64_t new_at)
{
    const imp_seg_layout *from = mv->from->layout;
    size_t n = imp_seg_row_bytes(from, region, layer);
    for (uint32_t slot = 0; slot < mv->end; slot++) {
        memcpy(row_at(mv->to, region, layer, slot, mv->new, new_at),
               row_at(from, region, layer, mv->was_at[mv->slots[slot]], mv->old, old_at), n);
    }
}

static int move_layer(moving *mv, uint32_t layer)
{
    int rc = 0;
    static const imp_region in_token_order[] = {IMP_REGION_SCALES, IMP_REGION_SKETCH, IMP_REGION_PROBE};
    const imp_seg_layout *from = mv->from->layout, *to = mv->to;
    stretch o = layer_stretch(from, layer), n = layer_stretch(to, layer);
    memset(mv->new, 0, n.n_bytes);
    for (size_t i = 0; i < sizeof in_token_order / sizeof in_token_order[0]; i++) {
        if (imp_seg_region_chunks(to, in_token_order[i]) == 0) continue;
        imp_chunk_place a = imp_seg_chunk(from, in_token_order[i], layer, 0);
        imp_chunk_place b = imp_seg_chunk(to, in_token_order[i], layer, 0);
        memcpy(mv->new + (b.offset - n.offset), mv->old + (a.offset - o.offset), b.data_bytes);
    }
    choose_slots(mv, layer);
    move_rows(mv, IMP_REGION_K, layer, o.offset, n.offset);
    move_rows(mv, IMP_REGION_V, layer, o.offset, n.offset);
    for (uint32_t i = n.index; rc == 0 && i < n.index + n.n; i++) {
        imp_region region;
        uint32_t at, chunk;
        imp_chunk_place c = imp_seg_chunk_at(to, i, &region, &at, &chunk);
        rc = imp_seg_chunk_close(to, mv->cipher, i, mv->new + (c.offset - n.offset), c.n_bytes, mv->sums);
    }
    return rc;
}

static int write_map(moving *mv, imp_io_writer *w, uint32_t layer)
{
    if (imp_seg_region_chunks(mv->to, IMP_REGION_MAP) == 0) return 0;
    imp_chunk_place c = imp_seg_chunk(mv->to, IMP_REGION_MAP, layer, 0);
    memset(mv->map, 0, c.n_bytes);
    imp_seg_map_encode(mv->to, mv->slots, mv->map);
    int rc = imp_seg_chunk_close(mv->to, mv->cipher, c.index, mv->map, c.n_bytes, mv->sums);
    return rc < 0 ? rc : imp_io_write(w, c.offset, mv->map, c.n_bytes);
}

static bool closing(const moving *mv)
{
    pthread_mutex_lock(&mv->s->lock);
    bool stop = mv->background && mv->s->stop;
    pthread_mutex_unlock(&mv->s->lock);
    return stop;
}

static int take_memory(moving *mv)
{
    size_t alignment = imp_io_alignment(mv->s->io), n = mv->end;
    mv->slots = imp_malloc(n * sizeof *mv->slots);
    mv->was_at = imp_malloc(n * sizeof *mv->was_at);
    mv->scores = imp_malloc(n * sizeof *mv->scores);
    mv->scratch = imp_malloc(n * sizeof *mv->scratch);
    mv->old = imp_aligned(alignment, largest_stretch(mv->from->layout));
    mv->new = imp_aligned(alignment, largest_stretch(mv->to));
    mv->map = imp_aligned(alignment, imp_seg_chunk(mv->to, IMP_REGION_MAP, 0, 0).n_bytes + 1);
    mv->sums = imp_malloc(imp_seg_sums_length(mv->to) * sizeof *mv->sums);
    if (mv->slots && mv->was_at && mv->scores && mv->scratch && mv->old && mv->new && mv->map && mv->sums) return 0;
    return imp_fail(IMP_E_NOMEM, "no memory to reorder %zu tokens", n);
}

static void free_memory(moving *mv)
{
    imp_free(mv->slots);
    imp_free(mv->was_at);
    imp_free(mv->scores);
    imp_free(mv->scratch);
    imp_free(mv->old);
    imp_free(mv->new);
    imp_free(mv->map);
    imp_free(mv->sums);
    imp_cipher_free(mv->cipher);
}

/* The new file, published. */
static int write_file(moving *mv)
{
    char name[32];
    imp_io_writer *w = NULL;
    int rc = take_memory(mv);
    if (rc == 0 && imp_seg_layout_meta(mv->to)->sealed) rc = imp_cipher_new(mv->s->key, &mv->cipher);
    if (rc == 0) rc = imp_history_get(mv->s, mv->from, &mv->history);
    if (rc < 0) goto out;
    imp_seg_name(imp_seg_layout_meta(mv->to)->segment, name);
    rc = imp_io_writer_new(mv->s->io, name, &w);
    for (uint32_t i = 0; rc == 0 && i < imp_seg_layout_meta(mv->to)->n_layers; i++) {
        if (closing(mv)) rc = imp_fail(IMP_E_BUSY, "%s: the store is being closed", mv->s->dir);
        if (rc == 0) rc = read_layer(mv, i);
        if (rc == 0) rc = move_layer(mv, i);
        if (rc < 0) break;
        stretch st = layer_stretch(mv->to, i);
        rc = imp_io_write(w, st.offset, mv->new, st.n_bytes);
        if (rc == 0) rc = write_map(mv, w, i);
    }
    if (rc < 0) goto out;
    imp_seg_header_encode(mv->to, mv->sums, mv->new); /* last: a file without it is nothing */
    if (mv->cipher) rc = imp_seg_header_seal(mv->s->key, mv->cipher, mv->new, (size_t)imp_seg_header_bytes(mv->to));
    if (rc == 0) rc = imp_io_write(w, 0, mv->new, imp_seg_header_bytes(mv->to));
    if (rc < 0) goto out;
    rc = imp_io_writer_publish(w);
    w = NULL;
out:
    if (w) imp_io_writer_abort(w);
    if (mv->history) imp_history_put(mv->s, mv->history);
    mv->history = NULL;
    free_memory(mv);
    return rc;
}

/* ---- the changes */

static int unreserve(imp_store *s)
{
    int rc = s->reorder_reserved ? imp_cat_unreserve(s->cat, s->reorder_reserved) : 0;
    if (rc < 0 && rc != IMP_E_NOTFOUND) return rc;
    s->reorder_reserved = 0;
    return 0;
}

/* With both mutexes: what of the segment is in use now. */
typedef struct look {
    uint64_t segment;
    const imp_seg_meta *meta;
    uint64_t deepest;
    uint32_t first, end;
    const char *wrong;
} look;

static int look_at(imp_radix_node *n, void *user)
{
    look *k = user;
    if (n->segment != k->segment) return 0;
    uint32_t end = n->segment_first + n->n_tokens;
    if (end > k->meta->n_tokens || k->meta->first_token + n->segment_first != n->depth ||
        memcmp(k->meta->tokens + n->segment_first, n->tokens, n->n_tokens * sizeof *n->tokens) != 0) {
        k->wrong = "its tokens are not those of the catalogue";
        return 1;
    }
    if (n->segment_first < k->first) k->first = n->segment_first;
    if (end > k->end) {
        k->end = end;
        k->deepest = n->id;
    }
    return 0;
}

static look look_again(const moving *mv)
{
    look k = {.segment = mv->from->id, .meta = imp_seg_layout_meta(mv->from->layout), .first = UINT32_MAX};
    imp_tree *tree = imp_forest_tree(&mv->s->forest, k.meta->space);
    if (tree) (void)imp_radix_walk(tree->radix, look_at, &k);
    return k;
}

/* In the order that the store's options want now. How rows are encoded, and what lies beside them, stays; so do chunks,
 * where the options don't say how they are to be. */
static int make_layout(moving *mv)
{
    imp_store *s = mv->s;
    imp_seg_meta m = *imp_seg_layout_meta(mv->from->layout);
    m.n_tokens = mv->end;
    m.order = s->opts.order;
    if (!s->own_chunks) m.chunk_tokens = s->opts.chunk_tokens;
    if (s->opts.keep) m.paired = s->opts.keep & IMP_KEEP_PAIRED;
    m.alignment = imp_io_alignment(s->io);
    m.core_tokens = m.order == IMP_ORDER_CORE ? imp_order_core_tokens(m.n_tokens, m.chunk_tokens) : 0;
    do m.segment = imp_rng_u64(&s->rng);
    while (m.segment == 0 || imp_forest_seg(&s->forest, m.segment));
    return imp_seg_layout_new(&m, &mv->to);
}

/* *gone: no node uses the segment. */
static int reserve_in_change(moving *mv, imp_evicted *evicted, bool *gone)
{
    imp_store *s = mv->s;
    bool fits = true;
    look k = look_again(mv);
    if (k.wrong) {
        mv->source_bad = true;
        return imp_fail(IMP_E_CORRUPT, "%s", k.wrong);
    }
    *gone = k.end == 0;
    if (*gone) return 0;
    mv->first = k.first;
    mv->end = k.end;
    int rc = make_layout(mv);
    if (rc < 0) return rc;
    uint64_t bytes = imp_round_up(imp_seg_file_bytes(mv->to), DU_UNIT);
    imp_cat_reservation r = {imp_seg_layout_meta(mv->to)->segment, s->instance, bytes};
    rc = unreserve(s);
    if (rc == 0 && !mv->may_evict) rc = imp_evict_not_needed(s, bytes, &fits);
    if (rc == 0 && !fits) {
        rc = imp_fail(IMP_E_FULL, "%s: no room for another copy of %llu bytes", s->dir, (unsigned long long)bytes);
    }
    if (rc == 0) rc = imp_evict_for(s, bytes, k.deepest, evicted);
    if (rc == 0) rc = imp_cat_reserve(s->cat, &r);
    if (rc == 0) s->reorder_reserved = r.segment;
    return rc;
}

static int reserve(moving *mv, bool *gone)
{
    imp_evicted evicted = {0};
    *gone = false;
    int rc = imp_catalogue_log_ready(mv->s);
    if (rc == 0) rc = imp_change_begin(mv->s);
    if (rc < 0) return rc;
    rc = imp_change_end(mv->s, reserve_in_change(mv, &evicted, gone));
    if (rc == 0) imp_count_evicted(mv->s, evicted);
    return rc;
}

/* What was reserved and isn't needed; what fails here is tried again at the next reorder, and ends with the process. */
static void give_up(imp_store *s)
{
    if (imp_change_begin(s) == 0) (void)imp_change_end(s, unreserve(s));
}

/* *moved: else another process was faster, or nothing of the segment is left. */
static int switch_in_change(moving *mv, bool *moved)
{
    imp_store *s = mv->s;
    const imp_seg_meta *m = imp_seg_layout_meta(mv->to);
    imp_cat_segment to = {m->segment, m->space, imp_round_up(imp_seg_file_bytes(mv->to), DU_UNIT), m->n_tokens};
    *moved = false;
    if (imp_forest_seg(&s->forest, m->segment)) return 0; /* a catalogue made again took the new file in */
    /* Without its reservation the file may be gone: for a catalogue made again it was a leftover. */
    int rc = s->reorder_reserved == m->segment ? imp_cat_unreserve(s->cat, m->segment) : IMP_E_NOTFOUND;
    s->reorder_reserved = rc == 0 ? 0 : s->reorder_reserved;
    if (rc == IMP_E_NOTFOUND) return imp_change_doom(s, m->segment);
    if (rc == 0) rc = imp_edit_replace(s, mv->from->id, &to, moved);
    if (rc == 0 && !*moved) rc = imp_change_doom(s, m->segment);
    if (rc < 0 || !*moved) return rc;
    imp_segrow_note(imp_forest_seg(&s->forest, m->segment), mv->to);
    return 0;
}

static int switch_over(moving *mv, bool *moved)
{
    imp_store *s = mv->s;
    *moved = false;
    int rc = imp_change_begin(s);
    if (rc == 0) rc = imp_change_end(s, switch_in_change(mv, moved));
    if (rc < 0) {
        char name[32], line[256];
        snprintf(line, sizeof line, "%s", imp_last_error());
        imp_seg_name(imp_seg_layout_meta(mv->to)->segment, name);
        (void)imp_io_unlink(s->io, name);
        rc = imp_fail(rc, "%s", line);
    }
    return rc;
}

/* ---- one segment */

/* Open it. A file that is missing goes out of the catalogue, as a match does it; one that was removed just now has gone
 * already. */
static int open_source(moving *mv, uint64_t segment)
{
    imp_store *s = mv->s;
    bool fresh;
    uint64_t n_read = 0;
    char what[256];
    int rc = imp_segs_open(s, segment, &mv->from, &fresh, &n_read);
    if (rc == 0) return 0;
    snprintf(what, sizeof what, "%s", imp_last_error());
    mv->source_bad = rc != IMP_E_NOMEM;
    if (rc != IMP_E_NOTFOUND && rc != IMP_E_CORRUPT) return rc;
    imp_lock_sure(s);
    bool known = imp_forest_seg(&s->forest, segment) != NULL;
    s->count.corrupt_chunks += known;
    pthread_mutex_unlock(&s->lock);
    if (!known) return IMP_E_NOTFOUND;
    imp_drop(s, segment, 0, rc == IMP_E_NOTFOUND ? "the file is missing" : what);
    return imp_fail(IMP_E_CORRUPT, "%s", what);
}

static void close_source(moving *mv)
{
    if (!mv->from) return;
    pthread_mutex_lock(&mv->s->lock);
    imp_segs_put(mv->s, mv->from);
    pthread_mutex_unlock(&mv->s->lock);
    mv->from = NULL;
}

/* Write the opened segment anew. */
static int move_segment(moving *mv, imp_reorder_report *r)
{
    imp_store *s = mv->s;
    bool gone, moved = false;
    int rc = reserve(mv, &gone);
    if (rc == 0 && !gone) {
        rc = write_file(mv);
        if (rc == 0) rc = switch_over(mv, &moved);
        if (rc < 0) {
            imp_kept_line kept;
            imp_error_keep(&kept);
            give_up(s);
            (void)imp_error_back(&kept, 0);
        }
    }
    if (rc == 0 && moved) {
        uint64_t before = imp_seg_file_bytes(mv->from->layout), after = imp_seg_file_bytes(mv->to);
        bool shorter = mv->end < imp_seg_layout_meta(mv->from->layout)->n_tokens;
        r->n_reordered++;
        r->bytes_written += after;
        if (shorter && before > after) r->freed_bytes += before - after;
        pthread_mutex_lock(&s->lock);
        s->count.reorders++;
        pthread_mutex_unlock(&s->lock);
    }
    imp_seg_layout_free(mv->to);
    mv->to = NULL;
    return rc;
}

static uint32_t news_of(imp_store *s, const imp_seg *seg)
{
    imp_history *h = NULL;
    if (imp_history_get(s, seg, &h) < 0) return 0;
    uint32_t n = imp_history_news(h);
    imp_history_put(s, h);
    return n;
}

/* Would it lie otherwise if it were written now? */
static bool worth_while(imp_store *s, const imp_seg *seg)
{
    imp_order order = imp_seg_layout_meta(seg->layout)->order;
    return order != s->opts.order || (order != IMP_ORDER_TOKEN && news_of(s, seg) > 0);
}

/* ---- turns: one reorder at a time in a process */

static bool take_turn(imp_store *s, bool wait)
{
    pthread_mutex_lock(&s->lock);
    while (wait && s->reordering) pthread_cond_wait(&s->done, &s->lock);
    bool mine = !s->reordering;
    s->reordering = true;
    pthread_mutex_unlock(&s->lock);
    return mine;
}

static void end_turn(imp_store *s)
{
    pthread_mutex_lock(&s->lock);
    s->reordering = false;
    pthread_cond_broadcast(&s->done);
    pthread_mutex_unlock(&s->lock);
}

/* All segments that hold rows of evicted nodes and, but for `evicted_only`, all that are worth while. A segment that
 * can't be read is logged and left for another time; what is corrupt has been dropped. */
static int reorder_all(imp_store *s, bool evicted_only, imp_reorder_report *r)
{
    uses all;
    int rc = survey(s, &all);
    for (size_t i = 0; rc == 0 && i < all.n; i++) {
        const use_of *u = &all.u[i];
        if (u->end == 0 || (evicted_only && u->end == u->n_tokens)) continue;
        moving mv = {.s = s, .may_evict = !evicted_only};
        r->n_segments++;
        rc = open_source(&mv, u->segment);
        if (rc == 0 && (u->end < u->n_tokens || worth_while(s, mv.from))) rc = move_segment(&mv, r);
        close_source(&mv);
        if (rc < 0 && mv.source_bad) {
            if (rc == IMP_E_IO) {
                pthread_mutex_lock(&s->lock);
                s->count.io_errors++;
                pthread_mutex_unlock(&s->lock);
            }
            if (rc != IMP_E_NOTFOUND) imp_log(IMP_LOG_WARN, "%s: not reordered: %s", s->dir, imp_last_error());
            rc = 0;
        }
        if (rc == IMP_E_FULL && evicted_only) rc = 0; /* a smaller one may fit */
    }
    imp_free(all.u);
    return rc;
}

int imp_store_reorder(imp_store *s, imp_reorder_report *report)
{
    imp_reorder_report r = {0};
    imp_kept_line kept;
    imp_error_keep(&kept);
    if (report) *report = r;
    if (!s) return imp_fail(IMP_E_ARG, "imp_store_reorder: no store");
    if (s->readonly) return imp_fail(IMP_E_PERM, "%s is open for reading only", s->dir);
    (void)take_turn(s, true);
    int rc = reorder_all(s, false, &r);
    end_turn(s);
    if (report) *report = r;
    return imp_error_back(&kept, rc);
}

int imp_reorder_evicted(imp_store *s)
{
    imp_reorder_report r = {0};
    (void)take_turn(s, true);
    int rc = reorder_all(s, true, &r);
    end_turn(s);
    return rc;
}

/* ---- in the background */

static uint64_t period_ns(const imp_store *s) { return s->opts.reorder_period_s * 1000000000ull; }

bool imp_reorder_due(imp_store *s, uint64_t *wait_ns)
{
    *wait_ns = UINT64_MAX;
    if (s->opts.reorder_period_s == UINT32_MAX) return false;
    uint64_t now_ns = imp_now_ns();
    if (s->reorder_next_ns == 0) s->reorder_next_ns = now_ns + period_ns(s);
    if (s->reorder_next_ns <= now_ns) return true;
    *wait_ns = s->reorder_next_ns - now_ns;
    return false;
}

/* With `lock` held. */
static bool spared(const imp_store *s, uint64_t segment)
{
    for (size_t i = 0; i < IMP_SPARED_MAX; i++) {
        if (s->spared[i] == segment) return true;
    }
    return false;
}

/* The one with the most news, else one of which a good part was evicted. 0: none. */
static int next_candidate(imp_store *s, uint64_t *segment)
{
    uint64_t ids[NEWS_MAX];
    size_t n = 0;
    uses all = {0};
    *segment = 0;
    if (s->opts.order != IMP_ORDER_TOKEN) n = imp_history_with_news(s, s->opts.reorder_after, ids, NEWS_MAX);
    int rc = survey(s, &all);
    if (rc < 0) return rc;
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < n && *segment == 0; i++) {
        if (!spared(s, ids[i]) && imp_forest_seg(&s->forest, ids[i])) *segment = ids[i];
    }
    for (size_t i = 0; i < all.n && *segment == 0; i++) {
        const use_of *u = &all.u[i];
        bool much = u->end > 0 && u->n_tokens - u->end >= (u->n_tokens + EVICTED_SHARE - 1) / EVICTED_SHARE;
        if (much && !spared(s, u->segment)) *segment = u->segment;
    }
    pthread_mutex_unlock(&s->lock);
    imp_free(all.u);
    return 0;
}

void imp_reorder_step(imp_store *s)
{
    moving mv = {.s = s, .background = true, .may_evict = true};
    imp_reorder_report r = {0};
    uint64_t segment = 0;
    int rc = 0;
    if (take_turn(s, false)) {
        rc = next_candidate(s, &segment);
        if (rc == 0 && segment) rc = open_source(&mv, segment);
        if (rc == 0 && segment) rc = move_segment(&mv, &r);
        close_source(&mv);
        end_turn(s);
    }
    if (rc < 0 && rc != IMP_E_NOTFOUND) {
        imp_log(rc == IMP_E_BUSY || rc == IMP_E_FULL ? IMP_LOG_INFO : IMP_LOG_WARN, "%s: not reordered: %s", s->dir,
                imp_last_error());
    }
    pthread_mutex_lock(&s->lock);
    s->count.io_errors += rc == IMP_E_IO;
    if (rc < 0 && mv.source_bad) s->spared[s->next_spared++ % IMP_SPARED_MAX] = segment;
    /* What can't be done now, for want of room, say, can't be done in a moment either. */
    bool more = segment && (r.n_reordered > 0 || mv.source_bad);
    s->reorder_next_ns = imp_now_ns() + (more ? 0 : period_ns(s));
    pthread_mutex_unlock(&s->lock);
}
