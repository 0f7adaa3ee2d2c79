/* sketch.c: bases learned and parsed, keys encoded and rebuilt. */
#include "select/sketch.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/status.h"
#include "select/half.h"
#include "select/kernels.h"
#include "select/linear.h"

enum {
    MAX_DIM = 1024,
    MAX_HEADS = 1024,
    VERSION = 1,
    HEADER_BYTES = 16,
    TILE = 8,            /* tokens rebuilt at once: 32 KiB of stack for the largest heads */
    SAMPLE_TOKENS = 512, /* that steps are measured on */
    N_DISTANCES = 64     /* positions that queries are turned back from */
};

/* How much of the metric is the queries'; the rest counts all directions alike, so that a direction which few queries
 * showed is not lost. */
#define QUERY_SHARE 0.9

typedef struct head {
    uint32_t n4, n2;
    float *mean;   /* [head_dim] */
    float *start;  /* [columns]: the mean with every code's offset taken off, so that codes count from 0 */
    float *decode; /* [n4 + n2][columns] */
    float *encode; /* [head_dim][code_columns] */
} head;

struct imp_basis {
    uint32_t n_kv_heads, head_dim, n_bits;
    size_t columns; /* head_dim, padded with zeros to what imp_multiply() wants */
    size_t n_wire, n_floats;
    unsigned char *wire;
    float *memory; /* [n_floats], of all heads */
    head *heads;   /* [n_kv_heads] */
};

static size_t padded(size_t n) { return imp_round_up(n, IMP_LINEAR_COLUMNS); }

static size_t head_wire_bytes(uint32_t head_dim, uint32_t n_directions)
{
    return 8 + 2 * (size_t)head_dim + (size_t)n_directions * (8 + 4 * (size_t)head_dim);
}

static void put_f32(unsigned char *p, float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    imp_put32(p, bits);
}

static float get_f32(const unsigned char *p) { return imp_f32_of_bits(imp_get32(p)); }

static void put_f16(unsigned char *p, float f)
{
    uint16_t h = imp_f16_of_f32(f);
    p[0] = (unsigned char)h;
    p[1] = (unsigned char)(h >> 8);
}

static float get_f16(const unsigned char *p) { return imp_f32_of_f16((uint16_t)(p[0] | p[1] << 8)); }

/* ------------------------------------------------------------------------------------------------------ parse ---- */

void imp_basis_free(imp_basis *b)
{
    if (!b) return;
    imp_free(b->heads);
    imp_free(b->memory);
    imp_free(b->wire);
    imp_free(b);
}

uint32_t imp_sketch_bits(uint32_t head_dim) { return head_dim < 16 ? 8 : head_dim & ~7u; }

static bool bits_fit(uint32_t head_dim, uint32_t n_bits)
{
    return n_bits >= 8 && n_bits % 8 == 0 && n_bits <= 4 * head_dim;
}

static bool split_fits(uint32_t head_dim, uint32_t n_bits, uint32_t n4, uint32_t n2)
{
    return n4 <= head_dim && n2 <= head_dim - n4 && n4 % 2 == 0 && n2 % 4 == 0 && 4 * n4 + 2 * n2 == n_bits;
}

/* Walks over the heads: checks them and counts the floats they take. */
static bool measure(const unsigned char *wire, size_t n_wire, const imp_basis *b, size_t *n_floats)
{
    size_t at = HEADER_BYTES;
    *n_floats = 0;
    for (uint32_t h = 0; h < b->n_kv_heads; h++) {
        if (n_wire - at < 8) return false;
        uint32_t n4 = imp_get32(wire + at), n2 = imp_get32(wire + at + 4);
        if (!split_fits(b->head_dim, b->n_bits, n4, n2)) return false;
        size_t n_bytes = head_wire_bytes(b->head_dim, n4 + n2);
        if (n_wire - at < n_bytes) return false;
        at += n_bytes;
        *n_floats += padded(b->head_dim) + b->columns * (1 + n4 + n2) + padded(n4 + n2) * b->head_dim;
    }
    return at == n_wire;
}

