#include "http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "guesses.h"
#include "job.h"
#include "log.h"
#include "metrics.h"
#include "model.h"

enum {
    HEADER_BYTES = 64 << 10,
    STACK_BYTES = 8 << 20, /* templates and grammars recurse; only touched pages count */
    STREAM_BLOCK = 16 << 10,
    WHOLE_FACTOR = 3,      /* a whole request may take so many timeouts */
    HOPELESS_FACTOR = 8    /* bodies longer than so many times the bound aren't received */
};

/* A connection, from accept to close: for the thread that looks after those that don't get on. */
typedef struct client {
    struct client *next, **at;
    http *http;
    int fd;
    bool reading;      /* a request is being received, or awaited */
    uint64_t since_ns; /* so long */
} client;

/* What is known of one request. */
typedef struct exchange {
    http_request r;
    http *http;
    struct MHD_Connection *connection;
    client *client;
    const http_route *route;
    char *body;
    size_t room;
    bool refused; /* the reply is there already: the body is received and forgotten */
    bool too_long, replied;
    bool counted; /* among those that the end waits for */
    int status;
    http_reply reply; /* of a stream: kept until its end */
} exchange;

struct http {
    http_opts o;
    struct MHD_Daemon *daemon;
    char *cert, *key;
    uint16_t port;
    pthread_t keeper;
    bool has_keeper;
    guesses guesses; /* at the admin's key */

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t wake;
    client *clients;
    size_t n_clients, n_exchanges;
    bool leaving, end;
};

/* ---------------------------------------------------------------------------------------------------- clients ---- */

static void on_connection(void *user, struct MHD_Connection *connection, void **context,
                          enum MHD_ConnectionNotificationCode code)
{
    http *h = user;
    client *c = *context;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
        *context = c = calloc(1, sizeof *c);
        if (!c) return; /* refused with its first request */
        c->http = h;
        c->fd = info ? info->connect_fd : -1;
        c->reading = true;
        c->since_ns = app_now_ns();
        int one = 1;
        setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one); /* tokens are small */
        pthread_mutex_lock(&h->lock);
        c->next = h->clients;
        c->at = &h->clients;
        if (c->next) c->next->at = &c->next;
        h->clients = c;
        metric_set(METRIC_CONNECTIONS, ++h->n_clients);
        pthread_mutex_unlock(&h->lock);
        return;
    }
    if (!c) return;
    pthread_mutex_lock(&h->lock);
    *c->at = c->next;
    if (c->next) c->next->at = c->at;
    metric_set(METRIC_CONNECTIONS, --h->n_clients);
    pthread_mutex_unlock(&h->lock);
    free(c);
    *context = NULL;
}

static void set_reading(client *c, bool reading)
{
    pthread_mutex_lock(&c->http->lock);
    c->reading = reading;
    c->since_ns = app_now_ns();
    pthread_mutex_unlock(&c->http->lock);
}

/* Every second: who takes too long to ask? Closing the socket's halves makes libmicrohttpd end the connection. */
static void *keep(void *user)
{
    http *h = user;
    uint64_t limit = (uint64_t)h->o.timeout_s * WHOLE_FACTOR * 1000000000u;
    pthread_mutex_lock(&h->lock);
    while (!h->end) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_sec++;
        pthread_cond_timedwait(&h->wake, &h->lock, &until);
        uint64_t now = app_now_ns();
        for (client *c = h->clients; c; c = c->next)
            if (c->reading && now - c->since_ns > limit) shutdown(c->fd, SHUT_RDWR);
    }
    pthread_mutex_unlock(&h->lock);
    return NULL;
}

const char *http_argument(const http_request *r, const char *name)
{
    const exchange *x = r->inside;
    return MHD_lookup_connection_value(x->connection, MHD_GET_ARGUMENT_KIND, name);
}

