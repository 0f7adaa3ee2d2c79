/* llama.h: llama.cpp with a prefix cache. The calls mirror those of llama.cpp's own llama.h over *virtual sequences*,
 * so that a program written for it becomes prefix-aware by a few changed names:
 *
 *     llama_init_from_model(model, cp)        imp_llama_init(model, cp, &params, &ctx)
 *     llama_decode(ctx, batch)                imp_llama_decode(ctx, batch)
 *     llama_get_logits_ith(ctx, i)            imp_llama_get_logits_ith(ctx, i)
 *     llama_sampler_sample(smpl, ctx, i)      imp_llama_sampler_sample(smpl, ctx, i)
 *     llama_memory_seq_rm(mem, s, p0, p1)     imp_llama_seq_rm(ctx, s, p0, p1)      ... and so on
 *
 * What happens inside (docs/llama.md). Tokens of a sequence that the store holds are only noted when they are decoded.
 * At the first token that must really be computed (the store hasn't got it, or its logits are asked for) the noted
 * prefix is loaded: k cells are placed at the positions just below the query without computing anything, and before
 * each layer's attention runs the rows that matter for the query are written into them (compact cells). Keys are stored
 * after RoPE, so a token's rows work in any cell. New tokens' rows are copied out of the cells and stored behind the
 * answer.
 *
 * The hook is found by structure in the graph (SET_ROWS into a cache tensor, then FLASH_ATTN_EXT over views of it), and
 * tried out when a context is opened. Models that don't fit (sliding window, recurrent, hybrid, ALiBi, MLA, M-RoPE,
 * layers that share KV, encoders, diffusion) and contexts that don't (embeddings or pooling, no flash attention, a
 * cache that isn't f16, bf16 or q8_0, attention that isn't causal, less than 32 tokens) run as plain llama.cpp:
 * imp_llama_get_fit() says why, in one line, and nothing is stored.
 *
 * A sequence to which something is done that the store can't follow is llama.cpp's alone from then on, neither stored
 * nor loaded, until it is empty: a hole in its middle, a shift, a state that was set, embeddings, a copy that isn't
 * from position 0 on into an empty sequence. What is noted or partly loaded of it is brought into cells whole first:
 * what is stored is loaded, and all that follows is computed again, which takes as long as that. Where this fails
 * nothing is done (false, 0; a copy leaves `dst` without the tokens), and the sequence is noted.
 *
 * Threads: one thread at a time per imp_llama.
 *
 * Errors: as in impress.h; the mirrors return what llama.cpp's do. Pointers may be NULL only where that is said.
 *
 * Versions: as in impress.h. imp_llama_params and imp_llama_request grow at their end; what is within them has a size
 * of its own, and room to grow in, so that nothing behind it moves. llama.cpp's own structs promise nothing of that
 * kind: the program, this library and llama.cpp must be compiled with the same llama.h.
 */
#ifndef IMPRESS_LLAMA_H
#define IMPRESS_LLAMA_H

#include <stdbool.h>

#include <llama.h>

#include "impress/impress.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct imp_llama imp_llama;

/* How a request uses the store. */
typedef struct imp_llama_request {
    size_t struct_bytes;     /* set by imp_llama_request_init() */
    bool recompute;          /* use nothing that is stored (system `recomp`) */
    bool store_new;          /* store what is computed over exact KV */
    bool store_derived;      /* and what isn't, or goes on from rows kept rounded (imp_rest), marked as derived */
    bool use_derived;        /* derived entries will do */
    bool adaptive;           /* load in part only where that looks quickest, else whole, and compute what is stored
                                where that looks quicker than loading it (docs/llama.md). Goes by what passes of this
                                context and loads of its store took; until one was timed, as without it */
    size_t max_match;        /* at most so many tokens from the start are taken from the store; 0: no bound */
    size_t min_partial;      /* a prefix of fewer tokens is loaded whole, whatever the retention; 0: 64 */
    union {
        imp_load_opts load;  /* as imp_load_opts_init() leaves it, with imp_system_preset(); retention below 1 takes an
                                identification */
        unsigned char load_room[256];
    };
} imp_llama_request;

