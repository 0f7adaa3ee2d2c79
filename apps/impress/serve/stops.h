/* stops.h: which bytes of an answer may go out. What could still become a stop string, or is a part of a character,
 * waits. Pure. */
#ifndef SERVE_STOPS_H
#define SERVE_STOPS_H

#include <stdbool.h>
#include <stddef.h>

typedef struct stop_gate {
    const char *const *stops; /* [n_stops], none empty; the caller's, must stay */
    size_t n_stops;
    char *held;    /* [n_held]: came in, and didn't go out before the last call */
    size_t n_held, room;
    size_t n_free; /* of these, from the start: they may go out now */
    size_t n_released; /* bytes that went out so far, these among them */
    bool stopped;  /* a stop string came: nothing goes out any more */
} stop_gate;

/* Take in `n` bytes (with `end`: the last ones), and set n_free anew: read them before the next call, which drops them.
 * Returns false where memory ran out. */
bool stop_gate_add(stop_gate *g, const char *bytes, size_t n, bool end);
void stop_gate_free(stop_gate *g);

#endif
