/* Vectors, narrow floats, exp and the one matrix micro-kernel that every CPU kernel here is made of.
 *
 * Sums are float32. FP8 is storage; bfloat16 is that, or what factors are rounded to (linear.h).
 * Vectors are the compiler's own vector types, so the same source serves AVX2, AVX-512 and NEON. */
#ifndef KVRELAY_COMMON_H
#define KVRELAY_COMMON_H

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
typedef uint32_t word __attribute__((may_alias)); /* two numbers */
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef uint16_t vhu __attribute__((vector_size(VL * 2), aligned(2), may_alias));
typedef uint16_t vh2 __attribute__((vector_size(VL * 4)));
typedef uint16_t vh2u __attribute__((vector_size(VL * 4), aligned(2), may_alias));
typedef int16_t vs __attribute__((vector_size(VL * 2)));
typedef int8_t vb __attribute__((vector_size(VL)));
typedef int8_t vbu __attribute__((vector_size(VL), aligned(1), may_alias));

enum { KV_FLOAT32, KV_BFLOAT16, KV_FLOAT8 }; /* how the KV pool stores numbers */

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
INLINE vh narrow(vf x) {
#if defined(__AVX512BF16__) && VL == 16
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    return round_bf16(x);
#endif
}

INLINE vh2 narrow_both(vf first, vf second) {
#if defined(__AVX512BF16__) && VL == 16
    return (vh2)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
    vh both[2] = {round_bf16(first), round_bf16(second)};
    vh2 joined;
    memcpy(&joined, both, sizeof joined);
    return joined;
#endif
}

/* sum += the products of both bfloat16 numbers of each pair. Where a CPU has this, it takes numbers
 * below the least normal one as zeros. */
INLINE vf add_bf16_pairs(vf sum, vu a, vu b) {
#if defined(__AVX512BF16__) && VL == 16
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum += (vf)(a << 16) * (vf)(b << 16);
    return sum + (vf)(a & 0xffff0000u) * (vf)(b & 0xffff0000u);
#endif
}

INLINE vf widen_kv(const uint16_t *p) {
    return (vf)(__builtin_convertvector(*(const vhu *)p, vu) << 16);
}

/* e4m3 numbers times 2^-8, widened by way of half floats: those have the same fields with one more
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

INLINE vi larger(vi a, vi b) {
#if defined(__AVX512F__)
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    vi more = a > b;
    return (a & more) | (b & ~more);
#endif
}

INLINE vf vmin(vf a, vf b) { return -vmax(-a, -b); }

/* Lane i is lane from[i] of `a`, or from VL on of `b`; `from` has to be known when this is compiled. */
INLINE vf pick_lanes(vf a, vf b, vi from) {
#if defined(__clang__) /* it has no shuffle by a vector, and needs none */
    vf picked;
    UNROLL for (int i = 0; i < VL; i++) picked[i] = from[i] < VL ? a[from[i]] : b[from[i] - VL];
    return picked;
#else
    return __builtin_shuffle(a, b, from);
#endif
}

