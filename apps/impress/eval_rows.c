#include "eval_rows.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

/* Every row begins with it: a file without it isn't ours, and nothing in it is touched. */
static const char row_head[] = "{\"eval\":1,";

typedef struct entry {
    uint64_t hash;
    char *key;
    eval_outcome outcome;
} entry;

struct eval_rows {
    char *path;
    int fd; /* -1: memory only */
    entry **items;
    size_t n, cap;
};

__attribute__((format(printf, 2, 3))) static int fail(char error[EVAL_ERROR_BYTES], const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(error, EVAL_ERROR_BYTES, fmt, ap);
    va_end(ap);
    return -1;
}

uint64_t eval_hash(uint64_t hash, const void *bytes, size_t n)
{
    const unsigned char *p = bytes;
    for (size_t i = 0; i < n; i++) hash = (hash ^ p[i]) * UINT64_C(0x100000001b3);
    return hash;
}

static char *key_text(const eval_key *k)
{
    char *text = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    if (!f) return NULL;
    fprintf(f, "%s\n%" PRIu64 "\n%s\n%s\n%s\n%.6f\n%" PRId64 "\n%s\n%016" PRIx64, k->model, k->model_bytes, k->settings,
            k->task, k->system, k->retention, k->shots, k->id, k->prompt_hash);
    if (fclose(f) == 0) return text;
    free(text);
    return NULL;
}

static const entry *find(const eval_rows *r, const char *key)
{
    uint64_t hash = eval_hash(EVAL_HASH_SEED, key, strlen(key));
    for (size_t i = 0; i < r->n; i++)
        if (r->items[i]->hash == hash && !strcmp(r->items[i]->key, key)) return r->items[i];
    return NULL;
}

/* Takes `key` over, also on failure. */
static int keep(eval_rows *r, char *key, const eval_outcome *outcome)
{
    entry *e = key ? malloc(sizeof *e) : NULL;
    if (e && r->n == r->cap) {
        size_t cap = r->cap ? 2 * r->cap : 256;
        entry **items = realloc(r->items, cap * sizeof *items);
        if (items) {
            r->items = items;
            r->cap = cap;
        } else {
            free(e);
            e = NULL;
        }
    }
    if (!e) {
        free(key);
        return -1;
    }
    *e = (entry){.hash = eval_hash(EVAL_HASH_SEED, key, strlen(key)), .key = key, .outcome = *outcome};
    r->items[r->n++] = e;
    return 0;
}

/* ---- rows as text */

static int read_row(eval_rows *r, const char *line, size_t n_bytes, unsigned number, char error[EVAL_ERROR_BYTES])
{
    json_error_t at;
    json_t *o = json_loadb(line, n_bytes, 0, &at);
    if (!o) return fail(error, "%s:%u: not a row of eval: %s", r->path, number, at.text);

    const char *hash_text = NULL;
    json_int_t version = 0, model_bytes = 0, shots = -1, answer = 0, sum = 0, norm = 0, identify = 0, read = 0,
               selected = 0, fallback = 0;
    json_t *shots_value = NULL;
    eval_key key = {0};
    eval_outcome outcome = {0};
    int rc = 0;
    static const char format[] = "{s:I,s:s,s:I,s:s,s:s,s:s,s:F,s:o,s:s,s:s,s:I,s:I,s:I,s:F,s:F,s:I,s:I,s?I,s?I}";
    if (json_unpack_ex(o, &at, 0, format, "eval",
                       &version, "model", &key.model, "model_bytes", &model_bytes, "settings", &key.settings, "task",
                       &key.task, "system", &key.system, "retention", &key.retention, "shots", &shots_value, "id",
                       &key.id, "prompt", &hash_text, "answer", &answer, "choice_sum", &sum, "choice_norm", &norm,
                       "kl", &outcome.kl, "mass", &outcome.mass, "identify_bytes", &identify, "bytes_read",
                       &read, "selected_layers", &selected, "fallback_layers", &fallback) != 0) {
        rc = fail(error, "%s:%u: not a row of eval: %s", r->path, number, at.text);
    } else if (version != 1) {
        rc = fail(error, "%s:%u: rows of version %lld are not known here", r->path, number, (long long)version);
    } else if ((answer | sum | norm | identify | read | selected | fallback | model_bytes) < 0) {
        rc = fail(error, "%s:%u: not a row of eval: a negative number", r->path, number);
    } else {
        if (json_is_integer(shots_value)) shots = json_integer_value(shots_value);
        key.model_bytes = (uint64_t)model_bytes;
        key.shots = shots;
        key.prompt_hash = strtoull(hash_text, NULL, 16);
        outcome.answer = (size_t)answer;
        outcome.choice_sum = (size_t)sum;
        outcome.choice_norm = (size_t)norm;
        outcome.identify_bytes = (uint64_t)identify;
        outcome.bytes_read = (uint64_t)read;
        outcome.selected = (uint64_t)selected;
        outcome.fallback = (uint64_t)fallback;
        char *text = key_text(&key);
        if (text && find(r, text)) free(text); /* two runs may have had the same row to do */
        else if (keep(r, text, &outcome) != 0) rc = fail(error, "out of memory reading %s", r->path);
    }
    json_decref(o);
    return rc;
}

