/* tokenize.h: llama_tokenize(), with as much stack as a text may take. For all that tokenise what others wrote. */
#ifndef APP_TOKENIZE_H
#define APP_TOKENIZE_H

#include <llama.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* As llama_tokenize(), which is for an int32_t of bytes. INT32_MIN: it fails, or there is no memory, or, with errno
 * EMSGSIZE, the text is one that might take more than APP_TOKENIZE_CHARACTERS' stack. */
int32_t app_tokenize(const struct llama_vocab *vocab, const char *text, size_t n_bytes, llama_token *tokens,
                     int32_t room, bool bos, bool special);

/* A text's tokens at the end of *tokens, [*n], which grows. False: no memory, or too long; errno as above. */
bool app_tokenize_more(const struct llama_vocab *vocab, const char *text, size_t n_bytes, bool bos, bool special,
                       llama_token **tokens, size_t *n);

enum { APP_TOKENIZE_CHARACTERS = 2 << 20 }; /* without the beginning of a line among them */

/* The most characters that a tokeniser's pattern may match at once, or some more. */
size_t app_tokenize_stretch(const char *text, size_t n_bytes);

#endif
