/* decode.c: a batch, cut by what each of its sequences needs. Where no sequence has anything noted, the batch goes to
 * llama.cpp as it came. Else the sequences with a noted prefix get a pass each, all others one together, and the
 * outputs are copied into rows of our own. */
#include <stdlib.h>
#include <string.h>

#include "adapter.h"

enum { MIN_GAIN = 64 }; /* stored tokens beyond those in the cells, for which a sequence is loaded anew */

/* ---- the batch as arrays that are there */

static llama_seq_id seq_of(const struct llama_batch *b, int32_t i) { return b->seq_id ? b->seq_id[i][0] : 0; }

static bool output_of(const struct llama_batch *b, int32_t i)
{
    return b->logits ? b->logits[i] != 0 : i + 1 == b->n_tokens;
}

static llama_pos pos_of(const imp_llama *ctx, const struct llama_batch *b, size_t at)
{
    int32_t i = ctx->order[at];
    if (b->pos) return b->pos[i];
    const lc_seq *s = &ctx->seqs[seq_of(b, i)];
    return s->pos_before + 1 + (llama_pos)(at - s->first_share);
}

/* Sort the batch's tokens by sequence. False: it is one that llama.cpp would refuse, or that isn't offered here. */
static bool sort_out(imp_llama *ctx, const struct llama_batch *b)
{
    if (b->n_tokens <= 0 || (uint32_t)b->n_tokens > ctx->n_batch || (!b->token && !b->embd)) return false;
    for (uint32_t id = 0; id < ctx->n_seq_max; id++) ctx->seqs[id].n_share = 0;
    for (int32_t i = 0; i < b->n_tokens; i++) {
        if (b->n_seq_id && b->n_seq_id[i] != 1) return false;
        llama_seq_id id = seq_of(b, i);
        if (id < 0 || (uint32_t)id >= ctx->n_seq_max) return false;
        if (b->token && (b->token[i] < 0 || (uint32_t)b->token[i] >= ctx->n_vocab)) return false;
        ctx->seqs[id].n_share++;
    }
    size_t at = 0;
    for (uint32_t id = 0; id < ctx->n_seq_max; id++) {
        lc_seq *s = &ctx->seqs[id];
        s->first_share = at;
        at += s->n_share;
        s->n_share = s->n_counted = 0;
        s->n_before = s->n;
        s->solo = s->has_output = false;
        s->pos_before = imp_llama_seq_pos_max(ctx, (llama_seq_id)id);
    }
    for (int32_t i = 0; i < b->n_tokens; i++) {
        lc_seq *s = &ctx->seqs[seq_of(b, i)];
        ctx->order[s->first_share + s->n_share++] = i;
        s->has_output = s->has_output || output_of(b, i);
    }
    return true;
}

static bool continues(const imp_llama *ctx, const struct llama_batch *b, const lc_seq *s)
{
    for (size_t i = 0; i < s->n_share; i++) {
        if (pos_of(ctx, b, s->first_share + i) != (llama_pos)(s->n_before + i)) return false;
    }
    return true;
}

/* ---- reports */

static void open_report(lc_seq *s)
{
    bool generates = s->n_share == 1 && s->has_output && s->state == LC_SEQ_REAL && s->answered;
    if (!s->in_prompt && !generates) {
        s->report = (imp_llama_report){.mass = 1};
        s->report.reason = s->request.recompute ? IMP_LLAMA_REASON_ASKED : IMP_LLAMA_REASON_NOTHING; /* until a load */
        s->in_prompt = true;
        s->want_save = s->answered = false;
    }
    s->n_counted = s->in_prompt ? s->n_share : 0;
    s->report.prompt_tokens += s->n_counted;
}

static void close_report(lc_seq *s, uint64_t ns)
{
    imp_llama_report *r = &s->report;
    if (s->in_prompt) {
        r->total_ns += ns;
        uint64_t known = r->match_ns + r->identify_ns + r->io_wait_ns + r->gather_ns;
        r->compute_ns = r->total_ns > known ? r->total_ns - known : 0;
    }
    if (!s->has_output) return;
    s->want_save = s->want_save || s->in_prompt;
    s->in_prompt = false;
    s->answered = true;
}

