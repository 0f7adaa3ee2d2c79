/* test_cache.c: the policies against a naive twin that keeps one array and looks through all of it at each step. */
#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/rng.h"
#include "cache/cache.h"

enum { N_KEYS = 6000, MAX_MOVED = 64 };

/* ------------------------------------------------------------------------------------------------------- twin ---- */

typedef struct item {
    bool known;
    imp_level level;
    uint64_t n_bytes, used, ghosted; /* when last used or arrived; when last used or evicted */
    uint32_t n_uses;
    float share;
    double attention, aged; /* sums of shares, and of uses, in weights that grow */
} item;

typedef struct twin {
    imp_cache kind;
    uint64_t capacity[IMP_LEVELS], clock;
    /* Of a share, or a use, that comes now; those before stay as they are, which is as good as decay. */
    double weight, aged_weight;
    item items[N_KEYS];
} twin;

static const item unknown = {.level = IMP_LEVEL_NONE};

static twin *twin_new(imp_cache kind, uint64_t device, uint64_t host)
{
    twin *w = calloc(1, sizeof *w);
    w->kind = kind;
    w->capacity[IMP_LEVEL_DEVICE] = device;
    w->capacity[IMP_LEVEL_HOST] = host;
    w->weight = w->aged_weight = 1;
    for (size_t k = 0; k < N_KEYS; k++) w->items[k] = unknown;
    return w;
}

static double twin_rank(const twin *w, const item *x)
{
    if (w->kind == IMP_CACHE_LRU) return 0;
    if (w->kind == IMP_CACHE_LFU) return x->n_uses;
    if (w->kind == IMP_CACHE_ATTENTION) return x->attention;
    if (w->kind == IMP_CACHE_AGED) return x->aged * ((double)x->share + 1e-6);
    return (double)x->n_uses * (double)x->share;
}

static size_t twin_count(const twin *w, imp_level level)
{
    size_t n = 0;
    for (size_t k = 0; k < N_KEYS; k++) n += w->items[k].known && w->items[k].level == level;
    return n;
}

static uint64_t twin_bytes(const twin *w, imp_level level)
{
    uint64_t n = 0;
    for (size_t k = 0; k < N_KEYS; k++) n += w->items[k].level == level ? w->items[k].n_bytes : 0;
    return n;
}

static void twin_trim(twin *w)
{
    size_t most = 4 * (twin_count(w, IMP_LEVEL_DEVICE) + twin_count(w, IMP_LEVEL_HOST));
    size_t n = twin_count(w, IMP_LEVEL_NONE);
    if (most < 1024) most = 1024;
    for (; n > most; n--) {
        item *oldest = NULL;
        for (size_t k = 0; k < N_KEYS; k++) {
            item *x = &w->items[k];
            if (x->known && x->level == IMP_LEVEL_NONE && (!oldest || x->ghosted < oldest->ghosted)) oldest = x;
        }
        *oldest = unknown;
    }
}

static void twin_use(twin *w, uint64_t key, float share)
{
    item *x = &w->items[key];
    x->known = true;
    x->n_uses++;
    if (!(share > 0)) share = 0;
    size_t n_known = 0;
    for (size_t k = 0; k < N_KEYS; k++) n_known += w->items[k].known;
    w->weight *= pow(0.5, -1 / (8.0 * (double)n_known));
    x->attention += (double)share * w->weight;
    double n_present = (double)(twin_count(w, IMP_LEVEL_DEVICE) + twin_count(w, IMP_LEVEL_HOST));
    w->aged_weight *= pow(2, 1 / (2 * (n_present + 1)));
    x->aged += w->aged_weight;
    if (share > 1) share = 1;
    x->share += (share - x->share) / (float)(x->n_uses < 8 ? x->n_uses : 8);
    x->used = x->ghosted = ++w->clock;
    twin_trim(w);
}

static bool twin_last(const twin *w, imp_level level)
{
    return level == IMP_LEVEL_HOST || w->capacity[IMP_LEVEL_HOST] == 0;
}

