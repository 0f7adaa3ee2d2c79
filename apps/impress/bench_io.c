/* bench_io.c: each size and depth through imp_measure_reads(), then by fio, which settles what the device can do; from
 * the times at the largest depth, what one more read costs and what a byte does. */
#include "bench_io.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <jansson.h>

#include "impress/impress.h"
#include "model.h"
#include "store_options.h"
#include "text.h"

enum { MAX_ITEMS = 16, MAX_CELLS = 512, MAX_ROUNDS = 31, FILL_BYTES = 1 << 20, FIO_BYTES = 1 << 20 };

extern char **environ;

typedef struct io_settings {
    const char *sizes, *depths, *io, *store, *key_file;
    uint64_t file_size, io_limit, rounds;
    double seconds;
    bool no_direct, no_fio, json;
} io_settings;

#define AT(field) offsetof(io_settings, field)
static const opt options[] = {
    {"sizes", 0, OPT_TEXT, AT(sizes), "LIST", "bytes of a read (default: 4K,16K,64K,256K,1M)", true},
    {"depths", 0, OPT_TEXT, AT(depths), "LIST", "reads in flight (default: 1,8,32)", true},
    {"seconds", 0, OPT_REAL, AT(seconds), "N", "of each measurement (default: 0.5)", true},
    {"rounds", 0, OPT_COUNT, AT(rounds), "N", "measure so often, in turns with fio; medians count (default: 3)", true},
    {"file-size", 0, OPT_SIZE, AT(file_size), "SIZE", "of the file that is made without FILE (default: 2G)", true},
    {"io", 0, OPT_TEXT, AT(io), "MODE", "auto (default), uring or threads", false},
    {"no-direct", 0, OPT_FLAG, AT(no_direct), NULL, "read through the page cache", false},
    {"io-limit", 0, OPT_SIZE, AT(io_limit), "SIZE", "read no more than SIZE a second (fio too)", false},
    {"store", 0, OPT_TEXT, AT(store), "DIR",
     "instead of all that: time reads of this store, and keep in it\nwhat they cost, for the loads to come", true},
    {"key-file", 0, OPT_TEXT, AT(key_file), "FILE", "the key of that store, if it is encrypted", false},
    {"no-fio", 0, OPT_FLAG, AT(no_fio), NULL, "without fio beside it", true},
    {"json", 0, OPT_FLAG, AT(json), NULL, "one JSON object a line", true},
};

const opt_command bench_io_command = {
    "bench io",
    "bench io [FILE | --store DIR] [--sizes LIST] [--depths LIST] [--seconds N] [--json]",
    "Read a file by size and depth, in order and at random, the way loads read a store, and have fio read\n"
    "it with the same settings. Then what one more read costs, and a byte.",
    "FILE is only read. Without it one is made in the cache folder, on the default store's disk, and removed.",
    options,
    sizeof options / sizeof *options,
};

typedef struct io_cell {
    bool random;
    uint32_t block, depth;
    imp_read_figures ours;
    double fio_bytes_per_s; /* 0: not measured */
} io_cell;

typedef struct io_bench {
    const io_settings *s;
    const char *file;
    imp_io_mode mode;
    uint32_t sizes[MAX_ITEMS], depths[MAX_ITEMS];
    size_t n_sizes, n_depths, n_cells;
    io_cell cells[MAX_CELLS];
    const char *no_fio; /* why there is no fio; NULL: there is */
} io_bench;

static int parse_list(const char *name, const char *list, bool sizes, uint32_t *out, size_t *n)
{
    char item[64];
    for (const char *at = list; *at;) {
        size_t length = strcspn(at, ",");
        snprintf(item, sizeof item, "%.*s", (int)(length < 63 ? length : 63), at);
        at += length + (at[length] == ',');
        uint64_t v;
        bool ok =
            sizes ? text_parse_size(item, &v) && v % 4096 == 0 && v <= 64 << 20 : text_parse_count(item, 1024, &v);
        if (!ok || v == 0 || *n == MAX_ITEMS)
            return opt_misuse(&bench_io_command, "%s: `%s` is not %s", name, item,
                              sizes ? "a multiple of 4K up to 64M" : "a depth of 1 to 1024");
        out[(*n)++] = (uint32_t)v;
    }
    return *n ? 0 : opt_misuse(&bench_io_command, "%s is empty", name);
}

/* ---- the file */

