#include "crypt/crypt.h"

#include <string.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/status.h"

#ifdef IMPRESS_HAVE_CRYPTO

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <openssl/sha.h>

enum { NONCE_BYTES = 12, PIECE_MOST = 1 << 30 /* what one call of OpenSSL takes */ };

struct imp_key {
    unsigned char bytes[IMP_KEY_BYTES];
    uint64_t id;
};

struct imp_cipher {
    unsigned char bytes[IMP_KEY_BYTES], salt[IMP_SALT_BYTES];
    EVP_CIPHER_CTX *keyed; /* the key's schedule, copied for each part */
};

bool imp_crypt_have(void) { return true; }

static int failed(const char *what) { return imp_fail(IMP_E_NOMEM, "encryption: %s failed", what); }

/* HMAC-SHA256(key, label, salt). Each use has a label of its own. */
static int derive(const imp_key *k, const char *label, const void *salt, size_t n_salt,
                  unsigned char out[SHA256_DIGEST_LENGTH])
{
    unsigned char text[32 + IMP_SALT_BYTES];
    unsigned n_out = 0;
    size_t n_label = strlen(label);
    memcpy(text, label, n_label);
    if (n_salt > 0) memcpy(text + n_label, salt, n_salt);
    const unsigned char *done = HMAC(EVP_sha256(), k->bytes, IMP_KEY_BYTES, text, n_label + n_salt, out, &n_out);
    return done && n_out == IMP_KEY_BYTES ? 0 : failed("making a key");
}

int imp_key_new(const unsigned char bytes[IMP_KEY_BYTES], imp_key **out)
{
    unsigned char name[SHA256_DIGEST_LENGTH];
    *out = NULL;
    imp_key *k = imp_calloc(1, sizeof *k);
    if (!k) return imp_fail(IMP_E_NOMEM, "no memory for a key");
    memcpy(k->bytes, bytes, IMP_KEY_BYTES);
    int rc = derive(k, "impress 1 name", NULL, 0, name);
    if (rc < 0) {
        imp_key_free(k);
        return rc;
    }
    k->id = imp_get64(name);
    if (k->id == 0) k->id = 1;
    *out = k;
    return 0;
}

void imp_key_free(imp_key *k)
{
    if (!k) return;
    explicit_bzero(k, sizeof *k);
    imp_free(k);
}

uint64_t imp_key_id(const imp_key *k) { return k->id; }

int imp_cipher_for(const imp_key *k, const unsigned char salt[IMP_SALT_BYTES], imp_cipher **out)
{
    *out = NULL;
    imp_cipher *c = imp_calloc(1, sizeof *c);
    if (!c) return imp_fail(IMP_E_NOMEM, "no memory for a key");
    memcpy(c->salt, salt, IMP_SALT_BYTES);
    int rc = derive(k, "impress 1 data", salt, IMP_SALT_BYTES, c->bytes);
    if (rc == 0) {
        c->keyed = EVP_CIPHER_CTX_new();
        bool ok = c->keyed && EVP_EncryptInit_ex(c->keyed, EVP_aes_256_gcm(), NULL, c->bytes, NULL) == 1;
        if (!ok) rc = failed("a key");
    }
    if (rc < 0) {
        imp_cipher_free(c);
        return rc;
    }
    *out = c;
    return 0;
}

int imp_cipher_new(const imp_key *k, imp_cipher **out)
{
    unsigned char salt[IMP_SALT_BYTES];
    *out = NULL;
    if (RAND_bytes(salt, sizeof salt) != 1) return failed("drawing random bytes");
    return imp_cipher_for(k, salt, out);
}

void imp_cipher_free(imp_cipher *c)
{
    if (!c) return;
    EVP_CIPHER_CTX_free(c->keyed);
    explicit_bzero(c, sizeof *c);
    imp_free(c);
}

const unsigned char *imp_cipher_salt(const imp_cipher *c) { return c->salt; }

/* A context of the calling thread's own, at the start of part `number`. NULL: it can't be had. */
static EVP_CIPHER_CTX *begin(const imp_cipher *c, uint32_t number, bool seal)
{
    unsigned char nonce[NONCE_BYTES] = {0};
    imp_put32(nonce, number);
    EVP_CIPHER_CTX *x = EVP_CIPHER_CTX_new();
    bool ok = x && EVP_CIPHER_CTX_copy(x, c->keyed) == 1 && EVP_CipherInit_ex(x, NULL, NULL, NULL, nonce, seal) == 1;
    if (ok) return x;
    EVP_CIPHER_CTX_free(x);
    return NULL;
}

/* `out` NULL: bytes that aren't encrypted. */
static bool update(EVP_CIPHER_CTX *x, unsigned char *out, const unsigned char *in, size_t n)
{
    for (size_t at = 0; at < n;) {
        int done = 0, piece = n - at < PIECE_MOST ? (int)(n - at) : PIECE_MOST;
        if (EVP_CipherUpdate(x, out ? out + at : NULL, &done, in + at, piece) != 1 || done != piece) return false;
        at += (size_t)piece;
    }
    return true;
}

