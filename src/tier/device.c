/* device.c: host memory in the place of a device's. */
#include "tier/device.h"

#include <string.h>

#include "tier/heap.h"

static void *memory_open(uint64_t budget) { return imp_heap_new(budget); }

static void memory_close(void *device) { imp_heap_free(device); }

static void *memory_alloc(void *device, size_t n_bytes) { return imp_heap_take(device, n_bytes); }

static void memory_free(void *device, void *memory) { imp_heap_give(device, memory); }

static void memory_copy(void *to, const void *from, size_t n_bytes) { memcpy(to, from, n_bytes); }

const imp_device imp_device_memory = {.open = memory_open,
                                      .close = memory_close,
                                      .alloc = memory_alloc,
                                      .free = memory_free,
                                      .copy_in = memory_copy,
                                      .copy_out = memory_copy};
