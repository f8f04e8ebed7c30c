/* y = x @ W^T (+ bias) in bfloat16 by a matrix unit (layout.h, amx.h): x is rounded first, products are
 * summed in float32, 32 depths after 32. Rows up to a whole number of tiles are multiplied too, whatever
 * they hold, so a row's result is the same whatever other rows there are. */
#include "../thread_pool.h"
#include "amx.h"
#include "gemm.h"

/* Results that are not as they are summed, or of part of a tile, go by way of `sums` [rows, NR]. */
static __attribute__((noinline)) void put_sums(const Gemm *plain, int64_t row, int64_t rows, int64_t panel,
                                               const float *sums) {
    for (int64_t r = 0; r < rows; r++, sums += NR) {
        vf sum[2] = {load(sums), load(sums + VL)};
        put(plain, row + r, panel, sum);
    }
}

static __attribute__((noinline)) void take_sums(const Gemm *t, int64_t row, int64_t rows, int64_t panel,
                                                float *sums) {
    int64_t first = panel * NR, width = t->m - first < NR ? t->m - first : NR;
    for (int64_t r = 0; r < rows; r++)
        memcpy(sums + r * NR, t->y + (row + r) * t->ldy + first, sizeof(float) * width);
}

/* y takes results as they are summed, but for those that end within a tile. */
INLINE int is_straight(const Gemm *t) { return !t->activation && !t->bias; }

#define NEAR 3072 /* bytes ahead that weights are fetched: 1 KiB more or less is slower */
#define AREA (2 * AMX_TILE * NR) /* floats of two tiles of rows */

INLINE void fetch_near(void *with, int half) {
    const char **at = with;
    UNROLL for (int i = 0; i < AMX_TILE; i++) fetch_to_l2(*at + 128 * i + 64 * half);
    *at += half * 4 * NR * AMX_TILE; /* two tiles */
}

/* Rows [start, end), two tiles at most: reading the weights takes the time. Of those that come next, the
 * lines are fetched in the order in which tiles take them. Of its own, so that its loop has all registers. */
static __attribute__((noinline)) void few_rows(const Gemm *t, int64_t start, int64_t end, int64_t first,
                                               int64_t last) {
    int64_t ldx = converted_width(t->k, AMX) / 2, depth = padded(t->k, AMX) / 2, rows = end - start;
    const word *x = (const word *)t->converted_x + start * ldx;
    _Alignas(64) float sums[AREA];
    Gemm plain = *t;
    plain.keep = 0; /* it has been summed to what was there */
    for (int64_t p = first; p < last; p++) {
        const char *w = t->w + p * t->panel_bytes, *ahead = w + NEAR;
        int in_place = is_straight(t) && rows == 2 * AMX_TILE && (p + 1) * NR <= t->m;
        float *to = in_place ? t->y + start * t->ldy + p * NR : sums;
        if (t->keep && !in_place) take_sums(t, start, rows, p, sums);
        amx_rows(rows, depth, x, ldx, 0, (const word *)w, NR, to, in_place ? t->ldy : NR, t->keep,
                  fetch_near, &ahead);
        if (!in_place) put_sums(&plain, start, rows, p, sums);
    }
}

#define DEPTH 320 /* words of a panel that all rows are multiplied with before the next ones, at most: they stay in L1 */

/* What is done while many rows are multiplied: the weights that come next are fetched to the L2 cache, what the
 * next results are written to to the L1 cache, and results that are not as they were summed are put where they
 * belong. They are summed in `areas` of AREA: of a straight product 2, as y holds the sums of a part of the
 * depths, else as many as there are blocks of rows, and one more. */
typedef struct {
    Gemm plain;
    float *areas;
    int64_t num_areas;
    const char *ahead, *results;
    const float *sums;
    int64_t panel, row, left; /* of what is to be put; left: rows from `row` on */
    int64_t prefetch_step, each;       /* bytes of weights and rows at a time */
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
    for (const char *end = w->ahead + w->prefetch_step; w->ahead < end; w->ahead += 64)
        fetch_to_l2(w->ahead);
    for (int64_t i = 0; w->results && i < w->each; i++, w->results += 4 * w->plain.ldy) {
        __builtin_prefetch(w->results, 1);
        __builtin_prefetch(w->results + 64, 1);
    }
}

