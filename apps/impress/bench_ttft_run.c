/* bench_ttft_run.c: prefixes, stores, requests. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bench_ttft.h"
#include "eval_rows.h"
#include "model.h"
#include "report.h"

/* About 32 tokens each, that suit any text. */
static const char *const built_in[] = {
    "Read the whole text once more and tell in two or three short sentences what it is about, for somebody who has never "
    "seen it and has little time.",
    "Which persons, places or things are named most often in the text, and what does the text say about the most "
    "important one of them, in your own words?",
    "What happens, or is explained, in the second half of the text, and how does that follow from what was said "
    "before? Answer in one sentence only, please.",
    "Name three facts that the text states, in the order in which they come, and for each of them say in a few words "
    "where in the text it is found.",
    "Is there anything in the text that should be avoided, or that goes wrong? Say what it is, why it is so, and what "
    "could be done about it instead.",
    "Which numbers, dates or amounts does the text give, what does each of them stand for, and which is the largest one? "
    "If there are none, say so.",
    "How does the text begin and how does it end, and what has changed between the two? Answer briefly, and quote no "
    "more than five words from it.",
    "What question does the text leave open, and what would you have to know in order to answer it? Do not guess, and "
    "keep to what is written there.",
};

static volatile sig_atomic_t stop_asked;

static void on_signal(int number)
{
    (void)number;
    stop_asked = 1;
}

/* The second one ends the program at once. */
void ttft_watch_signals(void)
{
    struct sigaction a = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};
    sigemptyset(&a.sa_mask);
    sigaction(SIGINT, &a, NULL);
    sigaction(SIGTERM, &a, NULL);
}

bool ttft_stopped(void) { return stop_asked != 0; }

static void drop_file(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    (void)fdatasync(fd); /* what isn't written out stays */
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
}

void ttft_drop_pages(const char *dir)
{
    DIR *d = opendir(dir);
    if (!d) return;
    for (const struct dirent *e; (e = readdir(d));) {
        char path[4400];
        struct stat st;
        if (e->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        if (lstat(path, &st) != 0) continue;
        if (S_ISDIR(st.st_mode)) ttft_drop_pages(path);
        else if (S_ISREG(st.st_mode)) drop_file(path);
    }
    closedir(d);
}

/* ---- opening */

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static const char *folder(const ttft_bench *b)
{
    return b->s->store.dir ? b->s->store.dir : store_default_dir("bench");
}

int ttft_open(ttft_bench *b)
{
    const ttft_settings *s = b->s;
    struct stat st;
    if (stat(s->model, &st) != 0) return app_fail("can't read the model %s: %s", s->model, strerror(errno));
    b->model_name = base_name(s->model);
    b->model_bytes = (uint64_t)st.st_size;
    int rc = ttft_rows_open(s->out, &b->rows);
    if (rc == 0) rc = app_model_load(s->model, s->verbose, &b->model);
    if (rc == 0) b->n_vocab = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(b->model));
    return rc;
}

static void forget_length(ttft_bench *b)
{
    app_stores_close(&b->stores);
    bench_set_free(&b->set);
    free(b->asks);
    free(b->reference);
    free(b->known);
    b->asks = NULL;
    b->reference = NULL;
    b->known = NULL;
}

int ttft_finish(ttft_bench *b, int rc)
{
    const char *out = b->s->out;
    text_progress_end(&b->progress);
    if (rc == 0 && !b->s->json) rc = ttft_tables(b);
    if (rc == 0 && ttft_stopped()) {
        fprintf(stderr, "impress %s: stopped%s%s\n", b->command->name, out ? "; the same command goes on from " : "",
                out ? out : "");
        rc = 130;
    }
    forget_length(b);
    llama_model_free(b->model);
    ttft_rows_close(b->rows);
    free(b->cells);
    free(b->shown);
    return rc;
}

/* ---- prefixes */

