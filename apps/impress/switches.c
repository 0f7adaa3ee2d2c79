#include "switches.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text.h"

/* ---- the table */

typedef enum value_kind { VALUE_NAME, VALUE_COUNT, VALUE_REAL } value_kind;

/* For which systems a switch has a meaning. */
enum {
    FOR_ALL = 1u,
    FOR_CHOOSING = 2u,
    FOR_PROBE = 4u,
    FOR_SKETCH = 8u,
    FOR_CHUNKS = 16u,
    FOR_STATIC = 32u
};

enum { MAX_VALUES = 8 };

static const struct row {
    const char *name;
    value_kind kind;
    unsigned meaning;
    const char *values[MAX_VALUES]; /* of a VALUE_NAME, by number; NULL ends */
    const char *range;              /* of the others, for people */
    double least, most;
} table[SWITCH_COUNT] = {
    [SWITCH_IDENTIFY] = {"identify", VALUE_NAME, FOR_ALL,
                         {"none", "all-keys", "probe", "static", "chunks", "sketch", "random"}, NULL, 0, 0},
    [SWITCH_ORDER] = {"order", VALUE_NAME, FOR_ALL, {"token", "importance", "core"}, NULL, 0, 0},
    [SWITCH_REST] = {"rest", VALUE_NAME, FOR_ALL, {"raw", "q8", "k8v4", "q4", "f16"}, NULL, 0, 0}, /* f16: raw */
    [SWITCH_CHUNK] = {"chunk", VALUE_COUNT, FOR_ALL, {NULL}, "a multiple of 16 from 16 to 256", 16, 256},
    [SWITCH_CACHE] = {"cache", VALUE_NAME, FOR_ALL, {"none", "lru", "lfu", "score", "attention", "aged"}, NULL, 0, 0},
    [SWITCH_PREFETCH] = {"prefetch", VALUE_NAME, FOR_ALL, {"none", "layers", "core", "chunks"}, NULL, 0, 0},
    [SWITCH_KEEP_FIRST] = {"keep-first", VALUE_COUNT, FOR_CHOOSING, {NULL}, "0 or more", 0, 1 << 30},
    [SWITCH_KEEP_LAST] = {"keep-last", VALUE_COUNT, FOR_CHOOSING, {NULL}, "0 or more", 0, 1 << 30},
    [SWITCH_QUERY_ROWS] = {"query-rows", VALUE_COUNT, FOR_CHOOSING, {NULL}, "at least 1", 1, 1 << 30},
    [SWITCH_SKETCH_ROWS] = {"sketch-rows", VALUE_COUNT, FOR_SKETCH, {NULL}, "at least 1", 1, 1 << 30},
    [SWITCH_PROBE_HEADS] = {"probe-heads", VALUE_COUNT, FOR_PROBE, {NULL}, "at least 1", 1, 1 << 20},
    [SWITCH_PROBE_SPREAD] = {"probe-spread", VALUE_NAME, FOR_PROBE, {"no", "yes"}, NULL, 0, 0},
    [SWITCH_PROBE_ALPHA] = {"probe-alpha", VALUE_REAL, FOR_PROBE, {NULL}, "0 or more", 0, 1e6},
    [SWITCH_PROBE_SIMILARITY] = {"probe-similarity", VALUE_REAL, FOR_PROBE, {NULL}, "0 to 1", 0, 1},
    [SWITCH_BYTES] = {"bytes", VALUE_REAL, FOR_SKETCH, {NULL}, "a share over 0 and up to 1", 1e-6, 1},
    [SWITCH_HISTORY_WEIGHT] = {"history-weight", VALUE_REAL, FOR_SKETCH, {NULL}, "0 or more", 0, 1e6},
    [SWITCH_PERIOD] = {"period", VALUE_COUNT, FOR_CHUNKS, {NULL}, "at least 1", 1, 1024},
    [SWITCH_RANK] = {"rank", VALUE_NAME, FOR_STATIC, {"prefill", "reconstruction"}, NULL, 0, 0},
};

/* Of thresholds: what 0 stands for, where 0 itself would mean the default. */
static const float least_threshold = 1e-6f;

__attribute__((format(printf, 2, 3))) static int fail(char error[SWITCH_ERROR_BYTES], const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(error, SWITCH_ERROR_BYTES, fmt, ap);
    va_end(ap);
    for (char *c = error; *c; c++) /* what it quotes may be of several lines */
        if (*c == '\n' || *c == '\r') *c = ' ';
    return -1;
}

const char *switch_name(size_t i) { return i < SWITCH_COUNT ? table[i].name : NULL; }

