/* bench_trace.h: `impress bench trace`: hit ratios of the policies over request traces, beside the optimum. */
#ifndef APP_BENCH_TRACE_H
#define APP_BENCH_TRACE_H

#include "options.h"

extern const opt_command bench_trace_command;
int bench_trace(int argc, char **argv);

#endif
