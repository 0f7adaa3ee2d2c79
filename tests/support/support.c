#include "support/support.h"

#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/hash.h"
#include "base/rng.h"
#include "impress/impress.h"

static pthread_once_t seed_once = PTHREAD_ONCE_INIT;
static uint64_t seed;

static void choose_seed(void)
{
    const char *text = getenv("IMP_TEST_SEED");
    if (text && *text) {
        seed = strtoull(text, NULL, 0);
    } else {
        imp_rng rng;
        imp_rng_seed_os(&rng);
        seed = imp_rng_u64(&rng) >> 32;
    }
    fprintf(stderr, "seed: IMP_TEST_SEED=%llu\n", (unsigned long long)seed);
}

uint64_t imp_test_seed(void)
{
    pthread_once(&seed_once, choose_seed);
    return seed;
}

unsigned imp_test_step(void)
{
    const char *text = getenv("IMP_TEST_LESS");
    int less = text && *text ? atoi(text) : 1;
    return less > 1 ? (unsigned)less : 1;
}

int imp_test_rounds(int n)
{
    int some = n / (int)imp_test_step();
    return some > 0 ? some : 1;
}

char *imp_test_make_dir(const char *base)
{
    if (!base) base = getenv("TMPDIR");
    if (!base || !*base) base = "/tmp";
    size_t n_bytes = strlen(base) + sizeof "/impress-test-XXXXXX";
    char *path = malloc(n_bytes);
    if (!path) return NULL;
    snprintf(path, n_bytes, "%s/impress-test-XXXXXX", base);
    if (mkdtemp(path)) return path;
    free(path);
    return NULL;
}

char *imp_test_make_fast_dir(void)
{
    char *path = imp_test_make_dir("/dev/shm");
    return path ? path : imp_test_make_dir(NULL);
}

int imp_test_dir_set_up(void **state)
{
    *state = imp_test_make_fast_dir();
    return *state ? 0 : -1;
}

int imp_test_dir_tear_down(void **state)
{
    imp_test_remove_dir(*state);
    return 0;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

void imp_test_remove_dir(char *path)
{
    if (!path) return;
    nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(path);
}

const char *imp_test_path(const char *dir, const char *name)
{
    static char paths[8][512];
    static unsigned turn;
    char *path = paths[turn++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", dir, name);
    return path;
}

static unsigned char byte_at(uint64_t seed_of_file, uint64_t position)
{
    unsigned char word[8];
    imp_put64(word, imp_hash64(&(uint64_t){position / 8}, sizeof(uint64_t), seed_of_file));
    return word[position % 8];
}

void imp_test_fill(void *bytes, size_t n_bytes, uint64_t seed_of_file, uint64_t file_offset)
{
    unsigned char *b = bytes;
    size_t i = 0;
    while (i < n_bytes && (file_offset + i) % 8 != 0) b[i] = byte_at(seed_of_file, file_offset + i), i++;
    for (; n_bytes - i >= 8; i += 8) {
        uint64_t position = (file_offset + i) / 8;
        imp_put64(b + i, imp_hash64(&position, sizeof position, seed_of_file));
    }
    for (; i < n_bytes; i++) b[i] = byte_at(seed_of_file, file_offset + i);
}

int imp_test_filled(const void *bytes, size_t n_bytes, uint64_t seed_of_file, uint64_t file_offset)
{
    unsigned char want[4096];
    const unsigned char *b = bytes;
    while (n_bytes > 0) {
        size_t n = n_bytes < sizeof want ? n_bytes : sizeof want;
        imp_test_fill(want, n, seed_of_file, file_offset);
        if (memcmp(b, want, n) != 0) return 0;
        b += n;
        file_offset += n;
        n_bytes -= n;
    }
    return 1;
}

int imp_test_make_file(const char *path, uint64_t n_bytes, uint64_t seed_of_file)
{
    unsigned char buf[65536];
    int fd = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
    if (fd < 0) return -1;
    int rc = 0;
    for (uint64_t at = 0; at < n_bytes && rc == 0;) {
        size_t n = n_bytes - at < sizeof buf ? (size_t)(n_bytes - at) : sizeof buf;
        imp_test_fill(buf, n, seed_of_file, at);
        if (write(fd, buf, n) != (ssize_t)n) rc = -1;
        at += n;
    }
    close(fd);
    return rc;
}

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the two below */
static char log_part[256];
static unsigned log_count;

static void count_line(imp_log_level level, const char *line, void *user)
{
    (void)level;
    (void)user;
    pthread_mutex_lock(&log_lock);
    if (strstr(line, log_part)) log_count++;
    pthread_mutex_unlock(&log_lock);
}

static void pass_over(imp_log_level level, const char *line, void *user)
{
    (void)level;
    (void)line;
    (void)user;
}

void imp_test_no_log(void) { imp_log_set(pass_over, NULL, IMP_LOG_ERROR); }

void imp_test_count_log(const char *part)
{
    pthread_mutex_lock(&log_lock);
    snprintf(log_part, sizeof log_part, "%s", part);
    log_count = 0;
    pthread_mutex_unlock(&log_lock);
    imp_log_set(count_line, NULL, IMP_LOG_DEBUG);
}

unsigned imp_test_log_count(void)
{
    pthread_mutex_lock(&log_lock);
    unsigned n = log_count;
    pthread_mutex_unlock(&log_lock);
    return n;
}
