/* bases.c: the sketches' bases of each space, one for each layer (select/sketch.h).
 *
 * They are learned once, by the writer's thread from the first rows that are stored of a space, and lie in a file of
 * their own, bases/<32 hex digits of the space>.basis, that is on disk before the first segment whose sketches need
 * it. Segments name them by their id, a hash of their bytes. Lost or damaged ones are learned anew, with another id:
 * the sketches of older segments are then of no use, and nothing else is.
 *
 * The file, little-endian, padded with zeros to a multiple of 4,096 bytes:
 *
 *     u64 magic; u32 version (1), n_layers; u64 space.lo, space.hi, id, bytes without padding
 *     u64 XXH3 of the whole file with 0 in this place; u64 0
 *     u64 lengths[n_layers]
 *     the bytes of each layer's basis
 *
 * In an encrypted store the file has another magic and how many bytes follow, 8 bytes each, then all of the above as a
 * box (crypt/crypt.h), and zeros again.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "store/store_internal.h"

enum {
    VERSION = 1,
    HEAD_BYTES = 64,
    UNIT = 4096,
    LEARN_LEAST = 64,  /* tokens */
    LEARN_MOST = 2048,
    LIMIT_SHARE = 16,  /* of the store's limit: no larger file is written */
    YOUNG_S = 3600,
    LAYERS_MAX = 1024,
    FILE_NAME_BYTES = 64,
    ENTRIES_MAX = 256,
    MEMORY_LEAST = 64 << 20,
    HOST_SHARE = 8
};

static const uint64_t magic = 0x3153415342504d49u; /* "IMPBSAS1" */
static const uint64_t sealed_magic = 0x3145534142504d49u; /* "IMPBASE1" */
static const uint64_t file_bytes_max = 512u << 20;

typedef enum state {
    HAVE,
    NONE,    /* can't be had any more */
    TROUBLE, /* couldn't be read; said so once, but the disk may come back */
} state;

/* Bases that were asked for. Those in use stay; of the others the longest unused go where they are too many, or take
 * too much memory. Those of one space stay however large they are: else a model of many KV heads had them read again
 * for each match. */
typedef struct entry {
    imp_bases bases;    /* first: a pointer to it is a pointer to this */
    struct entry *next; /* used before this one */
    imp_hash128 space;
    state state;
    unsigned n_users;
    bool gone; /* its space went: with the last user */
    size_t memory;
    /* of what is in the file now, as far as this process knows */
    bool current;
    ino_t inode;
    struct timespec written;
} entry;

typedef struct imp_bases_table {
    pthread_mutex_t lock;
    entry *first;
    size_t n;
    size_t most; /* bytes */
    /* Of all, and how many of them are HAVE; written with the mutex held, relaxed: nothing else depends on them. */
    atomic_size_t memory, n_have;
} imp_bases_table;

int imp_bases_new(imp_store *s)
{
    imp_bases_table *t = imp_calloc(1, sizeof *t);
    if (!t) return imp_fail(IMP_E_NOMEM, "no memory for a store");
    int err = pthread_mutex_init(&t->lock, NULL);
    if (err) {
        imp_free(t);
        return imp_fail_errno(err, "store: no mutex");
    }
    t->most = s->opts.host_cache_bytes / HOST_SHARE;
    if (t->most < MEMORY_LEAST) t->most = MEMORY_LEAST;
    s->bases = t;
    return 0;
}

static void entry_free(entry *e)
{
    if (!e) return;
    for (uint32_t i = 0; e->bases.layers && i < e->bases.n_layers; i++) imp_basis_free(e->bases.layers[i]);
    imp_free(e->bases.layers);
    imp_free(e);
}

void imp_bases_free(imp_store *s)
{
    imp_bases_table *t = s->bases;
    if (!t) return;
    while (t->first) {
        entry *e = t->first;
        t->first = e->next;
        entry_free(e);
    }
    pthread_mutex_destroy(&t->lock);
    imp_free(t);
    s->bases = NULL;
}

static entry *entry_new(imp_hash128 space, uint64_t id, uint32_t n_layers)
{
    entry *e = imp_calloc(1, sizeof *e);
    if (e && n_layers > 0) e->bases.layers = imp_calloc(n_layers, sizeof *e->bases.layers);
    if (!e || (n_layers > 0 && !e->bases.layers)) {
        imp_free(e);
        imp_fail(IMP_E_NOMEM, "no memory for the bases of a space");
        return NULL;
    }
    e->space = space;
    e->bases.id = id;
    e->bases.n_layers = n_layers;
    e->state = n_layers > 0 ? HAVE : NONE;
    return e;
}

/* ---- the table, with its mutex held */

static entry *find(const imp_bases_table *t, imp_hash128 space, uint64_t id)
{
    entry *e = t->first;
    while (e && (e->bases.id != id || !imp_hash128_equal(e->space, space))) e = e->next;
    return e;
}

