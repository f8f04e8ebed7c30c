/* Layers that keep a state of each sequence: the causal convolution of each channel, and the gated
 * delta rule of each head; and gates.
 *
 * Sums have one order: of a convolution from the oldest input on, of a head token by token and along
 * its keys. Tasks are a sequence's channels or columns, which no other column meets, so results are
 * alike to the last bit however a prompt is cut and whoever computes it. */
#include "../activation.h"
#include "../norm.h"
#include "../thread_pool.h"
#include "api.h"

#define COLUMNS (4 * VL) /* of a head's matrix, which one task has; 128 keys of them fit L1 */
#define ELEMENTS 8192    /* of one task, about: less is not worth another thread */

/* Up to VL numbers; what is missing is zero. */
INLINE vf load_part(const float *p, int64_t n) {
    if (n >= VL) return load(p);
    vf v = splat(0);
    memcpy(&v, p, sizeof(float) * n);
    return v;
}

INLINE void store_part(float *p, vf v, int64_t n) {
    if (n >= VL)
        store(p, v);
    else
        memcpy(p, &v, sizeof(float) * n);
}

INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* log(1 + exp(x)): log(1 + u) = 2 atanh(u / (2 + u)), whose argument is at most 1/3 here. */
INLINE vf softplus(vf x) {
    vf positive = vmax(x, splat(0)), u = vexp(x - 2.0f * positive), s = u / (u + 2.0f), p = s * s;
    vf series = splat(2.0f / 15);
    for (int n = 13; n > 0; n -= 2) series = series * p + splat(2.0f / (float)n);
    return positive + series * s;
}

typedef struct {
    const States *states;
    const Convolution *conv;
    float *state;
} Convolved;

static void convolve_row(const Convolution *c, const float *const *inputs, float *y, int64_t first,
                         int64_t count) {
    for (int64_t i = 0; i < count; i += VL) {
        int64_t n = count - i;
        vf sum = c->bias ? load_part(c->bias + first + i, n) : splat(0);
        for (int64_t j = 0; j < c->kernel; j++)
            sum += load_part(c->weight + j * c->channels + first + i, n) * load_part(inputs[j] + i, n);
        store_part(y + i, c->silu ? gate_of(sum, SILU) : sum, n);
    }
}

static void convolve_task(void *arg, int64_t task) {
    const Convolved *t = arg;
    const Convolution *c = t->conv;
    const int64_t *piece = c->pieces + task % c->num_pieces * 4, first = piece[0], kept = c->kernel - 1;
    const int64_t *chain = t->states->chains + task / c->num_pieces;
    size_t bytes = sizeof(float) * piece[1];
    float loaded[MAX_KERNEL][MAX_PIECE];
    const float *inputs[MAX_KERNEL]; /* of the next row: those before it, then its own */
    for (int64_t g = chain[0]; g < chain[1]; g++) {
        const int64_t *segment = t->states->segments + 4 * g;
        const float *from = t->state + segment[2] * t->states->stride + piece[2];
        for (int64_t j = 0; j < kept && g == chain[0]; j++) {
            memset(loaded[j], 0, sizeof loaded[j]);
            if (segment[2] >= 0) memcpy(loaded[j], from + j * c->unit_channels, bytes);
            inputs[j] = loaded[j];
        }
        for (int64_t r = segment[0]; r < segment[0] + segment[1]; r++) {
            inputs[kept] = c->x + r * c->x_stride + first;
            convolve_row(c, inputs, c->y + r * c->channels + first, first, piece[1]);
            memmove(inputs, inputs + 1, sizeof *inputs * kept);
        }
        if (segment[3] < 0) continue;
        float *to = t->state + segment[3] * t->states->stride + piece[2];
        for (int64_t u = 0; u < piece[3]; u++, to += t->states->unit_stride)
            for (int64_t j = 0; j < kept; j++) memcpy(to + j * c->unit_channels, inputs[j], bytes);
    }
}

