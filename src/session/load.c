/* load.c: the life of a load: options, begin, select, rewind, end. load.h has the whole. */
#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/clock.h"
#include "base/opts.h"
#include "base/status.h"
#include "select/blend.h"
#include "session/choose.h"
#include "session/costs.h"
#include "session/load.h"

enum {
    DEFAULT_QUERY_ROWS = 32,
    DEFAULT_SKETCH_ROWS = 8,
    DEFAULT_PROBE_HEADS = 3,
    DEFAULT_PERIOD = 4,
    LEAST_PROBE_HEADS = 16
};

static const float default_least_retention = 0.05f;

/* Sizes of arenas go in steps, so that a conversation's growing prefix doesn't move the buffers every time. */
#define ARENA_LEAST (64u << 10)
#define ARENA_STEP (16u << 20)

/* ---------------------------------------------------------------------------------------------------- options ---- */

/* As it was first released; what is added comes behind. */
static const size_t least_opts_bytes = offsetof(imp_load_opts, max_query_rows) + sizeof(uint32_t);

static imp_load_opts default_opts(void)
{
    imp_load_opts o = {.struct_bytes = sizeof o, .retention = 1.0};
    imp_system_preset("as", &o.switches);
    o.switches.cache = IMP_CACHE_OF_STORE;
    return o;
}

void imp_load_opts_fill(imp_load_opts *opts, size_t struct_bytes)
{
    const imp_load_opts defaults = default_opts();
    imp_opts_give(opts, struct_bytes, &defaults, sizeof defaults);
}

static bool is_amount(float x) { return x >= 0 && isfinite(x); }

static int check_opts(imp_load_opts *o)
{
    const imp_switches *s = &o->switches;
    if (!(o->retention > 0 && o->retention <= 1))
        return imp_fail(IMP_E_ARG, "retention %g is not in (0, 1]", o->retention);
    if ((unsigned)s->identify > IMP_IDENTIFY_RANDOM)
        return imp_fail(IMP_E_ARG, "unknown identification %d", (int)s->identify);
    if ((unsigned)s->prefetch > IMP_PREFETCH_CHUNKS)
        return imp_fail(IMP_E_ARG, "unknown prefetch %d", (int)s->prefetch);
    if ((unsigned)s->cache > IMP_CACHE_OF_STORE) return imp_fail(IMP_E_ARG, "unknown cache policy %d", (int)s->cache);
    if ((unsigned)o->rank > IMP_RANK_RECONSTRUCTION) return imp_fail(IMP_E_ARG, "unknown ranking %d", (int)o->rank);
    if ((unsigned)o->record > IMP_RECORD_RANKING)
        return imp_fail(IMP_E_ARG, "unknown kind of record %d", (int)o->record);
    if (o->record == IMP_RECORD_RANKING && s->identify != IMP_IDENTIFY_ALL_KEYS)
        return imp_fail(IMP_E_ARG, "a ranking is recorded from all keys (IMP_IDENTIFY_ALL_KEYS), not identification %d",
                        (int)s->identify);
    if (o->probe_spread > 1) return imp_fail(IMP_E_ARG, "probe_spread is %u, must be 0 or 1", o->probe_spread);
    if (!is_amount(o->probe_alpha) || !is_amount(o->probe_similarity) || !is_amount(o->byte_share) ||
        isnan(o->history_weight) || isinf(o->history_weight))
        return imp_fail(IMP_E_ARG, "probe_alpha %g, probe_similarity %g, byte_share %g, history_weight %g: must be "
                        "finite, and the first three not below 0", (double)o->probe_alpha,
                        (double)o->probe_similarity, (double)o->byte_share, (double)o->history_weight);
    if (!(o->mass >= 0 && o->mass < 1) || !(o->least_retention >= 0 && o->least_retention <= 1))
        return imp_fail(IMP_E_ARG, "mass %g is not from 0 to below 1, or least_retention %g not from 0 to 1",
                        (double)o->mass, (double)o->least_retention);
    if (!(o->least_retention > 0)) o->least_retention = default_least_retention;
    if (!o->max_query_rows) o->max_query_rows = DEFAULT_QUERY_ROWS;
    if (!o->max_sketch_rows) o->max_sketch_rows = DEFAULT_SKETCH_ROWS;
    if (!o->n_probe_heads) o->n_probe_heads = DEFAULT_PROBE_HEADS;
    if (!(o->probe_alpha > 0)) o->probe_alpha = 0.6f;
    if (!(o->history_weight < 0) && !(o->history_weight > 0)) o->history_weight = imp_blend_default().weight;
    if (!o->period) o->period = DEFAULT_PERIOD;
    return 0;
}

