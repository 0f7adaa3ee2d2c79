/* Keys, ciphers and boxes: known answers, the same with OpenSSL's own calls, and everything that was tampered with. */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/rng.h"
#include "crypt/crypt.h"
#include "impress/impress.h"
#include "support/support.h"

static void from_hex(const char *hex, unsigned char *out)
{
    for (size_t i = 0; hex[2 * i]; i++) {
        unsigned byte;
        assert_int_equal(sscanf(hex + 2 * i, "%2x", &byte), 1);
        out[i] = (unsigned char)byte;
    }
}

static imp_key *make_key(unsigned char first)
{
    unsigned char bytes[IMP_KEY_BYTES];
    imp_key *k;
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)(first + i);
    assert_int_equal(imp_key_new(bytes, &k), 0);
    return k;
}

/* Key 00 01 .. 1f, salt 20 21 .. 3f; made with Python: hmac, and cryptography's AESGCM. */
static void known_answers(void **state)
{
    (void)state;
    imp_key *k = make_key(0);
    unsigned char salt[IMP_SALT_BYTES], tag[IMP_TAG_BYTES], want_tag[IMP_TAG_BYTES], want[64], text[64];
    char name[17];
    snprintf(name, sizeof name, "%016llx", (unsigned long long)imp_key_id(k));
    assert_string_equal(name, "bc2ba23a3490ed6e");
    for (size_t i = 0; i < sizeof salt; i++) salt[i] = (unsigned char)(0x20 + i);
    imp_cipher *c;
    assert_int_equal(imp_cipher_for(k, salt, &c), 0);
    assert_memory_equal(imp_cipher_salt(c), salt, sizeof salt);
    static const struct {
        uint32_t number;
        const char *extra, *text, *sealed, *tag;
    } answers[] = {
        {0, "", "", "",
         "90767b5f79f6cefd1594ef5da28e0e88"},
        {0, "", "sixteen bytes ok", "c357bcd79c01be8c5c26830764f372ce",
         "99d8fd4e45a5f3f4aefabc59e2a092eb"},
        {1, "where it belongs", "a chunk of keys and values", "f7eb152e7830351936ede169136ffcdebf9407f1fca5cbb271a4",
         "91b8e191fc81a779b6cf195479ec0a96"},
        {UINT32_MAX, "header", "the fixed part of a header", "556557982839e4bbd25ea73da179b9804047334056d0b5da9a4f",
         "c7a1b206df28c0cf8d8461961ccb6401"},
    };
    for (size_t i = 0; i < sizeof answers / sizeof answers[0]; i++) {
        size_t n = strlen(answers[i].text);
        memcpy(text, answers[i].text, n);
        from_hex(answers[i].sealed, want);
        from_hex(answers[i].tag, want_tag);
        const char *extra = answers[i].extra;
        assert_int_equal(imp_cipher_seal(c, answers[i].number, extra, strlen(extra), text, n, tag), 0);
        if (n > 0) assert_memory_equal(text, want, n);
        assert_memory_equal(tag, want_tag, sizeof tag);
        assert_int_equal(imp_cipher_open(c, answers[i].number, extra, strlen(extra), text, n, tag), 0);
        if (n > 0) assert_memory_equal(text, answers[i].text, n);
    }
    imp_cipher_free(c);
    imp_key_free(k);
}

