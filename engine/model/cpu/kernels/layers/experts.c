/* Products by many matrices at once: of a mixture of experts, and of heads.
 *
 * A mixture of experts: a router chooses some for each token, rows are sorted by expert, each expert's rows
 * are multiplied by its own matrices, and every token's results are added up in the order of its choices,
 * whoever else is in the batch. Each expert is read once; the tasks of all experts are one job, so that threads
 * wait for each other once. */
#include "../gemm/gemm.h"
#include "../thread_pool.h"
#include "api.h"

#define ROWS 16 /* of one task, where each is handled alone */

/* x: [rows, k], y: [rows, m] or, gated, [rows, m / 2], contiguous. Expert e has rows
 * [starts[e], starts[e + 1]) and the e-th of the packed matrices [m, k]. */
static void run_experts(const float *x, int64_t k, const char *packed, int kind, int64_t m, int activation,
                        const int64_t *starts, int64_t num_experts, float *y, int threads) {
    int64_t ldy = activation ? m / 2 : m;
    int64_t bytes = (m + NR - 1) / NR * bytes_of_panel(k, kind), count = 0;
    Gemm gemms[num_experts];
    for (int64_t e = 0; e < num_experts; e++) {
        int64_t row = starts[e], n = starts[e + 1] - row;
        if (n == 0) continue;
        gemms[count] = (Gemm){
            x + row * k, y + row * ldy, NULL, packed + e * bytes, n, m, k, k, ldy, .kind = kind};
        gemms[count++].activation = activation;
    }
    gemm_run_grouped(gemms, count, threads);
}

/* Rows that are routed to experts; `at`: a choice's row among those that are sorted. */
typedef struct {
    const Experts *experts;
    const float *x;
    float *hidden, *logits, *weights, *sorted, *gated, *down;
    int64_t *chosen, *at, rows, width;
} Routed;

static void softmax(float *x, int64_t count) {
    float top = x[0], sum = 0;
    for (int64_t i = 1; i < count; i++) top = x[i] > top ? x[i] : top;
    for (int64_t i = 0; i < count; i++) sum += x[i] = expf(x[i] - top);
    for (int64_t i = 0; i < count; i++) x[i] /= sum;
}

/* The first of the largest, which is not found again. */
static int64_t take_best(float *ranked, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
        if (ranked[i] > ranked[best]) best = i;
    ranked[best] = -INFINITY;
    return best;
}

/* Only the best groups are chosen from: ranked by their best expert or, where choices are corrected, by their
 * two best. */
static void mask_groups(const Experts *e, float *ranked) {
    int64_t size = e->count / e->groups;
    float best[e->groups];
    for (int64_t g = 0; g < e->groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (float *r = ranked + g * size; r < ranked + (g + 1) * size; r++) {
            if (*r > first)
                second = first, first = *r;
            else if (*r > second)
                second = *r;
        }
        best[g] = e->bias ? first + second : first;
    }
    for (int64_t g = 0; g < e->chosen_groups; g++) take_best(best, e->groups);
    for (int64_t i = 0; i < e->count; i++)
        if (best[i / size] != -INFINITY) ranked[i] = -INFINITY;
}

/* As engine/model/experts.py: logits [count] become scores. */
static void route(const Experts *e, float *logits, int64_t *chosen, float *weights) {
    float ranked[e->count], sum = 0;
    if (e->sigmoid)
        for (int64_t i = 0; i < e->count; i++) logits[i] = (float)(1 / (1 + exp(-(double)logits[i])));
    else
        softmax(logits, e->count);
    for (int64_t i = 0; i < e->count; i++) ranked[i] = logits[i] + (e->bias ? e->bias[i] : 0);
    if (e->chosen_groups < e->groups) mask_groups(e, ranked);
    for (int64_t i = 0; i < e->per_token; i++) {
        chosen[i] = take_best(ranked, e->count);
        sum += weights[i] = logits[chosen[i]];
    }
    for (int64_t i = 0; i < e->per_token; i++)
        weights[i] = (e->normalize ? weights[i] / (sum + 1e-20f) : weights[i]) *
                     (e->scales ? e->scales[chosen[i]] : e->scale);
}

static void route_rows(void *arg, int64_t task) {
    const Routed *t = arg;
    const Experts *e = t->experts;
    for (int64_t r = task * ROWS; r < (task + 1) * ROWS && r < t->rows; r++)
        route(e, t->logits + r * e->count, t->chosen + r * e->per_token, t->weights + r * e->per_token);
}

