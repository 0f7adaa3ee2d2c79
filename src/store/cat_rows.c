/* cat_rows.c: rows of the catalogue to and from numbers, each with its sum. */
#include <string.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/hash.h"
#include "base/status.h"
#include "store/cat_internal.h"

int cat_corrupt(const char *what, uint64_t id)
{
    return imp_fail(IMP_E_CORRUPT, "catalogue: %s %llu is damaged", what, (unsigned long long)id);
}

int cat_no_memory(void) { return imp_fail(IMP_E_NOMEM, "catalogue: no memory"); }

uint64_t cat_sum_of(unsigned table, const uint64_t *fields, size_t n)
{
    unsigned char bytes[8 * 16];
    for (size_t i = 0; i < n; i++) imp_put64(bytes + 8 * i, fields[i]);
    return imp_hash64(bytes, 8 * n, table);
}

uint64_t cat_column(sqlite3_stmt *s, int i) { return (uint64_t)sqlite3_column_int64(s, i); }

void cat_bind_numbers(sqlite3_stmt *s, const uint64_t *v, int n)
{
    for (int i = 0; i < n; i++) sqlite3_bind_int64(s, i + 1, (sqlite3_int64)v[i]);
}

int cat_bind_hash(sqlite3_stmt *s, int i, imp_hash128 h)
{
    unsigned char b[16];
    imp_put64(b, h.lo);
    imp_put64(b + 8, h.hi);
    if (sqlite3_bind_blob(s, i, b, sizeof b, SQLITE_TRANSIENT) == SQLITE_OK) return 0; /* copied */
    cat_db_done(s);
    return cat_no_memory();
}

static imp_hash128 parse_hash(const unsigned char *b)
{
    return (imp_hash128){.lo = imp_get64(b), .hi = imp_get64(b + 8)};
}

imp_hash128 cat_column_hash(sqlite3_stmt *s, int i)
{
    const unsigned char *b = sqlite3_column_blob(s, i);
    return b && sqlite3_column_bytes(s, i) == 16 ? parse_hash(b) : (imp_hash128){0, 0};
}

uint64_t cat_space_sum(const imp_cat_space *r, size_t n_name)
{
    uint64_t f[] = {r->id.lo, r->id.hi, (uint64_t)r->created_s};
    return imp_hash64(r->model_name, n_name, cat_sum_of(CAT_SPACE, f, 3));
}

uint64_t cat_segment_sum(const imp_cat_segment *r)
{
    uint64_t f[] = {r->id, r->space.lo, r->space.hi, r->disk_bytes, r->n_tokens};
    return cat_sum_of(CAT_SEGMENT, f, 5);
}

uint64_t cat_node_flags(const imp_cat_node *r) { return (uint64_t)r->derived | (uint64_t)r->pinned << 1; }

/* Of the tokens as they are on disk: encrypted ones can't be guessed by it. */
uint64_t cat_node_sum(const imp_cat_node *r, uint64_t flags, const void *tokens, size_t n_bytes)
{
    uint64_t f[] = {r->id,       r->parent, r->space.lo, r->space.hi,           r->segment, r->segment_first,
                    r->n_tokens, r->depth,  flags,       (uint64_t)r->created_s};
    return imp_hash64(tokens, n_bytes, cat_sum_of(CAT_NODE, f, 10));
}

uint64_t cat_reservation_sum(const imp_cat_reservation *r)
{
    uint64_t f[] = {r->segment, r->instance, r->bytes};
    return cat_sum_of(CAT_RESERVATION, f, 3);
}

uint64_t cat_log_sum(uint64_t generation, uint64_t kind, uint64_t removed, cat_log_key key)
{
    uint64_t f[] = {generation, kind, removed, key.lo, key.hi};
    return cat_sum_of(CAT_LOG, f, 5);
}

/* ---- rows from the database */

int cat_parse_space(sqlite3_stmt *s, imp_cat_space *out, uint64_t *sum)
{
    *out = (imp_cat_space){.id = cat_column_hash(s, 0), .created_s = sqlite3_column_int64(s, 1)};
    out->model_name = (const char *)sqlite3_column_text(s, 2);
    size_t n_name = (size_t)sqlite3_column_bytes(s, 2);
    *sum = cat_column(s, 3);
    if (!out->model_name || strlen(out->model_name) != n_name || *sum != cat_space_sum(out, n_name)) {
        return imp_fail(IMP_E_CORRUPT, "catalogue: a space is damaged");
    }
    return 0;
}

int cat_parse_segment(sqlite3_stmt *s, imp_cat_segment *out, uint64_t *sum)
{
    *out = (imp_cat_segment){.id = cat_column(s, 0), .space = cat_column_hash(s, 1), .disk_bytes = cat_column(s, 2)};
    uint64_t n_tokens = cat_column(s, 3);
    out->n_tokens = (uint32_t)n_tokens;
    *sum = cat_column(s, 4);
    return n_tokens <= UINT32_MAX && *sum == cat_segment_sum(out) ? 0 : cat_corrupt("segment", out->id);
}

