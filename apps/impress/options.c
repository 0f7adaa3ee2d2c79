#include "options.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "text.h"

int opt_misuse(const opt_command *command, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "impress %s: ", command->name);
    vfprintf(stderr, fmt, ap);
    fprintf(stderr, " (see `impress %s --help`)\n", command->name);
    va_end(ap);
    return 2;
}

static void opt_help(const opt_command *command)
{
    printf("usage: impress %s\n\n%s\n", command->usage, command->summary);
    if (command->details) printf("\n%s\n", command->details);
    printf("\noptions:\n");
    for (size_t i = 0; i < command->n_opts; i++) {
        const opt *o = &command->opts[i];
        char left[64];
        char letter[5] = "    ";
        if (o->letter) snprintf(letter, sizeof letter, "-%c, ", o->letter);
        snprintf(left, sizeof left, "%s--%s%s%s", letter, o->name, o->arg ? " " : "", o->arg ? o->arg : "");
        printf("  %-28s", left);
        /* The help text, wrapped by hand with newlines in the tables, is indented here. */
        for (const char *s = o->help; *s; s++) {
            if (*s == '\n')
                printf("\n%30s", "");
            else
                putchar(*s);
        }
        putchar('\n');
    }
    printf("      --config FILE           read settings from FILE (name = value, a line each)\n"
           "  -h, --help                  this text\n");
}

/* Does it go without a value? */
static bool opt_is_flag(const opt *o) { return o->kind == OPT_FLAG || o->kind == OPT_YES; }

static const opt *opt_find(const opt_command *command, const char *name, size_t n, char letter)
{
    for (size_t i = 0; i < command->n_opts; i++) {
        const opt *o = &command->opts[i];
        if (letter ? o->letter == letter : strlen(o->name) == n && memcmp(o->name, name, n) == 0) return o;
    }
    return NULL;
}

static bool parse_flag(const char *s, bool *out)
{
    static const char *const yes[] = {"1", "yes", "true", "on"}, *const no[] = {"0", "no", "false", "off"};
    for (size_t i = 0; i < 4; i++) {
        if (!strcmp(s, yes[i])) return *out = true, true;
        if (!strcmp(s, no[i])) return *out = false, true;
    }
    return false;
}

/* Put `value` into the settings; on a mistake one line that begins with `where`. */
static int opt_set(const opt_command *command, const opt *o, const char *value, void *settings, const char *where)
{
    void *at = (char *)settings + o->offset;
    switch (o->kind) {
    case OPT_FLAG:
        if (!parse_flag(value, at)) return opt_misuse(command, "%s wants yes or no, not `%s`", where, value);
        return 0;
    case OPT_YES: {
        bool yes;
        if (!parse_flag(value, &yes)) return opt_misuse(command, "%s wants yes or no, not `%s`", where, value);
        *(const char **)at = yes ? "yes" : "no";
        return 0;
    }
    case OPT_TEXT: *(const char **)at = value; return 0;
    case OPT_TEXTS: {
        opt_texts *t = at;
        if (t->n == sizeof t->items / sizeof *t->items)
            return opt_misuse(command, "%s is given more than %zu times", where, t->n);
        t->items[t->n++] = value;
        return 0;
    }
    case OPT_COUNT:
        if (!text_parse_count(value, 1u << 30, at))
            return opt_misuse(command, "%s wants a whole number, not `%s`", where, value);
        return 0;
    case OPT_SIZE:
        if (!text_parse_size(value, at))
            return opt_misuse(command, "%s wants a size such as 25M or 1G, not `%s`", where, value);
        return 0;
    case OPT_REAL:
        if (!text_parse_real(value, at)) return opt_misuse(command, "%s wants a number, not `%s`", where, value);
        return 0;
    }
    return 0;
}

static int opt_from_env(const opt_command *command, void *settings)
{
    for (size_t i = 0; i < command->n_opts; i++) {
        const opt *o = &command->opts[i];
        if (o->per_call) continue;
        char name[64] = "IMPRESS_";
        for (size_t k = 0; o->name[k] && k < 50; k++)
            name[8 + k] = o->name[k] == '-' ? '_' : (char)toupper((unsigned char)o->name[k]);
        const char *value = getenv(name);
        if (!value) continue;
        int rc = opt_set(command, o, value, settings, name);
        if (rc) return rc;
    }
    return 0;
}

static char *strip(char *s)
{
    while (isspace((unsigned char)*s)) s++;
    size_t n = strlen(s);
    while (n > 0 && isspace((unsigned char)s[n - 1])) s[--n] = '\0';
    return s;
}

static const opt_command *const *known;
static size_t n_known;

void opt_know(const opt_command *const *commands, size_t n_commands)
{
    known = commands;
    n_known = n_commands;
}

/* May a file set `name` for some other command? */
static bool opt_of_another(const char *name)
{
    for (size_t i = 0; i < n_known; i++) {
        const opt *o = opt_find(known[i], name, strlen(name), 0);
        if (o && !o->per_call) return true;
    }
    return false;
}