/* Any bit of what is sealed, of its tag, of what belongs to it, another number, salt or key: none opens. */
static void tampered(void **state)
{
    (void)state;
    imp_rng rng;
    imp_rng_seed(&rng, imp_test_seed());
    imp_key *k = make_key(1), *other_key = make_key(2);
    imp_cipher *c, *other_salt, *other;
    assert_int_equal(imp_cipher_new(k, &c), 0);
    assert_int_equal(imp_cipher_new(k, &other_salt), 0);
    assert_int_equal(imp_cipher_for(other_key, imp_cipher_salt(c), &other), 0);
    assert_memory_not_equal(imp_cipher_salt(c), imp_cipher_salt(other_salt), IMP_SALT_BYTES);
    for (int round = 0; round < 200; round++) {
        unsigned char text[300], sealed[300], back[300], tag[IMP_TAG_BYTES], extra[24];
        size_t n = imp_rng_below(&rng, sizeof text + 1), n_extra = imp_rng_below(&rng, sizeof extra + 1);
        uint32_t number = (uint32_t)imp_rng_u64(&rng);
        for (size_t i = 0; i < sizeof text; i++) text[i] = (unsigned char)imp_rng_u64(&rng);
        for (size_t i = 0; i < sizeof extra; i++) extra[i] = (unsigned char)imp_rng_u64(&rng);
        memcpy(sealed, text, n);
        assert_int_equal(imp_cipher_seal(c, number, extra, n_extra, sealed, n, tag), 0);
        memcpy(back, sealed, n);
        assert_int_equal(imp_cipher_open(c, number, extra, n_extra, back, n, tag), 0);
        if (n > 0) assert_memory_equal(back, text, n);

        unsigned char bit = (unsigned char)(1u << imp_rng_below(&rng, 8));
        memcpy(back, sealed, n);
        assert_int_equal(imp_cipher_open(c, number ^ 1u << imp_rng_below(&rng, 32), extra, n_extra, back, n, tag),
                         IMP_E_CORRUPT);
        memcpy(back, sealed, n);
        assert_int_equal(imp_cipher_open(other_salt, number, extra, n_extra, back, n, tag), IMP_E_CORRUPT);
        memcpy(back, sealed, n);
        assert_int_equal(imp_cipher_open(other, number, extra, n_extra, back, n, tag), IMP_E_CORRUPT);
        memcpy(back, sealed, n);
        unsigned char *flipped = &tag[imp_rng_below(&rng, sizeof tag)];
        *flipped ^= bit;
        assert_int_equal(imp_cipher_open(c, number, extra, n_extra, back, n, tag), IMP_E_CORRUPT);
        *flipped ^= bit;
        if (n > 0) {
            memcpy(back, sealed, n);
            back[imp_rng_below(&rng, n)] ^= bit;
            assert_int_equal(imp_cipher_open(c, number, extra, n_extra, back, n, tag), IMP_E_CORRUPT);
            memcpy(back, sealed, n);
            assert_int_equal(imp_cipher_open(c, number, extra, n_extra, back, n - 1, tag), IMP_E_CORRUPT);
        }
        if (n_extra > 0) {
            memcpy(back, sealed, n);
            extra[imp_rng_below(&rng, n_extra)] ^= bit;
            assert_int_equal(imp_cipher_open(c, number, extra, n_extra, back, n, tag), IMP_E_CORRUPT);
        }
    }
    imp_cipher_free(other);
    imp_cipher_free(other_salt);
    imp_cipher_free(c);
    imp_key_free(other_key);
    imp_key_free(k);
}

static void boxes(void **state)
{
    (void)state;
    imp_key *k = make_key(3), *other = make_key(4);
    unsigned char box[100 + IMP_BOX_BYTES], again[100 + IMP_BOX_BYTES], text[100], back[100];
    for (size_t i = 0; i < sizeof text; i++) text[i] = (unsigned char)(i * 7);
    for (size_t n = 0; n <= sizeof text; n += 25) {
        assert_int_equal(imp_box_seal(k, "row 1", 5, text, n, box), 0);
        assert_int_equal(imp_box_seal(k, "row 1", 5, text, n, again), 0);
        assert_memory_not_equal(box, again, n + IMP_BOX_BYTES); /* never the same twice */
        assert_int_equal(imp_box_open(k, "row 1", 5, box, n + IMP_BOX_BYTES, back), 0);
        if (n > 0) assert_memory_equal(back, text, n);
        assert_int_equal(imp_box_open(k, "row 2", 5, box, n + IMP_BOX_BYTES, back), IMP_E_CORRUPT);
        assert_int_equal(imp_box_open(other, "row 1", 5, box, n + IMP_BOX_BYTES, back), IMP_E_CORRUPT);
        for (size_t cut = 0; cut < n + IMP_BOX_BYTES; cut += 7) {
            assert_int_equal(imp_box_open(k, "row 1", 5, box, cut, back), IMP_E_CORRUPT);
        }
        for (size_t i = 0; i < n + IMP_BOX_BYTES; i++) {
            box[i] ^= 0x10;
            assert_int_equal(imp_box_open(k, "row 1", 5, box, n + IMP_BOX_BYTES, back), IMP_E_CORRUPT);
            box[i] ^= 0x10;
        }
    }
    imp_key_free(other);
    imp_key_free(k);
}

