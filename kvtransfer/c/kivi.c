/* Blocks of KV in four bits a number (KIVI, Liu et al. 2024): keys in groups of a channel of 16
 * tokens, values in groups of 32 channels of a token.
 *
 * A group has its least and its largest number as they are, and of each number which of 16 levels
 * between these is nearest. So the least and the largest come back as they were, and a group that
 * comes back has the same levels: what was encoded once is not changed by being encoded again.
 * (With a scale in place of the largest number, each time would add an error.)
 *
 * A matrix is coded as the bounds of its groups, then its levels, two in a byte, in its order.
 */
#include "kivi.h"

#include <math.h>
#include <string.h>

enum { TOKENS = 16, CHANNELS = 32, MOST = 15 };
#define LIMIT 1e36 /* of a number: sums of 15 of them are finite */

static int64_t groups_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

static inline float from_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static inline double from_float32(float number) { return number; }
static inline float to_float32(double value) { return (float)value; }

/* For numbers of a type: a group of columns (keys), and one of a row (values). `WIDE` has 4 bits
 * more than they have in the mantissa. A comparison with a NaN is false, so it is not in bounds. */
#define FOR_TYPE(NAME, NUMBER, WIDE)                                                               \
    static inline uint8_t level_##NAME(WIDE value, WIDE least, WIDE inverse) {                     \
        WIDE level = (value - least) * inverse + (WIDE)0.5;                                        \
        return (uint8_t)(int)(level < MOST ? level : MOST);                                        \
    }                                                                                              \
    static inline WIDE inverse_##NAME(WIDE least, WIDE largest) {                                  \
        WIDE inverse = largest > least ? MOST / (largest - least) : 0;                             \
        return inverse < (WIDE)LIMIT ? inverse : 0;                                                \
    }                                                                                              \
    static inline NUMBER number_##NAME(WIDE least, WIDE largest, int level) {                      \
        return to_##NAME((least * (WIDE)(MOST - level) + largest * (WIDE)level) / (WIDE)MOST);     \
    }                                                                                              \
    static int keys_##NAME(const NUMBER *in, int64_t rows, int64_t width, NUMBER *bounds,          \
                           uint8_t *levels) {                                                      \
        int good = 1;                                                                              \
        for (int64_t top = 0; top < rows; top += TOKENS, bounds += 2 * width) {                    \
            int64_t end = top + TOKENS < rows ? top + TOKENS : rows;                               \
            for (int64_t from = 0; from < width; from += CHANNELS) {                               \
                int64_t count = width - from < CHANNELS ? width - from : CHANNELS;                 \
                WIDE least[CHANNELS], largest[CHANNELS], inverse[CHANNELS];                        \
                for (int64_t c = 0; c < count; c++)                                                \
                    least[c] = largest[c] = from_##NAME(in[top * width + from + c]);               \
                for (int64_t r = top; r < end; r++)                                                \
                    for (int64_t c = 0; c < count; c++) {                                          \
                        WIDE value = from_##NAME(in[r * width + from + c]);                        \
                        good &= fabs((double)value) < LIMIT;                                       \
                        least[c] = value < least[c] ? value : least[c];                            \
                        largest[c] = value > largest[c] ? value : largest[c];                      \
                    }                                                                              \
                if (!good)                                                                         \
                    return 0;                                                                      \
                for (int64_t c = 0; c < count; c++) {                                              \
                    bounds[from + c] = to_##NAME(least[c]);                                        \
                    bounds[width + from + c] = to_##NAME(largest[c]);                              \
                    inverse[c] = inverse_##NAME(least[c], largest[c]);                             \
                }                                                                                  \
                for (int64_t r = top; r < end; r++)                                                \
                    for (int64_t c = 0; c < count; c++)                                            \
                        levels[r * width + from + c] = level_##NAME(                               \
                            from_##NAME(in[r * width + from + c]), least[c], inverse[c]);          \
            }                                                                                      \
        }                                                                                          \
        return 1;                                                                                  \
    }                                                                                              \
    static int values_##NAME(const NUMBER *in, int64_t rows, int64_t width, NUMBER *bounds,        \
                             uint8_t *levels) {                                                    \
        for (int64_t r = 0; r < rows; r++, in += width, levels += width)                           \
            for (int64_t from = 0; from < width; from += CHANNELS) {                               \
                int64_t end = from + CHANNELS < width ? from + CHANNELS : width;                   \
                WIDE least = from_##NAME(in[from]), largest = least;                               \
                int good = 1;                                                                      \
                for (int64_t c = from; c < end; c++) {                                             \
                    WIDE value = from_##NAME(in[c]);                                               \
                    good &= fabs((double)value) < LIMIT;                                           \
                    least = value < least ? value : least;                                         \
                    largest = value > largest ? value : largest;                                   \
                }                                                                                  \
                if (!good)                                                                         \
                    return 0;                                                                      \
                *bounds++ = to_##NAME(least);                                                      \
                *bounds++ = to_##NAME(largest);                                                    \
                WIDE inverse = inverse_##NAME(least, largest);                                     \
                for (int64_t c = from; c < end; c++)                                               \
                    levels[c] = level_##NAME(from_##NAME(in[c]), least, inverse);                  \
            }                                                                                      \
        return 1;                                                                                  \
    }                                                                                              \
    static void decode_keys_##NAME(const NUMBER *bounds, const uint8_t *levels, int64_t rows,      \
                                   int64_t width, NUMBER *out) {                                   \
        for (int64_t r = 0; r < rows; r++) {                                                       \
            const NUMBER *least = bounds + r / TOKENS * 2 * width, *largest = least + width;       \
            for (int64_t c = 0; c < width; c++)                                                    \
                out[r * width + c] = number_##NAME(from_##NAME(least[c]), from_##NAME(largest[c]), \
                                                   levels[r * width + c]);                         \
        }                                                                                          \
    }                                                                                              \
    static void decode_values_##NAME(const NUMBER *bounds, const uint8_t *levels, int64_t rows,    \
                                     int64_t width, NUMBER *out) {                                 \
        for (int64_t r = 0; r < rows; r++, out += width, levels += width)                          \
            for (int64_t from = 0; from < width; from += CHANNELS, bounds += 2) {                  \
                int64_t end = from + CHANNELS < width ? from + CHANNELS : width;                   \
                WIDE least = from_##NAME(bounds[0]), largest = from_##NAME(bounds[1]);             \
                for (int64_t c = from; c < end; c++)                                               \
                    out[c] = number_##NAME(least, largest, levels[c]);                             \
            }                                                                                      \
    }

