/* cat_internal.h: what the files of the catalogue share. Nobody else includes it.
 *
 *     cat_schema.c   the tables and the statements
 *     cat_rows.c     rows to and from numbers, with their sums
 *     catalogue.c    open, close; changes and reads as transactions; the meta row
 *     cat_changes.c  rows put and removed
 *     cat_read.c     everything told, or what is newer than a generation
 *     cat_advice.c   what may be lost: uses, histories, fingerprints, costs of reads, settings
 *     cat_check.c    do all rows fit together?
 *
 * Invariants
 * C1  A row's `sum` is the XXH3 of its table's number, its key and its fields. A row that differs from what was
 *     written, or is found under another key, doesn't pass.
 * C2  The meta row says how many rows each counted table has and what their sums add up to (mod 2^64), and has its own
 *     sum. It is written in the transaction that changes the rows. A lost, doubled or stale row is noticed by a scan.
 * C3  Each change of a space, segment or node raises the generation by one and has one row in the log under its number.
 *     The log has every number from log_first to the generation.
 * C4  In a change, `now` is the meta row as it will be written; before and after it, as it was last read or written.
 *
 * No secondary indexes: nothing that could disagree with the rows.
 */
#ifndef IMP_STORE_CAT_INTERNAL_H
#define IMP_STORE_CAT_INTERNAL_H

#include "store/cat_db.h"
#include "store/catalogue.h"

/* The tables whose rows the meta row counts; the numbers are in the checksums and in the log. */
enum {
    CAT_SPACE = 0, CAT_SEGMENT = 1, CAT_NODE = 2, CAT_RESERVATION = 3, CAT_N_COUNTED = 4,
    CAT_USE = 4, CAT_FILE_HASH = 5, CAT_LOG = 6, CAT_META = 7, CAT_HISTORY = 8, CAT_SETTING = 9
};

/* The first versions of the format that have the table; or, the last of them, where a space's row may go again. */
enum { CAT_VERSION_HISTORY = 2, CAT_VERSION_SETTING = 3, CAT_VERSION_SPACES_GO = 4 };

enum { CAT_PUT = 0, CAT_REMOVED = 1 };

enum { CAT_MAX_TOKENS = 1 << 20 };

enum {
    CAT_META_GET, CAT_META_PUT,
    CAT_SPACE_GET, CAT_SPACE_PUT, CAT_SPACE_DEL, CAT_SPACE_ALL,
    CAT_SEGMENT_GET, CAT_SEGMENT_PUT, CAT_SEGMENT_DEL, CAT_SEGMENT_ALL,
    CAT_NODE_GET, CAT_NODE_PUT, CAT_NODE_DEL, CAT_NODE_DEPTHS,
    CAT_RESERVATION_GET, CAT_RESERVATION_PUT, CAT_RESERVATION_DEL, CAT_RESERVATION_ALL,
    CAT_LOG_SINCE, CAT_LOG_PUT, CAT_LOG_PRUNE,
    CAT_USE_PUT, CAT_USE_DEL, CAT_USE_ALL,
    CAT_FILE_GET, CAT_FILE_PUT, CAT_FILE_ALL,
    CAT_HISTORY_GET, CAT_HISTORY_PUT, CAT_HISTORY_DEL, CAT_HISTORY_ALL,
    CAT_SETTING_GET, CAT_SETTING_PUT, CAT_SETTING_ALL,
    CAT_N_SQL,
};

extern const cat_schema cat_catalogue_schema;

/* The meta row. All 64-bit, so that it can be read, written and summed as an array. */
typedef struct cat_meta {
    uint64_t generation, log_first, next_node, segment_bytes, reserved_bytes;
    uint64_t n[CAT_N_COUNTED], sum[CAT_N_COUNTED];
} cat_meta;

enum { CAT_N_META = sizeof(cat_meta) / sizeof(uint64_t) };

struct imp_cat {
    cat_db *db;
    const imp_key *key; /* NULL: nothing is encrypted */
    cat_meta now, before; /* before: as the change began, for a rollback */
    uint64_t limit, limit_before; /* the setting, as of `now` and `before`; 0: there is none */
    bool in_change;
    int failed;           /* the first failure of the latest change: it can't be committed any more */
    uint64_t seen;        /* the generation up to which imp_cat_read() has told everything, or we made it ourselves */
    bool unseen;          /* others have changed something beyond `seen` */
    int64_t data_version; /* SQLite's, when `seen` was the newest */
    cat_db_mark mark;     /* likewise; all 0: not known */
    unsigned char *bytes; /* a node's tokens on their way to a row */
    size_t bytes_room;
    int32_t *tokens; /* and back */
    size_t tokens_room;
};

