/* impress ls, stat, verify, rm, gc, pin: a look into a store, and a hand on it. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "commands.h"
#include "report.h"
#include "store_options.h"
#include "switches.h"
#include "text.h"

typedef struct inspect_settings {
    store_settings store; /* only dir, key, limit and order have options here */
    bool json, repair, rebuild, all, off, reorder;
} inspect_settings;

#define AT(member) offsetof(inspect_settings, member)
#define STORE_OPT                                                                                                      \
    {                                                                                                                  \
        "store", 0, OPT_TEXT, AT(store.dir), "DIR", "the store, if it isn't the argument STORE", false                 \
    },                                                                                                                 \
    {                                                                                                                  \
        "key-file", 0, OPT_TEXT, AT(store.key_file), "FILE", "the key of an encrypted store", false                    \
    }
#define JSON_OPT                                                                                                       \
    {                                                                                                                  \
        "json", 0, OPT_FLAG, AT(json), NULL, "print JSON", true                                                        \
    }
#define N_OPTS(table) (sizeof(table) / sizeof *(table))

/* One call of a command of this file. */
typedef struct inspection {
    const opt_command *command;
    inspect_settings s;
    char **argv;
    int n;    /* positional arguments, argv[1..n] */
    int node; /* the first of them that isn't the store */
    const char *dir;
    imp_store *store;
} inspection;

static bool is_node(const char *arg)
{
    uint64_t node;
    return text_parse_count(arg, UINT64_MAX, &node) && node != 0;
}

/* Is argv[1] the store? With `nodes` behind it, not if a flag names the store, or if it is a number and no file. */
static bool names_store(const inspection *in, bool nodes)
{
    if (in->n == 0 || !nodes) return in->n > 0;
    if (in->s.store.dir && !strcmp(opt_said("store"), "--store")) return false;
    return !is_node(in->argv[1]) || access(in->argv[1], F_OK) == 0;
}

/* Parse: arguments are a store, if there is one, and `nodes`, or none. Returns false with the exit code when the
 * command ends here. */
static bool parse(inspection *in, const opt_command *command, int argc, char **argv, bool nodes, int *code)
{
    memset(in, 0, sizeof *in);
    in->command = command;
    in->argv = argv;
    *code = opt_parse(command, argc, argv, &in->s, &in->n);
    if (*code) {
        if (*code == 1) *code = 0; /* help */
        return false;
    }
    in->node = 1;
    if (names_store(in, nodes)) in->s.store.dir = argv[in->node++];
    if (!nodes && in->n >= in->node) *code = opt_misuse(command, "unexpected argument `%s`", argv[in->node]);
    if (*code == 0 && !(in->dir = store_settings_dir(&in->s.store))) *code = opt_misuse(command, "`none` is no store");
    return *code == 0;
}

static bool open_store(inspection *in, unsigned flags, int *code)
{
    imp_store_opts opts;
    *code = store_settings_apply(in->command, &in->s.store, &opts);
    opts.flags |= flags | IMP_STORE_MUST_EXIST;
    if (*code == 0 && imp_store_open(in->dir, &opts, &in->store) < 0) *code = app_fail("%s", imp_last_error());
    return *code == 0;
}

/* To look at it: opened as any program would, so that a lost catalogue is made again first, or for reading alone where
 * this user may not write. Then it opens with a catalogue that can't be read, too, and would look empty. */
static bool open_to_look(inspection *in, int *code)
{
    bool writable = faccessat(AT_FDCWD, in->dir, W_OK, AT_EACCESS) == 0 || errno == ENOENT;
    if (!open_store(in, writable ? 0 : IMP_STORE_READONLY, code)) return false;
    imp_fault faults[IMP_FAULTS_MAX];
    int n = imp_store_faults(in->store, faults);
    for (int i = 0; i < n && *code == 0; i++) {
        if (strcmp(faults[i].what, "catalogue") == 0) *code = app_fail("%s", faults[i].line);
    }
    if (*code) imp_store_close(in->store);
    return *code == 0;
}

