#include "eval_stats.h"

#include <stdlib.h>
#include <string.h>

size_t eval_best(const double *values, size_t n)
{
    size_t best = 0;
    for (size_t i = 1; i < n; i++)
        if (values[i] > values[best]) best = i;
    return best;
}

size_t eval_characters(const char *s)
{
    size_t n = 0;
    for (; *s; s++) n += ((unsigned char)*s & 0xC0) != 0x80;
    return n;
}

bool eval_paired_interval(size_t n, size_t n_worse, size_t n_better, double *low, double *high)
{
    static const double tail = 0.025;
    static const double rounding = 1e-12;   /* sums of probabilities are no more exact than this */
    static const double negligible = 1e-20; /* what is cut off at the ends, so that large n stay quick */
    const double worse = (double)n_worse / (double)n, better = (double)n_better / (double)n, same = 1 - worse - better;

    *low = *high = 0;
    /* p[s]: probability that the draws so far sum to s - n; only [from, to] is above zero. */
    double *p = calloc(2 * n + 1, sizeof *p), *next = calloc(2 * n + 1, sizeof *next);
    bool ok = p && next;
    if (!ok) goto end;
    size_t from = n, to = n;
    p[n] = 1;
    for (size_t i = 0; i < n; i++) {
        memset(next + from - 1, 0, (to - from + 3) * sizeof *next);
        for (size_t s = from; s <= to; s++) {
            next[s - 1] += p[s] * worse;
            next[s] += p[s] * same;
            next[s + 1] += p[s] * better;
        }
        from--;
        to++;
        while (from < to && next[from] < negligible) from++;
        while (to > from && next[to] < negligible) to--;
        double *swap = p;
        p = next;
        next = swap;
    }

    size_t s = from;
    for (double sum = p[s]; s < to && sum < tail - rounding; sum += p[s]) s++;
    *low = ((double)s - (double)n) / (double)n;
    s = to;
    for (double sum = p[s]; s > from && sum < tail - rounding; sum += p[s]) s--;
    *high = ((double)s - (double)n) / (double)n;
end:
    free(p);
    free(next);
    return ok;
}

bool eval_summarise(const eval_outcome *const *outcomes, const eval_outcome *const *references, size_t n, bool norm,
                    eval_summary *out)
{
    memset(out, 0, sizeof *out);
    size_t right_sum = 0, right_norm = 0, agree = 0, worse = 0, better = 0;
    double selected = 0, fallback = 0;
    for (size_t i = 0; i < n; i++) {
        const eval_outcome *o = outcomes[i], *r = references[i];
        size_t mine = norm ? o->choice_norm : o->choice_sum, its = norm ? r->choice_norm : r->choice_sum;
        bool right = mine == o->answer, was_right = its == r->answer;
        right_sum += o->choice_sum == o->answer;
        right_norm += o->choice_norm == o->answer;
        agree += mine == its;
        worse += was_right && !right;
        better += right && !was_right;
        out->kl += o->kl;
        out->mass += o->mass;
        out->identify_bytes += (double)o->identify_bytes;
        out->bytes_read += (double)o->bytes_read;
        selected += (double)o->selected;
        fallback += (double)o->fallback;
    }
    double count = (double)n;
    out->n = n;
    out->accuracy_sum = (double)right_sum / count;
    out->accuracy_norm = (double)right_norm / count;
    out->accuracy = norm ? out->accuracy_norm : out->accuracy_sum;
    out->diff = ((double)better - (double)worse) / count;
    out->agreement = (double)agree / count;
    out->kl /= count;
    out->mass /= count;
    out->identify_bytes /= count;
    out->bytes_read /= count;
    out->fallback = selected > 0 ? fallback / selected : 0;
    return eval_paired_interval(n, worse, better, &out->ci_low, &out->ci_high);
}
