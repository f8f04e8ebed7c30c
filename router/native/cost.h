/* What it costs to serve a request at a worker, in seconds: see `router/placement/cost.py` for the
 * terms.
 */
#pragma once

#include <stddef.h>

#include "worker.h"

static inline double total_of(const seconds *s) {
    double sum = 0.0;
    for (int i = 0; i < MAX_TERMS; i++)
        sum += s->terms[i];
    return sum;
}

/* Hashed as workers like this one do it; NULL: it was not. */
static inline const hashed_prompt *prompt_for(const work *asked, const worker *w) {
    for (int64_t i = 0; i < asked->num_prompts; i++)
        if (asked->prompts[i].model == w->model && asked->prompts[i].block_size == w->info.block_size)
            return &asked->prompts[i];
    return NULL;
}

static inline held held_by(const work *asked, const worker *w) {
    const hashed_prompt *p = prompt_for(asked, w);
    if (p == NULL || w->slot < 0 || w->slot >= p->num_slots)
        return (held){0};
    const uint32_t *ends = p->ends + NUM_RUNS * w->slot;
    int64_t beyond = 0;
    if (w->store_slot >= 0 && w->store_slot < p->num_slots)
        beyond = (int64_t)p->ends[NUM_RUNS * w->store_slot + 2] - ends[2];
    return (held){p->unit * ends[0], p->unit * ((int64_t)ends[1] - ends[0]),
                  p->unit * ((int64_t)ends[2] - ends[1]), p->unit * ends[3],
                  beyond > 0 ? p->unit * beyond : 0};
}

/* Time that fetching from `source` saves a worker that holds none of the prefix, at most. */
double fetch_gain_s(const cost_model *c, const fetch_source *source);

/* Queue and prefill there, for another worker; with the worker's own KV alone, or with a peer's
 * too, if that saves as much as computing one block takes. */
placement first_at(const cost_model *c, const worker *w, const work *asked);

/* Waiting for free blocks: others have to end first. All blocks that are in use are freed, about
 * evenly, in the time of one of them. */
double memory_s(const cost_model *c, const worker *w, const work *asked);

/* Sequences that decode there while a prompt is computed. */
double stalled(const cost_model *c, const worker *w);

/* Everything on one decode worker. */
placement local_at(const cost_model *c, const worker *w, const work *asked);

/* Whether `local_at` could be cheaper than `remote_at` with `first`: a quick bound. */
bool may_be_local(const cost_model *c, const worker *w, const placement *first,
                  const work *asked);

/* What handing the prompt over from `source` to `w` loses, as far as KV does not come. */
double lost_s(const cost_model *c, const worker *w, const worker *source, const work *asked);

/* Prefill elsewhere, as in `first`, and the KV that `w` lacks read from there. */
placement remote_at(const cost_model *c, const worker *w, const placement *first,
                    const work *asked);
