/* preload_faults.c: see preload_faults.h. */
#include "fault/preload_faults.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all but the atomics */
static atomic_bool watching;
static atomic_int_fast64_t clock_offset;
static atomic_uint_fast64_t fs_type;
static const char *prefix, *wanted_name;
static uint64_t n_calls[PRELOAD_N_KINDS]; /* that matched, with a rule or without */
static struct {
    preload_kind kind;
    uint64_t nth, seen, hits;
    bool stay, hold;
    int err;
} rule;
static pthread_cond_t released = PTHREAD_COND_INITIALIZER;
static uint64_t n_released;

static bool logging;
static preload_event *events;
static size_t n_events, events_room;

static const char *const kind_names[PRELOAD_N_KINDS] = {"all",    "open",   "read", "write", "sync", "truncate",
                                                        "rename", "unlink", "make", "map",   "lock", "close"};

EXPORT const char *preload_kind_name(preload_kind kind) { return kind_names[kind]; }

/* ---- the real ones */

/* The next definition of `name`, as a function of type T. */
#define REAL(T, name)                                        \
    static _Atomic(T) real_pointer;                          \
    T real = atomic_load(&real_pointer);                     \
    if (!real) {                                             \
        *(void **)(void *)&real = dlsym(RTLD_NEXT, name);    \
        atomic_store(&real_pointer, real);                   \
    }

/* ---- which calls are meant */

static bool path_of_fd(int fd, char out[PATH_MAX])
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    if (n < 0) return false;
    out[n] = '\0';
    return true;
}

static bool path_at(int dir, const char *name, char out[PATH_MAX])
{
    char at[PATH_MAX] = "";
    if (name[0] != '/' && (dir == AT_FDCWD ? getcwd(at, sizeof at) == NULL : !path_of_fd(dir, at))) return false;
    if (strcmp(name, ".") == 0) name = "";
    size_t n = strlen(at), m = strlen(name);
    if (n + m + 2 > PATH_MAX) return false;
    memcpy(out, at, n);
    if (n > 0 && m > 0) out[n++] = '/';
    memcpy(out + n, name, m + 1);
    return true;
}

/* What of a path lies below the prefix; NULL: it doesn't. With the lock. */
static const char *below(const char *path)
{
    size_t n = prefix ? strlen(prefix) : 0;
    if (!prefix || strncmp(path, prefix, n) != 0 || (path[n] != '/' && path[n] != '\0')) return NULL;
    return path[n] == '/' ? path + n + 1 : path + n;
}

/* 0: do it; -1: do it in part; else the errno to fail with. */
static int verdict(preload_kind kind, const char *path)
{
    int err = 0;
    pthread_mutex_lock(&lock);
    const char *rel = below(path);
    bool matches = rel && (!wanted_name || strstr(rel, wanted_name));
    bool of_all = matches && kind != PRELOAD_LOCK && kind != PRELOAD_CLOSE;
    n_calls[PRELOAD_ALL] += of_all;
    n_calls[kind] += matches;
    if (matches && rule.nth > 0 && (rule.kind == PRELOAD_ALL ? of_all : rule.kind == kind)) {
        rule.seen++;
        if (rule.seen == rule.nth || (rule.stay && rule.seen > rule.nth)) {
            rule.hits++;
            if (!rule.hold) err = rule.err ? rule.err : -1;
            for (uint64_t was = n_released; rule.hold && n_released == was;) pthread_cond_wait(&released, &lock);
        }
    }
    pthread_mutex_unlock(&lock);
    return err;
}

static int verdict_fd(preload_kind kind, int fd)
{
    char path[PATH_MAX];
    if (!atomic_load_explicit(&watching, memory_order_relaxed) || !path_of_fd(fd, path)) return 0;
    return verdict(kind, path);
}

static int verdict_at(preload_kind kind, int dir, const char *name)
{
    char path[PATH_MAX];
    if (!atomic_load_explicit(&watching, memory_order_relaxed) || !path_at(dir, name, path)) return 0;
    return verdict(kind, path);
}

