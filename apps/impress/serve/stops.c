#include "stops.h"

#include <stdlib.h>
#include <string.h>

#include "oai_reply.h"

/* The first place where a stop string begins; n_held: none. */
static size_t find_stop(const stop_gate *g)
{
    size_t first = g->n_held;
    for (size_t s = 0; s < g->n_stops; s++) {
        size_t n = strlen(g->stops[s]);
        const char *at = memmem(g->held, g->n_held, g->stops[s], n);
        if (at && (size_t)(at - g->held) < first) first = (size_t)(at - g->held);
    }
    return first;
}

/* The first place from which the rest is the beginning of a stop string; n_held: none. */
static size_t find_beginning(const stop_gate *g)
{
    size_t first = g->n_held;
    for (size_t s = 0; s < g->n_stops; s++) {
        size_t n = strlen(g->stops[s]) - 1; /* whole ones were looked for before */
        size_t from = g->n_held > n ? g->n_held - n : 0;
        for (size_t i = from; i < first; i++) {
            if (!memcmp(g->held + i, g->stops[s], g->n_held - i)) {
                first = i;
                break;
            }
        }
    }
    return first;
}

bool stop_gate_add(stop_gate *g, const char *bytes, size_t n, bool end)
{
    g->n_held -= g->n_free;
    if (g->n_free) memmove(g->held, g->held + g->n_free, g->n_held);
    g->n_free = 0;
    if (g->stopped) return true;
    if (g->n_held + n > g->room) {
        size_t room = 2 * (g->n_held + n) + 64;
        char *held = realloc(g->held, room);
        if (!held) return false;
        g->held = held;
        g->room = room;
    }
    if (n) memcpy(g->held + g->n_held, bytes, n);
    g->n_held += n;
    if (g->n_held == 0) return true;

    size_t at = find_stop(g);
    g->stopped = at < g->n_held;
    if (!g->stopped && !end) {
        at = find_beginning(g);
        at = oai_utf8_whole(g->held, at);
    }
    g->n_free = at;
    g->n_released += at;
    return true;
}

void stop_gate_free(stop_gate *g)
{
    free(g->held);
    *g = (stop_gate){0};
}
