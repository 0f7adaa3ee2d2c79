#include "tiny_engine.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ------------------------------------------------------------------------------------------------- the engine ---- */

/* One layer's matrices, [inputs][outputs]. */
typedef struct matrices {
    float *wq, *wk, *wv, *wo, *w1, *w2;
} matrices;

struct tiny_model {
    tiny_shape shape;
    size_t d, d_kv, d_mlp; /* widths: of the stream (= all heads), of a KV row, inside the MLP */
    float *embedding;      /* [n_vocab][d]; also turns the last state into logits */
    matrices *layers;
    float *memory;         /* all weights */
};

static uint64_t next_random(uint64_t *state) /* splitmix64 */
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Take n_in * n_out weights from `*at`: uniform, scaled so that outputs are `gain` times as large as inputs. */
static float *take_weights(float **at, uint64_t *random, size_t n_in, size_t n_out, double gain)
{
    float *w = *at;
    double scale = gain * sqrt(3.0 / (double)n_in);
    for (size_t i = 0; i < n_in * n_out; i++)
        w[i] = (float)(((double)(next_random(random) >> 11) * 0x1p-52 - 1.0) * scale);
    *at += n_in * n_out;
    return w;
}

/* The same by way of KEY_RANK numbers in between: keys then lie near a small subspace, as trained models' do.
 * `scratch`: [KEY_RANK][n_in + n_out]. */
enum { KEY_RANK = 8 };

static float *take_narrow_weights(float **at, uint64_t *random, size_t n_in, size_t n_out, float *scratch)
{
    float *w = *at, *end = scratch;
    const float *into = take_weights(&end, random, n_in, KEY_RANK, 1);
    const float *out = take_weights(&end, random, KEY_RANK, n_out, 1);
    for (size_t i = 0; i < n_in; i++) {
        for (size_t j = 0; j < n_out; j++) {
            w[i * n_out + j] = 0;
            for (size_t r = 0; r < KEY_RANK; r++) w[i * n_out + j] += into[i * KEY_RANK + r] * out[r * n_out + j];
        }
    }
    *at += n_in * n_out;
    return w;
}

tiny_model *tiny_model_new(const tiny_shape *shape)
{
    tiny_model *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->shape = *shape;
    m->d = (size_t)shape->n_heads * shape->head_dim;
    m->d_kv = (size_t)shape->n_kv_heads * shape->head_dim;
    m->d_mlp = 2 * m->d;
    size_t per_layer = 2 * m->d * m->d + 2 * m->d * m->d_kv + 2 * m->d * m->d_mlp;
    m->layers = calloc(shape->n_layers, sizeof *m->layers);
    m->memory = malloc((shape->n_vocab * m->d + shape->n_layers * per_layer) * sizeof(float));
    float *scratch = malloc(KEY_RANK * (m->d + m->d_kv) * sizeof *scratch);
    if (!m->layers || !m->memory || !scratch) {
        free(scratch);
        tiny_model_free(m);
        return NULL;
    }
    float *at = m->memory;
    uint64_t random = shape->seed;
    m->embedding = take_weights(&at, &random, m->d, shape->n_vocab, 1);
    for (uint32_t l = 0; l < shape->n_layers; l++) {
        matrices *w = &m->layers[l];
        w->wq = take_weights(&at, &random, m->d, m->d, 6); /* large: attention prefers some tokens */
        w->wk = take_narrow_weights(&at, &random, m->d, m->d_kv, scratch);
        w->wv = take_weights(&at, &random, m->d, m->d_kv, 1);
        w->wo = take_weights(&at, &random, m->d, m->d, 0.5);
        w->w1 = take_weights(&at, &random, m->d, m->d_mlp, 1);
        w->w2 = take_weights(&at, &random, m->d_mlp, m->d, 0.5);
    }
    free(scratch);
    return m;
}

void tiny_model_free(tiny_model *m)
{
    if (!m) return;
    free(m->layers);
    free(m->memory);
    free(m);
}

int tiny_cells_init(tiny_cells *c, const tiny_model *m, uint32_t capacity)
{
    size_t n = m->shape.n_layers * (size_t)capacity * m->d_kv;
    *c = (tiny_cells){.capacity = capacity, .row = m->d_kv, .k = calloc(n, 2), .v = calloc(n, 2)};
    c->q = calloc(m->shape.n_layers * TINY_QUERIES * m->d, sizeof *c->q);
    if (c->k && c->v && c->q) return 0;
    tiny_cells_free(c);
    return -1;
}

void tiny_cells_free(tiny_cells *c)
{
    free(c->k);
    free(c->v);
    free(c->q);
    *c = (tiny_cells){0};
}

uint16_t *tiny_k(const tiny_cells *c, uint32_t l, uint32_t cell)
{
    return c->k + ((size_t)l * c->capacity + cell) * c->row;
}