bool http_gone(const http_request *r)
{
    const exchange *x = r->inside;
    struct pollfd p = {.fd = x->client->fd, .events = POLLRDHUP};
    return poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL));
}

/* ---------------------------------------------------------------------------------------------------- replies ---- */

void http_error(http_reply *out, const oai_error *e)
{
    out->status = e->status;
    oai_buffer_clear(&out->body);
    oai_write_error(&out->body, e);
}

static void reply_error(http_reply *out, int status, const char *code, const char *message)
{
    oai_error e = {0};
    oai_fail(&e, status, code, NULL, "%s", message);
    http_error(out, &e);
}

/* libmicrohttpd counts its timeout from the last byte; while a handler works there is none. */
static void set_timeout(struct MHD_Connection *connection, unsigned seconds)
{
    MHD_set_connection_option(connection, MHD_CONNECTION_OPTION_TIMEOUT, 0u);
    if (seconds) MHD_set_connection_option(connection, MHD_CONNECTION_OPTION_TIMEOUT, seconds);
}

static ssize_t on_stream_read(void *user, uint64_t at, char *buf, size_t room)
{
    exchange *x = user;
    (void)at;
    set_timeout(x->connection, 0);
    ssize_t n = x->reply.read(x->reply.stream, &x->r, buf, room);
    set_timeout(x->connection, x->http->o.timeout_s);
    return n > 0 ? n : n == 0 ? MHD_CONTENT_READER_END_OF_STREAM : MHD_CONTENT_READER_END_WITH_ERROR;
}

static struct MHD_Response *make_response(exchange *x)
{
    http_reply *reply = &x->reply;
    if (reply->read)
        return MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, STREAM_BLOCK, on_stream_read, x, NULL);
    if (reply->body.failed) {
        reply->status = 500;
        oai_buffer_free(&reply->body);
    }
    struct MHD_Response *response =
        MHD_create_response_from_buffer(reply->body.n, reply->body.data, MHD_RESPMEM_MUST_FREE);
    if (response) reply->body = (oai_buffer){0};
    return response;
}

static enum MHD_Result send_reply(exchange *x)
{
    http_reply *reply = &x->reply;
    struct MHD_Response *response = make_response(x);
    x->replied = true;
    x->status = reply->status;
    if (!response) return MHD_NO;
    const char *type = reply->type ? reply->type : "application/json";
    char number[16];
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    MHD_add_response_header(response, "X-Request-Id", x->r.id);
    MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    if (reply->policy) MHD_add_response_header(response, "Content-Security-Policy", reply->policy);
    if (reply->read) MHD_add_response_header(response, "X-Accel-Buffering", "no");
    if (reply->allow) MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, reply->allow);
    if (reply->location) MHD_add_response_header(response, MHD_HTTP_HEADER_LOCATION, reply->location);
    if (reply->status == 401) MHD_add_response_header(response, MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Bearer");
    if (reply->retry_after) {
        snprintf(number, sizeof number, "%u", reply->retry_after);
        MHD_add_response_header(response, MHD_HTTP_HEADER_RETRY_AFTER, number);
    }
    pthread_mutex_lock(&x->http->lock);
    bool leaving = x->http->leaving;
    pthread_mutex_unlock(&x->http->lock);
    if (leaving) MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
    set_timeout(x->connection, x->http->o.timeout_s);
    enum MHD_Result rc = MHD_queue_response(x->connection, (unsigned)reply->status, response);
    MHD_destroy_response(response);
    return rc;
}

/* --------------------------------------------------------------------------------------------------- requests ---- */