void switch_values(switch_id i, char *buf, size_t n)
{
    const struct row *r = &table[i];
    if (r->kind != VALUE_NAME) {
        snprintf(buf, n, "%s", r->range);
        return;
    }
    buf[0] = '\0';
    for (size_t v = 0; v < MAX_VALUES && r->values[v]; v++)
        snprintf(buf + strlen(buf), n - strlen(buf), "%s%s", v ? ", " : "", r->values[v]);
}

const char *switch_order_name(imp_order order)
{
    return (unsigned)order <= IMP_ORDER_CORE ? table[SWITCH_ORDER].values[order] : "?";
}

const char *switch_rest_name(imp_rest rest)
{
    return (unsigned)rest <= IMP_REST_Q4 ? table[SWITCH_REST].values[rest] : "?";
}

/* ---- values */

typedef struct value {
    unsigned number; /* of a name, or a count */
    float real;
} value;

static int parse(const char *where, switch_id i, const char *text, value *out, char error[SWITCH_ERROR_BYTES])
{
    const struct row *r = &table[i];
    double real = 0;
    uint64_t count = 0;
    char values[200];
    *out = (value){0};
    if (r->kind == VALUE_NAME) {
        for (unsigned v = 0; v < MAX_VALUES && r->values[v]; v++) {
            if (strcmp(text, r->values[v]) != 0) continue;
            out->number = i == SWITCH_REST && v > IMP_REST_Q4 ? IMP_REST_RAW : v;
            return 0;
        }
        switch_values(i, values, sizeof values);
        return fail(error, "%s: `%s` is not one of %s", where, text, values);
    }
    bool ok = r->kind == VALUE_COUNT ? text_parse_count(text, 1u << 30, &count) : text_parse_real(text, &real);
    if (r->kind == VALUE_COUNT) real = (double)count;
    ok = ok && real >= r->least && real <= r->most && (i != SWITCH_CHUNK || count % 16 == 0);
    if (!ok) return fail(error, "%s wants %s, not `%s`", where, r->range, text);
    out->number = (unsigned)count;
    out->real = (float)real;
    return 0;
}

static void set(imp_load_opts *o, switch_id i, value v)
{
    switch (i) {
    case SWITCH_IDENTIFY: o->switches.identify = (imp_identify)v.number; break;
    case SWITCH_ORDER: o->switches.order = (imp_order)v.number; break;
    case SWITCH_REST: o->switches.rest = (imp_rest)v.number; break;
    case SWITCH_CHUNK: o->switches.chunk_tokens = v.number; break;
    case SWITCH_CACHE: o->switches.cache = (imp_cache)v.number; break;
    case SWITCH_PREFETCH: o->switches.prefetch = (imp_prefetch)v.number; break;
    case SWITCH_KEEP_FIRST: o->n_keep_first = v.number; break;
    case SWITCH_KEEP_LAST: o->n_keep_last = v.number; break;
    case SWITCH_QUERY_ROWS: o->max_query_rows = v.number; break;
    case SWITCH_SKETCH_ROWS: o->max_sketch_rows = v.number; break;
    case SWITCH_PROBE_HEADS: o->n_probe_heads = v.number; break;
    case SWITCH_PROBE_SPREAD: o->probe_spread = v.number; break;
    case SWITCH_PROBE_ALPHA: o->probe_alpha = v.real > 0 ? v.real : least_threshold; break;
    case SWITCH_PROBE_SIMILARITY: o->probe_similarity = v.real > 0 ? v.real : least_threshold; break;
    case SWITCH_BYTES: o->byte_share = v.real; break;
    case SWITCH_HISTORY_WEIGHT: o->history_weight = v.real > 0 ? v.real : -1; break;
    case SWITCH_PERIOD: o->period = v.number; break;
    case SWITCH_RANK: o->rank = (imp_rank)v.number; break;
    case SWITCH_COUNT: break;
    }
}

/* The values that zeros stand for in imp_load_opts, so that one that is given and the same is no difference. */
static void fill_defaults(imp_load_opts *o)
{
    if (!o->max_query_rows) o->max_query_rows = 32;
    if (!o->max_sketch_rows) o->max_sketch_rows = 8;
    if (!o->n_probe_heads) o->n_probe_heads = 3;
    if (!(o->probe_alpha > 0)) o->probe_alpha = 0.6f;
    if (o->history_weight == 0) o->history_weight = 0.5f;
    if (!o->period) o->period = 4;
}

