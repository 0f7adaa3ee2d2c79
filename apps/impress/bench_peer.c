/* impress bench peer-llama-server: the same prefixes and questions through llama-server, which saves the KV of a slot to a
 * file and restores it whole.
 *
 *     as, impress, ...      in this process, cold, as bench ttft measures them
 *     NAME (HTTP)           the same store through `impress serve`, a new process for each request
 *     llama-server          the slot is erased, the file leaves the page cache, then restore and completion
 *     llama-server, recompute   the whole prompt computed
 *
 * Over HTTP the time is that from the first byte sent to the end of the answer, which has one token; what a server's own
 * figures don't account for is `overhead_ms`. */
#include <glob.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bench.h"
#include "bench_http.h"
#include "bench_ttft.h"
#include "eval_rows.h"
#include "model.h"

static const opt options[] = {
    TTFT_SET_OPTS,
    {"systems", 's', OPT_TEXT, TTFT_AT(systems), "LIST",
     "our systems, each NAME or NAME+SWITCH=VALUE...\n(default: as,impress)", true},
    {"retention", 'r', OPT_TEXT, TTFT_AT(retention), "LIST",
     "shares of the prefix's tokens that each layer gets, for systems\nthat choose (default: 0.25)", true},
    {"warm-up", 0, OPT_COUNT, TTFT_AT(n_warm), "N", "the first N questions only teach our systems (default: 2)", true},
    {"reps", 0, OPT_COUNT, TTFT_AT(reps), "N", "ask so many questions on each prefix (default: 3)", true},
    {"llama-server", 0, OPT_TEXT, TTFT_AT(server), "FILE",
     "the program (default: what scripts/get-peer.sh built)", false},
    TTFT_RUN_OPTS,
};

const opt_command bench_peer_command = {
    "bench peer-llama-server",
    "bench peer-llama-server -m MODEL.gguf -f PREFIX.txt | --prefixes DIR [OPTIONS]",
    "The same questions on the same prefixes with llama-server's slot save and restore, cold, beside our\n"
    "systems in this process and through `impress serve`; and its time for computing the prompt.",
    "example:\n"
    "  scripts/get-peer.sh   # builds llama-server, once\n"
    "  impress bench peer-llama-server -m smollm2.gguf --prefixes docs --n-prefixes 2 --prefix-tokens 8000\n\n"
    "docs/ttft.md has the rules.",
    options,
    sizeof options / sizeof *options,
};

static const char peer_name[] = "llama-server", computed_name[] = "llama-server, recompute";

/* ---- the program */

static int find_server(const ttft_settings *s, char *path, size_t n)
{
    glob_t found = {0};
    char pattern[4200];
    if (s->server) {
        snprintf(path, n, "%s", s->server);
    } else {
        snprintf(pattern, sizeof pattern, "%s-*/llama-server", store_default_dir("peer"));
        time_t newest = 0;
        path[0] = '\0';
        glob(pattern, 0, NULL, &found);
        for (size_t i = 0; i < found.gl_pathc; i++) {
            struct stat st;
            if (stat(found.gl_pathv[i], &st) != 0 || st.st_mtime < newest) continue;
            newest = st.st_mtime;
            snprintf(path, n, "%s", found.gl_pathv[i]);
        }
        globfree(&found);
    }
    if (path[0] && access(path, X_OK) == 0) return 0;
    if (s->server) return app_fail("%s is no program; scripts/get-peer.sh builds llama-server", s->server);
    return app_fail("there is no llama-server; scripts/get-peer.sh builds it (or --llama-server FILE)");
}

/* ---- requests as text */

static char *tokens_body(const llama_token *tokens, size_t n, const char *rest)
{
    char *text = NULL;
    size_t size;
    FILE *f = open_memstream(&text, &size);
    if (!f) return NULL;
    fputs("{\"prompt\":[", f);
    for (size_t i = 0; i < n; i++) fprintf(f, "%s%d", i ? "," : "", (int)tokens[i]);
    fprintf(f, "],%s}", rest);
    if (fclose(f) == 0) return text;
    free(text);
    return NULL;
}

static double number_in(const json_t *o, const char *object, const char *name)
{
    return json_number_value(json_object_get(json_object_get(o, object), name));
}

