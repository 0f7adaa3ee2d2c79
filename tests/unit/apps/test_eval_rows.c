/* Rows on disk: found again, by everything that decides them; torn ends; files that aren't ours. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "eval_rows.h"
#include "support/support.h"

static char *dir;
static char error[EVAL_ERROR_BYTES];

static int setup(void **unused)
{
    (void)unused;
    dir = imp_test_make_dir(NULL);
    return dir ? 0 : -1;
}

static int teardown(void **unused)
{
    (void)unused;
    imp_test_remove_dir(dir);
    return 0;
}

static const eval_key base = {.model = "m.gguf", .model_bytes = 98, .settings = "rest=f16", .task = "t", .system = "as",
                              .retention = 0.25, .shots = 8, .id = "q \"1\" \xc3\xa9", .prompt_hash = UINT64_MAX - 5};
static const double logprobs[] = {-1.5, -2.25};
static const eval_detail detail = {.logprobs = logprobs, .n_choices = 2, .prefix_tokens = 9, .ms = 1.5};

static eval_outcome outcome(size_t i)
{
    return (eval_outcome){.answer = i % 4, .choice_sum = i % 3, .choice_norm = i % 2, .kl = 0.5 * (double)i,
                          .mass = 0.75, .identify_bytes = i, .bytes_read = UINT64_C(1) << 40, .selected = 30, .fallback = i};
}

static off_t size_of(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 ? st.st_size : -1;
}

static void check_same(const eval_outcome *o, size_t i)
{
    eval_outcome want = outcome(i);
    assert_non_null(o);
    assert_true(o->answer == want.answer && o->choice_sum == want.choice_sum && o->choice_norm == want.choice_norm);
    assert_true(o->kl == want.kl && o->mass == want.mass);
    assert_true(o->identify_bytes == want.identify_bytes && o->bytes_read == want.bytes_read);
    assert_true(o->selected == want.selected && o->fallback == want.fallback);
}

static void add(eval_rows *r, const eval_key *key, size_t i)
{
    eval_outcome o = outcome(i);
    assert_int_equal(eval_rows_add(r, key, &o, &detail, error), 0);
}

static void test_round_trip(void **unused)
{
    (void)unused;
    const char *path = imp_test_path(dir, "round.jsonl");
    eval_key keys[10];
    for (size_t i = 0; i < 10; i++) keys[i] = base;
    keys[1].model = "n.gguf";
    keys[2].model_bytes = 99;
    keys[3].settings = "rest=q8";
    keys[4].task = "u";
    keys[5].system = "as-h2o-lru";
    keys[6].retention = 0.26;
    keys[7].shots = -1;
    keys[8].id = "q";
    keys[9].prompt_hash--;

    eval_rows *r;
    assert_int_equal(eval_rows_open(path, &r, error), 0);
    for (size_t i = 0; i < 10; i++) {
        assert_null(eval_rows_find(r, &keys[i]));
        add(r, &keys[i], i);
        check_same(eval_rows_find(r, &keys[i]), i);
    }
    eval_rows_close(r);
    for (int round = 0; round < 2; round++) {
        assert_int_equal(eval_rows_open(path, &r, error), 0);
        assert_int_equal(eval_rows_count(r), 10);
        for (size_t i = 0; i < 10; i++) check_same(eval_rows_find(r, &keys[i]), i);
        eval_rows_close(r);
    }
}

static void test_memory_only(void **unused)
{
    (void)unused;
    eval_rows *r;
    assert_int_equal(eval_rows_open(NULL, &r, error), 0);
    for (size_t i = 0; i < 600; i++) {
        eval_key key = base;
        key.model_bytes = i;
        add(r, &key, i);
    }
    eval_key key = base;
    key.model_bytes = 417;
    check_same(eval_rows_find(r, &key), 417);
    eval_rows_close(r);
    eval_rows_close(NULL);
}

/* Cut the file at every byte: whole rows stay, the torn one goes, and the run can go on. */
static void test_torn(void **unused)
{
    (void)unused;
    const char *path = imp_test_path(dir, "torn.jsonl");
    eval_key second = base;
    second.id = "q2";
    eval_rows *r;
    assert_int_equal(eval_rows_open(path, &r, error), 0);
    add(r, &base, 1);
    off_t first_end = size_of(path);
    add(r, &second, 2);
    eval_rows_close(r);
    off_t end = size_of(path);
    for (off_t cut = first_end; cut < end; cut++) {
        assert_int_equal(truncate(path, cut), 0);
        assert_int_equal(eval_rows_open(path, &r, error), 0);
        assert_int_equal(eval_rows_count(r), 1);
        assert_int_equal(size_of(path), first_end);
        check_same(eval_rows_find(r, &base), 1);
        add(r, &second, 2);
        eval_rows_close(r);
        assert_int_equal(size_of(path), end);
    }
    assert_int_equal(truncate(path, 1), 0);
    assert_int_equal(eval_rows_open(path, &r, error), 0);
    assert_int_equal(eval_rows_count(r), 0);
    eval_rows_close(r);
}

