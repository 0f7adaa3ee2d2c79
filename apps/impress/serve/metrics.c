#include "metrics.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const struct { const char *name, *labels, *help; } counter_table[] = {
#define ROW(id, name, labels, help) {name, labels, help},
    METRIC_COUNTERS(ROW)
#undef ROW
};

static const struct { const char *name, *help; } histogram_table[] = {
#define ROW(id, name, help) {name, help},
    METRIC_HISTOGRAMS(ROW)
#undef ROW
};

static const struct { const char *name, *help; } gauge_table[METRIC_N_GAUGES] = {
    [METRIC_SLOTS] = {"impress_slots", "Slots: requests that can be answered at once."},
    [METRIC_SLOTS_BUSY] = {"impress_slots_busy", "Slots at work."},
    [METRIC_QUEUE_LENGTH] = {"impress_queue_length", "Requests waiting for a slot."},
    [METRIC_LIVE_TOKENS] = {"impress_live_tokens", "Tokens that slots hold in their cells."},
    [METRIC_CONNECTIONS] = {"impress_http_connections", "Open connections."},
};

static const double bounds[] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120};
enum { N_BOUNDS = sizeof bounds / sizeof *bounds, N_PAIRS = 96, N_SHARED = METRIC_STEPS };

/* Numbers of requests: all of them, or one tenant's. Relaxed order everywhere: each stands for itself. */
typedef struct metric_numbers {
    char *label; /* of a tenant */
    atomic_uint_least64_t counters[METRIC_N_COUNTERS];
    struct {
        atomic_uint_least64_t buckets[N_BOUNDS + 1], sum_ns;
    } histograms[METRIC_N_HISTOGRAMS];

    /* Guarded by pairs_lock. */
    struct {
        const char *route;
        int status;
        uint64_t n;
    } pairs[N_PAIRS];
    size_t n_pairs;
} metric_numbers;

static metric_numbers all;
static metric_numbers *tenants; /* [n_tenants], made before there are threads */
static size_t n_tenants;
static atomic_uint_least64_t gauges[METRIC_N_GAUGES];
static pthread_mutex_t pairs_lock = PTHREAD_MUTEX_INITIALIZER;

/* A label's value as it is written: backslash, quote and newline get a backslash. NULL: no memory. */
static char *escaped(const char *label)
{
    char *out = malloc(2 * strlen(label) + 1), *at = out;
    for (const char *c = label; out && *c; c++) {
        if (*c == '\\' || *c == '"' || *c == '\n') *at++ = '\\';
        *at++ = *c == '\n' ? 'n' : *c;
    }
    if (out) *at = '\0';
    return out;
}

int metric_open_tenants(const char *const *labels, size_t n)
{
    metric_close_tenants();
    if (n == 0) return 0;
    tenants = calloc(n, sizeof *tenants);
    bool ok = tenants != NULL;
    for (; ok && n_tenants < n; n_tenants++) ok = (tenants[n_tenants].label = escaped(labels[n_tenants])) != NULL;
    if (!ok) metric_close_tenants();
    return ok ? 0 : -1;
}

void metric_close_tenants(void)
{
    for (size_t i = 0; i < n_tenants; i++) free(tenants[i].label);
    free(tenants);
    tenants = NULL;
    n_tenants = 0;
}

static metric_numbers *share_of(unsigned tenant)
{
    return tenant > 0 && tenant <= n_tenants ? &tenants[tenant - 1] : NULL;
}

static void add_to(metric_numbers *m, metric_counter c, uint64_t n)
{
    if (m) atomic_fetch_add_explicit(&m->counters[c], n, memory_order_relaxed);
}

void metric_add(unsigned tenant, metric_counter c, uint64_t n)
{
    add_to(&all, c, n);
    add_to(share_of(tenant), c, n);
}

static uint64_t get(const metric_numbers *m, size_t c)
{
    return atomic_load_explicit(&m->counters[c], memory_order_relaxed);
}

