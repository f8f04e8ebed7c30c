/* Attention of sequences that feed several tokens: bound by arithmetic. */
#include "attention.h"
#include "pool.h"

/* A tile of query rows. Everything is kept with the rows across, so that keys and values are used
 * as they lie in the pool and every step of the softmax is a whole vector. */
typedef struct {
    float *q;             /* [head_dim, width] */
    float *acc;           /* [value_dim, width] */
    float *scores;        /* [KEYS, width] */
    float *peak, *total;  /* [width] */
    float *shrink;        /* [width] */
    float *wide;          /* [RUN, head_dim]: keys or values in float32; or [KEYS / 2, head_dim]:
                             pairs of values */
    int32_t *pos;         /* [width]: position of each row's token */
    int64_t rows, width;  /* width: rows, padded to a multiple of NR */
} Tile;

static void tile_layout(const Attention *a, Tile *t, int64_t rows) {
    int64_t width = (rows + NR - 1) / NR * NR, dims = a->head_dim + a->value_dim;
    int64_t wide = (a->in_bf16 ? KEYS / 2 : RUN) * a->head_dim;
    t->q = kvr_scratch(sizeof(float) * (width * (dims + KEYS + 4) + wide));
    t->acc = t->q + a->head_dim * width;
    t->scores = t->acc + a->value_dim * width;
    t->peak = t->scores + KEYS * width;
    t->total = t->peak + width;
    t->shrink = t->total + width;
    t->pos = (int32_t *)(t->shrink + width);
    t->wide = t->shrink + 2 * width;
    t->rows = rows, t->width = width;
}

/* scores[count, width] = keys[count, dim] @ q[dim, width] */
static void tile_scores(const Tile *t, const float *keys, int64_t count, int64_t dim,
                        float *scores) {
    int64_t w = t->width;
#define CASE(R) \
    case R: micro(R, 2, dim, keys + j * dim, dim, 1, t->q + r, w, to, w, 0, NULL); break;
    for (int64_t r = 0; r < w; r += NR)
        for (int64_t j = 0, rows; j < count; j += rows) {
            float *to = scores + j * w + r;
            rows = even_rows(count - j);
            switch (rows) { EACH_ROWS(CASE) }
        }
#undef CASE
}

/* acc[value_dim, width] += values[count, value_dim]^T @ weights[count, width] */
static void tile_values(const Attention *a, const Tile *t, const float *values, int64_t count,
                        const float *weights) {
    int64_t w = t->width, dim = a->head_dim;
#define CASE(R) \
    case R: micro(R, 2, count, values + d, 1, dim, weights + r, w, to, w, 1, NULL); break;
    for (int64_t r = 0; r < w; r += NR)
        for (int64_t d = 0, rows; d < a->value_dim; d += rows) {
            float *to = t->acc + d * w + r;
            rows = even_rows(a->value_dim - d);
            switch (rows) { EACH_ROWS(CASE) }
        }
#undef CASE
}

/* Two rows of numbers side by side, as pairs. */
INLINE void pair_rows(const float *first, const float *second, word *to, int64_t width) {
    for (int64_t r = 0; r < width; r += VL) {
        vu low = bits_bf16(load(first + r)), high = second ? bits_bf16(load(second + r)) : (vu){0};
        *(vuu *)(to + r) = low | high << 16;
    }
}

/* The same two of the queries' dimensions; in place, as rows are read before they are written. */
static void pair_queries(const Attention *a, const Tile *t) {
    for (int64_t d = 0; d < a->head_dim; d += 2) {
        const float *from = t->q + d * t->width;
        pair_rows(from, from + t->width, (word *)t->q + d / 2 * t->width, t->width);
    }
}

/* As tile_scores, of keys in bfloat16 as they lie in the pool. */
static void pair_scores(const Tile *t, const uint16_t *keys, int64_t count, int64_t dim,
                        float *scores) {
    int64_t w = t->width, half = dim / 2;
    const word *q = (const word *)t->q, *pairs = (const word *)keys;
#define CASE(R) \
    case R: micro_pairs(R, 2, half, pairs + j * half, half, 1, q + r, w, to, w, 0); break;
    for (int64_t r = 0; r < w; r += NR)
        for (int64_t j = 0, rows; j < count; j += rows) {
            float *to = scores + j * w + r;
            rows = even_rows(count - j);
            switch (rows) { EACH_ROWS(CASE) }
        }
#undef CASE
}

