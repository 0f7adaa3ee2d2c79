/* space.c: what must be equal before KV may be shared. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/opts.h"
#include "base/status.h"
#include "select/rope.h"
#include "store/store_internal.h"

enum { LAYERS_MAX = 1024, NAME_MAX_BYTES = 63, HEADS_MAX = 1 << 20 };

/* As it was first released; what is added comes behind. */
static const size_t least_desc_bytes = offsetof(imp_space_desc, salt) + sizeof(char *);

static void field32(imp_hasher *h, const char *name, uint32_t v)
{
    unsigned char bytes[4];
    imp_put32(bytes, v);
    imp_hasher_field(h, name, bytes, sizeof bytes);
}

static void field_hash(imp_hasher *h, const char *name, imp_hash128 v)
{
    unsigned char bytes[16];
    imp_put64(bytes, v.lo);
    imp_put64(bytes + 8, v.hi);
    imp_hasher_field(h, name, bytes, sizeof bytes);
}

static int check_turns(const imp_space_desc *d)
{
    for (uint32_t i = 0; i < d->n_layers; i++) {
        imp_layer_shape l = d->layers[i];
        imp_rope_table *table = NULL;
        if (d->n_heads && (d->n_heads[i] < 1 || d->n_heads[i] > HEADS_MAX || d->n_heads[i] % l.n_kv_heads != 0)) {
            return imp_fail(IMP_E_ARG, "space: layer %u has %u query heads over %u KV heads", i, d->n_heads[i],
                            l.n_kv_heads);
        }
        int rc = d->ropes ? imp_rope_table_new(&d->ropes[i], l.head_dim_k, 0, 1, &table) : 0;
        imp_rope_table_free(table);
        if (rc == IMP_E_NOMEM) return rc;
        if (rc < 0) {
            char line[256];
            snprintf(line, sizeof line, "%s", imp_last_error());
            return imp_fail(rc, "space: layer %u: %s", i, line);
        }
    }
    return 0;
}

static int check(const imp_space_desc *d, size_t *token_bytes)
{
    if (!d->engine || !*d->engine) return imp_fail(IMP_E_ARG, "space: no engine named");
    if (!d->weights.lo && !d->weights.hi) return imp_fail(IMP_E_ARG, "space: the weights' hash is missing");
    if (!d->layers) return imp_fail(IMP_E_ARG, "space: no layers");
    if (d->n_layers < 1 || d->n_layers > LAYERS_MAX) {
        return imp_fail(IMP_E_ARG, "space: %u layers, must be 1 to %d", d->n_layers, LAYERS_MAX);
    }
    if (d->n_fields > 0 && !d->fields) return imp_fail(IMP_E_ARG, "space: %zu fields, and they are missing", d->n_fields);
    for (size_t i = 0; i < d->n_fields; i++) {
        if (!d->fields[i].name || (d->fields[i].n_bytes > 0 && !d->fields[i].bytes)) {
            return imp_fail(IMP_E_ARG, "space: field %zu has no name, or no bytes", i);
        }
    }
    *token_bytes = 0;
    for (uint32_t i = 0; i < d->n_layers; i++) {
        imp_layer_shape l = d->layers[i];
        uint64_t n_k = (uint64_t)l.n_kv_heads * l.head_dim_k, n_v = (uint64_t)l.n_kv_heads * l.head_dim_v;
        size_t k = n_k <= 1u << 20 ? imp_type_bytes(d->type_k, (size_t)n_k) : 0;
        size_t v = n_v <= 1u << 20 ? imp_type_bytes(d->type_v, (size_t)n_v) : 0;
        if (k == 0 || v == 0) {
            return imp_fail(IMP_E_ARG, "space: layer %u of %u heads x %u and %u can't be kept in its types", i,
                            l.n_kv_heads, l.head_dim_k, l.head_dim_v);
        }
        *token_bytes += k + v;
    }
    return check_turns(d);
}

/* ---- how its keys are turned */