/* Are all of `nodes` numbers of nodes? Asked before the first of them is touched. */
static bool check_nodes(const inspection *in, int *code)
{
    int i = in->node;
    while (i <= in->n && is_node(in->argv[i])) i++;
    if (i > in->n) return true;
    *code = opt_misuse(in->command, "`%s` is not the number of a node, as `impress ls` shows them", in->argv[i]);
    return false;
}

/* How a node's segment was written, as `core raw 16 sketch`. "?": its header can't be read. */
static const char *layout_text(const imp_node_info *node, char buf[64])
{
    if (node->chunk_tokens == 0) return "?";
    char kept[24] = "";
    if (node->probe_heads) snprintf(kept, sizeof kept, " probe %" PRIu32, node->probe_heads);
    snprintf(buf, 64, "%s %s %" PRIu32 "%s%s", switch_order_name(node->order), switch_rest_name(node->rest),
             node->chunk_tokens, kept, node->sketch_bits ? " sketch" : "");
    return buf;
}

/* ---- ls */

static const opt ls_opts[] = {STORE_OPT, JSON_OPT};
const opt_command ls_command = {
    "ls",
    "ls [STORE] [--json]",
    "List the nodes of a store: runs of tokens, each below its parent.",
    "A prefix that starts another one is its parent. `first` is a node's place in the prompt.\n"
    "`layout`: order on disk, precision, tokens a chunk, and what is kept to choose by\n"
    "(`impress systems`).",
    ls_opts,
    N_OPTS(ls_opts)};

typedef struct listing {
    text_table *table;
    json_t *array;
    size_t n;
    int64_t now_s;
} listing;

static int list_row(const imp_node_info *node, void *user)
{
    listing *l = user;
    l->n++;
    if (l->array) {
        char segment[17];
        snprintf(segment, sizeof segment, "%016" PRIx64, node->segment);
        json_t *o = json_pack("{s:I,s:I,s:s,s:s,s:s,s:I,s:I,s:I,s:b,s:b,s:I,s:I,s:I,s:s,s:s,s:I,s:I,s:I,s:b}", "node", (json_int_t)node->id,
                              "parent", (json_int_t)node->parent, "space", node->space, "model", node->model_name,
                              "segment", segment, "first_token", (json_int_t)node->first_token, "n_tokens",
                              (json_int_t)node->n_tokens, "kv_bytes", (json_int_t)node->kv_bytes, "derived",
                              node->derived, "pinned", node->pinned, "hits", (json_int_t)node->hits, "created_s",
                              (json_int_t)node->created_s, "used_s", (json_int_t)node->used_s, "order",
                              switch_order_name(node->order), "rest", switch_rest_name(node->rest), "chunk_tokens",
                              (json_int_t)node->chunk_tokens, "probe_heads", (json_int_t)node->probe_heads,
                              "sketch_bits", (json_int_t)node->sketch_bits, "paired", node->paired);
        return json_array_append_new(l->array, o) == 0 ? 0 : IMP_E_NOMEM;
    }
    char bytes[32], ago[32], layout[64];
    text_table *t = l->table;
    bool ok = text_table_add(t, "%" PRIu64, node->id) && text_table_add(t, "%" PRIu64, node->parent) &&
              text_table_add(t, "%.8s", node->space) && text_table_add(t, "%.24s", node->model_name) &&
              text_table_add(t, "%" PRIu64, node->first_token) && text_table_add(t, "%" PRIu64, node->n_tokens) &&
              text_table_add(t, "%s", text_bytes(node->kv_bytes, bytes)) && text_table_add(t, "%" PRIu64, node->hits) &&
              text_table_add(t, "%s", text_ago(node->used_s, l->now_s, ago)) &&
              text_table_add(t, "%s", layout_text(node, layout)) &&
              text_table_add(t, "%s%s%s", node->derived ? "derived" : "", node->derived && node->pinned ? " " : "",
                             node->pinned ? "pinned" : "");
    return ok ? 0 : IMP_E_NOMEM;
}

