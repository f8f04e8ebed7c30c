/* What stands between the matrix products of a layer: RMSNorm, rotary positions with the write to
 * the KV pool, and the gated activation. Small batches stay on the calling thread. */
#include "common.h"

#define ALONE 16384 /* elements below which waking other threads costs more than it saves */

INLINE float inverse_rms(const float *x, int64_t width, float eps) {
    vf sum = splat(0);
    int64_t i = 0;
    for (; i + VL <= width; i += VL) sum += load(x + i) * load(x + i);
    float total = sum_lanes(sum);
    for (; i < width; i++) total += x[i] * x[i];
    return 1.0f / sqrtf(total / (float)width + eps);
}

/* y[rows, width] = x * weight / rms(x), row by row. */
void kvr_rms_norm(const float *x, const float *weight, float *y, int64_t rows, int64_t width,
                  float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > ALONE)
    for (int64_t r = 0; r < rows; r++) {
        const float *from = x + r * width;
        float scale = inverse_rms(from, width, eps);
        for (int64_t i = 0; i < width; i++) y[r * width + i] = from[i] * scale * weight[i];
    }
}

/* out[rows, width] = silu(gate) * up, where gate_up is [rows, 2 * width]. */
void kvr_swiglu(const float *gate_up, float *out, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > ALONE)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = gate_up + r * 2 * width, *up = gate + width;
        float *to = out + r * width;
        int64_t i = 0;
        for (; i + VL <= width; i += VL) {
            vf g = load(gate + i);
            store(to + i, g / (vexp(-g) + 1.0f) * load(up + i));
        }
        for (; i < width; i++) to[i] = gate[i] / (expf(-gate[i]) + 1.0f) * up[i];
    }
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

/* qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; queries are rotated in place, keys
 * and values go to the pool (first element of the layer's keys in block 0). */
void kvr_rope_write(const Rope *a, float *qkv, const float *q_norm, const float *k_norm,
                    void *pool) {
    int64_t dim = a->head_dim;
#pragma omp parallel for schedule(static) num_threads(a->threads) \
    if (a->num_tokens * a->qkv_stride > ALONE)
    for (int64_t t = 0; t < a->num_tokens; t++) {
        float *heads = qkv + t * a->qkv_stride;
        float *keys = heads + a->num_heads * dim, *values = keys + a->num_kv_heads * dim;
        int64_t block = a->slots[t] / a->block_size, offset = a->slots[t] % a->block_size;
        for (int64_t h = 0; h < a->num_heads; h++)
            rotate(a, heads + h * dim, q_norm, a->positions[t]);
        for (int64_t h = 0; h < a->num_kv_heads; h++) {
            int64_t at = block * a->block_stride + (h * a->block_size + offset) * dim;
            rotate(a, keys + h * dim, k_norm, a->positions[t]);
            write_kv(pool, at, keys + h * dim, dim, a->kv_bf16);
            write_kv(pool, at + a->value_offset, values + h * dim, dim, a->kv_bf16);
        }
    }
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
