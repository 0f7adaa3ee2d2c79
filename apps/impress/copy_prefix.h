/* copy_prefix.h: a stored prefix from one store into another, through the library alone: no engine, and no bit changes.
 * So that several stores, which differ in how they keep KV, are filled from one prefill. */
#ifndef APP_COPY_PREFIX_H
#define APP_COPY_PREFIX_H

#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"

/* The rows of both spaces. */
typedef struct copy_shape {
    imp_type type_k, type_v;
    uint32_t n_layers;
    const imp_layer_shape *layers;
} copy_shape;

/* What goes with them: queries of the prefix's last tokens, from position `first` on. */
typedef struct copy_queries {
    size_t first;
    const imp_query *layers; /* [n_layers]; NULL: none */
} copy_queries;

/* Store tokens [0, n) in `to` as `from` has them: all of them, and as exact, or it is IMP_E_NOTFOUND. What `to` has
 * already is left. Returns 0 or a status, with imp_last_error(); what is new is on disk after imp_store_flush(). */
int copy_prefix(imp_space *from, imp_space *to, const copy_shape *shape, const int32_t *tokens, size_t n,
                const copy_queries *queries);

#endif
