/* cat_advice.c: what the catalogue keeps that may be lost: uses of nodes, histories of segments, fingerprints of files,
 * costs of reads, settings. A row that isn't sound is no row. */
#include <string.h>

#include "base/alloc.h"
#include "base/hash.h"
#include "base/status.h"
#include "store/cat_internal.h"

/* ---- uses */

static uint64_t use_sum(uint64_t node, uint64_t hits, int64_t used_s)
{
    uint64_t f[] = {node, hits, (uint64_t)used_s};
    return cat_sum_of(CAT_USE, f, 3);
}

int imp_cat_put_use(imp_cat *c, uint64_t node, uint64_t hits, int64_t used_s)
{
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, CAT_USE_PUT, &s);
    if (rc < 0) return cat_note(c, rc);
    uint64_t v[] = {node, hits, (uint64_t)used_s, use_sum(node, hits, used_s)};
    cat_bind_numbers(s, v, 4);
    return cat_note(c, cat_db_run(c->db, s));
}

int cat_scan_uses(imp_cat *c, int (*fn)(uint64_t node, uint64_t hits, int64_t used_s, void *user), void *user,
                     uint64_t *n_bad)
{
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, CAT_USE_ALL, &s);
    while (rc == 0 && (rc = cat_db_step(c->db, s)) > 0) {
        uint64_t node = cat_column(s, 0), hits = cat_column(s, 1);
        int64_t used_s = sqlite3_column_int64(s, 2);
        bool good = cat_column(s, 3) == use_sum(node, hits, used_s);
        if (!good) ++*n_bad;
        rc = good && fn ? fn(node, hits, used_s, user) : 0;
    }
    cat_db_done(s);
    return rc;
}

int imp_cat_uses(imp_cat *c, int (*fn)(uint64_t node, uint64_t hits, int64_t used_s, void *user), void *user)
{
    uint64_t n_bad = 0;
    return cat_scan_uses(c, fn, user, &n_bad);
}

/* ---- histories */

static uint64_t history_sum(uint64_t segment, const void *bytes, size_t n_bytes)
{
    return imp_hash64(bytes, n_bytes, cat_sum_of(CAT_HISTORY, &segment, 1));
}

/* Does the catalogue have a table for them? A former version's, opened for reading, hasn't. */
static bool keeps_histories(const imp_cat *c) { return cat_db_version(c->db) >= CAT_VERSION_HISTORY; }

static int put_history(imp_cat *c, uint64_t segment, const void *bytes, size_t n_bytes)
{
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, CAT_HISTORY_PUT, &s);
    if (rc < 0) return cat_note(c, rc);
    sqlite3_bind_int64(s, 1, (sqlite3_int64)segment);
    sqlite3_bind_blob(s, 2, bytes, (int)n_bytes, SQLITE_STATIC);
    sqlite3_bind_int64(s, 3, (sqlite3_int64)history_sum(segment, bytes, n_bytes));
    return cat_note(c, cat_db_run(c->db, s));
}

int imp_cat_put_history(imp_cat *c, uint64_t segment, const void *bytes, size_t n_bytes)
{
    unsigned char extra[CAT_EXTRA_BYTES];
    int rc = cat_must_be_in_change(c);
    if (rc < 0) return rc;
    if (n_bytes > IMP_CAT_HISTORY_BYTES_MAX) return imp_fail(IMP_E_ARG, "catalogue: a history of %zu bytes", n_bytes);
    if (!c->key) return put_history(c, segment, bytes, n_bytes);
    unsigned char *box = imp_malloc(n_bytes + IMP_BOX_BYTES);
    if (!box) return cat_note(c, cat_no_memory());
    cat_put_extra(extra, CAT_HISTORY, segment);
    rc = cat_note(c, imp_box_seal(c->key, extra, sizeof extra, bytes, n_bytes, box));
    if (rc == 0) rc = put_history(c, segment, box, n_bytes + IMP_BOX_BYTES);
    imp_free(box);
    return rc;
}

