#include "store_options.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int store_settings_apply(const opt_command *command, const store_settings *s, imp_store_opts *opts)
{
    imp_store_opts_init(opts);
    opts->limit_bytes = s->limit;
    opts->read_bytes_per_s = s->io_limit;
    opts->host_cache_bytes = s->host_cache;
    opts->min_store_tokens = (uint32_t)s->min_store;
    if (s->chunk && (s->chunk % 16 || s->chunk > 256))
        return opt_misuse(command, "--chunk wants a multiple of 16 from 16 to 256, not %llu",
                          (unsigned long long)s->chunk);
    opts->chunk_tokens = (uint32_t)s->chunk;
    if (s->rest) {
        if (!strcmp(s->rest, "q8"))
            opts->rest = IMP_REST_Q8;
        else if (!strcmp(s->rest, "f16"))
            opts->rest = IMP_REST_RAW;
        else
            return opt_misuse(command, "--rest: `%s` is not one of f16, q8", s->rest);
    }
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

const char *store_settings_dir(const store_settings *s)
{
    if (s->dir) return strcmp(s->dir, "none") ? s->dir : NULL;
    return store_default_dir("store");
}