static imp_turns *turns_new(const imp_space_desc *d)
{
    size_t n_factors = 0;
    for (uint32_t i = 0; d->ropes && i < d->n_layers; i++) {
        if (d->ropes[i].factors) n_factors += d->ropes[i].n_dims / 2;
    }
    /* All in one piece: the struct, the ropes, their factors, the heads. */
    size_t n_ropes = d->ropes ? d->n_layers : 0;
    imp_turns *t = imp_calloc(1, sizeof *t + n_ropes * sizeof *d->ropes + n_factors * sizeof(float) +
                                     d->n_layers * sizeof(uint32_t));
    if (!t) return NULL;
    imp_rope *ropes = (imp_rope *)(void *)(t + 1);
    float *factors = (float *)(void *)(ropes + n_ropes);
    uint32_t *n_heads = (uint32_t *)(void *)(factors + n_factors);
    atomic_init(&t->n_users, 1);
    t->n_layers = d->n_layers;
    t->ropes = d->ropes ? ropes : NULL;
    t->n_heads = n_heads;
    for (uint32_t i = 0; i < d->n_layers; i++) {
        n_heads[i] = d->n_heads ? d->n_heads[i] : d->layers[i].n_kv_heads;
        if (!d->ropes) continue;
        ropes[i] = d->ropes[i];
        if (!ropes[i].factors) continue;
        memcpy(factors, ropes[i].factors, ropes[i].n_dims / 2 * sizeof *factors);
        ropes[i].factors = factors;
        factors += ropes[i].n_dims / 2;
    }
    return t;
}

imp_turns *imp_turns_hold(imp_turns *t)
{
    /* Relaxed: whoever holds it has one already. */
    if (t) atomic_fetch_add_explicit(&t->n_users, 1, memory_order_relaxed);
    return t;
}

void imp_turns_drop(imp_turns *t)
{
    if (t && atomic_fetch_sub_explicit(&t->n_users, 1, memory_order_acq_rel) == 1) imp_free(t);
}

/* ---- its id */

static int space_id(const imp_space_desc *d, imp_hash128 *out)
{
    imp_hasher *h = imp_hasher_new();
    if (!h) return imp_fail(IMP_E_NOMEM, "no memory for a space");
    const char *salt = d->salt ? d->salt : "";
    imp_hasher_field(h, "impress space", "1", 1);
    imp_hasher_field(h, "engine", d->engine, strlen(d->engine));
    field_hash(h, "weights", d->weights);
    field32(h, "type_k", (uint32_t)d->type_k);
    field32(h, "type_v", (uint32_t)d->type_v);
    field32(h, "n_layers", d->n_layers);
    for (uint32_t i = 0; i < d->n_layers; i++) {
        field32(h, "n_kv_heads", d->layers[i].n_kv_heads);
        field32(h, "head_dim_k", d->layers[i].head_dim_k);
        field32(h, "head_dim_v", d->layers[i].head_dim_v);
    }
    field32(h, "n_fields", (uint32_t)d->n_fields);
    for (size_t i = 0; i < d->n_fields; i++) {
        imp_hasher_field(h, d->fields[i].name, d->fields[i].bytes, d->fields[i].n_bytes);
    }
    field_hash(h, "salt", imp_hash128_of(salt, strlen(salt), 0));
    *out = imp_hasher_digest(h);
    imp_hasher_free(h);
    return 0;
}

int imp_space_open(imp_store *store, const imp_space_desc *given, imp_space **out)
{
    imp_space *sp = NULL;
    size_t token_bytes = 0;
    if (out) *out = NULL;
    if (!store || !given || !out) return imp_fail(IMP_E_ARG, "imp_space_open: store, description or result missing");
    imp_space_desc description = {0}, *desc = &description;
    int rc = imp_opts_take(desc, sizeof *desc, least_desc_bytes, given, "imp_space_desc");
    if (rc == 0) rc = check(desc, &token_bytes);
    if (rc < 0) goto out;
    rc = IMP_E_NOMEM;
    sp = imp_calloc(1, sizeof *sp);
    if (!sp) goto out;
    sp->layers = imp_malloc(desc->n_layers * sizeof *sp->layers);
    if (!sp->layers) goto out;
    memcpy(sp->layers, desc->layers, desc->n_layers * sizeof *sp->layers);
    sp->turns = turns_new(desc);
    if (!sp->turns) goto out;
    sp->store = store;
    sp->type_k = desc->type_k;
    sp->type_v = desc->type_v;
    sp->n_layers = desc->n_layers;
    sp->token_bytes = token_bytes;
    strncpy(sp->model_name, desc->model_name ? desc->model_name : "", NAME_MAX_BYTES);
    rc = space_id(desc, &sp->id);
    if (rc < 0) goto out;
    *out = sp;
    sp = NULL;
out:
    if (rc == IMP_E_NOMEM) imp_fail(rc, "no memory for a space");
    imp_space_close(sp);
    return rc;
}

void imp_space_close(imp_space *space)
{
    if (!space) return;
    imp_turns_drop(space->turns);
    imp_free(space->layers);
    imp_free(space);
}

size_t imp_space_token_bytes(const imp_space *space) { return space ? space->token_bytes : 0; }

void imp_space_id(const imp_space *space, char out[33])
{
    if (!out) return;
    out[0] = '\0';
    if (space) imp_hash128_hex(space->id, out);
}
