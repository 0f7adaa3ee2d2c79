/* impress warm: prefixes computed and stored before anybody asks. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "answer.h"
#include "commands.h"
#include "report.h"
#include "store_options.h"
#include "stored.h"
#include "text.h"

typedef struct warm_settings {
    store_settings store;
    const char *model, *system, *salt, *cache_type;
    opt_texts files;
    uint64_t n_threads, n_batch, n_ubatch;
    bool raw, pin, json, verbose;
} warm_settings;

#define AT(member) offsetof(warm_settings, member)

static const opt options[] = {
    {"model", 'm', OPT_TEXT, AT(model), "FILE", "the model, a GGUF file", false},
    {"file", 'f', OPT_TEXTS, AT(files), "FILE",
     "a prefix, a text file; - is standard input. May be given\nseveral times", true},
    {"pin", 0, OPT_FLAG, AT(pin), NULL, "and keep it from eviction", true},
    {"raw", 0, OPT_FLAG, AT(raw), NULL, "no chat template, as `impress run --raw`", false},
    {"json", 0, OPT_FLAG, AT(json), NULL, "print an array, an object for each file", true},
    {"system", 's', OPT_TEXT, AT(system), "NAME", "as `impress run`: what is stored depends on it (default: impress)",
     false},
    STORE_OPTS(warm_settings),
    {"salt", 0, OPT_TEXT, AT(salt), "TEXT", "keep apart from prefixes stored under another salt", false},
    {"threads", 't', OPT_COUNT, AT(n_threads), "N", "threads (default: one a core)", false},
    {"batch-size", 'b', OPT_COUNT, AT(n_batch), "N", "tokens a decode call (default: 2048)", false},
    {"ubatch-size", 'u', OPT_COUNT, AT(n_ubatch), "N", "tokens a pass (default: 512)", false},
    {"cache-type", 0, OPT_TEXT, AT(cache_type), "TYPE", "the cache's type: f16 (default) or q8_0", false},
    {"verbose", 'v', OPT_FLAG, AT(verbose), NULL, "show llama.cpp's log and ours", false},
};

const opt_command warm_command = {
    "warm",
    "warm -m MODEL.gguf -f PREFIX.txt [-f PREFIX.txt...] [OPTIONS]",
    "Compute prefixes and store them, without a question: the first `impress run` with one of them\n"
    "finds it stored.",
    "For the prefixes of a running server ask the server: POST /admin/warm applies the chat template that\n"
    "its clients get.",
    options,
    sizeof options / sizeof *options,
};

/* Everything one call works with. */
typedef struct warming {
    const warm_settings *s;
    struct llama_model *model;
    imp_store *store;
    imp_llama *ctx;
    imp_space *space;
    app_prompt *prompts; /* [s->files.n], of which n_prompts are made */
    size_t n_prompts;
    json_t *array;
} warming;

static int check(const warm_settings *s)
{
    if (!s->model) return opt_misuse(&warm_command, "no model: -m MODEL.gguf");
    if (s->files.n == 0) return opt_misuse(&warm_command, "no prefix: -f PREFIX.txt");
    if (!store_settings_dir(&s->store)) return opt_misuse(&warm_command, "--store none keeps nothing");
    if (s->cache_type && strcmp(s->cache_type, "f16") && strcmp(s->cache_type, "q8_0"))
        return opt_misuse(&warm_command, "--cache-type: `%s` is not one of f16, q8_0", s->cache_type);
    if (s->n_batch == 0 || s->n_ubatch == 0) return opt_misuse(&warm_command, "a batch of 0 tokens can't be computed");
    return 0;
}

static int make_prompts(warming *w)
{
    int rc = 0;
    if (!(w->prompts = calloc(w->s->files.n, sizeof *w->prompts))) return app_fail("out of memory");
    for (size_t i = 0; rc == 0 && i < w->s->files.n; i++) {
        char *text = NULL;
        size_t n_bytes = 0;
        rc = app_read_text(w->s->files.items[i], &text, &n_bytes);
        if (rc == 0 && n_bytes == 0) rc = app_fail("the prefix %s is empty", w->s->files.items[i]);
        if (rc == 0) rc = app_prompt_make(w->model, text, n_bytes, "", w->s->raw, &w->prompts[i]);
        if (rc == 0) w->prompts[i].n = w->prompts[i].n_prefix; /* what any question shares */
        if (rc == 0) w->n_prompts++;
        free(text);
    }
    return rc;
}

