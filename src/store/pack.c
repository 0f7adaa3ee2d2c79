/* pack.c: staged rows into the bytes of a segment, one layer at a time, so that the memory it takes is a layer's.
 *
 * Keys are encoded in groups of tokens, in token order, and only then put where their slots are: in which order a
 * segment lies never changes what a token's row says. */
#include <string.h>

#include "base/alloc.h"
#include "base/log.h"
#include "base/status.h"
#include "format/rows.h"
#include "select/blend.h"
#include "select/order.h"
#include "select/select.h"
#include "store/store_internal.h"

enum { SCORE_MOST = 32768 }; /* tokens scored together: a scorer takes about 1 KiB for each */

/* ---- scores */

/* One layer's, of the tokens that all its queries see. */
static int score_layer(imp_scorer *scorer, const imp_job *job, uint32_t layer, float *out)
{
    const imp_job_query *q = &job->queries[layer];
    size_t n_new = job->n_tokens - job->start, n = q->first - job->start;
    for (size_t i = 0, n_part; i < n; i += n_part) {
        n_part = n - i < SCORE_MOST ? n - i : SCORE_MOST;
        imp_key_rows rows = imp_job_keys(job, layer, job->start + i, n_part);
        imp_key_run run = {rows.rows, n_part};
        imp_keys keys = {job->type_k, rows.n_kv_heads, rows.head_dim, &run, 1, n_part};
        int rc = imp_score_h2o(scorer, &q->q, IMP_JOB_QUERY_ROWS, &keys, out + i, NULL);
        if (rc < 0) return rc;
        imp_normalise(out + i, n_part, out + i);
    }
    for (size_t i = n; i < n_new; i++) out[i] = 1.0f;
    return 0;
}

void imp_job_score(imp_store *s, imp_job *job)
{
    size_t n_new = job->n_tokens - job->start, most = 0;
    uint32_t heads = 0, dim = 0;
    imp_scorer *scorer = NULL;
    if (job->tried_scores || !job->queries) return;
    job->tried_scores = true;
    for (uint32_t i = 0; i < job->n_layers; i++) {
        const imp_job_query *q = &job->queries[i];
        if (q->q.n_rows == 0 || q->first <= job->start) continue;
        if (q->first - job->start > most) most = q->first - job->start;
        if (q->q.n_heads > heads) heads = q->q.n_heads;
        if (job->layers[i].head_dim_k > dim) dim = job->layers[i].head_dim_k;
    }
    if (most == 0) return;
    imp_kept_line kept;
    imp_error_keep(&kept);
    float *scores = imp_realloc_array(NULL, n_new, job->n_layers * sizeof *scores);
    bool *scored = imp_calloc(job->n_layers, sizeof *scored);
    int rc = scores && scored ? 0 : imp_fail(IMP_E_NOMEM, "no memory for the scores of %zu tokens", n_new);
    if (rc == 0) {
        rc = imp_scorer_new(most < SCORE_MOST ? most : SCORE_MOST, IMP_JOB_QUERY_ROWS, heads, dim, NULL, &scorer);
    }
    for (uint32_t i = 0; rc == 0 && i < job->n_layers; i++) {
        if (job->queries[i].q.n_rows == 0 || job->queries[i].first <= job->start) continue;
        rc = score_layer(scorer, job, i, scores + i * n_new);
        scored[i] = rc == 0;
    }
    imp_scorer_free(scorer);
    if (rc < 0) {
        imp_log(IMP_LOG_INFO, "%s: tokens are stored without scores: %s", s->dir, imp_last_error());
        imp_free(scored);
        imp_free(scores);
    } else {
        job->scores = scores;
        job->scored = scored;
    }
    (void)imp_error_back(&kept, 0);
}

/* ---- one layer */

typedef struct packer {
    const imp_job *job;
    const imp_seg_layout *l;
    const imp_seg_meta *m;
    const imp_bases *bases;
    size_t skip;           /* rows of the job before the segment's first */
    imp_job_ropes ropes;
    unsigned char *out;    /* what is written next */
    uint64_t out_at;       /* where in the file */
    uint64_t *sums;
    imp_cipher *cipher;    /* where the segment is sealed */
    unsigned char *codes;  /* a group of encoded keys */
    uint32_t *tokens;      /* [n_tokens]: which one each slot holds; NULL: slot s holds token s */
    uint32_t *slots;       /* [n_tokens]: and the reverse */
    float *scratch;
} packer;

static unsigned char *place(const packer *p, imp_region region, uint32_t layer, uint32_t token)
{
    uint32_t slot = p->slots ? p->slots[token] : token, chunk = slot / p->m->chunk_tokens;
    imp_chunk_place c = imp_seg_chunk(p->l, p->m->paired ? IMP_REGION_KV : region, layer, chunk);
    return p->out + (c.offset - p->out_at) + imp_seg_rows_at(p->l, region, layer, chunk) +
           (slot - c.first_token) * imp_seg_row_bytes(p->l, region, layer);
}

