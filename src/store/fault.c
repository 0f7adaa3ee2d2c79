/* fault.c: what is wrong with a store now, and the ballast.
 *
 * A store on a full disk can't free its own room: whatever it removes is a change of the catalogue, which goes to
 * SQLite's log first. So a file of a fixed size lies in the directory for nothing but to be removed then. It is made
 * again when there is room for it. Several processes share it; one that finds it gone does without.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "store/store_internal.h"

/* ---- faults */

static const char *const names[IMP_N_FAULTS] = {"catalogue", "write", "read"};

/* What a disk or an operating system does, not what a caller or another process did. */
static bool is_fault(int status)
{
    return status == IMP_E_IO || status == IMP_E_FULL || status == IMP_E_PERM || status == IMP_E_NOTFOUND ||
           status == IMP_E_CORRUPT;
}

void imp_fault_note(imp_store *s, imp_fault_kind kind, int status)
{
    imp_fault *f = &s->faults[kind];
    if (!is_fault(status)) return;
    if (f->n == 0) f->since_s = imp_wall_s();
    f->n++;
    if (status != IMP_E_CORRUPT) s->count.io_errors++;
    f->what = names[kind];
    f->status = status;
    snprintf(f->line, sizeof f->line, "%s", imp_last_error());
    atomic_store_explicit(&s->faulty, true, memory_order_relaxed);
}

void imp_fault_over(imp_store *s, imp_fault_kind kind)
{
    imp_fault *f = &s->faults[kind];
    if (f->n == 0) return;
    imp_log(IMP_LOG_WARN, "%s: %s works again, after %llu failures in %lld s", s->dir, names[kind],
            (unsigned long long)f->n, (long long)(imp_wall_s() - f->since_s));
    *f = (imp_fault){0};
    bool any = false;
    for (int i = 0; i < IMP_N_FAULTS; i++) any = any || s->faults[i].n > 0;
    atomic_store_explicit(&s->faulty, any, memory_order_relaxed);
}

int imp_store_faults(imp_store *s, imp_fault *out)
{
    int n = 0;
    if (!s) return imp_fail(IMP_E_ARG, "imp_store_faults: no store");
    pthread_mutex_lock(&s->lock);
    for (int i = 0; i < IMP_N_FAULTS; i++) {
        if (s->faults[i].n == 0) continue;
        if (out) out[n] = s->faults[i];
        n++;
    }
    pthread_mutex_unlock(&s->lock);
    return n;
}

/* ---- ballast */

static const char ballast[] = "ballast";

enum { BALLAST_BYTES = 1 << 20, BALLAST_SHARE = 16 };

/* Where it would be much of the limit there is none. */
static uint64_t ballast_bytes(const imp_store *s)
{
    if (s->dir_fd < 0 || s->readonly) return 0;
    return imp_limit(s) / BALLAST_SHARE < BALLAST_BYTES ? 0 : BALLAST_BYTES;
}

static bool look(const imp_store *s, struct stat *st)
{
    return fstatat(s->dir_fd, ballast, st, AT_SYMLINK_NOFOLLOW) == 0;
}

uint64_t imp_ballast_missing(const imp_store *s)
{
    struct stat st;
    uint64_t want = ballast_bytes(s);
    return want > 0 && look(s, &st) ? 0 : want;
}

bool imp_ballast_give(imp_store *s)
{
    struct stat st;
    if (s->dir_fd < 0 || s->readonly || !look(s, &st) || st.st_blocks == 0) return false;
    if (unlinkat(s->dir_fd, ballast, 0) != 0) return false;
    atomic_store_explicit(&s->may_ballast, true, memory_order_relaxed);
    imp_log(IMP_LOG_WARN, "%s: the disk is full; %lld bytes of ballast are given up to work on it", s->dir,
            (long long)st.st_blocks * 512);
    return true;
}

/* Room for it under the limit? The next entry makes some otherwise. */
static bool fits(imp_store *s, uint64_t n_bytes)
{
    uint64_t other = imp_dir_counted_bytes(s);
    pthread_mutex_lock(&s->lock);
    bool yes = s->forest.seg_bytes + other + n_bytes <= imp_limit(s);
    pthread_mutex_unlock(&s->lock);
    return yes;
}

void imp_ballast_take(imp_store *s)
{
    struct stat st;
    uint64_t want = ballast_bytes(s);
    if (s->dir_fd < 0 || s->readonly) return;
    bool there = look(s, &st);
    if (there && want == 0) (void)unlinkat(s->dir_fd, ballast, 0); /* made under a larger limit */
    /* A copied store's may have come without its blocks: copying leaves out what holds nothing. */
    bool thin = there && S_ISREG(st.st_mode) && (uint64_t)st.st_size >= want && (uint64_t)st.st_blocks * 512 < want;
    if (want == 0 || (there && !thin && (uint64_t)st.st_size >= want)) return;
    /* Who only looks, or removes something, doesn't know the limit: it may be too small for one. */
    if (!there && !atomic_load_explicit(&s->may_ballast, memory_order_relaxed)) return;
    if (!fits(s, want)) return;
    /* A shorter one is of a process that was killed as it made it, or of one that is at it: that one loses it. */
    if (there && !thin) (void)unlinkat(s->dir_fd, ballast, 0);
    int fd = openat(s->dir_fd, ballast, O_WRONLY | (thin ? 0 : O_CREAT | O_EXCL) | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) return;
    int err;
    do err = posix_fallocate(fd, 0, (off_t)want);
    while (err == EINTR);
    if (err == 0 && fchmod(fd, 0600) != 0) err = errno;
    close(fd);
    if (err) (void)unlinkat(s->dir_fd, ballast, 0);
}
