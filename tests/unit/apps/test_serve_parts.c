/* Parts of the server that need no model: what a stream may let out, keys, the likeliest tokens, metrics. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "serve/keys.h"
#include "serve/metrics.h"
#include "serve/sampling.h"
#include "serve/stops.h"
#include "support/support.h"

static uint64_t rng;

static size_t below(size_t n)
{
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return (size_t)(rng % n);
}

/* ---- stops */

/* Where the first stop string begins in what came so far; n: none. */
static size_t naive_stop(const char *text, size_t n, const char *const *stops, size_t n_stops)
{
    for (size_t i = 0; i < n; i++)
        for (size_t s = 0; s < n_stops; s++) {
            size_t m = strlen(stops[s]);
            if (i + m <= n && !memcmp(text + i, stops[s], m)) return i;
        }
    return n;
}

/* Whether bytes from `at` on could be the beginning of a stop string. */
static bool could_be(const char *text, size_t n, const char *const *stops, size_t n_stops)
{
    for (size_t i = 0; i < n; i++)
        for (size_t s = 0; s < n_stops; s++)
            if (n - i < strlen(stops[s]) && !memcmp(text + i, stops[s], n - i)) return true;
    return false;
}

static void test_stops_against_a_naive_twin(void **state)
{
    (void)state;
    static const char letters[] = "aab";
    for (int round = 0; round < 3000; round++) {
        char text[48], stops_text[3][6];
        const char *stops[3];
        size_t n = 1 + below(sizeof text - 1), n_stops = below(4);
        for (size_t i = 0; i < n; i++) text[i] = letters[below(3)];
        for (size_t s = 0; s < n_stops; s++) {
            size_t m = 1 + below(5);
            for (size_t i = 0; i < m; i++) stops_text[s][i] = letters[below(3)];
            stops_text[s][m] = '\0';
            stops[s] = stops_text[s];
        }
        size_t want = 0, got = 0;
        char out[sizeof text];
        stop_gate g = {.stops = stops, .n_stops = n_stops};
        for (size_t at = 0; at < n && !g.stopped;) {
            size_t part = 1 + below(4);
            if (part > n - at) part = n - at;
            bool end = at + part == n;
            assert_true(stop_gate_add(&g, text + at, part, end));
            memcpy(out + got, g.held, g.n_free);
            got += g.n_free;
            at += part;
            want = naive_stop(text, at, stops, n_stops);
            assert_int_equal(g.n_released, got);
            assert_true(g.stopped == (want < at));
            assert_true(got <= want); /* never a part of a stop string */
            /* And nothing is held back without a reason. */
            if (!g.stopped && !end && got < at) assert_true(could_be(text + got, at - got, stops, n_stops));
        }
        assert_int_equal(got, want);
        assert_memory_equal(out, text, got);
        if (g.stopped) { /* and nothing comes after it */
            assert_true(stop_gate_add(&g, "more", 4, true));
            assert_int_equal(g.n_free, 0);
        }
        stop_gate_free(&g);
    }
}

static void test_stops_keep_characters_whole(void **state)
{
    (void)state;
    static const char text[] = "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80z"; /* 1, 2, 3 and 4 bytes */
    static const size_t ends[] = {1, 3, 6, 10, 11};
    stop_gate g = {0};
    size_t got = 0;
    for (size_t i = 0; i + 1 < sizeof text; i++) {
        assert_true(stop_gate_add(&g, text + i, 1, false));
        got += g.n_free;
        bool at_end = false;
        for (size_t k = 0; k < 5; k++) at_end = at_end || got == ends[k];
        assert_true(got == 0 || at_end);
    }
    assert_int_equal(got, sizeof text - 1);
    /* A character that is cut by the end goes out as it is. */
    assert_true(stop_gate_add(&g, "\xe2\x82", 2, false));
    assert_int_equal(g.n_free, 0);
    assert_true(stop_gate_add(&g, NULL, 0, true));
    assert_int_equal(g.n_free, 2);
    stop_gate_free(&g);
}

/* ---- keys */

static char *dir;

static const char *write_keys(const char *text, mode_t mode)
{
    const char *path = imp_test_path(dir, "keys");
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
    assert_int_equal(chmod(path, mode), 0);
    return path;
}

