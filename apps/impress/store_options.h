/* store_options.h: the options that open a store, the same in every command. */
#ifndef APP_STORE_OPTIONS_H
#define APP_STORE_OPTIONS_H

#include "impress/impress.h"
#include "options.h"
#include "switches.h"

typedef struct store_settings {
    const char *dir, *key_file;
    uint64_t limit, io_limit, host_cache, device_cache, min_store, reorder_after, ttl, tenant_share, read_deadline;
    const char *io, *reorder_period;
    bool no_direct;
    switch_settings switches; /* of the store, and of requests where a command has those */
} store_settings;

/* Table entries; `base` is the settings struct that has a member `store` of type store_settings. STORE_OPTS_HOW are
 * those that say how a store is read and written, not which one. */
#define STORE_OPTS(base)                                                                                               \
    {"store", 0, OPT_TEXT, offsetof(base, store.dir), "DIR",                                                           \
     "the store's directory (default: ~/.cache/impress/store);\n`none`: only in memory, see --host-cache", false},     \
    {"limit", 0, OPT_SIZE, offsetof(base, store.limit), "SIZE",                                                        \
     "size limit of the store from now on (default: as it was last\ngiven, else 10G)", false},                         \
    {"key-file", 0, OPT_TEXT, offsetof(base, store.key_file), "FILE",                                                  \
     "encrypt the store with the key in FILE: 32 bytes or 64 hex digits\nthat only its owner may read", false},        \
    STORE_OPTS_HOW(base)

#define STORE_OPTS_HOW(base)                                                                                           \
    {"min-store", 0, OPT_COUNT, offsetof(base, store.min_store), "N",                                                  \
     "store no fewer than N new tokens (default: 64)", false},                                                         \
    SWITCH_STORE_OPTS(base, store.switches),                                                                           \
    {"io", 0, OPT_TEXT, offsetof(base, store.io), "MODE", "auto (default), uring or threads", false},                  \
    {"no-direct", 0, OPT_FLAG, offsetof(base, store.no_direct), NULL, "read through the page cache", false},           \
    {"io-limit", 0, OPT_SIZE, offsetof(base, store.io_limit), "SIZE",                                                  \
     "read no more than SIZE a second, as a slower disk would", false},                                                \
    {"read-deadline", 0, OPT_COUNT, offsetof(base, store.read_deadline), "S",                                          \
     "compute a prompt whose reads haven't come back for S seconds, and\nothers until they have (default: 10)", false}, \
    {"host-cache", 0, OPT_SIZE, offsetof(base, store.host_cache), "SIZE",                                              \
     "keep chunks in so much memory (default: 0; of serve: 1G)", false},                                               \
    {"device-cache", 0, OPT_SIZE, offsetof(base, store.device_cache), "SIZE",                                          \
     "and the best of them in so much more, the device tier, which in\nthis version is memory too (default: 0)",       \
     false},                                                                                                           \
    {"reorder-period", 0, OPT_TEXT, offsetof(base, store.reorder_period), "S",                                         \
     "look every S seconds for what should be in another order, or\n`never` (default: 600)", false},                   \
    {"reorder-after", 0, OPT_COUNT, offsetof(base, store.reorder_after), "N",                                          \
     "reorder what N requests used since the last time (default: 16)", false},                                         \
    {"ttl", 0, OPT_COUNT, offsetof(base, store.ttl), "S", "remove what nobody used for S seconds (default: never)",    \
     false},                                                                                                           \
    {"tenant-share", 0, OPT_COUNT, offsetof(base, store.tenant_share), "PERCENT",                                      \
     "let no tenant take more of the limit, and make room where one\nholds most (default: tenants aren't told apart)", \
     false}

/* The switches of requests, where a command has STORE_OPTS too. */
#define REQUEST_OPTS(base) SWITCH_REQUEST_OPTS(base, store.switches)

/* Check the settings and fill `opts`. Returns 0 or 2 after one line. */
int store_settings_apply(const opt_command *command, const store_settings *s, imp_store_opts *opts);

/* Open the store: in the directory in force, or with `--store none` in the memory of the host and device caches. *out
 * is NULL where those are 0: nothing is kept. Returns an exit code, after one line. */
int store_settings_open(const store_settings *s, const imp_store_opts *opts, imp_store **out);

/* The directory in force: the option, else $XDG_CACHE_HOME/impress/store, else ~/.cache/impress/store. NULL for `none`.
 * Makes the folders above the default one. Static storage. */
const char *store_settings_dir(const store_settings *s);

/* $XDG_CACHE_HOME/impress/NAME, else ~/.cache/impress/NAME, its folders made. Static storage. */
const char *store_default_dir(const char *name);

#endif
