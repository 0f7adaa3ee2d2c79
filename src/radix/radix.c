/* radix.c: nodes in slabs, two hash tables, a heap.
 *
 *     slabs    nodes of 96 bytes, 256 to a slab but few in the first, known by a 32-bit index; their addresses don't
 *              move
 *     tables   open addressing over indices: one by id, one by (parent id, first token); 4/5 full at most
 *     blocks   the tokens of a node; after a split both halves point into one block, which counts them
 *     heap     the leaves that may be evicted, the next one on top; a node knows its place in it
 *
 * Invariants
 * R1  Everything an operation may need is reserved before it changes anything; so a failure changes nothing.
 * R2  A leaf is in the heap if and only if it has no lease and isn't pinned (once imp_radix_touch() was told).
 * R3  Both tables hold every node once and are equally large.
 * R4  A block's first tokens belong to the uppermost node that points into it, so a dead part is always at its end.
 * R5  A tree without nodes has no memory but its struct, and one of few nodes little: there may be many spaces, each
 *     with a tree, that hold little or once held something.
 */
#include "radix/radix.h"

#include <assert.h>
#include <string.h>

#include "base/alloc.h"
#include "base/status.h"

#define NIL UINT32_MAX

enum { SLAB_BITS = 8, SLAB_NODES = 1 << SLAB_BITS, FIRST_NODES = 8, FIRST_SLOTS = 16 };

typedef struct block {
    uint32_t n_refs, n_tokens;
    int32_t tokens[];
} block;

typedef struct node {
    imp_radix_node pub;  /* first, so that what the owner holds is the node itself */
    uint32_t token_at;   /* index of pub.tokens[0] in its block */
    uint32_t below;      /* with children: the first of them; else the place in the heap, or NIL */
    uint32_t prev, next; /* siblings, as they came; the first one's prev is the last one. Free nodes: next */
} node;

static_assert(sizeof(node) <= 96, "a node is to cost no more than 96 bytes");

enum { BY_ID, BY_TOKEN };

struct imp_radix {
    node **slabs;
    uint32_t n_slabs, slabs_cap;
    uint32_t free; /* list of unused nodes */
    uint32_t n_nodes;
    uint32_t *slots[2]; /* by id, by token: index + 1, 0 for empty */
    uint32_t n_slots;   /* of each; a power of two */
    uint32_t *heap;
    uint32_t n_heap, heap_cap;
    uint32_t root_first, root_children;
    size_t n_bytes;
};

static node *at(const imp_radix *t, uint32_t i) { return &t->slabs[i >> SLAB_BITS][i & (SLAB_NODES - 1)]; }

static block *block_of(const node *n)
{
    return (block *)(void *)((char *)(n->pub.tokens - n->token_at) - offsetof(block, tokens));
}

static size_t block_bytes(size_t n_tokens) { return sizeof(block) + n_tokens * sizeof(int32_t); }

/* ----------------------------------------------------------------------------------------------------- tables ---- */

static uint64_t mix(uint64_t x)
{
    x ^= x >> 32;
    x *= UINT64_C(0xd6e8feb86659fd93);
    x ^= x >> 32;
    x *= UINT64_C(0xd6e8feb86659fd93);
    return x ^ x >> 32;
}

static uint32_t slot_of_id(const imp_radix *t, uint64_t id) { return (uint32_t)mix(id) & (t->n_slots - 1); }

static uint32_t slot_of_token(const imp_radix *t, uint64_t parent, int32_t token)
{
    return (uint32_t)mix(parent * UINT64_C(0x9e3779b97f4a7c15) + (uint32_t)token) & (t->n_slots - 1);
}

static uint32_t home(const imp_radix *t, int which, uint32_t i)
{
    const imp_radix_node *n = &at(t, i)->pub;
    return which == BY_ID ? slot_of_id(t, n->id) : slot_of_token(t, n->parent, n->tokens[0]);
}

static void table_put(imp_radix *t, int which, uint32_t i)
{
    uint32_t *slots = t->slots[which], s = home(t, which, i);
    while (slots[s]) s = (s + 1) & (t->n_slots - 1);
    slots[s] = i + 1;
}

/* Take an entry out and close the gap, so that no marks of deleted entries are needed. */
static void table_take(imp_radix *t, int which, uint32_t i)
{
    uint32_t *slots = t->slots[which], mask = t->n_slots - 1, hole = home(t, which, i);
    while (slots[hole] != i + 1) hole = (hole + 1) & mask;
    for (uint32_t s = (hole + 1) & mask; slots[s]; s = (s + 1) & mask) {
        /* An entry may move back to the hole unless that lies before its home. */
        if (((s - home(t, which, slots[s] - 1)) & mask) < ((s - hole) & mask)) continue;
        slots[hole] = slots[s];
        hole = s;
    }
    slots[hole] = 0;
}

