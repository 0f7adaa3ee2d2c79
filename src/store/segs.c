/* segs.c: open segments. Header and maps of each are read and checked once, when it is opened; those that no load uses
 * stay open for a while, the longest unused one goes first. */
#include <stdbool.h>
#include <string.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/status.h"
#include "format/rows.h"
#include "store/store_internal.h"

enum { HEADER_GUESS = 16384, HEADER_MAX = 1 << 30 };

/* ---- files */

/* A header that is here as a whole. An encrypted store holds nothing else: what isn't encrypted was put in by somebody
 * who doesn't have the key. */
static int take_header(const imp_key *key, void *buf, size_t n, imp_seg *out)
{
    int rc = 0;
    if (imp_seg_header_sealed(buf)) {
        rc = imp_seg_header_unseal(key, buf, n, &out->cipher);
    } else if (key) {
        rc = imp_fail(IMP_E_UNSUPPORTED, "segment header: it isn't encrypted, and the store is");
    }
    return rc == 0 ? imp_seg_header_decode(buf, n, &out->layout, &out->sums) : rc;
}

static int read_header(const imp_key *key, imp_io *io, imp_io_file *file, const char *name, imp_seg *out,
                       uint64_t *n_read)
{
    uint64_t file_bytes = imp_io_file_bytes(file), header_bytes = 0;
    uint32_t alignment = imp_io_alignment(io);
    void *buf = NULL;
    int rc;

    if (file_bytes < IMP_SEG_FIXED_BYTES) return imp_fail(IMP_E_CORRUPT, "%s: cut off at %llu bytes", name,
                                                          (unsigned long long)file_bytes);
    uint64_t n = file_bytes / IMP_SEG_FIXED_BYTES * IMP_SEG_FIXED_BYTES;
    if (n > HEADER_GUESS) n = HEADER_GUESS;
    if (n > alignment) n = n / alignment * alignment;
    for (;;) {
        imp_free(buf);
        buf = imp_aligned(alignment, n);
        rc = buf ? imp_io_read(file, 0, buf, n) : imp_fail(IMP_E_NOMEM, "no memory for the header of %s", name);
        if (rc < 0) break;
        *n_read += n;
        rc = imp_seg_header_peek(buf, n, &header_bytes);
        if (rc < 0) break;
        if (header_bytes <= n) {
            rc = take_header(key, buf, n, out);
            break;
        }
        if (header_bytes > file_bytes || header_bytes > HEADER_MAX) {
            rc = imp_fail(IMP_E_CORRUPT, "%s: its header is longer than the file", name);
            break;
        }
        n = imp_round_up(header_bytes, file_bytes % alignment == 0 ? alignment : IMP_SEG_FIXED_BYTES);
    }
    imp_free(buf);
    return rc;
}

/* All offsets of a file keep to the alignment that it was written with, and its length is a multiple of that. */
static uint32_t guess_alignment(const imp_io *io, const imp_io_file *file)
{
    uint32_t alignment = imp_io_alignment(io);
    return imp_io_file_bytes(file) % alignment == 0 ? alignment : IMP_SEG_FIXED_BYTES;
}

