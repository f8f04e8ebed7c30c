/* One product with a packed matrix, and the tasks that it is made of. */
#pragma once

#include "../activation.h"
#include "../floats.h"
#include "layout.h"

typedef struct {
    const float *x;    /* [n, k], rows `ldx` apart */
    float *y;          /* [n, m], rows `ldy` apart */
    const float *bias; /* [m], or NULL */
    const char *w;     /* packed (layout.h) */
    int64_t n, m, k, ldx, ldy;
    int64_t panel_bytes, group; /* set by gemm_plan; group: panels of a task */
    int kind, keep;             /* keep: add to y; there is no bias then */
    /* Of low-precision kinds, set by convert_inputs: x as [n, converted_width], and its scales: of INT8
     * and INT16 [n, groups], of INT4 [n, groups, 2], of FP16 [n]. */
    const int16_t *converted_x;
    const float *x_scales;
    int64_t chunk; /* set by gemm_plan: rows of a task */
    int activation; /* of a gated matrix: y is [n, m / 2], no bias, keep 0 */
    const float *norm; /* x is normed first, by these weights [k]; NULL: it is not. Of low-precision kinds */
    float eps;
    int16_t *converted_y; /* instead of y, [n, converted_width(m / 2)]; of gated BF16_PAIRS and AMX */
    const float *added;   /* of a gated matrix: what the results of rows from `added_from` on are added to */
    int64_t added_from;
    int64_t number; /* of the matrix */
} Gemm;

INLINE int64_t num_panels(const Gemm *t) { return (t->m + NR - 1) / NR; }
INLINE int64_t num_chunks(const Gemm *t) { return (t->n + t->chunk - 1) / t->chunk; }

/* Several of one kind at once; each is planned here. */
void gemm_run_grouped(Gemm *gemms, int64_t count, int threads);

/* The whole product; `converted_x` and `x_scales` may be there already. */
void gemm_run(Gemm *product, int threads);
/* The number of tasks. They may run in any order and at once. */
int64_t gemm_plan(Gemm *product, int threads);
/* Meanwhile memory at `ahead` is fetched: the weights of what comes next. */
void gemm_task(const Gemm *product, int64_t task, const char *ahead);
/* Where a task's weights begin. */
const char *gemm_task_weights(const Gemm *product, int64_t task);

/* Low-precision kinds take inputs of as few bits as the weights. `convert_inputs` has to run before the
 * first task: it converts the rows of all `gemms`, which follow each other in memory, into memory of the
 * calling thread that stays valid until the next conversion. */
INLINE int is_low_precision(int kind) { return kind >= INT8; }

/* From one converted row to the next. The rows of a tile lie in an odd number of cache lines
 * each, so that they do not compete for the same places. */
INLINE int64_t converted_width(int64_t k, int kind) {
    int64_t width = padded(k, kind);
    if (kind == INT4) return width / 2;
    return kind == AMX && width % 64 == 0 ? width + AMX_DEPTHS : width;
}

void convert_inputs(Gemm *gemms, int64_t count, int threads);
void low_precision_plan(Gemm *product, int threads); /* sets chunk and group */
void low_precision_task(const Gemm *product, int64_t task, const char *ahead);

/* A micro-tile of such a kind: rows from `row` on times panels from `panel` on. Meanwhile `ahead` is
 * prefetched, `prefetch_step` bytes for every 4 * NR bytes of a panel. Few rows take PANELS_AT_ONCE at once. */
typedef void MicroTile(const Gemm *t, int64_t row, int64_t panel, const char *ahead, int64_t prefetch_step);
#define PANELS_AT_ONCE 4
#define FEW_ROWS 3 /* up to so many take as many at once, where registers are enough */
#define NEAR 512 /* bytes: how far ahead one row of integers fetches each of its panels on CPUs with AVX2 */
/* A panel is about as large as the L1 cache: in there the next one would drive out what is computed with. */
INLINE void fetch_to_l2(const char *at) { __builtin_prefetch(at, 0, 2); }
/* Of 1 to MR rows, and then of few rows and PANELS_AT_ONCE panels; NULL: these have none. */
typedef MicroTile *const MicroTiles[MR + FEW_ROWS];
extern MicroTiles int4_tiles, int8_tiles, int16_tiles, bf16_tiles, fp16_tiles;