uint64_t metric_get(metric_counter c) { return get(&all, c); }

void metric_set(metric_gauge g, uint64_t value) { atomic_store_explicit(&gauges[g], value, memory_order_relaxed); }

static void observe_in(metric_numbers *m, metric_histogram h, size_t bucket, uint64_t ns)
{
    if (!m) return;
    atomic_fetch_add_explicit(&m->histograms[h].buckets[bucket], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&m->histograms[h].sum_ns, ns, memory_order_relaxed);
}

void metric_observe(unsigned tenant, metric_histogram h, uint64_t ns)
{
    size_t i = 0;
    while (i < N_BOUNDS && (double)ns > bounds[i] * 1e9) i++;
    observe_in(&all, h, i, ns);
    observe_in(share_of(tenant), h, i, ns);
}

static void count_pair(metric_numbers *m, const char *route, int status)
{
    size_t i = 0;
    if (!m) return;
    while (i < m->n_pairs && (m->pairs[i].status != status || strcmp(m->pairs[i].route, route))) i++;
    if (i == N_PAIRS) return;
    if (i == m->n_pairs) {
        m->pairs[i].route = route;
        m->pairs[i].status = status;
        m->n_pairs++;
    }
    m->pairs[i].n++;
}

void metric_http(unsigned tenant, const char *route, int status)
{
    pthread_mutex_lock(&pairs_lock);
    count_pair(&all, route, status);
    count_pair(share_of(tenant), route, status);
    pthread_mutex_unlock(&pairs_lock);
}

