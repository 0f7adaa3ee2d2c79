/* hash_trace.h: request traces with block ids, from JSON Lines files.
 *
 * A line is an object with `timestamp` (milliseconds, never falling), `input_length` and `output_length` (tokens) and
 * `hash_ids`: one id for each block of the input, the last perhaps partial. An equal id means an equal prefix up to and
 * including that block, so an id stands behind the same one wherever it comes. Other fields are left alone. */
#ifndef APP_HASH_TRACE_H
#define APP_HASH_TRACE_H

#include "replay/trace.h"

enum { HASH_TRACE_ERROR_BYTES = 512 };

/* Read all of `path`. `block_tokens` 0: as few tokens a block as the lengths allow. Returns 0, or -1 with one line in
 * `error` ("FILE:LINE: what is wrong") and `*out` empty. */
int hash_trace_read(const char *path, uint32_t block_tokens, replay_trace *out, char error[HASH_TRACE_ERROR_BYTES]);

#endif
