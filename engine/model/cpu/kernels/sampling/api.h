/* Sampling: what Python calls. cffi reads this file too: it has declarations only. */
#pragma once

#include <stdint.h>

/* How often tokens have come in a context: `COUNTS` of engine/model/sampling/counts.py. */
typedef struct {
    int32_t *tokens, *ids; /* of the context, and the different ones of them */
    int64_t *times;        /* of each id: in the output, and IN_PROMPT for each in the prompt */
    int64_t length, num_ids, num_prompt;
    int64_t window; /* so many of the last ones count; 0: all */
} Counts;

/* How one row's token is drawn: `DRAW` of engine/model/sampling/sampler.py. temperature 0: greedy;
 * below: not at all, its logits are left. top_k 0: all tokens. mask: a bit for each token, those whose
 * bit is 0 are not drawn; NULL: all may be. counts: NULL: no token is penalized. */
typedef struct {
    double temperature;
    int64_t seed, position; /* position: of the token that is drawn */
    const uint32_t *mask;
    Counts *counts;
    double top_p;
    int64_t top_k;
    double min_p;
    double repetition_penalty, presence_penalty, frequency_penalty;
} Draw;

/* In place of a token, where some logits of its row are NaN or none that may be drawn is finite. */
enum { NO_TOKEN = -1 };

/* logits: [rows, vocab], overwritten; tokens: [rows]. */
void kvr_draw(float *logits, int64_t rows, int64_t vocab, const Draw *draws, int64_t *tokens,
              int threads);

/* `token` is the context's next; there is room for it. */
void kvr_count(Counts *counts, int32_t token);

/* logits [count] become cap * tanh(logits / cap). */
void kvr_cap(float *logits, int64_t count, float cap, int threads);
