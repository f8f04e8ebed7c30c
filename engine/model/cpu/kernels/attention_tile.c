/* A tile of attention: some tokens of one sequence, with the heads of one group, against its keys.
 * Prompts are bound by arithmetic, a single token by reading its keys and values once. */
#include "attention_integers.h"
#include "pool.h"

/* How many rows of a tile look at a chunk of keys together. */
INLINE int64_t rows_together(int kind) { return kind == TILES ? 2 * TILE : 48; }

/* Rows are the tile's tokens times its heads. Where factors are narrowed, two numbers share a word. */
typedef struct {
    float *q;             /* [rows, head_dim]; narrowed [rows, head_dim / 2] words */
    float *scores;        /* [rows, KEYS]; narrowed, weights are [rows, KEYS / 2] words, KEYS apart */
    float *acc, *sum;     /* [rows, value_dim]: of a stretch, and of all stretches before it */
    float *peak, *total;  /* of `acc`: [rows], padded to VL as all numbers of rows are */
    float *totals;        /* [rows, VL]: lanes whose sum `total` becomes at the end of a stretch */
    float *sum_peak, *sum_total; /* of `sum` */
    float *top, *shrink;  /* largest score of a chunk, and what the peak's change makes of `acc` */
    float *keys;          /* [head_dim, TURNED]; narrowed [head_dim / 2, TURNED] words */
    float *wide;          /* [RUN, head_dim]: keys or values in float32; narrowed
                             [KEYS / 2, head_dim] words: pairs of values */
    float *q_units, *units; /* of half floats and integers: of queries and weights, [rows] */
    float *key_units, *value_units; /* of keys and values, [KEYS]; 2 * VL more may be written to */
    int64_t rows, group, first_pos; /* first_pos: position of the first token */
    int64_t first_row;    /* of some rows of a tile: how many it has before them */
} Tile;

INLINE int64_t position_of(const Tile *t, int64_t row) {
    return t->first_pos + (t->first_row + row) / t->group;
}

static void tile_layout(const Attention *a, Tile *t, int64_t rows) {
    int64_t dim = a->head_dim, width = a->value_dim, padded = (rows + VL - 1) / VL * VL;
    int64_t wide = (a->narrowed ? KEYS / 2 : RUN) * dim;
    int64_t numbers = padded * (dim + KEYS + 2 * width + VL + 8) + dim * TURNED + wide;
    numbers += 2 * (KEYS + VL);
    t->q = kvr_scratch(OF_TASKS, sizeof(float) * numbers);
    t->keys = t->q + padded * dim;
    t->wide = t->keys + dim * TURNED;
    t->scores = t->wide + wide;
    t->acc = t->scores + padded * KEYS;
    t->sum = t->acc + padded * width;
    t->totals = t->sum + padded * width;
    t->peak = t->totals + padded * VL;
    t->total = t->peak + padded;
    t->sum_peak = t->total + padded;
    t->sum_total = t->sum_peak + padded;
    t->top = t->sum_total + padded;
    t->shrink = t->top + padded;
    t->q_units = t->shrink + padded;
    t->units = t->q_units + padded;
    t->key_units = t->units + padded;
    t->value_units = t->key_units + KEYS;
    t->rows = rows, t->group = a->group, t->first_row = 0;
}

INLINE int is_bfloat16(int narrowed) { return narrowed == PAIRS || narrowed == TILES; }

/* In place: [count] numbers become as many of half the size. */
INLINE void narrow_row(int narrowed, float *x, int64_t count, float *unit) {
    if (narrowed == HALVES) halves_row(x, count, (int16_t *)x, unit);
    if (narrowed == INT16) *unit = quantize(x, count, most_of_query(count), (int16_t *)x);
    for (int64_t i = 0; is_bfloat16(narrowed) && i < count; i += VL)
        *(vhu *)((uint16_t *)x + i) = narrow(load(x + i));
}

