/* alloc.h: the one way to memory, so that tests can make each allocation fail in turn. Free with imp_free().
 * None of these aborts; NULL means the memory isn't there (and imp_fail() was not called). */
#ifndef IMP_BASE_ALLOC_H
#define IMP_BASE_ALLOC_H

#include <stddef.h>
#include <stdint.h>

void *imp_malloc(size_t n_bytes);
void *imp_calloc(size_t n, size_t n_bytes); /* checks for overflow */
void *imp_realloc(void *p, size_t n_bytes);
void *imp_realloc_array(void *p, size_t n, size_t n_bytes); /* checks for overflow */
void *imp_aligned(size_t alignment, size_t n_bytes);        /* contents undefined; alignment a power of two */
char *imp_strdup(const char *s);
void imp_free(void *p);

/* Tests: let the `n`-th allocation from now on (1 = the next) fail, in this process; and all later ones too with
 * `stay`. 0 switches it off. Returns how many allocations were made since the last call. */
uint64_t imp_alloc_fail_at(uint64_t n, int stay);

#endif