/* The keys that have to go from `level` for `key`, the first to go first; -1: it doesn't get in. */
static int twin_victims(const twin *w, uint64_t key, uint64_t n_bytes, imp_level level, size_t max, uint64_t *out)
{
    bool always = w->kind == IMP_CACHE_LRU || (w->kind == IMP_CACHE_LFU && twin_last(w, level));
    uint64_t bytes = twin_bytes(w, level);
    bool gone[N_KEYS] = {false};
    size_t n = 0;
    if (n_bytes > w->capacity[level]) return -1;
    while (bytes + n_bytes > w->capacity[level]) {
        size_t worst = N_KEYS;
        for (size_t k = 0; k < N_KEYS; k++) {
            const item *y = &w->items[k];
            if (y->level != level || gone[k]) continue;
            if (worst < N_KEYS) {
                const item *z = &w->items[worst];
                double a = twin_rank(w, y), b = twin_rank(w, z);
                if (a > b || (!(a < b) && y->used > z->used)) continue;
            }
            worst = k;
        }
        if (n == max) return -1;
        if (!always && twin_rank(w, &w->items[worst]) >= twin_rank(w, &w->items[key])) return -1;
        gone[worst] = true;
        out[n++] = worst;
        bytes -= w->items[worst].n_bytes;
    }
    return (int)n;
}

static void twin_out(twin *w, uint64_t key)
{
    w->items[key].level = IMP_LEVEL_NONE;
    w->items[key].ghosted = ++w->clock;
}

static void twin_in(twin *w, uint64_t key, imp_level level)
{
    w->items[key].known = true;
    w->items[key].level = level;
    w->items[key].used = ++w->clock;
}

/* Put `key` into the first of the tiers from `level` on that takes it, and what it displaces on its way down. */
static imp_level twin_place(twin *w, uint64_t key, uint64_t n_bytes, imp_level level, imp_moved *moved)
{
    uint64_t *victims = moved->keys + moved->n;
    int n = -1;
    for (; level < IMP_LEVELS; level++) {
        n = twin_victims(w, key, n_bytes, level, moved->max - moved->n, victims);
        if (n >= 0) break;
    }
    if (level == IMP_LEVELS) return IMP_LEVEL_NONE;
    moved->n += (size_t)n;
    w->items[key].n_bytes = n_bytes;
    if (level == IMP_LEVEL_HOST) {
        for (int i = 0; i < n; i++) twin_out(w, victims[i]);
    }
    twin_in(w, key, level);
    for (int i = 0; level == IMP_LEVEL_DEVICE && i < n; i++) {
        w->items[victims[i]].level = IMP_LEVEL_NONE;
        if (twin_place(w, victims[i], w->items[victims[i]].n_bytes, IMP_LEVEL_HOST, moved) == IMP_LEVEL_NONE) {
            twin_out(w, victims[i]);
        }
    }
    return level;
}

static imp_level twin_admit(twin *w, uint64_t key, uint64_t n_bytes, imp_moved *moved)
{
    moved->n = 0;
    if (w->items[key].level != IMP_LEVEL_NONE || n_bytes == 0) return IMP_LEVEL_NONE;
    imp_level level = twin_place(w, key, n_bytes, IMP_LEVEL_DEVICE, moved);
    twin_trim(w);
    return level;
}

static bool twin_promote(twin *w, uint64_t key, imp_moved *moved)
{
    uint64_t victims[MAX_MOVED];
    moved->n = 0;
    if (w->items[key].level != IMP_LEVEL_HOST) return false;
    if (twin_victims(w, key, w->items[key].n_bytes, IMP_LEVEL_DEVICE, moved->max, victims) < 0) return false;
    w->items[key].level = IMP_LEVEL_NONE;
    assert_int_equal(twin_place(w, key, w->items[key].n_bytes, IMP_LEVEL_DEVICE, moved), IMP_LEVEL_DEVICE);
    twin_trim(w);
    return true;
}

static void twin_drop(twin *w, uint64_t key)
{
    if (w->items[key].level == IMP_LEVEL_NONE) return;
    twin_out(w, key);
    twin_trim(w);
}

/* ------------------------------------------------------------------------------------------------------ random --- */

static uint64_t seed_of_run(void)
{
    const char *text = getenv("IMP_TEST_SEED");
    imp_rng r;
    imp_rng_seed_os(&r);
    uint64_t seed = text ? strtoull(text, NULL, 0) : imp_rng_u64(&r);
    print_message("IMP_TEST_SEED=%" PRIu64 "\n", seed);
    return seed;
}

