/* Histories: what goes in comes out as a naive twin says, also after a reopen, a damaged row, a catalogue of the first
 * version, and when the catalogue was busy at first. */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sqlite3.h>

#include "base/alloc.h"
#include "base/rng.h"
#include "select/blend.h"
#include "store/store_internal.h"
#include "support/store_world.h"
#include "support/support.h"

enum { N_TOKENS = 60 };

static int32_t tokens[N_TOKENS];

static int set_up(void **state)
{
    for (int i = 0; i < N_TOKENS; i++) tokens[i] = 100 + i;
    *state = imp_test_make_dir("/dev/shm");
    if (!*state) *state = imp_test_make_dir(NULL);
    return *state ? 0 : -1;
}

static int tear_down(void **state)
{
    imp_alloc_fail_at(0, 0);
    imp_test_remove_dir(*state);
    return 0;
}

/* A store with one segment of N_TOKENS. */
typedef struct bench {
    imp_world w;
    imp_store *s;
    imp_path path;
    const imp_seg *seg;
} bench;

static void match(bench *b)
{
    uint64_t header_bytes;
    b->s = b->w.store;
    assert_int_equal(imp_store_match(b->s, b->w.space->id, tokens, N_TOKENS, true, &b->path, &header_bytes), 0);
    assert_int_equal(b->path.n_tokens, N_TOKENS);
    b->seg = b->path.spans[0].seg;
}

static void begin(bench *b, const char *dir)
{
    assert_int_equal(imp_world_open(&b->w, dir, NULL, NULL), 0);
    assert_int_equal(imp_world_commit(&b->w, tokens, N_TOKENS, 0, 0, NULL), 0);
    assert_int_equal(imp_store_flush(b->w.store), 0);
    match(b);
}

static void end(bench *b)
{
    imp_store_unpin(b->s, &b->path);
    imp_world_close(&b->w);
}

static void again(bench *b, const char *dir)
{
    end(b);
    assert_int_equal(imp_world_open(&b->w, dir, NULL, NULL), 0);
    match(b);
}

static void exec_sql(const char *dir, const char *statement)
{
    sqlite3 *db = NULL;
    assert_int_equal(sqlite3_open(imp_test_path(dir, "catalogue.db"), &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, statement, NULL, NULL, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_close(db), SQLITE_OK);
}

static imp_history *get(bench *b)
{
    imp_history *h = NULL;
    assert_int_equal(imp_history_get(b->s, b->seg, &h), 0);
    return h;
}

/* ---- a twin: plain means as long as there are few requests */

typedef struct twin {
    double sum[WORLD_LAYERS][N_TOKENS], rank[2][WORLD_LAYERS][N_TOKENS];
    uint32_t n[WORLD_LAYERS];
    bool ranked[2][WORLD_LAYERS];
} twin;

static void expect(const twin *t, const imp_history *h, double off)
{
    float got[N_TOKENS];
    for (uint32_t l = 0; l < WORLD_LAYERS; l++) {
        assert_int_equal(imp_history_read(h, l, 0, N_TOKENS, got), t->n[l]);
        for (int i = 0; i < N_TOKENS; i++) {
            double want = t->n[l] ? t->sum[l][i] / t->n[l] : 0;
            if (fabs((double)got[i] - want) > off * (0.1 + want)) {
                fail_msg("layer %u, token %d: %g, not %g", l, i, (double)got[i], want);
            }
        }
        for (int r = 0; r < 2; r++) {
            assert_int_equal(imp_history_ranking(h, (imp_rank)r, l, 0, N_TOKENS, got), t->ranked[r][l]);
            for (int i = 0; i < N_TOKENS; i++) {
                double want = t->rank[r][l][i];
                assert_true(fabs((double)got[i] - want) <= off * (0.1 + want));
            }
        }
    }
}

/* Some request, or a ranking. */
static void one_more(twin *t, imp_history *h, imp_rng *rng)
{
    float scores[N_TOKENS];
    uint32_t l = (uint32_t)imp_rng_below(rng, WORLD_LAYERS), first = 0;
    size_t n = N_TOKENS;
    for (int i = 0; i < N_TOKENS; i++) scores[i] = (float)(imp_rng_unit(rng) * 3);
    if (imp_rng_below(rng, 3) > 0 && t->n[l] < IMP_HISTORY_SPAN) {
        imp_history_add(h, l, first, n, scores);
        t->n[l]++;
        for (int i = 0; i < N_TOKENS; i++) t->sum[l][i] += (double)scores[i];
        return;
    }
    uint64_t r = imp_rng_below(rng, 2);
    first = (uint32_t)imp_rng_below(rng, N_TOKENS);
    n = imp_rng_below(rng, N_TOKENS - first + 1);
    imp_history_rank(h, (imp_rank)r, l, first, n, scores);
    t->ranked[r][l] = true;
    for (size_t i = 0; i < n; i++) {
        if ((double)scores[i] > t->rank[r][l][first + i]) t->rank[r][l][first + i] = (double)scores[i];
    }
}

static void as_the_twin_says(void **state)
{
    bench b;
    twin t = {0};
    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed());
    begin(&b, *state);
    for (int i = 0; i < 200; i++) {
        imp_history *h = get(&b);
        one_more(&t, h, &rng);
        /* two places of f16 */
        expect(&t, h, i < 30 ? 1e-5 : 2e-2);
        imp_history_put(b.s, h);
        uint64_t what = imp_rng_below(&rng, 40);
        if (what < 4) assert_int_equal(imp_store_flush(b.s), 0);
        if (what == 4 && i > 30) again(&b, *state);
    }
    assert_int_equal(imp_store_flush(b.s), 0);
    assert_int_equal(imp_histories_dirty(b.s), 0);
    assert_int_equal(imp_world_verify(&b.w, false, true), 0);
    end(&b);
}

