/* catalogue.c: rows, their checksums, and the meta row that vouches for all of them.
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
#include "store/catalogue.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/hash.h"
#include "base/rng.h"
#include "base/status.h"
#include "store/cat_db.h"

/* The tables whose rows the meta row counts; the numbers are in the checksums and in the log. */
enum { SPACE = 0, SEGMENT = 1, NODE = 2, RESERVATION = 3, N_COUNTED = 4, USE = 4, FILE_HASH = 5, LOG = 6, META = 7,
       HISTORY = 8 };

enum { PUT = 0, REMOVED = 1 };

enum { MAX_TOKENS = 1 << 20 };

static const char *const create[] = {
    "CREATE TABLE meta(id INTEGER PRIMARY KEY, generation INTEGER, log_first INTEGER, next_node INTEGER, "
    "segment_bytes INTEGER, reserved_bytes INTEGER, n_spaces INTEGER, n_segments INTEGER, n_nodes INTEGER, "
    "n_reservations INTEGER, spaces_sum INTEGER, segments_sum INTEGER, nodes_sum INTEGER, reservations_sum INTEGER, "
    "sum INTEGER)",
    "CREATE TABLE space(id BLOB PRIMARY KEY, created INTEGER, model_name TEXT, sum INTEGER) WITHOUT ROWID",
    "CREATE TABLE segment(id INTEGER PRIMARY KEY, space BLOB, disk_bytes INTEGER, n_tokens INTEGER, sum INTEGER)",
    "CREATE TABLE node(id INTEGER PRIMARY KEY, parent INTEGER, space BLOB, segment INTEGER, segment_first INTEGER, "
    "n_tokens INTEGER, depth INTEGER, flags INTEGER, created INTEGER, sum INTEGER, tokens BLOB)",
    "CREATE TABLE reservation(segment INTEGER PRIMARY KEY, instance INTEGER, bytes INTEGER, sum INTEGER)",
    "CREATE TABLE log(generation INTEGER PRIMARY KEY, kind INTEGER, removed INTEGER, key BLOB, sum INTEGER)",
    "CREATE TABLE use(node INTEGER PRIMARY KEY, hits INTEGER, used INTEGER, sum INTEGER)",
    "CREATE TABLE file(device INTEGER, inode INTEGER, size INTEGER, mtime_ns INTEGER, ctime_ns INTEGER, hash BLOB, "
    "sum INTEGER, PRIMARY KEY(device, inode)) WITHOUT ROWID",
    "CREATE TABLE history(segment INTEGER PRIMARY KEY, bytes BLOB, sum INTEGER)",
    NULL,
};

enum {
    META_GET, META_PUT,
    SPACE_GET, SPACE_PUT, SPACE_ALL,
    SEGMENT_GET, SEGMENT_PUT, SEGMENT_DEL, SEGMENT_ALL,
    NODE_GET, NODE_PUT, NODE_DEL, NODE_DEPTHS,
    RESERVATION_GET, RESERVATION_PUT, RESERVATION_DEL, RESERVATION_ALL,
    LOG_SINCE, LOG_PUT, LOG_PRUNE,
    USE_PUT, USE_DEL, USE_ALL,
    FILE_GET, FILE_PUT, FILE_ALL,
    HISTORY_GET, HISTORY_PUT, HISTORY_DEL, HISTORY_ALL,
    N_SQL,
};

static const char *const sql[N_SQL] = {
    [META_GET] = "SELECT generation, log_first, next_node, segment_bytes, reserved_bytes, n_spaces, n_segments, "
                 "n_nodes, n_reservations, spaces_sum, segments_sum, nodes_sum, reservations_sum, sum FROM meta "
                 "WHERE id = 1",
    [META_PUT] = "INSERT OR REPLACE INTO meta VALUES(1, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    [SPACE_GET] = "SELECT id, created, model_name, sum FROM space WHERE id = ?",
    [SPACE_PUT] = "INSERT OR REPLACE INTO space VALUES(?, ?, ?, ?)",
    [SPACE_ALL] = "SELECT id, created, model_name, sum FROM space",
    [SEGMENT_GET] = "SELECT id, space, disk_bytes, n_tokens, sum FROM segment WHERE id = ?",
    [SEGMENT_PUT] = "INSERT OR REPLACE INTO segment VALUES(?, ?, ?, ?, ?)",
    [SEGMENT_DEL] = "DELETE FROM segment WHERE id = ?",
    [SEGMENT_ALL] = "SELECT id, space, disk_bytes, n_tokens, sum FROM segment",
    [NODE_GET] = "SELECT id, parent, space, segment, segment_first, n_tokens, depth, flags, created, sum, tokens "
                 "FROM node WHERE id = ?",
    [NODE_PUT] = "INSERT OR REPLACE INTO node VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    [NODE_DEL] = "DELETE FROM node WHERE id = ?",
    [NODE_DEPTHS] = "SELECT id, depth FROM node",
    [RESERVATION_GET] = "SELECT segment, instance, bytes, sum FROM reservation WHERE segment = ?",
    [RESERVATION_PUT] = "INSERT OR REPLACE INTO reservation VALUES(?, ?, ?, ?)",
    [RESERVATION_DEL] = "DELETE FROM reservation WHERE segment = ?",
    [RESERVATION_ALL] = "SELECT segment, instance, bytes, sum FROM reservation",
    [LOG_SINCE] = "SELECT generation, kind, removed, key, sum FROM log WHERE generation > ? ORDER BY generation",
    [LOG_PUT] = "INSERT INTO log VALUES(?, ?, ?, ?, ?)",
    [LOG_PRUNE] = "DELETE FROM log WHERE generation < ?",
    [USE_PUT] = "INSERT OR REPLACE INTO use VALUES(?, ?, ?, ?)",
    [USE_DEL] = "DELETE FROM use WHERE node = ?",
    [USE_ALL] = "SELECT node, hits, used, sum FROM use",
    [FILE_GET] = "SELECT device, inode, size, mtime_ns, ctime_ns, hash, sum FROM file WHERE device = ? AND inode = ?",
    [FILE_PUT] = "INSERT OR REPLACE INTO file VALUES(?, ?, ?, ?, ?, ?, ?)",
    [FILE_ALL] = "SELECT device, inode, size, mtime_ns, ctime_ns, hash, sum FROM file",
    [HISTORY_GET] = "SELECT segment, bytes, sum FROM history WHERE segment = ?",
    [HISTORY_PUT] = "INSERT OR REPLACE INTO history SELECT ?1, ?2, ?3 "
                    "WHERE EXISTS(SELECT 1 FROM segment WHERE id = ?1)",
    [HISTORY_DEL] = "DELETE FROM history WHERE segment = ?",
    [HISTORY_ALL] = "SELECT segment, bytes, sum FROM history",
};

static const cat_schema schema = {
    .application_id = 0x494d5043, /* "IMPC" */
    .version = 2,
    .oldest = 1,
    .n_oldest = 8, /* all but the histories */
    .create = create,
    .sql = sql,
    .n_sql = N_SQL,
};

/* The meta row. All 64-bit, so that it can be read, written and summed as an array. */
typedef struct meta {
    uint64_t generation, log_first, next_node, segment_bytes, reserved_bytes;
    uint64_t n[N_COUNTED], sum[N_COUNTED];
} meta;

enum { N_META = sizeof(meta) / sizeof(uint64_t) };

struct imp_cat {
    cat_db *db;
    const imp_key *key; /* NULL: nothing is encrypted */
    meta now, before; /* before: as the change began, for a rollback */
    bool in_change;
    int failed;           /* the first failure of the latest change: it can't be committed any more */
    uint64_t seen;        /* the generation up to which imp_cat_read() has told everything, or we made it ourselves */
    bool unseen;          /* others have changed something beyond `seen` */
    int64_t data_version; /* SQLite's, when `seen` was the newest */
    unsigned char *bytes; /* a node's tokens on their way to a row */
    size_t bytes_room;
    int32_t *tokens; /* and back */
    size_t tokens_room;
};

