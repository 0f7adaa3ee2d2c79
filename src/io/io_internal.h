/* io_internal.h: what the files of src/io share.
 *
 *   io.c             the directory, files, reads that happen at once, the writer
 *   limit.c          the token bucket
 *   queue.c          reads in flight: order, depth, retries, deadline; the same for all ways to the device
 *   hung.c           queues whose reads didn't come back in time
 *   queue_uring.c    one way: a ring
 *   queue_threads.c  the other: pread on threads
 *   queue_virtual.c  a third, for simulations: pread at once, done when a clock of its own says
 *   memory.c         the files of a store without a directory
 *   io_fault.c       the faults of tests
 */
#ifndef IMP_IO_IO_INTERNAL_H
#define IMP_IO_IO_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "io/io.h"
#include "io/io_fault.h"
#include "io/memory.h"

/* ---- rate limit */

/* A bucket of tokens as a schedule: `due_ns` is when the device would be done with everything handed out so far. */
typedef struct imp_io_limit {
    uint64_t bytes_per_s; /* 0: no limit */
    uint64_t burst_ns;    /* how far reads may run ahead of the schedule */
    atomic_uint_fast64_t due_ns;
    atomic_uint_fast64_t bytes; /* handed out */
} imp_io_limit;

void imp_io_limit_init(imp_io_limit *l, uint64_t bytes_per_s);
/* Take tokens for a read of n_bytes. Returns the time (imp_now_ns) from which on it may start; 0: at once. */
uint64_t imp_io_limit_reserve(imp_io_limit *l, uint64_t now_ns, uint64_t n_bytes);
void imp_io_sleep_until(uint64_t when_ns);

/* ---- the directory and its files */

typedef enum imp_io_buffers { IMP_IO_PLAIN, IMP_IO_REGISTERED } imp_io_buffers;

/* All but the atomics is set by imp_io_new() and never changes. Relaxed: they are counters and hints, nothing else is
 * read because of them. */
struct imp_io {
    int dir_fd;
    char *dir;
    imp_io_memory *memory; /* instead of a directory; NULL: on disk */
    bool uring, direct, readonly, must_uring, simulated;
    uint32_t alignment;
    imp_io_limit limit;
    atomic_int buffers; /* imp_io_buffers: of the latest queue; before any, what a trial gave */
    atomic_bool said_plain, said_no_ring;
    atomic_uint_fast64_t bytes_read, bytes_written;
    atomic_uint_fast64_t virtual_ns; /* simulated: the time, never falling */

    uint64_t deadline_ns; /* 0: none */
    atomic_uint n_hung;   /* queues with reads that were given up and haven't come back */
    pthread_mutex_t graves_lock; /* guards the next */
    imp_io_queue *graves; /* those of them that their users have left */
    imp_io *next_lost;
};

struct imp_io_file {
    imp_io *io;
    atomic_uint n_holds; /* who opened it, and reads that were given up */
    int fd;
    imp_io_bytes *memory; /* instead of fd */
    bool direct;
    uint64_t bytes; /* when it was opened */
    char name[];
};

/* Results of a read beside 0 and errnos: the file ended early; there is more to read; it wasn't aligned. */
enum { IMP_IO_EOF = -1, IMP_IO_MORE = -2, IMP_IO_MISALIGNED = -3 };

/* A piece is what one system call is asked for: Linux moves 2 GiB less a page at most. Retries in a row that move
 * nothing end at some point, so that a device which answers EAGAIN for ever is an error and no endless loop. */
enum { IMP_IO_MAX_PIECE = 1 << 30, IMP_IO_MAX_STALLS = 1000 };

/* Reads that come back in part go on at a multiple of this (of the alignment, with O_DIRECT). */
enum { IMP_IO_BLOCK = 512 };

/* Set the last error for a failed read and return its status. `err`: an errno, IMP_IO_EOF, or
 * IMP_IO_MISALIGNED: the caller's mistake, where an EINVAL is the device's. */
int imp_io_read_failed(const imp_io_file *file, uint64_t offset, size_t n_bytes, int err);
bool imp_io_misaligned(const imp_io_file *file, uint64_t offset, const void *buf, size_t n_bytes);
/* One piece of a read of n_bytes at `offset` came back with `result` (bytes or a negative errno), `*done` were there
 * before. 0: all is there. IMP_IO_MORE: go on at `*done`, which keeps to the alignment. Else an errno or IMP_IO_EOF. */
int imp_io_advance(const imp_io_file *file, uint64_t offset, size_t n_bytes, size_t *done, unsigned *n_stalls,
                   int64_t result);
