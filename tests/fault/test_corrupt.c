/* Damaged bytes, by the hundred: bits flipped, runs overwritten, chunks and whole files exchanged inside a file,
 * between files and between two models' spaces, files cut, zeroed, lengthened, lost, in segments, bases and the catalogue. The
 * example engine asks over each such store. An answer is never another one than without a store; verify names every
 * damaged file; a repair drops what is bad and what can't be reached without it, to the token, and nothing else; and
 * what was dropped is stored again.
 * IMP_CORRUPT_ROUNDS: how often (500). */
#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/rng.h"
#include "store/store_internal.h"
#include "support/support.h"
#include "tiny_engine.h"

enum { VOCAB = 200, N_MODELS = 2, N_PROMPTS = 4, N_ASK = 5, MAX_TOKENS = 220, MAX_FILES = 64, MAX_SPANS = 8 };

/* ---- what is asked: prompts that share beginnings, the same for both models */

static tiny_model *models[N_MODELS];
static int32_t prompts[N_PROMPTS][MAX_TOKENS];
static const uint32_t n_tokens[N_PROMPTS] = {150, 200, 110, 90};
static const uint32_t n_shared[N_PROMPTS] = {0, 100, 50, 0}; /* with the first one */
static float *cold[N_MODELS][N_PROMPTS];                     /* the answer without a store */
static tiny_cells cells;

static void make_prompts(imp_rng *rng)
{
    for (int p = 0; p < N_PROMPTS; p++) {
        for (uint32_t i = 0; i < n_tokens[p] + N_ASK; i++) {
            prompts[p][i] = i < n_shared[p] ? prompts[0][i] : (int32_t)imp_rng_below(rng, VOCAB);
        }
        /* No accident makes a prompt longer than it is meant to be shared. */
        prompts[p][n_shared[p]] = p * 7;
    }
}

static void empty_cells(void)
{
    cells.n = 0;
    cells.n_q = 0;
}

static void make_models(void)
{
    assert_int_equal(tiny_cells_init(&cells, models[0], MAX_TOKENS + N_ASK), 0);
    for (int m = 0; m < N_MODELS; m++) {
        for (int p = 0; p < N_PROMPTS; p++) {
            tiny_report report;
            cold[m][p] = malloc(VOCAB * sizeof(float));
            assert_non_null(cold[m][p]);
            empty_cells();
            assert_int_equal(tiny_prompt(models[m], NULL, NULL, prompts[p], n_tokens[p] + N_ASK, &cells, cold[m][p],
                                         &report),
                             0);
        }
    }
}

/* ---- a store as bytes */

typedef struct file {
    char name[64];
    unsigned char *bytes;
    size_t n;
    bool own;             /* the bytes are this copy's */
    const imp_seg *seg;   /* NULL: not a segment */
} file;

typedef struct image {
    file files[MAX_FILES];
    size_t n;
} image;

typedef struct way {
    imp_span spans[MAX_SPANS];
    size_t n;
} way;

/* A store as it should be: closed, and as a kill left it; and the same one open, for its layouts. */
typedef struct pristine {
    imp_store_opts opts;
    image closed, killed;
    uint64_t listed[2]; /* what the catalogue of each says, of the closed one first */
    imp_store *store;
    way ways[N_MODELS][N_PROMPTS];
    imp_path paths[N_MODELS][N_PROMPTS];
} pristine;

static char dir[256];
static const char *const folders[] = {"", "segments/", "bases/", "live/"};

static bool is_ours(const char *name)
{
    return strstr(name, ".seg") || strstr(name, ".basis") || strcmp(name, "catalogue.db") == 0 ||
           strcmp(name, "catalogue.db-wal") == 0;
}

static void read_file(file *f, const char *path)
{
    struct stat st;
    int fd = open(path, O_RDONLY);
    assert_true(fd >= 0 && fstat(fd, &st) == 0);
    f->n = (size_t)st.st_size;
    f->bytes = malloc(f->n + 1);
    f->own = true;
    assert_non_null(f->bytes);
    for (size_t at = 0; at < f->n;) {
        ssize_t got = read(fd, f->bytes + at, f->n - at);
        assert_true(got > 0);
        at += (size_t)got;
    }
    close(fd);
}

