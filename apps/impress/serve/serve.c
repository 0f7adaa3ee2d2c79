/* impress serve: an OpenAI-compatible server. */
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "api.h"
#include "commands.h"
#include "log.h"
#include "metrics.h"
#include "model.h"
#include "store_options.h"
#include "text.h"

typedef struct serve_settings {
    store_settings store;
    const char *model, *alias, *host, *system, *cache_type, *template;
    const char *api_key_file, *admin_key_file, *tls_cert, *tls_key;
    uint64_t port, n_slots, n_ctx, n_pool, n_queue, n_threads, n_batch, n_ubatch, slice_ms, max_body, connections;
    uint64_t timeout_s, limit_s, drain_s, whole_below;
    double retention; /* RETENTION_DEFAULT: not given */
    bool look_ahead, derived, adaptive, open, verbose;
} serve_settings;

#define AT(member) offsetof(serve_settings, member)
#define RETENTION_DEFAULT HUGE_VAL

static const opt options[] = {
    OPT_GROUP("Model"),
    {"model", 'm', OPT_TEXT, AT(model), "FILE", "the model, a GGUF file", false},
    {"alias", 0, OPT_TEXT, AT(alias), "NAME", "its name in requests and replies (default: the file's)", false},
    {"chat-template", 0, OPT_TEXT, AT(template), "FILE", "instead of the model's own", false},
    {"cache-type", 0, OPT_TEXT, AT(cache_type), "TYPE", "the cache's type: f16 (default) or q8_0", false},
    {"threads", 't', OPT_COUNT, AT(n_threads), "N", "threads (default: one a core)", false},
    {"batch-size", 'b', OPT_COUNT, AT(n_batch), "N", "tokens a decode call (default: 2048)", false},
    {"ubatch-size", 'u', OPT_COUNT, AT(n_ubatch), "N", "tokens a pass (default: 512)", false},
    OPT_GROUP("Address"),
    {"host", 0, OPT_TEXT, AT(host), "ADDRESS", "where to listen (default: 127.0.0.1)", false},
    {"port", 0, OPT_COUNT, AT(port), "N", "and on which port; 0: any free one (default: 8080)", false},
    {"tls-cert", 0, OPT_TEXT, AT(tls_cert), "FILE", "serve HTTPS with this certificate (PEM)", false},
    {"tls-key", 0, OPT_TEXT, AT(tls_key), "FILE", "and this key", false},
    OPT_GROUP("Who may ask"),
    {"api-key-file", 0, OPT_TEXT, AT(api_key_file), "FILE",
     "keys that clients need, one a line, each with a name if you\nlike; also $IMPRESS_API_KEY, separated by commas",
     false},
    {"admin-key-file", 0, OPT_TEXT, AT(admin_key_file), "FILE",
     "keys for /admin/ and the page at /ui, one a line; also\n$IMPRESS_ADMIN_KEY. Without any there is no admin API",
     false},
    {"open", 0, OPT_FLAG, AT(open), NULL, "serve other machines although there are no keys", false},
    OPT_GROUP("Requests at once, and limits"),
    {"slots", 0, OPT_COUNT, AT(n_slots), "N", "requests answered at once, 1 to 64 (default: 4)", false},
    {"ctx-size", 'c', OPT_COUNT, AT(n_ctx), "N",
     "tokens of one request, prompt and answer (default: what the\nmodel was trained for, 8192 at most)", false},
    {"cells", 0, OPT_COUNT, AT(n_pool), "N",
     "let all slots share a pool of so many cells, one a token:\nless memory, slower (default: each has --ctx-size of its own)",
     false},
    {"queue", 0, OPT_COUNT, AT(n_queue), "N", "requests that may wait; more are refused (default: 64)", false},
    {"slice", 0, OPT_COUNT, AT(slice_ms), "MS",
     "how long a piece of a prompt may hold up answers, about\n(default: 150)", false},
    {"max-body", 0, OPT_SIZE, AT(max_body), "SIZE", "longest body of a request (default: 16M)", false},
    {"connections", 0, OPT_COUNT, AT(connections), "N", "connections at once (default: 256)", false},
    {"timeout", 0, OPT_COUNT, AT(timeout_s), "S", "close connections silent for so long (default: 30)", false},
    {"time-limit", 0, OPT_COUNT, AT(limit_s), "S", "end a request after so long (default: 900)", false},
    {"drain", 0, OPT_COUNT, AT(drain_s), "S", "at SIGTERM, let answers go on for so long (default: 30)", false},
    OPT_GROUP("Store"),
    STORE_OPTS(serve_settings),
    {"look-ahead", 0, OPT_FLAG, AT(look_ahead), NULL,
     "read the prefixes of waiting requests into the host cache\n(default; --look-ahead=no: don't)", false},
    OPT_GROUP("What is loaded of a stored prefix"),
    {"system", 's', OPT_TEXT, AT(system), "NAME",
     "how prefixes are brought back, where a request doesn't say:\n"
     "NAME or NAME+SWITCH=VALUE...; `impress systems` lists them\n(default: " DEFAULT_SYSTEM ")", false},
    {"retention", 'r', OPT_REAL, AT(retention), "SHARE",
     "share of a prefix's tokens that each layer gets, over 0 to 1\n(default: 0.25 for systems that choose)", false},
    {"whole-below", 0, OPT_COUNT, AT(whole_below), "N",
     "where a request names no retention, load prefixes of fewer\ntokens whole: a part of them saves little (default: 1024)",
     false},
    {"derived", 0, OPT_FLAG, AT(derived), NULL,
     "store what was computed over a load in part, marked, for\nrequests that load in part; else a conversation that lost its\n"
     "cells computes its turns again (default; --derived=no: don't)", false},
    {"adaptive", 0, OPT_FLAG, AT(adaptive), NULL,
     "load in part only where that looks quickest, else whole, and\ncompute what is stored where that looks quicker", false},
    REQUEST_OPTS(serve_settings),
    OPT_GROUP("Log and settings"),
    {"verbose", 'v', OPT_FLAG, AT(verbose), NULL, "log more, llama.cpp's lines too", false},
};

