/* A tile of attention: some tokens of one sequence, with the heads of one group, against its keys.
 * Prompts are bound by arithmetic, a single token by reading its keys and values once. */
#include "softmax.h"

/* Keys and values, which are widened. */
static void float32_keys(const Attention *a, const Tile *t, const Keys *k, Prefetch *ahead) {
    int64_t dim = a->head_dim, prefetch_step = RUN * kv_size(a);
    int64_t values_at = a->kv_kind == KV_FLOAT32 ? a->value_offset : 0; /* from the keys on */
    for (int64_t pos = k->first, n; pos < k->stop; pos += n) {
        n = run_length(a, pos, k->stop);
        if (!values_at) prefetch_run(a, k->table, k->kv_head, pos, k->stop, a->value_offset);
        const float *keys = kv_run(a, kv_at(a, k->table, k->kv_head, pos), pos, n, t->wide);
        transpose(keys, n, dim, t->keys + pos - k->base, values_at);
    }
    product(0, 0, t->rows, KEYS, dim, t->q, dim, 1, t->keys, KEYS_LD, t->scores, KEYS, NULL,
            ahead, prefetch_step);
    softmax_chunk(a, t, k);
    for (int64_t pos = k->first, n; pos < k->stop; pos += n) {
        n = run_length(a, pos, k->stop);
        int64_t at = kv_at(a, k->table, k->kv_head, pos) + a->value_offset;
        const float *values = kv_run(a, at, pos, n, t->wide);
        product(0, 1, t->rows, a->value_dim, n, t->scores + pos - k->base, KEYS, 1, values, dim,
                t->acc, a->value_dim, NULL, ahead, prefetch_step);
    }
}

/* Whether no row may see any of a chunk's keys. */
INLINE int none_visible(const Tile *t, const Keys *k) {
    int64_t first = position_of(t, 0), last = position_of(t, t->rows - 1);
    return last < k->first || first_seen(k->window, first) >= k->stop;
}

/* Some rows of a tile, from `row` on, with keys and pairs of values [before, after) that are there, one after
 * the other in the same scores: those stay in the L1 cache. Keys that none of them may see are left out. */
INLINE void attend_rows(int kind, const Attention *a, const Tile *t, const Keys *k, int64_t row, int64_t before,
                      int64_t after, Prefetch *ahead) {
    int64_t half = a->head_dim / 2, left = t->rows - row, most = rows_per_pass(kind);
    Tile some = *t;
    some.first_row = row, some.rows = left < most ? left : most;
    some.q += row * half, some.acc += row * a->value_dim, some.totals += row * VL;
    some.peak += row, some.top += row, some.shrink += row, some.q_scales += row;
    int64_t last = position_of(&some, some.rows - 1) + 1, end = last < k->stop ? last : k->stop;
    int64_t keys = (end - k->base + NR - 1) / NR * NR;
    if (none_visible(&some, k)) return;
    if (kind == AMX) {
        amx_product(0, some.rows, keys, half, (word *)some.q, half, (word *)t->keys, KEYS_LD,
                      some.scores, KEYS, ahead);
        softmax_chunk(a, &some, k);
        amx_product(1, some.rows, a->value_dim, keys / 2, (word *)some.scores, KEYS, (word *)t->wide,
                      a->head_dim, some.acc, a->value_dim, ahead);
        return;
    }
    product(kind, 0, some.rows, keys, half, some.q, half, 1, t->keys, KEYS_LD, some.scores, KEYS,
            some.q_scales, ahead, 64);
    softmax_chunk(a, &some, k);
    product(kind, 1, some.rows, a->value_dim, (keys / 2 < after ? keys / 2 : after) - before,
            some.scores + before, KEYS, 1, t->wide + before * a->head_dim, a->head_dim, some.acc,
            a->value_dim, some.weight_scales, ahead, 64);
}

