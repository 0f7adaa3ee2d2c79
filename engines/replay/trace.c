#include "replay/trace.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

void replay_trace_free(replay_trace *t)
{
    free(t->first);
    free(t->blocks);
    memset(t, 0, sizeof *t);
}

int replay_trace_split(const replay_trace *t, uint32_t parts, replay_trace *out)
{
    *out = (replay_trace){.n_requests = t->n_requests, .n_uses = t->n_uses * parts, .n_blocks = t->n_blocks * parts,
                          .block_tokens = (t->block_tokens + parts - 1) / parts};
    out->first = malloc((t->n_requests + 1) * sizeof *out->first);
    out->blocks = malloc((out->n_uses + 1) * sizeof *out->blocks);
    if (!out->first || !out->blocks || out->n_uses >= UINT32_MAX) {
        replay_trace_free(out);
        return imp_set_error(IMP_E_NOMEM, "no memory for a trace in smaller blocks");
    }
    for (size_t r = 0; r <= t->n_requests; r++) out->first[r] = t->first[r] * parts;
    for (size_t u = 0; u < out->n_uses; u++) out->blocks[u] = t->blocks[u / parts] * parts + (uint32_t)(u % parts);
    return 0;
}

/* Count the hits of request `r`, of which `in(user, use)` says for each whether it is in the cache. */
static void count(const replay_trace *t, size_t r, const float *weights, bool (*in)(const void *user, uint32_t block),
                  const void *user, replay_hits *out)
{
    bool whole = true;
    for (uint32_t u = t->first[r]; u < t->first[r + 1]; u++) {
        bool hit = in(user, t->blocks[u]);
        whole = whole && hit;
        if (!hit) continue;
        out->tier++;
        out->tier_weight += (double)weights[u];
        if (!whole) continue;
        out->prefix++;
        out->prefix_weight += (double)weights[u];
    }
}

/* --------------------------------------------------------------------------------------------------- policies ---- */

static bool in_sim(const void *sim, uint32_t block) { return imp_sim_where(sim, block) != 0; }

int replay_policy(const replay_trace *t, imp_cache policy, size_t capacity, const float *weights, replay_hits *out)
{
    imp_sim *sim = NULL;
    *out = (replay_hits){0};
    int rc = imp_sim_new(policy, capacity, 0, &sim); /* blocks of one byte */
    for (size_t r = 0; rc == 0 && r < t->n_requests; r++) {
        count(t, r, weights, in_sim, sim, out);
        double mean = 0;
        uint32_t n = t->first[r + 1] - t->first[r];
        for (uint32_t u = t->first[r]; u < t->first[r + 1]; u++) mean += (double)weights[u] / n;
        for (uint32_t u = t->first[r + 1]; u-- > t->first[r];) {
            double w = (double)weights[u];
            if (policy == IMP_CACHE_ATTENTION) w = mean > 0 ? w / mean : 0;
            (void)imp_sim_use(sim, t->blocks[u], 1, w);
        }
    }
    imp_sim_free(sim);
    return rc;
}

/* -------------------------------------------------------------------------------------------------------- MIN ---- */

/* A block in the cache, by when it is needed. */
typedef struct need {
    uint32_t request, depth, block, version;
} need;

typedef struct min_cache {
    need *heap; /* the one that goes first on top; entries of an old version are skipped */
    size_t n_heap, n_in;
    uint32_t *version; /* [n_blocks]: counts the times a block came in or was used */
    bool *in;          /* [n_blocks] */
} min_cache;

static bool goes_first(const need *a, const need *b)
{
    if (a->request != b->request) return a->request > b->request;
    return a->depth > b->depth;
}

static void heap_push(min_cache *c, need x)
{
    size_t at = c->n_heap++;
    for (; at > 0 && goes_first(&x, &c->heap[(at - 1) / 2]); at = (at - 1) / 2) c->heap[at] = c->heap[(at - 1) / 2];
    c->heap[at] = x;
}

static need heap_pop(min_cache *c)
{
    need top = c->heap[0], x = c->heap[--c->n_heap];
    size_t at = 0;
    for (size_t next; (next = 2 * at + 1) < c->n_heap; at = next) {
        if (next + 1 < c->n_heap && goes_first(&c->heap[next + 1], &c->heap[next])) next++;
        if (!goes_first(&c->heap[next], &x)) break;
        c->heap[at] = c->heap[next];
    }
    c->heap[at] = x;
    return top;
}

static bool in_min(const void *in, uint32_t block) { return ((const bool *)in)[block]; }

/* The request of the next use of each use's block; n_requests: there is none. */
static uint32_t *next_uses(const replay_trace *t)
{
    uint32_t *next = malloc((t->n_uses + 1) * sizeof *next), *seen = malloc((t->n_blocks + 1) * sizeof *seen);
    if (next && seen) {
        for (size_t b = 0; b < t->n_blocks; b++) seen[b] = (uint32_t)t->n_requests;
        for (size_t r = t->n_requests; r-- > 0;) {
            for (uint32_t u = t->first[r]; u < t->first[r + 1]; u++) {
                next[u] = seen[t->blocks[u]];
                seen[t->blocks[u]] = (uint32_t)r;
            }
        }
    } else {
        free(next);
        next = NULL;
    }
    free(seen);
    return next;
}

