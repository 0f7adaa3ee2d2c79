/* commands.h: one function per command; argv[0] is its name. Exit codes: 0 done, 1 failed, 2 misused. */
#ifndef APP_COMMANDS_H
#define APP_COMMANDS_H

#include "options.h"

int cmd_run(int argc, char **argv);
int cmd_serve(int argc, char **argv);
int cmd_eval(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_systems(int argc, char **argv);
int cmd_ls(int argc, char **argv);
int cmd_stat(int argc, char **argv);
int cmd_verify(int argc, char **argv);
int cmd_rm(int argc, char **argv);
int cmd_gc(int argc, char **argv);
int cmd_pin(int argc, char **argv);
int cmd_warm(int argc, char **argv);
int cmd_diff(int argc, char **argv);

extern const opt_command systems_command, bench_command;
extern const opt_command run_command, serve_command, eval_command, ls_command, stat_command, verify_command, rm_command,
    gc_command, pin_command, warm_command, diff_command;

#endif