static uint32_t find_id(const imp_radix *t, uint64_t id)
{
    if (t->n_slots == 0) return NIL;
    for (uint32_t s = slot_of_id(t, id); t->slots[BY_ID][s]; s = (s + 1) & (t->n_slots - 1)) {
        uint32_t i = t->slots[BY_ID][s] - 1;
        if (at(t, i)->pub.id == id) return i;
    }
    return NIL;
}

static uint32_t find_child(const imp_radix *t, uint64_t parent, int32_t token)
{
    if (t->n_slots == 0) return NIL;
    for (uint32_t s = slot_of_token(t, parent, token); t->slots[BY_TOKEN][s]; s = (s + 1) & (t->n_slots - 1)) {
        uint32_t i = t->slots[BY_TOKEN][s] - 1;
        const imp_radix_node *n = &at(t, i)->pub;
        if (n->parent == parent && n->tokens[0] == token) return i;
    }
    return NIL;
}

/* ------------------------------------------------------------------------------------------------------- heap ---- */

static bool goes_before(const imp_radix *t, uint32_t a, uint32_t b)
{
    const imp_radix_node *x = &at(t, a)->pub, *y = &at(t, b)->pub;
    int64_t x_s = imp_radix_worth_s(x), y_s = imp_radix_worth_s(y);
    if (x_s != y_s) return x_s < y_s;
    if (x->depth != y->depth) return x->depth > y->depth;
    return x->id < y->id;
}

static void heap_set(imp_radix *t, uint32_t place, uint32_t i)
{
    t->heap[place] = i;
    at(t, i)->below = place;
}

/* Move the node at `place` up or down to where it belongs. */
static void heap_fix(imp_radix *t, uint32_t place)
{
    uint32_t i = t->heap[place];
    while (place > 0 && goes_before(t, i, t->heap[(place - 1) / 2])) {
        heap_set(t, place, t->heap[(place - 1) / 2]);
        place = (place - 1) / 2;
    }
    for (;;) {
        uint64_t next = 2 * (uint64_t)place + 1;
        if (next >= t->n_heap) break;
        if (next + 1 < t->n_heap && goes_before(t, t->heap[next + 1], t->heap[next])) next++;
        if (!goes_before(t, t->heap[next], i)) break;
        heap_set(t, place, t->heap[next]);
        place = (uint32_t)next;
    }
    heap_set(t, place, i);
}

/* A leaf leaves the heap, if it is in it. */
static void heap_take(imp_radix *t, uint32_t i)
{
    uint32_t place = at(t, i)->below;
    if (place == NIL) return;
    uint32_t last = t->heap[--t->n_heap];
    if (place < t->n_heap) {
        heap_set(t, place, last);
        heap_fix(t, place);
    }
    at(t, i)->below = NIL;
}

/* Put R2 right for one node. The heap has room for all nodes. */
static void heap_settle(imp_radix *t, uint32_t i)
{
    node *n = at(t, i);
    if (n->pub.n_children > 0) return;
    if (n->pub.leases > 0 || n->pub.pinned) {
        heap_take(t, i);
    } else {
        if (n->below == NIL) heap_set(t, t->n_heap++, i);
        heap_fix(t, n->below);
    }
}

/* ----------------------------------------------------------------------------------------------------- memory ---- */

static int no_memory(void) { return imp_fail(IMP_E_NOMEM, "token tree: no memory"); }

static int grow_tables(imp_radix *t)
{
    uint32_t n_slots = t->n_slots ? t->n_slots * 2 : FIRST_SLOTS;
    uint32_t *slots[2] = {imp_calloc(n_slots, sizeof(uint32_t)), imp_calloc(n_slots, sizeof(uint32_t))};
    if (!slots[0] || !slots[1]) {
        imp_free(slots[0]);
        imp_free(slots[1]);
        return no_memory();
    }
    uint32_t *old = t->slots[BY_ID], n_old = t->n_slots;
    imp_free(t->slots[BY_TOKEN]);
    t->slots[BY_ID] = slots[0];
    t->slots[BY_TOKEN] = slots[1];
    t->n_slots = n_slots;
    t->n_bytes += 2 * sizeof(uint32_t) * (size_t)(n_slots - n_old);
    for (uint32_t s = 0; s < n_old; s++) {
        if (!old[s]) continue;
        table_put(t, BY_ID, old[s] - 1);
        table_put(t, BY_TOKEN, old[s] - 1);
    }
    imp_free(old);
    return 0;
}

