/* sequence.c: what each virtual sequence holds. */
#include <stdlib.h>
#include <string.h>

#include "adapter.h"

int lc_seq_append(lc_seq *s, const int32_t *tokens, size_t n)
{
    if (s->n + n + 1 > s->cap) {
        size_t cap = s->n + n + 1;
        cap += cap / 2 + 64;
        int32_t *t = realloc(s->tokens, cap * sizeof *t);
        if (t) s->tokens = t;
        uint32_t *c = realloc(s->cells, cap * sizeof *c);
        if (c) s->cells = c;
        if (!t || !c) return lc_error(IMP_E_NOMEM, "no memory for a sequence of %zu tokens", s->n + n);
        s->cap = cap;
    }
    memcpy(s->tokens + s->n, tokens, n * sizeof *tokens);
    for (size_t i = 0; i < n; i++) s->cells[s->n + i] = LC_NO_CELL;
    s->n += n;
    return 0;
}

void lc_seq_set_cells(lc_seq *s, size_t first, const uint32_t *cells, size_t n)
{
    memcpy(s->cells + first, cells, n * sizeof *cells);
    while (s->sound < s->n && s->cells[s->sound] != LC_NO_CELL) s->sound++;
}

void lc_seq_release(lc_seq *s)
{
    imp_load_end(s->load, NULL);
    imp_lease_release(s->lease);
    s->load = NULL;
    s->lease = NULL;
    s->n_leased = 0;
}

void lc_seq_note(lc_seq *s)
{
    lc_seq_release(s);
    lc_save_cancel(s);
    lc_queries_drop(s);
    s->state = LC_SEQ_NOTED;
    s->n_loaded = s->n_placed = s->exact = s->sound = 0;
    s->partial = false;
    for (size_t i = 0; i < s->n; i++) s->cells[i] = LC_NO_CELL;
}

void lc_seq_reset(lc_seq *s)
{
    s->n = 0;
    lc_seq_note(s);
    s->saved = 0;
    s->want_save = s->answered = s->in_prompt = false;
}

void lc_seq_free(lc_seq *s)
{
    lc_seq_reset(s);
    free(s->tokens);
    free(s->cells);
    free(s->placed);
    imp_space_close(s->space);
    free(s->salt);
}

void lc_seq_truncate(imp_llama *ctx, llama_seq_id id, size_t n)
{
    lc_seq *s = &ctx->seqs[id];
    if (n > s->n) return;
    if (s->state == LC_SEQ_REAL && (n == 0 || n < s->n_loaded) && (s->partial || n == 0)) {
        llama_memory_seq_rm(ctx->memory, id, -1, -1);
        lc_seq_note(s);
    }
    s->n = n;
    if (s->saved > n) s->saved = n;
    if (s->queries.first + s->queries.n > n) lc_queries_drop(s);
    if (s->state == LC_SEQ_NOTED) {
        lc_seq_release(s); /* matched again with the next batch */
        return;
    }
    llama_memory_seq_rm(ctx->memory, id, (llama_pos)n, -1);
    if (s->n_loaded > n) s->n_loaded = n;
    if (s->exact > n) s->exact = n;
    if (s->sound > n) s->sound = n;
}

void lc_seq_match(imp_llama *ctx, lc_seq *s, size_t limit)
{
    lc_seq_release(s);
    if (s->request.max_match && limit > s->request.max_match) limit = s->request.max_match;
    if (s->request.recompute || ctx->fit == IMP_LLAMA_FIT_NONE || limit == 0) return;

    /* A match leaves at least one token over; a token that no prompt has, put behind, lets it reach `limit`. */
    uint64_t start = lc_now_ns();
    imp_space *space = lc_seq_space(ctx, s);
    if (!space) return;
    int32_t kept = s->tokens[limit];
    s->tokens[limit] = -1;
    unsigned flags = s->request.use_derived ? IMP_ACQUIRE_DERIVED : 0;
    int rc = imp_prefix_acquire(space, s->tokens, limit + 1, flags, &s->lease, &s->info);
    s->tokens[limit] = kept;
    if (rc < 0) {
        lc_say(IMP_LOG_WARN, "the stored prefix can't be used: %s", imp_last_error());
        s->lease = NULL;
    }
    s->n_leased = s->lease ? s->info.n_matched : 0;
    s->report.match_ns += lc_now_ns() - start;
}
