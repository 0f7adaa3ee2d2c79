#include "admin.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "api.h"
#include "stored.h"
#include "text.h"

enum { LOOK_MS = 200 };

/* ---------------------------------------------------------------------------------------------------- replies ---- */

static void fail(http_reply *out, int status, const char *code, const char *param, const char *message)
{
    oai_error e = {0};
    oai_fail(&e, status, code, param, "%s", message);
    http_error(out, &e);
}

/* Of a call of the library. */
static void fail_status(http_reply *out, int64_t rc)
{
    int status = rc == IMP_E_NOTFOUND ? 404
                 : rc == IMP_E_BUSY   ? 503
                 : rc == IMP_E_FULL   ? 507
                 : rc == IMP_E_PERM   ? 403
                                      : 500;
    static const char *const codes[] = {[-IMP_E_NOTFOUND] = "no_such_prefix",
                                        [-IMP_E_BUSY] = "store_busy",
                                        [-IMP_E_FULL] = "store_full",
                                        [-IMP_E_PERM] = "read_only"};
    size_t i = (size_t)-rc;
    const char *code = i < sizeof codes / sizeof *codes && codes[i] ? codes[i] : "store_failed";
    fail(out, status, code, NULL, imp_last_error());
    if (status == 503) out->retry_after = 1;
}

/* A value at the end of a body; it is given away. */
static void add_json(oai_buffer *b, json_t *value)
{
    char *text = value ? json_dumps(value, JSON_COMPACT) : NULL;
    if (text)
        oai_buffer_add(b, text, strlen(text));
    else
        b->failed = true;
    free(text);
    json_decref(value);
}

static void reply_json(http_reply *out, json_t *value)
{
    out->status = 200;
    add_json(&out->body, value);
    oai_buffer_add(&out->body, "\n", 1);
}

static json_int_t whole(uint64_t n)
{
    return (json_int_t)n;
}

/* ------------------------------------------------------------------------------------------------ what is there ----
 */

static json_t *tier_json(const char *name, uint64_t bytes, uint64_t limit)
{
    return json_pack("{s:s, s:I, s:I}", "tier", name, "bytes", whole(bytes), "limit_bytes", whole(limit));
}

static json_t *faults_json(imp_store *store)
{
    imp_fault faults[IMP_FAULTS_MAX];
    int n = imp_store_faults(store, faults);
    json_t *list = json_array();
    for (int i = 0; i < n; i++) {
        const imp_fault *f = &faults[i];
        json_array_append_new(list, json_pack("{s:s, s:s, s:I, s:I, s:s}", "what", f->what, "error",
                                              imp_status_text(f->status), "failures", whole(f->n), "since",
                                              (json_int_t)f->since_s, "message", f->line));
    }
    return list;
}

static void get_stats(const api *a, http_reply *out)
{
    json_t *all = json_pack("{s:s, s:s, s:I, s:n, s:[]}", "version", imp_version(), "model", a->model.id,
                            "context_tokens", whole(a->n_ctx), "store", "tiers");
    imp_stats s;
    if (a->store && all) {
        if (imp_store_stats(a->store, &s) < 0) {
            json_decref(all);
            fail_status(out, IMP_E_IO);
            return;
        }
        json_t *store = json_pack(
            "{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, "
            "s:s}",
            "disk_bytes", whole(s.disk_bytes), "limit_bytes", whole(s.limit_bytes), "kv_bytes", whole(s.kv_bytes),
            "spaces", whole(s.n_spaces), "prefixes", whole(s.n_nodes), "segments", whole(s.n_segments), "tokens",
            whole(s.n_tokens), "lookups", whole(s.acquires), "hits", whole(s.hits), "hit_tokens", whole(s.hit_tokens),
            "bytes_read", whole(s.bytes_read), "bytes_written", whole(s.bytes_written), "host_hit_bytes",
            whole(s.host_hit_bytes), "device_hit_bytes", whole(s.device_hit_bytes), "reorders", whole(s.reorders),
            "evicted_prefixes", whole(s.evicted_nodes), "commits", whole(s.commits), "commits_refused",
            whole(s.commits_refused), "corrupt_chunks", whole(s.corrupt_chunks), "io_errors", whole(s.io_errors),
            "io_mode", s.io_mode, "note", engine_note(a->engine));
        json_object_set_new(store, "faults", faults_json(a->store));
        json_t *tiers = json_object_get(all, "tiers");
        json_array_append_new(tiers, tier_json("device", s.device_bytes, a->device_limit));
        json_array_append_new(tiers, tier_json("host", s.host_bytes, a->host_limit));
        json_array_append_new(tiers, tier_json("disk", s.disk_bytes, s.limit_bytes));
        json_object_set_new(all, "store", store);
    }
    reply_json(out, all);
}

