/* The micro-kernels in float32 and bfloat16: a tile of MR rows and NR columns in registers. */
#pragma once

#include "../vectors.h"

#if defined(__AVX512F__)
#define MR 12 /* rows of a micro-tile: MR * 2 accumulators fit the registers */
#elif defined(__AVX__)
#define MR 6
#else
#define MR 8
#endif
#define NR (2 * VL) /* columns of a micro-tile */

/* sum += the gemms of both bfloat16 numbers of each pair. Where a CPU has this, it takes numbers
 * below the least normal one as zeros. */
INLINE vf add_bf16_pairs(vf sum, vu a, vu b) {
#if defined(__AVX512BF16__) && VL == 16
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum += (vf)(a << 16) * (vf)(b << 16);
    return sum + (vf)(a & 0xffff0000u) * (vf)(b & 0xffff0000u);
#endif
}

/* c[rows, cols * VL] = (keep ? c : init) + a[rows, depth] @ b[depth, cols * VL]. Element (r, d) of
 * a is a[r * row + d * step]. Meanwhile memory from `ahead` on is fetched, `prefetch_step` bytes for each depth.
 * `rows` and `cols` are constants at every call, so that accumulators live in registers. */
INLINE void micro(int rows, int cols, int64_t depth, const float *a, int64_t row, int64_t step,
                  const float *b, int64_t ldb, float *c, int64_t ldc, int keep,
                  const float *init, const char *ahead, int64_t prefetch_step) {
    vf acc[MR][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < cols; j++)
            acc[r][j] = keep ? load(c + r * ldc + j * VL)
                             : (init ? load(init + j * VL) : splat(0));
    for (int64_t d = 0; d < depth; d++) {
        vf right[2];
        if (prefetch_step) __builtin_prefetch(ahead + d * prefetch_step);
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
