/* score.c: exact H2O scores.
 *
 * The queries of one KV head (its rows times its heads) make a *tile*; more than 256 are cut into several. The prefix is
 * cut into *blocks* of 64 tokens. For a wave of tiles (as many as fit 256 queries, so that the scratch stays small
 * whatever the model) three steps follow each other:
 *
 *     1  each (tile, block), in parallel: widen the keys, take the dot products, keep exp(logit - block's max) with the
 *        block's maximum and sum per query
 *     2  per query: the maximum and sum over all blocks; w[block] = exp(block's max - max) / sum
 *     3  each block, in parallel: the weighted sums over the queries, added tile by tile
 *
 * Who computes what depends on the threads; what is added to what, and in which order, doesn't. So the scores are the
 * same to the bit for any number of threads.
 */
#include "select/select.h"

#include <stdbool.h>
#include <string.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/status.h"
#include "select/kernels.h"

enum {
    MAX_PANELS = 256 / IMP_PANEL, /* of a tile and of a wave */
    MIN_PANELS_16 = 2 /* that are worth narrowing keys for */
};

/* Less work than this (multiplications) isn't worth waking threads. */
#define MIN_PARALLEL_WORK (1u << 20)

/* Where a block of the prefix starts. */
typedef struct block_start {
    size_t run, row;
} block_start;

typedef struct tile {
    uint32_t kv_head;
    size_t first_query, n_queries; /* of the KV head's; query i is row i / group, head i % group of the group */
    size_t panel, n_panels;        /* in the wave */
    bool in_16;                    /* its queries are in q16, too */
} tile;

struct imp_scorer {
    size_t max_tokens, max_rows, max_blocks, max_panels;
    uint32_t max_heads, max_dim;
    imp_pool *pool;

    /* all in one piece of memory */
    float *q;            /* [max_panels][max_dim][IMP_PANEL] */
    int16_t *q16;        /* [max_panels][max_dim, made even][IMP_PANEL] */
    float *gains;        /* [max_panels][IMP_PANEL] */
    float *blocks;       /* [max_blocks][max_panels][IMP_BLOCK][IMP_PANEL] */
    float *max, *sum;    /* [max_blocks][max_panels][IMP_PANEL]; max becomes w */
    block_start *starts; /* [max_blocks] */
};

/* One wave; read-only for the parts but for what the pointers lead to, where each part has its own. */
typedef struct wave {
    const imp_scorer *s;
    const imp_kernels *kernels;
    const imp_query *query;
    const imp_keys *keys;
    const imp_key_maker *maker; /* NULL: keys lie in runs */
    size_t head_bytes, row_bytes;
    size_t n_blocks, n_panels;
    size_t n_tiles;
    tile tiles[MAX_PANELS];
    float *scores, *per_kv_head;
} wave;

static size_t block_tokens(const imp_keys *keys, size_t block)
{
    size_t rest = keys->n_tokens - block * IMP_BLOCK;
    return rest < IMP_BLOCK ? rest : IMP_BLOCK;
}

static size_t panels_of(size_t n_queries) { return (n_queries + IMP_PANEL - 1) / IMP_PANEL; }

/* ------------------------------------------------------------------------------------------------- the scorer ---- */

static bool add_region(size_t *total, size_t n, size_t n_each, size_t *offset)
{
    size_t bytes;
    *offset = *total;
    if (__builtin_mul_overflow(n, n_each, &bytes) || __builtin_add_overflow(bytes, (size_t)63, &bytes)) return false;
    return !__builtin_add_overflow(*total, bytes & ~(size_t)63, total);
}

