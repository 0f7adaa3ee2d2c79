/* fuzz_options.c: a configuration file, a command line and a number, parted by bytes 0x1e. */
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz/fuzz.h"
#include "fuzz/util.h"
#include "options.h"
#include "text.h"

enum { PARTS = 3, WORDS = 40 };

typedef struct settings {
    bool flag;
    const char *yes, *text;
    opt_texts texts;
    uint64_t count, size;
    double real;
} settings;

static const opt opts[] = {
    {"flag", 'f', OPT_FLAG, offsetof(settings, flag), NULL, "a flag", false},
    {"yes", 0, OPT_YES, offsetof(settings, yes), NULL, "yes or no", false},
    {"text", 't', OPT_TEXT, offsetof(settings, text), "TEXT", "a text", false},
    {"texts", 0, OPT_TEXTS, offsetof(settings, texts), "TEXT", "several\ntexts", false},
    {"count", 'n', OPT_COUNT, offsetof(settings, count), "N", "a number", false},
    {"size", 's', OPT_SIZE, offsetof(settings, size), "BYTES", "a size", false},
    {"real", 0, OPT_REAL, offsetof(settings, real), "X", "a fraction", false},
    {"once", 0, OPT_TEXT, offsetof(settings, text), "TEXT", "only by a flag", true},
};
static const opt others[] = {{"elsewhere", 0, OPT_FLAG, 0, NULL, "of another command", false}};
static const opt_command command = {"fuzz", "fuzz [OPTION...]", "A command.", NULL, opts, sizeof opts / sizeof *opts};
static const opt_command other = {"other", "other", "Another.", NULL, others, 1};
static const opt_command *const commands[] = {&command, &other};

static bool ends_with(const char *text, const char *all, size_t n_all)
{
    return text >= all && text < all + n_all;
}

/* What was parsed is what its kind says, and texts are whole: of the command line, or of the file. */
static void parse_options(const char *file, size_t n_file, char *words, size_t n_words)
{
    char config[64], *argv[WORDS + 2];
    snprintf(config, sizeof config, "--config=%s", fuzz_file(file, n_file));
    argv[0] = (char[]){"fuzz"};
    argv[1] = config;
    int argc = 2, n_positional = -1;
    for (char *w = strtok(words, "\n"); w && argc < WORDS; w = strtok(NULL, "\n")) argv[argc++] = w;
    argv[argc] = NULL;
    settings s = {.count = UINT64_MAX, .size = UINT64_MAX, .real = -1};
    int rc = opt_parse(&command, argc, argv, &s, &n_positional);
    MUST(rc >= 0 && rc <= 2);
    if (rc == 0) {
        MUST(n_positional >= 0 && n_positional < argc);
        MUST(s.count == UINT64_MAX || s.count <= 1u << 30);
        MUST(s.size == UINT64_MAX || (double)s.size <= 9.2e18);
        MUST(isfinite(s.real));
        MUST(!s.yes || !strcmp(s.yes, "yes") || !strcmp(s.yes, "no"));
        MUST(!s.text || strlen(s.text) <= n_file + n_words);
        MUST(s.texts.n <= sizeof s.texts.items / sizeof *s.texts.items);
        for (size_t i = 0; i < s.texts.n; i++) MUST(strlen(s.texts.items[i]) <= n_file + n_words);
        for (int i = 1; i <= n_positional; i++) MUST(ends_with(argv[i], words, n_words + 1));
    }
    fuzz_forget();
}

/* Numbers, against the plainest way to read them. */
static void parse_numbers(const char *text)
{
    uint64_t size = 0, count = 0;
    double real = 0;
    bool is_size = text_parse_size(text, &size), is_count = text_parse_count(text, UINT64_MAX, &count);
    bool digits = *text != '\0';
    uint64_t plain = 0;
    for (const char *c = text; *c && digits; c++) {
        digits = isdigit((unsigned char)*c) && plain < UINT64_MAX / 10 - 1;
        plain = plain * 10 + (uint64_t)(*c - '0');
    }
    if (digits) {
        MUST(is_count && count == plain);
        MUST(plain > UINT64_C(1) << 53 || (is_size && size == plain));
    }
    if (is_count)
        for (const char *c = text; *c; c++) MUST(isdigit((unsigned char)*c));
    MUST(!text_parse_count(text, 5, &count) || count <= 5);
    MUST(!text_parse_real(text, &real) || isfinite(real));
    if (is_size) {
        char buf[32];
        MUST(strlen(text_bytes(size, buf)) < sizeof buf);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    static FILE *nowhere;
    if (!nowhere) {
        nowhere = fopen("/dev/null", "w");
        MUST(nowhere);
        unsetenv("XDG_CONFIG_HOME");
        opt_know(commands, 2);
    }
    char *parts[PARTS];
    size_t sizes[PARTS];
    for (size_t i = 0; i < PARTS; i++) {
        const uint8_t *end = i + 1 < PARTS ? memchr(bytes, 0x1e, n_bytes) : NULL;
        sizes[i] = end ? (size_t)(end - bytes) : n_bytes;
        parts[i] = malloc(sizes[i] + 1);
        MUST(parts[i]);
        memcpy(parts[i], bytes, sizes[i]);
        parts[i][sizes[i]] = '\0';
        bytes += sizes[i] + (end != NULL);
        n_bytes -= sizes[i] + (end != NULL);
    }
    FILE *real_out = stdout, *real_err = stderr; /* mistakes get a line each, --help many */
    stdout = stderr = nowhere;
    parse_options(parts[0], sizes[0], parts[1], sizes[1]);
    stdout = real_out;
    stderr = real_err;
    parse_numbers(parts[2]);
    for (size_t i = 0; i < PARTS; i++) free(parts[i]);
    return 0;
}

size_t imp_fuzz_seed(size_t i, uint8_t *out, size_t room)
{
    static const char *const texts[] = {
        "# settings\nflag = yes\ntext = a b\n\n count = 12 \nsize=1.5GiB\nreal = .25\x1e-f\n--text\nx\n--texts=a\n"
        "--texts=b\n-n7\npositional\n--\n--flag\x1e" "25M",
        "\xef\xbb\xbf" "elsewhere = no\nyes = off\nonce = never\x1e--yes\n--once=now\n-s\n4096\x1e" "1.5GiB",
        "text =\n=\nflag = maybe\x1e--count=99999999999999999999\x1e" "18446744073709551615",
        "\x1e--help\x1e-0x1p-3",
        "size = 9e18\x1e--config\n/dev/null\n-x\x1e" "1e300",
        "real = nan\x1e--real=1e999\n-t\x1e" "7T",
    };
    return fuzz_text_seed(texts, sizeof texts / sizeof *texts, i, out, room);
}
