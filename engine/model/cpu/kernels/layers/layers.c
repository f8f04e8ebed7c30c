/* What stands between the matrix gemms of a layer: RMSNorm, and rotary positions with the write to
 * the KV pool. */
#include "../floats.h"
#include "../hadamard.h"
#include "../norm.h"
#include "../thread_pool.h"
#include "api.h"

#define ELEMENTS 8192 /* of one task, about: less is not worth another thread */

typedef struct {
    const float *x, *weight;
    float *y;
    int64_t rows, width, stride, step; /* step: rows of one task */
    float eps;
} Rows;

static void run_rows(Rows *t, void (*body)(void *, int64_t), int threads) {
    t->step = t->width < ELEMENTS ? ELEMENTS / t->width : 1;
    kvr_parallel(threads, (t->rows + t->step - 1) / t->step, body, t);
}

static void norm_task(void *arg, int64_t task) {
    const Rows *t = arg;
    for (int64_t r = task * t->step; r < (task + 1) * t->step && r < t->rows; r++) {
        const float *x = t->x + r * t->stride;
        float *y = t->y + r * t->width;
        normalise(x, t->weight, y, t->width, t->eps);
    }
}

/* y[rows, width] = x * weight / rms(x), row by row; rows of x are `stride` apart. */
void kvr_rms_norm(const float *x, int64_t stride, const float *weight, float *y, int64_t rows,
                  int64_t width, float eps, int threads) {
    Rows t = {.x = x, .weight = weight, .y = y, .rows = rows, .width = width, .eps = eps};
    t.stride = stride;
    run_rows(&t, norm_task, threads);
}

static void layer_norm_task(void *arg, int64_t task) {
    const Rows *t = arg;
    const float *bias = t->x;
    int64_t width = t->width;
    for (int64_t r = task * t->step; r < (task + 1) * t->step && r < t->rows; r++) {
        float *y = t->y + r * width, mean = 0, square = 0;
        for (int64_t i = 0; i < width; i++) mean += y[i];
        mean /= (float)width;
        for (int64_t i = 0; i < width; i++) square += (y[i] - mean) * (y[i] - mean);
        float scale = 1.0f / sqrtf(square / (float)width + t->eps);
        for (int64_t i = 0; i < width; i++) y[i] = (y[i] - mean) * scale * t->weight[i] + bias[i];
    }
}

void kvr_layer_norm(float *x, const float *weight, const float *bias, int64_t rows, int64_t width, float eps,
                    int threads) {
    Rows t = {.x = bias, .weight = weight, .y = x, .rows = rows, .width = width, .eps = eps};
    run_rows(&t, layer_norm_task, threads);
}

/* Rotate the halves (x1, x2) of x [rope_dim] by the position's angles. */
INLINE void rotate(const Rope *a, float *x, int64_t position) {
    if (!a->cos) return;
    int64_t half = a->rope_dim / 2, i = 0;
    const float *c = a->cos + position * half, *s = a->sin + position * half;
    for (; i + VL <= half; i += VL) {
        vf x1 = load(x + i), x2 = load(x + half + i);
        store(x + i, x1 * load(c + i) - x2 * load(s + i));
        store(x + half + i, x2 * load(c + i) + x1 * load(s + i));
    }
    for (; i < half; i++) {
        float x1 = x[i], x2 = x[half + i];
        x[i] = x1 * c[i] - x2 * s[i];
        x[half + i] = x2 * c[i] + x1 * s[i];
    }
}

static void write_fp8(uint8_t *head, int64_t offset, const float *from, const Rope *a) {
    vf most = splat(0);
    for (int64_t i = 0; i < a->head_dim; i += VL)
        most = vmax(most, (vf)((vi)load(from + i) & INT32_MAX));
    int32_t byte = fp8_scale(max_lanes(most)), bits = (254 - byte) << 23;
    float inverse;
    memcpy(&inverse, &bits, 4);
    for (int64_t i = 0; i < a->head_dim; i += VL)
        *(vbu *)(head + offset * a->head_dim + i) =
            __builtin_convertvector(round_fp8(load(from + i) * inverse), vb);
    head[a->block_size * a->head_dim + offset] = (uint8_t)byte;
}

/* One head's vector of one token to the pool: `head` is where the head's block begins. */
INLINE void write_kv(const Rope *a, void *pool, int64_t head, int64_t offset, const float *from) {
    int64_t dim = a->head_dim, at = head + offset * dim;
    if (a->kv_kind == KV_FLOAT32)
        memcpy((float *)pool + at, from, sizeof(float) * dim);
    else if (a->kv_kind == KV_BFLOAT16)
        for (int64_t i = 0; i < dim; i += VL)
            *(vhu *)((uint16_t *)pool + at + i) = round_bf16(load(from + i));
    else
        write_fp8((uint8_t *)pool + head, offset, from, a);
}