static void edges(void **state)
{
    bench b;
    float scores[N_TOKENS], got[N_TOKENS];
    begin(&b, *state);
    imp_history *h = get(&b);
    assert_int_equal(imp_history_news(h), 0);
    assert_ptr_equal(get(&b), h); /* one record, twice */
    imp_history_put(b.s, h);
    for (int i = 0; i < N_TOKENS; i++) scores[i] = got[i] = 2.0f;
    /* out of its range: nothing happens, and zeros come back */
    imp_history_add(h, WORLD_LAYERS, 0, 5, scores);
    imp_history_add(h, 0, N_TOKENS - 4, 5, scores);
    imp_history_add(h, 0, N_TOKENS + 1, 0, scores);
    imp_history_rank(h, (imp_rank)2, 0, 0, 5, scores);
    imp_history_rank(h, IMP_RANK_PREFILL, 0, UINT32_MAX, 5, scores);
    assert_int_equal(imp_histories_dirty(b.s), 0);
    assert_int_equal(imp_history_read(h, WORLD_LAYERS, 0, 5, got), 0);
    assert_int_equal(imp_history_read(h, 0, N_TOKENS, 5, got), 0);
    for (int i = 0; i < 5; i++) assert_true(got[i] == 0.0f);
    assert_false(imp_history_ranking(h, (imp_rank)7, 0, 0, 5, got));
    /* a part of it, and what isn't a number */
    scores[1] = NAN;
    scores[2] = -1;
    scores[3] = INFINITY;
    imp_history_add(h, 1, 10, 5, scores);
    imp_history_rank(h, IMP_RANK_PREFILL, 1, 10, 5, scores);
    assert_int_equal(imp_history_read(h, 1, 8, 8, got), 1);
    static const float want[8] = {0, 0, 2, 0, 0, 0, 2, 0};
    assert_memory_equal(got, want, sizeof want);
    assert_true(imp_history_ranking(h, IMP_RANK_PREFILL, 1, 8, 8, got));
    assert_memory_equal(got, want, sizeof want);
    assert_int_equal(imp_history_news(h), 1);
    uint64_t ids[4];
    assert_int_equal(imp_history_with_news(b.s, 1, ids, 4), 1);
    assert_true(ids[0] == b.seg->id);
    assert_int_equal(imp_history_with_news(b.s, 2, ids, 4), 0);
    assert_int_equal(imp_history_with_news(b.s, 1, ids, 0), 0);
    imp_history_add(h, 1, 0, N_TOKENS, scores);
    imp_history_add(h, 0, 0, N_TOKENS, scores);
    assert_int_equal(imp_history_news(h), 2);
    imp_history_settle(h);
    assert_int_equal(imp_history_news(h), 0);
    assert_int_equal(imp_history_read(h, 1, 0, 1, got), 2);
    /* what f16 doesn't hold */
    for (int i = 0; i < N_TOKENS; i++) scores[i] = 1e6f;
    imp_history_rank(h, IMP_RANK_RECONSTRUCTION, 0, 0, N_TOKENS, scores);
    imp_history_put(b.s, h);
    imp_history_put(b.s, NULL);
    again(&b, *state);
    h = get(&b);
    assert_true(imp_history_ranking(h, IMP_RANK_RECONSTRUCTION, 0, 0, N_TOKENS, got));
    assert_true(got[0] > 6e4f);
    assert_int_equal(imp_history_news(h), 0);
    imp_history_put(b.s, h);
    end(&b);
}