/* Bytes of `text` whose tokens are about n: where a word ends. */
static int cut_bytes(const ttft_bench *b, const char *text, size_t n_bytes, size_t n, size_t *out)
{
    app_prompt all = {0};
    char piece[512];
    *out = 0;
    if (!app_prompt_append(llama_model_get_vocab(b->model), &all, text, n_bytes, false, false))
        return app_fail("out of memory");
    if (all.n <= n) n = all.n;
    for (size_t i = 0; i < n; i++) *out += app_token_text(b->model, all.tokens[i], piece, sizeof piece);
    app_prompt_free(&all);
    if (*out > n_bytes) *out = n_bytes;
    for (size_t back = 0; back < 64 && *out > 64 && *out < n_bytes && !strchr(" \n\t", text[*out]); back++) --*out;
    return 0;
}

/* The text of prefix `i`, cut to `n` tokens, those of the next ones behind it where it is shorter. */
static int cut_prefix(const ttft_bench *b, const bench_set *all, size_t i, size_t n, char **text, size_t *n_bytes)
{
    size_t used = 0, cap = 1;
    *text = NULL;
    for (size_t k = 0; k < all->n_prefixes; k++) cap += all->prefixes[k].n_bytes + 2;
    char *out = malloc(cap);
    if (!out) return app_fail("out of memory");
    int rc = 0;
    for (size_t k = 0; rc == 0 && k < all->n_prefixes; k++) {
        const bench_prefix *p = &all->prefixes[(i + k) % all->n_prefixes];
        size_t keep;
        memcpy(out + used, p->text, p->n_bytes);
        used += p->n_bytes;
        rc = cut_bytes(b, out, used, n, &keep);
        if (rc == 0 && keep < used) {
            *n_bytes = keep;
            out[keep] = '\0';
            *text = out;
            return 0;
        }
        memcpy(out + used, "\n\n", 2);
        used += 2;
    }
    free(out);
    return rc ? rc : app_fail("all prefixes together have less than %zu tokens", n);
}

static int cut_all(const ttft_bench *b, bench_set *set, size_t n)
{
    char **texts = calloc(set->n_prefixes, sizeof *texts);
    size_t *sizes = calloc(set->n_prefixes, sizeof *sizes);
    int rc = texts && sizes ? 0 : app_fail("out of memory");
    for (size_t i = 0; rc == 0 && i < set->n_prefixes; i++) rc = cut_prefix(b, set, i, n, &texts[i], &sizes[i]);
    for (size_t i = 0; i < set->n_prefixes && texts && sizes; i++) {
        if (rc == 0) {
            free(set->prefixes[i].text);
            set->prefixes[i].text = texts[i];
            set->prefixes[i].n_bytes = sizes[i];
        } else {
            free(texts[i]);
        }
    }
    free(texts);
    free(sizes);
    return rc;
}

/* Only the first n prefixes stay. */
static void keep_first(bench_set *set, size_t n)
{
    for (size_t i = n; i < set->n_prefixes; i++) {
        free(set->prefixes[i].path);
        free(set->prefixes[i].text);
    }
    if (n < set->n_prefixes) set->n_prefixes = n;
}

static int read_set(ttft_bench *b, size_t length)
{
    const ttft_settings *s = b->s;
    opt_texts asked = s->questions;
    if (asked.n == 0 && !s->question_file)
        for (size_t i = 0; i < sizeof built_in / sizeof *built_in; i++) asked.items[asked.n++] = built_in[i];
    int rc = bench_set_read(&b->set, &s->files, s->prefixes, &asked, s->question_file, s->n_warm);
    if (rc == 0 && length) rc = cut_all(b, &b->set, length);
    if (rc == 0 && s->n_prefixes) keep_first(&b->set, s->n_prefixes);
    if (rc == 0) rc = bench_set_tokens(&b->set, b->model, s->raw);
    size_t most = (size_t)llama_model_n_ctx_train(b->model);
    if (rc == 0 && b->set.longest + 8 > most)
        rc = app_fail("a prompt of %zu tokens is too long for the model's context of %zu (--prefix-tokens cuts)",
                      b->set.longest, most);
    return rc;
}

