/* test_catalogue.c: the catalogue against a naive twin, through two connections; damage, crashes, and refusals. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <setjmp.h>
#include <signal.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/rng.h"
#include "store/catalogue.h"
#include "support/support.h"

enum { N_SPACES = 6, N_SEGMENTS = 40, N_NODES = 80, MAX_RUN = 9 };

/* ------------------------------------------------------------------------------------------------------- twin ---- */

typedef struct twin_node {
    bool there, derived, pinned;
    uint64_t parent, segment, depth;
    uint32_t space, segment_first, n_tokens;
    int64_t created_s;
    int32_t tokens[MAX_RUN];
} twin_node;

typedef struct twin {
    struct { bool there; int64_t created_s; char name[24]; } spaces[N_SPACES];
    struct { bool there; uint32_t space, n_tokens; uint64_t disk_bytes; } segments[N_SEGMENTS];
    struct { bool there; uint64_t instance, bytes; } reservations[N_SEGMENTS];
    twin_node nodes[N_NODES]; /* by id; 0 isn't used */
} twin;

/* Numbers in the twin, ids in the catalogue. High bits are used: ids are 64 bits wide. */
static imp_hash128 space_id(uint32_t i) { return (imp_hash128){.lo = 0x9e3779b97f4a7c15u * (i + 1), .hi = ~(uint64_t)i}; }
static uint64_t segment_id(uint64_t i) { return 0xbf58476d1ce4e5b9u * (i + 1); }

static uint32_t space_number(imp_hash128 id)
{
    for (uint32_t i = 0; i < N_SPACES; i++) {
        if (space_id(i).lo == id.lo && space_id(i).hi == id.hi) return i;
    }
    fail_msg("a space that nobody made");
    return 0;
}

static uint32_t segment_number(uint64_t id)
{
    for (uint32_t i = 0; i < N_SEGMENTS; i++) {
        if (segment_id(i) == id) return i;
    }
    fail_msg("a segment that nobody made");
    return 0;
}

/* ------------------------------------------------------------------------------------- what a connection knows ---- */

enum phase { REMOVALS, SPACES, SEGMENTS, NODES };

typedef struct view {
    imp_cat *cat;
    twin known;
    uint64_t since;
    enum phase phase;
    uint64_t depth;   /* of the node told last */
    unsigned resets;
    bool broken;      /* told something impossible, which damage must not lead to either */
} view;

static void step_to(view *v, enum phase phase)
{
    if (phase < v->phase) v->broken = true;
    v->phase = phase;
}

static int on_reset(void *user)
{
    view *v = user;
    if (v->phase != REMOVALS) v->broken = true;
    memset(v->known.spaces, 0, sizeof v->known.spaces);
    memset(v->known.segments, 0, sizeof v->known.segments);
    memset(v->known.nodes, 0, sizeof v->known.nodes);
    v->resets++;
    return 0;
}

static int on_space(const imp_cat_space *s, void *user)
{
    view *v = user;
    uint32_t i = space_number(s->id);
    step_to(v, SPACES);
    memset(&v->known.spaces[i], 0, sizeof v->known.spaces[i]);
    v->known.spaces[i].there = true;
    v->known.spaces[i].created_s = s->created_s;
    snprintf(v->known.spaces[i].name, sizeof v->known.spaces[i].name, "%s", s->model_name);
    return 0;
}

static int on_space_removed(imp_hash128 id, void *user)
{
    view *v = user;
    step_to(v, REMOVALS);
    memset(&v->known.spaces[space_number(id)], 0, sizeof v->known.spaces[0]);
    return 0;
}

static int on_segment(const imp_cat_segment *s, void *user)
{
    view *v = user;
    uint32_t i = segment_number(s->id);
    step_to(v, SEGMENTS);
    memset(&v->known.segments[i], 0, sizeof v->known.segments[i]);
    v->known.segments[i].there = true;
    v->known.segments[i].space = space_number(s->space);
    v->known.segments[i].n_tokens = s->n_tokens;
    v->known.segments[i].disk_bytes = s->disk_bytes;
    return 0;
}

static int on_segment_removed(uint64_t id, void *user)
{
    view *v = user;
    step_to(v, REMOVALS);
    memset(&v->known.segments[segment_number(id)], 0, sizeof v->known.segments[0]);
    return 0;
}

static int on_node(const imp_cat_node *n, void *user)
{
    view *v = user;
    if (n->id == 0 || n->id >= N_NODES || n->n_tokens > MAX_RUN || (v->phase == NODES && n->depth < v->depth)) {
        v->broken = true;
        return 0;
    }
    step_to(v, NODES);
    v->depth = n->depth;
    twin_node *t = &v->known.nodes[n->id];
    memset(t, 0, sizeof *t);
    t->there = true;
    t->derived = n->derived;
    t->pinned = n->pinned;
    t->parent = n->parent;
    t->segment = segment_number(n->segment);
    t->depth = n->depth;
    t->space = space_number(n->space);
    t->segment_first = n->segment_first;
    t->n_tokens = n->n_tokens;
    t->created_s = n->created_s;
    memcpy(t->tokens, n->tokens, n->n_tokens * sizeof *n->tokens);
    return 0;
}

static int on_node_removed(uint64_t id, void *user)
{
    view *v = user;
    step_to(v, REMOVALS);
    memset(&v->known.nodes[id % N_NODES], 0, sizeof v->known.nodes[0]);
    return 0;
}

static int refresh(view *v)
{
    imp_cat_reader reader = {
        .reset = on_reset,
        .space = on_space,
        .space_removed = on_space_removed,
        .segment = on_segment,
        .segment_removed = on_segment_removed,
        .node = on_node,
        .node_removed = on_node_removed,
        .user = v,
    };
    v->phase = REMOVALS;
    v->depth = 0;
    return imp_cat_read(v->cat, v->since, &reader, &v->since);
}

/* In memory if there is such a folder: nothing here needs a disk, and every change is synced. */
static char *make_dir(void)
{
    char *dir = imp_test_make_dir("/dev/shm");
    if (!dir) dir = imp_test_make_dir(NULL);
    assert_non_null(dir);
    return dir;
}

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        int ok_rc_ = (call);                                                                                           \
        if (ok_rc_ != 0) fail_msg("%s: %d, %s", #call, ok_rc_, imp_last_error());                                      \
    } while (0)

static bool same_rows(const twin *a, const twin *b)
{
    return memcmp(a->spaces, b->spaces, sizeof a->spaces) == 0 &&
           memcmp(a->segments, b->segments, sizeof a->segments) == 0 && memcmp(a->nodes, b->nodes, sizeof a->nodes) == 0;
}

static void check_view(const view *v, const twin *truth)
{
    assert_false(v->broken);
    assert_true(same_rows(&v->known, truth));
}

static int on_reservation(const imp_cat_reservation *r, void *user)
{
    twin *t = user;
    uint32_t i = segment_number(r->segment);
    assert_false(t->reservations[i].there);
    t->reservations[i].there = true;
    t->reservations[i].instance = r->instance;
    t->reservations[i].bytes = r->bytes;
    return 0;
}

