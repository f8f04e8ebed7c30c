/* What a step through all layers is told: their matrices and norms, and where its rows lie. */
#pragma once

#include "../gemm/gemm.h"
#include "api.h"

/* The step's rows at x times the matrix. */
INLINE Gemm gemm_of(const Step *s, const float *x, const Matrix *m, float *y) {
    Gemm t = {x, y, m->bias, m->packed, s->rows, m->rows, m->depth, m->depth, m->rows};
    t.kind = (int)m->kind, t.number = m->number;
    return t;
}

/* As kvr_abandon says. */
int is_abandoned(void);

/* The product, and what the terms of its rows add to it (terms.c). */
void kvr_run_with_terms(const Step *step, Gemm *product);

/* The hidden rows through a recurrent layer, to `recurred`. */
void kvr_recur(const Layer *layer, const Step *step);

/* The part of that which has states. */
void kvr_pass_states(const Recurrent *recurrent, const Step *step);
