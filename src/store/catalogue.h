/* catalogue.h: the SQLite file that says which nodes there are (docs/format.md). It is a cache of the segments' headers:
 * whatever it holds can be made again from them, so any doubt about it is IMP_E_CORRUPT and leads to a rebuild.
 *
 * Every row has a checksum over its key and its fields. One meta row holds the generation (raised by each change), the
 * number of rows and the sum of all row checksums, so that a row lost by a damaged page is noticed too. Uses and hits are
 * advisory: a table of their own, written in batches, a bad row is dropped.
 *
 * One imp_cat per process and store, under the store's mutex. Several processes: WAL, a busy time-out, and a generation
 * that is checked before each match.
 */
#ifndef IMP_STORE_CATALOGUE_H
#define IMP_STORE_CATALOGUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"

typedef struct imp_cat imp_cat;

typedef struct imp_cat_space {
    imp_hash128 id;
    const char *model_name;
    int64_t created_s;
} imp_cat_space;

typedef struct imp_cat_segment {
    uint64_t id;
    imp_hash128 space;
    uint64_t disk_bytes;
    uint32_t n_tokens;
} imp_cat_segment;

typedef struct imp_cat_node {
    uint64_t id, parent;
    imp_hash128 space;
    uint64_t segment;
    uint32_t segment_first, n_tokens;
    uint64_t depth;
    bool derived, pinned;
    int64_t created_s;
    const int32_t *tokens; /* [n_tokens] */
} imp_cat_node;

/* A segment being written. */
typedef struct imp_cat_reservation {
    uint64_t segment;
    uint64_t instance; /* of the writing process: live/<16 hex digits> */
    uint64_t bytes;
} imp_cat_reservation;

/* "catalogue.db" in `dir`, made if missing (unless IMP_STORE_READONLY). IMP_E_CORRUPT: rebuild it. IMP_E_VERSION: a newer
 * format; leave it alone. */
int imp_cat_open(const char *dir, unsigned flags, imp_cat **out);
void imp_cat_close(imp_cat *c);

/* A change: begin takes the write lock (IMP_E_BUSY after the time-out), commit makes it durable (WAL,
 * synchronous=NORMAL or FULL: a published node must survive a power cut, see docs/format.md), rollback undoes. */
int imp_cat_begin(imp_cat *c);
int imp_cat_commit(imp_cat *c);
void imp_cat_rollback(imp_cat *c);

/* Inside a change. */
int imp_cat_put_space(imp_cat *c, const imp_cat_space *space);
int imp_cat_put_segment(imp_cat *c, const imp_cat_segment *segment);
int imp_cat_remove_segment(imp_cat *c, uint64_t id);
int imp_cat_put_node(imp_cat *c, const imp_cat_node *node); /* new, or in place of the row with this id */
int imp_cat_remove_node(imp_cat *c, uint64_t id);
int imp_cat_new_node_id(imp_cat *c, uint64_t *id);
int imp_cat_reserve(imp_cat *c, const imp_cat_reservation *r);
int imp_cat_unreserve(imp_cat *c, uint64_t segment);

/* What the rows say. */
typedef struct imp_cat_reader {
    int (*space)(const imp_cat_space *space, void *user);
    int (*segment)(const imp_cat_segment *segment, void *user);
    int (*segment_removed)(uint64_t id, void *user);
    int (*node)(const imp_cat_node *node, void *user);
    int (*node_removed)(uint64_t id, void *user);
    void *user;
} imp_cat_reader;

/* Has another connection changed anything since imp_cat_read() last ran? Cheap (no page is read when nothing changed). */
int imp_cat_changed(imp_cat *c, bool *changed);
/* Rows changed since generation `since` (0: all, whole scan checked against the meta row): removals first, then spaces,
 * segments, nodes by rising depth. `*generation` becomes the present one. May be called inside a change. */
int imp_cat_read(imp_cat *c, uint64_t since, const imp_cat_reader *reader, uint64_t *generation);

int imp_cat_reservations(imp_cat *c, int (*fn)(const imp_cat_reservation *r, void *user), void *user);
/* Sums for the size limit: bytes of all segments and of all reservations. */
int imp_cat_totals(imp_cat *c, uint64_t *segment_bytes, uint64_t *reserved_bytes);

/* Advisory statistics, outside the meta row's count. */
int imp_cat_put_use(imp_cat *c, uint64_t node, uint64_t hits, int64_t used_s);
int imp_cat_uses(imp_cat *c, int (*fn)(uint64_t node, uint64_t hits, int64_t used_s, void *user), void *user);

/* Fingerprints of weight files. */
typedef struct imp_cat_file {
    uint64_t device, inode, size;
    int64_t mtime_ns, ctime_ns;
} imp_cat_file;
int imp_cat_fingerprint(imp_cat *c, const imp_cat_file *file, imp_hash128 *out); /* IMP_E_NOTFOUND */
int imp_cat_put_fingerprint(imp_cat *c, const imp_cat_file *file, imp_hash128 hash);

/* SQLite's own check and a whole scan: calls `fn` with a line for each thing that is wrong. */
int imp_cat_check(imp_cat *c, void (*fn)(const char *what, void *user), void *user);
int imp_cat_compact(imp_cat *c);

/* Remove the files of a catalogue (db, wal, shm). */
int imp_cat_delete(const char *dir);

#endif