/* The arrays of a head lie one after the other at `memory`, which is zeroed. Returns what comes after. */
static float *unpack_head(const imp_basis *b, const unsigned char *wire, float *memory, head *out)
{
    const uint32_t dim = b->head_dim, n4 = imp_get32(wire), n2 = imp_get32(wire + 4), n = n4 + n2;
    const size_t code_columns = padded(n);
    out->n4 = n4;
    out->n2 = n2;
    out->mean = memory;
    out->start = out->mean + padded(dim);
    out->decode = out->start + b->columns;
    out->encode = out->decode + n * b->columns;

    const unsigned char *mean = wire + 8, *decode_scale = mean + 2 * (size_t)dim, *encode_scale = decode_scale + 4 * n;
    const unsigned char *decode = encode_scale + 4 * n, *encode = decode + 2 * (size_t)dim * n;
    for (uint32_t d = 0; d < dim; d++) out->mean[d] = out->start[d] = get_f16(mean + 2 * (size_t)d);
    for (uint32_t i = 0; i < n; i++) {
        const float ds = get_f32(decode_scale + 4 * (size_t)i), es = get_f32(encode_scale + 4 * (size_t)i);
        const float offset = i < n4 ? 7.5f : 1.5f;
        float *row = out->decode + i * b->columns;
        for (uint32_t d = 0; d < dim; d++) {
            const size_t at = 2 * ((size_t)i * dim + d);
            row[d] = ds * get_f16(decode + at);
            out->start[d] -= offset * row[d];
            out->encode[d * code_columns + i] = es * get_f16(encode + at);
        }
    }
    return out->encode + code_columns * dim;
}

int imp_basis_parse(const void *bytes, size_t n_bytes, imp_basis **out)
{
    const unsigned char *wire = bytes;
    imp_basis *b = NULL;
    int rc = 0;
    *out = NULL;
    if (n_bytes < HEADER_BYTES) return imp_fail(IMP_E_CORRUPT, "a sketch basis of %zu bytes", n_bytes);
    if (imp_get32(wire) != VERSION) {
        return imp_fail(IMP_E_VERSION, "a sketch basis of version %u, not %d", imp_get32(wire), VERSION);
    }
    imp_basis shape = {.n_kv_heads = imp_get32(wire + 4), .head_dim = imp_get32(wire + 8),
                       .n_bits = imp_get32(wire + 12), .n_wire = n_bytes};
    shape.columns = padded(shape.head_dim);
    size_t n_floats = 0;
    if (shape.n_kv_heads == 0 || shape.n_kv_heads > MAX_HEADS || shape.head_dim == 0 || shape.head_dim > MAX_DIM ||
        !bits_fit(shape.head_dim, shape.n_bits) || !measure(wire, n_bytes, &shape, &n_floats)) {
        return imp_fail(IMP_E_CORRUPT, "bytes that are no sketch basis");
    }

    shape.n_floats = n_floats;
    b = imp_malloc(sizeof *b);
    if (!b) goto no_memory;
    *b = shape;
    b->wire = imp_malloc(n_bytes);
    b->memory = imp_aligned(64, n_floats * sizeof *b->memory);
    b->heads = imp_calloc(b->n_kv_heads, sizeof *b->heads);
    if (!b->wire || !b->memory || !b->heads) goto no_memory;
    memcpy(b->wire, wire, n_bytes);
    memset(b->memory, 0, n_floats * sizeof *b->memory);
    float *memory = b->memory;
    wire += HEADER_BYTES;
    for (uint32_t h = 0; h < b->n_kv_heads; h++) {
        memory = unpack_head(b, wire, memory, &b->heads[h]);
        wire += head_wire_bytes(b->head_dim, b->heads[h].n4 + b->heads[h].n2);
    }
    for (size_t i = 0; i < n_floats && rc == 0; i++) {
        if (!isfinite(b->memory[i])) rc = imp_fail(IMP_E_CORRUPT, "a sketch basis with a value that is no number");
    }
    if (rc < 0) goto out;
    *out = b;
    b = NULL;
out:
    imp_basis_free(b);
    return rc;
no_memory:
    rc = imp_fail(IMP_E_NOMEM, "no memory for a sketch basis");
    goto out;
}

const void *imp_basis_bytes(const imp_basis *b, size_t *n_bytes)
{
    *n_bytes = b->n_wire;
    return b->wire;
}

size_t imp_basis_memory(const imp_basis *b)
{
    return sizeof *b + b->n_wire + b->n_floats * sizeof *b->memory + b->n_kv_heads * sizeof *b->heads;
}

uint32_t imp_basis_kv_heads(const imp_basis *b) { return b->n_kv_heads; }
uint32_t imp_basis_head_dim(const imp_basis *b) { return b->head_dim; }
size_t imp_sketch_token_bytes(const imp_basis *b) { return (size_t)b->n_kv_heads * (b->n_bits / 8); }

