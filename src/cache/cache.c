/* cache.c: what all policies share: entries, their table, the ghosts, admission. */
#include "cache/cache.h"

#include "base/alloc.h"
#include "base/status.h"
#include "cache/policy.h"

/* Ghosts: so many for each present entry, and at least so many. */
enum { GHOSTS_PER_PRESENT = 4, MIN_GHOSTS = 1024, FIRST_ENTRIES = 64 };

/* The moving average is the plain mean of the first so many uses, then each new one weighs 1 / this. */
enum { SHARE_WINDOW = 8 };

/* ----------------------------------------------------------------------------------------------------- lists ----- */

void imp_entry_list_first(imp_policy *p, imp_entry_list *l, uint32_t e)
{
    p->entries[e].prev = IMP_NIL;
    p->entries[e].next = l->head;
    if (l->head != IMP_NIL) p->entries[l->head].prev = e;
    else l->tail = e;
    l->head = e;
}

void imp_entry_list_last(imp_policy *p, imp_entry_list *l, uint32_t e)
{
    p->entries[e].prev = l->tail;
    p->entries[e].next = IMP_NIL;
    if (l->tail != IMP_NIL) p->entries[l->tail].next = e;
    else l->head = e;
    l->tail = e;
}

void imp_entry_list_take(imp_policy *p, imp_entry_list *l, uint32_t e)
{
    uint32_t prev = p->entries[e].prev, next = p->entries[e].next;
    if (prev != IMP_NIL) p->entries[prev].next = next;
    else l->head = next;
    if (next != IMP_NIL) p->entries[next].prev = prev;
    else l->tail = prev;
}

/* ----------------------------------------------------------------------------------------------------- table ----- */

static uint32_t home(const imp_policy *p, uint64_t key)
{
    key ^= key >> 32;
    key *= UINT64_C(0xd6e8feb86659fd93);
    key ^= key >> 32;
    key *= UINT64_C(0xd6e8feb86659fd93);
    return (uint32_t)(key ^ key >> 32) & (p->n_slots - 1);
}

static uint32_t find(const imp_policy *p, uint64_t key)
{
    for (uint32_t s = home(p, key); p->slots[s]; s = (s + 1) & (p->n_slots - 1)) {
        if (p->entries[p->slots[s] - 1].key == key) return p->slots[s] - 1;
    }
    return IMP_NIL;
}

static void table_put(imp_policy *p, uint32_t e)
{
    uint32_t s = home(p, p->entries[e].key);
    while (p->slots[s]) s = (s + 1) & (p->n_slots - 1);
    p->slots[s] = e + 1;
}

/* Take an entry out and close the gap. */
static void table_take(imp_policy *p, uint32_t e)
{
    uint32_t mask = p->n_slots - 1, hole = home(p, p->entries[e].key);
    while (p->slots[hole] != e + 1) hole = (hole + 1) & mask;
    for (uint32_t s = (hole + 1) & mask; p->slots[s]; s = (s + 1) & mask) {
        if (((s - home(p, p->entries[p->slots[s] - 1].key)) & mask) < ((s - hole) & mask)) continue;
        p->slots[hole] = p->slots[s];
        hole = s;
    }
    p->slots[hole] = 0;
}

/* --------------------------------------------------------------------------------------------------- entries ----- */

/* Twice as many entries, with a table that they fill to a half at most. On failure nothing changed. */
static bool grow(imp_policy *p)
{
    if (p->n_entries > UINT32_MAX / 8) return false;
    uint32_t n_entries = p->n_entries ? p->n_entries * 2 : FIRST_ENTRIES, n_slots = n_entries * 2;
    imp_entry *entries = imp_realloc_array(p->entries, n_entries, sizeof *entries);
    if (!entries) return false;
    p->entries = entries;
    if (p->ops->rank) {
        uint32_t *heap = imp_realloc_array(p->heap, n_entries, sizeof *heap);
        if (!heap) return false;
        p->heap = heap;
    }
    uint32_t *slots = imp_calloc(n_slots, sizeof *slots);
    if (!slots) return false;
    imp_free(p->slots);
    p->slots = slots;
    p->n_slots = n_slots;
    /* Called when no entry is unused: all of them are known. */
    for (uint32_t e = 0; e < p->n_entries; e++) table_put(p, e);
    for (uint32_t e = p->n_entries; e < n_entries; e++) p->entries[e].next = e + 1 < n_entries ? e + 1 : IMP_NIL;
    p->free = p->n_entries;
    p->n_entries = n_entries;
    return true;
}

/* An entry for a key that isn't known: neither in the table nor in any list yet. IMP_NIL: no memory. */
static uint32_t entry_new(imp_policy *p, uint64_t key)
{
    if (p->free == IMP_NIL && !grow(p)) return IMP_NIL;
    uint32_t e = p->free;
    p->free = p->entries[e].next;
    p->entries[e] = (imp_entry){.key = key};
    return e;
}

static void entry_give_back(imp_policy *p, uint32_t e)
{
    p->entries[e].next = p->free;
    p->free = e;
}

static void ghost_add(imp_policy *p, uint32_t e)
{
    imp_entry_list_first(p, &p->ghosts, e);
    p->n_ghosts++;
}

static void ghost_take(imp_policy *p, uint32_t e)
{
    imp_entry_list_take(p, &p->ghosts, e);
    p->n_ghosts--;
}

static void ghosts_trim(imp_policy *p)
{
    uint64_t most = (uint64_t)GHOSTS_PER_PRESENT * p->n_present;
    if (most < MIN_GHOSTS) most = MIN_GHOSTS;
    while (p->n_ghosts > most) {
        uint32_t e = p->ghosts.tail;
        ghost_take(p, e);
        table_take(p, e);
        entry_give_back(p, e);
    }
}

