/* dir.c: the directory of a store, and the locks in it.
 *
 *     <dir>/catalogue.db        SQLite (with -wal and -shm beside it)
 *     <dir>/segments/<id>.seg   immutable; <id>.seg.tmp while it is written
 *     <dir>/bases/              of the segments' sketches, likewise
 *     <dir>/live/<instance>     one for each open store, held by flock: a file that can be locked is of a dead process
 *     <dir>/lock                shared while the catalogue is open, alone to rebuild it
 *     <dir>/encrypted           only in encrypted stores: the name of the key, for people and to refuse others
 *     <dir>/ballast             to be removed when the disk is full (fault.c)
 *
 * A store in memory has none of it: its name is "memory", there is nobody to lock out, and what is asked for through
 * the descriptors, which are all -1, isn't there.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/log.h"
#include "base/status.h"
#include "store/filesystem.h"
#include "store/store_internal.h"

static const char *const catalogue_files[] = {"catalogue.db", "catalogue.db-wal", "catalogue.db-shm"};

enum { LOG_FILE = 1, N_CATALOGUE_FILES = sizeof catalogue_files / sizeof catalogue_files[0] };

/* ---- finding and making it */

static bool exists(int at, const char *name)
{
    struct stat st;
    return fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) == 0;
}

static bool is_store(const imp_store *s) { return exists(s->dir_fd, "segments") || exists(s->dir_fd, "catalogue.db"); }

