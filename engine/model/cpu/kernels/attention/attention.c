/* Attention of a ragged batch over the paged KV pool, with grouped query heads and causal masking.
 *
 * The pool is [num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]. A sequence
 * is cut into tiles of queries, whose rows are the tokens times the heads of a group. Of a sequence
 * that feeds one token the keys are cut too, into kv_splits of fixed length, so that a long one
 * keeps all threads busy. Every tile adds up its keys in that order, split by split, with a
 * running maximum and sum (online softmax): a token's result is the same, bit for bit, alone or
 * with others, in any batch, by any number of threads.
 *
 * In a layer with a window, a query at position p sees (p - window, p] and the sinks, the first
 * positions of all (StreamingLLM). It attends to those as if it stood at window + sinks - 1 at most: no
 * distance is longer than what a model of that window knows. Nothing in between is visited. In a layer
 * with chunks, it sees those of its own chunk. */
#include "../thread_pool.h"
#include "attention.h"

#define MERGES 16    /* of one task: less is not worth another thread */
#define TILE_ROWS 96 /* query rows (tokens * heads of the group) per tile, about */
#define TILE_SIZE (TILE_ROWS * 256) /* numbers of a tile's queries, at most: they stay in cache */

int64_t kvr_attention_split_keys(void) { return SPLIT_KEYS; }
int64_t kvr_attention_short_query(void) { return SHORT_QUERY; }
int64_t kvr_vector_width(void) { return VL; }

/* Query tokens of a tile. */
int64_t kvr_attention_tile(int64_t group, int64_t dim) {
    int64_t rows = TILE_SIZE / dim < TILE_ROWS ? TILE_SIZE / dim : TILE_ROWS;
    return group < rows ? rows / group : 1;
}

void kvr_attention_plan(int64_t num_seqs, const int32_t *query_len, const int32_t *context_len,
                        int64_t num_heads, int64_t tile, int64_t window, int64_t sinks,
                        int64_t topk, const int32_t *starts, int32_t *items, int32_t *merges,
                        int64_t *counts) {
    int64_t num_items = 0, num_merges = 0, num_partials = 0;
    for (int64_t s = 0; s < num_seqs; s++) {
        int64_t length = query_len[s], begin = context_len[s] - length;
        int is_short = length <= SHORT_QUERY;
        if (topk && begin + length > topk) length = topk - begin;
        if (starts && begin + length > starts[s]) length = starts[s] - begin;
        if (length <= 0) continue;
        for (int64_t p = (length - 1) / tile; p >= 0; p--) {
            int64_t first = p * tile, last = first + tile < length ? first + tile : length, pieces = 1;
            if (is_short) pieces = kv_splits(window, sinks, begin + first, begin + last).count;
            for (int64_t i = pieces - 1; i >= 0; i--)
                for (int64_t h = 0; h < num_heads; h++) { /* side by side in a block: they are read together */
                    int32_t *item = items + ITEM * num_items++;
                    item[0] = s, item[1] = h, item[2] = first, item[3] = last;
                    item[4] = pieces > 1 ? i : -1;
                    item[5] = pieces > 1 ? num_partials + (h * pieces + i) * (last - first) : -1;
                }
            for (int64_t h = 0; pieces > 1 && h < num_heads; h++, num_partials += pieces * (last - first)) {
                int32_t *merge = merges + MERGE * num_merges++;
                merge[0] = s, merge[1] = h, merge[2] = first, merge[3] = last;
                merge[4] = num_partials, merge[5] = pieces;
            }
        }
    }
    counts[0] = num_items, counts[1] = num_merges, counts[2] = num_partials;
}

static void item_task(void *arg, int64_t task, int64_t next) {
    const Attention *a = arg;
    kvr_tile_item(a, a->items + ITEM * task, next < 0 ? NULL : a->items + ITEM * next);
}

static void merge_task(void *arg, int64_t task) {
    const Attention *a = arg;
    for (int64_t i = task * MERGES; i < (task + 1) * MERGES && i < a->num_merges; i++)
        kvr_tile_merge(a, a->merges + MERGE * i);
}

void kvr_attention(const Attention *base, const float *qkv, float *out, const void *pool) {
    Attention a = *base;
    a.qkv = qkv, a.out = out, a.pool = pool;
    kvr_parallel_ranges(a.threads, a.num_items, item_task, &a);
    kvr_parallel(a.threads, (a.num_merges + MERGES - 1) / MERGES, merge_task, &a);
    if (a.selection) kvr_attend_selected(&a);
    if (a.quest) kvr_attend_pages(&a);
}