int imp_scorer_new(size_t max_tokens, size_t max_rows, uint32_t max_heads, uint32_t max_head_dim, imp_pool *pool,
                   imp_scorer **out)
{
    *out = NULL;
    if (max_tokens == 0 || max_rows == 0 || max_heads == 0 || max_head_dim == 0 || max_head_dim > IMP_SCORER_DIM_MAX) {
        return imp_fail(IMP_E_ARG, "a scorer for %zu tokens, %zu rows, %u heads of size %u (at most %d)", max_tokens,
                        max_rows, max_heads, max_head_dim, IMP_SCORER_DIM_MAX);
    }
    /* A group of g heads fills at most g times the panels of one head, so this holds any grouping. */
    size_t rows = max_rows < MAX_PANELS * IMP_PANEL ? max_rows : MAX_PANELS * IMP_PANEL;
    size_t panels = panels_of(rows) * max_heads;
    if (panels > MAX_PANELS) panels = MAX_PANELS;
    size_t blocks = max_tokens / IMP_BLOCK + (max_tokens % IMP_BLOCK != 0);

    size_t total = 0, at_q, at_q16, at_gains, at_blocks, at_max, at_sum, at_starts;
    size_t panel_bytes = panels * IMP_PANEL * sizeof(float);
    bool fits = add_region(&total, max_head_dim, panel_bytes, &at_q) &&
                add_region(&total, (max_head_dim + 1) / 2, panel_bytes, &at_q16) &&
                add_region(&total, 1, panel_bytes, &at_gains) &&
                add_region(&total, blocks, panel_bytes * IMP_BLOCK, &at_blocks) &&
                add_region(&total, blocks, panel_bytes, &at_max) && add_region(&total, blocks, panel_bytes, &at_sum) &&
                add_region(&total, blocks, sizeof(block_start), &at_starts);
    imp_scorer *s = fits ? imp_malloc(sizeof *s) : NULL;
    char *memory = s ? imp_aligned(64, total) : NULL;
    if (!memory) {
        imp_free(s);
        return imp_fail(IMP_E_NOMEM, "no memory to score %zu tokens", max_tokens);
    }
    *s = (imp_scorer){
        .max_tokens = max_tokens, .max_rows = max_rows, .max_blocks = blocks, .max_panels = panels,
        .max_heads = max_heads, .max_dim = max_head_dim, .pool = pool,
        .q = (void *)(memory + at_q), .q16 = (void *)(memory + at_q16), .gains = (void *)(memory + at_gains),
        .blocks = (void *)(memory + at_blocks), .max = (void *)(memory + at_max), .sum = (void *)(memory + at_sum),
        .starts = (void *)(memory + at_starts),
    };
    *out = s;
    return 0;
}

void imp_scorer_free(imp_scorer *s)
{
    if (!s) return;
    imp_free(s->q); /* the start of the one piece */
    imp_free(s);
}

/* -------------------------------------------------------------------------------------------------- the steps ---- */

static int16_t *queries_16(const wave *w, const tile *tl)
{
    return w->s->q16 + tl->panel * imp_round_up(w->keys->head_dim, 2) * IMP_PANEL;
}

static void pack_queries(const wave *w, tile *tl, size_t first_row)
{
    const imp_query *query = w->query;
    size_t dim = w->keys->head_dim, group = query->n_heads / w->keys->n_kv_heads;
    float *panels = w->s->q + tl->panel * dim * IMP_PANEL;
    memset(panels, 0, tl->n_panels * dim * IMP_PANEL * sizeof *panels);
    for (size_t i = 0; i < tl->n_queries; i++) {
        size_t at = tl->first_query + i;
        size_t head = tl->kv_head * group + at % group;
        const float *q = query->q + (first_row + at / group) * query->row_stride + head * query->head_stride;
        float *out = panels + i / IMP_PANEL * dim * IMP_PANEL + i % IMP_PANEL;
        for (size_t d = 0; d < dim; d++) out[d * IMP_PANEL] = q[d] * query->scale;
    }
    tl->in_16 = w->kernels->pack16 && tl->n_panels >= MIN_PANELS_16 &&
                w->kernels->pack16(panels, tl->n_panels, dim, queries_16(w, tl), w->s->gains + tl->panel * IMP_PANEL);
}

/* Dot products with n_tokens widened keys. */
static void dots(const wave *w, const tile *tl, const float *k, size_t n_tokens, size_t first, float *out)
{
    size_t dim = w->keys->head_dim;
    const float *gain = w->s->gains + tl->panel * IMP_PANEL;
    if (tl->in_16 && w->kernels->dots16(queries_16(w, tl), gain, tl->n_panels, k, n_tokens, dim, first, out)) return;
    w->kernels->dots(w->s->q + tl->panel * dim * IMP_PANEL, tl->n_panels, k, n_tokens, dim, first, out);
}

/* The same with the keys of a block, which lie in runs; k: [IMP_KEY_FLOATS]. */
static void dots_of_runs(const wave *w, const tile *tl, size_t block, float *k, float *out)
{
    const imp_scorer *s = w->s;
    size_t dim = w->keys->head_dim, n_tokens = block_tokens(w->keys, block), head_offset = tl->kv_head * w->head_bytes;
    size_t room = IMP_KEY_FLOATS / dim, run = s->starts[block].run, row = s->starts[block].row, n_wide = 0, done = 0;
    void (*widen)(const void *src, float *dst, size_t n) = w->kernels->widen[w->keys->type];
    while (done + n_wide < n_tokens) {
        const imp_key_run *r = &w->keys->runs[run];
        if (row == r->n_tokens) {
            run++;
            row = 0;
            continue;
        }
        const char *src = (const char *)r->keys + row * w->row_bytes + head_offset;
        for (; row < r->n_tokens && n_wide < room && done + n_wide < n_tokens; row++, n_wide++, src += w->row_bytes) {
            widen(src, k + n_wide * dim, dim);
        }
        if (n_wide == room || done + n_wide == n_tokens) {
            dots(w, tl, k, n_wide, done, out);
            done += n_wide;
            n_wide = 0;
        }
    }
}

