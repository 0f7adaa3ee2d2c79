/* recover.c: what killed processes left behind. */
#include <string.h>
#include <time.h>

#include "base/alloc.h"
#include "base/log.h"
#include "base/status.h"
#include "store/store_internal.h"

typedef struct found {
    char name[256];
    uint64_t segment; /* 0: another name */
    uint64_t n_bytes;
    bool whole; /* .seg, not .seg.tmp */
} found;

typedef struct listing {
    found *files;
    size_t n, cap;
    bool foreign; /* files of other names too, with segment 0 */
} listing;

static bool parse(const char *name, uint64_t *segment, bool *whole)
{
    char base[64];
    size_t n = strlen(name);
    *whole = imp_seg_name_parse(name, segment);
    if (*whole) return true;
    *segment = 0;
    if (n >= sizeof base || n < 4 || strcmp(name + n - 4, ".tmp") != 0) return false;
    memcpy(base, name, n - 4);
    base[n - 4] = '\0';
    return imp_seg_name_parse(base, segment);
}

static int on_file(const char *name, uint64_t disk_bytes, void *user)
{
    listing *l = user;
    found f = {.n_bytes = disk_bytes};
    /* A file that isn't of a store's making stays, until verify has named it. */
    if (!parse(name, &f.segment, &f.whole) && !l->foreign) return 0;
    strncpy(f.name, name, sizeof f.name - 1);
    if (l->n == l->cap) {
        size_t cap = l->cap ? l->cap * 2 : 64;
        found *files = imp_realloc_array(l->files, cap, sizeof *files);
        if (!files) return imp_fail(IMP_E_NOMEM, "no memory to list the segments");
        l->files = files;
        l->cap = cap;
    }
    l->files[l->n++] = f;
    return 0;
}

typedef struct reservations {
    imp_cat_reservation *r;
    size_t n, cap;
    size_t n_live; /* the first ones are of running processes */
} reservations;

static int on_reservation(const imp_cat_reservation *r, void *user)
{
    reservations *all = user;
    if (all->n == all->cap) {
        size_t cap = all->cap ? all->cap * 2 : 16;
        imp_cat_reservation *p = imp_realloc_array(all->r, cap, sizeof *p);
        if (!p) return imp_fail(IMP_E_NOMEM, "no memory to list the reservations");
        all->r = p;
        all->cap = cap;
    }
    all->r[all->n++] = *r;
    return 0;
}

static bool reserved(const reservations *all, uint64_t segment)
{
    for (size_t i = 0; i < all->n_live; i++) {
        if (all->r[i].segment == segment) return true;
    }
    return false;
}

/* Who is alive, which the disk is asked. */
static void tell_live(const imp_store *s, uint64_t own, reservations *all)
{
    all->n_live = 0;
    for (size_t i = 0; i < all->n; i++) {
        imp_cat_reservation r = all->r[i];
        if (!imp_dir_live(s, own, r.instance)) continue;
        all->r[i] = all->r[all->n_live];
        all->r[all->n_live++] = r;
    }
}

/* Keep in `l` only the files that are leftovers. S2: the reservations are read before the rows, so that a file on its
 * way from the one to the other is seen in one of them; and in between it is looked who is alive, with no mutex held,
 * since the disk is asked: whoever is dead by then has added no row since. */
static int sift(imp_store *s, listing *l, reservations *all)
{
    size_t n = 0;
    imp_catalogue_take(s);
    int rc = s->cat ? imp_cat_reservations(s->cat, on_reservation, all)
                    : imp_fail(IMP_E_BUSY, "%s: the catalogue can't be had now", s->dir);
    uint64_t own = s->instance;
    imp_catalogue_give(s);
    if (rc < 0) return rc;
    tell_live(s, own, all);
    imp_catalogue_take(s);
    imp_enter(s);
    rc = imp_catalogue_refresh(s);
    for (size_t i = 0; rc == 0 && i < l->n; i++) {
        const found *f = &l->files[i];
        if ((f->whole && imp_forest_seg(&s->forest, f->segment)) || reserved(all, f->segment)) continue;
        l->files[n++] = *f;
    }
    l->n = n;
    imp_leave(s);
    imp_catalogue_give(s);
    return rc;
}

