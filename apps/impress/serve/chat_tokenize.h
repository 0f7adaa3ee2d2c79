/* chat_tokenize.h: llama_tokenize(), with as much stack as a text may take. For all that tokenise what others wrote. */
#ifndef CHAT_TOKENIZE_H
#define CHAT_TOKENIZE_H

#include <llama.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* As llama_tokenize(), which is for an int32_t of bytes. INT32_MIN: it fails, or there is no memory, or, with errno
 * EMSGSIZE, the text is one that might take more than CHAT_TOKENIZE_CHARACTERS' stack. */
int32_t chat_tokenize(const struct llama_vocab *vocab, const char *text, size_t n_bytes, llama_token *tokens,
                      int32_t room, bool bos, bool special);

enum { CHAT_TOKENIZE_CHARACTERS = 2 << 20 }; /* without the beginning of a line among them */

/* The most characters that a tokeniser's pattern may match at once, or some more. */
size_t chat_tokenize_stretch(const char *text, size_t n_bytes);

#endif
