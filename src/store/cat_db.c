/* cat_db.c: see cat_db.h.
 *
 * Never open or close the database file other than through SQLite: POSIX drops all of a process's locks on a file when
 * the process closes any descriptor of it, also those of another connection to the same file. (But for O_PATH, which
 * opens nothing.)
 */
#include "store/cat_db.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#if __has_include(<linux/openat2.h>)
#include <linux/openat2.h>
#endif

#include "base/alloc.h"
#include "base/clock.h"
#include "base/status.h"

enum {
    BUSY_MS = 5000,
    BUSY_STEP_MS = 50, /* the longest time between two tries */
    MAX_ROW_BYTES = 8 << 20, /* the longest row has 1,048,576 tokens of 4 bytes: more is damage */
    WAL_KEEP_BYTES = 4 << 20,
    INDEX_BYTES = 32768, /* a piece of the wal-index */
};

struct cat_db {
    sqlite3 *db;
    const cat_schema *schema;
    sqlite3_stmt **stmts; /* [schema->n_sql], NULL until first used */
    sqlite3_stmt *data_version;
    uint16_t version;
    bool wal;                 /* it has a log, and so a wal-index */
    bool constant;            /* opened as a file that nobody writes */
    dev_t device;             /* of the file */
    ino_t inode;              /* 0: not known */
    int busy_ms, wait_ms;     /* for others' locks: always, and just now */
    uint64_t busy_since_ns;
    cat_db_hooks hooks;
};

/* ---- what may wait for the disk */

void cat_db_around(cat_db *d, cat_db_hooks hooks) { d->hooks = hooks; }

static void before(const cat_db *d)
{
    if (d->hooks.before) d->hooks.before(d->hooks.user);
}

static void after(const cat_db *d)
{
    if (d->hooks.after) d->hooks.after(d->hooks.user);
}

/* As sqlite3_busy_timeout() does it, but that it is told. */
static int on_busy(void *user, int n_before)
{
    cat_db *d = user;
    uint64_t now_ns = imp_now_ns();
    if (n_before == 0) d->busy_since_ns = now_ns;
    if (d->hooks.busy) d->hooks.busy(d->hooks.user);
    uint64_t waited_ms = (now_ns - d->busy_since_ns) / 1000000;
    if (waited_ms >= (uint64_t)d->wait_ms) return 0;
    uint64_t left_ms = (uint64_t)d->wait_ms - waited_ms, pause_ms = n_before < 6 ? 1u << n_before : BUSY_STEP_MS;
    usleep((useconds_t)(1000 * (pause_ms < left_ms ? pause_ms : left_ms)));
    return 1;
}

static int run_sql(const cat_db *d, const char *sql)
{
    before(d);
    int code = sqlite3_exec(d->db, sql, NULL, NULL, NULL);
    after(d);
    return code;
}

static int prepare(const cat_db *d, const char *sql, unsigned flags, sqlite3_stmt **out)
{
    before(d);
    int code = sqlite3_prepare_v3(d->db, sql, -1, flags, out, NULL);
    after(d);
    return code;
}

/* ---- codes */

static int status_of(cat_db *d, int code)
{
    int err = d->db ? sqlite3_system_errno(d->db) : 0;
    switch (code) {
    case SQLITE_IOERR_NOMEM: return IMP_E_NOMEM;
    case SQLITE_IOERR_SHORT_READ:
    case SQLITE_IOERR_CORRUPTFS: return IMP_E_CORRUPT;
    case SQLITE_READONLY_DBMOVED: return IMP_E_STALE;
    default: break;
    }
    switch (code & 0xff) {
    case SQLITE_NOMEM: return IMP_E_NOMEM;
    case SQLITE_BUSY:
    case SQLITE_LOCKED: return IMP_E_BUSY;
    case SQLITE_FULL: return IMP_E_FULL;
    case SQLITE_READONLY:
    case SQLITE_PERM:
    case SQLITE_AUTH: return IMP_E_PERM;
    case SQLITE_CANTOPEN:
    case SQLITE_IOERR:
        if (err == ENOSPC || err == EDQUOT) return IMP_E_FULL;
        if (err == EACCES || err == EPERM || err == EROFS || err == ELOOP) return IMP_E_PERM;
        return IMP_E_IO;
    default:
        /* CORRUPT and NOTADB; and ERROR, CONSTRAINT, TOOBIG, ...: our statements are right, the database is wrong. */
        return IMP_E_CORRUPT;
    }
}

