/* Prompts that wait on a worker, run down by the time that has passed. */
#include <math.h>

#include "kvrelay_router.h"
#include "memory.h"

#define LEAST_S (LEAST_MS / 1000.0)

#define AGING 0.5 /* as in engine/scheduler.py */

struct prompt {
    uint64_t ticket;
    double left_s, since;
};

/* All that wait age alike, so that the order of two does not change with time. */
static double key_of(double left_s, double since) { return left_s + AGING * since; }

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
    double key = key_of(p.left_s, p.since);
    for (; at && key_of(q->prompts[at - 1].left_s, q->prompts[at - 1].since) > key; at--)
        q->prompts[at] = q->prompts[at - 1];
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

void kvr_prompts_correct(prompt_queue *q, double now, uint64_t ticket, double seconds) {
    kvr_prompts_run_down(q, now);
    for (uint32_t i = 0; i < q->count; i++)
        if (q->prompts[i].ticket == ticket) {
            prompt p = {ticket, fmax(seconds, LEAST_S), q->prompts[i].since};
            memmove(q->prompts + i, q->prompts + i + 1, (--q->count - i) * sizeof(prompt));
            insert(q, p);
            return;
        }
}

void kvr_prompts_discard(prompt_queue *q, uint64_t ticket) {
    for (uint32_t i = 0; i < q->count; i++)
        if (q->prompts[i].ticket == ticket) {
            memmove(q->prompts + i, q->prompts + i + 1, (--q->count - i) * sizeof(prompt));
            return;
        }
}

double kvr_prompts_ahead_of(prompt_queue *q, double now, double seconds, uint32_t *num_behind) {
    double wait_s = 0.0;
    uint32_t i = 0;
    kvr_prompts_run_down(q, now);
    double key = key_of(seconds, now);
    for (; i < q->count && key_of(q->prompts[i].left_s, q->prompts[i].since) <= key; i++)
        wait_s += q->prompts[i].left_s;
    *num_behind = q->count - i;
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
