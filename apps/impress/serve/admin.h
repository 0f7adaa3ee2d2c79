/* admin.h: what the operator may ask of a running server, below /admin/: JSON in and out, errors in OpenAI's shape.
 *
 *     GET  /admin/stats                     the store and its tiers
 *     GET  /admin/prefixes                  the tree: sizes and uses of its nodes, never a token
 *     GET  /admin/prefixes/N/importance     how important requests found the tokens of node N
 *     POST /admin/warm                      compute and store a prompt: a body as of /v1/completions or
 *                                           /v1/chat/completions, with `tenant` and `pin` besides
 *     POST /admin/warm/text                 the same of a text, which is the whole body
 *     POST /admin/pin, unpin, drop          {"node": N} or {"nodes": [N, ...]}; drop: {"all": true}, too
 *     POST /admin/reorder, /admin/gc        now */
#ifndef SERVE_ADMIN_H
#define SERVE_ADMIN_H

#include "http.h"

/* Handles all paths below /admin/. `user`: the api. */
void admin_handle(void *user, http_request *r, http_reply *out);

#endif