static const app_prompt *prompt_of(const ttft_bench *b, const ttft_ask *ask)
{
    return &b->set.prefixes[ask->prefix].prompts[ask->question];
}

static app_row new_row(const ttft_bench *b, const ttft_ask *ask, const char *system, double retention)
{
    const app_prompt *prompt = prompt_of(b, ask);
    return (app_row){.system = system, .retention = retention, .prompt_tokens = prompt->n,
                     .prefix_tokens = b->set.prefixes[ask->prefix].shared.n,
                     .report = {.prompt_tokens = prompt->n, .mass = 1}};
}

static json_t *same_first(const ttft_bench *b, const ttft_ask *ask, json_int_t token)
{
    size_t at = ask->prefix * b->set.n_questions + ask->question, best = 0;
    if (!b->known[at]) return json_null();
    const float *logits = b->reference + at * b->n_vocab;
    for (size_t i = 1; i < b->n_vocab; i++)
        if (logits[i] > logits[best]) best = i;
    return json_boolean(token == (json_int_t)best);
}

/* ---- llama-server */

static int peer_start(const ttft_bench *b, http_child *c, const char *program, const char *slots)
{
    char port[16], ctx[24], threads[24], batch[24], ubatch[24], log[4100], dir[4100];
    struct llama_context_params cp =
        app_context_params(b->set.longest + 8, b->s->n_batch, b->s->n_ubatch, b->s->n_threads, NULL);
    unsigned free_port = http_free_port();
    snprintf(port, sizeof port, "%u", free_port);
    snprintf(ctx, sizeof ctx, "%zu", (b->set.longest + 8 + 255) / 256 * 256);
    snprintf(threads, sizeof threads, "%d", (int)cp.n_threads);
    snprintf(batch, sizeof batch, "%u", cp.n_batch);
    snprintf(ubatch, sizeof ubatch, "%u", cp.n_ubatch);
    snprintf(log, sizeof log, "%s.log", slots);
    snprintf(dir, sizeof dir, "%s/", slots);
    const char *type = b->s->cache_type ? b->s->cache_type : "f16";
    const char *argv[] = {program, "-m", b->s->model, "--host", "127.0.0.1", "--port", port, "-c", ctx, "-np", "1", "-t",
                          threads, "-tb", threads, "-b", batch, "-ub", ubatch, "-fa", "on", "-ctk", type, "-ctv", type,
                          "--slot-save-path", dir, "-cram", "0", "--no-warmup", "--offline", NULL};
    return http_start(c, "llama-server", (char *const *)(uintptr_t)argv, free_port, log);
}

static json_t *complete(const http_child *c, const llama_token *tokens, size_t n, unsigned n_predict)
{
    char rest[160];
    snprintf(rest, sizeof rest,
             "\"n_predict\":%u,\"id_slot\":0,\"cache_prompt\":true,\"temperature\":0,\"return_tokens\":true", n_predict);
    char *body = tokens_body(tokens, n, rest);
    json_t *o = body ? http_ask(c, "/completion", body, true) : NULL;
    if (!body) app_fail("out of memory");
    free(body);
    return o;
}

/* Keep a row of llama-server: `whole_ns` over HTTP, of these `restore_ms` and `prompt_ms` by its own figures. */
static int peer_row(ttft_bench *b, const ttft_place *place, const ttft_ask *ask, const char *system, uint64_t whole_ns,
                    const json_t *restored, const json_t *answer)
{
    app_row row = new_row(b, ask, system, 1);
    double restore = restored ? number_in(restored, "timings", "restore_ms") : 0,
           prompt = number_in(answer, "timings", "prompt_ms");
    double n_computed = number_in(answer, "timings", "prompt_n");
    row.ttft_ns = whole_ns;
    row.report.way = restored ? IMP_LLAMA_WAY_WHOLE : IMP_LLAMA_WAY_COMPUTED;
    row.report.io_wait_ns = (uint64_t)(restore * 1e6);
    row.report.query_tokens = n_computed > 0 ? (size_t)n_computed : 0;
    row.report.matched_tokens = row.report.loaded_tokens =
        row.prompt_tokens > row.report.query_tokens ? row.prompt_tokens - row.report.query_tokens : 0;
    row.report.bytes_read = restored ? (uint64_t)json_integer_value(json_object_get(restored, "n_read")) : 0;
    row.report.bytes_full = row.report.bytes_read;
    json_int_t token = json_integer_value(json_array_get(json_object_get(answer, "tokens"), 0));
    json_t *own = json_pack("{s:f, s:f, s:f, s:o}", "restore_ms", restore, "prompt_ms", prompt, "overhead_ms",
                            (double)whole_ns / 1e6 - restore - prompt, "same_first", same_first(b, ask, token));
    return ttft_keep(b, ttft_key(b, place, system, 1, "slot", ask), &row, place, own);
}

