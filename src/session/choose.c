#include "session/choose.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

void imp_random_scores(uint32_t layer, size_t n, float *scores)
{
    for (size_t i = 0; i < n; i++) { /* splitmix64's mixing */
        uint64_t x = ((uint64_t)layer << 32 | (uint32_t)i) + 0x9e3779b97f4a7c15u;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        scores[i] = (float)((x ^ x >> 31) >> 40) * 0x1p-24f;
    }
}

uint32_t imp_probe_head(uint32_t i, uint32_t n_heads, uint32_t n_kv_heads, unsigned spread, uint32_t *kv_head)
{
    uint32_t group = n_heads / n_kv_heads;
    if (!spread) {
        *kv_head = i / group;
        return i;
    }
    *kv_head = i % n_kv_heads;
    return *kv_head * group + i / n_kv_heads;
}

static double usable(float score) { return score > 0 && isfinite(score) ? (double)score : 0; }

/* Is unit a to be taken before unit b? */
static bool before(const double *sums, uint32_t a, uint32_t b)
{
    if (sums[a] > sums[b] || sums[a] < sums[b]) return sums[a] > sums[b];
    return a < b;
}

static void sift_down(const double *sums, uint32_t *heap, size_t n, size_t at)
{
    uint32_t unit = heap[at];
    for (size_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && before(sums, heap[child + 1], heap[child])) child++;
        if (before(sums, unit, heap[child])) break;
        heap[at] = heap[child];
    }
    heap[at] = unit;
}

/* Mark the best token of a unit that isn't chosen yet. */
static void take_best(const float *scores, size_t n, const uint32_t *unit_of, uint32_t unit, unsigned char *chosen)
{
    size_t best = n;
    for (size_t i = 0; i < n; i++) {
        if (unit_of[i] == unit && !chosen[i] && (best == n || usable(scores[i]) > usable(scores[best]))) best = i;
    }
    if (best < n) chosen[best] = 1;
}

void imp_choose_units(const float *scores, size_t n, const uint32_t *unit_of, size_t n_units, size_t k,
                      size_t keep_first, size_t keep_last, uint32_t *out, unsigned char *chosen, uint32_t *scratch,
                      double *sums)
{
    const double taken = -1;
    uint32_t *heap = scratch, *n_free = scratch + n_units; /* tokens of a unit that may yet be chosen */
    if (keep_first > k) keep_first = k;
    if (keep_last > k - keep_first) keep_last = k - keep_first;
    for (size_t u = 0; u < n_units; u++) {
        heap[u] = (uint32_t)u;
        n_free[u] = 0;
        sums[u] = 0;
    }
    for (size_t i = 0; i < n; i++) {
        chosen[i] = i < keep_first || i >= n - keep_last;
        n_free[unit_of[i]] += !chosen[i];
        sums[unit_of[i]] += chosen[i] ? HUGE_VAL : usable(scores[i]);
    }

    size_t n_left = k - keep_first - keep_last, n_heap = n_units;
    uint32_t unit = 0;
    for (size_t at = n_heap / 2; at-- > 0;) sift_down(sums, heap, n_heap, at);
    while (n_left > 0) {
        unit = heap[0];
        if (n_free[unit] > n_left) break;
        n_left -= n_free[unit];
        heap[0] = heap[--n_heap];
        sift_down(sums, heap, n_heap, 0);
        sums[unit] = taken;
    }
    for (size_t i = 0; i < n; i++) chosen[i] |= sums[unit_of[i]] < 0;
    for (; n_left > 0; n_left--) take_best(scores, n, unit_of, unit, chosen);
    for (size_t i = 0, w = 0; i < n && w < k; i++) {
        if (chosen[i]) out[w++] = (uint32_t)i;
    }
}

double imp_mass_of(const float *scores, size_t n, const uint32_t *chosen, size_t k)
{
    if (k == n) return 1;
    double all = 0, held = 0;
    for (size_t i = 0; i < n; i++) all += usable(scores[i]);
    for (size_t i = 0; i < k; i++) held += usable(scores[chosen[i]]);
    return all > 0 ? held / all : (double)k / (double)n;
}

/* Sort keys[n] by falling value: three rounds of 11 bits. `other`: [n]. Returns where they are. */
static uint32_t *sort_falling(uint32_t *keys, uint32_t *other, size_t n)
{
    enum { BITS = 11, N = 1 << BITS };
    for (unsigned shift = 0; shift < 32; shift += BITS) {
        size_t starts[N + 1] = {0}; /* starts[d + 1] counts, then starts[d] is where digit d goes, the largest first */
        for (size_t i = 0; i < n; i++) starts[N - (keys[i] >> shift & (N - 1))]++;
        for (size_t d = 1; d <= N; d++) starts[d] += starts[d - 1];
        for (size_t i = 0; i < n; i++) other[starts[N - 1 - (keys[i] >> shift & (N - 1))]++] = keys[i];
        uint32_t *swap = keys;
        keys = other;
        other = swap;
    }
    return keys;
}

void imp_mass_curve_add(const float *scores, size_t n, double *curve, uint32_t *scratch)
{
    double all = 0, held = 0;
    for (size_t i = 0; i < n; i++) {
        float x = (float)usable(scores[i]); /* from 0 on: its bits are ordered as it is */
        memcpy(&scratch[i], &x, sizeof x);
        all += (double)x;
    }
    const uint32_t *sorted = sort_falling(scratch, scratch + n, n);
    for (size_t k = 1; k <= n; k++) {
        float x;
        memcpy(&x, &sorted[k - 1], sizeof x);
        held += (double)x;
        curve[k] += !(all > 0) ? (double)k / (double)n : k == n || held > all ? 1 : held / all;
    }
}

size_t imp_mass_count(const double *curve, double sum, size_t least, size_t most)
{
    size_t k = least;
    while (k < most && curve[k] < sum) k++;
    return k;
}
