/* options.h: one table per command says its options, under headings where there are many; flags, environment and file
 * all fill the same settings.
 *
 * Order of precedence: flag, then IMPRESS_<NAME> in the environment, then `name = value` in the configuration file
 * (--config FILE, else $XDG_CONFIG_HOME/impress/config), then the default. */
#ifndef APP_OPTIONS_H
#define APP_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum opt_kind { OPT_HEADING, OPT_FLAG, OPT_YES, OPT_TEXT, OPT_TEXTS, OPT_COUNT, OPT_SIZE, OPT_REAL } opt_kind;

/* A list of texts: for options that may be given more than once. */
typedef struct opt_texts {
    const char *items[64];
    size_t n;
} opt_texts;

typedef struct opt {
    const char *name; /* long name, without dashes */
    char letter;      /* short name, 0: none */
    opt_kind kind;
    size_t offset;   /* of the value in the settings: bool, const char * ("yes" or "no"), const char *, opt_texts,
                        uint64_t, uint64_t, double */
    const char *arg; /* what the value is called in help */
    const char *help;
    bool per_call; /* only a flag: not taken from environment or file */
} opt;

/* An entry that stands above those of its kind in help. */
#define OPT_GROUP(title)                                                                                               \
    {                                                                                                                  \
        title, 0, OPT_HEADING, 0, NULL, NULL, true                                                                     \
    }

typedef struct opt_command {
    const char *name, *usage, *summary, *details;
    const opt *opts;
    size_t n_opts;
} opt_command;

/* The program's commands, so that a line of the file that is meant for another command is told from a mistake. The
 * array is the caller's and must stay. */
void opt_know(const opt_command *const *commands, size_t n_commands);

/* Parse argv[1..] (argv[0] is the command's name) over the defaults already in `settings`. Positional arguments are
 * moved to argv[1..*n_positional]. Returns 0; 1 when help was printed; 2 after one line about a mistake. */
int opt_parse(const opt_command *command, int argc, char **argv, void *settings, int *n_positional);

/* Where the value in force of option `name` came from: "--name", "IMPRESS_NAME", or "FILE:LINE: name". Static storage. */
const char *opt_said(const char *name);

/* One line, "impress COMMAND: ...", to stderr; returns 2. An option that it names as a flag, --name, is named by where
 * its value came from, where that is no flag. */
int opt_misuse(const opt_command *command, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
