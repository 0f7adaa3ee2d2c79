/* test_heap.c: memory for chunks: nothing overlaps, what was given back is taken again by any thread, all goes back. */
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
#include "tier/heap.h"

enum { BUDGET = 8 << 20, PIECE = BUDGET / 8, LARGEST = PIECE / 8 };

typedef struct taken {
    unsigned char *memory;
    size_t n_bytes;
    uint64_t seed;
} taken;

static void take(imp_heap *h, taken *t, size_t n_bytes, uint64_t seed)
{
    *t = (taken){imp_heap_take(h, n_bytes), n_bytes, seed};
    assert_non_null(t->memory);
    assert_int_equal((uintptr_t)t->memory % 64, 0);
    imp_test_fill(t->memory, n_bytes, seed, 0);
}

static void give(imp_heap *h, taken *t)
{
    if (!t->memory) return;
    assert_true(imp_test_filled(t->memory, t->n_bytes, t->seed, 0));
    imp_heap_give(h, t->memory);
    t->memory = NULL;
}

/* Of all sizes: none, a line more or less, some, and more than pieces have room for. */
static size_t some_size(imp_rng *r)
{
    switch (imp_rng_below(r, 8)) {
    case 0: return imp_rng_below(r, 3) * 64 + imp_rng_below(r, 2);
    case 1: return LARGEST + imp_rng_below(r, 3) - 1;
    case 2: return imp_rng_below(r, 2 * LARGEST);
    default: return imp_rng_below(r, 20000);
    }
}

static void test_random(void **state)
{
    (void)state;
    enum { N = 300 };
    static taken all[N];
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    imp_heap *h = imp_heap_new(BUDGET);
    assert_non_null(h);
    for (int step = 0, n_steps = imp_test_rounds(12000); step < n_steps; step++) {
        taken *t = &all[imp_rng_below(&r, N)];
        give(h, t);
        if (imp_rng_below(&r, 3)) take(h, t, some_size(&r), (uint64_t)step);
        if (step % 2000 == 1999) /* from nothing again */
            for (size_t i = 0; i < N; i++) give(h, &all[i]);
    }
    for (size_t i = 0; i < N; i++) give(h, &all[i]);
    assert_true(imp_heap_bytes(h) <= PIECE);
    imp_heap_free(h);
    imp_heap_free(NULL);
}

/* A full tier, whose oldest go for what comes in: chunks of a size, and some of others. */
enum { RING = 4096 };

typedef struct tier {
    imp_heap *heap;
    imp_rng r;
    taken ring[RING];
    size_t first, n;
    uint64_t n_bytes;
} tier;

static void *fill(void *user)
{
    tier *t = user;
    for (uint64_t n = 0; n < BUDGET + BUDGET / 2;) {
        size_t size = imp_rng_below(&t->r, 10) ? 12352 : 64 + imp_rng_below(&t->r, 60000);
        while (t->n_bytes + size > BUDGET) {
            taken *oldest = &t->ring[t->first];
            t->n_bytes -= oldest->n_bytes;
            give(t->heap, oldest);
            t->first = (t->first + 1) % RING;
            t->n--;
        }
        assert_true(t->n < RING);
        take(t->heap, &t->ring[(t->first + t->n++) % RING], size, n);
        t->n_bytes += size;
        n += size;
    }
    return NULL;
}

static void test_threads_in_turns(void **state)
{
    (void)state;
    static tier t;
    t = (tier){.heap = imp_heap_new(BUDGET)};
    assert_non_null(t.heap);
    imp_rng_seed(&t.r, imp_test_seed());
    for (int turn = 0, n_turns = imp_test_rounds(6); turn < n_turns; turn++) {
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, fill, &t), 0);
        pthread_join(thread, NULL);
        assert_true(imp_heap_bytes(t.heap) <= BUDGET + BUDGET / 10 + PIECE);
    }
    for (; t.n > 0; t.n--, t.first = (t.first + 1) % RING) give(t.heap, &t.ring[t.first]);
    assert_true(imp_heap_bytes(t.heap) <= PIECE);
    imp_heap_free(t.heap);
}

typedef struct hammer_args {
    imp_heap *heap;
    uint64_t seed;
} hammer_args;

static void *hammer(void *arg)
{
    enum { N = 50 };
    const hammer_args *a = arg;
    taken all[N] = {{0}};
    imp_rng r;
    imp_rng_seed(&r, a->seed);
    for (int step = 0, n_steps = imp_test_rounds(2000); step < n_steps; step++) {
        taken *t = &all[imp_rng_below(&r, N)];
        give(a->heap, t);
        take(a->heap, t, some_size(&r), a->seed + (uint64_t)step);
    }
    for (size_t i = 0; i < N; i++) give(a->heap, &all[i]);
    return NULL;
}

static void test_threads_at_once(void **state)
{
    (void)state;
    enum { THREADS = 4 };
    pthread_t threads[THREADS];
    hammer_args args[THREADS];
    imp_heap *h = imp_heap_new(BUDGET);
    assert_non_null(h);
    for (uint64_t i = 0; i < THREADS; i++) {
        args[i] = (hammer_args){h, imp_test_seed() + i};
        assert_int_equal(pthread_create(&threads[i], NULL, hammer, &args[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    assert_true(imp_heap_bytes(h) <= PIECE);
    imp_heap_free(h);
}

static void test_no_memory(void **state)
{
    (void)state;
    imp_alloc_fail_at(1, 0);
    imp_heap *h = imp_heap_new(BUDGET);
    assert_null(h);
    imp_alloc_fail_at(0, 0);
    h = imp_heap_new(BUDGET);
    assert_non_null(h);
    const size_t sizes[] = {1, LARGEST + 1}; /* a piece; memory of its own */
    for (size_t i = 0; i < 2; i++) {
        imp_alloc_fail_at(1, 0);
        assert_null(imp_heap_take(h, sizes[i]));
        imp_alloc_fail_at(0, 0);
        assert_int_equal(imp_heap_bytes(h), 0);
    }
    assert_null(imp_heap_take(h, SIZE_MAX - 10));
    taken small, large;
    take(h, &small, 1, 1);
    take(h, &large, LARGEST + 1, 2);
    assert_true(imp_heap_bytes(h) >= PIECE + LARGEST);
    give(h, &large);
    give(h, &small);
    imp_heap_free(h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_threads_in_turns),
        cmocka_unit_test(test_threads_at_once),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
