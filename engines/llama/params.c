/* params.c: structs of callers whose header may be older or newer than this library, as base/opts.h takes them; and
 * what lies within them, which has a size of its own and room to grow in. */
#include <stddef.h>
#include <string.h>

#include "adapter.h"

_Static_assert(sizeof(imp_load_opts) <= sizeof((imp_llama_request *)0)->load_room,
               "what is behind would move: a new soname, and more room");
_Static_assert(sizeof(imp_llama_request) <= sizeof((imp_llama_params *)0)->request_room,
               "what is behind would move: a new soname, and more room");

/* As they were first released; what is added comes behind. */
static const size_t least_request_bytes =
    offsetof(imp_llama_request, load_room) + sizeof((imp_llama_request *)0)->load_room;
static const size_t least_params_bytes = offsetof(imp_llama_params, widen_query) + sizeof(bool);

/* Far more than any of them will have: nobody meant it. */
enum { MOST_BYTES = 64 << 10 };

static void give(void *out, size_t struct_bytes)
{
    memset(out, 0, struct_bytes);
    memcpy(out, &struct_bytes, sizeof struct_bytes);
}

void imp_llama_request_fill(imp_llama_request *request, size_t struct_bytes)
{
    if (!request || struct_bytes < least_request_bytes) return;
    give(request, struct_bytes);
    request->store_new = true;
}

void imp_llama_params_fill(imp_llama_params *params, size_t struct_bytes)
{
    if (params && struct_bytes >= least_params_bytes) give(params, struct_bytes);
}

static int check_size(size_t n, size_t least, size_t most, const char *what)
{
    if (n >= least && n <= most && n % sizeof n == 0) return 0;
    return lc_error(IMP_E_ARG, "%s: struct_bytes is %zu, which can't be (%zu to %zu): not initialised?", what, n, least,
                    most);
}

/* `out` [n_bytes] holds the defaults, which stay where `given` ends before it. */
static int take(void *out, size_t n_bytes, size_t least, const void *given, const char *what)
{
    size_t n;
    memcpy(&n, given, sizeof n);
    int rc = check_size(n, least, MOST_BYTES, what);
    if (rc < 0) return rc;
    for (size_t i = n_bytes; i < n; i++) {
        if (((const unsigned char *)given)[i])
            return lc_error(IMP_E_UNSUPPORTED, "%s: sets what version %s of this library doesn't know", what,
                            imp_version());
    }
    memcpy(out, given, n < n_bytes ? n : n_bytes);
    memcpy(out, &n_bytes, sizeof n_bytes);
    return 0;
}

int lc_request_take(const imp_llama_request *given, imp_llama_request *out)
{
    imp_llama_request_fill(out, sizeof *out);
    if (!given) return lc_error(IMP_E_ARG, "no request");
    int rc = take(out, sizeof *out, least_request_bytes, given, "imp_llama_request");
    if (rc < 0) return rc;
    size_t n = out->load.struct_bytes;
    rc = check_size(n, sizeof n, sizeof out->load_room, "imp_llama_request.load");
    if (rc == 0) rc = imp_load_opts_check(&out->load);
    if (rc < 0) return rc;

    imp_load_opts load;
    imp_load_opts_init(&load);
    memcpy(&load, out->load_room, n < sizeof load ? n : sizeof load);
    load.struct_bytes = sizeof load;
    memset(out->load_room, 0, sizeof out->load_room);
    out->load = load;
    if (load.retention < 1 && load.switches.identify == IMP_IDENTIFY_NONE && !out->recompute)
        return lc_error(IMP_E_ARG, "retention %g needs an identification", load.retention);
    return 0;
}

int lc_params_take(const imp_llama_params *given, imp_llama_params *out)
{
    imp_llama_request request;
    imp_llama_params_fill(out, sizeof *out);
    int rc = take(out, sizeof *out, least_params_bytes, given, "imp_llama_params");
    if (rc == 0)
        rc = check_size(out->request.struct_bytes, least_request_bytes, sizeof out->request_room,
                        "imp_llama_params.request");
    if (rc == 0) rc = lc_request_take(&out->request, &request);
    if (rc < 0) return rc;
    memset(out->request_room, 0, sizeof out->request_room);
    out->request = request;
    return 0;
}
