/* pass.c: one sequence over a load.
 *
 *     tokens    0 .................. P ............ n0 ......... n      n0: where the batch being decoded starts
 *               loaded, whole or k   computed, no   computed
 *               of them per layer    outputs
 *     positions       [P-k ...... P) [P .......................n)
 *
 * Keys are stored after RoPE, so a token's rows mean the same in any cell. k cells are taken just below the query
 * without computing anything; while the query's layers run, each layer's rows are written into the same cells.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "adapter.h"

enum {
    TRIES = 3,            /* passes over loads that fail before everything is computed */
    MIN_PARTIAL = 64,     /* a shorter one is loaded whole, where the request says nothing else */
    QUERY_ROWS = 32       /* that score, where the request says nothing else: as imp_load_opts */
};

typedef struct plan {
    size_t prefix;  /* P; 0: compute everything */
    bool partial;
    imp_load_opts opts;
} plan;

/* On a CPU llama.cpp computes attention in tiles for CPU_TILE queries and more. For fewer, one operation takes some
 * SLOWER times as long (measured: 12). */
enum { CPU_TILE = LC_TILE, SLOWER = 12 };

static bool has_tiles(const imp_llama *ctx)
{
    const lc_site *sites = ctx->sites;
    return ctx->host && ctx->n_ubatch >= CPU_TILE && sites[0].k->type == GGML_TYPE_F16 &&
           sites[0].v->type == GGML_TYPE_F16;
}

void lc_pass_measure(imp_llama *ctx)
{
    lc_ops ops = {.weights = 2 * (double)llama_model_n_params(ctx->model), .slower = has_tiles(ctx) ? SLOWER : 1};
    for (size_t l = 0; l < ctx->n_sites; l++) {
        const lc_site *site = &ctx->sites[l];
        ops.attention += 2.0 * site->n_heads * (site->shape.head_dim_k + site->shape.head_dim_v);
    }
    ctx->ops = ops;
}

/* So it may be quicker to compute more tokens; weights count either way. `share` of the prefix is loaded. */
static size_t widen(const imp_llama *ctx, size_t n, size_t prefix, double share)
{
    size_t n_query = n - prefix;
    bool tiles = ctx->widen_query && has_tiles(ctx);
    if (!tiles || n_query >= CPU_TILE || n < CPU_TILE + LC_MIN_PREFIX) return prefix;

    /* Operations for one token. */
    double weights = ctx->ops.weights, attention = ctx->ops.attention * (share * (double)prefix + (double)n_query);
    bool quicker = CPU_TILE * (weights + attention) < (double)n_query * (weights + SLOWER * attention);
    return quicker ? n - CPU_TILE : prefix;
}

size_t imp_llama_query_start(const imp_llama *ctx, size_t n_tokens, size_t n_stored)
{
    if (!ctx || n_tokens == 0) return 0;
    if (n_stored >= n_tokens) n_stored = n_tokens - 1;
    return ctx->space ? widen(ctx, n_tokens, n_stored, 1) : n_stored;
}

static plan plan_whole(const imp_llama *ctx, const lc_seq *s, bool exactly, size_t n_min_computed)
{
    plan p = {.prefix = s->n_leased, .opts = s->request.load};
    p.opts.switches.identify = IMP_IDENTIFY_NONE;
    p.opts.retention = 1;
    if (p.prefix > s->n - n_min_computed) p.prefix = s->n - n_min_computed;
    if (!exactly) p.prefix = widen(ctx, s->n, p.prefix, 1);
    if (p.prefix < LC_MIN_PREFIX) p.prefix = 0;
    return p;
}

static bool asks_part(const imp_load_opts *o)
{
    return o->switches.identify != IMP_IDENTIFY_NONE && (o->retention < 1 || o->mass > 0);
}