static void check_reservations(imp_cat *c, const twin *truth)
{
    static twin seen;
    memset(&seen, 0, sizeof seen);
    OK(imp_cat_reservations(c, on_reservation, &seen));
    assert_memory_equal(seen.reservations, truth->reservations, sizeof seen.reservations);
    uint64_t segments = 0, reserved = 0, s, r;
    for (size_t i = 0; i < N_SEGMENTS; i++) {
        if (truth->segments[i].there) segments += truth->segments[i].disk_bytes;
        if (truth->reservations[i].there) reserved += truth->reservations[i].bytes;
    }
    OK(imp_cat_totals(c, &s, &r));
    assert_int_equal(s, segments);
    assert_int_equal(r, reserved);
}

/* ---------------------------------------------------------------------------------------------- random changes ---- */

static void put_twin_node(imp_cat *c, const twin *t, uint64_t id)
{
    const twin_node *n = &t->nodes[id];
    imp_cat_node row = {
        .id = id,
        .parent = n->parent,
        .space = space_id(n->space),
        .segment = segment_id(n->segment),
        .segment_first = n->segment_first,
        .n_tokens = n->n_tokens,
        .depth = n->depth,
        .derived = n->derived,
        .pinned = n->pinned,
        .created_s = n->created_s,
        .tokens = n->tokens,
    };
    OK(imp_cat_put_node(c, &row));
}

/* One random row put or removed, in the catalogue and in the twin. */
static void change_one(imp_cat *c, twin *t, imp_rng *r)
{
    uint32_t space = (uint32_t)imp_rng_below(r, N_SPACES), segment = (uint32_t)imp_rng_below(r, N_SEGMENTS);
    uint64_t id = 1 + imp_rng_below(r, N_NODES - 1);
    switch (imp_rng_below(r, 9)) {
    case 0: {
        memset(&t->spaces[space], 0, sizeof t->spaces[space]);
        t->spaces[space].there = true;
        t->spaces[space].created_s = (int64_t)imp_rng_u64(r);
        snprintf(t->spaces[space].name, sizeof t->spaces[space].name, "m%u", (unsigned)imp_rng_below(r, 99999));
        imp_cat_space row = {space_id(space), t->spaces[space].name, t->spaces[space].created_s};
        OK(imp_cat_put_space(c, &row));
        break;
    }
    case 1: {
        t->segments[segment].there = true;
        t->segments[segment].space = space;
        t->segments[segment].n_tokens = (uint32_t)imp_rng_u64(r);
        t->segments[segment].disk_bytes = imp_rng_below(r, 1u << 30);
        imp_cat_segment row = {segment_id(segment), space_id(space), t->segments[segment].disk_bytes,
                               t->segments[segment].n_tokens};
        OK(imp_cat_put_segment(c, &row));
        break;
    }
    case 2:
        assert_int_equal(imp_cat_remove_segment(c, segment_id(segment)), t->segments[segment].there ? 0 : IMP_E_NOTFOUND);
        memset(&t->segments[segment], 0, sizeof t->segments[segment]);
        break;
    case 3:
        assert_int_equal(imp_cat_remove_node(c, id), t->nodes[id].there ? 0 : IMP_E_NOTFOUND);
        memset(&t->nodes[id], 0, sizeof t->nodes[id]);
        break;
    case 4: {
        t->reservations[segment].there = true;
        t->reservations[segment].instance = imp_rng_u64(r);
        t->reservations[segment].bytes = imp_rng_below(r, 1u << 30);
        imp_cat_reservation row = {segment_id(segment), t->reservations[segment].instance,
                                   t->reservations[segment].bytes};
        OK(imp_cat_reserve(c, &row));
        break;
    }
    case 5:
        assert_int_equal(imp_cat_unreserve(c, segment_id(segment)),
                         t->reservations[segment].there ? 0 : IMP_E_NOTFOUND);
        memset(&t->reservations[segment], 0, sizeof t->reservations[segment]);
        break;
    case 6:
        assert_int_equal(imp_cat_remove_space(c, space_id(space)), t->spaces[space].there ? 0 : IMP_E_NOTFOUND);
        memset(&t->spaces[space], 0, sizeof t->spaces[space]);
        break;
    default: {
        twin_node *n = &t->nodes[id];
        memset(n, 0, sizeof *n);
        n->there = true;
        n->derived = imp_rng_below(r, 2);
        n->pinned = imp_rng_below(r, 2);
        n->parent = imp_rng_below(r, N_NODES);
        n->segment = segment;
        n->depth = imp_rng_below(r, 50);
        n->space = space;
        n->segment_first = (uint32_t)imp_rng_u64(r);
        n->n_tokens = 1 + (uint32_t)imp_rng_below(r, MAX_RUN);
        n->created_s = (int64_t)imp_rng_u64(r);
        for (uint32_t i = 0; i < n->n_tokens; i++) n->tokens[i] = (int32_t)imp_rng_u64(r);
        put_twin_node(c, t, id);
        break;
    }
    }
}

/* A change as the store makes it: read, change, commit; or give up. */
static void change(view *v, twin *truth, imp_rng *r)
{
    static view saved;
    static twin pending;
    OK(imp_cat_begin(v->cat));
    OK(refresh(v));
    check_view(v, truth);
    saved = *v;
    pending = *truth;
    size_t n = (size_t)imp_rng_below(r, 12);
    for (size_t i = 0; i < n; i++) change_one(v->cat, &pending, r);
    check_reservations(v->cat, &pending);
    if (imp_rng_below(r, 4) == 0) {
        OK(refresh(v)); /* one's own changes are told too */
        check_view(v, &pending);
    }
    if (imp_rng_below(r, 4) == 0) {
        imp_cat_rollback(v->cat);
        *v = saved;
    } else {
        OK(imp_cat_commit(v->cat));
        *truth = pending;
        v->known = pending;
        v->since = imp_cat_generation(v->cat);
    }
}

static void check_clean_line(const char *what, void *user)
{
    (void)user;
    /* Random rows don't fit together; everything else must be right. */
    if (!strstr(what, "doesn't lie in") && !strstr(what, "doesn't follow") && !strstr(what, "is in no space")) {
        fail_msg("%s", what);
    }
}

static void test_twin(void **state)
{
    (void)state;
    static view views[2];
    static twin truth;
    char *dir = make_dir();
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    memset(views, 0, sizeof views);
    memset(&truth, 0, sizeof truth);
    for (size_t i = 0; i < 2; i++) OK(imp_cat_open(dir, 0, &views[i].cat));
    for (int round = 0; round < 400; round++) {
        view *v = &views[imp_rng_below(&r, 2)];
        bool changed;
        switch (imp_rng_below(&r, 8)) {
        case 0:
        case 1:
        case 2: change(v, &truth, &r); break;
        case 3: /* another's statistics aren't a change */
            OK(imp_cat_put_use(v->cat, 1 + imp_rng_below(&r, N_NODES - 1), imp_rng_below(&r, 9), 5));
            break;
        case 4:
            if (imp_rng_below(&r, 8)) break;
            imp_cat_close(v->cat);
            OK(imp_cat_open(dir, 0, &v->cat));
            break;
        case 5: check_reservations(v->cat, &truth); break;
        default:
            OK(imp_cat_changed(v->cat, &changed));
            if (changed) OK(refresh(v));
            check_view(v, &truth);
            OK(imp_cat_changed(v->cat, &changed));
            assert_false(changed);
            break;
        }
    }
    OK(imp_cat_check(views[0].cat, check_clean_line, NULL));
    OK(imp_cat_compact(views[0].cat));
    for (size_t i = 0; i < 2; i++) {
        OK(refresh(&views[i]));
        check_view(&views[i], &truth);
        views[i].since = 0;
        OK(refresh(&views[i]));
        check_view(&views[i], &truth);
        imp_cat_close(views[i].cat);
    }
    imp_test_remove_dir(dir);
}

