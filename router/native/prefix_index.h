/* The prefix index. A call that changes something also takes out a few blocks of closed slots, and
 * expected ones whose time is over: about as many as it was given, so that no call has to take out
 * many.
 */
#pragma once

#include "expected.h"
#include "lookup.h"

struct prefix_index {
    store all;
    expected coming;
    search search;
    uint32_t stride, scratch_words;
    uint64_t num_answers;
};

/* As `kvr_index_expect`, for the first blocks of a prompt, from number `from` on, that a lookup
 * asks about: it sees no others. And the mark at its end, if there are marks. */
void index_expect_looked_up(prefix_index *x, uint32_t number, const uint8_t *block_hashes,
                            uint32_t count, uint32_t from, uint32_t mark_group, double now,
                            double until);

/* `ends`, as a lookup has found them of blocks of the first group: shortened to where a worker has
 * the block of `group`, too, without which it has no window to continue with. */
void index_end_at_marks(prefix_index *x, const uint8_t *block_hashes, uint32_t group,
                        uint32_t num_slots, uint32_t *ends);

/* The block of `group` with the tokens of the first group's `first` (engine.kv.block_hash). */
static inline block_hash hash_of_group(block_hash first, uint32_t group) {
    uint64_t mask = group * 0x0101010101010101u;
    return (block_hash){first.a ^ mask, first.b ^ mask};
}

/* What is wrong; NULL: nothing. O(everything), for tests. */
const char *check_all(store *all, const expected *e);
