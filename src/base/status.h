/* status.h: how errors travel. A function that fails calls imp_fail() once, where it knows what and where, and passes
 * the code up. */
#ifndef IMP_BASE_STATUS_H
#define IMP_BASE_STATUS_H

#include "impress/impress.h"

enum { IMP_LINE_BYTES = 1024 };

/* Set this thread's last error line (printf style) and return `status`. */
int imp_fail(int status, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* The same for a failed system call: appends ": " and errno's text, and picks the status from `err` (a positive errno):
 * EACCES, EPERM, EROFS -> IMP_E_PERM; ENOSPC, EDQUOT -> IMP_E_FULL; ENOMEM -> IMP_E_NOMEM; ENOENT -> IMP_E_NOTFOUND;
 * else IMP_E_IO. */
int imp_fail_errno(int err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* A public call that succeeds leaves the last error line as it was, whatever failed inside and was dealt with: keep the
 * line at its start, and put it back if `status` is no failure. Returns `status`. */
typedef struct imp_kept_line {
    char text[IMP_LINE_BYTES];
} imp_kept_line;
void imp_error_keep(imp_kept_line *out);
int imp_error_back(const imp_kept_line *kept, int status);

#endif
