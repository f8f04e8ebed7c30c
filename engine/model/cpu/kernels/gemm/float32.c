/* y = x @ W^T (+ bias), float32 arithmetic over packed weights (layout.h; inputs that are rounded: low_precision.c).
 *
 * Few rows of x: reading W is what takes time. Panels are widened in registers, and while one is
 * multiplied the next is fetched. Many rows: arithmetic is. Panels are widened once for a chunk of
 * rows, some depths at a time, into a copy that stays in the L1 cache. Either way a result is summed
 * from the first depth to the last and only then added to what it starts from, so it does not depend
 * on how many rows there are. */
#include "../thread_pool.h"
#include "gemm.h"

#define GROUP 4  /* panels of a task of many rows */
#define DEPTH 320 /* depths of a panel that are widened at a time, at most */
#define CHUNK (MR * 32) /* rows of x of one task: widening is paid once per chunk */
#define SMALL (6 * MR) /* up to so many rows of x are few */

/* One depth of panels at `w` into `acc`. */
INLINE void sum_one(const Gemm *t, int rows, int panels, int kind, const float *x,
                    const char *w, vf acc[MR][4][2]) {
    UNROLL for (int p = 0; p < panels; p++) {
        vf low, high;
        widen(w + p * t->panel_bytes, kind, 0, &low, &high);
        UNROLL for (int r = 0; r < rows; r++) {
            vf left = splat(x[r * t->ldx]);
            acc[r][p][0] += left * low;
            acc[r][p][1] += left * high;
        }
    }
}

/* Or GCC takes a register for each place of x that two depths use, and has none left. */
#define KEEP_POINTER(pointer) __asm__("" : "+r"(pointer))

/* `panels` panels from `first` on, `rows` rows of x from `row` on; both counts are constants. Few
 * rows take several panels at once, so that enough independent sums are in flight. `ahead`: what to
 * prefetch meanwhile, `prefetch_step` bytes for every two depths. */
INLINE void few_rows_tile(const Gemm *t, int rows, int panels, int kind, int64_t row,
                        int64_t first, const char *ahead, int64_t prefetch_step) {
    const float *x = t->x + row * t->ldx;
    const char *w = t->w + first * t->panel_bytes;
    const int depth_bytes = NR * (kind == BF16 ? 2 : 4);
    vf acc[MR][4][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) acc[r][p][0] = acc[r][p][1] = splat(0);
    for (int64_t d = 0; d + 2 <= t->k; d += 2, ahead += prefetch_step) {
        __builtin_prefetch(ahead);
        UNROLL for (int i = 0; i < 2; i++, x++, w += depth_bytes) {
            sum_one(t, rows, panels, kind, x, w, acc);
            KEEP_POINTER(x);
        }
    }
    if (t->k & 1) sum_one(t, rows, panels, kind, x, w, acc);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++)
            put(t, row + r, first + p, acc[r][p]);
}

#define AT_ONCE(R) ((R) == 1 ? 4 : (R) == 2 ? 2 : 1) /* panels */

/* Each of its own, so that what its loop needs stays in registers. */
typedef void Narrow(const Gemm *t, int64_t row, int64_t first, const char *ahead, int64_t prefetch_step);
#define NARROW(R, KIND, PANELS, NAME) \
    static __attribute__((noinline)) void NAME##_##KIND##_##R( \
        const Gemm *t, int64_t row, int64_t first, const char *ahead, int64_t prefetch_step) { \
        few_rows_tile(t, R, PANELS, KIND, row, first, ahead, prefetch_step); \
    }
#define TILE(R) NARROW(R, FLOAT32, 1, one) NARROW(R, BF16, 1, one)
EACH_ROWS(TILE)
#undef TILE
NARROW(1, FLOAT32, AT_ONCE(1), many) NARROW(1, BF16, AT_ONCE(1), many)
NARROW(2, FLOAT32, AT_ONCE(2), many) NARROW(2, BF16, AT_ONCE(2), many)
#undef NARROW
#define TILE(R) {one_FLOAT32_##R, one_BF16_##R},
static Narrow *const ones[MR][2] = {EACH_ROWS(TILE)};
#undef TILE
static Narrow *const manys[2][2] = {{many_FLOAT32_1, many_BF16_1}, {many_FLOAT32_2, many_BF16_2}};

/* Panels [first, last), all at once or one after the other, each times all rows. */
static void few_rows_panels(const Gemm *t, int64_t first, int64_t last, const char *ahead) {
    int64_t tiles = (t->n + MR - 1) / MR, count = last - first == t->group ? t->group : 1;
    int64_t share = t->panel_bytes / tiles, prefetch_step = 2 * share / t->k;
    for (int64_t p = first; p < last; p += count) {
        const char *next = p + count < last ? t->w + (p + count) * t->panel_bytes : ahead;
        int64_t row = 0;
        for (int64_t left = tiles; left > 0; left--, next += share) {
            int64_t rows = (t->n - row + left - 1) / left;
            (count > 1 ? manys : ones)[rows - 1][t->kind](t, row, p, next, prefetch_step);
            row += rows;
        }
    }
}