typedef struct imp_llama_params {
    size_t struct_bytes;               /* set by imp_llama_params_init() */
    imp_store *store;                  /* NULL: plain llama.cpp. Must outlive the context */
    const char *const *model_files;    /* the GGUF files of `model`, [n_model_files]: their bytes name the space. They
                                          are read in imp_llama_init(): a program must see to it that they weren't
                                          replaced since the model was loaded from them (stat before, compare after) */
    size_t n_model_files;
    const char *salt;                  /* tenant; NULL: "" */
    union {
        imp_llama_request request;     /* of every sequence, until imp_llama_set_request() */
        unsigned char request_room[512];
    };
    uint32_t min_query_tokens;         /* tokens that are computed at least under a partial load; 0: 16 */
    bool widen_query;                  /* compute the last tokens of the prefix anew, up to 64 with the query, where
                                          that looks quicker: on a CPU attention is slow, and adds up in half precision,
                                          for fewer tokens than that at once */
} imp_llama_params;

/* Fill in the defaults for a caller whose struct has so many bytes, but for what is within it. */
void imp_llama_request_fill(imp_llama_request *request, size_t struct_bytes);
void imp_llama_params_fill(imp_llama_params *params, size_t struct_bytes);

/* All of the defaults: everything is loaded, what is new is stored. */
static inline void imp_llama_request_init(imp_llama_request *request)
{
    imp_llama_request_fill(request, sizeof *request);
    imp_load_opts_init(&request->load);
}

static inline void imp_llama_params_init(imp_llama_params *params)
{
    imp_llama_params_fill(params, sizeof *params);
    imp_llama_request_init(&params->request);
}

/* Make a context. `cp` as for llama_init_from_model(); flash attention is switched on where it is left to `auto`, and
 * cp.cb_eval must be NULL. Runs a self-check of some 30 tokens; if it fails the context works without loading parts, or
 * without the store, and says so in one line of the log.
 * Returns 0, or with `*out` = NULL: IMP_E_ARG (a request out of range, no model_files beside a store, cb_eval in use),
 * IMP_E_UNSUPPORTED (llama.cpp makes no such context), IMP_E_NOMEM, and what imp_store_fingerprint() and
 * imp_space_open() return.
 * `model`, and adapters that are set, must outlive the context; what else `params` points to is read here or copied.
 * Owner: the caller, until imp_llama_free(), which also hands over what is unsaved: what the store then refuses
 * (IMP_E_BUSY, IMP_E_FULL) is lost, so imp_llama_flush() before tells. NULL may be freed. */
int imp_llama_init(struct llama_model *model, struct llama_context_params cp, const imp_llama_params *params,
                   imp_llama **out);
void imp_llama_free(imp_llama *ctx);

/* The context underneath, for calls that touch neither its memory nor what is computed (adapters, control vectors,
 * causal attention): the store wouldn't know of it. Nor for outputs, which aren't always there: they are taken by
 * imp_llama_get_logits_ith(). */
struct llama_context *imp_llama_context(imp_llama *ctx);

typedef enum imp_llama_fit {
    IMP_LLAMA_FIT_NONE = 0,  /* the store is not used */
    IMP_LLAMA_FIT_WHOLE = 1, /* prefixes are loaded whole, never in part */
    IMP_LLAMA_FIT_FULL = 2   /* everything works */
} imp_llama_fit;

/* How far this model and context fit; `*why` (may be NULL): one line, "" for FULL. Lives as long as the context. */
imp_llama_fit imp_llama_get_fit(const imp_llama *ctx, const char **why);

/* How sequence `seq` uses the store from now on (copied). IMP_E_ARG: no such sequence; a retention or identification
 * out of range. A request whose load the store refuses for another option is computed. */
int imp_llama_set_request(imp_llama *ctx, llama_seq_id seq, const imp_llama_request *request);

/* Tenants: sequence `seq` keeps apart from those of other salts from now on; NULL: the salt of the context's
 * parameters. It must be empty, unless nothing changes (IMP_E_ARG). Copying it to or from a sequence of another salt is
 * the caller's to avoid. On failure nothing changes. */
int imp_llama_set_salt(imp_llama *ctx, llama_seq_id seq, const char *salt);

/* The space that sequences of `salt` (NULL: the context's) use with the adapters in force, for calls that look at the
 * store beside this context: what is stored, reading ahead. IMP_E_UNSUPPORTED where the store isn't used.
 * Owner: the caller, until imp_space_close(). Threads: the handle any, this call as the others. */
