/* y = x @ W^T (+ bias) in fp16 (layout.h), for CPUs that multiply them faster than bfloat16.
 *
 * Each row of the matrix, and each row of x, has a scale (fp16.h): of x 11 bits are left, not 8, and
 * bfloat16 weights are what they were but for those 2^17 times smaller than the row's largest. Sums of
 * FP16_DEPTHS gemms are fp16, those of all depths are float32, from the first to the last: a
 * row's result is the same whatever other rows there are. */
#include "fp16.h"
#include "gemm.h"

#ifdef HAS_FP16

/* As `MicroTile` (gemm.h). */
INLINE void tile(const Gemm *t, int rows, int panels, int64_t row, int64_t panel,
                 const char *ahead, int64_t prefetch_step) {
    int64_t ldx = even(t->k), apart = t->panel_bytes;
    const int16_t *x = t->converted_x + row * ldx;
    const char *w = t->w + panel * apart;
    vf total[MR][PANELS_AT_ONCE][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) total[r][p][0] = total[r][p][1] = splat(0);
    for (int64_t left = ldx; left > 0; left -= FP16_DEPTHS) {
        __m512h acc[MR][PANELS_AT_ONCE][2];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int p = 0; p < panels; p++)
                acc[r][p][0] = acc[r][p][1] = _mm512_setzero_ph();
        const int16_t *end = x + (left < FP16_DEPTHS ? left : FP16_DEPTHS);
        for (; x < end; x += 2, w += 4 * NR, ahead += prefetch_step) {
            UNROLL for (int line = 0; line < 4 * NR * panels; line += 64)
                fetch_to_l2(ahead + line);
            UNROLL for (int p = 0; p < panels; p++) {
                __m512h low = _mm512_loadu_ph(w + p * apart);
                __m512h high = _mm512_loadu_ph(w + p * apart + 2 * NR);
                UNROLL for (int r = 0; r < rows; r++) {
                    __m512h both = splat_word(x + r * ldx);
                    acc[r][p][0] = _mm512_fmadd_ph(low, both, acc[r][p][0]);
                    acc[r][p][1] = _mm512_fmadd_ph(high, both, acc[r][p][1]);
                }
            }
        }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int p = 0; p < panels; p++) {
                __m512i sum = add_words(acc[r][p][0], acc[r][p][1]);
                total[r][p][0] += lower_fp16(sum);
                total[r][p][1] += upper_fp16(sum);
            }
    }
    UNROLL for (int p = 0; p < panels; p++) {
        const float *scales = (const float *)(w + p * apart);
        UNROLL for (int r = 0; r < rows; r++) {
            float x_scale = t->x_scales[row + r];
            total[r][p][0] *= load(scales) * x_scale;
            total[r][p][1] *= load(scales + VL) * x_scale;
            put(t, row + r, panel + p, total[r][p]);
        }
    }
}

MICRO_TILES_OF(fp16)

void fp16_row(const float *x, int64_t k, int16_t *numbers, float *scale) {
    __m512i most = _mm512_setzero_si512();
    int64_t i = 0;
    float inverse;
    for (; i + VL <= k; i += VL) most = _mm512_max_epi32(most, magnitude_of(load(x + i)));
    int32_t top = _mm512_reduce_max_epi32(most), bits;
    for (int64_t j = i; j < k; j++) {
        memcpy(&bits, x + j, sizeof bits);
        bits &= INT32_MAX, top = bits > top ? bits : top;
    }
    *scale = scale_below(top, &inverse);
    for (i = 0; i + VL <= k; i += VL) store_fp16(numbers + i, load(x + i) * inverse);
    for (; i < k; i++) numbers[i] = (int16_t)_cvtss_sh(x[i] * inverse, 0);
    if (k & 1) numbers[k] = 0;
}

/* A row of bfloat16 weights [k] to output j of a panel. */
void fp16_pack(const uint16_t *w, int64_t k, int64_t j, char *panel) {
    int32_t top = 0;
    for (int64_t d = 0; d < k; d++) top = (w[d] & 0x7fff) > top ? w[d] & 0x7fff : top;
    int32_t exponent = top >> 7;
    exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
    float inverse = float_of((uint32_t)(254 - exponent) << 23);
    uint16_t *to = (uint16_t *)panel + (j & 1) * NR + (j & ~1);
    for (int64_t d = 0; d < k; d++)
        to[(d & ~1) * NR + (d & 1)] = _cvtss_sh(bf16_to_float(w[d]) * inverse, 0);
    ((float *)(panel + depth_at(even(k), FP16)))[j] = float_of((uint32_t)exponent << 23);
}

#else /* never asked for */

MicroTiles fp16_tiles = {0};
void fp16_row(const float *x, int64_t k, int16_t *numbers, float *scale) {}
void fp16_pack(const uint16_t *w, int64_t k, int64_t j, char *panel) {}

#endif