static int unreserve_dead(imp_store *s, const reservations *all)
{
    if (all->n_live == all->n) return 0;
    int rc = imp_change_begin(s);
    if (rc < 0) return rc;
    for (size_t i = all->n_live; rc == 0 && i < all->n; i++) {
        rc = imp_cat_unreserve(s->cat, all->r[i].segment);
        if (rc == IMP_E_NOTFOUND) rc = 0; /* another process was faster */
    }
    return imp_change_end(s, rc);
}

/* Inside a change, so that no process is just writing one. What can't be done now waits for the next time. */
static void sweep_bases(imp_store *s, bool young_too, imp_leftovers *out)
{
    if (imp_change_begin(s) < 0) return;
    imp_leave(s);
    imp_bases_sweep(s, young_too, &out->n_files, &out->n_bytes);
    imp_enter(s);
    (void)imp_change_end(s, 0);
}

int imp_recover(imp_store *s, bool keep_orphans, imp_leftovers *out)
{
    listing l = {0};
    reservations all = {0};
    *out = (imp_leftovers){0};
    int rc = imp_io_list(s->io, "segments", on_file, &l);
    if (rc == 0) rc = sift(s, &l, &all);
    if (rc == IMP_E_CORRUPT) {
        /* A damaged reservation: nothing else reads them, so nobody else notices. */
        imp_catalogue_take(s);
        imp_enter(s);
        imp_catalogue_failed(s, rc);
        imp_leave(s);
        imp_catalogue_give(s);
    }
    for (size_t i = 0; rc == 0 && i < l.n; i++) {
        char name[272] = "segments/";
        out->n_orphans += l.files[i].whole;
        if (l.files[i].whole && keep_orphans) continue;
        strncat(name, l.files[i].name, sizeof name - 10);
        if (imp_io_unlink(s->io, name) < 0) continue; /* next time */
        out->n_files++;
        out->n_bytes += l.files[i].n_bytes;
    }
    if (rc == 0) rc = unreserve_dead(s, &all);
    /* Nobody else can be about to store the first segment of a space; but an orphan may be one. */
    if (rc == 0) sweep_bases(s, s->alone && out->n_orphans == 0, out);
    if (rc == 0) out->n_files += imp_dir_live_sweep(s);
    imp_free(all.r);
    imp_free(l.files);
    return rc;
}

static const long settle_ns = 50000000;

static int find_strays(imp_store *s, listing *l)
{
    reservations all = {0};
    int rc = imp_io_list(s->io, "segments", on_file, l);
    if (rc == 0) rc = sift(s, l, &all);
    /* Without a sound catalogue nothing can be said; verify has said that. */
    if (rc == IMP_E_BUSY || rc == IMP_E_CORRUPT) {
        rc = 0;
        l->n = 0;
    }
    imp_free(all.r);
    return rc;
}

static bool listed(const listing *l, const char *name)
{
    for (size_t i = 0; i < l->n; i++) {
        if (strcmp(l->files[i].name, name) == 0) return true;
    }
    return false;
}

int imp_strays(imp_store *s, bool remove, void (*fn)(const imp_finding *finding, void *user), void *user,
               int64_t *n_found)
{
    listing l = {.foreign = true}, again = {.foreign = true};
    int rc = find_strays(s, &l);
    if (rc == 0 && l.n > 0) {
        /* Between a change and its unlinks a file has no row: look again once that must be over. */
        nanosleep(&(struct timespec){0, settle_ns}, NULL);
        rc = find_strays(s, &again);
    }
    for (size_t i = 0; rc == 0 && i < l.n; i++) {
        if (!listed(&again, l.files[i].name)) continue;
        char name[272] = "segments/";
        strncat(name, l.files[i].name, sizeof name - 10);
        bool left = l.files[i].segment != 0;
        imp_finding f = {.file = name, .segment = l.files[i].segment, .leftover = left};
        f.what = !left ? "nothing refers to this file" : "left by a killed process; goes when the store is opened";
        if (left && l.files[i].whole) f.what = "left by a killed process; taken in or removed when the store is opened";
        *n_found += !left;
        if (fn) fn(&f, user);
        if (remove && imp_io_unlink(s->io, name) < 0) imp_log(IMP_LOG_WARN, "%s", imp_last_error());
    }
    imp_free(again.files);
    imp_free(l.files);
    return rc;
}
