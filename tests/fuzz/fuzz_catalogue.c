/* fuzz_catalogue.c: a store whose catalogue was damaged: bytes changed anywhere in the SQLite file, the file cut short,
 * or rows written anew, with sums that fit, that say something else. Whatever it says, the store opens, serves the
 * right rows or none, and is clean once it was repaired. The input says what to change in a catalogue made once. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/rng.h"
#include "fuzz/fuzz.h"
#include "fuzz/util.h"
#include "store/catalogue.h"
#include "support/store_world.h"
#include "support/support.h"

enum { N_PROMPTS = 4, LENGTH = 150, MOST_FILES = 32, CATALOGUE_ROOM = 1 << 20, MOST_ROWS = 32 };

/* Bytes of each file of the good store, made once. */
typedef struct whole_file {
    char name[64];
    uint8_t *bytes;
    size_t n;
} whole_file;

static char *dir;
static whole_file files[MOST_FILES];
static size_t n_files;
static int32_t prompts[N_PROMPTS][LENGTH];

static void read_file(const char *name)
{
    struct stat st;
    int fd = open(imp_test_path(dir, name), O_RDONLY | O_CLOEXEC);
    MUST(fd >= 0 && fstat(fd, &st) == 0 && n_files < MOST_FILES);
    whole_file *f = &files[n_files++];
    snprintf(f->name, sizeof f->name, "%s", name);
    f->n = (size_t)st.st_size;
    f->bytes = malloc(f->n + 1);
    MUST(f->bytes && read(fd, f->bytes, f->n) == (ssize_t)f->n);
    close(fd);
}

static void write_file(const char *name, const uint8_t *bytes, size_t n)
{
    int fd = open(imp_test_path(dir, name), O_CREAT | O_WRONLY | O_TRUNC | O_CLOEXEC, 0600);
    MUST(fd >= 0 && write(fd, bytes, n) == (ssize_t)n);
    close(fd);
}

static int on_node(const imp_node_info *n, void *user)
{
    char name[64];
    (void)user;
    snprintf(name, sizeof name, "segments/%016llx.seg", (unsigned long long)n->segment);
    for (size_t i = 0; i < n_files; i++)
        if (!strcmp(files[i].name, name)) return 0;
    read_file(name);
    return 0;
}

static void quiet(imp_log_level level, const char *line, void *user)
{
    (void)level;
    (void)line;
    (void)user;
}

static void remove_dir(void) { imp_test_remove_dir(dir); }

static void prepare(void)
{
    imp_world w;
    imp_log_set(quiet, NULL, IMP_LOG_ERROR);
    dir = fuzz_make_dir();
    MUST(atexit(remove_dir) == 0);
    for (int32_t p = 0; p < N_PROMPTS; p++)
        for (int32_t i = 0; i < LENGTH; i++) prompts[p][i] = i < 30 * p ? i : 1000 * p + i;
    MUST(imp_world_open(&w, dir, NULL, NULL) == 0);
    for (size_t p = 0; p < N_PROMPTS; p++) {
        MUST(imp_world_commit(&w, prompts[p], LENGTH, 0, 0, NULL) == 0 && imp_store_flush(w.store) == 0);
    }
    MUST(imp_store_list(w.store, on_node, NULL) == 0);
    imp_world_close(&w);
    read_file("catalogue.db"); /* the last one, and with no -wal beside it */
}

/* The good store, but for the catalogue; what the input before left is removed. */
static void put_files(const uint8_t *catalogue, size_t n)
{
    static const char *const strays[] = {"catalogue.db-wal", "catalogue.db-shm"};
    for (size_t i = 0; i + 1 < n_files; i++) {
        struct stat st; /* segments never change: one that is there is whole */
        if (stat(imp_test_path(dir, files[i].name), &st) != 0) write_file(files[i].name, files[i].bytes, files[i].n);
    }
    for (size_t i = 0; i < 2; i++) unlink(imp_test_path(dir, strays[i]));
    write_file("catalogue.db", catalogue, n);
}

