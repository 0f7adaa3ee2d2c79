/* preload_faults.h: faults for what goes past the I/O seam: SQLite's files, and calls on directories. A library of system
 * calls that stands before libc's: linked first into a test program, or preloaded into one that runs no model.
 *
 * A rule acts on calls whose path begins with `prefix` and contains `name`. Preloaded, the rule is in the environment:
 * IMP_PRELOAD_PREFIX=/tmp/store, IMP_PRELOAD_RULE=write:3:ENOSPC (kind:nth[+]:what, where what is an errno or "short"),
 * IMP_PRELOAD_NAME=catalogue. IMP_PRELOAD_TOLD=file: as the program exits it gets a line "hits N", and one "kind N" for
 * each kind of call with how many matched; IMP_PRELOAD_FS=0x6969: see preload_fs(). Both do without a rule. */
#ifndef IMP_TEST_PRELOAD_FAULTS_H
#define IMP_TEST_PRELOAD_FAULTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum preload_kind {
    PRELOAD_ALL = 0, /* but locks: those aren't the disk's, and SQLite waits for them; and but closes */
    PRELOAD_OPEN,
    PRELOAD_READ,
    PRELOAD_WRITE,
    PRELOAD_SYNC,
    PRELOAD_TRUNCATE, /* and fallocate */
    PRELOAD_RENAME,
    PRELOAD_UNLINK,
    PRELOAD_MAKE, /* mkdir, mknod */
    PRELOAD_MAP,
    PRELOAD_LOCK, /* taken, not given back: flock, and fcntl's of byte ranges */
    PRELOAD_CLOSE, /* which can be held, and doesn't fail */
    PRELOAD_N_KINDS
} preload_kind;

/* Calls from now on are counted, and those below `prefix` may fail. NULL: no more. Both strings must stay. */
void preload_watch(const char *prefix, const char *name);
/* The nth matching call of this kind from now on, and with `stay` all later ones, fails with `err`; 0: a read or write
 * moves half of what it should, down to 512 bytes. nth 0: no rule. */
void preload_fail(preload_kind kind, uint64_t nth, bool stay, int err);
/* It stands there instead, until preload_release(), and is done then. */
void preload_hold(preload_kind kind, uint64_t nth);
void preload_release(void);
uint64_t preload_hits(void);
uint64_t preload_seen(void); /* calls that matched since then */
const char *preload_kind_name(preload_kind kind);

/* What fstatfs() says of files below the prefix is of this f_type. 0: the truth. */
void preload_fs(uint64_t type);

/* The wall clock of this process is off by so many seconds. */
void preload_clock(int64_t seconds);

/* ---- a log of what was done below the prefix, with the bytes that were written */

typedef enum preload_op { OP_WRITE, OP_TRUNCATE, OP_SYNC, OP_CREATE, OP_MKDIR, OP_RENAME, OP_UNLINK, OP_MARK } preload_op;

typedef struct preload_event {
    preload_op op;
    char path[256]; /* relative to the prefix; "" is the prefix itself */
    char to[256];   /* of a rename */
    uint64_t inode; /* of what `path` names */
    uint64_t offset, n_bytes; /* of a truncation: n_bytes is the new length; of a mark: what it was given */
    unsigned char *bytes;
} preload_event;

void preload_log_start(void);
void preload_log_mark(uint64_t value);
/* Ends it. The events are the caller's; free with preload_log_free(). */
preload_event *preload_log_end(size_t *n);
void preload_log_free(preload_event *events, size_t n);

#endif