/* A panel's words [from, to) of all rows [start, end), which stream past them. */
static void many_rows(const Gemm *t, int64_t start, int64_t end, int64_t panel, int64_t from, int64_t to,
                      Work *work) {
    int64_t ldx = converted_width(t->k, AMX) / 2, blocks = (end - start + 2 * AMX_TILE - 1) / (2 * AMX_TILE);
    int straight = is_straight(t), whole = straight && (panel + 1) * NR <= t->m, keep = t->keep || from;
    int is_last = to == padded(t->k, AMX) / 2;
    const word *w = (const word *)(t->w + panel * t->panel_bytes) + from * NR;
    const word *x = (const word *)t->converted_x + start * ldx + from;
    float *y = t->y + start * t->ldy + panel * NR;
    work->each = (2 * AMX_TILE * AMX_TILE + to - from - 1) / (to - from);
    for (int64_t b = 0; b < blocks; b++, x += 2 * AMX_TILE * ldx, y += 2 * AMX_TILE * t->ldy) {
        int64_t row = start + b * 2 * AMX_TILE, rows = end - row < 2 * AMX_TILE ? end - row : 2 * AMX_TILE;
        int in_place = whole && rows == 2 * AMX_TILE;
        float *area = work->areas + (panel * blocks + b) % work->num_areas * AREA;
        if (straight && keep && !in_place) take_sums(t, row, rows, panel, area);
        work->results = whole && row + 4 * AMX_TILE <= end ? (const char *)(y + 2 * AMX_TILE * t->ldy) : NULL;
        amx_rows(rows, to - from, x, ldx, 1, w, NR, in_place ? y : area, in_place ? t->ldy : NR, keep,
                  work_beside, work);
        put_some(work, 2 * AMX_TILE);
        if (!in_place && (straight || is_last))
            work->sums = area, work->panel = panel, work->row = row, work->left = rows;
    }
}

void amx_bf16_task(const Gemm *t, int64_t start, int64_t end, int64_t first, int64_t last,
                const char *ahead) {
    if (end - start <= 2 * AMX_TILE) {
        few_rows(t, start, end, first, last);
        return;
    }
    int straight = is_straight(t);
    int64_t blocks = (end - start + 2 * AMX_TILE - 1) / (2 * AMX_TILE), panels = last - first;
    int64_t depth = padded(t->k, AMX) / 2, parts = (depth + DEPTH - 1) / DEPTH;
    int64_t most = (depth / AMX_TILE + parts - 1) / parts * AMX_TILE;
    Work work = {.plain = *t, .num_areas = parts > 1 && !straight ? blocks + 1 : 2};
    work.plain.keep = 0; /* it has been summed to what was there */
    work.areas = kvr_scratch(SCRATCH_TASK, sizeof(float) * AREA * work.num_areas);
    work.prefetch_step = 4 * NR * AMX_TILE / blocks;
    /* Where y can hold sums, all panels are multiplied with one part of the rows after the other: it stays in L2. */
    int64_t inner = straight ? panels : parts;
    for (int64_t i = 0, panel = first, from = 0; i < panels * parts; i++) {
        int64_t n = i + 1;
        int64_t next_panel = first + (straight ? n % inner : n / inner);
        int64_t next_from = (straight ? n / inner : n % inner) * most;
        const char *next = t->w + next_panel * t->panel_bytes + 4 * NR * next_from;
        work.ahead = n < panels * parts ? next : ahead;
        if (straight && panel == first) put_some(&work, 2 * AMX_TILE); /* it may be taken again */
        many_rows(t, start, end, panel, from, from + most < depth ? from + most : depth, &work);
        panel = next_panel, from = next_from;
    }
    put_some(&work, 2 * AMX_TILE);
}
