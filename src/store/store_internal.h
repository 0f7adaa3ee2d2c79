/* store_internal.h: what the files of this module share.
 *
 *   store.c        open, close, options, counters        dir.c       the directory, its locks, leftovers
 *   changes.c   the catalogue's life: open, damaged, rebuilt; changes
 *   tree.c         the forest in memory, and reading it from the catalogue
 *   edit.c         edits of tree and catalogue together: add a run, split, remove
 *   match.c        the way along a prompt                segs.c      open segments
 *   errand.c       what may wait for the disk, for a caller who doesn't wait for ever
 *   commit.c       staging                               writer.c    the thread that packs and publishes
 *   pack.c         rows into the bytes of a segment
 *   evict.c        the limits                            rebuild.c   the catalogue made again from the segments
 *   verify.c       every byte checked                    inspect.c   list, stats, remove, pin, gc
 *   space.c        what must be equal                    fingerprint.c
 *   history.c      what was found important              bases.c     the sketches' bases
 *   reorder.c      segments written anew in another order
 *
 * Two mutexes, in this order:
 *   cat_lock  the catalogue's connection, and changes to it from begin to commit
 *   lock      the forest, the open segments, the queue of the writer, the counters
 * then those of the histories' table and of one record (history.c), or of the bases' table (bases.c), or of the errands
 * (errand.c): taken last, with those above or without, and never held while the catalogue or a file is used.
 *
 * `lock` isn't held while a disk is waited for, so that nobody who wants to look at memory stands behind a disk that
 * hangs. Whoever holds both lets go of it for as long as SQLite works (imp_enter()), and for the commit; the forest is
 * changed with both held, so it stays as it is meanwhile but for what matches note in it: leases, uses. What was chosen
 * by these has to be looked at again after each call on the catalogue.
 *
 * Invariants
 * S1  A node in the catalogue names a segment whose file was on disk, synced, before.
 * S2  A file in segments/ has a row, or a reservation of a live instance, from before it is made until after it is
 *     gone; whatever has neither is a leftover.
 * S3  The forest equals the catalogue as of `generation`, unless `reload` is set.
 * S4  What a match returns was checked against the segment's own header: the tokens, the space, what comes before.
 * S5  A segment that takes another's place (reorder.c) gives each token the bytes that the other one gave, and all nodes
 *     go over in one change.
 */
#ifndef IMP_STORE_STORE_INTERNAL_H
#define IMP_STORE_STORE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/hash.h"
#include "base/rng.h"
#include "base/status.h"
#include "crypt/crypt.h"
#include "radix/radix.h"
#include "store/catalogue.h"
#include "store/history.h"
#include "store/idmap.h"
#include "store/store.h"

/* ---- the forest */

typedef struct imp_tree {
    imp_hash128 space;
    char model_name[64];
    int64_t created_s;
    imp_radix *radix;
    size_t n_segs;
    uint64_t bytes; /* of its segments: evict.c's, while it makes room */
} imp_tree;

/* A segment's row, and what the nodes say about it. */
/* What only a segment's header says. */
typedef struct imp_seghead {
    uint64_t kv_bytes; /* of all its rows; 0: the header wasn't read yet */
    uint16_t chunk_tokens, probe_heads, sketch_bits;
    uint8_t order, rest;
    bool paired;
} imp_seghead;

typedef struct imp_segrow {
    uint64_t id;
    imp_hash128 space;
    uint64_t disk_bytes;
    imp_seghead head;
    uint32_t n_tokens;
    uint32_t n_nodes;
} imp_segrow;

typedef struct imp_forest {
    imp_tree *trees;
    size_t n_trees, trees_cap;
    size_t n_bare;       /* trees without segments: to be dropped by the next change */
    imp_idmap segs;      /* id -> imp_segrow */
    uint64_t seg_bytes;  /* sum of disk_bytes */
} imp_forest;

