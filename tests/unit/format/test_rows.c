/* test_rows.c: f16 over all its values, and the rows of 8 and 4 bits against bounds computed in double. */
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

/* What an encoder of so many bits should take a value for. */
static double tamed(imp_type type, int bits, double v)
{
    double most = type == IMP_TYPE_F16 || bits == 4 ? 65504 : 127.0 * 65504;
    if (isnan(v)) return 0;
    return v > most ? most : v < -most ? -most : v;
}

/* What the values of a channel or block span. */
typedef struct span {
    double least, most;
} span;

static span no_span(void) { return (span){INFINITY, -INFINITY}; }

static void widen(span *s, double v)
{
    s->least = fmin(s->least, v);
    s->most = fmax(s->most, v);
}

/* How far `got` may be from `want`: half a scale, and the rounding of the row's own type. With 8 bits the scale is at
 * most one f16 step above largest / 127. With 4 bits the minimum is up to a step below the least value, and the scale
 * that much, and a step, above its 15th part of the span. */
static double bound(imp_type type, int bits, double want, span s)
{
    double one = 1.0 / 1024, tiny = ldexp(1, -24), scale;
    if (bits == 8) {
        scale = fmax(fabs(s.least), fabs(s.most)) / 127;
    } else {
        scale = (s.most - s.least + fabs(s.least) * one + tiny) / 15;
    }
    scale = scale * (1 + one) + tiny;
    double step = type == IMP_TYPE_F32 ? ldexp(1, -23) : type == IMP_TYPE_F16 ? ldexp(1, -10) : ldexp(1, -7);
    double float_error = (fabs(s.least) + fabs(want)) * ldexp(1, -22); /* of code * scale + minimum in f32 */
    return scale * 0.5001 + float_error + (fabs(want) + scale) * step / 2 + (type == IMP_TYPE_F16 ? tiny : 0);
}

static void check(imp_type type, int bits, double got, double want, span s)
{
    if (!isfinite(got) || fabs(got - want) > bound(type, bits, want, s)) {
        fail_msg("type %d, %d bits: %g became %g among %g to %g", (int)type, bits, want, got, s.least, s.most);
    }
}

static const imp_rest rounded[] = {IMP_REST_Q8, IMP_REST_K8V4, IMP_REST_Q4};

enum { MAX_N = 200, MAX_STRIDE = MAX_N * 4 + 8 };

static void test_keys(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    for (int round = 0; round < 900; round++) {
        static unsigned char rows[IMP_GROUP_TOKENS * MAX_STRIDE + 1], out[MAX_STRIDE + 2];
        static double want[IMP_GROUP_TOKENS][MAX_N];
        static unsigned char codes[IMP_GROUP_TOKENS * MAX_N + 1];
        static uint16_t scales[2 * MAX_N + 1];
        imp_rest rest = rounded[round % 3];
        int bits = rest == IMP_REST_Q4 ? 4 : 8;
        imp_type type = types[imp_rng_below(&r, 3)];
        size_t n = 1 + (size_t)imp_rng_below(&r, MAX_N), n_tokens = 1 + (size_t)imp_rng_below(&r, IMP_GROUP_TOKENS);
        size_t row_bytes = imp_type_bytes(type, n), stride = row_bytes + (size_t)imp_rng_below(&r, 8);
        size_t n_codes = bits == 4 ? n / 2 + n % 2 : n, n_scales = bits == 4 ? 2 * n : n;
        assert_int_equal(imp_rows_key_bytes(rest, type, n), n_codes);
        assert_int_equal(imp_rows_scales_bytes(rest, n), 2 * n_scales);
        unsigned char *base = rows + imp_rng_below(&r, 2); /* at any address */
        span spans[MAX_N];
        for (size_t i = 0; i < n; i++) {
            int kind = (int)imp_rng_below(&r, 8);
            float far = imp_rng_below(&r, 2) ? any_value(&r, 3) / 100 : 0; /* a mean that is no 0 */
            spans[i] = no_span();
            for (size_t t = 0; t < n_tokens; t++) {
                want[t][i] = tamed(type, bits, put(type, base + t * stride, i, any_value(&r, kind) + far));
                widen(&spans[i], want[t][i]);
            }
        }
        memset(codes, 99, sizeof codes);
        memset(scales, 99, sizeof scales);
        imp_rows_keys_encode(rest, type, base, stride, n_tokens, n, codes, scales);
        assert_int_equal(codes[n_tokens * n_codes], 99); /* nothing behind the end */
        assert_int_equal(scales[n_scales], 99 * 257);
        for (size_t t = 0; t < n_tokens; t++) {
            unsigned char *row = out + imp_rng_below(&r, 2);
            row[row_bytes] = 77;
            imp_rows_key_decode(rest, type, codes + t * n_codes, scales, n, row);
            assert_int_equal(row[row_bytes], 77);
            for (size_t i = 0; i < n; i++) check(type, bits, get(type, row, i), want[t][i], spans[i]);
        }
    }
}

