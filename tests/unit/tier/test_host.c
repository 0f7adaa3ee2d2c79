/* test_host.c: the tiers: what they give is what was put, held bytes stay whatever moves, each budget holds, every
 * chunk is where the policy has it, threads may share them. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/rng.h"
#include "cache/cache.h"
#include "support/support.h"
#include "tier/host.h"

enum { N_KEYS = 200, MAX_BYTES = 4000, BUDGET = 100000 };

static imp_host_key key_of(uint64_t i)
{
    return (imp_host_key){.segment = 1 + i / 50, .region = (uint32_t)(i % 2), .layer = (uint32_t)(i / 2 % 5),
                          .chunk = (uint32_t)(i / 10 % 5)};
}

static size_t size_of(uint64_t i) { return 1 + (i * 7919) % MAX_BYTES; }

static float share_of(uint64_t i) { return (float)(1 + i % 7) / 7; }

static void put_shared(imp_host *h, uint64_t i, float share)
{
    unsigned char bytes[MAX_BYTES];
    imp_host_key key = key_of(i);
    imp_test_fill(bytes, size_of(i), i, 0);
    imp_host_use(h, &key, share);
    imp_host_put(h, &key, bytes, size_of(i));
}

static void put(imp_host *h, uint64_t i) { put_shared(h, i, share_of(i)); }

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

static const uint64_t budgets[][2] = {{BUDGET, 0}, {0, BUDGET}, {BUDGET, BUDGET / 4}, {BUDGET / 4, BUDGET / 2}};

enum { N_BUDGETS = sizeof budgets / sizeof *budgets };

static void random_steps(imp_cache kind, uint64_t host, uint64_t device)
{
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    imp_host *h;
    imp_host_entry *held[8] = {0};
    uint64_t held_key[8];
    size_t hits = 0, device_hits = 0;
    assert_int_equal(imp_host_new(kind, host, device, &h), 0);
    int n_steps = imp_test_rounds(6000);
    for (int step = 0; step < n_steps; step++) {
        uint64_t i = imp_rng_below(&r, 1 + imp_rng_below(&r, N_KEYS));
        size_t slot = imp_rng_below(&r, 8);
        if (held[slot]) {
            assert_true(imp_test_filled(imp_host_entry_bytes(held[slot]), size_of(held_key[slot]), held_key[slot], 0));
            imp_host_release(h, held[slot]);
        }
        held[slot] = get(h, i);
        held_key[slot] = i;
        if (held[slot]) {
            imp_host_key key = key_of(i);
            hits++;
            device_hits += imp_host_entry_on_device(held[slot]);
            imp_host_use(h, &key, share_of(i));
        } else {
            put(h, i);
        }
        /* Evicted and moved entries that are held still count: 8 at most. */
        assert_true(imp_host_used_bytes(h) <= host + 8 * (MAX_BYTES + 128));
        assert_true(imp_host_device_bytes(h) <= device + 8 * (MAX_BYTES + 128));
    }
    assert_true(hits > (size_t)n_steps / 6);
    assert_true(host == 0 ? device_hits == hits : device == 0 ? device_hits == 0 : device_hits > hits / 10);
    for (int slot = 0; slot < 8; slot++) {
        if (held[slot]) imp_host_release(h, held[slot]);
    }
    assert_true(imp_host_used_bytes(h) <= host && imp_host_used_bytes(h) >= host / 2);
    assert_true(imp_host_device_bytes(h) <= device && imp_host_device_bytes(h) >= device / 2);
    imp_host_free(h);
}

static void test_random(void **state)
{
    (void)state;
    for (imp_cache kind = IMP_CACHE_LRU; kind < IMP_CACHE_OF_STORE; kind++) {
        for (size_t i = 0; i < N_BUDGETS; i++) random_steps(kind, budgets[i][0], budgets[i][1]);
    }
}

/* With nothing held, each chunk is in the one tier in which a policy of our own, told the same, has it; and the tiers'
 * sizes are the policy's. */
