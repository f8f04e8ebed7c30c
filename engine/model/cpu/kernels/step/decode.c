/* Several decode passes in one call, over the same sequences: each takes the tokens that the one before
 * it drew. Or one pass that verifies draft tokens too. A pass evicts the interpreter from the caches, so
 * returning to Python between passes would cost time. */
#include "../norm.h"
#include "step.h"

#include <math.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* The block of a group of states that `position` of a sequence is in. */
static int64_t state_block(const Decode *d, int64_t group, int64_t seq, int64_t position) {
    int64_t table = (d->num_groups - d->num_state_groups + group) * d->capacity + seq;
    return d->block_tables[table * d->table_stride + position / d->block_size];
}

/* Which states are loaded and stored. Draft tokens may be wrong: what they would leave is not stored. */
static void plan_states(const Decode *d, int64_t group) {
    States *states = d->states + group;
    int64_t *segment = states->segments;
    for (int64_t s = 0, r = 0; s < d->num_seqs; r += d->query_len[s++], segment += 4) {
        int64_t at = d->positions[r];
        segment[0] = r, segment[1] = d->query_len[s];
        segment[2] = at ? state_block(d, group, s, at - 1) : -1;
        segment[3] = d->query_len[s] == 1 ? state_block(d, group, s, at) : -1;
    }
    states->count = d->num_seqs;
}

void kvr_replay(const Decode *d, const int64_t *counts) {
    for (int64_t g = 0; g < d->num_state_groups; g++) {
        States *states = d->states + g;
        states->count = 0;
        for (int64_t s = 0; s < d->num_seqs; s++) {
            int64_t *to = states->segments + 4 * states->count, first = states->segments[4 * s];
            if (d->query_len[s] == 1) continue;
            to[0] = first, to[1] = counts[s], to[2] = states->segments[4 * s + 2];
            to[3] = state_block(d, g, s, d->positions[first]);
            states->count++;
        }
    }
    for (int64_t i = 0; i < d->num_layers; i++)
        if (d->layers[i].recurrent.project.packed) kvr_pass_states(&d->layers[i].recurrent, &d->step);
}

/* Where each row's token goes, and who does what. */
static void plan(const Decode *d) {
    for (int64_t s = 0, r = 0; s < d->num_seqs; s++) {
        const int32_t *tables = d->block_tables + s * d->table_stride;
        for (int64_t end = r + d->query_len[s]; r < end; r++) {
            int64_t at = d->positions[r], row = at / d->block_size;
            for (int64_t g = 0; g < d->num_groups; g++) {
                int64_t block = tables[g * d->capacity * d->table_stride + row];
                d->slots[g * d->capacity + r] = block * d->block_size + at % d->block_size;
            }
            d->context_len[s] = (int32_t)at + 1;
            d->draws[r].position = at + 1;
        }
    }
    for (int64_t g = 0; g < d->num_state_groups; g++) plan_states(d, g);
    for (int64_t i = 0; i < d->num_attentions; i++) {
        Attention *a = d->attentions[i];
        int64_t counts[3], heads = a->num_heads / a->group, tile = kvr_attention_tile(a->group, a->head_dim);
        if (a->selection) a->selection->num_seqs = d->num_seqs;
        if (a->quest) a->quest->num_seqs = d->num_seqs;
        kvr_attention_plan(d->num_seqs, a->query_len, a->context_len, heads, tile, a->window, a->num_sinks,
                           a->selection ? a->selection->topk : 0, a->quest ? a->quest->starts : NULL,
                           (int32_t *)a->items, (int32_t *)a->merges, counts);
        a->num_items = counts[0], a->num_merges = counts[1];
    }
}

static void copy_normed(const float *x, const float *norm, float *y, const Step *s) {
    if (norm)
        normalise(x, norm, y, s->width, s->eps);
    else
        memcpy(y, x, sizeof(float) * s->width);
}