/* A present entry, already out of the policy's order, becomes a ghost. */
static void to_ghost(imp_policy *p, uint32_t e)
{
    p->entries[e].present = false;
    p->n_present--;
    ghost_add(p, e);
}

/* ---------------------------------------------------------------------------------------------------- public ----- */

int imp_policy_new(imp_cache kind, uint64_t capacity_bytes, imp_policy **out)
{
    static const imp_policy_ops *const all[] = {[IMP_CACHE_NONE] = &imp_policy_lru, /* never holds anything */
                                                [IMP_CACHE_LRU] = &imp_policy_lru,
                                                [IMP_CACHE_LFU] = &imp_policy_lfu,
                                                [IMP_CACHE_SCORE] = &imp_policy_score};
    *out = NULL;
    if ((size_t)kind >= sizeof all / sizeof *all) {
        return imp_fail(IMP_E_UNSUPPORTED, "cache policy %d isn't known", (int)kind);
    }
    imp_policy *p = imp_calloc(1, sizeof *p);
    if (!p) return imp_fail(IMP_E_NOMEM, "cache policy: no memory");
    p->ops = all[kind];
    p->capacity = kind == IMP_CACHE_NONE ? 0 : capacity_bytes;
    p->free = IMP_NIL;
    p->ghosts = p->order = (imp_entry_list){IMP_NIL, IMP_NIL};
    if (!grow(p)) {
        imp_policy_free(p);
        return imp_fail(IMP_E_NOMEM, "cache policy: no memory");
    }
    *out = p;
    return 0;
}

void imp_policy_free(imp_policy *p)
{
    if (!p) return;
    imp_free(p->entries);
    imp_free(p->slots);
    imp_free(p->heap);
    imp_free(p);
}

void imp_policy_use(imp_policy *p, uint64_t key, float important_share)
{
    if (p->capacity == 0) return;
    uint32_t e = find(p, key);
    if (e == IMP_NIL) {
        /* Without memory this use isn't counted; nothing else depends on it. */
        e = entry_new(p, key);
        if (e == IMP_NIL) return;
        table_put(p, e);
        ghost_add(p, e);
    }
    imp_entry *x = &p->entries[e];
    float share = important_share > 0 ? important_share < 1 ? important_share : 1 : 0; /* NaN: 0 */
    if (x->n_uses < UINT32_MAX) x->n_uses++;
    x->share += (share - x->share) / (float)(x->n_uses < SHARE_WINDOW ? x->n_uses : SHARE_WINDOW);
    x->tick = ++p->tick;
    if (x->present) {
        p->ops->used(p, e);
    } else {
        imp_entry_list_take(p, &p->ghosts, e);
        imp_entry_list_first(p, &p->ghosts, e);
        ghosts_trim(p);
    }
}

bool imp_policy_has(const imp_policy *p, uint64_t key)
{
    uint32_t e = find(p, key);
    return e != IMP_NIL && p->entries[e].present;
}

/* Does the policy let `e` in at the price of `victim`? */
static bool worth(const imp_policy *p, uint32_t e, uint32_t victim)
{
    return !p->ops->selective || p->ops->rank(&p->entries[victim]) < p->ops->rank(&p->entries[e]);
}

bool imp_policy_admit(imp_policy *p, uint64_t key, uint64_t n_bytes, uint64_t *victims, size_t max_victims,
                      size_t *n_victims)
{
    *n_victims = 0;
    uint32_t e = find(p, key);
    if (e != IMP_NIL && p->entries[e].present) return true;
    if (n_bytes == 0 || n_bytes > p->capacity) return false;
    bool known = e != IMP_NIL;
    if (!known) e = entry_new(p, key);
    if (e == IMP_NIL) return false;

    /* Take the victims out of the order one by one, chained by `next`, the latest first; then keep to it or undo it. */
    uint32_t out = IMP_NIL;
    size_t n_out = 0;
    bool fits = true;
    while (p->capacity - p->n_bytes < n_bytes) {
        uint32_t v = p->ops->worst(p); /* there is one: something takes up the room */
        fits = n_out < max_victims && worth(p, e, v);
        if (!fits) break;
        p->ops->leave(p, v);
        p->n_bytes -= p->entries[v].n_bytes;
        p->entries[v].next = out;
        out = v;
        victims[n_out++] = p->entries[v].key;
    }
    for (uint32_t v = out, next; v != IMP_NIL; v = next) {
        next = p->entries[v].next;
        if (fits) {
            to_ghost(p, v);
        } else {
            p->n_bytes += p->entries[v].n_bytes;
            p->ops->restore(p, v);
        }
    }
    if (!fits) {
        if (!known) entry_give_back(p, e);
        return false;
    }
    *n_victims = n_out;
    if (known) ghost_take(p, e);
    else table_put(p, e);
    p->entries[e].present = true;
    p->entries[e].n_bytes = n_bytes;
    p->entries[e].tick = ++p->tick;
    p->n_bytes += n_bytes;
    p->n_present++;
    p->ops->enter(p, e);
    ghosts_trim(p);
    return true;
}

void imp_policy_drop(imp_policy *p, uint64_t key)
{
    uint32_t e = find(p, key);
    if (e == IMP_NIL || !p->entries[e].present) return;
    p->ops->leave(p, e);
    p->n_bytes -= p->entries[e].n_bytes;
    to_ghost(p, e);
    ghosts_trim(p);
}

uint64_t imp_policy_bytes(const imp_policy *p) { return p->n_bytes; }

size_t imp_policy_count(const imp_policy *p) { return p->n_present; }
