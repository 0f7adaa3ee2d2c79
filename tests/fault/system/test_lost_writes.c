/* A power cut: kill -9 keeps what the page cache holds, a power cut doesn't. All writes, syncs and changes of names of
 * a store's life are logged, the catalogue's too; then states are made that a disk may be in if the power goes at some
 * moment: what was synced is there, of the rest any part, torn at sectors, later writes without earlier ones. Each is
 * opened: it starts, serves no wrong byte, keeps what was promised, and verifies.
 *
 * What the model lets a file system do: a write or truncation that no sync of its file followed may be there or not,
 * sector by sector; names of a directory that wasn't synced may be as after any of the changes since. IMP_CRASH_STATES:
 * how many states of a plain store (60; 3,000 with IMP_FAULTS=all), and a third as many of others. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/rng.h"
#include "fault/preload_faults.h"
#include "support/store_world.h"
#include "support/support.h"

enum { N_PROMPTS = 10, MAX_TOKENS = 260, SECTOR = 512, MAX_FILES = 512, MAX_NAMES = 256 };
enum { STATES_WITHOUT = 200, STATES_REMOVED = 8 };
enum { FORGOTTEN = 1000, REMOVED = 2000, PINNED = 3000, UNPINNED, STORING }; /* marks; below PINNED, and a prompt */

/* Prompts that share beginnings, so that storing one splits another. */
static size_t prompt(int which, int32_t *tokens)
{
    size_t n = 60 + (size_t)which * 37 % 180, cut = which == 0 ? 0 : (size_t)which * 29 % 60;
    for (size_t i = 0; i < n; i++) tokens[i] = (int32_t)(i < cut ? i : (size_t)(which + 1) * 10000 + i);
    return n;
}

/* ---- a life, logged. Marks: a prompt is stored for good, or is promised no more; it was removed, until something is
 * stored again; something is pinned, or nothing. */

/* What follows a rounded prefix counts as derived. */
static bool rounded(imp_world *w) { return imp_store_options(w->store)->rest != IMP_REST_RAW; }

static int64_t check(imp_world *w, const int32_t *tokens, size_t n)
{
    return imp_world_check(w, tokens, n, !rounded(w));
}

static int commit(imp_world *w, const int32_t *tokens, size_t n, int64_t known)
{
    unsigned flags = known > 0 && rounded(w) ? IMP_COMMIT_DERIVED : 0;
    int rc = imp_world_commit(w, tokens, n, (size_t)known, flags, NULL);
    return rc < 0 ? rc : imp_store_flush(w->store);
}

static void put(imp_world *w, int which)
{
    int32_t tokens[MAX_TOKENS];
    size_t n = prompt(which, tokens);
    int64_t known = check(w, tokens, n);
    assert_true(known >= 0);
    preload_log_mark(STORING);
    assert_int_equal(commit(w, tokens, n, known), 0);
    assert_int_equal(check(w, tokens, n), n);
    preload_log_mark((uint64_t)which);
}

static int first_node(const imp_node_info *node, void *user)
{
    if (node->parent != 0) return 0;
    *(uint64_t *)user = node->id;
    return 1;
}

static uint64_t pin_one(imp_world *w)
{
    uint64_t node;
    assert_int_equal(imp_store_list(w->store, first_node, &node), 1);
    assert_int_equal(imp_store_pin(w->store, node, 1), 0);
    preload_log_mark(PINNED);
    return node;
}

static void forget_all(void)
{
    for (int i = 0; i < N_PROMPTS; i++) preload_log_mark((uint64_t)(FORGOTTEN + i));
    preload_log_mark(UNPINNED);
}

/* `then`: what the store is opened with later, in which all is written anew. */
static void live(const char *dir, const imp_store_opts *first, const imp_store_opts *then)
{
    imp_world w;
    assert_int_equal(imp_world_open(&w, dir, first, NULL), 0);
    for (int i = 0; i < 4; i++) put(&w, i);
    uint64_t node = pin_one(&w);
    forget_all();
    assert_int_equal(imp_store_remove(w.store, node), 0);
    for (int i = 0; i < 4; i++) {
        int32_t tokens[MAX_TOKENS];
        if (check(&w, tokens, prompt(i, tokens)) == 0) preload_log_mark((uint64_t)(REMOVED + i));
    }
    for (int i = 2; i < 6; i++) put(&w, i);
    assert_int_equal(imp_store_gc(w.store, NULL), 0); /* the catalogue is written anew */
    for (int i = 0; i < 3; i++) put(&w, i);
    imp_world_close(&w);

    assert_int_equal(imp_world_open(&w, dir, then, NULL), 0);
    (void)pin_one(&w);
    for (int i = 6; i < N_PROMPTS; i++) put(&w, i);
    assert_int_equal(imp_store_reorder(w.store, NULL), 0);
    for (int i = 0; i < N_PROMPTS; i++) put(&w, i);
    imp_world_close(&w);
}