/* Few keys often, many rarely. */
static uint64_t pick_key(imp_rng *r)
{
    double u = imp_rng_unit(r);
    return (uint64_t)(u * u * u * u * (N_KEYS - 1));
}

static void same_state(const twin *w, const imp_policy *p)
{
    for (imp_level l = 0; l < IMP_LEVELS; l++) {
        assert_int_equal(imp_policy_count(p, l), twin_count(w, l));
        assert_int_equal(imp_policy_bytes(p, l), twin_bytes(w, l));
        assert_true(imp_policy_bytes(p, l) <= w->capacity[l]);
    }
    for (size_t k = 0; k < N_KEYS; k++) assert_int_equal(imp_policy_where(p, k), w->items[k].level);
}

static void same_moves(const imp_moved *got, const imp_moved *want, const twin *w, const imp_policy *p)
{
    assert_int_equal(got->n, want->n);
    for (size_t i = 0; i < want->n; i++) {
        assert_int_equal(got->keys[i], want->keys[i]);
        assert_int_equal(imp_policy_where(p, got->keys[i]), w->items[got->keys[i]].level);
    }
}

static float any_share(imp_rng *r, bool few)
{
    if (imp_rng_below(r, 200) == 0) return imp_rng_below(r, 2) ? NAN : -INFINITY;
    return few ? 0.25f * (float)imp_rng_below(r, 5) : (float)(imp_rng_unit(r) * 1.2 - 0.1);
}

/* Returns how often something moved from tier to tier. */
static size_t against_twin(imp_cache kind, imp_rng *r, uint64_t device, uint64_t host, uint64_t n_bytes_most,
                           bool few_shares)
{
    twin *w = twin_new(kind, device, host);
    imp_policy *p = NULL;
    uint64_t got_keys[MAX_MOVED], want_keys[MAX_MOVED];
    size_t n_across = 0;
    assert_int_equal(imp_policy_new(kind, device, host, &p), 0);
    for (int step = 0; step < 3600; step++) {
        uint64_t key = pick_key(r), what = imp_rng_below(r, 100);
        imp_moved got = {.keys = got_keys, .max = imp_rng_below(r, 4) ? MAX_MOVED : imp_rng_below(r, 4)};
        imp_moved want = {.keys = want_keys, .max = got.max};
        if (step >= 1200 && step < 2600) key = (uint64_t)step % N_KEYS; /* a scan: fills and trims the ghosts */
        if (what < 50) {
            float share = any_share(r, few_shares);
            imp_policy_use(p, key, share);
            twin_use(w, key, share);
            bool yes = twin_promote(w, key, &want);
            assert_int_equal(imp_policy_promote(p, key, &got), yes);
            n_across += yes;
        } else if (what < 97) {
            uint64_t n_bytes = 1 + imp_rng_below(r, n_bytes_most), capacity = imp_rng_below(r, 2) ? host : device;
            if (imp_rng_below(r, 60) == 0) n_bytes = imp_rng_below(r, 2) * capacity;
            if (imp_rng_below(r, 100) == 0) n_bytes = capacity + 1 + imp_rng_below(r, 5);
            imp_level level = twin_admit(w, key, n_bytes, &want);
            assert_int_equal(imp_policy_admit(p, key, n_bytes, &got), level);
        } else {
            imp_policy_drop(p, key);
            twin_drop(w, key);
            got.n = want.n = 0;
        }
        same_moves(&got, &want, w, p);
        for (size_t i = 0; i < got.n; i++) n_across += w->items[got.keys[i]].level == IMP_LEVEL_HOST;
        for (imp_level l = 0; l < IMP_LEVELS; l++) assert_true(imp_policy_bytes(p, l) <= w->capacity[l]);
        if (step % 300 == 0) same_state(w, p);
    }
    same_state(w, p);
    imp_policy_free(p);
    free(w);
    return n_across;
}

static void test_against_twin(void **state)
{
    (void)state;
    static const uint64_t budgets[][2] = {{0, 500}, {500, 0}, {150, 500}, {500, 150}, {40, 30}};
    imp_rng r;
    imp_rng_seed(&r, seed_of_run());
    for (imp_cache kind = IMP_CACHE_LRU; kind < IMP_CACHE_OF_STORE; kind++) {
        size_t n_across = 0;
        for (size_t i = 0; i < sizeof budgets / sizeof *budgets; i++) {
            n_across += against_twin(kind, &r, budgets[i][0], budgets[i][1], i < 4 ? 40 : 9, i % 2);
        }
        n_across += against_twin(kind, &r, 6000, 24000, 100, false);
        assert_true(n_across > 200);
    }
}

