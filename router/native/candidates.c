/* Candidates and sources of KV. */
#include "candidates.h"

static bool is_silent(const question *q, const worker *w) {
    return w->has_stats && q->asked.now - w->last_seen_at >= q->probe_after_s;
}

static bool is_among(worker *const *workers, int64_t count, const worker *w) {
    for (int64_t i = 0; i < count; i++)
        if (workers[i] == w)
            return true;
    return false;
}

static bool is_trusted(const question *q, const worker *w) {
    return !is_silent(q, w) && !is_among(q->avoid, q->num_avoid, w);
}

/* One that it leaves gets nothing new, and has most of its KV. */
static bool is_source(const question *q, const worker *w) {
    if (!w->alive || is_silent(q, w))
        return false;
    int64_t num_failed = q->num_avoid - q->num_left;
    if (is_among(q->avoid + num_failed, q->num_left, w))
        return !is_among(q->avoid, num_failed, w);
    return q->asked.now >= w->excluded_until && is_trusted(q, w);
}

/* Whether it could hold a sequence of `num_tokens` tokens, if it were empty. */
static bool fits(const worker *w, int64_t num_tokens) {
    int64_t rows = (num_tokens + w->info.block_size - 1) / w->info.block_size;
    return num_tokens <= w->info.max_model_len && blocks_of(w, rows) <= w->info.num_blocks;
}

bool kvr_is_usable(const cost_model *c, const question *q, const worker *w, bool decodes) {
    if (!can_take(w, q->asked.now, q->max_inflight, q->asked.is_low))
        return false;
    if (!q->trusting && !is_trusted(q, w))
        return false;
    if (!decodes)
        return fits(w, q->asked.num_tokens + 1);
    if (!fits(w, q->total_tokens))
        return false;
    if (w->num_booked == 0 || q->patient)
        return true;
    double most_s = w->held_blocks && !q->asked.resumes ? 0.0 : q->max_memory_wait_s;
    return memory_s(c, w, &q->asked) <= most_s;
}

static int64_t held_in_any_tier(const question *q, const worker *w) {
    held has = held_by(&q->asked, w);
    return has.device + has.host + has.disk + has.object;
}

void find_candidates(const cost_model *c, const question *q, const fleet *f,
                     const candidates *holders, bool decode, candidates *found) {
    int64_t most = -1;
    found->count = 0;
    uint32_t tried = f->count < q->max_tried ? f->count : (uint32_t)q->max_tried;
    for (uint32_t i = 0; i < tried && found->count < q->num_idle; i++) {
        worker *w = f->ranked[i].worker;
        if (!kvr_is_usable(c, q, w, decode))
            continue;
        found->workers[found->count++] = w;
        int64_t has = held_in_any_tier(q, w);
        most = has > most ? has : most;
    }
    for (uint32_t i = 0; i < holders->count && i < q->num_holders; i++) {
        worker *w = holders->workers[i];
        uint32_t known = 0;
        if (held_in_any_tier(q, w) <= most)
            break;
        while (known < found->count && found->workers[known] != w)
            known++;
        if (known == found->count && found->count < MAX_CANDIDATES &&
            kvr_is_usable(c, q, w, decode))
            found->workers[found->count++] = w;
    }
}

void find_fetch_sources(const cost_model *c, question *q, const candidates *holders) {
    fetch_source *found = q->asked.fetch_sources;
    double gains[MAX_FETCH_SOURCES];
    uint32_t count = 0;
    for (int role = 0; role < 2; role++)
        for (uint32_t i = 0; i < holders[role].count && i < q->fetch_sources_per_role; i++) {
            worker *w = holders[role].workers[i];
            if (count == MAX_FETCH_SOURCES || !is_source(q, w))
                continue;
            fetch_source source = {w, held_by(&q->asked, w)};
            double gain_s = fetch_gain_s(c, &source);
            uint32_t at = count;
            if (gain_s <= 0)
                continue;
            for (; at && gains[at - 1] <= gain_s; at--) {
                if (gains[at - 1] == gain_s && num_seqs(found[at - 1].worker) <= num_seqs(w))
                    break;
                gains[at] = gains[at - 1];
                found[at] = found[at - 1];
            }
            gains[at] = gain_s;
            found[at] = source;
            count++;
        }
    q->asked.num_fetch_sources = count;
}
