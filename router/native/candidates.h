/* Which workers a choice considers. */
#pragma once

#include "cost.h"
#include "fleet.h"

/* Workers that hold most of the prefix, by role, as the index has ranked them. */
typedef struct {
    worker *workers[2][MAX_CANDIDATES];
    uint32_t count[2];
} holders_found;

/* The least busy workers, and those that hold most of the prefix: a holder is only busier than an
 * idle worker that holds as much. `decode`: what they are to do. */
void find_candidates(const cost_model *c, const question *q, const fleet *f,
                     worker *const *holders, uint32_t num_holders, bool decode,
                     candidates *found);

/* Workers to fetch KV from, best first, among equals the least busy. They become those of `q`. */
void find_fetch_sources(const cost_model *c, question *q, const holders_found *holders);