uint16_t *tiny_v(const tiny_cells *c, uint32_t l, uint32_t cell)
{
    return c->v + ((size_t)l * c->capacity + cell) * c->row;
}

/* f16, rounded to nearest, ties to even. Adding the right power of two leaves the rounding to the hardware. */
static uint16_t to_f16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x7f800000) return (uint16_t)(sign | (magnitude > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) { /* subnormal: a multiple of 2^-24 */
        float small;
        memcpy(&small, &magnitude, 4);
        small += 0.5f; /* whose last bit is 2^-24 */
        memcpy(&magnitude, &small, 4);
        return (uint16_t)(sign | (magnitude - 0x3f000000));
    }
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | (magnitude - 0x38000000) >> 13);
}

static float to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, bits;
    float f;
    if (rest < 0x0400) {
        f = (float)rest * 0x1p-24f;
        return sign ? -f : f;
    }
    bits = sign | (rest >= 0x7c00 ? 0x7f800000 | (rest & 0x3ff) << 13 : (rest << 13) + 0x38000000);
    memcpy(&f, &bits, 4);
    return f;
}

/* y = x W. The order makes the inner loop independent additions, which compilers turn into vectors. */
static void times(const float *x, const float *w, size_t n_in, size_t n_out, float *y)
{
    memset(y, 0, n_out * sizeof *y);
    for (size_t i = 0; i < n_in; i++)
        for (size_t j = 0; j < n_out; j++) y[j] += x[i] * w[i * n_out + j];
}

static void rms_norm(const float *x, size_t n, float *y)
{
    float sum = 0;
    for (size_t i = 0; i < n; i++) sum += x[i] * x[i];
    float scale = 1 / sqrtf(sum / (float)n + 1e-6f);
    for (size_t i = 0; i < n; i++) y[i] = x[i] * scale;
}

static void rope(float *x, uint32_t n_heads, uint32_t head_dim, uint32_t position)
{
    for (uint32_t h = 0; h < n_heads; h++, x += head_dim) {
        for (uint32_t i = 0; i < head_dim / 2; i++) {
            double angle = position * pow(10000.0, -2.0 * i / head_dim);
            float c = (float)cos(angle), s = (float)sin(angle), a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * c - b * s;
            x[2 * i + 1] = a * s + b * c;
        }
    }
}

/* Attention of one token over cells [0, n_cells), whose rows are widened in k and v. */
static void attend(const tiny_model *m, const float *q, const float *k, const float *v, uint32_t n_cells, float *weight,
                   float *out)
{
    uint32_t hd = m->shape.head_dim, group = m->shape.n_heads / m->shape.n_kv_heads;
    float scale = 1 / sqrtf((float)hd);
    memset(out, 0, m->d * sizeof *out);
    for (uint32_t h = 0; h < m->shape.n_heads; h++, q += hd, out += hd) {
        size_t at = (size_t)(h / group) * hd; /* of the KV head in a row */
        float largest = -INFINITY, sum = 0;
        for (uint32_t c = 0; c < n_cells; c++) {
            float dot = 0;
            for (uint32_t i = 0; i < hd; i++) dot += q[i] * k[c * m->d_kv + at + i];
            weight[c] = dot * scale;
            if (weight[c] > largest) largest = weight[c];
        }
        for (uint32_t c = 0; c < n_cells; c++) sum += weight[c] = expf(weight[c] - largest);
        for (uint32_t c = 0; c < n_cells; c++) {
            float w = weight[c] / sum;
            for (uint32_t i = 0; i < hd; i++) out[i] += w * v[c * m->d_kv + at + i];
        }
    }
}