void kvr_convolve(const States *states, const Convolution *conv, float *state, int threads) {
    Convolved t = {states, conv, state};
    kvr_parallel(threads, states->count * conv->num_pieces, convolve_task, &t);
}

typedef struct {
    const States *states;
    const DeltaRule *rule;
    float *state;
} Ruled;

/* y = x * factor / |x| */
static void unit(const float *x, float *y, int64_t width, float factor) {
    vf sum = splat(0);
    for (int64_t i = 0; i < width; i += VL) {
        vf part = load_part(x + i, width - i);
        sum += part * part;
    }
    float scale = factor / sqrtf(sum_lanes(sum) + 1e-6f);
    for (int64_t i = 0; i < width; i += VL)
        store_part(y + i, load_part(x + i, width - i) * scale, width - i);
}

/* exp(rate * softplus(x + bias)), for each key of a head or one for all. */
static void decays(const DeltaRule *d, int64_t row, int64_t head, float *decay) {
    int64_t width = d->decay_width;
    const float *x = d->decay + row * d->decay_stride + head * width, *bias = d->decay_bias + head * width;
    for (int64_t i = 0; i < width; i += VL) {
        vf soft = softplus(load_part(x + i, width - i) + load_part(bias + i, width - i));
        store_part(decay + i, vexp(soft * d->rate[head]), width - i);
    }
    for (int64_t i = width; i < d->key_dim; i++) decay[i] = decay[0];
}

/* memory [key_dim, COLUMNS] decays; what it says of the key is corrected, or the value is added; and
 * the query is asked. */
INLINE void pass_token(float *memory, const float *q, const float *k, const float *decay,
                       int64_t key_dim, const vf *value, float beta, vf *out, int corrects) {
    vf seen[4], delta[4];
    UNROLL for (int i = 0; i < 4; i++) seen[i] = out[i] = splat(0);
    for (int64_t j = 0; corrects && j < key_dim; j++)
        UNROLL for (int i = 0; i < 4; i++)
            seen[i] += load(memory + j * COLUMNS + i * VL) * decay[j] * k[j];
    UNROLL for (int i = 0; i < 4; i++) delta[i] = (value[i] - seen[i]) * beta;
    for (int64_t j = 0; j < key_dim; j++)
        UNROLL for (int i = 0; i < 4; i++) {
            float *at = memory + j * COLUMNS + i * VL;
            vf m = load(at) * decay[j] + delta[i] * k[j];
            store(at, m);
            out[i] += m * q[j];
        }
}

static void rule_row(const DeltaRule *d, int64_t row, int64_t head, int64_t first, float *memory,
                     float *work) {
    int64_t dim = d->key_dim, key_head = head / (d->num_heads / d->num_key_heads);
    float *q = work, *k = q + dim, *decay = k + dim;
    const float *x = d->qkv + row * d->qkv_stride, *keys = x + d->num_key_heads * dim;
    const float *values = keys + d->num_key_heads * dim + head * d->value_dim + first;
    vf beta = splat(d->beta[row * d->beta_stride + head]), value[4], out[4];
    int64_t left = d->value_dim - first;
    decays(d, row, head, decay);
    UNROLL for (int i = 0; i < 4; i++)
        value[i] = left > i * VL ? load_part(values + i * VL, left - i * VL) : splat(0);
    if (d->skip) {
        const float *query = x + key_head * dim, *key = keys + key_head * dim;
        vf step = softplus(splat(d->decay[row * d->decay_stride + head]) + d->decay_bias[head]);
        pass_token(memory, query, key, decay, dim, value, step[0], out, 0);
        UNROLL for (int i = 0; i < 4; i++) out[i] += value[i] * d->skip[head];
    } else {
        unit(x + key_head * dim, q, dim, 1.0f / sqrtf((float)dim));
        unit(keys + key_head * dim, k, dim, 1.0f);
        beta = 1.0f / (vexp(-beta) + 1.0f);
        pass_token(memory, q, k, decay, dim, value, beta[0], out, 1);
    }
    float *y = d->y + (row * d->num_heads + head) * d->value_dim + first;
    for (int i = 0; i < 4 && i * VL < left; i++) store_part(y + i * VL, out[i], left - i * VL);
}

