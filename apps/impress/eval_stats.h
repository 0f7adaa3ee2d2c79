/* eval_stats.h: what rows of single questions say about a system. Pure arithmetic. */
#ifndef APP_EVAL_STATS_H
#define APP_EVAL_STATS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The outcome of one question under one system. */
typedef struct eval_outcome {
    size_t answer;                  /* the right choice */
    size_t choice_sum, choice_norm; /* the likeliest one: by log-likelihood, and by that for each character */
    double kl;                      /* first answer token, from the reference's distribution, in nats */
    double mass;
    uint64_t identify_bytes, bytes_read;
    uint64_t selected, fallback;    /* layers that chose, and those that went by all keys though less was asked for */
} eval_outcome;

typedef struct eval_summary {
    size_t n;
    double accuracy_sum, accuracy_norm;
    double accuracy;           /* that of the two which counts */
    double diff;               /* accuracy minus the reference's */
    double ci_low, ci_high;    /* of diff, 95 % */
    double agreement;          /* share of questions with the reference's choice */
    double kl, mass;           /* means */
    double identify_bytes, bytes_read; /* means, for one question */
    double fallback;           /* share of layers */
} eval_summary;

/* Summarise n > 0 outcomes, each paired with the reference's of the same question. `norm` says which choice counts.
 * False: no memory. */
bool eval_summarise(const eval_outcome *const *outcomes, const eval_outcome *const *references, size_t n, bool norm,
                    eval_summary *out);

/* 95 % interval of the mean of n paired differences of which n_worse are -1, n_better are +1 and the others 0: the
 * percentiles that a paired bootstrap tends to with endless samples. No samples are drawn: a resample's sum has the
 * distribution of n independent draws, which is computed exactly. False: no memory. */
bool eval_paired_interval(size_t n, size_t n_worse, size_t n_better, double *low, double *high);

/* Index of the largest of n > 0 values, the first of equals. */
size_t eval_best(const double *values, size_t n);

/* Characters of a UTF-8 text. */
size_t eval_characters(const char *s);

#endif