void imp_forest_free(imp_forest *f); /* leaves an empty one */
imp_tree *imp_forest_tree(imp_forest *f, imp_hash128 space);
int imp_forest_add_tree(imp_forest *f, const imp_cat_space *space);
/* Drop the trees that have no segment and no node, and of which `drop` says so. It may not use the forest. */
void imp_forest_drop_bare(imp_forest *f, bool (*drop)(const imp_tree *tree, void *user), void *user);
int imp_forest_add_seg(imp_forest *f, const imp_cat_segment *row); /* IMP_E_CORRUPT: it is in no space */
void imp_forest_remove_seg(imp_forest *f, uint64_t id);
imp_segrow *imp_forest_seg(const imp_forest *f, uint64_t id);
/* The node, and its tree if `tree` isn't NULL. NULL if there is none. */
imp_radix_node *imp_forest_node(imp_forest *f, uint64_t id, imp_tree **tree);
/* These keep the segments' node counts. Add: IMP_E_CORRUPT if the node doesn't fit in. */
int imp_forest_add_node(imp_forest *f, const imp_cat_node *row);
int imp_forest_split(imp_forest *f, imp_tree *tree, uint64_t id, uint32_t at, uint64_t new_id);
/* The node's rows are in another segment from now on, at the same tokens of it. */
int imp_forest_move_node(imp_forest *f, imp_radix_node *node, uint64_t segment);
/* A leaf. `*last` (may be NULL): its segment has no node left. */
int imp_forest_remove_node(imp_forest *f, imp_tree *tree, uint64_t id, bool *last);
size_t imp_forest_memory(const imp_forest *f);
/* The prompt up to and including the first `n` tokens of node `id`, in new memory. */
int imp_forest_prompt(imp_tree *tree, uint64_t id, uint32_t n, int32_t **tokens, size_t *n_tokens);

/* ---- open segments */

enum { IMP_SEG_BUCKETS = 256, IMP_SEG_IDLE_MAX = 64 };

typedef struct imp_seg_open {
    imp_seg seg; /* first: a pointer to it is a pointer to this */
    unsigned refs;
    bool dropped; /* not to be found any more; closed with the last reference */
    struct imp_seg_open *chain;        /* in its bucket */
    struct imp_seg_open *older, *newer; /* idle ones, by time */
} imp_seg_open;

typedef struct imp_seg_table {
    imp_seg_open *buckets[IMP_SEG_BUCKETS];
    imp_seg_open *oldest, *newest;
    size_t n_idle;
    imp_seg_open *retired; /* out of the table, to be closed once `lock` isn't held; by `chain` */
} imp_seg_table;

typedef struct imp_errand imp_errand; /* see below, errand.c */

/* ---- the writer's queue */

enum { IMP_JOB_QUERY_ROWS = 64 };

/* The last rows of a layer's queries. */
typedef struct imp_job_query {
    imp_query q;      /* packed, its rows belong to the job; n_rows 0: none came */
    float *rows;
    size_t first;     /* position of the first */
} imp_job_query;

typedef struct imp_job {
    struct imp_job *next;
    uint64_t number;
    imp_hash128 space;
    char model_name[64];
    imp_type type_k, type_v;
    uint32_t n_layers;
    imp_layer_shape *layers;
    int32_t *tokens;      /* [n_tokens] */
    size_t n_tokens, start; /* rows are of tokens [start, n_tokens) */
    size_t first_new;       /* the engine had rows of its own from here on */
    bool derived;
    unsigned char *rows;  /* [layer][K, V][n_tokens - start][row] */
    size_t *row_at;       /* [2 * n_layers]: where in `rows` a layer's K and V begin */
    size_t n_bytes;       /* counted against backlog_bytes */
    imp_turns *turns;     /* the space's */
    imp_job_query *queries; /* [n_layers]; NULL: none came */
    size_t query_bytes;   /* counted too */
    bool tried_scores;
    float *scores;        /* [n_layers][n_tokens - start], normalised; NULL: none */
    bool *scored;         /* [n_layers]: of which layers they are */
} imp_job;

void imp_job_free(imp_job *job);
size_t imp_job_row_bytes(const imp_job *job, uint32_t layer, imp_region region); /* as the engine keeps it */
/* The key rows of tokens [first, first + n) of the prompt, which are the job's. */
imp_key_rows imp_job_keys(const imp_job *job, uint32_t layer, size_t first, size_t n);

/* RoPE of a job whose space has ropes: tables for the last two kinds of layers. All zero is none. */
enum { IMP_JOB_ROPES = 2 };

typedef struct imp_job_rope_table {
    const imp_rope *rope;
    uint32_t head_dim;
    size_t first, n;
    imp_rope_table *table;
} imp_job_rope_table;

typedef struct imp_job_ropes {
    imp_job_rope_table tables[IMP_JOB_ROPES];
    unsigned next;
} imp_job_ropes;

/* `*out`: for positions [first, first + n) in a layer; NULL: its keys aren't turned. Valid until the next call. */
int imp_job_rope(imp_job_ropes *r, const imp_job *job, uint32_t layer, size_t first, size_t n,
                 const imp_rope_table **out);
