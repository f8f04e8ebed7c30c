/* Attention of a ragged batch over the paged KV pool, with grouped query heads and causal masking.
 *
 * The pool is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]. A sequence that
 * feeds one token is cut along its context into splits of fixed length, so that one long one keeps
 * all threads busy and its result does not depend on who else is in the batch. A sequence that
 * feeds more is cut into tiles of queries, whose rows are the tokens times the heads of a group.
 * Both keep a running maximum and sum (online softmax), in float32. */
#include "attention.h"
#include "pool.h"

int64_t kvr_attention_bytes(void) { return sizeof(Attention); }
int64_t kvr_attention_split(void) { return SPLIT; }
int64_t kvr_attention_tile(int64_t group) { return group < TILE_ROWS ? TILE_ROWS / group : 1; }
int64_t kvr_attention_max_dim(void) { return MAX_DIM; }
int64_t kvr_attention_max_group(void) { return MAX_GROUP; }
int64_t kvr_vector_width(void) { return VL; }

/* Work for `kvr_attention`, heaviest first within a sequence. Fills `items` and `merges` (rows of
 * 4, see Attention), and counts[3] = items, merges, partials. */
void kvr_attention_plan(int64_t num_seqs, const int32_t *query_len, const int32_t *context_len,
                        int64_t num_kv_heads, int64_t group, int32_t *items, int32_t *merges,
                        int64_t *counts) {
    int64_t num_items = 0, num_merges = 0, num_partials = 0, tile = kvr_attention_tile(group);
    for (int64_t s = 0; s < num_seqs; s++) {
        int one = query_len[s] == 1;
        int64_t step = one ? SPLIT : tile, length = one ? context_len[s] : query_len[s];
        int64_t pieces = (length + step - 1) / step;
        for (int64_t p = pieces - 1; p >= 0; p--)
            for (int64_t h = 0; h < num_kv_heads; h++) {
                int split = one && pieces > 1;
                int64_t partial = split ? num_partials + h * pieces + p : -1;
                int32_t *item = items + 4 * num_items++;
                item[0] = s, item[1] = h, item[2] = p * step, item[3] = partial;
            }
        for (int64_t h = 0; one && pieces > 1 && h < num_kv_heads; h++) {
            int32_t *m = merges + 4 * num_merges++;
            m[0] = s, m[1] = h, m[2] = num_partials + h * pieces, m[3] = pieces;
        }
        if (one && pieces > 1) num_partials += pieces * num_kv_heads;
    }
    counts[0] = num_items, counts[1] = num_merges, counts[2] = num_partials;
}

static void item_task(void *arg, int64_t task) {
    const Attention *a = arg;
    const int32_t *item = a->items + 4 * task;
    if (a->query_len[item[0]] == 1)
        kvr_split_item(a, item);
    else
        kvr_tile_item(a, item);
}

void kvr_attention(const Attention *base, const float *qkv, float *out, const void *pool) {
    Attention a = *base;
    a.qkv = qkv, a.out = out, a.pool = pool;
    kvr_parallel(a.threads, a.num_items, item_task, &a);
    for (int64_t i = 0; i < a.num_merges; i++) kvr_split_merge(&a, a.merges + 4 * i);
}
