/* impress.h: the store of prefix KV, for any engine.
 *
 * Impress keeps the keys and values (KV) of prompt prefixes on disk and in memory, and brings back for each request
 * only the tokens that matter for it. This header is the whole contract of the library, for C11 and C++11 and later;
 * `examples/engine.c` is a complete small engine that uses nothing else.
 *
 *     imp_store  one directory, shared by threads and processes
 *       imp_space  one model with one set of settings: KV is shared only inside a space
 *         imp_lease  the longest stored prefix of a prompt, pinned for one request
 *           imp_load   one pass over the layers: select, wait, gather
 *         imp_commit  new KV on its way into the store
 *
 * The life of a request:
 *
 *     imp_load_opts_init(&opts);                                   // everything; or a system, and a share of tokens:
 *     imp_system_preset("impress", &opts.switches);                // (imp_store_opts_switches() made the store for it)
 *     opts.switches.cache = IMP_CACHE_OF_STORE;                    // another policy would empty the tiers
 *     opts.retention = 0.25;
 *     imp_prefix_acquire(space, tokens, n, 0, &lease, &info);      // info.n_matched may be 0: compute everything
 *     imp_load_begin(lease, &opts, &load);                         // reads start now, for all layers in order
 *     n_loaded = imp_load_count(load);                             // tokens each layer gets, of info.n_matched
 *     for each layer l, once the queries of the new tokens are known and before attention runs:
 *         imp_load_select(load, l, &query, &positions);            // decides which tokens of the prefix these are
 *         imp_load_gather(load, l, &dst);                          // their rows, in the engine's own memory
 *     imp_load_end(load, &stats);
 *     imp_lease_release(lease);
 *     ... answer ...
 *     inexact = n_loaded < info.n_matched || info.n_exact < info.n_matched || info.rounded;
 *     flags = inexact ? IMP_COMMIT_DERIVED : 0;
 *     imp_commit_begin(space, tokens, n, info.n_matched, flags, &commit); // behind the answer; NULL: nothing to store
 *     for each layer l:
 *         imp_commit_rows(commit, l, info.n_matched, n - info.n_matched, k, k_stride, v, v_stride);
 *         imp_commit_queries(commit, l, n - n_last, &last_query);  // of its last tokens: what matters in what is new
 *     imp_commit_finish(commit);                                   // packed and written by a thread of the store
 *
 * Errors. Calls return 0 or a negative imp_status. imp_last_error() then holds one line that says what and where, for
 * the calling thread. Besides the codes named at a call any may return IMP_E_ARG and IMP_E_NOMEM, and one that reads or
 * changes the store's directory IMP_E_IO, IMP_E_PERM, IMP_E_FULL, IMP_E_BUSY (another process holds the catalogue), or,
 * where the catalogue is damaged or was replaced, IMP_E_CORRUPT, IMP_E_VERSION, IMP_E_STALE.
 * A handle that such a call should have made is NULL. A NULL given is IMP_E_ARG where nothing else is said; calls
 * without a status then do nothing, or return 0. A cache may not make a request fail: after any failure of acquire,
 * load or commit the engine computes what it wanted to load, and the answer is right.
 *
 * Threads. imp_store and imp_space: any thread at any time. imp_load and imp_commit: one thread at a time each. A lease
 * may have several loads, begun and estimated in several threads at once; trim and release it in one thread at a time,
 * and not during either. A store has one thread that writes; each open load has helpers, one less than the processors
 * it may run on and 7 at most, and up to 16 readers where io_uring isn't allowed. Four idle sets of these are kept,
 * with their buffers, until close. All of them block all signals. After fork() a child may use none of the parent's
 * handles (imp_store_close() does nothing there): it may exec, _exit, or open the store anew.
 *
 * Lifetimes. A store must outlive everything else. A space may be closed before its leases, loads and commits, and a
 * lease be released before its loads end: it is given up with the last of them.
 *
 * Versions. Structs with `struct_bytes` grow at their end, and callers compiled with a shorter or a longer one are
 * served (IMP_E_UNSUPPORTED where a longer one sets what this version doesn't know; IMP_E_ARG where the size can't be
 * one: it wasn't set). They must be zero where nothing is set, as the calls that fill in defaults leave them; where
 * there is no such call, clear the whole and set the size. A member of a later version never lies in the padding of an
 * earlier one. When any other struct changes, the library's soname does.
 *
 * Source of the methods: "IMPRESS: An Importance-Informed Multi-Tier Prefix KV Storage System for Large Language Model
 * Inference", FAST '25 (called "the paper" below), and H2O (Zhang et al., NeurIPS 2023) for the importance score.
 */
#ifndef IMPRESS_IMPRESS_H
#define IMPRESS_IMPRESS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define IMP_VERSION_MAJOR 0
#define IMP_VERSION_MINOR 1
#define IMP_VERSION_PATCH 0

/* The version of the library in use, "0.1.0". Static storage. */
const char *imp_version(void);

/* ------------------------------------------------------------------------------------------------ status, log ---- */

typedef enum imp_status {
    IMP_OK = 0,
    IMP_E_ARG = -1,      /* an argument is out of its documented range */
    IMP_E_NOMEM = -2,    /* an allocation failed */
    IMP_E_IO = -3,       /* the disk or the operating system refused; imp_last_error() has errno's text */
    IMP_E_CORRUPT = -4,  /* stored bytes don't match their checksum; what is bad was dropped */
    IMP_E_VERSION = -5,  /* the store was written by a newer or unknown format */
    IMP_E_FULL = -6,     /* no room: the size limit, the disk, or an entry larger than the limit */
    IMP_E_BUSY = -7,     /* too much waits to be written, or another process holds what is needed; nothing changed */
    IMP_E_NOTFOUND = -8, /* no such store, node, segment or file */
    IMP_E_STALE = -9,    /* the tokens that a commit builds on aren't in the store, or not any more */
    IMP_E_UNSUPPORTED = -10, /* a switch, type or shape that this build or model can't do */
    IMP_E_PERM = -11     /* the directory or a file in it may not be used by this user */
} imp_status;

/* The name of a code, "IMP_E_IO", and a short text for it. Static storage; any int is accepted. */
const char *imp_status_name(int status);
const char *imp_status_text(int status);

/* One line about the last call that failed in this thread ("" before any); calls that succeed leave it as it is. Valid
 * until this thread's next call. */
const char *imp_last_error(void);

typedef enum imp_log_level { IMP_LOG_ERROR = 0, IMP_LOG_WARN = 1, IMP_LOG_INFO = 2, IMP_LOG_DEBUG = 3 } imp_log_level;

