/* multiply.h: the loops of imp_multiply() for one instruction set; linear.c includes it once for each. It needs
 *
 *     MULTIPLY(x)           names of its own for this set
 *     MULTIPLY_TARGET       the function attribute
 *     MULTIPLY_FLOATS       floats of a vector register (a power of two up to IMP_LINEAR_COLUMNS)
 *     MULTIPLY_ROWS, MULTIPLY_VECTORS  of a tile, whose sums stay in registers
 */
typedef float MULTIPLY(vector) __attribute__((vector_size(4 * MULTIPLY_FLOATS)));

/* Rows and vectors are constants where this is inlined, so the inner loops vanish. */
IMP_LINEAR_INLINE MULTIPLY_TARGET void MULTIPLY(tile)(const int n_rows, const int n_vectors, const float *a,
                                                      size_t a_stride, const float *b, size_t b_stride, size_t n_inner,
                                                      const float *start, float *out, size_t out_stride)
{
    MULTIPLY(vector) sum[MULTIPLY_ROWS][MULTIPLY_VECTORS];
    for (int v = 0; v < n_vectors; v++) {
        MULTIPLY(vector) first = {0};
        if (start) memcpy(&first, start + v * MULTIPLY_FLOATS, sizeof first);
        for (int r = 0; r < n_rows; r++) sum[r][v] = first;
    }
    for (size_t i = 0; i < n_inner; i++) {
        MULTIPLY(vector) row[MULTIPLY_VECTORS];
        for (int v = 0; v < n_vectors; v++) memcpy(&row[v], b + i * b_stride + v * MULTIPLY_FLOATS, sizeof row[v]);
        for (int r = 0; r < n_rows; r++) {
            float x = a[(size_t)r * a_stride + i];
            for (int v = 0; v < n_vectors; v++) sum[r][v] += x * row[v];
        }
    }
    for (int r = 0; r < n_rows; r++) {
        for (int v = 0; v < n_vectors; v++) {
            memcpy(out + (size_t)r * out_stride + v * MULTIPLY_FLOATS, &sum[r][v], sizeof sum[r][v]);
        }
    }
}

IMP_LINEAR_INLINE MULTIPLY_TARGET void MULTIPLY(columns)(const int n_vectors, const float *a, size_t a_stride,
                                                         size_t n_rows, const float *b, size_t b_stride,
                                                         size_t n_inner, const float *start, float *out,
                                                         size_t out_stride)
{
    size_t r = 0;
    for (; r + MULTIPLY_ROWS <= n_rows; r += MULTIPLY_ROWS) {
        MULTIPLY(tile)(MULTIPLY_ROWS, n_vectors, a + r * a_stride, a_stride, b, b_stride, n_inner, start,
                       out + r * out_stride, out_stride);
    }
    for (; r < n_rows; r++) {
        MULTIPLY(tile)(1, n_vectors, a + r * a_stride, a_stride, b, b_stride, n_inner, start, out + r * out_stride,
                       out_stride);
    }
}

MULTIPLY_TARGET static void MULTIPLY(all)(const float *a, size_t a_stride, size_t n_rows, const float *b,
                                          size_t b_stride, size_t n_inner, size_t n_columns, const float *start,
                                          float *out, size_t out_stride)
{
    const size_t wide = MULTIPLY_VECTORS * MULTIPLY_FLOATS;
    size_t c = 0;
    for (; c + wide <= n_columns; c += wide) {
        MULTIPLY(columns)(MULTIPLY_VECTORS, a, a_stride, n_rows, b + c, b_stride, n_inner, start ? start + c : NULL,
                          out + c, out_stride);
    }
    for (; c < n_columns; c += MULTIPLY_FLOATS) {
        MULTIPLY(columns)(1, a, a_stride, n_rows, b + c, b_stride, n_inner, start ? start + c : NULL, out + c,
                          out_stride);
    }
}

#undef MULTIPLY
#undef MULTIPLY_TARGET
#undef MULTIPLY_FLOATS
#undef MULTIPLY_ROWS
#undef MULTIPLY_VECTORS