/* The same of bfloat16 in the pool's layout, or converted. */
INLINE void low_precision_keys(int kind, const Attention *a, const Tile *t, const Keys *k, Prefetch *ahead) {
    int64_t dim = a->head_dim, half = dim / 2, start = k->first & ~(int64_t)1;
    int64_t count = k->stop - start; /* pairs begin at even positions, wherever the keys do */
    const uint16_t *values[KEYS + 2];
    int64_t before = (start - k->base) / 2, after = before + (count + 1) / 2;
    word *pairs = (word *)t->wide + before * dim;
    for (int64_t pos = k->first, n; pos < k->stop; pos += n) {
        n = run_length(a, pos, k->stop);
        const uint16_t *keys = (const uint16_t *)a->pool + kv_at(a, k->table, k->kv_head, pos);
        transpose((const float *)keys, n, half, t->keys + pos - k->base, a->value_offset / 2);
        for (int64_t i = 0; i < n; i++) values[pos - start + i] = keys + a->value_offset + i * dim;
    }
    if (start < k->first) values[0] = values[1]; /* any: no row sees it */
    values[count] = NULL;
    for (int64_t i = 0; i < count && kind != INT16; i += 2)
        pair_values(values[i], values[i + 1], pairs + i / 2 * dim, a->value_dim);
    if (has_scales(kind)) {
        float *value_scales = t->value_scales + start - k->base;
        scale_keys(kind, (word *)t->keys, half, k->first - k->base, k->stop - k->base, t->key_scales);
        memset(t->value_scales, 0, sizeof(float) * KEYS);
        if (kind == INT16)
            int16_values(values, count, a->value_dim, pairs, dim, value_scales);
        else
            fp16_values(pairs, (count + 1) / 2, a->value_dim, dim, value_scales);
    }
    if (kind == AMX) { /* they take pairs that are not there too */
        memset(t->wide, 0, sizeof(word) * before * dim);
        memset(t->wide + after * dim, 0, sizeof(word) * (KEYS / 2 - after) * dim);
    }
    int64_t most = rows_per_pass(kind); /* the last ones see keys if any do */
    for (int64_t row = 0; row < t->rows; row += most)
        attend_rows(kind, a, t, k, row, before, after, row + most < t->rows ? NULL : ahead);
}

static void bf16_keys(const Attention *a, const Tile *t, const Keys *k, Prefetch *ahead) {
    low_precision_keys(BF16_PAIRS, a, t, k, ahead);
}

static void fp16_keys(const Attention *a, const Tile *t, const Keys *k, Prefetch *ahead) {
    low_precision_keys(FP16, a, t, k, ahead);
}

/* Few rows: K is read in the pool's layout. */
static void few_rows_int16(const Attention *a, const Tile *t, const Keys *k, Prefetch *ahead) {
    int64_t dim = a->head_dim, first = k->first - k->base, stop = k->stop - k->base;
    int64_t start = first & ~(int64_t)1; /* pairs begin at even positions, wherever the keys do */
    const uint16_t *keys[KEYS], *values[KEYS];
    word *weights = (word *)t->scores + start / 2, *pairs = (word *)t->wide + start / 2 * dim;
    if (none_visible(t, k)) return;
    for (int64_t pos = k->first, n; pos < k->stop; pos += n) {
        n = run_length(a, pos, k->stop);
        const uint16_t *at = (const uint16_t *)a->pool + kv_at(a, k->table, k->kv_head, pos);
        for (int64_t i = pos - k->base; i < pos - k->base + n; i++, at += dim)
            keys[i] = at, values[i] = at + a->value_offset;
    }
    values[start] = values[first]; /* any, if it is another: no row sees it */
#define FEW(DIM) \
    few_scores(DIM, t->rows, (word *)t->q, t->q_scales, first, stop, keys, a->value_offset, t->scores, \
               t->key_scales, ahead)
    switch (dim) {
    case 64: FEW(64); break;
    case 128: FEW(128); break;
    default: FEW(dim);
    }
#undef FEW
    memset(t->value_scales, 0, sizeof(float) * KEYS);
    int16_values(values + start, stop - start, a->value_dim, pairs, dim, t->value_scales + start);
    softmax_chunk(a, t, k);
    product(INT16, 1, t->rows, a->value_dim, (stop - start + 1) / 2, weights, KEYS, 1, pairs, dim, t->acc,
            a->value_dim, t->weight_scales, ahead, 64);
}

static void int16_keys(const Attention *a, const Tile *t, const Keys *k, Prefetch *ahead) {
    if (t->rows <= FEW_ROWS && a->head_dim <= MOST_DIM)
        few_rows_int16(a, t, k, ahead);
    else
        low_precision_keys(INT16, a, t, k, ahead);
}

static void amx_keys(const Attention *a, const Tile *t, const Keys *k, Prefetch *ahead) {
    low_precision_keys(AMX, a, t, k, ahead);
}

/* The tile's queries against the keys of one split; chunks end at multiples of KEYS. */
static void tile_split(const Attention *a, const Tile *t, Keys keys, Prefetch *ahead) {
    int64_t end = keys.end;
    void (*attend)(const Attention *, const Tile *, const Keys *, Prefetch *) =
        a->low_precision == AMX    ? amx_keys
        : a->low_precision == FP16 ? fp16_keys
        : a->low_precision == INT16  ? int16_keys
        : a->low_precision == BF16_PAIRS  ? bf16_keys
                                : float32_keys;
    memset(t->acc, 0, sizeof(float) * t->rows * a->value_dim);
    memset(t->totals, 0, sizeof(float) * t->rows * VL);
    for (int64_t r = 0; r < t->rows; r++) t->peak[r] = MASKED;
    for (; keys.first < end; keys.first = keys.stop) {
        keys.base = keys.first / KEYS * KEYS;
        keys.stop = keys.base + KEYS < end ? keys.base + KEYS : end;
        attend(a, t, &keys, ahead);
    }
    for (int64_t r = 0; r < t->rows; r++) t->total[r] = sum_lanes(load(t->totals + r * VL));
}

