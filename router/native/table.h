/* Blocks by hash: 24 bytes each, a hash of 16 and its holders, in 1,024 tables of open addressing.
 *
 * A table grows by a quarter, alone, and the tables begin with different sizes, so that they do not
 * grow all at once: growth copies 1/1024 of the blocks at a time. A block's bucket follows from its
 * tag of 32 bits: 10 choose the table, 22 the bucket there, in proportion to the table's size. So a
 * tag finds its block (among a few others) also after the table has grown.
 */
#pragma once

#include "holders.h"

#define HASH_BYTES 16
#define SHARD_BITS 10
#define NUM_SHARDS (1 << SHARD_BITS)
#define BUCKET_BITS (32 - SHARD_BITS)
#define FIRST_ROOM 64 /* of a table that has outgrown its first 16 buckets, and up to twice that */
#define NO_BUCKET UINT32_MAX

typedef struct {
    uint64_t a, b;
} block_hash;

typedef struct {
    block_hash hash;
    holders holders; /* 0: the bucket is empty */
} entry;

typedef struct {
    entry *entries;
    uint32_t capacity, used;
} shard;

typedef struct {
    shard shards[NUM_SHARDS];
    uint64_t num_blocks, num_bytes;
} table;

static inline block_hash hash_at(const uint8_t *block_hashes, uint64_t i) {
    block_hash found;
    memcpy(&found, block_hashes + HASH_BYTES * i, HASH_BYTES);
    return found;
}

static inline int same_hash(block_hash x, block_hash y) { return x.a == y.a && x.b == y.b; }

static inline uint32_t tag_of(block_hash n) {
    uint64_t x = (n.a ^ n.b * 0x9e3779b97f4a7c15u) * 0xd6e8feb86659fd93u;
    return (x ^ x >> 32) * 0x9e3779b97f4a7c15u >> 32;
}

static inline shard *shard_of(table *t, uint32_t tag) { return &t->shards[tag >> BUCKET_BITS]; }

static inline uint32_t home_of(const shard *s, uint32_t tag) {
    return (uint64_t)(tag & ((1u << BUCKET_BITS) - 1)) * s->capacity >> BUCKET_BITS;
}

static inline uint32_t next_bucket(const shard *s, uint32_t i) {
    return i + 1 == s->capacity ? 0 : i + 1;
}

static inline void prefetch_tag(table *t, uint32_t tag) {
    const shard *s = shard_of(t, tag);
    if (s->capacity) {
        const char *at = (const char *)&s->entries[home_of(s, tag)];
        __builtin_prefetch(at);
        __builtin_prefetch(at + 64);
    }
}

/* The block's bucket in its shard, or the one where it would be put. Meaningless in a shard without
 * capacity. */
static inline uint32_t bucket_for(const shard *s, block_hash wanted, uint32_t tag) {
    uint32_t i = home_of(s, tag);
    while (s->capacity && s->entries[i].holders && !same_hash(s->entries[i].hash, wanted))
        i = next_bucket(s, i);
    return i;
}

static inline holders find_holders(table *t, block_hash wanted) {
    uint32_t tag = tag_of(wanted);
    const shard *s = shard_of(t, tag);
    return s->capacity ? s->entries[bucket_for(s, wanted, tag)].holders : 0;
}

/* The block is not in the table yet; `at` is its `bucket_for`. At most 3/4 of a table are used. */
void insert_block(table *t, shard *s, entry new, uint32_t at);

/* Entries that follow move up where that brings them nearer to their home buckets. */
void delete_at(table *t, shard *s, uint32_t hole);

void table_free(table *t);