/* ---- what the disk holds at some event */

typedef struct file {
    uint64_t inode;
    unsigned char *bytes; /* synced */
    size_t n, room;
    size_t *pending; /* events */
    size_t n_pending, pending_room;
} file;

typedef struct name {
    char path[256];
    int file; /* -1: a directory */
} name;

typedef struct disk {
    const preload_event *events;
    file files[MAX_FILES];
    int n_files;
    name names[MAX_NAMES];
    size_t n_names;
    size_t *pending; /* events on names */
    size_t n_pending, pending_room;
    bool promised[N_PROMPTS], removed[N_PROMPTS], pinned;
} disk;

static void append(size_t **list, size_t *n, size_t *room, size_t value)
{
    if (*n == *room) {
        *room = *room ? *room * 2 : 64;
        *list = realloc(*list, *room * sizeof **list);
        assert_non_null(*list);
    }
    (*list)[(*n)++] = value;
}

/* The youngest of this inode: numbers are used again. */
static int file_of(const disk *d, uint64_t inode)
{
    for (int i = d->n_files - 1; i >= 0; i--) {
        if (d->files[i].inode == inode) return i;
    }
    return -1;
}

static void grow(file *f, size_t n)
{
    if (n > f->room) {
        f->room = n * 2;
        f->bytes = realloc(f->bytes, f->room);
        assert_non_null(f->bytes);
    }
    if (n > f->n) {
        memset(f->bytes + f->n, 0, n - f->n);
        f->n = n;
    }
}

static void write_bytes(file *f, size_t offset, const unsigned char *bytes, size_t n)
{
    grow(f, offset + n);
    memcpy(f->bytes + offset, bytes, n);
}

static void apply_whole(file *f, const preload_event *e)
{
    if (e->op == OP_WRITE) {
        write_bytes(f, (size_t)e->offset, e->bytes, (size_t)e->n_bytes);
    } else {
        grow(f, (size_t)e->n_bytes);
        f->n = (size_t)e->n_bytes;
    }
}

static void apply_torn(file *f, const preload_event *e, imp_rng *rng)
{
    if (e->op != OP_WRITE) {
        apply_whole(f, e);
        return;
    }
    for (size_t i = 0; i < e->n_bytes;) {
        size_t n = SECTOR - (size_t)(e->offset + i) % SECTOR;
        if (n > e->n_bytes - i) n = (size_t)e->n_bytes - i;
        if (imp_rng_below(rng, 2)) write_bytes(f, (size_t)e->offset + i, e->bytes + i, n);
        i += n;
    }
}

static name *find_name(disk *d, const char *path)
{
    for (size_t i = 0; i < d->n_names; i++) {
        if (strcmp(d->names[i].path, path) == 0) return &d->names[i];
    }
    return NULL;
}

static void set_name(disk *d, const char *path, int which)
{
    name *at = find_name(d, path);
    if (!at) {
        assert_true(d->n_names < MAX_NAMES);
        at = &d->names[d->n_names++];
        snprintf(at->path, sizeof at->path, "%s", path);
    }
    at->file = which;
}

static void drop_name(disk *d, const char *path)
{
    name *at = find_name(d, path);
    if (at) *at = d->names[--d->n_names];
}

/* `made`: the file that a creation made. */
static void apply_name(disk *d, const preload_event *e, int made)
{
    name *from = find_name(d, e->path);
    if (e->op == OP_MKDIR) set_name(d, e->path, -1);
    if (e->op == OP_CREATE) set_name(d, e->path, made);
    if (e->op == OP_UNLINK) drop_name(d, e->path);
    if (e->op == OP_RENAME && from) {
        int moved = from->file;
        drop_name(d, e->path);
        set_name(d, e->to, moved);
    }
}

/* The part of a path before its last slash. */
static void parent_of(const char *path, char out[256])
{
    const char *slash = strrchr(path, '/');
    snprintf(out, 256, "%.*s", slash ? (int)(slash - path) : 0, path);
}

static int created(const disk *d, size_t event)
{
    /* Files are made in the order of the log. */
    int n = -1;
    for (size_t i = 0; i <= event; i++) n += d->events[i].op == OP_CREATE;
    return d->events[event].op == OP_CREATE ? n : -1;
}

