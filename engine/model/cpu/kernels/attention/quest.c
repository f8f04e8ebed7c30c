/* Quest (Tang et al. 2024): a query reads those pages of its sequence whose keys may score highest.
 *
 * For each KV head a page's keys lie between bounds, so no product of the query with one of them is larger
 * than what the bounds allow. Pages are ranked by that, each head of a group relative to its own best page,
 * the first page and the last two before all others. What is chosen depends on the query and its context
 * alone, and is attended to as a context of that length, through a block table of its own: so a token's
 * result is the same, bit for bit, whatever shares its step, and that of dense attention if all is chosen. */
#include "../thread_pool.h"
#include "attention.h"

#include <math.h>

#define AT_ONCE 16  /* queries whose scores are held at a time */
#define BOUNDED 16  /* pages of one task that makes bounds */
#define SCORED 128  /* pages of one task that scores */
#define AHEAD 8     /* pages whose bounds are prefetched: their addresses follow no pattern */
#define LAST 2      /* pages up to the query's own that are always read */

typedef struct {
    int64_t row, seq, pos;
} Query;

typedef struct {
    const Attention *a;
    const Quest *q;
    char *bounds;                      /* of this layer in block 0 */
    int64_t heads, together, kv_heads; /* together: query heads of a KV head */
    int64_t size, page, stride;        /* bytes of a number; numbers of a page's bounds, and from block to block */
    Query queries[AT_ONCE];
    int64_t count, chunks, most, pages; /* chunks of `pages` scores; most: pages that are chosen */
    float *scores;                      /* [count, heads, chunks * SCORED] */
    int32_t *tables, *contexts;         /* [count * kv_heads, most] and [count * kv_heads] */
    int64_t seq, query;                 /* where the next queries are looked for */
} Pages;

INLINE vf widened(const Attention *a, const void *numbers, int64_t at) {
    if (a->kv_kind == KV_FLOAT32) return load((const float *)numbers + at);
    return widen_kv((const uint16_t *)numbers + at);
}

INLINE void *bounds_of(const Pages *p, int64_t block, int64_t kv_head) {
    return p->bounds + (block * p->stride + kv_head * p->page) * p->size;
}

/* Pages that the query at `pos` reads. */
static int64_t budget(const Attention *a, int64_t pos) {
    const Quest *q = a->quest;
    int64_t all = pos / a->block_size + 1, tokens = (int64_t)(q->share * (float)(pos + 1));
    int64_t pages = ((tokens > q->least ? tokens : q->least) + a->block_size - 1) / a->block_size;
    pages = pages > LAST + 1 ? pages : LAST + 1;
    return pages < all ? pages : all;
}

INLINE int64_t first_query(const Attention *a, int64_t seq) {
    int64_t dense = a->quest->starts[seq] - (a->context_len[seq] - a->query_len[seq]);
    return dense < 0 ? 0 : dense;
}

/* The pages before that of the sequence's last position: their bounds are needed, if it has such queries. */
INLINE int64_t num_bounded(const Attention *a, int64_t seq) {
    int reads_some = first_query(a, seq) < a->query_len[seq];
    return reads_some ? (a->context_len[seq] - 1) / a->block_size : 0;
}

static int64_t bound_tasks(const Attention *a, int64_t seq) {
    int64_t missing = num_bounded(a, seq) - a->quest->bounded[seq];
    return missing > 0 ? (missing + BOUNDED - 1) / BOUNDED : 0;
}

static void bound_page(const Pages *p, const int32_t *table, int64_t page, int64_t kv_head) {
    const Attention *a = p->a;
    int64_t dim = a->head_dim, at = kv_at(a, table, kv_head, page * a->block_size);
    void *to = bounds_of(p, table[page], kv_head);
    for (int64_t d = 0; d < dim; d += VL) {
        vf low = widened(a, a->pool, at + d), high = low;
        for (int64_t i = 1; i < a->block_size; i++) {
            vf key = widened(a, a->pool, at + i * dim + d);
            low = vmin(low, key), high = vmax(high, key);
        }
        if (a->kv_kind == KV_FLOAT32) {
            store((float *)to + d, low), store((float *)to + dim + d, high);
        } else { /* they are bfloat16 already */
            *(vhu *)((uint16_t *)to + d) = round_bf16(low);
            *(vhu *)((uint16_t *)to + dim + d) = round_bf16(high);
        }
    }
}