/* ---- what each sequence needs */

/* Append its share to the sequence, and see whether the store helps. Returns 0 or a return code of llama_decode(). */
static int32_t enter(imp_llama *ctx, const struct llama_batch *b, llama_seq_id id)
{
    lc_seq *s = &ctx->seqs[id];
    if (s->state == LC_SEQ_ALIEN) return 0;
    if (!continues(ctx, b, s)) {
        if (s->state == LC_SEQ_NOTED && s->n > 0) return -1;
        if (s->state == LC_SEQ_REAL) lc_save_seq(ctx, s); /* if llama.cpp takes it, it isn't ours any more */
        return 0;
    }
    for (size_t i = 0; i < s->n_share; i++) ctx->rows[i] = b->token[ctx->order[s->first_share + i]];
    if (lc_seq_append(s, ctx->rows, s->n_share) < 0) return -2;
    s->solo = s->load != NULL;
    if (s->solo || (s->state == LC_SEQ_REAL && s->n_share < MIN_GAIN)) return 0;

    size_t limit = s->n_before, end = s->n;
    while (limit < end && !output_of(b, ctx->order[s->first_share + limit - s->n_before])) limit++;
    lc_seq_match(ctx, s, limit);
    if (s->state == LC_SEQ_NOTED) {
        s->solo = s->n_before > 0 || s->n_leased >= LC_MIN_PREFIX || s->n_leased == s->n;
    } else if (s->n_leased >= s->n_before + MIN_GAIN) {
        s->n = s->n_before;
        lc_save_seq(ctx, s);
        lc_pass_drop(ctx, id);
        s->n = end;
        lc_seq_match(ctx, s, limit);
        s->solo = true;
    }
    if (!s->solo) lc_seq_release(s);
    return 0;
}

/* ---- running it */

/* A pass over tokens that came as they are went well: where are they? */
static void note_passed(imp_llama *ctx, const struct llama_batch *b, bool known)
{
    const lc_hook *h = &ctx->hook;
    for (uint32_t id = 0; id < ctx->n_seq_max; id++) {
        lc_seq *s = &ctx->seqs[id];
        if (s->n_share == 0 || s->solo) continue;
        if (s->state == LC_SEQ_ALIEN) continue;
        if (s->n == s->n_before) { /* llama.cpp took what didn't continue it */
            lc_seq_reset(s);
            s->state = LC_SEQ_ALIEN;
            continue;
        }
        s->state = LC_SEQ_REAL;
        if (s->exact == s->n_before) s->exact = s->n;
        /* With one stream the graph has the batch's order, else it has each sequence's tokens in order, and a cell's
         * stream is its sequence. */
        size_t n = 0;
        for (size_t i = 0, in_pass = 0; i < h->n_cells && known && n < s->n_share; i++) {
            bool mine;
            if (ctx->n_streams > 1) {
                mine = h->cells[i] / ctx->stream_cells == id;
            } else {
                while (ctx->seqs[seq_of(b, (int32_t)in_pass)].solo) in_pass++;
                mine = seq_of(b, (int32_t)in_pass++) == (llama_seq_id)id;
            }
            if (mine) s->cells[s->n_before + n++] = h->cells[i];
        }
        lc_seq_set_cells(s, s->n_before, s->cells + s->n_before, n);
    }
}

/* The outputs' rows in ctx->out, for tokens that llama.cpp doesn't keep them of. */
static int32_t number_outputs(imp_llama *ctx, const struct llama_batch *b)
{
    size_t n = 0;
    for (int32_t i = 0; i < b->n_tokens; i++) ctx->out_row[i] = output_of(b, i) ? (int32_t)n++ : -1;
    if (n > ctx->cap_out) {
        float *out = realloc(ctx->out, n * ctx->n_vocab * sizeof *out);
        if (!out) {
            lc_say(IMP_LOG_ERROR, "no memory for the logits of %zu tokens", n);
            return -2;
        }
        ctx->out = out;
        ctx->cap_out = n;
    }
    ctx->n_out = n;
    ctx->n_out_tokens = b->n_tokens;
    ctx->out_own = false;
    return 0;
}

