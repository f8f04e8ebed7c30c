/* The ring of expected blocks. */
#include "expected.h"

#define EXPECTED_AHEAD 16

static expectation *nth_expected(const expected *e, uint32_t n) {
    uint64_t at = (uint64_t)e->first + n;
    return &e->ring[at < e->max ? at : at - e->max];
}

static void drop_oldest(store *all, expected *e) {
    const expectation *oldest = nth_expected(e, 0);
    if (e->count > EXPECTED_AHEAD)
        prefetch_tag(&all->blocks, tag_of(nth_expected(e, EXPECTED_AHEAD)->block));
    if (all->slots[oldest->number].opened == oldest->opened)
        change_block(all, oldest->number, oldest->block, 0, EXPECTED);
    e->first = e->first + 1 == e->max ? 0 : e->first + 1;
    e->count--;
}

void expire(store *all, expected *e, double now, uint64_t budget) {
    for (; budget && e->count && nth_expected(e, 0)->until <= now; budget--)
        drop_oldest(all, e);
}

void expect_block(store *all, expected *e, uint32_t number, block_hash block, double until) {
    if (e->max == 0)
        return;
    if (e->ring == NULL)
        e->ring = checked(malloc(e->max * sizeof(expectation)));
    if (!change_block(all, number, block, EXPECTED, 0))
        return;
    if (e->count == e->max)
        drop_oldest(all, e);
    *nth_expected(e, e->count++) = (expectation){until, block, number, all->slots[number].opened};
}
