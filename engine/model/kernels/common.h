/* Vectors, bfloat16, exp and the one matrix micro-kernel that every CPU kernel here is made of.
 *
 * All arithmetic is float32. bfloat16 only ever appears as storage (weights, KV cache). Vectors are
 * the compiler's own vector types, so the same source serves AVX2, AVX-512 and NEON. */
#ifndef KVRELAY_COMMON_H
#define KVRELAY_COMMON_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define VL 16 /* floats in a vector */
#define MR 12 /* rows of a micro-tile: MR * 2 accumulators fit the registers */
#elif defined(__AVX__)
#define VL 8
#define MR 6
#else
#define VL 4
#define MR 8
#endif
#define NR (2 * VL) /* columns of a micro-tile */

#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VL * 4)));
typedef float vfu __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef int32_t viu __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef float v4 __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint32_t vuu __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef uint16_t vhu __attribute__((vector_size(VL * 2), aligned(2), may_alias));

INLINE vf load(const float *p) { return *(const vfu *)p; }
INLINE void store(float *p, vf v) { *(vfu *)p = v; }
INLINE vf splat(float x) { return x - (vf){0}; }

INLINE float sum_lanes(vf v) {
    v4 part[VL / 4], sum;
    memcpy(part, &v, sizeof v);
    sum = part[0];
    for (int i = 1; i < VL / 4; i++) sum += part[i];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

INLINE float max_lanes(vf v) {
    float best = v[0];
    for (int i = 1; i < VL; i++) best = v[i] > best ? v[i] : best;
    return best;
}

INLINE float bf16_to_float(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Round to nearest, ties to even, as torch does. NaN stays NaN. */
INLINE uint16_t float_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE vf widen_kv(const uint16_t *p) {
    return (vf)(__builtin_convertvector(*(const vhu *)p, vu) << 16);
}

INLINE vf vmax(vf a, vf b) {
    vi more = b > a;
    return (vf)(((vi)b & more) | ((vi)a & ~more));
}

/* exp with a relative error below 2e-7: 2^n * poly(r), |r| <= ln2 / 2. Zero below -87. */
INLINE vf vexp(vf x) {
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vi alive = x > splat(-87.0f);
    x = (vf)((vi)x & alive);
    vi high = x > splat(88.0f);
    x = (vf)(((vi)x & ~high) | ((vi)splat(88.0f) & high));
    vf n = (x * 1.44269504088896341f + magic) - magic;
    vf r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi scale = (__builtin_convertvector(n, vi) + 127) << 23;
    return (vf)((vi)(p * (vf)scale) & alive);
}

/* c[rows, cols * VL] = (keep ? c : init) + a[rows, depth] @ b[depth, cols * VL]. Element (r, d) of
 * a is a[r * row + d * step]. `rows` and `cols` are constants at every call, so that accumulators
 * live in registers. */
INLINE void micro(int rows, int cols, int64_t depth, const float *a, int64_t row, int64_t step,
                  const float *b, int64_t ldb, float *c, int64_t ldc, int keep,
                  const float *init) {
    vf acc[MR][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < cols; j++)
            acc[r][j] = keep ? load(c + r * ldc + j * VL)
                             : (init ? load(init + j * VL) : splat(0));
    for (int64_t d = 0; d < depth; d++) {
        vf right[2];
        UNROLL for (int j = 0; j < cols; j++) right[j] = load(b + d * ldb + j * VL);
        UNROLL for (int r = 0; r < rows; r++) {
            vf left = splat(a[r * row + d * step]);
            UNROLL for (int j = 0; j < cols; j++) acc[r][j] += left * right[j];
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < cols; j++) store(c + r * ldc + j * VL, acc[r][j]);
}

#if MR == 6
#define EACH_ROWS(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#elif MR == 8
#define EACH_ROWS(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#else
#define EACH_ROWS(CASE) \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) \
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif

/* How many of `left` rows to take next: as few tiles as MR allows, of even height. */
INLINE int64_t even_rows(int64_t left) {
    int64_t tiles = (left + MR - 1) / MR;
    return (left + tiles - 1) / tiles;
}

#endif