/* Queries of the tile, scaled. For the sinks, those that are further away than a query may be are
 * turned back. */
static void tile_queries(const Attention *a, Tile *t, const float *from, int for_sinks) {
    int64_t dim = a->head_dim;
    for (int64_t r = 0; r < t->rows; r++) {
        const float *x = from + r / t->group * a->qkv_stride + r % t->group * dim;
        float *q = t->q + r * (a->narrowed ? dim / 2 : dim);
        for (int64_t d = 0; d < dim; d += VL) store(q + d, load(x + d) * a->scale);
        int64_t back = position_of(t, r) - (a->window + a->num_sinks - 1);
        if (for_sinks && back > 0) turn_back(a, q, back);
        narrow_row(a->narrowed, q, dim, t->q_units + r);
    }
}

/* Whether all rows of the tile see all keys of a chunk. */
static int all_see(const Tile *t, const Keys *k) {
    int64_t last = k->base + KEYS - 1, behind = position_of(t, t->rows - 1) - k->window;
    return k->stop > last && position_of(t, 0) >= last && k->floor <= k->base && k->first <= k->base &&
           (!k->window || behind < k->base);
}

/* A row's scores of keys that it must not see are hidden. */
INLINE void mask_row(const Tile *t, const Keys *k, int64_t row) {
    float *s = t->scores + row * KEYS;
    int64_t pos = position_of(t, row), low = k->window ? pos - k->window + 1 : 0;
    int64_t from = (low > k->floor ? low : k->floor) - k->base;
    int64_t to = (pos < k->stop ? pos + 1 : k->stop) - k->base;
    for (int64_t i = 0; i < from && i < KEYS; i++) s[i] = HIDDEN;
    for (int64_t i = to < 0 ? 0 : to; i < KEYS; i++) s[i] = HIDDEN;
}

/* What is left to do to a row's scores; returns the largest one. */
INLINE float finish_row(const Attention *a, const Tile *t, const Keys *k, int64_t row, int all) {
    float *s = t->scores + row * KEYS;
    for (int64_t i = 0; has_units(a->narrowed) && i < KEYS; i += VL)
        store(s + i, load(s + i) * load(t->key_units + i));
    if (a->softcap)
        for (int64_t i = 0; i < KEYS; i += VL)
            store(s + i, vtanh(load(s + i) / a->softcap) * a->softcap);
    if (!all) mask_row(t, k, row);
    vf top = load(s);
    for (int64_t i = VL; i < KEYS; i += VL) top = vmax(top, load(s + i));
    return max_lanes(top);
}

/* Scores relative to the row's peak become weights, in place; returns sums of them. Where values have
 * units, weights are times those. */
INLINE vf weigh_row(int narrowed, const Tile *t, int64_t row) {
    float *s = t->scores + row * KEYS, peak = t->peak[row];
    vf sum = splat(0), weights[KEYS / VL];
    UNROLL for (int i = 0; i < KEYS / VL; i++) {
        vf below = load(s + i * VL) - peak, p = narrowed ? vexp_rough(below) : vexp(below);
        sum += p;
        weights[i] = has_units(narrowed) ? p * load(t->value_units + i * VL) : p;
    }
    if (narrowed == HALVES) t->units[row] = halve_vectors(weights, KEYS / VL, (int16_t *)s);
    if (narrowed == INT16)
        t->units[row] = quantize_vectors(weights, KEYS / VL, MOST_OF_INT16, (int16_t *)s);
    if (is_bfloat16(narrowed))
        UNROLL for (int i = 0; i < KEYS / VL; i += 2) /* one store: what takes all of it need not wait */
            *(vh2u *)((uint16_t *)s + i * VL) = narrow_both(weights[i], weights[i + 1]);
    if (!narrowed)
        UNROLL for (int i = 0; i < KEYS / VL; i++) store(s + i * VL, weights[i]);
    return sum;
}