void cat_put_extra(unsigned char extra[CAT_EXTRA_BYTES], unsigned table, uint64_t id)
{
    imp_put64(extra, table);
    imp_put64(extra + 8, id);
}

/* `bytes` [n] as on disk, to numbers at `out`, which has room for them. */
static int read_tokens(const imp_cat *c, uint64_t id, const unsigned char *bytes, size_t n_bytes, int32_t *out)
{
    unsigned char extra[CAT_EXTRA_BYTES];
    size_t n = (c->key ? n_bytes - IMP_BOX_BYTES : n_bytes) / 4;
    cat_put_extra(extra, CAT_NODE, id);
    int rc = c->key ? imp_box_open(c->key, extra, sizeof extra, bytes, n_bytes, out) : 0;
    const unsigned char *from = c->key ? (const unsigned char *)out : bytes;
    for (size_t i = 0; rc == 0 && i < n; i++) {
        uint32_t token = imp_get32(from + 4 * i);
        memcpy(out + i, &token, sizeof token);
    }
    return rc == IMP_E_CORRUPT ? cat_corrupt("node", id) : rc;
}

static int parse_node(imp_cat *c, sqlite3_stmt *s, imp_cat_node *out, uint64_t *sum)
{
    uint64_t first = cat_column(s, 4), n = cat_column(s, 5), flags = cat_column(s, 7);
    *out = (imp_cat_node){
        .id = cat_column(s, 0),
        .parent = cat_column(s, 1),
        .space = cat_column_hash(s, 2),
        .segment = cat_column(s, 3),
        .segment_first = (uint32_t)first,
        .n_tokens = (uint32_t)n,
        .depth = cat_column(s, 6),
        .derived = flags & 1,
        .pinned = flags & 2,
        .created_s = sqlite3_column_int64(s, 8),
    };
    *sum = cat_column(s, 9);
    const unsigned char *bytes = sqlite3_column_blob(s, 10);
    uint64_t n_bytes = 4 * n + (c->key ? IMP_BOX_BYTES : 0);
    bool whole = first <= UINT32_MAX && n >= 1 && n <= CAT_MAX_TOKENS && bytes &&
                 (uint64_t)sqlite3_column_bytes(s, 10) == n_bytes;
    if (!whole || *sum != cat_node_sum(out, flags, bytes, (size_t)n_bytes)) return cat_corrupt("node", out->id);
    if (n > c->tokens_room) {
        int32_t *grown = imp_realloc_array(c->tokens, (size_t)n, sizeof *grown);
        if (!grown) return cat_no_memory();
        c->tokens = grown;
        c->tokens_room = (size_t)n;
    }
    out->tokens = c->tokens;
    return read_tokens(c, out->id, bytes, (size_t)n_bytes, c->tokens);
}

int cat_parse_reservation(sqlite3_stmt *s, imp_cat_reservation *out, uint64_t *sum)
{
    *out = (imp_cat_reservation){.segment = cat_column(s, 0), .instance = cat_column(s, 1), .bytes = cat_column(s, 2)};
    *sum = cat_column(s, 3);
    return *sum == cat_reservation_sum(out) ? 0 : cat_corrupt("reservation", out->segment);
}

int cat_find_space(imp_cat *c, imp_hash128 id, sqlite3_stmt **s, imp_cat_space *out, uint64_t *sum)
{
    int rc = cat_db_stmt(c->db, CAT_SPACE_GET, s);
    if (rc < 0) return rc;
    rc = cat_bind_hash(*s, 1, id);
    if (rc < 0) return rc;
    rc = cat_db_step(c->db, *s);
    if (rc <= 0) return rc;
    rc = cat_parse_space(*s, out, sum);
    return rc < 0 ? rc : 1;
}

int cat_find_segment(imp_cat *c, uint64_t id, imp_cat_segment *out, uint64_t *sum)
{
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, CAT_SEGMENT_GET, &s);
    if (rc < 0) return rc;
    sqlite3_bind_int64(s, 1, (sqlite3_int64)id);
    rc = cat_db_step(c->db, s);
    if (rc > 0) rc = cat_parse_segment(s, out, sum) < 0 ? IMP_E_CORRUPT : 1;
    cat_db_done(s);
    return rc;
}

int cat_find_node(imp_cat *c, uint64_t id, imp_cat_node *out, uint64_t *sum)
{
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, CAT_NODE_GET, &s);
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

int cat_find_reservation(imp_cat *c, uint64_t segment, imp_cat_reservation *out, uint64_t *sum)
{
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, CAT_RESERVATION_GET, &s);
    if (rc < 0) return rc;
    sqlite3_bind_int64(s, 1, (sqlite3_int64)segment);
    rc = cat_db_step(c->db, s);
    if (rc > 0) rc = cat_parse_reservation(s, out, sum) < 0 ? IMP_E_CORRUPT : 1;
    cat_db_done(s);
    return rc;
}
