/* host.h: chunks in memory, in two tiers under a byte budget each. What is here needn't be read from disk.
 *
 *     device   the faster one, in front     memory of its own (device.h)
 *     host     behind it
 *
 *     get ──► entry, held ──► its bytes stay valid until release, whatever moves meanwhile
 *     use ──► a chunk of the host tier may be promoted; what it displaces goes down to the host tier, or out
 *     put ──► the policy (cache.h) decides whether it comes in, and where; victims as with use
 *
 * A chunk is in one tier at most, and the disk has them all: eviction writes nothing. A chunk that moves is copied,
 * outside the lock, and its entry replaced when the copy is there; until then the old one is found. So an entry never
 * moves, and what is held of the old one goes with its last holder.
 *
 * Only bytes whose checksum was verified come in, and they are not checked again. A segment's id is random and its
 * bytes never change, so that an entry can't become wrong; entries of a removed segment would only take room until
 * others are worth more, and are forgotten.
 *
 * Thread-safe: one mutex around the table and the policy, which get and release take once, and so does a use that moves
 * nothing.
 */
#ifndef IMP_TIER_HOST_H
#define IMP_TIER_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"

typedef struct imp_host imp_host;
typedef struct imp_host_entry imp_host_entry;

typedef struct imp_host_key {
    uint64_t segment;
    uint32_t region, layer, chunk;
} imp_host_key;

/* `kind` isn't IMP_CACHE_NONE. A budget of 0: without this tier; they aren't both 0. */
int imp_host_new(imp_cache kind, uint64_t host_budget, uint64_t device_budget, imp_host **out);
void imp_host_free(imp_host *h); /* nothing may be held; NULL is allowed */

/* The entry of `key`, held, with its length; NULL: not here. */
imp_host_entry *imp_host_get(imp_host *h, const imp_host_key *key, size_t *n_bytes);
const void *imp_host_entry_bytes(const imp_host_entry *entry);
bool imp_host_entry_on_device(const imp_host_entry *entry);
void imp_host_release(imp_host *h, imp_host_entry *entry);

/* Note a use of `key`, in a tier or not, and promote it if it is worth that now; `share` as for imp_policy_use(). */
void imp_host_use(imp_host *h, const imp_host_key *key, float share);

/* Offer verified bytes; they are copied if the policy wants them. Want of memory is no error: they aren't kept then. */
void imp_host_put(imp_host *h, const imp_host_key *key, const void *bytes, size_t n_bytes);

/* The segment is gone: so are its chunks, but for what is held. Chunks put later come in like any others. */
void imp_host_forget(imp_host *h, uint64_t segment);

/* Bytes in use in each tier now, those that are evicted or moved but still held included. */
uint64_t imp_host_used_bytes(imp_host *h);
uint64_t imp_host_device_bytes(imp_host *h);

#endif
