/* virtual.c: the clock of a store in virtual time, for those who simulate with it (impress.h). */
#include "io/io.h"
#include "store/store.h"

uint64_t imp_store_virtual_ns(imp_store *store)
{
    imp_io *io = store ? imp_store_io(store) : NULL;
    return io ? imp_io_virtual_ns(io) : 0;
}

void imp_store_virtual_pass(imp_store *store, uint64_t until_ns)
{
    imp_io *io = store ? imp_store_io(store) : NULL;
    if (io) imp_io_virtual_pass(io, until_ns);
}