const opt_command serve_command = {
    "serve",
    "serve -m MODEL.gguf [OPTIONS]",
    "Serve a model with OpenAI's API: chat completions, completions, models. Prefixes that requests\n"
    "share are computed once, kept in the store, and loaded from then on, also after a restart.",
    "examples:\n"
    "  impress serve -m smollm2.gguf\n"
    "  impress serve -m smollm2.gguf --host 0.0.0.0 --api-key-file keys.txt --slots 8 --host-cache 4G\n\n"
    "The log, JSON lines without any text of prompts, goes to standard error. Options may also stand in\n"
    "~/.config/impress/config (name = value) and in the environment (IMPRESS_SLOTS=...).",
    options,
    sizeof options / sizeof *options,
};

enum { NAME_BYTES = 128 }; /* of the model's name, with its end */

static int check(const serve_settings *s)
{
    if (!s->model) return opt_misuse(&serve_command, "no model: -m MODEL.gguf");
    if (s->port > 65535)
        return opt_misuse(&serve_command, "--port wants 0 to 65535, not %llu", (unsigned long long)s->port);
    if (s->n_slots < 1 || s->n_slots > ENGINE_MAX_SLOTS)
        return opt_misuse(&serve_command, "--slots wants 1 to %d, not %llu", ENGINE_MAX_SLOTS,
                          (unsigned long long)s->n_slots);
    if (s->retention != RETENTION_DEFAULT && !(s->retention > 0 && s->retention <= 1))
        return opt_misuse(&serve_command, "--retention wants a share over 0 and up to 1, not %g", s->retention);
    if (s->cache_type && strcmp(s->cache_type, "f16") && strcmp(s->cache_type, "q8_0"))
        return opt_misuse(&serve_command, "--cache-type: `%s` is not one of f16, q8_0", s->cache_type);
    if (s->n_ubatch == 0 || s->n_batch < s->n_slots + 64)
        return opt_misuse(&serve_command, "--batch-size wants at least 64 more than there are slots, --ubatch-size 1");
    if (s->alias && (!*s->alias || strlen(s->alias) >= NAME_BYTES)) /* cut, it would be no client's name for it */
        return opt_misuse(&serve_command, "--alias wants 1 to %d bytes", NAME_BYTES - 1);
    if (s->alias && text_utf8(s->alias, strlen(s->alias)) < strlen(s->alias))
        return opt_misuse(&serve_command, "--alias isn't UTF-8");
    if (!s->tls_cert != !s->tls_key) return opt_misuse(&serve_command, "--tls-cert and --tls-key go together");
    if (s->timeout_s == 0 || s->limit_s == 0 || s->connections == 0 || s->slice_ms == 0)
        return opt_misuse(&serve_command, "--timeout, --time-limit, --connections and --slice want at least 1");
    if (s->max_body < 1024) return opt_misuse(&serve_command, "--max-body wants at least 1K");
    return 0;
}