static void as_the_policy_says(imp_cache kind, uint64_t host, uint64_t device)
{
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    imp_host *h;
    imp_policy *p;
    uint64_t keys[256], entry_bytes = 0;
    imp_moved moved = {.keys = keys, .max = 256};
    assert_int_equal(imp_host_new(kind, host, device, &h), 0);
    put(h, 0);
    /* That each entry counts besides its bytes. */
    entry_bytes = imp_host_used_bytes(h) + imp_host_device_bytes(h) - size_of(0);
    assert_int_equal(imp_policy_new(kind, device, host, &p), 0);
    imp_policy_use(p, 0, share_of(0));
    (void)imp_policy_admit(p, 0, entry_bytes + size_of(0), &moved);
    for (int step = 0, n_steps = imp_test_rounds(1500); step < n_steps; step++) {
        uint64_t i = imp_rng_below(&r, 1 + imp_rng_below(&r, N_KEYS));
        float share = (float)imp_rng_unit(&r);
        put_shared(h, i, share);
        imp_policy_use(p, i, share);
        (void)imp_policy_promote(p, i, &moved);
        (void)imp_policy_admit(p, i, entry_bytes + size_of(i), &moved);
        assert_int_equal(imp_host_used_bytes(h), imp_policy_bytes(p, IMP_LEVEL_HOST));
        assert_int_equal(imp_host_device_bytes(h), imp_policy_bytes(p, IMP_LEVEL_DEVICE));
        assert_true(imp_host_used_bytes(h) <= host && imp_host_device_bytes(h) <= device);
        for (uint64_t k = 0; k < N_KEYS; k++) {
            imp_host_key key = key_of(k);
            size_t n;
            imp_host_entry *e = imp_host_get(h, &key, &n);
            imp_level level = !e ? IMP_LEVEL_NONE : imp_host_entry_on_device(e) ? IMP_LEVEL_DEVICE : IMP_LEVEL_HOST;
            assert_int_equal(level, imp_policy_where(p, k));
            if (e) imp_host_release(h, e);
        }
    }
    for (uint64_t k = 0; k < N_KEYS; k++) {
        imp_host_entry *e = get(h, k);
        if (e) imp_host_release(h, e);
    }
    imp_policy_free(p);
    imp_host_free(h);
}

static void test_as_the_policy_says(void **state)
{
    (void)state;
    for (imp_cache kind = IMP_CACHE_LRU; kind < IMP_CACHE_OF_STORE; kind++) {
        for (size_t i = 0; i < N_BUDGETS; i++) as_the_policy_says(kind, budgets[i][0], budgets[i][1]);
    }
}

/* What is held stays as it is, in whichever tier it was got from, while its chunk goes up, down and out. */
static void test_held_while_it_moves(void **state)
{
    (void)state;
    imp_host *h;
    unsigned char bytes[1000];
    size_t n;
    imp_host_key a = {.segment = 1}, b = {.segment = 2}, c = {.segment = 3};
    assert_int_equal(imp_host_new(IMP_CACHE_LRU, 1100, 1100, &h), 0);
    memset(bytes, 'a', sizeof bytes);
    imp_host_put(h, &a, bytes, sizeof bytes);
    imp_host_entry *in_front = imp_host_get(h, &a, &n);
    assert_true(imp_host_entry_on_device(in_front));
    memset(bytes, 'b', sizeof bytes);
    imp_host_put(h, &b, bytes, sizeof bytes); /* a goes down */
    imp_host_entry *behind = imp_host_get(h, &a, &n);
    assert_false(imp_host_entry_on_device(behind));
    assert_true(imp_host_device_bytes(h) > 2000); /* a's old bytes, which are held, and b's */
    imp_host_use(h, &a, 1); /* a goes up again, and b down */
    imp_host_entry *again = imp_host_get(h, &a, &n);
    assert_true(imp_host_entry_on_device(again) && again != in_front);
    assert_true(imp_host_entry_on_device(in_front) && !imp_host_entry_on_device(behind));
    imp_host_put(h, &c, bytes, sizeof bytes); /* a goes down, b out */
    imp_host_put(h, &b, bytes, sizeof bytes); /* c goes down, a out */
    assert_null(imp_host_get(h, &a, &n));
    imp_host_entry *const all[] = {in_front, behind, again};
    for (int i = 0; i < 3; i++) {
        const char *held = imp_host_entry_bytes(all[i]);
        for (size_t k = 0; k < sizeof bytes; k++) assert_int_equal(held[k], 'a');
        imp_host_release(h, all[i]);
    }
    assert_true(imp_host_device_bytes(h) <= 1100 && imp_host_used_bytes(h) <= 1100);
    imp_host_free(h);
}

/* A segment's chunks go, in both tiers, and no others; what is held stays until it is released. At any size of the
 * table: a twin counts what each segment has left. */
