#include "support/store_world.h"

#include <ftw.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/alloc.h"
#include "base/hash.h"
#include "base/rng.h"
#include "base/status.h"
#include "format/rows.h"

void imp_world_opts(imp_store_opts *opts)
{
    imp_store_opts_init(opts);
    opts->min_store_tokens = 4;
    opts->segment_tokens = 64;
    opts->chunk_tokens = 16;
    opts->io_mode = IMP_IO_THREADS;
    opts->key_file = getenv("IMP_TEST_KEY_FILE"); /* to run them all encrypted */
}

void imp_world_rich_opts(imp_store_opts *opts)
{
    imp_world_opts(opts);
    opts->order = IMP_ORDER_CORE;
    opts->rest = IMP_REST_Q8;
    opts->keep = IMP_KEEP_SKETCH | IMP_KEEP_PROBE | IMP_KEEP_PAIRED;
    opts->n_probe_heads = 1;
    opts->reorder_period_s = UINT32_MAX;
}

int imp_world_space(imp_store *store, const char *salt, imp_space **out)
{
    imp_layer_shape layers[WORLD_LAYERS];
    imp_rope ropes[WORLD_LAYERS];
    uint32_t n_heads[WORLD_LAYERS];
    for (int i = 0; i < WORLD_LAYERS; i++) {
        layers[i] = (imp_layer_shape){WORLD_HEADS, WORLD_DIM, WORLD_DIM};
        ropes[i] = (imp_rope){IMP_ROPE_NEOX, 0, WORLD_DIM, 10000.0f, 1.0f, .attn_factor = 1.0f};
        n_heads[i] = WORLD_QUERY_HEADS;
    }
    imp_space_desc desc = {
        .struct_bytes = sizeof desc,
        .model_name = "small",
        .engine = "test 1",
        .weights = {1, 2},
        .type_k = IMP_TYPE_F16,
        .type_v = IMP_TYPE_F16,
        .n_layers = WORLD_LAYERS,
        .layers = layers,
        .salt = salt,
        .ropes = ropes,
        .n_heads = n_heads,
    };
    return imp_space_open(store, &desc, out);
}

int imp_world_open(imp_world *w, const char *dir, const imp_store_opts *opts, const char *salt)
{
    imp_store_opts usual;
    imp_world_opts(&usual);
    *w = (imp_world){0};
    int rc = imp_store_open(dir, opts ? opts : &usual, &w->store);
    if (rc == 0) rc = imp_world_space(w->store, salt, &w->space);
    if (rc < 0) imp_world_close(w);
    return rc;
}

void imp_world_close(imp_world *w)
{
    imp_space_close(w->space);
    imp_store_close(w->store);
    *w = (imp_world){0};
}

int imp_world_rebuild(const char *dir) { return imp_store_rebuild_key(dir, getenv("IMP_TEST_KEY_FILE")); }

/* The row at a place in the token tree, which `h` names. Values of moderate size, a few large ones among the keys. */
static void make_row(imp_hash128 h, uint32_t layer, bool value, uint16_t *out)
{
    imp_rng rng;
    imp_rng_seed(&rng, h.lo ^ h.hi * 31 ^ (layer * 2 + value));
    for (int i = 0; i < WORLD_HEADS * WORLD_DIM; i++) {
        double x = imp_rng_unit(&rng) * 2 - 1;
        out[i] = imp_f32_to_f16((float)(!value && i % 13 == 5 ? x * 40 : x));
    }
}

/* Queries of the last tokens, which `h` names. */
static int commit_queries(imp_commit *c, size_t n, imp_hash128 h)
{
    float rows[WORLD_QUERY_ROWS * WORLD_QUERY_HEADS * WORLD_DIM];
    imp_query q = {rows, WORLD_QUERY_HEADS * WORLD_DIM, WORLD_DIM, n < WORLD_QUERY_ROWS ? n : WORLD_QUERY_ROWS,
                   WORLD_QUERY_HEADS, 0.2f, 0};
    imp_rng rng;
    imp_rng_seed(&rng, h.lo ^ h.hi * 37);
    int rc = 0;
    for (uint32_t l = 0; rc == 0 && l < WORLD_LAYERS; l++) {
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) rows[i] = (float)(imp_rng_unit(&rng) * 2 - 1);
        rc = imp_commit_queries(c, l, n - q.n_rows, &q);
    }
    return rc == IMP_E_NOMEM || rc == IMP_E_BUSY ? 0 : rc; /* advisory */
}

