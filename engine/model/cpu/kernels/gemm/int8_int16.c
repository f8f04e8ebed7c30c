/* y = x @ W^T (+ bias) in integer arithmetic (layout.h), with int8 weights or, for CPUs that multiply
 * nothing narrower than float32 but integers, with bfloat16 weights that became 16-bit ones.
 *
 * x is quantized first: every group of inputs of a row becomes integers and a scale. Sums of products in a
 * group are int32, thus exact; they are scaled in float32, one group after the other. So a row's result is
 * the same whatever other rows there are.
 *
 * int8 weights are multiplied with 11 bits in int16: AVX2 multiplies int8 by int8 no faster, as that takes
 * one instruction more for the sign and one more to come to 32 bits. Of the two weights in a word the lower
 * one is used times 256, as one shift leaves it: 64 * 127 * 256 * MOST_OF_INT8 is what 31 bits hold.
 * 16-bit weights, of WEIGHT_BITS beside the sign, are multiplied with 13. What groups of a row may come to is
 * known when it is packed: where 31 bits would not hold it, which takes weights of much the same size, the
 * row has fewer bits. */
#include "gemm.h"
#include "int16.h"

#define MOST_OF_INT8 1023
#define WEIGHT_BITS 12
#define LEAST_BITS -100 /* a row of weights smaller than 2^LEAST_BITS counts as zeros */
#define INFINITE_BF16 0x7f80

/* Two depths of panels at `w`, `apart` bytes from each other, into `acc`. */
INLINE void sum_pairs(int kind, int rows, int panels, const int16_t *x, int64_t ldx, const char *w,
                      int64_t apart, vi acc[MR][PANELS_AT_ONCE][2]) {
    UNROLL for (int p = 0; p < panels; p++) {
        vp low = *(const vpu *)(w + p * apart), high;
        if (kind == INT16)
            high = *(const vpu *)(w + p * apart + 2 * NR);
        else
            high = low >> 8, low <<= 8;
        UNROLL for (int r = 0; r < rows; r++) {
            vp pair = splat_pair(x + r * ldx);
            acc[r][p][0] = add_pairs(acc[r][p][0], low, pair);
            acc[r][p][1] = add_pairs(acc[r][p][1], high, pair);
        }
    }
}

/* As `MicroTile` (gemm.h), of INT8 or INT16. */
INLINE void tile(int kind, const Gemm *t, int rows, int panels, int64_t row, int64_t panel,
                 const char *ahead, int64_t prefetch_step) {
    const int64_t group = group_of(kind);
    int64_t ldx = even(t->k), groups = num_groups(t->k, kind);
    const int16_t *x = t->converted_x + row * ldx;
    const float *x_scales = t->x_scales + row * groups;
    const int64_t apart = t->panel_bytes, pair_bytes = kind == INT8 ? 2 * NR : 4 * NR;
    const int at_once = kind == INT8 ? 4 : 2; /* depths, that ahead is fetched for */
    const char *w = t->w + panel * apart;
    vf total[MR][PANELS_AT_ONCE][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) total[r][p][0] = total[r][p][1] = splat(0);
    for (int64_t left = ldx; left > 0; left -= group, x_scales++) {
        int64_t depth = left < group ? left : group, d = 0;
        vi acc[MR][PANELS_AT_ONCE][2];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int p = 0; p < panels; p++) acc[r][p][0] = acc[r][p][1] = (vi){0};
        for (; d + at_once <= depth; d += at_once, ahead += prefetch_step) {
            if (VL == 8 && panels > 1)
                UNROLL for (int p = 0; p < panels; p++) __builtin_prefetch(w + p * apart + NEAR);
            else
                UNROLL for (int line = 0; line < 4 * NR * panels; line += 64) fetch_to_l2(ahead + line);
            UNROLL for (int i = 0; i < at_once; i += 2, x += 2, w += pair_bytes)
                sum_pairs(kind, rows, panels, x, ldx, w, apart, acc);
        }
        if (d < depth) {
            sum_pairs(kind, rows, panels, x, ldx, w, apart, acc);
            x += 2, w += pair_bytes;
        }
        UNROLL for (int p = 0; p < panels; p++) {
            vf low, high;
            if (kind == INT8) widen_bf16(w + p * apart, &low, &high), low /= 256;
            UNROLL for (int r = 0; r < rows; r++) {
                vf x_scale = splat(x_scales[r * groups]);
                total[r][p][0] += float_of_sum(acc[r][p][0]) * (kind == INT8 ? low * x_scale : x_scale);
                total[r][p][1] += float_of_sum(acc[r][p][1]) * (kind == INT8 ? high * x_scale : x_scale);
            }
        }
        if (kind == INT8) w += 2 * NR;
    }
    UNROLL for (int p = 0; p < panels; p++) {
        const float *scales = (const float *)(w + p * apart);
        UNROLL for (int r = 0; r < rows; r++) {
            if (kind == INT16) total[r][p][0] *= load(scales), total[r][p][1] *= load(scales + VL);
            put(t, row + r, panel + p, total[r][p]);
        }
    }
}

