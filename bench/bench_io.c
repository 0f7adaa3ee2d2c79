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

#include "impress/impress.h"

int main(int argc, char **argv)
{
    if (argc < 2 || argc > 6) {
        fprintf(stderr, "usage: %s FILE [uring|threads] [block bytes] [depth] [bytes per second]\n", argv[0]);
        return 2;
    }
    imp_read_trial t = {.struct_bytes = sizeof t,
                        .mode = argc > 2 && strcmp(argv[2], "threads") == 0 ? IMP_IO_THREADS : IMP_IO_URING,
                        .block_bytes = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 0) : 256 << 10,
                        .depth = argc > 4 ? (uint32_t)strtoul(argv[4], NULL, 0) : 32,
                        .read_bytes_per_s = argc > 5 ? strtoull(argv[5], NULL, 0) : 0};
    imp_read_figures f;
    if (imp_measure_reads(argv[1], &t, &f) < 0) {
        fprintf(stderr, "%s\n", imp_last_error());
        return 1;
    }
    printf("%s: %u bytes x %u: %" PRIu64 " bytes, %.0f MB/s, %.0f us of CPU per MB\n", f.io_mode, t.block_bytes, t.depth,
           f.n_bytes, (double)f.n_bytes * 1e3 / (double)f.ns, (double)f.cpu_ns * 1e3 / (double)f.n_bytes);
    return 0;
}