/* ------------------------------------------------------------------------------------------------ single matters -- */

static imp_cat *open_in(const char *dir)
{
    imp_cat *c = NULL;
    OK(imp_cat_open(dir, 0, &c));
    return c;
}

static void put_one_segment(imp_cat *c, uint32_t i, uint32_t n_tokens)
{
    imp_cat_segment row = {segment_id(i), space_id(0), 4096, n_tokens};
    OK(imp_cat_put_segment(c, &row));
}

/* Who stays away for longer than the log reaches is told everything anew. */
static void test_log_end(void **state)
{
    (void)state;
    static view a, b;
    memset(&a, 0, sizeof a);
    memset(&b, 0, sizeof b);
    char *dir = make_dir();
    a.cat = open_in(dir);
    b.cat = open_in(dir);
    OK(refresh(&a));
    OK(refresh(&b));
    assert_int_equal(b.resets, 1);
    OK(imp_cat_begin(a.cat));
    for (uint32_t i = 0; i < IMP_CAT_LOG_KEEP; i++) put_one_segment(a.cat, i % N_SEGMENTS, i);
    OK(imp_cat_commit(a.cat));
    OK(refresh(&b));
    assert_int_equal(b.resets, 1); /* as far as promised, without */
    uint64_t start = b.since;
    OK(imp_cat_begin(a.cat));
    for (uint32_t i = 0; i < IMP_CAT_LOG_KEEP * 2; i++) put_one_segment(a.cat, i % N_SEGMENTS, i);
    OK(imp_cat_commit(a.cat));
    imp_cat_reader no_reset = {.segment = on_segment, .user = &b};
    assert_int_equal(imp_cat_read(b.cat, b.since, &no_reset, &b.since), IMP_E_STALE);
    assert_int_equal(b.since, start);
    OK(refresh(&b));
    assert_int_equal(b.resets, 2);
    OK(refresh(&a));
    check_view(&b, &a.known);
    /* The last ones that are promised. */
    uint64_t present = b.since;
    b.since = present - IMP_CAT_LOG_KEEP;
    OK(refresh(&b));
    assert_int_equal(b.resets, 2);
    assert_int_equal(b.since, present);
    check_view(&b, &a.known);
    /* A generation of the future, or of another catalogue. */
    b.since = present + 1;
    OK(refresh(&b));
    assert_int_equal(b.resets, 3);
    imp_cat_close(a.cat);
    imp_cat_close(b.cat);
    imp_test_remove_dir(dir);
}

static int stop_at_once(const imp_cat_segment *s, void *user)
{
    (void)s, (void)user;
    return 7;
}

static void test_callbacks(void **state)
{
    (void)state;
    char *dir = make_dir();
    imp_cat *c = open_in(dir);
    OK(imp_cat_begin(c));
    put_one_segment(c, 1, 1);
    put_one_segment(c, 2, 1);
    OK(imp_cat_commit(c));
    imp_cat_reader reader = {.segment = stop_at_once};
    uint64_t generation = 99;
    bool changed;
    assert_int_equal(imp_cat_read(c, 0, &reader, &generation), 7);
    assert_int_equal(generation, 99);
    OK(imp_cat_changed(c, &changed));
    assert_true(changed); /* not all was told */
    imp_cat_close(c);
    imp_test_remove_dir(dir);
}

static int count_use(uint64_t node, uint64_t hits, int64_t used_s, void *user)
{
    uint64_t *sum = user;
    *sum += node * 10000 + hits * 100 + (uint64_t)used_s;
    return 0;
}

static void test_advice(void **state)
{
    (void)state;
    char *dir = make_dir();
    imp_cat *c = open_in(dir);
    uint64_t sum = 0, id = 0, id2 = 0;
    OK(imp_cat_put_use(c, 3, 1, 2));
    OK(imp_cat_begin(c));
    OK(imp_cat_put_use(c, 3, 5, 7));
    OK(imp_cat_put_use(c, 4, 1, 1));
    OK(imp_cat_commit(c));
    OK(imp_cat_uses(c, count_use, &sum));
    assert_int_equal(sum, 30507 + 40101);

    imp_cat_file file = {1, UINT64_MAX, 3, -4, 5}, other = file;
    imp_hash128 hash = {UINT64_MAX, 7}, got = {0, 0};
    assert_int_equal(imp_cat_fingerprint(c, &file, &got), IMP_E_NOTFOUND);
    OK(imp_cat_put_fingerprint(c, &file, hash));
    OK(imp_cat_fingerprint(c, &file, &got));
    assert_true(got.lo == hash.lo && got.hi == hash.hi);
    other.ctime_ns++;
    assert_int_equal(imp_cat_fingerprint(c, &other, &got), IMP_E_NOTFOUND);
    OK(imp_cat_put_fingerprint(c, &other, hash));
    assert_int_equal(imp_cat_fingerprint(c, &file, &got), IMP_E_NOTFOUND); /* one row per file */

    assert_int_equal(imp_cat_new_node_id(c, &id), IMP_E_ARG);
    OK(imp_cat_begin(c));
    OK(imp_cat_new_node_id(c, &id));
    OK(imp_cat_commit(c));
    imp_cat_close(c);
    c = open_in(dir);
    OK(imp_cat_begin(c));
    OK(imp_cat_new_node_id(c, &id2));
    assert_int_equal(id2, id + 1);
    /* Ids given by hand count. */
    int32_t token = 1;
    imp_cat_node node = {.id = 500, .segment = 1, .n_tokens = 1, .tokens = &token};
    OK(imp_cat_put_node(c, &node));
    OK(imp_cat_new_node_id(c, &id2));
    assert_int_equal(id2, 501);
    OK(imp_cat_put_use(c, 500, 9, 9));
    OK(imp_cat_remove_node(c, 500)); /* and its use with it */
    OK(imp_cat_commit(c));
    uint64_t sum2 = 0;
    OK(imp_cat_uses(c, count_use, &sum2));
    assert_int_equal(sum2, sum);
    imp_cat_close(c);
    imp_test_remove_dir(dir);
}

static int drop_reservation(const imp_cat_reservation *r, void *user)
{
    return r->instance == 1 ? imp_cat_unreserve(user, r->segment) : 0;
}

static void test_busy_and_reservations(void **state)
{
    (void)state;
    char *dir = make_dir();
    imp_cat *a = open_in(dir), *b = open_in(dir);
    imp_cat_busy_ms(b, 1);
    OK(imp_cat_begin(a));
    assert_int_equal(imp_cat_begin(b), IMP_E_BUSY);
    for (uint64_t i = 0; i < 6; i++) {
        imp_cat_reservation r = {segment_id(i), i % 2, (uint64_t)100 << i};
        OK(imp_cat_reserve(a, &r));
    }
    OK(imp_cat_commit(a));
    OK(imp_cat_begin(b));
    OK(imp_cat_reservations(b, drop_reservation, b));
    OK(imp_cat_commit(b));
    uint64_t segments, reserved;
    OK(imp_cat_totals(a, &segments, &reserved));
    assert_int_equal(reserved, 100 + 400 + 1600);
    imp_cat_close(a);
    imp_cat_close(b);
    imp_test_remove_dir(dir);
}

