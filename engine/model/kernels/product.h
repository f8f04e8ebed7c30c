/* One product with a packed matrix, and the tasks that it is made of. */
#ifndef KVRELAY_PRODUCT_H
#define KVRELAY_PRODUCT_H

#include <stdint.h>

typedef struct {
    const float *x;    /* [n, k], rows `ldx` apart */
    float *y;          /* [n, m], rows `ldy` apart */
    const float *bias; /* [m], or NULL */
    const char *w;     /* packed (linear.h) */
    int64_t n, m, k, ldx, ldy;
    int64_t panel_bytes, group; /* set by product_plan; group: panels of a task of few rows */
    int kind, keep;             /* keep: add to y; there is no bias then */
} Product;

/* The number of tasks. They may run in any order and at once. */
int64_t product_plan(Product *product, int threads);
void product_task(const Product *product, int64_t task);

#endif
