/* cat_changes.c: rows of the catalogue put and removed, inside a change. */
#include <string.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/status.h"
#include "store/cat_internal.h"

static int log_change(imp_cat *c, unsigned kind, unsigned removed, cat_log_key key)
{
    sqlite3_stmt *s = NULL;
    int rc = cat_db_stmt(c->db, CAT_LOG_PUT, &s);
    if (rc < 0) return rc;
    uint64_t generation = c->now.generation + 1, v[] = {generation, kind, removed};
    cat_bind_numbers(s, v, 3);
    rc = cat_bind_hash(s, 4, (imp_hash128){.lo = key.lo, .hi = key.hi});
    if (rc < 0) return rc;
    sqlite3_bind_int64(s, 5, (sqlite3_int64)cat_log_sum(generation, kind, removed, key));
    rc = cat_db_run(c->db, s);
    if (rc == 0) c->now.generation = generation;
    return rc;
}

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
    uint64_t old_sum = 0, sum = cat_space_sum(&row, n_name);
    int had = cat_find_space(c, row.id, &s, &old, &old_sum);
    cat_db_done(s);
    if (had < 0) return had;
    int rc = cat_db_stmt(c->db, CAT_SPACE_PUT, &s);
    if (rc < 0) return rc;
    rc = cat_bind_hash(s, 1, row.id);
    if (rc < 0) return rc;
    sqlite3_bind_int64(s, 2, row.created_s);
    sqlite3_bind_text(s, 3, row.model_name, (int)n_name, SQLITE_STATIC);
    sqlite3_bind_int64(s, 4, (sqlite3_int64)sum);
    rc = cat_db_run(c->db, s);
    if (rc < 0) return rc;
    count_put(c, CAT_SPACE, had > 0, old_sum, sum);
    return log_change(c, CAT_SPACE, CAT_PUT, (cat_log_key){row.id.lo, row.id.hi});
}

static int remove_space(imp_cat *c, imp_hash128 id)
{
    imp_cat_space old;
    sqlite3_stmt *s = NULL;
    uint64_t sum = 0;
    int had = cat_find_space(c, id, &s, &old, &sum);
    cat_db_done(s);
    if (had <= 0) return had < 0 ? had : imp_fail(IMP_E_NOTFOUND, "catalogue: no such space");
    int rc = cat_db_stmt(c->db, CAT_SPACE_DEL, &s);
    if (rc < 0) return rc;
    rc = cat_bind_hash(s, 1, id);
    if (rc < 0) return rc;
    rc = cat_db_run(c->db, s);
    if (rc < 0) return rc;
    count_removed(c, CAT_SPACE, sum);
    return log_change(c, CAT_SPACE, CAT_REMOVED, (cat_log_key){id.lo, id.hi});
}

static int put_segment(imp_cat *c, const imp_cat_segment *row)
{
    imp_cat_segment old = {0};
    sqlite3_stmt *s = NULL;
    uint64_t old_sum = 0, sum = cat_segment_sum(row);
    int had = cat_find_segment(c, row->id, &old, &old_sum);
    if (had < 0) return had;
    int rc = cat_db_stmt(c->db, CAT_SEGMENT_PUT, &s);
    if (rc < 0) return rc;
    sqlite3_bind_int64(s, 1, (sqlite3_int64)row->id);
    rc = cat_bind_hash(s, 2, row->space);
    if (rc < 0) return rc;
    sqlite3_bind_int64(s, 3, (sqlite3_int64)row->disk_bytes);
    sqlite3_bind_int64(s, 4, row->n_tokens);
    sqlite3_bind_int64(s, 5, (sqlite3_int64)sum);
    rc = cat_db_run(c->db, s);
    if (rc < 0) return rc;
    count_put(c, CAT_SEGMENT, had > 0, old_sum, sum);
    c->now.segment_bytes += row->disk_bytes - (had > 0 ? old.disk_bytes : 0);
    return log_change(c, CAT_SEGMENT, CAT_PUT, (cat_log_key){row->id, 0});
}

int cat_delete_row(imp_cat *c, unsigned statement, uint64_t id)
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
    int had = cat_find_segment(c, id, &old, &sum);
    if (had <= 0) return had < 0 ? had : not_found("segment", id);
    int rc = cat_delete_row(c, CAT_SEGMENT_DEL, id);
    if (rc == 0) rc = cat_delete_row(c, CAT_HISTORY_DEL, id);
    if (rc < 0) return rc;
    count_removed(c, CAT_SEGMENT, sum);
    c->now.segment_bytes -= old.disk_bytes;
    return log_change(c, CAT_SEGMENT, CAT_REMOVED, (cat_log_key){id, 0});
}

