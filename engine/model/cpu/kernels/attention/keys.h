/* What a tile of attention does with keys and values: fetching, turning and multiplying them. */
#pragma once

#include "../gemm/amx.h"
#include "../gemm/fp16.h"
#include "../gemm/int16.h"
#include "../gemm/layout.h"
#include "attention.h"

#define KEYS_LD (KEYS + VL) /* a row of keys turned: a vector may end behind the last key */

/* Keys [first, stop) of a KV split that goes on until `end`, all within KEYS positions from `base` on; a
 * row sees none before `floor`, and none beyond its window (0: none). */
typedef struct {
    const int32_t *table;
    int64_t kv_head, base, first, stop, end, floor, window;
} Keys;

/* What the next keys lie in is fetched while these are computed, some bytes at every turn: blocks lie far
 * apart, where the hardware does not look ahead. */
typedef struct {
    const Attention *a;
    const int32_t *table;
    int64_t kv_head, pos, end; /* the run that comes next begins at `pos` */
    const char *at;
    int64_t left; /* bytes of the run that `at` is in */
    const int32_t *next; /* the item that is likely to follow on this thread, or NULL */
} Prefetch;

/* Where an item's keys begin. */
static void next_item(Prefetch *f) {
    const Attention *a = f->a;
    const int32_t *item = f->next;
    int64_t seq = item[0], end = a->context_len[seq] - a->query_len[seq] + item[3];
    KvSplits s = kv_splits(a->window, a->num_sinks, end - (item[3] - item[2]), end);
    f->table = a->tables + seq * a->table_stride, f->kv_head = item[1] / a->shares, f->next = NULL;
    split_keys(&s, item[4] < 0 ? 0 : item[4], &f->pos, &f->end);
}

static void next_run(Prefetch *f) {
    if (f->pos >= f->end && f->next) next_item(f);
    if (f->pos >= f->end) return;
    int64_t run = run_length(f->a, f->pos, f->end), size = kv_size(f->a);
    f->at = (const char *)f->a->pool + kv_at(f->a, f->table, f->kv_head, f->pos) * size;
    f->left = run * f->a->head_dim * size, f->pos += run;
}

/* Where the next `bytes` lie that are to be fetched; the last ones again if there are no more. */
INLINE const char *take(Prefetch *f, int64_t bytes) {
    if (f->left <= 0) next_run(f);
    const char *at = f->at;
    if (f->left > 0) f->at += bytes, f->left -= bytes;
    return at;
}

/* Keys from `first` on, before `end`: those of the first chunk at once. */
static void prefetch_start(Prefetch *f, const Keys *k, int64_t end) {
    f->table = k->table, f->kv_head = k->kv_head, f->pos = k->first, f->end = end;
    f->at = f->a->pool, f->left = 0;
    int64_t chunk = (k->first / KEYS + 1) * KEYS;
    while (f->left > 0 || (f->pos < end && f->pos < chunk)) __builtin_prefetch(take(f, 64));
}

/* c[rows, cols] = (keep ? c : 0) + a[rows, depth] @ b[depth, cols], of floats or, `low_precision`, of pairs
 * of bfloat16, fp16 or integers, those two times `scales` [rows]; cols is a multiple of VL, of those two
 * of NR. Whatever is multiplied at once, a number of c is summed from the first depth to the last. `ahead` may
 * be NULL. */
