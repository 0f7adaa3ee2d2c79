/* tasks.h: multiple-choice questions from JSON Lines files (docs/eval.md has the format).
 *
 * A task NAME is a pair of files: NAME.val.jsonl, whose questions are scored, and NAME.train.jsonl, whose first
 * examples become the few-shot prefix. Nothing here knows of models. */
#ifndef APP_TASKS_H
#define APP_TASKS_H

#include <stddef.h>

enum { TASK_ERROR_BYTES = 512, TASK_MAX_CHOICES = 64 };

typedef struct task_example {
    char *id;
    char *query;
    char **choices; /* [n_choices] */
    size_t n_choices;
    size_t answer;  /* index of the right one */
    unsigned line;  /* in the file, from 1 */
} task_example;

typedef struct task_file {
    char *path;
    task_example *items; /* [n] */
    size_t n;
} task_file;

/* Read the examples of `path`; with `doc` only those whose field `doc` is that. Every line is checked, also those left
 * out. Returns 0, or -1 with one line in `error` ("FILE:LINE: what is wrong") and `*out` empty. */
int task_file_read(const char *path, const char *doc, task_file *out, char error[TASK_ERROR_BYTES]);
void task_file_free(task_file *f);

/* The names of the tasks in `dir`, sorted: all that have a NAME.val.jsonl. Free each and the array. Returns 0 or -1. */
int task_names(const char *dir, char ***names, size_t *n, char error[TASK_ERROR_BYTES]);

/* The few-shot prefix: query, space and right choice of the first `n_shots` examples, a blank line between two.
 * NULL: no memory. n_shots <= train->n. */
char *task_shots(const task_file *train, size_t n_shots);

/* An example of `train` that is among the first `n_scored` of `scored` too (same id, or same query and choices);
 * NULL: there is none among the first `n_shots`. */
const task_example *task_leak(const task_file *train, size_t n_shots, const task_file *scored, size_t n_scored);

#endif
