#include "stored.h"

#include <stdlib.h>
#include <string.h>

size_t app_stored_tokens(imp_space *space, const int32_t *tokens, size_t n, uint64_t *node)
{
    imp_lease *lease = NULL;
    imp_prefix_info info = {0};
    if (node) *node = 0;
    /* One token more: a match leaves out the last. */
    int32_t *longer = space ? malloc((n + 1) * sizeof *longer) : NULL;
    if (!longer) return 0;
    memcpy(longer, tokens, n * sizeof *longer);
    longer[n] = 0;
    if (imp_prefix_acquire(space, longer, n + 1, 0, &lease, &info) < 0) info = (imp_prefix_info){0};
    imp_lease_release(lease);
    free(longer);
    if (node) *node = info.node;
    return info.n_matched < n ? info.n_matched : n;
}

bool app_is_stored(size_t n_stored, size_t n_tokens)
{
    enum { TAIL = 64 };
    return n_stored <= n_tokens && n_tokens - n_stored < TAIL && n_stored >= n_tokens / 2;
}