int tiny_forward(const tiny_model *m, tiny_cells *c, const int32_t *tokens, uint32_t n, uint32_t first_position,
                 tiny_hook hook, void *user, float *logits)
{
    uint32_t hd = m->shape.head_dim, n_cells = c->n + n;
    size_t d = m->d, d_kv = m->d_kv;
    if (n == 0 || n_cells > c->capacity || n_cells < n) return IMP_E_ARG;
    size_t n_floats = 2 * n * d + 4 * d + m->d_mlp + 2 * n_cells * d_kv + n_cells;
    float *memory = malloc(n_floats * sizeof *memory);
    if (!memory) return IMP_E_NOMEM;
    float *x = memory, *q = x + n * d;                        /* [n][d]: the stream, the queries */
    float *norm = q + n * d, *row = norm + d, *out = row + d; /* [d], the next one too */
    float *sum = out + d, *hidden = sum + d;
    float *k = hidden + m->d_mlp, *v = k + n_cells * d_kv, *weight = v + n_cells * d_kv;
    int rc = 0;
    c->n_q = n < TINY_QUERIES ? n : TINY_QUERIES;
    c->first_q = first_position + n - c->n_q;

    for (uint32_t t = 0; t < n; t++)
        memcpy(x + t * d, m->embedding + (uint32_t)tokens[t] % m->shape.n_vocab * d, d * sizeof *x);
    for (uint32_t l = 0; l < m->shape.n_layers && rc == 0; l++) {
        const matrices *w = &m->layers[l];
        for (uint32_t t = 0; t < n; t++) {
            rms_norm(x + t * d, d, norm);
            times(norm, w->wq, d, d, q + t * d);
            rope(q + t * d, m->shape.n_heads, hd, first_position + t);
            times(norm, w->wk, d, d_kv, row);
            rope(row, m->shape.n_kv_heads, hd, first_position + t);
            for (size_t i = 0; i < d_kv; i++) tiny_k(c, l, c->n + t)[i] = to_f16(row[i]);
            times(norm, w->wv, d, d_kv, row);
            for (size_t i = 0; i < d_kv; i++) tiny_v(c, l, c->n + t)[i] = to_f16(row[i]);
        }
        memcpy(c->q + l * TINY_QUERIES * d, q + (n - c->n_q) * d, c->n_q * d * sizeof *q);
        if (hook && (rc = hook(user, l, q, n)) != 0) break;
        for (size_t i = 0; i < n_cells * d_kv; i++) {
            k[i] = to_f32(tiny_k(c, l, 0)[i]);
            v[i] = to_f32(tiny_v(c, l, 0)[i]);
        }
        for (uint32_t t = 0; t < n; t++) {
            attend(m, q + t * d, k, v, c->n + t + 1, weight, out);
            times(out, w->wo, d, d, sum);
            for (size_t i = 0; i < d; i++) x[t * d + i] += sum[i];
            rms_norm(x + t * d, d, norm);
            times(norm, w->w1, d, m->d_mlp, hidden);
            for (size_t i = 0; i < m->d_mlp; i++) hidden[i] = hidden[i] > 0 ? hidden[i] : 0;
            times(hidden, w->w2, m->d_mlp, d, sum);
            for (size_t i = 0; i < d; i++) x[t * d + i] += sum[i];
        }
    }
    if (rc == 0) {
        c->n = n_cells;
        rms_norm(x + (n - 1) * d, d, norm);
        for (uint32_t t = 0; logits && t < m->shape.n_vocab; t++) {
            logits[t] = 0;
            for (size_t i = 0; i < d; i++) logits[t] += norm[i] * m->embedding[t * d + i];
        }
    }
    free(memory);
    return rc;
}

/* ----------------------------------------------------------------------------------------------- with Impress ---- */

enum {
    MIN_QUERY = 16,     /* tokens computed at least under a partial load, so that there are queries to choose by */
    MAX_FAILED = 3,     /* passes thrown away before we compute everything */
    MAX_LAYERS = 1024   /* as in impress.h */
};

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int tiny_space_open(const tiny_model *m, imp_store *store, imp_space **out)
{
    imp_layer_shape layers[MAX_LAYERS];
    imp_rope ropes[MAX_LAYERS];
    uint32_t n_heads[MAX_LAYERS];
    if (m->shape.n_layers > MAX_LAYERS) return IMP_E_ARG;
    for (uint32_t l = 0; l < m->shape.n_layers; l++) {
        layers[l] = (imp_layer_shape){m->shape.n_kv_heads, m->shape.head_dim, m->shape.head_dim};
        ropes[l] = (imp_rope){.pairs = IMP_ROPE_NORM, .n_dims = m->shape.head_dim, .base = 10000, .freq_scale = 1,
                              .attn_factor = 1}; /* as rope() does */
        n_heads[l] = m->shape.n_heads;
    }
    /* The seed stands for the weights here. An engine with a file of weights asks imp_store_fingerprint(). What else
     * changes the KV goes into the fields, as the number of query heads, which the shapes don't show. */
    const imp_field fields[] = {{"n_heads", &m->shape.n_heads, sizeof m->shape.n_heads},
                                {"n_vocab", &m->shape.n_vocab, sizeof m->shape.n_vocab}};
    const imp_space_desc desc = {
        .struct_bytes = sizeof desc,
        .model_name = "tiny",
        .engine = "tiny 1",
        .weights = {m->shape.seed, 0},
        .type_k = IMP_TYPE_F16,
        .type_v = IMP_TYPE_F16,
        .n_layers = m->shape.n_layers,
        .layers = layers,
        .fields = fields,
        .n_fields = 2,
        .ropes = ropes,
        .n_heads = n_heads,
    };
    return imp_space_open(store, &desc, out);
}