int cmd_ls(int argc, char **argv)
{
    inspection in;
    int rc;
    if (!parse(&in, &ls_command, argc, argv, false, &rc) || !open_to_look(&in, &rc)) return rc;
    listing l = {.now_s = (int64_t)time(NULL)};
    if (in.s.json)
        l.array = json_array();
    else
        l.table = text_table_new(11);
    rc = l.array || l.table ? 0 : app_fail("out of memory");
    if (l.table) text_table_left(l.table, 9);
    static const char *const heads[] = {"node",   "parent", "space", "model", "first",
                                        "tokens", "KV",     "hits",  "used",  "layout", ""};
    for (size_t i = 0; rc == 0 && l.table && i < 11; i++)
        if (!text_table_add(l.table, "%s", heads[i])) rc = app_fail("out of memory");
    if (rc == 0 && imp_store_list(in.store, list_row, &l) != 0) rc = app_fail("%s", imp_last_error());
    if (rc == 0 && in.s.json) {
        rc = report_print_json(l.array);
        l.array = NULL;
    } else if (rc == 0 && l.n == 0) {
        printf("the store is empty\n");
    } else if (rc == 0) {
        text_table_print(l.table, stdout);
    }
    json_decref(l.array);
    text_table_free(l.table);
    imp_store_close(in.store);
    return rc;
}

/* ---- stat */

enum { MAX_LAYOUTS = 16 };

/* Tokens by layout. */
typedef struct layouts {
    char text[MAX_LAYOUTS][64];
    uint64_t n_tokens[MAX_LAYOUTS];
    size_t n;
} layouts;

static int add_layout(const imp_node_info *node, void *user)
{
    layouts *l = user;
    char buf[64];
    const char *text = layout_text(node, buf);
    size_t i = 0;
    while (i < l->n && strcmp(l->text[i], text) != 0) i++;
    if (i == MAX_LAYOUTS) return 0; /* more than anyone keeps in one store */
    if (i == l->n) snprintf(l->text[l->n++], sizeof l->text[i], "%s", text);
    l->n_tokens[i] += node->n_tokens;
    return 0;
}

static json_t *layouts_json(const layouts *l)
{
    json_t *array = json_array();
    for (size_t i = 0; array && i < l->n; i++)
        json_array_append_new(array, json_pack("{s:s,s:I}", "layout", l->text[i], "tokens", (json_int_t)l->n_tokens[i]));
    return array;
}

static const opt stat_opts[] = {STORE_OPT, JSON_OPT};
const opt_command stat_command = {"stat",    "stat [STORE] [--json]", "Sizes and counts of a store.", NULL,
                                  stat_opts, N_OPTS(stat_opts)};

/* null: not measured on this file system. */
static json_t *costs_json(imp_store *store)
{
    imp_read_costs costs;
    if (imp_store_get_read_costs(store, &costs) < 0 || costs.measured_s == 0) return json_null();
    return json_pack("{s:f,s:f,s:I}", "read_ns", costs.read_ns, "byte_ns", costs.byte_ns, "measured_s",
                     (json_int_t)costs.measured_s);
}

static void print_costs(imp_store *store)
{
    imp_read_costs costs;
    char when[32] = "";
    struct tm tm;
    if (imp_store_get_read_costs(store, &costs) < 0) return;
    time_t t = (time_t)costs.measured_s;
    if (t && gmtime_r(&t, &tm)) strftime(when, sizeof when, "%Y-%m-%d %H:%M UTC", &tm);
    if (t)
        printf("reads          %.1f us and %.3f ns a byte, measured %s\n", costs.read_ns / 1e3, costs.byte_ns, when);
    else
        printf("reads          not measured (impress bench io --store DIR does)\n");
}

