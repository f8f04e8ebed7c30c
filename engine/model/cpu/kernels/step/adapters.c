/* Rows of a step that have an adapter: after the product of all rows with a matrix, each adapter's rows are
 * multiplied with two matrices of few rows and columns. Other rows see nothing of it. */
#include "../thread_pool.h"
#include "step.h"

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* y [rows, ldy] += what adapters add to product `t`, of its rows from `from` on. */
static void add_low_rank(const Step *s, const Gemm *t, int64_t from, float *y, int64_t ldy) {
    for (const AdaptedRows *a = s->adapted; a < s->adapted + s->num_adapted; a++) {
        int64_t first = a->first > s->at ? a->first - s->at : 0;
        int64_t n = least(a->first + a->rows - s->at, t->n) - first;
        const LowRank *of = a->of + t->number;
        if (n <= 0 || t->number >= a->count || !of->down.packed) continue;
        int64_t rank = of->down.rows;
        float *low = kvr_scratch(SCRATCH_LOW_RANK, sizeof(float) * n * (rank + t->k));
        Gemm down = {t->x + first * t->ldx, low, NULL, of->down.packed, n, rank, t->k, t->ldx, rank};
        down.kind = (int)of->down.kind;
        if (t->converted_x && t->kind == down.kind && !t->x_scales)
            down.converted_x = t->converted_x + first * converted_width(t->k, t->kind);
        else if (is_low_precision(down.kind))
            down.norm = t->norm, down.eps = t->eps;
        else if (t->norm) {
            float *normed = low + n * rank;
            kvr_rms_norm(down.x, t->ldx, t->norm, normed, n, t->k, t->eps, s->threads);
            down.x = normed, down.ldx = t->k;
        }
        gemm_run(&down, s->threads);
        Gemm up = {low, y + (first - from) * ldy, NULL, of->up.packed, n, of->up.rows, rank, rank, ldy};
        up.kind = (int)of->up.kind, up.keep = 1;
        gemm_run(&up, s->threads);
    }
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
