/* store_options.h: the options that open a store, the same in every command. */
#ifndef APP_STORE_OPTIONS_H
#define APP_STORE_OPTIONS_H

#include "impress/impress.h"
#include "options.h"

typedef struct store_settings {
    const char *dir;
    uint64_t limit, io_limit, host_cache, min_store, chunk;
    const char *io, *rest;
    bool no_direct;
} store_settings;

/* Table entries; `base` is the settings struct that has a member `store` of type store_settings. STORE_OPTS_HOW are those
 * that say how a store is read and written, not which one. */
#define STORE_OPTS(base)                                                                                               \
    {"store", 0, OPT_TEXT, offsetof(base, store.dir), "DIR",                                                           \
     "the store's directory (default: ~/.cache/impress/store);\n`none`: nothing is kept", false},                      \
    {"limit", 0, OPT_SIZE, offsetof(base, store.limit), "SIZE", "size limit of the store (default: 10G)", false},      \
    STORE_OPTS_HOW(base)

#define STORE_OPTS_HOW(base)                                                                                           \
    {"min-store", 0, OPT_COUNT, offsetof(base, store.min_store), "N",                                                  \
     "store no fewer than N new tokens (default: 64)", false},                                                         \
    {"rest", 0, OPT_TEXT, offsetof(base, store.rest), "TYPE",                                                          \
     "precision on disk of what is stored from now on:\nf16 (the cache's own bytes, default) or q8", false},           \
    {"chunk", 0, OPT_COUNT, offsetof(base, store.chunk), "N",                                                          \
     "tokens a chunk: a multiple of 16, 16 to 256 (default: 64)", false},                                              \
    {"io", 0, OPT_TEXT, offsetof(base, store.io), "MODE", "auto (default), uring or threads", false},                  \
    {"no-direct", 0, OPT_FLAG, offsetof(base, store.no_direct), NULL, "read through the page cache", false},           \
    {"io-limit", 0, OPT_SIZE, offsetof(base, store.io_limit), "SIZE",                                                  \
     "read no more than SIZE a second, as a slower disk would", false},                                                \
    {"host-cache", 0, OPT_SIZE, offsetof(base, store.host_cache), "SIZE",                                              \
     "keep chunks in so much memory (default: 0)", false}

/* Check the settings and fill `opts`. Returns 0 or 2 after one line. */
int store_settings_apply(const opt_command *command, const store_settings *s, imp_store_opts *opts);

/* The directory in force: the option, else $XDG_CACHE_HOME/impress/store, else ~/.cache/impress/store. NULL for `none`.
 * Makes the folders above the default one. Static storage. */
const char *store_settings_dir(const store_settings *s);

/* $XDG_CACHE_HOME/impress/NAME, else ~/.cache/impress/NAME, its folders made. Static storage. */
const char *store_default_dir(const char *name);

#endif
