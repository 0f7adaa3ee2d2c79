/* ranked.c: policies that rank entries by a number; the order is a min-heap. Equal ranks go by time of use, the oldest
 * first, so that the order is total and what left the heap comes back to the same place in it. */
#include <math.h>

#include "cache/policy.h"

/* Score: the moving average is the plain mean of the first so many uses, then each new one weighs 1 / this. */
enum { SHARE_WINDOW = 8 };

/* Attention: halved when each known entry has been used so many times more, on average. */
static const double half_life_rounds = 8;

/* Aged: a use counts half when the chunks in the tiers have been used so many times since, on average. */
static const double aged_half_life_rounds = 2, least_share = 1e-6;

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

/* Take a use into the moving average. */
static double mean_share(imp_entry *x, float share)
{
    if (share > 1) share = 1;
    x->share += (share - x->share) / (float)(x->n_uses < SHARE_WINDOW ? x->n_uses : SHARE_WINDOW);
    return x->share;
}

static double rank_score(imp_policy *p, imp_entry *x, float share)
{
    (void)p;
    return (double)x->n_uses * mean_share(x, share);
}

/* log2 of (2^a + 2^b) */
static double log_sum(double a, double b)
{
    double most = a > b ? a : b, least = a > b ? b : a;
    return isinf(least) ? most : most + log2(1 + exp2(least - most));
}

/* All sums decay together, so that the order of those that aren't used doesn't change and needn't be kept up: instead,
 * new shares count ever more. The sums are kept as logarithms, which stay small. */
static double rank_attention(imp_policy *p, imp_entry *x, float share)
{
    p->age += 1 / (half_life_rounds * (double)(imp_policy_present(p) + p->n_ghosts));
    if (!(share > 0)) return x->rank;
    return log_sum(log2((double)share) + p->age, x->rank);
}

/* The same with uses in place of shares. A chunk of which nothing matters is still worth more the more it is used. */
static double rank_aged(imp_policy *p, imp_entry *x, float share)
{
    p->age += 1 / (aged_half_life_rounds * (double)(imp_policy_present(p) + 1));
    double uses = x->n_uses > 1 ? x->rank - log2((double)x->share + least_share) : -INFINITY;
    return log_sum(p->age, uses) + log2(mean_share(x, share) + least_share);
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

const imp_policy_ops imp_policy_aged = {.enter = ranked_enter,
                                        .leave = ranked_leave,
                                        .restore = ranked_enter,
                                        .used = ranked_used,
                                        .worst = ranked_worst,
                                        .rank = rank_aged,
                                        .unused = -INFINITY,
                                        .selective = true};