static void read_image(image *im)
{
    *im = (image){0};
    for (size_t i = 0; i < 3; i++) {
        DIR *d = opendir(imp_test_path(dir, folders[i]));
        assert_non_null(d);
        for (struct dirent *e; (e = readdir(d)) != NULL;) {
            if (!is_ours(e->d_name)) continue;
            assert_true(im->n < MAX_FILES);
            file *f = &im->files[im->n++];
            snprintf(f->name, sizeof f->name, "%s%.40s", folders[i], e->d_name);
            read_file(f, imp_test_path(dir, f->name));
        }
        closedir(d);
    }
}

static void write_image(const image *im)
{
    for (size_t i = 0; i < 4; i++) {
        DIR *d = opendir(imp_test_path(dir, folders[i]));
        assert_non_null(d);
        for (struct dirent *e; (e = readdir(d)) != NULL;) {
            if (e->d_name[0] == '.') continue;
            char name[300];
            snprintf(name, sizeof name, "%s%s", folders[i], e->d_name);
            (void)unlink(imp_test_path(dir, name)); /* not the folders */
        }
        closedir(d);
    }
    for (size_t i = 0; i < im->n; i++) {
        if (!im->files[i].bytes) continue;
        int fd = open(imp_test_path(dir, im->files[i].name), O_WRONLY | O_CREAT | O_EXCL, 0600);
        assert_true(fd >= 0);
        assert_int_equal(write(fd, im->files[i].bytes, im->files[i].n), im->files[i].n);
        close(fd);
    }
}

static void free_image(image *im)
{
    for (size_t i = 0; i < im->n; i++) {
        if (im->files[i].own) free(im->files[i].bytes);
    }
    im->n = 0;
}

/* ---- the pristine stores */

static void open_spaces(imp_store *s, imp_space *spaces[N_MODELS])
{
    for (int m = 0; m < N_MODELS; m++) assert_int_equal(tiny_space_open(models[m], s, &spaces[m]), 0);
}

static void close_all(imp_store *s, imp_space *spaces[N_MODELS])
{
    for (int m = 0; m < N_MODELS; m++) imp_space_close(spaces[m]);
    imp_store_close(s);
}

static void store_prompt(imp_store *s, imp_space *space, int m, int p)
{
    tiny_report report;
    float logits[VOCAB];
    empty_cells();
    assert_int_equal(tiny_prompt(models[m], space, NULL, prompts[p], n_tokens[p], &cells, logits, &report), 0);
    assert_int_equal(tiny_store(models[m], space, &cells, prompts[p], n_tokens[p], (uint32_t)report.n_matched), 0);
    assert_int_equal(imp_store_flush(s), 0);
}

