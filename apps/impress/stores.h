/* stores.h: several systems compared fairly: a store for each way to keep KV, all filled from one prefill.
 *
 * What belongs to a store (order, rest, chunk, what is kept beside keys and values) can't be changed for a prefix that
 * is stored already. So below one folder there is a store per combination, and one more, the source, that is filled by
 * the model: prefixes are copied from there, with the queries that they were computed with. A store is entered with
 * empty caches; afresh, it has forgotten all that requests taught it, too. */
#ifndef APP_STORES_H
#define APP_STORES_H

#include <stdbool.h>

#include "answer.h"
#include "copy_prefix.h"
#include "switches.h"

/* A prefix that the source has. */
typedef struct app_prefix {
    const llama_token *tokens; /* [n]; the caller's */
    size_t n;
    copy_queries queries;
    float *rows;               /* of the queries */
    imp_query *layers;
    bool learned;
} app_prefix;

void app_prefix_free(app_prefix *p);

typedef struct app_stores {
    char dir[3072];   /* "": all in memory */
    int lock;         /* one process at a time */
    imp_store_opts opts;
    imp_store *source, *current;
    imp_llama *ctx;
    imp_space *source_space, *space;
    copy_shape shape; /* n_layers 0: this model doesn't use stores */
    imp_layer_shape *layers;
} app_stores;

/* Open the source below `dir` (NULL: in memory). `opts`: as the options say; what systems differ in is set later.
 * Returns an exit code after one line, as all below. */
int app_stores_open(app_stores *s, const char *dir, const imp_store_opts *opts);

/* From now on `ctx`, which was opened with s->source, is the model that uses the stores. It is theirs. */
int app_stores_attach(app_stores *s, imp_llama *ctx);

/* Have a prefix in the source, computed where it isn't there, and its queries. */
int app_stores_learn(app_stores *s, app_prefix *p, const char *name);

/* Let the model use the store of `system`, whose caches are empty. With `afresh`, where the system learns from requests,
 * the store is emptied, too. */
int app_stores_enter(app_stores *s, const app_system *system, bool afresh);

/* A learned prefix into that store, on disk when this returns. */
int app_stores_put(app_stores *s, const app_prefix *p);

/* After requests that warmed it: what they taught is put to use now, and what a first match reads is read. */
int app_stores_settle(app_stores *s, const app_system *system, const app_prefix *p);

/* Close the stores, and free the context. */
void app_stores_close(app_stores *s);

#endif