/* The name of a prefix's slot file: by all that its content depends on. */
static void slot_name(const ttft_bench *b, size_t prefix, char *name, size_t n)
{
    const app_prefix *p = &b->set.prefixes[prefix].shared;
    const char *type = b->s->cache_type ? b->s->cache_type : "f16";
    uint64_t hash = eval_hash(EVAL_HASH_SEED, p->tokens, p->n * sizeof *p->tokens);
    hash = eval_hash(hash, b->model_name, strlen(b->model_name));
    hash = eval_hash(hash, &b->model_bytes, sizeof b->model_bytes);
    hash = eval_hash(hash, type, strlen(type));
    snprintf(name, n, "%016" PRIx64 ".slot", hash);
}

static bool erase_slot(const http_child *c)
{
    json_t *o = http_ask(c, "/slots/0?action=erase", "{}", true);
    json_decref(o);
    return o != NULL;
}

/* Compute a whole prompt, which is the row of recompute, if it isn't there; then the prefix alone stays in the slot,
 * and goes to the file. */
static int save_prefix(ttft_bench *b, const http_child *c, const ttft_place *place, const ttft_ask *ask, bool row,
                       const char *slots)
{
    const app_prefix *p = &b->set.prefixes[ask->prefix].shared;
    const app_prompt *prompt = prompt_of(b, ask);
    char name[64], path[4200], body[128];
    slot_name(b, ask->prefix, name, sizeof name);
    snprintf(path, sizeof path, "%s/%s", slots, name);
    bool saved = access(path, R_OK) == 0;
    if (saved && !row) return 0;
    if (!erase_slot(c)) return 1;
    int rc = 0;
    if (row) {
        uint64_t start = app_now_ns();
        json_t *answer = complete(c, prompt->tokens, prompt->n, 1);
        uint64_t end = app_now_ns();
        if (!answer) return 1;
        rc = peer_row(b, place, ask, computed_name, end - start, NULL, answer);
        json_decref(answer);
    }
    if (rc || saved) return rc;
    json_t *o = complete(c, p->tokens, p->n, 0);
    if (!o) return 1;
    json_decref(o);
    snprintf(body, sizeof body, "{\"filename\":\"%s\"}", name);
    o = http_ask(c, "/slots/0?action=save", body, true);
    json_decref(o);
    return o ? 0 : 1;
}

static int restore_and_ask(ttft_bench *b, const http_child *c, const ttft_place *place, const ttft_ask *ask,
                           const char *slots)
{
    const app_prompt *prompt = prompt_of(b, ask);
    char name[64], body[128];
    slot_name(b, ask->prefix, name, sizeof name);
    snprintf(body, sizeof body, "{\"filename\":\"%s\"}", name);
    if (!erase_slot(c)) return 1;
    ttft_drop_pages(slots);
    uint64_t start = app_now_ns();
    json_t *restored = http_ask(c, "/slots/0?action=restore", body, true);
    json_t *answer = restored ? complete(c, prompt->tokens, prompt->n, 1) : NULL;
    uint64_t end = app_now_ns();
    int rc = answer ? peer_row(b, place, ask, peer_name, end - start, restored, answer) : 1;
    json_decref(restored);
    json_decref(answer);
    b->n_done++;
    return rc;
}

static const json_t *row_of(const ttft_bench *b, const ttft_place *place, const char *system, double retention,
                            const char *kept, const ttft_ask *ask)
{
    json_t *key = ttft_key(b, place, system, retention, kept, ask);
    const json_t *row = key ? ttft_rows_find(b->rows, key) : NULL;
    json_decref(key);
    return row;
}