/* Scores become weights; peaks, totals and accumulators follow. A row that saw no key yet takes all of
 * them for equal: the first one that it does see shrinks that to nothing. */
static void soften(const Attention *a, const Tile *t, const Keys *k) {
    int all = all_see(t, k);
    for (int64_t r = 0; r < t->rows; r++) t->top[r] = finish_row(a, t, k, r, all);
    for (int64_t r = 0; r < t->rows; r += VL) {
        vf old = load(t->peak + r), peak = vmax(old, load(t->top + r));
        store(t->peak + r, peak);
        store(t->shrink + r, vexp(old - peak));
    }
    for (int64_t r = 0; r < t->rows; r++) {
        float *acc = t->acc + r * a->value_dim, *totals = t->totals + r * VL, shrink = t->shrink[r];
        vf sum = a->narrowed == HALVES  ? weigh_row(HALVES, t, r)
                 : a->narrowed == INT16 ? weigh_row(INT16, t, r)
                 : a->narrowed          ? weigh_row(PAIRS, t, r)
                                        : weigh_row(0, t, r);
        store(totals, load(totals) * shrink + sum);
        for (int64_t d = 0; shrink != 1.0f && d < a->value_dim; d += VL)
            store(acc + d, load(acc + d) * shrink);
    }
}

/* Keys and values, which are widened. */
static void wide_keys(const Attention *a, const Tile *t, const Keys *k, Ahead *ahead) {
    int64_t dim = a->head_dim, pace = RUN * kv_size(a);
    int64_t values_at = a->kv_kind == KV_FLOAT32 ? a->value_offset : 0; /* from the keys on */
    for (int64_t pos = k->first, n; pos < k->stop; pos += n) {
        n = run_length(a, pos, k->stop);
        if (!values_at) prefetch_run(a, k->table, k->kv_head, pos, k->stop, a->value_offset);
        const float *keys = kv_run(a, kv_at(a, k->table, k->kv_head, pos), pos, n, t->wide);
        transpose(keys, n, dim, t->keys + pos - k->base, values_at);
    }
    product(0, 0, t->rows, KEYS, dim, t->q, dim, 1, t->keys, TURNED, t->scores, KEYS, NULL,
            ahead, pace);
    soften(a, t, k);
    for (int64_t pos = k->first, n; pos < k->stop; pos += n) {
        n = run_length(a, pos, k->stop);
        int64_t at = kv_at(a, k->table, k->kv_head, pos) + a->value_offset;
        const float *values = kv_run(a, at, pos, n, t->wide);
        product(0, 1, t->rows, a->value_dim, n, t->scores + pos - k->base, KEYS, 1, values, dim,
                t->acc, a->value_dim, NULL, ahead, pace);
    }
}

/* Whether no row may see any of a chunk's keys. */
INLINE int sees_none(const Tile *t, const Keys *k) {
    int64_t first = position_of(t, 0), last = position_of(t, t->rows - 1);
    return last < k->first || (k->window && first - k->window >= k->stop - 1);
}

/* Some rows of a tile, from `row` on, with keys and pairs of values [before, after) that are there, one after
 * the other in the same scores: those stay in the L1 cache. Keys that none of them may see are left out. */
