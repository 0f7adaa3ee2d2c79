/* io_fault.h: the fault-injecting twin of io.h, for tests. A process-wide script says which operations go wrong, and a
 * log says which took place.
 *
 * It is compiled in always: what the tests break is then the very code that ships. While no script is set it costs one
 * predictable branch on a flag per system call.
 *
 * An operation is one system call on a file of the store, or one read passed to io_uring; the rest of a short read or
 * write is an operation of its own. What imp_io_new() tries out is not counted. The read of a directory (list) is one
 * operation; so is the fsync of one, whose name then ends in '/'. A writer's create is an open.
 */
#ifndef IMP_IO_IO_FAULT_H
#define IMP_IO_IO_FAULT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum imp_io_kind {
    IMP_IO_ALL = 0, /* in a fault: any of the others */
    IMP_IO_OPEN,
    IMP_IO_READ,
    IMP_IO_WRITE,
    IMP_IO_FSYNC,
    IMP_IO_RENAME,
    IMP_IO_UNLINK,
    IMP_IO_LIST
} imp_io_kind;

typedef enum imp_io_action {
    IMP_IO_ERRNO = 0, /* fail with errno `value` instead of taking place */
    IMP_IO_SHORT,     /* a read or write of at most `value` bytes; 0: a read finds the end of the file */
    IMP_IO_FLIP,      /* a read or write with bit `value` (modulo its length) inverted */
    IMP_IO_EXIT,      /* _exit(`value`) just before it */
    IMP_IO_KILL,      /* SIGKILL to this process just before it */
    IMP_IO_DELAY,     /* wait `value` ns before it */
    IMP_IO_HANG,      /* a read takes `value` ns longer at the device: who asked for it isn't held up */
    IMP_IO_HOLD       /* stand before it until imp_io_fault_clear() */
} imp_io_action;

typedef struct imp_io_fault {
    imp_io_kind kind;
    uint64_t nth;     /* of the matching operations from now on, 1 = the next */
    bool stay;        /* and all later ones */
    imp_io_action action;
    uint64_t value;
    const char *name; /* only operations whose name contains this; NULL: all. Must outlive the script */
} imp_io_fault;

/* Add a rule. Several may act on one operation; of two that fail it the earlier one wins. Returns the rule's number, or
 * -1 when there are 16 already. */
int imp_io_fault_add(const imp_io_fault *fault);

/* The same from text, "kind:nth:what[:value]": "write:3:ENOSPC", "read:1+:short:512" (+ means stay), "all:7:kill",
 * "rename:1:exit:9", "read:2:flip:77", "fsync:1:delay:1000000", "read:1+:hang:2000000000", "open:1:hold". -1 if it
 * can't be understood. */
int imp_io_fault_parse(const char *text);

/* How often rule `rule` acted. */
uint64_t imp_io_fault_hits(int rule);

/* No rules, no log, nothing denied. */
void imp_io_fault_clear(void);

/* What this process shall find impossible, as in a container or on another file system. Set before imp_io_new(). */
#define IMP_IO_DENY_URING 1u     /* io_uring_setup: EPERM */
#define IMP_IO_DENY_DIRECT 2u    /* O_DIRECT: EINVAL */
#define IMP_IO_DENY_ALIGN_512 4u /* O_DIRECT below 4096 */
#define IMP_IO_DENY_REGISTER 8u  /* registering buffers: ENOMEM, as RLIMIT_MEMLOCK makes it */
#define IMP_IO_DENY_ENTER 16u    /* io_uring_enter with reads to submit: EIO, at any time */
#define IMP_IO_DENY_DIRECT_OPEN 32u /* a file that is opened with O_DIRECT: EINVAL, at any time */
void imp_io_fault_deny(unsigned what);

typedef struct imp_io_event {
    imp_io_kind kind;
    char name[112];
    uint64_t offset;
    uint64_t n_bytes;
    int err; /* the errno injected; 0: it took place */
} imp_io_event;

/* Keep the first `capacity` operations from now on. Memory comes from malloc(), so that a test which counts allocations
 * isn't disturbed. */
int imp_io_fault_log_start(size_t capacity);
/* What took place so far; `*n` may exceed the capacity, then the rest is missing. Read it with no I/O under way. */
const imp_io_event *imp_io_fault_log(size_t *n);
uint64_t imp_io_fault_count(imp_io_kind kind); /* operations of a kind since log_start */
const char *imp_io_kind_name(imp_io_kind kind);

/* ---- for src/io */

typedef struct imp_io_verdict {
    int err;          /* fail with it; 0: go on */
    size_t max_bytes; /* transfer no more than this */
    int64_t flip_bit; /* -1: none */
    uint64_t hang_ns;
} imp_io_verdict;

extern atomic_bool imp_io_fault_on;
imp_io_verdict imp_io_fault_check(imp_io_kind kind, const char *name, uint64_t offset, size_t n_bytes);
bool imp_io_fault_denied(unsigned what);

/* Relaxed: a script is set while no I/O is under way. */
static inline imp_io_verdict imp_io_verdict_on(imp_io_kind kind, const char *name, uint64_t offset, size_t n_bytes)
{
    if (__builtin_expect(atomic_load_explicit(&imp_io_fault_on, memory_order_relaxed), 0)) {
        return imp_io_fault_check(kind, name, offset, n_bytes);
    }
    return (imp_io_verdict){.err = 0, .max_bytes = SIZE_MAX, .flip_bit = -1};
}

static inline bool imp_io_denied(unsigned what)
{
    return __builtin_expect(atomic_load_explicit(&imp_io_fault_on, memory_order_relaxed), 0) &&
           imp_io_fault_denied(what);
}

static inline void imp_io_flip(void *bytes, size_t n_bytes, int64_t bit)
{
    if (n_bytes == 0) return;
    uint64_t i = (uint64_t)bit % ((uint64_t)n_bytes * 8);
    ((unsigned char *)bytes)[i / 8] ^= (unsigned char)(1u << i % 8);
}

#endif