/* The maps lie one behind the other, a chunk for each layer. */
static int read_maps(imp_io *io, const char *name, imp_seg *seg, uint64_t *n_read)
{
    const imp_seg_layout *l = seg->layout;
    const imp_seg_meta *m = imp_seg_layout_meta(l);
    uint64_t n_bytes, first = imp_seg_maps_at(l, &n_bytes);
    if (n_bytes == 0) return 0;
    unsigned char *buf = imp_aligned(imp_io_alignment(io), n_bytes), *seen = imp_malloc(m->n_tokens);
    seg->maps = imp_malloc((size_t)m->n_layers * m->n_tokens * sizeof *seg->maps);
    int rc = buf && seen && seg->maps ? imp_io_read(seg->file, first, buf, n_bytes)
                                      : imp_fail(IMP_E_NOMEM, "no memory for the maps of %s", name);
    if (rc == 0) *n_read += n_bytes;
    for (uint32_t i = 0; rc == 0 && i < m->n_layers; i++) {
        imp_chunk_place c = imp_seg_chunk(l, IMP_REGION_MAP, i, 0);
        unsigned char *bytes = buf + (c.offset - first);
        rc = imp_seg_chunk_open(l, seg->cipher, c.index, bytes, c.n_bytes, seg->sums);
        if (rc == IMP_E_CORRUPT) {
            rc = imp_fail(IMP_E_CORRUPT, "%s: map of layer %u: the checksum is wrong", name, i);
        } else if (rc == 0) {
            rc = imp_seg_map_decode(l, bytes, seg->maps + (size_t)i * m->n_tokens, seen);
        }
    }
    imp_free(seen);
    imp_free(buf);
    return rc;
}

int imp_seg_file_open(imp_store *s, uint64_t id, imp_seg *out, uint64_t *n_read)
{
    char name[32];
    imp_seg_name(id, name);
    *out = (imp_seg){.id = id};
    uint32_t alignment = imp_io_alignment(s->io);
    int rc = imp_io_open(s->io, name, alignment, &out->file);
    if (rc < 0) return rc;
    if (guess_alignment(s->io, out->file) < alignment) {
        imp_io_close(out->file);
        out->file = NULL;
        rc = imp_io_open(s->io, name, IMP_SEG_FIXED_BYTES, &out->file);
        if (rc < 0) return rc;
    }
    rc = read_header(s->key, s->io, out->file, name, out, n_read);
    if (rc < 0) goto out;
    const imp_seg_meta *m = imp_seg_layout_meta(out->layout);
    if (m->segment != id) {
        rc = imp_fail(IMP_E_CORRUPT, "%s: holds segment %016llx", name, (unsigned long long)m->segment);
    } else if (imp_seg_file_bytes(out->layout) > imp_io_file_bytes(out->file)) {
        rc = imp_fail(IMP_E_CORRUPT, "%s: cut off at %llu of %llu bytes", name,
                      (unsigned long long)imp_io_file_bytes(out->file),
                      (unsigned long long)imp_seg_file_bytes(out->layout));
    } else if (m->alignment < alignment) {
        imp_io_close(out->file);
        out->file = NULL;
        rc = imp_io_open(s->io, name, m->alignment, &out->file);
    }
    if (rc == 0) rc = read_maps(s->io, name, out, n_read);
out:
    if (rc < 0) imp_seg_file_close(out);
    return rc;
}

void imp_seg_file_close(imp_seg *seg)
{
    imp_io_close(seg->file);
    imp_seg_layout_free(seg->layout);
    imp_free(seg->sums);
    imp_cipher_free(seg->cipher);
    imp_free(seg->maps);
    *seg = (imp_seg){0};
}

uint32_t imp_seg_chunk_token(const imp_seg *seg, imp_region region, uint32_t layer, uint32_t chunk, uint32_t from)
{
    imp_chunk_place c = imp_seg_chunk(seg->layout, region, layer, chunk);
    const uint32_t *map = imp_seg_map(seg, layer);
    uint32_t least = UINT32_MAX;
    if (!map || (region != IMP_REGION_K && region != IMP_REGION_V && region != IMP_REGION_KV)) {
        if (from < c.first_token) from = c.first_token;
        return from < c.first_token + c.n_tokens ? from : UINT32_MAX;
    }
    for (uint32_t i = 0; i < c.n_tokens; i++) {
        uint32_t token = map[c.first_token + i];
        if (token >= from && token < least) least = token;
    }
    return least;
}