/* Step 1. */
static void score_part(size_t part, void *user)
{
    const wave *w = user;
    const imp_scorer *s = w->s;
    size_t block = part / w->n_tiles;
    const tile *tl = &w->tiles[part % w->n_tiles];
    size_t dim = w->keys->head_dim, n_tokens = block_tokens(w->keys, block);
    size_t at = block * w->n_panels + tl->panel;
    float *out = s->blocks + at * IMP_BLOCK * IMP_PANEL;
    _Alignas(64) float k[IMP_KEY_FLOATS];
    size_t room = IMP_KEY_FLOATS / dim;
    for (size_t n, done = 0; w->maker && done < n_tokens; done += n) {
        n = n_tokens - done < room ? n_tokens - done : room;
        w->maker->make(w->maker->user, tl->kv_head, block * IMP_BLOCK + done, n, k);
        dots(w, tl, k, n, done, out);
    }
    if (!w->maker) dots_of_runs(w, tl, block, k, out);
    w->kernels->softmax(out, tl->n_panels, n_tokens, w->query->softcap, s->max + at * IMP_PANEL,
                        s->sum + at * IMP_PANEL);
}

/* Step 2, for all tiles of the wave. */
static void weigh_blocks(const wave *w)
{
    const imp_scorer *s = w->s;
    size_t n = w->n_panels * IMP_PANEL;
    float top[MAX_PANELS * IMP_PANEL], total[MAX_PANELS * IMP_PANEL] = {0};
    memcpy(top, s->max, n * sizeof *top);
    for (size_t b = 1; b < w->n_blocks; b++) {
        const float *max = s->max + b * n;
        for (size_t i = 0; i < n; i++) top[i] = top[i] > max[i] ? top[i] : max[i];
    }
    for (size_t b = 0; b < w->n_blocks; b++) {
        float *max = s->max + b * n;
        const float *sum = s->sum + b * n;
        for (size_t i = 0; i < n; i++) max[i] -= top[i];
        w->kernels->exp(max, max, n);
        for (size_t i = 0; i < n; i++) total[i] += max[i] * sum[i];
    }
    /* total >= 1: the block with the maximum has a summand e^0. The padding weighs nothing. */
    for (size_t i = 0; i < n; i++) total[i] = 1.0f / total[i];
    for (size_t i = 0; i < w->n_tiles; i++) {
        const tile *tl = &w->tiles[i];
        for (size_t j = tl->n_queries; j < tl->n_panels * IMP_PANEL; j++) total[tl->panel * IMP_PANEL + j] = 0.0f;
    }
    for (size_t b = 0; b < w->n_blocks; b++) {
        float *max = s->max + b * n;
        for (size_t i = 0; i < n; i++) max[i] *= total[i];
    }
}

/* Step 3. */
static void sum_part(size_t block, void *user)
{
    const wave *w = user;
    size_t n_tokens = block_tokens(w->keys, block), first = block * IMP_BLOCK;
    for (size_t i = 0; i < w->n_tiles; i++) {
        const tile *tl = &w->tiles[i];
        size_t at = block * w->n_panels + tl->panel;
        float columns[IMP_BLOCK];
        w->kernels->column_sums(w->s->blocks + at * IMP_BLOCK * IMP_PANEL, tl->n_panels, n_tokens,
                                w->s->max + at * IMP_PANEL, columns);
        for (size_t t = 0; t < n_tokens; t++) w->scores[first + t] += columns[t];
        if (w->per_kv_head) {
            float *own = w->per_kv_head + tl->kv_head * w->keys->n_tokens + first;
            for (size_t t = 0; t < n_tokens; t++) own[t] += columns[t];
        }
    }
}

static void run_wave(wave *w, size_t first_row)
{
    const tile *last = &w->tiles[w->n_tiles - 1];
    w->n_panels = last->panel + last->n_panels;
    for (size_t i = 0; i < w->n_tiles; i++) pack_queries(w, &w->tiles[i], first_row);
    bool small = w->n_panels * IMP_PANEL * w->keys->n_tokens < MIN_PARALLEL_WORK / w->keys->head_dim;
    imp_pool *pool = small ? NULL : w->s->pool;
    imp_pool_run(pool, w->n_blocks * w->n_tiles, score_part, w);
    weigh_blocks(w);
    imp_pool_run(pool, w->n_blocks, sum_part, w);
}

/* ------------------------------------------------------------------------------------------------------ entry ---- */

