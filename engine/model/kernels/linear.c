/* y = x @ W^T (+ bias), float32 arithmetic over weights stored as bfloat16 or float32.
 *
 * A weight matrix [m, k] is packed once into panels of NR outputs, [ceil(m / NR), k, NR]: reading a
 * panel is one sequential stream, which is what decoding is bound by. Weights that were bfloat16 in
 * the checkpoint stay so in memory: half the bytes, and the very same products as in float32.
 * In a bfloat16 panel the word j of a row holds output j (low half) and output j + VL (high half),
 * so that a shift and a mask widen it. */
#include <stdlib.h>

#include "common.h"

#define GROUP 4     /* panels that are widened together and stay in the L2 cache */
#define DEPTH 1024  /* rows of a panel that are widened at a time */
#define SMALL (6 * MR) /* up to so many rows of x, panels are widened in registers instead */

int64_t kvr_panel_width(void) { return NR; }

INLINE void pack_row(const void *w, int64_t at, int bf16, void *panel, int64_t pos, int j) {
    if (bf16) {
        int64_t half = j < VL ? 2 * j : 2 * (j - VL) + 1;
        ((uint16_t *)panel)[pos * NR + half] = w ? ((const uint16_t *)w)[at] : 0;
    } else {
        ((float *)panel)[pos * NR + j] = w ? ((const float *)w)[at] : 0.0f;
    }
}

/* w: [m, k] row-major. packed: ceil(m / NR) * NR * k elements of the same type. */
void kvr_pack(const void *w, int64_t m, int64_t k, int bf16, void *packed, int threads) {
    int64_t panels = (m + NR - 1) / NR;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < panels; p++) {
        char *panel = (char *)packed + p * NR * k * (bf16 ? 2 : 4);
        for (int j = 0; j < NR; j++) {
            int64_t row = p * NR + j;
            for (int64_t d = 0; d < k; d++)
                pack_row(row < m ? w : NULL, row * k + d, bf16, panel, d, j);
        }
    }
}

INLINE void widen(const void *panel, int64_t d, int bf16, vf *low, vf *high) {
    if (bf16) {
        vu words = *(const vuu *)((const uint16_t *)panel + d * NR);
        *low = (vf)(words << 16);
        *high = (vf)(words & 0xffff0000u);
    } else {
        *low = load((const float *)panel + d * NR);
        *high = load((const float *)panel + d * NR + VL);
    }
}

typedef struct {
    const float *x;
    int64_t n, k;
    const char *w; /* packed */
    int64_t m, panel_bytes;
    int bf16, keep;
    const float *bias; /* NULL: none */
    float *y;
} Linear;

/* One micro-tile's results to y; the last panel may have columns past m. */
static __attribute__((noinline)) void put(const Linear *t, int64_t row, int64_t panel, vf low,
                                          vf high) {
    int64_t first = panel * NR;
    float *y = t->y + row * t->m + first;
    if (first + NR <= t->m) {
        const float *base = t->keep ? y : t->bias ? t->bias + first : NULL;
        if (base) low += load(base), high += load(base + VL);
        store(y, low);
        store(y + VL, high);
        return;
    }
    for (int j = 0; first + j < t->m; j++) {
        float value = j < VL ? low[j] : high[j - VL];
        y[j] = value + (t->keep ? y[j] : t->bias ? t->bias[first + j] : 0.0f);
    }
}

/* `panels` panels from `first` on, `rows` rows of x from `row` on; both counts are constants. Few
 * rows take several panels at once, so that enough independent sums are in flight. */