/* False: it can't be loaded in part, or needn't. */
static bool plan_part(const imp_llama *ctx, const lc_seq *s, plan *out)
{
    const imp_llama_request *r = &s->request;
    bool selects = ctx->fit == IMP_LLAMA_FIT_FULL && asks_part(&r->load);
    if (!selects || s->n <= ctx->min_query) return false;
    size_t most = s->n - ctx->min_query;
    *out = (plan){.prefix = s->n_leased < most ? s->n_leased : most, .partial = true, .opts = r->load};
    out->prefix = widen(ctx, s->n, out->prefix, r->load.retention);
    size_t k = (size_t)ceil(r->load.retention * (double)out->prefix);
    size_t least = r->min_partial ? r->min_partial : MIN_PARTIAL;
    return out->prefix >= least && (k < out->prefix || r->load.mass > 0);
}

/* How long a plan takes: reads go on while the model computes, the rest doesn't. Negative: it isn't known. */
static double expect(const imp_llama *ctx, const lc_seq *s, const plan *p)
{
    size_t n = s->n - p->prefix, batch = ctx->n_ubatch < ctx->n_batch ? ctx->n_ubatch : ctx->n_batch, k = p->prefix;
    imp_load_guess g = {0};
    if (p->prefix && imp_load_estimate(s->lease, &p->opts, &g) < 0) return -1;
    if (p->partial) k = g.n_tokens < p->prefix ? g.n_tokens : p->prefix;
    double compute = lc_speed_expect(&ctx->speed, &ctx->ops, n, k + 1, batch);
    if (compute < 0 || !p->prefix) return compute;
    double passes = p->partial ? (double)((n + batch - 1) / batch) : 1; /* each selects for itself */
    double layers = (double)ctx->n_sites, read = passes * (double)g.read_ns;
    double other = ctx->place_ns * (double)k + passes * layers * ctx->gather_ns[p->partial] * (double)k;
    if (p->partial) other += passes * layers * ctx->identify_ns * (double)p->prefix;
    return (compute > read ? compute : read) + other;
}

/* The quickest of what can be done. False: nothing is known of the times. */
static bool adapt(const imp_llama *ctx, lc_seq *s, const plan *whole, const plan *part, plan *out)
{
    const plan computed = {.prefix = 0, .opts = whole->opts};
    double none = expect(ctx, s, &computed), all = expect(ctx, s, whole), some = part ? expect(ctx, s, part) : HUGE_VAL;
    if (none < 0 || all < 0 || some < 0) return false;
    imp_llama_report *r = &s->report;
    const lc_times t = {none, whole->prefix ? all : HUGE_VAL, some};
    lc_choice choice = lc_choose(&t);
    *out = choice == LC_COMPUTE ? computed : choice == LC_WHOLE ? *whole : *part;
    r->expected_ns[IMP_LLAMA_WAY_COMPUTED] = (uint64_t)none;
    r->expected_ns[IMP_LLAMA_WAY_WHOLE] = whole->prefix ? (uint64_t)all : 0;
    r->expected_ns[IMP_LLAMA_WAY_PARTIAL] = part ? (uint64_t)some : 0;
    bool hardly = choice == LC_WHOLE && some < all;
    r->reason = hardly ? IMP_LLAMA_REASON_FREE : IMP_LLAMA_REASON_QUICKER;
    return true;
}

/* `exactly`: all of it, as it is stored, outside of a request. */
static plan make_plan(const imp_llama *ctx, lc_seq *s, bool exactly, size_t n_min_computed)
{
    const imp_llama_request *r = &s->request;
    bool asked = asks_part(&r->load);
    plan part, out, whole = plan_whole(ctx, s, exactly, n_min_computed);
    bool can_part = !exactly && plan_part(ctx, s, &part);
    if (exactly) return whole;
    bool failed = s->report.retries > 0;
    s->report.reason = failed ? IMP_LLAMA_REASON_FAILED : IMP_LLAMA_REASON_ASKED;
    if (can_part ? part.prefix == 0 : whole.prefix == 0) {
        if (!failed) s->report.reason = IMP_LLAMA_REASON_NOTHING;
        return whole;
    }
    if (asked && !can_part && !failed) s->report.reason = IMP_LLAMA_REASON_CANNOT;
    if (r->adaptive && !failed && s->lease) {
        if (adapt(ctx, s, &whole, can_part ? &part : NULL, &out)) return out;
        s->report.reason = IMP_LLAMA_REASON_UNKNOWN;
    }
    return can_part ? part : whole;
}