INLINE void product(int low_precision, int keep, int64_t rows, int64_t cols, int64_t depth,
                    const void *a, int64_t row, int64_t step, const void *b, int64_t ldb, float *c,
                    int64_t ldc, const float *scales, Prefetch *ahead, int64_t prefetch_step) {
#define MICRO(R, COLS) \
    if (low_precision == FP16) \
        micro_fp16(R, depth, (const word *)a + i * row, row, step, (const word *)b + j, ldb, to, \
                     ldc, keep, scales + i, at); \
    else if (low_precision == INT16) \
        micro_int16(R, depth, (const word *)a + i * row, row, step, (const word *)b + j, ldb, to, \
                       ldc, keep, scales + i, at); \
    else if (low_precision == BF16_PAIRS) \
        micro_pairs(R, COLS, depth, (const word *)a + i * row, row, step, (const word *)b + j, ldb, \
                    to, ldc, keep, at); \
    else \
        micro(R, COLS, depth, (const float *)a + i * row, row, step, (const float *)b + j, ldb, to, \
              ldc, keep, NULL, at, prefetch_step);
#define WIDE(R) case R: MICRO(R, 2) break;
#define NARROW(R) case R: MICRO(R, 1) break;
    for (int64_t j = 0; j < cols; j += NR) {
        const char *at = ahead ? take(ahead, depth * prefetch_step) : (const char *)b;
        for (int64_t i = 0, n; i < rows; i += n) {
            float *to = c + i * ldc + j;
            n = even_rows(rows - i);
            if (cols - j >= NR)
                switch (n) { EACH_ROWS(WIDE) }
            else
                switch (n) { EACH_ROWS(NARROW) }
        }
    }
#undef MICRO
#undef WIDE
#undef NARROW
}

INLINE void fetch_beside(void *with, int half) {
    const char **at = with;
    for (int i = 0; *at && !half && i < AMX_TILE; i++, *at += 64) __builtin_prefetch(*at);
}

/* The same of tiles (amx.h), up to two of them in rows: what a and c have up to a whole number of tiles is
 * read and written. */
INLINE void amx_product(int keep, int64_t rows, int64_t cols, int64_t depth, const word *a,
                          int64_t row, const word *b, int64_t ldb, float *c, int64_t ldc,
                          Prefetch *ahead) {
    for (int64_t j = 0; j < cols; j += NR) {
        const char *at = ahead ? take(ahead, depth * 64) : NULL;
        amx_rows(rows, depth, a, row, 0, b + j, ldb, c + j, ldc, keep, fetch_beside, &at);
    }
}

/* `count` rows of words, `width` long, turned by a quarter: to[w, i] = from[i, w], rows KEYS_LD
 * apart; what lies `ahead` of them is fetched. Up to VL - 1 numbers behind each of `to`'s rows are
 * overwritten. */
INLINE void transpose(const float *from, int64_t count, int64_t width, float *to, int64_t ahead) {
    for (int64_t i = 0; i < count; i += VL) {
        const float *at[VL];
        UNROLL for (int64_t j = 0; j < VL; j++)
            at[j] = from + (i + j < count ? i + j : count - 1) * width;
        for (int64_t w = 0; w < width; w += VL) {
            vf rows[VL];
            UNROLL for (int64_t j = 0; j < VL; j++) {
                rows[j] = load(at[j] + w);
                __builtin_prefetch(at[j] + w + ahead);
            }
            transpose_lanes(rows);
            UNROLL for (int64_t j = 0; j < VL; j++) store(to + (w + j) * KEYS_LD + i, rows[j]);
        }
    }
}

/* Two values side by side, as pairs; the second may be NULL. */
INLINE void pair_values(const uint16_t *first, const uint16_t *second, word *to, int64_t width) {
    for (int64_t d = 0; d < width; d += 2 * VL) {
        vh2 low = *(const vh2u *)(first + d), high = {0};
        if (second) high = *(const vh2u *)(second + d);
        *(vuu *)(to + d) = (vu)interleave(low, high, 0);
        *(vuu *)(to + d + VL) = (vu)interleave(low, high, VL);
    }
}

/* Of fp16 and integers a key has a scale, and so has a value: a power of two. */
INLINE int has_scales(int low_precision) { return low_precision == FP16 || low_precision == INT16; }

INLINE vu max_magnitudes(vu a, vu b) { /* of both numbers of a word, without a sign */
#if defined(__AVX512BW__)
    return (vu)_mm512_max_epu16((__m512i)a, (__m512i)b);
#else
    vp more = (vp)a > (vp)b;
    return (a & (vu)more) | (b & ~(vu)more);
#endif
}

