/* bench_ttft.h: time to the first token, system by system, on one model and a set of prefixes. Shared by
 * `impress bench ttft` and `impress bench peer-llama-server`.
 *
 *     length     prefixes as they are, or cut (and, where one is too short, joined) to so many tokens
 *       cell     a system with a retention: a store of its own, filled from one prefill, warmed by the same questions
 *         limit  how fast the store may be read
 *           state  cold: the store opened anew for each request, nothing in memory or page cache
 *                  warm: the tiers as the requests before left them
 *             request  one question on one prefix: a row
 *
 * A row is a JSON object; all that decides it is part of it, so that a run that was stopped goes on where it was. */
#ifndef APP_BENCH_TTFT_H
#define APP_BENCH_TTFT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "bench_set.h"
#include "options.h"
#include "store_options.h"
#include "text.h"

enum { TTFT_MAX = 16 };

typedef struct ttft_settings {
    const char *model, *prefixes, *question_file, *retention, *lengths, *systems, *limits, *host_cache, *cache_type,
        *out;
    opt_texts files, questions;
    uint64_t n_prefixes, n_warm, reps, seed, n_threads, n_batch, n_ubatch, store_limit;
    bool cold, warm, adaptive, json, raw, verbose;
    store_settings store;
    const char *server; /* of peer-llama-server */
} ttft_settings;

/* Options of both commands. */
#define TTFT_AT(member) offsetof(ttft_settings, member)
#define TTFT_SET_OPTS                                                                                                  \
    {"model", 'm', OPT_TEXT, TTFT_AT(model), "FILE", "the model, a GGUF file", false},                                 \
    {"file", 'f', OPT_TEXTS, TTFT_AT(files), "FILE", "a prefix, a text file; may be given several times", true},       \
    {"prefixes", 0, OPT_TEXT, TTFT_AT(prefixes), "DIR", "all *.txt of a folder", true},                                \
    {"n-prefixes", 0, OPT_COUNT, TTFT_AT(n_prefixes), "N", "only the first N prefixes", true},                         \
    {"prefix-tokens", 0, OPT_TEXT, TTFT_AT(lengths), "LIST",                                                           \
     "cut prefixes to about so many tokens; one that is shorter is\ngone on with the next (default: as they are)",     \
     true},                                                                                                            \
    {"prompt", 'p', OPT_TEXTS, TTFT_AT(questions), "TEXT",                                                             \
     "a question; may be given several times (default: eight of\nabout 32 tokens that suit any text)", true},          \
    {"questions", 0, OPT_TEXT, TTFT_AT(question_file), "FILE", "questions, one a line", true}

#define TTFT_RUN_OPTS                                                                                                  \
    {"seed", 0, OPT_COUNT, TTFT_AT(seed), "N", "of the order in which prefixes come (default: 1)", true},              \
    {"json", 0, OPT_FLAG, TTFT_AT(json), NULL, "print a JSON object a line for each request", true},                   \
    {"out", 'o', OPT_TEXT, TTFT_AT(out), "FILE",                                                                       \
     "append the rows to FILE; what it holds already is not measured\nagain", true},                                   \
    {"raw", 0, OPT_FLAG, TTFT_AT(raw), NULL, "no chat template: prefix, blank line, question", false},                 \
    {"store", 0, OPT_TEXT, TTFT_AT(store.dir), "DIR",                                                                  \
     "folder of the stores, one for each way to keep a prefix\n(default: ~/.cache/impress/bench)", true},              \
    {"store-limit", 0, OPT_SIZE, TTFT_AT(store_limit), "SIZE",                                                         \
     "size limit of each of them (default: its\nown; 10G where it has none)", false},                                  \
    {"threads", 't', OPT_COUNT, TTFT_AT(n_threads), "N", "threads (default: one a core)", false},                      \
    {"batch-size", 'b', OPT_COUNT, TTFT_AT(n_batch), "N", "tokens a decode call (default: 2048)", false},              \
    {"ubatch-size", 'u', OPT_COUNT, TTFT_AT(n_ubatch), "N", "tokens a pass (default: 512)", false},                    \
    {"cache-type", 0, OPT_TEXT, TTFT_AT(cache_type), "TYPE", "the cache's type: f16 (default) or q8_0", false},        \
    {"verbose", 'v', OPT_FLAG, TTFT_AT(verbose), NULL, "show llama.cpp's log and ours", false}

/* ---- rows */

