/* writer.c: the one thread that turns staged rows into segments. A long entry becomes several, one after the other, so
 * that what is on disk can be used, and a kill costs one of them.
 *
 *     reserve (change)  ->  pack, write, fdatasync, rename  ->  publish (change)
 *
 * Other processes may store the same meanwhile, split or evict; so both changes look again at what is there. */
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "select/order.h"
#include "store/store_internal.h"

enum {
    NICE = 10,
    DU_UNIT = 4096,
    LIMIT_SHARE = 8,
    ALONE_TRIES = 3,
    DIRTY_MAX = 64 /* histories that don't wait for their time */
};

static const uint64_t history_ns = 10000000000u, history_least_ns = 1000000000u;

/* ---- one segment */

static bool can_encode(const imp_job *job) { return job->type_k != IMP_TYPE_Q8_0 && job->type_v != IMP_TYPE_Q8_0; }

/* How many of the `left` tokens go into the next segment: even parts, whole chunks. */
static size_t piece(const imp_store *s, const imp_job *job, size_t left)
{
    size_t token_bytes = job->n_bytes / (job->n_tokens - job->start), chunk = s->opts.chunk_tokens;
    size_t most = s->opts.segment_tokens;
    uint64_t fit = imp_limit(s) / LIMIT_SHARE / token_bytes;
    if (fit < most) most = (size_t)fit;
    most = most < chunk ? chunk : most / chunk * chunk;
    size_t parts = (left + most - 1) / most, n = imp_round_up((left + parts - 1) / parts, chunk);
    return n < left ? n : left;
}

/* KV heads that the probe heads use, in the layer where these are the most. */
static uint32_t probe_heads(const imp_store *s, const imp_job *job)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < job->n_layers; i++) {
        uint32_t n_kv = job->layers[i].n_kv_heads, group = job->turns->n_heads[i] / n_kv, n = s->opts.n_probe_heads;
        if (!s->opts.probe_spread) n = n / group + (n % group != 0);
        if (n > n_kv) n = n_kv;
        if (n > most) most = n;
    }
    return most;
}

static int make_layout(imp_store *s, const imp_job *job, const imp_bases *bases, size_t first, size_t end,
                       imp_seg_layout **out)
{
    imp_seg_meta m = {
        .space = job->space,
        .before = imp_prefix_hash(job->space, job->tokens, first),
        .first_token = first,
        .n_tokens = (uint32_t)(end - first),
        .n_layers = job->n_layers,
        .type_k = job->type_k,
        .type_v = job->type_v,
        .rest = can_encode(job) ? s->opts.rest : IMP_REST_RAW,
        .order = s->opts.order,
        .chunk_tokens = s->opts.chunk_tokens,
        .alignment = imp_io_alignment(s->io),
        .derived = job->derived,
        .created_s = imp_uses_now(s),
        .layers = job->layers,
        .tokens = job->tokens + first,
        .paired = s->opts.keep & IMP_KEEP_PAIRED,
        .probe_heads = s->opts.keep & IMP_KEEP_PROBE ? probe_heads(s, job) : 0,
        .sealed = s->key != NULL,
    };
    if (m.order == IMP_ORDER_CORE) m.core_tokens = imp_order_core_tokens(m.n_tokens, m.chunk_tokens);
    if (bases) {
        m.basis = bases->id;
        m.sketch_bits = (uint32_t)(imp_sketch_token_bytes(bases->layers[0]) * 8 / job->layers[0].n_kv_heads);
    }
    memcpy(m.model_name, job->model_name, sizeof m.model_name);
    if (job->derived) snprintf(m.how, sizeof m.how, "computed over a partial or rounded load");
    do m.segment = imp_rng_u64(&s->rng);
    while (m.segment == 0 || imp_forest_seg(&s->forest, m.segment));
    return imp_seg_layout_new(&m, out);
}

