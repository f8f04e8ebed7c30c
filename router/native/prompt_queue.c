/* Prompts that wait on a worker, run down by the time that has passed. */
#include <math.h>

#include "kvrelay_router.h"
#include "memory.h"

#define LEAST_S (LEAST_MS / 1000.0)

struct prompt {
    uint64_t ticket;
    double left_s, since;
};

/* As in engine/cost.py. */
static double order_of(double compute_s, double waited_s) {
    double share = compute_s / (compute_s + fmax(0.0, waited_s));
    return compute_s * share * share;
}

void kvr_prompts_run_down(prompt_queue *q, double now) {
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

static void insert(prompt_queue *q, prompt p) {
    uint32_t at = q->count++;
    double order = order_of(p.left_s, q->at - p.since);
    for (; at; at--) {
        const prompt *other = &q->prompts[at - 1];
        if (order_of(other->left_s, q->at - other->since) <= order)
            break;
        q->prompts[at] = *other;
    }
    q->prompts[at] = p;
}

void kvr_prompts_add(prompt_queue *q, double now, uint64_t ticket, double seconds) {
    kvr_prompts_run_down(q, now);
    if (q->count == q->room) {
        q->room = 2 * q->room + 8;
        q->prompts = checked(realloc(q->prompts, q->room * sizeof(prompt)));
    }
    insert(q, (prompt){ticket, fmax(seconds, LEAST_S), now});
}

/* False: it is not there. */
static bool take_out(prompt_queue *q, uint64_t ticket, prompt *taken) {
    for (uint32_t i = 0; i < q->count; i++)
        if (q->prompts[i].ticket == ticket) {
            *taken = q->prompts[i];
            memmove(q->prompts + i, q->prompts + i + 1, (--q->count - i) * sizeof(prompt));
            return true;
        }
    return false;
}

void kvr_prompts_correct(prompt_queue *q, double now, uint64_t ticket, double seconds) {
    prompt p;
    kvr_prompts_run_down(q, now);
    if (take_out(q, ticket, &p))
        insert(q, (prompt){ticket, fmax(seconds, LEAST_S), p.since});
}

void kvr_prompts_discard(prompt_queue *q, uint64_t ticket) {
    prompt taken;
    take_out(q, ticket, &taken);
}

double kvr_prompts_ahead_of(prompt_queue *q, double now, double seconds, uint32_t *num_behind) {
    double wait_s = 0.0;
    uint32_t num_ahead = 0;
    kvr_prompts_run_down(q, now);
    for (uint32_t i = 0; i < q->count; i++) {
        const prompt *p = &q->prompts[i];
        if (order_of(p->left_s, now + wait_s - p->since) <= order_of(seconds, wait_s)) {
            wait_s += p->left_s; /* by the next one's turn, it has waited itself */
            num_ahead++;
        }
    }
    *num_behind = q->count - num_ahead;
    return wait_s;
}

double kvr_prompts_busy_until(prompt_queue *q, double now) {
    double sum_s = 0.0;
    kvr_prompts_run_down(q, now);
    for (uint32_t i = 0; i < q->count; i++)
        sum_s += q->prompts[i].left_s;
    return now + sum_s;
}

void kvr_prompts_free(prompt_queue *q) {
    free(q->prompts);
    *q = (prompt_queue){0};
}
