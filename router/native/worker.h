/* What follows from the numbers of a worker. */
#pragma once

#include "kvrelay_router.h"

/* As the worker has measured it, or else the fleet. */
#define RATE(c, w, name) ((w)->stats.name > 0 ? (w)->stats.name : (c)->fleet.name)

static inline int64_t num_seqs(const worker *w) { return w->num_booked + w->other_seqs; }

/* Here and below, with `low` as requests of low classes see it. */
static inline int64_t num_decoding(const worker *w, bool low) {
    return w->own_decoding + w->other_seqs - (low ? 0 : w->low_decoding);
}

static inline int64_t num_free(const worker *w, bool low) {
    int64_t taken = low ? 0 : w->stats.num_low_blocks + w->low_uncounted_blocks;
    return w->stats.num_free_blocks - w->stats.num_wanted_blocks - w->uncounted_blocks + taken;
}

/* Blocks that a sequence of `rows` times `block_size` tokens holds at once. */
static inline double blocks_of(const worker *w, double rows) {
    double windows = w->info.windowed_groups * rows, needed;
    if (windows > w->info.window_blocks) windows = w->info.window_blocks;
    needed = w->info.row_blocks * rows + windows;
    return w->info.max_seq_blocks && needed > w->info.max_seq_blocks ? w->info.max_seq_blocks : needed;
}

static inline double used_fraction(const worker *w) {
    return 1.0 - num_free(w, true) / (double)w->info.num_blocks;
}

static inline bool can_take(const worker *w, double now, int64_t max_inflight, bool low) {
    int64_t num_booked = w->num_booked - (low ? 0 : w->low_booked);
    if (max_inflight > w->max_booked) max_inflight = w->max_booked;
    return w->alive && now >= w->excluded_until && num_booked < max_inflight;
}