static int corrupt(const char *what, uint64_t id)
{
    return imp_fail(IMP_E_CORRUPT, "catalogue: %s %llu is damaged", what, (unsigned long long)id);
}

static int no_memory(void) { return imp_fail(IMP_E_NOMEM, "catalogue: no memory"); }

/* ---- rows as numbers */

static uint64_t sum_of(unsigned table, const uint64_t *fields, size_t n)
{
    unsigned char bytes[8 * 16];
    for (size_t i = 0; i < n; i++) imp_put64(bytes + 8 * i, fields[i]);
    return imp_hash64(bytes, 8 * n, table);
}

static uint64_t column(sqlite3_stmt *s, int i) { return (uint64_t)sqlite3_column_int64(s, i); }

/* Bind numbers to parameters 1... */
static void bind_numbers(sqlite3_stmt *s, const uint64_t *v, int n)
{
    for (int i = 0; i < n; i++) sqlite3_bind_int64(s, i + 1, (sqlite3_int64)v[i]);
}

static void bind_hash(sqlite3_stmt *s, int i, imp_hash128 h)
{
    unsigned char b[16];
    imp_put64(b, h.lo);
    imp_put64(b + 8, h.hi);
    sqlite3_bind_blob(s, i, b, sizeof b, SQLITE_TRANSIENT);
}

static imp_hash128 parse_hash(const unsigned char *b)
{
    return (imp_hash128){.lo = imp_get64(b), .hi = imp_get64(b + 8)};
}

/* A blob of another length reads as zero: the row's sum won't fit. */
static imp_hash128 column_hash(sqlite3_stmt *s, int i)
{
    const unsigned char *b = sqlite3_column_blob(s, i);
    return b && sqlite3_column_bytes(s, i) == 16 ? parse_hash(b) : (imp_hash128){0, 0};
}

static uint64_t space_sum(const imp_cat_space *r, size_t n_name)
{
    uint64_t f[] = {r->id.lo, r->id.hi, (uint64_t)r->created_s};
    return imp_hash64(r->model_name, n_name, sum_of(SPACE, f, 3));
}

static uint64_t segment_sum(const imp_cat_segment *r)
{
    uint64_t f[] = {r->id, r->space.lo, r->space.hi, r->disk_bytes, r->n_tokens};
    return sum_of(SEGMENT, f, 5);
}

static uint64_t node_flags(const imp_cat_node *r) { return (uint64_t)r->derived | (uint64_t)r->pinned << 1; }

/* Of the tokens as they are on disk: encrypted ones can't be guessed by it. */
static uint64_t node_sum(const imp_cat_node *r, uint64_t flags, const void *tokens, size_t n_bytes)
{
    uint64_t f[] = {r->id,       r->parent, r->space.lo, r->space.hi,           r->segment, r->segment_first,
                    r->n_tokens, r->depth,  flags,       (uint64_t)r->created_s};
    return imp_hash64(tokens, n_bytes, sum_of(NODE, f, 10));
}

static uint64_t reservation_sum(const imp_cat_reservation *r)
{
    uint64_t f[] = {r->segment, r->instance, r->bytes};
    return sum_of(RESERVATION, f, 3);
}

/* ---- the meta row */

static int load_meta(imp_cat *c)
{
    sqlite3_stmt *s = NULL;
    meta m = {0};
    uint64_t sum = 0;
    int rc = cat_db_stmt(c->db, META_GET, &s);
    if (rc == 0) rc = cat_db_step(c->db, s);
    if (rc > 0) {
        uint64_t v[N_META];
        for (int i = 0; i < N_META; i++) v[i] = column(s, i);
        sum = column(s, N_META);
        memcpy(&m, v, sizeof m);
        rc = sum == sum_of(META, v, N_META) ? 0 : imp_fail(IMP_E_CORRUPT, "catalogue: its meta row is damaged");
    } else if (rc == 0) {
        rc = imp_fail(IMP_E_CORRUPT, "catalogue: its meta row is missing");
    }
    cat_db_done(s);
    if (rc == 0) c->now = m;
    return rc;
}

static int store_meta(imp_cat *c)
{
    sqlite3_stmt *s = NULL;
    uint64_t v[N_META + 1];
    memcpy(v, &c->now, sizeof c->now);
    v[N_META] = sum_of(META, v, N_META);
    int rc = cat_db_stmt(c->db, META_PUT, &s);
    if (rc < 0) return rc;
    bind_numbers(s, v, N_META + 1);
    return cat_db_run(c->db, s);
}

/* ---- open, close */

static char *path_in(const char *dir, const char *name)
{
    size_t n = strlen(dir) + strlen(name) + 2;
    char *path = imp_malloc(n);
    if (path) snprintf(path, n, "%s/%s", dir, name);
    return path;
}

/* So that a name made or removed in it is on the disk. */
static int sync_dir(const char *dir)
{
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return imp_fail_errno(errno, "%s", dir);
    int rc = fsync(fd) == 0 ? 0 : imp_fail_errno(errno, "%s", dir);
    close(fd);
    return rc;
}

/* `*real`: the directory, its links resolved; NULL for a catalogue in memory. */
static int open_db(imp_cat *c, const char *dir, unsigned flags, char **real, bool *made)
{
    *real = NULL;
    if (flags & IMP_STORE_MEMORY) return cat_db_open(NULL, &schema, CAT_DB_MEMORY, &c->db, made);
    /* Only the catalogue itself may be no symbolic link; SQLite would refuse one anywhere in the path. */
    *real = realpath(dir, NULL);
    if (!*real) return imp_fail_errno(errno, "%s", dir);
    char *path = path_in(*real, "catalogue.db");
    if (!path) return no_memory();
    int rc = cat_db_open(path, &schema, flags & IMP_STORE_READONLY ? CAT_DB_READONLY : 0, &c->db, made);
    imp_free(path);
    return rc;
}

int imp_cat_open(const char *dir, unsigned flags, imp_cat **out)
{
    *out = NULL;
    char *real = NULL;
    bool made = false;
    imp_cat *c = imp_calloc(1, sizeof *c);
    int rc = c ? open_db(c, dir, flags, &real, &made) : no_memory();
    if (rc < 0) goto out;
    if (made) {
        /* A start of its own, so that a generation remembered from an earlier catalogue is out of this one's range. */
        imp_rng rng;
        imp_rng_seed_os(&rng);
        c->now.generation = 1 + imp_rng_below(&rng, (uint64_t)1 << 48);
        c->now.log_first = c->now.generation + 1;
        c->now.next_node = 1;
        rc = store_meta(c);
        if (rc == 0) rc = cat_db_commit(c->db);
        if (rc == 0 && real) rc = sync_dir(real);
        if (rc < 0) goto out;
    } else {
        rc = load_meta(c);
        if (rc < 0) goto out;
    }
    c->unseen = true;
    *out = c;
    c = NULL;
out:
    free(real); /* realpath's own allocation */
    imp_cat_close(c);
    return rc;
}

void imp_cat_close(imp_cat *c)
{
    if (!c) return;
    cat_db_close(c->db);
    imp_free(c->tokens);
    imp_free(c->bytes);
    imp_free(c);
}

void imp_cat_use_key(imp_cat *c, const imp_key *key) { c->key = key; }

void imp_cat_busy_ms(imp_cat *c, int ms) { cat_db_busy_ms(c->db, ms); }

uint64_t imp_cat_generation(const imp_cat *c) { return c->seen; }

int imp_cat_delete(const char *dir)
{
    /* The database first: an old -wal beside a new, empty database is thrown away by SQLite, the reverse is not. */
    static const char *const names[] = {"catalogue.db", "catalogue.db-wal", "catalogue.db-shm", "catalogue.db-journal"};
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < sizeof names / sizeof names[0]; i++) {
        char *path = path_in(dir, names[i]);
        if (!path) {
            rc = no_memory();
        } else if (unlink(path) != 0 && errno != ENOENT) {
            rc = imp_fail_errno(errno, "%s", path);
        }
        imp_free(path);
    }
    return rc < 0 ? rc : sync_dir(dir);
}