static int grow_heap(imp_radix *t)
{
    uint32_t cap = t->heap_cap + t->heap_cap / 4 + 16;
    uint32_t *heap = imp_realloc_array(t->heap, cap, sizeof *heap);
    if (!heap) return no_memory();
    t->n_bytes += sizeof *heap * (size_t)(cap - t->heap_cap);
    t->heap = heap;
    t->heap_cap = cap;
    return 0;
}

static int grow_slabs(imp_radix *t)
{
    if (t->n_slabs == t->slabs_cap) {
        uint32_t cap = t->slabs_cap ? t->slabs_cap * 2 : 4;
        node **slabs = imp_realloc_array(t->slabs, cap, sizeof *slabs);
        if (!slabs) return no_memory();
        t->n_bytes += sizeof *slabs * (size_t)(cap - t->slabs_cap);
        t->slabs = slabs;
        t->slabs_cap = cap;
    }
    uint32_t n = t->n_slabs == 0 ? FIRST_NODES : SLAB_NODES, first = t->n_slabs << SLAB_BITS;
    node *slab = imp_malloc(n * sizeof *slab);
    if (!slab) return no_memory();
    t->n_bytes += n * sizeof *slab;
    for (uint32_t k = 0; k < n; k++) slab[k].next = k + 1 < n ? first + k + 1 : NIL;
    t->slabs[t->n_slabs++] = slab;
    t->free = first;
    return 0;
}

/* Room for one more node everywhere (R1). */
static int reserve(imp_radix *t)
{
    int rc = 0;
    if (t->n_nodes >= UINT32_MAX / 4) return imp_fail(IMP_E_FULL, "token tree: too many nodes");
    if (((uint64_t)t->n_nodes + 1) * 5 > (uint64_t)t->n_slots * 4) rc = grow_tables(t);
    if (!rc && t->n_nodes + 1 > t->heap_cap) rc = grow_heap(t);
    if (!rc && t->free == NIL) rc = grow_slabs(t);
    return rc;
}

static uint32_t take_node(imp_radix *t)
{
    uint32_t i = t->free;
    t->free = at(t, i)->next;
    t->n_nodes++;
    return i;
}

/* Make it empty, all but the blocks freed. */
static void release(imp_radix *t)
{
    for (uint32_t k = 0; k < t->n_slabs; k++) imp_free(t->slabs[k]);
    imp_free(t->slabs);
    imp_free(t->slots[BY_ID]);
    imp_free(t->slots[BY_TOKEN]);
    imp_free(t->heap);
    *t = (imp_radix){.free = NIL, .root_first = NIL, .n_bytes = sizeof *t};
}

int imp_radix_new(imp_radix **out)
{
    *out = NULL;
    imp_radix *t = imp_calloc(1, sizeof *t);
    if (!t) return no_memory();
    release(t);
    *out = t;
    return 0;
}

static void block_release(imp_radix *t, block *b)
{
    if (--b->n_refs > 0) return;
    t->n_bytes -= block_bytes(b->n_tokens);
    imp_free(b);
}

void imp_radix_free(imp_radix *t)
{
    if (!t) return;
    for (uint32_t s = 0; s < t->n_slots; s++) {
        if (t->slots[BY_ID][s]) block_release(t, block_of(at(t, t->slots[BY_ID][s] - 1)));
    }
    release(t);
    imp_free(t);
}

/* ------------------------------------------------------------------------------------------------ the tree's shape */

/* Put node `i` last among the children of `parent` (NIL: the root). */
static void attach(imp_radix *t, uint32_t parent, uint32_t i)
{
    node *n = at(t, i);
    if (parent != NIL && at(t, parent)->pub.n_children == 0) heap_take(t, parent);
    uint32_t *first = parent == NIL ? &t->root_first : &at(t, parent)->below;
    uint32_t *count = parent == NIL ? &t->root_children : &at(t, parent)->pub.n_children;
    n->next = NIL;
    if (*count == 0) {
        n->prev = i;
        *first = i;
    } else {
        node *head = at(t, *first);
        n->prev = head->prev;
        at(t, head->prev)->next = i;
        head->prev = i;
    }
    (*count)++;
}

static void detach(imp_radix *t, uint32_t parent, uint32_t i)
{
    const node *n = at(t, i);
    uint32_t *first = parent == NIL ? &t->root_first : &at(t, parent)->below;
    uint32_t *count = parent == NIL ? &t->root_children : &at(t, parent)->pub.n_children;
    if (n->next != NIL) at(t, n->next)->prev = n->prev;
    else if (*first != i) at(t, *first)->prev = n->prev;
    if (*first == i) *first = n->next;
    else at(t, n->prev)->next = n->next;
    (*count)--;
    if (*count == 0 && parent != NIL) heap_settle(t, parent);
}

