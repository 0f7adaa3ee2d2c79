/* The base module: what every other module stands on. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>
#include <stdatomic.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/clock.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/opts.h"
#include "base/pool.h"
#include "base/rng.h"
#include "base/status.h"
#include "support/support.h"

/* ---- status */

static void *other_thread(void *arg)
{
    *(int *)arg = strcmp(imp_last_error(), "") == 0;
    (void)imp_fail(IMP_E_IO, "elsewhere");
    return NULL;
}

static void test_status(void **state)
{
    (void)state;
    for (int status = 0; status >= IMP_E_PERM; status--) {
        assert_memory_equal(imp_status_name(status), status ? "IMP_E_" : "IMP_OK", 6);
        assert_string_not_equal(imp_status_text(status), "unknown status");
        for (int other = 0; other > status; other--) {
            assert_string_not_equal(imp_status_name(status), imp_status_name(other));
        }
    }
    assert_string_equal(imp_status_text(1), "unknown status");
    assert_string_equal(imp_status_text(INT32_MIN), "unknown status");
    assert_non_null(imp_status_name(INT32_MAX));

    assert_int_equal(imp_fail(IMP_E_FULL, "%d %s", 7, "dwarfs"), IMP_E_FULL);
    assert_string_equal(imp_last_error(), "7 dwarfs");
    /* The last error may be part of the next one. */
    assert_int_equal(imp_fail(IMP_E_IO, "again: %s", imp_last_error()), IMP_E_IO);
    assert_string_equal(imp_last_error(), "again: 7 dwarfs");
    assert_int_equal(imp_fail_errno(ENOSPC, "writing (%s)", imp_last_error()), IMP_E_FULL);
    assert_string_equal(imp_last_error(), "writing (again: 7 dwarfs): No space left on device");

    static const struct { int err, status; } maps[] = {
        {EACCES, IMP_E_PERM},  {EPERM, IMP_E_PERM},   {EROFS, IMP_E_PERM},      {ENOSPC, IMP_E_FULL},
        {EDQUOT, IMP_E_FULL},  {ENOMEM, IMP_E_NOMEM}, {ENOENT, IMP_E_NOTFOUND}, {EIO, IMP_E_IO},
        {99999, IMP_E_IO}};
    for (size_t i = 0; i < sizeof maps / sizeof maps[0]; i++) {
        assert_int_equal(imp_fail_errno(maps[i].err, "x"), maps[i].status);
        assert_true(strlen(imp_last_error()) > strlen("x: "));
    }

    char longer[5000];
    memset(longer, 'a', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    assert_int_equal(imp_fail(IMP_E_ARG, "%s", longer), IMP_E_ARG);
    assert_int_equal(imp_last_error()[0], 'a');
    assert_int_equal(imp_fail_errno(EIO, "%s", longer), IMP_E_IO);
    assert_non_null(strstr(imp_last_error(), ": Input/output error"));

    int was_empty = 0;
    pthread_t t;
    (void)imp_fail(IMP_E_ARG, "here");
    assert_int_equal(pthread_create(&t, NULL, other_thread, &was_empty), 0);
    pthread_join(t, NULL);
    assert_true(was_empty);
    assert_string_equal(imp_last_error(), "here");
}

/* A call that succeeds leaves the line as it was. */
static void test_kept_line(void **state)
{
    (void)state;
    imp_kept_line kept;
    (void)imp_fail(IMP_E_IO, "before");
    imp_error_keep(&kept);
    (void)imp_fail(IMP_E_BUSY, "a try inside that is longer");
    assert_int_equal(imp_error_back(&kept, IMP_E_BUSY), IMP_E_BUSY);
    assert_string_equal(imp_last_error(), "a try inside that is longer");
    assert_int_equal(imp_error_back(&kept, 3), 3);
    assert_string_equal(imp_last_error(), "before");
    assert_int_equal(imp_set_error(IMP_E_IO, NULL), IMP_E_IO);
    assert_string_equal(imp_last_error(), "");
}

typedef struct thing {
    size_t struct_bytes;
    uint64_t a, b;
} thing;

/* Structs of callers with shorter and longer ones. */
static void test_opts(void **state)
{
    (void)state;
    const size_t least = offsetof(thing, a) + sizeof(uint64_t);
    const thing defaults = {sizeof defaults, 1, 2};
    struct {
        thing t;
        uint64_t more;
    } longer;
    for (size_t n = sizeof(size_t); n <= sizeof longer; n++) {
        unsigned char raw[sizeof longer + 1];
        memset(raw, 0xee, sizeof raw);
        imp_opts_give(raw, n, &defaults, sizeof defaults);
        assert_int_equal(raw[n], 0xee); /* nothing behind it */
        memcpy(&longer, raw, sizeof longer);
        assert_int_equal(longer.t.struct_bytes, n);
        if (n >= least) assert_int_equal(longer.t.a, 1);
        thing got = defaults;
        got.b = 9;
        int rc = imp_opts_take(&got, sizeof got, least, &longer, "thing");
        assert_int_equal(rc, n < least || n % sizeof(size_t) ? IMP_E_ARG : 0);
        if (rc == 0) assert_int_equal(got.struct_bytes, sizeof got);
        if (n < sizeof got) assert_int_equal(got.b, 9); /* the default stays */
        if (rc == 0 && n >= sizeof got) assert_int_equal(got.b, 2);
        if (n == sizeof longer) {
            longer.more = 1ull << 63;
            assert_int_equal(imp_opts_take(&got, sizeof got, least, &longer, "thing"), IMP_E_UNSUPPORTED);
        }
    }
    for (int i = 0; i < 2; i++) { /* nobody set the size: what is behind it isn't looked at, and may not be there */
        const size_t none = i ? SIZE_MAX - 7 : (64u << 10) + 8;
        thing got;
        assert_int_equal(imp_opts_take(&got, sizeof got, least, &none, "thing"), IMP_E_ARG);
    }
    imp_opts_give(NULL, sizeof(thing), &defaults, sizeof defaults);
    thing small = {77, 77, 77};
    imp_opts_give(&small, 4, &defaults, sizeof defaults);
    assert_int_equal(small.struct_bytes, 77);
}

static void test_version_and_types(void **state)
{
    (void)state;
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", IMP_VERSION_MAJOR, IMP_VERSION_MINOR, IMP_VERSION_PATCH);
    assert_string_equal(imp_version(), version);
    assert_int_equal(imp_type_bytes(IMP_TYPE_F32, 3), 12);
    assert_int_equal(imp_type_bytes(IMP_TYPE_F16, 3), 6);
    assert_int_equal(imp_type_bytes(IMP_TYPE_BF16, 3), 6);
    assert_int_equal(imp_type_bytes(IMP_TYPE_Q8_0, 64), 68);
    assert_int_equal(imp_type_bytes(IMP_TYPE_Q8_0, 33), 0);
    assert_int_equal(imp_type_bytes((imp_type)17, 32), 0);
    assert_int_equal(imp_type_bytes(IMP_TYPE_F32, SIZE_MAX / 2), 0);
    assert_int_equal(imp_type_bytes(IMP_TYPE_F32, 0), 0);
}

/* ---- log */

static char logged[2048];
static imp_log_level logged_level;

static void keep(imp_log_level level, const char *line, void *user)
{
    (*(int *)user)++;
    logged_level = level;
    snprintf(logged, sizeof logged, "%s", line);
}

static void test_log(void **state)
{
    (void)state;
    int n = 0;
    imp_log_set(keep, &n, IMP_LOG_INFO);
    imp_log(IMP_LOG_INFO, "%d bytes", 5);
    assert_int_equal(n, 1);
    assert_int_equal(logged_level, IMP_LOG_INFO);
    assert_string_equal(logged, "5 bytes");
    imp_log(IMP_LOG_DEBUG, "not wanted");
    assert_int_equal(n, 1);
    imp_log_set(keep, &n, IMP_LOG_DEBUG);
    imp_log(IMP_LOG_DEBUG, "wanted");
    assert_int_equal(n, 2);
    imp_log_set(NULL, NULL, IMP_LOG_DEBUG);
    imp_log(IMP_LOG_INFO, "must not appear"); /* the default shows warnings and errors, whatever the level given */
    assert_int_equal(n, 2);
}

/* ---- memory */

static void test_alloc(void **state)
{
    (void)state;
    (void)imp_alloc_fail_at(0, 0);
    void *p = imp_malloc(0), *q = imp_calloc(0, 8), *r = imp_aligned(4096, 100), *s = imp_strdup("");
    assert_non_null(p);
    assert_non_null(q);
    assert_non_null(r);
    assert_non_null(s);
    assert_int_equal((uintptr_t)r % 4096, 0);
    p = imp_realloc(p, 0);
    assert_non_null(p);
    assert_int_equal(imp_alloc_fail_at(0, 0), 5);
    assert_null(imp_calloc(SIZE_MAX / 2, 3));
    assert_null(imp_realloc_array(NULL, SIZE_MAX / 2, 3));
    p = imp_realloc_array(p, 10, 10);
    assert_non_null(p);
    imp_free(p);
    imp_free(q);
    imp_free(r);
    imp_free(s);
    imp_free(NULL);

    (void)imp_alloc_fail_at(2, 0);
    p = imp_malloc(1);
    q = imp_malloc(1);
    r = imp_malloc(1);
    assert_non_null(p);
    assert_null(q);
    assert_non_null(r);
    imp_free(p);
    imp_free(r);
    assert_int_equal(imp_alloc_fail_at(2, 1), 3);
    p = imp_strdup("x");
    assert_non_null(p);
    assert_null(imp_aligned(64, 1));
    assert_null(imp_calloc(1, 1));
    assert_null(imp_strdup("x"));
    q = imp_realloc(p, 100);
    assert_null(q); /* and p is still there */
    imp_free(p);
    (void)imp_alloc_fail_at(0, 0);
}

/* ---- hash */

static void test_hash(void **state)
{
    (void)state;
    /* Published test values of XXH3 for no input, seed 0. */
    char hex[33];
    imp_hash128_hex(imp_hash128_of("", 0, 0), hex);
    assert_string_equal(hex, "99aa06d3014798d86001c324468d497f");
    assert_true(imp_hash64("", 0, 0) == 0x2d06800538d394c2u);

    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed());
    unsigned char bytes[3000];
    imp_test_fill(bytes, sizeof bytes, imp_test_seed(), 0);
    for (int i = 0; i < 200; i++) {
        /* Streamed in random pieces it is the same. */
        size_t n = (size_t)imp_rng_below(&rng, sizeof bytes + 1);
        imp_hasher *h = imp_hasher_new();
        assert_non_null(h);
        for (size_t at = 0; at < n;) {
            size_t piece = (size_t)imp_rng_below(&rng, n - at + 1);
            imp_hasher_update(h, bytes + at, piece);
            at += piece;
        }
        assert_true(imp_hash128_equal(imp_hasher_digest(h), imp_hash128_of(bytes, n, 0)));
        imp_hasher_free(h);

        imp_hash128 x = {.lo = imp_rng_u64(&rng), .hi = imp_rng_u64(&rng)}, y;
        imp_hash128_hex(x, hex);
        assert_int_equal(imp_hash128_parse(hex, &y), 0);
        assert_true(imp_hash128_equal(x, y));
    }
    imp_hash128 y;
    assert_int_equal(imp_hash128_parse("", &y), IMP_E_ARG);
    assert_int_equal(imp_hash128_parse("99aa06d3014798d86001c324468d497", &y), IMP_E_ARG);
    assert_int_equal(imp_hash128_parse("99aa06d3014798d86001c324468d497f0", &y), IMP_E_ARG);
    assert_int_equal(imp_hash128_parse("99AA06d3014798d86001c324468d497f", &y), IMP_E_ARG);
    imp_hasher_free(NULL);
    (void)imp_alloc_fail_at(1, 0);
    assert_null(imp_hasher_new());
    (void)imp_alloc_fail_at(0, 0);
}

