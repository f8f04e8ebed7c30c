/* Attention of a ragged batch over the paged KV pool, with grouped query heads and causal masking.
 *
 * The pool is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]. A sequence that
 * feeds one token is cut along its context into splits of fixed length, so that one long one keeps
 * all threads busy and its result does not depend on who else is in the batch. A sequence that
 * feeds more is cut into tiles of queries; keys and values are gathered once per tile and KV head.
 * Both keep a running maximum and sum (online softmax), in float32. */
#include <stdlib.h>

#include "common.h"

#define SPLIT 256    /* keys per split of a one-token query; a multiple of every block size */
#define TILE_ROWS 96 /* query rows (tokens * heads of the group) per tile, about */
#define KEYS 64      /* keys gathered at a time */
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

int64_t kvr_attention_bytes(void) { return sizeof(Attention); }
int64_t kvr_attention_split(void) { return SPLIT; }
int64_t kvr_attention_tile(int64_t group) { return group < TILE_ROWS ? TILE_ROWS / group : 1; }
int64_t kvr_attention_max_dim(void) { return MAX_DIM; }
int64_t kvr_attention_max_group(void) { return MAX_GROUP; }
int64_t kvr_vector_width(void) { return VL; }

/* Element offset of position `pos` of this KV head, from the layer's keys in block 0. */
INLINE int64_t kv_at(const Attention *a, const int32_t *table, int64_t head, int64_t pos) {
    int64_t block = table[pos / a->block_size];
    return block * a->block_stride + (head * a->block_size + pos % a->block_size) * a->head_dim;
}

/* One query token, one KV head, keys [first, end): acc [group, dim], peak and total per head. */
INLINE void one_split(const Attention *a, const float *q, const int32_t *table, int64_t head,
                      int64_t first, int64_t end, int group, int dim, int bf16, float *acc,
                      float *peak, float *total) {
    float weight[MAX_GROUP][SPLIT] __attribute__((aligned(64)));
    for (int64_t pos = first; pos < end; pos++) {
        int64_t at = kv_at(a, table, head, pos);
        for (int g = 0; g < group; g++) {
            vf s0 = splat(0), s1 = splat(0);
            for (int d = 0; d < dim; d += 2 * VL) {
                s0 += load(q + g * dim + d) * load_kv(a->pool, at + d, bf16);
                if (d + VL < dim)
                    s1 += load(q + g * dim + d + VL) * load_kv(a->pool, at + d + VL, bf16);
            }
            weight[g][pos - first] = sum_lanes(s0 + s1) * a->scale;
        }
    }
    int64_t count = end - first, padded = (count + VL - 1) / VL * VL;
    for (int g = 0; g < group; g++) {
        vf top = splat(-INFINITY), sum = splat(0);
        for (int64_t i = count; i < padded; i++) weight[g][i] = -INFINITY;
        for (int64_t i = 0; i < padded; i += VL) {
            vf s = load(weight[g] + i);
            vi more = s > top;
            top = (vf)(((vi)s & more) | ((vi)top & ~more));
        }
        peak[g] = max_lanes(top);
        for (int64_t i = 0; i < padded; i += VL) {
            vf p = vexp(load(weight[g] + i) - splat(peak[g]));
            store(weight[g] + i, p);
            sum += p;
        }
        total[g] = sum_lanes(sum);
    }
    memset(acc, 0, sizeof(float) * group * dim);
    for (int64_t pos = first; pos < end; pos++) {
        int64_t at = kv_at(a, table, head, pos) + a->value_offset;
        for (int d = 0; d < dim; d += VL) {
            vf value = load_kv(a->pool, at + d, bf16);
            for (int g = 0; g < group; g++) {
                float *to = acc + g * dim + d;
                store(to, load(to) + splat(weight[g][pos - first]) * value);
            }
        }
    }
}

