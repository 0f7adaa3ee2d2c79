/* channel.h: what a load needs besides its lease, kept for the next one: a queue with its buffers, threads and scratch
 * to score. A store has a few idle ones. They are taken and given back under a lock, at the start and the end of a
 * load; between, a channel is its load's alone.
 */
#ifndef IMP_SESSION_CHANNEL_H
#define IMP_SESSION_CHANNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/pool.h"
#include "impress/impress.h"
#include "io/io.h"
#include "select/pages.h"
#include "select/select.h"
#include "session/ropes.h"
#include "tier/host.h"

typedef struct imp_channel imp_channel;
typedef struct imp_session imp_session;

struct imp_channel {
    imp_channel *next;       /* idle ones */
    imp_io_queue *queue;
    unsigned char *arena;
    size_t arena_bytes;
    imp_pool *pool;          /* made with the first load that uses it */
    imp_scorer *scorer;
    size_t max_tokens, max_rows; /* what the scorer is made for */
    uint32_t max_heads, max_head_dim;
    unsigned char *wide;     /* keys of a layer, widened */
    size_t wide_bytes;
    imp_chooser *chooser;
    size_t max_choose, max_pages;
};

/* The session of a store: idle channels and the host tier. Made at the first call, freed with the store. */
int imp_session_of(imp_store *store, imp_session **out);

/* The host tier, run by `policy`, until it is given back. There is one, with the policy of the last request: one that
 * asks for another policy starts it afresh, empty, and loads that still use the old one keep that to their end.
 * `*out` NULL: the store has no memory for one, or is in memory itself, or `policy` is IMP_CACHE_NONE. */
typedef struct imp_tier {
    imp_host *host;
    imp_cache policy;
    unsigned n_users;
    bool retired; /* freed with its last user */
} imp_tier;

int imp_tier_take(imp_session *session, imp_cache policy, imp_tier **out);
/* The same, only if it is there and of that policy: looking changes nothing. */
bool imp_tier_look(imp_session *session, imp_cache policy, imp_tier **out);
void imp_tier_give(imp_session *session, imp_tier *tier); /* NULL is allowed */

/* A channel with at least `arena_bytes` of buffers, nothing in flight. */
int imp_channel_take(imp_session *session, size_t arena_bytes, imp_channel **out);
void imp_channel_give(imp_session *session, imp_channel *channel);

/* Make sure that there is channel->pool. */
int imp_channel_pool(imp_channel *channel);

/* Make sure that channel->scorer can do so much. */
int imp_channel_scorer(imp_channel *channel, size_t tokens, size_t rows, uint32_t heads, uint32_t head_dim);
/* The same for channel->wide (which may lose what is in it) and channel->chooser. */
int imp_channel_wide(imp_channel *channel, size_t n_bytes);
int imp_channel_chooser(imp_channel *channel, size_t tokens, size_t pages);

/* What reads of the store cost: as the catalogue says it when the session is made, and as it is measured later. Where it
 * wasn't measured, a guess with measured_s 0. */
void imp_session_costs(imp_session *session, imp_read_costs *out);
void imp_session_set_costs(imp_session *session, const imp_read_costs *costs);

/* What loads of one identification took so far, as moving averages; n 0: there were none. */
typedef struct imp_habits {
    uint32_t n;
    double share;      /* of the prefix's bytes, over the retention */
    double held;       /* of these, from the tiers */
    double read_bytes; /* of one read; 0: nothing was read */
    double kept;       /* of the tokens, with opts.mass; 0: there were none */
} imp_habits;

void imp_session_habits(imp_session *session, imp_identify identify, imp_habits *out);
/* One load more: its share, what of it was held, and its reads. */
void imp_session_learn(imp_session *session, imp_identify identify, double share, double held, uint64_t n_reads,
                       uint64_t n_bytes);

/* With opts.mass, how much of the attention was lost for what was foreseen to be: a moving average of the quotient; 1
 * before there were any. `kept`: the share of the tokens that it took. */
double imp_session_sharpness(imp_session *session, imp_identify identify);
void imp_session_sharpness_learn(imp_session *session, imp_identify identify, double times, double kept);

/* How many times as long as the costs say reads took in loads that mostly waited for them, a moving average; 1 before
 * there were any. */
double imp_session_pace(imp_session *session);
void imp_session_pace_learn(imp_session *session, double times);

/* Tables that the store's loads share. */
imp_ropes *imp_session_ropes(imp_session *session);

#endif
