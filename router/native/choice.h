/* Who serves a request: candidates, their costs, and the best of them. */
#ifndef KVRELAY_CHOICE_H
#define KVRELAY_CHOICE_H

#include "cost.h"

#define MAX_CANDIDATES 256 /* of a role */
#define MAX_LENDINGS 64

/* `given`: the candidates were chosen already, and so was the order; nobody lends but who is given.
 * Otherwise they are the holders of most of the prefix and the least busy ones. */
typedef struct {
    work asked;
    int64_t total_tokens; /* that the request may come to have */
    int64_t max_inflight;
    double max_memory_wait_s, probe_after_s;
    worker **avoid;
    int64_t num_avoid;
    bool trusting, given; /* trusting: even those to be avoided, and the silent */
    worker **decodes, **prefills, **lenders;
    int64_t num_decodes, num_prefills, num_lenders;
    int64_t num_idle, num_holders, max_tried, lenders_of_a_role;
    int64_t num_candidates; /* of a role, at most */
} question;

/* `prefill`: place among the prefill options; -1: the prompt is computed here. */
typedef struct {
    worker *at;
    int64_t prefill;
    held has;
    placement placed;
    int64_t cost_ms;
} option;

/* Written by `choose`: options of each role, best first. There is room for what the question
 * allows. */
typedef struct {
    int64_t num_decodes, num_prefills;
    option options[]; /* of prefill workers first: [num_candidates], then of decode workers */
} answer;

typedef struct {
    worker *workers[MAX_CANDIDATES];
    uint32_t count;
} candidates;

/* Slots that hold most of the prefix, by role, as the index has ranked them. */
typedef struct {
    worker *workers[2][MAX_CANDIDATES];
    uint32_t count[2];
} holders_found;

static bool is_trusted(const question *q, const worker *w) {
    if (w->has_stats && q->asked.now - w->heard_at >= q->probe_after_s)
        return false;
    for (int64_t i = 0; i < q->num_avoid; i++)
        if (q->avoid[i] == w)
            return false;
    return true;
}

/* Could it hold a sequence that ends at `num_tokens` tokens, if it were empty? */
static bool fits(const worker *w, int64_t num_tokens) {
    int64_t needed = (num_tokens + w->block_size - 1) / w->block_size;
    if (w->max_seq_blocks && needed > w->max_seq_blocks)
        needed = w->max_seq_blocks;
    return num_tokens <= w->max_model_len && needed <= w->num_blocks;
}

/* Whether it can take the request now, and would have room for its KV soon. */
static bool is_usable(const cost_model *c, const question *q, const worker *w) {
    if (!can_take(w, q->asked.now, q->max_inflight) || !(q->trusting || is_trusted(q, w)))
        return false;
    if (w->is_prefill)
        return fits(w, q->asked.num_tokens + 1);
    if (!fits(w, q->total_tokens))
        return false;
    return w->num_booked == 0 || memory_s(c, w, &q->asked) <= q->max_memory_wait_s;
}

bool choice_is_usable(const cost_model *c, const question *q, const worker *w) {
    return is_usable(c, q, w);
}

static int64_t held_at_all(const question *q, const worker *w) {
    held has = held_by(&q->asked, w);
    return has.device + has.host + has.disk;
}

/* The least busy ones, and those that hold most: a holder of no more than an idle one has is only
 * busier. */
static void find_candidates(const cost_model *c, const question *q, const fleet *f,
                            worker *const *holders, uint32_t num_holders, candidates *found) {
    int64_t most = -1;
    uint32_t tried = f->count < q->max_tried ? f->count : (uint32_t)q->max_tried;
    for (uint32_t i = 0; i < tried && found->count < q->num_idle; i++) {
        worker *w = f->places[i].who;
        if (!is_usable(c, q, w))
            continue;
        found->workers[found->count++] = w;
        int64_t has = held_at_all(q, w);
        most = has > most ? has : most;
    }
    for (uint32_t i = 0; i < num_holders && i < q->num_holders; i++) {
        worker *w = holders[i];
        uint32_t known = 0;
        if (held_at_all(q, w) <= most)
            break;
        while (known < found->count && found->workers[known] != w)
            known++;
        if (known == found->count && found->count < MAX_CANDIDATES && is_usable(c, q, w))
            found->workers[found->count++] = w;
    }
}

/* Workers that may lend what they hold, best first, among equals the least busy. */
static void find_lendings(const cost_model *c, question *q, const holders_found *holders,
                          lending *found) {
    double gains[MAX_LENDINGS];
    uint32_t count = 0;
    for (int role = 0; role < 2; role++)
        for (uint32_t i = 0; i < holders->count[role] && i < q->lenders_of_a_role; i++) {
            worker *w = holders->workers[role][i];
            if (count == MAX_LENDINGS || !w->alive || q->asked.now < w->excluded_until ||
                !is_trusted(q, w))
                continue;
            lending l = {w, held_by(&q->asked, w)};
            double gain_s = lending_s(c, &l);
            uint32_t at = count;
            if (gain_s <= 0)
                continue;
            for (; at && (gains[at - 1] < gain_s ||
                          (gains[at - 1] == gain_s && num_seqs(found[at - 1].from) > num_seqs(w)));
                 at--) {
                gains[at] = gains[at - 1];
                found[at] = found[at - 1];
            }
            gains[at] = gain_s;
            found[at] = l;
            count++;
        }
    q->asked.lendings = found;
    q->asked.num_lendings = count;
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
            } else if (num_seqs(other->at) != num_seqs(o.at)) {
                if (num_seqs(other->at) < num_seqs(o.at))
                    break;
            } else if (other->at->chosen_at <= o.at->chosen_at) {
                break;
            }
            options[at] = *other;
        }
        options[at] = o;
    }
}

static option make_option(const work *asked, worker *at, int64_t prefill, placement placed) {
    int64_t cost_ms = llround(1000.0 * total_of(&placed.s));
    return (option){at, prefill, held_by(asked, at), placed, cost_ms};
}

/* On each of `decodes`: all of it there, and with the best prefill worker that fits to it. */
static void find_options(const cost_model *c, const question *q, const candidates *decodes,
                         const candidates *prefills, answer *a) {
    const work *asked = &q->asked;
    option *firsts = a->options, *all = a->options + q->num_candidates;
    for (uint32_t i = 0; i < prefills->count; i++) {
        worker *w = prefills->workers[i];
        firsts[a->num_prefills++] = make_option(asked, w, -1, prefill_at(c, w, asked));
    }
    if (!q->given)
        rank(firsts, a->num_prefills);
    for (uint32_t i = 0; i < decodes->count; i++) {
        worker *w = decodes->workers[i];
        const placement *first = NULL;
        int64_t best = 0;
        while (best < a->num_prefills && firsts[best].at->model != w->model)
            best++;
        if (best < a->num_prefills) {
            first = &firsts[best].placed;
            all[a->num_decodes++] = make_option(asked, w, best, remote_at(c, w, first, asked));
        }
        if (first == NULL || (!q->given && may_be_local(c, w, first, asked)))
            all[a->num_decodes++] = make_option(asked, w, -1, local_at(c, w, asked));
    }
    if (!q->given)
        rank(all, a->num_decodes);
}

#endif
