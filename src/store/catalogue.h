/* catalogue.h: the SQLite file that says which nodes there are (docs/format.md). It is a cache of the segments'
 * headers: whatever it holds can be made again from them, so any doubt about it is IMP_E_CORRUPT and leads to a
 * rebuild.
 *
 * Every row has a checksum over its key and its fields. One meta row holds the generation (raised by each change), the
 * number of rows and the sum of all row checksums, so that a row lost by a damaged page is noticed too. Uses, hits,
 * histories and settings are advisory: tables of their own, a bad row is dropped.
 *
 * One imp_cat per process and store, under a mutex of the store's. Several processes: WAL, a busy time-out, and a
 * generation that is checked before each match.
 */
#ifndef IMP_STORE_CATALOGUE_H
#define IMP_STORE_CATALOGUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "crypt/crypt.h"
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

/* "catalogue.db" in `dir`, made if missing (unless IMP_STORE_READONLY: IMP_E_NOTFOUND). IMP_E_CORRUPT: rebuild it.
 * IMP_E_VERSION: a newer format; leave it alone. IMP_E_PERM: a symbolic link, or not this user's to write.
 * IMP_STORE_MEMORY: a new one in memory, whatever `dir` is. */
int imp_cat_open(const char *dir, unsigned flags, imp_cat **out);
void imp_cat_close(imp_cat *c);

/* Nodes' tokens and histories are encrypted with `key` from now on, and are expected to be. It lives as long as the
 * catalogue. */
void imp_cat_use_key(imp_cat *c, const imp_key *key);

/* `before` is called ahead of whatever may wait for the disk, `after` behind it, and in between `busy` each time that
 * another process's lock is found in the way; in all calls but open and close. NULL: nothing is. */
void imp_cat_around(imp_cat *c, void (*before)(void *user), void (*after)(void *user), void (*busy)(void *user),
                    void *user);

/* How long a call waits for another process's lock before it gives up with IMP_E_BUSY; 5,000 at open. */
void imp_cat_busy_ms(imp_cat *c, int ms);

/* A change: begin takes the write lock (IMP_E_BUSY after the time-out; IMP_E_STALE if another process has put a new
 * catalogue in this one's place: close and open again), commit makes it durable (WAL, synchronous=FULL: a published
 * node must survive a power cut, see docs/format.md), rollback undoes. A failed commit has rolled back. After a failed
 * call inside a change, roll back. */
int imp_cat_begin(imp_cat *c);
int imp_cat_commit(imp_cat *c);
void imp_cat_rollback(imp_cat *c);
/* What the catalogue itself failed with in the latest change, its begin and commit included; 0: it didn't, whatever else
 * ended the change. */
int imp_cat_failure(const imp_cat *c);

/* Inside a change. Removing what isn't there is IMP_E_NOTFOUND and leaves the change as it was. */
int imp_cat_put_space(imp_cat *c, const imp_cat_space *space);
int imp_cat_remove_space(imp_cat *c, imp_hash128 id); /* one without segments */
int imp_cat_put_segment(imp_cat *c, const imp_cat_segment *segment);
int imp_cat_remove_segment(imp_cat *c, uint64_t id);
int imp_cat_put_node(imp_cat *c, const imp_cat_node *node); /* new, or in place of the row with this id */
int imp_cat_remove_node(imp_cat *c, uint64_t id);
int imp_cat_new_node_id(imp_cat *c, uint64_t *id);
uint64_t imp_cat_next_node(const imp_cat *c); /* the id that the next one will have, or a smaller one */
int imp_cat_reserve(imp_cat *c, const imp_cat_reservation *r);
int imp_cat_unreserve(imp_cat *c, uint64_t segment);

/* What the rows say. NULL entries are passed over. A non-zero return ends the read and is returned. What a call is
 * given lives until it returns; it may not use the catalogue. */
typedef struct imp_cat_reader {
    int (*reset)(void *user); /* before a whole scan: forget what you have, all of it follows */
    int (*space)(const imp_cat_space *space, void *user);
    int (*space_removed)(imp_hash128 id, void *user);
    int (*segment)(const imp_cat_segment *segment, void *user);
    int (*segment_removed)(uint64_t id, void *user);
    int (*node)(const imp_cat_node *node, void *user);
    int (*node_removed)(uint64_t id, void *user);
    void *user;
} imp_cat_reader;

/* Has another connection changed anything since imp_cat_read() last ran? Cheap (no page is read when nothing changed).
 * IMP_E_STALE as imp_cat_begin(). */