static void make_pristine(pristine *p, bool rich)
{
    imp_space *spaces[N_MODELS];
    imp_store *s;
    imp_store_opts_init(&p->opts);
    p->opts.min_store_tokens = 4;
    p->opts.segment_tokens = 64;
    p->opts.chunk_tokens = 16;
    p->opts.io_mode = IMP_IO_THREADS;
    p->opts.flags = IMP_STORE_NO_DIRECT;
    p->opts.limit_bytes = 15 << 20; /* too little for a ballast, which would be written each time */
    p->opts.reorder_period_s = UINT32_MAX;
    if (rich) {
        p->opts.order = IMP_ORDER_CORE;
        p->opts.keep = IMP_KEEP_SKETCH | IMP_KEEP_PROBE | IMP_KEEP_PAIRED;
        p->opts.n_probe_heads = 1;
    }
    assert_int_equal(imp_store_open(dir, &p->opts, &s), 0);
    open_spaces(s, spaces);
    for (int m = 0; m < N_MODELS; m++) {
        for (int i = 0; i < N_PROMPTS; i++) store_prompt(s, spaces[m], m, i);
    }
    read_image(&p->killed); /* with a log that holds the last changes */
    close_all(s, spaces);
    read_image(&p->closed);

    assert_int_equal(imp_store_open(dir, &p->opts, &p->store), 0);
    open_spaces(p->store, spaces);
    for (int m = 0; m < N_MODELS; m++) {
        for (int i = 0; i < N_PROMPTS; i++) {
            uint64_t header_bytes;
            imp_path *path = &p->paths[m][i];
            way *w = &p->ways[m][i];
            assert_int_equal(imp_store_match(p->store, spaces[m]->id, prompts[i], n_tokens[i], true, path,
                                             &header_bytes),
                             0);
            assert_int_equal(path->n_tokens, n_tokens[i]);
            assert_true(path->n_spans <= MAX_SPANS);
            w->n = path->n_spans;
            memcpy(w->spans, path->spans, w->n * sizeof *w->spans);
            for (size_t k = 0; k < w->n; k++) {
                char name[32];
                imp_seg_name(w->spans[k].segment, name);
                for (size_t f = 0; f < p->closed.n; f++) {
                    if (strcmp(p->closed.files[f].name, name) == 0) p->closed.files[f].seg = w->spans[k].seg;
                }
                for (size_t f = 0; f < p->killed.n; f++) {
                    if (strcmp(p->killed.files[f].name, name) == 0) p->killed.files[f].seg = w->spans[k].seg;
                }
            }
        }
    }
    for (int m = 0; m < N_MODELS; m++) imp_space_close(spaces[m]);
    for (size_t f = 0; f < p->closed.n; f++) {
        if (strstr(p->closed.files[f].name, ".seg")) assert_non_null(p->closed.files[f].seg);
    }
}

static void free_pristine(pristine *p)
{
    for (int m = 0; m < N_MODELS; m++) {
        for (int i = 0; i < N_PROMPTS; i++) imp_store_unpin(p->store, &p->paths[m][i]);
    }
    imp_store_close(p->store);
    free_image(&p->closed);
    free_image(&p->killed);
}

/* ---- damage */

typedef enum kind {
    FLIP,
    OVERWRITE,
    SWAP_INSIDE, /* chunks of the same size */
    SWAP_FILES,  /* of one space or of two */
    COPY_CHUNK,
    CUT,
    CUT_A_LITTLE,
    ZERO_TAIL,
    LENGTHEN,
    LOSE,
    SWAP_NAMES,
    CATALOGUE_FLIP,
    CATALOGUE_OVERWRITE,
    CATALOGUE_CUT,
    CATALOGUE_ZERO_TAIL,
    CATALOGUE_SWAP_PAGES,
    CATALOGUE_LOSE,
    CATALOGUE_OF_ANOTHER,
    N_KINDS
} kind;

static const char *const kind_names[N_KINDS] = {"a bit",
                                                "a run of bytes",
                                                "chunks exchanged inside a file",
                                                "chunks exchanged between files",
                                                "a chunk over another",
                                                "a file cut",
                                                "a file cut by little",
                                                "a tail of zeros",
                                                "bytes behind the end",
                                                "a file lost",
                                                "files exchanged",
                                                "a bit of the catalogue",
                                                "a run of bytes of the catalogue",
                                                "the catalogue cut",
                                                "a tail of zeros of the catalogue",
                                                "pages of the catalogue exchanged",
                                                "the catalogue lost",
                                                "another store's catalogue"};

/* A copy whose files can be changed. */
static image copy_of(const image *im)
{
    image copy = *im;
    for (size_t i = 0; i < copy.n; i++) copy.files[i].own = false;
    return copy;
}

static file *change(file *f)
{
    if (f->own) return f;
    unsigned char *bytes = malloc(f->n + 8192);
    assert_non_null(bytes);
    memcpy(bytes, f->bytes, f->n);
    f->bytes = bytes;
    f->own = true;
    return f;
}

/* Any file with this in its name. */
static file *pick(image *im, imp_rng *rng, const char *part)
{
    for (;;) {
        file *f = &im->files[imp_rng_below(rng, im->n)];
        if (strstr(f->name, part) && f->n > 0) return f;
    }
}

static void set_bytes(file *f, imp_rng *rng, size_t at, size_t n)
{
    change(f);
    for (size_t i = at; i < at + n && i < f->n; i++) f->bytes[i] = (unsigned char)imp_rng_u64(rng);
}

