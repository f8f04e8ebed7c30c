/* The softmax of a tile, chunk of keys by chunk. */
#pragma once

#include "../activation.h"
#include "tile.h"

/* Whether all rows of the tile see all keys of a chunk. */
static int all_visible(const Tile *t, const Keys *k) {
    int64_t last = k->base + KEYS - 1;
    return k->stop > last && position_of(t, 0) >= last && k->floor <= k->base && k->first <= k->base &&
           first_seen(k->window, position_of(t, t->rows - 1)) <= k->base;
}

/* A row's scores of keys that it must not see are hidden. */
INLINE void mask_row(const Tile *t, const Keys *k, int64_t row) {
    float *s = t->scores + row * KEYS;
    int64_t pos = position_of(t, row), low = first_seen(k->window, pos);
    int64_t from = (low > k->floor ? low : k->floor) - k->base;
    int64_t to = (pos < k->stop ? pos + 1 : k->stop) - k->base;
    for (int64_t i = 0; i < from && i < KEYS; i++) s[i] = MASKED;
    for (int64_t i = to < 0 ? 0 : to; i < KEYS; i++) s[i] = MASKED;
}

/* What is left to do to a row's scores; returns the largest one. */
INLINE float finish_scores(const Attention *a, const Tile *t, const Keys *k, int64_t row, int all) {
    float *s = t->scores + row * KEYS;
    for (int64_t i = 0; has_scales(a->low_precision) && i < KEYS; i += VL)
        store(s + i, load(s + i) * load(t->key_scales + i));
    if (a->softcap)
        for (int64_t i = 0; i < KEYS; i += VL)
            store(s + i, vtanh(load(s + i) / a->softcap) * a->softcap);
    if (!all) mask_row(t, k, row);
    vf top = load(s);
    for (int64_t i = VL; i < KEYS; i += VL) top = vmax(top, load(s + i));
    return max_lanes(top);
}

/* Scores relative to the row's peak become weights, in place; returns sums of them. Where values have
 * scales, weights are times those. */
INLINE vf softmax_row(int low_precision, const Tile *t, int64_t row) {
    float *s = t->scores + row * KEYS, peak = t->peak[row];
    vf sum = splat(0), weights[KEYS / VL];
    UNROLL for (int i = 0; i < KEYS / VL; i++) {
        vf below = load(s + i * VL) - peak, p = low_precision ? vexp_rough(below) : vexp(below);
        sum += p;
        weights[i] = has_scales(low_precision) ? p * load(t->value_scales + i * VL) : p;
    }
    if (low_precision == FP16) t->weight_scales[row] = fp16_vectors(weights, KEYS / VL, (int16_t *)s);
    if (low_precision == INT16)
        t->weight_scales[row] = quantize_vectors(weights, KEYS / VL, MOST_OF_INT16, (int16_t *)s);
    if (is_bfloat16(low_precision))
        UNROLL for (int i = 0; i < KEYS / VL; i += 2) /* one store: what takes all of it need not wait */
            *(vh2u *)((uint16_t *)s + i * VL) = round_bf16_both_fast(weights[i], weights[i + 1]);
    if (!low_precision)
        UNROLL for (int i = 0; i < KEYS / VL; i++) store(s + i * VL, weights[i]);
    return sum;
}

/* Scores become weights; peaks, totals and accumulators follow. A row that saw no key yet takes all of
 * them for equal: the first one that it does see shrinks that to nothing. */
static void softmax_chunk(const Attention *a, const Tile *t, const Keys *k) {
    int all = all_visible(t, k);
    for (int64_t r = 0; r < t->rows; r++) t->top[r] = finish_scores(a, t, k, r, all);
    for (int64_t r = 0; r < t->rows; r += VL) {
        vf old = load(t->peak + r), peak = vmax(old, load(t->top + r));
        store(t->peak + r, peak);
        store(t->shrink + r, vexp(old - peak));
    }
    for (int64_t r = 0; r < t->rows; r++) {
        float *acc = t->acc + r * a->value_dim, *totals = t->totals + r * VL, shrink = t->shrink[r];
        vf sum = a->low_precision == FP16  ? softmax_row(FP16, t, r)
                 : a->low_precision == INT16 ? softmax_row(INT16, t, r)
                 : a->low_precision          ? softmax_row(BF16_PAIRS, t, r)
                                        : softmax_row(0, t, r);
        store(totals, load(totals) * shrink + sum);
        for (int64_t d = 0; shrink != 1.0f && d < a->value_dim; d += VL)
            store(acc + d, load(acc + d) * shrink);
    }
}
