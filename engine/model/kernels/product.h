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
    int64_t panel_bytes, group; /* set by product_plan; group: how tasks are cut (there) */
    int kind, keep;             /* keep: add to y; there is no bias then */
    /* Of INT8 alone. Set by int8_inputs: x as [n, even(k)] in units [n, groups]. */
    const int16_t *numbers;
    const float *units;
    int64_t chunk; /* set by product_plan: rows of a task */
} Product;

/* The number of tasks. They may run in any order and at once. */
int64_t product_plan(Product *product, int threads);
void product_task(const Product *product, int64_t task);

/* The same for INT8. Its inputs have to be quantized before the first task runs: rows of all
 * `products`, which lie one after the other, into memory of the calling thread that holds until it
 * asks for scratch again. Tasks of INT8 do not. */
void int8_inputs(Product *products, int64_t count, int threads);
int64_t int8_plan(Product *product, int threads);
void int8_task(const Product *product, int64_t task);

#endif