int imp_world_commit(imp_world *w, const int32_t *tokens, size_t n, size_t first_new, unsigned flags, bool *staged)
{
    imp_commit *c;
    if (staged) *staged = false;
    int rc = imp_commit_begin(w->space, tokens, n, first_new, flags, &c);
    if (rc < 0 || !c) return rc;
    if (staged) *staged = true;
    imp_hash128 h = imp_prefix_hash(w->space->id, tokens, first_new);
    for (size_t i = first_new; rc == 0 && i < n; i++) {
        h = imp_prefix_hash(h, tokens + i, 1);
        for (uint32_t l = 0; rc == 0 && l < WORLD_LAYERS; l++) {
            uint16_t k[WORLD_ROW / 2], v[WORLD_ROW / 2];
            make_row(h, l, false, k);
            make_row(h, l, true, v);
            rc = imp_commit_rows(c, l, i, 1, k, WORLD_ROW, v, WORLD_ROW);
        }
    }
    const imp_store_opts *opts = imp_store_options(w->store);
    if (rc == 0 && (opts->order != IMP_ORDER_TOKEN || opts->keep != 0)) rc = commit_queries(c, n, h);
    if (rc < 0) {
        imp_commit_cancel(c);
        return rc;
    }
    return imp_commit_finish(c);
}

static bool close_to(const uint16_t *got, const uint16_t *want, bool value)
{
    for (int i = 0; i < WORLD_HEADS * WORLD_DIM; i++) {
        double most = !value && i % 13 == 5 ? 40 : 1; /* half a step of 127 of the largest in the group */
        if (fabs((double)imp_f16_to_f32(got[i]) - (double)imp_f16_to_f32(want[i])) > most * 0.006) return false;
    }
    return true;
}

static bool right_row(const imp_seg_meta *m, bool value, const unsigned char *at, const unsigned char *scales,
                      const uint16_t *want)
{
    size_t n = WORLD_HEADS * WORLD_DIM;
    uint16_t got[WORLD_ROW / 2];
    if (m->rest == IMP_REST_RAW) return memcmp(at, want, WORLD_ROW) == 0;
    if (value) {
        imp_rows_value_decode(m->rest, IMP_TYPE_F16, at, n, got);
    } else {
        imp_rows_key_decode(m->rest, IMP_TYPE_F16, at, (const uint16_t *)(const void *)scales, n, got);
    }
    return close_to(got, want, value);
}

/* Tokens [from, from + n) of the segment in one layer and region against what their hashes ask for. */
static int check_region(const imp_seg *seg, uint32_t layer, bool value, uint32_t from, uint32_t n, const imp_hash128 *h,
                        unsigned char *buf, const unsigned char *scales)
{
    const imp_seg_meta *m = imp_seg_layout_meta(seg->layout);
    const uint32_t *map = imp_seg_map(seg, layer);
    imp_region rows = value ? IMP_REGION_V : IMP_REGION_K, region = m->paired ? IMP_REGION_KV : rows;
    size_t row = imp_seg_row_bytes(seg->layout, rows, layer), group = WORLD_HEADS * WORLD_DIM * sizeof(uint16_t);
    uint32_t n_seen = 0;
    for (uint32_t i = 0; i < imp_seg_region_chunks(seg->layout, region); i++) {
        bool loaded = false;
        imp_chunk_place c = imp_seg_chunk(seg->layout, region, layer, i);
        for (uint32_t slot = c.first_token; slot < c.first_token + c.n_tokens; slot++) {
            uint32_t token = map ? map[slot] : slot;
            uint16_t want[WORLD_ROW / 2];
            if (token < from || token >= from + n) continue;
            if (!loaded) {
                int rc = imp_io_read(seg->file, c.offset, buf, c.n_bytes);
                if (rc < 0) return rc;
                if (imp_seg_chunk_open(seg->layout, seg->cipher, c.index, buf, c.n_bytes, seg->sums) < 0) {
                    return imp_fail(IMP_E_CORRUPT, "test: checksum of chunk %u", c.index);
                }
                loaded = true;
            }
            const unsigned char *at = buf + imp_seg_rows_at(seg->layout, rows, layer, i) + (slot - c.first_token) * row;
            make_row(h[token - from], layer, value, want);
            n_seen++;
            if (!right_row(m, value, at, scales + token / IMP_GROUP_TOKENS * group, want)) {
                fprintf(stderr, "wrong %s row: segment %016llx, layer %u, token %u\n", value ? "value" : "key",
                        (unsigned long long)seg->id, layer, token);
                return IMP_WORLD_WRONG;
            }
        }
    }
    return n_seen == n ? 0 : IMP_WORLD_WRONG;
}

