/* select_util.h: what the tests of src/select share. */
#ifndef IMP_TESTS_SELECT_UTIL_H
#define IMP_TESTS_SELECT_UTIL_H

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

/* A generator with the seed of IMP_TEST_SEED or a new one, which is printed. */
static inline imp_rng test_rng(const char *test)
{
    imp_rng r;
    imp_rng_seed_os(&r);
    uint64_t seed = imp_rng_u64(&r);
    const char *given = getenv("IMP_TEST_SEED");
    if (given) seed = strtoull(given, NULL, 0);
    printf("%s: IMP_TEST_SEED=%llu\n", test, (unsigned long long)seed);
    imp_rng_seed(&r, seed);
    return r;
}

/* Memory of exactly this size, so that a sanitizer sees the first byte past it. */
static inline void *test_alloc(size_t n_bytes)
{
    void *p = imp_malloc(n_bytes);
    assert_non_null(p);
    return p;
}

static inline float test_uniform(imp_rng *r, float low, float high)
{
    return low + (float)imp_rng_unit(r) * (high - low);
}

static const char *const test_isas[] = {"plain", "avx2", "avx512", "avx512vnni", "neon"};
enum { TEST_ISAS = 5 };

#endif
