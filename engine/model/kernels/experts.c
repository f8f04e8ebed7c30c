/* Products of a mixture of experts: rows of x that are sorted by expert, each expert's rows times its
 * own matrix. All experts' units are one job, so that threads wait for each other once. */
#include "pool.h"
#include "product.h"

typedef struct {
    const Product *products;
    const int64_t *first; /* unit of each product; then the number of all */
    int64_t num_products;
} Job;

/* The product that a unit of the job is of. */
static int64_t product_of(const Job *job, int64_t unit) {
    int64_t low = 0, high = job->num_products;
    while (high - low > 1) { /* first[low] <= unit < first[high] */
        int64_t middle = (low + high) / 2;
        if (job->first[middle] <= unit)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void expert_unit(void *arg, int64_t unit, int64_t next) {
    const Job *job = arg;
    if (next < 0) next = unit;
    int64_t own = product_of(job, unit), other = product_of(job, next);
    product_unit(job->products + own, unit - job->first[own],
                 product_weights(job->products + other, next - job->first[other]));
}

/* x: [rows, k], y: [rows, m] or, gated, [rows, m / 2], contiguous. Expert e has rows
 * [starts[e], starts[e + 1]) and the e-th of the packed matrices [m, k]. */
void kvr_experts(const float *x, int64_t k, const char *packed, int kind, int64_t m,
                 int activation, const int64_t *starts, int64_t num_experts, float *y,
                 int threads) {
    int64_t ldy = activation ? m / 2 : m;
    int64_t bytes = (m + NR - 1) / NR * bytes_of_panel(k, kind), count = 0, units = 0;
    Product products[num_experts];
    int64_t first[num_experts + 1];
    for (int64_t e = 0; e < num_experts; e++) {
        int64_t row = starts[e], n = starts[e + 1] - row;
        if (n == 0) continue;
        products[count] = (Product){
            x + row * k, y + row * ldy, NULL, packed + e * bytes, n, m, k, k, ldy, .kind = kind};
        products[count].activation = activation;
        first[count] = units;
        units += product_plan(products + count++, threads);
    }
    first[count] = units;
    if (is_narrowed(kind) && units) narrow_inputs(products, count, threads);
    Job job = {products, first, count};
    kvr_share(threads, units, expert_unit, &job);
}