static void count_line(const char *what, void *user);

static off_t size_of(const char *dir, const char *name)
{
    struct stat st;
    assert_int_equal(stat(imp_test_path(dir, name), &st), 0);
    return st.st_size;
}

static void test_checkpoint(void **state)
{
    (void)state;
    char *dir = make_dir();
    imp_cat *c = open_in(dir);
    OK(imp_cat_begin(c));
    put_one_segment(c, 1, 1);
    assert_int_equal(imp_cat_checkpoint(c, 1000), IMP_E_ARG);
    assert_int_equal(imp_cat_compact(c), IMP_E_ARG);
    OK(imp_cat_commit(c));
    assert_true(size_of(dir, "catalogue.db-wal") > 0);
    OK(imp_cat_checkpoint(c, 1000));
    assert_int_equal(size_of(dir, "catalogue.db-wal"), 0);
    OK(imp_cat_begin(c));
    for (uint32_t i = 0; i < 20000; i++) put_one_segment(c, i % N_SEGMENTS, i);
    OK(imp_cat_commit(c));
    OK(imp_cat_compact(c));
    assert_int_equal(size_of(dir, "catalogue.db-wal"), 0);
    imp_cat_close(c);
    imp_test_remove_dir(dir);
}

static void test_failed_part(void **state)
{
    (void)state;
    char *dir = make_dir();
    imp_cat *c = open_in(dir);
    imp_cat_node none = {.id = 1, .n_tokens = 0};
    OK(imp_cat_begin(c));
    put_one_segment(c, 1, 1);
    assert_int_equal(imp_cat_put_node(c, &none), IMP_E_ARG);
    assert_int_equal(imp_cat_commit(c), IMP_E_ARG); /* whole or not at all */
    uint64_t segments, reserved;
    OK(imp_cat_totals(c, &segments, &reserved));
    assert_int_equal(segments, 0);
    imp_cat_close(c);
    imp_test_remove_dir(dir);
}

/* ---------------------------------------------------------------------------------------------------- the files --- */

static unsigned mode_of(const char *dir, const char *name)
{
    struct stat st;
    assert_int_equal(stat(imp_test_path(dir, name), &st), 0);
    return st.st_mode & 07777;
}

static void test_modes(void **state)
{
    (void)state;
    static const mode_t masks[] = {0, 022, 0777};
    for (size_t i = 0; i < 3; i++) {
        char *dir = make_dir();
        mode_t old = umask(masks[i]);
        imp_cat *c = open_in(dir);
        OK(imp_cat_begin(c));
        put_one_segment(c, 1, 1);
        OK(imp_cat_commit(c));
        umask(old);
        assert_int_equal(mode_of(dir, "catalogue.db"), 0600);
        assert_int_equal(mode_of(dir, "catalogue.db-wal"), 0600);
        assert_int_equal(mode_of(dir, "catalogue.db-shm"), 0600);
        imp_cat_close(c);
        /* Someone opened it up: closed again. */
        assert_int_equal(chmod(imp_test_path(dir, "catalogue.db"), 0666), 0);
        imp_cat_close(open_in(dir));
        assert_int_equal(mode_of(dir, "catalogue.db"), 0600);
        imp_test_remove_dir(dir);
    }
}

