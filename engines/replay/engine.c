#include "replay/engine.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { COMMIT_ROWS = 64, SCORED_ROWS = 32, DEFAULT_PROBE_HEADS = 3 };

struct replay_session {
    const replay_setup *s;
    const replay_system *system;
    replay_keys keys;
    imp_store *store;
    imp_space *space;
    int32_t *tokens;        /* [prefix_tokens + query_tokens] */
    float *query;           /* [n_heads][head_dim] */
    unsigned char *k, *v;   /* the device's cells of one layer */
    size_t row_bytes;
    double widened;         /* bytes of rows in f16 over those that are stored and in tiers */
    replay_watch watch;
    void *watch_user;
};

static int fail(int status, const char *text)
{
    return imp_set_error(status, text);
}

static uint32_t small_dim(const replay_setup *s) { return (uint32_t)lrint(s->shape->head_dim * s->scale); }

static replay_keys keys_of(const replay_setup *s)
{
    return (replay_keys){.patterns = s->patterns, .n_sets = s->n_sets, .n_layers = s->shape->n_layers,
                         .n_kv_heads = s->shape->n_kv_heads, .head_dim = small_dim(s), .n_tokens = s->prefix_tokens,
                         .seed = s->seed};
}

int replay_setup_check(const replay_setup *s)
{
    double dim = s->shape->head_dim * s->scale;
    if (!(s->scale > 0) || s->scale > 1 || dim != floor(dim) || dim < REPLAY_LEAST_DIM || (uint32_t)dim % 2)
        return fail(IMP_E_ARG, "replay: the scale must leave an even number of a head's dimensions, 8 at least");
    if (s->n_prefixes == 0 || s->n_prefixes > 1u << 20) return fail(IMP_E_ARG, "replay: no prefixes, or too many");
    if (s->prefix_tokens < 2 * REPLAY_CHUNK || s->prefix_tokens > 1u << 17)
        return fail(IMP_E_ARG, "replay: prefixes have 128 to 131072 tokens");
    if (!(s->stretch >= 1) || s->stretch > 1000) return fail(IMP_E_ARG, "replay: time is stretched by 1 to 1000");
    if (s->query_tokens == 0 || s->query_tokens > 65536)
        return fail(IMP_E_ARG, "replay: questions have 1 to 65536 tokens");
    if (!(s->disk_bytes_per_s >= 1) || !(s->device_bytes >= 0) || !(s->host_bytes >= 0))
        return fail(IMP_E_ARG, "replay: no rate of the disk, or tiers below 0");
    if (s->n_sets == 0) return fail(IMP_E_ARG, "replay: no patterns");
    return 0;
}

/* ------------------------------------------------------------------------------------------------------ store ---- */

static int open_store(const replay_setup *s, const imp_switches *switches, const char *dir, bool filling,
                      imp_store **out)
{
    imp_store_opts o;
    imp_store_opts_init(&o);
    imp_store_opts_switches(&o, switches);
    o.limit_bytes = (uint64_t)1 << 50;
    o.reorder_period_s = UINT32_MAX;
    if (filling) return imp_store_open(dir, &o, out);
    o.host_cache_bytes = (uint64_t)(s->host_bytes * s->scale);
    o.device_cache_bytes = (uint64_t)(s->device_bytes * s->scale);
    o.read_bytes_per_s = (uint64_t)(s->disk_bytes_per_s * s->scale / s->stretch) + 1;
    if (s->simulated) o.io_mode = IMP_IO_VIRTUAL;
    return imp_store_open(dir, &o, out);
}

