#include "options.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "text.h"

/* ---- where values came from */

enum { N_SAID = 128, ENV = -1 };

/* Of options whose value in force isn't a flag's: the file's line, or ENV. */
static struct {
    const char *name;
    long line;
} said[N_SAID];
static size_t n_said;
static char file_said[256];

static void say(const char *name, long line)
{
    size_t i = 0;
    while (i < n_said && strcmp(said[i].name, name)) i++;
    if (i == N_SAID) return; /* it will be called by its flag */
    if (i == n_said) said[n_said++].name = name;
    said[i].line = line;
}

static void env_name(const char *name, char *out, size_t room)
{
    size_t n = (size_t)snprintf(out, room, "IMPRESS_%s", name);
    for (size_t i = 8; i < n && i + 1 < room; i++) out[i] = out[i] == '-' ? '_' : (char)toupper((unsigned char)out[i]);
}

static const char *said_of(const char *name, size_t n)
{
    static char text[sizeof file_said + 80];
    for (size_t i = 0; i < n_said; i++) {
        if (strlen(said[i].name) != n || memcmp(said[i].name, name, n)) continue;
        if (said[i].line == ENV) env_name(said[i].name, text, sizeof text);
        else if (said[i].line > 0) snprintf(text, sizeof text, "%s:%ld: %s", file_said, said[i].line, said[i].name);
        else break;
        return text;
    }
    snprintf(text, sizeof text, "--%.*s", (int)n, name);
    return text;
}

const char *opt_said(const char *name) { return said_of(name, strlen(name)); }

/* The line, in which what stands in backquotes is somebody's value. */
static void print_line(const char *line)
{
    bool quoted = false;
    for (const char *c = line; *c;) {
        if (*c == '`') quoted = !quoted;
        size_t n = !quoted && !strncmp(c, "--", 2) && (c == line || c[-1] == ' ')
                       ? strspn(c + 2, "abcdefghijklmnopqrstuvwxyz-") : 0;
        if (n) fputs(said_of(c + 2, n), stderr);
        else fputc(*c, stderr);
        c += n ? n + 2 : 1;
    }
}

int opt_misuse(const opt_command *command, const char *fmt, ...)
{
    char line[2048];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    fprintf(stderr, "impress %s: ", command->name);
    print_line(line);
    fprintf(stderr, " (see `impress %s --help`)\n", command->name);
    return 2;
}