/* Rows of queries as tiny_forward() computes them. */
static imp_query query_of(const tiny_model *m, const float *q, uint32_t n_rows)
{
    return (imp_query){
        .q = q,
        .row_stride = m->d,
        .head_stride = m->shape.head_dim,
        .n_rows = n_rows,
        .n_heads = m->shape.n_heads,
        .scale = 1 / sqrtf((float)m->shape.head_dim),
    };
}

/* Before attention of a layer: choose tokens of the prefix by the queries, and get their rows into cells 0, 1, ... */
typedef struct loading {
    const tiny_model *m;
    tiny_cells *c;
    imp_load *load;
} loading;

static int fill_cells(void *user, uint32_t layer, const float *q, uint32_t n_tokens)
{
    loading *at = user;
    const imp_query query = query_of(at->m, q, n_tokens);
    const imp_dst dst = {
        .k = tiny_k(at->c, layer, 0),
        .v = tiny_v(at->c, layer, 0),
        .k_stride = at->c->row * 2,
        .v_stride = at->c->row * 2,
    };
    int rc = imp_load_select(at->load, layer, &query, NULL);
    return rc < 0 ? rc : imp_load_gather(at->load, layer, &dst);
}

/* One pass with the stored prefix. `*found`: there was one. */
static int loaded_pass(const tiny_model *m, imp_space *space, const imp_load_opts *opts, const int32_t *tokens,
                       uint32_t n, tiny_cells *c, float *logits, tiny_report *report, int *found)
{
    imp_lease *lease = NULL;
    imp_load *load = NULL;
    imp_prefix_info info;
    int rc = imp_prefix_acquire(space, tokens, n, 0, &lease, &info);
    *found = rc == 0 && lease;
    if (!*found) return rc;
    report->match_ns += info.match_ns;

    size_t matched = info.n_matched;
    int partial = opts && opts->switches.identify != IMP_IDENTIFY_NONE && (opts->retention < 1 || opts->mass > 0);
    if (partial && matched + MIN_QUERY > n) {
        *found = n > MIN_QUERY;
        if (!*found) goto out;
        matched = n - MIN_QUERY;
        rc = imp_lease_trim(lease, matched);
        if (rc < 0) goto out;
    }
    rc = imp_load_begin(lease, opts, &load);
    if (rc < 0) goto out;

    /* A loaded token may be in any cell, since its key was stored after RoPE: k cells do for k tokens of the prefix. */
    loading at = {m, c, load};
    report->n_matched = matched;
    report->n_loaded = imp_load_count(load);
    report->whole = report->n_loaded == matched && !info.rounded;
    c->n = (uint32_t)report->n_loaded;
    rc = tiny_forward(m, c, tokens + matched, n - (uint32_t)matched, (uint32_t)matched, fill_cells, &at, logits);
    imp_load_get_stats(load, &report->load);
out:
    imp_load_end(load, NULL);
    imp_lease_release(lease);
    return rc;
}

int tiny_prompt(const tiny_model *m, imp_space *space, const imp_load_opts *opts, const int32_t *tokens, uint32_t n,
                tiny_cells *c, float *logits, tiny_report *report)
{
    uint64_t start = now_ns();
    int rc = 0, found = 0, n_failed = 0;
    do {
        *report = (tiny_report){.n_failed = n_failed, .whole = 1};
        c->n = 0;
        if (space) rc = loaded_pass(m, space, opts, tokens, n, c, logits, report, &found);
    } while (rc < 0 && found && ++n_failed < MAX_FAILED); /* what was bad is gone from the store: match again */
    if (rc < 0 || !found) {
        *report = (tiny_report){.n_failed = n_failed, .whole = 1};
        c->n = 0;
        rc = tiny_forward(m, c, tokens, n, 0, NULL, NULL, logits);
    }
    report->total_ns = now_ns() - start;
    return rc;
}

int tiny_store(const tiny_model *m, imp_space *space, const tiny_cells *c, const int32_t *tokens, uint32_t n,
               uint32_t first_new)
{
    imp_commit *commit;
    int rc = imp_commit_begin(space, tokens, n, first_new, 0, &commit);
    if (rc < 0 || !commit) return rc; /* no handle: it is stored already, or too short */
    for (uint32_t l = 0; l < m->shape.n_layers; l++) {
        rc = imp_commit_rows(commit, l, first_new, n - first_new, tiny_k(c, l, first_new), c->row * 2,
                             tiny_v(c, l, first_new), c->row * 2);
        if (rc < 0) {
            imp_commit_cancel(commit);
            return rc;
        }
        if (c->n_q == 0 || c->first_q + c->n_q > n) continue; /* of tokens that aren't stored */
        const imp_query query = query_of(m, c->q + l * TINY_QUERIES * m->d, c->n_q);
        (void)imp_commit_queries(commit, l, c->first_q, &query); /* advice: without it the rows are stored too */
    }
    return imp_commit_finish(commit);
}
