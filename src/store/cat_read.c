/* cat_read.c: what the catalogue holds, told to a reader: everything, or by the log what is newer than a generation. */
#include <stdlib.h>

#include "base/alloc.h"
#include "base/status.h"
#include "store/cat_internal.h"

/* ---- everything */

typedef struct node_place {
    uint64_t depth, id;
} node_place;

static int by_depth(const void *a, const void *b)
{
    const node_place *x = a, *y = b;
    if (x->depth != y->depth) return x->depth < y->depth ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* The nodes' ids by rising depth; their rows aren't checked yet. `*out`: [c->now.n[CAT_NODE]] */
static int list_nodes(imp_cat *c, node_place **out)
{
    sqlite3_stmt *s = NULL;
    uint64_t n = 0, n_all = c->now.n[CAT_NODE];
    bool sorted = true;
    node_place *list = imp_realloc_array(NULL, (size_t)n_all, sizeof *list);
    int rc = list ? cat_db_stmt(c->db, CAT_NODE_DEPTHS, &s) : cat_no_memory();
    if (rc < 0) goto out;
    while ((rc = cat_db_step(c->db, s)) > 0) {
        if (n == n_all) break;
        list[n] = (node_place){.depth = cat_column(s, 1), .id = cat_column(s, 0)};
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
    static const char *const names[CAT_N_COUNTED] = {"spaces", "segments", "nodes", "reservations"};
    if (n == c->now.n[table] && sum == c->now.sum[table]) return 0;
    return imp_fail(IMP_E_CORRUPT, "catalogue: its %s are not those its meta row vouches for", names[table]);
}

static int scan_spaces(imp_cat *c, const imp_cat_reader *reader)
{
    sqlite3_stmt *s = NULL;
    uint64_t n = 0, sums = 0, sum;
    int rc = cat_db_stmt(c->db, CAT_SPACE_ALL, &s);
    while (rc == 0 && (rc = cat_db_step(c->db, s)) > 0) {
        imp_cat_space row;
        rc = cat_parse_space(s, &row, &sum);
        n++;
        sums += sum;
        if (rc == 0 && reader->space) rc = reader->space(&row, reader->user);
    }
    cat_db_done(s);
    return rc != 0 ? rc : check_scan(c, CAT_SPACE, n, sums);
}

static int scan_segments(imp_cat *c, const imp_cat_reader *reader)
{
    sqlite3_stmt *s = NULL;
    uint64_t n = 0, sums = 0, bytes = 0, sum;
    int rc = cat_db_stmt(c->db, CAT_SEGMENT_ALL, &s);
    while (rc == 0 && (rc = cat_db_step(c->db, s)) > 0) {
        imp_cat_segment row;
        rc = cat_parse_segment(s, &row, &sum);
        n++;
        sums += sum;
        bytes += row.disk_bytes;
        if (rc == 0 && reader->segment) rc = reader->segment(&row, reader->user);
    }
    cat_db_done(s);
    if (rc == 0) rc = check_scan(c, CAT_SEGMENT, n, sums);
    if (rc == 0 && bytes != c->now.segment_bytes) {
        rc = imp_fail(IMP_E_CORRUPT, "catalogue: its segments have other lengths than its meta row says");
    }
    return rc;
}

static int scan_nodes(imp_cat *c, const imp_cat_reader *reader)
{
    node_place *list = NULL;
    uint64_t sums = 0, n = c->now.n[CAT_NODE];
    int rc = list_nodes(c, &list);
    for (uint64_t i = 0; rc == 0 && i < n; i++) {
        imp_cat_node row;
        uint64_t sum = 0;
        rc = cat_find_node(c, list[i].id, &row, &sum);
        /* A damaged page can show one row to the scan that listed it and another to the search. */
        bool another = rc > 0 && (row.id != list[i].id || row.depth != list[i].depth);
        if (rc == 0 || another) rc = cat_corrupt("node", list[i].id);
        if (rc < 0) break;
        sums += sum;
        rc = reader->node ? reader->node(&row, reader->user) : 0;
    }
    imp_free(list);
    return rc != 0 ? rc : check_scan(c, CAT_NODE, n, sums);
}

int cat_scan_all(imp_cat *c, const imp_cat_reader *reader)
{
    int rc = reader->reset ? reader->reset(reader->user) : 0;
    if (rc == 0) rc = scan_spaces(c, reader);
    if (rc == 0) rc = scan_segments(c, reader);
    if (rc == 0) rc = scan_nodes(c, reader);
    return rc;
}

/* ---- what is newer */

typedef struct log_entry {
    uint64_t generation, kind, removed;
    cat_log_key key;
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
    int rc = list ? cat_db_stmt(c->db, CAT_LOG_SINCE, &s) : cat_no_memory();
    if (rc < 0) goto out;
    sqlite3_bind_int64(s, 1, (sqlite3_int64)since);
    while ((rc = cat_db_step(c->db, s)) > 0) {
        log_entry e = {.generation = cat_column(s, 0), .kind = cat_column(s, 1), .removed = cat_column(s, 2)};
        imp_hash128 key = cat_column_hash(s, 3);
        e.key = (cat_log_key){key.lo, key.hi};
        if (n == n_all || e.generation != since + 1 + n || e.kind > CAT_NODE || e.removed > CAT_REMOVED ||
            cat_column(s, 4) != cat_log_sum(e.generation, e.kind, e.removed, e.key)) {
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
    if (e->kind == CAT_SPACE) {
        rc = cat_find_space(c, (imp_hash128){.lo = e->key.lo, .hi = e->key.hi}, &s, &row.space, &sum);
    } else if (e->kind == CAT_SEGMENT) {
        rc = cat_find_segment(c, e->key.lo, &row.segment, &sum);
    } else {
        rc = cat_find_node(c, e->key.lo, &row.node, &sum);
    }
    if (rc < 0) goto out;
    if ((rc > 0) == (e->removed == CAT_REMOVED)) {
        rc = imp_fail(IMP_E_CORRUPT, "catalogue: its log and its rows contradict each other");
        goto out;
    }
    rc = 0;
    if (e->kind == CAT_SPACE && e->removed) {
        imp_hash128 id = {.lo = e->key.lo, .hi = e->key.hi};
        if (reader->space_removed) rc = reader->space_removed(id, reader->user);
    } else if (e->kind == CAT_SPACE) {
        if (reader->space) rc = reader->space(&row.space, reader->user);
    } else if (e->kind == CAT_SEGMENT && e->removed) {
        if (reader->segment_removed) rc = reader->segment_removed(e->key.lo, reader->user);
    } else if (e->kind == CAT_SEGMENT) {
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

int cat_read_log(imp_cat *c, uint64_t since, const imp_cat_reader *reader)
{
    log_entry *list = NULL;
    node_place *nodes = NULL;
    size_t n = 0, n_nodes = 0;
    int rc = list_log(c, since, &list, &n);
    if (rc < 0) goto out;
    nodes = imp_realloc_array(NULL, n, sizeof *nodes);
    if (!nodes) {
        rc = cat_no_memory();
        goto out;
    }
    /* Removals, nodes before segments before spaces. */
    for (size_t i = n; rc == 0 && i-- > 0;) {
        if (list[i].removed) rc = tell_entry(c, &list[i], reader);
    }
    for (size_t i = 0; rc == 0 && i < n; i++) {
        if (list[i].removed) continue;
        if (list[i].kind != CAT_NODE) {
            rc = tell_entry(c, &list[i], reader);
            continue;
        }
        imp_cat_node row;
        uint64_t sum;
        rc = cat_find_node(c, list[i].key.lo, &row, &sum);
        if (rc == 0) rc = imp_fail(IMP_E_CORRUPT, "catalogue: its log and its rows contradict each other");
        if (rc < 0) break;
        nodes[n_nodes++] = (node_place){.depth = row.depth, .id = row.id};
        rc = 0;
    }
    if (rc != 0) goto out;
    qsort(nodes, n_nodes, sizeof *nodes, by_depth);
    for (size_t i = 0; rc == 0 && i < n_nodes; i++) {
        log_entry e = {.kind = CAT_NODE, .removed = CAT_PUT, .key = {nodes[i].id, 0}};
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
    int rc = cat_begin_read(c);
    if (rc < 0) return rc;
    rc = cat_db_data_version(c->db, &version);
    if (rc < 0) goto out;
    if (since != 0 && since <= c->now.generation && since + 1 >= c->now.log_first) {
        rc = cat_read_log(c, since, reader);
    } else if (since != 0 && !reader->reset) {
        rc = imp_fail(IMP_E_STALE, "catalogue: changes since %llu are not known any more", (unsigned long long)since);
    } else {
        rc = cat_scan_all(c, reader);
    }
    if (rc != 0) goto out;
    c->seen = c->now.generation;
    c->unseen = false;
    c->data_version = version;
    *generation = c->now.generation;
out:
    cat_end_read(c);
    return rc;
}

int imp_cat_reservations(imp_cat *c, int (*fn)(const imp_cat_reservation *r, void *user), void *user)
{
    imp_cat_reservation *list = NULL;
    sqlite3_stmt *s = NULL;
    uint64_t n = 0, sums = 0, bytes = 0, sum = 0, n_all;
    int rc = cat_begin_read(c);
    if (rc < 0) return rc;
    n_all = c->now.n[CAT_RESERVATION];
    list = imp_realloc_array(NULL, (size_t)n_all, sizeof *list);
    rc = list ? cat_db_stmt(c->db, CAT_RESERVATION_ALL, &s) : cat_no_memory();
    while (rc == 0 && (rc = cat_db_step(c->db, s)) > 0) {
        imp_cat_reservation row;
        rc = cat_parse_reservation(s, &row, &sum);
        if (rc < 0) break;
        if (n < n_all) list[n] = row;
        n++;
        sums += sum;
        bytes += row.bytes;
    }
    if (rc == 0) rc = check_scan(c, CAT_RESERVATION, n, sums);
    if (rc == 0 && bytes != c->now.reserved_bytes) {
        rc = imp_fail(IMP_E_CORRUPT, "catalogue: its reservations have other lengths than its meta row says");
    }
    cat_db_done(s);
    cat_end_read(c);
    /* All read before the first is told: `fn` may drop it. */
    for (uint64_t i = 0; rc == 0 && i < n; i++) rc = fn(&list[i], user);
    imp_free(list);
    return rc;
}