/* ---- changes */

static int check_in_place(imp_cat *c)
{
    return cat_db_moved(c->db) ? imp_fail(IMP_E_STALE, "catalogue: another process has made a new one") : 0;
}

int imp_cat_begin(imp_cat *c)
{
    int rc = check_in_place(c);
    if (rc < 0) return rc;
    rc = cat_db_begin(c->db);
    c->failed = rc;
    if (rc < 0) return rc;
    rc = load_meta(c);
    c->failed = rc;
    if (rc < 0) {
        cat_db_rollback(c->db);
        return rc;
    }
    if (c->now.generation != c->seen) c->unseen = true;
    c->before = c->now;
    c->in_change = true;
    return 0;
}

static int prune_log(imp_cat *c)
{
    /* In large steps, so that it costs little each time. */
    uint64_t n = c->now.generation + 1 - c->now.log_first;
    if (n <= 2 * IMP_CAT_LOG_KEEP) return 0;
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, LOG_PRUNE, &s);
    if (rc < 0) return rc;
    c->now.log_first = c->now.generation + 1 - IMP_CAT_LOG_KEEP;
    sqlite3_bind_int64(s, 1, (sqlite3_int64)c->now.log_first);
    return cat_db_run(c->db, s);
}

int imp_cat_commit(imp_cat *c)
{
    int rc = c->failed ? imp_fail(c->failed, "catalogue: a part of the change had failed") : 0;
    if (rc == 0 && memcmp(&c->now, &c->before, sizeof c->now) != 0) {
        rc = prune_log(c);
        if (rc == 0) rc = store_meta(c);
    }
    if (rc == 0) rc = cat_db_commit(c->db);
    if (rc < 0) {
        if (c->failed == 0) c->failed = rc;
        imp_cat_rollback(c);
        return rc;
    }
    c->in_change = false;
    if (!c->unseen) c->seen = c->now.generation;
    return 0;
}

void imp_cat_rollback(imp_cat *c)
{
    cat_db_rollback(c->db);
    if (!c->in_change) return;
    c->in_change = false;
    c->now = c->before;
    /* Read inside the change, after changes of its own: those are undone, but all before was told. */
    if (c->seen > c->now.generation) c->seen = c->now.generation;
}

int imp_cat_failure(const imp_cat *c) { return c->failed; }

/* Inside a change, remember that something failed; pass the code on. */
static int note(imp_cat *c, int rc)
{
    if (rc < 0 && c->in_change && c->failed == 0) c->failed = rc;
    return rc;
}

static int must_be_in_change(const imp_cat *c)
{
    return c->in_change ? 0 : imp_fail(IMP_E_ARG, "catalogue: a change outside of a transaction");
}

/* What the log holds of a row: an id, or a space's two halves. */
typedef struct log_key {
    uint64_t lo, hi;
} log_key;

static uint64_t log_sum(uint64_t generation, uint64_t kind, uint64_t removed, log_key key)
{
    uint64_t f[] = {generation, kind, removed, key.lo, key.hi};
    return sum_of(LOG, f, 5);
}

static int log_change(imp_cat *c, unsigned kind, unsigned removed, log_key key)
{
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, LOG_PUT, &s);
    if (rc < 0) return rc;
    uint64_t generation = c->now.generation + 1, v[] = {generation, kind, removed};
    bind_numbers(s, v, 3);
    bind_hash(s, 4, (imp_hash128){.lo = key.lo, .hi = key.hi});
    sqlite3_bind_int64(s, 5, (sqlite3_int64)log_sum(generation, kind, removed, key));
    rc = cat_db_run(c->db, s);
    if (rc == 0) c->now.generation = generation;
    return rc;
}

/* ---- rows from the database. Each parses the row `s` stands on and checks it (C1). */

static int parse_space(sqlite3_stmt *s, imp_cat_space *out, uint64_t *sum)
{
    *out = (imp_cat_space){.id = column_hash(s, 0), .created_s = sqlite3_column_int64(s, 1)};
    out->model_name = (const char *)sqlite3_column_text(s, 2);
    size_t n_name = (size_t)sqlite3_column_bytes(s, 2);
    *sum = column(s, 3);
    if (!out->model_name || strlen(out->model_name) != n_name || *sum != space_sum(out, n_name)) {
        return imp_fail(IMP_E_CORRUPT, "catalogue: a space is damaged");
    }
    return 0;
}

static int parse_segment(sqlite3_stmt *s, imp_cat_segment *out, uint64_t *sum)
{
    *out = (imp_cat_segment){.id = column(s, 0), .space = column_hash(s, 1), .disk_bytes = column(s, 2)};
    uint64_t n_tokens = column(s, 3);
    out->n_tokens = (uint32_t)n_tokens;
    *sum = column(s, 4);
    return n_tokens <= UINT32_MAX && *sum == segment_sum(out) ? 0 : corrupt("segment", out->id);
}

/* What is encrypted of a row is bound to its table and its key. */
enum { EXTRA_BYTES = 16 };

static void put_extra(unsigned char extra[EXTRA_BYTES], unsigned table, uint64_t id)
{
    imp_put64(extra, table);
    imp_put64(extra + 8, id);
}

/* `bytes` [n] as on disk, to numbers at `out`, which has room for them. */
static int read_tokens(const imp_cat *c, uint64_t id, const unsigned char *bytes, size_t n_bytes, int32_t *out)
{
    unsigned char extra[EXTRA_BYTES];
    size_t n = (c->key ? n_bytes - IMP_BOX_BYTES : n_bytes) / 4;
    put_extra(extra, NODE, id);
    int rc = c->key ? imp_box_open(c->key, extra, sizeof extra, bytes, n_bytes, out) : 0;
    const unsigned char *from = c->key ? (const unsigned char *)out : bytes;
    for (size_t i = 0; rc == 0 && i < n; i++) {
        uint32_t token = imp_get32(from + 4 * i);
        memcpy(out + i, &token, sizeof token);
    }
    return rc == IMP_E_CORRUPT ? corrupt("node", id) : rc;
}

static int parse_node(imp_cat *c, sqlite3_stmt *s, imp_cat_node *out, uint64_t *sum)
{
    uint64_t first = column(s, 4), n = column(s, 5), flags = column(s, 7);
    *out = (imp_cat_node){
        .id = column(s, 0),
        .parent = column(s, 1),
        .space = column_hash(s, 2),
        .segment = column(s, 3),
        .segment_first = (uint32_t)first,
        .n_tokens = (uint32_t)n,
        .depth = column(s, 6),
        .derived = flags & 1,
        .pinned = flags & 2,
        .created_s = sqlite3_column_int64(s, 8),
    };
    *sum = column(s, 9);
    const unsigned char *bytes = sqlite3_column_blob(s, 10);
    uint64_t n_bytes = 4 * n + (c->key ? IMP_BOX_BYTES : 0);
    if (first > UINT32_MAX || n < 1 || n > MAX_TOKENS || !bytes || (uint64_t)sqlite3_column_bytes(s, 10) != n_bytes ||
        *sum != node_sum(out, flags, bytes, (size_t)n_bytes)) {
        return corrupt("node", out->id);
    }
    if (n > c->tokens_room) {
        int32_t *grown = imp_realloc_array(c->tokens, (size_t)n, sizeof *grown);
        if (!grown) return no_memory();
        c->tokens = grown;
        c->tokens_room = (size_t)n;
    }
    out->tokens = c->tokens;
    return read_tokens(c, out->id, bytes, (size_t)n_bytes, c->tokens);
}

static int parse_reservation(sqlite3_stmt *s, imp_cat_reservation *out, uint64_t *sum)
{
    *out = (imp_cat_reservation){.segment = column(s, 0), .instance = column(s, 1), .bytes = column(s, 2)};
    *sum = column(s, 3);
    return *sum == reservation_sum(out) ? 0 : corrupt("reservation", out->segment);
}

