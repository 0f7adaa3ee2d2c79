#include "model.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "impress/impress.h"
#include "text.h"
#include "tokenize.h"

int app_fail(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fputs("impress: ", stderr);
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    va_end(ap);
    return 1;
}

static void on_log(imp_log_level level, const char *line, void *user)
{
    (void)user;
    fprintf(stderr, "impress: %s%s\n",
            level == IMP_LOG_ERROR  ? "error: "
            : level == IMP_LOG_WARN ? "warning: "
                                    : "",
            line);
}

void app_log_show(bool verbose)
{
    imp_log_set(on_log, NULL, verbose ? IMP_LOG_INFO : IMP_LOG_WARN);
}

/* llama.cpp reports why a load failed only through its log: keep the last error line. */
static char last_error[512];
static bool show_all;
static struct stat loaded; /* the model's file, as it was before it was loaded */

static void on_llama_log(enum ggml_log_level level, const char *line, void *user)
{
    (void)user;
    if (show_all) fputs(line, stderr);
    if (level == GGML_LOG_LEVEL_ERROR) {
        snprintf(last_error, sizeof last_error, "%s", line);
        last_error[strcspn(last_error, "\n")] = '\0';
    }
}

static bool on_load_progress(float share, void *user)
{
    text_progress_at(user, (double)share, NULL);
    return true;
}

static int load(const char *path, bool verbose, bool vocabulary, struct llama_model **out)
{
    *out = NULL;
    show_all = verbose;
    llama_log_set(on_llama_log, NULL);

    FILE *f = fopen(path, "rb");
    if (!f) return app_fail("can't read the model %s: %s", path, strerror(errno));
    struct stat st = {0};
    char magic[4] = {0};
    bool is_file = fstat(fileno(f), &st) == 0 && S_ISREG(st.st_mode);
    loaded = st;
    bool is_gguf = is_file && fread(magic, 1, 4, f) == 4 && !memcmp(magic, "GGUF", 4);
    fclose(f);
    if (!is_file) return app_fail("the model %s is not a file", path);
    if (!is_gguf) return app_fail("the model %s is not a GGUF file", path);

    llama_backend_init();
    text_progress progress = {.label = "loading the model"};
    struct llama_model_params params = llama_model_default_params();
    params.vocab_only = vocabulary;
    params.progress_callback = on_load_progress;
    params.progress_callback_user_data = &progress;
    struct llama_model *model = llama_model_load_from_file(path, params);
    text_progress_end(&progress);
    if (!model)
        return app_fail("the model %s can't be loaded: %s", path, last_error[0] ? last_error : "no reason given");
    *out = model;
    return 0;
}

int app_model_load(const char *path, bool verbose, struct llama_model **out)
{
    return load(path, verbose, false, out);
}

int app_vocabulary_load(const char *path, bool verbose, struct llama_model **out)
{
    return load(path, verbose, true, out);
}

int app_model_unchanged(const char *path)
{
    struct stat st;
    if (stat(path, &st) == 0 && st.st_dev == loaded.st_dev && st.st_ino == loaded.st_ino &&
        st.st_size == loaded.st_size && st.st_mtim.tv_sec == loaded.st_mtim.tv_sec &&
        st.st_mtim.tv_nsec == loaded.st_mtim.tv_nsec && st.st_ctim.tv_sec == loaded.st_ctim.tv_sec &&
        st.st_ctim.tv_nsec == loaded.st_ctim.tv_nsec)
        return 0;
    return app_fail("the model %s changed while it was loaded; ask again", path);
}

struct llama_context_params app_context_params(size_t n_ctx, size_t n_batch, size_t n_ubatch, size_t n_threads,
                                               const char *cache_type)
{
    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = (uint32_t)n_ctx;
    cp.n_batch = (uint32_t)n_batch;
    cp.n_ubatch = (uint32_t)(n_ubatch < n_batch ? n_ubatch : n_batch);
    cp.n_seq_max = 1;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    cp.n_threads = cp.n_threads_batch = n_threads ? (int32_t)n_threads : cores > 0 ? (int32_t)cores : 1;
    if (cache_type && !strcmp(cache_type, "q8_0")) cp.type_k = cp.type_v = GGML_TYPE_Q8_0;
    return cp;
}

