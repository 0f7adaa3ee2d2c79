/* store_world.h: a small world for tests of the store: one space whose rows follow from the tokens up to theirs, so
 * that rows of another prefix, position, layer or space never pass for the right ones. */
#ifndef IMP_TEST_STORE_WORLD_H
#define IMP_TEST_STORE_WORLD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"
#include "store/store.h"

enum {
    WORLD_LAYERS = 2,
    WORLD_HEADS = 2,
    WORLD_DIM = 32,
    WORLD_ROW = WORLD_HEADS * WORLD_DIM * 2,
    WORLD_QUERY_HEADS = 4,
    WORLD_QUERY_ROWS = 10
};

typedef struct imp_world {
    imp_store *store;
    imp_space *space;
} imp_world;

/* Options for small tests: min_store 4, segments of 64 tokens, chunks of 16; encrypted where $IMP_TEST_KEY_FILE is. */
void imp_world_opts(imp_store_opts *opts);
/* The same with all that a store can keep, 8 bits, and the core of each layer first; nothing is reordered by itself. */
void imp_world_rich_opts(imp_store_opts *opts);
/* Open store and space; `opts` NULL: imp_world_opts(). `salt` NULL: the usual space. The status of imp_store_open(). */
int imp_world_open(imp_world *w, const char *dir, const imp_store_opts *opts, const char *salt);
void imp_world_close(imp_world *w);
/* Another space of an open store. */
int imp_world_space(imp_store *store, const char *salt, imp_space **out);
/* imp_store_rebuild(), with the key of imp_world_opts(). */
int imp_world_rebuild(const char *dir);

/* Commit tokens [first_new, n) with their right rows, and with queries if the store's options have a use for them. The
 * status of begin or finish; *staged (may be NULL): whether there was anything to store. Doesn't flush. */
int imp_world_commit(imp_world *w, const int32_t *tokens, size_t n, size_t first_new, unsigned flags, bool *staged);

/* Match `tokens` and read every row of what is found, with its checksum, against what was committed. The number of
 * tokens matched, or a negative status; IMP_WORLD_WRONG, with a message on stderr, if a row passed its checksum and
 * isn't right. With IMP_REST_Q8 rows may differ by what 8 bits lose. */
enum { IMP_WORLD_WRONG = -1000 };
int64_t imp_world_check(imp_world *w, const int32_t *tokens, size_t n, bool exact_only);

/* Findings of verify, each printed if `loud`. */
int64_t imp_world_verify(imp_world *w, bool repair, bool loud);
/* Bytes of `dir` as du counts them. */
uint64_t imp_world_du(const char *dir);

#endif