static void sort_rows(void *arg, int64_t task) {
    const Routed *t = arg;
    int64_t each = t->experts->per_token, end = (task + 1) * ROWS < t->rows ? (task + 1) * ROWS : t->rows;
    for (int64_t i = task * ROWS * each; i < end * each; i++) {
        float *row = t->sorted + t->at[i] * t->width;
        memcpy(row, t->x + i / each * t->width, sizeof(float) * t->width);
        if (!t->experts->scales_inputs) continue;
        for (int64_t d = 0; d < t->width; d++) row[d] *= t->weights[i];
        t->weights[i] = 1;
    }
}

static void add_rows(void *arg, int64_t task) {
    const Routed *t = arg;
    int64_t each = t->experts->per_token, width = t->width;
    for (int64_t r = task * ROWS; r < (task + 1) * ROWS && r < t->rows; r++) {
        const int64_t *at = t->at + r * each;
        const float *weights = t->weights + r * each;
        float *sum = t->down + at[0] * width, *hidden = t->hidden + r * width;
        for (int64_t d = 0; d < width; d++) sum[d] *= weights[0];
        for (int64_t i = 1; i < each; i++)
            for (int64_t d = 0; d < width; d++) sum[d] += weights[i] * t->down[at[i] * width + d];
        for (int64_t d = 0; d < width; d++) hidden[d] += sum[d];
    }
}

typedef struct {
    float *x;
    int64_t rows, width;
} Rows;

static void square_rows(void *arg, int64_t task) {
    const Rows *t = arg;
    int64_t end = (task + 1) * ROWS < t->rows ? (task + 1) * ROWS : t->rows;
    for (int64_t i = task * ROWS * t->width; i < end * t->width; i++)
        t->x[i] = t->x[i] > 0 ? t->x[i] * t->x[i] : 0;
}

void kvr_squared_relu(float *x, int64_t rows, int64_t width, int threads) {
    Rows t = {x, rows, width};
    kvr_parallel(threads, (rows + ROWS - 1) / ROWS, square_rows, &t);
}

/* x, routed, hidden: [rows, width]; what the experts make of x is added to hidden. */
void kvr_add_experts(const Experts *e, const float *x, const float *routed_by, float *hidden, int64_t rows,
                     int64_t width, int activation, int threads) {
    int64_t routed = rows * e->per_token, tasks = (rows + ROWS - 1) / ROWS, starts[e->count + 1];
    int64_t floats = rows * e->count + routed * (1 + 2 * width + e->width);
    Routed t = {.experts = e, .x = x, .hidden = hidden, .rows = rows, .width = width};
    t.chosen = kvr_scratch(SCRATCH_EXPERTS, 2 * sizeof(int64_t) * routed + sizeof(float) * floats);
    t.at = t.chosen + routed;
    t.logits = (float *)(t.at + routed);
    t.weights = t.logits + rows * e->count;
    t.sorted = t.weights + routed;
    t.gated = t.sorted + routed * width;
    t.down = t.gated + routed * e->width;
    Gemm router = {routed_by, t.logits, NULL, e->router.packed, rows, e->count, width, width, e->count};
    router.kind = (int)e->router.kind;
    gemm_run(&router, threads);
    kvr_parallel(threads, tasks, route_rows, &t);
    memset(starts, 0, sizeof starts);
    for (int64_t i = 0; i < routed; i++) starts[t.chosen[i] + 1]++;
    for (int64_t i = 0; i < e->count; i++) starts[i + 1] += starts[i];
    for (int64_t i = 0; i < routed; i++) t.at[i] = starts[t.chosen[i]]++;
    memmove(starts + 1, starts, sizeof(int64_t) * e->count); /* each had become the next one's */
    starts[0] = 0;
    kvr_parallel(threads, tasks, sort_rows, &t);
    int kind = (int)e->kind;
    int has_gate = activation != SQUARED_RELU;
    run_experts(t.sorted, width, e->gate_ups, kind, (1 + has_gate) * e->width, has_gate ? activation : 0,
                starts, e->count, t.gated, threads);
    if (!has_gate) kvr_squared_relu(t.gated, routed, e->width, threads);
    run_experts(t.gated, e->width, e->downs, kind, width, 0, starts, e->count, t.down, threads);
    kvr_parallel(threads, tasks, add_rows, &t);
}