void imp_job_ropes_free(imp_job_ropes *r);

/* ---- the store */

/* What can be wrong with a store. A kind is over when something of it has gone well again. */
typedef enum imp_fault_kind { IMP_FAULT_CATALOGUE, IMP_FAULT_WRITE, IMP_FAULT_READ, IMP_N_FAULTS } imp_fault_kind;

enum { IMP_USED_MAX = 4096, IMP_ASIDE_MAX = 64, IMP_SPARED_MAX = 64 };

/* A segment that couldn't be read though its header could. The catalogue keeps it; matches end before it, for a
 * while. */
typedef struct imp_aside {
    uint64_t segment; /* 0: none */
    uint64_t until_ns;
} imp_aside;

/* An entry that there was no room for, by its tokens up to where it would have gone on: refused at once for a while,
 * instead of being copied, queued and refused again with each request. */
typedef struct imp_refused {
    imp_hash128 before;
    size_t position; /* 0 with until_ns 0: none */
    size_t n_tokens; /* so many or more from there on */
    uint64_t until_ns;
} imp_refused;

enum { IMP_REFUSED_MAX = 16 };

struct imp_store {
    /* Never changed after open. */
    pid_t pid;
    char *dir; /* absolute, links resolved */
    int dir_fd, lock_fd, live_fd;
    uint64_t instance;
    imp_store_opts opts;
    bool own_chunks;          /* no size was named: a segment that is written anew keeps its own */
    bool readonly;
    imp_key *key; /* of what is encrypted on disk; NULL: nothing is */
    imp_io *io;

    pthread_mutex_t cat_lock;
    bool entered;             /* `lock` is held too: imp_enter() */
    imp_cat *cat;             /* NULL: it can't be had now, or is just being opened */
    uint64_t cat_retry_ns;    /* not before */
    uint64_t limit_owed;      /* a limit that isn't in the catalogue yet and goes there with the next change; 0: none */
    uint64_t log_failed_bytes; /* so large was the catalogue's log when it couldn't be emptied; 0: it could */
    uint64_t log_failed_ns;    /* and when that was */
    uint64_t *doomed;         /* segments to unlink once the change is durable */
    size_t n_doomed, doomed_cap;
    imp_hash128 *emptied;     /* spaces whose bases are to be removed then, or later */
    size_t n_emptied, emptied_cap, n_emptied_before; /* as the change under way began */
    const imp_hash128 *storing; /* the space of which the writer is storing an entry; NULL: of none. Written with `lock` */
    imp_rng rng;
    int64_t latest_s;         /* of the latest use; guarded by `lock` */
    int64_t uses_read_s;      /* when other processes' uses were last read */
    atomic_uint_least64_t limit_bytes; /* as it was named, or as the catalogue last had it; 0: neither. For imp_limit() */
    atomic_bool changing;     /* a change, or something that takes as long, is under way: written with cat_lock held;
                                 relaxed: only a hint, see match.c */
    uint64_t reserved;        /* the segment this instance has a reservation for; 0: none */
    uint64_t reorder_reserved; /* the same for a reorder */
    uint64_t reserved_before, reorder_reserved_before; /* the change under way, should it be rolled back */
    bool alone;               /* at open: `lock` is held alone, and whoever opens takes it down to shared */

    pthread_mutex_t lock;
    imp_forest forest;
    uint64_t generation;      /* of the catalogue as the forest has it */
    bool reload;              /* the forest can't be trusted: read all of it again */
    uint64_t epoch;           /* raised when the forest's nodes get other ids, at that moment */
    bool renumbered;          /* they will with the next whole read: the catalogue is another one */
    bool without;             /* the catalogue can't be had */
    uint64_t first_new;       /* nodes from this id on are of a change that isn't durable: others may get these ids */
    imp_seg_table open;
    imp_radix_step *steps;    /* room for a match */
    size_t steps_cap;
    uint64_t used[IMP_USED_MAX]; /* nodes used since the uses were last written */
    size_t n_used;
    imp_stats count;          /* only the counters */
    imp_aside aside[IMP_ASIDE_MAX]; /* the oldest gives way */
    size_t next_aside;
    bool full_logged;
    bool over_limit;          /* the writer's: its entry failed by the limit, and no disk is to blame */
    imp_fault faults[IMP_N_FAULTS];
    atomic_bool may_ballast;  /* a ballast may be made: the limit was named, or something was written; relaxed */
    atomic_bool faulty;       /* one of them is there; relaxed: only a hint */

