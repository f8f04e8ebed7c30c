/* What a tile of attention does with keys and values: fetching, turning and multiplying them. */
#ifndef KVRELAY_ATTENTION_KEYS_H
#define KVRELAY_ATTENTION_KEYS_H

#include "attention.h"
#include "halves.h"
#include "integers.h"
#include "tiles.h"

#define TURNED (KEYS + VL) /* a row of keys turned: a vector may end behind the last key */

/* Keys [first, stop) of a stretch that goes on until `end`, all within KEYS positions from `base` on; a
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
} Ahead;

/* Where an item's keys begin. */
static void go_on(Ahead *f) {
    const Attention *a = f->a;
    const int32_t *item = f->next;
    int64_t seq = item[0], end = a->context_len[seq] - a->query_len[seq] + item[3];
    Stretches s = stretches(a->window, a->num_sinks, end - (item[3] - item[2]), end);
    f->table = a->tables + seq * a->table_stride, f->kv_head = item[1] / a->shares, f->next = NULL;
    stretch_keys(&s, item[4] < 0 ? 0 : item[4], &f->pos, &f->end);
}

static void next_run(Ahead *f) {
    if (f->pos >= f->end && f->next) go_on(f);
    if (f->pos >= f->end) return;
    int64_t run = run_length(f->a, f->pos, f->end), size = kv_size(f->a);
    f->at = (const char *)f->a->pool + kv_at(f->a, f->table, f->kv_head, f->pos) * size;
    f->left = run * f->a->head_dim * size, f->pos += run;
}

/* Where the next `bytes` lie that are to be fetched; the last ones again if there are no more. */
INLINE const char *take(Ahead *f, int64_t bytes) {
    if (f->left <= 0) next_run(f);
    const char *at = f->at;
    if (f->left > 0) f->at += bytes, f->left -= bytes;
    return at;
}

/* Keys from `first` on, before `end`: those of the first chunk at once. */
static void look_ahead(Ahead *f, const Keys *k, int64_t end) {
    f->table = k->table, f->kv_head = k->kv_head, f->pos = k->first, f->end = end;
    f->at = f->a->pool, f->left = 0;
    int64_t chunk = (k->first / KEYS + 1) * KEYS;
    while (f->left > 0 || (f->pos < end && f->pos < chunk)) __builtin_prefetch(take(f, 64));
}

/* c[rows, cols] = (keep ? c : 0) + a[rows, depth] @ b[depth, cols], of floats or, `narrowed`, of pairs
 * of bfloat16, half floats or integers, those two times `units` [rows]; cols is a multiple of VL, of those two
 * of NR. Whatever is multiplied at once, a number of c is summed from the first depth to the last. `ahead` may
 * be NULL. */