/* While the catalogue is busy a record is new; what was known comes back later. */
static void unread(void **state)
{
    bench b;
    float scores[N_TOKENS], got[N_TOKENS];
    begin(&b, *state);
    for (int turn = 0; turn < 3; turn++) {
        imp_history *h = get(&b);
        for (int i = 0; i < N_TOKENS; i++) scores[i] = (float)(i + turn);
        imp_history_add(h, 0, 0, N_TOKENS, scores);
        imp_history_put(b.s, h);
    }
    again(&b, *state);
    atomic_store(&b.s->changing, true); /* as while a commit waits for the disk */
    imp_history *h = get(&b);
    assert_int_equal(imp_history_read(h, 0, 0, N_TOKENS, got), 0);
    for (int i = 0; i < N_TOKENS; i++) scores[i] = (float)(i + 5);
    imp_history_add(h, 0, 0, N_TOKENS, scores);
    imp_history_add(h, 1, 0, N_TOKENS, scores);
    assert_int_equal(imp_history_read(h, 0, 0, N_TOKENS, got), 1);
    imp_history_put(b.s, h);
    atomic_store(&b.s->changing, false);
    for (int turn = 0; turn < 2; turn++) {
        /* asked again; or written first, and read by another life */
        if (turn) again(&b, *state);
        h = get(&b);
        assert_int_equal(imp_history_read(h, 0, 0, N_TOKENS, got), 4);
        for (int i = 0; i < N_TOKENS; i++) assert_true(fabsf(got[i] - (float)(i + 2)) < 0.01f * (float)(i + 2));
        assert_int_equal(imp_history_read(h, 1, 0, N_TOKENS, got), 1);
        assert_int_equal(imp_history_news(h), 4);
        imp_history_put(b.s, h);
    }
    end(&b);

    /* never asked again: the flush mixes it in */
    assert_int_equal(imp_world_open(&b.w, *state, NULL, NULL), 0);
    match(&b);
    atomic_store(&b.s->changing, true);
    h = get(&b);
    imp_history_add(h, 0, 0, N_TOKENS, scores);
    imp_history_put(b.s, h);
    atomic_store(&b.s->changing, false);
    again(&b, *state);
    h = get(&b);
    assert_int_equal(imp_history_read(h, 0, 0, N_TOKENS, got), 5);
    imp_history_put(b.s, h);
    end(&b);
}