typedef struct ttft_rows ttft_rows;

/* Open, or make, the file and read what it holds; `path` NULL: in memory. A last line that a killed run left unfinished
 * is cut off. Returns an exit code after one line; the file is then as it was. */
int ttft_rows_open(const char *path, ttft_rows **out);
void ttft_rows_close(ttft_rows *rows);

size_t ttft_rows_count(const ttft_rows *rows);
const json_t *ttft_rows_at(const ttft_rows *rows, size_t i);

/* The row with the same fields as `key`, which holds all that decides a row; NULL: there is none. */
const json_t *ttft_rows_find(const ttft_rows *rows, const json_t *key);

/* Add a row, and write it at once. Takes it over. Returns an exit code after one line. */
int ttft_rows_add(ttft_rows *rows, json_t *row);

/* ---- a run */

/* A system with a retention. */
typedef struct ttft_cell {
    app_system system;
    bool adaptive;  /* it may load whole, or compute, where that looks quicker */
    char name[160]; /* the system's, and that */
} ttft_cell;

/* What a request is asked for. */
typedef struct ttft_ask {
    size_t prefix, question, rep;
} ttft_ask;

/* What the rows of a table have in common. */
typedef struct ttft_place {
    size_t length;        /* as asked for; 0: as they are */
    uint64_t io_limit;
    const char *state;
} ttft_place;

/* A row, and the table that it is part of. */
typedef struct ttft_shown {
    ttft_place place;
    const json_t *row;
} ttft_shown;

typedef struct ttft_bench {
    const ttft_settings *s;
    const opt_command *command;
    const char *model_name;
    uint64_t model_bytes;
    size_t lengths[TTFT_MAX], n_lengths, length; /* the last: in hand */
    uint64_t limits[TTFT_MAX];
    size_t n_limits;
    const char *states[2];
    size_t n_states;
    ttft_cell *cells;
    size_t n_cells;
    bench_set set;         /* of the length in hand */
    ttft_ask *asks;        /* [n_asks], in order */
    size_t n_asks;
    float *reference;      /* logits with everything loaded: [prefix][question][n_vocab], where `known` says so */
    bool *known;
    size_t n_vocab;
    app_stores stores;
    struct llama_model *model;
    size_t f16_token_bytes;
    uint64_t bandwidth;    /* of the stores' disk, bytes a second */
    ttft_rows *rows;
    ttft_shown *shown;     /* [n_shown], of this run, those that the file had too */
    size_t n_shown;
    text_progress progress;
    size_t n_done, n_all;
} ttft_bench;

/* Check the settings, and what they ask for. Returns an exit code after one line, as all below. */
int ttft_plan(ttft_bench *b);

/* Read texts, rows and the model. */
int ttft_open(ttft_bench *b);

/* The prefixes of the i-th length, in the source, and the answers over all of their KV. */
int ttft_length(ttft_bench *b, size_t i);

/* All requests of a cell, at every limit and in every state. */
int ttft_cell_run(ttft_bench *b, const ttft_cell *c);

/* A store for it that knows the prefixes and what the first questions taught, with empty caches. */
int ttft_prepare(ttft_bench *b, const ttft_cell *c);

/* Tables over all rows. */
int ttft_tables(const ttft_bench *b);

/* Tables if `rc` is 0, a line where it was stopped, and close everything. Returns the exit code. */
int ttft_finish(ttft_bench *b, int rc);

/* All that decides a row of `system` (with `retention`, and its `kept` on disk). NULL: no memory. */
json_t *ttft_key(const ttft_bench *b, const ttft_place *place, const char *system, double retention, const char *kept,
                 const ttft_ask *ask);

/* Keep and show a row: key, what it came to, its limit, and fields of its own (NULL: none). Takes `key` and `own`. */
int ttft_keep(ttft_bench *b, json_t *key, const app_row *row, const ttft_place *place, json_t *own);

/* Show a row in the tables, and print it where rows are printed. */
int ttft_show(ttft_bench *b, const ttft_place *place, const json_t *row);

/* KL and first token of `logits` against the reference. */
void ttft_compare(const ttft_bench *b, const ttft_ask *ask, const float *logits, app_row *row);

/* Has somebody pressed Ctrl-C? A line says how to go on, the first time. */
bool ttft_stopped(void);
void ttft_watch_signals(void);

/* What the page cache holds of all files below `dir` goes, written out where need be. */
void ttft_drop_pages(const char *dir);

#endif
