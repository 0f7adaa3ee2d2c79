/* oai_reply.h: replies in OpenAI's shapes, written into a growing buffer: JSON bodies, and server-sent events.
 *
 * Texts may hold any bytes: what isn't UTF-8 becomes U+FFFD. So a stream must not cut a character in two;
 * oai_utf8_whole() says how much may go. Pure; a buffer is used by one thread at a time. */
#ifndef OAI_REPLY_H
#define OAI_REPLY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "oai_request.h"

/* Bytes to be sent. Zero it to begin; oai_buffer_free() releases it. `failed`: memory ran out, and the content is of no
 * use; once set nothing more is added, so that it need only be looked at in the end. */
typedef struct oai_buffer {
    char *data; /* [n], followed by a NUL that isn't counted; NULL while empty */
    size_t n, room;
    bool failed;
} oai_buffer;

void oai_buffer_add(oai_buffer *b, const void *bytes, size_t n);
void oai_buffer_clear(oai_buffer *b); /* empty again, memory kept, not failed */
void oai_buffer_free(oai_buffer *b);

/* Length of the longest start of s[n] that doesn't end inside a UTF-8 character. Bytes that can't become one, whatever
 * follows, count as whole. */
size_t oai_utf8_whole(const char *s, size_t n);

/* What all replies to a request have in common. */
typedef struct oai_head {
    bool chat;
    const char *id;       /* "chatcmpl-...", "cmpl-..." */
    int64_t created;      /* Unix seconds */
    const char *model;
    bool include_usage;   /* of the stream: every chunk but the last has a usage of null */
} oai_head;

/* One token's log-probability with the likeliest others. */
typedef struct oai_top {
    const char *bytes;
    size_t n_bytes;
    double logprob; /* -INFINITY is written as -9999 as OpenAI does */
} oai_top;

typedef struct oai_logprob {
    const char *bytes; /* the token's text, perhaps a part of a character */
    size_t n_bytes;
    double logprob;
    const oai_top *top; /* [n_top], likeliest first */
    size_t n_top;
    size_t offset;      /* completions: where the token begins in prompt and answer, in characters */
} oai_logprob;

typedef enum oai_finish { OAI_RUNNING, OAI_STOP, OAI_LENGTH, OAI_TOOL_CALLS } oai_finish; /* OAI_RUNNING: null */

typedef struct oai_usage {
    size_t prompt_tokens, cached_tokens, completion_tokens;
} oai_usage;

/* The reply's own object `impress`. */
typedef struct oai_report {
    const char *way;    /* how the prefix came to be: "load", "recompute", "live", ... */
    const char *reason; /* why that way. NULL: left out */
    const char *system; /* NULL: left out */
    double retention;   /* 0: left out */
    size_t live_tokens; /* prefix tokens whose cells were still there, */
    size_t loaded_tokens;   /* loaded from the store (all tiers), */
    size_t computed_tokens; /* and tokens of the prompt that were computed */
    uint64_t bytes_read;
    uint64_t queue_ns, identify_ns, load_ns, compute_ns, ttft_ns; /* parts of the time to the first token, and it */
    const char *request_id;                                        /* NULL: left out */
} oai_report;

/* A step of an answer: text, reasoning, or a tool call's beginning (id and name set) or continuation (both NULL). Of
 * the same type are what a whole answer is made of: one text, one reasoning, and each tool call in one piece. */
typedef enum oai_piece_kind { OAI_PIECE_TEXT, OAI_PIECE_REASONING, OAI_PIECE_TOOL_CALL } oai_piece_kind;
typedef struct oai_piece {
    oai_piece_kind kind;
    const char *text; /* of a tool call: its arguments */
    size_t n_bytes;
    size_t index; /* of the tool call, from 0 */
    const char *id, *name;
} oai_piece;

/* The whole reply, not streamed. `logprobs` NULL: null, as if none were asked for. `report` may be NULL. A text
 * completion has one text piece, or none. */
void oai_write_reply(oai_buffer *b, const oai_head *h, const oai_piece *pieces, size_t n_pieces,
                     const oai_logprob *logprobs, size_t n_logprobs, oai_finish finish, const oai_usage *usage,
                     const oai_report *report);

/* Streamed replies: complete events ("data: {...}\n\n").
 * In order: oai_stream_begin() (chat's chunk with the role; nothing for completions), oai_stream_pieces() any number of
 * times, oai_stream_end(), which writes the chunk with the reason, with include_usage that with the usage, and the done
 * mark. A stream that fails midway gets oai_stream_error() in place of the end. */
void oai_stream_begin(oai_buffer *b, const oai_head *h);
/* A chunk for each piece. The log-probabilities go with the first; with no pieces (say, a token that is held back for a
 * stop string) and some log-probabilities there is a chunk of its own with an empty text. */
void oai_stream_pieces(oai_buffer *b, const oai_head *h, const oai_piece *pieces, size_t n_pieces,
                       const oai_logprob *logprobs, size_t n_logprobs);
/* The report goes into the last chunk before the done mark: that with the usage, else that with the finish reason. */
void oai_stream_end(oai_buffer *b, const oai_head *h, oai_finish finish, const oai_usage *usage,
                    const oai_report *report);
void oai_stream_error(oai_buffer *b, const oai_error *e);
/* A comment line, which clients pass over: keeps a connection alive while a request waits. */
void oai_stream_comment(oai_buffer *b);

/* {"error": {...}} */
void oai_write_error(oai_buffer *b, const oai_error *e);

typedef struct oai_model {
    const char *id;
    int64_t created;
    size_t context; /* tokens; `max_model_len`, 0: left out */
} oai_model;
void oai_write_models(oai_buffer *b, const oai_model *models, size_t n);
void oai_write_model(oai_buffer *b, const oai_model *model);

/* "chatcmpl-" or "cmpl-" and 24 hexadecimal digits of `random`[12]. */
void oai_make_id(bool chat, const uint8_t random[12], char id[40]);

#endif