EXPORT void preload_watch(const char *below_this, const char *name)
{
    pthread_mutex_lock(&lock);
    prefix = below_this;
    wanted_name = name;
    rule.nth = 0;
    atomic_store(&watching, below_this != NULL);
    pthread_mutex_unlock(&lock);
}

static void set_rule(preload_kind kind, uint64_t nth, bool stay, bool hold, int err)
{
    pthread_mutex_lock(&lock);
    rule.kind = kind;
    rule.nth = nth;
    rule.stay = stay;
    rule.hold = hold;
    rule.err = err;
    rule.seen = rule.hits = 0;
    pthread_mutex_unlock(&lock);
}

EXPORT void preload_fail(preload_kind kind, uint64_t nth, bool stay, int err)
{
    set_rule(kind, nth, stay, false, err);
}

EXPORT void preload_hold(preload_kind kind, uint64_t nth) { set_rule(kind, nth, false, true, 0); }

EXPORT void preload_release(void)
{
    pthread_mutex_lock(&lock);
    n_released++;
    pthread_cond_broadcast(&released);
    pthread_mutex_unlock(&lock);
}

EXPORT uint64_t preload_hits(void)
{
    pthread_mutex_lock(&lock);
    uint64_t n = rule.hits;
    pthread_mutex_unlock(&lock);
    return n;
}

EXPORT uint64_t preload_seen(void)
{
    pthread_mutex_lock(&lock);
    uint64_t n = rule.seen;
    pthread_mutex_unlock(&lock);
    return n;
}

static const struct {
    const char *name;
    int err;
} errnos[] = {{"short", 0},       {"EIO", EIO},       {"ENOSPC", ENOSPC}, {"EINTR", EINTR}, {"EROFS", EROFS},
              {"EMFILE", EMFILE}, {"ENOMEM", ENOMEM}, {"EACCES", EACCES}, {"EDQUOT", EDQUOT},
              {"ENOLCK", ENOLCK}};

static bool read_rule(const char *text)
{
    char kind[16], what[16], plus = 0;
    unsigned long long nth;
    if (sscanf(text, "%15[a-z]:%llu%c", kind, &nth, &plus) < 2 || !strrchr(text, ':')) return false;
    snprintf(what, sizeof what, "%s", strrchr(text, ':') + 1);
    for (int k = 0; k < PRELOAD_N_KINDS; k++) {
        for (size_t e = 0; strcmp(kind, kind_names[k]) == 0 && e < sizeof errnos / sizeof errnos[0]; e++) {
            if (strcasecmp(what, errnos[e].name) != 0) continue;
            preload_fail((preload_kind)k, nth, plus == '+', errnos[e].err);
            return true;
        }
    }
    return false;
}

__attribute__((constructor)) static void from_environment(void)
{
    const char *below_this = getenv("IMP_PRELOAD_PREFIX"), *text = getenv("IMP_PRELOAD_RULE");
    const char *fs = getenv("IMP_PRELOAD_FS");
    if (!below_this) return;
    preload_watch(below_this, getenv("IMP_PRELOAD_NAME"));
    if (fs) preload_fs(strtoull(fs, NULL, 0));
    if (text && !read_rule(text)) {
        fprintf(stderr, "no such rule: %s\n", text);
        _exit(99);
    }
}

__attribute__((destructor)) static void tell(void)
{
    const char *path = getenv("IMP_PRELOAD_TOLD");
    FILE *f = path ? fopen(path, "we") : NULL;
    if (!f) return;
    fprintf(f, "hits %llu\n", (unsigned long long)preload_hits());
    for (int k = 0; k < PRELOAD_N_KINDS; k++) fprintf(f, "%s %llu\n", kind_names[k], (unsigned long long)n_calls[k]);
    fclose(f);
}

/* ---- the log */

EXPORT void preload_log_start(void)
{
    pthread_mutex_lock(&lock);
    logging = true;
    pthread_mutex_unlock(&lock);
}

