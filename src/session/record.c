/* record.c: what earlier requests found important, and what this one leaves behind. A record belongs to a segment
 * (store/history.h); a prefix goes through several. */
#include <string.h>

#include "base/alloc.h"
#include "base/status.h"
#include "select/blend.h"
#include "session/load.h"

int imp_record_begin(imp_load *load)
{
    imp_identify identify = load->opts.switches.identify;
    bool scores = identify == IMP_IDENTIFY_ALL_KEYS || identify == IMP_IDENTIFY_PROBE ||
                  identify == IMP_IDENTIFY_CHUNKS || identify == IMP_IDENTIFY_SKETCH;
    load->reads_history = identify == IMP_IDENTIFY_SKETCH && load->opts.history_weight > 0;
    bool counts = load->opts.mass > 0 && identify != IMP_IDENTIFY_NONE;
    if (!(scores && load->opts.record != IMP_RECORD_NOTHING) && !load->reads_history && !counts &&
        identify != IMP_IDENTIFY_STATIC)
        return 0;

    load->histories = imp_calloc(load->plan.n_spans, sizeof *load->histories);
    if (!load->histories) return imp_fail(IMP_E_NOMEM, "no memory for a load");
    int rc = 0;
    for (size_t i = 0; i < load->plan.n_spans && rc == 0; i++)
        rc = imp_history_get(load->store, load->plan.spans[i].seg, &load->histories[i]);
    return rc;
}

void imp_record_end(imp_load *load)
{
    for (size_t i = 0; load->histories && i < load->plan.n_spans; i++) {
        if (load->histories[i]) imp_history_put(load->store, load->histories[i]);
    }
    imp_free(load->histories);
    load->histories = NULL;
}

bool imp_record_past(const imp_load *load, uint32_t layer, float *past)
{
    bool any = false;
    if (!load->reads_history) return false;
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        any |= imp_history_read(load->histories[i], layer, span->segment_first, span->n_tokens,
                                past + span->prefix_first) > 0;
    }
    return any;
}

bool imp_record_known(const imp_load *load, uint32_t layer, float *scores)
{
    bool any = false;
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        float *own = scores + span->prefix_first;
        bool known = imp_history_read(load->histories[i], layer, span->segment_first, span->n_tokens, own) > 0 ||
                     imp_history_ranking(load->histories[i], IMP_RANK_PREFILL, layer, span->segment_first,
                                         span->n_tokens, own);
        for (uint32_t t = 0; !known && t < span->n_tokens; t++) own[t] = 1; /* the mean of a prefix */
        any |= known;
    }
    return any;
}

void imp_record_ranking(const imp_load *load, uint32_t layer, float *scores)
{
    size_t n = load->plan.n_tokens;
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        float *own = scores + span->prefix_first;
        if (imp_history_ranking(load->histories[i], load->opts.rank, layer, span->segment_first, span->n_tokens, own))
            continue;
        for (uint32_t t = 0; t < span->n_tokens; t++) own[t] = (float)(span->prefix_first + t) / (float)n - 2;
    }
}

/* Is it the first span of its segment? A second one would count a request twice. */
static bool is_first(const imp_load *load, size_t at)
{
    for (size_t i = 0; i < at; i++) {
        if (load->plan.spans[i].seg == load->plan.spans[at].seg) return false;
    }
    return true;
}

void imp_record_scores(imp_load *load, uint32_t layer, const float *scores, bool exact)
{
    imp_record what = load->opts.record;
    if (what == IMP_RECORD_NOTHING || (what == IMP_RECORD_RANKING && !exact)) return;
    float *normalised = load->scratch;
    imp_normalise(scores, load->plan.n_tokens, normalised);
    for (size_t i = 0; i < load->plan.n_spans; i++) {
        const imp_plan_span *span = &load->plan.spans[i];
        const float *own = normalised + span->prefix_first;
        if (what == IMP_RECORD_RANKING) {
            imp_history_rank(load->histories[i], IMP_RANK_RECONSTRUCTION, layer, span->segment_first, span->n_tokens,
                             own);
        } else if (is_first(load, i)) {
            imp_history_add(load->histories[i], layer, span->segment_first, span->n_tokens, own);
        }
    }
}
