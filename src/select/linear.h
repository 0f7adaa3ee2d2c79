/* linear.h: the little linear algebra that sketches need. Internal to src/select and its tests.
 *
 * Loops are written once, on vectors of floats (a compiler extension), and compiled for each instruction set; which one
 * runs is picked at run time with the other kernels (imp_select_force_isa()).
 */
#ifndef IMP_SELECT_LINEAR_H
#define IMP_SELECT_LINEAR_H

#include <stddef.h>
#include <stdint.h>

#define IMP_LINEAR_INLINE __attribute__((always_inline)) static inline
#define IMP_LINEAR_AVX2 __attribute__((target("avx2,fma,f16c")))
#define IMP_LINEAR_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))

enum { IMP_LINEAR_COLUMNS = 16 };

/* out[r][c] = start[c] + sum over i < n_inner of a[r][i] * b[i][c], for n_rows rows and n_columns, which is a multiple
 * of IMP_LINEAR_COLUMNS. Strides are in floats; `start` NULL: 0. Summed in the order of i. */
void imp_multiply(const float *a, size_t a_stride, size_t n_rows, const float *b, size_t b_stride, size_t n_inner,
                  size_t n_columns, const float *start, float *out, size_t out_stride);

/* The lower L with m = L L^T of a symmetric, positive definite m[n][n], over m's lower half (the rest becomes 0).
 * Returns 0, or -1 if it isn't positive definite. */
int imp_cholesky(double *m, size_t n);

/* Eigenvalues of the symmetric m[n][n], falling, and for each an eigenvector of length 1 as row i of vectors[n][n].
 * Destroys m. `scratch`: [3 * n]. Values must be finite. */
void imp_eigen(double *m, size_t n, double *values, double *vectors, double *scratch);

#endif