static void test_forget(void **state)
{
    (void)state;
    enum { SEGMENTS = 40, EACH = 200 };
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    for (imp_cache kind = IMP_CACHE_LRU; kind < IMP_CACHE_OF_STORE; kind++) {
        imp_host *h;
        unsigned char bytes[50] = {0};
        size_t n, n_here = 0;
        bool gone[SEGMENTS] = {false};
        uint64_t ids[SEGMENTS];
        imp_host_entry *held = NULL;
        assert_int_equal(imp_host_new(kind, 1 << 20, 1 << 17, &h), 0);
        imp_host_forget(h, 7); /* of which there is nothing */
        for (uint32_t i = 0; i < SEGMENTS; i++) {
            ids[i] = i % 2 ? i : imp_rng_u64(&r);
            for (uint32_t j = 0; j < EACH; j++) {
                imp_host_key key = {.segment = ids[i], .layer = j / 10, .chunk = j % 10};
                memset(bytes, (int)i, sizeof bytes);
                imp_host_use(h, &key, 1);
                imp_host_put(h, &key, bytes, sizeof bytes);
            }
            if (i % 3 != 2) continue;
            uint32_t k = (uint32_t)imp_rng_below(&r, i + 1);
            imp_host_key key = {.segment = ids[k], .chunk = 3};
            if (!held) held = imp_host_get(h, &key, &n);
            imp_host_forget(h, ids[k]);
            gone[k] = true;
        }
        for (uint32_t i = 0; i < SEGMENTS; i++) {
            for (uint32_t j = 0; j < EACH; j++) {
                imp_host_key key = {.segment = ids[i], .layer = j / 10, .chunk = j % 10};
                imp_host_entry *e = imp_host_get(h, &key, &n);
                assert_int_equal(e != NULL, !gone[i]); /* the budgets have room for all */
                if (!e) continue;
                n_here++;
                assert_int_equal(*(const unsigned char *)imp_host_entry_bytes(e), i);
                imp_host_release(h, e);
            }
        }
        assert_non_null(held);
        uint64_t used = imp_host_used_bytes(h) + imp_host_device_bytes(h);
        assert_int_equal(used, (n_here + 1) * (64 + sizeof bytes));
        const unsigned char *kept = imp_host_entry_bytes(held);
        for (size_t i = 0; i < sizeof bytes; i++) assert_int_equal(kept[i], kept[0]);
        imp_host_release(h, held);
        assert_int_equal(imp_host_used_bytes(h) + imp_host_device_bytes(h), n_here * (64 + sizeof bytes));
        for (uint32_t i = 0; i < SEGMENTS; i++) imp_host_forget(h, ids[i]);
        assert_int_equal(imp_host_used_bytes(h) + imp_host_device_bytes(h), 0);
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

static void no_memory(uint64_t host, uint64_t device)
{
    imp_host *h;
    for (uint64_t n = 1;; n++) {
        imp_alloc_fail_at(n, 0);
        int rc = imp_host_new(IMP_CACHE_LRU, host, device, &h);
        uint64_t made = imp_alloc_fail_at(0, 0);
        if (rc == 0) {
            imp_host_free(h);
            assert_true(made < n);
            break;
        }
        assert_int_equal(rc, IMP_E_NOMEM);
        assert_null(h);
    }
    assert_int_equal(imp_host_new(IMP_CACHE_LRU, host, device, &h), 0);
    for (uint64_t i = 0; i < 3 * N_KEYS; i++) { /* more than the first table has buckets, each step failing somewhere */
        imp_alloc_fail_at(1 + i % 5, 0);
        put(h, i % N_KEYS);
        imp_alloc_fail_at(0, 0);
        imp_host_entry *e = get(h, i % N_KEYS);
        if (e) imp_host_release(h, e);
        assert_true(imp_host_used_bytes(h) <= host && imp_host_device_bytes(h) <= device);
    }
    for (uint64_t i = 0; i < N_KEYS; i++) {
        put(h, i);
        imp_host_entry *e = get(h, i);
        assert_non_null(e); /* a failed put left nothing behind that keeps a later one out */
        imp_host_release(h, e);
    }
    imp_host_free(h);
}

static void test_no_memory(void **state)
{
    (void)state;
    no_memory(1 << 20, 0);
    no_memory(0, 1 << 20);
    no_memory(200000, 100000); /* with moves */
}

typedef struct hammer_args {
    imp_host *h;
    uint64_t seed;
} hammer_args;

static void *hammer(void *arg)
{
    const hammer_args *a = arg;
    imp_rng r;
    imp_rng_seed(&r, a->seed);
    for (int step = 0, n_steps = imp_test_rounds(4000); step < n_steps; step++) {
        uint64_t i = imp_rng_below(&r, 1 + imp_rng_below(&r, N_KEYS));
        imp_host_entry *e = get(a->h, i);
        if (e) {
            imp_host_key key = key_of(i);
            imp_host_use(a->h, &key, share_of(i));
            assert_true(imp_test_filled(imp_host_entry_bytes(e), size_of(i), i, 0));
            imp_host_release(a->h, e);
        } else {
            put(a->h, i);
        }
    }
    return NULL;
}

static void test_threads(void **state)
{
    (void)state;
    for (imp_cache kind = IMP_CACHE_LRU; kind < IMP_CACHE_OF_STORE; kind++) {
        for (size_t b = 0; b < N_BUDGETS; b++) {
            imp_host *h;
            pthread_t threads[4];
            hammer_args args[4];
            assert_int_equal(imp_host_new(kind, budgets[b][0], budgets[b][1], &h), 0);
            for (uint64_t i = 0; i < 4; i++) {
                args[i] = (hammer_args){.h = h, .seed = imp_test_seed() + i};
                assert_int_equal(pthread_create(&threads[i], NULL, hammer, &args[i]), 0);
            }
            for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
            assert_true(imp_host_used_bytes(h) <= budgets[b][0]);
            assert_true(imp_host_device_bytes(h) <= budgets[b][1]);
            imp_host_free(h);
        }
    }
}

/* Bytes that the process has allocated and touched. */
static uint64_t resident(void)
{
    char line[256];
    unsigned long long kib = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f) && sscanf(line, "RssAnon: %llu", &kib) != 1) continue;
    if (f) fclose(f);
    return (uint64_t)kib << 10;
}

