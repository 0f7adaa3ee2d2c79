/* api.h: what the server answers: OpenAI's endpoints, health, and metrics. */
#ifndef SERVE_API_H
#define SERVE_API_H

#include "engine.h"
#include "http.h"

typedef struct api {
    engine *engine;
    const chat_template *template;
    const struct llama_vocab *vocab;
    imp_store *store;          /* NULL: none */
    oai_limits limits;
    oai_model model;           /* its id is what requests may name */
    size_t n_ctx;              /* tokens of one request, prompt and answer */
    const char *system;        /* of requests that say nothing else */
    imp_llama_request request; /* the same */
    double retention;          /* of requests that name a system that selects, and no share */
} api;

extern const http_route api_routes[];
size_t api_n_routes(void); /* their `user` is the api */

/* How a system is asked for. Returns 0, or -1 after imp_last_error() was set: no such system. */
int api_system(const char *name, double retention, imp_llama_request *out);

#endif
