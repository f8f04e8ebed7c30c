/* Attention of a ragged batch over the paged KV pool, with grouped query heads and causal masking.
 *
 * The pool is [num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]. A sequence
 * that feeds one token is cut along its context into splits of fixed length, so that one long one
 * keeps all threads busy and its result does not depend on who else is in the batch. A sequence
 * that feeds more is cut into tiles of queries, whose rows are the tokens times the heads of a
 * group. Both keep a running maximum and sum (online softmax), in float32.
 *
 * In a layer with a window, a query at position p sees (p - window, p] and the sinks, the first
 * positions of all (StreamingLLM). It meets those as if it stood at window + sinks - 1 at most: no
 * distance is longer than what a model of that window knows. Nothing in between is visited. */
#include "attention.h"
#include "pool.h"

#define MERGES 16    /* of one task: less is not worth another thread */
#define TILE_ROWS 96 /* query rows (tokens * heads of the group) per tile, about */
#define TILE_SIZE (TILE_ROWS * 256) /* numbers of a tile's queries, at most: they stay in cache */

int64_t kvr_attention_bytes(void) { return sizeof(Attention); }
int64_t kvr_attention_split(void) { return SPLIT; }
int64_t kvr_vector_width(void) { return VL; }

/* Query tokens of a tile. */
int64_t kvr_attention_tile(int64_t group, int64_t dim) {
    int64_t rows = TILE_SIZE / dim < TILE_ROWS ? TILE_SIZE / dim : TILE_ROWS;
    return group < rows ? rows / group : 1;
}

/* Work of a sequence that feeds one token: the splits of its sinks, if its window has left them
 * behind, and of its window, the last first. Returns their number. */
static int64_t plan_splits(int64_t seq, int64_t head, int64_t context, int64_t window,
                           int64_t sinks, int64_t partial, int32_t *items) {
    int64_t low = window && context > window ? context - window : 0;
    if (low <= sinks) low = sinks = 0; /* the two meet */
    int64_t before = (sinks + SPLIT - 1) / SPLIT;
    int64_t pieces = before + (context - low + SPLIT - 1) / SPLIT;
    for (int64_t p = pieces - 1; p >= 0; p--, items += ITEM) {
        int64_t first = p < before ? p * SPLIT : low + (p - before) * SPLIT;
        int64_t stop = p < before ? sinks : context;
        int64_t end = first + SPLIT < stop ? first + SPLIT : stop;
        items[0] = seq, items[1] = head, items[2] = first, items[3] = end;
        items[4] = pieces > 1 ? partial + p : -1;
    }
    return pieces;
}

/* Work for `kvr_attention`, heaviest first within a sequence. `num_heads` counts the shares. Fills
 * `items` and `merges` (see Attention), and counts[3] = items, merges, partials. Of a sequence's
 * items there are for each head at most query_len / tile + 1, or context_len / SPLIT + 2. */
void kvr_attention_plan(int64_t num_seqs, const int32_t *query_len, const int32_t *context_len,
                        int64_t num_heads, int64_t tile, int64_t window, int64_t sinks,
                        int32_t *items, int32_t *merges, int64_t *counts) {
    int64_t num_items = 0, num_merges = 0, num_partials = 0;
    for (int64_t s = 0; s < num_seqs; s++) {
        int64_t length = query_len[s];
        for (int64_t h = 0; length == 1 && h < num_heads; h++) {
            int64_t pieces = plan_splits(s, h, context_len[s], window, sinks, num_partials,
                                         items + ITEM * num_items);
            num_items += pieces;
            if (pieces == 1) continue;
            int32_t *m = merges + 4 * num_merges++;
            m[0] = s, m[1] = h, m[2] = num_partials, m[3] = pieces;
            num_partials += pieces;
        }
        for (int64_t p = (length - 1) / tile; length > 1 && p >= 0; p--)
            for (int64_t h = 0; h < num_heads; h++) {
                int32_t *item = items + ITEM * num_items++;
                item[0] = s, item[1] = h, item[2] = p * tile, item[4] = -1;
                item[3] = (p + 1) * tile < length ? (p + 1) * tile : length;
            }
    }
    counts[0] = num_items, counts[1] = num_merges, counts[2] = num_partials;
}

static void item_task(void *arg, int64_t task) {
    const Attention *a = arg;
    const int32_t *item = a->items + ITEM * task;
    if (a->query_len[item[0]] == 1)
        kvr_split_item(a, item);
    else
        kvr_tile_item(a, item);
}

static void merge_task(void *arg, int64_t task) {
    const Attention *a = arg;
    for (int64_t i = task * MERGES; i < (task + 1) * MERGES && i < a->num_merges; i++)
        kvr_split_merge(a, a->merges + 4 * i);
}

void kvr_attention(const Attention *base, const float *qkv, float *out, const void *pool) {
    Attention a = *base;
    a.qkv = qkv, a.out = out, a.pool = pool;
    kvr_parallel(a.threads, a.num_items, item_task, &a);
    kvr_parallel(a.threads, (a.num_merges + MERGES - 1) / MERGES, merge_task, &a);
}