static int take_opts(const imp_load_opts *opts, imp_load_opts *out)
{
    int rc = imp_opts_take(out, sizeof *out, least_opts_bytes, opts, "imp_load_opts");
    return rc == 0 ? check_opts(out) : rc;
}

int imp_load_opts_fix(const imp_load_opts *opts, const imp_store *store, imp_load_opts *out)
{
    *out = default_opts();
    int rc = opts ? take_opts(opts, out) : check_opts(out);
    if (out->switches.cache == IMP_CACHE_OF_STORE) out->switches.cache = imp_store_options(store)->cache;
    return rc;
}

int imp_load_opts_check(const imp_load_opts *opts)
{
    imp_load_opts o = default_opts();
    return opts ? take_opts(opts, &o) : imp_fail(IMP_E_ARG, "imp_load_opts_check: no options");
}

/* The product's rounding error must not ask for one token more. */
static size_t part_of(double share, size_t n)
{
    double k = ceil(share * (double)n * (1 - 1e-12));
    return k < 1 ? 1 : k > (double)n ? n : (size_t)k;
}

size_t imp_load_count_of(const imp_load_opts *o, size_t n)
{
    return o->switches.identify == IMP_IDENTIFY_NONE ? n : part_of(o->retention, n);
}

static size_t arena_step(size_t n_bytes)
{
    size_t step = ARENA_LEAST;
    while (step < n_bytes && step < ARENA_STEP) step *= 2;
    return imp_round_up(n_bytes, step);
}

/* ------------------------------------------------------------------------------------------------ begin, end ---- */

/* Query heads of a layer, as the space told; 0: it isn't known. */
static uint32_t n_heads(const imp_load *load, uint32_t layer)
{
    const imp_turns *turns = load->lease->turns;
    return turns && turns->n_heads && layer < turns->n_layers ? turns->n_heads[layer] : 0;
}

/* Do the segments hold what it takes to probe? As far as the space told how many heads there are; imp_identify_layer()
 * knows. */
static bool can_probe(const imp_load *load, uint32_t layer)
{
    uint32_t n_kv_heads = load->layers[layer].n_kv_heads, heads = n_heads(load, layer), most = 0;
    if (heads < n_kv_heads || heads % n_kv_heads) heads = n_kv_heads;
    for (uint32_t i = 0; i < load->opts.n_probe_heads && i < heads; i++) {
        uint32_t kv_head;
        (void)imp_probe_head(i, heads, n_kv_heads, load->opts.probe_spread, &kv_head);
        if (kv_head >= most) most = kv_head + 1;
    }
    return imp_keys_have_probe(load, most);
}

/* Tables to put RoPE on the keys of a sketch. `*usable`: it is known how. */
static int take_ropes(imp_load *load, uint32_t layer, bool *usable)
{
    const imp_turns *turns = load->lease->turns;
    *usable = turns && turns->ropes && layer < turns->n_layers && imp_keys_have_sketch(load, layer);
    if (!*usable || turns->ropes[layer].n_dims == 0) return 0;
    int rc = imp_ropes_take(imp_session_ropes(load->session), &turns->ropes[layer], load->layers[layer].head_dim_k,
                            load->plan.n_tokens, &load->ropes[layer]);
    *usable = rc == 0;
    return rc == IMP_E_NOMEM ? rc : 0;
}

/* How each layer can be chosen. */
static int find_ways(imp_load *load)
{
    int rc = 0;
    for (uint32_t l = 0; l < load->n_layers && rc == 0; l++) {
        bool usable = true;
        switch (load->opts.switches.identify) {
        case IMP_IDENTIFY_NONE: load->how[l] = IMP_HOW_ALL; break;
        case IMP_IDENTIFY_ALL_KEYS: load->how[l] = IMP_HOW_KEYS; break;
        case IMP_IDENTIFY_PROBE: load->how[l] = can_probe(load, l) ? IMP_HOW_PROBE : IMP_HOW_KEYS; break;
        case IMP_IDENTIFY_STATIC:
        case IMP_IDENTIFY_RANDOM: load->how[l] = IMP_HOW_KNOWN; break;
        case IMP_IDENTIFY_CHUNKS: load->how[l] = l % load->opts.period ? IMP_HOW_LATER : IMP_HOW_KEYS; break;
        case IMP_IDENTIFY_SKETCH:
            rc = take_ropes(load, l, &usable);
            load->how[l] = usable ? IMP_HOW_SKETCH : IMP_HOW_KEYS;
            break;
        }
    }
    return rc;
}

