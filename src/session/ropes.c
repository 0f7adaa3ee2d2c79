#include "session/ropes.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#include "base/alloc.h"
#include "base/status.h"

enum { LEAST_POSITIONS = 1024, MAX_IDLE = 4 };

struct imp_ropes_entry {
    imp_ropes_entry *next; /* the one used last comes first */
    imp_rope rope;
    float *factors; /* its own copy */
    imp_rope_table *table;
    size_t n;
    unsigned n_users;
    bool replaced; /* by a longer one: freed with its last user */
};

struct imp_ropes {
    pthread_mutex_t mutex; /* held while a table is made, so that another load waits for it instead of making its own */
    imp_ropes_entry *first;
};

int imp_ropes_new(imp_ropes **out)
{
    imp_ropes *r = *out = imp_calloc(1, sizeof *r);
    if (!r) return imp_fail(IMP_E_NOMEM, "no memory for RoPE tables");
    pthread_mutex_init(&r->mutex, NULL);
    return 0;
}

static void entry_free(imp_ropes_entry *e)
{
    imp_rope_table_free(e->table);
    imp_free(e->factors);
    imp_free(e);
}

void imp_ropes_free(imp_ropes *r)
{
    if (!r) return;
    imp_ropes_entry *next;
    for (imp_ropes_entry *e = r->first; e; e = next) {
        next = e->next;
        entry_free(e);
    }
    pthread_mutex_destroy(&r->mutex);
    imp_free(r);
}

/* Equal to the bit. What only YaRN uses is compared without it too: at worst there is a table more. */
static bool same_floats(const float *a, const float *b, size_t n)
{
    if (!a || !b) return a == b;
    return memcmp(a, b, n * sizeof *a) == 0;
}

static bool same(const imp_rope *a, const imp_rope *b)
{
    const float of_a[] = {a->base, a->freq_scale, a->ext_factor, a->attn_factor, a->beta_fast, a->beta_slow};
    const float of_b[] = {b->base, b->freq_scale, b->ext_factor, b->attn_factor, b->beta_fast, b->beta_slow};
    return a->pairs == b->pairs && a->first_dim == b->first_dim && a->n_dims == b->n_dims &&
           a->n_ctx_orig == b->n_ctx_orig && same_floats(of_a, of_b, sizeof of_a / sizeof of_a[0]) &&
           same_floats(a->factors, b->factors, a->n_dims / 2);
}

static int entry_new(const imp_rope *rope, uint32_t head_dim, size_t n, imp_ropes_entry **out)
{
    size_t room = LEAST_POSITIONS;
    while (room < n) room *= 2;
    int rc = 0;
    imp_ropes_entry *e = imp_calloc(1, sizeof *e);
    if (!e) return imp_fail(IMP_E_NOMEM, "no memory for RoPE tables");
    e->rope = *rope;
    e->n = room;
    if (rope->factors) {
        size_t bytes = rope->n_dims / 2 * sizeof *e->factors;
        e->rope.factors = e->factors = imp_malloc(bytes);
        if (e->factors) {
            memcpy(e->factors, rope->factors, bytes);
        } else {
            rc = imp_fail(IMP_E_NOMEM, "no memory for RoPE tables");
        }
    }
    if (rc == 0) rc = imp_rope_table_new(rope, head_dim, 0, room, &e->table);
    if (rc < 0) {
        entry_free(e);
        return rc;
    }
    *out = e;
    return 0;
}

/* Of those that nobody uses, keep a few. */
static void trim(imp_ropes *r)
{
    unsigned n_idle = 0;
    for (imp_ropes_entry **at = &r->first, *e; (e = *at);) {
        if (e->n_users == 0 && (e->replaced || ++n_idle > MAX_IDLE)) {
            *at = e->next;
            entry_free(e);
        } else {
            at = &e->next;
        }
    }
}

int imp_ropes_take(imp_ropes *r, const imp_rope *rope, uint32_t head_dim, size_t n, imp_ropes_entry **out)
{
    int rc = 0;
    *out = NULL;
    pthread_mutex_lock(&r->mutex);
    imp_ropes_entry **at = &r->first;
    while (*at && ((*at)->replaced || imp_rope_table_head_dim((*at)->table) != head_dim || !same(&(*at)->rope, rope)))
        at = &(*at)->next;
    imp_ropes_entry *e = *at;
    if (e && e->n >= n) {
        *at = e->next;
    } else {
        imp_ropes_entry *longer = NULL;
        rc = entry_new(rope, head_dim, n, &longer);
        if (rc == 0 && e) e->replaced = true;
        e = longer;
    }
    if (e) {
        e->next = r->first;
        r->first = e;
        e->n_users++;
        *out = e;
    }
    trim(r);
    pthread_mutex_unlock(&r->mutex);
    return rc;
}

void imp_ropes_give(imp_ropes *r, imp_ropes_entry *entry)
{
    if (!entry) return;
    pthread_mutex_lock(&r->mutex);
    entry->n_users--;
    trim(r);
    pthread_mutex_unlock(&r->mutex);
}

const imp_rope_table *imp_ropes_table(const imp_ropes_entry *entry) { return entry->table; }