static void test_values(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    for (int round = 0; round < 30000; round++) {
        static unsigned char in[MAX_STRIDE + 2], out[MAX_STRIDE + 2], packed[MAX_N * 2 + 2];
        static double want[MAX_N];
        imp_rest rest = rounded[round % 3];
        int bits = rest == IMP_REST_Q8 ? 8 : 4;
        imp_type type = types[imp_rng_below(&r, 3)];
        size_t n = 1 + (size_t)imp_rng_below(&r, MAX_N), row_bytes = imp_type_bytes(type, n);
        unsigned char *row = in + imp_rng_below(&r, 2), *back = out + imp_rng_below(&r, 2);
        span spans[MAX_N / 32 + 1];
        int kind = 0;
        float far = 0;
        for (size_t i = 0; i < n; i++) {
            if (i % 32 == 0) {
                kind = (int)imp_rng_below(&r, 8);
                far = imp_rng_below(&r, 2) ? any_value(&r, 3) / 100 : 0;
                spans[i / 32] = no_span();
            }
            want[i] = tamed(type, bits, put(type, row, i, any_value(&r, kind) + far));
            widen(&spans[i / 32], want[i]);
        }
        size_t n_packed = imp_rows_value_bytes(rest, type, n), left = n % 32;
        if (bits == 8) {
            assert_int_equal(n_packed, n / 32 * 34 + (left ? 2 + left : 0));
        } else {
            assert_int_equal(n_packed, n / 32 * 20 + (left ? 4 + left / 2 + left % 2 : 0));
        }
        packed[n_packed] = 77;
        back[row_bytes] = 77;
        imp_rows_value_encode(rest, type, row, n, packed);
        imp_rows_value_decode(rest, type, packed, n, back);
        assert_int_equal(packed[n_packed], 77);
        assert_int_equal(back[row_bytes], 77);
        for (size_t i = 0; i < n; i++) check(type, bits, get(type, back, i), want[i], spans[i / 32]);
    }
}