static entry *find_current(const imp_bases_table *t, imp_hash128 space)
{
    entry *e = t->first;
    while (e && (!e->current || !imp_hash128_equal(e->space, space))) e = e->next;
    return e;
}

static size_t memory_of(const entry *e)
{
    size_t n = sizeof *e + e->bases.n_layers * sizeof *e->bases.layers;
    for (uint32_t i = 0; i < e->bases.n_layers; i++) n += imp_basis_memory(e->bases.layers[i]);
    return n;
}

static void weigh(imp_bases_table *t, entry *e)
{
    size_t n = memory_of(e);
    atomic_fetch_add_explicit(&t->memory, n - e->memory, memory_order_relaxed);
    e->memory = n;
}

static void put_first(imp_bases_table *t, entry *e)
{
    e->next = t->first;
    t->first = e;
}

static void take_out(imp_bases_table *t, entry *e)
{
    entry **p = &t->first;
    while (*p != e) p = &(*p)->next;
    *p = e->next;
}

static void discard(imp_bases_table *t, entry *e)
{
    take_out(t, e);
    t->n--;
    atomic_fetch_sub_explicit(&t->memory, e->memory, memory_order_relaxed);
    atomic_fetch_sub_explicit(&t->n_have, e->state == HAVE, memory_order_relaxed);
    entry_free(e);
}

static bool heavy(const imp_bases_table *t)
{
    return atomic_load_explicit(&t->memory, memory_order_relaxed) > t->most &&
           atomic_load_explicit(&t->n_have, memory_order_relaxed) > 1;
}

/* The longest unused ones are the last. */
static void trim(imp_bases_table *t)
{
    bool many;
    while ((many = t->n > ENTRIES_MAX) || heavy(t)) {
        entry *unused = NULL;
        for (entry *e = t->first; e; e = e->next) {
            if (e->n_users == 0 && (many || e->state == HAVE)) unused = e;
        }
        if (!unused) return;
        discard(t, unused);
    }
}

static void hold(imp_bases_table *t, entry *e)
{
    e->n_users++;
    e->gone = false; /* it is back */
    take_out(t, e);
    put_first(t, e);
}

/* ---- without the mutex */

/* Take `e` over, or free it if the same one is there; that one is returned, held. What couldn't be had may be there
 * now: then *have. */
static entry *keep(imp_store *s, entry *e, bool *have)
{
    imp_bases_table *t = s->bases;
    pthread_mutex_lock(&t->lock);
    entry *there = find(t, e->space, e->bases.id);
    if (!there) {
        put_first(t, e);
        t->n++;
        atomic_fetch_add_explicit(&t->n_have, e->state == HAVE, memory_order_relaxed);
        there = e;
        e = NULL;
    } else if (there->state != HAVE && e->state == HAVE) {
        there->bases.layers = e->bases.layers;
        there->bases.n_layers = e->bases.n_layers;
        there->state = HAVE;
        atomic_fetch_add_explicit(&t->n_have, 1, memory_order_relaxed);
        e->bases.layers = NULL;
    }
    entry_free(e);
    weigh(t, there);
    hold(t, there);
    trim(t);
    *have = there->state == HAVE;
    pthread_mutex_unlock(&t->lock);
    return there;
}

void imp_bases_drop(imp_store *s, const imp_bases *bases)
{
    imp_bases_table *t = s->bases;
    entry *e = (entry *)(uintptr_t)bases;
    if (!e) return;
    pthread_mutex_lock(&t->lock);
    if (--e->n_users == 0 && e->gone) {
        discard(t, e);
    } else if (e->n_users == 0) {
        trim(t);
    }
    pthread_mutex_unlock(&t->lock);
}

void imp_bases_forget(imp_store *s, imp_hash128 space)
{
    imp_bases_table *t = s->bases;
    pthread_mutex_lock(&t->lock);
    for (entry *e = t->first, *next; e; e = next) {
        next = e->next;
        if (!imp_hash128_equal(e->space, space)) continue;
        e->current = false;
        e->gone = true;
        if (e->n_users == 0) discard(t, e);
    }
    pthread_mutex_unlock(&t->lock);
}

bool imp_bases_heavy(imp_store *s) { return heavy(s->bases); }

void imp_bases_bound(imp_store *s, size_t n_bytes) { s->bases->most = n_bytes; }

size_t imp_bases_memory(imp_store *s) { return atomic_load_explicit(&s->bases->memory, memory_order_relaxed); }

/* ---- the file */

static void file_name(imp_hash128 space, char out[FILE_NAME_BYTES])
{
    char hex[33];
    imp_hash128_hex(space, hex);
    snprintf(out, FILE_NAME_BYTES, "bases/%s.basis", hex);
}

/* The space in the last part of such a name; `*tmp`: one that is being written. */
static bool parse_name(const char *name, imp_hash128 *space, bool *tmp)
{
    char hex[33];
    if (strspn(name, "0123456789abcdef") != 32) return false;
    memcpy(hex, name, 32);
    hex[32] = '\0';
    *tmp = strcmp(name + 32, ".basis.tmp") == 0;
    return (*tmp || strcmp(name + 32, ".basis") == 0) && imp_hash128_parse(hex, space) == 0;
}