/* ---- filling */

int lc_pass_query(imp_llama *ctx, const struct ggml_tensor *attention, size_t most, imp_query *out)
{
    const struct ggml_tensor *q = attention->src[0];
    struct ggml_tensor *root = lc_root(attention->src[0]);
    size_t n = (size_t)q->ne[1], rows = n < most ? n : most;
    size_t at = q->view_offs + (n - rows) * q->nb[1];
    float params[3]; /* scale, ALiBi's bias, soft cap */
    memcpy(params, attention->op_params, sizeof params);

    *out = (imp_query){
        .row_stride = q->nb[1] / sizeof(float), .head_stride = q->nb[2] / sizeof(float),
        .n_rows = rows, .n_heads = (uint32_t)q->ne[2], .scale = params[0], .softcap = params[2],
    };
    if (ggml_backend_buffer_is_host(root->buffer)) {
        out->q = (const float *)((const char *)root->data + at);
        return 0;
    }
    size_t bytes = (rows - 1) * q->nb[1] + (size_t)(q->ne[2] - 1) * q->nb[2] + (size_t)q->ne[0] * sizeof(float);
    float *copy = lc_buffer_need(&ctx->stage_q, bytes);
    if (!copy) return lc_error(IMP_E_NOMEM, "no memory for %zu rows of queries", rows);
    ggml_backend_tensor_get(root, copy, at, bytes);
    out->q = copy;
    return 0;
}

static int fill_layer(imp_llama *ctx, void *user, size_t layer, const struct ggml_tensor *attention)
{
    lc_seq *s = user;
    imp_query query;
    size_t most = s->request.load.max_query_rows ? s->request.load.max_query_rows : QUERY_ROWS;
    int rc = layer == 0 && s->load_used ? imp_load_rewind(s->load) : 0;
    s->load_used = true;
    if (!rc && s->partial) rc = lc_pass_query(ctx, attention, most, &query);
    if (!rc) rc = imp_load_select(s->load, (uint32_t)layer, s->partial ? &query : NULL, NULL);
    if (!rc) rc = lc_cells_gather(ctx, s->load, layer, s->placed, s->n_placed);
    return rc;
}

/* Load the whole prefix outside of a pass. */
static int fill_now(imp_llama *ctx, lc_seq *s)
{
    int rc = 0;
    for (size_t l = 0; l < ctx->n_sites && !rc; l++) {
        rc = imp_load_select(s->load, (uint32_t)l, NULL, NULL);
        if (!rc) rc = lc_cells_gather(ctx, s->load, l, s->placed, s->n_placed);
    }
    return rc;
}

static void average(double *old, double x)
{
    const double newest = 0.3;
    *old = *old > 0 ? *old + newest * (x - *old) : x;
}

/* What a load took of the time that isn't hidden. `passes` over all layers went well. */
static void learn(imp_llama *ctx, const lc_seq *s, const imp_load_stats *st)
{
    double layers = (double)ctx->n_sites, rows = layers * (double)s->n_placed;
    double passes = st->n_selected ? (double)st->n_selected / layers : 1;
    if (passes < 1 || s->n_placed == 0 || s->n_loaded == 0) return; /* it was broken off */
    average(&ctx->gather_ns[s->partial], (double)st->gather_ns / passes / rows);
    if (s->partial) average(&ctx->identify_ns, (double)st->identify_ns / passes / (layers * (double)s->n_loaded));
}

