/* rope.c: how a layer's keys are turned by their positions, learned from the graph: from what is written into the key
 * cache, back to the layer's projection.
 *
 *     MUL_MAT(weights) .. ROPE .. SET_ROWS      the ROPE node has everything
 *     MUL_MAT(weights) ......... SET_ROWS      nothing is turned
 *
 * Keys that something else happens to after RoPE (a norm, a scale, a rotation) can't be turned back, and a graph that
 * looks otherwise isn't guessed at: there are no sketches then, and all else works.
 */
#include <stdlib.h>
#include <string.h>

#include "adapter.h"

enum { MAX_STEPS = 64, OP_DIMS = 1, OP_MODE = 2, OP_CTX_ORIG = 4, OP_FLOATS = 5, OP_FIRST = 15 };

bool lc_rope_rotated(enum ggml_type type, uint32_t head_dim)
{
    const char *off = getenv("LLAMA_ATTN_ROT_DISABLE");
    return ggml_is_quantized(type) && head_dim % 64 == 0 && !(off && atoi(off));
}

static bool is_leaf(const struct ggml_tensor *t) { return t && t->op == GGML_OP_NONE; }

/* `t` without what only looks at it otherwise. */
static const struct ggml_tensor *skip_looks(const struct ggml_tensor *t)
{
    while (t && (t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_CONT)) t = t->src[0];
    return t;
}

/* Take over the values of a ROPE node. Returns NULL, or why not. */
static const char *read_node(const struct ggml_tensor *node, lc_site *site)
{
    static const char *const odd_factors = "its RoPE has unexpected factors";
    const int32_t *op = node->op_params;
    float f[6]; /* base, scale, ext_factor, attn_factor, beta_fast, beta_slow */
    memcpy(f, op + OP_FLOATS, sizeof f);
    imp_rope r = {
        .pairs = op[OP_MODE] == GGML_ROPE_TYPE_NEOX ? IMP_ROPE_NEOX : IMP_ROPE_NORM,
        .first_dim = (uint32_t)op[OP_FIRST], .n_dims = (uint32_t)op[OP_DIMS], .base = f[0], .freq_scale = f[1],
        .ext_factor = f[2], .attn_factor = f[3], .beta_fast = f[4], .beta_slow = f[5],
        .n_ctx_orig = (uint32_t)op[OP_CTX_ORIG],
    };
    if (op[OP_MODE] != GGML_ROPE_TYPE_NEOX && op[OP_MODE] != GGML_ROPE_TYPE_NORMAL) return "a RoPE of another kind";
    if (node->ne[0] != site->shape.head_dim_k || op[OP_DIMS] <= 0 || op[OP_FIRST] < 0 || r.n_dims % 2 ||
        r.first_dim + r.n_dims > site->shape.head_dim_k || !(r.base > 1) || !(r.freq_scale > 0) ||
        r.attn_factor == 0 || (r.ext_factor != 0 && op[OP_CTX_ORIG] <= 0)) {
        return "its RoPE has unexpected values";
    }
    const struct ggml_tensor *factors = node->src[2];
    if (factors) {
        if (factors->type != GGML_TYPE_F32 || factors->ne[0] < op[OP_DIMS] / 2) return odd_factors;
        size_t bytes = r.n_dims / 2 * sizeof(float);
        site->factors = malloc(bytes);
        if (!site->factors) return "no memory for its RoPE";
        ggml_backend_tensor_get(factors, site->factors, 0, bytes);
        for (uint32_t i = 0; i < r.n_dims / 2; i++) {
            if (!(site->factors[i] > 0)) return odd_factors;
        }
        r.factors = site->factors;
    }
    site->rope = r;
    return NULL;
}

const char *lc_rope_learn(const struct ggml_tensor *written, lc_site *site)
{
    static const char *const changed = "its keys are changed after RoPE", *const unknown = "its RoPE isn't understood";
    bool plain = true;
    const struct ggml_tensor *t = written;
    site->rope = (imp_rope){0};
    if (lc_rope_rotated(site->k->type, site->shape.head_dim_k)) return "its quantised cache is rotated";
    for (int step = 0; step < MAX_STEPS && (t = skip_looks(t)) != NULL; step++) {
        switch (t->op) {
        case GGML_OP_ROPE: return plain ? read_node(t, site) : changed;
        case GGML_OP_MUL_MAT: {
            const struct ggml_tensor *from = skip_looks(t->src[1]);
            if (!from || !is_leaf(t->src[0])) return unknown;
            if (t->src[0]->flags & GGML_TENSOR_FLAG_INPUT || from->op == GGML_OP_ROPE) return changed;
            return NULL; /* the projection: nothing was turned on the way */
        }
        case GGML_OP_ADD:
        case GGML_OP_MUL:
            if (!is_leaf(skip_looks(t->src[1]))) return unknown;
            break;
        case GGML_OP_SCALE:
        case GGML_OP_NORM:
        case GGML_OP_RMS_NORM:
        case GGML_OP_L2_NORM: break;
        default: return unknown;
        }
        plain = false;
        t = t->src[0];
    }
    return unknown;
}