static bool look(const imp_store *s, const char *name, struct stat *st)
{
    return fstatat(s->dir_fd, name, st, AT_SYMLINK_NOFOLLOW) == 0;
}

static int bad(const char *name, const char *what) { return imp_fail(IMP_E_CORRUPT, "%s: %s", name, what); }

static int parse_file(const char *name, imp_hash128 space, unsigned char *b, size_t n_bytes, entry **out)
{
    uint32_t n_layers = n_bytes >= HEAD_BYTES ? imp_get32(b + 12) : 0;
    if (n_layers < 1 || n_layers > LAYERS_MAX || n_bytes < HEAD_BYTES + 8 * (size_t)n_layers) {
        return bad(name, "is too short, or holds something else");
    }
    uint64_t sum = imp_get64(b + 48), n_data = imp_get64(b + 40);
    imp_put64(b + 48, 0);
    if (imp_get64(b) != magic) return bad(name, "holds something else");
    if (sum != imp_hash64(b, n_bytes, magic)) return bad(name, "its checksum doesn't fit");
    if (imp_get32(b + 8) != VERSION) {
        return imp_fail(IMP_E_VERSION, "%s: format %u, this is for %d", name, imp_get32(b + 8), VERSION);
    }
    if (imp_get64(b + 16) != space.lo || imp_get64(b + 24) != space.hi) return bad(name, "belongs to another space");
    entry *e = entry_new(space, imp_get64(b + 32), n_layers);
    if (!e) return IMP_E_NOMEM;
    size_t at = HEAD_BYTES + 8 * (size_t)n_layers;
    int rc = e->bases.id != 0 && at <= n_data && n_data <= n_bytes ? 0 : bad(name, "its header is wrong");
    for (uint32_t i = 0; rc == 0 && i < n_layers; i++) {
        uint64_t n = imp_get64(b + HEAD_BYTES + 8 * i);
        if (n > n_data - at) {
            rc = bad(name, "is cut off");
        } else {
            rc = imp_basis_parse(b + at, (size_t)n, &e->bases.layers[i]);
            at += (size_t)n;
        }
    }
    if (rc < 0) {
        entry_free(e);
        return rc;
    }
    *out = e;
    return 0;
}

/* What is encrypted is bound to its space. */
enum { SEALED_HEAD_BYTES = 16, EXTRA_BYTES = 24 };

static void put_extra(unsigned char extra[EXTRA_BYTES], imp_hash128 space)
{
    imp_put64(extra, sealed_magic);
    imp_put64(extra + 8, space.lo);
    imp_put64(extra + 16, space.hi);
}

/* The bytes `*b` of a file in the clear, in new memory where they aren't yet. */
static int unseal(const imp_store *s, const char *name, imp_hash128 space, unsigned char **b, uint64_t *n_bytes)
{
    unsigned char extra[EXTRA_BYTES];
    if (!s->key) {
        return imp_get64(*b) == sealed_magic ? imp_fail(IMP_E_UNSUPPORTED, "%s: is encrypted, and there is no key", name)
                                             : 0;
    }
    if (imp_get64(*b) != sealed_magic) return bad(name, "isn't encrypted, and the store is");
    uint64_t n_box = imp_get64(*b + 8);
    if (n_box < IMP_BOX_BYTES + HEAD_BYTES || n_box > *n_bytes - SEALED_HEAD_BYTES ||
        imp_round_up(n_box + SEALED_HEAD_BYTES, UNIT) != *n_bytes) {
        return bad(name, "its length can't be");
    }
    for (uint64_t i = SEALED_HEAD_BYTES + n_box; i < *n_bytes; i++) {
        if ((*b)[i] != 0) return bad(name, "its padding isn't zero");
    }
    unsigned char *clear = imp_aligned(UNIT, (size_t)n_box);
    if (!clear) return imp_fail(IMP_E_NOMEM, "no memory to read %s", name);
    put_extra(extra, space);
    int rc = imp_box_open(s->key, extra, sizeof extra, *b + SEALED_HEAD_BYTES, (size_t)n_box, clear);
    if (rc < 0) {
        imp_free(clear);
        return rc == IMP_E_CORRUPT ? bad(name, "isn't as it was encrypted") : rc;
    }
    imp_free(*b);
    *b = clear;
    *n_bytes = n_box - IMP_BOX_BYTES;
    return 0;
}