/* Inside a change: what of the entry is stored, and below which node the rest would go. */
static int look(imp_store *s, const imp_job *job, size_t *known, uint64_t *last)
{
    size_t n_steps = 0;
    *known = 0;
    *last = 0;
    imp_tree *tree = imp_forest_tree(&s->forest, job->space);
    int rc = tree ? imp_steps(s, tree, job->tokens, job->n_tokens, !job->derived, &n_steps, known) : 0;
    if (rc == 0 && n_steps > 0) *last = s->steps[n_steps - 1].node->id;
    return rc;
}

static int reserve_in_change(imp_store *s, const imp_job *job, const imp_bases *bases, size_t *pos, size_t *end,
                             imp_seg_layout **layout, imp_evicted *evicted)
{
    size_t known;
    uint64_t last;
    int rc = look(s, job, &known, &last);
    if (rc < 0) return rc;
    if (known < *pos) {
        *end = 0;
        return 0;
    }
    bool moved = known > *pos;
    *pos = known;
    *end = *pos;
    if (*pos == job->n_tokens || (moved && job->n_tokens - *pos < s->opts.min_store_tokens)) return 0;
    *end = *pos + piece(s, job, job->n_tokens - *pos);
    rc = make_layout(s, job, bases, *pos, *end, layout);
    if (rc < 0) return rc;
    uint64_t bytes = imp_round_up(imp_seg_file_bytes(*layout), DU_UNIT);
    imp_cat_reservation r = {imp_seg_layout_meta(*layout)->segment, s->instance, bytes};
    rc = imp_edit_unreserve(s);
    if (rc == 0) {
        rc = imp_evict_for_entry(s, job->space, bytes, last, evicted);
        s->over_limit = rc == IMP_E_FULL;
    }
    if (rc == 0) rc = imp_cat_reserve(s->cat, &r);
    if (rc == 0) rc = imp_edit_uses(s);
    if (rc == 0) s->reserved = r.segment;
    return rc;
}

/* Make room for the next segment. `*layout` NULL: there is none; then *end == *pos if the rest is known by now, and 0
 * if the tokens before are gone. */
static int reserve(imp_store *s, const imp_job *job, const imp_bases *bases, size_t *pos, size_t *end,
                   imp_seg_layout **layout)
{
    *layout = NULL;
    int ready = imp_catalogue_log_ready(s);
    if (ready < 0) return ready;
    for (;;) {
        imp_evicted evicted = {0};
        s->over_limit = false;
        int rc = imp_change_begin(s);
        if (rc == 0) rc = imp_change_end(s, reserve_in_change(s, job, bases, pos, end, layout, &evicted));
        if (rc == 0) {
            imp_count_evicted(s, evicted);
            return 0;
        }
        imp_seg_layout_free(*layout);
        *layout = NULL;
        /* Where entries were to go there will be room for the ballast again; where not, it wouldn't help. */
        bool frees = rc == IMP_E_FULL && !s->over_limit && evicted.nodes > 0;
        if (!frees || !imp_ballast_give(s)) return rc;
    }
}

/* GONE: the tokens before it; ALONE: the bases of its sketches aren't there (any more). */
enum { ADDED, KNOWN, GONE, ALONE };

static int publish_in_change(imp_store *s, const imp_job *job, const imp_bases *bases, const imp_seg_layout *l,
                             int *outcome)
{
    const imp_seg_meta *m = imp_seg_layout_meta(l);
    size_t known, end = (size_t)m->first_token + m->n_tokens;
    uint64_t last, node;
    int rc = look(s, job, &known, &last);
    if (rc == 0) rc = imp_edit_unreserve(s);
    if (rc < 0) return rc;
    *outcome = known < m->first_token ? GONE : known >= end ? KNOWN : ADDED;
    if (*outcome == ADDED && bases && !imp_bases_present(s, m->space, bases)) *outcome = ALONE;
    if (*outcome != ADDED) return imp_change_doom(s, m->segment);

    imp_cat_space space = {m->space, m->model_name, m->created_s};
    imp_cat_segment seg = {m->segment, m->space, imp_round_up(imp_seg_file_bytes(l), DU_UNIT), m->n_tokens};
    imp_run run = {m->space, job->tokens, (size_t)m->first_token, end, m->segment, m->derived, m->created_s};
    if (!imp_forest_tree(&s->forest, m->space)) rc = imp_cat_put_space(s->cat, &space);
    if (rc == 0) rc = imp_forest_add_tree(&s->forest, &space);
    if (rc == 0) rc = imp_cat_put_segment(s->cat, &seg);
    if (rc == 0) rc = imp_forest_add_seg(&s->forest, &seg);
    if (rc == 0) rc = imp_edit_add(s, &run, &node);
    if (rc < 0) return rc;
    imp_segrow_note(imp_forest_seg(&s->forest, m->segment), l);
    return 0;
}