static imp_hash128 hash_fields(const char *name1, const char *value1, const char *name2, const char *value2)
{
    imp_hasher *h = imp_hasher_new();
    assert_non_null(h);
    imp_hasher_field(h, name1, value1, strlen(value1));
    if (name2) imp_hasher_field(h, name2, value2, strlen(value2));
    imp_hash128 digest = imp_hasher_digest(h);
    imp_hasher_free(h);
    return digest;
}

static void test_fields(void **state)
{
    (void)state;
    imp_hash128 all[] = {hash_fields("ab", "cd", NULL, NULL), hash_fields("a", "bcd", NULL, NULL),
                         hash_fields("abc", "d", NULL, NULL), hash_fields("a", "b", "c", "d"),
                         hash_fields("c", "d", "a", "b"),     hash_fields("abcd", "", NULL, NULL),
                         hash_fields("", "abcd", NULL, NULL), hash_fields("", "", "ab", "cd")};
    size_t n = sizeof all / sizeof all[0];
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < i; j++) assert_false(imp_hash128_equal(all[i], all[j]));
    }
}

static void test_prefix_hash(void **state)
{
    (void)state;
    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed());
    int32_t tokens[64];
    for (int i = 0; i < 64; i++) tokens[i] = (int32_t)imp_rng_u64(&rng);
    imp_hash128 root = {.lo = 1, .hi = 2}, h = root;
    for (int i = 0; i < 64; i++) {
        unsigned char bytes[20]; /* the definition, written out */
        for (int b = 0; b < 8; b++) {
            bytes[b] = (unsigned char)(h.lo >> (8 * b));
            bytes[8 + b] = (unsigned char)(h.hi >> (8 * b));
        }
        for (int b = 0; b < 4; b++) bytes[16 + b] = (unsigned char)((uint32_t)tokens[i] >> (8 * b));
        h = imp_hash128_of(bytes, 20, 0);
        assert_true(imp_hash128_equal(h, imp_prefix_hash(root, tokens, (size_t)i + 1)));
        /* It can be taken up at any position. */
        int cut = (int)imp_rng_below(&rng, (uint64_t)i + 1);
        imp_hash128 half = imp_prefix_hash(root, tokens, (size_t)cut);
        assert_true(imp_hash128_equal(h, imp_prefix_hash(half, tokens + cut, (size_t)(i + 1 - cut))));
    }
    assert_true(imp_hash128_equal(root, imp_prefix_hash(root, NULL, 0)));
}