static int run_peer(ttft_bench *b, const ttft_place *place, const char *program)
{
    char slots[4000];
    http_child c = {0};
    size_t n_open = 0;
    snprintf(slots, sizeof slots, "%s/llama-server", b->stores.dir);
    mkdir(slots, 0700);
    for (size_t i = 0; i < b->n_asks; i++) {
        const ttft_ask *ask = &b->asks[i];
        n_open += !row_of(b, place, peer_name, 1, "slot", ask);
        n_open += ask->rep == 0 && !row_of(b, place, computed_name, 1, "slot", ask);
    }
    int rc = n_open ? peer_start(b, &c, program, slots) : 0;
    for (size_t i = 0; rc == 0 && i < b->n_asks && !ttft_stopped(); i++) {
        const ttft_ask *ask = &b->asks[i];
        if (ask->rep) continue;
        text_progress_at(&b->progress, (double)i / (double)b->n_asks, "llama-server computes the prefixes");
        const json_t *row = row_of(b, place, computed_name, 1, "slot", ask);
        if (row) rc = ttft_show(b, place, row);
        if (rc == 0 && n_open) rc = save_prefix(b, &c, place, ask, !row, slots);
    }
    for (size_t i = 0; rc == 0 && i < b->n_asks && !ttft_stopped(); i++) {
        text_progress_at(&b->progress, (double)i / (double)b->n_asks, "llama-server restores");
        const json_t *row = row_of(b, place, peer_name, 1, "slot", &b->asks[i]);
        rc = row ? ttft_show(b, place, row) : restore_and_ask(b, &c, place, &b->asks[i], slots);
    }
    http_stop(&c);
    return ttft_stopped() ? 0 : rc;
}

/* ---- ours through HTTP */

static int serve_start(const ttft_bench *b, http_child *c, const ttft_cell *cell)
{
    char port[16], ctx[24], threads[24], batch[24], ubatch[24], log[4100], store[4100], retention[32], kept[64],
        program[4100];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    if (n <= 0) return app_fail("can't find this program");
    program[n] = '\0';
    unsigned free_port = http_free_port();
    snprintf(port, sizeof port, "%u", free_port);
    snprintf(ctx, sizeof ctx, "%zu", b->set.longest + 8);
    snprintf(threads, sizeof threads, "%" PRIu64, b->s->n_threads);
    snprintf(batch, sizeof batch, "%" PRIu64, b->s->n_batch);
    snprintf(ubatch, sizeof ubatch, "%" PRIu64, b->s->n_ubatch);
    snprintf(retention, sizeof retention, "%.6g", cell->system.load.retention);
    snprintf(store, sizeof store, "%s/%s", b->stores.dir, app_system_combination(&cell->system, kept));
    snprintf(log, sizeof log, "%s/serve.log", b->stores.dir);
    const char *argv[40] = {program, "serve", "-m", b->s->model, "--port", port, "--slots", "1", "-c", ctx, "-b", batch,
                            "-u", ubatch, "--store", store, "--host-cache", "0", "--look-ahead=no", "-s",
                            cell->system.name, "--reorder-period", "never", "--cache-type",
                            b->s->cache_type ? b->s->cache_type : "f16"};
    size_t at = 25;
    if (b->s->n_threads) argv[at++] = "-t", argv[at++] = threads;
    if (cell->system.chooses) argv[at++] = "-r", argv[at++] = retention;
    return http_start(c, "impress serve", (char *const *)(uintptr_t)argv, free_port, log);
}

