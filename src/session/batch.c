/* batch.c: chunks that are at hand, worked on by several threads.
 *
 * Waiting and checking is the load's own thread's; widening and copying take as long as that, or longer, and chunks
 * don't touch each other's rows. Waking threads takes some microseconds, so that few chunks aren't worth it.
 */
#include "base/clock.h"
#include "session/load.h"

enum { PART_CHUNKS = 8, MIN_PARALLEL_CHUNKS = 32 };

static void work_part(size_t part, void *user)
{
    const imp_batch *b = user;
    size_t end = (part + 1) * PART_CHUNKS < b->n ? (part + 1) * PART_CHUNKS : b->n;
    for (size_t i = part * PART_CHUNKS; i < end; i++) b->work(b, b->chunks[i].span, b->chunks[i].c);
}

void imp_batch_end(imp_batch *b)
{
    if (b->n == 0) return;
    uint64_t start = imp_now_ns();
    imp_pool *pool = b->n < MIN_PARALLEL_CHUNKS ? NULL : b->load->channel->pool;
    imp_pool_run(pool, (b->n + PART_CHUNKS - 1) / PART_CHUNKS, work_part, b);
    b->n = 0;
    b->load->stats.gather_ns += imp_now_ns() - start;
}

int imp_batch_add(imp_batch *b, const imp_plan_span *span, uint32_t c, uint32_t piece)
{
    if (b->n == IMP_BATCH_CHUNKS || !imp_stream_is_here(b->slot, piece)) imp_batch_end(b);
    int rc = imp_stream_check(b->load, b->slot, b->layer, span, piece);
    if (rc < 0) return rc;
    b->chunks[b->n].span = span;
    b->chunks[b->n].c = c;
    b->n++;
    return 0;
}