INLINE void meet_some(int kind, const Attention *a, const Tile *t, const Keys *k, int64_t row, int64_t before,
                      int64_t after, Ahead *ahead) {
    int64_t half = a->head_dim / 2, left = t->rows - row, most = rows_together(kind);
    Tile some = *t;
    some.first_row = row, some.rows = left < most ? left : most;
    some.q += row * half, some.acc += row * a->value_dim, some.totals += row * VL;
    some.peak += row, some.top += row, some.shrink += row, some.q_units += row;
    int64_t last = position_of(&some, some.rows - 1) + 1, end = last < k->stop ? last : k->stop;
    int64_t keys = (end - k->base + NR - 1) / NR * NR;
    if (sees_none(&some, k)) return;
    if (kind == TILES) {
        tiled_product(0, some.rows, keys, half, (word *)some.q, half, (word *)t->keys, TURNED,
                      some.scores, KEYS, ahead);
        soften(a, &some, k);
        tiled_product(1, some.rows, a->value_dim, keys / 2, (word *)some.scores, KEYS, (word *)t->wide,
                      a->head_dim, some.acc, a->value_dim, ahead);
        return;
    }
    product(kind, 0, some.rows, keys, half, some.q, half, 1, t->keys, TURNED, some.scores, KEYS,
            some.q_units, ahead, 64);
    soften(a, &some, k);
    product(kind, 1, some.rows, a->value_dim, (keys / 2 < after ? keys / 2 : after) - before,
            some.scores + before, KEYS, 1, t->wide + before * a->head_dim, a->head_dim, some.acc,
            a->value_dim, some.units, ahead, 64);
}

/* The same of bfloat16 as it lies in the pool, or of numbers that it becomes. */
INLINE void narrowed_keys(int kind, const Attention *a, const Tile *t, const Keys *k, Ahead *ahead) {
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
    if (has_units(kind)) {
        float *value_units = t->value_units + start - k->base;
        keys_in_units(kind, (word *)t->keys, half, k->first - k->base, k->stop - k->base, t->key_units);
        memset(t->value_units, 0, sizeof(float) * KEYS);
        if (kind == INT16)
            integer_values(values, count, a->value_dim, pairs, dim, value_units);
        else
            halve_values(pairs, (count + 1) / 2, a->value_dim, dim, value_units);
    }
    if (kind == TILES) { /* they take pairs that are not there too */
        memset(t->wide, 0, sizeof(word) * before * dim);
        memset(t->wide + after * dim, 0, sizeof(word) * (KEYS / 2 - after) * dim);
    }
    int64_t most = rows_together(kind); /* the last ones see keys if any do */
    for (int64_t row = 0; row < t->rows; row += most)
        meet_some(kind, a, t, k, row, before, after, row + most < t->rows ? NULL : ahead);
}

static void paired_keys(const Attention *a, const Tile *t, const Keys *k, Ahead *ahead) {
    narrowed_keys(PAIRS, a, t, k, ahead);
}

static void halved_keys(const Attention *a, const Tile *t, const Keys *k, Ahead *ahead) {
    narrowed_keys(HALVES, a, t, k, ahead);
}

/* Few rows, which meet keys as they lie. */
static void few_integers(const Attention *a, const Tile *t, const Keys *k, Ahead *ahead) {
    int64_t dim = a->head_dim, first = k->first - k->base, stop = k->stop - k->base;
    int64_t start = first & ~(int64_t)1; /* pairs begin at even positions, wherever the keys do */
    const uint16_t *keys[KEYS], *values[KEYS];
    word *weights = (word *)t->scores + start / 2, *pairs = (word *)t->wide + start / 2 * dim;
    if (sees_none(t, k)) return;
    for (int64_t pos = k->first, n; pos < k->stop; pos += n) {
        n = run_length(a, pos, k->stop);
        const uint16_t *at = (const uint16_t *)a->pool + kv_at(a, k->table, k->kv_head, pos);
        for (int64_t i = pos - k->base; i < pos - k->base + n; i++, at += dim)
            keys[i] = at, values[i] = at + a->value_offset;
    }
    values[start] = values[first]; /* any, if it is another: no row sees it */
#define FEW(DIM) \
    few_scores(DIM, t->rows, (word *)t->q, t->q_units, first, stop, keys, a->value_offset, t->scores, \
               t->key_units, ahead)
    switch (dim) {
    case 64: FEW(64); break;
    case 128: FEW(128); break;
    default: FEW(dim);
    }
#undef FEW
    memset(t->value_units, 0, sizeof(float) * KEYS);
    integer_values(values + start, stop - start, a->value_dim, pairs, dim, t->value_units + start);
    soften(a, t, k);
    product(INT16, 1, t->rows, a->value_dim, (stop - start + 1) / 2, weights, KEYS, 1, pairs, dim, t->acc,
            a->value_dim, t->units, ahead, 64);
}