int imp_llama_open_space(imp_llama *ctx, const char *salt, imp_space **out);

/* What will be done otherwise than `request` says in this model, as one line: "" if nothing. Valid until the next call
 * on this context. */
const char *imp_llama_note(imp_llama *ctx, const imp_llama_request *request);

/* Go on with another store, which must outlive the context, in place of the one it was opened with. All sequences must
 * be empty (IMP_E_ARG); IMP_E_UNSUPPORTED where the store isn't used. On failure nothing changes. */
int imp_llama_set_store(imp_llama *ctx, imp_store *store);

/* The rows that the store keeps of this context: sets the types, and the shapes of the first `max` layers. Returns how
 * many layers there are, 0 where the store isn't used. */
uint32_t imp_llama_get_shape(const imp_llama *ctx, imp_type *type_k, imp_type *type_v, imp_layer_shape *layers,
                             uint32_t max);

/* Queries of one layer that go into the store with the prompt that sequence `seq` just took: those of up to 64 of its
 * last tokens, the first of them at position *first. IMP_E_NOTFOUND: there are none, as the prompt wasn't computed over
 * exact KV, isn't to be stored, or is stored already. Valid until the next call on this context. */
int imp_llama_get_queries(imp_llama *ctx, llama_seq_id seq, uint32_t layer, size_t *first, imp_query *out);

/* ---- mirrors of llama.h */

/* As llama_decode(): 0, 1 (no slot), 2 (aborted), negative (error); on anything but 0 the batch left no trace (where
 * the store isn't used, as much as llama_decode() leaves). A failed read never shows here: the pass is run again with
 * less from the store, or with nothing. Each token must belong to one sequence. Ask for the output of a prompt's last
 * token only: what has an output is always computed, and what comes after it in the same batch too. */
int32_t imp_llama_decode(imp_llama *ctx, struct llama_batch batch);

/* Output of the batch's token i (negative: from the end), of the last imp_llama_decode(). NULL if it had no output.
 * Valid until the next call on this context. */
float *imp_llama_get_logits_ith(imp_llama *ctx, int32_t i);
llama_token imp_llama_sampler_sample(struct llama_sampler *smpl, imp_llama *ctx, int32_t i);

bool imp_llama_seq_rm(imp_llama *ctx, llama_seq_id seq, llama_pos p0, llama_pos p1);
/* Where each sequence has cells of its own (kv_unified is false) the copy replaces what `dst` held and takes the time of
 * copying its rows; unlike llama.cpp's it may be of any part. */
void imp_llama_seq_cp(imp_llama *ctx, llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1);
void imp_llama_seq_keep(imp_llama *ctx, llama_seq_id seq);
void imp_llama_seq_add(imp_llama *ctx, llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos delta);
llama_pos imp_llama_seq_pos_min(imp_llama *ctx, llama_seq_id seq);
llama_pos imp_llama_seq_pos_max(imp_llama *ctx, llama_seq_id seq);
void imp_llama_clear(imp_llama *ctx);

/* State of one sequence as llama_state_seq_*(). */
size_t imp_llama_state_seq_get_size(imp_llama *ctx, llama_seq_id seq);
size_t imp_llama_state_seq_get_data(imp_llama *ctx, uint8_t *dst, size_t size, llama_seq_id seq);
size_t imp_llama_state_seq_set_data(imp_llama *ctx, const uint8_t *src, size_t size, llama_seq_id seq);

/* As llama_set_adapters_lora(); files[i] holds the bytes of adapters[i], which name the space. All sequences must be
 * empty (IMP_E_ARG). */
int imp_llama_set_adapters_lora(imp_llama *ctx, struct llama_adapter_lora **adapters, size_t n_adapters, float *scales,
                                const char *const *files);

/* ---- beyond llama.h */

/* Copy everything unsaved out of the cells and hand it to the store now. (It is also done by and by during generation,
 * and before cells are given up.) imp_store_flush() then waits for the disk. Returns 0, or what the first commit that
 * failed returned. */
int imp_llama_flush(imp_llama *ctx);

