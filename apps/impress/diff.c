/* impress diff: where two prompts part, and what that costs. Exit codes as diff(1)'s: 0 same, 1 differ, 2 trouble. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commands.h"
#include "impress/llama.h"
#include "model.h"
#include "report.h"
#include "store_options.h"
#include "stored.h"
#include "text.h"

enum { SAME = 0, DIFFER = 1, TROUBLE = 2, N_AROUND = 4 };

typedef struct diff_settings {
    store_settings store; /* only dir and key have options here */
    const char *model, *salt, *cache_type;
    bool raw, special, json, verbose;
} diff_settings;

#define AT(member) offsetof(diff_settings, member)

static const opt options[] = {
    {"model", 'm', OPT_TEXT, AT(model), "FILE", "the model, a GGUF file", false},
    {"raw", 0, OPT_FLAG, AT(raw), NULL, "the files are whole prompts, without a chat template", false},
    {"special", 0, OPT_FLAG, AT(special), NULL, "with --raw: read the names of control tokens in them as such", true},
    {"store", 0, OPT_TEXT, AT(store.dir), "DIR", "say as well how much of each this store has", false},
    {"key-file", 0, OPT_TEXT, AT(store.key_file), "FILE", "the key of an encrypted store", false},
    {"salt", 0, OPT_TEXT, AT(salt), "TEXT", "of the prefixes that are stored under this salt", false},
    {"cache-type", 0, OPT_TEXT, AT(cache_type), "TYPE", "the cache's type: f16 (default) or q8_0", false},
    {"json", 0, OPT_FLAG, AT(json), NULL, "print JSON: positions and sizes, no text of the files", true},
    {"verbose", 'v', OPT_FLAG, AT(verbose), NULL, "show llama.cpp's log and ours", false},
};

const opt_command diff_command = {
    "diff",
    "diff A.txt B.txt -m MODEL.gguf [OPTIONS]",
    "Find the first token in which two prompts differ, and what it costs: KV is shared up to there\n"
    "and no further, however much alike the rest is.",
    "Without --raw each file is taken as the prefix of `impress run`. Exits 0 if all tokens are the same,\n"
    "1 if they differ, 2 on trouble.",
    options,
    sizeof options / sizeof *options,
};

typedef struct side {
    const char *path;
    char *text; /* [n_bytes] */
    size_t n_bytes;
    app_prompt prompt;         /* of which n_prefix tokens count */
    size_t byte, line, column; /* of the difference */
    bool guessed;              /* the tokens don't spell the text: where the bytes differ */
    size_t n_stored;
} side;

typedef struct comparison {
    const diff_settings *s;
    struct llama_model *model;
    side sides[2];
    size_t n_shared;
    uint64_t token_bytes; /* of KV; 0: not known */
    bool same, looked;    /* in a store */
} comparison;

/* ---- tokens */

static int make_side(const comparison *c, side *e)
{
    int rc = app_read_text(e->path, &e->text, &e->n_bytes);
    if (rc) return rc;
    if (!c->s->raw) {
        rc = app_prompt_make(c->model, e->text, e->n_bytes, "", false, &e->prompt);
    } else {
        if (!app_prompt_append(llama_model_get_vocab(c->model), &e->prompt, e->text, e->n_bytes, true, c->s->special))
            rc = app_fail("%s can't be turned into tokens (out of memory, or too long)", e->path);
        e->prompt.n_prefix = e->prompt.n;
    }
    return rc;
}

/* A token's bytes, control tokens by their names. */
static size_t piece(const struct llama_model *model, llama_token token, char *buf, size_t n)
{
    int32_t got = llama_token_to_piece(llama_model_get_vocab(model), token, buf, (int32_t)n, 0, true);
    return got > 0 ? (size_t)got : 0;
}

/* Where in its file does token `n_shared` begin? The tokens spell what comes before the text, the text, and in a chat
 * the blank line behind it. Some vocabularies change what they spell; then it is the first byte that differs. */
