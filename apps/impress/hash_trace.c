#include "hash_trace.h"

#include <errno.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint32_t none = UINT32_MAX; /* before a first block */

typedef struct known_id {
    uint64_t id;
    uint32_t number, before; /* the block in front of it */
    bool taken;
} known_id;

typedef struct reader {
    const char *path;
    char *error;
    unsigned line;
    uint32_t block_tokens;
    replay_trace *t;
    size_t cap_requests, cap_uses;
    known_id *ids; /* a table, a half full at most */
    size_t n_slots;
    double last_time;
} reader;

__attribute__((format(printf, 2, 3))) static int fail(reader *r, const char *fmt, ...)
{
    int n = r->line ? snprintf(r->error, HASH_TRACE_ERROR_BYTES, "%s:%u: ", r->path, r->line)
                    : snprintf(r->error, HASH_TRACE_ERROR_BYTES, "%s: ", r->path);
    va_list ap;
    va_start(ap, fmt);
    if (n >= 0 && n < HASH_TRACE_ERROR_BYTES) vsnprintf(r->error + n, HASH_TRACE_ERROR_BYTES - (size_t)n, fmt, ap);
    va_end(ap);
    r->error[strcspn(r->error, "\r\n")] = '\0';
    return -1;
}

static known_id *find(known_id *ids, size_t n_slots, uint64_t id)
{
    size_t at = (size_t)((id * UINT64_C(0x9e3779b97f4a7c15)) >> 20) & (n_slots - 1);
    while (ids[at].taken && ids[at].id != id) at = (at + 1) & (n_slots - 1);
    return &ids[at];
}

static int grow_ids(reader *r)
{
    size_t n = r->n_slots ? 2 * r->n_slots : 1024;
    known_id *ids = calloc(n, sizeof *ids);
    if (!ids) return fail(r, "out of memory");
    for (size_t i = 0; i < r->n_slots; i++)
        if (r->ids[i].taken) *find(ids, n, r->ids[i].id) = r->ids[i];
    free(r->ids);
    r->ids = ids;
    r->n_slots = n;
    return 0;
}

static int add_use(reader *r, uint64_t id, uint32_t *before)
{
    replay_trace *t = r->t;
    if (2 * (t->n_blocks + 1) > r->n_slots && grow_ids(r) < 0) return -1;
    known_id *k = find(r->ids, r->n_slots, id);
    if (!k->taken) *k = (known_id){id, (uint32_t)t->n_blocks++, *before, true};
    else if (k->before != *before)
        return fail(r, "block %llu doesn't stand behind the one it stood behind before", (unsigned long long)id);
    if (t->n_uses == r->cap_uses) {
        size_t cap = r->cap_uses ? 2 * r->cap_uses : 4096;
        uint32_t *blocks = cap < UINT32_MAX ? realloc(t->blocks, cap * sizeof *blocks) : NULL;
        if (!blocks) return fail(r, "out of memory");
        t->blocks = blocks;
        r->cap_uses = cap;
    }
    t->blocks[t->n_uses++] = k->number;
    *before = k->number;
    return 0;
}

static int read_number(reader *r, const json_t *o, const char *name, double *out)
{
    const json_t *v = json_object_get(o, name);
    if (!json_is_number(v)) return fail(r, v ? "`%s` is not a number" : "`%s` is missing", name);
    *out = json_number_value(v);
    return *out >= 0 ? 0 : fail(r, "`%s` is below 0", name);
}

static int add_request(reader *r, const json_t *o)
{
    replay_trace *t = r->t;
    double time = 0, input = 0, output = 0;
    if (!json_is_object(o)) return fail(r, "not a JSON object");
    if (read_number(r, o, "timestamp", &time) < 0 || read_number(r, o, "input_length", &input) < 0 ||
        read_number(r, o, "output_length", &output) < 0)
        return -1;
    if (time < r->last_time) return fail(r, "`timestamp` goes back from %.0f to %.0f", r->last_time, time);
    r->last_time = time;
    const json_t *ids = json_object_get(o, "hash_ids");
    size_t n = json_array_size(ids);
    if (!json_is_array(ids)) return fail(r, "`hash_ids` is missing or not an array");
    if (n == 0) return fail(r, "`hash_ids` is empty");
    if (!(input < 1e9) || input < (double)n) return fail(r, "%zu blocks for %.0f tokens", n, input);

    if (t->n_requests + 2 > r->cap_requests) {
        size_t cap = r->cap_requests ? 2 * r->cap_requests : 1024;
        uint32_t *first = realloc(t->first, cap * sizeof *first);
        if (!first) return fail(r, "out of memory");
        t->first = first;
        r->cap_requests = cap;
    }
    t->first[t->n_requests] = (uint32_t)t->n_uses;
    uint32_t before = none, least = (uint32_t)(((size_t)input + n - 1) / n);
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(ids, i);
        if (!json_is_integer(v) || json_integer_value(v) < 0) return fail(r, "entry %zu of `hash_ids` is no id", i);
        if (add_use(r, (uint64_t)json_integer_value(v), &before) < 0) return -1;
    }
    if (least > r->block_tokens) r->block_tokens = least;
    t->first[++t->n_requests] = (uint32_t)t->n_uses;
    return 0;
}

int hash_trace_read(const char *path, uint32_t block_tokens, replay_trace *out, char error[HASH_TRACE_ERROR_BYTES])
{
    reader r = {.path = path, .error = error, .t = out};
    memset(out, 0, sizeof *out);
    *error = '\0';
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    FILE *f = fopen(path, "r");
    int rc = f ? 0 : fail(&r, "%s", strerror(errno));
    while (rc == 0 && (n = getline(&line, &cap, f)) >= 0) {
        r.line++;
        if (line[strspn(line, " \t\r\n")] == '\0' && strlen(line) == (size_t)n) continue;
        json_error_t at;
        json_t *o = json_loadb(line, (size_t)n, JSON_REJECT_DUPLICATES, &at);
        rc = o ? add_request(&r, o) : fail(&r, "not JSON: %s (column %d)", at.text, at.column);
        json_decref(o);
    }
    r.line = 0;
    if (rc == 0 && ferror(f)) rc = fail(&r, "%s", strerror(errno));
    if (rc == 0 && out->n_requests == 0) rc = fail(&r, "no requests");
    if (rc == 0 && block_tokens && block_tokens < r.block_tokens)
        rc = fail(&r, "blocks of %u tokens don't hold the prompts, %u do", block_tokens, r.block_tokens);
    out->block_tokens = block_tokens ? block_tokens : r.block_tokens;
    free(line);
    free(r.ids);
    if (f) fclose(f);
    if (rc < 0) replay_trace_free(out);
    return rc;
}