static void split_item(const Attention *a, const int32_t *item) {
    int64_t seq = item[0], head = item[1], first = item[2];
    int64_t group = a->num_heads / a->num_kv_heads, dim = a->head_dim;
    int64_t end = a->context_len[seq] < first + SPLIT ? a->context_len[seq] : first + SPLIT;
    const int32_t *table = a->tables + seq * a->table_stride;
    const float *q = a->qkv + a->query_start[seq] * a->qkv_stride + head * group * dim;
    float acc[MAX_GROUP * MAX_DIM] __attribute__((aligned(64)));
    float peak[MAX_GROUP], total[MAX_GROUP];
#define SPLIT_DIM(DIM) \
    if (a->kv_bf16) one_split(a, q, table, head, first, end, group, DIM, 1, acc, peak, total); \
    else one_split(a, q, table, head, first, end, group, DIM, 0, acc, peak, total);
    if (dim == 64) { SPLIT_DIM(64) }
    else if (dim == 128) { SPLIT_DIM(128) }
    else { SPLIT_DIM((int)dim) }
#undef SPLIT_DIM
    for (int64_t g = 0; g < group; g++) {
        int64_t row = (a->query_start[seq] * a->num_heads + head * group + g) * dim;
        float *out = item[3] < 0 ? a->out + row : a->partial + (item[3] * group + g) * (dim + 2);
        float scale = item[3] < 0 ? 1.0f / total[g] : 1.0f;
        for (int64_t d = 0; d < dim; d++) out[d] = acc[g * dim + d] * scale;
        if (item[3] >= 0) out[dim] = peak[g], out[dim + 1] = total[g];
    }
}

static void merge(const Attention *a, const int32_t *item) {
    int64_t group = a->num_heads / a->num_kv_heads, dim = a->head_dim;
    for (int64_t g = 0; g < group; g++) {
        const float *parts = a->partial + (item[2] * group + g) * (dim + 2);
        int64_t step = group * (dim + 2);
        float peak = -INFINITY, total = 0;
        for (int i = 0; i < item[3]; i++) peak = fmaxf(peak, parts[i * step + dim]);
        float *out = a->out + (a->query_start[item[0]] * a->num_heads + item[1] * group + g) * dim;
        memset(out, 0, sizeof(float) * dim);
        for (int i = 0; i < item[3]; i++) {
            float weight = expf(parts[i * step + dim] - peak);
            total += weight * parts[i * step + dim + 1];
            for (int64_t d = 0; d < dim; d++) out[d] += weight * parts[i * step + d];
        }
        for (int64_t d = 0; d < dim; d++) out[d] /= total;
    }
}

typedef struct {
    float *q, *acc;              /* [rows, dim] */
    float *scores;               /* [rows, KEYS] */
    float *keys;                 /* [dim, KEYS]: transposed */
    float *values;               /* [KEYS, dim] */
    float *peak, *total;         /* [rows] */
    int64_t rows, first_pos;     /* first_pos: position of the tile's first token */
} Tile;

/* Keys (transposed) and values of positions [first, first + KEYS); zeros from `end` on. */
INLINE void gather(const Attention *a, const Tile *t, const int32_t *table, int64_t head,
                   int64_t first, int64_t end, int dim, int bf16) {
    for (int64_t j = 0; j < KEYS; j++) {
        int64_t pos = first + j;
        if (pos >= end) {
            for (int d = 0; d < dim; d++) t->keys[d * KEYS + j] = 0;
            memset(t->values + j * dim, 0, sizeof(float) * dim);
            continue;
        }
        int64_t at = kv_at(a, table, head, pos);
        for (int d = 0; d < dim; d += VL) {
            vf key = load_kv(a->pool, at + d, bf16);
            for (int i = 0; i < VL; i++) t->keys[(d + i) * KEYS + j] = key[i];
            store(t->values + j * dim + d, load_kv(a->pool, at + a->value_offset + d, bf16));
        }
    }
}

/* Scores of one row become weights; the row's peak, total and accumulator follow. */
static void softmax_row(const Tile *t, int64_t row, int64_t visible, int dim) {
    float *s = t->scores + row * KEYS;
    for (int64_t j = visible > 0 ? visible : 0; j < KEYS; j++) s[j] = -INFINITY;
    vf top = load(s), sum = splat(0);
    for (int j = VL; j < KEYS; j += VL) {
        vf x = load(s + j);
        vi more = x > top;
        top = (vf)(((vi)x & more) | ((vi)top & ~more));
    }
    float peak = max_lanes(top), old = t->peak[row];
    if (peak > old) {
        float shrink = expf(old - peak); /* 0 for the first chunk: old is -inf */
        t->peak[row] = peak;
        t->total[row] *= shrink;
        float *acc = t->acc + row * dim;
        for (int d = 0; d < dim; d += VL) store(acc + d, load(acc + d) * shrink);
    }
    for (int j = 0; j < KEYS; j += VL) {
        vf p = vexp(load(s + j) - splat(t->peak[row]));
        store(s + j, p);
        sum += p;
    }
    t->total[row] += sum_lanes(sum);
}