int app_read_text(const char *path, char **text, size_t *n_bytes)
{
    *text = NULL;
    *n_bytes = 0;
    FILE *f = !strcmp(path, "-") ? stdin : fopen(path, "rb");
    if (!f) return app_fail("can't read %s: %s", path, strerror(errno));
    size_t n = 0, cap = 1 << 16;
    char *buf = malloc(cap);
    while (buf) {
        n += fread(buf + n, 1, cap - n - 1, f);
        if (n + 1 < cap) break;
        char *more = realloc(buf, cap *= 2);
        if (!more) free(buf);
        buf = more;
    }
    int rc = 0;
    if (!buf)
        rc = app_fail("out of memory reading %s", path);
    else if (ferror(f))
        rc = app_fail("can't read %s: %s", path, strerror(errno));
    if (f != stdin) fclose(f);
    size_t good = rc ? 0 : text_utf8(buf, n);
    if (rc == 0 && good < n) rc = app_fail("%s isn't UTF-8 at byte %zu", path, good + 1);
    if (rc) {
        free(buf);
        return rc;
    }
    buf[n] = '\0';
    *text = buf;
    *n_bytes = n;
    return 0;
}

bool app_prompt_append(const struct llama_vocab *vocab, app_prompt *p, const char *text, size_t n_bytes, bool bos,
                       bool special)
{
    return app_tokenize_more(vocab, text, n_bytes, bos, special, &p->tokens, &p->n);
}

/* The template's text before and after one user message. The buffers belong to the caller. */
static bool chat_frame(const struct llama_model *model, char **head, char **tail)
{
    static const char marker[] = "@@impress-message@@";
    const char *tmpl = llama_model_chat_template(model, NULL);
    if (!tmpl) return false;
    struct llama_chat_message message = {.role = "user", .content = marker};
    int32_t n = llama_chat_apply_template(tmpl, &message, 1, true, NULL, 0);
    if (n <= 0) return false;
    char *all = calloc((size_t)n + 1, 1);
    if (!all || llama_chat_apply_template(tmpl, &message, 1, true, all, n + 1) != n) {
        free(all);
        return false;
    }
    char *at = strstr(all, marker);
    *tail = at ? strdup(at + sizeof marker - 1) : NULL;
    if (!*tail) {
        free(all);
        return false;
    }
    *at = '\0';
    *head = all;
    return true;
}

int app_prompt_make(const struct llama_model *model, const char *prefix, size_t prefix_bytes, const char *question,
                    bool raw, app_prompt *out)
{
    memset(out, 0, sizeof *out);
    const struct llama_vocab *vocab = llama_model_get_vocab(model);
    char *head = NULL, *tail = NULL, *body = NULL;
    app_prompt shared = {0};
    if (raw || !chat_frame(model, &head, &tail)) raw = true;

    size_t question_bytes = strlen(question);
    bool ok = false;
    body = malloc(prefix_bytes + 2 + question_bytes + 1);
    if (!body) goto end;
    memcpy(body, prefix, prefix_bytes);
    memcpy(body + prefix_bytes, "\n\n", 2);
    memcpy(body + prefix_bytes + 2, question, question_bytes + 1);

    /* The prefix is what the tokens with and without the question have in common: a token may span the seam. */
    if (head && (!app_prompt_append(vocab, out, head, strlen(head), true, true) ||
                 !app_prompt_append(vocab, &shared, head, strlen(head), true, true)))
        goto end;
    if (!app_prompt_append(vocab, out, body, prefix_bytes + 2 + question_bytes, raw, false) ||
        !app_prompt_append(vocab, &shared, body, prefix_bytes + 2, raw, false))
        goto end;
    if (tail && !app_prompt_append(vocab, out, tail, strlen(tail), false, true)) goto end;
    while (out->n_prefix < shared.n && out->n_prefix < out->n &&
           shared.tokens[out->n_prefix] == out->tokens[out->n_prefix])
        out->n_prefix++;
    ok = true;
end:
    free(head);
    free(tail);
    free(body);
    app_prompt_free(&shared);
    if (!ok) {
        app_prompt_free(out);
        return app_fail("the prompt can't be turned into tokens (out of memory, or too long)");
    }
    return 0;
}

void app_prompt_free(app_prompt *p)
{
    free(p->tokens);
    memset(p, 0, sizeof *p);
}

size_t app_token_text(const struct llama_model *model, llama_token token, char *buf, size_t n)
{
    int32_t got = llama_token_to_piece(llama_model_get_vocab(model), token, buf, (int32_t)n, 0, false);
    return got > 0 ? (size_t)got : 0;
}
