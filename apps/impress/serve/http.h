/* http.h: requests in, replies out, over libmicrohttpd with a thread for each connection. It knows of routes, keys,
 * limits and time, not of what is asked.
 *
 * A connection that doesn't bring its whole request in time is closed, also one that sends a byte now and then.
 * Bodies are taken up to a bound. While a handler works, or a stream waits, http_gone() tells when nobody listens
 * any more: also where the client has only closed its sending half. */
#ifndef SERVE_HTTP_H
#define SERVE_HTTP_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "keys.h"
#include "oai_reply.h"

typedef struct http http;

/* A request as its handler sees it. Everything lives until the reply is sent. */
typedef struct http_request {
    const char *method, *path;
    const char *body; /* [n_body], a NUL behind it */
    size_t n_body;
    const key_tenant *tenant; /* of the client's key; NULL: there are no keys, or it is the admin's */
    char id[72];      /* the client's x-request-id, or one of ours */
    uint64_t start_ns;
    json_t *log;      /* an object: what the handler adds goes into the request's line of the log */
    void *inside;     /* http.c's */
} http_request;

typedef struct http_reply {
    int status;
    const char *type;     /* NULL: application/json */
    oai_buffer body;      /* taken over */
    unsigned retry_after; /* seconds; 0: no such header */
    char *policy;         /* Content-Security-Policy; NULL: no such header. Allocated, taken over */
    const char *allow;    /* with 405 */
    const char *location; /* with 302: a path */
    /* A stream instead of a body: `read` puts up to `room` bytes into `buf`, waiting for the first; 0: its end, -1:
     * it broke. `close` is called in any case, at last. */
    ssize_t (*read)(void *stream, http_request *r, char *buf, size_t room);
    void (*close)(void *stream, http_request *r);
    void *stream;
} http_reply;

/* Who may ask: clients, with a key where there are any; everybody; the admin, always with a key of its own; clients
 * and admin. */
typedef enum http_access { HTTP_CLIENT, HTTP_OPEN, HTTP_ADMIN, HTTP_CLIENT_OR_ADMIN } http_access;

typedef struct http_route {
    const char *method, *path; /* a path that ends in a slash stands for all below it, the method "*" for any */
    http_access access;
    void (*handle)(void *user, http_request *r, http_reply *out);
} http_route;

typedef struct http_opts {
    const char *host; /* an address, or localhost */
    uint16_t port;    /* 0: any */
    const char *tls_cert, *tls_key; /* files, PEM; both or neither */
    size_t max_body;
    unsigned max_connections;
    unsigned timeout_s; /* without a byte from or to a client; for a whole request three times as long */
    const http_route *routes; /* [n_routes]; the caller's */
    size_t n_routes;
    const key_ring *keys; /* NULL or empty: everybody may ask */
    const key_ring *admin_keys; /* NULL or empty: nobody may ask what is for the admin. guesses.h: wrong ones */
    void *user;
} http_opts;

/* Whether a name, or an address, is this machine's for itself. */
bool http_is_loopback(const char *name);
/* Returns 0, or 1 after one line on standard error. */
int http_open(const http_opts *opts, http **out);
uint16_t http_port(const http *h);
/* Accept no more connections. */
void http_quiesce(http *h);
/* Wait for what is being sent, up to `wait_ms`, and close. NULL is allowed. */
void http_close(http *h, int wait_ms);

/* Nobody waits for the reply any more. */
bool http_gone(const http_request *r);
/* What stands behind the path as ?name=...; NULL: nothing. Lives as long as the request. */
const char *http_argument(const http_request *r, const char *name);
/* Fill a reply with an error. */
void http_error(http_reply *out, const oai_error *e);

#endif