    pthread_cond_t work, done;
    pthread_t writer;
    bool writer_runs, stop;
    imp_job *first_job, *last_job;
    uint64_t n_queued, n_done;
    bool reordering;          /* one at a time in a process; `done` tells when it is over */
    uint64_t reorder_next_ns; /* the next look of the background */
    uint64_t expiry_next_ns;  /* likewise for what is too old */
    uint64_t spared[IMP_SPARED_MAX]; /* segments that couldn't be written anew: not tried again in the background */
    size_t next_spared;
    size_t backlog;           /* bytes staged and queued */
    struct imp_errands *errands;     /* with a mutex of its own; set at open */
    atomic_uint_least64_t busy_ns;   /* when another process's lock was waited for last; relaxed: for deadlines */
    uint64_t disk_bytes;             /* as imp_store_stats() last found them */
    struct imp_histories *histories; /* with a mutex of its own; set at open */
    struct imp_bases_table *bases;   /* the same */
    imp_refused refused[IMP_REFUSED_MAX]; /* the oldest gives way */
    size_t next_refused;
    int flush_status;
    char flush_line[512];

    void *attached;
    void (*attached_free)(void *object);
    void (*attached_gone)(void *object, uint64_t segment);
};

/* The size limit in force. */
uint64_t imp_limit(const imp_store *s);

/* ---- dir.c */

enum { IMP_LOCK_NONE, IMP_LOCK_SHARED, IMP_LOCK_ALONE };

typedef enum imp_dir_made {
    IMP_DIR_STORE, /* it was a store already */
    IMP_DIR_EMPTY, /* there, and empty */
    IMP_DIR_NEW    /* not there */
} imp_dir_made;

/* Open or make the directory and what is in it. `*made`: what it was before, also where this fails. */
int imp_dir_open(imp_store *s, const char *dir, imp_dir_made *made);
void imp_dir_close(imp_store *s);
void imp_dir_unmake(imp_store *s, imp_dir_made made); /* after a failed open: take away what it made */
/* flock on `lock`; `wait` or IMP_E_BUSY. Without a lock file (a store opened for reading only) always 0. */
int imp_dir_lock(imp_store *s, int how, bool wait);
bool imp_dir_has_catalogue(const imp_store *s);
int imp_dir_live_make(imp_store *s);
/* Is the instance with this id a running one? Our own is. */
bool imp_dir_live(const imp_store *s, uint64_t own, uint64_t instance);
/* Remove the files in live/ that nobody holds; returns how many. */
size_t imp_dir_live_sweep(imp_store *s);
/* What counts against the limit besides segments/: everything as du counts, but the catalogue's log by its bound. */
uint64_t imp_dir_counted_bytes(const imp_store *s);
uint64_t imp_dir_bytes(imp_store *s, imp_errand *e); /* all, as du counts; `e`: gets on with it, or NULL */
/* With both mutexes held and no catalogue: where another directory is in the place of ours, or none, or its folders or
 * its lock are gone, go on in what is there, made again if need be. But an empty one on another file system is what
 * lies below a mount that is gone: IMP_E_IO. `*moved`: it was so, and what was stored is elsewhere. */
int imp_dir_follow(imp_store *s, bool *moved);
int imp_dir_folders(const imp_store *s); /* make those that are missing */
uint64_t imp_dir_log_bytes(const imp_store *s); /* of the catalogue's write-ahead log alone */

/* ---- fault.c */

/* With `lock` held: something failed with `status`, and imp_last_error() says what; or it has gone well. A status that
 * no disk is to blame for is passed over. */
void imp_fault_note(imp_store *s, imp_fault_kind kind, int status);
void imp_fault_over(imp_store *s, imp_fault_kind kind);
/* With no need of a mutex: remove the ballast, because the disk is full. False: there is none. */
bool imp_ballast_give(imp_store *s);
/* Make it again, if there is room. Takes `lock`. */
void imp_ballast_take(imp_store *s);
uint64_t imp_ballast_missing(const imp_store *s); /* bytes that it would take, where it isn't there */

/* Does the store want a key, and is s->key the right one? A new store with a key is marked as such. After
 * imp_dir_open(), before anything in it is read. */
int imp_dir_check_key(imp_store *s);

/* ---- changes.c: with cat_lock and lock held, unless it says otherwise */

/* Take `lock`, with cat_lock held, and let go of it. In between calls on the catalogue let go of it while SQLite works:
 * what was read of the forest may have got other leases and uses by then, and nothing else. */
