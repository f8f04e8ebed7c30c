/* A fleet, kept in order. */
#include <math.h>

#include "fleet.h"
#include "memory.h"
#include "worker.h"

static int goes_before(const ranked *a, const ranked *b) {
    if (a->busy != b->busy)
        return a->busy < b->busy;
    if (a->chosen_at != b->chosen_at)
        return a->chosen_at < b->chosen_at;
    return a->tie_break < b->tie_break;
}

/* Rank that `p` has or would have. */
static uint32_t rank_of(const fleet *f, const ranked *p) {
    uint32_t low = 0, high = f->count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (goes_before(&f->ranked[middle], p))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

fleet *kvr_fleet_new(void) { return checked(calloc(1, sizeof(fleet))); }

void kvr_fleet_free(fleet *f) {
    free(f->ranked);
    free(f);
}

void kvr_fleet_drop(fleet *f, worker *w) {
    if (!w->is_ranked)
        return;
    ranked old = {w->ranked_busy, w->ranked_chosen_at, w->tie_break, w};
    uint32_t at = rank_of(f, &old);
    while (at < f->count && f->ranked[at].worker != w)
        at++;
    w->is_ranked = 0;
    if (at == f->count)
        return;
    memmove(f->ranked + at, f->ranked + at + 1, (--f->count - at) * sizeof(ranked));
}

/* `busy`: any number that orders workers, in thousandths. */
static void put(fleet *f, worker *w, int64_t busy) {
    if (w->is_ranked && w->ranked_busy == busy && w->ranked_chosen_at == w->chosen_at)
        return;
    kvr_fleet_drop(f, w);
    if (f->count == f->room) {
        f->room = 2 * f->room + 16;
        f->ranked = checked(realloc(f->ranked, f->room * sizeof(ranked)));
    }
    ranked new = {busy, w->chosen_at, w->tie_break, w};
    uint32_t at = rank_of(f, &new);
    memmove(f->ranked + at + 1, f->ranked + at, (f->count++ - at) * sizeof(ranked));
    f->ranked[at] = new;
    w->is_ranked = 1;
    w->ranked_busy = busy;
    w->ranked_chosen_at = w->chosen_at;
}

/* A prefill worker is as busy as its queue is long, in time; a decode worker by its KV, then its
 * sequences. */
void kvr_fleet_update(fleet *f, worker *w, const cost_model *c, double now) {
    double busy;
    if (w->roles == PREFILLS) {
        busy = kvr_prompts_busy_until(w->prompts, now);
        busy += w->other_tokens / RATE(c, w, prefill_tokens_per_s);
    } else {
        busy = used_fraction(w) + 0.01 * num_seqs(w);
    }
    put(f, w, llround(1000.0 * busy));
}

uint32_t kvr_fleet_list(const fleet *f, worker **found) {
    for (uint32_t i = 0; i < f->count; i++)
        found[i] = f->ranked[i].worker;
    return f->count;
}

bool kvr_fleet_has_room(const fleet *f, double now, int64_t max_inflight) {
    for (uint32_t i = 0; i < f->count; i++)
        if (can_take(f->ranked[i].worker, now, max_inflight, false))
            return true;
    return false;
}
