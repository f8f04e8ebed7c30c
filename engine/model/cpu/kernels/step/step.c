/* All layers of a step in one call: the kernels of a decode are so short that returning to Python between
 * them would cost time. */
#include "../norm.h"
#include "../thread_pool.h"
#include "step.h"

#define MAX_ROW_BLOCK 512 /* rows that pass all of a layer but attention at once, at most */
#define MIN_ROW_BLOCK 64 /* and at least: fewer are not worth a pass over the weights */
#define ROW_BLOCK_BYTES (1536 << 10) /* of a row block's widest rows, so that others fit into the L2 cache beside them */

/* Of the hidden rows, normed where there is a norm. */
static void multiply_normed(const Step *s, Gemm t, const float *norm) {
    if (!norm) {
        kvr_run_with_terms(s, &t);
        return;
    }
    if (is_low_precision(t.kind)) {
        t.norm = norm, t.eps = s->eps;
    } else {
        kvr_rms_norm(t.x, s->width, norm, s->norm, s->rows, s->width, s->eps, s->threads);
        t.x = s->norm;
    }
    kvr_run_with_terms(s, &t);
}

/* hidden += the product, normed in between where the layer says so. */
static void add(const Step *s, Gemm t, const float *norm) {
    float *hidden = s->hidden;
    int64_t width = s->width;
    if (norm) {
        t.y = s->added;
        kvr_run_with_terms(s, &t);
        kvr_rms_norm(t.y, width, norm, t.y, s->rows, width, s->eps, s->threads);
        for (int64_t i = 0; i < s->rows * width; i++) hidden[i] += t.y[i];
        return;
    }
    for (int64_t r = 0; t.bias && r < s->rows; r++)
        for (int64_t i = 0; i < width; i++) hidden[r * width + i] += t.bias[i];
    t.y = hidden, t.bias = NULL, t.keep = 1;
    kvr_run_with_terms(s, &t);
}

typedef struct {
    const Latent *latent;
    const Step *step;
    float *compressed;
    const float *queries;
    int64_t width; /* of compressed */
    int norms;
} Latents;

/* A row's latents are normed; or what is rotated of its queries goes behind what its heads have made of the
 * others. */
static void latent_row(void *arg, int64_t r) {
    const Latents *t = arg;
    const Latent *l = t->latent;
    float *compressed = t->compressed + r * t->width, *latent = compressed + l->q_rank;
    int64_t from = l->nope + l->rope, to = l->rank + l->rope;
    if (t->norms) {
        for (int64_t i = 0; l->scale != 1 && i < l->q_rank + l->rank; i++) compressed[i] *= l->scale;
        if (l->q_norm) normalise(compressed, l->q_norm, compressed, l->q_rank, t->step->eps);
        normalise(latent, l->kv_norm, latent, l->rank, t->step->eps);
        return;
    }
    for (int64_t h = r * l->heads; h < (r + 1) * l->heads; h++)
        memcpy(t->step->qkv + h * to + l->rank, t->queries + h * from + l->nope, sizeof(float) * l->rope);
}

/* Index keys go to the pool, and where tokens attend to some positions alone, these are chosen. q_latents:
 * normed, rows `ldx` apart. */
static void run_indexer(const Layer *layer, const Step *s, const float *q_latents, int64_t ldx) {
    const Indexer *x = &layer->latent.indexer;
    int64_t n = s->rows, dim = x->keys.rows, width = x->queries.rows;
    int selects = kvr_selects(layer->attention);
    float *keys = kvr_scratch(SCRATCH_INDEX, sizeof(float) * n * (dim + selects * (width + x->weights.rows)));
    float *queries = keys + n * dim, *weights = queries + n * width;
    Rope rope = *x->rope;
    multiply_normed(s, gemm_of(s, s->hidden, &x->keys, keys), layer->input_norm);
    kvr_layer_norm(keys, x->norm, x->norm_bias, n, dim, x->eps, s->threads);
    if (selects) {
        Gemm made = gemm_of(s, q_latents, &x->queries, queries);
        made.ldx = ldx;
        kvr_run_with_terms(s, &made);
        multiply_normed(s, gemm_of(s, s->hidden, &x->weights, weights), layer->input_norm);
    } else {
        rope.num_heads = 0;
    }
    kvr_latent_write(&rope, queries + rope.rope_at, width, dim, keys, dim, x->pool, n, s->threads);
    if (selects) kvr_select(layer->attention, queries, weights, x->pool);
}