static void a_damaged_row(void **state)
{
    static const char *const damages[] = {
        "UPDATE history SET bytes = zeroblob(length(bytes))",
        "UPDATE history SET sum = sum + 1",
        "UPDATE history SET bytes = NULL",
        "UPDATE history SET bytes = 17",
        "DELETE FROM history",
    };
    bench b;
    float scores[N_TOKENS] = {1, 2, 3}, got[N_TOKENS];
    begin(&b, *state);
    for (size_t i = 0; i < sizeof damages / sizeof damages[0]; i++) {
        imp_history *h = get(&b);
        assert_int_equal(imp_history_read(h, 0, 0, N_TOKENS, got), 0);
        imp_history_add(h, 0, 0, N_TOKENS, scores);
        imp_history_put(b.s, h);
        end(&b);
        exec_sql(*state, damages[i]);
        assert_int_equal(imp_world_open(&b.w, *state, NULL, NULL), 0);
        assert_int_equal(imp_world_check(&b.w, tokens, N_TOKENS, true), N_TOKENS);
        match(&b);
    }
    end(&b);
}

/* A blob whose checksum fits, and which says something else than a record of this segment: as nothing. */
static void a_strange_blob(void **state)
{
    bench b;
    imp_rng rng;
    float scores[N_TOKENS] = {1, 2, 3}, got[N_TOKENS];
    void *bytes;
    size_t n_bytes;
    imp_rng_seed(&rng, imp_test_seed());
    begin(&b, *state);
    imp_history *h = get(&b);
    imp_history_add(h, 0, 0, N_TOKENS, scores);
    imp_history_rank(h, IMP_RANK_PREFILL, 1, 0, N_TOKENS, scores);
    imp_history_put(b.s, h);
    assert_int_equal(imp_store_flush(b.s), 0);
    assert_int_equal(imp_cat_get_history(b.s->cat, b.seg->id, &bytes, &n_bytes), 0);
    assert_int_equal(n_bytes, 16 + 12 * WORLD_LAYERS + 2 * 2 * N_TOKENS);
    for (int i = 0; i < 60; i++) {
        unsigned char *copy = malloc(n_bytes);
        memcpy(copy, bytes, n_bytes);
        size_t n = i % 3 ? n_bytes : imp_rng_below(&rng, n_bytes);
        size_t at = imp_rng_below(&rng, i % 2 ? 16 + 12 * WORLD_LAYERS : n_bytes);
        if (n == n_bytes) copy[at] ^= (unsigned char)(1 + imp_rng_below(&rng, 255));
        assert_int_equal(imp_change_begin(b.s), 0);
        assert_int_equal(imp_cat_put_history(b.s->cat, b.seg->id, copy, n), 0);
        assert_int_equal(imp_change_end(b.s, 0), 0);
        free(copy);
        again(&b, *state);
        h = get(&b);
        uint32_t count = imp_history_read(h, 0, 0, N_TOKENS, got);
        if (n < n_bytes) assert_int_equal(count, 0);
        for (int t = 0; t < N_TOKENS; t++) assert_true(got[t] >= 0.0f && isfinite(got[t]));
        imp_history_put(b.s, h);
    }
    imp_free(bytes);
    end(&b);
}

static void gone_with_its_segment(void **state)
{
    bench b;
    float scores[N_TOKENS] = {1}, got[N_TOKENS];
    begin(&b, *state);
    imp_history *h = get(&b);
    imp_history_add(h, 0, 0, N_TOKENS, scores);
    assert_int_equal(imp_store_flush(b.s), 0);
    imp_history_add(h, 0, 0, N_TOKENS, scores); /* dirty again, while it goes */
    uint64_t id = b.seg->id;
    void *bytes;
    size_t n;
    assert_int_equal(imp_store_remove(b.s, 0), 0);
    assert_int_equal(imp_cat_get_history(b.s->cat, id, &bytes, &n), IMP_E_NOTFOUND);
    imp_history_put(b.s, h);
    assert_int_equal(imp_store_flush(b.s), 0);
    assert_int_equal(imp_histories_dirty(b.s), 0);
    assert_int_equal(imp_cat_get_history(b.s->cat, id, &bytes, &n), IMP_E_NOTFOUND);
    h = get(&b); /* whoever still holds the segment */
    assert_int_equal(imp_history_read(h, 0, 0, N_TOKENS, got), 2);
    imp_history_put(b.s, h);
    end(&b);
}

