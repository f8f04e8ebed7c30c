/* Attention over the paged KV pool: what Python calls, and the struct that it fills. cffi reads this
 * file too: it has declarations only. */
#pragma once

#include <stdint.h>

/* Sparse attention of latents: which positions a token attends to. Those before `topk` attend to all. */
typedef struct {
    int64_t heads, dim, topk; /* of index queries and keys */
    int64_t num_seqs;
    int32_t *selected; /* [num_tokens, topk]: ascending; of tokens from position `topk` on */
} Selection;

/* Quest: queries that read some pages of a sequence alone, a page being a block. The pages' bounds, the least
 * and the largest number of their keys in each dimension, are [layers of a block, num_blocks, num_kv_heads,
 * 2, head_dim], of the pool's type: a layer's are near each other, as they are read together. */
typedef struct {
    const int32_t *starts; /* [num_seqs]: the position from which on queries of a sequence do */
    int32_t *bounded;    /* [num_seqs]: its first pages, whose bounds are there in all layers */
    const void *pool;    /* first element of the first layer's keys in block 0 */
    void *bounds;
    int64_t num_blocks, num_seqs; /* num_blocks: of the pool */
    int64_t least; /* tokens that are read at least */
    float share;   /* of the context that is read */
} Quest;

/* Attention of the layers that share a window and a rope, for one batch.
 *
 * A KV head with many query heads is cut into `shares` of `group` query heads each; a "head" of an
 * item or a merge is such a share. Offsets and strides of the pool count its elements. In FP8 those
 * are bytes, and a KV head's numbers of a block, [block_size, head_dim], are followed by its scales,
 * [block_size]. */
typedef struct {
    const float *qkv;      /* [num_tokens, qkv_stride]: the query heads come first */
    float *out;            /* [num_tokens, num_heads * value_dim] */
    const void *pool;      /* first element of the layer's keys in block 0 */
    float *partial;        /* [num_partials, group, value_dim + 2]: partial results of KV splits */
    const int32_t *tables; /* [num_seqs, table_stride]; blocks before the window may be -1 */
    const int32_t *query_start, *query_len; /* [num_seqs] */
    const int32_t *context_len;             /* [num_seqs], with the query's own tokens */
    const int32_t *items;  /* [num_items, 6]: sequence, head, first and end of its queries, KV split
                              and first partial, or -1 and -1: all splits */
    const int32_t *merges; /* [num_merges, 6]: sequence, head, first and end of its queries, first
                              partial, number of splits */
    const float *cos, *sin; /* of the layer's rope: [max_positions, rope_dim / 2]; NULL: none */
    int64_t qkv_stride, table_stride, block_stride, head_stride, value_offset;
    int64_t num_heads, group, shares, head_dim, value_dim, block_size, num_items, num_merges;
    int64_t window, num_sinks; /* 0: none; a negative window: chunks, or ALL_BUT_FIRST */
    int64_t rope_at, rope_dim; /* which of a head's dimensions are rotated */
    int64_t mixed_half;        /* half of the dimensions with a Hadamard transform; 0: none */
    Selection *selection;      /* NULL: there is none */
    Quest *quest;              /* NULL: all queries read all pages */
    float scale, softcap;      /* softcap 0: none */
    int32_t kv_kind, threads;
    int32_t low_precision; /* BF16_PAIRS, AMX, FP16 or INT16: what both GEMMs compute in; 0: float32 */
} Attention;

enum { ALL_BUT_FIRST = -1 }; /* a chunk of one position would be no attention */

/* Query tokens of a tile, with `group` heads of `dim` numbers each. */
int64_t kvr_attention_tile(int64_t group, int64_t dim);

/* Keys of a KV split. */
int64_t kvr_attention_split_keys(void);

/* Up to so many query tokens a sequence's KV splits are items of their own. */
int64_t kvr_attention_short_query(void);

/* Work for `kvr_attention`, heaviest first within a sequence. `num_heads` counts the shares. Fills
 * `items` and `merges` (see Attention), and counts[3] = items, merges, partials. A sequence has one
 * item for each head and tile, or up to context_len / kvr_attention_split_keys() + 2 if its query is
 * short. Queries from position `topk` on, if it is not 0, are left out, and those of sequence s from
 * position starts[s] on, if it is not NULL. */
void kvr_attention_plan(int64_t num_seqs, const int32_t *query_len, const int32_t *context_len,
                        int64_t num_heads, int64_t tile, int64_t window, int64_t sinks,
                        int64_t topk, const int32_t *starts, int32_t *items, int32_t *merges,
                        int64_t *counts);

/* A step has passed all layers: what it made of bounds is there. */
void kvr_keep_bounds(const Attention *attention);

/* Whether some token of the batch attends to chosen positions. */
int kvr_selects(const Attention *attention);

/* Fills in what such tokens attend to: queries [num_tokens, heads, dim], rotated, weights [num_tokens,
 * heads]; pool: the layer's first index key in block 0, blocks as those of `attention`. */
void kvr_select(const Attention *attention, const float *queries, const float *weights, const void *pool);

/* `attention` with other rows, result and layer. */
void kvr_attention(const Attention *attention, const float *qkv, float *out, const void *pool);
