/* Attention of sequences that feed several tokens: bound by arithmetic. */
#include "attention.h"
#include "pool.h"

/* A tile of query rows. Everything is kept with the rows across, so that keys and values are used
 * as they lie in the pool and every step of the softmax is a whole vector. */
typedef struct {
    float *q, *acc;       /* [dim, width] */
    float *scores;        /* [KEYS, width] */
    float *peak, *total;  /* [width] */
    float *shrink;        /* [width] */
    float *wide;          /* [RUN, dim]: keys or values widened from bfloat16 */
    int32_t *pos;         /* [width]: position of each row's token */
    int64_t rows, width;  /* width: rows, padded to a multiple of NR */
} Tile;

static void tile_layout(Tile *t, int64_t width, int64_t dim) {
    float *scratch = kvr_scratch(sizeof(float) * (width * (2 * dim + KEYS + 4) + RUN * dim));
    t->q = scratch;
    t->acc = t->q + dim * width;
    t->scores = t->acc + dim * width;
    t->peak = t->scores + KEYS * width;
    t->total = t->peak + width;
    t->shrink = t->total + width;
    t->pos = (int32_t *)(t->shrink + width);
    t->wide = t->shrink + 2 * width;
    t->width = width;
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

/* acc[dim, width] += values[count, dim]^T @ weights[count, width] */
static void tile_values(const Tile *t, const float *values, int64_t count, int64_t dim,
                        const float *weights) {
    int64_t w = t->width;
#define CASE(R) \
    case R: micro(R, 2, count, values + d, 1, dim, weights + r, w, to, w, 1, NULL); break;
    for (int64_t r = 0; r < w; r += NR)
        for (int64_t d = 0, rows; d < dim; d += rows) {
            float *to = t->acc + d * w + r;
            rows = even_rows(dim - d);
            switch (rows) { EACH_ROWS(CASE) }
        }
#undef CASE
}

/* Scores of keys [first, first + count) become weights; peaks, totals and accumulators follow. */
static void tile_soften(const Tile *t, int64_t first, int64_t count, int64_t dim) {
    int64_t w = t->width;
    int moved = 0;
    for (int64_t r = 0; r < w; r += VL) {
        vi pos = *(const viu *)(t->pos + r);
        vf old = load(t->peak + r), peak = old, sum = splat(0);
        for (int64_t j = 0; j < count; j++) {
            float *s = t->scores + j * w + r;
            vi hidden = pos < (vi){0} + (int32_t)(first + j);
            vf score = (vf)(((vi)load(s) & ~hidden) | ((vi)splat(HIDDEN) & hidden));
            store(s, score);
            peak = vmax(peak, score);
        }
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

/* Queries of the tile, scaled and transposed; the rows that pad it are zero and see one key. */
static void tile_start(const Attention *a, Tile *t, int64_t start, int64_t first_pos, int64_t head,
                       int64_t group) {
    int64_t dim = a->head_dim, w = t->width;
    for (int64_t r = 0; r < w; r++) {
        const float *q = a->qkv + (start + r / group) * a->qkv_stride;
        q += (head * group + r % group) * dim;
        for (int64_t d = 0; d < dim; d++) t->q[d * w + r] = r < t->rows ? q[d] * a->scale : 0;
        t->pos[r] = r < t->rows ? first_pos + r / group : 0;
        t->peak[r] = HIDDEN;
        t->total[r] = 0;
    }
    memset(t->acc, 0, sizeof(float) * dim * w);
}

void kvr_tile_item(const Attention *a, const int32_t *item) {
    int64_t seq = item[0], head = item[1], first_query = item[2], dim = a->head_dim;
    int64_t group = a->num_heads / a->num_kv_heads, most = kvr_attention_tile(group);
    int64_t left = a->query_len[seq] - first_query, tokens = left < most ? left : most;
    int64_t start = a->query_start[seq] + first_query;
    int64_t first_pos = a->context_len[seq] - a->query_len[seq] + first_query;
    int64_t end = first_pos + tokens; /* the last token sees itself */
    const int32_t *table = a->tables + seq * a->table_stride;
    Tile t = {.rows = tokens * group};
    tile_layout(&t, (t.rows + NR - 1) / NR * NR, dim);
    tile_start(a, &t, start, first_pos, head, group);
    for (int64_t first = 0; first < end; first += KEYS) {
        int64_t stop = first + KEYS < end ? first + KEYS : end;
        for (int64_t pos = first, n; pos < stop; pos += n) {
            n = run_length(a, pos, stop);
            const float *keys = kv_run(a, kv_at(a, table, head, pos), n, t.wide);
            tile_scores(&t, keys, n, dim, t.scores + (pos - first) * t.width);
        }
        tile_soften(&t, first, stop - first, dim);
        for (int64_t pos = first, n; pos < stop; pos += n) {
            n = run_length(a, pos, stop);
            int64_t at = kv_at(a, table, head, pos) + a->value_offset;
            const float *weights = t.scores + (pos - first) * t.width;
            tile_values(&t, kv_run(a, at, n, t.wide), n, dim, weights);
        }
    }
    for (int64_t r = 0; r < t.rows; r++) {
        int64_t row = (start + r / group) * a->num_heads + head * group + r % group;
        float scale = 1.0f / t.total[r];
        for (int64_t d = 0; d < dim; d++) a->out[row * dim + d] = t.acc[d * t.width + r] * scale;
    }
}
