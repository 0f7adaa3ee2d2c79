/* eval_rows.h: the outcome of each question, kept in a JSON Lines file so that a run can be taken up again.
 *
 * A row is found by all that decides it: model, settings, task, system, retention and a hash of the tokens of question
 * and prefix. So an edited question or another few-shot prefix is a new row, and several runs with other systems or
 * retentions may add to one file. */
#ifndef APP_EVAL_ROWS_H
#define APP_EVAL_ROWS_H

#include <stddef.h>
#include <stdint.h>

#include "eval_stats.h"

enum { EVAL_ERROR_BYTES = 512 };

typedef struct eval_key {
    const char *model;    /* file name */
    uint64_t model_bytes; /* and size: what tells models apart here */
    const char *settings; /* of store and request, one line */
    const char *task;
    const char *system;
    double retention;
    int64_t shots;        /* -1: the prefix is a document */
    const char *id;       /* of the question */
    uint64_t prompt_hash;
} eval_key;

/* What a row tells beyond the outcome; written, never read back. */
typedef struct eval_detail {
    const double *logprobs; /* [n_choices] */
    size_t n_choices;
    size_t prefix_tokens, matched_tokens, loaded_tokens;
    double ms;              /* from the question's tokens to the first logits */
} eval_detail;

typedef struct eval_rows eval_rows;

/* Open, or make, the file and read what it holds; `path` NULL: rows are kept in memory only. A last line that a killed
 * run left unfinished is cut off. Returns 0, or -1 with one line in `error`: another run has the file, or a line (which
 * it names) isn't a row. The file is then as it was. */
int eval_rows_open(const char *path, eval_rows **out, char error[EVAL_ERROR_BYTES]);
void eval_rows_close(eval_rows *rows);

size_t eval_rows_count(const eval_rows *rows);

/* NULL: there is none. Valid until eval_rows_close(). */
const eval_outcome *eval_rows_find(const eval_rows *rows, const eval_key *key);

/* Add a row, and write it at once. Returns 0, or -1 with one line in `error`. */
int eval_rows_add(eval_rows *rows, const eval_key *key, const eval_outcome *outcome, const eval_detail *detail,
                  char error[EVAL_ERROR_BYTES]);

/* FNV-1a over more bytes; begin with EVAL_HASH_SEED. */
#define EVAL_HASH_SEED UINT64_C(0xcbf29ce484222325)
uint64_t eval_hash(uint64_t hash, const void *bytes, size_t n);

#endif