/* Everything the server works with. */
typedef struct server {
    const serve_settings *s;
    key_ring *keys, *admin_keys;
    imp_store *store;
    struct llama_model *model;
    chat_template *template;
    engine *engine;
    http *http;
    api api;
    char name[NAME_BYTES];
} server;

/* What the model is called: the alias, or the file's name without its ending. */
static void name_model(server *v)
{
    const serve_settings *s = v->s;
    const char *slash = strrchr(s->model, '/');
    snprintf(v->name, sizeof v->name, "%s", s->alias ? s->alias : slash ? slash + 1 : s->model);
    char *dot = s->alias ? NULL : strrchr(v->name, '.');
    if (dot && !strcmp(dot, ".gguf")) *dot = '\0';
    /* A file may be called anything; replies are UTF-8. It may have been cut within a character, too. */
    for (char *c = v->name + text_utf8(v->name, strlen(v->name)); *c; c++)
        if ((unsigned char)*c >= 0x80) *c = '_';
    struct stat st;
    v->api.model = (oai_model){v->name, stat(s->model, &st) == 0 ? (int64_t)st.st_mtime : 0, v->api.n_ctx};
}

static int open_template(server *v)
{
    char *source = NULL;
    size_t n;
    if (v->s->template && app_read_text(v->s->template, &source, &n)) return 1;
    if (source && n == 0) {
        free(source);
        return app_fail("the chat template: %s is empty", v->s->template);
    }
    oai_error e = {0};
    int rc = chat_template_open(v->model, source, &v->template, &e);
    free(source);
    return rc ? app_fail("the chat template: %s", e.message) : 0;
}

static int open_engine(server *v)
{
    const serve_settings *s = v->s;
    size_t trained = (size_t)llama_model_n_ctx_train(v->model), n_ctx = s->n_ctx;
    if (n_ctx > trained)
        return app_fail("%s %zu is more than the model's context of %zu tokens", opt_said("ctx-size"), n_ctx,
                        trained);
    if (n_ctx == 0) n_ctx = trained < 8192 ? trained : 8192;
    size_t n_pool = s->n_pool;
    if (n_pool && n_pool < n_ctx)
        return app_fail("%s %zu is less than one request's context of %zu", opt_said("cells"), n_pool, n_ctx);
    if (n_pool > UINT32_MAX || n_ctx * s->n_slots > UINT32_MAX)
        return app_fail("%zu slots of %zu tokens, or %s %zu, are more than llama.cpp counts",
                        (size_t)s->n_slots, n_ctx, opt_said("cells"), n_pool);
    v->api.n_ctx = n_ctx;
    imp_llama_request request;
    imp_llama_request_init(&request);
    app_system_request(&v->api.system, &request);
    engine_opts o = {
        .request = request, .model = v->model, .model_path = s->model, .store = v->store,
        .context = app_context_params(n_ctx, s->n_batch, s->n_ubatch, s->n_threads, s->cache_type),
        .n_slots = s->n_slots, .n_ctx = n_ctx, .n_pool = n_pool, .n_queue = s->n_queue,
        .slice_ns = s->slice_ms * 1000000, .limit_ns = s->limit_s * 1000000000,
        .look_ahead_bytes = s->look_ahead ? (s->store.host_cache + s->store.device_cache) / 2 : 0,
    };
    return engine_open(&o, &v->engine);
}

