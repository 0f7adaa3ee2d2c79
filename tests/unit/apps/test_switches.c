/* Systems as text: presets, overrides and their names. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "switches.h"

static char error[SWITCH_ERROR_BYTES];

static app_system make(const char *text, const switch_settings *given)
{
    app_system s;
    if (app_system_make("--system", text, given, 0.25, &s, error) != 0) fail_msg("%s: %s", text, error);
    return s;
}

static void refuse(const char *text, const switch_settings *given, const char *why)
{
    app_system s;
    assert_int_equal(app_system_make("--system", text, given, 0.25, &s, error), -1);
    if (!strstr(error, why)) fail_msg("%s: %s", text, error);
}

static void test_presets(void **unused)
{
    (void)unused;
    for (size_t i = 0; imp_system_name(i); i++) {
        imp_switches w;
        app_system s = make(imp_system_name(i), NULL);
        assert_int_equal(imp_system_preset(imp_system_name(i), &w), 0);
        assert_memory_equal(&w, &s.load.switches, sizeof w);
        assert_string_equal(s.name, imp_system_name(i));
        assert_int_equal(s.chooses, w.identify != IMP_IDENTIFY_NONE);
        assert_true(s.load.retention == (s.chooses ? 0.25 : 1));
        assert_int_equal(s.unused, 0);
    }
    app_system s = make("recomp", NULL);
    assert_true(s.recompute && !s.chooses);
}

/* A name says what differs from the preset, whether text or options said so, and nothing else. */
static void test_names(void **unused)
{
    (void)unused;
    assert_string_equal(make("impress+bytes=0.375", NULL).name, "impress+bytes=.375");
    assert_string_equal(make("impress+bytes=.375+order=token", NULL).name, "impress+order=token+bytes=.375");
    assert_string_equal(make("impress+order=core+history-weight=0.5+query-rows=32+sketch-rows=8", NULL).name, "impress");
    assert_string_equal(make("impress+rest=f16", NULL).name, "impress");
    assert_string_equal(make("impress-paper+probe-spread", NULL).name, "impress-paper+probe-spread=yes");

    switch_settings given = {.text = {[SWITCH_BYTES] = "0.5", [SWITCH_PROBE_HEADS] = "1", [SWITCH_REST] = "q8"}};
    app_system s = make("impress+bytes=.25", &given); /* the text is nearer than the option */
    assert_string_equal(s.name, "impress+rest=q8+bytes=.25");
    assert_int_equal(s.unused, 1u << SWITCH_PROBE_HEADS);
    assert_true(s.load.byte_share == 0.25f && s.load.switches.rest == IMP_REST_Q8);
    s = make("as", &given);
    assert_string_equal(s.name, "as+rest=q8");
    assert_int_equal(s.unused, 1u << SWITCH_PROBE_HEADS | 1u << SWITCH_BYTES);

    given = (switch_settings){.text = {[SWITCH_IDENTIFY] = "probe", [SWITCH_PROBE_ALPHA] = "0"}};
    s = make("as", &given); /* identification decides what has a meaning */
    assert_string_equal(s.name, "as+identify=probe+probe-alpha=0");
    assert_true(s.chooses && s.load.probe_alpha > 0 && s.load.probe_alpha < 1e-3f);
}

static void test_values(void **unused)
{
    (void)unused;
    app_system s = make("impress+history-weight=0", NULL);
    assert_true(s.load.history_weight < 0);
    s = make("spi+rank=reconstruction+keep-first=4", NULL);
    assert_true(s.load.rank == IMP_RANK_RECONSTRUCTION && s.load.n_keep_first == 4);
    refuse("frob", NULL, "recomp");
    refuse("impress+", NULL, "no switch");
    refuse("impress+bytes=", NULL, "a share over 0");
    refuse("as+period=2", NULL, "no meaning");
    refuse("recomp+cache=lru", NULL, "no switches");
    const switch_settings bad = {.text = {[SWITCH_CHUNK] = "24"}};
    refuse("as", &bad, "--chunk wants a multiple of 16");

    for (switch_id i = 0; i < SWITCH_COUNT; i++) {
        char text[200];
        assert_non_null(switch_name(i));
        switch_values(i, text, sizeof text);
        assert_true(strlen(text) > 0);
    }
    assert_null(switch_name(SWITCH_COUNT));
}

static void test_stores(void **unused)
{
    (void)unused;
    char buf[64];
    app_system s = make("as-h2o-lru", NULL), t = make("as-h2o-lfu", NULL);
    assert_string_equal(app_system_combination(&s, buf), "token-f16-64");
    assert_string_equal(app_system_combination(&t, buf), "token-f16-64");
    s = make("impress+rest=q4+chunk=32", NULL);
    assert_string_equal(app_system_combination(&s, buf), "core-q4-32-sketch");
    s = make("impress-paper+probe-heads=2+probe-spread=yes", NULL);
    assert_string_equal(app_system_combination(&s, buf), "importance-f16-64-probe2s");

    imp_store_opts opts;
    imp_store_opts_init(&opts);
    app_system_store(&s, &opts);
    assert_true(opts.order == IMP_ORDER_IMPORTANCE && opts.keep == IMP_KEEP_PROBE && opts.n_probe_heads == 2);
    assert_true(opts.probe_spread == 1 && opts.cache == IMP_CACHE_SCORE);
    const switch_settings given = {.text = {[SWITCH_ORDER] = "core", [SWITCH_CHUNK] = "256"}};
    imp_store_opts_init(&opts);
    assert_int_equal(switch_store_options(&given, &opts, error), 0);
    assert_true(opts.order == IMP_ORDER_CORE && opts.chunk_tokens == 256 && opts.rest == IMP_REST_RAW);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_presets), cmocka_unit_test(test_names), cmocka_unit_test(test_values),
        cmocka_unit_test(test_stores),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