static int make_file(uint64_t n_bytes, char *path, size_t n)
{
    snprintf(path, n, "%s-XXXXXX", store_default_dir("bench-io"));
    int fd = mkstemp(path);
    if (fd < 0) return app_fail("can't make %s: %s", path, strerror(errno));
    uint64_t *bytes = malloc(FILL_BYTES), random = 1;
    int err = bytes ? 0 : ENOMEM;
    text_progress progress = {.label = "making a file"};
    for (uint64_t done = 0; !err && done < n_bytes;) {
        for (size_t i = 0; i < FILL_BYTES / sizeof *bytes; i++) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            bytes[i] = random;
        }
        size_t piece = n_bytes - done < FILL_BYTES ? (size_t)(n_bytes - done) : FILL_BYTES;
        ssize_t got = write(fd, bytes, piece);
        if (got < 0) err = errno;
        else done += (uint64_t)got;
        text_progress_at(&progress, (double)done / (double)n_bytes, "");
    }
    text_progress_end(&progress);
    if (!err && fsync(fd) != 0) err = errno;
    if (!err) (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    free(bytes);
    close(fd);
    if (!err) return 0;
    unlink(path);
    return app_fail("can't write %s: %s", path, strerror(err));
}

/* ---- fio */

/* A path as fio takes it: a colon would start a second file. */
static bool fio_name(const char *file, char *out, size_t n)
{
    size_t at = (size_t)snprintf(out, n, "--filename=");
    for (; *file && at + 3 < n; file++) {
        if (*file == ':') out[at++] = '\\';
        out[at++] = *file;
    }
    out[at] = '\0';
    return *file == '\0';
}

/* Run fio and read what it prints. NULL after a failure that `why` tells. */
static json_t *fio_run(char *const *argv, const char **why)
{
    int pipe_fds[2];
    pid_t pid = -1;
    json_t *o = NULL;
    char *text = malloc(FIO_BYTES);
    *why = "fio can't be run";
    if (!text || pipe(pipe_fds) != 0) {
        free(text);
        return NULL;
    }
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, pipe_fds[1], STDOUT_FILENO);
    posix_spawn_file_actions_addclose(&actions, pipe_fds[0]);
    posix_spawn_file_actions_addclose(&actions, pipe_fds[1]);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    int err = posix_spawnp(&pid, argv[0], &actions, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(pipe_fds[1]);
    size_t n = 0;
    for (ssize_t got = 1; err == 0 && got != 0 && n + 1 < FIO_BYTES;) {
        got = read(pipe_fds[0], text + n, FIO_BYTES - 1 - n);
        if (got < 0 && errno != EINTR) break;
        if (got > 0) n += (size_t)got;
    }
    close(pipe_fds[0]);
    int status = 0;
    if (err == 0) {
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
    } else {
        *why = err == ENOENT ? "fio is not installed" : "fio can't be run";
    }
    if (err == 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        text[n] = '\0';
        const char *json = strchr(text, '{'); /* lines of notes may come first */
        json_error_t at;
        o = json ? json_loads(json, JSON_DISABLE_EOF_CHECK, &at) : NULL;
        if (!o) *why = "fio printed something that can't be read";
    } else if (err == 0) {
        *why = "fio failed";
    }
    free(text);
    return o;
}

