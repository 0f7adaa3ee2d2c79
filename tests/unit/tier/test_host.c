/* test_host.c: the host tier: what it gives is what was put, held bytes stay, the budget holds, threads may share it. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/rng.h"
#include "support/support.h"
#include "tier/host.h"

enum { N_KEYS = 200, MAX_BYTES = 4000, BUDGET = 100000 };

static imp_host_key key_of(uint64_t i)
{
    return (imp_host_key){.segment = 1 + i / 50, .region = (uint32_t)(i % 2), .layer = (uint32_t)(i / 2 % 5),
                          .chunk = (uint32_t)(i / 10 % 5)};
}

static size_t size_of(uint64_t i) { return 1 + (i * 7919) % MAX_BYTES; }

static void put(imp_host *h, uint64_t i)
{
    unsigned char bytes[MAX_BYTES];
    imp_host_key key = key_of(i);
    imp_test_fill(bytes, size_of(i), i, 0);
    imp_host_use(h, &key, 1);
    imp_host_put(h, &key, bytes, size_of(i));
}

static imp_host_entry *get(imp_host *h, uint64_t i)
{
    imp_host_key key = key_of(i);
    size_t n;
    imp_host_entry *e = imp_host_get(h, &key, &n);
    if (e) {
        assert_int_equal(n, size_of(i));
        assert_true(imp_test_filled(imp_host_entry_bytes(e), n, i, 0));
    }
    return e;
}

static void test_random(void **state)
{
    (void)state;
    static const imp_cache kinds[] = {IMP_CACHE_LRU, IMP_CACHE_LFU, IMP_CACHE_SCORE};
    for (int kind = 0; kind < 3; kind++) {
        imp_rng r;
        imp_rng_seed(&r, imp_test_seed());
        imp_host *h;
        imp_host_entry *held[8] = {0};
        uint64_t held_key[8];
        size_t hits = 0;
        assert_int_equal(imp_host_new(kinds[kind], BUDGET, 0, &h), 0);
        for (int step = 0; step < 20000; step++) {
            uint64_t i = imp_rng_below(&r, N_KEYS);
            size_t slot = imp_rng_below(&r, 8);
            if (held[slot]) {
                assert_true(imp_test_filled(imp_host_entry_bytes(held[slot]), size_of(held_key[slot]), held_key[slot], 0));
                imp_host_release(h, held[slot]);
            }
            held[slot] = get(h, i);
            held_key[slot] = i;
            if (held[slot]) {
                hits++;
            } else {
                put(h, i);
            }
            /* Evicted entries that are held still count: 8 at most. */
            assert_true(imp_host_used_bytes(h) <= BUDGET + 8 * (MAX_BYTES + 128));
        }
        assert_true(hits > 1000);
        for (int slot = 0; slot < 8; slot++) {
            if (held[slot]) imp_host_release(h, held[slot]);
        }
        assert_true(imp_host_used_bytes(h) <= BUDGET);
        assert_true(imp_host_used_bytes(h) > BUDGET / 2);
        imp_host_free(h);
    }
}

static void test_lru_and_limits(void **state)
{
    (void)state;
    imp_host *h;
    unsigned char bytes[1000] = {0};
    size_t n;
    assert_int_equal(imp_host_new(IMP_CACHE_LRU, 3300, 0, &h), 0); /* room for three of 1000 */
    for (uint32_t i = 0; i < 4; i++) {
        imp_host_key key = {.segment = 9, .chunk = i};
        imp_host_use(h, &key, 1);
        imp_host_put(h, &key, bytes, sizeof bytes);
        imp_host_put(h, &key, bytes, sizeof bytes); /* twice is once */
    }
    for (uint32_t i = 0; i < 4; i++) {
        imp_host_key key = {.segment = 9, .chunk = i};
        imp_host_entry *e = imp_host_get(h, &key, &n);
        assert_int_equal(e != NULL, i > 0);
        if (e) imp_host_release(h, e);
    }
    unsigned char large[4000] = {0};
    imp_host_key key = {.segment = 10};
    imp_host_put(h, &key, large, sizeof large); /* more than the budget */
    assert_null(imp_host_get(h, &key, &n));
    assert_true(imp_host_used_bytes(h) > 2900);
    imp_host_free(h);
    imp_host_free(NULL);
}

static void test_no_memory(void **state)
{
    (void)state;
    imp_host *h;
    for (uint64_t n = 1;; n++) {
        imp_alloc_fail_at(n, 0);
        int rc = imp_host_new(IMP_CACHE_LRU, BUDGET, 0, &h);
        uint64_t made = imp_alloc_fail_at(0, 0);
        if (rc == 0) {
            imp_host_free(h);
            assert_true(made < n);
            break;
        }
        assert_int_equal(rc, IMP_E_NOMEM);
        assert_null(h);
    }
    assert_int_equal(imp_host_new(IMP_CACHE_LRU, 1 << 20, 0, &h), 0);
    for (uint64_t i = 0; i < N_KEYS; i++) { /* more than the first table has buckets, each step failing somewhere */
        imp_alloc_fail_at(1 + i % 3, 0);
        put(h, i);
        imp_alloc_fail_at(0, 0);
        imp_host_entry *e = get(h, i);
        if (e) imp_host_release(h, e);
    }
    for (uint64_t i = 0; i < N_KEYS; i++) {
        put(h, i);
        imp_host_entry *e = get(h, i);
        assert_non_null(e); /* a failed put left nothing behind that keeps a later one out */
        imp_host_release(h, e);
    }
    imp_host_free(h);
}

static void *hammer(void *arg)
{
    imp_host *h = arg;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed() + (uint64_t)(uintptr_t)&r);
    for (int step = 0; step < 4000; step++) {
        uint64_t i = imp_rng_below(&r, N_KEYS);
        imp_host_entry *e = get(h, i);
        if (e) {
            imp_host_release(h, e);
        } else {
            put(h, i);
        }
    }
    return NULL;
}

static void test_threads(void **state)
{
    (void)state;
    imp_host *h;
    pthread_t threads[4];
    assert_int_equal(imp_host_new(IMP_CACHE_LRU, BUDGET, 0, &h), 0);
    for (int i = 0; i < 4; i++) assert_int_equal(pthread_create(&threads[i], NULL, hammer, h), 0);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    assert_true(imp_host_used_bytes(h) <= BUDGET);
    imp_host_free(h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_lru_and_limits),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