static void before_latent(const Layer *layer, const Step *s) {
    const Latent *l = &layer->latent;
    int64_t n = s->rows, width = l->compress.rows, from = l->nope + l->rope, to = l->rank + l->rope;
    float *compressed = kvr_scratch(SCRATCH_LATENT, sizeof(float) * n * (width + l->queries.rows));
    float *queries = compressed + n * width;
    Latents t = {l, s, compressed, queries, width, 1};
    multiply_normed(s, gemm_of(s, s->hidden, &l->compress, compressed), layer->input_norm);
    kvr_parallel(s->threads, n, latent_row, &t);
    Gemm made = gemm_of(s, l->q_norm ? compressed : s->hidden, &l->queries, queries);
    if (l->q_norm) {
        made.ldx = width;
        kvr_run_with_terms(s, &made);
    } else {
        multiply_normed(s, made, layer->input_norm);
    }
    kvr_heads(queries, l->queries.rows, from, l->key_up, (int)l->kind, l->nope, l->rank, l->heads, n, s->qkv,
              l->heads * to, to, s->threads);
    t.norms = 0;
    kvr_parallel(s->threads, n, latent_row, &t);
    kvr_latent_write(layer->rope, s->qkv + l->rank, l->heads * to, to, compressed + l->q_rank, width,
                     layer->pool, n, s->threads);
    if (l->indexer.rope) run_indexer(layer, s, compressed, width);
}

/* Up to the queries, keys and values. */
static void before_attention(const Layer *l, const Step *s, int64_t first) {
    if (l->latent.heads) {
        before_latent(l, s);
        return;
    }
    multiply_normed(s, gemm_of(s, s->paired ? s->paired : s->hidden, &l->qkv, s->qkv), l->input_norm);
    kvr_rope_write(l->rope, s->qkv, l->q_norm, l->k_norm, l->pool, first, s->rows, s->threads);
}

/* Whether what the gated product leaves for the next can be rounded at once: its numbers need no unit, and
 * they fit where floats would lie. */
static int converts_gated(const Layer *l) {
    int kind = (int)l->down.kind;
    return kind == l->gate_up.kind && (kind == BF16_PAIRS || kind == AMX) &&
           converted_width(l->down.depth, kind) <= 2 * l->down.depth && !l->mlp_gate.packed;
}

/* hidden += the MLP of the hidden rows, normed, or of `x`, which they were normed to. */
static void add_mlp(const Layer *l, const Step *s, const float *x) {
    Gemm gate_up = gemm_of(s, x ? x : s->hidden, &l->gate_up, s->gated);
    Gemm down = gemm_of(s, s->gated, &l->down, NULL);
    gate_up.activation = s->activation, gate_up.ldy = l->down.depth;
    if (converts_gated(l)) {
        int64_t k = down.k, behind = padded(k, down.kind) - k, width = converted_width(k, down.kind);
        gate_up.converted_y = (int16_t *)s->gated, down.converted_x = gate_up.converted_y;
        for (int64_t r = 0; behind && r < s->rows; r++)
            memset(gate_up.converted_y + r * width + k, 0, sizeof(int16_t) * behind);
    }
    if (x)
        kvr_run_with_terms(s, &gate_up);
    else
        multiply_normed(s, gate_up, l->mlp_norm);
    if (l->mlp_gate.packed) {
        Gemm gate = gemm_of(s, x, &l->mlp_gate, s->added);
        kvr_run_with_terms(s, &gate);
        kvr_gate(s->gated, s->added, 1, 1, NULL, 0, s->rows, 1, down.k, s->eps, 0, 0, s->threads);
    }
    add(s, down, l->mlp_out_norm);
}

/* What attention returns is gated, then hidden += its projection. The queries are not needed any more. */
static void add_attended(const Layer *l, const Step *s) {
    const Latent *latent = &l->latent;
    const float *attended = s->attended;
    int64_t gates = l->gate.rows;
    if (gates) {
        multiply_normed(s, gemm_of(s, s->hidden, &l->gate, s->qkv), l->input_norm);
        kvr_gate(s->attended, s->qkv, gates, gates, NULL, 0, s->rows, 1, gates, s->eps, 0, 0, s->threads);
    }
    if (latent->heads) {
        int64_t rank = latent->rank, width = latent->heads * latent->value;
        float *values = kvr_scratch(SCRATCH_LATENT, sizeof(float) * s->rows * width);
        kvr_heads(attended, latent->heads * rank, rank, latent->value_up, (int)latent->kind, rank,
                  latent->value, latent->heads, s->rows, values, width, latent->value, s->threads);
        attended = values;
    }
    add(s, gemm_of(s, attended, &l->out, NULL), l->attention_out_norm);
}