/* ------------------------------------------------------------------------------------------------------ details --- */

static void admit(imp_policy *p, uint64_t key, uint64_t n_bytes, imp_level want, size_t want_moved, uint64_t want_first)
{
    uint64_t keys[8];
    imp_moved moved = {.keys = keys, .max = 8, .n = 99};
    assert_int_equal(imp_policy_admit(p, key, n_bytes, &moved), want);
    assert_int_equal(moved.n, want_moved);
    if (want_moved > 0) assert_int_equal(keys[0], want_first);
}

static void promote(imp_policy *p, uint64_t key, bool want)
{
    uint64_t keys[8];
    imp_moved moved = {.keys = keys, .max = 8, .n = 99};
    assert_int_equal(imp_policy_promote(p, key, &moved), want);
}

static void use(imp_policy *p, uint64_t key, int n, float share)
{
    for (int i = 0; i < n; i++) imp_policy_use(p, key, share);
}

#define HOST IMP_LEVEL_HOST
#define DEVICE IMP_LEVEL_DEVICE
#define NONE IMP_LEVEL_NONE

static void test_none_and_unknown(void **state)
{
    (void)state;
    imp_policy *p = NULL;
    assert_int_equal(imp_policy_new(IMP_CACHE_NONE, 100, 100, &p), 0);
    imp_policy_use(p, 1, 1);
    admit(p, 1, 1, NONE, 0, 0);
    promote(p, 1, false);
    assert_int_equal(imp_policy_count(p, HOST) + imp_policy_count(p, DEVICE), 0);
    imp_policy_free(p);
    assert_int_equal(imp_policy_new((imp_cache)99, 0, 100, &p), IMP_E_UNSUPPORTED);
    assert_null(p);
    imp_policy_free(NULL);
}

static void test_lru_order(void **state)
{
    (void)state;
    imp_policy *p = NULL;
    assert_int_equal(imp_policy_new(IMP_CACHE_LRU, 0, 3, &p), 0);
    for (uint64_t k = 1; k <= 3; k++) admit(p, k, 1, HOST, 0, 0);
    imp_policy_use(p, 1, 0);
    admit(p, 4, 1, HOST, 1, 2);
    admit(p, 1, 1, NONE, 0, 0); /* there already; no use */
    admit(p, 5, 2, HOST, 2, 3);
    assert_int_equal(imp_policy_where(p, 4), HOST);
    assert_int_equal(imp_policy_where(p, 1), NONE);
    imp_policy_free(p);
}

/* Two tiers of two: the four used last stay, the two newest of them in front. */
static void test_lru_two_tiers(void **state)
{
    (void)state;
    imp_policy *p = NULL;
    assert_int_equal(imp_policy_new(IMP_CACHE_LRU, 2, 2, &p), 0);
    for (uint64_t k = 1; k <= 5; k++) {
        imp_policy_use(p, k, 0);
        admit(p, k, 1, DEVICE, k < 3 ? 0 : k < 5 ? 1 : 2, k < 3 ? 0 : k - 2);
    }
    static const imp_level first[] = {NONE, NONE, HOST, HOST, DEVICE, DEVICE};
    for (uint64_t k = 1; k <= 5; k++) assert_int_equal(imp_policy_where(p, k), first[k]);
    imp_policy_use(p, 2, 0);
    promote(p, 2, true);
    static const imp_level then[] = {NONE, NONE, DEVICE, HOST, HOST, DEVICE};
    for (uint64_t k = 1; k <= 5; k++) assert_int_equal(imp_policy_where(p, k), then[k]);
    promote(p, 2, false); /* there already */
    promote(p, 1, false); /* in no tier */
    imp_policy_free(p);
}

static void test_lfu_remembers_the_evicted(void **state)
{
    (void)state;
    imp_policy *p = NULL;
    assert_int_equal(imp_policy_new(IMP_CACHE_LFU, 0, 2, &p), 0);
    use(p, 1, 5, 0);
    use(p, 2, 3, 0);
    admit(p, 1, 1, HOST, 0, 0);
    admit(p, 2, 1, HOST, 0, 0);
    admit(p, 3, 1, HOST, 1, 2);
    admit(p, 2, 1, HOST, 1, 3);
    use(p, 2, 3, 0); /* 6 uses by now, more than key 1 */
    admit(p, 4, 1, HOST, 1, 1);
    imp_policy_free(p);
}