/* ------------------------------------------------------------------------------------------- rows, with sums ---- */

typedef struct rows {
    imp_cat_node nodes[MOST_ROWS];
    imp_cat_segment segments[MOST_ROWS];
    int32_t tokens[MOST_ROWS][256];
    size_t n_nodes, n_segments;
} rows;

static int take_node(const imp_cat_node *n, void *user)
{
    rows *r = user;
    if (r->n_nodes == MOST_ROWS || n->n_tokens > 256) return 0;
    memcpy(r->tokens[r->n_nodes], n->tokens, n->n_tokens * sizeof(int32_t));
    r->nodes[r->n_nodes] = *n;
    r->nodes[r->n_nodes].tokens = r->tokens[r->n_nodes];
    r->n_nodes++;
    return 0;
}

static int take_segment(const imp_cat_segment *s, void *user)
{
    rows *r = user;
    if (r->n_segments < MOST_ROWS) r->segments[r->n_segments++] = *s;
    return 0;
}

static int take_nothing(void *user)
{
    rows *r = user;
    r->n_nodes = r->n_segments = 0;
    return 0;
}

static uint64_t number(fuzz_input *in, uint64_t now)
{
    static const uint64_t edges[] = {0, 1, UINT32_MAX, INT64_MAX, UINT64_MAX, 1 << 20};
    uint32_t what = fuzz_byte(in);
    if (what < 64) return now + what % 8 - 4;
    return what < 128 ? edges[what % 6] : fuzz_u32(in);
}

static void edit_node(imp_cat *c, rows *r, fuzz_input *in)
{
    imp_cat_node n = r->nodes[fuzz_below(in, (uint32_t)r->n_nodes)];
    int32_t tokens[256];
    memcpy(tokens, n.tokens, n.n_tokens * sizeof(int32_t));
    n.tokens = tokens;
    switch (fuzz_byte(in) % 10) {
    case 0: n.id = number(in, n.id); break;
    case 1: n.parent = number(in, n.parent); break;
    case 2: n.parent = r->nodes[fuzz_below(in, (uint32_t)r->n_nodes)].id; break;
    case 3: n.segment = r->segments[fuzz_below(in, (uint32_t)r->n_segments)].id; break;
    case 4: n.segment_first = (uint32_t)number(in, n.segment_first); break;
    case 5: n.n_tokens = 1 + fuzz_below(in, 256); break;
    case 6: n.depth = number(in, n.depth); break;
    case 7: tokens[fuzz_byte(in)] = (int32_t)fuzz_byte(in); break;
    case 8: n.derived = !n.derived; break;
    default: n.space.lo ^= fuzz_byte(in) & 1; break;
    }
    imp_cat_put_node(c, &n);
}

static void edit_segment(imp_cat *c, rows *r, fuzz_input *in)
{
    imp_cat_segment s = r->segments[fuzz_below(in, (uint32_t)r->n_segments)];
    switch (fuzz_byte(in) % 4) {
    case 0: s.id = number(in, s.id); break;
    case 1: s.disk_bytes = number(in, s.disk_bytes); break;
    case 2: s.n_tokens = (uint32_t)number(in, s.n_tokens); break;
    default: s.space.hi ^= 1; break;
    }
    imp_cat_put_segment(c, &s);
}