/* Receives log lines (no newline at the end; never any prompt text or token). Called from any thread, possibly at once
 * from several, and with the library's locks held: `fn` must not call back. `fn` NULL restores the default: errors and
 * warnings to stderr. Set it before the first store opens. */
typedef void (*imp_log_fn)(imp_log_level level, const char *line, void *user);
void imp_log_set(imp_log_fn fn, void *user, imp_log_level max_level);

/* For code between an engine and this library: set this thread's last error line and return `status`; write a line to
 * the log. */
int imp_set_error(int status, const char *line);
void imp_log_line(imp_log_level level, const char *line);

/* -------------------------------------------------------------------------------------------------- switches ---- */

/* How the important tokens of a layer are found. */
typedef enum imp_identify {
    IMP_IDENTIFY_NONE = 0,     /* not at all: every token of the prefix is loaded */
    IMP_IDENTIFY_ALL_KEYS = 1, /* exact H2O scores over all keys of the layer (the paper, 2.2: "AS+H2O") */
    IMP_IDENTIFY_PROBE = 2,    /* probe heads; where they don't agree, all keys (the paper, 4.1) */
    IMP_IDENTIFY_STATIC = 3,   /* one ranking made ahead of all requests (SPI; the paper, 3.1) */
    IMP_IDENTIFY_CHUNKS = 4,   /* whole chunks by score, one choice for several layers (ContiguousKV, arXiv
                                  2601.13631) */
    IMP_IDENTIFY_SKETCH = 5,   /* chunks by scores over keys rebuilt from a sketch, with what earlier requests found;
                                  tokens of these by their keys (docs/design/sketch.md) */
    IMP_IDENTIFY_RANDOM = 6    /* any tokens, the same for all requests: what a selection has to beat */
} imp_identify;

/* The order of a node's tokens on disk, in each layer by what requests found important so far. Belongs to the store's
 * handle: segments are written so where the request that computed them left queries (imp_commit_queries()), and again
 * by a reorder. */
typedef enum imp_order {
    IMP_ORDER_TOKEN = 0,      /* as in the prompt */
    IMP_ORDER_IMPORTANCE = 1, /* by falling importance (the paper, 4.2) */
    IMP_ORDER_CORE = 2        /* the most important eighth first, the rest as in the prompt (docs/systems.md) */
} imp_order;

/* Which chunks the host and the device tier keep. All loads of a store share its tiers: one with another policy than
 * the load before (NONE aside) starts them afresh, empty; while that one is open both may be in memory. */
typedef enum imp_cache {
    IMP_CACHE_NONE = 0, /* the tiers are passed by */
    IMP_CACHE_LRU = 1,
    IMP_CACHE_LFU = 2,
    IMP_CACHE_SCORE = 3,     /* access frequency x important share (the paper, 4.3) */
    IMP_CACHE_ATTENTION = 4, /* attention that a chunk got so far (ContiguousKV) */
    IMP_CACHE_AGED = 5,      /* the same score, but uses count less the longer ago they were (src/cache/cache.h) */
    IMP_CACHE_OF_STORE = 6   /* only for a load: the store's own policy */
} imp_cache;

/* What is read before a layer's queries are known, as far as buffers reach. */
typedef enum imp_prefetch {
    IMP_PREFETCH_NONE = 0,   /* nothing: each layer's reads start when it asks */
    IMP_PREFETCH_LAYERS = 1, /* the next layers' data that doesn't depend on queries: what it takes to identify (keys,
                                probe keys, sketches), or all that is loaded where that is known ahead */
    IMP_PREFETCH_CORE = 2,   /* the same, and the core of segments in IMP_ORDER_CORE */
    IMP_PREFETCH_CHUNKS = 3  /* the same, and for the next layers the chunks that this one chose: a guess
                                (ContiguousKV) */
} imp_prefetch;

/* How rows are encoded on disk. Belongs to the store's handle. Where keys or values are Q8_0 already, both are kept
 * raw. */
typedef enum imp_rest {
    IMP_REST_RAW = 0,  /* the engine's own bytes (`f16` for an f16 cache) */
    IMP_REST_Q8 = 1,   /* 8 bits: keys per channel over 64 tokens, values in row blocks of 32 */
    IMP_REST_K8V4 = 2, /* the same keys, values of 4 bits in row blocks of 32 */
    IMP_REST_Q4 = 3    /* 4 bits: keys per channel over 64 tokens, values in row blocks of 32 */
} imp_rest;

/* A system is a named set of switches (`docs/systems.md` has the table). `order`, `rest` and `chunk_tokens` are the
 * store's (imp_store_opts): loads ignore them and read what is there. The others take effect with each request; for
 * `cache` a load usually wants the store's own, IMP_CACHE_OF_STORE. */
typedef struct imp_switches {
    imp_identify identify;
    imp_order order;
    imp_cache cache;
    imp_prefetch prefetch;
    imp_rest rest;
    uint32_t chunk_tokens; /* tokens of a chunk: a multiple of 16, 16..256 */
} imp_switches;

/* The switches of system `name` ("as", "as-h2o-lru", ...). IMP_E_NOTFOUND for an unknown name; imp_last_error() then
 * lists the known ones. "recomp" is no preset of the store (nothing is loaded); programs handle it themselves. */
int imp_system_preset(const char *name, imp_switches *out);

/* The i-th known system's name, NULL past the end. */
const char *imp_system_name(size_t i);

/* ----------------------------------------------------------------------------------------------------- store ---- */

typedef struct imp_store imp_store;

typedef enum imp_io_mode {
    IMP_IO_AUTO = 0,   /* io_uring with O_DIRECT if both are allowed, else the next best; imp_store_stats says which */
    IMP_IO_URING = 1,  /* io_uring or fail */
    IMP_IO_THREADS = 2, /* pread on a pool of threads */
    IMP_IO_VIRTUAL = 3  /* reads take time only on a clock of the store's own: see imp_store_virtual_ns() */
} imp_io_mode;

#define IMP_STORE_READONLY 1u  /* open an existing store, never write to it */
#define IMP_STORE_NO_DIRECT 2u /* through the page cache instead of O_DIRECT */
#define IMP_STORE_MUST_EXIST 4u /* IMP_E_NOTFOUND instead of making the directory */
#define IMP_STORE_MEMORY 8u /* nothing on disk: `dir` is left alone and may be NULL, KV is kept in memory, encoded as on
                               disk, and is gone with the store. The tiers' budgets together, 1 MiB at least, take the
                               place of limit_bytes; there are no tiers besides, and io_mode and read_bytes_per_s don't
                               count. Not with READONLY or MUST_EXIST */

