/* adapter.h: the inside of libimpress_llama.
 *
 *     api.c       the public calls that aren't decode
 *     decode.c    a batch, cut into what passes through and what needs a pass of its own; the outputs of both
 *     pass.c      one sequence over a load: place cells, fill them while it computes, try again when a read fails
 *     adapt.c     is it quicker to compute, to load, or to load a part?
 *     sequence.c  what each virtual sequence holds
 *     save.c      rows of new tokens on their way into the store
 *     queries.c   the last queries of a prompt, which go with them
 *     rank.c      a stored prefix, repeated by the model to rank its tokens
 *     space.c     what has to be equal before KV is shared
 *     probe.c     does this model fit? structure of its graph, and a self-check
 *     rope.c      how its keys are turned by their positions
 *     hook.c      the callback that llama.cpp asks at every node of the graph
 *     cells.c     rows in and out of the cache tensors
 *
 * Words: a *cell* is a row of the cache tensors, numbered over all streams as SET_ROWS numbers them. A *site* is one
 * layer's attention in the graph. A *pass* is one llama_decode() with the hook doing something.
 */
#ifndef IMPRESS_LLAMA_ADAPTER_H
#define IMPRESS_LLAMA_ADAPTER_H

#include <ggml-backend.h>
#include <ggml.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "adapt.h"
#include "impress/llama.h"

#define LC_NO_CELL UINT32_MAX
#define LC_MIN_PREFIX 16 /* a shorter prefix isn't worth a load */
#define LC_QUERY_ROWS 64 /* of a prompt's last queries: what imp_commit_queries() keeps */
#define LC_E_GRAPH (-1000) /* the graph isn't what was assumed; never leaves the adapter */

/* ------------------------------------------------------------------------------------------------------ cells ---- */

typedef struct lc_site {
    struct ggml_tensor *k, *v;         /* the layer's cache tensors, [row, cells, streams] */
    struct ggml_tensor *first, *last;  /* of these two, in the order in which the graph writes them */
    imp_layer_shape shape;
    uint32_t n_heads;                  /* of queries */
    float scale, softcap;              /* of their scores */
    size_t queries_at;                 /* in lc_queries.rows */
    imp_rope rope;
    float *factors;                    /* RoPE's own; NULL: none */
} lc_site;

/* Grows; kept from use to use. */
typedef struct lc_buffer {
    void *data;
    size_t bytes;
} lc_buffer;

void *lc_buffer_need(lc_buffer *b, size_t bytes); /* NULL: no memory; contents are not kept */
void lc_buffer_free(lc_buffer *b);

/* The tensor that `t` is a view of, in the end. */
struct ggml_tensor *lc_root(struct ggml_tensor *t);

/* Read `n` indices (I32 or I64) of an input tensor. Returns 0 or a status. */
int lc_cells_indices(const struct ggml_tensor *idx, uint32_t *out, size_t n);

/* Gather layer `layer` of `load` into `cells` [k]. */
int lc_cells_gather(imp_llama *ctx, imp_load *load, size_t layer, const uint32_t *cells, size_t k);

/* Give the rows in `cells` [n] of layer `layer` to `commit`, as those of the prompt's tokens from `first` on. */
int lc_cells_commit(imp_llama *ctx, imp_commit *commit, size_t layer, size_t first, const uint32_t *cells, size_t n);

/* Copy the rows in `cells` [n], keys and values, to `k` and `v`, or from there. For the self-check. */
void lc_cells_read(imp_llama *ctx, size_t layer, const uint32_t *cells, size_t n, void *k, void *v);
void lc_cells_write(imp_llama *ctx, size_t layer, const uint32_t *cells, size_t n, const void *k, const void *v);

/* ------------------------------------------------------------------------------------------------------- hook ---- */

typedef enum lc_hook_mode {
    LC_HOOK_WATCH, /* note the cells of the tokens that are computed */
    LC_HOOK_PROBE, /* and learn the structure of the graph */
    LC_HOOK_PLACE, /* let cells be taken, compute nothing */
    LC_HOOK_FILL   /* watch, and call `fill` before each layer's attention */
} lc_hook_mode;

/* Fill the cells of one layer. `attention` is the FLASH_ATTN_EXT node, its inputs computed. Returns 0 or a status,
 * which ends the pass. */
typedef int (*lc_fill_fn)(imp_llama *ctx, void *user, size_t layer, const struct ggml_tensor *attention);

