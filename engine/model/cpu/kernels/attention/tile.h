/* A tile of attention: some tokens of one sequence, with the heads of one group; its memory and queries. */
#pragma once

#include "../thread_pool.h"
#include "int16.h"

/* How many rows of a tile look at a chunk of keys together. */
INLINE int64_t rows_per_pass(int kind) { return kind == AMX ? 2 * AMX_TILE : 48; }

/* Rows are the tile's tokens times its heads. Where factors are low_precision, two numbers share a word. */
typedef struct {
    float *q;             /* [rows, head_dim]; low_precision [rows, head_dim / 2] words */
    float *scores;        /* [rows, KEYS]; low_precision, weights are [rows, KEYS / 2] words, KEYS apart */
    float *acc, *sum;     /* [rows, value_dim]: of a KV split, and of all KV splits before it */
    float *peak, *total;  /* of `acc`: [rows], padded to VL as all numbers of rows are */
    float *totals;        /* [rows, VL]: lanes whose sum `total` becomes at the end of a KV split */
    float *sum_peak, *sum_total; /* of `sum` */
    float *top, *shrink;  /* largest score of a chunk, and what the peak's change makes of `acc` */
    float *keys;          /* [head_dim, KEYS_LD]; low_precision [head_dim / 2, KEYS_LD] words */
    float *wide;          /* [RUN, head_dim]: keys or values in float32; low_precision
                             [KEYS / 2, head_dim] words: pairs of values */
    float *q_scales, *weight_scales; /* of fp16 and integers: of queries and weights, [rows] */
    float *key_scales, *value_scales; /* of keys and values, [KEYS]; 2 * VL more may be written to */
    int64_t rows, group, first_pos; /* first_pos: position of the first token */
    int64_t first_row;    /* of some rows of a tile: how many it has before them */
} Tile;

INLINE int64_t position_of(const Tile *t, int64_t row) {
    return t->first_pos + (t->first_row + row) / t->group;
}

static void tile_layout(const Attention *a, Tile *t, int64_t rows) {
    int64_t dim = a->head_dim, width = a->value_dim, padded = (rows + VL - 1) / VL * VL;
    int64_t wide = (a->low_precision ? KEYS / 2 : RUN) * dim;
    int64_t numbers = padded * (dim + KEYS + 2 * width + VL + 8) + dim * KEYS_LD + wide;
    numbers += 2 * (KEYS + VL);
    t->q = kvr_scratch(SCRATCH_TASK, sizeof(float) * numbers);
    t->keys = t->q + padded * dim;
    t->wide = t->keys + dim * KEYS_LD;
    t->scores = t->wide + wide;
    t->acc = t->scores + padded * KEYS;
    t->sum = t->acc + padded * width;
    t->totals = t->sum + padded * width;
    t->peak = t->totals + padded * VL;
    t->total = t->peak + padded;
    t->sum_peak = t->total + padded;
    t->sum_total = t->sum_peak + padded;
    t->top = t->sum_total + padded;
    t->shrink = t->top + padded;
    t->q_scales = t->shrink + padded;
    t->weight_scales = t->q_scales + padded;
    t->key_scales = t->weight_scales + padded;
    t->value_scales = t->key_scales + KEYS;
    t->rows = rows, t->group = a->group, t->first_row = 0;
}

INLINE int is_bfloat16(int low_precision) { return low_precision == BF16_PAIRS || low_precision == AMX; }

/* In place: [count] numbers become as many of half the size. */
INLINE void convert_row(int low_precision, float *x, int64_t count, float *scale) {
    if (low_precision == FP16) fp16_row(x, count, (int16_t *)x, scale);
    if (low_precision == INT16) *scale = quantize(x, count, most_of_query(count), (int16_t *)x);
    for (int64_t i = 0; is_bfloat16(low_precision) && i < count; i += VL)
        *(vhu *)((uint16_t *)x + i) = round_bf16_fast(load(x + i));
}

/* Queries of the tile, scaled. For the sinks, those that are further away than a query may be are
 * turned back. */
static void tile_queries(const Attention *a, Tile *t, const float *from, int for_sinks) {
    int64_t dim = a->head_dim;
    for (int64_t r = 0; r < t->rows; r++) {
        const float *x = from + r / t->group * a->qkv_stride + r % t->group * dim;
        float *q = t->q + r * (a->low_precision ? dim / 2 : dim);
        for (int64_t d = 0; d < dim; d += VL) store(q + d, load(x + d) * a->scale);
        int64_t back = position_of(t, r) - (a->window + a->num_sinks - 1);
        if (for_sinks && back > 0) rotate_back(a, q, back);
        convert_row(a->low_precision, q, dim, t->q_scales + r);
    }
}
