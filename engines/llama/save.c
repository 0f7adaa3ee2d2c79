/* save.c: rows of new tokens on their way into the store. A prompt's rows are copied out after its first output was
 * handed over, a slice per decode, so that neither the first token nor those after it wait for long. The answer's
 * follow when the sequence is cut, cleared or flushed. */
#include <string.h>

#include "adapter.h"

enum { SLICE_TOKENS = 256 };

void lc_save_cancel(lc_seq *s)
{
    imp_commit_cancel(s->commit);
    s->commit = NULL;
}

/* Begin with what is due, exact tokens first. Returns 0 with s->commit NULL if there is nothing. */
static int begin(imp_llama *ctx, lc_seq *s)
{
    const imp_llama_request *r = &s->request;
    bool exact = r->store_new && s->saved < s->exact && s->saved < s->sound;
    bool derived = !exact && r->store_derived && s->saved >= s->exact && s->saved < s->sound;
    if (s->state != LC_SEQ_REAL || ctx->fit == IMP_LLAMA_FIT_NONE || (!exact && !derived)) return 0;

    imp_space *space = lc_seq_space(ctx, s);
    if (!space) return 0;
    size_t end = exact && s->exact < s->sound ? s->exact : s->sound;
    size_t first = s->saved;
    int rc = imp_commit_begin(space, s->tokens, end, first, derived ? IMP_COMMIT_DERIVED : 0, &s->commit);
    if (rc == IMP_E_STALE && exact && !s->partial && first > 0) {
        /* What was stored before it may be gone by now, and all of it is here. */
        first = 0;
        rc = imp_commit_begin(space, s->tokens, end, first, 0, &s->commit);
    }
    if (rc < 0) {
        s->commit = NULL;
        lc_say(IMP_LOG_INFO, "new KV isn't stored: %s", imp_last_error());
        return rc;
    }
    if (!s->commit) lc_queries_drop(s); /* all is stored, or too little is new */
    s->commit_next = first;
    s->commit_end = end;
    return 0;
}

/* Copy up to `most` tokens of the open commit; hand it over when it is complete. */
static int copy(imp_llama *ctx, lc_seq *s, size_t most)
{
    size_t n = s->commit_end - s->commit_next;
    if (n > most) n = most;
    llama_synchronize(ctx->lctx);
    for (size_t l = 0; l < ctx->n_sites; l++) {
        int rc = lc_cells_commit(ctx, s->commit, l, s->commit_next, s->cells + s->commit_next, n);
        if (rc < 0) {
            lc_say(IMP_LOG_WARN, "new KV isn't stored: %s", imp_last_error());
            lc_save_cancel(s);
            return rc;
        }
    }
    s->commit_next += n;
    if (s->commit_next < s->commit_end) return 0;

    lc_queries_commit(ctx, s);
    int rc = imp_commit_finish(s->commit);
    s->commit = NULL;
    if (rc < 0) {
        lc_say(IMP_LOG_INFO, "new KV isn't stored: %s", imp_last_error());
        return rc;
    }
    s->saved = s->commit_end;
    return 0;
}

void lc_save_step(imp_llama *ctx)
{
    for (uint32_t i = 0; i < ctx->n_seq_max; i++) {
        lc_seq *s = &ctx->seqs[i];
        if (!s->commit && s->want_save && s->answered) {
            s->want_save = false;
            begin(ctx, s);
        }
        if (s->commit) {
            copy(ctx, s, SLICE_TOKENS);
            return;
        }
    }
}

int lc_save_seq(imp_llama *ctx, lc_seq *s)
{
    int rc = 0;
    s->want_save = false;
    for (int round = 0; round < 3 && !rc; round++) { /* one that is open, the exact ones, the derived ones */
        if (!s->commit) rc = begin(ctx, s);
        if (!rc && s->commit) rc = copy(ctx, s, SIZE_MAX);
    }
    return rc;
}