const char *switch_value(const app_system *s, switch_id i, char buf[32])
{
    const imp_load_opts *o = &s->load;
    const imp_switches *w = &o->switches;
    const unsigned numbers[SWITCH_COUNT] = {
        [SWITCH_IDENTIFY] = w->identify, [SWITCH_ORDER] = w->order, [SWITCH_REST] = w->rest,
        [SWITCH_CHUNK] = w->chunk_tokens, [SWITCH_CACHE] = w->cache, [SWITCH_PREFETCH] = w->prefetch,
        [SWITCH_KEEP_FIRST] = o->n_keep_first, [SWITCH_KEEP_LAST] = o->n_keep_last,
        [SWITCH_QUERY_ROWS] = o->max_query_rows, [SWITCH_SKETCH_ROWS] = o->max_sketch_rows,
        [SWITCH_PROBE_HEADS] = o->n_probe_heads,
        [SWITCH_PROBE_SPREAD] = o->probe_spread, [SWITCH_PERIOD] = o->period, [SWITCH_RANK] = o->rank,
    };
    double real = i == SWITCH_PROBE_ALPHA        ? (double)o->probe_alpha
                  : i == SWITCH_PROBE_SIMILARITY ? (double)o->probe_similarity
                  : i == SWITCH_BYTES            ? (double)o->byte_share
                                                 : (double)o->history_weight;
    if (real < 0 || real == (double)least_threshold) real = 0;
    if (table[i].kind == VALUE_NAME) snprintf(buf, 32, "%s", table[i].values[numbers[i]]);
    else if (table[i].kind == VALUE_COUNT) snprintf(buf, 32, "%u", numbers[i]);
    else if (i == SWITCH_BYTES && real == 0) snprintf(buf, 32, "-");
    else snprintf(buf, 32, "%g", real);
    return buf;
}

/* ---- systems */

static unsigned meanings(imp_identify identify)
{
    static const unsigned own[] = {
        [IMP_IDENTIFY_NONE] = 0,
        [IMP_IDENTIFY_ALL_KEYS] = FOR_CHOOSING,
        [IMP_IDENTIFY_PROBE] = FOR_CHOOSING | FOR_PROBE,
        [IMP_IDENTIFY_STATIC] = FOR_CHOOSING | FOR_STATIC,
        [IMP_IDENTIFY_CHUNKS] = FOR_CHOOSING | FOR_CHUNKS,
        [IMP_IDENTIFY_SKETCH] = FOR_CHOOSING | FOR_SKETCH,
        [IMP_IDENTIFY_RANDOM] = FOR_CHOOSING,
    };
    return FOR_ALL | own[identify];
}

static bool find_switch(const char *name, size_t n, switch_id *out)
{
    for (size_t i = 0; i < SWITCH_COUNT; i++) {
        if (strlen(table[i].name) != n || memcmp(table[i].name, name, n) != 0) continue;
        *out = (switch_id)i;
        return true;
    }
    return false;
}

/* The switches behind the preset's name, "+NAME=VALUE...", over those of `given`; `text` is cut into pieces. */
static int read_text(const char *where, char *text, const char **values, bool *inside, char error[SWITCH_ERROR_BYTES])
{
    char known[300] = "";
    for (char *next = text; next;) {
        char *s = next;
        next = strchr(s, '+');
        if (next) *next++ = '\0';
        char *eq = strchr(s, '=');
        switch_id i;
        if (!find_switch(s, eq ? (size_t)(eq - s) : strlen(s), &i)) {
            for (size_t k = 0; k < SWITCH_COUNT; k++)
                snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", k ? ", " : "", table[k].name);
            return fail(error, "%s: no switch `%.*s`; there are: %s", where, (int)strcspn(s, "="), s, known);
        }
        if (!eq && i != SWITCH_PROBE_SPREAD) return fail(error, "%s: %s wants a value: %s=VALUE", where, s, s);
        values[i] = eq ? eq + 1 : "yes";
        inside[i] = true;
    }
    return 0;
}

static void add_to_name(app_system *s, switch_id i)
{
    char v[32];
    switch_value(s, i, v);
    size_t n = strlen(s->name);
    snprintf(s->name + n, sizeof s->name - n, "+%s=%s", table[i].name, !strncmp(v, "0.", 2) ? v + 1 : v);
}

