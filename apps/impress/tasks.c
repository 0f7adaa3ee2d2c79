#include "tasks.h"

#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

__attribute__((format(printf, 2, 3))) static int fail(char error[TASK_ERROR_BYTES], const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(error, TASK_ERROR_BYTES, fmt, ap);
    va_end(ap);
    error[strcspn(error, "\r\n")] = '\0';
    return -1;
}

static void example_free(task_example *e)
{
    for (size_t i = 0; i < e->n_choices; i++) free(e->choices[i]);
    free(e->choices);
    free(e->query);
    free(e->id);
    memset(e, 0, sizeof *e);
}

void task_file_free(task_file *f)
{
    for (size_t i = 0; i < f->n; i++) example_free(&f->items[i]);
    free(f->items);
    free(f->path);
    memset(f, 0, sizeof *f);
}

/* A field that must be a text with something in it; NULL: it isn't, and `why` says so. */
static const char *text_field(const json_t *o, const char *name, char *why, size_t n)
{
    const json_t *v = json_object_get(o, name);
    const char *s = json_string_value(v);
    if (s && s[strspn(s, " \t\r\n")] != '\0') return s;
    snprintf(why, n, v ? "`%s` is not a text, or an empty one" : "`%s` is missing", name);
    return NULL;
}

/* Fill `e` from an object. Returns false with `why`, "" for no memory. */
static bool example_parse(const json_t *o, task_example *e, char *why, size_t n_why)
{
    if (!json_is_object(o)) return snprintf(why, n_why, "not a JSON object"), false;
    const char *id = text_field(o, "id", why, n_why);
    const char *query = id ? text_field(o, "query", why, n_why) : NULL;
    if (!query) return false;
    const json_t *choices = json_object_get(o, "choices"), *answer = json_object_get(o, "answer");
    size_t n = json_array_size(choices);
    if (!json_is_array(choices)) return snprintf(why, n_why, "`choices` is missing or not an array"), false;
    if (n < 2 || n > TASK_MAX_CHOICES)
        return snprintf(why, n_why, "`choices` has %zu entries, not 2 to %d", n, (int)TASK_MAX_CHOICES), false;
    if (!json_is_integer(answer))
        return snprintf(why, n_why, "`answer` is missing or not the number of a choice"), false;
    if (json_integer_value(answer) < 0 || (size_t)json_integer_value(answer) >= n)
        return snprintf(why, n_why, "`answer` is %lld, but choices go from 0 to %zu",
                        (long long)json_integer_value(answer), n - 1), false;
    *why = '\0';
    e->answer = (size_t)json_integer_value(answer);
    e->id = strdup(id);
    e->query = strdup(query);
    e->choices = calloc(n, sizeof *e->choices);
    if (!e->id || !e->query || !e->choices) return false;
    for (; e->n_choices < n; e->n_choices++) {
        const char *s = json_string_value(json_array_get(choices, e->n_choices));
        if (!s || *s == '\0')
            return snprintf(why, n_why, "choice %zu is not a text, or an empty one", e->n_choices), false;
        e->choices[e->n_choices] = strdup(s);
        if (!e->choices[e->n_choices]) return false;
    }
    return true;
}

/* An id is what a row of results is found by, so each may stand once in a file. */
static const task_example *find_id(const task_file *f, const char *id)
{
    for (size_t i = 0; i < f->n; i++)
        if (!strcmp(f->items[i].id, id)) return &f->items[i];
    return NULL;
}

static int add_line(task_file *f, size_t *cap, const char *line, size_t n_bytes, unsigned number, const char *doc,
                    char error[TASK_ERROR_BYTES])
{
    json_error_t at;
    json_t *o = json_loadb(line, n_bytes, JSON_REJECT_DUPLICATES, &at);
    if (!o) return fail(error, "%s:%u: not JSON: %s (column %d)", f->path, number, at.text, at.column);

    task_example e = {.line = number};
    char why[160] = "";
    int rc = 0;
    const task_example *twin = NULL;
    if (!example_parse(o, &e, why, sizeof why))
        rc = fail(error, "%s:%u: %s", f->path, number, *why ? why : "out of memory");
    else if ((twin = find_id(f, e.id)) != NULL)
        rc = fail(error, "%s:%u: the id `%s` is that of line %u too", f->path, number, e.id, twin->line);
    const char *of = json_string_value(json_object_get(o, "doc"));
    bool wanted = rc == 0 && (!doc || (of && !strcmp(of, doc)));
    if (wanted && f->n == *cap) {
        size_t more = *cap ? 2 * *cap : 64;
        task_example *items = realloc(f->items, more * sizeof *items);
        if (items) f->items = items, *cap = more;
        else rc = fail(error, "out of memory reading %s", f->path);
    }
    if (rc == 0 && wanted) f->items[f->n++] = e;
    else example_free(&e);
    json_decref(o);
    return rc;
}

