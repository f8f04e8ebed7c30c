/* exp, tanh and the gates of an MLP, a vector at a time. */
#pragma once

#include "vectors.h"

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

enum { NO_ACTIVATION, SILU, GELU_TANH, SQUARED_RELU /* without a gate */ };

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
