/* status.h: how errors travel. A function that fails calls imp_fail() once, where it knows what and where, and passes
 * the code up. */
#ifndef IMP_BASE_STATUS_H
#define IMP_BASE_STATUS_H

#include "impress/impress.h"

/* Set this thread's last error line (printf style) and return `status`. */
int imp_fail(int status, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* The same for a failed system call: appends ": " and errno's text, and picks the status from `err` (a positive errno):
 * EACCES, EPERM, EROFS -> IMP_E_PERM; ENOSPC, EDQUOT -> IMP_E_FULL; ENOMEM -> IMP_E_NOMEM; ENOENT -> IMP_E_NOTFOUND;
 * else IMP_E_IO. */
int imp_fail_errno(int err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