static char *row_text(const eval_key *key, const eval_outcome *out, const eval_detail *detail)
{
    json_t *logprobs = json_array();
    int bad = !logprobs;
    for (size_t i = 0; i < detail->n_choices; i++)
        bad |= json_array_append_new(logprobs, json_real(detail->logprobs[i]));
    char hash[17];
    snprintf(hash, sizeof hash, "%016" PRIx64, key->prompt_hash);
    json_t *o = json_pack(
        "{s:i,s:s,s:I,s:s,s:s,s:s,s:f,s:o,s:s,s:s,s:I,s:I,s:I,s:o,s:f,s:f,s:I,s:I,s:I,s:I,s:I,s:f,s:I,s:I}", "eval", 1,
        "model", key->model, "model_bytes", (json_int_t)key->model_bytes, "settings", key->settings, "task",
        key->task, "system",
        key->system, "retention", key->retention, "shots",
        key->shots < 0 ? json_null() : json_integer((json_int_t)key->shots), "id", key->id, "prompt", hash, "answer",
        (json_int_t)out->answer, "choice_sum", (json_int_t)out->choice_sum, "choice_norm", (json_int_t)out->choice_norm,
        "logprobs", logprobs, "kl", out->kl, "mass", out->mass, "identify_bytes", (json_int_t)out->identify_bytes,
        "bytes_read", (json_int_t)out->bytes_read, "prefix_tokens", (json_int_t)detail->prefix_tokens, "matched_tokens",
        (json_int_t)detail->matched_tokens, "loaded_tokens", (json_int_t)detail->loaded_tokens, "ms", detail->ms,
        "selected_layers", (json_int_t)out->selected, "fallback_layers", (json_int_t)out->fallback);
    /* All digits: a run that is taken up again gives the same figures to the last. */
    char *text = o && !bad ? json_dumps(o, JSON_COMPACT | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(o);
    return text;
}

/* ---- the file */

/* One write a row: a killed run leaves at most one torn line, the last. */
static int append(const eval_rows *r, char *text, char error[EVAL_ERROR_BYTES])
{
    size_t n = strlen(text);
    text[n++] = '\n'; /* in place of the terminator */
    for (size_t at = 0; at < n;) {
        ssize_t got = write(r->fd, text + at, n - at);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return fail(error, "can't write to %s: %s", r->path, got < 0 ? strerror(errno) : "no room");
        at += (size_t)got;
    }
    return 0;
}

/* Whether `line`, which has no end, is the beginning of a row. */
static int is_torn_row(const char *line, size_t n)
{
    size_t head = sizeof row_head - 1;
    return memcmp(line, row_head, n < head ? n : head) == 0;
}

static int read_file(eval_rows *r, char error[EVAL_ERROR_BYTES])
{
    int copy = dup(r->fd);
    FILE *in = copy >= 0 ? fdopen(copy, "rb") : NULL;
    if (!in) {
        int why = errno;
        if (copy >= 0) close(copy);
        return fail(error, "can't read %s: %s", r->path, strerror(why));
    }
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    off_t whole = 0; /* bytes of the lines that are rows */
    int rc = 0, torn = 0;
    errno = 0;
    for (unsigned number = 1; rc == 0 && !torn && (n = getline(&line, &cap, in)) >= 0; number++) {
        torn = line[n - 1] != '\n' && is_torn_row(line, (size_t)n);
        if (torn) break;
        rc = read_row(r, line, (size_t)n, number, error);
        whole += n;
    }
    if (rc == 0 && !torn && !feof(in))
        rc = fail(error, "can't read %s: %s", r->path, errno ? strerror(errno) : "unknown error");
    if (rc == 0 && torn && ftruncate(r->fd, whole) != 0)
        rc = fail(error, "can't cut off the unfinished last line of %s: %s", r->path, strerror(errno));
    free(line);
    fclose(in);
    return rc;
}

int eval_rows_open(const char *path, eval_rows **out, char error[EVAL_ERROR_BYTES])
{
    *out = NULL;
    eval_rows *r = calloc(1, sizeof *r);
    if (!r) return fail(error, "out of memory");
    r->fd = -1;
    int rc = 0;
    if (path) {
        r->path = strdup(path);
        if (!r->path) rc = fail(error, "out of memory");
        else if ((r->fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644)) < 0)
            rc = fail(error, "can't open %s: %s", path, strerror(errno));
        else if (flock(r->fd, LOCK_EX | LOCK_NB) != 0)
            rc = fail(error, "%s: %s", path, errno == EWOULDBLOCK ? "another run writes to it" : strerror(errno));
        else
            rc = read_file(r, error);
    }
    if (rc) {
        eval_rows_close(r);
        return rc;
    }
    *out = r;
    return 0;
}

void eval_rows_close(eval_rows *r)
{
    if (!r) return;
    if (r->fd >= 0) close(r->fd);
    for (size_t i = 0; i < r->n; i++) {
        free(r->items[i]->key);
        free(r->items[i]);
    }
    free(r->items);
    free(r->path);
    free(r);
}

size_t eval_rows_count(const eval_rows *r) { return r->n; }

const eval_outcome *eval_rows_find(const eval_rows *r, const eval_key *key)
{
    char *text = key_text(key);
    const entry *e = text ? find(r, text) : NULL;
    free(text);
    return e ? &e->outcome : NULL;
}

int eval_rows_add(eval_rows *r, const eval_key *key, const eval_outcome *outcome, const eval_detail *detail,
                  char error[EVAL_ERROR_BYTES])
{
    int rc = 0;
    if (r->fd >= 0) {
        char *text = row_text(key, outcome, detail);
        rc = text ? append(r, text, error) : fail(error, "can't write a row as JSON (out of memory, or no number)");
        free(text);
    }
    if (rc == 0 && keep(r, key_text(key), outcome) != 0) rc = fail(error, "out of memory");
    return rc;
}