typedef struct listing {
    oai_buffer *body;
    bool more;
} listing;

static int list_one(const imp_node_info *n, void *user)
{
    listing *l = user;
    if (l->more) oai_buffer_add(l->body, ",\n", 2);
    l->more = true;
    add_json(l->body, json_pack("{s:I, s:I, s:s, s:s, s:I, s:I, s:I, s:I, s:b, s:b, s:I, s:I}", "id", whole(n->id),
                                "parent", whole(n->parent), "space", n->space, "model", n->model_name, "first_token",
                                whole(n->first_token), "tokens", whole(n->n_tokens), "bytes", whole(n->kv_bytes),
                                "hits", whole(n->hits), "derived", n->derived, "pinned", n->pinned, "created",
                                (json_int_t)n->created_s, "used", (json_int_t)n->used_s));
    return l->body->failed;
}

static void get_prefixes(const api *a, http_reply *out)
{
    static const char head[] = "{\"object\":\"list\",\"data\":[\n", tail[] = "\n]}\n";
    listing l = {&out->body, false};
    out->status = 200;
    oai_buffer_add(&out->body, head, sizeof head - 1);
    int rc = imp_store_list(a->store, list_one, &l);
    oai_buffer_add(&out->body, tail, sizeof tail - 1);
    if (rc < 0) fail_status(out, rc);
}

typedef struct wanted {
    uint64_t id, n_tokens, first_token;
} wanted;

static int find_node(const imp_node_info *n, void *user)
{
    wanted *w = user;
    if (n->id != w->id) return 0;
    w->n_tokens = n->n_tokens;
    w->first_token = n->first_token;
    return 1;
}

/* "N/importance" */
static void get_importance(const api *a, const char *rest, http_reply *out)
{
    wanted w = {0};
    char number[24];
    const char *slash = strchr(rest, '/');
    size_t n = slash ? (size_t)(slash - rest) : 0;
    if (n == 0 || n >= sizeof number || strcmp(slash, "/importance")) {
        fail(out, 404, "not_found", NULL, "there is nothing at this path");
        return;
    }
    memcpy(number, rest, n);
    number[n] = '\0';
    if (!text_parse_count(number, UINT64_MAX, &w.id) || imp_store_list(a->store, find_node, &w) != 1) {
        fail(out, 404, "no_such_prefix", NULL, "no prefix has this number");
        return;
    }
    float *values = malloc(w.n_tokens * sizeof *values);
    int64_t rc = values ? imp_store_importance(a->store, w.id, values, w.n_tokens) : IMP_E_NOMEM;
    if (rc < 0) {
        if (values)
            fail_status(out, rc);
        else
            fail(out, 500, "out_of_memory", NULL, "out of memory");
        free(values);
        return;
    }
    bool any = rc > 0;
    for (uint64_t i = 0; i < w.n_tokens && !any; i++) any = values[i] > 0;
    char text[192];
    int length = snprintf(text, sizeof text,
                          "{\"node\":%" PRIu64 ",\"first_token\":%" PRIu64 ",\"requests\":%" PRId64
                          ",\"source\":\"%s\",\"values\":[",
                          w.id, w.first_token, rc,
                          rc > 0 ? "requests"
                          : any  ? "prefill"
                                 : "none");
    out->status = 200;
    oai_buffer_add(&out->body, text, (size_t)length);
    for (uint64_t i = 0; i < w.n_tokens; i++) {
        length = snprintf(text, sizeof text, "%s%.4g", i ? "," : "", (double)values[i]);
        oai_buffer_add(&out->body, text, (size_t)length);
    }
    oai_buffer_add(&out->body, "]}\n", 3);
    free(values);
}

/* ------------------------------------------------------------------------------------------------ what is asked ----
 */