static void sync_dir(disk *d, const char *path)
{
    size_t kept = 0;
    for (size_t i = 0; i < d->n_pending; i++) {
        char parent[256];
        parent_of(d->events[d->pending[i]].path, parent);
        if (strcmp(parent, path) == 0) {
            apply_name(d, &d->events[d->pending[i]], created(d, d->pending[i]));
        } else {
            d->pending[kept++] = d->pending[i];
        }
    }
    d->n_pending = kept;
}

static void sync_file(disk *d, file *f)
{
    for (size_t i = 0; i < f->n_pending; i++) apply_whole(f, &d->events[f->pending[i]]);
    f->n_pending = 0;
}

static void step(disk *d, size_t event)
{
    const preload_event *e = &d->events[event];
    int at = -1;
    switch (e->op) {
    case OP_MARK:
        if (e->n_bytes == STORING) memset(d->removed, 0, sizeof d->removed);
        else if (e->n_bytes >= PINNED) d->pinned = e->n_bytes == PINNED;
        else if (e->n_bytes >= REMOVED) d->removed[e->n_bytes - REMOVED] = true;
        else d->promised[e->n_bytes % FORGOTTEN] = e->n_bytes < FORGOTTEN;
        break;
    case OP_CREATE:
        assert_true(d->n_files < MAX_FILES);
        d->files[d->n_files++] = (file){.inode = e->inode};
        append(&d->pending, &d->n_pending, &d->pending_room, event);
        break;
    case OP_MKDIR:
    case OP_RENAME:
    case OP_UNLINK:
        append(&d->pending, &d->n_pending, &d->pending_room, event);
        break;
    case OP_WRITE:
    case OP_TRUNCATE:
        at = file_of(d, e->inode);
        if (at >= 0) append(&d->files[at].pending, &d->files[at].n_pending, &d->files[at].pending_room, event);
        break;
    case OP_SYNC:
        at = file_of(d, e->inode);
        if (at >= 0) {
            sync_file(d, &d->files[at]);
        } else {
            sync_dir(d, e->path);
        }
        break;
    }
}

/* The power goes: what isn't synced comes out somehow. */
static void cut(disk *d, imp_rng *rng)
{
    uint64_t mood = imp_rng_below(rng, 4); /* nothing of it, all of it, some, some and torn */
    for (int i = 0; i < d->n_files; i++) {
        file *f = &d->files[i];
        for (size_t k = 0; k < f->n_pending; k++) {
            const preload_event *e = &d->events[f->pending[k]];
            bool there = mood == 1 || (mood >= 2 && imp_rng_below(rng, 2));
            if (!there) continue;
            if (mood == 3) apply_torn(f, e, rng);
            else apply_whole(f, e);
        }
    }
    /* Changes of names in a directory stay in order; how far each directory came is another matter. */
    char stopped[16][256];
    size_t n_stopped = 0;
    for (size_t i = 0; i < d->n_pending; i++) {
        char parent[256];
        bool stop = false;
        parent_of(d->events[d->pending[i]].path, parent);
        for (size_t k = 0; k < n_stopped; k++) stop = stop || strcmp(stopped[k], parent) == 0;
        if (stop) continue;
        if (mood == 0 || (mood >= 2 && imp_rng_below(rng, 3) == 0)) {
            assert_true(n_stopped < 16);
            memcpy(stopped[n_stopped++], parent, sizeof parent);
        } else {
            apply_name(d, &d->events[d->pending[i]], created(d, d->pending[i]));
        }
    }
}

/* As it is now, into an empty folder. What lies in a directory that isn't there is lost. */
static void write_out(const disk *d, const char *dir)
{
    assert_int_equal(mkdir(dir, 0700), 0);
    for (size_t i = 0; i < d->n_names; i++) {
        if (d->names[i].file < 0) (void)mkdir(imp_test_path(dir, d->names[i].path), 0700);
    }
    for (size_t i = 0; i < d->n_names; i++) {
        if (d->names[i].file < 0) continue;
        const file *f = &d->files[d->names[i].file];
        int fd = open(imp_test_path(dir, d->names[i].path), O_WRONLY | O_CREAT | O_EXCL, 0600);
        if (fd < 0 && errno == ENOENT) continue;
        assert_true(fd >= 0);
        assert_int_equal(write(fd, f->bytes, f->n), f->n);
        close(fd);
    }
}

static void disk_free(disk *d)
{
    for (int i = 0; i < d->n_files; i++) {
        free(d->files[i].bytes);
        free(d->files[i].pending);
    }
    free(d->pending);
    free(d);
}

/* ---- afterwards */

