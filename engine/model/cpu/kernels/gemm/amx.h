/* Tiles of a matrix unit (AMX): 16 rows of 64 bytes. Of bfloat16, c += a @ b takes 16 words of each row of
 * `a`, one word of b's rows for each column, and adds up both numbers of a word in float32: first the lower
 * ones of all 16 words, then the upper ones, then both, and that to c. Numbers below the least normal one
 * count as zeros. */
#pragma once

#include "micro.h"

#define AMX_TILE 16 /* rows, and words of a row */

/* What is done besides, twice for every AMX_TILE words of depth, after a product with each `half` of the columns: a
 * CPU's other units have time. */
typedef void Beside(void *with, int half);

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512VBMI__) && VL == 16
#define HAS_AMX 1

#define SETTLED() __asm__ __volatile__("" ::: "memory") /* what was written is in memory */

/* Tiles 0 to 3 are sums, [row half * 2 + column half], 4 and 5 rows, 6 and 7 columns. Between these two
 * calls a thread has tiles; none are kept while it does something else. */
INLINE void amx_begin(void) {
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } whole = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&whole);
}

INLINE void amx_end(void) { _tile_release(); }

/* c[rows, NR] = (keep ? c : 0) + a[rows, depth] @ b[depth, NR], of words; depth is a multiple of AMX_TILE.
 * Rows are 1 or 2 tiles: all of them are read and written. Strides count words and floats. Rows that stream
 * do not drive what is in the L1 cache out of it. */
INLINE void micro_amx(int tiles, int64_t depth, const word *a, int64_t lda, int streams, const word *b,
                        int64_t ldb, float *c, int64_t ldc, int keep, Beside *beside, void *with) {
    float *below = c + AMX_TILE * ldc;
    SETTLED();
    if (keep) {
        _tile_loadd(0, c, 4 * ldc);
        _tile_loadd(1, c + VL, 4 * ldc);
        if (tiles == 2) _tile_loadd(2, below, 4 * ldc);
        if (tiles == 2) _tile_loadd(3, below + VL, 4 * ldc);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (tiles == 2) _tile_zero(2);
        if (tiles == 2) _tile_zero(3);
    }
    for (int64_t d = 0; d < depth; d += AMX_TILE, a += AMX_TILE, b += AMX_TILE * ldb) {
        if (streams)
            _tile_stream_loadd(4, a, 4 * lda);
        else
            _tile_loadd(4, a, 4 * lda);
        _tile_loadd(6, b, 4 * ldb);
        _tile_dpbf16ps(0, 4, 6);
        beside(with, 0);
        _tile_loadd(7, b + VL, 4 * ldb);
        _tile_dpbf16ps(1, 4, 7);
        beside(with, 1);
        if (tiles == 1) continue;
        if (streams)
            _tile_stream_loadd(5, a + AMX_TILE * lda, 4 * lda);
        else
            _tile_loadd(5, a + AMX_TILE * lda, 4 * lda);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, 4 * ldc);
    _tile_stored(1, c + VL, 4 * ldc);
    if (tiles == 2) _tile_stored(2, below, 4 * ldc);
    if (tiles == 2) _tile_stored(3, below + VL, 4 * ldc);
}

#else /* never asked for */

INLINE void amx_begin(void) {}
INLINE void amx_end(void) {}
INLINE void micro_amx(int tiles, int64_t depth, const word *a, int64_t lda, int streams, const word *b,
                        int64_t ldb, float *c, int64_t ldc, int keep, Beside *beside, void *with) {}

#endif

/* Of up to two tiles of rows, whole ones of which are read and written. */
INLINE void amx_rows(int64_t rows, int64_t depth, const word *a, int64_t lda, int streams, const word *b,
                      int64_t ldb, float *c, int64_t ldc, int keep, Beside *beside, void *with) {
    if (rows > AMX_TILE)
        micro_amx(2, depth, a, lda, streams, b, ldb, c, ldc, keep, beside, with);
    else
        micro_amx(1, depth, a, lda, streams, b, ldb, c, ldc, keep, beside, with);
}
