#include "bench_set.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"

static const char *const built_in[] = {
    "What is this text about?",
    "Which names are mentioned?",
    "Which numbers does the text give, and what for?",
    "What has to be done first?",
    "What should be avoided, and why?",
    "What is said at the end?",
};

static bool add_question(bench_set *set, const char *text, size_t n)
{
    char **more = realloc(set->questions, (set->n_questions + 1) * sizeof *more);
    if (!more) return false;
    set->questions = more;
    more[set->n_questions] = strndup(text, n);
    return more[set->n_questions] && ++set->n_questions;
}

static int read_questions(bench_set *set, const opt_texts *asked, const char *file)
{
    bool ok = true;
    char *text = NULL;
    size_t n_bytes;
    for (size_t i = 0; ok && i < asked->n; i++) ok = add_question(set, asked->items[i], strlen(asked->items[i]));
    if (file) {
        int rc = app_read_text(file, &text, &n_bytes);
        if (rc) return rc;
    }
    for (const char *s = text; ok && s && *s;) {
        size_t n = strcspn(s, "\n"), length = n;
        while (length > 0 && strchr(" \t\r", s[length - 1])) length--;
        if (length > 0) ok = add_question(set, s, length);
        s += n + (s[n] != '\0');
    }
    free(text);
    for (size_t i = 0; ok && !file && asked->n == 0 && i < sizeof built_in / sizeof *built_in; i++)
        ok = add_question(set, built_in[i], strlen(built_in[i]));
    if (!ok) return app_fail("out of memory");
    return set->n_questions ? 0 : app_fail("%s has no questions", file);
}

static int add_prefix(bench_set *set, const char *path)
{
    bench_prefix *more = realloc(set->prefixes, (set->n_prefixes + 1) * sizeof *more);
    if (!more) return app_fail("out of memory");
    set->prefixes = more;
    bench_prefix *p = &more[set->n_prefixes++];
    *p = (bench_prefix){.path = strdup(path)};
    if (!p->path) return app_fail("out of memory");
    int rc = app_read_text(path, &p->text, &p->n_bytes);
    return rc ? rc : p->n_bytes ? 0 : app_fail("the prefix %s is empty", path);
}

static int is_text(const struct dirent *e)
{
    size_t n = strlen(e->d_name);
    return n > 4 && !strcmp(e->d_name + n - 4, ".txt");
}

static int add_folder(bench_set *set, const char *dir)
{
    struct dirent **names;
    int n = scandir(dir, &names, is_text, alphasort), rc = 0;
    if (n < 0) return app_fail("can't read the folder %s: %s", dir, strerror(errno));
    for (int i = 0; i < n; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", dir, names[i]->d_name);
        if (rc == 0) rc = add_prefix(set, path);
        free(names[i]);
    }
    free(names);
    return rc ? rc : n > 0 ? 0 : app_fail("no *.txt in %s", dir);
}

int bench_set_read(bench_set *set, const opt_texts *files, const char *dir, const opt_texts *asked,
                   const char *question_file, size_t n_warm)
{
    *set = (bench_set){.n_warm = n_warm};
    int rc = read_questions(set, asked, question_file);
    for (size_t i = 0; rc == 0 && i < files->n; i++) rc = add_prefix(set, files->items[i]);
    if (rc == 0 && dir) rc = add_folder(set, dir);
    if (rc == 0 && n_warm >= set->n_questions)
        rc = app_fail("of %zu questions %zu only warm up, so none is left", set->n_questions, n_warm);
    return rc;
}

static size_t shared_tokens(const app_prompt *a, const app_prompt *b, size_t n)
{
    size_t i = 0;
    while (i < n && i < b->n_prefix && a->tokens[i] == b->tokens[i]) i++;
    return i;
}

int bench_set_tokens(bench_set *set, const struct llama_model *model, bool raw)
{
    for (size_t i = 0; i < set->n_prefixes; i++) {
        bench_prefix *p = &set->prefixes[i];
        p->prompts = calloc(set->n_questions, sizeof *p->prompts);
        if (!p->prompts) return app_fail("out of memory");
        for (size_t q = 0; q < set->n_questions; q++) {
            int rc = app_prompt_make(model, p->text, p->n_bytes, set->questions[q], raw, &p->prompts[q]);
            if (rc) return rc;
            if (p->prompts[q].n > set->longest) set->longest = p->prompts[q].n;
            size_t most = q ? p->shared.n : p->prompts[0].n_prefix;
            p->shared.n = shared_tokens(&p->prompts[0], &p->prompts[q], most);
        }
        p->shared.tokens = p->prompts[0].tokens;
    }
    return 0;
}

void bench_set_free(bench_set *set)
{
    for (size_t i = 0; i < set->n_prefixes; i++) {
        bench_prefix *p = &set->prefixes[i];
        for (size_t q = 0; p->prompts && q < set->n_questions; q++) app_prompt_free(&p->prompts[q]);
        app_prefix_free(&p->shared);
        free(p->prompts);
        free(p->path);
        free(p->text);
    }
    for (size_t q = 0; q < set->n_questions; q++) free(set->questions[q]);
    free(set->prefixes);
    free(set->questions);
    *set = (bench_set){0};
}

int bench_ask(app_stores *s, const bench_set *set, size_t p, size_t q, const imp_llama_request *request, app_row *row)
{
    const bench_prefix *prefix = &set->prefixes[p];
    imp_llama_request r = *request;
    *row = (app_row){0};
    r.max_match = prefix->shared.n;
    r.store_new = false;
    imp_llama_clear(s->ctx);
    if (imp_llama_set_request(s->ctx, 0, &r) < 0) return app_fail("%s", imp_last_error());
    app_prompt prompt = prefix->prompts[q];
    prompt.n_prefix = prefix->shared.n; /* the query is cut at the same place for all questions */
    return app_prefill(s->ctx, &prompt, 0, row);
}
