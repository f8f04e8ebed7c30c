/* y = x @ W^T (+ bias) in bfloat16 (layout.h): x is rounded first, products are summed in float32 from
 * the first pair of depths to the last. */
#include "gemm.h"

/* As `MicroTile` (gemm.h). */
INLINE void tile(const Gemm *t, int rows, int panels, int64_t row, int64_t panel,
                 const char *ahead, int64_t prefetch_step) {
    int64_t ldx = even(t->k), apart = t->panel_bytes;
    const int16_t *x = t->converted_x + row * ldx;
    const char *w = t->w + panel * apart;
    vf acc[MR][PANELS_AT_ONCE][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) acc[r][p][0] = acc[r][p][1] = splat(0);
    for (int64_t d = 0; d < ldx; d += 2, x += 2, w += 4 * NR, ahead += prefetch_step) {
        UNROLL for (int line = 0; line < 4 * NR * panels; line += 64)
            fetch_to_l2(ahead + line);
        UNROLL for (int p = 0; p < panels; p++) {
            vu low = *(const vuu *)(w + p * apart), high = *(const vuu *)(w + p * apart + 2 * NR);
            UNROLL for (int r = 0; r < rows; r++) {
                uint32_t pair;
                memcpy(&pair, x + r * ldx, sizeof pair);
                vu both = pair - (vu){0};
                acc[r][p][0] = add_bf16_pairs(acc[r][p][0], low, both);
                acc[r][p][1] = add_bf16_pairs(acc[r][p][1], high, both);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) put(t, row + r, panel + p, acc[r][p]);
}

#define FEW_OF(R) \
    static void few_##R(TILE_ARGUMENTS) { tile(t, R, PANELS_AT_ONCE, row, panel, ahead, prefetch_step); }
EACH_ROWS(TILE_OF)
FEW_OF(1) FEW_OF(2) FEW_OF(3)
MicroTiles bf16_tiles = {EACH_ROWS(TILE_NAME) few_1, few_2, few_3};

void bf16_row(const float *x, int64_t k, int64_t width, int16_t *numbers) {
    int64_t i = 0;
    for (; i + VL <= k; i += VL) *(vhu *)(numbers + i) = round_bf16_fast(load(x + i));
    for (; i < k; i++) numbers[i] = (int16_t)float_to_bf16(x[i]);
    for (; i < width; i++) numbers[i] = 0;
}
