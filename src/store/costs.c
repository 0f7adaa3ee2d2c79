/* costs.c: what reads cost on the store's disk, kept in the catalogue; and a file to measure it by. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "base/alloc.h"
#include "base/status.h"
#include "store/store_internal.h"

/* The file system's id, which stays the same when the machine starts again; where it has none, the device's number. */
static int device_of(const imp_store *s, uint64_t *out)
{
    struct statvfs v;
    struct stat st;
    if (s->opts.flags & IMP_STORE_MEMORY) return imp_fail(IMP_E_UNSUPPORTED, "a store in memory has no reads to time");
    if (fstatvfs(s->dir_fd, &v) != 0 || fstat(s->dir_fd, &st) != 0) {
        return imp_fail_errno(errno, "can't tell what device %s is on", s->dir);
    }
    *out = v.f_fsid ? (uint64_t)v.f_fsid : (uint64_t)st.st_dev;
    return 0;
}

typedef struct costs_errand {
    imp_errand e;
    bool wait; /* also for this process's own change */
    imp_read_costs costs;
} costs_errand;

static int run_get(imp_store *s, imp_errand *e)
{
    costs_errand *c = (costs_errand *)(void *)e;
    imp_cat_costs row = {0};
    uint64_t device;
    int rc = device_of(s, &device);
    if (rc < 0) return rc;
    if (c->wait) pthread_mutex_lock(&s->cat_lock);
    else if (!imp_catalogue_look(s)) return imp_fail(IMP_E_BUSY, "%s: the catalogue is being changed", s->dir);
    rc = s->cat ? imp_cat_costs_get(s->cat, device, &row) : imp_fail(IMP_E_NOTFOUND, "%s: no catalogue", s->dir);
    pthread_mutex_unlock(&s->cat_lock);
    if (rc == 0) c->costs = (imp_read_costs){row.read_ns, row.byte_ns, row.measured_s, device};
    return rc;
}

int imp_store_costs_get(imp_store *s, bool wait, imp_read_costs *out)
{
    *out = (imp_read_costs){0};
    if (imp_store_hung(s)) return imp_fail(IMP_E_IO, "%s: the disk doesn't answer", s->dir);
    costs_errand *c = imp_calloc(1, sizeof *c);
    if (!c) return imp_fail(IMP_E_NOMEM, "no memory to look what reads cost");
    c->e = (imp_errand){.run = run_get, .what = "looking what reads cost"};
    c->wait = wait;
    if (!imp_errand_do(s, &c->e)) return imp_fail(IMP_E_IO, "%s: the disk doesn't answer", s->dir);
    int rc = c->e.status;
    if (rc == 0) *out = c->costs;
    imp_free(c);
    return rc;
}

int imp_store_costs_put(imp_store *s, const imp_read_costs *costs)
{
    imp_cat_costs row = {.read_ns = costs->read_ns, .byte_ns = costs->byte_ns, .measured_s = costs->measured_s};
    int rc = s->readonly ? imp_fail(IMP_E_PERM, "%s is open to read only", s->dir) : device_of(s, &row.device);
    if (rc < 0) return rc;
    imp_catalogue_take(s);
    rc = s->cat ? imp_cat_costs_put(s->cat, &row) : imp_fail(IMP_E_NOTFOUND, "%s: no catalogue", s->dir);
    imp_catalogue_give(s);
    return rc;
}

typedef struct largest {
    char name[64];
    uint64_t bytes;
} largest;

static int take_larger(const char *name, uint64_t disk_bytes, void *user)
{
    largest *l = user;
    size_t n = strlen(name);
    if (n < 4 || n >= sizeof l->name || strcmp(name + n - 4, ".seg") != 0 || disk_bytes <= l->bytes) return 0;
    memcpy(l->name, name, n + 1);
    l->bytes = disk_bytes;
    return 0;
}

int imp_store_largest(imp_store *s, uint64_t least_bytes, char **path)
{
    largest l = {.bytes = 0};
    uint64_t device;
    *path = NULL;
    int rc = device_of(s, &device);
    if (rc == 0) rc = imp_io_list(s->io, "segments", take_larger, &l);
    if (rc < 0) return rc;
    if (!l.name[0] || l.bytes < least_bytes)
        return imp_fail(IMP_E_NOTFOUND, "%s: too little is stored to time reads of it", s->dir);
    size_t n = strlen(s->dir) + strlen(l.name) + sizeof "/segments/";
    *path = imp_malloc(n);
    if (!*path) return imp_fail(IMP_E_NOMEM, "no memory to time reads");
    snprintf(*path, n, "%s/segments/%s", s->dir, l.name);
    return 0;
}
