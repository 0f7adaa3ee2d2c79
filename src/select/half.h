/* half.h: f32 to f16, for what is written (kernels.h has the way back). */
#ifndef IMP_SELECT_HALF_H
#define IMP_SELECT_HALF_H

#include <stdint.h>
#include <string.h>

/* The nearest f16, ties to even. What f16 can't hold becomes its largest number, a NaN becomes 0. */
static inline uint16_t imp_f16_of_f32(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return 0;
    if (size >= 0x477ff000u) return (uint16_t)(sign | 0x7bffu); /* 65520 and more would round to infinity */
    if (size >= 0x38800000u) return (uint16_t)(sign | ((size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13));
    /* Subnormal: adding 0.5 leaves the value in units of 2^-24 in the low bits, rounded by the addition. */
    float magnitude;
    memcpy(&magnitude, &size, sizeof magnitude);
    magnitude += 0.5f;
    memcpy(&bits, &magnitude, sizeof bits);
    return (uint16_t)(sign | (bits - 0x3f000000u));
}

#endif