static void bound_task(void *arg, int64_t task) {
    const Pages *p = arg;
    int64_t seq = 0;
    for (int64_t n; task >= (n = bound_tasks(p->a, seq)); seq++) task -= n;
    const int32_t *table = p->a->tables + seq * p->a->table_stride;
    int64_t page = p->q->bounded[seq] + task * BOUNDED, end = page + BOUNDED, all = num_bounded(p->a, seq);
    for (; page < end && page < all; page++)
        for (int64_t h = 0; h < p->kv_heads; h++) bound_page(p, table, page, h);
}

/* Up to AT_ONCE further queries; returns how many. */
static int64_t next_queries(Pages *p) {
    const Attention *a = p->a;
    int64_t longest = 0;
    for (p->count = 0; p->seq < p->q->num_seqs; p->seq++, p->query = 0) {
        int64_t first = first_query(a, p->seq), start = a->context_len[p->seq] - a->query_len[p->seq];
        for (p->query = p->query < first ? first : p->query; p->query < a->query_len[p->seq]; p->query++) {
            if (p->count == AT_ONCE) goto full;
            int64_t pos = start + p->query;
            p->queries[p->count++] = (Query){a->query_start[p->seq] + p->query, p->seq, pos};
            longest = pos > longest ? pos : longest;
        }
    }
full:
    p->most = 0;
    for (int64_t i = 0; i < p->count; i++) {
        int64_t pages = budget(a, p->queries[i].pos);
        p->most = pages > p->most ? pages : p->most;
    }
    p->chunks = (longest / a->block_size + SCORED) / SCORED;
    return p->count;
}

/* The most that `heads` queries, a constant, may score with keys in these bounds. above, below: what is
 * positive and what is negative of each. */
INLINE void score_page(const Pages *p, int heads, const float *above, const float *below, const void *bounds,
                       float *scores, int64_t stride) {
    int64_t dim = p->a->head_dim;
    vf sums[4];
    UNROLL for (int h = 0; h < heads; h++) sums[h] = splat(0);
    for (int64_t d = 0; d < dim; d += VL) {
        vf low = widened(p->a, bounds, d), high = widened(p->a, bounds, dim + d);
        UNROLL for (int h = 0; h < heads; h++)
            sums[h] += load(above + h * dim + d) * high + load(below + h * dim + d) * low;
    }
    UNROLL for (int h = 0; h < heads; h++) scores[h * stride] = sum_lanes(sums[h]);
}

static void score_task(void *arg, int64_t task) {
    const Pages *p = arg;
    const Attention *a = p->a;
    int64_t index = task / p->chunks / p->kv_heads, kv_head = task / p->chunks % p->kv_heads;
    const Query *query = p->queries + index;
    const int32_t *table = a->tables + query->seq * a->table_stride;
    int64_t page = task % p->chunks * SCORED, end = page + SCORED, last = query->pos / a->block_size;
    int64_t dim = a->head_dim, numbers = p->together * dim, stride = p->chunks * SCORED;
    if (page >= last || budget(a, query->pos) > last) return; /* none, or all */
    float *above = kvr_scratch(SCRATCH_TASK, 2 * sizeof(float) * numbers), *below = above + numbers;
    const float *from = a->qkv + query->row * a->qkv_stride + kv_head * numbers;
    for (int64_t d = 0; d < numbers; d += VL) {
        store(above + d, vmax(load(from + d), splat(0)));
        store(below + d, vmin(load(from + d), splat(0)));
    }
    float *scores = p->scores + (index * p->heads + kv_head * p->together) * stride;
    for (end = end < last ? end : last; page < end; page++) {
        const void *bounds = bounds_of(p, table[page], kv_head);
        const char *next = bounds_of(p, table[page + AHEAD < last ? page + AHEAD : page], kv_head);
        for (int64_t at = 0; at < p->page * p->size; at += 64) __builtin_prefetch(next + at);
        int64_t h = 0;
        for (; h + 4 <= p->together; h += 4)
            score_page(p, 4, above + h * dim, below + h * dim, bounds, scores + h * stride + page, stride);
        for (; h + 3 <= p->together; h += 3)
            score_page(p, 3, above + h * dim, below + h * dim, bounds, scores + h * stride + page, stride);
        for (; h < p->together; h++)
            score_page(p, 1, above + h * dim, below + h * dim, bounds, scores + h * stride + page, stride);
    }
}

/* Every head's scores relative to its best page; of the heads the largest, in the first one's place. */
static void join_heads(const Pages *p, float *scores, int64_t count) {
    int64_t stride = p->chunks * SCORED;
    for (int64_t h = 0; h < p->together; h++) {
        float *own = scores + h * stride, best = own[0];
        for (int64_t i = 1; i < count; i++) best = own[i] > best ? own[i] : best;
        for (int64_t i = 0; i < count; i++) {
            float below = own[i] - best;
            scores[i] = h && scores[i] > below ? scores[i] : below;
        }
    }
}

