/* Which workers a choice considers. */
#pragma once

#include "cost.h"
#include "fleet.h"

/* The least busy workers, and of `holders`, as the index has ranked them, those that hold most of
 * the prefix: a holder is only busier than an idle worker that holds as much. `decode`: what they
 * are to do. */
void find_candidates(const cost_model *c, const question *q, const fleet *f,
                     const candidates *holders, bool decode, candidates *found);

/* Workers to fetch KV from, best first, among equals the least busy. They become those of `q`.
 * `holders`: of each role. */
void find_fetch_sources(const cost_model *c, question *q, const candidates *holders);
