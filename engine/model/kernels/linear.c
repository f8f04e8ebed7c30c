/* y = x @ W^T (+ bias), float32 arithmetic over packed weights (linear.h).
 *
 * Few rows of x: reading W is what takes time. Panels are widened in registers, and while one is
 * multiplied the next is fetched. Many rows: arithmetic is. Panels are widened once for a chunk of
 * rows, into a copy that stays in the L2 cache. */
#include "linear.h"
#include "pool.h"
#include "product.h"

#define TASKS 6 /* a thread: enough to even out what one that is held up leaves */
#define GROUP 4 /* panels of a task of many rows; widened, they stay in the L2 cache */
#define DEPTH 1024 /* depths of a panel that are widened at a time, whole groups of INT8 */
#define CHUNK (MR * 32) /* rows of x of one task: widening is paid once per chunk */
#define SMALL (6 * MR) /* up to so many rows of x are few */

/* One micro-tile's results to y; the last panel may have columns past m. */
static __attribute__((noinline)) void put(const Product *t, int64_t row, int64_t panel, vf low,
                                          vf high) {
    int64_t first = panel * NR;
    float *y = t->y + row * t->ldy + first;
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

/* One depth of panels at `w` into `acc`. */
INLINE void sum_one(const Product *t, int rows, int panels, int kind, int odd, const float *x,
                    const char *w, vf acc[MR][4][2]) {
    UNROLL for (int p = 0; p < panels; p++) {
        vf low, high;
        widen(w + p * t->panel_bytes, kind, odd, &low, &high);
        UNROLL for (int r = 0; r < rows; r++) {
            vf left = splat(x[r * t->ldx + odd]);
            acc[r][p][0] += left * low;
            acc[r][p][1] += left * high;
        }
    }
}

/* Sums over `depth` depths into `acc`. `ahead`: what to prefetch meanwhile, `pace` bytes for every
 * two depths. */
INLINE void sum_depths(const Product *t, int rows, int panels, int kind, int64_t depth,
                       const float *x, const char *w, const char *ahead, int64_t pace,
                       vf acc[MR][4][2]) {
    const int pair = 2 * NR * (kind == INT8 ? 1 : kind == BF16 ? 2 : 4);
    int64_t d = 0;
    if (rows == MR && kind != INT8) { /* two depths at once would not fit the registers */
        for (; d < depth; d++, x++, w += pair / 2, ahead += pace / 2) {
            __builtin_prefetch(ahead);
            sum_one(t, rows, panels, kind, 0, x, w, acc);
        }
        return;
    }
    for (; d + 2 <= depth; d += 2, x += 2, w += pair, ahead += pace) {
        __builtin_prefetch(ahead);
        sum_one(t, rows, panels, kind, 0, x, w, acc);
        sum_one(t, rows, panels, kind, 1, x, w, acc);
    }
    if (d < depth) sum_one(t, rows, panels, kind, 0, x, w, acc);
}

INLINE void clear(int rows, int panels, vf acc[MR][4][2]) {
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) acc[r][p][0] = acc[r][p][1] = splat(0);
}

/* Sums of a whole panel of INT8: those of each group of depths times its scale. */
INLINE void sum_groups(const Product *t, int rows, int panels, const float *x, const char *w,
                       const char *ahead, int64_t pace, vf total[MR][4][2]) {
    vf acc[MR][4][2];
    for (int64_t d = 0; d < t->k; d += INT8_GROUP, x += INT8_GROUP) {
        int64_t depth = t->k - d < INT8_GROUP ? t->k - d : INT8_GROUP;
        clear(rows, panels, acc);
        sum_depths(t, rows, panels, INT8, depth, x, w, ahead, pace, acc);
        ahead += depth / 2 * pace;
        w += even(depth) * NR;
        UNROLL for (int p = 0; p < panels; p++) {
            vf low, high;
            widen_bf16(w + p * t->panel_bytes, &low, &high);
            low *= INT8_UNIT, high *= INT8_UNIT;
            UNROLL for (int r = 0; r < rows; r++) {
                total[r][p][0] += acc[r][p][0] * low;
                total[r][p][1] += acc[r][p][1] * high;
            }
        }
        w += 2 * NR;
    }
}

