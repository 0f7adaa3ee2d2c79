/* util.h: what several fuzz targets need. */
#ifndef IMP_TEST_FUZZ_UTIL_H
#define IMP_TEST_FUZZ_UTIL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Says which promise was broken, and aborts. */
#define MUST(promise) ((promise) ? (void)0 : fuzz_broken(__FILE__, __LINE__, #promise))
_Noreturn void fuzz_broken(const char *file, int line, const char *promise);

/* An input that is read as a sequence of decisions. Past its end all are 0. */
typedef struct fuzz_input {
    const uint8_t *at, *end;
} fuzz_input;

uint8_t fuzz_byte(fuzz_input *in);
uint32_t fuzz_u32(fuzz_input *in);
uint32_t fuzz_below(fuzz_input *in, uint32_t n); /* 0 .. n - 1, of one byte where that is enough */

/* The path of a file with these bytes, in memory, until the next call. */
const char *fuzz_file(const void *bytes, size_t n_bytes);

/* A new folder, in memory where there is such a file system: fsync() costs nothing there. As imp_test_make_dir(). */
char *fuzz_make_dir(void);

/* Copies of texts that a module keeps as long as the program lives: those made since the last call are freed. */
void fuzz_forget(void);

/* Write the i-th of some texts as a seed: for imp_fuzz_seed(). */
size_t fuzz_text_seed(const char *const *texts, size_t n_texts, size_t i, uint8_t *out, size_t room);

#endif
