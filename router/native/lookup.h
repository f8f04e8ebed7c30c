/* How much of a prefix each worker holds: four runs for each slot, all found in one go.
 *
 * The remaining holders are words of 4 bits a slot, one for each run: in device memory, in any
 * memory, in any tier, said by the worker. They are intersected with the holders of the first
 * blocks one by one, and then with those of a block at every stride. Where some are lost, the
 * blocks between are bisected. A block that was not looked up may be missing; a run always ends
 * before one that was looked up and is not there.
 */
#pragma once

#include "table.h"

#define MAX_DEPTH 18 /* of bisecting a stride of up to 2^16 */

typedef struct {
    uint32_t num_words;
    uint64_t *words;
    uint16_t *word_indexes;
} runs;

typedef struct {
    table *blocks;
    const uint8_t *block_hashes;
    uint32_t *ends; /* [num_slots][NUM_RUNS] */
    uint32_t longest;
    runs scratch[MAX_DEPTH + 2];
} search;

/* Facts of 16 slots -> which of the runs their block is part of. */
uint64_t answers(uint64_t facts);

uint32_t stride_for(uint32_t count, uint32_t stride);

/* The first block from `position` on that is looked up where no holder is lost; `count`: none. */
uint32_t next_asked(uint32_t position, uint32_t count, uint32_t stride);

/* Fill `ends`, and `longest`, for the first `count` blocks of a prompt. */
void find_runs(search *s, uint32_t count, uint32_t stride);
