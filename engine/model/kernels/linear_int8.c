/* y = x @ W^T (+ bias) with int8 weights (linear.h), in integer arithmetic.
 *
 * x is quantized first: every INT8_GROUP inputs of a row become integers up to MOST_INPUT and a
 * unit. Sums of products in a group are int32, thus exact; they are scaled in float32, one group
 * after the other. So a row's result is the same whatever other rows there are.
 *
 * Why 11 bits in int16: AVX2 multiplies int8 by int8 no faster, as that takes one instruction more
 * for the sign and one more to come to 32 bits. Of the two weights in a word the lower one is used
 * times 256, as one shift leaves it: 64 * 127 * 256 * MOST_INPUT is what 31 bits hold. */
#include "linear.h"
#include "pool.h"
#include "product.h"

#define MOST_INPUT 1023.0f
#define LEAST_INPUT 1e-30f /* a group of smaller ones counts as zeros */
#define NUMBERS 8192       /* quantized by one task, about */
#define SHARES 3 /* a task takes a part of the panels left: one in SHARES of a thread's */
#define MOST 64  /* panels of a task */
#define MANY 4   /* panels at once, of one row */
#define CHUNK_BYTES (192 << 10) /* of quantized rows of a task: they stay in the L2 cache */

typedef int16_t vp __attribute__((vector_size(VL * 4))); /* of each output two depths */
typedef int16_t vpu __attribute__((vector_size(VL * 4), aligned(2), may_alias));

/* Ends the expression that makes x: GCC neither fuses nor reorders it with what follows. */
#if defined(__SSE2__)
#define IN_ORDER(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__)
#define IN_ORDER(x) __asm__("" : "+w"(x))
#else
#define IN_ORDER(x)
#endif

