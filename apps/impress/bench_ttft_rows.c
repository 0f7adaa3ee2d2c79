/* bench_ttft_rows.c: the rows of bench ttft, in memory and as lines of a file. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "bench_ttft.h"
#include "model.h"

/* Every row begins with it: a file without it isn't ours, and nothing in it is touched. */
static const char row_head[] = "{\"bench\":\"ttft\",";

struct ttft_rows {
    char *path;
    int fd; /* -1: memory only */
    json_t **items;
    size_t n;
};

size_t ttft_rows_count(const ttft_rows *r) { return r->n; }

const json_t *ttft_rows_at(const ttft_rows *r, size_t i) { return r->items[i]; }

/* Takes `row` over, also on failure. */
static int keep(ttft_rows *r, json_t *row)
{
    json_t **more = realloc(r->items, (r->n + 1) * sizeof *more);
    if (!more) {
        json_decref(row);
        return app_fail("out of memory");
    }
    r->items = more;
    r->items[r->n++] = row;
    return 0;
}

static bool is_row(const json_t *o)
{
    static const char *const texts[] = {"system", "model", "state", "prefix"};
    static const char *const numbers[] = {"retention", "rep", "ttft_ms", "compute_ms", "bytes_read", "limit_ms"};
    const char *bench = json_string_value(json_object_get(o, "bench"));
    bool ok = bench && !strcmp(bench, "ttft");
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) ok = ok && json_is_string(json_object_get(o, texts[i]));
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        ok = ok && json_is_number(json_object_get(o, numbers[i]));
    return ok;
}

static int read_file(ttft_rows *r)
{
    int copy = dup(r->fd);
    FILE *in = copy >= 0 ? fdopen(copy, "rb") : NULL;
    if (!in) {
        int why = errno;
        if (copy >= 0) close(copy);
        return app_fail("can't read %s: %s", r->path, strerror(why));
    }
    char *line = NULL;
    size_t cap = 0, head = sizeof row_head - 1;
    ssize_t n;
    off_t whole = 0; /* bytes of the lines that are rows */
    int rc = 0;
    bool torn = false;
    for (unsigned number = 1; rc == 0 && (n = getline(&line, &cap, in)) >= 0; number++) {
        torn = line[n - 1] != '\n' && memcmp(line, row_head, (size_t)n < head ? (size_t)n : head) == 0;
        if (torn) break;
        json_error_t at;
        json_t *o = json_loadb(line, (size_t)n, 0, &at);
        if (o && is_row(o)) {
            rc = keep(r, o);
            whole += n;
            continue;
        }
        rc = app_fail("%s:%u: not a row of bench ttft%s%s", r->path, number, o ? "" : ": ", o ? "" : at.text);
        json_decref(o);
    }
    if (rc == 0 && !torn && ferror(in)) rc = app_fail("can't read %s", r->path);
    if (rc == 0 && torn && ftruncate(r->fd, whole) != 0)
        rc = app_fail("can't cut off the unfinished last line of %s: %s", r->path, strerror(errno));
    free(line);
    fclose(in);
    return rc;
}

int ttft_rows_open(const char *path, ttft_rows **out)
{
    ttft_rows *r = calloc(1, sizeof *r);
    *out = r;
    if (!r) return app_fail("out of memory");
    r->fd = -1;
    if (!path) return 0;
    r->path = strdup(path);
    if (!r->path) return app_fail("out of memory");
    r->fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (r->fd < 0) return app_fail("can't open %s: %s", path, strerror(errno));
    if (flock(r->fd, LOCK_EX | LOCK_NB) != 0)
        return app_fail("%s: %s", path, errno == EWOULDBLOCK ? "another run writes to it" : strerror(errno));
    return read_file(r);
}

void ttft_rows_close(ttft_rows *r)
{
    if (!r) return;
    if (r->fd >= 0) close(r->fd);
    for (size_t i = 0; i < r->n; i++) json_decref(r->items[i]);
    free(r->items);
    free(r->path);
    free(r);
}

static bool holds(const json_t *row, const json_t *key)
{
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)key, name, value)
        if (!json_equal(json_object_get(row, name), value)) return false;
    return true;
}

const json_t *ttft_rows_find(const ttft_rows *r, const json_t *key)
{
    for (size_t i = 0; i < r->n; i++)
        if (holds(r->items[i], key)) return r->items[i];
    return NULL;
}

/* One write a row: a killed run leaves at most one torn line, the last. */
static int append(const ttft_rows *r, const json_t *row)
{
    char *text = json_dumps(row, JSON_COMPACT | JSON_REAL_PRECISION(9));
    if (!text) return app_fail("can't write a row as JSON (out of memory, or no number)");
    size_t n = strlen(text);
    text[n++] = '\n'; /* in place of the terminator */
    int rc = 0;
    for (size_t at = 0; rc == 0 && at < n;) {
        ssize_t got = write(r->fd, text + at, n - at);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) rc = app_fail("can't write to %s: %s", r->path, got < 0 ? strerror(errno) : "no room");
        else at += (size_t)got;
    }
    free(text);
    return rc;
}

int ttft_rows_add(ttft_rows *r, json_t *row)
{
    if (!row) return app_fail("out of memory");
    int rc = r->fd >= 0 ? append(r, row) : 0;
    if (rc == 0) return keep(r, row);
    json_decref(row);
    return rc;
}