/* hidden: of embeddings to the input of a drafter's layer. */
static void fuse(const Decode *d, Step *s) {
    int64_t width = s->width;
    for (int64_t r = 0; r < s->rows; r++) {
        float *pair = d->pairs + 2 * r * width, *hidden = s->hidden + r * width;
        copy_normed(hidden, d->embed_norm, pair, s);
        copy_normed(d->before + r * width, d->state_norm, pair + width, s);
        if (!d->fc.packed)
            memcpy(hidden, d->adds_normed ? pair + width : d->before + r * width, sizeof(float) * width);
    }
    s->paired = d->fc.packed ? NULL : d->pairs;
    if (!d->fc.packed) return;
    Gemm fc = gemm_of(s, d->pairs, &d->fc, s->hidden);
    gemm_run(&fc, s->threads);
}

/* Logits of the whole vocabulary, from those of the tokens that a drafter knows. */
static float *widened(const Decode *d, int64_t rows) {
    if (!d->known) return d->logits;
    for (int64_t i = 0; i < rows * d->vocab; i++) d->whole[i] = -INFINITY;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < d->head.rows; i++)
            d->whole[r * d->vocab + d->known[i]] = d->logits[r * d->head.rows + i];
    return d->whole;
}

static void pass(const Decode *d, int64_t number, int64_t *drawn) {
    Step step = d->step, *s = &step;
    int64_t rows = s->rows, width = s->width, vocab = d->head.rows;
    if (s->captured) s->captured += number * d->num_captured * rows * width;
    plan(d);
    kvr_embed(d->table, d->bf16_table, d->tokens, rows, width, s->hidden);
    for (int64_t i = 0; d->embed_scale != 1.0f && i < rows * width; i++) s->hidden[i] *= d->embed_scale;
    if (d->before) fuse(d, s);
    if (d->keeps_only) {
        kvr_before_attention(d->layers, s);
        return;
    }
    kvr_layers(d->layers, d->num_layers, s);
    if (is_abandoned()) return;
    for (int64_t i = 0; i < d->num_attentions; i++) kvr_keep_bounds(d->attentions[i]);
    const float *normed = d->norm ? s->norm : s->hidden;
    if (d->norm) kvr_rms_norm(s->hidden, width, d->norm, s->norm, rows, width, s->eps, s->threads);
    if (d->before) memcpy(d->before, d->leaves_normed ? normed : s->hidden, sizeof(float) * rows * width);
    Gemm head = gemm_of(s, normed, &d->head, d->logits);
    gemm_run(&head, s->threads);
    if (d->softcap) kvr_cap(d->logits, rows * vocab, d->softcap, s->threads);
    kvr_draw(widened(d, rows), rows, d->known ? d->vocab : vocab, d->draws, drawn, s->threads);
}

static int is_stop(const Decode *d, int64_t seq, int64_t token) {
    if (token == NO_TOKEN) return 1;
    for (int64_t i = seq ? d->stop_ends[seq - 1] : 0; i < d->stop_ends[seq]; i++)
        if (d->stops[i] == token) return 1;
    return 0;
}

/* Returns how many passes there were: up to `most`, and none after one that drew a stop
 * token, or none at all. */
int64_t kvr_decode(const Decode *d) {
    double began = now();
    for (int64_t passes = 1;; passes++) {
        int64_t *drawn = d->drawn + (passes - 1) * d->step.rows;
        int stopped = 0;
        pass(d, passes - 1, drawn);
        if (passes >= d->max_passes || is_abandoned()) return passes;
        for (int64_t s = 0; s < d->num_seqs; s++) {
            stopped |= is_stop(d, s, drawn[s]);
            d->tokens[s] = drawn[s];
            if (d->draws[s].counts) kvr_count(d->draws[s].counts, (int32_t)drawn[s]);
            if (!d->last_positions || d->positions[s] < d->last_positions[s]) d->positions[s]++, d->rope_positions[s]++;
        }
        if (stopped || (now() - began) * (double)(passes + 1) > d->burst_s * (double)passes) return passes;
    }
}