/* sum += the products of both depths of each pair. */
INLINE vi add_pairs(vi sum, vp a, vp b) {
#if defined(__AVX512VNNI__) && VL == 16
    sum = (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__) && VL == 16
    sum += (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && VL == 8
    sum += (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    vi left = (vi)a, right = (vi)b;
    sum += (left << 16 >> 16) * (right << 16 >> 16) + (left >> 16) * (right >> 16);
#endif
    IN_ORDER(sum); /* else it adds up products first, and runs out of registers */
    return sum;
}

/* Two depths of a row in all lanes. */
INLINE vp splat_pair(const int16_t *x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (vp)(pair - (vi){0});
}

/* Two depths of panels at `w`, `apart` bytes from each other, into `acc`. */
INLINE void sum_pairs(int rows, int panels, const int16_t *x, int64_t ldx, const char *w,
                      int64_t apart, vi acc[MR][MANY][2]) {
    UNROLL for (int p = 0; p < panels; p++) {
        vp words = *(const vpu *)(w + p * apart), low = words << 8, high = words >> 8;
        UNROLL for (int r = 0; r < rows; r++) {
            vp pair = splat_pair(x + r * ldx);
            acc[r][p][0] = add_pairs(acc[r][p][0], low, pair);
            acc[r][p][1] = add_pairs(acc[r][p][1], high, pair);
        }
    }
}

/* One result row of a panel. */
INLINE void put(const Product *t, int64_t row, int64_t panel, const vf sum[2]) {
    int64_t first = panel * NR;
    float *y = t->y + row * t->ldy + first;
    const float *base = t->keep ? y : t->bias ? t->bias + first : NULL;
    if (first + NR <= t->m) {
        store(y, base ? sum[0] + load(base) : sum[0]);
        store(y + VL, base ? sum[1] + load(base + VL) : sum[1]);
        return;
    }
    for (int j = 0; first + j < t->m; j++) {
        float value = sum[j / VL][j % VL];
        y[j] = base ? value + base[j] : value;
    }
}

/* `rows` rows from `row` on times `panels` panels from `panel` on, both constants. Meanwhile `ahead`
 * is prefetched, `pace` bytes for every four depths. */
INLINE void tile(const Product *t, int rows, int panels, int64_t row, int64_t panel,
                 const char *ahead, int64_t pace) {
    int64_t ldx = even(t->k), groups = (t->k + INT8_GROUP - 1) / INT8_GROUP;
    const int16_t *x = t->numbers + row * ldx;
    const float *units = t->units + row * groups;
    int64_t apart = t->panel_bytes;
    const char *w = t->w + panel * apart;
    vf total[MR][MANY][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) total[r][p][0] = total[r][p][1] = splat(0);
    for (int64_t left = ldx; left > 0; left -= INT8_GROUP, units++) {
        int64_t depth = left < INT8_GROUP ? left : INT8_GROUP, d = 0;
        vi acc[MR][MANY][2];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int p = 0; p < panels; p++) acc[r][p][0] = acc[r][p][1] = (vi){0};
        for (; d + 4 <= depth; d += 4, x += 4, w += 4 * NR, ahead += pace) {
            UNROLL for (int line = 0; line < 4 * NR * panels; line += 64)
                __builtin_prefetch(ahead + line);
            sum_pairs(rows, panels, x, ldx, w, apart, acc);
            sum_pairs(rows, panels, x + 2, ldx, w + 2 * NR, apart, acc);
        }
        if (d < depth) sum_pairs(rows, panels, x, ldx, w, apart, acc), x += 2, w += 2 * NR;
        UNROLL for (int p = 0; p < panels; p++) {
            vf low, high;
            widen_bf16(w + p * apart, &low, &high);
            low /= 256;
            UNROLL for (int r = 0; r < rows; r++) {
                vf unit = splat(units[r * groups]);
                total[r][p][0] += __builtin_convertvector(acc[r][p][0], vf) * (low * unit);
                total[r][p][1] += __builtin_convertvector(acc[r][p][1], vf) * (high * unit);
            }
        }
        w += 2 * NR;
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) put(t, row + r, panel + p, total[r][p]);
}

/* Rows [start, end) of a panel, and meanwhile the next one is fetched. */
static void panel_rows(const Product *t, int64_t start, int64_t end, int64_t panel,
                       const char *next) {
    int64_t tiles = (end - start + MR - 1) / MR, share = t->panel_bytes / tiles;
    int64_t pace = 4 * share / t->k;
    for (int64_t row = start, rows; row < end; row += rows, next += share) {
        rows = even_rows(end - row);
#define TILE(R) \
    case R: tile(t, R, 1, row, panel, next, pace); break;
        switch (rows) { EACH_ROWS(TILE) }
#undef TILE
    }
}

/* One row times MANY panels: several streams of memory at once. */
static void many_panels(const Product *t, int64_t row, int64_t panel, const char *next) {
    tile(t, 1, MANY, row, panel, next, 4 * MANY * t->panel_bytes / t->k);
}

/* How many of the `left` panels the next task takes: ever fewer, so that threads end together. */
static int64_t next_panels(const Product *t, int64_t left) {
    int64_t unit = t->n == 1 ? MANY : 1, size = left / t->group / unit * unit;
    size = size < unit ? unit : size > MOST ? MOST : size;
    return size < left ? size : left;
}

int64_t int8_plan(Product *t, int threads) {
    int64_t left = (t->m + NR - 1) / NR, tasks = 0, chunk = CHUNK_BYTES / (2 * t->k) / MR * MR;
    t->chunk = chunk < 4 * MR ? 4 * MR : chunk;
    t->group = SHARES * threads;
    for (; left > 0; tasks++) left -= next_panels(t, left);
    return tasks * ((t->n + t->chunk - 1) / t->chunk);
}

/* All chunks of rows times the same panels follow one another. */
void int8_task(const Product *t, int64_t task) {
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
    int64_t n, ldx, k, step; /* step: rows of one task */
    int16_t *numbers;
    float *units;
} Inputs;

/* Up to INT8_GROUP inputs; `numbers` has room for an even count. */
INLINE float quantize_group(const float *x, int64_t count, int16_t *numbers) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    float padded[INT8_GROUP] = {0}, most;
    if (count < INT8_GROUP) x = memcpy(padded, x, sizeof(float) * count);
    vi high = {0}; /* magnitudes compare as integers do, NaN above all */
    for (int64_t i = 0; i < INT8_GROUP; i += VL) {
        vi size = (vi)load(x + i) & INT32_MAX, more = size > high;
        high = (size & more) | (high & ~more);
    }
    int32_t top = 0;
    for (int i = 0; i < VL; i++) top = high[i] > top ? high[i] : top;
    memcpy(&most, &top, sizeof most);
    float factor = most < LEAST_INPUT ? 0.0f : MOST_INPUT / most;
    int16_t rounded[INT8_GROUP];
    for (int64_t i = 0; i < INT8_GROUP; i += VL) {
        vf scaled = load(x + i) * factor;
        IN_ORDER(scaled); /* rounded with and without fused multiply-add */
        vi whole = (vi)(scaled + magic) - 0x4b400000;
        *(vhu *)(rounded + i) = (vhu)__builtin_convertvector(whole, vs);
    }
    memcpy(numbers, rounded, sizeof(int16_t) * even(count));
    if (most < LEAST_INPUT) return 0.0f;
    return most / MOST_INPUT; /* of NaN and infinity it makes results that are not finite */
}

static void quantize_rows(void *arg, int64_t task) {
    const Inputs *t = arg;
    int64_t groups = (t->k + INT8_GROUP - 1) / INT8_GROUP, end = (task + 1) * t->step;
    for (int64_t r = task * t->step; r < end && r < t->n; r++)
        for (int64_t g = 0; g < groups; g++) {
            int64_t at = g * INT8_GROUP, left = t->k - at;
            t->units[r * groups + g] =
                quantize_group(t->x + r * t->ldx + at, left < INT8_GROUP ? left : INT8_GROUP,
                               t->numbers + r * even(t->k) + at);
        }
}

void int8_inputs(Product *products, int64_t count, int threads) {
    const Product *first = products;
    Inputs t = {first->x, 0, first->ldx, first->k, 0, NULL, NULL};
    int64_t groups = (t.k + INT8_GROUP - 1) / INT8_GROUP;
    for (int64_t i = 0; i < count; i++) t.n += products[i].n;
    int64_t bytes = (t.n * even(t.k) * 2 + 63) / 64 * 64;
    t.numbers = kvr_scratch(bytes + t.n * groups * sizeof(float));
    t.units = (float *)((char *)t.numbers + bytes);
    t.step = t.k < NUMBERS ? NUMBERS / t.k : 1;
    kvr_parallel(threads, (t.n + t.step - 1) / t.step, quantize_rows, &t);
    for (int64_t i = 0, row = 0; i < count; row += products[i++].n) {
        products[i].numbers = t.numbers + row * even(t.k);
        products[i].units = t.units + row * groups;
    }
}