static void rule_task(void *arg, int64_t task) {
    const Ruled *t = arg;
    const DeltaRule *d = t->rule;
    int64_t blocks = (d->value_dim + COLUMNS - 1) / COLUMNS, dim = d->key_dim;
    int64_t first = task % blocks * COLUMNS, head = task / blocks % d->num_heads;
    const int64_t *chain = t->states->chains + task / blocks / d->num_heads;
    size_t bytes = sizeof(float) * min_of(COLUMNS, d->value_dim - first);
    int64_t at = head / d->unit_heads * t->states->unit_stride;
    at += head % d->unit_heads * dim * d->value_dim + first;
    float *memory = kvr_scratch(SCRATCH_TASK, sizeof(float) * dim * (COLUMNS + 3));
    for (int64_t g = chain[0]; g < chain[1]; g++) {
        const int64_t *segment = t->states->segments + 4 * g;
        const float *from = t->state + segment[2] * t->states->stride + at;
        if (g == chain[0]) memset(memory, 0, sizeof(float) * dim * COLUMNS);
        for (int64_t j = 0; j < dim && g == chain[0] && segment[2] >= 0; j++)
            memcpy(memory + j * COLUMNS, from + j * d->value_dim, bytes);
        for (int64_t r = segment[0]; r < segment[0] + segment[1]; r++)
            rule_row(d, r, head, first, memory, memory + dim * COLUMNS);
        float *to = t->state + segment[3] * t->states->stride + at;
        for (int64_t j = 0; segment[3] >= 0 && j < dim; j++)
            memcpy(to + j * d->value_dim, memory + j * COLUMNS, bytes);
    }
}

void kvr_delta_rule(const States *states, const DeltaRule *rule, float *state, int threads) {
    Ruled t = {states, rule, state};
    int64_t blocks = (rule->value_dim + COLUMNS - 1) / COLUMNS;
    kvr_parallel(threads, states->count * rule->num_heads * blocks, rule_task, &t);
}

typedef struct {
    float *x;
    const float *gate, *weight;
    int64_t stride, gate_width, weight_step, rows, heads, width, step; /* step: rows of one task */
    float eps;
    int activation, gate_first;
} Gated;

static void open_gate(const Gated *t, float *x, const float *gate) {
    for (int64_t i = 0; i < t->width; i += VL) {
        int64_t n = t->width - i;
        vf g = t->gate_width > 1 ? load_part(gate + i, n) : splat(*gate);
        vf open = 1.0f / (vexp(-gate_argument(g, t->activation)) + 1.0f);
        store_part(x + i, load_part(x + i, n) * (t->activation ? g * open : open), n);
    }
}

static void gate_task(void *arg, int64_t task) {
    const Gated *t = arg;
    for (int64_t r = task * t->step; r < (task + 1) * t->step && r < t->rows; r++)
        for (int64_t h = 0; h < t->heads; h++) {
            float *x = t->x + (r * t->heads + h) * t->width;
            const float *gate = t->gate + r * t->stride + (t->gate_width > 1 ? h * t->width : 0);
            if (t->gate_first) open_gate(t, x, gate);
            if (t->weight) normalise(x, t->weight + h * t->weight_step, x, t->width, t->eps);
            if (!t->gate_first) open_gate(t, x, gate);
        }
}

void kvr_gate(float *x, const float *gate, int64_t stride, int64_t gate_width, const float *weight,
              int64_t weight_step, int64_t rows, int64_t heads, int64_t width, float eps, int activation,
              int gate_first, int threads) {
    Gated t = {x, gate, weight, stride, gate_width, weight_step, rows, heads, width, 1, eps};
    t.activation = activation, t.gate_first = gate_first;
    if (heads * width < ELEMENTS) t.step = ELEMENTS / (heads * width);
    kvr_parallel(threads, (rows + t.step - 1) / t.step, gate_task, &t);
}