/* Each rep goes once over all prefixes, in an order of its own, with another question. */
static int order_asks(ttft_bench *b)
{
    size_t n = b->set.n_prefixes, n_left = b->set.n_questions - b->set.n_warm;
    uint64_t random = b->s->seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    b->n_asks = b->s->reps * n;
    b->asks = calloc(b->n_asks, sizeof *b->asks);
    if (!b->asks) return app_fail("out of memory");
    for (size_t rep = 0; rep < b->s->reps; rep++) {
        ttft_ask *these = b->asks + rep * n;
        for (size_t p = 0; p < n; p++)
            these[p] = (ttft_ask){.prefix = p, .question = b->set.n_warm + (rep + p) % n_left, .rep = rep};
        for (size_t i = n; i > 1; i--) { /* Fisher-Yates over a xorshift */
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            size_t k = (size_t)(random % i);
            ttft_ask t = these[i - 1];
            these[i - 1] = these[k];
            these[k] = t;
        }
    }
    return 0;
}

/* ---- stores */

static size_t f16_bytes(const app_stores *s)
{
    size_t n = 0;
    for (uint32_t l = 0; l < s->shape.n_layers; l++) {
        const imp_layer_shape *h = &s->shape.layers[l];
        n += (size_t)h->n_kv_heads * (h->head_dim_k + h->head_dim_v) * 2;
    }
    return n;
}

static int open_stores(ttft_bench *b)
{
    const ttft_settings *s = b->s;
    imp_store_opts opts;
    imp_llama *ctx = NULL;
    int rc = store_settings_apply(b->command, &s->store, &opts);
    if (rc) return rc;
    opts.limit_bytes = s->store_limit;
    rc = app_stores_open(&b->stores, folder(b), &opts);
    if (rc) return rc;
    struct llama_context_params cp =
        app_context_params(b->set.longest + 8, s->n_batch, s->n_ubatch, s->n_threads, s->cache_type);
    imp_llama_params params;
    imp_llama_params_init(&params);
    params.store = b->stores.source;
    params.model_files = &s->model;
    params.n_model_files = 1;
    params.widen_query = true;
    if (imp_llama_init(b->model, cp, &params, &ctx) < 0) return app_fail("%s", imp_last_error());
    rc = app_stores_attach(&b->stores, ctx);
    if (rc == 0 && app_model_unchanged(s->model)) rc = 1;
    const char *why;
    if (rc == 0 && imp_llama_get_fit(ctx, &why) != IMP_LLAMA_FIT_FULL)
        rc = app_fail("this model's prefixes can't be loaded in part: %s", why);
    b->f16_token_bytes = f16_bytes(&b->stores);
    for (size_t i = 0; rc == 0 && i < b->n_cells; i++) {
        imp_llama_request request;
        imp_llama_request_init(&request);
        app_system_request(&b->cells[i].system, &request);
        const char *note = b->cells[i].system.recompute ? "" : imp_llama_note(ctx, &request);
        if (*note && (i == 0 || strcmp(b->cells[i].system.name, b->cells[i - 1].system.name) != 0))
            fprintf(stderr, "impress: note: %s: %s\n", b->cells[i].system.name, note);
    }
    return rc;
}

static uint64_t host_cache(const ttft_bench *b)
{
    unsigned above = 0, below = 1;
    uint64_t n = 0;
    if (!strchr(b->s->host_cache, '/')) {
        text_parse_size(b->s->host_cache, &n);
        return n;
    }
    for (size_t i = 0; i < b->set.n_prefixes; i++) n += b->set.prefixes[i].shared.n * b->f16_token_bytes;
    sscanf(b->s->host_cache, "%u/%u", &above, &below);
    return n / below * above;
}

/* The largest file of the source's segments: what its disk can do is measured there. */
static bool largest_segment(const ttft_bench *b, char *path, size_t n)
{
    char dir[3200];
    off_t most = 0;
    snprintf(dir, sizeof dir, "%s/source/segments", b->stores.dir);
    DIR *d = opendir(dir);
    for (const struct dirent *e; d && (e = readdir(d));) {
        char file[3600];
        struct stat st;
        snprintf(file, sizeof file, "%s/%s", dir, e->d_name);
        if (e->d_name[0] == '.' || stat(file, &st) != 0 || st.st_size <= most) continue;
        most = st.st_size;
        snprintf(path, n, "%s", file);
    }
    if (d) closedir(d);
    return most >= 256 << 10;
}