/* What is copied of a row of the batch: its queries go to this slot of its sequence; -1: nothing. */
typedef struct lc_take {
    llama_seq_id seq;
    int32_t slot;
} lc_take;

struct lc_muted {
    struct ggml_tensor *node;
    enum ggml_op op;
};

typedef struct lc_hook {
    lc_hook_mode mode;
    int error;              /* why the pass was ended; its result is void */
    bool stop;              /* end every part of the graph at its first node */
    bool armed;             /* keys and values of `layer` are written, its attention comes next */
    bool taking;            /* queries of this ubatch are kept */
    size_t layer;           /* next site, in this ubatch */
    size_t n_ubatches;      /* seen in this pass */
    uint32_t *cells;        /* of the tokens computed in this pass, in the graph's order: [n_cells] */
    size_t n_cells, cap_cells;
    size_t first_row;       /* of the batch, in this ubatch */
    struct lc_muted *muted; /* nodes made no-ops, to be given their operation back: [n_muted] */
    size_t n_muted, cap_muted;

    lc_fill_fn fill;
    uint64_t fill_ns;       /* it took so far, in this pass */
    uint64_t pass_ns;       /* the last pass took, all in all */
    void *fill_user;
    bool fill_once;         /* only in the first ubatch */
    size_t n_visible;       /* cells that the first token must see, its own included; 0: not checked */
    const uint32_t *placed; /* and these among them: [n_placed] */
    size_t n_placed;

    lc_take *take;          /* [the batch's tokens], in the graph's order; NULL: no queries are kept of this pass */
    size_t n_taken, n_to_take; /* times a layer's were copied, and should have been */
} lc_hook;

bool lc_hook_eval(struct ggml_tensor *t, bool ask, void *user); /* for cb_eval; `user` is the imp_llama */

/* llama_decode() with the hook in `mode`. Returns what it returns; `*error` is 0 or the status that ended the pass. */
int32_t lc_hook_decode(imp_llama *ctx, struct llama_batch batch, lc_hook_mode mode, int *error);

/* ------------------------------------------------------------------------------------------------------ probe ---- */

typedef struct lc_probe {
    const char *why;            /* NULL: everything fits so far */
    bool sinks;                 /* attention has sinks: whole loads only */
    struct ggml_tensor *mask;
    struct ggml_tensor *written[2]; /* cache tensors written since the last attention */
    const struct ggml_tensor *source[2]; /* and what was written to them */
    size_t n_written;
    bool others;                /* a node that computes came between the last write and now */
    uint8_t *graph;             /* operations and their parameters, for the space: [n_graph] */
    size_t n_graph, cap_graph;
    const struct ggml_tensor *factors; /* RoPE factors seen last */
    bool no_memory;
    const char *no_ropes;       /* why its keys can't be turned back; NULL: they can */
} lc_probe;

/* Look at the model, then at its graph, then try loading. Sets ctx->fit, ctx->why, ctx->sites. The memory is empty
 * before and after. */
void lc_probe_run(imp_llama *ctx, const struct llama_context_params *cp);
void lc_probe_node(imp_llama *ctx, struct ggml_tensor *t); /* for the hook */

/* From the tensor that is written into the key cache: sets site->rope, site->factors. NULL, or why it isn't known. */
const char *lc_rope_learn(const struct ggml_tensor *written, lc_site *site);

/* Does llama.cpp multiply keys by a Hadamard matrix before they are cached? */
bool lc_rope_rotated(enum ggml_type type, uint32_t head_dim);

/* ------------------------------------------------------------------------------------------------- sequences ---- */

typedef enum lc_seq_state {
    LC_SEQ_NOTED, /* cells hold nothing of it; its tokens are known (an empty sequence is one of this kind) */
    LC_SEQ_REAL,  /* cells hold all of it, or a selection of its prefix and all after it */
    LC_SEQ_ALIEN  /* cells hold it, but not as tokens from position 0 on: never stored */
} lc_seq_state;

/* The last queries of a prompt, exact, that are not in the store yet. */
typedef struct lc_queries {
    float *rows;     /* [layer][LC_QUERY_ROWS][n_heads][head_dim] */
    size_t first, n; /* of the tokens [first, first + n) */
    size_t next_first, next_n, n_rows, n_seen; /* while a batch with n_rows tokens of the sequence is decoded */
} lc_queries;

