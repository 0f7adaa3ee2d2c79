#include "ahead.h"

#include <stdlib.h>

#include "metrics.h"

enum { MAX_WAITING = 16, LEAST_TOKENS = 64 };

struct ahead {
    uint32_t n_layers;
    uint64_t budget;
    pthread_t thread;
    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t more;
    job *waiting[MAX_WAITING]; /* a ring: [n], from `first` on */
    size_t first, n;
    uint64_t held; /* bytes of prefixes that were read, of jobs that still wait */
    bool end;
};

/* Room for what a job's prefix takes. */
static bool reserve(ahead *a, job *j, uint64_t bytes)
{
    pthread_mutex_lock(&a->lock);
    bool ok = !j->ahead_over && a->held + bytes <= a->budget;
    if (ok) {
        a->held += bytes;
        j->ahead_bytes = bytes;
    }
    pthread_mutex_unlock(&a->lock);
    return ok;
}

/* Bring the prefix of a prompt that is stored into the host tier: a load like any other, whose rows are thrown
 * away. They enter the tier when they are gathered. */
static void read_prefix(ahead *a, job *j)
{
    imp_space *space = j->space;
    imp_lease *lease = NULL;
    imp_load *load = NULL;
    imp_prefix_info info;
    imp_load_stats stats = {0};
    imp_load_opts opts = j->request.load;
    opts.switches.identify = IMP_IDENTIFY_NONE;
    opts.retention = 1;
    opts.record = IMP_RECORD_NOTHING;
    size_t row = imp_space_token_bytes(space); /* of all layers: more than one of them takes */
    unsigned char *rows = malloc(2 * row);
    uint32_t *cells = NULL;

    unsigned flags = j->request.use_derived ? IMP_ACQUIRE_DERIVED : 0;
    if (!rows || imp_prefix_acquire(space, j->tokens, j->n_tokens, flags, &lease, &info) < 0) goto out;
    if (info.n_matched < LEAST_TOKENS || !reserve(a, j, info.bytes_full)) goto out;
    cells = calloc(info.n_matched, sizeof *cells); /* all rows go to the same place */
    if (!cells || imp_load_begin(lease, &opts, &load) < 0) goto out;
    imp_dst dst = {rows, rows + row, row, row, cells};
    for (uint32_t l = 0; l < a->n_layers; l++)
        if (imp_load_select(load, l, NULL, NULL) < 0 || imp_load_gather(load, l, &dst) < 0) break;
    metric_add(j->tenant, METRIC_LOOK_AHEAD, 1);
out:
    imp_load_end(load, &stats);
    metric_add(j->tenant, METRIC_LOOK_AHEAD_BYTES, stats.bytes_read);
    imp_lease_release(lease);
    free(cells);
    free(rows);
}

static void *run(void *user)
{
    ahead *a = user;
    pthread_mutex_lock(&a->lock);
    while (!a->end) {
        if (a->n == 0) {
            pthread_cond_wait(&a->more, &a->lock);
            continue;
        }
        job *j = a->waiting[a->first];
        a->first = (a->first + 1) % MAX_WAITING;
        a->n--;
        pthread_mutex_unlock(&a->lock);
        read_prefix(a, j);
        job_release(j);
        pthread_mutex_lock(&a->lock);
    }
    pthread_mutex_unlock(&a->lock);
    return NULL;
}

ahead *ahead_open(uint32_t n_layers, uint64_t budget)
{
    ahead *a = calloc(1, sizeof *a);
    if (!a) return NULL;
    a->n_layers = n_layers;
    a->budget = budget;
    pthread_mutex_init(&a->lock, NULL);
    pthread_cond_init(&a->more, NULL);
    if (pthread_create(&a->thread, NULL, run, a) == 0) return a;
    pthread_cond_destroy(&a->more);
    pthread_mutex_destroy(&a->lock);
    free(a);
    return NULL;
}

void ahead_close(ahead *a)
{
    if (!a) return;
    pthread_mutex_lock(&a->lock);
    a->end = true;
    pthread_cond_signal(&a->more);
    pthread_mutex_unlock(&a->lock);
    pthread_join(a->thread, NULL);
    for (; a->n > 0; a->n--) {
        job_release(a->waiting[a->first]);
        a->first = (a->first + 1) % MAX_WAITING;
    }
    pthread_cond_destroy(&a->more);
    pthread_mutex_destroy(&a->lock);
    free(a);
}

void ahead_put(ahead *a, job *j)
{
    pthread_mutex_lock(&a->lock);
    if (a->n < MAX_WAITING) {
        job_hold(j);
        a->waiting[(a->first + a->n++) % MAX_WAITING] = j;
        pthread_cond_signal(&a->more);
    }
    pthread_mutex_unlock(&a->lock);
}

bool ahead_take(ahead *a, job *j)
{
    pthread_mutex_lock(&a->lock);
    bool was = j->ahead_bytes > 0;
    a->held -= j->ahead_bytes;
    j->ahead_bytes = 0;
    j->ahead_over = true;
    pthread_mutex_unlock(&a->lock);
    return was;
}
