/* impress: the program. Each command is a file of its own; this one finds it. */
#include <stdio.h>
#include <string.h>

#include "commands.h"
#include "impress/impress.h"

static const struct {
    const char *name, *summary;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"run", "answer a question on a long prefix, and keep the prefix", cmd_run},
    {"eval", "accuracy of the systems on multiple-choice questions", cmd_eval},
    {"ls", "list what a store holds", cmd_ls},
    {"stat", "sizes and counts of a store", cmd_stat},
    {"verify", "check every byte of a store", cmd_verify},
    {"rm", "remove a prefix, or everything", cmd_rm},
    {"gc", "remove leftovers and keep to the size limit", cmd_gc},
    {"pin", "keep a prefix from eviction", cmd_pin},
};

enum { N_COMMANDS = sizeof commands / sizeof *commands };

static void usage(FILE *f)
{
    fprintf(f, "usage: impress COMMAND [OPTIONS]\n\n"
               "Keeps the KV cache of prompt prefixes on disk, so that a long shared prompt starts at once.\n\n"
               "commands:\n");
    for (size_t i = 0; i < N_COMMANDS; i++) fprintf(f, "  %-8s %s\n", commands[i].name, commands[i].summary);
    fprintf(f, "\n`impress COMMAND --help` explains a command.\n\n"
               "a first try:\n"
               "  impress run -m MODEL.gguf -f handbook.txt -p \"What does error 17 mean?\"\n"
               "  impress run -m MODEL.gguf -f handbook.txt -p \"Who may reset it?\" --compare\n");
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        usage(stderr);
        return 2;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
        usage(stdout);
        return 0;
    }
    if (!strcmp(argv[1], "--version") || !strcmp(argv[1], "version")) {
        printf("impress %s\n", imp_version());
        return 0;
    }
    for (size_t i = 0; i < N_COMMANDS; i++)
        if (!strcmp(argv[1], commands[i].name)) return commands[i].run(argc - 1, argv + 1);
    fprintf(stderr, "impress: unknown command `%s`; known ones:", argv[1]);
    for (size_t i = 0; i < N_COMMANDS; i++) fprintf(stderr, " %s", commands[i].name);
    fputc('\n', stderr);
    return 2;
}