/* The reverse. */
static int seal(const imp_store *s, imp_hash128 space, unsigned char **b, size_t *n_bytes)
{
    unsigned char extra[EXTRA_BYTES];
    if (!s->key) return 0;
    size_t n_box = *n_bytes + IMP_BOX_BYTES, n = (size_t)imp_round_up(n_box + SEALED_HEAD_BYTES, UNIT);
    unsigned char *sealed = imp_aligned(UNIT, n);
    if (!sealed) return imp_fail(IMP_E_NOMEM, "no memory to write %zu bytes of bases", n);
    memset(sealed, 0, n);
    imp_put64(sealed, sealed_magic);
    imp_put64(sealed + 8, n_box);
    put_extra(extra, space);
    int rc = imp_box_seal(s->key, extra, sizeof extra, *b, *n_bytes, sealed + SEALED_HEAD_BYTES);
    if (rc < 0) {
        imp_free(sealed);
        return rc;
    }
    imp_free(*b);
    *b = sealed;
    *n_bytes = n;
    return 0;
}

static int read_file(imp_store *s, imp_hash128 space, entry **out, uint64_t *n_read)
{
    char name[FILE_NAME_BYTES];
    imp_io_file *f = NULL;
    unsigned char *b = NULL;
    struct stat st = {0};
    *out = NULL;
    file_name(space, name);
    bool there = look(s, name, &st);
    int rc = imp_io_open(s->io, name, UNIT, &f);
    if (rc < 0) return rc;
    uint64_t n_bytes = imp_io_file_bytes(f);
    if (n_bytes == 0 || n_bytes % UNIT != 0 || n_bytes > file_bytes_max) {
        rc = bad(name, "its length can't be");
        goto out;
    }
    b = imp_aligned(UNIT, (size_t)n_bytes);
    if (!b) {
        rc = imp_fail(IMP_E_NOMEM, "no memory to read %s", name);
        goto out;
    }
    rc = imp_io_read(f, 0, b, (size_t)n_bytes);
    if (rc < 0) goto out;
    *n_read += n_bytes;
    rc = unseal(s, name, space, &b, &n_bytes);
    if (rc == 0) rc = parse_file(name, space, b, (size_t)n_bytes, out);
    if (rc == 0 && there) {
        (*out)->inode = st.st_ino;
        (*out)->written = st.st_mtim;
    }
out:
    imp_free(b);
    imp_io_close(f);
    return rc;
}

/* A file that isn't there though it should be, or isn't sound: count, log, drop. */
static void drop_file(imp_store *s, imp_hash128 space, int rc)
{
    char name[FILE_NAME_BYTES], line[256];
    snprintf(line, sizeof line, "%s", imp_last_error());
    file_name(space, name);
    pthread_mutex_lock(&s->lock);
    *(rc == IMP_E_IO ? &s->count.io_errors : &s->count.corrupt_chunks) += rc == IMP_E_IO || rc == IMP_E_CORRUPT ||
                                                                          rc == IMP_E_NOTFOUND;
    pthread_mutex_unlock(&s->lock);
    imp_log(IMP_LOG_WARN, "%s: sketches are of no use: %s", s->dir, line);
    if (rc == IMP_E_CORRUPT && !s->readonly) (void)imp_io_unlink(s->io, name);
}

/* For whoever finds no file: is that as it should be, since the space went? */
static bool space_went(imp_store *s, imp_hash128 space)
{
    imp_lock_sure(s);
    bool went = !imp_forest_tree(&s->forest, space);
    pthread_mutex_unlock(&s->lock);
    return went;
}

/* Read the file, also where the space went and came back meanwhile. *went: it did the first, and that is all right. */
static int read_present(imp_store *s, imp_hash128 space, entry **out, uint64_t *n_read, bool *went)
{
    char name[FILE_NAME_BYTES];
    struct stat st;
    file_name(space, name);
    *went = false;
    for (int tries = 0;; tries++) {
        int rc = read_file(s, space, out, n_read);
        if (rc != IMP_E_NOTFOUND) return rc;
        imp_kept_line kept;
        imp_error_keep(&kept);
        *went = space_went(s, space);
        (void)imp_error_back(&kept, 0);
        if (*went || tries == 2 || !look(s, name, &st)) return rc;
    }
}

const imp_bases *imp_bases_get(imp_store *s, imp_hash128 space, uint64_t id, uint64_t *n_read)
{
    imp_bases_table *t = s->bases;
    entry *e, *read = NULL;
    if (id == 0) return NULL;
    pthread_mutex_lock(&t->lock);
    e = find(t, space, id);
    bool known = e != NULL, trouble = e && e->state == TROUBLE, have = e && e->state == HAVE;
    if (have) hold(t, e);
    pthread_mutex_unlock(&t->lock);
    if (known && !trouble) return have ? &e->bases : NULL;

    imp_kept_line kept;
    imp_error_keep(&kept);
    bool went;
    int rc = read_present(s, space, &read, n_read, &went);
    if (went) {
        (void)imp_error_back(&kept, 0);
        return NULL;
    }
    if (rc == 0) {
        read = keep(s, read, &have);
        if (read->bases.id == id) return &read->bases;
        imp_bases_drop(s, &read->bases);
        imp_log(IMP_LOG_INFO, "%s: the bases of some sketches were replaced", s->dir);
    } else if (!known) {
        drop_file(s, space, rc);
    }
    (void)imp_error_back(&kept, 0);
    e = entry_new(space, id, 0);
    if (!e) return NULL;
    if (rc < 0 && rc != IMP_E_CORRUPT && rc != IMP_E_NOTFOUND && rc != IMP_E_VERSION) e->state = TROUBLE;
    e = keep(s, e, &have);
    if (have) return &e->bases; /* another thread had more luck */
    imp_bases_drop(s, &e->bases);
    return NULL;
}

