#include "base/alloc.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* Relaxed throughout: these are counters that order nothing else. A test that wants an exact count allocates in one
 * thread. */
static atomic_uint_fast64_t n_made;  /* allocations since the last imp_alloc_fail_at() */
static atomic_uint_fast64_t fail_at; /* the one to fail, counted like n_made; 0: none */
static atomic_bool fail_stays;

static bool must_fail(void)
{
    uint64_t i = atomic_fetch_add_explicit(&n_made, 1, memory_order_relaxed) + 1;
    uint64_t at = atomic_load_explicit(&fail_at, memory_order_relaxed);
    if (at == 0) return false;
    return i == at || (i > at && atomic_load_explicit(&fail_stays, memory_order_relaxed));
}

uint64_t imp_alloc_fail_at(uint64_t n, int stay)
{
    atomic_store_explicit(&fail_at, 0, memory_order_relaxed);
    uint64_t made = atomic_exchange_explicit(&n_made, 0, memory_order_relaxed);
    atomic_store_explicit(&fail_stays, stay != 0, memory_order_relaxed);
    atomic_store_explicit(&fail_at, n, memory_order_relaxed);
    return made;
}

/* Nothing asked for is still one byte, so that NULL always means failure. */
static size_t at_least_one(size_t n_bytes) { return n_bytes ? n_bytes : 1; }

void *imp_malloc(size_t n_bytes) { return must_fail() ? NULL : malloc(at_least_one(n_bytes)); }

void *imp_calloc(size_t n, size_t n_bytes)
{
    if (n == 0 || n_bytes == 0) n = n_bytes = 1;
    if (n > SIZE_MAX / n_bytes) return NULL;
    return must_fail() ? NULL : calloc(n, n_bytes);
}

void *imp_realloc(void *p, size_t n_bytes) { return must_fail() ? NULL : realloc(p, at_least_one(n_bytes)); }

void *imp_realloc_array(void *p, size_t n, size_t n_bytes)
{
    if (n_bytes != 0 && n > SIZE_MAX / n_bytes) return NULL;
    return imp_realloc(p, n * n_bytes);
}

void *imp_aligned(size_t alignment, size_t n_bytes)
{
    if (must_fail()) return NULL;
    if (alignment < sizeof(void *)) alignment = sizeof(void *);
    void *p = NULL;
    return posix_memalign(&p, alignment, at_least_one(n_bytes)) == 0 ? p : NULL;
}

char *imp_strdup(const char *s)
{
    size_t n_bytes = strlen(s) + 1;
    char *copy = imp_malloc(n_bytes);
    return copy ? memcpy(copy, s, n_bytes) : NULL;
}

void imp_free(void *p) { free(p); }
