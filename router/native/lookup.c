/* The walk of a lookup over a prompt. */
#include "lookup.h"

#define AHEAD 8
#define NUM_WALKED 16  /* blocks at the beginning that are asked about one by one */
#define NUM_STRIDES 64 /* a longer prompt gets longer strides instead of more, .. */
#define MAX_LONGER 4   /* .. up to so many times as long */

uint64_t answers(uint64_t facts) {
    const uint64_t ones = 0x1111111111111111u;
    uint64_t device = facts & ones, host = facts >> 1 & ones, disk = facts >> 2 & ones;
    uint64_t in_device = device | (facts >> 3 & ones), in_memory = in_device | host;
    return in_device | in_memory << 1 | (in_memory | disk) << 2 | (device | host | disk) << 3;
}

static void note_end(search *s, uint32_t index, uint64_t lost, uint32_t length) {
    if (lost && length > s->longest)
        s->longest = length;
    while (lost) {
        uint32_t nibble = __builtin_ctzll(lost) / 4;
        uint32_t bits = lost >> (4 * nibble) & 15;
        uint32_t *own = s->ends + (index * SLOTS_PER_WORD + nibble) * NUM_RUNS;
        for (int run = 0; run < NUM_RUNS; run++)
            if (bits >> run & 1)
                own[run] = length;
        lost &= ~(15ull << (4 * nibble));
    }
}

/* What `now` lost of `before` (it has nothing that `before` has not) ended with `length`. */
static void note_ends(search *s, const runs *before, const runs *now, uint32_t length) {
    uint32_t j = 0;
    for (uint32_t i = 0; i < before->num_words; i++) {
        int there = j < now->num_words && now->word_indexes[j] == before->word_indexes[i];
        uint64_t lost = before->words[i] & ~(there ? now->words[j] : 0);
        j += there;
        note_end(s, before->word_indexes[i], lost, length);
    }
}

/* out = what is left of `left` where the holders are `who`. Returns whether that is all of it.
 * `out` may be `left`. */
static int intersect_holders(runs *out, const runs *left, holders h) {
    uint64_t room[MAX_INLINE];
    uint16_t room_indexes[MAX_INLINE];
    const uint64_t *words;
    const uint16_t *at;
    uint32_t n = words_of(h, room, room_indexes, &words, &at), i = 0, j = 0, kept = 0;
    int same = 1;
    while (i < left->num_words && j < n) {
        if (left->word_indexes[i] < at[j]) {
            same = 0;
            i++;
        } else if (left->word_indexes[i] > at[j]) {
            j++;
        } else {
            uint64_t word = left->words[i] & answers(words[j]);
            same &= word == left->words[i];
            if (word) {
                out->words[kept] = word;
                out->word_indexes[kept++] = left->word_indexes[i];
            }
            i++;
            j++;
        }
    }
    same &= i == left->num_words;
    out->num_words = kept;
    return same;
}

uint32_t stride_for(uint32_t count, uint32_t stride) {
    uint32_t wanted = count / NUM_STRIDES;
    if (wanted > MAX_LONGER * stride)
        wanted = MAX_LONGER * stride;
    return wanted > stride ? wanted : stride;
}

/* The block to ask about after `position`: one of the first ones, the next stride, or the last. */
static uint32_t step_after(uint32_t position, uint32_t count, uint32_t stride) {
    uint32_t is_walked = position + 1 < NUM_WALKED && position + 1 < stride;
    uint64_t next = (uint64_t)position + (is_walked ? 1 : stride);
    return next < count ? next : count - 1;
}

uint32_t next_asked(uint32_t position, uint32_t count, uint32_t stride) {
    uint32_t walked = NUM_WALKED < stride ? NUM_WALKED : stride;
    if (position < walked || position + 1 >= count)
        return position < count ? position : count;
    uint64_t next = walked - 1 + (uint64_t)(position - walked + stride) / stride * stride;
    return next < count ? next : count - 1;
}

static holders holders_at(const search *s, uint32_t position) {
    return find_holders(s->blocks, hash_at(s->block_hashes, position));
}

/* Take from `high` what `mid` has not. */
static void intersect(runs *high, const runs *mid) {
    uint32_t kept = 0, j = 0;
    for (uint32_t i = 0; i < high->num_words; i++) {
        while (j < mid->num_words && mid->word_indexes[j] < high->word_indexes[i])
            j++;
        int there = j < mid->num_words && mid->word_indexes[j] == high->word_indexes[i];
        uint64_t word = high->words[i] & (there ? mid->words[j] : 0);
        if (word) {
            high->word_indexes[kept] = high->word_indexes[i];
            high->words[kept++] = word;
        }
    }
    high->num_words = kept;
}

/* `low` is what is left after block `from`, `high` after block `to`, and it is less: note where the
 * difference ended. What the blocks between do not have is taken from `high` too. */
static void bisect(search *s, uint32_t depth, uint32_t from, const runs *low, uint32_t to,
                  runs *high) {
    if (to == from + 1) {
        note_ends(s, low, high, to);
        return;
    }
    uint32_t middle = from + (to - from) / 2;
    runs *mid = &s->scratch[depth];
    if (!intersect_holders(mid, low, holders_at(s, middle)))
        bisect(s, depth + 1, from, low, middle, mid);
    intersect(high, mid);
    if (mid->num_words != high->num_words ||
        memcmp(mid->words, high->words, mid->num_words * sizeof(uint64_t)))
        bisect(s, depth + 1, middle, mid, to, high);
}

void find_runs(search *s, uint32_t count, uint32_t stride) {
    s->longest = 0;
    runs *left = &s->scratch[0], *next = &s->scratch[1];
    uint32_t last = 0, ahead = 0;
    holders h = holders_at(s, 0), before = h;
    uint64_t room[MAX_INLINE];
    uint16_t room_indexes[MAX_INLINE];
    const uint64_t *words;
    const uint16_t *at;
    left->num_words = words_of(h, room, room_indexes, &words, &at);
    for (uint32_t i = 0; i < left->num_words; i++) {
        left->words[i] = answers(words[i]);
        left->word_indexes[i] = at[i];
    }
    while (left->num_words && last + 1 < count) {
        for (int more = ahead ? 1 : AHEAD; more && ahead + 1 < count; more--) {
            ahead = step_after(ahead, count, stride);
            prefetch_tag(s->blocks, tag_of(hash_at(s->block_hashes, ahead)));
        }
        uint32_t to = step_after(last, count, stride);
        h = holders_at(s, to);
        if (h != before) {
            if (!intersect_holders(next, left, h)) {
                bisect(s, 2, last, left, to, next);
                runs swap = *left;
                *left = *next;
                *next = swap;
            }
            before = h;
        }
        last = to;
    }
    for (uint32_t i = 0; i < left->num_words; i++)
        note_end(s, left->word_indexes[i], left->words[i], count);
}
