/* device.c: host memory in the place of a device's. */
#include "tier/device.h"

#include <string.h>

#include "base/alloc.h"

static void *memory_alloc(size_t n_bytes) { return imp_aligned(64, n_bytes); }

static void memory_copy(void *to, const void *from, size_t n_bytes) { memcpy(to, from, n_bytes); }

const imp_device imp_device_memory = {
    .alloc = memory_alloc, .free = imp_free, .copy_in = memory_copy, .copy_out = memory_copy};