/* With opts.mass: as many tokens as hold so much of what earlier requests found important, or the prompt's own queries
 * where there were none, in layers evenly spread. What a request finds is sharper than the mean of many: by how much,
 * loads before showed. */
static int count_by_mass(imp_load *load)
{
    enum { MOST_LAYERS = 16 };
    const imp_load_opts *o = &load->opts;
    size_t n = load->plan.n_tokens, n_curves = 0;
    uint32_t step = (load->n_layers + MOST_LAYERS - 1) / MOST_LAYERS;
    if (!(o->mass > 0) || o->switches.identify == IMP_IDENTIFY_NONE) return 0;
    double *curve = imp_calloc(n + 1, sizeof *curve);
    uint32_t *sorting = imp_realloc_array(NULL, n, 2 * sizeof *sorting);
    float *scores = imp_realloc_array(NULL, n, sizeof *scores);
    int rc = curve && sorting && scores ? 0 : imp_fail(IMP_E_NOMEM, "no memory to load %zu tokens", n);
    for (uint32_t l = 0; rc == 0 && l < load->n_layers; l += step) {
        if (!imp_record_known(load, l, scores)) continue;
        imp_mass_curve_add(scores, n, curve, sorting);
        n_curves++;
    }
    if (rc == 0 && n_curves > 0) {
        double lost = (1 - (double)o->mass) / imp_session_sharpness(load->session, o->switches.identify);
        size_t most = load->k, least = part_of((double)o->least_retention, n);
        load->k = imp_mass_count(curve, (double)n_curves * (1 - lost), least < most ? least : most, most);
        load->mass_foreseen = curve[load->k] / (double)n_curves;
    }
    imp_free(scores);
    imp_free(sorting);
    imp_free(curve);
    return rc;
}

/* The lists of all slots lie in the first one's. */
static int take_slots(imp_load *load)
{
    size_t n = load->plan.n_pieces, n_slots = load->n_slots;
    load->slots = imp_calloc(n_slots, sizeof *load->slots);
    if (!load->slots) return imp_fail(IMP_E_NOMEM, "no memory to load %zu tokens", load->plan.n_tokens);
    imp_slot *first = &load->slots[0];
    bool known = load->how[0] == IMP_HOW_KNOWN;
    first->pieces = imp_realloc_array(NULL, n, n_slots * sizeof *first->pieces);
    first->runs = imp_realloc_array(NULL, n, n_slots * sizeof *first->runs);
    first->reads = imp_realloc_array(NULL, n, n_slots * sizeof *first->reads);
    if (known) first->known = imp_realloc_array(NULL, load->k, n_slots * sizeof *first->known);
    if (!first->pieces || !first->runs || !first->reads || (known && !first->known))
        return imp_fail(IMP_E_NOMEM, "no memory to load %zu tokens", load->plan.n_tokens);
    for (size_t i = 1; i < n_slots; i++) {
        imp_slot *s = &load->slots[i];
        s->pieces = first->pieces + i * n;
        s->runs = first->runs + i * n;
        s->reads = first->reads + i * n;
        if (known) s->known = first->known + i * load->k;
    }
    return 0;
}

