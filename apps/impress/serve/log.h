/* log.h: the server's log, one JSON object a line on standard error. No prompt, answer or key ever goes into it. */
#ifndef SERVE_LOG_H
#define SERVE_LOG_H

#include <jansson.h>

/* Write {"time": ..., "level": level, "event": event, ...fields}; `fields` is an object that is given away, or NULL.
 * Threads: any. */
void log_event(const char *level, const char *event, json_t *fields);

/* From now on the library's and llama.cpp's lines come as events "library" and "llama": warnings and errors, with
 * `verbose` all. */
void log_take_over(int verbose);

#endif