/* ---- RoPE of a job's rows */

static bool same_rope(const imp_rope *a, const imp_rope *b)
{
    if (a->pairs != b->pairs || a->first_dim != b->first_dim || a->n_dims != b->n_dims || a->base != b->base ||
        a->freq_scale != b->freq_scale || a->ext_factor != b->ext_factor || a->attn_factor != b->attn_factor ||
        a->beta_fast != b->beta_fast || a->beta_slow != b->beta_slow || a->n_ctx_orig != b->n_ctx_orig ||
        !a->factors != !b->factors) {
        return false;
    }
    return !a->factors || memcmp(a->factors, b->factors, a->n_dims / 2 * sizeof *a->factors) == 0;
}

int imp_job_rope(imp_job_ropes *r, const imp_job *job, uint32_t layer, size_t first, size_t n,
                 const imp_rope_table **out)
{
    const imp_rope *rope = &job->turns->ropes[layer];
    uint32_t dim = job->layers[layer].head_dim_k;
    *out = NULL;
    if (rope->n_dims == 0) return 0;
    for (size_t i = 0; i < IMP_JOB_ROPES; i++) {
        imp_job_rope_table *e = &r->tables[i];
        if (e->table && e->head_dim == dim && e->first == first && e->n == n && same_rope(e->rope, rope)) {
            *out = e->table;
            return 0;
        }
    }
    imp_job_rope_table *e = &r->tables[r->next++ % IMP_JOB_ROPES];
    imp_rope_table_free(e->table);
    *e = (imp_job_rope_table){.rope = rope, .head_dim = dim, .first = first, .n = n};
    int rc = imp_rope_table_new(rope, dim, first, n, &e->table);
    if (rc < 0) e->table = NULL;
    *out = e->table;
    return rc;
}

void imp_job_ropes_free(imp_job_ropes *r)
{
    for (size_t i = 0; i < IMP_JOB_ROPES; i++) imp_rope_table_free(r->tables[i].table);
    *r = (imp_job_ropes){0};
}

imp_key_rows imp_job_keys(const imp_job *job, uint32_t layer, size_t first, size_t n)
{
    size_t row = imp_job_row_bytes(job, layer, IMP_REGION_K);
    return (imp_key_rows){
        .type = job->type_k,
        .n_kv_heads = job->layers[layer].n_kv_heads,
        .head_dim = job->layers[layer].head_dim_k,
        .rows = job->rows + job->row_at[2 * layer] + (first - job->start) * row,
        .stride = row,
        .n_tokens = n,
        .first_position = first,
    };
}

/* ---- learning */

/* Bits of a token and KV head, the same in all layers, since a segment says them once. */
static uint32_t bits_for(const imp_job *job)
{
    uint32_t most = 0, least = UINT32_MAX;
    for (uint32_t i = 0; i < job->n_layers; i++) {
        uint32_t dim = job->layers[i].head_dim_k;
        if (dim > most) most = dim;
        if (dim < least) least = dim;
    }
    uint32_t bits = imp_sketch_bits(most), room = 4 * least / 8 * 8;
    return bits < room ? bits : room;
}

static int learn(const imp_job *job, entry **out)
{
    imp_job_ropes ropes = {0};
    size_t n = job->n_tokens - job->start < LEARN_MOST ? job->n_tokens - job->start : LEARN_MOST;
    uint32_t bits = bits_for(job);
    entry *e = entry_new(job->space, 0, job->n_layers);
    if (!e) return IMP_E_NOMEM;
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < job->n_layers; i++) {
        const imp_rope_table *table;
        imp_key_rows keys = imp_job_keys(job, i, job->start, n);
        const imp_query *q = job->queries && job->queries[i].q.n_rows > 0 ? &job->queries[i].q : NULL;
        rc = imp_job_rope(&ropes, job, i, job->start, n, &table);
        if (rc == 0) rc = imp_basis_learn(&keys, q, IMP_JOB_QUERY_ROWS, table, bits, &e->bases.layers[i]);
    }
    imp_job_ropes_free(&ropes);
    if (rc < 0) {
        entry_free(e);
        return rc;
    }
    *out = e;
    return 0;
}