static void write_key(const char *path, const void *bytes, size_t n, mode_t mode)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    fclose(f);
    assert_int_equal(chmod(path, mode), 0);
}

static void key_files(void **state)
{
    char *dir = imp_test_make_dir(NULL);
    (void)state;
    assert_non_null(dir);
    unsigned char raw[IMP_KEY_BYTES + 1];
    char hex[80], path[4096];
    imp_key *k, *by_hex;
    for (size_t i = 0; i < sizeof raw; i++) raw[i] = (unsigned char)(i * 9 + 1);
    for (size_t i = 0; i < IMP_KEY_BYTES; i++) snprintf(hex + 2 * i, 3, i % 2 ? "%02x" : "%02X", raw[i]);
    strcat(hex, "\n");
    snprintf(path, sizeof path, "%s/key", dir);

    assert_int_equal(imp_key_read(path, &k), IMP_E_NOTFOUND);
    write_key(path, raw, IMP_KEY_BYTES, 0600);
    assert_int_equal(imp_key_read(path, &k), 0);
    for (size_t n = 64; n <= 65; n++) {
        write_key(path, hex, n, 0400);
        assert_int_equal(imp_key_read(path, &by_hex), 0);
        assert_true(imp_key_id(by_hex) == imp_key_id(k));
        imp_key_free(by_hex);
        assert_int_equal(chmod(path, 0600), 0);
    }
    imp_key_free(k);
    static const mode_t open_to_others[] = {0640, 0604, 0620, 0602, 0610, 0601, 0644, 0777};
    for (size_t i = 0; i < sizeof open_to_others / sizeof open_to_others[0]; i++) {
        assert_int_equal(chmod(path, open_to_others[i]), 0);
        assert_int_equal(imp_key_read(path, &k), IMP_E_PERM);
        assert_null(k);
        assert_non_null(strstr(imp_last_error(), "chmod 600"));
    }
    /* neither shorter nor longer, nor other digits */
    write_key(path, "", 0, 0600);
    assert_int_equal(imp_key_read(path, &k), IMP_E_ARG);
    write_key(path, raw, IMP_KEY_BYTES - 1, 0600);
    assert_int_equal(imp_key_read(path, &k), IMP_E_ARG);
    write_key(path, raw, IMP_KEY_BYTES + 1, 0600);
    assert_int_equal(imp_key_read(path, &k), IMP_E_ARG);
    write_key(path, hex, 63, 0600);
    assert_int_equal(imp_key_read(path, &k), IMP_E_ARG);
    strcat(hex, "\n");
    write_key(path, hex, 66, 0600);
    assert_int_equal(imp_key_read(path, &k), IMP_E_ARG);
    hex[7] = 'g';
    write_key(path, hex, 64, 0600);
    assert_int_equal(imp_key_read(path, &k), IMP_E_ARG);
    assert_null(strstr(imp_last_error(), "ABC")); /* the line says nothing of what it holds */
    assert_int_equal(imp_key_read(dir, &k), IMP_E_PERM);
    imp_test_remove_dir(dir);
}

static void no_memory(void **state)
{
    (void)state;
    unsigned char bytes[IMP_KEY_BYTES] = {1};
    imp_key *k;
    imp_cipher *c;
    imp_alloc_fail_at(1, 0);
    assert_int_equal(imp_key_new(bytes, &k), IMP_E_NOMEM);
    imp_alloc_fail_at(0, 0);
    assert_int_equal(imp_key_new(bytes, &k), 0);
    imp_alloc_fail_at(1, 0);
    assert_int_equal(imp_cipher_new(k, &c), IMP_E_NOMEM);
    imp_alloc_fail_at(0, 0);
    imp_key_free(k);
    imp_key_free(NULL);
    imp_cipher_free(NULL);
}

int main(void)
{
    if (!imp_crypt_have()) {
        imp_key *k;
        unsigned char bytes[IMP_KEY_BYTES] = {0};
        return imp_key_new(bytes, &k) == IMP_E_UNSUPPORTED && strstr(imp_last_error(), "libcrypto") ? 77 : 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_answers), cmocka_unit_test(tampered),  cmocka_unit_test(boxes),
        cmocka_unit_test(key_files),     cmocka_unit_test(no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