/* What it takes to choose. */
static int take_scratch(imp_load *load)
{
    size_t n = load->plan.n_tokens, n_units = load->plan.n_units, n_votes = n > 2 * n_units ? n : 2 * n_units;
    imp_identify identify = load->opts.switches.identify;
    load->own = imp_realloc_array(NULL, load->k, sizeof *load->own);
    load->chosen_at = imp_realloc_array(NULL, n, sizeof *load->chosen_at);
    load->unit_of = imp_realloc_array(NULL, n, sizeof *load->unit_of);
    load->tokens_in = imp_realloc_array(NULL, n_units, sizeof *load->tokens_in);
    load->unit_flags = imp_realloc_array(NULL, n_units, 2);
    load->unit_sums = imp_realloc_array(NULL, n_units, sizeof *load->unit_sums);
    bool ok = load->own && load->chosen_at && load->unit_of && load->tokens_in && load->unit_flags && load->unit_sums;
    if (ok && identify != IMP_IDENTIFY_NONE) {
        load->scores = imp_realloc_array(NULL, n, sizeof *load->scores);
        load->scratch = imp_realloc_array(NULL, 2 * n, sizeof *load->scratch);
        ok = load->scores && load->scratch;
    }
    if (ok && identify != IMP_IDENTIFY_NONE && load->how[0] != IMP_HOW_KNOWN) {
        load->key_runs = imp_realloc_array(NULL, n, sizeof *load->key_runs);
        load->past = imp_realloc_array(NULL, n, sizeof *load->past);
        load->votes = imp_realloc_array(NULL, n_votes, sizeof *load->votes);
        load->token_flags = imp_realloc_array(NULL, n, 1);
        load->unit_bytes = imp_realloc_array(NULL, n_units, sizeof *load->unit_bytes);
        load->sketch_runs = imp_realloc_array(NULL, load->plan.n_spans, sizeof *load->sketch_runs);
        ok = load->key_runs && load->past && load->votes && load->token_flags && load->unit_bytes && load->sketch_runs;
    }
    if (ok && identify == IMP_IDENTIFY_PROBE) {
        load->sets = imp_realloc_array(NULL, load->k, load->n_probe * sizeof *load->sets);
        load->index_sets = imp_realloc_array(NULL, load->n_probe, sizeof *load->index_sets);
        ok = load->sets && load->index_sets;
    }
    if (ok && load->opts.switches.prefetch == IMP_PREFETCH_CHUNKS && identify != IMP_IDENTIFY_NONE &&
        load->how[0] != IMP_HOW_KNOWN) {
        load->guess = imp_realloc_array(NULL, n_units, 1);
        ok = load->guess;
    }
    if (!ok) return imp_fail(IMP_E_NOMEM, "no memory to load %zu tokens", n);
    for (size_t i = 0; i < load->k; i++) load->own[i] = (uint32_t)i; /* with IMP_HOW_ALL there is no more to choose */
    return 0;
}

/* Room for the widened keys of a layer. */
static size_t wide_bytes(const imp_load *load)
{
    size_t row = 0;
    bool rounded = false;
    for (size_t i = 0; i < load->plan.n_spans; i++) rounded |= load->plan.spans[i].scales != IMP_PLAN_NONE;
    for (uint32_t l = 0; l < load->n_layers; l++) {
        size_t n = imp_load_key_bytes(load, l);
        if (load->how[l] != IMP_HOW_ALL && load->how[l] != IMP_HOW_KNOWN && rounded && n > row) row = n;
    }
    return row * load->plan.n_tokens;
}

static void load_free(imp_load *load)
{
    if (load->slots) {
        imp_free(load->slots[0].pieces);
        imp_free(load->slots[0].runs);
        imp_free(load->slots[0].reads);
        imp_free(load->slots[0].known);
    }
    imp_free(load->slots);
    imp_free(load->ahead_bytes);
    imp_free(load->own);
    imp_free(load->chosen_at);
    imp_free(load->guess);
    imp_free(load->unit_of);
    imp_free(load->tokens_in);
    imp_free(load->scores);
    imp_free(load->scratch);
    imp_free(load->past);
    imp_free(load->key_runs);
    imp_free(load->sketch_runs);
    imp_free(load->sets);
    imp_free(load->index_sets);
    imp_free(load->votes);
    imp_free(load->unit_sums);
    imp_free(load->unit_bytes);
    imp_free(load->unit_flags);
    imp_free(load->token_flags);
    imp_record_end(load);
    for (uint32_t l = 0; load->ropes && l < load->n_layers; l++) {
        if (load->ropes[l]) imp_ropes_give(imp_session_ropes(load->session), load->ropes[l]);
    }
    imp_free(load->ropes);
    imp_free(load->how);
    imp_plan_clear(&load->plan);
    if (load->tier) imp_tier_give(load->session, load->tier);
    if (load->channel) imp_channel_give(load->session, load->channel);
    imp_free(load);
}

