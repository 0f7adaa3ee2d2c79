/* Reordering: whatever happens meanwhile, a token gets the same bytes as before. */
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/rng.h"
#include "format/rows.h"
#include "io/io_fault.h"
#include "store/history.h"
#include "store/store_internal.h"
#include "support/store_world.h"
#include "support/support.h"

static void quiet(imp_log_level level, const char *line, void *user)
{
    (void)level;
    (void)line;
    (void)user;
}

static int set_up(void **state)
{
    imp_log_set(quiet, NULL, IMP_LOG_ERROR);
    *state = imp_test_make_dir("/dev/shm"); /* where an fsync costs nothing */
    if (!*state) *state = imp_test_make_dir(NULL);
    return *state ? 0 : -1;
}

static int tear_down(void **state)
{
    imp_io_fault_clear();
    imp_alloc_fail_at(0, 0);
    imp_test_remove_dir(*state);
    return 0;
}

static uint32_t below(imp_rng *rng, uint32_t n) { return (uint32_t)imp_rng_below(rng, n); }

static size_t n_files(const char *dir, const char *sub)
{
    size_t n = 0;
    DIR *d = opendir(imp_test_path(dir, sub));
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d)) != NULL;) n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

/* What requests found important, at random, of everything along the prompt. */
static void add_history(imp_store *s, imp_hash128 space, const int32_t *tokens, size_t n, imp_rng *rng)
{
    imp_path path;
    uint64_t header_bytes;
    float *scores = malloc((n + 1) * sizeof *scores);
    assert_non_null(scores);
    assert_int_equal(imp_store_match(s, space, tokens, n, false, &path, &header_bytes), 0);
    for (size_t i = 0; i < path.n_spans; i++) {
        const imp_span *sp = &path.spans[i];
        imp_history *h;
        assert_int_equal(imp_history_get(s, sp->seg, &h), 0);
        for (uint32_t l = 0; l < imp_seg_layout_meta(sp->seg->layout)->n_layers; l++) {
            for (uint32_t t = 0; t < sp->n_tokens; t++) scores[t] = (float)imp_rng_unit(rng) * 3;
            imp_history_add(h, l, sp->segment_first, sp->n_tokens, scores);
        }
        imp_history_put(s, h);
    }
    imp_store_unpin(s, &path);
    free(scores);
}

/* ---- everything that a segment says about a token, read the simplest way */

typedef struct dump {
    unsigned char *bytes;
    size_t n, cap, n_tokens;
} dump;

static void add_bytes(dump *d, const void *bytes, size_t n)
{
    if (d->n + n > d->cap) {
        d->cap = 2 * (d->n + n);
        d->bytes = realloc(d->bytes, d->cap);
        assert_non_null(d->bytes);
    }
    memcpy(d->bytes + d->n, bytes, n);
    d->n += n;
}

static const unsigned char *chunk_bytes(const imp_seg *seg, imp_region region, uint32_t layer, uint32_t chunk,
                                        unsigned char *buf)
{
    imp_chunk_place c = imp_seg_chunk(seg->layout, region, layer, chunk);
    assert_int_equal(imp_io_read(seg->file, c.offset, buf, c.n_bytes), 0);
    assert_int_equal(imp_seg_chunk_open(seg->layout, seg->cipher, c.index, buf, c.n_bytes, seg->sums), 0);
    for (uint32_t i = c.data_bytes; i < c.n_bytes; i++) assert_int_equal(buf[i], 0);
    return buf;
}

static void dump_token(const imp_seg *seg, uint32_t layer, uint32_t token, unsigned char *buf, dump *d)
{
    static const imp_region rows[] = {IMP_REGION_K, IMP_REGION_V}, beside[] = {IMP_REGION_SKETCH, IMP_REGION_PROBE};
    const imp_seg_meta *m = imp_seg_layout_meta(seg->layout);
    const uint32_t *map = imp_seg_map(seg, layer);
    uint32_t slot = 0;
    while ((map ? map[slot] : slot) != token) slot++;
    for (int i = 0; i < 2; i++) {
        uint32_t chunk = slot / m->chunk_tokens;
        size_t n = imp_seg_row_bytes(seg->layout, rows[i], layer);
        const unsigned char *p = chunk_bytes(seg, m->paired ? IMP_REGION_KV : rows[i], layer, chunk, buf);
        add_bytes(d, p + imp_seg_rows_at(seg->layout, rows[i], layer, chunk) + slot % m->chunk_tokens * n, n);
    }
    for (int i = 0; i < 2; i++) {
        size_t n = imp_seg_row_bytes(seg->layout, beside[i], layer);
        if (imp_seg_region_chunks(seg->layout, beside[i]) == 0) continue;
        add_bytes(d, chunk_bytes(seg, beside[i], layer, 0, buf) + token * n, n);
    }
    if (imp_seg_region_chunks(seg->layout, IMP_REGION_SCALES) > 0) {
        imp_layer_shape s = m->layers[layer];
        size_t n = imp_rows_scales_bytes(m->rest, (size_t)s.n_kv_heads * s.head_dim_k);
        add_bytes(d, chunk_bytes(seg, IMP_REGION_SCALES, layer, 0, buf) + token / IMP_GROUP_TOKENS * n, n);
    }
}

static dump dump_path(const imp_path *path)
{
    dump d = {.n_tokens = path->n_tokens};
    for (size_t i = 0; i < path->n_spans; i++) {
        const imp_span *sp = &path->spans[i];
        unsigned char *buf = imp_aligned(4096, imp_seg_file_bytes(sp->seg->layout));
        assert_non_null(buf);
        for (uint32_t t = 0; t < sp->n_tokens; t++) {
            for (uint32_t l = 0; l < imp_seg_layout_meta(sp->seg->layout)->n_layers; l++) {
                dump_token(sp->seg, l, sp->segment_first + t, buf, &d);
            }
        }
        imp_free(buf);
    }
    return d;
}

static dump dump_prompt(imp_store *s, imp_hash128 space, const int32_t *tokens, size_t n)
{
    imp_path path;
    uint64_t header_bytes;
    assert_int_equal(imp_store_match(s, space, tokens, n, false, &path, &header_bytes), 0);
    dump d = dump_path(&path);
    imp_store_unpin(s, &path);
    return d;
}

static void assert_same(const dump *a, const dump *b)
{
    assert_int_equal(a->n_tokens, b->n_tokens);
    assert_int_equal(a->n, b->n);
    assert_memory_equal(a->bytes, b->bytes, a->n);
}

static uint64_t reserved_bytes(imp_store *s)
{
    uint64_t segment_bytes, reserved;
    pthread_mutex_lock(&s->cat_lock);
    assert_int_equal(imp_cat_totals(s->cat, &segment_bytes, &reserved), 0);
    pthread_mutex_unlock(&s->cat_lock);
    return reserved;
}

/* ---- segments of every kind, made by hand */

static void random_bytes(imp_rng *rng, unsigned char *p, size_t n)
{
    for (size_t i = 0; i < n; i++) p[i] = (unsigned char)imp_rng_u64(rng);
}

static void shuffle(imp_rng *rng, uint32_t *v, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) v[i] = i;
    for (uint32_t i = n; i > 1; i--) {
        uint32_t j = below(rng, i), x = v[j];
        v[j] = v[i - 1];
        v[i - 1] = x;
    }
}