/* A copy of what is found, decrypted. */
static int take_history(const imp_cat *c, uint64_t segment, const void *found, void **bytes, size_t *n_bytes)
{
    unsigned char extra[CAT_EXTRA_BYTES];
    size_t n_found = *n_bytes, box = c->key ? IMP_BOX_BYTES : 0;
    if (n_found < box) return IMP_E_NOTFOUND;
    *n_bytes = n_found - box;
    *bytes = imp_malloc(*n_bytes + 1);
    if (!*bytes) return cat_no_memory();
    cat_put_extra(extra, CAT_HISTORY, segment);
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
    return bytes && cat_column(s, 2) == history_sum(cat_column(s, 0), bytes, *n_bytes) ? bytes : NULL;
}

int imp_cat_get_history(imp_cat *c, uint64_t segment, void **bytes, size_t *n_bytes)
{
    sqlite3_stmt *s = NULL;
    *bytes = NULL;
    *n_bytes = 0;
    int rc = keeps_histories(c) ? cat_db_stmt(c->db, CAT_HISTORY_GET, &s) : IMP_E_NOTFOUND;
    if (rc == 0) {
        sqlite3_bind_int64(s, 1, (sqlite3_int64)segment);
        rc = cat_db_step(c->db, s);
        const void *found = rc > 0 && cat_column(s, 0) == segment ? parse_history(s, n_bytes) : NULL;
        if (rc >= 0) rc = found ? 0 : IMP_E_NOTFOUND;
        if (rc == 0) rc = take_history(c, segment, found, bytes, n_bytes);
    }
    cat_db_done(s);
    if (rc == IMP_E_NOTFOUND) imp_fail(rc, "catalogue: no history of segment %016llx", (unsigned long long)segment);
    return rc;
}

int imp_cat_remove_history(imp_cat *c, uint64_t segment)
{
    int rc = cat_must_be_in_change(c);
    return rc < 0 ? rc : cat_note(c, cat_delete_row(c, CAT_HISTORY_DEL, segment));
}

int cat_scan_histories(imp_cat *c, uint64_t *n_bad)
{
    sqlite3_stmt *s = NULL;
    size_t n_bytes;
    int rc = keeps_histories(c) ? cat_db_stmt(c->db, CAT_HISTORY_ALL, &s) : 0;
    while (s && rc == 0 && (rc = cat_db_step(c->db, s)) > 0) {
        if (!parse_history(s, &n_bytes)) ++*n_bad;
        rc = 0;
    }
    cat_db_done(s);
    return rc;
}

/* ---- fingerprints */

/* A wrong fingerprint would let two models share KV, so a row that isn't sound is no row. */
static bool parse_file(sqlite3_stmt *s, imp_cat_file *file, imp_hash128 *hash)
{
    *file = (imp_cat_file){
        .device = cat_column(s, 0),
        .inode = cat_column(s, 1),
        .size = cat_column(s, 2),
        .mtime_ns = sqlite3_column_int64(s, 3),
        .ctime_ns = sqlite3_column_int64(s, 4),
    };
    *hash = cat_column_hash(s, 5);
    uint64_t f[] = {file->device, file->inode, file->size, (uint64_t)file->mtime_ns, (uint64_t)file->ctime_ns,
                    hash->lo,     hash->hi};
    return cat_column(s, 6) == cat_sum_of(CAT_FILE_HASH, f, 7);
}

int imp_cat_fingerprint(imp_cat *c, const imp_cat_file *file, imp_hash128 *out)
{
    sqlite3_stmt *s = NULL;
    uint64_t key[] = {file->device, file->inode};
    imp_cat_file row;
    imp_hash128 hash;
    int rc = cat_db_stmt(c->db, CAT_FILE_GET, &s);
    if (rc < 0) return rc;
    cat_bind_numbers(s, key, 2);
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
    int rc = cat_db_stmt(c->db, CAT_FILE_PUT, &s);
    if (rc < 0) return cat_note(c, rc);
    uint64_t v[] = {file->device, file->inode, file->size, (uint64_t)file->mtime_ns, (uint64_t)file->ctime_ns, hash.lo,
                    hash.hi};
    cat_bind_numbers(s, v, 5);
    rc = cat_bind_hash(s, 6, hash);
    if (rc < 0) return cat_note(c, rc);
    sqlite3_bind_int64(s, 7, (sqlite3_int64)cat_sum_of(CAT_FILE_HASH, v, 7));
    return cat_note(c, cat_db_run(c->db, s));
}