/* ------------------------------------------------------------------------------------------------------- keys ---- */

static int check_keys(const imp_key_rows *keys, const imp_rope_table *rope)
{
    if (keys->n_kv_heads == 0 || keys->n_kv_heads > MAX_HEADS || keys->head_dim == 0 || keys->head_dim > MAX_DIM ||
        keys->head_dim % 2 != 0) {
        return imp_fail(IMP_E_ARG, "%u KV heads of size %u", keys->n_kv_heads, keys->head_dim);
    }
    if ((unsigned)keys->type > IMP_TYPE_Q8_0 || imp_type_bytes(keys->type, keys->head_dim) == 0) {
        return imp_fail(IMP_E_UNSUPPORTED, "keys of type %d with head size %u", (int)keys->type, keys->head_dim);
    }
    if (rope && (imp_rope_table_head_dim(rope) != keys->head_dim ||
                 !imp_rope_table_covers(rope, keys->first_position, keys->n_tokens))) {
        return imp_fail(IMP_E_ARG, "RoPE tables of another head size, or of other positions");
    }
    return 0;
}

/* Rows [first, first + n) of one KV head, widened, without RoPE; what is no number becomes 0. */
static void read_keys(const imp_key_rows *keys, const imp_rope_table *rope, uint32_t h, size_t first, size_t n,
                      float *out, size_t out_stride)
{
    const imp_kernels *kernels = imp_kernels_now();
    const size_t dim = keys->head_dim, head_bytes = imp_type_bytes(keys->type, dim);
    for (size_t i = 0; i < n; i++) {
        float *row = out + i * out_stride;
        kernels->widen[keys->type]((const char *)keys->rows + (first + i) * keys->stride + h * head_bytes, row, dim);
        for (size_t d = 0; d < dim; d++) row[d] = isfinite(row[d]) ? row[d] : 0.0f;
    }
    if (rope) imp_rope_undo(rope, keys->first_position + first, out, out_stride, n);
}

/* ------------------------------------------------------------------------------------------------------ learn ---- */

/* Memory of one head's learning. */
typedef struct workshop {
    size_t dim, columns, n_tokens, n_sample;
    float *keys;    /* [n_tokens][columns] */
    float *turned;  /* [64][columns]: a block of it, or queries */
    float *flipped; /* [columns][64] */
    float *product; /* [columns][columns] */
    float *weights; /* [dim][columns]: encode directions as columns */
    float *along;   /* [n_sample][columns]: coordinates */
    float *line;    /* [n_sample] */
    double *moments, *metric, *vectors, *values, *scratch, *directions, *encoders;
    double *error[3]; /* of each direction with 0, 2 and 4 bits: [dim] */
    double *step[3];
} workshop;

enum { BLOCK = 64 };

static bool take(size_t *total, size_t n, size_t n_each, size_t *offset)
{
    size_t bytes;
    *offset = *total;
    if (__builtin_mul_overflow(n, n_each, &bytes) || __builtin_add_overflow(bytes, (size_t)63, &bytes)) return false;
    return !__builtin_add_overflow(*total, bytes & ~(size_t)63, total);
}

/* One piece of memory; returns its start, or NULL. */
static void *open_workshop(workshop *w, size_t dim, size_t n_tokens)
{
    *w = (workshop){.dim = dim, .columns = padded(dim), .n_tokens = n_tokens};
    w->n_sample = n_tokens < SAMPLE_TOKENS ? n_tokens : SAMPLE_TOKENS;
    const size_t floats[] = {BLOCK * w->columns, BLOCK * w->columns,       w->columns * w->columns,
                             dim * w->columns,   w->n_sample * w->columns, w->n_sample};
    float **const float_places[] = {&w->turned, &w->flipped, &w->product, &w->weights, &w->along, &w->line};
    const size_t doubles[] = {dim * dim, dim * dim, dim * dim, dim, 3 * dim, dim * dim, dim * dim,
                              dim,       dim,       dim,       dim, dim,     dim};
    double **const double_places[] = {&w->moments,  &w->metric,   &w->vectors,  &w->values,  &w->scratch,
                                      &w->directions, &w->encoders, &w->error[0], &w->error[1], &w->error[2],
                                      &w->step[0],  &w->step[1],  &w->step[2]};
    enum { FLOATS = sizeof floats / sizeof *floats, DOUBLES = sizeof doubles / sizeof *doubles };
    size_t total = 0, at_keys, at[FLOATS + DOUBLES];
    bool fits = take(&total, n_tokens, w->columns * sizeof(float), &at_keys);
    for (size_t i = 0; i < FLOATS; i++) fits = fits && take(&total, floats[i], sizeof(float), &at[i]);
    for (size_t i = 0; i < DOUBLES; i++) fits = fits && take(&total, doubles[i], sizeof(double), &at[FLOATS + i]);
    char *memory = fits ? imp_aligned(64, total) : NULL;
    if (!memory) return NULL;
    memset(memory, 0, total); /* the padding of columns stays 0 */
    w->keys = (void *)(memory + at_keys);
    for (size_t i = 0; i < FLOATS; i++) *float_places[i] = (void *)(memory + at[i]);
    for (size_t i = 0; i < DOUBLES; i++) *double_places[i] = (void *)(memory + at[FLOATS + i]);
    return memory;
}