static int open_space(const replay_setup *s, imp_store *store, imp_space **out)
{
    enum { MAX_LAYERS = 128 };
    imp_layer_shape layers[MAX_LAYERS];
    imp_rope ropes[MAX_LAYERS];
    uint32_t heads[MAX_LAYERS], n = s->shape->n_layers;
    if (n > MAX_LAYERS) return fail(IMP_E_ARG, "replay: too many layers");
    for (uint32_t l = 0; l < n; l++) {
        layers[l] = (imp_layer_shape){s->shape->n_kv_heads, small_dim(s), small_dim(s)};
        ropes[l] = (imp_rope){.base = 10000, .freq_scale = 1, .attn_factor = 1}; /* no dimensions are turned */
        heads[l] = s->shape->n_heads;
    }
    const imp_space_desc desc = {.struct_bytes = sizeof desc, .model_name = s->shape->name, .engine = "replay 1",
                                 .weights = {s->seed, s->prefix_tokens}, .type_k = IMP_TYPE_F16, .type_v = IMP_TYPE_F16,
                                 .n_layers = n, .layers = layers, .ropes = ropes, .n_heads = heads};
    return imp_space_open(store, &desc, out);
}

/* A prompt: the prefix's tokens, which no other prefix begins with, and a question's. */
static void make_tokens(const replay_setup *s, uint32_t prefix, uint32_t question, int32_t *tokens)
{
    uint32_t n = s->prefix_tokens;
    for (uint32_t t = 0; t < n + s->query_tokens; t++) {
        uint64_t what = replay_mix(prefix, t < n ? t : replay_mix(question, t) | UINT64_C(1) << 63);
        tokens[t] = (int32_t)(what % 50000);
    }
    tokens[0] = (int32_t)prefix;
}

void replay_value_fill(uint32_t prefix, uint32_t layer, uint32_t token, size_t n, uint16_t *out)
{
    const uint16_t pair[] = {replay_f16((float)((token / 2048 + 64 * layer + prefix) % 2048)),
                             replay_f16((float)(token % 2048))};
    for (size_t i = 0; i < n; i++) out[i] = pair[i % 2];
}

static int fill_prefix(const replay_setup *s, imp_space *space, uint32_t prefix, int32_t *tokens, uint16_t *k,
                       uint16_t *v, float *queries)
{
    replay_keys keys = keys_of(s);
    uint32_t n = s->prefix_tokens, n_heads = s->shape->n_heads, dim = keys.head_dim;
    size_t row = (size_t)keys.n_kv_heads * dim;
    imp_commit *commit = NULL;
    make_tokens(s, prefix, 0, tokens);
    int rc = imp_commit_begin(space, tokens, n, 0, 0, &commit);
    if (rc < 0 || !commit) return rc;
    for (uint32_t l = 0; rc == 0 && l < keys.n_layers; l++) {
        replay_keys_fill(&keys, prefix, l, k);
        for (uint32_t t = 0; t < n; t++) replay_value_fill(prefix, l, t, row, v + t * row);
        rc = imp_commit_rows(commit, l, 0, n, k, row * 2, v, row * 2);
        for (uint32_t r = 0; r < COMMIT_ROWS; r++)
            replay_keys_query(&keys, prefix, 0, r, n_heads, queries + (size_t)r * n_heads * dim);
        const imp_query q = {.q = queries,
                             .row_stride = (size_t)n_heads * dim,
                             .head_stride = dim,
                             .n_rows = COMMIT_ROWS,
                             .n_heads = n_heads,
                             .scale = 1};
        if (rc == 0) rc = imp_commit_queries(commit, l, n - COMMIT_ROWS, &q);
    }
    if (rc == 0) return imp_commit_finish(commit);
    imp_commit_cancel(commit);
    return rc;
}