void imp_enter(imp_store *s);
void imp_leave(imp_store *s);
void imp_lock_both(imp_store *s);
void imp_unlock_both(imp_store *s);
/* Take cat_lock for longer than a look: for whatever isn't a change and may wait for the disk, or for other processes.
 * As during a change, matches don't wait for it, but go on with the forest as it is. */
void imp_catalogue_take(imp_store *s);
void imp_catalogue_give(imp_store *s);
/* Take cat_lock for a look. False: this process is changing the catalogue, which may take as long as the disk does. */
bool imp_catalogue_look(imp_store *s);

/* Have a catalogue, if one can be had: open it, or rebuild it when it is lost or damaged and nobody else has it open.
 * 0, IMP_E_BUSY (run without), or a failure. `first`: at open, where waiting for a rebuild by another process is
 * right. */
int imp_catalogue_have(imp_store *s, bool first);
/* Alone: put another one, made from the segments, in the present one's place. */
int imp_catalogue_again(imp_store *s);
/* The same where others may have it open: then it stays as it is. */
int imp_catalogue_repair(imp_store *s);
/* A call on the catalogue answered `rc` < 0: count it, and if that means it is of no use, get another one. */
void imp_catalogue_failed(imp_store *s, int rc);
/* Bring the forest up to date, trying again to have a catalogue. 0, or IMP_E_BUSY etc.; it may still be used. */
int imp_catalogue_refresh(imp_store *s);
/* With cat_lock held: that would change nothing, as far as can be told without the disk. */
bool imp_catalogue_untouched(imp_store *s);

/* How large the catalogue's log may be between changes. That much counts against the limit, however large the log is at
 * a moment: whoever evicted because the log has grown would make it grow, and soon nothing else would be left. */
uint64_t imp_catalogue_log_bound(const imp_store *s);
/* With no mutex held: is the log so much larger that nothing should be added? It is emptied, if that can be. 0, or
 * IMP_E_BUSY: somebody has been reading it for long. */
int imp_catalogue_log_ready(imp_store *s);

/* Take both mutexes, begin a change and bring the forest up to date. On failure nothing is held. A limit that was named
 * goes into the catalogue with the first change, which opening a store makes (recover.c). */
int imp_change_begin(imp_store *s);
/* Commit (rc == 0) or roll back, let go of both mutexes, and unlink what became doomed. Returns rc or the commit's. */
int imp_change_end(imp_store *s, int rc);
int imp_change_doom(imp_store *s, uint64_t segment);
/* For the writer's thread, at the end of an entry (s->storing): if the space has no segment after all, or none any more,
 * its bases go. No mutex held; the last error stays. */
void imp_space_stored(imp_store *s, imp_hash128 space);

/* ---- tree.c: with both held */
int imp_forest_refresh(imp_store *s); /* reads what changed in s->cat */
int imp_forest_read_uses(imp_store *s, imp_forest *f);
/* The time of a use now. With `lock` held. A clock that was set back would make what is used from now on look older than
 * all before it: what was used later than now has been used just now then. */
int64_t imp_uses_now(imp_store *s);

/* ---- edit.c: inside a change */

/* Tokens [first, end) of a prompt, stored in `segment` from its token 0 on. */
typedef struct imp_run {
    imp_hash128 space;
    const int32_t *tokens;
    size_t first, end;
    uint64_t segment;
    bool derived;
    int64_t created_s;
} imp_run;

/* Make the tokens of `run` that aren't known yet a node (splitting what it leaves half-way, replacing derived nodes
 * by an exact one). `*node`: its id, or 0 if all is known. IMP_E_STALE: the tokens before it aren't there. */
int imp_edit_add(imp_store *s, const imp_run *run, uint64_t *node);
int imp_edit_split(imp_store *s, imp_tree *tree, uint64_t id, uint32_t at, uint64_t *lower);
/* A leaf, and its segment with the last node. */
int imp_edit_remove_leaf(imp_store *s, imp_tree *tree, uint64_t id);
/* A node and everything below it. `*n_removed` may be NULL. */
int imp_edit_remove(imp_store *s, imp_tree *tree, uint64_t id, uint64_t *n_removed);
/* The deepest `most` of them. *all: that was all of them, the node itself included. */
int imp_edit_remove_some(imp_store *s, imp_tree *tree, uint64_t id, size_t most, bool *all);
/* Drop the nodes of `segment` from its token `from` on, with what is below. `*n_removed`: nodes. */
int imp_edit_drop(imp_store *s, uint64_t segment, uint32_t from, uint64_t *n_removed);
/* Segment `to` is in the place of `from`: all nodes of that go over, and `from` goes. *moved false: there is no
 * `from`, or its nodes hold tokens that `to` hasn't; nothing changed. */
