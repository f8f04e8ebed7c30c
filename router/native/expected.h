/* Blocks that are expected in a worker's device memory, each until its time is over.
 *
 * They are a ring of fixed size, oldest first; when it is full, the oldest is dropped. A block that
 * is expected already, or is there, is not added again: so one that came, was evicted and is
 * expected once more may end with its first entry.
 */
#pragma once

#include "slots.h"

typedef struct {
    double until;
    block_hash block;
    uint32_t number, opened; /* the slot, and which of its lives */
} expectation;

typedef struct {
    expectation *ring;
    uint32_t max, first, count;
} expected;

void expire(store *all, expected *e, double now, uint64_t budget);

void expect_block(store *all, expected *e, uint32_t number, block_hash block, double until);