/* As tile_values, of up to KEYS values in bfloat16, wherever each lies: so many at a time, as the
 * accumulators are read and written for each. `weights` become pairs of keys. */
static void pair_values(const Attention *a, const Tile *t, const uint16_t *const *values,
                        int64_t count, float *weights) {
    int64_t w = t->width, dim = a->head_dim, pairs = (count + 1) / 2;
    word *b = (word *)weights, *both = (word *)t->wide;
    for (int64_t i = 0; i < pairs; i++) {
        const uint16_t *first = values[2 * i], *second = 2 * i + 1 < count ? values[2 * i + 1] : NULL;
        pair_rows(weights + 2 * i * w, second ? weights + (2 * i + 1) * w : NULL, b + i * w, w);
        for (int64_t d = 0; d < a->value_dim; d += VL) {
            vu low = __builtin_convertvector(*(const vhu *)(first + d), vu), high = {0};
            if (second) high = __builtin_convertvector(*(const vhu *)(second + d), vu);
            *(vuu *)(both + i * dim + d) = low | high << 16;
        }
    }
#define CASE(R) \
    case R: micro_pairs(R, 2, pairs, both + d, 1, dim, b + r, w, to, w, 1); break;
    for (int64_t r = 0; r < w; r += NR)
        for (int64_t d = 0, rows; d < a->value_dim; d += rows) {
            float *to = t->acc + d * w + r;
            rows = even_rows(a->value_dim - d);
            switch (rows) { EACH_ROWS(CASE) }
        }
#undef CASE
}

/* Scores of keys [first, first + count) become weights; peaks, totals and accumulators follow. A
 * row that saw no key yet takes all of them for equal: the first one that it does see, itself at
 * the latest, shrinks that to nothing. `window` and `cap` are 0 for none. */
INLINE void soften(const Tile *t, int64_t first, int64_t count, int64_t dim, int64_t window,
                   float cap, int in_bf16) {
    int64_t w = t->width;
    int moved = 0;
    for (int64_t r = 0; r < w; r += VL) {
        vi pos = *(const viu *)(t->pos + r), past = pos - (int32_t)window;
        vf old = load(t->peak + r), peak = old, sum = splat(0);
        for (int64_t j = 0; j < count; j++) {
            float *s = t->scores + j * w + r;
            vi key = (vi){0} + (int32_t)(first + j), hidden = pos < key;
            if (window) hidden |= past >= key;
            vf score = load(s);
            if (cap) score = vtanh(score / cap) * cap;
            score = (vf)(((vi)score & ~hidden) | ((vi)splat(HIDDEN) & hidden));
            store(s, score);
            peak = vmax(peak, score);
        }
        peak = near_peak(peak, in_bf16);
        for (int64_t j = 0; j < count; j++) {
            float *s = t->scores + j * w + r;
            vf p = vexp(load(s) - peak);
            store(s, p);
            sum += p;
        }
        vf shrink = vexp(old - peak);
        store(t->shrink + r, shrink);
        store(t->peak + r, peak);
        store(t->total + r, load(t->total + r) * shrink + sum);
        for (int i = 0; i < VL; i++) moved |= shrink[i] != 1.0f;
    }
    if (!moved) return;
    for (int64_t d = 0; d < dim; d++)
        for (int64_t r = 0; r < w; r += VL) {
            float *acc = t->acc + d * w + r;
            store(acc, load(acc) * load(t->shrink + r));
        }
}

static void tile_soften(const Attention *a, const Tile *t, int64_t first, int64_t count,
                        int64_t window) {
    if (window || a->softcap)
        soften(t, first, count, a->value_dim, window, a->softcap, a->in_bf16);
    else
        soften(t, first, count, a->value_dim, 0, 0, a->in_bf16);
}

/* Queries of the tile, scaled and transposed; the rows that pad it are zero. For the sinks, rows
 * that are further away than a query may be are turned back. */
static void tile_queries(const Attention *a, Tile *t, const float *from, int for_sinks) {
    int64_t dim = a->head_dim, w = t->width;
    for (int64_t r = 0; r < w; r++) {
        const float *q = from + r / a->group * a->qkv_stride + r % a->group * dim;
        for (int64_t d = 0; d < dim; d++) t->q[d * w + r] = r < t->rows ? q[d] * a->scale : 0;
        int64_t back = t->pos[r] - (a->window + a->num_sinks - 1);
        if (for_sinks && back > 0) turn_back(a, t->q + r, w, back);
    }
    if (a->in_bf16) pair_queries(a, t);
}