/* With the lock. */
static preload_event *add_event(preload_op op, const char *path)
{
    const char *rel = path ? below(path) : "";
    if (!logging || !rel || strlen(rel) >= sizeof events->path) return NULL;
    if (n_events == events_room) {
        size_t room = events_room ? events_room * 2 : 1024;
        preload_event *grown = realloc(events, room * sizeof *grown);
        if (!grown) abort();
        events = grown;
        events_room = room;
    }
    preload_event *e = &events[n_events++];
    memset(e, 0, sizeof *e);
    e->op = op;
    strcpy(e->path, rel);
    return e;
}

EXPORT void preload_log_mark(uint64_t value)
{
    pthread_mutex_lock(&lock);
    preload_event *e = add_event(OP_MARK, NULL);
    if (e) e->n_bytes = value;
    pthread_mutex_unlock(&lock);
}

EXPORT preload_event *preload_log_end(size_t *n)
{
    pthread_mutex_lock(&lock);
    preload_event *all = events;
    *n = n_events;
    events = NULL;
    n_events = events_room = 0;
    logging = false;
    pthread_mutex_unlock(&lock);
    return all;
}

EXPORT void preload_log_free(preload_event *all, size_t n)
{
    for (size_t i = 0; i < n; i++) free(all[i].bytes);
    free(all);
}

static uint64_t inode_of(int fd)
{
    struct stat st;
    return fstat(fd, &st) == 0 ? st.st_ino : 0;
}

/* Done before the call is, so that no other thread's sync comes in between: what is logged too early is only treated as
 * something that may be lost. A sync is logged after it, for the same reason. */
static void log_fd(preload_op op, int fd, uint64_t offset, const void *bytes, uint64_t n_bytes)
{
    char path[PATH_MAX];
    if (!atomic_load_explicit(&watching, memory_order_relaxed) || !path_of_fd(fd, path)) return;
    uint64_t inode = inode_of(fd);
    pthread_mutex_lock(&lock);
    preload_event *e = add_event(op, path);
    if (e) {
        e->inode = inode;
        e->offset = offset;
        e->n_bytes = n_bytes;
        if (bytes) {
            e->bytes = malloc(n_bytes ? n_bytes : 1);
            if (!e->bytes) abort();
            memcpy(e->bytes, bytes, n_bytes);
        }
    }
    pthread_mutex_unlock(&lock);
}

static void log_path(preload_op op, int dir, const char *name, int to_dir, const char *to, uint64_t inode)
{
    char path[PATH_MAX], other[PATH_MAX] = "";
    if (!atomic_load_explicit(&watching, memory_order_relaxed) || !path_at(dir, name, path)) return;
    if (to && !path_at(to_dir, to, other)) return;
    pthread_mutex_lock(&lock);
    preload_event *e = add_event(op, path);
    if (e) {
        const char *rel = to ? below(other) : NULL;
        e->inode = inode;
        if (rel && strlen(rel) < sizeof e->to) strcpy(e->to, rel);
    }
    pthread_mutex_unlock(&lock);
}

/* ---- the calls */

#define FAIL_IF(err)     \
    do {                 \
        int why = (err); \
        if (why > 0) {   \
            errno = why; \
            return -1;   \
        }                \
    } while (0)

typedef int openat_fn(int, const char *, int, ...);

static int open_any(int dir, const char *name, int flags, mode_t mode)
{
    REAL(openat_fn *, "openat64");
    FAIL_IF(verdict_at(PRELOAD_OPEN, dir, name));
    bool may_make = (flags & O_CREAT) && (flags & O_TMPFILE) != O_TMPFILE;
    struct stat st;
    bool was = may_make && atomic_load_explicit(&watching, memory_order_relaxed) && fstatat(dir, name, &st, 0) == 0;
    int fd = real(dir, name, flags, mode);
    if (fd >= 0 && may_make && !was) log_path(OP_CREATE, dir, name, 0, NULL, inode_of(fd));
    return fd;
}

