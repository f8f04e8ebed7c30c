/* A step through all layers, and decode passes in a row: what Python calls, and the structs that it
 * fills. cffi reads this file too: it has declarations only. */
#pragma once

#include <stdint.h>

#include "../attention/api.h"
#include "../layers/api.h"
#include "../sampling/api.h"

/* Multi-head latent attention. Each head has two matrices of its own: its queries (the part without
 * rotation) to the latent space, and what attention returns from there to values. */
typedef struct {
    Matrix compress; /* to the queries' latent, if any, then the latent, then the rotated part */
    Matrix queries;  /* from their latent, or from the normed hidden row */
    const float *q_norm, *kv_norm;
    const char *key_up, *value_up; /* of each head: [rank, nope] and [value, rank] */
    int64_t kind, heads, q_rank, rank, nope, rope, value;
} Latent;

/* Norms and matrices that a layer does not have are NULL; without experts their `count` is 0,
 * without latent attention its `heads`. With experts and an MLP every token passes both. `pool`:
 * the layer's first element in block 0. */
typedef struct {
    Matrix qkv, out, gate_up, down;
    const float *input_norm, *q_norm, *k_norm, *attention_out_norm, *mlp_norm, *mlp_out_norm;
    const Rope *rope;
    const Attention *attention;
    void *pool;
    Experts experts;
    Latent latent;
    float scale; /* of what comes out */
} Layer;

/* Buffers of `rows` rows each; `norm`, `gated` and `added` have up to ROW_BLOCK_STEP more for each
 * thread. */
typedef struct {
    float *hidden, *norm, *qkv, *attended, *gated, *added;
    int64_t rows, width; /* width: of hidden, norm and added */
    float eps;
    int32_t activation, threads;
} Step;

enum { ROW_BLOCK_STEP = 32 };

/* All rows pass all layers. */
void kvr_layers(const Layer *layers, int64_t count, const Step *step);

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
    int64_t *slots;               /* [num_groups, capacity]: `rows` are used, as of `Rope` */
    Draw *draws;                  /* [rows] */
    const int64_t *stops;         /* stop tokens, sequence after sequence */
    const int64_t *stop_ends;     /* [num_seqs]: where those of a sequence end */
    float *logits;                /* [rows, head.rows], of a pass */
    int64_t *drawn;               /* [max_passes, rows] */
    int64_t num_layers, num_attentions, table_stride, block_size;
    int64_t num_groups, capacity; /* of layers' KV; rows that there is room for */
    int64_t num_seqs;
    int64_t max_passes;           /* if above 1, every sequence has one row */
    Matrix head;
    Step step;
    double burst_s;               /* no pass starts that would end later */
    float embed_scale, softcap;
    int32_t bf16_table;
} Decode;

/* Returns how many passes ran: up to `max_passes`, and none after one that drew a stop token. */
int64_t kvr_decode(const Decode *decode);
