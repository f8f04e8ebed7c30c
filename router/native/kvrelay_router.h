/* What Python sees of the router's native code: the prefix index, what is known of workers, and the
 * choice among them. `router.native.bindings` reads this file with cffi, which ignores the lines of
 * the preprocessor; so constants are enums. All exported symbols begin with kvr_.
 *
 * Block hashes are packed, 16 bytes each. One thread at a time; nothing here blocks.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#pragma GCC visibility push(default)

/* -- the prefix index -----------------------------------------------------------------------------
 * A worker is a slot here, a small number. What is known of a block at a slot are facts, a bit
 * each: the worker's events say that it is in that tier, or it is on its way into device memory. */

enum { DEVICE = 1, HOST = 2, DISK = 4, EXPECTED = 8 };
enum { SAID = 7 }; /* the facts that the worker itself has said */

/* What a lookup finds of each slot: how far it holds the prefix in device memory, in any memory, in
 * any tier, and in any tier by what the worker itself has said. */
enum { NUM_RUNS = 4 };

typedef struct prefix_index prefix_index;

prefix_index *kvr_index_new(uint32_t stride, uint32_t max_expected);
void kvr_index_free(prefix_index *x);

/* Take out blocks of closed slots, and expected ones whose time is over; `budget` of each. */
void kvr_index_tidy(prefix_index *x, double now, uint64_t budget);

/* A free slot for a worker; -1: all 65,535 are used. `group`: as in `kvr_index_best`. */
int64_t kvr_index_open(prefix_index *x, uint32_t group);

/* The worker is removed: lookups ignore its blocks, and later calls take them out. */
void kvr_index_close(prefix_index *x, uint32_t slot);
void kvr_index_regroup(prefix_index *x, uint32_t slot, uint32_t group);
void kvr_index_change(prefix_index *x, uint32_t slot, const uint8_t *block_hashes, uint64_t count,
                      uint32_t add, uint32_t drop);

/* Drop `facts` from all blocks of the slot. */
void kvr_index_drop_all(prefix_index *x, uint32_t slot, uint32_t facts);

/* Count blocks as in device memory until `until`. */
void kvr_index_expect(prefix_index *x, uint32_t slot, const uint8_t *block_hashes, uint64_t count,
                      double now, double until);

/* `ends`: [num_slots][NUM_RUNS], zeros; written: lengths in blocks. */
void kvr_index_lookup(prefix_index *x, double now, const uint8_t *block_hashes, uint32_t count,
                      uint32_t *ends);

/* Slots of `group` by how much of the prefix they hold in any tier, most first; among equals, those
 * that were returned longest ago. At most `limit`; returns how many. */
uint32_t kvr_index_best(prefix_index *x, const uint32_t *ends, uint32_t num_slots, uint32_t group,
                        uint32_t limit, uint16_t *found);

/* `counts`: [num_slots][3], zeros; written: how many of the blocks each slot has in each tier. */
void kvr_index_count(prefix_index *x, const uint8_t *block_hashes, uint64_t count,
                     uint32_t *counts);

/* Write the hashes of the slot's blocks in each tier that is asked for (not NULL); there is room
 * for `kvr_index_held` of them. */
void kvr_index_export(prefix_index *x, uint32_t slot, uint8_t *device, uint8_t *host,
                      uint8_t *disk);

/* Blocks of the slot with one of `facts`, which exclude each other. */
uint64_t kvr_index_held(const prefix_index *x, uint32_t slot, uint32_t facts);
uint64_t kvr_index_num_blocks(const prefix_index *x);
uint64_t kvr_index_num_bytes(const prefix_index *x);

/* What is wrong; NULL: nothing. */
const char *kvr_index_check(prefix_index *x);

/* -- prompts that wait on a worker ------------------------------------------------------------- */

enum { LEAST_MS = 2 }; /* of a prompt that should be computed by now, and is not */

typedef struct prompt prompt;

/* Prompts that are not known to be computed, with the seconds that each still needs as of `at`, in
 * the order in which they will be computed: shortest first, but one that has waited counts as
 * shorter, as in engine/cost.py. */
typedef struct {
    double at;
    prompt *prompts;
    uint32_t count, room;
} prompt_queue;

/* Of equal ones the first goes first. */
void kvr_prompts_add(prompt_queue *q, double now, uint64_t ticket, double seconds);
void kvr_prompts_correct(prompt_queue *q, double now, uint64_t ticket, double seconds);
void kvr_prompts_discard(prompt_queue *q, uint64_t ticket);
void kvr_prompts_run_down(prompt_queue *q, double now);

/* How long a prompt that takes `seconds` waits for shorter ones, and how many longer ones would
 * wait for it. */
double kvr_prompts_ahead_of(prompt_queue *q, double now, double seconds, uint32_t *num_behind);
double kvr_prompts_busy_until(prompt_queue *q, double now);
void kvr_prompts_free(prompt_queue *q);