static int open_http(server *v)
{
    const serve_settings *s = v->s;
    http_opts o = {
        .host = s->host, .port = (uint16_t)s->port, .tls_cert = s->tls_cert, .tls_key = s->tls_key,
        .max_body = s->max_body, .max_connections = (unsigned)s->connections, .timeout_s = (unsigned)s->timeout_s,
        .routes = api_routes, .n_routes = api_n_routes(), .keys = v->keys,
        .admin_keys = v->admin_keys, .user = &v->api,
    };
    return http_open(&o, &v->http);
}

/* Each tenant's share of the numbers. */
static int count_tenants(const key_ring *keys)
{
    size_t n = key_ring_n_tenants(keys);
    const char **labels = calloc(n ? n : 1, sizeof *labels);
    for (size_t i = 0; labels && i < n; i++) labels[i] = key_ring_tenant(keys, i + 1)->label;
    int rc = labels && metric_open_tenants(labels, n) == 0 ? 0 : app_fail("out of memory");
    free(labels);
    return rc;
}

static int open_server(server *v, const imp_store_opts *store_opts)
{
    const serve_settings *s = v->s;
    if (key_ring_open(s->api_key_file, getenv("IMPRESS_API_KEY"), &v->keys)) return 1;
    if (key_ring_open(s->admin_key_file, getenv("IMPRESS_ADMIN_KEY"), &v->admin_keys)) return 1;
    if (count_tenants(v->keys)) return 1;
    if (!http_is_loopback(s->host) && key_ring_size(v->keys) == 0 && !s->open)
        return app_fail("without API keys only this machine is served: give --api-key-file, or --open");
    if (store_settings_open(&s->store, store_opts, &v->store)) return 1;
    if (app_model_load(s->model, s->verbose, &v->model)) return 1;
    log_take_over(s->verbose);
    if (open_template(v) || open_engine(v)) return 1;
    v->api.engine = v->engine;
    v->api.template = v->template;
    v->api.vocab = llama_model_get_vocab(v->model);
    v->api.store = v->store;
    v->api.host_limit = store_opts->host_cache_bytes;
    v->api.device_limit = store_opts->device_cache_bytes;
    v->api.keys = v->keys;
    v->api.limits = oai_limits_default();
    v->api.limits.max_body_bytes = s->max_body;
    v->api.limits.n_vocab = llama_vocab_n_tokens(v->api.vocab);
    name_model(v);
    return open_http(v);
}

/* Where a browser on this machine finds it. */
static void make_url(const server *v, char *url, size_t room)
{
    const char *host = v->s->host;
    if (!strcmp(host, "0.0.0.0") || !strcmp(host, "::")) host = "localhost";
    bool six = strchr(host, ':') != NULL;
    snprintf(url, room, "%s://%s%s%s:%u/", v->s->tls_cert ? "https" : "http", six ? "[" : "", host, six ? "]" : "",
             (unsigned)http_port(v->http));
}

static void log_listening(const server *v)
{
    const serve_settings *s = v->s;
    imp_stats stats = {0};
    char url[300];
    make_url(v, url, sizeof url);
    if (v->store) imp_store_stats(v->store, &stats);
    log_event("info", "listening",
              json_pack("{s:s, s:s, s:i, s:s, s:I, s:I, s:s, s:s, s:s, s:i}", "url", url, "host", s->host, "port",
                        (int)http_port(v->http), "model", v->name, "context", (json_int_t)v->api.n_ctx, "slots",
                        (json_int_t)s->n_slots, "system", v->api.system.name, "store",
                        stats.io_mode ? stats.io_mode : "none", "note", engine_note(v->engine), "pid",
                        (int)getpid()));
}

/* While the server starts, which takes long where a model is large, a signal ends it as it would end any program: there
 * is nothing yet that would have to be saved. */
