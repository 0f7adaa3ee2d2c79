/* bytes.h: little-endian integers at unaligned addresses. */
#ifndef IMP_BASE_BYTES_H
#define IMP_BASE_BYTES_H

#include <stdint.h>
#include <string.h>

static inline void imp_put32(void *p, uint32_t v)
{
    unsigned char *b = p;
    for (int i = 0; i < 4; i++) b[i] = (unsigned char)(v >> (8 * i));
}

static inline void imp_put64(void *p, uint64_t v)
{
    unsigned char *b = p;
    for (int i = 0; i < 8; i++) b[i] = (unsigned char)(v >> (8 * i));
}

static inline uint32_t imp_get32(const void *p)
{
    const unsigned char *b = p;
    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

static inline uint64_t imp_get64(const void *p)
{
    return (uint64_t)imp_get32(p) | (uint64_t)imp_get32((const unsigned char *)p + 4) << 32;
}

static inline uint64_t imp_round_up(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

#endif
