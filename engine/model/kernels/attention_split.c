/* Attention of sequences that feed one token: bound by reading the KV cache once. */
#include "attention.h"

/* out[h * SPLIT + j] = q[h] . keys[j]; both counts are constants. */
INLINE void dots(int num_keys, int num_heads, const float *q, const float *keys, int64_t dim,
                 float *out) {
    vf acc[4][3];
    UNROLL for (int j = 0; j < num_keys; j++)
        UNROLL for (int h = 0; h < num_heads; h++) acc[j][h] = splat(0);
    for (int64_t d = 0; d < dim; d += VL)
        UNROLL for (int j = 0; j < num_keys; j++) {
            vf key = load(keys + j * dim + d);
            UNROLL for (int h = 0; h < num_heads; h++) acc[j][h] += load(q + h * dim + d) * key;
        }
    UNROLL for (int j = 0; j < num_keys; j++)
        UNROLL for (int h = 0; h < num_heads; h++) out[h * SPLIT + j] = sum_lanes(acc[j][h]);
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

/* acc[group, dim] += weights[group, count] @ values[count, dim]; a row of weights is SPLIT long. */
static void run_values(const float *weights, int64_t group, const float *values, int64_t count,
                       int64_t dim, float *acc) {
#define CASE(R) \
    case R: \
        for (; d + NR <= dim; d += NR) \
            micro(R, 2, count, w, SPLIT, 1, values + d, dim, to + d, dim, 1, NULL); \
        if (d < dim) micro(R, 1, count, w, SPLIT, 1, values + d, dim, to + d, dim, 1, NULL); \
        break;
    for (int64_t h = 0, rows; h < group; h += rows) {
        const float *w = weights + h * SPLIT;
        float *to = acc + h * dim;
        int64_t d = 0;
        rows = even_rows(group - h);
        switch (rows) { EACH_ROWS(CASE) }
    }
#undef CASE
}

/* Scores [padded to VL] become weights in place; returns their sum, *peak is the largest score. */
static float soften(float *scores, int64_t count, float *peak) {
    vf top = splat(-INFINITY), sum = splat(0);
    for (int64_t i = count; i % VL; i++) scores[i] = -INFINITY;
    for (int64_t i = 0; i < count; i += VL) top = vmax(top, load(scores + i));
    *peak = max_lanes(top);
    for (int64_t i = 0; i < count; i += VL) {
        vf p = vexp(load(scores + i) - splat(*peak));
        store(scores + i, p);
        sum += p;
    }
    return sum_lanes(sum);
}

void kvr_split_item(const Attention *a, const int32_t *item) {
    int64_t seq = item[0], head = item[1], first = item[2];
    int64_t group = a->num_heads / a->num_kv_heads, dim = a->head_dim;
    int64_t end = a->context_len[seq] < first + SPLIT ? a->context_len[seq] : first + SPLIT;
    const int32_t *table = a->tables + seq * a->table_stride;
    const float *from = a->qkv + a->query_start[seq] * a->qkv_stride + head * group * dim;
    float q[MAX_GROUP * MAX_DIM], acc[MAX_GROUP * MAX_DIM], wide[RUN * MAX_DIM];
    float weights[MAX_GROUP * SPLIT], peak[MAX_GROUP], total[MAX_GROUP];
    for (int64_t i = 0; i < group * dim; i++) q[i] = from[i] * a->scale, acc[i] = 0;
    for (int64_t pos = first, n; pos < end; pos += n) {
        n = run_length(a, pos, end);
        prefetch_run(a, table, head, pos + n, end, 0);
        const float *keys = kv_run(a, kv_at(a, table, head, pos), n, wide);
        run_scores(q, group, keys, n, dim, weights + pos - first);
    }
    prefetch_run(a, table, head, first, end, a->value_offset);
    for (int64_t g = 0; g < group; g++)
        total[g] = soften(weights + g * SPLIT, end - first, peak + g);
    for (int64_t pos = first, n; pos < end; pos += n) {
        n = run_length(a, pos, end);
        prefetch_run(a, table, head, pos + n, end, a->value_offset);
        int64_t at = kv_at(a, table, head, pos) + a->value_offset;
        run_values(weights + pos - first, group, kv_run(a, at, n, wide), n, dim, acc);
    }
    for (int64_t g = 0; g < group; g++) {
        int64_t row = (a->query_start[seq] * a->num_heads + head * group + g) * dim;
        float *out = item[3] < 0 ? a->out + row : a->partial + (item[3] * group + g) * (dim + 2);
        float scale = item[3] < 0 ? 1.0f / total[g] : 1.0f;
        for (int64_t d = 0; d < dim; d++) out[d] = acc[g * dim + d] * scale;
        if (item[3] >= 0) out[dim] = peak[g], out[dim + 1] = total[g];
    }
}

void kvr_split_merge(const Attention *a, const int32_t *item) {
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
