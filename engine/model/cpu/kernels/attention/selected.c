/* DeepSeek sparse attention: a token from position `topk` on attends to the `topk` positions up to its own
 * that score highest; earlier ones attend to all, as without it.
 *
 * A score depends on its query and key alone, and of equal scores the earlier position counts as higher.
 * The latents of what is chosen are gathered in order and attended to like a context of that length. So a
 * token's result is the same, bit for bit, whatever shares its step. */
#include "../thread_pool.h"
#include "attention.h"

#define AT_ONCE 16   /* tokens whose scores, or gathered latents, are held at a time */
#define SCORED 256   /* keys of one task */
#define GATHERED 256 /* latents of one task */
#define HEADS 8      /* whose sums stay in registers */

typedef struct {
    int64_t row, seq, pos;
} Token;

/* What is computed for some tokens. */
typedef struct {
    const Attention *a; /* its pool and head_dim: of index keys, or of latents */
    const Selection *s;
    Token tokens[AT_ONCE];
    const float *queries, *weights; /* of all rows */
    float *scores;                  /* [AT_ONCE, stride] */
    char *gathered;                 /* [AT_ONCE, stride] bytes */
    int64_t count, chunks, stride, longest;
    int64_t seq, query; /* where the next tokens are looked for */
} Tokens;

/* The first of a sequence's queries that does not attend to all. */
INLINE int64_t first_sparse(const Attention *a, int64_t seq) {
    int64_t dense = a->selection->topk - (a->context_len[seq] - a->query_len[seq]);
    return dense < 0 ? 0 : dense;
}

int kvr_selects(const Attention *a) {
    for (int64_t s = 0; a->selection && s < a->selection->num_seqs; s++)
        if (first_sparse(a, s) < a->query_len[s]) return 1;
    return 0;
}

/* Up to AT_ONCE further tokens; returns how many. */
static int64_t next_tokens(Tokens *t) {
    const Attention *a = t->a;
    for (t->count = t->longest = 0; t->seq < t->s->num_seqs; t->seq++, t->query = 0) {
        int64_t first = first_sparse(a, t->seq), start = a->context_len[t->seq] - a->query_len[t->seq];
        for (t->query = t->query < first ? first : t->query; t->query < a->query_len[t->seq]; t->query++) {
            if (t->count == AT_ONCE) return t->count;
            int64_t pos = start + t->query;
            t->tokens[t->count++] = (Token){a->query_start[t->seq] + t->query, t->seq, pos};
            t->longest = pos + 1 > t->longest ? pos + 1 : t->longest;
        }
    }
    return t->count;
}

/* VL keys from position `pos` on, turned: [dim, VL]. Behind `end` they are the last one. */
static void turned_keys(const Attention *a, const int32_t *table, int64_t pos, int64_t end, float *wide, vf *to) {
    const float *keys[VL];
    for (int64_t i = 0; i < VL; i++) {
        int64_t at = pos + i < end ? pos + i : end - 1;
        keys[i] = kv_run(a, kv_at(a, table, 0, at), at, 1, wide + i * a->head_dim);
    }
    for (int64_t d = 0; d < a->head_dim; d += VL) {
        UNROLL for (int i = 0; i < VL; i++) to[d + i] = load(keys[i] + d);
        transpose_lanes(to + d);
    }
}

/* Weighted sums of VL positions over `heads`, a constant. */
INLINE vf score(int heads, const float *query, const float *weights, int64_t dim, const vf *keys, vf total) {
    vf sums[HEADS];
    UNROLL for (int h = 0; h < heads; h++) sums[h] = splat(0);
    for (int64_t d = 0; d < dim; d++)
        UNROLL for (int h = 0; h < heads; h++) sums[h] += splat(query[h * dim + d]) * keys[d];
    UNROLL for (int h = 0; h < heads; h++) total += splat(weights[h]) * vmax(splat(0), sums[h]);
    return total;
}

static void score_task(void *arg, int64_t task) {
    const Tokens *t = arg;
    const Attention *a = t->a;
    int64_t dim = a->head_dim, heads = t->s->heads, index = task / t->chunks;
    const Token *token = t->tokens + index;
    const int32_t *table = a->tables + token->seq * a->table_stride;
    int64_t pos = task % t->chunks * SCORED, end = pos + SCORED;
    end = end < token->pos + 1 ? end : token->pos + 1;
    float *wide = kvr_scratch(SCRATCH_TASK, 2 * sizeof(float) * dim * VL);
    vf *keys = (vf *)(wide + dim * VL);
    for (; pos < end; pos += VL) {
        const float *query = t->queries + token->row * heads * dim, *weights = t->weights + token->row * heads;
        int64_t h = 0;
        vf total = splat(0);
        turned_keys(a, table, pos, end, wide, keys);
        for (; h + HEADS <= heads; h += HEADS)
            total = score(HEADS, query + h * dim, weights + h, dim, keys, total);
        for (; h < heads; h++) total = score(1, query + h * dim, weights + h, dim, keys, total);
        store(t->scores + index * t->stride + pos, total);
    }
}

