#include "report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text.h"

static json_t *ms(uint64_t ns)
{
    return json_real((double)ns / 1e6);
}

static const char *way_name(imp_llama_way way)
{
    switch (way) {
    case IMP_LLAMA_WAY_COMPUTED: return "computed";
    case IMP_LLAMA_WAY_WHOLE: return "whole";
    case IMP_LLAMA_WAY_PARTIAL: return "partial";
    }
    return "?";
}

/* Time to the first token that no other part explains: mostly llama.cpp's. */
static uint64_t compute_ns(const app_row *row)
{
    const imp_llama_report *r = &row->report;
    uint64_t others = r->match_ns + r->identify_ns + r->io_wait_ns + r->gather_ns;
    return row->ttft_ns > others ? row->ttft_ns - others : 0;
}

/* As it was asked for, or as it came out where the mass was asked for. */
static double retention_got(const app_row *row)
{
    const imp_llama_report *r = &row->report;
    if (!(row->mass_asked > 0) || r->matched_tokens == 0) return row->retention;
    return (double)r->loaded_tokens / (double)r->matched_tokens;
}

json_t *report_text(const char *text)
{
    json_t *s = json_string(text);
    if (s) return s;
    char *copy = strdup(text);
    for (char *c = copy; c && *c; c++)
        if ((unsigned char)*c >= 0x80) *c = '?';
    s = copy ? json_string(copy) : NULL;
    free(copy);
    return s;
}

json_t *report_json(const app_row *row, const char *model)
{
    const imp_llama_report *r = &row->report;
    bool timed = row->ttft_ns != 0;
    json_t *o = json_object();
    if (!o) return NULL;
    int bad = 0;
    bad |= json_object_set_new(o, "system", json_string(row->system));
    bad |= json_object_set_new(o, "model", report_text(model));
    bad |= json_object_set_new(o, "retention", json_real(retention_got(row)));
    if (row->mass_asked > 0) bad |= json_object_set_new(o, "mass_asked", json_real(row->mass_asked));
    bad |= json_object_set_new(o, "way", json_string(way_name(r->way)));
    bad |= json_object_set_new(o, "reason", json_string(imp_llama_reason_name((int)r->reason)));
    if (r->expected_ns[IMP_LLAMA_WAY_COMPUTED])
        bad |= json_object_set_new(o, "expected_ms", json_pack("{s:f,s:f,s:f}", "computed", (double)r->expected_ns[0] / 1e6,
                                                               "whole", (double)r->expected_ns[1] / 1e6, "partial",
                                                               (double)r->expected_ns[2] / 1e6));
    bad |= json_object_set_new(o, "ttft_ms", timed ? ms(row->ttft_ns) : json_null());
    bad |= json_object_set_new(o, "match_ms", ms(r->match_ns));
    bad |= json_object_set_new(o, "identify_ms", ms(r->identify_ns));
    bad |= json_object_set_new(o, "io_wait_ms", ms(r->io_wait_ns));
    bad |= json_object_set_new(o, "gather_ms", ms(r->gather_ns));
    bad |= json_object_set_new(o, "compute_ms", timed ? ms(compute_ns(row)) : json_null());
    bad |= json_object_set_new(o, "prefix_tokens", json_integer((json_int_t)row->prefix_tokens));
    bad |= json_object_set_new(o, "prompt_tokens", json_integer((json_int_t)row->prompt_tokens));
    bad |= json_object_set_new(o, "matched_tokens", json_integer((json_int_t)r->matched_tokens));
    bad |= json_object_set_new(o, "loaded_tokens", json_integer((json_int_t)r->loaded_tokens));
    bad |= json_object_set_new(o, "query_tokens", json_integer((json_int_t)r->query_tokens));
    bad |= json_object_set_new(o, "bytes_read", json_integer((json_int_t)r->bytes_read));
    bad |= json_object_set_new(o, "identify_bytes", json_integer((json_int_t)r->identify_bytes));
    bad |= json_object_set_new(o, "host_hit_bytes", json_integer((json_int_t)r->host_hit_bytes));
    bad |= json_object_set_new(o, "device_hit_bytes", json_integer((json_int_t)r->device_hit_bytes));
    bad |= json_object_set_new(o, "selected_layers", json_integer(r->n_selected));
    bad |= json_object_set_new(o, "fallback_layers", json_integer(r->n_fallback));
    bad |= json_object_set_new(o, "bytes_full", json_integer((json_int_t)r->bytes_full));
    bad |= json_object_set_new(o, "mass", json_real(r->mass));
    bad |= json_object_set_new(o, "retries", json_integer(r->retries));
    bad |= json_object_set_new(o, "kl", row->compared ? json_real(row->kl) : json_null());
    bad |= json_object_set_new(o, "top1_same", row->compared ? json_boolean(row->top1_same) : json_null());
    if (row->answer) {
        /* An answer cut inside a character is no valid UTF-8: null then, rather than no row. */
        json_t *text = json_string(row->answer);
        bad |= json_object_set_new(o, "answer", text ? text : json_null());
        bad |= json_object_set_new(o, "answer_tokens", json_integer((json_int_t)row->answer_tokens));
        bad |= json_object_set_new(o, "answer_ms", ms(row->answer_ns));
    }
    if (bad) {
        json_decref(o);
        return NULL;
    }
    return o;
}

