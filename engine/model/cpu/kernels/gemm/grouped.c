/* Grouped GEMM: the tasks of several products are one job, so that threads wait for each other once. */
#include "../thread_pool.h"
#include "gemm.h"

typedef struct {
    const Gemm *gemms;
    const int64_t *first; /* task of each product; then the number of all */
    int64_t num_gemms;
} Job;

/* The product that a task of the job is of. */
static int64_t index_of(const Job *job, int64_t task) {
    int64_t low = 0, high = job->num_gemms;
    while (high - low > 1) { /* first[low] <= task < first[high] */
        int64_t middle = (low + high) / 2;
        if (job->first[middle] <= task)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void run_task(void *arg, int64_t task, int64_t next) {
    const Job *job = arg;
    if (next < 0) next = task;
    int64_t own = index_of(job, task), other = index_of(job, next);
    gemm_task(job->gemms + own, task - job->first[own],
                 gemm_task_weights(job->gemms + other, next - job->first[other]));
}

void gemm_run_grouped(Gemm *gemms, int64_t count, int threads) {
    int64_t first[count + 1], tasks = 0;
    for (int64_t i = 0; i < count; i++) {
        first[i] = tasks;
        tasks += gemm_plan(gemms + i, threads);
    }
    first[count] = tasks;
    if (!tasks) return;
    if (is_low_precision(gemms->kind)) convert_inputs(gemms, count, threads);
    Job job = {gemms, first, count};
    kvr_parallel_ranges(threads, tasks, run_task, &job);
}

void kvr_heads(const float *x, int64_t ldx, int64_t x_step, const char *packed, int kind, int64_t k, int64_t m,
               int64_t heads, int64_t rows, float *y, int64_t ldy, int64_t y_step, int threads) {
    int64_t bytes = (m + NR - 1) / NR * bytes_of_panel(k, kind);
    Gemm gemms[heads];
    for (int64_t h = 0; h < heads; h++)
        gemms[h] = (Gemm){
            x + h * x_step, y + h * y_step, NULL, packed + h * bytes, rows, m, k, ldx, ldy, .kind = kind};
    gemm_run_grouped(gemms, heads, threads);
}
