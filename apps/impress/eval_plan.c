#include "eval.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "model.h"
#include "retention.h"

/* The next item of a comma-separated list, without spaces around it. False: there is none. */
static bool next_item(const char **list, char *item, size_t n)
{
    const char *s = *list + strspn(*list, ", ");
    size_t length = strcspn(s, ",");
    *list = s + length;
    while (length > 0 && s[length - 1] == ' ') length--;
    snprintf(item, n, "%.*s", (int)length, s);
    return length > 0;
}

/* ---- systems */

/* All that decides an answer, beside the question, the model and the retention. */
static void describe(const eval *e, eval_variant *v)
{
    const eval_settings *s = e->s;
    size_t room = sizeof v->settings;
    int n = snprintf(v->settings, room, "impress=%s cache=%s reference=%s", imp_version(),
                     s->cache_type ? s->cache_type : "f16", s->reference);
    if (v->plain) return;
    n += snprintf(v->settings + n, room - (size_t)n, " warm=%u tiers=%llu+%llu", (unsigned)s->warm,
                  (unsigned long long)s->store.host_cache, (unsigned long long)s->store.device_cache);
    for (size_t i = 0; i < SWITCH_COUNT && (size_t)n < room; i++) {
        char value[32];
        n += snprintf(v->settings + n, room - (size_t)n, " %s=%s", switch_name(i),
                      switch_value(&v->system, (switch_id)i, value));
    }
}

/* Add a system with a retention, unless it is there. */
static int add_variant(eval *e, const opt_command *command, const app_system *system, const app_retention *retention,
                       bool asked)
{
    app_system own = *system;
    retention_apply(retention, &own.load);
    retention_add_name(retention, own.name, sizeof own.name);
    for (size_t i = 0; i < e->n_variants; i++) {
        const app_system *has = &e->variants[i].system;
        if (strcmp(has->name, own.name) != 0 || has->load.retention != own.load.retention) continue;
        e->variants[i].asked |= asked;
        return 0;
    }
    if (e->n_variants == EVAL_MAX_VARIANTS)
        return opt_misuse(command, "more than %d systems and retentions", EVAL_MAX_VARIANTS);
    eval_variant *v = &e->variants[e->n_variants++];
    *v = (eval_variant){.system = own, .plain = system->recompute, .asked = asked};
    imp_llama_request_init(&v->request);
    app_system_request(&v->system, &v->request);
    v->request.store_new = false;
    v->request.load.record = IMP_RECORD_NOTHING; /* nothing is learned from what is scored */
    describe(e, v);
    return 0;
}

static int add_system(eval *e, const opt_command *command, const char *where, const char *text,
                      const switch_settings *given, bool asked)
{
    app_system system;
    char error[SWITCH_ERROR_BYTES];
    if (app_system_make(where, text, given, 1, &system, error) < 0) return opt_misuse(command, "%s", error);
    const app_retention all = {.share = 1};
    if (!system.chooses) return add_variant(e, command, &system, &all, asked);
    const char *list = e->s->retention ? e->s->retention : "0.25";
    char item[64];
    int rc = 0;
    while (rc == 0 && next_item(&list, item, sizeof item)) {
        app_retention r;
        if (!retention_parse(item, &r))
            return opt_misuse(command, "--retention wants " RETENTION_LIST_WANTS ", not `%s`", item);
        rc = add_variant(e, command, &system, &r, asked);
    }
    return rc;
}

int eval_plan_variants(eval *e, const opt_command *command)
{
    const switch_settings *given = &e->s->store.switches;
    /* The reference loads everything, at the precision of the others. */
    const switch_settings full = {.text = {[SWITCH_REST] = given->text[SWITCH_REST]}};
    const char *list = e->s->systems;
    char name[160];
    int rc = 0;
    while (rc == 0 && next_item(&list, name, sizeof name)) rc = add_system(e, command, "--systems", name, given, true);
    size_t n_own = e->n_variants;
    if (rc == 0) rc = add_system(e, command, "--reference", e->s->reference, &full, false);
    app_system reference, systems[EVAL_MAX_VARIANTS];
    char error[SWITCH_ERROR_BYTES];
    if (rc == 0 && app_system_make("--reference", e->s->reference, &full, 1, &reference, error) < 0)
        rc = opt_misuse(command, "%s", error);
    if (rc) return rc;
    size_t n_loading = 0, n_choosing = 0;
    for (size_t i = 0; i < e->n_variants; i++) {
        const app_system *s = &e->variants[i].system;
        if (!strcmp(s->name, reference.name)) e->reference = i;
        if (i < n_own && !s->recompute) systems[n_loading++] = *s;
        n_choosing += s->chooses;
    }
    if (n_own == 0) return opt_misuse(command, "--systems wants at least one");
    if (e->s->retention && n_choosing == 0)
        return opt_misuse(command, "--retention has no meaning: none of the systems chooses tokens");
    app_system_notes(systems, n_loading);
    return 0;
}

/* ---- task files */

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);
    return n >= m && !strcmp(s + n - m, end);
}

/* The task's name from its file's. NULL: no memory. */
static char *task_name(const char *path)
{
    static const char *const ends[] = {".val.jsonl", ".jsonl", ".txt"};
    const char *base = eval_base_name(path);
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        size_t n = strlen(base), m = strlen(ends[i]);
        if (n > m && ends_with(base, ends[i])) return strndup(base, n - m);
    }
    return strdup(base);
}

static bool counts_norm(const eval_settings *s, const eval_task *t)
{
    if (!strcmp(s->scoring, "auto")) return t->shots < 0 || !strcmp(t->name, "piqa") || !strcmp(t->name, "openbookqa");
    return !strcmp(s->scoring, "norm");
}

