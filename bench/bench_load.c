/* bench_load.c: what a load costs the processor, layer after layer, by what it identifies with.
 *
 *     bench-load [tokens [repeats [sketch rows]...]]
 *
 * The shape is SmolLM2-135M's: 30 layers, 9 heads over 3 KV heads of 64 dims. Keys and queries are made up, so that a
 * few stretches of the prefix matter more than others. The store lies in $TMPDIR (or /tmp), with a host tier of an
 * eighth of its KV. Times are those of the process' own processor time, all threads together, in ms: machines may be
 * busy with other things. Reads are waited for in it, not counted. For one thread: `taskset -c 0 bench-load`.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/rng.h"
#include "format/rows.h"
#include "impress/impress.h"
#include "select/rope.h"

enum { LAYERS = 30, HEADS = 9, KV_HEADS = 3, DIM = 64, ROW = KV_HEADS * DIM, QUERY = 32, SALIENT = 16 };

typedef struct world {
    size_t n;
    int32_t *tokens;
    uint16_t *k, *v;    /* [n][ROW] of the layer at hand; v also takes what is loaded */
    float *directions;  /* [KV_HEADS][SALIENT][DIM] */
    float *q;           /* [LAYERS][QUERY][HEADS][DIM] */
    imp_rope_table *turns; /* [n + QUERY] */
} world;

static double cpu_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static float spread(imp_rng *r) { return (float)(imp_rng_unit(r) + imp_rng_unit(r) + imp_rng_unit(r) - 1.5); }

static const imp_rope rope = {.pairs = IMP_ROPE_NORM, .n_dims = DIM, .base = 1e4f, .freq_scale = 1, .attn_factor = 1};

/* Keys near a small subspace; along its first direction, which all queries look for, in stretches of 40 tokens. That
 * one has only dims that turn slowly. */
static void make_layer(world *w, imp_rng *r)
{
    for (size_t i = 0; i < (size_t)KV_HEADS * SALIENT * DIM; i++) {
        bool fast = i / DIM % SALIENT == 0 && i % DIM < DIM / 2;
        w->directions[i] = fast ? 0 : spread(r);
    }
    float height = 0;
    for (size_t t = 0; t < w->n; t++) {
        if (t % 40 == 0) height = imp_rng_below(r, 4) ? -0.5f : 1;
        for (size_t h = 0; h < KV_HEADS; h++) {
            float key[DIM] = {0};
            for (size_t s = 0; s < SALIENT; s++) {
                float along = s ? spread(r) : height + 0.5f * spread(r);
                for (size_t d = 0; d < DIM; d++) key[d] += along * w->directions[(h * SALIENT + s) * DIM + d];
            }
            imp_rope_apply(w->turns, t, key, DIM, 1);
            for (size_t d = 0; d < DIM; d++) w->k[t * ROW + h * DIM + d] = imp_f32_to_f16(key[d]);
        }
        for (size_t d = 0; d < ROW; d++) w->v[t * ROW + d] = imp_f32_to_f16(spread(r));
    }
}

static imp_query query_of(world *w, uint32_t layer)
{
    return (imp_query){.q = w->q + (size_t)layer * QUERY * HEADS * DIM, .row_stride = HEADS * DIM, .head_stride = DIM,
                       .n_rows = QUERY, .n_heads = HEADS, .scale = 0.125f};
}

static void make_queries(world *w, imp_rng *r, uint32_t layer)
{
    float *q = w->q + (size_t)layer * QUERY * HEADS * DIM;
    for (size_t i = 0; i < QUERY; i++) {
        for (size_t h = 0; h < HEADS; h++) {
            const float *first = w->directions + h / (HEADS / KV_HEADS) * SALIENT * DIM;
            for (size_t d = 0; d < DIM; d++) q[d] = 1.5f * first[d] + spread(r);
            imp_rope_apply(w->turns, w->n + i, q, DIM, 1);
            q += DIM;
        }
    }
}

static int fill(world *w, imp_space *space, imp_store *store)
{
    imp_commit *c;
    imp_rng r;
    imp_rng_seed(&r, 7);
    for (size_t i = 0; i < w->n; i++) w->tokens[i] = (int32_t)imp_rng_below(&r, 40000);
    int rc = imp_commit_begin(space, w->tokens, w->n, 0, 0, &c);
    if (rc < 0 || !c) return -1;
    for (uint32_t l = 0; l < LAYERS; l++) {
        make_layer(w, &r);
        make_queries(w, &r, l);
        const imp_query q = query_of(w, l);
        if (imp_commit_rows(c, l, 0, w->n, w->k, ROW * 2, w->v, ROW * 2) < 0 ||
            imp_commit_queries(c, l, w->n - QUERY, &q) < 0)
            return -1;
    }
    return imp_commit_finish(c) < 0 ? -1 : imp_store_flush(store);
}

typedef struct figures {
    double select_ms, gather_ms, mass;
    uint64_t bytes;
} figures;

static int load_once(world *w, imp_space *space, const imp_load_opts *o, figures *f)
{
    imp_lease *lease;
    imp_prefix_info info;
    imp_load *load = NULL;
    imp_load_stats st;
    int rc = imp_prefix_acquire(space, w->tokens, w->n, 0, &lease, &info);
    if (rc < 0) return rc;
    double start = cpu_ms();
    rc = imp_load_begin(lease, o, &load);
    for (uint32_t l = 0; rc == 0 && l < LAYERS; l++) {
        const imp_query q = query_of(w, l);
        const imp_dst dst = {.k = w->k, .v = w->v, .k_stride = ROW * 2, .v_stride = ROW * 2};
        rc = imp_load_select(load, l, &q, NULL);
        double chosen = cpu_ms();
        f->select_ms += chosen - start;
        if (rc == 0) rc = imp_load_gather(load, l, &dst);
        start = cpu_ms();
        f->gather_ms += start - chosen;
    }
    imp_load_end(load, &st);
    imp_lease_release(lease);
    f->mass += st.mass;
    f->bytes += st.bytes_read;
    return rc;
}