int report_print_json(json_t *value)
{
    if (!value || json_dumpf(value, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9)) != 0) {
        json_decref(value);
        return app_fail("can't write JSON to standard output");
    }
    putchar('\n');
    json_decref(value);
    return fflush(stdout) == 0 ? 0 : app_fail("can't write to standard output");
}

void report_line(const app_row *row)
{
    const imp_llama_report *r = &row->report;
    char read[32], full[32];
    fprintf(stderr,
            "[first token after %.1f ms: match %.2f, identify %.1f, I/O wait %.1f, gather %.1f, compute %.1f]\n",
            (double)row->ttft_ns / 1e6, (double)r->match_ns / 1e6, (double)r->identify_ns / 1e6,
            (double)r->io_wait_ns / 1e6, (double)r->gather_ns / 1e6, (double)compute_ns(row) / 1e6);
    fprintf(stderr, "[%zu tokens of prompt: %zu matched, %zu loaded, %zu computed; %s read for KV of %s]\n",
            row->prompt_tokens, r->matched_tokens, r->loaded_tokens, r->query_tokens, text_bytes(r->bytes_read, read),
            text_bytes(r->bytes_full, full));
    if (row->mass_asked > 0 && r->way == IMP_LLAMA_WAY_PARTIAL)
        fprintf(stderr, "[%.1f %% of the prefix hold %.3f of the attention, asked for %.3f]\n",
                100 * retention_got(row), r->mass, row->mass_asked);
    if (r->expected_ns[IMP_LLAMA_WAY_COMPUTED])
        fprintf(stderr, "[%s (%s): expected %.1f ms to compute, %.1f whole, %.1f in part]\n", way_name(r->way),
                imp_llama_reason_name((int)r->reason), (double)r->expected_ns[0] / 1e6, (double)r->expected_ns[1] / 1e6,
                (double)r->expected_ns[2] / 1e6);
    if (r->n_fallback)
        fprintf(stderr, "[%u of %u layers went by all keys%s]\n", r->n_fallback, r->n_selected,
                r->n_fallback == r->n_selected ? ": the prefix was stored without what this system identifies by" : "");
}

typedef double (*figure)(const app_row *row);

static double f_ttft(const app_row *r)
{
    return (double)r->ttft_ns / 1e6;
}
static double f_match(const app_row *r)
{
    return (double)r->report.match_ns / 1e6;
}
static double f_identify(const app_row *r)
{
    return (double)r->report.identify_ns / 1e6;
}
static double f_io_wait(const app_row *r)
{
    return (double)r->report.io_wait_ns / 1e6;
}
static double f_gather(const app_row *r)
{
    return (double)r->report.gather_ns / 1e6;
}
static double f_compute(const app_row *r)
{
    return (double)compute_ns(r) / 1e6;
}
static double f_prefix(const app_row *r)
{
    return (double)r->prefix_tokens;
}
static double f_matched(const app_row *r)
{
    return (double)r->report.matched_tokens;
}
static double f_loaded(const app_row *r)
{
    return (double)r->report.loaded_tokens;
}
static double f_query(const app_row *r)
{
    return (double)r->report.query_tokens;
}
static double f_read(const app_row *r)
{
    return (double)r->report.bytes_read;
}
static double f_identify_bytes(const app_row *r)
{
    return (double)r->report.identify_bytes;
}
static double f_fallback(const app_row *r)
{
    return r->report.n_selected ? 100.0 * r->report.n_fallback / r->report.n_selected : 0;
}
static double f_mass(const app_row *r)
{
    return 100 * r->report.mass;
}
static double f_full(const app_row *r)
{
    return (double)r->report.bytes_full;
}

