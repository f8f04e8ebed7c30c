/* Many rows times int8 weights by a matrix unit (amx.h): the sums of int8_int16.c, bit for bit.
 *
 * An input of 11 bits is 128 times its upper half and its lower half, each of them a byte. Sums of bytes'
 * gemms are exact, so are both together, and they are scaled and added up as vectors do it. */
#include "../thread_pool.h"
#include "amx.h"
#include "gemm.h"

#ifdef HAS_AMX

#define LOWER 7 /* bits */
#define AMX_TILE_BYTES (AMX_TILE * 64)

/* 16 rows from `row` on to tiles of upper and lower halves, by turns, of each group; zeros behind the last
 * input. Rows from `end` on may hold anything. */
static void split_rows(const Gemm *t, int64_t row, int64_t end, int64_t groups, int8_t *to) {
    for (int64_t r = 0; r < AMX_TILE && row + r < end; r++) {
        const int16_t *x = t->converted_x + (row + r) * even(t->k);
        for (int64_t g = 0; g < groups; g++) {
            int8_t *upper = to + 2 * g * AMX_TILE_BYTES + r * INT8_GROUP, *lower = upper + AMX_TILE_BYTES;
            for (int64_t i = 0; i < INT8_GROUP; i += 32) {
                int64_t left = t->k - g * INT8_GROUP - i;
                __mmask32 there = left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0;
                __m512i numbers = _mm512_maskz_loadu_epi16(there, x + g * INT8_GROUP + i);
                __m512i low = _mm512_and_si512(numbers, _mm512_set1_epi16((1 << LOWER) - 1));
                _mm256_storeu_si256((__m256i *)(upper + i),
                                    _mm512_cvtepi16_epi8(_mm512_srai_epi16(numbers, LOWER)));
                _mm256_storeu_si256((__m256i *)(lower + i), _mm512_cvtepi16_epi8(low));
            }
        }
    }
}

/* A panel as two tiles for each group, whose words are four depths of an output. */
static void unpack_panel(const Gemm *t, const char *panel, int64_t groups, int8_t *to) {
    vi word = lane_numbers() * 4, first = word | (word + 2) << 8 | (word + 64) << 16 | (word + 66) << 24;
    __m512i even_bytes = (__m512i)first, odd_bytes = (__m512i)(first + 0x01010101);
    for (int64_t g = 0; g < groups; g++) {
        const char *lines = panel + depth_at(g * INT8_GROUP, INT8);
        int64_t left = t->k - g * INT8_GROUP, pairs = (left < INT8_GROUP ? left + 1 : INT8_GROUP) / 2;
        for (int64_t q = 0; q < AMX_TILE; q++, to += 64) {
            __m512i a = _mm512_setzero_si512(), b = a;
            if (2 * q < pairs) a = _mm512_loadu_si512(lines + 128 * q);
            if (2 * q + 1 < pairs) b = _mm512_loadu_si512(lines + 128 * q + 64);
            _mm512_storeu_si512(to, _mm512_permutex2var_epi8(a, even_bytes, b));
            _mm512_storeu_si512(to + AMX_TILE_BYTES, _mm512_permutex2var_epi8(a, odd_bytes, b));
        }
        to += AMX_TILE_BYTES;
    }
}

/* Of one group: what 16 rows times 32 outputs come to in upper and in lower halves. */
typedef struct {
    _Alignas(64) int32_t upper[AMX_TILE][NR], lower[AMX_TILE][NR];
} Sums;

INLINE void multiply_group(const int8_t *rows, const int8_t *columns, Sums *to) {
    SETTLED();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, rows, 64);
    _tile_loadd(6, columns, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, columns + AMX_TILE_BYTES, 64);
    _tile_dpbssd(1, 4, 7);
    _tile_loadd(5, rows + AMX_TILE_BYTES, 64);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
    _tile_stored(0, to->upper, 4 * NR);
    _tile_stored(1, &to->upper[0][VL], 4 * NR);
    _tile_stored(2, to->lower, 4 * NR);
    _tile_stored(3, &to->lower[0][VL], 4 * NR);
}

INLINE vf sum_of(const int32_t *upper, const int32_t *lower) {
    return __builtin_convertvector((*(const vi *)upper << LOWER) + *(const vi *)lower, vf);
}

/* 16 rows from `row` on, of which those before `end` are put to y. While a group is scaled the next one is
 * multiplied. */
static void block(const Gemm *t, int64_t row, int64_t end, int64_t panel, int64_t groups,
                  const int8_t *rows, const int8_t *columns) {
    Sums sums[2];
    const char *scales = t->w + panel * t->panel_bytes;
    vf total[AMX_TILE][2] = {0};
    int64_t count = end - row < AMX_TILE ? end - row : AMX_TILE;
    multiply_group(rows, columns, sums);
    for (int64_t g = 0; g < groups; g++) {
        int64_t left = t->k - g * INT8_GROUP, size = even(left < INT8_GROUP ? left : INT8_GROUP);
        const Sums *sum = sums + g % 2;
        vf low, high;
        rows += 2 * AMX_TILE_BYTES, columns += 2 * AMX_TILE_BYTES;
        if (g + 1 < groups) multiply_group(rows, columns, sums + (g + 1) % 2);
        widen_bf16(scales + depth_at(g * INT8_GROUP, INT8) + size * NR, &low, &high);
        const float *x_scales = t->x_scales + row * groups + g;
        for (int64_t r = 0; r < count; r++, x_scales += groups) {
            vf x_scale = splat(*x_scales);
            total[r][0] += sum_of(sum->upper[r], sum->lower[r]) * (low * x_scale);
            total[r][1] += sum_of(sum->upper[r] + VL, sum->lower[r] + VL) * (high * x_scale);
        }
    }
    for (int64_t r = 0; r < count; r++) put(t, row + r, panel, total[r]);
}

void amx_int8_task(const Gemm *t, int64_t start, int64_t end, int64_t first, int64_t last) {
    int64_t groups = num_groups(t->k, INT8), bytes = 2 * groups * AMX_TILE_BYTES;
    int64_t blocks = (end - start + AMX_TILE - 1) / AMX_TILE;
    int8_t *columns = kvr_scratch(SCRATCH_TASK, bytes * (blocks + 1)), *rows = columns + bytes;
    for (int64_t b = 0; b < blocks; b++)
        split_rows(t, start + b * AMX_TILE, end, groups, rows + b * bytes);
    for (int64_t p = first; p < last; p++) {
        unpack_panel(t, t->w + p * t->panel_bytes, groups, columns);
        for (int64_t b = 0; b < blocks; b++)
            block(t, start + b * AMX_TILE, end, p, groups, rows + b * bytes, columns);
    }
}

#else /* never asked for */

void amx_int8_task(const Gemm *t, int64_t start, int64_t end, int64_t first, int64_t last) {}

#endif