/* sums[rows, NR] = (more ? sums : 0) + x[rows, depth] @ b[depth, NR], of up to MR rows. */
static void full_tile(int64_t rows, int64_t depth, const float *x, int64_t ldx, const float *b,
                      float *sums, int more) {
#define TILE(R) \
    case R: micro(R, 2, depth, x, ldx, 1, b, NR, sums, NR, more, NULL, NULL, 0); break;
    switch (rows) { EACH_ROWS(TILE) }
#undef TILE
}

/* Depths [from, from + depth) of a panel as float32 [depth, NR]. */
INLINE void widen_as(const char *panel, int kind, int64_t from, int64_t depth, float *to) {
    panel += depth_at(from, kind);
    for (int64_t d = 0; d < depth; d++, to += NR) {
        vf low, high;
        widen(panel + depth_at(d, kind), kind, 0, &low, &high);
        store(to, low);
        store(to + VL, high);
    }
}

static void widen_panel(const Gemm *t, int64_t panel, int64_t from, int64_t depth, float *to) {
    const char *at = t->w + panel * t->panel_bytes;
    if (t->kind == BF16)
        widen_as(at, BF16, from, depth, to);
    else
        widen_as(at, FLOAT32, from, depth, to);
}

/* Rows [start, end) times one panel, of which `depth` depths from `from` on are widened in `b`.
 * `sums` [end - start, NR] hold what those before have come to. */
static void many_rows_tiles(const Gemm *t, int64_t start, int64_t end, int64_t panel, int64_t from,
                       int64_t depth, const float *b, float *sums) {
    for (int64_t row = start, rows; row < end; row += rows, sums += rows * NR) {
        rows = even_rows(end - row);
        full_tile(rows, depth, t->x + row * t->ldx + from, t->ldx, b, sums, from > 0);
        if (from + depth < t->k) continue;
        for (int64_t r = 0; r < rows; r++) {
            vf sum[2] = {load(sums + r * NR), load(sums + r * NR + VL)};
            put(t, row + r, panel, sum);
        }
    }
}

/* A chunk of rows times a group of panels. */
static void many_rows_task(const Gemm *t, int64_t task) {
    int64_t panels = num_panels(t), chunks = num_chunks(t);
    int64_t first = task / chunks * GROUP, start = task % chunks * CHUNK;
    int64_t last = first + GROUP < panels ? first + GROUP : panels;
    int64_t end = start + CHUNK < t->n ? start + CHUNK : t->n;
    int64_t parts = (t->k + DEPTH - 1) / DEPTH, most = (t->k + parts - 1) / parts;
    float *copy = kvr_scratch(SCRATCH_TASK, sizeof(float) * NR * (DEPTH + GROUP * CHUNK));
    for (int64_t from = 0, depth; from < t->k; from += depth) {
        depth = t->k - from < most ? t->k - from : most;
        float *sums = copy + NR * DEPTH;
        for (int64_t p = first; p < last; p++, sums += NR * CHUNK) {
            widen_panel(t, p, from, depth, copy);
            many_rows_tiles(t, start, end, p, from, depth, copy, sums);
        }
    }
}

int64_t gemm_plan(Gemm *t, int threads) {
    t->panel_bytes = bytes_of_panel(t->k, t->kind);
    if (t->n == 0) return 0; /* a step of which nothing is sampled has no logits */
    t->chunk = t->n > SMALL ? CHUNK : t->n;
    t->group = t->n > SMALL ? GROUP : AT_ONCE(t->n);
    if (is_low_precision(t->kind)) low_precision_plan(t, threads);
    return (num_panels(t) + t->group - 1) / t->group * num_chunks(t);
}

const char *gemm_task_weights(const Gemm *t, int64_t task) {
    return t->w + task / num_chunks(t) * t->group * t->panel_bytes;
}

void gemm_task(const Gemm *t, int64_t task, const char *ahead) {
    int64_t panels = num_panels(t), first = task * t->group;
    if (is_low_precision(t->kind))
        low_precision_task(t, task, ahead);
    else if (t->n > SMALL)
        many_rows_task(t, task);
    else
        few_rows_panels(t, first, first + t->group < panels ? first + t->group : panels, ahead);
}

static void run_task(void *product, int64_t task, int64_t next) {
    gemm_task(product, task, gemm_task_weights(product, next < 0 ? task : next));
}

void gemm_run(Gemm *t, int threads) {
    if (is_low_precision(t->kind) && !t->converted_x) convert_inputs(t, 1, threads);
    kvr_parallel_ranges(threads, gemm_plan(t, threads), run_task, t);
}

/* x: [n, k], y: [n, m], float32 with rows `ldx` and `ldy` apart; keep: add to y instead of setting
 * it, without a bias then. Of a gated matrix, with its activation, y is [n, m / 2]. */
void kvr_linear(const float *x, int64_t n, int64_t ldx, int64_t k, const void *packed, int kind,
                int64_t m, const float *bias, float *y, int64_t ldy, int keep, int activation,
                const float *added, int threads) {
    Gemm t = {x, y, bias, packed, n, m, k, ldx, ldy, .kind = kind, .keep = keep};
    t.activation = activation, t.added = added;
    gemm_run(&t, threads);
}
