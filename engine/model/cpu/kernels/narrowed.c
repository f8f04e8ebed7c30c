/* Products whose inputs are narrowed first (INT8, INT16, PAIRS, HALVES, TILES): how they are cut into units.
 * A tile sums all depths of its rows in registers, so a row's result is the same whatever other rows there
 * are. */
#include "halves.h"
#include "norm.h"
#include "pool.h"
#include "product.h"
#include "tiles.h"

#include <stdatomic.h>
#ifdef HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define NUMBERS 8192 /* narrowed by one task, about */
#define MANY_ROWS 32 /* of int8 weights, so that tiles are quicker */
#define LARGE (VL == 8 ? 16 : 64) /* panels of a matrix that few rows meet MANY at a time */
#define BYTES_AHEAD (12 << 10) /* one tile of rows fetches so far ahead */
#define GROUP_BYTES (512 << 10) /* of panels of a unit, with more rows than a chunk */
#define CHUNK_BYTES (192 << 10) /* of narrowed rows of a unit: they stay in the L2 cache */
#define TILES_BYTES (1700 << 10) /* of tiles, whose CPUs have 2 MiB of it, and which wait for panels */

/* Linux gives a process tiles when it asks for them. */
static int has_tiles(void) {
#ifdef HAS_TILES
#define ASK_FOR_STATE 0x1023 /* of arch_prctl: ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18
    static atomic_int known; /* 1: no, 2: yes */
    if (!atomic_load(&known))
        atomic_store(&known, syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) ? 1 : 2);
    return atomic_load(&known) == 2;
#else
    return 0;
#endif
}

/* Whether products of this kind are quicker than float32 here, or at least done. Intel's CPUs take a vector
 * of pairs four times as long as one of half floats. Integers need a sum for each product where AVX-512 has no
 * VNNI: as long as float32. */
int kvr_multiplies(int kind) {
    switch (kind) {
    case TILES: return has_tiles();
#ifdef HAS_HALVES
    case HALVES: return __builtin_cpu_is("intel");
#endif
#if defined(__AVX512BF16__) && VL == 16
    case PAIRS: return 1;
#endif
#if (defined(__AVX2__) && VL == 8) || (defined(__AVX512VNNI__) && VL == 16)
    case INT16: return 1;
#endif
    default: return 0;
    }
}

static Tile *const *tiles_of(int kind) {
    switch (kind) {
    case INT8: return int8_tiles;
    case INT16: return int16_tiles;
    case PAIRS: return pairs_tiles;
    default: return halves_tiles;
    }
}

/* Whose inputs have a unit for each group. */
static int has_groups(int kind) { return kind == INT8 || kind == INT16; }

/* Rows [start, end) of a panel, and meanwhile the next one is fetched; or, where one tile of integers meets a
 * panel only once, what is BYTES_AHEAD. */
static void panel_rows(const Product *t, int64_t start, int64_t end, int64_t panel,
                       const char *next) {
    Tile *const *tiles = tiles_of(t->kind);
    int64_t share = t->panel_bytes / ((end - start + MR - 1) / MR);
    int64_t pace = 4 * NR * share / t->panel_bytes;
    if (VL == 16 && has_groups(t->kind) && end - start <= MR)
        next = t->w + panel * t->panel_bytes + BYTES_AHEAD;
    for (int64_t row = start, rows; row < end; row += rows, next += share) {
        rows = even_rows(end - row);
        tiles[rows - 1](t, row, panel, next, pace);
    }
}

/* One row times MANY panels: several streams of memory at once. */
static void many_panels(const Product *t, int64_t row, int64_t panel, const char *next) {
    tiles_of(t->kind)[MR](t, row, panel, next, 4 * NR * MANY);
}

static int takes_tiles(const Product *t, int64_t rows) {
    return t->kind == TILES || (t->kind == INT8 && rows >= MANY_ROWS && has_tiles());
}

