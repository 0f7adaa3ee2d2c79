/* switches.h: the switches that a system is made of, as options and as text: one table for all commands.
 *
 * A system is written NAME, or NAME+SWITCH=VALUE+SWITCH=VALUE...: a preset, and what is otherwise. What the options of
 * a command say comes in between: "impress+bytes=.375" with `--history-weight 0` and `--bytes .5` is impress with a
 * history weight of 0 and .375 of the bytes. */
#ifndef APP_SWITCHES_H
#define APP_SWITCHES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "impress/llama.h"
#include "options.h"

/* Where the options say nothing else, for the commands that answer. */
#define DEFAULT_SYSTEM "impress"
enum { DEFAULT_WHOLE_BELOW = 1024 };

typedef enum switch_id {
    SWITCH_IDENTIFY,
    SWITCH_ORDER, /* these three are the store's */
    SWITCH_REST,
    SWITCH_CHUNK,
    SWITCH_CACHE, /* and these a request's */
    SWITCH_PREFETCH,
    SWITCH_KEEP_FIRST,
    SWITCH_KEEP_LAST,
    SWITCH_QUERY_ROWS,
    SWITCH_SKETCH_ROWS,
    SWITCH_PROBE_HEADS,
    SWITCH_PROBE_SPREAD,
    SWITCH_PROBE_ALPHA,
    SWITCH_PROBE_SIMILARITY,
    SWITCH_BYTES,
    SWITCH_HISTORY_WEIGHT,
    SWITCH_PERIOD,
    SWITCH_RANK,
    SWITCH_COUNT
} switch_id;

/* What options gave, as text; NULL: nothing. */
typedef struct switch_settings {
    const char *text[SWITCH_COUNT];
} switch_settings;

/* A system, resolved. */
typedef struct app_system {
    char name[128];     /* the preset's, and what differs from it: "impress+bytes=.375" */
    char preset[32];
    bool recompute;     /* `recomp`: nothing is loaded */
    bool chooses;       /* it identifies tokens, so a retention has a meaning */
    imp_load_opts load; /* with the store's switches, too */
    unsigned unused;    /* bit i: switch i was given by an option, and has no meaning for this system */
} app_system;

/* Resolve `text` over the options `given`; `where` names the option or field that it came from. `retention` is for
 * systems that choose. Returns 0, or -1 with one line in `error`. */
enum { SWITCH_ERROR_BYTES = 400 };
int app_system_make(const char *where, const char *text, const switch_settings *given, double retention,
                    app_system *out, char error[SWITCH_ERROR_BYTES]);

/* As it asks of a store: order, rest, chunk, policy, what to keep. */
void app_system_store(const app_system *system, imp_store_opts *opts);

/* Into a request; what isn't a switch stays as it is. */
void app_system_request(const app_system *system, imp_llama_request *request);

/* What distinguishes its stores, as the name of a folder: "core-f16-16-sketch". Returns buf. */
const char *app_system_combination(const app_system *system, char buf[64]);

/* Notes on stderr: switches that were given and have no meaning for any of the systems, a line each. */
void app_system_notes(const app_system *systems, size_t n);

/* Only the store's switches that were given, into `opts`. Returns 0, or -1 with one line in `error`. */
int switch_store_options(const switch_settings *given, imp_store_opts *opts, char error[SWITCH_ERROR_BYTES]);

/* ---- the table */

/* Name and values of a switch as lines of text: "identify", "none, all-keys, ...". NULL past the end. */
const char *switch_name(size_t i);
void switch_values(switch_id i, char *buf, size_t n);

/* The value that a system has for it, as an option would say it. Returns buf. */
const char *switch_value(const app_system *system, switch_id i, char buf[32]);

/* Names of values. */
const char *switch_order_name(imp_order order);
const char *switch_rest_name(imp_rest rest);

