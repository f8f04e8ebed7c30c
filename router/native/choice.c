/* Who serves a request: what is held where is looked up, candidates are found, costs compared. */
#include <math.h>

#include "candidates.h"
#include "prefix_index.h"

struct chooser {
    prefix_index *index;
    worker **by_slot; /* living workers by their slots in the index */
    uint32_t num_slots;
    uint32_t *ends; /* of all prompts of a question */
    uint64_t ends_room;
};

chooser *kvr_chooser_new(prefix_index *index) {
    chooser *x = checked(calloc(1, sizeof *x));
    x->index = index;
    return x;
}

void kvr_chooser_free(chooser *x) {
    free(x->by_slot);
    free(x->ends);
    free(x);
}

void kvr_chooser_put(chooser *x, uint32_t slot, worker *w) {
    if (slot >= x->num_slots) {
        uint32_t room = 2 * slot + 16;
        x->by_slot = checked(realloc(x->by_slot, room * sizeof *x->by_slot));
        memset(x->by_slot + x->num_slots, 0, (room - x->num_slots) * sizeof *x->by_slot);
        x->num_slots = room;
    }
    x->by_slot[slot] = w;
}

/* The last token is always computed: its logits are what the next one is drawn from. */
static uint32_t num_looked_up(const work *asked, const hashed_prompt *p) {
    int64_t full = (asked->num_tokens - 1) / p->unit;
    return p->num_hashes < full ? p->num_hashes : full;
}

void kvr_look_up(chooser *x, question *q) {
    work *asked = &q->asked;
    uint32_t num_slots = x->index->all.num_slots;
    uint64_t count = (uint64_t)asked->num_prompts * num_slots * NUM_RUNS;
    if (count > x->ends_room) {
        x->ends = checked(realloc(x->ends, count * sizeof *x->ends));
        x->ends_room = count;
    }
    memset(x->ends, 0, count * sizeof *x->ends);
    for (int64_t i = 0; i < asked->num_prompts; i++) {
        hashed_prompt *p = &asked->prompts[i];
        uint32_t *ends = x->ends + (uint64_t)i * num_slots * NUM_RUNS;
        kvr_index_lookup(x->index, asked->now, p->block_hashes, num_looked_up(asked, p), ends);
        if (p->mark_group)
            index_end_at_marks(x->index, p->block_hashes, p->mark_group, num_slots, ends);
        p->ends = ends;
        p->num_slots = num_slots;
    }
}

#define RANKED 8 /* holders of each kind and role that are looked at */

/* Groups of slots: 0 has the workers that are preferred for decoding, 1 the others. */
uint32_t kvr_find_holders(chooser *x, const question *q, uint32_t role, worker **found) {
    const work *asked = &q->asked;
    uint16_t slots[RANKED];
    uint32_t total = 0;
    for (int64_t i = 0; i < asked->num_prompts; i++) {
        const hashed_prompt *p = &asked->prompts[i];
        uint32_t count = kvr_index_best(x->index, p->ends, p->num_slots, role, RANKED, slots);
        for (uint32_t n = 0; n < count; n++) {
            worker *w = slots[n] < x->num_slots ? x->by_slot[slots[n]] : NULL;
            if (w != NULL && total < MAX_CANDIDATES)
                found[total++] = w;
        }
    }
    return total;
}

/* In place, best first, of equals the one with the fewest requests, then the one that was chosen
 * longest ago. */
static void rank(option *options, int64_t count) {
    for (int64_t i = 1; i < count; i++) {
        option o = options[i];
        int64_t at = i;
        for (; at; at--) {
            const option *other = &options[at - 1];
            if (other->cost_ms != o.cost_ms) {
                if (other->cost_ms < o.cost_ms)
                    break;
            } else if (num_seqs(other->worker) != num_seqs(o.worker)) {
                if (num_seqs(other->worker) < num_seqs(o.worker))
                    break;
            } else if (other->worker->chosen_at <= o.worker->chosen_at) {
                break;
            }
            options[at] = *other;
        }
        options[at] = o;
    }
}

static option make_option(const work *asked, worker *w, int64_t prefill, placement placement) {
    int64_t cost_ms = llround(1000.0 * total_of(&placement.seconds));
    return (option){w, prefill, held_by(asked, w), placement, cost_ms};
}

/* Number of the prefill option with which `w` decodes at the least cost, of those that are ranked;
 * -1: none is of its model. `lost`: what that loses on its way. */
