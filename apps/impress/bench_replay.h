/* bench_replay.h: `impress bench replay`: large models on a large device, with modelled compute and real I/O. */
#ifndef APP_BENCH_REPLAY_H
#define APP_BENCH_REPLAY_H

#include "options.h"

extern const opt_command bench_replay_command;
int bench_replay(int argc, char **argv);

#endif