static int locate(comparison *c, side *e, const side *other)
{
    char buf[512];
    size_t n = 0, before = 0, n_behind = c->s->raw ? 0 : 2;
    for (size_t i = 0; i < e->prompt.n_prefix; i++) n += piece(c->model, e->prompt.tokens[i], buf, sizeof buf);
    char *spelt = malloc(n + 1);
    if (!spelt) return app_fail("out of memory");
    n = 0;
    for (size_t i = 0; i < e->prompt.n_prefix; i++) {
        if (i == c->n_shared) before = n;
        size_t got = piece(c->model, e->prompt.tokens[i], buf, sizeof buf);
        memcpy(spelt + n, buf, got);
        n += got;
    }
    if (c->n_shared >= e->prompt.n_prefix) before = n;
    size_t start = n - e->n_bytes - n_behind;
    e->guessed = n < e->n_bytes + n_behind || memcmp(spelt + start, e->text, e->n_bytes) != 0;
    if (!e->guessed) {
        e->byte = before < start ? 0 : before - start;
        if (e->byte > e->n_bytes) e->byte = e->n_bytes;
    } else {
        e->byte = 0;
        while (e->byte < e->n_bytes && e->byte < other->n_bytes && e->text[e->byte] == other->text[e->byte]) e->byte++;
    }
    free(spelt);
    e->line = e->column = 1;
    for (size_t i = 0; i < e->byte; i++) {
        if (e->text[i] == '\n')
            e->line++, e->column = 1;
        else
            e->column += ((unsigned char)e->text[i] & 0xC0) != 0x80;
    }
    return 0;
}

static int compare(comparison *c)
{
    const app_prompt *a = &c->sides[0].prompt, *b = &c->sides[1].prompt;
    while (c->n_shared < a->n_prefix && c->n_shared < b->n_prefix && a->tokens[c->n_shared] == b->tokens[c->n_shared])
        c->n_shared++;
    c->same = c->n_shared == a->n_prefix && c->n_shared == b->n_prefix;
    int rc = c->same ? 0 : locate(c, &c->sides[0], &c->sides[1]);
    return rc || c->same ? rc : locate(c, &c->sides[1], &c->sides[0]);
}

/* ---- sizes */

/* Entry `i` of a whole number, or of a list of them, in the model's file; 0: there is none. */
static uint64_t meta(const struct llama_model *model, const char *arch, const char *name, size_t i)
{
    char key[160], value[8192];
    snprintf(key, sizeof key, "%s.%s", arch, name);
    if (llama_model_meta_val_str(model, key, value, sizeof value) < 0) return 0;
    const char *at = value;
    if (*at == '[')
        for (at++; i > 0 && at; i--) at = (at = strchr(at, ',')) ? at + 1 : NULL;
    return at ? strtoull(at, NULL, 10) : 0;
}

/* Bytes of a token's keys and values by what the file says, as nothing but the vocabulary was loaded. */
static uint64_t token_bytes(const struct llama_model *model, bool q8)
{
    char arch[64];
    uint64_t sum = 0;
    if (llama_model_meta_val_str(model, "general.architecture", arch, sizeof arch) < 0) return 0;
    uint64_t n_layers = meta(model, arch, "block_count", 0), width = meta(model, arch, "embedding_length", 0);
    for (size_t l = 0; l < n_layers && l < 4096; l++) {
        uint64_t heads = meta(model, arch, "attention.head_count", l),
                 kv = meta(model, arch, "attention.head_count_kv", l);
        uint64_t k = meta(model, arch, "attention.key_length", 0), v = meta(model, arch, "attention.value_length", 0);
        if (kv == 0) kv = heads;
        if (k == 0 && heads > 0) k = width / heads;
        if (v == 0) v = k;
        sum += imp_type_bytes(q8 ? IMP_TYPE_Q8_0 : IMP_TYPE_F16, (size_t)(kv * k)) +
               imp_type_bytes(q8 ? IMP_TYPE_Q8_0 : IMP_TYPE_F16, (size_t)(kv * v));
    }
    return sum;
}

/* ---- a store */

