/* stored.h: how much of a prompt a store has. */
#ifndef APP_STORED_H
#define APP_STORED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "impress/impress.h"

/* Tokens of tokens[n], from the start, that are stored as exact, and the node of the last of them; 0, and node 0, also
 * where that can't be told. `node` may be NULL. */
size_t app_stored_tokens(imp_space *space, const int32_t *tokens, size_t n, uint64_t *node);

/* Whether that is the prompt, but for a last part too short to be stored, and not what others stored of its beginning. */
bool app_is_stored(size_t n_stored, size_t n_tokens);

#endif