/* Everything that a load needs, in the order in which one thing follows from another. */
static int prepare(imp_load *load)
{
    imp_lease *lease = load->lease;
    int rc = imp_session_of(load->store, &load->session);
    if (rc < 0) return rc;
    imp_session_costs(load->session, &load->costs);
    load->max_gap = imp_costs_gap(&load->costs, imp_store_options(load->store)->read_bytes_per_s);
    rc = imp_tier_take(load->session, load->opts.switches.cache, &load->tier);
    if (rc < 0) return rc;
    if (load->tier) load->host = load->tier->host;
    rc = imp_plan_new(lease->path.spans, lease->path.n_spans, lease->n_tokens, &load->plan);
    if (rc < 0) return rc;
    load->ahead_bytes = imp_calloc(load->n_layers, sizeof *load->ahead_bytes);
    load->how = imp_calloc(load->n_layers, sizeof *load->how);
    load->ropes = imp_calloc(load->n_layers, sizeof *load->ropes);
    if (!load->ahead_bytes || !load->how || !load->ropes) return imp_fail(IMP_E_NOMEM, "no memory for a load");
    rc = find_ways(load);
    if (rc < 0) return rc;
    rc = imp_record_begin(load);
    if (rc < 0) return rc;
    rc = count_by_mass(load);
    if (rc < 0) return rc;
    rc = take_scratch(load);
    if (rc < 0) return rc;
    size_t arena_bytes = arena_step(imp_stream_measure(load));
    rc = take_slots(load);
    if (rc < 0) return rc;
    rc = imp_channel_take(load->session, arena_bytes, &load->channel);
    if (rc < 0) return rc;
    imp_kept_line kept;
    imp_error_keep(&kept);
    if (imp_channel_pool(load->channel) < 0) (void)imp_error_back(&kept, 0); /* one thread will do */
    rc = imp_channel_wide(load->channel, wide_bytes(load));
    if (rc == 0 && load->opts.switches.identify == IMP_IDENTIFY_SKETCH && load->opts.byte_share > 0)
        rc = imp_channel_chooser(load->channel, load->plan.n_tokens, load->plan.n_units);
    return rc;
}

/* Layer 0 is the next, and nothing is known of it. */
static void begin_pass(imp_load *load)
{
    load->at_work = load->n_layers;
    load->next_select = 0;
    load->period = UINT32_MAX;
    load->has_selected = load->has_guess = load->has_scores = false;
    imp_stream_ahead(load);
}

int imp_load_shapes_check(const imp_lease *lease, const imp_load_opts *o)
{
    imp_identify how = o->switches.identify;
    if (how == IMP_IDENTIFY_NONE || how == IMP_IDENTIFY_STATIC || how == IMP_IDENTIFY_RANDOM) return 0;
    const imp_seg_meta *meta = imp_seg_layout_meta(lease->path.spans[0].seg->layout);
    for (uint32_t l = 0; l < meta->n_layers; l++) {
        uint32_t dim = meta->layers[l].head_dim_k;
        if (dim <= IMP_SCORER_DIM_MAX && imp_type_bytes(meta->type_k, dim) > 0) continue;
        return imp_fail(IMP_E_UNSUPPORTED, "tokens of layer %u can't be chosen by keys: heads of %u elements", l, dim);
    }
    return 0;
}

int imp_load_begin(imp_lease *lease, const imp_load_opts *opts, imp_load **out)
{
    if (out) *out = NULL;
    if (!lease || !out) return imp_fail(IMP_E_ARG, "imp_load_begin: lease or result missing");
    imp_kept_line kept;
    imp_error_keep(&kept);
    imp_load_opts o;
    int rc = imp_load_opts_fix(opts, lease->store, &o);
    if (rc == 0) rc = imp_load_shapes_check(lease, &o);
    if (rc < 0) return rc;

    imp_load *load = imp_calloc(1, sizeof *load);
    if (!load) return imp_fail(IMP_E_NOMEM, "no memory for a load");
    const imp_seg_meta *meta = imp_seg_layout_meta(lease->path.spans[0].seg->layout);
    load->lease = lease;
    load->store = lease->store;
    load->opts = o;
    load->type_k = meta->type_k;
    load->type_v = meta->type_v;
    load->n_layers = meta->n_layers;
    load->layers = meta->layers;
    load->k = imp_load_count_of(&o, lease->n_tokens);
    load->units_layer = load->n_layers;
    load->n_probe = o.n_probe_heads;
    uint32_t most = LEAST_PROBE_HEADS;
    for (uint32_t l = 0; l < load->n_layers; l++) most = n_heads(load, l) > most ? n_heads(load, l) : most;
    if (load->n_probe > most) load->n_probe = most;
    rc = prepare(load);
    if (rc == 0 && imp_store_hung(lease->store)) rc = imp_fail(IMP_E_IO, "the store's disk doesn't answer");
    if (rc < 0) {
        load_free(load);
        return rc;
    }
    atomic_fetch_add(&lease->n_users, 1);
    load->begun_ns = imp_now_ns();
    load->stats.bytes_read = atomic_exchange(&lease->header_bytes, 0);
    begin_pass(load);
    *out = load;
    return imp_error_back(&kept, 0);
}

