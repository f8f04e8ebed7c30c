/* Vectors of floats and integers, the size of a register, and what moves their lanes.
 *
 * They are the compiler's own vector types, so the same source serves AVX2, AVX-512 and NEON. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VL 16 /* floats in a vector */
#elif defined(__AVX__)
#define VL 8
#else
#define VL 4
#endif

#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VL * 4)));
typedef float vfu __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef int32_t viu __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef float v4 __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint32_t vuu __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint32_t word __attribute__((may_alias)); /* two numbers */
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef uint16_t vhu __attribute__((vector_size(VL * 2), aligned(2), may_alias));
typedef uint16_t vh2 __attribute__((vector_size(VL * 4)));
typedef uint16_t vh2u __attribute__((vector_size(VL * 4), aligned(2), may_alias));
typedef int16_t vs __attribute__((vector_size(VL * 2)));
typedef int8_t vb __attribute__((vector_size(VL)));
typedef int8_t vbu __attribute__((vector_size(VL), aligned(1), may_alias));

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

INLINE vf vmax(vf a, vf b) { /* NaN in b is passed over */
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)b, (__m512)a);
#elif defined(__AVX__) && VL == 8
    return (vf)_mm256_max_ps((__m256)b, (__m256)a);
#else
    vi more = b > a;
    return (vf)(((vi)b & more) | ((vi)a & ~more));
#endif
}

INLINE vi max_int(vi a, vi b) {
#if defined(__AVX512F__)
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    vi more = a > b;
    return (a & more) | (b & ~more);
#endif
}

INLINE vf vmin(vf a, vf b) { return -vmax(-a, -b); }

/* Lane i is lane from[i] of `a`, or from VL on of `b`; `from` has to be known when this is compiled. */
INLINE vf shuffle_lanes(vf a, vf b, vi from) {
#if defined(__clang__) /* it has no shuffle by a vector, and needs none */
    vf picked;
    UNROLL for (int i = 0; i < VL; i++) picked[i] = from[i] < VL ? a[from[i]] : b[from[i] - VL];
    return picked;
#else
    return __builtin_shuffle(a, b, from);
#endif
}

/* VL numbers of each from the one `at` on, by turns: one of `a` first. */
INLINE vh2 interleave(vh2 a, vh2 b, int at) {
    vh2 from;
    _Pragma("GCC unroll 32") for (int i = 0; i < 2 * VL; i++) from[i] = at + i / 2 + i % 2 * 2 * VL;
#if defined(__clang__)
    vh2 picked;
    _Pragma("GCC unroll 32") for (int i = 0; i < 2 * VL; i++) picked[i] = (i % 2 ? b : a)[at + i / 2];
    return picked;
#else
    return __builtin_shuffle(a, b, from);
#endif
}

INLINE vi lane_numbers(void) { /* 0, 1, 2... */
    vi lanes;
    UNROLL for (int i = 0; i < VL; i++) lanes[i] = i;
    return lanes;
}

/* Each lane's number to the lane whose number differs by the bit `width`. */
INLINE vf swap_lanes(vf v, int width) { return shuffle_lanes(v, v, lane_numbers() ^ width); }

INLINE float max_lanes(vf v) {
    UNROLL for (int width = VL / 2; width > 0; width /= 2) v = vmax(v, swap_lanes(v, width));
    return v[0];
}

/* Vectors as the rows of a square, which is turned: lane j of vector i goes to lane i of vector j. */
INLINE void transpose_lanes(vf *rows) {
    vi lanes = lane_numbers();
    UNROLL for (int width = 1; width < VL; width *= 2) {
        vi upper = (lanes & width) != 0;
        vi low = (lanes & ~upper) | ((lanes + VL - width) & upper);
        UNROLL for (int i = 0; i < VL; i++) {
            if (i & width) continue;
            vf a = rows[i], b = rows[i + width];
            rows[i] = shuffle_lanes(a, b, low), rows[i + width] = shuffle_lanes(a, b, low + width);
        }
    }
}