/* A row by its key: 1 if it is there (its fields live until cat_db_done(*s)), 0 if not, or a code. */
static int find_space(imp_cat *c, imp_hash128 id, sqlite3_stmt **s, imp_cat_space *out, uint64_t *sum)
{
    int rc = cat_db_stmt(c->db, SPACE_GET, s);
    if (rc < 0) return rc;
    bind_hash(*s, 1, id);
    rc = cat_db_step(c->db, *s);
    if (rc <= 0) return rc;
    rc = parse_space(*s, out, sum);
    return rc < 0 ? rc : 1;
}

static int find_segment(imp_cat *c, uint64_t id, imp_cat_segment *out, uint64_t *sum)
{
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, SEGMENT_GET, &s);
    if (rc < 0) return rc;
    sqlite3_bind_int64(s, 1, (sqlite3_int64)id);
    rc = cat_db_step(c->db, s);
    if (rc > 0) rc = parse_segment(s, out, sum) < 0 ? IMP_E_CORRUPT : 1;
    cat_db_done(s);
    return rc;
}

/* Its tokens live in c->tokens until the next node. */
static int find_node(imp_cat *c, uint64_t id, imp_cat_node *out, uint64_t *sum)
{
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, NODE_GET, &s);
    if (rc < 0) return rc;
    sqlite3_bind_int64(s, 1, (sqlite3_int64)id);
    rc = cat_db_step(c->db, s);
    if (rc > 0) {
        rc = parse_node(c, s, out, sum);
        if (rc == 0) rc = 1;
    }
    cat_db_done(s);
    return rc;
}

static int find_reservation(imp_cat *c, uint64_t segment, imp_cat_reservation *out, uint64_t *sum)
{
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, RESERVATION_GET, &s);
    if (rc < 0) return rc;
    sqlite3_bind_int64(s, 1, (sqlite3_int64)segment);
    rc = cat_db_step(c->db, s);
    if (rc > 0) rc = parse_reservation(s, out, sum) < 0 ? IMP_E_CORRUPT : 1;
    cat_db_done(s);
    return rc;
}

/* ---- changes of rows */

/* C2, for a row written in place of one with `old_sum` (if `had`) or new. */
static void count_put(imp_cat *c, unsigned table, bool had, uint64_t old_sum, uint64_t sum)
{
    if (!had) c->now.n[table]++;
    c->now.sum[table] += sum - (had ? old_sum : 0);
}

static void count_removed(imp_cat *c, unsigned table, uint64_t sum)
{
    c->now.n[table]--;
    c->now.sum[table] -= sum;
}

static int put_space(imp_cat *c, const imp_cat_space *given)
{
    imp_cat_space row = *given, old;
    if (!row.model_name) row.model_name = "";
    size_t n_name = strlen(row.model_name);
    if (n_name > 4096) return imp_fail(IMP_E_ARG, "catalogue: a model name of %zu bytes", n_name);

    sqlite3_stmt *s = NULL;
    uint64_t old_sum = 0, sum = space_sum(&row, n_name);
    int had = find_space(c, row.id, &s, &old, &old_sum);
    cat_db_done(s);
    if (had < 0) return had;
    int rc = cat_db_stmt(c->db, SPACE_PUT, &s);
    if (rc < 0) return rc;
    bind_hash(s, 1, row.id);
    sqlite3_bind_int64(s, 2, row.created_s);
    sqlite3_bind_text(s, 3, row.model_name, (int)n_name, SQLITE_STATIC);
    sqlite3_bind_int64(s, 4, (sqlite3_int64)sum);
    rc = cat_db_run(c->db, s);
    if (rc < 0) return rc;
    count_put(c, SPACE, had > 0, old_sum, sum);
    return log_change(c, SPACE, PUT, (log_key){row.id.lo, row.id.hi});
}

static int put_segment(imp_cat *c, const imp_cat_segment *row)
{
    imp_cat_segment old = {0};
    sqlite3_stmt *s = NULL;
    uint64_t old_sum = 0, sum = segment_sum(row);
    int had = find_segment(c, row->id, &old, &old_sum);
    if (had < 0) return had;
    int rc = cat_db_stmt(c->db, SEGMENT_PUT, &s);
    if (rc < 0) return rc;
    sqlite3_bind_int64(s, 1, (sqlite3_int64)row->id);
    bind_hash(s, 2, row->space);
    sqlite3_bind_int64(s, 3, (sqlite3_int64)row->disk_bytes);
    sqlite3_bind_int64(s, 4, row->n_tokens);
    sqlite3_bind_int64(s, 5, (sqlite3_int64)sum);
    rc = cat_db_run(c->db, s);
    if (rc < 0) return rc;
    count_put(c, SEGMENT, had > 0, old_sum, sum);
    c->now.segment_bytes += row->disk_bytes - (had > 0 ? old.disk_bytes : 0);
    return log_change(c, SEGMENT, PUT, (log_key){row->id, 0});
}

static int delete_row(imp_cat *c, unsigned statement, uint64_t id)
{
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, statement, &s);
    if (rc < 0) return rc;
    sqlite3_bind_int64(s, 1, (sqlite3_int64)id);
    return cat_db_run(c->db, s);
}

static int not_found(const char *what, uint64_t id)
{
    return imp_fail(IMP_E_NOTFOUND, "catalogue: no %s %llu", what, (unsigned long long)id);
}

static int remove_segment(imp_cat *c, uint64_t id)
{
    imp_cat_segment old;
    uint64_t sum = 0;
    int had = find_segment(c, id, &old, &sum);
    if (had <= 0) return had < 0 ? had : not_found("segment", id);
    int rc = delete_row(c, SEGMENT_DEL, id);
    if (rc == 0) rc = delete_row(c, HISTORY_DEL, id);
    if (rc < 0) return rc;
    count_removed(c, SEGMENT, sum);
    c->now.segment_bytes -= old.disk_bytes;
    return log_change(c, SEGMENT, REMOVED, (log_key){id, 0});
}

static int put_node(imp_cat *c, const imp_cat_node *row)
{
    if (row->id == 0 || row->id > INT64_MAX || row->n_tokens < 1 || row->n_tokens > MAX_TOKENS) {
        return imp_fail(IMP_E_ARG, "catalogue: node %llu of %u tokens", (unsigned long long)row->id, row->n_tokens);
    }
    size_t box = c->key ? IMP_BOX_BYTES : 0, n_bytes = 4 * (size_t)row->n_tokens + box;
    if (n_bytes > c->bytes_room) {
        unsigned char *grown = imp_realloc(c->bytes, n_bytes);
        if (!grown) return no_memory();
        c->bytes = grown;
        c->bytes_room = n_bytes;
    }
    for (size_t i = 0; i < row->n_tokens; i++) imp_put32(c->bytes + box + 4 * i, (uint32_t)row->tokens[i]);
    if (c->key) {
        unsigned char extra[EXTRA_BYTES];
        put_extra(extra, NODE, row->id);
        int sealed = imp_box_seal(c->key, extra, sizeof extra, c->bytes + box, n_bytes - box, c->bytes);
        if (sealed < 0) return sealed;
    }

    imp_cat_node old;
    sqlite3_stmt *s = NULL;
    uint64_t old_sum = 0, flags = node_flags(row), sum = node_sum(row, flags, c->bytes, n_bytes);
    int had = find_node(c, row->id, &old, &old_sum);
    if (had < 0) return had;
    int rc = cat_db_stmt(c->db, NODE_PUT, &s);
    if (rc < 0) return rc;
    uint64_t v[] = {row->id,       row->parent, 0,     row->segment,             row->segment_first,
                    row->n_tokens, row->depth,  flags, (uint64_t)row->created_s, sum};
    bind_numbers(s, v, 10);
    bind_hash(s, 3, row->space);
    sqlite3_bind_blob(s, 11, c->bytes, (int)n_bytes, SQLITE_STATIC);
    rc = cat_db_run(c->db, s);
    if (rc < 0) return rc;
    count_put(c, NODE, had > 0, old_sum, sum);
    if (row->id >= c->now.next_node) c->now.next_node = row->id + 1;
    return log_change(c, NODE, PUT, (log_key){row->id, 0});
}

