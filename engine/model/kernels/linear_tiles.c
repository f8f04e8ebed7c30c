/* y = x @ W^T (+ bias) in bfloat16 by a matrix unit (linear.h, tiles.h): x is rounded first, products are
 * summed in float32, 32 depths after 32. Rows up to a whole number of tiles are multiplied too, whatever
 * they hold, so a row's result is the same whatever other rows there are. */
#include "product.h"
#include "tiles.h"

/* Results that are not as they are summed, or of part of a tile, go by way of `sums` [2 * TILE, NR]. */
static void put_sums(const Product *t, int64_t row, int64_t rows, int64_t panel, const float *sums) {
    Product plain = *t;
    plain.keep = 0; /* it has been summed to what was there */
    for (int64_t r = 0; r < rows; r++, sums += NR) {
        vf sum[2] = {load(sums), load(sums + VL)};
        put(&plain, row + r, panel, sum);
    }
}

static void take_sums(const Product *t, int64_t row, int64_t rows, int64_t panel, float *sums) {
    int64_t first = panel * NR, width = t->m - first < NR ? t->m - first : NR;
    for (int64_t r = 0; r < rows; r++)
        memcpy(sums + r * NR, t->y + (row + r) * t->ldy + first, sizeof(float) * width);
}

#define NEAR 2048 /* bytes: two tiles of weights */

/* Rows [start, end) of a panel. Meanwhile many rows fetch the next one, which few would not find in the L1
 * cache any more: they fetch the tiles that come next. */
void tiles_panel(const Product *t, int64_t start, int64_t end, int64_t panel, const char *next) {
    int64_t ldx = narrowed_width(t->k, TILES) / 2, depth = padded(t->k, TILES) / 2;
    int64_t blocks = (end - start + 2 * TILE - 1) / (2 * TILE);
    int64_t share = t->panel_bytes / blocks, pace = share / depth;
    int is_whole = (panel + 1) * NR <= t->m && !t->activation && !t->bias;
    const word *w = (const word *)(t->w + panel * t->panel_bytes);
    _Alignas(64) float sums[2 * TILE * NR];
    if (blocks == 1) next = (const char *)w + NEAR;
    for (int64_t row = start; row < end; row += 2 * TILE, next += share) {
        const word *x = (const word *)t->numbers + row * ldx;
        int64_t rows = end - row < 2 * TILE ? end - row : 2 * TILE;
        int in_place = is_whole && rows == 2 * TILE;
        float *to = in_place ? t->y + row * t->ldy + panel * NR : sums;
        if (t->keep && !in_place) take_sums(t, row, rows, panel, sums);
        tile_rows(rows, depth, x, ldx, w, NR, to, in_place ? t->ldy : NR, t->keep, next, pace);
        if (!in_place) put_sums(t, row, rows, panel, sums);
    }
}