static double measure_fio(io_bench *b, const io_cell *c)
{
    char name[4200], size[32], depth[32], seconds[32], rate[40];
    if (b->no_fio) return 0;
    if (!fio_name(b->file, name, sizeof name)) {
        b->no_fio = "the file's name is too long for fio";
        return 0;
    }
    snprintf(size, sizeof size, "--bs=%u", c->block);
    snprintf(depth, sizeof depth, "--iodepth=%u", c->depth);
    snprintf(seconds, sizeof seconds, "--runtime=%.0fms", b->s->seconds * 1000);
    snprintf(rate, sizeof rate, "--rate=%" PRIu64, b->s->io_limit);
    char program[] = "fio", job[] = "--name=impress", readonly[] = "--readonly", timed[] = "--time_based";
    char format[] = "--output-format=json", random[] = "--rw=randread", sequential[] = "--rw=read";
    char direct[] = "--direct=1", buffered[] = "--direct=0", uring[] = "--ioengine=io_uring", fixed[] = "--fixedbufs=1";
    char any[] = "--norandommap", seed[] = "--randrepeat=0", threads[] = "--ioengine=psync",
         invalidate[] = "--invalidate=0";
    bool with_ring = strncmp(c->ours.io_mode, "io_uring", 8) == 0;
    char *argv[20];
    size_t n = 0;
    argv[n++] = program;
    argv[n++] = job;
    argv[n++] = name;
    argv[n++] = readonly;
    argv[n++] = timed;
    argv[n++] = seconds;
    argv[n++] = format;
    argv[n++] = c->random ? random : sequential;
    argv[n++] = size;
    argv[n++] = depth;
    argv[n++] = strstr(c->ours.io_mode, "O_DIRECT") ? direct : buffered;
    argv[n++] = with_ring ? uring : threads;
    if (with_ring && strstr(c->ours.io_mode, "registered")) argv[n++] = fixed;
    argv[n++] = any;
    argv[n++] = seed;
    argv[n++] = invalidate;
    if (b->s->io_limit) argv[n++] = rate;
    argv[n] = NULL;
    json_t *o = fio_run(argv, &b->no_fio);
    if (!o) return 0;
    const json_t *job0 = json_array_get(json_object_get(o, "jobs"), 0);
    double rate_read = json_number_value(json_object_get(json_object_get(job0, "read"), "bw_bytes"));
    b->no_fio = rate_read > 0 ? NULL : "fio printed no bandwidth";
    json_decref(o);
    return rate_read;
}

/* ---- figures */

static int measure_ours(const io_bench *b, const io_cell *c, imp_read_figures *out)
{
    imp_read_trial t = {.struct_bytes = sizeof t,
                        .mode = b->mode,
                        .flags = b->s->no_direct ? IMP_STORE_NO_DIRECT : 0,
                        .read_bytes_per_s = b->s->io_limit,
                        .random = c->random,
                        .seed = 1,
                        .block_bytes = c->block,
                        .depth = c->depth,
                        .max_bytes = UINT64_MAX,
                        .max_ns = (uint64_t)(b->s->seconds * 1e9)};
    return imp_measure_reads(b->file, &t, out) < 0 ? app_fail("%s", imp_last_error()) : 0;
}

static double bytes_per_s(const imp_read_figures *f) { return f->ns ? (double)f->n_bytes * 1e9 / (double)f->ns : 0; }

