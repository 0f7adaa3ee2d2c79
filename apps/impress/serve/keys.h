/* keys.h: who may ask. A client's key also says whose prefixes it sees: each name is a tenant of its own. */
#ifndef SERVE_KEYS_H
#define SERVE_KEYS_H

#include <stdbool.h>
#include <stddef.h>

typedef struct key_ring key_ring;

/* Whose key it is: all keys of one name are one tenant's. Lives as long as the ring. */
typedef struct key_tenant {
    char *salt;      /* of its prefixes */
    char *label;     /* what it may be called where the admin looks: its name, or #N for the Nth key without one */
    unsigned number; /* from 1 */
} key_tenant;

/* The keys of file `path` (NULL: none) and of the comma-separated list `inline_keys` (NULL: none). In the file each
 * line is a key, or a key, blanks and the name of its tenant; # begins a comment. A key without a name is a tenant
 * of its own. Returns 0, or 1 after one line on standard error. */
int key_ring_open(const char *path, const char *inline_keys, key_ring **out);
void key_ring_close(key_ring *r); /* NULL is allowed */
size_t key_ring_size(const key_ring *r);

/* Tenants by their numbers, 1 to key_ring_n_tenants(). */
size_t key_ring_n_tenants(const key_ring *r);
const key_tenant *key_ring_tenant(const key_ring *r, size_t number);
/* The tenant called `name`; NULL: there is none. */
const key_tenant *key_ring_named(const key_ring *r, const char *name);

/* Whose key it is; NULL: it is none of them. The time it takes doesn't depend on how much of a key is right. */
const key_tenant *key_ring_find(const key_ring *r, const char *key);

#endif
