/* Rows of a step that have terms, an adapter's: beside the product of all rows with a matrix, they are
 * multiplied with two matrices of few rows and columns. Other rows see nothing of it.
 *
 * Weights are read from memory in most steps, so none is stored that is known to be zero: of a stacked matrix
 * (queries, keys and values; gate and up) each VL outputs read the ranks of their own part only. Words are
 * floats, or pairs of bfloat16 numbers of two depths or ranks. */
#include "../norm.h"
#include "../thread_pool.h"
#include "step.h"

#define ROWS 32 /* with the same terms, that one thread takes at once */
#define CHAINS 4 /* sums of one result: as many as keep a core busy with one row */
#define AHEAD (2 << 10) /* bytes: how far ahead weights are fetched */

#if VL == 16
#define TILE 6 /* rows: TILE * CHAINS sums fit the registers */
#define EACH_TILE(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#else
#define TILE 3
#define EACH_TILE(CASE) CASE(1) CASE(2) CASE(3)
#endif

INLINE vf add_words(vf sum, vu w, word x, int pairs) {
    vu all = x - (vu){0};
    return pairs ? add_bf16_pairs(sum, w, all) : sum + (vf)w * (vf)all;
}

/* sums[rows] = x [rows, depth] @ w [depth, VL]; `rows` and `pairs` are constants. */
INLINE void tile(int rows, int pairs, const word *x, int64_t ldx, const word *w, int64_t depth, vf *sums) {
    vf acc[TILE][CHAINS];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < CHAINS; c++) acc[r][c] = splat(0);
    for (; depth >= CHAINS; depth -= CHAINS, x += CHAINS, w += CHAINS * VL)
        UNROLL for (int c = 0; c < CHAINS; c++) {
            vu right = *(const vuu *)(w + c * VL);
            __builtin_prefetch((const char *)(w + c * VL) + AHEAD);
            UNROLL for (int r = 0; r < rows; r++) acc[r][c] = add_words(acc[r][c], right, x[r * ldx + c], pairs);
        }
    UNROLL for (int c = 0; c < CHAINS - 1; c++) {
        if (c >= depth) break;
        vu right = *(const vuu *)(w + c * VL);
        UNROLL for (int r = 0; r < rows; r++) acc[r][c] = add_words(acc[r][c], right, x[r * ldx + c], pairs);
    }
    UNROLL for (int r = 0; r < rows; r++) sums[r] = (acc[r][0] + acc[r][1]) + (acc[r][2] + acc[r][3]);
}

static void multiply(int64_t rows, int pairs, const word *x, int64_t ldx, const word *w, int64_t depth, vf *sums) {
    for (int64_t count; rows > 0; rows -= count, x += count * ldx, sums += count) {
        count = rows < TILE ? rows : TILE;
#define CASE(R) \
    case R: pairs ? tile(R, 1, x, ldx, w, depth, sums) : tile(R, 0, x, ldx, w, depth, sums); break;
        switch (count) { EACH_TILE(CASE) }
#undef CASE
    }
}

/* Rows with the same term. x and what it was converted to are as of a Gemm; y [rows, ldy]. */
typedef struct {
    const Term *of;
    const float *x, *norm;
    float eps;
    const int16_t *converted_x; /* to bfloat16, or NULL */
    float *y;
    int64_t n, ldx, converted_ldx, ldy;
    int keep; /* add to y instead of setting it */
} Rows;

/* The inputs as words, made in `made` where they are not there; returns how far apart rows are. */
static int64_t words_of(const Rows *t, const word **x, float *made) {
    int64_t k = t->of->depth, width = even(k);
    int pairs = t->of->pairs;
    *x = (const word *)t->converted_x;
    if (pairs && *x) return t->converted_ldx / 2;
    *x = (const word *)t->x;
    if (!pairs && !t->norm) return t->ldx;
    *x = (const word *)made;
    float normed[k];
    for (int64_t r = 0; r < t->n; r++, made += pairs ? width / 2 : k) {
        const float *from = t->x + r * t->ldx;
        float *to = pairs ? normed : made;
        if (t->norm) normalise(from, t->norm, to, k, t->eps), from = to;
        if (pairs) bf16_row(from, k, width, (int16_t *)made);
    }
    return pairs ? width / 2 : k;
}

