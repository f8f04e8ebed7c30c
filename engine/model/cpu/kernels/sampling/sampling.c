/* From logits to tokens, as engine/model/sampling/sampler.py says what is to be drawn.
 *
 * The smallest weight that top-k and top-p keep is found by bisection over the bits of a float32:
 * those of positive floats are ordered as the floats, and a pass over a row in the cache costs less
 * than sorting a part of it. Sums are of float32 in a span of tokens, then of float64. The draw is a
 * race: a token's time is -log(1 - luck) / weight, and the first one is drawn. */
#include "../activation.h"
#include "../thread_pool.h"
#include "api.h"

#define SPAN (16 * VL)
#define ELEMENTS 8192 /* of one task, where each is computed alone */
#define ONE 0x3f800000 /* bits of 1.0f, the largest weight */

static uint64_t mixed(uint64_t word) { /* splitmix64 */
    word += 0x9e3779b97f4a7c15u;
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9u;
    word = (word ^ word >> 27) * 0x94d049bb133111ebu;
    return word ^ word >> 31;
}

INLINE int any_lane(vi v) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0;
#elif defined(__AVX__) && VL == 8
    return !_mm256_testz_si256((__m256i)v, (__m256i)v);
#else
    int32_t some = 0;
    for (int i = 0; i < VL; i++) some |= v[i];
    return some != 0;
#endif
}

/* Uniform in (0, 1), of the tokens `ids`. */
INLINE vf luck(vu ids, uint64_t key) {
    vu word = ids * 0x9e3779b1u ^ (uint32_t)key;
    word = (word ^ word >> 16) * 0x7feb352du;
    word = ((word ^ word >> 15) + (uint32_t)(key >> 32)) * 0x846ca68bu;
    word ^= word >> 16;
    return vmin((__builtin_convertvector(word, vf) + 0.5f) * 0x1p-32f, splat(0x1.fffffep-1f));
}

/* Numbers i to i + VL of a row; `fill` past its end. */
INLINE vf part(const float *row, int64_t i, int64_t size, float fill) {
    if (i + VL <= size) return load(row + i);
    vf v = splat(fill);
    memcpy(&v, row + i, sizeof(float) * (size - i));
    return v;
}

/* The first of the largest; NO_TOKEN if it is not finite, or some are NaN. */
static int64_t find_best(const float *row, int64_t size, float *largest) {
    vf best = splat(-INFINITY);
    vi best_at = {0}, at, nan = {0};
    for (int i = 0; i < VL; i++) at[i] = i;
    for (int64_t i = 0; i < size; i += VL, at += VL) {
        vf v = part(row, i, size, -INFINITY);
        vi more = v > best;
        nan |= v != v;
        best = vmax(best, v);
        best_at = (at & more) | (best_at & ~more);
    }
    int64_t found = best_at[0];
    *largest = best[0];
    for (int i = 1; i < VL; i++)
        if (best[i] > *largest || (best[i] == *largest && best_at[i] < found))
            *largest = best[i], found = best_at[i];
    for (int i = 0; i < VL; i++)
        if (nan[i]) return NO_TOKEN;
    return *largest > -INFINITY && *largest < INFINITY ? found : NO_TOKEN;
}

/* Not normalized: the largest weight is 1, and only ratios matter from here on. */
static void weigh(float *row, int64_t size, float largest, float temperature) {
    for (int64_t i = 0; i < size; i += VL) {
        vf weight = vexp((part(row, i, size, largest) - largest) / temperature);
        memcpy(row + i, &weight, sizeof(float) * (i + VL <= size ? VL : size - i));
    }
}

/* What the tokens of a span that begins at `from` weigh, of those of at least `bits`. */
INLINE double span_mass(const float *row, int64_t from, int64_t size, int32_t bits, vi *count) {
    int64_t to = from + SPAN < size ? from + SPAN : size;
    vf sum = splat(0);
    for (int64_t i = from; i < to; i += VL) {
        vi weight = (vi)part(row, i, size, 0), kept = weight >= bits;
        sum += (vf)(weight & kept);
        *count -= kept;
    }
    return sum_lanes(sum);
}

/* How many tokens weigh at least the float of `bits` > 0, and what they weigh together. */
static int64_t mass_from(const float *row, int64_t size, int32_t bits, double *mass) {
    vi count = {0};
    int64_t tokens = 0;
    *mass = 0;
    for (int64_t from = 0; from < size; from += SPAN)
        *mass += span_mass(row, from, size, bits, &count);
    for (int i = 0; i < VL; i++) tokens += count[i];
    return tokens;
}

/* The largest bits that at least `count` tokens reach, which weigh at least `mass` together. */
static int32_t bisect(const float *row, int64_t size, int64_t count, double mass) {
    int32_t low = 0, high = ONE + 1;
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        double reached;
        int enough = mass_from(row, size, middle, &reached) >= count && reached >= mass;
        *(enough ? &low : &high) = middle;
    }
    return low;
}