static int open_context(warming *w, const app_system *system)
{
    const warm_settings *s = w->s;
    size_t longest = 0, which = 0, trained = (size_t)llama_model_n_ctx_train(w->model);
    for (size_t i = 0; i < w->n_prompts; i++)
        if (w->prompts[i].n > longest) longest = w->prompts[which = i].n;
    if (longest > trained)
        return app_fail("%s: %zu tokens are more than the model's context of %zu", s->files.items[which], longest,
                        trained);
    imp_llama_params params;
    imp_llama_params_init(&params);
    params.store = w->store;
    params.model_files = &s->model;
    params.n_model_files = 1;
    params.salt = s->salt;
    app_system_request(system, &params.request);
    params.request.load.switches.identify = IMP_IDENTIFY_NONE; /* what goes on from a stored part is exact, too */
    params.request.load.retention = 1;
    params.request.recompute = false;
    struct llama_context_params cp = app_context_params(longest, s->n_batch, s->n_ubatch, s->n_threads, s->cache_type);
    if (imp_llama_init(w->model, cp, &params, &w->ctx) < 0) return app_fail("%s", imp_last_error());
    if (app_model_unchanged(s->model)) return 1;
    const char *why = "";
    if (imp_llama_get_fit(w->ctx, &why) == IMP_LLAMA_FIT_NONE) return app_fail("nothing can be stored: %s", why);
    return imp_llama_open_space(w->ctx, s->salt, &w->space) < 0 ? app_fail("%s", imp_last_error()) : 0;
}

static int warm_one(warming *w, size_t i)
{
    const app_prompt *p = &w->prompts[i];
    const char *file = w->s->files.items[i];
    app_row row = {0};
    uint64_t node;
    imp_llama_clear(w->ctx);
    int rc = app_prefill(w->ctx, p, 0, &row);
    if (rc) return rc;
    if (imp_llama_flush(w->ctx) < 0 || imp_store_flush(w->store) < 0) return app_fail("%s: %s", file, imp_last_error());
    size_t n_stored = app_stored_tokens(w->space, p->tokens, p->n, &node);
    bool pinned = w->s->pin && node && app_is_stored(n_stored, p->n);
    if (pinned && imp_store_pin(w->store, node, 1) < 0) return app_fail("%s: %s", file, imp_last_error());
    uint64_t bytes = (uint64_t)n_stored * imp_space_token_bytes(w->space);
    if (w->array) {
        json_t *o = json_pack("{s:o, s:I, s:I, s:I, s:I, s:I, s:b, s:f}", "file", report_text(file), "tokens",
                              (json_int_t)p->n, "computed_tokens", (json_int_t)row.report.query_tokens, "stored_tokens",
                              (json_int_t)n_stored, "kv_bytes", (json_int_t)bytes, "node", (json_int_t)node, "pinned",
                              pinned, "ms", (double)row.ttft_ns * 1e-6);
        rc = json_array_append_new(w->array, o) == 0 ? 0 : app_fail("out of memory");
    } else {
        char size[32];
        printf("%s: %zu of %zu tokens stored, %zu computed, KV of %s, node %llu%s\n", file, n_stored, p->n,
               row.report.query_tokens, text_bytes(bytes, size), (unsigned long long)node,
               pinned ? ", pinned" : "");
    }
    if (rc == 0 && n_stored == 0)
        rc = app_fail("%s isn't stored: fewer than --min-store tokens, or no room (-v shows more)", file);
    return rc;
}

int cmd_warm(int argc, char **argv)
{
    warm_settings s = {.system = "impress", .n_batch = 2048, .n_ubatch = 512};
    int n_positional;
    int rc = opt_parse(&warm_command, argc, argv, &s, &n_positional);
    if (rc) return rc == 1 ? 0 : rc;
    if (n_positional) return opt_misuse(&warm_command, "unexpected argument `%s`", argv[1]);
    if ((rc = check(&s)) != 0) return rc;

    warming w = {.s = &s};
    imp_store_opts opts;
    app_system system;
    char error[SWITCH_ERROR_BYTES];
    if (app_system_make("--system", s.system, &s.store.switches, 0.25, &system, error) < 0)
        return opt_misuse(&warm_command, "%s", error);
    if ((rc = store_settings_apply(&warm_command, &s.store, &opts)) != 0) return rc;
    app_system_store(&system, &opts);
    app_log_show(s.verbose);
    rc = store_settings_open(&s.store, &opts, &w.store);
    if (rc == 0) rc = app_model_load(s.model, s.verbose, &w.model);
    if (rc == 0) rc = make_prompts(&w);
    if (rc == 0) rc = open_context(&w, &system);
    if (rc == 0 && s.json && !(w.array = json_array())) rc = app_fail("out of memory");
    for (size_t i = 0; rc == 0 && i < w.n_prompts; i++) rc = warm_one(&w, i);
    if (w.array && json_array_size(w.array) > 0) {
        int printed = report_print_json(json_incref(w.array));
        if (printed) rc = printed;
    }

    json_decref(w.array);
    imp_space_close(w.space);
    imp_llama_free(w.ctx);
    imp_store_close(w.store);
    llama_model_free(w.model);
    for (size_t i = 0; i < w.n_prompts; i++) app_prompt_free(&w.prompts[i]);
    free(w.prompts);
    return rc;
}