static void cut(file *f, size_t n)
{
    change(f);
    f->n = n;
}

static imp_chunk_place any_chunk(const file *f, imp_rng *rng)
{
    imp_region region;
    uint32_t layer, chunk;
    return imp_seg_chunk_at(f->seg->layout, (uint32_t)imp_rng_below(rng, imp_seg_n_chunks(f->seg->layout)), &region,
                            &layer, &chunk);
}

/* Chunks of the same size, exchanged, or the second over the first. */
static void swap_chunks(file *f, file *g, imp_rng *rng, bool both)
{
    for (int tries = 0; tries < 1000; tries++) {
        imp_chunk_place a = any_chunk(f, rng), b = any_chunk(g, rng);
        unsigned char kept[1 << 16];
        if (a.n_bytes != b.n_bytes || a.n_bytes > sizeof kept || (f == g && a.offset == b.offset)) continue;
        change(f);
        change(g);
        memcpy(kept, f->bytes + a.offset, a.n_bytes);
        memcpy(f->bytes + a.offset, g->bytes + b.offset, a.n_bytes);
        if (both) memcpy(g->bytes + b.offset, kept, a.n_bytes);
        return;
    }
    fail_msg("no chunks of the same size");
}

static void swap_bytes(unsigned char *a, unsigned char *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        unsigned char x = a[i];
        a[i] = b[i];
        b[i] = x;
    }
}

static void damage_file(image *im, imp_rng *rng, kind k, const char *part)
{
    file *f = pick(im, rng, part), *g = f;
    /* The head of a file more often than its share. */
    size_t at = imp_rng_below(rng, imp_rng_below(rng, 4) == 0 && f->n > 4096 ? 4096 : f->n);
    switch (k) {
    case FLIP:
    case CATALOGUE_FLIP: change(f)->bytes[at] ^= (unsigned char)(1u << imp_rng_below(rng, 8)); break;
    case OVERWRITE:
    case CATALOGUE_OVERWRITE: set_bytes(f, rng, at, 1 + imp_rng_below(rng, 5000)); break;
    case SWAP_INSIDE: swap_chunks(f, f, rng, true); break;
    case SWAP_FILES:
    case COPY_CHUNK:
    case SWAP_NAMES:
        while (g == f) g = pick(im, rng, part);
        if (k != SWAP_NAMES) {
            swap_chunks(f, g, rng, k == SWAP_FILES);
        } else {
            file x = *f;
            f->bytes = g->bytes;
            f->n = g->n;
            g->bytes = x.bytes;
            g->n = x.n;
        }
        break;
    case CUT:
    case CATALOGUE_CUT: cut(f, at); break;
    case CUT_A_LITTLE: cut(f, f->n - (imp_rng_below(rng, 2) ? 1 : f->n < 4096 ? f->n : 4096)); break;
    case ZERO_TAIL:
    case CATALOGUE_ZERO_TAIL: memset(change(f)->bytes + at, 0, f->n - at); break;
    case LENGTHEN:
        at = f->n;
        change(f)->n += 1 + imp_rng_below(rng, 8000);
        set_bytes(f, rng, at, f->n - at);
        break;
    case LOSE:
    case CATALOGUE_LOSE:
        if (f->own) free(f->bytes);
        f->own = false;
        f->bytes = NULL;
        f->n = 0;
        break;
    case CATALOGUE_SWAP_PAGES: {
        size_t n = f->n / 4096, a = imp_rng_below(rng, n), b = imp_rng_below(rng, n);
        change(f);
        swap_bytes(f->bytes + 4096 * a, f->bytes + 4096 * b, 4096);
        break;
    }
    default: break;
    }
}

static void take_catalogue(image *im, const image *other)
{
    for (size_t i = 0; i < im->n; i++) {
        for (size_t j = 0; j < other->n; j++) {
            if (!strstr(im->files[i].name, "catalogue.db") || strcmp(im->files[i].name, other->files[j].name) != 0)
                continue;
            file f = other->files[j];
            f.own = false;
            im->files[i] = f;
        }
    }
}

