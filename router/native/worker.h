/* Workers as a router sees them, the prompts that wait on each, and the order of those of one role.
 *
 * The memory of `worker` and `waiting` belongs to Python (`router/placement/endpoint.py`, `prompt_queue.py`);
 * the fields are written there and read here.
 */
#ifndef KVRELAY_WORKER_H
#define KVRELAY_WORKER_H

#include <math.h>
#include <stdbool.h>

#include "table.h"

#define LEAST_S 0.002 /* a prompt that should be done by now, and is not */
#define NUM_WEIGHTS 4

typedef struct {
    uint64_t ticket;
    double left_s;
} prompt;

/* Prompts that are not known to be computed, shortest first, with what each still needs as of `at`. */
typedef struct {
    double at;
    prompt *prompts;
    uint32_t count, room;
} waiting;

/* Seconds and bytes as measured; 0: not measured. */
typedef struct {
    double prefill_tokens_per_s, decode_step_s;
    double read_bytes_per_s, host_read_bytes_per_s, disk_read_bytes_per_s;
    double prompt_weights[NUM_WEIGHTS], decode_weights[NUM_WEIGHTS];
    bool has_prompt_weights, has_decode_weights;
} rates;

typedef struct {
    uint64_t model; /* equal for workers that can use each other's KV */
    int64_t block_size, num_blocks, max_model_len, max_seq_blocks, max_num_batched_tokens;
    double bytes_per_token;
    int64_t slot, tie; /* in the index, and among equals in its fleet */
    double heard_at, excluded_until, typical_decoding;
    int64_t chosen_at, num_booked, told_free_blocks;
    int64_t own_tokens, own_decoding, uncounted_blocks, other_tokens, other_seqs;
    rates rates;
    waiting *waiting;
    int64_t placed_busy, placed_chosen_at; /* its key in its fleet */
    bool is_prefill, alive, has_stats, is_placed;
} worker;

static int64_t num_seqs(const worker *w) { return w->num_booked + w->other_seqs; }
static int64_t num_decoding(const worker *w) { return w->own_decoding + w->other_seqs; }
static int64_t num_free(const worker *w) { return w->told_free_blocks - w->uncounted_blocks; }
static double used_fraction(const worker *w) { return 1.0 - num_free(w) / (double)w->num_blocks; }

static bool can_take(const worker *w, double now, int64_t max_inflight) {
    return w->alive && now >= w->excluded_until && w->num_booked < max_inflight;
}

/* -- prompts that wait ----------------------------------------------------------------------- */

static void run_down(waiting *q, double now) {
    double elapsed_s = now - q->at;
    if (elapsed_s <= 0)
        return;
    q->at = now;
    for (uint32_t i = 0; i < q->count && elapsed_s > 0; i++) {
        double done_s = fmin(elapsed_s, q->prompts[i].left_s - LEAST_S);
        if (done_s > 0) {
            q->prompts[i].left_s -= done_s;
            elapsed_s -= done_s;
        }
    }
}

/* Of equal ones the first goes first. */
void waiting_add(waiting *q, double now, uint64_t ticket, double seconds) {
    run_down(q, now);
    if (q->count == q->room) {
        q->room = 2 * q->room + 8;
        q->prompts = checked(realloc(q->prompts, q->room * sizeof(prompt)));
    }
    double left_s = fmax(seconds, LEAST_S);
    uint32_t at = q->count++;
    for (; at && q->prompts[at - 1].left_s > left_s; at--)
        q->prompts[at] = q->prompts[at - 1];
    q->prompts[at] = (prompt){ticket, left_s};
}

void waiting_discard(waiting *q, uint64_t ticket) {
    for (uint32_t i = 0; i < q->count; i++)
        if (q->prompts[i].ticket == ticket) {
            memmove(q->prompts + i, q->prompts + i + 1, (--q->count - i) * sizeof(prompt));
            return;
        }
}

void waiting_run_down(waiting *q, double now) { run_down(q, now); }

