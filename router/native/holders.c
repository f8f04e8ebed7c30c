/* Sets of holders, each kept once, and the change of one holder. */
#include "holders.h"

static holders inline_of(const holder *found, uint32_t count) {
    holders h = count;
    for (uint32_t i = 0; i < count; i++)
        h |= (uint64_t)(found[i].slot << 4 | found[i].facts) << (4 + HOLDER_BITS * i);
    return h;
}

static void pool_put(pool *p, uint64_t hash, set *made) {
    uint32_t mask = p->capacity - 1, i = hash & mask;
    while (p->at[i].made != NULL)
        i = (i + 1) & mask;
    p->at[i] = (pooled){hash, made};
}

static void pool_grow(sets *all, pool *p) {
    pool old = *p;
    p->capacity = old.capacity ? 2 * old.capacity : 16;
    p->at = checked(calloc(p->capacity, sizeof(pooled)));
    for (uint32_t i = 0; i < old.capacity; i++)
        if (old.at[i].made != NULL)
            pool_put(p, old.at[i].hash, old.at[i].made);
    free(old.at);
    all->num_bytes += (p->capacity - old.capacity) * sizeof(pooled);
}

/* The one set that equals the scratch, with one more reference. */
static set *intern(sets *all) {
    set *wanted = all->scratch;
    pool *p = &all->pools[wanted->hash >> 58];
    if (4 * (p->used + 1) > 3 * p->capacity)
        pool_grow(all, p);
    uint32_t mask = p->capacity - 1;
    size_t size = set_bytes(wanted->num_words);
    for (uint32_t i = wanted->hash & mask; p->at[i].made != NULL; i = (i + 1) & mask) {
        set *made = p->at[i].made;
        if (p->at[i].hash == wanted->hash && made->num_words == wanted->num_words &&
            memcmp(made->words, wanted->words, size - sizeof(set)) == 0) {
            made->refs++;
            return made;
        }
    }
    set *made = checked(malloc(size));
    memcpy(made, wanted, size);
    made->refs = 1;
    pool_put(p, made->hash, made);
    p->used++;
    all->num_bytes += size;
    all->num_sets++;
    return made;
}

static void set_release(sets *all, set *gone) {
    if (--gone->refs)
        return;
    pool *p = &all->pools[gone->hash >> 58];
    uint32_t mask = p->capacity - 1, hole = gone->hash & mask;
    while (p->at[hole].made != gone)
        hole = (hole + 1) & mask;
    for (uint32_t i = (hole + 1) & mask; p->at[i].made != NULL; i = (i + 1) & mask) {
        uint32_t home = p->at[i].hash & mask;
        if (((i - home) & mask) >= ((i - hole) & mask)) {
            p->at[hole] = p->at[i];
            hole = i;
        }
    }
    p->at[hole].made = NULL;
    p->used--;
    if (gone == all->memo_from || gone == all->memo_to)
        all->memo_from = NULL;
    all->num_bytes -= set_bytes(gone->num_words);
    all->num_sets--;
    free(gone);
}

void sets_free(sets *all) {
    for (int i = 0; i < NUM_POOLS; i++) {
        for (uint32_t j = 0; j < all->pools[i].capacity; j++)
            free(all->pools[i].at[j].made);
        free(all->pools[i].at);
    }
    free(all->scratch);
}

/* -- one block's holders ----------------------------------------------------------------------- */

uint32_t list_holders(holders h, holder *found, uint32_t limit) {
    uint32_t count = num_inline(h);
    if (count || h == 0) {
        for (uint32_t i = 0; i < count; i++)
            found[i] = inline_at(h, i);
        return count;
    }
    const set *s = as_set(h);
    for (uint32_t i = 0; i < s->num_words; i++)
        for (uint64_t left = s->words[i]; left && count < limit;) {
            uint32_t nibble = __builtin_ctzll(left) / 4;
            uint32_t facts = left >> (4 * nibble) & 15;
            found[count++] = (holder){word_indexes(s)[i] * SLOTS_PER_WORD + nibble, facts};
            left &= ~(15ull << (4 * nibble));
        }
    return count;
}

