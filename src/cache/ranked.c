/* ranked.c: policies that rank entries by a number; the order is a min-heap. Equal ranks go by time of use, the oldest
 * first, so that the order is total and what left the heap comes back to the same place in it. */
#include <math.h>

#include "cache/policy.h"

/* Score: the moving average is the plain mean of the first so many uses, then each new one weighs 1 / this. */
enum { SHARE_WINDOW = 8 };

/* Attention: halved when each known entry has been used so many times more, on average. */
static const double half_life_rounds = 8;

/* ------------------------------------------------------------------------------------------------------ heap ----- */

static bool goes_before(const imp_policy *p, uint32_t a, uint32_t b)
{
    const imp_entry *x = &p->entries[a], *y = &p->entries[b];
    if (x->rank < y->rank) return true;
    if (y->rank < x->rank) return false;
    return x->tick < y->tick;
}

static void set(imp_policy *p, imp_tier_order *o, uint32_t place, uint32_t e)
{
    o->heap[place] = e;
    p->entries[e].prev = place;
}

/* Move the entry at `place` up or down to where it belongs. */
static void fix(imp_policy *p, imp_tier_order *o, uint32_t place)
{
    uint32_t e = o->heap[place];
    while (place > 0 && goes_before(p, e, o->heap[(place - 1) / 2])) {
        set(p, o, place, o->heap[(place - 1) / 2]);
        place = (place - 1) / 2;
    }
    for (;;) {
        uint64_t next = 2 * (uint64_t)place + 1;
        if (next >= o->n_heap) break;
        if (next + 1 < o->n_heap && goes_before(p, o->heap[next + 1], o->heap[next])) next++;
        if (!goes_before(p, o->heap[next], e)) break;
        set(p, o, place, o->heap[next]);
        place = (uint32_t)next;
    }
    set(p, o, place, e);
}

static imp_tier_order *order_of(imp_policy *p, uint32_t e) { return &p->tiers[p->entries[e].level]; }

static void ranked_enter(imp_policy *p, uint32_t e)
{
    imp_tier_order *o = order_of(p, e);
    set(p, o, o->n_heap++, e);
    fix(p, o, o->n_heap - 1);
}

static void ranked_leave(imp_policy *p, uint32_t e)
{
    imp_tier_order *o = order_of(p, e);
    uint32_t place = p->entries[e].prev, last = o->heap[--o->n_heap];
    if (place == o->n_heap) return;
    set(p, o, place, last);
    fix(p, o, place);
}

static void ranked_used(imp_policy *p, uint32_t e) { fix(p, order_of(p, e), p->entries[e].prev); }

static uint32_t ranked_worst(const imp_policy *p, imp_level level)
{
    return p->tiers[level].n_heap ? p->tiers[level].heap[0] : IMP_NIL;
}

/* ----------------------------------------------------------------------------------------------------- ranks ----- */

static double rank_uses(imp_policy *p, imp_entry *x, float share)
{
    (void)p;
    (void)share;
    return x->n_uses;
}

static double rank_score(imp_policy *p, imp_entry *x, float share)
{
    (void)p;
    if (share > 1) share = 1;
    x->share += (share - x->share) / (float)(x->n_uses < SHARE_WINDOW ? x->n_uses : SHARE_WINDOW);
    return (double)x->n_uses * (double)x->share;
}

/* All sums decay together, so that the order of those that aren't used doesn't change and needn't be kept up: instead,
 * new shares count ever more. The sums are kept as logarithms, which stay small. */
static double rank_attention(imp_policy *p, imp_entry *x, float share)
{
    p->age += 1 / (half_life_rounds * (double)(imp_policy_present(p) + p->n_ghosts));
    if (!(share > 0)) return x->rank;
    double more = log2((double)share) + p->age, most = more > x->rank ? more : x->rank;
    double least = more > x->rank ? x->rank : more;
    return most + log2(1 + exp2(least - most));
}

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

const imp_policy_ops imp_policy_attention = {.enter = ranked_enter,
                                             .leave = ranked_leave,
                                             .restore = ranked_enter,
                                             .used = ranked_used,
                                             .worst = ranked_worst,
                                             .rank = rank_attention,
                                             .unused = -INFINITY,
                                             .selective = true};