/* Keys and values [first, stop), which are widened. */
static void wide_keys(const Attention *a, const Tile *t, const int32_t *table, int64_t kv_head,
                      int64_t first, int64_t stop, int64_t window) {
    for (int64_t pos = first, n; pos < stop; pos += n) {
        n = run_length(a, pos, stop);
        const float *keys = kv_run(a, kv_at(a, table, kv_head, pos), pos, n, t->wide);
        tile_scores(t, keys, n, a->head_dim, t->scores + (pos - first) * t->width);
    }
    tile_soften(a, t, first, stop - first, window);
    for (int64_t pos = first, n; pos < stop; pos += n) {
        n = run_length(a, pos, stop);
        int64_t at = kv_at(a, table, kv_head, pos) + a->value_offset;
        const float *weights = t->scores + (pos - first) * t->width;
        tile_values(a, t, kv_run(a, at, pos, n, t->wide), n, weights);
    }
}

/* The same in bfloat16, as they lie in the pool. */
static void paired_keys(const Attention *a, const Tile *t, const int32_t *table, int64_t kv_head,
                        int64_t first, int64_t stop, int64_t window) {
    const uint16_t *values[KEYS];
    for (int64_t pos = first, n; pos < stop; pos += n) {
        n = run_length(a, pos, stop);
        const uint16_t *keys = (const uint16_t *)a->pool + kv_at(a, table, kv_head, pos);
        pair_scores(t, keys, n, a->head_dim, t->scores + (pos - first) * t->width);
        for (int64_t i = 0; i < n; i++)
            values[pos - first + i] = keys + a->value_offset + i * a->head_dim;
    }
    tile_soften(a, t, first, stop - first, window);
    pair_values(a, t, values, stop - first, t->scores);
}

/* The tile's queries against keys [from, to). */
static void tile_keys(const Attention *a, const Tile *t, const int32_t *table, int64_t kv_head,
                      int64_t from, int64_t to, int64_t window) {
    for (int64_t first = from; first < to; first += KEYS) {
        int64_t stop = first + KEYS < to ? first + KEYS : to;
        (a->in_bf16 ? paired_keys : wide_keys)(a, t, table, kv_head, first, stop, window);
    }
}

void kvr_tile_item(const Attention *a, const int32_t *item) {
    int64_t seq = item[0], head = item[1], tokens = item[3] - item[2], kv_head = head / a->shares;
    int64_t start = a->query_start[seq] + item[2], group = a->group, width = a->value_dim;
    int64_t first_pos = a->context_len[seq] - a->query_len[seq] + item[2];
    int64_t end = first_pos + tokens; /* the last token sees itself */
    int64_t low = a->window && first_pos >= a->window ? first_pos - a->window + 1 : 0;
    const int32_t *table = a->tables + seq * a->table_stride;
    const float *from = a->qkv + start * a->qkv_stride + head * group * a->head_dim;
    Tile t;
    tile_layout(a, &t, tokens * group);
    for (int64_t r = 0; r < t.width; r++) {
        t.pos[r] = r < t.rows ? first_pos + r / group : 0;
        t.peak[r] = HIDDEN, t.total[r] = 0;
    }
    memset(t.acc, 0, sizeof(float) * width * t.width);
    if (a->window && a->num_sinks && end > a->window) { /* the last row's window left position 0 */
        int64_t sinks = a->num_sinks < end ? a->num_sinks : end;
        tile_queries(a, &t, from, 1);
        tile_keys(a, &t, table, kv_head, 0, sinks, 0);
        low = low > sinks ? low : sinks;
    }
    tile_queries(a, &t, from, 0);
    tile_keys(a, &t, table, kv_head, low, end, a->window);
    for (int64_t r = 0; r < t.rows; r++) {
        int64_t row = (start + r / group) * a->num_heads + head * group + r % group;
        float scale = 1.0f / t.total[r];
        for (int64_t d = 0; d < width; d++) a->out[row * width + d] = t.acc[d * t.width + r] * scale;
    }
}
