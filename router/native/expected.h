/* Blocks that are expected in a worker's device memory, each until its time is over.
 *
 * A ring in the order in which they were told. It has a fixed size; when it is full, the oldest is
 * given up. What is expected already, or is there, is not told again: so a block that came, went and
 * is expected once more may end with what it was first told.
 */
#ifndef KVRELAY_EXPECTED_H
#define KVRELAY_EXPECTED_H

#include "slots.h"

#define EXPECTED_AHEAD 16

typedef struct {
    double until;
    name which;
    uint32_t number, opened; /* the slot, and which of its lives */
} expectation;

typedef struct {
    expectation *ring;
    uint32_t max, first, count;
} expected;

static expectation *nth_expected(const expected *e, uint32_t n) {
    uint64_t at = (uint64_t)e->first + n;
    return &e->ring[at < e->max ? at : at - e->max];
}

static void drop_oldest(store *all, expected *e) {
    const expectation *oldest = nth_expected(e, 0);
    if (e->count > EXPECTED_AHEAD)
        prefetch_tag(&all->blocks, tag_of(nth_expected(e, EXPECTED_AHEAD)->which));
    if (all->slots[oldest->number].opened == oldest->opened)
        change_block(all, oldest->number, oldest->which, 0, EXPECTED);
    e->first = e->first + 1 == e->max ? 0 : e->first + 1;
    e->count--;
}

static void expire(store *all, expected *e, double now, uint64_t budget) {
    for (; budget && e->count && nth_expected(e, 0)->until <= now; budget--)
        drop_oldest(all, e);
}

static void expect_block(store *all, expected *e, uint32_t number, name which, double until) {
    if (e->max == 0)
        return;
    if (e->ring == NULL)
        e->ring = checked(malloc(e->max * sizeof(expectation)));
    if (!change_block(all, number, which, EXPECTED, 0))
        return;
    if (e->count == e->max)
        drop_oldest(all, e);
    *nth_expected(e, e->count++) = (expectation){until, which, number, all->slots[number].opened};
}

#endif
