/* Rows of a step that have an adapter: after the product of all rows with a matrix, each adapter's rows are
 * multiplied with two matrices of few rows and columns. Other rows see nothing of it. */
#include "../norm.h"
#include "../thread_pool.h"
#include "step.h"

#define ROWS 32 /* of an adapter, that one thread takes at once */

typedef struct {
    const Step *step;
    const Gemm *product;
    float *y; /* [.., ldy], from row `from` on */
    int64_t from, ldy;
} Adapted;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The n rows from `first` on. */
static void add_rows(const Adapted *t, const LowRank *of, int64_t first, int64_t n) {
    const Gemm *p = t->product;
    int64_t rank = of->down.rows;
    float *low = kvr_scratch(SCRATCH_LOW_RANK, sizeof(float) * n * (rank + p->k));
    Gemm down = {p->x + first * p->ldx, low, NULL, of->down.packed, n, rank, p->k, p->ldx, rank};
    down.kind = (int)of->down.kind;
    if (p->converted_x && p->kind == down.kind && !p->x_scales) {
        down.converted_x = p->converted_x + first * converted_width(p->k, p->kind);
    } else if (is_low_precision(down.kind)) {
        down.norm = p->norm, down.eps = p->eps;
    } else if (p->norm) {
        float *normed = low + n * rank;
        for (int64_t r = 0; r < n; r++)
            normalise(down.x + r * p->ldx, p->norm, normed + r * p->k, p->k, p->eps);
        down.x = normed, down.ldx = p->k;
    }
    gemm_run(&down, 1);
    Gemm up = {low, t->y + (first - t->from) * t->ldy, NULL, of->up.packed, n, of->up.rows, rank, rank, t->ldy};
    up.kind = (int)of->up.kind, up.keep = 1;
    gemm_run(&up, 1);
}

/* A thread takes some rows of one adapter. */
static void add_some(void *arg, int64_t task) {
    const Adapted *t = arg;
    const Step *s = t->step;
    for (const AdaptedRows *a = s->adapted; a < s->adapted + s->num_adapted; a++) {
        int64_t tasks = (a->rows + ROWS - 1) / ROWS, begin = a->first - s->at + task * ROWS;
        int64_t end = least(least(begin + ROWS, a->first - s->at + a->rows), t->product->n);
        if (task >= tasks) {
            task -= tasks;
            continue;
        }
        if (begin < 0) begin = 0;
        const LowRank *of = a->of + t->product->number;
        if (begin < end && t->product->number < a->count && of->down.packed) add_rows(t, of, begin, end - begin);
        return;
    }
}

/* y += what adapters add to the product. */
static void add_low_rank(const Step *s, const Gemm *product, int64_t from, float *y, int64_t ldy) {
    Adapted t = {s, product, y, from, ldy};
    int64_t tasks = 0;
    for (const AdaptedRows *a = s->adapted; a < s->adapted + s->num_adapted; a++)
        tasks += (a->rows + ROWS - 1) / ROWS;
    kvr_parallel(s->threads, tasks, add_some, &t);
}

void kvr_run_adapted(const Step *s, Gemm *t) {
    int64_t from = s->num_adapted && s->adapted->first > s->at ? s->adapted->first - s->at : 0;
    if (!s->num_adapted || from >= t->n) {
        gemm_run(t, s->threads);
        return;
    }
    if (t->activation) {
        int64_t width = num_panels(t) * NR, bytes = sizeof(float) * (t->n - from) * width;
        float *added = kvr_scratch(SCRATCH_ADDED, bytes);
        memset(added, 0, bytes);
        add_low_rank(s, t, from, added, width);
        t->added = added, t->added_from = from;
    }
    gemm_run(t, s->threads);
    if (!t->activation) add_low_rank(s, t, 0, t->y, t->ldy);
}
