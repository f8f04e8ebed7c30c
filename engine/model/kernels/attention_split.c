/* Attention of sequences that feed one token: bound by reading the KV cache once. */
#include "attention.h"
#include "pool.h"

/* The sums of four vectors' lanes. */
INLINE v4 sum_lanes_of_four(const vf *v) {
#if defined(__AVX__) && VL == 8
    __m256 left = _mm256_hadd_ps((__m256)v[0], (__m256)v[1]);
    __m256 all = _mm256_hadd_ps(left, _mm256_hadd_ps((__m256)v[2], (__m256)v[3]));
    return (v4)(_mm256_castps256_ps128(all) + _mm256_extractf128_ps(all, 1));
#else
    return (v4){sum_lanes(v[0]), sum_lanes(v[1]), sum_lanes(v[2]), sum_lanes(v[3])};
#endif
}

/* out[h * SPLIT + j] = q[h] . keys[j]; both counts are constants. */
INLINE void dots(int num_keys, int num_heads, const float *q, const float *keys, int64_t dim,
                 float *out) {
    vf acc[3][4];
    UNROLL for (int j = 0; j < num_keys; j++)
        UNROLL for (int h = 0; h < num_heads; h++) acc[h][j] = splat(0);
    for (int64_t d = 0; d < dim; d += VL)
        UNROLL for (int j = 0; j < num_keys; j++) {
            vf key = load(keys + j * dim + d);
            UNROLL for (int h = 0; h < num_heads; h++) acc[h][j] += load(q + h * dim + d) * key;
        }
    UNROLL for (int h = 0; h < num_heads; h++) {
        if (num_keys == 4) {
            v4 sums = sum_lanes_of_four(acc[h]);
            memcpy(out + h * SPLIT, &sums, sizeof sums);
        } else {
            UNROLL for (int j = 0; j < num_keys; j++) out[h * SPLIT + j] = sum_lanes(acc[h][j]);
        }
    }
}

static void run_scores(const float *q, int64_t group, const float *keys, int64_t count,
                       int64_t dim, float *out) {
#define DOTS(KEYS_, HEADS) dots(KEYS_, HEADS, q + h * dim, keys + j * dim, dim, out + h * SPLIT + j)
    for (int64_t h = 0; h < group; h += 3) {
        int64_t heads = group - h, j = 0;
        for (; j + 4 <= count; j += 4) {
            if (heads == 1) DOTS(4, 1);
            else if (heads == 2) DOTS(4, 2);
            else DOTS(4, 3);
        }
        for (; j < count; j++) {
            if (heads == 1) DOTS(1, 1);
            else if (heads == 2) DOTS(1, 2);
            else DOTS(1, 3);
        }
    }
#undef DOTS
}

/* acc[group, width] += weights[group, count] @ values[count, width], whose rows are `dim` apart; a
 * row of weights is SPLIT long. */
static void run_values(const float *weights, int64_t group, const float *values, int64_t count,
                       int64_t dim, int64_t width, float *acc) {
#define CASE(R) \
    case R: \
        for (; d + NR <= width; d += NR) \
            micro(R, 2, count, w, SPLIT, 1, values + d, dim, to + d, width, 1, NULL); \
        if (d < width) micro(R, 1, count, w, SPLIT, 1, values + d, dim, to + d, width, 1, NULL); \
        break;
    for (int64_t h = 0, rows; h < group; h += rows) {
        const float *w = weights + h * SPLIT;
        float *to = acc + h * width;
        int64_t d = 0;
        rows = even_rows(group - h);
        switch (rows) { EACH_ROWS(CASE) }
    }
#undef CASE
}

/* Numbers [padded to VL], rounded in place. */
static void round_all(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += VL) store(x + i, (vf)(bits_bf16(load(x + i)) << 16));
}

/* Scores [padded to VL] become weights in place; returns their sum, *peak is the largest score, or
 * near it. */
