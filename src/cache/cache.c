/* cache.c: what all policies share: entries, their table, the ghosts, admission. */
#include "cache/cache.h"

#include <float.h>

#include "base/alloc.h"
#include "base/status.h"
#include "cache/policy.h"

/* Ghosts: so many for each present entry, and at least so many. */
enum { GHOSTS_PER_PRESENT = 4, MIN_GHOSTS = 1024, FIRST_ENTRIES = 64 };

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
    for (imp_level l = 0; l < IMP_LEVELS; l++) {
        imp_tier_order *o = &p->tiers[l];
        if (!p->ops->rank || o->capacity == 0) continue;
        uint32_t *heap = imp_realloc_array(o->heap, n_entries, sizeof *heap);
        if (!heap) return false;
        o->heap = heap;
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
    p->entries[e] = (imp_entry){.key = key, .rank = p->ops->unused, .level = IMP_LEVEL_NONE};
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
    uint64_t most = (uint64_t)GHOSTS_PER_PRESENT * imp_policy_present(p);
    if (most < MIN_GHOSTS) most = MIN_GHOSTS;
    while (p->n_ghosts > most) {
        uint32_t e = p->ghosts.tail;
        ghost_take(p, e);
        table_take(p, e);
        entry_give_back(p, e);
    }
}

/* An entry that is out of its tier's order becomes a ghost. */
static void to_ghost(imp_policy *p, uint32_t e)
{
    p->entries[e].level = IMP_LEVEL_NONE;
    ghost_add(p, e);
}

/* ----------------------------------------------------------------------------------------------------- tiers ----- */

static void leave(imp_policy *p, uint32_t e)
{
    imp_tier_order *o = &p->tiers[p->entries[e].level];
    p->ops->leave(p, e);
    o->n_bytes -= p->entries[e].n_bytes;
    o->n_entries--;
}

static void enter(imp_policy *p, imp_level level, uint32_t e)
{
    imp_tier_order *o = &p->tiers[level];
    p->entries[e].level = level;
    p->entries[e].tick = ++p->tick;
    o->n_bytes += p->entries[e].n_bytes;
    o->n_entries++;
    p->ops->enter(p, e);
}

static void restore(imp_policy *p, uint32_t e)
{
    imp_tier_order *o = &p->tiers[p->entries[e].level];
    o->n_bytes += p->entries[e].n_bytes;
    o->n_entries++;
    p->ops->restore(p, e);
}

/* The last tier takes what LRU and LFU bring; else a chunk comes in for chunks that are worth less. */
static bool worth(const imp_policy *p, imp_level level, uint32_t e, uint32_t victim)
{
    bool last = level == IMP_LEVEL_HOST || p->tiers[IMP_LEVEL_HOST].capacity == 0;
    if (!p->ops->rank || (last && !p->ops->selective)) return true;
    return p->entries[victim].rank < p->entries[e].rank;
}

/* Take out of a tier what has to go for `e` of `n_bytes`, the first to go first, or nothing. Those in `*out` are in no
 * order and no list of ghosts. */
static bool make_room(imp_policy *p, imp_level level, uint32_t e, uint64_t n_bytes, imp_moved *moved,
                      imp_entry_list *out)
{
    imp_tier_order *o = &p->tiers[level];
    size_t n_before = moved->n;
    *out = (imp_entry_list){IMP_NIL, IMP_NIL};
    if (n_bytes > o->capacity) return false;
    bool fits = true;
    while (fits && o->capacity - o->n_bytes < n_bytes) {
        uint32_t v = p->ops->worst(p, level); /* there is one: something takes up the room */
        fits = moved->n < moved->max && worth(p, level, e, v);
        if (!fits) break;
        leave(p, v);
        imp_entry_list_last(p, out, v);
        moved->keys[moved->n++] = p->entries[v].key;
    }
    if (fits) return true;
    for (uint32_t v = out->tail; v != IMP_NIL; v = out->tail) { /* the last to go comes back first */
        imp_entry_list_take(p, out, v);
        restore(p, v);
    }
    moved->n = n_before;
    return false;
}

static void to_ghosts(imp_policy *p, imp_entry_list *l)
{
    for (uint32_t v = l->head; v != IMP_NIL; v = l->head) {
        imp_entry_list_take(p, l, v);
        to_ghost(p, v);
    }
}

/* What was displaced from the device goes to the host under the host's rule, or out. */
static void demote(imp_policy *p, imp_entry_list *displaced, imp_moved *moved)
{
    for (uint32_t e = displaced->head; e != IMP_NIL; e = displaced->head) {
        imp_entry_list out;
        imp_entry_list_take(p, displaced, e);
        if (make_room(p, IMP_LEVEL_HOST, e, p->entries[e].n_bytes, moved, &out)) {
            to_ghosts(p, &out);
            enter(p, IMP_LEVEL_HOST, e);
        } else {
            to_ghost(p, e);
        }
    }
}

/* ---------------------------------------------------------------------------------------------------- public ----- */

