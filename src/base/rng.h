/* rng.h: a small fast generator (xoshiro256**) for ids and tests. Not for secrets. */
#ifndef IMP_BASE_RNG_H
#define IMP_BASE_RNG_H

#include <stdint.h>

typedef struct imp_rng { uint64_t s[4]; } imp_rng;

void imp_rng_seed(imp_rng *r, uint64_t seed);
void imp_rng_seed_os(imp_rng *r); /* from getrandom() */
uint64_t imp_rng_u64(imp_rng *r);
uint64_t imp_rng_below(imp_rng *r, uint64_t n); /* 0..n-1, unbiased; n > 0 */
double imp_rng_unit(imp_rng *r);                /* [0, 1) */

#endif