/* `panels` panels from `first` on, `rows` rows of x from `row` on; both counts are constants. Few
 * rows take several panels at once, so that enough independent sums are in flight. */
INLINE void narrow_tile(const Product *t, int rows, int panels, int kind, int64_t row,
                        int64_t first, const char *ahead, int64_t pace) {
    const float *x = t->x + row * t->ldx;
    const char *w = t->w + first * t->panel_bytes;
    vf acc[MR][4][2];
    clear(rows, panels, acc);
    if (kind == INT8)
        sum_groups(t, rows, panels, x, w, ahead, pace, acc);
    else
        sum_depths(t, rows, panels, kind, t->k, x, w, ahead, pace, acc);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++)
            put(t, row + r, first + p, acc[r][p][0], acc[r][p][1]);
}

#define MANY(R) ((R) == 1 ? 4 : (R) == 2 ? 2 : 1) /* panels at once */

INLINE void narrow_rows(const Product *t, int64_t rows, int alone, int kind, int64_t row,
                        int64_t first, const char *ahead, int64_t pace) {
#define TILE(R) \
    case R: narrow_tile(t, R, alone ? 1 : MANY(R), kind, row, first, ahead, pace); break;
    switch (rows) { EACH_ROWS(TILE) }
#undef TILE
}

/* Panels [first, last), each times all rows while it is in the cache. */
INLINE void narrow_panels(const Product *t, int kind, int64_t first, int64_t last) {
    int64_t high = kind == INT8 ? MR - 1 : MR; /* widening INT8 takes registers */
    int64_t tiles = (t->n + high - 1) / high, many = t->n > 2 ? 1 : MANY(t->n);
    int64_t share = t->panel_bytes / tiles, pace = 2 * share / t->k;
    for (int64_t p = first, count; p < last; p += count) {
        count = p + many <= last ? many : 1;
        const char *ahead = t->w + (p + count < last ? p + count : p) * t->panel_bytes;
        int64_t row = 0;
        for (int64_t left = tiles; left > 0; left--, ahead += share) {
            int64_t rows = (t->n - row + left - 1) / left;
            if (count == 1) /* a constant in either call */
                narrow_rows(t, rows, 1, kind, row, p, ahead, pace);
            else
                narrow_rows(t, rows, 0, kind, row, p, ahead, pace);
            row += rows;
        }
    }
}

static void narrow_task(const Product *t, int64_t task) {
    int64_t panels = (t->m + NR - 1) / NR, first = task * t->group;
    int64_t last = first + t->group < panels ? first + t->group : panels;
    if (t->kind == INT8)
        narrow_panels(t, INT8, first, last);
    else if (t->kind == BF16)
        narrow_panels(t, BF16, first, last);
    else
        narrow_panels(t, FLOAT32, first, last);
}

/* A micro-tile of NR columns and any number of rows up to MR. */
static void full_tile(int64_t rows, int64_t depth, const float *x, int64_t ldx, const float *b,
                      float *y, int64_t ldy, int keep, const float *init) {
#define TILE(R) \
    case R: micro(R, 2, depth, x, ldx, 1, b, NR, y, ldy, keep, init); break;
    switch (rows) { EACH_ROWS(TILE) }
#undef TILE
}

/* Depths [from, from + depth) of a panel as float32 [depth, NR]; `from` is a multiple of DEPTH. */
INLINE void widen_as(const char *panel, int kind, int64_t from, int64_t depth, float *to) {
    vf scale[2] = {splat(0), splat(0)};
    for (int64_t d = 0; d < depth; d++, to += NR) {
        const char *at = panel + depth_at(from + d / 2 * 2, kind);
        vf low, high;
        if (kind == INT8 && d % INT8_GROUP == 0) {
            int64_t left = depth - d < INT8_GROUP ? depth - d : INT8_GROUP;
            widen_bf16(at + even(left) * NR, &scale[0], &scale[1]);
            scale[0] *= INT8_UNIT, scale[1] *= INT8_UNIT;
        }
        widen(at, kind, d & 1, &low, &high);
        store(to, kind == INT8 ? low * scale[0] : low);
        store(to + VL, kind == INT8 ? high * scale[1] : high);
    }
}

