/* Half floats: sums of their products, and bfloat16 numbers that become fp16.
 *
 * A half float has three bits more than bfloat16 and a small range, so numbers are taken relative to a
 * power of two, their scale. Two of them share a word; sums of the lower ones and the upper ones lie
 * apart in fp16 until they are added to float32. */
#pragma once

#include "micro.h"

#define FP16_DEPTHS 128 /* of one sum in fp16: 64 words */
#define BF16_MAGNITUDES 0x7fff7fffu /* of both numbers of a word */
#define EXPONENT 15 /* the one of 1 to 2, and the least one that a scale has */
#define FP16_TOP 6 /* |x| < 2^(TOP + 1) and |w| < 2: sums stay below 2^(TOP + 2) * DEPTHS = 2^15 */

/* x [k] = numbers [even(k)] * *scale, rounded. They may begin at the same address. */
void fp16_row(const float *x, int64_t k, int16_t *numbers, float *scale);

#if defined(__AVX512FP16__) && VL == 16
#define HAS_FP16 1

/* Sums of both halves of each word, of `even` and `odd` by turns. */
INLINE __m512i add_words(__m512h even, __m512h odd) {
    __m512i a = (__m512i)odd, b = (__m512i)even;
    __m512h first = (__m512h)_mm512_shldi_epi32(a, b, 16); /* odd's lower, even's upper half */
    __m512h second = (__m512h)_mm512_mask_blend_epi16(0xaaaaaaaa, b, a);
    return (__m512i)_mm512_add_ph(first, second);
}

INLINE vf lower_fp16(__m512i x) { return (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(x)); }
INLINE vf upper_fp16(__m512i x) { return (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)); }

INLINE __m512h splat_word(const void *from) {
    int32_t both;
    memcpy(&both, from, sizeof both);
    return (__m512h)_mm512_set1_epi32(both);
}

/* As `micro_pairs`, of NR columns; what is added to c is times `scales` [rows]. */
INLINE void micro_fp16(int rows, int64_t depth, const word *a, int64_t row, int64_t step,
                         const word *b, int64_t ldb, float *c, int64_t ldc, int keep,
                         const float *scales, const char *ahead) {
    vh2 apart; /* lanes of `add_words`: the even ones first */
    _Pragma("GCC unroll 32") for (int i = 0; i < 2 * VL; i++) apart[i] = i % VL * 2 + i / VL;
    for (int64_t from = 0, d = 0; from < depth; from = d, keep = 1) {
        int64_t end = depth - from < FP16_DEPTHS / 2 ? depth : from + FP16_DEPTHS / 2;
        __m512h acc[MR][2];
        UNROLL for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ph();
        for (; d < end; d++) {
            __m512h low = _mm512_loadu_ph(b + d * ldb), high = _mm512_loadu_ph(b + d * ldb + VL);
            __builtin_prefetch(ahead + d * 64);
            UNROLL for (int r = 0; r < rows; r++) {
                __m512h both = splat_word(a + r * row + d * step);
                acc[r][0] = _mm512_fmadd_ph(low, both, acc[r][0]);
                acc[r][1] = _mm512_fmadd_ph(high, both, acc[r][1]);
            }
        }
        UNROLL for (int r = 0; r < rows; r++) {
            __m512i sum = add_words(acc[r][0], acc[r][1]);
            sum = _mm512_permutexvar_epi16((__m512i)apart, sum);
            vf low = lower_fp16(sum) * scales[r], high = upper_fp16(sum) * scales[r];
            float *to = c + r * ldc;
            store(to, keep ? load(to) + low : low);
            store(to + VL, keep ? load(to + VL) + high : high);
        }
    }
}

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The scale of numbers whose largest magnitude has bits `top`: not a number if that is not finite.
 * *inverse: 1 / scale. */
INLINE float scale_below(int32_t top, float *inverse) {
    int32_t exponent = top >> 23;
    float one = exponent == 255 ? NAN : 1.0f;
    if (exponent <= FP16_TOP) exponent = FP16_TOP + 1; /* as good as zeros */
    *inverse = float_of((uint32_t)(254 + FP16_TOP - exponent) << 23);
    return one * float_of((uint32_t)(exponent - FP16_TOP) << 23);
}

INLINE __m512i magnitude_of(vf x) { return (__m512i)((vi)x & INT32_MAX); } /* compare as numbers, NaN above */

INLINE void store_fp16(int16_t *to, vf x) { *(vhu *)to = (vhu)_mm512_cvtps_ph((__m512)x, 0); }

/* `count` vectors to numbers; returns their scale. */
INLINE float fp16_vectors(const vf *x, int count, int16_t *numbers) {
    __m512i most = magnitude_of(x[0]);
    float inverse, scale;
    UNROLL for (int i = 1; i < count; i++) most = _mm512_max_epi32(most, magnitude_of(x[i]));
    scale = scale_below(_mm512_reduce_max_epi32(most), &inverse);
    UNROLL for (int i = 0; i < count; i++) store_fp16(numbers + i * VL, x[i] * inverse);
    return scale;
}

/* Words of bfloat16 to fp16, which EXPONENT is the largest exponent of: `low` is that of lower numbers,
 * `high` of upper ones. */
INLINE vu fp16_words(vu words, vu low, vu high) {
    vu down = (low - EXPONENT) << 7 | (high - EXPONENT) << 23;
    __m512i size = (__m512i)(words & BF16_MAGNITUDES);
    size = _mm512_slli_epi16(_mm512_subs_epu16(size, (__m512i)down), 3);
    return (vu)size | (words & ~BF16_MAGNITUDES);
}

#else /* never asked for */

INLINE float fp16_vectors(const vf *x, int count, int16_t *numbers) { return 0; }
INLINE void micro_fp16(int rows, int64_t depth, const word *a, int64_t row, int64_t step,
                         const word *b, int64_t ldb, float *c, int64_t ldc, int keep,
                         const float *scales, const char *ahead) {}
INLINE vu fp16_words(vu words, vu low, vu high) { return words; }

#endif