static void integer_keys(const Attention *a, const Tile *t, const Keys *k, Ahead *ahead) {
    if (t->rows <= FEW_ROWS && a->head_dim <= MOST_DIM)
        few_integers(a, t, k, ahead);
    else
        narrowed_keys(INT16, a, t, k, ahead);
}

static void tiled_keys(const Attention *a, const Tile *t, const Keys *k, Ahead *ahead) {
    narrowed_keys(TILES, a, t, k, ahead);
}

/* The tile's queries against the keys of one stretch; chunks end at multiples of KEYS. */
static void tile_stretch(const Attention *a, const Tile *t, Keys keys, Ahead *ahead) {
    int64_t end = keys.end;
    void (*meet)(const Attention *, const Tile *, const Keys *, Ahead *) =
        a->narrowed == TILES    ? tiled_keys
        : a->narrowed == HALVES ? halved_keys
        : a->narrowed == INT16  ? integer_keys
        : a->narrowed == PAIRS  ? paired_keys
                                : wide_keys;
    memset(t->acc, 0, sizeof(float) * t->rows * a->value_dim);
    memset(t->totals, 0, sizeof(float) * t->rows * VL);
    for (int64_t r = 0; r < t->rows; r++) t->peak[r] = HIDDEN;
    for (; keys.first < end; keys.first = keys.stop) {
        keys.base = keys.first / KEYS * KEYS;
        keys.stop = keys.base + KEYS < end ? keys.base + KEYS : end;
        meet(a, t, &keys, ahead);
    }
    for (int64_t r = 0; r < t->rows; r++) t->total[r] = sum_lanes(load(t->totals + r * VL));
}

/* sum += acc, each relative to its own peak. One function for all: the compiler may join products and
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

static void add_stretch(const Attention *a, Tile *t, int is_first) {
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
    if (a->narrowed == INT16) columns_in_order(out, a->value_dim);
}

void kvr_tile_item(const Attention *a, const int32_t *item, const int32_t *next) {
    int64_t seq = item[0], head = item[1], tokens = item[3] - item[2], width = a->value_dim;
    int64_t start = a->query_start[seq] + item[2], group = a->group;
    int64_t first_pos = a->context_len[seq] - a->query_len[seq] + item[2];
    int64_t end = first_pos + tokens; /* the last token sees itself */
    Stretches s = stretches(a->window, a->num_sinks, first_pos, end);
    int64_t from = item[4] < 0 ? 0 : item[4], to = item[4] < 0 ? s.count : item[4] + 1;
    const float *queries = a->qkv + start * a->qkv_stride + head * group * a->head_dim;
    Ahead ahead = {.a = a, .next = next};
    Tile t;
    if (a->narrowed == TILES) tiles_begin();
    tile_layout(a, &t, tokens * group);
    t.first_pos = first_pos;
    for (int64_t i = from; i < to; i++) {
        int is_sinks = s.sinks && !i;
        Keys keys = {.table = a->tables + seq * a->table_stride, .kv_head = head / a->shares};
        stretch_keys(&s, i, &keys.first, &keys.end);
        if (!is_sinks) keys.floor = s.sinks, keys.window = a->window;
        if (i == from || (s.sinks && i == 1)) {
            look_ahead(&ahead, &keys, is_sinks || item[4] >= 0 ? keys.end : end);
            tile_queries(a, &t, queries, is_sinks);
        }
        tile_stretch(a, &t, keys, &ahead);
        add_stretch(a, &t, i == from);
    }
    if (a->narrowed == TILES) tiles_end();
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