INLINE void product(int narrowed, int keep, int64_t rows, int64_t cols, int64_t depth,
                    const void *a, int64_t row, int64_t step, const void *b, int64_t ldb, float *c,
                    int64_t ldc, const float *units, Ahead *ahead, int64_t pace) {
#define MICRO(R, COLS) \
    if (narrowed == HALVES) \
        micro_halves(R, depth, (const word *)a + i * row, row, step, (const word *)b + j, ldb, to, \
                     ldc, keep, units + i, at); \
    else if (narrowed == INT16) \
        micro_integers(R, depth, (const word *)a + i * row, row, step, (const word *)b + j, ldb, to, \
                       ldc, keep, units + i, at); \
    else if (narrowed == PAIRS) \
        micro_pairs(R, COLS, depth, (const word *)a + i * row, row, step, (const word *)b + j, ldb, \
                    to, ldc, keep, at); \
    else \
        micro(R, COLS, depth, (const float *)a + i * row, row, step, (const float *)b + j, ldb, to, \
              ldc, keep, NULL, at, pace);
#define WIDE(R) case R: MICRO(R, 2) break;
#define NARROW(R) case R: MICRO(R, 1) break;
    for (int64_t j = 0; j < cols; j += NR) {
        const char *at = ahead ? take(ahead, depth * pace) : (const char *)b;
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
    for (int i = 0; *at && !half && i < TILE; i++, *at += 64) __builtin_prefetch(*at);
}

/* The same of tiles (tiles.h), up to two of them in rows: what a and c have up to a whole number of tiles is
 * read and written. */
INLINE void tiled_product(int keep, int64_t rows, int64_t cols, int64_t depth, const word *a,
                          int64_t row, const word *b, int64_t ldb, float *c, int64_t ldc,
                          Ahead *ahead) {
    for (int64_t j = 0; j < cols; j += NR) {
        const char *at = ahead ? take(ahead, depth * 64) : NULL;
        tile_rows(rows, depth, a, row, 0, b + j, ldb, c + j, ldc, keep, fetch_beside, &at);
    }
}

/* `count` rows of words, `width` long, turned by a quarter: to[w, i] = from[i, w], rows TURNED
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
            turn_lanes(rows);
            UNROLL for (int64_t j = 0; j < VL; j++) store(to + (w + j) * TURNED + i, rows[j]);
        }
    }
}

/* Two values side by side, as pairs; the second may be NULL. */
INLINE void pair_values(const uint16_t *first, const uint16_t *second, word *to, int64_t width) {
    for (int64_t d = 0; d < width; d += 2 * VL) {
        vh2 low = *(const vh2u *)(first + d), high = {0};
        if (second) high = *(const vh2u *)(second + d);
        *(vuu *)(to + d) = (vu)by_turns(low, high, 0);
        *(vuu *)(to + d + VL) = (vu)by_turns(low, high, VL);
    }
}

/* Of half floats and integers a key has a unit, and so has a value: a power of two. */
INLINE int has_units(int narrowed) { return narrowed == HALVES || narrowed == INT16; }

INLINE vu larger_sizes(vu a, vu b) { /* of both numbers of a word, without a sign */
#if defined(__AVX512BW__)
    return (vu)_mm512_max_epu16((__m512i)a, (__m512i)b);
#else
    vp more = (vp)a > (vp)b;
    return (a & (vu)more) | (b & ~(vu)more);
#endif
}

/* An exponent of bfloat16 from the largest magnitude. */
INLINE vu exponent_of(vu most) { return (vu)larger((vi)(most >> 7), EXPONENT - (vi){0}); }

/* The unit of numbers that become halves from 1 to 2, or integers of KEY_BITS, if they have this exponent. */
INLINE vf unit_of(int kind, vu exponent) { /* not a number where one was not finite */
    vu nan = (vu)(exponent == 255), down = (kind == INT16 ? KEY_BITS - 1 : 0) - (vu){0};
    return (vf)((exponent - down) << 23 | (nan & 0x7fc00000u));
}

/* What numbers of these exponents are times to be integers. */
INLINE vf inverse_units(vu exponent) { return (vf)((254 + KEY_BITS - 1 - exponent) << 23); }

/* Words of keys, [half, TURNED], of which those of [from, to) are there. Beside them lie others' integers: as
 * floats those are denormal, and to multiply them takes a CPU a hundred times as long. */
INLINE void keys_in_units(int kind, word *keys, int64_t half, int64_t from, int64_t to, float *units) {
    for (int64_t i = 0; i < KEYS; i += VL) {
        vu most = {0};
        store(units + i, splat(0));
        if (i + VL <= from || i >= to) continue;
        for (int64_t w = 0; i < from && w < half; w++)
            *(vuu *)(keys + w * TURNED + i) &= (vu)(all_lanes() + (int32_t)i >= (int32_t)from);
        for (int64_t w = 0; w < half; w++)
            most = larger_sizes(most, *(const vuu *)(keys + w * TURNED + i) & BF16_SIZES);
        vu exponent = exponent_of((vu)larger((vi)(most >> 16), (vi)(most & 0xffff)));
        store(units + i, unit_of(kind, exponent));
        vf inverse = inverse_units(exponent);
        for (int64_t w = 0; w < half; w++) {
            vuu *at = (vuu *)(keys + w * TURNED + i);
            *at = kind == HALVES ? halve_words(*at, exponent, exponent) : integer_words(*at, inverse, inverse);
        }
    }
}

/* Up to VL pairs of values, [count, ld] words of which `width` are meant, become half floats; 2 * VL units are
 * written. */
INLINE void halve_some(word *pairs, int64_t count, int64_t width, int64_t ld, float *units) {
    vf of_each[VL] = {{0}};
    vu most = {0}, exponents[2];
    for (int64_t i = 0; i < count; i++) {
        vu sizes = {0};
        for (int64_t d = 0; d < width; d += VL)
            sizes = larger_sizes(sizes, *(const vuu *)(pairs + i * ld + d) & BF16_SIZES);
        of_each[i] = (vf)sizes;
    }
    turn_lanes(of_each);
    UNROLL for (int i = 0; i < VL; i++) most = larger_sizes(most, (vu)of_each[i]);
    exponents[0] = exponent_of(most & 0xffff), exponents[1] = exponent_of(most >> 16);
    vf first = unit_of(HALVES, exponents[0]), second = unit_of(HALVES, exponents[1]);
    vi turns = (all_lanes() >> 1) + (all_lanes() & 1) * VL;
    store(units, pick_lanes(first, second, turns));
    store(units + VL, pick_lanes(first, second, turns + VL / 2));
    for (int64_t i = 0; i < count; i++)
        for (int64_t d = 0; d < width; d += VL) {
            vuu *at = (vuu *)(pairs + i * ld + d);
            *at = halve_words(*at, exponents[0][i] - (vu){0}, exponents[1][i] - (vu){0});
        }
}

INLINE void halve_values(word *pairs, int64_t count, int64_t width, int64_t ld, float *units) {
    for (int64_t i = 0; i < count; i += VL)
        halve_some(pairs + i * ld, count - i < VL ? count - i : VL, width, ld, units + 2 * i);
}

#endif