/* What segments hold besides keys and values, or how they hold them: imp_store_opts.keep. */
#define IMP_KEEP_SKETCH 1u /* sketches of the keys, where the space tells how these are turned (imp_space_desc.ropes) */
#define IMP_KEEP_PROBE 2u  /* the probe heads' keys once more, in a region of their own */
#define IMP_KEEP_PAIRED 4u /* keys and values of the same tokens in one chunk, read together, instead of apart */

/* None of this is kept in the directory but the limit, and whether it is encrypted: each handle writes, and writes anew
 * (reorder, gc, the background) by its own options. So open a store with the same ones everywhere; a program that only
 * pins or removes sets reorder_period_s to UINT32_MAX. */
typedef struct imp_store_opts {
    size_t struct_bytes;         /* set by imp_store_opts_init() */
    uint64_t limit_bytes;        /* upper bound of the directory's size on disk, 1 MiB at least, for all who use the
                                    store: it is kept there, those who have it open follow with their next look at
                                    the catalogue, and of several the last one to open wins. 0: as it was last given;
                                    10 GiB if it never was, or was lost with the catalogue. Where what is pinned or
                                    leased is more, it stays, and nothing new is stored. A store that is larger when it
                                    is opened is made smaller then, unless this is 0; every commit and imp_store_gc()
                                    make it smaller in any case. Not looked at with IMP_STORE_READONLY */
    uint64_t read_bytes_per_s;   /* cap on reads, to behave like a slower disk; 0: none */
    uint64_t host_cache_bytes;   /* host tier; 0: none */
    uint64_t buffer_bytes;       /* at most so much for the read buffers of one load; 0: 32 MiB. No more is used than 8
                                    MiB or four of the largest layers, and never less than two of the largest */
    uint64_t backlog_bytes;      /* KV waiting to be written; beyond it commits are refused (IMP_E_BUSY); 0: 1 GiB */
    uint32_t min_store_tokens;   /* commits with fewer tokens that aren't stored yet are not stored; 0: 64 */
    uint32_t segment_tokens;     /* longer commits are cut into even segments of at most so many tokens (whole chunks),
                                    1048576 at most; 0: 2048 */
    imp_io_mode io_mode;
    unsigned flags;              /* IMP_STORE_... */
    imp_order order;             /* these three for segments written from now on; existing ones stay readable */
    imp_rest rest;
    uint32_t chunk_tokens;       /* 0: 64, and segments that are written anew (reorder, gc) keep what they have */
    imp_cache cache;             /* policy of the tiers, for loads without options of their own */
    uint64_t device_cache_bytes; /* device tier, in front of the host tier: a chunk is in one of them. In this version
                                    it is memory of the host too; 0: none */
    unsigned keep;               /* IMP_KEEP_..., for segments written from now on. What is written anew keeps what lies
                                    beside its rows, and is PAIRED as this says, or with 0 as it was */
    uint32_t n_probe_heads;      /* query heads whose keys IMP_KEEP_PROBE keeps: those of the KV heads that the first so
                                    many heads use; 0: 3, as the paper */
    unsigned probe_spread;       /* 1: for probe heads that use KV heads of their own (imp_load_opts.probe_spread) */
    uint32_t reorder_period_s;   /* segments whose statistics have changed enough are reordered about so often, in the
                                    background; 0: 600; UINT32_MAX: never */
    uint32_t reorder_after;      /* enough: so many requests since the last time; 0: 16 */
    uint32_t ttl_s;              /* entries that nobody used for longer are removed, some time later: a quarter of it,
                                    60 s at most. Pinned ones stay. 0: none are */
    uint32_t space_percent;      /* the segments of one space take this share of limit_bytes at most (1..100), and room
                                    is taken from the space that holds most: one tenant's flood drives out only what is
                                    its own. 0: spaces aren't told apart, the longest unused entry goes */
    const char *key_file;        /* what is on disk is encrypted (AES-256-GCM, docs/reliability.md): a file of 32 bytes
                                    or 64 hex digits that only its owner may use. A store is encrypted from its first
                                    opening on, or never. NULL: not encrypted. Not read with IMP_STORE_MEMORY */
    uint32_t read_deadline_ms;   /* a load that waits so long for reads of which none comes back fails with IMP_E_IO, a
                                    match that the disk keeps so long finds nothing, and until what was given up has
                                    come back prompts match nothing; 0: 10,000; UINT32_MAX: never. What
                                    read_bytes_per_s makes it wait doesn't count, nor, up to 10 s, what other processes
                                    that change the store do. With it stores have threads of their own for what may
                                    hang, and one that is closed while the disk hangs is closed by them, later */
} imp_store_opts;

/* Fill in the defaults for a caller whose imp_store_opts has so many bytes: all zero, which stands for what is said
 * above, but for `cache` (IMP_CACHE_LRU). So KV is kept raw, in the prompt's order, and there are no tiers. */
void imp_store_opts_fill(imp_store_opts *opts, size_t struct_bytes);
static inline void imp_store_opts_init(imp_store_opts *opts) { imp_store_opts_fill(opts, sizeof *opts); }

/* Set what belongs to the store as a system's switches want it: order, rest, chunk_tokens, cache, and what it takes to
 * identify: keep becomes IMP_KEEP_SKETCH | IMP_KEEP_PAIRED for SKETCH, IMP_KEEP_PROBE for PROBE, 0 for others. The rest
 * of `opts`, filled in before, stays. Loads of other systems work on such a store too. */
void imp_store_opts_switches(imp_store_opts *opts, const imp_switches *switches);

/* Open the store in directory `dir`, making it (but no parents) if need be, and recover it: leftovers of killed
 * processes are removed, a lost or damaged catalogue is rebuilt from the segments. The directory gets mode 0700, also
 * one that was there and is this user's: users can't share a store. `opts` NULL: all defaults.
 * Returns 0, or with `*out` = NULL: IMP_E_PERM, IMP_E_IO (`dir` is a file, or its parent is missing), IMP_E_VERSION,
 * IMP_E_FULL, IMP_E_NOMEM, IMP_E_NOTFOUND (IMP_STORE_MUST_EXIST or READONLY), IMP_E_BUSY (with IMP_STORE_MUST_EXIST: the
 * catalogue can't be had; without, the store opens and has it when it can), IMP_E_UNSUPPORTED (an io_mode that can't
 * be had; `dir` lies on a network's file system, where locks don't hold, and IMPRESS_ANY_FS isn't 1 in the
 * environment), IMP_E_ARG (an option out of range; `dir` holds other files); nothing of what this call made is left.
 * Of encrypted stores: IMP_E_PERM without the key, with another one, or with one that others may read, IMP_E_ARG with a
 * key for a store that isn't encrypted or a file that holds none, IMP_E_NOTFOUND without such a file, IMP_E_UNSUPPORTED
 * in a build that can't encrypt.
 * With IMP_STORE_READONLY commits store nothing (begin returns 0 and NULL), and what changes a store (remove, pin, gc,
 * reorder, repair) is IMP_E_PERM.
 * Owner: the caller, until imp_store_close(). Threads: any. Several processes may have one store open. */