/* The bytes of the file, aligned, and the id. */
static int encode(entry *e, unsigned char **out, size_t *n_out)
{
    size_t at = HEAD_BYTES + 8 * (size_t)e->bases.n_layers, n_data = at, n_one;
    for (uint32_t i = 0; i < e->bases.n_layers; i++) {
        (void)imp_basis_bytes(e->bases.layers[i], &n_one);
        n_data += n_one;
    }
    size_t n = (size_t)imp_round_up(n_data, UNIT);
    if (n > file_bytes_max) return imp_fail(IMP_E_FULL, "bases of %zu bytes", n);
    unsigned char *b = imp_aligned(UNIT, n);
    if (!b) return imp_fail(IMP_E_NOMEM, "no memory to write %zu bytes of bases", n);
    memset(b, 0, n);
    for (uint32_t i = 0; i < e->bases.n_layers; i++) {
        const void *one = imp_basis_bytes(e->bases.layers[i], &n_one);
        imp_put64(b + HEAD_BYTES + 8 * (size_t)i, n_one);
        memcpy(b + at, one, n_one);
        at += n_one;
    }
    if (e->bases.id == 0) {
        uint64_t id = imp_hash64(b + HEAD_BYTES, n_data - HEAD_BYTES, e->space.lo ^ e->space.hi);
        e->bases.id = id ? id : 1;
    }
    imp_put64(b, magic);
    imp_put32(b + 8, VERSION);
    imp_put32(b + 12, e->bases.n_layers);
    imp_put64(b + 16, e->space.lo);
    imp_put64(b + 24, e->space.hi);
    imp_put64(b + 32, e->bases.id);
    imp_put64(b + 40, n_data);
    imp_put64(b + 48, imp_hash64(b, n, magic));
    *out = b;
    *n_out = n;
    return 0;
}

static int write_file(imp_store *s, const char *name, const unsigned char *b, size_t n_bytes)
{
    char tmp[FILE_NAME_BYTES + 4];
    imp_io_writer *w = NULL;
    struct stat st;
    /* A killed writer's: who holds the catalogue's lock is the only one to write here. */
    snprintf(tmp, sizeof tmp, "%s.tmp", name);
    if (look(s, tmp, &st)) (void)imp_io_unlink(s->io, tmp);
    int rc = imp_io_writer_new(s->io, name, &w);
    if (rc < 0) return rc;
    rc = imp_io_write(w, 0, b, n_bytes);
    if (rc == 0) return imp_io_writer_publish(w);
    imp_io_writer_abort(w);
    return rc;
}

static int make_room(imp_store *s, size_t n_bytes)
{
    imp_evicted evicted = {0};
    if (n_bytes > imp_limit(s) / LIMIT_SHARE) {
        return imp_fail(IMP_E_FULL, "%zu bytes of bases for a limit of %llu", n_bytes,
                        (unsigned long long)imp_limit(s));
    }
    int rc = imp_change_begin(s);
    if (rc == 0) rc = imp_change_end(s, imp_evict_for(s, n_bytes, 0, &evicted));
    if (rc == 0) imp_count_evicted(s, evicted);
    return rc;
}

/* Write the bases of `e`, unless another process was faster: then its bases come back in `*other`. */
static int publish(imp_store *s, entry *e, entry **other)
{
    char name[FILE_NAME_BYTES];
    unsigned char *b = NULL;
    size_t n_bytes = 0;
    uint64_t n_read = 0;
    struct stat st;
    *other = NULL;
    file_name(e->space, name);
    int rc = encode(e, &b, &n_bytes);
    if (rc == 0) rc = seal(s, e->space, &b, &n_bytes);
    if (rc == 0) rc = make_room(s, n_bytes);
    /* The catalogue's lock keeps other processes from the same; the tree may be read meanwhile. */
    if (rc == 0) rc = imp_change_begin(s);
    if (rc < 0) goto out;
    imp_leave(s);
    if (read_file(s, e->space, other, &n_read) < 0) {
        rc = write_file(s, name, b, n_bytes);
        if (rc == 0 && look(s, name, &st)) {
            e->inode = st.st_ino;
            e->written = st.st_mtim;
        }
    }
    imp_enter(s);
    (void)imp_change_end(s, 0);
out:
    imp_free(b);
    return rc;
}

/* Do they fit the job's layers? The space says so; a file may say anything. */
static bool fits(const imp_bases *b, const imp_job *job)
{
    if (b->n_layers != job->n_layers) return false;
    for (uint32_t i = 0; i < job->n_layers; i++) {
        imp_layer_shape l = job->layers[i];
        if (imp_basis_kv_heads(b->layers[i]) != l.n_kv_heads || imp_basis_head_dim(b->layers[i]) != l.head_dim_k ||
            imp_sketch_token_bytes(b->layers[i]) * 8 / l.n_kv_heads !=
                imp_sketch_token_bytes(b->layers[0]) * 8 / job->layers[0].n_kv_heads) {
            return false;
        }
    }
    return true;
}

/* Held, as is what the functions below return. Only the writer's thread makes something current. */
static const imp_bases *make_current(imp_store *s, entry *e)
{
    imp_bases_table *t = s->bases;
    ino_t inode = e->inode;
    struct timespec written = e->written;
    bool have;
    e = keep(s, e, &have);
    pthread_mutex_lock(&t->lock);
    for (entry *i = t->first; i; i = i->next) {
        if (imp_hash128_equal(i->space, e->space)) i->current = false;
    }
    e->current = true;
    e->inode = inode;
    e->written = written;
    pthread_mutex_unlock(&t->lock);
    return &e->bases;
}

