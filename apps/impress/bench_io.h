/* bench_io.h: `impress bench io`: reads by size and depth through the path of loads, beside fio. */
#ifndef APP_BENCH_IO_H
#define APP_BENCH_IO_H

#include "options.h"

extern const opt_command bench_io_command;
int bench_io(int argc, char **argv);

#endif