int replay_fill(const replay_setup *s, const imp_switches *switches, const char *dir,
                bool (*progress)(double share, void *user), void *user)
{
    replay_keys keys = keys_of(s);
    imp_store *store = NULL;
    imp_space *space = NULL;
    size_t row = (size_t)keys.n_kv_heads * keys.head_dim;
    int32_t *tokens = malloc((s->prefix_tokens + s->query_tokens) * sizeof *tokens);
    uint16_t *k = malloc(s->prefix_tokens * row * sizeof *k), *v = malloc(s->prefix_tokens * row * sizeof *v);
    float *queries = malloc((size_t)COMMIT_ROWS * s->shape->n_heads * keys.head_dim * sizeof *queries);
    int rc = tokens && k && v && queries ? 0 : fail(IMP_E_NOMEM, "replay: no memory for a layer");
    if (rc == 0) rc = open_store(s, switches, dir, true, &store);
    if (rc == 0) rc = open_space(s, store, &space);
    for (uint32_t p = 0; rc == 0 && p < s->n_prefixes; p++) {
        rc = fill_prefix(s, space, p, tokens, k, v, queries);
        if (rc == 0) rc = imp_store_flush(store);
        if (rc == 0 && progress && !progress((p + 1.0) / s->n_prefixes, user)) rc = fail(IMP_E_BUSY, "replay: stopped");
    }
    imp_space_close(space);
    imp_store_close(store);
    free(queries);
    free(v);
    free(k);
    free(tokens);
    return rc;
}

/* ------------------------------------------------------------------------------------------------------- time ---- */