/* ---- cat_rows.c */

int cat_corrupt(const char *what, uint64_t id);
int cat_no_memory(void);

uint64_t cat_sum_of(unsigned table, const uint64_t *fields, size_t n);
uint64_t cat_space_sum(const imp_cat_space *r, size_t n_name);
uint64_t cat_segment_sum(const imp_cat_segment *r);
uint64_t cat_node_flags(const imp_cat_node *r);
uint64_t cat_node_sum(const imp_cat_node *r, uint64_t flags, const void *tokens, size_t n_bytes);
uint64_t cat_reservation_sum(const imp_cat_reservation *r);

/* What the log holds of a row: an id, or a space's two halves. */
typedef struct cat_log_key {
    uint64_t lo, hi;
} cat_log_key;

uint64_t cat_log_sum(uint64_t generation, uint64_t kind, uint64_t removed, cat_log_key key);

uint64_t cat_column(sqlite3_stmt *s, int i);
/* A blob of another length reads as zero: the row's sum won't fit. */
imp_hash128 cat_column_hash(sqlite3_stmt *s, int i);
/* Bind numbers to parameters 1... */
void cat_bind_numbers(sqlite3_stmt *s, const uint64_t *v, int n);
/* IMP_E_NOMEM: it isn't bound, and the statement is done with. SQLite would take NULL for it. */
int cat_bind_hash(sqlite3_stmt *s, int i, imp_hash128 h);

/* What is encrypted of a row is bound to its table and its key. */
enum { CAT_EXTRA_BYTES = 16 };

void cat_put_extra(unsigned char extra[CAT_EXTRA_BYTES], unsigned table, uint64_t id);

/* Parse the row that `s` stands on and check it (C1). */
int cat_parse_space(sqlite3_stmt *s, imp_cat_space *out, uint64_t *sum);
int cat_parse_segment(sqlite3_stmt *s, imp_cat_segment *out, uint64_t *sum);
int cat_parse_reservation(sqlite3_stmt *s, imp_cat_reservation *out, uint64_t *sum);

/* A row by its key: 1 if it is there, 0 if not, or a code. A space's fields live until cat_db_done(*s); a node's tokens
 * lie in c->tokens until the next node. */
int cat_find_space(imp_cat *c, imp_hash128 id, sqlite3_stmt **s, imp_cat_space *out, uint64_t *sum);
int cat_find_segment(imp_cat *c, uint64_t id, imp_cat_segment *out, uint64_t *sum);
int cat_find_node(imp_cat *c, uint64_t id, imp_cat_node *out, uint64_t *sum);
int cat_find_reservation(imp_cat *c, uint64_t segment, imp_cat_reservation *out, uint64_t *sum);

/* ---- catalogue.c */

/* Inside a change, remember that something failed; pass the code on. */
int cat_note(imp_cat *c, int rc);
int cat_must_be_in_change(const imp_cat *c);

/* One state of the database for all that is read until cat_end_read(), and its meta row in c->now. */
int cat_begin_read(imp_cat *c);
void cat_end_read(imp_cat *c);

/* ---- cat_changes.c */

int cat_delete_row(imp_cat *c, unsigned statement, uint64_t id);

/* ---- cat_read.c */

int cat_scan_all(imp_cat *c, const imp_cat_reader *reader);
int cat_read_log(imp_cat *c, uint64_t since, const imp_cat_reader *reader);

/* ---- cat_advice.c. `*n_bad`: rows that were passed over. */

int cat_scan_uses(imp_cat *c, int (*fn)(uint64_t node, uint64_t hits, int64_t used_s, void *user), void *user,
                  uint64_t *n_bad);
int cat_scan_histories(imp_cat *c, uint64_t *n_bad);
int cat_scan_files(imp_cat *c, uint64_t *n_bad);
int cat_scan_settings(imp_cat *c, uint64_t *n_bad);

/* *value: 0 if there is none that is sound; the catalogue is no worse for that. */
int cat_get_setting(imp_cat *c, const char *name, uint64_t *value);
int cat_put_setting(imp_cat *c, const char *name, uint64_t value);

#endif
