/* y = x @ W^T (+ bias) in integer arithmetic (linear.h), with int8 weights or, for CPUs that multiply
 * nothing narrower than float32 but integers, with bfloat16 weights that became 16-bit ones.
 *
 * x is quantized first: every INT8_GROUP inputs of a row become integers and a unit. Sums of products
 * in a group are int32, thus exact; they are scaled in float32, one group after the other. So a row's
 * result is the same whatever other rows there are.
 *
 * int8 weights are multiplied with 11 bits in int16: AVX2 multiplies int8 by int8 no faster, as that takes
 * one instruction more for the sign and one more to come to 32 bits. Of the two weights in a word the lower
 * one is used times 256, as one shift leaves it: 64 * 127 * 256 * MOST_OF_INT8 is what 31 bits hold.
 * 16-bit weights, less than 2^WEIGHT_BITS, are multiplied with 13 bits: 64 * 8160 * MOST_OF_INT16. */
#include "product.h"

#define MOST_OF_INT8 1023.0f
#define MOST_OF_INT16 4095.0f
#define WEIGHT_BITS 13
#define LEAST_BITS -100 /* a row of weights smaller than 2^LEAST_BITS counts as zeros */
#define LEAST_INPUT 1e-30f /* a group of smaller ones counts as zeros */
#define NEAR 512 /* bytes: how far ahead one row fetches each of its panels on CPUs with AVX2 */

typedef int16_t vp __attribute__((vector_size(VL * 4))); /* of each output two depths */
typedef int16_t vpu __attribute__((vector_size(VL * 4), aligned(2), may_alias));

/* Ends the expression that makes x: GCC neither fuses nor reorders it with what follows. */
#if defined(__AVX512F__)
#define IN_ORDER(x) __asm__("" : "+v"(x)) /* all 32 registers */
#elif defined(__SSE2__)
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
#elif defined(__AVXVNNI__) && VL == 8
    sum = (vi)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
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

INLINE vf float_of(vi sum) { return __builtin_convertvector(sum, vf); }

