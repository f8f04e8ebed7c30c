/* What follows from the numbers of a worker. */
#pragma once

#include "kvrelay_router.h"

/* As the worker has measured it, or else the fleet. */
#define RATE(c, w, name) ((w)->rates.name > 0 ? (w)->rates.name : (c)->fleet.name)

static inline int64_t num_seqs(const worker *w) { return w->num_booked + w->other_seqs; }

static inline int64_t num_decoding(const worker *w) { return w->own_decoding + w->other_seqs; }

static inline int64_t num_free(const worker *w) {
    return w->reported_free_blocks - w->uncounted_blocks;
}

static inline double used_fraction(const worker *w) {
    return 1.0 - num_free(w) / (double)w->num_blocks;
}

static inline bool can_take(const worker *w, double now, int64_t max_inflight) {
    return w->alive && now >= w->excluded_until && w->num_booked < max_inflight;
}
