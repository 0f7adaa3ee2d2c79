/* bench_ttft_table.c: what the rows come to, a table for each length, limit and state. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_ttft.h"
#include "model.h"

static double number(const json_t *row, const char *name) { return json_number_value(json_object_get(row, name)); }
static const char *word(const json_t *row, const char *name)
{
    const char *s = json_string_value(json_object_get(row, name));
    return s ? s : "";
}

static bool same_place(const ttft_place *a, const ttft_place *b)
{
    return a->length == b->length && a->io_limit == b->io_limit && !strcmp(a->state, b->state);
}

static bool same_cell(const json_t *a, const json_t *b)
{
    return !strcmp(word(a, "system"), word(b, "system")) && number(a, "retention") == number(b, "retention");
}

/* A field of all rows of a cell, into scratch. Returns how many have it. */
static size_t collect(const ttft_bench *b, const ttft_shown *of, const char *name, double *scratch)
{
    size_t n = 0;
    for (size_t i = 0; i < b->n_shown; i++)
        if (same_place(&b->shown[i].place, &of->place) && same_cell(b->shown[i].row, of->row) &&
            json_is_number(json_object_get(b->shown[i].row, name)))
            scratch[n++] = number(b->shown[i].row, name);
    return n;
}

static double median(const ttft_bench *b, const ttft_shown *of, const char *name, double *scratch)
{
    return text_median(scratch, collect(b, of, name, scratch));
}

static double mean(const ttft_bench *b, const ttft_shown *of, const char *name, double *scratch)
{
    size_t n = collect(b, of, name, scratch);
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += scratch[i];
    return n ? sum / (double)n : NAN;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The smallest value that 99 % aren't above. */
static double p99(double *values, size_t n)
{
    if (n == 0) return NAN;
    qsort(values, n, sizeof *values, by_value);
    size_t at = (size_t)ceil(0.99 * (double)n);
    return values[at ? at - 1 : 0];
}

static double share_same(const ttft_bench *b, const ttft_shown *of)
{
    size_t same = 0, n = 0;
    for (size_t i = 0; i < b->n_shown; i++) {
        const json_t *v = json_object_get(b->shown[i].row, "same_first");
        if (!same_place(&b->shown[i].place, &of->place) || !same_cell(b->shown[i].row, of->row)) continue;
        same += json_is_true(v);
        n += json_is_boolean(v);
    }
    return n ? 100.0 * (double)same / (double)n : NAN;
}

static bool add_number(text_table *t, const char *format, double v)
{
    char text[40];
    if (isnan(v)) return text_table_add(t, "-");
    snprintf(text, sizeof text, format, v);
    return text_table_add(t, "%s", text);
}

static bool add_line(const ttft_bench *b, text_table *t, const ttft_shown *of, double as, double *scratch)
{
    size_t n = collect(b, of, "ttft_ms", scratch);
    double high = p99(scratch, n), middle = text_median(scratch, n);
    double full = mean(b, of, "bytes_f16", scratch), read = mean(b, of, "bytes_read", scratch),
           limit = mean(b, of, "limit_ms", scratch), all = mean(b, of, "ttft_ms", scratch);
    char bytes[32];
    bool ok = text_table_add(t, "%s", word(of->row, "system"));
    ok = ok && (number(of->row, "retention") < 1 ? text_table_add(t, "%g", 100 * number(of->row, "retention"))
                                                  : text_table_add(t, "-"));
    ok = ok && text_table_add(t, "%zu", n) && add_number(t, "%.1f", middle) && add_number(t, "%.1f", high);
    ok = ok && add_number(t, "%.2f", as / middle);
    static const char *const parts[] = {"match_ms", "identify_ms", "io_wait_ms", "gather_ms", "compute_ms"};
    for (size_t i = 0; ok && i < sizeof parts / sizeof *parts; i++)
        ok = add_number(t, i ? "%.1f" : "%.2f", median(b, of, parts[i], scratch));
    ok = ok && add_number(t, "%.1f", limit) && add_number(t, "%.2f", limit > 0 ? all / limit : NAN);
    ok = ok && text_table_add(t, "%s", text_bytes((uint64_t)read, bytes));
    ok = ok && add_number(t, "%.1f", full > 0 ? 100 * read / full : NAN);
    ok = ok && text_table_add(t, "%s", text_bytes((uint64_t)mean(b, of, "host_hit_bytes", scratch), bytes));
    ok = ok && add_number(t, "%.4f", mean(b, of, "kl", scratch)) && add_number(t, "%.0f", share_same(b, of));
    return ok;
}

static bool first_of_place(const ttft_bench *b, size_t i)
{
    for (size_t k = 0; k < i; k++)
        if (same_place(&b->shown[k].place, &b->shown[i].place)) return false;
    return true;
}

static bool first_of_cell(const ttft_bench *b, size_t i)
{
    for (size_t k = 0; k < i; k++)
        if (same_place(&b->shown[k].place, &b->shown[i].place) && same_cell(b->shown[k].row, b->shown[i].row))
            return false;
    return true;
}

static void title(const ttft_bench *b, const ttft_shown *of, double *scratch)
{
    char limit[32], host[32];
    double prefix = mean(b, of, "prefix_tokens", scratch);
    printf("%s, prefixes of %.0f tokens, %s", b->model_name, prefix, of->place.state);
    if (of->place.io_limit) printf(", disk limited to %s/s", text_bytes(of->place.io_limit, limit));
    else if (number(of->row, "bandwidth") > 0)
        printf(", disk %s/s", text_bytes((uint64_t)number(of->row, "bandwidth"), limit));
    if (!strcmp(of->place.state, "warm"))
        printf(", host cache %s", text_bytes((uint64_t)number(of->row, "host_cache_bytes"), host));
    printf("\n");
}

int ttft_tables(const ttft_bench *b)
{
    static const char *const heads[] = {"",       "tokens %", "n",       "TTFT p50", "p99",     "as / it",
                                        "match",  "identify", "I/O wait", "gather",  "compute", "limit",
                                        "of it",  "read",     "of f16 %", "hits",    "KL",      "same %"};
    enum { N_HEADS = sizeof heads / sizeof *heads };
    double *scratch = malloc((b->n_shown + 1) * sizeof *scratch);
    bool ok = scratch != NULL;
    for (size_t i = 0; ok && i < b->n_shown; i++) {
        if (!first_of_place(b, i)) continue;
        text_table *t = text_table_new(N_HEADS);
        ok = t != NULL;
        for (size_t h = 0; ok && h < N_HEADS; h++) ok = text_table_add(t, "%s", heads[h]);
        double as = NAN;
        for (size_t k = i; ok && k < b->n_shown; k++)
            if (same_place(&b->shown[k].place, &b->shown[i].place) && !strcmp(word(b->shown[k].row, "system"), "as"))
                as = median(b, &b->shown[k], "ttft_ms", scratch);
        for (size_t k = i; ok && k < b->n_shown; k++)
            if (same_place(&b->shown[k].place, &b->shown[i].place) && first_of_cell(b, k))
                ok = add_line(b, t, &b->shown[k], as, scratch);
        if (ok) {
            title(b, &b->shown[i], scratch);
            text_table_print(t, stdout);
            putchar('\n');
        }
        text_table_free(t);
    }
    if (ok && b->n_shown)
        printf("times in ms: medians, limit and bytes are means; as / it: how many times faster than as; limit: computing or\n"
               "reading alone, whichever is longer; of it: TTFT over the limit\n");
    free(scratch);
    return ok ? 0 : app_fail("out of memory");
}
