/* y = x @ W^T (+ bias) with int8 weights (linear.h), in integer arithmetic.
 *
 * x is quantized first: every INT8_GROUP inputs of a row become integers up to MOST_INPUT and a
 * unit. Sums of products in a group are int32, thus exact; they are scaled in float32, one group
 * after the other. So a row's result is the same whatever other rows there are.
 *
 * Why 11 bits in int16: AVX2 multiplies int8 by int8 no faster, as that takes one instruction more
 * for the sign and one more to come to 32 bits. Of the two weights in a word the lower one is used
 * times 256, as one shift leaves it: 64 * 127 * 256 * MOST_INPUT is what 31 bits hold. */
#include "product.h"

#define MOST_INPUT 1023.0f
#define LEAST_INPUT 1e-30f /* a group of smaller ones counts as zeros */

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

/* As `Tile` (product.h). */
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
                fetch_to_l2(ahead + line);
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

TILES_OF(int8)

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

void int8_row(const float *x, int64_t k, int16_t *numbers, float *units) {
    for (int64_t at = 0; at < k; at += INT8_GROUP, units++) {
        int64_t left = k - at, count = left < INT8_GROUP ? left : INT8_GROUP;
        *units = quantize_group(x + at, count, numbers + at);
    }
}
