/* What the parts of attention share: the call's description, and keys and values in the pool. */
#pragma once

#include "../floats.h"
#include "../hadamard.h"
#include "api.h"

#define SPLIT_KEYS 512  /* keys that are summed by themselves before what came before is added */
#define KEYS 64      /* keys that a tile looks at between two steps of its softmax */
#define RUN 16       /* keys of one block that are handled at a time */
#define MASKED -1e30f /* score of a key that a row must not see */

#define ITEM 6
#define MERGE 6
#define SHORT_QUERY 16 /* queries of a sequence whose kv_splits are shared out, each to an item */

/* Keys that the queries from position `pos` on, before `end`, may see: those from `low` on, and the
 * sinks before them. They are met in kv_splits: the sinks are one, and the others end at multiples
 * of SPLIT_KEYS, wherever they begin, so that every query adds up the same KV splits in the same order
 * whatever shares its step. */
typedef struct {
    int64_t sinks, low, end, count;
} KvSplits;

/* The first key in the window of position `pos`; of its chunk, if `window` is negative. */
INLINE int64_t first_seen(int64_t window, int64_t pos) {
    if (window == ALL_BUT_FIRST) return pos > 0;
    if (window < 0) return pos - pos % -window;
    return window && pos >= window ? pos - window + 1 : 0;
}

INLINE KvSplits kv_splits(int64_t window, int64_t num_sinks, int64_t pos, int64_t end) {
    KvSplits s = {.sinks = window ? num_sinks : 0, .end = end};
    if (s.sinks > end) s.sinks = end;
    s.low = first_seen(window, pos);
    s.low = s.low > s.sinks ? s.low : s.sinks;
    s.count = (s.sinks > 0) + (s.sinks < end ? (end - 1) / SPLIT_KEYS - s.low / SPLIT_KEYS + 1 : 0);
    return s;
}

INLINE void split_keys(const KvSplits *s, int64_t index, int64_t *first, int64_t *end) {
    int64_t at = s->low / SPLIT_KEYS + index - (s->sinks > 0);
    int is_sinks = s->sinks > 0 && !index;
    *first = is_sinks ? 0 : s->low > at * SPLIT_KEYS ? s->low : at * SPLIT_KEYS;
    *end = is_sinks ? s->sinks : (at + 1) * SPLIT_KEYS < s->end ? (at + 1) * SPLIT_KEYS : s->end;
}

/* One tile of queries of one head, against all its keys or those of one split. Meanwhile the keys that
 * the item `next` begins with are fetched; it may be NULL. */
void kvr_tile_item(const Attention *a, const int32_t *item, const int32_t *next);
/* The partial results of the kv_splits of a tile's queries become one. */
void kvr_tile_merge(const Attention *a, const int32_t *item);

/* The tokens of the call that attend to chosen positions (selected.c), and to chosen pages (quest.c). */
void kvr_attend_selected(const Attention *a);
void kvr_attend_pages(const Attention *a);

/* The places of the `topk` highest of more scores, ascending; of equal ones the first. */
void kvr_choose(const float *scores, int64_t count, int64_t topk, int32_t *to);

/* Element offset of position `pos` of this KV head, from the layer's keys in block 0. */
INLINE int64_t kv_at(const Attention *a, const int32_t *table, int64_t kv_head, int64_t pos) {
    int64_t block = table[pos / a->block_size];
    return block * a->block_stride + kv_head * a->head_stride + pos % a->block_size * a->head_dim;
}

/* FP8 numbers [count, dim] with their scales [count]. */
static void widen_run(const uint8_t *numbers, const uint8_t *scales, int64_t count, int64_t dim,
                      float *wide) {
    for (int64_t i = 0; i < count; i++) {
        int32_t bits = scales[i] < 246 ? (scales[i] + 8) << 23 : 254 << 23; /* 2^8: widen_fp8 */
        float scale;
        memcpy(&scale, &bits, 4);
        _Pragma("GCC unroll 4") for (int64_t d = 0; d < dim; d += VL)
            store(wide + i * dim + d, widen_fp8(numbers + i * dim + d) * scale);
    }
}

/* `count` keys or values of one KV head from position `pos` on, at element offset `at`, as float32
 * [count, head_dim]: in place, or widened into `wide`. All of them lie in one block. */
INLINE const float *kv_run(const Attention *a, int64_t at, int64_t pos, int64_t count,
                           float *wide) {
    if (a->kv_kind == KV_FLOAT32) return (const float *)a->pool + at;
    if (a->kv_kind == KV_BFLOAT16) {
        const uint16_t *from = (const uint16_t *)a->pool + at;
        int64_t numbers = count * a->head_dim;
        _Pragma("GCC unroll 4") for (int64_t i = 0; i < numbers; i += VL)
            store(wide + i, widen_kv(from + i));
    } else {
        const uint8_t *numbers = (const uint8_t *)a->pool + at;
        int64_t offset = pos % a->block_size; /* the scales follow the whole block's numbers */
        const uint8_t *scales = numbers + (a->block_size - offset) * a->head_dim + offset;
        widen_run(numbers, scales, count, a->head_dim, wide);
    }
    return wide;
}

/* How many positions from `pos` on lie in one block, at most RUN, before `end`. */
INLINE int64_t run_length(const Attention *a, int64_t pos, int64_t end) {
    int64_t left = a->block_size - pos % a->block_size;
    left = left < RUN ? left : RUN;
    return left < end - pos ? left : end - pos;
}

INLINE int64_t kv_size(const Attention *a) {
    return a->kv_kind == KV_FLOAT32 ? 4 : a->kv_kind == KV_BFLOAT16 ? 2 : 1;
}

/* Blocks lie far apart, where the hardware does not look ahead: ask for the run at `pos` early. */
INLINE void prefetch_run(const Attention *a, const int32_t *table, int64_t kv_head, int64_t pos,
                         int64_t end, int64_t offset) {
    if (pos >= end) return;
    int64_t size = kv_size(a);
    const char *from = (const char *)a->pool + (kv_at(a, table, kv_head, pos) + offset) * size;
    int64_t bytes = run_length(a, pos, end) * a->head_dim * size;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

/* Attention sinks: a query as if its token stood `back` positions earlier. Rotations add up, so it is
 * turned back by as many; what the tables are scaled by is in the query already. */
INLINE void rotate_back(const Attention *a, float *query, int64_t back) {
    if (!a->cos) return;
    int64_t half = a->rope_dim / 2, mixed = a->mixed_half;
    if (mixed) hadamard_row(query, mixed);
    const float *c = a->cos + back * half, *s = a->sin + back * half;
    float whole = 1.0f / a->cos[0] / (mixed ? mixed_size(mixed) : 1);
    float *x = query + a->rope_at, *y = x + half;
    for (int64_t i = 0; i < half; i++) {
        float x1 = x[i], x2 = y[i];
        x[i] = (x1 * c[i] + x2 * s[i]) * whole;
        y[i] = (x2 * c[i] - x1 * s[i]) * whole;
    }
    if (mixed) hadamard_row(query, mixed);
}