static int publish(imp_store *s, const imp_job *job, const imp_bases *bases, const imp_seg_layout *l, int *outcome)
{
    int rc = imp_change_begin(s);
    if (rc == 0) rc = imp_change_end(s, publish_in_change(s, job, bases, l, outcome));
    if (rc < 0) {
        char name[32], line[256];
        snprintf(line, sizeof line, "%s", imp_last_error());
        imp_seg_name(imp_seg_layout_meta(l)->segment, name);
        (void)imp_io_unlink(s->io, name);
        rc = imp_fail(rc, "%s", line);
    }
    return rc;
}

/* ---- one entry */

/* Are the rows below the entry's first one kept rounded? Then the entry was computed over rounded rows, whatever its
 * engine says; what can't be found out counts as rounded. */
static bool over_rounded(imp_store *s, const imp_job *job)
{
    for (;;) {
        uint64_t unseen = 0;
        size_t n_steps = 0, known;
        bool rounded = false;
        pthread_mutex_lock(&s->lock);
        imp_tree *tree = imp_forest_tree(&s->forest, job->space);
        int rc = tree ? imp_steps(s, tree, job->tokens, job->first_new, true, &n_steps, &known) : 0;
        for (size_t i = 0; rc == 0 && i < n_steps; i++) {
            const imp_segrow *row = imp_forest_seg(&s->forest, s->steps[i].node->segment);
            if (row && row->head.kv_bytes == 0) unseen = row->id;
            rounded = rounded || (row && row->head.rest != IMP_REST_RAW);
        }
        pthread_mutex_unlock(&s->lock);
        if (rc < 0 || rounded) return true;
        if (!unseen) return false;
        if (imp_segrow_see(s, unseen) < 0) return true;
    }
}

/* The first sample of a segment's history, and its ranking by the prefill. */
static void begin_history(imp_store *s, const imp_job *job, imp_seg_layout *l)
{
    const imp_seg_meta *m = imp_seg_layout_meta(l);
    const imp_seg seg = {.id = m->segment, .layout = l};
    size_t n_new = job->n_tokens - job->start, first = (size_t)m->first_token - job->start;
    imp_history *h;
    if (!job->scores || imp_history_get(s, &seg, &h) < 0) return;
    for (uint32_t i = 0; i < m->n_layers; i++) {
        const float *scores = job->scores + i * n_new + first;
        if (!job->scored[i]) continue;
        imp_history_add(h, i, 0, m->n_tokens, scores);
        imp_history_rank(h, IMP_RANK_PREFILL, i, 0, m->n_tokens, scores);
    }
    imp_history_settle(h);
    imp_history_put(s, h);
}

/* ---- entries without room */

static const uint64_t refused_ns = 60000000000u;

static void note_refused(imp_store *s, const imp_job *job, size_t position)
{
    imp_refused r = {imp_prefix_hash(job->space, job->tokens, position), position, job->n_tokens - position,
                     imp_now_ns() + refused_ns};
    pthread_mutex_lock(&s->lock);
    s->refused[s->next_refused++ % IMP_REFUSED_MAX] = r;
    pthread_mutex_unlock(&s->lock);
}