/* m += the sum of x x^T over the rows of a block. */
static void add_moments(workshop *w, const float *rows, size_t n_rows, double *m)
{
    for (size_t r = 0; r < n_rows; r++) {
        for (size_t d = 0; d < w->dim; d++) w->flipped[d * BLOCK + r] = rows[r * w->columns + d];
    }
    imp_multiply(w->flipped, BLOCK, w->dim, rows, w->columns, n_rows, w->columns, NULL, w->product, w->columns);
    for (size_t i = 0; i < w->dim; i++) {
        for (size_t j = 0; j < w->dim; j++) m[i * w->dim + j] += (double)w->product[i * w->columns + j];
    }
}

/* The mean, as f16 will have it, is taken off all keys. */
static void centre(workshop *w, float *mean)
{
    for (size_t d = 0; d < w->dim; d++) w->values[d] = 0.0;
    for (size_t i = 0; i < w->n_tokens; i++) {
        for (size_t d = 0; d < w->dim; d++) w->values[d] += (double)w->keys[i * w->columns + d];
    }
    for (size_t d = 0; d < w->dim; d++) {
        mean[d] = imp_f32_of_f16(imp_f16_of_f32((float)(w->values[d] / (double)w->n_tokens)));
    }
    for (size_t i = 0; i < w->n_tokens; i++) {
        for (size_t d = 0; d < w->dim; d++) w->keys[i * w->columns + d] -= mean[d];
    }
}

/* The queries' metric, with trace `dim`: the mean of q q^T over rows, heads and distances. A query meets each key at
 * that key's position, so it is turned back from positions all over the prefix. */
static void learn_metric(workshop *w, const imp_key_rows *keys, const imp_query *query, size_t max_rows,
                         const imp_rope_table *rope, uint32_t h)
{
    const size_t dim = w->dim, group = query->n_heads / keys->n_kv_heads;
    const size_t n_rows = query->n_rows < max_rows ? query->n_rows : max_rows, n = n_rows * group;
    const size_t n_distances = !rope ? 1 : keys->n_tokens < N_DISTANCES ? keys->n_tokens : N_DISTANCES;
    for (size_t i = 0; i < n_distances; i++) {
        size_t position = keys->first_position + i * keys->n_tokens / n_distances;
        for (size_t done = 0, count; done < n; done += count) {
            count = n - done < BLOCK ? n - done : BLOCK;
            for (size_t j = 0; j < count; j++) {
                size_t row = query->n_rows - n_rows + (done + j) / group, hd = h * group + (done + j) % group;
                const float *q = query->q + row * query->row_stride + hd * query->head_stride;
                float *to = w->turned + j * w->columns;
                for (size_t d = 0; d < dim; d++) to[d] = isfinite(q[d]) ? q[d] : 0.0f;
                if (rope) imp_rope_undo(rope, position, to, w->columns, 1);
            }
            add_moments(w, w->turned, count, w->metric);
        }
    }
    double trace = 0.0;
    for (size_t d = 0; d < dim; d++) trace += w->metric[d * dim + d];
    double gain = trace > 0.0 && isfinite(trace) ? QUERY_SHARE * (double)dim / trace : 0.0;
    for (size_t i = 0; i < dim * dim; i++) w->metric[i] = gain > 0.0 ? w->metric[i] * gain : 0.0;
    for (size_t d = 0; d < dim; d++) w->metric[d * dim + d] += gain > 0.0 ? 1.0 - QUERY_SHARE : 1.0;
}

