/* fuzz_http.c: any bytes as what a connection brings, to the server's HTTP side in this process, with routes that
 * answer by themselves. What comes back is HTTP, and a request is handled only if it may be: by its key, the page that
 * it is sent from, its method, its length. serve_fuzz.py does the same to a whole server, slower and unsanitized.
 *
 * The first byte of an input chooses the server (no keys; keys; only the admin's), the client's address, and whether
 * the client waits for a reply. */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fuzz/fuzz.h"
#include "fuzz/util.h"
#include "serve/http.c" /* its daemon is needed, to hand it a connection without a port */

enum { MAX_BODY = 32, REPLY_ROOM = 1 << 20, BEFORE_HANGING_UP = 8, IS_IPV6 = 4, N_SERVERS = 3, N_WAITS = 2000000 };

#define CLIENT_ONE "client-key-one"
#define CLIENT_TWO "client-key-two"
#define ADMIN "admins-key"

/* ------------------------------------------------------------------------------------------------- the server ---- */

/* The log's lines go nowhere, but must be such. In place of log.c. */
void log_event(const char *level, const char *event, json_t *fields)
{
    MUST(level && event);
    char *line = json_dumps(fields, JSON_COMPACT);
    MUST(line && !strchr(line, '\n') && (strcmp(event, "request") != 0 || json_object_get(fields, "status")));
    free(line);
    json_decref(fields);
}

/* One of the header's values of this name fits. */
typedef struct search {
    const char *name;
    bool (*fits)(const char *value, const void *user);
    const void *user;
    bool any, found;
} search;

static enum MHD_Result look(void *user, enum MHD_ValueKind kind, const char *name, const char *value)
{
    search *s = user;
    (void)kind;
    if (strcasecmp(name, s->name) != 0) return MHD_YES;
    s->any = true;
    s->found = s->found || (value && s->fits(value, s->user));
    return MHD_YES;
}

static search find(const http_request *r, const char *name, bool (*fits)(const char *value, const void *user),
                   const void *user)
{
    search s = {.name = name, .fits = fits, .user = user};
    MHD_get_connection_values(((const exchange *)r->inside)->connection, MHD_HEADER_KIND, look, &s);
    return s;
}

static bool ends_with(const char *value, const void *end)
{
    size_t n = strlen(value), m = strlen(end);
    return n >= m && !strcmp(value + n - m, end);
}

/* More is taken for this machine than http.c takes for it: by another parser of addresses. */
static bool is_here(const char *value, const void *user)
{
    (void)user;
    char name[300];
    const char *from = value[0] == '[' ? value + 1 : value;
    size_t n = strcspn(from, value[0] == '[' ? "]" : ":");
    if (n >= sizeof name) return false;
    memcpy(name, from, n);
    name[n] = '\0';
    struct addrinfo hints = {.ai_flags = AI_NUMERICHOST}, *list = NULL;
    bool here = !strcasecmp(name, "localhost");
    if (here || getaddrinfo(name, NULL, &hints, &list) != 0) return here;
    if (list->ai_family == AF_INET) {
        here = ntohl(((struct sockaddr_in *)list->ai_addr)->sin_addr.s_addr) >> 24 == 127;
    } else {
        here = IN6_IS_ADDR_LOOPBACK(&((struct sockaddr_in6 *)list->ai_addr)->sin6_addr);
    }
    freeaddrinfo(list);
    return here;
}

static bool is_origin_of(const char *origin, const void *request)
{
    return find(request, "Host", ends_with, strstr(origin, "://") ? strstr(origin, "://") + 3 : "/").found;
}

static bool is_clean_id(const char *id)
{
    size_t n = strlen(id);
    for (size_t i = 0; i < n; i++)
        if (!strchr("-_.:", id[i]) && !(id[i] >= '0' && id[i] <= '9') && !((id[i] | 32) >= 'a' && (id[i] | 32) <= 'z'))
            return false;
    return n > 0 && n < 72;
}

