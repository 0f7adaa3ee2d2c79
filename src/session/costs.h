/* costs.h: what reads cost. Pure. */
#ifndef IMP_SESSION_COSTS_H
#define IMP_SESSION_COSTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"

/* Some reads of one size. */
typedef struct imp_cost_sample {
    double bytes; /* of one */
    double ns;    /* that one took, with the queue full */
} imp_cost_sample;

/* The line ns = read_ns + bytes x byte_ns through samples[n], each one's relative error counting alike. Neither costs
 * less than nothing: then the line goes through 0. False: less than two sizes, or a time that isn't above 0. */
bool imp_costs_fit(const imp_cost_sample *samples, size_t n, double *read_ns, double *byte_ns);

/* Bytes that are read in vain rather than that two reads are made of one: what a read costs, in bytes. With a cap
 * (`read_bytes_per_s`; 0: none) bytes cost more. 0 where nothing was measured; 32 KiB at most. */
size_t imp_costs_gap(const imp_read_costs *costs, uint64_t read_bytes_per_s);

/* How long reads of so many bytes take. */
double imp_costs_ns(const imp_read_costs *costs, uint64_t read_bytes_per_s, uint64_t n_reads, uint64_t n_bytes);

/* The share of a prefix's bytes that a load takes which gives each layer `retention` of its tokens in chunks of
 * `chunk_tokens`, as long as nobody knows better: chunks hold wanted and other tokens alike. */
double imp_costs_share(double retention, uint32_t chunk_tokens, bool ordered);

#endif