/* ---- what must be left of it */

/* The segment's token from which on it is lost to a part [first, first + n) of it: UINT32_MAX for none. */
static uint32_t lost_from(const file *was, const file *is, uint32_t first, uint32_t n)
{
    const imp_seg *seg = was->seg;
    uint64_t n_bytes, header = imp_seg_header_bytes(seg->layout), maps = imp_seg_maps_at(seg->layout, &n_bytes);
    if (!is->bytes || is->n != was->n || memcmp(was->bytes, is->bytes, header) != 0) return first;
    if (n_bytes > 0 && memcmp(was->bytes + maps, is->bytes + maps, n_bytes) != 0) return first;
    uint32_t least = UINT32_MAX;
    for (uint32_t i = 0; i < imp_seg_n_chunks(seg->layout); i++) {
        imp_region region;
        uint32_t layer, chunk;
        imp_chunk_place c = imp_seg_chunk_at(seg->layout, i, &region, &layer, &chunk);
        if (memcmp(was->bytes + c.offset, is->bytes + c.offset, c.n_bytes) == 0) continue;
        uint32_t token = imp_seg_chunk_token(seg, region, layer, chunk, first);
        if (token < first + n && token < least) least = token;
    }
    return least;
}

static uint64_t expected(const way *w, const image *was, const image *is, uint32_t all)
{
    for (size_t k = 0; k < w->n; k++) {
        const imp_span *span = &w->spans[k];
        for (size_t f = 0; f < was->n; f++) {
            if (!was->files[f].seg || was->files[f].seg->id != span->segment) continue;
            uint32_t from = lost_from(&was->files[f], &is->files[f], span->segment_first, span->n_tokens);
            if (from != UINT32_MAX) return span->depth + (from - span->segment_first);
        }
    }
    return all;
}

static bool differs(const file *a, const file *b)
{
    return !b->bytes || a->n != b->n || memcmp(a->bytes, b->bytes, a->n) != 0;
}

/* ---- looking */

typedef struct named {
    char names[MAX_FILES][64];
    size_t n;
} named;

static void on_finding(const imp_finding *f, void *user)
{
    named *all = user;
    if (!f->leftover && all->n < MAX_FILES) snprintf(all->names[all->n++], sizeof all->names[0], "%.60s", f->file);
}

static bool was_named(const named *all, const char *name)
{
    for (size_t i = 0; i < all->n; i++) {
        if (strcmp(all->names[i], name) == 0) return true;
    }
    return false;
}

static char what[128];

static int add_node(const imp_node_info *i, void *user)
{
    char line[512];
    int n = snprintf(line, sizeof line, "%llu %llu %llu %s %.64s %llu %llu %llu %d %d %llu %lld %lld",
                     (unsigned long long)i->id, (unsigned long long)i->parent, (unsigned long long)i->segment, i->space,
                     i->model_name, (unsigned long long)i->first_token, (unsigned long long)i->n_tokens,
                     (unsigned long long)i->kv_bytes, i->derived, i->pinned, (unsigned long long)i->hits,
                     (long long)i->created_s, (long long)i->used_s);
    *(uint64_t *)user += imp_hash64(line, (size_t)n, 0); /* a sum: siblings come in any order */
    return 0;
}

static uint64_t listed(imp_store *s)
{
    uint64_t sum = 0;
    assert_int_equal(imp_store_list(s, add_node, &sum), 0);
    return sum;
}

/* What became of damage to the catalogue. Nothing else may: an entry that says something else, and nobody knows. */
typedef enum fate { REBUILT, FOUND, HARMLESS, N_FATES } fate;

static const char *const fate_names[N_FATES] = {"made again", "found by verify", "nothing was lost or changed"};
static unsigned n_of_fate[N_FATES];

/* Whatever is in the store, the answer is the one without it. */
static void ask_all(imp_space *spaces[N_MODELS])
{
    for (int m = 0; m < N_MODELS; m++) {
        for (int p = 0; p < N_PROMPTS; p++) {
            float logits[VOCAB];
            tiny_report report;
            empty_cells();
            int rc = tiny_prompt(models[m], spaces[m], NULL, prompts[p], n_tokens[p] + N_ASK, &cells, logits, &report);
            if (rc != 0) fail_msg("%s: no answer: %d", what, rc);
            if (memcmp(logits, cold[m][p], sizeof logits) != 0) fail_msg("%s: a wrong answer", what);
        }
    }
}

