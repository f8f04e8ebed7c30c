/* What a router does for every request: it looks for the prefix, and chooses who serves. */
#include "choice.h"
#include "prefix_index.h"

/* The living workers by their slots in the index. */
typedef struct {
    prefix_index *index;
    worker **by_slot;
    uint32_t num_slots;
} chooser;

chooser *chooser_new(prefix_index *index) {
    chooser *x = checked(calloc(1, sizeof *x));
    x->index = index;
    return x;
}

void chooser_free(chooser *x) {
    free(x->by_slot);
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

#define RANKED 8 /* holders of each kind and role that are looked at */

static void find_holders_of_roles(chooser *x, const work *asked, holders_found *found) {
    uint16_t slots[RANKED];
    for (int64_t kind = 0; kind < asked->num_kinds; kind++)
        for (int role = 0; role < 2; role++) {
            const found_kind *k = &asked->kinds[kind];
            uint32_t count = index_best(x->index, k->ends, k->num_slots, role, RANKED, slots);
            for (uint32_t i = 0; i < count; i++) {
                worker *w = slots[i] < x->num_slots ? x->by_slot[slots[i]] : NULL;
                if (w != NULL && found->count[role] < MAX_CANDIDATES)
                    found->workers[role][found->count[role]++] = w;
            }
        }
}

static void copy_given(worker *const *from, int64_t count, candidates *to) {
    for (int64_t i = 0; i < count && i < MAX_CANDIDATES; i++)
        to->workers[to->count++] = from[i];
}

/* Write to `a` all ways to serve the request that were thought of. Groups of slots are roles:
 * 0 decodes, 1 prefills. */
void choose(chooser *x, const cost_model *c, const fleet *decodes, const fleet *prefills,
            question *q, answer *a) {
    candidates from_decodes = {.count = 0}, from_prefills = {.count = 0};
    lending lendings[MAX_LENDINGS];
    a->num_decodes = a->num_prefills = a->num_workers = 0;
    if (q->given) {
        copy_given(q->decodes, q->num_decodes, &from_decodes);
        copy_given(q->prefills, q->num_prefills, &from_prefills);
        q->asked.lendings = lendings;
        q->asked.num_lendings = q->num_lenders < MAX_LENDINGS ? q->num_lenders : MAX_LENDINGS;
        for (int64_t i = 0; i < q->asked.num_lendings; i++)
            lendings[i] = (lending){q->lenders[i], held_by(&q->asked, q->lenders[i])};
    } else {
        holders_found holders;
        holders.count[0] = holders.count[1] = 0;
        find_holders_of_roles(x, &q->asked, &holders);
        find_lendings(c, q, &holders, lendings);
        find_candidates(c, q, decodes, holders.workers[0], holders.count[0], &from_decodes);
        if (from_decodes.count)
            find_candidates(c, q, prefills, holders.workers[1], holders.count[1], &from_prefills);
    }
    if (from_decodes.count)
        find_options(c, q, &from_decodes, &from_prefills, a);
    q->asked.lendings = NULL;
}

/* Sizes of what Python and C share, so that a difference is noticed. */
void choice_sizes(uint64_t *sizes) {
    const uint64_t known[] = {sizeof(worker),   sizeof(waiting),    sizeof(cost_model),
                              sizeof(question), sizeof(found_kind), sizeof(answer),
                              sizeof(option)};
    memcpy(sizes, known, sizeof known);
}
