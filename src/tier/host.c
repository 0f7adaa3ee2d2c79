/* host.c: the table of entries, and the moves that the policy decides.
 *
 * The policy's word comes first, under the lock; the bytes follow. A move holds its entry while it copies, and puts the
 * copy in the entry's place only if that is still there and the policy still wants the chunk in that tier. Else the
 * thread whose call changed the policy's mind has seen the entry and does what it takes. */
#include "tier/host.h"

#include <pthread.h>
#include <string.h>

#include "base/alloc.h"
#include "base/hash.h"
#include "base/status.h"
#include "cache/cache.h"
#include "tier/device.h"
#include "tier/heap.h"

/* A chunk that comes in displaces at most so many; chunks differ in size by region and layer only, so a few do. */
#define MAX_MOVED 256

/* A segment's chunks lie in so many buckets in a row, whose first follows from the segment: to forget it means to look
 * there. The upper bits of a hash are the segment's, the lower ones the chunk's. */
#define WINDOW 1024u
#define SEGMENT_BITS 24

struct imp_host_entry {
    imp_host_key key;
    uint64_t hash;
    imp_host_entry *next; /* in its bucket; out of the table, in a list to free */
    void *bytes;          /* host: behind the entry; device: the device's */
    size_t n_bytes;
    uint32_t holders;
    bool on_device;
    bool gone;            /* no longer in the table; freed by the last holder */
};

/* The bytes follow the entry, at the start of a cache line. On the device they don't, and count the same. */
#define ENTRY_BYTES ((sizeof(imp_host_entry) + 63) / 64 * 64)

struct imp_host {
    pthread_mutex_t mutex;
    const imp_device *device;
    void *on_device;          /* the device's memory */
    imp_heap *heap;           /* entries, the host tier's with their bytes */
    imp_policy *policy;       /* guarded by mutex, like all below */
    imp_host_entry **buckets; /* [n_buckets], a power of two */
    size_t n_buckets, n_entries;
    uint64_t used_bytes[IMP_LEVELS];
};

static uint64_t segment_hash(uint64_t segment)
{
    return imp_hash64(&segment, sizeof segment, 0) >> (64 - SEGMENT_BITS);
}

static uint64_t key_hash(const imp_host_key *k)
{
    const uint64_t words[2] = {k->segment, (uint64_t)k->region << 56 ^ (uint64_t)k->layer << 32 ^ k->chunk};
    return segment_hash(k->segment) << (64 - SEGMENT_BITS) | imp_hash64(words, sizeof words, 0) >> SEGMENT_BITS;
}

static bool key_equal(const imp_host_key *a, const imp_host_key *b)
{
    return a->segment == b->segment && a->region == b->region && a->layer == b->layer && a->chunk == b->chunk;
}

/* ---- entries */

static imp_level level_of(const imp_host_entry *e) { return e->on_device ? IMP_LEVEL_DEVICE : IMP_LEVEL_HOST; }

static void entry_free(const imp_host *h, imp_host_entry *e)
{
    if (!e) return;
    if (e->on_device) h->device->free(h->on_device, e->bytes);
    imp_heap_give(h->heap, e);
}

static void free_all(const imp_host *h, imp_host_entry *list)
{
    for (imp_host_entry *next; list; list = next) {
        next = list->next;
        entry_free(h, list);
    }
}

/* An entry with room for its bytes. NULL: no memory. */
static imp_host_entry *entry_new(const imp_host *h, imp_level level, const imp_host_key *key, uint64_t hash,
                                 size_t n_bytes)
{
    bool on_device = level == IMP_LEVEL_DEVICE;
    imp_host_entry *e = imp_heap_take(h->heap, on_device ? sizeof *e : ENTRY_BYTES + n_bytes);
    if (!e) return NULL;
    *e = (imp_host_entry){.key = *key, .hash = hash, .n_bytes = n_bytes, .on_device = on_device};
    e->bytes = on_device ? h->device->alloc(h->on_device, n_bytes) : (char *)e + ENTRY_BYTES;
    if (e->bytes) return e;
    imp_heap_give(h->heap, e);
    return NULL;
}

/* Copy an entry into the other tier. NULL: no memory. */
static imp_host_entry *entry_copy(const imp_host *h, const imp_host_entry *from)
{
    imp_level level = from->on_device ? IMP_LEVEL_HOST : IMP_LEVEL_DEVICE;
    imp_host_entry *e = entry_new(h, level, &from->key, from->hash, from->n_bytes);
    if (!e) return NULL;
    if (e->on_device) h->device->copy_in(e->bytes, from->bytes, e->n_bytes);
    else h->device->copy_out(e->bytes, from->bytes, e->n_bytes);
    return e;
}