static void opt_help(const opt_command *command)
{
    printf("usage: impress %s\n\n%s\n", command->usage, command->summary);
    if (command->details) printf("\n%s\n", command->details);
    if (command->n_opts == 0 || command->opts[0].kind != OPT_HEADING) printf("\noptions:\n");
    for (size_t i = 0; i < command->n_opts; i++) {
        const opt *o = &command->opts[i];
        if (o->kind == OPT_HEADING) {
            printf("\n%s:\n", o->name);
            continue;
        }
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
        if (o->kind == OPT_HEADING) continue;
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
    if (o->arg && !strcmp(o->arg, "TEXT") && text_utf8(value, strlen(value)) < strlen(value))
        return opt_misuse(command, "%s isn't UTF-8", where);
    switch (o->kind) {
    case OPT_HEADING: return 0; /* never found */
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

static int opt_from_env(const opt_command *command, void *settings)
{
    for (size_t i = 0; i < command->n_opts; i++) {
        const opt *o = &command->opts[i];
        char name[64];
        if (o->per_call) continue;
        env_name(o->name, name, sizeof name);
        const char *value = getenv(name);
        if (!value) continue;
        int rc = opt_set(command, o, value, settings, name);
        if (rc) return rc;
        say(o->name, ENV);
    }
    return 0;
}

/* ---- names that nobody knows */

/* What else IMPRESS_... may stand before: keys, and what is the library's, the build's and the tests'. */
static const char *const other_names[] = {"API_KEY", "ADMIN_KEY", "ANY_FS", "IO_FAULT", "TIMEOUT_FACTOR",
                                          "KILL_ROUNDS_MODEL"};
static const char *const other_beginnings[] = {"LLAMA_", "TEST_", "OPENAI_"};

/* Changes of one letter that lead from a to b; LONG: too long to tell. */
static size_t distance(const char *a, const char *b)
{
    enum { LONG = 40 };
    size_t row[LONG + 1], n = strlen(b);
    if (strlen(a) > LONG || n > LONG) return LONG;
    for (size_t k = 0; k <= n; k++) row[k] = k;
    for (size_t i = 1; a[i - 1]; i++) {
        size_t corner = row[0];
        row[0] = i;
        for (size_t k = 1; k <= n; k++) {
            size_t least = corner + (a[i - 1] != b[k - 1]);
            if (row[k] + 1 < least) least = row[k] + 1;
            if (row[k - 1] + 1 < least) least = row[k - 1] + 1;
            corner = row[k];
            row[k] = least;
        }
    }
    return row[n];
}

/* Is `name` (without IMPRESS_) one that has a meaning? Else *like becomes the one it may stand for. */
static bool is_known(const char *name, char like[64])
{
    size_t best = 3;
    *like = '\0';
    for (size_t i = 0; i < sizeof other_beginnings / sizeof *other_beginnings; i++)
        if (!strncmp(name, other_beginnings[i], strlen(other_beginnings[i]))) return true;
    for (size_t i = 0; i < sizeof other_names / sizeof *other_names; i++) {
        size_t d = distance(name, other_names[i]);
        if (d == 0) return true;
        if (d < best) snprintf(like, 64, "IMPRESS_%s", other_names[i]);
        if (d < best) best = d;
    }
    for (size_t i = 0; i < n_known; i++) {
        for (size_t k = 0; k < known[i]->n_opts; k++) {
            const opt *o = &known[i]->opts[k];
            char full[64];
            if (o->per_call) continue;
            env_name(o->name, full, sizeof full);
            size_t d = distance(name, full + 8);
            if (d == 0) return true;
            if (d < best) snprintf(like, 64, "%s", full);
            if (d < best) best = d;
        }
    }
    return false;
}

/* A variable that was misspelt would be silently ignored: one line for all that have no meaning. */
static void note_unknown_env(void)
{
    bool any = false;
    for (char **e = environ; n_known && e && *e; e++) {
        char name[64], like[64];
        size_t n = strcspn(*e, "=");
        if (strncmp(*e, "IMPRESS_", 8) || n < 9) continue;
        snprintf(name, sizeof name, "%.*s", (int)n - 8, *e + 8);
        for (char *c = name; *c; c++) /* it may hold anything but = */
            if (!isprint((unsigned char)*c)) *c = '?';
        if (is_known(name, like)) continue;
        fprintf(stderr, "%sIMPRESS_%s", any ? ", " : "impress: note: ignored, no settings: ", name);
        if (*like) fprintf(stderr, " (%s?)", like);
        any = true;
    }
    if (any) fputc('\n', stderr);
}

/* Settings point to their values, which so live as long as the program. */
static const char *keep_value(const char *value)
{
    static struct kept {
        struct kept *before;
        char value[];
    } *latest;
    size_t n = strlen(value) + 1;
    struct kept *k = malloc(sizeof *k + n);
    if (!k) return NULL;
    k->before = latest;
    latest = k;
    return memcpy(k->value, value, n);
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
    snprintf(file_said, sizeof file_said, "%s", path);
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
        const char *kept = keep_value(value);
        rc = kept ? opt_set(command, o, kept, settings, where) : opt_misuse(command, "out of memory");
        if (rc == 0) say(o->name, (long)n);
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
    n_said = 0;
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) {
            opt_help(command);
            return 1;
        }
    }
    int rc = opt_config_file(command, argc, argv, settings);
    if (rc == 0) rc = opt_from_env(command, settings);
    if (rc == 0) note_unknown_env();
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
        if (rc == 0) say(o->name, 0);
    }
    return rc;
}
