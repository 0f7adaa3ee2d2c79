/* Task files: what is read, and what is said about broken lines. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/support.h"
#include "tasks.h"

static char *dir;

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

static const char *write_file(const char *name, const char *text)
{
    const char *path = imp_test_path(dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
    return path;
}

#define LINE(id, query) "{\"id\":\"" id "\",\"query\":\"" query "\",\"choices\":[\"yes\",\"no\"],\"answer\":1}\n"

static void test_read(void **unused)
{
    (void)unused;
    const char *path = write_file("a.val.jsonl",
                                  LINE("a-1", "Is it?") "  \r\n"
                                  "{\"answer\":2, \"choices\":[\"x\",\"y z\",\"\xc3\xa9\"], \"id\":\"a-2\","
                                  " \"task\":\"a\", \"query\":\"Q\\nA:\", \"extra\":{}}\r\n" LINE("a-3", "The last has no end"));
    task_file f;
    char error[TASK_ERROR_BYTES];
    assert_int_equal(task_file_read(path, NULL, &f, error), 0);
    assert_int_equal(f.n, 3);
    assert_string_equal(f.path, path);
    assert_string_equal(f.items[0].id, "a-1");
    assert_int_equal(f.items[0].answer, 1);
    assert_string_equal(f.items[1].query, "Q\nA:");
    assert_int_equal(f.items[1].n_choices, 3);
    assert_string_equal(f.items[1].choices[2], "\xc3\xa9");
    assert_int_equal(f.items[1].answer, 2);
    assert_int_equal(f.items[1].line, 3);
    assert_int_equal(f.items[2].line, 4);

    char *shots = task_shots(&f, 2);
    assert_string_equal(shots, "Is it? no\n\nQ\nA: \xc3\xa9");
    free(shots);
    shots = task_shots(&f, 0);
    assert_string_equal(shots, "");
    free(shots);
    task_file_free(&f);
}

/* Each broken line is the third of its file, after a blank one. */
static void test_broken(void **unused)
{
    (void)unused;
    static const char *const cases[][2] = {
        {"{", "not JSON"},
        {"[]", "not a JSON object"},
        {"{\"query\":\"q\",\"choices\":[\"a\",\"b\"],\"answer\":0}", "`id` is missing"},
        {"{\"id\":7,\"query\":\"q\",\"choices\":[\"a\",\"b\"],\"answer\":0}", "`id` is not a text"},
        {"{\"id\":\"x\",\"choices\":[\"a\",\"b\"],\"answer\":0}", "`query` is missing"},
        {"{\"id\":\"x\",\"query\":\" \",\"choices\":[\"a\",\"b\"],\"answer\":0}", "`query` is not a text, or an empty"},
        {"{\"id\":\"x\",\"query\":\"q\",\"answer\":0}", "`choices` is missing"},
        {"{\"id\":\"x\",\"query\":\"q\",\"choices\":\"ab\",\"answer\":0}", "`choices` is missing or not an array"},
        {"{\"id\":\"x\",\"query\":\"q\",\"choices\":[\"a\"],\"answer\":0}", "`choices` has 1 entries"},
        {"{\"id\":\"x\",\"query\":\"q\",\"choices\":[\"a\",2],\"answer\":0}", "choice 1 is not a text"},
        {"{\"id\":\"x\",\"query\":\"q\",\"choices\":[\"a\",\"\"],\"answer\":0}", "choice 1 is not a text, or"},
        {"{\"id\":\"x\",\"query\":\"q\",\"choices\":[\"a\",\"b\"]}", "`answer` is missing"},
        {"{\"id\":\"x\",\"query\":\"q\",\"choices\":[\"a\",\"b\"],\"answer\":\"a\"}", "`answer` is missing or not"},
        {"{\"id\":\"x\",\"query\":\"q\",\"choices\":[\"a\",\"b\"],\"answer\":2}", "2, but choices go from 0 to 1"},
        {"{\"id\":\"x\",\"query\":\"q\",\"choices\":[\"a\",\"b\"],\"answer\":-1}", "`answer` is -1"},
        {"{\"id\":\"x\",\"id\":\"y\",\"query\":\"q\",\"choices\":[\"a\",\"b\"],\"answer\":0}", "duplicate"},
        {"{\"id\":\"first\",\"query\":\"q\",\"choices\":[\"a\",\"b\"],\"answer\":0}", "`first` is that of line 1 too"},
        {"{\"id\":\"\xff\",\"query\":\"q\",\"choices\":[\"a\",\"b\"],\"answer\":0}", "unable to decode byte 0xff"},
        {"{\"id\":\"x\",\"query\":\"q\",\"choices\":[\"a\",\"b\"],\"answer\":0} {}", "end of file expected"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[1024], error[TASK_ERROR_BYTES], where[300];
        snprintf(text, sizeof text, LINE("first", "q") "\n%s\n" LINE("other", "q"), cases[i][0]);
        const char *path = write_file("broken.jsonl", text);
        task_file f;
        assert_int_equal(task_file_read(path, NULL, &f, error), -1);
        snprintf(where, sizeof where, "%s:3: ", path);
        if (strncmp(error, where, strlen(where)) != 0 || !strstr(error, cases[i][1]))
            fail_msg("%s: \"%s\" lacks \"%s\"", cases[i][0], error, cases[i][1]);
        assert_null(strchr(error, '\n'));
        assert_int_equal(f.n, 0);
        assert_null(f.items);
    }
}

static void test_no_file(void **unused)
{
    (void)unused;
    task_file f;
    char error[TASK_ERROR_BYTES];
    assert_int_equal(task_file_read(imp_test_path(dir, "none.jsonl"), NULL, &f, error), -1);
    assert_non_null(strstr(error, "none.jsonl: No such file"));
    assert_int_equal(task_file_read(dir, NULL, &f, error), -1);
    assert_non_null(strstr(error, "can't read"));
    assert_int_equal(task_file_read(write_file("empty.jsonl", "\n"), NULL, &f, error), -1);
    assert_non_null(strstr(error, "has no questions"));
}

static void test_documents(void **unused)
{
    (void)unused;
    const char *path = write_file(
        "questions.jsonl",
        "{\"id\":\"1\",\"doc\":\"a.txt\",\"query\":\"q\",\"choices\":[\"a\",\"b\"],\"answer\":0}\n"
        "{\"id\":\"2\",\"doc\":\"b.txt\",\"query\":\"q\",\"choices\":[\"a\",\"b\"],\"answer\":0}\n"
        "{\"id\":\"3\",\"query\":\"q\",\"choices\":[\"a\",\"b\"],\"answer\":0}\n");
    task_file f;
    char error[TASK_ERROR_BYTES];
    assert_int_equal(task_file_read(path, "b.txt", &f, error), 0);
    assert_int_equal(f.n, 1);
    assert_string_equal(f.items[0].id, "2");
    assert_int_equal(f.items[0].line, 2);
    task_file_free(&f);
    assert_int_equal(task_file_read(path, "c.txt", &f, error), -1);
    assert_non_null(strstr(error, "no question on `c.txt`"));
    /* A broken line shows even where it would have been left out. */
    path = write_file("questions.jsonl", "{\"id\":\"1\",\"doc\":\"a.txt\"}\n");
    assert_int_equal(task_file_read(path, "b.txt", &f, error), -1);
    assert_non_null(strstr(error, "questions.jsonl:1: `query` is missing"));
}

static void test_names(void **unused)
{
    (void)unused;
    char *empty = imp_test_make_dir(dir), error[TASK_ERROR_BYTES], **names;
    size_t n;
    assert_non_null(empty);
    assert_int_equal(task_names(empty, &names, &n, error), -1);
    assert_non_null(strstr(error, "no task in"));
    assert_int_equal(task_names(imp_test_path(dir, "nowhere"), &names, &n, error), -1);
    assert_non_null(strstr(error, "can't read the folder"));
    fclose(fopen(imp_test_path(empty, "z.val.jsonl"), "w"));
    fclose(fopen(imp_test_path(empty, "b.val.jsonl"), "w"));
    fclose(fopen(imp_test_path(empty, "b.train.jsonl"), "w"));
    fclose(fopen(imp_test_path(empty, ".val.jsonl"), "w"));
    assert_int_equal(task_names(empty, &names, &n, error), 0);
    assert_int_equal(n, 2);
    assert_string_equal(names[0], "b");
    assert_string_equal(names[1], "z");
    for (size_t i = 0; i < n; i++) free(names[i]);
    free(names);
    imp_test_remove_dir(empty);
}

static void test_leak(void **unused)
{
    (void)unused;
    task_file train, scored;
    char error[TASK_ERROR_BYTES];
    const char *path = write_file("t.jsonl", LINE("t1", "one") LINE("t2", "two") LINE("s3", "three"));
    assert_int_equal(task_file_read(path, NULL, &train, error), 0);
    path = write_file("s.jsonl", LINE("s1", "four") LINE("s2", "two") LINE("s3", "five"));
    assert_int_equal(task_file_read(path, NULL, &scored, error), 0);
    assert_null(task_leak(&train, 1, &scored, 3));  /* neither of the two that are alike */
    assert_null(task_leak(&train, 2, &scored, 1));
    assert_ptr_equal(task_leak(&train, 2, &scored, 2), &train.items[1]); /* same text */
    assert_ptr_equal(task_leak(&scored, 3, &train, 3), &scored.items[1]);
    assert_null(task_leak(&train, 3, &scored, 1));
    scored.items[1].query[0] = 'x';
    assert_ptr_equal(task_leak(&train, 3, &scored, 3), &train.items[2]); /* same id */
    task_file_free(&train);
    task_file_free(&scored);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_read),      cmocka_unit_test(test_broken), cmocka_unit_test(test_no_file),
        cmocka_unit_test(test_documents), cmocka_unit_test(test_names),  cmocka_unit_test(test_leak),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
