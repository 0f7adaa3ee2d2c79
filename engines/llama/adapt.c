#include "adapt.h"

#include <math.h>

double lc_ops_of(const lc_ops *ops, size_t n, size_t cells)
{
    double seen = (double)n * ((double)cells + ((double)n - 1) / 2); /* by all of them */
    double times = n < LC_TILE ? ops->slower : 1;
    return (double)n * ops->weights + seen * ops->attention * times;
}

static size_t speed_of(size_t cells)
{
    size_t i = 0;
    for (size_t least = 256; i + 1 < LC_SPEEDS && cells >= least; least *= 2) i++;
    return i;
}

void lc_speed_note(lc_speed *s, const lc_ops *ops, size_t n, size_t cells, double ns, bool guess)
{
    const double newest = 0.3;
    double x = ns / lc_ops_of(ops, n, cells);
    if (n == 0 || !(x > 0) || !isfinite(x)) return;
    size_t tile = n >= LC_TILE, at = speed_of(cells + n);
    double *old = &s->ns[tile][at];
    if (*old > 0 && guess) return;
    bool first = !(*old > 0) || s->guessed[tile][at];
    *old = first ? x : *old + newest * (x - *old);
    s->guessed[tile][at] = guess;
}

/* The nearest that is known, measured ones first, then those of the same kind of batch. */
static double speed_at(const lc_speed *s, size_t n, size_t cells)
{
    size_t tile = n >= LC_TILE, at = speed_of(cells + n), best = 0;
    double ns = -1;
    for (size_t other = 0; other < 2; other++) {
        for (size_t i = 0; i < LC_SPEEDS; i++) {
            size_t t = other ? !tile : tile, far = i < at ? at - i : i - at;
            size_t worth = (s->guessed[t][i] ? 0u : 4u * LC_SPEEDS) + (other ? 0u : 2u * LC_SPEEDS) + LC_SPEEDS - far;
            if (!(s->ns[t][i] > 0) || (ns > 0 && worth <= best)) continue;
            best = worth;
            ns = s->ns[t][i];
        }
    }
    return ns;
}

double lc_speed_expect(const lc_speed *s, const lc_ops *ops, size_t n, size_t cells, size_t batch)
{
    double sum = 0;
    for (size_t done = 0; done < n;) {
        size_t part = n - done < batch || batch == 0 ? n - done : batch;
        double ns = speed_at(s, part, cells + done);
        if (ns < 0) return -1;
        sum += ns * lc_ops_of(ops, part, cells + done);
        done += part;
    }
    return sum;
}

lc_choice lc_choose(const lc_times *t)
{
    double exact = t->computed < t->whole ? t->computed : t->whole;
    if (t->partial * LC_FREE < exact) return LC_PARTIAL;
    return t->computed < t->whole ? LC_COMPUTE : LC_WHOLE;
}
