#include "session/costs.h"

#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/status.h"
#include "session/channel.h"
#include "store/store.h"

enum { MAX_GAP = 32 << 10, N_ROUNDS = 4, ROUND_NS = 40000000, TRIAL_DEPTH = 32, LEAST_BYTES = 1 << 20 };

bool imp_costs_fit(const imp_cost_sample *samples, size_t n, double *read_ns, double *byte_ns)
{
    double w = 0, wx = 0, wy = 0, wxx = 0, wxy = 0;
    for (size_t i = 0; i < n; i++) {
        double x = samples[i].bytes, y = samples[i].ns;
        if (!(y > 0) || !isfinite(y)) return false;
        double weight = 1 / (y * y);
        w += weight, wx += weight * x, wy += weight * y, wxx += weight * x * x, wxy += weight * x * y;
    }
    double d = w * wxx - wx * wx;
    if (n < 2 || !(d > 1e-12 * w * wxx)) return false;
    *byte_ns = (w * wxy - wx * wy) / d;
    *read_ns = (wy - *byte_ns * wx) / w;
    if (*read_ns < 0 || *byte_ns <= 0) { /* through 0 */
        *read_ns = 0;
        *byte_ns = wxy / wxx;
    }
    return true;
}

static double byte_cost(const imp_read_costs *costs, uint64_t read_bytes_per_s)
{
    double cap = read_bytes_per_s ? 1e9 / (double)read_bytes_per_s : 0;
    return costs->byte_ns > cap ? costs->byte_ns : cap;
}

size_t imp_costs_gap(const imp_read_costs *costs, uint64_t read_bytes_per_s)
{
    if (!costs->measured_s) return 0;
    double gap = costs->read_ns / byte_cost(costs, read_bytes_per_s);
    return gap >= MAX_GAP ? MAX_GAP : gap > 0 ? (size_t)gap : 0;
}

double imp_costs_ns(const imp_read_costs *costs, uint64_t read_bytes_per_s, uint64_t n_reads, uint64_t n_bytes)
{
    double device = (double)n_reads * costs->read_ns + (double)n_bytes * costs->byte_ns;
    double cap = read_bytes_per_s ? (double)n_bytes * 1e9 / (double)read_bytes_per_s : 0;
    return device > cap ? device : cap;
}

double imp_costs_share(double retention, uint32_t chunk_tokens, bool ordered)
{
    /* As measured on real models at a retention of a quarter (docs/design/sketch.md): 16 tokens 2.8 and in order of
     * importance 2.2 times the wanted bytes, 64 tokens 3.7 and 2.6. */
    double times = chunk_tokens <= 16 ? (ordered ? 2.2 : 2.8) : ordered ? 2.6 : 3.7;
    return retention * times < 1 ? retention * times : 1;
}

/* ---- measuring */

/* Reads of one size at random places: the quickest of several rounds, as whatever else goes on only makes them slower. */
static int time_reads(const char *path, const imp_store_opts *o, uint32_t block_bytes, imp_cost_sample *out)
{
    *out = (imp_cost_sample){.bytes = block_bytes};
    for (uint64_t i = 0; i < N_ROUNDS; i++) {
        const imp_read_trial trial = {
            .struct_bytes = sizeof trial, .mode = o->io_mode, .flags = o->flags & IMP_STORE_NO_DIRECT, .random = 1,
            .seed = i + 1, .block_bytes = block_bytes, .depth = TRIAL_DEPTH, .max_bytes = UINT64_MAX / 2,
            .max_ns = ROUND_NS,
        };
        imp_read_figures figures;
        int rc = imp_measure_reads(path, &trial, &figures);
        if (rc < 0) return rc;
        double ns = (double)figures.ns / (double)figures.n_reads;
        if (i == 0 || ns < out->ns) out->ns = ns;
    }
    return 0;
}

static int measure(imp_store *store, const char *path, imp_read_costs *out)
{
    static const uint32_t sizes[] = {8 << 10, 16 << 10, 64 << 10, 256 << 10};
    enum { N_SIZES = sizeof sizes / sizeof *sizes };
    imp_cost_sample samples[N_SIZES];
    for (size_t i = 0; i < N_SIZES; i++) {
        int rc = time_reads(path, imp_store_options(store), sizes[i], &samples[i]);
        if (rc < 0) return rc;
    }
    if (!imp_costs_fit(samples, N_SIZES, &out->read_ns, &out->byte_ns))
        return imp_fail(IMP_E_IO, "the times of reads of %s make no sense", path);
    out->measured_s = imp_wall_s();
    return 0;
}

int imp_store_calibrate(imp_store *store, imp_read_costs *out)
{
    imp_session *session = NULL;
    imp_read_costs costs = {0};
    char *path = NULL;
    if (out) *out = costs;
    if (!store) return imp_fail(IMP_E_ARG, "imp_store_calibrate: no store");
    imp_kept_line kept;
    imp_error_keep(&kept);
    int rc = imp_session_of(store, &session);
    if (rc == 0 && imp_store_options(store)->flags & IMP_STORE_READONLY)
        rc = imp_fail(IMP_E_PERM, "a store that is open to read only keeps no times of reads");
    if (rc == 0 && imp_store_options(store)->io_mode == IMP_IO_VIRTUAL)
        rc = imp_fail(IMP_E_UNSUPPORTED, "reads of a simulation can't be timed");
    if (rc == 0) rc = imp_store_largest(store, LEAST_BYTES, &path);
    if (rc == 0) rc = measure(store, path, &costs);
    if (rc == 0) rc = imp_store_costs_put(store, &costs);
    if (rc == 0) rc = imp_store_costs_get(store, true, &costs); /* with its device, and as later ones will find it */
    if (rc == 0) imp_session_set_costs(session, &costs);
    if (rc == 0 && out) *out = costs;
    imp_free(path);
    return imp_error_back(&kept, rc);
}

int imp_store_get_read_costs(imp_store *store, imp_read_costs *out)
{
    imp_session *session;
    if (out) *out = (imp_read_costs){0};
    if (!store || !out) return imp_fail(IMP_E_ARG, "imp_store_get_read_costs: store or result missing");
    imp_kept_line kept;
    imp_error_keep(&kept);
    int rc = imp_session_of(store, &session);
    if (rc == 0) imp_session_costs(session, out);
    return imp_error_back(&kept, rc);
}