static float soften(float *scores, int64_t count, float *peak, int in_bf16) {
    vf top = splat(-INFINITY), sum = splat(0);
    for (int64_t i = count; i % VL; i++) scores[i] = -INFINITY;
    for (int64_t i = 0; i < count; i += VL) top = vmax(top, load(scores + i));
    *peak = near_peak(splat(max_lanes(top)), in_bf16)[0];
    for (int64_t i = 0; i < count; i += VL) {
        vf p = vexp(load(scores + i) - splat(*peak));
        store(scores + i, p);
        sum += p;
    }
    if (in_bf16) round_all(scores, count);
    return sum_lanes(sum);
}

/* The item's queries, scaled; for sinks, which end before the window begins, turned back. */
static void split_queries(const Attention *a, const int32_t *item, float *q) {
    int64_t group = a->group, dim = a->head_dim, seq = item[0];
    const float *from = a->qkv + a->query_start[seq] * a->qkv_stride + item[1] * group * dim;
    for (int64_t i = 0; i < group * dim; i++) q[i] = from[i] * a->scale;
    int64_t low = a->context_len[seq] - a->window, back = low - a->num_sinks;
    if (a->window && a->num_sinks && back > 0 && item[2] < low)
        for (int64_t g = 0; g < group; g++) turn_back(a, q + g * dim, 1, back);
    if (a->in_bf16) round_all(q, group * dim);
}

/* Scores beyond `count`, up to a vector's end, are free to be overwritten. */
static void cap_scores(float *scores, int64_t count, float cap) {
    for (int64_t i = 0; i < count; i += VL)
        store(scores + i, vtanh(load(scores + i) / cap) * cap);
}

void kvr_split_item(const Attention *a, const int32_t *item) {
    int64_t seq = item[0], head = item[1], first = item[2], end = item[3], part = item[4];
    int64_t group = a->group, dim = a->head_dim, width = a->value_dim, kv_head = head / a->shares;
    const int32_t *table = a->tables + seq * a->table_stride;
    float *q = kvr_scratch(sizeof(float) * (group * (dim + width + SPLIT + 2) + RUN * dim));
    float *acc = q + group * dim, *weights = acc + group * width, *wide = weights + group * SPLIT;
    float *peak = wide + RUN * dim, *total = peak + group;
    split_queries(a, item, q);
    for (int64_t i = 0; i < group * width; i++) acc[i] = 0;
    for (int64_t pos = first, n; pos < end; pos += n) {
        n = run_length(a, pos, end);
        prefetch_run(a, table, kv_head, pos + n, end, 0);
        const float *keys = kv_run(a, kv_at(a, table, kv_head, pos), pos, n, wide);
        run_scores(q, group, keys, n, dim, weights + pos - first);
    }
    prefetch_run(a, table, kv_head, first, end, a->value_offset);
    for (int64_t g = 0; g < group; g++) {
        if (a->softcap) cap_scores(weights + g * SPLIT, end - first, a->softcap);
        total[g] = soften(weights + g * SPLIT, end - first, peak + g, a->in_bf16);
    }
    for (int64_t pos = first, n; pos < end; pos += n) {
        n = run_length(a, pos, end);
        prefetch_run(a, table, kv_head, pos + n, end, a->value_offset);
        int64_t at = kv_at(a, table, kv_head, pos) + a->value_offset;
        const float *values = kv_run(a, at, pos, n, wide);
        run_values(weights + pos - first, group, values, n, dim, width, acc);
    }
    for (int64_t g = 0; g < group; g++) {
        int64_t row = (a->query_start[seq] * a->num_heads + head * group + g) * width;
        float *out = part < 0 ? a->out + row : a->partial + (part * group + g) * (width + 2);
        float scale = part < 0 ? 1.0f / total[g] : 1.0f;
        for (int64_t d = 0; d < width; d++) out[d] = acc[g * width + d] * scale;
        if (part >= 0) out[width] = peak[g], out[width + 1] = total[g];
    }
}

void kvr_split_merge(const Attention *a, const int32_t *item) {
    int64_t group = a->group, dim = a->value_dim;
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
