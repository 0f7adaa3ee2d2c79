/* support.h: what many test programs need. */
#ifndef IMP_TEST_SUPPORT_H
#define IMP_TEST_SUPPORT_H

#include <stddef.h>
#include <stdint.h>

/* The seed of this run, printed once so that a failure can be had again with IMP_TEST_SEED=... */
uint64_t imp_test_seed(void);

/* How many of n rounds to do: all of them, or one in so many as IMP_TEST_LESS says, where a tool makes each slow (preset
 * `valgrind`). One at least. */
int imp_test_rounds(int n);
/* The same for what is tried one after the other: 1, or IMP_TEST_LESS. */
unsigned imp_test_step(void);

/* Make an empty directory (mode 0700) below `base`, or below $TMPDIR, else /tmp, if that is NULL. Returns its path, to
 * be given to imp_test_remove_dir(); NULL if `base` can't be used. */
char *imp_test_make_dir(const char *base);
/* Remove it with all that is in it, and free the path. NULL is allowed. */
void imp_test_remove_dir(char *path);

/* The same in memory (/dev/shm), where a sync costs nothing, if that can be. */
char *imp_test_make_fast_dir(void);
/* For cmocka: *state is such a directory, with nothing else to set up. */
int imp_test_dir_set_up(void **state);
int imp_test_dir_tear_down(void **state);

/* "dir/name" in one of 8 static buffers, used in turn. */
const char *imp_test_path(const char *dir, const char *name);

/* Fill with bytes that depend on `seed` and the position in the file they belong to, so that misplaced ones show. */
void imp_test_fill(void *bytes, size_t n_bytes, uint64_t seed, uint64_t file_offset);
/* Whether they are as imp_test_fill() made them. */
int imp_test_filled(const void *bytes, size_t n_bytes, uint64_t seed, uint64_t file_offset);

/* Make a file of n_bytes as imp_test_fill() would. 0, or -1. */
int imp_test_make_file(const char *path, uint64_t n_bytes, uint64_t seed);

/* Nothing is logged from now on: where what is logged is what the test provokes. */
void imp_test_no_log(void);
/* Keep log lines that contain `part` counted from now on (imp_log_set). */
void imp_test_count_log(const char *part);
unsigned imp_test_log_count(void);

#endif