static int db_fail(cat_db *d, int code)
{
    const char *file = d->db ? sqlite3_db_filename(d->db, "main") : NULL;
    return imp_fail(status_of(d, code), "%s: %s", file && *file ? file : "catalogue",
                    d->db ? sqlite3_errmsg(d->db) : sqlite3_errstr(code));
}

/* ---- statements */

static int exec(cat_db *d, const char *sql)
{
    int code = run_sql(d, sql);
    return code == SQLITE_OK ? 0 : db_fail(d, code);
}

int cat_db_query(cat_db *d, const char *sql, int (*fn)(sqlite3_stmt *row, void *user), void *user)
{
    sqlite3_stmt *s = NULL;
    int rc = 0, code = prepare(d, sql, 0, &s);
    if (code != SQLITE_OK) {
        rc = db_fail(d, code);
        goto out;
    }
    while ((rc = cat_db_step(d, s)) > 0) {
        rc = fn(s, user);
        if (rc != 0) goto out;
    }
out:
    sqlite3_finalize(s);
    return rc;
}

int cat_db_stmt(cat_db *d, size_t i, sqlite3_stmt **out)
{
    if (!d->stmts[i]) {
        int code = prepare(d, d->schema->sql[i], SQLITE_PREPARE_PERSISTENT, &d->stmts[i]);
        if (code != SQLITE_OK) {
            *out = NULL;
            return db_fail(d, code);
        }
    }
    *out = d->stmts[i];
    return 0;
}

void cat_db_done(sqlite3_stmt *s)
{
    if (!s) return;
    sqlite3_reset(s);
    sqlite3_clear_bindings(s); /* they may point into the caller's memory */
}

int cat_db_step(cat_db *d, sqlite3_stmt *s)
{
    before(d);
    int code = sqlite3_step(s);
    after(d);
    if (code == SQLITE_ROW) return 1;
    return code == SQLITE_DONE ? 0 : db_fail(d, code);
}

int cat_db_run(cat_db *d, sqlite3_stmt *s)
{
    int rc = cat_db_step(d, s);
    cat_db_done(s);
    if (rc > 0) rc = imp_fail(IMP_E_CORRUPT, "catalogue: a row where none was expected");
    return rc;
}

/* ---- transactions */

int cat_db_begin(cat_db *d)
{
    /* SQLite would begin it, and fail later. */
    if (sqlite3_db_readonly(d->db, "main") == 1) return imp_fail(IMP_E_PERM, "catalogue: opened to read only");
    return exec(d, "BEGIN IMMEDIATE");
}

int cat_db_begin_read(cat_db *d) { return exec(d, "BEGIN"); }

int cat_db_commit(cat_db *d)
{
    int rc = exec(d, "COMMIT");
    if (rc < 0) cat_db_rollback(d);
    return rc;
}

void cat_db_rollback(cat_db *d)
{
    /* Some failures have rolled back already. */
    if (!sqlite3_get_autocommit(d->db)) (void)run_sql(d, "ROLLBACK");
}

/* ---- what SQLite says about the file */

static int take_mode(sqlite3_stmt *row, void *user)
{
    const char *mode = (const char *)sqlite3_column_text(row, 0);
    *(bool *)user = mode && strcmp(mode, "wal") == 0;
    return 0;
}

static int take_int(sqlite3_stmt *row, void *user)
{
    *(int64_t *)user = sqlite3_column_int64(row, 0);
    return 0;
}

bool cat_db_moved(cat_db *d)
{
    int moved = 0;
    before(d);
    int code = sqlite3_file_control(d->db, "main", SQLITE_FCNTL_HAS_MOVED, &moved);
    after(d);
    return code == SQLITE_OK && moved;
}

