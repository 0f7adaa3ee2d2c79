/* memory.c: see memory.h. A list, since a store has few files for its bytes; names are looked up when a segment is
 * opened for the first time, not for reads. */
#include "io/memory.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "base/alloc.h"
#include "base/status.h"

enum { LEAST_ROOM = 64 << 10 };

struct imp_io_memory {
    pthread_mutex_t mutex;
    imp_io_bytes *first; /* guarded by mutex */
};

imp_io_memory *imp_io_memory_new(void)
{
    imp_io_memory *m = imp_calloc(1, sizeof *m);
    if (m) pthread_mutex_init(&m->mutex, NULL);
    return m;
}

static void bytes_free(imp_io_bytes *b)
{
    if (!b) return;
    imp_free(b->bytes);
    imp_free(b->name);
    imp_free(b);
}

void imp_io_memory_free(imp_io_memory *m)
{
    if (!m) return;
    for (imp_io_bytes *b = m->first, *next; b; b = next) {
        next = b->next;
        bytes_free(b);
    }
    pthread_mutex_destroy(&m->mutex);
    imp_free(m);
}

/* ---- writing */

imp_io_bytes *imp_io_bytes_new(const char *name)
{
    imp_io_bytes *b = imp_calloc(1, sizeof *b);
    if (!b) return NULL;
    b->n_users = 1;
    b->name = imp_strdup(name);
    if (b->name) return b;
    imp_free(b);
    return NULL;
}

int imp_io_bytes_write(imp_io_bytes *b, size_t offset, const void *bytes, size_t n_bytes)
{
    if (offset > SIZE_MAX / 2 - n_bytes) return EFBIG;
    size_t end = offset + n_bytes;
    if (end > b->room) {
        size_t room = 2 * b->room > end ? 2 * b->room : end;
        if (room < LEAST_ROOM) room = LEAST_ROOM;
        unsigned char *p = imp_realloc(b->bytes, room);
        if (!p) return ENOMEM;
        b->bytes = p;
        b->room = room;
    }
    if (offset > b->n_bytes) memset(b->bytes + b->n_bytes, 0, offset - b->n_bytes);
    memcpy(b->bytes + offset, bytes, n_bytes);
    if (end > b->n_bytes) b->n_bytes = end;
    return 0;
}

/* ---- names; with the mutex held */

static imp_io_bytes **find(imp_io_memory *m, const char *name)
{
    imp_io_bytes **at = &m->first;
    while (*at && strcmp((*at)->name, name) != 0) at = &(*at)->next;
    return at;
}

/* The file at `at` has no name any more. Returns it if nobody uses it. */
static imp_io_bytes *take_out(imp_io_bytes **at)
{
    imp_io_bytes *b = *at;
    if (!b) return NULL;
    *at = b->next;
    return --b->n_users == 0 ? b : NULL;
}

/* ---- the directory */

void imp_io_memory_publish(imp_io_memory *m, imp_io_bytes *b)
{
    if (b->room > b->n_bytes && b->n_bytes > 0) {
        unsigned char *p = imp_realloc(b->bytes, b->n_bytes);
        if (p) {
            b->bytes = p;
            b->room = b->n_bytes;
        }
    }
    pthread_mutex_lock(&m->mutex);
    imp_io_bytes *old = take_out(find(m, b->name));
    b->next = m->first; /* the writer's use becomes the name's */
    m->first = b;
    pthread_mutex_unlock(&m->mutex);
    bytes_free(old);
}

imp_io_bytes *imp_io_memory_open(imp_io_memory *m, const char *name)
{
    pthread_mutex_lock(&m->mutex);
    imp_io_bytes *b = *find(m, name);
    if (b) b->n_users++;
    pthread_mutex_unlock(&m->mutex);
    return b;
}

void imp_io_memory_close(imp_io_memory *m, imp_io_bytes *b)
{
    if (!b) return;
    pthread_mutex_lock(&m->mutex);
    bool last = --b->n_users == 0;
    pthread_mutex_unlock(&m->mutex);
    if (last) bytes_free(b);
}

bool imp_io_memory_unlink(imp_io_memory *m, const char *name)
{
    pthread_mutex_lock(&m->mutex);
    imp_io_bytes **at = find(m, name);
    bool found = *at != NULL;
    imp_io_bytes *b = take_out(at);
    pthread_mutex_unlock(&m->mutex);
    bytes_free(b);
    return found;
}

int imp_io_memory_list(imp_io_memory *m, const char *sub, int (*fn)(const char *name, uint64_t n_bytes, void *user),
                       void *user)
{
    size_t n_sub = strlen(sub), n_files = 0, i = 0;
    struct listed {
        char *name;
        uint64_t n_bytes;
    } *files;
    int rc = 0;

    /* A copy first, so that `fn` runs without the mutex. */
    pthread_mutex_lock(&m->mutex);
    for (const imp_io_bytes *b = m->first; b; b = b->next) n_files++;
    files = imp_calloc(n_files + 1, sizeof *files);
    for (const imp_io_bytes *b = m->first; files && b; b = b->next) {
        if (n_sub > 0 && (strncmp(b->name, sub, n_sub) != 0 || b->name[n_sub] != '/')) continue;
        const char *last = n_sub > 0 ? b->name + n_sub + 1 : b->name;
        if (strchr(last, '/')) continue;
        files[i] = (struct listed){imp_strdup(last), b->n_bytes};
        if (!files[i++].name) rc = IMP_E_NOMEM;
    }
    pthread_mutex_unlock(&m->mutex);
    if (!files || rc < 0) rc = imp_fail(IMP_E_NOMEM, "no memory to list files");
    n_files = i;
    for (i = 0; i < n_files; i++) {
        if (rc == 0) rc = fn(files[i].name, files[i].n_bytes, user);
        imp_free(files[i].name);
    }
    imp_free(files);
    return rc;
}