static int remove_node(imp_cat *c, uint64_t id)
{
    imp_cat_node old;
    uint64_t sum = 0;
    int had = find_node(c, id, &old, &sum);
    if (had <= 0) return had < 0 ? had : not_found("node", id);
    int rc = delete_row(c, NODE_DEL, id);
    if (rc == 0) rc = delete_row(c, USE_DEL, id);
    if (rc < 0) return rc;
    count_removed(c, NODE, sum);
    return log_change(c, NODE, REMOVED, (log_key){id, 0});
}

static int reserve(imp_cat *c, const imp_cat_reservation *row)
{
    imp_cat_reservation old = {0};
    sqlite3_stmt *s = NULL;
    uint64_t old_sum = 0, sum = reservation_sum(row);
    int had = find_reservation(c, row->segment, &old, &old_sum);
    if (had < 0) return had;
    int rc = cat_db_stmt(c->db, RESERVATION_PUT, &s);
    if (rc < 0) return rc;
    uint64_t v[] = {row->segment, row->instance, row->bytes, sum};
    bind_numbers(s, v, 4);
    rc = cat_db_run(c->db, s);
    if (rc < 0) return rc;
    count_put(c, RESERVATION, had > 0, old_sum, sum);
    c->now.reserved_bytes += row->bytes - (had > 0 ? old.bytes : 0);
    return 0;
}

static int unreserve(imp_cat *c, uint64_t segment)
{
    imp_cat_reservation old;
    uint64_t sum = 0;
    int had = find_reservation(c, segment, &old, &sum);
    if (had <= 0) return had < 0 ? had : not_found("reservation", segment);
    int rc = delete_row(c, RESERVATION_DEL, segment);
    if (rc < 0) return rc;
    count_removed(c, RESERVATION, sum);
    c->now.reserved_bytes -= old.bytes;
    return 0;
}

/* What isn't there to be removed is told, but leaves the change as it was. */
static int note_removal(imp_cat *c, int rc) { return rc == IMP_E_NOTFOUND ? rc : note(c, rc); }

int imp_cat_put_space(imp_cat *c, const imp_cat_space *space)
{
    int rc = must_be_in_change(c);
    return rc < 0 ? rc : note(c, put_space(c, space));
}

int imp_cat_put_segment(imp_cat *c, const imp_cat_segment *segment)
{
    int rc = must_be_in_change(c);
    return rc < 0 ? rc : note(c, put_segment(c, segment));
}

int imp_cat_remove_segment(imp_cat *c, uint64_t id)
{
    int rc = must_be_in_change(c);
    return rc < 0 ? rc : note_removal(c, remove_segment(c, id));
}

int imp_cat_put_node(imp_cat *c, const imp_cat_node *node)
{
    int rc = must_be_in_change(c);
    return rc < 0 ? rc : note(c, put_node(c, node));
}

int imp_cat_remove_node(imp_cat *c, uint64_t id)
{
    int rc = must_be_in_change(c);
    return rc < 0 ? rc : note_removal(c, remove_node(c, id));
}

int imp_cat_new_node_id(imp_cat *c, uint64_t *id)
{
    int rc = must_be_in_change(c);
    if (rc < 0) return rc;
    *id = c->now.next_node++;
    return 0;
}

int imp_cat_reserve(imp_cat *c, const imp_cat_reservation *r)
{
    int rc = must_be_in_change(c);
    return rc < 0 ? rc : note(c, reserve(c, r));
}

int imp_cat_unreserve(imp_cat *c, uint64_t segment)
{
    int rc = must_be_in_change(c);
    return rc < 0 ? rc : note_removal(c, unreserve(c, segment));
}

/* ---- reading */

/* One state of the database for all that is read until end_read(), and its meta row in c->now. */
static int begin_read(imp_cat *c)
{
    if (c->in_change) return 0;
    int rc = cat_db_begin_read(c->db);
    if (rc < 0) return rc;
    rc = load_meta(c);
    if (rc < 0) cat_db_rollback(c->db);
    return rc;
}

static void end_read(imp_cat *c)
{
    if (!c->in_change) cat_db_rollback(c->db); /* nothing was written */
}

int imp_cat_changed(imp_cat *c, bool *changed)
{
    *changed = true;
    int rc = check_in_place(c);
    if (rc < 0 || c->unseen) return rc;
    int64_t version = 0;
    rc = cat_db_data_version(c->db, &version);
    if (rc < 0) return rc;
    if (version == c->data_version) {
        *changed = false;
        return 0;
    }
    /* Others have written; perhaps nothing but statistics or reservations. */
    rc = begin_read(c);
    if (rc < 0) return rc;
    end_read(c);
    c->unseen = c->now.generation != c->seen;
    if (!c->unseen) c->data_version = version;
    *changed = c->unseen;
    return 0;
}

typedef struct node_place {
    uint64_t depth, id;
} node_place;