int imp_store_open(const char *dir, const imp_store_opts *opts, imp_store **out);

/* Write what waits, which may take a while, stop the store's threads and free it. What can't be written is only logged:
 * imp_store_flush() before tells. Every space, lease, load and commit must be closed before. NULL is allowed. */
void imp_store_close(imp_store *store);

/* Wait until everything handed over by imp_commit_finish() so far is on disk or given up. Returns 0, or the status of
 * the last write that failed since the previous flush, by whichever thread: it is told once for the store, and a
 * commit's own fate is what an acquire finds. */
int imp_store_flush(imp_store *store);

typedef struct imp_hash128 {
    uint64_t lo, hi;
} imp_hash128;

/* XXH3-128 of the bytes of file `path`, taken from the catalogue when device, inode, size, mtime and ctime are those of
 * an earlier call. IMP_E_NOTFOUND; IMP_E_IO where it can't be read, or changes meanwhile. */
int imp_store_fingerprint(imp_store *store, const char *path, imp_hash128 *out);

/* Sizes are the store's, whoever wrote it; counts are this handle's, since it was opened. */
typedef struct imp_stats {
    uint64_t disk_bytes;        /* of the whole directory, as du counts; 0 with IMP_STORE_MEMORY */
    uint64_t limit_bytes;
    uint64_t kv_bytes;          /* of stored rows, without padding, headers and catalogue */
    uint64_t n_spaces, n_nodes, n_segments, n_tokens;
    uint64_t memory_bytes;      /* the tree's, in this process */
    uint64_t host_bytes;        /* in the host tier as the last load ended; with IMP_STORE_MEMORY all that is stored */
    uint64_t acquires, hits, hit_tokens; /* a hit matched at least one token */
    uint64_t bytes_read;        /* from disk, headers included */
    uint64_t host_hit_bytes;    /* from the host tier instead */
    uint64_t device_hit_bytes;  /* and from the device tier */
    uint64_t device_bytes;      /* in the device tier then */
    uint64_t reorders;          /* segments written anew in another order */
    uint64_t bytes_written;
    uint64_t commits, commits_refused, commits_failed, commits_known; /* known: all of it was stored already */
    uint64_t evicted_nodes, evicted_bytes;
    uint64_t corrupt_chunks, io_errors, catalogue_rebuilds;
    const char *io_mode;        /* "io_uring, O_DIRECT, registered buffers" and so on; static storage */
} imp_stats;

/* Looks at the size of each file; the first call reads the header of each segment, too. So not with each request. */
int imp_store_stats(imp_store *store, imp_stats *out);

/* What is wrong with a store now, as this process sees it. Requests are answered all the same, with less reuse or none;
 * it is over by itself, once something of its kind has gone well. */
typedef struct imp_fault {
    const char *what; /* "catalogue", "write" (of new entries) or "read"; static storage */
    int status;       /* IMP_E_... of the latest failure */
    uint64_t n;       /* failures in a row */
    int64_t since_s;  /* the first of them: seconds since 1970 */
    char line[224];   /* what the latest said; names files of the store, never a token */
} imp_fault;

/* At most one of each kind, so out[IMP_FAULTS_MAX] is enough; NULL: only count. Returns how many, 0: all is well. */
enum { IMP_FAULTS_MAX = 4 };
int imp_store_faults(imp_store *store, imp_fault *out);

/* ----------------------------------------------------------------------------------------------------- space ---- */

typedef struct imp_space imp_space;

/* Element types of KV rows as the engine keeps them. Q8_0: blocks of 32 values, an f16 scale and 32 int8 (34 bytes). */
typedef enum imp_type { IMP_TYPE_F32 = 0, IMP_TYPE_F16 = 1, IMP_TYPE_BF16 = 2, IMP_TYPE_Q8_0 = 3 } imp_type;

/* Bytes of `n` elements of `type`; n must be a multiple of 32 for Q8_0. 0 for a type or count that can't be. */
size_t imp_type_bytes(imp_type type, size_t n);

/* One token's key row of a layer is [n_kv_heads][head_dim_k], its value row [n_kv_heads][head_dim_v], contiguous.
 * Either has 1..1048576 elements. To choose tokens by keys takes a head_dim_k of 1024 at most, with Q8_0 a multiple of
 * 32; without that only NONE, STATIC and RANDOM can be had (imp_load_begin()). */
typedef struct imp_layer_shape {
    uint32_t n_kv_heads, head_dim_k, head_dim_v;
} imp_layer_shape;

/* A named part of what must be equal before KV may be shared, as bytes. Fields count in the order given; a name may
 * come twice. */
typedef struct imp_field {
    const char *name;
    const void *bytes;
    size_t n_bytes;
} imp_field;

/* How a layer's keys are turned by their positions. A sketch is made of keys before that. Pair i of a row at position p
 * is turned by the angle p * base^(-2 i / n_dims) / factors[i] * freq_scale (without YaRN), as ggml's ROPE. */
typedef enum imp_rope_pairs {
    IMP_ROPE_NORM = 0, /* (0, 1) (2, 3) ..                         llama */
    IMP_ROPE_NEOX = 1  /* (0, n/2) (1, n/2 + 1) ..  n = n_dims     qwen2 and most others */
} imp_rope_pairs;

typedef struct imp_rope {
    imp_rope_pairs pairs;
    uint32_t first_dim, n_dims; /* n_dims is even; 0: nothing is turned */
    float base;                 /* > 1 */
    float freq_scale;           /* 1 / the factor by which the context was stretched; > 0 */
    const float *factors;       /* [n_dims / 2], none 0; NULL: all 1 */
    float ext_factor;           /* YaRN's mix of stretched and plain angles; 0: no YaRN */
    float attn_factor;          /* the magnitude; not 0 */
    float beta_fast, beta_slow; /* YaRN: turns over the original context between which angles are mixed; > 0 */
    uint32_t n_ctx_orig;        /* YaRN: the original context; > 0 with YaRN */
} imp_rope;

/* Everything that must be equal before KV may be shared. All of it is hashed, each part with its length, but for the
 * last two: what they say must follow from what is hashed. */