/* Sealed where $IMP_TEST_KEY_FILE is, as the other stores of these tests are then. */
static void make_segment(const char *dir, imp_seg_meta *m, imp_rng *rng)
{
    imp_seg_layout *l;
    imp_key *key = NULL;
    imp_cipher *cipher = NULL;
    const char *key_file = getenv("IMP_TEST_KEY_FILE");
    char name[32];
    if (key_file) {
        assert_int_equal(imp_key_read(key_file, &key), 0);
        assert_int_equal(imp_cipher_new(key, &cipher), 0);
        m->sealed = true;
    }
    assert_int_equal(imp_seg_layout_new(m, &l), 0);
    unsigned char *file = calloc(1, imp_seg_file_bytes(l));
    uint64_t *sums = calloc(imp_seg_sums_length(l), sizeof *sums);
    uint32_t *map = calloc(m->n_tokens, sizeof *map);
    assert_true(file && sums && map);
    for (uint32_t i = 0; i < imp_seg_n_chunks(l); i++) {
        imp_region region;
        uint32_t layer, chunk;
        imp_chunk_place c = imp_seg_chunk_at(l, i, &region, &layer, &chunk);
        if (region == IMP_REGION_MAP) {
            shuffle(rng, map, m->n_tokens);
            imp_seg_map_encode(l, map, file + c.offset);
        } else {
            random_bytes(rng, file + c.offset, c.data_bytes);
        }
        assert_int_equal(imp_seg_chunk_close(l, cipher, i, file + c.offset, c.n_bytes, sums), 0);
    }
    imp_seg_header_encode(l, sums, file);
    if (key) assert_int_equal(imp_seg_header_seal(key, cipher, file, imp_seg_header_bytes(l)), 0);
    imp_seg_name(m->segment, name);
    FILE *f = fopen(imp_test_path(dir, name), "w");
    assert_non_null(f);
    assert_int_equal(fwrite(file, 1, imp_seg_file_bytes(l), f), imp_seg_file_bytes(l));
    fclose(f);
    free(map);
    free(sums);
    free(file);
    imp_seg_layout_free(l);
    imp_cipher_free(cipher);
    imp_key_free(key);
}

enum { KIND_LAYERS = 2, KIND_MOST = 400 };

/* A prompt of up to three segments in a store of its own, which has no catalogue yet. */
static size_t make_kind(const char *dir, imp_rng *rng, imp_hash128 space, const int32_t *tokens)
{
    static const imp_rest rests[] = {IMP_REST_RAW, IMP_REST_Q8, IMP_REST_K8V4, IMP_REST_Q4};
    imp_layer_shape layers[KIND_LAYERS];
    for (int i = 0; i < KIND_LAYERS; i++) {
        layers[i] = (imp_layer_shape){1 + below(rng, 3), 32 * (1 + below(rng, 2)), 32 * (1 + below(rng, 2))};
    }
    assert_int_equal(mkdir(dir, 0700), 0);
    assert_int_equal(mkdir(imp_test_path(dir, "segments"), 0700), 0);
    size_t at = 0, n_segments = 1 + below(rng, 3);
    imp_rest rest = rests[below(rng, 4)];
    for (size_t i = 0; i < n_segments; i++) {
        imp_seg_meta m = {
            .segment = imp_rng_u64(rng) | 1,
            .space = space,
            .before = imp_prefix_hash(space, tokens, at),
            .first_token = at,
            .n_tokens = 1 + below(rng, 130),
            .n_layers = KIND_LAYERS,
            .type_k = IMP_TYPE_F16,
            .type_v = IMP_TYPE_F16,
            .rest = rest,
            .order = (imp_order)below(rng, 3),
            .chunk_tokens = 16 * (1 + below(rng, 5)),
            .alignment = below(rng, 2) ? 512 : 4096,
            .created_s = 1700000000,
            .model_name = "kinds",
            .layers = layers,
            .tokens = tokens + at,
            .paired = below(rng, 2),
            .probe_heads = below(rng, 4),
            .sketch_bits = 8 * below(rng, 5),
        };
        if (m.order == IMP_ORDER_CORE) {
            m.core_tokens = m.chunk_tokens < m.n_tokens ? m.chunk_tokens : m.n_tokens;
        }
        m.basis = m.sketch_bits ? 77 : 0;
        make_segment(dir, &m, rng);
        at += m.n_tokens;
    }
    return at;
}

static void every_kind_of_segment(void **state)
{
    const imp_hash128 space = {5, 6};
    int32_t tokens[KIND_MOST];
    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed());
    for (int i = 0; i < KIND_MOST; i++) tokens[i] = (int32_t)imp_rng_u64(&rng);
    for (int round = 0; round < 40; round++) {
        char name[16];
        snprintf(name, sizeof name, "%d", round);
        const char *dir = imp_test_path(*state, name);
        size_t n = make_kind(dir, &rng, space, tokens);
        imp_store *s;
        imp_store_opts opts;
        imp_reorder_report r;
        imp_world_opts(&opts);
        opts.order = (imp_order)below(&rng, 3);
        opts.chunk_tokens = 16 * below(&rng, 7); /* 0: theirs */
        static const unsigned keeps[] = {0, IMP_KEEP_PAIRED, IMP_KEEP_PROBE};
        opts.keep = keeps[below(&rng, 3)];
        assert_int_equal(imp_store_open(dir, &opts, &s), 0);
        dump before = dump_prompt(s, space, tokens, n);
        assert_int_equal(before.n_tokens, n);
        if (round % 4 > 0) add_history(s, space, tokens, n, &rng);
        assert_int_equal(imp_store_reorder(s, &r), 0);
        assert_true(r.n_reordered <= r.n_segments);
        if (round % 4 > 0 && opts.order != IMP_ORDER_TOKEN) assert_int_equal(r.n_reordered, r.n_segments);
        dump after = dump_prompt(s, space, tokens, n);
        assert_same(&before, &after);
        free(after.bytes);
        assert_int_equal(imp_store_verify(s, 0, NULL, NULL, NULL), 0);
        assert_int_equal(imp_store_reorder(s, &r), 0);
        assert_int_equal(r.n_reordered, 0); /* as it should be */
        imp_store_close(s);

        assert_int_equal(imp_world_rebuild(dir), 0);
        assert_int_equal(imp_store_open(dir, &opts, &s), 0);
        after = dump_prompt(s, space, tokens, n);
        assert_same(&before, &after);
        free(after.bytes);
        imp_store_close(s);
        free(before.bytes);
    }
}

