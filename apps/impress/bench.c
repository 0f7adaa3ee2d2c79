#include "bench.h"

#include <stdio.h>
#include <string.h>

#include "bench_io.h"
#include "bench_replay.h"
#include "bench_trace.h"
#include "commands.h"

static const struct {
    const char *name;
    const opt_command *command;
    const char *summary;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"ablation", &bench_ablation_command, "what each technique of the paper is worth", bench_ablation},
    {"chat", &bench_chat_command, "drift of a conversation that loads in part", bench_chat},
    {"io", &bench_io_command, "reads by size and depth, beside fio", bench_io},
    {"peer-llama-server", &bench_peer_command, "beside llama-server's slot save and restore", bench_peer},
    {"replay", &bench_replay_command, "large models: modelled compute, real I/O", bench_replay},
    {"trace", &bench_trace_command, "hit ratios of the policies over request traces", bench_trace},
    {"ttft", &bench_ttft_command, "time to the first token, system by system", bench_ttft},
};

enum { N_COMMANDS = sizeof commands / sizeof *commands };

const opt_command bench_command = {"bench", "bench COMMAND [OPTIONS]", "Measure.", NULL, NULL, 0};

const opt_command *bench_subcommand(size_t i) { return i < N_COMMANDS ? commands[i].command : NULL; }

static void usage(FILE *f)
{
    fprintf(f, "usage: impress bench COMMAND [OPTIONS]\n\ncommands:\n");
    for (size_t i = 0; i < N_COMMANDS; i++) fprintf(f, "  %-18s %s\n", commands[i].name, commands[i].summary);
    fprintf(f, "\n`impress bench COMMAND --help` explains a command.\n");
}

int cmd_bench(int argc, char **argv)
{
    if (argc < 2) {
        usage(stderr);
        return 2;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
        usage(stdout);
        return 0;
    }
    for (size_t i = 0; i < N_COMMANDS; i++)
        if (!strcmp(argv[1], commands[i].name)) return commands[i].run(argc - 1, argv + 1);
    fprintf(stderr, "impress bench: unknown command `%s`; known ones:", argv[1]);
    for (size_t i = 0; i < N_COMMANDS; i++) fprintf(stderr, " %s", commands[i].name);
    fputc('\n', stderr);
    return 2;
}