static int measure_disk(ttft_bench *b)
{
    char path[3600];
    imp_read_figures f;
    imp_read_trial t = {.struct_bytes = sizeof t, .flags = b->s->store.no_direct ? IMP_STORE_NO_DIRECT : 0,
                        .mode = b->stores.opts.io_mode, .block_bytes = 256 << 10, .depth = 32,
                        .max_bytes = UINT64_MAX, .max_ns = 300000000};
    if (b->bandwidth || !largest_segment(b, path, sizeof path)) return 0;
    ttft_drop_pages(b->stores.dir);
    if (imp_measure_reads(path, &t, &f) < 0) return app_fail("%s", imp_last_error());
    b->bandwidth = f.ns ? (uint64_t)((double)f.n_bytes * 1e9 / (double)f.ns) : 0;
    return 0;
}

/* ---- rows */

json_t *ttft_key(const ttft_bench *b, const ttft_place *place, const char *system, double retention, const char *kept,
                 const ttft_ask *ask)
{
    const ttft_settings *s = b->s;
    const bench_prefix *p = &b->set.prefixes[ask->prefix];
    const app_prompt *prompt = &p->prompts[ask->question];
    char settings[300], hash[17], share[32];
    snprintf(settings, sizeof settings, "%s batch=%" PRIu64 "/%" PRIu64 " threads=%" PRIu64 " warm-up=%" PRIu64
             " seed=%" PRIu64 " prefixes=%zu device=%" PRIu64 " io=%s%s", s->cache_type ? s->cache_type : "f16",
             s->n_batch, s->n_ubatch, s->n_threads, s->n_warm, s->seed, b->set.n_prefixes, s->store.device_cache,
             s->store.io ? s->store.io : "auto", s->store.no_direct ? " no-direct" : "");
    snprintf(hash, sizeof hash, "%016" PRIx64,
             eval_hash(EVAL_HASH_SEED, prompt->tokens, prompt->n * sizeof *prompt->tokens));
    snprintf(share, sizeof share, "%.6g", retention);
    return json_pack("{s:s, s:s, s:o, s:I, s:s, s:s, s:s, s:f, s:I, s:I, s:I, s:o, s:s, s:I, s:I}", "bench", "ttft",
                     "state", place->state, "model", report_text(b->model_name), "model_bytes",
                     (json_int_t)b->model_bytes, "settings", settings, "system", system, "kept", kept, "retention",
                     strtod(share, NULL), "length", (json_int_t)place->length, "io_limit",
                     (json_int_t)place->io_limit, "host_cache_bytes", (json_int_t)host_cache(b), "prefix",
                     report_text(base_name(p->path)), "prompt", hash, "question", (json_int_t)ask->question, "rep",
                     (json_int_t)ask->rep);
}

