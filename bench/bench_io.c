/* bench_io.c: how fast a file is read from its start to its end through src/io, `depth` reads of `block` bytes in
 * flight.
 *
 *     bench-io FILE [uring|threads] [block bytes] [depth] [bytes per second]
 *
 * The same by fio: fio --name=x --filename=FILE --rw=read --bs=BLOCK --iodepth=DEPTH --direct=1 --ioengine=io_uring
 *                      --fixedbufs=1 --readonly
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/status.h"
#include "io/io.h"

typedef struct options {
    char *dir, *name;
    imp_io_mode mode;
    size_t block;
    unsigned depth;
    uint64_t bytes_per_s;
} options;

static double cpu_s(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

/* Read all whole blocks of `file`, in order, keeping the queue full. */
static int read_all(imp_io_queue *q, imp_io_file *file, const options *o, imp_io_op *ops)
{
    unsigned char *arena = imp_io_queue_arena(q, NULL);
    uint64_t n = imp_io_file_bytes(file) / o->block, next = 0;
    for (; next < n && next < o->depth; next++) {
        ops[next] = (imp_io_op){
            .file = file, .offset = next * o->block, .buf = arena + next * o->block, .n_bytes = o->block};
        imp_io_submit(q, &ops[next]);
    }
    for (uint64_t done = 0; done < n; done++) {
        imp_io_op *op = &ops[done % o->depth];
        imp_io_wait(q, op);
        if (op->status) return op->status;
        if (next < n) {
            op->offset = next++ * o->block;
            imp_io_submit(q, op);
        }
    }
    return 0;
}

static int run(const options *o)
{
    imp_io *io = NULL;
    imp_io_file *file = NULL;
    imp_io_queue *q = NULL;
    imp_io_op *ops = imp_calloc(o->depth, sizeof *ops);
    int rc = ops ? 0 : imp_fail(IMP_E_NOMEM, "no memory");
    if (rc < 0) goto out;
    rc = imp_io_new(o->dir, o->mode, IMP_STORE_READONLY, o->bytes_per_s, &io);
    if (rc < 0) goto out;
    rc = imp_io_open(io, o->name, imp_io_alignment(io), &file);
    if (rc < 0) goto out;
    rc = imp_io_queue_new(io, o->depth, o->depth * o->block, &q);
    if (rc < 0) goto out;
    double cpu = cpu_s();
    uint64_t start = imp_now_ns();
    rc = read_all(q, file, o, ops);
    if (rc < 0) goto out;
    double s = (double)(imp_now_ns() - start) / 1e9;
    cpu = cpu_s() - cpu;
    uint64_t bytes = imp_io_bytes_read(io);
    printf("%s: %zu bytes x %u: %" PRIu64 " bytes, %.0f MB/s, %.0f us of CPU per MB\n", imp_io_describe(io), o->block,
           o->depth, bytes, (double)bytes / s / 1e6, cpu * 1e12 / (double)bytes);
out:
    if (rc < 0) fprintf(stderr, "%s\n", imp_last_error());
    imp_io_queue_free(q);
    imp_io_close(file);
    imp_io_free(io);
    imp_free(ops);
    return rc < 0 ? 1 : 0;
}

int main(int argc, char **argv)
{
    if (argc < 2 || argc > 6) {
        fprintf(stderr, "usage: %s FILE [uring|threads] [block bytes] [depth] [bytes per second]\n", argv[0]);
        return 2;
    }
    options o = {.mode = argc > 2 && strcmp(argv[2], "threads") == 0 ? IMP_IO_THREADS : IMP_IO_URING,
                 .block = argc > 3 ? strtoul(argv[3], NULL, 0) : 256 << 10,
                 .depth = argc > 4 ? (unsigned)strtoul(argv[4], NULL, 0) : 32,
                 .bytes_per_s = argc > 5 ? strtoull(argv[5], NULL, 0) : 0};
    if (o.block == 0 || o.block % 4096 != 0 || o.depth == 0 || o.depth > 4096) {
        fprintf(stderr, "blocks are a multiple of 4096 bytes, the depth is 1 to 4096\n");
        return 2;
    }
    char *path = imp_strdup(argv[1]), here[] = ".", root[] = "/";
    if (!path) return 1;
    char *slash = strrchr(path, '/');
    o.dir = !slash ? here : slash == path ? root : path;
    o.name = slash ? slash + 1 : path;
    if (slash) *slash = '\0';
    int rc = run(&o);
    imp_free(path);
    return rc;
}
