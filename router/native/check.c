/* Whether all that is kept of the index agrees with itself. */
#include "prefix_index.h"

#define EXPECT(truth, text)                                                                        \
    do {                                                                                           \
        if (!(truth))                                                                              \
            return text;                                                                           \
    } while (0)

static int has_tag(const slot *own, uint32_t tag) {
    for (uint32_t low = 0, high = own->num_tags; low < high;) {
        uint32_t middle = (low + high) / 2;
        if (own->tags[middle] == tag)
            return 1;
        if (own->tags[middle] < tag)
            low = middle + 1;
        else
            high = middle;
    }
    return 0;
}

static const char *check_holder(store *all, block_hash block, holder each, slot *counted) {
    EXPECT(each.slot < all->num_slots, "a block has a holder without a slot");
    EXPECT(all->slots[each.slot].state != FREE, "a block has a holder whose slot is free");
    EXPECT(each.facts != 0, "a block has a holder with nothing known of it");
    EXPECT(has_tag(&all->slots[each.slot], tag_of(block)), "a block is not in its holder's list");
    EXPECT((each.facts & (DEVICE | EXPECTED)) != (DEVICE | EXPECTED),
           "a block is expected where it is in device memory");
    count_facts(&counted[each.slot], 0, each.facts);
    return NULL;
}

static const char *check_set(sets *all, set *s) {
    uint64_t hash = 0, count = 0;
    for (uint32_t i = 0; i < s->num_words; i++) {
        EXPECT(s->words[i] != 0, "a set has an empty word");
        EXPECT(i == 0 || word_indexes(s)[i - 1] < word_indexes(s)[i],
               "the words of a set do not ascend");
        for (uint32_t n = 0; n < SLOTS_PER_WORD; n++) {
            uint32_t facts = s->words[i] >> (4 * n) & 15;
            hash ^= holder_hash(word_indexes(s)[i] * SLOTS_PER_WORD + n, facts);
            count += facts != 0;
        }
    }
    EXPECT(hash == s->hash, "a set does not have its hash");
    EXPECT(count == s->num_holders && count > MAX_INLINE, "a set does not have its size");
    pool *p = &all->pools[hash >> 58];
    uint32_t i = hash & (p->capacity - 1);
    while (p->at[i].made != s && p->at[i].made != NULL)
        i = (i + 1) & (p->capacity - 1);
    EXPECT(p->at[i].made == s, "a set is not found by its hash");
    return NULL;
}

static const char *check_blocks(store *all, slot *counted, holder *list, uint64_t *num_refs) {
    for (uint32_t number = 0; number < NUM_SHARDS; number++) {
        const shard *s = &all->blocks.shards[number];
        uint32_t used = 0;
        for (uint32_t i = 0; i < s->capacity; i++) {
            entry each = s->entries[i];
            if (each.holders == 0)
                continue;
            uint32_t tag = tag_of(each.hash);
            EXPECT(shard_of(&all->blocks, tag) == s, "a block is in another's table");
            EXPECT(bucket_for(s, each.hash, tag) == i, "a block is not found where it is");
            used++;
            if (num_inline(each.holders) == 0) {
                ++*num_refs;
                const char *wrong = check_set(&all->sets, as_set(each.holders));
                EXPECT(wrong == NULL, wrong);
            }
            uint32_t count = list_holders(each.holders, list, MAX_SLOTS);
            for (uint32_t j = 0; j < count; j++) {
                const char *wrong = check_holder(all, each.hash, list[j], counted);
                EXPECT(wrong == NULL, wrong);
            }
        }
        EXPECT(used == s->used, "a table does not have its size");
    }
    return NULL;
}

static const char *check_slots(const store *all, const expected *e, const slot *counted) {
    uint32_t num_closed = 0;
    for (uint32_t i = 0; i < all->num_slots; i++) {
        const slot *own = &all->slots[i];
        EXPECT(memcmp(own->counts, counted[i].counts, sizeof own->counts) == 0,
               "a slot does not have its number of blocks in a tier");
        EXPECT(own->live == counted[i].live, "a slot does not have its number of blocks");
        num_closed += own->state == CLOSED;
    }
    EXPECT(num_closed == all->num_closed, "the number of closed slots is wrong");
    EXPECT(e->count <= e->max, "more is expected than may be");
    uint64_t num_expected = 0;
    for (uint32_t i = 0; i < all->num_slots; i++)
        if (all->slots[i].state == OPEN)
            num_expected += all->slots[i].counts[3];
    EXPECT(num_expected <= e->count, "a block is expected without an end");
    return NULL;
}

const char *check_all(store *all, const expected *e) {
    slot *counted = checked(calloc(all->num_slots + 1, sizeof(slot)));
    holder *list = checked(malloc(MAX_SLOTS * sizeof(holder)));
    uint64_t num_refs = 0, refs = 0;
    for (uint32_t i = 0; i < all->num_slots; i++)
        order_tags(all, i);
    const char *wrong = check_blocks(all, counted, list, &num_refs);
    if (wrong == NULL)
        wrong = check_slots(all, e, counted);
    free(counted);
    free(list);
    for (int i = 0; i < NUM_POOLS; i++)
        for (uint32_t j = 0; j < all->sets.pools[i].capacity; j++)
            if (all->sets.pools[i].at[j].made)
                refs += all->sets.pools[i].at[j].made->refs;
    if (wrong == NULL && refs != num_refs)
        wrong = "sets are not referred to as often as they count";
    return wrong;
}