/* The body, an object. NULL: the reply says what is wrong. */
static json_t *parse_body(const http_request *r, http_reply *out)
{
    json_error_t error;
    json_t *body = json_loadb(r->body, r->n_body, JSON_REJECT_DUPLICATES, &error);
    if (json_is_object(body)) return body;
    char text[256];
    snprintf(text, sizeof text, "the body is not a JSON object%s%.100s", body ? "" : ": ", body ? "" : error.text);
    fail(out, 400, "invalid_json", NULL, text);
    json_decref(body);
    return NULL;
}

/* The first key that isn't among `known`; NULL: there is none. */
static const char *unknown_key(json_t *object, const char *const *known, size_t n_known)
{
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value)
    {
        size_t i = 0;
        while (i < n_known && strcmp(key, known[i])) i++;
        if (i == n_known) return key;
    }
    return NULL;
}

static bool is_node(const json_t *v)
{
    return json_is_integer(v) && json_integer_value(v) > 0;
}

typedef enum edit { PIN, UNPIN, DROP } edit;

static int apply(imp_store *store, edit what, uint64_t node)
{
    return what == DROP ? imp_store_remove(store, node) : imp_store_pin(store, node, what == PIN);
}

static void post_edit(const api *a, const http_request *r, http_reply *out, edit what)
{
    static const char *const known[] = {"node", "nodes", "all"};
    json_t *body = parse_body(r, out);
    if (!body) return;
    json_t *node = json_object_get(body, "node"), *nodes = json_object_get(body, "nodes");
    json_t *all = json_object_get(body, "all");
    const char *unknown = unknown_key(body, known, what == DROP ? 3 : 2);
    bool good = !unknown && (node != NULL) + (nodes != NULL) + (all != NULL) == 1 && (!node || is_node(node)) &&
                (!all || json_is_true(all)) && (!nodes || (json_is_array(nodes) && json_array_size(nodes) > 0));
    for (size_t i = 0; good && i < json_array_size(nodes); i++) good = is_node(json_array_get(nodes, i));
    if (!good) {
        fail(out, 400, "invalid_value", unknown,
             what == DROP
                 ? "wanted: {\"node\": N}, {\"nodes\": [N, ...]} or {\"all\": true}, N as /admin/prefixes has them"
                 : "wanted: {\"node\": N} or {\"nodes\": [N, ...]}, N as /admin/prefixes has them");
        json_decref(body);
        return;
    }
    size_t n = nodes ? json_array_size(nodes) : 1, done = 0;
    int rc = 0;
    json_t *missing = json_array(); /* a node that is dropped takes along what is below it */
    for (size_t i = 0; i < n && (rc == 0 || rc == IMP_E_NOTFOUND); i++) {
        json_t *v = nodes ? json_array_get(nodes, i) : node;
        rc = apply(a->store, what, v ? (uint64_t)json_integer_value(v) : 0);
        if (rc == 0) done++;
        else if (rc == IMP_E_NOTFOUND) json_array_append(missing, v);
    }
    if (rc < 0 && (rc != IMP_E_NOTFOUND || done == 0)) {
        fail_status(out, rc);
        json_decref(missing);
    } else {
        reply_json(out, json_pack("{s:I, s:o}", "done", whole(done), "missing", missing));
    }
    json_decref(body);
}

static void post_reorder(const api *a, http_reply *out)
{
    imp_reorder_report p;
    int rc = imp_store_reorder(a->store, &p);
    if (rc < 0) {
        fail_status(out, rc);
        return;
    }
    reply_json(out,
               json_pack("{s:I, s:I, s:I, s:I}", "segments", whole(p.n_segments), "reordered", whole(p.n_reordered),
                         "bytes_written", whole(p.bytes_written), "freed_bytes", whole(p.freed_bytes)));
}

static void post_gc(const api *a, http_reply *out)
{
    imp_gc_report p;
    int rc = imp_store_gc(a->store, &p);
    if (rc < 0 && rc != IMP_E_FULL) {
        fail_status(out, rc);
        return;
    }
    /* Over the limit: all was done that can be; the rest is pinned or in use. */
    reply_json(out, json_pack("{s:I, s:I, s:I, s:b}", "removed_files", whole(p.removed_files), "freed_bytes",
                              whole(p.freed_bytes), "evicted_prefixes", whole(p.evicted_nodes), "over_limit", rc < 0));
}

/* ------------------------------------------------------------------------------------------------------- warming ----
 */

/* What a warm asks for beside the prompt. */
typedef struct warm_spec {
    const key_tenant *tenant; /* NULL: clients have no keys */
    bool pin;
} warm_spec;