/* -- a worker: written by `router.placement.endpoint`, read here ------------------------------- */

/* What a worker is preferred for, a bit each: any can do either. */
enum { DECODES = 1, PREFILLS = 2 };

enum { NUM_WEIGHTS = 4 }; /* of a fit, as in engine/cost.py */

/* Fields of engine.stats.WorkerInfo: each is copied from the one of its name. */
typedef struct {
    int64_t block_size, num_blocks, max_model_len, max_seq_blocks, max_num_batched_tokens;
    int64_t row_blocks, windowed_groups, window_blocks;
    double bytes_per_token;
    bool hands_over;
} worker_info;

/* Likewise of WorkerStats. Rates and weights that are 0 were not measured. */
typedef struct {
    double prefill_tokens_per_s, decode_step_s;
    double read_bytes_per_s, host_read_bytes_per_s, disk_read_bytes_per_s;
    double object_read_bytes_per_s;
    double image_token_s; /* to encode a token of an image */
    double prompt_weights[NUM_WEIGHTS], decode_weights[NUM_WEIGHTS], prompt_slowdown;
    int64_t num_free_blocks, num_wanted_blocks, num_low_blocks;
    int64_t decoding_tokens, low_decoding_tokens;
} worker_stats;

enum { MAX_TERMS = 24 }; /* of a cost */

typedef struct worker {
    uint64_t model; /* equal for workers that can use each other's KV */
    uint64_t cores; /* equal for workers that share the cores of a machine; 0: it has its own */
    worker_info info;
    worker_stats stats; /* the last ones, and what has been released since */
    int64_t slot; /* in the prefix index; -1: none */
    int64_t store_slot; /* likewise, of the object store that it can read; -1: none */
    double last_seen_at, excluded_until, typical_decoding;
    double beside; /* as `stalled` has it of all others on the same cores; as of the last choice */
    int64_t decoding_beside; /* sequences that decode there now; likewise */
    struct worker *next_beside; /* the next worker on the same cores, in a ring; likewise */
    double typical_prefilling; /* share of the time in which it has prompts to compute */
    int64_t chosen_at; /* number of the decision that last took it */
    int64_t num_booked, max_booked;
    int64_t own_tokens, own_decoding, uncounted_blocks, other_tokens, other_seqs;
    int64_t held_blocks; /* that a request which was sent there waits for; 0: none does */
    /* Low classes of service, among those above: what they have is as good as free to others. */
    int64_t low_booked, low_decoding, low_uncounted_blocks;
    double terms[MAX_TERMS]; /* seconds of those that Python computes; as of the last choice */
    prompt_queue *prompts;
    const uint64_t *images; /* keys of those whose embeddings it has, ascending */
    int64_t num_images;
    int64_t ranked_busy, ranked_chosen_at, tie_break; /* its key in its fleet */
    int64_t roles;
    bool alive, has_stats, is_ranked;
} worker;

/* What a worker does for a request, a bit each: terms that Python computes count where it does. */
enum { AT_COMPUTING = 1, AT_DECODING = 2, AT_READING = 4 }; /* reading: KV of who computed */

/* `fleet`: rates of workers that have measured none. */
typedef struct {
    worker_stats fleet;
    uint32_t terms_at[MAX_TERMS]; /* where each counts */
    double handoff_s, stalled_at_least, prefilling_at_least;
    double low_priority_factor; /* factor of prompts for others while sequences decode on the same cores */
    int64_t free_tokens;
    double evicted_token_s; /* what a token that makes way on a device costs to read back, on average */
} cost_model;

/* -- a fleet: workers that are preferred for one role, least busy first ------------------------- */

typedef struct fleet fleet;

fleet *kvr_fleet_new(void);
void kvr_fleet_free(fleet *f);
void kvr_fleet_drop(fleet *f, worker *w);

/* Rank the worker by what is known of it now. */
void kvr_fleet_update(fleet *f, worker *w, const cost_model *c, double now);

/* The workers, least busy first. `found` has room for all. */
uint32_t kvr_fleet_list(const fleet *f, worker **found);

/* Whether any of them could take one more request. */
bool kvr_fleet_has_room(const fleet *f, double now, int64_t max_inflight);

/* -- costs: see `router.placement.cost` for the terms ------------------------------------------ */

/* The full blocks of a prompt, hashed as workers of one kind do it, and what a lookup has found. */
typedef struct {
    uint64_t model;
    int64_t block_size, unit; /* unit: tokens that one hash stands for */
    uint32_t mark_group; /* whose block at a prefix's end says that it can be continued; 0: none */
    const uint8_t *block_hashes;
    int64_t num_hashes;
    const uint32_t *ends; /* [num_slots][NUM_RUNS] */
    int64_t num_slots;
} hashed_prompt;

/* Tokens of the prefix that a worker holds: in device memory, then in host memory, then on disk,
 * and then those that the object store has beyond.
 * `said`: as far as the worker's own events say so, in whatever tier; only that can be fetched. */