static void test_refusals(void **state)
{
    (void)state;
    imp_cat *c = (imp_cat *)1;
    char *dir = make_dir(), *other = make_dir(), link[512];
    const char *db = imp_test_path(dir, "catalogue.db");
    assert_int_equal(imp_cat_open(imp_test_path(dir, "missing"), 0, &c), IMP_E_NOTFOUND);
    assert_null(c);
    assert_int_equal(imp_cat_open(dir, IMP_STORE_READONLY, &c), IMP_E_NOTFOUND);
    assert_int_equal(access(db, F_OK), -1);

    imp_cat_close(open_in(other));
    assert_int_equal(symlink(imp_test_path(other, "catalogue.db"), db), 0);
    assert_int_equal(imp_cat_open(dir, 0, &c), IMP_E_PERM);
    assert_int_equal(unlink(db), 0);
    assert_int_equal(symlink("nowhere", db), 0);
    assert_int_equal(imp_cat_open(dir, 0, &c), IMP_E_PERM);
    assert_int_equal(unlink(db), 0);
    assert_int_equal(mkdir(db, 0700), 0);
    assert_int_equal(imp_cat_open(dir, 0, &c), IMP_E_PERM);
    assert_int_equal(rmdir(db), 0);

    /* Someone else's file. */
    assert_int_equal(imp_test_make_file(db, 8192, 1), 0);
    assert_int_equal(imp_cat_open(dir, 0, &c), IMP_E_CORRUPT);
    OK(imp_cat_delete(dir));
    OK(imp_cat_delete(dir)); /* nothing there is fine */
    sqlite3 *theirs = NULL;
    assert_int_equal(sqlite3_open(db, &theirs), SQLITE_OK);
    assert_int_equal(sqlite3_exec(theirs, "CREATE TABLE t(x)", NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(theirs);
    assert_int_equal(imp_cat_open(dir, 0, &c), IMP_E_CORRUPT);
    assert_null(c);

    /* A folder reached through a symbolic link is the user's own business. */
    snprintf(link, sizeof link, "%s/link", dir);
    assert_int_equal(symlink(other, link), 0);
    imp_cat_close(open_in(link));
    imp_test_remove_dir(dir);
    imp_test_remove_dir(other);
}

static void exec_sql(const char *dir, const char *statement)
{
    sqlite3 *db = NULL;
    assert_int_equal(sqlite3_open(imp_test_path(dir, "catalogue.db"), &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, statement, NULL, NULL, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_close(db), SQLITE_OK);
}

static void test_versions(void **state)
{
    (void)state;
    char *dir = make_dir(), pragma[64];
    imp_cat *c = NULL;
    imp_cat_close(open_in(dir));
    snprintf(pragma, sizeof pragma, "PRAGMA user_version=%d", (int)(int32_t)(5 | 0xfffa0000u));
    exec_sql(dir, pragma);
    assert_int_equal(imp_cat_open(dir, 0, &c), IMP_E_VERSION);
    assert_int_equal(imp_cat_open(dir, IMP_STORE_READONLY, &c), IMP_E_VERSION);
    exec_sql(dir, "PRAGMA user_version=5"); /* without its complement it's damage */
    assert_int_equal(imp_cat_open(dir, 0, &c), IMP_E_CORRUPT);
    snprintf(pragma, sizeof pragma, "PRAGMA user_version=%d", (int)(int32_t)0xffff0000u); /* there was none */
    exec_sql(dir, pragma);
    assert_int_equal(imp_cat_open(dir, 0, &c), IMP_E_VERSION);
    imp_test_remove_dir(dir);
}

/* A catalogue as the first version made it: read as it is, extended when it is written to. */
static void test_former_version(void **state)
{
    (void)state;
    char *dir = make_dir(), pragma[64];
    void *bytes;
    size_t n;
    uint64_t segment_bytes, reserved_bytes;
    imp_cat *c = open_in(dir), *other = NULL;
    OK(imp_cat_begin(c));
    put_one_segment(c, 3, 55);
    OK(imp_cat_put_use(c, 4, 5, 6));
    OK(imp_cat_commit(c));
    imp_cat_close(c);
    exec_sql(dir, "DROP TABLE setting; DROP TABLE history");
    snprintf(pragma, sizeof pragma, "PRAGMA user_version=%d", (int)(int32_t)(1 | 0xfffe0000u));
    exec_sql(dir, pragma);

    OK(imp_cat_open(dir, IMP_STORE_READONLY, &c));
    OK(imp_cat_totals(c, &segment_bytes, &reserved_bytes));
    assert_int_equal(imp_cat_get_history(c, segment_id(3), &bytes, &n), IMP_E_NOTFOUND);
    OK(imp_cat_check(c, check_clean_line, NULL));
    OK(imp_cat_open(dir, 0, &other)); /* extends it, under the reader's eyes */
    OK(imp_cat_begin(other));
    OK(imp_cat_put_history(other, segment_id(3), "abc", 3));
    OK(imp_cat_commit(other));
    uint64_t after;
    OK(imp_cat_totals(c, &after, &reserved_bytes));
    assert_int_equal(after, segment_bytes);
    assert_int_equal(imp_cat_get_history(c, segment_id(3), &bytes, &n), IMP_E_NOTFOUND);
    imp_cat_close(c);
    OK(imp_cat_check(other, check_clean_line, NULL));
    imp_cat_close(other);
    OK(imp_cat_open(dir, IMP_STORE_READONLY, &c));
    OK(imp_cat_get_history(c, segment_id(3), &bytes, &n));
    assert_int_equal(n, 3);
    imp_free(bytes);
    imp_cat_close(c);

    /* one table more than that version had, or one fewer: damage */
    snprintf(pragma, sizeof pragma, "PRAGMA user_version=%d", (int)(int32_t)(1 | 0xfffe0000u));
    exec_sql(dir, pragma);
    assert_int_equal(imp_cat_open(dir, 0, &c), IMP_E_CORRUPT);
    exec_sql(dir, "DROP TABLE setting; DROP TABLE history; DROP TABLE use");
    assert_int_equal(imp_cat_open(dir, 0, &c), IMP_E_CORRUPT);
    imp_test_remove_dir(dir);
}

static void put_limit(imp_cat *c, uint64_t limit)
{
    OK(imp_cat_begin(c));
    OK(imp_cat_put_limit(c, limit));
    OK(imp_cat_commit(c));
}

/* The second version had histories, and no settings. */
static void test_before_settings(void **state)
{
    (void)state;
    char *dir = make_dir(), pragma[64];
    void *bytes;
    size_t n;
    imp_cat *c = open_in(dir);
    OK(imp_cat_begin(c));
    put_one_segment(c, 3, 55);
    OK(imp_cat_put_history(c, segment_id(3), "abc", 3));
    OK(imp_cat_commit(c));
    imp_cat_close(c);
    exec_sql(dir, "DROP TABLE setting");
    snprintf(pragma, sizeof pragma, "PRAGMA user_version=%d", (int)(int32_t)(2 | 0xfffd0000u));
    exec_sql(dir, pragma);
    for (int writable = 0; writable < 2; writable++) {
        OK(imp_cat_open(dir, writable ? 0 : IMP_STORE_READONLY, &c));
        assert_int_equal(imp_cat_limit(c), 0);
        OK(imp_cat_get_history(c, segment_id(3), &bytes, &n));
        imp_free(bytes);
        OK(imp_cat_check(c, check_clean_line, NULL));
        if (writable) put_limit(c, 77);
        imp_cat_close(c);
    }
    c = open_in(dir);
    assert_int_equal(imp_cat_limit(c), 77);
    imp_cat_close(c);
    imp_test_remove_dir(dir);
}

/* The third one kept the rows of spaces for ever: the same tables, and whoever writes makes it one of the present. */
static void test_before_spaces_went(void **state)
{
    (void)state;
    char *dir = make_dir(), pragma[64];
    uint64_t generation;
    imp_cat_reader nothing = {0};
    imp_cat *c = open_in(dir);
    OK(imp_cat_begin(c));
    OK(imp_cat_put_space(c, &(imp_cat_space){space_id(1), "empty", 0}));
    OK(imp_cat_commit(c));
    imp_cat_close(c);
    snprintf(pragma, sizeof pragma, "PRAGMA user_version=%d", (int)(int32_t)(3 | 0xfffc0000u));
    exec_sql(dir, pragma);
    for (int writable = 0; writable < 2; writable++) {
        OK(imp_cat_open(dir, writable ? 0 : IMP_STORE_READONLY, &c));
        OK(imp_cat_read(c, 0, &nothing, &generation));
        OK(imp_cat_check(c, check_clean_line, NULL));
        if (!writable) imp_cat_close(c);
    }
    OK(imp_cat_begin(c));
    assert_int_equal(imp_cat_remove_space(c, space_id(2)), IMP_E_NOTFOUND);
    OK(imp_cat_remove_space(c, space_id(1)));
    OK(imp_cat_commit(c));
    OK(imp_cat_read(c, generation, &nothing, &generation));
    OK(imp_cat_check(c, check_clean_line, NULL));
    imp_cat_close(c);
    imp_test_remove_dir(dir);
}

/* The limit: one for all connections, seen with their next look, undone with a change; a damaged one is none. */
static void test_limit(void **state)
{
    (void)state;
    char *dir = make_dir();
    bool changed;
    uint64_t generation;
    imp_cat_reader nothing = {0};
    imp_cat *c = open_in(dir), *other = open_in(dir);
    OK(imp_cat_read(other, 0, &nothing, &generation));
    assert_int_equal(imp_cat_limit(c), 0);
    assert_int_equal(imp_cat_put_limit(c, 5), IMP_E_ARG); /* no change */
    put_limit(c, UINT64_MAX);
    assert_true(imp_cat_limit(c) == UINT64_MAX);
    OK(imp_cat_changed(other, &changed));
    assert_false(changed); /* of the rows nothing */
    assert_true(imp_cat_limit(other) == UINT64_MAX);
    put_limit(other, 3);
    assert_true(imp_cat_limit(c) == UINT64_MAX);
    OK(imp_cat_begin(c));
    assert_int_equal(imp_cat_limit(c), 3);
    OK(imp_cat_put_limit(c, 4));
    assert_int_equal(imp_cat_limit(c), 4);
    imp_cat_rollback(c);
    assert_int_equal(imp_cat_limit(c), 3);
    imp_cat_close(other);
    imp_cat_close(c);
    static const char *const changes[] = {
        "UPDATE setting SET value = 4",
        "UPDATE setting SET sum = sum + 1",
        "UPDATE setting SET name = 'limit_bytet'",
        "UPDATE setting SET value = NULL",
        "DELETE FROM setting",
    };
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        unsigned n_lines = 0;
        exec_sql(dir, changes[i]);
        c = open_in(dir);
        assert_int_equal(imp_cat_limit(c), 0);
        OK(imp_cat_check(c, count_line, &n_lines));
        assert_int_equal(n_lines, i < 4);
        if (i == 2) exec_sql(dir, "DELETE FROM setting"); /* nobody asks for that */
        put_limit(c, 3);
        assert_int_equal(imp_cat_limit(c), 3);
        n_lines = 0;
        OK(imp_cat_check(c, count_line, &n_lines));
        assert_int_equal(n_lines, 0);
        imp_cat_close(c);
    }
    imp_test_remove_dir(dir);
}

static void test_histories(void **state)
{
    (void)state;
    char *dir = make_dir();
    unsigned char long_one[5000];
    void *bytes;
    size_t n;
    imp_cat *c = open_in(dir);
    imp_test_fill(long_one, sizeof long_one, 7, 0);
    assert_int_equal(imp_cat_put_history(c, segment_id(1), "x", 1), IMP_E_ARG); /* no change */
    assert_int_equal(imp_cat_get_history(c, segment_id(1), &bytes, &n), IMP_E_NOTFOUND);
    OK(imp_cat_begin(c));
    put_one_segment(c, 1, 10);
    put_one_segment(c, 2, 10);
    OK(imp_cat_put_history(c, segment_id(1), "older", 5));
    OK(imp_cat_put_history(c, segment_id(1), long_one, sizeof long_one));
    OK(imp_cat_put_history(c, segment_id(2), "two", 3));
    OK(imp_cat_put_history(c, segment_id(3), "no such segment", 15));
    assert_int_equal(imp_cat_put_history(c, segment_id(2), long_one, IMP_CAT_HISTORY_BYTES_MAX + 1), IMP_E_ARG);
    OK(imp_cat_remove_history(c, segment_id(9)));
    OK(imp_cat_commit(c));
    imp_cat_close(c);
    c = open_in(dir);
    OK(imp_cat_get_history(c, segment_id(1), &bytes, &n));
    assert_int_equal(n, sizeof long_one);
    assert_memory_equal(bytes, long_one, n);
    imp_free(bytes);
    assert_int_equal(imp_cat_get_history(c, segment_id(3), &bytes, &n), IMP_E_NOTFOUND);
    assert_null(bytes);

    /* gone with its segment, or alone */
    OK(imp_cat_begin(c));
    OK(imp_cat_remove_segment(c, segment_id(1)));
    OK(imp_cat_remove_history(c, segment_id(2)));
    assert_int_equal(imp_cat_get_history(c, segment_id(1), &bytes, &n), IMP_E_NOTFOUND); /* inside it too */
    OK(imp_cat_commit(c));
    assert_int_equal(imp_cat_get_history(c, segment_id(2), &bytes, &n), IMP_E_NOTFOUND);
    OK(imp_cat_begin(c));
    OK(imp_cat_put_history(c, segment_id(2), "two", 3));
    OK(imp_cat_commit(c));
    imp_cat_close(c);

    /* other bytes than were put, or under another id: nothing, and a check tells */
    exec_sql(dir, "UPDATE history SET bytes = x'747770'");
    c = open_in(dir);
    assert_int_equal(imp_cat_get_history(c, segment_id(2), &bytes, &n), IMP_E_NOTFOUND);
    unsigned n_lines = 0;
    OK(imp_cat_check(c, count_line, &n_lines));
    assert_int_equal(n_lines, 1);
    imp_cat_close(c);
    exec_sql(dir, "UPDATE history SET bytes = x'74776f', segment = 77");
    c = open_in(dir);
    assert_int_equal(imp_cat_get_history(c, 77, &bytes, &n), IMP_E_NOTFOUND);
    imp_cat_close(c);
    imp_test_remove_dir(dir);
}

static void test_readonly(void **state)
{
    (void)state;
    static view v;
    memset(&v, 0, sizeof v);
    char *dir = make_dir();
    imp_cat *c = open_in(dir);
    OK(imp_cat_begin(c));
    put_one_segment(c, 1, 5);
    OK(imp_cat_commit(c));
    OK(imp_cat_open(dir, IMP_STORE_READONLY, &v.cat));
    OK(refresh(&v));
    assert_int_equal(v.known.segments[1].n_tokens, 5);
    assert_int_equal(imp_cat_begin(v.cat), IMP_E_PERM);
    imp_cat_close(v.cat);
    imp_cat_close(c);
    imp_test_remove_dir(dir);
}

static void test_replaced(void **state)
{
    (void)state;
    char *dir = make_dir();
    imp_cat *a = open_in(dir), *b;
    bool changed;
    OK(imp_cat_delete(dir));
    assert_int_equal(imp_cat_changed(a, &changed), IMP_E_STALE);
    b = open_in(dir);
    assert_int_equal(imp_cat_begin(a), IMP_E_STALE);
    OK(imp_cat_changed(b, &changed));
    imp_cat_close(a);
    OK(imp_cat_begin(b));
    put_one_segment(b, 1, 1);
    OK(imp_cat_commit(b));
    imp_cat_close(b);
    imp_test_remove_dir(dir);
}

/* ------------------------------------------------------------------------------------------------------- damage --- */

/* A catalogue with rows that fit together, closed. */
static void fill(const char *dir, twin *t, imp_rng *r)
{
    imp_cat *c = open_in(dir);
    memset(t, 0, sizeof *t);
    OK(imp_cat_begin(c));
    for (uint32_t i = 0; i < N_SPACES; i++) {
        t->spaces[i].there = true;
        snprintf(t->spaces[i].name, sizeof t->spaces[i].name, "model %u", i);
        imp_cat_space row = {space_id(i), t->spaces[i].name, 0};
        OK(imp_cat_put_space(c, &row));
    }
    for (uint32_t i = 0; i < N_SEGMENTS; i++) {
        t->segments[i].there = true;
        t->segments[i].space = i % N_SPACES;
        t->segments[i].n_tokens = 100;
        t->segments[i].disk_bytes = imp_rng_below(r, 1u << 30);
        imp_cat_segment row = {segment_id(i), space_id(i % N_SPACES), t->segments[i].disk_bytes, 100};
        OK(imp_cat_put_segment(c, &row));
    }
    for (uint64_t id = 1; id < N_NODES; id++) {
        twin_node *n = &t->nodes[id];
        n->there = true;
        n->segment = id % N_SEGMENTS;
        n->space = (uint32_t)(n->segment % N_SPACES);
        n->segment_first = 3;
        n->n_tokens = 1 + (uint32_t)imp_rng_below(r, MAX_RUN);
        if (id > 12) n->parent = id - 12, n->depth = t->nodes[id - 12].depth + t->nodes[id - 12].n_tokens;
        if (n->parent && t->nodes[n->parent].space != n->space) n->parent = 0, n->depth = 0;
        for (uint32_t i = 0; i < n->n_tokens; i++) n->tokens[i] = (int32_t)imp_rng_u64(r);
        put_twin_node(c, t, id);
        OK(imp_cat_put_use(c, id, id, 1));
    }
    for (uint32_t i = 0; i < 9; i++) change_one(c, t, r); /* holes, a longer log */
    imp_cat_file file = {1, 2, 3, 4, 5};
    OK(imp_cat_put_fingerprint(c, &file, (imp_hash128){6, 7}));
    OK(imp_cat_put_limit(c, 1234567));
    OK(imp_cat_commit(c));
    imp_cat_close(c);
}

static unsigned char *read_file(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    *n = (size_t)ftell(f);
    rewind(f);
    unsigned char *bytes = malloc(*n);
    assert_int_equal(fread(bytes, 1, *n, f), *n);
    fclose(f);
    return bytes;
}

static void write_file(const char *path, const unsigned char *bytes, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static void count_line(const char *what, void *user)
{
    (void)what;
    ++*(unsigned *)user;
}

/* Open a damaged catalogue and use all of it: it either says CORRUPT, or nothing is different. 1: it said so. */
static int use_damaged(const char *dir, const twin *truth, imp_rng *r)
{
    static view v;
    static twin pending;
    memset(&v, 0, sizeof v);
    int rc = imp_cat_open(dir, 0, &v.cat);
    if (rc < 0) goto out;
    imp_cat_file file = {1, 2, 3, 4, 5};
    imp_hash128 hash;
    assert_true(imp_cat_limit(v.cat) == 1234567 || imp_cat_limit(v.cat) == 0);
    rc = imp_cat_fingerprint(v.cat, &file, &hash);
    if (rc == 0) assert_true(hash.lo == 6 && hash.hi == 7);
    if (rc == IMP_E_NOTFOUND) rc = 0;
    if (rc == 0) rc = refresh(&v);
    if (rc < 0) goto out;
    check_view(&v, truth);
    unsigned n_lines = 0;
    OK(imp_cat_check(v.cat, count_line, &n_lines));
    rc = imp_cat_begin(v.cat);
    if (rc < 0) goto out;
    /* A change may run into damage that reading didn't, but must not make it pass. */
    pending = *truth;
    uint32_t segment = (uint32_t)imp_rng_below(r, N_SEGMENTS);
    imp_cat_segment row = {segment_id(segment), space_id(0), 77, 88};
    memset(&pending.segments[segment], 0, sizeof pending.segments[segment]);
    pending.segments[segment].there = true;
    pending.segments[segment].disk_bytes = 77;
    pending.segments[segment].n_tokens = 88;
    rc = imp_cat_put_segment(v.cat, &row);
    uint64_t id = 1 + imp_rng_below(r, N_NODES - 1);
    if (rc == 0 && pending.nodes[id].there) {
        rc = imp_cat_remove_node(v.cat, id);
        memset(&pending.nodes[id], 0, sizeof pending.nodes[id]);
    }
    if (rc == 0) rc = imp_cat_commit(v.cat);
    if (rc < 0) {
        imp_cat_rollback(v.cat);
        goto out;
    }
    v.since = 0;
    rc = refresh(&v);
    if (rc == 0) check_view(&v, &pending);
out:
    imp_cat_close(v.cat);
    if (rc < 0) assert_int_equal(rc, IMP_E_CORRUPT);
    assert_false(v.broken);
    return rc < 0;
}

static void test_damage(void **state)
{
    (void)state;
    static twin truth;
    char *dir = make_dir();
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    fill(dir, &truth, &r);
    size_t n, n_found = 0;
    char path[512];
    snprintf(path, sizeof path, "%s/catalogue.db", dir);
    unsigned char *good = read_file(path, &n);
    assert_int_equal(use_damaged(dir, &truth, &r), 0);
    enum { ROUNDS = 400 };
    for (int round = 0; round < ROUNDS; round++) {
        size_t at = (size_t)imp_rng_below(&r, round % 8 == 0 ? 100 : n); /* SQLite's own header more often */
        unsigned char flip = (unsigned char)(1 + imp_rng_below(&r, 255));
        OK(imp_cat_delete(dir));
        good[at] ^= flip;
        write_file(path, good, n);
        good[at] ^= flip;
        n_found += (size_t)use_damaged(dir, &truth, &r);
    }
    assert_true(n_found > ROUNDS / 8);
    for (int round = 0; round < 40; round++) { /* and cut off */
        OK(imp_cat_delete(dir));
        write_file(path, good, 1 + (size_t)imp_rng_below(&r, n - 1));
        use_damaged(dir, &truth, &r);
    }
    free(good);
    imp_test_remove_dir(dir);
}

/* A -wal left by a killed process, damaged: the changes from there on are lost as one, those before are whole. */
static void test_damaged_wal(void **state)
{
    (void)state;
    static twin truths[8];
    static view v;
    char *dir = make_dir();
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    fill(dir, &truths[0], &r);
    memset(&v, 0, sizeof v);
    v.cat = open_in(dir);
    for (size_t i = 1; i < 8; i++) {
        truths[i] = truths[i - 1];
        OK(imp_cat_begin(v.cat));
        for (int j = 0; j < 5; j++) change_one(v.cat, &truths[i], &r);
        OK(imp_cat_commit(v.cat));
    }
    size_t n_db, n_wal;
    char db[512], wal[512];
    snprintf(db, sizeof db, "%s/catalogue.db", dir);
    snprintf(wal, sizeof wal, "%s/catalogue.db-wal", dir);
    unsigned char *db_bytes = read_file(db, &n_db), *wal_bytes = read_file(wal, &n_wal);
    imp_cat_close(v.cat);
    for (int round = 0; round < 100; round++) {
        size_t at = (size_t)imp_rng_below(&r, n_wal);
        OK(imp_cat_delete(dir));
        write_file(db, db_bytes, n_db);
        wal_bytes[at] ^= 1;
        write_file(wal, wal_bytes, n_wal);
        wal_bytes[at] ^= 1;
        memset(&v, 0, sizeof v);
        OK(imp_cat_open(dir, 0, &v.cat));
        OK(refresh(&v));
        imp_cat_close(v.cat);
        bool known = false;
        for (size_t i = 0; i < 8; i++) known = known || same_rows(&v.known, &truths[i]);
        assert_true(known);
    }
    free(db_bytes);
    free(wal_bytes);
    imp_test_remove_dir(dir);
}

/* A row changed behind our back, with SQL that SQLite finds nothing wrong with. */
static void test_forged_rows(void **state)
{
    (void)state;
    static const char *const changes[] = {
        "DELETE FROM node WHERE id = 20",
        "UPDATE node SET parent = parent + 1 WHERE id = 20",
        "UPDATE node SET flags = flags + 4 WHERE id = 20",
        "UPDATE node SET id = 7777 WHERE id = 20",
        "UPDATE node SET tokens = zeroblob(4 * n_tokens) WHERE id = 20",
        "UPDATE node SET tokens = NULL WHERE id = 20",
        "DELETE FROM segment WHERE n_tokens = 100",
        "UPDATE segment SET disk_bytes = disk_bytes + 1",
        "UPDATE space SET model_name = 'x'",
        "DELETE FROM space",
        "DELETE FROM meta",
        "UPDATE meta SET n_nodes = n_nodes - 1",
        "UPDATE meta SET generation = generation + 1",
        ("INSERT INTO node SELECT 9999, parent, space, segment, segment_first, n_tokens, depth, flags, created, sum, "
         "tokens FROM node WHERE id = 20"),
        "DROP TABLE segment",
        "CREATE INDEX i ON node(parent)",
        "ALTER TABLE node ADD COLUMN more",
    };
    static twin truth;
    char *dir = make_dir();
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        static view v;
        OK(imp_cat_delete(dir));
        fill(dir, &truth, &r);
        if (!truth.nodes[20].there) continue; /* removed by chance */
        exec_sql(dir, changes[i]);
        memset(&v, 0, sizeof v);
        int rc = imp_cat_open(dir, 0, &v.cat);
        if (rc == 0) rc = refresh(&v);
        imp_cat_close(v.cat);
        if (rc != IMP_E_CORRUPT) fail_msg("%s: %d", changes[i], rc);
    }
    imp_test_remove_dir(dir);
}

static void keep_line(const char *what, void *user)
{
    char *all = user;
    snprintf(all + strlen(all), 4096 - strlen(all), "%s\n", what);
}

static void test_check(void **state)
{
    (void)state;
    char *dir = make_dir(), lines[4096] = "";
    imp_cat *c = open_in(dir);
    int32_t tokens[4] = {1, 2, 3, 4};
    OK(imp_cat_begin(c));
    imp_cat_space space = {space_id(0), "m", 1};
    OK(imp_cat_put_space(c, &space));
    put_one_segment(c, 0, 8);
    imp_cat_node n = {.id = 1, .space = space_id(0), .segment = segment_id(0), .n_tokens = 4, .tokens = tokens};
    OK(imp_cat_put_node(c, &n));
    n.id = 2, n.parent = 1, n.depth = 4, n.segment_first = 4;
    OK(imp_cat_put_node(c, &n));
    OK(imp_cat_commit(c));
    OK(imp_cat_check(c, keep_line, lines));
    assert_string_equal(lines, "");

    OK(imp_cat_begin(c));
    n.id = 3, n.segment_first = 5; /* past the segment's end */
    OK(imp_cat_put_node(c, &n));
    n.id = 4, n.segment_first = 4, n.depth = 5; /* not where its parent ends */
    OK(imp_cat_put_node(c, &n));
    OK(imp_cat_commit(c));
    OK(imp_cat_check(c, keep_line, lines));
    assert_non_null(strstr(lines, "node 3 doesn't lie in its segment\n"));
    assert_non_null(strstr(lines, "node 4 doesn't follow its parent\n"));
    imp_cat_close(c);

    lines[0] = '\0';
    exec_sql(dir, "UPDATE node SET depth = 9 WHERE id = 2; UPDATE log SET removed = 1; "
                    "INSERT INTO use VALUES(1, 2, 3, 4)");
    c = open_in(dir);
    OK(imp_cat_check(c, keep_line, lines));
    assert_non_null(strstr(lines, "node 2 is damaged"));
    assert_non_null(strstr(lines, "log is damaged"));
    assert_non_null(strstr(lines, "1 damaged statistics of uses"));
    imp_cat_close(c);
    imp_test_remove_dir(dir);
}

/* ------------------------------------------------------------------------------------------- crashes and memory --- */

/* A process killed while it commits: what it was told is committed is there, and the catalogue is whole. */
static void test_killed(void **state)
{
    (void)state;
    char *dir = make_dir();
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    imp_cat_close(open_in(dir));
    uint32_t first = 0;
    for (int round = 0; round < 12; round++) {
        int pipes[2];
        assert_int_equal(pipe(pipes), 0);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            imp_cat *c = NULL;
            if (imp_cat_open(dir, 0, &c) != 0) _exit(1);
            for (uint32_t i = first;; i++) {
                /* Two rows that belong together, so that half a change would show. */
                imp_cat_segment a = {segment_id(0), space_id(0), 1, i}, b = {segment_id(1), space_id(0), 1, i};
                if (imp_cat_begin(c) != 0 || imp_cat_put_segment(c, &a) != 0 || imp_cat_put_segment(c, &b) != 0 ||
                    imp_cat_commit(c) != 0 || write(pipes[1], &i, sizeof i) != sizeof i) {
                    _exit(1);
                }
            }
        }
        close(pipes[1]);
        uint32_t last = first, told;
        uint64_t n = 1 + imp_rng_below(&r, 20);
        for (uint64_t i = 0; i < n && read(pipes[0], &told, sizeof told) == sizeof told; i++) last = told;
        kill(child, SIGKILL);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status));
        while (read(pipes[0], &told, sizeof told) == sizeof told) last = told;
        close(pipes[0]);

        static view v;
        memset(&v, 0, sizeof v);
        v.cat = open_in(dir);
        OK(refresh(&v));
        assert_int_equal(v.known.segments[0].n_tokens, v.known.segments[1].n_tokens);
        assert_true(v.known.segments[0].n_tokens == last || v.known.segments[0].n_tokens == last + 1);
        OK(imp_cat_check(v.cat, check_clean_line, NULL));
        imp_cat_close(v.cat);
        first = last + 2;
    }
    imp_test_remove_dir(dir);
}

