/* fuzz_system.c: any text as a system: a preset and switches. */
#include <stdlib.h>
#include <string.h>

#include "fuzz/fuzz.h"
#include "fuzz/util.h"
#include "switches.h"

/* A system is refused with a reason, or can be used; and its name says all of it. */
static void parse_system(const char *text)
{
    static const switch_settings none = {0};
    app_system a, b;
    char error[SWITCH_ERROR_BYTES] = "", buf[64];
    int rc = app_system_make("--system", text, &none, 0.25, &a, error);
    MUST(rc == 0 || (rc == -1 && error[0] != '\0' && !strchr(error, '\n')));
    if (rc != 0) return;
    MUST(a.recompute || imp_load_opts_check(&a.load) == 0);
    MUST(strlen(a.name) < sizeof a.name && strlen(app_system_combination(&a, buf)) < sizeof buf);
    for (int i = 0; i < SWITCH_COUNT; i++) {
        char value[32];
        MUST(strlen(switch_value(&a, (switch_id)i, value)) < sizeof value);
    }
    if (strlen(a.name) + 1 == sizeof a.name) return; /* cut: it is for people */
    MUST(app_system_make("--system", a.name, &none, 0.25, &b, error) == 0);
    MUST(strcmp(a.name, b.name) == 0 && a.recompute == b.recompute && a.chooses == b.chooses);
    for (int i = 0; i < SWITCH_COUNT; i++) {
        char x[32], y[32];
        MUST(strcmp(switch_value(&a, (switch_id)i, x), switch_value(&b, (switch_id)i, y)) == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    char *text = malloc(n_bytes + 1);
    MUST(text);
    memcpy(text, bytes, n_bytes);
    text[n_bytes] = '\0';
    parse_system(text);
    free(text);
    return 0;
}

size_t imp_fuzz_seed(size_t i, uint8_t *out, size_t room)
{
    static const char *const texts[] = {
        "impress+bytes=.375", "as-h2o-lru", "as+identify=probe+probe-heads=5+probe-spread=yes", "recomp", "as",
        "kvzip+keep-first=4+keep-last=8+order=core", "impress+rest=q4+chunk=256+prefetch=core+cache=lfu",
        "as+identify=chunks+period=2+query-rows=7", "as+identify=static+rank=reconstruction", "as+", "as+=",
        "as+identify=sketch+history-weight=-1+bytes=1",
        "as+identify=probe+probe-alpha=.5+probe-similarity=.25",
    };
    return fuzz_text_seed(texts, sizeof texts / sizeof *texts, i, out, room);
}