static void test_foreign(void **unused)
{
    (void)unused;
    static const char *const texts[] = {
        "notes of mine", "notes of mine\n", "{\"eval\":1}\n", "{\"eval\":2,\"model\":\"m\"}\n", "[]\n", "\n",
        "{\"id\":\"x\",\"query\":\"q\"}",
    };
    const char *path = imp_test_path(dir, "foreign.jsonl");
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        fputs(texts[i], f);
        fclose(f);
        eval_rows *r;
        assert_int_equal(eval_rows_open(path, &r, error), -1);
        assert_null(r);
        assert_non_null(strstr(error, "foreign.jsonl:1: not a row of eval"));
        assert_null(strchr(error, '\n'));
        assert_int_equal(size_of(path), (off_t)strlen(texts[i]));
    }
    eval_rows *r;
    assert_int_equal(eval_rows_open(dir, &r, error), -1);
    assert_non_null(strstr(error, "can't open"));
}

static void test_two_runs(void **unused)
{
    (void)unused;
    const char *path = imp_test_path(dir, "two.jsonl");
    eval_rows *a, *b;
    assert_int_equal(eval_rows_open(path, &a, error), 0);
    assert_int_equal(eval_rows_open(path, &b, error), -1);
    assert_non_null(strstr(error, "another run"));
    eval_rows_close(a);
    assert_int_equal(eval_rows_open(path, &b, error), 0);
    eval_rows_close(b);
}

static void test_no_number(void **unused)
{
    (void)unused;
    const char *path = imp_test_path(dir, "nan.jsonl");
    eval_rows *r;
    assert_int_equal(eval_rows_open(path, &r, error), 0);
    eval_outcome o = outcome(1);
    o.kl = NAN;
    assert_int_equal(eval_rows_add(r, &base, &o, &detail, error), -1);
    assert_null(eval_rows_find(r, &base));
    assert_int_equal(size_of(path), 0);
    eval_rows_close(r);
}

static void test_hash(void **unused)
{
    (void)unused;
    assert_true(eval_hash(EVAL_HASH_SEED, "", 0) == EVAL_HASH_SEED);
    assert_true(eval_hash(EVAL_HASH_SEED, "a", 1) == UINT64_C(0xaf63dc4c8601ec8c)); /* published values of FNV-1a */
    assert_true(eval_hash(EVAL_HASH_SEED, "foobar", 6) == UINT64_C(0x85944171f73967e8));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip), cmocka_unit_test(test_memory_only), cmocka_unit_test(test_torn),
        cmocka_unit_test(test_foreign),    cmocka_unit_test(test_two_runs),    cmocka_unit_test(test_no_number),
        cmocka_unit_test(test_hash),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
