/* Sampling: what Python calls. cffi reads this file too: it has declarations only. */
#pragma once

#include <stdint.h>

/* How one row's token is drawn: `DRAW` of engine/model/sampling/sampler.py. temperature 0: greedy;
 * top_k 0: all tokens. mask: a bit for each token, those whose bit is 0 are not drawn; NULL: all may
 * be. */
typedef struct {
    double temperature;
    int64_t seed, position; /* position: of the token that is drawn */
    const uint32_t *mask;
    double top_p;
    int64_t top_k;
    double min_p;
} Draw;

/* In place of a token, where some logits of its row are NaN or none that may be drawn is finite. */
enum { NO_TOKEN = -1 };

/* logits: [rows, vocab], overwritten; tokens: [rows]. */
void kvr_draw(float *logits, int64_t rows, int64_t vocab, const Draw *draws, int64_t *tokens,
              int threads);

/* logits [count] become cap * tanh(logits / cap). */
void kvr_cap(float *logits, int64_t count, float cap, int threads);
