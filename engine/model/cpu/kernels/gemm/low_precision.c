/* GEMMs whose inputs are converted to fewer bits first (INT4, INT8, INT16, BF16_PAIRS, FP16, AMX): how they
 * are cut into tasks. A tile sums all depths of its rows in registers, so a row's result is the same whatever other rows there
 * are. */
#include "../norm.h"
#include "../thread_pool.h"
#include "amx.h"
#include "fp16.h"
#include "gemm.h"

#include <stdatomic.h>
#ifdef HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define CONVERT_ELEMENTS 8192 /* low_precision by one task, about */
#define MANY_ROWS 32 /* of int8 weights, so that tiles are quicker */
#define LARGE (VL == 8 ? 16 : 64) /* panels of a matrix from which on few rows take PANELS_AT_ONCE */
#define BYTES_AHEAD (12 << 10) /* one tile of rows fetches so far ahead */
#define GROUP_BYTES (512 << 10) /* of panels of a task, with more rows than a chunk */
#define CHUNK_BYTES (192 << 10) /* of low_precision rows of a task: they stay in the L2 cache */
#define AMX_CHUNK_BYTES (1700 << 10) /* of tiles, whose CPUs have 2 MiB of it, and which wait for panels */

/* Linux gives a process tiles when it asks for them. */
static int has_amx(void) {
#ifdef HAS_AMX
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

/* Whether GEMMs of this kind are faster than float32 here, or at least possible. Intel's CPUs take a vector
 * of pairs four times as long as one of fp16. Integers need a sum for each product where AVX-512 has no
 * VNNI: as long as float32. */
int kvr_multiplies(int kind) {
    switch (kind) {
    case AMX: return has_amx();
#ifdef HAS_FP16
    case FP16: return __builtin_cpu_is("intel");
#endif
#if defined(__AVX512BF16__) && VL == 16
    case BF16_PAIRS: return 1;
#endif
#if (defined(__AVX2__) && VL == 8) || (defined(__AVX512VNNI__) && VL == 16)
    case INT16: return 1;
#endif
    default: return 0;
    }
}

static MicroTile *const *micro_tiles_of(int kind) {
    switch (kind) {
    case INT4: return int4_tiles;
    case INT8: return int8_tiles;
    case INT16: return int16_tiles;
    case BF16_PAIRS: return bf16_tiles;
    default: return fp16_tiles;
    }
}

/* Whose inputs have a task for each group. */
static int has_groups(int kind) { return kind == INT4 || kind == INT8 || kind == INT16; }

/* Rows [start, end) of a panel, and meanwhile the next one is fetched; or, where one integer tile takes a
 * panel only once, what is BYTES_AHEAD. */
static void panel_rows(const Gemm *t, int64_t start, int64_t end, int64_t panel,
                       const char *next) {
    MicroTile *const *tiles = micro_tiles_of(t->kind);
    int64_t share = t->panel_bytes / ((end - start + MR - 1) / MR);
    int64_t prefetch_step = 4 * NR * share / t->panel_bytes;
    if (VL == 16 && has_groups(t->kind) && end - start <= MR)
        next = t->w + panel * t->panel_bytes + BYTES_AHEAD;
    for (int64_t row = start, rows; row < end; row += rows, next += share) {
        rows = even_rows(end - row);
        tiles[rows - 1](t, row, panel, next, prefetch_step);
    }
}

/* Of few rows and PANELS_AT_ONCE panels, several streams of memory at once; NULL: there is none. */
static MicroTile *few_tile(int kind, int64_t rows) {
    return rows <= FEW_ROWS ? micro_tiles_of(kind)[MR + rows - 1] : NULL;
}

static int uses_amx(const Gemm *t, int64_t rows) {
    return t->kind == AMX || (t->kind == INT8 && rows >= MANY_ROWS && has_amx());
}

void low_precision_plan(Gemm *t, int threads) {
    int tiles = uses_amx(t, t->n), splits = tiles && t->kind == INT8; /* its rows, in each task */
    int64_t panels = num_panels(t), rows = tiles ? 2 * AMX_TILE : MR;
    int64_t chunk = (t->kind == AMX ? AMX_CHUNK_BYTES : CHUNK_BYTES) / (2 * t->k) / rows * rows;
    t->chunk = chunk < 4 * rows ? 4 * rows : chunk;
    int few = t->kind == AMX ? t->n <= rows : few_tile(t->kind, t->n) != NULL;
    t->group = few && panels >= LARGE ? PANELS_AT_ONCE : 1;
    if (t->kind == AMX && !few && threads == 1) {
        t->group = panels;
    } else if (t->n > t->chunk || splits) {
        int64_t each = (panels + threads - 1) / threads; /* a thread's */
        int64_t groups = (each * t->panel_bytes + GROUP_BYTES - 1) / GROUP_BYTES;
        groups = groups < each ? groups : each;
        t->group = (each + groups - 1) / groups;
    }
}

/* A group of panels stays in the cache while all chunks of rows pass it. */
void low_precision_task(const Gemm *t, int64_t task, const char *ahead) {
    int64_t chunks = num_chunks(t), start = task % chunks * t->chunk;
    int64_t end = start + t->chunk < t->n ? start + t->chunk : t->n;
    int64_t panels = num_panels(t), p = task / chunks * t->group;
    int64_t last = p + t->group < panels ? p + t->group : panels;
    if (uses_amx(t, end - start)) {
        amx_begin();
        if (t->kind == INT8)
            amx_int8_task(t, start, end, p, last);
        else
            amx_bf16_task(t, start, end, p, last, ahead);
        amx_end();
        return;
    }
    MicroTile *few = last - p == PANELS_AT_ONCE ? few_tile(t->kind, end - start) : NULL;
    if (few) {
        few(t, start, p, ahead, 4 * NR * PANELS_AT_ONCE);
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
    int16_t *converted_x;
    float *x_scales;
} Inputs;

static void convert_rows(void *arg, int64_t task) {
    const Inputs *t = arg;
    int64_t end = (task + 1) * t->step;
    float normed[t->norm ? t->k : 1];
    for (int64_t r = task * t->step; r < end && r < t->n; r++) {
        int16_t *converted_x = t->converted_x + r * t->width;
        const float *x = t->x + r * t->ldx;
        if (t->norm) {
            normalise(x, t->norm, normed, t->k, t->eps);
            x = normed;
        }
        if (t->kind == INT4)
            int4_row(x, t->k, converted_x, t->x_scales + r * t->groups);
        else if (has_groups(t->kind))
            int16_row(x, t->k, t->kind, converted_x, t->x_scales + r * t->groups);
        else if (t->kind == FP16)
            fp16_row(x, t->k, converted_x, t->x_scales + r);
        else
            bf16_row(x, t->k, padded(t->k, t->kind), converted_x);
    }
}

void convert_inputs(Gemm *gemms, int64_t count, int threads) {
    const Gemm *first = gemms;
    Inputs t = {.x = first->x, .ldx = first->ldx, .k = first->k, .kind = first->kind};
    t.norm = first->norm, t.eps = first->eps;
    for (int64_t i = 0; i < count; i++) t.n += gemms[i].n;
    t.width = converted_width(t.k, t.kind);
    int64_t beyond = t.kind == AMX ? 2 * AMX_TILE : 0; /* rows that a tile may have behind the last */
    int64_t bytes = ((t.n + beyond) * t.width * 2 + 63) / 64 * 64;
    t.groups = has_groups(t.kind) ? num_groups(t.k, t.kind) << (t.kind == INT4) : t.kind == FP16;
    t.converted_x = kvr_scratch(SCRATCH_CALLER, bytes + t.n * t.groups * sizeof(float));
    t.x_scales = (float *)((char *)t.converted_x + bytes);
    t.step = t.k < CONVERT_ELEMENTS ? CONVERT_ELEMENTS / t.k : 1;
    kvr_parallel(threads, (t.n + t.step - 1) / t.step, convert_rows, &t);
    for (int64_t i = 0, row = 0; i < count; row += gemms[i++].n) {
        gemms[i].converted_x = t.converted_x + row * t.width;
        gemms[i].x_scales = t.x_scales + row * t.groups;
    }
}
