/* measure.c: how fast a file is read through the queue that loads use (impress.h). */
#include <stddef.h>
#include <string.h>
#include <sys/resource.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/opts.h"
#include "base/rng.h"
#include "base/status.h"
#include "io/io.h"

enum { MAX_DEPTH = 4096, BLOCK_UNIT = 4096 };

/* As it was first released; what is added comes behind. */
static const size_t least_trial_bytes = offsetof(imp_read_trial, max_ns) + sizeof(uint64_t);

static uint64_t cpu_ns(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return ((uint64_t)u.ru_utime.tv_sec + (uint64_t)u.ru_stime.tv_sec) * 1000000000u +
           ((uint64_t)u.ru_utime.tv_usec + (uint64_t)u.ru_stime.tv_usec) * 1000u;
}

typedef struct run_state {
    const imp_read_trial *t;
    imp_io_queue *q;
    imp_io_file *file;
    imp_io_op *ops; /* [n_ops]: op i has the arena's block i */
    size_t n_ops; /* twice the depth: as many wait in the queue as are in flight, as with loads, so that it can fill up
                     however reads overtake each other */
    uint64_t n_blocks, next;
    imp_rng rng;
} run_state;

static void submit(run_state *at, size_t i)
{
    uint64_t block = at->t->random ? imp_rng_below(&at->rng, at->n_blocks) : at->next++ % at->n_blocks;
    unsigned char *arena = imp_io_queue_arena(at->q, NULL);
    at->ops[i] = (imp_io_op){.file = at->file,
                             .offset = block * at->t->block_bytes,
                             .buf = arena + i * at->t->block_bytes,
                             .n_bytes = at->t->block_bytes};
    imp_io_submit(at->q, &at->ops[i]);
}

/* Keep the queue full until `max_bytes` are read or the time is over, then let it run empty. */
static int read_all(run_state *at, imp_read_figures *out)
{
    const imp_read_trial *t = at->t;
    uint64_t n = (t->max_bytes ? t->max_bytes : at->n_blocks * t->block_bytes) / t->block_bytes, submitted = 0;
    uint64_t cpu = cpu_ns(), start = imp_now_ns();
    if (n == 0) n = 1;
    for (; submitted < at->n_ops && submitted < n; submitted++) submit(at, (size_t)submitted);
    imp_io_kick(at->q);
    for (uint64_t done = 0; done < submitted; done++) {
        size_t i = (size_t)(done % at->n_ops);
        imp_io_wait(at->q, &at->ops[i]);
        if (at->ops[i].status < 0) return at->ops[i].status;
        if (submitted == n || (t->max_ns && imp_now_ns() - start >= t->max_ns)) continue;
        submit(at, i);
        submitted++;
    }
    out->ns = imp_now_ns() - start;
    out->cpu_ns = cpu_ns() - cpu;
    out->n_reads = submitted;
    out->n_bytes = submitted * t->block_bytes;
    return 0;
}

static int run(const char *dir, const char *name, const imp_read_trial *t, imp_read_figures *out)
{
    imp_io *io = NULL;
    run_state at = {.t = t};
    int rc = imp_io_new(dir, t->mode, t->flags | IMP_STORE_READONLY, t->read_bytes_per_s, &io);
    if (rc < 0) goto out;
    rc = imp_io_open(io, name, imp_io_alignment(io), &at.file);
    if (rc < 0) goto out;
    at.n_blocks = imp_io_file_bytes(at.file) / t->block_bytes;
    if (at.n_blocks == 0) {
        rc = imp_fail(IMP_E_ARG, "imp_measure_reads: %s has less than one block of %u bytes", name, t->block_bytes);
        goto out;
    }
    at.n_ops = 2 * (size_t)t->depth;
    at.ops = imp_calloc(at.n_ops, sizeof *at.ops);
    rc = at.ops ? 0 : imp_fail(IMP_E_NOMEM, "imp_measure_reads: no memory");
    if (rc < 0) goto out;
    rc = imp_io_queue_new(io, t->depth, at.n_ops * t->block_bytes, &at.q);
    if (rc < 0) goto out;
    imp_rng_seed(&at.rng, t->seed);
    rc = read_all(&at, out);
    out->io_mode = imp_io_describe(io);
out:
    imp_io_queue_free(at.q);
    imp_free(at.ops);
    imp_io_close(at.file);
    imp_io_free(io);
    return rc;
}

int imp_measure_reads(const char *file, const imp_read_trial *given, imp_read_figures *out)
{
    if (out) *out = (imp_read_figures){0};
    if (!file || !given || !out) return imp_fail(IMP_E_ARG, "imp_measure_reads: file, trial or result missing");
    imp_read_trial taken = {0}, *trial = &taken;
    int rc = imp_opts_take(trial, sizeof *trial, least_trial_bytes, given, "imp_read_trial");
    if (rc < 0) return rc;
    if (trial->block_bytes == 0 || trial->block_bytes % BLOCK_UNIT != 0 || trial->depth == 0 ||
        trial->depth > MAX_DEPTH)
        return imp_fail(IMP_E_ARG,
                        "imp_measure_reads: %u reads of %u bytes; must be a multiple of %d, at a depth of 1 to %d",
                        trial->depth, trial->block_bytes, BLOCK_UNIT, MAX_DEPTH);
    if (trial->flags & ~IMP_STORE_NO_DIRECT)
        return imp_fail(IMP_E_ARG, "imp_measure_reads: unknown flags 0x%x", trial->flags);
    char *path = imp_strdup(file), here[] = ".", root[] = "/";
    if (!path) return imp_fail(IMP_E_NOMEM, "imp_measure_reads: no memory");
    char *slash = strrchr(path, '/');
    const char *dir = !slash ? here : slash == path ? root : path, *name = slash ? slash + 1 : path;
    if (slash) *slash = '\0';
    rc = run(dir, name, trial, out);
    if (rc < 0) *out = (imp_read_figures){0};
    imp_free(path);
    return rc;
}