/* ---- rng, bytes, clock */

static void test_rng(void **state)
{
    (void)state;
    imp_rng a, b, c;
    imp_rng_seed(&a, 42);
    imp_rng_seed(&b, 42);
    imp_rng_seed(&c, 43);
    int same = 0;
    for (int i = 0; i < 100; i++) {
        uint64_t x = imp_rng_u64(&a);
        assert_true(x == imp_rng_u64(&b));
        same += x == imp_rng_u64(&c);
    }
    assert_int_equal(same, 0);
    unsigned counts[7] = {0};
    for (int i = 0; i < 70000; i++) counts[imp_rng_below(&a, 7)]++;
    for (int i = 0; i < 7; i++) assert_in_range(counts[i], 9500, 10500); /* 5 standard deviations, a fixed seed */
    for (int i = 0; i < 1000; i++) {
        assert_true(imp_rng_below(&a, 1) == 0);
        assert_true(imp_rng_below(&a, UINT64_C(0x8000000000000001)) <= UINT64_C(0x8000000000000000));
        double u = imp_rng_unit(&a);
        assert_true(u >= 0 && u < 1);
    }
    imp_rng_seed_os(&a);
    imp_rng_seed_os(&b);
    assert_true(imp_rng_u64(&a) != imp_rng_u64(&b));
}

