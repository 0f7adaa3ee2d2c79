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

enum { N_KEYS = 6000, MAX_VICTIMS = 64 };

/* ------------------------------------------------------------------------------------------------------- twin ---- */

typedef struct item {
    bool known, present;
    uint64_t n_bytes, used, ghosted; /* when last used or admitted; when last used or evicted */
    uint32_t n_uses;
    float share;
} item;

typedef struct twin {
    imp_cache kind;
    uint64_t capacity, clock;
    item items[N_KEYS];
} twin;

static double twin_rank(const twin *w, const item *x)
{
    if (w->kind == IMP_CACHE_LRU) return 0;
    if (w->kind == IMP_CACHE_LFU) return x->n_uses;
    return (double)x->n_uses * (double)x->share;
}

static size_t twin_count(const twin *w, bool present)
{
    size_t n = 0;
    for (size_t k = 0; k < N_KEYS; k++) n += w->items[k].known && w->items[k].present == present;
    return n;
}

static uint64_t twin_bytes(const twin *w)
{
    uint64_t n = 0;
    for (size_t k = 0; k < N_KEYS; k++) n += w->items[k].present ? w->items[k].n_bytes : 0;
    return n;
}

static void twin_trim(twin *w)
{
    size_t most = 4 * twin_count(w, true), n = twin_count(w, false);
    if (most < 1024) most = 1024;
    for (; n > most; n--) {
        item *oldest = NULL;
        for (size_t k = 0; k < N_KEYS; k++) {
            item *x = &w->items[k];
            if (x->known && !x->present && (!oldest || x->ghosted < oldest->ghosted)) oldest = x;
        }
        *oldest = (item){0};
    }
}

static void twin_use(twin *w, uint64_t key, float share)
{
    item *x = &w->items[key];
    x->known = true;
    x->n_uses++;
    if (!(share > 0)) share = 0;
    if (share > 1) share = 1;
    x->share += (share - x->share) / (float)(x->n_uses < 8 ? x->n_uses : 8);
    x->used = x->ghosted = ++w->clock;
    twin_trim(w);
}

static bool twin_admit(twin *w, uint64_t key, uint64_t n_bytes, size_t max_victims, uint64_t *victims, size_t *n)
{
    item *x = &w->items[key];
    *n = 0;
    if (x->present) return true;
    if (n_bytes == 0 || n_bytes > w->capacity) return false;
    uint64_t bytes = twin_bytes(w);
    bool gone[N_KEYS] = {false};
    size_t n_gone = 0;
    while (bytes + n_bytes > w->capacity) {
        size_t worst = N_KEYS;
        for (size_t k = 0; k < N_KEYS; k++) {
            const item *y = &w->items[k];
            if (!y->present || gone[k]) continue;
            if (worst < N_KEYS) {
                const item *z = &w->items[worst];
                double a = twin_rank(w, y), b = twin_rank(w, z);
                if (a > b || (!(a < b) && y->used > z->used)) continue;
            }
            worst = k;
        }
        if (n_gone == max_victims) return false;
        if (w->kind == IMP_CACHE_SCORE && twin_rank(w, &w->items[worst]) >= twin_rank(w, x)) return false;
        gone[worst] = true;
        victims[n_gone++] = worst;
        bytes -= w->items[worst].n_bytes;
    }
    for (size_t i = n_gone; i-- > 0;) {
        w->items[victims[i]].present = false;
        w->items[victims[i]].ghosted = ++w->clock;
    }
    *n = n_gone;
    x->known = x->present = true;
    x->n_bytes = n_bytes;
    x->used = ++w->clock;
    twin_trim(w);
    return true;
}

static void twin_drop(twin *w, uint64_t key)
{
    item *x = &w->items[key];
    if (!x->present) return;
    x->present = false;
    x->ghosted = ++w->clock;
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
    assert_int_equal(imp_policy_count(p), twin_count(w, true));
    assert_int_equal(imp_policy_bytes(p), twin_bytes(w));
    for (size_t k = 0; k < N_KEYS; k++) assert_int_equal(imp_policy_has(p, k), w->items[k].present);
}