/* `list` with the facts of `slot` set (0: it is no holder any more). Returns the new length. */
static uint32_t list_with(holder *list, uint32_t count, uint32_t slot, uint32_t facts) {
    uint32_t at = 0;
    while (at < count && list[at].slot < slot)
        at++;
    uint32_t there = at < count && list[at].slot == slot;
    if (facts && !there) {
        memmove(list + at + 1, list + at, (count - at) * sizeof(holder));
        count++;
    } else if (!facts && there) {
        memmove(list + at, list + at + 1, (count - at - 1) * sizeof(holder));
        return count - 1;
    }
    if (facts)
        list[at] = (holder){slot, facts};
    return count;
}

static holders set_of(sets *all, const holder *list, uint32_t count) {
    set *made = all->scratch;
    uint16_t at[MAX_INLINE + 1];
    made->hash = made->num_words = 0;
    made->num_holders = count;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t index = list[i].slot / SLOTS_PER_WORD;
        if (made->num_words == 0 || at[made->num_words - 1] != index) {
            at[made->num_words] = index;
            made->words[made->num_words++] = 0;
        }
        uint64_t bits = (uint64_t)list[i].facts << (4 * (list[i].slot % SLOTS_PER_WORD));
        made->words[made->num_words - 1] |= bits;
        made->hash ^= holder_hash(list[i].slot, list[i].facts);
    }
    memcpy(word_indexes(made), at, made->num_words * sizeof(uint16_t));
    return (uintptr_t)intern(all);
}

/* `old` with the facts of `slot` changed from `before` to `facts`. */
static set *set_with(sets *all, const set *old, uint32_t slot, uint32_t before, uint32_t facts) {
    set *made = all->scratch;
    uint32_t index = slot / SLOTS_PER_WORD, shift = 4 * (slot % SLOTS_PER_WORD);
    uint32_t i = find_word(old, index), n = old->num_words;
    uint32_t there = i < n && word_indexes(old)[i] == index;
    uint64_t word = (there ? old->words[i] : 0) ^ (uint64_t)(before ^ facts) << shift;
    uint32_t rest = i + there; /* words of the old set from here on follow */
    made->num_words = i + (word != 0) + n - rest;
    made->num_holders = old->num_holders + (facts != 0) - (before != 0);
    made->hash = old->hash ^ holder_hash(slot, before) ^ holder_hash(slot, facts);
    uint16_t *at = word_indexes(made);
    memcpy(made->words, old->words, i * sizeof(uint64_t));
    memcpy(at, word_indexes(old), i * sizeof(uint16_t));
    if (word) {
        made->words[i] = word;
        at[i] = index;
    }
    memcpy(made->words + i + (word != 0), old->words + rest, (n - rest) * sizeof(uint64_t));
    memcpy(at + i + (word != 0), word_indexes(old) + rest, (n - rest) * sizeof(uint16_t));
    return intern(all);
}

holders holders_with(sets *all, holders h, uint32_t slot, uint32_t before, uint32_t facts) {
    holder list[MAX_INLINE + 2];
    if (h == 0 || num_inline(h)) {
        uint32_t count = list_with(list, list_holders(h, list, MAX_INLINE), slot, facts);
        return count <= MAX_INLINE ? (count ? inline_of(list, count) : 0)
                                   : set_of(all, list, count);
    }
    set *old = as_set(h), *made;
    if (old->num_holders == MAX_INLINE + 1 && facts == 0) {
        uint32_t count = list_holders(h, list, MAX_INLINE + 1);
        set_release(all, old);
        return inline_of(list, list_with(list, count, slot, 0));
    }
    uint64_t change = (uint64_t)slot << 8 | before << 4 | facts;
    if (all->memo_from == old && all->memo_change == change) {
        made = all->memo_to;
        made->refs++;
    } else {
        made = set_with(all, old, slot, before, facts);
        all->memo_from = old;
        all->memo_to = made;
        all->memo_change = change;
    }
    set_release(all, old);
    return (uintptr_t)made;
}