typedef struct lc_seq {
    lc_seq_state state;
    int32_t *tokens;    /* [n], one more fits: the sentinel of a match */
    uint32_t *cells;    /* [n], LC_NO_CELL where it isn't known */
    size_t n, cap;
    size_t n_loaded;    /* REAL: tokens from the start that came from the store */
    bool partial;       /* of these, `placed` holds a selection per layer */
    uint32_t *placed;   /* [n_placed]: cells of the selection */
    size_t n_placed;
    size_t exact;       /* tokens from the start that are exact; those after it are derived */
    size_t sound;       /* tokens from the start whose cells are known (or that are loaded) */
    size_t saved;       /* tokens from the start that the store has, as far as is known here */

    imp_lease *lease;   /* NOTED: what is matched; REAL: with `load` */
    size_t n_leased;
    imp_prefix_info info;
    imp_load *load;     /* partial, until the prompt's first output: each ubatch selects for itself */
    bool load_used;     /* its layers were asked for already: the next ubatch is another pass over it */

    imp_commit *commit; /* being copied: tokens [commit_next, commit_end) are still missing */
    size_t commit_next, commit_end;
    lc_queries queries; /* for the commit of this prompt */
    bool want_save;     /* a prompt came in since the last commit */
    bool answered;      /* and its first output was handed over */

    char *salt;         /* of a tenant; NULL: the context's */
    imp_space *space;   /* with `salt`: opened when it is needed */
    imp_llama_request request;
    imp_llama_report report;
    bool in_prompt;     /* the report isn't finished */

    /* The batch that is being decoded: */
    size_t n_before;    /* tokens before it */
    llama_pos pos_before; /* last position before it, -1: none */
    size_t n_share;     /* tokens of this sequence in it; 0: not in it */
    size_t n_counted;   /* of these, in the report */
    size_t first_share; /* of ctx->order */
    bool solo;          /* needs a pass of its own */
    bool has_output;
} lc_seq;

int lc_seq_append(lc_seq *s, const int32_t *tokens, size_t n); /* with unknown cells; IMP_E_NOMEM */
/* Cells of the tokens from `first` on, as a pass reported them. */
void lc_seq_set_cells(lc_seq *s, size_t first, const uint32_t *cells, size_t n);
/* Forget everything; the cells are not touched. */
void lc_seq_reset(lc_seq *s);
void lc_seq_free(lc_seq *s);
/* Forget the loaded state and keep the tokens: the cells are the caller's to give back. */
void lc_seq_note(lc_seq *s);
/* Drop the tokens from `n` on, in cells too, without saving. */
void lc_seq_truncate(imp_llama *ctx, llama_seq_id id, size_t n);
void lc_seq_release(lc_seq *s); /* lease and load */
/* Match the tokens [0, limit): sets lease, n_leased, info. Nothing matched is no error. */
void lc_seq_match(imp_llama *ctx, lc_seq *s, size_t limit);

/* ------------------------------------------------------------------------------------------------------ passes ---- */

/* Compute what isn't in the cells of tokens [0, s->n), loading what the store has of it. The last `n_batch` tokens are
 * those of the batch that is being decoded: outputs[i] >= 0 is the row of ctx->out for its i-th token. Returns as
 * llama_decode(); on anything but 0 no cell is held. */
int32_t lc_pass_run(imp_llama *ctx, llama_seq_id id, size_t n_batch, const int32_t *outputs);

/* Bring the whole sequence into cells, exactly. 0 or as llama_decode(). */
int32_t lc_pass_whole(imp_llama *ctx, llama_seq_id id);

/* Give its cells back and only note its tokens. */
void lc_pass_drop(imp_llama *ctx, llama_seq_id id);

/* The last `most` rows of a layer's queries, in memory that can be read; valid until the next call. */
int lc_pass_query(imp_llama *ctx, const struct ggml_tensor *attention, size_t most, imp_query *out);

/* Sets ctx->ops, from the sites. */
void lc_pass_measure(imp_llama *ctx);

/* The pass that just went well computed `n` tokens of one sequence, the first of which attended to `cells`: its time
 * tells how quick the model is. */
void lc_pass_note(imp_llama *ctx, size_t n, size_t cells, bool guess);

/* One more token in a batch of single sequences. */
void lc_pass_put(struct llama_batch *b, llama_token token, llama_pos pos, llama_seq_id id, bool output);

/* Take `k` cells for the positions [end - k, end) of an empty sequence; cells[i] becomes that of the i-th.
 * As llama_decode(); no cell is held on failure. */
