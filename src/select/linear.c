/* linear.c: product, Cholesky factor, eigenvectors. */
#include "select/linear.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "select/kernels.h"

/* -------------------------------------------------------------------------------------------------- product ---- */

/* Tiles: as many sums as registers hold beside what they are made of. */
#define MULTIPLY(x) plain_##x
#define MULTIPLY_TARGET
#define MULTIPLY_FLOATS 4
#define MULTIPLY_ROWS 2
#define MULTIPLY_VECTORS 4
#include "select/multiply.h"

#if defined(__x86_64__)
#define MULTIPLY(x) avx2_##x
#define MULTIPLY_TARGET IMP_LINEAR_AVX2
#define MULTIPLY_FLOATS 8
#define MULTIPLY_ROWS 4
#define MULTIPLY_VECTORS 2
#include "select/multiply.h"

#define MULTIPLY(x) avx512_##x
#define MULTIPLY_TARGET IMP_LINEAR_AVX512
#define MULTIPLY_FLOATS 16
#define MULTIPLY_ROWS 4
#define MULTIPLY_VECTORS 4
#include "select/multiply.h"
#endif

void imp_multiply(const float *a, size_t a_stride, size_t n_rows, const float *b, size_t b_stride, size_t n_inner,
                  size_t n_columns, const float *start, float *out, size_t out_stride)
{
#if defined(__x86_64__)
    switch (imp_kernels_now()->isa) {
    case IMP_ISA_AVX512:
        avx512_all(a, a_stride, n_rows, b, b_stride, n_inner, n_columns, start, out, out_stride);
        return;
    case IMP_ISA_AVX2:
        avx2_all(a, a_stride, n_rows, b, b_stride, n_inner, n_columns, start, out, out_stride);
        return;
    default: break;
    }
#endif
    plain_all(a, a_stride, n_rows, b, b_stride, n_inner, n_columns, start, out, out_stride);
}

/* -------------------------------------------------------------------------------------------------- Cholesky ---- */

int imp_cholesky(double *m, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        double *row = m + i * n;
        for (size_t j = 0; j <= i; j++) {
            const double *other = m + j * n;
            double s = row[j];
            for (size_t k = 0; k < j; k++) s -= row[k] * other[k];
            if (j < i) {
                row[j] = s / other[j];
            } else {
                if (!(s > 0.0)) return -1;
                row[j] = sqrt(s);
            }
        }
        memset(row + i + 1, 0, (n - i - 1) * sizeof *row);
    }
    return 0;
}

/* ----------------------------------------------------------------------------------------------- eigenvectors ---- */

static double dot(const double *a, const double *b, size_t n)
{
    double s = 0.0;
    for (size_t i = 0; i < n; i++) s += a[i] * b[i];
    return s;
}

/* x += f * y */
static void add_scaled(double *x, double f, const double *y, size_t n)
{
    for (size_t i = 0; i < n; i++) x[i] += f * y[i];
}

/* Householder: m = Q T Q^T with T tridiagonal; its diagonal and the one beside it go to `diagonal` and `beside`, and
 * Q^T to `qt`. Step j reflects row j so that nothing is left right of its neighbour. v, w: [n]. */
