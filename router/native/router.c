/* What a router does for every request: it looks for the prefix, and chooses who serves. */
#include "choice.h"
#include "prefix_index.h"

/* The living workers by their slots in the index. */
typedef struct {
    prefix_index *index;
    worker **by_slot;
    uint32_t num_slots;
    uint32_t *ends; /* of all prompts of a question */
    uint64_t ends_room;
} chooser;

chooser *chooser_new(prefix_index *index) {
    chooser *x = checked(calloc(1, sizeof *x));
    x->index = index;
    return x;
}

void chooser_free(chooser *x) {
    free(x->by_slot);
    free(x->ends);
    free(x);
}

/* The worker with this slot; NULL: there is none (any more). */
void chooser_put(chooser *x, uint32_t slot, worker *w) {
    if (slot >= x->num_slots) {
        uint32_t room = 2 * slot + 16;
        x->by_slot = checked(realloc(x->by_slot, room * sizeof *x->by_slot));
        memset(x->by_slot + x->num_slots, 0, (room - x->num_slots) * sizeof *x->by_slot);
        x->num_slots = room;
    }
    x->by_slot[slot] = w;
}

/* The last token is always computed: its logits are what the next one is drawn from. */
static uint32_t num_asked(const work *asked, const named_prompt *p) {
    int64_t full = (asked->num_tokens - 1) / p->unit;
    return p->num_names < full ? p->num_names : full;
}

/* Find out who holds how much of what is asked. What follows is about this question, until the next
 * one. */
void choice_look(chooser *x, question *q) {
    work *asked = &q->asked;
    uint32_t num_slots = x->index->all.num_slots;
    uint64_t count = (uint64_t)asked->num_prompts * num_slots * NUM_RUNS;
    if (count > x->ends_room) {
        x->ends = checked(realloc(x->ends, count * sizeof *x->ends));
        x->ends_room = count;
    }
    memset(x->ends, 0, count * sizeof *x->ends);
    for (int64_t i = 0; i < asked->num_prompts; i++) {
        named_prompt *p = &asked->prompts[i];
        uint32_t *ends = x->ends + (uint64_t)i * num_slots * NUM_RUNS;
        index_lookup(x->index, asked->now, p->names, num_asked(asked, p), ends);
        p->ends = ends;
        p->num_slots = num_slots;
    }
}

#define RANKED 8 /* holders of each kind and role that are looked at */

/* Those of a role (a group of slots: 0 decodes, 1 prefills). Returns how many. */
static uint32_t find_holders_of(chooser *x, const work *asked, int role, worker **found) {
    uint16_t slots[RANKED];
    uint32_t total = 0;
    for (int64_t i = 0; i < asked->num_prompts; i++) {
        const named_prompt *p = &asked->prompts[i];
        uint32_t count = index_best(x->index, p->ends, p->num_slots, role, RANKED, slots);
        for (uint32_t n = 0; n < count; n++) {
            worker *w = slots[n] < x->num_slots ? x->by_slot[slots[n]] : NULL;
            if (w != NULL && total < MAX_CANDIDATES)
                found[total++] = w;
        }
    }
    return total;
}

/* Workers of a role that hold some of the prompt, most first. `found`: [MAX_CANDIDATES]. */
uint32_t choice_holders(chooser *x, const question *q, uint32_t role, worker **found) {
    return find_holders_of(x, &q->asked, role, found);
}

static void copy_given(worker *const *from, int64_t count, candidates *to) {
    for (int64_t i = 0; i < count && i < MAX_CANDIDATES; i++)
        to->workers[to->count++] = from[i];
}

/* Write to `a` all ways to serve the request that were thought of. */
void choose(chooser *x, const cost_model *c, const fleet *decodes, const fleet *prefills,
            question *q, answer *a) {
    candidates from_decodes = {.count = 0}, from_prefills = {.count = 0};
    lending lendings[MAX_LENDINGS];
    a->num_decodes = a->num_prefills = 0;
    if (q->given) {
        copy_given(q->decodes, q->num_decodes, &from_decodes);
        copy_given(q->prefills, q->num_prefills, &from_prefills);
        q->asked.lendings = lendings;
        q->asked.num_lendings = q->num_lenders < MAX_LENDINGS ? q->num_lenders : MAX_LENDINGS;
        for (int64_t i = 0; i < q->asked.num_lendings; i++)
            lendings[i] = (lending){q->lenders[i], held_by(&q->asked, q->lenders[i])};
    } else {
        holders_found holders;
        for (int role = 0; role < 2; role++)
            holders.count[role] = find_holders_of(x, &q->asked, role, holders.workers[role]);
        find_lendings(c, q, &holders, lendings);
        find_candidates(c, q, decodes, holders.workers[0], holders.count[0], &from_decodes);
        if (from_decodes.count)
            find_candidates(c, q, prefills, holders.workers[1], holders.count[1], &from_prefills);
    }
    if (from_decodes.count)
        find_options(c, q, &from_decodes, &from_prefills, a);
    q->asked.lendings = NULL;
}

/* `w` has been booked for what was asked: its place in its fleet changes, and the first of the blocks
 * that it does not have, from number `from` on, are expected there until `until`. */
void choice_expect(chooser *x, const question *q, const cost_model *c, fleet *f, worker *w,
                   int64_t from, double until) {
    double now = q->asked.now;
    const named_prompt *p = prompt_for(&q->asked, w);
    if (w->is_placed)
        fleet_update(f, w, now, c->fleet.prefill_tokens_per_s);
    if (p != NULL && w->slot >= 0)
        index_expect_asked(x->index, w->slot, p->names, num_asked(&q->asked, p), from, now, until);
}

/* Sizes of what Python and C share, so that a difference is noticed. */
void choice_sizes(uint64_t *sizes) {
    const uint64_t known[] = {sizeof(worker),   sizeof(waiting),    sizeof(cost_model),
                              sizeof(question), sizeof(named_prompt), sizeof(answer),
                              sizeof(option)};
    memcpy(sizes, known, sizeof known);
}