bool cat_db_in_place(const cat_db *d)
{
#ifdef RESOLVE_CACHED
    struct stat st;
    struct open_how how = {.flags = O_PATH | O_NOFOLLOW | O_CLOEXEC, .resolve = RESOLVE_CACHED};
    const char *path = sqlite3_db_filename(d->db, "main");
    int fd = (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
    if (fd < 0) return false;
    bool same = fstat(fd, &st) == 0 && st.st_dev == d->device && st.st_ino == d->inode;
    close(fd);
    return same;
#else
    (void)d;
    return false;
#endif
}

int cat_db_data_version(cat_db *d, int64_t *out)
{
    if (!d->data_version) {
        int code = prepare(d, "PRAGMA data_version", SQLITE_PREPARE_PERSISTENT, &d->data_version);
        if (code != SQLITE_OK) return db_fail(d, code);
    }
    int rc = cat_db_step(d, d->data_version);
    if (rc > 0) *out = sqlite3_column_int64(d->data_version, 0);
    sqlite3_reset(d->data_version);
    return rc < 0 ? rc : 0;
}

/* The header of the wal-index (https://sqlite.org/walformat.html), once a transaction has mapped it. */
bool cat_db_look(cat_db *d, cat_db_mark *out)
{
    sqlite3_file *f = NULL;
    void volatile *at = NULL;
    if (!d->wal) return false; /* asking for it would make one */
    int code = sqlite3_file_control(d->db, "main", SQLITE_FCNTL_FILE_POINTER, &f);
    if (code != SQLITE_OK || !f || !f->pMethods || f->pMethods->iVersion < 2 || !f->pMethods->xShmMap) return false;
    code = f->pMethods->xShmMap(f, 0, INDEX_BYTES, 0, &at);
    /* READONLY: here it is, not to be written. */
    if ((code != SQLITE_OK && code != SQLITE_READONLY) || !at) return false;
    const volatile uint32_t *words = at;
    for (size_t i = 0; i < sizeof out->words / sizeof out->words[0]; i++) out->words[i] = words[i];
    return true;
}

bool cat_db_constant(const cat_db *d) { return d->constant; }

void cat_db_busy_ms(cat_db *d, int ms) { d->busy_ms = d->wait_ms = ms; }

int cat_db_vacuum(cat_db *d)
{
    int rc = exec(d, "VACUUM");
    if (rc == 0) rc = cat_db_checkpoint(d, d->busy_ms);
    return rc == IMP_E_BUSY ? 0 : rc; /* whoever reads will see to the log */
}

int cat_db_checkpoint(cat_db *d, int wait_ms)
{
    int64_t busy = 0;
    d->wait_ms = wait_ms;
    int rc = cat_db_query(d, "PRAGMA wal_checkpoint(TRUNCATE)", take_int, &busy);
    d->wait_ms = d->busy_ms;
    return rc == 0 && busy ? imp_fail(IMP_E_BUSY, "catalogue: its log is being read") : rc;
}

struct integrity {
    void (*fn)(const char *what, void *user);
    void *user;
};

static int take_finding(sqlite3_stmt *row, void *user)
{
    struct integrity *i = user;
    const char *what = (const char *)sqlite3_column_text(row, 0);
    if (what && strcmp(what, "ok") != 0) i->fn(what, i->user);
    return 0;
}

int cat_db_integrity(cat_db *d, void (*fn)(const char *what, void *user), void *user)
{
    struct integrity i = {fn, user};
    int rc = cat_db_query(d, "PRAGMA integrity_check(100)", take_finding, &i);
    if (rc == IMP_E_CORRUPT) {
        fn(imp_last_error(), user);
        rc = 0;
    }
    return rc;
}

/* ---- open */

static char *join(const char *a, const char *b)
{
    size_t n_a = strlen(a), n_b = strlen(b);
    char *s = imp_malloc(n_a + n_b + 1);
    if (!s) return NULL;
    memcpy(s, a, n_a);
    memcpy(s + n_a, b, n_b + 1);
    return s;
}

/* The file before SQLite sees it: a regular one, ours, mode 0600 whatever the umask (SQLite gives -wal and -shm the
 * mode of the database). */
static int prepare_file(const char *path, bool readonly)
{
    struct stat st;
    if (lstat(path, &st) != 0) {
        if (errno != ENOENT || readonly) return imp_fail_errno(errno, "%s", path);
        /* mknod, since a descriptor would have to be closed again, with the effect told at the top. */
        if (mknod(path, S_IFREG | 0600, 0) != 0 && errno != EEXIST) return imp_fail_errno(errno, "%s", path);
        if (lstat(path, &st) != 0) return imp_fail_errno(errno, "%s", path);
    }
    if (S_ISLNK(st.st_mode)) return imp_fail(IMP_E_PERM, "%s is a symbolic link", path);
    if (!S_ISREG(st.st_mode)) return imp_fail(IMP_E_PERM, "%s is not a regular file", path);
    if (!readonly && (st.st_mode & 07777) != 0600 && st.st_uid == geteuid() && chmod(path, 0600) != 0) {
        return imp_fail_errno(errno, "%s", path);
    }
    int allowed = faccessat(AT_FDCWD, path, readonly ? R_OK : R_OK | W_OK, AT_EACCESS);
    return allowed == 0 ? 0 : imp_fail_errno(errno, "%s", path);
}

/* "file:...?immutable=1": read without locks and -shm, for a folder that this user can't write to. */
static char *immutable_uri(const char *path)
{
    static const char hex[] = "0123456789ABCDEF", head[] = "file:", tail[] = "?immutable=1";
    size_t n = strlen(path);
    char *uri = imp_malloc(sizeof head + 3 * n + sizeof tail);
    if (!uri) return NULL;
    memcpy(uri, head, sizeof head);
    char *o = uri + sizeof head - 1;
    for (const char *p = path; *p; p++) {
        if (*p == '%' || *p == '?' || *p == '#') {
            *o++ = '%';
            *o++ = hex[(unsigned char)*p >> 4];
            *o++ = hex[*p & 15];
        } else {
            *o++ = *p;
        }
    }
    memcpy(o, tail, sizeof tail);
    return uri;
}

static int connect_to(cat_db *d, const char *name, int flags)
{
    flags |= SQLITE_OPEN_NOFOLLOW | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE | SQLITE_OPEN_PRIVATECACHE;
    int code = sqlite3_open_v2(name, &d->db, flags, NULL);
    if (code != SQLITE_OK) return db_fail(d, code);
    cat_db_busy_ms(d, BUSY_MS);
    sqlite3_busy_handler(d->db, on_busy, d);
    sqlite3_limit(d->db, SQLITE_LIMIT_LENGTH, MAX_ROW_BYTES);
    sqlite3_db_config(d->db, SQLITE_DBCONFIG_DEFENSIVE, 1, NULL);
    sqlite3_db_config(d->db, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, NULL);
    /* No mmap: a file that shrinks under it would raise SIGBUS. FULL: what is committed survives a power cut. No
     * temporary files. */
    return exec(d, "PRAGMA mmap_size=0; PRAGMA synchronous=FULL; PRAGMA temp_store=MEMORY; PRAGMA cell_size_check=ON;");
}

/* user_version: the version below, its complement above, so that a damaged one isn't taken for a newer one. */
static uint32_t version_word(uint16_t version) { return version | (uint32_t)(uint16_t)~version << 16; }

/* 0: ours; 1: empty, nothing written yet; or a code. */
static int check_version(cat_db *d)
{
    int64_t application = 0, word = 0, n_tables = 0;
    int rc = cat_db_query(d, "PRAGMA application_id", take_int, &application);
    if (rc == 0) rc = cat_db_query(d, "PRAGMA user_version", take_int, &word);
    if (rc == 0) rc = cat_db_query(d, "SELECT count(*) FROM sqlite_schema", take_int, &n_tables);
    if (rc < 0) return rc;
    if (application == 0 && word == 0 && n_tables == 0) return 1;

    uint16_t version = (uint16_t)word;
    if (application != d->schema->application_id || (uint32_t)word != version_word(version)) {
        return imp_fail(IMP_E_CORRUPT, "catalogue: not a catalogue");
    }
    if (version < d->schema->oldest || version > d->schema->version) {
        return imp_fail(IMP_E_VERSION, "catalogue: format %u, this is for %u", version, d->schema->version);
    }
    d->version = version;
    return 0;
}

uint16_t cat_db_version(const cat_db *d) { return d->version; }

struct schema_rows {
    const char *const *create;
    size_t n, n_all;
    bool differs;
};

static int take_schema_row(sqlite3_stmt *row, void *user)
{
    struct schema_rows *s = user;
    const char *sql = (const char *)sqlite3_column_text(row, 0);
    if (s->n == s->n_all || !sql || strcmp(sql, s->create[s->n]) != 0) {
        s->differs = true;
    } else {
        s->n++;
    }
    return 0;
}

/* So many its version has. */
static size_t n_tables(const cat_db *d) { return d->schema->n_tables[d->version - d->schema->oldest]; }

/* The schema is stored as text in the file like anything else. A changed letter in it could pass for another type. */
static int check_schema(cat_db *d)
{
    struct schema_rows s = {.create = d->schema->create, .n_all = n_tables(d)};
    int rc = cat_db_query(d, "SELECT sql FROM sqlite_schema ORDER BY rowid", take_schema_row, &s);
    if (rc == 0 && (s.differs || s.n < s.n_all)) rc = imp_fail(IMP_E_CORRUPT, "catalogue: its tables are not as made");
    return rc;
}

static int use_wal(cat_db *d)
{
    /* Another process doing the same is no reason to fail, but SQLite doesn't always wait for it here. */
    uint64_t until = imp_now_ns() + (uint64_t)d->busy_ms * 1000000;
    bool wal = false;
    int rc;
    while ((rc = cat_db_query(d, "PRAGMA journal_mode=WAL", take_mode, &wal)) == IMP_E_BUSY && imp_now_ns() < until) {
        usleep(5000);
    }
    if (rc < 0) return rc;
    if (sqlite3_db_readonly(d->db, "main") == 1) return imp_fail(IMP_E_CORRUPT, "catalogue: its header says read-only");
    if (!wal) return imp_fail(IMP_E_IO, "catalogue: this file system has no shared memory for SQLite's WAL");
    d->wal = true;
    char pragma[64];
    snprintf(pragma, sizeof pragma, "PRAGMA journal_size_limit=%d", WAL_KEEP_BYTES);
    return exec(d, pragma);
}

/* The tables from the `first` on, and the version, inside a transaction. */
static int make_tables(cat_db *d, size_t first)
{
    char pragmas[96];
    snprintf(pragmas, sizeof pragmas, "PRAGMA application_id=%d; PRAGMA user_version=%d",
             (int)d->schema->application_id, (int)(int32_t)version_word(d->schema->version));
    int rc = exec(d, pragmas);
    for (size_t i = first; rc == 0 && d->schema->create[i]; i++) rc = exec(d, d->schema->create[i]);
    if (rc == 0) d->version = d->schema->version;
    return rc;
}

/* Leaves the transaction open in which the tables were made. */
static int create_tables(cat_db *d, bool *made)
{
    int rc = cat_db_begin(d);
    if (rc < 0) return rc;
    rc = check_version(d); /* again, under the lock: another process may have been faster */
    if (rc <= 0) {
        cat_db_rollback(d);
        return rc;
    }
    rc = make_tables(d, 0);
    if (rc < 0) cat_db_rollback(d);
    *made = rc == 0;
    return rc;
}

/* The tables that an older version hasn't got. A process of that version that has it open doesn't miss them; what it
 * doesn't know of the rows (cat_internal.h: the versions) it takes for damage, and reads all of them again. */
static int extend(cat_db *d)
{
    int rc = cat_db_begin(d);
    if (rc < 0) return rc;
    rc = check_version(d); /* again: another process may have been faster */
    bool needed = rc == 0 && d->version < d->schema->version;
    if (needed) rc = check_schema(d);
    if (needed && rc == 0) rc = make_tables(d, n_tables(d));
    if (needed && rc == 0) return cat_db_commit(d);
    cat_db_rollback(d);
    return rc == 1 ? imp_fail(IMP_E_CORRUPT, "catalogue: it is empty") : rc;
}

static int open_readonly(cat_db *d, const char *path)
{
    struct stat st;
    char *wal = NULL, *uri = NULL, *folder = NULL;
    int rc = connect_to(d, path, SQLITE_OPEN_READONLY);
    if (rc == 0) rc = check_version(d);
    if (rc == 0) rc = cat_db_query(d, "PRAGMA journal_mode", take_mode, &d->wal);
    if (rc != IMP_E_PERM && rc != IMP_E_IO) goto out;

    /* Perhaps only because -shm can't be made here. Without a -wal the file is whole, and can be read as it is. */
    int first = rc;
    rc = IMP_E_NOMEM;
    wal = join(path, "-wal");
    uri = immutable_uri(path);
    folder = imp_strdup(path);
    if (!wal || !uri || !folder) goto out;
    rc = first;
    *strrchr(folder, '/') = '\0';
    bool writable = faccessat(AT_FDCWD, folder[0] ? folder : "/", W_OK, AT_EACCESS) == 0;
    if (writable || (stat(wal, &st) == 0 && st.st_size > 0)) goto out;
    sqlite3_close(d->db);
    d->db = NULL;
    d->constant = true;
    rc = connect_to(d, uri, SQLITE_OPEN_READONLY | SQLITE_OPEN_URI);
    if (rc == 0) rc = check_version(d);
out:
    if (rc == IMP_E_NOMEM) imp_fail(rc, "catalogue: no memory");
    if (rc == 1) rc = imp_fail(IMP_E_CORRUPT, "catalogue: it is empty");
    imp_free(folder);
    imp_free(uri);
    imp_free(wal);
    return rc;
}

static int open_writable(cat_db *d, const char *path, bool *made)
{
    int rc = connect_to(d, path, SQLITE_OPEN_READWRITE);
    /* The version first: a catalogue of a newer format is left as it is. */
    if (rc == 0) rc = check_version(d);
    bool empty = rc == 1;
    if (rc < 0) return rc;
    rc = use_wal(d);
    if (rc == 0 && empty) rc = create_tables(d, made);
    if (rc == 0 && d->version < d->schema->version) rc = extend(d);
    return rc;
}

/* SQLite keeps its journal in memory too, and temp_store says the same of what is sorted. */
static int open_memory(cat_db *d, bool *made)
{
    int rc = connect_to(d, ":memory:", SQLITE_OPEN_READWRITE | SQLITE_OPEN_MEMORY);
    return rc < 0 ? rc : create_tables(d, made);
}

/* For cat_db_in_place(). In this order: a file that has come in between isn't taken for ours. */
static void note_file(cat_db *d, const char *path)
{
    struct stat st;
    if (lstat(path, &st) != 0 || cat_db_moved(d)) return;
    d->device = st.st_dev;
    d->inode = st.st_ino;
}

int cat_db_open(const char *path, const cat_schema *schema, unsigned flags, cat_db **out, bool *made)
{
    *out = NULL;
    *made = false;
    bool readonly = flags & CAT_DB_READONLY;
    cat_db *d = imp_calloc(1, sizeof *d);
    if (d) d->stmts = imp_calloc(schema->n_sql, sizeof *d->stmts);
    int rc = d && d->stmts ? 0 : imp_fail(IMP_E_NOMEM, "catalogue: no memory");
    if (rc < 0) goto out;
    d->schema = schema;

    if (flags & CAT_DB_MEMORY) {
        rc = open_memory(d, made);
    } else {
        rc = prepare_file(path, readonly);
        if (rc == 0) rc = readonly ? open_readonly(d, path) : open_writable(d, path, made);
    }
    if (rc == 0) rc = check_schema(d);
    if (rc < 0) goto out;
    if (!(flags & CAT_DB_MEMORY)) note_file(d, path);
    *out = d;
    d = NULL;
out:
    if (rc < 0) *made = false;
    cat_db_close(d);
    return rc;
}

void cat_db_close(cat_db *d)
{
    if (!d) return;
    if (d->db) cat_db_rollback(d);
    sqlite3_finalize(d->data_version);
    for (size_t i = 0; d->stmts && i < d->schema->n_sql; i++) sqlite3_finalize(d->stmts[i]);
    sqlite3_close(d->db);
    imp_free(d->stmts);
    imp_free(d);
}