static int by_depth(const void *a, const void *b)
{
    const node_place *x = a, *y = b;
    if (x->depth != y->depth) return x->depth < y->depth ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* The nodes' ids by rising depth; their rows aren't checked yet. `*out`: [c->now.n[NODE]] */
static int list_nodes(imp_cat *c, node_place **out)
{
    sqlite3_stmt *s = NULL;
    uint64_t n = 0, n_all = c->now.n[NODE];
    bool sorted = true;
    node_place *list = imp_realloc_array(NULL, (size_t)n_all, sizeof *list);
    int rc = list ? cat_db_stmt(c->db, NODE_DEPTHS, &s) : no_memory();
    if (rc < 0) goto out;
    while ((rc = cat_db_step(c->db, s)) > 0) {
        if (n == n_all) break;
        list[n] = (node_place){.depth = column(s, 1), .id = column(s, 0)};
        if (n > 0 && by_depth(&list[n - 1], &list[n]) > 0) sorted = false;
        n++;
    }
    if (rc < 0) goto out;
    if (rc > 0 || n != n_all) {
        rc = imp_fail(IMP_E_CORRUPT, "catalogue: not as many nodes as its meta row says");
        goto out;
    }
    if (!sorted) qsort(list, (size_t)n, sizeof *list, by_depth);
    *out = list;
    list = NULL;
out:
    cat_db_done(s);
    imp_free(list);
    return rc;
}

/* C2, after a whole scan of a table. */
static int check_scan(const imp_cat *c, unsigned table, uint64_t n, uint64_t sum)
{
    static const char *const names[N_COUNTED] = {"spaces", "segments", "nodes", "reservations"};
    if (n == c->now.n[table] && sum == c->now.sum[table]) return 0;
    return imp_fail(IMP_E_CORRUPT, "catalogue: its %s are not those its meta row vouches for", names[table]);
}

static int scan_spaces(imp_cat *c, const imp_cat_reader *reader)
{
    sqlite3_stmt *s = NULL;
    uint64_t n = 0, sums = 0, sum;
    int rc = cat_db_stmt(c->db, SPACE_ALL, &s);
    while (rc == 0 && (rc = cat_db_step(c->db, s)) > 0) {
        imp_cat_space row;
        rc = parse_space(s, &row, &sum);
        n++;
        sums += sum;
        if (rc == 0 && reader->space) rc = reader->space(&row, reader->user);
    }
    cat_db_done(s);
    return rc != 0 ? rc : check_scan(c, SPACE, n, sums);
}

static int scan_segments(imp_cat *c, const imp_cat_reader *reader)
{
    sqlite3_stmt *s = NULL;
    uint64_t n = 0, sums = 0, bytes = 0, sum;
    int rc = cat_db_stmt(c->db, SEGMENT_ALL, &s);
    while (rc == 0 && (rc = cat_db_step(c->db, s)) > 0) {
        imp_cat_segment row;
        rc = parse_segment(s, &row, &sum);
        n++;
        sums += sum;
        bytes += row.disk_bytes;
        if (rc == 0 && reader->segment) rc = reader->segment(&row, reader->user);
    }
    cat_db_done(s);
    if (rc == 0) rc = check_scan(c, SEGMENT, n, sums);
    if (rc == 0 && bytes != c->now.segment_bytes) {
        rc = imp_fail(IMP_E_CORRUPT, "catalogue: its segments have other lengths than its meta row says");
    }
    return rc;
}

static int scan_nodes(imp_cat *c, const imp_cat_reader *reader)
{
    node_place *list = NULL;
    uint64_t sums = 0, n = c->now.n[NODE];
    int rc = list_nodes(c, &list);
    for (uint64_t i = 0; rc == 0 && i < n; i++) {
        imp_cat_node row;
        uint64_t sum = 0;
        rc = find_node(c, list[i].id, &row, &sum);
        /* A damaged page can show one row to the scan that listed it and another to the search. */
        bool another = rc > 0 && (row.id != list[i].id || row.depth != list[i].depth);
        if (rc == 0 || another) rc = corrupt("node", list[i].id);
        if (rc < 0) break;
        sums += sum;
        rc = reader->node ? reader->node(&row, reader->user) : 0;
    }
    imp_free(list);
    return rc != 0 ? rc : check_scan(c, NODE, n, sums);
}

static int scan_all(imp_cat *c, const imp_cat_reader *reader)
{
    int rc = reader->reset ? reader->reset(reader->user) : 0;
    if (rc == 0) rc = scan_spaces(c, reader);
    if (rc == 0) rc = scan_segments(c, reader);
    if (rc == 0) rc = scan_nodes(c, reader);
    return rc;
}

typedef struct log_entry {
    uint64_t generation, kind, removed;
    log_key key;
} log_entry;

/* By row, then by time. */
static int by_row(const void *a, const void *b)
{
    const log_entry *x = a, *y = b;
    if (x->kind != y->kind) return x->kind < y->kind ? -1 : 1;
    if (x->key.lo != y->key.lo) return x->key.lo < y->key.lo ? -1 : 1;
    if (x->key.hi != y->key.hi) return x->key.hi < y->key.hi ? -1 : 1;
    return x->generation < y->generation ? -1 : x->generation > y->generation;
}

static bool same_row(const log_entry *a, const log_entry *b)
{
    return a->kind == b->kind && a->key.lo == b->key.lo && a->key.hi == b->key.hi;
}

/* The log after `since`, only the last entry of each row, spaces before segments before nodes. */
static int list_log(imp_cat *c, uint64_t since, log_entry **out, size_t *n_out)
{
    sqlite3_stmt *s = NULL;
    uint64_t n = 0, n_all = c->now.generation - since;
    log_entry *list = imp_realloc_array(NULL, (size_t)n_all, sizeof *list);
    int rc = list ? cat_db_stmt(c->db, LOG_SINCE, &s) : no_memory();
    if (rc < 0) goto out;
    sqlite3_bind_int64(s, 1, (sqlite3_int64)since);
    while ((rc = cat_db_step(c->db, s)) > 0) {
        log_entry e = {.generation = column(s, 0), .kind = column(s, 1), .removed = column(s, 2)};
        imp_hash128 key = column_hash(s, 3);
        e.key = (log_key){key.lo, key.hi};
        if (n == n_all || e.generation != since + 1 + n || e.kind > NODE || e.removed > REMOVED ||
            (e.kind == SPACE && e.removed) || /* there is no such change */
            column(s, 4) != log_sum(e.generation, e.kind, e.removed, e.key)) {
            break;
        }
        list[n++] = e;
    }
    if (rc < 0) goto out;
    if (rc > 0 || n != n_all) {
        rc = imp_fail(IMP_E_CORRUPT, "catalogue: its log is damaged");
        goto out;
    }
    qsort(list, (size_t)n, sizeof *list, by_row);
    size_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        if (i + 1 < n && same_row(&list[i], &list[i + 1])) continue;
        list[kept++] = list[i];
    }
    *out = list;
    *n_out = kept;
    list = NULL;
out:
    cat_db_done(s);
    imp_free(list);
    return rc;
}

/* Tell one row of the log. A row that the log says was removed must be gone, the others must be there. */
static int tell_entry(imp_cat *c, const log_entry *e, const imp_cat_reader *reader)
{
    union {
        imp_cat_space space;
        imp_cat_segment segment;
        imp_cat_node node;
    } row;
    sqlite3_stmt *s = NULL;
    uint64_t sum = 0;
    int rc = 0;
    if (e->kind == SPACE) {
        rc = find_space(c, (imp_hash128){.lo = e->key.lo, .hi = e->key.hi}, &s, &row.space, &sum);
    } else if (e->kind == SEGMENT) {
        rc = find_segment(c, e->key.lo, &row.segment, &sum);
    } else {
        rc = find_node(c, e->key.lo, &row.node, &sum);
    }
    if (rc < 0) goto out;
    if ((rc > 0) == (e->removed == REMOVED)) {
        rc = imp_fail(IMP_E_CORRUPT, "catalogue: its log and its rows contradict each other");
        goto out;
    }
    rc = 0;
    if (e->kind == SPACE) {
        if (reader->space) rc = reader->space(&row.space, reader->user);
    } else if (e->kind == SEGMENT && e->removed) {
        if (reader->segment_removed) rc = reader->segment_removed(e->key.lo, reader->user);
    } else if (e->kind == SEGMENT) {
        if (reader->segment) rc = reader->segment(&row.segment, reader->user);
    } else if (e->removed) {
        if (reader->node_removed) rc = reader->node_removed(e->key.lo, reader->user);
    } else {
        if (reader->node) rc = reader->node(&row.node, reader->user);
    }
out:
    cat_db_done(s);
    return rc;
}

static int read_log(imp_cat *c, uint64_t since, const imp_cat_reader *reader)
{
    log_entry *list = NULL;
    node_place *nodes = NULL;
    size_t n = 0, n_nodes = 0;
    int rc = list_log(c, since, &list, &n);
    if (rc < 0) goto out;
    nodes = imp_realloc_array(NULL, n, sizeof *nodes);
    if (!nodes) {
        rc = no_memory();
        goto out;
    }
    /* Removals, nodes before segments. */
    for (size_t i = n; rc == 0 && i-- > 0;) {
        if (list[i].removed) rc = tell_entry(c, &list[i], reader);
    }
    for (size_t i = 0; rc == 0 && i < n; i++) {
        if (list[i].removed) continue;
        if (list[i].kind != NODE) {
            rc = tell_entry(c, &list[i], reader);
            continue;
        }
        imp_cat_node row;
        uint64_t sum;
        rc = find_node(c, list[i].key.lo, &row, &sum);
        if (rc == 0) rc = imp_fail(IMP_E_CORRUPT, "catalogue: its log and its rows contradict each other");
        if (rc < 0) break;
        nodes[n_nodes++] = (node_place){.depth = row.depth, .id = row.id};
        rc = 0;
    }
    if (rc != 0) goto out;
    qsort(nodes, n_nodes, sizeof *nodes, by_depth);
    for (size_t i = 0; rc == 0 && i < n_nodes; i++) {
        log_entry e = {.kind = NODE, .removed = PUT, .key = {nodes[i].id, 0}};
        rc = tell_entry(c, &e, reader);
    }
out:
    imp_free(nodes);
    imp_free(list);
    return rc;
}

int imp_cat_read(imp_cat *c, uint64_t since, const imp_cat_reader *reader, uint64_t *generation)
{
    int64_t version = 0;
    int rc = begin_read(c);
    if (rc < 0) return rc;
    rc = cat_db_data_version(c->db, &version);
    if (rc < 0) goto out;
    if (since != 0 && since <= c->now.generation && since + 1 >= c->now.log_first) {
        rc = read_log(c, since, reader);
    } else if (since != 0 && !reader->reset) {
        rc = imp_fail(IMP_E_STALE, "catalogue: changes since %llu are not known any more", (unsigned long long)since);
    } else {
        rc = scan_all(c, reader);
    }
    if (rc != 0) goto out;
    c->seen = c->now.generation;
    c->unseen = false;
    c->data_version = version;
    *generation = c->now.generation;
out:
    end_read(c);
    return rc;
}