void narrowed_plan(Product *t, int threads) {
    int tiles = takes_tiles(t, t->n), splits = tiles && t->kind == INT8; /* its rows, in each unit */
    int64_t panels = num_panels(t), rows = tiles ? 2 * TILE : MR;
    int64_t chunk = (t->kind == TILES ? TILES_BYTES : CHUNK_BYTES) / (2 * t->k) / rows * rows;
    t->chunk = chunk < 4 * rows ? 4 * rows : chunk;
    int few = t->kind == TILES ? t->n <= rows : t->n == 1;
    t->group = few && panels >= LARGE ? MANY : 1;
    if (t->kind == TILES && !few && threads == 1) {
        t->group = panels;
    } else if (t->n > t->chunk || splits) {
        int64_t each = (panels + threads - 1) / threads; /* a thread's */
        int64_t groups = (each * t->panel_bytes + GROUP_BYTES - 1) / GROUP_BYTES;
        groups = groups < each ? groups : each;
        t->group = (each + groups - 1) / groups;
    }
}

/* A group of panels stays in the cache while all chunks of rows pass it. */
void narrowed_unit(const Product *t, int64_t unit, const char *ahead) {
    int64_t chunks = num_chunks(t), start = unit % chunks * t->chunk;
    int64_t end = start + t->chunk < t->n ? start + t->chunk : t->n;
    int64_t panels = num_panels(t), p = unit / chunks * t->group;
    int64_t last = p + t->group < panels ? p + t->group : panels;
    if (takes_tiles(t, end - start)) {
        tiles_begin();
        if (t->kind == INT8)
            int8_tiles_unit(t, start, end, p, last);
        else
            tiles_unit(t, start, end, p, last, ahead);
        tiles_end();
        return;
    }
    if (end - start == 1 && last - p == MANY) {
        many_panels(t, start, p, ahead);
        p = last;
    }
    for (; p < last; p++) {
        const char *next = p + 1 < last ? t->w + (p + 1) * t->panel_bytes : ahead;
        panel_rows(t, start, end, p, next);
    }
}

typedef struct {
    const float *x, *norm;
    float eps;
    int64_t n, ldx, k, width, groups, step; /* step: rows of one task */
    int kind;
    int16_t *numbers;
    float *units;
} Inputs;

static void narrow_rows(void *arg, int64_t task) {
    const Inputs *t = arg;
    int64_t end = (task + 1) * t->step;
    float normed[t->norm ? t->k : 1];
    for (int64_t r = task * t->step; r < end && r < t->n; r++) {
        int16_t *numbers = t->numbers + r * t->width;
        const float *x = t->x + r * t->ldx;
        if (t->norm) {
            normalise(x, t->norm, normed, t->k, t->eps);
            x = normed;
        }
        if (has_groups(t->kind))
            integers_row(x, t->k, t->kind, numbers, t->units + r * t->groups);
        else if (t->kind == HALVES)
            halves_row(x, t->k, numbers, t->units + r);
        else
            pairs_row(x, t->k, padded(t->k, t->kind), numbers);
    }
}

void narrow_inputs(Product *products, int64_t count, int threads) {
    const Product *first = products;
    Inputs t = {.x = first->x, .ldx = first->ldx, .k = first->k, .kind = first->kind};
    t.norm = first->norm, t.eps = first->eps;
    for (int64_t i = 0; i < count; i++) t.n += products[i].n;
    t.width = narrowed_width(t.k, t.kind);
    int64_t beyond = t.kind == TILES ? 2 * TILE : 0; /* rows that a tile may have behind the last */
    int64_t bytes = ((t.n + beyond) * t.width * 2 + 63) / 64 * 64;
    t.groups = has_groups(t.kind) ? num_groups(t.k, t.kind) : t.kind == HALVES;
    t.numbers = kvr_scratch(OF_CALLER, bytes + t.n * t.groups * sizeof(float));
    t.units = (float *)((char *)t.numbers + bytes);
    t.step = t.k < NUMBERS ? NUMBERS / t.k : 1;
    kvr_parallel(threads, (t.n + t.step - 1) / t.step, narrow_rows, &t);
    for (int64_t i = 0, row = 0; i < count; row += products[i++].n) {
        products[i].numbers = t.numbers + row * t.width;
        products[i].units = t.units + row * t.groups;
    }
}
