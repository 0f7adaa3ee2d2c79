#include "metrics.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
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
enum { N_BOUNDS = sizeof bounds / sizeof *bounds, N_PAIRS = 96 };

/* Relaxed order everywhere: each number stands for itself. */
static atomic_uint_least64_t counters[METRIC_N_COUNTERS], gauges[METRIC_N_GAUGES];
static struct {
    atomic_uint_least64_t buckets[N_BOUNDS + 1], sum_ns;
} histograms[METRIC_N_HISTOGRAMS];

static pthread_mutex_t pairs_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the two below */
static struct {
    const char *route;
    int status;
    uint64_t n;
} pairs[N_PAIRS];
static size_t n_pairs;

void metric_add(metric_counter c, uint64_t n) { atomic_fetch_add_explicit(&counters[c], n, memory_order_relaxed); }

uint64_t metric_get(metric_counter c) { return atomic_load_explicit(&counters[c], memory_order_relaxed); }

void metric_set(metric_gauge g, uint64_t value) { atomic_store_explicit(&gauges[g], value, memory_order_relaxed); }

void metric_observe(metric_histogram h, uint64_t ns)
{
    size_t i = 0;
    while (i < N_BOUNDS && (double)ns > bounds[i] * 1e9) i++;
    atomic_fetch_add_explicit(&histograms[h].buckets[i], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&histograms[h].sum_ns, ns, memory_order_relaxed);
}

void metric_http(const char *route, int status)
{
    pthread_mutex_lock(&pairs_lock);
    size_t i = 0;
    while (i < n_pairs && (pairs[i].status != status || strcmp(pairs[i].route, route))) i++;
    if (i == n_pairs && n_pairs < N_PAIRS) {
        pairs[i].route = route;
        pairs[i].status = status;
        n_pairs++;
    }
    if (i < n_pairs) pairs[i].n++;
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

static void write_histogram(oai_buffer *b, size_t h)
{
    const char *name = histogram_table[h].name;
    uint64_t n = 0;
    head(b, name, "histogram", histogram_table[h].help);
    for (size_t i = 0; i < N_BOUNDS; i++) {
        n += atomic_load_explicit(&histograms[h].buckets[i], memory_order_relaxed);
        put(b, "%s_bucket{le=\"%g\"} %llu\n", name, bounds[i], (unsigned long long)n);
    }
    n += atomic_load_explicit(&histograms[h].buckets[N_BOUNDS], memory_order_relaxed);
    put(b, "%s_bucket{le=\"+Inf\"} %llu\n", name, (unsigned long long)n);
    put(b, "%s_sum %.9f\n", name, (double)atomic_load_explicit(&histograms[h].sum_ns, memory_order_relaxed) * 1e-9);
    put(b, "%s_count %llu\n", name, (unsigned long long)n);
}

void metric_write(oai_buffer *b, imp_store *store)
{
    head(b, "impress_build_info", "gauge", "The version that runs.");
    put(b, "impress_build_info{version=\"%s\"} 1\n", imp_version());

    pthread_mutex_lock(&pairs_lock);
    head(b, "impress_http_requests_total", "counter", "Requests answered, by route and status.");
    for (size_t i = 0; i < n_pairs; i++)
        put(b, "impress_http_requests_total{route=\"%s\",status=\"%d\"} %llu\n", pairs[i].route, pairs[i].status,
            (unsigned long long)pairs[i].n);
    pthread_mutex_unlock(&pairs_lock);

    for (size_t i = 0; i < METRIC_N_COUNTERS; i++) {
        const char *name = counter_table[i].name, *labels = counter_table[i].labels;
        if (i == 0 || strcmp(name, counter_table[i - 1].name)) head(b, name, "counter", counter_table[i].help);
        put(b, "%s%s%s%s %llu\n", name, *labels ? "{" : "", labels, *labels ? "}" : "",
            (unsigned long long)metric_get((metric_counter)i));
    }
    for (size_t i = 0; i < METRIC_N_GAUGES; i++)
        gauge(b, gauge_table[i].name, gauge_table[i].help,
              atomic_load_explicit(&gauges[i], memory_order_relaxed));
    for (size_t i = 0; i < METRIC_N_HISTOGRAMS; i++) write_histogram(b, i);
    write_store(b, store);
}