static mode_t mode_arg(int flags, va_list args)
{
    return flags & (O_CREAT | O_TMPFILE) ? (mode_t)va_arg(args, int) : 0;
}

#define DEFINE_OPEN(name)                              \
    EXPORT int name(const char *path, int flags, ...); \
    EXPORT int name(const char *path, int flags, ...)  \
    {                                                  \
        va_list args;                                  \
        va_start(args, flags);                         \
        mode_t mode = mode_arg(flags, args);           \
        va_end(args);                                  \
        return open_any(AT_FDCWD, path, flags, mode);  \
    }
#define DEFINE_OPENAT(name)                                     \
    EXPORT int name(int dir, const char *path, int flags, ...); \
    EXPORT int name(int dir, const char *path, int flags, ...)  \
    {                                                           \
        va_list args;                                           \
        va_start(args, flags);                                  \
        mode_t mode = mode_arg(flags, args);                    \
        va_end(args);                                           \
        return open_any(dir, path, flags, mode);                \
    }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)
DEFINE_OPENAT(openat)
DEFINE_OPENAT(openat64)

static size_t in_part(size_t n) { return n > 1024 ? n / 2 / 512 * 512 : n > 512 ? 512 : n > 1 ? n / 2 : n; }

typedef ssize_t pread_fn(int, void *, size_t, off_t);
typedef ssize_t pwrite_fn(int, const void *, size_t, off_t);

static ssize_t pread_any(int fd, void *buf, size_t n, off_t at)
{
    REAL(pread_fn *, "pread64");
    int err = verdict_fd(PRELOAD_READ, fd);
    FAIL_IF(err);
    return real(fd, buf, err < 0 ? in_part(n) : n, at);
}

static ssize_t pwrite_any(int fd, const void *buf, size_t n, off_t at)
{
    REAL(pwrite_fn *, "pwrite64");
    int err = verdict_fd(PRELOAD_WRITE, fd);
    FAIL_IF(err);
    if (err < 0) n = in_part(n);
    log_fd(OP_WRITE, fd, (uint64_t)at, buf, n);
    return real(fd, buf, n, at);
}

EXPORT ssize_t pread(int fd, void *buf, size_t n, off_t at) { return pread_any(fd, buf, n, at); }
EXPORT ssize_t pread64(int fd, void *buf, size_t n, off_t at);
EXPORT ssize_t pread64(int fd, void *buf, size_t n, off_t at) { return pread_any(fd, buf, n, at); }
EXPORT ssize_t pwrite(int fd, const void *buf, size_t n, off_t at) { return pwrite_any(fd, buf, n, at); }
EXPORT ssize_t pwrite64(int fd, const void *buf, size_t n, off_t at);
EXPORT ssize_t pwrite64(int fd, const void *buf, size_t n, off_t at) { return pwrite_any(fd, buf, n, at); }

/* At the file's own position, by SQLite only where it doesn't know pread. */
EXPORT ssize_t read(int fd, void *buf, size_t n)
{
    typedef ssize_t fn(int, void *, size_t);
    REAL(fn *, "read");
    int err = verdict_fd(PRELOAD_READ, fd);
    FAIL_IF(err);
    return real(fd, buf, err < 0 ? in_part(n) : n);
}

EXPORT ssize_t write(int fd, const void *buf, size_t n)
{
    typedef ssize_t fn(int, const void *, size_t);
    REAL(fn *, "write");
    int err = verdict_fd(PRELOAD_WRITE, fd);
    FAIL_IF(err);
    if (err < 0) n = in_part(n);
    if (atomic_load_explicit(&watching, memory_order_relaxed)) {
        off_t at = lseek(fd, 0, SEEK_CUR);
        if (at >= 0) log_fd(OP_WRITE, fd, (uint64_t)at, buf, n);
    }
    return real(fd, buf, n);
}