static void test_bytes_and_clock(void **state)
{
    (void)state;
    unsigned char b[9] = {0};
    imp_put32(b + 1, 0x01020304u);
    assert_memory_equal(b, "\0\4\3\2\1\0\0\0\0", 9);
    assert_int_equal(imp_get32(b + 1), 0x01020304u);
    imp_put64(b + 1, UINT64_C(0xfedcba9876543210));
    assert_memory_equal(b, "\0\x10\x32\x54\x76\x98\xba\xdc\xfe", 9);
    assert_true(imp_get64(b + 1) == UINT64_C(0xfedcba9876543210));
    assert_int_equal(imp_round_up(0, 512), 0);
    assert_int_equal(imp_round_up(1, 512), 512);
    assert_int_equal(imp_round_up(512, 512), 512);
    uint64_t before = imp_now_ns();
    assert_true(imp_now_ns() >= before);
    assert_true(imp_wall_s() > 1600000000);
}

/* ---- pool */

enum { MAX_PARTS = 1000 };

typedef struct run {
    atomic_uint times[MAX_PARTS];
    atomic_uint stray;
    size_t n_parts;
    unsigned round;
    unsigned seen_round[MAX_PARTS]; /* written by whoever takes the part, read after the run */
} run;

static void take_part(size_t part, void *user)
{
    run *r = user;
    if (part >= r->n_parts) {
        atomic_fetch_add(&r->stray, 1);
        return;
    }
    atomic_fetch_add(&r->times[part], 1);
    r->seen_round[part] = r->round;
}