static bool is_id(const char *s)
{
    size_t n = s ? strlen(s) : 0;
    if (n == 0 || n >= sizeof ((http_request *)0)->id) return false;
    return strspn(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:") == n;
}

static void make_id(char *id, size_t room)
{
    unsigned char random[12] = {0};
    if (getrandom(random, sizeof random, 0) < 0) memcpy(random, &(uint64_t){app_now_ns()}, 8);
    int n = snprintf(id, room, "req-");
    for (size_t i = 0; i < sizeof random; i++) n += snprintf(id + n, room - (size_t)n, "%02x", random[i]);
}

static const http_route *find_route(const http *h, const char *method, const char *path, const char **allow)
{
    *allow = NULL;
    for (size_t i = 0; i < h->o.n_routes; i++) {
        const http_route *r = &h->o.routes[i];
        size_t n = strlen(r->path);
        bool below = n > 1 && r->path[n - 1] == '/' && !strncmp(path, r->path, n) && path[n];
        if (!below && strcmp(path, r->path)) continue;
        /* What GET gives, HEAD may ask for: libmicrohttpd leaves the body out. */
        bool same = !strcmp(method, r->method) || !strcmp(r->method, "*");
        if (same || (!strcmp(method, "HEAD") && !strcmp(r->method, "GET"))) return r;
        *allow = r->method;
    }
    return NULL;
}

bool http_is_loopback(const char *name)
{
    struct in_addr four;
    struct in6_addr six;
    if (inet_pton(AF_INET, name, &four) == 1) return ntohl(four.s_addr) >> 24 == 127;
    if (inet_pton(AF_INET6, name, &six) == 1) return IN6_IS_ADDR_LOOPBACK(&six);
    return !strcasecmp(name, "localhost");
}

/* The name out of a header `Host`: NAME, NAME:PORT, [ADDRESS]:PORT. False: none that could be known. */
static bool host_name(const char *host, char *name, size_t room)
{
    bool six = *host == '[';
    size_t n = strcspn(host += six, six ? "]" : ":");
    const char *behind = host + n + six;
    if (n >= room || (six && host[n] != ']') || (*behind && *behind != ':')) return false;
    memcpy(name, host, n);
    name[n] = '\0';
    return true;
}

/* A web page that a browser shows may send requests to this server, though it can't read the answers. None has to. Where
 * the page's own name was made to lead to this machine, the browser takes the server for the page's: then only the name
 * tells that it came by, and a server that listens to this machine alone knows by which names it is called. */
static bool is_foreign_page(const exchange *x)
{
    const http_opts *o = &x->http->o;
    const char *origin = MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, "Origin");
    const char *host = MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, "Host");
    char name[256];
    if (key_ring_size(o->keys) > 0) return false;
    if (host && http_is_loopback(o->host)) {
        bool known = host_name(host, name, sizeof name) && (http_is_loopback(name) || !strcasecmp(name, o->host));
        if (!known) return true;
    }
    if (!origin) return false;
    const char *at = strstr(origin, "://");
    return !at || !host || strcmp(at + 3, host);
}

/* False: not the admin's key, or, with a reply, not looked at. */
static bool is_admin(exchange *x, const char *secret)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(x->connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    const struct sockaddr *from = info ? info->client_addr : NULL;
    uint64_t now = app_now_ns(), wait = guesses_wait_ns(&x->http->guesses, from, now);
    if (wait) {
        x->reply.retry_after = (unsigned)(wait / 1000000000) + 1;
        reply_error(&x->reply, 429, "too_many_wrong_keys", "too many wrong keys came from this address");
        return false;
    }
    if (key_ring_find(x->http->o.admin_keys, secret)) return true;
    guesses_wrong(&x->http->guesses, from, now);
    return false;
}

