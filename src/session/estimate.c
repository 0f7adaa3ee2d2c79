/* estimate.c: what a load would take, and what loads took. */
#include "base/bytes.h"
#include "base/status.h"
#include "session/costs.h"
#include "session/load.h"

enum { SAMPLES = 256, LEARN_BYTES = 1 << 20 /* less tells little */ };

/* Bytes of a layer's keys and values of the prefix, scales with them, as they lie on disk. */
static uint64_t layer_bytes(const imp_plan *plan, uint32_t layer)
{
    double sum = 0;
    for (size_t i = 0; i < plan->n_spans; i++) {
        const imp_plan_span *s = &plan->spans[i];
        const imp_seg_meta *meta = imp_seg_layout_meta(s->seg->layout);
        size_t row = imp_seg_row_bytes(s->seg->layout, IMP_REGION_K, layer) +
                     imp_seg_row_bytes(s->seg->layout, IMP_REGION_V, layer);
        sum += (double)row * s->n_tokens;
        if (s->scales != IMP_PLAN_NONE)
            sum += (double)imp_seg_chunk(s->seg->layout, IMP_REGION_SCALES, layer, 0).n_bytes * s->n_tokens /
                   meta->n_tokens;
    }
    return (uint64_t)sum;
}

uint64_t imp_estimate_bytes(const imp_plan *plan, uint32_t n_layers)
{
    uint64_t n = 0;
    for (uint32_t l = 0; l < n_layers; l++) n += layer_bytes(plan, l);
    return n;
}

/* The share of the prefix's chunks that the tiers hold, by looking at some, evenly spread. */
static double held_share(imp_host *host, const imp_plan *plan, uint32_t n_layers)
{
    size_t n_chunks = 0, n_held = 0, n_looked = 0, at = 0;
    for (size_t i = 0; i < plan->n_spans; i++)
        n_chunks += plan->spans[i].first_piece + plan->spans[i].n_pieces - plan->spans[i].keys;
    size_t all = n_chunks * n_layers, step = all / SAMPLES + 1;
    while (step > 1 && n_chunks % step == 0) step--; /* else each layer would show the same chunks */
    for (uint32_t l = 0; l < n_layers; l++) {
        size_t before = 0;
        for (size_t i = 0; i < plan->n_spans; i++) {
            const imp_plan_span *s = &plan->spans[i];
            size_t n = s->first_piece + s->n_pieces - s->keys, base = l * n_chunks + before;
            for (; at < base + n; at += step, n_looked++) {
                size_t n_bytes;
                imp_host_key key = imp_stream_key(s, l, s->keys + (uint32_t)(at - base));
                imp_host_entry *e = imp_host_get(host, &key, &n_bytes);
                if (!e) continue;
                n_held++;
                imp_host_release(host, e);
            }
            before += n;
        }
    }
    return n_looked ? (double)n_held / (double)n_looked : 0;
}

/* Of the prefix's bytes: what is taken, and of that the share which is held. */
static void share_of(imp_session *session, const imp_load_opts *o, const imp_plan *plan, double held, double *share,
                     double *from_tiers, double *read_bytes)
{
    const imp_seg_meta *meta = imp_seg_layout_meta(plan->spans[0].seg->layout);
    imp_habits h;
    imp_session_habits(session, o->switches.identify, &h);
    double kept = o->mass > 0 && h.kept > 0 && h.kept < o->retention ? h.kept : o->retention;
    *share = h.n ? h.share * kept : imp_costs_share(kept, meta->chunk_tokens, plan->mapped);
    if (o->switches.identify == IMP_IDENTIFY_ALL_KEYS && *share < 0.5) *share = 0.5; /* all keys, at least */
    if (o->switches.identify == IMP_IDENTIFY_NONE) *share = 1;
    if (o->switches.identify == IMP_IDENTIFY_SKETCH && o->byte_share > 0 && *share > (double)o->byte_share)
        *share = o->byte_share;
    if (*share > 1) *share = 1;
    /* Tiers keep what matters: a load in part finds more than its share there. */
    *from_tiers = held > 0 && h.n && h.held > held ? h.held : held;
    *read_bytes = h.read_bytes > 0 ? h.read_bytes : o->switches.identify == IMP_IDENTIFY_NONE ? IMP_RUN_BYTES : 32768;
}