/* As a reorder does it: to a segment of fewer tokens, from memory or from the catalogue. */
static void handed_over(void **state)
{
    for (int turn = 0; turn < 2; turn++) {
        enum { FEWER = 48 };
        bench b;
        float scores[N_TOKENS], got[N_TOKENS];
        begin(&b, *state);
        for (int i = 0; i < N_TOKENS; i++) scores[i] = (float)i;
        imp_history *h = get(&b);
        imp_history_add(h, 0, 0, N_TOKENS, scores);
        imp_history_rank(h, IMP_RANK_RECONSTRUCTION, 1, 0, N_TOKENS, scores);
        imp_history_put(b.s, h);
        if (turn) again(&b, *state);
        imp_seg_meta m = *imp_seg_layout_meta(b.seg->layout);
        uint64_t from = m.segment;
        m.segment = from + 1;
        m.n_tokens = FEWER;
        imp_seg fake = {.id = m.segment};
        assert_int_equal(imp_seg_layout_new(&m, &fake.layout), 0);
        imp_cat_segment row = {m.segment, m.space, 4096, FEWER};
        void *bytes = NULL;
        size_t n = 0;
        assert_int_equal(imp_change_begin(b.s), 0);
        assert_int_equal(imp_cat_put_segment(b.s->cat, &row), 0);
        imp_history_hand_over(b.s, from + 7, m.segment, FEWER); /* has none */
        assert_int_equal(imp_cat_get_history(b.s->cat, m.segment, &bytes, &n), IMP_E_NOTFOUND);
        imp_history_hand_over(b.s, from, m.segment, FEWER);
        assert_int_equal(imp_cat_get_history(b.s->cat, m.segment, &bytes, &n), 0);
        assert_int_equal(n, 16 + 12 * WORLD_LAYERS + 2 * 2 * FEWER);
        imp_free(bytes);
        assert_int_equal(imp_change_end(b.s, IMP_E_BUSY), IMP_E_BUSY); /* the tree knows nothing of it */
        assert_int_equal(imp_history_get(b.s, &fake, &h), 0);
        assert_int_equal(imp_history_read(h, 0, 0, FEWER, got), 1);
        assert_memory_equal(got + 1, scores + 1, (FEWER - 1) * sizeof *got);
        assert_true(imp_history_ranking(h, IMP_RANK_RECONSTRUCTION, 1, 0, FEWER, got));
        assert_int_equal(imp_history_news(h), 0);
        imp_history_put(b.s, h);
        imp_seg_layout_free(fake.layout);
        assert_int_equal(imp_store_remove(b.s, 0), 0);
        end(&b);
    }
}

/* A store of the first version, which had no histories. */
static void former_version(void **state)
{
    bench b;
    char pragma[64];
    float scores[N_TOKENS] = {4, 5}, got[N_TOKENS];
    begin(&b, *state);
    end(&b);
    exec_sql(*state, "DROP TABLE setting; DROP TABLE history");
    snprintf(pragma, sizeof pragma, "PRAGMA user_version=%d", (int)(int32_t)(1 | 0xfffe0000u));
    exec_sql(*state, pragma);
    imp_store_opts opts;
    imp_world_opts(&opts);
    opts.flags = IMP_STORE_READONLY;
    assert_int_equal(imp_world_open(&b.w, *state, &opts, NULL), 0);
    match(&b);
    imp_history *h = get(&b);
    imp_history_add(h, 0, 0, N_TOKENS, scores); /* for this process */
    assert_int_equal(imp_history_read(h, 0, 0, N_TOKENS, got), 1);
    assert_int_equal(imp_histories_dirty(b.s), 0);
    imp_history_put(b.s, h);
    end(&b);
    assert_int_equal(imp_world_open(&b.w, *state, NULL, NULL), 0);
    match(&b);
    h = get(&b);
    assert_int_equal(imp_history_read(h, 0, 0, N_TOKENS, got), 0);
    imp_history_add(h, 0, 0, N_TOKENS, scores);
    imp_history_put(b.s, h);
    again(&b, *state);
    imp_stats st;
    assert_int_equal(imp_store_stats(b.s, &st), 0);
    assert_int_equal(st.catalogue_rebuilds, 0);
    h = get(&b);
    assert_int_equal(imp_history_read(h, 0, 0, N_TOKENS, got), 1);
    assert_true(got[0] == 4.0f && got[1] == 5.0f && got[2] == 0.0f);
    imp_history_put(b.s, h);
    assert_int_equal(imp_world_verify(&b.w, false, true), 0);
    end(&b);
}

