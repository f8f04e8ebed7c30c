/* Products whose inputs are narrowed first (INT8, PAIRS): how they are cut into tasks. A tile sums all
 * depths of its rows in registers, so a row's result is the same whatever other rows there are. */
#include "pool.h"
#include "product.h"

#define NUMBERS 8192 /* narrowed by one task, about */
#define SHARES 3 /* a task takes a part of the panels left: one in SHARES of a thread's */
#define MOST 64  /* panels of a task */
#define CHUNK_BYTES (192 << 10) /* of narrowed rows of a task: they stay in the L2 cache */

/* Rows [start, end) of a panel, and meanwhile the next one is fetched. */
static void panel_rows(const Product *t, int64_t start, int64_t end, int64_t panel,
                       const char *next) {
    Tile *const *tiles = t->kind == INT8 ? int8_tiles : pairs_tiles;
    int64_t share = t->panel_bytes / ((end - start + MR - 1) / MR);
    int64_t pace = 4 * NR * share / t->panel_bytes;
    for (int64_t row = start, rows; row < end; row += rows, next += share) {
        rows = even_rows(end - row);
        tiles[rows - 1](t, row, panel, next, pace);
    }
}

/* One row times MANY panels: several streams of memory at once. */
static void many_panels(const Product *t, int64_t row, int64_t panel, const char *next) {
    (t->kind == INT8 ? int8_many : pairs_many)(t, row, panel, next, 4 * NR * MANY);
}

/* How many of the `left` panels the next task takes: ever fewer, so that threads end together. */
static int64_t next_panels(const Product *t, int64_t left) {
    int64_t unit = t->n == 1 ? MANY : 1, size = left / t->group / unit * unit;
    size = size < unit ? unit : size > MOST ? MOST : size;
    return size < left ? size : left;
}

int64_t narrowed_plan(Product *t, int threads) {
    int64_t left = (t->m + NR - 1) / NR, tasks = 0, chunk = CHUNK_BYTES / (2 * t->k) / MR * MR;
    t->chunk = chunk < 4 * MR ? 4 * MR : chunk;
    t->group = SHARES * threads;
    for (; left > 0; tasks++) left -= next_panels(t, left);
    return tasks * ((t->n + t->chunk - 1) / t->chunk);
}

/* All chunks of rows times the same panels follow one another. */
void narrowed_task(const Product *t, int64_t task) {
    int64_t chunks = (t->n + t->chunk - 1) / t->chunk, start = task % chunks * t->chunk;
    int64_t end = start + t->chunk < t->n ? start + t->chunk : t->n;
    int64_t panels = (t->m + NR - 1) / NR, first = 0;
    for (task /= chunks; task > 0; task--) first += next_panels(t, panels - first);
    int64_t last = first + next_panels(t, panels - first);
    int64_t p = first;
    if (end - start == 1)
        for (; p + MANY <= last; p += MANY)
            many_panels(t, start, p, t->w + (p + MANY < last ? p + MANY : p) * t->panel_bytes);
    for (; p < last; p++)
        panel_rows(t, start, end, p, t->w + (p + 1 < last ? p + 1 : p) * t->panel_bytes);
}

typedef struct {
    const float *x;
    int64_t n, ldx, k, groups, step; /* step: rows of one task */
    int kind;
    int16_t *numbers;
    float *units;
} Inputs;

static void narrow_rows(void *arg, int64_t task) {
    const Inputs *t = arg;
    int64_t end = (task + 1) * t->step;
    for (int64_t r = task * t->step; r < end && r < t->n; r++) {
        int16_t *numbers = t->numbers + r * even(t->k);
        if (t->kind == INT8)
            int8_row(t->x + r * t->ldx, t->k, numbers, t->units + r * t->groups);
        else
            pairs_row(t->x + r * t->ldx, t->k, numbers);
    }
}

void narrow_inputs(Product *products, int64_t count, int threads) {
    const Product *first = products;
    Inputs t = {.x = first->x, .ldx = first->ldx, .k = first->k, .kind = first->kind};
    for (int64_t i = 0; i < count; i++) t.n += products[i].n;
    int64_t bytes = (t.n * even(t.k) * 2 + 63) / 64 * 64;
    t.groups = t.kind == INT8 ? (t.k + INT8_GROUP - 1) / INT8_GROUP : 0;
    t.numbers = kvr_scratch(bytes + t.n * t.groups * sizeof(float));
    t.units = (float *)((char *)t.numbers + bytes);
    t.step = t.k < NUMBERS ? NUMBERS / t.k : 1;
    kvr_parallel(threads, (t.n + t.step - 1) / t.step, narrow_rows, &t);
    for (int64_t i = 0, row = 0; i < count; row += products[i++].n) {
        products[i].numbers = t.numbers + row * even(t.k);
        products[i].units = t.units + row * t.groups;
    }
}