bool imp_was_refused(imp_store *s, imp_hash128 space, const int32_t *tokens, size_t position, size_t n_tokens)
{
    for (size_t i = 0; i < IMP_REFUSED_MAX; i++) {
        const imp_refused *r = &s->refused[i];
        if (r->until_ns == 0 || r->position != position || n_tokens < r->n_tokens || imp_now_ns() > r->until_ns) continue;
        if (imp_hash128_equal(r->before, imp_prefix_hash(space, tokens, position))) return true;
    }
    return false;
}

void imp_forget_refused(imp_store *s)
{
    pthread_mutex_lock(&s->lock);
    memset(s->refused, 0, sizeof s->refused);
    pthread_mutex_unlock(&s->lock);
}

/* ---- one entry, in full */

/* `*stored`: the tokens before it are stored afterwards. `*bases` may become others. */
static int store_by(imp_store *s, imp_job *job, const imp_bases **bases, size_t *stored, bool *any)
{
    size_t pos = job->start, end = 0;
    int tries = 0;
    *any = false;
    if (!job->derived) job->derived = over_rounded(s, job);
    for (*stored = pos; pos < job->n_tokens; *stored = pos) {
        imp_seg_layout *l;
        int outcome = GONE;
        int rc = reserve(s, job, *bases, &pos, &end, &l);
        if (rc == IMP_E_FULL && s->over_limit) note_refused(s, job, pos);
        if (rc < 0) return rc;
        if (!l && end > 0) break;
        if (l) {
            imp_job_score(s, job);
            rc = imp_pack_segment(s, job, l, *bases);
            if (rc == 0) rc = publish(s, job, *bases, l, &outcome);
            if (rc == 0 && outcome == ADDED) begin_history(s, job, l);
            imp_seg_layout_free(l);
            if (rc < 0) return rc;
        }
        if (outcome == GONE) return imp_fail(IMP_E_STALE, "%s: the tokens before a new entry are gone", s->dir);
        if (outcome == ALONE) { /* packed anew, by others, and at last without any */
            imp_bases_drop(s, *bases);
            *bases = ++tries < ALONE_TRIES ? imp_bases_for(s, job) : NULL;
            continue;
        }
        *any = *any || outcome == ADDED;
        pos = end;
    }
    return 0;
}

static int store_entry(imp_store *s, imp_job *job, size_t *stored, bool *any)
{
    pthread_mutex_lock(&s->lock);
    s->storing = &job->space; /* its bases stay */
    pthread_mutex_unlock(&s->lock);
    const imp_bases *bases = s->opts.keep & IMP_KEEP_SKETCH ? imp_bases_for(s, job) : NULL;
    int rc = store_by(s, job, &bases, stored, any);
    imp_bases_drop(s, bases);
    imp_space_stored(s, job->space);
    return rc;
}

static void finish(imp_store *s, const imp_job *job, int rc, size_t stored, bool any)
{
    char line[sizeof s->flush_line];
    if (rc == 0) {
        *(any ? &s->count.commits : &s->count.commits_known) += 1;
        if (any) {
            s->full_logged = false;
            imp_fault_over(s, IMP_FAULT_WRITE);
        }
        return;
    }
    s->count.commits_failed++;
    s->flush_status = rc;
    snprintf(line, sizeof line, "%zu of %zu tokens not stored: %s", job->n_tokens - stored, job->n_tokens - job->start,
             imp_last_error());
    memcpy(s->flush_line, line, sizeof line);
    if (!s->over_limit) imp_fault_note(s, IMP_FAULT_WRITE, rc);
    if (rc == IMP_E_FULL && s->full_logged) return;
    if (rc == IMP_E_FULL) s->full_logged = true;
    /* An eviction that was faster is no trouble. */
    imp_log(rc == IMP_E_STALE ? IMP_LOG_INFO : IMP_LOG_WARN, "%s: %s", s->dir, line);
}

/* ---- the thread */

/* What is done while no job waits. With `lock` held; lets go of it meanwhile, or waits for work. `*due_ns`: when the
 * histories that wait are written; 0: none do. */
