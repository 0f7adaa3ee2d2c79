/* crypt.h: encryption at rest, AES-256-GCM of OpenSSL's libcrypto. A build without it has the same calls: a key can't
 * be had then (IMP_E_UNSUPPORTED), and so nothing else is asked of it. What is encrypted how: docs/format.md,
 * "Encryption".
 *
 *     imp_key        a store's: 32 bytes from a file. Encrypts nothing itself
 *       imp_cipher   a key of its own, for one file or one row: HMAC-SHA256(key, salt), the salt 32 random bytes that
 *                    lie beside what is encrypted
 *
 * GCM breaks where one nonce is used twice with one key. Here a nonce is the number of a part inside its file, and the
 * key is the file's alone: made from a salt that is drawn when the writing begins, and never again. So neither a crash
 * nor a second attempt, neither a reordered copy nor a row that is written again meets a pair that was there before.
 */
#ifndef IMP_CRYPT_CRYPT_H
#define IMP_CRYPT_CRYPT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define IMP_KEY_BYTES 32u
#define IMP_SALT_BYTES 32u
#define IMP_TAG_BYTES 16u

typedef struct imp_key imp_key;
typedef struct imp_cipher imp_cipher;

/* Does this build have it? */
bool imp_crypt_have(void);

int imp_key_new(const unsigned char bytes[IMP_KEY_BYTES], imp_key **out);
/* The key in file `path`: 32 bytes, or 64 hex digits and perhaps a newline. IMP_E_NOTFOUND; IMP_E_PERM: it is no plain
 * file, or others than its owner may use it; IMP_E_ARG: it holds something else; IMP_E_UNSUPPORTED. */
int imp_key_read(const char *path, imp_key **out);
void imp_key_free(imp_key *k); /* wiped; NULL is allowed */
/* A name for it that tells nothing of it; never 0. */
uint64_t imp_key_id(const imp_key *k);

/* With a new salt; or the one of something that was written before. */
int imp_cipher_new(const imp_key *k, imp_cipher **out);
int imp_cipher_for(const imp_key *k, const unsigned char salt[IMP_SALT_BYTES], imp_cipher **out);
void imp_cipher_free(imp_cipher *c); /* wiped; NULL is allowed */
const unsigned char *imp_cipher_salt(const imp_cipher *c);

/* Encrypt part `number` in place. No number twice, but for the same bytes. `extra` isn't encrypted, and has to be the
 * same when it is opened. Any number of threads. */
int imp_cipher_seal(const imp_cipher *c, uint32_t number, const void *extra, size_t n_extra, void *bytes,
                    size_t n_bytes, unsigned char tag[IMP_TAG_BYTES]);
/* And back. IMP_E_CORRUPT, without a line: not as it was sealed; the bytes are worth nothing then. */
int imp_cipher_open(const imp_cipher *c, uint32_t number, const void *extra, size_t n_extra, void *bytes,
                    size_t n_bytes, const unsigned char tag[IMP_TAG_BYTES]);

/* A small thing by itself: salt, tag, and the encrypted bytes, which may be at their place in `box` before.
 * Open: IMP_E_CORRUPT, without a line; `out` has room for n_box - IMP_BOX_BYTES. */
#define IMP_BOX_BYTES (IMP_SALT_BYTES + IMP_TAG_BYTES)
int imp_box_seal(const imp_key *k, const void *extra, size_t n_extra, const void *bytes, size_t n_bytes, void *box);
int imp_box_open(const imp_key *k, const void *extra, size_t n_extra, const void *box, size_t n_box, void *out);

#endif