/* out = a x b, or a^T x b. */
static void product(const double *a, bool flip, const double *b, size_t n, double *out)
{
    memset(out, 0, n * n * sizeof *out);
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < n; k++) {
            double x = flip ? a[k * n + i] : a[i * n + k];
            if (x == 0.0) continue;
            for (size_t j = 0; j < n; j++) out[i * n + j] += x * b[k * n + j];
        }
    }
}

/* From moments C and metric W = L L^T: v = eigenvectors of L^T C L; encoders L v; directions L^-T v. One a row. */
static void find_directions(workshop *w, bool weighted)
{
    const size_t n = w->dim;
    double *l = w->metric;
    if (weighted && imp_cholesky(l, n) < 0) weighted = false;
    if (weighted) {
        product(w->moments, false, l, n, w->encoders);
        product(l, true, w->encoders, n, w->moments);
    }
    imp_eigen(w->moments, n, w->values, w->vectors, w->scratch);
    memcpy(w->directions, w->vectors, n * n * sizeof *w->directions);
    memcpy(w->encoders, w->vectors, n * n * sizeof *w->encoders);
    if (!weighted) return;
    for (size_t r = 0; r < n; r++) {
        const double *v = w->vectors + r * n;
        double *e = w->encoders + r * n, *d = w->directions + r * n;
        for (size_t i = 0; i < n; i++) {
            e[i] = 0.0;
            for (size_t k = 0; k <= i; k++) e[i] += l[i * n + k] * v[k];
        }
        for (size_t i = n; i-- > 0;) {
            d[i] /= l[i * n + i];
            for (size_t k = 0; k < i; k++) d[k] -= l[i * n + k] * d[i];
        }
    }
}

static double error_of(const float *x, size_t n, double step, double limit)
{
    double sum = 0.0, inverse = 1.0 / step;
    for (size_t i = 0; i < n; i++) {
        double code = floor((double)x[i] * inverse);
        code = code < -limit ? -limit : code > limit - 1.0 ? limit - 1.0 : code;
        double e = (code + 0.5) * step - (double)x[i];
        sum += e * e;
    }
    return sum;
}

/* The step with the least squared error: from one that clips nothing down, until the error has been rising for long. */
static double best_step(const float *x, size_t n, double largest, double limit, double *error)
{
    double best = 0.0;
    *error = HUGE_VAL;
    for (double step = largest / (limit - 0.5); step > largest * 1e-3; step *= 0.9) {
        double e = error_of(x, n, step, limit);
        if (e < *error) {
            *error = e;
            best = step;
        } else if (e > 2.0 * *error) {
            break;
        }
    }
    return best;
}

/* Errors and steps of all directions; errors of different directions add up in the metric. */
static void measure_steps(workshop *w)
{
    for (size_t i = 0; i < w->dim; i++) {
        for (size_t d = 0; d < w->dim; d++) w->weights[d * w->columns + i] = (float)w->encoders[i * w->dim + d];
    }
    const size_t every = w->n_tokens / w->n_sample;
    imp_multiply(w->keys, every * w->columns, w->n_sample, w->weights, w->columns, w->dim, w->columns, NULL, w->along,
                 w->columns);
    for (size_t i = 0; i < w->dim; i++) {
        double largest = 0.0;
        w->error[0][i] = w->error[1][i] = w->error[2][i] = 0.0;
        w->step[0][i] = w->step[1][i] = w->step[2][i] = 0.0;
        for (size_t t = 0; t < w->n_sample; t++) {
            double x = (double)(w->line[t] = w->along[t * w->columns + i]);
            largest = fabs(x) > largest ? fabs(x) : largest;
            w->error[0][i] += x * x;
        }
        if (!(largest > 1e-20) || !isfinite(w->error[0][i])) continue;
        w->step[1][i] = best_step(w->line, w->n_sample, largest, 2.0, &w->error[1][i]);
        w->step[2][i] = best_step(w->line, w->n_sample, largest, 8.0, &w->error[2][i]);
    }
}

