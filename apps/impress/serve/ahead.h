/* ahead.h: reads what the store has of waiting requests' prompts into the host tier, on a thread of its own, so
 * that it is there when their turn comes. */
#ifndef SERVE_AHEAD_H
#define SERVE_AHEAD_H

#include "job.h"

typedef struct ahead ahead;

/* `n_layers` of the model. What was read ahead and not yet taken is at most `budget` bytes: more would push itself
 * out of the tier. NULL: no memory, or no thread. */
ahead *ahead_open(uint32_t n_layers, uint64_t budget);
void ahead_close(ahead *a); /* what waits is forgotten; NULL is allowed */

/* Read ahead for a job whose space is open. Returns at once; with a long queue nothing is done. */
void ahead_put(ahead *a, job *j);
/* The job has a slot, or is gone: what was read for it counts no longer. True if something was. */
bool ahead_take(ahead *a, job *j);

#endif