int imp_host_new(imp_cache kind, uint64_t host_budget, uint64_t device_budget, imp_host **out)
{
    *out = NULL;
    imp_host *h = imp_calloc(1, sizeof *h);
    if (!h) return imp_fail(IMP_E_NOMEM, "tiers: no memory");
    h->device = &imp_device_memory;
    h->n_buckets = 256;
    h->buckets = imp_calloc(h->n_buckets, sizeof(imp_host_entry *));
    h->heap = imp_heap_new(host_budget);
    h->on_device = h->device->open(device_budget);
    int rc = h->buckets && h->heap && h->on_device ? imp_policy_new(kind, device_budget, host_budget, &h->policy)
                                                   : imp_fail(IMP_E_NOMEM, "tiers: no memory");
    if (rc < 0) {
        h->device->close(h->on_device);
        imp_heap_free(h->heap);
        imp_free(h->buckets);
        imp_free(h);
        return rc;
    }
    pthread_mutex_init(&h->mutex, NULL);
    *out = h;
    return 0;
}

void imp_host_free(imp_host *h)
{
    if (!h) return;
    for (size_t i = 0; i < h->n_buckets; i++) free_all(h, h->buckets[i]);
    imp_policy_free(h->policy);
    h->device->close(h->on_device);
    imp_heap_free(h->heap);
    imp_free(h->buckets);
    pthread_mutex_destroy(&h->mutex);
    imp_free(h);
}

/* ---- the table; with the mutex held */

static size_t bucket_of(uint64_t hash, size_t n_buckets)
{
    return (size_t)((hash >> (64 - SEGMENT_BITS)) + (hash & (WINDOW - 1))) & (n_buckets - 1);
}

/* The place that points to the entry with this hash, or to NULL. The hash is the policy's key, so there is one at most. */
static imp_host_entry **find(imp_host *h, uint64_t hash)
{
    imp_host_entry **at = &h->buckets[bucket_of(hash, h->n_buckets)];
    while (*at && (*at)->hash != hash) at = &(*at)->next;
    return at;
}

/* Twice the buckets. Without memory the chains just get longer. */
static void grow(imp_host *h)
{
    size_t n = h->n_buckets * 2;
    imp_host_entry **buckets = imp_calloc(n, sizeof(imp_host_entry *));
    if (!buckets) return;
    for (size_t i = 0; i < h->n_buckets; i++) {
        imp_host_entry *next;
        for (imp_host_entry *e = h->buckets[i]; e; e = next) {
            next = e->next;
            imp_host_entry **at = &buckets[bucket_of(e->hash, n)];
            e->next = *at;
            *at = e;
        }
    }
    imp_free(h->buckets);
    h->buckets = buckets;
    h->n_buckets = n;
}

static void link_at(imp_host *h, imp_host_entry **at, imp_host_entry *e)
{
    e->next = *at;
    *at = e;
    h->used_bytes[level_of(e)] += ENTRY_BYTES + e->n_bytes;
    if (++h->n_entries > h->n_buckets) grow(h);
}

/* Nobody holds it and it is out of the table: to be freed with the list, outside the lock. */
static void bury(imp_host *h, imp_host_entry *e, imp_host_entry **dead)
{
    h->used_bytes[level_of(e)] -= ENTRY_BYTES + e->n_bytes;
    e->next = *dead;
    *dead = e;
}

static void unlink_at(imp_host *h, imp_host_entry **at, imp_host_entry **dead)
{
    imp_host_entry *e = *at;
    *at = e->next;
    h->n_entries--;
    e->gone = true;
    if (!e->holders) bury(h, e, dead);
}

static void let_go(imp_host *h, imp_host_entry *e, imp_host_entry **dead)
{
    if (--e->holders == 0 && e->gone) bury(h, e, dead);
}

/* ---- moves */

/* Entries to move to the other tier, held. */
typedef struct move_list {
    imp_host_entry *from[MAX_MOVED], *copy[MAX_MOVED];
    size_t n;
} move_list;

/* Do what the policy has decided about a key: out of the table with what is in no tier, and what is in the wrong one is
 * noted. With the mutex held. */
static void follow(imp_host *h, uint64_t hash, move_list *moves, imp_host_entry **dead)
{
    imp_host_entry **at = find(h, hash), *e = *at;
    if (!e) return; /* admitted by another thread, which is still copying its bytes */
    imp_level level = imp_policy_where(h->policy, hash);
    if (level == IMP_LEVEL_NONE) {
        unlink_at(h, at, dead);
    } else if (level != level_of(e)) {
        e->holders++;
        moves->from[moves->n++] = e;
    }
}

static void do_moves(imp_host *h, move_list *moves)
{
    if (moves->n == 0) return;
    imp_host_entry *dead = NULL, *unused = NULL;
    for (size_t i = 0; i < moves->n; i++) moves->copy[i] = entry_copy(h, moves->from[i]);
    pthread_mutex_lock(&h->mutex);
    for (size_t i = 0; i < moves->n; i++) {
        imp_host_entry *e = moves->from[i], *copy = moves->copy[i], **at = find(h, e->hash);
        imp_level target = e->on_device ? IMP_LEVEL_HOST : IMP_LEVEL_DEVICE;
        if (*at == e && imp_policy_where(h->policy, e->hash) == target) {
            unlink_at(h, at, &dead);
            if (copy) link_at(h, at, copy);
            else imp_policy_drop(h->policy, e->hash);
        } else if (copy) {
            copy->next = unused;
            unused = copy;
        }
        let_go(h, e, &dead);
    }
    pthread_mutex_unlock(&h->mutex);
    free_all(h, dead);
    free_all(h, unused);
}