/* It was let in: rightly? */
static void check_request(const http_opts *o, const http_request *r)
{
    const http_route *route = ((const exchange *)r->inside)->route;
    size_t n_path = strlen(route->path);
    MUST(!strncmp(r->path, route->path, n_path) && (r->path[n_path] == '\0' || ends_with(route->path, "/")));
    MUST(!strcmp(route->method, "*") || !strcmp(route->method, r->method) ||
         (!strcmp(route->method, "GET") && !strcmp(r->method, "HEAD")));
    MUST(r->n_body <= MAX_BODY && r->body[r->n_body] == '\0' && is_clean_id(r->id) && json_is_object(r->log));

    bool keys = key_ring_size(o->keys) > 0;
    const char *authorization = "Authorization";
    bool as_admin = o->admin_keys && find(r, authorization, ends_with, " " ADMIN).found;
    bool as_one = find(r, authorization, ends_with, " " CLIENT_ONE).found;
    bool as_two = find(r, authorization, ends_with, " " CLIENT_TWO).found;
    switch (route->access) {
    case HTTP_OPEN: break;
    case HTTP_ADMIN: MUST(as_admin); break;
    case HTTP_CLIENT: MUST(!keys || (r->tenant && (as_one || as_two))); break;
    case HTTP_CLIENT_OR_ADMIN: MUST(!keys || as_admin || (r->tenant && (as_one || as_two))); break;
    }
    if (r->tenant) MUST(keys && (r->tenant->number == 1 ? as_one : r->tenant->number == 2 && as_two));
    if (keys) return;
    search host = find(r, "Host", is_here, NULL), origin = find(r, "Origin", is_origin_of, r);
    MUST(!host.any || host.found);
    MUST(!origin.any || origin.found);
}

static void answer(http_reply *out, const char *text)
{
    out->status = 200;
    oai_buffer_add(&out->body, text, strlen(text));
}

static void handle(void *user, http_request *r, http_reply *out)
{
    check_request(user, r);
    answer(out, "{}");
}

static void handle_error(void *user, http_request *r, http_reply *out)
{
    check_request(user, r);
    answer(out, "is thrown away");
    oai_error e = {0};
    oai_fail(&e, 400, "invalid_value", "prompt", "of %zu bytes", r->n_body);
    http_error(out, &e);
    out->retry_after = 3;
}

static void handle_page(void *user, http_request *r, http_reply *out)
{
    check_request(user, r);
    answer(out, "<p>");
    out->type = "text/html";
    out->policy = strdup("default-src 'none'");
}

static void handle_root(void *user, http_request *r, http_reply *out)
{
    check_request(user, r);
    out->status = 302;
    out->location = "/ui";
}

typedef struct stream {
    int n_left;
    bool breaks;
} stream;

static ssize_t read_stream(void *user, http_request *r, char *buf, size_t room)
{
    stream *s = user;
    (void)http_gone(r);
    if (s->n_left-- == 0) return s->breaks ? -1 : 0;
    MUST(room >= 7);
    memcpy(buf, "data: \n", 7);
    return 7;
}

static int n_streams;

static void close_stream(void *user, http_request *r)
{
    (void)r;
    n_streams--;
    free(user);
}

static void handle_stream(void *user, http_request *r, http_reply *out)
{
    check_request(user, r);
    stream *s = malloc(sizeof *s);
    MUST(s);
    *s = (stream){r->n_body % 4, r->body[0] == 'x'};
    n_streams++;
    *out = (http_reply){.status = 200, .read = read_stream, .close = close_stream, .stream = s};
    out->type = "text/event-stream";
}

static const http_route routes[] = {
    {"GET", "/v1/models", HTTP_CLIENT, handle},         {"GET", "/v1/models/", HTTP_CLIENT, handle},
    {"POST", "/v1/completions", HTTP_CLIENT, handle_error}, {"POST", "/v1/stream", HTTP_CLIENT, handle_stream},
    {"GET", "/health", HTTP_OPEN, handle},              {"GET", "/metrics", HTTP_CLIENT_OR_ADMIN, handle},
    {"*", "/admin/", HTTP_ADMIN, handle},               {"GET", "/ui", HTTP_OPEN, handle_page},
    {"GET", "/", HTTP_OPEN, handle_root},
};

static http *servers[N_SERVERS];
static key_ring *clients, *admins;

static void close_servers(void)
{
    for (size_t i = 0; i < N_SERVERS; i++) http_close(servers[i], 1000);
    key_ring_close(clients);
    key_ring_close(admins);
}