static void edit(fuzz_input *in)
{
    static rows r;
    imp_cat *c;
    uint64_t generation;
    const imp_cat_reader reader = {.reset = take_nothing, .segment = take_segment, .node = take_node, .user = &r};
    MUST(imp_cat_open(dir, 0, &c) == 0);
    MUST(imp_cat_begin(c) == 0 && imp_cat_read(c, 0, &reader, &generation) == 0 && r.n_nodes > 0 && r.n_segments > 0);
    for (int i = 0; i < 8 && in->at < in->end; i++) {
        uint32_t what;
        switch (fuzz_below(in, 6)) {
        case 0:
        case 1:
        case 2: edit_node(c, &r, in); break;
        case 3: edit_segment(c, &r, in); break;
        case 4: imp_cat_remove_node(c, r.nodes[fuzz_below(in, (uint32_t)r.n_nodes)].id); break;
        default:
            what = fuzz_byte(in);
            if (what & 1) {
                imp_cat_remove_segment(c, r.segments[fuzz_below(in, (uint32_t)r.n_segments)].id);
            } else if (what & 16) {
                imp_cat_remove_space(c, r.segments[fuzz_below(in, (uint32_t)r.n_segments)].space);
            } else {
                uint64_t at = number(in, r.segments[0].id);
                imp_cat_reserve(c, &(imp_cat_reservation){at, fuzz_byte(in), number(in, 4096)});
            }
        }
    }
    if (imp_cat_commit(c) != 0) imp_cat_rollback(c);
    imp_cat_close(c);
}

/* ----------------------------------------------------------------------------------------------------- bytes ---- */

/* Changes at places that are spread over the file: an offset, a length, and bytes or one byte repeated. */
static size_t damage(uint8_t *bytes, size_t n, fuzz_input *in)
{
    while (in->at < in->end) {
        uint32_t what = fuzz_byte(in), at = fuzz_u32(in) % (uint32_t)n, length = 1 + fuzz_byte(in) % 32;
        if (what >= 0xf8) return at; /* cut */
        if (what & 1) at = at / 4096 * 4096 + (at & 63); /* heads of pages matter most */
        uint8_t same = fuzz_byte(in);
        for (uint32_t i = 0; i < length && at + i < n; i++) bytes[at + i] = what & 2 ? same : i ? fuzz_byte(in) : same;
    }
    return n;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    if (!dir) prepare();
    fuzz_input in = {bytes, bytes + n_bytes};
    const whole_file *good = &files[n_files - 1];
    static uint8_t changed[CATALOGUE_ROOM];
    MUST(good->n <= sizeof changed);
    memcpy(changed, good->bytes, good->n);
    bool rows_too = fuzz_byte(&in) & 1;
    size_t n = rows_too ? good->n : damage(changed, good->n, &in);
    put_files(changed, n);
    if (rows_too) edit(&in);

    imp_world w;
    int rc = imp_world_open(&w, dir, NULL, NULL);
    if (rc != 0) { /* another program's, or a later version's: refused, and left alone */
        MUST(!rows_too && (rc == IMP_E_VERSION || rc == IMP_E_ARG));
        return 0;
    }
    for (size_t p = 0; p < N_PROMPTS; p++) MUST(imp_world_check(&w, prompts[p], LENGTH, false) >= 0);
    MUST(imp_world_verify(&w, true, false) >= 0);
    MUST(imp_world_verify(&w, false, true) == 0);
    for (size_t p = 0; p < N_PROMPTS; p++) {
        MUST(imp_world_check(&w, prompts[p], LENGTH, false) >= 0);
        MUST(imp_world_commit(&w, prompts[p], LENGTH, 0, 0, NULL) == 0 && imp_store_flush(w.store) == 0);
        MUST(imp_world_check(&w, prompts[p], LENGTH, false) == LENGTH);
    }
    MUST(imp_store_remove(w.store, 0) == 0); /* what this store wrote; the next input's has the first segments only */
    imp_world_close(&w);
    return 0;
}

size_t imp_fuzz_seed(size_t i, uint8_t *out, size_t room)
{
    if (i >= 16 || room < 64) return 0;
    imp_rng r;
    imp_rng_seed(&r, i);
    size_t n = i < 12 ? 7 : 25;
    for (size_t k = 0; k < n; k++) out[k] = (uint8_t)imp_rng_u64(&r);
    out[0] = i & 1;
    if (i & 1) out[1] = (uint8_t)(i / 2 % 6);
    return n;
}