static void idle(imp_store *s, uint64_t *due_ns)
{
    uint64_t now_ns = imp_now_ns(), wait_ns = UINT64_MAX, expiry_ns;
    size_t n_dirty = imp_histories_dirty(s);
    if (n_dirty == 0) *due_ns = 0;
    if (n_dirty > 0 && *due_ns == 0) *due_ns = now_ns + (n_dirty < DIRTY_MAX ? history_ns : history_least_ns);
    if (*due_ns != 0 && now_ns >= *due_ns) {
        pthread_mutex_unlock(&s->lock);
        imp_histories_write(s);
        pthread_mutex_lock(&s->lock);
        *due_ns = 0; /* what is left waits as long again */
        return;
    }
    if (imp_expiry_due(s, &expiry_ns)) {
        pthread_mutex_unlock(&s->lock);
        imp_expire(s);
        pthread_mutex_lock(&s->lock);
        return;
    }
    if (imp_reorder_due(s, &wait_ns)) {
        pthread_mutex_unlock(&s->lock);
        imp_reorder_step(s);
        pthread_mutex_lock(&s->lock);
        return;
    }
    if (expiry_ns < wait_ns) wait_ns = expiry_ns;
    uint64_t until_ns = wait_ns < UINT64_MAX - now_ns ? now_ns + wait_ns : UINT64_MAX;
    if (*due_ns != 0 && *due_ns < until_ns) until_ns = *due_ns;
    if (until_ns == UINT64_MAX) {
        pthread_cond_wait(&s->work, &s->lock);
    } else {
        struct timespec until = {(time_t)(until_ns / 1000000000u), (long)(until_ns % 1000000000u)};
        (void)pthread_cond_timedwait(&s->work, &s->lock, &until);
    }
}

static void *run(void *user)
{
    imp_store *s = user;
    uint64_t histories_due_ns = 0;
    /* Behind everybody else. Not SCHED_IDLE: this thread takes the store's mutex, and must come to let go of it. */
    (void)setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), NICE);
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->first_job && !s->stop) idle(s, &histories_due_ns);
        imp_job *job = s->first_job;
        if (!job) break;
        pthread_mutex_unlock(&s->lock);
        bool any;
        size_t stored;
        s->over_limit = false;
        int rc = store_entry(s, job, &stored, &any);
        if (rc == 0) {
            atomic_store_explicit(&s->may_ballast, true, memory_order_relaxed);
            imp_ballast_take(s);
        }
        if (rc == IMP_E_NOTFOUND) (void)imp_dir_folders(s); /* somebody has removed one: the next entry finds it */
        pthread_mutex_lock(&s->lock);
        finish(s, job, rc, stored, any);
        s->first_job = job->next;
        if (!s->first_job) s->last_job = NULL;
        s->backlog -= job->n_bytes + job->query_bytes;
        s->n_done = job->number;
        pthread_cond_broadcast(&s->done);
        imp_job_free(job);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

int imp_writer_start(imp_store *s)
{
    /* The program's signals stay with the program's own threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int err = pthread_create(&s->writer, NULL, run, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (err) return imp_fail_errno(err, "%s: can't start the writing thread", s->dir);
    s->writer_runs = true;
    return 0;
}

void imp_writer_stop(imp_store *s)
{
    if (!s->writer_runs) return;
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->writer, NULL);
    s->writer_runs = false;
}

int imp_store_flush(imp_store *s)
{
    if (!s) return imp_fail(IMP_E_ARG, "imp_store_flush: no store");
    pthread_mutex_lock(&s->lock);
    uint64_t until = s->n_queued;
    while (s->n_done < until) pthread_cond_wait(&s->done, &s->lock);
    pthread_mutex_unlock(&s->lock);
    imp_histories_write(s);
    pthread_mutex_lock(&s->lock);
    int rc = s->flush_status;
    if (rc < 0) imp_fail(rc, "%s", s->flush_line);
    s->flush_status = 0;
    pthread_mutex_unlock(&s->lock);
    return rc;
}