static void test_keys(void **state)
{
    (void)state;
    key_ring *r;
    const key_tenant *a, *b, *c;
    const char *path = write_keys("\xef\xbb\xbf# ours\n\nfirst-key-1 anne\n  second-key-2\tanne # hers # too\n"
                                  "third#key-3 #1\n", 0600);
    assert_int_equal(key_ring_open(path, "fourth-key-4, fifth-key-5", &r), 0);
    assert_int_equal(key_ring_size(r), 5);
    a = key_ring_find(r, "first-key-1");
    b = key_ring_find(r, "second-key-2");
    c = key_ring_find(r, "third#key-3");
    assert_true(a && a == b && c);
    assert_string_not_equal(a->salt, c->salt);
    assert_ptr_equal(key_ring_named(r, "anne"), a);
    assert_null(key_ring_named(r, "#1"));
    assert_null(key_ring_named(r, "third#key-3"));
    b = key_ring_find(r, "fifth-key-5");
    assert_non_null(b);
    /* Numbers from 1; labels that hold no key. */
    assert_int_equal(key_ring_n_tenants(r), 4);
    static const char *const labels[] = {"anne", "#1", "#2", "#3"};
    for (unsigned i = 1; i <= 4; i++) {
        assert_int_equal(key_ring_tenant(r, i)->number, i);
        assert_string_equal(key_ring_tenant(r, i)->label, labels[i - 1]);
    }
    assert_null(key_ring_tenant(r, 0));
    assert_null(key_ring_tenant(r, 5));
    assert_int_equal(b->number, 4);
    static const char *const wrong[] = {"", "first-key-", "first-key-12", "First-key-1", "anne", "third", "fourth-key-4,"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) assert_null(key_ring_find(r, wrong[i]));
    key_ring_close(r);
    assert_int_equal(key_ring_open(write_keys("\xef\xbb\xbf""first-key-1", 0600), NULL, &r), 0);
    assert_non_null(key_ring_find(r, "first-key-1"));
    key_ring_close(r);

    assert_int_equal(key_ring_open(NULL, NULL, &r), 0);
    assert_int_equal(key_ring_size(r), 0);
    assert_null(key_ring_find(r, ""));
    assert_int_equal(key_ring_n_tenants(r), 0);
    key_ring_close(r);
    static const char *const bad[] = {"short\n", "# nothing\n", "a-good-key name more\n", "a-good-key n\xff\n",
                                      "a-good-key anne\na-good-key bert\n"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(key_ring_open(write_keys(bad[i], 0600), NULL, &r), 1);
    assert_int_equal(key_ring_open(NULL, " ,", &r), 1);
    assert_int_equal(key_ring_open(NULL, "", &r), 1);
    char *line = malloc(3000);
    assert_non_null(line);
    memset(line, 'k', 2999);
    line[2999] = '\0';
    assert_int_equal(key_ring_open(write_keys(line, 0600), NULL, &r), 1);
    free(line);
    assert_int_equal(key_ring_open("/nonexistent/keys", NULL, &r), 1);
    key_ring_close(NULL);
}

/* A tenant's name can't be made to stand for another's key. */
static void test_keys_and_names_are_apart(void **state)
{
    (void)state;
    key_ring *r;
    assert_int_equal(key_ring_open(write_keys("plain-key-1\nother-key-2 plain-key-1\n", 0600), NULL, &r), 0);
    const key_tenant *a = key_ring_find(r, "plain-key-1"), *b = key_ring_find(r, "other-key-2");
    assert_true(a && b && a->number != b->number);
    assert_string_not_equal(a->salt, b->salt);
    key_ring_close(r);
}

/* ---- the likeliest tokens */

static void test_sampling_top(void **state)
{
    (void)state;
    enum { N = 97 };
    for (int round = 0; round < 300; round++) {
        float logits[N];
        llama_token top[N];
        size_t n = below(N + 1), k = below(12);
        if (n == 0) n = 1;
        double sum = 0;
        for (size_t i = 0; i < n; i++) logits[i] = (float)below(40) - 20;
        size_t got = sampling_top(logits, n, k, top);
        assert_int_equal(got, k < n ? k : n);
        for (size_t i = 0; i < got; i++) {
            size_t larger = 0;
            for (size_t j = 0; j < n; j++) larger += logits[j] > logits[top[i]];
            assert_true(larger <= i); /* none that is larger was left out */
            if (i > 0) assert_true(logits[top[i]] <= logits[top[i - 1]]);
            for (size_t j = 0; j < i; j++) assert_int_not_equal(top[i], top[j]);
        }
        for (size_t i = 0; i < n; i++) sum += exp((double)logits[i]);
        assert_true(fabs(sampling_log_sum(logits, n) - log(sum)) < 1e-9 * fabs(log(sum)) + 1e-9);
    }
}

/* ---- metrics */

static void test_metrics(void **state)
{
    (void)state;
    metric_add(METRIC_NOBODY, METRIC_CACHED_LIVE, 3);
    metric_add(METRIC_NOBODY, METRIC_CACHED_STORE, 4);
    metric_observe(METRIC_NOBODY, METRIC_TTFT_SECONDS, 3000000);    /* 3 ms */
    metric_observe(METRIC_NOBODY, METRIC_TTFT_SECONDS, 5000000);    /* 5 ms: in the bucket of its bound */
    metric_observe(METRIC_NOBODY, METRIC_TTFT_SECONDS, 500000000000); /* beyond all bounds */
    metric_set(METRIC_SLOTS, 7);
    metric_http(METRIC_NOBODY, "/v1/models", 200);
    metric_http(METRIC_NOBODY, "/v1/models", 200);
    metric_http(METRIC_NOBODY, "/v1/models", 404);
    metric_add(1, METRIC_PREFIX_WAITS, 1); /* a tenant that there isn't */
    oai_buffer b = {0};
    metric_write(&b, NULL);
    assert_false(b.failed);
    static const char *const lines[] = {
        "\nimpress_prompt_tokens_cached_total{source=\"live\"} 3\n",
        "\nimpress_prompt_tokens_cached_total{source=\"store\"} 4\n",
        "\n# TYPE impress_ttft_seconds histogram\n",
        "\nimpress_ttft_seconds_bucket{le=\"0.0025\"} 0\n",
        "\nimpress_ttft_seconds_bucket{le=\"0.005\"} 2\n",
        "\nimpress_ttft_seconds_bucket{le=\"120\"} 2\n",
        "\nimpress_ttft_seconds_bucket{le=\"+Inf\"} 3\n",
        "\nimpress_ttft_seconds_sum 500.008000000\n",
        "\nimpress_ttft_seconds_count 3\n",
        "\nimpress_slots 7\n",
        "\nimpress_http_requests_total{route=\"/v1/models\",status=\"200\"} 2\n",
        "\nimpress_http_requests_total{route=\"/v1/models\",status=\"404\"} 1\n",
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        if (!strstr(b.data, lines[i])) fail_msg("no %s", lines[i]);
    assert_null(strstr(b.data, "impress_store_")); /* without a store */
    assert_null(strstr(b.data, "impress_tenant_")); /* without tenants */
    oai_buffer_free(&b);
}

/* A tenant sees its own numbers and nothing that others' are in; the whole page has the sums, and each share. */
static void test_metrics_of_tenants(void **state)
{
    (void)state;
    static const char *const labels[] = {"anne", "a \"b\\"};
    assert_int_equal(metric_open_tenants(labels, 2), 0);
    uint64_t before = metric_get(METRIC_PROMPT_TOKENS);
    metric_add(1, METRIC_PROMPT_TOKENS, 11);
    metric_add(2, METRIC_PROMPT_TOKENS, 700);
    metric_add(1, METRIC_WAY_WHOLE, 1);
    metric_add(3, METRIC_PROMPT_TOKENS, 5000); /* nobody's */
    metric_add(METRIC_NOBODY, METRIC_STEPS, 90);
    metric_observe(1, METRIC_TTFT_SECONDS, 3000000);
    metric_observe(2, METRIC_TTFT_SECONDS, 5000000);
    metric_http(1, "/v1/models", 200);
    metric_http(2, "/v1/completions", 200);
    assert_int_equal(metric_get(METRIC_PROMPT_TOKENS), before + 5711);

    oai_buffer own = {0}, whole = {0};
    metric_write_own(&own, 1);
    assert_false(own.failed);
    static const char *const mine[] = {
        "\nimpress_prompt_tokens_total 11\n", "\nimpress_prompts_total{way=\"whole\"} 1\n",
        "\nimpress_ttft_seconds_count 1\n", "\nimpress_ttft_seconds_sum 0.003000000\n",
        "\nimpress_http_requests_total{route=\"/v1/models\",status=\"200\"} 1\n",
    };
    for (size_t i = 0; i < sizeof mine / sizeof *mine; i++)
        if (!strstr(own.data, mine[i])) fail_msg("no %s", mine[i]);
    static const char *const others[] = {"completions", "tenant", "impress_slots", "queue_length", "connections",
                                         "impress_store", "impress_tier", "impress_steps", "live_tokens"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        const char *at = strstr(own.data, others[i]);
        if (at) fail_msg("%.60s", at);
    }

    metric_write(&whole, NULL);
    assert_false(whole.failed);
    static const char *const shares[] = {
        "\nimpress_tenant_prompt_tokens_total{tenant=\"anne\"} 11\n",
        "\nimpress_tenant_prompt_tokens_total{tenant=\"a \\\"b\\\\\"} 700\n",
        "\nimpress_tenant_prompts_total{tenant=\"anne\",way=\"whole\"} 1\n",
        "\n# TYPE impress_tenant_ttft_seconds summary\n",
        "\nimpress_tenant_ttft_seconds_count{tenant=\"anne\"} 1\n",
        "\nimpress_tenant_ttft_seconds_sum{tenant=\"anne\"} 0.003000000\n",
        "\nimpress_tenant_http_requests_total{tenant=\"anne\",route=\"/v1/models\",status=\"200\"} 1\n",
    };
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++)
        if (!strstr(whole.data, shares[i])) fail_msg("no %s", shares[i]);
    assert_null(strstr(whole.data, "impress_tenant_steps"));
    oai_buffer_free(&own);
    oai_buffer_free(&whole);
    metric_close_tenants();

    metric_write_own(&own, 1); /* a tenant that there isn't sees nothing of others either */
    assert_null(strstr(own.data, "tokens"));
    oai_buffer_free(&own);
}

static int setup(void **state)
{
    (void)state;
    rng = imp_test_seed() | 1;
    dir = imp_test_make_dir(NULL);
    return dir ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    imp_test_remove_dir(dir);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stops_against_a_naive_twin),
        cmocka_unit_test(test_stops_keep_characters_whole),
        cmocka_unit_test(test_keys),
        cmocka_unit_test(test_keys_and_names_are_apart),
        cmocka_unit_test(test_sampling_top),
        cmocka_unit_test(test_metrics),
        cmocka_unit_test(test_metrics_of_tenants),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