/* A copy of what is in memory, to be written again. */
static int copy(const entry *from, entry **out)
{
    entry *e = entry_new(from->space, from->bases.id, from->bases.n_layers);
    if (!e) return IMP_E_NOMEM;
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < e->bases.n_layers; i++) {
        size_t n;
        const void *bytes = imp_basis_bytes(from->bases.layers[i], &n);
        rc = imp_basis_parse(bytes, n, &e->bases.layers[i]);
    }
    if (rc < 0) {
        entry_free(e);
        return rc;
    }
    *out = e;
    return 0;
}

/* Not for this space: remembered under the id 0. */
static void never(imp_store *s, imp_hash128 space)
{
    imp_log(IMP_LOG_INFO, "%s: no sketches for a space: %s", s->dir, imp_last_error());
    entry *e = entry_new(space, 0, 0);
    bool have;
    if (e) imp_bases_drop(s, &keep(s, e, &have)->bases);
}

static int have(imp_store *s, const imp_job *job, entry *known, const imp_bases **out)
{
    entry *e = NULL, *other = NULL;
    uint64_t n_read = 0;
    bool went;
    int rc = read_present(s, job->space, &e, &n_read, &went);
    if (rc == 0 && !fits(&e->bases, job)) {
        entry_free(e);
        rc = imp_fail(IMP_E_CORRUPT, "the bases of a space are of another shape");
    }
    if (rc == 0) {
        *out = make_current(s, e);
        return 0;
    }
    if (rc == IMP_E_VERSION) never(s, job->space);
    if (rc != IMP_E_NOTFOUND && rc != IMP_E_CORRUPT) return rc;
    if (rc == IMP_E_CORRUPT || (known && !went)) drop_file(s, job->space, rc);
    if (known) {
        rc = copy(known, &e); /* its file is gone, but the segments still count on it */
    } else if (job->n_tokens - job->start < LEARN_LEAST) {
        return imp_fail(IMP_E_NOTFOUND, "too few tokens to learn bases from");
    } else {
        rc = learn(job, &e);
        if (rc == IMP_E_ARG || rc == IMP_E_UNSUPPORTED) never(s, job->space);
    }
    if (rc < 0) return rc;
    rc = publish(s, e, &other);
    if (rc == 0 && other && !fits(&other->bases, job)) rc = imp_fail(IMP_E_CORRUPT, "bases of another shape");
    if (rc == 0) {
        *out = make_current(s, other ? other : e);
        if (other) entry_free(e);
        return 0;
    }
    entry_free(other);
    entry_free(e);
    return rc;
}

/* Is it the file that these were read from, or written to? */
static bool as_written(const entry *e, const struct stat *st)
{
    return st->st_ino == e->inode && st->st_mtim.tv_sec == e->written.tv_sec &&
           st->st_mtim.tv_nsec == e->written.tv_nsec;
}

const imp_bases *imp_bases_for(imp_store *s, const imp_job *job)
{
    imp_bases_table *t = s->bases;
    char name[FILE_NAME_BYTES];
    struct stat st;
    const imp_bases *out = NULL;
    if (!job->turns || !job->turns->ropes) return NULL;
    pthread_mutex_lock(&t->lock);
    bool refused = find(t, job->space, 0) != NULL;
    entry *known = refused ? NULL : find_current(t, job->space);
    if (known) hold(t, known);
    pthread_mutex_unlock(&t->lock);
    if (refused) return NULL;
    file_name(job->space, name);
    if (known && imp_io_in_memory(s->io)) return &known->bases; /* nobody else can get at it */
    if (known && look(s, name, &st) && as_written(known, &st)) return &known->bases;
    imp_kept_line kept;
    imp_error_keep(&kept);
    int rc = have(s, job, known, &out);
    if (rc < 0 && rc != IMP_E_NOTFOUND) {
        imp_log(IMP_LOG_WARN, "%s: stored without sketches: %s", s->dir, imp_last_error());
    }
    (void)imp_error_back(&kept, 0);
    if (known) imp_bases_drop(s, &known->bases);
    return rc == 0 ? out : NULL;
}

static bool in_memory(const imp_store *s, const char *name)
{
    imp_io_file *f = NULL;
    bool there = imp_io_open(s->io, name, UNIT, &f) == 0;
    imp_io_close(f);
    return there;
}

bool imp_bases_present(imp_store *s, imp_hash128 space, const imp_bases *bases)
{
    const entry *e = (const entry *)(const void *)bases;
    char name[FILE_NAME_BYTES];
    struct stat st;
    bool present;
    imp_kept_line kept;
    imp_error_keep(&kept);
    file_name(space, name);
    imp_leave(s);
    if (imp_io_in_memory(s->io)) {
        present = in_memory(s, name);
    } else if (!look(s, name, &st)) {
        present = false;
    } else if (as_written(e, &st)) {
        present = true;
    } else {
        uint64_t n_read = 0;
        entry *other = NULL;
        present = read_file(s, space, &other, &n_read) == 0 && other->bases.id == bases->id;
        entry_free(other);
    }
    imp_enter(s);
    (void)imp_error_back(&kept, 0);
    return present;
}

