/* Wrong keys: how many, how soon again, from where; against a naive twin that forgets nothing. */
#include <arpa/inet.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "serve/guesses.h"
#include "support/support.h"

typedef union address {
    struct sockaddr any;
    struct sockaddr_in four;
    struct sockaddr_in6 six;
} address;

static const struct sockaddr *at(address *a, const char *text)
{
    memset(a, 0, sizeof *a);
    a->any.sa_family = strchr(text, ':') ? AF_INET6 : AF_INET;
    void *to = a->any.sa_family == AF_INET ? (void *)&a->four.sin_addr : (void *)&a->six.sin6_addr;
    assert_int_equal(inet_pton(a->any.sa_family, text, to), 1);
    return &a->any;
}

static void test_one_address(void **state)
{
    (void)state;
    guesses g;
    address a;
    const struct sockaddr *from = at(&a, "10.0.0.1");
    uint64_t now = 1000 * GUESS_NS;
    guesses_init(&g);
    for (int i = 0; i < GUESSES; i++) {
        assert_int_equal(guesses_wait_ns(&g, from, now), 0);
        guesses_wrong(&g, from, now);
    }
    assert_int_equal(guesses_wait_ns(&g, from, now), GUESS_NS);
    assert_int_equal(guesses_wait_ns(&g, from, now + GUESS_NS - 1), 1);
    assert_int_equal(guesses_wait_ns(&g, from, now + GUESS_NS), 0);
    guesses_wrong(&g, from, now + GUESS_NS);
    assert_int_equal(guesses_wait_ns(&g, from, now + GUESS_NS), GUESS_NS);
    /* After long enough all is forgiven, and no more than that. */
    now += (1 + GUESSES) * GUESS_NS;
    for (int i = 0; i < GUESSES; i++) {
        assert_int_equal(guesses_wait_ns(&g, from, now), 0);
        guesses_wrong(&g, from, now);
    }
    assert_int_equal(guesses_wait_ns(&g, from, now), GUESS_NS);
    guesses_free(&g);
}

static void test_whose_address(void **state)
{
    (void)state;
    static const char *const same[][2] = {{"10.0.0.1", "10.0.0.1"},
                                          {"2001:db8:1:2:3:4:5:6", "2001:db8:1:2::1"},
                                          {"10.0.0.1", "::ffff:10.0.0.1"}};
    static const char *const other[][2] = {{"10.0.0.1", "10.0.0.2"},
                                           {"2001:db8:1:2::1", "2001:db8:1:3::1"},
                                           {"::ffff:10.0.0.1", "::ffff:10.0.0.2"},
                                           {"0.0.0.0", "::"}};
    guesses g;
    address a, b;
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        guesses_init(&g);
        for (int k = 0; k < GUESSES; k++) guesses_wrong(&g, at(&a, same[i][0]), 5);
        assert_int_not_equal(guesses_wait_ns(&g, at(&b, same[i][1]), 5), 0);
        guesses_free(&g);
    }
    for (size_t i = 0; i < sizeof other / sizeof *other; i++) {
        guesses_init(&g);
        for (int k = 0; k < GUESSES; k++) guesses_wrong(&g, at(&a, other[i][0]), 5);
        assert_int_equal(guesses_wait_ns(&g, at(&b, other[i][1]), 5), 0);
        assert_int_equal(guesses_wait_ns(&g, NULL, 5), 0);
        guesses_free(&g);
    }
    /* A family that isn't known counts, too. */
    guesses_init(&g);
    for (int k = 0; k < GUESSES; k++) guesses_wrong(&g, NULL, 5);
    assert_int_not_equal(guesses_wait_ns(&g, NULL, 5), 0);
    guesses_free(&g);
}

/* As long as no more addresses come than are remembered, it is as if nothing were forgotten. */
static void test_against_a_naive_twin(void **state)
{
    (void)state;
    uint64_t rng = imp_test_seed() | 1, now = 1, full[GUESS_ADDRESSES] = {0};
    guesses g;
    guesses_init(&g);
    for (int round = 0; round < 60000; round++) {
        rng ^= rng << 13;
        rng ^= rng >> 7;
        rng ^= rng << 17;
        size_t i = (rng >> 20) % GUESS_ADDRESSES;
        if (rng % 3) i %= 5;
        now += (rng >> 40) % (GUESS_NS / 4);
        address a = {.four = {.sin_family = AF_INET, .sin_addr = {htonl(0x0a000000u + (uint32_t)i)}}};
        uint64_t debt = full[i] > now ? full[i] - now : 0, room = (GUESSES - 1) * GUESS_NS;
        uint64_t wait = debt > room ? debt - room : 0;
        assert_int_equal(guesses_wait_ns(&g, &a.any, now), wait);
        if (wait) continue;
        guesses_wrong(&g, &a.any, now);
        full[i] = now + debt + GUESS_NS;
    }
    guesses_free(&g);
}

/* More of them: the one whose last wrong key is oldest is forgotten, and nobody else. */
static void test_too_many_addresses(void **state)
{
    (void)state;
    guesses g;
    guesses_init(&g);
    address a = {.four = {.sin_family = AF_INET}};
    uint64_t now = 1;
    for (uint32_t i = 0; i <= GUESS_ADDRESSES; i++) {
        a.four.sin_addr.s_addr = htonl(i + 1);
        for (int k = 0; k < GUESSES; k++) guesses_wrong(&g, &a.any, now++);
    }
    for (uint32_t i = 0; i <= GUESS_ADDRESSES; i++) {
        a.four.sin_addr.s_addr = htonl(i + 1);
        assert_int_equal(guesses_wait_ns(&g, &a.any, now) > 0, i > 0);
    }
    guesses_free(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_address),
        cmocka_unit_test(test_whose_address),
        cmocka_unit_test(test_against_a_naive_twin),
        cmocka_unit_test(test_too_many_addresses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