int imp_cipher_seal(const imp_cipher *c, uint32_t number, const void *extra, size_t n_extra, void *bytes,
                    size_t n_bytes, unsigned char tag[IMP_TAG_BYTES])
{
    int n = 0;
    unsigned char rest[IMP_TAG_BYTES];
    EVP_CIPHER_CTX *x = begin(c, number, true);
    bool ok = x && update(x, NULL, extra, n_extra) && update(x, bytes, bytes, n_bytes) &&
              EVP_CipherFinal_ex(x, rest, &n) == 1 && n == 0 &&
              EVP_CIPHER_CTX_ctrl(x, EVP_CTRL_GCM_GET_TAG, IMP_TAG_BYTES, tag) == 1;
    EVP_CIPHER_CTX_free(x);
    return ok ? 0 : failed("encrypting");
}

int imp_cipher_open(const imp_cipher *c, uint32_t number, const void *extra, size_t n_extra, void *bytes,
                    size_t n_bytes, const unsigned char tag[IMP_TAG_BYTES])
{
    int n = 0;
    unsigned char rest[IMP_TAG_BYTES], want[IMP_TAG_BYTES];
    memcpy(want, tag, sizeof want);
    EVP_CIPHER_CTX *x = begin(c, number, false);
    bool ok = x && update(x, NULL, extra, n_extra) && update(x, bytes, bytes, n_bytes) &&
              EVP_CIPHER_CTX_ctrl(x, EVP_CTRL_GCM_SET_TAG, IMP_TAG_BYTES, want) == 1;
    bool right = ok && EVP_CipherFinal_ex(x, rest, &n) == 1;
    EVP_CIPHER_CTX_free(x);
    if (!ok) return failed("decrypting");
    return right ? 0 : IMP_E_CORRUPT;
}

int imp_box_seal(const imp_key *k, const void *extra, size_t n_extra, const void *bytes, size_t n_bytes, void *box)
{
    imp_cipher *c;
    unsigned char *to = box;
    int rc = imp_cipher_new(k, &c);
    if (rc < 0) return rc;
    memcpy(to, c->salt, IMP_SALT_BYTES);
    if (bytes != to + IMP_BOX_BYTES) memcpy(to + IMP_BOX_BYTES, bytes, n_bytes);
    rc = imp_cipher_seal(c, 0, extra, n_extra, to + IMP_BOX_BYTES, n_bytes, to + IMP_SALT_BYTES);
    imp_cipher_free(c);
    return rc;
}

int imp_box_open(const imp_key *k, const void *extra, size_t n_extra, const void *box, size_t n_box, void *out)
{
    imp_cipher *c;
    const unsigned char *from = box;
    if (n_box < IMP_BOX_BYTES) return IMP_E_CORRUPT;
    int rc = imp_cipher_for(k, from, &c);
    if (rc < 0) return rc;
    memcpy(out, from + IMP_BOX_BYTES, n_box - IMP_BOX_BYTES);
    rc = imp_cipher_open(c, 0, extra, n_extra, out, n_box - IMP_BOX_BYTES, from + IMP_SALT_BYTES);
    imp_cipher_free(c);
    return rc;
}

#else

bool imp_crypt_have(void) { return false; }

int imp_key_new(const unsigned char bytes[IMP_KEY_BYTES], imp_key **out)
{
    (void)bytes;
    *out = NULL;
    return imp_fail(IMP_E_UNSUPPORTED, "this build can't encrypt: it was made without OpenSSL's libcrypto");
}

void imp_key_free(imp_key *k) { (void)k; }

uint64_t imp_key_id(const imp_key *k)
{
    (void)k;
    return 1;
}

int imp_cipher_new(const imp_key *k, imp_cipher **out) { return imp_cipher_for(k, NULL, out); }

int imp_cipher_for(const imp_key *k, const unsigned char salt[IMP_SALT_BYTES], imp_cipher **out)
{
    (void)k;
    (void)salt;
    *out = NULL;
    return IMP_E_UNSUPPORTED;
}

void imp_cipher_free(imp_cipher *c) { (void)c; }

const unsigned char *imp_cipher_salt(const imp_cipher *c)
{
    (void)c;
    return NULL;
}

int imp_cipher_seal(const imp_cipher *c, uint32_t number, const void *extra, size_t n_extra, void *bytes,
                    size_t n_bytes, unsigned char tag[IMP_TAG_BYTES])
{
    (void)c, (void)number, (void)extra, (void)n_extra, (void)bytes, (void)n_bytes, (void)tag;
    return IMP_E_UNSUPPORTED;
}

int imp_cipher_open(const imp_cipher *c, uint32_t number, const void *extra, size_t n_extra, void *bytes,
                    size_t n_bytes, const unsigned char tag[IMP_TAG_BYTES])
{
    (void)c, (void)number, (void)extra, (void)n_extra, (void)bytes, (void)n_bytes, (void)tag;
    return IMP_E_UNSUPPORTED;
}

int imp_box_seal(const imp_key *k, const void *extra, size_t n_extra, const void *bytes, size_t n_bytes, void *box)
{
    (void)k, (void)extra, (void)n_extra, (void)bytes, (void)n_bytes, (void)box;
    return IMP_E_UNSUPPORTED;
}

int imp_box_open(const imp_key *k, const void *extra, size_t n_extra, const void *box, size_t n_box, void *out)
{
    (void)k, (void)extra, (void)n_extra, (void)box, (void)n_box, (void)out;
    return IMP_E_UNSUPPORTED;
}

#endif
