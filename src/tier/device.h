/* device.h: the memory of the device tier, and the only ways to it. Whatever stands behind this table (a GPU's buffers,
 * say) is the device. In this version it is memory of the host, a heap of its own, kept apart from the host tier's, so
 * that its bytes can be read where they are (imp_host_entry_bytes()). */
#ifndef IMP_TIER_DEVICE_H
#define IMP_TIER_DEVICE_H

#include <stddef.h>
#include <stdint.h>

typedef struct imp_device {
    void *(*open)(uint64_t budget); /* for the calls below; NULL: no memory */
    void (*close)(void *device);    /* all was freed; NULL is allowed */
    void *(*alloc)(void *device, size_t n_bytes); /* NULL: there is no more */
    void (*free)(void *device, void *memory);
    void (*copy_in)(void *memory, const void *bytes, size_t n_bytes);
    void (*copy_out)(void *bytes, const void *memory, size_t n_bytes);
} imp_device;

extern const imp_device imp_device_memory;

#endif
