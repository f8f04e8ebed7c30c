/* y = x @ W^T (+ bias), float32 arithmetic over weights stored as bfloat16 or float32.
 *
 * A weight matrix [m, k] is packed once into panels of NR outputs, [ceil(m / NR), k, NR]: reading a
 * panel is one sequential stream, which is what decoding is bound by. Weights that were bfloat16 in
 * the checkpoint stay so in memory: half the bytes, and the very same products as in float32.
 * In a bfloat16 panel the word j of a row holds output j (low half) and output j + VL (high half),
 * so that a shift and a mask widen it. */
#include "common.h"
#include "pool.h"

#define GROUP 4     /* panels of one task; widened, they stay in the L2 cache */
#define DEPTH 1024  /* rows of a panel that are widened at a time */
#define CHUNK (MR * 32) /* rows of x of one task: widening is paid once per chunk */
#define SMALL (6 * MR) /* up to so many rows of x, panels are widened in registers instead */

int64_t kvr_panel_width(void) { return NR; }

INLINE void pack_one(const void *w, int64_t at, int bf16, void *panel, int64_t pos, int j) {
    if (bf16) {
        int64_t half = j < VL ? 2 * j : 2 * (j - VL) + 1;
        ((uint16_t *)panel)[pos * NR + half] = w ? ((const uint16_t *)w)[at] : 0;
    } else {
        ((float *)panel)[pos * NR + j] = w ? ((const float *)w)[at] : 0.0f;
    }
}

typedef struct {
    const void *w;
    int64_t m, k;
    int bf16;
    char *packed;
} Pack;

static void pack_panel(void *arg, int64_t p) {
    const Pack *t = arg;
    char *panel = t->packed + p * NR * t->k * (t->bf16 ? 2 : 4);
    for (int j = 0; j < NR; j++) {
        int64_t row = p * NR + j;
        const void *from = row < t->m ? t->w : NULL;
        if (t->bf16)
            for (int64_t d = 0; d < t->k; d++) pack_one(from, row * t->k + d, 1, panel, d, j);
        else
            for (int64_t d = 0; d < t->k; d++) pack_one(from, row * t->k + d, 0, panel, d, j);
    }
}

/* w: [m, k] row-major. packed: ceil(m / NR) * NR * k elements of the same type. */
void kvr_pack(const void *w, int64_t m, int64_t k, int bf16, void *packed, int threads) {
    Pack t = {w, m, k, bf16, packed};
    kvr_parallel(threads, (m + NR - 1) / NR, pack_panel, &t);
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

#define MANY(R) ((R) == 1 ? 4 : (R) < 4 ? 2 : 1)

INLINE void narrow_block(const Linear *t, int64_t rows, int bf16, int64_t row, int64_t first,
                         int64_t last) {
    int64_t p = first;
#define WIDE(R) \
    case R: \
        for (; p + MANY(R) <= last; p += MANY(R)) narrow_tile(t, R, MANY(R), bf16, row, p); \
        for (; p < last; p++) narrow_tile(t, R, 1, bf16, row, p); \
        break;
    switch (rows) { EACH_ROWS(WIDE) }
#undef WIDE
}

static void narrow_task(void *arg, int64_t task) {
    const Linear *t = arg;
    int64_t panels = (t->m + NR - 1) / NR, first = task * GROUP;
    int64_t last = first + GROUP < panels ? first + GROUP : panels;
    for (int64_t row = 0, rows; row < t->n; row += rows) {
        rows = even_rows(t->n - row);
        if (t->bf16)
            narrow_block(t, rows, 1, row, first, last);
        else
            narrow_block(t, rows, 0, row, first, last);
    }
}

/* A micro-tile of NR columns and any number of rows up to MR. */
static void full_tile(int64_t rows, int64_t depth, const float *x, int64_t ldx, const float *b,
                      float *y, int64_t ldy, int keep, const float *init) {
#define CASE(R) \
    case R: micro(R, 2, depth, x, ldx, 1, b, NR, y, ldy, keep, init); break;
    switch (rows) { EACH_ROWS(CASE) }
#undef CASE
}

/* Panels from `first` on, `depth` rows of each from `from` on, as float32 [DEPTH, NR] each. */
static void widen_group(const Linear *t, int64_t first, int64_t count, int64_t from,
                        int64_t depth, float *scratch) {
    for (int64_t p = 0; p < count; p++) {
        const char *panel = t->w + (first + p) * t->panel_bytes;
        float *to = scratch + p * DEPTH * NR;
        for (int64_t d = 0; d < depth; d++) {
            vf low, high;
            widen(panel, from + d, t->bf16, &low, &high);
            store(to + d * NR, low);
            store(to + d * NR + VL, high);
        }
    }
}

/* One micro-tile into y, of whose columns only those below m exist. */
static void edge_tile(const Linear *t, int64_t rows, int64_t depth, const float *x,
                      const float *b, int64_t row, int64_t col, int keep) {
    float tile[MR * NR] __attribute__((aligned(64)));
    full_tile(rows, depth, x, t->k, b, tile, NR, 0, NULL);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = col; j < t->m; j++) {
            float *y = t->y + (row + i) * t->m + j;
            *y = tile[i * NR + j - col] + (keep ? *y : t->bias ? t->bias[j] : 0.0f);
        }
}

/* A chunk of rows times a group of panels, through a widened copy of the panels. */
static void wide_task(void *arg, int64_t task) {
    const Linear *t = arg;
    int64_t panels = (t->m + NR - 1) / NR, chunks = (t->n + CHUNK - 1) / CHUNK;
    int64_t first = task / chunks * GROUP, start = task % chunks * CHUNK;
    int64_t count = panels - first < GROUP ? panels - first : GROUP;
    int64_t end = start + CHUNK < t->n ? start + CHUNK : t->n;
    float *scratch = kvr_scratch(sizeof(float) * GROUP * DEPTH * NR);
    for (int64_t from = 0; from < t->k; from += DEPTH) {
        int64_t depth = t->k - from < DEPTH ? t->k - from : DEPTH;
        widen_group(t, first, count, from, depth, scratch);
        int keep = t->keep || from > 0;
        for (int64_t row = start, rows; row < end; row += rows) {
            rows = even_rows(end - row);
            const float *x = t->x + row * t->k + from;
            for (int64_t p = 0; p < count; p++) {
                int64_t col = (first + p) * NR;
                const float *b = scratch + p * DEPTH * NR;
                const float *init = t->bias && !keep ? t->bias + col : NULL;
                if (col + NR <= t->m)
                    full_tile(rows, depth, x, t->k, b, t->y + row * t->m + col, t->m, keep, init);
                else
                    edge_tile(t, rows, depth, x, b, row, col, keep);
            }
        }
    }
}

/* x: [n, k] float32, y: [n, m] float32, both contiguous; keep: add to y instead of setting it,
 * without a bias then. */
void kvr_linear(const float *x, int64_t n, int64_t k, const void *packed, int bf16, int64_t m,
                const float *bias, float *y, int keep, int threads) {
    Linear t = {x, n, k, packed, m, NR * k * (bf16 ? 2 : 4), bf16, keep, bias, y};
    int64_t groups = (m + NR * GROUP - 1) / (NR * GROUP);
    if (n <= SMALL)
        kvr_parallel(threads, groups, narrow_task, &t);
    else
        kvr_parallel(threads, groups * ((n + CHUNK - 1) / CHUNK), wide_task, &t);
}