int imp_cat_reservations(imp_cat *c, int (*fn)(const imp_cat_reservation *r, void *user), void *user)
{
    imp_cat_reservation *list = NULL;
    sqlite3_stmt *s = NULL;
    uint64_t n = 0, sums = 0, bytes = 0, sum = 0, n_all;
    int rc = begin_read(c);
    if (rc < 0) return rc;
    n_all = c->now.n[RESERVATION];
    list = imp_realloc_array(NULL, (size_t)n_all, sizeof *list);
    rc = list ? cat_db_stmt(c->db, RESERVATION_ALL, &s) : no_memory();
    while (rc == 0 && (rc = cat_db_step(c->db, s)) > 0) {
        imp_cat_reservation row;
        rc = parse_reservation(s, &row, &sum);
        if (rc < 0) break;
        if (n < n_all) list[n] = row;
        n++;
        sums += sum;
        bytes += row.bytes;
    }
    if (rc == 0) rc = check_scan(c, RESERVATION, n, sums);
    if (rc == 0 && bytes != c->now.reserved_bytes) {
        rc = imp_fail(IMP_E_CORRUPT, "catalogue: its reservations have other lengths than its meta row says");
    }
    cat_db_done(s);
    end_read(c);
    /* All read before the first is told: `fn` may drop it. */
    for (uint64_t i = 0; rc == 0 && i < n; i++) rc = fn(&list[i], user);
    imp_free(list);
    return rc;
}

int imp_cat_totals(imp_cat *c, uint64_t *segment_bytes, uint64_t *reserved_bytes)
{
    int rc = begin_read(c);
    if (rc < 0) return rc;
    end_read(c);
    *segment_bytes = c->now.segment_bytes;
    *reserved_bytes = c->now.reserved_bytes;
    return 0;
}

/* ---- what is only advice */

static uint64_t use_sum(uint64_t node, uint64_t hits, int64_t used_s)
{
    uint64_t f[] = {node, hits, (uint64_t)used_s};
    return sum_of(USE, f, 3);
}

int imp_cat_put_use(imp_cat *c, uint64_t node, uint64_t hits, int64_t used_s)
{
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, USE_PUT, &s);
    if (rc < 0) return note(c, rc);
    uint64_t v[] = {node, hits, (uint64_t)used_s, use_sum(node, hits, used_s)};
    bind_numbers(s, v, 4);
    return note(c, cat_db_run(c->db, s));
}

/* `*n_bad`: rows that were passed over. */
static int scan_uses(imp_cat *c, int (*fn)(uint64_t node, uint64_t hits, int64_t used_s, void *user), void *user,
                     uint64_t *n_bad)
{
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, USE_ALL, &s);
    while (rc == 0 && (rc = cat_db_step(c->db, s)) > 0) {
        uint64_t node = column(s, 0), hits = column(s, 1);
        int64_t used_s = sqlite3_column_int64(s, 2);
        bool good = column(s, 3) == use_sum(node, hits, used_s);
        if (!good) ++*n_bad;
        rc = good && fn ? fn(node, hits, used_s, user) : 0;
    }
    cat_db_done(s);
    return rc;
}

int imp_cat_uses(imp_cat *c, int (*fn)(uint64_t node, uint64_t hits, int64_t used_s, void *user), void *user)
{
    uint64_t n_bad = 0;
    return scan_uses(c, fn, user, &n_bad);
}

static uint64_t history_sum(uint64_t segment, const void *bytes, size_t n_bytes)
{
    return imp_hash64(bytes, n_bytes, sum_of(HISTORY, &segment, 1));
}

/* Does the catalogue have a table for them? A former version's, opened for reading, hasn't. */
static bool keeps_histories(const imp_cat *c) { return cat_db_version(c->db) >= schema.version; }

static int put_history(imp_cat *c, uint64_t segment, const void *bytes, size_t n_bytes)
{
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, HISTORY_PUT, &s);
    if (rc < 0) return note(c, rc);
    sqlite3_bind_int64(s, 1, (sqlite3_int64)segment);
    sqlite3_bind_blob(s, 2, bytes, (int)n_bytes, SQLITE_STATIC);
    sqlite3_bind_int64(s, 3, (sqlite3_int64)history_sum(segment, bytes, n_bytes));
    return note(c, cat_db_run(c->db, s));
}

int imp_cat_put_history(imp_cat *c, uint64_t segment, const void *bytes, size_t n_bytes)
{
    unsigned char extra[EXTRA_BYTES];
    int rc = must_be_in_change(c);
    if (rc < 0) return rc;
    if (n_bytes > IMP_CAT_HISTORY_BYTES_MAX) return imp_fail(IMP_E_ARG, "catalogue: a history of %zu bytes", n_bytes);
    if (!c->key) return put_history(c, segment, bytes, n_bytes);
    unsigned char *box = imp_malloc(n_bytes + IMP_BOX_BYTES);
    if (!box) return note(c, no_memory());
    put_extra(extra, HISTORY, segment);
    rc = note(c, imp_box_seal(c->key, extra, sizeof extra, bytes, n_bytes, box));
    if (rc == 0) rc = put_history(c, segment, box, n_bytes + IMP_BOX_BYTES);
    imp_free(box);
    return rc;
}

/* A copy of what is found, decrypted. */
static int take_history(const imp_cat *c, uint64_t segment, const void *found, void **bytes, size_t *n_bytes)
{
    unsigned char extra[EXTRA_BYTES];
    size_t n_found = *n_bytes, box = c->key ? IMP_BOX_BYTES : 0;
    if (n_found < box) return IMP_E_NOTFOUND;
    *n_bytes = n_found - box;
    *bytes = imp_malloc(*n_bytes + 1);
    if (!*bytes) return no_memory();
    put_extra(extra, HISTORY, segment);
    if (!c->key) memcpy(*bytes, found, n_found);
    int rc = c->key ? imp_box_open(c->key, extra, sizeof extra, found, n_found, *bytes) : 0;
    if (rc == 0) return 0;
    imp_free(*bytes);
    *bytes = NULL;
    return rc == IMP_E_CORRUPT ? IMP_E_NOTFOUND : rc;
}

/* Its bytes, if the row `s` stands on is sound; they live until the statement's next step. */
static const void *parse_history(sqlite3_stmt *s, size_t *n_bytes)
{
    const void *bytes = sqlite3_column_blob(s, 1);
    *n_bytes = (size_t)sqlite3_column_bytes(s, 1);
    return bytes && column(s, 2) == history_sum(column(s, 0), bytes, *n_bytes) ? bytes : NULL;
}

int imp_cat_get_history(imp_cat *c, uint64_t segment, void **bytes, size_t *n_bytes)
{
    sqlite3_stmt *s = NULL;
    *bytes = NULL;
    *n_bytes = 0;
    int rc = keeps_histories(c) ? cat_db_stmt(c->db, HISTORY_GET, &s) : IMP_E_NOTFOUND;
    if (rc == 0) {
        sqlite3_bind_int64(s, 1, (sqlite3_int64)segment);
        rc = cat_db_step(c->db, s);
        const void *found = rc > 0 && column(s, 0) == segment ? parse_history(s, n_bytes) : NULL;
        if (rc >= 0) rc = found ? 0 : IMP_E_NOTFOUND;
        if (rc == 0) rc = take_history(c, segment, found, bytes, n_bytes);
    }
    cat_db_done(s);
    if (rc == IMP_E_NOTFOUND) imp_fail(rc, "catalogue: no history of segment %016llx", (unsigned long long)segment);
    return rc;
}

int imp_cat_remove_history(imp_cat *c, uint64_t segment)
{
    int rc = must_be_in_change(c);
    return rc < 0 ? rc : note(c, delete_row(c, HISTORY_DEL, segment));
}

