/* Weights into panels (layout.h): once, while a checkpoint is loaded. */
#include "../thread_pool.h"
#include "gemm.h"

typedef struct {
    const void *w;
    int64_t m, k;
    int kind, gated;
    const uint16_t *scales;
    char *packed;
} Pack;

int64_t kvr_packed_bytes(int64_t m, int64_t k, int kind) {
    return (m + NR - 1) / NR * bytes_of_panel(k, kind);
}

static void pack_int8(const Pack *t, int64_t row, int64_t j, char *panel) {
    int64_t groups = num_groups(t->k, INT8);
    const int8_t *w = (const int8_t *)t->w + row * t->k;
    for (int64_t d = 0; d < t->k; d++)
        panel[depth_at(d & ~1, INT8) + j % VL * 4 + j / VL + 2 * (d & 1)] = w[d];
    for (int64_t g = 0; g < groups; g++) {
        int64_t first = g * INT8_GROUP, left = t->k - first;
        int64_t size = even(left < INT8_GROUP ? left : INT8_GROUP);
        uint16_t *scales = (uint16_t *)(panel + depth_at(first, INT8) + size * NR);
        scales[bf16_place(j)] = t->scales[row * groups + g];
    }
}

/* Which row of the matrix is output j of a panel; -1: none. */
INLINE int64_t row_of(const Pack *t, int64_t panel, int64_t j) {
    int64_t half = t->m / 2, row = t->gated ? panel * VL + j % VL : panel * NR + j;
    if (row >= (t->gated ? half : t->m)) return -1;
    return t->gated && j >= VL ? half + row : row;
}

static void pack_panel(void *arg, int64_t p) {
    const Pack *t = arg;
    int64_t bytes = bytes_of_panel(t->k, t->kind);
    char *panel = t->packed + p * bytes;
    if ((p + 1) * NR > t->m || padded(t->k, t->kind) > t->k || t->kind == INT4) memset(panel, 0, bytes);
    for (int64_t j = 0; j < NR; j++) {
        int64_t row = row_of(t, p, j), at = row * t->k;
        if (row < 0) continue;
        if (t->kind == INT8)
            pack_int8(t, row, j, panel);
        else if (t->kind == INT4)
            int4_pack((const uint8_t *)t->w + at, t->scales + row * 2 * num_groups(t->k, INT4), t->k, j, panel);
        else if (t->kind == FP16)
            fp16_pack((const uint16_t *)t->w + at, t->k, j, panel);
        else if (t->kind == INT16)
            int16_pack((const uint16_t *)t->w + at, t->k, j, panel);
        else if (t->kind == BF16_PAIRS || t->kind == AMX)
            for (int64_t d = 0; d < t->k; d++)
                ((uint16_t *)panel)[(d & ~1) * NR + 2 * j + (d & 1)] =
                    ((const uint16_t *)t->w)[at + d];
        else if (t->kind == BF16)
            for (int64_t d = 0; d < t->k; d++)
                ((uint16_t *)panel)[d * NR + bf16_place(j)] = ((const uint16_t *)t->w)[at + d];
        else
            for (int64_t d = 0; d < t->k; d++)
                ((float *)panel)[d * NR + j] = ((const float *)t->w)[at + d];
    }
}

/* As api.h says. */
void kvr_pack(const void *w, int64_t m, int64_t k, int kind, int gated, const uint16_t *scales,
              void *packed, int threads) {
    Pack t = {w, m, k, kind, gated, scales, packed};
    kvr_parallel(threads, (m + NR - 1) / NR, pack_panel, &t);
}