static int is_empty(const imp_store *s, bool *empty)
{
    int fd = openat(s->dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (!d) {
        int err = errno;
        if (fd >= 0) close(fd);
        return imp_fail_errno(err, "can't list %s", s->dir);
    }
    *empty = true;
    for (struct dirent *e; *empty && (e = readdir(d)) != NULL;) {
        *empty = strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0 || strcmp(e->d_name, "lost+found") == 0;
    }
    closedir(d);
    return 0;
}

/* A folder of ours: made if it isn't there, and never a link to somewhere else. */
static int have_folder(const imp_store *s, const char *name)
{
    struct stat st;
    if (mkdirat(s->dir_fd, name, 0700) == 0) {
        int rc = fchmodat(s->dir_fd, name, 0700, 0);
        return rc == 0 ? 0 : imp_fail_errno(errno, "can't set the mode of %s/%s", s->dir, name);
    }
    if (errno != EEXIST) return imp_fail_errno(errno, "can't make %s/%s", s->dir, name);
    if (fstatat(s->dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
        return imp_fail_errno(errno, "can't use %s/%s", s->dir, name);
    }
    if (!S_ISDIR(st.st_mode)) return imp_fail(IMP_E_IO, "%s/%s is not a directory of its own", s->dir, name);
    return 0;
}

static int resolve(imp_store *s, const char *dir, imp_dir_made *made)
{
    struct stat st;
    if (stat(dir, &st) != 0) {
        if (errno != ENOENT || (s->opts.flags & (IMP_STORE_MUST_EXIST | IMP_STORE_READONLY))) {
            int err = errno;
            (void)imp_fail_errno(err, "can't open store %s", dir);
            return err == ENOENT ? IMP_E_NOTFOUND : err == EACCES ? IMP_E_PERM : IMP_E_IO;
        }
        if (mkdir(dir, 0700) != 0 && errno != EEXIST) {
            int err = errno, rc = imp_fail_errno(err, "can't make store %s", dir);
            return rc == IMP_E_NOTFOUND ? IMP_E_IO : rc;
        }
        *made = IMP_DIR_NEW;
        if (chmod(dir, 0700) != 0) return imp_fail_errno(errno, "can't set the mode of %s", dir);
    } else if (!S_ISDIR(st.st_mode)) {
        return imp_fail(IMP_E_IO, "%s is not a directory", dir);
    }
    char *path = realpath(dir, NULL);
    if (!path) return imp_fail_errno(errno, "can't resolve %s", dir);
    s->dir = imp_strdup(path);
    free(path);
    if (!s->dir) return imp_fail(IMP_E_NOMEM, "no memory to open store %s", dir);
    s->dir_fd = open(s->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return s->dir_fd < 0 ? imp_fail_errno(errno, "can't open store %s", s->dir) : 0;
}

int imp_dir_folders(const imp_store *s)
{
    int rc = have_folder(s, "segments"); /* first: it marks the directory as a store */
    if (rc == 0) rc = have_folder(s, "bases");
    if (rc == 0) rc = have_folder(s, "live");
    return rc;
}

int imp_dir_open(imp_store *s, const char *dir, imp_dir_made *made)
{
    struct stat st;
    *made = IMP_DIR_STORE;
    if (s->opts.flags & IMP_STORE_MEMORY) {
        s->dir = imp_strdup("memory");
        return s->dir ? 0 : imp_fail(IMP_E_NOMEM, "no memory to open a store");
    }
    int rc = resolve(s, dir, made);
    if (rc < 0 && *made == IMP_DIR_NEW && s->dir_fd < 0) (void)rmdir(dir); /* imp_dir_unmake() couldn't */
    if (rc == 0) rc = imp_fs_check(s->dir_fd, s->dir);
    if (rc < 0) return rc;

    if (!is_store(s)) {
        bool empty = false;
        if (s->opts.flags & (IMP_STORE_MUST_EXIST | IMP_STORE_READONLY)) {
            return imp_fail(IMP_E_NOTFOUND, "%s holds no store", s->dir);
        }
        rc = is_empty(s, &empty);
        if (rc < 0) return rc;
        /* Else a typing mistake would scatter a store over somebody's files and close them to everybody else. Another
         * process may be making the store just now: its first file is the mark. */
        if (!empty && !is_store(s)) return imp_fail(IMP_E_ARG, "%s holds other files and no store", s->dir);
        if (empty && *made == IMP_DIR_STORE) *made = IMP_DIR_EMPTY;
    }
    if (s->readonly) {
        s->lock_fd = openat(s->dir_fd, "lock", O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
        if (s->lock_fd < 0 && errno != ENOENT) return imp_fail_errno(errno, "can't open %s/lock", s->dir);
        return s->lock_fd < 0 || (fstat(s->lock_fd, &st) == 0 && S_ISREG(st.st_mode))
                   ? 0
                   : imp_fail(IMP_E_IO, "%s/lock is not a file", s->dir);
    }
    if (fstat(s->dir_fd, &st) == 0 && (st.st_mode & 0777) != 0700 && st.st_uid == geteuid()) {
        if (fchmod(s->dir_fd, 0700) != 0) return imp_fail_errno(errno, "can't set the mode of %s", s->dir);
    }
    rc = imp_dir_folders(s);
    if (rc < 0) return rc;
    s->lock_fd = openat(s->dir_fd, "lock", O_RDWR | O_CREAT | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (s->lock_fd < 0) return imp_fail_errno(errno, "can't open %s/lock", s->dir);
    if (fstat(s->lock_fd, &st) == 0 && !S_ISREG(st.st_mode)) return imp_fail(IMP_E_IO, "%s/lock is not a file", s->dir);
    if (fstat(s->lock_fd, &st) != 0 || ((st.st_mode & 0777) != 0600 && fchmod(s->lock_fd, 0600) != 0)) {
        return imp_fail_errno(errno, "can't set the mode of %s/lock", s->dir);
    }
    return 0;
}

/* ---- encrypted or not */

enum { MARK_BYTES = 45 };

static void mark_text(uint64_t key_id, char out[MARK_BYTES + 1])
{
    snprintf(out, MARK_BYTES + 1, "impress store 1, AES-256-GCM\n%016llx", (unsigned long long)key_id);
}

/* *found: there is a mark. IMP_E_PERM: of another key. */
static int read_mark(const imp_store *s, bool *found)
{
    char text[MARK_BYTES + 8] = {0}, want[MARK_BYTES + 1];
    int fd = openat(s->dir_fd, "encrypted", O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
    *found = fd >= 0 || errno != ENOENT;
    if (!*found) return 0;
    if (fd < 0) return imp_fail_errno(errno, "can't read %s/encrypted", s->dir);
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n < 0) return imp_fail_errno(errno, "can't read %s/encrypted", s->dir);
    if (!s->key) return imp_fail(IMP_E_PERM, "store %s is encrypted: it takes its key file", s->dir);
    mark_text(imp_key_id(s->key), want);
    if (strcmp(text, want) != 0) return imp_fail(IMP_E_PERM, "store %s is encrypted with another key", s->dir);
    return 0;
}

static int write_mark(const imp_store *s)
{
    char text[MARK_BYTES + 1], tmp[48];
    mark_text(imp_key_id(s->key), text);
    snprintf(tmp, sizeof tmp, "encrypted.%ld.tmp", (long)s->pid);
    (void)unlinkat(s->dir_fd, tmp, 0);
    int fd = openat(s->dir_fd, tmp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) return imp_fail_errno(errno, "can't make %s/encrypted", s->dir);
    int rc = 0;
    size_t n = strlen(text);
    if (fchmod(fd, 0600) != 0 || write(fd, text, n) != (ssize_t)n || fsync(fd) != 0 ||
        (linkat(s->dir_fd, tmp, s->dir_fd, "encrypted", 0) != 0 && errno != EEXIST) || fsync(s->dir_fd) != 0) {
        rc = imp_fail_errno(errno, "can't make %s/encrypted", s->dir);
    }
    (void)unlinkat(s->dir_fd, tmp, 0);
    close(fd);
    return rc;
}

static int first_segment(const char *name, uint64_t disk_bytes, void *user)
{
    (void)disk_bytes;
    return imp_seg_name_parse(name, user) ? 1 : 0;
}

int imp_dir_check_key(imp_store *s)
{
    bool found;
    uint64_t id = 0;
    if (s->opts.flags & IMP_STORE_MEMORY) return 0;
    int rc = read_mark(s, &found);
    if (rc < 0 || found || !s->key) return rc;
    /* A key, and no mark: a new store, one that isn't encrypted, or one that lost its mark, whose segments know. */
    rc = imp_io_list(s->io, "segments", first_segment, &id);
    if (rc < 0 && rc != IMP_E_NOTFOUND) return rc;
    if (rc == 1) {
        imp_seg seg;
        uint64_t n_read = 0;
        rc = imp_seg_file_open(s, id, &seg, &n_read);
        if (rc == 0) imp_seg_file_close(&seg);
        if (rc < 0 && rc != IMP_E_NOMEM) rc = imp_fail(IMP_E_ARG, "store %s isn't encrypted with this key", s->dir);
    } else if (imp_dir_has_catalogue(s)) {
        rc = imp_fail(IMP_E_ARG, "store %s isn't encrypted: a key is for a new one", s->dir);
    }
    if (rc == IMP_E_NOTFOUND) rc = 0;
    if (rc < 0 || s->readonly) return rc;
    rc = write_mark(s);
    return rc < 0 ? rc : read_mark(s, &found); /* another process may have been faster, with another key */
}

static void live_name(uint64_t instance, char out[32])
{
    snprintf(out, 32, "live/%016llx", (unsigned long long)instance);
}

void imp_dir_close(imp_store *s)
{
    if (s->live_fd >= 0) {
        char name[32];
        live_name(s->instance, name);
        (void)unlinkat(s->dir_fd, name, 0);
        close(s->live_fd);
    }
    if (s->lock_fd >= 0) close(s->lock_fd);
    if (s->dir_fd >= 0) close(s->dir_fd);
    imp_free(s->dir);
    s->live_fd = s->lock_fd = s->dir_fd = -1;
    s->dir = NULL;
}

void imp_dir_unmake(imp_store *s, imp_dir_made made)
{
    if (s->dir_fd < 0 || made == IMP_DIR_STORE) return;
    /* Somebody else may have begun to use it meanwhile. */
    if (s->lock_fd >= 0 && flock(s->lock_fd, LOCK_EX | LOCK_NB) != 0) return;
    if (s->live_fd >= 0) {
        char name[32];
        live_name(s->instance, name);
        (void)unlinkat(s->dir_fd, name, 0);
    }
    if (unlinkat(s->dir_fd, "live", AT_REMOVEDIR) != 0 && errno != ENOENT) return;
    if (unlinkat(s->dir_fd, "bases", AT_REMOVEDIR) != 0 && errno != ENOENT) return;
    if (unlinkat(s->dir_fd, "segments", AT_REMOVEDIR) != 0 && errno != ENOENT) return;
    for (int i = 0; i < N_CATALOGUE_FILES; i++) (void)unlinkat(s->dir_fd, catalogue_files[i], 0);
    (void)unlinkat(s->dir_fd, "ballast", 0);
    (void)unlinkat(s->dir_fd, "encrypted", 0);
    (void)unlinkat(s->dir_fd, "lock", 0);
    if (made == IMP_DIR_NEW) (void)rmdir(s->dir);
}

/* ---- locks */

int imp_dir_lock(imp_store *s, int how, bool wait)
{
    if (s->lock_fd < 0) return 0;
    int op = how == IMP_LOCK_ALONE ? LOCK_EX : how == IMP_LOCK_SHARED ? LOCK_SH : LOCK_UN;
    int got;
    do got = flock(s->lock_fd, wait ? op : op | LOCK_NB);
    while (got != 0 && errno == EINTR);
    if (got == 0) return 0;
    if (errno == EWOULDBLOCK) return imp_fail(IMP_E_BUSY, "another process has store %s open", s->dir);
    return imp_fail_errno(errno, "can't lock %s/lock", s->dir);
}

bool imp_dir_has_catalogue(const imp_store *s) { return exists(s->dir_fd, "catalogue.db"); }

int imp_dir_live_make(imp_store *s)
{
    for (int tries = 0; tries < 100; tries++) {
        char name[32];
        struct stat st;
        do s->instance = imp_rng_u64(&s->rng);
        while (s->instance == 0);
        if (s->opts.flags & IMP_STORE_MEMORY) return 0;
        live_name(s->instance, name);
        int fd = openat(s->dir_fd, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd < 0 && errno == EEXIST) continue;
        if (fd < 0) return imp_fail_errno(errno, "can't make %s/%s", s->dir, name);
        if (fchmod(fd, 0600) != 0 || flock(fd, LOCK_EX) != 0 || fstat(fd, &st) != 0) {
            int rc = imp_fail_errno(errno, "can't lock %s/%s", s->dir, name);
            (void)unlinkat(s->dir_fd, name, 0);
            close(fd);
            return rc;
        }
        /* Another process may have taken it for a dead one's before it was locked. */
        if (st.st_nlink > 0) {
            s->live_fd = fd;
            return 0;
        }
        close(fd);
    }
    return imp_fail(IMP_E_BUSY, "can't keep a file in %s/live", s->dir);
}

/* The file of `name` in live/, locked, if nobody else holds it; else -1. */
static int take_dead(const imp_store *s, const char *name)
{
    int fd = openat(s->dir_fd, name, O_RDWR | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC); /* a FIFO must not hold us up */
    if (fd < 0) return -1;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
    close(fd);
    return -1;
}

bool imp_dir_live(const imp_store *s, uint64_t own, uint64_t instance)
{
    char name[32];
    if (instance == own) return true;
    live_name(instance, name);
    if (!exists(s->dir_fd, name)) return false;
    int fd = take_dead(s, name);
    if (fd >= 0) close(fd);
    return fd < 0 && exists(s->dir_fd, name);
}

size_t imp_dir_live_sweep(imp_store *s)
{
    size_t n = 0;
    int at = openat(s->dir_fd, "live", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *d = at < 0 ? NULL : fdopendir(at);
    if (!d) {
        if (at >= 0) close(at);
        return 0;
    }
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        char name[5 + NAME_MAX + 1];
        if (strspn(e->d_name, "0123456789abcdef") != 16 || e->d_name[16] != '\0') continue;
        snprintf(name, sizeof name, "live/%s", e->d_name);
        int fd = take_dead(s, name); /* our own is held through another descriptor, so it isn't taken */
        if (fd < 0) continue;
        if (unlinkat(s->dir_fd, name, 0) == 0) n++;
        close(fd);
    }
    closedir(d);
    return n;
}

/* ---- going on somewhere else */

static bool same_file(int fd, int at, const char *name)
{
    struct stat a, b;
    return fstat(fd, &a) == 0 && fstatat(at, name, &b, AT_SYMLINK_NOFOLLOW) == 0 && a.st_dev == b.st_dev &&
           a.st_ino == b.st_ino;
}

static bool in_place(const imp_store *s)
{
    return same_file(s->dir_fd, AT_FDCWD, s->dir) && exists(s->dir_fd, "segments") &&
           (s->lock_fd < 0 || same_file(s->lock_fd, s->dir_fd, "lock"));
}

/* May a store be made or opened at our path? */
static int may_follow(const imp_store *s)
{
    struct stat was, now;
    int fd = open(s->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return errno == ENOENT ? 0 : imp_fail_errno(errno, "can't open store %s", s->dir);
    bool other = fstat(s->dir_fd, &was) != 0 || fstat(fd, &now) != 0 || was.st_dev != now.st_dev;
    bool store = exists(fd, "segments") || exists(fd, "catalogue.db");
    close(fd);
    if (!other || store) return 0;
    return imp_fail(IMP_E_IO, "%s is on another file system now, and holds no store", s->dir);
}

/* Descriptor `*to` becomes that of `from`, at once for every thread that uses it. */
static int replace_fd(int *to, int *from)
{
    int rc = 0;
    if (*from >= 0 && *to >= 0 && dup3(*from, *to, O_CLOEXEC) < 0) {
        rc = imp_fail_errno(errno, "can't go on in another directory");
    } else if (*from >= 0 && *to >= 0) {
        close(*from);
        *from = -1;
    }
    return rc;
}

/* The other directory has to be encrypted with the same key, or new. */
static int follow_key(const imp_store *s, imp_store *t)
{
    bool found = false;
    t->key = s->key;
    t->pid = s->pid;
    int rc = read_mark(t, &found);
    if (rc < 0 || found || !s->key) return rc;
    if (imp_dir_has_catalogue(t)) return imp_fail(IMP_E_ARG, "store %s isn't encrypted any more", s->dir);
    return s->readonly ? 0 : write_mark(t);
}

int imp_dir_follow(imp_store *s, bool *moved)
{
    struct stat was, now;
    imp_dir_made made = IMP_DIR_STORE;
    *moved = false;
    if (s->dir_fd < 0 || in_place(s)) return 0;
    int rc = may_follow(s);
    if (rc < 0) return rc;
    imp_store *t = imp_calloc(1, sizeof *t);
    if (!t) return imp_fail(IMP_E_NOMEM, "no memory to open store %s", s->dir);
    t->dir_fd = t->lock_fd = t->live_fd = -1;
    t->opts = s->opts;
    t->readonly = s->readonly;
    t->rng = s->rng;
    rc = imp_dir_open(t, s->dir, &made);
    if (rc == 0 && made == IMP_DIR_NEW && (fstat(s->dir_fd, &was) != 0 || fstat(t->dir_fd, &now) != 0 || was.st_dev != now.st_dev)) {
        rc = imp_fail(IMP_E_IO, "%s would be on another file system now", s->dir);
    }
    if (rc == 0) rc = follow_key(s, t);
    if (rc == 0 && !s->readonly) rc = imp_dir_live_make(t);
    s->rng = t->rng;
    if (rc == 0) rc = imp_io_use_dir(s->io, t->dir_fd);
    if (rc == 0) {
        char name[32];
        live_name(s->instance, name);
        if (s->live_fd >= 0) (void)unlinkat(s->dir_fd, name, 0);
        rc = replace_fd(&s->live_fd, &t->live_fd);
        if (rc == 0) rc = replace_fd(&s->lock_fd, &t->lock_fd);
        if (rc == 0) rc = replace_fd(&s->dir_fd, &t->dir_fd);
        s->instance = t->instance;
        s->reserved = s->reorder_reserved = 0;
        *moved = true;
        imp_log(IMP_LOG_WARN, "%s: the directory is another one now; going on in it", s->dir);
    } else {
        imp_dir_unmake(t, made);
    }
    imp_dir_close(t);
    imp_free(t);
    return rc;
}

/* ---- sizes */

static uint64_t blocks(int at, const char *name)
{
    struct stat st;
    return fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) == 0 ? (uint64_t)st.st_blocks * 512 : 0;
}

static int sum_bytes(const char *name, uint64_t disk_bytes, void *user)
{
    (void)name;
    *(uint64_t *)user += disk_bytes;
    return 0;
}

/* But for segments/ and the catalogue's log. */
static uint64_t other_bytes(const imp_store *s)
{
    static const char *const ours[] = {".", "lock", "encrypted", "ballast", "segments", "live"};
    uint64_t n = imp_bases_bytes(s);
    for (size_t i = 0; i < sizeof ours / sizeof ours[0]; i++) n += blocks(s->dir_fd, ours[i]);
    for (int i = 0; i < N_CATALOGUE_FILES; i++) n += i == LOG_FILE ? 0 : blocks(s->dir_fd, catalogue_files[i]);
    (void)imp_io_list(s->io, "live", sum_bytes, &n);
    return n;
}

uint64_t imp_dir_log_bytes(const imp_store *s) { return blocks(s->dir_fd, catalogue_files[LOG_FILE]); }

uint64_t imp_dir_counted_bytes(const imp_store *s) { return other_bytes(s) + imp_catalogue_log_bound(s); }

typedef struct sum {
    uint64_t bytes;
    imp_errand *e;
} sum;

static int sum_segment(const char *name, uint64_t disk_bytes, void *user)
{
    sum *all = user;
    if (all->e) imp_errand_gets_on(all->e);
    return sum_bytes(name, disk_bytes, &all->bytes);
}

uint64_t imp_dir_bytes(imp_store *s, imp_errand *e)
{
    sum all = {other_bytes(s) + imp_dir_log_bytes(s), e};
    (void)imp_io_list(s->io, "segments", sum_segment, &all);
    return all.bytes;
}