/* sum += acc, each relative to its own peak. One function for all: the compiler may join gemms and
 * sums in one way here and in another there. */
static __attribute__((noinline)) void add_row(float *sum, float *peak, float *total,
                                              const float *acc, float acc_peak, float acc_total,
                                              int64_t width) {
    float top = fmaxf(*peak, acc_peak), kept = expf(*peak - top), taken = expf(acc_peak - top);
    for (int64_t d = 0; d < width; d += VL)
        store(sum + d, load(sum + d) * kept + load(acc + d) * taken);
    *total = *total * kept + acc_total * taken;
    *peak = top;
}

static void add_split(const Attention *a, Tile *t, int is_first) {
    int64_t width = a->value_dim;
    for (int64_t r = 0; r < t->rows && !is_first; r++)
        add_row(t->sum + r * width, t->sum_peak + r, t->sum_total + r, t->acc + r * width,
                t->peak[r], t->total[r], width);
    if (!is_first) return;
    float *acc = t->acc, *peak = t->peak, *total = t->total;
    t->acc = t->sum, t->peak = t->sum_peak, t->total = t->sum_total;
    t->sum = acc, t->sum_peak = peak, t->sum_total = total;
}

INLINE void write_row(const Attention *a, int64_t row, const float *sum, float total) {
    float scale = 1.0f / total, *out = a->out + row * a->value_dim;
    for (int64_t d = 0; d < a->value_dim; d += VL) store(out + d, load(sum + d) * scale);
    if (a->low_precision == INT16) interleave_columns(out, a->value_dim);
}

void kvr_tile_item(const Attention *a, const int32_t *item, const int32_t *next) {
    int64_t seq = item[0], head = item[1], tokens = item[3] - item[2], width = a->value_dim;
    int64_t start = a->query_start[seq] + item[2], group = a->group;
    int64_t first_pos = a->context_len[seq] - a->query_len[seq] + item[2];
    int64_t end = first_pos + tokens; /* the last token sees itself */
    KvSplits s = kv_splits(a->window, a->num_sinks, first_pos, end);
    int64_t from = item[4] < 0 ? 0 : item[4], to = item[4] < 0 ? s.count : item[4] + 1;
    const float *queries = a->qkv + start * a->qkv_stride + head * group * a->head_dim;
    Prefetch ahead = {.a = a, .next = next};
    Tile t;
    if (a->low_precision == AMX) amx_begin();
    tile_layout(a, &t, tokens * group);
    t.first_pos = first_pos;
    for (int64_t i = from; i < to; i++) {
        int is_sinks = s.sinks && !i;
        Keys keys = {.table = a->tables + seq * a->table_stride, .kv_head = head / a->shares};
        split_keys(&s, i, &keys.first, &keys.end);
        if (!is_sinks) keys.floor = s.sinks, keys.window = a->window;
        if (i == from || (s.sinks && i == 1)) {
            prefetch_start(&ahead, &keys, is_sinks || item[4] >= 0 ? keys.end : end);
            tile_queries(a, &t, queries, is_sinks);
        }
        tile_split(a, &t, keys, &ahead);
        add_split(a, &t, i == from);
    }
    if (a->low_precision == AMX) amx_end();
    for (int64_t r = 0; r < t.rows; r++) {
        int64_t row = (start + r / group) * a->num_heads + head * group + r % group;
        if (item[5] < 0) {
            write_row(a, row, t.sum + r * width, t.sum_total[r]);
        } else {
            float *partial = a->partial + (item[5] * group + r) * (width + 2);
            memcpy(partial, t.sum + r * width, sizeof(float) * width);
            partial[width] = t.sum_peak[r], partial[width + 1] = t.sum_total[r];
        }
    }
}

void kvr_tile_merge(const Attention *a, const int32_t *item) {
    int64_t group = a->group, width = a->value_dim, rows = (item[3] - item[2]) * group;
    int64_t start = a->query_start[item[0]] + item[2], step = rows * (width + 2);
    for (int64_t r = 0; r < rows; r++) {
        float *sum = a->partial + (item[4] * group + r) * (width + 2), *part = sum + step;
        for (int i = 1; i < item[5]; i++, part += step)
            add_row(sum, sum + width, sum + width + 1, part, part[width], part[width + 1], width);
        write_row(a, (start + r / group) * a->num_heads + item[1] * group + r % group, sum, sum[width + 1]);
    }
}
