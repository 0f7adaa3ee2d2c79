/* fuzz.h: what a fuzz target gives. One target per entry point, fuzz_<target>.c, with saved inputs in corpus/<target>/.
 * Linked with driver.c, it replays them and then mutates them; linked with clang's -fsanitize=fuzzer, it is fuzzed. */
#ifndef IMP_TEST_FUZZ_H
#define IMP_TEST_FUZZ_H

#include <stddef.h>
#include <stdint.h>

/* Must return 0 for any bytes, and abort() where a promise is broken. */
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes);

/* Write the i-th input to start from into out[room] and return its length; 0 past the last. */
size_t imp_fuzz_seed(size_t i, uint8_t *out, size_t room);

#endif