static http *server(size_t which)
{
    static http_opts opts[N_SERVERS];
    if (servers[which]) return servers[which];
    if (!clients) {
        MUST(key_ring_open(NULL, CLIENT_ONE "," CLIENT_TWO, &clients) == 0 && key_ring_open(NULL, ADMIN, &admins) == 0);
        atexit(close_servers);
    }
    opts[which] = (http_opts){
        .host = "127.0.0.1", .max_body = MAX_BODY, .max_connections = 16, .timeout_s = 60, .routes = routes,
        .n_routes = sizeof routes / sizeof *routes, .keys = which == 1 ? clients : NULL,
        .admin_keys = which > 0 ? admins : NULL, .user = &opts[which],
    };
    MUST(http_open(&opts[which], &servers[which]) == 0);
    return servers[which];
}

/* ------------------------------------------------------------------------------------------------- the client ---- */

/* The server's threads take a connection and put it away when they come to it. None may be about while another input
 * is tried. */
static void wait_for(http *h, size_t n_clients)
{
    pthread_mutex_lock(&h->lock);
    for (size_t waits = 0; h->n_clients != n_clients || h->n_exchanges > 0; waits++) {
        MUST(waits < N_WAITS);
        pthread_mutex_unlock(&h->lock);
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
        pthread_mutex_lock(&h->lock);
    }
    pthread_mutex_unlock(&h->lock);
}

static http *connect_to(uint8_t mode, int *fd)
{
    http *h = server(mode % N_SERVERS);
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    bool ipv6 = mode & IS_IPV6;
    int pair[2];
    guesses_free(&h->guesses); /* as if nobody had tried a key */
    memset(&h->guesses, 0, sizeof h->guesses);
    guesses_init(&h->guesses);
    MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    const struct sockaddr *from = ipv6 ? (const struct sockaddr *)&six : (const struct sockaddr *)&four;
    MUST(MHD_add_connection(h->daemon, pair[1], from, ipv6 ? sizeof six : sizeof four) == MHD_YES);
    wait_for(h, 1);
    *fd = pair[0];
    return h;
}

/* Send all, and take what comes until its end, or with `deaf` nothing. */
static size_t talk(int fd, const uint8_t *bytes, size_t n, bool deaf, char *reply)
{
    size_t n_reply = 0;
    bool ended = false;
    for (size_t at = 0;;) {
        if (at == n && deaf) return 0;
        if (at == n && !ended) {
            shutdown(fd, SHUT_WR);
            ended = true;
        }
        struct pollfd p = {.fd = fd, .events = (short)((at < n ? POLLOUT : 0) | (deaf ? 0 : POLLIN))};
        if (poll(&p, 1, -1) != 1) {
            MUST(errno == EINTR); /* a fuzzer's clock */
            continue;
        }
        if (at < n && (p.revents & (POLLOUT | POLLHUP | POLLERR))) {
            ssize_t sent = send(fd, bytes + at, n - at, MSG_NOSIGNAL | MSG_DONTWAIT);
            at = sent > 0 ? at + (size_t)sent : errno == EAGAIN ? at : n; /* or closed: what it said is read still */
        }
        if (deaf || !(p.revents & (POLLIN | POLLHUP | POLLERR))) continue;
        MUST(n_reply < REPLY_ROOM);
        ssize_t got = recv(fd, reply + n_reply, REPLY_ROOM - n_reply, MSG_DONTWAIT);
        if (got < 0 && errno == EAGAIN) continue;
        if (got <= 0) return n_reply;
        n_reply += (size_t)got;
    }
}

/* The value of a header in a reply's head; NULL: none. */
static const char *header(const char *head, const char *name)
{
    size_t n = strlen(name);
    for (const char *at = head; (at = strstr(at, "\r\n")) != NULL;) {
        at += 2;
        if (!strncasecmp(at, name, n) && at[n] == ':') return at + n + 1 + strspn(at + n + 1, " ");
    }
    return NULL;
}

