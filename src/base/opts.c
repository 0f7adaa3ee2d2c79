#include "base/opts.h"

#include <string.h>

#include "base/status.h"

/* Far more than any of them will have: nobody meant it. */
enum { MOST_BYTES = 64 << 10 };

int imp_opts_take(void *out, size_t n_bytes, size_t least_bytes, const void *given, const char *what)
{
    size_t n;
    memcpy(&n, given, sizeof n);
    if (n < least_bytes || n > MOST_BYTES || n % sizeof n) {
        return imp_fail(IMP_E_ARG, "%s: struct_bytes is %zu, which can't be (%zu at least): not initialised?", what, n,
                        least_bytes);
    }
    for (size_t i = n_bytes; i < n; i++) {
        if (((const unsigned char *)given)[i]) {
            return imp_fail(IMP_E_UNSUPPORTED, "%s: sets what version %s of this library doesn't know", what,
                            imp_version());
        }
    }
    memcpy(out, given, n < n_bytes ? n : n_bytes);
    memcpy(out, &n_bytes, sizeof n_bytes);
    return 0;
}

void imp_opts_give(void *out, size_t struct_bytes, const void *defaults, size_t n_bytes)
{
    if (!out || struct_bytes < sizeof struct_bytes) return;
    memset(out, 0, struct_bytes);
    memcpy(out, defaults, struct_bytes < n_bytes ? struct_bytes : n_bytes);
    memcpy(out, &struct_bytes, sizeof struct_bytes);
}