int replay_min(const replay_trace *t, size_t capacity, const float *weights, replay_hits *out)
{
    *out = (replay_hits){0};
    min_cache c = {.heap = malloc((t->n_uses + 1) * sizeof *c.heap),
                   .version = calloc(t->n_blocks + 1, sizeof *c.version),
                   .in = calloc(t->n_blocks + 1, sizeof *c.in)};
    uint32_t *next = next_uses(t);
    int rc = c.heap && c.version && c.in && next ? 0 : imp_set_error(IMP_E_NOMEM, "no memory for the optimum");
    for (size_t r = 0; rc == 0 && r < t->n_requests; r++) {
        count(t, r, weights, in_min, c.in, out);
        for (uint32_t u = t->first[r]; u < t->first[r + 1]; u++) {
            uint32_t b = t->blocks[u];
            bool keep = next[u] < t->n_requests;
            c.version[b]++;
            c.n_in += (size_t)keep - (size_t)c.in[b];
            c.in[b] = keep;
            if (keep) heap_push(&c, (need){next[u], u - t->first[r], b, c.version[b]});
        }
        while (c.n_in > capacity) {
            need x = heap_pop(&c);
            if (!c.in[x.block] || c.version[x.block] != x.version) continue;
            c.in[x.block] = false;
            c.n_in--;
        }
    }
    free(next);
    free(c.in);
    free(c.version);
    free(c.heap);
    return rc;
}

/* ------------------------------------------------------------------------------------------------------ bound ---- */

/* What it takes to hit: a place from after request `from` until request `to`. */
typedef struct stay {
    uint32_t from, to;
    double worth;
} stay;

static size_t find_stays(const replay_trace *t, const float *weights, uint32_t *last, stay *stays)
{
    size_t n = 0;
    for (size_t b = 0; b < t->n_blocks; b++) last[b] = UINT32_MAX;
    for (size_t r = 0; r < t->n_requests; r++) {
        for (uint32_t u = t->first[r]; u < t->first[r + 1]; u++) {
            uint32_t *before = &last[t->blocks[u]];
            if (*before != UINT32_MAX && weights[u] > 0) stays[n++] = (stay){*before, (uint32_t)r, (double)weights[u]};
            *before = (uint32_t)r;
        }
    }
    return n;
}

int replay_weight_bound(const replay_trace *t, size_t capacity, const float *weights, unsigned rounds, double reached,
                        double *out)
{
    size_t n_gaps = t->n_requests + 1; /* gap g lies after request g */
    uint32_t *last = malloc((t->n_blocks + 1) * sizeof *last);
    stay *stays = malloc((t->n_uses + 1) * sizeof *stays);
    double *price = calloc(n_gaps, sizeof *price), *before = malloc((n_gaps + 1) * sizeof *before);
    double *used = malloc((n_gaps + 1) * sizeof *used), best = 0;
    int rc = last && stays && price && before && used ? 0 : imp_set_error(IMP_E_NOMEM, "no memory for the bound");
    if (rc < 0) goto out;
    size_t n = find_stays(t, weights, last, stays);
    for (size_t i = 0; i < n; i++) best += stays[i].worth; /* all prices 0 */
    double stretch = 1;
    unsigned idle = 0; /* rounds without a better bound */
    for (unsigned round = 0; round < rounds; round++) {
        double bound = 0, norm = 0, running = 0;
        before[0] = 0;
        for (size_t g = 0; g < n_gaps; g++) {
            before[g + 1] = before[g] + price[g];
            bound += (double)capacity * price[g];
        }
        memset(used, 0, (n_gaps + 1) * sizeof *used);
        for (size_t i = 0; i < n; i++) {
            double rest = stays[i].worth - (before[stays[i].to] - before[stays[i].from]);
            if (!(rest > 0)) continue;
            bound += rest;
            used[stays[i].from]++;
            used[stays[i].to]--;
        }
        if (bound < best) {
            best = bound;
            idle = 0;
        } else if (++idle == 20) {
            stretch /= 2;
            idle = 0;
        }
        for (size_t g = 0; g < n_gaps; g++) {
            running += used[g];
            used[g] = running - (double)capacity; /* how many too many, which is minus the slope */
            if (used[g] > 0 || price[g] > 0) norm += used[g] * used[g];
        }
        if (!(norm > 0) || !(bound > reached)) break;
        double step = stretch * (bound - reached) / norm;
        for (size_t g = 0; g < n_gaps; g++) {
            if (!(used[g] > 0 || price[g] > 0)) continue;
            price[g] += step * used[g];
            if (!(price[g] > 0)) price[g] = 0;
        }
    }
    *out = best;
out:
    free(used);
    free(before);
    free(price);
    free(stays);
    free(last);
    return rc;
}
