/* The holders of a block: pairs of a worker's slot and the facts known of the block there.
 *
 * They are one 64-bit word. Up to three holders are in the word itself; more are a set, to which
 * the word points. Sets never change and equal ones are kept once: the blocks of a prompt that the
 * same workers hold share a set, and two blocks have the same holders if their words are equal. A
 * set counts the words that point to it, and is freed with the last.
 */
#pragma once

#include "kvrelay_router.h"
#include "memory.h"

#define MAX_SLOTS 65535

#define MAX_INLINE 3
#define HOLDER_BITS 20 /* a slot of 16 bits and facts of 4 */
#define SLOTS_PER_WORD 16

typedef uint64_t holders; /* low 2 bits: number in the word itself, or 0: pointer to a set, or 0 */

typedef struct {
    uint32_t slot, facts; /* facts are not 0 */
} holder;

typedef struct {
    uint64_t hash;
    uint32_t refs, num_holders, num_words;
    uint64_t words[]; /* 4 bits for each slot; none is 0; then their indexes, ascending */
} set;

static inline uint64_t mix64(uint64_t x) {
    x ^= x >> 31;
    x *= 0x9e3779b97f4a7c15u;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9u;
    return x ^ (x >> 32);
}

static inline uint64_t holder_hash(uint32_t slot, uint32_t facts) {
    return facts ? mix64(((uint64_t)slot << 4 | facts) + 0x632be59bd9b4e019u) : 0;
}

static inline uint16_t *word_indexes(const set *s) { return (uint16_t *)(s->words + s->num_words); }

static inline size_t set_bytes(uint32_t num_words) { return sizeof(set) + num_words * 10ul; }

static inline uint32_t num_inline(holders h) { return h & 3; }

static inline set *as_set(holders h) { return (set *)(uintptr_t)h; }

static inline holder inline_at(holders h, uint32_t i) {
    uint32_t bits = h >> (4 + HOLDER_BITS * i);
    return (holder){bits >> 4 & 0xffff, bits & 15};
}

/* Sets by their hash: a table for each 1/64 of the hashes, so that none takes long to grow. */

#define NUM_POOLS 64

typedef struct {
    uint64_t hash;
    set *made;
} pooled;

typedef struct {
    pooled *at; /* open addressing; `made` is NULL where nothing is */
    uint32_t capacity, used;
} pool;

typedef struct {
    pool pools[NUM_POOLS];
    set *scratch; /* room for a set of all words */
    /* The last change of a set: the next block of a prompt usually needs the same. */
    set *memo_from, *memo_to;
    uint64_t memo_change;
    uint64_t num_bytes, num_sets;
} sets;

/* Number of the first word whose index is not below `index`. */
static inline uint32_t find_word(const set *s, uint32_t index) {
    const uint16_t *at = word_indexes(s);
    uint32_t low = 0, high = s->num_words;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (at[middle] < index)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static inline uint32_t facts_of(holders h, uint32_t slot) {
    for (uint32_t i = 0; i < num_inline(h); i++) {
        holder each = inline_at(h, i);
        if (each.slot == slot)
            return each.facts;
    }
    if (h == 0 || num_inline(h))
        return 0;
    const set *s = as_set(h);
    uint32_t i = find_word(s, slot / SLOTS_PER_WORD);
    if (i == s->num_words || word_indexes(s)[i] != slot / SLOTS_PER_WORD)
        return 0;
    return s->words[i] >> (4 * (slot % SLOTS_PER_WORD)) & 15;
}

/* Holders as words and their indexes. `room` is for holders that are no set: [MAX_INLINE]. */
static inline uint32_t words_of(holders h, uint64_t *room, uint16_t *room_indexes,
                                const uint64_t **words, const uint16_t **at) {
    uint32_t count = num_inline(h), n = 0;
    if (count == 0 && h) {
        *words = as_set(h)->words;
        *at = word_indexes(as_set(h));
        return as_set(h)->num_words;
    }
    for (uint32_t i = 0; i < count; i++) {
        holder each = inline_at(h, i);
        uint32_t index = each.slot / SLOTS_PER_WORD;
        if (n == 0 || room_indexes[n - 1] != index) {
            room_indexes[n] = index;
            room[n++] = 0;
        }
        room[n - 1] |= (uint64_t)each.facts << (4 * (each.slot % SLOTS_PER_WORD));
    }
    *words = room;
    *at = room_indexes;
    return n;
}

void sets_free(sets *all);

/* The first holders in a word or set, ascending by slot; at most `limit`. */
uint32_t list_holders(holders h, holder *found, uint32_t limit);

/* `h` with the facts of `slot` changed from `before` to `facts`; the reference to `h` is spent. */
holders holders_with(sets *all, holders h, uint32_t slot, uint32_t before, uint32_t facts);