static int look_into_store(comparison *c)
{
    const diff_settings *s = c->s;
    const char *dir = store_settings_dir(&s->store);
    imp_store *store = NULL;
    imp_llama *ctx = NULL;
    imp_space *space = NULL;
    imp_store_opts opts;
    imp_store_opts_init(&opts);
    opts.key_file = s->store.key_file;
    bool writable = faccessat(AT_FDCWD, dir, W_OK, AT_EACCESS) == 0 || errno == ENOENT;
    opts.flags = IMP_STORE_MUST_EXIST | (writable ? 0 : IMP_STORE_READONLY);
    int rc = imp_store_open(dir, &opts, &store) < 0 ? app_fail("%s", imp_last_error()) : 0;
    if (rc == 0) {
        imp_llama_params params;
        imp_llama_params_init(&params);
        params.store = store;
        params.model_files = &s->model;
        params.n_model_files = 1;
        params.salt = s->salt;
        params.request.store_new = false;
        struct llama_context_params cp = app_context_params(512, 512, 512, 0, s->cache_type);
        if (imp_llama_init(c->model, cp, &params, &ctx) < 0) rc = app_fail("%s", imp_last_error());
    }
    if (rc == 0) rc = app_model_unchanged(s->model);
    if (rc == 0 && imp_llama_open_space(ctx, s->salt, &space) < 0) rc = app_fail("%s", imp_last_error());
    if (rc == 0) {
        c->looked = true;
        c->token_bytes = imp_space_token_bytes(space);
        for (int i = 0; i < 2; i++)
            c->sides[i].n_stored =
                app_stored_tokens(space, c->sides[i].prompt.tokens, c->sides[i].prompt.n_prefix, NULL);
    }
    imp_space_close(space);
    imp_llama_free(ctx);
    imp_store_close(store);
    return rc;
}

/* ---- what is told */

/* Bytes of the character that s[n] begins with; 0: it is cut off, or none, or one that a terminal would obey. */
static size_t printable(const char *s, size_t n)
{
    unsigned char first = (unsigned char)s[0];
    size_t need = first < 0x80 ? 1 : first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : first < 0xF5 ? 4 : 0;
    if (need == 0 || need > n || first < 0x20 || first == 0x7F) return 0;
    for (size_t i = 1; i < need; i++)
        if (((unsigned char)s[i] & 0xC0) != 0x80) return 0;
    bool is_control = first == 0xC2 && (unsigned char)s[1] < 0xA0;
    return is_control ? 0 : need;
}

/* A token's text, other bytes spelt out. */
static void show_token(const struct llama_model *model, llama_token token)
{
    char buf[512];
    size_t n = piece(model, token, buf, sizeof buf);
    for (size_t i = 0, width; i < n; i += width ? width : 1) {
        width = printable(buf + i, n - i);
        if (width)
            printf("%.*s", (int)width, buf + i);
        else if (buf[i] == '\n')
            printf("\\n");
        else if (buf[i] == '\t')
            printf("\\t");
        else
            printf("\\x%02x", (unsigned)(unsigned char)buf[i]);
    }
}

static void show_side(const comparison *c, const side *e)
{
    const app_prompt *p = &e->prompt;
    size_t at = c->n_shared, from = at > N_AROUND ? at - N_AROUND : 0;
    printf("%s: %sline %zu, column %zu\n    ", e->path, e->guessed ? "about " : "", e->line, e->column);
    if (from > 0) printf("... ");
    for (size_t i = from; i < at + N_AROUND && i < p->n_prefix; i++) {
        printf(i == at ? "[" : i > from ? "|" : "");
        show_token(c->model, p->tokens[i]);
        if (i == at) printf("]");
    }
    printf(at >= p->n_prefix ? "[end]\n" : at + N_AROUND < p->n_prefix ? " ...\n" : "\n");
}

static void show(const comparison *c)
{
    const side *a = &c->sides[0], *b = &c->sides[1];
    char bytes[32];
    if (c->same) {
        printf("the same %zu tokens\n", c->n_shared);
    } else {
        printf("first difference: token %zu (of %zu and %zu)\n", c->n_shared, a->prompt.n_prefix, b->prompt.n_prefix);
        show_side(c, a);
        show_side(c, b);
    }
    printf("shared: %zu tokens", c->n_shared);
    for (int i = 0; i < 2; i++)
        if (c->sides[i].prompt.n_prefix > 0)
            printf(", %.1f %% of %s", 100.0 * (double)c->n_shared / (double)c->sides[i].prompt.n_prefix,
                   c->sides[i].path);
    if (c->token_bytes) printf("; KV of %s", text_bytes(c->n_shared * c->token_bytes, bytes));
    putchar('\n');
    for (int i = 0; i < 2 && !c->same; i++) {
        size_t rest = c->sides[i].prompt.n_prefix - c->n_shared;
        printf("computed where only %s is stored: %zu tokens of %s", c->sides[1 - i].path, rest, c->sides[i].path);
        if (c->token_bytes) printf(", KV of %s", text_bytes(rest * c->token_bytes, bytes));
        putchar('\n');
    }
    for (int i = 0; i < 2 && c->looked; i++)
        printf("stored: %zu of %zu tokens of %s\n", c->sides[i].n_stored, c->sides[i].prompt.n_prefix,
               c->sides[i].path);
}

