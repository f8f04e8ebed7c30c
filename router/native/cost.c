/* The cost model. */
#include <math.h>

#include "cost.h"

#define TOKENS_UNIT 4096.0 /* as in engine/cost.py */
#define SEQS_UNIT 16.0
#define FAR 10.0   /* times what the plain rate says */
#define SHORT 64.0 /* tokens: as long as a pass takes for whatever is shorter */

/* -- times from rates and fits ---------------------------------------------------------------- */

static bool is_fit(const double *weights) {
    for (int i = 0; i < NUM_WEIGHTS; i++)
        if (weights[i] != 0.0)
            return true;
    return false;
}

/* As RATE; NULL: neither has one. */
static const double *fit_of(const double *own, const double *all) {
    return is_fit(own) ? own : is_fit(all) ? all : NULL;
}

static double fitted_s(const double *weights, const double *features) {
    double sum = 0.0;
    for (int i = 0; i < NUM_WEIGHTS; i++)
        sum += weights[i] * features[i];
    return fmax(0.0, sum);
}

/* As `engine.cost.prompt_features`. */
static void prompt_features(double num_new, double start, double budget, double *features) {
    double passes = ceil(num_new / budget), full = passes - 1, rest = num_new - full * budget;
    double squares = full * budget * budget + rest * rest;
    double before = budget * (full * start + budget * full * (full - 1) / 2);
    before += rest * (start + full * budget);
    features[0] = passes;
    features[1] = num_new / TOKENS_UNIT;
    features[2] = squares / (TOKENS_UNIT * TOKENS_UNIT);
    features[3] = before / (TOKENS_UNIT * TOKENS_UNIT);
}

/* How long it takes to compute, if nothing else is to be done. */
static double compute_s(const cost_model *c, const worker *w, int64_t num_new, int64_t start) {
    if (num_new <= 0)
        return 0.0;
    double rate_s = num_new / RATE(c, w, prefill_tokens_per_s), features[NUM_WEIGHTS];
    const double *weights = fit_of(w->stats.prompt_weights, c->fleet.prompt_weights);
    if (weights == NULL)
        return rate_s;
    prompt_features(num_new, start, w->info.max_num_batched_tokens, features);
    /* A fit may be wrong where nothing was measured yet. A pass has its price, however short. */
    double most_s = FAR * rate_s * fmax(num_new, SHORT) / num_new;
    return fmin(fmax(fitted_s(weights, features), 0.05 * rate_s), most_s);
}

/* How long it takes now. Without a fit the rate is that of now already. */
static double prefill_s(const cost_model *c, const worker *w, double computing_s) {
    bool fitted = fit_of(w->stats.prompt_weights, c->fleet.prompt_weights) != NULL;
    return fitted ? computing_s * w->stats.prompt_slowdown : computing_s;
}

/* One decode step of so many sequences, with that fraction of the pool. */
static double step_s(const cost_model *c, const worker *w, double seqs, double used) {
    double measured_s = RATE(c, w, decode_step_s);
    const double *weights = fit_of(w->stats.decode_weights, c->fleet.decode_weights);
    if (weights == NULL)
        return measured_s * (1.0 + 0.02 * seqs);
    double features[NUM_WEIGHTS] = {1.0, seqs / SEQS_UNIT, used, used * used};
    return fmax(fitted_s(weights, features), 0.2 * measured_s);
}

static double read_s(const worker *w, int64_t num_tokens, double bytes_per_s) {
    return num_tokens * w->info.bytes_per_token / bytes_per_s;
}

/* -- how the KV of the prompt comes to the worker that computes -------------------------------- */

