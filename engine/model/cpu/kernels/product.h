/* One product with a packed matrix, and the tasks that it is made of. */
#ifndef KVRELAY_PRODUCT_H
#define KVRELAY_PRODUCT_H

#include "linear.h"

typedef struct {
    const float *x;    /* [n, k], rows `ldx` apart */
    float *y;          /* [n, m], rows `ldy` apart */
    const float *bias; /* [m], or NULL */
    const char *w;     /* packed (linear.h) */
    int64_t n, m, k, ldx, ldy;
    int64_t panel_bytes, group; /* set by product_plan; group: panels of a unit */
    int kind, keep;             /* keep: add to y; there is no bias then */
    /* Of kinds whose inputs are narrowed. Set by narrow_inputs: x as [n, narrowed_width], in units: of
     * INT8 and INT16 [n, groups], of HALVES [n]. */
    const int16_t *numbers;
    const float *units;
    int64_t chunk; /* set by product_plan: rows of a unit */
    int activation; /* of a gated matrix: y is [n, m / 2], no bias, keep 0 */
    const float *norm; /* x is normed first, by these weights [k]; NULL: it is not. Of narrowed kinds */
    float eps;
    int16_t *narrowed_y; /* instead of y, [n, narrowed_width(m / 2)]; of gated PAIRS and TILES */
} Product;

INLINE int64_t num_panels(const Product *t) { return (t->m + NR - 1) / NR; }
INLINE int64_t num_chunks(const Product *t) { return (t->n + t->chunk - 1) / t->chunk; }

/* The whole product; `numbers` and `units` may be there already. */
void product_run(Product *product, int threads);
/* The number of units. They may run in any order and at once. */
int64_t product_plan(Product *product, int threads);
/* Meanwhile memory at `ahead` is fetched: the weights of what comes next. */
void product_unit(const Product *product, int64_t unit, const char *ahead);
/* Where a unit's weights begin. */
const char *product_weights(const Product *product, int64_t unit);

/* Kinds that take inputs as narrow as the weights. These have to be narrowed before the first task runs:
 * rows of all `products`, which lie one after the other, into memory of the calling thread that holds
 * until it narrows others. */
INLINE int is_narrowed(int kind) { return kind >= INT8; }

/* From one row of narrowed numbers to the next. The rows of a tile lie in an odd number of cache lines
 * each, so that they do not compete for the same places. */
INLINE int64_t narrowed_width(int64_t k, int kind) {
    int64_t width = padded(k, kind);
    return kind == TILES && width % 64 == 0 ? width + TILE_DEPTHS : width;
}

void narrow_inputs(Product *products, int64_t count, int threads);
void narrowed_plan(Product *product, int threads); /* sets chunk and group */
void narrowed_unit(const Product *product, int64_t unit, const char *ahead);

/* A micro-tile of such a kind: rows from `row` on times panels from `panel` on. Meanwhile `ahead` is
 * prefetched, `pace` bytes for every 4 * NR bytes of a panel. One row takes MANY panels at once. */
typedef void Tile(const Product *t, int64_t row, int64_t panel, const char *ahead, int64_t pace);
#define MANY 4
/* A panel is about as large as the L1 cache: in there the next one would drive out what is computed with. */
INLINE void fetch_to_l2(const char *at) { __builtin_prefetch(at, 0, 2); }
/* Of 1 to MR rows, and then of one row and MANY panels. */
typedef Tile *const Tiles[MR + 1];
extern Tiles int8_tiles, int16_tiles, pairs_tiles, halves_tiles;

/* TILES, whose tiles are larger: rows [start, end) of panels [first, last), between tiles_begin and tiles_end;
 * meanwhile memory at `ahead` is fetched. */
void tiles_unit(const Product *t, int64_t start, int64_t end, int64_t first, int64_t last, const char *ahead);
/* INT8 by tiles: rows [start, end) of panels [first, last). */
void int8_tiles_unit(const Product *t, int64_t start, int64_t end, int64_t first, int64_t last);

/* A kind's, from its `tile`, whose second and third argument are constants: rows and panels. */
#define TILE_ARGUMENTS \
    const Product *t, int64_t row, int64_t panel, const char *ahead, int64_t pace
#define TILE_OF(R) \
    static void tile_##R(TILE_ARGUMENTS) { tile(t, R, 1, row, panel, ahead, pace); }
#define TILE_NAME(R) tile_##R,
#define TILES_OF(KIND) \
    EACH_ROWS(TILE_OF) \
    static void tile_many(TILE_ARGUMENTS) { tile(t, 1, MANY, row, panel, ahead, pace); } \
    Tiles KIND##_tiles = {EACH_ROWS(TILE_NAME) tile_many};

/* One row of `numbers` [even(k), or `width`], rounded from x [k], and what they are times; halves.h has
 * a third. */
void integers_row(const float *x, int64_t k, int kind, int16_t *numbers, float *units);
void pairs_row(const float *x, int64_t k, int64_t width, int16_t *numbers);

/* A row of bfloat16 weights [k] to output j of a panel. */
void halves_pack(const uint16_t *w, int64_t k, int64_t j, char *panel);
void int16_pack(const uint16_t *w, int64_t k, int64_t j, char *panel);

/* activation(gate) * up: of a gated matrix a panel has VL outputs' gates, then what goes through them. */
INLINE void put_gated(const Product *t, int64_t row, int64_t panel, const vf sum[2]) {
    int64_t first = panel * VL, left = t->m / 2 - first;
    float *y = t->y + row * t->ldy + first;
    if (t->narrowed_y) {
        vh rounded = narrow(rough_gate_of(sum[0], t->activation) * sum[1]);
        int16_t *to = t->narrowed_y + row * narrowed_width(t->m / 2, t->kind) + first;
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
INLINE void put(const Product *t, int64_t row, int64_t panel, const vf sum[2]) {
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

#endif