static bool broken(char line[256], const char *what, long long n, int which)
{
    snprintf(line, 256, "%s (%lld, prompt %d): %s", what, n, which, imp_last_error());
    return false;
}

static int is_pinned(const imp_node_info *node, void *user)
{
    (void)user;
    return node->pinned != 0;
}

/* Is all as it must be? Else `line` says what isn't. A wrong byte ends the test at once. */
static bool sound(const disk *d, const char *dir, const imp_store_opts *opts, char line[256])
{
    imp_world w;
    int32_t tokens[MAX_TOKENS];
    bool good = true;
    imp_stats st;
    if (imp_world_open(&w, dir, opts, NULL) < 0) return broken(line, "not opened", 0, 0);
    int64_t n = imp_world_verify(&w, false, false);
    if (n != 0) good = broken(line, "findings", (long long)n, 0);
    for (int i = 0; good && i < N_PROMPTS; i++) {
        size_t n_tokens = prompt(i, tokens);
        n = check(&w, tokens, n_tokens);
        assert_int_not_equal(n, IMP_WORLD_WRONG);
        bool lost = d->promised[i] && n < (int64_t)n_tokens - 3; /* a tail under min_store may be missing */
        if (n < 0 || lost) good = broken(line, "lost", (long long)n, i);
        if (d->removed[i] && n > 0) good = broken(line, "back again", (long long)n, i);
    }
    if (good && d->pinned && imp_store_list(w.store, is_pinned, NULL) != 1) good = broken(line, "a pin lost", 0, 0);
    /* Segments whose bases aren't there have sketches that are of no use. */
    assert_int_equal(imp_store_stats(w.store, &st), 0);
    if (good && st.corrupt_chunks + st.io_errors > 0) good = broken(line, "damaged", (long long)st.corrupt_chunks, 0);
    if (good) {
        n = check(&w, tokens, prompt(0, tokens));
        good = commit(&w, tokens, prompt(0, tokens), n) == 0;
        if (!good) (void)broken(line, "not stored again", 0, 0);
    }
    imp_world_close(&w);
    return good;
}

static size_t n_states(void)
{
    const char *text = getenv("IMP_CRASH_STATES"), *all = getenv("IMP_FAULTS");
    if (text && *text) return (size_t)strtoul(text, NULL, 10);
    return all && strcmp(all, "all") == 0 ? 3000 : 60;
}

/* Syncs that are left out, as by a store that forgot them: of files whose path contains `part`, or is it. */
typedef struct omission {
    const char *part;
    bool is_it;
} omission;

typedef struct life {
    const char *name;
    imp_store_opts first, then;
    preload_event *events;
    size_t n_events, n_promised;
    char after[256];
} life;

static bool left_out(const preload_event *e, const omission *missing)
{
    if (!missing || e->op != OP_SYNC) return false;
    return missing->is_it ? strcmp(e->path, missing->part) == 0 : strstr(e->path, missing->part) != NULL;
}

/* A state after `last` events, without some syncs. */
static bool one_state(life *l, size_t last, imp_rng *rng, const omission *missing, char line[256])
{
    char command[600];
    disk *d = calloc(1, sizeof *d);
    assert_non_null(d);
    d->events = l->events;
    for (size_t k = 0; k < last; k++) {
        if (!left_out(&l->events[k], missing)) step(d, k);
    }
    cut(d, rng);
    for (int k = 0; k < N_PROMPTS; k++) l->n_promised += d->promised[k];
    snprintf(command, sizeof command, "rm -rf '%s'", l->after);
    assert_int_equal(system(command), 0);
    write_out(d, l->after);
    bool good = sound(d, l->after, &l->then, line);
    if (!good && !missing) fail_msg("%s: cut after %zu of %zu events: %s", l->name, last, l->n_events, line);
    disk_free(d);
    return good;
}

static size_t any_moment(const life *l, imp_rng *rng) { return 1 + imp_rng_below(rng, l->n_events); }

/* Right behind the removal. */
static size_t removed_at(const life *l)
{
    size_t last = 0;
    for (size_t i = 0; i < l->n_events; i++) {
        const preload_event *e = &l->events[i];
        if (e->op == OP_MARK && e->n_bytes >= REMOVED && e->n_bytes < PINNED) last = i + 1;
    }
    assert_true(last > 0);
    return last;
}

/* The mark of an encrypted store gets its name by a link, which isn't logged: to the log, its file is removed after a
 * sync of the directory. Instead it is renamed before that. */