static int check_span(const imp_span *span, const imp_hash128 *h)
{
    const imp_seg_meta *m = imp_seg_layout_meta(span->seg->layout);
    imp_chunk_place s = imp_seg_chunk(span->seg->layout, IMP_REGION_SCALES, 0, 0);
    size_t most = 2 * 256 * WORLD_ROW * 2;
    unsigned char *buf = imp_aligned(4096, most), *scales = imp_aligned(4096, s.n_bytes + 4096);
    int rc = buf && scales ? 0 : imp_fail(IMP_E_NOMEM, "test");
    for (uint32_t l = 0; rc == 0 && l < WORLD_LAYERS; l++) {
        if (m->rest == IMP_REST_Q8) {
            s = imp_seg_chunk(span->seg->layout, IMP_REGION_SCALES, l, 0);
            rc = imp_io_read(span->seg->file, s.offset, scales, s.n_bytes);
            if (rc == 0 && imp_seg_chunk_open(span->seg->layout, span->seg->cipher, s.index, scales, s.n_bytes,
                                              span->seg->sums) < 0) {
                rc = imp_fail(IMP_E_CORRUPT, "test: checksum of the scales of layer %u", l);
            }
        }
        for (int value = 0; rc == 0 && value < 2; value++) {
            rc = check_region(span->seg, l, value, span->segment_first, span->n_tokens, h, buf, scales);
        }
    }
    imp_free(scales);
    imp_free(buf);
    return rc;
}

int64_t imp_world_check(imp_world *w, const int32_t *tokens, size_t n, bool exact_only)
{
    imp_path path;
    uint64_t header_bytes;
    int rc = imp_store_match(w->store, w->space->id, tokens, n, exact_only, &path, &header_bytes);
    if (rc < 0) return rc;
    int64_t n_matched = (int64_t)path.n_tokens;
    imp_hash128 *h = imp_malloc((n + 1) * sizeof *h), at = w->space->id;
    if (!h) rc = imp_fail(IMP_E_NOMEM, "test");
    for (size_t i = 0; h && i < n; i++) h[i] = at = imp_prefix_hash(at, tokens + i, 1);
    uint64_t depth = 0;
    for (size_t i = 0; rc == 0 && i < path.n_spans; i++) {
        if (path.spans[i].depth != depth) rc = IMP_WORLD_WRONG;
        if (exact_only && path.spans[i].derived) rc = IMP_WORLD_WRONG;
        if (rc == 0) rc = check_span(&path.spans[i], h + depth);
        depth += path.spans[i].n_tokens;
    }
    if (rc == 0 && depth != path.n_tokens) rc = IMP_WORLD_WRONG;
    imp_free(h);
    imp_store_unpin(w->store, &path);
    return rc < 0 ? rc : n_matched;
}

static void print(const imp_finding *f, void *user)
{
    if (*(bool *)user) fprintf(stderr, "verify: %s: %s\n", f->file, f->what);
}

int64_t imp_world_verify(imp_world *w, bool repair, bool loud)
{
    return imp_store_verify(w->store, repair, print, NULL, &loud);
}

static _Thread_local uint64_t du_sum;

static int add(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)path;
    (void)type;
    (void)ftw;
    du_sum += (uint64_t)st->st_blocks * 512;
    return 0;
}

uint64_t imp_world_du(const char *dir)
{
    du_sum = 0;
    nftw(dir, add, 16, FTW_PHYS);
    return du_sum;
}
