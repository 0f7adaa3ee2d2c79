/* test_rows.c: f16 over all its values, and the 8-bit rows against bounds computed in double. */
#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "format/rows.h"
#include "format/segment.h"
#include "support/support.h"

static float from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* What an f16 says, from its definition. */
static double f16_value(uint16_t h)
{
    int exponent = h >> 10 & 31;
    double mantissa = h & 1023, v = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    if (exponent == 31) v = mantissa != 0 ? (double)NAN : (double)INFINITY;
    return h & 0x8000 ? -v : v;
}

static void test_f16(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 65536; h++) {
        double v = f16_value((uint16_t)h);
        float f = imp_f16_to_f32((uint16_t)h);
        if (isnan(v)) {
            assert_true(isnan(f));
            assert_true(isnan(imp_f16_to_f32(imp_f32_to_f16(f))));
            continue;
        }
        assert_true((double)f == v && !signbit(f) == !signbit(v));
        assert_int_equal(imp_f32_to_f16(f), h);
    }
    /* Between two neighbours: the nearer one, and the even one from the middle. */
    for (uint32_t h = 0; h < 0x7c00; h++) {
        double a = f16_value((uint16_t)h), b = h == 0x7bff ? 65536 : f16_value((uint16_t)(h + 1)), middle = (a + b) / 2;
        float m = (float)middle;
        assert_true((double)m == middle);
        assert_int_equal(imp_f32_to_f16(m), h & 1 ? h + 1 : h);
        assert_int_equal(imp_f32_to_f16(nextafterf(m, 0)), h);
        assert_int_equal(imp_f32_to_f16(nextafterf(m, INFINITY)), h + 1);
        assert_int_equal(imp_f32_to_f16(-m), 0x8000 | (h & 1 ? h + 1 : h));
    }
    assert_int_equal(imp_f32_to_f16(from_bits(1)), 0);
    assert_int_equal(imp_f32_to_f16(3.4e38f), 0x7c00);
    assert_int_equal(imp_f32_to_f16(-INFINITY), 0xfc00);
}

static const imp_type types[] = {IMP_TYPE_F32, IMP_TYPE_F16, IMP_TYPE_BF16};

/* Write `f` into a row as `type`; returns what the row then says. */
static double put(imp_type type, unsigned char *row, size_t i, float f)
{
    uint32_t u;
    if (type == IMP_TYPE_F32) {
        memcpy(row + 4 * i, &f, 4);
        return (double)f;
    }
    uint16_t h;
    if (type == IMP_TYPE_F16) {
        h = imp_f32_to_f16(f);
    } else {
        memcpy(&u, &f, 4);
        h = (uint16_t)(u >> 16);
    }
    memcpy(row + 2 * i, &h, 2);
    return type == IMP_TYPE_F16 ? f16_value(h) : (double)from_bits((uint32_t)h << 16);
}

static double get(imp_type type, const unsigned char *row, size_t i)
{
    float f;
    uint16_t h;
    if (type == IMP_TYPE_F32) {
        memcpy(&f, row + 4 * i, 4);
        return (double)f;
    }
    memcpy(&h, row + 2 * i, 2);
    return type == IMP_TYPE_F16 ? f16_value(h) : (double)from_bits((uint32_t)h << 16);
}

/* A value of a random kind: ordinary, tiny, huge, zero, or not a number at all. */
static float any_value(imp_rng *r, int kind)
{
    float f = (float)(imp_rng_unit(r) * 2 - 1);
    switch (kind) {
    case 0: return f * 4;
    case 1: return f * 1e-6f;                                     /* scales among f16's subnormals */
    case 2: return f * 1e-30f;                                    /* below them */
    case 3: return f * 60000;
    case 4: return f * 3e38f;                                     /* beyond any scale */
    case 5: return 0;
    case 6: return imp_rng_below(r, 20) ? f : f * 1000;           /* outliers */
    default: return from_bits((uint32_t)imp_rng_u64(r));          /* anything */
    }
}

/* What an encoder should take a value for. */
static double tamed(imp_type type, double v)
{
    double most = type == IMP_TYPE_F16 ? 65504 : 127.0 * 65504;
    if (isnan(v)) return 0;
    return v > most ? most : v < -most ? -most : v;
}

/* How far `got` may be from `want`, where `most` is the largest magnitude of the channel or block: half a scale (which is
 * at most one f16 step above most / 127), and the rounding of the row's own type. */
static double bound(imp_type type, double want, double most)
{
    double scale = most / 127;
    scale = scale * (1 + 1.0 / 1024) + ldexp(1, -24);
    double step = type == IMP_TYPE_F32 ? ldexp(1, -23) : type == IMP_TYPE_F16 ? ldexp(1, -10) : ldexp(1, -7);
    double tiny = type == IMP_TYPE_F16 ? ldexp(1, -24) : 0;
    return scale * 0.5001 + (fabs(want) + scale) * step / 2 + tiny;
}

