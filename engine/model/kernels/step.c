/* All layers of a step in one call, where each of them is attention and an MLP: between kernels as
 * short as those of one decoded token, the way through an interpreter would show. */
#include "attention.h"

typedef struct {
    const void *packed;
    const float *bias; /* NULL: none */
    int64_t rows, depth;
    int64_t kind;
} Matrix;

/* Norms that a layer does not have are NULL. `rope` and `attention` are the calls' descriptions,
 * `pool` is the layer's first element in block 0. */
typedef struct {
    Matrix qkv, out, gate_up, down;
    const float *input_norm, *q_norm, *k_norm, *attention_out_norm, *mlp_norm, *mlp_out_norm;
    const void *rope;
    const Attention *attention;
    void *pool;
} Layer;

/* Each has `rows` rows; as wide as what is kept there. */
typedef struct {
    float *hidden, *norm, *qkv, *attended, *gated, *added;
    int64_t rows, width; /* of hidden, norm and added */
    float eps;
    int32_t activation, threads;
} Step;

void kvr_linear(const float *x, int64_t n, int64_t ldx, int64_t k, const void *packed, int kind,
                int64_t m, const float *bias, float *y, int64_t ldy, int keep, int activation,
                int threads);
void kvr_rms_norm(const float *x, int64_t stride, const float *weight, float *y, int64_t rows,
                  int64_t width, float eps, int threads);
void kvr_rope_write(const void *rope, float *qkv, const float *q_norm, const float *k_norm,
                    void *pool);
void kvr_attention(const Attention *base, const float *qkv, float *out, const void *pool);

int64_t kvr_layer_bytes(void) { return sizeof(Layer); }
int64_t kvr_step_bytes(void) { return sizeof(Step); }

static void multiply(const Step *s, const float *x, const Matrix *m, float *y) {
    kvr_linear(x, s->rows, m->depth, m->depth, m->packed, (int)m->kind, m->rows, m->bias, y,
               m->rows, 0, NO_ACTIVATION, s->threads);
}

/* hidden += x @ m, normed in between where the layer says so. */
static void add(const Step *s, const float *x, const Matrix *m, const float *norm) {
    float *from = s->added, *hidden = s->hidden;
    int64_t width = s->width, threads = s->threads;
    if (norm) {
        multiply(s, x, m, from);
        kvr_rms_norm(from, width, norm, from, s->rows, width, s->eps, (int)threads);
        for (int64_t i = 0; i < s->rows * width; i++) hidden[i] += from[i];
        return;
    }
    for (int64_t r = 0; m->bias && r < s->rows; r++)
        for (int64_t i = 0; i < width; i++) hidden[r * width + i] += m->bias[i];
    kvr_linear(x, s->rows, m->depth, m->depth, m->packed, (int)m->kind, m->rows, NULL, hidden,
               width, 1, NO_ACTIVATION, (int)threads);
}

void kvr_layers(const Layer *layers, int64_t count, const Step *s) {
    for (const Layer *l = layers; l < layers + count; l++) {
        kvr_rms_norm(s->hidden, s->width, l->input_norm, s->norm, s->rows, s->width, s->eps,
                     s->threads);
        multiply(s, s->norm, &l->qkv, s->qkv);
        kvr_rope_write(l->rope, s->qkv, l->q_norm, l->k_norm, l->pool);
        kvr_attention(l->attention, s->qkv, s->attended, l->pool);
        add(s, s->attended, &l->out, l->attention_out_norm);
        kvr_rms_norm(s->hidden, s->width, l->mlp_norm, s->norm, s->rows, s->width, s->eps,
                     s->threads);
        kvr_linear(s->norm, s->rows, s->width, s->width, l->gate_up.packed, (int)l->gate_up.kind,
                   l->gate_up.rows, NULL, s->gated, l->down.depth, 0, s->activation, s->threads);
        add(s, s->gated, &l->down, l->mlp_out_norm);
    }
}