static json_t *side_json(const comparison *c, const side *e)
{
    json_t *o = json_pack("{s:o, s:I, s:I}", "file", report_text(e->path), "tokens", (json_int_t)e->prompt.n_prefix,
                          "computed_tokens", (json_int_t)(e->prompt.n_prefix - c->n_shared));
    if (o && !c->same) {
        json_object_set_new(o, "line", json_integer((json_int_t)e->line));
        json_object_set_new(o, "column", json_integer((json_int_t)e->column));
        json_object_set_new(o, "byte", json_integer((json_int_t)e->byte));
        json_object_set_new(o, "exact_place", json_boolean(!e->guessed));
    }
    if (o && c->looked) json_object_set_new(o, "stored_tokens", json_integer((json_int_t)e->n_stored));
    return o;
}

static int show_json(const comparison *c)
{
    json_t *o = json_pack("{s:b, s:o, s:I, s:o, s:o, s:[o, o]}", "same", c->same, "first_difference",
                          c->same ? json_null() : json_integer((json_int_t)c->n_shared), "shared_tokens",
                          (json_int_t)c->n_shared, "token_kv_bytes",
                          c->token_bytes ? json_integer((json_int_t)c->token_bytes) : json_null(), "shared_kv_bytes",
                          c->token_bytes ? json_integer((json_int_t)(c->token_bytes * c->n_shared)) : json_null(),
                          "files", side_json(c, &c->sides[0]), side_json(c, &c->sides[1]));
    return report_print_json(o);
}

static int check(const diff_settings *s, int n_positional, char **argv)
{
    if (n_positional != 2) return opt_misuse(&diff_command, "wants two files");
    if (!strcmp(argv[1], "-") && !strcmp(argv[2], "-"))
        return opt_misuse(&diff_command, "standard input can't be both");
    if (!s->model) return opt_misuse(&diff_command, "no model: -m MODEL.gguf");
    if (s->special && !s->raw) return opt_misuse(&diff_command, "--special goes with --raw");
    if (s->store.dir && !store_settings_dir(&s->store)) return opt_misuse(&diff_command, "`none` is no store");
    if (s->cache_type && strcmp(s->cache_type, "f16") && strcmp(s->cache_type, "q8_0"))
        return opt_misuse(&diff_command, "--cache-type: `%s` is not one of f16, q8_0", s->cache_type);
    return 0;
}

int cmd_diff(int argc, char **argv)
{
    diff_settings s = {0};
    int n_positional;
    int rc = opt_parse(&diff_command, argc, argv, &s, &n_positional);
    if (rc) return rc == 1 ? 0 : rc;
    if ((rc = check(&s, n_positional, argv)) != 0) return rc;
    comparison c = {.s = &s, .sides = {{.path = argv[1]}, {.path = argv[2]}}};
    app_log_show(s.verbose);
    rc = s.store.dir ? app_model_load(s.model, s.verbose, &c.model) : app_vocabulary_load(s.model, s.verbose, &c.model);
    for (int i = 0; rc == 0 && i < 2; i++) rc = make_side(&c, &c.sides[i]);
    if (rc == 0) rc = compare(&c);
    if (rc == 0) c.token_bytes = token_bytes(c.model, s.cache_type && !strcmp(s.cache_type, "q8_0"));
    if (rc == 0 && s.store.dir) rc = look_into_store(&c);
    if (rc == 0 && s.json)
        rc = show_json(&c);
    else if (rc == 0)
        show(&c);
    for (int i = 0; i < 2; i++) {
        app_prompt_free(&c.sides[i].prompt);
        free(c.sides[i].text);
    }
    llama_model_free(c.model);
    return rc ? TROUBLE : c.same ? SAME : DIFFER;
}
