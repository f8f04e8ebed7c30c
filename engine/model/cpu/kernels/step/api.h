/* A step through all layers, and decode passes in a row: what Python calls, and the structs that it
 * fills. cffi reads this file too: it has declarations only. */
#pragma once

#include <stdint.h>

#include "../attention/api.h"
#include "../layers/api.h"
#include "../sampling/api.h"

/* What scores positions for sparse attention; the layer's `Attention` has the rest. */
typedef struct {
    Matrix queries, keys, weights; /* from the queries' latent; the others from normed hidden rows */
    const float *norm, *norm_bias; /* LayerNorm of keys */
    const Rope *rope;              /* of queries and keys, and where keys go; NULL: no indexer */
    void *pool;                    /* the layer's first index key in block 0 */
    float eps;
} Indexer;

/* Multi-head latent attention. Each head has two matrices of its own: its queries (the part without
 * rotation) to the latent space, and what attention returns from there to values. */
typedef struct {
    Matrix compress; /* to the queries' latent, if any, then the latent, then the rotated part */
    Matrix queries;  /* from their latent, or from the normed hidden row */
    const float *q_norm, *kv_norm;
    const char *key_up, *value_up; /* of each head: [rank, nope] and [value, rank] */
    int64_t kind, heads, q_rank, rank, nope, rope, value;
    float scale; /* of latents, before they are normed */
    Indexer indexer;
} Latent;

/* A recurrent layer: what a projection makes of the normed hidden rows passes a convolution and, but of
 * a short one alone, a memory. `conv` and `rule` lack where rows are. A row of the projection has, of a
 * short convolution, the gate of its inputs, the gate of its outputs, and inputs; else the convolution's
 * inputs, the gate of the outputs, and each head's beta and decay (of Mamba 2 one number is both). Or, with
 * `decay_up` and `gate_up`, what those make decays and the gate from, and each head's beta. */
typedef struct {
    Matrix project, decay_up, gate_up, out;
    Convolution conv;
    DeltaRule rule;
    const float *norm; /* of outputs, or NULL; the next group of `norm_width` is `norm_step` further */
    int64_t norm_width, norm_step;
    const States *states;
    float *conv_state, *memory; /* of slot 0 */
    int64_t index;              /* among recurrent layers */
    int32_t silu, gate_first;   /* as of kvr_gate */
} Recurrent;

/* Norms and matrices that a layer does not have are NULL; without experts their `count` is 0,
 * without latent attention its `heads`. With experts and an MLP every token passes both. A recurrent
 * layer without attention has none, one with both adds up what comes out. `gate`: sigmoid of it
 * multiplies what attention returns; `mlp_gate`, beside experts alone, one number for the MLP's.
 * `pool`: the layer's first element in block 0. */
typedef struct {
    Matrix qkv, gate, out, gate_up, mlp_gate, down;
    const float *input_norm, *q_norm, *k_norm, *attention_out_norm, *mlp_norm, *mlp_out_norm;
    const Rope *rope;
    const Attention *attention;
    void *pool;
    Experts experts;
    Latent latent;
    Recurrent recurrent;
    float scale;      /* of what comes out */
    int32_t captured; /* 1 + where its output is among what is captured; 0: it is not */
} Layer;

/* What is added to a matrix' results: up @ (down @ x). Weights are words: floats, or pairs of
 * bfloat16. First those of down, [ranks / VL, depth, VL], VL floats being a vector; then of each VL rows of
 * up (of a gated matrix: in the order of its panels) their ranks `spans`, [words, VL]. */
typedef struct {
    const void *weights;
    const int64_t *spans; /* [ceil(rows / VL), 2]: first word of a row's ranks, and how many */
    int64_t ranks, depth, rows; /* ranks: a multiple of VL; 0: nothing is added */
    int32_t pairs;
} Term;

/* y [n, rows] += what is added for x [n, depth], float32 with rows `ldy` and `ldx` apart. */
void kvr_add_term(const Term *of, const float *x, int64_t n, int64_t ldx, float *y, int64_t ldy, int threads);

/* Rows of a step that have the same terms, of some of the first `count` of a model's matrices. */
typedef struct {
    const Term *of; /* by the matrix' number */
    int64_t count, first, rows;
} TermRows;

/* Buffers of `rows` rows each; `norm`, `gated` and `added` have up to ROW_BLOCK_STEP more for each
 * thread. `projected`: of a recurrent layer, its projection of all rows, then their decays. */
