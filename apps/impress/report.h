/* report.h: rows of figures as a table for people and as JSON for programs. */
#ifndef APP_REPORT_H
#define APP_REPORT_H

#include <jansson.h>

#include "answer.h"

/* One object with the fields of `impress run --json` (man impress-run). NULL: no memory. */
json_t *report_json(const app_row *row, const char *model);

/* A text that may not be UTF-8, as JSON wants it: other bytes become '?'. NULL: no memory. */
json_t *report_text(const char *text);

/* Print a JSON value and a newline to stdout, and free it. Returns an exit code. */
int report_print_json(json_t *value);

/* One line on stderr about a single request. */
void report_line(const app_row *row);

/* The figures of several systems side by side, a column each. Rows of one system (several questions) are adjacent in
 * `rows`; their median times and mean KL are shown. Returns an exit code. */
int report_table(const app_row *rows, size_t n_rows);

#endif
