/* status.c: the table of codes, and each thread's last error line. */
#undef _GNU_SOURCE /* the POSIX strerror_r, which glibc hides behind its own otherwise */
#define _POSIX_C_SOURCE 200809L

#include "base/status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_error[IMP_LINE_BYTES];

static const struct {
    int status;
    const char *name, *text;
} codes[] = {
    {IMP_OK, "IMP_OK", "no error"},
    {IMP_E_ARG, "IMP_E_ARG", "an argument is out of its range"},
    {IMP_E_NOMEM, "IMP_E_NOMEM", "out of memory"},
    {IMP_E_IO, "IMP_E_IO", "the disk or the operating system refused"},
    {IMP_E_CORRUPT, "IMP_E_CORRUPT", "stored bytes don't match their checksum"},
    {IMP_E_VERSION, "IMP_E_VERSION", "written by a newer or unknown format"},
    {IMP_E_FULL, "IMP_E_FULL", "no room"},
    {IMP_E_BUSY, "IMP_E_BUSY", "busy; nothing changed"},
    {IMP_E_NOTFOUND, "IMP_E_NOTFOUND", "not found"},
    {IMP_E_STALE, "IMP_E_STALE", "what this builds on is not in the store"},
    {IMP_E_UNSUPPORTED, "IMP_E_UNSUPPORTED", "not supported by this build or model"},
    {IMP_E_PERM, "IMP_E_PERM", "not permitted"},
};

const char *imp_status_name(int status)
{
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++) {
        if (codes[i].status == status) return codes[i].name;
    }
    return "IMP_E_?";
}

const char *imp_status_text(int status)
{
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++) {
        if (codes[i].status == status) return codes[i].text;
    }
    return "unknown status";
}

const char *imp_last_error(void) { return last_error; }

int imp_fail(int status, const char *fmt, ...)
{
    char line[IMP_LINE_BYTES]; /* not last_error itself: it may be among the arguments */
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    if (n < 0) line[0] = '\0';
    memcpy(last_error, line, sizeof line);
    return status;
}

int imp_set_error(int status, const char *line) { return imp_fail(status, "%s", line ? line : ""); }

void imp_error_keep(imp_kept_line *out) { memcpy(out->text, last_error, strlen(last_error) + 1); }

int imp_error_back(const imp_kept_line *kept, int status)
{
    if (status >= 0) memcpy(last_error, kept->text, strlen(kept->text) + 1);
    return status;
}

static int status_of_errno(int err)
{
    switch (err) {
    case EACCES:
    case EPERM:
    case EROFS: return IMP_E_PERM;
    case ENOSPC:
    case EDQUOT: return IMP_E_FULL;
    case ENOMEM: return IMP_E_NOMEM;
    case ENOENT: return IMP_E_NOTFOUND;
    default: return IMP_E_IO;
    }
}

int imp_fail_errno(int err, const char *fmt, ...)
{
    char line[IMP_LINE_BYTES / 2], text[128];
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    if (n < 0) line[0] = '\0';
    if (strerror_r(err, text, sizeof text) != 0) snprintf(text, sizeof text, "error %d", err);
    snprintf(last_error, sizeof last_error, "%s: %s", line, text);
    return status_of_errno(err);
}
