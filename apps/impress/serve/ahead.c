#include "ahead.h"

#include <stdlib.h>

#include "metrics.h"

enum { MAX_WAITING = 16, LEAST_TOKENS = 64 };

struct ahead {
    uint32_t n_layers;
    pthread_t thread;
    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t more;
    job *waiting[MAX_WAITING]; /* a ring: [n], from `first` on */
    size_t first, n;
    bool end;
};

/* Bring the prefix of a prompt that is stored into the host tier: a load like any other, whose rows are thrown away. They
 * enter the tier when they are gathered. Returns the bytes read from disk. */
static uint64_t read_prefix(imp_space *space, const llama_token *tokens, size_t n, const imp_load_opts *like,
                            uint32_t n_layers)
{
    imp_lease *lease = NULL;
    imp_load *load = NULL;
    imp_prefix_info info;
    imp_load_stats stats = {0};
    imp_load_opts opts = *like;
    opts.switches.identify = IMP_IDENTIFY_NONE;
    opts.retention = 1;
    opts.record = IMP_RECORD_NOTHING;
    size_t row = imp_space_token_bytes(space); /* of all layers: more than one of them takes */
    unsigned char *rows = malloc(2 * row);
    uint32_t *cells = NULL;

    if (!rows || imp_prefix_acquire(space, tokens, n, 0, &lease, &info) < 0 || info.n_matched < LEAST_TOKENS) goto out;
    cells = calloc(info.n_matched, sizeof *cells); /* all rows go to the same place */
    if (!cells || imp_load_begin(lease, &opts, &load) < 0) goto out;
    imp_dst dst = {rows, rows + row, row, row, cells};
    for (uint32_t l = 0; l < n_layers; l++)
        if (imp_load_select(load, l, NULL, NULL) < 0 || imp_load_gather(load, l, &dst) < 0) break;
    metric_add(METRIC_LOOK_AHEAD, 1);
out:
    imp_load_end(load, &stats);
    imp_lease_release(lease);
    free(cells);
    free(rows);
    return stats.bytes_read;
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
        /* One that has its slot by now loads for itself. */
        if (!atomic_load(&j->cancelled) && !atomic_load(&j->has_slot)) {
            uint64_t bytes = read_prefix(j->space, j->tokens, j->n_tokens, &j->request.load, a->n_layers);
            metric_add(METRIC_LOOK_AHEAD_BYTES, bytes);
        }
        job_release(j);
        pthread_mutex_lock(&a->lock);
    }
    pthread_mutex_unlock(&a->lock);
    return NULL;
}

ahead *ahead_open(uint32_t n_layers)
{
    ahead *a = calloc(1, sizeof *a);
    if (!a) return NULL;
    a->n_layers = n_layers;
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
