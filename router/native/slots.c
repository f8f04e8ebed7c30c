/* The blocks of each slot: found by tag, changed, taken out. */
#include "slots.h"

/* Ascending, each tag once. LSD radix sort by bytes. */
static uint32_t sort_tags(uint32_t *tags, uint32_t count) {
    uint32_t *from = tags, *other = checked(malloc((count + 1ul) * sizeof *tags)), *to = other;
    for (int shift = 0; shift < 32; shift += 8) {
        uint32_t starts[257] = {0};
        for (uint32_t i = 0; i < count; i++)
            starts[(from[i] >> shift & 255) + 1]++;
        for (int i = 0; i < 256; i++)
            starts[i + 1] += starts[i];
        for (uint32_t i = 0; i < count; i++)
            to[starts[from[i] >> shift & 255]++] = from[i];
        uint32_t *swap = from;
        from = to;
        to = swap;
    }
    uint32_t unique = 0;
    for (uint32_t i = 0; i < count; i++)
        if (i == 0 || tags[i] != tags[unique - 1])
            tags[unique++] = tags[i];
    free(other);
    return unique;
}

uint32_t tagged(shard *s, uint32_t tag, uint32_t i, uint32_t number, uint32_t facts) {
    if (s->capacity == 0)
        return NO_BUCKET;
    for (; s->entries[i].holders; i = next_bucket(s, i))
        if (tag_of(s->entries[i].hash) == tag && facts_of(s->entries[i].holders, number) & facts)
            return i;
    return NO_BUCKET;
}

void order_tags(store *all, uint32_t number) {
    slot *own = &all->slots[number];
    uint32_t count = sort_tags(own->tags, own->num_tags), kept = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (i + 16 < count)
            prefetch_tag(&all->blocks, own->tags[i + 16]);
        shard *s = shard_of(&all->blocks, own->tags[i]);
        if (s->capacity &&
            tagged(s, own->tags[i], home_of(s, own->tags[i]), number, 15) != NO_BUCKET)
            own->tags[kept++] = own->tags[i];
    }
    own->num_tags = kept;
}

static void add_tag(store *all, uint32_t number, uint32_t tag) {
    slot *own = &all->slots[number];
    if (own->num_tags == own->room && own->num_tags > 64 && own->live < own->num_tags / 3 * 2)
        order_tags(all, number);
    if (own->num_tags == own->room) {
        uint32_t room = own->room + own->room / 4 + 16;
        own->tags = checked(realloc(own->tags, room * sizeof(uint32_t)));
        all->tags_bytes += (room - own->room) * sizeof(uint32_t);
        own->room = room;
    }
    own->tags[own->num_tags++] = tag;
}

void count_facts(slot *own, uint32_t before, uint32_t after) {
    for (int i = 0; i < 4; i++)
        own->counts[i] += (after >> i & 1) - (before >> i & 1);
    own->live += (after != 0) - (before != 0);
}

int change_block(store *all, uint32_t number, block_hash block, uint32_t add, uint32_t drop) {
    uint32_t tag = tag_of(block);
    shard *s = shard_of(&all->blocks, tag);
    uint32_t at = bucket_for(s, block, tag);
    holders old = s->capacity ? s->entries[at].holders : 0;
    uint32_t before = facts_of(old, number);
    uint32_t after = (before | add) & ~drop;
    if (after & DEVICE)
        after &= ~EXPECTED;
    if (after == before)
        return 0;
    if (before == 0)
        add_tag(all, number, tag);
    count_facts(&all->slots[number], before, after);
    holders new = holders_with(&all->sets, old, number, before, after);
    if (old == 0)
        insert_block(&all->blocks, s, (entry){block, new}, at);
    else if (new == 0)
        delete_at(&all->blocks, s, at);
    else
        s->entries[at].holders = new;
    return 1;
}

void drop_tagged(store *all, uint32_t number, uint32_t tag, uint32_t facts) {
    for (;;) {
        shard *s = shard_of(&all->blocks, tag);
        uint32_t at = s->capacity ? tagged(s, tag, home_of(s, tag), number, facts) : NO_BUCKET;
        if (at == NO_BUCKET)
            return;
        change_block(all, number, s->entries[at].hash, 0, facts);
    }
}

int64_t open_slot(store *all, uint32_t group) {
    uint32_t number = all->none_free;
    while (number < all->num_slots && all->slots[number].state != FREE)
        number++;
    all->none_free = number;
    if (number == MAX_SLOTS)
        return -1;
    if (number == all->slots_room) {
        uint32_t room = all->slots_room ? 2 * all->slots_room : 16;
        all->slots = checked(realloc(all->slots, room * sizeof(slot)));
        memset(all->slots + all->slots_room, 0, (room - all->slots_room) * sizeof(slot));
        all->slots_room = room;
    }
    if (number == all->num_slots)
        all->num_slots++;
    uint32_t opened = all->slots[number].opened + 1;
    all->slots[number] = (slot){.state = OPEN, .group = group, .opened = opened};
    return number;
}

void close_slot(store *all, uint32_t number) {
    all->slots[number].state = CLOSED;
    all->num_closed++;
}

void drain(store *all, uint64_t budget) {
    for (uint32_t number = 0; all->num_closed && budget; number++) {
        slot *own = &all->slots[number];
        if (own->state != CLOSED)
            continue;
        for (; own->num_tags && budget; budget--) {
            if (own->num_tags > 16)
                prefetch_tag(&all->blocks, own->tags[own->num_tags - 17]);
            drop_tagged(all, number, own->tags[--own->num_tags], 15);
        }
        if (own->num_tags == 0) {
            free(own->tags);
            all->tags_bytes -= own->room * sizeof(uint32_t);
            *own = (slot){.state = FREE, .opened = own->opened};
            if (number < all->none_free)
                all->none_free = number;
            all->num_closed--;
        }
    }
}