int imp_policy_new(imp_cache kind, uint64_t device_bytes, uint64_t host_bytes, imp_policy **out)
{
    static const imp_policy_ops *const all[] = {[IMP_CACHE_NONE] = &imp_policy_lru, /* never holds anything */
                                                [IMP_CACHE_LRU] = &imp_policy_lru,
                                                [IMP_CACHE_LFU] = &imp_policy_lfu,
                                                [IMP_CACHE_SCORE] = &imp_policy_score,
                                                [IMP_CACHE_ATTENTION] = &imp_policy_attention,
                                                [IMP_CACHE_AGED] = &imp_policy_aged};
    *out = NULL;
    if ((size_t)kind >= sizeof all / sizeof *all) {
        return imp_fail(IMP_E_UNSUPPORTED, "cache policy %d isn't known", (int)kind);
    }
    imp_policy *p = imp_calloc(1, sizeof *p);
    if (!p) return imp_fail(IMP_E_NOMEM, "cache policy: no memory");
    p->ops = all[kind];
    p->free = IMP_NIL;
    p->ghosts = (imp_entry_list){IMP_NIL, IMP_NIL};
    for (imp_level l = 0; l < IMP_LEVELS; l++) p->tiers[l].list = p->ghosts;
    if (kind != IMP_CACHE_NONE) {
        p->tiers[IMP_LEVEL_DEVICE].capacity = device_bytes;
        p->tiers[IMP_LEVEL_HOST].capacity = host_bytes;
    }
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
    for (imp_level l = 0; l < IMP_LEVELS; l++) imp_free(p->tiers[l].heap);
    imp_free(p);
}

void imp_policy_use(imp_policy *p, uint64_t key, float share)
{
    if (p->tiers[IMP_LEVEL_DEVICE].capacity == 0 && p->tiers[IMP_LEVEL_HOST].capacity == 0) return;
    uint32_t e = find(p, key);
    if (e == IMP_NIL) {
        /* Without memory this use isn't counted; nothing else depends on it. */
        e = entry_new(p, key);
        if (e == IMP_NIL) return;
        table_put(p, e);
        ghost_add(p, e);
    }
    imp_entry *x = &p->entries[e];
    if (x->n_uses < UINT32_MAX) x->n_uses++;
    share = share > 0 ? share < FLT_MAX ? share : FLT_MAX : 0; /* NaN: 0 */
    if (p->ops->rank) x->rank = p->ops->rank(p, x, share);
    x->tick = ++p->tick;
    if (x->level != IMP_LEVEL_NONE) {
        p->ops->used(p, e);
    } else {
        imp_entry_list_take(p, &p->ghosts, e);
        imp_entry_list_first(p, &p->ghosts, e);
        ghosts_trim(p);
    }
}

imp_level imp_policy_where(const imp_policy *p, uint64_t key)
{
    uint32_t e = find(p, key);
    return e != IMP_NIL ? p->entries[e].level : IMP_LEVEL_NONE;
}

imp_level imp_policy_admit(imp_policy *p, uint64_t key, uint64_t n_bytes, imp_moved *moved)
{
    moved->n = 0;
    uint32_t e = find(p, key);
    bool known = e != IMP_NIL;
    if (n_bytes == 0 || (known && p->entries[e].level != IMP_LEVEL_NONE)) return IMP_LEVEL_NONE;
    if (!known) e = entry_new(p, key);
    if (e == IMP_NIL) return IMP_LEVEL_NONE;

    imp_entry_list out;
    imp_level level = IMP_LEVEL_DEVICE;
    while (level < IMP_LEVELS && !make_room(p, level, e, n_bytes, moved, &out)) level++;
    if (level == IMP_LEVELS) {
        if (!known) entry_give_back(p, e);
        return IMP_LEVEL_NONE;
    }
    if (known) ghost_take(p, e);
    else table_put(p, e);
    p->entries[e].n_bytes = n_bytes;
    enter(p, level, e);
    if (level == IMP_LEVEL_DEVICE) demote(p, &out, moved);
    else to_ghosts(p, &out);
    ghosts_trim(p);
    return level;
}

bool imp_policy_promote(imp_policy *p, uint64_t key, imp_moved *moved)
{
    moved->n = 0;
    if (p->tiers[IMP_LEVEL_DEVICE].capacity == 0) return false;
    uint32_t e = find(p, key);
    imp_entry_list out;
    if (e == IMP_NIL || p->entries[e].level != IMP_LEVEL_HOST) return false;
    if (!make_room(p, IMP_LEVEL_DEVICE, e, p->entries[e].n_bytes, moved, &out)) return false;
    leave(p, e); /* first: what it displaces may need the room */
    enter(p, IMP_LEVEL_DEVICE, e);
    demote(p, &out, moved);
    ghosts_trim(p);
    return true;
}

void imp_policy_drop(imp_policy *p, uint64_t key)
{
    uint32_t e = find(p, key);
    if (e == IMP_NIL || p->entries[e].level == IMP_LEVEL_NONE) return;
    leave(p, e);
    to_ghost(p, e);
    ghosts_trim(p);
}

uint64_t imp_policy_bytes(const imp_policy *p, imp_level level) { return p->tiers[level].n_bytes; }

size_t imp_policy_count(const imp_policy *p, imp_level level) { return p->tiers[level].n_entries; }
