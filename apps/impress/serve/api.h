/* api.h: what the server answers: OpenAI's endpoints, health, and metrics. */
#ifndef SERVE_API_H
#define SERVE_API_H

#include "engine.h"
#include "http.h"
#include "switches.h"

typedef struct api {
    engine *engine;
    const chat_template *template;
    const struct llama_vocab *vocab;
    imp_store *store;          /* NULL: none */
    uint64_t host_limit, device_limit; /* bytes of its tiers */
    const key_ring *keys;      /* of clients; the tenants that the admin may name */
    oai_limits limits;
    oai_model model;           /* its id is what requests may name */
    size_t n_ctx;              /* tokens of one request, prompt and answer */
    const switch_settings *switches; /* given by options: part of every system that a request names */
    app_system system;         /* of requests that name none */
    double retention;          /* of requests that say nothing else, where a system chooses */
    size_t whole_below;        /* tokens; min_partial of requests that name no retention */
    bool derived;              /* what was computed over a load in part is stored, for requests that load in part */
    bool adaptive;             /* imp_llama_request */
} api;

/* A job of a request, for the engine; `system`: what it uses. NULL with *e. */
job *api_make_job(const api *a, const http_request *r, const oai_request *q, app_system *system, oai_error *e);

extern const http_route api_routes[];
size_t api_n_routes(void); /* their `user` is the api */

#endif
