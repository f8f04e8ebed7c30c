/* y = x @ W^T (+ bias) in bfloat16 by a matrix unit (linear.h, tiles.h): x is rounded first, products are
 * summed in float32, 32 depths after 32. Rows up to a whole number of tiles are multiplied too, whatever
 * they hold, so a row's result is the same whatever other rows there are. */
#include "pool.h"
#include "product.h"
#include "tiles.h"

/* Results that are not as they are summed, or of part of a tile, go by way of `sums` [rows, NR]. */
static __attribute__((noinline)) void put_sums(const Product *plain, int64_t row, int64_t rows, int64_t panel,
                                               const float *sums) {
    for (int64_t r = 0; r < rows; r++, sums += NR) {
        vf sum[2] = {load(sums), load(sums + VL)};
        put(plain, row + r, panel, sum);
    }
}

static __attribute__((noinline)) void take_sums(const Product *t, int64_t row, int64_t rows, int64_t panel,
                                                float *sums) {
    int64_t first = panel * NR, width = t->m - first < NR ? t->m - first : NR;
    for (int64_t r = 0; r < rows; r++)
        memcpy(sums + r * NR, t->y + (row + r) * t->ldy + first, sizeof(float) * width);
}

/* y takes results as they are summed, but for those that end within a tile. */
INLINE int is_straight(const Product *t) { return !t->activation && !t->bias; }

#define NEAR 3072 /* bytes ahead that weights are fetched: 1 KiB more or less is slower */
#define AREA (2 * TILE * NR) /* floats of two tiles of rows */

INLINE void fetch_near(void *with, int half) {
    const char **at = with;
    UNROLL for (int i = 0; i < TILE; i++) fetch_to_l2(*at + 128 * i + 64 * half);
    *at += half * 4 * NR * TILE; /* two tiles */
}

/* Rows [start, end), two tiles at most: what takes time is the weights' way here. Of those that come next, the
 * lines are fetched in the order in which tiles take them. Of its own, so that its loop has all registers. */
static __attribute__((noinline)) void few_rows(const Product *t, int64_t start, int64_t end, int64_t first,
                                               int64_t last) {
    int64_t ldx = narrowed_width(t->k, TILES) / 2, depth = padded(t->k, TILES) / 2, rows = end - start;
    const word *x = (const word *)t->numbers + start * ldx;
    _Alignas(64) float sums[AREA];
    Product plain = *t;
    plain.keep = 0; /* it has been summed to what was there */
    for (int64_t p = first; p < last; p++) {
        const char *w = t->w + p * t->panel_bytes, *ahead = w + NEAR;
        int in_place = is_straight(t) && rows == 2 * TILE && (p + 1) * NR <= t->m;
        float *to = in_place ? t->y + start * t->ldy + p * NR : sums;
        if (t->keep && !in_place) take_sums(t, start, rows, p, sums);
        tile_rows(rows, depth, x, ldx, 0, (const word *)w, NR, to, in_place ? t->ldy : NR, t->keep,
                  fetch_near, &ahead);
        if (!in_place) put_sums(&plain, start, rows, p, sums);
    }
}

#define DEPTH 320 /* words of a panel that meet all rows before others do, at most: they stay in the L1 cache */

/* What is done while many rows are multiplied: the weights that come next are fetched to the L2 cache, what the
 * next results are written to to the L1 cache, and results that are not as they were summed are put where they
 * belong. They are summed in `areas` of AREA: of a straight product 2, as y holds the sums of a part of the
 * depths, else as many as there are blocks of rows, and one more. */
typedef struct {
    Product plain;
    float *areas;
    int64_t num_areas;
    const char *ahead, *results;
    const float *sums;
    int64_t panel, row, left; /* of what is to be put; left: rows from `row` on */
    int64_t pace, each;       /* bytes of weights and rows at a time */
} Work;

INLINE void put_some(Work *w, int64_t count) {
    for (; count > 0 && w->left > 0; count--, w->left--, w->row++, w->sums += NR) {
        vf sum[2] = {load(w->sums), load(w->sums + VL)};
        put(&w->plain, w->row, w->panel, sum);
    }
}