static int by_rate(const void *a, const void *b)
{
    double x = bytes_per_s(a), y = bytes_per_s(b);
    return (x > y) - (x < y);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* In turns, so that what else the machine does hits both. */
static int measure(io_bench *b, io_cell *c)
{
    imp_read_figures ours[MAX_ROUNDS];
    double fio[MAX_ROUNDS];
    size_t n = b->s->rounds;
    for (size_t i = 0; i < n; i++) {
        int rc = measure_ours(b, c, &ours[i]);
        if (rc) return rc;
        c->ours = ours[i]; /* fio is told what mode that was */
        fio[i] = measure_fio(b, c);
    }
    qsort(ours, n, sizeof *ours, by_rate);
    qsort(fio, n, sizeof *fio, by_value);
    c->ours = ours[n / 2];
    c->fio_bytes_per_s = b->no_fio ? 0 : fio[n / 2];
    return 0;
}

/* The line t = read + bytes x byte through the times a random read of each size takes at the largest depth, each size's
 * relative error counting alike. False: fewer than two sizes, or larger ones took no longer. */
static bool fit_costs(const io_bench *b, double *read_ns, double *byte_ns)
{
    uint32_t deepest = 0;
    for (size_t i = 0; i < b->n_depths; i++)
        if (b->depths[i] > deepest) deepest = b->depths[i];
    double w = 0, wx = 0, wy = 0, wxx = 0, wxy = 0;
    size_t n = 0;
    for (size_t i = 0; i < b->n_cells; i++) {
        const io_cell *c = &b->cells[i];
        if (!c->random || c->depth != deepest || c->ours.n_reads == 0) continue;
        double x = c->block, y = (double)c->ours.ns / (double)c->ours.n_reads, weight = 1 / (y * y);
        w += weight, wx += weight * x, wy += weight * y, wxx += weight * x * x, wxy += weight * x * y;
        n++;
    }
    double d = w * wxx - wx * wx;
    if (n < 2 || !(d > 0)) return false;
    *byte_ns = (w * wxy - wx * wy) / d;
    *read_ns = (wy - *byte_ns * wx) / w;
    if (*read_ns < 0) *read_ns = 0;
    return *byte_ns > 0;
}

static int print_json(const io_bench *b)
{
    double read_ns, byte_ns;
    int bad = 0;
    for (size_t i = 0; !bad && i < b->n_cells; i++) {
        const io_cell *c = &b->cells[i];
        double ours = bytes_per_s(&c->ours);
        json_t *o =
            json_pack("{s:s,s:s,s:I,s:I,s:f,s:f,s:f,s:s}", "bench", "io", "order", c->random ? "random" : "sequential",
                      "block_bytes", (json_int_t)c->block, "depth", (json_int_t)c->depth, "bytes_per_s", ours,
                      "reads_per_s", ours / c->block, "cpu_us_per_mb",
                      (double)c->ours.cpu_ns * 1e3 / (double)(c->ours.n_bytes + 1), "io_mode", c->ours.io_mode);
        bool fio = c->fio_bytes_per_s > 0;
        bad = !o || json_object_set_new(o, "fio_bytes_per_s", fio ? json_real(c->fio_bytes_per_s) : json_null()) ||
              json_object_set_new(o, "of_fio", fio ? json_real(ours / c->fio_bytes_per_s) : json_null()) ||
              json_dumpf(o, stdout, JSON_COMPACT | JSON_REAL_PRECISION(6));
        json_decref(o);
        putchar('\n');
    }
    if (!bad) {
        bool told = fit_costs(b, &read_ns, &byte_ns); /* too few sizes, or times of chance, tell nothing: null */
        json_t *o = json_pack("{s:s,s:o,s:o,s:o}", "bench", "io-cost", "read_us",
                              told ? json_real(read_ns / 1e3) : json_null(), "byte_ns",
                              told ? json_real(byte_ns) : json_null(), "read_is_bytes",
                              told ? json_real(read_ns / byte_ns) : json_null());
        bad = !o || json_dumpf(o, stdout, JSON_COMPACT | JSON_REAL_PRECISION(6));
        json_decref(o);
        putchar('\n');
    }
    return bad ? app_fail("can't write JSON to standard output") : 0;
}

static int print_table(const io_bench *b)
{
    text_table *t = text_table_new(7);
    static const char *const heads[] = {"order", "size", "depth", "MB/s", "fio, MB/s", "of fio, %", "CPU, us per MB"};
    bool ok = t != NULL;
    for (size_t i = 0; ok && i < 7; i++) ok = text_table_add(t, "%s", heads[i]);
    for (size_t i = 0; ok && i < b->n_cells; i++) {
        const io_cell *c = &b->cells[i];
        char size[32];
        double ours = bytes_per_s(&c->ours);
        ok = text_table_add(t, c->random ? "random" : "sequential") &&
             text_table_add(t, "%s", text_bytes(c->block, size)) && text_table_add(t, "%u", c->depth) &&
             text_table_add(t, "%.0f", ours / 1e6);
        if (ok && c->fio_bytes_per_s > 0)
            ok = text_table_add(t, "%.0f", c->fio_bytes_per_s / 1e6) &&
                 text_table_add(t, "%.0f", 100 * ours / c->fio_bytes_per_s);
        else if (ok)
            ok = text_table_add(t, "-") && text_table_add(t, "-");
        ok = ok && text_table_add(t, "%.0f", (double)c->ours.cpu_ns * 1e3 / (double)(c->ours.n_bytes + 1));
    }
    if (ok) {
        printf("%s: %s\n\n", b->file, b->cells[0].ours.io_mode);
        text_table_print(t, stdout);
        double read_ns, byte_ns;
        if (fit_costs(b, &read_ns, &byte_ns))
            printf("\none more read costs %.1f us, a byte %.3f ns (%.0f MB/s): a read is worth %.0f KiB\n",
                   read_ns / 1e3, byte_ns, 1e3 / byte_ns, read_ns / byte_ns / 1024);
    }
    text_table_free(t);
    return ok ? 0 : app_fail("out of memory");
}

static int run(io_bench *b)
{
    text_progress progress = {.label = "reading"};
    size_t n = 2 * b->n_sizes * b->n_depths;
    int rc = n <= MAX_CELLS ? 0 : opt_misuse(&bench_io_command, "more than %d sizes and depths", MAX_CELLS / 2);
    for (size_t i = 0; rc == 0 && i < n; i++) {
        io_cell *c = &b->cells[b->n_cells];
        *c = (io_cell){.random = i >= n / 2, .block = b->sizes[i / b->n_depths % b->n_sizes],
                       .depth = b->depths[i % b->n_depths]};
        rc = measure(b, c);
        if (rc) break;
        b->n_cells++;
        text_progress_at(&progress, (double)b->n_cells / (double)n, "");
    }
    text_progress_end(&progress);
    if (rc == 0 && b->no_fio) fprintf(stderr, "impress bench io: %s: without its figures\n", b->no_fio);
    if (rc == 0) rc = b->s->json ? print_json(b) : print_table(b);
    return rc;
}

/* The costs that loads of a store go by. */
static int calibrate(const io_settings *s, imp_io_mode mode)
{
    imp_store_opts opts;
    imp_store *store;
    imp_read_costs costs;
    imp_store_opts_init(&opts);
    opts.io_mode = mode;
    opts.key_file = s->key_file;
    opts.flags = IMP_STORE_MUST_EXIST | (s->no_direct ? IMP_STORE_NO_DIRECT : 0);
    if (imp_store_open(s->store, &opts, &store) < 0) return app_fail("%s", imp_last_error());
    int rc = imp_store_calibrate(store, &costs) < 0 ? app_fail("%s", imp_last_error()) : 0;
    if (rc == 0 && s->json) {
        json_t *o = json_pack("{s:s,s:s,s:f,s:f,s:f,s:I}", "bench", "io-cost", "store", s->store, "read_us",
                              costs.read_ns / 1e3, "byte_ns", costs.byte_ns, "read_is_bytes",
                              costs.read_ns / costs.byte_ns, "measured_s", (json_int_t)costs.measured_s);
        if (!o || json_dumpf(o, stdout, JSON_COMPACT | JSON_REAL_PRECISION(6))) rc = app_fail("can't write JSON");
        json_decref(o);
        putchar('\n');
    } else if (rc == 0) {
        printf("%s: one more read costs %.1f us, a byte %.3f ns (%.0f MB/s): a read is worth %.0f KiB\n", s->store,
               costs.read_ns / 1e3, costs.byte_ns, 1e3 / costs.byte_ns, costs.read_ns / costs.byte_ns / 1024);
    }
    imp_store_close(store);
    return rc;
}

int bench_io(int argc, char **argv)
{
    io_settings s = {
        .sizes = "4K,16K,64K,256K,1M", .depths = "1,8,32", .seconds = 0.5, .rounds = 3, .file_size = (uint64_t)2 << 30};
    int n_positional;
    int rc = opt_parse(&bench_io_command, argc, argv, &s, &n_positional);
    if (rc) return rc == 1 ? 0 : rc;
    if (n_positional > 1) return opt_misuse(&bench_io_command, "unexpected argument `%s`", argv[2]);
    if (!(s.seconds >= 0.01) || s.seconds > 3600)
        return opt_misuse(&bench_io_command, "--seconds: %g is not 0.01 to 3600", s.seconds);
    if (s.rounds == 0 || s.rounds > MAX_ROUNDS)
        return opt_misuse(&bench_io_command, "--rounds is not 1 to %d", MAX_ROUNDS);
    io_bench *b = calloc(1, sizeof *b);
    if (!b) return app_fail("out of memory");
    b->s = &s;
    b->no_fio = s.no_fio ? "fio wasn't asked" : NULL;
    if (!s.io || !strcmp(s.io, "auto")) b->mode = IMP_IO_AUTO;
    else if (!strcmp(s.io, "uring")) b->mode = IMP_IO_URING;
    else if (!strcmp(s.io, "threads")) b->mode = IMP_IO_THREADS;
    else rc = opt_misuse(&bench_io_command, "--io: `%s` is not one of auto, uring, threads", s.io);
    if (rc == 0) rc = parse_list("--sizes", s.sizes, true, b->sizes, &b->n_sizes);
    if (rc == 0) rc = parse_list("--depths", s.depths, false, b->depths, &b->n_depths);
    char made[4200] = "";
    if (rc == 0 && s.store) {
        if (n_positional) rc = opt_misuse(&bench_io_command, "either FILE or --store");
        else if (s.io_limit) rc = opt_misuse(&bench_io_command, "--io-limit: a store's disk is timed as it is");
        else rc = calibrate(&s, b->mode);
        free(b);
        return rc;
    }
    if (rc == 0 && n_positional == 0) rc = make_file(s.file_size, made, sizeof made);
    b->file = n_positional ? argv[1] : made;
    if (rc == 0) rc = run(b);
    if (made[0]) unlink(made);
    free(b);
    return rc;
}