static const unsigned char *rows_of(const packer *p, imp_region region, uint32_t layer)
{
    const imp_job *job = p->job;
    return job->rows + job->row_at[2 * layer + (region == IMP_REGION_V)] +
           p->skip * imp_job_row_bytes(job, layer, region);
}

static unsigned char *whole(const packer *p, imp_region region, uint32_t layer)
{
    return p->out + (imp_seg_chunk(p->l, region, layer, 0).offset - p->out_at);
}

static void pack_keys(const packer *p, uint32_t layer)
{
    const imp_seg_meta *m = p->m;
    const unsigned char *rows = rows_of(p, IMP_REGION_K, layer);
    size_t n = (size_t)m->layers[layer].n_kv_heads * m->layers[layer].head_dim_k;
    size_t row_bytes = imp_job_row_bytes(p->job, layer, IMP_REGION_K);
    size_t packed = imp_seg_row_bytes(p->l, IMP_REGION_K, layer);
    if (m->rest == IMP_REST_RAW) {
        for (uint32_t t = 0; t < m->n_tokens; t++) {
            memcpy(place(p, IMP_REGION_K, layer, t), rows + t * row_bytes, row_bytes);
        }
        return;
    }
    unsigned char *scales = whole(p, IMP_REGION_SCALES, layer);
    for (uint32_t first = 0; first < m->n_tokens; first += IMP_GROUP_TOKENS) {
        uint32_t count = m->n_tokens - first < IMP_GROUP_TOKENS ? m->n_tokens - first : IMP_GROUP_TOKENS;
        imp_rows_keys_encode(m->rest, m->type_k, rows + first * row_bytes, row_bytes, count, n, p->codes,
                             (uint16_t *)(void *)scales);
        scales += imp_rows_scales_bytes(m->rest, n);
        for (uint32_t i = 0; i < count; i++) {
            memcpy(place(p, IMP_REGION_K, layer, first + i), p->codes + i * packed, packed);
        }
    }
}

static void pack_values(const packer *p, uint32_t layer)
{
    const imp_seg_meta *m = p->m;
    const unsigned char *rows = rows_of(p, IMP_REGION_V, layer);
    size_t n = (size_t)m->layers[layer].n_kv_heads * m->layers[layer].head_dim_v;
    size_t row_bytes = imp_job_row_bytes(p->job, layer, IMP_REGION_V);
    for (uint32_t t = 0; t < m->n_tokens; t++) {
        imp_rows_value_encode(m->rest, m->type_v, rows + t * row_bytes, n, place(p, IMP_REGION_V, layer, t));
    }
}

/* The first KV heads' keys, which are the first bytes of each row. */
static void pack_probe(const packer *p, uint32_t layer)
{
    const unsigned char *rows = rows_of(p, IMP_REGION_K, layer);
    unsigned char *to = whole(p, IMP_REGION_PROBE, layer);
    size_t row_bytes = imp_job_row_bytes(p->job, layer, IMP_REGION_K);
    size_t n = imp_seg_row_bytes(p->l, IMP_REGION_PROBE, layer);
    for (uint32_t t = 0; t < p->m->n_tokens; t++) memcpy(to + t * n, rows + t * row_bytes, n);
}

static int pack_sketch(packer *p, uint32_t layer)
{
    const imp_rope_table *rope;
    imp_key_rows keys = imp_job_keys(p->job, layer, (size_t)p->m->first_token, p->m->n_tokens);
    int rc = imp_job_rope(&p->ropes, p->job, layer, keys.first_position, keys.n_tokens, &rope);
    if (rc < 0) return rc;
    return imp_sketch_encode(p->bases->layers[layer], &keys, rope, whole(p, IMP_REGION_SKETCH, layer));
}

/* The last that is done to a region's chunks. */
static int close_chunks(const packer *p, imp_region region, uint32_t layer)
{
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < imp_seg_region_chunks(p->l, region); i++) {
        imp_chunk_place c = imp_seg_chunk(p->l, region, layer, i);
        rc = imp_seg_chunk_close(p->l, p->cipher, c.index, p->out + (c.offset - p->out_at), c.n_bytes, p->sums);
    }
    return rc;
}

/* Which token each slot of the layer holds, and the reverse. */
static void order_layer(const packer *p, uint32_t layer)
{
    const imp_job *job = p->job;
    const float *scores = NULL;
    if (job->scores && job->scored[layer]) scores = job->scores + layer * (job->n_tokens - job->start) + p->skip;
    imp_order_slots(p->m->order, scores, p->m->n_tokens, p->m->core_tokens, p->tokens, p->scratch);
    for (uint32_t slot = 0; slot < p->m->n_tokens; slot++) p->slots[p->tokens[slot]] = slot;
}