INLINE void work_beside(void *with, int half) {
    Work *w = with;
    if (half) {
        put_some(w, w->each);
        return;
    }
    for (const char *end = w->ahead + w->pace; w->ahead < end; w->ahead += 64)
        fetch_to_l2(w->ahead);
    for (int64_t i = 0; w->results && i < w->each; i++, w->results += 4 * w->plain.ldy) {
        __builtin_prefetch(w->results, 1);
        __builtin_prefetch(w->results + 64, 1);
    }
}

/* A panel's words [from, to) of all rows [start, end), which stream past them. */
static void many_rows(const Product *t, int64_t start, int64_t end, int64_t panel, int64_t from, int64_t to,
                      Work *work) {
    int64_t ldx = narrowed_width(t->k, TILES) / 2, blocks = (end - start + 2 * TILE - 1) / (2 * TILE);
    int straight = is_straight(t), whole = straight && (panel + 1) * NR <= t->m, keep = t->keep || from;
    int is_last = to == padded(t->k, TILES) / 2;
    const word *w = (const word *)(t->w + panel * t->panel_bytes) + from * NR;
    const word *x = (const word *)t->numbers + start * ldx + from;
    float *y = t->y + start * t->ldy + panel * NR;
    work->each = (2 * TILE * TILE + to - from - 1) / (to - from);
    for (int64_t b = 0; b < blocks; b++, x += 2 * TILE * ldx, y += 2 * TILE * t->ldy) {
        int64_t row = start + b * 2 * TILE, rows = end - row < 2 * TILE ? end - row : 2 * TILE;
        int in_place = whole && rows == 2 * TILE;
        float *area = work->areas + (panel * blocks + b) % work->num_areas * AREA;
        if (straight && keep && !in_place) take_sums(t, row, rows, panel, area);
        work->results = whole && row + 4 * TILE <= end ? (const char *)(y + 2 * TILE * t->ldy) : NULL;
        tile_rows(rows, to - from, x, ldx, 1, w, NR, in_place ? y : area, in_place ? t->ldy : NR, keep,
                  work_beside, work);
        put_some(work, 2 * TILE);
        if (!in_place && (straight || is_last))
            work->sums = area, work->panel = panel, work->row = row, work->left = rows;
    }
}

void tiles_unit(const Product *t, int64_t start, int64_t end, int64_t first, int64_t last,
                const char *ahead) {
    if (end - start <= 2 * TILE) {
        few_rows(t, start, end, first, last);
        return;
    }
    int straight = is_straight(t);
    int64_t blocks = (end - start + 2 * TILE - 1) / (2 * TILE), panels = last - first;
    int64_t depth = padded(t->k, TILES) / 2, parts = (depth + DEPTH - 1) / DEPTH;
    int64_t most = (depth / TILE + parts - 1) / parts * TILE;
    Work work = {.plain = *t, .num_areas = parts > 1 && !straight ? blocks + 1 : 2};
    work.plain.keep = 0; /* it has been summed to what was there */
    work.areas = kvr_scratch(OF_TASKS, sizeof(float) * AREA * work.num_areas);
    work.pace = 4 * NR * TILE / blocks;
    /* Where y can hold sums, all panels meet one part of the rows after the other: it stays in the L2 cache. */
    int64_t inner = straight ? panels : parts;
    for (int64_t i = 0, panel = first, from = 0; i < panels * parts; i++) {
        int64_t n = i + 1;
        int64_t next_panel = first + (straight ? n % inner : n / inner);
        int64_t next_from = (straight ? n / inner : n % inner) * most;
        const char *next = t->w + next_panel * t->panel_bytes + 4 * NR * next_from;
        work.ahead = n < panels * parts ? next : ahead;
        if (straight && panel == first) put_some(&work, 2 * TILE); /* it may be taken again */
        many_rows(t, start, end, panel, from, from + most < depth ? from + most : depth, &work);
        panel = next_panel, from = next_from;
    }
    put_some(&work, 2 * TILE);
}
