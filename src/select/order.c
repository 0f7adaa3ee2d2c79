/* order.c: the order of tokens on disk, by a heap sort: it needs no memory of its own and no luck with its input. */
#include "select/order.h"

#include <math.h>
#include <stdbool.h>

enum {
    CORE_SHARE = 8, /* the core is one token of so many */
    SINKS = 4,      /* tokens at the start that nearly every query looks at */
};

uint32_t imp_order_core_tokens(uint32_t n_tokens, uint32_t chunk_tokens)
{
    uint64_t n = ((uint64_t)n_tokens + CORE_SHARE - 1) / CORE_SHARE;
    n = (n + chunk_tokens - 1) / chunk_tokens * chunk_tokens;
    return n < n_tokens ? (uint32_t)n : n_tokens;
}

/* Does token a come after token b? */
static bool after(const float *scores, uint32_t a, uint32_t b)
{
    return scores[a] < scores[b] || (scores[a] == scores[b] && a > b);
}

/* Move the token at `i` down to where the last one to come is on top of all below it. */
static void sift(const float *scores, uint32_t *slots, uint32_t n, uint32_t i)
{
    uint32_t token = slots[i];
    while (i < n / 2) {
        uint32_t child = 2 * i + 1;
        if (child + 1 < n && after(scores, slots[child + 1], slots[child])) child++;
        if (!after(scores, slots[child], token)) break;
        slots[i] = slots[child];
        i = child;
    }
    slots[i] = token;
}

static void sort(const float *scores, uint32_t *slots, uint32_t n)
{
    for (uint32_t i = n / 2; i-- > 0;) sift(scores, slots, n, i);
    for (uint32_t left = n; left > 1;) {
        uint32_t last = slots[0];
        slots[0] = slots[--left];
        slots[left] = last;
        sift(scores, slots, left, 0);
    }
}

void imp_order_slots(imp_order order, const float *scores, uint32_t n, uint32_t n_core, uint32_t *slots, float *scratch)
{
    for (uint32_t i = 0; i < n; i++) slots[i] = i;
    if (order == IMP_ORDER_TOKEN || (order == IMP_ORDER_IMPORTANCE && !scores)) return;

    if (n_core > n) n_core = n;
    if (scores) {
        for (uint32_t i = 0; i < n; i++) scratch[i] = isnan(scores[i]) ? 0.0f : scores[i];
        sort(scratch, slots, n);
        if (order == IMP_ORDER_IMPORTANCE) return;
        for (uint32_t i = 0; i < n; i++) scratch[slots[i]] = i < n_core ? 1.0f : 0.0f;
    } else {
        uint32_t n_first = n_core < SINKS ? n_core : SINKS, n_last = n_core - n_first;
        for (uint32_t i = 0; i < n; i++) scratch[i] = i < n_first || i >= n - n_last ? 1.0f : 0.0f;
    }
    /* scratch says who belongs to the core. */
    uint32_t core = 0, other = n_core;
    for (uint32_t i = 0; i < n; i++) {
        if (scratch[i] > 0.0f) {
            slots[core++] = i;
        } else {
            slots[other++] = i;
        }
    }
}
