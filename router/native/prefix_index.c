/* Calls of the prefix index, see kvrelay_router.h. */
#include "prefix_index.h"

#define BATCH 16
#define TIDY_MIN 1024
#define TIDY_LOOKUP 512
#define MOST_EXPECTED 64 /* blocks of a prompt that may count as cached before the worker says so */

prefix_index *kvr_index_new(uint32_t stride, uint32_t max_expected) {
    prefix_index *x = checked(calloc(1, sizeof *x));
    x->all.sets.scratch = checked(malloc(set_bytes(MAX_SLOTS / SLOTS_PER_WORD + 1)));
    x->stride = stride;
    x->coming.max = max_expected;
    return x;
}

void kvr_index_free(prefix_index *x) {
    for (uint32_t i = 0; i < x->all.slots_room; i++)
        free(x->all.slots[i].tags);
    for (uint32_t i = 0; i < MAX_DEPTH + 2; i++) {
        free(x->search.scratch[i].words);
        free(x->search.scratch[i].word_indexes);
    }
    table_free(&x->all.blocks);
    sets_free(&x->all.sets);
    free(x->all.slots);
    free(x->coming.ring);
    free(x);
}

void kvr_index_tidy(prefix_index *x, double now, uint64_t budget) {
    expire(&x->all, &x->coming, now, budget);
    drain(&x->all, budget);
}

int64_t kvr_index_open(prefix_index *x, uint32_t group) {
    int64_t number = open_slot(&x->all, group);
    if (number < 0 && x->all.num_closed) {
        drain(&x->all, UINT64_MAX);
        number = open_slot(&x->all, group);
    }
    return number;
}

void kvr_index_close(prefix_index *x, uint32_t number) { close_slot(&x->all, number); }

void kvr_index_regroup(prefix_index *x, uint32_t number, uint32_t group) {
    x->all.slots[number].group = group;
}

void kvr_index_change(prefix_index *x, uint32_t number, const uint8_t *block_hashes, uint64_t count,
                  uint32_t add, uint32_t drop) {
    for (uint64_t i = 0; i < count; i++) {
        if (i + BATCH < count)
            prefetch_tag(&x->all.blocks, tag_of(hash_at(block_hashes, i + BATCH)));
        change_block(&x->all, number, hash_at(block_hashes, i), add, drop);
    }
    drain(&x->all, TIDY_MIN + 2 * count);
}

void kvr_index_drop_all(prefix_index *x, uint32_t number, uint32_t facts) {
    order_tags(&x->all, number);
    for (uint32_t i = 0; i < x->all.slots[number].num_tags; i++) {
        if (i + BATCH < x->all.slots[number].num_tags)
            prefetch_tag(&x->all.blocks, x->all.slots[number].tags[i + BATCH]);
        drop_tagged(&x->all, number, x->all.slots[number].tags[i], facts);
    }
}

void kvr_index_expect(prefix_index *x, uint32_t number, const uint8_t *block_hashes, uint64_t count,
                  double now, double until) {
    kvr_index_tidy(x, now, TIDY_MIN + 2 * count);
    for (uint64_t i = 0; i < count && i < BATCH; i++)
        prefetch_tag(&x->all.blocks, tag_of(hash_at(block_hashes, i)));
    for (uint64_t i = 0; i < count; i++) {
        if (i + BATCH < count)
            prefetch_tag(&x->all.blocks, tag_of(hash_at(block_hashes, i + BATCH)));
        expect_block(&x->all, &x->coming, number, hash_at(block_hashes, i), until);
    }
}