/* A wrong fingerprint would let two models share KV, so a row that isn't sound is no row. */
static bool parse_file(sqlite3_stmt *s, imp_cat_file *file, imp_hash128 *hash)
{
    *file = (imp_cat_file){
        .device = column(s, 0),
        .inode = column(s, 1),
        .size = column(s, 2),
        .mtime_ns = sqlite3_column_int64(s, 3),
        .ctime_ns = sqlite3_column_int64(s, 4),
    };
    *hash = column_hash(s, 5);
    uint64_t f[] = {file->device, file->inode, file->size, (uint64_t)file->mtime_ns, (uint64_t)file->ctime_ns,
                    hash->lo,     hash->hi};
    return column(s, 6) == sum_of(FILE_HASH, f, 7);
}

int imp_cat_fingerprint(imp_cat *c, const imp_cat_file *file, imp_hash128 *out)
{
    sqlite3_stmt *s = NULL;
    uint64_t key[] = {file->device, file->inode};
    imp_cat_file row;
    imp_hash128 hash;
    int rc = cat_db_stmt(c->db, FILE_GET, &s);
    if (rc < 0) return rc;
    bind_numbers(s, key, 2);
    rc = cat_db_step(c->db, s);
    bool found = rc > 0 && parse_file(s, &row, &hash) && row.device == file->device && row.inode == file->inode &&
                 row.size == file->size && row.mtime_ns == file->mtime_ns && row.ctime_ns == file->ctime_ns;
    cat_db_done(s);
    if (rc < 0) return rc;
    if (!found) return imp_fail(IMP_E_NOTFOUND, "catalogue: no fingerprint of this file");
    *out = hash;
    return 0;
}

int imp_cat_put_fingerprint(imp_cat *c, const imp_cat_file *file, imp_hash128 hash)
{
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, FILE_PUT, &s);
    if (rc < 0) return note(c, rc);
    uint64_t v[] = {file->device, file->inode, file->size, (uint64_t)file->mtime_ns, (uint64_t)file->ctime_ns, hash.lo,
                    hash.hi};
    bind_numbers(s, v, 5);
    bind_hash(s, 6, hash);
    sqlite3_bind_int64(s, 7, (sqlite3_int64)sum_of(FILE_HASH, v, 7));
    return note(c, cat_db_run(c->db, s));
}

static uint64_t bits_of(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static double double_of(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

int imp_cat_costs_get(imp_cat *c, uint64_t device, imp_cat_costs *out)
{
    sqlite3_stmt *s = NULL;
    uint64_t key[] = {device, 0};
    imp_cat_file row;
    imp_hash128 costs;
    int rc = cat_db_stmt(c->db, FILE_GET, &s);
    if (rc < 0) return rc;
    bind_numbers(s, key, 2);
    rc = cat_db_step(c->db, s);
    bool found = rc > 0 && parse_file(s, &row, &costs) && row.device == device && row.inode == 0;
    cat_db_done(s);
    if (rc < 0) return rc;
    if (!found) return imp_fail(IMP_E_NOTFOUND, "catalogue: reads of this device weren't measured");
    *out = (imp_cat_costs){device, double_of(costs.lo), double_of(costs.hi), row.mtime_ns / 1000000000};
    return 0;
}

int imp_cat_costs_put(imp_cat *c, const imp_cat_costs *costs)
{
    const imp_cat_file row = {.device = costs->device, .mtime_ns = costs->measured_s * 1000000000};
    return imp_cat_put_fingerprint(c, &row, (imp_hash128){bits_of(costs->read_ns), bits_of(costs->byte_ns)});
}

/* ---- check */

static int scan_files(imp_cat *c, uint64_t *n_bad)
{
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, FILE_ALL, &s);
    while (rc == 0 && (rc = cat_db_step(c->db, s)) > 0) {
        imp_cat_file file;
        imp_hash128 hash;
        if (!parse_file(s, &file, &hash)) ++*n_bad;
        rc = 0;
    }
    cat_db_done(s);
    return rc;
}

static int ignore_reservation(const imp_cat_reservation *r, void *user)
{
    (void)r, (void)user;
    return 0;
}

static int scan_histories(imp_cat *c, uint64_t *n_bad)
{
    sqlite3_stmt *s = NULL;
    size_t n_bytes;
    int rc = keeps_histories(c) ? cat_db_stmt(c->db, HISTORY_ALL, &s) : 0;
    while (s && rc == 0 && (rc = cat_db_step(c->db, s)) > 0) {
        if (!parse_history(s, &n_bytes)) ++*n_bad;
        rc = 0;
    }
    cat_db_done(s);
    return rc;
}

/* How the rows must fit together: each query lists the ids that don't. */
static const struct {
    const char *sql, *what;
} relations[] = {
    {"SELECT n.id FROM node n LEFT JOIN segment s ON s.id = n.segment WHERE s.id IS NULL OR s.space <> n.space OR "
     "n.segment_first + n.n_tokens > s.n_tokens",
     "doesn't lie in its segment"},
    {"SELECT n.id FROM node n LEFT JOIN node p ON p.id = n.parent WHERE CASE WHEN n.parent = 0 THEN n.depth <> 0 "
     "ELSE p.id IS NULL OR p.space <> n.space OR p.depth + p.n_tokens <> n.depth END",
     "doesn't follow its parent"},
    {"SELECT n.id FROM node n LEFT JOIN space s ON s.id = n.space WHERE s.id IS NULL", "is in no space"},
};

typedef struct checker {
    void (*fn)(const char *what, void *user);
    void *user;
    const char *relation;
} checker;

static int take_relation(sqlite3_stmt *row, void *user)
{
    checker *k = user;
    char line[96];
    snprintf(line, sizeof line, "catalogue: node %lld %s", (long long)sqlite3_column_int64(row, 0), k->relation);
    k->fn(line, k->user);
    return 0;
}

/* Damage is a finding, other failures end the check. */
static int finding(checker *k, int rc)
{
    if (rc != IMP_E_CORRUPT) return rc;
    k->fn(imp_last_error(), k->user);
    return 0;
}

static void count_finding(checker *k, uint64_t n_bad, const char *what)
{
    char line[96];
    if (n_bad == 0) return;
    snprintf(line, sizeof line, "catalogue: %llu damaged %s", (unsigned long long)n_bad, what);
    k->fn(line, k->user);
}

int imp_cat_check(imp_cat *c, void (*fn)(const char *what, void *user), void *user)
{
    checker k = {.fn = fn, .user = user};
    const imp_cat_reader nothing = {0};
    uint64_t n_bad_uses = 0, n_bad_files = 0, n_bad_histories = 0;

    int rc = cat_db_integrity(c->db, fn, user);
    if (rc < 0) return rc;
    rc = begin_read(c);
    if (rc < 0) return finding(&k, rc);
    rc = finding(&k, scan_all(c, &nothing));
    if (rc == 0 && c->now.generation + 1 > c->now.log_first) {
        rc = finding(&k, read_log(c, c->now.log_first - 1, &nothing));
    }
    if (rc == 0) rc = finding(&k, scan_uses(c, NULL, NULL, &n_bad_uses));
    if (rc == 0) rc = finding(&k, scan_files(c, &n_bad_files));
    if (rc == 0) rc = finding(&k, scan_histories(c, &n_bad_histories));
    for (size_t i = 0; rc == 0 && i < sizeof relations / sizeof relations[0]; i++) {
        k.relation = relations[i].what;
        rc = finding(&k, cat_db_query(c->db, relations[i].sql, take_relation, &k));
    }
    end_read(c);
    if (rc == 0) rc = finding(&k, imp_cat_reservations(c, ignore_reservation, NULL));
    if (rc == 0) {
        count_finding(&k, n_bad_uses, "statistics of uses");
        count_finding(&k, n_bad_files, "fingerprints");
        count_finding(&k, n_bad_histories, "histories");
    }
    return rc;
}

int imp_cat_compact(imp_cat *c)
{
    if (c->in_change) return imp_fail(IMP_E_ARG, "catalogue: compacted inside of a change");
    return cat_db_vacuum(c->db);
}

int imp_cat_checkpoint(imp_cat *c, int wait_ms)
{
    if (c->in_change) return imp_fail(IMP_E_ARG, "catalogue: checkpoint inside of a change");
    return cat_db_checkpoint(c->db, wait_ms);
}