typedef struct imp_space_desc {
    size_t struct_bytes;            /* sizeof(imp_space_desc); the rest is 0 where nothing is set */
    const char *model_name;         /* for people; not hashed; 63 bytes are kept */
    const char *engine;             /* "llama.cpp" and the version of its KV: bytes of another engine never match */
    imp_hash128 weights;            /* imp_store_fingerprint() of the weights, or another hash of them; not 0 */
    imp_type type_k, type_v;
    uint32_t n_layers;              /* 1..1024 */
    const imp_layer_shape *layers;  /* [n_layers] */
    const imp_field *fields;        /* RoPE factors in force, adapters, ...: [n_fields] */
    size_t n_fields;
    const char *salt;               /* keeps tenants apart; only its hash is kept; NULL: "" */
    const imp_rope *ropes;          /* [n_layers]; NULL: not known, and no sketches for this space */
    const uint32_t *n_heads;        /* query heads: [n_layers]; NULL: as many as KV heads */
} imp_space_desc;

/* Open the space that `desc` describes; made at the first commit. Copies what it needs of `desc`.
 * Owner: the caller, until imp_space_close(). */
int imp_space_open(imp_store *store, const imp_space_desc *desc, imp_space **out);
void imp_space_close(imp_space *space);

/* Bytes of one token's rows over all layers, as the engine keeps them. */
size_t imp_space_token_bytes(const imp_space *space);

/* The space's id as imp_store_list() shows it, 32 hex digits: so a tenant's nodes are found, to be removed say. */
void imp_space_id(const imp_space *space, char out[33]);

/* ------------------------------------------------------------------------------------------------------ lease ---- */

typedef struct imp_lease imp_lease;

/* KV computed over a partial or rounded load will do as well. Without it what is matched was computed over exact KV; it
 * may still be kept rounded: see info.rounded. A store that keeps rows rounded (imp_rest) takes what a conversation's
 * later turns add as derived: without this flag only the first turn is matched. */
#define IMP_ACQUIRE_DERIVED 1u

typedef struct imp_prefix_info {
    size_t n_matched;      /* tokens from the start of the prompt whose KV is stored; 0: nothing */
    size_t n_exact;        /* of these, from the start, those stored as computed over exact KV */
    int rounded;           /* 1: some of it is kept at less than the engine's precision (not IMP_REST_RAW) */
    uint64_t bytes_full;   /* bytes on disk of all their keys and values */
    uint64_t match_ns;     /* time the match took */
    uint64_t node;         /* the last node matched, perhaps in part; 0: none. Pinning it keeps the whole way to it */
} imp_prefix_info;

/* Pin the longest stored prefix of `tokens` and describe it in `*info`. At most n_tokens - 1 tokens are matched, so
 * that at least one is computed. Matching is by token, not by chunk; a token may be any int32_t. n_tokens: up to
 * UINT32_MAX.
 * Returns 0 (a match of length zero is a normal answer, with `*out` = NULL) or a negative code, with `*info` zeroed and
 * nothing pinned. Owner: the caller, until imp_lease_release(). */
int imp_prefix_acquire(imp_space *space, const int32_t *tokens, size_t n_tokens, unsigned flags, imp_lease **out,
                       imp_prefix_info *info);

/* Give up the tail of a lease: afterwards it covers `n_tokens`, 1 to what it covers now. What acquire told stays as it
 * was told: from now on a load is whole where it loads so many. No load may be open on it (IMP_E_ARG).
 * Where nearly all of a prompt is stored, a load in part has few queries to choose by: computing its last tokens anew,
 * some 16, gives it more. */
int imp_lease_trim(imp_lease *lease, size_t n_tokens);

/* Release. NULL is allowed. */
void imp_lease_release(imp_lease *lease);

/* ------------------------------------------------------------------------------------------------------- load ---- */

typedef struct imp_load imp_load;

/* What a request's scores leave behind: advice for later requests, kept with each segment (docs/systems.md), lost
 * without harm. Only tokens of segments that the load covers are told of. */
typedef enum imp_record {
    IMP_RECORD_HISTORY = 0,    /* the moving average, by which segments are reordered and sketches are helped */
    IMP_RECORD_NOTHING = 1,
    IMP_RECORD_RANKING = 2     /* each token's largest score so far into the ranking of IMP_RANK_RECONSTRUCTION: for an
                                  engine that lets the model repeat the prefix while it is idle (KVzip, arXiv
                                  2505.23416), all keys identified */
} imp_record;

/* Which ranking IMP_IDENTIFY_STATIC goes by. Tokens without one come last. */
typedef enum imp_rank {
    IMP_RANK_PREFILL = 0,       /* scores of the queries that the commit was given (the paper's SPI) */
    IMP_RANK_RECONSTRUCTION = 1 /* scores while the prefix was repeated */
} imp_rank;

/* 0 stands for a default in all but `retention` and `switches`; floats are finite. */
typedef struct imp_load_opts {
    size_t struct_bytes;  /* set by imp_load_opts_init() */
    double retention;     /* share of the prefix's tokens that each layer gets: (0, 1] */
    imp_switches switches;
    uint32_t n_keep_first; /* always chosen: so many tokens from the start ("attention sinks"); default 0, as H2O */
    uint32_t n_keep_last;  /* and so many at the end of the prefix; default 0. Of the k tokens those from the start come
                              first, then these, then the best of the rest */
    uint32_t max_query_rows; /* of the query rows given to select, at most the last so many score; 0: 32 */
    uint32_t n_probe_heads;  /* PROBE: so many query heads; 0: 3 (the paper). More than there are: all */
    unsigned probe_spread;   /* PROBE: 1: heads of different KV heads, as far as there are, instead of the first ones */
    float probe_alpha;       /* PROBE: they agree where their mean Jaccard similarity is at least so many times that of
                                random sets; 0: 0.6 (the paper) */
    float probe_similarity;  /* PROBE: the threshold itself, instead; 0: by probe_alpha */
    float byte_share;        /* SKETCH: chunks read and taken from the tiers are at most this share of the prefix's
                                bytes, those that are there anyway not counted, as long as that brings enough tokens;
                                0: whatever the best tokens take */
    float history_weight;    /* SKETCH: of earlier requests' scores; 0: 0.5; below 0: none */
    uint32_t period;         /* CHUNKS: layers that share the choice of the first of them; 0: 4 */
    imp_rank rank;           /* STATIC */
    imp_record record;
    float mass;            /* above 0, below 1: the number of tokens is chosen, for all layers alike: so few that they
                              hold this share of the attention, mean over the layers, as far as what earlier requests
                              found tells (docs/systems.md). `retention` is then the most. 0: `retention` says it */
    float least_retention; /* with `mass`: no fewer than this share of the tokens; 0: 0.05 */
    uint32_t max_sketch_rows; /* SKETCH: of the rows that score, at most so many, spread evenly, score the sketches;
                                 0: 8 */
} imp_load_opts;