/* Table entries of options; `at` is the member of settings struct `base` that is a switch_settings. */
#define SWITCH_AT(base, at, id) offsetof(base, at.text) + (id) * sizeof(const char *)
#define SWITCH_OPT(base, at, id, name, arg, help)                                                                      \
    {                                                                                                                  \
        name, 0, OPT_TEXT, SWITCH_AT(base, at, id), arg, help, false                                                   \
    }

/* Those of a store. */
#define SWITCH_STORE_OPTS(base, at)                                                                                    \
    SWITCH_OPT(base, at, SWITCH_ORDER, "order", "ORDER",                                                               \
               "order on disk of what is stored from now on: token,\nimportance or core (default: the system's)"),     \
    SWITCH_OPT(base, at, SWITCH_REST, "rest", "TYPE",                                                                  \
               "precision on disk of what is stored from now on: raw or f16\n(the cache's own bytes), q8, k8v4 or q4 " \
               "(default: the system's)"),                                                                             \
    SWITCH_OPT(base, at, SWITCH_CHUNK, "chunk", "N",                                                                   \
               "tokens a chunk of what is stored from now on: a multiple of\n16, 16 to 256 (default: the system's)")

/* Those of a request. */
#define SWITCH_REQUEST_OPTS(base, at)                                                                                  \
    SWITCH_OPT(base, at, SWITCH_IDENTIFY, "identify", "HOW",                                                           \
               "how the tokens that matter are found: none, all-keys, probe,\nstatic, chunks, sketch or random"),      \
    SWITCH_OPT(base, at, SWITCH_CACHE, "cache", "POLICY",                                                              \
               "what the host and device caches keep: none, lru, lfu, score,\nattention or aged"),                           \
    SWITCH_OPT(base, at, SWITCH_PREFETCH, "prefetch", "WHAT",                                                          \
               "what is read ahead: none, layers, core or chunks"),                                                    \
    SWITCH_OPT(base, at, SWITCH_KEEP_FIRST, "keep-first", "N", "always load the first N tokens (default: 0)"),         \
    SWITCH_OPT(base, at, SWITCH_KEEP_LAST, "keep-last", "N", "always load the last N tokens (default: 0)"),            \
    SWITCH_OPT(base, at, SWITCH_QUERY_ROWS, "query-rows", "N",                                                         \
               "score by the last N tokens of the query (default: 32)"),                                               \
    SWITCH_OPT(base, at, SWITCH_SKETCH_ROWS, "sketch-rows", "N",                                                       \
               "sketch: N of these, spread evenly, choose what is read\n(default: 8)"),                                \
    SWITCH_OPT(base, at, SWITCH_PROBE_HEADS, "probe-heads", "N", "probe: so many query heads (default: 3)"),           \
    {"probe-spread", 0, OPT_YES, SWITCH_AT(base, at, SWITCH_PROBE_SPREAD), NULL,                                       \
     "probe: heads that use different KV heads, not the first ones", false},                                           \
    SWITCH_OPT(base, at, SWITCH_PROBE_ALPHA, "probe-alpha", "X",                                                       \
               "probe: heads agree from X times the likeness of random sets\n(default: 0.6)"),                         \
    SWITCH_OPT(base, at, SWITCH_PROBE_SIMILARITY, "probe-similarity", "X",                                             \
               "probe: heads agree from likeness X, 0 to 1, instead"),                                                 \
    SWITCH_OPT(base, at, SWITCH_BYTES, "bytes", "SHARE",                                                               \
               "sketch: read at most this share of the prefix's bytes, over 0\nto 1 (default: whatever the best "      \
               "tokens take)"),                                                                                        \
    SWITCH_OPT(base, at, SWITCH_HISTORY_WEIGHT, "history-weight", "X",                                                 \
               "sketch: weight of earlier requests' scores; 0: none\n(default: 0.5)"),                                 \
    SWITCH_OPT(base, at, SWITCH_PERIOD, "period", "N", "chunks: layers that share a choice (default: 4)"),             \
    SWITCH_OPT(base, at, SWITCH_RANK, "rank", "HOW",                                                                   \
               "static: the ranking, prefill or reconstruction (the model\nrepeats the prefix once; default: prefill)")

#endif