/* Does it bring the key that its route wants? */
static bool check_key(exchange *x)
{
    const http_opts *o = &x->http->o;
    http_access access = x->route ? x->route->access : HTTP_CLIENT;
    bool for_client = access != HTTP_ADMIN, for_admin = access == HTTP_ADMIN || access == HTTP_CLIENT_OR_ADMIN;
    if (access == HTTP_OPEN || (for_client && key_ring_size(o->keys) == 0)) return true;
    if (!for_client && key_ring_size(o->admin_keys) == 0) {
        reply_error(&x->reply, 403, "admin_off",
                    "the admin API is off: the server was started without --admin-key-file");
        return false;
    }
    const char *key = MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, "Authorization");
    bool bearer = key && !strncasecmp(key, "Bearer ", 7);
    const char *secret = bearer ? key + 7 + strspn(key + 7, " ") : NULL;
    if (bearer && for_client && (x->r.tenant = key_ring_find(o->keys, secret)) != NULL) return true;
    if (bearer && for_admin && key_ring_size(o->admin_keys) > 0) {
        if (is_admin(x, secret)) return true;
        if (x->reply.status) return false;
    }
    const char *need = for_client ? "an API key is needed: Authorization: Bearer KEY"
                                  : "the admin's key is needed: Authorization: Bearer KEY";
    const char *unknown = for_client ? "this API key isn't known here" : "this isn't the admin's key";
    reply_error(&x->reply, 401, "invalid_api_key", key ? unknown : need);
    return false;
}

/* May it ask, and is it here? False: the reply says why not. */
static bool check(exchange *x)
{
    http *h = x->http;
    const char *allow;
    x->route = find_route(h, x->r.method, x->r.path, &allow);
    if (!check_key(x)) return false;
    if (!x->route && allow) {
        x->reply.allow = allow;
        reply_error(&x->reply, 405, "method_not_allowed", "this path wants another method");
        return false;
    }
    if (!x->route) {
        reply_error(&x->reply, 404, "not_found", "there is nothing at this path");
        return false;
    }
    if (is_foreign_page(x)) {
        reply_error(&x->reply, 403, "foreign_origin",
                    "requests from other sites' pages, or by another name than localhost, need an API key");
        return false;
    }
    return true;
}

/* Of such a length that it isn't even received to be forgotten. A client that finds its connection closed while it
 * still sends doesn't see the reply, as a rule. */
static bool is_hopeless(const exchange *x)
{
    const char *length = MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, "Content-Length");
    return length && strtoull(length, NULL, 10) / HOPELESS_FACTOR > x->http->o.max_body;
}

static void reply_too_long(exchange *x)
{
    char text[96];
    snprintf(text, sizeof text, "the body is longer than the %zu bytes that are taken", x->http->o.max_body);
    reply_error(&x->reply, 413, "body_too_long", text);
}

static bool take_body(exchange *x, const char *bytes, size_t n)
{
    if (x->refused || x->too_long || n > x->http->o.max_body - x->r.n_body) {
        x->too_long = true;
        return true;
    }
    if (x->r.n_body + n + 1 > x->room) {
        size_t room = 2 * (x->r.n_body + n) + 1024;
        char *body = realloc(x->body, room);
        if (!body) return false;
        x->body = body;
        x->room = room;
    }
    memcpy(x->body + x->r.n_body, bytes, n);
    x->r.n_body += n;
    x->body[x->r.n_body] = '\0';
    return true;
}

static exchange *open_exchange(http *h, struct MHD_Connection *connection, const char *path, const char *method)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    exchange *x = calloc(1, sizeof *x);
    if (!x || !info || !info->socket_context || !(x->r.log = json_object())) {
        free(x);
        return NULL;
    }
    x->http = h;
    x->connection = connection;
    x->client = info->socket_context;
    x->r.method = method;
    x->r.path = path;
    x->r.inside = x;
    x->r.start_ns = app_now_ns();
    const char *id = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "X-Request-Id");
    if (is_id(id)) snprintf(x->r.id, sizeof x->r.id, "%s", id);
    else make_id(x->r.id, sizeof x->r.id);
    return x;
}

/* Now there will be a reply, for which the end waits; it doesn't for a client that hasn't asked yet. */
static void count_in(exchange *x)
{
    pthread_mutex_lock(&x->http->lock);
    x->http->n_exchanges++;
    pthread_mutex_unlock(&x->http->lock);
    x->counted = true;
}

