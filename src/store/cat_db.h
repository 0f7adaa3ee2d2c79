/* cat_db.h: the one door to SQLite: opens a database file the careful way, keeps prepared statements, and turns
 * SQLite's codes into ours. Knows nothing of what the rows mean; that is cat_rows.c's. */
#ifndef IMP_STORE_CAT_DB_H
#define IMP_STORE_CAT_DB_H

#include <sqlite3.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct cat_db cat_db;

/* What a database must look like. */
typedef struct cat_schema {
    int32_t application_id;
    uint16_t version;
    uint16_t oldest;           /* version that can still be used: older ones have the first tables only, and get the */
    const size_t *n_tables;    /* others when they are opened for writing. [version - oldest + 1]: how many each has */
    const char *const *create; /* the CREATE TABLE statements as SQLite keeps them, NULL-ended, in the order made */
    const char *const *sql;    /* the statements that cat_db_stmt() prepares */
    size_t n_sql;
} cat_schema;

enum { CAT_DB_READONLY = 1, CAT_DB_MEMORY = 2 /* no file at all: `path` isn't looked at */ };

/* Open `path`, made if missing (not with CAT_DB_READONLY). `*made`: it has no rows yet and a write transaction is open,
 * in which the caller adds what belongs into a new database, and which it ends. */
int cat_db_open(const char *path, const cat_schema *schema, unsigned flags, cat_db **out, bool *made);
void cat_db_close(cat_db *d);
/* What is called ahead of whatever may wait for the disk, and behind it; and, in between, each time that another
 * connection's lock is found in the way. Each may be NULL. */
typedef struct cat_db_hooks {
    void (*before)(void *user), (*after)(void *user), (*busy)(void *user);
    void *user;
} cat_db_hooks;
void cat_db_around(cat_db *d, cat_db_hooks hooks);
/* The version it has: an older one only if it was opened for reading. */
uint16_t cat_db_version(const cat_db *d);

/* The i-th statement, ready to bind. Reset it with cat_db_done() after use. */
int cat_db_stmt(cat_db *d, size_t i, sqlite3_stmt **out);
void cat_db_done(sqlite3_stmt *s);
/* One step: 1 a row, 0 done, or a code. */
int cat_db_step(cat_db *d, sqlite3_stmt *s);
/* Step a statement that gives no rows, and reset it. */
int cat_db_run(cat_db *d, sqlite3_stmt *s);

int cat_db_begin(cat_db *d);      /* takes the write lock */
int cat_db_begin_read(cat_db *d); /* all reads until the end see one state */
int cat_db_commit(cat_db *d);     /* has rolled back if it fails */
void cat_db_rollback(cat_db *d);

/* Has the file been removed or replaced under us? */
bool cat_db_moved(cat_db *d);
/* Is it known, without the disk, that it wasn't? */
bool cat_db_in_place(const cat_db *d);
/* A number that changes whenever another connection has committed. */
int cat_db_data_version(cat_db *d, int64_t *out);
/* How far SQLite's log goes: other whenever anybody has committed, or begun the log anew. Looked up in memory that all
 * processes share, where data_version may read a page. False: there is no such memory, since the database has no log or
 * is opened as a file that nobody writes (cat_db_constant()). */
typedef struct cat_db_mark {
    uint32_t words[12];
} cat_db_mark;
bool cat_db_look(cat_db *d, cat_db_mark *out);
bool cat_db_constant(const cat_db *d);
void cat_db_busy_ms(cat_db *d, int ms);
int cat_db_vacuum(cat_db *d);
/* The -wal's pages into the file, and the -wal emptied. Others' reads are waited for so long: IMP_E_BUSY. */
int cat_db_checkpoint(cat_db *d, int wait_ms);
/* SQLite's own check; `fn` is told each thing that is wrong. */
int cat_db_integrity(cat_db *d, void (*fn)(const char *what, void *user), void *user);
/* Prepare and run something that isn't among the statements: `fn` gets the first column of each row. */
int cat_db_query(cat_db *d, const char *sql, int (*fn)(sqlite3_stmt *row, void *user), void *user);

#endif