/* ---- the folder */

void imp_bases_remove(imp_store *s, imp_hash128 space)
{
    char name[FILE_NAME_BYTES];
    file_name(space, name);
    int rc = imp_io_unlink(s->io, name);
    if (rc < 0 && rc != IMP_E_NOTFOUND) imp_log(IMP_LOG_WARN, "%s", imp_last_error());
    imp_bases_forget(s, space);
}

static int sum_bytes(const char *name, uint64_t disk_bytes, void *user)
{
    (void)name;
    *(uint64_t *)user += disk_bytes;
    return 0;
}

uint64_t imp_bases_bytes(const imp_store *s)
{
    uint64_t n = 0;
    struct stat st;
    if (look(s, "bases", &st)) {
        n = (uint64_t)st.st_blocks * 512;
    } else if (!imp_io_in_memory(s->io)) {
        return 0;
    }
    (void)imp_io_list(s->io, "bases", sum_bytes, &n);
    return n;
}

typedef struct files {
    struct {
        char name[FILE_NAME_BYTES]; /* below the store's directory */
        imp_hash128 space;
        uint64_t n_bytes;
        bool tmp;
    } *file;
    size_t n, cap;
} files;

static int add_file(const char *name, uint64_t disk_bytes, void *user)
{
    files *f = user;
    imp_hash128 space;
    bool tmp;
    if (!parse_name(name, &space, &tmp)) return 0; /* not ours */
    if (f->n == f->cap) {
        size_t cap = f->cap ? 2 * f->cap : 16;
        void *p = imp_realloc_array(f->file, cap, sizeof *f->file);
        if (!p) return imp_fail(IMP_E_NOMEM, "no memory to list the bases");
        f->file = p;
        f->cap = cap;
    }
    snprintf(f->file[f->n].name, FILE_NAME_BYTES, "bases/%s", name);
    f->file[f->n].space = space;
    f->file[f->n].n_bytes = disk_bytes;
    f->file[f->n++].tmp = tmp;
    return 0;
}

static int list(imp_store *s, files *f)
{
    struct stat st;
    *f = (files){0};
    return imp_io_in_memory(s->io) || look(s, "bases", &st) ? imp_io_list(s->io, "bases", add_file, f) : 0;
}

static bool has_segments(const imp_store *s, imp_hash128 space)
{
    for (size_t i = 0; i < s->forest.segs.n_slots; i++) {
        const imp_segrow *row = s->forest.segs.slots[i].value;
        if (row && imp_hash128_equal(row->space, space)) return true;
    }
    return false;
}

void imp_bases_sweep(imp_store *s, bool young_too, uint64_t *n_files, uint64_t *n_bytes)
{
    files f;
    imp_kept_line kept;
    imp_error_keep(&kept);
    int64_t now_s = imp_wall_s();
    if (list(s, &f) < 0) f.n = 0;
    for (size_t i = 0; i < f.n; i++) {
        struct stat st;
        if (!f.file[i].tmp && has_segments(s, f.file[i].space)) continue;
        /* Who holds the catalogue's lock is the only one to write here, so a temporary file is a killed writer's. */
        bool young = !f.file[i].tmp && (!look(s, f.file[i].name, &st) || now_s - st.st_mtime < YOUNG_S);
        if (young && !young_too) continue;
        if (imp_io_unlink(s->io, f.file[i].name) < 0) continue; /* next time */
        if (!f.file[i].tmp) imp_bases_forget(s, f.file[i].space);
        if (n_files) ++*n_files;
        if (n_bytes) *n_bytes += f.file[i].n_bytes;
    }
    imp_free(f.file);
    (void)imp_error_back(&kept, 0);
}

int imp_bases_verify(imp_store *s, bool remove, void (*fn)(const imp_finding *finding, void *user), void *user,
                     int64_t *n_found)
{
    files f;
    int rc = list(s, &f);
    for (size_t i = 0; rc == 0 && i < f.n; i++) {
        entry *e = NULL;
        uint64_t n_read = 0;
        if (f.file[i].tmp) continue;
        int found = read_file(s, f.file[i].space, &e, &n_read);
        entry_free(e);
        if (found == IMP_E_NOMEM) rc = found;
        if (found == 0 || found == IMP_E_NOTFOUND || rc < 0) continue;
        ++*n_found;
        imp_finding finding = {.file = f.file[i].name, .what = imp_last_error()};
        if (fn) fn(&finding, user);
        if (remove && found == IMP_E_CORRUPT && imp_io_unlink(s->io, f.file[i].name) < 0) {
            imp_log(IMP_LOG_WARN, "%s", imp_last_error());
        }
    }
    imp_free(f.file);
    return rc;
}