/* An exponent of bfloat16 from the largest magnitude. */
INLINE vu exponent_of(vu most) { return (vu)max_int((vi)(most >> 7), EXPONENT - (vi){0}); }

/* The scale of numbers that become halves from 1 to 2, or integers of KEY_BITS, if they have this exponent. */
INLINE vf scale_of(int kind, vu exponent) { /* not a number where one was not finite */
    vu nan = (vu)(exponent == 255), down = (kind == INT16 ? KEY_BITS - 1 : 0) - (vu){0};
    return (vf)((exponent - down) << 23 | (nan & 0x7fc00000u));
}

/* What numbers of these exponents are times to be integers. */
INLINE vf inverse_scales(vu exponent) { return (vf)((254 + KEY_BITS - 1 - exponent) << 23); }

/* Words of keys, [half, KEYS_LD], of which those of [from, to) are there. Beside them lie others' integers: as
 * floats those are denormal, and to multiply them takes a CPU a hundred times as long. */
INLINE void scale_keys(int kind, word *keys, int64_t half, int64_t from, int64_t to, float *scales) {
    for (int64_t i = 0; i < KEYS; i += VL) {
        vu most = {0};
        store(scales + i, splat(0));
        if (i + VL <= from || i >= to) continue;
        for (int64_t w = 0; i < from && w < half; w++)
            *(vuu *)(keys + w * KEYS_LD + i) &= (vu)(lane_numbers() + (int32_t)i >= (int32_t)from);
        for (int64_t w = 0; w < half; w++)
            most = max_magnitudes(most, *(const vuu *)(keys + w * KEYS_LD + i) & BF16_MAGNITUDES);
        vu exponent = exponent_of((vu)max_int((vi)(most >> 16), (vi)(most & 0xffff)));
        store(scales + i, scale_of(kind, exponent));
        vf inverse = inverse_scales(exponent);
        for (int64_t w = 0; w < half; w++) {
            vuu *at = (vuu *)(keys + w * KEYS_LD + i);
            *at = kind == FP16 ? fp16_words(*at, exponent, exponent) : int16_words(*at, inverse, inverse);
        }
    }
}

/* Up to VL pairs of values, [count, ld] words of which `width` are meant, become fp16; 2 * VL scales are
 * written. */
INLINE void fp16_some(word *pairs, int64_t count, int64_t width, int64_t ld, float *scales) {
    vf of_each[VL] = {{0}};
    vu most = {0}, exponents[2];
    for (int64_t i = 0; i < count; i++) {
        vu sizes = {0};
        for (int64_t d = 0; d < width; d += VL)
            sizes = max_magnitudes(sizes, *(const vuu *)(pairs + i * ld + d) & BF16_MAGNITUDES);
        of_each[i] = (vf)sizes;
    }
    transpose_lanes(of_each);
    UNROLL for (int i = 0; i < VL; i++) most = max_magnitudes(most, (vu)of_each[i]);
    exponents[0] = exponent_of(most & 0xffff), exponents[1] = exponent_of(most >> 16);
    vf first = scale_of(FP16, exponents[0]), second = scale_of(FP16, exponents[1]);
    vi turns = (lane_numbers() >> 1) + (lane_numbers() & 1) * VL;
    store(scales, shuffle_lanes(first, second, turns));
    store(scales + VL, shuffle_lanes(first, second, turns + VL / 2));
    for (int64_t i = 0; i < count; i++)
        for (int64_t d = 0; d < width; d += VL) {
            vuu *at = (vuu *)(pairs + i * ld + d);
            *at = fp16_words(*at, exponents[0][i] - (vu){0}, exponents[1][i] - (vu){0});
        }
}

INLINE void fp16_values(word *pairs, int64_t count, int64_t width, int64_t ld, float *scales) {
    for (int64_t i = 0; i < count; i += VL)
        fp16_some(pairs + i * ld, count - i < VL ? count - i : VL, width, ld, scales + 2 * i);
}
