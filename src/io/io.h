/* io.h: the only door to KV on disk. Above it nobody calls open, pread or io_uring; tests put a fault-injecting twin
 * behind the same functions.
 *
 *   imp_io        how this process does I/O in one directory: mode, alignment, rate limit. Thread-safe.
 *   imp_io_file   an open file. Thread-safe for reads. An open file is a lease: its bytes stay when it is unlinked.
 *   imp_io_queue  reads in flight and their buffers; one thread at a time, no lock on the way (io_uring: a ring of its
 *                 own; threads: a small pool of its own).
 *
 * With IMP_STORE_MEMORY the files are bytes in memory, and nothing touches a disk. All else is the same: names, faults,
 * an open file as a lease.
 */
#ifndef IMP_IO_IO_H
#define IMP_IO_IO_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"

typedef struct imp_io imp_io;
typedef struct imp_io_file imp_io_file;
typedef struct imp_io_queue imp_io_queue;

/* Try out in `dir` what is allowed (O_DIRECT and its alignment, io_uring) and settle on a mode. Makes no lasting file.
 * flags: IMP_STORE_NO_DIRECT, IMP_STORE_READONLY; IMP_STORE_MEMORY: no directory is looked at, `dir` is only a name for
 * messages, and the rest has no meaning. */
int imp_io_new(const char *dir, imp_io_mode mode, unsigned flags, uint64_t read_bytes_per_s, imp_io **out);
void imp_io_free(imp_io *io);
/* Go on in the directory `fd`, which another one was put in the place of; files that are open stay so. Threads may be
 * at work. */
int imp_io_use_dir(imp_io *io, int fd);
const char *imp_io_describe(const imp_io *io); /* "io_uring, O_DIRECT, registered buffers"; static storage */
uint32_t imp_io_alignment(const imp_io *io);   /* 512 or 4096: of offsets, lengths and memory. A file made with a
                                                  smaller one than this is read through the page cache */
bool imp_io_in_memory(const imp_io *io);

/* How long somebody waits for reads of a queue none of which comes back; 0: for ever (so it is at first). Set it before
 * any queue is made. What is waited for because of the rate limit doesn't count. */
void imp_io_set_deadline(imp_io *io, uint64_t deadline_ns);
/* Where imp_io_read() in this thread leaves word until when (imp_now_ns) the rate limit holds it back, before it waits;
 * NULL: nowhere. Returns where it did before. */
atomic_uint_least64_t *imp_io_tell_limit(atomic_uint_least64_t *until_ns);
/* Raise it to `ns`, unless it is larger. */
void imp_io_raise(atomic_uint_least64_t *until_ns, uint64_t ns);
/* Reads that were given up haven't come back yet: the device, or the way to it, hangs. Others had better not wait for
 * it. No wait, and one look at a counter as long as there are none. */
bool imp_io_hung(imp_io *io);
uint64_t imp_io_bytes_read(const imp_io *io); /* what was read and written in memory isn't counted */
uint64_t imp_io_bytes_written(const imp_io *io);

/* IMP_IO_VIRTUAL: its clock. 0, and nothing, with other modes. */
uint64_t imp_io_virtual_ns(const imp_io *io);
void imp_io_virtual_pass(imp_io *io, uint64_t until_ns);

/* `name` is relative to the directory ("segments/ab.seg"). IMP_E_NOTFOUND, IMP_E_PERM, IMP_E_IO. Never follows a
 * symbolic link in the last part; IMP_E_IO if it isn't a regular file. `file_alignment` is what its offsets keep to. */
int imp_io_open(imp_io *io, const char *name, uint32_t file_alignment, imp_io_file **out);
void imp_io_close(imp_io_file *file);
uint64_t imp_io_file_bytes(const imp_io_file *file);

/* The file's bytes from `offset` on, as long as it is open, where it is in memory: no read is needed. NULL: it is on
 * disk, or ends before `offset` + `n_bytes`. */
const void *imp_io_file_at(const imp_io_file *file, uint64_t offset, size_t n_bytes);

/* One read, now. Offset, length and `buf` aligned. A short read is IMP_E_IO. */
int imp_io_read(imp_io_file *file, uint64_t offset, void *buf, size_t n_bytes);

/* ---- reads in flight */

/* One read. The owner keeps it in place until `done`. */
typedef struct imp_io_op {
    imp_io_file *file;
    uint64_t offset;
    void *buf;        /* inside the queue's arena, aligned */
    size_t n_bytes;   /* aligned */
    int status;       /* once done: 0 or IMP_E_... */
    bool done;
    void *user;       /* for the owner */
    struct imp_io_op *next; /* for the queue */
} imp_io_op;

/* `depth` reads at a time go to the device; more wait inside the queue in order. `arena_bytes` of buffers, registered
 * where allowed (else plain, logged once). */
int imp_io_queue_new(imp_io *io, unsigned depth, size_t arena_bytes, imp_io_queue **out);
void *imp_io_queue_arena(imp_io_queue *q, size_t *n_bytes);
int imp_io_queue_grow(imp_io_queue *q, size_t arena_bytes); /* only with nothing in flight; buffers move, with what is
                                                               in them */

void imp_io_submit(imp_io_queue *q, imp_io_op *op); /* never fails: trouble shows in op->status */
void imp_io_kick(imp_io_queue *q);                  /* pass what was submitted to the device */
void imp_io_poll(imp_io_queue *q);                  /* take in what is done, without waiting; passes on what waited */
void imp_io_wait(imp_io_queue *q, imp_io_op *op);   /* until op is done, which it is after the deadline at the latest */
/* What hasn't started is dropped (status IMP_E_BUSY), the rest awaited; all are done. */
void imp_io_cancel_all(imp_io_queue *q);
/* A wait passed the deadline. All reads were ended then (IMP_E_IO), and those to come end at once: free the queue. */
bool imp_io_queue_hung(const imp_io_queue *q);
/* As cancel_all, then frees. Buffers that a device may still write into are kept until it has: imp_io_hung() looks. */
void imp_io_queue_free(imp_io_queue *q);

/* ---- writing a file as a whole */

typedef struct imp_io_writer imp_io_writer;

/* Make "<name>.tmp" (mode 0600, O_EXCL). Writes go around the page cache where allowed. */
int imp_io_writer_new(imp_io *io, const char *name, imp_io_writer **out);
/* Aligned offset, length and memory. */
int imp_io_write(imp_io_writer *w, uint64_t offset, const void *buf, size_t n_bytes);
/* fdatasync, rename to `name`, sync the directory; frees `w` in any case. On failure no file is left. */
int imp_io_writer_publish(imp_io_writer *w);
void imp_io_writer_abort(imp_io_writer *w);

/* ---- the directory */

int imp_io_unlink(imp_io *io, const char *name); /* IMP_E_NOTFOUND if it isn't there */
int imp_io_sync_dir(imp_io *io, const char *sub);
int imp_io_list(imp_io *io, const char *sub, int (*fn)(const char *name, uint64_t disk_bytes, void *user), void *user);

/* ---- tests: faults. A process-wide script; see io_fault.h. */

#endif