static void check_matches(imp_space *spaces[N_MODELS], const pristine *p, const image *was, const image *is)
{
    for (int m = 0; m < N_MODELS; m++) {
        for (int i = 0; i < N_PROMPTS; i++) {
            imp_lease *lease;
            imp_prefix_info info;
            uint64_t want = expected(&p->ways[m][i], was, is, n_tokens[i]);
            assert_int_equal(imp_prefix_acquire(spaces[m], prompts[i], n_tokens[i] + N_ASK, 0, &lease, &info), 0);
            imp_lease_release(lease);
            if (info.n_matched != want) {
                fail_msg("%s: model %d, prompt %d: %zu tokens are kept, it should be %llu", what, m, i,
                         info.n_matched, (unsigned long long)want);
            }
        }
    }
}

static void round_of(const pristine *p, const pristine *other, imp_rng *rng, kind k)
{
    bool of_catalogue = k >= CATALOGUE_FLIP, ask_first = imp_rng_below(rng, 2);
    const image *was = imp_rng_below(rng, 4) == 0 ? &p->killed : &p->closed;
    image is = copy_of(was);
    imp_space *spaces[N_MODELS];
    imp_store *s;
    named all = {.n = 0};
    bool lost = false, rebuilt = false;
    if (k == CATALOGUE_OF_ANOTHER) {
        take_catalogue(&is, was == &p->killed ? &other->killed : &other->closed);
    } else if (of_catalogue) {
        damage_file(&is, rng, k, "catalogue.db");
    } else {
        /* A basis now and then; the kinds that need layouts don't know them. */
        bool basis = p->opts.keep && (k <= OVERWRITE || (k >= CUT && k <= LOSE)) && imp_rng_below(rng, 6) == 0;
        damage_file(&is, rng, k, basis ? ".basis" : ".seg");
        lost = imp_rng_below(rng, 5) == 0; /* and the catalogue with it */
        for (size_t i = 0; i < is.n && lost; i++) {
            if (strstr(is.files[i].name, "catalogue.db")) is.files[i] = (file){.name = "catalogue.db"};
        }
    }
    write_image(&is);
    if (of_catalogue && imp_rng_below(rng, 4) == 0) {
        assert_int_equal(imp_store_rebuild(dir), 0);
        rebuilt = true;
    }
    if (imp_store_open(dir, &p->opts, &s) < 0) fail_msg("%s: %s", what, imp_last_error());
    uint64_t list = listed(s);
    open_spaces(s, spaces);
    if (ask_first) ask_all(spaces);

    int64_t n = imp_store_verify(s, 0, on_finding, NULL, &all);
    if (n < 0) fail_msg("%s: verify: %s", what, imp_last_error());
    if (of_catalogue) {
        imp_stats st;
        assert_int_equal(imp_store_stats(s, &st), 0);
        fate of = rebuilt || st.catalogue_rebuilds > 0 ? REBUILT : n > 0 ? FOUND : HARMLESS;
        if (of == HARMLESS && list != p->listed[was == &p->killed]) {
            fail_msg("%s: the catalogue says something else, and verify doesn't find it", what);
        }
        n_of_fate[of]++;
    }
    for (size_t f = 0; f < is.n && !of_catalogue && !lost && !ask_first; f++) {
        if (is.files[f].bytes == NULL && !is.files[f].seg) continue; /* a lost basis is learned anew */
        if (differs(&was->files[f], &is.files[f]) && !was_named(&all, is.files[f].name)) {
            fail_msg("%s: verify doesn't name %s", what, is.files[f].name);
        }
    }
    assert_true(imp_store_verify(s, 1, NULL, NULL, NULL) >= 0);
    all.n = 0;
    n = imp_store_verify(s, 0, on_finding, NULL, &all);
    if (n != 0) fail_msg("%s: %lld findings after a repair, %s", what, (long long)n, all.names[0]);
    check_matches(spaces, p, was, &is);
    ask_all(spaces);

    if (imp_rng_below(rng, 8) == 0) {
        close_all(s, spaces);
        assert_int_equal(imp_store_open(dir, &p->opts, &s), 0);
        open_spaces(s, spaces);
        check_matches(spaces, p, was, &is);
        for (int i = 0; i < N_PROMPTS; i++) store_prompt(s, spaces[0], 0, i);
        ask_all(spaces);
        for (int i = 0; i < N_PROMPTS; i++) {
            imp_lease *lease;
            imp_prefix_info info;
            assert_int_equal(imp_prefix_acquire(spaces[0], prompts[i], n_tokens[i] + N_ASK, 0, &lease, &info), 0);
            imp_lease_release(lease);
            assert_true(info.n_matched + 3 >= n_tokens[i]); /* fewer than min_store may be missing */
        }
        assert_int_equal(imp_store_verify(s, 0, NULL, NULL, NULL), 0);
    }
    close_all(s, spaces);
    free_image(&is);
}

