/* model.h: a GGUF model, and prompts made of a prefix and a question. */
#ifndef APP_MODEL_H
#define APP_MODEL_H

#include <stdbool.h>
#include <stddef.h>

#include <llama.h>

/* Say one line, "impress: ...", on stderr and return 1: the exit code of failure. */
int app_fail(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* From now on the library's log goes to stderr: warnings and errors, with `verbose` all. */
void app_log_show(bool verbose);

/* Load `path`. llama.cpp's own log lines are shown with `verbose` only; on failure one line says what and where.
 * Returns 0 or an exit code. */
int app_model_load(const char *path, bool verbose, struct llama_model **out);

/* The same, of the vocabulary and what the file says about itself alone: for turning texts into tokens. */
int app_vocabulary_load(const char *path, bool verbose, struct llama_model **out);

/* 0 if `path` is still the file that app_model_load() read; else 1 after a line: its bytes could be taken for those of
 * the model in memory. */
int app_model_unchanged(const char *path);

/* A context for one sequence. n_threads 0: one a core; cache_type "q8_0", else f16. */
struct llama_context_params app_context_params(size_t n_ctx, size_t n_batch, size_t n_ubatch, size_t n_threads,
                                               const char *cache_type);

/* A whole file as text. "-" is standard input. Returns 0 or an exit code. */
int app_read_text(const char *path, char **text, size_t *n_bytes);

typedef struct app_prompt {
    llama_token *tokens; /* [n] */
    size_t n;
    size_t n_prefix; /* of these, from the start, those that any question on this prefix shares */
} app_prompt;

/* Prefix, blank line, question: inside the model's chat template as one user message, or `raw`. The text of both is
 * never read as special tokens. Returns 0 or an exit code; free with app_prompt_free(). */
int app_prompt_make(const struct llama_model *model, const char *prefix, size_t prefix_bytes, const char *question,
                    bool raw, app_prompt *out);
void app_prompt_free(app_prompt *p);

/* Add the tokens of a text to a prompt. False: no memory, or too long. */
bool app_prompt_append(const struct llama_vocab *vocab, app_prompt *p, const char *text, size_t n_bytes, bool bos,
                       bool special);

/* The text of one token, into a buffer. Returns its length. */
size_t app_token_text(const struct llama_model *model, llama_token token, char *buf, size_t n);

#endif
