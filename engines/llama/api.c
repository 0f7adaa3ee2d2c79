/* api.c: the calls that aren't decode: opening and closing, and the mirrors of llama_memory_*() and llama_state_*(). */
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "adapter.h"

/* ---- small things */

uint64_t lc_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void lc_say(imp_log_level level, const char *fmt, ...)
{
    char line[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    imp_log_line(level, line);
}

int lc_error(int status, const char *fmt, ...)
{
    char line[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    return imp_set_error(status, line);
}

/* ---- opening and closing */

static int copy_params(imp_llama *ctx, const imp_llama_params *params)
{
    ctx->store = params->store;
    ctx->min_query = params->min_query_tokens ? params->min_query_tokens : 16;
    ctx->widen_query = params->widen_query;
    ctx->salt = strdup(params->salt ? params->salt : "");
    ctx->n_files = params->n_model_files;
    ctx->file_ids = calloc(params->n_model_files, sizeof *ctx->file_ids);
    if (!ctx->salt || !ctx->file_ids) return lc_error(IMP_E_NOMEM, "no memory for a context");
    return 0;
}

static int open_sequences(imp_llama *ctx, const imp_llama_request *request)
{
    ctx->seqs = calloc(ctx->n_seq_max, sizeof *ctx->seqs);
    ctx->work = llama_batch_init((int32_t)ctx->n_batch, 0, 1);
    ctx->order = calloc(ctx->n_batch, sizeof *ctx->order);
    ctx->rows = calloc(ctx->n_batch, sizeof *ctx->rows);
    ctx->take = calloc(ctx->n_batch, sizeof *ctx->take);
    ctx->out_row = calloc(ctx->n_batch, sizeof *ctx->out_row);
    ctx->candidates = calloc(ctx->n_vocab, sizeof *ctx->candidates);
    bool batch = ctx->work.token && ctx->order && ctx->rows && ctx->take && ctx->out_row;
    if (!ctx->seqs || !batch || !ctx->candidates) {
        return lc_error(IMP_E_NOMEM, "no memory for a context");
    }
    for (uint32_t i = 0; i < ctx->n_seq_max; i++) ctx->seqs[i].request = *request;
    return 0;
}

static int open_context(imp_llama *ctx, struct llama_model *model, struct llama_context_params cp)
{
    if (ctx->lctx) llama_free(ctx->lctx);
    ctx->lctx = llama_init_from_model(model, cp);
    if (!ctx->lctx) {
        return lc_error(IMP_E_UNSUPPORTED, "llama.cpp can't make a context of %u tokens for this model", cp.n_ctx);
    }
    ctx->memory = llama_get_memory(ctx->lctx);
    ctx->n_batch = llama_n_batch(ctx->lctx);
    ctx->n_ubatch = llama_n_ubatch(ctx->lctx);
    ctx->n_seq_max = llama_n_seq_max(ctx->lctx);
    ctx->has_streams = !cp.kv_unified && ctx->n_seq_max > 1 && !llama_model_is_recurrent(model);
    return 0;
}

static int open_with_store(imp_llama *ctx, struct llama_model *model, struct llama_context_params cp,
                           const imp_llama_params *params)
{
    struct llama_context_params hooked = cp;
    hooked.cb_eval = lc_hook_eval;
    hooked.cb_eval_user_data = ctx;
    if (cp.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_AUTO) hooked.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;

    int rc = copy_params(ctx, params);
    if (!rc) rc = open_context(ctx, model, hooked);
    if (rc == IMP_E_UNSUPPORTED) { /* perhaps without flash attention */
        hooked.flash_attn_type = cp.flash_attn_type;
        rc = open_context(ctx, model, hooked);
    }
    if (!rc) rc = open_sequences(ctx, &params->request);
    if (rc < 0) return rc;

    lc_probe_run(ctx, &hooked);
    if (ctx->fit == IMP_LLAMA_FIT_NONE) {
        lc_say(IMP_LOG_WARN, "this model runs without the store: %s", ctx->why);
        return open_context(ctx, model, cp);
    }
    if (ctx->fit == IMP_LLAMA_FIT_WHOLE) lc_say(IMP_LOG_WARN, "prefixes are loaded whole, never in part: %s", ctx->why);
    for (size_t i = 0; i < ctx->n_files && !rc; i++)
        rc = imp_store_fingerprint(ctx->store, params->model_files[i], &ctx->file_ids[i]);
    return rc < 0 ? rc : lc_space_describe(ctx, ctx->salt, &ctx->space);
}

int imp_llama_init(struct llama_model *model, struct llama_context_params cp, const imp_llama_params *params,
                   imp_llama **out)
{
    if (out) *out = NULL;
    if (!model || !params || !out) return lc_error(IMP_E_ARG, "imp_llama_init: no model, params or out");
    imp_llama_params own;
    int rc = lc_params_take(params, &own);
    if (rc < 0) return rc;
    params = &own;
    if (cp.cb_eval) return lc_error(IMP_E_ARG, "imp_llama_init: cb_eval is in use");
    if (params->store && (!params->model_files || params->n_model_files == 0)) {
        return lc_error(IMP_E_ARG, "imp_llama_init: no model_files, whose bytes name the space");
    }

    imp_llama *ctx = calloc(1, sizeof *ctx);
    if (!ctx) return lc_error(IMP_E_NOMEM, "no memory for a context");
    ctx->model = model;
    ctx->n_vocab = (uint32_t)llama_vocab_n_tokens(llama_model_get_vocab(model));
    ctx->out_own = true;
    snprintf(ctx->why, sizeof ctx->why, "no store");
    rc = params->store ? open_with_store(ctx, model, cp, params) : open_context(ctx, model, cp);
    if (rc < 0) {
        imp_llama_free(ctx);
        return rc;
    }
    *out = ctx;
    return 0;
}

void imp_llama_free(imp_llama *ctx)
{
    if (!ctx) return;
    for (uint32_t i = 0; ctx->seqs && i < ctx->n_seq_max; i++) {
        if (ctx->space) lc_save_seq(ctx, &ctx->seqs[i]);
        lc_seq_free(&ctx->seqs[i]);
    }
    free(ctx->seqs);
    imp_space_close(ctx->space);
    if (ctx->lctx) llama_free(ctx->lctx);
    if (ctx->work.token) llama_batch_free(ctx->work);
    free(ctx->file_ids);
    free(ctx->salt);
    free(ctx->adapters);
    for (size_t l = 0; l < ctx->n_sites; l++) free(ctx->sites[l].factors);
    free(ctx->sites);
    free(ctx->hook.cells);
    free(ctx->hook.muted);
    free(ctx->probe.graph);
    lc_buffer_free(&ctx->stage_k);
    lc_buffer_free(&ctx->stage_v);
    lc_buffer_free(&ctx->stage_q);
    lc_buffer_free(&ctx->stage_mask);
    free(ctx->order);
    free(ctx->rows);
    free(ctx->take);
    free(ctx->out);
    free(ctx->out_row);
    free(ctx->candidates);
    free(ctx);
}

struct llama_context *imp_llama_context(imp_llama *ctx) { return ctx->lctx; }

imp_llama_fit imp_llama_get_fit(const imp_llama *ctx, const char **why)
{
    if (why) *why = ctx->why;
    return ctx->fit;
}

/* KV heads that the first `n` query heads use, the least over the layers; of how many there are. */
static uint32_t kv_heads_of(const imp_llama *ctx, uint32_t n, uint32_t *of)
{
    uint32_t least = UINT32_MAX;
    *of = 0;
    for (size_t l = 0; l < ctx->n_sites; l++) {
        const lc_site *s = &ctx->sites[l];
        uint32_t group = s->n_heads / s->shape.n_kv_heads, used = (n + group - 1) / group;
        if (used > s->shape.n_kv_heads) used = s->shape.n_kv_heads;
        if (used < least) least = used, *of = s->shape.n_kv_heads;
    }
    return least;
}

const char *imp_llama_note(imp_llama *ctx, const imp_llama_request *request)
{
    enum { PAPER_PROBE_HEADS = 3 };
    imp_llama_request r;
    if (lc_request_take(request, &r) < 0) return "";
    const imp_load_opts *o = &r.load;
    bool asks_part = o->switches.identify != IMP_IDENTIFY_NONE && (o->retention < 1 || o->mass > 0);
    if (!ctx->space || r.recompute || !asks_part) return "";
    if (ctx->fit != IMP_LLAMA_FIT_FULL) {
        snprintf(ctx->note, sizeof ctx->note, "prefixes are loaded whole: %s", ctx->why);
        return ctx->note;
    }
    if (o->switches.identify == IMP_IDENTIFY_SKETCH && ctx->probe.no_ropes) {
        snprintf(ctx->note, sizeof ctx->note, "all keys are read instead of sketches: %s", ctx->probe.no_ropes);
        return ctx->note;
    }
    if (o->switches.identify != IMP_IDENTIFY_PROBE) return "";
    uint32_t n_kv, n = o->n_probe_heads ? o->n_probe_heads : PAPER_PROBE_HEADS;
    uint32_t used = kv_heads_of(ctx, n, &n_kv);
    if (n > ctx->sites[0].n_heads) {
        snprintf(ctx->note, sizeof ctx->note, "all %u heads are probe heads, not %u", ctx->sites[0].n_heads, n);
    } else if (o->probe_spread && n > n_kv) {
        snprintf(ctx->note, sizeof ctx->note, "%u probe heads share the keys of all %u KV heads", n, n_kv);
    } else if (!o->probe_spread && used == n_kv) {
        snprintf(ctx->note, sizeof ctx->note, "the probe heads' keys are all keys: they use all %u KV heads", n_kv);
    } else {
        return "";
    }
    return ctx->note;
}

static bool is_seq(const imp_llama *ctx, llama_seq_id seq) { return seq >= 0 && (uint32_t)seq < ctx->n_seq_max; }

int imp_llama_set_request(imp_llama *ctx, llama_seq_id seq, const imp_llama_request *request)
{
    if (!is_seq(ctx, seq)) return lc_error(IMP_E_ARG, "no sequence %d", seq);
    imp_llama_request r;
    int rc = lc_request_take(request, &r);
    if (!rc && ctx->space) ctx->seqs[seq].request = r;
    return rc;
}

const char *imp_llama_reason_name(int reason)
{
    static const char *const names[] = {"asked", "nothing stored", "can't be in part", "a load failed", "no times yet",
                                        "quicker", "whole costs no more"};
    return reason >= 0 && (size_t)reason < sizeof names / sizeof *names ? names[reason] : "?";
}

int imp_llama_get_report(imp_llama *ctx, llama_seq_id seq, imp_llama_report *out)
{
    *out = (imp_llama_report){0};
    if (!is_seq(ctx, seq)) return lc_error(IMP_E_ARG, "no sequence %d", seq);
    if (ctx->space) *out = ctx->seqs[seq].report;
    return 0;
}

int imp_llama_flush(imp_llama *ctx)
{
    int first = 0;
    for (uint32_t i = 0; ctx->space && i < ctx->n_seq_max; i++) {
        int rc = lc_save_seq(ctx, &ctx->seqs[i]);
        if (rc < 0 && !first) first = rc;
    }
    return first;
}

int imp_llama_flush_seq(imp_llama *ctx, llama_seq_id seq)
{
    if (!is_seq(ctx, seq)) return lc_error(IMP_E_ARG, "no sequence %d", seq);
    return ctx->space ? lc_save_seq(ctx, &ctx->seqs[seq]) : 0;
}

/* ---- memory */

/* From now on its cells are llama.cpp's alone. */
static void estrange(lc_seq *s)
{
    lc_seq_reset(s);
    s->state = LC_SEQ_ALIEN;
}

/* Bring a sequence into cells whole, and save it, before something is done to its cells. */
static bool settle_seq(imp_llama *ctx, llama_seq_id seq)
{
    lc_save_seq(ctx, &ctx->seqs[seq]);
    int32_t rc = lc_pass_whole(ctx, seq);
    if (rc != 0) lc_say(IMP_LOG_ERROR, "sequence %d can't be brought into cells (llama_decode: %d)", seq, rc);
    return rc == 0;
}

static bool rm_one(imp_llama *ctx, llama_seq_id seq, llama_pos p0, llama_pos p1)
{
    lc_seq *s = &ctx->seqs[seq];
    if (p0 < 0) p0 = 0;
    if (p1 < 0) p1 = INT_MAX;
    if (s->state == LC_SEQ_ALIEN) {
        bool ok = llama_memory_seq_rm(ctx->memory, seq, p0, p1);
        if (llama_memory_seq_pos_max(ctx->memory, seq) < 0) lc_seq_reset(s);
        return ok;
    }
    if (s->n == 0) s->in_prompt = s->answered = false;
    if (p0 >= p1 || (size_t)p0 >= s->n) return true;
    if ((size_t)p1 >= s->n) {
        lc_save_seq(ctx, s);
        lc_seq_truncate(ctx, seq, (size_t)p0);
        if (p0 == 0) lc_seq_reset(s);
        s->in_prompt = s->answered = false;
        return true;
    }
    if (!settle_seq(ctx, seq)) return false;
    bool ok = llama_memory_seq_rm(ctx->memory, seq, p0, p1);
    if (ok) estrange(s);
    return ok;
}

bool imp_llama_seq_rm(imp_llama *ctx, llama_seq_id seq, llama_pos p0, llama_pos p1)
{
    if (!ctx->space) return llama_memory_seq_rm(ctx->memory, seq, p0, p1);
    if (seq >= 0) return is_seq(ctx, seq) && rm_one(ctx, seq, p0, p1);
    bool ok = true;
    for (uint32_t i = 0; i < ctx->n_seq_max; i++) ok = rm_one(ctx, (llama_seq_id)i, p0, p1) && ok;
    return ok;
}

/* `d`, whose tokens and cells are there, becomes what the first `n` tokens of `s` are. */
static void take_after(lc_seq *d, const lc_seq *s, size_t n)
{
    d->state = s->state;
    d->partial = s->partial;
    d->n_loaded = s->n_loaded < n ? s->n_loaded : n;
    d->exact = s->exact < n ? s->exact : n;
    d->sound = s->sound < n ? s->sound : n;
    d->saved = n; /* what isn't yet is the source's to save */
    d->answered = s->answered;
}

/* The same tokens, in the same cells or in those of another stream. */
static int copy_seq(imp_llama *ctx, llama_seq_id src, llama_seq_id dst, size_t n)
{
    const lc_seq *s = &ctx->seqs[src];
    lc_seq *d = &ctx->seqs[dst];
    int64_t shift = ctx->has_streams ? ((int64_t)dst - src) * (int64_t)ctx->stream_cells : 0;
    uint32_t *placed = NULL;
    if (s->n_placed && s->partial) placed = malloc(s->n_placed * sizeof *placed);
    if ((s->n_placed && s->partial && !placed) || lc_seq_append(d, s->tokens, n) < 0) {
        free(placed);
        return lc_error(IMP_E_NOMEM, "no memory to copy a sequence");
    }
    for (size_t i = 0; i < n; i++) {
        d->cells[i] = s->cells[i] == LC_NO_CELL ? LC_NO_CELL : (uint32_t)(s->cells[i] + shift);
    }
    for (size_t i = 0; placed && i < s->n_placed; i++) placed[i] = (uint32_t)(s->placed[i] + shift);
    free(d->placed);
    d->placed = placed;
    d->n_placed = placed ? s->n_placed : 0;
    take_after(d, s, n);
    return 0;
}

/* The rows of the first `n` tokens of a sequence whose cells are known, into cells of an empty one with a stream of its
 * own. Returns 0, or as llama_decode() with nothing in these cells. */
static int32_t copy_rows(imp_llama *ctx, llama_seq_id src, llama_seq_id dst, size_t n)
{
    const lc_seq *s = &ctx->seqs[src];
    lc_seq *d = &ctx->seqs[dst];
    size_t k_bytes = 0, v_bytes = 0;
    for (size_t l = 0; l < ctx->n_sites; l++) {
        if (ctx->sites[l].k->nb[1] > k_bytes) k_bytes = ctx->sites[l].k->nb[1];
        if (ctx->sites[l].v->nb[1] > v_bytes) v_bytes = ctx->sites[l].v->nb[1];
    }
    void *k = lc_buffer_need(&ctx->stage_k, n * k_bytes), *v = lc_buffer_need(&ctx->stage_v, n * v_bytes);
    if (!k || !v || lc_seq_append(d, s->tokens, n) < 0) return -2;
    int32_t rc = lc_pass_place(ctx, dst, (llama_pos)n, n, d->cells);
    if (rc != 0) return rc;
    llama_synchronize(ctx->lctx);
    for (size_t l = 0; l < ctx->n_sites; l++) {
        lc_cells_read(ctx, l, s->cells, n, k, v);
        lc_cells_write(ctx, l, d->cells, n, k, v);
    }
    take_after(d, s, n);
    return 0;
}

/* llama.cpp copies another stream's cells all or none (it ends the program otherwise): what is too much is given back,
 * or all where that can't be. */
static bool copy_cells(imp_llama *ctx, llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1)
{
    if (!ctx->has_streams) {
        llama_memory_seq_cp(ctx->memory, src, dst, p0, p1);
        return true;
    }
    llama_memory_seq_cp(ctx->memory, src, dst, -1, -1);
    bool ok = p0 <= 0 || llama_memory_seq_rm(ctx->memory, dst, 0, p0);
    ok = ok && (p1 < 0 || llama_memory_seq_rm(ctx->memory, dst, p1, -1));
    if (!ok) llama_memory_seq_rm(ctx->memory, dst, -1, -1);
    return ok;
}

void imp_llama_seq_cp(imp_llama *ctx, llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1)
{
    if (!is_seq(ctx, src) || !is_seq(ctx, dst) || src == dst) return;
    if (!ctx->space) {
        copy_cells(ctx, src, dst, p0, p1);
        return;
    }
    lc_seq *s = &ctx->seqs[src], *d = &ctx->seqs[dst];
    lc_save_seq(ctx, s);
    lc_save_seq(ctx, d);
    if (ctx->has_streams) { /* a copy replaces what the other stream held */
        llama_memory_seq_rm(ctx->memory, dst, -1, -1);
        lc_seq_reset(d);
    }
    bool from_start = p0 <= 0, empty = d->state == LC_SEQ_NOTED && d->n == 0;
    size_t n = p1 < 0 || (size_t)p1 > s->n ? s->n : (size_t)p1;
    bool plain = s->state == LC_SEQ_ALIEN || !from_start || !empty;
    if (plain) {
        if (s->state != LC_SEQ_ALIEN && !settle_seq(ctx, src)) return;
        if (!empty && d->state != LC_SEQ_ALIEN && !settle_seq(ctx, dst)) return;
        copy_cells(ctx, src, dst, p0, p1);
        if (llama_memory_seq_pos_max(ctx->memory, dst) >= 0) estrange(d);
        return;
    }
    if (n == 0) return;
    if (s->state == LC_SEQ_NOTED || (s->partial && n < s->n_loaded)) {
        if (lc_seq_append(d, s->tokens, n) < 0) lc_say(IMP_LOG_ERROR, "no memory to copy a sequence");
        return;
    }
    if (ctx->has_streams && ctx->fit != IMP_LLAMA_FIT_NONE && !s->partial && s->sound >= n) {
        int32_t rc = copy_rows(ctx, src, dst, n);
        if (rc == 0) return;
        lc_say(IMP_LOG_WARN, "a sequence of %zu tokens can't be copied (llama_decode: %d)", n, rc);
        lc_seq_reset(d);
    } else if (!copy_cells(ctx, src, dst, p0, p1)) {
        lc_seq_reset(d);
    } else if (copy_seq(ctx, src, dst, n) < 0) {
        lc_say(IMP_LOG_WARN, "%s", imp_last_error());
        estrange(d);
    }
}

void imp_llama_seq_keep(imp_llama *ctx, llama_seq_id seq)
{
    for (uint32_t i = 0; ctx->space && i < ctx->n_seq_max; i++) {
        if ((llama_seq_id)i == seq) continue;
        lc_save_seq(ctx, &ctx->seqs[i]);
        lc_seq_reset(&ctx->seqs[i]);
        llama_memory_seq_rm(ctx->memory, (llama_seq_id)i, -1, -1); /* llama.cpp's keep leaves other streams alone */
    }
    llama_memory_seq_keep(ctx->memory, seq);
}

/* Is a cell of `a` also one of `b`? A cell that isn't known may be. */
static bool share_cells(imp_llama *ctx, const lc_seq *a, const lc_seq *b)
{
    size_t n_cells = ctx->stream_cells * ctx->n_streams;
    unsigned char *taken = calloc(n_cells ? n_cells : 1, 1);
    bool shared = !taken || a->sound < a->n || b->sound < b->n;
    const struct { const uint32_t *cells; size_t n; } lists[4] = {
        {a->cells, a->n}, {a->placed, a->n_placed}, {b->cells, b->n}, {b->placed, b->n_placed}};
    for (size_t l = 0; l < 4 && !shared; l++) {
        for (size_t i = 0; i < lists[l].n && !shared; i++) {
            uint32_t cell = lists[l].cells[i];
            if (cell >= n_cells) continue; /* LC_NO_CELL: of a selection, whose cells are in `placed` */
            if (l < 2) taken[cell] = 1;
            else shared = taken[cell];
        }
    }
    free(taken);
    return shared;
}

void imp_llama_seq_add(imp_llama *ctx, llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos delta)
{
    if (ctx->space) {
        if (!is_seq(ctx, seq) || delta == 0) return;
        lc_seq *s = &ctx->seqs[seq];
        if (s->state != LC_SEQ_ALIEN) {
            if ((p0 > 0 && (size_t)p0 >= s->n) || s->n == 0 || p1 == 0) return;
            if (!settle_seq(ctx, seq)) return;
            /* A cell has one position: shifting it here shifts it for the sequences that were copied from or to it. */
            for (uint32_t i = 0; i < ctx->n_seq_max; i++) {
                lc_seq *other = &ctx->seqs[i];
                if (other == s || other->state != LC_SEQ_REAL || !share_cells(ctx, s, other)) continue;
                lc_save_seq(ctx, other);
                estrange(other);
            }
            estrange(s);
        }
        ctx->shift_pending = true;
    }
    llama_memory_seq_add(ctx->memory, seq, p0, p1, delta);
}

llama_pos imp_llama_seq_pos_min(imp_llama *ctx, llama_seq_id seq)
{
    if (!ctx->space || !is_seq(ctx, seq) || ctx->seqs[seq].state == LC_SEQ_ALIEN) {
        return llama_memory_seq_pos_min(ctx->memory, seq);
    }
    return ctx->seqs[seq].n ? 0 : -1;
}

llama_pos imp_llama_seq_pos_max(imp_llama *ctx, llama_seq_id seq)
{
    if (!ctx->space || !is_seq(ctx, seq) || ctx->seqs[seq].state == LC_SEQ_ALIEN) {
        return llama_memory_seq_pos_max(ctx->memory, seq);
    }
    return (llama_pos)ctx->seqs[seq].n - 1;
}

void imp_llama_clear(imp_llama *ctx)
{
    for (uint32_t i = 0; ctx->space && i < ctx->n_seq_max; i++) {
        lc_save_seq(ctx, &ctx->seqs[i]);
        lc_seq_reset(&ctx->seqs[i]);
    }
    llama_memory_clear(ctx->memory, false);
}

/* ---- state */

size_t imp_llama_state_seq_get_size(imp_llama *ctx, llama_seq_id seq)
{
    if (ctx->space && (!is_seq(ctx, seq) || !settle_seq(ctx, seq))) return 0;
    return llama_state_seq_get_size(ctx->lctx, seq);
}

size_t imp_llama_state_seq_get_data(imp_llama *ctx, uint8_t *dst, size_t size, llama_seq_id seq)
{
    if (ctx->space && (!is_seq(ctx, seq) || !settle_seq(ctx, seq))) return 0;
    return llama_state_seq_get_data(ctx->lctx, dst, size, seq);
}

size_t imp_llama_state_seq_set_data(imp_llama *ctx, const uint8_t *src, size_t size, llama_seq_id seq)
{
    if (ctx->space) {
        if (!is_seq(ctx, seq)) return 0;
        lc_seq *s = &ctx->seqs[seq];
        lc_save_seq(ctx, s);
        llama_memory_seq_rm(ctx->memory, seq, -1, -1);
        lc_seq_reset(s);
    }
    size_t n = llama_state_seq_set_data(ctx->lctx, src, size, seq);
    if (ctx->space && llama_memory_seq_pos_max(ctx->memory, seq) >= 0) estrange(&ctx->seqs[seq]);
    return n;
}

/* ---- adapters */

int imp_llama_set_adapters_lora(imp_llama *ctx, struct llama_adapter_lora **adapters, size_t n_adapters, float *scales,
                                const char *const *files)
{
    imp_space *space = NULL;
    lc_adapter_id *ids = NULL, *before = ctx->adapters;
    size_t n_before = ctx->n_adapters;
    int rc = 0;
    if (ctx->space) {
        for (uint32_t i = 0; i < ctx->n_seq_max; i++) {
            if (imp_llama_seq_pos_max(ctx, (llama_seq_id)i) >= 0) {
                return lc_error(IMP_E_ARG, "adapters can't change under sequence %u, which isn't empty", i);
            }
        }
        ids = calloc(n_adapters ? n_adapters : 1, sizeof *ids);
        if (!ids) return lc_error(IMP_E_NOMEM, "no memory for %zu adapters", n_adapters);
        for (size_t i = 0; i < n_adapters && !rc; i++) {
            ids[i].scale = scales[i];
            rc = imp_store_fingerprint(ctx->store, files[i], &ids[i].file);
        }
        ctx->adapters = ids;
        ctx->n_adapters = n_adapters;
        if (!rc) rc = lc_space_describe(ctx, ctx->salt, &space);
    }
    if (!rc && llama_set_adapters_lora(ctx->lctx, adapters, n_adapters, scales) != 0) {
        rc = lc_error(IMP_E_ARG, "llama.cpp refuses the adapters");
    }
    if (!rc && ctx->space) {
        imp_space_close(ctx->space);
        ctx->space = space;
        space = NULL;
        for (uint32_t i = 0; i < ctx->n_seq_max; i++) { /* those of tenants are opened again when they are needed */
            imp_space_close(ctx->seqs[i].space);
            ctx->seqs[i].space = NULL;
        }
        ids = before;
    } else if (ctx->space) {
        ctx->adapters = before;
        ctx->n_adapters = n_before;
    }
    imp_space_close(space);
    free(ids);
    return rc;
}