static void *watch_start(void *user)
{
    const sigset_t *signals = user;
    int signal;
    while (sigwait(signals, &signal) != 0) continue; /* where it is cancelled */
    pthread_sigmask(SIG_UNBLOCK, signals, NULL);
    raise(signal);
    return NULL;
}

/* Wait for SIGTERM or SIGINT; let what runs come to its end, up to --drain seconds or a second signal. */
static void serve_until_told(server *v, const sigset_t *signals)
{
    int signal;
    while (sigwait(signals, &signal) != 0) continue;
    log_event("info", "draining",
              json_pack("{s:i, s:I}", "signal", signal, "jobs", (json_int_t)engine_n_jobs(v->engine)));
    engine_drain(v->engine);
    http_quiesce(v->http);
    uint64_t until = app_now_ns() + v->s->drain_s * 1000000000;
    while (engine_n_jobs(v->engine) > 0 && app_now_ns() < until) {
        struct timespec tick = {.tv_nsec = 50000000};
        if (sigtimedwait(signals, NULL, &tick) > 0) break;
    }
    engine_cut(v->engine);
}

static void close_server(server *v)
{
    http_close(v->http, 10000);
    engine_close(v->engine); /* what is unsaved goes to the store */
    if (v->store && imp_store_flush(v->store) < 0)
        log_event("warn", "store", json_pack("{s:s}", "message", imp_last_error()));
    chat_template_close(v->template);
    imp_store_close(v->store);
    llama_model_free(v->model);
    metric_close_tenants();
    key_ring_close(v->keys);
    key_ring_close(v->admin_keys);
}

int cmd_serve(int argc, char **argv)
{
    serve_settings s = {
        .store.host_cache = 1 << 30, .host = "127.0.0.1", .port = 8080, .n_slots = 4, .n_queue = 64, .n_batch = 2048,
        .n_ubatch = 512,
        .slice_ms = 150, .max_body = 16 << 20, .connections = 256, .timeout_s = 30, .limit_s = 900, .drain_s = 30,
        .retention = RETENTION_DEFAULT, .system = DEFAULT_SYSTEM, .look_ahead = true,
        .derived = true, .whole_below = DEFAULT_WHOLE_BELOW,
    };
    int n_positional;
    int rc = opt_parse(&serve_command, argc, argv, &s, &n_positional);
    if (rc) return rc == 1 ? 0 : rc;
    if (n_positional) return opt_misuse(&serve_command, "unexpected argument `%s`", argv[1]);
    if ((rc = check(&s)) != 0) return rc;

    server v = {.s = &s};
    imp_store_opts store_opts;
    char error[SWITCH_ERROR_BYTES];
    v.api.switches = &s.store.switches;
    v.api.retention = s.retention != RETENTION_DEFAULT ? s.retention : 0.25;
    v.api.derived = s.derived;
    v.api.whole_below = s.whole_below;
    v.api.adaptive = s.adaptive;
    if (app_system_make("--system", s.system, v.api.switches, v.api.retention, &v.api.system, error) < 0)
        return opt_misuse(&serve_command, "%s", error);
    if ((rc = store_settings_apply(&serve_command, &s.store, &store_opts)) != 0) return rc;
    app_system_store(&v.api.system, &store_opts);
    app_system_notes(&v.api.system, 1);
    if (s.retention != RETENTION_DEFAULT && s.retention < 1 && !v.api.system.chooses)
        fprintf(stderr, "impress: note: system %s loads every token, whatever the retention\n", v.api.system.name);

    /* Before any thread is there: all of them leave these signals to this one. */
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    app_log_show(s.verbose);
    pthread_t watch;
    bool watched = pthread_create(&watch, NULL, watch_start, &signals) == 0;
    rc = open_server(&v, &store_opts);
    if (watched) {
        pthread_cancel(watch);
        pthread_join(watch, NULL);
    }
    if (rc == 0) {
        log_listening(&v);
        serve_until_told(&v, &signals);
    }
    close_server(&v);
    if (rc == 0) log_event("info", "stopped", NULL);
    return rc;
}