/* All sequences that need no pass of their own, in the batch's order. */
static int32_t pass_rest(imp_llama *ctx, const struct llama_batch *b)
{
    struct llama_batch *w = &ctx->work;
    w->n_tokens = 0;
    for (int32_t i = 0; i < b->n_tokens; i++) {
        llama_seq_id id = seq_of(b, i);
        lc_seq *s = &ctx->seqs[id];
        if (s->solo) continue;
        size_t at = s->first_share;
        while (ctx->order[at] != i) at++;
        ctx->rows[w->n_tokens] = ctx->out_row[i];
        w->token[w->n_tokens] = b->token[i];
        w->pos[w->n_tokens] = pos_of(ctx, b, at);
        w->n_seq_id[w->n_tokens] = 1;
        w->seq_id[w->n_tokens][0] = id;
        w->logits[w->n_tokens++] = ctx->out_row[i] >= 0;
    }
    if (w->n_tokens == 0) return 0;
    int error;
    lc_queries_begin(ctx, w, NULL, 0);
    int32_t rc = lc_hook_decode(ctx, *w, LC_HOOK_WATCH, &error);
    lc_queries_end(ctx, rc == 0 && !error);
    if (rc != 0) return rc;
    for (int32_t i = 0; i < w->n_tokens; i++) {
        if (ctx->rows[i] < 0) continue;
        const float *logits = llama_get_logits_ith(ctx->lctx, i);
        if (!logits) return -3;
        memcpy(ctx->out + (size_t)ctx->rows[i] * ctx->n_vocab, logits, ctx->n_vocab * sizeof *logits);
    }
    note_passed(ctx, b, !error);
    return 0;
}

static int32_t run_apart(imp_llama *ctx, const struct llama_batch *b)
{
    int32_t rc = number_outputs(ctx, b);
    if (!rc) rc = pass_rest(ctx, b);
    for (uint32_t id = 0; id < ctx->n_seq_max && !rc; id++) {
        lc_seq *s = &ctx->seqs[id];
        if (!s->solo || s->n_share == 0) continue;
        for (size_t i = 0; i < s->n_share; i++) ctx->rows[i] = ctx->out_row[ctx->order[s->first_share + i]];
        rc = lc_pass_run(ctx, (llama_seq_id)id, s->n_share, ctx->rows);
    }
    return rc;
}

static int32_t run_together(imp_llama *ctx, const struct llama_batch *b)
{
    int error;
    ctx->out_own = true;
    lc_queries_begin(ctx, b, NULL, 0);
    int32_t rc = lc_hook_decode(ctx, *b, LC_HOOK_WATCH, &error);
    lc_queries_end(ctx, rc == 0 && !error);
    const lc_seq *only = &ctx->seqs[seq_of(b, 0)];
    if (rc == 0 && only->n_share == (size_t)b->n_tokens && only->state != LC_SEQ_ALIEN)
        lc_pass_note(ctx, only->n_share, (only->partial ? only->n_placed - only->n_loaded : 0) + only->n_before + 1, false);
    if (rc == 0) note_passed(ctx, b, !error);
    return rc;
}

/* The batch left no trace. */
static void take_back(imp_llama *ctx)
{
    for (uint32_t id = 0; id < ctx->n_seq_max; id++) {
        lc_seq *s = &ctx->seqs[id];
        if (s->n_share == 0) continue;
        s->report.prompt_tokens -= s->n_counted;
        if (s->state == LC_SEQ_ALIEN) {
            llama_memory_seq_rm(ctx->memory, (llama_seq_id)id, s->pos_before + 1, -1);
        } else {
            if (s->n > s->n_before) lc_seq_truncate(ctx, (llama_seq_id)id, s->n_before);
            /* And the cells of ubatches that were computed before the one that failed. */
            llama_memory_seq_rm(ctx->memory, (llama_seq_id)id, (llama_pos)s->n_before, -1);
        }
    }
    ctx->out_own = false;
    ctx->n_out = 0;
    ctx->n_out_tokens = 0;
}

