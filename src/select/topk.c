/* topk.c: the k best of n in O(n), whatever the input: a radix selection over the bits of the scores, high bits first.
 * (Quickselect is as fast on average, and quadratic on inputs made for it.) */
#include "select/select.h"

#include <math.h>
#include <string.h>

/* A float as an integer that sorts like it: NaN lowest, then -inf .. inf; both zeros are equal. */
static uint32_t key_of(float x)
{
    if (isnan(x)) return 0;
    union { float f; uint32_t u; } bits = {x + 0.0f}; /* -0 becomes 0 */
    return bits.u & 0x80000000u ? ~bits.u : bits.u | 0x80000000u;
}

/* The m-th largest key of x[n] (1 <= m <= n); *n_ties: how many with just this key belong to the m largest.
 * The values that share the bits found so far are gathered in `scratch` and looked at again. */
static uint32_t key_at_rank(const float *x, size_t n, size_t m, float *scratch, size_t *n_ties)
{
    static const struct { unsigned shift, bits; } digits[] = {{21, 11}, {10, 11}, {0, 10}};
    uint32_t found = 0;
    for (size_t i = 0; i < sizeof digits / sizeof digits[0]; i++) {
        unsigned shift = digits[i].shift;
        uint32_t mask = (1u << digits[i].bits) - 1u;
        uint32_t count[2048] = {0};
        for (size_t j = 0; j < n; j++) count[key_of(x[j]) >> shift & mask]++;
        uint32_t digit = mask;
        while (count[digit] < m) m -= count[digit--];
        found |= digit << shift;
        size_t n_left = 0;
        for (size_t j = 0; j < n; j++) {
            float v = x[j];
            if ((key_of(v) >> shift & mask) == digit) scratch[n_left++] = v;
        }
        x = scratch;
        n = n_left;
    }
    *n_ties = m;
    return found;
}

static double share(const float *scores, size_t n, const uint32_t *chosen, size_t k)
{
    if (k == n) return 1.0;
    double all = 0.0, held = 0.0;
    for (size_t i = 0; i < n; i++) all += isfinite(scores[i]) ? (double)scores[i] : 0.0;
    for (size_t i = 0; i < k; i++) held += isfinite(scores[chosen[i]]) ? (double)scores[chosen[i]] : 0.0;
    return all > 0.0 ? held / all : 0.0;
}

void imp_top_k(const float *scores, size_t n, size_t k, size_t keep_first, size_t keep_last, uint32_t *out,
               double *mass, float *scratch)
{
    if (k > n) k = n;
    if (keep_first > k) keep_first = k;
    if (keep_last > k - keep_first) keep_last = k - keep_first;

    size_t end = n - keep_last, n_best = k - keep_first - keep_last, w = 0;
    uint32_t limit = 0;
    size_t n_ties = 0;
    if (n_best > 0) limit = key_at_rank(scores + keep_first, end - keep_first, n_best, scratch, &n_ties);
    for (size_t i = 0; i < keep_first; i++) out[w++] = (uint32_t)i;
    for (size_t i = keep_first; i < end && w < k - keep_last; i++) {
        uint32_t key = key_of(scores[i]);
        if (key > limit || (key == limit && n_ties > 0)) {
            if (key == limit) n_ties--;
            out[w++] = (uint32_t)i;
        }
    }
    for (size_t i = end; i < n; i++) out[w++] = (uint32_t)i;
    if (mass) *mass = share(scores, n, out, k);
}