/* Load as far down the run of blocks in lower tiers as saves most: as the worker will. */
static intake own_intake(const cost_model *c, const worker *w, const work *asked, held has) {
    int64_t missing = asked->num_tokens - has.device, loaded = 0;
    double tokens_per_s = RATE(c, w, prefill_tokens_per_s), load_s = 0.0, best_gain_s = 0.0;
    intake best = {.computed = missing};
    int64_t tokens[3] = {has.host, has.disk, has.object};
    double rates[3] = {RATE(c, w, host_read_bytes_per_s), RATE(c, w, disk_read_bytes_per_s),
                       RATE(c, w, object_read_bytes_per_s)};
    for (int i = 0; i < 3; i++) {
        if (tokens[i] == 0)
            continue;
        loaded += tokens[i];
        load_s += read_s(w, tokens[i], rates[i]);
        double gain_s = loaded / tokens_per_s - load_s;
        if (gain_s > best_gain_s) {
            best = (intake){.computed = missing - loaded, .loaded = loaded, .load_s = load_s};
            best_gain_s = gain_s;
        }
    }
    return best;
}

/* Reading into memory first what the source has on disk alone, from token `start` on. */
static double promote_s(const cost_model *c, const fetch_source *source, int64_t start) {
    int64_t in_memory = source->held.device + source->held.host;
    int64_t tokens = source->held.said - (start > in_memory ? start : in_memory);
    const worker *w = source->worker;
    return tokens <= 0 ? 0.0 : read_s(w, tokens, RATE(c, w, disk_read_bytes_per_s));
}

double fetch_gain_s(const cost_model *c, const fetch_source *source) {
    return source->held.said / c->fleet.prefill_tokens_per_s - promote_s(c, source, 0);
}

static const kv_link *link_of(const work *asked, const worker *source, const worker *reader,
                              bool fetches) {
    for (int64_t i = 0; i < asked->num_links; i++) {
        const kv_link *l = &asked->links[i];
        if (l->source == source && l->reader == reader && l->fetches == fetches)
            return l;
    }
    return NULL;
}

/* `own`, and what the best source holds beyond it. False: none holds more. */
static bool intake_with_fetch(const cost_model *c, const worker *w, const work *asked,
                              const intake *own, intake *fetched) {
    int64_t start = asked->num_tokens - own->computed;
    double tokens_per_s = RATE(c, w, prefill_tokens_per_s), best_gain_s = -INFINITY;
    *fetched = *own;
    if (!w->info.hands_over)
        return false;
    for (int64_t i = 0; i < asked->num_fetch_sources; i++) {
        const fetch_source *source = &asked->fetch_sources[i];
        int64_t tokens = source->held.said - start;
        if (tokens <= 0 || source->worker == w || source->worker->model != w->model)
            continue;
        if (!source->worker->info.hands_over)
            continue;
        double fetch_s = c->handoff_s + read_s(w, tokens, RATE(c, w, read_bytes_per_s));
        fetch_s += promote_s(c, source, start);
        const kv_link *l = link_of(asked, source->worker, w, true);
        if (l != NULL)
            fetch_s += l->lost_share * (l->wait_s + tokens / tokens_per_s);
        double gain_s = tokens / tokens_per_s - fetch_s;
        if (gain_s > best_gain_s) {
            best_gain_s = gain_s;
            fetched->computed = own->computed - tokens;
            fetched->fetched = tokens;
            fetched->fetch_s = fetch_s;
            fetched->fetch_from = source->worker;
        }
    }
    return fetched->fetch_from != NULL;
}

/* -- placements -------------------------------------------------------------------------------- */

/* Add what Python has computed of a worker that does `what`. */
static void add_terms(const cost_model *c, const worker *w, uint32_t what, placement *p) {
    for (int i = 0; i < MAX_TERMS; i++)
        if (c->terms_at[i] & what)
            p->seconds.terms[i] += w->terms[i];
}

/* What is not on the device yet makes as much of others' KV leave it. */
static double evict_s(const cost_model *c, const worker *w, const work *asked) {
    return (asked->num_tokens - held_by(asked, w).device) * c->evicted_token_s;
}

