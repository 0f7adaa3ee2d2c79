/* io.c: the directory, its files, reads that happen at once, and the writer of whole files. */
#include "io/io.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/rng.h"
#include "base/status.h"
#include "io/io_fault.h"
#include "io/io_internal.h"

enum { COARSE = 4096, FINE = 512 };

/* ---- names */

/* Split "segments/ab.seg" and open the directory that holds the last part; each directory on the way must be a real
 * one, not a link. Returns 0, or a positive errno. */
static int open_parent(const imp_io *io, const char *name, int *fd, const char **last)
{
    *fd = -1;
    int at = fcntl(io->dir_fd, F_DUPFD_CLOEXEC, 0);
    if (at < 0) return errno;
    for (;;) {
        const char *slash = strchr(name, '/');
        size_t length = slash ? (size_t)(slash - name) : strlen(name);
        bool dots = (length == 1 || length == 2) && strncmp(name, "..", length) == 0;
        if (length == 0 || length > NAME_MAX || dots) {
            close(at);
            return EINVAL;
        }
        if (!slash) break;
        char part[NAME_MAX + 1];
        memcpy(part, name, length);
        part[length] = '\0';
        int next = openat(at, part, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        int err = errno;
        close(at);
        if (next < 0) return err;
        at = next;
        name = slash + 1;
    }
    *fd = at;
    *last = name;
    return 0;
}

/* A directory below ours, "" or NULL for ours itself. */
static int open_sub(const imp_io *io, const char *sub, int *fd)
{
    if (!sub || !*sub) {
        *fd = openat(io->dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        return *fd < 0 ? errno : 0;
    }
    const char *last;
    int parent, err = open_parent(io, sub, &parent, &last);
    if (err) return err;
    *fd = openat(parent, last, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    err = *fd < 0 ? errno : 0;
    close(parent);
    return err;
}

/* ---- what is allowed */

/* Ask the kernel (Linux 6.1 and later know). True if it says: then *alignment is 512, 4096, or 0 for no O_DIRECT. */
static bool direct_told(int fd, uint32_t *alignment)
{
#ifdef STATX_DIOALIGN
    struct statx x;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &x) == 0 && (x.stx_mask & STATX_DIOALIGN)) {
        uint32_t need = x.stx_dio_mem_align > x.stx_dio_offset_align ? x.stx_dio_mem_align : x.stx_dio_offset_align;
        *alignment = need == 0 || need > COARSE ? 0 : need > FINE ? COARSE : FINE;
        return true;
    }
#else
    (void)fd;
    (void)alignment;
#endif
    return false;
}

/* The alignment that O_DIRECT reads of `fd` (opened so, at least 4096 bytes) get by with; 0: they fail. `page` is 4096
 * bytes of memory so aligned. */
static uint32_t direct_tried(int fd, unsigned char *page)
{
    uint32_t told;
    if (pread(fd, page, COARSE, 0) != COARSE) return 0;
    if (direct_told(fd, &told)) return told;
    return pread(fd, page + FINE, FINE, FINE) == FINE ? FINE : COARSE;
}

/* In a file of our own that is gone afterwards. Returns 0, or an errno when nothing can be written here at all. */
static int try_direct_writing(const imp_io *io, unsigned char *page, uint32_t *alignment)
{
    *alignment = 0;
    char name[32] = "";
    int fd = openat(io->dir_fd, ".", O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
    if (fd < 0) {
        imp_rng rng;
        imp_rng_seed_os(&rng);
        snprintf(name, sizeof name, ".probe-%016llx", (unsigned long long)imp_rng_u64(&rng));
        fd = openat(io->dir_fd, name, O_CREAT | O_EXCL | O_NOFOLLOW | O_RDWR | O_CLOEXEC | O_DIRECT, 0600);
        int err = fd < 0 ? errno : 0;
        /* The file may have been made although O_DIRECT was refused. */
        unlinkat(io->dir_fd, name, 0);
        if (err) return err == EINVAL ? 0 : err;
    }
    int err = 0;
    memset(page, 0, COARSE);
    if (pwrite(fd, page, COARSE, 0) == COARSE) {
        *alignment = direct_tried(fd, page);
    } else if (errno == ENOSPC || errno == EDQUOT) {
        err = errno;
    }
    close(fd);
    return err;
}

/* In the first file of directory `at` that is large enough. True if there was one. */
static bool try_direct_in(int at, unsigned char *page, uint32_t *alignment)
{
    bool found = false;
    DIR *dir = fdopendir(at);
    if (!dir) {
        close(at);
        return false;
    }
    for (struct dirent *e; !found && (e = readdir(dir)) != NULL;) {
        struct stat st;
        if (fstatat(dirfd(dir), e->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0) continue;
        if (!S_ISREG(st.st_mode) || st.st_size < COARSE) continue;
        int fd = openat(dirfd(dir), e->d_name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_DIRECT);
        if (fd >= 0) {
            *alignment = direct_tried(fd, page);
            close(fd);
            found = true;
        } else if (errno == EINVAL) {
            *alignment = 0;
            found = true;
        }
    }
    closedir(dir);
    return found;
}

/* Without writing. Where there is no file to try, the safe guess: O_DIRECT at 4096 (a file that then refuses is opened
 * without). */
static void try_direct_reading(const imp_io *io, unsigned char *page, uint32_t *alignment)
{
    int fd;
    *alignment = COARSE;
    if (open_sub(io, "segments", &fd) == 0 && try_direct_in(fd, page, alignment)) return;
    if (open_sub(io, "", &fd) == 0) (void)try_direct_in(fd, page, alignment);
}

static int settle_direct(imp_io *io)
{
    io->direct = false;
    io->alignment = COARSE;
    if (imp_io_denied(IMP_IO_DENY_DIRECT)) return 0;
    unsigned char *page = imp_aligned(COARSE, COARSE);
    if (!page) return imp_fail(IMP_E_NOMEM, "no memory to try out O_DIRECT");
    uint32_t alignment;
    int err = 0;
    if (!io->readonly) err = try_direct_writing(io, page, &alignment);
    /* A full disk is no reason not to read what is there. */
    if (io->readonly || err) try_direct_reading(io, page, &alignment);
    imp_free(page);
    if (err == EACCES || err == EPERM || err == EROFS) return imp_fail_errno(err, "can't write in %s", io->dir);
    if (alignment == FINE && imp_io_denied(IMP_IO_DENY_ALIGN_512)) alignment = COARSE;
    if (alignment) {
        io->direct = true;
        io->alignment = alignment;
    }
    return 0;
}

static int settle_uring(imp_io *io, imp_io_mode mode, int *why_not)
{
    *why_not = 0;
    io->uring = false;
    if (mode == IMP_IO_THREADS || mode == IMP_IO_VIRTUAL) return 0;
    imp_io_buffers buffers = IMP_IO_PLAIN;
    *why_not = imp_io_uring_try(&buffers);
    if (*why_not == 0) {
        io->uring = true;
        atomic_store_explicit(&io->buffers, (int)buffers, memory_order_relaxed);
    } else if (mode == IMP_IO_URING) {
        (void)imp_fail_errno(*why_not, "io_uring can't be used");
        return IMP_E_UNSUPPORTED;
    }
    return 0;
}

int imp_io_new(const char *dir, imp_io_mode mode, unsigned flags, uint64_t read_bytes_per_s, imp_io **out)
{
    int rc = 0, why_not;
    *out = NULL;
    if ((unsigned)mode > IMP_IO_VIRTUAL) {
        return imp_fail(IMP_E_ARG, "no such I/O mode: %d", (int)mode);
    }
    imp_io *io = imp_calloc(1, sizeof *io);
    if (!io) return imp_fail(IMP_E_NOMEM, "no memory for I/O");
    io->dir_fd = -1;
    imp_io_hung_init(io);
    io->readonly = (flags & IMP_STORE_READONLY) != 0;
    io->must_uring = mode == IMP_IO_URING;
    io->simulated = mode == IMP_IO_VIRTUAL && !(flags & IMP_STORE_MEMORY);
    imp_io_limit_init(&io->limit, read_bytes_per_s);
    if (io->simulated) io->limit.burst_ns = 0; /* nobody comes late for the next read */
    io->dir = imp_strdup(dir);
    if (io->dir && (flags & IMP_STORE_MEMORY)) {
        io->alignment = FINE;
        io->memory = imp_io_memory_new();
    }
    if (!io->dir || ((flags & IMP_STORE_MEMORY) && !io->memory)) {
        rc = imp_fail(IMP_E_NOMEM, "no memory for I/O");
        goto out;
    }
    if (io->memory) {
        imp_io_limit_init(&io->limit, 0);
        *out = io;
        io = NULL;
        goto out;
    }
    io->dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (io->dir_fd < 0) {
        rc = imp_fail_errno(errno, "can't open directory %s", dir);
        goto out;
    }
    if (flags & IMP_STORE_NO_DIRECT) {
        io->alignment = COARSE;
    } else {
        rc = settle_direct(io);
        if (rc < 0) goto out;
        if (io->simulated) io->direct = false; /* the same offsets as with it, but no wait for the disk */
    }
    rc = settle_uring(io, mode, &why_not);
    if (rc < 0) goto out;
    imp_log(IMP_LOG_INFO, "%s: %s, alignment %u%s%s", dir, imp_io_describe(io), (unsigned)io->alignment,
            why_not ? "; io_uring can't be used: " : "", why_not ? strerror(why_not) : "");
    *out = io;
    io = NULL;
out:
    imp_io_free(io);
    return rc;
}

void imp_io_free(imp_io *io)
{
    if (!io || !imp_io_hung_end(io)) return;
    if (io->dir_fd >= 0) close(io->dir_fd);
    imp_io_memory_free(io->memory);
    imp_free(io->dir);
    imp_free(io);
}

int imp_io_use_dir(imp_io *io, int fd)
{
    return dup3(fd, io->dir_fd, O_CLOEXEC) < 0 ? imp_fail_errno(errno, "can't use another %s", io->dir) : 0;
}

const char *imp_io_describe(const imp_io *io)
{
    if (io->memory) return "memory";
    bool registered = atomic_load_explicit(&io->buffers, memory_order_relaxed) == IMP_IO_REGISTERED;
    if (io->simulated) return "virtual time, page cache";
    if (io->uring && io->direct) {
        return registered ? "io_uring, O_DIRECT, registered buffers" : "io_uring, O_DIRECT, plain buffers";
    }
    if (io->uring) {
        return registered ? "io_uring, page cache, registered buffers" : "io_uring, page cache, plain buffers";
    }
    return io->direct ? "threads, O_DIRECT" : "threads, page cache";
}

uint32_t imp_io_alignment(const imp_io *io) { return io->alignment; }

void imp_io_set_deadline(imp_io *io, uint64_t deadline_ns) { io->deadline_ns = deadline_ns; }

static _Thread_local atomic_uint_least64_t *tell_limit;

atomic_uint_least64_t *imp_io_tell_limit(atomic_uint_least64_t *until_ns)
{
    atomic_uint_least64_t *before = tell_limit;
    tell_limit = until_ns;
    return before;
}

void imp_io_raise(atomic_uint_least64_t *until_ns, uint64_t ns)
{
    uint_least64_t is = atomic_load_explicit(until_ns, memory_order_relaxed);
    while (is < ns && !atomic_compare_exchange_weak_explicit(until_ns, &is, ns, memory_order_relaxed,
                                                             memory_order_relaxed)) {
    }
}

bool imp_io_in_memory(const imp_io *io) { return io->memory != NULL; }

uint64_t imp_io_bytes_read(const imp_io *io) { return atomic_load_explicit(&io->bytes_read, memory_order_relaxed); }

uint64_t imp_io_bytes_written(const imp_io *io)
{
    return atomic_load_explicit(&io->bytes_written, memory_order_relaxed);
}

/* ---- files */

/* O_NONBLOCK so that a pipe put in a file's place can't hang us; afterwards it goes, because io_uring takes it as an
 * order never to wait. */
static int open_regular(int at, const char *last, bool direct, struct stat *st, int *out)
{
    if (direct && imp_io_denied(IMP_IO_DENY_DIRECT_OPEN)) return EINVAL;
    int fd = openat(at, last, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | (direct ? O_DIRECT : 0));
    if (fd < 0) return errno;
    int err = 0, flags;
    if (fstat(fd, st) != 0) {
        err = errno;
    } else if (!S_ISREG(st->st_mode)) {
        err = EISDIR; /* or something stranger; the caller says "not a regular file" */
    } else if ((flags = fcntl(fd, F_GETFL)) < 0 || fcntl(fd, F_SETFL, flags & ~O_NONBLOCK) != 0) {
        err = errno;
    }
    if (err) {
        close(fd);
        return err;
    }
    *out = fd;
    return 0;
}

int imp_io_open(imp_io *io, const char *name, uint32_t file_alignment, imp_io_file **out)
{
    int rc = 0, at = -1, err;
    const char *last;
    struct stat st;
    size_t name_bytes = strlen(name) + 1;
    *out = NULL;
    imp_io_file *f = imp_calloc(1, sizeof *f + name_bytes);
    if (!f) return imp_fail(IMP_E_NOMEM, "no memory to open %s", name);
    f->io = io;
    atomic_init(&f->n_holds, 1);
    f->fd = -1;
    memcpy(f->name, name, name_bytes);
    f->direct = io->direct && file_alignment >= io->alignment;

    imp_io_verdict v = imp_io_verdict_on(IMP_IO_OPEN, name, 0, 0);
    if (io->memory) {
        if (v.err == 0) f->memory = imp_io_memory_open(io->memory, name);
        err = v.err ? v.err : f->memory ? 0 : ENOENT;
    } else {
        err = v.err ? v.err : open_parent(io, name, &at, &last);
    }
    if (err == 0 && !f->memory) {
        err = open_regular(at, last, f->direct, &st, &f->fd);
        if (err == EINVAL && f->direct) {
            f->direct = false; /* a mount of another kind below ours */
            err = open_regular(at, last, false, &st, &f->fd);
        }
    }
    if (err) {
        rc = err == EISDIR || err == ELOOP ? imp_fail(IMP_E_IO, "%s/%s is not a regular file", io->dir, name)
                                           : imp_fail_errno(err, "can't open %s/%s", io->dir, name);
        goto out;
    }
    f->bytes = f->memory ? f->memory->n_bytes : (uint64_t)st.st_size;
    *out = f;
    f = NULL;
out:
    if (at >= 0) close(at);
    imp_io_close(f);
    return rc;
}

void imp_io_close(imp_io_file *f)
{
    if (!f || atomic_fetch_sub_explicit(&f->n_holds, 1, memory_order_acq_rel) > 1) return;
    if (f->fd >= 0) close(f->fd);
    imp_io_memory_close(f->io->memory, f->memory);
    imp_free(f);
}

void imp_io_hold(imp_io_file *f) { atomic_fetch_add_explicit(&f->n_holds, 1, memory_order_relaxed); }

uint64_t imp_io_file_bytes(const imp_io_file *f) { return f->bytes; }

const void *imp_io_file_at(const imp_io_file *f, uint64_t offset, size_t n_bytes)
{
    return f->memory && offset <= f->bytes && n_bytes <= f->bytes - offset ? f->memory->bytes + offset : NULL;
}

/* ---- reads at once */

int imp_io_read_failed(const imp_io_file *f, uint64_t offset, size_t n_bytes, int err)
{
    if (err == IMP_IO_EOF) {
        return imp_fail(IMP_E_IO, "%s/%s ends before byte %llu", f->io->dir, f->name,
                        (unsigned long long)(offset + n_bytes));
    }
    if (err == IMP_IO_MISALIGNED) {
        return imp_fail(IMP_E_ARG, "%s/%s: a read of %zu bytes at %llu isn't aligned to %u", f->io->dir, f->name, n_bytes,
                        (unsigned long long)offset, (unsigned)f->io->alignment);
    }
    return imp_fail_errno(err, "%s/%s: reading %zu bytes at %llu", f->io->dir, f->name, n_bytes,
                          (unsigned long long)offset);
}

bool imp_io_misaligned(const imp_io_file *f, uint64_t offset, const void *buf, size_t n_bytes)
{
    uint64_t mask = f->io->alignment - 1;
    return f->direct && ((offset | (uintptr_t)buf | n_bytes) & mask) != 0;
}

size_t imp_io_shortened(size_t n_bytes, size_t max_bytes, uint32_t alignment)
{
    if (max_bytes >= n_bytes) return n_bytes;
    size_t whole = max_bytes & ~((size_t)alignment - 1);
    return whole || max_bytes == 0 ? whole : alignment;
}

int64_t imp_io_pread_once(imp_io_file *f, uint64_t offset, void *buf, size_t n_bytes, imp_io_verdict v)
{
    if (v.hang_ns) imp_io_sleep_until(imp_now_ns() + v.hang_ns);
    if (v.err) return -v.err;
    n_bytes = imp_io_shortened(n_bytes, v.max_bytes, f->direct ? f->io->alignment : 1);
    if (n_bytes == 0) return 0;
    ssize_t got;
    if (f->memory) {
        size_t there = offset < f->bytes ? (size_t)(f->bytes - offset) : 0;
        got = (ssize_t)(n_bytes < there ? n_bytes : there);
        if (got > 0) memcpy(buf, f->memory->bytes + offset, (size_t)got);
    } else {
        got = pread(f->fd, buf, n_bytes, (off_t)offset);
        if (got < 0) return -errno;
        atomic_fetch_add_explicit(&f->io->bytes_read, (uint64_t)got, memory_order_relaxed);
    }
    if (v.flip_bit >= 0) imp_io_flip(buf, (size_t)got, v.flip_bit);
    return got;
}

int imp_io_advance(const imp_io_file *f, uint64_t offset, size_t n_bytes, size_t *done, unsigned *n_stalls,
                   int64_t result)
{
    if (result == -EINTR || result == -EAGAIN || result == -ECANCELED) {
        return ++*n_stalls > IMP_IO_MAX_STALLS ? (int)-result : IMP_IO_MORE;
    }
    if (result < 0) return (int)-result;
    if (result == 0) return IMP_IO_EOF;
    size_t got = *done + (size_t)result;
    if (got >= n_bytes) return 0;
    size_t whole = got & ~((size_t)(f->direct ? f->io->alignment : IMP_IO_BLOCK) - 1);
    if (whole == *done) {
        if (offset + got >= f->bytes) return IMP_IO_EOF;
        return ++*n_stalls > IMP_IO_MAX_STALLS ? EIO : IMP_IO_MORE;
    }
    *n_stalls = 0;
    *done = whole;
    return IMP_IO_MORE;
}

int imp_io_pread_all(imp_io_file *f, uint64_t offset, void *buf, size_t n_bytes)
{
    uint64_t now = f->io->simulated ? imp_io_virtual_ns(f->io) : imp_now_ns();
    uint64_t release = imp_io_limit_reserve(&f->io->limit, now, n_bytes);
    if (release && tell_limit) imp_io_raise(tell_limit, release);
    if (release && f->io->simulated) imp_io_virtual_pass(f->io, release);
    else if (release) imp_io_sleep_until(release);
    return imp_io_pread_now(f, offset, buf, n_bytes);
}

int imp_io_pread_now(imp_io_file *f, uint64_t offset, void *buf, size_t n_bytes)
{
    size_t done = 0;
    unsigned n_stalls = 0;
    int err = n_bytes ? IMP_IO_MORE : 0;
    while (err == IMP_IO_MORE) {
        size_t piece = n_bytes - done < IMP_IO_MAX_PIECE ? n_bytes - done : IMP_IO_MAX_PIECE;
        imp_io_verdict v = imp_io_verdict_on(IMP_IO_READ, f->name, offset + done, piece);
        int64_t result = imp_io_pread_once(f, offset + done, (unsigned char *)buf + done, piece, v);
        err = imp_io_advance(f, offset, n_bytes, &done, &n_stalls, result);
    }
    return err;
}

int imp_io_read(imp_io_file *f, uint64_t offset, void *buf, size_t n_bytes)
{
    if (imp_io_misaligned(f, offset, buf, n_bytes)) return imp_io_read_failed(f, offset, n_bytes, IMP_IO_MISALIGNED);
    int err = imp_io_pread_all(f, offset, buf, n_bytes);
    return err ? imp_io_read_failed(f, offset, n_bytes, err) : 0;
}

/* ---- writing a file as a whole */

struct imp_io_writer {
    imp_io *io;
    int at;           /* the directory that holds the file */
    int fd;           /* -1: not made yet */
    imp_io_bytes *memory; /* instead of these two, `last` and `tmp` */
    const char *name; /* whole, below the store's directory; in text */
    const char *last; /* its last part, in text */
    char *tmp;        /* the last part with ".tmp" */
    char text[];
};

/* What was made is closed; the file itself stays. */
static void writer_free(imp_io_writer *w)
{
    if (!w) return;
    if (w->fd >= 0) close(w->fd);
    if (w->at >= 0) close(w->at);
    imp_io_memory_close(w->io->memory, w->memory);
    imp_free(w->tmp);
    imp_free(w);
}

int imp_io_writer_new(imp_io *io, const char *name, imp_io_writer **out)
{
    int rc = 0, err;
    size_t name_bytes = strlen(name) + 1, last_bytes;
    *out = NULL;
    if (io->readonly) return imp_fail(IMP_E_PERM, "%s is open for reading only", io->dir);
    imp_io_writer *w = imp_calloc(1, sizeof *w + name_bytes);
    if (!w) return imp_fail(IMP_E_NOMEM, "no memory to write %s", name);
    w->io = io;
    w->at = w->fd = -1;
    w->name = memcpy(w->text, name, name_bytes);
    if (io->memory) {
        err = imp_io_verdict_on(IMP_IO_OPEN, w->name, 0, 0).err;
        if (err == 0 && !(w->memory = imp_io_bytes_new(name))) err = ENOMEM;
        if (err) {
            rc = imp_fail_errno(err, "can't make %s/%s", io->dir, name);
            goto out;
        }
        *out = w;
        w = NULL;
        goto out;
    }
    err = open_parent(io, w->name, &w->at, &w->last);
    if (err) {
        rc = imp_fail_errno(err, "can't make %s/%s", io->dir, name);
        goto out;
    }
    last_bytes = strlen(w->last);
    w->tmp = imp_malloc(last_bytes + sizeof ".tmp");
    if (!w->tmp) {
        rc = imp_fail(IMP_E_NOMEM, "no memory to write %s", name);
        goto out;
    }
    memcpy(w->tmp, w->last, last_bytes);
    memcpy(w->tmp + last_bytes, ".tmp", sizeof ".tmp");

    err = imp_io_verdict_on(IMP_IO_OPEN, w->name, 0, 0).err;
    if (err == 0) {
        w->fd = openat(w->at, w->tmp, O_CREAT | O_EXCL | O_NOFOLLOW | O_WRONLY | O_CLOEXEC, 0600);
        if (w->fd < 0) err = errno;
    }
    /* Made without O_DIRECT and switched over: a file system that refuses it would leave the file behind otherwise. */
    if (err == 0 && io->direct) {
        int flags = fcntl(w->fd, F_GETFL);
        if (flags < 0 || (fcntl(w->fd, F_SETFL, flags | O_DIRECT) != 0 && errno != EINVAL)) err = errno;
    }
    if (err == 0 && fchmod(w->fd, 0600) != 0) err = errno;
    if (err) {
        if (w->fd >= 0) unlinkat(w->at, w->tmp, 0);
        rc = imp_fail_errno(err, "can't make %s/%s.tmp", io->dir, name);
        goto out;
    }
    *out = w;
    w = NULL;
out:
    writer_free(w);
    return rc;
}

/* One pwrite, faults included. Bytes, or a negative errno. */
static int64_t pwrite_once(imp_io_writer *w, uint64_t offset, const void *buf, size_t n_bytes)
{
    imp_io_verdict v = imp_io_verdict_on(IMP_IO_WRITE, w->name, offset, n_bytes);
    if (v.err) return -v.err;
    n_bytes = imp_io_shortened(n_bytes, v.max_bytes, w->io->direct ? w->io->alignment : 1);
    void *flipped = NULL;
    if (v.flip_bit >= 0 && n_bytes) {
        flipped = imp_aligned(w->io->alignment, n_bytes);
        if (!flipped) return -ENOMEM;
        imp_io_flip(memcpy(flipped, buf, n_bytes), n_bytes, v.flip_bit);
        buf = flipped;
    }
    ssize_t put = (ssize_t)n_bytes;
    int err = 0;
    if (w->memory) {
        err = imp_io_bytes_write(w->memory, (size_t)offset, buf, n_bytes);
    } else {
        put = pwrite(w->fd, buf, n_bytes, (off_t)offset);
        if (put < 0) err = errno;
        else atomic_fetch_add_explicit(&w->io->bytes_written, (uint64_t)put, memory_order_relaxed);
    }
    imp_free(flipped);
    return err ? -err : put;
}

int imp_io_write(imp_io_writer *w, uint64_t offset, const void *buf, size_t n_bytes)
{
    uint64_t mask = w->io->alignment - 1;
    if (((offset | (uintptr_t)buf | n_bytes) & mask) != 0) {
        return imp_fail(IMP_E_ARG, "%s/%s: a write of %zu bytes at %llu isn't aligned to %u", w->io->dir, w->name,
                        n_bytes, (unsigned long long)offset, (unsigned)w->io->alignment);
    }
    size_t done = 0;
    unsigned n_stalls = 0;
    int err = 0;
    while (done < n_bytes && err == 0) {
        size_t piece = n_bytes - done < IMP_IO_MAX_PIECE ? n_bytes - done : IMP_IO_MAX_PIECE;
        int64_t put = pwrite_once(w, offset + done, (const unsigned char *)buf + done, piece);
        size_t whole = put > 0 ? (done + (size_t)put) & ~(size_t)mask : done;
        if (put < 0 && put != -EINTR && put != -EAGAIN) {
            err = (int)-put;
        } else if (whole == done) {
            /* A full disk may take part of a block; asked again for the rest it says so. */
            if (++n_stalls > IMP_IO_MAX_STALLS) err = put < 0 ? (int)-put : EIO;
        } else {
            n_stalls = 0;
            done = whole;
        }
    }
    if (err == 0) return 0;
    return imp_fail_errno(err, "%s/%s.tmp: writing %zu bytes at %llu", w->io->dir, w->name, n_bytes,
                          (unsigned long long)offset);
}

static int sync_fd(int fd, bool data_only, const char *name)
{
    int err = imp_io_verdict_on(IMP_IO_FSYNC, name, 0, 0).err;
    if (err) return err;
    int rc;
    do rc = data_only ? fdatasync(fd) : fsync(fd);
    while (rc != 0 && errno == EINTR);
    return rc != 0 ? errno : 0;
}

static int publish_in_memory(imp_io_writer *w)
{
    int err = imp_io_verdict_on(IMP_IO_RENAME, w->name, 0, 0).err;
    int rc = err ? imp_fail_errno(err, "renaming %s/%s", w->io->dir, w->name) : 0;
    if (!err) {
        imp_io_memory_publish(w->io->memory, w->memory);
        w->memory = NULL; /* its name's now */
    }
    writer_free(w);
    return rc;
}

int imp_io_writer_publish(imp_io_writer *w)
{
    if (w->memory) return publish_in_memory(w);
    const char *what = "syncing", *left = w->tmp;
    char parent[sizeof((imp_io_event *)0)->name];
    snprintf(parent, sizeof parent, "%.*s", (int)(w->last - w->name), w->name); /* ends in '/', or is "" */
    int rc = 0, err = sync_fd(w->fd, true, w->name);
    if (err == 0) {
        what = "renaming";
        err = imp_io_verdict_on(IMP_IO_RENAME, w->name, 0, 0).err;
        if (err == 0 && renameat(w->at, w->tmp, w->at, w->last) != 0) err = errno;
    }
    if (err == 0) {
        what = "syncing the directory of";
        left = w->last;
        err = sync_fd(w->at, false, *parent ? parent : "/");
    }
    if (err) {
        unlinkat(w->at, left, 0);
        rc = imp_fail_errno(err, "%s %s/%s", what, w->io->dir, w->name);
    }
    writer_free(w);
    return rc;
}

void imp_io_writer_abort(imp_io_writer *w)
{
    if (!w) return;
    if (!w->memory) unlinkat(w->at, w->tmp, 0);
    writer_free(w);
}

/* ---- the directory */

int imp_io_unlink(imp_io *io, const char *name)
{
    if (io->readonly) return imp_fail(IMP_E_PERM, "%s is open for reading only", io->dir);
    int at = -1;
    const char *last;
    int err = imp_io_verdict_on(IMP_IO_UNLINK, name, 0, 0).err;
    if (err == 0 && io->memory) {
        err = imp_io_memory_unlink(io->memory, name) ? 0 : ENOENT;
    } else {
        if (err == 0) err = open_parent(io, name, &at, &last);
        if (err == 0 && unlinkat(at, last, 0) != 0) err = errno;
    }
    if (at >= 0) close(at);
    return err ? imp_fail_errno(err, "can't remove %s/%s", io->dir, name) : 0;
}

int imp_io_sync_dir(imp_io *io, const char *sub)
{
    if (io->memory) return 0;
    char name[sizeof((imp_io_event *)0)->name];
    snprintf(name, sizeof name, "%s/", sub ? sub : "");
    int fd, err = open_sub(io, sub, &fd);
    if (err == 0) {
        err = sync_fd(fd, false, name);
        close(fd);
    }
    return err ? imp_fail_errno(err, "syncing directory %s/%s", io->dir, sub ? sub : "") : 0;
}

int imp_io_list(imp_io *io, const char *sub, int (*fn)(const char *name, uint64_t disk_bytes, void *user), void *user)
{
    int fd = -1, rc = 0;
    DIR *dir = NULL;
    int err = imp_io_verdict_on(IMP_IO_LIST, sub ? sub : "", 0, 0).err;
    if (err == 0 && io->memory) return imp_io_memory_list(io->memory, sub ? sub : "", fn, user);
    if (err == 0) err = open_sub(io, sub, &fd);
    if (err == 0) {
        dir = fdopendir(fd);
        if (!dir) {
            err = errno;
            close(fd);
        }
    }
    while (err == 0 && rc == 0) {
        errno = 0;
        struct dirent *e = readdir(dir);
        if (!e) {
            err = errno;
            break;
        }
        struct stat st;
        if (fstatat(dirfd(dir), e->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
            if (errno != ENOENT) err = errno; /* removed meanwhile: not there */
        } else if (S_ISREG(st.st_mode)) {
            rc = fn(e->d_name, (uint64_t)st.st_blocks * 512, user);
        }
    }
    if (dir) closedir(dir);
    return err ? imp_fail_errno(err, "reading directory %s/%s", io->dir, sub ? sub : "") : rc;
}