#define TILE(R) \
    static void int8_##R(TILE_ARGUMENTS) { tile(INT8, t, R, 1, row, panel, ahead, prefetch_step); } \
    static void int16_##R(TILE_ARGUMENTS) { tile(INT16, t, R, 1, row, panel, ahead, prefetch_step); }
EACH_ROWS(TILE)
#undef TILE
#define INT8_NAME(R) int8_##R,
#define INT16_NAME(R) int16_##R,
static void int8_many(TILE_ARGUMENTS) { tile(INT8, t, 1, PANELS_AT_ONCE, row, panel, ahead, prefetch_step); }
static void int16_many(TILE_ARGUMENTS) { tile(INT16, t, 1, PANELS_AT_ONCE, row, panel, ahead, prefetch_step); }
MicroTiles int8_tiles = {EACH_ROWS(INT8_NAME) int8_many}, int16_tiles = {EACH_ROWS(INT16_NAME) int16_many};

void int16_row(const float *x, int64_t k, int kind, int16_t *numbers, float *x_scales) {
    float limit = kind == INT8 ? MOST_OF_INT8 : MOST_OF_INT16;
    int64_t group = group_of(kind);
    for (int64_t at = 0; at < k; at += group, x_scales++) {
        int64_t left = k - at, count = left < group ? left : group;
        *x_scales = quantize(x + at, count, limit, numbers + at);
    }
}

/* Whether int32 holds the sums of groups of these weights [k], in units of 2^-scale, whatever inputs are. */
static int fits(const uint16_t *w, int64_t k, int scale) {
    float factor = ldexpf(1, scale);
    for (int64_t at = 0; at < k; at += INT16_GROUP) {
        int32_t sum = 0;
        for (int64_t d = at; d < k && d < at + INT16_GROUP; d++)
            sum += (int32_t)fabsf(rintf(bf16_to_float(w[d]) * factor));
        if (sum > INT32_MAX / MOST_OF_INT16) return 0;
    }
    return 1;
}

/* A row of bfloat16 weights [k] to output j of a panel. Their scale is a power of two: only those 16 times
 * smaller than the row's largest lose bits. */
void int16_pack(const uint16_t *w, int64_t k, int64_t j, char *panel) {
    int32_t top = 0;
    for (int64_t d = 0; d < k; d++) top = (w[d] & 0x7fff) > top ? w[d] & 0x7fff : top;
    int bits = (top >> 7) - 126; /* all are less than 2^bits */
    int scale = WEIGHT_BITS - (bits < LEAST_BITS ? LEAST_BITS : bits);
    while (top < INFINITE_BF16 && !fits(w, k, scale)) scale--;
    float factor = ldexpf(1, scale);
    int16_t *to = (int16_t *)panel + 2 * j;
    for (int64_t d = 0; d < k; d++)
        to[(d & ~1) * NR + (d & 1)] = (int16_t)lrintf(bf16_to_float(w[d]) * factor);
    ((float *)(panel + depth_at(even(k), INT16)))[j] = ldexpf(1, -scale);
}