INLINE void mix_key(const Rope *a, float *key) {
    hadamard_row(key, a->mixed_half);
    float inverse = 1.0f / mixed_size(a->mixed_half);
    for (int64_t i = 0; i < 2 * a->mixed_half; i++) key[i] *= inverse;
}

typedef struct {
    const Rope *rope;
    float *qkv;
    const float *q_norm, *k_norm;
    float *latent; /* [num_tokens, latent_stride] */
    int64_t token_stride, head_stride, latent_stride;
    void *pool;
    int64_t first, count, step; /* tokens; step: of one task */
} Write;

static void write_task(void *arg, int64_t task) {
    const Write *w = arg;
    const Rope *a = w->rope;
    int64_t dim = a->head_dim, end = (task + 1) * w->step;
    for (int64_t i = task * w->step; i < end && i < w->count; i++) {
        int64_t t = w->first + i;
        float *heads = w->qkv + i * a->qkv_stride;
        float *keys = heads + a->num_heads * dim, *values = keys + a->num_kv_heads * dim;
        int64_t block = a->slots[t] / a->block_size, offset = a->slots[t] % a->block_size;
        for (int64_t h = 0; h < a->num_heads; h++, heads += dim) {
            if (w->q_norm) normalise(heads, w->q_norm, heads, dim, a->eps);
            rotate(a, heads, a->positions[t]);
            if (a->mixed_half) hadamard_row(heads, a->mixed_half);
        }
        for (int64_t h = 0; h < a->num_kv_heads; h++, keys += dim, values += dim) {
            int64_t at = block * a->block_stride + h * a->head_stride;
            if (w->k_norm) normalise(keys, w->k_norm, keys, dim, a->eps);
            rotate(a, keys, a->positions[t]);
            if (a->mixed_half) mix_key(a, keys);
            if (a->v_norm) normalise(values, a->v_norm, values, dim, a->eps);
            write_kv(a, w->pool, at, offset, keys);
            write_kv(a, w->pool, at + a->value_offset, offset, values);
        }
    }
}

/* qkv: [count, (num_heads + 2 * num_kv_heads) * head_dim], of the batch's tokens from `first` on; queries
 * are rotated in place, keys and values go to the pool (first element of the layer's keys in block 0). */
void kvr_rope_write(const Rope *a, float *qkv, const float *q_norm, const float *k_norm, void *pool,
                    int64_t first, int64_t count, int threads) {
    int64_t step = a->qkv_stride < ELEMENTS ? ELEMENTS / a->qkv_stride : 1;
    Write w = {.rope = a, .qkv = qkv, .q_norm = q_norm, .k_norm = k_norm, .pool = pool};
    w.first = first, w.count = count, w.step = step;
    kvr_parallel(threads, (count + step - 1) / step, write_task, &w);
}

static void latent_task(void *arg, int64_t task) {
    const Write *w = arg;
    const Rope *a = w->rope;
    int64_t end = (task + 1) * w->step;
    for (int64_t t = task * w->step; t < end && t < w->count; t++) {
        float *latent = w->latent + t * w->latent_stride;
        int64_t block = a->slots[t] / a->block_size, offset = a->slots[t] % a->block_size;
        for (int64_t h = 0; h < a->num_heads; h++)
            rotate(a, w->qkv + t * w->token_stride + h * w->head_stride, a->positions[t]);
        rotate(a, latent + a->rope_at, a->positions[t]);
        write_kv(a, w->pool, block * a->block_stride, offset, latent);
    }
}

/* Latent attention: q_rope [count, num_heads, rope_dim], of the given strides, and the end of each latent
 * [head_dim] are rotated in place; latents go to the pool. */
void kvr_latent_write(const Rope *a, float *q_rope, int64_t token_stride, int64_t head_stride, float *latent,
                      int64_t latent_stride, void *pool, int64_t count, int threads) {
    int64_t width = a->num_heads * a->rope_dim + a->head_dim;
    int64_t step = width < ELEMENTS ? ELEMENTS / width : 1;
    Write w = {.rope = a, .qkv = q_rope, .latent = latent, .pool = pool, .step = step};
    w.token_stride = token_stride, w.head_stride = head_stride, w.latent_stride = latent_stride;
    w.count = count;
    kvr_parallel(threads, (count + step - 1) / step, latent_task, &w);
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