int32_t lc_pass_place(imp_llama *ctx, llama_seq_id id, llama_pos end, size_t k, uint32_t *cells);

/* ------------------------------------------------------------------------------------------------------ saving ---- */

void lc_save_step(imp_llama *ctx);            /* a slice of what is due */
int lc_save_seq(imp_llama *ctx, lc_seq *s);   /* all of a sequence */
void lc_save_cancel(lc_seq *s);

/* Around a decode of `b`: keep the last queries of the sequences in it, or of `only`, whose first token in `b` is at
 * position `first`. `done`: it went well. */
void lc_queries_begin(imp_llama *ctx, const struct llama_batch *b, const lc_seq *only, size_t first);
void lc_queries_end(imp_llama *ctx, bool done);

/* For the hook, once an ubatch's cells are noted: does it have rows to keep? And take them from one layer. */
bool lc_queries_wanted(imp_llama *ctx);
void lc_queries_take(imp_llama *ctx, size_t layer, const struct ggml_tensor *attention);

void lc_queries_commit(imp_llama *ctx, lc_seq *s); /* hand them to the open commit, and drop them */
void lc_queries_drop(lc_seq *s);

/* ------------------------------------------------------------------------------------------------------- space ---- */

typedef struct lc_adapter_id {
    imp_hash128 file;
    float scale;
} lc_adapter_id;

int lc_space_describe(imp_llama *ctx, const char *salt, imp_space **out);
imp_space *lc_seq_space(imp_llama *ctx, lc_seq *s); /* NULL: it can't be opened, and nothing is matched or stored */
bool lc_space_type(enum ggml_type t, imp_type *out);

/* ----------------------------------------------------------------------------------------------------- context ---- */

struct imp_llama {
    struct llama_context *lctx;
    const struct llama_model *model;
    llama_memory_t memory;
    imp_store *store;
    imp_space *space;   /* NULL: plain llama.cpp */
    imp_llama_fit fit;
    char why[160], note[256];
    uint32_t n_vocab, n_batch, n_ubatch, n_seq_max;
    uint32_t min_query;
    bool widen_query;
    bool has_streams;   /* each sequence has cells of its own */
    char *salt;
    lc_adapter_id *adapters; /* in force: [n_adapters] */
    size_t n_adapters;
    imp_hash128 *file_ids; /* [n_files], of what was there at the start: later files of these names aren't the model */
    size_t n_files;

    lc_site *sites;    /* [n_sites] */
    size_t n_sites;
    bool host;          /* all cache tensors lie in memory that this program can write to */
    size_t stream_cells; /* cells of one stream */
    size_t n_streams;
    bool shift_pending; /* llama.cpp will run a graph of its own at the next decode */
    lc_hook hook;
    lc_probe probe;

    lc_ops ops;         /* what the model takes */
    lc_speed speed;     /* and how long that is */
    double place_ns;    /* moving averages: to take a cell */
    double identify_ns; /* to choose, a token of the prefix and layer */
    double gather_ns[2]; /* to fill a cell of a layer; [1]: of a selection */

    lc_seq *seqs;      /* [n_seq_max] */
    struct llama_batch work; /* [n_batch], for passes */
    lc_buffer stage_k, stage_v, stage_q, stage_mask;

    /* Outputs of the last decode: llama.cpp's own, or copied rows where it was several passes. */
    bool out_own;
    float *out;         /* [n_out][n_vocab] */
    size_t n_out, cap_out;
    int32_t *out_row;   /* of the batch's tokens, -1: none: [n_batch] */
    int32_t n_out_tokens;
    int32_t *order;     /* tokens of the batch by sequence: [n_batch] */
    lc_take *take;      /* [n_batch] */
    int32_t *rows;      /* out_row of one sequence's tokens: [n_batch] */
    llama_token_data *candidates; /* [n_vocab], for the sampler */
};

/* Take over what a caller gave, whose header may be older or newer, and check it: `out` is as this library has it, and
 * so is what lies within it. IMP_E_ARG; IMP_E_UNSUPPORTED. (params.c) */
int lc_request_take(const imp_llama_request *given, imp_llama_request *out);
int lc_params_take(const imp_llama_params *given, imp_llama_params *out);

uint64_t lc_now_ns(void);
/* One line to the log. */
void lc_say(imp_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Set the error line and return `status`. */
int lc_error(int status, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
