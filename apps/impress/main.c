/* impress: the program. Each command is a file of its own; this one finds it. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"
#include "commands.h"
#include "impress/impress.h"

static const struct {
    const opt_command *command;
    const char *summary;
    int (*run)(int argc, char **argv);
} commands[] = {
    {&run_command, "answer a question on a long prefix, and keep the prefix", cmd_run},
    {&serve_command, "serve a model with OpenAI's API, prefixes from the store", cmd_serve},
    {&eval_command, "accuracy of the systems on multiple-choice questions", cmd_eval},
    {&bench_command, "measure: time to the first token, reads, caches", cmd_bench},
    {&warm_command, "compute and store prefixes before anybody asks", cmd_warm},
    {&diff_command, "the first token in which two prompts differ, and its cost", cmd_diff},
    {&systems_command, "list the systems and what each is made of", cmd_systems},
    {&ls_command, "list what a store holds", cmd_ls},
    {&stat_command, "sizes and counts of a store", cmd_stat},
    {&verify_command, "check every byte of a store", cmd_verify},
    {&rm_command, "remove a prefix, or everything", cmd_rm},
    {&gc_command, "remove leftovers and keep to the size limit", cmd_gc},
    {&pin_command, "keep a prefix from eviction", cmd_pin},
};

enum { N_COMMANDS = sizeof commands / sizeof *commands, N_BENCH = 16 };

static void usage(FILE *f)
{
    fprintf(f, "usage: impress COMMAND [OPTIONS]\n\n"
               "Keeps the KV cache of prompt prefixes on disk, so that a long shared prompt starts at once.\n\n"
               "commands:\n");
    for (size_t i = 0; i < N_COMMANDS; i++) fprintf(f, "  %-8s %s\n", commands[i].command->name, commands[i].summary);
    fprintf(f, "\n`impress COMMAND --help` explains a command.\n\n"
               "a first try:\n"
               "  impress run -m MODEL.gguf -f handbook.txt -p \"What does error 17 mean?\"\n"
               "  impress run -m MODEL.gguf -f handbook.txt -p \"Who may reset it?\" --compare\n");
}

/* A world in which a failed write is an error to be reported, not the end of the process, and in which no file of the
 * store gets the number of a closed standard stream. */
static int settle_in(void)
{
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    for (int fd = 0; fd >= 0 && fd <= STDERR_FILENO;) {
        fd = open("/dev/null", fd == STDIN_FILENO ? O_RDONLY : O_WRONLY);
        if (fd < 0) return 1;
        if (fd > STDERR_FILENO) close(fd);
    }
    return 0;
}

/* What a command printed must have arrived. */
static int finish(int code)
{
    if (fflush(stdout) == 0 && !ferror(stdout)) return code;
    fprintf(stderr, "impress: can't write to standard output\n");
    return code ? code : 1;
}

int main(int argc, char **argv)
{
    static char help_flag[] = "--help";
    if (settle_in()) return 1;
    if (argc < 2) {
        usage(stderr);
        return 2;
    }
    const opt_command *all[N_COMMANDS + N_BENCH];
    size_t n_all = 0;
    for (size_t i = 0; i < N_COMMANDS; i++) all[n_all++] = commands[i].command;
    for (size_t i = 0; i < N_BENCH && bench_subcommand(i); i++) all[n_all++] = bench_subcommand(i);
    opt_know(all, n_all);
    if (!strcmp(argv[1], "help") && argc > 2) { /* `impress help run` is `impress run --help` */
        argv[1] = argv[2];
        argv[2] = help_flag;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
        usage(stdout);
        return finish(0);
    }
    if (!strcmp(argv[1], "--version") || !strcmp(argv[1], "version")) {
        printf("impress %s\n", imp_version());
        return finish(0);
    }
    for (size_t i = 0; i < N_COMMANDS; i++)
        if (!strcmp(argv[1], commands[i].command->name)) return finish(commands[i].run(argc - 1, argv + 1));
    fprintf(stderr, "impress: unknown command `%s`; known ones:", argv[1]);
    for (size_t i = 0; i < N_COMMANDS; i++) fprintf(stderr, " %s", commands[i].command->name);
    fputc('\n', stderr);
    return 2;
}
