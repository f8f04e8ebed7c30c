/* What the parts of attention share: the call's description, and keys and values in the pool. */
#ifndef KVRELAY_ATTENTION_H
#define KVRELAY_ATTENTION_H

#include "common.h"

#define SPLIT 256    /* keys per split of a one-token query; a multiple of VL */
#define TILE_ROWS 96 /* query rows (tokens * heads of the group) per tile, about */
#define KEYS 64      /* keys that a tile looks at between two steps of its softmax */
#define RUN 16       /* keys of one block that are handled at a time */
#define HIDDEN -1e30f /* score of a key that a row must not see */
#define MAX_DIM 256
#define MAX_GROUP 32

typedef struct {
    const float *qkv;      /* [num_tokens, qkv_stride]: the query heads come first */
    float *out;            /* [num_tokens, num_heads * head_dim] */
    const void *pool;      /* first element of the layer's keys in block 0 */
    float *partial;        /* [num_partials, group, head_dim + 2] */
    const int32_t *tables; /* [num_seqs, table_stride] */
    const int32_t *query_start, *query_len, *context_len; /* [num_seqs]; context has the query in */
    const int32_t *items;  /* [num_items, 4]: seq, KV head, first query or key, partial or -1 */
    const int32_t *merges; /* [num_merges, 4]: seq, KV head, first partial, number of partials */
    int64_t qkv_stride, table_stride, block_stride, value_offset;
    int64_t num_heads, num_kv_heads, head_dim, block_size, num_items, num_merges;
    float scale;
    int32_t kv_bf16, threads;
} Attention;

int64_t kvr_attention_tile(int64_t group);

/* One query token and one KV head against the keys of one split. */
void kvr_split_item(const Attention *a, const int32_t *item);
/* The partial results of a query's splits become one. */
void kvr_split_merge(const Attention *a, const int32_t *item);
/* One tile of queries of one KV head. */
void kvr_tile_item(const Attention *a, const int32_t *item);

/* Element offset of position `pos` of this KV head, from the layer's keys in block 0. */
INLINE int64_t kv_at(const Attention *a, const int32_t *table, int64_t head, int64_t pos) {
    int64_t block = table[pos / a->block_size];
    return block * a->block_stride + (head * a->block_size + pos % a->block_size) * a->head_dim;
}

/* `count` keys or values of one KV head, at element offset `at`, as float32 [count, head_dim]:
 * in place, or widened into `wide`. All of them lie in one block. */
INLINE const float *kv_run(const Attention *a, int64_t at, int64_t count, float *wide) {
    if (!a->kv_bf16) return (const float *)a->pool + at;
    for (int64_t i = 0; i < count * a->head_dim; i += VL)
        store(wide + i, widen_kv((const uint16_t *)a->pool + at + i));
    return wide;
}

/* How many positions from `pos` on lie in one block, at most RUN, before `end`. */
INLINE int64_t run_length(const Attention *a, int64_t pos, int64_t end) {
    int64_t left = a->block_size - pos % a->block_size;
    left = left < RUN ? left : RUN;
    return left < end - pos ? left : end - pos;
}

/* Blocks lie far apart, where the hardware does not look ahead: ask for the run at `pos` early. */
INLINE void prefetch_run(const Attention *a, const int32_t *table, int64_t head, int64_t pos,
                         int64_t end, int64_t offset) {
    if (pos >= end) return;
    int64_t size = a->kv_bf16 ? 2 : 4;
    const char *from = (const char *)a->pool + (kv_at(a, table, head, pos) + offset) * size;
    int64_t bytes = run_length(a, pos, end) * a->head_dim * size;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

#endif