static void widen_panel(const Product *t, int64_t panel, int64_t from, int64_t depth, float *to) {
    const char *at = t->w + panel * t->panel_bytes;
    if (t->kind == INT8)
        widen_as(at, INT8, from, depth, to);
    else if (t->kind == BF16)
        widen_as(at, BF16, from, depth, to);
    else
        widen_as(at, FLOAT32, from, depth, to);
}

/* One micro-tile into y, of whose columns only those below m exist. */
static void edge_tile(const Product *t, int64_t rows, int64_t depth, const float *x,
                      const float *b, int64_t row, int64_t col, int keep) {
    float tile[MR * NR] __attribute__((aligned(64)));
    full_tile(rows, depth, x, t->ldx, b, tile, NR, 0, NULL);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = col; j < t->m; j++) {
            float *y = t->y + (row + i) * t->ldy + j;
            *y = tile[i * NR + j - col] + (keep ? *y : t->bias ? t->bias[j] : 0.0f);
        }
}

/* Rows [start, end) times panels [first, last), of which `depth` depths from `from` on are widened
 * in `copies`. */
static void wide_tiles(const Product *t, int64_t start, int64_t end, int64_t first, int64_t last,
                       int64_t from, int64_t depth, const float *copies) {
    int keep = t->keep || from > 0;
    for (int64_t row = start, rows; row < end; row += rows) {
        rows = even_rows(end - row);
        const float *x = t->x + row * t->ldx + from, *b = copies;
        for (int64_t p = first; p < last; p++, b += DEPTH * NR) {
            int64_t col = p * NR;
            const float *init = t->bias && !keep ? t->bias + col : NULL;
            float *y = t->y + row * t->ldy + col;
            if (col + NR <= t->m)
                full_tile(rows, depth, x, t->ldx, b, y, t->ldy, keep, init);
            else
                edge_tile(t, rows, depth, x, b, row, col, keep);
        }
    }
}

/* A chunk of rows times a group of panels. */
static void wide_task(const Product *t, int64_t task) {
    int64_t panels = (t->m + NR - 1) / NR, chunks = (t->n + CHUNK - 1) / CHUNK;
    int64_t first = task / chunks * GROUP, start = task % chunks * CHUNK;
    int64_t last = first + GROUP < panels ? first + GROUP : panels;
    int64_t end = start + CHUNK < t->n ? start + CHUNK : t->n;
    float *copies = kvr_scratch(sizeof(float) * GROUP * DEPTH * NR);
    for (int64_t from = 0; from < t->k; from += DEPTH) {
        int64_t depth = t->k - from < DEPTH ? t->k - from : DEPTH;
        for (int64_t p = first; p < last; p++)
            widen_panel(t, p, from, depth, copies + (p - first) * DEPTH * NR);
        wide_tiles(t, start, end, first, last, from, depth, copies);
    }
}

int64_t product_plan(Product *t, int threads) {
    int64_t panels = (t->m + NR - 1) / NR;
    t->panel_bytes = bytes_of_panel(t->k, t->kind);
    t->group = GROUP;
    if (t->n == 0) return 0; /* a step of which nothing is sampled has no logits */
    if (t->n > SMALL) return (panels + GROUP - 1) / GROUP * ((t->n + CHUNK - 1) / CHUNK);
    while (t->group < 4 * GROUP && panels >= 2 * t->group * threads * TASKS) t->group *= 2;
    return (panels + t->group - 1) / t->group;
}

void product_task(const Product *t, int64_t task) {
    (t->n > SMALL ? wide_task : narrow_task)(t, task);
}

static void linear_task(void *product, int64_t task) { product_task(product, task); }

/* x: [n, k], y: [n, m], float32 with rows `ldx` and `ldy` apart; keep: add to y instead of setting
 * it, without a bias then. */
void kvr_linear(const float *x, int64_t n, int64_t ldx, int64_t k, const void *packed, int kind,
                int64_t m, const float *bias, float *y, int64_t ldy, int keep, int threads) {
    Product t = {x, y, bias, packed, n, m, k, ldx, ldy, 0, 0, kind, keep};
    kvr_parallel(threads, product_plan(&t, threads), linear_task, &t);
}