static void test_pool(void **state)
{
    (void)state;
    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed());
    static run r;
    for (unsigned n_threads = 0; n_threads <= 5; n_threads++) {
        imp_pool *pool = NULL; /* 0: none */
        if (n_threads) assert_int_equal(imp_pool_new(n_threads, &pool), 0);
        memset(&r, 0, sizeof r);
        for (unsigned round = 1; round <= 300; round++) {
            r.n_parts = (size_t)imp_rng_below(&rng, round % 10 ? 9 : MAX_PARTS + 1);
            r.round = round;
            for (size_t i = 0; i < r.n_parts; i++) atomic_store(&r.times[i], 0);
            imp_pool_run(pool, r.n_parts, take_part, &r);
            for (size_t i = 0; i < r.n_parts; i++) {
                assert_int_equal(atomic_load(&r.times[i]), 1);
                assert_int_equal(r.seen_round[i], round);
            }
        }
        assert_int_equal(atomic_load(&r.stray), 0);
        imp_pool_free(pool);
    }
    imp_pool *pool;
    assert_int_equal(imp_pool_new(0, &pool), IMP_E_ARG);
    assert_null(pool);
    (void)imp_alloc_fail_at(1, 0);
    assert_int_equal(imp_pool_new(2, &pool), IMP_E_NOMEM);
    assert_null(pool);
    (void)imp_alloc_fail_at(0, 0);
}

/* ---- the helpers of the tests themselves */

static void test_support(void **state)
{
    (void)state;
    unsigned char whole[4096], piece[300];
    imp_test_fill(whole, sizeof whole, 5, 1000);
    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed());
    for (int i = 0; i < 200; i++) {
        size_t n = (size_t)imp_rng_below(&rng, sizeof piece), at = (size_t)imp_rng_below(&rng, sizeof whole - n);
        imp_test_fill(piece, n, 5, 1000 + at);
        assert_memory_equal(piece, whole + at, n);
    }
    assert_true(imp_test_filled(whole, sizeof whole, 5, 1000));
    assert_false(imp_test_filled(whole, sizeof whole, 6, 1000));
    assert_false(imp_test_filled(whole, sizeof whole, 5, 1008));
    whole[4095] ^= 1;
    assert_false(imp_test_filled(whole, sizeof whole, 5, 1000));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_status), cmocka_unit_test(test_kept_line), cmocka_unit_test(test_opts), cmocka_unit_test(test_version_and_types),
        cmocka_unit_test(test_log),    cmocka_unit_test(test_alloc),
        cmocka_unit_test(test_hash),   cmocka_unit_test(test_fields),
        cmocka_unit_test(test_rng),    cmocka_unit_test(test_prefix_hash),
        cmocka_unit_test(test_pool),   cmocka_unit_test(test_bytes_and_clock),
        cmocka_unit_test(test_support),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