/* Memory that this process has, now. */
static uint64_t resident_bytes(void)
{
    unsigned long long all, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%llu %llu", &all, &resident) != 2) resident = 0;
    if (f) fclose(f);
    return (uint64_t)resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

int ttft_keep(ttft_bench *b, json_t *key, const app_row *row, const ttft_place *place, json_t *own)
{
    json_t *more = report_json(row, b->model_name);
    imp_stats stats = {0};
    if (b->stores.current) imp_store_stats(b->stores.current, &stats);
    uint64_t bandwidth = b->bandwidth;
    if (place->io_limit && (!bandwidth || place->io_limit < bandwidth)) bandwidth = place->io_limit;
    const imp_llama_report *r = &row->report;
    double ttft = (double)row->ttft_ns / 1e6;
    double parts = (double)(r->match_ns + r->identify_ns + r->io_wait_ns + r->gather_ns) / 1e6;
    double compute = ttft > parts ? ttft - parts : 0;
    double reading = bandwidth ? (double)r->bytes_read * 1e3 / (double)bandwidth : 0;
    double limit = compute > reading ? compute : reading;
    uint64_t full = row->prefix_tokens * b->f16_token_bytes;
    int bad = !key || !more || json_object_update_missing(key, more) != 0;
    bad = bad || json_object_set_new(key, "version", json_string(imp_version()));
    bad = bad || json_object_set_new(key, "same_first", row->compared ? json_boolean(row->top1_same) : json_null());
    bad = bad || json_object_set_new(key, "bytes_f16", json_integer((json_int_t)full));
    bad = bad || json_object_set_new(key, "bandwidth", json_integer((json_int_t)bandwidth));
    bad = bad || json_object_set_new(key, "reading_ms", json_real(reading));
    bad = bad || json_object_set_new(key, "limit_ms", json_real(limit));
    bad = bad || json_object_set_new(key, "store_memory_bytes", json_integer((json_int_t)(stats.memory_bytes +
                                     stats.host_bytes + stats.device_bytes)));
    bad = bad || json_object_set_new(key, "resident_bytes", json_integer((json_int_t)resident_bytes()));
    bad = bad || (own && json_object_update(key, own) != 0);
    json_decref(more);
    json_decref(own);
    if (bad) {
        json_decref(key);
        return app_fail("out of memory");
    }
    int rc = ttft_rows_add(b->rows, key);
    return rc ? rc : ttft_show(b, place, ttft_rows_at(b->rows, ttft_rows_count(b->rows) - 1));
}

int ttft_show(ttft_bench *b, const ttft_place *place, const json_t *row)
{
    ttft_shown *more = realloc(b->shown, (b->n_shown + 1) * sizeof *more);
    if (!more) return app_fail("out of memory");
    b->shown = more;
    more[b->n_shown++] = (ttft_shown){.place = *place, .row = row};
    if (!b->s->json) return 0;
    bool ok = json_dumpf(row, stdout, JSON_COMPACT | JSON_REAL_PRECISION(9)) == 0 && putchar('\n') != EOF &&
              fflush(stdout) == 0;
    return ok ? 0 : app_fail("can't write a row to standard output");
}

void ttft_compare(const ttft_bench *b, const ttft_ask *ask, const float *logits, app_row *row)
{
    size_t at = ask->prefix * b->set.n_questions + ask->question;
    row->compared = b->known[at];
    if (row->compared) row->kl = app_kl(b->reference + at * b->n_vocab, logits, b->n_vocab, &row->top1_same);
}

/* ---- requests */

/* recomp finds nothing anywhere: it is asked once a prefix, and in one state. */
static bool is_asked(const ttft_cell *c, size_t limit, size_t state, const ttft_ask *ask)
{
    return !c->system.recompute || (ask->rep == 0 && limit == 0 && state == 0);
}

static ttft_place place_of(const ttft_bench *b, size_t limit, size_t state)
{
    return (ttft_place){.length = b->length, .io_limit = b->limits[limit], .state = b->states[state]};
}

static json_t *cell_key(const ttft_bench *b, const ttft_place *place, const ttft_cell *c, const ttft_ask *ask)
{
    char kept[64];
    const app_system *s = &c->system;
    return ttft_key(b, place, c->name, s->chooses ? s->load.retention : 1,
                    s->recompute ? "-" : app_system_combination(s, kept), ask);
}

static const json_t *find_row(const ttft_bench *b, const ttft_place *place, const ttft_cell *c, const ttft_ask *ask)
{
    json_t *key = cell_key(b, place, c, ask);
    const json_t *row = key ? ttft_rows_find(b->rows, key) : NULL;
    json_decref(key);
    return row;
}

/* How many rows of a cell aren't there yet, at one limit and in one state. */
static size_t count_open(const ttft_bench *b, const ttft_cell *c, size_t limit, size_t state)
{
    ttft_place place = place_of(b, limit, state);
    size_t n = 0;
    for (size_t i = 0; i < b->n_asks; i++)
        n += is_asked(c, limit, state, &b->asks[i]) && !find_row(b, &place, c, &b->asks[i]);
    return n;
}

static imp_llama_request request_of(const ttft_cell *c)
{
    imp_llama_request request;
    imp_llama_request_init(&request);
    app_system_request(&c->system, &request);
    request.adaptive = c->adaptive;
    return request;
}

static void show_progress(ttft_bench *b, const ttft_place *place, const ttft_cell *c)
{
    char detail[256], limit[40] = "";
    if (place->io_limit) text_bytes(place->io_limit, limit);
    snprintf(detail, sizeof detail, "%zu of %zu (%s, %s%s%s)", b->n_done, b->n_all, c->name, place->state,
             *limit ? ", a second " : "", limit);
    text_progress_at(&b->progress, b->n_all ? (double)b->n_done / (double)b->n_all : 0, detail);
}

static int measure(ttft_bench *b, const ttft_cell *c, const ttft_place *place, const ttft_ask *ask)
{
    imp_llama_request request = request_of(c);
    request.load.record = IMP_RECORD_NOTHING; /* what is measured teaches nothing */
    app_row row;
    show_progress(b, place, c);
    int rc = bench_ask(&b->stores, &b->set, ask->prefix, ask->question, &request, &row);
    const float *logits = rc == 0 ? app_logits(b->stores.ctx) : NULL;
    if (!logits) return 1;
    row.system = c->name;
    row.retention = c->system.chooses ? c->system.load.retention : 1;
    ttft_compare(b, ask, logits, &row);
    b->n_done++;
    return ttft_keep(b, cell_key(b, place, c, ask), &row, place, NULL);
}

/* One question to all prefixes, for what it leaves behind. */
static int ask_all(ttft_bench *b, const ttft_cell *c, size_t question)
{
    imp_llama_request request = request_of(c);
    app_row row;
    int rc = 0;
    for (size_t p = 0; rc == 0 && p < b->set.n_prefixes && !ttft_stopped(); p++)
        rc = bench_ask(&b->stores, &b->set, p, question, &request, &row);
    return rc;
}

/* A store that knows the prefixes and what the first questions taught: read at full speed, as nothing is timed. */
int ttft_prepare(ttft_bench *b, const ttft_cell *c)
{
    if (c->system.recompute) return 0;
    b->stores.opts.read_bytes_per_s = 0;
    b->stores.opts.host_cache_bytes = 0;
    int rc = app_stores_enter(&b->stores, &c->system, true);
    /* Shorter and longer prefixes of earlier runs go too: a part of a longer one would be read with what isn't needed. */
    if (rc == 0 && (imp_store_remove(b->stores.current, 0) < 0 || imp_store_gc(b->stores.current, NULL) < 0))
        rc = app_fail("%s", imp_last_error());
    for (size_t p = 0; rc == 0 && p < b->set.n_prefixes; p++)
        rc = app_stores_put(&b->stores, &b->set.prefixes[p].shared);
    for (size_t q = 0; rc == 0 && q < b->set.n_warm && !ttft_stopped(); q++) rc = ask_all(b, c, q);
    for (size_t p = 0; rc == 0 && p < b->set.n_prefixes && !ttft_stopped(); p++)
        rc = app_stores_settle(&b->stores, &c->system, &b->set.prefixes[p].shared);
    return rc;
}

/* The store anew, with empty caches, as it is to be measured. */
static int enter(ttft_bench *b, const ttft_cell *c, uint64_t io_limit)
{
    if (c->system.recompute) return 0;
    b->stores.opts.read_bytes_per_s = io_limit;
    b->stores.opts.host_cache_bytes = host_cache(b);
    return app_stores_enter(&b->stores, &c->system, false);
}

/* The requests of a cell at one limit in one state. Where some are there already, the warm ones are asked again all the
 * same: what is in the caches depends on all that came before. */
static int run_state(ttft_bench *b, const ttft_cell *c, size_t limit, size_t state)
{
    ttft_place place = place_of(b, limit, state);
    bool cold = !strcmp(place.state, "cold");
    size_t n_open = count_open(b, c, limit, state);
    int rc = 0;
    if (n_open && !cold) {
        rc = enter(b, c, place.io_limit);
        show_progress(b, &place, c);
        if (rc == 0 && b->set.n_warm && !c->system.recompute) rc = ask_all(b, c, 0);
    }
    for (size_t i = 0; rc == 0 && i < b->n_asks && !ttft_stopped(); i++) {
        const ttft_ask *ask = &b->asks[i];
        if (!is_asked(c, limit, state, ask)) continue;
        const json_t *row = find_row(b, &place, c, ask);
        if (row) {
            imp_llama_request request = request_of(c);
            request.load.record = IMP_RECORD_NOTHING;
            app_row again;
            if (n_open && !cold) rc = bench_ask(&b->stores, &b->set, ask->prefix, ask->question, &request, &again);
            if (rc == 0) rc = ttft_show(b, &place, row);
            continue;
        }
        if (cold) {
            rc = enter(b, c, place.io_limit);
            ttft_drop_pages(b->stores.dir);
        }
        if (rc == 0) rc = measure(b, c, &place, ask);
    }
    return rc;
}

int ttft_cell_run(ttft_bench *b, const ttft_cell *c)
{
    size_t n_open = 0;
    for (size_t l = 0; l < b->n_limits; l++)
        for (size_t s = 0; s < b->n_states; s++) n_open += count_open(b, c, l, s);
    int rc = n_open ? ttft_prepare(b, c) : 0;
    for (size_t l = 0; l < b->n_limits; l++)
        for (size_t s = 0; rc == 0 && s < b->n_states && !ttft_stopped(); s++) rc = run_state(b, c, l, s);
    return rc;
}

/* ---- one length */

/* Which answers over all KV are needed: those of rows that aren't there. Returns how many rows these are. */
static size_t mark_open(ttft_bench *b, bool *wanted)
{
    size_t n = 0;
    for (size_t c = 0; c < b->n_cells; c++) {
        for (size_t i = 0; i < b->n_limits * b->n_states * b->n_asks; i++) {
            const ttft_ask *ask = &b->asks[i % b->n_asks];
            size_t state = i / b->n_asks % b->n_states, limit = i / b->n_asks / b->n_states;
            ttft_place place = place_of(b, limit, state);
            if (!is_asked(&b->cells[c], limit, state, ask) || find_row(b, &place, &b->cells[c], ask)) continue;
            wanted[ask->prefix * b->set.n_questions + ask->question] = true;
            n++;
        }
    }
    return n;
}

/* The answers over all of the prefix's KV, as computed: what every row is compared with. */
static int answer_all(ttft_bench *b, const bool *wanted)
{
    imp_llama_request request;
    app_row row;
    imp_llama_request_init(&request);
    int rc = 0;
    for (size_t p = 0; rc == 0 && p < b->set.n_prefixes && !ttft_stopped(); p++) {
        for (size_t q = 0; rc == 0 && q < b->set.n_questions && !ttft_stopped(); q++) {
            size_t at = p * b->set.n_questions + q;
            if (!wanted[at]) continue;
            text_progress_at(&b->progress, 0, "answers over all KV, to compare with");
            rc = bench_ask(&b->stores, &b->set, p, q, &request, &row);
            const float *logits = rc == 0 ? app_logits(b->stores.ctx) : NULL;
            if (!logits) return 1;
            memcpy(b->reference + at * b->n_vocab, logits, b->n_vocab * sizeof *logits);
            b->known[at] = true;
        }
    }
    return rc;
}

int ttft_length(ttft_bench *b, size_t i)
{
    forget_length(b);
    b->length = b->lengths[i];
    int rc = read_set(b, b->length);
    if (rc == 0) rc = order_asks(b);
    if (rc == 0) rc = open_stores(b);
    if (rc) return rc;
    size_t n = b->set.n_prefixes * b->set.n_questions;
    b->known = calloc(n, sizeof *b->known);
    b->reference = malloc(n * b->n_vocab * sizeof *b->reference);
    bool *wanted = calloc(n, sizeof *wanted);
    rc = b->known && b->reference && wanted ? 0 : app_fail("out of memory");
    if (rc == 0 && (b->n_all = mark_open(b, wanted)) > 0) {
        for (size_t p = 0; rc == 0 && p < b->set.n_prefixes && !ttft_stopped(); p++)
            rc = app_stores_learn(&b->stores, &b->set.prefixes[p].shared, b->set.prefixes[p].path);
        if (rc == 0 && !ttft_stopped()) rc = answer_all(b, wanted);
        if (rc == 0) rc = measure_disk(b);
    }
    b->n_done = 0;
    free(wanted);
    return rc;
}
