/* Blocks that are expected in a worker's device memory, each until its time is over.
 *
 * A ring in the order in which they were told, and a hash table of the latest place in it for each
 * (block, slot): told again, a block is expected for longer, and its earlier end means nothing. The
 * ring has a fixed size; when it is full, the oldest is given up.
 */
#ifndef KVRELAY_EXPECTED_H
#define KVRELAY_EXPECTED_H

#include "slots.h"

#define EXPECTED_AHEAD 16

typedef struct {
    double until;
    name which;
    uint32_t number; /* of the slot */
} expectation;

typedef struct {
    uint32_t hash;
    uint32_t place; /* in the ring + 1; 0: vacant */
} latest;

typedef struct {
    expectation *ring;
    latest *table;
    uint32_t max, first, count, mask;
} expected;

static uint32_t expected_hash(name which, uint32_t number) {
    return mix64((uint64_t)tag_of(which) << 16 ^ number);
}

static uint32_t find_latest(const expected *e, name which, uint32_t number) {
    uint32_t hash = expected_hash(which, number), i = hash & e->mask;
    for (; e->table[i].place; i = (i + 1) & e->mask) {
        const expectation *at = &e->ring[e->table[i].place - 1];
        if (e->table[i].hash == hash && same_name(at->which, which) && at->number == number)
            break;
    }
    return i;
}

static void forget_latest(expected *e, uint32_t hole) {
    for (uint32_t i = (hole + 1) & e->mask; e->table[i].place; i = (i + 1) & e->mask) {
        uint32_t home = e->table[i].hash & e->mask;
        if (((i - home) & e->mask) >= ((i - hole) & e->mask)) {
            e->table[hole] = e->table[i];
            hole = i;
        }
    }
    e->table[hole].place = 0;
}

static void prefetch_expected(store *all, const expected *e, name which, uint32_t number) {
    prefetch_tag(&all->blocks, tag_of(which));
    if (e->table)
        __builtin_prefetch(&e->table[expected_hash(which, number) & e->mask]);
}

static void drop_oldest(store *all, expected *e) {
    const expectation *oldest = &e->ring[e->first];
    if (e->count > EXPECTED_AHEAD) {
        const expectation *later = &e->ring[(e->first + EXPECTED_AHEAD) % e->max];
        prefetch_expected(all, e, later->which, later->number);
    }
    uint32_t i = find_latest(e, oldest->which, oldest->number);
    if (e->table[i].place == e->first + 1) {
        forget_latest(e, i);
        change_block(all, oldest->number, oldest->which, 0, EXPECTED);
    }
    e->first = e->first + 1 == e->max ? 0 : e->first + 1;
    e->count--;
}

static void expire(store *all, expected *e, double now, uint64_t budget) {
    for (; budget && e->count && e->ring[e->first].until <= now; budget--)
        drop_oldest(all, e);
}

static void expect_block(store *all, expected *e, uint32_t number, name which, double until) {
    if (e->max == 0 || facts_of(find_holders(&all->blocks, which), number) & DEVICE)
        return;
    if (e->ring == NULL) {
        e->mask = 1;
        while (e->mask < 2ull * e->max)
            e->mask *= 2;
        e->ring = checked(malloc(e->max * sizeof(expectation)));
        e->table = checked(calloc(e->mask, sizeof(latest)));
        e->mask--;
    }
    if (e->count == e->max)
        drop_oldest(all, e);
    uint32_t place = (e->first + e->count++) % e->max;
    uint32_t i = find_latest(e, which, number);
    e->ring[place] = (expectation){until, which, number};
    e->table[i] = (latest){expected_hash(which, number), place + 1};
    change_block(all, number, which, EXPECTED, 0);
}

#endif
