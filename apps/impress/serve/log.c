#include "log.h"

#include <fcntl.h>
#include <llama.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "impress/impress.h"

/* Standard error by a descriptor of the log's own, so that lines come out while chat_mute() keeps others' from it; NULL: stderr. */
static FILE *own;

void log_event(const char *level, const char *event, json_t *fields)
{
    struct timespec now;
    struct tm utc;
    char day[32], stamp[48];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(day, sizeof day, "%Y-%m-%dT%H:%M:%S", &utc);
    snprintf(stamp, sizeof stamp, "%s.%03ldZ", day, now.tv_nsec / 1000000);

    json_t *line = json_pack("{s:s, s:s, s:s}", "time", stamp, "level", level, "event", event);
    if (line && fields) json_object_update_missing(line, fields);
    json_decref(fields);
    char *text = line ? json_dumps(line, JSON_COMPACT | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(7)) : NULL;
    json_decref(line);
    if (!text) return; /* no memory for a line of the log */
    FILE *to = own ? own : stderr;
    flockfile(to);
    fputs(text, to);
    putc('\n', to);
    fflush(to);
    funlockfile(to);
    free(text);
}

/* A line that may hold anything, as the value of "message". */
static void log_text(const char *level, const char *event, const char *text)
{
    size_t n = strcspn(text, "\n");
    char clean[1024];
    if (n >= sizeof clean) n = sizeof clean - 1;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text[i];
        clean[i] = (char)(c < ' ' || c >= 0x7f ? '?' : c);
    }
    clean[n] = '\0';
    if (n > 0) log_event(level, event, json_pack("{s:s}", "message", clean));
}

static void on_library_log(imp_log_level level, const char *line, void *user)
{
    static const char *const names[] = {"error", "warn", "info", "debug"};
    (void)user;
    log_text(names[level], "library", line);
}

static enum ggml_log_level least = GGML_LOG_LEVEL_WARN;

/* Warnings about what is meant so. */
static bool is_wanted(const char *line)
{
    return strstr(line, "n_ctx_seq") && strstr(line, "n_ctx_train"); /* the cells of all slots together are more */
}

static void on_llama_log(enum ggml_log_level level, const char *line, void *user)
{
    (void)user;
    if (level == GGML_LOG_LEVEL_CONT || level < least || is_wanted(line)) return;
    log_text(level == GGML_LOG_LEVEL_ERROR ? "error" : level == GGML_LOG_LEVEL_WARN ? "warn" : "info", "llama", line);
}

void log_take_over(int verbose)
{
    int fd = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
    own = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (!own && fd >= 0) close(fd);
    imp_log_set(on_library_log, NULL, verbose ? IMP_LOG_INFO : IMP_LOG_WARN);
    least = verbose ? GGML_LOG_LEVEL_INFO : GGML_LOG_LEVEL_WARN;
    llama_log_set(on_llama_log, NULL);
}
