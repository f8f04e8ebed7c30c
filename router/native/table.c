/* Growing and shrinking tables of blocks. */
#include "table.h"

static void shard_put(shard *s, entry new) {
    uint32_t i = home_of(s, tag_of(new.hash));
    while (s->entries[i].holders)
        i = next_bucket(s, i);
    s->entries[i] = new;
}

static void shard_resize(table *t, shard *s, uint32_t capacity) {
    shard old = *s;
    s->capacity = capacity;
    s->entries = checked(calloc(capacity, sizeof(entry)));
    for (uint32_t i = 0; i < old.capacity; i++)
        if (old.entries[i].holders)
            shard_put(s, old.entries[i]);
    free(old.entries);
    t->num_bytes += ((int64_t)capacity - old.capacity) * (int64_t)sizeof(entry);
}

static uint32_t more_room(uint32_t capacity, uint32_t number) {
    if (capacity >= FIRST_ROOM)
        return capacity + capacity / 4;
    return capacity ? FIRST_ROOM + number * FIRST_ROOM / NUM_SHARDS : 16;
}

void insert_block(table *t, shard *s, entry new, uint32_t at) {
    if (4ull * (s->used + 1) > 3ull * s->capacity) {
        shard_resize(t, s, more_room(s->capacity, s - t->shards));
        shard_put(s, new);
    } else {
        s->entries[at] = new;
    }
    s->used++;
    t->num_blocks++;
}

void delete_at(table *t, shard *s, uint32_t hole) {
    for (uint32_t i = next_bucket(s, hole); s->entries[i].holders; i = next_bucket(s, i)) {
        uint32_t home = home_of(s, tag_of(s->entries[i].hash));
        int stays = hole <= i ? hole < home && home <= i : hole < home || home <= i;
        if (!stays) {
            s->entries[hole] = s->entries[i];
            hole = i;
        }
    }
    s->entries[hole].holders = 0;
    s->used--;
    t->num_blocks--;
    if (s->capacity > 2 * FIRST_ROOM && 5ull * s->used < 2ull * s->capacity)
        shard_resize(t, s, s->capacity - s->capacity / 3);
}

void table_free(table *t) {
    for (int i = 0; i < NUM_SHARDS; i++)
        free(t->shards[i].entries);
}