static void choose_task(void *arg, int64_t task) {
    const Pages *p = arg;
    const Attention *a = p->a;
    const Query *query = p->queries + task / p->kv_heads;
    const int32_t *table = a->tables + query->seq * a->table_stride;
    int64_t last = query->pos / a->block_size, count = budget(a, query->pos);
    int32_t *to = p->tables + task * p->most;
    float *scores = p->scores + task * p->together * p->chunks * SCORED;
    if (count > last) {
        for (int32_t i = 0; i <= last; i++) to[i] = i;
    } else {
        join_heads(p, scores, last);
        scores[0] = INFINITY;
        for (int64_t i = 0; i < LAST; i++) scores[last - i] = INFINITY;
        kvr_choose(scores, last + 1, count, to);
    }
    for (int64_t i = 0; i < count; i++) to[i] = table[to[i]];
    p->contexts[task] = (int32_t)((count - 1) * a->block_size + query->pos % a->block_size + 1);
}

/* What was chosen is attended to: as by one sequence for each query and KV head. */
static void attend(Pages *p) {
    const Attention *a = p->a;
    int64_t shares = a->shares, num_seqs = p->count * p->kv_heads, counts[3];
    int64_t num_items = num_seqs * shares * (p->most * a->block_size / SPLIT_KEYS + 2);
    int64_t partial = num_items * a->group * (a->value_dim + 2);
    int32_t *merges = kvr_scratch(SCRATCH_PAGES, sizeof(int32_t) * (ITEM * num_items + (MERGE * shares + 2) * num_seqs) +
                                                     sizeof(float) * partial);
    int32_t *items = merges + MERGE * shares * num_seqs, *start = items + ITEM * num_items, *ones = start + num_seqs;
    Attention g = *a;
    g.quest = NULL, g.tables = p->tables, g.table_stride = p->most, g.context_len = p->contexts;
    g.query_start = start, g.query_len = ones, g.items = items, g.merges = merges, g.partial = (float *)(ones + num_seqs);
    for (int64_t i = 0; i < num_seqs; i++) start[i] = (int32_t)p->queries[i / p->kv_heads].row, ones[i] = 1;
    kvr_attention_plan(num_seqs, ones, p->contexts, shares, 1, 0, 0, 0, NULL, items, merges, counts);
    for (int64_t i = 0; i < counts[0]; i++) items[ITEM * i + 1] += (int32_t)(items[ITEM * i] % p->kv_heads * shares);
    for (int64_t i = 0; i < counts[1]; i++) merges[MERGE * i + 1] += (int32_t)(merges[MERGE * i] % p->kv_heads * shares);
    g.num_items = counts[0], g.num_merges = counts[1];
    kvr_attention(&g, a->qkv, a->out, a->pool);
}

void kvr_attend_pages(const Attention *a) {
    const Quest *q = a->quest;
    int64_t tasks = 0, kv_heads = a->num_heads / (a->group * a->shares);
    Pages p = {.a = a, .q = q, .size = kv_size(a), .heads = a->num_heads, .kv_heads = kv_heads};
    p.together = a->group * a->shares, p.page = 2 * a->head_dim, p.stride = kv_heads * p.page;
    int64_t layer = ((const char *)a->pool - (const char *)q->pool) / (kv_heads * p.page * a->block_size * p.size);
    p.bounds = (char *)q->bounds + layer * q->num_blocks * p.stride * p.size;
    for (int64_t s = 0; s < q->num_seqs; s++) tasks += bound_tasks(a, s);
    kvr_parallel(a->threads, tasks, bound_task, &p);
    while (next_queries(&p)) {
        int64_t scores = p.count * p.heads * p.chunks * SCORED, rows = p.count * kv_heads;
        p.scores = kvr_scratch(SCRATCH_SELECTED, sizeof(float) * scores + sizeof(int32_t) * rows * (p.most + 1));
        p.tables = (int32_t *)(p.scores + scores), p.contexts = p.tables + rows * p.most;
        kvr_parallel(a->threads, rows * p.chunks, score_task, &p);
        kvr_parallel(a->threads, rows, choose_task, &p);
        attend(&p);
    }
}

void kvr_keep_bounds(const Attention *a) {
    for (int64_t s = 0; a->quest && s < a->quest->num_seqs; s++)
        if (num_bounded(a, s)) a->quest->bounded[s] = (int32_t)num_bounded(a, s);
}