/* Bits of the smallest weight that is kept. Tokens that tie with the last one kept are kept. */
static int32_t cut(const float *row, int64_t size, const Draw *d) {
    float least = d->min_p < 1 ? d->min_p : 1;
    int32_t bits, kept = 0;
    memcpy(&bits, &least, sizeof bits);
    bits = bits > 1 ? bits : 1; /* no weight: no token */
    double total;
    if (d->top_k > 0 && d->top_k < size) {
        /* Of the tokens that tie at the cut, only those within top_k count for top-p. */
        kept = bisect(row, size, d->top_k, 0);
        float tie;
        memcpy(&tie, &kept, sizeof tie);
        int64_t above = mass_from(row, size, kept + 1, &total);
        total += (double)(d->top_k - above) * tie;
    } else if (d->top_p < 1.0) {
        mass_from(row, size, 1, &total);
    }
    if (d->top_p < 1.0) {
        int32_t nucleus = bisect(row, size, 1, (d->top_p > 0 ? d->top_p : 0) * total);
        kept = nucleus > kept ? nucleus : kept;
    }
    return kept > bits ? kept : bits;
}

/* The first one of the tokens that weigh at least `bits`. As -log(1 - x) is not below x, only few of
 * them need their logarithm: those that would be before the first one so far without it. */
static int64_t race(const float *row, int64_t size, int32_t bits, uint64_t key) {
    float best = INFINITY;
    int64_t found = NO_TOKEN;
    vu ids = (vu)lane_numbers();
    for (int64_t i = 0; i < size; i += VL, ids += VL) {
        vf weight = part(row, i, size, 0), number = luck(ids, key), time = number / weight;
        vi may = ((vi)weight >= bits) & (time < best);
        if (!any_lane(may)) continue;
        for (int j = 0; j < VL; j++) {
            time[j] = may[j] ? -log1pf(-number[j]) / weight[j] : INFINITY;
            if (time[j] < best) best = time[j], found = i + j;
        }
    }
    return found;
}

typedef struct {
    float *logits;
    int64_t vocab;
    const Draw *draws;
    int64_t *tokens;
} Rows;

enum { WORD_BITS = 32 };

static void apply_mask(float *row, int64_t size, const uint32_t *mask) {
    for (int64_t from = 0; from < size; from += WORD_BITS) {
        uint32_t bits = mask[from / WORD_BITS];
        int64_t count = size - from < WORD_BITS ? size - from : WORD_BITS;
        if (bits == UINT32_MAX) continue;
        for (int64_t i = 0; i < count; i++)
            row[from + i] = bits >> i & 1 ? row[from + i] : -INFINITY;
    }
}

#define IN_PROMPT (1LL << 32)

/* The token at a position of a context comes, or goes. */
static void add(Counts *c, int64_t at, int64_t sign) {
    int64_t i = 0;
    while (i < c->num_ids && c->ids[i] != c->tokens[at]) i++;
    if (i == c->num_ids) c->ids[c->num_ids++] = c->tokens[at], c->times[i] = 0;
    c->times[i] += sign * (at < c->num_prompt ? IN_PROMPT : 1);
}

void kvr_count(Counts *c, int32_t token) {
    c->tokens[c->length] = token;
    add(c, c->length++, 1);
    if (c->window && c->length > c->window) add(c, c->length - 1 - c->window, -1);
}

static void penalize(float *row, int64_t size, const Draw *d) {
    const Counts *c = d->counts;
    float penalty = d->repetition_penalty;
    for (int64_t i = 0; i < c->num_ids; i++) {
        if (!c->times[i] || c->ids[i] < 0 || c->ids[i] >= size) continue;
        float *at = row + c->ids[i];
        int64_t output = c->times[i] % IN_PROMPT;
        *at = *at > 0 ? *at / penalty : *at * penalty;
        __asm__ volatile("" ::: "memory"); /* it is rounded, as by torch, before more is subtracted */
        if (output) *at -= (float)(d->presence_penalty + d->frequency_penalty * output);
    }
}

static void draw_row(void *arg, int64_t r) {
    const Rows *t = arg;
    const Draw *d = t->draws + r;
    float *row = t->logits + r * t->vocab, largest;
    t->tokens[r] = NO_TOKEN;
    if (d->temperature < 0) return;
    if (d->mask) apply_mask(row, t->vocab, d->mask);
    if (d->counts) penalize(row, t->vocab, d);
    t->tokens[r] = find_best(row, t->vocab, &largest);
    if (d->temperature == 0 || t->tokens[r] == NO_TOKEN) return;
    weigh(row, t->vocab, largest, d->temperature);
    uint64_t key = mixed(mixed(d->seed) ^ d->position * 0x9e3779b97f4a7c15u);
    t->tokens[r] = race(row, t->vocab, cut(row, t->vocab, d), key);
}

void kvr_draw(float *logits, int64_t rows, int64_t vocab, const Draw *draws, int64_t *tokens,
              int threads) {
    Rows t = {logits, vocab, draws, tokens};
    kvr_parallel(threads, rows, draw_row, &t);
}

typedef struct {
    float *logits;
    int64_t count;
    float cap;
} Cap;

static void cap_task(void *arg, int64_t task) {
    const Cap *t = arg;
    int64_t first = task * ELEMENTS, left = t->count - first;
    for (int64_t i = 0; i < ELEMENTS && i < left; i += VL) {
        float *at = t->logits + first + i;
        vf capped = vtanh(part(at, 0, left - i, 0) / t->cap) * t->cap;
        memcpy(at, &capped, sizeof(float) * (left - i < VL ? left - i : VL));
    }
}

void kvr_cap(float *logits, int64_t count, float cap, int threads) {
    Cap t = {logits, count, cap};
    kvr_parallel(threads, (count + ELEMENTS - 1) / ELEMENTS, cap_task, &t);
}