static void end_load(imp_llama *ctx, lc_seq *s)
{
    if (s->load) {
        imp_load_stats st;
        imp_llama_report *r = &s->report;
        imp_load_end(s->load, &st);
        s->load = NULL;
        learn(ctx, s, &st);
        r->identify_ns += st.identify_ns;
        r->io_wait_ns += st.io_wait_ns;
        r->gather_ns += st.gather_ns;
        r->bytes_read += st.bytes_read;
        r->identify_bytes += st.identify_bytes;
        r->host_hit_bytes += st.host_hit_bytes;
        r->device_hit_bytes += st.device_hit_bytes;
        r->n_selected += st.n_selected;
        r->n_fallback += st.n_fallback;
        r->mass = st.mass;
    }
    lc_seq_release(s);
}

/* ---- decoding */

void lc_pass_note(imp_llama *ctx, size_t n, size_t cells, bool guess)
{
    enum { LEAST = 8 }; /* tokens: less is an answer's, which reads all weights for one */
    const lc_hook *h = &ctx->hook;
    size_t most = ctx->n_ubatch;
    double ns = h->pass_ns > h->fill_ns ? (double)(h->pass_ns - h->fill_ns) : 0;
    if (n < LEAST || most == 0) return;
    if (n <= most) {
        lc_speed_note(&ctx->speed, &ctx->ops, n, cells, ns, guess);
        return;
    }
    double all = 0; /* several ubatches: each has its part, by its operations */
    for (size_t done = 0; done < n; done += most)
        all += lc_ops_of(&ctx->ops, n - done < most ? n - done : most, cells + done);
    for (size_t done = 0; done + most <= n; done += most)
        lc_speed_note(&ctx->speed, &ctx->ops, most, cells + done,
                      ns * lc_ops_of(&ctx->ops, most, cells + done) / all, guess);
}

void lc_pass_put(struct llama_batch *b, llama_token token, llama_pos pos, llama_seq_id id, bool output)
{
    int32_t i = b->n_tokens++;
    b->token[i] = token;
    b->pos[i] = pos;
    b->n_seq_id[i] = 1;
    b->seq_id[i][0] = id;
    b->logits[i] = output;
}

/* Give llama.cpp the chance to run a graph of its own (moving shifted keys) before a pass that computes nothing. */
static int32_t settle(imp_llama *ctx, llama_seq_id id)
{
    if (!ctx->shift_pending) return 0;
    ctx->work.n_tokens = 0;
    lc_pass_put(&ctx->work, 0, 0, id, false);
    int32_t rc = lc_hook_decode(ctx, ctx->work, LC_HOOK_WATCH, NULL);
    llama_memory_seq_rm(ctx->memory, id, -1, -1);
    return rc;
}

int32_t lc_pass_place(imp_llama *ctx, llama_seq_id id, llama_pos end, size_t k, uint32_t *cells)
{
    size_t most = ctx->n_ubatch < ctx->n_batch ? ctx->n_ubatch : ctx->n_batch;
    int32_t rc = settle(ctx, id);
    uint64_t start = lc_now_ns();
    for (size_t i = 0; i < k && rc == 0;) {
        size_t n = k - i < most ? k - i : most;
        int error;
        ctx->work.n_tokens = 0;
        for (size_t j = 0; j < n; j++) lc_pass_put(&ctx->work, 0, end - (llama_pos)(k - i - j), id, false);
        rc = lc_hook_decode(ctx, ctx->work, LC_HOOK_PLACE, &error);
        if (rc == 0 && error) rc = -3;
        if (rc == 0) memcpy(cells + i, ctx->hook.cells, n * sizeof *cells);
        i += n;
    }
    if (rc == 0 && k > 0) average(&ctx->place_ns, (double)(lc_now_ns() - start) / (double)k);
    if (rc != 0) llama_memory_seq_rm(ctx->memory, id, -1, -1);
    return rc;
}