INLINE void narrow_tile(const Linear *t, int rows, int panels, int bf16, int64_t row,
                        int64_t first) {
    vf acc[MR][4][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) acc[r][p][0] = acc[r][p][1] = splat(0);
    const float *x = t->x + row * t->k;
    const char *w = t->w + first * t->panel_bytes;
    for (int64_t d = 0; d < t->k; d++) {
        UNROLL for (int p = 0; p < panels; p++) {
            vf low, high;
            widen(w + p * t->panel_bytes, d, bf16, &low, &high);
            UNROLL for (int r = 0; r < rows; r++) {
                vf left = splat(x[r * t->k + d]);
                acc[r][p][0] += left * low;
                acc[r][p][1] += left * high;
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++)
            put(t, row + r, first + p, acc[r][p][0], acc[r][p][1]);
}

INLINE void narrow_block(const Linear *t, int64_t rows, int bf16, int64_t row, int64_t first,
                         int64_t last) {
    int64_t p = first;
#define WIDE(R, P) \
    case R: \
        for (; p + P <= last; p += P) narrow_tile(t, R, P, bf16, row, p); \
        for (; p < last; p++) narrow_tile(t, R, 1, bf16, row, p); \
        break;
    switch (rows) {
        WIDE(1, 4) WIDE(2, 2) WIDE(3, 2) WIDE(4, 1) WIDE(5, 1) WIDE(6, 1)
#if MR > 6
        WIDE(7, 1) WIDE(8, 1)
#endif
#if MR > 8
        WIDE(9, 1) WIDE(10, 1) WIDE(11, 1) WIDE(12, 1)
#endif
    }
#undef WIDE
}

static void narrow(const Linear *t, int threads) {
    int64_t panels = (t->m + NR - 1) / NR, stride = 4, tasks = (panels + stride - 1) / stride;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t first = task * stride;
        int64_t last = first + stride < panels ? first + stride : panels;
        for (int64_t row = 0, rows; row < t->n; row += rows) {
            rows = even_rows(t->n - row);
            if (t->bf16)
                narrow_block(t, rows, 1, row, first, last);
            else
                narrow_block(t, rows, 0, row, first, last);
        }
    }
}

/* Rows [row, end) times `count` panels from `first` on, through a widened copy of the panels. */
static void wide_task(const Linear *t, int64_t first, int64_t count, int64_t row, int64_t end,
                      float *scratch) {
    for (int64_t d0 = 0; d0 < t->k; d0 += DEPTH) {
        int64_t depth = t->k - d0 < DEPTH ? t->k - d0 : DEPTH;
        for (int64_t p = 0; p < count; p++) {
            const char *panel = t->w + (first + p) * t->panel_bytes;
            float *to = scratch + p * DEPTH * NR;
            for (int64_t d = 0; d < depth; d++) {
                vf low, high;
                widen(panel, d0 + d, t->bf16, &low, &high);
                store(to + d * NR, low);
                store(to + d * NR + VL, high);
            }
        }
        int keep = t->keep || d0 > 0;
        for (int64_t r = row, rows; r < end; r += rows) {
            rows = even_rows(end - r);
            const float *x = t->x + r * t->k + d0;
            for (int64_t p = 0; p < count; p++) {
                int64_t col = (first + p) * NR;
                const float *init = t->bias && !keep ? t->bias + col : NULL;
                float *y = t->y + r * t->m + col;
                const float *b = scratch + p * DEPTH * NR;
                if (col + NR <= t->m) {
                    multiply(rows, 2, depth, x, t->k, b, NR, y, t->m, keep, init);
                    continue;
                }
                float tile[MR * NR] __attribute__((aligned(64)));
                multiply(rows, 2, depth, x, t->k, b, NR, tile, NR, 0, NULL);
                for (int64_t i = 0; i < rows; i++)
                    for (int64_t j = 0; col + j < t->m; j++) {
                        float base = keep ? y[i * t->m + j] : (init ? init[j] : 0.0f);
                        y[i * t->m + j] = base + tile[i * NR + j];
                    }
            }
        }
    }
}

static void wide(const Linear *t, int threads) {
    int64_t panels = (t->m + NR - 1) / NR, groups = (panels + GROUP - 1) / GROUP;
    int64_t chunk = MR * 32; /* rows of x: widening a group is paid once per chunk */
    int64_t chunks = (t->n + chunk - 1) / chunk;
#pragma omp parallel num_threads(threads)
    {
        float *scratch = aligned_alloc(64, sizeof(float) * GROUP * DEPTH * NR);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < groups * chunks; task++) {
            int64_t first = task / chunks * GROUP, row = task % chunks * chunk;
            int64_t count = panels - first < GROUP ? panels - first : GROUP;
            int64_t end = row + chunk < t->n ? row + chunk : t->n;
            wide_task(t, first, count, row, end, scratch);
        }
        free(scratch);
    }
}

/* x: [n, k] float32, y: [n, m] float32, both contiguous; keep: add to y instead of setting it,
 * without a bias then. */
void kvr_linear(const float *x, int64_t n, int64_t k, const void *packed, int bf16, int64_t m,
                const float *bias, float *y, int keep, int threads) {
    Linear t = {x, n, k, packed, m, NR * k * (bf16 ? 2 : 4), bf16, keep, bias, y};
    if (n <= SMALL)
        narrow(&t, threads);
    else
        wide(&t, threads);
}
