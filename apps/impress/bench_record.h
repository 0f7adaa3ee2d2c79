/* bench_record.h: the importance patterns of a real model, for replays. */
#ifndef APP_BENCH_RECORD_H
#define APP_BENCH_RECORD_H

#include <stdbool.h>
#include <stddef.h>

typedef struct record_plan {
    const char *model, *prefix, *questions, *out; /* files; `questions` has one a line */
    size_t n_threads;
    bool verbose;
} record_plan;

/* Compute the prefix and each question (the first REPLAY_MAX_PATTERNS - 1) with the whole cache, take the H2O column
 * sums of the last 32 rows (64 of the prefix) in each layer and KV head, and write them to `out` (replay/pattern.h).
 * Returns 0 or an exit code. */
int bench_record(const record_plan *plan);

#endif