static void against_twin(imp_cache kind, imp_rng *r, uint64_t capacity, uint64_t n_bytes_most, bool few_shares)
{
    twin *w = calloc(1, sizeof *w);
    w->kind = kind;
    w->capacity = capacity;
    imp_policy *p = NULL;
    assert_int_equal(imp_policy_new(kind, capacity, &p), 0);
    for (int step = 0; step < 6000; step++) {
        uint64_t key = pick_key(r), what = imp_rng_below(r, 100);
        if (step >= 2000 && step < 3800) key = (uint64_t)step % N_KEYS; /* a scan: fills and trims the ghosts */
        if (what < 55) {
            float share = few_shares ? 0.25f * (float)imp_rng_below(r, 5) : (float)(imp_rng_unit(r) * 1.2 - 0.1);
            if (imp_rng_below(r, 200) == 0) share = NAN;
            imp_policy_use(p, key, share);
            twin_use(w, key, share);
        } else if (what < 97) {
            uint64_t got[MAX_VICTIMS], want[MAX_VICTIMS];
            size_t n_got = 99, n_want = 0;
            size_t most = imp_rng_below(r, 4) ? MAX_VICTIMS : imp_rng_below(r, 4);
            uint64_t n_bytes = 1 + imp_rng_below(r, n_bytes_most);
            if (imp_rng_below(r, 60) == 0) n_bytes = imp_rng_below(r, 2) * capacity;
            if (imp_rng_below(r, 100) == 0) n_bytes = capacity + 1 + imp_rng_below(r, 5);
            bool yes = twin_admit(w, key, n_bytes, most, want, &n_want);
            assert_int_equal(imp_policy_admit(p, key, n_bytes, got, most, &n_got), yes);
            assert_int_equal(n_got, n_want);
            for (size_t i = 0; i < n_want; i++) assert_int_equal(got[i], want[i]);
        } else {
            imp_policy_drop(p, key);
            twin_drop(w, key);
        }
        assert_true(imp_policy_bytes(p) <= capacity);
        if (step % 300 == 0) same_state(w, p);
    }
    same_state(w, p);
    imp_policy_free(p);
    free(w);
}

static void test_against_twin(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, seed_of_run());
    for (imp_cache kind = IMP_CACHE_LRU; kind <= IMP_CACHE_SCORE; kind++) {
        against_twin(kind, &r, 500, 40, true);
        against_twin(kind, &r, 30000, 100, false);
    }
}

/* ------------------------------------------------------------------------------------------------------ details --- */

static void admit(imp_policy *p, uint64_t key, uint64_t n_bytes, bool want, size_t want_victims, uint64_t want_first)
{
    uint64_t victims[8];
    size_t n = 99;
    assert_int_equal(imp_policy_admit(p, key, n_bytes, victims, 8, &n), want);
    assert_int_equal(n, want_victims);
    if (n > 0) assert_int_equal(victims[0], want_first);
}

static void test_none_and_unknown(void **state)
{
    (void)state;
    imp_policy *p = NULL;
    assert_int_equal(imp_policy_new(IMP_CACHE_NONE, 100, &p), 0);
    imp_policy_use(p, 1, 1);
    admit(p, 1, 1, false, 0, 0);
    assert_int_equal(imp_policy_count(p), 0);
    imp_policy_free(p);
    assert_int_equal(imp_policy_new((imp_cache)99, 100, &p), IMP_E_UNSUPPORTED);
    assert_null(p);
    imp_policy_free(NULL);
}

static void test_lru_order(void **state)
{
    (void)state;
    imp_policy *p = NULL;
    assert_int_equal(imp_policy_new(IMP_CACHE_LRU, 3, &p), 0);
    for (uint64_t k = 1; k <= 3; k++) admit(p, k, 1, true, 0, 0);
    imp_policy_use(p, 1, 0);
    admit(p, 4, 1, true, 1, 2);
    admit(p, 1, 1, true, 0, 0); /* there already; no use */
    admit(p, 5, 2, true, 2, 3);
    assert_true(imp_policy_has(p, 4));
    assert_false(imp_policy_has(p, 1));
    imp_policy_free(p);
}