/* Up to ROWS rows. */
static void add_rows(const Rows *t) {
    const Term *of = t->of;
    int64_t ranks = of->ranks, depth = of->pairs ? even(of->depth) / 2 : of->depth;
    float *made = kvr_scratch(SCRATCH_LOW_RANK, sizeof(float) * t->n * (ranks + of->depth + 1));
    float *low = made + t->n * (of->depth + 1);
    vf sums[ROWS];
    const word *x, *w = of->weights;
    int64_t ldx = words_of(t, &x, made), ldlow = of->pairs ? ranks / 2 : ranks;
    for (int64_t first = 0; first < ranks; first += VL, w += depth * VL) {
        multiply(t->n, of->pairs, x, ldx, w, depth, sums);
        for (int64_t r = 0; r < t->n; r++) {
            float *to = low + r * ldlow;
            if (of->pairs)
                *(vhu *)((uint16_t *)to + first) = round_bf16_fast(sums[r]);
            else
                store(to + first, sums[r]);
        }
    }
    const int64_t *span = of->spans;
    for (int64_t first = 0; first < of->rows; first += VL, w += span[1] * VL, span += 2) {
        int64_t left = of->rows - first;
        multiply(t->n, of->pairs, (const word *)low + span[0], ldlow, w, span[1], sums);
        for (int64_t r = 0; r < t->n; r++) {
            float *y = t->y + r * t->ldy + first;
            if (left >= VL)
                store(y, t->keep ? load(y) + sums[r] : sums[r]);
            else
                for (int64_t j = 0; j < left; j++) y[j] = sums[r][j] + (t->keep ? y[j] : 0);
        }
    }
}

static void rows_task(void *arg, int64_t task) {
    Rows t = *(const Rows *)arg;
    int64_t first = task * ROWS;
    t.x += first * t.ldx, t.y += first * t.ldy, t.n = t.n - first < ROWS ? t.n - first : ROWS;
    add_rows(&t);
}

void kvr_add_term(const Term *of, const float *x, int64_t n, int64_t ldx, float *y, int64_t ldy, int threads) {
    Rows t = {of, x, .y = y, .n = n, .ldx = ldx, .ldy = ldy, .keep = 1};
    kvr_parallel(threads, (n + ROWS - 1) / ROWS, rows_task, &t);
}

typedef struct {
    const Step *step;
    const Gemm *product;
    float *y; /* [.., ldy], from row `from` on */
    int64_t from, ldy;
    int keep;
} Adding;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int has_bf16(const Gemm *p) { return p->kind == BF16_PAIRS || p->kind == AMX; }

/* A thread takes some rows with the same terms. */
static void add_some(void *arg, int64_t task) {
    const Adding *t = arg;
    const Gemm *p = t->product;
    const Step *s = t->step;
    const TermRows *a = s->terms;
    for (int64_t tasks; task >= (tasks = (a->rows + ROWS - 1) / ROWS); a++) task -= tasks;
    int64_t begin = a->first - s->at + task * ROWS, end = least(least(begin + ROWS, a->first - s->at + a->rows), p->n);
    if (begin < 0) begin = 0;
    if (begin >= end) return;
    const Term *of = a->of + p->number;
    Rows rows = {of, p->x + begin * p->ldx, p->norm, p->eps, .n = end - begin, .ldx = p->ldx, .keep = t->keep};
    rows.y = t->y + (begin - t->from) * t->ldy, rows.ldy = t->ldy;
    if (has_bf16(p) && p->converted_x) {
        rows.converted_ldx = converted_width(p->k, p->kind);
        rows.converted_x = p->converted_x + begin * rows.converted_ldx;
    }
    if (p->number < a->count && of->ranks)
        add_rows(&rows);
    else if (!t->keep)
        memset(rows.y, 0, sizeof(float) * rows.n * t->ldy);
}

/* What terms add to the product, to y or instead of it. */
static void add_terms(const Step *s, const Gemm *product, int64_t from, float *y, int64_t ldy, int keep) {
    Adding t = {s, product, y, from, ldy, keep};
    int64_t tasks = 0;
    for (const TermRows *a = s->terms; a < s->terms + s->num_terms; a++)
        tasks += (a->rows + ROWS - 1) / ROWS;
    kvr_parallel(s->threads, tasks, add_some, &t);
}

void kvr_run_with_terms(const Step *s, Gemm *t) {
    int64_t from = s->num_terms && s->terms->first > s->at ? s->terms->first - s->at : 0;
    if (!s->num_terms || from >= t->n) {
        gemm_run(t, s->threads);
        return;
    }
    if (t->activation) {
        int64_t width = num_panels(t) * NR;
        float *added = kvr_scratch(SCRATCH_ADDED, sizeof(float) * (t->n - from) * width);
        if (has_bf16(t) && !t->converted_x) convert_inputs(t, 1, s->threads);
        add_terms(s, t, from, added, width, 0);
        t->added = added, t->added_from = from;
    }
    gemm_run(t, s->threads);
    if (!t->activation) add_terms(s, t, 0, t->y, t->ldy, 1);
}
