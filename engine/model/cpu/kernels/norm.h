/* RMSNorm of one row. */
#pragma once

#include "vectors.h"

INLINE float inverse_rms(const float *x, int64_t width, float eps) {
    vf sum = splat(0);
    int64_t i = 0;
    for (; i + VL <= width; i += VL) sum += load(x + i) * load(x + i);
    float total = sum_lanes(sum);
    for (; i < width; i++) total += x[i] * x[i];
    return 1.0f / sqrtf(total / (float)width + eps);
}

/* y = x * weight / rms(x); both may be the same. */
INLINE void normalise(const float *x, const float *weight, float *y, int64_t width, float eps) {
    float scale = inverse_rms(x, width, eps);
    int64_t i = 0;
    for (; i + VL <= width; i += VL) store(y + i, load(x + i) * scale * load(weight + i));
    for (; i < width; i++) y[i] = x[i] * scale * weight[i];
}