FOR_TYPE(bfloat16, uint16_t, float)
FOR_TYPE(float32, float, double)

static int64_t width_of(int kind) { return kind == KVR_FLOAT32 ? 4 : 2; }

static int64_t bounds_of(int is_value, int64_t rows, int64_t width) {
    return 2 * (is_value ? rows * groups_of(width, CHANNELS) : width * groups_of(rows, TOKENS));
}

static int encode(int kind, int is_value, int64_t rows, int64_t width, const uint8_t *in,
                  void *bounds, uint8_t *levels) {
#define CASE(NAME, NUMBER)                                                                         \
    (is_value ? values_##NAME : keys_##NAME)((const NUMBER *)in, rows, width, bounds, levels)
    return kind == KVR_BFLOAT16 ? CASE(bfloat16, uint16_t) : CASE(float32, float);
#undef CASE
}

static void decode(int kind, int is_value, int64_t rows, int64_t width, const void *bounds,
                   const uint8_t *levels, uint8_t *out) {
#define CASE(NAME, NUMBER)                                                                         \
    (is_value ? decode_values_##NAME : decode_keys_##NAME)(bounds, levels, rows, width,            \
                                                           (NUMBER *)out)
    if (kind == KVR_BFLOAT16)
        CASE(bfloat16, uint16_t);
    else
        CASE(float32, float);
#undef CASE
}

int kvr_kivi_encode(int kind, int64_t pairs, int64_t run, int64_t rows, int64_t width,
                    const uint8_t *block, uint8_t *out) {
    uint8_t levels[rows * width];
    int64_t matrix = rows * width * width_of(kind);
    for (int64_t each = 0; each < 2 * pairs * run; each++, block += matrix) {
        int is_value = each / run % 2;
        int64_t bounds = bounds_of(is_value, rows, width) * width_of(kind);
        if (!encode(kind, is_value, rows, width, block, out, levels))
            return 0;
        out += bounds;
        for (int64_t i = 0; i < rows * width / 2; i++)
            out[i] = (uint8_t)(levels[2 * i] | levels[2 * i + 1] << 4);
        out += rows * width / 2;
    }
    return 1;
}

void kvr_kivi_decode(int kind, int64_t pairs, int64_t run, int64_t rows, int64_t width,
                     const uint8_t *coded, uint8_t *block) {
    uint8_t levels[rows * width];
    int64_t matrix = rows * width * width_of(kind);
    for (int64_t each = 0; each < 2 * pairs * run; each++, block += matrix) {
        int is_value = each / run % 2;
        const uint8_t *packed = coded + bounds_of(is_value, rows, width) * width_of(kind);
        for (int64_t i = 0; i < rows * width / 2; i++) {
            levels[2 * i] = packed[i] & 15;
            levels[2 * i + 1] = packed[i] >> 4;
        }
        decode(kind, is_value, rows, width, coded, levels, block);
        coded = packed + rows * width / 2;
    }
}
