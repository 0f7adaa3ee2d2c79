/* driver.c: runs a fuzz target without a fuzzer.
 *
 *   fuzz_x [-n ROUNDS] FILE|FOLDER...   replay the inputs, then ROUNDS random mutations of them (20,000)
 *   fuzz_x -w FOLDER                    write the target's starting inputs
 *
 * The seed is printed, and taken from IMP_TEST_SEED. An input that ends the program is left in ./crash-input. */
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/rng.h"
#include "fuzz/fuzz.h"
#include "support/support.h"

enum { INPUT_ROOM = 1 << 18, INPUTS_ROOM = 1024 };

static struct {
    uint8_t *bytes;
    size_t n;
} inputs[INPUTS_ROOM];
static size_t n_inputs;

static const uint8_t *current;
static size_t n_current;

static void leave_input(int signal_number)
{
    FILE *f = fopen("crash-input", "wb");
    if (f) {
        fwrite(current, 1, n_current, f);
        fclose(f);
    }
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

/* In memory of exactly its length, so that a sanitizer sees each byte too many. */
static void run_one(const uint8_t *bytes, size_t n)
{
    uint8_t *exact = malloc(n ? n : 1);
    if (!exact) abort();
    memcpy(exact, bytes, n);
    current = exact;
    n_current = n;
    if (LLVMFuzzerTestOneInput(exact, n) != 0) abort();
    free(exact);
}

static int add_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    uint8_t *bytes = malloc(INPUT_ROOM);
    if (!f || !bytes || n_inputs == INPUTS_ROOM) {
        fprintf(stderr, "%s: can't be taken in\n", path);
        if (f) fclose(f);
        free(bytes);
        return -1;
    }
    inputs[n_inputs].bytes = bytes;
    inputs[n_inputs++].n = fread(bytes, 1, INPUT_ROOM, f);
    fclose(f);
    return 0;
}

static int add_path(const char *path)
{
    struct stat st;
    if (stat(path, &st) != 0) {
        perror(path);
        return -1;
    }
    if (!S_ISDIR(st.st_mode)) return add_file(path);
    DIR *d = opendir(path);
    if (!d) {
        perror(path);
        return -1;
    }
    int rc = 0;
    for (struct dirent *e; rc == 0 && (e = readdir(d));) {
        if (e->d_name[0] != '.') rc = add_file(imp_test_path(path, e->d_name));
    }
    closedir(d);
    return rc;
}

static int write_seeds(const char *folder)
{
    uint8_t *bytes = malloc(INPUT_ROOM);
    if (!bytes) return 1;
    int rc = 0;
    size_t n;
    for (size_t i = 0; rc == 0 && (n = imp_fuzz_seed(i, bytes, INPUT_ROOM)) > 0; i++) {
        char name[32];
        snprintf(name, sizeof name, "seed-%zu", i);
        FILE *f = fopen(imp_test_path(folder, name), "wb");
        if (!f || fwrite(bytes, 1, n, f) != n) {
            perror(folder);
            rc = 1;
        }
        if (f && fclose(f) != 0) rc = 1;
    }
    free(bytes);
    return rc;
}

/* Change, insert, remove or copy some bytes of bytes[*n], which has room for INPUT_ROOM. */
static void mutate(uint8_t *bytes, size_t *n, imp_rng *r)
{
    static const uint64_t edges[] = {0, 1, 127, 128, 255, 256, 65535, 0x7fffffff, 0x80000000, 0xffffffff, UINT64_MAX};
    size_t n_changes = 1 + (size_t)imp_rng_below(r, 4);
    for (size_t i = 0; i < n_changes; i++) {
        size_t at = (size_t)imp_rng_below(r, *n + 1), left = *n - at;
        switch (imp_rng_below(r, 6)) {
        case 0:
            if (left) bytes[at] ^= (uint8_t)(1u << imp_rng_below(r, 8));
            break;
        case 1:
            if (left) bytes[at] = (uint8_t)imp_rng_u64(r);
            break;
        case 2: { /* a number on the edge, where numbers lie */
            uint64_t v = edges[imp_rng_below(r, sizeof edges / sizeof edges[0])] + imp_rng_below(r, 3) - 1;
            size_t width = (size_t)4 << imp_rng_below(r, 2);
            at &= ~(width - 1);
            if (at + width > *n) break;
            for (size_t j = 0; j < width; j++) bytes[at + j] = (uint8_t)(v >> (8 * j));
            break;
        }
        case 3: *n = at; break;
        case 4: { /* more of the same */
            size_t more = (size_t)imp_rng_below(r, 64);
            if (*n + more > INPUT_ROOM) break;
            memmove(bytes + at + more, bytes + at, left);
            for (size_t j = 0; j < more; j++) bytes[at + j] = (uint8_t)imp_rng_u64(r);
            *n += more;
            break;
        }
        default: { /* a piece of another input */
            size_t other = (size_t)imp_rng_below(r, n_inputs);
            if (inputs[other].n == 0) break;
            size_t from = (size_t)imp_rng_below(r, inputs[other].n), most = inputs[other].n - from;
            size_t length = (size_t)imp_rng_below(r, (most < left ? most : left) + 1);
            memcpy(bytes + at, inputs[other].bytes + from, length);
            break;
        }
        }
    }
}

int main(int argc, char **argv)
{
    int n_rounds = 20000, i = 1;
    if (argc == 3 && strcmp(argv[1], "-w") == 0) return write_seeds(argv[2]);
    if (argc > 3 && strcmp(argv[1], "-n") == 0) {
        n_rounds = atoi(argv[2]);
        i = 3;
    }
    if (i >= argc) {
        fprintf(stderr, "usage: %s [-n ROUNDS] FILE|FOLDER...\n       %s -w FOLDER\n", argv[0], argv[0]);
        return 2;
    }
    for (; i < argc; i++) {
        if (add_path(argv[i]) != 0) return 1;
    }
    if (n_inputs == 0) {
        fprintf(stderr, "no inputs\n");
        return 1;
    }
    signal(SIGABRT, leave_input);
    signal(SIGSEGV, leave_input);
    signal(SIGBUS, leave_input);
    for (size_t j = 0; j < n_inputs; j++) run_one(inputs[j].bytes, inputs[j].n);

    uint8_t *bytes = malloc(INPUT_ROOM);
    if (!bytes) return 1;
    imp_rng r;
    imp_rng_seed(&r, imp_test_seed());
    if (n_rounds > 0) n_rounds = imp_test_rounds(n_rounds);
    for (int round = 0; round < n_rounds; round++) {
        size_t base = (size_t)imp_rng_below(&r, n_inputs), n = inputs[base].n;
        memcpy(bytes, inputs[base].bytes, n);
        mutate(bytes, &n, &r);
        run_one(bytes, n);
    }
    printf("%zu inputs, %d mutations\n", n_inputs, n_rounds);
    free(bytes);
    for (size_t j = 0; j < n_inputs; j++) free(inputs[j].bytes);
    return 0;
}
