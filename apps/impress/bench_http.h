/* bench_http.h: another program that serves HTTP on this machine, for as long as a benchmark needs it. */
#ifndef APP_BENCH_HTTP_H
#define APP_BENCH_HTTP_H

#include <stdbool.h>
#include <sys/types.h>

#include <jansson.h>

typedef struct http_child {
    pid_t pid;       /* 0: none */
    unsigned port;
    const char *name; /* for people */
    char log[4200];   /* what it says goes there */
} http_child;

/* A port of 127.0.0.1 that is free now. 0: there is none. */
unsigned http_free_port(void);

/* Start argv[0], which will listen on `port`, and wait until it answers GET /health. It ends with this process. `log`:
 * a file for its output. Returns an exit code after one line. */
int http_start(http_child *child, const char *name, char *const *argv, unsigned port, const char *log);

/* End it, if it runs. */
void http_stop(http_child *child);

/* POST `body` (NULL: GET) and read the answer as JSON; NULL after one line, if `must`. */
json_t *http_ask(const http_child *child, const char *path, const char *body, bool must);

#endif