/* Apply the values, identification first: what it is decides which others have a meaning. */
static int apply(const char *where, app_system *s, const char *const *values, const bool *inside,
                 char error[SWITCH_ERROR_BYTES])
{
    for (size_t k = 0; k < SWITCH_COUNT; k++) {
        switch_id i = (switch_id)k;
        char place[96], before[32], after[32];
        value v;
        if (!values[i]) continue;
        if (inside[i]) snprintf(place, sizeof place, "%s: %s", where, table[i].name);
        else snprintf(place, sizeof place, "--%s", table[i].name);
        if (parse(place, i, values[i], &v, error) < 0) return -1;
        if (!(meanings(s->load.switches.identify) & table[i].meaning)) {
            if (inside[i]) return fail(error, "%s has no meaning for %s", place, s->name);
            s->unused |= 1u << i;
            continue;
        }
        switch_value(s, i, before);
        set(&s->load, i, v);
        switch_value(s, i, after);
        if (strcmp(before, after) != 0) add_to_name(s, i);
    }
    return 0;
}

int app_system_make(const char *where, const char *text, const switch_settings *given, double retention,
                    app_system *out, char error[SWITCH_ERROR_BYTES])
{
    const char *values[SWITCH_COUNT] = {NULL};
    bool inside[SWITCH_COUNT] = {false};
    memset(out, 0, sizeof *out);
    imp_load_opts_init(&out->load);
    fill_defaults(&out->load);

    char *copy = strdup(text), *plus = copy ? strchr(copy, '+') : NULL;
    int rc = copy ? 0 : fail(error, "out of memory");
    if (plus) *plus = '\0';
    if (rc == 0) {
        snprintf(out->preset, sizeof out->preset, "%s", copy);
        snprintf(out->name, sizeof out->name, "%s", out->preset);
        out->recompute = !strcmp(copy, "recomp");
        if (out->recompute && plus) rc = fail(error, "%s: recomp loads nothing and has no switches", where);
        else if (!out->recompute && imp_system_preset(copy, &out->load.switches) < 0)
            rc = fail(error, "%s: %s, and recomp", where, imp_last_error());
    }
    if (rc == 0 && !out->recompute) {
        for (size_t i = 0; given && i < SWITCH_COUNT; i++) values[i] = given->text[i];
        if (plus) rc = read_text(where, plus + 1, values, inside, error);
        if (rc == 0) rc = apply(where, out, values, inside, error);
    }
    out->chooses = !out->recompute && out->load.switches.identify != IMP_IDENTIFY_NONE;
    if (out->chooses) out->load.retention = retention;
    free(copy);
    return rc;
}

void app_system_store(const app_system *s, imp_store_opts *opts)
{
    if (s->recompute) return; /* what is stored on the way is as the options say */
    imp_store_opts_switches(opts, &s->load.switches);
    opts->n_probe_heads = s->load.n_probe_heads;
    opts->probe_spread = s->load.probe_spread;
}

void app_system_request(const app_system *s, imp_llama_request *request)
{
    request->recompute = s->recompute;
    request->load = s->load;
}

const char *app_system_combination(const app_system *s, char buf[64])
{
    const imp_switches *w = &s->load.switches;
    char kept[40] = "";
    if (w->identify == IMP_IDENTIFY_PROBE)
        snprintf(kept, sizeof kept, "-probe%u%s", s->load.n_probe_heads, s->load.probe_spread ? "s" : "");
    if (w->identify == IMP_IDENTIFY_SKETCH) snprintf(kept, sizeof kept, "-sketch");
    const char *rest = w->rest == IMP_REST_RAW ? "f16" : switch_rest_name(w->rest);
    snprintf(buf, 64, "%s-%s-%u%s", switch_order_name(w->order), rest, w->chunk_tokens, kept);
    return buf;
}

void app_system_notes(const app_system *systems, size_t n)
{
    unsigned unused = n ? ~0u : 0;
    for (size_t i = 0; i < n; i++) unused &= systems[i].unused;
    for (size_t i = 0; i < SWITCH_COUNT; i++) {
        if (unused >> i & 1)
            fprintf(stderr, "impress: note: --%s has no meaning for %s\n", table[i].name,
                    n == 1 ? systems[0].preset : "these systems");
    }
}

int switch_store_options(const switch_settings *given, imp_store_opts *opts, char error[SWITCH_ERROR_BYTES])
{
    static const switch_id ids[] = {SWITCH_ORDER, SWITCH_REST, SWITCH_CHUNK};
    for (size_t k = 0; k < sizeof ids / sizeof *ids; k++) {
        const char *text = given->text[ids[k]];
        char where[32];
        value v;
        if (!text) continue;
        snprintf(where, sizeof where, "--%s", table[ids[k]].name);
        if (parse(where, ids[k], text, &v, error) < 0) return -1;
        if (ids[k] == SWITCH_ORDER) opts->order = (imp_order)v.number;
        if (ids[k] == SWITCH_REST) opts->rest = (imp_rest)v.number;
        if (ids[k] == SWITCH_CHUNK) opts->chunk_tokens = v.number;
    }
    return 0;
}