/* VL numbers of each from the one `at` on, by turns: one of `a` first. */
INLINE vh2 by_turns(vh2 a, vh2 b, int at) {
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

INLINE vi all_lanes(void) { /* 0, 1, 2... */
    vi lanes;
    UNROLL for (int i = 0; i < VL; i++) lanes[i] = i;
    return lanes;
}

/* Each lane's number to the lane whose number differs by the bit `width`. */
INLINE vf swap_lanes(vf v, int width) { return pick_lanes(v, v, all_lanes() ^ width); }

INLINE float max_lanes(vf v) {
    UNROLL for (int width = VL / 2; width > 0; width /= 2) v = vmax(v, swap_lanes(v, width));
    return v[0];
}

/* Vectors as the rows of a square, which is turned: lane j of vector i goes to lane i of vector j. */
INLINE void turn_lanes(vf *rows) {
    vi lanes = all_lanes();
    UNROLL for (int width = 1; width < VL; width *= 2) {
        vi upper = (lanes & width) != 0;
        vi low = (lanes & ~upper) | ((lanes + VL - width) & upper);
        UNROLL for (int i = 0; i < VL; i++) {
            if (i & width) continue;
            vf a = rows[i], b = rows[i + width];
            rows[i] = pick_lanes(a, b, low), rows[i + width] = pick_lanes(a, b, low + width);
        }
    }
}

/* exp with a relative error below 2e-7: 2^n * poly(r), |r| <= ln2 / 2. Zero below -87. */
INLINE vf vexp(vf x) {
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vi alive = x > splat(-87.0f);
    x = (vf)((vi)x & alive);
    x = vmin(x, splat(88.0f));
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

/* exp with a relative error below 4e-6, for what is rounded to less. Zero below -87, as denormal results
 * would take a CPU a hundred times as long. */
INLINE vf vexp_rough(vf x) {
#if defined(__AVX512F__)
    const vf least = splat(-87.0f);
    __mmask16 alive = _mm512_cmp_ps_mask((__m512)x, (__m512)least, _CMP_NLT_UQ);
    x = vmax(x, least) * 1.44269504088896341f;
    __m512 n = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
    vf r = x - (vf)n;
    vf p = splat(9.58285275e-03f);
    p = p * r + 5.59064250e-02f;
    p = p * r + 2.40240986e-01f;
    p = p * r + 6.93124193e-01f;
    p = p * r + 1.0f;
    return (vf)_mm512_maskz_scalef_ps(alive, (__m512)p, n);
#else
    return vexp(x);
#endif
}

/* tanh with a relative error below 1e-6: from exp, and near zero, where that cancels, a series. */
INLINE vf vtanh(vf x) {
    vf square = x * x;
    vf series = ((square * -0.0539682540f + 0.1333333333f) * square - 0.3333333333f) * square;
    vf whole = 1.0f - 2.0f / (vexp(x + x) + 1.0f);
    vi small = square < splat(0.04f);
    return (vf)(((vi)(series * x + x) & small) | ((vi)whole & ~small));
}

enum { NO_ACTIVATION, SILU, GELU_TANH };

/* Both are gates: g / (1 + exp(-u)). The tanh form of GELU is one: (1 + tanh(v)) / 2 = 1 / (1 + exp(-2v)). */
INLINE vf gate_argument(vf g, int activation) {
    return activation == GELU_TANH ? (g * g * 0.0713548163f + 1.5957691216f) * g : g;
}

INLINE vf gate_of(vf g, int activation) {
    return g / (vexp(-gate_argument(g, activation)) + 1.0f);
}

/* The same for what is rounded to bfloat16. */
INLINE vf rough_gate_of(vf g, int activation) {
#if defined(__AVX512F__)
    vf whole = vexp_rough(vmin(-gate_argument(g, activation), splat(80.0f))) + 1.0f;
    vf part = (vf)_mm512_rcp14_ps((__m512)whole); /* a division would take longer than the exp */
    return g * (part * (2.0f - whole * part));
#else
    return gate_of(g, activation);
#endif
}

INLINE void sum_and_difference(float *first, float *second) {
    float a = *first, b = *second;
    *first = a + b, *second = a - b;
}

/* Two halves of a vector times a Hadamard matrix (fp8.py). */
static inline void hadamard(float *x, int64_t half) {
    for (int64_t width = 1; half % (2 * width) == 0; width *= 2)
        for (int64_t i = 0; i < 2 * half; i += 2 * width)
            for (int64_t j = i; j < i + width; j++) sum_and_difference(x + j, x + j + width);
    for (int64_t j = 0; j < half; j++) sum_and_difference(x + j, x + j + half);
}

INLINE void sums_and_differences(float *first, float *second) {
    vf a = load(first), b = load(second);
    store(first, a + b);
    store(second, a - b);
}

/* The same, a vector at a time. */
static inline void hadamard_row(float *x, int64_t half) {
    if (half % VL) {
        hadamard(x, half);
        return;
    }
    vi lanes = all_lanes();
    for (int64_t i = 0; i < 2 * half; i += VL) {
        vf v = load(x + i);
        UNROLL for (int width = 1; width < VL; width *= 2) {
            vi minus = ((lanes & width) != 0) & INT32_MIN; /* in the upper lane of each pair */
            v = swap_lanes(v, width) + (vf)((vi)v ^ minus);
        }
        store(x + i, v);
    }
    for (int64_t width = VL; half % (2 * width) == 0; width *= 2)
        for (int64_t i = 0; i < 2 * half; i += 2 * width)
            for (int64_t j = i; j < i + width; j += VL) sums_and_differences(x + j, x + j + width);
    for (int64_t j = 0; j < half; j += VL) sums_and_differences(x + j, x + j + half);
}

/* How many of its numbers are mixed with each other. */
INLINE int64_t mixed_size(int64_t half) { return 2 * (half & -half); }

/* c[rows, cols * VL] = (keep ? c : init) + a[rows, depth] @ b[depth, cols * VL]. Element (r, d) of
 * a is a[r * row + d * step]. Meanwhile memory from `ahead` on is fetched, `pace` bytes for each depth.
 * `rows` and `cols` are constants at every call, so that accumulators live in registers. */
INLINE void micro(int rows, int cols, int64_t depth, const float *a, int64_t row, int64_t step,
                  const float *b, int64_t ldb, float *c, int64_t ldc, int keep,
                  const float *init, const char *ahead, int64_t pace) {
    vf acc[MR][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < cols; j++)
            acc[r][j] = keep ? load(c + r * ldc + j * VL)
                             : (init ? load(init + j * VL) : splat(0));
    for (int64_t d = 0; d < depth; d++) {
        vf right[2];
        if (pace) __builtin_prefetch(ahead + d * pace);
        UNROLL for (int j = 0; j < cols; j++) right[j] = load(b + d * ldb + j * VL);
        UNROLL for (int r = 0; r < rows; r++) {
            vf left = splat(a[r * row + d * step]);
            UNROLL for (int j = 0; j < cols; j++) acc[r][j] += left * right[j];
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < cols; j++) store(c + r * ldc + j * VL, acc[r][j]);
}

/* The same of pairs of bfloat16 numbers, `depth` pairs, each of which fetches a line. */
INLINE void micro_pairs(int rows, int cols, int64_t depth, const word *a, int64_t row,
                        int64_t step, const word *b, int64_t ldb, float *c, int64_t ldc, int keep,
                        const char *ahead) {
    vf acc[MR][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < cols; j++)
            acc[r][j] = keep ? load(c + r * ldc + j * VL) : splat(0);
    for (int64_t d = 0; d < depth; d++) {
        vu right[2];
        __builtin_prefetch(ahead + d * 64);
        UNROLL for (int j = 0; j < cols; j++) right[j] = *(const vuu *)(b + d * ldb + j * VL);
        UNROLL for (int r = 0; r < rows; r++) {
            vu left = a[r * row + d * step] - (vu){0};
            UNROLL for (int j = 0; j < cols; j++)
                acc[r][j] = add_bf16_pairs(acc[r][j], right[j], left);
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
