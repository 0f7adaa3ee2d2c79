/* device.h: the memory of the device tier, and the only ways to it. Whatever stands behind this table (a GPU's buffers,
 * say) is the device. In this version it is memory of the host, kept apart from the host tier's, so that its bytes can
 * be read where they are (imp_host_entry_bytes()). */
#ifndef IMP_TIER_DEVICE_H
#define IMP_TIER_DEVICE_H

#include <stddef.h>

typedef struct imp_device {
    void *(*alloc)(size_t n_bytes); /* NULL: there is no more */
    void (*free)(void *memory);
    void (*copy_in)(void *memory, const void *bytes, size_t n_bytes);
    void (*copy_out)(void *bytes, const void *memory, size_t n_bytes);
} imp_device;

extern const imp_device imp_device_memory;

#endif
