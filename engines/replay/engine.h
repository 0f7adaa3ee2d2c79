/* engine.h: an engine whose computation is a table of times and whose I/O is real: it stores prefixes of synthetic keys
 * (keys.h) by the public API, and asks for them as a model would, layer by layer.
 *
 *     t ─► before(l): queries known ─► select ─► scores ─► gather, bus ─► after(l) ─► next layer ... ─► logits
 *
 * before and after are the roofline's (profile.h), slept or passed on the store's virtual clock. What the library
 * itself does takes as long as it takes, or no time on the virtual clock; scoring takes at least what the device would
 * need. The bus is a device of its own that works in the order of layers: rows that don't wait for a choice may cross
 * it at once, others when they are chosen; what the device tier holds doesn't cross it.
 *
 * `scale` is how much smaller rows are than the model's: bytes per token, tiers and the disk's rate shrink together, so
 * that all times stay those of the full size. Reads get smaller too: at 1/16 a chunk of 64 tokens of OPT-30B is 56 KiB
 * instead of 896. Figures are given in full size.
 */
#ifndef REPLAY_ENGINE_H
#define REPLAY_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"
#include "replay/keys.h"
#include "replay/profile.h"

typedef struct replay_setup {
    const replay_shape *shape;
    const replay_profile *profile;
    double scale;             /* 1, 1/2 .. of a head's dimensions, REPLAY_LEAST_DIM at least left */
    const replay_patterns *patterns;
    size_t n_sets;
    uint32_t n_prefixes, prefix_tokens, query_tokens;
    uint64_t seed;
    double disk_bytes_per_s, device_bytes, host_bytes; /* in full size */
    bool simulated;           /* virtual time, through the page cache */
    double stretch;           /* slept time goes so much slower, the disk too, so that what the processor does, which isn't
                                 the modelled device's to do, counts for less; figures are divided again. 1: real time */
} replay_setup;

typedef struct replay_system {
    const char *name;
    bool recompute;           /* loads nothing; the rest doesn't matter then */
    imp_switches switches;
    imp_load_opts load;       /* switches and retention are taken from here and there */
    double retention;
} replay_system;

/* 0, or IMP_E_ARG with a line: a scale that leaves no whole dimensions, no prefixes, ... */
int replay_setup_check(const replay_setup *s);

/* Make a store in `dir` for systems with these switches, with all prefixes. `progress` may be NULL; where it returns
 * false that is the end of it, with IMP_E_BUSY. */
int replay_fill(const replay_setup *s, const imp_switches *switches, const char *dir,
                bool (*progress)(double share, void *user), void *user);

/* A row of n values in f16, which say whose they are: whole numbers below 2048, so that f16 has them exactly. */
void replay_value_fill(uint32_t prefix, uint32_t layer, uint32_t token, size_t n, uint16_t *out);

typedef struct replay_session replay_session;

/* Open the store for one system: empty tiers, and the history that it holds. */
int replay_open(const replay_setup *s, const replay_system *system, const char *dir, replay_session **out);
void replay_close(replay_session *r);

/* What came of a request. Bytes in full size. */
typedef struct replay_answer {
    double ttft_ns;
    double compute_ns;        /* of the roofline alone, with so many cells and nothing to wait for */
    double bus_ns;            /* that the bus was in use */
    double io_wait_ns;        /* slept only */
    double bytes_read, identify_bytes, host_hit_bytes, device_hit_bytes;
    double mass;
    uint64_t n_reads;
    uint32_t n_loaded, n_fallback;
} replay_answer;

/* Question `question` (1 .. of the patterns) about a prefix. */
int replay_ask(replay_session *r, uint32_t prefix, uint32_t question, replay_answer *out);

/* Called for each layer of each request with the chosen positions, rising, and their rows: tests. NULL: nobody. */
typedef void (*replay_watch)(void *user, uint32_t prefix, uint32_t layer, const uint32_t *positions, size_t n,
                             const uint16_t *k, const uint16_t *v);
void replay_set_watch(replay_session *r, replay_watch watch, void *user);

/* Write segments anew, as requests so far suggest. */
int replay_reorder(replay_session *r);

/* Whose question comes when: `n` prefixes by Zipf's law, P(rank) ~ 1 / rank^exponent, prefix i of rank i, and
 * questions that are equally likely. */
typedef struct replay_request {
    uint32_t prefix, question;
} replay_request;
void replay_zipf(uint32_t n_prefixes, uint32_t n_questions, double exponent, uint64_t seed, replay_request *out,
                 size_t n);

#endif