void index_expect_looked_up(prefix_index *x, uint32_t number, const uint8_t *block_hashes,
                            uint32_t count, uint32_t from, uint32_t mark_group, double now,
                            double until) {
    uint32_t stride = stride_for(count, x->stride);
    kvr_index_tidy(x, now, TIDY_MIN + 2 * MOST_EXPECTED);
    for (uint32_t i = next_asked(from, count, stride); i < count && i < from + MOST_EXPECTED;
         i = next_asked(i + 1, count, stride))
        expect_block(&x->all, &x->coming, number, hash_at(block_hashes, i), until);
    if (mark_group && from < count) {
        block_hash last = hash_at(block_hashes, count - 1);
        expect_block(&x->all, &x->coming, number, hash_of_group(last, mark_group), until);
    }
}

void kvr_index_lookup(prefix_index *x, double now, const uint8_t *block_hashes, uint32_t count,
                  uint32_t *ends) {
    expire(&x->all, &x->coming, now, TIDY_LOOKUP);
    uint32_t num_words = x->all.slots_room / SLOTS_PER_WORD + 1;
    if (num_words > x->scratch_words) {
        for (uint32_t i = 0; i < MAX_DEPTH + 2; i++) {
            runs *r = &x->search.scratch[i];
            r->words = checked(realloc(r->words, num_words * sizeof(uint64_t)));
            r->word_indexes = checked(realloc(r->word_indexes, num_words * sizeof(uint16_t)));
        }
        x->scratch_words = num_words;
    }
    x->search.blocks = &x->all.blocks;
    x->search.block_hashes = block_hashes;
    x->search.ends = ends;
    if (count == 0)
        return;
    uint32_t stride = stride_for(count, x->stride);
    find_runs(&x->search, count, stride);
    uint32_t longest = x->search.longest; /* what follows is likely to be expected soon */
    for (uint32_t i = next_asked(longest, count, stride); i < count && i < longest + MOST_EXPECTED;
         i = next_asked(i + 1, count, stride))
        prefetch_tag(&x->all.blocks, tag_of(hash_at(block_hashes, i)));
}

/* Each run ends at the last row, up to its end, whose mark is there with its facts. `open` are the
 * runs whose mark is still looked for, those of a slot side by side, as `answers` has them. */
void index_end_at_marks(prefix_index *x, const uint8_t *block_hashes, uint32_t group,
                        uint32_t num_slots, uint32_t *ends) {
    uint64_t *open = x->search.scratch[0].words, room[MAX_INLINE];
    uint16_t room_indexes[MAX_INLINE];
    uint32_t num_open = 0, num_runs = num_slots * NUM_RUNS, next_end = 0;
    memset(open, 0, (num_slots / SLOTS_PER_WORD + 1) * sizeof *open);
    for (uint32_t i = 0; i < num_runs; i++)
        next_end = ends[i] > next_end ? ends[i] : next_end;
    for (uint32_t row = next_end; row > 0; row = num_open ? row - 1 : next_end) {
        if (row == next_end) {
            next_end = 0;
            for (uint32_t i = 0; i < num_runs; i++) {
                open[i / 64] |= (uint64_t)(ends[i] == row) << i % 64;
                num_open += ends[i] == row;
                next_end = ends[i] < row && ends[i] > next_end ? ends[i] : next_end;
            }
        }
        if (row > BATCH) {
            block_hash soon = hash_at(block_hashes, row - 1 - BATCH);
            prefetch_tag(&x->all.blocks, tag_of(hash_of_group(soon, group)));
        }
        const uint64_t *words;
        const uint16_t *at;
        block_hash mark = hash_of_group(hash_at(block_hashes, row - 1), group);
        uint32_t n = words_of(find_holders(&x->all.blocks, mark), room, room_indexes, &words, &at);
        for (uint32_t w = 0; w < n; w++) {
            uint64_t found = answers(words[w]) & open[at[w]];
            open[at[w]] &= ~found;
            num_open -= __builtin_popcountll(found);
            for (; found; found &= found - 1)
                ends[at[w] * 64 + __builtin_ctzll(found)] = row;
        }
    }
    for (uint32_t i = 0; i < num_runs; i++)
        ends[i] = open[i / 64] >> i % 64 & 1 ? 0 : ends[i];
}