/* Compute tokens [from, s->n). The outputs are those of the last n_batch tokens. */
static int32_t decode_span(imp_llama *ctx, llama_seq_id id, size_t from, size_t n_batch, const int32_t *outputs,
                           lc_hook_mode mode, int *error)
{
    lc_seq *s = &ctx->seqs[id];
    size_t n0 = s->n - n_batch;
    lc_hook *h = &ctx->hook;
    h->fill = fill_layer;
    h->fill_user = s;
    h->fill_once = !s->partial;
    h->placed = s->placed;
    h->n_placed = s->n_placed;
    *error = 0;

    for (size_t first = from; first < s->n;) {
        size_t n = s->n - first < ctx->n_batch ? s->n - first : ctx->n_batch;
        ctx->work.n_tokens = 0;
        for (size_t i = first; i < first + n; i++) {
            lc_pass_put(&ctx->work, s->tokens[i], (llama_pos)i, id, i >= n0 && outputs && outputs[i - n0] >= 0);
        }
        h->n_visible = mode == LC_HOOK_FILL ? s->n_placed + (first - s->n_loaded) + 1 : 0;
        lc_queries_begin(ctx, &ctx->work, s, first);
        int32_t rc = lc_hook_decode(ctx, ctx->work, mode, error);
        lc_queries_end(ctx, rc == 0 && !*error);
        if (rc != 0 || (*error && mode != LC_HOOK_WATCH)) return rc;
        lc_pass_note(ctx, n, (mode == LC_HOOK_FILL ? s->n_placed + (first - s->n_loaded) : first) + 1, false);
        if (!*error) lc_seq_set_cells(s, first, h->cells, n);
        *error = 0; /* one that was only watched is good; what isn't known of its cells isn't stored */
        if (s->exact == first) s->exact = first + n;
        for (size_t i = first; i < first + n; i++) {
            if (!ctx->work.logits[i - first]) continue;
            const float *logits = llama_get_logits_ith(ctx->lctx, (int32_t)(i - first));
            if (!logits) return -3;
            memcpy(ctx->out + (size_t)outputs[i - n0] * ctx->n_vocab, logits, ctx->n_vocab * sizeof *logits);
        }
        if (!s->partial) mode = LC_HOOK_WATCH;
        first += n;
    }
    return 0;
}

/* From an empty sequence on, by the plan. On failure some cells may be held. */
static int32_t try_once(imp_llama *ctx, llama_seq_id id, const plan *p, bool now, size_t n_batch,
                        const int32_t *outputs, int *error)
{
    lc_seq *s = &ctx->seqs[id];
    size_t matched = s->n_leased;
    imp_llama_report *r = &s->report;
    *error = 0;
    r->way = !p->prefix ? IMP_LLAMA_WAY_COMPUTED : p->partial ? IMP_LLAMA_WAY_PARTIAL : IMP_LLAMA_WAY_WHOLE;
    r->matched_tokens = p->prefix;
    r->derived_tokens = s->lease && s->info.n_exact < p->prefix ? p->prefix - s->info.n_exact : 0;
    r->loaded_tokens = 0;
    r->query_tokens = s->n - p->prefix;
    r->bytes_full = p->prefix && s->lease ? s->info.bytes_full : 0;
    r->mass = 1;

    s->state = LC_SEQ_REAL;
    s->saved = matched;
    s->partial = p->partial;
    s->n_loaded = s->sound = p->prefix;
    s->n_placed = 0;
    s->exact = p->partial || s->info.rounded ? 0 : s->info.n_exact < p->prefix ? s->info.n_exact : p->prefix;
    if (!p->prefix) {
        lc_seq_release(s);
        s->exact = 0;
        return decode_span(ctx, id, 0, n_batch, outputs, LC_HOOK_WATCH, error);
    }

    if (p->prefix < matched) *error = imp_lease_trim(s->lease, p->prefix);
    if (!*error) *error = imp_load_begin(s->lease, &p->opts, &s->load);
    if (*error) return 0;
    s->load_used = false;
    size_t k = imp_load_count(s->load);
    uint32_t *placed = realloc(s->placed, k * sizeof *placed);
    if (!placed) {
        *error = lc_error(IMP_E_NOMEM, "no memory for %zu cells", k);
        return 0;
    }
    s->placed = placed;
    s->n_placed = k;
    r->loaded_tokens = k;

    int32_t rc = lc_pass_place(ctx, id, (llama_pos)p->prefix, k, s->placed);
    if (rc == -3) *error = LC_E_GRAPH; /* it can still be computed */
    if (rc != 0) return *error ? 0 : rc;
    if (!p->partial) memcpy(s->cells, s->placed, k * sizeof *placed);
    if (now) *error = fill_now(ctx, s);
    if (!*error) rc = decode_span(ctx, id, p->prefix, n_batch, outputs, now ? LC_HOOK_WATCH : LC_HOOK_FILL, error);
    return rc;
}

