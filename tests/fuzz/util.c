#include "fuzz/util.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "support/support.h"

void fuzz_broken(const char *file, int line, const char *promise)
{
    char text[512];
    int n = snprintf(text, sizeof text, "%s:%d: broken: %s\n", file, line, promise);
    /* Not by stdio: a target may have turned that off. */
    if (n > 0 && write(STDERR_FILENO, text, (size_t)n < sizeof text ? (size_t)n : sizeof text) < 0) abort();
    abort();
}

uint8_t fuzz_byte(fuzz_input *in) { return in->at < in->end ? *in->at++ : 0; }

uint32_t fuzz_u32(fuzz_input *in)
{
    uint32_t v = 0;
    for (int i = 0; i < 4; i++) v |= (uint32_t)fuzz_byte(in) << (8 * i);
    return v;
}

uint32_t fuzz_below(fuzz_input *in, uint32_t n)
{
    uint32_t v = fuzz_byte(in);
    if (n > 256) v |= (uint32_t)fuzz_byte(in) << 8;
    if (n > 65536) v |= (uint32_t)fuzz_byte(in) << 16;
    return n ? v % n : 0;
}

const char *fuzz_file(const void *bytes, size_t n_bytes)
{
    static int fd = -1;
    static char path[40];
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    MUST(fd >= 0 && ftruncate(fd, 0) == 0);
    MUST(n_bytes == 0 || pwrite(fd, bytes, n_bytes, 0) == (ssize_t)n_bytes);
    return path;
}

char *fuzz_make_dir(void)
{
    const char *memory = "/dev/shm";
    char *dir = imp_test_make_dir(access(memory, W_OK) == 0 ? memory : NULL);
    MUST(dir);
    return dir;
}

enum { KEPT_ROOM = 1 << 16 };
static char *kept[KEPT_ROOM];
static size_t n_kept;

/* Stands for strdup() where a module is compiled so (CMakeLists.txt). */
char *imp_fuzz_keep(const char *text);

char *imp_fuzz_keep(const char *text)
{
    size_t n = strlen(text) + 1;
    char *copy = malloc(n);
    if (!copy) return NULL;
    memcpy(copy, text, n);
    MUST(n_kept < KEPT_ROOM);
    return kept[n_kept++] = copy;
}

void fuzz_forget(void)
{
    while (n_kept > 0) free(kept[--n_kept]);
}

size_t fuzz_text_seed(const char *const *texts, size_t n_texts, size_t i, uint8_t *out, size_t room)
{
    if (i >= n_texts || strlen(texts[i]) > room) return 0;
    memcpy(out, texts[i], strlen(texts[i]));
    return strlen(texts[i]);
}
