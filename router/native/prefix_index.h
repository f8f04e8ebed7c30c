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
 * asks about: it sees no others. */
void index_expect_looked_up(prefix_index *x, uint32_t number, const uint8_t *block_hashes,
                            uint32_t count, uint32_t from, double now, double until);

/* What is wrong; NULL: nothing. O(everything), for tests. */
const char *check_all(store *all, const expected *e);