enum { FULL_BUDGET = 32 << 20, FULL_CHUNK = 12288 };

typedef struct turns {
    imp_host *tiers[2]; /* the host tier, and the device's */
    uint64_t segment;
    int left;
} turns;

/* One and a half times what there is room for, all of it new. Then it's another thread's turn, while this one lives. */
static void *fill(void *user)
{
    static const unsigned char bytes[FULL_CHUNK];
    turns *t = user;
    for (size_t n = 0; n < FULL_BUDGET + FULL_BUDGET / 2; t->segment++) {
        for (uint32_t i = 0; i < 100; i++, n += FULL_CHUNK) {
            imp_host_key key = {.segment = t->segment, .chunk = i};
            for (int tier = 0; tier < 2; tier++) {
                imp_host_use(t->tiers[tier], &key, 1);
                imp_host_put(t->tiers[tier], &key, bytes, sizeof bytes);
            }
        }
    }
    pthread_t next;
    if (--t->left > 0) {
        assert_int_equal(pthread_create(&next, NULL, fill, t), 0);
        pthread_join(next, NULL);
    }
    return NULL;
}

/* A tier whose chunks come from one thread, then from another, and so on, takes no more memory than from one. */
static void test_memory_of_threads_in_turns(void **state)
{
    (void)state;
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
    skip(); /* whose own memory is among the process's */
#endif
    if (imp_test_rounds(100) < 100) skip(); /* valgrind's, too */
    turns t = {.left = 4};
    uint64_t before = resident();
    assert_int_equal(imp_host_new(IMP_CACHE_LRU, FULL_BUDGET, 0, &t.tiers[0]), 0);
    assert_int_equal(imp_host_new(IMP_CACHE_LRU, 0, FULL_BUDGET, &t.tiers[1]), 0);
    (void)fill(&t);
    uint64_t used = imp_host_used_bytes(t.tiers[0]) + imp_host_device_bytes(t.tiers[1]), all = resident() - before;
    assert_true(used > FULL_BUDGET / 10 * 19 && used <= 2 * FULL_BUDGET);
    if (all < used / 10 * 9 || all > 2 * FULL_BUDGET / 10 * 11 + (4 << 20))
        fail_msg("%d KiB for %d", (int)(all >> 10), (int)(used >> 10));
    for (int tier = 0; tier < 2; tier++) imp_host_free(t.tiers[tier]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_as_the_policy_says),
        cmocka_unit_test(test_held_while_it_moves),
        cmocka_unit_test(test_forget),
        cmocka_unit_test(test_lru_and_limits),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_memory_of_threads_in_turns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