/* Everything once, as far as memory goes. */
static int use_all(const char *dir, view *v)
{
    int32_t tokens[MAX_RUN] = {1, 2, 3};
    int rc = imp_cat_open(dir, 0, &v->cat);
    if (rc == 0) rc = refresh(v);
    if (rc == 0) rc = imp_cat_begin(v->cat);
    if (rc < 0) goto out;
    imp_cat_segment segment = {segment_id(3), space_id(0), 1, 5};
    imp_cat_space space = {space_id(0), "m", 1};
    imp_cat_node node = {.id = 1, .space = space_id(0), .segment = segment_id(3), .n_tokens = 3, .tokens = tokens};
    imp_cat_reservation reservation = {segment_id(4), 5, 6};
    rc = imp_cat_put_space(v->cat, &space);
    if (rc == 0) rc = imp_cat_put_segment(v->cat, &segment);
    if (rc == 0) rc = imp_cat_put_node(v->cat, &node);
    if (rc == 0) rc = imp_cat_reserve(v->cat, &reservation);
    if (rc == 0) rc = imp_cat_commit(v->cat);
    if (rc < 0) {
        imp_cat_rollback(v->cat);
        goto out;
    }
    static twin seen;
    memset(&seen, 0, sizeof seen);
    rc = refresh(v);
    if (rc == 0) rc = imp_cat_reservations(v->cat, on_reservation, &seen);
out:
    imp_cat_close(v->cat);
    return rc;
}

