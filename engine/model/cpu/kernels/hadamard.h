/* The Hadamard transform of queries and keys (engine/model/fp8.py). */
#pragma once

#include "vectors.h"

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
    vi lanes = lane_numbers();
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