static void test_score_keeps_the_important(void **state)
{
    (void)state;
    imp_policy *p = NULL;
    assert_int_equal(imp_policy_new(IMP_CACHE_SCORE, 0, 2, &p), 0);
    use(p, 1, 10, 0.1f); /* often, of little use: 1.0 */
    use(p, 2, 4, 0.75f); /* seldom, of much: 3.0 */
    admit(p, 1, 1, HOST, 0, 0);
    admit(p, 2, 1, HOST, 0, 0);
    admit(p, 3, 1, NONE, 0, 0); /* not seen before */
    use(p, 3, 1, 0.9f);
    admit(p, 3, 1, NONE, 0, 0);
    use(p, 3, 1, 0.9f);
    admit(p, 3, 1, HOST, 1, 1);
    /* Two victims, one of them worth more: nothing changes. */
    use(p, 4, 2, 1);
    admit(p, 4, 2, NONE, 0, 0);
    assert_int_equal(imp_policy_bytes(p, HOST), 2);
    assert_true(imp_policy_where(p, 2) == HOST && imp_policy_where(p, 3) == HOST);
    imp_policy_free(p);
}

/* The paper's rule from tier to tier: up when worth more than the lowest there, down under the same rule, else out. */
static void test_score_two_tiers(void **state)
{
    (void)state;
    imp_policy *p = NULL;
    assert_int_equal(imp_policy_new(IMP_CACHE_SCORE, 1, 1, &p), 0);
    use(p, 1, 4, 1);
    use(p, 2, 2, 1);
    use(p, 3, 3, 1);
    admit(p, 1, 1, DEVICE, 0, 0);
    admit(p, 2, 1, HOST, 0, 0);
    admit(p, 3, 1, HOST, 1, 2);
    use(p, 3, 1, 1);
    promote(p, 3, false); /* as much as what is there is not more */
    use(p, 3, 1, 1);
    promote(p, 3, true);
    assert_int_equal(imp_policy_where(p, 3), DEVICE);
    assert_int_equal(imp_policy_where(p, 1), HOST);
    use(p, 2, 4, 1);
    admit(p, 2, 1, DEVICE, 2, 3); /* 3 takes 1's place, which goes out */
    assert_int_equal(imp_policy_where(p, 3), HOST);
    assert_int_equal(imp_policy_where(p, 1), NONE);
    use(p, 4, 6, 1);
    admit(p, 4, 2, NONE, 0, 0); /* larger than either tier */
    imp_policy_free(p);
}

/* One large chunk displaces several, of which the better ones stay in the host tier. */
static void test_displaced_by_a_large_one(void **state)
{
    (void)state;
    imp_policy *p = NULL;
    assert_int_equal(imp_policy_new(IMP_CACHE_SCORE, 3, 2, &p), 0);
    for (uint64_t k = 1; k <= 5; k++) use(p, k, (int)k, 1);
    for (uint64_t k = 5; k >= 1; k--) admit(p, k, 1, k > 2 ? DEVICE : HOST, 0, 0);
    use(p, 6, 9, 1);
    admit(p, 6, 3, DEVICE, 6, 3); /* 3, 4, 5 down; for them 1 and 2 out; and 3 again, for 5 */
    assert_int_equal(imp_policy_where(p, 3), NONE);
    assert_true(imp_policy_where(p, 4) == HOST && imp_policy_where(p, 5) == HOST);
    imp_policy_free(p);
}

static void test_attention_decays(void **state)
{
    (void)state;
    imp_policy *p = NULL;
    assert_int_equal(imp_policy_new(IMP_CACHE_ATTENTION, 0, 1, &p), 0);
    use(p, 1, 1, 8); /* much attention, once */
    admit(p, 1, 1, HOST, 0, 0);
    use(p, 2, 5, 1); /* more uses don't matter */
    admit(p, 2, 1, NONE, 0, 0);
    use(p, 2, 4, 1);
    admit(p, 2, 1, HOST, 1, 1);
    use(p, 1, 5, 0); /* nor do uses without attention */
    admit(p, 1, 1, NONE, 0, 0);
    /* Old attention fades: some 20 half-lives. */
    use(p, 2, 1, 1000);
    use(p, 3, 2 * 8 * 20, 0);
    use(p, 1, 1, 1);
    admit(p, 1, 1, HOST, 1, 2);
    imp_policy_free(p);
}

