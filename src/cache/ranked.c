/* ranked.c: policies that rank entries by a number; the order is a min-heap. Equal ranks go by time of use, the oldest
 * first, so that the order is total and what left the heap comes back to the same place in it. */
#include "cache/policy.h"

static bool goes_before(const imp_policy *p, uint32_t a, uint32_t b)
{
    const imp_entry *x = &p->entries[a], *y = &p->entries[b];
    double rank_x = p->ops->rank(x), rank_y = p->ops->rank(y);
    if (rank_x < rank_y) return true;
    if (rank_y < rank_x) return false;
    return x->tick < y->tick;
}

static void set(imp_policy *p, uint32_t place, uint32_t e)
{
    p->heap[place] = e;
    p->entries[e].prev = place;
}

/* Move the entry at `place` up or down to where it belongs. */
static void fix(imp_policy *p, uint32_t place)
{
    uint32_t e = p->heap[place];
    while (place > 0 && goes_before(p, e, p->heap[(place - 1) / 2])) {
        set(p, place, p->heap[(place - 1) / 2]);
        place = (place - 1) / 2;
    }
    for (;;) {
        uint64_t next = 2 * (uint64_t)place + 1;
        if (next >= p->n_heap) break;
        if (next + 1 < p->n_heap && goes_before(p, p->heap[next + 1], p->heap[next])) next++;
        if (!goes_before(p, p->heap[next], e)) break;
        set(p, place, p->heap[next]);
        place = (uint32_t)next;
    }
    set(p, place, e);
}

static void ranked_enter(imp_policy *p, uint32_t e)
{
    set(p, p->n_heap++, e);
    fix(p, p->n_heap - 1);
}

static void ranked_leave(imp_policy *p, uint32_t e)
{
    uint32_t place = p->entries[e].prev, last = p->heap[--p->n_heap];
    if (place == p->n_heap) return;
    set(p, place, last);
    fix(p, place);
}

static void ranked_used(imp_policy *p, uint32_t e) { fix(p, p->entries[e].prev); }

static uint32_t ranked_worst(const imp_policy *p) { return p->n_heap ? p->heap[0] : IMP_NIL; }

static double rank_uses(const imp_entry *e) { return e->n_uses; }

static double rank_score(const imp_entry *e) { return (double)e->n_uses * (double)e->share; }

const imp_policy_ops imp_policy_lfu = {.enter = ranked_enter,
                                       .leave = ranked_leave,
                                       .restore = ranked_enter,
                                       .used = ranked_used,
                                       .worst = ranked_worst,
                                       .rank = rank_uses};

const imp_policy_ops imp_policy_score = {.enter = ranked_enter,
                                         .leave = ranked_leave,
                                         .restore = ranked_enter,
                                         .used = ranked_used,
                                         .worst = ranked_worst,
                                         .rank = rank_score,
                                         .selective = true};