/* Lines `name = value`; `#` begins a comment. The file is shared by all commands. */
static int opt_from_file(const opt_command *command, const char *path, bool must_exist, void *settings)
{
    FILE *f = fopen(path, "r");
    if (!f) {
        if (!must_exist && (errno == ENOENT || errno == ENOTDIR)) return 0;
        return opt_misuse(command, "can't read the configuration file %s: %s", path, strerror(errno));
    }
    struct stat st;
    if (fstat(fileno(f), &st) != 0 || !S_ISREG(st.st_mode)) {
        fclose(f);
        return opt_misuse(command, "the configuration %s is not a file", path);
    }
    char *line = NULL;
    size_t cap = 0;
    int rc = 0;
    ssize_t length;
    for (unsigned n = 1; rc == 0 && (length = getline(&line, &cap, f)) >= 0; n++) {
        if (strlen(line) != (size_t)length) {
            rc = opt_misuse(command, "%s:%u: a NUL byte", path, n);
            break;
        }
        static const char bom[] = "\xef\xbb\xbf";
        char *s = strip(n == 1 && !strncmp(line, bom, 3) ? line + 3 : line);
        if (*s == '\0' || *s == '#') continue;
        char *eq = strchr(s, '=');
        if (!eq) {
            rc = opt_misuse(command, "%s:%u: expected `name = value`", path, n);
            break;
        }
        *eq = '\0';
        const char *name = strip(s), *value = strip(eq + 1);
        const opt *o = opt_find(command, name, strlen(name), 0);
        if (!o && opt_of_another(name)) continue;
        if (!o || o->per_call) {
            rc = opt_misuse(command, "%s:%u: %s `%s`", path, n, o ? "only a flag can give" : "no such setting:", name);
            break;
        }
        char where[300];
        snprintf(where, sizeof where, "%s:%u: %s", path, n, name);
        char *kept = strdup(value); /* lives as long as the settings, that is, the program */
        rc = kept ? opt_set(command, o, kept, settings, where) : opt_misuse(command, "out of memory");
    }
    free(line);
    fclose(f);
    return rc;
}

/* Is `arg` an option whose value is the next argument? */
static bool opt_takes_next(const opt_command *command, const char *arg)
{
    if (arg[0] != '-' || arg[1] == '\0' || strchr(arg, '=')) return false;
    const opt *o = arg[1] == '-' ? opt_find(command, arg + 2, strlen(arg + 2), 0) : opt_find(command, NULL, 0, arg[1]);
    return o && !opt_is_flag(o) && (arg[1] == '-' || arg[2] == '\0');
}

static int opt_config_file(const opt_command *command, int argc, char **argv, void *settings)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (!strncmp(argv[i], "--config=", 9)) return opt_from_file(command, argv[i] + 9, true, settings);
        if (!strcmp(argv[i], "--config")) {
            if (i + 1 == argc) return opt_misuse(command, "--config wants a FILE");
            return opt_from_file(command, argv[i + 1], true, settings);
        }
        if (opt_takes_next(command, argv[i])) i++; /* a value may look like an option */
    }
    char path[4096];
    const char *base = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
    if (base && *base)
        snprintf(path, sizeof path, "%s/impress/config", base);
    else if (home && *home)
        snprintf(path, sizeof path, "%s/.config/impress/config", home);
    else
        return 0;
    return opt_from_file(command, path, false, settings);
}

int opt_parse(const opt_command *command, int argc, char **argv, void *settings, int *n_positional)
{
    *n_positional = 0;
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) {
            opt_help(command);
            return 1;
        }
    }
    int rc = opt_config_file(command, argc, argv, settings);
    if (rc == 0) rc = opt_from_env(command, settings);
    bool only_positional = false;
    for (int i = 1; rc == 0 && i < argc; i++) {
        char *a = argv[i];
        if (only_positional || a[0] != '-' || a[1] == '\0') {
            argv[++*n_positional] = a;
            continue;
        }
        if (!strcmp(a, "--")) {
            only_positional = true;
            continue;
        }
        const char *value = NULL;
        const opt *o;
        char where[80];
        if (a[1] == '-') {
            const char *eq = strchr(a, '=');
            size_t n = eq ? (size_t)(eq - a - 2) : strlen(a + 2);
            if (n == 6 && !memcmp(a + 2, "config", 6)) {
                if (!eq) i++;
                continue;
            }
            o = opt_find(command, a + 2, n, 0);
            if (!o) return opt_misuse(command, "unknown option %.*s", (int)(n + 2), a);
            if (eq) value = eq + 1;
            snprintf(where, sizeof where, "--%s", o->name);
        } else {
            o = opt_find(command, NULL, 0, a[1]);
            if (!o) return opt_misuse(command, "unknown option -%c", a[1]);
            if (a[2] != '\0') value = a + 2;
            snprintf(where, sizeof where, "-%c", a[1]);
        }
        if (!value) {
            if (opt_is_flag(o))
                value = "yes";
            else if (i + 1 < argc)
                value = argv[++i];
            else
                return opt_misuse(command, "%s wants a value: %s", where, o->arg);
        }
        rc = opt_set(command, o, value, settings, where);
    }
    return rc;
}