/* The order is what the history says, layer by layer. */
static void by_importance(void **state)
{
    imp_world w;
    imp_store_opts opts;
    imp_path path;
    uint64_t header_bytes;
    int32_t tokens[64];
    float scores[64], was[WORLD_LAYERS][64];
    for (int i = 0; i < 64; i++) tokens[i] = i;
    imp_world_opts(&opts);
    opts.order = IMP_ORDER_IMPORTANCE;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    assert_int_equal(imp_world_commit(&w, tokens, 64, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    assert_int_equal(imp_store_match(w.store, w.space->id, tokens, 64, true, &path, &header_bytes), 0);
    imp_history *h;
    uint32_t n_before = 0;
    assert_int_equal(imp_history_get(w.store, path.spans[0].seg, &h), 0);
    for (uint32_t l = 0; l < WORLD_LAYERS; l++) {
        for (uint32_t t = 0; t < 64; t++) scores[t] = (float)(l == 0 ? t * 7 % 64 : 64 - t);
        imp_history_add(h, l, 0, 64, scores);
        n_before = imp_history_read(h, l, 0, 64, was[l]);
    }
    imp_history_put(w.store, h);
    imp_store_unpin(w.store, &path);
    assert_int_equal(imp_store_reorder(w.store, NULL), 0);
    assert_int_equal(imp_store_match(w.store, w.space->id, tokens, 64, true, &path, &header_bytes), 0);
    for (uint32_t l = 0; l < WORLD_LAYERS; l++) {
        const uint32_t *map = imp_seg_map(path.spans[0].seg, l);
        for (uint32_t slot = 1; slot < 64; slot++) {
            float a = was[l][map[slot - 1]], b = was[l][map[slot]];
            assert_true(a > b || (a == b && map[slot - 1] < map[slot]));
        }
    }
    /* the record came along, and nothing is new */
    assert_int_equal(imp_history_get(w.store, path.spans[0].seg, &h), 0);
    assert_int_equal(imp_history_read(h, 1, 0, 64, scores), n_before);
    assert_memory_equal(scores, was[1], sizeof scores);
    assert_int_equal(imp_history_news(h), 0);
    imp_history_put(w.store, h);
    imp_store_unpin(w.store, &path);
    imp_stats st;
    assert_int_equal(imp_store_stats(w.store, &st), 0);
    assert_int_equal(st.reorders, 1);
    assert_int_equal(st.disk_bytes, imp_world_du(*state));
    imp_world_close(&w);
}

/* ---- rows of evicted nodes */

static uint64_t node_at(imp_world *w, const int32_t *tokens, size_t n)
{
    imp_path path;
    uint64_t header_bytes;
    assert_int_equal(imp_store_match(w->store, w->space->id, tokens, n, false, &path, &header_bytes), 0);
    uint64_t id = path.n_spans ? path.spans[path.n_spans - 1].node : 0;
    imp_store_unpin(w->store, &path);
    return id;
}

/* Tokens 0..63 in one segment, of which 40 stay. */
static void make_evicted(imp_world *w, const char *dir, imp_order order, int32_t *tokens)
{
    imp_store_opts opts;
    int32_t other[64];
    imp_world_opts(&opts);
    opts.order = order;
    assert_int_equal(imp_world_open(w, dir, &opts, NULL), 0);
    for (int i = 0; i < 64; i++) other[i] = tokens[i] = i;
    other[40] = 999;
    assert_int_equal(imp_world_commit(w, tokens, 64, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w->store), 0);
    assert_int_equal(imp_world_commit(w, other, 64, 40, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w->store), 0);
    assert_int_equal(imp_store_remove(w->store, node_at(w, other, 64)), 0);
    assert_int_equal(imp_store_remove(w->store, node_at(w, tokens, 64)), 0);
    assert_int_equal(imp_world_check(w, tokens, 64, true), 40);
}

static void evicted_rows(void **state)
{
    int32_t tokens[64];
    imp_world w;
    imp_reorder_report r;
    imp_gc_report gc;
    for (int how = 0; how < 6; how++) {
        char name[16];
        snprintf(name, sizeof name, "%d", how);
        const char *dir = imp_test_path(*state, name);
        make_evicted(&w, dir, how < 3 ? IMP_ORDER_TOKEN : IMP_ORDER_CORE, tokens);
        uint64_t before = imp_world_du(dir);
        if (how % 3 == 0) {
            assert_int_equal(imp_store_reorder(w.store, &r), 0);
            assert_int_equal(r.n_segments, 1);
            assert_int_equal(r.n_reordered, 1);
            assert_true(r.freed_bytes > 0);
        } else if (how % 3 == 1) {
            assert_int_equal(imp_store_gc(w.store, &gc), 0);
            assert_true(gc.freed_bytes > 0);
            assert_int_equal(gc.removed_files, 0);
            assert_int_equal(gc.evicted_nodes, 0);
        } else {
            imp_reorder_step(w.store);
        }
        imp_stats st;
        assert_int_equal(imp_store_stats(w.store, &st), 0);
        assert_int_equal(st.reorders, 1);
        assert_int_equal(imp_world_check(&w, tokens, 64, true), 40);
        assert_int_equal(imp_world_verify(&w, false, true), 0);
        imp_path path;
        uint64_t header_bytes;
        assert_int_equal(imp_store_match(w.store, w.space->id, tokens, 64, true, &path, &header_bytes), 0);
        assert_int_equal(imp_seg_layout_meta(path.spans[0].seg->layout)->n_tokens, 40);
        imp_store_unpin(w.store, &path);
        assert_int_equal(imp_store_gc(w.store, NULL), 0);
        assert_true(imp_world_du(dir) < before);
        imp_reorder_step(w.store); /* nothing is left to do */
        assert_int_equal(imp_store_reorder(w.store, &r), 0);
        assert_int_equal(r.n_reordered, 0);
        assert_int_equal(imp_store_stats(w.store, &st), 0);
        assert_int_equal(st.reorders, 1);
        imp_world_close(&w);
        assert_int_equal(imp_world_rebuild(dir), 0);
        assert_int_equal(imp_world_open(&w, dir, NULL, NULL), 0);
        assert_int_equal(imp_world_check(&w, tokens, 64, true), 40);
        imp_world_close(&w);
    }
}

static int take_info(const imp_node_info *node, void *user)
{
    *(imp_node_info *)user = *node; /* of the last: only numbers are used */
    return 0;
}

static imp_node_info info_of(imp_world *w)
{
    imp_node_info info = {0};
    assert_int_equal(imp_store_list(w->store, take_info, &info), 0);
    return info;
}

/* Who names no size of chunks and nothing to keep gives others' segments another order, and nothing else. */
static void layouts_stay(void **state)
{
    enum { N = 64, STAY = 40 };
    imp_world w;
    imp_store_opts rich, plain, other;
    imp_reorder_report r;
    int32_t tokens[N], more[N];
    imp_world_rich_opts(&rich);
    rich.order = IMP_ORDER_TOKEN;
    imp_store_opts_init(&plain);
    plain.key_file = rich.key_file;
    plain.min_store_tokens = 4;
    plain.reorder_period_s = UINT32_MAX;
    plain.order = IMP_ORDER_CORE;
    other = plain;
    other.chunk_tokens = 32;
    other.keep = IMP_KEEP_PROBE;
    for (int i = 0; i < N; i++) more[i] = tokens[i] = i;
    more[STAY] = 999;
    for (int how = 0; how < 4; how++) {
        char name[16];
        snprintf(name, sizeof name, "%d", how);
        const char *dir = imp_test_path(*state, name);
        assert_int_equal(imp_world_open(&w, dir, &rich, NULL), 0);
        assert_int_equal(imp_world_commit(&w, tokens, N, 0, 0, NULL), 0);
        assert_int_equal(imp_store_flush(w.store), 0);
        if (how > 0) { /* rows that nobody uses */
            assert_int_equal(imp_world_commit(&w, more, N, STAY, 0, NULL), 0);
            assert_int_equal(imp_store_flush(w.store), 0);
            assert_int_equal(imp_store_remove(w.store, node_at(&w, more, N)), 0);
            assert_int_equal(imp_store_remove(w.store, node_at(&w, tokens, N)), 0);
        }
        imp_node_info was = info_of(&w);
        assert_true(was.chunk_tokens == 16 && was.paired && was.sketch_bits > 0 && was.probe_heads > 0);
        assert_int_equal(was.rest, IMP_REST_Q8);
        imp_world_close(&w);

        assert_int_equal(imp_world_open(&w, dir, &plain, NULL), 0);
        if (how < 2) assert_int_equal(imp_store_reorder(w.store, &r), 0);
        if (how == 2) assert_int_equal(imp_store_gc(w.store, NULL), 0);
        if (how == 3) imp_reorder_step(w.store);
        imp_node_info is = info_of(&w);
        assert_int_not_equal(is.segment, was.segment); /* it was written anew */
        assert_int_equal(is.order, IMP_ORDER_CORE);
        assert_int_equal(is.chunk_tokens, was.chunk_tokens);
        assert_int_equal(is.paired, was.paired);
        assert_int_equal(is.sketch_bits, was.sketch_bits);
        assert_int_equal(is.probe_heads, was.probe_heads);
        assert_int_equal(is.rest, was.rest);
        assert_int_equal(imp_world_check(&w, tokens, N, true), how ? STAY : N);
        assert_int_equal(imp_world_verify(&w, false, true), 0);
        if (how == 0) { /* new ones are as the defaults say */
            for (int i = 0; i < N; i++) more[i] = 5000 + i;
            assert_int_equal(imp_world_commit(&w, more, N, 0, 0, NULL), 0);
            assert_int_equal(imp_store_flush(w.store), 0);
            is = info_of(&w);
            assert_true(is.chunk_tokens == 64 && !is.paired && is.sketch_bits == 0);
            for (int i = 0; i < N; i++) more[i] = i == STAY ? 999 : i;
            assert_int_equal(imp_store_remove(w.store, is.id), 0);
        }
        imp_world_close(&w);

        /* and who says how, is heard */
        other.order = IMP_ORDER_TOKEN;
        assert_int_equal(imp_world_open(&w, dir, &other, NULL), 0);
        assert_int_equal(imp_store_reorder(w.store, &r), 0);
        assert_int_equal(r.n_reordered, 1);
        is = info_of(&w);
        assert_true(is.chunk_tokens == 32 && !is.paired && is.sketch_bits == was.sketch_bits);
        assert_int_equal(imp_world_check(&w, tokens, N, true), how ? STAY : N);
        imp_world_close(&w);
    }
}

/* The background acts on enough news, and not at all where tokens lie as in the prompt. */
static void background(void **state)
{
    imp_world w;
    imp_store_opts opts;
    imp_stats st;
    imp_rng rng;
    int32_t tokens[200];
    imp_rng_seed(&rng, imp_test_seed());
    for (int i = 0; i < 200; i++) tokens[i] = i;
    imp_world_opts(&opts);
    opts.reorder_after = 3;
    for (int order = 0; order < 2; order++) {
        const char *dir = imp_test_path(*state, order ? "core" : "token");
        opts.order = order ? IMP_ORDER_CORE : IMP_ORDER_TOKEN;
        assert_int_equal(imp_world_open(&w, dir, &opts, NULL), 0);
        assert_int_equal(imp_world_commit(&w, tokens, 200, 0, 0, NULL), 0);
        assert_int_equal(imp_store_flush(w.store), 0);
        for (int i = 0; i < 5; i++) {
            add_history(w.store, w.space->id, tokens, 200, &rng);
            do { /* one a step, unless the writer's thread is at it */
                imp_reorder_step(w.store);
                assert_int_equal(imp_store_stats(w.store, &st), 0);
            } while (order > 0 && i >= 2 && st.reorders < 4);
            assert_int_equal(st.reorders, order == 0 || i < 2 ? 0 : 4);
            assert_int_equal(imp_world_check(&w, tokens, 200, true), 200);
        }
        imp_world_close(&w);
    }
    /* and on its own */
    opts.reorder_after = 1;
    opts.reorder_period_s = 1;
    assert_int_equal(imp_world_open(&w, imp_test_path(*state, "core"), &opts, NULL), 0);
    add_history(w.store, w.space->id, tokens, 200, &rng);
    do {
        usleep(20000);
        assert_int_equal(imp_store_stats(w.store, &st), 0);
    } while (st.reorders < 4);
    assert_int_equal(imp_world_check(&w, tokens, 200, true), 200);
    imp_world_close(&w);
    opts.flags = IMP_STORE_READONLY;
    assert_int_equal(imp_world_open(&w, imp_test_path(*state, "core"), &opts, NULL), 0);
    assert_int_equal(imp_store_reorder(w.store, NULL), IMP_E_PERM);
    assert_int_equal(imp_store_reorder(NULL, NULL), IMP_E_ARG);
    imp_world_close(&w);
}

static void no_room(void **state)
{
    imp_world w;
    imp_store_opts opts;
    imp_rng rng;
    imp_reorder_report r;
    int32_t tokens[4096];
    imp_rng_seed(&rng, imp_test_seed());
    for (int i = 0; i < 4096; i++) tokens[i] = i;
    imp_world_opts(&opts);
    opts.order = IMP_ORDER_CORE;
    opts.limit_bytes = 1 << 20;
    opts.segment_tokens = 512;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    size_t n = 4096;
    assert_int_equal(imp_world_commit(&w, tokens, n, 0, 0, NULL), IMP_E_FULL);
    for (n = 256; imp_world_commit(&w, tokens, n, 0, 0, NULL) == 0 && imp_store_flush(w.store) == 0; n += 256) {
        /* held, so that nothing of it may be evicted */
        assert_int_equal(imp_store_pin(w.store, node_at(&w, tokens, n), 1), 0);
    }
    int64_t known = imp_world_check(&w, tokens, n, true);
    assert_true(known > 0);
    add_history(w.store, w.space->id, tokens, n, &rng);
    int rc = imp_store_reorder(w.store, &r);
    if (rc < 0) assert_int_equal(rc, IMP_E_FULL);
    assert_int_equal(imp_world_check(&w, tokens, n, true), known);
    assert_true(imp_world_du(*state) <= 1 << 20);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
}

/* A full store: the longest unused makes room for the copy, and the limit holds. */
static void full(void **state)
{
    imp_world w;
    imp_store_opts opts;
    imp_rng rng;
    imp_reorder_report r;
    imp_stats st;
    int32_t tokens[256];
    imp_rng_seed(&rng, imp_test_seed());
    imp_world_opts(&opts);
    opts.order = IMP_ORDER_CORE;
    opts.limit_bytes = 1 << 20;
    opts.segment_tokens = 256;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    int n = 0;
    do {
        for (int i = 0; i < 256; i++) tokens[i] = 1000 * n + i;
        n++;
        assert_int_equal(imp_world_commit(&w, tokens, 256, 0, 0, NULL), 0);
        assert_int_equal(imp_store_flush(w.store), 0);
        assert_int_equal(imp_store_stats(w.store, &st), 0);
    } while (st.evicted_nodes == 0);
    add_history(w.store, w.space->id, tokens, 256, &rng);
    assert_int_equal(imp_store_reorder(w.store, &r), 0);
    assert_true(r.n_reordered > 0);
    assert_int_equal(imp_world_check(&w, tokens, 256, true), 256);
    assert_true(imp_world_du(*state) <= 1 << 20);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
}

/* The background doesn't keep a store from being closed, and leaves nothing behind. */
static void closed_meanwhile(void **state)
{
    imp_world w;
    imp_store_opts opts;
    imp_rng rng;
    imp_stats st;
    int32_t tokens[200];
    imp_rng_seed(&rng, imp_test_seed());
    for (int i = 0; i < 200; i++) tokens[i] = i;
    imp_world_opts(&opts);
    opts.order = IMP_ORDER_CORE;
    opts.reorder_after = 1;
    opts.reorder_period_s = 1;
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    assert_int_equal(imp_world_commit(&w, tokens, 200, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    add_history(w.store, w.space->id, tokens, 200, &rng);
    assert_int_equal(imp_io_fault_log_start(100), 0);
    imp_io_fault f = {.kind = IMP_IO_WRITE, .nth = 1, .stay = true, .action = IMP_IO_DELAY, .value = 20000000};
    imp_io_fault_add(&f);
    while (imp_io_fault_count(IMP_IO_WRITE) == 0) usleep(1000);
    assert_int_equal(imp_store_stats(w.store, &st), 0);
    imp_world_close(&w);
    imp_io_fault_clear();
    assert_int_equal(n_files(*state, "segments"), st.n_segments);
    assert_int_equal(imp_world_open(&w, *state, &opts, NULL), 0);
    assert_int_equal(reserved_bytes(w.store), 0);
    assert_int_equal(imp_world_check(&w, tokens, 200, true), 200);
    imp_world_close(&w);
}

static void in_memory(void **state)
{
    imp_world w;
    imp_store_opts opts;
    imp_rng rng;
    imp_reorder_report r;
    int32_t tokens[150];
    (void)state;
    imp_rng_seed(&rng, imp_test_seed());
    for (int i = 0; i < 150; i++) tokens[i] = i;
    imp_world_opts(&opts);
    opts.flags = IMP_STORE_MEMORY;
    opts.host_cache_bytes = 8 << 20;
    opts.order = IMP_ORDER_IMPORTANCE;
    assert_int_equal(imp_world_open(&w, NULL, &opts, NULL), 0);
    assert_int_equal(imp_world_commit(&w, tokens, 150, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    for (int i = 0; i < 3; i++) {
        add_history(w.store, w.space->id, tokens, 150, &rng);
        dump before = dump_prompt(w.store, w.space->id, tokens, 150);
        assert_int_equal(imp_store_reorder(w.store, &r), 0);
        assert_int_equal(r.n_reordered, 3);
        dump after = dump_prompt(w.store, w.space->id, tokens, 150);
        assert_same(&before, &after);
        free(before.bytes);
        free(after.bytes);
        assert_int_equal(imp_world_check(&w, tokens, 150, true), 150);
    }
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
}

/* ---- a naive twin: the sequences that are stored */

enum { TWIN_MAX = 300, TWIN_TOKENS = 200, HELD_MAX = 4 };

typedef struct twin {
    int32_t tokens[TWIN_MAX][TWIN_TOKENS];
    size_t n_tokens[TWIN_MAX];
    size_t n;
} twin;

static size_t common(const int32_t *a, size_t n_a, const int32_t *b, size_t n_b)
{
    size_t n = 0;
    while (n < n_a && n < n_b && a[n] == b[n]) n++;
    return n;
}

static size_t twin_match(const twin *t, const int32_t *tokens, size_t n)
{
    size_t best = 0;
    for (size_t i = 0; i < t->n; i++) {
        size_t same = common(t->tokens[i], t->n_tokens[i], tokens, n);
        if (same > best) best = same;
    }
    return best;
}

static size_t twin_prompt(const twin *t, imp_rng *rng, int32_t *tokens)
{
    size_t n = 0;
    if (t->n > 0 && below(rng, 8) > 0) {
        size_t i = below(rng, (uint32_t)t->n);
        n = imp_rng_below(rng, t->n_tokens[i] + 1);
        memcpy(tokens, t->tokens[i], n * sizeof *tokens);
    }
    size_t end = n + 1 + below(rng, below(rng, 3) ? 20 : 120);
    if (end > TWIN_TOKENS) end = TWIN_TOKENS;
    while (n < end) tokens[n++] = (int32_t)below(rng, 3);
    return n;
}

/* Everything from token `from` of the prompt on is gone. */
static void twin_remove(twin *t, const int32_t *tokens, size_t from)
{
    for (size_t i = 0; i < t->n; i++) {
        if (common(t->tokens[i], t->n_tokens[i], tokens, from + 1) == from + 1) t->n_tokens[i] = from;
    }
}

typedef struct find {
    uint64_t node, first;
    int pinned;
} find;

static int find_node(const imp_node_info *n, void *user)
{
    find *f = user;
    if (n->id != f->node) return 0;
    f->first = n->first_token;
    f->pinned = n->pinned;
    return 1;
}

/* A prefix in use, and what it held when it was acquired. */
typedef struct held {
    imp_world *w;
    imp_path path;
    dump before;
} held;

static void let_go(held *h)
{
    if (!h->w) return;
    dump now = dump_path(&h->path);
    assert_same(&h->before, &now);
    free(now.bytes);
    free(h->before.bytes);
    imp_store_unpin(h->w->store, &h->path);
    h->w = NULL;
}

static void twin_check(const twin *t, imp_world *w)
{
    for (size_t i = 0; i < t->n; i++) {
        assert_int_equal(imp_world_check(w, t->tokens[i], t->n_tokens[i], true), t->n_tokens[i]);
    }
}

static void against_a_twin(void **state)
{
    twin *t = calloc(1, sizeof *t);
    int32_t tokens[TWIN_TOKENS], pinned[TWIN_TOKENS];
    size_t n_pinned = 0, n_held = 0;
    held holds[HELD_MAX] = {0};
    imp_world w[2];
    imp_store_opts opts[2];
    imp_rng rng;
    uint64_t header_bytes;
    assert_non_null(t);
    imp_rng_seed(&rng, imp_test_seed());
    for (int i = 0; i < 2; i++) {
        imp_world_opts(&opts[i]);
        opts[i].min_store_tokens = 1;
        opts[i].order = i ? IMP_ORDER_CORE : IMP_ORDER_IMPORTANCE;
        opts[i].chunk_tokens = i ? 32 : 16;
        opts[i].keep = i ? IMP_KEEP_PAIRED : 0;
        assert_int_equal(imp_world_open(&w[i], *state, &opts[i], NULL), 0);
    }
    for (int op = 0; op < 160; op++) {
        uint32_t which = below(&rng, 2);
        imp_world *at = &w[which];
        size_t n = twin_prompt(t, &rng, tokens), known = twin_match(t, tokens, n);
        switch (below(&rng, 10)) {
        case 0:
        case 1:
        case 2: /* often a split */
            assert_int_equal(imp_world_commit(at, tokens, n, known, 0, NULL), 0);
            assert_int_equal(imp_store_flush(at->store), 0);
            assert_true(t->n < TWIN_MAX);
            memcpy(t->tokens[t->n], tokens, n * sizeof *tokens);
            t->n_tokens[t->n++] = n;
            break;
        case 3:
        case 4:
            add_history(at->store, at->space->id, tokens, n, &rng);
            assert_int_equal(imp_store_reorder(at->store, NULL), 0);
            break;
        case 5:
            imp_reorder_step(at->store);
            break;
        case 6: { /* as an eviction would */
            find f = {.node = node_at(at, tokens, n)};
            if (!f.node || below(&rng, 2)) break;
            assert_int_equal(imp_store_list(at->store, find_node, &f), 1);
            assert_int_equal(imp_store_remove(at->store, f.node), 0);
            twin_remove(t, tokens, f.first);
            if (n_pinned > f.first && common(pinned, n_pinned, tokens, n) > f.first) n_pinned = 0;
            break;
        }
        case 7:
            if (n_pinned > 0 || known == 0) break;
            memcpy(pinned, tokens, known * sizeof *pinned);
            n_pinned = known;
            assert_int_equal(imp_store_pin(at->store, node_at(at, tokens, known), 1), 0);
            break;
        case 8: {
            held *h = &holds[n_held++ % HELD_MAX];
            let_go(h);
            h->w = at;
            assert_int_equal(imp_store_match(at->store, at->space->id, tokens, n, true, &h->path, &header_bytes), 0);
            h->before = dump_path(&h->path);
            break;
        }
        case 9:
            if (below(&rng, 2)) break;
            for (int i = 0; i < HELD_MAX; i++) {
                if (holds[i].w == at) let_go(&holds[i]);
            }
            imp_world_close(at);
            assert_int_equal(imp_world_open(at, *state, &opts[which], NULL), 0);
            break;
        }
        assert_int_equal(imp_world_check(&w[below(&rng, 2)], tokens, n, true), twin_match(t, tokens, n));
        if (n_pinned > 0) {
            find f = {.node = node_at(&w[below(&rng, 2)], pinned, n_pinned)};
            assert_int_equal(imp_store_list(w[below(&rng, 2)].store, find_node, &f), 1);
            assert_true(f.pinned);
        }
    }
    for (int i = 0; i < HELD_MAX; i++) let_go(&holds[i]);
    for (int i = 0; i < 2; i++) twin_check(t, &w[i]);
    assert_int_equal(imp_store_gc(w[0].store, NULL), 0);
    assert_int_equal(imp_world_verify(&w[1], false, true), 0);
    imp_stats st;
    assert_int_equal(imp_store_stats(w[1].store, &st), 0);
    assert_int_equal(st.n_segments, n_files(*state, "segments"));
    for (int i = 0; i < 2; i++) twin_check(t, &w[i]);
    for (int i = 0; i < 2; i++) imp_world_close(&w[i]);
    assert_int_equal(imp_world_rebuild(*state), 0);
    assert_int_equal(imp_world_open(&w[0], *state, &opts[0], NULL), 0);
    twin_check(t, &w[0]);
    assert_int_equal(imp_world_verify(&w[0], false, true), 0);
    imp_world_close(&w[0]);
    free(t);
}

/* ---- several processes */

enum { SHARED_TOKENS = 300 };

static void worker(const char *dir, const int32_t *tokens, uint64_t seed)
{
    imp_world w;
    imp_store_opts opts;
    imp_rng rng;
    signal(SIGSEGV, SIG_DFL);
    imp_rng_seed(&rng, seed);
    imp_world_opts(&opts);
    opts.order = seed % 2 ? IMP_ORDER_CORE : IMP_ORDER_IMPORTANCE;
    if (imp_world_open(&w, dir, &opts, NULL) < 0) _exit(1);
    for (int i = 0; i < 8; i++) {
        add_history(w.store, w.space->id, tokens, SHARED_TOKENS, &rng);
        int rc = imp_store_reorder(w.store, NULL);
        if (rc < 0) fprintf(stderr, "reorder: %s\n", imp_last_error());
        if (rc < 0 && rc != IMP_E_BUSY) _exit(2);
        int64_t n = imp_world_check(&w, tokens, SHARED_TOKENS, true);
        if (n != SHARED_TOKENS) _exit(3);
    }
    imp_world_close(&w);
    _exit(0);
}

static void two_processes(void **state)
{
    imp_world w;
    int32_t tokens[SHARED_TOKENS];
    pid_t pids[2];
    uint64_t seed = imp_test_seed();
    for (int i = 0; i < SHARED_TOKENS; i++) tokens[i] = i;
    assert_int_equal(imp_world_open(&w, *state, NULL, NULL), 0);
    assert_int_equal(imp_world_commit(&w, tokens, SHARED_TOKENS, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w.store), 0);
    imp_world_close(&w);
    for (uint64_t i = 0; i < 2; i++) {
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] == 0) worker(*state, tokens, 2 * seed + i);
    }
    for (int i = 0; i < 2; i++) {
        int status;
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        assert_int_equal(status, 0);
    }
    assert_int_equal(imp_world_open(&w, *state, NULL, NULL), 0);
    assert_int_equal(imp_world_check(&w, tokens, SHARED_TOKENS, true), SHARED_TOKENS);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_stats st;
    assert_int_equal(imp_store_stats(w.store, &st), 0);
    assert_int_equal(st.n_segments, n_files(*state, "segments"));
    imp_world_close(&w);
}

/* One loses: its file goes, and what it had reserved. */
static void *reorder_once(void *user)
{
    imp_world *w = user;
    return imp_store_reorder(w->store, NULL) == 0 ? NULL : w;
}

static void lost_race(void **state)
{
    imp_world w[2];
    imp_store_opts opts;
    imp_stats st;
    imp_rng rng;
    pthread_t thread;
    void *failed;
    int32_t tokens[60];
    uint64_t n_lost = 0;
    imp_rng_seed(&rng, imp_test_seed());
    for (int i = 0; i < 60; i++) tokens[i] = i;
    imp_world_opts(&opts);
    opts.order = IMP_ORDER_CORE;
    for (int i = 0; i < 2; i++) assert_int_equal(imp_world_open(&w[i], *state, &opts, NULL), 0);
    assert_int_equal(imp_world_commit(&w[0], tokens, 60, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w[0].store), 0);
    for (int round = 0; round < 5; round++) {
        uint64_t before = 0, after = 0;
        for (int i = 0; i < 2; i++) {
            add_history(w[i].store, w[i].space->id, tokens, 60, &rng);
            assert_int_equal(imp_store_stats(w[i].store, &st), 0);
            before += st.reorders;
        }
        imp_io_fault f = {.kind = IMP_IO_RENAME, .nth = 1, .action = IMP_IO_DELAY, .value = 50000000};
        imp_io_fault_add(&f);
        assert_int_equal(pthread_create(&thread, NULL, reorder_once, &w[0]), 0);
        usleep(10000);
        assert_int_equal(imp_store_reorder(w[1].store, NULL), 0);
        pthread_join(thread, &failed);
        imp_io_fault_clear();
        assert_null(failed);
        for (int i = 0; i < 2; i++) {
            assert_int_equal(imp_world_check(&w[i], tokens, 60, true), 60);
            assert_int_equal(imp_store_stats(w[i].store, &st), 0);
            after += st.reorders;
        }
        n_lost += after - before < 2;
        assert_int_equal(n_files(*state, "segments"), 1);
        assert_int_equal(reserved_bytes(w[0].store), 0);
    }
    assert_true(n_lost > 0);
    assert_int_equal(imp_world_verify(&w[0], false, true), 0);
    for (int i = 0; i < 2; i++) imp_world_close(&w[i]);
}

typedef struct reader {
    imp_world *w;
    const int32_t *tokens;
    atomic_bool stop;
    int n_wrong;
} reader;

static void *read_on(void *user)
{
    reader *r = user;
    while (!atomic_load(&r->stop)) r->n_wrong += imp_world_check(r->w, r->tokens, SHARED_TOKENS, true) != SHARED_TOKENS;
    return NULL;
}

/* Requests of the same process and of another instance go on meanwhile. */
static void beside_readers(void **state)
{
    imp_world w[2];
    imp_store_opts opts;
    imp_stats st;
    imp_rng rng;
    pthread_t threads[2];
    reader readers[2];
    int32_t tokens[SHARED_TOKENS];
    imp_rng_seed(&rng, imp_test_seed());
    for (int i = 0; i < SHARED_TOKENS; i++) tokens[i] = i;
    imp_world_opts(&opts);
    opts.order = IMP_ORDER_IMPORTANCE;
    for (int i = 0; i < 2; i++) assert_int_equal(imp_world_open(&w[i], *state, &opts, NULL), 0);
    assert_int_equal(imp_world_commit(&w[0], tokens, SHARED_TOKENS, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w[0].store), 0);
    for (int i = 0; i < 2; i++) {
        readers[i] = (reader){.w = &w[i], .tokens = tokens};
        assert_int_equal(pthread_create(&threads[i], NULL, read_on, &readers[i]), 0);
    }
    for (int i = 0; i < 30; i++) {
        add_history(w[0].store, w[0].space->id, tokens, SHARED_TOKENS, &rng);
        assert_int_equal(imp_store_reorder(w[0].store, NULL), 0);
    }
    for (int i = 0; i < 2; i++) {
        atomic_store(&readers[i].stop, true);
        pthread_join(threads[i], NULL);
        assert_int_equal(readers[i].n_wrong, 0);
        assert_int_equal(imp_store_stats(w[i].store, &st), 0);
        assert_int_equal(st.corrupt_chunks, 0);
    }
    for (int i = 0; i < 2; i++) imp_world_close(&w[i]);
}

/* Killed between the switch and the unlink: the next open finds both files, and pins hold. */
static void both_files_left(void **state)
{
    imp_world w;
    imp_store_opts opts;
    imp_rng rng;
    imp_path path;
    uint64_t header_bytes;
    int32_t tokens[64];
    char old[32], new[32], command[1024];
    imp_rng_seed(&rng, imp_test_seed());
    for (int i = 0; i < 64; i++) tokens[i] = i;
    imp_world_opts(&opts);
    opts.order = IMP_ORDER_CORE;
    for (int round = 0; round < 8; round++) {
        snprintf(command, sizeof command, "rm -rf '%s/store'", (char *)*state);
        assert_int_equal(system(command), 0);
        const char *dir = imp_test_path(*state, "store");
        assert_int_equal(imp_world_open(&w, dir, &opts, NULL), 0);
        assert_int_equal(imp_world_commit(&w, tokens, 64, 0, 0, NULL), 0);
        assert_int_equal(imp_store_flush(w.store), 0);
        assert_int_equal(imp_store_pin(w.store, node_at(&w, tokens, 64), 1), 0);
        assert_int_equal(imp_store_match(w.store, w.space->id, tokens, 64, true, &path, &header_bytes), 0);
        imp_seg_name(path.spans[0].segment, old);
        imp_store_unpin(w.store, &path);
        snprintf(command, sizeof command, "cp '%s/%s' '%s/kept'", dir, old, (char *)*state);
        assert_int_equal(system(command), 0);
        add_history(w.store, w.space->id, tokens, 64, &rng);
        assert_int_equal(imp_store_reorder(w.store, NULL), 0);
        assert_int_equal(imp_store_match(w.store, w.space->id, tokens, 64, true, &path, &header_bytes), 0);
        imp_seg_name(path.spans[0].segment, new);
        imp_store_unpin(w.store, &path);
        imp_world_close(&w);
        snprintf(command, sizeof command, "cp '%s/kept' '%s/%s'", (char *)*state, dir, old);
        assert_int_equal(system(command), 0);
        assert_int_equal(n_files(dir, "segments"), 2);
        assert_int_equal(imp_world_open(&w, dir, &opts, NULL), 0);
        assert_int_equal(n_files(dir, "segments"), 1);
        assert_int_equal(access(imp_test_path(dir, new), R_OK), 0);
        assert_int_equal(imp_world_check(&w, tokens, 64, true), 64);
        find f = {.node = node_at(&w, tokens, 64)};
        assert_int_equal(imp_store_list(w.store, find_node, &f), 1);
        assert_true(f.pinned);
        assert_int_equal(imp_world_verify(&w, false, true), 0);
        imp_world_close(&w);
    }
}

/* ---- what fails */

enum { FAULT_TOKENS = 150 };

static void open_for_faults(imp_world *w, const char *dir)
{
    imp_store_opts opts;
    imp_world_opts(&opts);
    opts.order = IMP_ORDER_CORE;
    assert_int_equal(imp_world_open(w, dir, &opts, NULL), 0);
}

static void make_for_faults(imp_world *w, const char *dir, int32_t *tokens)
{
    for (int i = 0; i < FAULT_TOKENS; i++) tokens[i] = i;
    open_for_faults(w, dir);
    assert_int_equal(imp_world_commit(w, tokens, FAULT_TOKENS, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(w->store), 0);
}

static void still_there(imp_world *w, const char *dir, const int32_t *tokens, const char *what, uint64_t nth)
{
    imp_stats st;
    assert_int_equal(reserved_bytes(w->store), 0);
    for (int again = 0; again < 2; again++) {
        int64_t n = imp_world_check(w, tokens, FAULT_TOKENS, true);
        if (n != FAULT_TOKENS) fail_msg("%s %llu: %lld tokens", what, (unsigned long long)nth, (long long)n);
        if (again) break;
        imp_world_close(w);
        open_for_faults(w, dir);
    }
    assert_int_equal(imp_world_verify(w, false, true), 0);
    assert_int_equal(imp_store_stats(w->store, &st), 0);
    assert_int_equal(st.n_segments, n_files(dir, "segments"));
    assert_int_equal(st.corrupt_chunks, 0);
}

static void every_io_error(void **state)
{
    static const imp_io_kind kinds[] = {IMP_IO_OPEN, IMP_IO_READ, IMP_IO_WRITE, IMP_IO_FSYNC, IMP_IO_RENAME,
                                        IMP_IO_UNLINK};
    static const int errors[] = {EIO, ENOSPC};
    imp_world w;
    imp_rng rng;
    int32_t tokens[FAULT_TOKENS];
    imp_rng_seed(&rng, imp_test_seed());
    make_for_faults(&w, *state, tokens);
    for (size_t k = 0; k < 2 * sizeof kinds / sizeof kinds[0]; k++) {
        imp_io_kind kind = kinds[k / 2];
        unsigned n_hit = 0;
        for (uint64_t nth = 1;; nth += nth < 6 ? 1 : 5) {
            imp_reorder_report r;
            add_history(w.store, w.space->id, tokens, FAULT_TOKENS, &rng);
            imp_io_fault f = {.kind = kind, .nth = nth, .action = IMP_IO_ERRNO, .value = (uint64_t)errors[k % 2]};
            int rule = imp_io_fault_add(&f);
            int rc = imp_store_reorder(w.store, &r);
            uint64_t hits = imp_io_fault_hits(rule);
            imp_io_fault_clear();
            if (hits == 0) assert_int_equal(rc, 0);
            still_there(&w, *state, tokens, imp_io_kind_name(kind), nth);
            if (hits == 0) break;
            n_hit++;
        }
        assert_true(n_hit > 0 || kind == IMP_IO_OPEN);
    }
    imp_world_close(&w);
}

static void every_allocation(void **state)
{
    imp_world w;
    imp_rng rng;
    int32_t tokens[FAULT_TOKENS];
    imp_rng_seed(&rng, imp_test_seed());
    make_for_faults(&w, *state, tokens);
    for (uint64_t nth = 1;; nth += nth < 60 ? 1 : 7) {
        add_history(w.store, w.space->id, tokens, FAULT_TOKENS, &rng);
        imp_alloc_fail_at(nth, 0);
        int rc = imp_store_reorder(w.store, NULL);
        uint64_t n = imp_alloc_fail_at(0, 0);
        if (rc < 0) assert_true(rc == IMP_E_NOMEM || rc == IMP_E_IO || rc == IMP_E_BUSY);
        still_there(&w, *state, tokens, "allocation", nth);
        if (n < nth) break;
    }
    imp_world_close(&w);
}

/* A bad chunk on the way: what it holds is dropped, nothing else, and the other segments are reordered. */
static void bad_chunk_on_the_way(void **state)
{
    imp_world w;
    imp_rng rng;
    int32_t tokens[FAULT_TOKENS];
    imp_path path;
    uint64_t header_bytes;
    imp_reorder_report r;
    imp_stats st;
    imp_rng_seed(&rng, imp_test_seed());
    make_for_faults(&w, *state, tokens);
    add_history(w.store, w.space->id, tokens, FAULT_TOKENS, &rng);
    assert_int_equal(imp_store_match(w.store, w.space->id, tokens, FAULT_TOKENS, true, &path, &header_bytes), 0);
    const imp_span *sp = &path.spans[path.n_spans - 1];
    imp_chunk_place c = imp_seg_chunk(sp->seg->layout, IMP_REGION_V, 1, 1);
    uint64_t depth = sp->depth, id = sp->segment;
    uint32_t first = imp_seg_chunk_token(sp->seg, IMP_REGION_V, 1, 1, 0);
    imp_store_unpin(w.store, &path);
    char name[32];
    imp_seg_name(id, name);
    FILE *f = fopen(imp_test_path(*state, name), "r+");
    assert_non_null(f);
    fseek(f, (long)c.offset + 3, SEEK_SET);
    int byte = fgetc(f);
    fseek(f, (long)c.offset + 3, SEEK_SET);
    fputc(byte ^ 4, f);
    fclose(f);
    assert_int_equal(imp_store_reorder(w.store, &r), 0);
    assert_int_equal(r.n_reordered, r.n_segments - 1);
    assert_int_equal(imp_store_stats(w.store, &st), 0);
    assert_int_equal(st.corrupt_chunks, 1);
    assert_int_equal(imp_world_check(&w, tokens, FAULT_TOKENS, true), depth + first);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    /* the rows before it are written anew without the bad ones */
    assert_int_equal(imp_store_reorder(w.store, &r), 0);
    assert_int_equal(imp_world_check(&w, tokens, FAULT_TOKENS, true), depth + first);
    assert_int_equal(imp_world_verify(&w, false, true), 0);
    imp_world_close(&w);
}

/* One byte of a reordered segment: verify names it, and drops from the first token on that it holds. */
static void one_byte(void **state)
{
    imp_world w;
    imp_rng rng;
    int32_t tokens[FAULT_TOKENS];
    imp_rng_seed(&rng, imp_test_seed());
    for (int round = 0; round < 24; round++) {
        char name[32], sub[16];
        snprintf(sub, sizeof sub, "%d", round);
        const char *dir = imp_test_path(*state, sub);
        imp_path path;
        uint64_t header_bytes;
        make_for_faults(&w, dir, tokens);
        add_history(w.store, w.space->id, tokens, FAULT_TOKENS, &rng);
        assert_int_equal(imp_store_reorder(w.store, NULL), 0);
        assert_int_equal(imp_store_match(w.store, w.space->id, tokens, FAULT_TOKENS, true, &path, &header_bytes), 0);
        const imp_span *sp = &path.spans[below(&rng, (uint32_t)path.n_spans)];
        imp_region region;
        uint32_t layer, chunk, index = below(&rng, imp_seg_n_chunks(sp->seg->layout));
        imp_chunk_place c = imp_seg_chunk_at(sp->seg->layout, index, &region, &layer, &chunk);
        int64_t expected = (int64_t)sp->depth + imp_seg_chunk_token(sp->seg, region, layer, chunk, 0);
        long at = (long)c.offset + (long)below(&rng, c.n_bytes);
        imp_seg_name(sp->segment, name);
        imp_store_unpin(w.store, &path);
        imp_world_close(&w);
        FILE *f = fopen(imp_test_path(dir, name), "r+");
        assert_non_null(f);
        fseek(f, at, SEEK_SET);
        int byte = fgetc(f);
        fseek(f, at, SEEK_SET);
        fputc(byte ^ (1 << below(&rng, 8)), f);
        fclose(f);
        open_for_faults(&w, dir);
        if (region == IMP_REGION_MAP) {
            assert_int_equal(imp_world_check(&w, tokens, FAULT_TOKENS, true), expected);
        } else {
            assert_int_equal(imp_world_verify(&w, true, false), 1);
        }
        assert_int_equal(imp_world_check(&w, tokens, FAULT_TOKENS, true), expected);
        assert_int_equal(imp_world_verify(&w, false, true), 0);
        imp_world_close(&w);
    }
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(every_kind_of_segment), TEST(by_importance),    TEST(evicted_rows), TEST(layouts_stay),   TEST(background),
        TEST(no_room),               TEST(full),             TEST(closed_meanwhile), TEST(in_memory),
        TEST(against_a_twin),        TEST(two_processes),    TEST(lost_race),      TEST(beside_readers),
        TEST(both_files_left),       TEST(every_io_error),   TEST(every_allocation), TEST(bad_chunk_on_the_way),
        TEST(one_byte),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