static void mark_is_renamed(life *l)
{
    size_t n = 0;
    for (size_t i = 1; i < l->n_events; i++) {
        preload_event *e = &l->events[i], *before = &l->events[i - 1], kept = *before;
        if (e->op != OP_UNLINK || strncmp(e->path, "encrypted.", 10) != 0) continue;
        if (before->op != OP_SYNC || before->path[0] != '\0') continue; /* what was never there */
        e->op = OP_RENAME;
        strcpy(e->to, "encrypted");
        *before = *e;
        *e = kept;
        n++;
    }
    assert_int_equal(n, 1);
}

static void power_cuts(life *l, const char *folder, size_t n, const omission *missing, size_t n_missing)
{
    char dir[256], line[256];
    imp_rng rng;
    snprintf(dir, sizeof dir, "%s/store", folder);
    snprintf(l->after, sizeof l->after, "%s/after", folder);
    assert_int_equal(mkdir(dir, 0700), 0);
    preload_watch(dir, NULL);
    preload_log_start();
    live(dir, &l->first, &l->then);
    l->events = preload_log_end(&l->n_events);
    preload_watch(NULL, NULL);
    if (l->then.key_file) mark_is_renamed(l);
    assert_true(l->n_events > 200);
    imp_rng_seed(&rng, imp_test_seed());
    (void)one_state(l, l->n_events, &rng, NULL, line);
    for (int i = 0; i < STATES_REMOVED; i++) (void)one_state(l, removed_at(l), &rng, NULL, line);
    for (size_t i = 1; i < n; i++) (void)one_state(l, any_moment(l, &rng), &rng, NULL, line);
    fprintf(stderr, "%s: %zu states of %zu events, %zu promises kept\n", l->name, n, l->n_events, l->n_promised);
    assert_true(l->n_promised > 0);

    /* And each kind of sync is there for a reason: without it some state of them is not sound. */
    for (size_t m = 0; m < n_missing; m++) {
        const char *of = missing[m].part[0] ? missing[m].part : "the store's directory";
        size_t i = 1;
        while (i < STATES_WITHOUT && one_state(l, any_moment(l, &rng), &rng, &missing[m], line)) i++;
        if (i == STATES_WITHOUT) fail_msg("%s: %d states don't need syncs of %s", l->name, STATES_WITHOUT, of);
        fprintf(stderr, "%s: without syncs of %s: %s\n", l->name, of, line);
    }
    preload_log_free(l->events, l->n_events);
}

#define CUTS(l, folder, n, missing) power_cuts(l, folder, n, missing, sizeof(missing) / sizeof(missing)[0])

static void of_a_store(void **state)
{
    static const omission missing[] = {
        {".seg", false}, {"segments", true}, {"catalogue.db-wal", true}, {"catalogue.db", true}, {"", true},
    };
    life l = {.name = "plain"};
    imp_world_opts(&l.first);
    l.then = l.first;
    l.then.order = IMP_ORDER_IMPORTANCE;
    CUTS(&l, *state, n_states(), missing);
}

/* With all that it can keep, which takes files of their own. */
static void of_a_rich_store(void **state)
{
    static const omission missing[] = {{".basis", false}, {"bases", true}};
    life l = {.name = "rich"};
    imp_world_rich_opts(&l.first);
    l.first.rest = IMP_REST_RAW;
    l.then = l.first;
    l.then.order = IMP_ORDER_IMPORTANCE;
    CUTS(&l, *state, n_states() / 3, missing);
}

static void of_an_encrypted_store(void **state)
{
#ifdef IMPRESS_HAVE_CRYPTO
    static const omission missing[] = {{"encrypted", false}, {"", true}};
    life l = {.name = "encrypted"};
    char key[256];
    snprintf(key, sizeof key, "%s/key", (char *)*state);
    FILE *f = fopen(key, "w");
    assert_non_null(f);
    assert_true(fchmod(fileno(f), 0600) == 0 && fprintf(f, "%064x", 0x5ec2e7) == 64 && fclose(f) == 0);
    imp_world_rich_opts(&l.first);
    l.first.key_file = key;
    l.then = l.first;
    l.then.order = IMP_ORDER_IMPORTANCE;
    CUTS(&l, *state, n_states() / 3, missing);
#else
    (void)state;
    skip(); /* there is no encryption without libcrypto */
#endif
}

static int set_up(void **state)
{
    imp_test_no_log();
    *state = imp_test_make_fast_dir();
    return *state ? 0 : -1;
}

static int tear_down(void **state)
{
    preload_watch(NULL, NULL);
    imp_test_remove_dir(*state);
    return 0;
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {TEST(of_a_store), TEST(of_a_rich_store), TEST(of_an_encrypted_store)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