static int write_map(packer *p, imp_io_writer *w, uint32_t layer)
{
    imp_chunk_place c = imp_seg_chunk(p->l, IMP_REGION_MAP, layer, 0);
    p->out_at = c.offset;
    memset(p->out, 0, c.n_bytes);
    imp_seg_map_encode(p->l, p->tokens, p->out);
    int rc = close_chunks(p, IMP_REGION_MAP, layer);
    return rc < 0 ? rc : imp_io_write(w, c.offset, p->out, c.n_bytes);
}

static int write_layer(packer *p, imp_io_writer *w, uint32_t layer)
{
    static const imp_region regions[] = {IMP_REGION_SCALES, IMP_REGION_SKETCH, IMP_REGION_PROBE,
                                         IMP_REGION_K,      IMP_REGION_V,      IMP_REGION_KV};
    uint64_t n_bytes;
    int rc = 0;
    if (p->tokens) {
        order_layer(p, layer);
        rc = write_map(p, w, layer);
    }
    if (rc < 0) return rc;
    p->out_at = imp_seg_layer_at(p->l, layer, &n_bytes);
    memset(p->out, 0, n_bytes); /* the padding */
    pack_keys(p, layer);
    pack_values(p, layer);
    if (p->m->probe_heads > 0) pack_probe(p, layer);
    if (p->m->sketch_bits > 0) rc = pack_sketch(p, layer);
    for (size_t i = 0; rc == 0 && i < sizeof regions / sizeof regions[0]; i++) rc = close_chunks(p, regions[i], layer);
    return rc < 0 ? rc : imp_io_write(w, p->out_at, p->out, n_bytes);
}

/* ---- the file */

static int open_packer(packer *p, const imp_io *io)
{
    const imp_seg_meta *m = p->m;
    uint64_t n_bytes = imp_seg_header_bytes(p->l), n_layer;
    size_t n_codes = 0;
    for (uint32_t i = 0; i < m->n_layers; i++) {
        imp_chunk_place map = imp_seg_chunk(p->l, IMP_REGION_MAP, i, 0);
        (void)imp_seg_layer_at(p->l, i, &n_layer);
        if (n_layer > n_bytes) n_bytes = n_layer;
        if (map.n_bytes > n_bytes) n_bytes = map.n_bytes;
        size_t n = imp_seg_row_bytes(p->l, IMP_REGION_K, i);
        if (n > n_codes) n_codes = n;
    }
    bool ordered = m->order != IMP_ORDER_TOKEN;
    p->out = imp_aligned(imp_io_alignment(io), n_bytes);
    p->sums = imp_malloc(imp_seg_sums_length(p->l) * sizeof *p->sums);
    p->codes = imp_malloc(n_codes * IMP_GROUP_TOKENS);
    if (ordered) {
        p->tokens = imp_realloc_array(NULL, m->n_tokens, sizeof *p->tokens);
        p->slots = imp_realloc_array(NULL, m->n_tokens, sizeof *p->slots);
        p->scratch = imp_realloc_array(NULL, m->n_tokens, sizeof *p->scratch);
    }
    if (p->out && p->sums && p->codes && (!ordered || (p->tokens && p->slots && p->scratch))) return 0;
    return imp_fail(IMP_E_NOMEM, "no memory to write %u tokens", m->n_tokens);
}

static void close_packer(packer *p)
{
    imp_job_ropes_free(&p->ropes);
    imp_cipher_free(p->cipher);
    imp_free(p->scratch);
    imp_free(p->slots);
    imp_free(p->tokens);
    imp_free(p->codes);
    imp_free(p->sums);
    imp_free(p->out);
}

int imp_pack_segment(imp_store *s, const imp_job *job, const imp_seg_layout *l, const imp_bases *bases)
{
    packer p = {.job = job, .l = l, .m = imp_seg_layout_meta(l), .bases = bases};
    char name[32];
    imp_io_writer *w = NULL;
    p.skip = (size_t)p.m->first_token - job->start;
    int rc = open_packer(&p, s->io);
    if (rc == 0 && p.m->sealed) rc = imp_cipher_new(s->key, &p.cipher);
    if (rc < 0) goto out;
    imp_seg_name(p.m->segment, name);
    rc = imp_io_writer_new(s->io, name, &w);
    for (uint32_t i = 0; rc == 0 && i < p.m->n_layers; i++) rc = write_layer(&p, w, i);
    if (rc < 0) goto out;
    imp_seg_header_encode(l, p.sums, p.out); /* last: a file without it is nothing */
    if (p.m->sealed) rc = imp_seg_header_seal(s->key, p.cipher, p.out, (size_t)imp_seg_header_bytes(l));
    if (rc == 0) rc = imp_io_write(w, 0, p.out, imp_seg_header_bytes(l));
    if (rc < 0) goto out;
    rc = imp_io_writer_publish(w);
    w = NULL;
out:
    if (w) imp_io_writer_abort(w);
    close_packer(&p);
    return rc;
}
