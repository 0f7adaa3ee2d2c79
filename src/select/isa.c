/* isa.c: picks the kernels once, at run time. */
#include "select/kernels.h"

#include <stdatomic.h>
#include <string.h>

#include "base/status.h"
#include "select/select.h"

/* Relaxed: the tables are constants, so it doesn't matter when another thread sees the pointer change. */
static _Atomic(const imp_kernels *) chosen;

/* Best first. */
static const imp_kernels *table(size_t i)
{
    switch (i) {
    case 0: return imp_kernels_vnni();
    case 1: return imp_kernels_avx512();
    case 2: return imp_kernels_avx2();
    case 3: return imp_kernels_neon();
    default: return &imp_kernels_plain;
    }
}

static const imp_kernels *best(void)
{
    size_t i = 0;
    while (!table(i)) i++;
    return table(i);
}

const imp_kernels *imp_kernels_now(void)
{
    const imp_kernels *k = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (!k) {
        k = best();
        atomic_store_explicit(&chosen, k, memory_order_relaxed);
    }
    return k;
}

const char *imp_select_isa(void) { return imp_kernels_now()->name; }

int imp_select_force_isa(const char *name)
{
    for (size_t i = 0; i < 5; i++) {
        const imp_kernels *k = name ? table(i) : best();
        if (k && (!name || strcmp(k->name, name) == 0)) {
            atomic_store_explicit(&chosen, k, memory_order_relaxed);
            return 0;
        }
    }
    return imp_fail(IMP_E_UNSUPPORTED, "no kernels '%s' on this machine", name);
}