static void tridiagonalise(double *m, size_t n, double *diagonal, double *beside, double *qt, double *v, double *w)
{
    memset(qt, 0, n * n * sizeof *qt);
    for (size_t i = 0; i < n; i++) qt[i * n + i] = 1.0;
    for (size_t j = 0; j + 2 < n; j++) {
        const size_t first = j + 1, len = n - first;
        double *x = m + j * n + first;
        double rest = dot(x + 1, x + 1, len - 1);
        if (rest == 0.0) continue;
        double length = sqrt(x[0] * x[0] + rest), end = x[0] > 0.0 ? -length : length;
        memcpy(v, x, len * sizeof *v);
        v[0] -= end;
        double beta = 2.0 / (v[0] * v[0] + rest);

        for (size_t i = 0; i < len; i++) w[i] = beta * dot(m + (first + i) * n + first, v, len);
        add_scaled(w, -0.5 * beta * dot(w, v, len), v, len);
        for (size_t i = 0; i < len; i++) {
            double *row = m + (first + i) * n + first;
            add_scaled(row, -v[i], w, len);
            add_scaled(row, -w[i], v, len);
        }
        x[0] = end;

        memset(w, 0, n * sizeof *w);
        for (size_t i = 0; i < len; i++) add_scaled(w, v[i], qt + (first + i) * n, n);
        for (size_t i = 0; i < len; i++) add_scaled(qt + (first + i) * n, -beta * v[i], w, n);
    }
    for (size_t i = 0; i < n; i++) diagonal[i] = m[i * n + i];
    for (size_t i = 0; i + 1 < n; i++) beside[i] = m[i * n + i + 1];
}

/* One implicit QR step with Wilkinson's shift over the block lo..hi of the tridiagonal matrix (d, e); the rotations are
 * applied to the rows of `vectors`. */
static void qr_step(double *d, double *e, size_t lo, size_t hi, double *vectors, size_t n)
{
    double half = (d[hi - 1] - d[hi]) / 2.0, last = e[hi - 1];
    double root = hypot(half, last);
    double x = d[lo] - (d[hi] - last * last / (half >= 0.0 ? half + root : half - root)), z = e[lo];
    for (size_t k = lo; k < hi; k++) {
        double length = hypot(x, z), c = length > 0.0 ? x / length : 1.0, s = length > 0.0 ? z / length : 0.0;
        if (k > lo) e[k - 1] = length;
        double a = d[k], b = d[k + 1], between = e[k];
        d[k] = c * c * a + 2.0 * c * s * between + s * s * b;
        d[k + 1] = s * s * a - 2.0 * c * s * between + c * c * b;
        e[k] = c * s * (b - a) + (c * c - s * s) * between;
        if (k + 1 < hi) {
            x = e[k];
            z = s * e[k + 1];
            e[k + 1] *= c;
        }
        double *p = vectors + k * n, *q = p + n;
        for (size_t i = 0; i < n; i++) {
            double u = p[i], w = q[i];
            p[i] = c * u + s * w;
            q[i] = c * w - s * u;
        }
    }
}

static void sort_falling(double *values, double *vectors, size_t n, double *scratch)
{
    for (size_t i = 0; i < n; i++) {
        size_t best = i;
        for (size_t j = i + 1; j < n; j++) best = values[j] > values[best] ? j : best;
        if (best == i) continue;
        double value = values[i];
        values[i] = values[best];
        values[best] = value;
        memcpy(scratch, vectors + i * n, n * sizeof *scratch);
        memcpy(vectors + i * n, vectors + best * n, n * sizeof *scratch);
        memcpy(vectors + best * n, scratch, n * sizeof *scratch);
    }
}

void imp_eigen(double *m, size_t n, double *values, double *vectors, double *scratch)
{
    double *beside = scratch, *v = scratch + n, *w = v + n;
    tridiagonalise(m, n, values, beside, vectors, v, w);
    /* Two or three steps find an eigenvalue; the bound only ends what rounding could keep going. */
    size_t hi = n > 0 ? n - 1 : 0;
    for (size_t steps = 0; hi > 0 && steps < 60 * n; steps++) {
        for (size_t i = 0; i < hi; i++) {
            if (fabs(beside[i]) <= DBL_EPSILON * (fabs(values[i]) + fabs(values[i + 1]))) beside[i] = 0.0;
        }
        while (hi > 0 && beside[hi - 1] == 0.0) hi--;
        if (hi == 0) break;
        size_t lo = hi - 1;
        while (lo > 0 && beside[lo - 1] != 0.0) lo--;
        qr_step(values, beside, lo, hi, vectors, n);
    }
    sort_falling(values, vectors, n, v);
}