int cmd_stat(int argc, char **argv)
{
    inspection in;
    int rc;
    if (!parse(&in, &stat_command, argc, argv, false, &rc) || !open_to_look(&in, &rc)) return rc;
    imp_stats st;
    layouts l = {.n = 0};
    if (imp_store_stats(in.store, &st) < 0 || imp_store_list(in.store, add_layout, &l) < 0) {
        rc = app_fail("%s", imp_last_error());
    } else if (in.s.json) {
        rc = report_print_json(json_pack(
            "{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:s,s:o,s:o}", "disk_bytes", (json_int_t)st.disk_bytes, "limit_bytes",
            (json_int_t)st.limit_bytes, "kv_bytes", (json_int_t)st.kv_bytes, "spaces", (json_int_t)st.n_spaces, "nodes",
            (json_int_t)st.n_nodes, "segments", (json_int_t)st.n_segments, "tokens", (json_int_t)st.n_tokens,
            "tree_memory_bytes", (json_int_t)st.memory_bytes, "io_mode", st.io_mode, "reads", costs_json(in.store),
            "layouts", layouts_json(&l)));
    } else {
        char disk[32], limit[32], kv[32], memory[32];
        printf("on disk        %s of %s\n", text_bytes(st.disk_bytes, disk), text_bytes(st.limit_bytes, limit));
        printf("KV rows        %s\n", text_bytes(st.kv_bytes, kv));
        printf("tokens         %" PRIu64 "\n", st.n_tokens);
        for (size_t i = 0; i < l.n; i++) printf("layout         %s: %" PRIu64 " tokens\n", l.text[i], l.n_tokens[i]);
        printf("nodes          %" PRIu64 " in %" PRIu64 " segments, %" PRIu64 " spaces\n", st.n_nodes, st.n_segments,
               st.n_spaces);
        printf("tree in memory %s\n", text_bytes(st.memory_bytes, memory));
        printf("I/O            %s\n", st.io_mode);
        print_costs(in.store);
    }
    imp_store_close(in.store);
    return rc;
}

/* ---- verify */

static const opt verify_opts[] = {
    STORE_OPT,
    JSON_OPT,
    {"repair", 0, OPT_FLAG, AT(repair), NULL, "drop exactly what is bad", true},
    {"rebuild", 0, OPT_FLAG, AT(rebuild), NULL, "first make the catalogue again from the segments", true},
};
const opt_command verify_command = {
    "verify",
    "verify [STORE] [--repair] [--rebuild] [--json]",
    "Read every byte that the store vouches for, and check it. Names what is bad.",
    "Exits 0 if all is well, or with --repair was made so (it is then read once more); 1 if\nsomething is bad still.",
    verify_opts,
    N_OPTS(verify_opts)};

typedef struct verification {
    bool json;
    json_t *array;
    json_int_t n_leftovers;
    text_progress progress;
} verification;

static void on_finding(const imp_finding *f, void *user)
{
    verification *v = user;
    v->n_leftovers += f->leftover;
    if (f->leftover && v->json) return;
    if (!v->json)
        printf("%s: %s\n", f->file, f->what);
    else
        json_array_append_new(v->array,
                              json_pack("{s:o,s:o}", "file", report_text(f->file), "what", report_text(f->what)));
}

static void on_verified(uint64_t done, uint64_t all, void *user)
{
    verification *v = user;
    char a[32], b[32], detail[80];
    snprintf(detail, sizeof detail, "%s of %s", text_bytes(done, a), text_bytes(all, b));
    text_progress_at(&v->progress, all ? (double)done / (double)all : 1, detail);
}

