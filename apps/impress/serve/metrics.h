/* metrics.h: what the server counts, as text for Prometheus. Numbers only: no text of a prompt, no key.
 *
 * What a request adds goes into the sums, and into its tenant's share of them. A tenant's own page has its share and
 * nothing else: sums, gauges and the store's numbers tell of others. The whole page has the sums, and the shares beside
 * them as impress_tenant_...{tenant="NAME"}.
 *
 * Threads: any. Counters are atomic and independent of each other; a page that is read while they change may be some
 * events apart. */
#ifndef SERVE_METRICS_H
#define SERVE_METRICS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"
#include "oai_reply.h"

/* id, name, labels, help. Entries of one name stand together. Those from STEPS on belong to no tenant. */
#define METRIC_COUNTERS(X)                                                                                             \
    X(PROMPT_TOKENS, "impress_prompt_tokens_total", "", "Tokens of prompts that were answered.")                       \
    X(COMPUTED_TOKENS, "impress_prompt_tokens_computed_total", "", "Of these, tokens that were computed.")             \
    X(CACHED_LIVE, "impress_prompt_tokens_cached_total", "source=\"live\"",                                            \
      "Of these, tokens that were there: in a slot's cells, or in the store.")                                         \
    X(CACHED_STORE, "impress_prompt_tokens_cached_total", "source=\"store\"", "")                                      \
    X(GENERATED_TOKENS, "impress_generated_tokens_total", "", "Tokens of answers.")                                    \
    X(WAY_COMPUTED, "impress_prompts_total", "way=\"computed\"", "Prompts by the way taken to the first token.")       \
    X(WAY_LIVE, "impress_prompts_total", "way=\"live\"", "")                                                           \
    X(WAY_WHOLE, "impress_prompts_total", "way=\"whole\"", "")                                                         \
    X(WAY_PARTIAL, "impress_prompts_total", "way=\"partial\"", "")                                                     \
    X(BYTES_DISK, "impress_prefix_bytes_total", "tier=\"disk\"", "Bytes of prefixes by where they came from.")         \
    X(BYTES_HOST, "impress_prefix_bytes_total", "tier=\"host\"", "")                                                   \
    X(BYTES_DEVICE, "impress_prefix_bytes_total", "tier=\"device\"", "")                                               \
    X(HITS_DISK, "impress_prefix_hits_total", "tier=\"disk\"", "Prompts that took bytes from a tier.")                 \
    X(HITS_HOST, "impress_prefix_hits_total", "tier=\"host\"", "")                                                     \
    X(HITS_DEVICE, "impress_prefix_hits_total", "tier=\"device\"", "")                                                 \
    X(IDENTIFY_BYTES, "impress_identify_bytes_total", "", "Bytes read only to find the tokens that matter.")           \
    X(LAYERS_SELECTED, "impress_layers_selected_total", "", "Layers that chose tokens.")                               \
    X(LAYERS_FALLBACK, "impress_layers_fallback_total", "", "Of these, by all keys though less was asked for.")        \
    X(RETRIES, "impress_load_retries_total", "", "Passes done again because a read failed.")                           \
    X(JOBS_STOP, "impress_answers_total", "end=\"stop\"", "Answers by how they ended.")                                \
    X(JOBS_LENGTH, "impress_answers_total", "end=\"length\"", "")                                                      \
    X(JOBS_CANCELLED, "impress_answers_total", "end=\"cancelled\"", "")                                                \
    X(JOBS_FAILED, "impress_answers_total", "end=\"failed\"", "")                                                      \
    X(REFUSED, "impress_queue_refused_total", "", "Requests refused because the queue was full.")                      \
    X(PREFIX_WAITS, "impress_prefix_waits_total", "",                                                                  \
      "Requests that waited for a prefix that another one was computing.")                                             \
    X(LIVE_COPIES, "impress_live_copies_total", "", "Prefixes taken from another slot's cells.")                       \
    X(LOOK_AHEAD, "impress_look_ahead_prefixes_total", "", "Prefixes of waiting requests that were read ahead.")       \
    X(LOOK_AHEAD_BYTES, "impress_look_ahead_bytes_total", "", "Bytes read from disk for them.")                        \
    X(LOOK_AHEAD_USED, "impress_look_ahead_used_total", "",                                                            \
      "Prompts that took bytes from memory after their prefix had been read ahead.")                                   \
    X(STEPS, "impress_steps_total", "", "Calls of the model.")                                                         \
    X(STEP_FAILURES, "impress_step_failures_total", "", "Of these, calls that failed.")

/* id, name, help: seconds, but for the last column's */
#define METRIC_HISTOGRAMS(X)                                                                                           \
    X(TTFT, "impress_ttft_seconds", "From the request to its first token.")                                            \
    X(QUEUE, "impress_queue_seconds", "From the request to its slot.")                                                 \
    X(MATCH, "impress_match_seconds", "Of the time to the first token: finding the prefix.")                           \
    X(IDENTIFY, "impress_identify_seconds", "Of it: finding the tokens that matter.")                                  \
    X(IO_WAIT, "impress_io_wait_seconds", "Of it: waiting for reads.")                                                 \
    X(GATHER, "impress_gather_seconds", "Of it: checking and copying rows.")                                           \
    X(COMPUTE, "impress_compute_seconds", "Of it: computing, other slots' tokens in the same passes included.")        \
    X(PER_TOKEN, "impress_token_seconds", "Between two tokens of an answer, mean of each answer.")                     \
    X(REQUEST, "impress_request_seconds", "From the request to the end of its answer.")

#define METRIC_COUNTER_ID(id, name, labels, help) METRIC_##id,
#define METRIC_HISTOGRAM_ID(id, name, help) METRIC_##id##_SECONDS,
typedef enum metric_counter { METRIC_COUNTERS(METRIC_COUNTER_ID) METRIC_N_COUNTERS } metric_counter;
typedef enum metric_histogram { METRIC_HISTOGRAMS(METRIC_HISTOGRAM_ID) METRIC_N_HISTOGRAMS } metric_histogram;

typedef enum metric_gauge {
    METRIC_SLOTS, METRIC_SLOTS_BUSY, METRIC_QUEUE_LENGTH, METRIC_LIVE_TOKENS, METRIC_CONNECTIONS, METRIC_N_GAUGES
} metric_gauge;

enum { METRIC_NOBODY = 0 }; /* instead of a tenant: only the sums change */

/* Keep shares of n tenants, numbered from 1, with these labels (UTF-8; copied). Before other threads are there.
 * Returns 0, or -1: no memory. */
int metric_open_tenants(const char *const *labels, size_t n);
void metric_close_tenants(void);

/* Of `tenant`, or METRIC_NOBODY. */
void metric_add(unsigned tenant, metric_counter c, uint64_t n);
void metric_observe(unsigned tenant, metric_histogram h, uint64_t ns);
/* A request was answered with `status`; `route`: static text, such as "/v1/models". */
void metric_http(unsigned tenant, const char *route, int status);
uint64_t metric_get(metric_counter c);
void metric_set(metric_gauge g, uint64_t value);

/* The whole page. `store` may be NULL. */
void metric_write(oai_buffer *b, imp_store *store);
/* The page of one tenant. */
void metric_write_own(oai_buffer *b, unsigned tenant);

#endif