size_t imp_load_count(const imp_load *load) { return load ? load->k : 0; }

void imp_load_units(imp_load *load, uint32_t layer)
{
    if (load->units_layer == layer || (load->units_layer < load->n_layers && !load->plan.mapped)) return;
    imp_plan_units(&load->plan, layer, load->unit_of, load->tokens_in);
    load->units_layer = layer;
}

void imp_load_flag_units(imp_load *load, uint32_t layer, const uint32_t *chosen)
{
    imp_load_units(load, layer);
    memset(load->unit_flags, 0, load->plan.n_units);
    for (size_t i = 0; i < load->k; i++) load->unit_flags[load->unit_of[chosen[i]]] = 1;
}

int imp_load_rewind(imp_load *load)
{
    if (!load) return imp_fail(IMP_E_ARG, "imp_load_rewind: no load");
    if (load->dead) return imp_fail(load->dead, "the load failed before");
    imp_kept_line kept;
    imp_error_keep(&kept);
    imp_stream_stop(load);
    begin_pass(load);
    return imp_error_back(&kept, 0);
}

void imp_load_get_stats(const imp_load *load, imp_load_stats *out)
{
    if (!out) return;
    *out = load ? load->stats : (imp_load_stats){0};
    out->mass = load && load->stats.n_selected ? load->mass_sum / load->stats.n_selected : 1;
}

void imp_load_end(imp_load *load, imp_load_stats *stats)
{
    if (!load) {
        imp_load_get_stats(NULL, stats);
        return;
    }
    imp_kept_line kept;
    imp_error_keep(&kept);
    imp_stream_stop(load);
    (void)imp_error_back(&kept, 0);
    imp_estimate_learn(load, imp_now_ns());
    imp_load_get_stats(load, stats);
    imp_store_count_tier_hits(load->store, load->stats.host_hit_bytes, load->stats.device_hit_bytes);
    if (load->host) {
        imp_store_set_tier_bytes(load->store, imp_host_used_bytes(load->host), imp_host_device_bytes(load->host));
    }
    imp_lease *lease = load->lease;
    load_free(load);
    imp_lease_drop(lease); /* the plan refers to its segments until here */
}

/* ----------------------------------------------------------------------------------------------------- select ---- */

static int check_query(const imp_query *q, uint32_t layer, const imp_layer_shape *shape)
{
    if (!q || !q->q || !q->n_rows)
        return imp_fail(IMP_E_ARG, "imp_load_select: layer %u needs queries to choose by, and there are none", layer);
    if (!q->n_heads || q->n_heads % shape->n_kv_heads)
        return imp_fail(IMP_E_ARG, "imp_load_select: layer %u needs queries of a multiple of %u heads, not %u", layer,
                        shape->n_kv_heads, q->n_heads);
    if (!(q->scale > 0) || !isfinite(q->scale) || !(q->softcap >= 0) || !isfinite(q->softcap))
        return imp_fail(IMP_E_ARG, "imp_load_select: scale %g and soft cap %g, must be finite, above 0 and not below 0",
                        (double)q->scale, (double)q->softcap);
    return 0;
}

int imp_load_select(imp_load *load, uint32_t layer, const imp_query *query, const uint32_t **positions)
{
    if (!load) return imp_fail(IMP_E_ARG, "imp_load_select: no load");
    if (load->dead) return imp_fail(load->dead, "the load failed before");
    if (layer >= load->n_layers || layer < load->next_select)
        return imp_fail(IMP_E_ARG, "imp_load_select: layer %u; there are %u, and those below %u had their turn", layer,
                        load->n_layers, load->next_select);
    bool asks = load->how[layer] != IMP_HOW_ALL && load->how[layer] != IMP_HOW_KNOWN;
    int rc = asks ? check_query(query, layer, &load->layers[layer]) : 0;
    if (rc < 0) return rc;
    imp_kept_line kept;
    imp_error_keep(&kept);
    load->has_selected = false;
    imp_stream_enter(load, layer);
    rc = imp_identify_layer(load, layer, query);
    if (rc < 0) return rc;
    load->has_selected = true;
    load->next_select = layer + 1;
    if (positions) *positions = load->chosen;
    return imp_error_back(&kept, 0);
}
