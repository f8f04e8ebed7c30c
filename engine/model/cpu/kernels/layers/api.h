/* The other parts of a layer (norms, rotary positions with the write to the KV pool, experts): what
 * Python calls, and the structs that it fills. cffi reads this file too: it has declarations only. */
#pragma once

#include <stdint.h>

#include "../gemm/api.h"

/* Rotary positions and KV writes of the layers that share a rope; num_kv_heads is 0 where they read
 * the keys and values of others. Offsets and strides of the pool:
 * as of `Attention`. */
typedef struct {
    const float *cos, *sin;   /* [max_positions, rope_dim / 2]; NULL: no rotation */
    const int64_t *positions; /* [num_tokens] */
    const int64_t *slots;     /* [num_tokens]: block * block_size + offset in the block */
    int64_t qkv_stride, block_stride, head_stride, value_offset;
    int64_t num_heads, num_kv_heads, head_dim, block_size, rope_at, rope_dim, mixed_half;
    const float *v_norm; /* [head_dim], of values, or NULL */
    float eps;
    int32_t kv_kind;
} Rope;

/* A mixture of `count` experts, of which a router chooses `per_token`. Their matrices are packed one
 * after the other. */
typedef struct {
    Matrix router;
    const float *bias;            /* [count], added to scores for the choice only; NULL: none */
    const char *gate_ups, *downs; /* of each: [2 * width, hidden] and [hidden, width] */
    int64_t count, width, kind, per_token;
    int64_t groups, chosen_groups; /* experts are chosen from the best groups */
    float scale;                   /* of the weights of the chosen ones */
    const float *scales;           /* [count]: one of each in its place, or NULL */
    int32_t sigmoid, normalize;    /* scores: sigmoid, not softmax; weights: made to sum to one */
    int32_t scales_inputs;         /* weights multiply what goes in, not what comes out */
} Experts;

/* The states that a step loads and stores. Segments of rows, four numbers each: first row, rows, the
 * slot to load (-1: zeros) and the slot to store (-1: nothing is). A sequence has those from its entry in `chains` to
 * the next one's; all but the first go on where the one before ended. */
typedef struct {
    int64_t *segments;     /* [.., 4] */
    const int64_t *chains; /* [count + 1] */
    int64_t count, stride; /* sequences; floats from a slot to the next */
    int64_t unit_stride;   /* floats from one of a slot's units to the next */
} States;

enum { MAX_KERNEL = 8 };

/* A causal convolution of each channel. A unit of a slot has the last kernel - 1 inputs of its channels,
 * in rows of `unit_channels`. Pieces of channels, four numbers each: first channel, channels (at most
 * MAX_PIECE), where they are in the slot, and in how many units from there on. */
enum { MAX_PIECE = 256 };
typedef struct {
    const float *x;            /* rows are `x_stride` apart */
    const float *weight, *bias; /* [kernel, channels], the oldest input's first; [channels] or NULL */
    float *y;                  /* [rows, channels] */
    const int64_t *pieces; /* [num_pieces, 4] */
    int64_t x_stride, channels, kernel, silu, num_pieces, unit_channels;
} Convolution;

/* A memory [key_dim, value_dim] of each head, of which a unit has `unit_heads` in turn. By the gated delta
 * rule keys and queries are made as long as one and key_dim ** -0.5, and a correction is scaled by
 * sigmoid(beta). With `skip`, by Mamba 2, the value is scaled by softplus(decay + decay_bias), and
 * skip * value added to the output. */
typedef struct {
    const float *qkv;         /* queries and keys of num_key_heads, values of num_heads */
    const float *decay, *beta; /* of each head, [decay_width] (key_dim, or 1), and [1] */
    const float *rate;        /* [num_heads]: decays are exp(rate * softplus(decay + decay_bias)) */
    const float *decay_bias;  /* [num_heads, decay_width] */
    const float *skip;        /* [num_heads], or NULL */
    float *y;                 /* [rows, num_heads, value_dim] */
    int64_t qkv_stride, decay_stride, beta_stride, decay_width;
    int64_t num_heads, num_key_heads, unit_heads, key_dim, value_dim;
} DeltaRule;

/* state: where slot 0 has it, in this layer. */
void kvr_convolve(const States *states, const Convolution *conv, float *state, int threads);
void kvr_delta_rule(const States *states, const DeltaRule *rule, float *state, int threads);

/* x [rows, heads, width] *= sigmoid(gate), or `activation` of the gate, after RMSNorm of each head, or
 * before it, where a weight is given: [width], `weight_step` apart. Rows of the gate, [heads * width] or
 * [1], are `stride` apart. */
void kvr_gate(float *x, const float *gate, int64_t stride, int64_t gate_width, const float *weight,
              int64_t weight_step, int64_t rows, int64_t heads, int64_t width, float eps, int activation,
              int gate_first, int threads);

/* hidden[tokens, width] = rows of a bfloat16 or float32 table. */
void kvr_embed(const void *table, int bf16, const int64_t *tokens, int64_t count, int64_t width,
               float *hidden);

/* y[rows, width] = x * weight / rms(x) of each row; rows of x are `stride` apart. */
void kvr_rms_norm(const float *x, int64_t stride, const float *weight, float *y, int64_t rows,
                  int64_t width, float eps, int threads);

/* LayerNorm of each row of x [rows, width], in place. */
void kvr_layer_norm(float *x, const float *weight, const float *bias, int64_t rows, int64_t width,
                    float eps, int threads);

/* qkv: [count, (num_heads + 2 * num_kv_heads) * head_dim], of the batch's tokens from `first` on.
 * Queries are rotated in place, keys and values are written to the pool (address of the layer's
 * keys in block 0). q_norm, k_norm: [head_dim], or NULL. */
void kvr_rope_write(const Rope *rope, float *qkv, const float *q_norm, const float *k_norm,
                    void *pool, int64_t first, int64_t count, int threads);

/* Latent attention. q_rope [count, num_heads, rope_dim], of the given strides, and the end of each
 * latent [head_dim] are rotated in place; latents are written to the pool. */
void kvr_latent_write(const Rope *rope, float *q_rope, int64_t token_stride, int64_t head_stride,
                      float *latent, int64_t latent_stride, void *pool, int64_t count, int threads);

/* The square of what is positive in x [rows, width], in place; the rest becomes zero. */
void kvr_squared_relu(float *x, int64_t rows, int64_t width, int threads);

/* hidden += the output for x of the experts that the router chooses for `routed`; all [rows, width]. */
void kvr_add_experts(const Experts *experts, const float *x, const float *routed, float *hidden,
                     int64_t rows, int64_t width, int activation, int threads);