/* How long a prompt that takes `seconds` waits for shorter ones; how many longer ones would wait. */
static double wait_of(waiting *q, double now, double seconds, uint32_t *num_behind) {
    double wait_s = 0.0;
    uint32_t i = 0;
    run_down(q, now);
    for (; i < q->count && q->prompts[i].left_s <= seconds; i++)
        wait_s += q->prompts[i].left_s;
    *num_behind = q->count - i;
    return wait_s;
}

double waiting_ahead_of(waiting *q, double now, double seconds, uint32_t *num_behind) {
    return wait_of(q, now, seconds, num_behind);
}

double waiting_busy_until(waiting *q, double now) {
    double sum_s = 0.0;
    run_down(q, now);
    for (uint32_t i = 0; i < q->count; i++)
        sum_s += q->prompts[i].left_s;
    return now + sum_s;
}

void waiting_free(waiting *q) {
    free(q->prompts);
    *q = (waiting){0};
}

/* -- a fleet --------------------------------------------------------------------------------- */

typedef struct {
    int64_t busy, chosen_at, tie;
    worker *who;
} place;

/* The workers of one role, least busy first; equally busy ones in the order in which they were last
 * chosen, then in that of their ties. Each stands where its last update has put it. */
typedef struct {
    place *places;
    uint32_t count, room;
} fleet;

static int goes_before(const place *a, const place *b) {
    if (a->busy != b->busy)
        return a->busy < b->busy;
    if (a->chosen_at != b->chosen_at)
        return a->chosen_at < b->chosen_at;
    return a->tie < b->tie;
}

/* Where `p` is or would be. */
static uint32_t place_in_fleet(const fleet *f, const place *p) {
    uint32_t low = 0, high = f->count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (goes_before(&f->places[middle], p))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

fleet *fleet_new(void) { return checked(calloc(1, sizeof(fleet))); }

void fleet_free(fleet *f) {
    free(f->places);
    free(f);
}

void fleet_drop(fleet *f, worker *w) {
    if (!w->is_placed)
        return;
    place old = {w->placed_busy, w->placed_chosen_at, w->tie, w};
    uint32_t at = place_in_fleet(f, &old);
    while (at < f->count && f->places[at].who != w)
        at++;
    w->is_placed = 0;
    if (at == f->count)
        return;
    memmove(f->places + at, f->places + at + 1, (--f->count - at) * sizeof(place));
}

/* `busy`: any number that orders workers, in thousandths. */
static void put(fleet *f, worker *w, int64_t busy) {
    if (w->is_placed && w->placed_busy == busy && w->placed_chosen_at == w->chosen_at)
        return;
    fleet_drop(f, w);
    if (f->count == f->room) {
        f->room = 2 * f->room + 16;
        f->places = checked(realloc(f->places, f->room * sizeof(place)));
    }
    place new = {busy, w->chosen_at, w->tie, w};
    uint32_t at = place_in_fleet(f, &new);
    memmove(f->places + at + 1, f->places + at, (f->count++ - at) * sizeof(place));
    f->places[at] = new;
    w->is_placed = 1;
    w->placed_busy = busy;
    w->placed_chosen_at = w->chosen_at;
}

/* A prefill worker is as busy as it is late done; a decode worker by its KV, then its sequences. */
void fleet_update(fleet *f, worker *w, double now, double prefill_tokens_per_s) {
    double busy;
    if (w->is_prefill) {
        double own = w->rates.prefill_tokens_per_s;
        busy = waiting_busy_until(w->waiting, now);
        busy += w->other_tokens / (own > 0 ? own : prefill_tokens_per_s);
    } else {
        busy = used_fraction(w) + 0.01 * num_seqs(w);
    }
    put(f, w, llround(1000.0 * busy));
}

/* The workers, least busy first. `found` has room for all. */
uint32_t fleet_list(const fleet *f, worker **found) {
    for (uint32_t i = 0; i < f->count; i++)
        found[i] = f->places[i].who;
    return f->count;
}

/* Whether anybody could take one more request. */
bool fleet_has_room(const fleet *f, double now, int64_t max_inflight) {
    for (uint32_t i = 0; i < f->count; i++)
        if (can_take(f->places[i].who, now, max_inflight))
            return true;
    return false;
}

#endif