static void no_memory(void **state)
{
    bench b;
    float scores[N_TOKENS] = {4, 5}, got[N_TOKENS];
    imp_history *h;
    begin(&b, *state);
    h = get(&b);
    imp_history_add(h, 0, 0, N_TOKENS, scores);
    imp_history_put(b.s, h);
    again(&b, *state);
    for (uint64_t nth = 1; nth < 12; nth++) {
        imp_alloc_fail_at(nth, 1);
        int rc = imp_history_get(b.s, b.seg, &h);
        if (rc < 0) {
            assert_int_equal(rc, IMP_E_NOMEM);
            assert_null(h);
        } else {
            imp_history_add(h, 0, 0, N_TOKENS, scores);
            imp_history_rank(h, IMP_RANK_PREFILL, 1, 0, N_TOKENS, scores);
            (void)imp_history_read(h, 0, 0, N_TOKENS, got);
            for (int i = 0; i < N_TOKENS; i++) assert_true(got[i] == 0.0f || got[i] == scores[i]);
            imp_history_put(b.s, h);
            imp_histories_write(b.s);
        }
        imp_alloc_fail_at(0, 0);
        again(&b, *state);
    }
    end(&b);
}

/* Much more than memory may hold: the oldest go, written or not, and what was written comes back. */
static void bounded(void **state)
{
    enum { N = 40, BIG = 200000 };
    bench b;
    static float scores[BIG];
    float got[3];
    begin(&b, *state);
    imp_seg_meta m = *imp_seg_layout_meta(b.seg->layout);
    int32_t *many = calloc(BIG, sizeof *many);
    assert_non_null(many);
    m.tokens = many;
    m.n_tokens = BIG;
    unsigned n_there = 0;
    for (int turn = 0; turn < 2; turn++) {
        for (uint64_t i = 0; i < N; i++) {
            imp_seg fake = {.id = 1000 + i};
            imp_history *h;
            m.segment = fake.id;
            assert_int_equal(imp_seg_layout_new(&m, &fake.layout), 0);
            assert_int_equal(imp_history_get(b.s, &fake, &h), 0);
            if (turn) {
                n_there += imp_history_read(h, 0, 0, 3, got) > 0;
            } else {
                for (uint32_t l = 0; l < m.n_layers; l++) {
                    imp_history_add(h, l, 0, BIG, scores);
                    imp_history_rank(h, IMP_RANK_PREFILL, l, 0, BIG, scores);
                }
            }
            imp_history_put(b.s, h);
            imp_seg_layout_free(fake.layout);
        }
    }
    /* 3.2 MB each; no row in the catalogue has room for them, there being no segment */
    assert_in_range(n_there, 15, 26);
    free(many);
    end(&b);
}

/* ---- threads */

typedef struct work {
    bench *b;
    int n;
} work;

static void *add_some(void *user)
{
    work *k = user;
    float scores[N_TOKENS], got[N_TOKENS];
    for (int i = 0; i < N_TOKENS; i++) scores[i] = 3.0f;
    for (int i = 0; i < k->n; i++) {
        imp_history *h = get(k->b);
        imp_history_add(h, 0, 0, N_TOKENS, scores);
        (void)imp_history_read(h, 0, 0, N_TOKENS, got);
        for (int t = 0; t < N_TOKENS; t++) assert_true(fabsf(got[t] - 3.0f) < 0.01f);
        imp_history_put(k->b->s, h);
        if (i % 16 == 0) assert_int_equal(imp_store_flush(k->b->s), 0);
    }
    return NULL;
}