static eval_task *new_task(eval *e, const char *path)
{
    eval_task *more = realloc(e->tasks, (e->n_tasks + 1) * sizeof *more);
    if (!more) return NULL;
    e->tasks = more;
    eval_task *t = &more[e->n_tasks];
    memset(t, 0, sizeof *t);
    t->name = task_name(path);
    if (!t->name) return NULL;
    e->n_tasks++;
    return t;
}

/* After its questions are read. */
static void set_limits(const eval_settings *s, eval_task *t)
{
    t->n = s->limit && s->limit < t->file.n ? (size_t)s->limit : t->file.n;
    t->norm = counts_norm(s, t);
}

/* Questions from `path`, the prefix from the train file beside it. */
static int add_task_file(eval *e, const char *path)
{
    const eval_settings *s = e->s;
    size_t shots = s->shots == EVAL_NO_SHOTS ? EVAL_DEFAULT_SHOTS : (size_t)s->shots;
    char error[TASK_ERROR_BYTES];
    eval_task *t = new_task(e, path);
    if (!t) return app_fail("out of memory");
    if (task_file_read(path, NULL, &t->file, error) < 0) return app_fail("%s", error);
    t->shots = (int64_t)shots;
    set_limits(s, t);
    if (shots > 0) {
        if (!ends_with(path, ".val.jsonl"))
            return app_fail("%s isn't named NAME.val.jsonl: what is its train file? (--shots 0 needs none)", path);
        size_t stem = strlen(path) - strlen("val.jsonl");
        char train[4096];
        if (snprintf(train, sizeof train, "%.*strain.jsonl", (int)stem, path) >= (int)sizeof train)
            return app_fail("%s: the path is too long", path);
        if (access(train, F_OK) != 0)
            return app_fail("no train file %s: %s (--shots 0 needs none)", train, strerror(errno));
        if (task_file_read(train, NULL, &t->train, error) < 0) return app_fail("%s", error);
        if (t->train.n < shots)
            return app_fail("%s has %zu examples, fewer than --shots %zu", train, t->train.n, shots);
        const task_example *leak = task_leak(&t->train, shots, &t->file, t->n);
        if (leak) return app_fail("%s:%u: example %s is scored too, in %s", train, leak->line, leak->id, path);
    }
    t->prefix = task_shots(&t->train, shots);
    return t->prefix ? 0 : app_fail("out of memory");
}

static int add_document(eval *e, const char *path)
{
    const eval_settings *s = e->s;
    char error[TASK_ERROR_BYTES], questions[4096];
    const char *base = eval_base_name(path);
    int n;
    if (s->task) n = snprintf(questions, sizeof questions, "%s", s->task);
    else if (s->tasks) n = snprintf(questions, sizeof questions, "%s/questions.jsonl", s->tasks);
    else n = snprintf(questions, sizeof questions, "%.*squestions.jsonl", (int)(base - path), path);
    if (n >= (int)sizeof questions) return app_fail("%s: the path is too long", path);
    eval_task *t = new_task(e, path);
    if (!t) return app_fail("out of memory");
    size_t n_bytes;
    int rc = app_read_text(path, &t->prefix, &n_bytes);
    if (rc) return rc;
    if (strlen(t->prefix) != n_bytes) return app_fail("the document %s is not a text: it has a zero byte", path);
    while (n_bytes > 0 && strchr("\r\n", t->prefix[n_bytes - 1])) t->prefix[--n_bytes] = '\0';
    if (n_bytes == 0) return app_fail("the document %s is empty", path);
    if (task_file_read(questions, base, &t->file, error) < 0) return app_fail("%s", error);
    t->shots = -1;
    set_limits(s, t);
    return 0;
}

static int add_named_task(eval *e, const opt_command *command, const char *name)
{
    char path[4096], error[TASK_ERROR_BYTES];
    if (strchr(name, '/') || ends_with(name, ".jsonl")) return add_task_file(e, name);
    if (!e->s->tasks) return opt_misuse(command, "--task %s: in which folder? --tasks DIR", name);
    if (snprintf(path, sizeof path, "%s/%s.val.jsonl", e->s->tasks, name) >= (int)sizeof path)
        return app_fail("%s: the path is too long", e->s->tasks);
    if (access(path, F_OK) == 0) return add_task_file(e, path);

    char **names;
    size_t n;
    if (task_names(e->s->tasks, &names, &n, error) < 0) return app_fail("%s", error);
    char known[400] = "";
    for (size_t i = 0; i < n; i++) {
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", i ? ", " : "", names[i]);
        free(names[i]);
    }
    free(names);
    return app_fail("no task `%s` in %s; there are: %s", name, e->s->tasks, known);
}

int eval_plan_tasks(eval *e, const opt_command *command)
{
    const eval_settings *s = e->s;
    char error[TASK_ERROR_BYTES], item[1024];
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < s->docs.n; i++) rc = add_document(e, s->docs.items[i]);
    if (rc || s->docs.n) return rc;
    if (s->task) {
        const char *list = s->task;
        while (rc == 0 && next_item(&list, item, sizeof item)) rc = add_named_task(e, command, item);
        return rc ? rc : e->n_tasks ? 0 : opt_misuse(command, "--task wants at least one");
    }
    char **names;
    size_t n;
    if (task_names(s->tasks, &names, &n, error) < 0) return app_fail("%s", error);
    for (size_t i = 0; i < n; i++) {
        if (rc == 0) rc = add_named_task(e, command, names[i]);
        free(names[i]);
    }
    free(names);
    return rc;
}
