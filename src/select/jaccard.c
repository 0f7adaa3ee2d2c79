#include "select/jaccard.h"

#include <string.h>

#include "select/select.h"

double imp_jaccard(imp_index_set a, imp_index_set b)
{
    size_t i = 0, j = 0, both = 0;
    while (i < a.n && j < b.n) {
        uint32_t x = a.indices[i], y = b.indices[j];
        both += x == y;
        i += x <= y;
        j += y <= x;
    }
    size_t either = a.n + b.n - both;
    return either ? (double)both / (double)either : 1.0;
}

double imp_jaccard_mean(const imp_index_set *sets, size_t n_sets)
{
    if (n_sets < 2) return 1.0;
    double sum = 0.0;
    for (size_t i = 0; i < n_sets; i++) {
        for (size_t j = i + 1; j < n_sets; j++) sum += imp_jaccard(sets[i], sets[j]);
    }
    return sum / ((double)n_sets * (double)(n_sets - 1) / 2.0);
}

double imp_jaccard_random(size_t k, size_t n)
{
    if (k >= n) return 1.0;
    double r = (double)k / (double)n;
    return r / (2.0 - r);
}

void imp_vote(const imp_index_set *sets, size_t n_sets, const float *scores, size_t n, size_t k, uint32_t *out,
              uint32_t *votes, float *scratch)
{
    if (k > n) k = n;
    if (k == 0) return;
    memset(votes, 0, n * sizeof *votes);
    for (size_t s = 0; s < n_sets; s++) {
        for (size_t i = 0; i < sets[s].n; i++) votes[sets[s].indices[i]]++;
    }

    /* The lowest number of votes that is still chosen; n_above tokens have more. Few sets, so counting is cheap. */
    size_t level = n_sets, n_above = 0, n_level;
    for (;; level--) {
        n_level = 0;
        for (size_t i = 0; i < n; i++) n_level += votes[i] == level;
        if (n_above + n_level >= k) break;
        n_above += n_level;
    }

    /* The best of that level, as positions among the tokens of the level. They wait at the end of `out`, which the
     * merge below never overtakes: it has written at most n_above + j when it reads the j-th. */
    float *of_level = scratch, *more = scratch + n;
    size_t m = 0;
    for (size_t i = 0; i < n; i++) {
        if (votes[i] == level) of_level[m++] = scores[i];
    }
    uint32_t *chosen = out + n_above;
    imp_top_k(of_level, n_level, k - n_above, 0, 0, chosen, NULL, more);

    size_t w = 0, seen = 0, taken = 0;
    for (size_t i = 0; i < n && w < k; i++) {
        if (votes[i] > level) {
            out[w++] = (uint32_t)i;
        } else if (votes[i] == level && taken < k - n_above && seen++ == chosen[taken]) {
            taken++;
            out[w++] = (uint32_t)i;
        }
    }
}