/* Rows of embeddings have no tokens that could be looked up: their sequences go on as llama.cpp's alone. */
static int32_t decode_embeddings(imp_llama *ctx, struct llama_batch batch)
{
    int32_t rc = 0;
    for (uint32_t id = 0; id < ctx->n_seq_max && !rc; id++) {
        lc_seq *s = &ctx->seqs[id];
        if (s->n_share == 0 || s->state == LC_SEQ_ALIEN) continue;
        lc_save_seq(ctx, s);
        rc = lc_pass_whole(ctx, (llama_seq_id)id);
    }
    if (!rc) rc = lc_hook_decode(ctx, batch, LC_HOOK_WATCH, NULL);
    if (rc) take_back(ctx);
    for (uint32_t id = 0; id < ctx->n_seq_max && !rc; id++) {
        lc_seq *s = &ctx->seqs[id];
        if (s->n_share == 0 || s->state == LC_SEQ_ALIEN) continue;
        lc_seq_reset(s);
        s->state = LC_SEQ_ALIEN;
    }
    ctx->out_own = true;
    return rc;
}

int32_t imp_llama_decode(imp_llama *ctx, struct llama_batch batch)
{
    if (!ctx->space) return llama_decode(ctx->lctx, batch);
    lc_save_step(ctx);
    if (!sort_out(ctx, &batch)) {
        lc_say(IMP_LOG_ERROR, "a batch of %d tokens is refused: 1 to %u tokens of this model, each in one sequence",
               batch.n_tokens, ctx->n_batch);
        return -1;
    }
    if (!batch.token) return decode_embeddings(ctx, batch);

    uint64_t start = lc_now_ns();
    bool apart = false;
    int32_t rc = 0;
    for (uint32_t id = 0; id < ctx->n_seq_max && !rc; id++) {
        lc_seq *s = &ctx->seqs[id];
        if (s->n_share == 0) continue;
        open_report(s);
        rc = enter(ctx, &batch, (llama_seq_id)id);
        apart = apart || s->solo;
    }
    if (!rc) rc = apart ? run_apart(ctx, &batch) : run_together(ctx, &batch);
    if (rc != 0) {
        take_back(ctx);
        return rc;
    }
    uint64_t ns = lc_now_ns() - start;
    for (uint32_t id = 0; id < ctx->n_seq_max; id++) {
        lc_seq *s = &ctx->seqs[id];
        if (s->n_share == 0) continue;
        if (!s->solo && s->in_prompt) s->report.query_tokens += s->n_share;
        close_report(s, ns);
    }
    return 0;
}

/* ---- outputs */

float *imp_llama_get_logits_ith(imp_llama *ctx, int32_t i)
{
    if (!ctx->space || ctx->out_own) return llama_get_logits_ith(ctx->lctx, i);
    int64_t row = -1;
    if (i < 0) {
        row = (int64_t)ctx->n_out + i;
    } else if (i < ctx->n_out_tokens) {
        row = ctx->out_row[i];
    }
    return row < 0 ? NULL : ctx->out + (size_t)row * ctx->n_vocab;
}

llama_token imp_llama_sampler_sample(struct llama_sampler *smpl, imp_llama *ctx, int32_t i)
{
    if (!ctx->space || ctx->out_own) return llama_sampler_sample(smpl, ctx->lctx, i);
    const float *logits = imp_llama_get_logits_ith(ctx, i);
    if (!logits) return LLAMA_TOKEN_NULL;
    for (uint32_t t = 0; t < ctx->n_vocab; t++) ctx->candidates[t] = (llama_token_data){(llama_token)t, logits[t], 0};
    llama_token_data_array all = {ctx->candidates, ctx->n_vocab, -1, false};
    llama_sampler_apply(smpl, &all);
    if (all.selected < 0) return LLAMA_TOKEN_NULL;
    llama_token token = all.data[all.selected].id;
    llama_sampler_accept(smpl, token);
    return token;
}