static double now_ns(const replay_session *r)
{
    if (r->s->simulated) return (double)imp_store_virtual_ns(r->store);
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

/* Not earlier than that from now on. */
static void pass(const replay_session *r, double until_ns)
{
    if (!(until_ns > now_ns(r))) return;
    if (r->s->simulated) {
        imp_store_virtual_pass(r->store, (uint64_t)llrint(until_ns));
        return;
    }
    struct timespec t = {.tv_sec = (time_t)(until_ns / 1e9), .tv_nsec = (long)fmod(until_ns, 1e9)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {}
}

/* ---------------------------------------------------------------------------------------------------- session ---- */

static int measure_rows(replay_session *r)
{
    imp_stats stats;
    int rc = imp_store_stats(r->store, &stats);
    if (rc < 0) return rc;
    r->widened = stats.kv_bytes ? (double)(stats.n_tokens * imp_space_token_bytes(r->space)) / (double)stats.kv_bytes : 1;
    return 0;
}

int replay_open(const replay_setup *s, const replay_system *system, const char *dir, replay_session **out)
{
    *out = NULL;
    replay_session *r = calloc(1, sizeof *r);
    if (!r) return fail(IMP_E_NOMEM, "replay: no memory");
    r->s = s;
    r->system = system;
    r->keys = keys_of(s);
    r->row_bytes = (size_t)r->keys.n_kv_heads * r->keys.head_dim * 2;
    r->tokens = malloc((s->prefix_tokens + s->query_tokens) * sizeof *r->tokens);
    r->query = malloc((size_t)s->shape->n_heads * r->keys.head_dim * sizeof *r->query);
    r->k = malloc(s->prefix_tokens * r->row_bytes);
    r->v = malloc(s->prefix_tokens * r->row_bytes);
    int rc = r->tokens && r->query && r->k && r->v ? 0 : fail(IMP_E_NOMEM, "replay: no memory for a layer");
    if (rc == 0 && !system->recompute) {
        rc = open_store(s, &system->switches, dir, false, &r->store);
        if (rc == 0) rc = open_space(s, r->store, &r->space);
        if (rc == 0) rc = measure_rows(r);
    }
    if (rc < 0) replay_close(r);
    else *out = r;
    return rc;
}

void replay_close(replay_session *r)
{
    if (!r) return;
    imp_space_close(r->space);
    imp_store_close(r->store);
    free(r->v);
    free(r->k);
    free(r->query);
    free(r->tokens);
    free(r);
}

void replay_set_watch(replay_session *r, replay_watch watch, void *user)
{
    r->watch = watch;
    r->watch_user = user;
}

int replay_reorder(replay_session *r) { return r->store ? imp_store_reorder(r->store, NULL) : 0; }

/* Of a layer's keys, the share whose scores the system takes, and the share of their bytes that identify takes. */
static double scored_share(const replay_session *r)
{
    const replay_shape *shape = r->s->shape;
    switch (r->system->switches.identify) {
    case IMP_IDENTIFY_ALL_KEYS:
    case IMP_IDENTIFY_CHUNKS:
    case IMP_IDENTIFY_SKETCH: return 1;
    case IMP_IDENTIFY_PROBE: {
        double n = r->system->load.n_probe_heads ? r->system->load.n_probe_heads : DEFAULT_PROBE_HEADS;
        return n < shape->n_heads ? n / shape->n_heads : 1;
    }
    case IMP_IDENTIFY_NONE:
    case IMP_IDENTIFY_STATIC:
    case IMP_IDENTIFY_RANDOM: break;
    }
    return 0;
}

/* The bus, and what the device tier has spared it: rows are widened on whichever side of it they are, so that all of this
 * is bytes of f16. */
typedef struct bus {
    double free_ns;       /* when it has done all it was given */
    double busy_ns;       /* it took for that */
    double spared, taken; /* bytes of device hits, in all, and of these set against transfers */
} bus;

static void transfer(const replay_session *r, bus *b, double from_ns, double n_bytes)
{
    double spare = b->spared - b->taken < n_bytes ? b->spared - b->taken : n_bytes;
    b->taken += spare;
    if (b->free_ns < from_ns) b->free_ns = from_ns;
    double ns = r->s->stretch * replay_bus_ns(r->s->profile, n_bytes - spare);
    b->free_ns += ns;
    b->busy_ns += ns;
}

static int load_layer(replay_session *r, imp_load *load, uint32_t prefix, uint32_t l, const imp_query *query,
                      double start_ns, bus *b)
{
    const replay_setup *s = r->s;
    imp_load_stats stats;
    double row = replay_row_bytes(s->shape, s->profile), n = s->prefix_tokens, k = (double)imp_load_count(load);
    bool choosing = r->system->switches.identify != IMP_IDENTIFY_NONE;
    imp_load_get_stats(load, &stats);
    double own = (double)stats.identify_ns, scores = scored_share(r);
    const uint32_t *positions;
    int rc = imp_load_select(load, l, query, &positions);
    if (rc < 0) return rc;
    imp_load_get_stats(load, &stats);
    own = s->simulated ? 0 : (double)stats.identify_ns - own;
    b->spared = r->widened * (double)stats.device_hit_bytes / s->scale;
    if (scores > 0) {
        double keys = r->system->switches.identify == IMP_IDENTIFY_SKETCH ? 1.0 / 16 : scores; /* bytes of a key */
        transfer(r, b, start_ns, keys * n * row);
        pass(r, b->free_ns);
        pass(r, now_ns(r) - own + s->stretch * replay_score_ns(s->shape, s->profile, SCORED_ROWS, n, scores));
    }
    double chosen_ns = now_ns(r);
    const imp_dst dst = {.k = r->k, .v = r->v, .k_stride = r->row_bytes, .v_stride = r->row_bytes};
    rc = imp_load_gather(load, l, &dst);
    if (rc < 0) return rc;
    if (r->watch) {
        r->watch(r->watch_user, prefix, l, positions, imp_load_count(load), (const uint16_t *)(const void *)r->k,
                 (const uint16_t *)(const void *)r->v);
    }
    imp_load_get_stats(load, &stats);
    b->spared = r->widened * (double)stats.device_hit_bytes / s->scale;
    /* Keys that were scored are there already. */
    double rows = r->system->switches.identify == IMP_IDENTIFY_ALL_KEYS ? k : 2 * k;
    transfer(r, b, choosing ? chosen_ns : start_ns, rows * row);
    pass(r, b->free_ns);
    return 0;
}

static int load_all(replay_session *r, imp_load *load, uint32_t prefix, uint32_t question, double start_ns,
                    double *bus_ns)
{
    const replay_setup *s = r->s;
    bus b = {.free_ns = start_ns};
    double n = s->query_tokens, k = (double)imp_load_count(load), at = now_ns(r);
    double before = s->stretch * replay_before_ns(s->shape, s->profile, n);
    double after = s->stretch * replay_after_ns(s->shape, s->profile, n, k);
    replay_keys_query(&r->keys, prefix, question, 0, s->shape->n_heads, r->query);
    const imp_query query = {.q = r->query, .row_stride = (size_t)s->shape->n_heads * r->keys.head_dim,
                             .head_stride = r->keys.head_dim, .n_rows = 1, .n_heads = s->shape->n_heads, .scale = 1};
    for (uint32_t l = 0; l < s->shape->n_layers; l++) {
        pass(r, at + before);
        int rc = load_layer(r, load, prefix, l, &query, start_ns, &b);
        if (rc < 0) return rc;
        at = now_ns(r) + after;
    }
    pass(r, at + s->stretch * replay_logits_ns(s->shape, s->profile));
    *bus_ns = b.busy_ns / s->stretch;
    return 0;
}

int replay_ask(replay_session *r, uint32_t prefix, uint32_t question, replay_answer *out)
{
    const replay_setup *s = r->s;
    *out = (replay_answer){0};
    if (prefix >= s->n_prefixes || question == 0 || question >= replay_keys_set(&r->keys, prefix)->n_patterns)
        return fail(IMP_E_ARG, "replay: no such prefix or question");
    if (r->system->recompute) {
        out->ttft_ns = out->compute_ns = replay_compute_ns(s->shape, s->profile, s->prefix_tokens + s->query_tokens, 0);
        out->mass = 1;
        return 0;
    }
    imp_lease *lease = NULL;
    imp_load *load = NULL;
    imp_prefix_info info;
    imp_load_stats stats;
    imp_load_opts opts = r->system->load;
    opts.switches = r->system->switches;
    opts.retention = r->system->retention;
    make_tokens(s, prefix, question, r->tokens);
    double start = now_ns(r);
    int rc =
        imp_prefix_acquire(r->space, r->tokens, s->prefix_tokens + s->query_tokens, IMP_ACQUIRE_DERIVED, &lease, &info);
    if (rc == 0 && info.n_matched < s->prefix_tokens) rc = fail(IMP_E_NOTFOUND, "replay: a prefix isn't stored whole");
    if (rc == 0) rc = imp_load_begin(lease, &opts, &load);
    if (rc == 0) rc = load_all(r, load, prefix, question, start, &out->bus_ns);
    out->ttft_ns = (now_ns(r) - start) / s->stretch;
    out->n_loaded = (uint32_t)imp_load_count(load);
    imp_load_end(load, &stats);
    imp_lease_release(lease);
    out->compute_ns = replay_compute_ns(s->shape, s->profile, s->query_tokens, out->n_loaded);
    out->io_wait_ns = s->simulated ? 0 : (double)stats.io_wait_ns / s->stretch;
    out->bytes_read = (double)stats.bytes_read / s->scale;
    out->identify_bytes = (double)stats.identify_bytes / s->scale;
    out->host_hit_bytes = (double)stats.host_hit_bytes / s->scale;
    out->device_hit_bytes = (double)stats.device_hit_bytes / s->scale;
    out->n_reads = stats.n_reads;
    out->n_fallback = stats.n_fallback;
    out->mass = stats.mass;
    return rc;
}

/* --------------------------------------------------------------------------------------------------- requests ---- */

void replay_zipf(uint32_t n_prefixes, uint32_t n_questions, double exponent, uint64_t seed, replay_request *out,
                 size_t n)
{
    double all = 0;
    for (uint32_t i = 0; i < n_prefixes; i++) all += pow(i + 1.0, -exponent);
    for (size_t r = 0; r < n; r++) {
        uint64_t bits = replay_mix(seed, 2 * r);
        double at = (double)(bits >> 11) * 0x1p-53 * all;
        uint32_t rank = 0;
        while (rank + 1 < n_prefixes && at >= pow(rank + 1.0, -exponent)) at -= pow(++rank, -exponent);
        /* Ranks are prefixes as they are numbered: these differ in nothing but their patterns. */
        out[r] = (replay_request){rank, 1 + (uint32_t)(replay_mix(seed, 2 * r + 1) % n_questions)};
    }
}