/* AMX, whose tasks are larger: rows [start, end) of panels [first, last), between amx_begin and amx_end;
 * meanwhile memory at `ahead` is fetched. */
void amx_bf16_task(const Gemm *t, int64_t start, int64_t end, int64_t first, int64_t last, const char *ahead);
/* INT8 by tiles: rows [start, end) of panels [first, last). */
void amx_int8_task(const Gemm *t, int64_t start, int64_t end, int64_t first, int64_t last);

/* A kind's, from its `tile`, whose second and third argument are constants: rows and panels. */
#define TILE_ARGUMENTS \
    const Gemm *t, int64_t row, int64_t panel, const char *ahead, int64_t prefetch_step
#define TILE_OF(R) \
    static void tile_##R(TILE_ARGUMENTS) { tile(t, R, 1, row, panel, ahead, prefetch_step); }
#define TILE_NAME(R) tile_##R,
#define MICRO_TILES_OF(KIND) \
    EACH_ROWS(TILE_OF) \
    static void tile_many(TILE_ARGUMENTS) { tile(t, 1, PANELS_AT_ONCE, row, panel, ahead, prefetch_step); } \
    MicroTiles KIND##_tiles = {EACH_ROWS(TILE_NAME) tile_many};

/* One row of `numbers` [even(k), or `width`], rounded from x [k], and what they are times; fp16.h has
 * a third. */
void int16_row(const float *x, int64_t k, int kind, int16_t *numbers, float *x_scales);
void int4_row(const float *x, int64_t k, int16_t *converted, float *x_scales);
void bf16_row(const float *x, int64_t k, int64_t width, int16_t *numbers);

void int4_pack(const uint8_t *w, const uint16_t *scales, int64_t k, int64_t j, char *panel);
/* A row of bfloat16 weights [k] to output j of a panel. */
void fp16_pack(const uint16_t *w, int64_t k, int64_t j, char *panel);
void int16_pack(const uint16_t *w, int64_t k, int64_t j, char *panel);

/* activation(gate) * up: of a gated matrix a panel has VL outputs' gates, then what goes through them. */
INLINE void put_gated(const Gemm *t, int64_t row, int64_t panel, const vf sums[2]) {
    vf sum[2] = {sums[0], sums[1]};
    if (t->added && row >= t->added_from) {
        const float *added = t->added + ((row - t->added_from) * num_panels(t) + panel) * NR;
        sum[0] += load(added), sum[1] += load(added + VL);
    }
    int64_t first = panel * VL, left = t->m / 2 - first;
    float *y = t->y + row * t->ldy + first;
    if (t->converted_y) {
        vh rounded = round_bf16_fast(rough_gate_of(sum[0], t->activation) * sum[1]);
        int16_t *to = t->converted_y + row * converted_width(t->m / 2, t->kind) + first;
        if (left >= VL)
            *(vhu *)to = rounded;
        else
            memcpy(to, &rounded, sizeof(int16_t) * left);
        return;
    }
    vf gated = gate_of(sum[0], t->activation) * sum[1];
    if (left >= VL)
        store(y, gated);
    else
        memcpy(y, &gated, sizeof(float) * left);
}

/* A row of a panel's results to y; the last panel may have columns past m. */
INLINE void put(const Gemm *t, int64_t row, int64_t panel, const vf sum[2]) {
    if (t->activation) {
        put_gated(t, row, panel, sum);
        return;
    }
    int64_t first = panel * NR;
    float *y = t->y + row * t->ldy + first;
    const float *base = t->keep ? y : t->bias ? t->bias + first : NULL;
    if (first + NR <= t->m) {
        store(y, base ? sum[0] + load(base) : sum[0]);
        store(y + VL, base ? sum[1] + load(base + VL) : sum[1]);
        return;
    }
    for (int j = 0; first + j < t->m; j++) {
        float value = sum[j / VL][j % VL];
        y[j] = base ? value + base[j] : value;
    }
}