/* Read it all in this thread, waiting for the rate limit first. Returns 0, an errno or IMP_IO_EOF. */
int imp_io_pread_all(imp_io_file *file, uint64_t offset, void *buf, size_t n_bytes);
/* The same without waiting. */
int imp_io_pread_now(imp_io_file *file, uint64_t offset, void *buf, size_t n_bytes);
/* One pread with the faults of `v`. Bytes, or a negative errno. */
int64_t imp_io_pread_once(imp_io_file *file, uint64_t offset, void *buf, size_t n_bytes, imp_io_verdict v);
/* Open until imp_io_close() was called once more. */
void imp_io_hold(imp_io_file *file);
/* What a fault leaves of n_bytes: no more than max_bytes, but aligned, and something unless max_bytes is 0. */
size_t imp_io_shortened(size_t n_bytes, size_t max_bytes, uint32_t alignment);

/* ---- reads in flight */

typedef struct imp_io_fifo {
    imp_io_op *head, *tail;
} imp_io_fifo;

/* A read that was started. What the device, or a thread that waits for it, goes by is here and not in the op: its owner
 * may give it up. A queue has as many as its depth. */
typedef struct imp_io_flight {
    imp_io_op *op; /* NULL: free, or given up */
    imp_io_file *file;
    uint64_t offset;
    void *buf;
    size_t n_bytes;
    uint64_t release_ns; /* the rate limit lets it start then; 0: at once */
    int err;             /* the way's, how it ended */
    bool given_up;
    struct imp_io_flight *next; /* in a list of the queue's or the way's */
} imp_io_flight;

typedef struct imp_io_flights {
    imp_io_flight *head, *tail;
} imp_io_flights;

void imp_io_flights_push(imp_io_flights *list, imp_io_flight *flight);
imp_io_flight *imp_io_flights_pop(imp_io_flights *list);

/* For reap: don't wait; wait however long it takes. */
#define IMP_IO_NO_WAIT 0
#define IMP_IO_FOR_EVER UINT64_MAX

/* One way to the device. Called only by the thread that uses the queue. */
typedef struct imp_io_way {
    int (*open)(imp_io_queue *q);
    void (*close)(imp_io_queue *q);
    void (*arena_in)(imp_io_queue *q);  /* q->arena is new */
    void (*arena_out)(imp_io_queue *q); /* and is about to go */
    bool (*start)(imp_io_queue *q, imp_io_flight *flight); /* false: not now */
    void (*flush)(imp_io_queue *q);                        /* what was started goes to the device */
    /* Flush, then take in what is done, waiting until something may have changed (a read is in flight), but not past
     * `until_ns` (imp_now_ns). */
    void (*reap)(imp_io_queue *q, uint64_t until_ns);
    void (*drop)(imp_io_queue *q); /* end what was started and can still be stopped, through imp_io_flight_dropped() */
} imp_io_way;

extern const imp_io_way imp_io_way_uring, imp_io_way_threads, imp_io_way_virtual;

struct imp_io_queue {
    imp_io *io;
    const imp_io_way *way;
    void *state; /* the way's */
    unsigned depth;
    unsigned n_in_flight; /* started and not done, those that were given up too */
    uint64_t n_ended;     /* so many came back or were sent again: it moves as long as the device does */
    uint64_t release_ns;  /* the latest of any flight */
    bool hung;
    unsigned n_stalls;    /* retries in a row that moved nothing */
    imp_io_fifo waiting;
    unsigned char *arena;
    size_t arena_bytes;
    imp_io_queue *next; /* among the graves */
    imp_io_flights free;
    imp_io_flight flights[]; /* [depth] */
};

/* A way reports the end of a read: 0, an errno, IMP_IO_EOF or IMP_IO_MISALIGNED. */
void imp_io_flight_done(imp_io_queue *q, imp_io_flight *flight, int err);
void imp_io_flight_dropped(imp_io_queue *q, imp_io_flight *flight);
/* Or that it must be started again, ahead of all that waits. */
void imp_io_flight_again(imp_io_queue *q, imp_io_flight *flight);
/* Ask the rate limit for a flight about to start. */
void imp_io_flight_reserve(imp_io_queue *q, imp_io_flight *flight);

/* ---- hung.c */

void imp_io_hung_init(imp_io *io);
/* A queue with reads that were given up, and without a user. */
void imp_io_bury(imp_io_queue *q);
/* True: `io` has none of these, and may be freed. False: it is kept, for its reads may still come back. */
bool imp_io_hung_end(imp_io *io);
/* Free a queue with nothing in flight. */
void imp_io_queue_destroy(imp_io_queue *q);

/* Is io_uring there? 0, or the errno it is refused with. `*buffers`: whether memory can be registered. */
int imp_io_uring_try(imp_io_buffers *buffers);

#endif