/* How many directions get 4 bits. */
static uint32_t best_split(const workshop *w, uint32_t n_bits)
{
    const uint32_t dim = (uint32_t)w->dim;
    uint32_t best = 0;
    double least = -1.0;
    for (uint32_t n4 = 0; 4 * n4 <= n_bits; n4 += 2) {
        uint32_t n2 = (n_bits - 4 * n4) / 2;
        if (!split_fits(dim, n_bits, n4, n2)) continue;
        double sum = 0.0;
        for (uint32_t i = 0; i < dim; i++) sum += w->error[i < n4 ? 2 : i < n4 + n2 ? 1 : 0][i];
        if (least < 0.0 || sum < least) {
            least = sum;
            best = n4;
        }
    }
    return best;
}

/* row[dim] as f16 with its largest element near 1; what it was divided by is returned. */
static double put_row(unsigned char *p, const double *row, size_t dim)
{
    double largest = 0.0;
    for (size_t d = 0; d < dim; d++) largest = fabs(row[d]) > largest ? fabs(row[d]) : largest;
    for (size_t d = 0; d < dim; d++) put_f16(p + 2 * d, largest > 0.0 ? (float)(row[d] / largest) : 0.0f);
    return largest;
}

static unsigned char *put_head(const workshop *w, const float *mean, uint32_t n_bits, unsigned char *p)
{
    const size_t dim = w->dim;
    const uint32_t n4 = best_split(w, n_bits), n2 = (n_bits - 4 * n4) / 2, n = n4 + n2;
    imp_put32(p, n4);
    imp_put32(p + 4, n2);
    p += 8;
    for (size_t d = 0; d < dim; d++, p += 2) put_f16(p, mean[d]);
    unsigned char *decode_scale = p, *encode_scale = p + 4 * n, *decode = p + 8 * n, *encode = decode + 2 * dim * n;
    for (uint32_t i = 0; i < n; i++) {
        double step = w->step[i < n4 ? 2 : 1][i];
        double d = put_row(decode + 2 * dim * i, w->directions + i * dim, dim);
        double e = put_row(encode + 2 * dim * i, w->encoders + i * dim, dim);
        put_f32(decode_scale + 4 * i, (float)(d * step));
        put_f32(encode_scale + 4 * i, step > 0.0 ? (float)(e / step) : 0.0f);
    }
    return encode + 2 * dim * n;
}

int imp_basis_learn(const imp_key_rows *keys, const imp_query *query, size_t max_rows, const imp_rope_table *rope,
                    uint32_t n_bits, imp_basis **out)
{
    void *memory = NULL;
    unsigned char *wire = NULL;
    *out = NULL;
    int rc = check_keys(keys, rope);
    if (rc < 0) return rc;
    if (keys->n_tokens == 0) return imp_fail(IMP_E_ARG, "no key to learn from");
    if (!bits_fit(keys->head_dim, n_bits)) {
        return imp_fail(IMP_E_ARG, "%u bits for heads of size %u", n_bits, keys->head_dim);
    }
    if (query && (query->n_heads == 0 || query->n_heads % keys->n_kv_heads != 0)) {
        return imp_fail(IMP_E_ARG, "%u heads over %u KV heads", query->n_heads, keys->n_kv_heads);
    }
    bool weighted = query && query->n_rows > 0 && max_rows > 0;

    workshop w;
    const uint32_t most = n_bits / 2 < keys->head_dim ? n_bits / 2 : keys->head_dim;
    memory = open_workshop(&w, keys->head_dim, keys->n_tokens);
    wire = imp_malloc(HEADER_BYTES + keys->n_kv_heads * head_wire_bytes(keys->head_dim, most));
    if (!memory || !wire) {
        rc = imp_fail(IMP_E_NOMEM, "no memory to learn from %zu tokens", keys->n_tokens);
        goto out;
    }
    imp_put32(wire, VERSION);
    imp_put32(wire + 4, keys->n_kv_heads);
    imp_put32(wire + 8, keys->head_dim);
    imp_put32(wire + 12, n_bits);
    unsigned char *end = wire + HEADER_BYTES;
    for (uint32_t h = 0; h < keys->n_kv_heads; h++) {
        float mean[MAX_DIM];
        read_keys(keys, rope, h, 0, keys->n_tokens, w.keys, w.columns);
        centre(&w, mean);
        memset(w.moments, 0, w.dim * w.dim * sizeof *w.moments);
        for (size_t i = 0; i < w.n_tokens; i += BLOCK) {
            add_moments(&w, w.keys + i * w.columns, w.n_tokens - i < BLOCK ? w.n_tokens - i : BLOCK, w.moments);
        }
        memset(w.metric, 0, w.dim * w.dim * sizeof *w.metric);
        if (weighted) learn_metric(&w, keys, query, max_rows, rope, h);
        find_directions(&w, weighted);
        measure_steps(&w);
        end = put_head(&w, mean, n_bits, end);
    }
    rc = imp_basis_parse(wire, (size_t)(end - wire), out);
out:
    imp_free(wire);
    imp_free(memory);
    return rc;
}

