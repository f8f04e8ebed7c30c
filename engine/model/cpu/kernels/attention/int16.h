/* Attention in int16 (gemm/int16.h): how keys and values are converted, and scores of few rows.
 *
 * A key has a scale, and so has a value: a power of two that follows from its largest number. Sums of products
 * are exact in any order. Many rows take transposed keys, as of the other kinds; few rows read K in the
 * pool's layout, and their lanes are added up for VL keys at once. Values become pairs of two positions each: of every 2 * VL columns those of
 * even number come first, which takes no shuffles, and `interleave_columns` puts them right in the end. */
#pragma once

#include "keys.h"

#define FEW_ROWS (VL == 16 ? 8 : 0) /* for more, or with fewer registers, it is worth it to turn keys */
#define MOST_DIM 256 /* of keys that are not */

/* One vector of VL: lane i is what the lanes of vector i, which are overwritten, come to. */
INLINE vi reduce_to_lanes(vi *v, int largest) {
    vi lanes = lane_numbers();
    UNROLL for (int half = VL / 2; half > 0; half /= 2) {
        vi from = lanes / (2 * half) * (2 * half) + lanes % half + (lanes / half % 2) * VL;
        UNROLL for (int i = 0; i < VL / 2; i++) {
            if (i >= half) continue;
            vf a = (vf)v[i], b = (vf)v[i + half];
            vi low = (vi)shuffle_lanes(a, b, from), high = (vi)shuffle_lanes(a, b, from + half);
            v[i] = largest ? (vi)max_magnitudes((vu)low, (vu)high) : low + high;
        }
    }
    return v[0];
}

/* The exponents of VL keys or values [dim]. Memory `ahead` elements from them on is fetched. */
INLINE vu exponents_of(const uint16_t *const *at, int64_t dim, int64_t ahead) {
    vi most[VL];
    UNROLL for (int j = 0; j < VL; j++) {
        vu sizes = {0};
        for (int64_t d = 0; d < dim; d += 2 * VL) {
            sizes = max_magnitudes(sizes, *(const vuu *)(at[j] + d) & BF16_MAGNITUDES);
            __builtin_prefetch(at[j] + d + ahead);
        }
        most[j] = (vi)sizes;
    }
    vu words = (vu)reduce_to_lanes(most, 1);
    return exponent_of((vu)max_int((vi)(words >> 16), (vi)(words & 0xffff)));
}

/* Scores [rows, KEYS] of queries [rows, dim / 2] with keys [from, to) of a chunk, which lie `at` [KEYS]; beside
 * them nothing is scored. */
INLINE void few_scores(int64_t dim, int64_t rows, const word *queries, const float *q_scales, int64_t from,
                       int64_t to, const uint16_t *const *at, int64_t values_at, float *scores, float *scales,
                       Prefetch *ahead) {
    vu keys[VL * MOST_DIM / (2 * VL)];
    const int64_t half = dim / 2, vectors = half / VL;
    for (int64_t i = 0; i < KEYS; i += VL) {
        if (i + VL <= from || i >= to) {
            store(scales + i, splat(0));
            for (int64_t r = 0; r < rows; r++) store(scores + r * KEYS + i, splat(0));
            continue;
        }
        const uint16_t *key[VL];
        float inverse[VL];
        UNROLL for (int j = 0; j < VL; j++) key[j] = at[i + j < from ? from : i + j < to ? i + j : to - 1];
        vu exponent = exponents_of(key, dim, values_at);
        store(scales + i, scale_of(INT16, exponent));
        store(inverse, inverse_scales(exponent));
        for (int64_t j = 0; j < VL; j++) {
            const char *next = take(ahead, 32 * vectors);
            vf times = splat(inverse[j]);
            for (int64_t w = 0; w < vectors; w++) {
                keys[j * vectors + w] = int16_words(*(const vuu *)(key[j] + 2 * VL * w), times, times);
                if (w % 2 == 0) continue;
                __builtin_prefetch(next + 32 * (w - 1));
                __builtin_prefetch(next + 2 * values_at + 32 * (w - 1), 0, 2); /* to L2; to L1 with its key */
            }
        }
        for (int64_t r = 0; r < rows; r++) {
            vi sums[VL];
            UNROLL for (int j = 0; j < VL; j++) {
                sums[j] = (vi){0};
                for (int64_t w = 0; w < vectors; w++) {
                    vp query = *(const vpu *)(queries + r * half + w * VL);
                    sums[j] = add_pairs(sums[j], query, (vp)keys[j * vectors + w]);
                }
            }
            store(scores + r * KEYS + i, float_of_sum(reduce_to_lanes(sums, 0)) * q_scales[r]);
        }
    }
}

/* Values [count] to pairs of integers [(count + 1) / 2, ld]; VL - 1 more scales may be written. What a last one
 * without a second is beside is of no matter: no row gives it a weight. */
static void int16_values(const uint16_t *const *values, int64_t count, int64_t width, word *pairs, int64_t ld,
                           float *scales) {
    for (int64_t i = 0; i < count; i += VL) {
        const uint16_t *at[VL];
        float inverse[VL];
        UNROLL for (int j = 0; j < VL; j++) at[j] = values[i + j < count ? i + j : count - 1];
        vu exponent = exponents_of(at, width, 0);
        store(scales + i, scale_of(INT16, exponent));
        store(inverse, inverse_scales(exponent));
        for (int64_t j = 0; j < VL && i + j < count; j += 2) {
            vf low = splat(inverse[j]), high = splat(inverse[j + 1]);
            word *to = pairs + (i + j) / 2 * ld;
            for (int64_t d = 0; d < width; d += 2 * VL) {
                vu first = *(const vuu *)(at[j] + d), second = *(const vuu *)(at[j + 1] + d);
                *(vuu *)(to + d) = int16_pair(first << 16, second << 16, low, high);
                *(vuu *)(to + d + VL) = int16_pair(first & 0xffff0000u, second & 0xffff0000u, low, high);
            }
        }
    }
}

INLINE void interleave_columns(float *x, int64_t width) {
    vi turns = lane_numbers() / 2 + lane_numbers() % 2 * VL;
    for (int64_t d = 0; d < width; d += 2 * VL) {
        vf even = load(x + d), odd = load(x + d + VL);
        store(x + d, shuffle_lanes(even, odd, turns));
        store(x + d + VL, shuffle_lanes(even, odd, turns + VL / 2));
    }
}