static int put_node(imp_cat *c, const imp_cat_node *row)
{
    if (row->id == 0 || row->id > INT64_MAX || row->n_tokens < 1 || row->n_tokens > CAT_MAX_TOKENS) {
        return imp_fail(IMP_E_ARG, "catalogue: node %llu of %u tokens", (unsigned long long)row->id, row->n_tokens);
    }
    size_t box = c->key ? IMP_BOX_BYTES : 0, n_bytes = 4 * (size_t)row->n_tokens + box;
    if (n_bytes > c->bytes_room) {
        unsigned char *grown = imp_realloc(c->bytes, n_bytes);
        if (!grown) return cat_no_memory();
        c->bytes = grown;
        c->bytes_room = n_bytes;
    }
    for (size_t i = 0; i < row->n_tokens; i++) imp_put32(c->bytes + box + 4 * i, (uint32_t)row->tokens[i]);
    if (c->key) {
        unsigned char extra[CAT_EXTRA_BYTES];
        cat_put_extra(extra, CAT_NODE, row->id);
        int sealed = imp_box_seal(c->key, extra, sizeof extra, c->bytes + box, n_bytes - box, c->bytes);
        if (sealed < 0) return sealed;
    }

    imp_cat_node old;
    sqlite3_stmt *s = NULL;
    uint64_t old_sum = 0, flags = cat_node_flags(row), sum = cat_node_sum(row, flags, c->bytes, n_bytes);
    int had = cat_find_node(c, row->id, &old, &old_sum);
    if (had < 0) return had;
    int rc = cat_db_stmt(c->db, CAT_NODE_PUT, &s);
    if (rc < 0) return rc;
    uint64_t v[] = {row->id,       row->parent, 0,     row->segment,             row->segment_first,
                    row->n_tokens, row->depth,  flags, (uint64_t)row->created_s, sum};
    cat_bind_numbers(s, v, 10);
    rc = cat_bind_hash(s, 3, row->space);
    if (rc < 0) return rc;
    sqlite3_bind_blob(s, 11, c->bytes, (int)n_bytes, SQLITE_STATIC);
    rc = cat_db_run(c->db, s);
    if (rc < 0) return rc;
    count_put(c, CAT_NODE, had > 0, old_sum, sum);
    if (row->id >= c->now.next_node) c->now.next_node = row->id + 1;
    return log_change(c, CAT_NODE, CAT_PUT, (cat_log_key){row->id, 0});
}

static int remove_node(imp_cat *c, uint64_t id)
{
    imp_cat_node old;
    uint64_t sum = 0;
    int had = cat_find_node(c, id, &old, &sum);
    if (had <= 0) return had < 0 ? had : not_found("node", id);
    int rc = cat_delete_row(c, CAT_NODE_DEL, id);
    if (rc == 0) rc = cat_delete_row(c, CAT_USE_DEL, id);
    if (rc < 0) return rc;
    count_removed(c, CAT_NODE, sum);
    return log_change(c, CAT_NODE, CAT_REMOVED, (cat_log_key){id, 0});
}

static int reserve(imp_cat *c, const imp_cat_reservation *row)
{
    imp_cat_reservation old = {0};
    sqlite3_stmt *s = NULL;
    uint64_t old_sum = 0, sum = cat_reservation_sum(row);
    int had = cat_find_reservation(c, row->segment, &old, &old_sum);
    if (had < 0) return had;
    int rc = cat_db_stmt(c->db, CAT_RESERVATION_PUT, &s);
    if (rc < 0) return rc;
    uint64_t v[] = {row->segment, row->instance, row->bytes, sum};
    cat_bind_numbers(s, v, 4);
    rc = cat_db_run(c->db, s);
    if (rc < 0) return rc;
    count_put(c, CAT_RESERVATION, had > 0, old_sum, sum);
    c->now.reserved_bytes += row->bytes - (had > 0 ? old.bytes : 0);
    return 0;
}

static int unreserve(imp_cat *c, uint64_t segment)
{
    imp_cat_reservation old;
    uint64_t sum = 0;
    int had = cat_find_reservation(c, segment, &old, &sum);
    if (had <= 0) return had < 0 ? had : not_found("reservation", segment);
    int rc = cat_delete_row(c, CAT_RESERVATION_DEL, segment);
    if (rc < 0) return rc;
    count_removed(c, CAT_RESERVATION, sum);
    c->now.reserved_bytes -= old.bytes;
    return 0;
}

/* What isn't there to be removed is told, but leaves the change as it was. */
static int note_removal(imp_cat *c, int rc) { return rc == IMP_E_NOTFOUND ? rc : cat_note(c, rc); }

int imp_cat_put_space(imp_cat *c, const imp_cat_space *space)
{
    int rc = cat_must_be_in_change(c);
    return rc < 0 ? rc : cat_note(c, put_space(c, space));
}

int imp_cat_remove_space(imp_cat *c, imp_hash128 id)
{
    int rc = cat_must_be_in_change(c);
    return rc < 0 ? rc : note_removal(c, remove_space(c, id));
}

int imp_cat_put_segment(imp_cat *c, const imp_cat_segment *segment)
{
    int rc = cat_must_be_in_change(c);
    return rc < 0 ? rc : cat_note(c, put_segment(c, segment));
}

int imp_cat_remove_segment(imp_cat *c, uint64_t id)
{
    int rc = cat_must_be_in_change(c);
    return rc < 0 ? rc : note_removal(c, remove_segment(c, id));
}

int imp_cat_put_node(imp_cat *c, const imp_cat_node *node)
{
    int rc = cat_must_be_in_change(c);
    return rc < 0 ? rc : cat_note(c, put_node(c, node));
}

int imp_cat_remove_node(imp_cat *c, uint64_t id)
{
    int rc = cat_must_be_in_change(c);
    return rc < 0 ? rc : note_removal(c, remove_node(c, id));
}

int imp_cat_new_node_id(imp_cat *c, uint64_t *id)
{
    int rc = cat_must_be_in_change(c);
    if (rc < 0) return rc;
    *id = c->now.next_node++;
    return 0;
}

uint64_t imp_cat_next_node(const imp_cat *c) { return c->now.next_node; }

int imp_cat_reserve(imp_cat *c, const imp_cat_reservation *r)
{
    int rc = cat_must_be_in_change(c);
    return rc < 0 ? rc : cat_note(c, reserve(c, r));
}

int imp_cat_unreserve(imp_cat *c, uint64_t segment)
{
    int rc = cat_must_be_in_change(c);
    return rc < 0 ? rc : note_removal(c, unreserve(c, segment));
}
