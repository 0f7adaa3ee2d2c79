/* idmap.h: a hash table from 64-bit ids (never 0) to pointers. */
#ifndef IMP_STORE_IDMAP_H
#define IMP_STORE_IDMAP_H

#include <stddef.h>
#include <stdint.h>

typedef struct imp_idmap_slot {
    uint64_t key; /* 0: empty */
    void *value;
} imp_idmap_slot;

/* All zero is an empty map. Owners walk slots[0..n_slots) themselves; nothing may be put or removed meanwhile. */
typedef struct imp_idmap {
    imp_idmap_slot *slots;
    size_t n_slots; /* 0 or a power of two */
    size_t n;
} imp_idmap;

int imp_idmap_put(imp_idmap *m, uint64_t key, void *value); /* in place of what was there; IMP_E_NOMEM: unchanged */
void *imp_idmap_get(const imp_idmap *m, uint64_t key);      /* NULL if it isn't there */
void imp_idmap_remove(imp_idmap *m, uint64_t key);
void imp_idmap_free(imp_idmap *m); /* the table, not the values; leaves an empty map */

#endif
