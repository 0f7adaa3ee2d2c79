#include "base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

static const imp_log_level default_level = IMP_LOG_WARN;

/* Read without the lock, so that a line nobody wants costs a load. Relaxed: nothing else hangs on it. */
static atomic_int max_wanted = IMP_LOG_WARN;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the next two, which belong together */
static imp_log_fn log_fn;
static void *log_user;

void imp_log_set(imp_log_fn fn, void *user, imp_log_level max_level)
{
    pthread_mutex_lock(&lock);
    log_fn = fn;
    log_user = user;
    atomic_store_explicit(&max_wanted, (int)(fn ? max_level : default_level), memory_order_relaxed);
    pthread_mutex_unlock(&lock);
}

void imp_log(imp_log_level level, const char *fmt, ...)
{
    if ((int)level > atomic_load_explicit(&max_wanted, memory_order_relaxed)) return;

    char line[1024];
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    if (n < 0) return;

    pthread_mutex_lock(&lock);
    imp_log_fn fn = log_fn;
    void *user = log_user;
    pthread_mutex_unlock(&lock);
    if (fn) {
        fn(level, line, user);
    } else {
        fprintf(stderr, "impress: %s%s\n", level == IMP_LOG_ERROR ? "error: " : "", line);
    }
}

void imp_log_line(imp_log_level level, const char *line) { imp_log(level, "%s", line ? line : ""); }
