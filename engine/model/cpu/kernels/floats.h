/* bfloat16 and FP8 (e4m3): conversions from and to float32. */
#pragma once

#include "vectors.h"

enum { KV_FLOAT32, KV_BFLOAT16, KV_FLOAT8 }; /* how the KV pool stores numbers */

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

INLINE vu bits_bf16(vf x) { /* in the low half */
    vu bits = (vu)x, whole = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    vu nan = (vu)(x != x);
    return (whole & ~nan) | (nan & 0x7fc0);
}

INLINE vh round_bf16(vf x) { return __builtin_convertvector(bits_bf16(x), vh); }

/* The same of numbers that are used at once: tiny ones and NaN may become what the CPU likes. */
INLINE vh round_bf16_fast(vf x) {
#if defined(__AVX512BF16__) && VL == 16
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    return round_bf16(x);
#endif
}

INLINE vh2 round_bf16_both_fast(vf first, vf second) {
#if defined(__AVX512BF16__) && VL == 16
    return (vh2)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
    vh both[2] = {round_bf16(first), round_bf16(second)};
    vh2 joined;
    memcpy(&joined, both, sizeof joined);
    return joined;
#endif
}

INLINE vf widen_kv(const uint16_t *p) {
    return (vf)(__builtin_convertvector(*(const vhu *)p, vu) << 16);
}

/* e4m3 numbers times 2^-8, widened by way of fp16: those have the same fields with one more
 * bit of exponent, and reading them costs no more for numbers that are subnormal. */
INLINE vf widen_fp8(const uint8_t *p) {
#if defined(__AVX512F__)
    vs half = (vs)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
#elif defined(__F16C__) && VL == 8
    vs half = (vs)_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p));
#else
    vs half = __builtin_convertvector(*(const vbu *)p, vs);
#endif
    half = (half << 7) & (int16_t)0xbf80;
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)half);
#elif defined(__F16C__) && VL == 8
    return (vf)_mm256_cvtph_ps((__m128i)half);
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16((float16x4_t)half);
#else
    vi bits = __builtin_convertvector(half, vi), mag = (bits & 0x7fff) << 13;
    vi tiny = mag < 1 << 23; /* without a leading one: put one in front and take it off again */
    vf value = (vf)(mag + (112 << 23) + (tiny & 1 << 23)) - (vf)(tiny & 113 << 23);
    return (vf)((vi)value | (bits & INT32_MIN));
#endif
}

/* The E8M0 byte of a vector whose largest magnitude is `most`: the smallest power of two that
 * brings it to 448, the end of e4m3, or below; 1.0 for a vector of zeros. */
INLINE int32_t fp8_scale(float most) {
    int32_t bits, byte;
    memcpy(&bits, &most, 4);
    if (!bits) return 127;
    byte = (bits >> 23) - 8 + ((bits & 0x7fffff) > 0x600000); /* 448 = 1.75 * 2^8 */
    return byte < 1 ? 1 : byte > 253 ? 253 : byte;
}

/* e4m3 bytes of |x| <= 448: round to nearest, ties to even, as torch does. */
INLINE vi round_fp8(vf x) {
    vi bits = (vi)x, sign = (bits >> 24) & 0x80, mag = bits & 0x7fffffff;
    vi tiny = mag < 121 << 23; /* below 2^-6 numbers are multiples of 2^-9 */
    vi small = (vi)((vf)mag + 16384.0f) - (141 << 23);
    vi large = ((mag + 0x7ffff + (mag >> 20 & 1)) >> 20) - (120 << 3);
    vi code = (small & tiny) | (large & ~tiny), over = code > 0x7e;
    return (code & ~over) | (over & 0x7e) | sign;
}