int imp_radix_add(imp_radix *t, const imp_radix_node *src)
{
    unsigned long long id = src->id, parent_id = src->parent;
    if (src->id == 0) return imp_fail(IMP_E_ARG, "token tree: node id 0");
    if (!src->tokens || src->n_tokens == 0) return imp_fail(IMP_E_ARG, "token tree: node %llu has no tokens", id);
    if (find_id(t, src->id) != NIL) return imp_fail(IMP_E_ARG, "token tree: node %llu exists", id);
    uint32_t parent = NIL;
    uint64_t depth = 0;
    if (src->parent != 0) {
        parent = find_id(t, src->parent);
        if (parent == NIL) return imp_fail(IMP_E_ARG, "token tree: node %llu: no parent %llu", id, parent_id);
        depth = (uint64_t)at(t, parent)->pub.depth + at(t, parent)->pub.n_tokens;
    }
    if (find_child(t, src->parent, src->tokens[0]) != NIL) {
        return imp_fail(IMP_E_ARG, "token tree: node %llu starts like another child of %llu", id, parent_id);
    }
    if (depth + src->n_tokens > UINT32_MAX || (uint64_t)src->segment_first + src->n_tokens > UINT32_MAX) {
        return imp_fail(IMP_E_ARG, "token tree: node %llu lies too deep", id);
    }
    int rc = reserve(t);
    if (rc) return rc;
    block *b = imp_malloc(block_bytes(src->n_tokens));
    if (!b) return no_memory();

    b->n_refs = 1;
    b->n_tokens = src->n_tokens;
    memcpy(b->tokens, src->tokens, src->n_tokens * sizeof(int32_t));
    t->n_bytes += block_bytes(src->n_tokens);

    uint32_t i = take_node(t);
    node *n = at(t, i);
    n->pub = *src;
    n->pub.depth = (uint32_t)depth;
    n->pub.n_children = 0;
    n->pub.tokens = b->tokens;
    n->token_at = 0;
    n->below = NIL;
    table_put(t, BY_ID, i);
    table_put(t, BY_TOKEN, i);
    attach(t, parent, i);
    heap_settle(t, i);
    return 0;
}

int imp_radix_split(imp_radix *t, uint64_t id, uint32_t cut, uint64_t new_id)
{
    unsigned long long shown = id, shown_new = new_id;
    uint32_t u = find_id(t, id);
    if (u == NIL) return imp_fail(IMP_E_NOTFOUND, "token tree: no node %llu", shown);
    if (cut == 0 || cut >= at(t, u)->pub.n_tokens) {
        return imp_fail(IMP_E_ARG, "token tree: node %llu can't be cut after %u of %u tokens", shown, (unsigned)cut,
                        (unsigned)at(t, u)->pub.n_tokens);
    }
    if (new_id == 0 || find_id(t, new_id) != NIL) {
        return imp_fail(IMP_E_ARG, "token tree: node %llu is 0 or exists", shown_new);
    }
    int rc = reserve(t);
    if (rc) return rc;

    uint32_t l = take_node(t);
    node *upper = at(t, u), *lower = at(t, l);
    if (upper->pub.n_children == 0) heap_take(t, u);
    *lower = *upper;
    lower->pub.id = new_id;
    lower->pub.parent = id;
    lower->pub.segment_first += cut;
    lower->pub.depth += cut;
    lower->pub.n_tokens -= cut;
    lower->pub.tokens += cut;
    lower->pub.leases = 0;
    lower->token_at += cut;
    block_of(upper)->n_refs++;
    if (lower->pub.n_children > 0) {
        /* Children are found by their parent's id: first all of these, then the lower half takes its place. */
        for (uint32_t c = lower->below; c != NIL; c = at(t, c)->next) {
            table_take(t, BY_TOKEN, c);
            at(t, c)->pub.parent = new_id;
            table_put(t, BY_TOKEN, c);
        }
    }
    upper->pub.n_tokens = cut;
    upper->pub.n_children = 0;
    upper->below = NIL;
    table_put(t, BY_ID, l);
    table_put(t, BY_TOKEN, l);
    attach(t, u, l);
    heap_settle(t, l);
    return 0;
}

