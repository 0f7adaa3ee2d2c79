/* llama_prefix.c: a small llama.cpp program, made prefix-aware. Compared with the same program for llama.h alone, the
 * store is opened and five names have changed; they are marked with "was".
 *
 * usage: llama_prefix MODEL.gguf STORE PREFIX.txt QUESTION
 *
 * The first call with a prefix computes it. Any later one, with another question and in another process, loads it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <impress/llama.h>

enum { N_CTX = 8192, N_PREDICT = 64 };

static char *read_text(const char *path)
{
    FILE *f = fopen(path, "rb");
    if (!f) return NULL;
    size_t n = 0, cap = 1 << 16;
    char *text = malloc(cap);
    while (text) {
        n += fread(text + n, 1, cap - n - 1, f);
        if (n + 1 < cap) break;
        char *more = realloc(text, cap *= 2);
        if (!more) free(text);
        text = more;
    }
    fclose(f);
    if (text) text[n] = '\0';
    return text;
}

static int32_t tokenize(const struct llama_vocab *vocab, const char *text, bool start, llama_token *tokens,
                        int32_t n_max)
{
    return llama_tokenize(vocab, text, (int32_t)strlen(text), tokens, n_max, start, false);
}

/* Prompt in, answer out. The one function that differs from the program for llama.h alone. */
static int answer(imp_llama *ctx, const struct llama_vocab *vocab, struct llama_sampler *smpl, llama_token *tokens,
                  int32_t n)
{
    if (imp_llama_decode(ctx, llama_batch_get_one(tokens, n)) != 0) return 1; /* was llama_decode */
    for (int i = 0; i < N_PREDICT; i++) {
        llama_token token = imp_llama_sampler_sample(smpl, ctx, -1); /* was llama_sampler_sample */
        if (llama_vocab_is_eog(vocab, token)) break;
        char piece[128];
        int32_t n_piece = llama_token_to_piece(vocab, token, piece, sizeof piece, 0, false);
        if (n_piece > 0) fwrite(piece, 1, (size_t)n_piece, stdout);
        fflush(stdout);
        if (imp_llama_decode(ctx, llama_batch_get_one(&token, 1)) != 0) return 1; /* was llama_decode */
    }
    printf("\n");
    return 0;
}

static void quiet(enum ggml_log_level level, const char *text, void *user)
{
    (void)user;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

/* The store names KV by the bytes of the model's file, read once the model is loaded: they must be the same ones. */
static int same_file(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec &&
           a->st_ctim.tv_sec == b->st_ctim.tv_sec && a->st_ctim.tv_nsec == b->st_ctim.tv_nsec;
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "usage: %s MODEL.gguf STORE PREFIX.txt QUESTION\n", argv[0]);
        return 2;
    }
    const char *model_file = argv[1];
    int rc = 1;
    imp_store *store = NULL;
    imp_llama *ctx = NULL;
    struct llama_sampler *smpl = NULL;
    llama_token *tokens = calloc(N_CTX, sizeof *tokens);
    char *prefix = read_text(argv[3]);

    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct stat before, after;
    struct llama_model *model = NULL;
    if (stat(model_file, &before) == 0)
        model = llama_model_load_from_file(model_file, llama_model_default_params());
    if (!model || !tokens || !prefix) {
        fprintf(stderr, "%s: can't be read\n", !model ? model_file : argv[3]);
        goto out;
    }
    const struct llama_vocab *vocab = llama_model_get_vocab(model);
    int32_t n = tokenize(vocab, prefix, true, tokens, N_CTX - N_PREDICT);
    int32_t m = n > 0 ? tokenize(vocab, argv[4], false, tokens + n, N_CTX - N_PREDICT - n) : 0;
    if (n <= 0 || m <= 0) {
        fprintf(stderr, "prefix and question don't fit into %d tokens, or one is empty\n", N_CTX - N_PREDICT);
        goto out;
    }

    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = N_CTX;
    cp.n_batch = (uint32_t)(n + m); /* the prompt comes as one batch */
    imp_llama_params params;
    imp_llama_params_init(&params);
    params.model_files = &model_file;
    params.n_model_files = 1;
    if (imp_store_open(argv[2], NULL, &store) < 0) {
        fprintf(stderr, "%s\n", imp_last_error());
        goto out;
    }
    params.store = store;
    if (imp_llama_init(model, cp, &params, &ctx) < 0) { /* was llama_init_from_model */
        fprintf(stderr, "%s\n", imp_last_error());
        goto out;
    }
    if (stat(model_file, &after) != 0 || !same_file(&before, &after)) {
        fprintf(stderr, "%s changed while it was loaded\n", model_file);
        goto out;
    }
    smpl = llama_sampler_init_greedy();
    if (answer(ctx, vocab, smpl, tokens, n + m) != 0) {
        fprintf(stderr, "llama_decode failed\n");
        goto out;
    }
    imp_llama_report r;
    imp_llama_get_report(ctx, 0, &r);
    fprintf(stderr, "%zu tokens of prompt, %zu of them from the store, first token after %.0f ms\n", r.prompt_tokens,
            r.matched_tokens, (double)r.total_ns / 1e6);
    rc = 0;
out:
    if (smpl) llama_sampler_free(smpl);
    imp_llama_free(ctx); /* was llama_free */
    imp_store_close(store);
    if (model) llama_model_free(model);
    free(tokens);
    free(prefix);
    return rc;
}