int cmd_verify(int argc, char **argv)
{
    inspection in;
    int rc;
    if (!parse(&in, &verify_command, argc, argv, false, &rc)) return rc;
    if (in.s.rebuild && imp_store_rebuild_key(in.dir, in.s.store.key_file) < 0) return app_fail("%s", imp_last_error());
    if (!open_store(&in, in.s.repair ? 0 : IMP_STORE_READONLY, &rc)) return rc;
    verification v = {.json = in.s.json, .array = in.s.json ? json_array() : NULL, .progress = {.label = "verifying"}};
    int64_t bad = imp_store_verify(in.store, in.s.repair, on_finding, on_verified, &v), left = bad;
    text_progress_end(&v.progress);
    if (in.s.repair && bad > 0) {
        v.progress = (text_progress){.label = "verifying the repair"};
        left = imp_store_verify(in.store, 0, NULL, on_verified, &v);
        text_progress_end(&v.progress);
    }
    if (left < 0)
        rc = app_fail("%s", imp_last_error());
    else
        rc = left > 0 ? 1 : 0;
    if (left >= 0 && in.s.json) {
        int printed = report_print_json(json_pack("{s:b,s:I,s:I,s:I,s:O}", "clean", left == 0, "findings_total",
                                                  (json_int_t)bad, "left", (json_int_t)left, "leftover_files",
                                                  v.n_leftovers, "findings", v.array));
        if (printed) rc = printed;
    } else if (bad == 0) {
        printf("clean\n");
    } else if (left == 0) {
        printf("%lld found, all repaired: what was bad is dropped, the rest is clean\n", (long long)bad);
    } else if (left > 0) {
        printf("%lld found", (long long)bad);
        if (in.s.repair)
            printf(", %lld left\n", (long long)left);
        else
            printf("; `impress verify --repair` drops what is bad\n");
    }
    json_decref(v.array);
    imp_store_close(in.store);
    return rc;
}

/* ---- rm */

static const opt rm_opts[] = {STORE_OPT, {"all", 0, OPT_FLAG, AT(all), NULL, "remove everything", true}};
const opt_command rm_command = {"rm",
                                "rm [STORE] NODE... | rm STORE --all",
                                "Remove nodes and everything below them (numbers as `impress ls` shows them).",
                                "--all wants the store to be named: as STORE, by --store or by IMPRESS_STORE.",
                                rm_opts,
                                N_OPTS(rm_opts)};

/* Nobody empties the default store by leaving a word out. */
static bool check_rm(const inspection *in, int *code)
{
    bool nodes = in->n >= in->node;
    if (in->s.all ? in->s.store.dir && !nodes : nodes) return check_nodes(in, code);
    *code = opt_misuse(&rm_command, in->s.all ? "--all wants a STORE and no nodes" : "wants NODEs, or --all");
    return false;
}

int cmd_rm(int argc, char **argv)
{
    inspection in;
    int rc;
    if (!parse(&in, &rm_command, argc, argv, true, &rc) || !check_rm(&in, &rc) || !open_store(&in, 0, &rc)) return rc;
    if (in.s.all && imp_store_remove(in.store, 0) < 0) rc = app_fail("%s", imp_last_error());
    for (int i = in.node; rc == 0 && i <= in.n; i++) {
        uint64_t node = 0;
        text_parse_count(argv[i], UINT64_MAX, &node);
        if (imp_store_remove(in.store, node) < 0) rc = app_fail("%s", imp_last_error());
    }
    imp_store_close(in.store);
    return rc;
}

/* ---- gc */

static const opt gc_opts[] = {
    STORE_OPT,
    JSON_OPT,
    {"limit", 0, OPT_SIZE, AT(store.limit), "SIZE",
     "size limit of the store from now on (default: as it was last\ngiven, else 10G)", false},
    {"reorder", 0, OPT_FLAG, AT(reorder), NULL,
     "then write segments anew, in order, whose statistics have\nchanged, or that hold rows of evicted nodes", true},
    SWITCH_OPT(inspect_settings, store.switches, SWITCH_ORDER, "order", "ORDER",
               "the order of --reorder: token, importance or core\n(default: core)"),
};
const opt_command gc_command = {"gc",
                                "gc [STORE] [--limit SIZE] [--reorder [--order ORDER]] [--json]",
                                "Remove what nothing refers to, evict down to the size limit, compact the catalogue.",
                                NULL,
                                gc_opts,
                                N_OPTS(gc_opts)};

