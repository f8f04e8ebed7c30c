/* How weights lie in memory: shared by packing and by the gemms with them.
 *
 * A matrix [m, k] is packed into panels of NR outputs: reading one is a sequential stream, which is
 * what decoding is bound by. Weights that were bfloat16 in the checkpoint stay so in memory: half
 * the bytes, and the very same gemms as in float32. Of each depth (input) a panel holds NR
 * numbers, of as many rows of the matrix one after the other; of a gated matrix, [gate; up], VL rows
 * of the gate and the same VL of the other half. Numbers lie:
 * - FLOAT32: as they are;
 * - BF16: the word j holds output j (low half) and output j + VL (high half), so that a shift and a
 *   mask widen it;
 * - BF16_PAIRS, bfloat16 too, for GEMMs in bfloat16: two depths of output j share the word j, the first
 *   in its low half. Depths are even in number, if need be by one of zeros;
 * - AMX: as BF16_PAIRS, but depths are a multiple of AMX_DEPTHS, for a matrix unit;
 * - FP16, fp16 of a bfloat16 matrix: as BF16_PAIRS, but the word j is of output 2 j, and the one
 *   VL further on of output 2 j + 1. A panel ends with a float32 scale for each output;
 * - INT16, integers of a bfloat16 matrix: as BF16_PAIRS, and a panel ends as one of FP16 does;
 * - INT8: two depths share the word j, from its low byte on: outputs j and j + VL of the first, then
 *   of the second. INT8_GROUP depths are followed by their NR scales, which lie as a depth of BF16
 *   does;
 * - INT4: four depths share the word j, a byte each: output j in its low half, j + VL in the other.
 *   Depths are a multiple of eight in number. INT4_GROUP of them are followed by NR scales, as those of
 *   INT8, and by NR offsets. */
#pragma once

#include "api.h"
#include "micro.h"

#define INT8_GROUP 64
#define INT4_GROUP 32
#define INT16_GROUP 256 /* depths whose inputs share a unit */
#define AMX_DEPTHS 32

INLINE int64_t even(int64_t count) { return count + (count & 1); }

/* Depths whose inputs are quantized together, of kinds that are integers. */
INLINE int64_t group_of(int kind) {
    return kind == INT16 ? INT16_GROUP : kind == INT4 ? INT4_GROUP : INT8_GROUP;
}

INLINE int64_t num_groups(int64_t k, int kind) { return (k + group_of(kind) - 1) / group_of(kind); }

/* Depths with the zeros behind them. */
INLINE int64_t padded(int64_t k, int kind) {
    if (kind == INT4) return (k + 7) / 8 * 8;
    return kind == AMX ? (k + AMX_DEPTHS - 1) / AMX_DEPTHS * AMX_DEPTHS : even(k);
}

INLINE int64_t bytes_of_panel(int64_t k, int kind) {
    if (kind == INT8) return (even(k) + 2 * num_groups(k, kind)) * NR;
    if (kind == INT4) return (padded(k, kind) / 2 + 4 * num_groups(k, kind)) * NR;
    if (kind == FP16 || kind == INT16) return (2 * even(k) + 4) * NR;
    if (kind == BF16_PAIRS || kind == AMX) return 2 * padded(k, kind) * NR;
    return NR * k * (kind == BF16 ? 2 : 4);
}

/* Where depth d of a panel begins; of low_precision kinds d is even, of INT4 a multiple of four. */
INLINE int64_t depth_at(int64_t d, int kind) {
    if (kind == INT8) return d * NR + d / INT8_GROUP * 2 * NR;
    if (kind == INT4) return d * NR / 2 + d / INT4_GROUP * 4 * NR;
    return d * NR * (kind == FLOAT32 ? 4 : 2);
}

/* The place of output j among the NR bfloat16 numbers of a depth. */
INLINE int64_t bf16_place(int64_t j) { return j < VL ? 2 * j : 2 * (j - VL) + 1; }

INLINE void widen_bf16(const char *from, vf *low, vf *high) {
    vu words = *(const vuu *)from;
    *low = (vf)(words << 16);
    *high = (vf)(words & 0xffff0000u);
}

/* A depth of a panel of floats: the one at `from`, or if `odd` the one after it. */
INLINE void widen(const char *from, int kind, int odd, vf *low, vf *high) {
    if (kind == BF16) {
        widen_bf16(from + odd * 2 * NR, low, high);
    } else {
        *low = load((const float *)from + odd * NR);
        *high = load((const float *)from + odd * NR + VL);
    }
}