static void test_no_memory(void **state)
{
    (void)state;
    int rc = IMP_E_NOMEM;
    uint64_t at = 1;
    for (; rc == IMP_E_NOMEM; at++) {
        static view v;
        char *dir = make_dir();
        memset(&v, 0, sizeof v);
        imp_alloc_fail_at(at, 0);
        rc = use_all(dir, &v);
        imp_alloc_fail_at(0, 0);
        /* Whatever failed, the next one works. */
        memset(&v, 0, sizeof v);
        OK(use_all(dir, &v));
        assert_false(v.broken);
        imp_test_remove_dir(dir);
    }
    OK(rc);
    assert_true(at > 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_twin),         cmocka_unit_test(test_log_end),
        cmocka_unit_test(test_callbacks),    cmocka_unit_test(test_advice),
        cmocka_unit_test(test_busy_and_reservations), cmocka_unit_test(test_failed_part),
        cmocka_unit_test(test_checkpoint),   cmocka_unit_test(test_modes),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_versions),     cmocka_unit_test(test_readonly),
        cmocka_unit_test(test_histories),    cmocka_unit_test(test_former_version),
        cmocka_unit_test(test_before_spaces_went),
        cmocka_unit_test(test_before_settings), cmocka_unit_test(test_limit),
        cmocka_unit_test(test_replaced),     cmocka_unit_test(test_damage),
        cmocka_unit_test(test_damaged_wal),  cmocka_unit_test(test_forged_rows),
        cmocka_unit_test(test_check),        cmocka_unit_test(test_killed),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