static void after_attention(const Layer *l, const Step *s) {
    const float *x = l->experts.count ? s->norm : NULL, *norm = l->attention_out_norm;
    if (l->attention) add_attended(l, s);
    if (l->recurrent.project.packed)
        add(s, gemm_of(s, s->recurred, &l->recurrent.out, NULL), l->attention ? NULL : norm);
    if (x) {
        kvr_rms_norm(s->hidden, s->width, l->mlp_norm, s->norm, s->rows, s->width, s->eps, s->threads);
        kvr_add_experts(&l->experts, x, x, s->hidden, s->rows, s->width, s->activation, s->threads);
    }
    if (l->down.packed) add_mlp(l, s, x);
    for (int64_t i = 0; l->scale != 1.0f && i < s->rows * s->width; i++) s->hidden[i] *= l->scale;
}

/* Many rows are cut into row blocks. One thread takes a block from the beginning of a layer, or the end of
 * its attention, to the end: what it computes with stays in its L2 cache. */
typedef struct {
    const Layer *layer;
    const Step *step;
    int64_t rows; /* of a row block */
    int behind;   /* attention */
} RowBlocks;

static void row_block_task(void *arg, int64_t block) {
    const RowBlocks *b = arg;
    const Layer *l = b->layer;
    Step s = *b->step;
    int64_t first = block * b->rows, own = kvr_thread_index() * b->rows;
    s.rows = s.rows - first < b->rows ? s.rows - first : b->rows, s.threads = 1, s.at += first;
    if (s.paired) s.paired += first * 2 * s.width;
    s.hidden += first * s.width, s.qkv += first * l->qkv.rows, s.attended += first * l->out.depth;
    s.recurred += first * l->recurrent.out.depth;
    s.norm += own * s.width, s.gated += own * l->down.depth, s.added += own * s.width;
    if (b->behind)
        after_attention(l, &s);
    else
        before_attention(l, &s, first);
}

/* The smallest row blocks stay in the L2 cache, if any do. Where they do not, weights are read from memory
 * more often; nor do they pay with AMX, which is done with a block before its weights are read again. */
static int64_t max_row_block(const Layer *l) {
    int64_t least_bytes = MIN_ROW_BLOCK * l->down.depth * (int64_t)sizeof(float);
    return least_bytes <= ROW_BLOCK_BYTES && !kvr_multiplies(AMX) ? MIN_ROW_BLOCK : MAX_ROW_BLOCK;
}

/* One side of a layer's attention, for all rows. */
static void run_side(const Layer *l, const Step *s, int behind) {
    int64_t each = (s->rows + s->threads - 1) / s->threads, most = max_row_block(l);
    int64_t rounds = (each + most - 1) / most;
    int64_t rows = rounds ? ((each + rounds - 1) / rounds + ROW_BLOCK_STEP - 1) / ROW_BLOCK_STEP * ROW_BLOCK_STEP : 0;
    RowBlocks blocks = {l, s, rows, behind};
    int whole = l->latent.heads || (behind && l->experts.count); /* they want all rows at once */
    if (each >= MIN_ROW_BLOCK && !whole)
        kvr_parallel(s->threads, (s->rows + rows - 1) / rows, row_block_task, &blocks);
    else if (behind)
        after_attention(l, s);
    else
        before_attention(l, s, 0);
}

void kvr_before_attention(const Layer *layer, const Step *s) { run_side(layer, s, 0); }
void kvr_after_attention(const Layer *layer, const Step *s) { run_side(layer, s, 1); }

static int64_t num_passed; /* layers, by this process */

int64_t kvr_num_passed(void) { return __atomic_load_n(&num_passed, __ATOMIC_RELAXED); }

static int32_t abandoned;

void kvr_abandon(int32_t is_on) { __atomic_store_n(&abandoned, is_on, __ATOMIC_RELAXED); }

int is_abandoned(void) { return __atomic_load_n(&abandoned, __ATOMIC_RELAXED); }

void kvr_layers(const Layer *layers, int64_t count, const Step *s) {
    for (const Layer *l = layers; l < layers + count && !is_abandoned(); l++) {
        if (l->recurrent.project.packed) kvr_recur(l, s);
        if (l->attention) {
            run_side(l, s, 0);
            kvr_attention(l->attention, s->qkv, s->attended, l->pool);
        }
        run_side(l, s, 1);
        int64_t size = s->rows * s->width;
        if (s->captured && l->captured)
            memcpy(s->captured + (l->captured - 1) * size, s->hidden, sizeof(float) * size);
        __atomic_fetch_add(&num_passed, 1, __ATOMIC_RELAXED);
    }
}