int imp_cat_changed(imp_cat *c, bool *changed);
/* The same without reading a page: false where that can't be told so. */
bool imp_cat_untouched(imp_cat *c);
/* Rows changed since generation `since`, one's own too (0: all, whole scan checked against the meta row): removals
 * first, then spaces, segments, nodes by rising depth. `*generation` becomes the present one. May be called inside a
 * change, best before one's own puts. What changed is kept for the last IMP_CAT_LOG_KEEP changes at least; if `since`
 * is older (or not of this catalogue), a whole scan is made instead, which `reset` announces (IMP_E_STALE if it is
 * NULL). After a failure (IMP_E_CORRUPT, say) what the reader was given is worth nothing. */
int imp_cat_read(imp_cat *c, uint64_t since, const imp_cat_reader *reader, uint64_t *generation);
/* The generation up to which imp_cat_read() has told everything or this connection has made the changes itself: a
 * process that reads inside a change, then makes its own changes and commits, goes on from here and isn't told of
 * those. */
uint64_t imp_cat_generation(const imp_cat *c);

#define IMP_CAT_LOG_KEEP 16384u

int imp_cat_reservations(imp_cat *c, int (*fn)(const imp_cat_reservation *r, void *user), void *user);
/* Sums for the size limit: bytes of all segments and of all reservations. */
int imp_cat_totals(imp_cat *c, uint64_t *segment_bytes, uint64_t *reserved_bytes);

/* Advisory statistics, outside the meta row's count. Call it for many nodes inside one change; outside, each is one. */
int imp_cat_put_use(imp_cat *c, uint64_t node, uint64_t hits, int64_t used_s);
int imp_cat_uses(imp_cat *c, int (*fn)(uint64_t node, uint64_t hits, int64_t used_s, void *user), void *user);

/* What history.c keeps of a segment: bytes that mean nothing here, advisory like the uses, and removed with the
 * segment. Put: inside a change, and only if the segment has a row. Get: the caller's (imp_free); IMP_E_NOTFOUND if
 * there is none or it is damaged. Remove: no failure if there is none. */
int imp_cat_put_history(imp_cat *c, uint64_t segment, const void *bytes, size_t n_bytes);
int imp_cat_get_history(imp_cat *c, uint64_t segment, void **bytes, size_t *n_bytes);
int imp_cat_remove_history(imp_cat *c, uint64_t segment);
#define IMP_CAT_HISTORY_BYTES_MAX (4u << 20) /* more is IMP_E_ARG */

/* Fingerprints of weight files. */
typedef struct imp_cat_file {
    uint64_t device, inode, size;
    int64_t mtime_ns, ctime_ns;
} imp_cat_file;
int imp_cat_fingerprint(imp_cat *c, const imp_cat_file *file, imp_hash128 *out); /* IMP_E_NOTFOUND */
int imp_cat_put_fingerprint(imp_cat *c, const imp_cat_file *file, imp_hash128 hash);

/* What reads cost on a device (impress.h), as a row of the same table whose inode is 0: no file has that. */
typedef struct imp_cat_costs {
    uint64_t device;
    double read_ns, byte_ns;
    int64_t measured_s;
} imp_cat_costs;
int imp_cat_costs_get(imp_cat *c, uint64_t device, imp_cat_costs *out); /* IMP_E_NOTFOUND */
int imp_cat_costs_put(imp_cat *c, const imp_cat_costs *costs);

/* The store's size limit, a setting of all who use it; 0: none is kept, or it is damaged. Known as of the latest begin,
 * read or imp_cat_changed(). Put: inside a change; outside the meta row's count, as the uses. */
uint64_t imp_cat_limit(const imp_cat *c);
int imp_cat_put_limit(imp_cat *c, uint64_t limit_bytes);

/* SQLite's own check, a whole scan, and whether nodes, parents and segments fit together: calls `fn` with a line for
 * each thing that is wrong. 0 if the check could be made, whatever it found. */
int imp_cat_check(imp_cat *c, void (*fn)(const char *what, void *user), void *user);
/* Give free pages and the write-ahead log back to the file system. Not inside a change. */
int imp_cat_compact(imp_cat *c);
/* The write-ahead log alone: cheap, where compacting writes everything anew. Not inside a change. Nobody writes
 * meanwhile, and those who read it are waited for: IMP_E_BUSY if they take longer. */
int imp_cat_checkpoint(imp_cat *c, int wait_ms);

/* Remove the files of a catalogue (db, wal, shm). Missing ones are no failure. */
int imp_cat_delete(const char *dir);

#endif