/* ----------------------------------------------------------------------------------------------------- encode ---- */

static unsigned code_of(float x, float limit)
{
    float code = floorf(x);
    if (!(code >= -limit)) code = -limit;
    if (code > limit - 1.0f) code = limit - 1.0f;
    return (unsigned)(int)(code + limit);
}

static void pack(const head *hd, const float *x, unsigned char *out)
{
    for (uint32_t i = 0; i < hd->n4; i += 2) {
        *out++ = (unsigned char)(code_of(x[i], 8.0f) | code_of(x[i + 1], 8.0f) << 4);
    }
    for (uint32_t i = hd->n4; i < hd->n4 + hd->n2; i += 4) {
        *out++ = (unsigned char)(code_of(x[i], 2.0f) | code_of(x[i + 1], 2.0f) << 2 | code_of(x[i + 2], 2.0f) << 4 |
                                 code_of(x[i + 3], 2.0f) << 6);
    }
}

int imp_sketch_encode(const imp_basis *b, const imp_key_rows *keys, const imp_rope_table *rope, void *codes)
{
    int rc = check_keys(keys, rope);
    if (rc < 0) return rc;
    if (keys->n_kv_heads != b->n_kv_heads || keys->head_dim != b->head_dim) {
        return imp_fail(IMP_E_ARG, "%u KV heads of size %u and a basis of %u of size %u", keys->n_kv_heads,
                        keys->head_dim, b->n_kv_heads, b->head_dim);
    }
    const size_t head_bytes = b->n_bits / 8, token_bytes = imp_sketch_token_bytes(b);
    _Alignas(64) float rows[TILE * MAX_DIM], along[TILE * MAX_DIM];
    for (size_t i = 0, n; i < keys->n_tokens; i += n) {
        n = keys->n_tokens - i < TILE ? keys->n_tokens - i : TILE;
        for (uint32_t h = 0; h < b->n_kv_heads; h++) {
            const head *hd = &b->heads[h];
            const size_t code_columns = padded(hd->n4 + hd->n2);
            unsigned char *out = (unsigned char *)codes + i * token_bytes + h * head_bytes;
            read_keys(keys, rope, h, i, n, rows, b->columns);
            for (size_t t = 0; t < n; t++) {
                for (size_t d = 0; d < b->head_dim; d++) rows[t * b->columns + d] -= hd->mean[d];
            }
            imp_multiply(rows, b->columns, n, hd->encode, code_columns, b->head_dim, code_columns, NULL, along,
                         code_columns);
            for (size_t t = 0; t < n; t++) pack(hd, along + t * code_columns, out + t * token_bytes);
        }
    }
    return 0;
}

/* ---------------------------------------------------------------------------------------------------- rebuild ---- */

/* What a byte of two 4-bit codes, or of four 2-bit codes, holds. */
#define PAIR(b) {(float)((b) & 15), (float)((b) >> 4 & 15)}
#define FOUR(b) {(float)((b) & 3), (float)((b) >> 2 & 3), (float)((b) >> 4 & 3), (float)((b) >> 6 & 3)}
#define TIMES4(m, b) m(b), m((b) + 1), m((b) + 2), m((b) + 3)
#define TIMES16(m, b) TIMES4(m, b), TIMES4(m, (b) + 4), TIMES4(m, (b) + 8), TIMES4(m, (b) + 12)
#define TIMES64(m, b) TIMES16(m, b), TIMES16(m, (b) + 16), TIMES16(m, (b) + 32), TIMES16(m, (b) + 48)
#define TIMES256(m) TIMES64(m, 0), TIMES64(m, 64), TIMES64(m, 128), TIMES64(m, 192)
static const float pairs[256][2] = {TIMES256(PAIR)};
static const float fours[256][4] = {TIMES256(FOUR)};

static void unpack(const head *hd, const unsigned char *codes, float *out)
{
    for (uint32_t i = 0; i < hd->n4; i += 2) memcpy(out + i, pairs[*codes++], sizeof pairs[0]);
    out += hd->n4;
    for (uint32_t i = 0; i < hd->n2; i += 4) memcpy(out + i, fours[*codes++], sizeof fours[0]);
}