/* Two depths of panels at `w`, `apart` bytes from each other, into `acc`. */
INLINE void sum_pairs(int kind, int rows, int panels, const int16_t *x, int64_t ldx, const char *w,
                      int64_t apart, vi acc[MR][MANY][2]) {
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

/* As `Tile` (product.h), of INT8 or INT16. */
INLINE void tile(int kind, const Product *t, int rows, int panels, int64_t row, int64_t panel,
                 const char *ahead, int64_t pace) {
    int64_t ldx = even(t->k), groups = (t->k + INT8_GROUP - 1) / INT8_GROUP;
    const int16_t *x = t->numbers + row * ldx;
    const float *units = t->units + row * groups;
    const int64_t apart = t->panel_bytes, pair_bytes = kind == INT8 ? 2 * NR : 4 * NR;
    const int at_once = kind == INT8 ? 4 : 2; /* depths, that ahead is fetched for */
    const char *w = t->w + panel * apart;
    vf total[MR][MANY][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) total[r][p][0] = total[r][p][1] = splat(0);
    for (int64_t left = ldx; left > 0; left -= INT8_GROUP, units++) {
        int64_t depth = left < INT8_GROUP ? left : INT8_GROUP, d = 0;
        vi acc[MR][MANY][2];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int p = 0; p < panels; p++) acc[r][p][0] = acc[r][p][1] = (vi){0};
        for (; d + at_once <= depth; d += at_once, ahead += pace) {
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
                vf unit = splat(units[r * groups]);
                total[r][p][0] += float_of(acc[r][p][0]) * (kind == INT8 ? low * unit : unit);
                total[r][p][1] += float_of(acc[r][p][1]) * (kind == INT8 ? high * unit : unit);
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
    static void int8_##R(TILE_ARGUMENTS) { tile(INT8, t, R, 1, row, panel, ahead, pace); } \
    static void int16_##R(TILE_ARGUMENTS) { tile(INT16, t, R, 1, row, panel, ahead, pace); }
EACH_ROWS(TILE)
#undef TILE
#define INT8_NAME(R) int8_##R,
#define INT16_NAME(R) int16_##R,
static void int8_many(TILE_ARGUMENTS) { tile(INT8, t, 1, MANY, row, panel, ahead, pace); }
static void int16_many(TILE_ARGUMENTS) { tile(INT16, t, 1, MANY, row, panel, ahead, pace); }
Tiles int8_tiles = {EACH_ROWS(INT8_NAME) int8_many}, int16_tiles = {EACH_ROWS(INT16_NAME) int16_many};

#define ROUNDER 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer, in the lower bits then */
#define ROUNDER_BITS 0x4b400000

INLINE vi larger(vi a, vi b) {
    vi more = a > b;
    return (a & more) | (b & ~more);
}

INLINE vi most_of_lanes(vi v) { /* in all lanes */
    UNROLL for (int width = VL / 2; width > 0; width /= 2) v = larger(v, (vi)swap_lanes((vf)v, width));
    return v;
}

INLINE vi magnitudes(vf x) { return (vi)x & INT32_MAX; } /* compare as integers do, NaN above all */

/* Up to INT8_GROUP inputs, to integers up to `limit`; `numbers` has room for an even count. */
INLINE float quantize_group(const float *x, int64_t count, float limit, int16_t *numbers) {
    float padded[INT8_GROUP] = {0}, most;
    if (count < INT8_GROUP) x = memcpy(padded, x, sizeof(float) * count);
    vi high = {0};
    for (int64_t i = 0; i < INT8_GROUP; i += VL) high = larger(high, magnitudes(load(x + i)));
    int32_t top = most_of_lanes(high)[0];
    memcpy(&most, &top, sizeof most);
    float factor = most < LEAST_INPUT ? 0.0f : limit / most;
    int16_t rounded[INT8_GROUP];
    for (int64_t i = 0; i < INT8_GROUP; i += VL) {
        vf scaled = load(x + i) * factor;
        IN_ORDER(scaled); /* rounded with and without fused multiply-add */
        vi whole = (vi)(scaled + ROUNDER) - ROUNDER_BITS;
        *(vhu *)(rounded + i) = (vhu)__builtin_convertvector(whole, vs);
    }
    memcpy(numbers, rounded, sizeof(int16_t) * even(count));
    if (most < LEAST_INPUT) return 0.0f;
    return most / limit; /* of NaN and infinity it makes results that are not finite */
}

void integers_row(const float *x, int64_t k, int kind, int16_t *numbers, float *units) {
    float limit = kind == INT8 ? MOST_OF_INT8 : MOST_OF_INT16;
    for (int64_t at = 0; at < k; at += INT8_GROUP, units++) {
        int64_t left = k - at, count = left < INT8_GROUP ? left : INT8_GROUP;
        *units = quantize_group(x + at, count, limit, numbers + at);
    }
}

/* A row of bfloat16 weights [k] to output j of a panel. Their unit is a power of two: only those 32 times
 * smaller than the row's largest lose bits. */
void int16_pack(const uint16_t *w, int64_t k, int64_t j, char *panel) {
    int32_t top = 0;
    for (int64_t d = 0; d < k; d++) top = (w[d] & 0x7fff) > top ? w[d] & 0x7fff : top;
    int bits = (top >> 7) - 126; /* all are less than 2^bits */
    bits = bits < LEAST_BITS ? LEAST_BITS : bits;
    float inverse = ldexpf(1, WEIGHT_BITS - bits);
    int16_t *to = (int16_t *)panel + 2 * j;
    for (int64_t d = 0; d < k; d++)
        to[(d & ~1) * NR + (d & 1)] = (int16_t)lrintf(bf16_to_float(w[d]) * inverse);
    ((float *)(panel + depth_at(even(k), INT16)))[j] = ldexpf(1, bits - WEIGHT_BITS);
}
