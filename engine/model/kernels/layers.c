/* What stands between the matrix products of a layer: RMSNorm, rotary positions with the write to
 * the KV pool, and the gated activation.  */
#include "common.h"
#include "pool.h"

#define ELEMENTS 8192 /* of one task, about: less is not worth another thread */

INLINE float inverse_rms(const float *x, int64_t width, float eps) {
    vf sum = splat(0);
    int64_t i = 0;
    for (; i + VL <= width; i += VL) sum += load(x + i) * load(x + i);
    float total = sum_lanes(sum);
    for (; i < width; i++) total += x[i] * x[i];
    return 1.0f / sqrtf(total / (float)width + eps);
}

typedef struct {
    const float *x, *weight;
    float *y;
    int64_t rows, width, step; /* step: rows of one task */
    float eps;
} Rows;

static void run_rows(Rows *t, void (*body)(void *, int64_t), int threads) {
    t->step = t->width < ELEMENTS ? ELEMENTS / t->width : 1;
    kvr_parallel(threads, (t->rows + t->step - 1) / t->step, body, t);
}

static void norm_task(void *arg, int64_t task) {
    const Rows *t = arg;
    for (int64_t r = task * t->step; r < (task + 1) * t->step && r < t->rows; r++) {
        const float *x = t->x + r * t->width;
        float *y = t->y + r * t->width, scale = inverse_rms(x, t->width, t->eps);
        for (int64_t i = 0; i < t->width; i++) y[i] = x[i] * scale * t->weight[i];
    }
}

/* y[rows, width] = x * weight / rms(x), row by row. */
void kvr_rms_norm(const float *x, const float *weight, float *y, int64_t rows, int64_t width,
                  float eps, int threads) {
    Rows t = {.x = x, .weight = weight, .y = y, .rows = rows, .width = width, .eps = eps};
    run_rows(&t, norm_task, threads);
}

static void swiglu_task(void *arg, int64_t task) {
    const Rows *t = arg;
    for (int64_t r = task * t->step; r < (task + 1) * t->step && r < t->rows; r++) {
        const float *gate = t->x + r * 2 * t->width, *up = gate + t->width;
        float *y = t->y + r * t->width;
        int64_t i = 0;
        for (; i + VL <= t->width; i += VL) {
            vf g = load(gate + i);
            store(y + i, g / (vexp(-g) + 1.0f) * load(up + i));
        }
        for (; i < t->width; i++) y[i] = gate[i] / (expf(-gate[i]) + 1.0f) * up[i];
    }
}

/* out[rows, width] = silu(gate) * up, where gate_up is [rows, 2 * width]. */
void kvr_swiglu(const float *gate_up, float *out, int64_t rows, int64_t width, int threads) {
    Rows t = {.x = gate_up, .y = out, .rows = rows, .width = width};
    run_rows(&t, swiglu_task, threads);
}

typedef struct {
    const float *cos, *sin;    /* [max_positions, head_dim / 2] */
    const int64_t *positions;  /* [num_tokens] */
    const int64_t *slots;      /* [num_tokens]: block * block_size + offset in the block */
    int64_t num_tokens, qkv_stride, block_stride, value_offset;
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    float eps;
    int32_t kv_bf16, threads;
} Rope;

int64_t kvr_rope_bytes(void) { return sizeof(Rope); }

/* Optional norm over head_dim, then rotation of the halves (x1, x2) by the position's angles. */
INLINE void rotate(const Rope *a, float *head, const float *norm, int64_t position) {
    int64_t half = a->head_dim / 2;
    if (norm) {
        float scale = inverse_rms(head, a->head_dim, a->eps);
        for (int64_t i = 0; i < a->head_dim; i++) head[i] = head[i] * scale * norm[i];
    }
    const float *c = a->cos + position * half, *s = a->sin + position * half;
    for (int64_t i = 0; i < half; i++) {
        float x1 = head[i], x2 = head[half + i];
        head[i] = x1 * c[i] - x2 * s[i];
        head[half + i] = x2 * c[i] + x1 * s[i];
    }
}

INLINE void write_kv(void *pool, int64_t at, const float *from, int64_t count, int bf16) {
    if (bf16)
        for (int64_t i = 0; i < count; i++) ((uint16_t *)pool)[at + i] = float_to_bf16(from[i]);
    else
        memcpy((float *)pool + at, from, sizeof(float) * count);
}

typedef struct {
    const Rope *rope;
    float *qkv;
    const float *q_norm, *k_norm;
    void *pool;
    int64_t step; /* tokens of one task */
} Write;

static void write_task(void *arg, int64_t task) {
    const Write *w = arg;
    const Rope *a = w->rope;
    int64_t dim = a->head_dim, end = (task + 1) * w->step;
    for (int64_t t = task * w->step; t < end && t < a->num_tokens; t++) {
        float *heads = w->qkv + t * a->qkv_stride;
        float *keys = heads + a->num_heads * dim, *values = keys + a->num_kv_heads * dim;
        int64_t block = a->slots[t] / a->block_size, offset = a->slots[t] % a->block_size;
        for (int64_t h = 0; h < a->num_heads; h++)
            rotate(a, heads + h * dim, w->q_norm, a->positions[t]);
        for (int64_t h = 0; h < a->num_kv_heads; h++) {
            int64_t at = block * a->block_stride + (h * a->block_size + offset) * dim;
            rotate(a, keys + h * dim, w->k_norm, a->positions[t]);
            write_kv(w->pool, at, keys + h * dim, dim, a->kv_bf16);
            write_kv(w->pool, at + a->value_offset, values + h * dim, dim, a->kv_bf16);
        }
    }
}

/* qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; queries are rotated in place, keys
 * and values go to the pool (first element of the layer's keys in block 0). */
void kvr_rope_write(const Rope *a, float *qkv, const float *q_norm, const float *k_norm,
                    void *pool) {
    int64_t step = a->qkv_stride < ELEMENTS ? ELEMENTS / a->qkv_stride : 1;
    Write w = {a, qkv, q_norm, k_norm, pool, step};
    kvr_parallel(a->threads, (a->num_tokens + step - 1) / step, write_task, &w);
}

/* hidden[tokens, width] = rows of a bfloat16 or float32 table. */
void kvr_embed(const void *table, int bf16, const int64_t *tokens, int64_t count, int64_t width,
               float *hidden) {
    for (int64_t t = 0; t < count; t++)
        for (int64_t i = 0; i < width; i++) {
            int64_t at = tokens[t] * width + i;
            hidden[t * width + i] =
                bf16 ? bf16_to_float(((const uint16_t *)table)[at]) : ((const float *)table)[at];
        }
}