/* Median over the rows that were timed; their TTFT says so. */
static double median(const app_row *rows, size_t n, figure f, double *scratch)
{
    size_t m = 0;
    for (size_t i = 0; i < n; i++)
        if (rows[i].ttft_ns) scratch[m++] = f(&rows[i]);
    return text_median(scratch, m);
}

int report_table(const app_row *rows, size_t n_rows)
{
    static const struct {
        const char *label;
        figure f;
        const char *format; /* NULL: bytes */
    } lines[] = {
        {"TTFT, ms", f_ttft, "%.1f"},         {"  match", f_match, "%.2f"},     {"  identify", f_identify, "%.1f"},
        {"  I/O wait", f_io_wait, "%.1f"},    {"  gather", f_gather, "%.1f"},   {"  compute", f_compute, "%.1f"},
        {"prefix tokens", f_prefix, "%.0f"},  {"  matched", f_matched, "%.0f"}, {"  loaded", f_loaded, "%.0f"},
        {"tokens computed", f_query, "%.0f"}, {"bytes read", f_read, NULL},     {"  to identify", f_identify_bytes, NULL},
        {"bytes of the prefix", f_full, NULL}, {"layers by all keys, %", f_fallback, "%.0f"},
        {"attention held, %", f_mass, "%.1f"},
    };
    /* Groups of adjacent rows of one system. */
    size_t n_groups = 0;
    for (size_t i = 0; i < n_rows; i++) n_groups += i == 0 || strcmp(rows[i].system, rows[i - 1].system) != 0;
    text_table *t = text_table_new(n_groups + 1);
    double *scratch = malloc(n_rows * sizeof *scratch + 1);
    const app_row **group = malloc((n_groups + 1) * sizeof *group);
    bool ok = t && scratch && group;
    for (size_t i = 0, g = 0; ok && i < n_rows; i++)
        if (i == 0 || strcmp(rows[i].system, rows[i - 1].system) != 0) group[g++] = &rows[i];
    if (ok) group[n_groups] = rows + n_rows;

    ok = ok && text_table_add(t, "%s", "");
    for (size_t g = 0; ok && g < n_groups; g++)
        ok = group[g]->mass_asked > 0
                 ? text_table_add(t, "%s auto %.4g", group[g]->system, group[g]->mass_asked)
             : group[g]->retention < 1 ? text_table_add(t, "%s %.0f %%", group[g]->system, group[g]->retention * 100)
                                     : text_table_add(t, "%s", group[g]->system);
    for (size_t l = 0; ok && l < sizeof lines / sizeof *lines; l++) {
        ok = text_table_add(t, "%s", lines[l].label);
        for (size_t g = 0; ok && g < n_groups; g++) {
            double v = median(group[g], (size_t)(group[g + 1] - group[g]), lines[l].f, scratch);
            char bytes[32], number[32];
            if (lines[l].format) snprintf(number, sizeof number, lines[l].format, v);
            ok = text_table_add(t, "%s", lines[l].format ? number : text_bytes((uint64_t)v, bytes));
        }
    }
    ok = ok && text_table_add(t, "%s", "KL to recompute, nats");
    for (size_t g = 0; ok && g < n_groups; g++) {
        double sum = 0;
        size_t n = 0;
        for (const app_row *r = group[g]; r < group[g + 1]; r++)
            if (r->compared) sum += r->kl, n++;
        ok = n ? text_table_add(t, "%.2g", sum / (double)n) : text_table_add(t, "-");
    }
    ok = ok && text_table_add(t, "%s", "same first token");
    for (size_t g = 0; ok && g < n_groups; g++) {
        size_t same = 0, n = 0;
        for (const app_row *r = group[g]; r < group[g + 1]; r++)
            if (r->compared) same += r->top1_same, n++;
        ok = n == 0   ? text_table_add(t, "-")
             : n == 1 ? text_table_add(t, same ? "yes" : "no")
                      : text_table_add(t, "%zu of %zu", same, n);
    }
    if (ok) text_table_print(t, stdout);
    free(scratch);
    free(group);
    text_table_free(t);
    return ok ? 0 : app_fail("out of memory");
}
