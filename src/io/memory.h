/* memory.h: inside src/io. The files of a store without a directory: owned bytes, by name. A file is counted: by its
 * name, while it has one, and by each imp_io_file on it. It is written by one writer, before it has a name, and never
 * changes from then on. */
#ifndef IMP_IO_MEMORY_H
#define IMP_IO_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct imp_io_memory imp_io_memory;
typedef struct imp_io_bytes imp_io_bytes;

struct imp_io_bytes {
    imp_io_bytes *next; /* in the directory */
    char *name;
    unsigned char *bytes;
    size_t n_bytes, room;
    size_t n_users; /* guarded by the directory's mutex */
};

/* NULL: no memory. */
imp_io_memory *imp_io_memory_new(void);
void imp_io_memory_free(imp_io_memory *m); /* nothing may be open; NULL is allowed */

/* Unnamed and empty, with one user. NULL: no memory. */
imp_io_bytes *imp_io_bytes_new(const char *name);
/* Zeros up to `offset` where there was nothing. 0 or an errno. */
int imp_io_bytes_write(imp_io_bytes *b, size_t offset, const void *bytes, size_t n_bytes);

/* Give it its name, in place of the file of that name, and what room it doesn't need back. */
void imp_io_memory_publish(imp_io_memory *m, imp_io_bytes *b);
imp_io_bytes *imp_io_memory_open(imp_io_memory *m, const char *name); /* one user more; NULL: there is none */
void imp_io_memory_close(imp_io_memory *m, imp_io_bytes *b);          /* NULL is allowed */
bool imp_io_memory_unlink(imp_io_memory *m, const char *name);        /* false: there is none */

/* As imp_io_list(), of the files whose name is `sub`, a slash and no other one. `fn` may call what it likes. */
int imp_io_memory_list(imp_io_memory *m, const char *sub, int (*fn)(const char *name, uint64_t n_bytes, void *user),
                       void *user);

#endif