static int64_t best_first(const cost_model *c, const work *asked, const worker *w,
                          const option *firsts, int64_t count, double *lost) {
    int64_t best = -1, best_ms = 0;
    for (int64_t i = 0; i < count; i++) {
        const worker *from = firsts[i].worker;
        if (from->model != w->model || from == w || !w->info.hands_over)
            continue;
        double lost_here = asked->num_links ? lost_s(c, w, from, asked) : 0.0;
        int64_t cost_ms = firsts[i].cost_ms + llround(1000.0 * lost_here);
        if (best < 0 || cost_ms < best_ms) {
            best = i;
            best_ms = cost_ms;
            *lost = lost_here;
        }
        if (lost_here == 0.0)
            break;
    }
    return best;
}

/* For each that decodes: all of it there, and, unless `alone`, with the best prefill worker of its
 * model. For each that prefills: all of it there, if it is a choice and not given. */
static void find_options(const cost_model *c, const question *q, answer *a) {
    const work *asked = &q->asked;
    const candidates *decodes = &q->decodes, *prefills = &q->prefills;
    option *firsts = a->options, *all = a->options + 2 * q->num_candidates;
    for (uint32_t i = 0; i < prefills->count; i++) {
        worker *w = prefills->workers[i];
        if (!q->alone && w->info.hands_over)
            firsts[a->num_prefills++] = make_option(asked, w, -1, first_at(c, w, asked));
        if (!q->given && kvr_is_usable(c, q, w, true))
            all[a->num_decodes++] = make_option(asked, w, -1, local_at(c, w, asked));
    }
    for (uint32_t i = 0; !q->given && !q->alone && i < decodes->count; i++) {
        worker *w = decodes->workers[i];
        if (w->roles & PREFILLS && w->info.hands_over && kvr_is_usable(c, q, w, false))
            firsts[a->num_prefills++] = make_option(asked, w, -1, first_at(c, w, asked));
    }
    if (!q->given)
        rank(firsts, a->num_prefills);
    for (uint32_t i = 0; i < decodes->count; i++) {
        worker *w = decodes->workers[i];
        double lost = 0.0;
        int64_t best = best_first(c, asked, w, firsts, a->num_prefills, &lost);
        placement first;
        if (best >= 0) {
            first = firsts[best].placement;
            first.seconds.lost = lost;
            all[a->num_decodes++] = make_option(asked, w, best, remote_at(c, w, &first, asked));
        }
        if (best < 0 || (!q->given && may_be_local(c, w, &first, asked)))
            all[a->num_decodes++] = make_option(asked, w, -1, local_at(c, w, asked));
    }
    if (!q->given)
        rank(all, a->num_decodes);
}

/* Which workers share the cores of each candidate, and how many sequences decode there. */
static void look_beside(const chooser *x, const cost_model *c, const candidates *found) {
    for (uint32_t i = 0; i < found->count; i++) {
        worker *w = found->workers[i], *last = w;
        w->beside = w->decoding_beside = 0;
        for (uint32_t slot = 0; w->cores && slot < x->num_slots; slot++) {
            worker *other = x->by_slot[slot];
            if (other == NULL || other == w || other->cores != w->cores)
                continue;
            w->beside += stalled(c, other);
            w->decoding_beside += num_decoding(other, false);
            last = last->next_beside = other;
        }
        last->next_beside = w;
    }
}

void kvr_find(chooser *x, const cost_model *c, const fleet *decodes, const fleet *prefills,
              question *q) {
    candidates holders[2];
    for (uint32_t role = 0; role < 2; role++)
        holders[role].count = kvr_find_holders(x, q, role, holders[role].workers);
    find_fetch_sources(c, q, holders);
    find_candidates(c, q, decodes, &holders[0], true, &q->decodes);
    find_candidates(c, q, prefills, &holders[1], false, &q->prefills);
}

void kvr_choose(const chooser *x, const cost_model *c, question *q, answer *a) {
    a->num_decodes = a->num_prefills = 0;
    for (int64_t i = 0; q->given && i < q->asked.num_fetch_sources; i++)
        q->asked.fetch_sources[i].held = held_by(&q->asked, q->asked.fetch_sources[i].worker);
    look_beside(x, c, &q->decodes);
    look_beside(x, c, &q->prefills);
    find_options(c, q, a);
}

void kvr_expect(chooser *x, const question *q, const cost_model *c, fleet *f, worker *w,
                int64_t from, double until) {
    double now = q->asked.now;
    const hashed_prompt *p = prompt_for(&q->asked, w);
    if (w->is_ranked)
        kvr_fleet_update(f, w, c, now);
    if (p != NULL && w->slot >= 0)
        index_expect_looked_up(x->index, w->slot, p->block_hashes, num_looked_up(&q->asked, p),
                               from, p->mark_group, now, until);
}