typedef struct {
    float *hidden, *norm, *qkv, *attended, *gated, *added, *projected, *recurred;
    int64_t rows, width; /* width: of hidden, norm and added */
    int64_t kept;        /* from one layer's `projected` to the next one's; 0: they have one place */
    const TermRows *terms; /* [num_terms], the step's last rows, in order */
    int64_t num_terms, at;    /* at: which of the whole step's rows is the first of these */
    float *captured; /* [captured layers, rows, width]: their outputs; NULL: none is wanted */
    const float *paired; /* [rows, 2 * width]: what the first layer projects in place of hidden rows, or NULL */
    float eps;
    int32_t activation, threads;
} Step;

enum { ROW_BLOCK_STEP = 32 };

/* All rows pass all layers. */
void kvr_layers(const Layer *layers, int64_t count, const Step *step);

/* How many layers all steps of this process have passed: a step that is slow goes on, one that hangs
 * does not. May be called while one runs. */
int64_t kvr_num_passed(void);

/* Whether steps end at their next layer, whatever is missing then: 1 or 0. While one runs, from another
 * thread. */
void kvr_abandon(int32_t is_on);

/* A layer up to the queries, keys and values, and from attention's result on. */
void kvr_before_attention(const Layer *layer, const Step *step);
void kvr_after_attention(const Layer *layer, const Step *step);

/* Decode passes. */
typedef struct {
    const Layer *layers;
    const void *table;            /* embeddings [head.rows, step.width] */
    const float *norm;            /* before the head */
    Attention *const *attentions; /* of all layers: they point to the arrays below */
    const int32_t *block_tables;  /* [num_groups, capacity, table_stride]: num_seqs are used */
    const int32_t *query_len;     /* [num_seqs]: rows of each, one after the other */
    int32_t *context_len;         /* [num_seqs] */
    int64_t *tokens, *positions;  /* [rows]: inputs of the next pass */
    int64_t *rope_positions;      /* [rows]: what queries and keys are turned by; lower behind images */
    int64_t *slots;               /* [num_groups, capacity]: `rows` are used, as of `Rope` */
    States *states;               /* [num_state_groups], the last ones of all groups */
    Draw *draws;                  /* [rows] */
    const int64_t *stops;         /* stop tokens, sequence after sequence */
    const int64_t *stop_ends;     /* [num_seqs]: where those of a sequence end */
    float *logits;                /* [rows, head.rows], of a pass */
    int64_t *drawn;               /* [max_passes, rows] */
    int64_t num_layers, num_attentions, table_stride, block_size;
    int64_t num_groups, num_state_groups, capacity; /* of layers; rows that there is room for */
    int64_t num_seqs;
    int64_t max_passes;           /* if above 1, every sequence has one row */
    int64_t num_captured;         /* layers; `step.captured` has room for all passes */
    Matrix head;
    Step step;
    double burst_s;               /* no pass starts that would end later */
    float embed_scale, softcap;
    int32_t bf16_table;
    /* Of a drafter's head, where `before` is not NULL. Its layer's input is `fc` of a token's embedding
     * and the hidden state before it, each normed where there is a norm for it; a pass leaves its own
     * states for the next. Without `fc` the state is the layer's input, and it projects both. */
    int32_t keeps_only;   /* keys and values of the rows are written, no more */
    int32_t adds_normed;  /* without `fc`: the layer adds to the normed state */
    int32_t leaves_normed; /* a pass leaves states behind the last norm */
    const int64_t *last_positions; /* [num_seqs]: no pass of it goes beyond; what it draws then is nothing */
    Matrix fc;
    const float *embed_norm, *state_norm;
    float *before, *pairs; /* [rows, width] and [rows, 2 * width] */
    const int64_t *known;  /* [head.rows]: the tokens that it knows; NULL: all */
    float *whole;          /* [rows, vocab]: logits of all tokens, where it does not */
    int64_t vocab;
} Decode;

/* Returns how many passes ran: up to `max_passes`, and none after one that drew a stop token. A pass
 * with draft tokens stores no state of the sequences that have some. */
int64_t kvr_decode(const Decode *decode);

/* After such a pass, whose `step.kept` was not 0: each of those sequences passes its first `counts`
 * rows through the recurrent layers again, from the state before them, and stores what comes out. */
void kvr_replay(const Decode *decode, const int64_t *counts);
