/* lease.h: the inside of a lease. */
#ifndef IMP_SESSION_LEASE_H
#define IMP_SESSION_LEASE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"
#include "store/store.h"

struct imp_lease {
    imp_store *store;
    imp_turns *turns;      /* the space's; NULL: nothing is known */
    imp_path path;         /* as the store pinned it; unpinned the same way */
    size_t n_tokens;       /* of the path: what the lease covers */
    atomic_uint_least64_t header_bytes; /* read by the match; the first load takes them into its figures */
    atomic_uint n_users;   /* loads that are open on it, and whoever acquired it */
};

/* One user less; with the last one the lease ends. */
void imp_lease_drop(imp_lease *lease);

#endif
