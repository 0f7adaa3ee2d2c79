/* cat_check.c: do all rows of the catalogue fit together? */
#include <stdio.h>

#include "base/status.h"
#include "store/cat_internal.h"

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

static int ignore_reservation(const imp_cat_reservation *r, void *user)
{
    (void)r, (void)user;
    return 0;
}

int imp_cat_check(imp_cat *c, void (*fn)(const char *what, void *user), void *user)
{
    checker k = {.fn = fn, .user = user};
    const imp_cat_reader nothing = {0};
    uint64_t n_bad_uses = 0, n_bad_files = 0, n_bad_histories = 0, n_bad_settings = 0;

    int rc = cat_db_integrity(c->db, fn, user);
    if (rc < 0) return rc;
    rc = cat_begin_read(c);
    if (rc < 0) return finding(&k, rc);
    rc = finding(&k, cat_scan_all(c, &nothing));
    if (rc == 0 && c->now.generation + 1 > c->now.log_first) {
        rc = finding(&k, cat_read_log(c, c->now.log_first - 1, &nothing));
    }
    if (rc == 0) rc = finding(&k, cat_scan_uses(c, NULL, NULL, &n_bad_uses));
    if (rc == 0) rc = finding(&k, cat_scan_files(c, &n_bad_files));
    if (rc == 0) rc = finding(&k, cat_scan_histories(c, &n_bad_histories));
    if (rc == 0) rc = finding(&k, cat_scan_settings(c, &n_bad_settings));
    for (size_t i = 0; rc == 0 && i < sizeof relations / sizeof relations[0]; i++) {
        k.relation = relations[i].what;
        rc = finding(&k, cat_db_query(c->db, relations[i].sql, take_relation, &k));
    }
    cat_end_read(c);
    if (rc == 0) rc = finding(&k, imp_cat_reservations(c, ignore_reservation, NULL));
    if (rc == 0) {
        count_finding(&k, n_bad_uses, "statistics of uses");
        count_finding(&k, n_bad_files, "fingerprints");
        count_finding(&k, n_bad_histories, "histories");
        count_finding(&k, n_bad_settings, "settings");
    }
    return rc;
}