/* The engine's own bytes come back as they are. */
static void test_raw(void **state)
{
    (void)state;
    static const imp_type all[] = {IMP_TYPE_F32, IMP_TYPE_F16, IMP_TYPE_BF16, IMP_TYPE_Q8_0};
    unsigned char rows[4][300], codes[4 * 256], row[256];
    imp_test_fill(rows, sizeof rows, imp_test_seed(), 0);
    for (size_t i = 0; i < 4; i++) {
        size_t n_bytes = imp_type_bytes(all[i], 64);
        assert_int_equal(imp_rows_key_bytes(IMP_REST_RAW, all[i], 64), n_bytes);
        assert_int_equal(imp_rows_value_bytes(IMP_REST_RAW, all[i], 64), n_bytes);
        imp_rows_keys_encode(IMP_REST_RAW, all[i], rows, sizeof rows[0], 4, 64, codes, NULL);
        for (size_t t = 0; t < 4; t++) {
            imp_rows_key_decode(IMP_REST_RAW, all[i], codes + t * n_bytes, NULL, 64, row);
            assert_memory_equal(row, rows[t], n_bytes);
        }
        imp_rows_value_encode(IMP_REST_RAW, all[i], rows[1], 64, codes);
        imp_rows_value_decode(IMP_REST_RAW, all[i], codes, 64, row);
        assert_memory_equal(row, rows[1], n_bytes);
    }
    assert_int_equal(imp_rows_scales_bytes(IMP_REST_RAW, 64), 0);
    assert_int_equal(imp_rows_key_bytes(IMP_REST_RAW, IMP_TYPE_Q8_0, 33), 0);
    assert_int_equal(imp_rows_key_bytes((imp_rest)4, IMP_TYPE_F16, 32), 0);
    assert_int_equal(imp_rows_value_bytes((imp_rest)-1, IMP_TYPE_F16, 32), 0);
}

/* Where each code lies: two a byte, the earlier element in the low bits; scale, then minimum. */
static void test_bytes(void **state)
{
    (void)state;
    float rows[2][35], row[35];
    for (size_t i = 0; i < 35; i++) {
        rows[0][i] = (float)(i % 16) * 0.5f - 2; /* blocks of codes i % 16; the last has 0, 1, 2 */
        rows[1][i] = 5.5f;
    }
    unsigned char packed[4 + 16 + 4 + 2], codes[2 * 18];
    uint16_t scales[2 * 35];
    imp_rows_value_encode(IMP_REST_Q4, IMP_TYPE_F32, rows[0], 35, packed);
    assert_int_equal(packed[0] | packed[1] << 8, imp_f32_to_f16(0.5f));
    assert_int_equal(packed[2] | packed[3] << 8, imp_f32_to_f16(-2));
    for (size_t i = 0; i < 16; i++) assert_int_equal(packed[4 + i], (2 * i % 16) | (2 * i + 1) % 16 << 4);
    assert_int_equal(packed[22] | packed[23] << 8, imp_f32_to_f16(-2));
    assert_int_equal(packed[24] & 15, 0);
    assert_int_equal(packed[25] >> 4, 0); /* nothing is there */
    imp_rows_value_decode(IMP_REST_Q4, IMP_TYPE_F32, packed, 32, row);
    assert_memory_equal(row, rows[0], 32 * sizeof *row);

    imp_rows_keys_encode(IMP_REST_Q4, IMP_TYPE_F32, rows, sizeof rows[0], 2, 35, codes, scales);
    for (size_t i = 0; i < 35; i++) {
        assert_int_equal(scales[35 + i], imp_f32_to_f16(rows[0][i])); /* the lower of two: the minimum */
        assert_int_equal(codes[i / 2] >> 4 * (i % 2) & 15, 0);
        assert_int_equal(codes[18 + i / 2] >> 4 * (i % 2) & 15, 15 * (rows[0][i] < 5.5f));
    }
    assert_int_equal(codes[17] >> 4, 0);
    assert_int_equal(codes[35] >> 4, 0);
    imp_rows_key_decode(IMP_REST_Q4, IMP_TYPE_F32, codes, scales, 35, row);
    assert_memory_equal(row, rows[0], sizeof row);
}