typedef struct {
    int64_t device, host, disk, said, object;
} held;

enum { MAX_FETCH_SOURCES = 64 };

/* A worker that others may fetch KV from. */
typedef struct {
    worker *worker;
    held held;
} fetch_source;

/* A worker that reads KV of another, and often gets none: it waits, and computes it after all. */
typedef struct {
    worker *source, *reader;
    bool fetches; /* a prefix that the source holds; else a prompt that it computes */
    double lost_share, wait_s;
} kv_link;

/* An image in a prompt. */
typedef struct {
    uint64_t key;
    int64_t end, num_tokens; /* end: the index behind its last one */
} placed_image;

/* What is asked for, and where its KV is. */
typedef struct {
    double now, output_tokens;
    double others_output; /* tokens of a request, on average */
    int64_t num_tokens;
    bool resumes; /* its client has tokens: no memory is held for others before it */
    bool is_low;  /* it is of a low class of service */
    hashed_prompt *prompts; /* one for each kind of workers */
    int64_t num_prompts;
    fetch_source fetch_sources[MAX_FETCH_SOURCES];
    int64_t num_fetch_sources;
    const kv_link *links; /* the bad ones */
    int64_t num_links;
    const placed_image *images;
    int64_t num_images;
} work;

/* The terms that are computed here have names; those that Python computes follow them. */
typedef union {
    struct {
        double queue, load, fetch, prefill, transfer, lost, memory, decode, delay, stall, crowd;
        double evict, images;
    };
    double terms[MAX_TERMS];
} seconds;

/* Tokens whose KV is computed, loaded from the worker's lower tiers, fetched from a peer. */
typedef struct {
    int64_t computed, loaded, fetched;
    double load_s, fetch_s;
    worker *fetch_from; /* NULL: nothing is fetched */
} intake;

typedef struct {
    seconds seconds;
    intake intake;
    double computing_s; /* of the prompt, if nothing else is to be done */
} placement;

/* -- a choice ---------------------------------------------------------------------------------- */

enum { MAX_CANDIDATES = 256 }; /* of a role */

typedef struct {
    worker *workers[MAX_CANDIDATES];
    uint32_t count;
} candidates;

/* `given`: the candidates, their order, and the sources of KV were not found by `kvr_find`. */
typedef struct {
    work asked;
    int64_t total_tokens; /* that the request may come to have */
    int64_t max_inflight;
    double max_memory_wait_s, probe_after_s;
    worker **avoid; /* those that it leaves last: their KV may be fetched */
    int64_t num_avoid, num_left;
    bool trusting, given; /* trusting: silent workers and those to be avoided are usable */
    bool alone;           /* who decodes computes the prompt too */
    bool patient;         /* it is sent out, however long it waits for memory there */
    candidates decodes, prefills;
    int64_t num_idle, num_holders, max_tried, fetch_sources_per_role;
    int64_t num_candidates; /* of a role, at most */
} question;

typedef struct {
    worker *worker;
    int64_t prefill; /* number of the prefill option; -1: the prompt is computed here */
    held held;
    placement placement;
    int64_t cost_ms;
} option;

/* Options, each kind best first: [2 * num_candidates] of who computes the prompt for another
 * worker, then [3 * num_candidates] of who decodes. */
typedef struct {
    int64_t num_decodes, num_prefills;
    option options[];
} answer;

typedef struct chooser chooser;

chooser *kvr_chooser_new(prefix_index *index);
void kvr_chooser_free(chooser *x);

/* The worker with this slot; NULL: none any more. */
void kvr_chooser_put(chooser *x, uint32_t slot, worker *w);

/* Look up how much of what is asked each worker holds. The following functions are about this
 * question, until the next one. */
void kvr_look_up(chooser *x, question *q);

/* Workers of a role that hold some of the prompt, most first. `found`: [MAX_CANDIDATES]. */
uint32_t kvr_find_holders(chooser *x, const question *q, uint32_t role, worker **found);

/* Whether it can take the request now, and would have room for its KV soon: to decode it, or else
 * to compute its prompt for another worker. */
bool kvr_is_usable(const cost_model *c, const question *q, const worker *w, bool decodes);

/* Make the candidates of `q` the holders of most of the prefix and the least busy workers. */
void kvr_find(chooser *x, const cost_model *c, const fleet *decodes, const fleet *prefills,
              question *q);

/* Write to `a` the ways in which the candidates can serve the request. */
void kvr_choose(const chooser *x, const cost_model *c, question *q, answer *a);

/* `w` is booked for what was asked: its rank in its fleet changes, and the first of the blocks that
 * it lacks, from number `from` on, are expected there until `until`. */
void kvr_expect(chooser *x, const question *q, const cost_model *c, fleet *f, worker *w,
                int64_t from, double until);

#pragma GCC visibility pop
