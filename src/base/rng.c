/* rng.c: xoshiro256** (Blackman and Vigna), seeded through splitmix64. */
#include "base/rng.h"

#include <sys/random.h>
#include <unistd.h>

#include "base/clock.h"

static uint64_t rotl(uint64_t x, int k) { return x << k | x >> (64 - k); }

static uint64_t splitmix(uint64_t *x)
{
    uint64_t z = *x += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

void imp_rng_seed(imp_rng *r, uint64_t seed)
{
    for (int i = 0; i < 4; i++) r->s[i] = splitmix(&seed);
}

void imp_rng_seed_os(imp_rng *r)
{
    uint64_t seed;
    if (getrandom(&seed, sizeof seed, 0) != (ssize_t)sizeof seed) {
        /* Ids are checked for collisions where they are used, so time and process will do. */
        seed = imp_now_ns() ^ (uint64_t)getpid() << 40 ^ (uint64_t)(uintptr_t)r;
    }
    imp_rng_seed(r, seed);
}

uint64_t imp_rng_u64(imp_rng *r)
{
    uint64_t *s = r->s;
    uint64_t result = rotl(s[1] * 5, 7) * 9;
    uint64_t t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotl(s[3], 45);
    return result;
}

uint64_t imp_rng_below(imp_rng *r, uint64_t n)
{
    /* Drop the first 2^64 mod n values, so that what is left divides evenly. */
    uint64_t skip = (0 - n) % n, x;
    do x = imp_rng_u64(r);
    while (x < skip);
    return x % n;
}

double imp_rng_unit(imp_rng *r) { return (double)(imp_rng_u64(r) >> 11) * 0x1p-53; }