static void threads_at_once(void **state)
{
    enum { N = 3 };
    bench b;
    float got[N_TOKENS];
    begin(&b, *state);
    work k = {&b, 100};
    pthread_t t[N];
    for (int i = 0; i < N; i++) assert_int_equal(pthread_create(&t[i], NULL, add_some, &k), 0);
    for (int i = 0; i < N; i++) pthread_join(t[i], NULL);
    again(&b, *state);
    imp_history *h = get(&b);
    assert_int_equal(imp_history_read(h, 0, 0, N_TOKENS, got), N * 100);
    imp_history_put(b.s, h);
    end(&b);
}

static int first_node(const imp_node_info *node, void *user)
{
    *(imp_node_info *)user = *node;
    return 1;
}

/* What is told of a node: the mean over the layers that have something, of requests, else of the prefill. */
static void importance_of_a_node(void **state)
{
    bench b;
    imp_node_info node = {0};
    float scores[N_TOKENS], got[N_TOKENS + 3];
    begin(&b, *state);
    assert_int_equal(imp_store_list(b.s, first_node, &node), 1);
    assert_int_equal(node.n_tokens, N_TOKENS);
    assert_int_equal(imp_store_importance(b.s, node.id + 1000, got, N_TOKENS), IMP_E_NOTFOUND);
    assert_int_equal(imp_store_importance(b.s, node.id, NULL, 1), IMP_E_ARG);
    assert_int_equal(imp_store_importance(NULL, node.id, got, 1), IMP_E_ARG);
    assert_int_equal(imp_store_importance(b.s, node.id, NULL, 0), 0);
    assert_int_equal(imp_store_importance(b.s, node.id, got, N_TOKENS), 0);
    for (int i = 0; i < N_TOKENS; i++) assert_true(got[i] == 0.0f);

    imp_history *h = get(&b);
    for (int i = 0; i < N_TOKENS; i++) scores[i] = (float)i;
    imp_history_rank(h, IMP_RANK_PREFILL, 1, 0, N_TOKENS, scores);
    assert_int_equal(imp_store_importance(b.s, node.id, got, N_TOKENS), 0);
    assert_memory_equal(got, scores, sizeof scores);
    for (int r = 0; r < 3; r++) imp_history_add(h, 0, 0, N_TOKENS, scores);
    for (int i = 0; i < N_TOKENS; i++) scores[i] *= 3;
    imp_history_add(h, 1, 0, N_TOKENS, scores);
    imp_history_put(b.s, h);
    for (int i = 0; i < N_TOKENS + 3; i++) got[i] = -1;
    assert_int_equal(imp_store_importance(b.s, node.id, got, N_TOKENS + 3), 3);
    for (int i = 0; i < N_TOKENS; i++) assert_true(fabsf(got[i] - 2 * (float)i) < 1e-4f);
    for (int i = N_TOKENS; i < N_TOKENS + 3; i++) assert_true(got[i] == 0.0f);

    /* each allocation fails in turn; the node is read again from its file */
    again(&b, *state);
    imp_store_unpin(b.s, &b.path);
    for (uint64_t nth = 1, n_made = nth; n_made >= nth; nth++) {
        (void)imp_alloc_fail_at(nth, 0);
        int64_t rc = imp_store_importance(b.s, node.id, got, N_TOKENS);
        n_made = imp_alloc_fail_at(0, 0);
        if (n_made < nth) assert_int_equal(rc, 3);
        else assert_true(rc == IMP_E_NOMEM || rc == IMP_E_IO || rc >= 0);
    }
    match(&b);
    end(&b);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(as_the_twin_says), TEST(edges),       TEST(unread),         TEST(a_damaged_row),
        TEST(a_strange_blob),   TEST(handed_over), TEST(former_version), TEST(gone_with_its_segment),
        TEST(no_memory),        TEST(bounded),     TEST(threads_at_once),
        TEST(importance_of_a_node),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
