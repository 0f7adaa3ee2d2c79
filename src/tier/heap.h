/* heap.h: memory for the chunks of a tier. In a full tier a chunk comes in for others that go, and threads take turns.
 * malloc() gives each thread an arena of its own, at least glibc's does: what the chunks of one thread have left is no
 * use to another, so that a full tier would take its size once for each thread that fills it. Here all take from the
 * same pieces, and what is free is taken first.
 *
 *     piece   from the system: blocks, one behind the other. Not touched, so not resident, before it is needed
 *     block   taken, or free and then in the list of its size; free neighbours become one
 *
 * What is too large for pieces is memory of its own. Thread-safe: one mutex, a leaf. */
#ifndef IMP_TIER_HEAP_H
#define IMP_TIER_HEAP_H

#include <stddef.h>
#include <stdint.h>

typedef struct imp_heap imp_heap;

/* `budget`: about so much will be taken at once. NULL: no memory. */
imp_heap *imp_heap_new(uint64_t budget);
void imp_heap_free(imp_heap *h); /* all was given back; NULL is allowed */

void *imp_heap_take(imp_heap *h, size_t n_bytes); /* at the start of a cache line; NULL: no memory */
void imp_heap_give(imp_heap *h, void *memory);

uint64_t imp_heap_bytes(imp_heap *h); /* that it has from the system */

#endif