/* So long that a weight in plain numbers would have overflowed. */
static void test_attention_for_long(void **state)
{
    (void)state;
    imp_policy *p = NULL;
    assert_int_equal(imp_policy_new(IMP_CACHE_ATTENTION, 0, 1, &p), 0);
    use(p, 1, 50000, 1);
    admit(p, 1, 1, HOST, 0, 0);
    use(p, 2, 1, 1);
    admit(p, 2, 1, NONE, 0, 0);
    use(p, 2, 1, INFINITY);
    admit(p, 2, 1, HOST, 1, 1);
    use(p, 1, 1, INFINITY);
    use(p, 2, 1, 1);
    use(p, 1, 1, 1);
    use(p, 3, 1, -1);
    admit(p, 3, 1, NONE, 0, 0);
    imp_policy_free(p);
}

static void test_large_keys_and_sizes(void **state)
{
    (void)state;
    imp_policy *p = NULL;
    assert_int_equal(imp_policy_new(IMP_CACHE_LRU, 0, UINT64_MAX, &p), 0);
    admit(p, UINT64_MAX, UINT64_MAX - 1, HOST, 0, 0);
    admit(p, 0, 1, HOST, 0, 0);
    admit(p, 7, 1, HOST, 1, UINT64_MAX);
    assert_int_equal(imp_policy_bytes(p, HOST), 2);
    admit(p, 7, 0, NONE, 0, 0);
    admit(p, 8, 0, NONE, 0, 0);
    imp_policy_free(p);
}

static void test_no_memory_changes_nothing(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, seed_of_run());
    for (imp_cache kind = IMP_CACHE_LRU; kind < IMP_CACHE_OF_STORE; kind++) {
        twin *w = twin_new(kind, 150, 250);
        imp_policy *p = NULL;
        for (uint64_t fail = 1;; fail++) {
            imp_alloc_fail_at(fail, 1);
            int rc = imp_policy_new(kind, 150, 250, &p);
            imp_alloc_fail_at(0, 0);
            if (rc == 0) break;
            assert_int_equal(rc, IMP_E_NOMEM);
            assert_null(p);
        }
        uint64_t n_failures = 0, got_keys[MAX_MOVED], want_keys[MAX_MOVED];
        for (uint64_t key = 0; key < 1000; key++) {
            /* A use or an admission that finds no memory for a new key is as if it had not been. */
            bool used = imp_rng_below(&r, 2);
            uint64_t n_bytes = 1 + imp_rng_below(&r, 9);
            imp_moved got = {.keys = got_keys, .max = MAX_MOVED}, want = {.keys = want_keys, .max = MAX_MOVED};
            for (uint64_t fail = 1;; fail++) {
                imp_alloc_fail_at(fail, 1);
                imp_level level = NONE;
                if (used) imp_policy_use(p, key, 1);
                else level = imp_policy_admit(p, key, n_bytes, &got);
                uint64_t n_allocs = imp_alloc_fail_at(0, 0);
                if (n_allocs < fail) {
                    if (used) twin_use(w, key, 1);
                    else assert_int_equal(level, twin_admit(w, key, n_bytes, &want));
                    break;
                }
                if (!used) assert_int_equal(level, NONE);
                n_failures++;
                same_state(w, p);
            }
        }
        assert_true(n_failures >= 8);
        same_state(w, p);
        imp_policy_free(p);
        free(w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_none_and_unknown),
        cmocka_unit_test(test_lru_order),
        cmocka_unit_test(test_lru_two_tiers),
        cmocka_unit_test(test_lfu_remembers_the_evicted),
        cmocka_unit_test(test_score_keeps_the_important),
        cmocka_unit_test(test_score_two_tiers),
        cmocka_unit_test(test_displaced_by_a_large_one),
        cmocka_unit_test(test_attention_decays),
        cmocka_unit_test(test_attention_for_long),
        cmocka_unit_test(test_large_keys_and_sizes),
        cmocka_unit_test(test_against_twin),
        cmocka_unit_test(test_no_memory_changes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
