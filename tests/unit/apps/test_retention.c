/* test_retention.c: shares and automatic retentions from text, and the names they give. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "retention.h"

static void test_texts(void **unused)
{
    (void)unused;
    static const struct {
        const char *text;
        double share, mass, least;
        const char *name; /* what is added to a system's */
    } good[] = {
        {NULL, 0.25, 0, 0, ""},
        {"1", 1, 0, 0, ""},
        {"0.125", 0.125, 0, 0, ""},
        {"auto", 0.5, 0.9, 0.05, ", auto:0.9"},
        {"auto:0.95", 0.5, 0.95, 0.05, ", auto:0.95"},
        {"auto:0.95:0.05-0.5", 0.5, 0.95, 0.05, ", auto:0.95"},
        {"auto:0.99:0.1-1", 1, 0.99, 0.1, ", auto:0.99:0.1-1"},
        {"auto:0.9:0.2-0.2", 0.2, 0.9, 0.2, ", auto:0.9:0.2-0.2"},
    };
    static const char *const bad[] = {
        "",        "0",         "1.1",          "x",             "auto:",       "auto:1",   "auto:0",
        "auto0.9", "auto:0.9:", "auto:0.9:0.5", "auto:.9:.5-.1", "auto:.9:0-1", "automatic",
        "auto:0.99999999999", "auto:1e-60", "auto:.9:1e-60-1"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        app_retention r;
        imp_load_opts o;
        char name[64] = "impress", want[64];
        assert_true(retention_parse(good[i].text, &r));
        imp_load_opts_init(&o);
        retention_apply(&r, &o);
        assert_true(o.retention == good[i].share && o.mass == (float)good[i].mass);
        assert_true(o.least_retention == (float)good[i].least);
        assert_int_equal(imp_load_opts_check(&o), 0);
        retention_add_name(&r, name, sizeof name);
        assert_int_equal(strncmp(name, "impress", 7), 0);
        assert_string_equal(name + 7, good[i].name);
        char small[10] = "impress"; /* cut off, nothing beyond it */
        retention_add_name(&r, small, sizeof small);
        strcpy(want, name);
        want[9] = '\0';
        assert_string_equal(small, want);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        app_retention r;
        if (retention_parse(bad[i], &r)) fail_msg("taken: '%s'", bad[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_texts)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
