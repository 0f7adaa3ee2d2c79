/* bench.h: the commands below `impress bench`. Each is a file of its own, with an opt_command named "bench NAME" and a
 * function; bench.c has the table. */
#ifndef APP_BENCH_H
#define APP_BENCH_H

#include "options.h"

/* The i-th command's options, NULL past the end: what a configuration file may set. */
const opt_command *bench_subcommand(size_t i);

extern const opt_command bench_ablation_command, bench_chat_command, bench_peer_command, bench_ttft_command;
int bench_ablation(int argc, char **argv);
int bench_chat(int argc, char **argv);
int bench_peer(int argc, char **argv);
int bench_ttft(int argc, char **argv);

#endif