int imp_edit_replace(imp_store *s, uint64_t from, const imp_cat_segment *to, bool *moved);
int imp_edit_unreserve(imp_store *s); /* what this instance has reserved, if anything */
int imp_edit_pin(imp_store *s, imp_tree *tree, imp_radix_node *node, bool pinned);
/* Write the uses since last time. */
int imp_edit_uses(imp_store *s);

/* With `lock` held. The steps along the tokens; they are in s->steps. */
int imp_steps(imp_store *s, imp_tree *tree, const int32_t *tokens, size_t n_tokens, bool exact_only, size_t *n_steps,
              size_t *n_matched);

/* Drop as imp_edit_drop(), in a change of its own (without one where the store is read-only or the catalogue can't be
 * had: then only this process forgets). Takes the mutexes. Logs `what`; NULL: the caller has told. */
void imp_drop(imp_store *s, uint64_t segment, uint32_t from, const char *what);

/* ---- match.c */

/* Take `lock`, with the forest as fresh as it can be had without waiting for this process's own change. */
void imp_lock_fresh(imp_store *s);
/* The same, waiting for it: for whoever found that the forest doesn't fit the files. */
void imp_lock_sure(imp_store *s);
/* The same as imp_lock_fresh(), but no longer than the read deadline; after that with the forest as it is. */
void imp_lock_in_time(imp_store *s);

/* ---- errand.c: what may wait for the disk is done by a thread of the store's, and whoever asked for it waits no
 * longer than the read deadline */

/* The first member of a struct of its own, allocated as one block: late, it outlives its caller. */
struct imp_errand {
    int (*run)(imp_store *s, imp_errand *e);
    void (*give_up)(imp_store *s, imp_errand *e); /* late: give back what the caller or run() took. NULL: nothing */
    const char *what;                             /* for the log: "looking for a prompt" */
    bool needed;                                  /* done also when nobody waits for it any more */
    int status;                                   /* what run() returned */
    /* errand.c's */
    imp_errand *next;
    bool begun;
    atomic_uint_least64_t from_ns; /* since when it may be waited for: begun, got on, or let go by the rate limit */
    enum { IMP_ERRAND_AWAITED, IMP_ERRAND_DONE, IMP_ERRAND_LATE, IMP_ERRAND_SENT } state;
    char line[IMP_LINE_BYTES];
};

int imp_errands_new(imp_store *s);
void imp_errands_free(imp_store *s);
/* May calls stand on a disk, and is there a deadline for it? */
bool imp_errands_bounded(const imp_store *s);
/* No mutex held. True: it has been run (right here, where calls aren't bounded), and last error and `e` are the
 * caller's. False: it is late, which was counted and logged; `e` isn't the caller's any more. */
bool imp_errand_do(imp_store *s, imp_errand *e);
/* From inside run(), in any thread: a part of it is done, and the deadline begins anew. */
void imp_errand_gets_on(imp_errand *e);
/* Nobody waits for it. True: `e` isn't the caller's any more. False: there is no need for that, or no thread. May be
 * called with `lock` held. */
bool imp_errand_send(imp_store *s, imp_errand *e);
/* At the end, with no call under way; waits for what isn't late. False: some don't come back; the last one to do so
 * closes the store by `close`. */
bool imp_errands_end(imp_store *s, void (*close)(imp_store *s));

/* ---- segs.c */

/* A segment with the basis of its sketches, one reference more: the one that is open, or opened now. `*fresh`: the
 * latter. `*n_read`: bytes read are added. Takes `lock`. */
int imp_segs_open(imp_store *s, uint64_t id, imp_seg **out, bool *fresh, uint64_t *n_read);
/* The smallest token of the segment, but not before `from`, that the chunk is about; UINT32_MAX: none. */
uint32_t imp_seg_chunk_token(const imp_seg *seg, imp_region region, uint32_t layer, uint32_t chunk, uint32_t from);
/* Open segments/<id>.seg and read its header and maps, checked against themselves and `id`, but not its basis.
 * `*n_read`: bytes. No mutex needed. */