/* Bits in the order of the numbers. */
INLINE uint32_t ordered(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

/* The lowest that is chosen is found by its bits, from the highest on. */
void kvr_choose(const float *scores, int64_t count, int64_t topk, int32_t *to) {
    static const int shifts[] = {21, 10, 0}, widths[] = {11, 11, 10};
    uint32_t lowest = 0, known = 0;
    for (int part = 0; part < 3; part++) {
        int32_t counts[1 << 11] = {0};
        uint32_t size = 1u << widths[part], bucket = size - 1;
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits = ordered(scores[i]);
            if ((bits & known) == lowest) counts[bits >> shifts[part] & (size - 1)]++;
        }
        for (; counts[bucket] < topk; bucket--) topk -= counts[bucket];
        lowest |= bucket << shifts[part], known |= (size - 1) << shifts[part];
    }
    for (int64_t i = 0; i < count; i++) { /* `topk` is now how many of the lowest are taken */
        uint32_t bits = ordered(scores[i]);
        if (bits > lowest || (bits == lowest && topk-- > 0)) *to++ = (int32_t)i;
    }
}

static void choose_task(void *arg, int64_t task) {
    const Tokens *t = arg;
    const Token *token = t->tokens + task;
    int64_t topk = t->s->topk;
    kvr_choose(t->scores + task * t->stride, token->pos + 1, topk, t->s->selected + token->row * topk);
}

void kvr_select(const Attention *base, const float *queries, const float *weights, const void *pool) {
    Attention a = *base;
    a.pool = pool, a.head_dim = a.selection->dim;
    Tokens t = {.a = &a, .s = a.selection, .queries = queries, .weights = weights};
    while (next_tokens(&t)) {
        t.chunks = (t.longest + SCORED - 1) / SCORED, t.stride = t.chunks * SCORED;
        t.scores = kvr_scratch(SCRATCH_SELECTED, sizeof(float) * AT_ONCE * t.stride);
        kvr_parallel(a.threads, t.count * t.chunks, score_task, &t);
        kvr_parallel(a.threads, t.count, choose_task, &t);
    }
}

static void gather_task(void *arg, int64_t task) {
    const Tokens *t = arg;
    const Attention *a = t->a;
    const Token *token = t->tokens + task / t->chunks;
    const int32_t *table = a->tables + token->seq * a->table_stride;
    int64_t topk = t->s->topk, first = task % t->chunks * GATHERED, bytes = a->head_dim * kv_size(a);
    const int32_t *selected = t->s->selected + token->row * topk;
    char *to = t->gathered + task / t->chunks * t->stride;
    for (int64_t i = first; i < first + GATHERED && i < topk; i++) {
        int64_t pos = selected[i], block = table[pos / a->block_size] * a->block_stride;
        memcpy(to + i * bytes, (const char *)a->pool + kv_at(a, table, 0, pos) * kv_size(a), bytes);
        if (a->kv_kind == KV_FLOAT8) /* scales are behind all numbers */
            to[topk * bytes + i] = ((const char *)a->pool)[block + a->block_size * bytes + pos % a->block_size];
    }
}

void kvr_attend_selected(const Attention *a) {
    int64_t topk = a->selection->topk, shares = a->num_heads / a->group, splits = topk / SPLIT_KEYS + 2;
    int64_t size = topk * (a->head_dim * kv_size(a) + (a->kv_kind == KV_FLOAT8)), counts[3];
    Tokens t = {.a = a, .s = a->selection};
    t.stride = (size + 63) / 64 * 64, t.chunks = (topk + GATHERED - 1) / GATHERED;
    if (!kvr_selects(a)) return;
    int64_t num_items = AT_ONCE * shares * splits, partial = AT_ONCE * a->num_heads * splits * (a->value_dim + 2);
    t.gathered = kvr_scratch(SCRATCH_SELECTED, AT_ONCE * t.stride + sizeof(float) * partial +
                                                   sizeof(int32_t) * ITEM * 2 * num_items);
    float *partials = (float *)(t.gathered + AT_ONCE * t.stride);
    int32_t *items = (int32_t *)(partials + partial), *merges = items + ITEM * num_items;
    int32_t tables[AT_ONCE], start[AT_ONCE], ones[AT_ONCE], contexts[AT_ONCE];
    Attention g = *a;
    g.selection = NULL, g.partial = partials, g.items = items, g.merges = merges;
    g.tables = tables, g.query_start = start, g.query_len = ones, g.context_len = contexts;
    g.table_stride = 1, g.block_size = topk, g.block_stride = t.stride / kv_size(a), g.head_stride = 0;
    while (next_tokens(&t)) {
        for (int32_t i = 0; i < t.count; i++)
            tables[i] = i, start[i] = (int32_t)t.tokens[i].row, ones[i] = 1, contexts[i] = (int32_t)topk;
        kvr_parallel(a->threads, t.count * t.chunks, gather_task, &t);
        kvr_attention_plan(t.count, ones, contexts, shares, 1, 0, 0, 0, NULL, items, merges, counts);
        g.num_items = counts[0], g.num_merges = counts[1];
        kvr_attention(&g, a->qkv, a->out, t.gathered);
    }
}