static bool has_image(const worker *w, uint64_t key) {
    int64_t low = 0, high = w->num_images;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (w->images[middle] < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low < w->num_images && w->images[low] == key;
}

/* Embeddings are needed where tokens of an image are computed; KV of the others is there. */
static double images_s(const cost_model *c, const worker *w, const work *asked, int64_t computed) {
    int64_t count = 0, first = asked->num_tokens - computed;
    for (int64_t i = 0; i < asked->num_images; i++)
        if (asked->images[i].end > first && !has_image(w, asked->images[i].key))
            count += asked->images[i].num_tokens;
    return count == 0 ? 0.0 : count * RATE(c, w, image_token_s);
}

static placement prefill_with(const cost_model *c, const worker *w, const work *asked,
                              const intake *in) {
    placement p = {.intake = *in};
    uint32_t num_behind = 0, num_behind_beside = 0;
    p.computing_s = compute_s(c, w, in->computed, asked->num_tokens - in->computed);
    p.seconds.prefill = prefill_s(c, w, p.computing_s);
    p.seconds.queue = kvr_prompts_ahead_of(w->prompts, asked->now, p.seconds.prefill, &num_behind);
    p.seconds.queue += w->other_tokens / RATE(c, w, prefill_tokens_per_s);
    for (worker *v = w->next_beside; v != NULL && v != w; v = v->next_beside) {
        p.seconds.queue += kvr_prompts_ahead_of(v->prompts, asked->now, p.seconds.prefill,
                                                &num_behind_beside);
        num_behind += num_behind_beside;
    }
    p.seconds.load = in->load_s;
    p.seconds.fetch = fmax(0.0, in->fetch_s - in->load_s); /* both at once, over different links */
    p.seconds.delay = num_behind * p.seconds.prefill;
    p.seconds.stall = p.computing_s * w->beside;
    p.seconds.evict = evict_s(c, w, asked);
    p.seconds.images = images_s(c, w, asked, in->computed);
    add_terms(c, w, AT_COMPUTING, &p);
    return p;
}

static placement prefill_at(const cost_model *c, const worker *w, const work *asked) {
    intake own = own_intake(c, w, asked, held_by(asked, w)), fetched;
    placement alone = prefill_with(c, w, asked, &own);
    if (!intake_with_fetch(c, w, asked, &own, &fetched))
        return alone;
    placement helped = prefill_with(c, w, asked, &fetched);
    double block_s = w->info.block_size / RATE(c, w, prefill_tokens_per_s);
    return total_of(&alone.seconds) - total_of(&helped.seconds) >= block_s ? helped : alone;
}

double stalled(const cost_model *c, const worker *w) {
    double at_least = w->roles == PREFILLS ? 0.0 : c->stalled_at_least;
    return fmax(at_least, fmax(num_decoding(w, false), w->typical_decoding));
}

placement first_at(const cost_model *c, const worker *w, const work *asked) {
    placement p = prefill_at(c, w, asked);
    /* Who decodes at a prefill worker was charged for waiting for prompts when it was placed there
     * (`add_decode`). To charge prompts as well makes them queue elsewhere, behind each other.
     * Shared cores leave them no elsewhere: the sum decides whether they are handed over at all. */
    if (w->cores || w->roles != PREFILLS)
        p.seconds.stall += p.computing_s * stalled(c, w);
    /* It gives way to what decodes on the same cores. */
    double slower = 1.0 + fmin(1.0, w->beside) * (c->low_priority_factor - 1.0);
    p.seconds.prefill = fmax(p.seconds.prefill, slower * p.computing_s);
    return p;
}

double memory_s(const cost_model *c, const worker *w, const work *asked) {
    int64_t missing = asked->num_tokens - held_by(asked, w).device;
    double free_blocks = num_free(w, asked->is_low) + (asked->resumes ? w->held_blocks : 0);
    double lacking = blocks_of(w, missing / (double)w->info.block_size + 1) - free_blocks;
    if (lacking <= 0)
        return 0.0;
    double in_use = fmax(1, w->info.num_blocks - fmax(0, free_blocks)); /* others' waiting is not */
    return lacking / in_use * asked->others_output * step_s(c, w, num_seqs(w), 1.0);
}

/* Everything that is to be done on a decode worker, the same wherever the prompt is computed. */
static void add_decode(const cost_model *c, const worker *w, const work *asked, placement *p) {
    double output = asked->output_tokens;
    double pool_tokens = (double)w->info.num_blocks / w->info.row_blocks * w->info.block_size;
    double num_there = num_decoding(w, asked->is_low);
    int64_t unseen = asked->is_low ? 0 : w->stats.low_decoding_tokens;
    double used = (w->stats.decoding_tokens - unseen) / pool_tokens;
    double growth = (asked->num_tokens + output / 2) / pool_tokens;
    double before_s = step_s(c, w, num_there, used);
    double after_s = fmax(before_s, step_s(c, w, num_there + 1, fmin(1.0, used + growth)));
    p->seconds.memory = memory_s(c, w, asked);
    p->seconds.decode = output * after_s;
    /* Those that are there have half of their output before them, on average. */
    p->seconds.crowd = num_there * output / 2 * (after_s - before_s);
    p->seconds.crowd += output * after_s * w->decoding_beside;
    if (w->roles == PREFILLS) {
        /* It waits while prompts are computed there, and those wait for its steps. */
        double prefilling = fmax(c->prefilling_at_least, w->typical_prefilling);
        p->seconds.stall += prefilling * p->seconds.decode;
        p->seconds.crowd += prefilling * p->seconds.decode;
    }
    add_terms(c, w, AT_DECODING, p);
}

placement local_at(const cost_model *c, const worker *w, const work *asked) {
    placement p = prefill_at(c, w, asked);
    int64_t computed = p.intake.computed, beyond = computed - c->free_tokens;
    if (beyond > 0)
        p.seconds.stall += p.computing_s * beyond / computed * stalled(c, w);
    add_decode(c, w, asked, &p);
    return p;
}

bool may_be_local(const cost_model *c, const worker *w, const placement *first,
                  const work *asked) {
    held has = held_by(asked, w);
    int64_t most = has.device + has.host + has.disk + has.object;
    for (int64_t i = 0; i < asked->num_fetch_sources; i++)
        if (asked->fetch_sources[i].held.said > most)
            most = asked->fetch_sources[i].held.said;
    int64_t computed = asked->num_tokens - most;
    if (computed <= c->free_tokens)
        return true;
    double others = stalled(c, w) / fmax(1.0, w->stats.prompt_slowdown);
    double least_s = 0.5 * computed / RATE(c, w, prefill_tokens_per_s) * (1.0 + others);
    return least_s <= total_of(&first->seconds) + c->handoff_s;
}

double lost_s(const cost_model *c, const worker *w, const worker *source, const work *asked) {
    const kv_link *l = link_of(asked, source, w, false);
    if (l == NULL)
        return 0.0;
    placement again = prefill_at(c, w, asked);
    double stall_s = again.computing_s * stalled(c, w);
    return l->lost_share * (l->wait_s + total_of(&again.seconds) + stall_s);
}

placement remote_at(const cost_model *c, const worker *w, const placement *first,
                    const work *asked) {
    placement p = *first;
    intake own = own_intake(c, w, asked, held_by(asked, w));
    /* Chunks are read while the next ones are computed; the last one cannot be. */
    double token_s = read_s(w, 1, RATE(c, w, read_bytes_per_s));
    double last_s = fmin(own.computed, w->info.max_num_batched_tokens) * token_s;
    double rest_s = fmax(own.computed * token_s, own.load_s) - first->seconds.prefill;
    p.seconds.transfer = c->handoff_s + fmax(last_s, rest_s);
    p.seconds.evict += evict_s(c, w, asked);
    add_terms(c, w, AT_READING, &p);
    add_decode(c, w, asked, &p);
    return p;
}
