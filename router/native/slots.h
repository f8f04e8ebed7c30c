/* What is known of each worker: a slot, how many blocks it has, and which.
 *
 * The blocks of a slot are listed by their tags, 4 bytes each. The list only gets longer: a block
 * that is dropped leaves its tag, and one that came back is there twice, until the list is full; if
 * more than a third of it is stale then, it is sorted and pruned instead of being enlarged.
 *
 * Life of a slot: free; open for a worker; closed, when the worker is removed or restarts. Its
 * blocks are then taken out some at a time, by later calls, and it is free again.
 */
#pragma once

#include "table.h"

enum { FREE, OPEN, CLOSED };

typedef struct {
    uint32_t *tags;
    uint32_t num_tags, room;
    uint32_t live;      /* blocks of which something is known */
    uint32_t counts[4]; /* of them, by fact */
    uint32_t state, group;
    uint32_t opened; /* how often */
    uint64_t returned_at; /* number of the last answer that had it among the best */
} slot;

typedef struct {
    table blocks;
    sets sets;
    slot *slots;
    uint32_t num_slots, slots_room, num_closed;
    uint32_t none_free; /* no slot below this is free */
    uint64_t tags_bytes;
} store;

/* Bucket, from `i` on in the run of full ones, of a block of slot `number` that has this tag and
 * one of `facts`; or NO_BUCKET. */
uint32_t tagged(shard *s, uint32_t tag, uint32_t i, uint32_t number, uint32_t facts);

/* Sort and prune the tags: each is then that of a block, and is there once. */
void order_tags(store *all, uint32_t number);

void count_facts(slot *own, uint32_t before, uint32_t after);

/* The only function that changes facts: first `add`, then `drop`. What is in device memory is not
 * expected there any more. Returns whether anything changed. */
int change_block(store *all, uint32_t number, block_hash block, uint32_t add, uint32_t drop);

/* Drop `facts` from every block of `number` that has this tag. */
void drop_tagged(store *all, uint32_t number, uint32_t tag, uint32_t facts);

/* Number of a slot that is free, the lowest; -1: there are too many. */
int64_t open_slot(store *all, uint32_t group);

void close_slot(store *all, uint32_t number);

/* Take up to `budget` blocks of closed slots out. */
void drain(store *all, uint64_t budget);