/* Fill in the defaults (everything, in order of layers, as system `as`, with the store's cache policy) for a caller
 * whose imp_load_opts has so many bytes. */
void imp_load_opts_fill(imp_load_opts *opts, size_t struct_bytes);
static inline void imp_load_opts_init(imp_load_opts *opts) { imp_load_opts_fill(opts, sizeof *opts); }

/* Would imp_load_begin() take these options? 0, or IMP_E_ARG. */
int imp_load_opts_check(const imp_load_opts *opts);

/* Start loading the leased prefix: reads that don't depend on queries are issued at once, in layer order.
 * Layers must then be asked for in rising order, each at most once in a pass; one may be left out.
 * `opts` NULL: the defaults. Owner: the caller, until imp_load_end().
 * Returns 0, or with `*out` = NULL, and the lease as it was: IMP_E_ARG (an option out of range), IMP_E_UNSUPPORTED (one
 * that this version doesn't know, or a choice by keys in layers of a shape that isn't for it: imp_layer_shape),
 * IMP_E_NOMEM, IMP_E_IO (no queue to read by). What a segment lacks (probe keys, sketches, a ranking) is no error: see
 * n_fallback, and IMP_RANK_PREFILL. */
int imp_load_begin(imp_lease *lease, const imp_load_opts *opts, imp_load **out);

/* Tokens each layer gets: k = ceil(retention x n), of the n that the lease covers, or with `mass` as few as do; all n
 * with IMP_IDENTIFY_NONE. The same for all passes. */
size_t imp_load_count(const imp_load *load);

/* What a load would take, before it begins: a guess, by the chunks that tiers hold, by what the store's disk costs
 * (imp_store_calibrate(), read_bytes_per_s) and by what loads of this handle took so far. */
typedef struct imp_load_guess {
    size_t n_tokens;     /* each layer gets so many: imp_load_count(); with `mass` at most so many */
    uint64_t bytes_read; /* from disk */
    uint64_t bytes_held; /* from the tiers, or a store in memory */
    uint64_t n_reads;
    uint64_t read_ns;    /* how long these reads take by themselves */
} imp_load_guess;

/* Costs some microseconds, and reads nothing. Errors as imp_load_begin(). */
int imp_load_estimate(imp_lease *lease, const imp_load_opts *opts, imp_load_guess *out);

/* The new tokens' queries in one layer, after RoPE and whatever else the engine does before the dot product. */
typedef struct imp_query {
    const float *q;         /* element (row r, head h, dim d of head_dim_k) at q[r * row_stride + h * head_stride + d];
                               with values that aren't finite the choice is arbitrary, of k positions still */
    size_t row_stride, head_stride; /* in floats; may be 0 */
    size_t n_rows;          /* new tokens, oldest first */
    uint32_t n_heads;       /* a multiple of the layer's n_kv_heads; head h uses KV head h / (n_heads / n_kv_heads) */
    float scale;            /* of the dot product, before the softmax; > 0 */
    float softcap;          /* 0: none, else scores become softcap * tanh(score / softcap); >= 0 */
} imp_query;

/* Choose the k tokens of the prefix that layer `layer` gets, waiting for the bytes that takes (identify), and start
 * reading what is missing of them. With IMP_IDENTIFY_NONE, STATIC and RANDOM `query` isn't looked at, and may be NULL.
 * `*positions` (may be NULL) becomes the chosen tokens' positions in the prompt, rising, [imp_load_count()]; valid
 * until the next call on this load.
 * On IMP_E_CORRUPT or IMP_E_IO the load is dead: end it, release the lease, acquire again and start the pass over. The
 * bad part isn't matched by then: what is corrupt was dropped, and what can't be read is left out in this process for
 * some minutes, or until a verify. After other failures the layer may be asked for again, unless imp_load_rewind()
 * fails too: then the load is dead as well. What `query` points to is host memory. */
int imp_load_select(imp_load *load, uint32_t layer, const imp_query *query, const uint32_t **positions);

/* Where a layer's chosen rows go, in host memory. Row i of the selection is written to k + cell(i) * k_stride, and
 * likewise v. */
typedef struct imp_dst {
    void *k, *v;             /* the engine's memory */
    size_t k_stride, v_stride; /* bytes */
    const uint32_t *cells;   /* [imp_load_count()], all different, in any order; NULL: cell(i) = i */
} imp_dst;

/* Wait for the selected rows of `layer`, check them against their checksums, and write them, in the space's types, to
 * `dst`. Only for the layer selected last, and once; it may be left out. Strides below a row's size are IMP_E_ARG,
 * unless there is but one row. Errors as imp_load_select(); `dst` may then hold some of the rows. */
int imp_load_gather(imp_load *load, uint32_t layer, const imp_dst *dst);

/* Start the next pass over the layers with the same lease and options, at any point of the present one: for an engine
 * that computes a long query in several batches, each with its own selection. Fails, with the code of then, only where
 * the load is dead. */
int imp_load_rewind(imp_load *load);

typedef struct imp_load_stats {
    uint64_t identify_ns;   /* scoring and choosing */
    uint64_t io_wait_ns;    /* waiting for reads */
    uint64_t gather_ns;     /* checking, widening and copying rows */
    uint64_t bytes_read;    /* from disk */
    uint64_t identify_bytes; /* of these, only to identify */
    uint64_t host_hit_bytes; /* from the host tier instead of the disk */
    uint64_t n_reads;
    double mass;            /* mean share of the attention mass that the chosen tokens hold, by the scores they were
                               chosen by; 1 if all are loaded */
    uint64_t device_hit_bytes; /* from the device tier */
    uint32_t n_selected;    /* layers that chose so far, in all passes */
    uint32_t n_fallback;    /* of these, by all keys though the request asked for less: PROBE's heads didn't agree, or
                               a segment holds no sketch or probe keys */
} imp_load_stats;

/* The figures so far; those of the last pass and all before. */
void imp_load_get_stats(const imp_load *load, imp_load_stats *out);

/* End the load: pending reads are cancelled, those at the device awaited, buffers go back. `stats` may be NULL, `load`
 * too. */
void imp_load_end(imp_load *load, imp_load_stats *stats);

/* ----------------------------------------------------------------------------------------------------- commit ---- */

typedef struct imp_commit imp_commit;

/* The rows were computed over a partial, rounded or derived load (info.n_exact less than what the lease covered).
 * Implied where tokens before `first_new` are kept rounded; all else the store can't see, and would give to requests
 * that ask for exact KV. */
