/* key.c: the key's file. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "crypt/crypt.h"

static int hex_digit(unsigned char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

/* 64 hex digits, with one newline at most behind them. */
static bool parse_hex(const unsigned char *text, size_t n, unsigned char out[IMP_KEY_BYTES])
{
    if (n == 2 * IMP_KEY_BYTES + 1 && text[n - 1] == '\n') n--;
    if (n != 2 * IMP_KEY_BYTES) return false;
    for (size_t i = 0; i < IMP_KEY_BYTES; i++) {
        int high = hex_digit(text[2 * i]), low = hex_digit(text[2 * i + 1]);
        if (high < 0 || low < 0) return false;
        out[i] = (unsigned char)(high << 4 | low);
    }
    return true;
}

/* Up to `most` bytes; a longer file gives `most`. */
static int read_all(int fd, const char *path, unsigned char *out, size_t most, size_t *n)
{
    for (*n = 0; *n < most;) {
        ssize_t got = read(fd, out + *n, most - *n);
        if (got == 0) break;
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return imp_fail_errno(errno, "can't read the key in %s", path);
        *n += (size_t)got;
    }
    return 0;
}

int imp_key_read(const char *path, imp_key **out)
{
    unsigned char text[2 * IMP_KEY_BYTES + 2], bytes[IMP_KEY_BYTES];
    struct stat st;
    size_t n = 0;
    int rc;
    *out = NULL;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return imp_fail_errno(errno, "can't read the key in %s", path);
    if (fstat(fd, &st) != 0) {
        rc = imp_fail_errno(errno, "can't read the key in %s", path);
    } else if (!S_ISREG(st.st_mode)) {
        rc = imp_fail(IMP_E_PERM, "the key %s is not a plain file", path);
    } else if (st.st_mode & 077) {
        rc = imp_fail(IMP_E_PERM, "others may use the key in %s: chmod 600 ends that", path);
    } else {
        rc = read_all(fd, path, text, sizeof text, &n);
    }
    close(fd);
    if (rc == 0) {
        /* Hex first: a raw key has 32 bytes, which no hex one has. */
        if (parse_hex(text, n, bytes)) {
            rc = imp_key_new(bytes, out);
        } else if (n == IMP_KEY_BYTES) {
            rc = imp_key_new(text, out);
        } else {
            rc = imp_fail(IMP_E_ARG, "%s holds no key: it has to be 32 bytes, or 64 hex digits", path);
        }
    }
    explicit_bzero(text, sizeof text);
    explicit_bzero(bytes, sizeof bytes);
    return rc;
}