/* Take `tenant` and `pin` out of the body. False: the reply says what is wrong. */
static bool take_spec(const api *a, json_t *body, warm_spec *spec, http_reply *out)
{
    json_t *tenant = json_object_get(body, "tenant"), *pin = json_object_get(body, "pin");
    *spec = (warm_spec){.pin = json_is_true(pin)};
    if (pin && !json_is_boolean(pin)) {
        fail(out, 400, "invalid_type", "pin", "`pin` wants true or false");
        return false;
    }
    if (tenant && !json_is_string(tenant)) {
        fail(out, 400, "invalid_type", "tenant", "`tenant` wants a name from the file of API keys");
        return false;
    }
    if (tenant && !(spec->tenant = key_ring_named(a->keys, json_string_value(tenant)))) {
        fail(out, 404, "no_such_tenant", "tenant", "no API key has this name");
        return false;
    }
    if (!tenant && key_ring_size(a->keys) > 0) {
        fail(out, 400, "tenant_missing", "tenant",
             "each API key has prefixes of its own: say whose this is (`tenant`, a name from the file of keys)");
        return false;
    }
    json_object_del(body, "tenant");
    json_object_del(body, "pin");
    return true;
}

/* A job for what the body asks, computed exactly and in full, with one token of an answer. NULL: the reply says why. */
static job *make_job(const api *a, const http_request *r, json_t *body, const key_tenant *tenant, http_reply *out)
{
    oai_request q;
    oai_error e = {0};
    app_system system;
    http_request mine = *r;
    mine.tenant = tenant;
    job *j = NULL;
    char *text = json_dumps(body, JSON_COMPACT);
    if (!text) oai_fail(&e, 500, "out_of_memory", NULL, "out of memory");
    if (text &&
        oai_request_parse(json_object_get(body, "messages") != NULL, text, strlen(text), &a->limits, &q, &e) == 0) {
        q.max_tokens = 1;
        q.n_logprobs = -1;
        q.impress.full_load = true;
        q.impress.cache_off = false;
        j = api_make_job(a, &mine, &q, &system, &e);
        oai_request_free(&q);
    }
    if (j) {
        j->request.store_new = j->keep_now = true;
        j->request.recompute = false; /* with the system recomp: what is stored would be computed, and not be found */
    } else {
        http_error(out, &e);
    }
    free(text);
    return j;
}

/* Until the engine has let go of the job: what it computed is handed over then. */
static job_end wait_for(const api *a, const http_request *r, job *j)
{
    job_news news = {0};
    job_end end = JOB_RUNNING;
    while (end == JOB_RUNNING) {
        if (job_take(j, LOOK_MS, &news)) end = news.end;
        job_news_free(&news);
        if (end != JOB_RUNNING || !http_gone(r) || atomic_load(&j->cancelled)) continue;
        job_cancel(j);
        engine_wake(a->engine);
    }
    while (atomic_load(&j->refs) > 1) nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    return end;
}

static void reply_warmed(const api *a, http_request *r, job *j, bool pin, http_reply *out)
{
    oai_error e = {0};
    job_result result;
    job_end end = wait_for(a, r, j);
    job_get_result(j, &result, &e);
    if (end == JOB_CANCELLED) oai_fail(&e, 499, "cancelled", NULL, "the client went away");
    if (end == JOB_CANCELLED || end == JOB_FAILED) {
        http_error(out, &e);
        return;
    }
    if (!j->space) {
        fail(out, 409, "not_stored", NULL, *engine_note(a->engine) ? engine_note(a->engine) : "the store isn't used");
        return;
    }
    const char *note = imp_store_flush(a->store) < 0 ? imp_last_error() : "";
    char line[256];
    snprintf(line, sizeof line, "%s", note);
    uint64_t node;
    size_t n = app_stored_tokens(j->space, j->tokens, j->n_tokens, &node);
    bool pinned = pin && node && app_is_stored(n, j->n_tokens);
    int rc = pinned ? imp_store_pin(a->store, node, 1) : 0;
    if (rc < 0) {
        fail_status(out, rc);
        return;
    }
    reply_json(out, json_pack("{s:I, s:I, s:I, s:I, s:I, s:b, s:f, s:s}", "prompt_tokens", whole(j->n_tokens),
                              "cached_tokens", whole(result.live_tokens + result.stored_tokens), "computed_tokens",
                              whole(result.computed_tokens), "stored_tokens", whole(n), "node", whole(node), "pinned",
                              pinned, "ms", (double)result.total_ns * 1e-6, "note", line));
    json_object_set_new(r->log, "stored_tokens", json_integer(whole(n)));
}

