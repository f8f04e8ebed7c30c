/* What a step through all layers is told: their matrices and norms, and where its rows lie. */
#ifndef KVRELAY_STEP_H
#define KVRELAY_STEP_H

#include "attention.h"
#include "product.h"

typedef struct {
    const void *packed;
    const float *bias; /* NULL: none */
    int64_t rows, depth;
    int64_t kind;
} Matrix;

/* `count` of them, of which a router chooses `per_token`; matrices lie one after the other. */
typedef struct {
    Matrix router;
    const float *bias;            /* [count], added to scores for the choice only; NULL: none */
    const char *gate_ups, *downs; /* each [2 * width, hidden] and [hidden, width] */
    int64_t count, width, kind, per_token;
    int64_t groups, chosen_groups; /* experts are chosen from the best groups */
    float scale;                   /* of the chosen ones' weights */
    int32_t sigmoid, normalize;    /* scores are not softmax; weights are made to sum to one */
} Experts;

/* Multi-head latent attention: the queries of each head, but for what is rotated of them, are taken to the
 * space of latents, and what they find there to the space of values, by matrices of the head's own. */
typedef struct {
    Matrix compress;              /* to the queries' latent, if they have one, the latent, what is rotated */
    Matrix queries;               /* from their latent, or from the hidden row, normed */
    const float *q_norm, *kv_norm;
    const char *key_up, *value_up; /* each head's, [rank, nope] and [value, rank] */
    int64_t kind, heads, q_rank, rank, nope, rope, value;
} Latent;

/* Norms and matrices that a layer does not have are NULL; without experts their `count` is 0, without latent
 * attention its `heads`. With experts and an MLP every token passes both. `rope` and `attention` are the calls'
 * descriptions, `pool` is the layer's first element in block 0. */
typedef struct {
    Matrix qkv, out, gate_up, down;
    const float *input_norm, *q_norm, *k_norm, *attention_out_norm, *mlp_norm, *mlp_out_norm;
    const void *rope;
    const Attention *attention;
    void *pool;
    Experts experts;
    Latent latent;
} Layer;

/* Each has `rows` rows, of `norm`, `gated` and `added` up to BAND_STEP for each thread more; as wide as
 * what is kept there. */
typedef struct {
    float *hidden, *norm, *qkv, *attended, *gated, *added;
    int64_t rows, width; /* of hidden, norm and added */
    float eps;
    int32_t activation, threads;
} Step;

void kvr_rms_norm(const float *x, int64_t stride, const float *weight, float *y, int64_t rows,
                  int64_t width, float eps, int threads);
void kvr_rope_write(const void *rope, float *qkv, const float *q_norm, const float *k_norm, void *pool,
                    int64_t first, int64_t count, int threads);
void kvr_latent_write(const void *rope, float *q_rope, int64_t token_stride, int64_t head_stride, float *latent,
                      int64_t latent_stride, void *pool, int64_t count, int threads);
void kvr_heads(const float *x, int64_t ldx, int64_t x_step, const char *packed, int kind, int64_t k, int64_t m,
               int64_t heads, int64_t rows, float *y, int64_t ldy, int64_t y_step, int threads);
void kvr_add_experts(const Experts *experts, const float *x, float *hidden, int64_t rows, int64_t width,
                     int activation, int threads);
void kvr_attention(const Attention *base, const float *qkv, float *out, const void *pool);

/* All rows pass all layers. */
void kvr_layers(const Layer *layers, int64_t count, const Step *s);

/* The step's rows at x times the matrix. */
INLINE Product product_of(const Step *s, const float *x, const Matrix *m, float *y) {
    Product t = {x, y, m->bias, m->packed, s->rows, m->rows, m->depth, m->depth, m->rows};
    t.kind = (int)m->kind;
    return t;
}

#endif
