#include "store/idmap.h"

#include <string.h>

#include "base/alloc.h"
#include "base/status.h"

enum { FIRST_SLOTS = 64 };

/* Ids of nodes count up, ids of segments are random: multiply to spread both. */
static size_t home(const imp_idmap *m, uint64_t key)
{
    return (size_t)((key * 0x9e3779b97f4a7c15u) >> 32) & (m->n_slots - 1);
}

static size_t find(const imp_idmap *m, uint64_t key)
{
    size_t i = home(m, key);
    while (m->slots[i].key != 0 && m->slots[i].key != key) i = (i + 1) & (m->n_slots - 1);
    return i;
}

static int grow(imp_idmap *m)
{
    imp_idmap bigger = {.n_slots = m->n_slots ? m->n_slots * 2 : FIRST_SLOTS, .n = m->n};
    bigger.slots = imp_calloc(bigger.n_slots, sizeof *bigger.slots);
    if (!bigger.slots) return imp_fail(IMP_E_NOMEM, "no memory for a table of %zu ids", bigger.n_slots);
    for (size_t i = 0; i < m->n_slots; i++) {
        if (m->slots[i].key) bigger.slots[find(&bigger, m->slots[i].key)] = m->slots[i];
    }
    imp_free(m->slots);
    *m = bigger;
    return 0;
}

int imp_idmap_put(imp_idmap *m, uint64_t key, void *value)
{
    if ((m->n + 1) * 4 > m->n_slots * 3) {
        int rc = grow(m);
        if (rc < 0) return rc;
    }
    size_t i = find(m, key);
    if (m->slots[i].key == 0) m->n++;
    m->slots[i] = (imp_idmap_slot){key, value};
    return 0;
}

void *imp_idmap_get(const imp_idmap *m, uint64_t key)
{
    return m->n ? m->slots[find(m, key)].value : NULL;
}

void imp_idmap_remove(imp_idmap *m, uint64_t key)
{
    if (m->n == 0) return;
    size_t mask = m->n_slots - 1, hole = find(m, key);
    if (m->slots[hole].key == 0) return;
    /* Close the gap: whatever follows without a break and isn't at home past the hole moves into it. */
    for (size_t i = (hole + 1) & mask; m->slots[i].key != 0; i = (i + 1) & mask) {
        if (((i - home(m, m->slots[i].key)) & mask) >= ((i - hole) & mask)) {
            m->slots[hole] = m->slots[i];
            hole = i;
        }
    }
    m->slots[hole] = (imp_idmap_slot){0, NULL};
    m->n--;
}

void imp_idmap_free(imp_idmap *m)
{
    imp_free(m->slots);
    *m = (imp_idmap){0};
}