int imp_radix_remove(imp_radix *t, uint64_t id)
{
    unsigned long long shown = id;
    uint32_t i = find_id(t, id);
    if (i == NIL) return imp_fail(IMP_E_NOTFOUND, "token tree: no node %llu", shown);
    node *n = at(t, i);
    if (n->pub.n_children > 0) return imp_fail(IMP_E_ARG, "token tree: node %llu has children", shown);

    uint32_t parent = n->pub.parent ? find_id(t, n->pub.parent) : NIL;
    block *b = block_of(n);
    heap_take(t, i);
    table_take(t, BY_TOKEN, i);
    table_take(t, BY_ID, i);
    detach(t, parent, i);
    n->next = t->free;
    t->free = i;
    t->n_nodes--;

    /* Once a split node's tail is gone, its tokens needn't stay (R4). If the block can't be made smaller, it stays. */
    node *p = parent == NIL ? NULL : at(t, parent);
    bool shrink = b->n_refs == 2 && p && block_of(p) == b;
    block_release(t, b);
    if (shrink) {
        uint32_t keep = p->token_at + p->pub.n_tokens;
        block *smaller = imp_realloc(b, block_bytes(keep));
        if (smaller) {
            t->n_bytes -= (smaller->n_tokens - keep) * sizeof(int32_t);
            smaller->n_tokens = keep;
            p->pub.tokens = smaller->tokens + p->token_at;
        }
    }
    if (t->n_nodes == 0) release(t);
    return 0;
}

/* ----------------------------------------------------------------------------------------------------- look up ---- */

imp_radix_node *imp_radix_get(imp_radix *t, uint64_t id)
{
    uint32_t i = find_id(t, id);
    return i == NIL ? NULL : &at(t, i)->pub;
}

/* How many of the first n tokens are equal. Most nodes of a match are equal as a whole, so memcmp() goes first. */
static size_t n_common(const int32_t *a, const int32_t *b, size_t n)
{
    if (memcmp(a, b, n * sizeof *a) == 0) return n;
    size_t i = 0;
    for (; i + 16 <= n && memcmp(a + i, b + i, 16 * sizeof *a) == 0; i += 16) continue;
    while (i < n && a[i] == b[i]) i++;
    return i;
}

size_t imp_radix_match(imp_radix *t, const int32_t *tokens, size_t n_tokens, bool exact_only, imp_radix_step *steps,
                       size_t max_steps, size_t *n_matched)
{
    size_t n_steps = 0, done = 0;
    uint64_t parent = 0;
    while (done < n_tokens) {
        uint32_t i = find_child(t, parent, tokens[done]);
        if (i == NIL) break;
        imp_radix_node *n = &at(t, i)->pub;
        if (exact_only && n->derived) break;
        size_t left = n_tokens - done;
        uint32_t same = (uint32_t)n_common(n->tokens, tokens + done, left < n->n_tokens ? left : n->n_tokens);
        if (n_steps < max_steps) steps[n_steps] = (imp_radix_step){.node = n, .n_matched = same};
        n_steps++;
        done += same;
        if (same < n->n_tokens) break;
        parent = n->id;
    }
    *n_matched = done;
    return n_steps;
}

/* From node `i` on; `top` (NIL: the root) and its siblings end it. */
static int walk(imp_radix *t, uint32_t i, uint32_t top, int (*fn)(imp_radix_node *node, void *user), void *user)
{
    while (i != NIL) {
        int rc = fn(&at(t, i)->pub, user);
        if (rc) return rc;
        if (at(t, i)->pub.n_children > 0) {
            i = at(t, i)->below;
            continue;
        }
        while (i != NIL && i != top && at(t, i)->next == NIL) {
            uint64_t parent = at(t, i)->pub.parent;
            i = parent ? find_id(t, parent) : NIL;
        }
        if (i == top) break;
        i = at(t, i)->next;
    }
    return 0;
}

int imp_radix_walk(imp_radix *t, int (*fn)(imp_radix_node *node, void *user), void *user)
{
    return walk(t, t->root_first, NIL, fn, user);
}

int imp_radix_walk_below(imp_radix *t, uint64_t id, int (*fn)(imp_radix_node *node, void *user), void *user)
{
    uint32_t i = find_id(t, id);
    return i == NIL ? imp_fail(IMP_E_NOTFOUND, "token tree: no node %llu", (unsigned long long)id) : walk(t, i, i, fn, user);
}

imp_radix_node *imp_radix_victim(imp_radix *t) { return t->n_heap > 0 ? &at(t, t->heap[0])->pub : NULL; }

void imp_radix_touch(imp_radix *t, imp_radix_node *n)
{
    uint32_t i = find_id(t, n->id);
    if (i != NIL) heap_settle(t, i);
}

size_t imp_radix_count(const imp_radix *t) { return t->n_nodes; }

size_t imp_radix_memory(const imp_radix *t) { return t->n_bytes; }