uint32_t kvr_index_best(prefix_index *x, const uint32_t *ends, uint32_t num_slots, uint32_t group,
                    uint32_t limit, uint16_t *found) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < num_slots && i < x->all.num_slots; i++) {
        const slot *own = &x->all.slots[i];
        uint32_t total = ends[NUM_RUNS * i + 2], at = count;
        if (total == 0 || own->state != OPEN || own->group != group)
            continue;
        for (; at; at--) {
            uint32_t other = ends[NUM_RUNS * found[at - 1] + 2];
            if (other > total || (other == total && x->all.slots[found[at - 1]].returned_at <=
                                                        own->returned_at))
                break;
            if (at < limit)
                found[at] = found[at - 1];
        }
        if (at < limit) {
            found[at] = i;
            count += count < limit;
        }
    }
    for (uint32_t i = 0; i < count; i++)
        x->all.slots[found[i]].returned_at = ++x->num_answers;
    return count;
}

void kvr_index_count(prefix_index *x, const uint8_t *block_hashes, uint64_t count,
                     uint32_t *counts) {
    for (uint64_t i = 0; i < count; i++) {
        if (i + BATCH < count)
            prefetch_tag(&x->all.blocks, tag_of(hash_at(block_hashes, i + BATCH)));
        uint64_t room[MAX_INLINE];
        uint16_t room_indexes[MAX_INLINE];
        const uint64_t *words;
        const uint16_t *at;
        holders h = find_holders(&x->all.blocks, hash_at(block_hashes, i));
        uint32_t n = words_of(h, room, room_indexes, &words, &at);
        for (uint32_t w = 0; w < n; w++)
            for (uint64_t left = words[w] & 0x7777777777777777u; left; left &= left - 1) {
                uint32_t bit = __builtin_ctzll(left);
                counts[(at[w] * SLOTS_PER_WORD + bit / 4) * 3 + bit % 4]++;
            }
    }
}

void kvr_index_export(prefix_index *x, uint32_t number, uint8_t *device, uint8_t *host,
                      uint8_t *disk) {
    uint8_t *ends[3] = {device, host, disk};
    order_tags(&x->all, number);
    const slot *own = &x->all.slots[number];
    for (uint32_t i = 0; i < own->num_tags; i++) {
        if (i + BATCH < own->num_tags)
            prefetch_tag(&x->all.blocks, own->tags[i + BATCH]);
        shard *s = shard_of(&x->all.blocks, own->tags[i]);
        uint32_t at = home_of(s, own->tags[i]);
        while ((at = tagged(s, own->tags[i], at, number, 15)) != NO_BUCKET) {
            uint32_t facts = facts_of(s->entries[at].holders, number);
            for (int tier = 0; tier < 3; tier++)
                if (facts >> tier & 1 && ends[tier]) {
                    memcpy(ends[tier], &s->entries[at].hash, HASH_BYTES);
                    ends[tier] += HASH_BYTES;
                }
            at = next_bucket(s, at);
        }
    }
}

uint64_t kvr_index_held(const prefix_index *x, uint32_t number, uint32_t facts) {
    uint64_t total = 0;
    for (int i = 0; i < 4; i++)
        total += facts >> i & 1 ? x->all.slots[number].counts[i] : 0;
    return total;
}

uint64_t kvr_index_num_blocks(const prefix_index *x) { return x->all.blocks.num_blocks; }

uint64_t kvr_index_num_bytes(const prefix_index *x) {
    uint64_t ring_bytes = x->coming.ring ? x->coming.max * sizeof(expectation) : 0;
    return x->all.blocks.num_bytes + x->all.sets.num_bytes + x->all.tags_bytes +
           x->all.slots_room * sizeof(slot) + ring_bytes + sizeof *x;
}

const char *kvr_index_check(prefix_index *x) { return check_all(&x->all, &x->coming); }