static int serve_ask(ttft_bench *b, const ttft_place *place, const ttft_cell *cell, const char *name,
                     const ttft_ask *ask)
{
    char kept[64];
    const app_prompt *prompt = prompt_of(b, ask);
    char *body = tokens_body(prompt->tokens, prompt->n, "\"max_tokens\":1,\"temperature\":0");
    http_child c = {0};
    double retention = cell->system.chooses ? cell->system.load.retention : 1;
    int rc = body ? serve_start(b, &c, cell) : app_fail("out of memory");
    if (rc == 0 && !ttft_stopped()) {
        ttft_drop_pages(b->stores.dir);
        uint64_t start = app_now_ns();
        json_t *answer = http_ask(&c, "/v1/completions", body, true);
        uint64_t whole = app_now_ns() - start;
        const json_t *own = json_object_get(answer, "impress");
        app_row row = new_row(b, ask, name, retention);
        row.ttft_ns = whole;
        row.report.identify_ns = (uint64_t)(number_in(own, "ms", "identify") * 1e6);
        row.report.io_wait_ns = (uint64_t)(number_in(own, "ms", "load") * 1e6); /* reading and gathering */
        row.report.bytes_read = (uint64_t)json_integer_value(json_object_get(own, "bytes_read"));
        row.report.loaded_tokens = (size_t)number_in(own, "tokens", "loaded");
        row.report.query_tokens = (size_t)number_in(own, "tokens", "computed");
        const char *way = json_string_value(json_object_get(own, "way"));
        json_t *more = json_pack("{s:f, s:s}", "overhead_ms", (double)whole / 1e6 - number_in(own, "ms", "ttft"), "way",
                                 way ? way : "?");
        rc = answer ? ttft_keep(b, ttft_key(b, place, name, retention, app_system_combination(&cell->system, kept), ask),
                                &row, place, more)
                    : 1;
        if (!answer) json_decref(more);
        json_decref(answer);
    }
    http_stop(&c);
    free(body);
    return ttft_stopped() ? 0 : rc;
}

/* Each request a process of its own, whose store is all that it knows. */
static int run_serve(ttft_bench *b, const ttft_place *place, const ttft_cell *cell)
{
    char name[160], kept[64];
    double retention = cell->system.chooses ? cell->system.load.retention : 1;
    if (cell->system.recompute) return 0;
    snprintf(name, sizeof name, "%s (HTTP)", cell->system.name);
    app_system_combination(&cell->system, kept);
    size_t n_open = 0;
    for (size_t i = 0; i < b->n_asks; i++) n_open += !row_of(b, place, name, retention, kept, &b->asks[i]);
    int rc = n_open ? ttft_prepare(b, cell) : 0;
    for (size_t i = 0; rc == 0 && i < b->n_asks && !ttft_stopped(); i++) {
        text_progress_at(&b->progress, (double)i / (double)b->n_asks, name);
        const json_t *row = row_of(b, place, name, retention, kept, &b->asks[i]);
        rc = row ? ttft_show(b, place, row) : serve_ask(b, place, cell, name, &b->asks[i]);
    }
    return rc;
}

int bench_peer(int argc, char **argv)
{
    ttft_settings s = {.n_warm = 2, .reps = 3, .seed = 1, .n_batch = 2048, .n_ubatch = 512, .host_cache = "0",
                       .systems = "as,impress", .cold = true};
    char program[4200];
    int n_positional;
    int rc = opt_parse(&bench_peer_command, argc, argv, &s, &n_positional);
    if (rc) return rc == 1 ? 0 : rc;
    if (n_positional) return opt_misuse(&bench_peer_command, "unexpected argument `%s`", argv[1]);

    ttft_bench b = {.s = &s, .command = &bench_peer_command, .stores.lock = -1, .progress = {.label = "measuring"}};
    rc = ttft_plan(&b);
    if (rc == 0) rc = find_server(&s, program, sizeof program);
    if (rc == 0) {
        app_log_show(s.verbose);
        rc = ttft_open(&b);
    }
    if (rc == 0) ttft_watch_signals();
    for (size_t i = 0; rc == 0 && i < b.n_lengths && !ttft_stopped(); i++) {
        ttft_place place = {.length = b.lengths[i], .state = "cold"};
        rc = ttft_length(&b, i);
        for (size_t c = 0; rc == 0 && c < b.n_cells && !ttft_stopped(); c++) {
            rc = ttft_cell_run(&b, &b.cells[c]);
            if (rc == 0 && !ttft_stopped()) rc = run_serve(&b, &place, &b.cells[c]);
        }
        if (rc == 0 && !ttft_stopped()) rc = run_peer(&b, &place, program);
    }
    return ttft_finish(&b, rc);
}
