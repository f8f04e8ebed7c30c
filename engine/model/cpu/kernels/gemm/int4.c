/* y = x @ W^T (+ bias) with 4-bit weights (layout.h), which are what decoding reads: half of int8's.
 *
 * A weight is an integer from 0 to 15 times its group's scale, and its group's offset. x is quantized to
 * 8 bits, a scale for each group of a row: four products at once then, and their sums in a group are int32,
 * thus exact. The offset is times the sum of the group's inputs. Scaled in float32, one group after the
 * other, a row's result is the same whatever other rows there are. */
#include "gemm.h"
#include "int16.h"

#define MOST_OF_INT8 127
#define AT_ONCE 8 /* depths, that ahead is fetched for */

/* sum += products of four unsigned bytes, 15 at most, with four signed ones. */
INLINE vi add_quads(vi sum, vu weights, vu inputs) {
#if defined(__AVX512VNNI__) && VL == 16
    sum = (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)inputs);
#elif defined(__AVX512BW__) && VL == 16
    __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, (__m512i)inputs);
    sum += (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVXVNNI__) && VL == 8
    sum = (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)inputs);
#elif defined(__AVX2__) && VL == 8
    __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, (__m256i)inputs);
    sum += (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    UNROLL for (int i = 0; i < 4; i++)
        sum += (vi)(weights >> 8 * i & 0xff) * ((vi)(inputs << (24 - 8 * i)) >> 24);
#endif
    IN_ORDER(sum);
    return sum;
}

/* Four depths of a row in all lanes. */
INLINE vu splat_quad(const int8_t *x) {
    uint32_t quad;
    memcpy(&quad, x, sizeof quad);
    return quad - (vu){0};
}

/* As `MicroTile` (gemm.h). */
INLINE void tile(const Gemm *t, int rows, int panels, int64_t row, int64_t panel, const char *ahead,
                 int64_t prefetch_step) {
    const int64_t ldx = 2 * converted_width(t->k, INT4), scales = 2 * num_groups(t->k, INT4);
    const int8_t *x = (const int8_t *)t->converted_x + row * ldx;
    const float *x_scales = t->x_scales + row * scales;
    const int64_t apart = t->panel_bytes;
    const char *w = t->w + panel * apart;
    vf total[MR][PANELS_AT_ONCE][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) total[r][p][0] = total[r][p][1] = splat(0);
    for (int64_t left = padded(t->k, INT4); left > 0; left -= INT4_GROUP, x_scales += 2) {
        int64_t depth = left < INT4_GROUP ? left : INT4_GROUP;
        vi acc[MR][PANELS_AT_ONCE][2];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int p = 0; p < panels; p++) acc[r][p][0] = acc[r][p][1] = (vi){0};
        for (int64_t d = 0; d < depth; d += AT_ONCE, ahead += prefetch_step) {
            if (VL == 8 && panels > 1)
                UNROLL for (int p = 0; p < panels; p++) __builtin_prefetch(w + p * apart + NEAR);
            else
                UNROLL for (int line = 0; line < 4 * NR * panels; line += 64) fetch_to_l2(ahead + line);
            UNROLL for (int i = 0; i < AT_ONCE; i += 4, x += 4, w += 2 * NR)
                UNROLL for (int p = 0; p < panels; p++) {
                    vu words = *(const vuu *)(w + p * apart);
                    vu low = words & 0x0f0f0f0f, high = words >> 4 & 0x0f0f0f0f;
                    UNROLL for (int r = 0; r < rows; r++) {
                        vu quad = splat_quad(x + r * ldx);
                        acc[r][p][0] = add_quads(acc[r][p][0], low, quad);
                        acc[r][p][1] = add_quads(acc[r][p][1], high, quad);
                    }
                }
        }
        UNROLL for (int p = 0; p < panels; p++) {
            vf scale[2], offset[2];
            widen_bf16(w + p * apart, &scale[0], &scale[1]);
            widen_bf16(w + p * apart + 2 * NR, &offset[0], &offset[1]);
            UNROLL for (int r = 0; r < rows; r++) {
                vf x_scale = splat(x_scales[r * scales]), x_sum = splat(x_scales[r * scales + 1]);
                UNROLL for (int i = 0; i < 2; i++)
                    total[r][p][i] += float_of_sum(acc[r][p][i]) * (scale[i] * x_scale) + offset[i] * x_sum;
            }
        }
        w += 4 * NR;
    }
    UNROLL for (int p = 0; p < panels; p++)
        UNROLL for (int r = 0; r < rows; r++) put(t, row + r, panel + p, total[r][p]);
}

MICRO_TILES_OF(int4)

void int4_row(const float *x, int64_t k, int16_t *converted, float *x_scales) {
    int8_t *numbers = (int8_t *)converted;
    int16_t wide[INT4_GROUP];
    for (int64_t at = 0; at < k; at += INT4_GROUP, x_scales += 2) {
        int64_t left = k - at, count = left < INT4_GROUP ? left : INT4_GROUP;
        float scale = quantize(x + at, count, MOST_OF_INT8, wide);
        int32_t sum = 0;
        for (int64_t i = 0; i < count; i++) {
            numbers[at + i] = (int8_t)wide[i];
            sum += wide[i];
        }
        x_scales[0] = scale, x_scales[1] = scale * sum;
    }
    memset(numbers + k, 0, padded(k, INT4) - k);
}

/* A row of weights [k], each a byte, to output j of a panel of zeros; scales: of each group the scale and
 * the offset, bfloat16. */
void int4_pack(const uint8_t *w, const uint16_t *scales, int64_t k, int64_t j, char *panel) {
    for (int64_t d = 0; d < k; d++)
        panel[depth_at(d & ~3, INT4) + j % VL * 4 + (d & 3)] |= w[d] << (j < VL ? 0 : 4);
    for (int64_t g = 0; g < num_groups(k, INT4); g++) {
        int64_t first = g * INT4_GROUP, left = padded(k, INT4) - first;
        int64_t size = left < INT4_GROUP ? left : INT4_GROUP;
        uint16_t *to = (uint16_t *)(panel + depth_at(first, INT4) + size * NR / 2);
        to[bf16_place(j)] = scales[2 * g], to[NR + bf16_place(j)] = scales[2 * g + 1];
    }
}