#define DEFINE_SYNC(name)                            \
    EXPORT int name(int fd)                          \
    {                                                \
        typedef int fn(int);                         \
        REAL(fn *, #name);                           \
        FAIL_IF(verdict_fd(PRELOAD_SYNC, fd));       \
        int rc = real(fd);                           \
        if (rc == 0) log_fd(OP_SYNC, fd, 0, NULL, 0); \
        return rc;                                   \
    }
DEFINE_SYNC(fsync)
DEFINE_SYNC(fdatasync)

static int truncate_any(int fd, off_t n)
{
    typedef int fn(int, off_t);
    REAL(fn *, "ftruncate64");
    FAIL_IF(verdict_fd(PRELOAD_TRUNCATE, fd));
    log_fd(OP_TRUNCATE, fd, 0, NULL, (uint64_t)n);
    return real(fd, n);
}

EXPORT int ftruncate(int fd, off_t n) { return truncate_any(fd, n); }
EXPORT int ftruncate64(int fd, off_t n);
EXPORT int ftruncate64(int fd, off_t n) { return truncate_any(fd, n); }

static int fallocate_any(int fd, off_t at, off_t n)
{
    typedef int fn(int, off_t, off_t);
    REAL(fn *, "posix_fallocate64");
    int err = verdict_fd(PRELOAD_TRUNCATE, fd);
    return err > 0 ? err : real(fd, at, n);
}

EXPORT int posix_fallocate(int fd, off_t at, off_t n) { return fallocate_any(fd, at, n); }
EXPORT int posix_fallocate64(int fd, off_t at, off_t n);
EXPORT int posix_fallocate64(int fd, off_t at, off_t n) { return fallocate_any(fd, at, n); }

static int rename_any(int from_dir, const char *from, int to_dir, const char *to)
{
    typedef int fn(int, const char *, int, const char *);
    REAL(fn *, "renameat");
    FAIL_IF(verdict_at(PRELOAD_RENAME, from_dir, from));
    log_path(OP_RENAME, from_dir, from, to_dir, to, 0);
    return real(from_dir, from, to_dir, to);
}

EXPORT int rename(const char *from, const char *to) { return rename_any(AT_FDCWD, from, AT_FDCWD, to); }
EXPORT int renameat(int a, const char *from, int b, const char *to) { return rename_any(a, from, b, to); }

static int unlink_any(int dir, const char *name, int flags)
{
    typedef int fn(int, const char *, int);
    REAL(fn *, "unlinkat");
    FAIL_IF(verdict_at(PRELOAD_UNLINK, dir, name));
    log_path(OP_UNLINK, dir, name, 0, NULL, 0);
    return real(dir, name, flags);
}

EXPORT int unlink(const char *name) { return unlink_any(AT_FDCWD, name, 0); }
EXPORT int unlinkat(int dir, const char *name, int flags) { return unlink_any(dir, name, flags); }

static int mkdir_any(int dir, const char *name, mode_t mode)
{
    typedef int fn(int, const char *, mode_t);
    REAL(fn *, "mkdirat");
    FAIL_IF(verdict_at(PRELOAD_MAKE, dir, name));
    int rc = real(dir, name, mode);
    if (rc == 0) log_path(OP_MKDIR, dir, name, 0, NULL, 0);
    return rc;
}

EXPORT int mkdir(const char *name, mode_t mode) { return mkdir_any(AT_FDCWD, name, mode); }
EXPORT int mkdirat(int dir, const char *name, mode_t mode) { return mkdir_any(dir, name, mode); }

EXPORT int mknod(const char *name, mode_t mode, dev_t device)
{
    typedef int fn(const char *, mode_t, dev_t);
    REAL(fn *, "mknod");
    FAIL_IF(verdict_at(PRELOAD_MAKE, AT_FDCWD, name));
    struct stat st;
    int rc = real(name, mode, device);
    if (rc == 0 && atomic_load_explicit(&watching, memory_order_relaxed) && stat(name, &st) == 0) {
        log_path(OP_CREATE, AT_FDCWD, name, 0, NULL, st.st_ino);
    }
    return rc;
}

static void *map_any(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
    typedef void *fn(void *, size_t, int, int, int, off_t);
    REAL(fn *, "mmap64");
    int err = fd >= 0 && !(flags & MAP_ANONYMOUS) ? verdict_fd(PRELOAD_MAP, fd) : 0;
    if (err > 0) {
        errno = err;
        return MAP_FAILED;
    }
    return real(at, n, prot, flags, fd, offset);
}

EXPORT void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
    return map_any(at, n, prot, flags, fd, offset);
}
EXPORT void *mmap64(void *at, size_t n, int prot, int flags, int fd, off_t offset);
EXPORT void *mmap64(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
    return map_any(at, n, prot, flags, fd, offset);
}

