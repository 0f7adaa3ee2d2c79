#include "bench_http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "bench_ttft.h"
#include "model.h"

enum { START_TRIES = 1200, STOP_TRIES = 100, TRY_MS = 100 };

static void pause_ms(long ms)
{
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    nanosleep(&t, NULL);
}

static struct sockaddr_in local(unsigned port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return a;
}

unsigned http_free_port(void)
{
    struct sockaddr_in a = local(0);
    socklen_t n = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return 0;
    unsigned port = 0;
    if (bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && getsockname(fd, (struct sockaddr *)&a, &n) == 0)
        port = ntohs(a.sin_port);
    close(fd);
    return port;
}

/* ---- requests */

static bool send_all(int fd, const char *text, size_t n)
{
    for (size_t at = 0; at < n;) {
        ssize_t got = send(fd, text + at, n - at, MSG_NOSIGNAL);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        at += (size_t)got;
    }
    return true;
}

/* All until the other side closes; the caller frees it. */
static char *receive_all(int fd)
{
    size_t n = 0, cap = 1 << 14;
    char *text = malloc(cap);
    while (text) {
        ssize_t got = recv(fd, text + n, cap - n - 1, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            free(text);
            return NULL;
        }
        if (got == 0) break;
        n += (size_t)got;
        if (n + 1 < cap) continue;
        char *more = realloc(text, cap *= 2);
        if (!more) free(text);
        text = more;
    }
    if (text) text[n] = '\0';
    return text;
}

/* HTTP/1.0: the answer comes in one piece, and ends with the connection. */
static char *exchange(unsigned port, const char *path, const char *body)
{
    struct sockaddr_in a = local(port);
    char head[600];
    int on = 1;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return NULL;
    char *answer = NULL;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0) {
        size_t n = body ? strlen(body) : 0;
        int used = snprintf(head, sizeof head,
                            "%s %s HTTP/1.0\r\nHost: 127.0.0.1:%u\r\nContent-Type: application/json\r\n"
                            "Content-Length: %zu\r\nConnection: close\r\n\r\n",
                            body ? "POST" : "GET", path, port, n);
        if (used > 0 && (size_t)used < sizeof head && send_all(fd, head, (size_t)used) && (!n || send_all(fd, body, n)))
            answer = receive_all(fd);
    }
    close(fd);
    return answer;
}

json_t *http_ask(const http_child *child, const char *path, const char *body, bool must)
{
    char *answer = exchange(child->port, path, body);
    const char *space = answer ? strchr(answer, ' ') : NULL;
    const char *text = answer ? strstr(answer, "\r\n\r\n") : NULL;
    long status = space ? strtol(space, NULL, 10) : 0;
    json_error_t at;
    json_t *o = text ? json_loads(text + 4, 0, &at) : NULL;
    if (must && !answer && !ttft_stopped()) app_fail("%s doesn't answer any more; see %s", child->name, child->log);
    else if (must && answer && (status != 200 || !o))
        app_fail("%s answers %s with status %ld: %.200s", child->name, path, status, text ? text + 4 : "");
    free(answer);
    if (status == 200) return o;
    json_decref(o);
    return NULL;
}

/* ---- the process */

/* Between fork() and exec only what is safe in a signal handler. */
static void become(char *const *argv, int log, int null, pid_t parent)
{
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    signal(SIGPIPE, SIG_DFL);
    signal(SIGXFSZ, SIG_DFL);
    /* Ctrl-C is for the benchmark, which ends this one when it is done with it. */
    (void)setpgid(0, 0);
    if (dup2(null, STDIN_FILENO) < 0 || dup2(log, STDOUT_FILENO) < 0 || dup2(log, STDERR_FILENO) < 0) _exit(127);
    execv(argv[0], argv);
    _exit(127);
}

int http_start(http_child *c, const char *name, char *const *argv, unsigned port, const char *log)
{
    *c = (http_child){.port = port, .name = name};
    snprintf(c->log, sizeof c->log, "%s", log);
    if (port == 0) return app_fail("no port is free for %s", name);
    int out = open(log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600), null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    pid_t parent = getpid();
    if (out >= 0 && null >= 0) c->pid = fork();
    if (c->pid == 0 && out >= 0 && null >= 0) become(argv, out, null, parent);
    int why = errno;
    if (out >= 0) close(out);
    if (null >= 0) close(null);
    if (c->pid <= 0) {
        c->pid = 0;
        return app_fail("can't start %s: %s", name, strerror(why));
    }
    for (int i = 0; i < START_TRIES && !ttft_stopped(); i++) {
        json_t *health = http_ask(c, "/health", NULL, false);
        json_decref(health);
        if (health) return 0;
        if (waitpid(c->pid, NULL, WNOHANG) == c->pid) {
            c->pid = 0;
            return app_fail("%s ended at once; see %s", name, log);
        }
        pause_ms(TRY_MS);
    }
    http_stop(c);
    return ttft_stopped() ? 0 : app_fail("%s doesn't answer; see %s", name, log);
}

void http_stop(http_child *c)
{
    if (!c->pid) return;
    kill(c->pid, SIGTERM);
    for (int i = 0; i < STOP_TRIES; i++) {
        if (waitpid(c->pid, NULL, WNOHANG) == c->pid) {
            c->pid = 0;
            return;
        }
        pause_ms(TRY_MS);
    }
    kill(c->pid, SIGKILL);
    while (waitpid(c->pid, NULL, 0) < 0 && errno == EINTR) {}
    c->pid = 0;
}
