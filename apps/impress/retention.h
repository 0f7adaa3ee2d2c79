/* retention.h: how many tokens each layer gets: a share, or as many as hold a share of the attention. */
#ifndef APP_RETENTION_H
#define APP_RETENTION_H

#include <stdbool.h>
#include <stddef.h>

#include "impress/impress.h"

#define RETENTION_DEFAULT 0.25

/* "0.25"; "auto", "auto:0.95", "auto:0.95:0.1-0.6": a share of the attention (default 0.9), the least and the most of
 * the tokens (0.05-0.5). */
typedef struct app_retention {
    double share; /* of the tokens; the most of them with `mass` */
    double mass, least; /* 0: not by mass */
} app_retention;

/* False: it is none of these. `text` NULL: RETENTION_DEFAULT. */
bool retention_parse(const char *text, app_retention *out);

/* For options whose switches choose tokens. */
void retention_apply(const app_retention *r, imp_load_opts *opts);

/* Behind a system's name what tells it apart: ", auto:0.9", with bounds where they aren't the default. Nothing of a plain
 * share. */
void retention_add_name(const app_retention *r, char *name, size_t n_bytes);

#define RETENTION_WANTS "a share over 0 and up to 1, or auto[:MASS[:LEAST-MOST]]"

#define RETENTION_LIST_WANTS "shares over 0 and up to 1, or auto[:MASS[:LEAST-MOST]]"

#endif