int imp_seg_file_open(imp_store *s, uint64_t id, imp_seg *out, uint64_t *n_read);
void imp_seg_file_close(imp_seg *seg);
/* With `lock` held. No file is closed then where that could keep matches waiting. */
imp_seg *imp_segs_get(imp_store *s, uint64_t id);    /* one reference more, or NULL: not open */
/* The open one of this id, one reference more: `*seg` taken over and cleared; or another thread's, and `*seg` is still
 * the caller's, as it is with NULL: no memory. */
imp_seg *imp_segs_adopt(imp_store *s, imp_seg *seg);
void imp_segs_put(imp_store *s, imp_seg *seg);       /* one reference less */
void imp_segs_drop(imp_store *s, uint64_t id);       /* inside a change that removes its file; closed at its end */
void imp_segs_gone(imp_store *s, uint64_t id);       /* it has gone */
/* With no mutex held: close what was dropped. */
void imp_segs_sweep(imp_store *s);
void imp_segs_close(imp_store *s);
/* Note what only the header knows. With `lock` held; `row` may be NULL. */
void imp_segrow_note(imp_segrow *row, const imp_seg_layout *l);
/* The same for a segment that this process hasn't opened. Takes `lock`. */
int imp_segrow_see(imp_store *s, uint64_t id);

/* ---- history.c, besides history.h. Its table has a mutex, and each record one: taken in this order after the store's
 * two, and never held while the catalogue or a file is used. */

int imp_histories_new(imp_store *s);
void imp_histories_free(imp_store *s);
size_t imp_histories_dirty(imp_store *s); /* records that wait to be written */
/* Write them to the catalogue, in a few changes. No mutex held. Advisory: what fails is logged. */
void imp_histories_write(imp_store *s);
/* The segment was just written in the order that the record asks for: its news begin anew. */
void imp_history_settle(imp_history *h);

/* Inside a change, once the segment `to` has a row and as long as `from` has one: the record of segment `from` becomes
 * that of `to`, which holds the first `n_tokens` tokens of it, in memory and in the catalogue; its news begin anew.
 * Advisory: a failure only loses it. No record: nothing happens. */
void imp_history_hand_over(imp_store *s, uint64_t from, uint64_t to, uint32_t n_tokens);
/* Segments whose record in memory has at least `least` news, those with the most first: how many were written to
 * out[max] (256 at most). May be called with `lock` held or without. */
size_t imp_history_with_news(imp_store *s, uint32_t least, uint64_t *out, size_t max);

/* ---- bases.c: bases/<space>.basis. Its table has a mutex of its own, taken last. */

int imp_bases_new(imp_store *s);
void imp_bases_free(imp_store *s);
/* The bases with id `id` of a space, from memory or from bases/; NULL if they can't be had or aren't sound. `*n_read`:
 * bytes read are added. No mutex held. To be given back by imp_bases_drop(), as what imp_bases_for() returns. */
const imp_bases *imp_bases_get(imp_store *s, imp_hash128 space, uint64_t id, uint64_t *n_read);
/* For the writer's thread, no mutex held: the bases by which new segments of the job's space get sketches; learned
 * from its rows and queries, and written, where the space has none. NULL: none can be had, and the segments go
 * without. */
const imp_bases *imp_bases_for(imp_store *s, const imp_job *job);
/* NULL: nothing. May be called with `lock` held. */
void imp_bases_drop(imp_store *s, const imp_bases *bases);
/* A segment is about to name them: are they in the space's file? They aren't if they went with its last segment, or others
 * came into their place. Inside a change, with `lock` held. */
bool imp_bases_present(imp_store *s, imp_hash128 space, const imp_bases *bases);
/* The space has gone. With `lock` held, or not. */
void imp_bases_forget(imp_store *s, imp_hash128 space);
/* Remove its file, too. Inside a change of the catalogue, but without `lock`; what can't be removed is a leftover. */
void imp_bases_remove(imp_store *s, imp_hash128 space);
/* Do those of several spaces take more memory than they should, so that idle segments are better closed? Cheap; with
 * `lock` held, or not. */
bool imp_bases_heavy(imp_store *s);
size_t imp_bases_memory(imp_store *s);
/* How much that should be; else an eighth of the host tier, and 64 MiB at least. For tests; before the store is used. */
void imp_bases_bound(imp_store *s, size_t n_bytes);
/* As du counts: bases/ and what is in it. For imp_dir_counted_bytes(). */
uint64_t imp_bases_bytes(const imp_store *s);
/* Inside a change: remove the bases of spaces that have no segment any more, and what killed writers left. Files
 * younger than an hour stay, but with `young_too`: the space's first segment may be on its way. For recovery and gc.
 * `*n_files` and `*n_bytes` (may be NULL) are added to. */