static int check(const imp_scorer *s, const imp_query *query, size_t n_rows, const imp_keys *keys,
                 const imp_key_maker *maker)
{
    if (keys->n_kv_heads == 0 || query->n_heads == 0 || query->n_heads % keys->n_kv_heads != 0) {
        return imp_fail(IMP_E_ARG, "%u heads over %u KV heads", query->n_heads, keys->n_kv_heads);
    }
    if (n_rows == 0) return imp_fail(IMP_E_ARG, "no query row to score with");
    if (n_rows > s->max_rows || query->n_heads > s->max_heads || keys->n_tokens > s->max_tokens ||
        keys->head_dim > s->max_dim) {
        return imp_fail(IMP_E_ARG, "%zu rows, %u heads of size %u, %zu tokens: more than the scorer was made for",
                        n_rows, query->n_heads, keys->head_dim, keys->n_tokens);
    }
    if ((unsigned)keys->type > IMP_TYPE_Q8_0 || imp_type_bytes(keys->type, keys->head_dim) == 0) {
        return imp_fail(IMP_E_UNSUPPORTED, "keys of type %d with head size %u", (int)keys->type, keys->head_dim);
    }
    if (maker) return 0;
    size_t left = keys->n_tokens;
    for (size_t i = 0; i < keys->n_runs; i++) {
        if (keys->runs[i].n_tokens > left) {
            return imp_fail(IMP_E_ARG, "the runs of keys hold more than %zu tokens", keys->n_tokens);
        }
        left -= keys->runs[i].n_tokens;
    }
    if (left > 0) return imp_fail(IMP_E_ARG, "%zu of %zu tokens have no keys", left, keys->n_tokens);
    return 0;
}

static void find_blocks(imp_scorer *s, const imp_keys *keys)
{
    size_t run = 0, row = 0;
    for (size_t token = 0; token < keys->n_tokens; token += IMP_BLOCK) {
        s->starts[token / IMP_BLOCK] = (block_start){run, row};
        for (size_t skip = block_tokens(keys, token / IMP_BLOCK); skip > 0;) {
            size_t here = keys->runs[run].n_tokens - row;
            if (here > skip) here = skip;
            skip -= here;
            row += here;
            if (row == keys->runs[run].n_tokens) {
                run++;
                row = 0;
            }
        }
    }
}

static int score(imp_scorer *s, const imp_query *query, size_t max_rows, const imp_keys *keys,
                 const imp_key_maker *maker, float *scores, float *per_kv_head)
{
    size_t n_rows = query->n_rows < max_rows ? query->n_rows : max_rows;
    int rc = check(s, query, n_rows, keys, maker);
    if (rc < 0) return rc;
    if (keys->n_tokens == 0) return 0;

    memset(scores, 0, keys->n_tokens * sizeof *scores);
    if (per_kv_head) memset(per_kv_head, 0, keys->n_kv_heads * keys->n_tokens * sizeof *per_kv_head);
    if (!maker) find_blocks(s, keys);

    wave w = {
        .s = s, .kernels = imp_kernels_now(), .query = query, .keys = keys, .maker = maker,
        .head_bytes = imp_type_bytes(keys->type, keys->head_dim),
        .n_blocks = (keys->n_tokens + IMP_BLOCK - 1) / IMP_BLOCK,
        .scores = scores, .per_kv_head = per_kv_head,
    };
    w.row_bytes = w.head_bytes * keys->n_kv_heads;
    size_t first_row = query->n_rows - n_rows, n_queries = n_rows * (query->n_heads / keys->n_kv_heads), panel = 0;
    for (uint32_t h = 0; h < keys->n_kv_heads; h++) {
        for (size_t done = 0, n; done < n_queries; done += n) {
            n = n_queries - done < MAX_PANELS * IMP_PANEL ? n_queries - done : MAX_PANELS * IMP_PANEL;
            if (panel + panels_of(n) > s->max_panels) {
                run_wave(&w, first_row);
                w.n_tiles = panel = 0;
            }
            w.tiles[w.n_tiles++] = (tile){h, done, n, panel, panels_of(n), false};
            panel += panels_of(n);
        }
    }
    run_wave(&w, first_row);
    return 0;
}

int imp_score_h2o(imp_scorer *s, const imp_query *query, size_t max_rows, const imp_keys *keys, float *scores,
                  float *per_kv_head)
{
    return score(s, query, max_rows, keys, NULL, scores, per_kv_head);
}

int imp_score_made(imp_scorer *s, const imp_query *query, size_t max_rows, const imp_key_maker *maker, float *scores,
                   float *per_kv_head)
{
    const imp_keys shape = {.type = IMP_TYPE_F32, .n_kv_heads = maker->n_kv_heads, .head_dim = maker->head_dim,
                            .n_tokens = maker->n_tokens};
    return score(s, query, max_rows, &shape, maker, scores, per_kv_head);
}