static uint64_t kv_bytes(const imp_seg_layout *l)
{
    const imp_seg_meta *m = imp_seg_layout_meta(l);
    uint64_t n = 0;
    for (uint32_t i = 0; i < m->n_layers; i++) {
        n += (uint64_t)m->n_tokens * (imp_seg_row_bytes(l, IMP_REGION_K, i) + imp_seg_row_bytes(l, IMP_REGION_V, i));
        if (imp_seg_region_chunks(l, IMP_REGION_SCALES)) n += imp_seg_chunk(l, IMP_REGION_SCALES, i, 0).data_bytes;
    }
    return n;
}

void imp_segrow_note(imp_segrow *row, const imp_seg_layout *l)
{
    if (!row) return;
    const imp_seg_meta *m = imp_seg_layout_meta(l);
    row->head = (imp_seghead){
        .kv_bytes = kv_bytes(l),
        .chunk_tokens = (uint16_t)m->chunk_tokens, /* all three are 4,096 at most */
        .probe_heads = (uint16_t)m->probe_heads,
        .sketch_bits = (uint16_t)m->sketch_bits,
        .order = (uint8_t)m->order,
        .rest = (uint8_t)m->rest,
        .paired = m->paired,
    };
}

int imp_segrow_see(imp_store *s, uint64_t id)
{
    imp_seg seg;
    uint64_t n_read = 0;
    int rc = imp_seg_file_open(s, id, &seg, &n_read);
    if (rc < 0) return rc;
    pthread_mutex_lock(&s->lock);
    imp_segrow_note(imp_forest_seg(&s->forest, id), seg.layout);
    pthread_mutex_unlock(&s->lock);
    imp_seg_file_close(&seg);
    return 0;
}

/* ---- the table */

static imp_seg_open **find(imp_seg_table *t, uint64_t id)
{
    imp_seg_open **p = &t->buckets[id % IMP_SEG_BUCKETS];
    while (*p && (*p)->seg.id != id) p = &(*p)->chain;
    return p;
}

static void idle_add(imp_seg_table *t, imp_seg_open *o)
{
    o->older = t->newest;
    o->newer = NULL;
    *(t->newest ? &t->newest->newer : &t->oldest) = o;
    t->newest = o;
    t->n_idle++;
}

static void idle_take(imp_seg_table *t, imp_seg_open *o)
{
    *(o->older ? &o->older->newer : &t->oldest) = o->newer;
    *(o->newer ? &o->newer->older : &t->newest) = o->older;
    t->n_idle--;
}

static void close_one(imp_store *s, imp_seg_open *o)
{
    imp_bases_drop(s, o->seg.bases);
    imp_seg_file_close(&o->seg);
    imp_free(o);
}

imp_seg *imp_segs_get(imp_store *s, uint64_t id)
{
    imp_seg_open *o = *find(&s->open, id);
    if (!o) return NULL;
    if (o->refs++ == 0) idle_take(&s->open, o);
    return &o->seg;
}

imp_seg *imp_segs_adopt(imp_store *s, imp_seg *seg)
{
    imp_seg *other = imp_segs_get(s, seg->id); /* another thread was faster */
    if (other) return other;
    imp_seg_open *o = imp_calloc(1, sizeof *o);
    if (!o) return NULL;
    o->seg = *seg;
    o->refs = 1;
    *seg = (imp_seg){0};
    *find(&s->open, o->seg.id) = o;
    return &o->seg;
}

int imp_segs_open(imp_store *s, uint64_t id, imp_seg **out, bool *fresh, uint64_t *n_read)
{
    imp_seg seg;
    *fresh = false;
    pthread_mutex_lock(&s->lock);
    *out = imp_segs_get(s, id);
    pthread_mutex_unlock(&s->lock);
    if (*out) return 0;
    imp_segs_sweep(s); /* so that they don't become many where nothing is changed */
    int rc = imp_seg_file_open(s, id, &seg, n_read);
    if (rc < 0) return rc;
    const imp_seg_meta *m = imp_seg_layout_meta(seg.layout);
    if (m->sketch_bits > 0) seg.bases = imp_bases_get(s, m->space, m->basis, n_read);
    pthread_mutex_lock(&s->lock);
    imp_segrow *row = imp_forest_seg(&s->forest, id);
    imp_segrow_note(row, seg.layout);
    *out = imp_segs_adopt(s, &seg);
    /* Removed meanwhile: this caller still may use it, the next one won't find it. */
    if (*out && !row) imp_segs_gone(s, id);
    pthread_mutex_unlock(&s->lock);
    imp_bases_drop(s, seg.bases); /* unless they were taken over */
    imp_seg_file_close(&seg);
    if (!*out) return imp_fail(IMP_E_NOMEM, "no memory for an open segment");
    *fresh = true;
    return 0;
}