void lc_pass_drop(imp_llama *ctx, llama_seq_id id)
{
    lc_seq *s = &ctx->seqs[id];
    end_load(ctx, s);
    llama_memory_seq_rm(ctx->memory, id, -1, -1);
    lc_seq_note(s);
}

/* A pass over a load failed: what now? Returns how many tries that used up. */
static int judge(imp_llama *ctx, lc_seq *s, int error)
{
    s->report.retries++;
    lc_say(IMP_LOG_WARN, "a load failed and is done again with less or without: %s", imp_last_error());
    if (error == LC_E_GRAPH) { /* the graph isn't what the self-check saw */
        lc_say(IMP_LOG_ERROR, "the store is no longer used by this context: %s", imp_last_error());
        snprintf(ctx->why, sizeof ctx->why, "%s", imp_last_error());
        ctx->fit = IMP_LLAMA_FIT_NONE;
    }
    return error == IMP_E_IO || error == IMP_E_CORRUPT || error == IMP_E_STALE ? 1 : TRIES;
}

static int32_t run(imp_llama *ctx, llama_seq_id id, size_t limit, bool whole, size_t n_batch, const int32_t *outputs,
                   int tries)
{
    lc_seq *s = &ctx->seqs[id];
    for (;;) {
        if (tries > 0 && tries < TRIES) lc_seq_match(ctx, s, limit);
        if (tries >= TRIES) lc_seq_release(s);
        plan p = make_plan(ctx, s, whole, whole ? 0 : 1);
        int error;
        int32_t rc = try_once(ctx, id, &p, whole, n_batch, outputs, &error);
        if (rc == 0 && !error) return 0;
        bool computed = p.prefix == 0;
        lc_pass_drop(ctx, id);
        if (rc != 0) return rc;
        if (computed) return -3;
        tries += judge(ctx, s, error);
    }
}

int32_t lc_pass_run(imp_llama *ctx, llama_seq_id id, size_t n_batch, const int32_t *outputs)
{
    lc_seq *s = &ctx->seqs[id];
    size_t n0 = s->n - n_batch, first_output = 0;
    while (first_output < n_batch && outputs[first_output] < 0) first_output++;
    int tries = 0;
    int32_t rc = 0;

    if (s->load) {
        int error;
        s->report.query_tokens += n_batch;
        rc = decode_span(ctx, id, n0, n_batch, outputs, LC_HOOK_FILL, &error);
        if (rc == 0 && error) {
            lc_pass_drop(ctx, id);
            tries = judge(ctx, s, error);
        }
    } else if (first_output == n_batch && s->n_leased == s->n) {
        return 0; /* still nothing that has to be computed */
    }
    if (s->state == LC_SEQ_NOTED) rc = run(ctx, id, n0 + first_output, false, n_batch, outputs, tries);
    if (rc == 0 && (first_output < n_batch || !s->partial)) end_load(ctx, s);
    return rc;
}

int32_t lc_pass_whole(imp_llama *ctx, llama_seq_id id)
{
    lc_seq *s = &ctx->seqs[id];
    if (s->state == LC_SEQ_REAL && s->partial) lc_pass_drop(ctx, id);
    if (s->state != LC_SEQ_NOTED || s->n == 0) return 0;

    bool use_derived = s->request.use_derived;
    s->request.use_derived = false;
    lc_seq_match(ctx, s, s->n);
    int32_t rc = run(ctx, id, s->n, true, 0, NULL, 0);
    s->request.use_derived = use_derived;
    end_load(ctx, s);
    return rc;
}