int task_file_read(const char *path, const char *doc, task_file *out, char error[TASK_ERROR_BYTES])
{
    memset(out, 0, sizeof *out);
    FILE *in = fopen(path, "rb");
    if (!in) return fail(error, "can't read %s: %s", path, strerror(errno));
    char *line = NULL;
    size_t line_cap = 0, cap = 0;
    int rc = 0;
    ssize_t n;
    out->path = strdup(path);
    if (!out->path) rc = fail(error, "out of memory reading %s", path);
    errno = 0;
    for (unsigned number = 1; rc == 0 && (n = getline(&line, &line_cap, in)) >= 0; number++) {
        if ((size_t)n == strspn(line, " \t\r\n")) continue;
        rc = add_line(out, &cap, line, (size_t)n, number, doc, error);
    }
    if (rc == 0 && !feof(in)) rc = fail(error, "can't read %s: %s", path, errno ? strerror(errno) : "unknown error");
    if (rc == 0 && out->n == 0) {
        if (doc) rc = fail(error, "%s has no question on `%s`", path, doc);
        else rc = fail(error, "%s has no questions", path);
    }
    free(line);
    fclose(in);
    if (rc) task_file_free(out);
    return rc;
}

static int compare_names(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

int task_names(const char *dir, char ***names, size_t *n, char error[TASK_ERROR_BYTES])
{
    static const char ending[] = ".val.jsonl";
    *names = NULL;
    *n = 0;
    DIR *d = opendir(dir);
    if (!d) return fail(error, "can't read the folder of tasks %s: %s", dir, strerror(errno));
    size_t cap = 0;
    int rc = 0;
    for (struct dirent *entry; rc == 0 && (entry = readdir(d)) != NULL;) {
        size_t length = strlen(entry->d_name);
        if (length < sizeof ending || strcmp(entry->d_name + length - (sizeof ending - 1), ending) != 0) continue;
        if (*n == cap) {
            cap = cap ? 2 * cap : 16;
            char **more = realloc(*names, cap * sizeof *more);
            if (more) *names = more;
            else rc = fail(error, "out of memory");
        }
        if (rc == 0 && ((*names)[*n] = strndup(entry->d_name, length - (sizeof ending - 1))) != NULL) ++*n;
        else rc = fail(error, "out of memory");
    }
    closedir(d);
    if (rc == 0 && *n == 0) rc = fail(error, "no task in %s: there is no NAME%s", dir, ending);
    if (rc) {
        for (size_t i = 0; i < *n; i++) free((*names)[i]);
        free(*names);
        *names = NULL;
        *n = 0;
        return rc;
    }
    qsort(*names, *n, sizeof **names, compare_names);
    return 0;
}

char *task_shots(const task_file *train, size_t n_shots)
{
    char *text = NULL;
    size_t n_bytes = 0;
    FILE *f = open_memstream(&text, &n_bytes);
    if (!f) return NULL;
    for (size_t i = 0; i < n_shots; i++) {
        const task_example *e = &train->items[i];
        fprintf(f, "%s%s %s", i ? "\n\n" : "", e->query, e->choices[e->answer]);
    }
    bool ok = !ferror(f);
    if (fclose(f) != 0 || !ok) {
        free(text);
        return NULL;
    }
    return text;
}

static bool same_question(const task_example *a, const task_example *b)
{
    if (!strcmp(a->id, b->id)) return true;
    if (strcmp(a->query, b->query) != 0 || a->n_choices != b->n_choices) return false;
    for (size_t i = 0; i < a->n_choices; i++)
        if (strcmp(a->choices[i], b->choices[i]) != 0) return false;
    return true;
}

const task_example *task_leak(const task_file *train, size_t n_shots, const task_file *scored, size_t n_scored)
{
    for (size_t i = 0; i < n_shots; i++)
        for (size_t k = 0; k < n_scored; k++)
            if (same_question(&train->items[i], &scored->items[k])) return &train->items[i];
    return NULL;
}
