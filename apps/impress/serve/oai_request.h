/* oai_request.h: bodies of POST /v1/chat/completions and /v1/completions, parsed and checked.
 *
 * What a client sent is either done or refused: a field that this server doesn't know, or a value that it can't honour,
 * is an error that names the field. Only fields that clients are known to send and that don't concern the answer
 * (metadata, store, service_tier, ...) are passed over. A field that is null is one that isn't there.
 *
 * Nothing here knows of models or sockets. All texts are UTF-8 without NUL bytes. Time and memory are linear in the
 * length of the body. Threads: any. */
#ifndef OAI_REQUEST_H
#define OAI_REQUEST_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* An error as OpenAI's clients want it. `type` and `code` are static texts; `code` NULL and `param` "" are null in the
 * reply. oai_write_error() (oai_reply.h) writes the body. */
typedef struct oai_error {
    int status; /* of HTTP; 0: no error */
    const char *type, *code;
    char param[96];
    char message[400];
} oai_error;

/* Fill an error; the type follows from the status (401: authentication_error, 403: permission_error, 429:
 * rate_limit_error, 5xx: server_error, others: invalid_request_error). `param` NULL: none. The texts are cut to their
 * room, bytes that aren't UTF-8 become '?', and control characters blanks. Returns -1. */
int oai_fail(oai_error *e, int status, const char *code, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));

typedef enum oai_role { OAI_SYSTEM, OAI_USER, OAI_ASSISTANT, OAI_TOOL } oai_role;
extern const char *const oai_role_names[]; /* [oai_role], as a client writes them. `developer` counts as system */

typedef struct oai_tool_call {
    const char *id, *name, *arguments; /* arguments: JSON text, an object */
} oai_tool_call;

typedef struct oai_message {
    oai_role role;
    const char *content;      /* parts joined by a newline; NULL: an assistant's message that is tool calls alone */
    const char *reasoning;    /* `reasoning_content` of an assistant's message; NULL: none */
    const char *name;         /* NULL: none */
    const char *tool_call_id; /* of a tool's message */
    oai_tool_call *tool_calls;
    size_t n_tool_calls;
} oai_message;

typedef struct oai_tool {
    const char *name, *description; /* description "": none */
    const char *parameters;         /* JSON text of a schema */
    bool strict;                    /* to be kept to the letter */
} oai_tool;

typedef enum oai_tool_choice { OAI_TOOLS_AUTO, OAI_TOOLS_NONE, OAI_TOOLS_REQUIRED } oai_tool_choice;
typedef enum oai_format { OAI_TEXT, OAI_JSON_OBJECT, OAI_JSON_SCHEMA, OAI_GRAMMAR } oai_format;

typedef struct oai_bias {
    int32_t token;
    float bias; /* -100..100; -100 and less: never that token */
} oai_bias;

typedef struct oai_sampling {
    double temperature, top_p, min_p; /* temperature 0: greedy; top_p 1 and min_p 0: off */
    int32_t top_k;                    /* 0: off */
    double presence_penalty, frequency_penalty, repeat_penalty; /* 0, 0, 1: off */
    bool has_seed;
    uint32_t seed;
    oai_bias *bias; /* [n_bias], no token twice */
    size_t n_bias;
} oai_sampling;

/* The request's own object `impress`. A field that wasn't sent is NULL, or 0 for retention. */
typedef struct oai_impress {
    double retention;   /* (0, 1] */
    const char *auto_retention; /* `retention` as a text, which the server reads: "auto", "auto:0.95" */
    const char *system; /* any text: what systems there are, the server knows */
    bool full_load;
    bool cache_off;     /* `cache`: "off". Neither looked up nor stored */
    const char *salt;   /* joins the salt of the client's key */
} oai_impress;

/* Tells a template more: `chat_template_kwargs`. */
typedef struct oai_kwarg {
    const char *name, *value; /* value: JSON text */
} oai_kwarg;

typedef struct oai_request {
    bool chat;         /* which endpoint */
    const char *model; /* NULL: not named */
    const char *user;  /* NULL: none */

    oai_message *messages; /* chat only, n_messages > 0 */
    size_t n_messages;
    const char *prompt;     /* completions: a text, or, where it is NULL, */
    int32_t *prompt_tokens; /* tokens, all in [0, n_vocab) */
    size_t n_prompt_tokens;

    int64_t max_tokens; /* > 0; -1: not said */
    oai_sampling sampling;
    const char **stops; /* [n_stops], none empty */
    size_t n_stops;
    int n_logprobs; /* -1: none; else the chosen token's and that many of the likeliest (0..20) */
    bool stream, include_usage;

    oai_format format;
    const char *schema;  /* OAI_JSON_SCHEMA: JSON text */
    bool strict;         /* what of it can't be kept is refused; else the rest of it is kept */
    const char *grammar; /* OAI_GRAMMAR: GBNF */
    oai_tool *tools;     /* chat only; with a named tool choice only that tool, and OAI_TOOLS_REQUIRED */
    size_t n_tools;
    oai_tool_choice tool_choice; /* OAI_TOOLS_NONE where there are no tools */
    bool parallel_tool_calls;
    oai_kwarg *kwargs;
    size_t n_kwargs;

    oai_impress impress;

    json_t *root; /* the texts above lie in here */
    char **owned; /* or in here */
    size_t n_owned, owned_room;
} oai_request;

/* What the server sets. oai_limits_default() fills it; sampling holds what a request gets that doesn't say. */
typedef struct oai_limits {
    size_t max_body_bytes; /* 16 MiB. The HTTP side ends a longer body sooner; this is the second line */
    size_t max_messages;   /* 4096 */
    size_t max_tools;      /* 128 */
    int32_t n_vocab;       /* 0: token ids are checked for being 0 or more only */
    oai_sampling sampling; /* OpenAI's: temperature 1, all else off */
} oai_limits;

oai_limits oai_limits_default(void);

/* Parse a body. Returns 0, or -1 with `*e` filled and `*out` empty (no oai_request_free() needed then, and harmless).
 * Everything but "is that model served here" and "are there such systems" is checked. */
int oai_request_parse(bool chat, const char *body, size_t n_bytes, const oai_limits *limits, oai_request *out,
                      oai_error *e);
void oai_request_free(oai_request *r);

#endif
