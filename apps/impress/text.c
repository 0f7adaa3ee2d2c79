#include "text.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

bool text_parse_real(const char *s, double *out)
{
    char *end = NULL;
    errno = 0;
    double v = strtod(s, &end);
    if (end == s || *end != '\0' || errno != 0 || !isfinite(v)) return false;
    *out = v;
    return true;
}

bool text_parse_size(const char *s, uint64_t *out)
{
    char *end = NULL;
    errno = 0;
    double v = strtod(s, &end);
    if (end == s || errno != 0 || !isfinite(v) || v < 0) return false;
    static const char units[] = "KMGT";
    int power = 0;
    if (*end != '\0') {
        const char *u = strchr(units, toupper((unsigned char)*end));
        if (u && *u) {
            power = (int)(u - units) + 1;
            end++;
            if (*end == 'i') end++;
        }
        if (*end == 'B' || *end == 'b') end++;
        if (*end != '\0') return false;
    }
    v = ldexp(v, 10 * power);
    if (v >= 9.2e18) return false;
    *out = (uint64_t)v;
    return true;
}

bool text_parse_count(const char *s, uint64_t max, uint64_t *out)
{
    char *end = NULL;
    if (!isdigit((unsigned char)*s)) return false;
    errno = 0;
    unsigned long long v = strtoull(s, &end, 10);
    if (*end != '\0' || errno != 0 || v > max) return false;
    *out = v;
    return true;
}

bool text_next_item(const char **list, char *item, size_t n)
{
    const char *s = *list + strspn(*list, ", ");
    size_t length = strcspn(s, ",");
    *list = s + length;
    snprintf(item, n, "%.*s", (int)length, s);
    return length > 0;
}

const char *text_bytes(uint64_t n, char buf[32])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double v = (double)n;
    size_t u = 0;
    while (v >= 1024 && u + 1 < sizeof units / sizeof *units) {
        v /= 1024;
        u++;
    }
    snprintf(buf, 32, u == 0 || v >= 100 ? "%.0f %s" : "%.1f %s", v, units[u]);
    return buf;
}

const char *text_ago(int64_t then_s, int64_t now_s, char buf[32])
{
    int64_t d = now_s > then_s ? now_s - then_s : 0;
    if (then_s <= 0)
        snprintf(buf, 32, "never");
    else if (d < 120)
        snprintf(buf, 32, "%lld s ago", (long long)d);
    else if (d < 7200)
        snprintf(buf, 32, "%lld min ago", (long long)(d / 60));
    else if (d < 172800)
        snprintf(buf, 32, "%lld h ago", (long long)(d / 3600));
    else
        snprintf(buf, 32, "%lld d ago", (long long)(d / 86400));
    return buf;
}

struct text_table {
    size_t n_columns, n_cells, cap, n_right;
    char **cells;
};

text_table *text_table_new(size_t n_columns)
{
    text_table *t = calloc(1, sizeof *t);
    if (t) t->n_columns = t->n_right = n_columns;
    return t;
}

void text_table_left(text_table *t, size_t from) { t->n_right = from; }

bool text_table_add(text_table *t, const char *fmt, ...)
{
    char line[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    if (t->n_cells == t->cap) {
        size_t cap = t->cap ? 2 * t->cap : 64;
        char **cells = realloc(t->cells, cap * sizeof *cells);
        if (!cells) return false;
        t->cells = cells;
        t->cap = cap;
    }
    char *copy = strdup(line);
    if (!copy) return false;
    t->cells[t->n_cells++] = copy;
    return true;
}

size_t text_utf8(const char *s, size_t n)
{
    const unsigned char *b = (const unsigned char *)s;
    for (size_t i = 0, more; i < n; i += 1 + more) {
        unsigned char first = b[i], low = 0x80, high = 0xbf; /* bounds of the second byte */
        more = first < 0x80 ? 0 : first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
        if ((first >= 0x80 && first < 0xc2) || first > 0xf4 || i + more >= n) return i;
        if (first == 0xe0) low = 0xa0;
        if (first == 0xed) high = 0x9f;
        if (first == 0xf0) low = 0x90;
        if (first == 0xf4) high = 0x8f;
        for (size_t j = 1; j <= more; j++, low = 0x80, high = 0xbf)
            if (b[i + j] < low || b[i + j] > high) return i;
    }
    return n;
}

/* Columns a UTF-8 string takes, for the plain characters we print. */
static int text_width(const char *s)
{
    int n = 0;
    for (; *s; s++) n += ((unsigned char)*s & 0xC0) != 0x80;
    return n;
}

void text_table_print(const text_table *t, FILE *f)
{
    int *widths = calloc(t->n_columns, sizeof *widths); /* NULL: not in line */
    for (size_t i = 0; widths && i < t->n_cells; i++) {
        int w = text_width(t->cells[i]), *width = &widths[i % t->n_columns];
        if (w > *width) *width = w;
    }
    int blanks = 0; /* due before the next cell that isn't empty: no line ends in them */
    for (size_t i = 0; i < t->n_cells; i++) {
        size_t column = i % t->n_columns;
        int pad = widths ? widths[column] - text_width(t->cells[i]) : 0;
        bool left = column == 0 || column >= t->n_right;
        blanks += (column == 0 ? 0 : 2) + (left ? 0 : pad);
        if (*t->cells[i]) {
            fprintf(f, "%*s%s", blanks, "", t->cells[i]);
            blanks = 0;
        }
        if (left) blanks += pad;
        if (column + 1 < t->n_columns && i + 1 < t->n_cells) continue;
        fputc('\n', f);
        blanks = 0;
    }
    free(widths);
}

void text_table_free(text_table *t)
{
    if (!t) return;
    for (size_t i = 0; i < t->n_cells; i++) free(t->cells[i]);
    free(t->cells);
    free(t);
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double text_median(double *values, size_t n)
{
    if (n == 0) return 0;
    qsort(values, n, sizeof *values, compare_doubles);
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

static uint64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

void text_progress_at(text_progress *p, double share, const char *detail)
{
    uint64_t now = now_ns();
    if (!isatty(STDERR_FILENO)) { /* a log: a line now and then, so that a long wait isn't a silent one */
        if (p->last_ns == 0) p->last_ns = now;
        if (now - p->last_ns < 10000000000u || share >= 1) return;
        p->last_ns = now;
        fprintf(stderr, "%s: %.0f %%  %s\n", p->label, share * 100, detail ? detail : "");
        return;
    }
    if (p->drawn && now - p->last_ns < 100000000u && share < 1) return;
    p->last_ns = now;
    p->drawn = true;
    char bar[31];
    for (int i = 0; i < 30; i++) bar[i] = i < (int)(share * 30) ? '#' : '.';
    bar[30] = '\0';
    fprintf(stderr, "\r%-18s [%s] %3.0f %%  %s\033[K", p->label, bar, share * 100, detail ? detail : "");
    fflush(stderr);
}

void text_progress_end(text_progress *p)
{
    if (p->drawn) fputs("\r\033[K", stderr);
    p->drawn = false;
}
