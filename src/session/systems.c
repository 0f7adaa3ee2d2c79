/* The named systems: sets of switches (docs/systems.md). */
#include <string.h>

#include "base/status.h"
#include "impress/impress.h"

static const struct {
    const char *name;
    imp_switches switches;
} systems[] = {
    {"as", {IMP_IDENTIFY_NONE, IMP_ORDER_TOKEN, IMP_CACHE_LRU, IMP_PREFETCH_LAYERS, IMP_REST_RAW, 64}},
    {"as-h2o-lru", {IMP_IDENTIFY_ALL_KEYS, IMP_ORDER_TOKEN, IMP_CACHE_LRU, IMP_PREFETCH_LAYERS, IMP_REST_RAW, 64}},
    {"as-h2o-lfu", {IMP_IDENTIFY_ALL_KEYS, IMP_ORDER_TOKEN, IMP_CACHE_LFU, IMP_PREFETCH_LAYERS, IMP_REST_RAW, 64}},
};

/* Named in the documentation, with work still ahead of them. */
static const char *const later[] = {"spi", "impress-paper", "contiguous", "impress"};

#define KNOWN "as, as-h2o-lru, as-h2o-lfu"

int imp_system_preset(const char *name, imp_switches *out)
{
    if (!name || !out) return imp_fail(IMP_E_ARG, "imp_system_preset: name or result missing");
    for (size_t i = 0; i < sizeof systems / sizeof systems[0]; i++) {
        if (strcmp(name, systems[i].name) == 0) {
            *out = systems[i].switches;
            return 0;
        }
    }
    for (size_t i = 0; i < sizeof later / sizeof later[0]; i++) {
        if (strcmp(name, later[i]) == 0)
            return imp_fail(IMP_E_UNSUPPORTED, "system '%s' is not in this version; these are: " KNOWN, name);
    }
    if (strcmp(name, "recomp") == 0)
        return imp_fail(IMP_E_NOTFOUND, "system 'recomp' loads nothing and has no switches; those that do: " KNOWN);
    return imp_fail(IMP_E_NOTFOUND, "unknown system '%.64s'; known: " KNOWN, name);
}

const char *imp_system_name(size_t i) { return i < sizeof systems / sizeof systems[0] ? systems[i].name : NULL; }
