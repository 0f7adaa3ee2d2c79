#include "retention.h"

#include <stdio.h>
#include <string.h>

#include "text.h"

static const app_retention by_mass = {.share = 0.5, .mass = 0.9, .least = 0.05};

/* Also as the float that the library takes. */
static bool is_share(double x) { return (float)x > 0 && x <= 1; }

/* LEAST-MOST */
static bool parse_bounds(const char *text, double *least, double *most)
{
    char first[32];
    const char *dash = strchr(text, '-');
    if (!dash || (size_t)(dash - text) >= sizeof first) return false;
    snprintf(first, sizeof first, "%.*s", (int)(dash - text), text);
    return text_parse_real(first, least) && text_parse_real(dash + 1, most) && is_share(*least) && is_share(*most) &&
           *least <= *most;
}

bool retention_parse(const char *text, app_retention *out)
{
    *out = (app_retention){.share = RETENTION_DEFAULT};
    if (!text) return true;
    if (strncmp(text, "auto", 4) != 0) return text_parse_real(text, &out->share) && is_share(out->share);
    *out = by_mass;
    if (!text[4]) return true;
    if (text[4] != ':') return false;
    char mass[32];
    const char *bounds = strchr(text + 5, ':');
    size_t n = bounds ? (size_t)(bounds - text - 5) : strlen(text + 5);
    if (n >= sizeof mass) return false;
    snprintf(mass, sizeof mass, "%.*s", (int)n, text + 5);
    if (!text_parse_real(mass, &out->mass) || !((float)out->mass > 0 && (float)out->mass < 1)) return false;
    return !bounds || parse_bounds(bounds + 1, &out->least, &out->share);
}

void retention_apply(const app_retention *r, imp_load_opts *opts)
{
    opts->retention = r->share;
    opts->mass = (float)r->mass;
    opts->least_retention = (float)r->least;
}

void retention_add_name(const app_retention *r, char *name, size_t n_bytes)
{
    size_t n = strlen(name);
    bool bounds = r->least < by_mass.least || r->least > by_mass.least || r->share < by_mass.share ||
                  r->share > by_mass.share;
    if (!(r->mass > 0)) return;
    snprintf(name + n, n_bytes - n, ", auto:%g", r->mass);
    n = strlen(name);
    if (bounds) snprintf(name + n, n_bytes - n, ":%g-%g", r->least, r->share);
}