/* As imp_llama_flush(), of one sequence. (Another's prompt that is computed in slices would be stored in parts: where
 * the last of them is short, it is left out.) IMP_E_ARG: there is no such sequence. */
int imp_llama_flush_seq(imp_llama *ctx, llama_seq_id seq);

/* Rank the tokens of a stored prefix without any question, for IMP_RANK_RECONSTRUCTION: it is loaded whole into the
 * empty sequence `seq`, the model repeats it, a chunk after the other, and each token's largest attention is kept
 * (KVzip, arXiv 2505.23416). Takes about as long as computing the prefix, so it is for an idle engine; stores no KV,
 * and leaves the sequence empty. If less than `n` tokens are stored, those are ranked. Returns 0 or: IMP_E_NOTFOUND
 * less than 16 are stored; IMP_E_FULL the context has no room for the prefix and 64 tokens more; IMP_E_BUSY aborted;
 * IMP_E_UNSUPPORTED this model's prefixes can't be loaded in part; IMP_E_NOMEM; IMP_E_ARG; and what imp_load_select()
 * returns. */
int imp_llama_rank_prefix(imp_llama *ctx, llama_seq_id seq, const int32_t *tokens, size_t n);

typedef enum imp_llama_way {
    IMP_LLAMA_WAY_COMPUTED = 0, /* nothing was loaded */
    IMP_LLAMA_WAY_WHOLE = 1,    /* the whole matched prefix was loaded */
    IMP_LLAMA_WAY_PARTIAL = 2   /* the tokens that matter were loaded */
} imp_llama_way;

/* Why it went that way. */
typedef enum imp_llama_reason {
    IMP_LLAMA_REASON_ASKED = 0,    /* as the request says */
    IMP_LLAMA_REASON_NOTHING = 1,  /* nothing that is long enough is stored, or the store isn't used */
    IMP_LLAMA_REASON_CANNOT = 2,   /* too short a prefix, or another fit, than a load in part takes */
    IMP_LLAMA_REASON_FAILED = 3,   /* a load failed before */
    IMP_LLAMA_REASON_UNKNOWN = 4,  /* adaptive, but no time is known yet: as the request says */
    IMP_LLAMA_REASON_QUICKER = 5,  /* adaptive: the others looked slower */
    IMP_LLAMA_REASON_FREE = 6      /* adaptive: whole, as a part would be hardly quicker */
} imp_llama_reason;

/* A reason in words, "whole costs no more". Static storage; any int is accepted. */
const char *imp_llama_reason_name(int reason);

/* What the last prompt of a sequence took, from its first token to its first output. */
typedef struct imp_llama_report {
    imp_llama_way way;
    size_t prompt_tokens;
    size_t matched_tokens;  /* found in the store and used; prompt_tokens - matched_tokens were computed */
    size_t derived_tokens;  /* of those, from derived entries (use_derived) */
    size_t loaded_tokens;   /* cells filled per layer */
    size_t query_tokens;    /* really computed */
    uint64_t total_ns;      /* in imp_llama_decode(); = match + identify + io_wait + gather + compute */
    uint64_t match_ns, identify_ns, io_wait_ns, gather_ns, compute_ns;
    uint64_t bytes_read, identify_bytes, host_hit_bytes, device_hit_bytes;
    uint64_t bytes_full;    /* of the matched prefix on disk */
    double mass;
    uint32_t n_selected, n_fallback; /* as in imp_load_stats */
    uint32_t retries;       /* passes thrown away because a read failed */
    imp_llama_reason reason;
    uint64_t expected_ns[3]; /* adaptive: by imp_llama_way, what each was thought to take; 0: it wasn't asked, or can't
                                be had */
} imp_llama_report;

/* The first token that is computed when of a prompt of `n_tokens` the first `n_stored` are loaded whole: n_stored, or
 * less with `widen_query`. A program that compares with recomputing ends a batch there: what llama.cpp computes
 * depends, in the last bits, on how tokens are cut into batches. */
size_t imp_llama_query_start(const imp_llama *ctx, size_t n_tokens, size_t n_stored);

/* Zeros where the store isn't used. IMP_E_ARG: no such sequence. */
int imp_llama_get_report(imp_llama *ctx, llama_seq_id seq, imp_llama_report *out);

#ifdef __cplusplus
}
#endif
#endif
