#include "store_options.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "model.h"
#include "text.h"

int store_settings_apply(const opt_command *command, const store_settings *s, imp_store_opts *opts)
{
    imp_store_opts_init(opts);
    opts->limit_bytes = s->limit;
    opts->key_file = s->key_file;
    opts->read_bytes_per_s = s->io_limit;
    opts->host_cache_bytes = s->host_cache;
    opts->min_store_tokens = (uint32_t)s->min_store;
    opts->device_cache_bytes = s->device_cache;
    opts->reorder_after = (uint32_t)s->reorder_after;
    if (s->ttl > UINT32_MAX) return opt_misuse(command, "--ttl wants no more than %u seconds", UINT32_MAX);
    opts->ttl_s = (uint32_t)s->ttl;
    if (s->read_deadline > 1000000) return opt_misuse(command, "--read-deadline wants no more than 1000000 seconds");
    opts->read_deadline_ms = (uint32_t)(s->read_deadline * 1000);
    if (s->tenant_share > 100) return opt_misuse(command, "--tenant-share wants 1 to 100 per cent");
    opts->space_percent = (uint32_t)s->tenant_share;
    if (s->reorder_period && strcmp(s->reorder_period, "never") != 0) {
        uint64_t seconds;
        if (!text_parse_count(s->reorder_period, UINT32_MAX - 1, &seconds) || seconds == 0)
            return opt_misuse(command, "--reorder-period wants seconds or never, not `%s`", s->reorder_period);
        opts->reorder_period_s = (uint32_t)seconds;
    } else if (s->reorder_period) {
        opts->reorder_period_s = UINT32_MAX;
    }
    char error[SWITCH_ERROR_BYTES];
    if (switch_store_options(&s->switches, opts, error) < 0) return opt_misuse(command, "%s", error);
    if (s->io) {
        if (!strcmp(s->io, "uring"))
            opts->io_mode = IMP_IO_URING;
        else if (!strcmp(s->io, "threads"))
            opts->io_mode = IMP_IO_THREADS;
        else if (strcmp(s->io, "auto") != 0)
            return opt_misuse(command, "--io: `%s` is not one of auto, uring, threads", s->io);
    }
    if (s->no_direct) opts->flags |= IMP_STORE_NO_DIRECT;
    return 0;
}

static void make_parents(char *path)
{
    for (char *p = path + 1; *p; p++) {
        if (*p != '/') continue;
        *p = '\0';
        mkdir(path, 0700); /* what is missing shows when the store opens */
        *p = '/';
    }
}

const char *store_default_dir(const char *name)
{
    static char path[4096];
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (cache && *cache)
        snprintf(path, sizeof path, "%s/impress/%s", cache, name);
    else
        snprintf(path, sizeof path, "%s/.cache/impress/%s", home && *home ? home : ".", name);
    make_parents(path);
    return path;
}

int store_settings_open(const store_settings *s, const imp_store_opts *opts, imp_store **out)
{
    const char *dir = store_settings_dir(s);
    imp_store_opts o = *opts;
    *out = NULL;
    if (!dir && o.host_cache_bytes == 0 && o.device_cache_bytes == 0) return 0;
    if (!dir) o.flags |= IMP_STORE_MEMORY;
    return imp_store_open(dir, &o, out) < 0 ? app_fail("%s", imp_last_error()) : 0;
}

const char *store_settings_dir(const store_settings *s)
{
    if (s->dir) return strcmp(s->dir, "none") ? s->dir : NULL;
    return store_default_dir("store");
}
