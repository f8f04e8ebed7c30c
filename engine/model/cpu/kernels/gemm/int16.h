/* 16-bit integers: sums of their products, which are exact, and numbers that become integers.
 *
 * A number is an integer times a scale that some numbers share. Two of them share a word; sums of products
 * are int32, so that how many there are and how large they may be is decided together. */
#pragma once

#include "micro.h"

#define KEY_BITS 12 /* of keys and values, beside the sign: bfloat16 numbers are exact within 5 powers of two */
#define MOST_OF_INT16 8191 /* of inputs, queries and weights of attention, at most */
#define LEAST_INPUT 1e-30f /* numbers that share a scale, if all are smaller, count as zeros */
#define ROUNDER 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer, which lies in the lower bits then */

typedef int16_t vp __attribute__((vector_size(VL * 4))); /* of each output two depths */
typedef int16_t vpu __attribute__((vector_size(VL * 4), aligned(2), may_alias));

/* Ends the expression that makes x: GCC neither fuses nor reorders it with what follows. */
#if defined(__AVX512F__)
#define IN_ORDER(x) __asm__("" : "+v"(x)) /* all 32 registers */
#elif defined(__SSE2__)
#define IN_ORDER(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__)
#define IN_ORDER(x) __asm__("" : "+w"(x))
#else
#define IN_ORDER(x)
#endif

/* sum += the gemms of both depths of each pair. */
INLINE vi add_pairs(vi sum, vp a, vp b) {
#if defined(__AVX512VNNI__) && VL == 16
    sum = (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__) && VL == 16
    sum += (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__) && VL == 8
    sum = (vi)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__) && VL == 8
    sum += (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    vi left = (vi)a, right = (vi)b;
    sum += (left << 16 >> 16) * (right << 16 >> 16) + (left >> 16) * (right >> 16);
#endif
    IN_ORDER(sum); /* else it adds up gemms first, and runs out of registers */
    return sum;
}

/* Two depths of a row in all lanes. */
INLINE vp splat_pair(const void *x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (vp)(pair - (vi){0});
}

INLINE vf float_of_sum(vi sum) { return __builtin_convertvector(sum, vf); }

INLINE int32_t most_of_lanes(vi v) {
    UNROLL for (int width = VL / 2; width > 0; width /= 2) v = max_int(v, (vi)swap_lanes((vf)v, width));
    return v[0];
}

INLINE vi magnitudes(vf x) { return (vi)x & INT32_MAX; } /* compare as integers do, NaN above all */

INLINE vh rounded(vf x, float factor) {
    vf scaled = x * factor;
    IN_ORDER(scaled); /* rounded with and without fused multiply-add */
#if defined(__AVX512F__)
    return (vh)_mm512_cvtepi32_epi16((__m512i)(scaled + ROUNDER));
#else
    return __builtin_convertvector((vu)(scaled + ROUNDER), vh);
#endif
}

/* What numbers whose largest magnitude has bits `top` are times to be integers up to `limit`. Their scale is
 * not finite if one of them is not. */
INLINE float int16_factor(int32_t top, float limit, float *scale) {
    float most;
    memcpy(&most, &top, sizeof most);
    *scale = most < LEAST_INPUT ? 0.0f : most / limit;
    return most < LEAST_INPUT ? 0.0f : limit / most;
}

/* x [count] to integers up to `limit`, which may begin at the same address, and of which there is room for
 * an even count; returns their scale. */
INLINE float quantize(const float *x, int64_t count, float limit, int16_t *numbers) {
    int64_t whole = count / VL * VL;
    float rest[VL] = {0}, scale;
    memcpy(rest, x + whole, sizeof(float) * (count - whole));
    vi most = magnitudes(load(rest));
    for (int64_t i = 0; i < whole; i += VL) most = max_int(most, magnitudes(load(x + i)));
    float factor = int16_factor(most_of_lanes(most), limit, &scale);
    for (int64_t i = 0; i < whole; i += VL) *(vhu *)(numbers + i) = rounded(load(x + i), factor);
    vh last = rounded(load(rest), factor);
    memcpy(numbers + whole, &last, sizeof(int16_t) * ((count + 1) / 2 * 2 - whole));
    return scale;
}

/* The same of `count` vectors. */
INLINE float quantize_vectors(const vf *x, int count, float limit, int16_t *numbers) {
    vi most = magnitudes(x[0]);
    float scale;
    UNROLL for (int i = 1; i < count; i++) most = max_int(most, magnitudes(x[i]));
    float factor = int16_factor(most_of_lanes(most), limit, &scale);
    UNROLL for (int i = 0; i < count; i++) *(vhu *)(numbers + i * VL) = rounded(x[i], factor);
    return scale;
}

/* The largest queries of `dim` numbers, so that int32 holds their gemms with keys. */
INLINE float most_of_query(int64_t dim) {
    int64_t most = INT32_MAX / (dim << KEY_BITS);
    return most < MOST_OF_INT16 ? most : MOST_OF_INT16;
}

/* Words of two integers: what the float32 number `lower` is times `low`, and above it `upper` times `high`. */
INLINE vu int16_pair(vu lower, vu upper, vf low, vf high) {
    return ((vu)((vf)lower * low + ROUNDER) & 0xffffu) | (vu)((vf)upper * high + ROUNDER) << 16;
}

/* Words of bfloat16 to integers: the lower numbers times `low`, the upper ones times `high`. */
INLINE vu int16_words(vu words, vf low, vf high) {
    return int16_pair(words << 16, words & 0xffff0000u, low, high);
}

/* As `micro_pairs`, of NR columns; what is added to c is times `scales` [rows]. */
INLINE void micro_int16(int rows, int64_t depth, const word *a, int64_t row, int64_t step,
                           const word *b, int64_t ldb, float *c, int64_t ldc, int keep,
                           const float *scales, const char *ahead) {
    vi acc[MR][2];
    UNROLL for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = (vi){0};
    for (int64_t d = 0; d < depth; d++) {
        vp low = *(const vpu *)(b + d * ldb), high = *(const vpu *)(b + d * ldb + VL);
        __builtin_prefetch(ahead + d * 64);
        UNROLL for (int r = 0; r < rows; r++) {
            vp pair = splat_pair(a + r * row + d * step);
            acc[r][0] = add_pairs(acc[r][0], low, pair);
            acc[r][1] = add_pairs(acc[r][1], high, pair);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        vf low = float_of_sum(acc[r][0]) * scales[r], high = float_of_sum(acc[r][1]) * scales[r];
        float *to = c + r * ldc;
        store(to, keep ? load(to) + low : low);
        store(to + VL, keep ? load(to + VL) + high : high);
    }
}