static json_t *gc_json(const imp_gc_report *r, const imp_reorder_report *reorder)
{
    json_t *o = json_pack("{s:I,s:I,s:I}", "removed_files", (json_int_t)r->removed_files, "freed_bytes",
                          (json_int_t)r->freed_bytes, "evicted_nodes", (json_int_t)r->evicted_nodes);
    json_t *part = reorder && o ? json_pack("{s:I,s:I,s:I,s:I}", "segments", (json_int_t)reorder->n_segments,
                                            "reordered", (json_int_t)reorder->n_reordered, "bytes_written",
                                            (json_int_t)reorder->bytes_written, "freed_bytes",
                                            (json_int_t)reorder->freed_bytes)
                                : NULL;
    if (part) json_object_set_new(o, "reorder", part);
    return o;
}

/* What this call evicted, for the report: the opening may have done it, by a smaller limit, and so may a reorder. */
static void count_evicted(const imp_stats *opened, const imp_stats *tidied, const imp_stats *last, imp_gc_report *r)
{
    r->evicted_nodes = last->evicted_nodes;
    r->freed_bytes += opened->evicted_bytes + (last->evicted_bytes - tidied->evicted_bytes);
}

int cmd_gc(int argc, char **argv)
{
    inspection in;
    int rc;
    if (!parse(&in, &gc_command, argc, argv, false, &rc)) return rc;
    if (!in.s.store.switches.text[SWITCH_ORDER]) in.s.store.switches.text[SWITCH_ORDER] = "core";
    if (!open_store(&in, 0, &rc)) return rc;
    imp_gc_report report;
    imp_reorder_report reorder = {0};
    imp_stats opened, tidied, last;
    bool counted = imp_store_stats(in.store, &opened) == 0;
    int status = imp_store_gc(in.store, &report);
    bool done = status == 0 || status == IMP_E_FULL; /* full: all was done that can be */
    if (status < 0) rc = app_fail("%s", imp_last_error());
    counted = done && counted && imp_store_stats(in.store, &tidied) == 0;
    if (done && in.s.reorder && imp_store_reorder(in.store, &reorder) < 0) rc = app_fail("%s", imp_last_error());
    if (counted && imp_store_stats(in.store, &last) == 0) count_evicted(&opened, &tidied, &last, &report);
    if (done && in.s.json) {
        int printed = report_print_json(gc_json(&report, in.s.reorder ? &reorder : NULL));
        if (printed) rc = printed;
    } else if (done) {
        char freed[32], written[32];
        printf("files removed: %" PRIu64 ", nodes evicted: %" PRIu64 ", freed: %s\n", report.removed_files,
               report.evicted_nodes, text_bytes(report.freed_bytes, freed));
        if (in.s.reorder)
            printf("segments reordered: %" PRIu64 " of %" PRIu64 ", written: %s, freed: %s\n", reorder.n_reordered,
                   reorder.n_segments, text_bytes(reorder.bytes_written, written),
                   text_bytes(reorder.freed_bytes, freed));
    }
    imp_store_close(in.store);
    return rc;
}

/* ---- pin */

static const opt pin_opts[] = {STORE_OPT, {"off", 0, OPT_FLAG, AT(off), NULL, "no longer", true}};
const opt_command pin_command = {
    "pin",           "pin [STORE] NODE... [--off]", "Keep nodes, and what they stand on, from eviction.", NULL, pin_opts,
    N_OPTS(pin_opts)};

static bool check_pin(const inspection *in, int *code)
{
    if (in->n >= in->node) return check_nodes(in, code);
    *code = opt_misuse(&pin_command, "wants NODEs");
    return false;
}

int cmd_pin(int argc, char **argv)
{
    inspection in;
    int rc;
    if (!parse(&in, &pin_command, argc, argv, true, &rc) || !check_pin(&in, &rc) || !open_store(&in, 0, &rc)) return rc;
    for (int i = in.node; rc == 0 && i <= in.n; i++) {
        uint64_t node = 0;
        text_parse_count(argv[i], UINT64_MAX, &node);
        if (imp_store_pin(in.store, node, !in.s.off) < 0) rc = app_fail("%s", imp_last_error());
    }
    imp_store_close(in.store);
    return rc;
}
