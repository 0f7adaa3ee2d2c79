#include "tier/host.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#include "base/alloc.h"
#include "base/hash.h"
#include "base/status.h"
#include "cache/cache.h"

/* A chunk that comes in displaces at most so many; chunks differ in size by their region and layer only, so a few do. */
#define MAX_VICTIMS 256

struct imp_host_entry {
    imp_host_key key;
    uint64_t hash;
    imp_host_entry *next; /* in its bucket; once evicted, in the list of victims to free */
    size_t n_bytes;
    uint32_t holders;
    bool on_device;
    bool evicted;         /* no longer in the table; freed by the last holder */
};

/* The bytes follow the entry, at the start of a cache line. */
#define ENTRY_BYTES ((sizeof(imp_host_entry) + 63) / 64 * 64)

struct imp_host {
    pthread_mutex_t mutex;
    imp_policy *policy;       /* guarded by mutex, like all below */
    imp_host_entry **buckets; /* [n_buckets], a power of two */
    size_t n_buckets, n_entries;
    uint64_t used_bytes, device_bytes;
};

static uint64_t key_hash(const imp_host_key *k)
{
    const uint64_t words[2] = {k->segment, (uint64_t)k->region << 56 ^ (uint64_t)k->layer << 32 ^ k->chunk};
    return imp_hash64(words, sizeof words, 0);
}

static bool key_equal(const imp_host_key *a, const imp_host_key *b)
{
    return a->segment == b->segment && a->region == b->region && a->layer == b->layer && a->chunk == b->chunk;
}

int imp_host_new(imp_cache kind, uint64_t host_budget, uint64_t device_budget, imp_host **out)
{
    *out = NULL;
    imp_host *h = imp_calloc(1, sizeof *h);
    if (!h) return imp_fail(IMP_E_NOMEM, "host tier: no memory");
    h->n_buckets = 256;
    h->buckets = imp_calloc(h->n_buckets, sizeof(imp_host_entry *));
    int rc = h->buckets ? imp_policy_new(kind, host_budget + device_budget, &h->policy) : imp_fail(IMP_E_NOMEM, "host tier: no memory");
    if (rc < 0) {
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
    for (size_t i = 0; i < h->n_buckets; i++) {
        imp_host_entry *next;
        for (imp_host_entry *e = h->buckets[i]; e; e = next) {
            next = e->next;
            imp_free(e);
        }
    }
    imp_policy_free(h->policy);
    imp_free(h->buckets);
    pthread_mutex_destroy(&h->mutex);
    imp_free(h);
}

/* The place that points to the entry with this hash, or to NULL. The hash is the policy's key, so there is at most one. */
static imp_host_entry **find(imp_host *h, uint64_t hash)
{
    imp_host_entry **at = &h->buckets[hash & (h->n_buckets - 1)];
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
            imp_host_entry **at = &buckets[e->hash & (n - 1)];
            e->next = *at;
            *at = e;
        }
    }
    imp_free(h->buckets);
    h->buckets = buckets;
    h->n_buckets = n;
}

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

const void *imp_host_entry_bytes(const imp_host_entry *entry) { return (const char *)entry + ENTRY_BYTES; }

void imp_host_release(imp_host *h, imp_host_entry *entry)
{
    pthread_mutex_lock(&h->mutex);
    bool last = --entry->holders == 0 && entry->evicted;
    if (last) h->used_bytes -= ENTRY_BYTES + entry->n_bytes;
    pthread_mutex_unlock(&h->mutex);
    if (last) imp_free(entry);
}

void imp_host_use(imp_host *h, const imp_host_key *key, float important_share)
{
    pthread_mutex_lock(&h->mutex);
    imp_policy_use(h->policy, key_hash(key), important_share);
    pthread_mutex_unlock(&h->mutex);
}

/* Take the victims out of the table; returns those that nobody holds, to be freed outside the lock. */
static imp_host_entry *evict(imp_host *h, const uint64_t *victims, size_t n)
{
    imp_host_entry *dead = NULL;
    for (size_t i = 0; i < n; i++) {
        imp_host_entry **at = find(h, victims[i]);
        imp_host_entry *e = *at;
        if (!e) continue; /* admitted by another thread, which is still copying its bytes */
        *at = e->next;
        h->n_entries--;
        e->evicted = true;
        if (e->holders) continue;
        h->used_bytes -= ENTRY_BYTES + e->n_bytes;
        e->next = dead;
        dead = e;
    }
    return dead;
}

void imp_host_put(imp_host *h, const imp_host_key *key, const void *bytes, size_t n_bytes)
{
    uint64_t hash = key_hash(key), victims[MAX_VICTIMS];
    size_t n_victims = 0;
    imp_host_entry *dead = NULL, *next;

    pthread_mutex_lock(&h->mutex);
    bool wanted = !imp_policy_has(h->policy, hash) &&
                  imp_policy_admit(h->policy, hash, ENTRY_BYTES + n_bytes, victims, MAX_VICTIMS, &n_victims);
    if (wanted) dead = evict(h, victims, n_victims);
    pthread_mutex_unlock(&h->mutex);
    for (; dead; dead = next) {
        next = dead->next;
        imp_free(dead);
    }
    if (!wanted) return;

    imp_host_entry *e = imp_aligned(64, ENTRY_BYTES + n_bytes);
    if (e) {
        *e = (imp_host_entry){.key = *key, .hash = hash, .n_bytes = n_bytes};
        memcpy((char *)e + ENTRY_BYTES, bytes, n_bytes);
    }

    /* While we copied, others may have evicted the key again, and even admitted it anew. */
    pthread_mutex_lock(&h->mutex);
    imp_host_entry **at = find(h, hash);
    bool kept = e && !*at && imp_policy_has(h->policy, hash);
    if (kept) {
        *at = e;
        h->used_bytes += ENTRY_BYTES + n_bytes;
        if (++h->n_entries > h->n_buckets) grow(h);
    } else if (!*at) {
        imp_policy_drop(h->policy, hash);
    }
    pthread_mutex_unlock(&h->mutex);
    if (!kept) imp_free(e);
}

uint64_t imp_host_used_bytes(imp_host *h)
{
    pthread_mutex_lock(&h->mutex);
    uint64_t n = h->used_bytes;
    pthread_mutex_unlock(&h->mutex);
    return n;
}

bool imp_host_entry_on_device(const imp_host_entry *entry) { return entry->on_device; }

uint64_t imp_host_device_bytes(imp_host *h)
{
    pthread_mutex_lock(&h->mutex);
    uint64_t n = h->device_bytes;
    pthread_mutex_unlock(&h->mutex);
    return n;
}
