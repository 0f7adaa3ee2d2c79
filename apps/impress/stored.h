/* stored.h: how much of a prompt a store has. */
#ifndef APP_STORED_H
#define APP_STORED_H

#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"

/* Tokens of tokens[n], from the start, that are stored as exact, and the node of the last of them; 0, and node 0, also
 * where that can't be told. `node` may be NULL. */
size_t app_stored_tokens(imp_space *space, const int32_t *tokens, size_t n, uint64_t *node);

#endif