int imp_load_estimate(imp_lease *lease, const imp_load_opts *opts, imp_load_guess *out)
{
    imp_session *session;
    imp_load_opts o;
    imp_plan plan;
    if (out) *out = (imp_load_guess){0};
    if (!lease || !out) return imp_fail(IMP_E_ARG, "imp_load_estimate: lease or result missing");
    imp_kept_line kept;
    imp_error_keep(&kept);
    int rc = imp_load_opts_fix(opts, lease->store, &o);
    if (rc == 0) rc = imp_load_shapes_check(lease, &o);
    if (rc == 0) rc = imp_session_of(lease->store, &session);
    if (rc == 0) rc = imp_plan_new(lease->path.spans, lease->path.n_spans, lease->n_tokens, &plan);
    if (rc < 0) return rc;

    uint32_t n_layers = imp_seg_layout_meta(lease->path.spans[0].seg->layout)->n_layers;
    double held = 0, share, from_tiers, read_bytes, all = (double)imp_estimate_bytes(&plan, n_layers);
    imp_tier *tier;
    if (imp_io_in_memory(imp_store_io(lease->store))) {
        held = 1;
    } else if (imp_tier_look(session, o.switches.cache, &tier)) {
        held = held_share(tier->host, &plan, n_layers);
        imp_tier_give(session, tier);
    }
    share_of(session, &o, &plan, held, &share, &from_tiers, &read_bytes);
    imp_plan_clear(&plan);

    imp_read_costs costs;
    uint64_t cap = imp_store_options(lease->store)->read_bytes_per_s;
    imp_session_costs(session, &costs);
    out->n_tokens = imp_load_count_of(&o, lease->n_tokens);
    out->bytes_held = (uint64_t)(all * share * from_tiers);
    out->bytes_read = (uint64_t)(all * share * (1 - from_tiers));
    out->n_reads = (uint64_t)((double)out->bytes_read / read_bytes);
    out->read_ns = (uint64_t)(imp_session_pace(session) * imp_costs_ns(&costs, cap, out->n_reads, out->bytes_read));
    return imp_error_back(&kept, 0);
}

void imp_estimate_learn(imp_load *load, uint64_t now_ns)
{
    const imp_load_stats *s = &load->stats;
    if (load->dead || load->n_gathered < load->n_layers) return;
    double passes = (double)load->n_gathered / load->n_layers;
    double all = (double)imp_estimate_bytes(&load->plan, load->n_layers) * passes * (double)load->k /
                 (double)load->plan.n_tokens;
    uint64_t hits = s->host_hit_bytes + s->device_hit_bytes;
    double taken = (double)(s->bytes_read + hits);
    if (load->mass_foreseen > 0 && load->mass_foreseen < 1 && load->stats.n_selected)
        imp_session_sharpness_learn(load->session, load->opts.switches.identify,
                                    (1 - load->mass_sum / load->stats.n_selected) / (1 - load->mass_foreseen),
                                    (double)load->k / (double)load->plan.n_tokens);
    if (!(all > 0) || !(taken > 0)) return;
    imp_session_learn(load->session, load->opts.switches.identify, taken / all, (double)hits / taken, s->n_reads,
                      s->bytes_read);

    /* The disk's pace shows where it was what the load waited for; and it is no slower than what it just gave. */
    double by_costs = imp_costs_ns(&load->costs, imp_store_options(load->store)->read_bytes_per_s, s->n_reads,
                                   s->bytes_read);
    double elapsed = (double)(now_ns - load->begun_ns), pace = elapsed / by_costs;
    bool waited = (double)s->io_wait_ns > 0.7 * elapsed;
    if (s->bytes_read >= LEARN_BYTES && (waited || pace < imp_session_pace(load->session)))
        imp_session_pace_learn(load->session, pace);
}
