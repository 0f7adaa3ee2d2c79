/* The named systems: sets of switches (docs/systems.md). */
#include <string.h>

#include "base/status.h"
#include "impress/impress.h"

#define SYSTEM(name, identify, order, cache, prefetch, rest, chunk)                                             \
    {                                                                                                           \
        name, {IMP_IDENTIFY_##identify, IMP_ORDER_##order, IMP_CACHE_##cache, IMP_PREFETCH_##prefetch,          \
               IMP_REST_##rest, chunk}                                                                          \
    }

static const struct {
    const char *name;
    imp_switches switches;
} systems[] = {
    SYSTEM("as", NONE, TOKEN, LRU, LAYERS, RAW, 64),
    SYSTEM("as-h2o-lru", ALL_KEYS, TOKEN, LRU, LAYERS, RAW, 64),
    SYSTEM("as-h2o-lfu", ALL_KEYS, TOKEN, LFU, LAYERS, RAW, 64),
    SYSTEM("spi", STATIC, TOKEN, LRU, LAYERS, RAW, 64),
    SYSTEM("impress-paper", PROBE, IMPORTANCE, SCORE, LAYERS, RAW, 64),
    SYSTEM("contiguous", CHUNKS, TOKEN, ATTENTION, CHUNKS, RAW, 16),
    SYSTEM("impress", SKETCH, CORE, AGED, CORE, RAW, 16),
    SYSTEM("random", RANDOM, TOKEN, LRU, LAYERS, RAW, 64),
};

#define KNOWN "as, as-h2o-lru, as-h2o-lfu, spi, impress-paper, contiguous, impress, random"

int imp_system_preset(const char *name, imp_switches *out)
{
    if (!name || !out) return imp_fail(IMP_E_ARG, "imp_system_preset: name or result missing");
    for (size_t i = 0; i < sizeof systems / sizeof systems[0]; i++) {
        if (strcmp(name, systems[i].name) == 0) {
            *out = systems[i].switches;
            return 0;
        }
    }
    if (strcmp(name, "recomp") == 0)
        return imp_fail(IMP_E_NOTFOUND, "system 'recomp' loads nothing and has no switches; those that do: " KNOWN);
    return imp_fail(IMP_E_NOTFOUND, "unknown system '%.64s'; known: " KNOWN, name);
}

const char *imp_system_name(size_t i) { return i < sizeof systems / sizeof systems[0] ? systems[i].name : NULL; }