static enum MHD_Result on_request(void *user, struct MHD_Connection *connection, const char *path, const char *method,
                                  const char *version, const char *bytes, size_t *n_bytes, void **context)
{
    http *h = user;
    exchange *x = *context;
    (void)version;
    if (!x) {
        *context = x = open_exchange(h, connection, path, method);
        if (!x) return MHD_NO;
        x->refused = !check(x);
        if (!is_hopeless(x)) return MHD_YES;
        count_in(x);
        if (!x->refused) reply_too_long(x);
        return send_reply(x);
    }
    if (*n_bytes > 0) {
        if (!take_body(x, bytes, *n_bytes)) return MHD_NO;
        *n_bytes = 0;
        return MHD_YES;
    }
    if (x->replied) return MHD_YES;
    count_in(x);
    set_reading(x->client, false);
    set_timeout(connection, 0);
    x->r.body = x->body ? x->body : "";
    if (x->too_long && !x->refused) reply_too_long(x);
    else if (!x->refused) x->route->handle(h->o.user, &x->r, &x->reply);
    return send_reply(x);
}

static void on_completed(void *user, struct MHD_Connection *connection, void **context,
                         enum MHD_RequestTerminationCode code)
{
    http *h = user;
    exchange *x = *context;
    (void)connection;
    if (!x) return;
    *context = NULL;
    if (x->reply.close) x->reply.close(x->reply.stream, &x->r);
    bool whole = code == MHD_REQUEST_TERMINATED_COMPLETED_OK;
    metric_http(x->r.tenant ? x->r.tenant->number : METRIC_NOBODY, x->route ? x->route->path : "other", x->status);
    json_t *line = json_pack("{s:s, s:o?, s:s, s:i, s:f}", "id", x->r.id, "method", json_string(x->r.method), "path",
                             x->route ? x->route->path : "other", "status", x->status, "ms",
                             (double)(app_now_ns() - x->r.start_ns) * 1e-6); /* a method may be no text: null */
    if (line) json_object_update(line, x->r.log);
    if (line && !whole) json_object_set_new(line, "cut", json_true());
    log_event("info", "request", line);
    set_reading(x->client, true);
    json_decref(x->r.log);
    oai_buffer_free(&x->reply.body);
    free(x->reply.policy);
    free(x->body);
    pthread_mutex_lock(&h->lock);
    h->n_exchanges -= x->counted;
    pthread_mutex_unlock(&h->lock);
    free(x);
}

/* ---------------------------------------------------------------------------------------------- open and close ---- */

/* A socket that listens. Returns it, or -1 after one line. */
static int listen_at(const http_opts *o, uint16_t *port)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV}, *list = NULL;
    char service[8];
    snprintf(service, sizeof service, "%u", (unsigned)o->port);
    int rc = getaddrinfo(o->host, service, &hints, &list), fd = -1;
    if (rc != 0) return app_fail("can't listen on %s: %s", o->host, gai_strerror(rc)), -1;
    int why = 0;
    for (struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
        int one = 1;
        fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
        if (fd < 0) continue;
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, 256) == 0) break;
        why = errno;
        close(fd);
        fd = -1;
    }
    freeaddrinfo(list);
    if (fd < 0) return app_fail("can't listen on %s, port %s: %s", o->host, service, strerror(why)), -1;
    struct sockaddr_storage name;
    socklen_t n = sizeof name;
    if (getsockname(fd, (struct sockaddr *)&name, &n) == 0)
        *port = ntohs(name.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&name)->sin6_port
                                                 : ((struct sockaddr_in *)&name)->sin_port);
    return fd;
}

static void on_daemon_log(void *user, const char *fmt, va_list ap)
{
    char line[256];
    (void)user;
    vsnprintf(line, sizeof line, fmt, ap);
    line[strcspn(line, "\n")] = '\0';
    for (char *c = line; *c; c++) /* it may name a path, which may hold anything */
        if (*c < ' ' || *c > '~') *c = '?';
    log_event("debug", "http", json_pack("{s:s}", "message", line));
}

