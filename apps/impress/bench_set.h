/* bench_set.h: prefixes and questions that benchmarks ask about them, as tokens. */
#ifndef APP_BENCH_SET_H
#define APP_BENCH_SET_H

#include <stdbool.h>
#include <stddef.h>

#include "answer.h"
#include "options.h"
#include "stores.h"

typedef struct bench_prefix {
    char *path;
    char *text;
    size_t n_bytes;
    app_prompt *prompts; /* [n_questions of the set] */
    app_prefix shared;   /* what all of them begin with */
} bench_prefix;

typedef struct bench_set {
    char **questions; /* [n_questions]; the first n_warm only warm caches and history */
    size_t n_questions, n_warm;
    bench_prefix *prefixes; /* [n_prefixes] */
    size_t n_prefixes;
    size_t longest; /* prompt, tokens */
} bench_set;

/* Read the texts: files `files`, and all *.txt of folder `dir` (NULL: none); questions `asked`, or one a line from
 * `question_file` (NULL: none), or those that are built in. Returns an exit code after one line, as all below. */
int bench_set_read(bench_set *set, const opt_texts *files, const char *dir, const opt_texts *asked,
                   const char *question_file, size_t n_warm);

/* Turn them into tokens. */
int bench_set_tokens(bench_set *set, const struct llama_model *model, bool raw);

void bench_set_free(bench_set *set);

/* Ask question `q` on prefix `p`, with at most the shared prefix from the store, to the first token's logits. `row` is
 * cleared first. */
int bench_ask(app_stores *s, const bench_set *set, size_t p, size_t q, const imp_llama_request *request, app_row *row);

#endif