/* Keys of one KV head, `row` floats from one token to the next. */
static void rebuild_head(const imp_basis *b, uint32_t h, const unsigned char *codes, size_t n_tokens,
                         size_t first_position, const imp_rope_table *rope, float *keys, size_t row)
{
    const size_t dim = b->head_dim, head_bytes = b->n_bits / 8, token_bytes = imp_sketch_token_bytes(b);
    const head *hd = &b->heads[h];
    const size_t n_codes = hd->n4 + hd->n2;
    _Alignas(64) float values[TILE * MAX_DIM], tile[TILE * MAX_DIM];
    codes += h * head_bytes;
    for (size_t i = 0, n; i < n_tokens; i += n, codes += n * token_bytes, keys += n * row) {
        bool whole = b->columns == dim; /* or what the product pads would run into the next row */
        float *out = whole ? keys : tile;
        const size_t stride = whole ? row : b->columns;
        n = n_tokens - i < TILE ? n_tokens - i : TILE;
        for (size_t t = 0; t < n; t++) unpack(hd, codes + t * token_bytes, values + t * n_codes);
        imp_multiply(values, n_codes, n, hd->decode, b->columns, n_codes, b->columns, hd->start, out, stride);
        if (rope) imp_rope_apply(rope, first_position + i, out, stride, n);
        for (size_t t = 0; !whole && t < n; t++) memcpy(keys + t * row, tile + t * stride, dim * sizeof *keys);
    }
}

void imp_sketch_rebuild(const imp_basis *b, const void *codes, size_t n_tokens, size_t first_position,
                        const imp_rope_table *rope, float *keys)
{
    const size_t dim = b->head_dim, row = b->n_kv_heads * dim;
    for (uint32_t h = 0; h < b->n_kv_heads; h++)
        rebuild_head(b, h, codes, n_tokens, first_position, rope, keys + h * dim, row);
}

/* ------------------------------------------------------------------------------------------------------ score ---- */

typedef struct rebuilding {
    const imp_sketch_run *runs;
    size_t first_position;
    const imp_rope_table *rope;
} rebuilding;

/* imp_key_maker: they are scored while they are in the nearest cache, and never all in memory. */
static void make_keys(void *user, uint32_t kv_head, size_t first, size_t n, float *keys)
{
    const rebuilding *r = user;
    size_t run_start = 0, at = first, end = first + n;
    for (const imp_sketch_run *run = r->runs; at < end; run_start += run++->n_tokens) {
        if (at >= run_start + run->n_tokens) continue;
        const size_t skip = at - run_start, count = run->n_tokens - skip < end - at ? run->n_tokens - skip : end - at;
        const unsigned char *codes = (const unsigned char *)run->codes + skip * imp_sketch_token_bytes(run->basis);
        rebuild_head(run->basis, kv_head, codes, count, r->first_position + at, r->rope,
                     keys + (at - first) * run->basis->head_dim, run->basis->head_dim);
        at += count;
    }
}

int imp_sketch_score(imp_scorer *s, const imp_sketch_run *runs, size_t n_runs, size_t first_position,
                     const imp_rope_table *rope, const imp_query *query, size_t max_rows, float *scores, float *per_kv_head)
{
    if (n_runs == 0) return imp_fail(IMP_E_ARG, "no sketch to score");
    const imp_basis *b = runs[0].basis;
    size_t n_tokens = 0;
    for (size_t i = 0; i < n_runs; i++) {
        n_tokens += runs[i].n_tokens;
        if (runs[i].basis->n_kv_heads != b->n_kv_heads || runs[i].basis->head_dim != b->head_dim) {
            return imp_fail(IMP_E_ARG, "sketches of different shapes");
        }
    }
    if (rope && (imp_rope_table_head_dim(rope) != b->head_dim ||
                 !imp_rope_table_covers(rope, first_position, n_tokens))) {
        return imp_fail(IMP_E_ARG, "RoPE tables of another head size, or of other positions");
    }
    rebuilding r = {runs, first_position, rope};
    const imp_key_maker maker = {.make = make_keys, .user = &r, .n_kv_heads = b->n_kv_heads, .head_dim = b->head_dim,
                                 .n_tokens = n_tokens};
    return imp_score_made(s, query, max_rows, &maker, scores, per_kv_head);
}