static int start(http *h)
{
    const http_opts *o = &h->o;
    size_t n;
    if (o->tls_cert && (app_read_text(o->tls_cert, &h->cert, &n) || app_read_text(o->tls_key, &h->key, &n))) return 1;
    if (h->cert && MHD_is_feature_supported(MHD_FEATURE_TLS) != MHD_YES)
        return app_fail("this libmicrohttpd was built without TLS");
    int fd = listen_at(o, &h->port);
    if (fd < 0) return 1;
    unsigned flags = MHD_USE_THREAD_PER_CONNECTION | MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_POLL | MHD_USE_ITC |
                     MHD_USE_ERROR_LOG | (h->cert ? MHD_USE_TLS : 0);
    struct MHD_OptionItem tls[] = {{MHD_OPTION_HTTPS_MEM_CERT, 0, h->cert},
                                   {MHD_OPTION_HTTPS_MEM_KEY, 0, h->key},
                                   {MHD_OPTION_END, 0, NULL}};
    if (!h->cert) tls[0] = tls[2];
    h->daemon = MHD_start_daemon(
        flags, 0, NULL, NULL, on_request, h, MHD_OPTION_EXTERNAL_LOGGER, on_daemon_log, NULL,
        MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_LIMIT, o->max_connections,
        MHD_OPTION_CONNECTION_TIMEOUT, o->timeout_s, MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)HEADER_BYTES,
        MHD_OPTION_THREAD_STACK_SIZE, (size_t)STACK_BYTES, MHD_OPTION_NOTIFY_CONNECTION, on_connection, h,
        MHD_OPTION_NOTIFY_COMPLETED, on_completed, h, MHD_OPTION_ARRAY, tls, MHD_OPTION_END);
    if (h->daemon) return 0;
    close(fd);
    if (h->cert) return app_fail("can't start: are %s and %s a certificate and its key?", o->tls_cert, o->tls_key);
    return app_fail("can't start libmicrohttpd");
}

int http_open(const http_opts *opts, http **out)
{
    *out = NULL;
    http *h = calloc(1, sizeof *h);
    if (!h) return app_fail("out of memory");
    h->o = *opts;
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&h->wake, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&h->lock, NULL);
    guesses_init(&h->guesses);
    int rc = start(h);
    if (rc == 0 && pthread_create(&h->keeper, NULL, keep, h) != 0) rc = app_fail("can't start a thread");
    else if (rc == 0) h->has_keeper = true;
    if (rc) {
        http_close(h, 0);
        return rc;
    }
    *out = h;
    return 0;
}

uint16_t http_port(const http *h) { return h->port; }

void http_quiesce(http *h)
{
    pthread_mutex_lock(&h->lock);
    h->leaving = true;
    pthread_mutex_unlock(&h->lock);
    MHD_socket fd = MHD_quiesce_daemon(h->daemon);
    if (fd != MHD_INVALID_SOCKET) close(fd);
}

void http_close(http *h, int wait_ms)
{
    if (!h) return;
    pthread_mutex_lock(&h->lock);
    h->end = true;
    pthread_cond_signal(&h->wake);
    for (int waited = 0; h->n_exchanges > 0 && waited < wait_ms; waited += 10) {
        pthread_mutex_unlock(&h->lock);
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
        pthread_mutex_lock(&h->lock);
    }
    pthread_mutex_unlock(&h->lock);
    if (h->has_keeper) pthread_join(h->keeper, NULL);
    if (h->daemon) MHD_stop_daemon(h->daemon);
    free(h->cert);
    if (h->key) memset(h->key, 0, strlen(h->key));
    free(h->key);
    guesses_free(&h->guesses);
    pthread_cond_destroy(&h->wake);
    pthread_mutex_destroy(&h->lock);
    free(h);
}