enum { MAX_N = 200, MAX_STRIDE = MAX_N * 4 + 8 };

static void test_keys(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    for (int round = 0; round < 600; round++) {
        static unsigned char rows[IMP_GROUP_TOKENS * MAX_STRIDE + 1], out[MAX_STRIDE + 2];
        static double want[IMP_GROUP_TOKENS][MAX_N];
        static int8_t codes[IMP_GROUP_TOKENS * MAX_N + 1];
        static uint16_t scales[MAX_N + 1];
        imp_type type = types[imp_rng_below(&r, 3)];
        size_t n = 1 + (size_t)imp_rng_below(&r, MAX_N), n_tokens = 1 + (size_t)imp_rng_below(&r, IMP_GROUP_TOKENS);
        size_t row_bytes = imp_type_bytes(type, n), stride = row_bytes + (size_t)imp_rng_below(&r, 8);
        unsigned char *base = rows + imp_rng_below(&r, 2); /* at any address */
        double most[MAX_N] = {0};
        for (size_t i = 0; i < n; i++) {
            int kind = (int)imp_rng_below(&r, 8);
            for (size_t t = 0; t < n_tokens; t++) {
                want[t][i] = tamed(type, put(type, base + t * stride, i, any_value(&r, kind)));
                most[i] = fmax(most[i], fabs(want[t][i]));
            }
        }
        memset(codes, 99, sizeof codes);
        memset(scales, 99, sizeof scales);
        imp_rows_k8_encode(type, base, stride, n_tokens, n, codes, scales);
        assert_int_equal(codes[n_tokens * n], 99); /* nothing behind the end */
        assert_int_equal(scales[n], 99 * 257);
        for (size_t t = 0; t < n_tokens; t++) {
            unsigned char *row = out + imp_rng_below(&r, 2);
            row[row_bytes] = 77;
            imp_rows_k8_decode(type, codes + t * n, scales, n, row);
            assert_int_equal(row[row_bytes], 77);
            for (size_t i = 0; i < n; i++) {
                double got = get(type, row, i);
                assert_true(isfinite(got));
                if (fabs(got - want[t][i]) > bound(type, want[t][i], most[i])) {
                    fail_msg("type %d: %g became %g, largest %g", (int)type, want[t][i], got, most[i]);
                }
            }
        }
    }
}

static void test_values(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    for (int round = 0; round < 20000; round++) {
        static unsigned char in[MAX_STRIDE + 2], out[MAX_STRIDE + 2], packed[MAX_N * 2 + 2];
        static double want[MAX_N];
        imp_type type = types[imp_rng_below(&r, 3)];
        size_t n = 1 + (size_t)imp_rng_below(&r, MAX_N), row_bytes = imp_type_bytes(type, n);
        unsigned char *row = in + imp_rng_below(&r, 2), *back = out + imp_rng_below(&r, 2);
        double most[MAX_N / 32 + 1] = {0};
        int kind = 0;
        for (size_t i = 0; i < n; i++) {
            if (i % 32 == 0) kind = (int)imp_rng_below(&r, 8);
            want[i] = tamed(type, put(type, row, i, any_value(&r, kind)));
            most[i / 32] = fmax(most[i / 32], fabs(want[i]));
        }
        size_t n_packed = imp_rows_v8_bytes(n);
        assert_int_equal(n_packed, n / 32 * 34 + (n % 32 ? 2 + n % 32 : 0));
        packed[n_packed] = 77;
        back[row_bytes] = 77;
        imp_rows_v8_encode(type, row, n, packed);
        imp_rows_v8_decode(type, packed, n, back);
        assert_int_equal(packed[n_packed], 77);
        assert_int_equal(back[row_bytes], 77);
        for (size_t i = 0; i < n; i++) {
            double got = get(type, back, i);
            assert_true(isfinite(got));
            if (fabs(got - want[i]) > bound(type, want[i], most[i / 32])) {
                fail_msg("type %d: %g became %g, largest %g", (int)type, want[i], got, most[i / 32]);
            }
        }
    }
}

/* Codes 0, and whole multiples of a scale that f16 has, come back exactly. */
static void test_exact(void **state)
{
    (void)state;
    for (size_t t = 0; t < 3; t++) {
        float f[64], back[64];
        unsigned char row[256], packed[68], out[256];
        for (size_t i = 0; i < 64; i++) f[i] = (float)((int)i - 32) * 4 - 3 + (i == 0 ? 4 : 0);
        f[32] = f[0] = 127; /* each block's largest */
        for (size_t i = 0; i < 64; i++) put(types[t], row, i, f[i]);
        imp_rows_v8_encode(types[t], row, 64, packed);
        imp_rows_v8_decode(types[t], packed, 64, out);
        for (size_t i = 0; i < 64; i++) back[i] = (float)get(types[t], out, i);
        assert_memory_equal(f, back, sizeof f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_f16),
        cmocka_unit_test(test_keys),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_exact),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