/* What 4 bits cost of Gaussian and of skewed data, as a share of the deviation: no more than their minimum allows. */
static void test_error(void **state)
{
    (void)state;
    enum { N = 128, ROUNDS = 200 };
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    for (int kind = 0; kind < 3; kind++) { /* Gaussian, with a mean of 2, exponential */
        double key_error = 0, value_error = 0;
        for (int round = 0; round < ROUNDS; round++) {
            static float rows[IMP_GROUP_TOKENS][N], row[N];
            static unsigned char codes[IMP_GROUP_TOKENS * N], packed[N];
            static uint16_t scales[2 * N];
            for (size_t i = 0; i < (size_t)IMP_GROUP_TOKENS * N; i++) {
                double a = sqrt(-2 * log(1 - imp_rng_unit(&r)));
                rows[i / N][i % N] = kind < 2 ? (float)(a * cos(6.283185307179586 * imp_rng_unit(&r)) + 2 * kind)
                                              : (float)(a * a / 2);
            }
            imp_rows_keys_encode(IMP_REST_Q4, IMP_TYPE_F32, rows, sizeof rows[0], IMP_GROUP_TOKENS, N, codes, scales);
            for (size_t t = 0; t < IMP_GROUP_TOKENS; t++) {
                imp_rows_key_decode(IMP_REST_Q4, IMP_TYPE_F32, codes + t * N / 2, scales, N, row);
                for (size_t i = 0; i < N; i++) key_error += pow((double)(row[i] - rows[t][i]), 2);
                imp_rows_value_encode(IMP_REST_Q4, IMP_TYPE_F32, rows[t], N, packed);
                imp_rows_value_decode(IMP_REST_Q4, IMP_TYPE_F32, packed, N, row);
                for (size_t i = 0; i < N; i++) value_error += pow((double)(row[i] - rows[t][i]), 2);
            }
        }
        double n = (double)ROUNDS * IMP_GROUP_TOKENS * N;
        print_message("error of data %d: keys %.4f, values %.4f\n", kind, sqrt(key_error / n), sqrt(value_error / n));
        assert_true(sqrt(key_error / n) < 0.096 && sqrt(value_error / n) < 0.082);
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
        imp_rows_value_encode(IMP_REST_Q8, types[t], row, 64, packed);
        imp_rows_value_decode(IMP_REST_Q8, types[t], packed, 64, out);
        for (size_t i = 0; i < 64; i++) back[i] = (float)get(types[t], out, i);
        assert_memory_equal(f, back, sizeof f);
    }
}

/* Whatever the bytes: rows of f16 are the f32 they stand for, tamed and rounded. */
static void test_any_bytes(void **state)
{
    (void)state;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    for (int round = 0; round < 30000; round++) {
        static unsigned char codes[MAX_N * 2], wide[MAX_N * 4], row[MAX_N * 2 + 2];
        static uint16_t scales[2 * MAX_N];
        imp_rest rest = rounded[round % 3];
        size_t n = 1 + (size_t)imp_rng_below(&r, MAX_N);
        bool key = imp_rng_below(&r, 2);
        unsigned char *narrow = row + imp_rng_below(&r, 2);
        imp_test_fill(codes, sizeof codes, imp_rng_u64(&r), 0);
        imp_test_fill(scales, sizeof scales, imp_rng_u64(&r), 0);
        narrow[2 * n] = 77;
        if (key) {
            imp_rows_key_decode(rest, IMP_TYPE_F32, codes, scales, n, wide);
            imp_rows_key_decode(rest, IMP_TYPE_F16, codes, scales, n, narrow);
        } else {
            imp_rows_value_decode(rest, IMP_TYPE_F32, codes, n, wide);
            imp_rows_value_decode(rest, IMP_TYPE_F16, codes, n, narrow);
        }
        assert_int_equal(narrow[2 * n], 77);
        for (size_t i = 0; i < n; i++) {
            float f;
            uint16_t h, want;
            memcpy(&f, wide + 4 * i, sizeof f);
            memcpy(&h, narrow + 2 * i, sizeof h);
            want = isnan(f) ? 0 : imp_f32_to_f16(fabsf(f) > 65504.0f ? copysignf(65504.0f, f) : f);
            assert_int_equal(isnan(f) ? h & 0x7fff : h, want);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_f16),
        cmocka_unit_test(test_keys),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_exact),
        cmocka_unit_test(test_raw),
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_error),
        cmocka_unit_test(test_any_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
