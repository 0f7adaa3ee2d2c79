#include "session/lease.h"

#include <stdbool.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "io/io.h"

/* A segment states shapes and types of its own. They can't differ from the space's, whose id is made of them, unless
 * its writer was wrong about them; rows of another size must not reach the engine's memory. */
static bool fits_space(const imp_seg_meta *meta, const imp_space *space)
{
    return meta->n_layers == space->n_layers && meta->type_k == space->type_k && meta->type_v == space->type_v &&
           memcmp(meta->layers, space->layers, space->n_layers * sizeof *space->layers) == 0;
}

static uint64_t row_bytes(const imp_seg_layout *layout)
{
    uint64_t n = 0;
    for (uint32_t l = 0; l < imp_seg_layout_meta(layout)->n_layers; l++)
        n += imp_seg_row_bytes(layout, IMP_REGION_K, l) + imp_seg_row_bytes(layout, IMP_REGION_V, l);
    return n;
}

static void describe(const imp_lease *lease, imp_prefix_info *info)
{
    bool exact = true;
    size_t done = 0;
    for (size_t i = 0; i < lease->path.n_spans && done < lease->n_tokens; i++) {
        const imp_span *s = &lease->path.spans[i];
        size_t n = s->n_tokens < lease->n_tokens - done ? s->n_tokens : lease->n_tokens - done;
        exact = exact && !s->derived;
        if (exact) info->n_exact += n;
        if (imp_seg_layout_meta(s->seg->layout)->rest != IMP_REST_RAW) info->rounded = 1;
        info->bytes_full += n * row_bytes(s->seg->layout);
        info->node = s->node;
        done += n;
    }
    info->n_matched = done;
}

int imp_prefix_acquire(imp_space *space, const int32_t *tokens, size_t n_tokens, unsigned flags, imp_lease **out,
                       imp_prefix_info *info)
{
    if (out) *out = NULL;
    if (info) *info = (imp_prefix_info){0};
    if (!space || !out || !info || (!tokens && n_tokens) || (flags & ~IMP_ACQUIRE_DERIVED))
        return imp_fail(IMP_E_ARG, "imp_prefix_acquire: an argument is missing, or an unknown flag");

    uint64_t start = imp_now_ns(), header_bytes = 0;
    imp_kept_line kept;
    imp_error_keep(&kept);
    imp_lease *lease = imp_calloc(1, sizeof *lease);
    if (!lease) return imp_fail(IMP_E_NOMEM, "no memory for a lease");
    lease->store = space->store;
    lease->turns = imp_turns_hold(space->turns);
    atomic_init(&lease->n_users, 1);

    int rc = 0;
    if (n_tokens > 1)
        rc = imp_store_match(space->store, space->id, tokens, n_tokens - 1, !(flags & IMP_ACQUIRE_DERIVED),
                             &lease->path, &header_bytes);
    if (imp_io_in_memory(imp_store_io(space->store))) header_bytes = 0; /* none came from a disk */
    atomic_init(&lease->header_bytes, header_bytes);
    if (rc < 0) {
        imp_turns_drop(lease->turns);
        imp_free(lease);
        return rc;
    }
    for (size_t i = 0; i < lease->path.n_spans; i++) {
        const imp_span *s = &lease->path.spans[i];
        if (!fits_space(imp_seg_layout_meta(s->seg->layout), space)) {
            imp_log(IMP_LOG_ERROR, "segments/%016llx.seg: its shapes aren't those of the space; not used",
                    (unsigned long long)s->seg->id);
            break;
        }
        lease->n_tokens += s->n_tokens;
    }
    describe(lease, info);
    imp_store_count_acquire(space->store, lease->n_tokens);
    info->match_ns = imp_now_ns() - start;
    if (lease->n_tokens == 0) {
        imp_lease_release(lease);
        lease = NULL;
    }
    *out = lease;
    return imp_error_back(&kept, 0);
}

int imp_lease_trim(imp_lease *lease, size_t n_tokens)
{
    if (!lease) return imp_fail(IMP_E_ARG, "imp_lease_trim: no lease");
    unsigned n_loads = atomic_load(&lease->n_users) - 1;
    if (n_loads || n_tokens == 0 || n_tokens > lease->n_tokens)
        return imp_fail(IMP_E_ARG, "imp_lease_trim: to %zu tokens, of %zu, with %u loads open", n_tokens,
                        lease->n_tokens, n_loads);
    lease->n_tokens = n_tokens;
    return 0;
}

void imp_lease_drop(imp_lease *lease)
{
    if (atomic_fetch_sub(&lease->n_users, 1) > 1) return;
    imp_store_unpin(lease->store, &lease->path);
    imp_turns_drop(lease->turns);
    imp_free(lease);
}

void imp_lease_release(imp_lease *lease)
{
    if (lease) imp_lease_drop(lease);
}