static int measure(world *w, imp_space *space, const char *rest, size_t repeats, uint32_t rows,
                   float bytes)
{
    imp_load_opts o;
    figures f = {0};
    imp_load_opts_init(&o);
    imp_system_preset("impress", &o.switches);
    o.retention = 0.25;
    o.byte_share = bytes;
    o.max_sketch_rows = rows;
    o.record = IMP_RECORD_NOTHING;
    int rc = load_once(w, space, &o, &f); /* the tiers fill */
    f = (figures){0};
    for (size_t i = 0; rc == 0 && i < repeats; i++) rc = load_once(w, space, &o, &f);
    double n = (double)repeats;
    if (rc == 0)
        printf("%-6s %6.2f %6u %10.1f %10.1f %10.1f %8.3f\n", rest, (double)bytes, rows, f.select_ms / n,
               f.gather_ms / n, (double)f.bytes / n / 1e6, f.mass / n);
    fflush(stdout);
    return rc;
}

static int run(world *w, const char *dir, imp_rest rest, const char *rest_name, size_t repeats, const uint32_t *rows,
               size_t n_rows)
{
    imp_store *store = NULL;
    imp_space *space = NULL;
    imp_store_opts o;
    imp_switches switches;
    imp_layer_shape layers[LAYERS];
    imp_rope ropes[LAYERS];
    uint32_t heads[LAYERS];
    for (size_t l = 0; l < LAYERS; l++) {
        layers[l] = (imp_layer_shape){KV_HEADS, DIM, DIM};
        ropes[l] = rope;
        heads[l] = HEADS;
    }
    const imp_space_desc desc = {.struct_bytes = sizeof desc, .model_name = "bench", .engine = "bench",
                                 .weights = {1, rest}, .type_k = IMP_TYPE_F16, .type_v = IMP_TYPE_F16,
                                 .n_layers = LAYERS, .layers = layers, .ropes = ropes, .n_heads = heads};
    imp_store_opts_init(&o);
    imp_system_preset("impress", &switches);
    switches.rest = rest;
    imp_store_opts_switches(&o, &switches);
    o.reorder_period_s = UINT32_MAX;
    o.host_cache_bytes = w->n * LAYERS * ROW * 2 * 2 / 8;
    int rc = imp_store_open(dir, &o, &store);
    if (rc == 0) rc = imp_space_open(store, &desc, &space);
    if (rc == 0) rc = fill(w, space, store);
    static const float shares[] = {0, 0.25f};
    for (size_t b = 0; rc == 0 && b < 2; b++) {
        for (size_t i = 0; rc == 0 && i < n_rows; i++)
            rc = measure(w, space, rest_name, repeats, rows[i], shares[b]);
    }
    imp_space_close(space);
    imp_store_close(store);
    return rc;
}

int main(int argc, char **argv)
{
    enum { MOST = 16 };
    uint32_t rows[MOST] = {32, 8};
    size_t n_rows = 2, repeats = argc > 2 ? strtoul(argv[2], NULL, 10) : 5;
    world w = {.n = argc > 1 ? strtoul(argv[1], NULL, 10) : 7000};
    if (argc > 3) n_rows = 0;
    for (int i = 3; i < argc && n_rows < MOST; i++) rows[n_rows++] = (uint32_t)strtoul(argv[i], NULL, 10);
    if (w.n < 64 || repeats == 0) return 2;

    char dir[256], command[300];
    const char *tmp = getenv("TMPDIR");
    snprintf(dir, sizeof dir, "%s/impress-bench-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    w.tokens = calloc(w.n, sizeof *w.tokens);
    w.k = calloc(w.n * ROW, sizeof *w.k);
    w.v = calloc(w.n * ROW, sizeof *w.v);
    w.directions = calloc((size_t)KV_HEADS * SALIENT * DIM, sizeof *w.directions);
    w.q = calloc((size_t)LAYERS * QUERY * HEADS * DIM, sizeof *w.q);
    int rc = w.tokens && w.k && w.v && w.directions && w.q && mkdtemp(dir) ? 0 : -1;
    if (rc == 0) rc = imp_rope_table_new(&rope, DIM, 0, w.n + QUERY, &w.turns);
    printf("%zu tokens, %d layers, 25 %% of the tokens, %zu repeats\n", w.n, LAYERS, repeats);
    printf("%-6s %6s %6s %10s %10s %10s %8s\n", "rest", "bytes", "rows", "select ms", "gather ms", "MB read", "mass");
    if (rc == 0) rc = run(&w, dir, IMP_REST_RAW, "f16", repeats, rows, n_rows);
    if (rc == 0) rc = run(&w, dir, IMP_REST_K8V4, "k8v4", repeats, rows, n_rows);
    if (rc < 0) fprintf(stderr, "bench-load: %s\n", imp_last_error());
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    if (system(command) != 0) rc = -1;
    imp_rope_table_free(w.turns);
    free(w.q);
    free(w.directions);
    free(w.v);
    free(w.k);
    free(w.tokens);
    return rc == 0 ? 0 : 1;
}