static void put(oai_buffer *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void put(oai_buffer *b, const char *fmt, ...)
{
    char line[512];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    if (n > 0) oai_buffer_add(b, line, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1);
}

static void head(oai_buffer *b, const char *name, const char *type, const char *help)
{
    put(b, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void gauge(oai_buffer *b, const char *name, const char *help, uint64_t value)
{
    head(b, name, "gauge", help);
    put(b, "%s %llu\n", name, (unsigned long long)value);
}

static void counter(oai_buffer *b, const char *name, const char *help, uint64_t value)
{
    head(b, name, "counter", help);
    put(b, "%s %llu\n", name, (unsigned long long)value);
}

static void write_store(oai_buffer *b, imp_store *store)
{
    imp_stats s;
    if (!store || imp_store_stats(store, &s) < 0) return;
    gauge(b, "impress_store_bytes", "Size of the store's directory.", s.disk_bytes);
    gauge(b, "impress_store_limit_bytes", "Upper bound of it.", s.limit_bytes);
    gauge(b, "impress_store_kv_bytes", "Of it, rows of keys and values.", s.kv_bytes);
    gauge(b, "impress_store_prefixes", "Nodes of the tree of prefixes.", s.n_nodes);
    gauge(b, "impress_store_tokens", "Tokens that are stored.", s.n_tokens);
    gauge(b, "impress_store_spaces", "Models and tenants that have something stored.", s.n_spaces);
    head(b, "impress_tier_bytes", "gauge", "Bytes in the tiers of memory.");
    put(b, "impress_tier_bytes{tier=\"host\"} %llu\n", (unsigned long long)s.host_bytes);
    put(b, "impress_tier_bytes{tier=\"device\"} %llu\n", (unsigned long long)s.device_bytes);
    counter(b, "impress_store_lookups_total", "Prefixes looked up.", s.acquires);
    counter(b, "impress_store_hits_total", "Of these, found with at least one token.", s.hits);
    head(b, "impress_store_read_bytes_total", "counter", "Bytes of the store that were used, by where they came from.");
    put(b, "impress_store_read_bytes_total{tier=\"disk\"} %llu\n", (unsigned long long)s.bytes_read);
    put(b, "impress_store_read_bytes_total{tier=\"host\"} %llu\n", (unsigned long long)s.host_hit_bytes);
    put(b, "impress_store_read_bytes_total{tier=\"device\"} %llu\n", (unsigned long long)s.device_hit_bytes);
    counter(b, "impress_store_written_bytes_total", "Bytes written.", s.bytes_written);
    head(b, "impress_store_commits_total", "counter", "Entries handed over to be stored, by what became of them.");
    put(b, "impress_store_commits_total{result=\"taken\"} %llu\n", (unsigned long long)s.commits);
    put(b, "impress_store_commits_total{result=\"known\"} %llu\n", (unsigned long long)s.commits_known);
    put(b, "impress_store_commits_total{result=\"refused\"} %llu\n", (unsigned long long)s.commits_refused);
    put(b, "impress_store_commits_total{result=\"failed\"} %llu\n", (unsigned long long)s.commits_failed);
    counter(b, "impress_store_evictions_total", "Nodes evicted.", s.evicted_nodes);
    counter(b, "impress_store_evicted_bytes_total", "Bytes evicted.", s.evicted_bytes);
    counter(b, "impress_store_reorders_total", "Segments written anew in another order.", s.reorders);
    counter(b, "impress_store_corrupt_chunks_total", "Chunks that failed their checksum.", s.corrupt_chunks);
    counter(b, "impress_store_io_errors_total", "Reads and writes that failed.", s.io_errors);
    counter(b, "impress_store_rebuilds_total", "Catalogues made anew.", s.catalogue_rebuilds);
}

static uint64_t sum_ns(const metric_numbers *m, size_t h)
{
    return atomic_load_explicit(&m->histograms[h].sum_ns, memory_order_relaxed);
}

static uint64_t in_bucket(const metric_numbers *m, size_t h, size_t i)
{
    return atomic_load_explicit(&m->histograms[h].buckets[i], memory_order_relaxed);
}

static void write_histogram(oai_buffer *b, const metric_numbers *m, size_t h)
{
    const char *name = histogram_table[h].name;
    uint64_t n = 0;
    head(b, name, "histogram", histogram_table[h].help);
    for (size_t i = 0; i < N_BOUNDS; i++) {
        n += in_bucket(m, h, i);
        put(b, "%s_bucket{le=\"%g\"} %llu\n", name, bounds[i], (unsigned long long)n);
    }
    n += in_bucket(m, h, N_BOUNDS);
    put(b, "%s_bucket{le=\"+Inf\"} %llu\n", name, (unsigned long long)n);
    put(b, "%s_sum %.9f\n", name, (double)sum_ns(m, h) * 1e-9);
    put(b, "%s_count %llu\n", name, (unsigned long long)n);
}

static void write_build(oai_buffer *b)
{
    head(b, "impress_build_info", "gauge", "The version that runs.");
    put(b, "impress_build_info{version=\"%s\"} 1\n", imp_version());
}

static bool begins_family(size_t c) { return c == 0 || strcmp(counter_table[c].name, counter_table[c - 1].name); }

static void write_http(oai_buffer *b, const metric_numbers *m)
{
    pthread_mutex_lock(&pairs_lock);
    head(b, "impress_http_requests_total", "counter", "Requests answered, by route and status.");
    for (size_t i = 0; i < m->n_pairs; i++)
        put(b, "impress_http_requests_total{route=\"%s\",status=\"%d\"} %llu\n", m->pairs[i].route,
            m->pairs[i].status, (unsigned long long)m->pairs[i].n);
    pthread_mutex_unlock(&pairs_lock);
}

static void write_counters(oai_buffer *b, const metric_numbers *m, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const char *name = counter_table[i].name, *labels = counter_table[i].labels;
        if (begins_family(i)) head(b, name, "counter", counter_table[i].help);
        put(b, "%s%s%s%s %llu\n", name, *labels ? "{" : "", labels, *labels ? "}" : "",
            (unsigned long long)get(m, i));
    }
}

/* ---- shares, for the admin: names of their own, so that sums over a name don't count everything twice */

static void tenant_head(oai_buffer *b, const char *name, const char *type, const char *help)
{
    put(b, "# HELP impress_tenant_%s By tenant: %s\n# TYPE impress_tenant_%s %s\n", name, help, name, type);
}

/* `name` and its labels, of one tenant; the label may be of any length. */
static void tenant_name(oai_buffer *b, const char *name, const char *ending, const char *label, const char *labels)
{
    put(b, "impress_tenant_%s%s{tenant=\"", name, ending);
    oai_buffer_add(b, label, strlen(label));
    put(b, "\"%s%s} ", *labels ? "," : "", labels);
}

static void write_tenants_http(oai_buffer *b)
{
    pthread_mutex_lock(&pairs_lock);
    tenant_head(b, "http_requests_total", "counter", "Requests answered, by route and status.");
    for (size_t t = 0; t < n_tenants; t++) {
        for (size_t i = 0; i < tenants[t].n_pairs; i++) {
            char labels[128];
            snprintf(labels, sizeof labels, "route=\"%s\",status=\"%d\"", tenants[t].pairs[i].route,
                     tenants[t].pairs[i].status);
            tenant_name(b, "http_requests_total", "", tenants[t].label, labels);
            put(b, "%llu\n", (unsigned long long)tenants[t].pairs[i].n);
        }
    }
    pthread_mutex_unlock(&pairs_lock);
}

static void write_tenants(oai_buffer *b)
{
    static const size_t ours = sizeof "impress_" - 1;
    if (n_tenants == 0) return;
    write_tenants_http(b);
    for (size_t i = 0, next; i < N_SHARED; i = next) {
        const char *name = counter_table[i].name + ours;
        tenant_head(b, name, "counter", counter_table[i].help);
        for (next = i + 1; next < N_SHARED && !begins_family(next);) next++;
        for (size_t t = 0; t < n_tenants; t++) {
            for (size_t k = i; k < next; k++) {
                tenant_name(b, name, "", tenants[t].label, counter_table[k].labels);
                put(b, "%llu\n", (unsigned long long)get(&tenants[t], k));
            }
        }
    }
    /* Of times their sums and numbers: buckets for each tenant would make most of the page. */
    for (size_t h = 0; h < METRIC_N_HISTOGRAMS; h++) {
        const char *name = histogram_table[h].name + ours;
        tenant_head(b, name, "summary", histogram_table[h].help);
        for (size_t t = 0; t < n_tenants; t++) {
            uint64_t n = 0;
            for (size_t i = 0; i <= N_BOUNDS; i++) n += in_bucket(&tenants[t], h, i);
            tenant_name(b, name, "_sum", tenants[t].label, "");
            put(b, "%.9f\n", (double)sum_ns(&tenants[t], h) * 1e-9);
            tenant_name(b, name, "_count", tenants[t].label, "");
            put(b, "%llu\n", (unsigned long long)n);
        }
    }
}

void metric_write(oai_buffer *b, imp_store *store)
{
    write_build(b);
    write_http(b, &all);
    write_counters(b, &all, METRIC_N_COUNTERS);
    for (size_t i = 0; i < METRIC_N_GAUGES; i++)
        gauge(b, gauge_table[i].name, gauge_table[i].help,
              atomic_load_explicit(&gauges[i], memory_order_relaxed));
    for (size_t i = 0; i < METRIC_N_HISTOGRAMS; i++) write_histogram(b, &all, i);
    write_store(b, store);
    write_tenants(b);
}

void metric_write_own(oai_buffer *b, unsigned tenant)
{
    const metric_numbers *m = share_of(tenant);
    write_build(b);
    if (!m) return;
    write_http(b, m);
    write_counters(b, m, N_SHARED);
    for (size_t i = 0; i < METRIC_N_HISTOGRAMS; i++) write_histogram(b, m, i);
}