void imp_bases_sweep(imp_store *s, bool young_too, uint64_t *n_files, uint64_t *n_bytes);
/* For verify: read every file in bases/ and call `fn` (may be NULL) for each that isn't sound, and with `remove`
 * remove it. No mutex held. `*n_found` is added to. */
int imp_bases_verify(imp_store *s, bool remove, void (*fn)(const imp_finding *finding, void *user), void *user,
                     int64_t *n_found);

/* ---- reorder.c: called by the writer's thread while it has nothing else to do */

/* With `lock` held: is it time to look for a segment that should be written anew? `*wait_ns`: if not, how long until it
 * may be; UINT64_MAX: never. */
bool imp_reorder_due(imp_store *s, uint64_t *wait_ns);
/* With no mutex held: write one segment anew, if one needs it. */
void imp_reorder_step(imp_store *s);
/* With no mutex held: write all segments anew that hold rows of evicted nodes, as long as there is room for copies. */
int imp_reorder_evicted(imp_store *s);

/* ---- pack.c: rows into the bytes of a segment */

/* The job's scores, once: exact H2O by the queries that came with it, in each layer normalised over the job's tokens.
 * Tokens that some query doesn't see (from the first query's position on) are left at the mean. Advisory. */
void imp_job_score(imp_store *s, imp_job *job);

/* Write the file of `l`, whose rows are the job's from its token l.first_token on, and publish it. `bases`: by which
 * its sketches are made; not used if it has none. */
int imp_pack_segment(imp_store *s, const imp_job *job, const imp_seg_layout *l, const imp_bases *bases);

/* ---- writer.c */

/* With `lock` held: was there no room for these tokens from `position` on a moment ago? */
bool imp_was_refused(imp_store *s, imp_hash128 space, const int32_t *tokens, size_t position, size_t n_tokens);
/* Takes `lock`: something was let go of, there may be room now. */
void imp_forget_refused(imp_store *s);
int imp_writer_start(imp_store *s);
void imp_writer_stop(imp_store *s); /* after writing what waits */

/* ---- evict.c: inside a change */

typedef struct imp_evicted {
    uint64_t nodes, bytes;
} imp_evicted;

/* Evict until `bytes` more fit under the limit, and what is too old. `keep` (0: none) and what is above it stay.
 * IMP_E_FULL if that isn't enough. */
int imp_evict_for(imp_store *s, uint64_t bytes, uint64_t keep, imp_evicted *out);
/* The same for a new entry of `space`, which has to fit into the share of that too. */
int imp_evict_for_entry(imp_store *s, imp_hash128 space, uint64_t bytes, uint64_t keep, imp_evicted *out);
/* Every space down to its share. IMP_E_FULL: one holds more that is pinned or in use. `*out` is added to. */
int imp_evict_shares(imp_store *s, imp_evicted *out);
/* Would `bytes` fit as it is? */
int imp_evict_not_needed(imp_store *s, uint64_t bytes, bool *fits);
void imp_count_evicted(imp_store *s, imp_evicted e); /* once the change is durable; takes `lock` */
/* With `lock` held: is it time to look for entries that are too old? `*wait_ns`: if not, how long until it is;
 * UINT64_MAX: never. */
bool imp_expiry_due(imp_store *s, uint64_t *wait_ns);
/* With no mutex held: remove them, and enforce limits that are smaller than when the store was open last. */
void imp_expire(imp_store *s);
int imp_evict_at_open(imp_store *s);

/* ---- recover.c and rebuild.c */

typedef struct imp_leftovers {
    uint64_t n_files, n_bytes; /* removed */
    uint64_t n_orphans;        /* whole segments that nothing refers to */
} imp_leftovers;

/* Remove what dead processes left. Takes the mutexes. Segments that are whole but have no row are counted, and removed
 * unless `keep_orphans`. */
int imp_recover(imp_store *s, bool keep_orphans, imp_leftovers *out);

/* Tell about files in segments/ that nothing refers to, and remove them if asked to. Leftovers aren't counted. */
int imp_strays(imp_store *s, bool remove, void (*fn)(const imp_finding *finding, void *user), void *user,
               int64_t *n_found);

/* What a killed rebuild left. Alone. */
void imp_rebuild_sweep(imp_store *s);
/* With the catalogue closed and the directory locked alone: write a new one from the segments' headers. */
int imp_rebuild(imp_store *s);

#endif
