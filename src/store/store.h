/* store.h: what the session module sees of the store: paths through the tree, and open segments.
 *
 * Lock order: the catalogue's mutex, then the store's, then a history's or the bases' or the errands', then nothing.
 * File reads, fsyncs and whatever SQLite does happen outside the store's, so that a match never waits for the writer's
 * disk. */
#ifndef IMP_STORE_STORE_H
#define IMP_STORE_STORE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/segment.h"
#include "impress/impress.h"
#include "io/io.h"
#include "select/sketch.h"

/* The sketches' bases of a space, one for each layer: a file in bases/. Constant; stays as long as somebody holds it. */
typedef struct imp_bases {
    uint64_t id;
    uint32_t n_layers;
    imp_basis **layers; /* [n_layers] */
} imp_bases;

/* An open segment: its file, its checked header and its checked maps. Reference-counted; shared by loads. */
typedef struct imp_seg {
    imp_io_file *file;
    imp_seg_layout *layout;
    uint64_t *sums;
    imp_cipher *cipher;     /* of a sealed one's chunks; else NULL */
    uint64_t id;
    uint32_t *maps;         /* slot -> token, [n_layers][n_tokens]; NULL: slot s holds token s */
    const imp_bases *bases; /* held, of its sketches; NULL: it has none, or theirs can't be had: then they are of no use */
} imp_seg;

/* The map of a layer; NULL: slot s holds token s. */
static inline const uint32_t *imp_seg_map(const imp_seg *seg, uint32_t layer)
{
    return seg->maps ? seg->maps + (size_t)layer * imp_seg_layout_meta(seg->layout)->n_tokens : NULL;
}

/* A stretch of the matched prefix. */
typedef struct imp_span {
    imp_seg *seg;
    uint64_t node, segment;
    uint32_t segment_first; /* first token, in the segment */
    uint32_t n_tokens;
    uint64_t depth;         /* first token, in the prompt */
    bool derived;
    bool leased; /* the node is pinned */
} imp_span;

typedef struct imp_path {
    imp_span *spans; /* in the order of the prompt, without gaps */
    size_t n_spans;
    size_t n_tokens;
    uint64_t epoch; /* the store's: which numbering of nodes the spans use */
} imp_path;

/* The longest stored way along `tokens` inside `space`, its segments open and its nodes pinned in memory; touches their
 * use. Refreshes from the catalogue first if another process changed it. A segment that can't be opened or whose header
 * is bad is dropped with what lies below it, counted and logged, and the way ends before it. All that as long as it
 * takes no longer than the read deadline: else nothing is found, now and until what hangs has come back.
 * `*header_bytes`: bytes read for headers. */
int imp_store_match(imp_store *s, imp_hash128 space, const int32_t *tokens, size_t n_tokens, bool exact_only,
                    imp_path *out, uint64_t *header_bytes);
void imp_store_unpin(imp_store *s, imp_path *path);

/* A chunk of `seg` was bad: drop every node that uses the segment from the smallest token on that the chunk is about
 * (the first of all, for scales, sketches, probe keys and maps), and what lies below; count and log. `what` is the
 * line for the log. */
void imp_store_drop_bad(imp_store *s, const imp_seg *seg, imp_region region, uint32_t layer, uint32_t chunk,
                        const char *what);
/* A chunk of `seg` can't be read, tried twice: for some minutes, or until a verify, this process's matches end before
 * the segment; count and log. Nothing is dropped: the disk may come back. */
void imp_store_set_aside(imp_store *s, const imp_seg *seg, const char *what);
/* A read didn't come back in time: count and log. Until it does, matches find nothing (imp_store_hung()). */
void imp_store_read_late(imp_store *s, const char *what);

/* Something was given up and hasn't come back yet: reads of KV, or what else stood on the disk for too long. No wait. */
bool imp_store_hung(imp_store *s);

imp_io *imp_store_io(imp_store *s);
const imp_store_opts *imp_store_options(const imp_store *s); /* with defaults filled in, but for limit_bytes */
/* Add to the counters of imp_stats (acquires, hits, host hits). */
void imp_store_count_acquire(imp_store *s, size_t n_matched);
void imp_store_count_tier_hits(imp_store *s, uint64_t host_bytes, uint64_t device_bytes);
/* What the tiers hold now, for imp_stats. */
void imp_store_set_tier_bytes(imp_store *s, uint64_t host_bytes, uint64_t device_bytes);

/* What reads cost on the disk that the store is on, as it was measured and kept in the catalogue; for its file system as
 * it is known now. IMP_E_NOTFOUND: it wasn't measured. IMP_E_BUSY, unless `wait`: this process is changing the catalogue.
 * Put: IMP_E_UNSUPPORTED where there is no disk, IMP_E_PERM for a store that is only read. */
int imp_store_costs_get(imp_store *s, bool wait, imp_read_costs *out);
int imp_store_costs_put(imp_store *s, const imp_read_costs *costs);
/* The path of the store's largest segment, for measuring: the caller's (imp_free). IMP_E_NOTFOUND: none has so many
 * bytes. */
int imp_store_largest(imp_store *s, uint64_t least_bytes, char **path);

/* Slots for what higher modules hang on a store (the host tier, idle queues): freed by imp_store_close() before the
 * I/O. `gone_fn` is told of each segment that was removed, by whichever process, as soon as this one knows, and again
 * when nobody here has it open any more. It is called with the store's mutexes held: it may use nothing of the store. */
void imp_store_attach(imp_store *s, void *object, void (*free_fn)(void *object),
                      void (*gone_fn)(void *object, uint64_t segment));
void *imp_store_attached(imp_store *s);

/* ---- spaces */

/* The whole of imp_space is here, since commits need it: impress.h's imp_space_open/close/token_bytes are this
 * module's. */
/* How a space's keys are turned, and by how many heads they are asked. Counted, since a lease may outlive its space. */
typedef struct imp_turns {
    atomic_uint n_users;
    uint32_t n_layers;
    const imp_rope *ropes;    /* [n_layers], with factors of their own; NULL: not known */
    const uint32_t *n_heads;  /* [n_layers] */
} imp_turns;

imp_turns *imp_turns_hold(imp_turns *t);
void imp_turns_drop(imp_turns *t); /* NULL is allowed */

struct imp_space {
    imp_turns *turns;
    imp_store *store;
    imp_hash128 id;
    char model_name[64];
    imp_type type_k, type_v;
    uint32_t n_layers;
    imp_layer_shape *layers;
    size_t token_bytes;
};

#endif
