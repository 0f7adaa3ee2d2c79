/* catalogue.c: the catalogue as a whole: opened and closed, read and changed in transactions, with the meta row that
 * vouches for all others. The invariants are in cat_internal.h. */
#include "store/catalogue.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/rng.h"
#include "base/status.h"
#include "store/cat_internal.h"

static const char limit_name[] = "limit_bytes";

/* ---- the meta row */

static int load_meta(imp_cat *c)
{
    sqlite3_stmt *s = NULL;
    cat_meta m = {0};
    uint64_t sum = 0;
    int rc = cat_db_stmt(c->db, CAT_META_GET, &s);
    if (rc == 0) rc = cat_db_step(c->db, s);
    if (rc > 0) {
        uint64_t v[CAT_N_META];
        for (int i = 0; i < CAT_N_META; i++) v[i] = cat_column(s, i);
        sum = cat_column(s, CAT_N_META);
        memcpy(&m, v, sizeof m);
        if (sum != cat_sum_of(CAT_META, v, CAT_N_META))
            rc = imp_fail(IMP_E_CORRUPT, "catalogue: its meta row is damaged");
        else rc = 0;
    } else if (rc == 0) {
        rc = imp_fail(IMP_E_CORRUPT, "catalogue: its meta row is missing");
    }
    cat_db_done(s);
    uint64_t limit = 0;
    if (rc == 0) rc = cat_get_setting(c, limit_name, &limit); /* with each look, as the generation: others may set it */
    if (rc < 0) return rc;
    c->now = m;
    c->limit = limit;
    return 0;
}

static int store_meta(imp_cat *c)
{
    sqlite3_stmt *s = NULL;
    uint64_t v[CAT_N_META + 1];
    memcpy(v, &c->now, sizeof c->now);
    v[CAT_N_META] = cat_sum_of(CAT_META, v, CAT_N_META);
    int rc = cat_db_stmt(c->db, CAT_META_PUT, &s);
    if (rc < 0) return rc;
    cat_bind_numbers(s, v, CAT_N_META + 1);
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
    if (flags & IMP_STORE_MEMORY) return cat_db_open(NULL, &cat_catalogue_schema, CAT_DB_MEMORY, &c->db, made);
    /* Only the catalogue itself may be no symbolic link; SQLite would refuse one anywhere in the path. */
    *real = realpath(dir, NULL);
    if (!*real) return imp_fail_errno(errno, "%s", dir);
    char *path = path_in(*real, "catalogue.db");
    if (!path) return cat_no_memory();
    int rc = cat_db_open(path, &cat_catalogue_schema, flags & IMP_STORE_READONLY ? CAT_DB_READONLY : 0, &c->db, made);
    imp_free(path);
    return rc;
}

int imp_cat_open(const char *dir, unsigned flags, imp_cat **out)
{
    *out = NULL;
    char *real = NULL;
    bool made = false;
    imp_cat *c = imp_calloc(1, sizeof *c);
    int rc = c ? open_db(c, dir, flags, &real, &made) : cat_no_memory();
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

void imp_cat_around(imp_cat *c, void (*before)(void *user), void (*after)(void *user), void (*busy)(void *user),
                    void *user)
{
    cat_db_around(c->db, (cat_db_hooks){before, after, busy, user});
}

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
            rc = cat_no_memory();
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
    c->limit_before = c->limit;
    c->in_change = true;
    return 0;
}

static int prune_log(imp_cat *c)
{
    /* In large steps, so that it costs little each time. */
    uint64_t n = c->now.generation + 1 - c->now.log_first;
    if (n <= 2 * IMP_CAT_LOG_KEEP) return 0;
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, CAT_LOG_PRUNE, &s);
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
    c->limit = c->limit_before;
    /* Read inside the change, after changes of its own: those are undone, but all before was told. */
    if (c->seen > c->now.generation) c->seen = c->now.generation;
}

int imp_cat_failure(const imp_cat *c) { return c->failed; }

int cat_note(imp_cat *c, int rc)
{
    if (rc < 0 && c->in_change && c->failed == 0) c->failed = rc;
    return rc;
}

int cat_must_be_in_change(const imp_cat *c)
{
    return c->in_change ? 0 : imp_fail(IMP_E_ARG, "catalogue: a change outside of a transaction");
}

/* ---- settings */

uint64_t imp_cat_limit(const imp_cat *c) { return c->limit; }

int imp_cat_put_limit(imp_cat *c, uint64_t limit_bytes)
{
    int rc = cat_put_setting(c, limit_name, limit_bytes);
    if (rc == 0) c->limit = limit_bytes;
    return rc;
}

/* ---- reading */

int cat_begin_read(imp_cat *c)
{
    if (c->in_change) return 0;
    int rc = cat_db_begin_read(c->db);
    if (rc < 0) return rc;
    rc = load_meta(c);
    if (rc < 0) cat_db_rollback(c->db);
    return rc;
}

void cat_end_read(imp_cat *c)
{
    if (!c->in_change) cat_db_rollback(c->db); /* nothing was written */
}

int imp_cat_changed(imp_cat *c, bool *changed)
{
    *changed = true;
    int rc = check_in_place(c);
    if (rc < 0 || c->unseen) return rc;
    int64_t version = 0;
    cat_db_mark mark = {{0}};
    bool marked = cat_db_look(c->db, &mark); /* before: what comes in between shows in it the next time */
    rc = cat_db_data_version(c->db, &version);
    if (rc < 0) return rc;
    if (version == c->data_version) {
        if (marked) c->mark = mark;
        *changed = false;
        return 0;
    }
    /* Others have written; perhaps nothing but statistics or reservations. */
    rc = cat_begin_read(c);
    if (rc < 0) return rc;
    cat_end_read(c);
    c->unseen = c->now.generation != c->seen;
    if (!c->unseen) c->data_version = version;
    *changed = c->unseen;
    return 0;
}

bool imp_cat_untouched(imp_cat *c)
{
    cat_db_mark mark;
    if (c->unseen || !cat_db_in_place(c->db)) return false;
    if (cat_db_look(c->db, &mark)) return memcmp(&mark, &c->mark, sizeof mark) == 0;
    return cat_db_constant(c->db);
}

int imp_cat_totals(imp_cat *c, uint64_t *segment_bytes, uint64_t *reserved_bytes)
{
    int rc = cat_begin_read(c);
    if (rc < 0) return rc;
    cat_end_read(c);
    *segment_bytes = c->now.segment_bytes;
    *reserved_bytes = c->now.reserved_bytes;
    return 0;
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