#define IMP_COMMIT_DERIVED 1u

/* Prepare to store the KV of tokens [first_new, n_tokens) of a prompt, whose tokens [0, first_new) are stored already
 * or handed over by finish before. Tokens from first_new on may be stored too: their rows are taken from the caller and
 * skipped, so first_new 0 always works where the engine holds every row. After a partial load it holds none of the
 * prefix's: it passes what acquire matched, and gives the commit up on IMP_E_STALE. Takes the memory for the rows now,
 * of those that aren't stored (n x imp_space_token_bytes()). `tokens` are copied; n_tokens: up to UINT32_MAX.
 * Returns 0 and a handle, or with `*out` = NULL:
 *   0            nothing to store: all is stored, or less than min_store_tokens is new. Short turns add up where
 *                first_new stays what acquire matched. What is stored rounded, or exact, isn't replaced by a better or
 *                derived copy. Derived is, by exact: the derived entry that begins with the same token behind the same
 *                exact prefix goes, with all below it, pinned or not, also where their later tokens differ
 *   IMP_E_STALE  the tokens before first_new aren't stored (nor, without DERIVED, stored as exact): refused, evicted or
 *                removed before, or their commit isn't finished. Begin again with a smaller first_new,
 *                where those rows are at hand
 *   IMP_E_BUSY   too much waits to be written, or the catalogue can't be had now
 *   IMP_E_FULL   more than limit_bytes or backlog_bytes ever let in, or there was no room for the same a moment ago */
int imp_commit_begin(imp_space *space, const int32_t *tokens, size_t n_tokens, size_t first_new, unsigned flags,
                     imp_commit **out);

/* The first token whose rows are wanted: those of [first_new, this) are stored already, and may be left out. */
size_t imp_commit_first(const imp_commit *commit);

/* Copy `count` tokens' rows of one layer, in host memory, from token `first` of the prompt on (first_new <= first,
 * first + count <= n_tokens). Row i is at k + i * k_stride and v + i * v_stride, bytes; strides below a row's size are
 * IMP_E_ARG, unless `count` is 1. Any order, rows that come again replace those before; every row must come before
 * finish. */
int imp_commit_rows(imp_commit *commit, uint32_t layer, size_t first, size_t count, const void *k, size_t k_stride,
                    const void *v, size_t v_stride);

/* Queries of some of the last tokens of the prompt, as in select, the first of them at position `first`, in one layer:
 * at most the last 64 rows are kept (copied, and counted against backlog_bytes). Better those of a pass over exact KV.
 * By their scores the new tokens before `first` are ordered on disk, ranked, and their history begins; a space's first
 * sketches are made for them. Any time before finish, for any of the layers; a layer's last ones count.
 * Advisory: without them, or where this fails (IMP_E_ARG, IMP_E_BUSY: too much waits, IMP_E_NOMEM), KV is stored all
 * the same, in the order of the prompt and without a ranking. */
int imp_commit_queries(imp_commit *commit, uint32_t layer, size_t first, const imp_query *query);

/* Hand the rows to the store's writer thread, and free the handle, whatever is returned. Nothing is on disk yet when
 * this returns. The entry becomes visible segment by segment, from the front, each as a whole once it is on disk; where
 * the store gives up (no room, a failed write, the tokens before it gone) the front stays. imp_store_flush() and the
 * log tell. Returns IMP_E_ARG if rows are missing. */
int imp_commit_finish(imp_commit *commit);

/* Throw the rows away. NULL is allowed. */
void imp_commit_cancel(imp_commit *commit);

/* ------------------------------------------------------------------------------------------------- inspection ---- */

/* A node of the tree: a run of tokens below its parent. */
typedef struct imp_node_info {
    uint64_t id, parent;      /* parent 0: the root of its space. Ids are new after a rebuild; of a node that is split
                                 the front keeps its id */
    uint64_t segment;         /* the file: segments/<16 hex digits>.seg */
    char space[33];           /* 32 hex digits */
    const char *model_name;   /* valid during the callback */
    uint64_t first_token;     /* its position in the prompt */
    uint64_t n_tokens;
    uint64_t kv_bytes;        /* of its rows on disk */
    int derived, pinned;
    uint64_t hits;
    int64_t created_s, used_s; /* seconds since 1970 */
    /* How its segment was written; all 0 where the header can't be read, which a match or verify will tell. */
    imp_order order;
    imp_rest rest;
    uint32_t chunk_tokens;
    uint32_t probe_heads;     /* KV heads whose keys lie in a region of their own; 0: none */
    uint32_t sketch_bits;     /* of a token and KV head; 0: no sketches */
    int paired;               /* keys and values of a token in one chunk */
} imp_node_info;

/* Call `fn` for every node, parents before children; a non-zero return ends the walk and is returned. `fn` gets a copy
 * made at the start, and may call anything. */
int imp_store_list(imp_store *store, int (*fn)(const imp_node_info *node, void *user), void *user);

/* How important requests found the tokens of a node so far: out[i] is that of its token i, the mean over the layers of
 * the moving average of scores, where 1 is the mean of a whole prefix; zeros beyond the node's end. Returns the number
 * of requests in it (the largest of any layer). 0: there were none, and `out` holds the scores by the queries of the
 * commit, on the same scale, or zeros where none came. IMP_E_NOTFOUND, and what reading a segment's header may give. */
int64_t imp_store_importance(imp_store *store, uint64_t node, float *out, size_t n);

/* Something that `verify` found. */
typedef struct imp_finding {
    const char *file;  /* below the store's directory */
    const char *what;  /* one line: which region, layer and chunk, and what is wrong */
    uint64_t segment;  /* 0: not about a segment */
    int leftover;      /* 1: a file that a killed process left. It harms nothing, doesn't count as a finding, and goes
                          when the store is next opened for writing (a whole segment may be taken in then) */
} imp_finding;

/* Read every byte the store vouches for, padding too, and check it. `fn` is called for each thing that is bad, and
 * `progress` now and then with bytes done and in all; both may be NULL, and must not use the store. With `repair`
 * exactly what is bad is dropped. Returns the number of findings (0: clean) or a negative code. */
int64_t imp_store_verify(imp_store *store, int repair, void (*fn)(const imp_finding *finding, void *user),
                         void (*progress)(uint64_t done_bytes, uint64_t all_bytes, void *user), void *user);

/* Throw the catalogue away and make it again from the segments. IMP_E_BUSY while any process, this one too, has the
 * store open. Pins stay where the old catalogue can be read. */