static void tell_gone(imp_store *s, uint64_t id)
{
    if (s->attached) s->attached_gone(s->attached, id);
}

typedef struct closing {
    imp_errand e;
    imp_seg_open *o;
} closing;

static int run_close(imp_store *s, imp_errand *e)
{
    close_one(s, ((closing *)(void *)e)->o);
    return 0;
}

/* Whatever has no name any more, which another process may have seen to, loses its blocks with its last descriptor, and
 * for that the disk may be waited for. So it isn't closed here but in a thread of the store's; where there is none, or
 * where it is to be gone before the change is over, at the end of a change, when `lock` isn't held any more. */
static void retire(imp_store *s, imp_seg_open *o, bool in_change)
{
    bool bounded = imp_errands_bounded(s);
    closing *c = bounded && !in_change ? imp_calloc(1, sizeof *c) : NULL;
    if (c) {
        c->e = (imp_errand){.run = run_close, .what = "closing a segment"};
        c->o = o;
        if (imp_errand_send(s, &c->e)) return;
    }
    imp_free(c);
    if (bounded || in_change) {
        o->chain = s->open.retired;
        s->open.retired = o;
    } else {
        close_one(s, o); /* nobody minds how long that takes */
    }
}

void imp_segs_sweep(imp_store *s)
{
    pthread_mutex_lock(&s->lock);
    imp_seg_open *o = s->open.retired;
    s->open.retired = NULL;
    pthread_mutex_unlock(&s->lock);
    while (o) {
        imp_seg_open *next = o->chain;
        close_one(s, o);
        o = next;
    }
}

/* Out of the table; closed soon, or with the last reference. */
static void take_out(imp_store *s, uint64_t id, bool in_change)
{
    imp_seg_open **p = find(&s->open, id), *o = *p;
    if (!o) return;
    *p = o->chain;
    o->dropped = true;
    if (o->refs == 0) {
        idle_take(&s->open, o);
        retire(s, o, in_change);
    }
}

void imp_segs_put(imp_store *s, imp_seg *seg)
{
    imp_seg_open *o = (imp_seg_open *)(void *)seg;
    if (--o->refs > 0) return;
    if (o->dropped) {
        tell_gone(s, seg->id); /* again: the loads that had it open may have kept chunks of it meanwhile */
        retire(s, o, false);
        return;
    }
    idle_add(&s->open, o);
    if (s->open.n_idle > IMP_SEG_IDLE_MAX) take_out(s, s->open.oldest->seg.id, false);
    /* Two, so that they become fewer. What holds the bases may be closed by another thread, later. */
    for (int n = 0; n < 2 && s->open.n_idle > 1 && imp_bases_heavy(s); n++) {
        take_out(s, s->open.oldest->seg.id, false);
    }
}

void imp_segs_drop(imp_store *s, uint64_t id)
{
    take_out(s, id, true);
    tell_gone(s, id);
}

void imp_segs_gone(imp_store *s, uint64_t id)
{
    take_out(s, id, false);
    tell_gone(s, id);
}

void imp_segs_close(imp_store *s)
{
    for (size_t i = 0; i < IMP_SEG_BUCKETS; i++) {
        while (s->open.buckets[i]) take_out(s, s->open.buckets[i]->seg.id, true);
    }
    imp_segs_sweep(s);
}