static void tile_chunk(const Tile *t, int64_t group, int64_t first, int dim) {
    for (int64_t r = 0, rows; r < t->rows; r += rows) {
        rows = even_rows(t->rows - r);
        for (int64_t j = 0; j < KEYS; j += NR)
            multiply(rows, 2, dim, t->q + r * dim, dim, t->keys + j, KEYS,
                       t->scores + r * KEYS + j, KEYS, 0, NULL);
        int any = 0;
        for (int64_t i = r; i < r + rows; i++) {
            int64_t visible = t->first_pos + i / group + 1 - first;
            float *s = t->scores + i * KEYS;
            any |= visible > 0;
            if (visible > 0) softmax_row(t, i, visible, dim);
            else memset(s, 0, sizeof(float) * KEYS);
        }
        if (!any) continue;
        int d = 0;
        for (; d + NR <= dim; d += NR)
            multiply(rows, 2, KEYS, t->scores + r * KEYS, KEYS, t->values + d, dim,
                       t->acc + r * dim + d, dim, 1, NULL);
        if (d < dim)
            multiply(rows, 1, KEYS, t->scores + r * KEYS, KEYS, t->values + d, dim,
                       t->acc + r * dim + d, dim, 1, NULL);
    }
}

static void tile_item(const Attention *a, const int32_t *item, Tile *t) {
    int dim = a->head_dim;
    int64_t seq = item[0], head = item[1], first_query = item[2];
    int64_t group = a->num_heads / a->num_kv_heads, most = kvr_attention_tile(group);
    int64_t left = a->query_len[seq] - first_query, tokens = left < most ? left : most;
    int64_t start = a->query_start[seq] + first_query;
    t->rows = tokens * group;
    t->first_pos = a->context_len[seq] - a->query_len[seq] + first_query;
    for (int64_t r = 0; r < t->rows; r++) {
        const float *q = a->qkv + (start + r / group) * a->qkv_stride;
        for (int d = 0; d < dim; d += VL)
            store(t->q + r * dim + d, load(q + (head * group + r % group) * dim + d) * a->scale);
        t->peak[r] = -INFINITY;
        t->total[r] = 0;
    }
    memset(t->acc, 0, sizeof(float) * t->rows * dim);
    int64_t end = t->first_pos + tokens; /* the last token sees itself */
    const int32_t *table = a->tables + seq * a->table_stride;
    for (int64_t first = 0; first < end; first += KEYS) {
        if (a->kv_bf16)
            gather(a, t, table, head, first, end, dim, 1);
        else
            gather(a, t, table, head, first, end, dim, 0);
        tile_chunk(t, group, first, dim);
    }
    for (int64_t r = 0; r < t->rows; r++) {
        int64_t row = (start + r / group) * a->num_heads + head * group + r % group;
        float scale = 1.0f / t->total[r];
        for (int d = 0; d < dim; d += VL)
            store(a->out + row * dim + d, load(t->acc + r * dim + d) * scale);
    }
}

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

void kvr_attention(const Attention *base, const float *qkv, float *out, const void *pool) {
    Attention copy = *base, *a = &copy;
    a->qkv = qkv, a->out = out, a->pool = pool;
    int64_t group = a->num_heads / a->num_kv_heads, dim = a->head_dim;
    int64_t rows = kvr_attention_tile(group) * group;
#pragma omp parallel num_threads(a->threads)
    {
        int64_t floats = rows * (2 * dim + KEYS + 2) + 2 * KEYS * dim;
        float *scratch = aligned_alloc(64, (sizeof(float) * floats + 63) / 64 * 64);
        Tile t = {.keys = scratch, .values = scratch + KEYS * dim};
        t.q = t.values + KEYS * dim;
        t.acc = t.q + rows * dim;
        t.scores = t.acc + rows * dim;
        t.peak = t.scores + rows * KEYS;
        t.total = t.peak + rows;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < a->num_items; i++) {
            const int32_t *item = a->items + 4 * i;
            if (a->query_len[item[0]] == 1)
                split_item(a, item);
            else
                tile_item(a, item, &t);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < a->num_merges; i++) merge(a, a->merges + 4 * i);
        free(scratch);
    }
}
