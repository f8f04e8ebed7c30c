/* Recurrent layers in a step: their projections, and what of them is passed again once it is known which
 * draft tokens are accepted. */
#include "../thread_pool.h"
#include "step.h"

typedef struct {
    float *x;
    const float *by;
    int64_t stride, by_stride, width;
} Product;

static void multiply_row(void *arg, int64_t r) {
    const Product *p = arg;
    float *x = p->x + r * p->stride;
    const float *by = p->by + r * p->by_stride;
    for (int64_t i = 0; i < p->width; i++) x[i] *= by[i];
}

/* Rows of the projection, then [rows, decay_up.rows]. */
static float *projected_of(const Recurrent *r, const Step *s) { return s->projected + r->index * s->kept; }

void kvr_pass_states(const Recurrent *r, const Step *s) {
    const float *x = projected_of(r, s);
    int64_t channels = r->conv.channels, heads = r->rule.num_heads, stride = r->project.rows;
    Convolution conv = r->conv;
    DeltaRule rule = r->rule;
    conv.x = heads ? x : x + 2 * channels, conv.x_stride = stride, conv.y = s->recurred;
    if (heads) conv.y = kvr_scratch(SCRATCH_CONVOLVED, sizeof(float) * s->rows * channels);
    kvr_convolve(r->states, &conv, r->conv_state, s->threads);
    if (!heads) return;
    rule.qkv = conv.y, rule.qkv_stride = channels, rule.y = s->recurred;
    rule.decay = x + stride - heads, rule.decay_stride = rule.beta_stride = stride;
    rule.beta = x + channels + heads * rule.value_dim;
    if (r->decay_up.packed) {
        rule.beta = rule.decay;
        rule.decay = x + s->rows * stride, rule.decay_stride = r->decay_up.rows;
    }
    kvr_delta_rule(r->states, &rule, r->memory, s->threads);
}

/* What a wide row's columns from x on are multiplied to. */
static void multiply_columns(const Step *s, const float *x, int64_t stride, const Matrix *m, float *y) {
    Gemm t = gemm_of(s, x, m, y);
    t.ldx = stride;
    kvr_run_with_terms(s, &t);
}

void kvr_recur(const Layer *layer, const Step *s) {
    const Recurrent *r = &layer->recurrent;
    int64_t channels = r->conv.channels, heads = r->rule.num_heads, stride = r->project.rows;
    int64_t width = r->out.depth, gate_stride = stride;
    float *x = projected_of(r, s), *gate = x + channels;
    kvr_rms_norm(s->hidden, s->width, layer->input_norm, s->norm, s->rows, s->width, s->eps, s->threads);
    multiply_columns(s, s->norm, s->width, &r->project, x);
    if (!heads) {
        Product before = {x + 2 * channels, x, stride, stride, channels};
        Product after = {s->recurred, gate, channels, stride, channels};
        kvr_parallel(s->threads, s->rows, multiply_row, &before);
        kvr_pass_states(r, s);
        kvr_parallel(s->threads, s->rows, multiply_row, &after);
        return;
    }
    if (r->decay_up.packed) {
        const float *low = gate;
        gate = kvr_scratch(SCRATCH_GATE, sizeof(float) * s->rows * width), gate_stride = width;
        multiply_columns(s, low, stride, &r->decay_up, x + s->rows * stride);
        multiply_columns(s, low + r->decay_up.depth, stride, &r->gate_up, gate);
    }
    kvr_pass_states(r, s);
    kvr_gate(s->recurred, gate, gate_stride, width, r->norm, r->norm_step, s->rows, width / r->norm_width,
             r->norm_width, s->eps, r->silu, r->gate_first, s->threads);
}