/* ---- locks */

static int fcntl_any(int fd, int what, void *arg)
{
    typedef int fn(int, int, ...);
    REAL(fn *, "fcntl64");
    bool takes = what == F_SETLK || what == F_SETLKW || what == F_OFD_SETLK || what == F_OFD_SETLKW;
    if (takes && ((const struct flock *)arg)->l_type != F_UNLCK) FAIL_IF(verdict_fd(PRELOAD_LOCK, fd));
    return real(fd, what, arg);
}

/* What fcntl is given, if anything, is handed on as libc itself does it. */
#define DEFINE_FCNTL(name)                       \
    EXPORT int name(int fd, int what, ...);      \
    EXPORT int name(int fd, int what, ...)       \
    {                                            \
        va_list args;                            \
        va_start(args, what);                    \
        void *arg = va_arg(args, void *);        \
        va_end(args);                            \
        return fcntl_any(fd, what, arg);         \
    }
DEFINE_FCNTL(fcntl)
DEFINE_FCNTL(fcntl64)

EXPORT int flock(int fd, int how)
{
    typedef int fn(int, int);
    REAL(fn *, "flock");
    if (!(how & LOCK_UN)) FAIL_IF(verdict_fd(PRELOAD_LOCK, fd));
    return real(fd, how);
}

/* ---- the file system */

EXPORT void preload_fs(uint64_t type) { atomic_store(&fs_type, type); }

/* 0: the truth. */
static uint64_t fs_told(int fd)
{
    char path[PATH_MAX];
    uint64_t type = atomic_load(&fs_type);
    if (type == 0 || !path_of_fd(fd, path)) return 0;
    pthread_mutex_lock(&lock);
    bool ours = below(path) != NULL;
    pthread_mutex_unlock(&lock);
    return ours ? type : 0;
}

#define DEFINE_FSTATFS(name, type)                                            \
    EXPORT int name(int fd, struct type *out)                                 \
    {                                                                         \
        typedef int fn(int, struct type *);                                   \
        REAL(fn *, #name);                                                    \
        int rc = real(fd, out);                                               \
        uint64_t told = fs_told(fd);                                          \
        if (rc == 0 && told > 0) out->f_type = (__typeof__(out->f_type))told; \
        return rc;                                                            \
    }
DEFINE_FSTATFS(fstatfs, statfs)
DEFINE_FSTATFS(fstatfs64, statfs64)

EXPORT int close(int fd)
{
    typedef int fn(int);
    REAL(fn *, "close");
    (void)verdict_fd(PRELOAD_CLOSE, fd);
    return real(fd);
}

/* ---- the clock */

EXPORT void preload_clock(int64_t seconds) { atomic_store(&clock_offset, seconds); }

EXPORT int clock_gettime(clockid_t id, struct timespec *out)
{
    typedef int fn(clockid_t, struct timespec *);
    REAL(fn *, "clock_gettime");
    int rc = real(id, out);
    if (rc == 0 && id == CLOCK_REALTIME) out->tv_sec += (time_t)atomic_load(&clock_offset);
    return rc;
}

EXPORT time_t time(time_t *out)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