int imp_store_rebuild(const char *dir);
/* The same for an encrypted one. */
int imp_store_rebuild_key(const char *dir, const char *key_file);

/* Remove a node and everything below it, or everything (`node` 0), pinned or not. Leases on it stay good. On a full
 * disk it is done in steps: after a failure a part may be gone. IMP_E_NOTFOUND. Ids are to be had anew before each of
 * these calls (imp_store_list()): the catalogue may have been made again meanwhile. */
int imp_store_remove(imp_store *store, uint64_t node);

/* Keep a node and its parents from eviction (`pinned` 1), or no longer (0). It is a mark, not a count. Where the node
 * was split since, its tail is pinned too, and is freed with it. IMP_E_NOTFOUND. */
int imp_store_pin(imp_store *store, uint64_t node, int pinned);

typedef struct imp_reorder_report {
    uint64_t n_segments;    /* looked at */
    uint64_t n_reordered;   /* written anew */
    uint64_t bytes_written;
    uint64_t freed_bytes;   /* rows of evicted nodes that a segment still held */
} imp_reorder_report;

/* Write segments anew, now, whose statistics have changed, or that hold rows of evicted nodes: in the store's order, and
 * in chunks as chunk_tokens and keep say. What a token gets doesn't change by that, to the bit. Room for each copy is
 * made as for a commit. `report` may be NULL; on failure it tells what was done until then. IMP_E_FULL where there is no
 * room for the next one; segments that can't be read are left as they are, and the log tells. */
int imp_store_reorder(imp_store *store, imp_reorder_report *report);

typedef struct imp_gc_report {
    uint64_t removed_files; /* that nothing referred to; those of evicted nodes don't count */
    uint64_t freed_bytes;   /* by all of it */
    uint64_t evicted_nodes; /* by this call; imp_stats has those that opening with a smaller limit evicted, too */
} imp_gc_report;

/* Remove what nothing refers to, enforce the size limit now, and compact the catalogue. `report` may be NULL.
 * IMP_E_FULL, with the report, when that is done and what is pinned or in use is still more than the limit. */
int imp_store_gc(imp_store *store, imp_gc_report *report);

/* -------------------------------------------------------------------------------------------------- measuring ---- */

/* For benchmarks and simulations: parts of a store by themselves. */

/* A policy of the tiers without the bytes: which chunks would stay in memory. One thread at a time. */
typedef struct imp_sim imp_sim;

/* Budgets in bytes; 0: without this tier. IMP_E_ARG: an unknown policy; IMP_E_NOMEM. Owner: the caller, until
 * imp_sim_free(). */
int imp_sim_new(imp_cache policy, uint64_t host_bytes, uint64_t device_bytes, imp_sim **out);

/* Where a chunk is: 0 in no tier, 1 in the host's, 2 in the device's. */
int imp_sim_where(const imp_sim *sim, uint64_t key);

/* One use of a chunk, as a load makes it: it is counted, a chunk of the host tier may be promoted, and one that was in
 * no tier is offered to them, with its `n_bytes`. `share` is the share of its tokens that matter to the request
 * (IMP_CACHE_SCORE and IMP_CACHE_AGED), or its attention beside the average chunk's (IMP_CACHE_ATTENTION). Returns
 * where it was before, as imp_sim_where(), or IMP_E_ARG. */
int imp_sim_use(imp_sim *sim, uint64_t key, uint64_t n_bytes, double share);

/* NULL is allowed. */
void imp_sim_free(imp_sim *sim);

/* Reads of one size through the path of loads. */
typedef struct imp_read_trial {
    size_t struct_bytes;       /* sizeof(imp_read_trial) */
    imp_io_mode mode;          /* with IMP_IO_VIRTUAL the time is that of copies from the page cache */
    unsigned flags;            /* IMP_STORE_NO_DIRECT, or 0 */
    uint64_t read_bytes_per_s; /* 0: no cap */
    int random;                /* 0: from the start of the file to its end; 1: blocks of any place, equally likely */
    uint64_t seed;
    uint32_t block_bytes;      /* a multiple of 4096 */
    uint32_t depth;            /* reads in flight: 1..4096 */
    uint64_t max_bytes;        /* end after so many; 0: one time the file's size */
    uint64_t max_ns;           /* and after so long; 0: no such end */
} imp_read_trial;

typedef struct imp_read_figures {
    uint64_t n_reads, n_bytes, ns;
    uint64_t cpu_ns;     /* of this process meanwhile */
    const char *io_mode; /* static storage */
} imp_read_figures;

/* Time reads of `file`, which holds at least one block. Sequential reads start again at the end. On failure `*out` is
 * zeroed: IMP_E_ARG, IMP_E_NOTFOUND, IMP_E_UNSUPPORTED (a mode that can't be had), and what reading may give. */
int imp_measure_reads(const char *file, const imp_read_trial *trial, imp_read_figures *out);

/* What reads cost on the disk that a store is on, with the queue full: t = read_ns + bytes x byte_ns for each. Loads
 * read over a gap where that costs less than one more read, and imp_load_estimate() goes by it. */
typedef struct imp_read_costs {
    double read_ns, byte_ns;
    int64_t measured_s; /* seconds since 1970; 0: never, and the others are what is taken to be so */
    uint64_t device;    /* the file system's id; 0: it wasn't measured */
} imp_read_costs;

/* Time reads of the store's largest segment, for a second or less, and keep the result in the catalogue: for the loads
 * of this handle that begin from now on, and of whoever opens the store later on the same file system. `out` may be
 * NULL. IMP_E_NOTFOUND: less than 1 MiB is stored in one file; IMP_E_UNSUPPORTED: in memory, or IMP_IO_VIRTUAL;
 * IMP_E_PERM: open to read only; and what reading may give. Better while nothing else reads: other loads are slower,
 * and costs come out too high. */
int imp_store_calibrate(imp_store *store, imp_read_costs *out);

/* The costs in force. IMP_E_NOMEM. */
int imp_store_get_read_costs(imp_store *store, imp_read_costs *out);

/* IMP_IO_VIRTUAL: the time of a store whose reads take none but on a clock of its own. A read that is submitted now is
 * done when imp_store_opts.read_bytes_per_s says, and waiting for it moves the clock there; bytes are real, and come
 * through the page cache. So a run with modelled compute needn't be waited for: imp_store_virtual_pass() is its way to
 * sleep. Reads of all threads count, and the clock is one for all: for one load at a time. 0, and nothing, for other
 * stores. */
uint64_t imp_store_virtual_ns(imp_store *store);
void imp_store_virtual_pass(imp_store *store, uint64_t until_ns); /* not earlier than that from now on */

#ifdef __cplusplus
}
#endif
#endif