int cat_scan_files(imp_cat *c, uint64_t *n_bad)
{
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, CAT_FILE_ALL, &s);
    while (rc == 0 && (rc = cat_db_step(c->db, s)) > 0) {
        imp_cat_file file;
        imp_hash128 hash;
        if (!parse_file(s, &file, &hash)) ++*n_bad;
        rc = 0;
    }
    cat_db_done(s);
    return rc;
}

/* ---- costs of reads: rows of the same table, of no inode */

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
    int rc = cat_db_stmt(c->db, CAT_FILE_GET, &s);
    if (rc < 0) return rc;
    cat_bind_numbers(s, key, 2);
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

/* ---- settings */

static bool keeps_settings(const imp_cat *c) { return cat_db_version(c->db) >= CAT_VERSION_SETTING; }

static uint64_t setting_sum(const char *name, size_t n_name, uint64_t value)
{
    return imp_hash64(name, n_name, cat_sum_of(CAT_SETTING, &value, 1));
}

/* `name` NULL: whichever it is. */
static bool parse_setting(sqlite3_stmt *s, const char *name, uint64_t *value)
{
    const void *found = sqlite3_column_blob(s, 0); /* of a text: its bytes, with no need of memory */
    size_t n_found = (size_t)sqlite3_column_bytes(s, 0);
    *value = cat_column(s, 1);
    if (!found || cat_column(s, 2) != setting_sum(found, n_found, *value)) return false;
    return !name || (n_found == strlen(name) && memcmp(found, name, n_found) == 0);
}

int cat_get_setting(imp_cat *c, const char *name, uint64_t *value)
{
    sqlite3_stmt *s = NULL;
    *value = 0;
    int rc = keeps_settings(c) ? cat_db_stmt(c->db, CAT_SETTING_GET, &s) : 0;
    if (rc == 0 && s) {
        sqlite3_bind_text(s, 1, name, -1, SQLITE_STATIC);
        rc = cat_db_step(c->db, s);
        if (rc <= 0 || !parse_setting(s, name, value)) *value = 0;
    }
    cat_db_done(s);
    /* A damaged page among them is no reason to make all of it again; writing there will find it. */
    return rc == IMP_E_CORRUPT || rc > 0 ? 0 : rc;
}

int cat_put_setting(imp_cat *c, const char *name, uint64_t value)
{
    sqlite3_stmt *s = NULL;
    int rc = cat_must_be_in_change(c);
    if (rc == 0) rc = cat_note(c, cat_db_stmt(c->db, CAT_SETTING_PUT, &s));
    if (rc < 0) return rc;
    sqlite3_bind_text(s, 1, name, -1, SQLITE_STATIC);
    sqlite3_bind_int64(s, 2, (sqlite3_int64)value);
    sqlite3_bind_int64(s, 3, (sqlite3_int64)setting_sum(name, strlen(name), value));
    return cat_note(c, cat_db_run(c->db, s));
}

int cat_scan_settings(imp_cat *c, uint64_t *n_bad)
{
    sqlite3_stmt *s = NULL;
    uint64_t value;
    int rc = keeps_settings(c) ? cat_db_stmt(c->db, CAT_SETTING_ALL, &s) : 0;
    while (s && rc == 0 && (rc = cat_db_step(c->db, s)) > 0) {
        if (!parse_setting(s, NULL, &value)) ++*n_bad;
        rc = 0;
    }
    cat_db_done(s);
    return rc;
}
