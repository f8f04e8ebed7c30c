/* Matrix products: what Python calls, and how it names a packed weight. cffi reads this file too: it
 * has declarations only. */
#pragma once

#include <stdint.h>

/* How a packed weight is stored and what arithmetic its GEMM uses (layout.h). */
enum { FLOAT32, BF16, INT8, BF16_PAIRS, FP16, AMX, INT16, INT4 };

/* A weight [rows, depth], packed by kvr_pack. */
typedef struct {
    const void *packed;
    const float *bias; /* NULL: none */
    int64_t rows, depth;
    int64_t kind;
    int64_t number; /* among the matrices of a model */
} Matrix;

/* Floats in a vector register. */
int64_t kvr_vector_width(void);

/* Whether a GEMM of this kind is faster than float32 on this CPU. */
int kvr_multiplies(int kind);

/* Bytes of a weight [m, k] once it is packed. */
int64_t kvr_packed_bytes(int64_t m, int64_t k, int kind);

/* w: [m, k] row-major, float32, bfloat16, int8 or for INT4 uint8; gated: [gate; up]. scales: bfloat16
 * [m, ceil(k / INT8_GROUP)] of INT8, [m, ceil(k / INT4_GROUP), 2] of INT4: scale and offset. packed:
 * kvr_packed_bytes of memory. */
void kvr_pack(const void *w, int64_t m, int64_t k, int kind, int gated, const uint16_t *scales,
              void *packed, int threads);

/* y = x @ W^T (+ bias). x: [n, k], y: [n, m], float32, rows `ldx` and `ldy` apart. keep: add to y
 * instead of setting it, without a bias. With an activation the matrix is gated, and y is
 * [n, m / 2]; added: NULL, or what each of the matrix' results is added to, [n, m] in the order of a
 * packed gated matrix, m rounded up to whole panels. */
void kvr_linear(const float *x, int64_t n, int64_t ldx, int64_t k, const void *packed, int kind,
                int64_t m, const float *bias, float *y, int64_t ldy, int keep, int activation,
                const float *added, int threads);

/* A matrix for each head. x: [rows, heads, k], y: [rows, heads, m]; rows are `ldx` and `ldy` apart,
 * heads `x_step` and `y_step`. packed: a matrix [m, k] of each head, one after the other. */
void kvr_heads(const float *x, int64_t ldx, int64_t x_step, const char *packed, int kind, int64_t k,
               int64_t m, int64_t heads, int64_t rows, float *y, int64_t ldy, int64_t y_step,
               int threads);