/* One of ours, not of libmicrohttpd's: all of its head, and where it is short its body too. */
static void check_ours(const char *head, const char *body, size_t n_body, int status)
{
    static const int known[] = {200, 302, 400, 401, 403, 404, 405, 413, 429};
    bool is_known = false;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) is_known = is_known || known[i] == status;
    MUST(is_known && header(head, "Content-Type") && header(head, "X-Content-Type-Options"));
    char id[80] = "";
    MUST(sscanf(header(head, "X-Request-Id"), "%79[^\r]", id) == 1 && is_clean_id(id));
    const char *length = header(head, "Content-Length");
    if (status < 400 || !length || !n_body || !strncmp(body, "HTTP/1.", 7)) return; /* of HEAD, perhaps */
    size_t n = strtoull(length, NULL, 10);
    MUST(n > 0 && n <= n_body);
    json_t *error = json_loadb(body, n, 0, NULL);
    MUST(json_string_value(json_object_get(json_object_get(error, "error"), "message")));
    json_decref(error);
}

static void check_reply(char *reply, size_t n)
{
    if (n == 0) return;
    MUST(n > 13 && !strncmp(reply, "HTTP/1.", 7) && (reply[7] == '0' || reply[7] == '1') && reply[8] == ' ');
    int status = atoi(reply + 9);
    MUST(status >= 100 && status < 600 && (reply[12] == ' ' || reply[12] == '\r'));
    char *end = memmem(reply, n, "\r\n\r\n", 4);
    MUST(end);
    if (status == 100) {
        size_t n_past = (size_t)(end + 4 - reply);
        check_reply(end + 4, n - n_past);
        return;
    }
    for (const char *c = reply; c < end; c++) MUST((unsigned char)*c >= ' ' || *c == '\r' || *c == '\n');
    end[2] = '\0';
    if (header(reply, "X-Request-Id")) check_ours(reply, end + 4, n - (size_t)(end + 4 - reply), status);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    static char reply[REPLY_ROOM + 1];
    if (n_bytes == 0) return 0;
    int fd;
    http *h = connect_to(bytes[0], &fd);
    size_t n = talk(fd, bytes + 1, n_bytes - 1, bytes[0] & BEFORE_HANGING_UP, reply);
    close(fd);
    wait_for(h, 0);
    MUST(n_streams == 0);
    reply[n] = '\0';
    check_reply(reply, n);
    return 0;
}

size_t imp_fuzz_seed(size_t i, uint8_t *out, size_t room)
{
    static const char *const texts[] = {
        "0GET /v1/models HTTP/1.1\r\nHost: localhost:8080\r\nOrigin: http://localhost:8080\r\n"
        "X-Request-Id: my-id.1\r\n\r\n"
        "HEAD /v1/models/x HTTP/1.1\r\nHost: [::1]:8080\r\n\r\n",
        "0POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\nabcde",
        "0GET /health HTTP/1.1\r\nHost: evil.example\r\nOrigin: http://evil.example\r\n\r\n",
        "1POST /v1/stream HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer " CLIENT_TWO
        "\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nxyz\r\n2\r\nuv\r\n0\r\n\r\n",
        ":POST /v1/stream HTTP/1.1\r\nHost: a\r\nAuthorization: bearer   " CLIENT_ONE
        "\r\nContent-Length: 3\r\n\r\nabc",
        "1GET /metrics HTTP/1.0\r\nAuthorization: Bearer " ADMIN "\r\nConnection: keep-alive\r\n\r\n"
        "GET /metrics HTTP/1.0\r\nAuthorization: Basic x\r\n\r\n",
        "2DELETE /admin/x/y?z=%00 HTTP/1.1\r\nHost: LOCALHOST\r\nAuthorization: Bearer " ADMIN "\r\n\r\n",
        "5GET /admin/ HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a-wrong-one\r\n\r\n",
        "2PUT /v1/models HTTP/1.1\r\nHost: 127.0.0.1:1\r\nContent-Length: 99999\r\n\r\n",
        "0POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 18446744073709551616\r\n\r\n",
        "6GET / HTTP/1.1\r\nHost: localhost\r\nCookie: a=b; c\r\n folded: x\r\nno colon\r\n\r\n",
        "3GET /ui HTTP/1.1\r\nHost: localhost\r\nHost: [::1\r\n\r\nGET /ui HTTP/1.1\r\nHost: [::1\r\n\r\n",
        ("0POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
         "10\r\n0123456789abcdef\r\n11\r\n0123456789abcdefg\r\n0\r\n\r\n"),
        "0OPTIONS * HTTP/1.1\r\nHost: 127.1\r\n\r\nNONSENSE\r\n\r\n",
    };
    return fuzz_text_seed(texts, sizeof texts / sizeof *texts, i, out, room);
}
