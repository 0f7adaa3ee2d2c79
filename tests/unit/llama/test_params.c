/* test_params.c: parameters and requests of callers whose header is older or newer than the library. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "adapter.h"

/* A newer caller's: what it knows more of is behind. */
typedef struct newer_request {
    imp_llama_request r;
    uint64_t more[2];
} newer_request;

typedef struct newer_params {
    imp_llama_params p;
    uint64_t more[2];
} newer_params;

/* Nothing moves when what is within them grows. */
_Static_assert(offsetof(imp_llama_params, min_query_tokens) == offsetof(imp_llama_params, request) + 512, "");
_Static_assert(sizeof(imp_llama_request) == offsetof(imp_llama_request, load) + 256, "");

static void test_defaults(void **state)
{
    (void)state;
    imp_llama_params p, got;
    memset(&p, 0xee, sizeof p);
    imp_llama_params_init(&p);
    assert_int_equal(p.struct_bytes, sizeof p);
    assert_int_equal(p.request.struct_bytes, sizeof p.request);
    assert_int_equal(p.request.load.struct_bytes, sizeof p.request.load);
    assert_true(p.request.store_new && !p.request.recompute && !p.request.adaptive && !p.store && !p.widen_query);
    assert_true(p.request.load.retention >= 1);
    for (size_t i = sizeof p.request; i < sizeof p.request_room; i++) assert_int_equal(p.request_room[i], 0);
    assert_int_equal(lc_params_take(&p, &got), 0);
    assert_memory_equal(&got, &p, sizeof p);

    newer_params n;
    memset(&n, 0xee, sizeof n);
    imp_llama_params_fill(&n.p, sizeof n);
    for (int i = 0; i < 2; i++) assert_int_equal(n.more[i], 0);
    imp_llama_request_fill(NULL, sizeof(imp_llama_request));
    imp_llama_params_fill(NULL, sizeof(imp_llama_params));
}

static void test_sizes(void **state)
{
    (void)state;
    newer_request n;
    imp_llama_request got;
    static const size_t bad[] = {0, 8, sizeof(n.r) - 8, sizeof(n.r) + 1, 1u << 20, SIZE_MAX};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        imp_llama_request_init(&n.r);
        n.r.struct_bytes = bad[i];
        assert_int_equal(lc_request_take(&n.r, &got), IMP_E_ARG);
    }
    assert_int_equal(lc_request_take(NULL, &got), IMP_E_ARG);

    memset(&n, 0, sizeof n);
    imp_llama_request_init(&n.r);
    n.r.struct_bytes = sizeof n;
    n.r.max_match = 5;
    assert_int_equal(lc_request_take(&n.r, &got), 0);
    assert_int_equal(got.struct_bytes, sizeof got);
    assert_int_equal(got.max_match, 5);
    n.more[1] = 1;
    assert_int_equal(lc_request_take(&n.r, &got), IMP_E_UNSUPPORTED);
}

/* The options of a load have a size of their own. */
static void test_load_within(void **state)
{
    (void)state;
    imp_llama_request r, got;
    for (size_t n = 0; n <= 2 * sizeof r.load_room; n++) {
        imp_llama_request_init(&r);
        memset(r.load_room, 0, sizeof r.load_room);
        if (n >= sizeof n && n <= sizeof r.load_room) imp_load_opts_fill(&r.load, n);
        r.load.struct_bytes = n;
        bool fits = n >= offsetof(imp_load_opts, n_probe_heads) && n <= sizeof r.load_room && n % sizeof n == 0;
        assert_int_equal(lc_request_take(&r, &got), fits ? 0 : IMP_E_ARG);
        if (!fits) continue;
        imp_load_opts all;
        imp_load_opts_init(&all);
        assert_memory_equal(&got.load, &all, sizeof all); /* the defaults are where the caller's end */
        if (n == sizeof r.load_room) {
            r.load_room[n - 1] = 1;
            assert_int_equal(lc_request_take(&r, &got), IMP_E_UNSUPPORTED);
        }
    }
}

static void test_within_params(void **state)
{
    (void)state;
    newer_params n;
    imp_llama_params got;
    memset(&n, 0, sizeof n);
    imp_llama_params_init(&n.p);
    n.p.struct_bytes = sizeof n;
    n.p.request.struct_bytes = sizeof n.p.request_room; /* a newer one's */
    n.p.min_query_tokens = 33;
    assert_int_equal(imp_system_preset("impress", &n.p.request.load.switches), 0);
    n.p.request.load.retention = 0.25;
    assert_int_equal(lc_params_take(&n.p, &got), 0);
    assert_int_equal(got.struct_bytes, sizeof got);
    assert_int_equal(got.request.struct_bytes, sizeof got.request);
    assert_int_equal(got.min_query_tokens, 33);
    assert_true(got.request.load.retention < 0.3);
    n.p.request_room[sizeof n.p.request_room - 1] = 1;
    assert_int_equal(lc_params_take(&n.p, &got), IMP_E_UNSUPPORTED);
    n.p.request_room[sizeof n.p.request_room - 1] = 0;
    n.more[0] = 1;
    assert_int_equal(lc_params_take(&n.p, &got), IMP_E_UNSUPPORTED);
    n.more[0] = 0;
    n.p.request.load.switches.identify = IMP_IDENTIFY_NONE;
    assert_int_equal(lc_params_take(&n.p, &got), IMP_E_ARG); /* a part of what? */
    n.p.request.recompute = true;
    assert_int_equal(lc_params_take(&n.p, &got), 0);
    static const size_t bad[] = {0, 8, 513, 520, SIZE_MAX - 7};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        n.p.request.struct_bytes = bad[i];
        assert_int_equal(lc_params_take(&n.p, &got), IMP_E_ARG);
    }
    n.p.request.struct_bytes = sizeof n.p.request;
    n.p.struct_bytes = 24;
    assert_int_equal(lc_params_take(&n.p, &got), IMP_E_ARG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_load_within),
        cmocka_unit_test(test_within_params),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
