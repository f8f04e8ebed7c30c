/* Blocks by name: 24 bytes each, a name of 16 and its holders, in 1,024 tables of open addressing.
 *
 * A table grows by a quarter, alone, and the tables begin with different sizes, so that they do not
 * grow all at once: what waits for one to grow waits for 1/1024 of the blocks to be copied. The place
 * of a block follows from 32 bits, its tag: 10 choose the table, 22 the place there, in proportion to
 * the table's size. So a tag finds its block again (among a few others) whatever has grown since.
 */
#ifndef KVRELAY_TABLE_H
#define KVRELAY_TABLE_H

#include "holders.h"

#define NAME_BYTES 16
#define SHARD_BITS 10
#define NUM_SHARDS (1 << SHARD_BITS)
#define PLACE_BITS (32 - SHARD_BITS)
#define FIRST_ROOM 64 /* of a table that has outgrown its first 16 places, and up to twice that */
#define NOWHERE UINT32_MAX

typedef struct {
    uint64_t a, b;
} name;

typedef struct {
    name name;
    holders who; /* 0: vacant */
} entry;

typedef struct {
    entry *entries;
    uint32_t capacity, used;
} shard;

typedef struct {
    shard shards[NUM_SHARDS];
    uint64_t num_blocks, num_bytes;
} table;

static name name_at(const uint8_t *names, uint64_t i) {
    name found;
    memcpy(&found, names + NAME_BYTES * i, NAME_BYTES);
    return found;
}

static int same_name(name x, name y) { return x.a == y.a && x.b == y.b; }

static uint32_t tag_of(name n) {
    uint64_t x = (n.a ^ n.b * 0x9e3779b97f4a7c15u) * 0xd6e8feb86659fd93u;
    return (x ^ x >> 32) * 0x9e3779b97f4a7c15u >> 32;
}

static shard *shard_of(table *t, uint32_t tag) { return &t->shards[tag >> PLACE_BITS]; }

static uint32_t home_of(const shard *s, uint32_t tag) {
    return (uint64_t)(tag & ((1u << PLACE_BITS) - 1)) * s->capacity >> PLACE_BITS;
}

static uint32_t next_place(const shard *s, uint32_t i) { return i + 1 == s->capacity ? 0 : i + 1; }

static void prefetch_tag(table *t, uint32_t tag) {
    const shard *s = shard_of(t, tag);
    if (s->capacity) {
        const char *at = (const char *)&s->entries[home_of(s, tag)];
        __builtin_prefetch(at);
        __builtin_prefetch(at + 64);
    }
}

/* Where the block is in its shard, or would be put. Nothing where the shard has no capacity. */
static uint32_t place_for(const shard *s, name wanted, uint32_t tag) {
    uint32_t i = home_of(s, tag);
    while (s->capacity && s->entries[i].who && !same_name(s->entries[i].name, wanted))
        i = next_place(s, i);
    return i;
}

static holders find_holders(table *t, name wanted) {
    uint32_t tag = tag_of(wanted);
    const shard *s = shard_of(t, tag);
    return s->capacity ? s->entries[place_for(s, wanted, tag)].who : 0;
}

static void shard_place(shard *s, entry new) {
    uint32_t i = home_of(s, tag_of(new.name));
    while (s->entries[i].who)
        i = next_place(s, i);
    s->entries[i] = new;
}

static void shard_resize(table *t, shard *s, uint32_t capacity) {
    shard old = *s;
    s->capacity = capacity;
    s->entries = checked(calloc(capacity, sizeof(entry)));
    for (uint32_t i = 0; i < old.capacity; i++)
        if (old.entries[i].who)
            shard_place(s, old.entries[i]);
    free(old.entries);
    t->num_bytes += ((int64_t)capacity - old.capacity) * (int64_t)sizeof(entry);
}

static uint32_t more_room(uint32_t capacity, uint32_t number) {
    if (capacity >= FIRST_ROOM)
        return capacity + capacity / 4;
    return capacity ? FIRST_ROOM + number * FIRST_ROOM / NUM_SHARDS : 16;
}

/* The block is not there yet, and `at` is where it would be put. At most 3/4 of a table are used. */
static void insert_block(table *t, shard *s, entry new, uint32_t at) {
    if (4ull * (s->used + 1) > 3ull * s->capacity) {
        shard_resize(t, s, more_room(s->capacity, s - t->shards));
        shard_place(s, new);
    } else {
        s->entries[at] = new;
    }
    s->used++;
    t->num_blocks++;
}

/* Close the gap: what follows and may stand nearer to its home moves up. */
static void delete_at(table *t, shard *s, uint32_t hole) {
    for (uint32_t i = next_place(s, hole); s->entries[i].who; i = next_place(s, i)) {
        uint32_t home = home_of(s, tag_of(s->entries[i].name));
        int stays = hole <= i ? hole < home && home <= i : hole < home || home <= i;
        if (!stays) {
            s->entries[hole] = s->entries[i];
            hole = i;
        }
    }
    s->entries[hole].who = 0;
    s->used--;
    t->num_blocks--;
    if (s->capacity > 2 * FIRST_ROOM && 5ull * s->used < 2ull * s->capacity)
        shard_resize(t, s, s->capacity - s->capacity / 3);
}

static void table_free(table *t) {
    for (int i = 0; i < NUM_SHARDS; i++)
        free(t->shards[i].entries);
}

#endif