/* ---- get, use, put */

imp_host_entry *imp_host_get(imp_host *h, const imp_host_key *key, size_t *n_bytes)
{
    uint64_t hash = key_hash(key);
    pthread_mutex_lock(&h->mutex);
    imp_host_entry *e = *find(h, hash);
    if (e && !key_equal(&e->key, key)) e = NULL; /* another chunk with the same hash */
    if (e) {
        e->holders++;
        *n_bytes = e->n_bytes;
    }
    pthread_mutex_unlock(&h->mutex);
    return e;
}

const void *imp_host_entry_bytes(const imp_host_entry *entry) { return entry->bytes; }

bool imp_host_entry_on_device(const imp_host_entry *entry) { return entry->on_device; }

void imp_host_release(imp_host *h, imp_host_entry *entry)
{
    imp_host_entry *dead = NULL;
    pthread_mutex_lock(&h->mutex);
    let_go(h, entry, &dead);
    pthread_mutex_unlock(&h->mutex);
    free_all(h, dead);
}

void imp_host_use(imp_host *h, const imp_host_key *key, float share)
{
    uint64_t hash = key_hash(key), keys[MAX_MOVED];
    imp_moved moved = {.keys = keys, .max = MAX_MOVED};
    imp_host_entry *dead = NULL;

    pthread_mutex_lock(&h->mutex);
    imp_policy_use(h->policy, hash, share);
    if (!imp_policy_promote(h->policy, hash, &moved)) {
        pthread_mutex_unlock(&h->mutex);
        return;
    }
    move_list down, up;
    down.n = up.n = 0;
    for (size_t i = 0; i < moved.n; i++) follow(h, keys[i], &down, &dead);
    follow(h, hash, &up, &dead);
    pthread_mutex_unlock(&h->mutex);
    free_all(h, dead);
    do_moves(h, &down); /* first, so that the device has the room */
    do_moves(h, &up);
}

void imp_host_put(imp_host *h, const imp_host_key *key, const void *bytes, size_t n_bytes)
{
    uint64_t hash = key_hash(key), keys[MAX_MOVED];
    imp_moved moved = {.keys = keys, .max = MAX_MOVED};
    imp_host_entry *dead = NULL;
    move_list down;
    down.n = 0;

    pthread_mutex_lock(&h->mutex);
    imp_level level = imp_policy_admit(h->policy, hash, ENTRY_BYTES + n_bytes, &moved);
    for (size_t i = 0; i < moved.n; i++) follow(h, keys[i], &down, &dead);
    pthread_mutex_unlock(&h->mutex);
    free_all(h, dead);
    if (level == IMP_LEVEL_NONE) return;
    do_moves(h, &down);

    imp_host_entry *e = entry_new(h, level, key, hash, n_bytes);
    if (e && e->on_device) h->device->copy_in(e->bytes, bytes, n_bytes);
    else if (e) memcpy(e->bytes, bytes, n_bytes);

    /* While we copied, others may have moved or evicted the key again, and even admitted it anew. */
    pthread_mutex_lock(&h->mutex);
    imp_host_entry **at = find(h, hash);
    bool kept = e && !*at && imp_policy_where(h->policy, hash) == level;
    if (kept) link_at(h, at, e);
    else if (!*at) imp_policy_drop(h->policy, hash);
    pthread_mutex_unlock(&h->mutex);
    if (!kept) entry_free(h, e);
}

void imp_host_forget(imp_host *h, uint64_t segment)
{
    imp_host_entry *dead = NULL;
    pthread_mutex_lock(&h->mutex);
    size_t n = h->n_buckets < WINDOW ? h->n_buckets : WINDOW;
    for (size_t i = 0; i < n && h->n_entries > 0; i++) {
        imp_host_entry **at = &h->buckets[(size_t)(segment_hash(segment) + i) & (h->n_buckets - 1)];
        while (*at) {
            if ((*at)->key.segment == segment) {
                imp_policy_drop(h->policy, (*at)->hash);
                unlink_at(h, at, &dead);
            } else {
                at = &(*at)->next;
            }
        }
    }
    pthread_mutex_unlock(&h->mutex);
    free_all(h, dead);
}

static uint64_t bytes_of(imp_host *h, imp_level level)
{
    pthread_mutex_lock(&h->mutex);
    uint64_t n = h->used_bytes[level];
    pthread_mutex_unlock(&h->mutex);
    return n;
}

uint64_t imp_host_used_bytes(imp_host *h) { return bytes_of(h, IMP_LEVEL_HOST); }

uint64_t imp_host_device_bytes(imp_host *h) { return bytes_of(h, IMP_LEVEL_DEVICE); }
