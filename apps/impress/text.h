/* text.h: numbers as people write and read them, and tables that fit the screen. */
#ifndef APP_TEXT_H
#define APP_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* "25M", "1G", "4096", "1.5GiB" (powers of 1024). False if it isn't a size. */
bool text_parse_size(const char *s, uint64_t *out);
bool text_parse_count(const char *s, uint64_t max, uint64_t *out);
bool text_parse_real(const char *s, double *out);

/* Bytes from the start that are UTF-8: n if all are. Tokenizers end the program at some that aren't. */
size_t text_utf8(const char *s, size_t n);

/* The next item of a list with commas, or of what is left of it, cut to `n` bytes. False: there is none. */
bool text_next_item(const char **list, char *item, size_t n);

/* "12.3 MiB". Returns buf. */
const char *text_bytes(uint64_t n, char buf[32]);
/* Duration since `then_s`, "3 h ago". Returns buf. */
const char *text_ago(int64_t then_s, int64_t now_s, char buf[32]);

/* Sorts the values; 0 of none. */
double text_median(double *values, size_t n);

/* A table of strings: the first column to the left, the others to the right, those from column `from` on to the left
 * again. No line ends in blanks. */
typedef struct text_table text_table;
text_table *text_table_new(size_t n_columns);                                                   /* NULL: no memory */
bool text_table_add(text_table *t, const char *fmt, ...) __attribute__((format(printf, 2, 3))); /* the next cell */
void text_table_left(text_table *t, size_t from);
void text_table_print(const text_table *t, FILE *f);
void text_table_free(text_table *t);

/* A bar on stderr, drawn at most ten times a second; where that is no terminal, a line every ten seconds. */
typedef struct text_progress {
    const char *label;
    uint64_t last_ns;
    bool drawn;
} text_progress;
void text_progress_at(text_progress *p, double share, const char *detail);
void text_progress_end(text_progress *p);

#endif
