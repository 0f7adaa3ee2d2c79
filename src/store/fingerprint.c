/* fingerprint.c: the hash of a file's bytes, computed once for as long as the file stays as it is. */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "store/store_internal.h"

enum { PIECE_BYTES = 4 << 20, SETTLED_S = 2 };

static int64_t ns(struct timespec t) { return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec; }

static int identify(int fd, const char *path, imp_cat_file *out)
{
    struct stat st;
    if (fstat(fd, &st) != 0) return imp_fail_errno(errno, "can't read %s", path);
    if (!S_ISREG(st.st_mode)) return imp_fail(IMP_E_IO, "%s is not a regular file", path);
    *out = (imp_cat_file){
        .device = (uint64_t)st.st_dev,
        .inode = (uint64_t)st.st_ino,
        .size = (uint64_t)st.st_size,
        .mtime_ns = ns(st.st_mtim),
        .ctime_ns = ns(st.st_ctim),
    };
    return 0;
}

static bool same(const imp_cat_file *a, const imp_cat_file *b)
{
    return a->device == b->device && a->inode == b->inode && a->size == b->size && a->mtime_ns == b->mtime_ns &&
           a->ctime_ns == b->ctime_ns;
}

static int hash_bytes(int fd, const char *path, imp_hash128 *out)
{
    imp_hasher *h = imp_hasher_new();
    void *buf = imp_malloc(PIECE_BYTES);
    int rc = h && buf ? 0 : imp_fail(IMP_E_NOMEM, "no memory to read %s", path);
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    while (rc == 0) {
        ssize_t n = read(fd, buf, PIECE_BYTES);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            imp_fail_errno(errno, "can't read %s", path);
            rc = IMP_E_IO;
        }
        if (n <= 0) break;
        imp_hasher_update(h, buf, (size_t)n);
    }
    if (rc == 0) *out = imp_hasher_digest(h);
    imp_free(buf);
    imp_hasher_free(h);
    return rc;
}

static int fingerprint(imp_store *s, const char *path, imp_hash128 *out)
{
    imp_cat_file before, after;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY), rc;
    if (fd < 0) return imp_fail_errno(errno, "can't read %s", path);
    rc = identify(fd, path, &before);
    if (rc < 0) goto out;

    imp_catalogue_take(s);
    rc = s->cat ? imp_cat_fingerprint(s->cat, &before, out) : IMP_E_NOTFOUND;
    imp_catalogue_give(s);
    if (rc == 0) goto out;

    rc = hash_bytes(fd, path, out);
    if (rc == 0) rc = identify(fd, path, &after);
    if (rc < 0) goto out;
    if (!same(&before, &after)) {
        rc = imp_fail(IMP_E_IO, "%s was changed while it was read", path);
        goto out;
    }
    /* A file changed just now may be changed again within what its time stamps can tell apart. */
    int64_t settled_ns = (imp_wall_s() - SETTLED_S) * 1000000000;
    if (s->readonly || before.mtime_ns > settled_ns || before.ctime_ns > settled_ns) goto out;
    imp_catalogue_take(s);
    if (s->cat && imp_cat_put_fingerprint(s->cat, &before, *out) < 0) {
        imp_log(IMP_LOG_INFO, "%s: %s", s->dir, imp_last_error()); /* the next one reads the file again */
    }
    imp_catalogue_give(s);
out:
    close(fd);
    return rc;
}

int imp_store_fingerprint(imp_store *s, const char *path, imp_hash128 *out)
{
    if (out) *out = (imp_hash128){0};
    if (!s || !path || !out) return imp_fail(IMP_E_ARG, "imp_store_fingerprint: store, path or result missing");
    imp_kept_line kept;
    imp_error_keep(&kept);
    return imp_error_back(&kept, fingerprint(s, path, out));
}