/* A body that is the prompt; what else a warm asks for stands behind the path. */
static json_t *body_of_text(const http_request *r)
{
    const char *tenant = http_argument(r, "tenant"), *pin = http_argument(r, "pin");
    json_t *body = json_pack("{s:s%}", "prompt", r->body, r->n_body);
    if (body && tenant) json_object_set_new(body, "tenant", json_string(tenant));
    bool is_yes = pin && !strcmp(pin, "true"), is_no = pin && !strcmp(pin, "false");
    /* What is neither stays a text, which is refused as in any other body. */
    if (body && pin) json_object_set_new(body, "pin", is_yes || is_no ? json_boolean(is_yes) : json_string(pin));
    return body;
}

static void post_warm(const api *a, http_request *r, http_reply *out, bool text)
{
    json_t *body = text ? body_of_text(r) : parse_body(r, out);
    if (!body) {
        if (text) fail(out, 400, "invalid_utf8", NULL, "the text is not UTF-8, or holds a NUL");
        return;
    }
    warm_spec spec;
    job *j = NULL;
    oai_error e = {0};
    if (take_spec(a, body, &spec, out)) j = make_job(a, r, body, spec.tenant, out);
    json_decref(body);
    if (!j) return;
    if (engine_submit(a->engine, j, &e, &out->retry_after) == 0) {
        out->retry_after = 0;
        reply_warmed(a, r, j, spec.pin, out);
    } else {
        http_error(out, &e);
        job_release(j); /* the engine's reference */
    }
    job_release(j);
}

/* -------------------------------------------------------------------------------------------------------- paths ----
 */

typedef enum verb { STATS, PREFIXES, IMPORTANCE, WARM, WARM_TEXT, EDIT_PIN, EDIT_UNPIN, EDIT_DROP, REORDER, GC } verb;

static const struct {
    const char *path, *method;
    verb verb;
} paths[] = {
    {"stats", "GET", STATS},          {"prefixes", "GET", PREFIXES},
    {"prefixes/", "GET", IMPORTANCE}, {"warm", "POST", WARM},
    {"warm/text", "POST", WARM_TEXT}, {"pin", "POST", EDIT_PIN},
    {"unpin", "POST", EDIT_UNPIN},    {"drop", "POST", EDIT_DROP},
    {"reorder", "POST", REORDER},     {"gc", "POST", GC},
};

static void do_verb(const api *a, http_request *r, http_reply *out, verb v, const char *rest)
{
    if (!a->store && v != STATS) {
        fail(out, 409, "no_store", NULL, "this server has no store");
        return;
    }
    switch (v) {
    case STATS: get_stats(a, out); break;
    case PREFIXES: get_prefixes(a, out); break;
    case IMPORTANCE: get_importance(a, rest, out); break;
    case WARM: post_warm(a, r, out, false); break;
    case WARM_TEXT: post_warm(a, r, out, true); break;
    case EDIT_PIN: post_edit(a, r, out, PIN); break;
    case EDIT_UNPIN: post_edit(a, r, out, UNPIN); break;
    case EDIT_DROP: post_edit(a, r, out, DROP); break;
    case REORDER: post_reorder(a, out); break;
    case GC: post_gc(a, out); break;
    }
}

void admin_handle(void *user, http_request *r, http_reply *out)
{
    const char *path = r->path + strlen("/admin/");
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        size_t n = strlen(paths[i].path);
        bool below = paths[i].path[n - 1] == '/';
        if (below ? strncmp(path, paths[i].path, n) : strcmp(path, paths[i].path)) continue;
        bool get = !strcmp(paths[i].method, "GET"), head = get && !strcmp(r->method, "HEAD");
        if (strcmp(r->method, paths[i].method) && !head) {
            out->allow = paths[i].method;
            fail(out, 405, "method_not_allowed", NULL, "this path wants another method");
            return;
        }
        json_object_set_new(r->log, "admin", json_string(below ? "importance" : paths[i].path));
        do_verb(user, r, out, paths[i].verb, path + n);
        return;
    }
    fail(out, 404, "not_found", NULL, "there is nothing at this path");
}