static void test_lfu_remembers_the_evicted(void **state)
{
    (void)state;
    imp_policy *p = NULL;
    assert_int_equal(imp_policy_new(IMP_CACHE_LFU, 2, &p), 0);
    for (int i = 0; i < 5; i++) imp_policy_use(p, 1, 0);
    for (int i = 0; i < 3; i++) imp_policy_use(p, 2, 0);
    admit(p, 1, 1, true, 0, 0);
    admit(p, 2, 1, true, 0, 0);
    admit(p, 3, 1, true, 1, 2);
    admit(p, 2, 1, true, 1, 3);
    imp_policy_use(p, 2, 0);
    imp_policy_use(p, 2, 0);
    imp_policy_use(p, 2, 0); /* 6 uses by now, more than key 1 */
    admit(p, 4, 1, true, 1, 1);
    imp_policy_free(p);
}

static void test_score_keeps_the_important(void **state)
{
    (void)state;
    imp_policy *p = NULL;
    assert_int_equal(imp_policy_new(IMP_CACHE_SCORE, 2, &p), 0);
    for (int i = 0; i < 10; i++) imp_policy_use(p, 1, 0.1f); /* often, of little use: 1.0 */
    for (int i = 0; i < 4; i++) imp_policy_use(p, 2, 0.75f); /* seldom, of much: 3.0 */
    admit(p, 1, 1, true, 0, 0);
    admit(p, 2, 1, true, 0, 0);
    admit(p, 3, 1, false, 0, 0); /* not seen before */
    imp_policy_use(p, 3, 0.9f);
    admit(p, 3, 1, false, 0, 0);
    imp_policy_use(p, 3, 0.9f);
    admit(p, 3, 1, true, 1, 1);
    /* Two victims, one of them worth more: nothing changes. */
    imp_policy_use(p, 4, 1);
    imp_policy_use(p, 4, 1);
    admit(p, 4, 2, false, 0, 0);
    assert_int_equal(imp_policy_bytes(p), 2);
    assert_true(imp_policy_has(p, 2) && imp_policy_has(p, 3));
    imp_policy_free(p);
}

static void test_large_keys_and_sizes(void **state)
{
    (void)state;
    imp_policy *p = NULL;
    assert_int_equal(imp_policy_new(IMP_CACHE_LRU, UINT64_MAX, &p), 0);
    admit(p, UINT64_MAX, UINT64_MAX - 1, true, 0, 0);
    admit(p, 0, 1, true, 0, 0);
    admit(p, 7, 1, true, 1, UINT64_MAX);
    assert_int_equal(imp_policy_bytes(p), 2);
    admit(p, 7, 0, true, 0, 0);
    admit(p, 8, 0, false, 0, 0);
    imp_policy_free(p);
}

static void test_no_memory_changes_nothing(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, seed_of_run());
    for (imp_cache kind = IMP_CACHE_LRU; kind <= IMP_CACHE_SCORE; kind++) {
        twin *w = calloc(1, sizeof *w);
        w->kind = kind;
        w->capacity = 400;
        imp_policy *p = NULL;
        for (uint64_t fail = 1;; fail++) {
            imp_alloc_fail_at(fail, 1);
            int rc = imp_policy_new(kind, w->capacity, &p);
            imp_alloc_fail_at(0, 0);
            if (rc == 0) break;
            assert_int_equal(rc, IMP_E_NOMEM);
            assert_null(p);
        }
        uint64_t n_failures = 0;
        for (uint64_t key = 0; key < 1000; key++) {
            /* A use or an admission that finds no memory for a new key is as if it had not been. */
            bool used = imp_rng_below(&r, 2);
            uint64_t got[MAX_VICTIMS], want[MAX_VICTIMS], n_bytes = 1 + imp_rng_below(&r, 9);
            size_t n_got, n_want;
            for (uint64_t fail = 1;; fail++) {
                imp_alloc_fail_at(fail, 1);
                bool done = true;
                if (used) imp_policy_use(p, key, 1);
                else done = imp_policy_admit(p, key, n_bytes, got, MAX_VICTIMS, &n_got);
                uint64_t n_allocs = imp_alloc_fail_at(0, 0);
                if (n_allocs < fail) {
                    if (used) twin_use(w, key, 1);
                    else assert_int_equal(done, twin_admit(w, key, n_bytes, MAX_VICTIMS, want, &n_want));
                    break;
                }
                if (!used) assert_false(done);
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
        cmocka_unit_test(test_lfu_remembers_the_evicted),
        cmocka_unit_test(test_score_keeps_the_important),
        cmocka_unit_test(test_large_keys_and_sizes),
        cmocka_unit_test(test_against_twin),
        cmocka_unit_test(test_no_memory_changes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
