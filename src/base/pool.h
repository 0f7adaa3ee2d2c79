/* pool.h: a fixed set of threads that run one function over parts 0..n_parts-1 and return when all are done.
 * The caller takes parts too. */
#ifndef IMP_BASE_POOL_H
#define IMP_BASE_POOL_H

#include <stddef.h>

typedef struct imp_pool imp_pool;

/* n_threads counts the caller: 1 makes no thread. */
int imp_pool_new(unsigned n_threads, imp_pool **out);
void imp_pool_free(imp_pool *pool);
/* One run at a time per pool; `pool` NULL runs in the caller. */
void imp_pool_run(imp_pool *pool, size_t n_parts, void (*fn)(size_t part, void *user), void *user);

#endif
