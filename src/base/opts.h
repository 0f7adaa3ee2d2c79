/* opts.h: structs that may grow. The first member of each is a size_t: the caller's sizeof. */
#ifndef IMP_BASE_OPTS_H
#define IMP_BASE_OPTS_H

#include <stddef.h>

/* Take over what a caller gave whose header may be older or newer than this library. `out` [n_bytes] holds the
 * defaults, which stay where the caller's struct ends before ours. `least_bytes`: the end of its last member in its
 * first version. A size that no struct has, as where nobody set it, is IMP_E_ARG: what follows isn't read. Members
 * that we don't know must be zero (IMP_E_UNSUPPORTED). `what` names it in the error line. */
int imp_opts_take(void *out, size_t n_bytes, size_t least_bytes, const void *given, const char *what);

/* The other way: hand defaults to such a caller, members that we don't know as zero. */
void imp_opts_give(void *out, size_t struct_bytes, const void *defaults, size_t n_bytes);

#endif