static void whatever_is_damaged(void **state)
{
    const char *text = getenv("IMP_CORRUPT_ROUNDS");
    int n_rounds = text && *text ? atoi(text) : 500;
    uint64_t seed = imp_test_seed();
    unsigned n_of[N_KINDS] = {0};
    pristine stores[2] = {0};
    imp_rng rng;
    imp_test_no_log();
    imp_rng_seed(&rng, seed);
    make_prompts(&rng);
    for (int m = 0; m < N_MODELS; m++) {
        tiny_shape shape = {.n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .head_dim = 32, .n_vocab = VOCAB, .seed = 3};
        shape.seed += (uint64_t)m;
        models[m] = tiny_model_new(&shape);
        assert_non_null(models[m]);
    }
    make_models();
    for (int i = 0; i < 2; i++) {
        snprintf(dir, sizeof dir, "%s/%d", (char *)*state, i);
        make_pristine(&stores[i], i == 1);
    }
    snprintf(dir, sizeof dir, "%s/damaged", (char *)*state);
    assert_int_equal(mkdir(dir, 0700), 0);
    for (size_t i = 1; i < 4; i++) assert_int_equal(mkdir(imp_test_path(dir, folders[i]), 0700), 0);
    for (int i = 0; i < 2; i++) {
        for (int killed = 0; killed < 2; killed++) {
            imp_store *s;
            write_image(killed ? &stores[i].killed : &stores[i].closed);
            assert_int_equal(imp_store_open(dir, &stores[i].opts, &s), 0);
            stores[i].listed[killed] = listed(s);
            imp_store_close(s);
        }
    }
    uint64_t started_ns = imp_now_ns();
    for (int round = 0; round < n_rounds; round++) {
        kind k = (kind)(round % N_KINDS);
        int of = round / N_KINDS % 2;
        imp_rng_seed(&rng, seed + (uint64_t)round * 0x9e3779b97f4a7c15u);
        snprintf(what, sizeof what, "round %d, store %d, %s", round, of, kind_names[k]);
        round_of(&stores[of], &stores[1 - of], &rng, k);
        n_of[k]++;
    }
    double ms = (double)(imp_now_ns() - started_ns) / 1e6;
    for (int k = 0; k < N_KINDS; k++) fprintf(stderr, "%s: %u\n", kind_names[k], n_of[k]);
    for (int i = 0; i < N_FATES; i++) fprintf(stderr, "the catalogue damaged, %s: %u\n", fate_names[i], n_of_fate[i]);
    if (n_rounds > 0) fprintf(stderr, "%d rounds, %.1f ms each\n", n_rounds, ms / n_rounds);
    for (int i = 0; i < 2; i++) free_pristine(&stores[i]);
    for (int m = 0; m < N_MODELS; m++) {
        for (int p = 0; p < N_PROMPTS; p++) free(cold[m][p]);
        tiny_model_free(models[m]);
    }
    tiny_cells_free(&cells);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(whatever_is_damaged, imp_test_dir_set_up, imp_test_dir_tear_down)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
